"""The boundary-gap certificate: is the selection provably the same under the exact curvature?

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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.projection import param_scores
from dualsft.data.examples import Batch, Example, collate
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.losses import plain_example_loss
from dualsft.engine.walk import loss_objective, walk
from dualsft.lab.diagnostics.hessian import plain_cwsd
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.lab.diagnostics.ranking import jaccard, mask_jaccard
from dualsft.lab.diagnostics.surrogate import (
    Surrogate,
    budgets,
    kept,
    known_scores,
    varied,
    warm_surrogate,
)
from dualsft.model.load import Candidates, load_model
from dualsft.runs.context import RunContext, pass_settings
from dualsft.storage.vectors import ParamVector, Vector

Loss = Callable[[Batch], Tensor]


def boundary(job: DiagnosticJob) -> dict[str, Any]:
    """Gaps, errors and bounds of both sides, and the overlap with the full-Hessian selection."""
    at = warm_surrogate(job)
    terms, grad_sum, eta = at.scored.terms, at.scored.grad_sum, at.eta_sc
    curved = _Curvature(job, at)
    product, norms = _power(job, curved, grad_sum)
    operator = norms[-1]
    size = grad_sum.norm()
    halved = varied(terms, grad_sum, product.scaled(eta / 2), second_order=False)  # û − u_full
    sgd = terms.preconditioner is None
    k, b = budgets(job)
    return {
        "k": k,
        "b": b,
        "eta_sc": eta,
        "rows": curved.num_rows,
        "anchors": curved.num_anchors,
        "operator_norm": operator,
        "operator_norm_change": abs(norms[-1] - norms[-2]) / operator
        if len(norms) > 1 and operator > 0
        else None,
        "iterations": len(norms),
        "grad_sum_norm": size,
        "error_direction_share": halved.norm() / at.projection.norm(),
        "params": _params(at, halved, k, eta**2 * operator * size**2 if sgd else None),
        "examples": _examples(job, at, halved, b, eta**2 * operator * size if sgd else None),
    }


def _params(at: Surrogate, error: Vector, k: int, bound: float | None) -> dict[str, Any]:
    grad_sum = at.scored.grad_sum
    ours = at.mask(at.projection, grad_sum, k)
    full = at.mask(at.projection.plus(error, -1.0), grad_sum, k)
    gap = None if ours.next_score is None else ours.threshold - ours.next_score
    # an entry is movable if its error is at least its distance from the middle of the gap
    middle = ours.threshold if ours.next_score is None else (ours.threshold + ours.next_score) / 2
    scores, errors = (
        param_scores(at.eta_sc, vector, grad_sum) for vector in (at.projection, error)
    )
    largest, movable = 0.0, 0
    for name, form in scores.forms.items():
        for start, stop in form.chunks():
            moved = errors.piece(name, start, stop).abs()
            largest = max(largest, float(moved.max()))
            movable += int(((scores.piece(name, start, stop) - middle).abs() <= moved).sum())
    dtype = next(iter(scores.forms.values())).dtype
    overlap = mask_jaccard(ours.indices, full.indices)
    return _verdict(gap, largest, bound, overlap) | {
        "movable": 0 if gap is None else movable,
        "rounding": float(torch.finfo(dtype).eps) * abs(ours.threshold),
    }


def _examples(
    job: DiagnosticJob, at: Surrogate, error: Vector, b: int, bound_a_norm: float | None
) -> dict[str, Any]:
    ctx, pool, label = job.ctx, job.scoring.pool, "errors of the example scores"

    def make() -> np.ndarray:
        objective, settings = loss_objective(at.engine.model), pass_settings(ctx)
        with ctx.precise("pool", label, at.engine.model):
            found = walk(
                at.engine,
                pool,
                objective,
                settings,
                ctx.reporter,
                label,
                direction=error,
                bounds=True,
            )
        # upper bound of ‖g_n‖ from the per-parameter bounds of the one-pass certificate
        sizes = np.sqrt((found.inner_sums.astype(np.float64) ** 2).sum(1))
        return np.stack([found.dots, sizes])

    (errors, sizes), _ = kept(job, label, make)
    errors = errors * at.eta_sc
    scores = at.pool_scores() * at.eta_sc
    chosen, full = at.best(scores, b), at.best(scores - errors, b)
    inside = np.zeros(len(pool), bool)
    inside[chosen] = True
    gap = None if b == len(pool) else float(scores[inside].min() - scores[~inside].max())
    middle = None if gap is None else float(scores[inside].min() + scores[~inside].max()) / 2
    bound = None if bound_a_norm is None else bound_a_norm * float(sizes.max())
    verdict = _verdict(gap, float(np.abs(errors).max()), bound, jaccard(chosen, full))
    movable = 0 if middle is None else int((np.abs(scores - middle) <= np.abs(errors)).sum())
    known, _ = known_scores(job)
    return verdict | {
        "movable": movable,
        "rounding": None if known is None else _rounding(job),
        "gradient_bound": float(sizes.max()),
    }


def _rounding(job: DiagnosticJob) -> float:
    """The rounding slack of the example scores, as stored by the run."""
    summary = job.ctx.folder("scores") / "summary.json"
    return float(summary.read_json()["rounding_slack"])


def _verdict(
    gap: float | None, largest: float, bound: float | None, overlap: float
) -> dict[str, Any]:
    """Results of the three tests. A gap of None means that everything is selected, so the selection
    cannot change."""
    return {
        "gap": gap,
        "largest_error": largest,
        "twice_largest_error": 2 * largest,
        "bound": bound,
        "certified_by_corollary": None if bound is None else gap is None or gap > bound,
        "certified_by_error": gap is None or gap > 2 * largest,
        "jaccard_full": overlap,
        "same_selection": overlap == 1.0,
    }


class _Curvature:
    """The operator H − D̂ on vectors over the candidates."""

    def __init__(self, job: DiagnosticJob, at: Surrogate) -> None:
        ctx, self.job = job.ctx, job
        self.terms, self.config = at.scored.terms, ctx.config.score
        self.model = _wide(ctx)
        self.candidates = ctx.candidates(self.model)
        count = job.options.rows
        self.val = _some(job, "val", count)
        self.prior = at.scored.prior_grad
        self.lam = self.terms.lam_effective if ctx.warmed_up else 0.0
        self.teacher: PreTrainedModel | None = None
        self.anchors: list[Example] = []
        if self.lam and self.config.preservation in ("cwsd", "fisher"):
            self.teacher = _wide(ctx, old=True)
        if self.lam and self.config.preservation == "cwsd":
            self.anchors = _some(job, "anchor", count)

    @property
    def num_rows(self) -> int:
        return len(self.val)

    @property
    def num_anchors(self) -> int:
        return len(self.anchors)

    def times(self, vector: Vector, label: str) -> ParamVector:
        """(H − D̂) v."""
        held = vector.held(dtype_of=lambda name: self.candidates[name].dtype)
        total = ParamVector.zeros(self.candidates)
        work = len(self.val) + len(self.anchors)
        with self.job.reporter.track(label, work, "examples") as progress:
            for rows, loss, weight in self._objectives():
                for example in rows:
                    add_hessian_product(
                        self.candidates,
                        loss(_alone(self.job.ctx, example)),
                        held,
                        total,
                        weight / len(rows),
                    )
                    progress.advance(1, tokens=example.num_tokens)
        result: Vector = total.plus(self._flat(held), self.lam) if self._is_flat else total
        if self.terms.curvature is not None:
            scale = self.terms.curvature_scale
            diagonal = self.terms.curvature.combine(lambda c, v: c * v * scale, held)
            result = result.plus(diagonal, -1.0)
        return result.held()

    def _objectives(self) -> list[tuple[list[Example], Loss, float]]:
        """(rows, loss, weight) of each part of L_val that needs double backward."""
        found: list[tuple[list[Example], Loss, float]] = [
            (self.val, lambda batch: plain_example_loss(self.model, batch), 1.0)
        ]
        teacher = self.teacher
        if self.anchors and teacher is not None:
            tau = self.config.tau
            found.append(
                (self.anchors, lambda b: plain_cwsd(teacher, self.model, b, tau), self.lam)
            )
        return found

    @property
    def _is_flat(self) -> bool:
        """Whether the Hessian of the preservation loss is a known diagonal."""
        return bool(self.lam) and self.config.preservation in ("l2", "fisher")

    def _flat(self, vector: Vector) -> Vector:
        """Product of the Hessian of ½‖θ − θ_old‖² or of ½ Σ F (θ − θ_old)² with a vector."""
        if self.config.preservation == "l2":
            return vector
        assert self.teacher is not None
        old = dict(self.teacher.named_parameters())
        new = ParamVector({name: p.detach() for name, p in self.candidates.items()})
        moved = new.plus(ParamVector({name: old[name].detach() for name in new}), -1.0)

        def fisher(prior: Tensor, step: Tensor, v: Tensor) -> Tensor:
            """F ⊙ v with F = v_prior / (θ̄ − θ_old); zero for entries that did not move."""
            return torch.where(step == 0, 0.0, prior / torch.where(step == 0, 1.0, step)) * v

        return self.prior.combine(fisher, moved, vector)


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


def _wide(ctx: RunContext, old: bool = False) -> PreTrainedModel:
    """θ̄ (or θ_old), in fp32 if the run uses half precision; candidates of θ̄ require gradients."""
    folder = ctx.model_folder if old else ctx.folder("warmup") / "theta_bar"
    dtype = torch.float32 if ctx.dtype in HALF_DTYPES else ctx.dtype
    model = load_model(ctx.local(folder), dtype, ctx.device, "eager", ctx.trusted).eval()
    model.requires_grad_(False)
    if not old:
        candidates: Candidates = ctx.candidates(model)
        for p in candidates.values():
            p.requires_grad_(True)
    return model


def _some(job: DiagnosticJob, role: str, count: int) -> list[Example]:
    """A seeded sample of `count` examples of a role."""
    rows = job.roles[role]
    chosen = np.sort(job.rng(f"hessian {role}").permutation(len(rows))[:count])
    return [rows[i] for i in chosen]


def _alone(ctx: RunContext, example: Example) -> Batch:
    return collate([example], ctx.pad_id, ctx.config.data.padding_side, ctx.device)
