"""Files of earlier code stay usable: each `fixtures/run_*`, and deltas of every format.

The fingerprints of a run must still be those that today's code computes, so that every stage is
reused. `run_before_rooms` was made at commit 25e09ee, `run_0_1_calibrated` for 0.1.0; `python
tests/fixtures/generate.py` makes the next one.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

import dualsft
from dualsft.errors import ConfigError
from dualsft.model.delta import COMPACT, Delta
from dualsft.runs import pipeline
from dualsft.storage.manifest import FORMAT_VERSION
from dualsft.system.progress import Reporter

FIXTURES = Path(__file__).parent / "fixtures"
RUNS = sorted(path.name for path in FIXTURES.glob("run_*"))
PATHS = ["model.path=model", "data.path=rows.jsonl"]  # asked for: this user did not write the file
STAGES = ("split", "warmup", "gradients", "scores", "selection", "finetune", "evaluation")


@pytest.fixture(params=RUNS)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy; its config.yaml names the model and the rows beside it."""
    shutil.copytree(FIXTURES / request.param, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old/run"


def stage_files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("[1-7]_*/**/*"))
        if path.is_file()
    }


def test_every_stage_of_an_earlier_run_is_reused(folder: Path) -> None:
    before, said = stage_files(folder), list[str]()
    assert len(before) > 20
    pipeline.run(dualsft.load("run/config.yaml", PATHS), folder, None, Reporter(said.append))
    assert [line for line in said if "] reused:" in line] == [
        f"[{stage}] reused: nothing it depends on has changed" for stage in STAGES
    ]
    after = stage_files(folder)
    assert after.pop("6_finetune/model/README.md", None), "the card, which no manifest lists"
    before.pop("6_finetune/model/README.md", None)
    assert after == before


def test_another_budget_computes_from_the_selection_on(folder: Path) -> None:
    said: list[str] = []
    config = dualsft.load("run/config.yaml", [*PATHS, "select.data_budget=5"])
    pipeline.run(config, folder, "selection", Reporter(said.append))
    done = [line.partition("]")[0].strip("[") for line in said if "] done in" in line]
    assert done == ["selection"]


def test_there_is_a_fixture_of_every_format() -> None:
    assert RUNS == ["run_0_1_calibrated", "run_before_rooms"]
    assert FORMAT_VERSION == 1, "make a fixture of the new format (tests/fixtures/generate.py)"
    assert COMPACT == "dualsft-delta-3", "add a file to fixtures/deltas"


@pytest.mark.parametrize("name", ["1", "2", "3", "3_added"])
def test_a_delta_of_every_format_is_read(name: str) -> None:
    delta = Delta.load(FIXTURES / f"deltas/{name}.safetensors")
    assert delta.indices["w"].tolist() == [0, 3, 300, 70_000]
    assert delta.values["w"].tolist() == [0.5, -1.0, 2.0, 0.25]
    assert (delta.base_model, delta.base_hash) == ("m", "h")
    assert delta.added_in == ("bfloat16" if name == "3_added" else "")


def test_a_delta_of_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    content = (FIXTURES / "deltas/2.safetensors").read_bytes()
    path = tmp_path / "delta.safetensors"
    path.write_bytes(content.replace(b"dualsft-delta-2", b"dualsft-delta-4"))
    with pytest.raises(ConfigError, match=r"dualsft-delta-4.*newer.*upgrade dualsft"):
        Delta.load(path)
