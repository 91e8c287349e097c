"""A walk: one pass over examples with the ghost engine (pool pass, v_new, v_prior, re-scoring).

Algorithm 1 lines 3, 5, 6 and 8 are this walk with different objectives and outputs. Batches are
bucketed by length under a token budget. The objective is summed over the examples of a batch, in
eval mode, so results do not depend on the batch size, the padding side or the order (up to
rounding).

A walk can be interrupted: after a batch its sums and values may be saved as a piece
(`storage/resume.py`), and a later run resumes after it with bit-identical results. The plan
(`memory/plans.py`) determines where G and the direction are stored, whether activations are
recomputed, and into how many groups the candidates are split. On out-of-memory the batch is halved,
then the next smaller plan is used; both only change the order of summation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import IGNORE, Batch, Example, collate, make_batches, named
from dualsft.distributed.world import world
from dualsft.engine.checkpointing import checkpointed
from dualsft.engine.ghost import GhostEngine, Taps
from dualsft.engine.losses import (
    HeadObserver,
    distillation_objective,
    example_objective,
)
from dualsft.engine.precision import Precision
from dualsft.engine.trial import Objective, measure
from dualsft.engine.walk_state import PassResult, Span, WalkState
from dualsft.errors import RunError
from dualsft.memory.placement import (
    Factors,
    Lender,
    Streamed,
    factor_dtype,
    in_host_memory,
    move,
    on_device,
)
from dualsft.memory.plans import (
    AMPLE_BATCH,
    GIB,
    SMALL_BATCH,
    Activations,
    Demand,
    Plan,
    Wishes,
    choose,
    cut,
    unmeasured,
)
from dualsft.memory.sharded_placement import ShardedPlacement
from dualsft.storage.resume import Piece, Pieces
from dualsft.storage.vectors import ParamVector, ShardedVector, Vector
from dualsft.system.progress import Reporter
from dualsft.system.usage import Smaller, free_memory, give_back, is_out_of_memory

SHARDED_TOKENS = 8192
"""Padded tokens per batch of a sharded model on a GPU, for which memory is not measured."""


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
) -> PassResult:
    """Differentiate `objective` over the examples and collect the requested quantities.

    `sums` accumulates Σ_n g_n, `direction` is the U of the dot products ⟨U, g_n⟩, and `bounds`
    requests the norm bounds. With `squared`, which needs `engine.separable`, `sums` accumulates
    Σ_n g_n ⊙ g_n, and the bounds are the exact norms of g_n for each parameter.

    `label` names the walk and must be unique in its stage. `sums` must be zero on entry
    (`placement.blank` creates zeros that take no memory); on return its tensors are on the device
    or in host memory, depending on the plan. `direction` may be lazy: the walk loads it as the plan
    requires, matrices in the model's dtype, in which they are multiplied.
    """
    return _Walk(
        engine, examples, objective, settings, reporter, label, sums, direction, bounds, squared
    ).run()


class _NoRoom(Exception):
    """Out of memory with a batch of this shape (examples, tokens); None: before the first batch."""

    def __init__(self, problem: BaseException, shape: Sequence[int] | None = None) -> None:
        # keep only the message: the traceback of `problem` would keep its tensors alive
        super().__init__(str(problem))
        self.shape = None if shape is None else tuple(shape)


def _agree_on_room(no_room: _NoRoom | None) -> None:
    """If any process is out of memory, raise in all of them, with the same shape, so that all
    choose the same next plan."""
    if not any(world().any(no_room is not None)):
        return
    found = [one for one in world().answers(no_room and (str(no_room), no_room.shape)) if one]
    shapes = [shape for _, shape in found if shape is not None]
    # the shape with the fewest tokens once its batch is halved
    least = min(shapes, key=lambda shape: shape[0] // 2 * shape[1], default=None)
    raise _NoRoom(MemoryError(found[0][0]), least)


class _Walk:
    """The state of one walk across the plans it tries."""

    def __init__(
        self,
        engine: GhostEngine,
        examples: Sequence[Example],
        objective: Objective,
        settings: PassSettings,
        reporter: Reporter,
        label: str,
        sums: ParamVector | None,
        direction: Vector | None,
        bounds: bool,
        squared: bool,
    ) -> None:
        self.engine, self.examples, self.objective = engine, examples, objective
        self.settings, self.reporter, self.label = settings, reporter, label
        self.direction, self.bounds, self.squared = direction, bounds, squared
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.shapes = {name: tuple(p.shape) for name, p in engine.candidates.items()}
        width = len(engine.columns) if bounds else 0
        dtype = engine.candidates.dtype
        self.state = WalkState.new(self.shapes, len(examples), width, dtype, sums)

    @property
    def slug(self) -> str:
        """The label as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")

    def run(self) -> PassResult:
        self.state.clear()
        memory, chain = world().told(self._plans())
        piece = self.settings.pieces.load(self.slug, self.state.span)
        plan = self._first(chain, piece)
        self.settings.note(self.label, plan, memory)
        while True:
            self.state.load(piece)
            del piece
            self.state.regroup(plan.num_groups)
            self.state.batch_tokens = plan.batch_tokens
            try:
                self._under(plan)
                break
            except _NoRoom as no_room:
                # the sums may contain part of a batch: restart from the last piece or from zero
                self.state.clear()
                plan = self._smaller(plan, chain, no_room, memory)
            give_back(self.engine.device)
            piece = self.settings.pieces.load(self.slug, self.state.span)
        self.state.meet()
        self._refuse_nonfinite_sums()
        return self.state.result

    def _plans(self) -> tuple[int, list[Plan]]:
        """(device memory that may be used, in bytes; the plans to try, in order)."""
        wishes, most, engine = self.settings.wishes, self.settings.batch_tokens, self.engine
        device, dtype = engine.device, engine.candidates.dtype
        tokens = sum(example.num_tokens for example in self.examples)
        most = min(most, max(1, -(-tokens // world().size)))  # so that every process has a batch
        if world().sharded:
            return 0, [self._sharded_plan(device, most, wishes)]
        if device.type != "cuda" or not self.examples:
            return 0, unmeasured(most, wishes, len(self.shapes))
        held = torch.cuda.memory_allocated(device)
        memory = min(int((wishes.memory or 2**20) * GIB), held + free_memory(device))
        matrices = [p for p in engine.candidates.values() if p.ndim >= 2]
        longest = max(self.examples, key=lambda e: e.num_tokens)
        demand = Demand(
            shapes=self.shapes,
            held=held,
            sum_itemsize=dtype.itemsize if self.state.sums is not None else 0,
            direction_itemsize=matrices[0].dtype.itemsize
            if self.direction is not None and matrices
            else 0,
            longest=longest.num_tokens,
        )
        host = free_memory(torch.device("cpu"))
        if wishes.checkpointing is not True:
            demand = replace(demand, kept=self._measured(longest, checkpointing=False))
            plans = choose(demand, memory, host, most, wishes)
            best = plans[0]
            ample = best.batch_tokens >= min(most, AMPLE_BATCH)
            # the fastest plan already fits: skip the second measurement
            if best.placement == "device" and not best.checkpointing and ample:
                return memory, plans
        demand = replace(demand, recomputed=self._measured(longest, checkpointing=True))
        plans = choose(demand, memory, host, most, wishes)
        if wishes.placement not in ("auto", plans[0].placement):
            self.reporter.warn(
                f"{self.label}: score.plan={wishes.placement} takes "
                f"{demand.host(wishes.placement) / GIB:.1f} GiB of host memory, of which "
                f"{host / GIB:.1f} GiB are free; continuing with {plans[0].describe(memory)}"
            )
        return memory, plans

    def _sharded_plan(self, device: torch.device, most: int, wishes: Wishes) -> Plan:
        """The only plan of a sharded model, for which memory is not measured: on a GPU, small
        batches with activations recomputed unless set otherwise."""
        plan = unmeasured(most, replace(wishes, placement="device"), len(self.shapes))[0]
        if device.type != "cuda":
            return plan
        tokens = plan.batch_tokens if wishes.exact_batch else min(most, SHARDED_TOKENS)
        again = True if wishes.checkpointing is None else wishes.checkpointing
        return replace(plan, batch_tokens=tokens, checkpointing=again)

    def _first(self, chain: list[Plan], piece: Piece | None) -> Plan:
        """The first plan; when resuming, one with the batches and groups of the saved piece."""
        if piece is None:
            return chain.pop(0)
        # the piece may come from a smaller plan: skip plans with fewer groups
        groups, first = piece.facts["num_groups"], 0
        if self.settings.wishes.placement in ("auto", "blocks"):
            as_cut = (i for i, plan in enumerate(chain) if plan.num_groups >= groups)
            first = next(as_cut, 0)
        plan = chain[first]
        del chain[: first + 1]
        return replace(plan, batch_tokens=min(plan.batch_tokens, piece.facts["batch_tokens"]))

    def _measured(self, longest: Example, checkpointing: bool) -> Activations | None:
        """Measure the memory of batches of the longest example; see `trial.measure`."""
        most = max(e.num_response_tokens for e in self.examples)
        full, bare = _with_labels(longest, most), _with_labels(longest, 1)

        def batch_of(count: int, labelled: int) -> Batch:
            rows = [full] * labelled + [bare] * (count - labelled)
            return collate_for(rows, self.settings, self.engine.device)

        return measure(
            self.engine,
            self.objective,
            batch_of,
            sums=self.state.sums is not None,
            direction=self.direction is not None,
            bounds=self.bounds,
            checkpointing=checkpointing,
        )

    def _smaller(self, plan: Plan, chain: list[Plan], no_room: _NoRoom, memory: int) -> Plan:
        """The plan after an out-of-memory: half the batch while batches stay large enough, then the
        next plan; with no plan left, half the batch again."""
        rows, tokens = no_room.shape or (1, 0)
        floor = min(SMALL_BATCH, self.settings.batch_tokens // 16)
        if chain and (rows == 1 or rows // 2 * tokens < floor):
            following = chain.pop(0)
            self.reporter.warn(
                f"{self.label}: out of memory with {plan.describe()}; continuing with "
                f"{following.describe(memory)}, the same sums in another order (set "
                f"{following.settings} to start so)",
                code="out_of_memory",
            )
            self.settings.note(self.label, following, memory)
            return following
        if no_room.shape is None:
            raise RunError(
                f"{self.label}: out of memory before the first batch ({no_room}); choose fewer "
                "parameters with score.candidates, free memory, or use a machine with more memory"
            ) from None
        smaller = Smaller.than(no_room.shape, no_room, "score.batch_tokens")
        self.reporter.warn(f"{self.label}: {smaller}", code="out_of_memory")
        return replace(plan, batch_tokens=smaller.batch_tokens)

    def _under(self, plan: Plan) -> None:
        """Walk the unfinished groups under this plan."""
        waiting, total = self.state.waiting, len(self.state.spans)
        with checkpointed(self.engine.model, plan.checkpointing):
            for span in waiting:
                number = self.state.spans.index(span) + 1
                label = self.label if total == 1 else f"{self.label}, group {number} of {total}"
                self._group(plan, span, label)

    def _group(self, plan: Plan, span: Span, label: str) -> None:
        """Process the remaining batches of one span, its G and direction placed by the plan."""
        only = None if len(span.names) == len(self.shapes) else set(span.names)
        with ExitStack() as stack:
            sums = direction = no_room = None
            try:
                sums, direction = self._placed(plan, span, stack)
            except Exception as problem:
                if not is_out_of_memory(problem):
                    raise
                no_room = _NoRoom(problem)
            _agree_on_room(no_room)
            taps = stack.enter_context(
                self.engine.tapped(
                    sums=sums,
                    direction=direction,
                    bounds=self.bounds,
                    only=only,
                    squared=self.squared,
                )
            )
            try:
                self._batches(span, taps, label)
                self.state.settle()
            except BaseException:
                # G may miss a copy to the host or contain part of a batch: it must not be saved
                self.settings.pieces.forget()
                raise
        self.state.finish(span, plan.placement)

    def _placed(
        self, plan: Plan, span: Span, stack: ExitStack
    ) -> tuple[Lender | None, Factors | None]:
        """G and the direction of a span, placed as the plan requires."""
        device, sums, candidates = self.engine.device, self.state.sums, self.engine.candidates

        def dtype_of(name: str) -> torch.dtype:
            return factor_dtype(candidates[name], candidates.dtype)

        if world().sharded:
            assert sums is None or isinstance(sums, ShardedVector)
            if sums is not None:
                move(sums, span.names, device)
            head = self.engine.head_rule
            late = set(head.names) if head is not None else set()
            sharded = ShardedPlacement(sums, self.direction, span.names, dtype_of, device, late)
            self._around = sharded.batch
            factors = None if self.direction is None else sharded
            return None if sums is None else sharded, factors
        if plan.placement != "host":
            if sums is not None:
                move(sums, span.names, device)
            factors = None
            if self.direction is not None:
                factors = on_device(self.direction, span.names, dtype_of, device)
            return sums, factors

        def streamed(
            vector: Vector, target: dict[str, Tensor], dtype: Callable[[str], torch.dtype]
        ) -> Streamed:
            home = in_host_memory(vector, span.names, target, dtype, device, self.reporter.warn)
            blocks = stack.enter_context(home)
            return Streamed({name: blocks[name] for name in span.names}, device)

        lender = None
        if sums is not None:
            lender = streamed(sums, sums.tensors, lambda _: candidates.dtype)
            self.state.settle = lender.settle
            stack.callback(setattr, self.state, "settle", lambda: None)
        factors = None
        if self.direction is not None:
            factors = streamed(self.direction, {}, dtype_of)
        return lender, factors

    def _batches(self, span: Span, taps: Taps, label: str) -> None:
        """Process all batches after the first `span.done` examples (in order of length)."""
        state, pieces, examples = self.state, self.settings.pieces, self.examples
        assert state.batch_tokens is not None
        observer, total = self.engine.head_observer(taps), len(examples)
        with (
            self.reporter.track(label, total, "examples", span.done) as progress,
            pieces.loop(),
        ):
            for turn in world().turns(remaining_batches(examples, state.batch_tokens, span.done)):
                try:
                    self._take_turn(turn, taps, label, observer)
                except BaseException:
                    pieces.forget()  # the sums may contain part of a batch
                    raise
                rows = [i for batch in turn for i in batch]
                span.done += len(rows)
                progress.advance(len(rows), tokens=sum(examples[i].num_tokens for i in rows))
                where = f"{label}: {span.done:,} of {total:,} examples"
                pieces.tick(self.slug, state.snapshot, where)

    def _take_turn(
        self, turn: Sequence[list[int]], taps: Taps, label: str, observer: HeadObserver | None
    ) -> None:
        """Process one batch per process. With a sharded model all processes must take part in every
        pass, so a process without a batch of its own repeats the first one with weight zero."""
        own, examples = world().mine(turn), self.examples
        rows = turn[0] if own is None and world().sharded else own
        no_room: _NoRoom | None = None
        if rows is not None:
            batch = collate_for([examples[i] for i in rows], self.settings, self.engine.device)
            taps.begin(len(rows))
            try:
                with self._around():
                    objective, values = self.objective(batch, None if own is None else observer)
                    (objective * float(own is not None)).backward()
                found = [x.cpu().numpy() for x in (values, taps.dots, taps.inner_sums)]
            except Exception as problem:
                if not is_out_of_memory(problem):
                    raise
                if world().sharded:
                    raise RunError(
                        f"{label}: {world().name} ran out of memory with {len(rows)} examples of "
                        f"{batch.input_ids.shape[1]:,} tokens ({problem}); lower "
                        "score.batch_tokens, or start more processes"
                    ) from None
                no_room = _NoRoom(problem, batch.input_ids.shape)
            else:
                if own is not None:
                    self.state.add(own, *found)
                    _refuse_nonfinite(label, own, examples, self.state.result)
        _agree_on_room(no_room)

    def _refuse_nonfinite_sums(self) -> None:
        sums = self.state.sums
        if sums is None or (name := sums.first_nonfinite()) is None:
            return
        raise RunError(
            f"{self.label}: the gradient of {name} is not finite for {self._blame(name)}; nothing "
            "was written (look at these rows, or use model.dtype=float32)"
        )

    def _blame(self, name: str) -> str:
        """Names up to five examples whose gradient of this parameter is not finite, by a second
        pass with one example per batch."""
        engine, found = self.engine, list[Example]()
        (only,) = (group for group in cut(self.shapes, 2**40) if name in group)  # its layer
        sums = ParamVector.zeros({n: engine.candidates[n] for n in only})
        with engine.tapped(sums=sums, only=set(only)) as taps:
            observer = engine.head_observer(taps)
            for example in self.examples:
                taps.begin(1)
                batch = collate_for([example], self.settings, engine.device)
                self.objective(batch, observer)[0].backward()
                if not bool(torch.isfinite(sums[name]).all()):
                    found.append(example)
                    sums[name].zero_()
                if len(found) == 5:
                    break
        return named(found) or f"the sum of all {len(self.examples):,} examples (it overflows)"


def remaining_batches(examples: Sequence[Example], batch_tokens: int, done: int) -> list[list[int]]:
    """Batches of the examples after the first `done`, in order of length, which does not depend on
    the token budget."""
    order = [i for rows in make_batches(examples, batch_tokens) for i in rows][done:]
    rest = [examples[i] for i in order]
    return [[order[i] for i in rows] for rows in make_batches(rest, batch_tokens)] if rest else []


def _with_labels(example: Example, count: int) -> Example:
    """The same tokens with the last `count` of them as labels."""
    first = max(1, example.num_tokens - count)
    return replace(example, labels=[IGNORE] * first + example.input_ids[first:])


def collate_for(examples: Sequence[Example], settings: PassSettings, device: torch.device) -> Batch:
    return collate(examples, settings.pad_id, settings.padding_side, device)


def _refuse_nonfinite(
    label: str, rows: Sequence[int], examples: Sequence[Example], result: PassResult
) -> None:
    finite = np.isfinite(result.values[rows]) & np.isfinite(result.dots[rows])
    if not finite.all():
        bad = [examples[i] for i, ok in zip(rows, finite, strict=True) if not ok]
        raise RunError(
            f"{label}: the loss or gradient of {named(bad)} is not finite; nothing was "
            "written (look at these rows, or use model.dtype=float32)"
        )
