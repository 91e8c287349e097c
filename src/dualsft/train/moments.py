"""Low-precision AdamW moments with stochastic rounding, which keeps them unbiased.

Algorithm 1, lines 1 and 12 (Warmup, MaskedFT). beta2 = 0.999 changes a second moment by 0.1 % per
step, less than half a unit in the last place of bf16: with round-to-nearest it would never change.
Both moments are therefore rounded up or down at random, such that the expected value is exact. The
random bits are a hash of (seed, step, parameter, entry). There is no random state, and the bits are
the same after a resume, for any chunk size, and in the kernels of `train/kernels.py`.

`bfloat16` is the plain dtype. `int8` is a logarithmic code of one byte per moment on the fixed grid
2^(k/8), k an integer:

- The code of the second moment v is k of sqrt(v), counted down from 2^top. `top` is one integer per
  parameter, at least log2 of its largest gradient so far. The 255 codes cover 31.75 octaves below
  2^top. Code 0 is zero; nonzero values below the smallest code get the smallest code.
- The code of the first moment m is its sign and k of |m| / sqrt(v), counted down from 2^4 over
  15.75 octaves. AdamW's step is this ratio (below 7.3 for betas 0.9, 0.999), so an entry with small
  gradients keeps its precision next to one with large gradients.

The grid does not depend on `top`, so a moment that does not change is not rounded again when `top`
changes.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import torch
from torch import Tensor

Moments = Literal["float32", "bfloat16", "int8"]
MOMENTS: tuple[Moments, ...] = get_args(Moments)
BYTES: dict[Moments, int] = {"float32": 8, "bfloat16": 4, "int8": 2}
"""Bytes per entry of both moments together."""

Key = tuple[int, int]

MIX_1, MIX_2, MIX_3 = 0x7FEB352D, 0x2C1B3C6D, 0x297A2D39
"""Odd multipliers below 2^31, so that the product with a 32-bit number fits into an int64."""
FOURTHS = (0x000000, 0x1837F0, 0x3504F3, 0x5744FD)
"""Mantissa bits of 2^(j/4) in fp32, j = 0 to 3: the grid of v."""
EIGHTHS = (0x000000, 0x0B95C2, 0x1837F0, 0x25FED7, 0x3504F3, 0x45672A, 0x5744FD, 0x6AC0C7)
"""Mantissa bits of 2^(j/8) in fp32, j = 0 to 7: the grid of sqrt(v) and m."""
LEAST_TOP, MOST_TOP = -30, 63
"""Range of `top` for which every level of the grid is a normal fp32 number."""
RATIO_TOP = 4
"""log2 of the largest |m| / sqrt(v) that has a code."""
_MASK = (1 << 32) - 1


def noise_key(seed: int, step: int, number: int) -> Key:
    """Key of the random bits of one step of one parameter: two 31-bit numbers."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") >> 1 for i in (0, 4))  # type: ignore


def noise(key: Key, first: int, last: int, device: torch.device) -> Tensor:
    """32 random bits for each entry from `first` to `last`, as int64."""
    entry = torch.arange(first, last, device=device)
    low, high = entry & _MASK, entry >> 32
    return _mixed((_mixed(low ^ key[0]) + (high ^ key[1])) & _MASK)


def _mixed(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    x = ((x ^ (x >> 13)) * MIX_3) & _MASK
    return x ^ (x >> 16)


def raised_top(top: Tensor, largest: Tensor) -> Tensor:
    """`top` after a gradient of this maximum; sqrt(v) never exceeds the largest gradient so far."""
    exponent = torch.frexp(largest.float())[1].to(torch.int32)
    wanted = torch.where(largest > 0, exponent, LEAST_TOP).clamp(LEAST_TOP, MOST_TOP)
    return torch.maximum(top, wanted.to(torch.int32).view(1))


def decode(first: Tensor, second: Tensor, top: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both moments in fp32."""
    if first.dtype != torch.uint8:
        return first.float(), second.float()
    assert top is not None
    return _decode_first(first, second, top), decode_second(second, top)


def encode(
    exp_avg: Tensor, exp_avg_sq: Tensor, like: torch.dtype, top: Tensor | None, bits: Tensor
) -> tuple[Tensor, Tensor]:
    """Round both fp32 moments stochastically to bf16 or to codes; `bits` comes from `noise`."""
    low, high = bits & 0xFFFF, bits >> 16
    if like == torch.bfloat16:
        return _round_bfloat16(exp_avg, low), _round_bfloat16(exp_avg_sq, high)
    assert top is not None
    second = _encode_second(exp_avg_sq, top, high)
    return _encode_first(exp_avg, second, top, low), second


def decode_second(code: Tensor, top: Tensor) -> Tensor:
    """v in fp32; its grid is 2^(q/4), the square of the grid of sqrt(v)."""
    code = code.to(torch.int32)
    return torch.where(code > 0, _level(code - 255 + 8 * top, FOURTHS), 0.0)


def _round_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Add 16 random bits below the kept ones: they carry with the right probability."""
    wide = x.view(torch.int32) + bits.to(torch.int32)
    return (wide >> 16).to(torch.int16).view(torch.bfloat16)


def _encode_second(v: Tensor, top: Tensor, bits: Tensor) -> Tensor:
    least = _level(8 * top - 254, FOURTHS)
    number = _rounded(torch.maximum(v, least), FOURTHS, bits) + 255 - 8 * top
    return torch.where(v > 0, number.clamp(1, 255), 0).to(torch.uint8)


def _encode_first(m: Tensor, second: Tensor, top: Tensor, bits: Tensor) -> Tensor:
    shift = second.to(torch.int32) - 255 + 8 * top + 8 * RATIO_TOP - 127
    least, size = _level(shift + 1, EIGHTHS), m.abs()
    below = (_chance(bits) * least < size).to(torch.int32)  # rounds to code 1 or to zero
    number = _rounded(torch.maximum(size, least), EIGHTHS, bits) - shift
    code = torch.where(size < least, below, number.clamp(0, 127))
    code = torch.where(second > 0, code, 0)
    return (code + torch.where((m < 0) & (code > 0), 128, 0)).to(torch.uint8)


def _decode_first(code: Tensor, second: Tensor, top: Tensor) -> Tensor:
    number = code.to(torch.int32) & 127
    shift = second.to(torch.int32) - 255 + 8 * top + 8 * RATIO_TOP - 127
    size = torch.where(number > 0, _level(number + shift, EIGHTHS), 0.0)
    return torch.where(code > 127, -size, size)


def _level(number: Tensor, grid: tuple[int, ...]) -> Tensor:
    """2^(number / len(grid)) in fp32, built from exponent and mantissa bits."""
    shift = len(grid).bit_length() - 1
    mantissa = torch.tensor(grid, dtype=torch.int32, device=number.device)
    exponent = (number >> shift) + 127
    return ((exponent << 23) | mantissa[(number & (len(grid) - 1)).long()]).view(torch.float32)


def _rounded(x: Tensor, grid: tuple[int, ...], bits: Tensor) -> Tensor:
    """Round x > 0 to the level below or above, with expected value x; return the level's number."""
    shift = len(grid).bit_length() - 1
    raw = x.contiguous().view(torch.int32)
    mantissa = raw & 0x7FFFFF
    number = ((raw >> 23) - 127) << shift
    for border in grid[1:]:
        number = number + (mantissa >= border)
    low, high = _level(number, grid), _level(number + 1, grid)
    return number + (_chance(bits) * (high - low) < x - low)


def _chance(bits: Tensor) -> Tensor:
    """16 random bits as a number in (0, 1)."""
    return (bits.to(torch.float32) + 0.5) * (1.0 / 65536.0)
