"""Trial batches before a walk, to measure the memory per token of a batch.

Not part of Algorithm 1. The memory of a batch depends on the model's code, the attention kernel,
the rules and what they collect, so it is measured: the longest example, repeated, runs forward and
backward in two small batches, and a line through the two peaks predicts the peak of any batch
(`plans.Activations`). One scratch buffer replaces G and the direction; nothing from a trial enters
a result. Runs only on CUDA, whose allocator records peak memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dualsft.data.examples import IGNORE, Batch
from dualsft.engine.checkpointing import checkpointed
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import Head, HeadObserver
from dualsft.memory.placement import Scratch
from dualsft.memory.plans import Activations, LinearFit
from dualsft.system.usage import PeakMemory, give_back, is_out_of_memory

TRIAL_TOKENS = 1024
"""Tokens of the smaller trial batch, unless the longest example has more."""

Objective = Callable[[Batch, HeadObserver | None], tuple[Tensor, Tensor]]


def measure(
    engine: GhostEngine,
    objective: Objective,
    batch_of: Callable[[int, int], Batch],
    *,
    sums: bool,
    direction: bool,
    bounds: bool,
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
        scratch = Scratch(engine.candidates, dtype, device)
        with (
            checkpointed(engine.model, checkpointing),
            engine.tapped(
                sums=scratch if sums else None,
                direction=scratch if direction else None,
                bounds=bounds,
            ) as taps,
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
