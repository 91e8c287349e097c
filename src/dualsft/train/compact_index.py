"""CompactIndex: the selected entries of a parameter, in two bytes per entry.

Algorithm 1, line 12 (MaskedFT) keeps the mask m_θ in memory for all of fine-tuning. As int64
indices it would be four times the size of the selected bf16 weights. Here the sorted flat indices
are split into buckets of 65,536 consecutive positions. An entry is stored as its 16-bit offset
inside its bucket, and a bucket as a pointer to its first entry. The size depends only on the number
of entries (plus 8 bytes per bucket), not on the parameter's shape. A fully selected parameter needs
no index (None).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET_BITS = 16
BUCKET = 1 << BUCKET_BITS
CHUNK = 1 << 20  # entries processed at a time where temporary copies are needed


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
        num_buckets = num_buckets_of(num_positions)
        starts = torch.arange(num_buckets + 1, device=index.device) << BUCKET_BITS
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


def checked_index(name: str, p: Tensor, index: Tensor) -> Tensor:
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


def same_entries(a: CompactIndex | None, b: CompactIndex | None) -> bool:
    """Whether two indices of one parameter select the same entries; None selects all."""
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
