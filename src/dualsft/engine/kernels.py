"""Triton kernels for the memory-bound operations between matrix products, one memory pass each.

The ghost dot product (Algorithm 1 line 8) and the bounds need ε_t · (U a_t) and ‖ε_t‖ for each
layer and token; `token_dots` reads both factors once. RMS norms, gated activations, rotary
embeddings and the cross-entropy are operations of the model; eager PyTorch reads and writes their
tensors many times (docs/performance.md lists the bytes). Each kernel has an equivalent plain
PyTorch expression in `engine/fused.py`, `engine/losses.py` or `engine/rules.py`, which runs on
other devices and is the reference in the tests.

This module needs Triton and is imported only for CUDA tensors (`fused.kernels_for`). All sums are
in fp32; offsets are 64-bit.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements per program and iteration


def _block(width: int, most: int = _TILE) -> int:
    return min(most, max(16, triton.next_power_of_2(width)))


# --- per-token dot products and norms ----------------------------------------------------------


@triton.jit
def _token_dots(
    moved, grad, norms, dots, bounds, width, WITH_BOUND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dot = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
        m = tl.load(moved + row * width + column, inside, other=0.0).to(tl.float32)
        dot += g * m
        if WITH_BOUND:
            square += g * g
    tl.store(dots + row, tl.load(dots + row) + tl.sum(dot))
    if WITH_BOUND:
        bound = tl.sqrt(tl.sum(square)) * tl.load(norms + row)
        tl.store(bounds + row, tl.load(bounds + row) + bound)


def token_dots(
    moved_MO: Tensor, grad_MO: Tensor, dots_M: Tensor, norms_M: Tensor | None, bounds_M: Tensor
) -> None:
    """Per row: dots += Σ_o moved ⊙ grad and, if `norms_M` is given, bounds += ‖grad‖ · norms."""
    rows, width = grad_MO.shape
    with_bound = norms_M is not None
    _token_dots[(rows,)](
        moved_MO,
        grad_MO,
        norms_M if with_bound else dots_M,  # a valid pointer that is not read
        dots_M,
        bounds_M,
        width,
        WITH_BOUND=with_bound,
        BLOCK=_block(width, 2048),
    )


# --- RMS norm ----------------------------------------------------------------------------------


@triton.jit
def _rms_forward(
    x, weight, y, rstd, rows, width, eps, OFFSET: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    w = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    normed = value * scale[:, None]
    if OFFSET:
        out = normed * (1.0 + w)[None, :]
    else:
        out = normed.to(y.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), inside)
    tl.store(rstd + row, scale, row < rows)


@triton.jit
def _rms_backward(
    grad, x, weight, rstd, grad_x, grad_weight, rows, width, tiles,
    OFFSET: tl.constexpr, WITH_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    if OFFSET:
        w += 1.0
    total = tl.zeros([BLOCK], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, row < rows, other=0.0)
        normed = tl.load(x + at, inside, other=0.0).to(tl.float32) * scale[:, None]
        if WITH_WEIGHT:
            total += tl.sum(g * normed, 0)
        g = g * w[None, :]
        mean = tl.sum(g * normed, 1) / width
        out = scale[:, None] * (g - normed * mean[:, None])
        tl.store(grad_x + at, out.to(grad_x.dtype.element_ty), inside)
    if WITH_WEIGHT:
        tl.store(grad_weight + program.to(tl.int64) * width + column, total, column < width)


def rms_forward(x: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
    """(x̂ ⊙ weight in the weight's dtype, 1 / rms of each row); `offset` uses 1 + weight."""
    width = x.shape[-1]
    rows = x.numel() // width
    y, rstd = torch.empty_like(x, dtype=weight.dtype), x.new_empty(rows, dtype=torch.float32)
    block, per = _rms_tile(width)
    _rms_forward[(triton.cdiv(rows, per),)](
        x, weight, y, rstd, rows, width, eps, OFFSET=offset, ROWS=per, BLOCK=block,
        num_warps=_warps(block * per),
    )  # fmt: skip
    return y, rstd


def rms_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: bool, with_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, with `with_weight`, of the weight."""
    width = x.shape[-1]
    rows = x.numel() // width
    block, per = _rms_tile(width)
    tiles = triton.cdiv(rows, per)
    programs = min(tiles, 1024) if with_weight else tiles
    grad_x = torch.empty_like(x)
    parts = x.new_empty((programs, width), dtype=torch.float32) if with_weight else rstd
    _rms_backward[(programs,)](
        grad, x, weight, rstd, grad_x, parts, rows, width, tiles,
        OFFSET=offset, WITH_WEIGHT=with_weight, ROWS=per, BLOCK=block,
        num_warps=_warps(block * per),
    )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype) if with_weight else None


def _rms_tile(width: int) -> tuple[int, int]:
    """(columns, rows) of a tile: whole rows, several of them if they are short."""
    block = max(16, triton.next_power_of_2(width))
    return block, max(1, 2048 // block)


def _warps(elements: int) -> int:
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16


# --- gated activation --------------------------------------------------------------------------


@triton.jit
def _activation(g, GELU: tl.constexpr):
    """(act(g), act'(g)) for SiLU or tanh-GELU."""
    if GELU:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
        slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g)
        value = 0.5 * g * (1.0 + tanh)
        derivative = 0.5 * (1.0 + tanh) + 0.5 * g * (1.0 - tanh * tanh) * slope
    else:
        gate = 1.0 / (1.0 + tl.exp(-g))
        value = g * gate
        derivative = gate * (1.0 + g * (1.0 - gate))
    return value, derivative


@triton.jit
def _gated_forward(gate, up, y, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, inside, other=0.0).to(tl.float32)
    value, _ = _activation(g, GELU)
    rounded = value.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (rounded * u).to(y.dtype.element_ty), inside)


@triton.jit
def _gated_backward(
    grad, gate, up, grad_gate, grad_up, count, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, inside, other=0.0).to(tl.float32)
    value, derivative = _activation(g, GELU)
    tl.store(grad_up + at, (d * value).to(grad_up.dtype.element_ty), inside)
    tl.store(grad_gate + at, (d * u * derivative).to(grad_gate.dtype.element_ty), inside)


def gated_forward(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """act(gate) ⊙ up."""
    y, count = torch.empty_like(gate), gate.numel()
    _gated_forward[(triton.cdiv(count, 1024),)](gate, up, y, count, GELU=gelu, BLOCK=1024)
    return y


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad_gate, grad_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _gated_backward[(triton.cdiv(count, 1024),)](
        grad, gate, up, grad_gate, grad_up, count, GELU=gelu, BLOCK=1024
    )
    return grad_gate, grad_up


# --- rotary embedding --------------------------------------------------------------------------


@triton.jit
def _rotate(
    x, cos, sin, y, heads, length, half, x_b, x_h, x_t, y_b, y_h, y_t, cos_b,
    BACK: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // length, token % length
    head = tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    inside = (head[:, None] < heads) & (column[None, :] < half)
    turn = cos_b * batch + place * (2 * half) + column
    there = column < half
    c0 = tl.load(cos + turn, there, other=0.0).to(tl.float32)[None, :]
    c1 = tl.load(cos + turn + half, there, other=0.0).to(tl.float32)[None, :]
    s0 = tl.load(sin + turn, there, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + turn + half, there, other=0.0).to(tl.float32)[None, :]
    source = x + batch * x_b + place * x_t + head[:, None] * x_h + column[None, :]
    a = tl.load(source, inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, inside, other=0.0).to(tl.float32)
    if BACK:
        first, second = a * c0 + b * s1, b * c1 - a * s0
    else:
        first, second = a * c0 - b * s0, b * c1 + a * s1
    target = y + batch * y_b + place * y_t + head[:, None] * y_h + column[None, :]
    tl.store(target, first.to(y.dtype.element_ty), inside)
    tl.store(target + half, second.to(y.dtype.element_ty), inside)


def rotate(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, back: bool) -> Tensor:
    """x ⊙ cos + rotate_half(x) ⊙ sin, or with `back` the transpose of that map.

    The result has the shape of x and the memory layout [B, T, H, D].
    """
    batch, heads, length, width = x_BHTD.shape
    assert cos_BTD.shape == sin_BTD.shape and cos_BTD.shape[0] in (1, batch)
    assert cos_BTD.shape[1:] == (length, width) and cos_BTD.is_contiguous()
    y = x_BHTD.new_empty(batch, length, heads, width).transpose(1, 2)
    shared = cos_BTD.shape[0] == 1
    _rotate[(batch * length,)](
        x_BHTD, cos_BTD, sin_BTD, y, heads, length, width // 2,
        x_BHTD.stride(0), x_BHTD.stride(1), x_BHTD.stride(2),
        y.stride(0), y.stride(1), y.stride(2), 0 if shared else length * width,
        BACK=back, HEADS=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(width // 2),
    )  # fmt: skip
    return y


# --- cross-entropy -----------------------------------------------------------------------------


@triton.jit
def _cross_entropy(
    logits, target, weight, value, grad, width, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    grad += row * width
    top = -float("inf")
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, column < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher))
        top = higher
    lse = top + tl.log(total)
    wanted = tl.load(target + row)
    tl.store(value + row, lse - tl.load(logits + wanted).to(tl.float32))
    if WITH_GRAD:
        factor = tl.load(weight + row)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            z = tl.load(logits + column, inside, other=-float("inf")).to(tl.float32)
            p = tl.exp(z - lse) - tl.where(column == wanted, 1.0, 0.0)
            tl.store(grad + column, (p * factor).to(grad.dtype.element_ty), inside)


def cross_entropy(
    logits_CV: Tensor, target_C: Tensor, weight_C: Tensor, grad_CV: Tensor | None
) -> Tensor:
    """Token losses; writes their weighted gradient with respect to the logits into `grad_CV`."""
    rows, width = logits_CV.shape
    value = logits_CV.new_empty(rows, dtype=torch.float32)
    if rows:
        _cross_entropy[(rows,)](
            logits_CV, target_C, weight_C, value, logits_CV if grad_CV is None else grad_CV, width,
            WITH_GRAD=grad_CV is not None, BLOCK=_block(width), num_warps=8,
        )  # fmt: skip
    return value
