"""A disk that fills up or fails: what was good stays, the message names path and bytes."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Runner
from faults import Bench, Fault, changes, content
from places import place
from safetensors import SafetensorError

from dualsft.errors import RunError
from dualsft.runs import pipeline
from dualsft.storage.resume import Pieces
from dualsft.system import usage as disk
from dualsft.system.usage import check_room, storage_errno

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), errno.ENOSPC),
        (OSError(errno.EIO, "Input/output error"), errno.EIO),
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space"), 28),
        (SafetensorError("Error while serializing: I/O error: … (os error 28)"), 28),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), None),
        (ValueError("os error 28"), None),
    ],
)
def test_errors_of_the_disk_are_told_from_others(problem: Exception, expected: int | None) -> None:
    assert storage_errno(problem) == expected


def test_need_is_foreseen(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Known from shapes before a weight is loaded: nothing of the stage is begun."""
    make_run(until="split")
    free = 40_000_000
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free, used=0)
    )
    check_room(tmp_path, free - disk.SPARE_BYTES, "it")
    monkeypatch.setattr(disk, "SPARE_BYTES", free)
    loaded: list[object] = []
    monkeypatch.setattr(pipeline.warmup, "train", lambda *a, **k: loaded.append(a))
    with pytest.raises(
        RunError, match=r"2_warmup needs about [\d,]+ bytes.* reserve.* 40,000,000 bytes"
    ):
        make_run()
    assert not loaded and sorted(p.name for p in (tmp_path / "run").glob("[0-9]*")) == ["1_split"]


def test_a_full_disk_while_progress_is_saved_ends_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    pieces = Pieces(tmp_path / "s.work", "abc", every=0, say=said.append)
    assert pieces.save("walk", {}, {"done": 1})

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("dualsft.storage.resume.save_tensors", full)
    assert not pieces.save("walk", {}, {"done": 2}) and not pieces.save("walk", {}, {"done": 3})
    assert len(said) == 1 and "the disk is full" in said[0] and "bytes" in said[0]
    piece = pieces.load("walk")
    assert piece is not None and piece.facts == {"done": 1}
    assert not list((tmp_path / "s.work").glob("*.part"))


# --- a whole run --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("disk"))
    yield bench
    bench.launcher.close()


def check_points(bench: Bench, points: int, seed: int) -> None:
    """Break the disk at points of a second run; the first stays whole, the message is one line."""
    rng = random.Random(seed)
    first, second = ("select.data_budget=7",), ("select.data_budget=9", "finetune.lr=2e-3")
    out = bench.folder / f"broken{seed}"
    expected = {}
    for settings in (first, second):
        assert bench.launcher.run(bench.words(out, *settings)) == 0, bench.launcher.said
        expected[settings] = content(out)
    total = len(changes(bench.launcher, bench.words(out, *first, "resume.every=0"), out))
    assert total > 100
    for number in range(points):
        assert bench.launcher.run(bench.words(out, *first)) == 0, bench.launcher.said
        code = CODES[number % len(CODES)]
        fault = Fault(out, rng.randint(1, total), code, keeps_failing=number % 2 == 0)
        words = bench.words(out, *second, "resume.every=0")
        ended, said = bench.launcher.run(words, fault), bench.launcher.said
        assert "Traceback" not in said, said
        if ended != 0:
            assert ended == 1, said
            message = only_error(bench)
            assert os.strerror(code) in message and str(out) in message
            assert re.search(r"[\d,]+ bytes.* free", message), message
        else:
            assert not fault.keeps_failing or code in (errno.ENOSPC, errno.EDQUOT)
        whole = content(out)
        either = [expected[first], expected[second]]
        for name, digest in whole.items():
            assert digest in [known[name] for known in either if name in known], name
        assert bench.launcher.run(bench.words(out, *second)) == 0, bench.launcher.said
        assert content(out) == expected[second]


@pytest.mark.slow
def test_the_disk_fails_at_fifty_points(bench: Bench) -> None:
    check_points(bench, points=50, seed=2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A real file system of a given size, which can grow; needs the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()

    def resize(size: str) -> Path:
        mounted = os.path.ismount(place)
        options = f"{'remount,' if mounted else ''}size={size}"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True
        )
        if done.returncode != 0 and not mounted:
            pytest.skip(f"no right to mount a tmpfs here: {done.stderr.decode().strip()}")
        assert done.returncode == 0, done.stderr
        return place

    yield resize
    if os.path.ismount(place):
        subprocess.run(["umount", str(place)], check=True)


def test_a_real_small_disk(bench: Bench, small_disk: Callable[[str], Path]) -> None:
    """Too small for the run: it is foreseen; with more room the same command finishes."""
    reference = bench.folder / "roomy"
    assert bench.launcher.run(bench.words(reference)) == 0
    out = small_disk("1m") / "run"
    assert bench.launcher.run(bench.words(out)) == 1
    message = only_error(bench)
    assert str(out) in message and "needs about" in message and "bytes" in message, message
    small_disk("24m")
    assert bench.launcher.run(bench.words(out)) == 0, bench.launcher.said
    assert content(out) == content(reference)


@pytest.mark.parametrize("share", [0.15, 0.35, 0.55, 0.75])
def test_a_real_disk_that_fills_up(
    bench: Bench, small_disk: Callable[[str], Path], share: float
) -> None:
    """Somebody else may fill it after the look at the free space: real ENOSPC, at other places."""
    reference = bench.folder / f"reference{share}"
    assert bench.launcher.run(bench.words(reference)) == 0
    out = small_disk(str(int(share * disk.folder_bytes(place(reference))))) / "run"
    code = bench.launcher.run(bench.words(out, "resume.every=0"), unforeseen=True)
    assert code == 1 and "Traceback" not in bench.launcher.said, bench.launcher.said
    message = only_error(bench)
    assert str(out) in message and os.strerror(errno.ENOSPC) in message
    assert re.search(r"[\d,]+ bytes.* free", message), message
    assert content(out).items() <= content(reference).items()
    small_disk("24m")
    assert bench.launcher.run(bench.words(out)) == 0, bench.launcher.said
    assert content(out) == content(reference)


def only_error(bench: Bench) -> str:
    (message,) = [line for line in bench.launcher.said.splitlines() if line.startswith("error: ")]
    return message
