"""Run folders of earlier code stay usable: `fixtures/run_before_rooms` was made at commit 25e09ee.

Its fingerprints must still be those that today's code computes, so that every stage is reused.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

import dualsft
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter

FIXTURE = Path(__file__).parent / "fixtures/run_before_rooms"
PATHS = ["model.path=model", "data.path=rows.jsonl"]  # asked for: this user did not write the file
STAGES = ("split", "warmup", "gradients", "scores", "selection", "finetune", "evaluation")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy; its config.yaml names the model and the rows beside it."""
    shutil.copytree(FIXTURE, tmp_path / "old")
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
    assert stage_files(folder) == before


def test_another_budget_computes_from_the_selection_on(folder: Path) -> None:
    said: list[str] = []
    config = dualsft.load("run/config.yaml", [*PATHS, "select.data_budget=5"])
    pipeline.run(config, folder, "selection", Reporter(said.append))
    done = [line.partition("]")[0].strip("[") for line in said if "] done in" in line]
    assert done == ["selection"]
