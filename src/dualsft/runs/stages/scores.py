"""Scores: Algorithm 1 line 8, s_θ ← u ⊙ G and s_D ← GhostDot(u, θ̄, D_pool).

Two-pass mode streams the pool again and gives exact s_D. One-pass mode turns the f of the pool
pass into scores with a bound each; what a budget leaves ambiguous is scored exactly by the
selection. Every run checks itself (ALGORITHM.md §3.1): Σ_n s_D,n against ⟨u, G⟩, and three random
examples scored again alone by plain autograd; when either fails nothing is written and nothing
can be selected. Reads 1_split, 2_warmup, 3_gradients; writes examples.parquet, summary.json and,
on request, params.safetensors and projection.safetensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dualsft.algorithm.certificate import bounds
from dualsft.algorithm.projection import ProjectionTerms, param_scores, projection_terms
from dualsft.algorithm.self_checks import TOLERANCE, dot_alone
from dualsft.data.examples import Example
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import GhostEngine, widened
from dualsft.engine.walk import loss_objective, walk
from dualsft.errors import RunError
from dualsft.model.load import Candidates
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.stages.chosen import at_hand
from dualsft.runs.stages.gradients import one_pass_wanted, read_pool
from dualsft.storage.vectors import Products, Vector
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter

NUM_ALONE = 3
NUM_ALONE_HALF = 16  # in half precision, where they also tell how much rounding to expect
SLACK_FACTOR = 4.0  # rounding is taken to be this many times what the probes show
ROUNDING_LIMIT = 0.05  # of ‖u‖‖g‖: half precision that changes a score by more is of no use


@dataclass(frozen=True)
class Scored:
    """The shared projection and everything it is made of, as the later stages need it."""

    terms: ProjectionTerms
    grad_sum: Vector
    prior_grad: Vector
    projection: Vector
    """u / eta_sc."""


def load_scored(
    ctx: RunContext,
    candidates: Candidates,
    n_sc: int,
    keep: Callable[[Vector], Vector] = lambda v: v,
) -> Scored:
    """Algorithm 1 line 7 from the vectors on disk, each as `keep` gives it."""
    val_grad = keep(ctx.vector("gradients", "val_grad", candidates))
    prior_grad = keep(ctx.vector("gradients", "prior_grad", candidates))
    grad_sum = keep(ctx.vector("gradients", "grad_sum", candidates))
    curvature = ctx.curvature(candidates)
    curvature = None if curvature is None else keep(curvature)
    terms = projection_terms(ctx.config, n_sc, val_grad, prior_grad, curvature)
    return Scored(terms, grad_sum, prior_grad, terms.projection(grad_sum))


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Write the scores, their bounds, and the summary with its self-checks into `part`."""
    pool_examples = ctx.roles()["pool"]
    pool = read_pool(ctx.folder("gradients") / "pool.parquet")
    model = ctx.theta_bar()
    engine = GhostEngine(model, ctx.candidates(model))
    scored = load_scored(ctx, engine.candidates, len(pool_examples))
    one_pass = one_pass_wanted(ctx)
    direction = scored.terms.estimate() if one_pass else scored.projection
    products = _products(scored, direction)
    summary = _summary(ctx, scored, products)
    if ctx.methods.scored("data"):
        if one_pass:
            residual = products.block_norms("residual")
            norms = np.array([residual[name] for name in engine.columns])
            dots, bound = pool["f"], bounds(pool["inner_sums"], norms)
        else:
            dots = exact_dots(ctx, engine, pool_examples, direction, "pool (scores)")
            bound = np.zeros(len(pool_examples))
        checks = _check_sum(ctx, dots, products, scored)
        scales = rounding_scales(pool)
        checks |= _check_alone(
            ctx, engine, pool_examples, dots, direction, products, scored, scales
        )
        _write_examples(part, pool_examples, pool, scored.terms.eta_sc, dots, bound)
        summary["total_examples"] = checks["sum_of_scores"]
        summary["direction_dot_G"] = checks["direction_dot_G"]
    else:
        scales = np.ones(len(pool_examples))
        checks = _check_alone(ctx, engine, pool_examples, None, direction, products, scored, scales)
        _write_examples(part, pool_examples, pool, scored.terms.eta_sc, None, None)
        summary["total_examples"] = None
    rounding = {key: checks.pop(key) for key in ("rounding_slack", "rounding_ratio")}
    summary |= {"checks": checks, **rounding}
    _keep(ctx, part, scored)
    _warn(ctx, summary)
    (part / "summary.json").write_json(summary)
    return {"curvature_share": summary["curvature_share"], "checks": summary.get("checks")}


def exact_dots(
    ctx: RunContext, engine: GhostEngine, examples: list[Example], direction: Vector, label: str
) -> np.ndarray:
    """⟨direction, g_n⟩ of these examples by a walk of its own."""
    settings, say = pass_settings(ctx), ctx.reporter
    with ctx.precise("pool", label, engine.model) as (wide,):
        objective = loss_objective(wide)
        result = walk(
            engine.on(wide), examples, objective, settings, say, label, direction=direction
        )
    return result.dots


def _products(scored: Scored, direction: Vector) -> Products:
    """All that the summary, the sum check and the bounds take from the vectors: one reading."""
    terms, grad_sum = scored.terms, scored.grad_sum
    vectors = {
        "val_grad": terms.val_grad,
        "prior_grad": scored.prior_grad,
        "grad_sum": grad_sum,
        "v_val": terms.v_val,
        "second_order": terms.second_order(grad_sum),
        "residual": terms.residual(grad_sum),
        "projection": scored.projection,
        "direction": direction,
    }
    pairs = [(name, name) for name in vectors]
    pairs += [("projection", "grad_sum"), ("direction", "grad_sum"), ("val_grad", "grad_sum")]
    pairs += [("val_grad", "prior_grad"), ("prior_grad", "grad_sum")]
    return Products(vectors, pairs)


def _check_sum(
    ctx: RunContext, dots: np.ndarray, products: Products, scored: Scored
) -> dict[str, Any]:
    """ALGORITHM.md §3.1, first half: Σ_n s_D,n = ⟨direction, G⟩; refuses to go on otherwise."""
    tolerance, eta_sc = TOLERANCE[ctx.dtype], scored.terms.eta_sc
    expected, total = products.dot("direction", "grad_sum"), float(dots.sum())
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
    direction: Vector,
    products: Products,
    scored: Scored,
    scales: np.ndarray,
) -> dict[str, Any]:
    """ALGORITHM.md §3.1, second half: random examples again, alone, by plain autograd.

    A half-precision model is widened for it, and then the engine scores them once more as well:
    that it computes what it should is seen without rounding, and what rounding does to a score is
    seen whole. Without scores of the pool (DualSFT-Param) the probes are scored here, so that the
    rules G was summed with are checked all the same.
    """
    half = ctx.dtype in HALF_DTYPES
    tolerance, eta_sc = TOLERANCE[engine.candidates.dtype], scored.terms.eta_sc
    rng = np.random.default_rng(ctx.config.seed)
    wanted = NUM_ALONE_HALF if half else NUM_ALONE
    probes = rng.choice(len(examples), min(wanted, len(examples)), replace=False)
    rows = [examples[i] for i in probes]
    settings, silent = pass_settings(ctx), Reporter(lambda _: None)

    def scored_together(with_engine: GhostEngine, label: str) -> np.ndarray:
        objective = loss_objective(with_engine.model)
        return walk(with_engine, rows, objective, settings, silent, label, direction=direction).dots

    got = scored_together(engine, "probes") if dots is None else dots[probes]
    largest = float(np.abs(got if dots is None else dots).max())
    scale, rounding, told = products.norm("direction"), [], []
    with (
        ctx.reporter.track("self-check (scored alone)", len(rows), "examples") as progress,
        widened(engine.model) as (wide,),
    ):
        exactly = engine.on(wide)
        again = scored_together(exactly, "probes, widened") if half else got
        near = at_hand(direction)
        for example, ours, repeated in zip(rows, got, again, strict=True):
            exact, norm = dot_alone(exactly, example, near, settings)
            size = scale * norm
            rounding.append(abs(exact - ours))
            error = abs(exact - repeated) / size if size > 0 else 0.0
            off = rounding[-1] / size if size > 0 else 0.0
            told.append(
                {"id": example.id, "score": ours * eta_sc, "alone": exact * eta_sc}
                | {"error": error, "rounding": off}
            )
            progress.advance(1, tokens=example.num_tokens)
            if not error <= tolerance:
                raise RunError(
                    f"self-check failed: example {example.id} scores {repeated * eta_sc:.6g} in "
                    f"its batch and {exact * eta_sc:.6g} alone by plain autograd (error "
                    f"{error:.2g} of ‖u‖‖g‖ > {tolerance:g}); nothing was written"
                )
            if not off <= ROUNDING_LIMIT:
                raise RunError(
                    f"self-check failed: example {example.id} scores {ours * eta_sc:.6g} in "
                    f"{ctx.dtype} and {exact * eta_sc:.6g} in fp32 (difference {off:.2g} of ‖u‖‖g‖ "
                    f"> {ROUNDING_LIMIT:g}): rounding drowns the scores; nothing was written (use "
                    "model.dtype=float32)"
                )
    floor = float(torch.finfo(engine.candidates.dtype).eps) * largest
    slack = SLACK_FACTOR * max(floor, *rounding) * eta_sc
    return {
        "tolerance": tolerance,
        "alone": told,
        "rounding_slack": slack,
        "rounding_ratio": rounding_ratio(np.array(rounding), scales[probes]) * eta_sc,
    }


def rounding_ratio(errors: np.ndarray, scales: np.ndarray) -> float:
    """How far rounding is taken to move a score, in its scale: four standard deviations, by the
    probes."""
    return SLACK_FACTOR * float(np.sqrt(((errors / scales) ** 2).mean()))


def rounding_scales(pool: dict[str, np.ndarray]) -> np.ndarray:
    """What the rounding of a score is taken to grow with, per example: the size of its gradient as
    the certificate's sums bound it; without them the same for all."""
    if "inner_sums" not in pool:
        return np.ones(len(pool["id"]))
    return np.sqrt((pool["inner_sums"].astype(np.float64) ** 2).sum(1))


def _summary(ctx: RunContext, scored: Scored, products: Products) -> dict[str, Any]:
    """Norms, cosines, the curvature share: what a reader needs to believe u."""
    terms = scored.terms
    second = products.norm("second_order") if terms.curvature is not None else 0.0
    first = products.norm("v_val")
    u_dot_g = products.dot("projection", "grad_sum") * terms.eta_sc
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
            "val_grad": products.norm("val_grad"),
            "prior_grad": products.norm("prior_grad"),
            "grad_mean": products.norm("grad_sum") / terms.n_sc,
            "v_val": first,
            "second_order": second,
            "projection": products.norm("projection") * terms.eta_sc,
        },
        "cosines": {
            "val_grad_grad_sum": products.cosine("val_grad", "grad_sum"),
            "val_grad_prior_grad": products.cosine("val_grad", "prior_grad"),
            "prior_grad_grad_sum": products.cosine("prior_grad", "grad_sum"),
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
    part: RunPath,
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
    (part / "examples.parquet").write_table(pa.table(table))


def kept_vectors(ctx: RunContext) -> set[str]:
    """What `score.keep` asks for beyond the gradients: param_scores, projection."""
    asked = {word.strip() for word in ctx.config.score.keep.split(",")}
    vectors = {"param_scores", "projection"}
    return vectors if "all" in asked else asked & vectors


def _keep(ctx: RunContext, part: RunPath, scored: Scored) -> None:
    kept = kept_vectors(ctx)
    eta_sc = scored.terms.eta_sc
    if "param_scores" in kept:
        scores = param_scores(eta_sc, scored.projection, scored.grad_sum)
        scores.save(part / "params.safetensors", eta_sc=eta_sc)
    if "projection" in kept:
        scored.projection.scaled(eta_sc).save(part / "projection.safetensors", eta_sc=eta_sc)
