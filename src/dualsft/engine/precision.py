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

import torch
from transformers import PreTrainedModel

from dualsft.distributed.world import world
from dualsft.engine.fused import HALF_DTYPES
from dualsft.model.sharded import is_sharded, local_rows, wide_copy
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
    fits = world().broadcast(more <= MOST_OF_FREE * free_memory(models[0].device))
    if wanted and not fits:
        warn(
            f"{label}: fp32 weights would take {more / 2**30:.1f} GiB more and leave too little "
            "memory; continuing in half precision (set score.precision=half to start so)",
            code="half_precision",
        )
    used = widened(*models, tensor_cores=True) if wanted and fits else nullcontext(models)
    with used as wide:
        yield wide


@contextmanager
def widened(
    *models: PreTrainedModel, tensor_cores: bool = False
) -> Iterator[tuple[PreTrainedModel, ...]]:
    """Convert half-precision models to fp32 weights (the same values) inside the context.

    Used to measure and to avoid the effect of rounding on scores. `tensor_cores` allows TF32
    products on CUDA: three more bits than bf16 at about half its speed. Yields the models to
    compute with: the same objects, except for sharded models, which are loaded again as fp32
    copies.
    """
    sharded = [m for m in models if is_sharded(m)]
    half = any(p.dtype in HALF_DTYPES for m in models for p in m.parameters())
    whole = [m for m in models if m not in sharded]
    own = {p: p.dtype for m in whole for p in m.parameters() if p.dtype in HALF_DTYPES}
    scales = {  # Gemma multiplies its embeddings by a number rounded to the weight's dtype
        b: b.data
        for m in whole
        for b in m.get_input_embeddings().buffers()
        if own and b.is_floating_point()
    }
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tensor_cores and half or before
    try:
        for buffer, value in scales.items():
            buffer.data = value.to(next(iter(own.values()))).float()
        for p in own:
            p.data = p.data.float()
        copies = {id(m): wide_copy(m) if half else m for m in sharded}
        yield tuple(copies.get(id(m), m) for m in models)
    finally:
        for p, dtype in own.items():
            p.data = p.data.to(dtype)
        for buffer, value in scales.items():
            buffer.data = value
        torch.backends.cuda.matmul.allow_tf32 = before
