"""Sorted indices in one or two bytes each: the number of entries left out before every index.

Entries of a mask lie close together, so the gaps between them fit in 8 or 16 bits, where an index
needs 64. The largest number of the type stands for that many entries left out and no index; any gap
can be written this way, and no sequence of gaps means a repeated or a falling index. Used for
compact deltas and adapters. Not part of Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAP_TYPES = (torch.uint8, torch.uint16)


def to_gaps(index: Tensor) -> Tensor:
    """The gaps of increasing int64 indices, in the type that takes fewer bytes."""
    left_out = index.diff(prepend=index.new_tensor([-1])) - 1
    counts = {
        dtype: len(index) + int((left_out // torch.iinfo(dtype).max).sum()) for dtype in GAP_TYPES
    }
    dtype = min(counts, key=lambda one: counts[one] * one.itemsize)
    top = torch.iinfo(dtype).max
    gaps = index.new_full((counts[dtype],), top)
    gaps[(left_out // top + 1).cumsum(0) - 1] = left_out % top
    return gaps.to(dtype)


def from_gaps(gaps: Tensor) -> Tensor:
    """The indices; raises a `ValueError` for a tensor that `to_gaps` does not make."""
    if gaps.dtype not in GAP_TYPES or gaps.ndim != 1:
        raise ValueError(f"gaps are {gaps.dtype} with {gaps.ndim} dimensions, not 8 or 16 bits")
    wide = gaps.to(torch.int64)
    chosen = wide != torch.iinfo(gaps.dtype).max
    if len(gaps) and not chosen[-1]:
        raise ValueError("the last gap leaves out entries and no index follows")
    index = wide.cumsum(0)[chosen]
    return index + torch.arange(len(index))
