"""The SFT loop, used by the pilot warmup (Algorithm 1 line 1) and by MaskedFT (line 12).

Each step minimises the mean over the batch of the example loss, in fine-tuning plus the retention
term if there is one (`Retention`), with AdamW, cosine decay to zero and a linear learning-rate
warmup whose step s uses (s + 1) / warmup_steps. A batch is split into micro-batches whose gradients
are summed, so their size affects memory but not the result (up to rounding). On out-of-memory the
loop first recomputes activations (`engine/fused.py`), then halves the micro-batches. The order of
the examples and the dropout noise depend only on (seed, epoch, step), never on global random state.
To resume, a saved piece (`storage/resume.py`) with masters, moments and the step count is therefore
enough. `sized` gives the settings that follow the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.config.fields import Auto
from dualsft.data.examples import Batch, Example, collate, make_batches, named, training_order
from dualsft.distributed.world import world
from dualsft.engine.fused import checkpointed, fused_blocks
from dualsft.engine.losses import distillation_objective, example_objective
from dualsft.errors import RunError
from dualsft.memory.plans import OutOfMemory, memory_errors_noted, memory_errors_shared
from dualsft.model.sharded import device_of
from dualsft.storage.resume import Piece, Pieces, State
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import LazyVector, Seen
from dualsft.system.progress import Reporter
from dualsft.system.usage import Smaller, give_back, is_out_of_memory
from dualsft.train.optimizer import SparseAdamW

FEW_STEPS = 20  # warn below this number of optimizer steps
_CUT = ("batch_tokens", "micro_batch_size", "checkpointing")  # changed on out-of-memory


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Hyperparameters of the loop, and how batches are split into micro-batches."""

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
    max_epochs: int | None = None
    """Most epochs that `min_steps` may ask for."""
    max_steps: int | None = None
    checkpointing: bool | None = None
    """Whether backward recomputes activations; None: off until the first out-of-memory."""

    def num_steps(self, num_examples: int) -> int:
        """Number of optimizer steps: all epochs, at least `min_steps` (or `max_epochs`), at most
        `max_steps`."""
        per_epoch = math.ceil(num_examples / self.batch_size)
        if self.epochs == 0:
            return 0
        least = self.min_steps
        if self.max_epochs is not None:
            least = min(least, self.max_epochs * per_epoch)
        steps = max(self.epochs * per_epoch, least)
        return steps if self.max_steps is None else min(steps, self.max_steps)


Objective = Callable[[PreTrainedModel, Batch, Sequence[Example], float], tuple[Tensor, Tensor]]
"""(model, micro-batch, its examples, 1 / examples in the whole batch) -> (scalar to differentiate,
loss of each example)."""


def mean_loss(
    model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
) -> tuple[Tensor, Tensor]:
    """The objective of plain fine-tuning: the mean over the examples of the example loss."""
    return example_objective(model, batch, scale=scale)


@dataclass(kw_only=True)
class Retention:
    """The retention term of fine-tuning (ours): CWSD (Eq. cwsd, line 6) on anchors in every step.

    A step minimises the mean loss of its examples plus `weight` times the mean CWSD loss of a few
    anchors. The teacher is θ_old, in eval mode and without gradients, the student the model in
    training: this keeps its outputs on the anchors close to the old ones, whatever is trained. The
    anchors of a step depend only on (seed, step): nothing is saved to resume.
    """

    weight: float
    teacher: PreTrainedModel
    tau: float
    anchors: Sequence[Example]
    batch_size: int
    """Anchors per step."""
    seed: int
    _orders: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Order of the anchors in the passes that the latest step drew from."""

    def rows(self, step: int) -> list[Example]:
        """The anchors of a step: the next `batch_size` of shuffled passes over all of them."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        at = [divmod(place, len(self.anchors)) for place in places]
        self._orders = {
            epoch: self._orders.get(epoch) or training_order(self.anchors, self.seed, epoch)
            for epoch in {epoch for epoch, _ in at}
        }
        return [self.anchors[self._orders[epoch][i]] for epoch, i in at]

    def facts(self) -> dict[str, float]:
        """The term in numbers, for a summary file."""
        return {
            "weight": self.weight,
            "tau": self.tau,
            "anchors": len(self.anchors),
            "anchors_per_step": self.batch_size,
        }

    def objective(
        self, model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
    ) -> tuple[Tensor, Tensor]:
        """(Σ_n weight · scale · CWSD_n to differentiate, CWSD_n of each anchor)."""
        total, divergence, omega = distillation_objective(
            self.teacher, model, batch, self.tau, self.weight * scale
        )
        return total, divergence * omega


@dataclass(frozen=True)
class Hooks:
    """Callbacks with which a method customizes the loop."""

    objective: Objective = mean_loss
    before_step: Callable[[PreTrainedModel, Sequence[Sequence[Example]]], None] | None = None
    """Called before a step with the model and the micro-batches of this process."""
    before_update: Callable[[SparseAdamW], None] | None = None
    """Called before the update with the optimizer, which holds the step's unclipped gradients."""
    after_step: Callable[[int], None] | None = None
    """Called after each step, before it is saved, with the number of steps done."""
    state: Callable[[], dict[str, Any]] | None = None
    """Returns the state of the hooks as JSON values; saved with the optimizer's state."""
    load_state: Callable[[dict[str, Any]], None] | None = None
    """Called with that state when training resumes."""
    retention: Retention | None = None
    """A second term of the objective, over rows of its own."""
    moving: Sequence[str] = ()
    """Parameters whose mask moves. They are saved whole, because entries that left the mask have
    been trained too."""


def scheduled_rate(step: int, num_steps: int, peak: float, warmup_ratio: float) -> float:
    """Linear warmup to the peak, then cosine decay to zero; the first step is never at zero."""
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
    """Train the model in place; return the number of optimizer steps."""
    pieces = pieces or Pieces()
    num_steps = plan.num_steps(len(examples))
    per_epoch = math.ceil(len(examples) / plan.batch_size)
    piece = pieces.load(label, optimizer.span)
    first, plan = restore(optimizer, piece, plan, bool(hooks.moving))
    if piece is not None and hooks.load_state is not None:
        hooks.load_state(piece.facts["hooks"])
    if first:
        log_step(resumed_at=first)
    if plan.checkpointing is None and device_of(model).type == "cuda" and not world().can_retry:
        plan = replace(plan, checkpointing=True)
    loop = _Loop(model, optimizer, plan, reporter, hooks, pieces.forget)
    order: list[int] = []
    model.train()
    try:
        with (
            fused_blocks(model),
            fused_blocks(hooks.retention.teacher) if hooks.retention else nullcontext(),
            reporter.track(label, num_steps, "steps", first) as progress,
            pieces.loop(),
        ):
            for step in range(first, num_steps):
                epoch, within = divmod(step, per_epoch)
                if within == 0 or not order:
                    order = training_order(examples, plan.seed, epoch)
                start = within * plan.batch_size
                rows = [examples[i] for i in order[start : start + plan.batch_size]]
                lr = scheduled_rate(step, num_steps, plan.lr, plan.warmup_ratio)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                found = loop.fitting_step(rows, step)
                if hooks.after_step is not None:
                    hooks.after_step(step + 1)
                progress.advance(1, tokens=sum(e.num_tokens for e in rows), loss=found["loss"])
                log_step(step=step + 1, **found, lr=lr, epoch=step / per_epoch)
                where = f"{label}: step {step + 1:,} of {num_steps:,}"
                pieces.tick(label, partial(snapshot, optimizer, step + 1, loop.plan, hooks), where)
    finally:
        model.eval()
    return num_steps


def snapshot(optimizer: SparseAdamW, num_steps: int, plan: TrainingPlan, hooks: Hooks) -> State:
    """Masters and moments after `num_steps` steps; with θ_old, the whole state of training.

    A mask that moves also needs its indices and all weights of the parameters in `hooks.moving`.
    The split into micro-batches is saved as well: it affects the last bits of the result, and an
    out-of-memory may have changed it.
    """
    held: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    for name in optimizer.names:
        dtype = optimizer.master(name, 0, 0).dtype
        forms[f"master.{name}"] = Form(dtype, torch.Size([optimizer.count(name)]))
        held |= {f"{key}.{name}": value for key, value in optimizer.moments_of(name).items()}
        if hooks.moving and optimizer.index(name, 0, 0) is not None:
            forms[f"index.{name}"] = Form(torch.int64, torch.Size([optimizer.count(name)]))
    held |= {f"weight.{name}": optimizer.weight(name) for name in hooks.moving}
    forms |= {key: Form(value.dtype, value.shape) for key, value in held.items()}

    def piece(key: str, start: int, stop: int, _: Seen) -> Tensor:
        if key in held:
            return held[key].reshape(-1)[start:stop]
        kind, name = key.split(".", 1)
        index = optimizer.index(name, start, stop) if kind == "index" else None
        return optimizer.master(name, start, stop) if index is None else index

    facts: dict[str, Any] = {"steps": num_steps}
    facts["cut"] = {key: getattr(plan, key) for key in _CUT}
    if optimizer.layout:
        facts["layout"] = optimizer.layout
    if hooks.state is not None:
        facts["hooks"] = hooks.state()
    return LazyVector(forms, torch.device("cpu"), piece), facts


def restore(
    optimizer: SparseAdamW, piece: Piece | None, plan: TrainingPlan, moving: bool = False
) -> tuple[int, TrainingPlan]:
    """Load a saved piece; return the number of steps done and the plan in use at that point.

    For a mask that moves, first restore the weights, including those outside the mask, then the
    mask itself.
    """
    if piece is None:
        return 0, plan
    parts: dict[str, dict[str, Tensor]] = {}
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
        del cut["checkpointing"]  # the user's setting wins; only automatic choices are restored
    return piece.facts["steps"], replace(plan, **cut)


@dataclass
class _Loop:
    """The steps of a training; `plan` changes when memory runs out."""

    model: PreTrainedModel
    optimizer: SparseAdamW
    plan: TrainingPlan
    reporter: Reporter
    hooks: Hooks
    before_update: Callable[[], None]
    """Called right before the weights change: invalidates the saved state of the previous step."""

    def fitting_step(self, rows: Sequence[Example], step: int) -> dict[str, float]:
        """Run `step`, retrying with less memory until it fits."""
        while True:
            try:
                with checkpointed(self.model, bool(self.plan.checkpointing)):
                    return self.step(rows, step)
            except OutOfMemory as full:  # raised before the update, so the step can be retried
                self._use_less_memory(full, step)
            self.optimizer.zero_grad()
            for parameter in self.model.parameters():
                parameter.grad = None
            give_back(device_of(self.model))

    def _use_less_memory(self, full: OutOfMemory, step: int) -> None:
        assert full.shape is not None
        if self.plan.checkpointing is None:
            self.reporter.warn(
                f"step {step + 1}: out of memory with {full.shape[0]} examples of "
                f"{full.shape[1]:,} tokens in a batch; continuing with activations recomputed "
                "in the backward pass (finetune.checkpointing=true starts with it)",
                code="out_of_memory",
            )
            self.plan = replace(self.plan, checkpointing=True)
            return
        smaller = Smaller.than(full.shape, full, "finetune.micro_batch_size")
        self.reporter.warn(f"step {step + 1}: {smaller}", code="out_of_memory")
        self.plan = replace(self.plan, batch_tokens=smaller.batch_tokens, micro_batch_size=None)

    def step(self, rows: Sequence[Example], step: int) -> dict[str, float]:
        """One optimizer step over one batch: mean loss, gradient norm before clipping, and the mean
        retention loss if there is such a term.

        Raises before the update if a loss or the gradient is not finite. Losses and norm are copied
        to the host together, so there is one device synchronization per step.
        """
        device, optimizer, plan = device_of(self.model), self.optimizer, self.plan
        terms = [(rows, self.hooks.objective)]
        if (retention := self.hooks.retention) is not None:
            terms.append((retention.rows(step), retention.objective))
        cuts = [
            [micro_batches(share, plan) for share in world().round_robin(term)] for term, _ in terms
        ]
        pieces = [shares[world().rank] for shares in cuts]
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_noise_seed(plan.seed, step) + world().rank)
            cure = "set finetune.micro_batch_size lower, finetune.checkpointing=true"
            with memory_errors_shared(f"step {step + 1}", cure=cure):
                losses = self._differentiate(cuts, terms)
        optimizer.exchange()
        norm = optimizer.clip_grad_norm(plan.max_grad_norm if plan.max_grad_norm > 0 else math.inf)
        sums = [loss.sum().view(1) for found in losses for loss in found]
        each = [loss for found in losses for loss in found]
        values = torch.cat([norm.to(device).view(1), *sums, *each]).tolist()
        totals, finite = iter(values[1 : 1 + len(sums)]), math.isfinite(values[0])
        done = [example for own in pieces for piece in own for example in piece]
        pairs = zip(done, values[1 + len(sums) :], strict=True)
        bad = [e for e, loss in pairs if not math.isfinite(loss)]
        means = [
            sum(next(totals) for _ in own) / len(term)
            for own, (term, _) in zip(pieces, terms, strict=True)
        ]
        checked = world().sum_array(np.array([*means, float(bool(bad) or not finite)]))
        *means, wrong = checked.tolist()
        if wrong:
            bad = [example for found in world().gather(bad) for example in found]
            what = f"the loss of {named(bad)}" if bad else f"the gradient over {named(rows)}"
            optimizer.zero_grad()
            raise RunError(
                f"step {step + 1}: {what} is not finite; nothing was updated (lower the learning "
                "rate, or look at these rows)"
            )
        if self.hooks.before_update is not None:
            self.hooks.before_update(optimizer)
        self.before_update()
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
        more = {} if retention is None else {"retention": means[1]}
        return {"loss": means[0], "grad_norm": values[0]} | more

    def _differentiate(
        self,
        cuts: Sequence[Sequence[Sequence[Sequence[Example]]]],
        terms: Sequence[tuple[Sequence[Example], Objective]],
    ) -> list[list[Tensor]]:
        """Accumulate the gradients of this process's share of each term (its rows, and the
        objective whose mean over them counts); return the losses of its micro-batches.

        `cuts` has the micro-batches of each process, per term.
        """
        losses: list[list[Tensor]] = [[] for _ in terms]
        if self.hooks.before_step is not None:
            own = cuts[0][world().rank]
            shapes = [(len(piece), max(e.num_tokens for e in piece)) for piece in own]
            with memory_errors_noted(max(shapes, key=math.prod, default=(0, 0))):
                self.hooks.before_step(self.model, own)
        for shares, (rows, objective), found in zip(cuts, terms, losses, strict=True):
            for piece, counts in world().passes(shares):
                values = self._backward(piece, counts / len(rows), objective)
                found += [values] if counts else []
        return losses

    def _backward(self, rows: Sequence[Example], scale: float, objective: Objective) -> Tensor:
        """Accumulate the gradients of one micro-batch, each example weighted by `scale`; return the
        loss of each example."""
        batch = collate(rows, self.plan.pad_id, self.plan.padding_side, device_of(self.model))
        with memory_errors_noted((len(rows), batch.input_ids.shape[1])):
            total, losses = objective(self.model, batch, rows, scale)
            total.backward()
            return losses.detach()


def micro_batches(rows: Sequence[Example], plan: TrainingPlan) -> list[list[Example]]:
    """Split a batch into micro-batches of `micro_batch_size` rows, or by the token budget."""
    if plan.micro_batch_size is None:
        return [[rows[i] for i in piece] for piece in make_batches(rows, plan.batch_tokens)]
    size = plan.micro_batch_size
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


def _noise_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step * 7_919 + 17) % (1 << 63)


# --- settings that follow the size ------------------------------------------------------------
#
# The paper's settings (2e-5, 3 epochs, 64 rows per step) were made for about 7,500 selected rows,
# 350 steps. On a few dozen rows they are three steps that change nothing. `sized` keeps what those
# settings do, a movement lr × steps of 7e-3, at any size (docs/algorithm.md).

MOVEMENT = 7e-3
"""lr × steps of the paper: 350 steps at 2e-5."""
LEAST_LR, MOST_LR = 2e-5, 1e-4
"""The paper's rate, and the best dense rate of a small model in few steps (SmolLM2-135M, 300 rows,
57 steps)."""
MEASURED_WIDTH = 576
"""Hidden size of that model. Adam's best rate falls with the width: a wider model's largest rate is
MOST_LR times 576 / width, which meets the paper's 2e-5 at its models' widths (3,072 and more)."""
SMALLEST_BATCH, LARGEST_BATCH = 8, 64
EPOCHS, MOST_EPOCHS = 3, 8
WANTED_STEPS = 60
"""Steps in 3 epochs below which the batch is halved."""
ENOUGH_STEPS = 30
"""Steps below which epochs are added."""


@dataclass(frozen=True)
class Sizes:
    """Training settings for a number of rows."""

    lr: float
    epochs: int
    batch_size: int


def sized(
    num_rows: int,
    lr: float | Auto = "auto",
    epochs: int | Auto = "auto",
    batch_size: int | Auto = "auto",
    width: int = MEASURED_WIDTH,
) -> Sizes:
    """What `auto` means in finetune.* for `num_rows` training rows and a hidden size of `width`.

    The others follow a number.
    """
    given = EPOCHS if epochs == "auto" else epochs
    if batch_size == "auto":
        batch_size = LARGEST_BATCH
        while batch_size > SMALLEST_BATCH and given * _steps(num_rows, batch_size) < WANTED_STEPS:
            batch_size //= 2
    per_epoch = _steps(num_rows, batch_size)
    if epochs == "auto":
        epochs = min(MOST_EPOCHS, max(EPOCHS, math.ceil(ENOUGH_STEPS / per_epoch)))
    if lr == "auto":
        lr = min(most_lr(width), max(LEAST_LR, MOVEMENT / (epochs * per_epoch)))
        lr = float(f"{lr:.2g}")  # no digits that mean nothing
    return Sizes(lr, epochs, batch_size)


def most_lr(width: int) -> float:
    """The largest rate of `auto` when all parameters of a model with this hidden size train."""
    return max(LEAST_LR, MOST_LR * min(1.0, MEASURED_WIDTH / width))


def _steps(num_rows: int, batch_size: int) -> int:
    return math.ceil(max(1, num_rows) / batch_size)
