"""u, the shared projection: Algorithm 1 line 7, Eq. (u).

This module works with u / eta_sc = v_val − (eta_sc / 2) ĉ ⊙ G, because eta_sc is about 1e-10;
scores are multiplied by eta_sc when they are reported. `score.step: adam` divides the direction by
ĉ. In one-pass mode (docs/algorithm.md, "One pass instead of two") the same formula with N · v_new
in place of G gives the direction U₀, which is known before the pool pass. The difference of the two
is `residual`, which the certificate bounds.

All vectors are lazy (`storage/vectors.py`): nothing of the model's size is held in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dualsft.config.settings import ScoreConfig
from dualsft.storage.vectors import LazyVector, Products, Vector


@dataclass(frozen=True, kw_only=True)
class ProjectionTerms:
    """The terms of Eq. (u) other than G: v_val, ĉ and the step."""

    val_grad: Vector
    v_val: Vector
    curvature: Vector | None
    """ĉ if the second-order term is enabled."""
    preconditioner: Vector | None
    """ĉ for score.step=adam."""
    curvature_scale: float
    eta_ft: float
    n_sc: int
    lam_effective: float
    """The factor applied to v_prior (`effective_lambda`)."""

    @property
    def eta_sc(self) -> float:
        """η_sc = η_ft / N_sc: Algorithm 1 line 4."""
        return self.eta_ft / self.n_sc

    def projection(self, grad_sum: Vector) -> Vector:
        """u / eta_sc for this G (not u itself: see the top of this module)."""
        return self._stepped(self.v_val.combine(self._minus_curved, *self._pair(grad_sum)))

    def estimate(self) -> Vector:
        """U₀ / eta_sc: the projection with N · v_new for G (exact without a second-order term)."""
        return self.projection(self.val_grad.scaled(float(self.n_sc)))

    def param_term(self, gradient: Vector, grad_sum: Vector) -> Vector:
        """The part of s_θ / eta_sc that v_new or v_prior contributes."""
        return self._stepped(gradient.combine(torch.mul, grad_sum))

    def second_order(self, grad_sum: Vector) -> Vector:
        """(eta_sc / 2) ĉ ⊙ G: the second-order part of u / eta_sc, before the step."""

        def minus_nothing(first: Tensor, *pair: Tensor) -> Tensor:
            return self._minus_curved(torch.zeros_like(first), *pair) * -1.0

        return self.v_val.combine(minus_nothing, *self._pair(grad_sum))

    def residual(self, grad_sum: Vector) -> Vector:
        """(U₀ − u) / eta_sc: the error of the one-pass direction, without cancellation."""
        difference = grad_sum.plus(self.val_grad, -float(self.n_sc))
        return self._stepped(self.second_order(difference))

    def _pair(self, grad_sum: Vector) -> tuple[Vector, ...]:
        return () if self.curvature is None else (self.curvature, grad_sum)

    def _minus_curved(self, first: Tensor, *pair: Tensor) -> Tensor:
        if not pair:
            return first
        curvature, grad_sum = pair
        factor = -0.5 * self.eta_sc * self.curvature_scale
        return torch.addcmul(first, curvature, grad_sum, value=factor)

    def _stepped(self, direction: Vector) -> Vector:
        if self.preconditioner is None:
            return direction
        return direction.combine(torch.div, self.preconditioner)


def projection_terms(
    score: ScoreConfig,
    eta_ft: float,
    n_sc: int,
    val_grad: Vector,
    prior_grad: Vector,
    curvature: Vector | None,
    grad_sum: Vector | None = None,
) -> ProjectionTerms:
    """The terms of Eq. (u) for these settings; G is needed for score.lam_relative=scores only."""
    preconditioner = curvature if score.step == "adam" else None
    weights = grad_sum
    if grad_sum is not None and preconditioner is not None:
        weights = grad_sum.combine(torch.div, preconditioner)
    lam = effective_lambda(score.lam, score.lam_relative, val_grad, prior_grad, weights)
    v_val = val_grad.plus(prior_grad, lam) if lam else val_grad
    second = score.curvature == "adam_rms" and score.curvature_scale > 0
    return ProjectionTerms(
        val_grad=val_grad,
        v_val=v_val,
        curvature=curvature if second else None,
        preconditioner=preconditioner,
        curvature_scale=score.curvature_scale,
        eta_ft=eta_ft,
        n_sc=n_sc,
        lam_effective=lam,
    )


def effective_lambda(
    lam: float,
    relative: bool | Literal["scores"],
    val_grad: Vector,
    prior_grad: Vector,
    weights: Vector | None = None,
) -> float:
    """The factor of v_prior: λ, or λ ‖v_new‖ / ‖v_prior‖; zero for a zero v_prior.

    With `scores` the norms are those of the two terms of the parameter scores, v_new ⊙ `weights`
    and v_prior ⊙ `weights` (G; for score.step=adam divided by ĉ), so λ is the ratio of their RMS.
    """
    if relative == "scores":
        assert weights is not None, "this form of λ needs G (config/methods.py refuses the rest)"
        val_grad, prior_grad = (v.combine(torch.mul, weights) for v in (val_grad, prior_grad))
    pairs = [("val", "val"), ("prior", "prior")]
    norms = Products({"val": val_grad, "prior": prior_grad}, pairs)
    prior_norm = norms.norm("prior")
    if prior_norm == 0:
        return 0.0
    return lam * norms.norm("val") / prior_norm if relative else lam


def param_scores(eta_sc: float, projection: Vector, grad_sum: Vector) -> LazyVector:
    """s_θ = u ⊙ G (Algorithm 1 line 8), including the factor eta_sc."""
    return projection.combine(lambda u, g: (u * g).mul_(eta_sc), grad_sum)


@dataclass(frozen=True)
class Scored:
    """The shared projection u and its terms; both sides of the selection use it."""

    terms: ProjectionTerms
    grad_sum: Vector
    prior_grad: Vector
    projection: Vector
    """u / eta_sc."""

    @classmethod
    def of(cls, terms: ProjectionTerms, grad_sum: Vector, prior_grad: Vector) -> Scored:
        """Algorithm 1 line 7, once G is known."""
        return cls(terms, grad_sum, prior_grad, terms.projection(grad_sum))
