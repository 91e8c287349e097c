"""SMT: selects the blocks of matrices with the largest summed gradient (He et al., ICLR 2025).

Replaces the parameter selection of Algorithm 1 (line 9). All parameters are fine-tuned for some
steps, the signed gradients are summed over the steps and over each block of a matrix, and the
blocks with the best scores are trained from then on. The dense steps are kept, as in the original:
fine-tuning continues from `start/` with a new optimizer and schedule, and the result differs from
θ_old everywhere. `restart_from_base` fine-tunes from θ_old instead. The default score stores one
number per block; the others sum whole gradients.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from dualsft.lab.methods.matrices import (
    FAMILIES,
    WeightMatrix,
    of_role,
    per_matrix,
    refuse_empty,
    whole_units,
)
from dualsft.model.export import save_model
from dualsft.model.load import text_parameters
from dualsft.runs.method import Job, ParamChoice, ParamMethod
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.storage.resume import Pieces
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype
from dualsft.train.loop import Hooks, train
from dualsft.train.optimizer import SparseAdamW


class SMT(ParamMethod):
    """Selects the best blocks of q, k, v and of gate, up, down."""

    @property
    def ratios(self) -> dict[str, float] | None:
        """Share of each family; None if select.param_budget applies."""
        given = {"attention": self.options.attention_ratio, "mlp": self.options.mlp_ratio}
        if all(ratio is None for ratio in given.values()):
            return None
        return {family: ratio or 0.0 for family, ratio in given.items()}

    def members(self, job: Job) -> list[WeightMatrix]:
        wanted = self.ratios or dict.fromkeys(FAMILIES, 1.0)
        roles = [role for family, share in wanted.items() if share for role in FAMILIES[family]]
        return of_role(job, self.entry.name, *roles)

    def eligible(self, job: Job) -> dict[str, torch.Size]:
        return {m.name: m.shape for m in self.members(job)}

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        members, size = self.members(job), self.options.block
        model = job.ctx.theta_old()
        sums = self._warm_start(job, model, members)
        if not self.options.restart_from_base:
            start = job.part / "start"
            start.mkdir()
            save_model(model, job.ctx.tokenizer, job.ctx.model_folder, start.checked())
        sizes = [block_sizes(m.shape, size) for m in members]
        counts, costs = [n.size for n in sizes], np.concatenate([n.ravel() for n in sizes])
        found = [self._score(sums[m.name], n) for m, n in zip(members, sizes, strict=True)]
        scores = np.concatenate([score.cpu().double().numpy().ravel() for score in found])
        family = np.repeat([m.role in FAMILIES["attention"] for m in members], counts)
        chosen = self._take(job, np.argsort(-scores, kind="stable"), costs, family, k)
        indices: dict[str, Tensor] = {}
        for m, n, blocks in zip(members, sizes, per_matrix(chosen, counts), strict=True):
            picked = np.zeros(n.size, bool)
            picked[blocks] = True
            indices[m.name] = block_entries(picked.reshape(n.shape), m.shape, size)
        refuse_empty(indices, "smt", "block", k, "raise it, or lower method.smt.block")
        facts: dict[str, Any] = {"blocks": len(chosen), "blocks_in_all": len(costs)}
        facts |= {"attention_blocks": int(family[chosen].sum()), "warm_steps": self.options.steps}
        if self.ratios is not None:
            of = self.options.ratio_of
            facts["budget"] = "literal: " + ", ".join(
                f"{name} {ratio} of the {of}'s blocks" for name, ratio in self.ratios.items()
            )
        return ParamChoice(indices, facts, literal=self.ratios is not None)

    def _take(
        self, job: Job, order: np.ndarray, costs: np.ndarray, attention: np.ndarray, k: int
    ) -> np.ndarray:
        """The blocks that fit the budget, or the share of each family that its ratio asks for."""
        if self.ratios is None:
            return whole_units(order, costs, k)
        # ratio_of=model: the released code counts all matrices of the model, embeddings included
        every = sum(s.numel() for s in job.ctx.parameter_shapes.values() if len(s) == 2)
        taken: list[np.ndarray] = []
        for name, ratio in self.ratios.items():
            own = order[attention[order] == (name == "attention")]
            of = len(own) if self.options.ratio_of == "family" else every / self.options.block**2
            taken.append(own[: int(ratio * of)])
        return np.concatenate(taken)

    def _warm_start(
        self, job: Job, model: PreTrainedModel, members: list[WeightMatrix]
    ) -> dict[str, Tensor]:
        """Train all parameters for `steps` steps; returns the gradients summed over the steps, per
        block or per entry."""
        ctx, steps = job.ctx, self.options.steps
        after = finetune_plan(ctx)
        lr = ctx.config.finetune.lr * self.entry.lr_ratio
        plan = replace(after, lr=lr, epochs=1, min_steps=steps, max_steps=steps)
        ctx.reporter.say(
            f"smt: {steps:,} dense steps, then {after.num_steps(len(job.examples)):,} fine-tuning "
            "steps"
        )
        size, by_block = self.options.block, self.options.strategy == "mean_abs"
        device = next(model.parameters()).device
        wide = reduction_dtype(device) if by_block else accumulation_dtype(ctx.dtype)
        sums: dict[str, Tensor] = {}
        for m in members:
            shape = grid(m.shape, size) if by_block else m.shape
            sums[m.name] = torch.zeros(shape, dtype=wide, device=device)

        def add(optimizer: SparseAdamW) -> None:
            for m in members:
                if m.name in optimizer.gradients:  # an idle expert has none in this step
                    gradient = optimizer.gradients[m.name].view(m.shape)
                    sums[m.name] += block_sums(gradient, size, wide) if by_block else gradient

        with SparseAdamW(
            text_parameters(model),
            None,
            lr=plan.lr,
            weight_decay=ctx.config.finetune.weight_decay,
            moments=ctx.config.finetune.moments,
            offload=ctx.config.warmup.offload,
            seed=ctx.config.seed,
            free_gradients=True,
        ) as optimizer:
            # no saved progress: it would not include the sums, and the warm start is short
            hooks = Hooks(before_update=add)
            log = partial(ctx.rundir.log_metrics, "smt")
            train(model, job.examples, optimizer, plan, ctx.reporter, "smt", log, Pieces(), hooks)
        count = len(job.examples)
        whole, rest = divmod(steps, math.ceil(count / plan.batch_size))
        job.accounts.backward_examples += whole * count + min(rest * plan.batch_size, count)
        return sums

    def _score(self, total: Tensor, sizes: np.ndarray) -> Tensor:
        """Score of each block, from its sum or from the summed gradient."""
        size, strategy = self.options.block, self.options.strategy
        counts = torch.from_numpy(sizes).to(total.device)
        if strategy == "mean_abs":
            return total.abs() / counts
        wide = reduction_dtype(total.device)
        if strategy == "l2":
            return block_sums(total.square(), size, wide).sqrt()
        absolute = block_sums(total.abs(), size, wide)
        return absolute if strategy == "l1" else absolute / counts


def grid(shape: torch.Size, size: int) -> tuple[int, int]:
    """Number of blocks (down, across)."""
    return math.ceil(shape[0] / size), math.ceil(shape[1] / size)


def block_sizes(shape: torch.Size, size: int) -> np.ndarray:
    """Entries of each block; fewer at the edges: [blocks down, blocks across]."""
    edges = [np.minimum(np.arange(0, length + size, size), length) for length in shape]
    return np.outer(*(np.diff(edge) for edge in edges))


def block_sums(values: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Sum over each block: [blocks down, blocks across]."""
    down, across = grid(values.shape, size)
    short = (0, across * size - values.shape[1], 0, down * size - values.shape[0])
    return pad(values, short).view(down, size, across, size).sum((1, 3), dtype=dtype)


def block_entries(picked: np.ndarray, shape: torch.Size, size: int) -> Tensor:
    """Sorted flat indices of the entries of the picked blocks."""
    mask = torch.from_numpy(picked).repeat_interleave(size, 0)[: shape[0]]
    return mask.repeat_interleave(size, 1)[:, : shape[1]].reshape(-1).nonzero().view(-1)
