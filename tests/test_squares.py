"""Squares and norms of per-example gradients, made in batches, against one example at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import ARCHITECTURES, tiny_examples, tiny_model
from torch import Tensor

from dualsft.data.examples import Example, collate
from dualsft.engine import rules as ghost_rules
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.engine.walk_state import PassResult
from dualsft.errors import RunError
from dualsft.model.load import find_candidates
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter

EVERYTHING_IN_THE_BLOCKS = {"gpt2": "*.h.*"}
"""Norms and biases too; *.layers.* elsewhere."""


def _engine(arch: str, spec: str) -> GhostEngine:
    model = tiny_model(arch)
    return GhostEngine(model, find_candidates(model, spec))


def _alone(engine: GhostEngine, examples: list[Example]) -> tuple[dict[str, Tensor], np.ndarray]:
    """(Σ g ⊙ g, ‖g_n‖ of every candidate: [N, L]) by plain autograd."""
    squares = {name: torch.zeros_like(p) for name, p in engine.candidates.items()}
    norms = np.zeros((len(examples), len(engine.columns)))
    for number, example in enumerate(examples):

        def visit(name: str, grad: Tensor, number: int = number) -> None:
            squares[name] += grad**2
            norms[number, engine.columns[name]] = float(grad.norm())

        batch = collate([example], 0, "right", torch.device("cpu"))
        alone(engine.model, engine.candidates, batch, visit)
    return squares, norms


def _walk(engine: GhostEngine, examples: list[Example], **taps: Any) -> PassResult:
    settings = PassSettings(batch_tokens=60, pad_id=0, padding_side="right")
    objective, silent = loss_objective(engine.model), Reporter(lambda _: None)
    return walk(engine, examples, objective, settings, silent, "squares", **taps)


@pytest.mark.parametrize("several", [1, 7])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("whole", [False, True], ids=["block_linear", "everything in the blocks"])
def test_squares_and_norms(
    arch: str, whole: bool, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many gradients are made at a time."""
    engine = _engine(
        arch, EVERYTHING_IN_THE_BLOCKS.get(arch, "*.layers.*") if whole else "block_linear"
    )
    assert engine.separable
    biggest = max(p.numel() for p in engine.candidates.values())
    monkeypatch.setattr(ghost_rules, "APART_BYTES", several * biggest * 8)
    examples = [Example(e.id, e.index, e.input_ids, e.labels) for e in tiny_examples(9)]
    squares, norms = _alone(engine, examples)
    direction = ParamVector({n: torch.randn_like(p.detach()) for n, p in engine.candidates.items()})
    sums = ParamVector.zeros(engine.candidates)
    found = _walk(engine, examples, sums=sums, direction=direction, bounds=True, squared=True)
    for name, square in squares.items():
        torch.testing.assert_close(sums[name], square, rtol=1e-9, atol=1e-18)
    np.testing.assert_allclose(found.inner_sums, norms, rtol=1e-6, atol=1e-12)
    plain = _walk(engine, examples, direction=direction)
    np.testing.assert_allclose(found.dots, plain.dots, rtol=1e-12)


@pytest.mark.parametrize("arch", ["llama", "llama_tied_bias", "gpt2"])
def test_a_gradient_in_several_parts_is_refused(arch: str) -> None:
    """Embeddings and heads: their squares are not the squares of the parts."""
    engine = _engine(arch, "all")
    assert not engine.separable
    with (
        pytest.raises(AssertionError, match="squared needs engine.separable"),
        engine.tapped(squared=True),
    ):
        pass


def test_a_module_that_is_used_twice_is_refused() -> None:
    """A layer in two places of the decoder: the second part of its gradient would be lost."""
    model = tiny_model("llama")
    layers = model.model.layers
    layers[1] = layers[0]
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    examples = [Example(e.id, e.index, e.input_ids, e.labels) for e in tiny_examples(3)]
    sums = ParamVector.zeros(engine.candidates)
    with pytest.raises(RunError, match=r"used more than once in a pass.*leave it out"):
        _walk(engine, examples, sums=sums, squared=True)
