"""Half precision where it is harmless, fp32 weights where its rounding would show (line 5 to 8).

A score is ⟨u, g_n⟩. The rounding of one g_n is one example's; the rounding of u is in every score
and in every entry of s_θ at once, and u comes from the few rows of D_val and D_anchor. So a
half-precision run takes v_new and v_prior with fp32 weights (`score.precision: mixed`): the same
numbers as the half-precision weights hold, TF32 products on a GPU, and a few thousand examples of
extra work whatever the size of the pool. `half` does without, `full` walks the pool so as well.
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

MOST_OF_FREE = 0.45  # fp32 weights may take this share of what is free; the walk needs the rest


Precision = Literal["half", "mixed", "full"]
"""`score.precision`: which walks of a half-precision run have fp32 weights."""


@contextmanager
def precise(
    precision: Precision,
    what: Literal["directions", "pool"],
    label: str,
    warn: Callable[..., None],
    *models: PreTrainedModel,
) -> Iterator[tuple[PreTrainedModel, ...]]:
    """The models to compute with: these, with fp32 weights where `precision` asks for them.

    A walk whose fp32 weights do not fit into memory stays in half precision, with a warning.
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
            f"{label}: fp32 weights would take {more / 2**30:.1f} GiB more and leave too little; "
            "it stays in half precision (score.precision=half says so from the start)",
            code="half_precision",
        )
    used = widened(*models, tensor_cores=True) if wanted and fits else nullcontext(models)
    with used as wide:
        yield wide
