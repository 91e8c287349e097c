"""The one-pass certificate: which examples are certainly in, certainly out, or must be re-scored.

Algorithm 1 line 10 in one-pass mode (docs/algorithm.md, "One pass instead of two"). The pool pass
computes f_n = ⟨U₀, g_n⟩; the exact score is f_n + c_n with |c_n| ≤ B_n
= Σ_l ‖R_l‖ Σ_t ‖ε_t‖ ‖a_t‖, R = U₀ − u. With Lo = f − B and Up = f + B, an example is IN when its
Lo exceeds the (b+1)-th largest Up, OUT when its Up is below the b-th largest Lo, both strictly.
The rest are scored exactly, and the best of them fill the b − |IN| remaining places. One round is
enough: the result is the exact top-b.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dualsft.algorithm.topk import top_b

NORM_ROUNDING = 1e-5  # B is widened by this factor because its norms are rounded too


def bounds(inner_sums_NL: np.ndarray, residual_norms_L: np.ndarray) -> np.ndarray:
    """B_n in the units of f: [N]. Exactly zero if the residual is zero."""
    widened = inner_sums_NL.astype(np.float64) @ residual_norms_L.astype(np.float64)
    return widened * (1.0 + NORM_ROUNDING)


@dataclass(frozen=True)
class Verdict:
    """Boolean arrays over the examples; `open` examples must be scored exactly."""

    inside: np.ndarray
    outside: np.ndarray

    @property
    def open(self) -> np.ndarray:
        return ~(self.inside | self.outside)


def judge(f: np.ndarray, bound: np.ndarray, b: int) -> Verdict:
    """Classify the examples as IN, OUT or open for a budget of b."""
    count = len(f)
    if not 1 <= b <= count:
        raise ValueError(f"b must be between 1 and {count}, not {b}")
    low, high = f - bound, f + bound
    if b == count:
        return Verdict(np.ones(count, bool), np.zeros(count, bool))
    threshold_in = np.partition(high, count - b - 1)[count - b - 1]  # (b+1)-th largest Up
    threshold_out = np.partition(low, count - b)[count - b]  # b-th largest Lo
    return Verdict(low > threshold_in, high < threshold_out)


def settle(verdict: Verdict, exact: np.ndarray, tie_order: np.ndarray, b: int) -> np.ndarray:
    """Positions of the top b, ascending; `exact` is used only for open examples."""
    inside = np.flatnonzero(verdict.inside)
    places = b - len(inside)
    candidates = np.flatnonzero(verdict.open)
    if places == 0:
        return inside
    chosen = candidates[top_b(exact[candidates], tie_order[candidates], places)]
    return np.sort(np.concatenate([inside, chosen]))
