"""S²FT: whole channels of the down projections, at random (METHODS.md A1; arXiv 2412.06289).

A feed-forward unit is an intermediate channel: a column of the down projection, for `u_ratio` a row
of the up projection. An attention unit is a head: its columns of the output projection, for
`v_ratio` the rows of a key-value head in the value projection. Units are drawn over all layers
together, so layers get unequal counts; once, before training. The weights are indexed where they
are: nothing is permuted, and the difference to θ_old is as sparse as the mask.
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
"""What is drawn beside the channels of the down projection."""


@dataclass(frozen=True)
class Units:
    """The units of one kind over all layers, numbered through."""

    members: list[WeightMatrix]
    axis: Axis
    widths: list[int]
    """Lines of the axis that make a unit, by matrix."""

    @property
    def counts(self) -> list[int]:
        return [m.size(self.axis) // w for m, w in zip(self.members, self.widths, strict=True)]

    @property
    def costs(self) -> np.ndarray:
        """Entries of each unit."""
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
    """Random channels of the down projections; heads and up-rows when asked for."""

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
                f"method.s2ft: its ratios take {spent:,} entries, more than select.param_budget "
                f"({k:,}); lower them, or set method.s2ft.d_ratio to leave the budget aside"
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
                f"method.s2ft.{option}: {job.ctx.model_type} has no {role} projection of its own "
                "among the candidates (it may be fused with others); leave the option out"
            )
        if role == "up":
            return Units(members, axis, [1] * len(members))
        config = job.ctx.model_config
        heads = config.num_attention_heads
        if role == "v":  # grouped queries: fewer heads of values than of queries
            heads = getattr(config, "num_key_value_heads", None) or heads
        if odd := [m.name for m in members if m.size(axis) % heads]:
            raise ConfigError(
                f"method.s2ft.{option}: {odd[0]} cannot be cut into {heads} heads; leave it out"
            )
        return Units(members, axis, [m.size(axis) // heads for m in members])

    def _order(self, job: Job, down: Units) -> np.ndarray:
        """The channels in the order in which they are taken."""
        if self.options.score == "random":
            return job.rng("s2ft/down").permutation(sum(down.counts))
        model = job.ctx.theta_old()
        scores = self._scores(job, model, down.members)
        sign = -1.0 if self.options.end == "largest" else 1.0
        return np.argsort(sign * scores, kind="stable")

    def _scores(self, job: Job, model: PreTrainedModel, members: list[WeightMatrix]) -> np.ndarray:
        """One number a channel: norm of its weights, of its activations, or their product."""
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
    """Root of the sum of squares of each input channel over all tokens: one forward pass over the
    examples that will be trained on."""
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
    """Add up the squares of what enters these linear maps, padding left out."""
    watch: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
            x, real = inputs[0].detach(), watch["mask"].reshape(-1)
            tokens = x.reshape(-1, x.shape[-1])
            if len(tokens) != len(real):
                raise ConfigError(
                    f"method.s2ft.score: {name} does not see every token (a mixture of experts?), "
                    "so its channels' activations cannot be compared; use random or weight"
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
