"""Exact signed top-k of parameter scores and top-b of example scores.

Algorithm 1, lines 9 (TopK_signed) and 10 (TopB_signed); ALGORITHM.md section 2, "Selection".

The k largest of billions of scores are found without sorting them and without holding them: the
scores are read chunk by chunk from a `ScoreSource` that recomputes them, twice as a rule. Each
floating-point score has an integer key of the same order. The first reading checks that all are
finite and looks at a sample of up to a million; the sample's order says between which two keys the
k-th largest lies, six standard errors wide. The second reading keeps the positions of the keys
above that bracket and the few keys inside it, whose order is then exact. When the bracket missed,
or holds too many (scores that tie, or that lie in an order made against the sample), histograms of
65,536 bins narrow the bracket of all keys, one reading each, until it holds few or one key alone
(two readings at most in fp32, four in fp64); so the answer is exact whatever the sample says.
Larger means better: the sign counts, not the size.

Ties are broken by the order of the parameters, then by flat index. Nothing is written here.
"""

from __future__ import annotations

import math
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

_BIN_BITS = 16
_SAMPLE = 1 << 20
"""Most keys in the sample; all of them when there are no more."""
_SPARE = 1 << 20
"""Least number of positions that may be kept beyond k while the k-th key is only bracketed."""
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
class _Survey:
    """What the first reading says: how many scores, their type, and a sample of their keys."""

    num_total: int
    dtype: torch.dtype
    at: np.ndarray
    """Positions of the sample among all scores in reading order, increasing."""
    keys: Tensor
    """Keys at these positions, on the CPU."""

    @property
    def spare(self) -> int:
        """How many positions beyond k may be held."""
        return max(_SPARE, self.num_total >> 6)


@dataclass(frozen=True)
class _Bracket:
    """The keys from `lo` to `hi`, among them the k-th largest."""

    lo: int
    hi: int
    num_ties: int | None = None
    """How many of them belong to the k, where `lo` equals `hi` and a reading has counted."""


@dataclass
class _Part:
    """Positions of one chunk that may belong to the k; those inside the bracket with their keys."""

    where: Tensor
    open: Tensor
    """Indices into `where` of the keys inside the bracket."""
    keys: Tensor


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
    survey = _look(source)
    if k > survey.num_total:
        raise ValueError(f"k is {k}, but there are only {survey.num_total} scores to select from")
    found = _collect(source, survey, _guess(survey, k), k)
    if found is None:
        found = _collect(source, survey, _narrowed(source, survey, k), k)
    if found is None:
        raise RunError(_NOT_REPEATABLE)
    return found


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


def _infinity(dtype: torch.dtype) -> int:
    """Key of infinity: the keys of finite scores lie between its negative and it."""
    return int(torch.tensor([torch.inf], dtype=dtype).view(_KEY_DTYPES[dtype]).item())


def _refuse_nonfinite(name: str, offset: int, scores: Tensor) -> None:
    """Raise for the first NaN or infinity of a chunk; both show in its extremes."""
    if all(map(math.isfinite, torch.stack(torch.aminmax(scores)).tolist())):
        return
    position = int((~torch.isfinite(scores)).nonzero()[0].item())
    raise RunError(
        f"score of {name!r} at flat index {offset + position} is {scores[position].item()}; "
        "scores must be finite: look for a diverged warmup or an overflow in the gradients"
    )


def _read(source: ScoreSource) -> Iterator[tuple[str, int, Tensor]]:
    """Read the source once, checking the order and type of its chunks."""
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
        yield name, offset, scores


def _look(source: ScoreSource) -> _Survey:
    """The first reading: all scores are finite, and a sample of them, spread evenly.

    One position out of every `stride` is taken, at a place that varies, so that rows of a weight
    are not always met in the same column. The stride doubles when the sample is full.
    """
    at, keys = [np.empty(0, np.int64)], [torch.empty(0, dtype=torch.int32)]
    num_total, num_taken, stride = 0, 0, 1
    dtype = torch.float32
    for name, offset, scores in _read(source):
        size = scores.numel()
        if not size:
            continue
        dtype = scores.dtype
        _refuse_nonfinite(name, offset, scores)
        while num_taken + size // stride > _SAMPLE:
            at, keys = [np.concatenate(at)[::2]], [torch.cat(keys)[::2]]
            num_taken, stride = len(at[0]), 2 * stride
        if count := (num_total + size) // stride - num_total // stride:
            width, order = size // count, np.arange(count)
            places = order * width + ((order + num_total) * 2654435761 >> 15) % width
            at.append(places + num_total)
            keys.append(_ordered_keys(scores[torch.from_numpy(places).to(scores.device)]).cpu())
            num_taken += count
        num_total += size
    key_dtype = _KEY_DTYPES[dtype]
    merged = torch.cat([part.to(key_dtype) for part in keys])
    return _Survey(num_total=num_total, dtype=dtype, at=np.concatenate(at), keys=merged)


def _reread(source: ScoreSource, survey: _Survey) -> Iterator[tuple[str, int, Tensor]]:
    """A later reading; the sample must show the keys of the first one, and no score be missing."""
    done = 0
    for name, offset, scores in _read(source):
        first, last = np.searchsorted(survey.at, [done, done + scores.numel()])
        places = torch.from_numpy(survey.at[first:last] - done).to(scores.device)
        seen = _ordered_keys(scores[places]).cpu()
        if scores.dtype != survey.dtype or not torch.equal(seen, survey.keys[first:last]):
            raise RunError(_NOT_REPEATABLE)
        yield name, offset, scores
        done += scores.numel()
    if done != survey.num_total:
        raise RunError(_NOT_REPEATABLE)


def _guess(survey: _Survey, k: int) -> _Bracket:
    """Where the sample says the k-th and (k+1)-th largest keys lie; exact when it is complete."""
    ordered = survey.keys.sort(descending=True).values
    size, share, infinity = ordered.numel(), k / survey.num_total, _infinity(survey.dtype)
    if size == survey.num_total:
        above, below = k - 1, min(k, size - 1)
    else:
        margin = 6 * math.sqrt(size * share * (1 - share)) + 6
        above, below = math.floor(share * size - margin), math.ceil(share * size + margin)
    return _Bracket(
        lo=int(ordered[below]) if below < size else -infinity,
        hi=int(ordered[above]) if above >= 0 else infinity,
    )


def _narrowed(source: ScoreSource, survey: _Survey, k: int) -> _Bracket:
    """The bracket of all keys, narrowed by histograms until it holds few keys, or one alone."""
    infinity = _infinity(survey.dtype)
    lo, hi, num_above, num_inside = -infinity, infinity, 0, survey.num_total
    while num_inside > survey.spare and lo < hi:
        shift = max(0, (hi - lo).bit_length() - _BIN_BITS)
        first, num_bins = lo >> shift, (hi >> shift) - (lo >> shift) + 1
        counts = torch.zeros(num_bins, dtype=torch.int64)
        for _, _, scores in _reread(source, survey):
            keys = _ordered_keys(scores)
            if num_inside < survey.num_total:
                keys = keys[(keys >= lo) & (keys <= hi)]
            counts += torch.bincount((keys >> shift) - first, minlength=num_bins).cpu()
        if int(counts.sum()) != num_inside:
            raise RunError(_NOT_REPEATABLE)
        at_least = counts.flip(0).cumsum(0)  # [i]: keys in the i+1 highest bins
        from_top = int(torch.searchsorted(at_least, k - num_above))
        num_inside = int(counts[num_bins - 1 - from_top])
        num_above += int(at_least[from_top]) - num_inside
        start = (first + num_bins - 1 - from_top) << shift
        lo, hi = max(lo, start), min(hi, start + (1 << shift) - 1)
    return _Bracket(lo, hi, num_ties=k - num_above if lo == hi else None)


def _collect(source: ScoreSource, survey: _Survey, bracket: _Bracket, k: int) -> TopK | None:
    """Positions of the k largest by one reading; None when the bracket missed or holds too many."""
    lo, hi = bracket.lo, bracket.hi
    parts: dict[str, list[_Part]] = {}
    num_kept = num_open = num_positive = num_cut = 0
    for name, offset, scores in _reread(source, survey):
        mine = parts.setdefault(name, [])
        # Bit patterns order positive scores as their keys do, and are negative for the others.
        keys = scores.view(_KEY_DTYPES[survey.dtype]) if lo > 0 else _ordered_keys(scores)
        where = (keys >= lo).nonzero().view(-1)
        kept = keys[where]
        undecided = (kept <= hi).nonzero().view(-1)
        if lo <= 0:
            num_positive += int((kept > 0).sum())
        if bracket.num_ties is not None and num_open + undecided.numel() > bracket.num_ties:
            # The ties that stay come before those that go, so their indices into `where` hold.
            undecided, late = undecided.tensor_split([bracket.num_ties - num_open])
            where, num_cut = _without(where, late), num_cut + late.numel()
        num_kept += where.numel()
        num_open += undecided.numel()
        if num_kept > k + survey.spare:
            return None
        mine.append(_Part((where + offset).cpu(), undecided.cpu(), kept[undecided].cpu()))
    if not num_kept - num_open < k <= num_kept:
        return None
    inside = torch.cat([part.keys for mine in parts.values() for part in mine])
    inside = inside.sort(descending=True).values
    rank = k - (num_kept - num_open)
    key = int(inside[rank - 1])
    ties = rank - int((inside > key).sum())
    next_key: int | None = None
    if rank < inside.numel():
        next_key = int(inside[rank])
    elif num_cut:
        next_key = key
    elif k < survey.num_total:
        next_key = _largest_below(source, survey, lo)
    indices = {}
    for name, mine in parts.items():
        indices[name], ties = _settled(mine, key, ties)
        mine.clear()
    return TopK(
        indices=indices,
        threshold=_score_of_key(key, survey.dtype),
        next_score=None if next_key is None else _score_of_key(next_key, survey.dtype),
        num_selected=k,
        num_total=survey.num_total,
        num_nonpositive=k - num_positive if key <= 0 else 0,
    )


def _without(where: Tensor, dropped: Tensor) -> Tensor:
    """`where` less its elements at the indices `dropped`."""
    keep = torch.ones_like(where, dtype=torch.bool)
    keep[dropped] = False
    return where[keep]


def _settled(parts: list[_Part], key: int, ties: int) -> tuple[Tensor, int]:
    """One parameter's indices above `key` and its first `ties` equal to it; ties still to find."""
    found = [torch.empty(0, dtype=torch.int64)]
    for part in parts:
        chosen = part.keys > key
        equal = (part.keys == key).nonzero().view(-1)[:ties]
        chosen[equal] = True
        ties -= equal.numel()
        found.append(_without(part.where, part.open[~chosen]))
    return torch.cat(found), ties


def _largest_below(source: ScoreSource, survey: _Survey, lo: int) -> int:
    """Largest key under `lo`, by one more reading: the next score lies outside the bracket."""
    lowest = torch.iinfo(_KEY_DTYPES[survey.dtype]).min
    largest = lowest
    for _, _, scores in _reread(source, survey):
        keys = _ordered_keys(scores)
        if keys.numel():
            largest = max(largest, int(keys.masked_fill_(keys >= lo, lowest).amax()))
    return largest
