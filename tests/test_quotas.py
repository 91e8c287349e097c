"""Quotas by source and length: counts, refusals, and the set against a brute-force selection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dualsft.algorithm.duplicates import Duplicates
from dualsft.algorithm.quotas import Draw, LengthRule, PerSource, apportioned, balanced, make_strata
from dualsft.algorithm.selection import Chosen, choose_examples
from dualsft.config.settings import Config, DataConfig, ModelConfig, SelectConfig, from_mapping
from dualsft.data.examples import Example
from dualsft.errors import ConfigError


def example(i: int, source: str = "", response: int = 1, text: int | None = None) -> Example:
    """A text of its own, or that of number `text`, with `response` labels."""
    ids = [1000 + (i if text is None else text)] + [7] * response
    return Example(f"e{i}", i, ids, [-100, *ids[1:]], source=source)


def counts(strata: Any, pool: Sequence[Example]) -> dict[str, int]:
    """Examples by source that the strata's draws ask for; a joint draw as a+b."""
    found: Counter[str] = Counter()
    for draw in strata.draws:
        found["+".join(sorted({pool[i].source for i in draw.rows}))] += draw.count
    return dict(found)


# --- counts --------------------------------------------------------------------------------------

POOL = [example(i, "aabbbbbbcc"[i % 10]) for i in range(100)]  # a 20, b 60, c 20


@pytest.mark.parametrize(
    ("per_source", "b", "expected", "rest"),
    [
        ("even", 31, {"a": 11, "b": 10, "c": 10}, 0),
        ("even", 32, {"a": 11, "b": 11, "c": 10}, 0),
        ("proportional", 11, {"a": 2, "b": 7, "c": 2}, 0),
        ("proportional", 100, {"a": 20, "b": 60, "c": 20}, 0),
        ({"a": 0.5}, 30, {"a": 15, "b+c": 15}, 0),
        ({"c": 3, "a": 0.25}, 30, {"c": 3, "a": 8, "b": 19}, 0),  # 7.5, and 19.5 for b
        ({"a": 0.3, "b": 0.3, "c": 0.3}, 20, {"a": 6, "b": 6, "c": 6}, 2),
        ({"a": 0.3, "b": 0.3, "c": 0.4}, 10, {"a": 3, "b": 3, "c": 4}, 0),
        ({"a": 0.1, "b": 0.2, "c": 0.7}, 10, {"a": 1, "b": 2, "c": 7}, 0),
        ({"a": 0.1, "b": 0.1, "c": 1}, 3, {"a": 0, "b": 0, "c": 1}, 2),  # .3, .3, 1.4 left
        ({"a": 0.1, "b": 0.1, "c": 1}, 5, {"a": 1, "b": 0, "c": 1}, 3),  # .5, .5, 3
        ({"a": 10, "b": 0.5}, 20, {"a": 10, "b": 10, "c": 0}, 0),
    ],
)
def test_counts_of_sources(
    per_source: PerSource, b: int, expected: dict[str, int], rest: int
) -> None:
    strata = make_strata(b, POOL, per_source)
    assert (counts(strata, POOL), strata.rest) == (expected, rest)


@pytest.mark.parametrize(
    ("per_source", "b", "problem"),
    [
        ("even", 90, "30 examples of 'a' are asked for, but the pool has 20"),
        ({"d": 0.5}, 10, "the pool has no source 'd'; it has a, b, c"),
        ({"a": 21}, 40, "21 examples of 'a' are asked for, but the pool has 20 of them; lower"),
        ({"a": 0.5}, 60, "30 examples of 'a' .* the pool has 20"),
        ({"a": 11}, 10, "the quotas add up to 11 examples, more than the budget of 10"),
        ({"a": 0.6, "b": 0.6}, 10, "the quotas add up to 12 examples"),
        ({"a": 5, "b": 0.6}, 10, "the quotas add up to 11 examples"),
        ({"b": 2, "a": 2}, 40, "36 of 40 examples are left .* have 20 in the pool"),
        ({"a": 1.5}, 40, "a:1.5 is not a count >= 1 or a share"),
        ({"a": True}, 40, "a:True is not a count"),
        ("evenly", 40, "'evenly' is not allowed"),
    ],
)
def test_refusals(per_source: Any, b: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"select.per_source: .*{problem}"):
        make_strata(b, POOL, per_source)


def test_a_pool_without_sources_is_refused() -> None:
    with pytest.raises(ConfigError, match="set data.source_field, or name several files"):
        make_strata(3, [example(i) for i in range(9)], "even")
    strata = make_strata(3, [example(i) for i in range(9)], "even", sources=list("aaabbbccc"))
    assert [draw.rows.tolist() for draw in strata.draws] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(ConfigError, match="8 names for 9 examples"):
        make_strata(3, [example(i) for i in range(9)], "even", sources="aaaabbbb")


@given(st.dictionaries(st.text("abcde", min_size=1), st.integers(1, 50)), st.integers(0, 200))
def test_largest_remainders(weights: dict[str, int], total: int) -> None:
    assume(weights)
    parts = apportioned(total, weights)
    exact = {name: Fraction(total * w, sum(weights.values())) for name, w in weights.items()}
    assert sum(parts.values()) == total
    assert all(math.floor(exact[n]) <= parts[n] <= math.ceil(exact[n]) for n in weights)
    up = [(exact[n] % 1, n) for n in weights if parts[n] > exact[n]]
    down = [(exact[n] % 1, n) for n in weights if parts[n] < exact[n]]
    assert all((-x, n) < (-y, m) for x, n in up for y, m in down)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.data())
def test_five_groups_of_lengths(lengths: list[int], data: st.DataObject) -> None:
    """Each group is an interval, they cover the pool, and no group is asked for too many."""
    count = data.draw(st.integers(1, len(lengths)))
    tokens = np.array(lengths)
    draws = balanced(Draw(np.arange(len(lengths)), count), tokens)
    assert sum(draw.count for draw in draws) == count and len(draws) <= 5
    assert sorted(np.concatenate([draw.rows for draw in draws])) == list(range(len(lengths)))
    for draw in draws:
        assert abs(draw.count - count * len(draw.rows) / len(lengths)) < 1
        assert draw.count <= len(draw.rows)
    for low, high in zip(draws, draws[1:], strict=False):
        assert tokens[low.rows].max() < tokens[high.rows].min()


# --- the set, against brute force ----------------------------------------------------------------


def brute_force(
    pool: list[Example], exact: np.ndarray, b: int, per_source: Any, even: bool, copies: bool
) -> set[int]:
    """Stratum after stratum, the best first and copies last; counts as Fractions by hand."""
    order = sorted(range(len(pool)), key=lambda i: (-exact[i], i))
    seen: set[str] = set()
    repeated = set()
    for i in order:
        if copies and pool[i].key in seen:
            repeated.add(i)
        seen.add(pool[i].key)
    ranked = [i for i in order if i not in repeated] + [i for i in order if i in repeated]

    def split(total: Fraction, shares: dict[Any, Fraction]) -> dict[Any, int]:
        parts = {key: math.floor(share) for key, share in shares.items()}
        while sum(parts.values()) < total:
            due = [k for k in shares if parts[k] < shares[k] and parts[k] == math.floor(shares[k])]
            parts[min(due, key=lambda k: (-(shares[k] % 1), str(k)))] += 1
        return parts

    def groups(rows: list[int], count: int) -> list[tuple[list[int], int]]:
        if not even or not count:
            return [(rows, count)]
        lengths = sorted(pool[i].num_response_tokens for i in rows)
        edges = [lengths[math.ceil(Fraction(k, 5) * len(rows)) - 1] for k in (1, 2, 3, 4)]
        of = {i: sum(pool[i].num_response_tokens > edge for edge in edges) for i in rows}
        sizes = Counter(of.values())
        shares = {g: Fraction(count * n, len(rows)) for g, n in sizes.items()}
        parts = split(Fraction(count), shares)
        return [([i for i in rows if of[i] == g], parts[g]) for g in sizes]

    sources = sorted({e.source for e in pool})
    of_source = {s: [i for i, e in enumerate(pool) if e.source == s] for s in sources}
    every, rest, strata = list(range(len(pool))), 0, list[tuple[list[int], int]]()
    if per_source is None:
        strata = [(every, b)]
    elif isinstance(per_source, str):
        weights = {s: len(of_source[s]) if per_source == "proportional" else 1 for s in sources}
        total = sum(weights.values())
        parts = split(Fraction(b), {s: Fraction(b * weights[s], total) for s in sources})
        strata = [(of_source[s], parts[s]) for s in sources]
    else:
        shares = {
            s: Fraction(str(q)) * (1 if isinstance(q, int) else b) for s, q in per_source.items()
        }
        left = Fraction(b) - sum(shares.values())
        parts = split(Fraction(b), shares | {"~left": left})
        strata = [(of_source[s], parts[s]) for s in per_source]
        if others := [i for s in sources if s not in per_source for i in of_source[s]]:
            strata.append((sorted(others), parts["~left"]))
        else:
            rest = parts["~left"]
    taken: set[int] = set()
    for rows, count in strata:
        for group, number in groups(rows, count):
            taken |= set([i for i in ranked if i in set(group)][:number])
    for group, number in groups([i for i in every if i not in taken], rest):
        taken |= set([i for i in ranked if i in set(group)][:number])
    return taken


def choose(
    pool: list[Example],
    f: np.ndarray,
    bound: np.ndarray,
    exact: np.ndarray,
    b: int,
    reverse: bool,
    duplicates: Duplicates,
    per_source: PerSource,
    lengths: LengthRule,
) -> Chosen:
    return choose_examples(
        f,
        bound,
        np.arange(len(pool)),
        b,
        lambda rows: exact[rows],
        lambda _: None,
        reverse,
        pool,
        duplicates,
        make_strata(b, pool, per_source, lengths),
    )


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_equals_brute_force(data: st.DataObject) -> None:
    """Scores on a coarse grid (many ties), bounds that hide the order, copies in all sources."""
    n = data.draw(st.integers(3, 30))
    pick = [
        data.draw(st.lists(v, min_size=n, max_size=n))
        for v in (
            st.integers(-5, 5),
            st.integers(0, 3),
            st.floats(-1, 1),
            st.sampled_from("abc"),
            st.integers(1, 9),
            st.integers(0, 2 * n),
        )
    ]
    values, widths, shifts, names, responses, texts = cast(list[list[Any]], pick)
    pool = [example(i, names[i], responses[i], texts[i]) for i in range(n)]
    f, bound = np.array(values, float), np.array(widths, float)
    exact = np.clip(f + np.array(shifts) * bound, f - bound, f + bound)
    b = data.draw(st.integers(1, n))
    quota = st.one_of(st.integers(1, n), st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 1.0]))
    named = st.dictionaries(st.sampled_from(sorted(set(names))), quota, min_size=1)
    per_source: Any = data.draw(st.one_of(st.sampled_from([None, "even", "proportional"]), named))
    lengths: LengthRule = data.draw(st.sampled_from(["any", "balanced"]))
    kind: Duplicates = data.draw(st.sampled_from(["keep", "exact"]))
    reverse = data.draw(st.booleans())
    try:
        found = choose(pool, f, bound, exact, b, reverse, kind, per_source, lengths)
    except ConfigError:  # quotas beyond the pool or the budget: `test_refusals`
        assume(False)
        return
    signed = -exact if reverse else exact
    expected = brute_force(pool, signed, b, per_source, lengths == "balanced", kind == "exact")
    assert set(found.positions.tolist()) == expected
    assert len(found.positions) == b and (np.diff(found.positions) > 0).all()
    for draw in found.draws:  # every stratum's boundary holds for the scores that are known
        others = np.setdiff1d(draw.rows, draw.taken)
        if len(others):
            assert found.scores[draw.taken].min() + 2 * bound.max() >= found.scores[others].max()


def test_only_open_examples_of_a_stratum_are_scored_again() -> None:
    pool = [example(i, "ab"[i // 50]) for i in range(100)]
    f = np.concatenate([np.linspace(10, 0, 50), np.linspace(-20, -30, 50)])
    asked: list[int] = []

    def exactly(rows: np.ndarray) -> np.ndarray:
        asked.extend(rows.tolist())
        return f[rows]

    strata = make_strata(20, pool, "even")
    found = choose_examples(
        f, np.full(100, 0.11), np.arange(100), 20, exactly, lambda _: None, strata=strata
    )
    assert found.positions.tolist() == [*range(10), *range(50, 60)]
    assert asked == [9, 10, 59, 60] == found.rescored.tolist()


# --- settings ------------------------------------------------------------------------------------


def config(**select: Any) -> Config:
    return Config(
        model=ModelConfig(path="m"), data=DataConfig(path="d"), select=SelectConfig(**select)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("even", "even"),
        ("null", None),
        ("gsm8k:0.5,code:100", {"gsm8k": 0.5, "code": 100}),
        ("a:b:0.25, org/c : 1", {"a:b": 0.25, "org/c": 1}),
    ],
)
def test_quotas_as_a_flag(text: str, expected: Any) -> None:
    mapping = {"model": {"path": "m"}, "data": {"path": "d"}}
    found = from_mapping(mapping, [f"select.per_source={text}"]).select.per_source
    assert found == expected and repr(found) == repr(expected)
    again = from_mapping(mapping | {"select": {"per_source": expected}})
    assert again.select.per_source == expected


@pytest.mark.parametrize(
    ("select", "problem"),
    [
        ({"per_source": "evn"}, "did you mean 'even'"),
        ({"per_source": {}}, "name at least one source"),
        ({"per_source": {"a": 1.5}}, "give even, proportional, or a mapping"),
        ({"per_source": {1: 0.5}}, "each quota needs the name of a source"),
        ({"per_source": {"a": 0.6, "b": 0.5}}, "the shares add up to 1.1"),
        ({"per_source": "even", "rounds": 1}, "not allowed with select.rounds"),
        ({"lengths": "balanced", "rounds": 1}, "not allowed with select.rounds"),
        ({"lengths": "balanced", "variant": "param"}, "not allowed with method.data=all"),
    ],
)
def test_settings_that_are_refused(select: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(**select)


@pytest.mark.parametrize("method", ["random", "all", "less"])
@pytest.mark.parametrize("select", ["select.per_source=even", "select.lengths=balanced"])
def test_methods_without_one_score_per_example_are_refused(method: str, select: str) -> None:
    mapping = {"model": {"path": "m"}, "data": {"path": "d"}}
    with pytest.raises(ConfigError, match=f"not allowed with method.data={method}"):
        from_mapping(mapping, [select, f"method.data={method}"])
