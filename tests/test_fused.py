"""Fused norms, gated activations and rotations: what the modules compute, and nothing left behind.
Checkpointed blocks: the same bits with less kept, and restored afterwards.

The plain expressions run here against the models' own modules in fp64; the Triton kernels run in a
process of their own under Triton's interpreter, against the plain expressions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES as FAMILIES
from models import ARCHITECTURES, tiny_model
from test_ghost import QUIET, engine_of, examples_for, random_direction

from dualsft.data.examples import Batch, collate
from dualsft.engine.fused import HALF_DTYPES, _rotation, checkpointed, fused_blocks, fused_forward
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import example_objective, last_hidden
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.memory.placement import DevicePlacement
from dualsft.model.load import decoder_blocks
from dualsft.storage.vectors import ParamVector

TESTS = Path(__file__).parent


def test_kernels_equal_their_plain_expressions() -> None:
    """The kernels' own code, on the CPU under Triton's interpreter."""
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, str(TESTS / "kernel_checks.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ok") == 10


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_same_losses_and_gradients(arch: str) -> None:
    """fp64: every parameter's gradient with and without, and the modules are as before."""
    model = tiny_model(arch, dtype=torch.float64).eval()
    batch = collate(examples_for(model), 0, "right")
    before = {id(m): vars(m).get("forward") for m in model.modules()}

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        example_objective(model, batch)[0].backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    with fused_blocks(model, wanted=True):
        fused = gradients()
    assert plain.keys() == fused.keys()
    for name, expected in plain.items():  # some models' own norms compute in fp32
        error = (fused[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
        assert float(error) < 1e-4, name
    assert before == {id(m): vars(m).get("forward") for m in model.modules()}


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "gpt2"])
def test_norms_and_mlps_are_recognised(arch: str) -> None:
    """All RMS norms and gated MLPs of these models are replaced: none is slow unseen."""
    model = tiny_model(arch, dtype=torch.float32).eval()
    missed = [
        name
        for name, module in model.named_modules()
        if ("Norm" in type(module).__name__ or type(module).__name__.endswith("MLP"))
        and fused_forward(module, torch.float32) is None
    ]
    assert missed == []


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen3"])
def test_wide_residual_stream_is_nearer_to_the_exact_hidden_states(arch: str) -> None:
    """bf16 weights: the fp32 stream leaves less error than the bf16 one, and ends in bf16."""
    model = tiny_model(arch, dtype=torch.bfloat16).eval()
    exact = tiny_model(arch, dtype=torch.bfloat16).double().eval()
    batch = collate(examples_for(model), 0, "right")
    real = batch.attention_mask.bool()
    with torch.no_grad():
        expected = last_hidden(exact, batch)[real]
        errors = []
        for wide in (False, True):
            with fused_blocks(model, wide=wide, wanted=True):
                hidden = last_hidden(model, batch)
                assert hidden.dtype == torch.bfloat16
                errors.append(float((hidden[real].double() - expected).norm()))
    assert errors[1] < errors[0]


def test_a_model_that_cannot_take_it_keeps_its_own_stream() -> None:
    """GPT-2's LayerNorm in bf16 refuses an fp32 input: the stream stays bf16, and it runs."""
    model = tiny_model("gpt2", dtype=torch.bfloat16).eval()
    batch = collate(examples_for(model), 0, "right")
    with torch.no_grad(), fused_blocks(model, wide=True, wanted=True):
        assert last_hidden(model, batch).dtype in HALF_DTYPES


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_some_candidates(arch: str) -> None:
    """`only` observes those candidates alone, to the same numbers, and starts where they do."""
    model = tiny_model(arch, dtype=torch.float64).eval()
    engine = engine_of(model, "block_linear")
    rows = examples_for(model)
    settings = PassSettings(batch_tokens=64, pad_id=0, padding_side="right")
    whole = ParamVector.zeros(engine.candidates)
    walk(engine, rows, loss_objective(model), settings, QUIET, "whole", sums=whole)
    last = [n for n in engine.candidates if f".{len_of(engine) - 1}." in n]
    part = ParamVector.zeros({n: engine.candidates[n] for n in last})
    batch = collate(rows, 0, "right")
    with engine.tapped(DevicePlacement(part), only=set(last)) as taps:
        taps.begin(len(rows))
        example_objective(model, batch)[0].backward()
    assert 0 < len(last) < len(engine.candidates)
    for name in last:
        assert torch.allclose(part[name], whole[name], rtol=1e-9, atol=1e-12)


def len_of(engine: GhostEngine) -> int:
    return engine.model.config.get_text_config().num_hidden_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family: str) -> None:
    """fp32, all the families of the table: whatever is replaced, the hidden states stay."""
    model = FAMILIES[family].build().eval().float()
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    ones, places = torch.ones_like(ids), torch.arange(9).expand(2, 9)
    batch = Batch(ids, ones, places, ids, padded_right=True)
    with torch.no_grad():
        expected = last_hidden(model, batch)
        with fused_blocks(model, wanted=True):
            got = last_hidden(model, batch)
    assert float((got - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_look_alikes_stay_as_they_are() -> None:
    """A norm that subtracts the mean, an MLP with dropout, one with a clamp, a norm with a gate."""
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.seed_oss.configuration_seed_oss import SeedOssConfig
    from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

    class Clamped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(8, 12), torch.nn.Linear(8, 12)
            self.down_proj, self.act_fn = torch.nn.Linear(12, 8), torch.nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.gate_proj(x).clamp(max=10.0)
            return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    for dtype in (torch.float32, torch.bfloat16):
        for module in (
            CohereLayerNorm(512),
            MambaRMSNormGated(16),
            SeedOssMLP(SeedOssConfig(hidden_size=16, intermediate_size=24, residual_dropout=0.1)),
            Clamped(),
        ):
            assert fused_forward(module.to(dtype), dtype) is None, type(module).__name__


def test_another_rotation_is_left_to_the_model() -> None:
    """cos narrower than q, or another place for the heads: its own function is called."""
    calls: list[tuple[int, ...]] = []

    def own(q, k, cos, sin, unsqueeze_dim=1):  # noqa: ANN001, ANN202
        calls.append(tuple(cos.shape))
        return q, k

    rotate = _rotation(own)
    q, wide, narrow = torch.randn(2, 4, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    rotate(q, q, wide, wide)
    assert calls == []
    rotate(q, q, narrow, narrow)
    rotate(q.transpose(1, 2), q.transpose(1, 2), wide, wide, unsqueeze_dim=2)
    rotate(q, q, wide, wide, 2)
    assert calls == [(2, 3, 4), (2, 3, 8), (2, 3, 8)]


# --- recomputed activations -------------------------------------------------------------------


def recomputed_or_not(arch: str, training: bool, on: bool) -> dict[str, torch.Tensor]:
    model = tiny_model(arch, torch.float32, dropout=0.3 if training else 0.0).train(training)
    torch.manual_seed(4)
    with checkpointed(model, on):
        objective, losses = example_objective(model, collate(examples_for(model, 5), 0))
        objective.backward()
    drawn = {"losses": losses.detach(), "next draw": torch.rand(3)}
    return drawn | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_keep_every_bit(arch: str, training: bool) -> None:
    plain, ours = (
        recomputed_or_not(arch, training, False),
        recomputed_or_not(arch, training, True),
    )
    assert plain.keys() == ours.keys() and len(plain) > 10
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
    if arch == "gpt2" and training:  # dropout is really on
        assert not torch.equal(plain["losses"], recomputed_or_not(arch, False, False)["losses"])


def tapped(arch: str, on: bool) -> tuple[ParamVector, torch.Tensor, torch.Tensor]:
    model = tiny_model(arch, torch.float32)
    engine = engine_of(model)
    sums, direction = ParamVector.zeros(engine.candidates), random_direction(engine)
    batch = collate(examples_for(model, 5), 0)
    with (
        checkpointed(model, on),
        engine.tapped(DevicePlacement(sums, direction), bounds=True) as taps,
    ):
        taps.begin(len(batch.input_ids))
        example_objective(model, batch, observer=engine.head_observer(taps))[0].backward()
    outputs = taps.outputs()
    return sums, outputs["dots"], outputs["inner_sums"]


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

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[0] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def test_less_is_kept() -> None:
    model = tiny_model("llama", torch.float32)
    batch = collate(examples_for(model, 5), 0)
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
    model = tiny_model("llama", torch.float32)
    batch = collate(examples_for(model, 5), 0)
    calls = [0]
    block = decoder_blocks(model)[1][0]
    block.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    with checkpointed(model), torch.no_grad():
        example_objective(model, batch)
    assert calls == [1]
