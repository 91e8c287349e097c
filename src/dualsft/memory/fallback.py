"""Running out of memory in a walk: half the batch, then the next smaller plan.

Sums over examples do not depend on how these are batched or grouped beyond rounding, so a walk
(`engine/walk.py`, Algorithm 1 lines 3, 5, 6 and 8) that runs out of memory is repeated from its
last saved state with less. All processes change their plan together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dualsft.distributed.world import world
from dualsft.errors import RunError
from dualsft.memory.plans import SMALL_BATCH, Plan
from dualsft.system.usage import Smaller, is_out_of_memory

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
def memory_errors_shared(label: str, shape: Shape | None = None) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into `OutOfMemory` on all processes.

    Every process must enter it, with the shape of its batch, so that all choose the same next plan.
    """
    failed: str | None = None
    try:
        yield
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        failed = str(problem)
    if failed is not None and shape is not None and world().sharded:
        # the other processes wait in the collectives of the batch and cannot agree on a retry
        raise RunError(
            f"{label}: {world().name} ran out of memory with {shape[0]} examples of "
            f"{shape[1]:,} tokens ({failed}); lower score.batch_tokens, or start more processes"
        ) from None
    if not any(world().any(failed is not None)):
        return
    reports = world().answers(None if failed is None else (failed, shape))
    failures = [report for report in reports if report is not None]
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
                f"{self.plan.describe(self.memory)}, the same sums in another order (set "
                f"{self.plan.settings} to start so)",
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
