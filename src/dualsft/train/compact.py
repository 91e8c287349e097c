"""Compact storage of what SparseAdamW keeps per selected entry: index and moments.

Algorithm 1, lines 1 and 12 (Warmup, MaskedFT).

**Index.** As int64, the mask m_θ would be four times the size of the selected bf16 weights.
`CompactIndex` divides the flat positions into buckets of 65,536. An entry is stored as its 16-bit
offset inside its bucket, a bucket as a pointer to its first entry. A fully selected parameter needs
no index (None).

**Moments.** `float32` is exact, `bfloat16` is the plain dtype, and `int8` is a logarithmic code of
one byte per moment on the fixed grid 2^(k/8), k an integer:

- The code of the second moment v is k of sqrt(v), counted down from 2^top. `top` is one integer per
  parameter, at least log2 of its largest gradient so far. The 255 codes cover 31.75 octaves below
  2^top. Code 0 is zero; nonzero values below the smallest code get the smallest code.
- The code of the first moment m is its sign and k of |m| / sqrt(v), counted down from 2^4 over
  15.75 octaves. AdamW's step is this ratio (below 7.3 for betas 0.9, 0.999), so an entry with small
  gradients keeps its precision next to one with large gradients.

The grid does not depend on `top`, so a moment that does not change is not rounded again when `top`
changes. Low-precision moments are rounded up or down at random, with exact expected value:
beta2 = 0.999 changes v by 0.1 % per step, and rounded to nearest it would never change in bf16. The
random bits are a hash of (seed, step, parameter, entry). There is no random state, and the bits are
the same after a resume, for any chunk size, and in the kernels of `train/kernels.py`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

BUCKET_BITS = 16
BUCKET = 1 << BUCKET_BITS
CHUNK = 1 << 20  # entries processed at a time where temporary copies are needed
MASTER_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""Model dtype -> dtype of masters, summed gradients and exact moments."""


@dataclass(frozen=True, eq=False)
class CompactIndex:
    """Sorted flat positions of one parameter, built by `encode` and read by `decode`."""

    offsets: Tensor
    """Position inside the bucket, as the bits of an unsigned 16-bit number in an int16."""
    pointers: Tensor
    """Bucket b holds the entries from pointers[b] up to, not including, pointers[b + 1]."""
    host_pointers: Tensor
    """A copy of `pointers` in host memory, to look up ranges without synchronizing the device."""

    @classmethod
    def encode(cls, index: Tensor, num_positions: int) -> CompactIndex:
        """Encode strictly increasing int64 positions below `num_positions`."""
        starts = torch.arange(num_buckets_of(num_positions) + 1, device=index.device) << BUCKET_BITS
        pointers = torch.searchsorted(index, starts)
        half = BUCKET // 2
        signed = ((index + half) & (BUCKET - 1)) - half  # the low 16 bits, reinterpreted as int16
        return cls(signed.to(torch.int16), pointers, pointers.cpu())

    def __len__(self) -> int:
        return self.offsets.numel()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.offsets.nbytes + self.pointers.nbytes

    def buckets(self, first: int, last: int) -> tuple[int, int]:
        """The range (begin, end) of buckets that hold the entries from `first` to `last`."""
        if first == 0 and last == len(self):
            return 0, self.host_pointers.numel() - 1
        begin = int(torch.searchsorted(self.host_pointers, first, right=True)) - 1
        end = int(torch.searchsorted(self.host_pointers, last))
        return begin, max(begin, end)

    def decode(self, first: int = 0, last: int | None = None) -> Tensor:
        """The int64 positions of the entries from `first` to `last`, on the index's device."""
        last = len(self) if last is None else last
        begin, end = self.buckets(first, last)
        borders = self.pointers[begin : end + 1].clamp(first, last)
        numbers = torch.arange(begin, end, device=borders.device) << BUCKET_BITS
        base = torch.repeat_interleave(numbers, borders.diff(), output_size=last - first)
        return base + (self.offsets[first:last].to(torch.int64) & (BUCKET - 1))

    def gather(self, dense: Tensor) -> Tensor:
        """The selected entries of a flat tensor, decoding one chunk of positions at a time."""
        chosen = torch.empty(len(self), dtype=dense.dtype, device=dense.device)
        for first in range(0, len(self), CHUNK):
            last = min(first + CHUNK, len(self))
            chosen[first:last] = dense[self.decode(first, last)]
        return chosen

    def masked(self, dense: Tensor) -> Tensor:
        """A copy of a flat tensor with the unselected entries set to zero."""
        kept = torch.zeros_like(dense)
        for first in range(0, len(self), CHUNK):
            where = self.decode(first, min(first + CHUNK, len(self)))
            kept[where] = dense[where]
        return kept


def num_buckets_of(num_positions: int) -> int:
    return -(-num_positions // BUCKET)


def positions(index: CompactIndex | None, first: int, last: int) -> Tensor | slice:
    """Index into the flat parameter for the selected entries from `first` to `last`."""
    return slice(first, last) if index is None else index.decode(first, last)


def same_entries(a: CompactIndex | None, b: CompactIndex | None) -> bool:
    """Whether two indices of one parameter select the same entries."""
    if a is None or b is None:
        return a is b
    return torch.equal(a.pointers, b.pointers) and torch.equal(a.offsets, b.offsets)


def positions_kept(
    old: CompactIndex | None, new: CompactIndex | None, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions, in the old and in the new state vectors, of the entries selected in both."""
    everything = torch.arange(num_positions, device=device)
    before = everything if old is None else old.decode()
    after = everything if new is None else new.decode()
    source = torch.searchsorted(before, after).clamp_(max=before.numel() - 1)
    kept = before[source] == after
    return source[kept], kept.nonzero().view(-1)


# --- validation of masks ------------------------------------------------------------------------

Indices = Mapping[str, Tensor | None]
"""Parameter name -> sorted, unique, flat int64 indices (row-major); None means every entry."""


def checked_indices(
    params: Mapping[str, nn.Parameter], requires_grad: Mapping[str, bool], indices: Indices | None
) -> dict[str, CompactIndex | None]:
    """Validate the indices; return those of parameters with selected entries, in model order.

    A mask of another model would train the wrong entries: errors name what does not match.
    """
    if indices is None:
        indices = dict.fromkeys(params)
    if unknown := [name for name in indices if name not in params]:
        near = difflib.get_close_matches(unknown[0], params, n=3)
        raise ValueError(
            f"indices name {len(unknown)} unknown parameters, the first is {unknown[0]!r}; "
            f"the {len(params)} known ones include {near or list(params)[:3]}"
        )
    selected: dict[str, CompactIndex | None] = {}
    for name, p in params.items():
        if name not in indices:
            continue
        index, chosen = None, indices[name]
        if chosen is not None:
            chosen = _checked_index(name, p, chosen)
            if 0 < chosen.numel() < p.numel():  # a fully selected parameter needs no index
                index = CompactIndex.encode(chosen, p.numel())
        if (p if chosen is None else chosen).numel() > 0:
            _check_trainable(name, p, requires_grad[name])
            selected[name] = index
    return selected


def _checked_index(name: str, p: Tensor, index: Tensor) -> Tensor:
    """Validate one parameter's flat indices; return them on the parameter's device."""
    if index.dtype != torch.int64 or index.dim() != 1:
        raise ValueError(
            f"indices of {name!r} are {index.dtype} of shape {tuple(index.shape)}; "
            "they must be 1-D int64 (from a boolean mask: mask.view(-1).nonzero().view(-1))"
        )
    index = index.detach().to(p.device)
    wrong = (index[1:] <= index[:-1]).nonzero()
    if wrong.numel():
        at = int(wrong[0].item())
        raise ValueError(
            f"indices of {name!r} must increase strictly, but position {at} holds "
            f"{int(index[at])} and position {at + 1} holds {int(index[at + 1])}"
        )
    if index.numel() and (int(index[0]) < 0 or int(index[-1]) >= p.numel()):
        raise ValueError(
            f"indices of {name!r} run from {int(index[0])} to {int(index[-1])}, "
            f"outside 0 to {p.numel() - 1}"
        )
    return index


def _check_trainable(name: str, p: nn.Parameter, requires_grad: bool) -> None:
    """Raise if a parameter with selected entries cannot be trained."""
    if p.dtype not in MASTER_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in MASTER_DTYPES)
        raise ValueError(f"parameter {name!r} is {p.dtype}; only {allowed} can be trained")
    if type(p.detach()) is not Tensor:
        kind = type(p.detach()).__name__
        raise ValueError(f"parameter {name!r} is a {kind}; only plain tensors can be trained")
    if not p.is_contiguous():
        raise ValueError(f"parameter {name!r} is not contiguous: its flat indices are undefined")
    if not requires_grad:
        raise ValueError(
            f"parameter {name!r} has selected entries but requires_grad is False; "
            "call requires_grad_(True) on it, or leave it out of the indices"
        )


# --- moments ------------------------------------------------------------------------------------

Moments = Literal["float32", "bfloat16", "int8"]
MOMENTS: tuple[Moments, ...] = get_args(Moments)
BYTES: dict[Moments, int] = {"float32": 8, "bfloat16": 4, "int8": 2}
"""Bytes per entry of both moments together."""

Key = tuple[int, int]

MIX_1, MIX_2, MIX_3 = 0x7FEB352D, 0x2C1B3C6D, 0x297A2D39
"""Odd multipliers below 2^31, so that the product with a 32-bit number fits into an int64."""
EIGHTHS = (0x000000, 0x0B95C2, 0x1837F0, 0x25FED7, 0x3504F3, 0x45672A, 0x5744FD, 0x6AC0C7)
"""Mantissa bits of 2^(j/8) in fp32, j = 0 to 7: the grid of sqrt(v) and m."""
FOURTHS = EIGHTHS[::2]
"""Mantissa bits of 2^(j/4): the grid of v."""
LEAST_TOP, MOST_TOP = -30, 63
"""Range of `top` for which every level of the grid is a normal fp32 number."""
RATIO_TOP = 4
"""log2 of the largest |m| / sqrt(v) that has a code."""
_MASK = (1 << 32) - 1


def moments_dtype(dtype: torch.dtype, moments: Moments) -> torch.dtype:
    """The storage dtype of the moments of a parameter."""
    if moments == "float32":
        return MASTER_DTYPES[dtype]
    return {"bfloat16": torch.bfloat16, "int8": torch.uint8}[moments]


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
    number = first.to(torch.int32) & 127
    size = torch.where(number > 0, _level(number + _first_base(second, top), EIGHTHS), 0.0)
    return torch.where(first > 127, -size, size), decode_second(second, top)


def decode_second(code: Tensor, top: Tensor) -> Tensor:
    """v in fp32; its grid is 2^(q/4), the square of the grid of sqrt(v)."""
    code = code.to(torch.int32)
    return torch.where(code > 0, _level(code - 255 + 8 * top, FOURTHS), 0.0)


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


def _round_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Add 16 random bits below the kept ones: they carry with the right probability."""
    wide = x.view(torch.int32) + bits.to(torch.int32)
    return (wide >> 16).to(torch.int16).view(torch.bfloat16)


def _encode_second(v: Tensor, top: Tensor, bits: Tensor) -> Tensor:
    least = _level(8 * top - 254, FOURTHS)
    number = _rounded(torch.maximum(v, least), FOURTHS, bits) + 255 - 8 * top
    return torch.where(v > 0, number.clamp(1, 255), 0).to(torch.uint8)


def _encode_first(m: Tensor, second: Tensor, top: Tensor, bits: Tensor) -> Tensor:
    base = _first_base(second, top)
    least, size = _level(base + 1, EIGHTHS), m.abs()
    below = (_chance(bits) * least < size).to(torch.int32)  # rounds to code 1 or to zero
    number = _rounded(torch.maximum(size, least), EIGHTHS, bits) - base
    code = torch.where(size < least, below, number.clamp(0, 127))
    code = torch.where(second > 0, code, 0)
    return (code + torch.where((m < 0) & (code > 0), 128, 0)).to(torch.uint8)


def _first_base(second: Tensor, top: Tensor) -> Tensor:
    """Number of the grid level below the smallest code of m, from the code of v."""
    return second.to(torch.int32) - 255 + 8 * top + 8 * RATIO_TOP - 127


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
