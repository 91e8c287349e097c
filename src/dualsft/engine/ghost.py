"""The ghost engine: G, per-example dot products and norm bounds, in one backward pass.

Algorithm 1 lines 3, 5, 6 (sums of gradients) and 8 (GhostDot); docs/algorithm.md. During an
ordinary backward pass each use of a candidate parameter is observed once, with its input a_t and
its output gradient ε_t, and contributes to any of

    Σ_n g_n                      added to an fp32 vector            (`sums`)
    ⟨U, g_n⟩ per example         Σ_t ε_t · (U a_t)                  (`direction`)
    an upper bound of ‖g_n,l‖    Σ_t ‖ε_t‖ ‖a_t‖                    (`bounds`)

Gradients of single examples are never formed. Parameters that are not candidates get no gradient.
The rules for each layer class are in `engine/rules.py`. A candidate without a rule is refused by
name, and so is one whose input does not keep the examples of a batch separate. The output head does
not run its own forward here: `losses.HeadLoss` calls its rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from dualsft.data.examples import Batch
from dualsft.distributed.world import world
from dualsft.engine.experts import ExpertsRule, RouterRule, SeparateExpertRule, TokenRows
from dualsft.engine.fused import fused_blocks
from dualsft.engine.losses import HeadObserver, last_hidden, plain_example_loss
from dualsft.engine.rules import MIXED, EmbeddingRule, HeadRule, LinearRule, NormRule, Rule
from dualsft.engine.sketch import Sketch
from dualsft.errors import ConfigError, RunError
from dualsft.memory.placement import DevicePlacement, Placement
from dualsft.model.experts import is_experts, routers, separate_experts
from dualsft.model.load import (
    Candidates,
    alike,
    decoder_blocks,
    find_candidates,
    install_attention,
    is_linear,
    leave_out,
    output_head,
)
from dualsft.model.sharded import device_of, gathered_parameters, set_requires_grad, through
from dualsft.storage.vectors import reduction_dtype


@dataclass
class Taps:
    """Accumulators of one pass: `begin` before each batch, then read `outputs`."""

    placement: Placement
    """G to add to and the direction to multiply with."""
    bounds: bool
    columns: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    only: Collection[str] | None = None
    squared: bool = False
    """Form the gradient of each example; `sums` are then of squares, and bounds are exact norms."""
    sketch: Sketch | None = None
    """Sketch the gradient of each example with respect to the linear weights."""
    num_examples: int = 0
    _dots: Tensor = field(init=False)
    _inner_sums: Tensor = field(init=False)
    _sketches: Tensor = field(init=False)
    _tokens: dict[int, Tensor] = field(default_factory=dict)
    _squared: set[str] = field(default_factory=set)

    def begin(self, num_examples: int) -> None:
        """Reset the per-example values for a new batch."""
        self.num_examples = num_examples
        wide = reduction_dtype(self.device)
        self._dots = torch.zeros(num_examples, dtype=wide, device=self.device)
        width = len(self.columns) if self.bounds else 0
        self._inner_sums = torch.zeros(num_examples, width, dtype=self.dtype, device=self.device)
        dim = self.sketch.dim if self.sketch is not None else 0
        self._sketches = torch.zeros(num_examples, dim, dtype=self.dtype, device=self.device)
        self._tokens.clear()
        self._squared.clear()

    @property
    def sketches_only(self) -> bool:
        """Whether nothing but sketches is collected, so that a layer's input need not be kept."""
        more = self.placement.has_sums or self.placement.has_direction
        return self.sketch is not None and not (more or self.bounds or self.squared)

    def observes(self, rule: Rule) -> bool:
        """Whether this pass observes the rule's candidates."""
        if self.only is None:
            return True
        inside = [name in self.only for name in rule.names]
        assert all(inside) or not any(inside), f"{rule.names} are observed together"
        return all(inside)

    def square_once(self, name: str) -> None:
        """Raise if a gradient arrives in several parts: the square of a sum is not the sum of
        squares."""
        if name in self._squared:
            raise RunError(
                f"{name} is used more than once in a pass, so its squared gradient cannot be "
                "computed in batches; leave it out of score.candidates"
            )
        self._squared.add(name)

    def add_dots(self, value_B: Tensor) -> None:
        self._dots += value_B

    def add_bound(self, name: str, value_B: Tensor) -> None:
        self._inner_sums[:, self.columns[name]] += value_B

    def add_sketch(self, value_Bp: Tensor, examples: slice = slice(None)) -> None:
        self._sketches[examples] += value_Bp

    def add_tokens(
        self, kernels: Any, name: str, moved_MO: Tensor, grad_MO: Tensor, norms_M: Tensor | None
    ) -> None:
        """Add dots and bounds of one layer per token, in one kernel; `_fold` sums them on read."""
        rows, width = len(grad_MO), len(self.columns)
        if rows not in self._tokens:
            self._tokens[rows] = torch.zeros(2, width, rows, device=self.device)
        dots_LM, bounds_LM = self._tokens[rows]
        at = self.columns[name]
        kernels.token_dots(moved_MO, grad_MO, dots_LM[at], norms_M, bounds_LM[at])

    def _fold(self) -> None:
        for tokens in self._tokens.values():
            dots_LB, bounds_LB = tokens.unflatten(-1, (self.num_examples, -1)).sum(-1)
            self._dots += dots_LB.to(self._dots.dtype).sum(0)
            if self.bounds:
                self._inner_sums += bounds_LB.T
        self._tokens.clear()

    def outputs(self) -> dict[str, Tensor]:
        """Per example of the batch: ⟨U, g_n⟩ [B], each candidate's bound [B, L], sketch [B, p]."""
        self._fold()
        found = {"dots": self._dots, "inner_sums": self._inner_sums}
        return found if self.sketch is None else {**found, "sketches": self._sketches}


class GhostEngine:
    """Binds a model's candidate parameters to their rules."""

    def __init__(self, model: PreTrainedModel, candidates: Candidates) -> None:
        install_attention(device_of(model))
        self.model = model
        self.candidates = candidates
        self.columns = {name: i for i, name in enumerate(candidates)}
        self.rules: list[Rule] = []
        self.head_rule: HeadRule | None = None
        self.token_rows = [TokenRows(*layer) for layer in separate_experts(model)]
        if self.token_rows and world().sharded:
            raise ConfigError(
                f"parallel.mode: {type(model).__name__} holds each expert in a module of its own, "
                "and a sharded walk would wait for experts without tokens; use "
                "parallel.mode=replicate"
            )
        uncovered = self._bind()
        mixed = self._mixed()
        reasons = uncovered | dict.fromkeys(mixed, MIXED)
        if reasons:
            problems = [f"{name}: {reasons[name]}{more}" for name, more in alike(reasons)]
            raise ConfigError([*problems, leave_out(candidates.spec, reasons)])

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def head_names(self) -> list[str]:
        """The candidates of the output head, which is used once per chunk of logits."""
        return [] if self.head_rule is None else self.head_rule.names

    def on(self, model: PreTrainedModel) -> GhostEngine:
        """The same engine for another copy of its model."""
        if model is self.model:
            return self
        return GhostEngine(model, find_candidates(model, self.candidates.spec))

    def _bind(self) -> dict[str, str]:
        """Create a rule for each module that uses a candidate; return the candidates without one,
        each with the reason."""
        names = {id(p): name for name, p in self.candidates.items()}
        head, routing = output_head(self.model), set(routers(self.model))
        layers = [(m, t) for t in self.token_rows for e in t.experts for m in e.modules()]
        separate = {module: tokens for module, tokens in layers if is_linear(module)}
        fused = (m for e in self.model.modules() if is_experts(e) for m in e.children())
        inside = {*(module for module, _ in layers), *fused}
        uncovered: dict[str, str] = {}
        bound: set[str] = set()
        for module in self.model.modules():
            used = {
                own: names[id(p)]
                for own, p in module.named_parameters(recurse=False, remove_duplicate=False)
                if id(p) in names
            }
            if not used:
                continue
            bound |= set(used.values())
            if module in separate:
                rule = SeparateExpertRule(module, used, separate[module])
            elif module in inside:
                rule = None
            else:
                rule = _rule_for(module, used, module is head, module in routing)
            if rule is None:
                uncovered |= {
                    n: f"no exact rule covers {type(module).__name__}" for n in used.values()
                }
                continue
            if isinstance(rule, HeadRule):
                self.head_rule = rule
            else:
                self.rules.append(rule)
        orphans = [name for name in self.candidates if name not in bound]
        return uncovered | dict.fromkeys(orphans, "no module of the model owns it")

    def _mixed(self) -> list[str]:
        """Candidates whose input mixes examples, found by forward passes of a 2 x 3 batch.

        Where the input is one list of tokens (experts), the second example is changed: the rows of
        the first must stay.
        """
        ids = torch.zeros(2, 3, dtype=torch.long, device=self.device)
        inputs = self._inputs(ids)
        lists = [rule for rule in self.rules if any(_is_list(x) for x, _ in inputs[rule])]
        lists = [rule for rule in lists if not isinstance(rule, SeparateExpertRule)]
        if lists:
            ids[1] = 1
            changed = self._inputs(ids)
            for rule in lists:
                pairs = [
                    (a, b) for (a, _), (b, _) in zip(inputs[rule], changed[rule], strict=False)
                ]
                same = len(inputs[rule]) == len(changed[rule])
                rule.flat = same and all(_in_order(a, b) for a, b in pairs if _is_list(a))
        return [
            name
            for rule, given in inputs.items()
            if not all(rule.flat if rule in lists and _is_list(x) else fine for x, fine in given)
            for name in rule.names
        ]

    @torch.no_grad()
    def _inputs(self, ids: Tensor) -> dict[Rule, list[tuple[Tensor, bool]]]:
        """The inputs of each rule's module in a forward pass of these tokens, and whether the rule
        can separate their examples."""
        at = torch.arange(ids.shape[1]).to(ids).expand_as(ids)
        batch = Batch(ids, torch.ones_like(ids), at, ids)
        found: dict[Rule, list[tuple[Tensor, bool]]] = {rule: [] for rule in self.rules}

        def look(rule: Rule) -> Callable[..., None]:
            def before_forward(_: nn.Module, inputs: tuple[Tensor, ...], named: Any) -> None:
                x = inputs[0] if inputs else next(iter(named.values()))
                found[rule].append((x, rule.separates(x, len(ids))))

            return before_forward

        with ExitStack() as stack:
            for tokens in self.token_rows:
                stack.enter_context(tokens.attached())
            for rule in self.rules:
                handle = rule.module.register_forward_pre_hook(look(rule), with_kwargs=True)
                stack.callback(handle.remove)
            through(self.model, lambda: last_hidden(self.model, batch))
        return found

    @property
    def linear_weights(self) -> dict[str, bool]:
        """The candidates that a sketch covers, outside the head; True for weights stored [I, O] or
        [E, I, O]."""
        return {name: form for rule in self.rules for name, form in rule.weights.items()}

    def observed_for(self, sketch: Sketch) -> frozenset[str] | None:
        """The candidates to observe (`tapped`) for these sketches alone; None: all of them."""
        if sketch.weights is None:
            return None
        owners = [rule for rule in self.rules if not sketch.weights.isdisjoint(rule.weights)]
        return frozenset(name for rule in owners for name in rule.names)

    @property
    def separable(self) -> bool:
        """Whether each candidate's gradient comes from a single use and can be squared: no
        embedding, no head, no weight that is used twice."""
        simple = all(isinstance(rule, LinearRule | NormRule) for rule in self.rules)
        names = [name for rule in self.rules for name in rule.names]
        return simple and self.head_rule is None and len(names) == len(set(names))

    @contextmanager
    def tapped(
        self,
        placement: Placement | None = None,
        *,
        bounds: bool = False,
        only: Collection[str] | None = None,
        squared: bool = False,
        sketch: Sketch | None = None,
    ) -> Iterator[Taps]:
        """Observe every backward pass inside the context; restores the model on exit.

        Gradients are added to the G of `placement` and multiplied with its direction. `only` names
        the candidates to observe (all or none of a module's). The backward pass then
        stops at the first block that holds one of them.
        """
        assert self.separable or not squared, "squared needs engine.separable"
        placement, dtype = placement or DevicePlacement(), self.candidates.dtype
        taps = Taps(placement, bounds, self.columns, dtype, self.device, only, squared, sketch)
        with ExitStack() as stack:
            stack.enter_context(frozen(self.model))
            stack.enter_context(fused_blocks(self.model, wide=True))
            for tokens in self.token_rows:
                stack.enter_context(tokens.attached())
            for rule in self.rules:
                if taps.observes(rule):
                    stack.enter_context(rule.attached(taps))
            stack.callback(self._start(only).remove)
            yield taps

    def _start(self, only: Collection[str] | None) -> RemovableHandle:
        """Start the autograd graph at the token embeddings, or at the first block that holds an
        observed candidate."""
        prefix, blocks = decoder_blocks(self.model) if only is not None else ("", [])
        depths = [_depth(name, prefix) for name in only or ()]
        if depths and None not in depths:
            block = blocks[min(d for d in depths if d is not None)]
            return block.register_forward_pre_hook(_start_at_block, with_kwargs=True)
        return start_graph(self.model.get_input_embeddings())

    def head_observer(self, taps: Taps) -> HeadObserver | None:
        """Callback for `losses` to call per chunk of logits; None if the head is not observed."""
        rule = self.head_rule
        if rule is None or not taps.observes(rule):
            return None
        return lambda hidden, gradient, example: rule.observe(taps, hidden, gradient, example)


def _rule_for(module: nn.Module, used: dict[str, str], head: bool, routes: bool) -> Rule | None:
    """The rule of a layer for the parameters that are candidates; None if there is no exact one.

    A new layer class gets its rule here and in `engine/rules.py`.
    """
    if head:
        return HeadRule(module, used)
    if is_experts(module):
        return ExpertsRule(module, used)
    if is_linear(module) and used.keys() <= {"weight", "bias"}:
        return LinearRule(module, used)
    if routes and used.keys() <= {"weight", "bias"}:
        return RouterRule(module, used)
    if isinstance(module, nn.Embedding) and used.keys() == {"weight"}:
        plain = len(signature(module.forward).parameters) == 1  # others compute their indices
        return EmbeddingRule(module, used) if plain else None
    is_norm = "Norm" in type(module).__name__ and all(p.ndim == 1 for p in module.parameters())
    if is_norm and used.keys() <= {"weight", "bias"}:
        return NormRule(module, used)
    return None


def _is_list(x: Tensor) -> bool:
    """Whether this is one list of tokens' features (not of token ids)."""
    return x.ndim == 2 and x.is_floating_point()


def _in_order(before: Tensor, after: Tensor) -> bool:
    """Whether the first half of the rows is the first example's: only the others have changed."""
    if before.shape != after.shape or len(before) % 2:
        return False
    first, second = (after - before).double().abs().amax(1).chunk(2)
    return float(first.max()) < 0.1 * float(second.min())


def start_graph(embedding: nn.Module) -> RemovableHandle:
    """Hook that starts the autograd graph at the output of a module with frozen parameters."""

    def after_forward(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output if output.requires_grad else output.requires_grad_()

    return embedding.register_forward_hook(after_forward)


def _start_at_block(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if inputs:
        return (inputs[0].detach().requires_grad_(), *inputs[1:]), named
    hidden = named["hidden_states"].detach().requires_grad_()
    return inputs, {**named, "hidden_states": hidden}


def _depth(name: str, prefix: str) -> int | None:
    """Index of the block that a parameter belongs to; None outside the blocks."""
    found = re.match(rf"{re.escape(prefix)}\.(\d+)\.", name)
    return int(found[1]) if found else None


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turn `requires_grad` off for all parameters; restores it on exit."""
    every = {*model.parameters(), *gathered_parameters(model).values()}
    state = [(p, p.requires_grad) for p in every]
    for p, _ in state:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p, flag in state:
            p.requires_grad_(flag)


def alone(
    model: PreTrainedModel,
    candidates: Candidates,
    batch: Batch,
    visit: Callable[[str, Tensor], None],
) -> float:
    """Gradient of one example by plain autograd; calls `visit` with each candidate's gradient.

    An independent, slow path to check the rules: the model's own forward, head and loss. Each
    gradient is freed after its call. Returns the example's loss.
    """
    assert len(batch.input_ids) == 1
    gathered = gathered_parameters(model)
    names = {gathered[name]: name for name in candidates}

    def hand_over(p: Tensor) -> None:
        assert p.grad is not None and isinstance(p, nn.Parameter)
        visit(names[p], p.grad)
        p.grad = None

    with ExitStack() as stack:
        stack.enter_context(frozen(model))
        for p, name in names.items():
            set_requires_grad(model, name, True)
            stack.callback(p.register_post_accumulate_grad_hook(hand_over).remove)
        with torch.enable_grad():
            loss = plain_example_loss(model, batch)
            loss.backward()
    return float(loss.detach())
