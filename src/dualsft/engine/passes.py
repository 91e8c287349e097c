"""How a walk runs: its settings, the precision of the weights, and its memory plan.

Algorithm 1 lines 3, 5, 6 and 8 are walks (`engine/walk.py`).

**Precision** (lines 5 to 8). A score is ⟨u, g_n⟩. Rounding of one g_n affects one example; rounding
of u affects every score and every entry of s_θ, and u comes from the few rows of D_val and
D_anchor. With `score.precision: mixed` a half-precision run therefore computes v_new and v_prior
with fp32 weights: the same values as the half-precision weights, with TF32 products on a GPU. This
costs a few thousand examples of extra work, independent of the size of the pool. `half` never uses
fp32 weights; `full` uses them for the walk over the pool too.

**Memory plan** (`memory/plans.py`). The memory of a batch depends on the model's code, the
attention kernel, the rules and what they collect, so it is measured: the longest example, repeated,
runs forward and backward in two small batches, and a line through the two peaks predicts the peak
of any batch (`plans.Activations`). One scratch buffer replaces G and the direction; nothing from a
trial enters a result. Only on CUDA, whose allocator records peak memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from dualsft.data.examples import IGNORE, Batch, Example, collate
from dualsft.distributed.world import world
from dualsft.engine.fused import HALF_DTYPES, checkpointed
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import Head, HeadObserver, Objective
from dualsft.engine.sketch import Sketch
from dualsft.memory.placement import Scratch
from dualsft.memory.plans import (
    AMPLE_BATCH,
    GIB,
    Activations,
    Demand,
    LinearFit,
    Plan,
    Wishes,
    choose,
    is_measured,
    unmeasured,
)
from dualsft.model.sharded import is_sharded, local_rows, wide_copy
from dualsft.storage.resume import Pieces
from dualsft.system.usage import PeakMemory, free_memory, give_back, is_out_of_memory

MOST_OF_FREE = 0.45  # maximum fraction of free memory for fp32 weights; the walk needs the rest
TRIAL_TOKENS = 1024
"""Tokens of the smaller trial batch, unless the longest example has more."""

Precision = Literal["half", "mixed", "full"]
"""`score.precision`: which walks of a half-precision run use fp32 weights."""


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """Settings of a walk: batching, memory plan, saved progress."""

    batch_tokens: int
    """Maximum padded tokens per batch; a plan may use fewer."""
    pad_id: int
    padding_side: str
    precision: Precision = "mixed"
    pieces: Pieces = field(default_factory=Pieces)
    wishes: Wishes = field(default_factory=Wishes)
    note: Callable[[str, Plan, int], None] = lambda label, plan, memory: None
    """Called with the label of a walk, its plan, and the device memory it may use, in bytes."""

    def collate(self, examples: Sequence[Example], device: torch.device) -> Batch:
        return collate(examples, self.pad_id, self.padding_side, device)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a walk collects besides the value of each example: G, dot products, bounds, sketches."""

    sums: bool
    direction: bool
    bounds: bool
    sketch: Sketch | None = None
    only: frozenset[str] | None = None
    """The candidates that it observes; None: all."""


# --- precision -----------------------------------------------------------------------------------


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
            "memory; continuing in half precision (score.precision=half starts with it)",
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


# --- memory plan ---------------------------------------------------------------------------------


def plans_for(
    engine: GhostEngine,
    examples: Sequence[Example],
    objective: Objective,
    collected: Collected,
    settings: PassSettings,
    warn: Callable[[str], None],
) -> tuple[list[Plan], int]:
    """(the plans to try, in order; device memory that may be used, in bytes, 0 if not measured)."""
    wishes, device, candidates = settings.wishes, engine.device, engine.candidates
    tokens = sum(example.num_tokens for example in examples)
    most = min(settings.batch_tokens, world().per_process(tokens))  # every process has a batch
    if not is_measured(device) or not examples:
        return unmeasured(most, wishes, len(candidates), device), 0
    held = torch.cuda.memory_allocated(device)
    memory = min(int((wishes.memory or 2**20) * GIB), held + free_memory(device))
    matrices = [p for p in candidates.values() if p.ndim >= 2]
    longest = max(examples, key=lambda e: e.num_tokens)
    demand = Demand(
        shapes={name: tuple(p.shape) for name, p in candidates.items()},
        held=held,
        sum_itemsize=candidates.dtype.itemsize if collected.sums else 0,
        direction_itemsize=matrices[0].dtype.itemsize if collected.direction and matrices else 0,
        longest=longest.num_tokens,
    )
    full = _with_labels(longest, max(e.num_response_tokens for e in examples))
    bare = _with_labels(longest, 1)

    def batch_of(count: int, labelled: int) -> Batch:
        return settings.collate([full] * labelled + [bare] * (count - labelled), device)

    def measured(checkpointing: bool) -> Activations | None:
        return measure(engine, objective, collected, batch_of, checkpointing)

    host = free_memory(torch.device("cpu"))
    if wishes.checkpointing is not True:
        demand = replace(demand, kept=measured(checkpointing=False))
        plans = choose(demand, memory, host, most, wishes)
        best = plans[0]
        ample = best.batch_tokens >= min(most, AMPLE_BATCH)
        # the fastest plan already fits: skip the second measurement
        if best.placement == "device" and not best.checkpointing and ample:
            return plans, memory
    demand = replace(demand, recomputed=measured(checkpointing=True))
    plans = choose(demand, memory, host, most, wishes)
    if wishes.placement not in ("auto", plans[0].placement):
        warn(
            f"score.plan={wishes.placement} takes {demand.host(wishes.placement) / GIB:.1f} GiB of "
            f"host memory, of which {host / GIB:.1f} GiB are free; continuing with "
            f"{plans[0].describe(memory)}"
        )
    return plans, memory


def _with_labels(example: Example, count: int) -> Example:
    """The same tokens with the last `count` of them as labels."""
    first = max(1, example.num_tokens - count)
    return replace(example, labels=[*[IGNORE] * first, *example.input_ids[first:]])


def measure(
    engine: GhostEngine,
    objective: Objective,
    collected: Collected,
    batch_of: Callable[[int, int], Batch],
    checkpointing: bool,
) -> Activations | None:
    """Memory of batches with these taps; None if even the trial runs out of memory.

    `batch_of(n, m)` returns the longest example n times (or the batch `batch_of(1, 1)` n times). m
    of the copies have as many labels as the example with the most, the others have one. Labels are
    measured separately from tokens: logits are computed one chunk at a time, so the memory for
    labels stops growing once a chunk is full.
    """
    dtype, device = engine.candidates.dtype, engine.device
    one = batch_of(1, 1).input_ids.numel()
    few = max(1, TRIAL_TOKENS // one)
    try:
        scratch = Scratch(engine.candidates, dtype, device, collected.sums, collected.direction)
        with (
            checkpointed(engine.model, checkpointing),
            engine.tapped(
                scratch, bounds=collected.bounds, only=collected.only, sketch=collected.sketch
            ) as taps,
        ):
            observer = engine.head_observer(taps)
            points: list[tuple[int, int, int, int]] = []
            for count, labelled in ((few, few), (few, 0), (few, few), (2 * few, few)):
                batch = batch_of(count, labelled)  # the first is a warmup: kernels, workspaces
                taps.begin(len(batch.input_ids))
                labels = int((batch.labels[:, 1:] != IGNORE).sum())
                points.append((batch.input_ids.numel(), *peaks(objective, batch, observer), labels))
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        return None
    finally:
        give_back(device)
    (_, forward_bare, _, bare), (tokens, forward, backward, labels) = points[1:3]
    more, forward_more, backward_more, _ = points[3]
    a_label = max(0.0, (forward - forward_bare) / max(1, labels - bare))
    chunk = a_label * max(0, Head.of(engine.model).chunk_rows - labels)
    line = LinearFit.through((tokens, forward), (more, forward_more))
    return Activations(
        LinearFit(line.fixed + chunk, line.slope),
        LinearFit.through((tokens, backward), (more, backward_more)),
    )


def peaks(
    objective: Objective, batch: Batch, observer: HeadObserver | None = None
) -> tuple[int, int]:
    """Peak bytes of the forward pass and of the backward pass, above the memory allocated before
    the batch."""
    before = torch.cuda.memory_allocated(batch.input_ids.device)
    with PeakMemory() as forward:
        total, _ = objective(batch, observer)
    with PeakMemory() as backward:
        total.backward()
    return (forward.cuda_bytes or 0) - before, (backward.cuda_bytes or 0) - before
