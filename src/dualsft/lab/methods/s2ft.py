"""S²FT: random whole channels of the down projections (arXiv 2412.06289).

Replaces the parameter selection of Algorithm 1 (line 9). A feed-forward unit is an intermediate
channel: a column of the down projection, or a row of the up projection (`u_ratio`). An attention
unit is a head: its columns in the output projection (`o_ratio`), or the rows of a key-value head in
the value projection (`v_ratio`). Units are drawn once, before training, jointly over all layers, so
layers get different counts. Weights are indexed in place and not permuted, so the difference from
θ_old is as sparse as the mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.engine.losses import last_hidden
from dualsft.errors import ConfigError
from dualsft.lab.methods.matrices import (
    Axis,
    WeightMatrix,
    matrices,
    of_role,
    refuse_empty,
    whole_units,
)
from dualsft.runs.method import Job, ParamChoice, ParamMethod
from dualsft.storage.vectors import accumulation_dtype

RATIOS: tuple[tuple[str, str, Axis], ...] = (
    ("u_ratio", "up", "out"),
    ("o_ratio", "o", "in"),
    ("v_ratio", "v", "out"),
)
"""Units drawn in addition to the channels of the down projection: (option, role, axis)."""


@dataclass(frozen=True)
class Units:
    """The units of one kind, numbered consecutively over all layers."""

    members: list[WeightMatrix]
    axis: Axis
    widths: list[int]
    """Rows or columns per unit, for each matrix."""

    @property
    def counts(self) -> list[int]:
        return [m.size(self.axis) // w for m, w in zip(self.members, self.widths, strict=True)]

    @property
    def costs(self) -> np.ndarray:
        """Number of entries of each unit."""
        each = [w * m.shape.numel() // m.size(self.axis) for m, w in self._pairs()]
        return np.repeat(each, self.counts)

    def _pairs(self) -> Iterator[tuple[WeightMatrix, int]]:
        return zip(self.members, self.widths, strict=True)

    def indices(self, chosen: np.ndarray) -> dict[str, Tensor]:
        """Sorted flat indices of the chosen units, by parameter."""
        found: dict[str, Tensor] = {}
        first = 0
        for (matrix, width), count in zip(self._pairs(), self.counts, strict=True):
            own = np.sort(chosen[(chosen >= first) & (chosen < first + count)]) - first
            lines = torch.from_numpy(own)[:, None] * width + torch.arange(width)
            found[matrix.name] = matrix.lines(self.axis, lines.reshape(-1))
            first += count
        return found


class S2FT(ParamMethod):
    """Selects random channels of the down projections, and optionally heads and up-rows."""

    def eligible(self, job: Job) -> dict[str, torch.Size]:
        roles = ["down", *(role for name, role, _ in RATIOS if getattr(self.options, name) > 0)]
        of_role(job, self.entry.name, "down")
        return {m.name: m.shape for m in matrices(job) if m.role in roles}

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        options = self.options
        members = of_role(job, self.entry.name, "down")
        down = Units(members, "in", [1] * len(members))
        indices: dict[str, Tensor] = {}
        facts: dict[str, Any] = {}
        spent = 0
        for name, role, axis in RATIOS:
            if ratio := getattr(options, name):
                units = self._units(job, name, role, axis)
                total = sum(units.counts)
                chosen = job.rng(f"s2ft/{role}").permutation(total)[: int(total * ratio)]
                indices |= units.indices(chosen)
                spent += int(units.costs[chosen].sum())
                facts[f"{role}_units"] = len(chosen)
        total = sum(down.counts)
        order = self._order(job, down)
        if options.d_ratio is not None:
            chosen = order[: int(total * options.d_ratio)]
            facts["budget"] = f"literal: d_ratio {options.d_ratio}"
        elif spent > k:
            raise ConfigError(
                f"method.s2ft: u_ratio, o_ratio and v_ratio take {spent:,} entries, more than "
                f"select.param_budget ({k:,}); lower them, or set method.s2ft.d_ratio, which "
                "ignores the budget"
            )
        else:
            chosen = whole_units(order, down.costs, k - spent)
        indices |= down.indices(chosen)
        refuse_empty(indices, "s2ft", "channel", k, "raise it, or set method.s2ft.d_ratio")
        facts |= {"channels": len(chosen), "channels_in_all": total}
        return ParamChoice(indices, facts, literal=options.d_ratio is not None)

    def _units(self, job: Job, option: str, role: str, axis: Axis) -> Units:
        """Rows of the up projections, or heads."""
        members = [m for m in matrices(job) if m.role == role]
        if not members:
            raise ConfigError(
                f"method.s2ft.{option}: the candidates of {job.ctx.model_type} have no {role} "
                "projection as a separate matrix (it may be fused with others); remove the option"
            )
        if role == "up":
            return Units(members, axis, [1] * len(members))
        config = job.ctx.model_config
        heads = config.num_attention_heads
        if role == "v":  # grouped-query attention has fewer value heads than query heads
            heads = getattr(config, "num_key_value_heads", None) or heads
        if odd := [m.name for m in members if m.size(axis) % heads]:
            raise ConfigError(
                f"method.s2ft.{option}: {odd[0]} cannot be divided into {heads} heads; remove the "
                "option"
            )
        return Units(members, axis, [m.size(axis) // heads for m in members])

    def _order(self, job: Job, down: Units) -> np.ndarray:
        """The channels of the down projections in selection order."""
        if self.options.score == "random":
            return job.rng("s2ft/down").permutation(sum(down.counts))
        model = job.ctx.theta_old()
        scores = self._scores(job, model, down.members)
        sign = -1.0 if self.options.end == "largest" else 1.0
        return np.argsort(sign * scores, kind="stable")

    def _scores(self, job: Job, model: PreTrainedModel, members: list[WeightMatrix]) -> np.ndarray:
        """Score of each channel: the norm of its weights, of its activations, or the product."""
        kind = self.options.score
        parameters = dict(model.named_parameters())
        parts: list[np.ndarray] = []
        activity = activations(job, model, members) if kind != "weight" else {}
        for m in members:
            weight = parameters[m.name].detach()
            wide = accumulation_dtype(weight.dtype)
            norms = torch.linalg.vector_norm(weight, dim=1 - m.dim("in"), dtype=wide)
            score = norms if kind == "weight" else activity[m.name]
            if kind == "product":
                score = norms * score
            parts.append(score.cpu().double().numpy())
        return np.concatenate(parts)


@torch.no_grad()
def activations(job: Job, model: PreTrainedModel, members: list[WeightMatrix]) -> dict[str, Tensor]:
    """L2 norm of each input channel over all tokens of the training examples (one forward pass)."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    with _watched(model, members, sums) as watch:
        for _, batch in job.batches(model, job.examples, "s2ft activations", backward=False):
            watch["mask"] = batch.attention_mask.bool()
            last_hidden(model, batch)
    return {name: total.sqrt() for name, total in sums.items()}


@contextmanager
def _watched(
    model: PreTrainedModel, members: list[WeightMatrix], sums: dict[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Add the squared inputs of these linear layers to `sums`, without padding.

    The caller must store each batch's attention mask in the yielded dictionary under "mask".
    """
    watch: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
            x, real = inputs[0].detach(), watch["mask"].reshape(-1)
            tokens = x.reshape(-1, x.shape[-1])
            if len(tokens) != len(real):
                raise ConfigError(
                    f"method.s2ft.score: {name} does not process every token (a mixture of "
                    "experts?), so the activations of its channels are not comparable; use random "
                    "or weight"
                )
            squares = tokens[real].to(accumulation_dtype(x.dtype)).square().sum(0)
            sums[name] = sums[name].to(x.device) + squares

        return hook

    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for m in members:
            module = modules[m.name.removesuffix(".weight")]
            stack.callback(module.register_forward_pre_hook(look(m.name)).remove)
        yield watch
