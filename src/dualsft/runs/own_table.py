"""Table of DualSFT's own methods and controls; the classes are in `runs/own_methods.py`.

The settings are validated against these names, so this module must not import torch.
"""

from __future__ import annotations

from dualsft.config.methods import Entry

_PASS = "a warmup over D_warm, gradients over D_val and D_anchor, one pass over the pool"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="dualsft",
        parallel=True,
        axis="data",
        target="dualsft.runs.own_methods:DualData",
        summary="the b largest signed scores ⟨u, g_n⟩ of the scoring pool (D_train without D_warm)",
        cost=f"{_PASS} with one more product a layer",
        memory="the model, G and u over the candidates, a batch's activations",
        source="Algorithm 1 of the DualSFT paper",
        deviations="one pass with a certificate instead of two, the same selection",
        needs=("warmup", "scores"),
    ),
    Entry(
        name="dualsft_reversed",
        parallel=True,
        axis="data",
        target="dualsft.runs.own_methods:ReversedData",
        summary="control: the b smallest scores",
        cost=f"{_PASS} with one more product a layer",
        memory="as dualsft",
        source="the paper's reverse selection",
        needs=("warmup", "scores"),
    ),
    Entry(
        name="random",
        parallel=True,
        axis="data",
        target="dualsft.runs.own_methods:RandomData",
        summary="b examples of D_train, uniformly, without replacement",
        cost="none",
        memory="none",
        source="control",
    ),
    Entry(
        name="all",
        parallel=True,
        axis="data",
        target="dualsft.runs.own_methods:AllData",
        summary="all of D_train (pool and warm)",
        cost="none",
        memory="none",
        source="standard fine-tuning",
        uses_budget=False,
    ),
    Entry(
        name="dualsft",
        parallel=True,
        axis="params",
        target="dualsft.runs.own_methods:DualParams",
        summary="the k largest signed scores u ⊙ G over all candidates",
        cost=_PASS,
        memory="the model, G over the candidates, a batch's activations",
        source="Algorithm 1 of the DualSFT paper",
        needs=("warmup", "scores"),
    ),
    Entry(
        name="dualsft_reversed",
        parallel=True,
        axis="params",
        target="dualsft.runs.own_methods:ReversedParams",
        summary="control: the k smallest scores",
        cost=_PASS,
        memory="as dualsft",
        source="the paper's reverse selection",
        needs=("warmup", "scores"),
    ),
    Entry(
        name="random",
        parallel=True,
        axis="params",
        target="dualsft.runs.own_methods:RandomParams",
        summary="k candidate entries, uniformly, without replacement",
        cost="none",
        memory="8 bytes per selected entry",
        source="control",
    ),
    Entry(
        name="all",
        parallel=True,
        axis="params",
        target="dualsft.runs.own_methods:AllParams",
        summary="every parameter",
        cost="none",
        memory="full AdamW: master and moments of every parameter",
        source="standard fine-tuning",
        uses_budget=False,
    ),
)
