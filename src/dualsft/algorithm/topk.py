"""Exact signed top-k of parameter scores and top-b of example scores.

Algorithm 1 lines 9 (TopK_signed) and 10 (TopB_signed).

Finds the k largest of billions of scores without sorting or holding them: the scores are read chunk
by chunk from a `ScoreSource` that recomputes them, normally twice. Each floating-point score has an
integer key of the same order. The first reading checks that all scores are finite and takes a
sample of up to a million. The sorted sample gives a bracket for the k-th largest key, six standard
errors wide. The second reading keeps the positions of the keys above the bracket and the few keys
inside it, which are then ranked exactly. If the bracket misses the k-th key or holds too many keys
(ties, or an order adversarial to the sample), histograms of 65,536 bins narrow the bracket of all
keys, one reading each, until it holds few keys or a single one (at most two readings in fp32, four
in fp64). The result is therefore exact whatever the sample. Scores are compared with their sign.

Ties are broken by the order of the parameters, then by flat index. Writes no files.

With several processes (`distributed/world.py`) each reads its own rows of every parameter; the
result equals that of a single process. Only samples, histograms, counts and the selected indices
are communicated. Every process gets the full mask or, with a sharded model, the part in its own
rows. An error in one process is raised in all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.topk_reading import (
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
    """One entry per parameter of the source; empty where nothing was selected. In a sharded world,
    only the indices in this process's rows."""
    threshold: float
    """Smallest selected score."""
    next_score: float | None
    """Largest score not selected; equals `threshold` if ties were cut; None if all are selected."""
    num_selected: int
    num_total: int
    num_nonpositive: int
    """Number of selected scores <= 0: the budget exceeds the useful entries."""


@dataclass(frozen=True)
class _Bracket:
    """A range of keys, `lo` to `hi` inclusive, that contains the k-th largest."""

    lo: int
    hi: int
    rank: int | None = None
    """Rank of the k-th key in the range (1 is the largest); None until keys above are counted."""

    @property
    def num_ties(self) -> int | None:
        """Number of ties to select, if all keys in the range are equal and `rank` is known."""
        return self.rank if self.lo == self.hi else None

    @property
    def shift(self) -> int:
        """Number of low bits of a key that do not affect its bin."""
        return max(0, (self.hi - self.lo).bit_length() - _BIN_BITS)

    @property
    def num_bins(self) -> int:
        return (self.hi >> self.shift) - (self.lo >> self.shift) + 1

    def among(self, keys: Tensor) -> Tensor:
        """The keys inside the bracket."""
        return keys[(keys >= self.lo) & (keys <= self.hi)]

    def histogram(self, inside: Tensor) -> Tensor:
        """Number of keys per bin, on the CPU."""
        bins = (inside >> self.shift) - (self.lo >> self.shift)
        return torch.bincount(bins, minlength=self.num_bins).cpu()

    def narrowed(self, counts: Tensor) -> tuple[_Bracket, int]:
        """(bracket of the bin with the k-th key, number of keys in it), from the bin counts."""
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
    """Positions of one chunk that may be in the top k, with the keys inside the bracket."""

    where: Tensor
    open: Tensor
    """Indices into `where` of the keys inside the bracket."""
    keys: Tensor


@dataclass
class _Kept:
    """Positions that may be in the top k, after one reading of this process's scores."""

    parts: dict[str, list[_Part]]
    num_kept: int = 0
    """Number of positions; `num_open` of them are inside the bracket, the others above it."""
    num_open: int = 0
    num_positive: int = 0
    """Number of positive keys among them, counted only if the bracket includes keys <= 0."""
    num_cut: int = 0
    """Number of ties dropped because enough ties precede them."""
    overfull: bool = False
    """Whether the reading was aborted because more than k + spare positions would be kept."""


def topk_signed(source: ScoreSource, k: int) -> TopK:
    """Select the k largest scores over all parameters and all processes."""
    world().check_equal(str(k), "the number of scores to select")
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
    world().agreed_copies(_fingerprint(found.indices), "the mask")
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
    """Bracket of the k-th and (k+1)-th largest keys from the sample; exact if it is complete."""
    ordered = survey.sample.sort(descending=True).values
    size, share, infinity = ordered.numel(), k / survey.num_total, key_of_infinity(survey.dtype)
    if size == survey.num_total:
        above, below = k - 1, min(k, size - 1)
    else:
        # six standard errors of the k-th rank in the sample; + 6 for small k
        margin = 6 * math.sqrt(size * share * (1 - share)) + 6
        above, below = math.floor(share * size - margin), math.ceil(share * size + margin)
    return _Bracket(
        lo=int(ordered[below]) if below < size else -infinity,
        hi=int(ordered[above]) if above >= 0 else infinity,
    )


def _narrowed(source: ScoreSource, survey: Survey, k: int) -> _Bracket:
    """The bracket of all keys, narrowed by histograms to few keys or a single one."""
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
    """Number of this process's keys per bin of the bracket; one reading."""
    counts = torch.zeros(bracket.num_bins, dtype=torch.int64)
    for _, _, scores in reread(source, survey):
        keys = ordered_keys(scores)
        counts += bracket.histogram(keys if all_inside else bracket.among(keys))
    return counts


def _collect(source: ScoreSource, survey: Survey, bracket: _Bracket, k: int) -> TopK | None:
    """The k largest, by one reading; None if the bracket misses the k-th or holds too many keys."""
    kept = _kept(source, survey, bracket, k)
    own = [kept.num_kept, kept.num_open, kept.num_positive, kept.num_cut, kept.overfull]
    total = world().sum_array(np.array(own, np.int64)).tolist()
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
    """This process's positions above and inside the bracket; one reading."""
    lo, hi = bracket.lo, bracket.hi
    kept = _Kept({})
    for name, offset, scores in reread(source, survey):
        mine = kept.parts.setdefault(name, [])
        # Positive floats have bit patterns in key order; those of other floats are <= 0.
        keys = scores.view(KEY_DTYPES[survey.dtype]) if lo > 0 else ordered_keys(scores)
        where = (keys >= lo).nonzero().view(-1)
        high = keys[where]
        undecided = (high <= hi).nonzero().view(-1)
        if lo <= 0:
            kept.num_positive += int((high > 0).sum())
        if bracket.num_ties is not None and kept.num_open + undecided.numel() > bracket.num_ties:
            # Kept ties precede dropped ones, so their indices into `where` stay valid.
            undecided, late = undecided.tensor_split([bracket.num_ties - kept.num_open])
            where, kept.num_cut = _without(where, late), kept.num_cut + late.numel()
        kept.num_kept += where.numel()
        kept.num_open += undecided.numel()
        if kept.num_kept > k + survey.spare:
            return _Kept({}, overfull=True)
        mine.append(_Part((where + offset).cpu(), undecided.cpu(), high[undecided].cpu()))
    return kept


def _ranked(inside: Tensor, bracket: _Bracket, num_inside: int) -> tuple[int, int, int | None]:
    """(key at the bracket's rank over all processes, ties to select at that key, next key).

    The next key is None if it is not inside the bracket. `inside` holds this process's keys in the
    bracket, `num_inside` is their number over all processes.
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
    """The largest key over all processes; None if no process has one."""
    none = torch.iinfo(torch.int64).min  # below every key
    largest = int(world().max_(torch.tensor(none if own is None else own)))
    return None if largest == none else largest


def _without(where: Tensor, dropped: Tensor) -> Tensor:
    """`where` without the elements at the indices `dropped`."""
    keep = torch.ones_like(where, dtype=torch.bool)
    keep[dropped] = False
    return where[keep]


def _settled(parts: dict[str, list[_Part]], key: int, ties: int) -> dict[str, Tensor]:
    """Indices of keys above `key` and of the first `ties` equal to it, from all processes; in a
    sharded world only this process's rows. Empties `parts`."""
    equal = np.zeros((len(parts), world().size), np.int64)
    for row, mine in zip(equal, parts.values(), strict=True):
        row[world().rank] = sum(int((part.keys == key).sum()) for part in mine)
    world().sum_array(equal)
    before = (
        equal.cumsum().reshape(equal.shape) - equal
    )  # ties that come earlier: by parameter, then by rank
    room = (ties - before[:, world().rank]).clip(0).tolist()
    indices = {}
    for (name, mine), most in zip(parts.items(), room, strict=True):
        indices[name] = world().kept(_own_settled(mine, key, most))
        mine.clear()
    return indices


def _own_settled(parts: list[_Part], key: int, ties: int) -> Tensor:
    """This process's indices of one parameter: keys above `key` and the first `ties` equal."""
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
    """This process's largest key below `lo`; one more reading, if the next score is outside."""
    lowest = torch.iinfo(KEY_DTYPES[survey.dtype]).min
    largest = lowest
    for _, _, scores in reread(source, survey):
        keys = ordered_keys(scores)
        if keys.numel():
            largest = max(largest, int(keys.masked_fill_(keys >= lo, lowest).amax()))
    return None if largest == lowest else largest


def _fingerprint(indices: Mapping[str, Tensor]) -> str:
    """Hash of a mask from the count, sum and sum of squares of each parameter's indices.

    Costs 1 % of the selection; a hash of the indices themselves would cost 10 %.
    """
    moments = [
        (name, index.numel(), int(index.sum()), int(index.dot(index)))
        for name, index in indices.items()
    ]
    return hashlib.sha256(repr(moments).encode()).hexdigest()[:16]
