"""The training loop: schedule, micro-batches, noise, and what stops it."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from models import tiny_examples, tiny_model

from dualsft.data import Example
from dualsft.errors import RunError
from dualsft.optim import SparseAdamW
from dualsft.progress import Progress, Reporter
from dualsft.training import TrainingPlan, learning_rate, micro_batches, train

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
    with SparseAdamW(model.named_parameters(), None, lr=1e-3) as optimizer:
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
        SparseAdamW(model.named_parameters(), None, lr=1e-3) as optimizer,
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
        SparseAdamW(model.named_parameters(), None, lr=1e-3) as optimizer,
        pytest.raises(RunError, match="step 1: the gradient over row .* is not finite"),
    ):
        train(model, examples(8), optimizer, plan(), QUIET, "test")
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_progress_line_tells_rate_time_and_memory() -> None:
    lines: list[str] = []
    records: list[dict] = []
    progress = Progress(
        "pool",
        4,
        "examples",
        lambda line, last: lines.append(line),
        lambda **values: records.append(values),
        interval=0.0,
    )
    progress.advance(1, tokens=50, loss=1.5)
    progress.advance(3, tokens=70)
    assert "1/4 examples (25 %)" in lines[0] and "loss 1.5000" in lines[0]
    assert "tok/s" in lines[0] and " left" in lines[0] and "GiB" in lines[0]
    assert "4/4 examples (100 %)" in lines[-1] and " left" not in lines[-1]
    assert records[-1]["percentage"] == 100 and records[-1]["remaining_time"] == 0
