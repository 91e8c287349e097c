"""Exact signed top-k of parameter scores and top-b of example scores.

Algorithm 1, lines 9 (TopK_signed) and 10 (TopB_signed); ALGORITHM.md section 2, "Selection".

The k largest of billions of scores are found without sorting them and without holding them: the
scores are read several times, chunk by chunk, from a `ScoreSource` that recomputes them. Each
floating-point score is mapped to an integer key of the same order. Reading i makes a histogram of
the i-th 16-bit digit of the keys that share the digits already fixed; the histogram fixes one more
digit of the k-th largest key. After two readings (fp32; four for fp64) that key is known exactly,
and one last reading collects the indices. Larger means better: the sign counts, not the size.

Ties are broken by the order of the parameters, then by flat index. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualsft.errors import RunError

ScoreSource = Callable[[], Iterator[tuple[str, int, Tensor]]]
"""Called once a reading; yields (parameter name, flat offset, 1-D chunk of its scores).

Parameters come in `named_parameters` order and chunks in flat order; every call must yield the same
scores, all float32 or all float64. A chunk may be a temporary: no reference to it is kept.
"""

_DIGIT_BITS = 16
_NUM_BINS = 1 << _DIGIT_BITS
_KEY_DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64}
_NOT_REPEATABLE = (
    "the score source gave other scores on a later reading; each call must repeat them"
)


@dataclass(frozen=True)
class TopK:
    """The k largest scores, as sorted flat indices per parameter (int64, on the CPU)."""

    indices: dict[str, Tensor]
    """One entry for each parameter that the source named; empty where nothing was selected."""
    threshold: float
    """Smallest selected score."""
    next_score: float | None
    """Largest score left out; equals `threshold` when ties were cut; None when nothing was."""
    num_selected: int
    num_total: int
    num_nonpositive: int
    """Selected scores that are zero or negative: the budget reached beyond the useful entries."""


@dataclass(frozen=True)
class _Threshold:
    """Key of the k-th largest score, and how many scores with exactly that key belong to the k."""

    key: int
    num_ties: int
    num_total: int
    dtype: torch.dtype


def chunked(tensors: Mapping[str, Tensor], chunk: int = 1 << 22) -> ScoreSource:
    """Make a source of scores that are already in memory; the chunks are views, not copies."""
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"scores of {name!r} are not contiguous; pass tensor.contiguous()")

    def read() -> Iterator[tuple[str, int, Tensor]]:
        for name, tensor in tensors.items():
            flat = tensor.detach().view(-1)
            for start in range(0, max(flat.numel(), 1), chunk):
                yield name, start, flat[start : start + chunk]

    return read


def topk_signed(source: ScoreSource, k: int) -> TopK:
    """Select the k largest scores over all parameters together."""
    if k < 1:
        raise ValueError(f"k is {k}; at least 1 score must be selected")
    return _collect(source, _find_threshold(source, k), k)


def top_b(scores: np.ndarray | Tensor, tie_order: Sequence[int] | np.ndarray, b: int) -> np.ndarray:
    """Positions of the b largest scores, best first; equal scores in increasing `tie_order`."""
    values = np.asarray(scores.detach().cpu() if isinstance(scores, Tensor) else scores, np.float64)
    order = np.asarray(tie_order)
    if values.ndim != 1 or order.shape != values.shape:
        raise ValueError(
            f"scores of shape {values.shape} and tie_order of shape {order.shape}: "
            "both must be 1-D and of equal length"
        )
    if not 1 <= b <= values.size:
        raise ValueError(f"b is {b}; it must be from 1 to the {values.size} scores given")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise RunError(
            f"score of the example at position {bad[0]} (tie order {order[bad[0]]}) is "
            f"{values[bad[0]]}; {bad.size} of {values.size} scores are not finite, all must be"
        )
    return np.lexsort((order, -values))[:b]


def _ordered_keys(scores: Tensor) -> Tensor:
    """Map scores to integers of the same order; integer work only, so denormals stay exact.

    IEEE floats are sign and magnitude, integers are two's complement: the key is +magnitude or
    -magnitude, which also makes -0 and +0 equal.
    """
    key_dtype = _KEY_DTYPES[scores.dtype]
    bits = scores.view(key_dtype)
    sign = bits >> (torch.iinfo(key_dtype).bits - 1)  # 0 or -1
    keys = sign & torch.iinfo(key_dtype).max
    keys ^= bits
    keys -= sign
    return keys


def _score_of_key(key: int, dtype: torch.dtype) -> float:
    """Invert `_ordered_keys` for one key."""
    magnitude = torch.tensor([abs(key)], dtype=_KEY_DTYPES[dtype]).view(dtype).item()
    return -magnitude if key < 0 else magnitude


def _refuse_nonfinite(name: str, offset: int, scores: Tensor, keys: Tensor) -> None:
    """Raise for the first NaN or infinity of a chunk: their keys lie at and beyond infinity's."""
    infinity = torch.tensor([torch.inf], dtype=scores.dtype).view(keys.dtype).item()
    low, high = torch.aminmax(keys)
    if low > -infinity and high < infinity:
        return
    position = int((~torch.isfinite(scores)).nonzero()[0].item())
    raise RunError(
        f"score of {name!r} at flat index {offset + position} is {scores[position].item()}; "
        "scores must be finite: look for a diverged warmup or an overflow in the gradients"
    )


def _read(source: ScoreSource, check_finite: bool) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Read the source once, checking each chunk; yield (name, offset, scores, keys)."""
    ends: dict[str, int] = {}
    current: str | None = None
    dtype: torch.dtype | None = None
    for name, offset, scores in source():
        if scores.dtype not in _KEY_DTYPES or (dtype is not None and scores.dtype != dtype):
            raise ValueError(
                f"scores of {name!r} are {scores.dtype}; all must be float32 or all float64"
                + ("" if dtype is None else f", and earlier ones are {dtype}")
            )
        if scores.dim() != 1:
            raise ValueError(f"chunk of {name!r} has shape {tuple(scores.shape)}; it must be 1-D")
        if (name != current and name in ends) or offset < ends.get(name, 0):
            raise ValueError(
                f"chunk of {name!r} at flat offset {offset} comes out of order; "
                "ties need one run of chunks a parameter, in flat order"
            )
        dtype, current, ends[name] = scores.dtype, name, offset + scores.numel()
        keys = _ordered_keys(scores)
        if check_finite and scores.numel():
            _refuse_nonfinite(name, offset, scores, keys)
        yield name, offset, scores, keys


def _histogram(source: ScoreSource, level: int, prefix: int) -> tuple[Tensor, torch.dtype | None]:
    """Count digit number `level` of the keys whose more significant digits are `prefix`."""
    counts = torch.zeros(_NUM_BINS, dtype=torch.int64)
    dtype: torch.dtype | None = None
    for _, _, scores, keys in _read(source, check_finite=level == 0):
        dtype = scores.dtype
        shift = torch.iinfo(keys.dtype).bits - _DIGIT_BITS * (level + 1)
        if level == 0:
            digits = (keys >> shift).add_(_NUM_BINS // 2)  # the first digit carries the sign
        else:
            keys = keys[(keys >> (shift + _DIGIT_BITS)) == prefix]
            digits = (keys >> shift).bitwise_and_(_NUM_BINS - 1)
        counts += torch.bincount(digits, minlength=_NUM_BINS).cpu()
    return counts, dtype


def _find_threshold(source: ScoreSource, k: int) -> _Threshold:
    """Fix the k-th largest key digit by digit, one reading of the source each."""
    counts, dtype = _histogram(source, 0, 0)
    num_total = int(counts.sum())
    if k > num_total or dtype is None:
        raise ValueError(f"k is {k}, but there are only {num_total} scores to select from")
    rank, prefix, num_equal = k, 0, num_total
    for level in range(torch.finfo(dtype).bits // _DIGIT_BITS):
        if level:
            counts, _ = _histogram(source, level, prefix)
        if int(counts.sum()) != num_equal:
            raise RunError(_NOT_REPEATABLE)
        at_least = counts.flip(0).cumsum(0)  # [i]: keys whose digit is among the i+1 largest
        from_top = int(torch.searchsorted(at_least, rank))
        digit = _NUM_BINS - 1 - from_top
        num_equal = int(counts[digit])
        rank -= int(at_least[from_top]) - num_equal
        prefix = (prefix << _DIGIT_BITS) + digit if level else digit - _NUM_BINS // 2
    return _Threshold(key=prefix, num_ties=rank, num_total=num_total, dtype=dtype)


def _collect(source: ScoreSource, found: _Threshold, k: int) -> TopK:
    """Read once more: indices of keys above the threshold, and of its first `num_ties` equals."""
    parts: dict[str, list[Tensor]] = {}
    lowest = torch.iinfo(_KEY_DTYPES[found.dtype]).min  # below the key of every finite score
    ties_left, next_key, num_selected, num_nonpositive = found.num_ties, lowest, 0, 0
    for name, offset, _, keys in _read(source, check_finite=False):
        mine = parts.setdefault(name, [])
        if not keys.numel():
            continue
        chosen = keys > found.key
        if ties_left:
            ties = (keys == found.key).nonzero().view(-1)[:ties_left]
            chosen[ties] = True
            ties_left -= ties.numel()
        where = chosen.nonzero().view(-1)
        num_selected += where.numel()
        if found.key <= 0:
            num_nonpositive += int((keys[where] <= 0).sum())
        next_key = max(next_key, int(keys.masked_fill_(chosen, lowest).amax()))
        mine.append((where + offset).cpu())
    if num_selected != k:
        raise RunError(_NOT_REPEATABLE)
    empty = torch.empty(0, dtype=torch.int64)
    return TopK(
        indices={name: torch.cat(mine) if mine else empty for name, mine in parts.items()},
        threshold=_score_of_key(found.key, found.dtype),
        next_score=None if next_key == lowest else _score_of_key(next_key, found.dtype),
        num_selected=num_selected,
        num_total=found.num_total,
        num_nonpositive=num_nonpositive,
    )
