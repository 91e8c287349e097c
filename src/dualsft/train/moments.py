"""The two moments of AdamW in fewer bits, and the random rounding that keeps them unbiased.

Algorithm 1, lines 1 and 12 (Warmup, MaskedFT). beta2 = 0.999 moves a second moment by 0.1 % a step,
less than half a step of bf16: rounded to nearest it would freeze. So both moments are rounded up or
down at random, with the probabilities that make the expected value right. The random bits are a
hash of (seed, step, parameter, entry): no random state, and the same bits after a resume, in any
chunks, and in the kernels of `train/kernels.py`.

`bfloat16` is the plain type. `int8` is a logarithmic code of one byte a moment, on the fixed grid
of numbers 2^(k/8), k whole: the code of the second moment v is k of sqrt(v), counted down from
2^top; `top` is a whole number kept once a parameter, at least log2 of the largest gradient it ever
saw. 255 codes are 31.75 octaves below it; 0 is zero, and what is smaller than the least code but
not zero gets the least code. The code of the first moment m is its sign and k of |m| / sqrt(v),
counted down from 2^4 over 15.75 octaves: it is this ratio that AdamW's step is made of (and it is
below 7.3 for betas 0.9, 0.999), so an entry with small gradients keeps its precision next to one
with large gradients. Because the grid stays where it is, a moment that does not change is not
rounded again, also when `top` moves.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import torch
from torch import Tensor

Moments = Literal["float32", "bfloat16", "int8"]
MOMENTS: tuple[Moments, ...] = get_args(Moments)
BYTES: dict[Moments, int] = {"float32": 8, "bfloat16": 4, "int8": 2}
"""Bytes an entry that both moments take."""

Key = tuple[int, int]

MIX_1, MIX_2, MIX_3 = 0x7FEB352D, 0x2C1B3C6D, 0x297A2D39
"""Odd multipliers below 2^31: a product with a 32-bit number fits an int64."""
FOURTHS = (0x000000, 0x1837F0, 0x3504F3, 0x5744FD)
"""Mantissa bits of 2^(j/4) in fp32, j = 0 to 3: the grid of v."""
EIGHTHS = (0x000000, 0x0B95C2, 0x1837F0, 0x25FED7, 0x3504F3, 0x45672A, 0x5744FD, 0x6AC0C7)
"""Mantissa bits of 2^(j/8) in fp32, j = 0 to 7: the grid of sqrt(v) and m."""
LEAST_TOP, MOST_TOP = -30, 63
"""Where `top` may lie, so that every level is a normal fp32 number."""
RATIO_TOP = 4
"""|m| / sqrt(v) up to 2^4 has a code of its own."""
_MASK = (1 << 32) - 1


def noise_key(seed: int, step: int, number: int) -> Key:
    """Two 31-bit numbers for one step of one parameter."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") >> 1 for i in (0, 4))  # type: ignore


def noise(key: Key, first: int, last: int, device: torch.device) -> Tensor:
    """A hash of 32 bits for each entry from `first` to `last`, in int64."""
    entry = torch.arange(first, last, device=device)
    low, high = entry & _MASK, entry >> 32
    return _mixed((_mixed(low ^ key[0]) + (high ^ key[1])) & _MASK)


def _mixed(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    x = ((x ^ (x >> 13)) * MIX_3) & _MASK
    return x ^ (x >> 16)


def raised_top(top: Tensor, largest: Tensor) -> Tensor:
    """`top` after gradients of this size: sqrt(v) is at most the largest gradient so far."""
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
    """Both moments, fp32, rounded at random to bf16 or to codes; `bits` is from `noise`."""
    low, high = bits & 0xFFFF, bits >> 16
    if like == torch.bfloat16:
        return _round_bfloat16(exp_avg, low), _round_bfloat16(exp_avg_sq, high)
    assert top is not None
    second = _encode_second(exp_avg_sq, top, high)
    return _encode_first(exp_avg, second, top, low), second


def decode_second(code: Tensor, top: Tensor) -> Tensor:
    """v, whose grid is 2^(q/4)."""
    code = code.to(torch.int32)
    return torch.where(code > 0, _level(code - 255 + 8 * top, FOURTHS), 0.0)


def _round_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Adding 16 random bits below the kept ones carries with the right probability."""
    wide = x.view(torch.int32) + bits.to(torch.int32)
    return (wide >> 16).to(torch.int16).view(torch.bfloat16)


def _encode_second(v: Tensor, top: Tensor, bits: Tensor) -> Tensor:
    least = _level(8 * top - 254, FOURTHS)
    number = _rounded(torch.maximum(v, least), FOURTHS, bits) + 255 - 8 * top
    return torch.where(v > 0, number.clamp(1, 255), 0).to(torch.uint8)


def _encode_first(m: Tensor, second: Tensor, top: Tensor, bits: Tensor) -> Tensor:
    shift = second.to(torch.int32) - 255 + 8 * top + 8 * RATIO_TOP - 127
    least, size = _level(shift + 1, EIGHTHS), m.abs()
    below = (_chance(bits) * least < size).to(torch.int32)  # to the least code, or to zero
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
    """2^(number / len(grid)) in fp32, from its bits."""
    shift = len(grid).bit_length() - 1
    mantissa = torch.tensor(grid, dtype=torch.int32, device=number.device)
    exponent = (number >> shift) + 127
    return ((exponent << 23) | mantissa[(number & (len(grid) - 1)).long()]).view(torch.float32)


def _rounded(x: Tensor, grid: tuple[int, ...], bits: Tensor) -> Tensor:
    """The number of the level below or above x > 0, at random, so that x is the expected value."""
    shift = len(grid).bit_length() - 1
    raw = x.contiguous().view(torch.int32)
    mantissa = raw & 0x7FFFFF
    number = ((raw >> 23) - 127) << shift
    for border in grid[1:]:
        number = number + (mantissa >= border)
    low, high = _level(number, grid), _level(number + 1, grid)
    return number + (_chance(bits) * (high - low) < x - low)


def _chance(bits: Tensor) -> Tensor:
    """16 random bits as a number between 0 and 1, both excluded."""
    return (bits.to(torch.float32) + 0.5) * (1.0 / 65536.0)
