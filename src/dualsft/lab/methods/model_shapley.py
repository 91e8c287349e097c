"""Model Shapley: selects the neurons whose removal would raise the loss most (Chu et al. 2025).

Replaces the parameter selection of Algorithm 1 (line 9). Removing entry i changes the loss, to
second order, by φ_i = −g_i θ_i + ½ θ_i (H θ)_i. If H is the empirical Fisher matrix with one block
per neuron (a row r of a matrix), the sum over a row needs one number per example, a_r = g_r · θ_r:

    φ_r = −E[a_r] + ½ E[a_r²].

For a linear layer a_r does not require the weight gradient: a_r = Σ_t ε_t,r z_t,r, where z is the
output without the bias and ε the gradient with respect to it. Averages over mini-batches are
exponential with bias correction. The rows with the largest φ_r are trained. Weights stay at θ_old
during the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.data.examples import Example, collate, make_batches, training_order
from dualsft.engine.losses import example_objective
from dualsft.errors import ConfigError
from dualsft.lab.methods.matrices import WeightMatrix, matrices, refuse_empty, whole_units
from dualsft.runs.method import Job, ParamChoice, ParamMethod
from dualsft.storage.vectors import reduction_dtype


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
        members, ratio = matrices(job), self.options.ratio
        scores = self.scores(job, job.ctx.theta_old(), members)
        every = np.concatenate([scores[m.name].cpu().double().numpy() for m in members])
        costs = np.concatenate([np.full(m.size("out"), m.size("in")) for m in members])
        order = np.argsort(-every, kind="stable")
        if ratio is None:
            chosen = whole_units(order, costs, k)
        else:
            chosen = order[: max(1, int(len(order) * ratio))]
        indices: dict[str, Tensor] = {}
        first = 0
        for m in members:
            own = chosen[(chosen >= first) & (chosen < first + m.size("out"))] - first
            indices[m.name] = m.lines("out", torch.from_numpy(np.sort(own)))
            first += m.size("out")
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
        label = "neurons' values"
        with (
            ctx.reporter.track(label, len(rows), "examples") as progress,
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
            side = ctx.config.data.padding_side
            tokens = collate(chosen, ctx.pad_id, side, model.device)
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

    def look(self, name: str) -> Any:
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
    taps, modules = FisherTaps(), dict(model.named_modules())
    flags = [(p, p.requires_grad) for p in model.parameters()]
    with ExitStack() as stack:
        for p, flag in flags:
            p.requires_grad_(False)
            stack.callback(p.requires_grad_, flag)
        embedding = model.get_input_embeddings()
        stack.callback(embedding.register_forward_hook(_start_graph).remove)
        for m in members:
            module = modules[m.name.removesuffix(".weight")]
            stack.callback(module.register_forward_hook(taps.look(m.name)).remove)
        yield taps


def _start_graph(_: Any, __: Any, output: Tensor) -> Tensor:
    """Make autograd record the graph although no parameter requires a gradient."""
    return output if output.requires_grad else output.requires_grad_()
