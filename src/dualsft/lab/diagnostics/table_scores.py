"""Registry entries and options of the diagnostics of scores and selections.

Each entry holds the keyword arguments of a `Diagnostic`. `dualsft diagnose --list` prints these
texts. The module does not import torch or the implementations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from dualsft.config.parse import Bounds, Names

_HERE = "dualsft.lab.diagnostics"
_FIGURES = f"{_HERE}.score_figures"
_CURVES = f"{_HERE}.ablation_figures"
_NEEDS = ("scores", "selection")


@dataclass(frozen=True, slots=True)
class ReselectionOptions:
    """Options of reselection."""

    rounds: Annotated[str, Names()] = "0,1,2,3,5"
    """Numbers of rounds T to report for each order; rounds run up to the largest."""


@dataclass(frozen=True, slots=True)
class DataStatisticsOptions:
    """Options of data_statistics."""

    limit: Annotated[int, Bounds(least=1)] = 256
    """Most examples per group whose gradients are computed for the alignment."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of the ablations that score the pool again."""

    pool: Annotated[int, Bounds(least=0)] = 4096
    """Pool examples whose scores are compared (a seeded sample); 0 takes all."""


@dataclass(frozen=True, slots=True)
class AnchorSizeOptions:
    """Options of anchor_size."""

    sizes: Annotated[str, Names()] = "256,512,1024,2048,4096"
    """Numbers of anchors to compare; sizes beyond the run's anchors are skipped, and the full
    number of anchors is added."""
    pool: Annotated[int, Bounds(least=0)] = 4096
    """Pool examples whose scores are compared (a seeded sample); 0 takes all."""


@dataclass(frozen=True, slots=True)
class SensitivityOptions:
    """Options of sensitivity."""

    data_budgets: Annotated[str, Names()] = "0.02,0.05,0.1,0.2,0.5"
    """Data budgets to compare, as shares of all rows."""
    param_budgets: Annotated[str, Names()] = "0.01,0.02,0.05,0.1,0.2"
    """Parameter budgets to compare, as shares of the candidates."""
    lambdas: Annotated[str, Names()] = "0,0.2,0.5,0.8,1.0,1.3,2.0"
    """Values of λ to compare."""
    taus: Annotated[str, Names()] = "0.5,1.0,2.0,4.0"
    """Temperatures of CWSD to compare; each costs one walk over the anchors and one over the
    compared pool."""
    pool: Annotated[int, Bounds(least=0)] = 4096
    """Pool examples whose scores are compared (a seeded sample); 0 takes all."""


@dataclass(frozen=True, slots=True)
class BoundaryOptions:
    """Options of boundary."""

    rows: Annotated[int, Bounds(least=1)] = 32
    """Number of validation rows, and of anchors, in the Hessian."""
    iterations: Annotated[int, Bounds(least=1)] = 6
    """Steps of the power iteration for the operator norm."""


SCORES: tuple[dict[str, Any], ...] = (
    {
        "name": "data_statistics",
        "target": f"{_HERE}.chosen_statistics:data_statistics",
        "figure": f"{_FIGURES}:data_statistics",
        "summary": "alignment, loss, diversity of selected, random, top-loss and all examples",
        "paper": "Table selected_data_main; appendix selection_statistics",
        "cost": "a forward pass over the pool, gradients of a few hundred examples",
        "needs": _NEEDS,
        "options": DataStatisticsOptions,
    },
    {
        "name": "param_statistics",
        "target": f"{_HERE}.chosen_statistics:param_statistics",
        "figure": f"{_FIGURES}:param_statistics",
        "summary": "distribution of selected entries over layers and modules, vs. the candidates",
        "paper": "Table selected_param_stats_app; appendix selection_statistics",
        "cost": "reads the mask",
        "needs": _NEEDS,
    },
    {
        "name": "heatmap",
        "target": f"{_HERE}.chosen_statistics:heatmap",
        "figure": f"{_FIGURES}:heatmap",
        "summary": "mean |score| of every layer and module",
        "paper": "Figures layerwise_param_heatmap, appendix_layerwise_param_heatmaps",
        "cost": "one read of u and G",
        "needs": _NEEDS,
    },
    {
        "name": "histograms",
        "target": f"{_HERE}.chosen_statistics:histograms",
        "figure": f"{_FIGURES}:histograms",
        "summary": "distribution of both scores, and the cut-off of the budget",
        "paper": "none (ours)",
        "cost": "a few reads of u and G",
        "needs": _NEEDS,
    },
    {
        "name": "local_regret",
        "target": f"{_HERE}.coordination:local_regret",
        "figure": f"{_FIGURES}:local_regret",
        "summary": "utility that one-shot scores lose by ignoring the other side's selection",
        "paper": "Table local_regret",
        "cost": "up to two pool passes at θ̄ and three at θ_old",
        "needs": _NEEDS,
    },
    {
        "name": "coordination_gap",
        "target": f"{_HERE}.coordination:coordination_gap",
        "figure": f"{_FIGURES}:coordination_gap",
        "summary": "isolated first-order scores vs. scores aware of the other side",
        "paper": "Proposition coord_gap",
        "cost": "up to three pool passes",
        "needs": _NEEDS,
    },
    {
        "name": "reselection",
        "target": f"{_HERE}.coordination:reselection",
        "figure": f"{_FIGURES}:reselection",
        "summary": "one-shot selection vs. T rounds of fixed-side re-selection, with cost",
        "paper": "Table conditional_reselection_main; Figure fixed_side_reselection",
        "cost": "a pool pass for every round that moves the examples",
        "needs": _NEEDS,
        "tells": ("finetune",),
        "options": ReselectionOptions,
    },
    {
        "name": "preservation",
        "target": f"{_HERE}.ablations:preservation",
        "figure": f"{_CURVES}:preservation",
        "summary": "selections with no preservation, L2, Fisher, CWSD; λ absolute and relative",
        "paper": "Table cwsd_ablation (its accuracies need `dualsft compare`)",
        "cost": "two walks over the anchors, four over the compared pool",
        "needs": _NEEDS,
        "options": PoolOptions,
    },
    {
        "name": "anchor_size",
        "target": f"{_HERE}.ablations:anchor_size",
        "figure": f"{_CURVES}:anchor_size",
        "summary": "CWSD's direction and both selections with fewer anchors",
        "paper": "Table anchor_size_sensitivity",
        "cost": "one walk over the anchors, and one over the compared pool per size",
        "needs": _NEEDS,
        "options": AnchorSizeOptions,
    },
    {
        "name": "components",
        "target": f"{_HERE}.ablations:components",
        "figure": f"{_CURVES}:components",
        "summary": "selections without warmup, preservation, or the second-order term",
        "paper": "Figure ablation_components",
        "cost": "a pool pass at θ_old, four walks over the compared pool",
        "needs": _NEEDS,
        "options": PoolOptions,
    },
    {
        "name": "sensitivity",
        "target": f"{_HERE}.ablations:sensitivity",
        "figure": f"{_CURVES}:sensitivity",
        "summary": "selections under other budgets, λ and τ",
        "paper": "Figure hyperparameter_sensitivity",
        "cost": "two walks over the compared pool; per τ one more, and one over the anchors",
        "needs": _NEEDS,
        "options": SensitivityOptions,
    },
    {
        "name": "boundary",
        "target": f"{_HERE}.boundary:boundary",
        "figure": f"{_CURVES}:boundary",
        "summary": "is the selection provably the same under the exact Hessian?",
        "paper": "Proposition direct_score_gap, Corollaries topk_param and topb_data_stability",
        "cost": "a few hundred double backward passes, one or two pool passes",
        "needs": _NEEDS,
        "options": BoundaryOptions,
    },
)
