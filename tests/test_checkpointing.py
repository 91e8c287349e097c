"""Checkpointed blocks compute the same bits with less kept, and are restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models import ARCHITECTURES, tiny_examples, tiny_model
from torch import Tensor

from dualsft.data.examples import Example, collate
from dualsft.engine.fused import checkpointed
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import example_objective
from dualsft.memory.placement import DevicePlacement
from dualsft.model.load import decoder_blocks, find_candidates
from dualsft.storage.vectors import ParamVector


def a_batch():  # noqa: ANN201
    rows = tiny_examples(5, 97, 1)
    examples = [Example(e.id, e.index, list(e.input_ids), list(e.labels)) for e in rows]
    return collate(examples, 0)


def gradients(arch: str, training: bool, on: bool) -> dict[str, Tensor]:
    model = tiny_model(arch, torch.float32, dropout=0.3 if training else 0.0).train(training)
    torch.manual_seed(4)
    with checkpointed(model, on):
        objective, losses = example_objective(model, a_batch())
        objective.backward()
    drawn = {"losses": losses.detach(), "next draw": torch.rand(3)}
    return drawn | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_keep_every_bit(arch: str, training: bool) -> None:
    plain, ours = gradients(arch, training, False), gradients(arch, training, True)
    assert plain.keys() == ours.keys() and len(plain) > 10
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


def test_dropout_is_really_on_in_the_training_case() -> None:
    noisy, clean = gradients("gpt2", True, True), gradients("gpt2", False, True)
    assert not torch.equal(noisy["losses"], clean["losses"])


def tapped(arch: str, on: bool) -> tuple[ParamVector, Tensor, Tensor]:
    model = tiny_model(arch, torch.float32)
    engine = GhostEngine(model, find_candidates(model, "all"))
    generator = torch.Generator().manual_seed(0)
    direction = ParamVector(
        {n: torch.randn(p.shape, generator=generator) for n, p in engine.candidates.items()}
    )
    sums = ParamVector.zeros(engine.candidates)
    batch = a_batch()
    with (
        checkpointed(model, on),
        engine.tapped(DevicePlacement(sums, direction), bounds=True) as taps,
    ):
        taps.begin(len(batch.input_ids))
        example_objective(model, batch, observer=engine.head_observer(taps))[0].backward()
    return sums, *taps.outputs().values()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_taps_see_every_use_once(arch: str) -> None:
    plain, ours = tapped(arch, False), tapped(arch, True)
    assert all(torch.equal(block, ours[0][name]) for name, block in plain[0].items())
    assert torch.equal(plain[1], ours[1]) and torch.equal(plain[2], ours[2])
    assert float(plain[1].abs().min()) > 0


@contextmanager
def counted_saves() -> Iterator[list[int]]:
    """Entries of the tensors that autograd keeps."""
    kept = [0]

    def pack(tensor: Tensor) -> Tensor:
        kept[0] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def test_less_is_kept() -> None:
    model, batch = tiny_model("llama", torch.float32), a_batch()
    totals = []
    for on in (False, True):
        with checkpointed(model, on), counted_saves() as kept:
            example_objective(model, batch)
        totals.append(kept[0])
    assert totals[1] < 0.5 * totals[0]


def test_blocks_are_restored_even_after_a_failure() -> None:
    model = tiny_model("llama", torch.float32)
    blocks = decoder_blocks(model)[1]
    own = blocks[0].forward
    blocks[1].forward = patched = lambda *a, **k: own(*a, **k)
    with pytest.raises(RuntimeError, match="failed"), checkpointed(model):
        assert "forward" in vars(blocks[0])
        raise RuntimeError("failed")
    assert "forward" not in vars(blocks[0]) and blocks[1].forward is patched


def test_nothing_is_recomputed_without_gradients() -> None:
    model, batch = tiny_model("llama", torch.float32), a_batch()
    calls = [0]
    block = decoder_blocks(model)[1][0]
    block.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    with checkpointed(model), torch.no_grad():
        example_objective(model, batch)
    assert calls == [1]
