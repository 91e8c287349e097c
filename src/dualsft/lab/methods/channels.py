"""S²FT and Model Shapley: select whole rows and columns of the weight matrices.

Both replace the parameter selection of Algorithm 1 (line 9).

**S²FT** (arXiv 2412.06289) draws random units once, before training, jointly over all layers, so
layers get different counts. A feed-forward unit is an intermediate channel: a column of the down
projection, or a row of the up projection (`u_ratio`). An attention unit is a head: its columns in
the output projection (`o_ratio`), or the rows of a key-value head in the value projection
(`v_ratio`). Weights are indexed in place and not permuted, so the difference from θ_old is as
sparse as the mask.

**Model Shapley** (Chu et al. 2025) selects the neurons whose removal would raise the loss most.
Removing entry i changes the loss, to second order, by φ_i = −g_i θ_i + ½ θ_i (H θ)_i. If H is the
empirical Fisher matrix with one block per neuron (a row r of a matrix), the sum over a row needs
one number per example, a_r = g_r · θ_r:

    φ_r = −E[a_r] + ½ E[a_r²].

For a linear layer a_r does not require the weight gradient: a_r = Σ_t ε_t,r z_t,r, where z is the
output without the bias and ε the gradient with respect to it. Averages over mini-batches are
exponential with bias correction. Weights stay at θ_old during the pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.data.examples import Example, collate, make_batches, training_order
from dualsft.engine.ghost import frozen, start_graph
from dualsft.engine.losses import example_objective, last_hidden
from dualsft.errors import ConfigError
from dualsft.lab.methods.matrices import (
    Axis,
    WeightMatrix,
    matrices,
    of_role,
    per_matrix,
    refuse_empty,
    whole_units,
)
from dualsft.runs.method import Job, ParamChoice, ParamMethod
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype

RATIOS: tuple[tuple[str, str, Axis], ...] = (
    ("u_ratio", "up", "out"),
    ("o_ratio", "o", "in"),
    ("v_ratio", "v", "out"),
)
"""Units that S²FT draws beside the channels of the down projection: (option, role, axis)."""


@dataclass(frozen=True)
class Units:
    """Units of one kind, numbered consecutively over all matrices: rows or columns, or heads of
    several of them."""

    members: list[WeightMatrix]
    axis: Axis
    num_heads: int | None = None
    """Units per matrix; None: each row or column is a unit."""

    @property
    def counts(self) -> list[int]:
        return [self.num_heads or m.size(self.axis) for m in self.members]

    @property
    def costs(self) -> np.ndarray:
        """Number of entries of each unit."""
        pairs = zip(self.members, self.counts, strict=True)
        return np.repeat([m.shape.numel() // count for m, count in pairs], self.counts)

    def indices(self, chosen: np.ndarray) -> dict[str, Tensor]:
        """Sorted flat indices of the chosen units, by parameter."""
        found: dict[str, Tensor] = {}
        parts = per_matrix(chosen, self.counts)
        for m, count, units in zip(self.members, self.counts, parts, strict=True):
            width = m.size(self.axis) // count
            lines = torch.from_numpy(units)[:, None] * width + torch.arange(width)
            found[m.name] = m.lines(self.axis, lines.reshape(-1))
        return found


# --- S²FT ----------------------------------------------------------------------------------------


class S2FT(ParamMethod):
    """Selects random channels of the down projections, and optionally heads and up-rows."""

    def eligible(self, job: Job) -> dict[str, torch.Size]:
        roles = ["down", *(role for name, role, _ in RATIOS if getattr(self.options, name) > 0)]
        of_role(job, self.entry.name, "down")
        return {m.name: m.shape for m in matrices(job) if m.role in roles}

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        options = self.options
        down = Units(of_role(job, self.entry.name, "down"), "in")
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
            return Units(members, axis)
        config = job.ctx.model_config
        heads = config.num_attention_heads
        if role == "v":  # grouped-query attention has fewer value heads than query heads
            heads = getattr(config, "num_key_value_heads", None) or heads
        if odd := [m.name for m in members if m.size(axis) % heads]:
            raise ConfigError(
                f"method.s2ft.{option}: {odd[0]} cannot be divided into {heads} heads; remove the "
                "option"
            )
        return Units(members, axis, heads)

    def _order(self, job: Job, down: Units) -> np.ndarray:
        """The channels of the down projections in selection order: random, or by the norm of their
        weights, of their activations, or the product."""
        kind = self.options.score
        if kind == "random":
            return job.rng("s2ft/down").permutation(sum(down.counts))
        model = job.ctx.theta_old()
        parameters = dict(model.named_parameters())
        activity = activations(job, model, down.members) if kind != "weight" else {}
        parts: list[np.ndarray] = []
        for m in down.members:
            weight = parameters[m.name].detach()
            wide = accumulation_dtype(weight.dtype)
            norms = torch.linalg.vector_norm(weight, dim=1 - m.dim("in"), dtype=wide)
            score = norms if kind == "weight" else activity[m.name]
            if kind == "product":
                score = norms * score
            parts.append(score.cpu().double().numpy())
        sign = -1.0 if self.options.end == "largest" else 1.0
        return np.argsort(sign * np.concatenate(parts), kind="stable")


@torch.no_grad()
def activations(job: Job, model: PreTrainedModel, members: list[WeightMatrix]) -> dict[str, Tensor]:
    """L2 norm of each input channel over all tokens of the training examples (one forward pass)."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    mask = torch.empty(0, dtype=torch.bool)

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            tokens = x.reshape(-1, x.shape[-1])
            if len(tokens) != len(mask):
                raise ConfigError(
                    f"method.s2ft.score: {name} does not process every token (a mixture of "
                    "experts?), so the activations of its channels are not comparable; use random "
                    "or weight"
                )
            squares = tokens[mask].to(accumulation_dtype(x.dtype)).square().sum(0)
            sums[name] = sums[name].to(x.device) + squares

        return hook

    with ExitStack() as stack:
        for m in members:
            module = model.get_submodule(m.name.removesuffix(".weight"))
            stack.callback(module.register_forward_pre_hook(hook_of(m.name)).remove)
        for _, batch in job.batches(model, job.examples, "s2ft activations", backward=False):
            mask = batch.attention_mask.bool().reshape(-1)  # without padding
            last_hidden(model, batch)
    return {name: total.sqrt() for name, total in sums.items()}


# --- Model Shapley -------------------------------------------------------------------------------


class ModelShapley(ParamMethod):
    """Selects the rows with the largest φ."""

    def eligible(self, job: Job) -> dict[str, torch.Size]:
        found = {m.name: m.shape for m in matrices(job)}
        if not found:
            raise ConfigError(
                f"score.candidates: {job.ctx.config.score.candidates!r} has no linear weights of "
                "blocks, and method.params=model_shapley selects their rows; extend it"
            )
        return found

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        units, ratio = Units(matrices(job), "out"), self.options.ratio
        scores = self.scores(job, job.ctx.theta_old(), units.members)
        every = np.concatenate([scores[m.name].cpu().double().numpy() for m in units.members])
        order = np.argsort(-every, kind="stable")
        if ratio is None:
            chosen = whole_units(order, units.costs, k)
        else:
            chosen = order[: max(1, int(len(order) * ratio))]
        indices = units.indices(chosen)
        refuse_empty(indices, "model_shapley", "row", k, "raise it")
        facts: dict[str, Any] = {"neurons": len(chosen), "neurons_in_all": len(every)}
        facts["num_nonpositive_neurons"] = int((every[chosen] <= 0).sum())
        if ratio is not None:
            facts["budget"] = f"literal: ratio {ratio}"
        return ParamChoice(indices, facts, literal=ratio is not None)

    def scores(
        self, job: Job, model: PreTrainedModel, members: list[WeightMatrix]
    ) -> dict[str, Tensor]:
        """φ of every row, by parameter (one backward pass)."""
        ctx, options = job.ctx, self.options
        rows = job.examples if options.examples == "train" else job.roles["val"]
        order = training_order(rows, ctx.config.seed, 0)
        means: dict[str, Tensor] = {}
        weight = 0.0  # sum of the weights in the averages, for the bias correction
        with (
            ctx.reporter.track("neurons' values", len(rows), "examples") as progress,
            watched(model, members) as taps,
        ):
            for start in range(0, len(rows), options.batch_size):
                batch = [rows[i] for i in order[start : start + options.batch_size]]
                moments = self._moments(job, model, batch, taps)
                weight = options.decay * weight + (1.0 - options.decay)
                for name, now in moments.items():
                    before = means.get(name, torch.zeros_like(now))
                    means[name] = options.decay * before + (1.0 - options.decay) * now
                job.accounts.backward_examples += len(batch)
                progress.advance(len(batch), tokens=sum(e.num_tokens for e in batch))
        return {name: (0.5 * second - first) / weight for name, (first, second) in means.items()}

    def _moments(
        self, job: Job, model: PreTrainedModel, batch: list[Example], taps: FisherTaps
    ) -> dict[str, Tensor]:
        """Means of a and a² over a mini-batch: [2, rows] by parameter."""
        ctx = job.ctx
        sums: dict[str, Tensor] = {}
        for piece in make_batches(batch, ctx.batch_tokens):
            chosen = [batch[i] for i in piece]
            tokens = collate(chosen, ctx.pad_id, ctx.config.data.padding_side, model.device)
            taps.begin(*tokens.input_ids.shape)
            example_objective(model, tokens)[0].backward()
            for name, a in taps.products.items():
                both = torch.stack([a.sum(0), a.square().sum(0)])
                sums[name] = both if name not in sums else sums[name] + both
        return {name: total / len(batch) for name, total in sums.items()}


class FisherTaps:
    """Σ_t ε_t z_t per example at every hooked layer: [examples, rows] by parameter."""

    def __init__(self) -> None:
        self.products: dict[str, Tensor] = {}
        self._shape = (0, 0)

    def begin(self, num_examples: int, num_tokens: int) -> None:
        """Clear the products before a batch of this shape."""
        self.products, self._shape = {}, (num_examples, num_tokens)

    def hook_of(self, name: str) -> Callable[..., None]:
        """A forward hook that registers a backward hook on the output."""

        def forward(module: nn.Module, _: Any, output: Tensor) -> None:
            if not output.requires_grad:
                return
            bias, examples, tokens = getattr(module, "bias", None), *self._shape
            if output.numel() != examples * tokens * output.shape[-1]:
                raise ConfigError(
                    f"method.params=model_shapley: {name} does not process every token (a mixture "
                    "of experts?); exclude it from score.candidates"
                )
            kept = output.detach()

            def backward(gradient: Tensor) -> None:
                wide = reduction_dtype(gradient.device)
                z = kept if bias is None else kept - bias.detach()
                a = (z.to(wide) * gradient.to(wide)).view(examples, tokens, -1).sum(1)
                self.products[name] = self.products.get(name, 0.0) + a

            output.register_hook(backward)

        return forward


@contextmanager
def watched(model: PreTrainedModel, members: list[WeightMatrix]) -> Iterator[FisherTaps]:
    """Hooks on these layers. Parameters do not require gradients inside the context, since only
    gradients of the activations are used."""
    taps = FisherTaps()
    with ExitStack() as stack:
        stack.enter_context(frozen(model))
        # so that autograd records the graph although no parameter requires a gradient
        stack.callback(start_graph(model.get_input_embeddings()).remove)
        for m in members:
            module = model.get_submodule(m.name.removesuffix(".weight"))
            stack.callback(module.register_forward_hook(taps.hook_of(m.name)).remove)
        yield taps
