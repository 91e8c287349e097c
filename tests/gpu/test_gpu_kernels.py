"""On a CUDA device: the compiled kernels, and walks and training through them.

Run there with `python -m pytest tests/gpu -m gpu`; `make test` leaves these out (it runs the same
kernels under Triton's interpreter).
"""

from __future__ import annotations

import kernel_checks
import numpy as np
import pytest
import torch
from models import ARCHITECTURES, tiny_model
from test_ghost import QUIET, examples_for, random_direction

from dualsft.data.examples import collate
from dualsft.engine.fused import fused_blocks
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import example_objective
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.model.load import find_candidates
from dualsft.storage.vectors import ParamVector

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("check", kernel_checks.CHECKS, ids=lambda c: c.__name__)
def test_kernel_equals_its_plain_expression(check, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check("cuda", dtype)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_walk_equals_the_cpu_s_in_fp64(arch: str) -> None:
    """fp32 through the kernels against fp64 without them: sums, dots, bounds, losses."""
    found = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model = tiny_model(arch, dtype=dtype).eval().to(device)
        engine = GhostEngine(model, find_candidates(model, "all"))
        sums = ParamVector.zeros(engine.candidates)
        direction = ParamVector({n: t.to(device) for n, t in random_direction(engine).items()})
        result = walk(
            engine,
            examples_for(model),
            loss_objective(model),
            PassSettings(batch_tokens=64, pad_id=0, padding_side="right"),
            QUIET,
            "pool",
            sums=sums,
            direction=direction,
            bounds=True,
        )
        found[device] = (sums, result)
    (sums, result), (sums_gpu, result_gpu) = found["cpu"], found["cuda"]
    for name, expected in sums.items():
        error = (sums_gpu[name].cpu().double() - expected).abs().max()
        assert error <= 1e-4 * expected.abs().max() + 1e-9, name
    for field in ("values", "dots", "inner_sums"):
        ours, expected = getattr(result_gpu, field), getattr(result, field)
        assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_training_gradients_are_the_model_s_own(arch: str) -> None:
    """fp32 with every parameter trainable: fused blocks give the gradients of the plain ones."""
    model = tiny_model(arch, dtype=torch.float32).eval().to("cuda")
    batch = collate(examples_for(model), 0, "right", "cuda")

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        example_objective(model, batch)[0].backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    with fused_blocks(model):
        patched = any("forward" in vars(m) for m in model.modules())
        fused = gradients()
    assert patched == (arch != "gpt2")
    assert plain.keys() == fused.keys()
    for name, expected in plain.items():
        error = (fused[name] - expected).abs().max()
        assert error <= 1e-4 * expected.abs().max() + 1e-9, name
