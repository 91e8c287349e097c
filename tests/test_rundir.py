"""The run folder: whole or absent, verified before use, and a reason for every re-run."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualsft.errors import ConfigError, RunError
from dualsft.runs import folder as rundir_module
from dualsft.runs.folder import RunDir
from dualsft.runs.preflight import reading
from dualsft.storage import manifest
from dualsft.storage.manifest import (
    Fingerprint,
    atomic_write_bytes,
    atomic_write_text,
    render_manifest,
    sha256_file,
)
from dualsft.system import paths as run_paths
from dualsft.system import usage
from dualsft.system.paths import RunPath, wrong_kind
from dualsft.system.usage import PeakMemory

OLD = Fingerprint({"score.lam": 0.8, "score.step": "sgd"}, {"warmup": "aaa"})
NEW = Fingerprint({"score.lam": 0.5, "score.step": "sgd"}, {"warmup": "aaa"})
STAGE = "4_scores"
Damage = Callable[[Path], None]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "my run ü 数据").create()


def write(run: RunDir, fingerprint: Fingerprint, text: str, folder: str = STAGE) -> None:
    with run.write_stage(folder, fingerprint) as part:
        (part / "summary.json").write_text(text)
        (part.path / "deep er" / "ü").mkdir(parents=True)
        (part / "deep er/ü/数.bin").write_bytes(b"\x00\x01" * 5000)
        (part / "empty").location.touch()


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def names(run: RunDir) -> list[str]:
    return sorted(name for name in os.listdir(run.path.location) if name[0].isdigit())


def status(run: RunDir, fingerprint: Fingerprint = OLD, folder: str = STAGE) -> str:
    return run.stage_state(folder, fingerprint).status


def fail(*_: object, **__: object) -> None:
    raise OSError("no space left")


# --- a stage --------------------------------------------------------------------------------------


def test_a_stage_is_missing_then_ready_then_stale(run: RunDir) -> None:
    assert status(run) == "missing" and run.stage_state(STAGE, OLD).reasons == ()
    write(run, OLD, "one")
    state = run.stage_state(STAGE, OLD)
    assert state.ready and state.reasons == ()
    stale = run.stage_state(STAGE, NEW)
    assert (stale.status, stale.reasons) == ("stale", ("score.lam: 0.8 -> 0.5",))
    assert names(run) == [STAGE]
    write(run, NEW, "two")
    assert status(run, NEW) == "ready" and status(run, OLD) == "stale"
    assert (run.stage_path(STAGE) / "summary.json").read_text() == "two"
    assert names(run) == [STAGE]


def test_the_manifest_can_be_recomputed_by_anyone(run: RunDir) -> None:
    write(run, OLD, "one")
    manifest = json.loads((run.stage_path(STAGE) / "manifest.json").read_text())
    content = tree(run.stage_path(STAGE).location)
    del content["manifest.json"]
    assert set(content) == {"summary.json", "deep er/ü/数.bin", "empty"}
    assert manifest["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    }
    both = {"reads": {"warmup": "aaa"}, "settings": {"score.lam": 0.8, "score.step": "sgd"}}
    text = json.dumps(both, sort_keys=True, separators=(",", ":"))
    assert manifest["fingerprint"] == {"hash": hashlib.sha256(text.encode()).hexdigest(), **both}
    assert manifest["stage"] == "scores" and manifest["format_version"] == 1
    assert manifest["seconds"] >= 0 and manifest["peak_memory"]["rss_bytes"] > 0
    assert set(manifest["versions"]) == {"python", "dualsft", "torch", "transformers"}


def test_facts_and_measures_of_a_stage(run: RunDir) -> None:
    with run.write_stage(STAGE, OLD) as writer:
        (writer / "a").write_text("x")
        assert (writer / "x").parent == writer.path and writer.path.name == f"{STAGE}.part"
        writer.note({"examples": np.int64(3), "loss": math.nan, "list": (1, 2.5)})
        writer.note({"more": True})
    assert writer.seconds > 0 and writer.peak_memory > 0
    manifest = json.loads((run.stage_path(STAGE) / "manifest.json").read_text())
    assert manifest["facts"] == {"examples": 3, "loss": "nan", "list": [1, 2.5], "more": True}


def test_the_run_manifest_summarises_the_stages(run: RunDir) -> None:
    write(run, OLD, "one", "1_split")
    write(run, NEW, "two", "2_warmup")
    top = json.loads((run.path / "manifest.json").read_text())
    assert top["format_version"] == 1 and top["platform"] and top["versions"]["python"]
    assert list(top["stages"]) == ["1_split", "2_warmup"]
    assert top["stages"]["2_warmup"]["fingerprint"] == NEW.hash
    assert set(top["stages"]["1_split"]) == {
        *("stage", "fingerprint", "seconds", "peak_memory", "finished")
    }
    (run.path / "manifest.json").write_text("damaged")
    RunDir(run.path).create()
    assert json.loads((run.path / "manifest.json").read_text()) == top


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("first", [True, False])
def test_a_failed_write_leaves_what_was_there(
    run: RunDir, error: type[BaseException], first: bool
) -> None:
    if not first:
        write(run, OLD, "one")
    before = {name: data for name, data in tree(run.path.location).items() if name != ".lock"}
    with pytest.raises(error, match="half way"), run.write_stage(STAGE, NEW) as part:
        (part / "summary.json").write_text("half")
        raise error("half way")
    assert {n: d for n, d in tree(run.path.location).items() if n != ".lock"} == before
    assert names(run) == [] if first else names(run) == [STAGE]
    assert status(run) == ("missing" if first else "ready")


@pytest.mark.parametrize("step", ["fsync", "sha256_file", "atomic_write_text"])
def test_a_failed_seal_leaves_the_old_stage(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write(run, OLD, "one")
    before = tree(run.stage_path(STAGE).location)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        owner = RunPath if step == "fsync" else manifest
        patch.setattr(owner, step, fail)
        write(run, NEW, "two")
    assert tree(run.stage_path(STAGE).location) == before and names(run) == [STAGE]
    assert status(run) == "ready"


def test_a_folder_that_is_swapped_for_a_link_while_a_library_writes(
    run: RunDir, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with (
        pytest.raises(RunError, match="model is a symlink"),
        run.write_stage(STAGE, OLD) as part,
        (part / "model").made() as path,
    ):
        (part / "model").location.rename(tmp_path / "aside")
        (part / "model").location.symlink_to(outside)
        (path / "weights").write_bytes(b"x")
    assert not list(outside.iterdir()) and (tmp_path / "aside/weights").is_file()


def test_nobody_else_can_plant_a_link_where_a_library_writes(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    os.umask(previous := os.umask(0o002))
    with run.write_stage(STAGE, OLD) as part:
        os.umask(0o002)  # the group may write to the run folder
        try:
            with (part / "model").made() as path:
                assert mode(path) == 0o700
                (path / "weights").write_bytes(b"x")
            assert mode((part / "model").location) == 0o775
        finally:
            os.umask(previous)
        change, private = os.fchmod, part / "private"

        def planted_first(folder: int, mode: int) -> None:
            (private.location / "weights").symlink_to(tmp_path / "outside")
            change(folder, mode)

        monkeypatch.setattr(os, "fchmod", planted_first)
        with pytest.raises(RunError, match="something else writes here"), private.made():
            raise AssertionError("a folder that is not empty was given to a library")
        monkeypatch.undo()
        private.remove()


def test_a_stage_cannot_contain_symlinks(run: RunDir) -> None:
    with pytest.raises(RunError, match="link is a symlink"), run.write_stage(STAGE, OLD) as part:
        (part / "link").location.symlink_to("/etc")
    assert names(run) == []


# --- after a crash: the states on disk that a kill at any point leaves behind ---------------------


def crash_states(run: RunDir) -> tuple[Path, Path]:
    """Two finished stages, kept beside the run: what was there before, and its successor."""
    kept = run.path.location.parent
    write(run, OLD, "one")
    shutil.copytree(run.stage_path(STAGE).location, kept / "before")
    write(run, NEW, "two")
    shutil.copytree(run.stage_path(STAGE).location, kept / "after")
    shutil.rmtree(run.stage_path(STAGE).location)
    return kept / "before", kept / "after"


def put(run: RunDir, source: Path, suffix: str) -> Path:
    return Path(shutil.copytree(source, (run.path / f"{STAGE}{suffix}").location))


def test_killed_while_writing(run: RunDir) -> None:
    before, after = crash_states(run)
    put(run, before, "")
    part = put(run, after, ".part")
    os.rename(part / "manifest.json", part / "leftover")
    assert status(run) == "ready" and status(run, NEW) == "stale"
    write(run, NEW, "three")
    assert names(run) == [STAGE] and status(run, NEW) == "ready"
    assert not (run.stage_path(STAGE) / "leftover").exists()


def spoil(part: Path) -> None:
    (part / "summary.json").write_text("TWO")


def cut(final: Path) -> None:
    (final / "empty").unlink()


@pytest.mark.parametrize(
    ("before_at", "after_at", "harm", "kept"),
    [
        (None, ".part", None, "after"),  # after the seal of the first write
        ("", ".part", None, "before"),  # before the first rename
        (".old", ".part", None, "after"),  # between the renames
        (".old", ".part", spoil, "before"),  # and the new one is damaged
        (".old", "", None, "after"),  # before the old one was removed
        (".old", "", cut, "before"),  # and the new one is damaged
    ],
)
def test_killed_at_a_step_of_the_swap(
    run: RunDir, before_at: str | None, after_at: str, harm: Damage | None, kept: str
) -> None:
    """The folders that lie there under these suffixes; the newest whole one is taken."""
    before, after = crash_states(run)
    if before_at is not None:
        put(run, before, before_at)
    newer = put(run, after, after_at)
    if harm is not None:
        harm(newer)
    assert status(run, NEW if kept == "after" else OLD) == "ready"
    if (after_at, kept) != (".part", "before"):  # else the .part waits for the next write
        assert names(run) == [STAGE]
    expected = after if kept == "after" else before
    assert tree(run.stage_path(STAGE).location) == tree(expected)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rename_that_fails_loses_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    write(run, OLD, "one")
    calls: list[Any] = []
    rename = RunPath.rename

    def fail(source: RunPath, target: RunPath) -> None:
        calls.extend([target] * (not source.name.endswith(".tmp")))  # stages, not single files
        if len(calls) == failing + 1:
            raise OSError("rename failed")
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="rename failed"):
        patch.setattr(RunPath, "rename", fail)
        write(run, NEW, "two")
    expected = OLD if failing == 0 else NEW
    assert status(run, expected) == "ready"


# --- damage ---------------------------------------------------------------------------------------


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def replace_by_link(folder: Path) -> None:
    os.rename(folder / "summary.json", folder.parent / "elsewhere")
    (folder / "summary.json").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda f: flip(f / "summary.json", 0, 0), "summary.json has a different SHA-256"),
        (
            lambda f: flip(f / "deep er/ü/数.bin", 9999, 7),
            "deep er/ü/数.bin has a different SHA-256",
        ),
        (lambda f: os.truncate(f / "deep er/ü/数.bin", 9999), "数.bin has 9999 bytes, not 10000"),
        (lambda f: (f / "empty").write_text("x"), "empty has 1 bytes, not 0"),
        (lambda f: (f / "summary.json").unlink(), "summary.json is missing"),
        (lambda f: shutil.rmtree(f / "deep er"), "deep er/ü/数.bin is missing"),
        (replace_by_link, "summary.json is a symlink"),
        (lambda f: (f / "extra").symlink_to("/etc"), "extra is a symlink"),
        (lambda f: os.mkfifo(f / "pipe"), "pipe is a pipe, not a regular file"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text(""), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_text("[" * 10**5), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_text("[1]"), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_text('{"a": NaN}'), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is damaged"),
        (lambda f: os.truncate(f / "manifest.json", 100), "manifest.json is damaged"),
    ],
)
def test_damage_is_named(run: RunDir, harm: Damage, reason: str) -> None:
    write(run, OLD, "one")
    harm(run.stage_path(STAGE).location)
    state = run.stage_state(STAGE, OLD)
    assert state.status == "corrupt" and not state.ready
    assert any(reason in text for text in state.reasons), state.reasons
    write(run, OLD, "one")
    assert status(run) == "ready" and names(run) == [STAGE]


def test_a_sealed_manifest_of_something_else_is_no_stage(run: RunDir) -> None:
    write(run, OLD, "one")
    path = run.stage_path(STAGE) / "manifest.json"
    path.write_text(render_manifest({"format_version": 1, "files": {"../../x": 3}}))
    assert run.stage_state(STAGE, OLD).reasons == ("manifest.json does not describe a stage",)


def test_a_manifest_cannot_point_outside(run: RunDir) -> None:
    write(run, OLD, "one")
    path = run.stage_path(STAGE) / "manifest.json"
    body = json.loads(path.read_text())
    del body["seal"]
    outside = run.path / "config.yaml"
    outside.write_text("seed: 1")
    body["files"]["../config.yaml"] = {"size": 7, "sha256": sha256_file(outside)}
    path.write_text(render_manifest(body))
    assert run.stage_state(STAGE, OLD).reasons == ("../config.yaml is missing",)


def test_extra_files_are_ignored_but_mentioned(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    write(run, OLD, "one")
    (run.stage_path(STAGE) / "note.txt").write_text("mine")
    with caplog.at_level("INFO", "dualsft"):
        assert run.stage_state(STAGE, OLD).ready
    assert "ignoring files that the stage did not write: note.txt" in caplog.text


def test_a_linked_stage_folder_is_refused_and_replaced(run: RunDir) -> None:
    write(run, OLD, "one")
    elsewhere = run.path.location.parent / "elsewhere"
    os.rename(run.stage_path(STAGE).location, elsewhere)
    run.stage_path(STAGE).location.symlink_to(elsewhere)
    assert "is a symlink" in run.stage_state(STAGE, OLD).reasons[0]
    write(run, OLD, "two")
    assert status(run) == "ready" and (elsewhere / "summary.json").read_text() == "one"


def test_a_newer_format_is_refused_by_name(run: RunDir) -> None:
    write(run, OLD, "one")
    for path in (run.stage_path(STAGE) / "manifest.json", run.path / "manifest.json"):
        body = json.loads(path.read_text()) | {"format_version": 7}
        del body["seal"]
        text, _ = path.read_text(), path.write_text(render_manifest(body))
        with pytest.raises(RunError, match=r"manifest\.json: format_version 7 is newer than 1"):
            RunDir(run.path).create()
        path.write_text(text)
    (run.stage_path(STAGE) / "manifest.json").write_text('{"format_version": 2}')
    assert status(run) == "corrupt", "a number without its seal is damage, not a newer format"


# --- fingerprints ---------------------------------------------------------------------------------


def explain(old: Fingerprint, new: Fingerprint) -> list[str]:
    return new.explain(json.loads(json.dumps({"fingerprint": old.as_dict()})))


def test_the_reasons_are_readable() -> None:
    old = Fingerprint(
        {"score.lam": 0.8, "select.data_budget": 1, "gone": None, "kept": [1], "hash": "a" * 64},
        {"warmup": "aaa", "split": "s", "gone": "g"},
    )
    new = Fingerprint(
        {
            **{"score.lam": 0.5, "select.data_budget": 1.0, "kept": [1], "hash": "b" * 64},
            **{"score.step": "adam", "on": True},
        },
        {"warmup": "bbb", "split": "s", "new": "n"},
    )
    assert explain(old, new) == [
        "score.lam: 0.8 -> 0.5",
        "select.data_budget: 1 -> 1.0",
        "hash: aaaaaaaaaaaaaaaa… -> bbbbbbbbbbbbbbbb…",
        "score.step: not set -> adam",
        "on: not set -> true",
        "gone: null -> not set",
        "reads warmup, which changed",
        "now reads new",
        "no longer reads gone",
    ]


# --- the folder itself ----------------------------------------------------------------------------


def test_create_takes_up_a_run_and_refuses_anything_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a" / "b").create()
    write(run, OLD, "one")
    assert status(RunDir(run.path).create()) == "ready"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for other in (tmp_path / "mine", run.stage_path(STAGE)):
        with pytest.raises(ConfigError, match="neither empty nor a run folder"):
            RunDir(other).create()
    with pytest.raises(ConfigError, match="is not a folder"):
        RunDir(tmp_path / "mine" / "thesis.tex").create()
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".manifest.json.1.tmp").write_text("left by a crash")
    RunDir(tmp_path / "hidden").create()


def test_atomic_writes_keep_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a ü.txt"
    atomic_write_text(path, "eins ü")
    assert path.read_bytes() == "eins ü".encode()
    atomic_write_bytes(path, b"zwei")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
            patch.setattr(run_paths.os, step, fail)
            atomic_write_bytes(path, b"drei")
        assert os.listdir(tmp_path) == ["a ü.txt"] and path.read_bytes() == b"zwei"


def test_an_atomic_write_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "keep"
    assert (tmp_path / "link").read_text() == "new" and not (tmp_path / "link").is_symlink()


def test_metrics_are_one_object_a_line(run: RunDir) -> None:
    assert run.read_metrics() == []
    run.log_metrics("warmup", step=1, loss=np.float32(0.5), text="ü\n")
    run.log_metrics("warmup", step=2, loss=math.inf)
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records == run.read_metrics()
    assert list(records[0]) == ["time", "stage", "step", "loss", "text"]
    assert records[0]["loss"] == 0.5 and records[0]["text"] == "ü\n"
    assert records[1]["stage"] == "warmup" and records[1]["loss"] == "inf"


def test_a_cut_metrics_line_spoils_no_other(run: RunDir) -> None:
    run.log_metrics("warmup", step=1)
    with open((run.path / "metrics.jsonl").location, "ab") as file:
        file.write(b'{"time": 1, "sta')
    run.log_metrics("warmup", step=2)
    assert [record["step"] for record in run.read_metrics()] == [1, 2]


def test_metrics_of_a_stranger(run: RunDir) -> None:
    """Only the end is read, and only records that a run writes."""
    lines = b"{}\n" * (2 << 20) + b'[1]\n3\n{"stage": 1}\n' + b"[" * 100_000 + b"\n"
    (run.path / "metrics.jsonl").write_bytes(lines)
    run.log_metrics("finetune", step=1)
    assert [record["step"] for record in run.read_metrics()] == [1]


# --- one writer -----------------------------------------------------------------------------------


def test_another_process_is_refused_until_the_owner_ends(run: RunDir) -> None:
    code = (
        "import sys; from dualsft.runs.folder import RunDir\n"
        "with RunDir(sys.argv[1]).lock():\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    source = Path(rundir_module.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"in use by process {owner.pid} on "), run.lock():
            pass
        owner.kill()
    with run.lock(), run.lock():
        write(run, OLD, "one")
    assert status(run) == "ready"


def test_a_reader_leaves_a_swap_in_progress_alone(run: RunDir) -> None:
    before, after = crash_states(run)
    put(run, before, ".old")
    put(run, after, ".part")
    with run.lock():
        assert status(RunDir(run.path), NEW) == "missing"
        assert names(run) == [f"{STAGE}.old", f"{STAGE}.part"]
    assert status(RunDir(run.path), NEW) == "ready"


# --- memory ---------------------------------------------------------------------------------------

BLOCK = 96 * 2**20


def touch(size: int) -> None:
    """Use new memory: an array may lie in what the process has freed and still holds."""
    with mmap.mmap(-1, size) as memory:
        memory[:: mmap.PAGESIZE] = b"1" * (size // mmap.PAGESIZE)


def test_peak_memory_is_that_of_the_block() -> None:
    with PeakMemory() as outer:
        touch(2 * BLOCK)
        with PeakMemory() as large:
            touch(BLOCK)
        with PeakMemory() as small:
            pass
    assert small.rss_bytes > 2**20 and large.rss_bytes > BLOCK
    if not small.since_start:
        assert large.rss_bytes - small.rss_bytes > BLOCK // 2
        assert outer.rss_bytes - large.rss_bytes > BLOCK // 2
    assert set(large.as_dict()) == {"rss_bytes", "since_start", "cuda_bytes"}


def test_peak_memory_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoProc(type(Path())):
        def write_text(self, *_: object, **__: object) -> int:
            raise PermissionError(str(self))

        def read_text(self, *_: object, **__: object) -> str:
            raise PermissionError(str(self))

    monkeypatch.setattr(usage, "Path", NoProc)
    with PeakMemory() as memory:
        pass
    assert memory.since_start and memory.rss_bytes > 2**20


def test_peak_memory_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {0: 10**9, 1: 10**9}

    def reset(device: int) -> None:
        peaks[device] = 0

    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        reset_peak_memory_stats=reset,
        max_memory_allocated=lambda device: peaks[device],
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    with PeakMemory() as memory:
        peaks[1] = 777
    assert memory.cuda_bytes == 777
    cuda.is_initialized = lambda: False
    with PeakMemory() as memory:
        peaks[1] = 888
    assert memory.cuda_bytes is None


@pytest.mark.parametrize("foreign", [{"name": "my app"}, [], {"stages": 1}])
def test_somebody_else_s_folder_is_left_alone(tmp_path: Path, foreign: Any) -> None:
    """A manifest.json is a common name."""
    (tmp_path / "src.js").write_text("x")
    (tmp_path / "manifest.json").write_text(json.dumps(foreign))
    with pytest.raises(ConfigError, match="neither empty nor a run folder"):
        RunDir(tmp_path).create()
    assert json.loads((tmp_path / "manifest.json").read_text()) == foreign


def test_a_refused_process_writes_nothing(run: RunDir) -> None:
    before = (run.path / "manifest.json").location.stat()
    with run.lock(), pytest.raises(RunError, match="in use by process"):
        RunDir(run.path).create()
    assert (run.path / "manifest.json").location.stat().st_ino == before.st_ino


def test_a_name_that_is_not_utf8() -> None:
    with pytest.raises(ConfigError, match="--out.*not valid UTF-8"):
        RunDir("bad\udcff").create()


def test_a_refusal_names_the_files_that_were_read(tmp_path: Path) -> None:
    """Also one that was read before, and only those of the block that failed."""
    run = RunPath(tmp_path)
    for stage in ("1_split", "4_scores"):
        (run / stage).mkdir()
        (run / stage / "summary.json").write_json({})
        (run / stage / "summary.json").read_json()
    named = r"what a run writes in 1_split/summary.json \(KeyError"
    with pytest.raises(RunError, match=named), reading(run):
        (run / "1_split/summary.json").read_json()["counts"]
    with pytest.raises(IsADirectoryError) as found:
        (run / "1_split").read_bytes()
    assert wrong_kind(found.value).startswith(f"{run / '1_split'}: is a folder")
