"""One walk over examples with the ghost engine: the pool pass, v_new, v_prior, re-scoring.

Algorithm 1 lines 3, 5, 6 and 8 are this walk with different objectives and different things
collected. Batches are bucketed by length under a token budget; a batch is reduced by the sum over
its examples, in eval mode, so no result depends on the batch size, the padding side or the order.

A walk is resumable: after a batch its sums and values may be kept as a piece
(`storage/resume.py`), and a later start goes on behind it, to the same bits. Where G and the
direction are meanwhile, whether activations are recomputed, and in how many groups the candidates
are walked is the plan (`memory/plans.py`). When memory runs out the batch is halved, then the next
smaller plan is taken: the same sums in another order.
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
"""Padded tokens of a batch of a sharded model on a GPU, where memory is not measured."""


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """How examples become batches, under which plan, and where progress is kept."""

    batch_tokens: int
    """The most; a plan may take less."""
    pad_id: int
    padding_side: str
    precision: Precision = "mixed"
    pieces: Pieces = field(default_factory=Pieces)
    wishes: Wishes = field(default_factory=Wishes)
    note: Callable[[str, Plan, int], None] = lambda label, plan, memory: None
    """Told the plan of each walk, and the bytes that it may use."""


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
    """Differentiate `objective` over the examples, collecting what is asked for.

    With `squared`, which needs `engine.separable`, `sums` get Σ_n g_n ⊙ g_n and the bounds of the
    result are the norms of the g_n themselves, parameter by parameter.

    `label` names the walk and is unique in its stage. `sums` comes as zeros (`placement.blank` are
    such that take no memory); afterwards its tensors are where the plan put them, on the device or
    in the host's memory. `direction` may be lazy: the walk holds it where the plan says, matrices
    in the model's dtype, since that is what they are multiplied in.
    """
    return _Walk(
        engine, examples, objective, settings, reporter, label, sums, direction, bounds, squared
    ).run()


class _NoRoom(Exception):
    """Memory ran out: with a batch of this shape (examples, tokens), or before any."""

    def __init__(self, problem: BaseException, shape: Sequence[int] | None = None) -> None:
        super().__init__(str(problem))
        self.shape = None if shape is None else tuple(shape)


def _agree_on_room(no_room: _NoRoom | None) -> None:
    """Raise in every process when one has no room, with one shape: all go on with one plan."""
    if not any(world().any(no_room is not None)):
        return
    found = [one for one in world().answers(no_room and (str(no_room), no_room.shape)) if one]
    shapes = [shape for _, shape in found if shape is not None]
    least = min(shapes, key=lambda shape: shape[0] // 2 * shape[1], default=None)
    raise _NoRoom(MemoryError(found[0][0]), least)


class _Walk:
    """One walk, whatever plans it takes."""

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
                # part of the batch is in the sums already: from the last piece, or from the start
                self.state.clear()
                plan = self._smaller(plan, chain, no_room, memory)
            give_back(self.engine.device)
            piece = self.settings.pieces.load(self.slug, self.state.span)
        self.state.meet()
        self._refuse_nonfinite_sums()
        return self.state.result

    def _plans(self) -> tuple[int, list[Plan]]:
        """(bytes of the device that may be used, the plans to try in order)."""
        wishes, most, engine = self.settings.wishes, self.settings.batch_tokens, self.engine
        device, dtype = engine.device, engine.candidates.dtype
        tokens = sum(example.num_tokens for example in self.examples)
        most = min(most, max(1, -(-tokens // world().size)))  # a batch for every process
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
            if best.placement == "device" and not best.checkpointing and ample:
                return memory, plans
        demand = replace(demand, recomputed=self._measured(longest, checkpointing=True))
        plans = choose(demand, memory, host, most, wishes)
        if wishes.placement not in ("auto", plans[0].placement):
            self.reporter.warn(
                f"{self.label}: score.plan={wishes.placement} takes "
                f"{demand.host(wishes.placement) / GIB:.1f} GiB of the host's memory, of which "
                f"{host / GIB:.1f} GiB are free; going on with {plans[0].describe(memory)}"
            )
        return memory, plans

    def _sharded_plan(self, device: torch.device, most: int, wishes: Wishes) -> Plan:
        """Nothing is measured and there is no smaller plan: on a GPU small batches, recomputed,
        unless they are set."""
        plan = unmeasured(most, replace(wishes, placement="device"), len(self.shapes))[0]
        if device.type != "cuda":
            return plan
        tokens = plan.batch_tokens if wishes.exact_batch else min(most, SHARDED_TOKENS)
        again = True if wishes.checkpointing is None else wishes.checkpointing
        return replace(plan, batch_tokens=tokens, checkpointing=again)

    def _first(self, chain: list[Plan], piece: Piece | None) -> Plan:
        """The plan to begin with; after a kill, batches and groups are cut as they were."""
        if piece is None:
            return chain.pop(0)
        groups, first = piece.facts["num_groups"], 0
        if self.settings.wishes.placement in ("auto", "blocks"):
            as_cut = (i for i, plan in enumerate(chain) if plan.num_groups >= groups)
            first = next(as_cut, 0)
        plan = chain[first]
        del chain[: first + 1]
        return replace(plan, batch_tokens=min(plan.batch_tokens, piece.facts["batch_tokens"]))

    def _measured(self, longest: Example, checkpointing: bool) -> Activations | None:
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
        """Half the batch while that is no loss, then the next plan, then half again."""
        rows, tokens = no_room.shape or (1, 0)
        floor = min(SMALL_BATCH, self.settings.batch_tokens // 16)
        if chain and (rows == 1 or rows // 2 * tokens < floor):
            following = chain.pop(0)
            self.reporter.warn(
                f"{self.label}: out of memory with {plan.describe()}; going on with "
                f"{following.describe(memory)}, the same sums in another order (set "
                f"{following.settings} to start so)",
                code="out_of_memory",
            )
            self.settings.note(self.label, following, memory)
            return following
        if no_room.shape is None:
            raise RunError(
                f"{self.label}: out of memory before the first batch ({no_room}); lower "
                "score.candidates, free memory, or use a machine with more"
            ) from None
        smaller = Smaller.than(no_room.shape, no_room, "score.batch_tokens")
        self.reporter.warn(f"{self.label}: {smaller}", code="out_of_memory")
        return replace(plan, batch_tokens=smaller.batch_tokens)

    def _under(self, plan: Plan) -> None:
        """All that is left to do, group by group."""
        waiting, total = self.state.waiting, len(self.state.spans)
        with checkpointed(self.engine.model, plan.checkpointing):
            for span in waiting:
                number = self.state.spans.index(span) + 1
                label = self.label if total == 1 else f"{self.label}, group {number} of {total}"
                self._group(plan, span, label)

    def _group(self, plan: Plan, span: Span, label: str) -> None:
        """Every batch that a span has left, with its G and direction where the plan puts them."""
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
                # what is on its way home, or half a batch, must not be taken for a state
                self.settings.pieces.forget()
                raise
        self.state.finish(span, plan.placement)

    def _placed(
        self, plan: Plan, span: Span, stack: ExitStack
    ) -> tuple[Lender | None, Factors | None]:
        """G and the direction over a span, as the rules use them."""
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
        """The batches behind the first `span.done` examples (in order of length)."""
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
                    pieces.forget()  # part of the batch may be in the sums
                    raise
                rows = [i for batch in turn for i in batch]
                span.done += len(rows)
                progress.advance(len(rows), tokens=sum(examples[i].num_tokens for i in rows))
                where = f"{label}: {span.done:,} of {total:,} examples"
                pieces.tick(self.slug, state.snapshot, where)

    def _take_turn(
        self, turn: Sequence[list[int]], taps: Taps, label: str, observer: HeadObserver | None
    ) -> None:
        """One batch a process. Where the model is sharded all must take part in every pass: a
        process for which no batch is left repeats another's with weight zero."""
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
        """Which examples make this parameter's gradient non-finite: each alone, afterwards."""
        engine, found = self.engine, list[Example]()
        (only,) = (group for group in cut(self.shapes, 2**40) if name in group)
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
    """Batches of all but the `done` first examples in order of length, which no budget changes."""
    order = [i for rows in make_batches(examples, batch_tokens) for i in rows][done:]
    rest = [examples[i] for i in order]
    return [[order[i] for i in rows] for rows in make_batches(rest, batch_tokens)] if rest else []


def _with_labels(example: Example, count: int) -> Example:
    """The same tokens, of which the last `count` are labels."""
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
