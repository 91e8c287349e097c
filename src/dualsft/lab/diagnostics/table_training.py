"""Registry entries and options of the diagnostics that train, perturb or score again.

Each entry holds the keyword arguments of a `Diagnostic`. `dualsft diagnose --list` prints these
texts. The module does not import torch or the implementations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from dualsft.config.fields import Count, Positive
from dualsft.config.parse import Bounds, Names

_HERE = "dualsft.lab.diagnostics"


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """Options of fidelity."""

    protocol: Literal["small", "paper"] = "small"
    """small: 24 subsets, 24 masks, K = 10, 50, 200, 256 validation rows; paper: 64 and 64, K = 10,
    50, 200, 500, 1000, 1024 validation rows. The options below override it."""
    subsets: Count | None = None
    """Number of random subsets of the pool; null takes it from the protocol."""
    masks: Count | None = None
    """Number of random masks of the run's parameter budget; null takes it from the protocol."""
    subset_size: Count = 256
    """Examples per subset, at most half of the pool."""
    horizons: Annotated[str, Names()] | None = None
    """Steps K at which the gain is measured, as in 10,50,200; null takes them from the protocol."""
    val_rows: Count | None = None
    """Validation rows (and anchors) on which the gain is measured; null takes it from the
    protocol."""
    checkpoints: Annotated[str, Names(("init", "warmup"))] = "init,warmup"
    """Checkpoints at which scores are computed and trainings start: init is θ_old, warmup is θ̄."""
    shares: Annotated[str, Names()] | None = "0.1,1"
    """Also score with the second-order term scaled to these shares of the first-order term; null is
    none."""
    strata: Literal["proportional", "varied"] = "proportional"
    """Entries that a mask takes from each parameter: in proportion to its size, or with a random
    density per parameter, so that masks differ more."""
    batch_size: Count | None = None
    """Examples per optimizer step; null is finetune.batch_size."""
    lr: Positive | None = None
    """The constant learning rate; null is that of fine-tuning."""
    bootstrap: Count = 1000
    """Bootstrap resamples for each interval."""


@dataclass(frozen=True, slots=True)
class HessianOptions:
    """Options of hessian."""

    layers: Annotated[str, Names()] | None = None
    """Layers to compare, as in 3,8,10; null is the paper's eight of 28, scaled to the depth."""
    modules: Annotated[str, Names()] | None = None
    """Modules to compare, by the end of their names; null is the last matrix of attention and of
    the MLP (the paper's o_proj and down_proj)."""
    slice_size: Annotated[int, Bounds(least=3)] = 255
    """Entries per slice, a third from each third of the scores."""
    pool_rows: Annotated[int, Bounds(least=3)] = 256
    """Pool examples that G is summed over and that are ranked."""
    val_rows: Count = 64
    """Validation rows (and anchors) for v and the Hessian."""


@dataclass(frozen=True, slots=True)
class DriftOptions:
    """Options of drift."""

    start: Literal["old", "warmup"] = "old"
    """Weights that fine-tuning starts from: θ_old, as in the method, or θ̄."""
    points: Count = 5
    """Points of the trajectory at which scores are measured, in addition to the start."""
    probes: Annotated[int, Bounds(least=3)] = 32
    """Pool examples whose scores are measured, half of them selected ones."""
    val_rows: Count | None = 256
    """Validation rows (and anchors) for each ∇L_val; null is all of them."""


@dataclass(frozen=True, slots=True)
class ReverseOptions:
    """Options of reverse."""

    steps: Count | None = 100
    """Optimizer steps per training; null is the number of steps of the run's fine-tuning."""
    draws: Count = 2
    """Random draws per control."""


TRAINING: tuple[dict[str, Any], ...] = (
    {
        "name": "fidelity",
        "target": f"{_HERE}.fidelity:run",
        "figure": f"{_HERE}.figures_training:fidelity",
        "summary": "does training on sets with higher scores lower the validation loss more?",
        "paper": "Tables score_consistency_main, score_fidelity_long_horizon and _domain",
        "cost": "(subsets + masks) × checkpoints short trainings, each of the largest K steps",
        "needs": ("scores", "finetune"),
        "options": FidelityOptions,
        "default": False,
    },
    {
        "name": "hessian",
        "target": f"{_HERE}.hessian:run",
        "figure": f"{_HERE}.figures_training:hessian",
        "summary": "does the diagonal curvature give the same ranking as the exact Hessian?",
        "paper": "Tables diag_full_main, diag_full_multilayer",
        "cost": "per checkpoint: pool_rows single backward passes, val_rows double ones per slice",
        "needs": ("scores", "selection"),
        "options": HessianOptions,
    },
    {
        "name": "drift",
        "target": f"{_HERE}.drift:run",
        "figure": f"{_HERE}.figures_training:drift",
        "summary": "how much do scores change during fine-tuning, compared with the paper's bound?",
        "paper": "Eq. score_drift_bound (appendix local_surrogate)",
        "cost": "one more fine-tuning; points × (2 val_rows + 2 probes) backward passes",
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
