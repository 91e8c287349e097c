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
_data = partial(Entry, axis="data", parallel=True)
_params = partial(Entry, axis="params", parallel=True)
_SCORED = ("warmup", "scores")


@dataclass(frozen=True)
class RandomOptions:
    """Options of random."""

    draw: Whole = dataclasses.field(default=0, metadata=ADDED)
    """Number of the draw: another one from the same split, with the same warmup and mask."""


ENTRIES: tuple[Entry, ...] = (
    _data(
        name="dualsft",
        target="dualsft.runs.method:DualData",
        summary="the b largest signed scores of the scoring pool (D_train without D_warm): "
        "⟨u, g_n⟩, or calibrated (score.form)",
        cost=f"{_PASS} with one more product a layer",
        memory="the model, G and u over the candidates, a batch's activations",
        source="Algorithm 1 of the DualSFT paper",
        deviations="one pass with a certificate instead of two, the same selection",
        needs=_SCORED,
    ),
    _data(
        name="dualsft_reversed",
        target="dualsft.runs.method:ReversedData",
        summary="control: the b smallest scores",
        cost=f"{_PASS} with one more product a layer",
        memory="as dualsft",
        source="the paper's reverse selection",
        needs=_SCORED,
    ),
    _data(
        name="random",
        target="dualsft.runs.method:RandomData",
        summary="b examples of D_train, uniformly, without replacement",
        cost="none",
        memory="none",
        source="control",
        options=RandomOptions,
    ),
    _data(
        name="all",
        target="dualsft.runs.method:AllData",
        summary="all of D_train (pool and warm)",
        cost="none",
        memory="none",
        source="standard fine-tuning",
        uses_budget=False,
    ),
    _params(
        name="dualsft",
        target="dualsft.runs.method:DualParams",
        summary="the k largest signed scores u ⊙ G over all candidates",
        cost=_PASS,
        memory="the model, G over the candidates, a batch's activations",
        source="Algorithm 1 of the DualSFT paper",
        needs=_SCORED,
    ),
    _params(
        name="dualsft_reversed",
        target="dualsft.runs.method:ReversedParams",
        summary="control: the k smallest scores",
        cost=_PASS,
        memory="as dualsft",
        source="the paper's reverse selection",
        needs=_SCORED,
    ),
    _params(
        name="random",
        target="dualsft.runs.method:RandomParams",
        summary="k candidate entries, uniformly, without replacement",
        cost="none",
        memory="8 bytes per selected entry",
        source="control",
        options=RandomOptions,
    ),
    _params(
        name="all",
        target="dualsft.runs.method:AllParams",
        summary="every parameter",
        cost="none",
        memory="full AdamW: master and moments of every parameter",
        source="standard fine-tuning",
        uses_budget=False,
    ),
)
