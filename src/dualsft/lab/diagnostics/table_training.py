"""Diagnostics that train, perturb or score again, as `dualsft diagnose --list` shows them.

Each is the keyword arguments of a `Diagnostic`; options are dataclasses defined here. Nothing heavy
is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from dualsft.config.fields import Count, Positive
from dualsft.config.parse import Bounds, Names

_HERE = "dualsft.lab.diagnostics"


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """Settings of fidelity."""

    protocol: Literal["small", "paper"] = "small"
    """small: 24 subsets, 24 masks, K = 10, 50, 200, 256 validation rows; paper: 64 and 64, K = 10,
    50, 200, 500, 1000, all validation rows. The settings below, where given, come first."""
    subsets: Count | None = None
    """Random subsets of the pool; null is the protocol's."""
    masks: Count | None = None
    """Random masks of the run's parameter budget; null is the protocol's."""
    subset_size: Count = 256
    """Examples in a subset, at most half of the pool."""
    horizons: Annotated[str, Names()] | None = None
    """Steps K at which the gain is measured, as in 10,50,200; null is the protocol's."""
    val_rows: Count | None = None
    """Validation rows (and anchors) that the gain is measured on; null is the protocol's."""
    checkpoints: Annotated[str, Names(("init", "warmup"))] = "init,warmup"
    """Where scores are taken and trainings start: θ_old, θ̄."""
    shares: Annotated[str, Names()] | None = "0.1,1"
    """Sizes that a scaled second-order term has against the first-order one; null is none."""
    strata: Literal["proportional", "varied"] = "proportional"
    """Entries a mask takes of each parameter: in proportion to its size, or with a random density
    each, so that masks differ more."""
    batch_size: Count | None = None
    """Examples in an optimizer step; null is finetune.batch_size."""
    lr: Positive | None = None
    """The constant learning rate; null is that of fine-tuning."""
    bootstrap: Count = 1000
    """Resamples behind each interval."""


@dataclass(frozen=True, slots=True)
class HessianOptions:
    """Settings of hessian."""

    layers: Annotated[str, Names()] | None = None
    """Layers to look at, as in 3,8,10; null is the paper's eight of 28, scaled to the depth."""
    modules: Annotated[str, Names()] | None = None
    """Modules to look at, by the end of their names; null is the last matrix of attention and of
    the MLP (the paper's o_proj and down_proj)."""
    slice_size: Annotated[int, Bounds(least=3)] = 255
    """Entries of a slice, a third from each third of the scores."""
    pool_rows: Annotated[int, Bounds(least=3)] = 256
    """Pool examples that make up G and are ranked."""
    val_rows: Count = 64
    """Validation rows (and anchors) behind v and the Hessian."""


@dataclass(frozen=True, slots=True)
class DriftOptions:
    """Settings of drift."""

    start: Literal["old", "warmup"] = "old"
    """Where the fine-tuning starts: θ_old, as the method does, or θ̄."""
    points: Count = 5
    """Stops along the trajectory, besides its start."""
    probes: Annotated[int, Bounds(least=3)] = 32
    """Pool examples whose scores are followed, half of them selected ones."""
    val_rows: Count | None = 256
    """Validation rows (and anchors) behind each ∇L_val; null is all of them."""


@dataclass(frozen=True, slots=True)
class ReverseOptions:
    """Settings of reverse."""

    steps: Count | None = 100
    """Optimizer steps of each training; null is as many as the run's own fine-tuning has."""
    draws: Count = 2
    """Random draws of each control."""


TRAINING: tuple[dict[str, Any], ...] = (
    {
        "name": "fidelity",
        "target": f"{_HERE}.fidelity:run",
        "figure": f"{_HERE}.figures_training:fidelity",
        "summary": "do sets that the scores prefer lower the validation loss more when trained on?",
        "paper": "Tables score_consistency_main, score_fidelity_long_horizon and _domain",
        "cost": "(subsets + masks) × checkpoints short trainings of the largest K steps",
        "needs": ("scores", "finetune"),
        "options": FidelityOptions,
        "default": False,
    },
    {
        "name": "hessian",
        "target": f"{_HERE}.hessian:run",
        "figure": f"{_HERE}.figures_training:hessian",
        "summary": "does the diagonal curvature rank as the exact Hessian does?",
        "paper": "Tables diag_full_main, diag_full_multilayer",
        "cost": "per checkpoint: pool_rows single backward passes, val_rows double ones a slice",
        "needs": ("scores", "selection"),
        "options": HessianOptions,
    },
    {
        "name": "drift",
        "target": f"{_HERE}.drift:run",
        "figure": f"{_HERE}.figures_training:drift",
        "summary": "how far do scores move while the model is fine-tuned, and how far could they?",
        "paper": "Eq. score_drift_bound (appendix local_surrogate)",
        "cost": "the fine-tuning once more; points × (2 val_rows + 2 probes) backward passes",
        "needs": ("scores", "finetune"),
        "options": DriftOptions,
        "default": False,
    },
    {
        "name": "reverse",
        "target": f"{_HERE}.reverse:run",
        "figure": f"{_HERE}.figures_training:reverse",
        "summary": "are the lowest-scored examples and entries worse than random ones?",
        "paper": "Fig. reverse_selection",
        "cost": "4 + 3 × draws trainings of `steps` steps, each evaluated",
        "needs": ("scores", "finetune"),
        "options": ReverseOptions,
        "default": False,
    },
)
