"""The methods this release can run, as `dualsft methods` lists them.

A method answers which examples and which entries are trained. This release has the paper's own
method and its two one-sided variants, chosen by `select.variant`; baselines under the same
interface come with `method.*`, which is reserved for them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One line of the table."""

    name: str
    setting: str
    data: str
    params: str
    cost: str
    source: str


_SCORING = "a warmup over D_warm, gradients over D_val and D_anchor"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="dualsft",
            setting="select.variant=dual",
            data="top-b signed scores ⟨u, g_n⟩ (default 10 % of the corpus)",
            params="top-k signed scores u ⊙ G (default 5 % of the candidates)",
            cost=f"{_SCORING}, one pass over the pool with one more product a layer",
            source="Algorithm 1 of the paper; one pass with a certificate is ours",
        ),
        Method(
            name="dualsft-data",
            setting="select.variant=data",
            data="as dualsft",
            params="all (no delta: everything moves)",
            cost=f"{_SCORING}, one pass over the pool with one more product a layer",
            source="the paper's DualSFT-Data",
        ),
        Method(
            name="dualsft-param",
            setting="select.variant=param",
            data="all of D_train (pool and warm)",
            params="as dualsft",
            cost=f"{_SCORING}, one pass over the pool without per-example products",
            source="the paper's DualSFT-Param",
        ),
    )
}
