"""Out of memory: the same mathematics in smaller batches, said aloud; or a clear cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_model
from test_ghost import engine_of, examples_for, random_direction

from dualsft.data.examples import Batch
from dualsft.engine.rules import LinearRule
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.errors import RunError
from dualsft.storage.resume import Pieces
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter
from dualsft.system.usage import is_out_of_memory
from dualsft.train import loop as training
from dualsft.train.loop import TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (FULL, True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(problem: Exception, expected: bool) -> None:
    assert is_out_of_memory(problem) is expected


def scored(said: list[str], spoil: Callable[[Any], Any] | None = None, **changes: Any) -> Any:
    model = tiny_model("llama")
    engine = engine_of(model)
    sums, objective = ParamVector.zeros(engine.candidates), loss_objective(model)
    values: dict[str, Any] = {"batch_tokens": 80, "pad_id": 0, "padding_side": "right"}
    result = walk(
        engine,
        examples_for(model, 19, 3),
        spoil(objective) if spoil else objective,
        PassSettings(**(values | changes)),
        Reporter(said.append),
        "pool",
        sums=sums,
        direction=random_direction(engine),
        bounds=True,
    )
    return sums, result


def limited(most: int) -> Callable[[Any], Any]:
    """An objective that fails for batches of more than `most` padded tokens."""

    def spoil(objective: Any) -> Any:
        def call(batch: Batch, observer: Any) -> Any:
            if batch.input_ids.numel() > most:
                raise FULL
            return objective(batch, observer)

        return call

    return spoil


def close(a: Any, b: Any) -> None:
    for name, block in a[0].items():
        torch.testing.assert_close(block, b[0][name], rtol=1e-10, atol=1e-12)
    for name in ("values", "dots", "inner_sums"):
        np.testing.assert_allclose(getattr(a[1], name), getattr(b[1], name), rtol=1e-10)


@pytest.mark.parametrize("most", [60, 40, 16])
def test_a_walk_goes_on_in_smaller_batches(most: int) -> None:
    said: list[str] = []
    close(scored(said, limited(most)), scored([]))
    warnings = [line for line in said if "out of memory" in line]
    assert warnings and all("score.batch_tokens=" in line for line in warnings)


def test_a_batch_that_fails_half_way_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Memory runs out in the middle of a backward, when part of it is in the sums already."""
    expected = scored([])
    real, calls = LinearRule.observe, [0]

    def observe(self: LinearRule, *args: Any) -> None:
        calls[0] += 1
        if calls[0] in (8, 60):
            raise FULL
        real(self, *args)

    monkeypatch.setattr(LinearRule, "observe", observe)
    for pieces in (Pieces(), Pieces(tmp_path / "s.work", "abc", every=0)):
        calls[0] = 0
        said: list[str] = []
        close(scored(said, pieces=pieces), expected)
        assert sum("out of memory" in line for line in said) == 2


def test_one_example_that_does_not_fit_is_the_users_to_cure() -> None:
    with pytest.raises(RunError, match=r"single example of \d+ tokens .*lower data.max_length"):
        scored([], limited(3))


def trained(said: list[str]) -> dict[str, torch.Tensor]:
    model = tiny_model("llama_tied_bias")
    plan = TrainingPlan(
        lr=1e-2,
        epochs=2,
        batch_size=6,
        warmup_ratio=0.1,
        max_grad_norm=1.0,
        micro_batch_size=6,
        batch_tokens=200,
        seed=5,
        pad_id=0,
        padding_side="right",
    )
    with SparseAdamW(model.named_parameters(), None, lr=1e-2, free_gradients=True) as optimizer:
        train(
            model, examples_for(model, 13, 3), optimizer, plan, Reporter(said.append), "fine-tuning"
        )
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_in_smaller_micro_batches(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = trained([])
    real = training.example_objective

    def objective(model: Any, batch: Batch, **options: Any) -> Any:
        total, losses = real(model, batch, **options)
        if len(batch.input_ids) > 2 and where == "forward":
            raise FULL
        if len(batch.input_ids) > 2:
            hidden = next(p for n, p in model.named_parameters() if "layers.0.mlp" in n)
            handle = hidden.register_hook(lambda grad: (_ for _ in ()).throw(FULL))
            weak.append(handle)
        return total, losses

    weak: list[Any] = []

    def step(*args: Any) -> Any:
        for handle in weak:
            handle.remove()
        weak.clear()
        return real_step(*args)

    real_step = training._Loop.step
    monkeypatch.setattr(training, "example_objective", objective)
    monkeypatch.setattr(training._Loop, "step", step)
    said: list[str] = []
    got = trained(said)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-10)
    assert any("out of memory" in line and "step 1" in line for line in said)
