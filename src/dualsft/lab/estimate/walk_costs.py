"""Memory and time of a walk, and its plan: the part of `dualsft estimate` for the ghost engine.

Covers Algorithm 1, lines 3 to 8: v_new, v_prior, the pool, and the examples scored again. The sizes
of weights and vectors are exact, batches were measured (`lab/estimate/probe.py`), and the plan is
the one that the run would choose (`memory/plans.py`). In half precision some walks use fp32 weights
(`engine/precision.py`); these have twice the bytes of weights, and activations measured in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dualsft.engine.precision import MOST_OF_FREE
from dualsft.lab.estimate.probe import Walks
from dualsft.lab.estimate.training_costs import Room
from dualsft.lab.estimate.workload import Lengths
from dualsft.memory.plans import Demand, Plan, choose, unmeasured
from dualsft.runs.context import RunContext, pass_settings

RECOMPUTED = 4 / 3
"""Time factor of a walk that recomputes activations."""


@dataclass(frozen=True)
class Planned:
    """Plan of a walk, its bytes on the device and on the host, and its seconds."""

    plan: Plan
    device: int
    host: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Sizes of one walk."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the candidates."""
    measured: Walks
    objective: Literal["loss", "cwsd"] = "loss"
    weights: int
    """Bytes of all models in memory, in the dtype used during the walk."""
    sum_itemsize: int
    """Bytes per entry of G; 0 without G."""
    direction_itemsize: int
    """Bytes per entry of the direction, in the dtype of its products; 0 without one."""
    num_examples: int
    lengths: Lengths

    def planned(self, ctx: RunContext, room: Room) -> Planned:
        """Plan and costs of the walk on this machine, as the run would choose."""
        memory = self.measured.cwsd if self.objective == "cwsd" else self.measured.loss
        demand = Demand(
            shapes=self.shapes,
            held=self.weights,
            sum_itemsize=self.sum_itemsize,
            direction_itemsize=self.direction_itemsize,
            longest=self.lengths.longest,
            kept=memory.kept,
            recomputed=memory.recomputed,
        )
        wishes = pass_settings(ctx).wishes
        most = max(1, min(ctx.batch_tokens, int(self.num_examples * self.lengths.mean())))
        if room.on_cpu:
            plan = unmeasured(most, wishes, len(self.shapes))[0]
        else:
            free = max(0, room.host_bytes - room.base)
            plan = choose(demand, room.device_bytes, free, most, wishes)[0]
        activations = demand.activations(plan.checkpointing) or memory.recomputed
        tokens = self.lengths.largest(self.num_examples, max(1, plan.batch_tokens))
        batch = int(activations.at(tokens)) if activations else room.device_bytes
        vectors = demand.vectors(plan.placement, plan.num_groups)
        device = demand.held + vectors + batch
        return Planned(plan, device, demand.host(plan.placement), self._seconds(plan))

    def _seconds(self, plan: Plan) -> float:
        num_batches, tokens = self.lengths.batches(self.num_examples, max(1, plan.batch_tokens))
        line = self.measured.seconds
        again = RECOMPUTED if plan.checkpointing else 1.0
        return plan.num_groups * again * (num_batches * line.fixed + tokens * line.slope)


def has_room_for_fp32(room: Room, num_models: int) -> bool:
    """Whether `precision.precise` would widen this number of half-precision models."""
    half = num_models * room.model_bytes
    have = room.host_bytes - room.base if room.on_cpu else room.device_bytes
    return half <= MOST_OF_FREE * (have - half)
