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

In a world of several processes (`distributed/world.py`) each reads its own rows of every
parameter, and the answer is that of one process with all of them. Samples, histograms, counts and
the chosen indices meet, and nothing else. Every process is given the whole mask, of a sharded
model the part in its own rows; what stops one stops all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.score_reading import (
    KEY_DTYPES,
    NOT_REPEATABLE,
    ScoreSource,
    Survey,
    key_of_infinity,
    look,
    ordered_keys,
    reread,
    score_of_key,
    surveyed,
    together,
)
from dualsft.distributed.world import world
from dualsft.errors import RunError

_BIN_BITS = 16


@dataclass(frozen=True)
class TopK:
    """The k largest scores, as sorted flat indices per parameter (int64, on the CPU)."""

    indices: dict[str, Tensor]
    """One entry for each parameter that the source named; empty where nothing was selected. In a
    sharded world those in this process's rows."""
    threshold: float
    """Smallest selected score."""
    next_score: float | None
    """Largest score left out; equals `threshold` when ties were cut; None when nothing was."""
    num_selected: int
    num_total: int
    num_nonpositive: int
    """Selected scores that are zero or negative: the budget reached beyond the useful entries."""


@dataclass(frozen=True)
class _Bracket:
    """The keys from `lo` to `hi`, among them the k-th largest."""

    lo: int
    hi: int
    rank: int | None = None
    """Which of them the k-th is, from the largest as 1; None until those above are counted."""

    @property
    def num_ties(self) -> int | None:
        """How many of them belong to the k, where they are all equal and those above counted."""
        return self.rank if self.lo == self.hi else None

    @property
    def shift(self) -> int:
        """Low bits of a key that do not matter for its bin."""
        return max(0, (self.hi - self.lo).bit_length() - _BIN_BITS)

    @property
    def num_bins(self) -> int:
        return (self.hi >> self.shift) - (self.lo >> self.shift) + 1

    def among(self, keys: Tensor) -> Tensor:
        """Those of the keys that are inside."""
        return keys[(keys >= self.lo) & (keys <= self.hi)]

    def histogram(self, inside: Tensor) -> Tensor:
        """How many of these keys lie in each bin, on the CPU."""
        bins = (inside >> self.shift) - (self.lo >> self.shift)
        return torch.bincount(bins, minlength=self.num_bins).cpu()

    def narrowed(self, counts: Tensor) -> tuple[_Bracket, int]:
        """The bin that the k-th key is in, by the counts of all bins; how many keys it holds."""
        assert self.rank is not None
        at_least = counts.flip(0).cumsum(0)  # [i]: keys in the i+1 highest bins
        from_top = int(torch.searchsorted(at_least, self.rank))
        place = self.num_bins - 1 - from_top
        num_inside = int(counts[place])
        start = ((self.lo >> self.shift) + place) << self.shift
        inner = _Bracket(
            lo=max(self.lo, start),
            hi=min(self.hi, start + (1 << self.shift) - 1),
            rank=self.rank - (int(at_least[from_top]) - num_inside),
        )
        return inner, num_inside


@dataclass
class _Part:
    """Positions of one chunk that may belong to the k; those inside the bracket with their keys."""

    where: Tensor
    open: Tensor
    """Indices into `where` of the keys inside the bracket."""
    keys: Tensor


@dataclass
class _Kept:
    """What one reading of this process's scores leaves that may belong to the k."""

    parts: dict[str, list[_Part]]
    num_kept: int = 0
    """Positions, of which `num_open` are inside the bracket and the others above it."""
    num_open: int = 0
    num_positive: int = 0
    """Positive keys among them, where the bracket reaches down to others."""
    num_cut: int = 0
    """Ties at the end that were not kept, as there are enough before them."""
    overfull: bool = False
    """Whether the reading was given up, as more than k and the spare would have been kept."""


def topk_signed(source: ScoreSource, k: int) -> TopK:
    """Select the k largest scores over all parameters, and all processes, together."""
    world().agreed(str(k), "the number of scores to select")
    if k < 1:
        raise ValueError(f"k is {k}; at least 1 score must be selected")
    survey = surveyed(look(source))
    if k > survey.num_total:
        raise ValueError(f"k is {k}, but there are only {survey.num_total} scores to select from")
    found = _collect(source, survey, _guess(survey, k), k)
    if found is None:
        found = _collect(source, survey, _narrowed(source, survey, k), k)
    if found is None:
        raise RunError(NOT_REPEATABLE)
    if not world().sharded:  # there each has its own part
        world().agreed(_fingerprint(found.indices), "the mask")
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


def _guess(survey: Survey, k: int) -> _Bracket:
    """Where the sample says the k-th and (k+1)-th largest keys lie; exact when it is complete."""
    ordered = survey.sample.sort(descending=True).values
    size, share, infinity = ordered.numel(), k / survey.num_total, key_of_infinity(survey.dtype)
    if size == survey.num_total:
        above, below = k - 1, min(k, size - 1)
    else:
        margin = 6 * math.sqrt(size * share * (1 - share)) + 6
        above, below = math.floor(share * size - margin), math.ceil(share * size + margin)
    return _Bracket(
        lo=int(ordered[below]) if below < size else -infinity,
        hi=int(ordered[above]) if above >= 0 else infinity,
    )


def _narrowed(source: ScoreSource, survey: Survey, k: int) -> _Bracket:
    """The bracket of all keys, narrowed by histograms until it holds few keys, or one alone."""
    infinity = key_of_infinity(survey.dtype)
    bracket, num_inside = _Bracket(-infinity, infinity, rank=k), survey.num_total
    while num_inside > survey.spare and bracket.lo < bracket.hi:
        counts = world().sum_(_histogram(source, survey, bracket, num_inside == survey.num_total))
        if int(counts.sum()) != num_inside:
            raise RunError(NOT_REPEATABLE)
        bracket, num_inside = bracket.narrowed(counts)
    return bracket


@together
def _histogram(source: ScoreSource, survey: Survey, bracket: _Bracket, all_inside: bool) -> Tensor:
    """This process's keys in each bin of the bracket, by one reading."""
    counts = torch.zeros(bracket.num_bins, dtype=torch.int64)
    for _, _, scores in reread(source, survey):
        keys = ordered_keys(scores)
        counts += bracket.histogram(keys if all_inside else bracket.among(keys))
    return counts


def _collect(source: ScoreSource, survey: Survey, bracket: _Bracket, k: int) -> TopK | None:
    """Positions of the k largest by one reading; None when the bracket missed or holds too many."""
    kept = _kept(source, survey, bracket, k)
    own = [kept.num_kept, kept.num_open, kept.num_positive, kept.num_cut, kept.overfull]
    total = world().total(np.array(own, np.int64)).tolist()
    num_kept, num_open, num_positive, num_cut, overfull = total
    if overfull or not num_kept - num_open < k <= num_kept:
        return None
    inside = torch.cat([part.keys for mine in kept.parts.values() for part in mine])
    place = replace(bracket, rank=k - (num_kept - num_open))
    key, ties, next_key = _ranked(inside, place, num_open)
    if next_key is None and num_cut:
        next_key = key
    elif next_key is None and k < survey.num_total:
        next_key = _largest(_own_largest_below(source, survey, bracket.lo))
    return TopK(
        indices=_settled(kept.parts, key, ties),
        threshold=score_of_key(key, survey.dtype),
        next_score=None if next_key is None else score_of_key(next_key, survey.dtype),
        num_selected=k,
        num_total=survey.num_total,
        num_nonpositive=k - num_positive if key <= 0 else 0,
    )


@together
def _kept(source: ScoreSource, survey: Survey, bracket: _Bracket, k: int) -> _Kept:
    """This process's positions above the bracket and inside it, by one reading."""
    lo, hi = bracket.lo, bracket.hi
    kept = _Kept({})
    for name, offset, scores in reread(source, survey):
        mine = kept.parts.setdefault(name, [])
        # Bit patterns order positive scores as their keys do, and are negative for the others.
        keys = scores.view(KEY_DTYPES[survey.dtype]) if lo > 0 else ordered_keys(scores)
        where = (keys >= lo).nonzero().view(-1)
        high = keys[where]
        undecided = (high <= hi).nonzero().view(-1)
        if lo <= 0:
            kept.num_positive += int((high > 0).sum())
        if bracket.num_ties is not None and kept.num_open + undecided.numel() > bracket.num_ties:
            # The ties that stay come before those that go, so their indices into `where` hold.
            undecided, late = undecided.tensor_split([bracket.num_ties - kept.num_open])
            where, kept.num_cut = _without(where, late), kept.num_cut + late.numel()
        kept.num_kept += where.numel()
        kept.num_open += undecided.numel()
        if kept.num_kept > k + survey.spare:
            return _Kept({}, overfull=True)
        mine.append(_Part((where + offset).cpu(), undecided.cpu(), high[undecided].cpu()))
    return kept


def _ranked(inside: Tensor, bracket: _Bracket, num_inside: int) -> tuple[int, int, int | None]:
    """The key that has the bracket's rank among all processes' keys inside it.

    Also how many of the keys equal to it are within that rank, and the key that comes next, if
    there is one inside. `num_inside` counts the keys of all processes, `inside` has this one's.
    """
    keys = inside
    while bracket.lo < bracket.hi:
        bracket, num_inside = bracket.narrowed(world().sum_(bracket.histogram(keys)))
        keys = bracket.among(keys)
    key, ties = bracket.lo, bracket.rank
    assert ties is not None
    if ties < num_inside:
        return key, ties, key
    below = inside[inside < key]
    return key, ties, _largest(int(below.max()) if below.numel() else None)


def _largest(own: int | None) -> int | None:
    """The largest of the processes' keys; None when none has one."""
    none = torch.iinfo(torch.int64).min  # below every key
    largest = int(world().max_(torch.tensor(none if own is None else own)))
    return None if largest == none else largest


def _without(where: Tensor, dropped: Tensor) -> Tensor:
    """`where` less its elements at the indices `dropped`."""
    keep = torch.ones_like(where, dtype=torch.bool)
    keep[dropped] = False
    return where[keep]


def _settled(parts: dict[str, list[_Part]], key: int, ties: int) -> dict[str, Tensor]:
    """The indices above `key` and the first `ties` equal to it: of all processes, but of a sharded
    world's in this process's rows. Empties `parts`."""
    equal = np.zeros((len(parts), world().size), np.int64)
    for row, mine in zip(equal, parts.values(), strict=True):
        row[world().rank] = sum(int((part.keys == key).sum()) for part in mine)
    world().total(equal)
    before = equal.cumsum().reshape(equal.shape) - equal  # by parameter, within it by rank
    room = (ties - before[:, world().rank]).clip(0).tolist()
    indices = {}
    for (name, mine), most in zip(parts.items(), room, strict=True):
        indices[name] = world().kept(_own_settled(mine, key, most))
        mine.clear()
    return indices


def _own_settled(parts: list[_Part], key: int, ties: int) -> Tensor:
    """This process's indices of one parameter: those above `key` and the first `ties` equal."""
    found = [torch.empty(0, dtype=torch.int64)]
    for part in parts:
        chosen = part.keys > key
        equal = (part.keys == key).nonzero().view(-1)[:ties]
        chosen[equal] = True
        ties -= equal.numel()
        found.append(_without(part.where, part.open[~chosen]))
    return torch.cat(found)


@together
def _own_largest_below(source: ScoreSource, survey: Survey, lo: int) -> int | None:
    """This process's largest key under `lo`, by one more reading: the next score lies outside."""
    lowest = torch.iinfo(KEY_DTYPES[survey.dtype]).min
    largest = lowest
    for _, _, scores in reread(source, survey):
        keys = ordered_keys(scores)
        if keys.numel():
            largest = max(largest, int(keys.masked_fill_(keys >= lo, lowest).amax()))
    return None if largest == lowest else largest


def _fingerprint(indices: Mapping[str, Tensor]) -> str:
    """A hash of a mask by the number, the sum and the sum of squares of each parameter's indices.

    It costs a hundredth of the selection; a hash of the indices themselves would cost a tenth.
    """
    moments = [
        (name, index.numel(), int(index.sum()), int(index.dot(index)))
        for name, index in indices.items()
    ]
    return hashlib.sha256(repr(moments).encode()).hexdigest()[:16]
