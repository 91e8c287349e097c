"""The memory plans of a walk, from trial batches that measure the memory per token.

Not part of Algorithm 1. The memory of a batch depends on the model's code, the attention kernel,
the rules and what they collect, so it is measured: the longest example, repeated, runs forward and
backward in two small batches, and a line through the two peaks predicts the peak of any batch
(`plans.Activations`). One scratch buffer replaces G and the direction; nothing from a trial enters
a result. Only on CUDA, whose allocator records peak memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dualsft.data.examples import IGNORE, Batch, Example
from dualsft.distributed.world import world
from dualsft.engine.fused import checkpointed
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import Head, HeadObserver, Objective
from dualsft.engine.sketch import Sketch
from dualsft.engine.walk_state import PassSettings
from dualsft.memory.placement import Scratch
from dualsft.memory.plans import (
    AMPLE_BATCH,
    GIB,
    Activations,
    Demand,
    LinearFit,
    Plan,
    choose,
    is_measured,
    unmeasured,
)
from dualsft.system.usage import PeakMemory, free_memory, give_back, is_out_of_memory

TRIAL_TOKENS = 1024
"""Tokens of the smaller trial batch, unless the longest example has more."""


def plans_for(
    engine: GhostEngine,
    examples: Sequence[Example],
    objective: Objective,
    settings: PassSettings,
    warn: Callable[[str], None],
    *,
    sums: bool,
    direction: bool,
    bounds: bool,
    sketch: Sketch | None = None,
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
        sum_itemsize=candidates.dtype.itemsize if sums else 0,
        direction_itemsize=matrices[0].dtype.itemsize if direction and matrices else 0,
        longest=longest.num_tokens,
    )
    full = _with_labels(longest, max(e.num_response_tokens for e in examples))
    bare = _with_labels(longest, 1)

    def batch_of(count: int, labelled: int) -> Batch:
        return settings.collate([full] * labelled + [bare] * (count - labelled), device)

    def measured(checkpointing: bool) -> Activations | None:
        return measure(
            engine,
            objective,
            batch_of,
            sums=sums,
            direction=direction,
            bounds=bounds,
            checkpointing=checkpointing,
            sketch=sketch,
        )

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
    return replace(example, labels=[IGNORE] * first + example.input_ids[first:])


def measure(
    engine: GhostEngine,
    objective: Objective,
    batch_of: Callable[[int, int], Batch],
    *,
    sums: bool,
    direction: bool,
    bounds: bool,
    checkpointing: bool,
    sketch: Sketch | None = None,
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
        scratch = Scratch(engine.candidates, dtype, device, sums, direction)
        with (
            checkpointed(engine.model, checkpointing),
            engine.tapped(scratch, bounds=bounds, sketch=sketch) as taps,
        ):
            observer = engine.head_observer(taps)
            points: list[tuple[int, int, int, int]] = []
            for count, labelled in ((few, few), (few, 0), (few, few), (2 * few, few)):
                batch = batch_of(count, labelled)  # the first is a warmup: kernels, workspaces
                taps.begin(len(batch.input_ids))
                points.append(_peaks(objective, batch, observer, device))
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


def _peaks(
    objective: Objective, batch: Batch, observer: HeadObserver | None, device: torch.device
) -> tuple[int, int, int, int]:
    """(tokens, peak bytes of the forward pass, of the backward pass, labels). Bytes are relative to
    the memory allocated before the batch."""
    before = torch.cuda.memory_allocated(device)
    with PeakMemory() as forward:
        total, _ = objective(batch, observer)
    with PeakMemory() as backward:
        total.backward()
    peaks = [(peak.cuda_bytes or 0) - before for peak in (forward, backward)]
    labels = int((batch.labels[:, 1:] != IGNORE).sum())
    return batch.input_ids.numel(), peaks[0], peaks[1], labels
