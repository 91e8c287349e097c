"""The exact rules of routed experts and of routers.

Algorithm 1 lines 3, 5, 6 (sums) and 8 (GhostDot), as `engine/rules.py`. A layer of experts sees the
tokens of all examples as one list. Each token goes to k experts: to k slots. While it is observed,
its forward sorts the slots by expert and multiplies the consecutive rows of an expert with that
expert's matrix; each row keeps the number of its example. With input a_s and output gradient ε_s of
slot s, of example n(s) and expert e(s):

    sums      G[e] = Σ_{s: e(s)=e} ε_s a_sᵀ
    dots      Σ_{s: n(s)=n} ε_s · (U[e(s)] a_s)
    bounds    (Σ_e (Σ_{s: e(s)=e, n(s)=n} ‖ε_s‖ ‖a_s‖)²)^½
    sketches  the weight as one matrix [E·O, I] ([E·I, O]): own signs for each expert on that side

Routing weights multiply the outputs, so they are part of ε; the gradient through them reaches the
router as in any backward pass. An expert without a token has gradient zero; a slot without an
expert (an index of E or more) contributes nothing. Experts that are modules of their own (a
ModuleList) are observed one by one: the numbers of their tokens are followed through the layer.

A router is a linear map inside a module that also chooses the experts. Its one product is observed
where it happens, within the module's own forward.

Shape letters: B examples, M tokens of all examples, S slots, E experts, I inputs, O outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dualsft.engine.rules import MIXED, LinearRule, Rule, add_product, row_dots, tapped_linear
from dualsft.errors import RunError
from dualsft.model.experts import expert_weights

if TYPE_CHECKING:
    from dualsft.engine.ghost import Taps

CHECKED_TOKENS = 8
"""Tokens of the first use on which the forward here is compared with the module's own."""


@dataclass(frozen=True)
class Routing:
    """The slots of one use, sorted by expert."""

    order_S: Tensor
    """Slot of each row; slot s is of token s // k."""
    inverse_S: Tensor
    """Row of each slot."""
    expert_S: Tensor
    example_S: Tensor
    spans: list[tuple[int, int, int]]
    """Expert and range of rows, for each expert with a token."""
    num_examples: int
    num_experts: int

    @classmethod
    def of(cls, index_Mk: Tensor, num_experts: int, num_examples: int) -> Routing:
        expert_S, order_S = torch.sort(index_Mk.flatten(), stable=True)
        inverse_S = torch.empty_like(order_S)
        inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        kept = expert_S.clamp(max=num_experts)
        counts = torch.bincount(kept, minlength=num_experts + 1)[:num_experts].tolist()
        spans, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                spans.append((expert, start, start + count))
            start += count
        example_S = order_S // (len(order_S) // num_examples)
        kept = kept.clamp(max=num_experts - 1)
        return cls(order_S, inverse_S, kept, example_S, spans, num_examples, num_experts)

    @classmethod
    def alone(cls, example_S: Tensor, num_examples: int) -> Routing:
        """The rows of one expert that is a module of its own."""
        order_S, zero = torch.arange(len(example_S), device=example_S.device), example_S * 0
        spans = [(0, 0, len(example_S))]
        return cls(order_S, order_S, zero, example_S, spans, num_examples, 1)

    def product(self, x_SI: Tensor, weight_EIO: Tensor) -> Tensor:
        """The rows of each expert times its matrix; zero for rows without an expert: [S, O]."""
        out = x_SI.new_zeros(len(x_SI), weight_EIO.shape[-1])
        for expert, start, stop in self.spans:
            torch.mm(x_SI[start:stop], weight_EIO[expert], out=out[start:stop])
        return out

    def per_example(self, values_S: Tensor) -> Tensor:
        total = values_S.new_zeros(self.num_examples)
        return total.index_add_(0, self.example_S, values_S)

    def in_tokens(self, rows_SF: Tensor) -> Tensor:
        """Rows as slots in the order of the examples: [B, slots of an example, F]."""
        return rows_SF[self.inverse_S].unflatten(0, (self.num_examples, -1))


class ExpertsRule(Rule):
    """Rule of the fused experts of one layer: weights [E, O, I] or [E, I, O], biases [E, O]."""

    def __init__(self, module: Any, used: dict[str, str]) -> None:
        super().__init__(module, used)
        self.experts = module
        self.used = used
        self.checked = False

    @property
    def weights(self) -> dict[str, bool]:
        own = expert_weights(self.experts)
        return {self.used[n]: self.experts.is_transposed for n in own if n in self.used}

    @contextmanager
    def attached(self, taps: Taps) -> Iterator[None]:
        own = inspect.unwrap(type(self.module).forward)

        def forward(*inputs: Any, **named: Any) -> Tensor:
            _, *given = inspect.signature(own).bind(self.module, *inputs, **named).args
            hidden, index, weights = given
            if not self.separates(hidden, taps.num_examples):
                raise RunError(f"{self.names[0]}: {MIXED}; leave it out of score.candidates")
            if not self.checked:
                self._check(own, hidden, index, weights)
            return self._forward(taps, hidden, index, weights)

        self.module.forward = forward
        try:
            yield
        finally:
            del self.module.forward

    def _forward(self, taps: Taps | None, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        experts, (first, second) = self.experts, expert_weights(self.experts)
        num_examples = 1 if taps is None else taps.num_examples
        routing = Routing.of(index, experts.num_experts, num_examples)
        slots = index.shape[-1]
        x: Any = _Rows.apply(hidden, routing.order_S // slots, routing.inverse_S, slots)
        x = _TappedExperts.apply(x, self, taps, routing, first)
        x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
        x = _TappedExperts.apply(x, self, taps, routing, second)
        if experts.has_post_expert_norm:
            x = experts.post_expert_norm(x)
        x = _Rows.apply(x, routing.inverse_S, routing.order_S, 1)
        weighted = x.unflatten(0, (-1, slots)) * weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden.dtype)

    @torch.no_grad()
    def _check(self, own: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Raise if the module's plain forward computes something else."""
        few = [x.detach()[:CHECKED_TOKENS] for x in (hidden, index, weights)]
        expected, actual = own(self.module, *few), self._forward(None, *few)
        scale = float(expected.abs().max()) or 1.0
        coarse = max(torch.finfo(hidden.dtype).eps, torch.finfo(weights.dtype).eps)
        if float((expected - actual).abs().max()) > 256 * coarse * scale:
            raise RunError(
                f"{self.names[0]}: {type(self.module).__name__} does not compute its experts as "
                "transformers' interface for experts says, so no exact rule covers it; leave it "
                "out of score.candidates"
            )
        self.checked = True

    def weight_EIO(self, own: str) -> Tensor:
        weight = self.module.get_parameter(own)
        return weight if self.experts.is_transposed else weight.mT

    def observe(
        self, taps: Taps, routing: Routing, own: str, x_SI: Tensor, grad_SO: Tensor
    ) -> None:
        assert not taps.squared, "the gradients of experts are not formed"
        name, bias = self.used.get(own), self.used.get(f"{own}_bias")
        if name is not None:
            if taps.sketch is not None:
                self._sketch(taps, routing, name, x_SI, grad_SO)
            _observe(taps, routing, name, x_SI, grad_SO, self.experts.is_transposed)
        if bias is not None:
            _observe(taps, routing, bias, None, grad_SO)

    def _sketch(
        self, taps: Taps, routing: Routing, name: str, x_SI: Tensor, grad_SO: Tensor
    ) -> None:
        assert taps.sketch is not None
        sides: list[Tensor] = []
        for side, rows in (("out", grad_SO), ("in", x_SI)):
            if (side == "in") == self.experts.is_transposed:  # the side with signs of each expert
                features = rows.shape[-1]
                signs = taps.sketch.signs(name, side, rows, routing.num_experts * features)
                moved = routing.product(rows, signs.unflatten(0, (-1, features)))
            else:
                moved = rows @ taps.sketch.signs(name, side, rows)
            sides.append(routing.in_tokens(moved))
        taps.add_sketch(taps.sketch.of_sides(*sides))


def _observe(
    taps: Taps,
    routing: Routing,
    name: str,
    x_SI: Tensor | None,
    grad_SO: Tensor,
    transposed: bool = False,
) -> None:
    """Observe one parameter: a stack of matrices or biases, or those of one expert.

    A bias (no `x_SI`) is a weight whose input is one.
    """
    x = grad_SO.new_ones(len(grad_SO), 1) if x_SI is None else x_SI

    def stacked(block: Tensor) -> Tensor:
        block = block.unsqueeze(-1) if x_SI is None else block
        return block if block.ndim == 3 else block.unsqueeze(0)

    if taps.placement.has_sums:
        left, right = (x, grad_SO) if transposed else (grad_SO, x)
        with taps.placement.sum_block(name) as total:
            for expert, start, stop in routing.spans:
                part = stacked(total)[expert]
                if x_SI is None:
                    part += grad_SO[start:stop].sum(0, dtype=part.dtype).unsqueeze(-1)
                else:
                    add_product(part, left[start:stop], right[start:stop])
    if taps.placement.has_direction:
        block = stacked(taps.placement.direction_block(name, x.dtype))
        moved_SO = routing.product(x, block if transposed else block.mT)
        taps.add_dots(routing.per_example(row_dots(moved_SO, grad_SO)))
    if taps.bounds:
        norms_S = torch.linalg.vector_norm(x, dim=-1, dtype=taps.dtype)
        norms_S *= torch.linalg.vector_norm(grad_SO, dim=-1, dtype=taps.dtype)
        each = norms_S.new_zeros(taps.num_examples * routing.num_experts)
        each.index_add_(0, routing.example_S * routing.num_experts + routing.expert_S, norms_S)
        taps.add_bound(name, torch.linalg.vector_norm(each.view(taps.num_examples, -1), dim=1))


class _Rows(torch.autograd.Function):
    """x[take]; in the backward pass the rows return to their slots, k of each token, and add up.

    Always in the same order, unlike the backward pass of an index.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor, back: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.slots = slots
        return x[take]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        rows = grad[back]
        return (
            rows if ctx.slots == 1 else rows.unflatten(0, (-1, ctx.slots)).sum(1),
            None,
            None,
            None,
        )


class _TappedExperts(torch.autograd.Function):
    """One product of each row with its expert's matrix; backward hands both sides to the rule."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rule: ExpertsRule, taps: Taps | None, routing: Routing, own: str
    ) -> Tensor:
        ctx.rule, ctx.taps, ctx.routing, ctx.own = rule, taps, routing, own
        ctx.save_for_backward(x)
        out = routing.product(x, rule.weight_EIO(own))
        if rule.experts.has_bias:
            bias = rule.module.get_parameter(f"{own}_bias")
            for expert, start, stop in routing.spans:
                out[start:stop] += bias[expert]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        ctx.rule.observe(ctx.taps, ctx.routing, ctx.own, x, grad)
        grad_x = ctx.routing.product(grad, ctx.rule.weight_EIO(ctx.own).mT)
        return grad_x, None, None, None, None


class RouterRule(LinearRule):
    """Rule of a router: the one product with its weight inside its own forward."""

    flat = True

    def map_of(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().map_of(x)  # the module may cast them, and its input
        return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)

    @contextmanager
    def attached(self, taps: Taps) -> Iterator[None]:
        own = self.module.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            with _Product(self, taps) as product:
                result = own(*inputs, **named)
            if product.count != 1:
                raise RunError(
                    f"{self.names[0]}: {type(self.module).__name__} does not use its weight in one "
                    "linear map, so no exact rule covers it; leave it out of score.candidates"
                )
            return result

        self.module.forward = forward
        try:
            yield
        finally:
            del self.module.forward


class _Product(TorchFunctionMode):
    """Taps the linear maps with a matrix of the router's shape: it has only one such matrix."""

    def __init__(self, rule: RouterRule, taps: Taps) -> None:
        super().__init__()
        self.rule, self.taps, self.count = rule, taps, 0
        self.shape = rule.weight_OI().shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and args[1].shape == self.shape:
            self.count += 1
            return tapped_linear(args[0].reshape(-1, self.shape[1]), self.rule, self.taps)
        return func(*args, **(kwargs or {}))


# --- experts that are modules of their own --------------------------------------------------------


class TokenRows:
    """Which token each row is that a layer of separate experts (a ModuleList) gives an expert.

    While its block runs, a second tensor of token numbers follows the hidden states through the
    operations that select or reshape rows.
    """

    def __init__(self, block: nn.Module, experts: Sequence[nn.Module]) -> None:
        self.block, self.experts = block, experts
        self.token_S: Tensor | None = None
        """Tokens of the expert that runs; None where they could not be followed."""
        self.per_example = 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        own = self.block.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            hidden = inputs[0] if inputs else named["hidden_states"]
            self.per_example = hidden.shape[1] if hidden.ndim == 3 else 0
            with _Followed(hidden) as followed, ExitStack() as stack:
                for expert in self.experts:
                    handle = expert.register_forward_pre_hook(partial(self._enter, followed))
                    stack.callback(handle.remove)
                return own(*inputs, **named)

        self.block.forward = forward
        try:
            yield
        finally:
            del self.block.forward

    def _enter(self, followed: _Followed, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        token = followed.tokens_of(inputs[0]) if inputs and self.per_example else None
        self.token_S = None if token is None else token.flatten()

    def covers(self, x: Tensor) -> bool:
        """Whether the rows of this input are tokens that were followed."""
        rows = x.numel() // x.shape[-1]
        return self.token_S is not None and rows == len(self.token_S)

    def routing(self, num_examples: int) -> Routing:
        assert self.token_S is not None
        return Routing.alone(self.token_S // self.per_example, num_examples)


_RESHAPES = {
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze),
    *(Tensor.contiguous, Tensor.clone, Tensor.to, Tensor.type, Tensor.float),
}
_SELECTS = {
    *(Tensor.__getitem__, Tensor.index_select, torch.index_select),
    *(Tensor.repeat_interleave, torch.repeat_interleave),
}


class _Followed(TorchFunctionMode):
    """Token numbers that follow the hidden states [B, T, H] through a block."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        shape = hidden.shape[:-1]
        numbers = torch.arange(shape.numel(), device=hidden.device).view(shape)
        self.known = {id(hidden): (hidden, numbers)}  # tensors are kept, so that ids stay theirs

    def tokens_of(self, x: Any) -> Tensor | None:
        return self.known.get(id(x), (None, None))[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        source: Any = args[0] if args else None
        numbers = self.tokens_of(source)
        if numbers is None or not isinstance(out, Tensor) or out.shape[-1:] != source.shape[-1:]:
            return out
        if func in _RESHAPES and out.numel() == source.numel():
            self.known[id(out)] = (out, numbers.reshape(out.shape[:-1]))
        elif func in _SELECTS:
            chosen = func(numbers, *args[1:], **named)
            if chosen.shape == out.shape[:-1]:
                self.known[id(out)] = (out, chosen)
        return out


class SeparateExpertRule(Rule):
    """Rule of a linear map inside an expert that is a module of its own."""

    def __init__(self, module: nn.Module, used: dict[str, str], tokens: TokenRows) -> None:
        super().__init__(module, used)
        self.linear, self.tokens = LinearRule(module, used), tokens

    def separates(self, x: Tensor, num_examples: int) -> bool:
        return self.tokens.covers(x)

    @property
    def weights(self) -> dict[str, bool]:
        return self.linear.weights

    @contextmanager
    def attached(self, taps: Taps) -> Iterator[None]:
        def forward(x: Tensor) -> Any:
            if not self.tokens.covers(x):
                raise RunError(f"{self.names[0]}: {MIXED}; leave it out of score.candidates")
            rows = x.reshape(-1, x.shape[-1])
            routing = self.tokens.routing(taps.num_examples)
            out: Any = _TappedRows.apply(rows, self, taps, routing)
            return out.view(*x.shape[:-1], -1)

        self.module.forward = forward
        try:
            yield
        finally:
            del self.module.forward

    def observe(self, taps: Taps, routing: Routing, x_SI: Tensor, grad_SO: Tensor) -> None:
        assert not taps.squared, "the gradients of experts are not formed"
        if self.bias is not None:
            _observe(taps, routing, self.bias, None, grad_SO)
        if self.weight is None:
            return
        if (sketch := taps.sketch) is not None:
            left_Sp = grad_SO @ sketch.signs(self.weight, "out", grad_SO)
            right_Sq = x_SI @ sketch.signs(self.weight, "in", x_SI)
            for example in routing.example_S.unique().tolist():
                own = routing.example_S == example
                one = sketch.of_sides(left_Sp[own].unsqueeze(0), right_Sq[own].unsqueeze(0))
                taps.add_sketch(one, slice(example, example + 1))
        _observe(taps, routing, self.weight, x_SI, grad_SO, self.linear.transposed)


class _TappedRows(torch.autograd.Function):
    """A linear map of some tokens, observed by the rule of an expert in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rule: SeparateExpertRule, taps: Taps, routing: Routing
    ) -> Tensor:
        ctx.rule, ctx.taps, ctx.routing = rule, taps, routing
        ctx.save_for_backward(x)
        return nn.functional.linear(x, *rule.linear.map_of(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.rule.observe(ctx.taps, ctx.routing, x, grad.contiguous())
        return grad @ ctx.rule.linear.weight_OI(), None, None, None
