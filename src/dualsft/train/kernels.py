"""Triton kernels of SparseAdamW: gather inside backward, and the fused step of one tensor.

Algorithm 1, lines 1 and 12 (Warmup, MaskedFT). `update` reads index, gradient, moments and the low
half of the master once, and writes weight, low half and moments once. `train/step.py` and
`train/compact.py` define these quantities; their plain PyTorch path is the reference in the tests.
A masked parameter is processed bucket by bucket (2^16 positions each), a fully selected one in
consecutive blocks. Offsets are 64-bit.

This module needs Triton. It is imported only for CUDA tensors (`step.kernels_for`), or by the tests
with TRITON_INTERPRET=1.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualsft.train import compact
from dualsft.train.compact import CompactIndex
from dualsft.train.step import Held, Step

_BLOCK = 1024  # entries per program and iteration
_MOST_PROGRAMS = 16  # maximum number of programs per bucket

_E1, _E2, _E3, _E4, _E5, _E6, _E7 = (tl.constexpr(bits) for bits in compact.EIGHTHS[1:])
_MIX_1 = tl.constexpr(compact.MIX_1)
_MIX_2 = tl.constexpr(compact.MIX_2)
_MIX_3 = tl.constexpr(compact.MIX_3)
_RATIO = tl.constexpr(8 * compact.RATIO_TOP - 127)
_TINY = tl.constexpr(1.0 / 65536.0)

_EXACT, _BFLOAT16, _INT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_OWN, _HALVES, _BESIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Storage of the master: the weight itself; weight and low half; a separate vector."""


# --- random bits and codes, as in train/compact.py ---------------------------------------------


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) * _MIX_2
    x = (x ^ (x >> 13)) * _MIX_3
    return x ^ (x >> 16)


@triton.jit
def _noise(entry, key_0, key_1):
    low = entry.to(tl.uint32)
    high = (entry >> 32).to(tl.uint32)
    return _mixed(_mixed(low ^ key_0.to(tl.uint32)) + (high ^ key_1.to(tl.uint32)))


@triton.jit
def _chance(bits):
    return (bits.to(tl.float32) + 0.5) * _TINY


@triton.jit
def _level(number, PER_OCTAVE: tl.constexpr):
    """2^(number / PER_OCTAVE); PER_OCTAVE is 4 or 8."""
    j = number & (PER_OCTAVE - 1)
    if PER_OCTAVE == 4:
        mantissa = tl.where(j == 1, _E2, tl.where(j == 2, _E4, tl.where(j == 3, _E6, 0)))
        exponent = number >> 2
    else:
        upper = tl.where(j == 4, _E4, tl.where(j == 5, _E5, tl.where(j == 6, _E6, _E7)))
        lower = tl.where(j == 1, _E1, tl.where(j == 2, _E2, tl.where(j == 3, _E3, 0)))
        mantissa = tl.where(j >= 4, upper, lower)
        exponent = number >> 3
    return (((exponent + 127) << 23) | mantissa).to(tl.float32, bitcast=True)


@triton.jit
def _round(x, bits, PER_OCTAVE: tl.constexpr):
    """Round to the level below or above, with expected value x; return the level's number."""
    raw = x.to(tl.int32, bitcast=True)
    f = raw & 0x7FFFFF
    number = ((raw >> 23) - 127) * PER_OCTAVE
    number += (f >= _E2).to(tl.int32) + (f >= _E4).to(tl.int32) + (f >= _E6).to(tl.int32)
    if PER_OCTAVE == 8:
        number += (f >= _E1).to(tl.int32) + (f >= _E3).to(tl.int32)
        number += (f >= _E5).to(tl.int32) + (f >= _E7).to(tl.int32)
    low = _level(number, PER_OCTAVE)
    return number + (_chance(bits) * (_level(number + 1, PER_OCTAVE) - low) < x - low).to(tl.int32)


@triton.jit
def _clamped(x, least, most):
    return tl.minimum(tl.maximum(x, least), most)


@triton.jit
def _encode_second(v, top, bits):
    number = _round(tl.maximum(v, _level(8 * top - 254, 4)), bits, 4) + 255 - 8 * top
    return tl.where(v > 0, _clamped(number, 1, 255), 0)


@triton.jit
def _encode_first(m, second, top, bits):
    shift = second - 255 + 8 * top + _RATIO
    least = _level(shift + 1, 8)
    size = tl.abs(m)
    below = (_chance(bits) * least < size).to(tl.int32)
    number = _clamped(_round(tl.maximum(size, least), bits, 8) - shift, 0, 127)
    code = tl.where(second > 0, tl.where(size < least, below, number), 0)
    return code + tl.where((m < 0) & (code > 0), 128, 0)


@triton.jit
def _decode_first(code, second, top):
    number = code & 127
    size = tl.where(number > 0, _level(number + second - 255 + 8 * top + _RATIO, 8), 0.0)
    return tl.where(code > 127, -size, size)


@triton.jit
def _round_bfloat16(x, bits):
    return ((x.to(tl.int32, bitcast=True) + bits.to(tl.int32)) >> 16).to(tl.int16)


@triton.jit
def _widen(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


# --- the step ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["bucket", "first", "count", "key_0", "key_1"])
def _update(
    bucket, first, count, offsets, pointers, weight, beside, grad, exp_avg, exp_avg_sq, scale, top,
    new_top, decay, step_size, take_1, beta_2, take_2, correction, eps, key_0, key_1,
    MASKED: tl.constexpr, MASTER: tl.constexpr, MOMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update `count` entries from entry `first`, where `beside`, `grad` and the moments start.

    A program handles one bucket of a masked parameter, from `bucket`, or one block of a fully
    selected one. `place` is the flat position in the weight, `entry` the number among the selected
    entries, and `at` the number among these.
    """
    number = tl.program_id(0).to(tl.int64) + bucket
    if MASKED:
        begin = tl.maximum(tl.load(pointers + number) - first, 0)
        end = tl.minimum(tl.load(pointers + number + 1) - first, count)
    else:
        begin = number * BLOCK
        end = tl.minimum(begin + BLOCK, count)
    for start in range(begin + tl.program_id(1) * BLOCK, end, BLOCK * tl.num_programs(1)):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        entry = first.to(tl.int64) + at
        inside = at < end
        place = entry
        if MASKED:
            offset = tl.load(offsets + entry, inside, other=0).to(tl.int64) & 0xFFFF
            place = (number << 16) + offset
        g = tl.load(grad + at, inside, other=0.0).to(tl.float32) * tl.load(scale)
        if MASTER == _HALVES:
            high = tl.load(weight + place, inside, other=0).to(tl.int32) << 16
            low = tl.load(beside + at, inside, other=0).to(tl.int32)
            master = (high + low).to(tl.float32, bitcast=True)
        elif MASTER == _BESIDE:
            master = tl.load(beside + at, inside, other=0.0)
        else:
            master = tl.load(weight + place, inside, other=0.0)
        if MOMENTS == _INT8:
            now = tl.load(top)
            code_1 = tl.load(exp_avg + at, inside, other=0).to(tl.int32)
            code_2 = tl.load(exp_avg_sq + at, inside, other=0).to(tl.int32)
            m = _decode_first(code_1, code_2, now)
            v = tl.where(code_2 > 0, _level(code_2 - 255 + 8 * now, 4), 0.0)
        elif MOMENTS == _BFLOAT16:
            m = _widen(tl.load(exp_avg + at, inside, other=0))
            v = _widen(tl.load(exp_avg_sq + at, inside, other=0))
        else:
            m = tl.load(exp_avg + at, inside, other=0.0)
            v = tl.load(exp_avg_sq + at, inside, other=0.0)
        m = m + take_1 * (g - m)
        v = v * beta_2 + take_2 * g * g
        master = master * decay - step_size * m / (tl.sqrt(v) / correction + eps)
        if MOMENTS == _EXACT:
            tl.store(exp_avg + at, m, inside)
            tl.store(exp_avg_sq + at, v, inside)
        else:
            bits = _noise(entry, key_0, key_1)
            if MOMENTS == _INT8:
                later = tl.load(new_top)
                second = _encode_second(v, later, bits >> 16)
                code = _encode_first(m, second, later, bits & 0xFFFF)
                tl.store(exp_avg + at, code.to(tl.uint8), inside)
                tl.store(exp_avg_sq + at, second.to(tl.uint8), inside)
            else:
                tl.store(exp_avg + at, _round_bfloat16(m, bits & 0xFFFF), inside)
                tl.store(exp_avg_sq + at, _round_bfloat16(v, bits >> 16), inside)
        if MASTER == _HALVES:
            raw = master.to(tl.int32, bitcast=True)
            high = (raw + 0x8000) >> 16
            tl.store(weight + place, high.to(tl.int16), inside)
            tl.store(beside + at, (raw - (high << 16)).to(tl.int16), inside)
        elif MASTER == _BESIDE:
            tl.store(weight + place, master.to(weight.dtype.element_ty), inside)
            tl.store(beside + at, master, inside)
        else:
            tl.store(weight + place, master, inside)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def update(
    weight: Tensor, index: CompactIndex | None, grad: Tensor, held: Held, first: int, step: Step
) -> None:
    """Fused `step.update`: the same arguments, all tensors on one device."""
    if grad.numel() == 0:
        return
    exp_avg, exp_avg_sq = held["exp_avg"], held["exp_avg_sq"]
    kinds = {torch.float32: _EXACT, torch.bfloat16: _BFLOAT16, torch.uint8: _INT8}
    moments = kinds[exp_avg.dtype].value
    if exp_avg.dtype == torch.bfloat16:
        exp_avg, exp_avg_sq = exp_avg.view(torch.int16), exp_avg_sq.view(torch.int16)
    master, beside = _OWN, grad  # `grad` stands in for pointers that the kernel does not read
    if weight.dtype == torch.bfloat16:
        master, beside, weight = _HALVES, held["low"], weight.view(torch.int16)
    elif weight.dtype == torch.float16:
        master, beside = _BESIDE, held["master"]
    scale = _one(grad.device) if step.scale is None else step.scale.float()
    tops = held.get("top", grad), grad if step.top is None else step.top
    rest = (
        *(weight, beside, grad, exp_avg, exp_avg_sq, scale, *tops),
        *(1 - step.lr * step.weight_decay, step.size, 1 - step.betas[0]),
        *(step.betas[1], 1 - step.betas[1], step.root_correction, step.eps, *step.key),
    )
    kind = {"MASTER": master.value, "MOMENTS": moments, "BLOCK": _BLOCK}
    count = grad.numel()
    with torch.cuda.device_of(grad):
        if index is None:
            grid = (triton.cdiv(count, _BLOCK), 1)
            _update[grid](0, first, count, grad, grad, *rest, MASKED=False, **kind)
        else:
            begin, end = index.buckets(first, first + count)
            places = (index.offsets, index.pointers)
            grid = _grid(end - begin, count)
            _update[grid](begin, first, count, *places, *rest, MASKED=True, **kind)


# --- the gradient ------------------------------------------------------------------------------


@triton.jit
def _gather(dense, offsets, pointers, sums, out, ADD: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    begin = tl.load(pointers + number)
    end = tl.load(pointers + number + 1)
    for start in range(begin + tl.program_id(1) * BLOCK, end, BLOCK * tl.num_programs(1)):
        entry = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = entry < end
        offset = tl.load(offsets + entry, inside, other=0).to(tl.int64) & 0xFFFF
        value = tl.load(dense + (number << 16) + offset, inside, other=0.0)
        if ADD:
            before = tl.load(sums + entry, inside, other=0.0).to(tl.float32)
            value = before + value.to(tl.float32)
        tl.store(out + entry, value, inside)


def gather(dense: Tensor, index: CompactIndex, sums: Tensor | None) -> Tensor:
    """The selected entries of a dense gradient, added to `sums` in fp32 unless it is None."""
    count = len(index)
    if sums is None:  # a first micro-batch keeps the gradient's dtype
        out = torch.empty(count, dtype=dense.dtype, device=dense.device)
    elif sums.dtype == torch.float32:
        out = sums
    else:
        out = torch.empty(count, dtype=torch.float32, device=dense.device)
    with torch.cuda.device_of(dense):
        places = (dense, index.offsets, index.pointers, out if sums is None else sums, out)
        grid = _grid(index.pointers.numel() - 1, count)
        _gather[grid](*places, ADD=sums is not None, BLOCK=_BLOCK)
    return out


def _grid(num_buckets: int, num_entries: int) -> tuple[int, int]:
    """Launch grid: (buckets, programs per bucket)."""
    programs = triton.cdiv(num_entries, num_buckets * _BLOCK)
    return num_buckets, max(1, min(_MOST_PROGRAMS, programs))
