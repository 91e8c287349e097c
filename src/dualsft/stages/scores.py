"""Scores: Algorithm 1 line 8, s_θ ← u ⊙ G and s_D ← GhostDot(u, θ̄, D_pool).

Two-pass mode streams the pool again and gives exact s_D. One-pass mode turns the f of the pool
pass into scores with a bound each; what a budget leaves ambiguous is scored exactly by the
selection. Every run checks itself (ALGORITHM.md §3.1): Σ_n s_D,n against ⟨u, G⟩, and three random
examples scored again alone by plain autograd; when either fails nothing is written and nothing
can be selected. Reads 1_split, 2_warmup, 3_gradients; writes examples.parquet, summary.json and,
on request, params.safetensors and projection.safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dualsft.certificate import bounds
from dualsft.context import RunContext, pass_settings
from dualsft.data import Example
from dualsft.errors import RunError
from dualsft.ghost import GhostEngine
from dualsft.model import Candidates
from dualsft.passes import TOLERANCE, dot_alone, loss_objective, walk
from dualsft.progress import Reporter
from dualsft.stages.gradients import read_pool
from dualsft.stages.projection import ProjectionTerms, param_score_chunk, projection_terms
from dualsft.vectors import ParamVector

NUM_ALONE = 3
SLACK_FACTOR = 4.0  # the rounding slack is this many times the largest error seen on an example


@dataclass(frozen=True)
class Scored:
    """The shared projection and everything it is made of, as the later stages need it."""

    terms: ProjectionTerms
    grad_sum: ParamVector
    prior_grad: ParamVector
    projection: ParamVector
    """u / eta_sc."""


def load_scored(ctx: RunContext, candidates: Candidates, n_sc: int) -> Scored:
    """Algorithm 1 line 7 from the vectors on disk."""
    val_grad = ctx.vector("gradients", "val_grad", candidates)
    prior_grad = ctx.vector("gradients", "prior_grad", candidates)
    grad_sum = ctx.vector("gradients", "grad_sum", candidates)
    curvature = ctx.curvature(candidates)
    terms = projection_terms(ctx.config, n_sc, val_grad, prior_grad, curvature)
    return Scored(terms, grad_sum, prior_grad, terms.projection(grad_sum))


def run(ctx: RunContext, part: Path) -> dict[str, Any]:
    """Write the scores, their bounds, and the summary with its self-checks into `part`."""
    pool_examples = ctx.roles()["pool"]
    pool = read_pool(ctx.folder("gradients") / "pool.parquet")
    model = ctx.theta_bar()
    engine = GhostEngine(model, ctx.candidates(model))
    scored = load_scored(ctx, engine.candidates, len(pool_examples))
    summary = _summary(ctx, scored)
    if ctx.config.select.variant != "param":
        direction, dots, bound = _example_dots(ctx, engine, pool_examples, pool, scored)
        checks = _check_sum(ctx, dots, direction, scored)
        checks |= _check_alone(ctx, engine, pool_examples, dots, direction, scored)
        _write_examples(part, pool_examples, pool, scored.terms.eta_sc, dots, bound)
        summary["total_examples"] = checks["sum_of_scores"]
        summary["direction_dot_G"] = checks["direction_dot_G"]
    else:
        checks = _check_alone(ctx, engine, pool_examples, None, scored.projection, scored)
        _write_examples(part, pool_examples, pool, scored.terms.eta_sc, None, None)
        summary["total_examples"] = None
    summary |= {"checks": checks, "rounding_slack": checks.pop("rounding_slack")}
    _keep(ctx, part, scored)
    _warn(ctx, summary)
    (part / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return {"curvature_share": summary["curvature_share"], "checks": summary.get("checks")}


def _example_dots(
    ctx: RunContext,
    engine: GhostEngine,
    examples: list[Example],
    pool: dict[str, np.ndarray],
    scored: Scored,
) -> tuple[ParamVector, np.ndarray, np.ndarray]:
    """(direction used, ⟨direction, g_n⟩, bound on the distance to ⟨u, g_n⟩), all over eta_sc."""
    if ctx.config.score.mode == "one_pass":
        residual = scored.terms.residual(scored.grad_sum).block_norms()
        norms = np.array([residual[name] for name in engine.columns])
        return scored.terms.estimate(), pool["f"], bounds(pool["inner_sums"], norms)
    result = walk(
        engine,
        examples,
        loss_objective(engine.model),
        pass_settings(ctx),
        ctx.reporter,
        "pool (scores)",
        direction=scored.projection,
    )
    return scored.projection, result.dots, np.zeros(len(examples))


def _check_sum(
    ctx: RunContext, dots: np.ndarray, direction: ParamVector, scored: Scored
) -> dict[str, Any]:
    """ALGORITHM.md §3.1, first half: Σ_n s_D,n = ⟨direction, G⟩; refuses to go on otherwise."""
    tolerance, eta_sc = TOLERANCE[ctx.dtype], scored.terms.eta_sc
    expected, total = direction.dot(scored.grad_sum), float(dots.sum())
    magnitude = float(np.abs(dots).sum())
    error = abs(total - expected) / magnitude if magnitude else 0.0
    if abs(total - expected) > tolerance * magnitude:
        raise RunError(
            f"self-check failed: the example scores sum to {total * eta_sc:.6g}, ⟨u, G⟩ is "
            f"{expected * eta_sc:.6g} (difference over Σ|score|: {error:.2g} > {tolerance:g}); "
            "nothing was written. The model computes something its layers do not show: please "
            "report it"
        )
    return {
        "sum_of_scores": total * eta_sc,
        "direction_dot_G": expected * eta_sc,
        "relative_error": error,
    }


def _check_alone(
    ctx: RunContext,
    engine: GhostEngine,
    examples: list[Example],
    dots: np.ndarray | None,
    direction: ParamVector,
    scored: Scored,
) -> dict[str, Any]:
    """ALGORITHM.md §3.1, second half: random examples again, alone, by plain autograd.

    Without scores of the pool (DualSFT-Param) the probes are scored here, so that the rules G was
    summed with are checked all the same.
    """
    tolerance, eta_sc = TOLERANCE[ctx.dtype], scored.terms.eta_sc
    rng = np.random.default_rng(ctx.config.seed)
    probes = rng.choice(len(examples), min(NUM_ALONE, len(examples)), replace=False)
    rows = [examples[i] for i in probes]
    settings = pass_settings(ctx)
    if dots is None:
        objective, silent = loss_objective(engine.model), Reporter(lambda _: None)
        got = walk(engine, rows, objective, settings, silent, "probes", direction=direction).dots
        largest = float(np.abs(got).max())
    else:
        got, largest = dots[probes], float(np.abs(dots).max())
    scale, errors, told = direction.norm(), [], []
    with ctx.reporter.track("self-check (scored alone)", len(rows), "examples") as progress:
        for example, ours in zip(rows, got, strict=True):
            exact, norm = dot_alone(engine, example, direction, settings)
            errors.append(abs(exact - ours))
            error = errors[-1] / (scale * norm) if scale * norm > 0 else 0.0
            told.append(
                {"id": example.id, "score": ours * eta_sc, "alone": exact * eta_sc, "error": error}
            )
            progress.advance(1, tokens=example.num_tokens)
            if not error <= tolerance:
                raise RunError(
                    f"self-check failed: example {example.id} scores {ours * eta_sc:.6g} in its "
                    f"batch and {exact * eta_sc:.6g} alone by plain autograd (error {error:.2g} of "
                    f"‖u‖‖g‖ > {tolerance:g}); nothing was written"
                )
    floor = float(torch.finfo(engine.candidates.dtype).eps) * largest
    slack = SLACK_FACTOR * max(floor, *errors) * eta_sc
    return {"tolerance": tolerance, "alone": told, "rounding_slack": slack}


def _summary(ctx: RunContext, scored: Scored) -> dict[str, Any]:
    """Norms, cosines, the curvature share: what a reader needs to believe u."""
    terms = scored.terms
    v_new, v_prior, grad_sum = terms.val_grad, scored.prior_grad, scored.grad_sum
    second = terms.second_order(grad_sum).norm() if terms.curvature is not None else 0.0
    first = terms.v_val.norm()
    u_dot_g = scored.projection.dot(grad_sum) * terms.eta_sc
    return {
        "mode": ctx.config.score.mode,
        "eta_ft": terms.eta_ft,
        "eta_sc": terms.eta_sc,
        "n_sc": terms.n_sc,
        "lam": ctx.config.score.lam,
        "lam_relative": ctx.config.score.lam_relative,
        "lam_effective": terms.lam_effective,
        "u_dot_G": u_dot_g,
        "total_params": u_dot_g,
        "curvature_share": second / first if first > 0 else None,
        "norms": {
            "val_grad": v_new.norm(),
            "prior_grad": v_prior.norm(),
            "grad_mean": grad_sum.norm() / terms.n_sc,
            "v_val": first,
            "second_order": second,
            "projection": scored.projection.norm() * terms.eta_sc,
        },
        "cosines": {
            "val_grad_grad_sum": v_new.cosine(grad_sum),
            "val_grad_prior_grad": v_new.cosine(v_prior),
            "prior_grad_grad_sum": v_prior.cosine(grad_sum),
        },
    }


def _warn(ctx: RunContext, summary: dict[str, Any]) -> None:
    norms, lam = summary["norms"], summary["lam_effective"]
    if lam * norms["prior_grad"] > 2 * norms["val_grad"]:
        ctx.reporter.warn(
            f"preservation dominates: λ‖v_prior‖ = {lam * norms['prior_grad']:.3g} is over twice "
            f"‖v_new‖ = {norms['val_grad']:.3g}; the selection mostly protects the old behaviour "
            "(score.lam_relative=true makes λ scale-free)"
        )
    share = summary["curvature_share"]
    if share is not None:
        ctx.reporter.say(f"curvature share ‖second‖/‖first‖ of u: {share:.3g}")


def _write_examples(
    part: Path,
    examples: list[Example],
    pool: dict[str, np.ndarray],
    eta_sc: float,
    dots: np.ndarray | None,
    bound: np.ndarray | None,
) -> None:
    """examples.parquet; without per-example products (DualSFT-Param) score and bound are null."""
    count = len(examples)
    none = pa.nulls(count, pa.float64())
    table = {
        "id": [e.id for e in examples],
        "score": none if dots is None else dots * eta_sc,
        "exact": np.zeros(count, bool) if bound is None else bound == 0.0,
        "bound": none if bound is None else bound * eta_sc,
        "loss": pool["loss"],
        "response_tokens": pa.array(pool["response_tokens"], pa.int32()),
    }
    pq.write_table(pa.table(table), part / "examples.parquet")


def kept_vectors(ctx: RunContext) -> set[str]:
    """What `score.keep` asks for beyond the gradients: param_scores, projection."""
    asked = {word.strip() for word in ctx.config.score.keep.split(",")}
    vectors = {"param_scores", "projection"}
    return vectors if "all" in asked else asked & vectors


def _keep(ctx: RunContext, part: Path, scored: Scored) -> None:
    kept = kept_vectors(ctx)
    eta_sc = scored.terms.eta_sc
    if "param_scores" in kept:
        scores = scored.projection.combine(
            lambda u, g: param_score_chunk(eta_sc, u, g), scored.grad_sum
        )
        scores.save(part / "params.safetensors", eta_sc=eta_sc)
    if "projection" in kept:
        scored.projection.scaled(eta_sc).save(part / "projection.safetensors", eta_sc=eta_sc)
