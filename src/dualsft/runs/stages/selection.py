"""Selection: Algorithm 1 lines 9 to 11, m_θ ← TopK(s_θ, k) and D_sel ← TopB(s_D, b).

`run` calls the run's methods (`runs/method.py`), examples first; `Scoring` implements DualSFT's own
methods. Their selection is exact, signed, and global over all candidates. The parameter scores
u ⊙ G are computed chunk by chunk each time the top-k reads them and are never held in full. In
one-pass mode the certificate (docs/algorithm.md, "One pass instead of two") leaves some examples
undecided; these, and in half precision those that rounding could move across the boundary, are
scored exactly here. Reads 1_split to 4_scores and the source file; writes mask.safetensors,
selected.jsonl, rescored.parquet, summary.json, and round_<t>/ for each round of fixed-side
re-selection (`runs/stages/reselection.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dualsft.algorithm.projection import Scored
from dualsft.algorithm.scores import rounding_scales
from dualsft.algorithm.selection import Chosen, choose_entries, choose_examples, rescore
from dualsft.algorithm.split import resolve_budget
from dualsft.algorithm.topk import TopK
from dualsft.data.examples import Example
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import GhostEngine
from dualsft.errors import ConfigError, RunError
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.method import DataMethod, Job, ParamChoice, ParamMethod
from dualsft.runs.stages import reuse as lent
from dualsft.runs.stages.chosen import (
    describe_entries,
    write_baseline_scores,
    write_mask,
    write_selected,
)
from dualsft.runs.stages.gradients import read_pool
from dualsft.runs.stages.reselection import reselect
from dualsft.runs.stages.scores import load_scored
from dualsft.storage.vectors import Vector
from dualsft.system.paths import RunPath


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Select examples and entries with the run's methods; write both to `part`."""
    common: dict[str, Any] = {}
    accounts: dict[str, Any] = {}
    summary: dict[str, Any] = {
        "variant": ctx.config.select.variant,
        "methods": {axis: ctx.methods.entries[axis].name for axis in ("data", "params")},
        "final": ".",
    }
    examples, positions, noted = _choose_data(ctx, part, common, summary, accounts)
    mask = _choose_params(ctx, part, common, summary, accounts, examples)
    if ctx.config.select.rounds:
        scoring = common["scoring"]
        assert mask is not None and positions is not None
        summary |= reselect(
            ctx, part, scoring.engine, scoring.pool, scoring.scored, scoring.mask, positions
        )
    (part / "summary.json").write_json(summary)
    facts = {key: summary[key] for key in ("k", "b", "rescored") if key in summary}
    facts |= {
        "accounts": accounts
    }  # timings vary between runs, so they go to the manifest, not to summary.json
    return facts | noted


def _choose_data(
    ctx: RunContext,
    part: RunPath,
    common: dict[str, Any],
    summary: dict[str, Any],
    accounts: dict[str, Any],
) -> tuple[list[Example], np.ndarray | None, dict[str, Any]]:
    """(training examples, their positions in the pool, manifest facts).

    The positions are None if the method chose everything.
    """
    method: DataMethod = ctx.methods.load("data")
    job = Job(ctx, "data", part, common=common)
    num_full = sum(len(rows) for rows in job.roles.values())
    pool = sorted((e for role in method.pool_roles for e in job.roles[role]), key=_source_order)
    b = data_budget(ctx, num_full, len(pool)) if method.entry.uses_budget else len(pool)
    asked = lent.identity(ctx)
    told = len(ctx.reporter.warnings)
    if (found := lent.find(ctx, asked, pool, b)) is not None:
        ctx.reporter.say(f"the examples of {method.entry.name} are reused from {found.folder}")
        choice, job.accounts = found.choice, found.accounts
        for warning, code in found.warnings.items():
            ctx.reporter.warn(warning, code)
    else:
        with job.measured():
            choice = method.choose(job, pool, b)
    warnings = {text: ctx.reporter.codes[text] for text in ctx.reporter.warnings[told:]}
    accounts["data"] = job.accounts.as_dict()
    if choice is None:
        return pool, None, {}
    positions = np.sort(np.asarray(choice.positions))
    if len(np.unique(positions)) != b or not 0 <= positions[0] <= positions[-1] < len(pool):
        raise RunError(
            f"method.data={method.entry.name} chose {len(np.unique(positions)):,} distinct "
            f"examples instead of {b:,} of {len(pool):,}: this is a bug in the method"
        )
    lengths = np.array([e.num_response_tokens for e in pool])
    summary |= {
        "b": b,
        "num_full": num_full,
        "data_share": b / num_full,
        "response_tokens_selected": float(lengths[positions].mean()),
        "response_tokens_pool": float(lengths.mean()),
        **choice.facts,
    }
    rows = [pool[i] for i in positions]
    write_selected(ctx, part, rows)
    if choice.scores is not None:
        write_baseline_scores(part / "baseline_scores.parquet", pool, choice.scores)
    if not ctx.methods.scored("data"):
        ctx.reporter.say(
            f"examples: {b:,} of {num_full:,} rows ({100 * b / num_full:.2f} %) by "
            f"{method.entry.name}"
        )
    return rows, positions, lent.note(asked, choice, warnings, found)


def _choose_params(
    ctx: RunContext,
    part: RunPath,
    common: dict[str, Any],
    summary: dict[str, Any],
    accounts: dict[str, Any],
    examples: list[Example],
) -> ParamChoice | None:
    method: ParamMethod = ctx.methods.load("params")
    job = Job(ctx, "params", part, examples, common)
    eligible = method.eligible(job)
    k = param_budget(ctx, eligible) if method.entry.uses_budget else 0
    with job.measured():
        choice = method.choose(job, k)
    accounts["params"] = job.accounts.as_dict()
    if choice is None:
        return None
    count = sum(index.numel() for index in choice.indices.values())
    if method.entry.uses_budget and count > k and not choice.literal:
        raise RunError(
            f"method.params={method.entry.name} chose {count:,} entries, more than the budget of "
            f"{k:,}: this is a bug in the method"
        )
    summary |= write_mask(ctx, part, choice.indices, denominator(ctx, eligible))
    asked = None if choice.literal else k or None
    summary |= {"budget_entries": asked, **choice.facts}
    return choice


def _source_order(example: Example) -> int:
    return example.index


def data_budget(ctx: RunContext, num_full: int, num_pool: int) -> int:
    """b, from a share of |D_full|; raises if it exceeds the pool."""
    budget = ctx.config.select.data_budget
    b = resolve_budget(budget, num_full, "select.data_budget")
    if b > num_pool:
        raise ConfigError(
            f"select.data_budget: {budget!r} of {num_full:,} rows is {b:,} examples, but the "
            f"scoring pool has {num_pool:,}; lower it, or split.val, split.anchor, split.warm"
        )
    return b


def denominator(ctx: RunContext, eligible: Mapping[str, torch.Size]) -> int:
    """Number of entries that a fractional select.param_budget refers to (`method.denominator`)."""
    counts = {
        "candidates": ctx.num_candidates,
        "all": ctx.num_parameters,
        "eligible": sum(shape.numel() for shape in eligible.values()),
    }
    return counts[ctx.config.method.denominator]


def param_budget(ctx: RunContext, eligible: Mapping[str, torch.Size]) -> int:
    """k, from a share of the denominator; raises if it exceeds the eligible entries."""
    budget, total = ctx.config.select.param_budget, denominator(ctx, eligible)
    most = sum(shape.numel() for shape in eligible.values())
    k = resolve_budget(budget, total, "select.param_budget")
    if k > most:
        what = "candidate entries" if ctx.methods.scored("params") else "entries it chooses from"
        raise ConfigError(
            f"select.param_budget: {budget!r} is {k:,} entries, more than the {most:,} {what} "
            f"(score.candidates={ctx.config.score.candidates}); lower it"
        )
    return k


WIDER = 8.0  # rounding of bf16 scores over that of re-scored ones (TF32 products or better)


@dataclass
class Scoring:
    """Inputs of DualSFT's own selection on both sides: u, G, the engine, the pool."""

    ctx: RunContext
    engine: GhostEngine
    pool: list[Example]
    scored: Scored
    num_full: int
    mask: TopK | None = None
    """Result of `choose_entries`."""

    @classmethod
    def of(cls, ctx: RunContext, keep: Callable[[Vector], Vector] = lambda v: v) -> Scoring:
        """Load the scores; `keep` maps every stored vector (`at_hand` if all are read often)."""
        roles = ctx.roles()
        model = ctx.theta_bar()
        engine = GhostEngine(model, ctx.candidates(model))
        scored = load_scored(ctx, engine.candidates, len(roles["pool"]), keep)
        return cls(ctx, engine, roles["pool"], scored, sum(len(rows) for rows in roles.values()))

    def choose_entries(self, k: int, reverse: bool = False) -> TopK:
        """The exact signed top k of u ⊙ G; `reverse` takes the bottom k."""
        self.mask = choose_entries(self.scored, k, reverse)
        return self.mask

    def choose_examples(self, b: int, reverse: bool = False) -> Chosen:
        """The exact top b of the pool; `reverse` takes the bottom b."""
        ctx, pool = self.ctx, self.pool
        table = (ctx.folder("scores") / "examples.parquet").read_table()
        scores, bound = table["score"].to_numpy(), table["bound"].to_numpy()
        bound = bound + half_rounding(ctx, len(pool))
        ties = np.array([e.index for e in pool])
        passes = pass_settings(ctx)

        def exactly(positions: np.ndarray) -> np.ndarray:
            rows = [pool[i] for i in positions]
            return rescore(self.engine, rows, self.scored, passes, ctx.reporter)

        return choose_examples(scores, bound, ties, b, exactly, ctx.reporter.say, reverse)

    def describe_entries(self, mask: TopK) -> dict[str, Any]:
        return describe_entries(self.ctx, mask)

    def describe(self, part: RunPath, data: Chosen, b: int) -> dict[str, Any]:
        return _describe_data(self.ctx, part, self.pool, data, b, self.num_full)


def half_rounding(ctx: RunContext, count: int) -> np.ndarray:
    """Estimated rounding error of each score, from the self-check; zero for fp32 or fp64 models."""
    if ctx.dtype not in HALF_DTYPES:
        return np.zeros(count)
    pool = read_pool(ctx.folder("gradients") / "pool.parquet")
    scales = rounding_scales(pool.get("inner_sums"), count)
    return _summary_of_scores(ctx)["rounding_ratio"] * scales


def _summary_of_scores(ctx: RunContext) -> dict[str, Any]:
    return (ctx.folder("scores") / "summary.json").read_json()


def _describe_data(
    ctx: RunContext, folder: RunPath, pool: list[Example], data: Chosen, b: int, num_full: int
) -> dict[str, Any]:
    """Write rescored.parquet; returns the data side of the summary."""
    slack = _summary_of_scores(ctx)["rounding_slack"]
    columns = {
        "id": pa.array([pool[i].id for i in data.rescored], pa.string()),
        "score": pa.array(data.scores[data.rescored], pa.float64()),
    }
    (folder / "rescored.parquet").write_table(pa.table(columns))
    chosen = np.zeros(len(pool), bool)
    chosen[data.positions] = True
    lowest = float(data.scores[chosen].min())
    highest_out = float(data.scores[~chosen].max()) if b < len(pool) else None
    near = 0
    if highest_out is not None:
        half = ctx.dtype in HALF_DTYPES
        margin = half_rounding(ctx, len(pool)) if half else np.full(len(pool), slack)
        if half:
            margin[data.rescored] /= WIDER
        distance = np.where(chosen, data.scores - highest_out, lowest - data.scores)
        near = int((distance <= margin).sum())
    negative = int((data.scores[chosen] <= 0).sum())
    unsure = int((chosen & (np.abs(data.scores) <= data.bound)).sum())
    if negative:
        ctx.reporter.warn(
            f"{negative:,} of the {b:,} selected examples have a score ≤ 0: the budget exceeds "
            "what the scores recommend (lower select.data_budget)",
            code="nonpositive_scores",
        )
    ctx.reporter.say(
        f"examples: {b:,} of {num_full:,} rows ({100 * b / num_full:.2f} %); {near:,} lie within "
        f"the rounding slack of {slack:.2g} around the boundary"
    )
    return {
        "score_threshold": lowest,
        "boundary_gap": None if highest_out is None else lowest - highest_out,
        "rounding_slack": slack,
        "near_ties": near,
        "certified_in": data.inside,
        "certified_out": data.outside,
        "rescored": len(data.rescored),
        "num_nonpositive_examples": negative,
        "num_sign_uncertain": unsure,
    }
