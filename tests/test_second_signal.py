"""A second signal, which does not wait: nothing half-done is kept as a state.

The first Ctrl-C waits for the end of a batch or step, is saved there and ends the run. A second one
comes at once, anywhere; what is rescued then must be a state that the computation really had.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import tiny_model
from test_ghost import QUIET, examples_for

from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.memory.placement import Streamed, blank
from dualsft.memory.plans import Wishes
from dualsft.model.load import find_candidates
from dualsft.storage.resume import Pieces
from dualsft.system.signals import Interrupted
from dualsft.train.loop import TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW

PLAN = TrainingPlan(
    lr=1e-2,
    epochs=2,
    batch_size=3,
    warmup_ratio=0.0,
    max_grad_norm=0.0,
    micro_batch_size=None,
    batch_tokens=256,
    seed=0,
    pad_id=0,
    padding_side="right",
)


def resumed(compute: Callable[[Pieces], dict[str, torch.Tensor]], folder: Path) -> None:
    """Interrupted once, rescued as the pipeline does it, begun again: the same bits."""
    pieces = Pieces(folder, "fingerprint", 1e9)
    with pytest.raises(Interrupted):
        compute(pieces)
    pieces.rescue()


@pytest.mark.parametrize("update", [1, 40, 75])
def test_inside_the_optimizer_s_step(
    update: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(pieces: Pieces) -> dict[str, torch.Tensor]:
        model = tiny_model("llama", torch.float32)
        with SparseAdamW(model.named_parameters(), None, lr=1e-2, free_gradients=True) as optimizer:
            train(model, examples_for(model), optimizer, PLAN, QUIET, "warmup", pieces=pieces)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = trained(Pieces())
    real, calls = SparseAdamW._update, [0]

    def stopped(self: SparseAdamW, *given: object, **named: object) -> object:
        calls[0] += 1
        if calls[0] == update:
            raise Interrupted(2)
        return real(self, *given, **named)  # pyright: ignore

    with monkeypatch.context() as patch:
        patch.setattr(SparseAdamW, "_update", stopped)
        resumed(trained, tmp_path)
    again = trained(Pieces(tmp_path, "fingerprint", 1e9))
    assert all(torch.equal(expected[name], again[name]) for name in expected)


def test_before_streamed_sums_are_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32).eval()
    engine = GhostEngine(model, find_candidates(model, "all"))

    def summed(pieces: Pieces) -> dict[str, torch.Tensor]:
        sums = blank(engine.candidates, torch.float32)
        settings = PassSettings(
            batch_tokens=60,
            pad_id=0,
            padding_side="right",
            pieces=pieces,
            wishes=Wishes(placement="host"),
        )
        objective = loss_objective(model)
        walk(engine, examples_for(model), objective, settings, QUIET, "pool", sums=sums)
        return {name: block.clone() for name, block in sums.items()}

    expected = summed(Pieces())

    def interrupted(_: Streamed) -> None:
        raise Interrupted(2)

    with monkeypatch.context() as patch:
        patch.setattr(Streamed, "settle", interrupted)
        resumed(summed, tmp_path)
    again = summed(Pieces(tmp_path, "fingerprint", 1e9))
    assert all(torch.equal(expected[name], again[name]) for name in expected)
