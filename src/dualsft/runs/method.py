"""What a method is: one of four questions, answered from a `Job` that counts what it costs.

ARCHITECTURE.md, "A method". `DataMethod` chooses examples, `ParamMethod` entries (once, or again
while training: a moving mask; or none, an adapter), `WeightMethod` says how much each token counts
in training (Algorithm 1 line 12 with another loss), `AfterMethod` edits the trained weights. The
selection stage asks the first two, the fine-tuning stage the others; neither knows a name.
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
from dualsft.system.peak_memory import PeakMemory
from dualsft.train.loop import Hooks

T = TypeVar("T")


@dataclass
class Accounts:
    """What a method took, measured the same way for all of them."""

    forward_examples: int = 0
    """Examples that went forward through a model without a backward pass."""
    backward_examples: int = 0
    """Examples that were differentiated, training steps included."""
    seconds: float = 0.0
    peak_bytes: int = 0
    """Of the device, or of the process on a CPU."""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Job:
    """What a method is given: the run, its own folder, and accounts."""

    ctx: RunContext
    axis: Axis
    part: RunPath
    """Where the stage's files are written."""
    examples: list[Example] = field(default_factory=list)
    """What will be trained on; empty while examples are being chosen."""
    common: dict[str, Any] = field(default_factory=dict)
    """What the methods of one stage share."""
    accounts: Accounts = field(default_factory=Accounts)

    @property
    def roles(self) -> dict[str, list[Example]]:
        """val, anchor, warm, pool."""
        return self.shared("roles", lambda job: job.ctx.roles())

    def shared(self, key: str, make: Callable[[Job], T]) -> T:
        """Made once for all methods of this stage."""
        if key not in self.common:
            self.common[key] = make(self)
        return self.common[key]

    def rng(self, purpose: str) -> np.random.Generator:
        """Chance that depends on the seed, the axis and the purpose alone."""
        words = np.frombuffer(digest(self.ctx.config.seed, f"{self.axis}/{purpose}"), np.uint32)
        return np.random.default_rng(words.tolist())

    def shapes(self) -> dict[str, torch.Size]:
        """The candidates' shapes by name, without their weights."""
        return self.ctx.candidate_shapes

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Seconds and peak memory of the block go to the accounts."""
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
        """The examples in length-bucketed batches on the model's device: counted, with progress."""
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
        """−log p of every response token, by example: one forward pass, fp32."""
        found: list[np.ndarray] = [np.empty(0)] * len(examples)
        for rows, batch in self.batches(model, examples, label, backward=False):
            for i, losses in zip(rows, token_losses(model, batch), strict=True):
                found[i] = losses.cpu().numpy()
        return found

    def losses(self, model: PreTrainedModel, examples: Sequence[Example], label: str) -> np.ndarray:
        """The example loss (mean over its own response tokens) of each: one forward pass."""
        return np.array([t.mean() for t in self.token_losses(model, examples, label)])


@dataclass(frozen=True)
class DataChoice:
    """Positions in the pool that a method was given, and what it has to say about them."""

    positions: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For 5_selection/summary.json."""
    scores: np.ndarray | None = None
    """One a pool example, larger is better, where the method has such; baseline_scores.parquet."""


@dataclass(frozen=True)
class ParamChoice:
    """Sorted flat indices by parameter, and what the method has to say about them."""

    indices: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    literal: bool = False
    """The method's own options said how much, not select.param_budget."""


class _Method:
    """A method with its options."""

    def __init__(self, entry: Entry, options: Any) -> None:
        self.entry, self.options = entry, options


class DataMethod(_Method, ABC):
    """Which examples, for this budget?"""

    pool_roles: tuple[str, ...] = ("pool", "warm")
    """Roles that it chooses from; never val or anchor."""

    @abstractmethod
    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        """b different positions of `pool`; None is all of it."""


class ParamMethod(_Method, ABC):
    """Which entries, for this budget; does the mask move?"""

    adapter = False
    """Trains parameters of its own instead of entries of the model (`attach`, `detach`)."""

    @property
    def carry(self) -> bool:
        """Whether entries that stay in a moving mask keep their moments."""
        return True

    def eligible(self, job: Job) -> dict[str, torch.Size]:
        """The parameters it chooses from, and their shapes: the candidates unless it says."""
        return job.shapes()

    def check(self, job: Job) -> None:
        """Refuse what it cannot do with these settings; asked after the split."""

    @abstractmethod
    def choose(self, job: Job, k: int) -> ParamChoice | None:
        """At most k entries; None is every parameter (or an adapter).

        Called after the examples are chosen (`job.examples`). A method that trains on from other
        weights than θ_old leaves them as a Hugging Face folder `start` in `job.part`.
        """

    def refresh_every(self, job: Job) -> int | None:
        """Optimizer steps between two masks; None is a mask that stays."""
        return None

    def refresh(self, job: Job, model: PreTrainedModel, k: int, step: int) -> Mapping[str, Tensor]:
        """The mask from the next step on, `step` steps being done."""
        raise TypeError(f"{type(self).__name__} says that it does this, and does not")

    def attach(self, job: Job, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        """Put the adapter into the model; its trainable parameters by name."""
        raise TypeError(f"{type(self).__name__} says that it does this, and does not")

    def detach(self, job: Job, model: PreTrainedModel) -> PreTrainedModel:
        """Save the adapter into `job.part`, merge it, and return the plain model."""
        raise TypeError(f"{type(self).__name__} says that it does this, and does not")


class WeightMethod(_Method, ABC):
    """How does each token or example count?"""

    facts: Mapping[str, Any] = {}
    """What it has to say after `hooks`, for 6_finetune/summary.json."""

    @abstractmethod
    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        """The objective of training on `job.examples` from this model (θ_old, not yet trained)."""


class AfterMethod(_Method, ABC):
    """What is done to the trained weights?"""

    @abstractmethod
    def apply(self, job: Job, before: PreTrainedModel, after: PreTrainedModel) -> dict[str, Any]:
        """Edit `after` in place, `before` being θ_old; returns facts for the summary."""
