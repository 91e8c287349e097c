"""The optimizer's Triton kernels against its plain path; run by test_optim_lean.py with
TRITON_INTERPRET=1, so that the kernels' own code runs on a CPU, and by tests/gpu on a device.

    python tests/adam_kernel_checks.py [cpu|cuda]
"""

from __future__ import annotations

import sys
from typing import get_args

import torch
from torch import Tensor, nn

from dualsft.train import compact
from dualsft.train import kernels as adam_kernels
from dualsft.train import optimizer as optim
from dualsft.train import step as adam_step
from dualsft.train.compact import BUCKET, CompactIndex, Moments
from dualsft.train.optimizer import SparseAdamW
from dualsft.train.step import SCALARS, Held, Step

NUM_POSITIONS = 3 * BUCKET + 1234
NUM_WHOLE = 3000  # of a parameter selected whole
DRAW = torch.Generator().manual_seed(0)


def some_index(device: str, kind: str) -> CompactIndex | None:
    """Whole; scattered, with an empty bucket and a crowded one; or a single entry at the end."""
    if kind == "whole":
        return None
    if kind == "single":
        index = torch.tensor([NUM_POSITIONS - 1])
    else:
        chosen = torch.rand(NUM_POSITIONS, generator=DRAW) < 0.005
        chosen[:3000] = True
        chosen[BUCKET : 2 * BUCKET] = False
        index = chosen.nonzero().view(-1)
    return CompactIndex.encode(index.to(device), NUM_POSITIONS)


def copies(held: Held) -> Held:
    return {name: t.clone() for name, t in held.items()}


def check_update(device: str, dtype: torch.dtype, moments: Moments, kind: str, parts: int) -> None:
    """Three steps of each; moments and masters agree up to rounding, and as codes almost always."""
    index = some_index(device, kind)
    size = NUM_WHOLE if index is None else NUM_POSITIONS
    weight = torch.randn(size, generator=DRAW).to(device, dtype)
    count = NUM_WHOLE if index is None else len(index)
    plain = adam_step.new_state(weight, index, moments, weight.device, False)
    fused, fused_weight, start = copies(plain), weight.clone(), weight.clone()
    sizes = torch.exp(4 * torch.randn(count, generator=DRAW))
    for step in (1, 2, 3):
        grad = (sizes * torch.randn(count, generator=DRAW) * 1e-4).to(device)
        grad = grad.to(torch.float32 if step == 2 else dtype)
        scale = None if step == 1 else torch.tensor(0.37, device=device)
        top = None
        if moments == "int8":
            largest = torch.linalg.vector_norm(grad.float(), torch.inf)
            top = compact.raised_top(plain["top"], largest)
        key = compact.noise_key(7, step, 3)
        numbers = Step(step, 1e-3, (0.9, 0.999), 1e-8, 0.1, key, scale, top)
        adam_step.update(weight, index, grad, plain, 0, numbers)
        borders = [count * i // parts for i in range(parts + 1)]
        for first, last in zip(borders, borders[1:], strict=False):
            part = {n: t if n in SCALARS else t[first:last] for n, t in fused.items()}
            adam_kernels.update(fused_weight, index, grad[first:last], part, first, numbers)
        if top is not None:
            plain["top"], fused["top"] = top, top.clone()
    compare(plain, fused, moments)
    ours = adam_step.read_masters(fused_weight, index, fused, 0, count)
    expected = adam_step.read_masters(weight, index, plain, 0, count)
    near = (ours - expected).abs() <= 2e-6 * (1 + expected.abs())
    far = int((~near).sum())
    assert far <= (0 if moments == "float32" else 0.005 * count), f"{far} masters of {count}"
    assert not torch.equal(expected, adam_step.read_masters(start, index, {}, 0, count))
    if index is not None:
        untouched = torch.ones(NUM_POSITIONS, dtype=torch.bool, device=device)
        untouched[index.decode()] = False
        assert torch.equal(fused_weight[untouched], start[untouched])
        moved = bool((fused_weight != start).any())
        assert moved or count == 1, "a single bf16 weight may well round to where it was"


def compare(plain: Held, fused: Held, moments: Moments) -> None:
    """Moments: equal up to rounding in fp32, and the same bits nearly everywhere in fewer bits."""
    root = plain["exp_avg_sq"].float().sqrt()
    for name, unit in (("exp_avg", root), ("exp_avg_sq", root * root)):
        assert fused[name].dtype == plain[name].dtype and bool((plain[name] != 0).any())
        if moments == "float32":
            assert bool(((fused[name] - plain[name]).abs() <= 1e-5 * unit).all())
        else:
            same = float((fused[name] == plain[name]).float().mean())
            assert same > 0.995, f"{name}: {same:.4f} of the entries have the same bits"


def check_gather(device: str, dtype: torch.dtype, kind: str) -> None:
    index = some_index(device, kind)
    assert index is not None
    first, second, third = (
        torch.randn(NUM_POSITIONS, generator=DRAW).to(device, dtype) for _ in range(3)
    )
    where = index.decode()
    sums: Tensor | None = None
    expected: Tensor | None = None
    for dense in (first, second, third):
        sums = adam_kernels.gather(dense, index, sums)
        one = dense[where]
        expected = one if expected is None else expected.float() + one.float()
        assert sums.dtype == expected.dtype and torch.equal(sums, expected)


def check_offload(device: str, moments: Moments) -> None:
    """The same bits with the state in the host's memory, brought over in several parts."""
    weights, states = [], []
    for offload in (False, True):
        draw = torch.Generator().manual_seed(1)
        values = [torch.randn(NUM_POSITIONS, generator=draw).bfloat16() for _ in range(5)]
        named = [(f"p{i}", nn.Parameter(value.to(device))) for i, value in enumerate(values)]
        indices = {
            name: None if name == "p1" else torch.arange(i, 9000)
            for i, (name, _) in enumerate(named)
        }
        optimizer = SparseAdamW(
            named, indices, lr=1e-2, moments=moments, offload=offload, free_gradients=True
        )
        for _ in range(3):
            for _, p in named:
                (p * torch.randn(p.shape, generator=draw).to(device)).sum().backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        held = [t for _, p in named for t in optimizer.state[p].values() if t.numel() > 1]
        assert all(t.is_cpu for t in held) or not offload
        weights.append([p.detach().cpu() for _, p in named])
        states.append([t.cpu() for t in held])
    for one, other in zip(weights[0] + states[0], weights[1] + states[1], strict=True):
        assert torch.equal(one, other)


def main(device: str) -> None:
    optim.PART = 4000
    for moments in get_args(Moments):
        check_offload(device, moments)
        print(f"offload: {moments}: agrees", flush=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind in ("scattered", "single"):
            check_gather(device, dtype, kind)
        for moments in get_args(Moments) if dtype == torch.bfloat16 else ("float32", "int8"):
            for kind in ("whole", "scattered", "single"):
                check_update(device, dtype, moments, kind, parts=3 if kind == "scattered" else 1)
                print(f"update: {dtype}, {moments}, {kind}: agrees", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
