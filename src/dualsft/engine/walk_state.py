"""State of a walk over examples: values, dot products, bounds, G, and the progress of each span.

Algorithm 1 lines 3, 5, 6 and 8. The candidates are split into spans: consecutive parameters that
are walked together. A plan with placement "blocks" has several spans, the others have one
(`memory/plans.py`). A span records how many examples its sums contain, in order of length, which
does not depend on the plan. A walk can therefore resume under another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dualsft.distributed.world import world
from dualsft.memory.placement import move, reset
from dualsft.memory.plans import cut, in_layers
from dualsft.storage.resume import Piece, State
from dualsft.storage.vectors import ParamVector

ARRAYS = ("values", "dots", "inner_sums")


@dataclass(frozen=True)
class PassResult:
    """Per example, in input order: value of the objective, ⟨U, g_n⟩, bound per candidate."""

    values: np.ndarray
    dots: np.ndarray
    inner_sums: np.ndarray


@dataclass
class Span:
    """Candidates that are walked together, and the number of examples already in their sums."""

    names: list[str]
    done: int = 0


@dataclass
class WalkState:
    """The sums and the per-example values so far."""

    shapes: Mapping[str, tuple[int, ...]]
    count: int
    result: PassResult
    sums: ParamVector | None
    spans: list[Span] = field(default_factory=list)
    num_groups: int = 0
    batch_tokens: int | None = None
    settle: Callable[[], None] = lambda: None
    """Copies streamed blocks back into `sums`; does nothing if none are streamed."""

    @classmethod
    def new(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        count: int,
        width: int,
        dtype: torch.dtype,
        sums: ParamVector | None,
    ) -> WalkState:
        wide = np.float64 if dtype == torch.float64 else np.float32
        result = PassResult(np.zeros(count), np.zeros(count), np.zeros((count, width), wide))
        return cls({name: shapes[name] for name in in_layers(shapes)}, count, result, sums)

    @property
    def waiting(self) -> list[Span]:
        """The spans with examples left to process."""
        return [span for span in self.spans if span.done < self.count]

    def regroup(self, num_groups: int) -> None:
        """Split the unfinished candidates into groups for a plan; keeps the spans if the number of
        groups is unchanged."""
        if self.spans and self.num_groups == num_groups:
            return
        merged: list[Span] = []
        for span in self.spans or [Span(list(self.shapes))]:
            if merged and merged[-1].done == span.done:
                merged[-1].names += span.names
            else:
                merged.append(Span(list(span.names), span.done))
        total = self._entries(list(self.shapes))
        self.spans = []
        for span in merged:
            share = round(num_groups * self._entries(span.names) / max(total, 1))
            whole = span.done >= self.count or share <= 1
            parts = [span.names] if whole else self._cut(span.names, share)
            self.spans += [Span(names, span.done) for names in parts]
        self.num_groups = num_groups

    def _entries(self, names: Sequence[str]) -> int:
        return sum(int(np.prod(self.shapes[name])) for name in names)

    def _cut(self, names: Sequence[str], num_groups: int) -> list[list[str]]:
        return cut({name: self.shapes[name] for name in names}, num_groups)

    def add(
        self, rows: Sequence[int], values: np.ndarray, dots: np.ndarray, inner_sums: np.ndarray
    ) -> None:
        """Add the results of one batch of one span; dots and bounds add up over the spans."""
        self.result.values[rows] = values
        self.result.dots[rows] += dots
        self.result.inner_sums[rows] += inner_sums

    def snapshot(self) -> State:
        """The state to save as a piece (`storage/resume.py`)."""
        self.settle()
        arrays = {name: torch.from_numpy(getattr(self.result, name)) for name in ARRAYS}
        tensors = {f"result.{name}": array for name, array in arrays.items()}
        if self.sums is not None:
            begun = [name for span in self.spans if span.done for name in span.names]
            tensors |= {f"sums.{name}": self.sums.tensors[name] for name in begun}
        facts = {
            "spans": [[len(span.names), span.done] for span in self.spans],
            "num_groups": self.num_groups,
            "batch_tokens": self.batch_tokens,
            "layout": {"result": "terms", "sums": "rows" if world().sharded else "terms"},
        }
        return tensors, facts

    def span(self, key: str) -> tuple[int, int]:
        """The flat range of a saved block of sums that this process loads, for a sharded model."""
        return world().own(self.shapes[key.removeprefix("sums.")])

    def load(self, piece: Piece | None) -> None:
        """Load a saved piece; without one, start from zero."""
        self.clear()
        if piece is None:
            return
        for name in ARRAYS:
            getattr(self.result, name)[...] = piece.tensors[f"result.{name}"].numpy()
        for key in [key for key in piece.tensors if key.startswith("sums.")]:
            assert self.sums is not None
            name = key.removeprefix("sums.")
            shape = self.sums.tensors[name].shape
            self.sums.tensors[name] = piece.tensors.pop(key).clone().view(shape)
        names = list(self.shapes)
        for length, done in piece.facts["spans"]:
            self.spans.append(Span(names[:length], done))
            names = names[length:]
        self.num_groups = piece.facts["num_groups"]
        self.batch_tokens = piece.facts["batch_tokens"]

    def clear(self) -> None:
        """Reset to the initial state."""
        for name in ARRAYS:
            getattr(self.result, name)[...] = 0
        if self.sums is not None:
            reset(self.sums)
        self.spans, self.num_groups, self.batch_tokens = [], 0, None

    def meet(self) -> None:
        """All-reduce the results: each example was processed once, G is a sum over processes."""
        for name in ARRAYS:
            world().total(getattr(self.result, name))
        if self.sums is not None and not world().sharded:
            for block in self.sums.tensors.values():
                world().sum_(block)

    def finish(self, span: Span, placement: str) -> None:
        """Move the sums of a finished group to the host, to free device memory for the next."""
        if self.sums is not None and placement == "blocks":
            move(self.sums, span.names, "cpu")
