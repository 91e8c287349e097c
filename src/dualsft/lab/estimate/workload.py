"""The work of a run, for `dualsft estimate`: examples per role, training stages, the machine.

All rows are counted, and a sample that includes the longest texts is tokenised. This gives the
longest example and the distribution of lengths without tokenising a large corpus, which may take
hours. `survey` replaces the split stage (inputs and line 2 of Algorithm 1).

Training is Algorithm 1, lines 1 and 12. Bytes per entry are exact (`train/optimizer.py`): 2 for the
index if only some entries are trained, 2 for the low half of the bf16 master weight, 8, 4 or 2 for
the moments, and the weight's size for the gradient, or 4 once a second micro-batch is added.
Micro-batches were measured (`lab/estimate/probe.py`). If memory is short, the loop recomputes
activations and then halves micro-batches (`train/loop.py`), and so does this estimate. Writes
nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappush, heappushpop
from typing import TYPE_CHECKING

import numpy as np
import torch

from dualsft.algorithm.split import divide, full_size
from dualsft.data.examples import Example, tokenize
from dualsft.data.rows import DataReport, Row, stream_rows
from dualsft.data.tokens import HELD_BYTES
from dualsft.engine.passes import MOST_OF_FREE
from dualsft.memory.plans import GIB, HEADROOM
from dualsft.runs.context import RunContext
from dualsft.runs.stages.split import FOREIGN
from dualsft.train.compact import BYTES, Moments
from dualsft.train.loop import TrainingPlan
from dualsft.train.step import PART

if TYPE_CHECKING:
    from dualsft.lab.estimate.probe import Memory, Probe

SAMPLE = 1_000
"""Number of rows to tokenise, evenly spaced, at least; twice as many at most. A smaller corpus is
tokenised whole."""
LONGEST = 50
"""Number of longest rows, by bytes, to tokenise in addition."""
BYTES_PER_ROW = 3_000
"""Host memory per row of the pool, whose tokens are on disk: its id, key, loss and the like
(docs/performance.md, "Large pools")."""
OFFLOAD_PARTS = 3
"""Parts of an offloaded optimizer state that are on the device at a time."""
TAUGHT = 4 / 3
"""Work on an anchor over that on an example: one more forward pass, that of the teacher."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the tokenised examples of a role, or of the corpus."""

    sample: np.ndarray
    """Tokens per example, sorted ascending."""
    longest: int
    """Tokens of the longest example."""

    def spread(self, count: int) -> np.ndarray:
        """Lengths of `count` examples, in descending order.

        Exact if the sample has `count` examples, otherwise quantiles of the sample.
        """
        if count == len(self.sample):
            return self.sample[::-1]
        at = (np.arange(count)[::-1] + 0.5) / max(count, 1)
        return np.quantile(self.sample, at, method="nearest")

    def mean(self) -> float:
        return float(self.sample.mean())

    def batches(self, count: int, batch_tokens: int) -> list[int]:
        """Padded tokens of each batch of `count` examples."""
        return batch_sizes(self.spread(count), batch_tokens)

    def largest(self, count: int, batch_tokens: int) -> int:
        """Padded tokens of the largest batch of `count` examples.

        At least one longest example is assumed if `count` is no smaller than the sample.
        """
        longest = self.longest if count >= len(self.sample) else 0
        return max([*self.batches(count, batch_tokens), longest])


def batch_sizes(lengths: np.ndarray, batch_tokens: int) -> list[int]:
    """Padded tokens of each batch of examples with these lengths, given in descending order; the
    batches are those of `make_batches` (`data/examples.py`)."""
    sizes, start = [], 0
    while start < len(lengths):
        rows = min(max(1, batch_tokens // int(lengths[start])), len(lengths) - start)
        sizes.append(rows * int(lengths[start]))
        start += rows
    return sizes


@dataclass(frozen=True)
class Workload:
    """Number and lengths of the examples per role."""

    counts: dict[str, int]
    num_full: int
    """|D_full|."""
    lengths: Lengths
    """Lengths in the whole corpus."""
    roles: dict[str, Lengths]
    """Lengths per role, if all rows were tokenised."""
    longest: Example
    typical: Example
    split_seconds: float
    num_bytes: int
    """Bytes of the rows as text."""

    @property
    def num_tokens(self) -> int:
        return int(sum(self.counts.values()) * self.lengths.mean())

    @property
    def host_bytes(self) -> int:
        """Host memory of the tokenised corpus."""
        return HELD_BYTES + sum(self.counts.values()) * BYTES_PER_ROW

    def of(self, role: str) -> Lengths:
        """Lengths of one role, or of the whole corpus if only a sample was tokenised."""
        return self.roles.get(role, self.lengths)


def survey(ctx: RunContext) -> Workload:
    """Count the rows, tokenise a sample, and assign roles as the split stage does."""
    data, started = ctx.config.data, time.perf_counter()
    corpus, picked, spaced, num_bytes = _sampled(ctx)
    reading = time.perf_counter() - started
    started = time.perf_counter()
    examples, _ = tokenize(
        picked,
        ctx.tokenizer,
        data,
        max_positions=ctx.max_positions,
        model_type=ctx.model_type,
    )
    tokenising = (time.perf_counter() - started) * len(corpus) / len(picked)
    foreign: dict[str, list[Example]] = {}
    for key in FOREIGN:
        path = ctx.pick(key)[key]
        report = DataReport(path=ctx.data_path(path or ""))
        foreign[key] = [] if path is None else list(map(stub, stream_rows(report, data, key=key)))
    whole = len(picked) == len(corpus)  # then the split is exactly that of the run
    divided, split = divide(
        examples if whole else corpus,
        foreign["data.val_path"],
        ctx.config.seed,
        ctx.config.split,
        foreign["data.anchor_path"],
    )
    by_role: dict[str, list[int]] = defaultdict(list)
    for example, role in zip(divided, split.roles, strict=True):
        by_role[role].append(example.num_tokens)
    ordered = sorted((e for e in examples if e.id in spaced), key=lambda e: e.num_tokens)
    longest = max(examples, key=lambda e: e.num_tokens)
    return Workload(
        counts=split.counts,
        num_full=full_size(split.counts, data),
        lengths=Lengths(np.array([e.num_tokens for e in ordered]), longest.num_tokens),
        # stubs have no tokens, so a role that contains some has no lengths of its own
        roles={r: Lengths(np.sort(n), max(n)) for r, n in by_role.items() if min(n) > 0},
        longest=longest,
        typical=ordered[len(ordered) // 2],
        split_seconds=reading + tokenising,
        num_bytes=num_bytes,
    )


def _sampled(ctx: RunContext) -> tuple[list[Example], list[Row], set[str], int]:
    """(the corpus without tokens, rows to tokenise, ids of the evenly spaced ones, its bytes)."""
    data = ctx.config.data
    corpus: list[Example] = []
    spaced: dict[int, Row] = {}
    longest: list[tuple[int, int, Row]] = []
    step = 1
    num_bytes = 0
    for i, row in enumerate(stream_rows(DataReport(path=ctx.data_path(data.path)), data)):
        corpus.append(stub(row))
        num_bytes += len(row.raw)
        if i % step == 0:
            spaced[i] = row
        if len(spaced) > 2 * SAMPLE:
            step *= 2
            spaced = {at: row for at, row in spaced.items() if at % step == 0}
        (heappush if len(longest) < LONGEST else heappushpop)(longest, (len(row.raw), i, row))
    picked = spaced | {i: row for _, i, row in longest}
    rows = [picked[i] for i in sorted(picked)]
    return corpus, rows, {row.id for row in spaced.values()}, num_bytes


def stub(row: Row) -> Example:
    """An example without tokens. The split only needs its id and content key."""
    return Example(row.id, row.index, [], [], key=row.id.rpartition("-")[0])


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory of the machine, and the memory that every stage uses."""

    on_cpu: bool
    device_bytes: int
    """GPU bytes that the run may use; unused on a CPU."""
    host_bytes: int
    base: int
    """Host memory of the process itself and the tokenised corpus."""
    model_bytes: int
    dtype: torch.dtype

    @property
    def usable(self) -> float:
        """Bytes available for weights, vectors and batches."""
        if self.on_cpu:
            return self.host_bytes - self.base
        return self.device_bytes * (1 - HEADROOM)

    def hosted(self, device: int, host: int) -> int:
        """Host memory: everything on a CPU; with a GPU, models pass through it while loading."""
        return self.base + host + (device if self.on_cpu else self.model_bytes)

    def fits(self, device: int, host: int = 0) -> bool:
        return device <= self.usable and self.hosted(device, host) <= self.host_bytes

    def widens(self, num_models: int) -> bool:
        """Whether `precise` (`engine/passes.py`) would widen so many half-precision models."""
        half = num_models * self.model_bytes
        have = self.host_bytes - self.base if self.on_cpu else self.device_bytes
        return half <= MOST_OF_FREE * (have - half)

    def larger(self, device: int, host: int) -> str:
        """The machine that a stage needs without other settings."""
        if self.on_cpu or device <= self.usable:
            where = "memory" if self.on_cpu else "host memory"
            return f"use a machine with {self.hosted(device, host) / GIB:.1f} GiB of {where}"
        smaller = "set model.dtype=bfloat16, or " if self.dtype == torch.float32 else ""
        return f"{smaller}use a GPU with {device / (1 - HEADROOM) / GIB:.1f} GiB"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training stage."""

    num_entries: int
    whole: bool
    """Whether whole parameters are trained, which needs no index."""
    moments: Moments
    offload: bool
    memory: Memory
    plan: TrainingPlan
    num_examples: int
    lengths: Lengths
    anchors: tuple[int, Lengths] | None = None
    """Anchors per step of the retention term, and their lengths; it holds a second model."""

    def peak(self, machine: Machine) -> tuple[int, int, str]:
        """(bytes on the device, bytes on the host, note on how it trains)."""
        recompute = self.plan.checkpointing
        device, host, tokens = self._peak(machine, bool(recompute), shrink=recompute is not None)
        if recompute is None and not machine.fits(device, host):
            recompute = True
            device, host, tokens = self._peak(machine, True, shrink=True)
        note = f"{tokens:,} tokens per micro-batch"
        return device, host, note + (", activations recomputed" if recompute else "")

    def _peak(self, machine: Machine, checkpointing: bool, shrink: bool) -> tuple[int, int, int]:
        """(bytes on the device, bytes on the host, tokens per micro-batch)."""
        itemsize = machine.dtype.itemsize
        low = {torch.bfloat16: 2, torch.float16: 4}.get(machine.dtype, 0)
        per_entry = low + (BYTES[self.moments] if itemsize < 8 else 16)
        offloaded = self.offload and not machine.on_cpu
        state = (OFFLOAD_PARTS * PART if offloaded else self.num_entries) * per_entry
        state += 0 if self.whole else 2 * self.num_entries
        memory = self.memory
        activations = memory.recomputed if checkpointing else memory.kept
        activations = activations or memory.kept or memory.recomputed
        assert activations is not None, "the probe has measured two layers"
        several = len(self._micro_batches()) > 1 or self.anchors is not None
        grads = self.num_entries * (max(4, itemsize) if several else itemsize)
        num_models = 1 if self.anchors is None else 2
        held = num_models * machine.model_bytes + state + (grads if several else 0)
        tokens = self._largest()
        if shrink and activations.at(tokens) > machine.usable - held:
            most = activations.most_tokens(max(0.0, machine.usable - held))
            tokens = max(self.lengths.longest, min(tokens, most))
        # With one micro-batch, gradients appear while activations are freed, so the peak is at the
        # start or at the end of the backward pass. With several, gradients are held throughout.
        last = 0.0 if several else grads + activations.at(0)
        device = int(held + max(activations.at(tokens), last))
        return device, self.num_entries * per_entry if offloaded else 0, tokens

    def _micro_batches(self) -> list[int]:
        """Padded tokens of the micro-batches of a typical optimizer step."""
        lengths = self.lengths.spread(min(self.plan.batch_size, self.num_examples))
        if (size := self.plan.micro_batch_size) is None:
            return batch_sizes(lengths, self.plan.batch_tokens)
        parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        return [int(part.max()) * len(part) for part in parts]

    def _largest(self) -> int:
        """Tokens of the largest micro-batch."""
        plan, longest = self.plan, self.lengths.longest
        count = min(plan.batch_size, self.num_examples)
        if plan.micro_batch_size is not None:
            return min(count, plan.micro_batch_size) * longest
        if self.num_examples <= plan.batch_size:  # every step uses all examples
            sizes = self._micro_batches()
            return max(longest, sizes[0] if len(sizes) == 1 else plan.batch_tokens)
        return max(longest, min(plan.batch_tokens, count * longest))

    def seconds(self, probe: Probe) -> float:
        step = sum(map(probe.step_seconds.at, self._micro_batches()))
        if self.anchors is not None:
            count, lengths = self.anchors
            sizes = lengths.batches(count, self.plan.batch_tokens)
            step += TAUGHT * sum(map(probe.step_seconds.at, sizes))
        update = self.num_entries * probe.update_seconds
        return self.plan.num_steps(self.num_examples) * (step + update)
