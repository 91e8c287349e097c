"""Base classes of methods, one per axis, and the `Job` that they work on.

`DataMethod` chooses examples. `ParamMethod` chooses entries: once, repeatedly during training (a
moving mask), or none (an adapter). `WeightMethod` sets the weight of each token in training
(Algorithm 1 line 12 with another loss). `AfterMethod` edits the trained weights. The selection
stage calls the first two, the fine-tuning stage the others; neither refers to methods by name.
`Job` measures the cost of each method.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.config.methods import Axis, Entry
from dualsft.data.examples import Batch, Example, collate, digest, make_batches
from dualsft.engine.losses import token_losses
from dualsft.runs.context import RunContext
from dualsft.system.paths import RunPath
from dualsft.system.usage import PeakMemory
from dualsft.train.loop import Hooks

T = TypeVar("T")


@dataclass
class Accounts:
    """Cost of a method, measured in the same way for all methods."""

    forward_examples: int = 0
    """Examples in forward-only passes."""
    backward_examples: int = 0
    """Examples in backward passes, training steps included."""
    seconds: float = 0.0
    peak_bytes: int = 0
    """Peak of the GPU, or of the process on a CPU."""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Job:
    """Input of a method: the run, an output folder, and cost accounts."""

    ctx: RunContext
    axis: Axis
    part: RunPath
    """Folder that the stage writes to."""
    examples: list[Example] = field(default_factory=list)
    """The training examples; empty while a data method chooses them."""
    common: dict[str, Any] = field(default_factory=dict)
    """Values shared by the methods of one stage (`shared`)."""
    accounts: Accounts = field(default_factory=Accounts)

    @property
    def roles(self) -> dict[str, list[Example]]:
        """Examples of each role: val, anchor, warm, pool."""
        return self.shared("roles", lambda job: job.ctx.roles())

    def shared(self, key: str, make: Callable[[Job], T]) -> T:
        """The value of `make`, computed once for all methods of this stage."""
        if key not in self.common:
            self.common[key] = make(self)
        return self.common[key]

    def rng(self, purpose: str) -> np.random.Generator:
        """Random generator seeded by the run's seed, the axis and the purpose only."""
        words = np.frombuffer(digest(self.ctx.config.seed, f"{self.axis}/{purpose}"), np.uint32)
        return np.random.default_rng(words.tolist())

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the candidates by name; loads no weights."""
        return self.ctx.candidate_shapes

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the time and peak memory of the block to the accounts."""
        start = time.perf_counter()
        try:
            with PeakMemory() as memory:
                yield
        finally:
            self.accounts.seconds += time.perf_counter() - start
            peak = memory.cuda_bytes or memory.rss_bytes
            self.accounts.peak_bytes = max(self.accounts.peak_bytes, peak)

    def batches(
        self, model: PreTrainedModel, examples: Sequence[Example], label: str, backward: bool
    ) -> Iterator[tuple[list[int], Batch]]:
        """Length-bucketed batches on the model's device, with accounting and progress."""
        ctx = self.ctx
        with ctx.reporter.track(label, len(examples), "examples") as progress:
            for rows in make_batches(examples, ctx.batch_tokens):
                chosen = [examples[i] for i in rows]
                side = ctx.config.data.padding_side
                yield rows, collate(chosen, ctx.pad_id, side, model.device)
                if backward:
                    self.accounts.backward_examples += len(rows)
                else:
                    self.accounts.forward_examples += len(rows)
                progress.advance(len(rows), tokens=sum(e.num_tokens for e in chosen))

    @torch.no_grad()
    def token_losses(
        self, model: PreTrainedModel, examples: Sequence[Example], label: str
    ) -> list[np.ndarray]:
        """−log p of every response token, one array per example: one forward pass, fp32."""
        found: list[np.ndarray] = [np.empty(0)] * len(examples)
        for rows, batch in self.batches(model, examples, label, backward=False):
            for i, losses in zip(rows, token_losses(model, batch), strict=True):
                found[i] = losses.cpu().numpy()
        return found

    def losses(self, model: PreTrainedModel, examples: Sequence[Example], label: str) -> np.ndarray:
        """Loss of each example (mean over its response tokens): one forward pass."""
        return np.array([t.mean() for t in self.token_losses(model, examples, label)])


@dataclass(frozen=True)
class DataChoice:
    """Chosen positions in the pool, with facts for the summary."""

    positions: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For 5_selection/summary.json."""
    scores: np.ndarray | None = None
    """Score per pool example, larger is better, if the method has one: baseline_scores.parquet."""


@dataclass(frozen=True)
class ParamChoice:
    """Sorted flat indices by parameter, with facts for the summary."""

    indices: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    literal: bool = False
    """Whether the method's own options set the size instead of select.param_budget."""


class _Method:
    """A method and its options."""

    def __init__(self, entry: Entry, options: Any) -> None:
        self.entry, self.options = entry, options


class DataMethod(_Method, ABC):
    """Chooses the training examples for a budget."""

    pool_roles: tuple[str, ...] = ("pool", "warm")
    """Roles to choose from; never val or anchor."""

    @abstractmethod
    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        """b distinct positions of `pool`; None means all of them."""


class ParamMethod(_Method, ABC):
    """Chooses the entries to train for a budget, once or repeatedly."""

    adapter = False
    """Whether it trains added parameters instead of entries of the model (`attach`, `detach`)."""

    @property
    def carry(self) -> bool:
        """Whether entries that stay in a moving mask keep their moments."""
        return True

    def eligible(self, job: Job) -> dict[str, torch.Size]:
        """Parameters to choose from, with shapes; the candidates by default."""
        return job.shapes()

    def check(self, job: Job) -> None:
        """Raise if the settings are not supported; called after the split."""

    @abstractmethod
    def choose(self, job: Job, k: int) -> ParamChoice | None:
        """At most k entries; None means every parameter (or an adapter).

        Called after the examples are chosen (`job.examples`). A method whose fine-tuning starts
        from weights other than θ_old writes them to a Hugging Face folder `start` in `job.part`.
        """

    def refresh_every(self, job: Job) -> int | None:
        """Optimizer steps between two masks; None for a static mask."""
        return None

    def refresh(self, job: Job, model: PreTrainedModel, k: int, step: int) -> Mapping[str, Tensor]:
        """The mask to use after `step` completed steps."""
        raise TypeError(f"{type(self).__name__} does not implement this method")

    def attach(self, job: Job, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        """Add the adapter to the model; returns its trainable parameters by name."""
        raise TypeError(f"{type(self).__name__} does not implement this method")

    def detach(self, job: Job, model: PreTrainedModel) -> PreTrainedModel:
        """Save the adapter to `job.part`, merge it, and return the plain model."""
        raise TypeError(f"{type(self).__name__} does not implement this method")


class WeightMethod(_Method, ABC):
    """Sets the weight of each token or example in the training loss."""

    facts: Mapping[str, Any] = {}
    """Facts for 6_finetune/summary.json, available after `hooks`."""

    @abstractmethod
    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        """Training hooks for `job.examples`; `model` is θ_old, not yet trained."""


class AfterMethod(_Method, ABC):
    """Edits the weights after training."""

    @abstractmethod
    def apply(self, job: Job, before: PreTrainedModel, after: PreTrainedModel) -> dict[str, Any]:
        """Edit `after` in place (`before` is θ_old); returns facts for the summary."""
