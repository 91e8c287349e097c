"""The ghost engine: G, per-example dot products and their bounds, in one backward pass.

Algorithm 1 lines 3, 5, 6 (sums of gradients) and 8 (GhostDot), ALGORITHM.md §2 and §4. While an
ordinary backward runs, each use of a candidate parameter is observed once, with its input a_t and
its output gradient ε_t, and gives any of

    Σ_n g_n                      added to an fp32 vector            (`sums`)
    ⟨U, g_n⟩ per example         Σ_t ε_t · (U a_t)                  (`direction`)
    an upper bound of ‖g_n,l‖    Σ_t ‖ε_t‖ ‖a_t‖                    (`bounds`)

No example's gradient is ever formed. Parameters that are not candidates get no gradient at all.
The rules by layer class are in `ghost_rules.py`; a candidate that no rule covers is refused by
name, and so is one whose input does not tell the examples of a batch apart. The output head never
runs its own forward here: its rule is fed by `losses.HeadLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.data import Batch
from dualsft.errors import ConfigError
from dualsft.ghost_rules import MIXED, EmbeddingRule, HeadRule, LinearRule, NormRule, Rule
from dualsft.losses import HeadObserver, last_hidden, plain_example_loss
from dualsft.model import Candidates, alike, is_linear, leave_out, output_head
from dualsft.vectors import ParamVector, reduction_dtype


@dataclass
class Taps:
    """What one pass collects. `begin` before each batch, then read `dots` and `inner_sums`."""

    sums: ParamVector | None
    direction: ParamVector | None
    bounds: bool
    columns: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    factors: dict[str, Tensor] = field(default_factory=dict)
    dots: Tensor = field(init=False)
    inner_sums: Tensor = field(init=False)

    def begin(self, num_examples: int) -> None:
        """Forget the previous batch."""
        wide = reduction_dtype(self.device)
        self.dots = torch.zeros(num_examples, dtype=wide, device=self.device)
        width = len(self.columns) if self.bounds else 0
        self.inner_sums = torch.zeros(num_examples, width, dtype=self.dtype, device=self.device)

    def add_bound(self, name: str, value_B: Tensor) -> None:
        self.inner_sums[:, self.columns[name]] += value_B

    def factor(self, name: str, dtype: torch.dtype) -> Tensor:
        """This parameter's block of the direction, in the dtype of the product it enters."""
        assert self.direction is not None
        block = self.direction[name]
        if block.dtype == dtype:
            return block
        if name not in self.factors:
            self.factors[name] = block.to(dtype)
        return self.factors[name]


class GhostEngine:
    """Binds a model's candidate parameters to their rules."""

    def __init__(self, model: PreTrainedModel, candidates: Candidates) -> None:
        self.model = model
        self.candidates = candidates
        self.columns = {name: i for i, name in enumerate(candidates)}
        self.rules: list[Rule] = []
        self.head_rule: HeadRule | None = None
        uncovered = self._bind()
        mixed = self._mixed()
        reasons = uncovered | dict.fromkeys(mixed, MIXED)
        if reasons:
            problems = [f"{name}: {reasons[name]}{more}" for name, more in alike(reasons)]
            raise ConfigError([*problems, leave_out(candidates.spec, reasons)])

    @property
    def device(self) -> torch.device:
        return next(iter(self.candidates.values())).device

    def _bind(self) -> dict[str, str]:
        """One rule for each module that uses a candidate; returns the candidates without a rule."""
        names = {id(p): name for name, p in self.candidates.items()}
        head = output_head(self.model)
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
            rule = HeadRule(module, used) if module is head else _rule_for(module, used)
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

    @torch.no_grad()
    def _mixed(self) -> list[str]:
        """Two rows of three tokens forward: the candidates whose input mixes the examples."""
        ids = torch.zeros(2, 3, dtype=torch.long, device=self.device)
        batch = Batch(ids, torch.ones_like(ids), torch.arange(3).to(ids).expand(2, 3), ids)
        found: list[str] = []

        def look(rule: Rule) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def before_forward(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                if not rule.separates(inputs[0], len(ids)):
                    found.extend(rule.names)

            return before_forward

        with ExitStack() as stack:
            for rule in self.rules:
                handle = rule.module.register_forward_pre_hook(look(rule))
                stack.callback(handle.remove)
            last_hidden(self.model, batch)
        return found

    @contextmanager
    def tapped(
        self,
        *,
        sums: ParamVector | None = None,
        direction: ParamVector | None = None,
        bounds: bool = False,
    ) -> Iterator[Taps]:
        """Observe every backward inside the block; the model is as before afterwards."""
        dtype = self.candidates.dtype
        taps = Taps(sums, direction, bounds, self.columns, dtype, self.device)
        with ExitStack() as stack:
            stack.enter_context(_frozen(self.model))
            for rule in self.rules:
                stack.enter_context(rule.attached(taps))
            embedding = self.model.get_input_embeddings()
            handle = embedding.register_forward_hook(_start_graph)
            stack.callback(handle.remove)
            yield taps

    def head_observer(self, taps: Taps) -> HeadObserver | None:
        """What `losses` must call for each chunk of logits, when the head is a candidate."""
        rule = self.head_rule
        if rule is None:
            return None
        return lambda hidden, gradient, example: rule.observe(taps, hidden, gradient, example)


def _rule_for(module: nn.Module, used: dict[str, str]) -> Rule | None:
    if is_linear(module) and used.keys() <= {"weight", "bias"}:
        return LinearRule(module, used)
    if isinstance(module, nn.Embedding) and used.keys() == {"weight"}:
        plain = len(signature(module.forward).parameters) == 1  # others compute what they look up
        return EmbeddingRule(module, used) if plain else None
    is_norm = "Norm" in type(module).__name__ and all(p.ndim == 1 for p in module.parameters())
    if is_norm and used.keys() <= {"weight", "bias"}:
        return NormRule(module, used)
    return None


def _start_graph(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    """With every parameter frozen the graph starts at the token embeddings."""
    return output if output.requires_grad else output.requires_grad_()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """requires_grad off everywhere, restored afterwards."""
    state = [(p, p.requires_grad) for p in model.parameters()]
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
    """One example by plain autograd, no rule involved: `visit` sees each candidate's gradient.

    The slow, independent path: the model's own forward, head and loss. Gradients are handed over
    and freed one parameter at a time. Returns the example's loss.
    """
    assert len(batch.input_ids) == 1
    names = {p: name for name, p in candidates.parameters.items()}

    def hand_over(p: Tensor) -> None:
        assert p.grad is not None and isinstance(p, nn.Parameter)
        visit(names[p], p.grad)
        p.grad = None

    with ExitStack() as stack:
        stack.enter_context(_frozen(model))
        for p in names:
            p.requires_grad_(True)
            stack.callback(p.register_post_accumulate_grad_hook(hand_over).remove)
        with torch.enable_grad():
            loss = plain_example_loss(model, batch)
            loss.backward()
    return float(loss.detach())
