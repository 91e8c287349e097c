"""The one-pass rule equals the exact top b: random and adversarial scores and bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dualsft.algorithm.scores import bounds, judge, settle


def top_by_sort(scores: np.ndarray, b: int) -> set[int]:
    """Largest first, ties by position: a full sort."""
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:b])


def one_pass(f: np.ndarray, bound: np.ndarray, exact: np.ndarray, b: int) -> set[int]:
    verdict = judge(f, bound, b)
    assert not (verdict.inside & verdict.outside).any()
    assert verdict.inside.sum() <= b
    hidden = np.where(verdict.open, exact, np.nan)  # only what the verdict asks for is known
    return set(settle(verdict, hidden, np.arange(len(f)), b).tolist())


@hypothesis_settings(max_examples=400, deadline=None)
@given(st.data())
def test_equals_exact_top_b(data: st.DataObject) -> None:
    """Scores on a coarse grid, so that ties and touching intervals are common."""
    count = data.draw(st.integers(1, 24))
    grid = st.integers(-6, 6)
    f = np.array(data.draw(st.lists(grid, min_size=count, max_size=count)), float)
    width = st.integers(0, 4)
    bound = np.array(data.draw(st.lists(width, min_size=count, max_size=count)), float)
    shift = np.array(data.draw(st.lists(st.floats(-1, 1), min_size=count, max_size=count)))
    exact = np.clip(f + shift * bound, f - bound, f + bound)
    b = data.draw(st.integers(1, count))
    assert one_pass(f, bound, exact, b) == top_by_sort(exact, b)


def test_worst_case_errors_sit_on_the_bounds() -> None:
    """Every error at ±B, the sign chosen to swap as many places as possible."""
    f = np.linspace(1, -1, 200)
    bound = np.full(200, 0.3)
    exact = np.where(np.arange(200) < 40, f - bound, f + bound)
    assert one_pass(f, bound, exact, 40) == top_by_sort(exact, 40)


def test_tight_bounds_leave_nothing_open_and_loose_ones_everything() -> None:
    f = np.arange(100.0)
    assert judge(f, np.full(100, 0.4), 10).open.sum() == 0
    assert judge(f, np.full(100, 1e6), 10).open.sum() == 100


def test_bound_is_the_norm_weighted_sum() -> None:
    inner = np.array([[1.0, 2.0], [0.0, 3.0]], np.float32)
    got = bounds(inner, np.array([10.0, 0.5]))
    assert (got >= [11.0, 1.5]).all()
    assert got == pytest.approx([11.0, 1.5], rel=2e-5)
    assert (bounds(inner, np.zeros(2)) == 0).all()


@pytest.mark.parametrize("b", [0, 4])
def test_budget_outside_the_pool_is_refused(b: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 3"):
        judge(np.zeros(3), np.zeros(3), b)
