"""The one SFT loop: the pilot warmup (Algorithm 1 line 1) and MaskedFT (line 12) both run it.

ALGORITHM.md §2 "Training": each step minimises the mean over the batch's examples of the example
loss, with AdamW, cosine decay to zero and a linear warmup whose step s uses (s + 1) /
warmup_steps. A batch is cut into micro-batches whose gradients add up, so their size changes
memory, not the mathematics. The order of the examples and the dropout noise depend only on (seed,
epoch, step), never on a global random stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dualsft.data import Example, collate, make_batches, training_order
from dualsft.errors import RunError
from dualsft.losses import example_objective
from dualsft.optim import SparseAdamW
from dualsft.progress import Progress

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
    progress: Progress,
    log_step: Callable[..., None],
) -> int:
    """Run the loop in place; returns the number of optimizer steps taken."""
    num_steps = plan.num_steps(len(examples))
    per_epoch = math.ceil(len(examples) / plan.batch_size)
    order: list[int] = []
    model.train()
    try:
        for step in range(num_steps):
            epoch, within = divmod(step, per_epoch)
            if within == 0:
                order = training_order(examples, plan.seed, epoch)
            start = within * plan.batch_size
            rows = [examples[i] for i in order[start : start + plan.batch_size]]
            lr = learning_rate(step, num_steps, plan.lr, plan.warmup_ratio)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss, norm = _step(model, rows, optimizer, plan, step)
            tokens = sum(e.num_tokens for e in rows)
            progress.advance(1, tokens=tokens, loss=loss)
            log_step(step=step + 1, loss=loss, grad_norm=norm, lr=lr, epoch=step / per_epoch)
    finally:
        model.eval()
    return num_steps


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
        total = 0.0
        for piece in micro_batches(rows, plan):
            batch = collate(piece, plan.pad_id, plan.padding_side, device)
            objective, losses = example_objective(model, batch, scale=1.0 / len(rows))
            bad = [e.id for e, ok in zip(piece, losses.isfinite().tolist(), strict=True) if not ok]
            if bad:
                raise RunError(
                    f"step {step + 1}: the loss of {', '.join(bad[:5])} is not finite; nothing was "
                    "updated (lower the learning rate, or look at these rows)"
                )
            objective.backward()
            total += float(losses.sum())
    limit = plan.max_grad_norm if plan.max_grad_norm > 0 else math.inf
    norm = float(optimizer.clip_grad_norm(limit))
    if not math.isfinite(norm):
        ids = ", ".join(e.id for e in rows[:5])
        raise RunError(
            f"step {step + 1}: the gradient is not finite; nothing was updated (rows {ids} …; "
            "lower the learning rate)"
        )
    optimizer.step()
    optimizer.zero_grad()
    return total / len(rows), norm


def micro_batches(rows: Sequence[Example], plan: TrainingPlan) -> list[list[Example]]:
    """The batch in pieces of `micro_batch_size` rows, or as many as the token budget allows."""
    if plan.micro_batch_size is None:
        return [[rows[i] for i in piece] for piece in make_batches(rows, plan.batch_tokens)]
    size = plan.micro_batch_size
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


def _noise_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step * 7_919 + 17) % (1 << 63)
