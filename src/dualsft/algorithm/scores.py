"""Example scores and their self-checks: Algorithm 1 line 8, s_D ← GhostDot(u, θ̄, D_pool).

s_θ = u ⊙ G is `projection.param_scores`. In two-pass mode `exact_dots` walks over the pool again.
Every scoring checks a few random examples against plain autograd, one at a time. If examples are
scored, their scores must also sum to ⟨direction, G⟩, where the direction is u, or U₀ in one-pass
mode. If a check fails, an error is raised and nothing can be selected.

In one-pass mode (docs/algorithm.md, "One pass instead of two") the pool pass computes
f_n = ⟨U₀, g_n⟩; the exact score is f_n + c_n with |c_n| ≤ B_n = Σ_l ‖R_l‖ Σ_t ‖ε_t‖ ‖a_t‖,
R = U₀ − u. The certificate (line 10) decides by Lo = f − B and Up = f + B: an example is IN when
its Lo exceeds the (b+1)-th largest Up, OUT when its Up is below the b-th largest Lo, both strictly.
The rest are scored exactly, and the best of them fill the b − |IN| remaining places. One round is
enough: the result is the exact top-b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.projection import Scored
from dualsft.algorithm.topk import top_b
from dualsft.config.settings import ScoreConfig
from dualsft.data.examples import Example
from dualsft.engine.fused import HALF_DTYPES, checkpointed
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.losses import both_logits
from dualsft.engine.passes import precise, widened
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.errors import CheckError, ConfigError
from dualsft.memory.placement import at_hand
from dualsft.model.sharded import device_of
from dualsft.storage.vectors import ParamVector, Products, Vector
from dualsft.system.progress import Reporter, silent

Facts = dict[str, Any]
"""JSON-serialisable numbers for a summary."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""Tolerance of the self-checks by dtype (bf16: at most 4e-4 measured on a real model)."""
NUM_ALONE = 3
NUM_ALONE_HALF = 16  # in half precision, where the probes also estimate the rounding
SLACK_FACTOR = 4.0  # safety factor on the rounding error that the probes measure
NORM_ROUNDING = 1e-5  # B is widened by this factor because its norms are rounded too
ROUNDING_LIMIT = 0.05  # of ‖u‖‖g‖: a larger rounding error in half precision raises


def exact_dots(
    engine: GhostEngine,
    examples: Sequence[Example],
    direction: Vector,
    passes: PassSettings,
    reporter: Reporter,
    label: str,
) -> np.ndarray:
    """⟨direction, g_n⟩ of each example: the paper's second pass, or a part of it."""
    with precise(passes.precision, "pool", label, reporter.warn, engine.model) as (wide,):
        at, objective = engine.on(wide), loss_objective(wide)
        return walk(at, examples, objective, passes, reporter, label, direction=direction).dots


# --- the one-pass certificate -------------------------------------------------------------------


def bounds(inner_sums_NL: np.ndarray, residual_norms_L: np.ndarray) -> np.ndarray:
    """B_n in the units of f: [N]. Exactly zero if the residual is zero."""
    widened = inner_sums_NL.astype(np.float64) @ residual_norms_L.astype(np.float64)
    return widened * (1.0 + NORM_ROUNDING)


def one_pass_bounds(engine: GhostEngine, inner_sums: np.ndarray, products: Products) -> np.ndarray:
    """B_n of each example, from the norm of the residual U₀ − u per parameter."""
    residual = products.block_norms("residual")
    return bounds(inner_sums, np.array([residual[name] for name in engine.columns]))


@dataclass(frozen=True)
class Verdict:
    """Boolean arrays over the examples; `open` examples must be scored exactly."""

    inside: np.ndarray
    outside: np.ndarray

    @property
    def open(self) -> np.ndarray:
        return ~(self.inside | self.outside)


def judge(f: np.ndarray, bound: np.ndarray, b: int) -> Verdict:
    """Classify the examples as IN, OUT or open for a budget of b."""
    count = len(f)
    if not 1 <= b <= count:
        raise ValueError(f"b must be between 1 and {count}, not {b}")
    low, high = f - bound, f + bound
    if b == count:
        return Verdict(np.ones(count, bool), np.zeros(count, bool))
    threshold_in = np.partition(high, count - b - 1)[count - b - 1]  # (b+1)-th largest Up
    threshold_out = np.partition(low, count - b)[count - b]  # b-th largest Lo
    return Verdict(low > threshold_in, high < threshold_out)


def settle(verdict: Verdict, exact: np.ndarray, tie_order: np.ndarray, b: int) -> np.ndarray:
    """Positions of the top b, ascending; `exact` is used only for open examples."""
    inside = np.flatnonzero(verdict.inside)
    places = b - len(inside)
    candidates = np.flatnonzero(verdict.open)
    if places == 0:
        return inside
    chosen = candidates[top_b(exact[candidates], tie_order[candidates], places)]
    return np.sort(np.concatenate([inside, chosen]))


# --- products and self-checks --------------------------------------------------------------------


def products_of(scored: Scored, direction: Vector) -> Products:
    """All inner products needed by the summary, the sum check and the bounds, in one reading."""
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
        "new_scores": terms.param_term(terms.val_grad, grad_sum),
        "prior_scores": terms.param_term(scored.prior_grad, grad_sum),
    }
    pairs = [(name, name) for name in vectors]
    pairs += [("projection", "grad_sum"), ("direction", "grad_sum"), ("val_grad", "grad_sum")]
    pairs += [("val_grad", "prior_grad"), ("prior_grad", "grad_sum")]
    return Products(vectors, pairs)


def check_sum(dots: np.ndarray, products: Products, eta_sc: float, tolerance: float) -> Facts:
    """Raise unless Σ_n s_D,n = ⟨direction, G⟩ up to `tolerance` times Σ|s_D,n|."""
    expected, total = products.dot("direction", "grad_sum"), float(dots.sum())
    magnitude = float(np.abs(dots).sum())
    error = abs(total - expected) / magnitude if magnitude else 0.0
    if abs(total - expected) > tolerance * magnitude:
        raise CheckError(
            f"self-check failed: the example scores sum to {total * eta_sc:.6g}, "
            f"⟨direction, G⟩ is "
            f"{expected * eta_sc:.6g} (difference over Σ|score|: {error:.2g} > {tolerance:g}); "
            "nothing was written. The model probably uses its parameters outside the supported "
            "layers: please file an issue"
        )
    return {
        "sum_of_scores": total * eta_sc,
        "direction_dot_G": expected * eta_sc,
        "relative_error": error,
    }


def check_alone(
    engine: GhostEngine,
    examples: Sequence[Example],
    dots: np.ndarray | None,
    direction: Vector,
    norm: float,
    eta_sc: float,
    scales: np.ndarray,
    seed: int,
    passes: PassSettings,
    reporter: Reporter,
) -> Facts:
    """Score random examples (probes) individually by plain autograd; raise if they differ.

    `norm` is that of the direction. A half-precision model is converted to fp32, and the engine
    scores the probes in fp32 too: comparing the two fp32 results checks the engine without
    rounding, and comparing them with the original scores measures the rounding. For DualSFT-Param,
    which has no pool scores, the probes are scored here, so that the rules behind G are checked.
    """
    dtype = engine.model.dtype
    half = dtype in HALF_DTYPES
    tolerance = TOLERANCE[engine.candidates.dtype]
    rng = np.random.default_rng(seed)
    wanted = NUM_ALONE_HALF if half else NUM_ALONE
    probes = rng.choice(len(examples), min(wanted, len(examples)), replace=False)
    rows = [examples[i] for i in probes]

    def scored_together(with_engine: GhostEngine, label: str) -> np.ndarray:
        objective = loss_objective(with_engine.model)
        return walk(with_engine, rows, objective, passes, silent(), label, direction=direction).dots

    got = scored_together(engine, "probes") if dots is None else dots[probes]
    largest = float(np.abs(got if dots is None else dots).max())
    rounding: list[float] = []
    probed: list[Facts] = []
    with (
        reporter.track("self-check (scored alone)", len(rows), "examples") as progress,
        widened(engine.model) as (wide,),
    ):
        exactly = engine.on(wide)
        again = scored_together(exactly, "probes, widened") if half else got
        near = at_hand(direction)
        for example, ours, repeated in zip(rows, got, again, strict=True):
            exact, length = dot_alone(exactly, example, near, passes)
            size = norm * length or largest or 1.0  # no gradient alone must be none in the batch
            rounding.append(abs(exact - ours))
            error, off = abs(exact - repeated) / size, rounding[-1] / size
            probed.append(
                {"id": example.id, "score": ours * eta_sc, "alone": exact * eta_sc}
                | {"error": error, "rounding": off}
            )
            progress.advance(1, tokens=example.num_tokens)
            if not error <= tolerance:  # true for NaN, unlike `error > tolerance`
                raise CheckError(
                    f"self-check failed: example {example.id} scores {repeated * eta_sc:.6g} in "
                    f"its batch and {exact * eta_sc:.6g} alone by plain autograd (error "
                    f"{error:.2g} of ‖u‖‖g‖ > {tolerance:g}); nothing was written"
                )
            if not off <= ROUNDING_LIMIT:
                raise CheckError(
                    f"self-check failed: example {example.id} scores {ours * eta_sc:.6g} in "
                    f"{dtype} and {exact * eta_sc:.6g} in fp32 (difference {off:.2g} of ‖u‖‖g‖ "
                    f"> {ROUNDING_LIMIT:g}): rounding dominates the scores; nothing was written "
                    "(use model.dtype=float32)"
                )
    floor = float(torch.finfo(engine.candidates.dtype).eps) * largest
    slack = SLACK_FACTOR * max(floor, *rounding) * eta_sc
    return {
        "tolerance": tolerance,
        "alone": probed,
        "rounding_slack": slack,
        "rounding_ratio": rounding_ratio(np.array(rounding), scales[probes]) * eta_sc,
    }


def check_fused_loss(
    model: PreTrainedModel, example: Example, settings: PassSettings, tolerance: float
) -> None:
    """Raise if the fused head's logits differ from the model's own on one example.

    A model that transforms its logits in a way that its configuration does not show
    (`engine/losses.py`) would be trained, scored and evaluated with the wrong loss.
    """
    device = device_of(model)
    ours, own = both_logits(model, settings.collate([example], device))
    difference, largest = float((ours - own).abs().max()), float(own.abs().max())
    if not difference <= tolerance * max(1.0, largest):
        raise ConfigError(
            f"{type(model).__name__}: its own logits for example {example.id} (at most "
            f"{largest:.6g}) differ from ours by up to {difference:.6g}; the model changes its "
            "logits in a way that its configuration does not show, and cannot be scored"
        )


def dot_alone(
    engine: GhostEngine, example: Example, direction: Vector, settings: PassSettings
) -> tuple[float, float]:
    """(⟨U, g_n⟩, ‖g_n‖) of one example by plain autograd: no batch, layer rule or fused loss."""
    batch = settings.collate([example], engine.device)
    found: list[Products] = []

    def visit(name: str, gradient: Tensor) -> None:
        block = {"g": ParamVector({name: gradient}), "u": direction}
        found.append(Products(block, [("u", "g"), ("g", "g")]))  # read below: no sync per block

    with checkpointed(engine.model, engine.device.type == "cuda"):  # less memory, slower
        alone(engine.model, engine.candidates, batch, visit)
    return (
        sum(one.dot("u", "g") for one in found),
        sum(one.dot("g", "g") for one in found) ** 0.5,
    )


def rounding_ratio(errors: np.ndarray, scales: np.ndarray) -> float:
    """Assumed rounding error of a score in units of its scale: four times the RMS over the
    probes."""
    ratios = np.divide(errors, scales, out=np.zeros_like(errors), where=errors != 0)
    return SLACK_FACTOR * float(np.sqrt((ratios**2).mean()))


def rounding_scales(inner_sums: np.ndarray | None, count: int) -> np.ndarray:
    """Scale of each score's rounding error: the bound on its gradient norm by the certificate's
    inner sums; without them the same for all."""
    if inner_sums is None:
        return np.ones(count)
    return np.sqrt((inner_sums.astype(np.float64) ** 2).sum(1))


def describe_projection(score: ScoreConfig, scored: Scored, products: Products) -> Facts:
    """Norms, cosines and the curvature share of u."""
    terms = scored.terms
    second = products.norm("second_order") if terms.curvature is not None else 0.0
    first = products.norm("v_val")
    u_dot_g = products.dot("projection", "grad_sum") * terms.eta_sc
    rms = terms.eta_sc / scored.grad_sum.num_entries**0.5
    return {
        "mode": score.mode,
        "eta_ft": terms.eta_ft,
        "eta_sc": terms.eta_sc,
        "n_sc": terms.n_sc,
        "lam": score.lam,
        "lam_relative": score.lam_relative,
        "lam_effective": terms.lam_effective,
        "rms_param_scores": {
            "new": products.norm("new_scores") * rms,
            "prior": products.norm("prior_scores") * rms * terms.lam_effective,
        },
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
