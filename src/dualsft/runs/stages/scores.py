"""Scores: Algorithm 1 line 8, s_θ ← u ⊙ G and s_D ← GhostDot(u, θ̄, D_pool).

Two-pass mode walks over the pool again and computes exact s_D. One-pass mode turns f of the pool
pass into scores with an error bound per example; the selection computes exact scores for examples
that the bounds leave undecided. Every run checks itself (docs/algorithm.md, "What every run
checks"): Σ_n s_D,n against ⟨u, G⟩, and a few random examples scored individually by plain
autograd. In the calibrated form s_D comes from the sketches of the gradients stage, with the checks
of `algorithm/calibration.py`; u is then needed, and described in the summary, only for entries that
are selected by score. If a check fails, nothing is written, so nothing can be selected.
Reads 1_split, 2_warmup, 3_gradients; writes examples.parquet, summary.json and, on request,
params.safetensors and projection.safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dualsft.algorithm.calibration import scored_by_sketches
from dualsft.algorithm.projection import Scored, param_scores, projection_terms
from dualsft.algorithm.scores import (
    TOLERANCE,
    check_alone,
    check_sum,
    describe_projection,
    exact_dots,
    one_pass_bounds,
    products_of,
    rounding_scales,
)
from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.runs.context import RunContext, Settings, pass_settings
from dualsft.runs.preflight import reading
from dualsft.runs.stages.gradients import (
    DIRECTION,
    SKETCHES,
    has_vectors,
    one_pass_wanted,
    precision_settings,
    read_pool,
    read_sketches,
    sketch_for,
    sketches_wanted,
    some_layers,
    vectors_now,
    vectors_wanted,
)
from dualsft.storage.vectors import Vector
from dualsft.system.paths import RunPath


def settings(ctx: RunContext, vectors: bool | None = None) -> Settings:
    chosen = ctx.pick("score.mode", "score.keep") | precision_settings(ctx)
    if vectors_wanted(ctx) if vectors is None else vectors:
        chosen |= ctx.pick(*DIRECTION)
    if sketches_wanted(ctx):
        chosen |= ctx.pick("score.form", "score.rho", "seed")
    return chosen | {"per-example scores": ctx.methods.scored("data")}


def richer_settings(ctx: RunContext) -> Settings | None:
    """If u is not needed: the settings of a stage that describes it, with the same scores."""
    return None if vectors_wanted(ctx) else settings(ctx, vectors=True)


def load_scored(
    ctx: RunContext,
    engine: GhostEngine,
    n_sc: int,
    keep: Callable[[Vector], Vector] = lambda v: v,
) -> Scored:
    """u (Algorithm 1 line 7) from the vectors on disk, each passed through `keep`.

    A run that did not need the vectors has none; for a diagnostic they are computed here.
    """
    candidates = engine.candidates
    if has_vectors(ctx):
        names = ("val_grad", "prior_grad", "grad_sum")
        found = [ctx.vector("gradients", name, candidates) for name in names]
    else:
        found = vectors_now(ctx, engine)
    val_grad, prior_grad, grad_sum = (keep(vector) for vector in found)
    curvature = ctx.curvature(candidates)
    curvature = None if curvature is None else keep(curvature)
    score, lr = ctx.config.score, ctx.base_lr()
    terms = projection_terms(score, lr, n_sc, val_grad, prior_grad, curvature, grad_sum)
    return Scored.of(terms, grad_sum, prior_grad)


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Write the scores, their bounds, and the summary with the self-checks to `part`."""
    pool_examples = ctx.roles()["pool"]
    pool = read_pool(ctx.folder("gradients") / "pool.parquet")
    one_pass = one_pass_wanted(ctx)
    with reading(ctx.folder("gradients") / "pool.parquet"):
        for column in ("loss", "response_tokens", *(("f", "inner_sums") if one_pass else ())):
            if len(pool[column]) != len(pool_examples):
                raise ValueError(f"{column} has {len(pool[column])} of {len(pool_examples)} rows")
    model = ctx.theta_bar()
    engine = GhostEngine(model, ctx.candidates(model))
    if not vectors_wanted(ctx):
        summary, scores, quantile = _calibrated(ctx, engine, pool_examples)
        bound = np.zeros(len(pool_examples))
        _write_examples(part, pool_examples, pool, scores, bound, quantile)
        (part / "summary.json").write_json(summary)
        return {"checks": summary["checks"]}
    scored = load_scored(ctx, engine, len(pool_examples))
    direction = scored.terms.estimate() if one_pass else scored.projection
    passes, eta_sc = pass_settings(ctx), scored.terms.eta_sc
    products = products_of(scored, direction)
    summary = describe_projection(ctx.config.score, scored, products)
    dots, bound, checks = None, None, {}
    if ctx.methods.scored("data") and not sketches_wanted(ctx):
        if one_pass:
            dots, bound = pool["f"], one_pass_bounds(engine, pool["inner_sums"], products)
        else:
            label = "pool (scores)"
            dots = exact_dots(engine, pool_examples, direction, passes, ctx.reporter, label)
            bound = np.zeros(len(pool_examples))
        checks = check_sum(dots, products, eta_sc, TOLERANCE[ctx.dtype])
    checks |= check_alone(
        engine,
        pool_examples,
        dots,
        direction,
        products.norm("direction"),
        eta_sc,
        rounding_scales(pool.get("inner_sums"), len(pool_examples)),
        ctx.config.seed,
        passes,
        ctx.reporter,
    )
    scores, quantile = None if dots is None else dots * eta_sc, None
    if sketches_wanted(ctx):
        facts, scores, quantile = _calibrated(ctx, engine, pool_examples)
        bound, checks = np.zeros(len(pool_examples)), checks | facts.pop("checks")
        checks |= {key: facts.pop(key) for key in ("rounding_slack", "rounding_ratio")}
        summary |= facts
    else:
        bound = None if bound is None else bound * eta_sc
    _write_examples(part, pool_examples, pool, scores, bound, quantile)
    summary["total_examples"] = checks.get("sum_of_scores")
    if dots is not None:
        summary["direction_dot_G"] = checks["direction_dot_G"]
    rounding = {key: checks.pop(key) for key in ("rounding_slack", "rounding_ratio")}
    summary |= {"checks": checks, **rounding}
    _keep(ctx, part, scored)
    _warn(ctx, summary)
    (part / "summary.json").write_json(summary)
    return {"curvature_share": summary["curvature_share"], "checks": summary.get("checks")}


def _calibrated(
    ctx: RunContext, engine: GhostEngine, pool: list[Example]
) -> tuple[dict[str, Any], np.ndarray, np.ndarray | None]:
    """(facts for the summary with the checks, scores of the calibrated form, their quantiles)."""
    sketch = sketch_for(ctx, engine)
    assert sketch is not None
    counts = ctx.counts | {"pool": len(pool)}
    rows = read_sketches(ctx.folder("gradients") / SKETCHES, counts, sketch.dim)
    grad_sum, val_grad = None, None
    if has_vectors(ctx):  # needed, or reused from a run that needed them
        grad_sum = ctx.vector("gradients", "grad_sum", engine.candidates)
        val_grad = ctx.vector("gradients", "val_grad", engine.candidates)
    seed, rho, passes = ctx.config.seed, ctx.config.score.rho, pass_settings(ctx)
    found, checks = scored_by_sketches(
        engine,
        sketch,
        rows["pool"],
        rows["val"],
        grad_sum,
        val_grad,
        pool,
        seed,
        rho,
        passes,
        ctx.reporter,
    )
    ctx.reporter.say(f"calibrated scores: ρ = {found.rho:.2g} ({found.how})")
    if found.target_share is not None:
        share, error = (100 * part for part in found.target_share)
        ctx.reporter.say(
            f"about {share:.0f} % of the pool (± {error:.0f}) scores like the validation examples"
        )
    facts = {"form": "calibrated", "sketch_dim": sketch.dim} | found.facts()
    facts |= {"sketch_layers": ctx.config.score.sketch_layers} if some_layers(ctx) else {}
    rounding = {key: checks.pop(key) for key in ("rounding_slack", "rounding_ratio")}
    return facts | {"checks": checks, **rounding}, found.scores, found.val_quantile


def _warn(ctx: RunContext, summary: dict[str, Any]) -> None:
    norms, lam, score = summary["norms"], summary["lam_effective"], ctx.config.score
    if score.lam_relative == "scores":  # λ itself is the ratio: nothing to warn about
        found = f"v_prior has the factor {lam:.3g}" if lam else "v_prior is zero and has no effect"
        ctx.reporter.say(f"λ = {score.lam:g} as the ratio of terms of the mask's scores: {found}")
    elif lam * norms["prior_grad"] > 2 * norms["val_grad"]:
        ctx.reporter.warn(
            f"preservation dominates: λ‖v_prior‖ = {lam * norms['prior_grad']:.3g} is over twice "
            f"‖v_new‖ = {norms['val_grad']:.3g}; {_what(ctx)} mostly protects the old behaviour "
            "(score.lam_relative=true makes λ scale-free)",
            code="preservation_dominates",
        )
    share = summary["curvature_share"]
    if share is not None:
        ctx.reporter.say(f"curvature share ‖second‖/‖first‖ of u: {share:.3g}")


def _what(ctx: RunContext) -> str:
    return "the mask" if sketches_wanted(ctx) else "the selection"


def _write_examples(
    part: RunPath,
    examples: list[Example],
    pool: dict[str, np.ndarray],
    scores: np.ndarray | None,
    bound: np.ndarray | None,
    quantile: np.ndarray | None,
) -> None:
    """Write examples.parquet; score and bound are null for DualSFT-Param.

    The column val_quantile is that of calibrated scores.
    """
    count = len(examples)
    none = pa.nulls(count, pa.float64())
    table = {
        "id": [e.id for e in examples],
        "score": none if scores is None else scores,
        "exact": np.zeros(count, bool) if bound is None else bound == 0.0,
        "bound": none if bound is None else bound,
        "loss": pool["loss"],
        "response_tokens": pa.array(pool["response_tokens"], pa.int32()),
    }
    if quantile is not None:
        table["val_quantile"] = quantile
    (part / "examples.parquet").write_table(pa.table(table))


def read_scores(folder: RunPath, pool: Sequence[Example]) -> tuple[np.ndarray, np.ndarray] | None:
    """(score, error bound) of the pool from examples.parquet; None if none were computed.

    Raises unless they have the form that this stage writes.
    """
    with reading(path := folder / "examples.parquet"):
        table = path.read_table(["id", "score", "bound"])
        if table["id"].to_pylist() != [e.id for e in pool]:
            raise ValueError("it has other examples than the pool")
        if all(table[name].null_count == len(table) for name in ("score", "bound")):
            return None
        found = [
            table[name].to_numpy().astype(np.float64, casting="safe") for name in ("score", "bound")
        ]
        if not all(np.isfinite(values).all() for values in found) or (found[1] < 0).any():
            raise ValueError("a score or its bound is not a finite number")
        return found[0], found[1]


def kept_vectors(ctx: RunContext) -> set[str]:
    """Vectors to save by `score.keep`, in addition to the gradients: param_scores, projection."""
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
