"""Weight matrices of a transformer block, their roles and units; SMT selects blocks of them.

The structured methods select channels, heads, rows or blocks of query, gate or down projections.
Models name these matrices differently, fuse some of them, and GPT-2 stores them transposed.
`matrices` determines the roles from the model's structure, without loading weights. This module
also converts units to sorted flat indices, and budgets to whole units (`whole_units`) or to
per-tensor counts (`shares`).

**SMT** (He et al., ICLR 2025) selects the blocks with the largest summed gradient. It replaces the
parameter selection of Algorithm 1 (line 9). All parameters are fine-tuned for some steps, the
signed gradients are summed over the steps and over each block of a matrix, and the blocks with the
best scores of each family (attention, MLP) are trained from then on. The dense steps are kept, as
in the original: fine-tuning continues from `start/` with a new optimizer and schedule for the steps
that are left, and the result differs from θ_old everywhere. `restart_from_base` fine-tunes from
θ_old instead. The default score stores one number per block; the others sum whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualsft.errors import ConfigError
from dualsft.lab.diagnostics.job import masked_finetune
from dualsft.model.delta import save_model
from dualsft.model.load import decoder_blocks, empty_model, is_linear, leave_out, locate
from dualsft.runs.method import Job, ParamChoice, ParamMethod
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.storage.resume import Pieces
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype
from dualsft.train.loop import Hooks
from dualsft.train.optimizer import SparseAdamW

Axis = Literal["in", "out"]

NAMES = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj", "out_proj", "dense"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "c_fc", "fc1", "dense_h_to_4h"),
    "down": ("down_proj", "w2", "fc2", "dense_4h_to_h"),
    "qkv": ("c_attn", "qkv_proj", "query_key_value", "in_proj_qkv"),
    "gate_up": ("gate_up_proj",),
}
ROLES = {name: role for role, names in NAMES.items() for name in names}
"""Last component of a module's name -> role. GPT-2's c_proj is not listed: its role depends on the
parent module (`_role`)."""
PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Projections that a fused matrix contains."""
FAMILIES = {"attention": ("q", "k", "v", "qkv"), "mlp": ("gate", "up", "gate_up", "down")}
"""The two families of SMT; the output projection of attention is in neither."""


@dataclass(frozen=True)
class WeightMatrix:
    """A linear weight of a transformer block that is a candidate (`score.candidates`)."""

    name: str
    role: str
    """q, k, v, o, gate, up, down, qkv or gate_up (fused), or other."""
    shape: torch.Size
    transposed: bool
    """Stored as [in, out] (Conv1D) instead of [out, in]."""

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS.get(self.role, (self.role,))

    def dim(self, axis: Axis) -> int:
        """The dimension of the stored weight that corresponds to this axis."""
        return int((axis == "in") != self.transposed)

    def size(self, axis: Axis) -> int:
        return self.shape[self.dim(axis)]

    def lines(self, axis: Axis, chosen: Tensor) -> Tensor:
        """Sorted flat indices of the entries at positions `chosen` (sorted) along an axis."""
        rows, columns = self.shape
        if self.dim(axis) == 0:
            return (chosen[:, None] * columns + torch.arange(columns)).reshape(-1)
        return (torch.arange(rows)[:, None] * columns + chosen).reshape(-1)


def matrices(job: Job) -> list[WeightMatrix]:
    """The candidate linear weights of the transformer blocks, in model order."""
    return job.shared("matrices", _read)


def _read(job: Job) -> list[WeightMatrix]:
    model = empty_model(job.ctx.model_folder, job.ctx.trusted)
    prefix, blocks = decoder_blocks(model)
    candidates = job.shapes()
    if experts := [name for name, shape in candidates.items() if len(shape) > 2]:
        raise ConfigError(
            f"method.params={job.ctx.config.method.params}: it selects from matrices, and "
            f"{experts[0]} holds one per expert ({len(experts)} such candidates in total); "
            f"{leave_out(job.ctx.config.score.candidates, experts)}, or use dualsft, random or "
            "nanoadam, which select single entries"
        )
    linear = {
        f"{path}.weight": m for path, m in blocks.named_modules(prefix=prefix) if is_linear(m)
    }
    return [
        WeightMatrix(name, _role(name), shape, isinstance(linear[name], Conv1D))
        for name, shape in candidates.items()
        if name in linear
    ]


def _role(name: str) -> str:
    parent, _, last = locate(name)[1].rpartition(".")
    if last == "c_proj":
        return "down" if "mlp" in parent else "o"
    return ROLES.get(last, "other")


def of_role(job: Job, method: str, *roles: str) -> list[WeightMatrix]:
    """The matrices of these roles; raises `ConfigError` if the candidates have none of them."""
    chosen = [m for m in matrices(job) if m.role in roles]
    if not chosen:
        there = dict.fromkeys(f"{locate(m.name)[1]} ({m.role})" for m in matrices(job))
        raise ConfigError(
            f"method.params={method} selects from {' and '.join(roles)} projections, and the "
            f"candidates of {job.ctx.model_type} have none (available: {', '.join(there)}); extend "
            "score.candidates, or use another method"
        )
    return chosen


def whole_units(order: np.ndarray, costs: np.ndarray, budget: int) -> np.ndarray:
    """Take units in the given order while they fit the budget, skipping those that do not fit.

    `costs` are the entries of each unit. Units are not split, so the result can be smaller than the
    budget.
    """
    total = np.cumsum(costs[order])
    count = int(np.searchsorted(total, budget, side="right"))
    chosen, rest = [order[:count]], order[count:]
    left = budget - (int(total[count - 1]) if count else 0)
    while len(rest := rest[costs[rest] <= left]):
        chosen.append(rest[:1])
        left -= int(costs[rest[0]])
        rest = rest[1:]
    return np.concatenate(chosen)


def shares(sizes: Sequence[int], k: int) -> list[int]:
    """Divide k entries among parts in proportion to their sizes: exactly k in total, and no part
    gets more than its size.

    Shares are rounded down; the rest goes to the largest remainders, ties to the earlier part.
    """
    total = sum(sizes)
    counts = [k * size // total for size in sizes]
    order = sorted(range(len(sizes)), key=lambda i: -(k * sizes[i] % total))
    for i in order[: k - sum(counts)]:
        counts[i] += 1
    return counts


def per_matrix(chosen: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Sorted positions within each matrix of units that are numbered consecutively over matrices
    with these counts."""
    ordered, edges = np.sort(chosen), np.cumsum([0, *counts])
    return [ordered[(ordered >= a) & (ordered < b)] - a for a, b in pairwise(edges)]


def refuse_empty(indices: Mapping[str, Tensor], method: str, unit: str, k: int, cure: str) -> None:
    """Raise `ConfigError` if nothing was selected because the budget is below one unit."""
    if not any(index.numel() for index in indices.values()):
        raise ConfigError(
            f"method.params={method}: not one {unit} fits select.param_budget ({k:,} entries); "
            f"{cure}"
        )


# --- SMT ------------------------------------------------------------------------------------------


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

    def _num_dense(self, job: Job) -> int:
        """Number of dense steps: at most half of the fine-tuning steps, unless it starts again."""
        if self.options.restart_from_base:
            return self.options.steps
        planned = finetune_plan(job.ctx, len(job.examples)).num_steps(len(job.examples))
        return max(1, min(self.options.steps, planned // 2))

    def steps_taken(self, job: Job) -> int:
        return 0 if self.options.restart_from_base else self._num_dense(job)

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        members, size = self.members(job), self.options.block
        model = job.ctx.theta_old()
        sums = self._warm_start(job, model, members)
        if not self.options.restart_from_base:
            with (job.part / "start").made() as path:
                save_model(model, job.ctx.tokenizer, job.ctx.model_folder, path)
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
        facts |= {"attention_blocks": int(family[chosen].sum()), "warm_steps": self._num_dense(job)}
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
        families = {name: order[attention[order] == (name == "attention")] for name in FAMILIES}
        if (
            self.ratios is None
        ):  # each family has its share of k; what attention leaves is the MLP's
            of_attention = k * int(costs[attention].sum()) // int(costs.sum())
            chosen = whole_units(families["attention"], costs, of_attention)
            left = k - int(costs[chosen].sum())
            return np.concatenate([chosen, whole_units(families["mlp"], costs, left)])
        # ratio_of=model: the released code counts all matrices of the model, embeddings included
        every = sum(s.numel() for s in job.ctx.parameter_shapes.values() if len(s) == 2)
        taken: list[np.ndarray] = []
        for name, ratio in self.ratios.items():
            own = families[name]
            of = len(own) if self.options.ratio_of == "family" else every / self.options.block**2
            taken.append(own[: int(ratio * of)])
        return np.concatenate(taken)

    def _warm_start(
        self, job: Job, model: PreTrainedModel, members: list[WeightMatrix]
    ) -> dict[str, Tensor]:
        """Train all parameters for some steps; returns the gradients summed over the steps, per
        block or per entry."""
        ctx, steps = job.ctx, self._num_dense(job)
        after = finetune_plan(ctx, len(job.examples))
        lr = self.options.dense_lr or ctx.base_lr()
        plan = replace(after, lr=lr, epochs=1, min_steps=steps, max_steps=steps)
        left = max(1, after.num_steps(len(job.examples)) - self.steps_taken(job))
        ctx.reporter.say(f"smt: {steps:,} dense steps at {lr:.3g}, then {left:,} fine-tuning steps")
        if steps < self.options.steps:
            ctx.reporter.warn(
                f"smt: {steps:,} dense steps instead of method.smt.steps={self.options.steps:,}: "
                "they count as fine-tuning steps, and take at most half of them (lower "
                "finetune.batch_size, or raise finetune.epochs or select.data_budget)"
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

        # no saved progress: it would not include the sums, and the warm start is short
        hooks, log = Hooks(before_update=add), partial(ctx.rundir.log_metrics, "smt")
        offload = ctx.config.warmup.offload
        masked_finetune(ctx, model, job.examples, None, plan, "smt", Pieces(), hooks, log, offload)
        count = len(job.examples)
        whole, rest = divmod(steps, math.ceil(count / plan.batch_size))
        job.accounts.backward_examples += whole * count + min(rest * plan.batch_size, count)
        return sums

    def _score(self, total: Tensor, sizes: np.ndarray) -> Tensor:
        """Score of each block, from its sum or from the summed gradient.

        The original has full blocks only. A smaller one at the edge of a matrix is scored as a full
        block of such entries would be: |mean| of few entries is larger by chance, by the root of
        the ratio of the sizes, and sums over few are smaller.
        """
        size, strategy = self.options.block, self.options.strategy
        counts = torch.from_numpy(sizes).to(total.device)
        if strategy == "mean_abs":
            return total.abs() / (counts * float(size) ** 2).sqrt()
        wide = reduction_dtype(total.device)
        if strategy == "l2":
            return (block_sums(total.square(), size, wide) * size**2 / counts).sqrt()
        mean = block_sums(total.abs(), size, wide) / counts
        return mean * size**2 if strategy == "l1" else mean


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
