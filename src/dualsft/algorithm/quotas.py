"""Quotas: how many examples each source and each range of lengths has in D_sel.

Algorithm 1 line 10 takes the b best scores of the pool. With `select.per_source` or
`select.lengths` (ours) the pool is divided into strata, each with a share of b, and line 10 applies
to each stratum: a `Draw` is a set of positions and the number of its best scores to take.

Sources come first:

* `even` gives every source the same number of examples, `proportional` its share of the pool;
* a mapping gives counts or shares of b. What it leaves goes to the best scores of the sources that
  it does not name, or, if it names all, of everything not drawn yet (a second step, `Strata.last`).

With balanced lengths each of these draws is divided at the quintiles of its response lengths, and
each part is drawn from in proportion to its size.

Counts are exact: shares are rational numbers, rounded by largest remainders, ties by name. A draw
never asks for more rows than it has. Reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar

import numpy as np

from dualsft.data.examples import Example
from dualsft.errors import ConfigError

PerSource = Literal["even", "proportional"] | Mapping[str, int | float] | None
LengthRule = Literal["any", "balanced"]
K = TypeVar("K", str, int)
QUINTILES = (0.2, 0.4, 0.6, 0.8)
KEY = "select.per_source"


@dataclass(frozen=True)
class Draw:
    """The `count` best scores of the rows are to be taken; 0 <= count <= number of rows."""

    rows: np.ndarray
    """Positions in the pool, ascending."""
    count: int


@dataclass(frozen=True)
class Strata:
    """Disjoint draws, and how many examples are then taken from all rows that remain."""

    draws: list[Draw]
    rest: int = 0
    lengths: np.ndarray | None = None
    """Response tokens of every example, if lengths are to be balanced."""

    def last(self, taken: np.ndarray) -> list[Draw]:
        """The draws of the second step, given the positions taken by the first; often none."""
        if not self.rest:
            return []
        size = sum(len(draw.rows) for draw in self.draws)
        left = np.setdiff1d(np.arange(size), taken, assume_unique=True)
        return balanced(Draw(left, self.rest), self.lengths)


def make_strata(
    b: int,
    pool: Sequence[Example],
    per_source: PerSource = None,
    lengths: LengthRule = "any",
    sources: Sequence[str] | None = None,
) -> Strata:
    """The draws of a budget of b; `sources` replace those of the examples."""
    if lengths not in ("any", "balanced"):
        raise ConfigError(f"select.lengths: {lengths!r} is not allowed; give any or balanced")
    draws, rest = [Draw(np.arange(len(pool)), b)], 0
    if per_source is not None:
        named = np.array([e.source for e in pool] if sources is None else list(sources))
        if named.shape != (len(pool),):
            raise ConfigError(
                f"sources: {len(named)} names for {len(pool)} examples; give one each"
            )
        draws, rest = _by_source(b, named, per_source)
    tokens = None
    if lengths == "balanced":
        tokens = np.array([e.num_response_tokens for e in pool])
    return Strata([part for draw in draws for part in balanced(draw, tokens)], rest, tokens)


def _by_source(b: int, sources: np.ndarray, per_source: PerSource) -> tuple[list[Draw], int]:
    """(draws of the sources, examples left for a second step)."""
    names, counts = np.unique(sources, return_counts=True)
    pool = dict(zip(names.tolist(), counts.tolist(), strict=True))
    if not any(pool):
        raise ConfigError(
            f"{KEY}: {per_source!r} needs sources, and the rows of this split have none; set "
            "data.source_field, or name several files in data.path (a split made by an earlier "
            "version has none: delete 1_split, which changes nothing after it)"
        )
    if isinstance(per_source, Mapping):
        quotas, left = _named(b, pool, per_source)
    elif per_source in ("even", "proportional"):
        weights = pool if per_source == "proportional" else dict.fromkeys(pool, 1)
        quotas, left = apportioned(b, weights), 0
    else:
        raise ConfigError(
            f"{KEY}: {per_source!r} is not allowed; give even, proportional or quotas"
        )
    for name, quota in quotas.items():
        if quota > pool[name]:
            raise ConfigError(
                f"{KEY}: {quota:,} examples of {name!r} are asked for, but the pool has "
                f"{pool[name]:,} of them; lower its quota or select.data_budget"
                + (", or give a mapping" if not isinstance(per_source, Mapping) else "")
            )
    draws = [Draw(np.flatnonzero(sources == name), quota) for name, quota in quotas.items()]
    others = np.flatnonzero(~np.isin(sources, list(quotas)))
    if left > len(others) and len(others):
        raise ConfigError(
            f"{KEY}: {left:,} of {b:,} examples are left for the sources without a quota, which "
            f"have {len(others):,} in the pool; raise the quotas or lower select.data_budget"
        )
    return ([*draws, Draw(others, left)], 0) if len(others) else (draws, left)


def _named(
    b: int, pool: Mapping[str, int], given: Mapping[str, int | float]
) -> tuple[dict[str, int], int]:
    """(quota of each named source, what is left of b)."""
    if unknown := sorted(given.keys() - pool.keys()):
        known = ", ".join(list(pool)[:20]) + (", ..." if len(pool) > 20 else "")
        raise ConfigError(f"{KEY}: the pool has no source {unknown[0]!r}; it has {known}")
    exact = {name: _exact(name, quota, b) for name, quota in given.items()}
    left = b - sum(exact.values())
    if left < 0:
        raise ConfigError(
            f"{KEY}: the quotas add up to {float(b - left):,g} examples, more than the budget of "
            f"{b:,}; lower them, or raise select.data_budget"
        )
    # what is left takes part in the rounding, after all names
    rounded = apportioned(b, {f"0{name}": part for name, part in exact.items()} | {"1": left})
    return {name: rounded[f"0{name}"] for name in exact}, rounded["1"]


def _exact(name: str, quota: int | float, b: int) -> Fraction:
    """A quota as a number of examples: an integer is a count, a decimal a share of b."""
    if isinstance(quota, int) and not isinstance(quota, bool) and quota > 0:
        return Fraction(quota)
    if isinstance(quota, float) and 0 < quota <= 1:
        return Fraction(repr(quota)) * b  # as written: 0.1 is a tenth
    raise ConfigError(
        f"{KEY}: {name}:{quota!r} is not a count >= 1 or a share in (0, 1]; write one"
    )


def apportioned(total: int, weights: Mapping[K, int | Fraction]) -> dict[K, int]:
    """`total` divided in proportion to the weights, by largest remainders; ties by name.

    No part exceeds its exact share by one or more, so none exceeds its weight if the total does not
    exceed the sum of whole weights.
    """
    whole = sum(weights.values())
    exact = {name: Fraction(total) * weight / whole for name, weight in weights.items()}
    parts = {name: int(share) for name, share in exact.items()}
    order = sorted(exact, key=lambda name: (parts[name] - exact[name], name))
    for name in order[: total - sum(parts.values())]:
        parts[name] += 1
    return parts


def balanced(draw: Draw, lengths: np.ndarray | None) -> list[Draw]:
    """The draw divided by the quintiles of its lengths; equal lengths stay together.

    A draw of no rows or of none of its rows is kept as it is, so that strata cover the pool.
    """
    if lengths is None or not draw.count:
        return [draw]
    own = lengths[draw.rows]
    edges = np.quantile(own, QUINTILES, method="inverted_cdf")
    part = np.searchsorted(edges, own)  # as many edges are below the length
    sizes = {int(i): int(n) for i, n in zip(*np.unique(part, return_counts=True), strict=True)}
    counts = apportioned(draw.count, sizes)
    return [Draw(draw.rows[part == i], counts[i]) for i in sizes]
