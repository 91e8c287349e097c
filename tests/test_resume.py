"""Pieces: saved progress that verifies, and loops that go on behind it to the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Killed, cut_off, soak
from models import assert_equal, snapshot, tiny_model, tiny_rows
from worlds import short_training

from dualsft.runs.folder import RunDir
from dualsft.storage.manifest import Fingerprint
from dualsft.storage.resume import KEPT, Pieces
from dualsft.system import signals as interrupt
from dualsft.system.progress import Reporter
from dualsft.train.compact import Moments
from dualsft.train.loop import train
from dualsft.train.optimizer import SparseAdamW

QUIET = Reporter(lambda _: None)


def state(number: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return {"x": torch.full((3,), float(number))}, {"number": number, "exact": 0.1 + 0.2}


# --- pieces -------------------------------------------------------------------------------------


def test_newest_piece_is_taken_and_two_are_kept(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path / "s.work", "abc", every=0)
    assert pieces.load("walk") is None
    for number in range(1, 6):
        assert pieces.save("walk", *state(number))
    piece = Pieces(tmp_path / "s.work", "abc").load("walk")
    assert piece is not None and piece.facts == {"number": 5, "exact": 0.1 + 0.2}
    assert piece.tensors["x"].tolist() == [5.0] * 3
    assert len(list((tmp_path / "s.work").iterdir())) == KEPT == 2


@pytest.mark.parametrize("kind", ["flip", "cut", "gone", "manifest", "no manifest"])
def test_a_damaged_piece_is_passed_over_for_the_one_before(tmp_path: Path, kind: str) -> None:
    said: list[str] = []
    pieces = Pieces(tmp_path / "s.work", "abc", every=0, say=said.append)
    pieces.save("walk", *state(1))
    pieces.save("walk", *state(2))
    newest = tmp_path / "s.work/walk.000002"
    file = newest / ("manifest.json" if "manifest" in kind else "tensors.safetensors")
    data = bytearray(file.read_bytes())
    if kind in ("flip", "manifest"):
        data[-5] ^= 4
        file.write_bytes(data)
    elif kind == "cut":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    piece = pieces.load("walk")
    assert piece is not None and piece.facts["number"] == 1
    assert len(said) == 1 and "walk.000002" in said[0] and "skipped" in said[0]


def test_pieces_of_other_settings_or_versions_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pieces(tmp_path / "s.work", "abc", every=0).save("walk", *state(1))
    assert Pieces(tmp_path / "s.work", "abcd").load("walk") is None
    Pieces(tmp_path / "s.work", "abc", every=0).save("walk", *state(1))
    monkeypatch.setattr("dualsft.storage.resume.versions", lambda: {"torch": "another"})
    assert Pieces(tmp_path / "s.work", "abc").load("walk") is None


def test_half_written_pieces_do_not_exist(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path / "s.work", "abc", every=0)
    pieces.save("walk", *state(1))
    (tmp_path / "s.work/walk.000002.part").mkdir()
    (tmp_path / "s.work/walk.000002.part/tensors.safetensors").write_bytes(b"half")
    piece = pieces.load("walk")
    assert piece is not None and piece.facts["number"] == 1
    assert pieces.save("walk", *state(2))
    assert not list((tmp_path / "s.work").glob("*.part"))


def test_saving_takes_no_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("dualsft.storage.resume.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "dualsft.storage.resume.save_tensors", lambda *_: now.__setitem__(0, now[0] + 30.0)
    )
    saves = []
    pieces = Pieces(tmp_path / "s.work", "abc", every=60)
    for second in range(2000):
        before = now[0]
        pieces.tick("walk", lambda: state(1), "")
        if now[0] > before:
            saves.append(second)
        now[0] += 1.0
    gaps = np.diff(saves)
    assert saves[0] == 60 and (gaps >= 600 - 30).all(), "30 s a save: at most every 600 s"


def test_a_stage_discards_its_pieces_when_it_is_whole(tmp_path: Path) -> None:
    run, fingerprint = RunDir(tmp_path / "run").create(), Fingerprint({"a": 1}, {})
    pieces = Pieces(run.work_path("2_warmup"), fingerprint.hash, every=0)
    with pytest.raises(Killed), run.write_stage("2_warmup", fingerprint) as writer:
        pieces.save("walk", *state(1))
        raise Killed
    assert pieces.load("walk") is not None, "an exception keeps what was saved"
    with run.write_stage("2_warmup", fingerprint) as writer:
        (writer / "x").write_text("done")
    assert not (run.path / "2_warmup.work").exists()


@pytest.mark.parametrize("cycles", [50, pytest.param(10_000, marks=pytest.mark.slow)])
def test_saving_often_holds_nothing(tmp_path: Path, cycles: int) -> None:
    soak(tmp_path, cycles)


# --- loops --------------------------------------------------------------------------------------


def trained(
    pieces: Pieces, logged: list[int], dtype: torch.dtype, moments: Moments, sparse: bool
) -> dict[str, torch.Tensor]:
    model = tiny_model("gpt2", dtype, dropout=0.2)
    named = list(model.named_parameters())
    indices = {n: torch.arange(0, p.numel(), 7) for n, p in named} if sparse else None
    changes = {"batch_size": 4, "micro_batch_size": None, "batch_tokens": 40}
    plan = short_training(lr=1e-2, epochs=3, warmup_ratio=0.1, seed=5, **changes)
    with SparseAdamW(
        named, indices, lr=1e-2, weight_decay=0.1, moments=moments, seed=3, free_gradients=True
    ) as optimizer:
        train(
            model,
            tiny_rows(10, 3),
            optimizer,
            plan,
            QUIET,
            "warmup",
            lambda **facts: logged.append(facts.get("step", 0)),
            pieces,
        )
        held = [t for state in optimizer.state.values() for t in state.values()]
        assert len(held) >= 3 * len(optimizer.names)
        bits = {f"state{i}": t.clone() for i, t in enumerate(held)}
    return bits | snapshot(model)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("dtype", "moments"),
    [
        (torch.float32, "float32"),
        (torch.float64, "float32"),
        (torch.float32, "bfloat16"),
        (torch.float32, "int8"),
    ],
)
def test_training_killed_after_any_step_gives_the_same_bits(
    tmp_path: Path, dtype: torch.dtype, moments: Moments, sparse: bool
) -> None:
    """Weights, moments as they are held and step counts, with dropout, decay and clipping on."""
    steps: list[int] = []
    expected = trained(Pieces(), steps, dtype, moments, sparse)
    for kill_at in (1, 3, 4, 8):
        logged: list[int] = []
        second = cut_off(
            lambda pieces: trained(pieces, [], dtype, moments, sparse),
            tmp_path / f"{kill_at}.work",
            kill_at,
        )
        assert_equal(trained(second, logged, dtype, moments, sparse), expected)
        assert logged == [0, *steps[kill_at:]], "the log says where it went on"


# --- signals ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def heard_signals() -> Iterator[None]:
    """A shell may start the tests with signals ignored, as it does in the background."""
    before = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_in_a_loop_waits_for_the_step_and_saves(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path / "s.work", "abc", every=None)
    done = []
    with interrupt.handled(), pytest.raises(interrupt.Interrupted) as stopped, pieces.loop():
        for step in range(5):
            if step == 2:
                signal.raise_signal(signal.SIGTERM)
            done.append(step)
            pieces.tick("walk", lambda step=step: state(step), f"step {step}")
    assert done == [0, 1, 2] and stopped.value.exit_code == 143
    assert stopped.value.saved == "step 2"
    piece = pieces.load("walk")
    assert piece is not None and piece.facts["number"] == 2


def test_a_signal_outside_of_a_loop_stops_at_once_and_a_second_does_not_wait() -> None:
    with interrupt.handled(), pytest.raises(interrupt.Interrupted) as stopped:
        signal.raise_signal(signal.SIGINT)
    assert stopped.value.exit_code == 130 and not stopped.value.saved
    with interrupt.handled(), pytest.raises(interrupt.Interrupted), interrupt.deferred():
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.pending()
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the second signal did not stop the loop")
    assert not interrupt.pending()


def test_handlers_are_given_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt.handled():
            assert signal.getsignal(signal.SIGTERM) is not before
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert signal.getsignal(signal.SIGTERM) is before
