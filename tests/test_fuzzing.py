"""Fuzz targets: their seeds, every input that failed once, and whether the watch can fail."""

from __future__ import annotations

import gc
import mmap
import random
from pathlib import Path

import fuzzing
import pytest
from fuzzing import KEPT, TARGETS, Watch, watch
from test_hostile_sizes import mutate


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_refuses_by_an_error_of_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make nightly` goes on from here, with the mutations of atheris."""
    for module, limits in {
        "dualsft.data.chat": ("MAX_SECONDS", "MAX_MEMORY", "MAX_OUTPUT"),
        "dualsft.model.delta": ("_content_hash",),
    }.items():
        for limit in limits:  # a target changes them; this puts them back
            monkeypatch.setattr(f"{module}.{limit}", 0)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    seen, rng = watch(name, scratch, tmp_path / "failed"), random.Random(name)
    seeds, kept = TARGETS[name].seeds(), [path.read_bytes() for path in TARGETS[name].kept(name)]
    assert len(seeds) >= 3
    for data in [*seeds, *kept, *(mutate(rng.choice(seeds), rng) for _ in range(100))]:
        seen.one(data)
    assert not seen.failures


def test_every_kept_input_has_a_target() -> None:
    assert {path.name for path in KEPT.glob("*")} <= set(TARGETS)


def test_the_watch_sees_what_no_input_may_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(fuzzing, "MAX_GROWTH", 128 << 20)
    held: list[mmap.mmap] = []

    def check(data: bytes) -> None:
        if data == b"raise":
            raise KeyError(data)
        if data == b"loop":
            sum(range(20_000_000))
        if data == b"grow":
            held.append(mmap.mmap(-1, 256 << 20))  # new memory, not what the tests before freed
            held[-1].write(b"1" * (256 << 20))
        if data == b"refuse":
            raise ValueError(data)

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the tests before
    seen = Watch(check, (ValueError,), tmp_path)
    for data in (b"refuse", b"raise", b"raise", b"loop", b"grow"):
        seen.one(data)
    kinds = sorted(kind.partition(" ")[0] for kind in seen.failures)
    assert kinds in (["KeyError", "growth", "hang"], ["KeyError", "growth", "hang", "hang"])
    assert sorted(path.read_bytes() for path in tmp_path.iterdir())[-1] == b"raise"
