"""Memory plans: where G and the direction are stored during a walk, and how large batches are.

The walks of Algorithm 1 (lines 3, 5, 6 and 8) hold the model, the sum of gradients G (fp32), the
direction U (the model's dtype) and the activations of a batch. `choose` takes their sizes and the
free memory, and returns the fastest plan that fits, followed by smaller ones to fall back on:

    device   G and U on the device
    host     G and U in host memory, copied one parameter at a time (`memory/placement.py`)
    blocks   candidates in groups of layers, one walk per group; the group's G and U on the device

each with activations kept or recomputed (`engine/fused.py`). A plan changes results by rounding
only. This module never touches a device: a run and `dualsft estimate` call the same function.

`Fallback` is what follows when a walk runs out of memory all the same: half the batch, then the
next plan, from the last saved state. All processes change their plan together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, Literal

import torch

from dualsft.distributed.world import world
from dualsft.errors import RunError
from dualsft.model.load import locate
from dualsft.system.usage import Smaller, is_out_of_memory

PlacementName = Literal["device", "host", "blocks"]

DEFAULT_BATCH_TOKENS = {"cpu": 1024, "mps": 1024, "cuda": 32768}
"""Maximum padded tokens per batch when score.batch_tokens is not set, by device type."""
TRAINING_BATCH_TOKENS = {"cpu": 1024, "mps": 1024, "cuda": 8192}
"""The same for a micro-batch in training."""
SMALL_BATCH = 2048
"""Smaller batches leave a GPU idle; a smaller plan with a larger batch is then faster."""
AMPLE_BATCH, AMPLE_BYTES = 4096, 12 << 30
"""Batches beyond this many tokens and bytes of activations gain almost no speed (3B model on an
H200: 2 % slower than twice the size)."""
HEADROOM = 0.06
"""Fraction of device memory reserved for allocator fragmentation."""
HOST_SHARE = 0.8
"""Fraction of free host memory that a plan may use."""
NUM_SLOTS = 4
"""Blocks of a streamed vector on the device: in use, copied in, copied out, previously used."""
SHARDED_TOKENS = 8192
"""Padded tokens per batch of a sharded model on a GPU, for which memory is not measured."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """User settings: score.plan, score.checkpointing, score.batch_tokens, model.memory."""

    placement: Literal["auto"] | PlacementName = "auto"
    checkpointing: bool | None = None
    memory: float | None = None
    """GiB of device memory that may be used."""
    exact_batch: bool = False
    """score.batch_tokens is set: use that size; otherwise batches are capped at the ample size."""


@dataclass(frozen=True)
class LinearFit:
    """Bytes as a function of the tokens in a batch: fixed + slope · tokens."""

    fixed: float
    slope: float

    def at(self, tokens: int) -> float:
        return self.fixed + self.slope * tokens

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> LinearFit:
        """The line through two measured points (tokens, bytes); the slope is never negative."""
        slope = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        return cls(few[1] - slope * few[0], slope)


@dataclass(frozen=True)
class Activations:
    """Peak memory of a batch, in the forward pass (with the loss) and in the backward pass."""

    forward: LinearFit
    backward: LinearFit

    def at(self, tokens: int) -> float:
        return max(self.forward.at(tokens), self.backward.at(tokens))

    def most_tokens(self, room: float) -> int:
        """The largest batch, in tokens, that takes at most `room` bytes."""
        most = [
            (room - line.fixed) / line.slope if line.slope else float(room >= line.fixed) * 2**40
            for line in (self.forward, self.backward)
        ]
        return max(0, int(min(most)))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Memory requirements of one walk."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the candidates."""
    held: int
    """Bytes on the device before G and U: the model, the teacher (CWSD), everything else."""
    sum_itemsize: int
    """Bytes per entry of G; 0 without G."""
    direction_itemsize: int
    """Bytes per entry of U in a product; 0 without U."""
    longest: int
    """Tokens of the longest example."""
    kept: Activations | None = None
    """Activations without checkpointing; None: the measurement ran out of memory."""
    recomputed: Activations | None = None
    """Activations with checkpointing; None: not measured, at most those of `kept`."""

    def activations(self, checkpointing: bool) -> Activations | None:
        return (self.recomputed or self.kept) if checkpointing else self.kept

    def vectors(self, placement: PlacementName, num_groups: int = 1) -> int:
        """Bytes of G and U on the device."""
        if placement == "host":
            largest = max((prod(s) for s in self.shapes.values() if len(s) > 1), default=0)
            small = sum(prod(s) for s in self.shapes.values() if len(s) < 2)
            slots = NUM_SLOTS * largest * (self.sum_itemsize + self.direction_itemsize)
            return slots + small * (self.sum_itemsize + self._small_itemsize)
        groups = cut(self.shapes, num_groups if placement == "blocks" else 1)
        return max(self._bytes(group) for group in groups)

    def host(self, placement: PlacementName) -> int:
        """Bytes of G and U in host memory."""
        if placement == "device":
            return 0
        # with "blocks" finished groups of G are moved to the host; U is read lazily, per group
        both = self._bytes(list(self.shapes))
        sums = self.sum_itemsize * sum(map(prod, self.shapes.values()))
        return both if placement == "host" else sums

    @property
    def _small_itemsize(self) -> int:
        """Bytes per entry of U for 1-D parameters, whose products are in fp32 or fp64."""
        return max(4, self.direction_itemsize) if self.direction_itemsize else 0

    def _bytes(self, names: Sequence[str]) -> int:
        return sum(
            prod(self.shapes[n])
            * (
                self.sum_itemsize
                + (self.direction_itemsize if len(self.shapes[n]) > 1 else self._small_itemsize)
            )
            for n in names
        )


@dataclass(frozen=True)
class Plan:
    """How a walk uses memory."""

    placement: PlacementName
    checkpointing: bool
    batch_tokens: int
    num_groups: int = 1
    peak: int | None = None
    """Predicted peak bytes on the device; None without a measurement."""

    @property
    def settings(self) -> str:
        """The config overrides that select this plan."""
        return (
            f"score.plan={self.placement} score.checkpointing={str(self.checkpointing).lower()} "
            f"score.batch_tokens={self.batch_tokens}"
        )

    def describe(self, memory: int | None = None) -> str:
        """A one-line description; `memory` is the device memory that may be used, in bytes."""
        where = {
            "device": "everything on the device",
            "host": "G and the direction in host memory, copied block by block",
            "blocks": f"candidates in {self.num_groups} groups of layers, one walk per group",
        }
        again = ", activations recomputed" if self.checkpointing else ""
        size = f", {self.batch_tokens:,} tokens per batch"
        about = ""
        if self.peak is not None:
            about = f", about {self.peak / GIB:.1f}"
            about += f" of {memory / GIB:.0f} GiB" if memory else " GiB"
        return where[self.placement] + again + size + about

    def facts(self) -> dict[str, Any]:
        """The plan as recorded in the manifest."""
        return {
            "plan": self.settings,
            "placement": self.placement,
            "checkpointing": self.checkpointing,
            "batch_tokens": self.batch_tokens,
            "num_groups": self.num_groups,
            "predicted_peak_bytes": self.peak,
        }


def choose(
    demand: Demand, device_bytes: int, host_bytes: int, batch_tokens: int, wishes: Wishes
) -> list[Plan]:
    """The fastest plan that fits, followed by smaller plans to fall back on, largest first.

    `device_bytes` is the device memory that the run may use, including what it already holds;
    `batch_tokens` is the maximum number of tokens per batch. A plan set by the user comes first,
    even if it is predicted not to fit on the device. Plans that exceed the host memory are dropped.
    """
    room = int(device_bytes * (1 - HEADROOM))
    ladder = _steps(len(demand.shapes), wishes)
    if not demand.sum_itemsize and not demand.direction_itemsize:  # nothing to place elsewhere
        ladder = [plan for plan in ladder if plan.placement in ("device", wishes.placement)]
    hosted = [p for p in ladder if demand.host(p.placement) <= HOST_SHARE * host_bytes]
    plans = [_sized(plan, demand, room, batch_tokens, wishes) for plan in hosted or ladder[-1:]]
    fitting = [i for i, plan in enumerate(plans) if plan.peak is not None]
    enough = min(SMALL_BATCH, batch_tokens)
    good = [i for i in fitting if plans[i].batch_tokens >= enough]
    if wishes.placement != "auto" or wishes.checkpointing is not None:
        asked = (
            i
            for i in [*good, *fitting]
            if wishes.placement in ("auto", plans[i].placement)
            and wishes.checkpointing in (None, plans[i].checkpointing)
        )
        first = next(asked, 0)
    elif good:
        first = good[0]
    elif fitting:  # every batch is too small to be fast: take the largest
        first = max(fitting, key=lambda i: plans[i].batch_tokens)
    else:  # nothing is predicted to fit: try the smallest plan anyway
        first = min(range(len(plans)), key=lambda i: _least(plans[i], demand))
    chain = [plans[first]]
    for plan in plans[first + 1 :]:  # a fallback must need less memory than the plan before it
        if _least(plan, demand) < _least(chain[-1], demand):
            chain.append(plan)
    least = min(demand.longest, batch_tokens)
    # plans that are not predicted to fit are tried with a batch of one example
    return [plan if plan.batch_tokens else replace(plan, batch_tokens=least) for plan in chain]


def is_measured(device: torch.device) -> bool:
    """Whether walks measure the memory of their batches: on a GPU, with a replicated model."""
    return device.type == "cuda" and not world().sharded


def unmeasured(
    batch_tokens: int, wishes: Wishes, num_parameters: int, device: torch.device | None = None
) -> list[Plan]:
    """The plans where memory is not measured: the plan set by the user or everything on the device,
    followed by smaller ones.

    A sharded model has a single plan: on a GPU small batches with activations recomputed, unless
    set otherwise.
    """
    if world().sharded:
        wishes = replace(wishes, placement="device")
    plans = [
        replace(plan, batch_tokens=batch_tokens)
        for plan in _steps(num_parameters, wishes)
        if wishes.placement != "auto" or plan.placement == "device"
    ]
    if not world().sharded:
        return plans
    if device is None or device.type != "cuda":
        return plans[:1]
    tokens = batch_tokens if wishes.exact_batch else min(batch_tokens, SHARDED_TOKENS)
    again = wishes.checkpointing is not False
    return [replace(plans[0], batch_tokens=tokens, checkpointing=again)]


def _steps(num_parameters: int, wishes: Wishes) -> list[Plan]:
    """All combinations of placement, recomputation and number of groups, fastest first."""
    counts = [count for count in (2, 4, 8, 16, 32, 64) if count <= max(2, num_parameters)]
    kept = [Plan("device", False, 0), Plan("host", False, 0)]
    kept += [Plan("blocks", False, 0, count) for count in counts]
    recomputed = [replace(plan, checkpointing=True) for plan in kept]
    if wishes.checkpointing is None:
        blocks = kept[2:3] if wishes.placement == "blocks" else []
        plans = [kept[0], recomputed[0], kept[1], recomputed[1], *blocks, *recomputed[2:]]
    else:
        plans = recomputed if wishes.checkpointing else kept + recomputed
    order = ("device", "host", "blocks")
    first = 0 if wishes.placement == "auto" else order.index(wishes.placement)
    return [plan for plan in plans if order.index(plan.placement) >= first]


def _sized(plan: Plan, demand: Demand, room: int, batch_tokens: int, wishes: Wishes) -> Plan:
    """The plan with the largest batch that fits (0 if none does) and its predicted peak memory."""
    activations = demand.activations(plan.checkpointing)
    if activations is None:
        return plan
    base = demand.held + demand.vectors(plan.placement, plan.num_groups)
    most = activations.most_tokens(room - base)
    if most < demand.longest:
        return plan
    tokens = min(batch_tokens, most)
    if not wishes.exact_batch and plan.placement == "device":
        tokens = min(tokens, max(activations.most_tokens(AMPLE_BYTES), AMPLE_BATCH, demand.longest))
    peak = base + activations.at(max(tokens, demand.longest))
    return replace(plan, batch_tokens=tokens, peak=int(peak))


def _least(plan: Plan, demand: Demand) -> tuple[bool, float, bool]:
    """Sort key: memory of a plan with the longest example as its batch; on ties, recomputing counts
    as smaller."""
    activations = demand.activations(plan.checkpointing)
    batch = activations.at(demand.longest) if activations else 0.0
    size = demand.vectors(plan.placement, plan.num_groups) + batch
    return activations is None, size, not plan.checkpointing


def in_layers(names: Iterable[str]) -> list[str]:
    """Parameters outside the layers first (embedding and head, which may be tied), then by layer.

    The sort is stable, so the layers keep the model's order.
    """
    return sorted(names, key=lambda name: locate(name)[0] is not None)


def cut(shapes: Mapping[str, Sequence[int]], num_groups: int) -> list[list[str]]:
    """Split the candidates into groups of whole layers of about equal size; no group is empty."""
    layers = [list(g) for _, g in groupby(in_layers(shapes), key=lambda name: locate(name)[0])]
    sizes = [sum(prod(shapes[name]) for name in names) for names in layers]
    total, passed = sum(sizes), 0
    groups: list[list[str]] = []
    current = -1
    for names, size in zip(layers, sizes, strict=True):
        # a layer goes to the group whose share of the entries contains the layer's midpoint
        share = min(num_groups - 1, int((passed + size / 2) * num_groups / max(total, 1)))
        if share != current:
            groups.append([])
            current = share
        groups[-1] += names
        passed += size
    return groups


# --- running out of memory ---------------------------------------------------------------------

Shape = tuple[int, int]
"""Examples and tokens per example of a padded batch."""


class OutOfMemory(Exception):
    """Out of memory with a batch of `shape`; None: before the first batch.

    Raised with the message of the original error: its traceback would keep tensors alive.
    """

    def __init__(self, message: str, shape: Shape | None) -> None:
        super().__init__(message)
        self.shape = shape


@contextmanager
def memory_errors_noted(shape: Shape | None) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into `OutOfMemory` with this shape."""
    try:
        yield
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        raise OutOfMemory(str(problem), shape) from None


@contextmanager
def memory_errors_shared(
    label: str, shape: Shape | None = None, cure: str = "lower score.batch_tokens"
) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into `OutOfMemory` on all processes.

    Every process must enter it, with the shape of its batch (or with `memory_errors_noted` around
    each of several batches), so that all choose the same next plan.
    """
    failed: tuple[str, Shape | None] | None = None
    try:
        with memory_errors_noted(shape):
            yield
    except OutOfMemory as problem:
        failed, shape = (str(problem), problem.shape), problem.shape
    if failed is not None and shape is not None and world().sharded:
        # the other processes wait in the collectives of the batch and cannot agree on a retry
        raise RunError(
            f"{label}: {world().name} ran out of memory with {shape[0]} examples of "
            f"{shape[1]:,} tokens ({failed[0]}); {cure}, or start more processes"
        ) from None
    if not any(world().any(failed is not None)):
        return
    failures = [report for report in world().gather(failed) if report is not None]
    # of several shapes the one with the fewest tokens once its batch is halved
    shapes = [shape for _, shape in failures if shape is not None]
    least = min(shapes, key=lambda shape: shape[0] // 2 * shape[1], default=None)
    raise OutOfMemory(failures[0][0], least)


@dataclass
class Fallback:
    """The plans of a walk: the first is in use, smaller ones follow."""

    label: str
    plans: list[Plan]
    memory: int
    """Device memory that may be used, in bytes; 0 if it was not measured."""
    batch_tokens: int
    """Maximum tokens per batch."""
    warn: Callable[..., None]
    note: Callable[[str, Plan, int], None]
    """Called with the label, each plan and the memory."""

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    def start(self, saved: Mapping[str, Any] | None, keep_placement: bool) -> None:
        """Begin with the first plan; when resuming, with the batches and groups of the saved walk.

        The saved walk may have fallen back: plans with fewer groups are then skipped, unless
        `keep_placement` (the user set one without groups).
        """
        if saved is not None:
            skip = (
                i for i, plan in enumerate(self.plans) if plan.num_groups >= saved["num_groups"]
            )
            del self.plans[: 0 if keep_placement else next(skip, 0)]
            tokens = min(self.plan.batch_tokens, saved["batch_tokens"])
            self.plans[0] = replace(self.plan, batch_tokens=tokens)
        self.note(self.label, self.plan, self.memory)

    def shrink(self, problem: OutOfMemory) -> None:
        """Half the batch while batches stay large enough, then the next plan; with no plan left,
        half the batch again."""
        rows, tokens = problem.shape or (1, 0)
        floor = min(SMALL_BATCH, self.batch_tokens // 16)
        if len(self.plans) > 1 and (rows == 1 or rows // 2 * tokens < floor):
            failed = self.plans.pop(0)
            self.warn(
                f"{self.label}: out of memory with {failed.describe()}; continuing with "
                f"{self.plan.describe(self.memory)}, the same sums in another order ("
                f"{self.plan.settings} starts with it)",
                code="out_of_memory",
            )
            self.note(self.label, self.plan, self.memory)
            return
        if problem.shape is None:
            raise RunError(
                f"{self.label}: out of memory before the first batch ({problem}); choose fewer "
                "parameters with score.candidates, free memory, or use a machine with more memory"
            ) from None
        smaller = Smaller.than(problem.shape, problem, "score.batch_tokens")
        self.warn(f"{self.label}: {smaller}", code="out_of_memory")
        self.plans[0] = replace(self.plan, batch_tokens=smaller.batch_tokens)
