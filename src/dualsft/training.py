"""The one SFT loop: the pilot warmup (Algorithm 1 line 1) and MaskedFT (line 12) both run it.

ALGORITHM.md §2 "Training": each step minimises the mean over the batch's examples of the example
loss, with AdamW, cosine decay to zero and a linear warmup whose step s uses (s + 1) /
warmup_steps. A batch is cut into micro-batches whose gradients add up, so their size changes
memory, not the mathematics; a micro-batch that does not fit is halved. The order of the examples
and the dropout noise depend only on (seed, epoch, step), never on a global random stream, so a
piece (`pieces.py`) of masters, moments and the step count is all that a later start needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from dualsft.data import Example, collate, make_batches, named, training_order
from dualsft.errors import RunError
from dualsft.losses import example_objective
from dualsft.memory import Smaller, give_back, is_out_of_memory
from dualsft.optim import SparseAdamW
from dualsft.pieces import Piece, Pieces, State
from dualsft.progress import Reporter

FEW_STEPS = 20  # fewer optimizer steps than this are worth a warning


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

    def num_steps(self, num_examples: int) -> int:
        """Optimizer steps; epochs repeat until `min_steps` is reached."""
        per_epoch = math.ceil(num_examples / self.batch_size)
        if self.epochs == 0:
            return 0
        return max(self.epochs * per_epoch, self.min_steps)


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
) -> int:
    """Run the loop in place; returns the number of optimizer steps taken."""
    pieces = pieces or Pieces()
    num_steps = plan.num_steps(len(examples))
    per_epoch = math.ceil(len(examples) / plan.batch_size)
    first, plan = restore(optimizer, pieces.load(label), plan)
    if first:
        log_step(resumed_at=first)
    order: list[int] = []
    model.train()
    try:
        with (
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
                loss, norm, plan = _fitting_step(model, rows, optimizer, plan, step, reporter)
                tokens = sum(e.num_tokens for e in rows)
                progress.advance(1, tokens=tokens, loss=loss)
                log_step(step=step + 1, loss=loss, grad_norm=norm, lr=lr, epoch=step / per_epoch)
                where = f"{label}: step {step + 1:,} of {num_steps:,}"
                pieces.tick(label, partial(snapshot, optimizer, step + 1, plan), where)
    finally:
        model.eval()
    return num_steps


def snapshot(optimizer: SparseAdamW, num_steps: int, plan: TrainingPlan) -> State:
    """Masters and moments after `num_steps` steps: with θ_old, all there is to know.

    How a batch is cut decides the last bits, and lack of memory may have changed it.
    """
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, float] = {}
    for name, master in optimizer.masters.items():
        tensors[f"master.{name}"] = master
        if state := optimizer.state.get(master):
            tensors[f"exp_avg.{name}"] = state["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
            counts[name] = float(state["step"])
    cut = {"batch_tokens": plan.batch_tokens, "micro_batch_size": plan.micro_batch_size}
    return tensors, {"steps": num_steps, "counts": counts, "cut": cut}


def restore(
    optimizer: SparseAdamW, piece: Piece | None, plan: TrainingPlan
) -> tuple[int, TrainingPlan]:
    """Take a piece up; returns how many steps are done, and the plan as it was then."""
    if piece is None:
        return 0, plan
    current = optimizer.state_dict()
    masters, state = {}, {}
    for i, (name, master) in enumerate(optimizer.masters.items()):
        masters[name] = piece.tensors[f"master.{name}"].to(master.device)
        if name in piece.facts["counts"]:
            state[i] = {
                "step": torch.tensor(piece.facts["counts"][name], dtype=torch.float32),
                "exp_avg": piece.tensors[f"exp_avg.{name}"],
                "exp_avg_sq": piece.tensors[f"exp_avg_sq.{name}"],
            }
    optimizer.load_state_dict({**current, "state": state, "masters": masters})
    return piece.facts["steps"], replace(plan, **piece.facts["cut"])


def _fitting_step(
    model: PreTrainedModel,
    rows: Sequence[Example],
    optimizer: SparseAdamW,
    plan: TrainingPlan,
    step: int,
    reporter: Reporter,
) -> tuple[float, float, TrainingPlan]:
    """`_step`, in smaller micro-batches when it does not fit: (loss, gradient norm, the plan)."""
    while True:
        try:
            return *_step(model, rows, optimizer, plan, step), plan
        except Smaller as smaller:  # nothing was updated yet
            reporter.warn(f"step {step + 1}: {smaller}")
            plan = replace(plan, batch_tokens=smaller.batch_tokens, micro_batch_size=None)
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = None
        give_back(next(model.parameters()).device)


def _step(
    model: PreTrainedModel,
    rows: Sequence[Example],
    optimizer: SparseAdamW,
    plan: TrainingPlan,
    step: int,
) -> tuple[float, float]:
    """One optimizer step over one batch; stops before the update on a non-finite number."""
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_noise_seed(plan.seed, step))
        total = sum(
            _backward(model, piece, plan, step, len(rows)) for piece in micro_batches(rows, plan)
        )
    limit = plan.max_grad_norm if plan.max_grad_norm > 0 else math.inf
    norm = float(optimizer.clip_grad_norm(limit))
    if not math.isfinite(norm):
        raise RunError(
            f"step {step + 1}: the gradient over {named(rows)} is not finite; nothing was updated "
            "(lower the learning rate, or look at these rows)"
        )
    optimizer.step()
    optimizer.zero_grad()
    return total / len(rows), norm


def _backward(
    model: PreTrainedModel, rows: Sequence[Example], plan: TrainingPlan, step: int, count: int
) -> float:
    """Gradients of one micro-batch of a batch of `count`; returns the sum of its losses."""
    batch = collate(rows, plan.pad_id, plan.padding_side, next(model.parameters()).device)
    try:
        objective, losses = example_objective(model, batch, scale=1.0 / count)
        bad = [e for e, ok in zip(rows, losses.isfinite().tolist(), strict=True) if not ok]
        if bad:
            raise RunError(
                f"step {step + 1}: the loss of {named(bad)} is not finite; nothing was "
                "updated (lower the learning rate, or look at these rows)"
            )
        objective.backward()
        return float(losses.sum())
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        key = "finetune.micro_batch_size"
        raise Smaller.than(batch.input_ids.shape, problem, key) from None


def micro_batches(rows: Sequence[Example], plan: TrainingPlan) -> list[list[Example]]:
    """The batch in pieces of `micro_batch_size` rows, or as many as the token budget allows."""
    if plan.micro_batch_size is None:
        return [[rows[i] for i in piece] for piece in make_batches(rows, plan.batch_tokens)]
    size = plan.micro_batch_size
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


def _noise_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step * 7_919 + 17) % (1 << 63)
