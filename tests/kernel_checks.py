"""Each Triton kernel against its plain expression; run by test_fused.py with TRITON_INTERPRET=1,
so that the kernels' own code runs on a CPU, and by tests/gpu on a device.

    python tests/kernel_checks.py [cpu|cuda]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from dualsft.engine import kernels, losses
from dualsft.engine.fused import gated, rms_norm, rotated


def near(ours: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 8.0) -> None:
    """Equal up to the rounding of the dtype, relative to the largest entry."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    ours, expected = ours.double().cpu(), expected.double().cpu()
    scale = float(expected.detach().abs().max())
    error = float((ours - expected).abs().max())
    assert scale > 0, "the expected result is zero: the check would say nothing"
    assert error <= factor * torch.finfo(dtype).eps * scale, f"error {error / scale:.3g}"


class Plain:
    """Gradients by the plain expressions, in fp64 and on the CPU."""

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        self.inputs = [x.detach().cpu().double().requires_grad_() for x in inputs]
        self.value = function(*self.inputs)

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.value, self.inputs, grad.cpu().double())


def check_token_dots(device: str, dtype: torch.dtype) -> None:
    moved, grad = (torch.randn(37, 2500, device=device).to(dtype) for _ in range(2))
    norms, dots, bounds = torch.rand(37, device=device), *torch.ones(2, 37, device=device)
    kernels.token_dots(moved, grad, dots, norms, bounds)
    wide = (moved.double() * grad.double()).sum(1)
    near(dots, (1 + wide).float(), torch.float32, 64)
    near(bounds, (1 + grad.double().norm(dim=1) * norms).float(), torch.float32, 64)
    untouched = bounds.clone()
    kernels.token_dots(moved, grad, dots, None, bounds)
    near(dots, (1 + 2 * wide).float(), torch.float32, 64)
    assert torch.equal(bounds, untouched)


def check_rms(device: str, dtype: torch.dtype) -> None:
    for width, offset in ((96, False), (128, True), (3072, False)):
        x = torch.randn(5, 7, width, device=device).to(dtype)
        weight = torch.randn(width, device=device).to(dtype)
        grad = torch.randn_like(x)
        y, rstd = kernels.rms_forward(x, weight, 1e-5, offset)
        plain = Plain(lambda a, b, o=offset: rms_norm(a, b, 1e-5, o), x, weight)
        near(y, plain.value.to(dtype), dtype)
        grad_x, grad_weight = kernels.rms_backward(grad, x, weight, rstd, offset, True)
        expected_x, expected_weight = plain.gradients(grad)
        near(grad_x, expected_x.to(dtype), dtype)
        assert grad_weight is not None
        near(grad_weight, expected_weight.to(dtype), dtype)
        assert torch.equal(kernels.rms_backward(grad, x, weight, rstd, offset, False)[0], grad_x)
        wide, rstd = kernels.rms_forward(x.float(), weight, 1e-5, offset)  # a wide residual stream
        assert torch.equal(wide, y)
        wide_x, _ = kernels.rms_backward(grad, x.float(), weight, rstd, offset, False)
        assert wide_x.dtype == torch.float32
        near(wide_x, expected_x.float(), torch.float32, 64)


def check_gated(device: str, dtype: torch.dtype) -> None:
    for gelu in (False, True):
        gate, up, grad = (3 * torch.randn(3, 1500, device=device).to(dtype) for _ in range(3))
        plain = Plain(lambda a, b, g=gelu: gated(a, b, g), gate, up)
        near(kernels.gated_forward(gate, up, gelu), plain.value.to(dtype), dtype)
        for ours, expected in zip(
            kernels.gated_backward(grad, gate, up, gelu), plain.gradients(grad), strict=True
        ):
            near(ours, expected.to(dtype), dtype)
        far = torch.full((1024,), -100.0, device=device, dtype=dtype)
        assert torch.isfinite(kernels.gated_forward(far, far, gelu)).all()
        assert all(torch.isfinite(g).all() for g in kernels.gated_backward(far, far, far, gelu))


def check_rotate(device: str, dtype: torch.dtype) -> None:
    for heads, width, rows in ((3, 64, 2), (8, 80, 1)):
        x = torch.randn(2, 11, heads, width, device=device).to(dtype).transpose(1, 2)
        cos, sin = (torch.randn(rows, 11, width, device=device).to(dtype) for _ in range(2))
        plain = Plain(lambda a, c=cos, s=sin: rotated(a, c.double().cpu(), s.double().cpu()), x)
        near(kernels.rotate(x, cos, sin, False), plain.value.to(dtype), dtype)
        (expected,) = plain.gradients(x)
        near(kernels.rotate(x, cos, sin, True), expected.to(dtype), dtype)


def check_cross_entropy(device: str, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(9, 5003, device=device)).to(dtype)
    target = torch.randint(0, 5003, (9,), device=device)
    weight = torch.rand(9, device=device)
    wide = logits.double().cpu().requires_grad_()
    plain = torch.nn.functional.cross_entropy(wide, target.cpu(), reduction="none")
    (expected,) = torch.autograd.grad((plain * weight.cpu().double()).sum(), wide)
    near(kernels.cross_entropy(logits, target, weight, None), plain.float(), torch.float32, 64)
    grad = torch.empty_like(logits)
    near(kernels.cross_entropy(logits, target, weight, grad), plain.float(), torch.float32, 64)
    near(grad, expected.to(dtype), dtype)
    if dtype == torch.float32:
        check_weighed(logits, target, weight)


def check_weighed(logits: Tensor, target: Tensor, weight: Tensor) -> None:
    """Token weights that depend on the loss itself, in the kernel's path and in the plain one."""
    loss = losses.CrossEntropy(target, weight, lambda v: torch.exp(v / -2.0).clamp_(min=0.01))
    rows = slice(0, len(target))
    values, grads = loss(rows, logits.double(), True)
    losses.kernels_for = lambda x: kernels
    found = loss.in_one_kernel(rows, logits.clone(), torch.float32)
    assert found is not None
    near(found[0], values.float(), torch.float32, 64)
    near(found[1], grads.float(), torch.float32, 64)
    alone = loss.in_one_kernel(rows, logits.clone(), None)
    assert alone is not None
    assert torch.equal(alone[0], found[0]) and torch.equal(alone[1], logits)


CHECKS = (check_token_dots, check_rms, check_gated, check_rotate, check_cross_entropy)


def main(device: str = "cpu") -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for check in CHECKS:
            torch.manual_seed(0)
            check(device, dtype)
            print(check.__name__, dtype, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
