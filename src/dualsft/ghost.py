"""The ghost engine: G, per-example dot products and their bounds, in one backward pass.

Algorithm 1 lines 3, 5, 6 (sums of gradients) and 8 (GhostDot), ALGORITHM.md §2 and §4. While an
ordinary backward runs, each use of a candidate parameter is observed once, with its input a_t and
its output gradient ε_t, and gives any of

    Σ_n g_n                      added to an fp32 vector            (`sums`)
    ⟨U, g_n⟩ per example         Σ_t ε_t · (U a_t)                  (`direction`)
    an upper bound of ‖g_n,l‖    Σ_t ‖ε_t‖ ‖a_t‖                    (`bounds`)

No example's gradient is ever formed. Parameters that are not candidates get no gradient at all.
The rules by layer class are in `ghost_rules.py`; a candidate that no rule covers is refused by
name. The output head never runs its own forward here: its rule is fed by `losses.HeadLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.data import Batch
from dualsft.errors import ConfigError
from dualsft.ghost_rules import EmbeddingRule, HeadRule, LinearRule, NormRule, Rule
from dualsft.losses import HeadObserver, plain_example_loss
from dualsft.model import Candidates, is_linear, output_head
from dualsft.vectors import ParamVector


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
        self.dots = torch.zeros(num_examples, dtype=torch.float64, device=self.device)
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
        self._bind()

    @property
    def device(self) -> torch.device:
        return next(iter(self.candidates.values())).device

    def _bind(self) -> None:
        """One rule for each module that uses a candidate; refuse what none covers, all at once."""
        names = {id(p): name for name, p in self.candidates.items()}
        head = output_head(self.model)
        problems: list[str] = []
        bound: set[str] = set()
        for path, module in self.model.named_modules():
            used = {
                own: names[id(p)]
                for own, p in module.named_parameters(recurse=False, remove_duplicate=False)
                if id(p) in names
            }
            if not used:
                continue
            bound |= set(used.values())
            if module is head:
                self.head_rule = HeadRule(module, used)
                continue
            rule = _rule_for(module, used)
            if rule is None:
                problems.append(
                    f"{path} ({type(module).__name__}): no exact rule for its parameters "
                    f"{sorted(used.values())}; leave them out with score.candidates=…,!{path}.*"
                )
            else:
                self.rules.append(rule)
        problems += [
            f"{name}: no module of the model owns it" for name in self.columns.keys() - bound
        ]
        if problems:
            raise ConfigError(problems)

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
        return EmbeddingRule(module, used)
    is_norm = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
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
