"""The exact rule of each layer class: what one use of a parameter adds to a per-example gradient.

Algorithm 1 lines 3, 5, 6 (sums) and 8 (GhostDot). With input a_t and output gradient ε_t:

    linear      g_n = Σ_t ε_t a_tᵀ          dot Σ_t ε_t · (U a_t)      bound Σ_t ‖ε_t‖ ‖a_t‖
    bias        g_n = Σ_t ε_t               dot g_n · u                bound ‖g_n‖
    embedding   g_n[i] = Σ_{t: id_t=i} ε_t  dot Σ_t ε_t · U[id_t]      bound Σ_t ‖ε_t‖
    norm        g_n = Σ_t ε_t ⊙ x̂_t         dot g_n · u                bound ‖g_n‖
    head        as linear, called per chunk with the logit gradient
    experts     as linear for each expert (`engine/experts.py`)

A parameter used several times (a tied head) is observed by several rules: sums, dots and bounds
add up. Squares do not. With `Taps.squared` (Σ_n g_n ⊙ g_n instead of Σ_n g_n, and ‖g_n‖ instead of
its bound) each g_n is formed, a few at a time, and freed.

`_rule_for` in `engine/ghost.py` chooses the rule of a module. A new class of linear maps is also
added to `is_linear` in `model/load.py`.

Shape letters: B examples, T positions, I inputs, O outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from dualsft.engine.fused import kernels_for
from dualsft.errors import RunError
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype

if TYPE_CHECKING:
    from dualsft.engine.ghost import Taps


MIXED = "its input is not (example, token, feature), so the examples of a batch cannot be separated"

APART_BYTES = 256 << 20
"""Maximum bytes of per-example gradients formed at a time."""


def add_product(total_OI: Tensor, left: Tensor, right: Tensor) -> None:
    """total += leftᵀ right; low-precision factors are accumulated in the dtype of `total_OI`."""
    if left.dtype == total_OI.dtype:
        total_OI.addmm_(left.T, right)
    elif left.is_cuda:  # low-precision inputs, accumulated and returned in the total's dtype
        torch.addmm(total_OI, left.T, right, out_dtype=total_OI.dtype, out=total_OI)
    else:
        total_OI.addmm_(left.T.to(total_OI.dtype), right.to(total_OI.dtype))


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Σ over all but the first dimension of a ⊙ b: [B]. May overwrite `a`.

    (A batched matrix product would avoid the pass over memory, but on a CPU it costs more than the
    layer's own product; see docs/performance.md.)
    """
    wide = accumulation_dtype(a.dtype)
    return a.to(wide).mul_(b).flatten(1).sum(1).to(reduction_dtype(a.device))


def token_norms(x: Tensor) -> Tensor:
    """‖x_t‖: [B, T]. Cached on the tensor, because q, k and v share their input."""
    kept = getattr(x, "_dualsft_norms", None)
    if kept is None:
        wide = accumulation_dtype(x.dtype)
        kept = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide)
        x._dualsft_norms = kept  # pyright: ignore[reportAttributeAccessIssue]
    return kept


class Rule:
    """A module and the candidates it owns."""

    def __init__(self, module: nn.Module, used: dict[str, str]) -> None:
        """`used` maps the name inside the module ("weight", "bias") to the candidate's name."""
        self.module = module
        self.weight = used.get("weight")
        self.bias = used.get("bias")
        self.names = list(used.values())

    flat = False
    """Whether the input is one list of tokens, example after example; found when it is bound."""

    def separates(self, x: Tensor, num_examples: int) -> bool:
        """Whether the examples are the first of three or more dimensions of this input, or all its
        rows are in their order."""
        if self.flat and x.ndim == 2:
            return len(x) % num_examples == 0
        return x.ndim >= 3 and len(x) == num_examples

    @property
    def weights(self) -> dict[str, bool]:
        """The candidates that a sketch covers; True for those stored [I, O] or [E, I, O]."""
        return {}

    def attached(self, taps: Taps) -> AbstractContextManager[None]:
        """Context in which the uses of the module are observed."""
        raise NotImplementedError(f"{type(self).__name__} is observed in another way")

    def observe_vector(self, taps: Taps, name: str, gradient_BO: Tensor) -> None:
        """Observe a 1-D parameter, whose per-example gradients are small enough to be formed."""
        wide = gradient_BO.to(taps.dtype)
        if taps.squared:
            taps.square_once(name)
        if taps.placement.has_sums:
            with taps.placement.sum_block(name) as total:
                total.add_((wide.square() if taps.squared else wide).sum(0))
        if taps.placement.has_direction:
            dtype = reduction_dtype(wide.device)
            taps.add_dots(wide.to(dtype) @ taps.placement.direction_block(name, dtype))
        if taps.bounds:
            taps.add_bound(name, torch.linalg.vector_norm(wide, dim=-1))


class LinearRule(Rule):
    """Rule of nn.Linear (weight [O, I]) and of GPT-2's Conv1D (weight [I, O])."""

    def __init__(self, module: nn.Module, used: dict[str, str]) -> None:
        super().__init__(module, used)
        self.transposed = isinstance(module, Conv1D)

    @property
    def weights(self) -> dict[str, bool]:
        return {} if self.weight is None else {self.weight: self.transposed}

    @contextmanager
    def attached(self, taps: Taps) -> Iterator[None]:
        self.module.forward = lambda x: tapped_linear(x, self, taps)
        try:
            yield
        finally:
            del self.module.forward

    def weight_OI(self) -> Tensor:
        weight = self.module.get_parameter("weight")
        return weight.T if self.transposed else weight

    def map_of(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as they multiply `x`."""
        return self.weight_OI(), getattr(self.module, "bias", None)

    def kept(self, taps: Taps, x_BTI: Tensor) -> Tensor:
        """What `observe` needs of the input: all of it, or for sketches alone a few numbers."""
        if not taps.sketches_only or self.weight is None:
            return x_BTI
        assert taps.sketch is not None
        return taps.sketch.of_inputs(self.weight, x_BTI)

    def observe(self, taps: Taps, x_BTI: Tensor, norms_BT: Tensor | None, grad_BTO: Tensor) -> None:
        """Collect from one use; `x_BTI` is what `kept` returned."""
        if self.bias is not None:
            self.observe_vector(taps, self.bias, grad_BTO.to(taps.dtype).sum(1))
        name = self.weight
        if name is None:
            return
        if taps.squared:
            self._observe_squares(taps, name, x_BTI, grad_BTO)
        if taps.sketch is not None:
            right_BTq = x_BTI if taps.sketches_only else taps.sketch.of_inputs(name, x_BTI)
            taps.add_sketch(taps.sketch.of_tokens(name, right_BTq, grad_BTO))
            if taps.sketches_only:
                return
        x_MI, grad_MO = x_BTI.flatten(0, 1), grad_BTO.flatten(0, 1)
        if taps.placement.has_sums and not taps.squared:
            left, right = (x_MI, grad_MO) if self.transposed else (grad_MO, x_MI)
            with taps.placement.sum_block(name) as total:
                add_product(total, left, right)
        if taps.placement.has_direction:
            block = taps.placement.direction_block(name, x_BTI.dtype)
            moved = x_MI @ (block if self.transposed else block.T)
            kernels = kernels_for(moved)
            if kernels is not None:
                norms_M = None if norms_BT is None else norms_BT.flatten()
                taps.add_tokens(kernels, name, moved, grad_MO, norms_M)
                return
            taps.add_dots(row_dots(moved.view_as(grad_BTO), grad_BTO))
        if norms_BT is not None:
            gradient = torch.linalg.vector_norm(grad_BTO, dim=-1, dtype=taps.dtype)
            taps.add_bound(name, (gradient * norms_BT).sum(1))

    def _observe_squares(self, taps: Taps, name: str, x_BTI: Tensor, grad_BTO: Tensor) -> None:
        """Form the gradient of each example, for its squares and its norm."""
        taps.square_once(name)
        left, right = (x_BTI, grad_BTO) if self.transposed else (grad_BTO, x_BTI)
        num_bytes = left.shape[-1] * right.shape[-1] * taps.dtype.itemsize
        at_once, norms = max(1, APART_BYTES // num_bytes), []
        for a, b in zip(left.split(at_once), right.split(at_once), strict=True):
            squares = torch.bmm(a.mT.to(taps.dtype), b.to(taps.dtype)).square_()
            norms.append(squares.flatten(1).sum(1).sqrt_())
            if taps.placement.has_sums:
                with taps.placement.sum_block(name) as total:
                    total.add_(squares.sum(0))
        if taps.bounds:
            taps.add_bound(name, torch.cat(norms))


class _TappedLinear(torch.autograd.Function):
    """A linear map whose backward passes (input, output gradient) to its rule."""

    @staticmethod
    def forward(ctx, x: Tensor, rule: LinearRule, taps: Taps) -> Tensor:  # noqa: ANN001
        if not rule.separates(x, taps.num_examples):
            raise RunError(f"{rule.names[0]}: {MIXED}; leave it out of score.candidates")
        ctx.rule, ctx.taps = rule, taps
        seen = _in_tokens(x, taps.num_examples)
        bounded = taps.bounds and not taps.squared and rule.weight is not None
        ctx.norms = token_norms(seen) if bounded else None
        ctx.save_for_backward(rule.kept(taps, seen))
        return nn.functional.linear(x, *rule.map_of(x))

    @staticmethod
    def backward(ctx, grad: Tensor):  # noqa: ANN001, ANN205
        (kept,) = ctx.saved_tensors
        seen = _in_tokens(grad, ctx.taps.num_examples)
        ctx.rule.observe(ctx.taps, kept, ctx.norms, seen.contiguous())
        grad_x = grad @ ctx.rule.map_of(grad)[0] if ctx.needs_input_grad[0] else None
        return grad_x, None, None


def tapped_linear(x: Tensor, rule: LinearRule, taps: Taps) -> Any:
    """The linear map of a module, observed by its rule in the backward pass."""
    return _TappedLinear.apply(x, rule, taps)


def _in_tokens(x: Tensor, num_examples: int) -> Tensor:
    """As [B, T, features], from a list of tokens or from more dimensions."""
    if x.ndim == 2:
        return x.unflatten(0, (num_examples, -1))
    return x if x.ndim == 3 else x.flatten(1, -2)


class _OutputRule(Rule):
    """A rule that needs only the module's inputs and the gradient of its output (two hooks)."""

    @contextmanager
    def attached(self, taps: Taps) -> Iterator[None]:
        def after_forward(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not self.separates(inputs[0], taps.num_examples):
                raise RunError(f"{self.names[0]}: {MIXED}; leave it out of score.candidates")
            output = output if output.requires_grad else output.requires_grad_()
            sources = tuple(x.detach() for x in inputs)
            output.register_hook(lambda grad: self.observe(taps, sources, grad))
            return output

        handle = self.module.register_forward_hook(after_forward)
        try:
            yield
        finally:
            handle.remove()

    @abstractmethod
    def observe(self, taps: Taps, sources: tuple[Tensor, ...], grad: Tensor) -> None: ...

    def with_weight(self, weight: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """Run the module's forward with another weight and a zero bias."""
        changed = {"weight": weight}
        if getattr(self.module, "bias", None) is not None:
            changed["bias"] = torch.zeros_like(self.module.get_parameter("bias"))
        return functional_call(self.module, changed, sources)


class EmbeddingRule(_OutputRule):
    """Rule of nn.Embedding and its scaled subclasses: the output is scale · W[token]."""

    module: nn.Embedding

    def __init__(self, module: nn.Embedding, used: dict[str, str]) -> None:
        super().__init__(module, used)
        weight = module.get_parameter("weight")
        probe = torch.ones(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        first = torch.zeros(1, 1, dtype=torch.long, device=probe.device)
        values = self._unpadded(probe, first)
        if not bool((values == values.flatten()[0]).all()):
            raise RunError(
                f"{self.weight}: the embedding does not scale all its entries by one factor, so "
                "no exact rule covers it; leave it out of score.candidates"
            )
        self.scale = float(values.flatten()[0])

    def separates(self, x: Tensor, num_examples: int) -> bool:
        """Whether this input is [B, T]: token or position ids."""
        return x.ndim == 2 and len(x) == num_examples

    def _unpadded(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Run the module's forward with another weight and without a padding index."""
        padding, self.module.padding_idx = self.module.padding_idx, None
        try:
            return functional_call(self.module, {"weight": weight}, (ids,))
        finally:
            self.module.padding_idx = padding

    @torch.no_grad()
    def observe(self, taps: Taps, sources: tuple[Tensor, ...], grad: Tensor) -> None:
        assert self.weight is not None
        (source,) = sources
        wide = grad.to(taps.dtype) * self.scale
        padding = self.module.padding_idx
        if padding is not None:  # as in autograd, the padding row gets no gradient
            wide = wide.masked_fill((source == padding).unsqueeze(-1), 0.0)
        if taps.placement.has_sums:
            with taps.placement.sum_block(self.weight) as total:
                total.index_add_(0, source.flatten(), wide.flatten(0, 1))
        if taps.placement.has_direction:
            factor = taps.placement.direction_block(self.weight, self.module.weight.dtype)
            rows = nn.functional.embedding(source, factor)
            taps.add_dots(row_dots(rows, wide))
        if taps.bounds:
            taps.add_bound(self.weight, torch.linalg.vector_norm(wide, dim=-1).sum(1))


class NormRule(_OutputRule):
    """Rule of any norm that is affine in its weight, x̂ ⊙ (c + w) + b: RMSNorm, Gemma, LayerNorm.

    x̂ is computed by the module itself, as the difference between its outputs with weight one and
    weight zero. The first use checks that the output is affine in the weight.
    """

    checked = False

    @staticmethod
    def rounding(dtype: torch.dtype) -> float:
        """Tolerance for rounding; many norms compute in fp32 for any dtype of the model."""
        coarse = torch.finfo(dtype).eps
        single = torch.finfo(torch.float32).eps
        return 8 * coarse if coarse > single else 64 * single

    def _check(self, sources: tuple[Tensor, ...], unit: Tensor, zero: Tensor) -> None:
        weight = self.module.get_parameter("weight")
        expected = zero + unit * weight
        actual = self.with_weight(weight, sources)
        scale = float(expected.abs().max()) or 1.0
        if float((expected - actual).abs().max()) > self.rounding(weight.dtype) * scale:
            raise RunError(
                f"{self.weight or self.bias}: {type(self.module).__name__} is not affine in its "
                "weight, so no exact rule covers it; leave it out of score.candidates"
            )
        self.checked = True

    @torch.no_grad()
    def observe(self, taps: Taps, sources: tuple[Tensor, ...], grad: Tensor) -> None:
        wide = grad.to(taps.dtype)
        if self.bias is not None:
            self.observe_vector(taps, self.bias, _per_example(wide, taps.num_examples))
        if self.weight is not None:
            weight = self.module.get_parameter("weight")
            zero = self.with_weight(torch.zeros_like(weight), sources)
            unit = self.with_weight(torch.ones_like(weight), sources) - zero
            if not self.checked:
                self._check(sources, unit, zero)
            wide = wide * unit.to(taps.dtype)
            self.observe_vector(taps, self.weight, _per_example(wide, taps.num_examples))


def _per_example(gradient: Tensor, num_examples: int) -> Tensor:
    """Sum over all positions of each example: [B, O]."""
    return gradient.reshape(num_examples, -1, gradient.shape[-1]).sum(1)


class HeadRule(Rule):
    """Rule of the output head; `losses.HeadLoss` calls it per chunk of (hidden, logit gradient)."""

    def observe(self, taps: Taps, hidden: Tensor, grad: Tensor, example: Tensor) -> None:
        if self.bias is not None:
            shape = (taps.num_examples, grad.shape[-1])
            gradient = torch.zeros(shape, dtype=taps.dtype, device=grad.device)
            # a chunk may hold only some tokens of an example: by the triangle inequality the norms
            # of the chunks still add up to a bound
            gradient.index_add_(0, example, grad.to(taps.dtype))
            self.observe_vector(taps, self.bias, gradient)
        name = self.weight
        if name is None:
            return
        if taps.placement.has_sums:
            with taps.placement.sum_block(name) as sums:
                add_product(sums, grad.to(hidden.dtype), hidden)
        if taps.placement.has_direction:
            moved = hidden @ taps.placement.direction_block(name, hidden.dtype).T
            dots = row_dots(moved, grad.to(moved.dtype))
            taps.add_dots(dots.new_zeros(taps.num_examples).index_add_(0, example, dots))
        if taps.bounds:
            norms = torch.linalg.vector_norm(hidden, dim=-1, dtype=taps.dtype)
            value = torch.linalg.vector_norm(grad, dim=-1, dtype=taps.dtype) * norms
            total = torch.zeros(taps.num_examples, dtype=taps.dtype, device=value.device)
            taps.add_bound(name, total.index_add_(0, example, value))
