"""Selection: Algorithm 1 lines 9 to 11, m_θ ← TopK(s_θ, k) and D_sel ← TopB(s_D, b).

Exact, signed, global over all candidates. The parameter scores u ⊙ G are formed chunk by chunk at
each reading of the top-k and never exist as a whole. In one-pass mode the certificate (ALGORITHM.md
§4) says which examples this budget leaves open; those, and in half precision those that rounding
could move across the boundary, are scored exactly here. Reads 1_split to 4_scores and the source
file; writes mask.safetensors, selected.jsonl, rescored.parquet, summary.json, and round_<t>/ for
each round of fixed-side re-selection (`stages/reselection.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualsft.certificate import judge, settle
from dualsft.context import RunContext
from dualsft.data import Example
from dualsft.errors import ConfigError
from dualsft.fused import HALF_DTYPES
from dualsft.ghost import GhostEngine, widened
from dualsft.stages.chosen import product_source, write_mask, write_selected
from dualsft.stages.gradients import read_pool
from dualsft.stages.reselection import reselect
from dualsft.stages.scores import Scored, exact_dots, load_scored, rounding_scales
from dualsft.stages.split import resolve_budget
from dualsft.topk import topk_signed

WIDER = 8.0  # what is scored again with TF32 products or better is this much less rounded than bf16


@dataclass(frozen=True)
class DataChoice:
    """The selected positions of the pool and how they were found."""

    positions: np.ndarray
    scores: np.ndarray
    """Best known score of every pool example, eta_sc included."""
    bound: np.ndarray
    """How far each may be from the exact one; zero where it was scored exactly."""
    rescored: np.ndarray
    """Positions scored exactly by this stage."""
    inside: int
    outside: int


def run(ctx: RunContext, part: Path) -> dict[str, Any]:
    """Write the mask and the subset for this budget into `part`."""
    roles = ctx.roles()
    pool = roles["pool"]
    num_full = sum(len(rows) for rows in roles.values())
    model = ctx.theta_bar()
    engine = GhostEngine(model, ctx.candidates(model))
    scored = load_scored(ctx, engine.candidates, len(pool))
    variant = ctx.config.select.variant
    summary: dict[str, Any] = {"variant": variant, "final": "."}
    mask, data = None, None
    if variant != "data":
        k = param_budget(ctx, scored.grad_sum.num_entries)
        source = product_source(scored.projection, scored.grad_sum, scored.terms.eta_sc)
        mask = topk_signed(source, k)
        del source  # it may hold two vectors on the card
        summary |= write_mask(ctx, part, mask)
    if variant != "param":
        b = data_budget(ctx, num_full, len(pool))
        data = choose_examples(ctx, engine, pool, scored, b)
        summary |= _describe_data(ctx, part, pool, data, b, num_full)
        write_selected(ctx, part, [pool[i] for i in data.positions])
    if ctx.config.select.rounds:
        assert mask is not None and data is not None
        summary |= reselect(ctx, part, engine, pool, scored, mask, data.positions)
    (part / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return {key: summary[key] for key in ("k", "b", "rescored") if key in summary}


def data_budget(ctx: RunContext, num_full: int, num_pool: int) -> int:
    """b, a share of |D_full|; it must fit the pool."""
    budget = ctx.config.select.data_budget
    b = resolve_budget(budget, num_full, "select.data_budget")
    if b > num_pool:
        raise ConfigError(
            f"select.data_budget: {budget!r} of {num_full:,} rows is {b:,} examples, but the "
            f"scoring pool has {num_pool:,}; lower it, or split.val, split.anchor, split.warm"
        )
    return b


def param_budget(ctx: RunContext, num_candidates: int) -> int:
    """k, a share of the candidate entries."""
    budget = ctx.config.select.param_budget
    k = resolve_budget(budget, num_candidates, "select.param_budget")
    if k > num_candidates:
        raise ConfigError(
            f"select.param_budget: {budget!r} is more than the {num_candidates:,} candidate "
            f"entries (score.candidates={ctx.config.score.candidates}); lower it"
        )
    return k


def choose_examples(
    ctx: RunContext, engine: GhostEngine, pool: list[Example], scored: Scored, b: int
) -> DataChoice:
    """The exact top b: by the certificate where it decides, by exact scores where it does not.

    In half precision the measured rounding widens the bounds: what it could move across the
    boundary is scored again with fp32 weights.
    """
    table = pq.read_table(ctx.folder("scores") / "examples.parquet")
    score, bound = table["score"].to_numpy().copy(), table["bound"].to_numpy().copy()
    bound += half_rounding(ctx, len(pool))
    verdict = judge(score, bound, b)
    open_rows = np.flatnonzero(verdict.open)
    inexact = open_rows[bound[open_rows] > 0]
    if len(inexact):
        ctx.reporter.say(
            f"certificate: {int(verdict.inside.sum()):,} in, {int(verdict.outside.sum()):,} out, "
            f"{len(inexact):,} of {len(pool):,} examples are scored exactly"
        )
        score[inexact] = rescore(ctx, engine, [pool[i] for i in inexact], scored)
        bound[inexact] = 0.0
    ties = np.array([e.index for e in pool])
    positions = settle(verdict, score, ties, b)
    counts = (int(verdict.inside.sum()), int(verdict.outside.sum()))
    return DataChoice(positions, score, bound, inexact, *counts)


def rescore(
    ctx: RunContext, engine: GhostEngine, examples: list[Example], scored: Scored
) -> np.ndarray:
    """s_D = ⟨u, g_n⟩ of these examples, exactly."""
    with widened(engine.model, tensor_cores=True):
        dots = exact_dots(ctx, engine, examples, scored.projection, "re-scoring")
    return dots * scored.terms.eta_sc


def half_rounding(ctx: RunContext, count: int) -> np.ndarray:
    """How far half precision may have moved each score, by the probes of the self-check; zero when
    the model is in fp32 or fp64."""
    if ctx.dtype not in HALF_DTYPES:
        return np.zeros(count)
    scales = rounding_scales(read_pool(ctx.folder("gradients") / "pool.parquet"))
    return _summary_of_scores(ctx)["rounding_ratio"] * scales


def _summary_of_scores(ctx: RunContext) -> dict[str, Any]:
    return json.loads((ctx.folder("scores") / "summary.json").read_text())


def _describe_data(
    ctx: RunContext, folder: Path, pool: list[Example], data: DataChoice, b: int, num_full: int
) -> dict[str, Any]:
    """rescored.parquet and the data side of the summary."""
    slack = _summary_of_scores(ctx)["rounding_slack"]
    pq.write_table(
        pa.table(
            {
                "id": pa.array([pool[i].id for i in data.rescored], pa.string()),
                "score": pa.array(data.scores[data.rescored], pa.float64()),
            }
        ),
        folder / "rescored.parquet",
    )
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
    lengths = np.array([e.num_response_tokens for e in pool])
    negative = int((data.scores[chosen] <= 0).sum())
    unsure = int((chosen & (np.abs(data.scores) <= data.bound)).sum())
    if negative:
        ctx.reporter.warn(
            f"{negative:,} of the {b:,} selected examples have a score ≤ 0: the budget exceeds "
            "what the scores recommend (lower select.data_budget)"
        )
    ctx.reporter.say(
        f"examples: {b:,} of {num_full:,} rows ({100 * b / num_full:.2f} %); {near:,} lie within "
        f"the rounding slack of {slack:.2g} around the boundary"
    )
    return {
        "b": b,
        "num_full": num_full,
        "data_share": b / num_full,
        "score_threshold": lowest,
        "boundary_gap": None if highest_out is None else lowest - highest_out,
        "rounding_slack": slack,
        "near_ties": near,
        "certified_in": data.inside,
        "certified_out": data.outside,
        "rescored": len(data.rescored),
        "num_nonpositive_examples": negative,
        "num_sign_uncertain": unsure,
        "response_tokens_selected": float(lengths[chosen].mean()),
        "response_tokens_pool": float(lengths.mean()),
    }
