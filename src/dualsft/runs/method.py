"""Methods: the base classes, one per axis, the `Job` that they work on, and DualSFT's own methods.

`DataMethod` chooses examples. `ParamMethod` chooses entries: once, repeatedly during training (a
moving mask), or none (an adapter). `WeightMethod` sets the weight of each token in training
(Algorithm 1 line 12 with another loss). `AfterMethod` edits the trained weights. The selection
stage calls the first two, the fine-tuning stage the others; neither refers to methods by name.

DualSFT's own methods (Algorithm 1 lines 9 to 11: the largest signed scores on both sides) and the
controls reversed, random and all are at the end, with `Scoring`, which loads what they select by.
`ENTRIES` of `runs/__init__.py` describes them; methods of other papers are in `lab/methods/`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.algorithm.projection import Scored
from dualsft.algorithm.quotas import make_strata
from dualsft.algorithm.scores import rounding_scales
from dualsft.algorithm.selection import Chosen, choose_entries, choose_examples, rescore
from dualsft.algorithm.split import full_size
from dualsft.algorithm.topk import TopK
from dualsft.config.methods import Axis, Entry
from dualsft.data.examples import Batch, Example, collate, generator, make_batches
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import token_losses
from dualsft.errors import RunError
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.preflight import reading
from dualsft.runs.stages.gradients import read_pool
from dualsft.runs.stages.scores import load_scored, read_scores
from dualsft.storage.vectors import Vector
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
        return generator(self.ctx.config.seed, f"{self.axis}/{purpose}")

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

    def steps_taken(self, job: Job) -> int:
        """Training steps that `choose` took and `start` keeps; fine-tuning takes so many fewer."""
        return 0

    def refresh_every(self, job: Job) -> int | None:
        """Optimizer steps between two masks; None for a static mask."""
        return None

    def refresh(self, job: Job, model: PreTrainedModel, k: int, step: int) -> Mapping[str, Tensor]:
        """The mask to use after `step` completed steps."""
        raise NotImplementedError

    def attach(self, job: Job, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        """Add the adapter to the model; returns its trainable parameters by name."""
        raise NotImplementedError

    def detach(self, job: Job, model: PreTrainedModel) -> PreTrainedModel:
        """Save the adapter to `job.part`, merge it, and return the plain model."""
        raise NotImplementedError


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


# --- DualSFT's own methods and the controls ------------------------------------------------------

WIDER = 8.0  # ratio of the rounding error of bf16 scores to that of re-scored ones (TF32)


@dataclass
class Scoring:
    """Inputs of DualSFT's own selection on both sides: u, G, the engine, the pool.

    In half precision an example that rounding could move across the boundary is re-scored like
    one that the certificate leaves open (docs/algorithm.md, "One pass instead of two").
    """

    ctx: RunContext
    pool: list[Example]
    num_full: int
    keep: Callable[[Vector], Vector]
    """Maps every stored vector."""
    mask: TopK | None = None
    """Result of `choose_entries`."""

    @classmethod
    def of(cls, ctx: RunContext, keep: Callable[[Vector], Vector] = lambda v: v) -> Scoring:
        """Scores of a run; `keep` maps every stored vector (`at_hand` if all are read often)."""
        roles = ctx.roles()
        counts = {role: len(rows) for role, rows in roles.items()}
        return cls(ctx, roles["pool"], full_size(counts, ctx.config.data), keep)

    @cached_property
    def engine(self) -> GhostEngine:
        """The engine at θ̄."""
        model = self.ctx.theta_bar()
        return GhostEngine(model, self.ctx.candidates(model))

    @cached_property
    def scored(self) -> Scored:
        """u and its terms; calibrated examples alone are chosen without them."""
        return load_scored(self.ctx, self.engine, len(self.pool), self.keep)

    @classmethod
    def shared(cls, job: Job) -> Scoring:
        """The same object for both sides of a selection."""
        return job.shared("scoring", lambda job: cls.of(job.ctx))

    @property
    def rounding(self) -> np.ndarray:
        """Estimated rounding error of each score, from the self-check; zero for fp32 or fp64."""
        ctx, count = self.ctx, len(self.pool)
        if ctx.dtype not in HALF_DTYPES:
            return np.zeros(count)
        inner_sums = read_pool(ctx.folder("gradients") / "pool.parquet").get("inner_sums")
        with reading(ctx.folder("scores") / "summary.json"):
            return float(self.summary["rounding_ratio"]) * rounding_scales(inner_sums, count)

    @property
    def summary(self) -> dict[str, Any]:
        """4_scores/summary.json."""
        return (self.ctx.folder("scores") / "summary.json").read_json()

    def choose_entries(self, k: int, reverse: bool = False) -> TopK:
        """The exact signed top k of u ⊙ G; `reverse` takes the bottom k."""
        self.mask = choose_entries(self.scored, k, reverse)
        return self.mask

    def choose_examples(self, b: int, reverse: bool = False) -> Chosen:
        """The exact top b of the pool, or of its strata; `reverse` takes the bottom b."""
        ctx, pool = self.ctx, self.pool
        found = read_scores(folder := ctx.folder("scores"), pool)
        if found is None:
            raise RunError(
                f"{folder / 'examples.parquet'}: has no scores of examples; remove the folder "
                f"{folder.name} and run the same command again"
            )
        scores, bound = found[0], found[1] + self.rounding
        ties = np.array([e.index for e in pool])
        passes = pass_settings(ctx)

        def exactly(positions: np.ndarray) -> np.ndarray:
            assert ctx.config.score.form == "literal", "calibrated scores are exact"
            rows = [pool[i] for i in positions]
            return rescore(self.engine, rows, self.scored, passes, ctx.reporter)

        select = ctx.config.select
        return choose_examples(
            scores,
            bound,
            ties,
            b,
            exactly,
            ctx.reporter.say,
            reverse,
            pool,
            select.duplicates,
            make_strata(b, pool, select.per_source, select.lengths),
        )

    def describe(self, part: RunPath, data: Chosen, b: int) -> dict[str, Any]:
        """Write rescored.parquet; returns the data side of the summary."""
        ctx, pool = self.ctx, self.pool
        with reading(ctx.folder("scores") / "summary.json"):
            slack = float(self.summary["rounding_slack"])
        columns = {
            "id": pa.array([pool[i].id for i in data.rescored], pa.string()),
            "score": pa.array(data.scores[data.rescored], pa.float64()),
        }
        (part / "rescored.parquet").write_table(pa.table(columns))
        chosen = np.zeros(len(pool), bool)
        chosen[data.positions] = True
        half = ctx.dtype in HALF_DTYPES and self.summary["rounding_ratio"] > 0
        margin = self.rounding if half else np.full(len(pool), slack)
        if half:
            margin[data.rescored] /= WIDER
        near, gaps = np.zeros(len(pool), bool), []
        for draw in data.draws:  # each has its own boundary
            others = np.setdiff1d(draw.rows, draw.taken, assume_unique=True)
            if not len(others) or not len(draw.taken):
                continue
            lowest, highest_out = data.scores[draw.taken].min(), data.scores[others].max()
            gaps.append(float(lowest - highest_out))
            near[draw.taken] |= data.scores[draw.taken] - highest_out <= margin[draw.taken]
            near[others] |= lowest - data.scores[others] <= margin[others]
        num_near = int(near.sum())
        self._warn_of_few_targets(b)
        negative = int((data.scores[chosen] <= 0).sum())
        if not data.scores.any():
            ctx.reporter.warn(
                "all scores are zero, so the first rows of the pool are selected: the gradients "
                "vanish (are the model's weights zero?)",
                code="zero_scores",
            )
        elif negative:
            ctx.reporter.warn(
                f"{negative:,} of the {b:,} selected examples have a score ≤ 0: the budget exceeds "
                "what the scores recommend (lower select.data_budget)",
                code="nonpositive_scores",
            )
        ctx.reporter.say(
            f"examples: {b:,} of {self.num_full:,} rows ({100 * b / self.num_full:.2f} %); "
            f"{num_near:,} lie within the rounding slack of {slack:.2g} around the boundary"
        )
        return {
            "score_threshold": float(data.scores[chosen].min()),
            "boundary_gap": min(gaps, default=None),
            "rounding_slack": slack,
            "near_ties": num_near,
            "certified_in": data.inside,
            "certified_out": data.outside,
            "rescored": len(data.rescored),
            "num_nonpositive_examples": negative,
            "num_sign_uncertain": int((chosen & (np.abs(data.scores) <= data.bound)).sum()),
        }

    def _warn_of_few_targets(self, b: int) -> None:
        """Warn if the budget is clearly larger than the part of the pool that is on target."""
        summary, num_pool = self.summary, len(self.pool)
        if summary.get("target_share") is None:  # literal scores, or few validation examples
            return
        with reading(self.ctx.folder("scores") / "summary.json"):
            share, error = float(summary["target_share"]), float(summary["target_share_error"])
        if b > num_pool * (share + 2 * error):
            count = round(share * num_pool)
            self.ctx.reporter.warn(
                f"the budget of {b:,} examples exceeds the part of the pool that is like the "
                f"validation examples: about {count:,} of {num_pool:,} (lower "
                f"select.data_budget to {max(1, count):,}, or add rows of the target)",
                code="few_targets",
            )


def describe_entries(ctx: RunContext, mask: TopK) -> dict[str, Any]:
    """Threshold, boundary gap and number of nonpositive scores of a top-k; warns of the last."""
    if mask.num_nonpositive:
        ctx.reporter.warn(
            f"{mask.num_nonpositive:,} of the {mask.num_selected:,} selected entries have a score "
            "≤ 0: the budget exceeds what the scores recommend (lower select.param_budget)",
            code="nonpositive_scores",
        )
    gap = None if mask.next_score is None else mask.threshold - mask.next_score
    return {
        "threshold": mask.threshold,
        "param_boundary_gap": gap,
        "num_nonpositive_params": mask.num_nonpositive,
    }


class DualData(DataMethod):
    """The exact b largest signed scores: certificate, then re-scoring of undecided examples."""

    pool_roles = ("pool",)
    reverse = False

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        scoring = Scoring.shared(job)
        data = scoring.choose_examples(b, self.reverse)
        job.accounts.backward_examples += len(data.rescored)
        return DataChoice(data.positions, scoring.describe(job.part, data, b))


class ReversedData(DualData):
    """The b smallest signed scores."""

    reverse = True


class DualParams(ParamMethod):
    """The k largest signed scores over all candidates."""

    reverse = False

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        mask = Scoring.shared(job).choose_entries(k, self.reverse)
        return ParamChoice(mask.indices, describe_entries(job.ctx, mask))


class ReversedParams(DualParams):
    """The k smallest signed scores over all candidates."""

    reverse = True


class AllData(DataMethod):
    """All of D_train."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        return None


class AllParams(ParamMethod):
    """Every parameter."""

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        return None


def _draw(purpose: str, number: int) -> str:
    return f"{purpose} {number}" if number else purpose


class RandomData(DataMethod):
    """b examples, uniformly at random, without replacement."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        rng = job.rng(_draw("examples", self.options.draw))
        return DataChoice(rng.choice(len(pool), b, replace=False))


class RandomParams(ParamMethod):
    """k candidate entries, uniformly at random, without replacement."""

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        sizes = np.array([shape.numel() for shape in job.shapes().values()])
        ends = np.cumsum(sizes)
        flat = distinct(job.rng(_draw("entries", self.options.mask_draw)), int(ends[-1]), k)
        parts = np.split(flat, np.searchsorted(flat, ends[:-1]))
        indices = zip(job.shapes(), parts, ends - sizes, strict=True)
        return ParamChoice({name: torch.from_numpy(part - first) for name, part, first in indices})


def distinct(rng: np.random.Generator, total: int, count: int) -> np.ndarray:
    """`count` distinct integers below `total`, sorted; every such set is equally likely.

    Draws with replacement until enough values are distinct, because numpy's draws without
    replacement either hold a permutation of `total` or are limited to 1e9. For more than half of
    `total`, the complement is drawn instead.
    """
    if 2 * count > total:
        left = np.ones(total, dtype=bool)
        left[distinct(rng, total, total - count)] = False
        return np.flatnonzero(left)
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        drawn = rng.integers(0, total, count - len(found), dtype=np.int64)
        found = np.sort(np.concatenate([found, drawn]))
        found = found[np.append(True, found[1:] != found[:-1])]  # np.unique is far slower
    return found
