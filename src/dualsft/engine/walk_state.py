"""Settings, progress and result of a walk over examples (`engine/walk.py`).

Algorithm 1 lines 3, 5, 6 and 8. The candidates are split into spans: consecutive parameters that
are walked together. A plan with placement "blocks" has several spans, the others have one
(`memory/plans.py`). A span records how many examples its sums contain, in order of length, which
does not depend on the plan. A walk can therefore resume under another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from dualsft.data.examples import Batch, Example, collate
from dualsft.distributed.world import world
from dualsft.engine.precision import Precision
from dualsft.engine.sketch import Sketch, SketchRows
from dualsft.memory.placement import Placement, reset
from dualsft.memory.plans import Plan, Wishes, cut, in_layers
from dualsft.model.load import Candidates
from dualsft.storage.resume import Piece, Pieces, State
from dualsft.storage.vectors import ParamVector


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


@dataclass(frozen=True)
class PassResult:
    """Outputs of a walk, one row per example in input order.

    To add an output: a field here, its zeros in `WalkState`, its tensor in `Taps.outputs`.
    """

    values: np.ndarray
    """Value of the objective: [N]."""
    dots: np.ndarray
    """⟨U, g_n⟩: [N]."""
    inner_sums: np.ndarray
    """Bound on the norm of each candidate's gradient: [N, L]."""
    sketches: SketchRows | None = None
    """Sketch of each gradient, if the walk was given a `Sketch`."""


@dataclass
class Span:
    """Candidates that are walked together, and the number of examples already in their sums."""

    names: list[str]
    done: int = 0


class WalkState:
    """G and the per-example outputs so far."""

    def __init__(
        self,
        candidates: Candidates,
        count: int,
        sums: ParamVector | None,
        bounds: bool,
        sketch: Sketch | None = None,
    ) -> None:
        self.count, self.sums = count, sums
        exact = candidates.dtype == torch.float64
        self.sketches = None if sketch is None else SketchRows(count, sketch.dim, exact)
        self.shapes = {name: tuple(candidates[name].shape) for name in in_layers(candidates)}
        wide = np.float64 if candidates.dtype == torch.float64 else np.float32
        width = len(candidates) if bounds else 0
        self.outputs = {
            "values": np.zeros(count),
            "dots": np.zeros(count),
            "inner_sums": np.zeros((count, width), wide),
        }
        self.spans: list[Span] = []
        self.num_groups = 0
        self.batch_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Reset to the initial state."""
        for output in self.outputs.values():
            output[...] = 0
        if self.sketches is not None:
            self.sketches.clear()
        if self.sums is not None:
            reset(self.sums)
        self.spans, self.num_groups, self.batch_tokens = [], 0, 0

    @property
    def waiting(self) -> list[Span]:
        """The spans with examples left to process."""
        return [span for span in self.spans if span.done < self.count]

    def regroup(self, plan: Plan) -> None:
        """Split the unfinished candidates into the groups of a plan; keeps the spans if the number
        of groups is unchanged."""
        self.batch_tokens = plan.batch_tokens
        if self.spans and self.num_groups == plan.num_groups:
            return
        merged: list[Span] = []
        for span in self.spans or [Span(list(self.shapes))]:
            if merged and merged[-1].done == span.done:
                merged[-1].names += span.names
            else:
                merged.append(Span(list(span.names), span.done))
        sizes = {name: prod(shape) for name, shape in self.shapes.items()}
        self.spans = []
        for span in merged:
            entries = sum(sizes[name] for name in span.names)
            share = round(plan.num_groups * entries / max(sum(sizes.values()), 1))
            whole = span.done >= self.count or share <= 1
            shapes = {name: self.shapes[name] for name in span.names}
            parts = [span.names] if whole else cut(shapes, share)
            self.spans += [Span(names, span.done) for names in parts]
        self.num_groups = plan.num_groups

    def add(self, rows: Sequence[int], outputs: Mapping[str, np.ndarray]) -> None:
        """Add the outputs of one batch of one span."""
        for name, output in outputs.items():
            if name == "sketches":
                assert self.sketches is not None
                self.sketches.add(rows, output)
            elif name == "values":  # the same in every span; the others add up over the spans
                self.outputs[name][rows] = output
            else:
                self.outputs[name][rows] += output

    def reduce(self) -> PassResult:
        """Sum over the processes: each example was processed once, G is a sum over examples."""
        for output in self.outputs.values():
            world().sum_array(output)
        if self.sketches is not None:
            self.sketches.reduce()
        for block in self.sums.tensors.values() if self.sums is not None else ():
            world().sum_terms_(block)
        return PassResult(**self.outputs, sketches=self.sketches)

    def snapshot(self, placement: Placement) -> State:
        """The state to save as a piece (`storage/resume.py`)."""
        placement.flush()
        tensors: dict[str, Tensor] = {
            f"result.{name}": torch.from_numpy(output) for name, output in self.outputs.items()
        }
        if self.sketches is not None:
            tensors |= {f"result.{k}": torch.from_numpy(v) for k, v in self.sketches.arrays.items()}
        if self.sums is not None:
            begun = [name for span in self.spans if span.done for name in span.names]
            tensors |= {f"sums.{name}": self.sums.tensors[name] for name in begun}
        facts = {
            "spans": [[len(span.names), span.done] for span in self.spans],
            "num_groups": self.num_groups,
            "batch_tokens": self.batch_tokens,
            "layout": {"result": "terms", "sums": world().vector_layout},
        }
        return tensors, facts

    def own_range(self, key: str) -> tuple[int, int]:
        """The flat range of a saved block of sums that this process loads, for a sharded model."""
        return world().own(self.shapes[key.removeprefix("sums.")])

    def load(self, piece: Piece | None) -> None:
        """Load a saved piece; without one, start from zero."""
        self.clear()
        if piece is None:
            return
        for name, output in self.outputs.items():
            output[...] = piece.tensors[f"result.{name}"].numpy()
        for name, array in self.sketches.arrays.items() if self.sketches is not None else ():
            array[...] = piece.tensors.pop(f"result.{name}").numpy()
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
