"""Precision of scoring: fp32 weights where the rounding of half precision matters.

Algorithm 1 lines 5 to 8. A score is ⟨u, g_n⟩. Rounding of one g_n affects one example; rounding of
u affects every score and every entry of s_θ, and u comes from the few rows of D_val and D_anchor.
With `score.precision: mixed` a half-precision run therefore computes v_new and v_prior with fp32
weights: the same values as the half-precision weights, with TF32 products on a GPU. This costs a
few thousand examples of extra work, independent of the size of the pool. `half` never uses fp32
weights; `full` uses them for the walk over the pool too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from transformers import PreTrainedModel

from dualsft.distributed.world import world
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import widened
from dualsft.model.sharded import local_rows
from dualsft.system.usage import free_memory

MOST_OF_FREE = 0.45  # maximum fraction of free memory for fp32 weights; the walk needs the rest


Precision = Literal["half", "mixed", "full"]
"""`score.precision`: which walks of a half-precision run use fp32 weights."""


@contextmanager
def precise(
    precision: Precision,
    what: Literal["directions", "pool"],
    label: str,
    warn: Callable[..., None],
    *models: PreTrainedModel,
) -> Iterator[tuple[PreTrainedModel, ...]]:
    """Yield the models to compute with, converted to fp32 weights if `precision` requires it.

    If the fp32 weights do not fit into memory, warn and stay in half precision.
    """
    levels = ("mixed", "full") if what == "directions" else ("full",)
    wanted = models[0].dtype in HALF_DTYPES and precision in levels
    more = sum(
        local_rows(p).numel() * (4 - p.itemsize)
        for model in models
        for p in model.parameters()
        if p.dtype in HALF_DTYPES
    )
    fits = world().told(more <= MOST_OF_FREE * free_memory(models[0].device))
    if wanted and not fits:
        warn(
            f"{label}: fp32 weights would take {more / 2**30:.1f} GiB more and leave too little "
            "memory; continuing in half precision (set score.precision=half to start so)",
            code="half_precision",
        )
    used = widened(*models, tensor_cores=True) if wanted and fits else nullcontext(models)
    with used as wide:
        yield wide
