"""The example loss and CWSD, computed without full-vocabulary logits for a whole batch.

The example loss (used in every line of Algorithm 1 that differentiates examples) is the mean
cross-entropy over the example's own response tokens. CWSD (line 6) is a confidence-weighted KL from
teacher to student on the same tokens. Both depend on the last hidden states at the label positions,
through the output head. `HeadLoss` processes these positions in chunks: it computes the logit
gradient in closed form and multiplies it with the head's weight at once, so at most one chunk of
fp32 logits exists at a time. Models that scale or soft-cap their logits do so after the linear head
(`LogitMap`); the gradient includes its slope.

Shape letters: B examples, T positions, M label positions of all examples of the batch, C rows of a
chunk, D hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.data.examples import Batch
from dualsft.engine.fused import kernels_for
from dualsft.model.load import accepts, output_head, text_decoder
from dualsft.model.sharded import through
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype

CHUNK_BYTES = {"cpu": 48 << 20, "cuda": 256 << 20}

HeadObserver = Callable[[Tensor, Tensor, Tensor], None]
"""Called per chunk with (hidden_CD, logit_grad_CV, example_C) if the engine observes the head."""

Objective = Callable[[Batch, HeadObserver | None], tuple[Tensor, Tensor]]
"""(objective summed over a batch, to differentiate; its value per example [B])."""


class Pointwise(Protocol):
    """A loss that is a function of each token's logits."""

    def __call__(self, rows: slice, logits_CV: Tensor, want_grad: bool) -> tuple[Tensor, Tensor]:
        """Token losses and their weighted gradient with respect to the logits.

        May overwrite `logits_CV`. Without `want_grad` the second result is unspecified.
        """
        ...


@dataclass(frozen=True)
class Positions:
    """The label positions of a batch, at which response tokens are predicted."""

    row_M: Tensor
    """Example of the batch that each position belongs to."""
    column_M: Tensor
    """Position whose hidden state predicts the token."""
    target_M: Tensor
    """The token to predict."""
    count_B: Tensor
    """Number of response tokens of each example (T_n)."""

    @classmethod
    def of(cls, batch: Batch) -> Positions:
        shifted = batch.labels[:, 1:]
        row, column = torch.nonzero(shifted != -100, as_tuple=True)
        count = torch.bincount(row, minlength=shifted.shape[0])
        return cls(row, column, shifted[row, column], count)

    def per_token(self, value_B: Tensor) -> Tensor:
        """Divide each example's value by T_n and repeat it for each of its tokens."""
        return (value_B / self.count_B)[self.row_M]

    def per_example_mean(self, value_M: Tensor) -> Tensor:
        """Mean over the tokens of each example, in fp64 where the device supports it."""
        wide = reduction_dtype(value_M.device)
        total = torch.zeros(len(self.count_B), dtype=wide, device=value_M.device)
        return total.index_add_(0, self.row_M, value_M.to(wide)) / self.count_B


def model_inputs(module: nn.Module, batch: Batch) -> dict[str, Any]:
    """Arguments of a forward pass.

    Models that derive positions themselves (ALiBi) take no `position_ids`. A right-padded batch
    needs no mask: causal attention never sees the padding, and attention without a mask has faster
    kernels.
    """
    given: dict[str, Any] = {"input_ids": batch.input_ids}
    if not batch.padded_right:
        given["attention_mask"] = batch.attention_mask
    if accepts(module, "position_ids"):
        given["position_ids"] = batch.position_ids
    return given | {"use_cache": False}


def last_hidden(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Hidden states after the final norm, before the head: [B, T, D]."""
    decoder = text_decoder(model)
    return decoder(**model_inputs(decoder, batch)).last_hidden_state


@dataclass(frozen=True)
class LogitMap:
    """The map applied to the output z of the linear head: cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> LogitMap:
        """Read from the model's config (Granite, Cohere, Falcon-H1; Gemma-2). Every run checks on
        one row that the model really applies it (`scores.check_fused_loss`)."""
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(scale, float(cap) if cap else None)

    def apply_(self, logits: Tensor) -> Tensor:
        """Apply the map in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def slope(self, mapped: Tensor) -> Tensor | float | None:
        """Derivative at the mapped logits: scale · (1 − (logit / cap)²); None if it is 1."""
        if self.cap is None:
            return None if self.scale == 1.0 else self.scale
        return (mapped / self.cap).square_().neg_().add_(1.0).mul_(self.scale)


@dataclass(frozen=True)
class Head:
    """Output head: a linear map from hidden states to logits, then the model's `LogitMap`."""

    linear: nn.Linear
    shape: LogitMap

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        return cls(output_head(model), LogitMap.of(model))

    def raw(self, hidden: Tensor) -> Tensor:
        """Output of the linear map in fp32 (fp64 for an fp64 model), for any dtype of the weights.

        On CUDA the product is not rounded to half precision: a logit of 20 in bf16 would be off by
        up to 0.06.
        """
        weight, bias = self.linear.weight, self.linear.bias
        wide = accumulation_dtype(weight.dtype)
        if hidden.is_cuda and weight.dtype != wide:
            product = torch.mm(hidden, weight.T, out_dtype=wide)
            return product if bias is None else product.add_(bias)
        return nn.functional.linear(hidden, weight, bias).to(wide)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's logits, in the dtype of `raw`."""
        return self.shape.apply_(self.raw(hidden))

    @property
    def chunk_rows(self) -> int:
        """Number of positions whose fp32 logits fit into `CHUNK_BYTES`."""
        weight = self.linear.weight
        limit = CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cpu"])
        return max(1, limit // (4 * weight.shape[0]))

    def chunks(self, num_rows: int) -> list[slice]:
        """Split `num_rows` positions into chunks of `chunk_rows`."""
        size = self.chunk_rows
        return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


class CrossEntropy:
    """−log softmax(logits)[target], weighted per token.

    `weigh`, if given, maps the token losses to additional weights, which carry no gradient.
    """

    def __init__(
        self,
        target_M: Tensor,
        weight_M: Tensor,
        weigh: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.target_M, self.weight_M, self.weigh = target_M, weight_M, weigh

    @classmethod
    def unweighted(cls, positions: Positions) -> CrossEntropy:
        return cls(positions.target_M, torch.ones_like(positions.target_M, dtype=torch.float32))

    def _weights(self, rows: slice, value_C: Tensor) -> Tensor:
        weight = self.weight_M[rows].to(value_C.dtype)
        return weight if self.weigh is None else weight * self.weigh(value_C)

    def in_one_kernel(
        self, rows: slice, logits_CV: Tensor, grad_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor] | None:
        """`__call__` by the fused kernel, with the gradient in `grad_dtype` (None: no gradient).

        Returns None if there is no kernel for these logits.
        """
        kernels = kernels_for(logits_CV)
        if kernels is None:
            return None
        target, weight = self.target_M[rows], self.weight_M[rows].to(logits_CV.dtype)
        if self.weigh is not None and grad_dtype is not None:  # `weigh` needs the losses first
            weight = self._weights(rows, kernels.cross_entropy(logits_CV, target, weight, None))
        grad = None if grad_dtype is None else torch.empty_like(logits_CV, dtype=grad_dtype)
        value = kernels.cross_entropy(logits_CV, target, weight, grad)
        return value, logits_CV if grad is None else grad

    def __call__(self, rows: slice, logits_CV: Tensor, want_grad: bool) -> tuple[Tensor, Tensor]:
        target = self.target_M[rows, None]
        lse = logits_CV.logsumexp(-1, keepdim=True)
        value = (lse - logits_CV.gather(-1, target)).squeeze(-1)
        if want_grad:
            logits_CV.sub_(lse).exp_()
            logits_CV.scatter_add_(-1, target, torch.full_like(lse, -1.0))
            logits_CV.mul_(self._weights(rows, value)[:, None])
        return value, logits_CV


class Distillation:
    """τ² KL(teacher ‖ student) at temperature τ, weighted per token; logit gradient τ (p − q)."""

    def __init__(
        self, teacher_MD: Tensor, head: Head, tau: float, weight_M: Tensor | None = None
    ) -> None:
        self.teacher_MD, self.head, self.tau, self.weight_M = teacher_MD, head, tau, weight_M

    def __call__(self, rows: slice, logits_CV: Tensor, want_grad: bool) -> tuple[Tensor, Tensor]:
        log_q = torch.log_softmax(self.head.logits(self.teacher_MD[rows]) / self.tau, -1)
        log_p = torch.log_softmax(logits_CV / self.tau, -1)
        q = log_q.exp()
        value = self.tau**2 * (q * (log_q - log_p)).sum(-1)
        if not want_grad:
            return value, logits_CV
        assert self.weight_M is not None
        gradient = log_p.exp_().sub_(q)
        return value, gradient.mul_(self.tau * self.weight_M[rows, None].to(gradient.dtype))

    def entropies(self) -> Tensor:
        """The teacher's entropy per token, at temperature 1, in nats: [M]."""
        parts = []
        for rows in self.head.chunks(len(self.teacher_MD)):
            log_q = torch.log_softmax(self.head.logits(self.teacher_MD[rows]), -1)
            parts.append(-(log_q.exp() * log_q).sum(-1))
        return torch.cat(parts)


def _token_losses(
    head: Head, pointwise: Pointwise, rows: slice, hidden_CD: Tensor, want_grad: bool
) -> tuple[Tensor, Tensor]:
    """Token losses of a chunk and their weighted gradient with respect to the raw logits."""
    logits = head.logits(hidden_CD)
    if isinstance(pointwise, CrossEntropy) and head.shape == LogitMap():
        found = pointwise.in_one_kernel(rows, logits, hidden_CD.dtype if want_grad else None)
        if found is not None:
            return found
    slope = head.shape.slope(logits) if want_grad else None  # first: the loss may overwrite logits
    value, gradient = pointwise(rows, logits, want_grad)
    return value, gradient if slope is None else gradient.mul_(slope)


class HeadLoss(torch.autograd.Function):
    """Weighted sum of a pointwise loss over label positions.

    The forward computes the gradients chunk by chunk and stores them; the backward only scales
    them. The first output is a zero that carries the gradient, the second the token losses.
    """

    @staticmethod
    def forward(
        ctx,  # noqa: ANN001
        hidden_MD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        pointwise: Pointwise,
        observer: HeadObserver | None,
        example_M: Tensor,
        want_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden_MD) if want_grad else None
        wide = accumulation_dtype(weight.dtype)
        train_weight = want_grad and ctx.needs_input_grad[1]
        train_bias = want_grad and bias is not None and ctx.needs_input_grad[2]
        grad_weight = torch.zeros_like(weight) if train_weight else None
        grad_bias = torch.zeros_like(bias) if train_bias else None  # pyright: ignore
        values = []
        for rows in head.chunks(len(hidden_MD)):
            hidden = hidden_MD[rows]
            value, gradient = _token_losses(head, pointwise, rows, hidden, want_grad)
            values.append(value)
            if grad_hidden is None:
                continue
            narrow = gradient.to(weight.dtype)
            torch.mm(narrow, weight, out=grad_hidden[rows])
            if observer is not None:
                observer(hidden, gradient, example_M[rows])
            if grad_weight is not None:
                grad_weight.addmm_(narrow.T, hidden)
            if grad_bias is not None:
                grad_bias.add_(narrow.sum(0))
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        value_M = torch.cat(values) if values else hidden_MD.new_zeros(0, dtype=wide)
        ctx.mark_non_differentiable(value_M)
        return hidden_MD.new_zeros((), dtype=wide), value_M

    @staticmethod
    def backward(ctx, grad_objective: Tensor, _: Tensor):  # noqa: ANN001, ANN205
        gradients = ctx.gradients
        ctx.gradients = None
        scaled = [None if g is None else g.mul_(grad_objective.to(g.dtype)) for g in gradients]
        return *scaled, None, None, None, None, None


def head_objective(
    model: PreTrainedModel,
    hidden_BTD: Tensor,
    positions: Positions,
    pointwise: Pointwise,
    observer: HeadObserver | None = None,
) -> tuple[Tensor, Tensor]:
    """(objective to call backward on, token losses [M]). The value of the objective is always 0."""
    head = Head.of(model)
    linear, hidden_MD = head.linear, hidden_BTD[positions.row_M, positions.column_M]
    want_grad = torch.is_grad_enabled() and (
        hidden_MD.requires_grad or any(p.requires_grad for p in linear.parameters())
    )
    result = HeadLoss.apply(
        hidden_MD, linear.weight, linear.bias, head, pointwise, observer, positions.row_M, want_grad
    )
    assert result is not None
    return result


def example_objective(
    model: PreTrainedModel,
    batch: Batch,
    scale: float = 1.0,
    observer: HeadObserver | None = None,
) -> tuple[Tensor, Tensor]:
    """(Σ_n scale · loss_n to differentiate, loss_n [B]), summed over the examples of the batch."""
    positions = Positions.of(batch)

    def work() -> tuple[Tensor, Tensor]:
        hidden = last_hidden(model, batch)
        weight = positions.per_token(
            torch.full_like(positions.count_B, scale, dtype=accumulation_dtype(hidden.dtype))
        )
        loss = CrossEntropy(positions.target_M, weight)
        return head_objective(model, hidden, positions, loss, observer)

    objective, value_M = through(model, work)
    return objective, positions.per_example_mean(value_M)


def weighted_objective(
    model: PreTrainedModel,
    batch: Batch,
    weight_M: Tensor,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(Σ_m weight_m · weigh(loss_m) · loss_m to differentiate, the unweighted loss_n [B]).

    m runs over the response tokens of the batch, example by example; `weigh` has no gradient.
    """
    positions = Positions.of(batch)
    loss = CrossEntropy(positions.target_M, weight_M, weigh)
    objective, value_M = head_objective(model, last_hidden(model, batch), positions, loss)
    return objective, positions.per_example_mean(value_M)


@torch.no_grad()
def token_losses(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, ...]:
    """−log p of every response token, one tensor per example."""
    positions = Positions.of(batch)
    loss = CrossEntropy.unweighted(positions)
    _, value_M = head_objective(model, last_hidden(model, batch), positions, loss)
    return value_M.split(positions.count_B.tolist())


def distillation_objective(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    batch: Batch,
    tau: float,
    scale: float = 1.0,
    observer: HeadObserver | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """CWSD of a batch: (Σ_n scale · ω_n · mean KL_n to differentiate, mean KL_n [B], ω_n [B])."""
    positions = Positions.of(batch)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            teacher_MD = last_hidden(teacher, batch)[positions.row_M, positions.column_M]
            head = Head.of(teacher)
            loss = Distillation(teacher_MD, head, tau)
            entropy = positions.per_example_mean(loss.entropies())
            omega = 1.0 - entropy / math.log(head.linear.weight.shape[0])
            loss.weight_M = positions.per_token(omega * scale)
        return *through(student, lambda: taught(loss)), omega

    def taught(loss: Distillation) -> tuple[Tensor, Tensor]:
        hidden = last_hidden(student, batch)
        return head_objective(student, hidden, positions, loss, observer)

    objective, value_M, omega = through(teacher, work)
    return objective, positions.per_example_mean(value_M), omega


@dataclass(frozen=True)
class Comparison:
    """Two models on the same tokens; one value per example."""

    loss_before: Tensor
    loss_after: Tensor
    divergence: Tensor
    """Mean KL(before ‖ after) over the response tokens."""


@torch.no_grad()
def comparison(before: PreTrainedModel, after: PreTrainedModel, batch: Batch) -> Comparison:
    """Losses of both models and the KL between them, with one forward pass of each."""
    positions = Positions.of(batch)

    def work() -> Comparison:
        hidden = {m: last_hidden(m, batch) for m in (before, after)}
        loss = CrossEntropy.unweighted(positions)
        teacher_MD = hidden[before][positions.row_M, positions.column_M]
        divergence = Distillation(teacher_MD, Head.of(before), tau=1.0)
        values = [
            head_objective(model, hidden[model], positions, pointwise)[1]
            for model, pointwise in ((before, loss), (after, loss), (after, divergence))
        ]
        return Comparison(*(positions.per_example_mean(v) for v in values))

    return through(before, lambda: through(after, work))


@torch.no_grad()
def both_logits(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits at the label positions by `Head` and by the model's own forward: [M, V] each, in one
    dtype."""
    positions = Positions.of(batch)

    def work() -> tuple[Tensor, Tensor]:
        hidden = last_hidden(model, batch)[positions.row_M, positions.column_M]
        logits = type(model).forward(model, **model_inputs(model, batch)).logits
        return Head.of(model).logits(hidden), logits[positions.row_M, positions.column_M]

    ours, own = through(model, work)
    return ours, own.to(ours.dtype)


def plain_example_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The example loss from the model's own logits: a slow path, used to check the fast one."""
    logits = model(**model_inputs(model, batch)).logits
    positions = Positions.of(batch)
    chosen = logits[positions.row_M, positions.column_M].to(accumulation_dtype(logits.dtype))
    token = torch.nn.functional.cross_entropy(chosen, positions.target_M, reduction="none")
    weight = positions.per_token(torch.ones_like(positions.count_B, dtype=token.dtype))
    return (token * weight).sum()
