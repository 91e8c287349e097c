"""Runs: the pipeline of stages and the run folder.

`ENTRIES` describes DualSFT's own methods and the controls; the classes are in `runs/method.py`.
Settings are validated against their names, so nothing here may import torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from dualsft.config.fields import Whole
from dualsft.config.methods import ADDED, Entry

_PASS = "a warmup over D_warm, gradients over D_val and D_anchor, one pass over the pool"
_own = partial(Entry, parallel=True)
_scored = partial(_own, needs=("warmup", "scores"))


@dataclass(frozen=True)
class RandomOptions:
    """Options of random."""

    draw: Whole = dataclasses.field(default=0, metadata=ADDED)
    """Number of the draw of examples: another one from the same split, with the same warmup and
    mask."""
    mask_draw: Whole = dataclasses.field(default=0, metadata=ADDED)
    """The same for the draw of entries."""


_dual = partial(_scored, name="dualsft", source="Algorithm 1 of the DualSFT paper")
_reversed = partial(
    _scored,
    name="dualsft_reversed",
    memory="as dualsft",
    source="the paper's reverse selection",
)
_random = partial(_own, name="random", cost="none", source="control", options=RandomOptions)
_all = partial(_own, name="all", cost="none", source="standard fine-tuning", uses_budget=False)

ENTRIES: tuple[Entry, ...] = (
    _dual(
        axis="data",
        target="dualsft.runs.method:DualData",
        summary="the b largest signed scores of the scoring pool (D_train without D_warm): "
        "⟨u, g_n⟩, or calibrated (score.form)",
        cost=f"{_PASS} with one more product a layer",
        memory="the model, G and u over the candidates, a batch's activations",
        deviations="one pass with a certificate instead of two, the same selection",
    ),
    _reversed(
        axis="data",
        target="dualsft.runs.method:ReversedData",
        summary="control: the b smallest scores",
        cost=f"{_PASS} with one more product a layer",
    ),
    _random(
        axis="data",
        target="dualsft.runs.method:RandomData",
        summary="b examples of D_train, uniformly, without replacement",
        memory="none",
    ),
    _all(
        axis="data",
        target="dualsft.runs.method:AllData",
        summary="all of D_train (pool and warm)",
        memory="none",
    ),
    _dual(
        axis="params",
        target="dualsft.runs.method:DualParams",
        summary="the k largest signed scores u ⊙ G over all candidates",
        cost=_PASS,
        memory="the model, G over the candidates, a batch's activations",
    ),
    _reversed(
        axis="params",
        target="dualsft.runs.method:ReversedParams",
        summary="control: the k smallest scores",
        cost=_PASS,
    ),
    _random(
        axis="params",
        target="dualsft.runs.method:RandomParams",
        summary="k candidate entries, uniformly, without replacement",
        memory="8 bytes per selected entry",
        auto_ratio=20.0,
    ),
    _all(
        axis="params",
        target="dualsft.runs.method:AllParams",
        summary="every parameter",
        memory="full AdamW: master and moments of every parameter",
    ),
)
