"""Bit flips and truncations anywhere in a run folder: found before anything is used."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import small_run
from faults import content
from places import place
from safetensors.torch import load_file

from dualsft.config import settings
from dualsft.errors import ConfigError, RunError
from dualsft.lab.report.markdown import write_report
from dualsft.model.delta import Delta
from dualsft.runs import pipeline
from dualsft.runs.folder import Fingerprint, RunDir
from dualsft.runs.preflight import FOLDERS
from dualsft.storage.manifest import read_manifest
from dualsft.storage.resume import Pieces
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter

NEVER_READ = {"metrics.jsonl", "report.md", "report.html", "model_card.md", ".lock"}
NEVER_READ |= {"6_finetune/model/README.md"}
"""Written for people; no stage reads them, and the report is made anew at every run."""


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path], corpus: Path
) -> tuple[Path, list[str]]:
    """A finished run with a round of re-selection, everything kept, and a stage's saved pieces."""
    words = [*small_run(model_folder("llama"), corpus), "score.keep=all", "select.rounds=1"]
    run = tmp_path_factory.mktemp("damage") / "run"
    finish(run, words)
    return run, words


def finish(run: Path, words: Sequence[str]) -> None:
    pipeline.run(settings.load(None, list(words)), run, None, Reporter(lambda _: None))
    pieces = Pieces(run / "2_warmup.work", "abc", every=0)
    pieces.save("warmup", load_file(run / "2_warmup/curvature.safetensors"), {"steps": 3})


def files_of(run: Path) -> list[Path]:
    found = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    never = {run / name for name in NEVER_READ}
    return [path for path in found if path not in never]


def noticed(run: Path, file: Path, fingerprints: dict[str, Fingerprint]) -> bool:
    """Whether the way in which this file is used would find the damage first."""
    folder = file.relative_to(run).parts[0]
    if folder == "config.yaml":
        try:
            settings.load(str(file))
        except ConfigError:
            return True
        return False
    if folder == "manifest.json":
        return bool(read_manifest(place(file))[1])
    if folder.endswith(".work"):
        return Pieces(run / folder, "abc").load("warmup") is None
    return not RunDir(run).stage_state(folder, fingerprints[folder]).ready


def fingerprints_of(run: Path) -> dict[str, Fingerprint]:
    found = {}
    for folder in FOLDERS.values():
        stated = read_manifest(place(run / folder / "manifest.json"))[0]["fingerprint"]
        found[folder] = Fingerprint(stated["settings"], stated["reads"])
        assert RunDir(run).stage_state(folder, found[folder]).ready
    return found


def damaged(file: Path, rng: random.Random, kind: str) -> bytes:
    """The file with one bit flipped, or cut at a random place; returns what it was."""
    before = file.read_bytes()
    if kind == "flip":
        data, bit = bytearray(before), rng.randrange(8 * len(before))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
    else:
        file.write_bytes(before[: rng.randrange(len(before))])
    return before


@pytest.mark.parametrize(("kind", "count"), [("flip", 500), ("cut", 100)])
def test_damage_is_found_before_use(
    finished: tuple[Path, list[str]], kind: str, count: int
) -> None:
    damage_many(finished[0], kind, count, random.Random(kind))


def damage_many(run: Path, kind: str, count: int, rng: random.Random) -> None:
    """Every file of the folder in turn, small and large alike; then the rest by chance."""
    fingerprints, files = fingerprints_of(run), files_of(run)
    assert len(files) > 40
    turns = [*files, *rng.choices(files, k=count)][: max(count, len(files))]
    silent: Counter[str] = Counter()
    for file in turns:
        before = damaged(file, rng, kind)
        if not noticed(run, file, fingerprints) and not harmless(file, run, before):
            silent[str(file.relative_to(run))] += 1
        file.write_bytes(before)
    assert not silent and len(turns) >= count


def harmless(file: Path, run: Path, before: bytes) -> bool:
    """A flip in the comment over config.yaml leaves every setting as it was."""
    if file != run / "config.yaml":
        return False
    return file.read_bytes().partition(b"\n")[2] == before.partition(b"\n")[2]


def rerun(run: Path, words: Sequence[str]) -> list[str]:
    said: list[str] = []
    pipeline.run(settings.load(None, list(words)), run, None, Reporter(said.append))
    return said


@pytest.mark.parametrize("folder", FOLDERS.values())
@pytest.mark.parametrize("kind", ["flip", "cut", "missing", "manifest", "link", "swapped"])
def test_a_damaged_stage_is_made_again_and_nothing_else(
    finished: tuple[Path, list[str]], tmp_path: Path, folder: str, kind: str
) -> None:
    source, words = finished
    run = tmp_path / "run"
    shutil.copytree(source, run)
    expected = content(run)
    names = sorted(name for name in expected if name.startswith(f"{folder}/"))
    file = run / random.Random(folder + kind).choice(names)
    if kind == "missing":
        file.unlink()
    elif kind == "manifest":
        damaged(run / folder / "manifest.json", random.Random(1), "flip")
    elif kind == "link":
        elsewhere = tmp_path / "elsewhere"
        shutil.move(file, elsewhere)
        file.symlink_to(elsewhere)
    elif kind == "swapped":
        other = run / next(n for n in expected if not n.startswith(f"{folder}/"))
        shutil.copyfile(other, file)
    else:
        damaged(file, random.Random(2), kind)
    said = rerun(run, words)
    again = [line for line in said if "] again" in line]
    stage = folder.partition("_")[2]
    assert len(again) == 1 and again[0].startswith(f"[{stage}] again (")
    assert content(run) == expected


def test_a_missing_run_manifest_is_no_reason_to_start_over(
    finished: tuple[Path, list[str]], tmp_path: Path
) -> None:
    source, words = finished
    run = tmp_path / "run"
    shutil.copytree(source, run)
    (run / "manifest.json").unlink()
    assert sum("] reused" in line for line in rerun(run, words)) == len(FOLDERS)
    assert not read_manifest(place(run / "manifest.json"))[1]


def test_the_report_refuses_damaged_numbers(
    finished: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    damaged(run / "5_selection/summary.json", random.Random(1), "flip")
    damaged(run / "2_warmup/manifest.json", random.Random(1), "cut")
    with pytest.raises(RunError) as refused:
        write_report(place(run))
    assert "5_selection: summary.json has a different SHA-256" in str(refused.value)
    assert "2_warmup: manifest.json is damaged" in str(refused.value)


def test_a_damaged_delta_is_not_merged(finished: tuple[Path, list[str]], tmp_path: Path) -> None:
    """A delta travels alone, so it carries its own hash: 200 flips, none unnoticed."""
    source = finished[0] / "6_finetune/delta.safetensors"
    file = tmp_path / "delta.safetensors"
    shutil.copyfile(source, file)
    assert Delta.load(file).num_entries > 0
    rng = random.Random(9)
    for _ in range(200):
        before = damaged(file, rng, "flip")
        with pytest.raises(ConfigError):
            Delta.load(file)
        file.write_bytes(before)


def test_settings_are_judged_by_the_bytes_that_are_used(
    finished: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml of a stranger, replaced by this user's own right after it was read."""
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    own, read = (run / "config.yaml").read_bytes(), RunPath.read_bytes
    (run / "config.yaml").write_bytes(own.partition(b"\n")[2].replace(b"lam: 0.8", b"lam: 0.9"))

    def replaced_after(path: RunPath, *limit: int) -> bytes:
        content = read(path, *limit)
        (run / "config.yaml").write_bytes(own)
        return content

    monkeypatch.setattr(RunPath, "read_bytes", replaced_after)
    with pytest.raises(ConfigError, match="which this user did not write here"):
        settings.load(RunPath(run) / "config.yaml")
    assert settings.load(RunPath(run) / "config.yaml").score.lam == 0.8


def test_a_changed_config_of_a_run_is_refused_and_an_edited_copy_is_not(
    finished: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    text = (run / "config.yaml").read_text(encoding="utf-8")
    edited = text.replace("lam: 0.8", "lam: 0.9")
    assert edited != text
    (run / "config.yaml").write_text(edited, encoding="utf-8")
    with pytest.raises(ConfigError, match="changed or damaged since the run wrote it"):
        settings.load(str(run / "config.yaml"))
    (tmp_path / "mine.yaml").write_text(edited, encoding="utf-8")
    assert settings.load(str(tmp_path / "mine.yaml")).score.lam == 0.9
    (run / "config.yaml").write_text(edited.partition("\n")[2], encoding="utf-8")
    with pytest.raises(ConfigError, match="which this user did not write here"):
        settings.load(str(run / "config.yaml"))
    paths = [word for word in finished[1] if word.startswith(("model.path=", "data.path="))]
    assert settings.load(str(run / "config.yaml"), paths).score.lam == 0.9
