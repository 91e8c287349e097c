"""Repeated short trainings from the same weights, shared by fidelity, drift and reverse selection.

Each trial is MaskedFT (Algorithm 1 line 12) as in the run itself (`train/loop.py`, SparseAdamW), on
given examples and entries, for a given number of steps. Afterwards the trained weights are restored
bit for bit, so all trials use one loaded model. Methods that train a reference model use
`masked_finetune` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Example
from dualsft.errors import RunError
from dualsft.model.load import text_parameters
from dualsft.runs.context import RunContext
from dualsft.runs.method import Job
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.storage.resume import Pieces
from dualsft.system.progress import NOTE, Reporter
from dualsft.train.loop import Hooks, TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW

Indices = Mapping[str, Tensor | None]


class Quiet(Reporter):
    """Suppresses log lines and progress, and forwards warnings."""

    def __init__(self, outer: Reporter) -> None:
        super().__init__(lambda _: None)
        self.outer = outer

    def warn(self, message: str, code: str = NOTE) -> None:
        self.outer.warn(message, code)


def quiet(ctx: RunContext) -> RunContext:
    """A context for many small tasks: without log lines and without saved progress."""
    return replace(ctx, reporter=Quiet(ctx.reporter), pieces=Pieces(), plans={})


def steps_plan(
    ctx: RunContext, steps: int, lr: float | None = None, batch_size: int | None = None
) -> TrainingPlan:
    """The fine-tuning plan of the run, with exactly this many steps."""
    plan = finetune_plan(ctx)
    lr, batch_size = lr or plan.lr, batch_size or plan.batch_size
    return replace(plan, lr=lr, batch_size=batch_size, epochs=1, min_steps=steps, max_steps=steps)


def masked_finetune(
    ctx: RunContext,
    model: PreTrainedModel,
    examples: Sequence[Example],
    indices: Indices | None,
    plan: TrainingPlan,
    label: str,
    pieces: Pieces | None = None,
    hooks: Hooks = Hooks(),  # noqa: B008
) -> None:
    """Train these entries (None: all) on these examples, with the run's optimizer settings."""
    with SparseAdamW(
        text_parameters(model),
        indices,
        lr=plan.lr,
        weight_decay=ctx.config.finetune.weight_decay,
        moments=ctx.config.finetune.moments,
        seed=ctx.config.seed,
        free_gradients=True,
    ) as optimizer:
        train(model, examples, optimizer, plan, ctx.reporter, label, pieces=pieces, hooks=hooks)


class Trials:
    """Trainings of one model that all start from its current weights."""

    def __init__(
        self, ctx: RunContext, model: PreTrainedModel, pieces: Pieces | None = None
    ) -> None:
        """`pieces` saves progress inside a trial; without it, an interrupted trial starts over."""
        self.ctx, self.model, self.pieces = ctx, model, pieces
        self._start: dict[str, Tensor] = {}

    def run(
        self,
        examples: Sequence[Example],
        indices: Indices | None,
        plan: TrainingPlan,
        label: str,
        observe: Callable[[int], None] | None = None,
        constant: bool = False,
        hooks: Hooks = Hooks(),  # noqa: B008
    ) -> None:
        """Train the model; call `reset` to restore the weights.

        `observe` is called after every step, with the model in eval mode. `constant` keeps the
        learning rate at its peak, so that the first K steps do not depend on the total number of
        steps. `hooks` may save and restore the state of `observe` together with the weights.
        """

        def after_step(done: int) -> None:
            if observe is not None:
                self.model.eval()
                observe(done)
                self.model.train()

        def hold(optimizer: SparseAdamW) -> None:
            for group in optimizer.param_groups:
                group["lr"] = plan.lr

        own = replace(hooks, after_step=after_step, before_update=hold if constant else None)
        for name, weight in text_parameters(self.model):
            if (indices is None or name in indices) and name not in self._start:
                self._start[name] = weight.detach().to("cpu", copy=True)
        masked_finetune(self.ctx, self.model, examples, indices, plan, label, self.pieces, own)

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the initial weights, bit for bit."""
        own = dict(text_parameters(self.model))
        for name, weight in self._start.items():
            own[name].copy_(weight)


def sample(rng: np.random.Generator, rows: Sequence[Example], count: int | None) -> list[Example]:
    """A random sample of `count` rows in their original order; all rows if there are fewer."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[i] for i in np.sort(rng.choice(len(rows), count, replace=False))]


def stratified_mask(
    rng: np.random.Generator, sizes: Mapping[str, int], k: int, varied: bool = False
) -> dict[str, Tensor]:
    """k random entries, with a count per parameter in proportion to its size.

    `varied` also draws a random density per parameter (exponential), so that masks differ in their
    distribution over layers as well. The total stays k. Parameters without entries are left out.
    """
    limits = np.array(list(sizes.values()), dtype=np.int64)
    weights = limits * (rng.exponential(size=len(limits)) if varied else 1.0)
    quota = np.zeros(len(limits), dtype=np.int64)
    while (left := k - int(quota.sum())) > 0:  # redistribute what exceeded a parameter's size
        open_ = np.where(quota < limits, weights, 0.0)
        exact = left * open_ / open_.sum()
        more = np.floor(exact).astype(np.int64)
        rest = left - int(more.sum())
        more[np.argsort(-(exact - more), kind="stable")[:rest]] += 1
        quota = np.minimum(quota + more, limits)
    return {
        name: torch.from_numpy(rng.choice(size, count, replace=False, shuffle=False)).sort().values
        for (name, size), count in zip(sizes.items(), quota.tolist(), strict=True)
        if count
    }


def plain_training(ctx: RunContext) -> None:
    """Refuse a run whose fine-tuning is more than a fixed mask on fixed examples."""
    params = ctx.methods.load("params")
    moving = params.refresh_every(Job(ctx, "params", ctx.rundir.path)) is not None
    if params.adapter or moving or ctx.methods["weights"] or ctx.methods["after"]:
        names = [e.name for e in ctx.methods.entries.values() if e is not None]
        raise RunError(
            f"the run's fine-tuning ({', '.join(names)}) is more than a fixed mask on fixed "
            "examples, which is all that this diagnostic can train; use it on a run of dualsft"
        )
