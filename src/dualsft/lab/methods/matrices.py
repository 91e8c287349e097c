"""Roles of the weight matrices in a transformer block, and flat indices of their units.

The structured methods select channels, heads, rows or blocks of query, gate or down projections.
Models name these matrices differently, fuse some of them, and GPT-2 stores them transposed.
`matrices` determines the roles from the model's structure, without loading weights. This module
also converts units to sorted flat indices, and budgets to whole units (`whole_units`) or to
per-tensor counts (`shares`). Not part of Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from dualsft.errors import ConfigError
from dualsft.model.load import decoder_blocks, empty_model, is_linear, locate
from dualsft.runs.method import Job

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
