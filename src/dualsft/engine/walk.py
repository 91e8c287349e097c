"""A walk: one pass over examples with the ghost engine (pool pass, v_new, v_prior, re-scoring).

Algorithm 1 lines 3, 5, 6 and 8 are this walk with different objectives and outputs. Per batch: a
forward pass, the objective summed over the examples, a backward pass in which the taps of the
engine (`engine/ghost.py`) add the gradients to G and collect one value, dot product and bound per
example. Batches are bucketed by length under a token budget, in eval mode, so results do not depend
on the batch size, the padding side or the order (up to rounding).

Where G and the direction are stored is up to the `Placement` (`memory/placement.py`) of the plan
that was chosen for the memory at hand (`engine/passes.py`). After running out of memory the walk is
repeated from its last saved state with less (`memory/plans.py`). The state is saved after a
batch if due (`storage/resume.py`), and an interrupted walk resumes after it with bit-identical
results.

The candidates are split into spans: consecutive parameters that are walked together. A plan with
placement "blocks" has several spans, the others have one. A span records how many examples its sums
contain, in order of length, which does not depend on the plan. A walk can therefore resume under
another plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example, make_batches, named
from dualsft.distributed.world import world
from dualsft.engine.fused import checkpointed
from dualsft.engine.ghost import GhostEngine, Taps
from dualsft.engine.losses import HeadObserver, Objective, distillation_objective, example_objective
from dualsft.engine.passes import Collected, PassSettings, plans_for
from dualsft.engine.sketch import Sketch, SketchRows
from dualsft.errors import CheckError
from dualsft.memory.placement import DevicePlacement, Placement, placed, reset
from dualsft.memory.plans import Fallback, OutOfMemory, Plan, cut, in_layers, memory_errors_shared
from dualsft.model.load import Candidates
from dualsft.storage.resume import Piece, State, slug
from dualsft.storage.vectors import ParamVector, Vector
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter
from dualsft.system.usage import give_back


def loss_objective(model: PreTrainedModel) -> Objective:
    """The example loss, summed over the batch."""
    return lambda batch, observer: example_objective(model, batch, observer=observer)


def cwsd_objective(teacher: PreTrainedModel, student: PreTrainedModel, tau: float) -> Objective:
    """ω τ² KL(teacher ‖ student), summed over the batch."""

    def objective(batch: Batch, observer: HeadObserver | None) -> tuple[Tensor, Tensor]:
        total, divergence, omega = distillation_objective(
            teacher, student, batch, tau, observer=observer
        )
        return total, divergence * omega

    return objective


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


def walk(
    engine: GhostEngine,
    examples: Sequence[Example],
    objective: Objective,
    settings: PassSettings,
    reporter: Reporter,
    label: str,
    *,
    sums: ParamVector | None = None,
    direction: Vector | None = None,
    bounds: bool = False,
    squared: bool = False,
    sketch: Sketch | None = None,
) -> PassResult:
    """Differentiate `objective` over the examples and collect the requested quantities.

    `sums` accumulates Σ_n g_n, `direction` is the U of the dot products ⟨U, g_n⟩, and `bounds`
    requests the norm bounds. With `squared`, which needs `engine.separable`, `sums` accumulates
    Σ_n g_n ⊙ g_n, and the bounds are the exact norms of g_n for each parameter. `sketch` requests
    the sketch of each gradient. If nothing else is requested, only the weights that it covers are
    observed, and the backward pass stops at the first block that has one.

    `label` names the walk and must be unique in its stage. `sums` must be zero on entry
    (`placement.blank` creates zeros that take no memory); on return its tensors are on the device
    or in host memory, depending on the plan. `direction` may be lazy: the walk loads it as the plan
    requires, matrices in the model's dtype, in which they are multiplied.
    """
    folder = settings.pieces.folder
    only = None
    if sketch is not None and sums is None and direction is None and not bounds:
        only = engine.observed_for(sketch)
    state = WalkState(engine.candidates, len(examples), sums, bounds, sketch, folder, only)
    collected = (direction, bounds, squared, sketch, only)
    return _Walk(engine, examples, objective, settings, reporter, label, *collected, state).run()


@dataclass(frozen=True)
class _Walk:
    """The arguments of `walk` and its state."""

    engine: GhostEngine
    examples: Sequence[Example]
    objective: Objective
    settings: PassSettings
    reporter: Reporter
    label: str
    direction: Vector | None
    bounds: bool
    squared: bool
    sketch: Sketch | None
    only: frozenset[str] | None
    """The candidates to observe; None: all."""
    state: WalkState

    def run(self) -> PassResult:
        """Walk under the best plan; after running out of memory, again from the last saved state
        under a smaller one."""
        state, settings = self.state, self.settings
        plans, memory = world().broadcast(self._plans())
        fallback = Fallback(
            self.label, plans, memory, settings.batch_tokens, self.reporter.warn, settings.note
        )
        piece = settings.pieces.load(slug(self.label), state.own_range)
        fixed = settings.wishes.placement not in ("auto", "blocks")
        fallback.start(None if piece is None else piece.facts, keep_placement=fixed)
        while True:
            state.load(piece)
            del piece
            try:
                self.collect(fallback.plan)
                break
            except OutOfMemory as problem:
                state.clear()  # the sums may contain part of a batch
                fallback.shrink(problem)
            give_back(self.engine.device)
            piece = settings.pieces.load(slug(self.label), state.own_range)
        result = state.reduce()
        self._refuse_nonfinite_sums()
        return result

    def collect(self, plan: Plan) -> None:
        """Walk over the examples once for each unfinished group of candidates."""
        engine, state = self.engine, self.state
        state.regroup(plan)
        total = len(state.spans)
        with checkpointed(engine.model, plan.checkpointing):
            for span in state.waiting:
                number = state.spans.index(span) + 1
                label = self.label if total == 1 else f"{self.label}, group {number} of {total}"
                with ExitStack() as stack:
                    placement: Placement = DevicePlacement()
                    with memory_errors_shared(label):
                        placement = stack.enter_context(
                            placed(
                                plan,
                                span.names,
                                engine.candidates,
                                state.sums,
                                self.direction,
                                engine.device,
                                engine.head_names,
                                self.reporter.warn,
                            )
                        )
                    self.collect_group(span, placement, label)

    def collect_group(self, span: Span, placement: Placement, label: str) -> None:
        """All batches after the first `span.done` examples, for the candidates of one span."""
        state, pieces, examples = self.state, self.settings.pieces, self.examples
        only = None if len(span.names) == len(self.engine.candidates) else set(span.names)
        tapped = self.engine.tapped(
            placement, bounds=self.bounds, only=only, squared=self.squared, sketch=self.sketch
        )
        try:
            with (
                tapped as taps,
                self.reporter.track(label, len(examples), "examples", span.done) as progress,
                pieces.loop(),
            ):
                batches = remaining_batches(examples, state.batch_tokens, span.done)
                for turn in world().turns(batches):  # one batch per process
                    self.collect_batch(turn, taps, placement, label)
                    rows = [i for batch in turn for i in batch]
                    span.done += len(rows)
                    progress.advance(len(rows), tokens=sum(examples[i].num_tokens for i in rows))
                    where = f"{label}: {span.done:,} of {len(examples):,} examples"
                    pieces.tick(slug(self.label), partial(state.snapshot, placement), where)
            placement.flush()
        except BaseException:
            # G may miss a copy to the host or contain part of a batch: it must not be saved
            pieces.forget()
            raise

    def collect_batch(
        self, turn: Sequence[list[int]], taps: Taps, placement: Placement, label: str
    ) -> None:
        """Forward and backward pass of this process's batch. The taps add its gradients to G; the
        outputs per example are added to the state."""
        rows, weight = world().assigned(turn)
        examples = [self.examples[i] for i in rows or ()]
        shape = (len(examples), max(e.num_tokens for e in examples)) if examples else None
        outputs: dict[str, np.ndarray] = {}
        with memory_errors_shared(label, shape):
            if examples:
                batch = self.settings.collate(examples, self.engine.device)
                observer = self.engine.head_observer(taps) if weight else None
                taps.begin(len(examples))
                with placement.batch():
                    objective, values = self.objective(batch, observer)
                    (objective * weight).backward()
                tensors = {"values": values, **taps.outputs()}
                outputs = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        if rows is not None and weight:
            self.state.add(rows, outputs)
            self._refuse_nonfinite(rows, label)

    def _plans(self) -> tuple[list[Plan], int]:
        collected = Collected(
            sums=self.state.sums is not None,
            direction=self.direction is not None,
            bounds=self.bounds,
            sketch=self.sketch,
            only=self.only,
        )

        def warn(problem: str) -> None:
            self.reporter.warn(f"{self.label}: {problem}")

        return plans_for(self.engine, self.examples, self.objective, collected, self.settings, warn)

    def _refuse_nonfinite(self, rows: Sequence[int], label: str) -> None:
        outputs = self.state.outputs
        finite = np.isfinite(outputs["values"][rows]) & np.isfinite(outputs["dots"][rows])
        if self.state.sketches is not None:
            finite &= np.isfinite(self.state.sketches.norms[rows])
        if not finite.all():
            bad = [self.examples[i] for i, ok in zip(rows, finite, strict=True) if not ok]
            raise CheckError(
                f"{label}: the loss or gradient of {named(bad)} is not finite; nothing was "
                "written (look at these rows, or use model.dtype=float32)"
            )

    def _refuse_nonfinite_sums(self) -> None:
        sums = self.state.sums
        if sums is None or (name := sums.first_nonfinite()) is None:
            return
        bad = named(self._nonfinite_examples(name))
        bad = bad or f"the sum of all {len(self.examples):,} examples (it overflows)"
        raise CheckError(
            f"{self.label}: the gradient of {name} is not finite for {bad}; nothing was written "
            "(look at these rows, or use model.dtype=float32)"
        )

    def _nonfinite_examples(self, name: str) -> list[Example]:
        """Up to five examples whose gradient of this parameter is not finite, by a second pass with
        one example per batch."""
        engine, found = self.engine, list[Example]()
        (only,) = (group for group in cut(self.state.shapes, 2**40) if name in group)  # its layer
        sums = ParamVector.zeros({n: engine.candidates[n] for n in only})
        with engine.tapped(DevicePlacement(sums), only=set(only)) as taps:
            observer = engine.head_observer(taps)
            for example in self.examples:
                taps.begin(1)
                batch = self.settings.collate([example], engine.device)
                self.objective(batch, observer)[0].backward()
                if not bool(torch.isfinite(sums[name]).all()):
                    found.append(example)
                    sums[name].zero_()
                if len(found) == 5:
                    break
        return found


def remaining_batches(examples: Sequence[Example], batch_tokens: int, done: int) -> list[list[int]]:
    """Batches of the examples after the first `done`, in order of length, which does not depend on
    the token budget."""
    order = [i for rows in make_batches(examples, batch_tokens) for i in rows][done:]
    rest = [examples[i] for i in order]
    return [[order[i] for i in rows] for rows in make_batches(rest, batch_tokens)] if rest else []


# --- state ---------------------------------------------------------------------------------------


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
        folder: RunPath | None = None,
        only: frozenset[str] | None = None,
    ) -> None:
        self.count, self.sums = count, sums
        exact = candidates.dtype == torch.float64
        self.sketches = None if sketch is None else SketchRows(count, sketch.dim, exact, folder)
        names = in_layers(candidates if only is None else [n for n in candidates if n in only])
        self.shapes = {name: tuple(candidates[name].shape) for name in names}
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
            if (key := f"result.{name}") in piece.tensors:  # no sum in walks of earlier versions
                array[...] = piece.tensors.pop(key).numpy()
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
