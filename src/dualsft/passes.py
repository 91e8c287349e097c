"""One walk over examples with the ghost engine: the pool pass, v_new, v_prior, re-scoring.

Algorithm 1 lines 3, 5, 6 and 8 are this walk with different objectives and different things
collected. Batches are bucketed by length under a token budget; a batch is reduced by the sum over
its examples, in eval mode, so no result depends on the batch size, the padding side or the order.

A walk is resumable: after a batch its sums and values may be kept as a piece (`pieces.py`), and a
later start goes on behind it, to the same bits. A batch that does not fit into memory is tried
again in smaller ones: the same sum in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data import Batch, Example, collate, make_batches, named
from dualsft.errors import ConfigError, RunError
from dualsft.ghost import GhostEngine, Taps, alone
from dualsft.losses import (
    HeadObserver,
    distillation_objective,
    example_objective,
    plain_example_loss,
)
from dualsft.memory import Smaller, give_back, is_out_of_memory
from dualsft.pieces import Piece, Pieces, State
from dualsft.progress import Reporter
from dualsft.vectors import ParamVector

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""What the self-checks allow, by dtype (bf16: measured at most 4e-4 on a real model)."""

# (batch, observer of the head) → (objective to differentiate, value per example)
Objective = Callable[[Batch, HeadObserver | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """How examples become batches, and where the progress of a walk over them is kept."""

    batch_tokens: int
    pad_id: int
    padding_side: str
    pieces: Pieces = field(default_factory=Pieces)


@dataclass(frozen=True)
class PassResult:
    """Per example, in the order given: the objective's value, ⟨U, g_n⟩ and the bounds' sums."""

    values: np.ndarray
    dots: np.ndarray
    inner_sums: np.ndarray


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
    direction: ParamVector | None = None,
    bounds: bool = False,
) -> PassResult:
    """Differentiate `objective` over the examples, collecting what is asked for.

    `sums` comes as zeros; `label` names the walk and is unique in its stage.
    """
    width = len(engine.columns) if bounds else 0
    state = _WalkState.new(len(examples), width, engine.candidates.dtype, sums)
    while True:
        done = state.load(settings.pieces.load(_slug(label)))
        budget = min(settings.batch_tokens, state.batch_tokens or settings.batch_tokens)
        state.batch_tokens = budget
        try:
            with engine.tapped(sums=sums, direction=direction, bounds=bounds) as taps:
                _walk_from(
                    done, engine, examples, objective, settings, reporter, label, state, taps
                )
            break
        except Smaller as smaller:
            # part of the batch is in the sums already: from the last piece, or from the start
            state.clear()
            settings = replace(settings, batch_tokens=smaller.batch_tokens)
            reporter.warn(f"{label}: {smaller}")
        give_back(engine.device)
    if sums is not None and (name := sums.first_nonfinite()) is not None:
        rows = _blame(engine, examples, objective, settings, direction, name)
        raise RunError(
            f"{label}: the gradient of {name} is not finite for {rows}; nothing was written "
            "(look at these rows, or use model.dtype=float32)"
        )
    return state.result


@dataclass
class _WalkState:
    """What a walk has after some examples: the sums, and the values of those done."""

    result: PassResult
    sums: ParamVector | None
    batch_tokens: int | None = None

    @classmethod
    def new(
        cls, count: int, width: int, dtype: torch.dtype, sums: ParamVector | None
    ) -> _WalkState:
        wide = np.float64 if dtype == torch.float64 else np.float32
        result = PassResult(np.zeros(count), np.zeros(count), np.zeros((count, width), wide))
        return cls(result, sums)

    def _arrays(self) -> dict[str, np.ndarray]:
        names = ("values", "dots", "inner_sums")
        return {f"result.{name}": getattr(self.result, name) for name in names}

    def snapshot(self, done: int) -> State:
        tensors = {name: torch.from_numpy(array) for name, array in self._arrays().items()}
        for name, block in (self.sums or {}).items():
            tensors[f"sums.{name}"] = block
        return tensors, {"done": done, "batch_tokens": self.batch_tokens}

    def load(self, piece: Piece | None) -> int:
        """Take a piece up; returns how many examples are done."""
        if piece is None:
            return 0
        for name, array in self._arrays().items():
            array[...] = piece.tensors[name].numpy()
        for name, block in (self.sums or {}).items():
            block.copy_(piece.tensors[f"sums.{name}"])
        self.batch_tokens = piece.facts["batch_tokens"]
        return piece.facts["done"]

    def clear(self) -> None:
        for array in self._arrays().values():
            array[...] = 0
        for block in (self.sums or {}).values():
            block.zero_()
        self.batch_tokens = None


def _walk_from(
    done: int,
    engine: GhostEngine,
    examples: Sequence[Example],
    objective: Objective,
    settings: PassSettings,
    reporter: Reporter,
    label: str,
    state: _WalkState,
    taps: Taps,
) -> None:
    """The batches behind the `done` first examples (in order of length)."""
    assert state.batch_tokens is not None
    pieces, result = settings.pieces, state.result
    observer = engine.head_observer(taps)
    total_examples = len(examples)
    with (
        reporter.track(label, total_examples, "examples", done) as progress,
        pieces.loop(),
    ):
        for rows in remaining_batches(examples, state.batch_tokens, done):
            batch = _collate([examples[i] for i in rows], settings, engine.device)
            taps.begin(len(rows))
            try:
                total, values = objective(batch, observer)
                total.backward()
            except Exception as problem:
                if not is_out_of_memory(problem):
                    raise
                raise Smaller.than(batch.input_ids.shape, problem, "score.batch_tokens") from None
            result.values[rows] = values.cpu().numpy()
            result.dots[rows] = taps.dots.cpu().numpy()
            result.inner_sums[rows] = taps.inner_sums.cpu().numpy()
            _refuse_nonfinite(label, rows, examples, result)
            done += len(rows)
            progress.advance(len(rows), tokens=sum(examples[i].num_tokens for i in rows))
            where = f"{label}: {done:,} of {total_examples:,} examples"
            pieces.tick(_slug(label), partial(state.snapshot, done), where)


def remaining_batches(examples: Sequence[Example], batch_tokens: int, done: int) -> list[list[int]]:
    """Batches of all but the `done` first examples in order of length, which no budget changes."""
    order = [i for rows in make_batches(examples, batch_tokens) for i in rows][done:]
    rest = [examples[i] for i in order]
    return [[order[i] for i in rows] for rows in make_batches(rest, batch_tokens)] if rest else []


def _slug(label: str) -> str:
    """A label as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def _blame(
    engine: GhostEngine,
    examples: Sequence[Example],
    objective: Objective,
    settings: PassSettings,
    direction: ParamVector | None,
    name: str,
) -> str:
    """Which examples make this parameter's gradient non-finite: each alone, after the failure."""
    found: list[Example] = []
    sums = ParamVector.zeros(engine.candidates)
    with engine.tapped(sums=sums, direction=direction) as taps:
        observer = engine.head_observer(taps)
        for example in examples:
            taps.begin(1)
            objective(_collate([example], settings, engine.device), observer)[0].backward()
            if not bool(torch.isfinite(sums[name]).all()):
                found.append(example)
                sums[name].zero_()
            if len(found) == 5:
                break
    return named(found) or f"the sum of all {len(examples):,} examples (it overflows)"


def _collate(examples: Sequence[Example], settings: PassSettings, device: torch.device) -> Batch:
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


def check_fused_loss(
    model: PreTrainedModel, example: Example, settings: PassSettings, tolerance: float
) -> None:
    """Our chunked head and loss against the model's own, on one example; refused by name.

    A model that does more to its logits than its configuration tells (`losses.py`) would be
    trained, scored and evaluated on something else than what it computes.
    """
    device = next(model.parameters()).device
    batch = _collate([example], settings, device)
    with torch.no_grad():
        ours = float(example_objective(model, batch)[1])
        own = float(plain_example_loss(model, batch))
    if not abs(ours - own) <= tolerance * max(1.0, abs(own)):
        raise ConfigError(
            f"{type(model).__name__}: its own loss of example {example.id} is {own:.6g}, through "
            f"our head it is {ours:.6g}; the model changes its logits in a way that its "
            "configuration does not tell, and cannot be scored"
        )


def dot_alone(
    engine: GhostEngine, example: Example, direction: ParamVector, settings: PassSettings
) -> tuple[float, float]:
    """(⟨U, g_n⟩, ‖g_n‖) of one example by plain autograd: no batch, no rule, no fused loss."""
    batch = _collate([example], settings, engine.device)
    totals = [0.0, 0.0]

    def visit(name: str, gradient: Tensor) -> None:
        block = ParamVector({name: gradient})
        totals[0] += block.dot(direction)
        totals[1] += block.norm() ** 2

    alone(engine.model, engine.candidates, batch, visit)
    return totals[0], totals[1] ** 0.5
