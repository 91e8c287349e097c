"""Coordination of the two selections: local regret, coordination gap, fixed-side re-selection.

Local regret: the paper's Table `local_regret` and its appendix. At each checkpoint the one-shot
selections by that checkpoint's u are fixed, and the scores of each side that ignore the other side
(unaware: ⟨u, g_n⟩, u ⊙ G) are compared with those that include it (aware: ⟨u ⊙ m, g_n⟩, u ⊙ G_S).

Coordination gap: Proposition `coord_gap`, first order: s_iso − s̄ on either side. The raw gap of the
parameter side is large by construction (G_S sums fewer examples than G), so the cosine, which
ignores a common factor, is reported as well.

Re-selection: Table `conditional_reselection_main`, Figure `fixed_side_reselection`, Table
`cost_breakdown`; u stays that of the one-shot run. Nothing is trained here: the utility is that of
the surrogate, Σ_{n∈S} ⟨u ⊙ m, g_n⟩, and the paper's Overall is not measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dualsft.algorithm.topk import TopK
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.lab.diagnostics.ranking import (
    RANKED,
    cosine,
    counts,
    jaccard,
    mask_jaccard,
    sampled,
    spearman,
    sum_at,
    vector_spearman,
)
from dualsft.lab.diagnostics.surrogate import Surrogate, budgets, checkpoints, warm_surrogate
from dualsft.runs.preflight import read_manifests
from dualsft.storage.vectors import Products

PAIRS = 1000
"""Points in the scatter plots, as in the paper."""


def local_regret(job: DiagnosticJob) -> dict[str, Any]:
    """Jaccard, utility ratio and regret of both sides at both checkpoints."""
    k, b = budgets(job)
    rows = []
    for at in checkpoints(job):
        unaware = at.pool_scores()
        chosen = at.best(unaware, b)
        mask = at.mask(at.projection, at.scored.grad_sum, k)
        aware = at.dots(at.projection.restricted(mask.indices), "aware scores")
        best_aware = at.best(aware, b)
        got, most = float(aware[chosen].sum()), float(aware[best_aware].sum())
        overlap = jaccard(best_aware, chosen)
        rows.append(_regret("examples", at, overlap, got * at.eta_sc, most * at.eta_sc))
        subset = [job.scoring.pool[i] for i in chosen]
        chosen_sum = at.subset_sum(subset, "G of the selected examples")
        scores = at.scores(at.projection, chosen_sum)
        aware_mask = at.mask(at.projection, chosen_sum, k)
        got, most = sum_at(scores, mask.indices), sum_at(scores, aware_mask.indices)
        overlap = mask_jaccard(aware_mask.indices, mask.indices)
        rows.append(_regret("params", at, overlap, got, most))
    return {"k": k, "b": b, "pool": len(job.scoring.pool), "rows": rows}


def _regret(side: str, at: Surrogate, overlap: float, got: float, most: float) -> dict[str, Any]:
    """One row of the table; the ratio is None if the best aware utility is not positive."""
    ratio = got / most if most > 0 else None
    return {
        "side": side,
        "checkpoint": at.name,
        "jaccard": overlap,
        "utility_unaware": got,
        "utility_aware": most,
        "ratio": ratio,
        "regret_percent": None if ratio is None else 100.0 * (1.0 - ratio),
    }


def coordination_gap(job: DiagnosticJob) -> dict[str, Any]:
    """Distance between isolated first-order scores and those aware of the other side."""
    k, b = budgets(job)
    at = warm_surrogate(job)
    chosen = at.best(at.pool_scores(), b)
    mask = at.mask(at.projection, at.scored.grad_sum, k)
    first = replace(at.scored.terms, curvature=None).projection(at.scored.grad_sum)
    isolated = at.dots(first, "isolated scores")
    aware = at.dots(first.restricted(mask.indices), "mask-aware scores")
    eta = at.eta_sc
    chosen_sum = at.subset_sum([job.scoring.pool[i] for i in chosen], "G of the selected examples")
    iso_params = at.scores(first, at.scored.grad_sum)
    aware_params = at.scores(first, chosen_sum)
    vectors = {"iso": iso_params, "aware": aware_params, "gap": iso_params.plus(aware_params, -1.0)}
    products = Products(vectors, [("iso", "iso"), ("gap", "gap"), ("aware", "aware")])
    agreement = iso_params.cosine(aware_params)
    rank, ranked = vector_spearman(iso_params, aware_params, job.rng("ranks"))
    (left, right), _ = sampled([iso_params, aware_params], RANKED, job.rng("signs"))
    gap = isolated - aware
    size, size_params = float(np.linalg.norm(isolated)), products.norm("iso")
    aware_mask = at.mask(first, chosen_sum, k)
    iso_mask = at.mask(first, at.scored.grad_sum, k)
    return {
        "k": k,
        "b": b,
        "examples": {
            "gap_rms": float(np.sqrt((gap**2).mean())) * eta,
            "isolated_rms": size / len(gap) ** 0.5 * eta,
            "relative_gap": float(np.linalg.norm(gap)) / size if size > 0 else None,
            "largest_gap": float(np.abs(gap).max()) * eta,
            "cosine": cosine(isolated, aware),
            "spearman": spearman(isolated, aware),
            "ranked": len(gap),
            "sign_changes": float((np.sign(isolated) != np.sign(aware)).mean()),
            "jaccard": jaccard(at.best(isolated, b), at.best(aware, b)),
        },
        "params": {
            "gap_rms": products.norm("gap") / iso_params.num_entries**0.5,
            "isolated_rms": size_params / iso_params.num_entries**0.5,
            "relative_gap": products.norm("gap") / size_params if size_params > 0 else None,
            "largest_gap": _largest(vectors["gap"]),
            "cosine": agreement,
            "spearman": rank,
            "ranked": ranked,
            "sign_changes": float((np.sign(left) != np.sign(right)).mean()),
            "jaccard": mask_jaccard(iso_mask.indices, aware_mask.indices),
        },
    }


def _largest(vector: Any) -> float:
    return max(
        float(vector.piece(name, start, stop).abs().max())
        for name, form in vector.forms.items()
        for start, stop in form.chunks()
    )


@dataclass
class _Pair:
    """The selections of both sides after a round."""

    mask: TopK
    positions: np.ndarray
    utility: float
    """Σ_{n∈S} ⟨u ⊙ m, g_n⟩, eta_sc included."""


def reselection(job: DiagnosticJob) -> dict[str, Any]:
    """One-shot selection versus T rounds in both orders, with cost and scatter plots."""
    rounds = counts(job.options.rounds, "diagnose.reselection.rounds")
    k, b = budgets(job)
    at = warm_surrogate(job)
    unaware = at.pool_scores()
    positions = at.best(unaware, b)
    mask = at.mask(at.projection, at.scored.grad_sum, k)
    start = _start(job, at, mask, positions)
    manifests, _ = read_manifests(job.ctx.rundir.path)
    seconds = {name: float(m["seconds"]) for name, m in manifests.items()}
    stages = ("warmup", "gradients", "scores", "selection")
    shared = sum(seconds.get(name, 0.0) for name in stages)
    finetune = seconds.get("finetune")
    orders, scatter = {}, {}
    for order in ("data_to_param", "param_to_data"):
        history, scatter_side = _rounds(job, at, start, order, max(rounds), unaware)
        scatter |= scatter_side
        orders[order] = [_row(history, t, shared, finetune) for t in rounds]
    return {
        "k": k,
        "b": b,
        "shared_seconds": shared,
        "finetune_seconds": finetune,
        "orders": orders,
        "scatter": scatter,
    }


def _start(job: DiagnosticJob, at: Surrogate, mask: TopK, positions: np.ndarray) -> _Pair:
    """The one-shot selections and their utility."""
    subset = [job.scoring.pool[i] for i in positions]
    total = at.subset_sum(subset, "G of the one-shot examples")
    return _Pair(mask, positions, sum_at(at.scores(at.projection, total), mask.indices))


def _rounds(
    job: DiagnosticJob, at: Surrogate, start: _Pair, order: str, last: int, unaware: np.ndarray
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(state after each round, starting with round 0; scatter data of the first round)."""
    pair, spent = start, 0.0
    history: list[dict[str, Any]] = [
        {"moved": None, "jaccard_before": 1.0, "pair": start, "seconds": 0.0}
    ]
    scatter: dict[str, Any] = {}
    for number in range(1, last + 1):
        # the sides alternate; data_to_param updates the mask first, given the data
        moves_mask = (order == "data_to_param") == (number % 2 == 1)
        label = f"{order} round {number}"
        before = pair
        if moves_mask:
            began = time.perf_counter()
            subset = [job.scoring.pool[i] for i in pair.positions]
            total = at.subset_sum(subset, label)
            mask = at.mask(at.projection, total, pair.mask.num_selected)
            seconds = time.perf_counter() - began
            aware = at.scores(at.projection, total)
            pair = _Pair(mask, pair.positions, sum_at(aware, mask.indices))
            overlap = mask_jaccard(before.mask.indices, mask.indices)
            if number == 1:
                one_shot = at.scores(at.projection, at.scored.grad_sum)
                (old, new), _ = sampled([one_shot, aware], PAIRS, job.rng("scatter params"))
                rank, ranked = vector_spearman(one_shot, aware, job.rng("ranks"))
                scatter["params"] = _scatter(old, new, rank, ranked, overlap)
        else:
            masked = at.projection.restricted(pair.mask.indices)
            dots, seconds = at.timed_dots(masked, label)
            chosen = at.best(dots, len(pair.positions))
            pair = _Pair(pair.mask, chosen, float(dots[chosen].sum()) * at.eta_sc)
            overlap = jaccard(before.positions, chosen)
            if number == 1:
                rows = job.rng("scatter examples").permutation(len(dots))[:PAIRS]
                old, new = unaware[rows] * at.eta_sc, dots[rows] * at.eta_sc
                rank = spearman(unaware, dots)
                scatter["examples"] = _scatter(old, new, rank, len(dots), overlap)
        spent += seconds
        moved = "params" if moves_mask else "examples"
        history.append({"moved": moved, "jaccard_before": overlap, "pair": pair, "seconds": spent})
    return history, scatter


def _row(
    history: list[dict[str, Any]], rounds: int, shared: float, finetune: float | None
) -> dict[str, Any]:
    """T rounds compared with none: overlap, utility, and cost relative to the one-shot run."""
    first, now = history[0]["pair"], history[rounds]
    pair, spent = now["pair"], now["seconds"]
    whole = None if finetune is None else shared + finetune
    return {
        "rounds": rounds,
        "moved": now["moved"],
        "jaccard_last_round": now["jaccard_before"],
        "jaccard_params": mask_jaccard(first.mask.indices, pair.mask.indices),
        "jaccard_examples": jaccard(first.positions, pair.positions),
        "utility": pair.utility,
        "utility_gain": (pair.utility - first.utility) / abs(first.utility)
        if first.utility
        else None,
        "seconds": spent,
        "relative_selection": (shared + spent) / shared if shared > 0 else None,
        "relative_end_to_end": (whole + spent) / whole if whole else None,
    }


def _scatter(
    one_shot: np.ndarray, again: np.ndarray, rank: float | None, ranked: int, overlap: float
) -> dict[str, Any]:
    return {
        "one_shot": one_shot.tolist(),
        "rescored": again.tolist(),
        "spearman": rank,
        "ranked": ranked,
        "jaccard": overlap,
    }
