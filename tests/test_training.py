"""The training loop: schedule, micro-batches, noise, and what stops it."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from models import tiny_examples, tiny_model
from rich.console import Console

from dualsft.data.examples import Example
from dualsft.engine.losses import example_objective
from dualsft.errors import RunError
from dualsft.storage.resume import Piece, Pieces
from dualsft.system.progress import Progress, Reporter
from dualsft.train import loop as training
from dualsft.train import step as adam_step
from dualsft.train.loop import TrainingPlan, learning_rate, micro_batches, restore, train
from dualsft.train.moments import Moments
from dualsft.train.optimizer import SparseAdamW

QUIET = Reporter(lambda _: None)


def examples(count: int, seed: int = 1) -> list[Example]:
    rows = tiny_examples(count, 97, seed)
    return [Example(e.id, e.index, list(e.input_ids), list(e.labels)) for e in rows]


def plan(**changes: Any) -> TrainingPlan:
    values: dict[str, Any] = {
        "lr": 1e-3,
        "epochs": 2,
        "batch_size": 4,
        "warmup_ratio": 0.03,
        "max_grad_norm": 0.0,
        "micro_batch_size": None,
        "batch_tokens": 64,
        "seed": 3,
        "pad_id": 0,
        "padding_side": "right",
    }
    return TrainingPlan(**(values | changes))


def weights_after(dropout: float = 0.0, dtype: torch.dtype = torch.float64, **changes: Any) -> dict:
    model = tiny_model("gpt2", dtype=dtype, dropout=dropout)
    rows = examples(10)
    with SparseAdamW(model.named_parameters(), None, lr=1e-3, free_gradients=True) as optimizer:
        train(model, rows, optimizer, plan(**changes), QUIET, "test")
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("steps", "ratio"), [(1, 0.03), (6, 0.03), (86, 0.03), (50, 0.0), (7, 0.5)]
)
def test_schedule_equals_the_oracle_and_never_starts_at_zero(steps: int, ratio: float) -> None:
    ours = [learning_rate(s, steps, 2e-5, ratio) for s in range(steps)]
    assert ours == pytest.approx(oracle.cosine_schedule(steps, 2e-5, ratio), rel=1e-12)
    assert ours[0] > 0 and max(ours) <= 2e-5
    warmup = math.ceil(ratio * steps)
    assert all(a >= b for a, b in zip(ours[warmup:], ours[warmup + 1 :], strict=False))


def test_steps_and_floor() -> None:
    assert plan().num_steps(10) == 6
    assert plan(epochs=1, min_steps=11).num_steps(10) == 11
    assert plan(epochs=0, min_steps=11).num_steps(10) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 3},
        {"batch_tokens": 1},
        {"padding_side": "left"},
    ],
)
def test_micro_batches_change_nothing(changes: dict[str, Any]) -> None:
    reference, other = weights_after(), weights_after(**changes)
    assert max(float((reference[n] - other[n]).abs().max()) for n in reference) < 1e-9


def test_micro_batches_cover_the_batch_once() -> None:
    rows = examples(9)
    for changes in ({"micro_batch_size": 2}, {"batch_tokens": 20}):
        pieces = micro_batches(rows, plan(**changes))
        assert sorted(e.id for piece in pieces for e in piece) == sorted(e.id for e in rows)


def test_dropout_noise_depends_on_the_seed_alone() -> None:
    """Same seed, same bits, whatever the global random stream did before; and dropout is on."""
    torch.manual_seed(1)
    first = weights_after(dropout=0.3)
    torch.manual_seed(999)
    state = torch.get_rng_state()
    second = weights_after(dropout=0.3)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[n], second[n]) for n in first)
    calm = weights_after(dropout=0.0)
    assert any(not torch.equal(first[n], calm[n]) for n in first)
    other = weights_after(dropout=0.3, seed=4)
    assert any(not torch.equal(first[n], other[n]) for n in first)


def test_nonfinite_loss_stops_before_the_update() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    rows = examples(8)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with (
        SparseAdamW(model.named_parameters(), None, lr=1e-3, free_gradients=True) as optimizer,
        pytest.raises(RunError, match="step 1: the loss of .* is not finite; nothing was updated"),
    ):
        train(model, rows, optimizer, plan(), QUIET, "test")
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert not model.training


def test_nonfinite_gradient_stops_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    monkeypatch.setattr(SparseAdamW, "clip_grad_norm", lambda self, limit: torch.tensor(math.nan))
    with (
        SparseAdamW(model.named_parameters(), None, lr=1e-3, free_gradients=True) as optimizer,
        pytest.raises(RunError, match="step 1: the gradient over row .* is not finite"),
    ):
        train(model, examples(8), optimizer, plan(), QUIET, "test")
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


class Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_killed_training_goes_on_to_the_same_bits(
    tmp_path: Path, moments: Moments, whole: bool
) -> None:
    """Weights, moments as they are held, and step counts, for each type of the moments."""

    def trained(pieces: Pieces, kill_at: int = 10**9) -> dict[str, torch.Tensor]:
        def log(step: int = 0, **_: Any) -> None:
            if step > kill_at:
                raise Killed

        model = tiny_model("llama", dtype=torch.float32)
        named = list(model.named_parameters())
        some = {name: torch.arange(0, p.numel(), 3) for name, p in named}
        indices = None if whole else some
        with SparseAdamW(
            named, indices, lr=1e-2, moments=moments, seed=3, free_gradients=True
        ) as optimizer:
            changed = plan(max_grad_norm=1.0, lr=1e-2)
            train(model, examples(10), optimizer, changed, QUIET, "warmup", log, pieces)
            held = [t for state in optimizer.state.values() for t in state.values()]
        return {str(i): t for i, t in enumerate([*held, *(p.detach() for _, p in named)])}

    expected = trained(Pieces())
    with pytest.raises(Killed):
        trained(Pieces(tmp_path / "s.work", "abc", every=0), kill_at=3)
    got = trained(Pieces(tmp_path / "s.work", "abc", every=0))
    assert len(got) == len(expected) > 40
    assert all(torch.equal(got[key], value) for key, value in expected.items())


def test_memory_short_of_activations_turns_checkpointing_on_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch stays whole, the results keep their bits, and a user's own no is respected."""
    real, on = training.checkpointed, [False]

    @contextmanager
    def watched(model: Any, wanted: bool) -> Iterator[None]:
        on[0] = wanted
        with real(model, wanted):
            yield

    def objective(model: Any, batch: Any, **options: Any) -> Any:
        if not on[0] and len(batch.input_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(batch.input_ids))
        return example_objective(model, batch, **options)

    def trained(checkpointing: bool | None) -> dict[str, torch.Tensor]:
        model = tiny_model("llama", dtype=torch.float32)
        changed = plan(checkpointing=checkpointing, micro_batch_size=4)
        with SparseAdamW(model.named_parameters(), None, lr=1e-3, free_gradients=True) as optimizer:
            train(model, examples(8), optimizer, changed, Reporter(said.append), "test")
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    said: list[str] = []
    sizes: list[int] = []
    expected = trained(None)
    monkeypatch.setattr(training, "checkpointed", watched)
    monkeypatch.setattr(training, "example_objective", objective)
    got = trained(None)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    warnings = [line for line in said if "out of memory" in line]
    assert len(warnings) == 1 and "finetune.checkpointing=true" in warnings[0]
    assert set(sizes) == {4}
    said.clear()
    sizes.clear()
    trained(False)
    assert set(sizes) == {1} and not any("checkpointing" in line for line in said)


def test_lack_of_memory_for_the_moments_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = tiny_model("llama", dtype=torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    monkeypatch.setattr(adam_step, "new_state", full)
    with (
        SparseAdamW(model.named_parameters(), None, lr=1e-3, free_gradients=True) as optimizer,
        pytest.raises(RunError, match=r"moments of [\d,]+ trained entries .*finetune\.moments"),
    ):
        train(model, examples(4), optimizer, plan(), QUIET, "test")
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_progress_line_tells_rate_time_and_memory() -> None:
    lines: list[str] = []
    records: list[dict] = []
    progress = Progress(
        "pool",
        4,
        "examples",
        lambda line, done: lines.append(line),
        lambda **values: records.append(values),
        interval=0.0,
    )
    progress.advance(1, tokens=50, loss=1.5)
    progress.advance(3, tokens=70)
    assert "1/4 examples (25 %)" in lines[0] and "loss 1.5000" in lines[0]
    assert "tok/s" in lines[0] and " left" in lines[0] and "GiB" in lines[0]
    assert "4/4 examples (100 %)" in lines[-1] and " left" not in lines[-1]
    assert records[-1]["percentage"] == 100 and records[-1]["remaining_time"] == 0


def test_progress_on_a_terminal_is_a_bar_each() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    lines: list[str] = []
    reporter = Reporter(lines.append, terminal)
    with reporter.track("outer", 2, "parts") as outer, reporter.track("inner", 3, "steps") as inner:
        inner.advance(1)
        outer.advance(1)
        inner.advance(2)
    shown = terminal.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "inner: 1/3 steps (33 %)" in shown and "outer: 1/2 parts (50 %)" in shown
    assert [line.partition(" (")[0] for line in lines] == ["inner: 3/3 steps"]


def test_a_resume_keeps_the_checkpointing_that_is_set() -> None:
    """What lack of memory decided is taken over from a piece, what the user sets is not undone."""
    for asked, then, expected in ((True, None, True), (False, True, False), (None, True, True)):
        model = tiny_model("llama", torch.float32)
        with SparseAdamW(model.named_parameters(), None, lr=1e-3, free_gradients=True) as optimizer:
            held = {f"master.{n}": optimizer.master(n).clone() for n in optimizer.names}
            cut = {"batch_tokens": 64, "micro_batch_size": None, "checkpointing": then}
            piece = Piece(held, {"steps": 1, "cut": cut})
            steps, found = restore(optimizer, piece, plan(checkpointing=asked))
        assert (steps, found.checkpointing, found.batch_tokens) == (1, expected, 64)
