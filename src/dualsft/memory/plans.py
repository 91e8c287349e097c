"""Memory plans: where G and the direction are while examples are walked, and in what batches.

The walks of Algorithm 1 (lines 3, 5, 6 and 8) hold the model, the sum of gradients G (fp32), the
direction U (the model's dtype) and the activations of a batch. `choose` takes their sizes and the
memory that is free, and gives the fastest plan that fits with the smaller ones behind it:

    device   G and U on the device
    host     G and U in the host's memory, brought over parameter by parameter
    (`memory/placement.py`) blocks   the candidates in groups of layers, one walk a group; only its
    G and U on the device

each with activations kept or recomputed (`engine/checkpointing.py`). A plan changes no result
beyond rounding. Nothing here touches a device: the run and `dualsft estimate` ask the same
function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, Literal

from dualsft.model.load import locate

Placement = Literal["device", "host", "blocks"]

DEFAULT_BATCH_TOKENS = {"cpu": 1024, "mps": 1024, "cuda": 32768}
"""Most padded tokens a batch when score.batch_tokens is not set, by device."""
TRAINING_BATCH_TOKENS = {"cpu": 1024, "mps": 1024, "cuda": 8192}
"""The same for a forward pass of training."""
SMALL_BATCH = 2048
"""Below this a batch leaves a GPU idle: a smaller plan with a larger batch is faster."""
AMPLE_BATCH, AMPLE_BYTES = 4096, 12 << 30
"""A batch of so many tokens and so large activations is as fast as a larger one (measured with 3B
on an H200: 2 % slower than twice the size)."""
HEADROOM = 0.06
"""Share of the device's memory left to the allocator's own gaps."""
HOST_SHARE = 0.8
"""Share of the host's free memory that a plan may take."""
NUM_SLOTS = 4
"""Blocks of a streamed vector on the device: in use, coming, going, and the one before."""
MAX_GROUPS = 64
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user set: score.plan, score.checkpointing, score.batch_tokens, model.memory."""

    placement: Literal["auto"] | Placement = "auto"
    checkpointing: bool | None = None
    memory: float | None = None
    """GiB of the device."""
    exact_batch: bool = False
    """score.batch_tokens is set: batches are as large as it says; otherwise they stop at ample."""


@dataclass(frozen=True)
class LinearFit:
    """Bytes as a function of the tokens in a batch: fixed + slope · tokens."""

    fixed: float
    slope: float

    def at(self, tokens: int) -> float:
        return self.fixed + self.slope * tokens

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> LinearFit:
        """Through two measured points (tokens, bytes); it never falls."""
        slope = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        return cls(few[1] - slope * few[0], slope)


@dataclass(frozen=True)
class Activations:
    """What a batch takes at its peak, in the forward pass with the loss and in the backward."""

    forward: LinearFit
    backward: LinearFit

    def at(self, tokens: int) -> float:
        return max(self.forward.at(tokens), self.backward.at(tokens))

    def most_tokens(self, room: float) -> int:
        """The largest batch that takes at most `room` bytes."""
        most = [
            (room - line.fixed) / line.slope if line.slope else float(room >= line.fixed) * 2**40
            for line in (self.forward, self.backward)
        ]
        return max(0, int(min(most)))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one walk needs, in sizes."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the candidates."""
    held: int
    """Bytes on the device before G and U: the model, with CWSD the teacher, and whatever else."""
    sum_itemsize: int
    """Bytes of an entry of G; 0 without G."""
    direction_itemsize: int
    """Bytes of an entry of U in a product; 0 without U."""
    longest: int
    """Tokens of the longest example."""
    kept: Activations | None = None
    """With activations kept; None: they did not fit when they were measured."""
    recomputed: Activations | None = None
    """With checkpointing; None: not measured, at most what `kept` says."""

    def activations(self, checkpointing: bool) -> Activations | None:
        return (self.recomputed or self.kept) if checkpointing else self.kept

    def vectors(self, placement: Placement, num_groups: int = 1) -> int:
        """Bytes of G and U on the device."""
        if placement == "host":
            largest = max((prod(s) for s in self.shapes.values() if len(s) > 1), default=0)
            small = sum(prod(s) for s in self.shapes.values() if len(s) < 2)
            slots = NUM_SLOTS * largest * (self.sum_itemsize + self.direction_itemsize)
            return slots + small * (self.sum_itemsize + self._small_itemsize)
        groups = cut(self.shapes, num_groups if placement == "blocks" else 1)
        return max(self._bytes(group) for group in groups)

    def host(self, placement: Placement) -> int:
        """Bytes of G and U in the host's memory."""
        if placement == "device":
            return 0
        both = self._bytes(list(self.shapes))
        sums = self.sum_itemsize * sum(map(prod, self.shapes.values()))
        return both if placement == "host" else sums

    @property
    def _small_itemsize(self) -> int:
        """Vectors enter their products in fp32 or better."""
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

    placement: Placement
    checkpointing: bool
    batch_tokens: int
    num_groups: int = 1
    peak: int | None = None
    """Bytes on the device, predicted; None without a measurement."""

    @property
    def settings(self) -> str:
        """The settings that start so."""
        return (
            f"score.plan={self.placement} score.checkpointing={str(self.checkpointing).lower()} "
            f"score.batch_tokens={self.batch_tokens}"
        )

    def describe(self, memory: int | None = None) -> str:
        """In words; `memory` is what the device has, in bytes."""
        where = {
            "device": "everything on the device",
            "host": "G and the direction in the host's memory, brought over block by block",
            "blocks": f"candidates in {self.num_groups} groups of layers, one walk a group",
        }
        again = ", activations recomputed" if self.checkpointing else ""
        size = f", {self.batch_tokens:,} tokens a batch"
        about = ""
        if self.peak is not None:
            about = f", about {self.peak / GIB:.1f}"
            about += f" of {memory / GIB:.0f} GiB" if memory else " GiB"
        return where[self.placement] + again + size + about

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
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
    """The fastest plan that fits, and the smaller ones to fall back on, largest first.

    `device_bytes` is all that the run may use of the device, what it holds already included;
    `batch_tokens` the most tokens that a batch may have. What the user wishes comes first, whether
    it is predicted to fit on the device or not; the host's memory is never overdrawn.
    """
    room = int(device_bytes * (1 - HEADROOM))
    ladder = list(_ladder(demand, wishes))
    hosted = [p for p in ladder if demand.host(p.placement) <= HOST_SHARE * host_bytes]
    plans = [_sized(plan, demand, room, batch_tokens, wishes) for plan in hosted or ladder[-1:]]
    fitting = [i for i, plan in enumerate(plans) if plan.peak is not None]
    enough = min(SMALL_BATCH, batch_tokens)
    good = [i for i in fitting if plans[i].batch_tokens >= enough]
    if wishes.placement != "auto" or wishes.checkpointing is not None:
        asked = [i for few in (good, fitting) for i in few if _is_wished(plans[i], wishes)]
        first = asked[0] if asked else 0
    elif good:
        first = good[0]
    elif fitting:
        first = max(fitting, key=lambda i: plans[i].batch_tokens)
    else:
        first = min(range(len(plans)), key=lambda i: _least(plans[i], demand))
    chain = [plans[first]]
    for plan in plans[first + 1 :]:
        if _least(plan, demand) < _least(chain[-1], demand):
            chain.append(plan)
    least = min(demand.longest, batch_tokens)
    return [plan if plan.batch_tokens else replace(plan, batch_tokens=least) for plan in chain]


def unmeasured(batch_tokens: int, wishes: Wishes, num_parameters: int) -> list[Plan]:
    """Where nothing is measured (a CPU): as wished or everything on the device, then smaller."""
    return [
        replace(plan, batch_tokens=batch_tokens)
        for plan in _steps(num_parameters, wishes)
        if wishes.placement != "auto" or plan.placement == "device"
    ]


def _is_wished(plan: Plan, wishes: Wishes) -> bool:
    placed = wishes.placement in ("auto", plan.placement)
    return placed and wishes.checkpointing in (None, plan.checkpointing)


def _ladder(demand: Demand, wishes: Wishes) -> Iterator[Plan]:
    """What may be tried, in order; without G and U there is nothing to place."""
    something = demand.sum_itemsize or demand.direction_itemsize
    for plan in _steps(len(demand.shapes), wishes):
        if something or plan.placement in ("device", wishes.placement):
            yield plan


def _steps(num_parameters: int, wishes: Wishes) -> Iterator[Plan]:
    """Placements, recomputation and numbers of groups from the fastest to the smallest."""
    counts = [2**i for i in range(1, 7) if 2**i <= min(MAX_GROUPS, max(2, num_parameters))]
    kept = [("device", 1), ("host", 1)]
    groups = [("blocks", count) for count in counts]
    steps: list[tuple[Any, bool, int]] = []
    for placement, count in kept:
        steps += [(placement, False, count), (placement, True, count)]
    if wishes.placement == "blocks":
        steps.append(("blocks", False, 2))
    steps += [(placement, True, count) for placement, count in groups]
    if wishes.checkpointing is True:
        steps = [step for step in steps if step[1]]
    elif wishes.checkpointing is False:
        plain = [(placement, False, count) for placement, count in (*kept, *groups)]
        steps = plain + [step for step in steps if step[1]]
    if wishes.placement != "auto":
        order = ("device", "host", "blocks")
        first = order.index(wishes.placement)
        steps = [step for step in steps if order.index(step[0]) >= first]
    for placement, again, count in steps:
        yield Plan(placement, again, 0, count)


def _sized(plan: Plan, demand: Demand, room: int, batch_tokens: int, wishes: Wishes) -> Plan:
    """With the largest batch that fits (0 when none does) and the peak it is predicted to have."""
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
    """What a plan takes with a batch of one, the longest example; recomputing is never more."""
    activations = demand.activations(plan.checkpointing)
    batch = activations.at(demand.longest) if activations else 0.0
    size = demand.vectors(plan.placement, plan.num_groups) + batch
    return activations is None, size, not plan.checkpointing


def in_layers(names: Iterable[str]) -> list[str]:
    """What is outside of the layers first (embedding, head: one weight may be both), then those."""
    return sorted(names, key=lambda name: locate(name)[0] is not None)


def cut(shapes: Mapping[str, Sequence[int]], num_groups: int) -> list[list[str]]:
    """The candidates in about equal groups of whole layers; none is empty."""
    layers = [list(g) for _, g in groupby(in_layers(shapes), key=lambda name: locate(name)[0])]
    sizes = [sum(prod(shapes[name]) for name in names) for names in layers]
    total, passed = sum(sizes), 0
    groups: list[list[str]] = []
    current = -1
    for names, size in zip(layers, sizes, strict=True):
        # a layer belongs to the group in whose share its middle lies
        share = min(num_groups - 1, int((passed + size / 2) * num_groups / max(total, 1)))
        if share != current:
            groups.append([])
            current = share
        groups[-1] += names
        passed += size
    return groups
