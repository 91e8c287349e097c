"""The one SFT loop: the pilot warmup (Algorithm 1 line 1) and MaskedFT (line 12) both run it.

ALGORITHM.md §2 "Training": each step minimises the mean over the batch's examples of the example
loss, with AdamW, cosine decay to zero and a linear warmup whose step s uses (s + 1) /
warmup_steps. A batch is cut into micro-batches whose gradients add up, so their size changes
memory, not the mathematics. When memory runs out, activations are recomputed instead of kept
(`engine/checkpointing.py`), and then micro-batches are halved. The order of the examples and the
dropout noise depend only on (seed, epoch, step), never on a global random stream, so a piece
(`storage/resume.py`) of masters, moments and the step count is all that a later start needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example, collate, make_batches, named, training_order
from dualsft.distributed.world import world
from dualsft.engine.checkpointing import checkpointed
from dualsft.engine.fused import fused_blocks
from dualsft.engine.losses import example_objective
from dualsft.errors import RunError
from dualsft.model.sharded import device_of
from dualsft.storage.resume import Piece, Pieces, State
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import LazyVector, Seen
from dualsft.system.progress import Reporter
from dualsft.system.usage import Smaller, give_back, is_out_of_memory
from dualsft.train.optimizer import SparseAdamW

FEW_STEPS = 20  # fewer optimizer steps than this are worth a warning
_CUT = ("batch_tokens", "micro_batch_size", "checkpointing")  # what lack of memory changes


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How long, how fast, in which pieces."""

    lr: float
    epochs: int
    batch_size: int
    warmup_ratio: float
    max_grad_norm: float
    micro_batch_size: int | None
    batch_tokens: int
    seed: int
    pad_id: int
    padding_side: str
    min_steps: int = 0
    max_steps: int | None = None
    checkpointing: bool | None = None
    """Whether activations are recomputed in the backward; None is off until memory runs out."""

    def num_steps(self, num_examples: int) -> int:
        """Optimizer steps; epochs repeat until `min_steps` is reached, and end at `max_steps`."""
        per_epoch = math.ceil(num_examples / self.batch_size)
        if self.epochs == 0:
            return 0
        steps = max(self.epochs * per_epoch, self.min_steps)
        return steps if self.max_steps is None else min(steps, self.max_steps)


Objective = Callable[[PreTrainedModel, Batch, Sequence[Example], float], tuple[Tensor, Tensor]]
"""(model, batch, its examples, 1 / size of the optimizer step's batch) to (what to differentiate,
the examples' losses)."""


def mean_loss(
    model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
) -> tuple[Tensor, Tensor]:
    """The objective of plain fine-tuning: the mean over the examples of the example loss."""
    return example_objective(model, batch, scale=scale)


@dataclass(frozen=True)
class Hooks:
    """What a method changes about the loop."""

    objective: Objective = mean_loss
    before_step: Callable[[PreTrainedModel, Sequence[Sequence[Example]]], None] | None = None
    """Given the micro-batches of an optimizer step before any is differentiated."""
    before_update: Callable[[SparseAdamW], None] | None = None
    """Given the optimizer with the gradients of a whole step, not clipped, before its update."""
    after_step: Callable[[int], None] | None = None
    """Given the number of steps done, after each of them and before it is saved."""
    state: Callable[[], dict[str, Any]] | None = None
    """What the hooks know after the last step, as JSON has it; saved with the optimizer's state."""
    load_state: Callable[[dict[str, Any]], None] | None = None
    """Given that back by a later start."""
    moving: Sequence[str] = ()
    """Parameters whose mask moves: what has left it is trained too, so they are saved whole."""


def learning_rate(step: int, num_steps: int, peak: float, warmup_ratio: float) -> float:
    """Linear warmup to the peak (never a first step at zero), then cosine to zero."""
    warmup = math.ceil(warmup_ratio * num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, num_steps - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * share))


def train(
    model: PreTrainedModel,
    examples: Sequence[Example],
    optimizer: SparseAdamW,
    plan: TrainingPlan,
    reporter: Reporter,
    label: str,
    log_step: Callable[..., None] = lambda **_: None,
    pieces: Pieces | None = None,
    hooks: Hooks = Hooks(),  # noqa: B008
) -> int:
    """Run the loop in place; returns the number of optimizer steps taken."""
    pieces = pieces or Pieces()
    num_steps = plan.num_steps(len(examples))
    per_epoch = math.ceil(len(examples) / plan.batch_size)
    piece = pieces.load(label, optimizer.span)
    first, plan = restore(optimizer, piece, plan, bool(hooks.moving))
    if piece is not None and hooks.load_state is not None:
        hooks.load_state(piece.facts["hooks"])
    if first:
        log_step(resumed_at=first)
    if world().sharded and plan.checkpointing is None and device_of(model).type == "cuda":
        plan = replace(plan, checkpointing=True)  # lack of memory could not be answered later
    order: list[int] = []
    model.train()
    try:
        with (
            fused_blocks(model),
            reporter.track(label, num_steps, "steps", first) as progress,
            pieces.loop(),
        ):
            for step in range(first, num_steps):
                epoch, within = divmod(step, per_epoch)
                if within == 0 or not order:
                    order = training_order(examples, plan.seed, epoch)
                start = within * plan.batch_size
                rows = [examples[i] for i in order[start : start + plan.batch_size]]
                lr = learning_rate(step, num_steps, plan.lr, plan.warmup_ratio)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                loss, norm, plan = _fitting_step(
                    model, rows, optimizer, plan, step, reporter, pieces.forget, hooks
                )
                if hooks.after_step is not None:
                    hooks.after_step(step + 1)
                tokens = sum(e.num_tokens for e in rows)
                progress.advance(1, tokens=tokens, loss=loss)
                log_step(step=step + 1, loss=loss, grad_norm=norm, lr=lr, epoch=step / per_epoch)
                where = f"{label}: step {step + 1:,} of {num_steps:,}"
                state = partial(_progress, optimizer, step + 1, plan, hooks)
                pieces.tick(label, state, where)
    finally:
        model.eval()
    return num_steps


def _progress(optimizer: SparseAdamW, num_steps: int, plan: TrainingPlan, hooks: Hooks) -> State:
    """`snapshot`, and what the hooks know."""
    tensors, facts = snapshot(optimizer, num_steps, plan, hooks.moving)
    return tensors, facts if hooks.state is None else {**facts, "hooks": hooks.state()}


def snapshot(
    optimizer: SparseAdamW, num_steps: int, plan: TrainingPlan, moving: Sequence[str] = ()
) -> State:
    """Masters and moments after `num_steps` steps: with θ_old, all there is to know.

    Of a mask that moves there is more: the present indices, and all weights of the parameters that
    it moves in, since what has left it is trained too. Moments are saved as they are held. How a
    batch is cut decides the last bits, and lack of memory may have changed it.
    """
    held: dict[str, torch.Tensor] = {}
    forms: dict[str, Form] = {}
    for name in optimizer.names:
        dtype = optimizer.master(name, 0, 0).dtype
        forms[f"master.{name}"] = Form(dtype, torch.Size([optimizer.count(name)]))
        held |= {f"{key}.{name}": value for key, value in optimizer.moments_of(name).items()}
        if moving and optimizer.index(name, 0, 0) is not None:
            forms[f"index.{name}"] = Form(torch.int64, torch.Size([optimizer.count(name)]))
    held |= {f"weight.{name}": optimizer.weight(name) for name in moving}
    forms |= {key: Form(value.dtype, value.shape) for key, value in held.items()}

    def piece(key: str, start: int, stop: int, _: Seen) -> torch.Tensor:
        if key in held:
            return held[key].reshape(-1)[start:stop]
        kind, name = key.split(".", 1)
        index = optimizer.index(name, start, stop) if kind == "index" else None
        return optimizer.master(name, start, stop) if index is None else index

    facts = {"steps": num_steps, "cut": {key: getattr(plan, key) for key in _CUT}}
    if world().sharded:
        rows = ("master", "exp_avg", "exp_avg_sq")
        facts["layout"] = {"step": "any", **dict.fromkeys(rows, "rows")}
    return LazyVector(forms, torch.device("cpu"), piece), facts


def restore(
    optimizer: SparseAdamW, piece: Piece | None, plan: TrainingPlan, moving: bool = False
) -> tuple[int, TrainingPlan]:
    """Take a piece up; returns how many steps are done, and the plan as it was then.

    A mask that moves is put where it was, after the weights that it has left behind.
    """
    if piece is None:
        return 0, plan
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in piece.tensors.items():
        kind, name = key.split(".", 1)
        parts.setdefault(kind, {})[name] = value
    masters = parts.pop("master", {})
    indices = parts.pop("index", {})
    for name, weight in parts.pop("weight", {}).items():
        optimizer.weight(name).copy_(weight)
    if moving:
        optimizer.set_indices({name: indices.get(name) for name in masters})
    held = {name: {kind: t[name] for kind, t in parts.items() if name in t} for name in masters}
    in_order = {name: masters[name] for name in optimizer.names}
    optimizer.restore(in_order, {name: state for name, state in held.items() if state})
    cut = dict(piece.facts["cut"])
    if plan.checkpointing is not None:
        del cut["checkpointing"]  # as set; only what lack of memory decided is taken over
    return piece.facts["steps"], replace(plan, **cut)


def _fitting_step(
    model: PreTrainedModel,
    rows: Sequence[Example],
    optimizer: SparseAdamW,
    plan: TrainingPlan,
    step: int,
    reporter: Reporter,
    before_update: Callable[[], None],
    hooks: Hooks,
) -> tuple[float, float, TrainingPlan]:
    """`_step` with less memory when it does not fit: (loss, gradient norm, the plan)."""
    while True:
        try:
            with checkpointed(model, bool(plan.checkpointing)):
                return *_step(model, rows, optimizer, plan, step, before_update, hooks), plan
        except _Full as full:  # nothing was updated yet
            if plan.checkpointing is None:
                reporter.warn(
                    f"step {step + 1}: out of memory with {full.shape[0]} examples of "
                    f"{full.shape[1]:,} tokens in a batch; going on with activations recomputed in "
                    "the backward pass (set finetune.checkpointing=true to start so)",
                    code="out_of_memory",
                )
                plan = replace(plan, checkpointing=True)
            else:
                smaller = Smaller.than(full.shape, full, "finetune.micro_batch_size")
                reporter.warn(f"step {step + 1}: {smaller}", code="out_of_memory")
                plan = replace(plan, batch_tokens=smaller.batch_tokens, micro_batch_size=None)
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = None
        give_back(device_of(model))


class _Full(Exception):
    """Memory ran out with a micro-batch of this shape (examples, tokens)."""

    def __init__(self, shape: Sequence[int], problem: BaseException) -> None:
        super().__init__(str(problem))  # its words alone: its frames hold what did not fit
        self.shape = tuple(shape)


def _step(
    model: PreTrainedModel,
    rows: Sequence[Example],
    optimizer: SparseAdamW,
    plan: TrainingPlan,
    step: int,
    before_update: Callable[[], None],
    hooks: Hooks,
) -> tuple[float, float]:
    """One optimizer step over one batch; stops before the update on a non-finite number.

    Losses and norm are read together, once: the device is waited for once a step. From
    `before_update` on the state of the step before is no more.
    """
    device = device_of(model)
    shares = [micro_batches(share, plan) for share in world().dealt(rows)]
    pieces = shares[world().rank]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_noise_seed(plan.seed, step) + world().rank)
        losses = _agreed(partial(_differentiate, model, shares, plan, len(rows), hooks))
    optimizer.exchange()
    limit = plan.max_grad_norm if plan.max_grad_norm > 0 else math.inf
    norm = optimizer.clip_grad_norm(limit)
    sums = [loss.sum().view(1) for loss in losses]
    values = torch.cat([norm.to(device).view(1), *sums, *losses]).tolist()
    each, finite = values[1 + len(pieces) :], math.isfinite(values[0])
    done = [example for piece in pieces for example in piece]
    bad = [e for e, loss in zip(done, each, strict=True) if not math.isfinite(loss)]
    mean = sum(values[1 : 1 + len(pieces)]) / len(rows)
    mean, wrong = world().total(np.array([mean, float(bool(bad) or not finite)])).tolist()
    if wrong:
        bad = [example for found in world().answers(bad) for example in found]
        what = f"the loss of {named(bad)}" if bad else f"the gradient over {named(rows)}"
        optimizer.zero_grad()
        raise RunError(
            f"step {step + 1}: {what} is not finite; nothing was updated (lower the learning "
            "rate, or look at these rows)"
        )
    if hooks.before_update is not None:
        hooks.before_update(optimizer)
    before_update()
    try:
        optimizer.step()
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        raise RunError(
            f"out of memory for the moments of {optimizer.num_selected:,} trained entries "
            f"({problem}); set moments to bfloat16 or int8 (finetune.moments, warmup.moments), "
            "for the warmup also warmup.offload=true or warmup.trainable=candidates"
        ) from None
    optimizer.zero_grad()
    return mean, values[0]


def _differentiate(
    model: PreTrainedModel,
    shares: Sequence[Sequence[Sequence[Example]]],
    plan: TrainingPlan,
    count: int,
    hooks: Hooks,
) -> list[torch.Tensor]:
    """The gradients of this process's share of a batch of `count`; its micro-batches' losses.

    All must take part in every pass over a sharded model: a process with fewer micro-batches than
    another goes on with weight zero.
    """
    own = shares[world().rank]
    if hooks.before_step is not None:
        _prepare(model, own, hooks.before_step)
    losses = [_backward(model, piece, plan, 1.0 / count, hooks) for piece in own]
    if world().sharded:
        for _ in range(max(map(len, shares)) - len(own)):
            _backward(model, shares[0][0], plan, 0.0, hooks)
    return losses


def _agreed(work: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """`work`, which fails for lack of memory in every process when it does so in one."""
    full: _Full | None = None
    result: list[torch.Tensor] = []
    try:
        result = work()
    except _Full as problem:
        if world().sharded:
            raise RunError(
                f"{world().name} ran out of memory with {problem.shape[0]} examples of "
                f"{problem.shape[1]:,} tokens ({problem}); set finetune.micro_batch_size lower, "
                "finetune.checkpointing=true, or start more processes"
            ) from None
        full = problem
    if any(world().any(full is not None)):  # with one shape, so that all go on alike
        found = [one for one in world().answers(full and (full.shape, str(full))) if one]
        shape, words = min(found, key=lambda one: one[0][0] // 2 * one[0][1])
        raise _Full(shape, MemoryError(words))
    return result


def _prepare(
    model: PreTrainedModel,
    pieces: Sequence[Sequence[Example]],
    before_step: Callable[[PreTrainedModel, Sequence[Sequence[Example]]], None],
) -> None:
    """What a method does before a step, which may run out of memory as the step itself may."""
    try:
        before_step(model, pieces)
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        shapes = [(len(piece), max(e.num_tokens for e in piece)) for piece in pieces]
        raise _Full(max(shapes, key=math.prod), problem) from None


def _backward(
    model: PreTrainedModel, rows: Sequence[Example], plan: TrainingPlan, scale: float, hooks: Hooks
) -> torch.Tensor:
    """Gradients of one micro-batch, each example's times `scale`; returns its examples' losses."""
    batch = collate(rows, plan.pad_id, plan.padding_side, device_of(model))
    try:
        objective, losses = hooks.objective(model, batch, rows, scale)
        objective.backward()
        return losses.detach()
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        raise _Full(batch.input_ids.shape, problem) from None


def micro_batches(rows: Sequence[Example], plan: TrainingPlan) -> list[list[Example]]:
    """The batch in pieces of `micro_batch_size` rows, or as many as the token budget allows."""
    if plan.micro_batch_size is None:
        return [[rows[i] for i in piece] for piece in make_batches(rows, plan.batch_tokens)]
    size = plan.micro_batch_size
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


def _noise_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step * 7_919 + 17) % (1 << 63)
