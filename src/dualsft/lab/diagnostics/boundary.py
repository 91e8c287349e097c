"""The boundary gap: is the selection provably the same under the exact curvature?

Evaluates the paper's Proposition `direct_score_gap` and its two corollaries, with H = ∇²L_val(θ̄),
L_val = L_new + λ L_prior, on samples of validation rows and anchors, and D̂ = Diag(ĉ) as in the run.
Reports three tests, from loose to exact:

* the corollaries' bounds, η² ‖H − D̂‖ ‖G‖² and η² B_g ‖H − D̂‖ ‖G‖,
* twice the largest measured error, from (H − D̂) G itself,
* the selection by the scores with the full Hessian.

B_g bounds every ‖g_n‖ by the sums of the one-pass certificate (docs/algorithm.md, "One pass instead
of two"). The operator norm comes from a power iteration, which approaches it from below. If the gap
does not exceed a bound, the certificate certainly fails; if it does, the certificate holds up to
the accuracy of that estimate.

Hessian-vector products are exact (double backward, eager attention, fp32 or fp64 weights). For
`score.step: adam` both directions are divided by ĉ; the corollaries do not cover this case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example
from dualsft.engine.losses import plain_example_loss
from dualsft.lab import plots
from dualsft.lab.diagnostics.hessian import eager_model, plain_cwsd
from dualsft.lab.diagnostics.job import DiagnosticJob, Surrogate, loss_walk, warm_surrogate
from dualsft.lab.diagnostics.ranking import chunks, jaccard, mask_overlap
from dualsft.lab.plots import SIDES, Figures, Result
from dualsft.storage.vectors import ParamVector, Vector

Loss = Callable[[Batch], Tensor]


def boundary(job: DiagnosticJob) -> dict[str, Any]:
    """Gaps, errors and bounds of both sides, and the overlap with the full-Hessian selection."""
    at = warm_surrogate(job)
    curvature, eta = _Curvature(job, at), at.eta_sc
    product, norms = _power(job, curvature, at.grad_sum)
    operator, size = norms[-1], at.grad_sum.norm()
    change = abs(operator - norms[-2]) / operator if len(norms) > 1 and operator > 0 else None
    error = at.varied(product.scaled(eta / 2), second_order=False)  # û − u_full
    bound = None if at.scored.terms.preconditioner is not None else eta**2 * operator * size
    k, b = job.budgets
    return {
        "k": k,
        "b": b,
        "eta_sc": eta,
        "rows": len(curvature.val),
        "anchors": len(curvature.anchors),
        "operator_norm": operator,
        "operator_norm_change": change,
        "iterations": len(norms),
        "grad_sum_norm": size,
        "error_direction_share": error.norm() / at.projection.norm(),
        "params": _params(at, error, k, None if bound is None else bound * size),
        "examples": _examples(at, error, b, bound),
    }


def _params(at: Surrogate, error: Vector, k: int, bound: float | None) -> dict[str, Any]:
    ours, full = at.mask(k), at.mask(k, at.projection.plus(error, -1.0))
    gap, middle = None, ours.threshold
    if ours.next_score is not None:
        gap, middle = ours.threshold - ours.next_score, (ours.threshold + ours.next_score) / 2
    scores, errors = at.scores(), at.scores(error)
    largest, movable = 0.0, 0
    for (_, score), (_, moved) in zip(chunks(scores), chunks(errors), strict=True):
        largest = max(largest, float(moved.abs().max()))
        movable += int(((score - middle).abs() <= moved.abs()).sum())
    dtype = next(iter(scores.forms.values())).dtype
    overlap = mask_overlap(ours.indices, full.indices)
    return _verdict(gap, largest, bound, overlap, movable) | {
        "rounding": float(torch.finfo(dtype).eps) * abs(ours.threshold)
    }


def _examples(at: Surrogate, error: Vector, b: int, norm_bound: float | None) -> dict[str, Any]:
    """`norm_bound` times the largest ‖g_n‖ is the bound of the corollary."""
    job, pool, label = at.job, at.job.scoring.pool, "errors of the example scores"

    def make() -> np.ndarray:
        found = loss_walk(job.ctx, at.engine, pool, label, direction=error, bounds=True)
        # upper bound of ‖g_n‖ from the per-parameter bounds of the one-pass certificate
        sizes = np.sqrt((found.inner_sums.astype(np.float64) ** 2).sum(1))
        return np.stack([found.dots, sizes])

    (errors, sizes), _ = job.kept(label, make)
    errors, scores, steepest = errors * at.eta_sc, at.pool_scores() * at.eta_sc, float(sizes.max())
    chosen, full = at.best(scores, b), at.best(scores - errors, b)
    gap, movable = None, 0
    if b < len(pool):
        lowest, highest = float(scores[chosen].min()), float(np.delete(scores, chosen).max())
        gap = lowest - highest
        movable = int((np.abs(scores - (lowest + highest) / 2) <= np.abs(errors)).sum())
    bound = None if norm_bound is None else norm_bound * steepest
    largest, rounding = float(np.abs(errors).max()), None
    if job.known_scores()[0] is not None:
        summary = (job.ctx.folder("scores") / "summary.json").read_json()
        rounding = float(summary["rounding_slack"])
    return _verdict(gap, largest, bound, jaccard(chosen, full), movable) | {
        "rounding": rounding,
        "gradient_bound": steepest,
    }


def _verdict(
    gap: float | None, largest: float, bound: float | None, overlap: float, movable: int
) -> dict[str, Any]:
    """Results of the three tests.

    A gap of None means that everything is selected, so the selection cannot change. An item is
    movable if its error is at least its distance from the middle of the gap.
    """
    return {
        "gap": gap,
        "largest_error": largest,
        "twice_largest_error": 2 * largest,
        "bound": bound,
        "certified_by_corollary": None if bound is None else gap is None or gap > bound,
        "certified_by_error": gap is None or gap > 2 * largest,
        "jaccard_full": overlap,
        "same_selection": overlap == 1.0,
        "movable": 0 if gap is None else movable,
    }


class _Curvature:
    """The operator H − D̂ on vectors over the candidates."""

    def __init__(self, job: DiagnosticJob, at: Surrogate) -> None:
        ctx, self.job = job.ctx, job
        self.scored, self.config = at.scored, ctx.config.score
        self.model = eager_model(ctx, "warmup").eval().requires_grad_(False)
        self.candidates = ctx.candidates(self.model)
        for p in self.candidates.values():
            p.requires_grad_(True)
        self.lam = at.scored.terms.lam_effective if ctx.warmed_up else 0.0
        self.preservation = self.config.preservation if self.lam else "none"
        self.val = self._sample("val")
        self.anchors = self._sample("anchor") if self.preservation == "cwsd" else []
        self.teacher: PreTrainedModel | None = None
        self.objectives: list[tuple[list[Example], Loss, float]]
        """(rows, loss, weight) of each part of L_val that needs double backward."""
        self.objectives = [(self.val, partial(plain_example_loss, self.model), 1.0)]
        if self.preservation in ("cwsd", "fisher"):
            self.teacher = teacher = eager_model(ctx, "init").eval().requires_grad_(False)
            if self.anchors:
                prior = partial(plain_cwsd, teacher, self.model, tau=self.config.tau)
                self.objectives.append((self.anchors, prior, self.lam))

    def _sample(self, role: str) -> list[Example]:
        rows, count = self.job.roles[role], self.job.options.rows
        chosen = np.sort(self.job.rng(f"hessian {role}").permutation(len(rows))[:count])
        return [rows[i] for i in chosen]

    def times(self, vector: Vector, label: str) -> ParamVector:
        """(H − D̂) v."""
        held = vector.held(dtype_of=lambda name: self.candidates[name].dtype)
        total = ParamVector.zeros(self.candidates)
        work = len(self.val) + len(self.anchors)
        with self.job.reporter.track(label, work, "examples") as progress:
            for rows, loss, weight in self.objectives:
                for example in rows:
                    value = loss(self.job.ctx.collate([example]))
                    add_hessian_product(self.candidates, value, held, total, weight / len(rows))
                    progress.advance(1, tokens=example.num_tokens)
        result: Vector = total
        if self.preservation in ("l2", "fisher"):
            result = result.plus(self._quadratic(held), self.lam)
        terms = self.scored.terms
        if terms.curvature is not None:
            scale = terms.curvature_scale
            diagonal = terms.curvature.combine(lambda c, v: c * v * scale, held)
            result = result.plus(diagonal, -1.0)
        return result.held()

    def _quadratic(self, vector: Vector) -> Vector:
        """Product of the Hessian of ½‖θ − θ_old‖² or of ½ Σ F (θ − θ_old)² with a vector."""
        if self.teacher is None:
            return vector
        old = dict(self.teacher.named_parameters())
        new = ParamVector({name: p.detach() for name, p in self.candidates.items()})
        moved = new.plus(ParamVector({name: old[name].detach() for name in new}), -1.0)

        def fisher(prior: Tensor, step: Tensor, v: Tensor) -> Tensor:
            """F ⊙ v with F = v_prior / (θ̄ − θ_old); zero for entries that did not move."""
            return torch.where(step == 0, 0.0, prior / torch.where(step == 0, 1.0, step)) * v

        return self.scored.prior_grad.combine(fisher, moved, vector)


def add_hessian_product(
    candidates: Mapping[str, Tensor],
    loss: Tensor,
    vector: Vector,
    total: ParamVector,
    weight: float,
) -> None:
    """total += weight · (∇² loss) vector, as the gradient of ⟨∇ loss, vector⟩."""
    parameters = list(candidates.values())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    along = [(g * vector[name]).sum() for g, name in zip(gradients, candidates, strict=True)]
    products = torch.autograd.grad(torch.stack(along).sum(), parameters)
    for name, product in zip(candidates, products, strict=True):
        total[name].add_(product.to(total[name].dtype), alpha=weight)


def _power(
    job: DiagnosticJob, curved: _Curvature, grad_sum: Vector
) -> tuple[ParamVector, list[float]]:
    """((H − D̂) G, estimates of ‖H − D̂‖ by a power iteration that starts at G)."""
    pieces = job.ctx.pieces
    piece = pieces.load("power")
    size = grad_sum.norm()
    norms: list[float] = piece.facts["norms"] if piece else []
    first: ParamVector | None = None
    current: Vector = grad_sum.scaled(1.0 / size) if size > 0 else grad_sum
    if piece:
        parts = {p: {} for p in ("first", "current")}
        for key, tensor in piece.tensors.items():
            which, _, name = key.partition(".")
            parts[which][name] = tensor.to(job.ctx.device)
        first, current = ParamVector(parts["first"]), ParamVector(parts["current"])
    with pieces.loop():
        while len(norms) < job.options.iterations:
            label = f"Hessian products, {len(norms) + 1} of {job.options.iterations}"
            product = curved.times(current, label)
            norms.append(product.norm())
            # the iteration starts at G / ‖G‖, so its first product also gives (H − D̂) G
            first = product.scaled(size).held() if first is None else first
            if norms[-1] == 0:
                break
            current = product.scaled(1.0 / norms[-1]).held()

            def state(first: Vector = first, current: Vector = current) -> Any:
                tensors = {f"first.{n}": first[n] for n in first}
                return tensors | {f"current.{n}": current[n] for n in current}, {"norms": norms}

            pieces.tick("power", state, label)
    assert first is not None
    return first, norms


def draw_boundary(result: Result) -> Figures:
    """The gap at both selection boundaries and the errors that could bridge it, on a log scale."""
    figure, axes = plots.panels(1, 2, width=4.8)
    kinds = {
        "gap": "boundary gap",
        "twice_largest_error": "2 × largest\nmeasured error",
        "bound": "bound of the\ncorollary",
        "rounding": "rounding",
    }
    for one, (side, title) in zip(axes, SIDES.items(), strict=True):
        facts = result[side]
        shown = {label: facts[key] for key, label in kinds.items() if (facts.get(key) or 0) > 0}
        plots.bars(one, list(shown), {title: list(shown.values())}, "{:.1e}")
        if shown:
            one.set_yscale("log")
        word = "the same" if facts["same_selection"] else "a different"
        text = f"the full Hessian selects {word} set (Jaccard {facts['jaccard_full']:.4f})"
        one.set_title(f"{title}: {text}", fontsize=8)
        one.set_ylabel("score (nats)")
    return {"": figure}
