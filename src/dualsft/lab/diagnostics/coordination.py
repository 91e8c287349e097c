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
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualsft.algorithm.topk import TopK
from dualsft.lab import plots
from dualsft.lab.diagnostics import ranking
from dualsft.lab.diagnostics.job import DiagnosticJob, Surrogate, init_surrogate, warm_surrogate
from dualsft.lab.plots import COLOURS, SIDES, Figures, Result
from dualsft.runs.preflight import read_manifests
from dualsft.storage.vectors import Products

PAIRS = 1000
"""Points in the scatter plots, as in the paper."""


def local_regret(job: DiagnosticJob) -> dict[str, Any]:
    """Jaccard, utility ratio and regret of both sides at both checkpoints."""
    k, b = job.budgets
    rows = []
    for at in (init_surrogate(job), warm_surrogate(job)):
        if at is None:
            continue
        chosen, mask = at.best(at.pool_scores(), b), at.mask(k)
        aware = at.dots(at.projection.restricted(mask.indices), "aware scores")
        best_aware = at.best(aware, b)
        got, most = float(aware[chosen].sum()), float(aware[best_aware].sum())
        overlap = ranking.jaccard(best_aware, chosen)
        rows.append(_regret("examples", at, overlap, got * at.eta_sc, most * at.eta_sc))
        chosen_sum = at.subset_sum(chosen, "G of the selected examples")
        scores = at.scores(grad_sum=chosen_sum)
        aware_mask = at.mask(k, grad_sum=chosen_sum)
        got, most = ranking.sum_at(scores, mask.indices), ranking.sum_at(scores, aware_mask.indices)
        overlap = ranking.mask_overlap(aware_mask.indices, mask.indices)
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


def draw_local_regret(result: Result) -> Figures:
    """Jaccard and regret by side and checkpoint."""
    figure, axes = plots.panels(1, 2)
    rows = {(r["side"], r["checkpoint"]): r for r in result["rows"]}
    at = list(dict.fromkeys(r["checkpoint"] for r in result["rows"]))
    measures = {"jaccard": "Jaccard, aware and unaware", "regret_percent": "regret (% of utility)"}
    for one, (key, label) in zip(axes, measures.items(), strict=True):
        series = {name: [rows[side, name][key] for side in SIDES] for name in at}
        plots.bars(one, list(SIDES.values()), series)
        one.set_ylabel(label)
    axes[0].set_ylim(0, 1.1)
    return {"": figure}


def coordination_gap(job: DiagnosticJob) -> dict[str, Any]:
    """Distance between isolated first-order scores and those aware of the other side."""
    k, b = job.budgets
    at = warm_surrogate(job)
    chosen, mask, eta = at.best(at.pool_scores(), b), at.mask(k), at.eta_sc
    first = at.varied(at.scored.terms.v_val, second_order=False)
    isolated = at.dots(first, "isolated scores")
    aware = at.dots(first.restricted(mask.indices), "mask-aware scores")
    gap, size = isolated - aware, float(np.linalg.norm(isolated))
    examples = {
        "gap_rms": float(np.sqrt((gap**2).mean())) * eta,
        "isolated_rms": size / len(gap) ** 0.5 * eta,
        "relative_gap": float(np.linalg.norm(gap)) / size if size > 0 else None,
        "largest_gap": float(np.abs(gap).max()) * eta,
        "cosine": ranking.cosine(isolated, aware),
        "spearman": ranking.spearman(isolated, aware),
        "ranked": len(gap),
        "sign_changes": float((np.sign(isolated) != np.sign(aware)).mean()),
        "jaccard": ranking.jaccard(at.best(isolated, b), at.best(aware, b)),
    }
    chosen_sum = at.subset_sum(chosen, "G of the selected examples")
    vectors = {"iso": at.scores(first), "aware": at.scores(first, chosen_sum)}
    vectors["gap"] = vectors["iso"].plus(vectors["aware"], -1.0)
    products = Products(vectors, [("iso", "iso"), ("gap", "gap")])
    gap_norm, size, root = products.norm("gap"), products.norm("iso"), first.num_entries**0.5
    rank, ranked = ranking.vector_spearman(vectors["iso"], vectors["aware"], job.rng("ranks"))
    (left, right), _ = ranking.sampled(
        [vectors["iso"], vectors["aware"]], ranking.RANKED, job.rng("signs")
    )
    masks = at.mask(k, first), at.mask(k, first, chosen_sum)
    params = {
        "gap_rms": gap_norm / root,
        "isolated_rms": size / root,
        "relative_gap": gap_norm / size if size > 0 else None,
        "largest_gap": max(float(part.abs().max()) for _, part in ranking.chunks(vectors["gap"])),
        "cosine": vectors["iso"].cosine(vectors["aware"]),
        "spearman": rank,
        "ranked": ranked,
        "sign_changes": float((np.sign(left) != np.sign(right)).mean()),
        "jaccard": ranking.mask_overlap(*(m.indices for m in masks)),
    }
    return {"k": k, "b": b, "examples": examples, "params": params}


def draw_coordination_gap(result: Result) -> Figures:
    """The measures without units, for both sides."""
    figure, (axes,) = plots.panels(1, 1, width=6.4)
    keys = {
        "relative_gap": "‖gap‖ / ‖isolated‖",
        "cosine": "cosine",
        "spearman": "Spearman",
        "sign_changes": "sign changes",
        "jaccard": "Jaccard of\nthe selections",
    }
    series = {title: [result[side][key] for key in keys] for side, title in SIDES.items()}
    plots.bars(axes, list(keys.values()), series)
    axes.set_ylabel("isolated versus aware scores")
    return {"": figure}


@dataclass(frozen=True)
class _Round:
    """The selections of both sides after a round."""

    mask: TopK
    positions: np.ndarray
    utility: float
    """Σ_{n∈S} ⟨u ⊙ m, g_n⟩, eta_sc included."""
    moved: str | None = None
    """The side that this round selected again."""
    overlap: float = 1.0
    """Jaccard of that side with the round before."""
    seconds: float = 0.0
    """Time of this round and all before it."""


def reselection(job: DiagnosticJob) -> dict[str, Any]:
    """One-shot selection versus T rounds in both orders, with cost and scatter plots."""
    rounds = ranking.counts(job.options.rounds, "diagnose.reselection.rounds")
    k, b = job.budgets
    at = warm_surrogate(job)
    unaware, mask = at.pool_scores(), at.mask(k)
    positions = at.best(unaware, b)
    total = at.subset_sum(positions, "G of the one-shot examples")
    start = _Round(mask, positions, ranking.sum_at(at.scores(grad_sum=total), mask.indices))
    manifests, _ = read_manifests(job.ctx.rundir.path)
    seconds = {name: float(m["seconds"]) for name, m in manifests.items()}
    stages = ("warmup", "gradients", "scores", "selection")
    shared = sum(seconds.get(name, 0.0) for name in stages)
    finetune = seconds.get("finetune")
    orders, scatter = {}, {}
    for order in ("data_to_param", "param_to_data"):
        history = [start]
        for number in range(1, max(rounds) + 1):
            # the sides alternate; data_to_param updates the mask first, given the data
            move = _move_mask if (order == "data_to_param") == (number % 2 == 1) else _move_data
            after, points = move(at, history[-1], unaware, f"{order} round {number}", number == 1)
            history.append(after)
            scatter |= points
        orders[order] = [_row(history, t, shared, finetune) for t in rounds]
    return {
        "k": k,
        "b": b,
        "shared_seconds": shared,
        "finetune_seconds": finetune,
        "orders": orders,
        "scatter": scatter,
    }


def _move_mask(
    at: Surrogate, before: _Round, unaware: np.ndarray, label: str, plotted: bool
) -> tuple[_Round, dict[str, Any]]:
    """(the state with the mask selected again, given the examples; scatter data if `plotted`)."""
    start = time.perf_counter()
    total = at.subset_sum(before.positions, label)
    mask = at.mask(before.mask.num_selected, grad_sum=total)
    seconds = before.seconds + time.perf_counter() - start
    aware = at.scores(grad_sum=total)
    overlap, scatter = ranking.mask_overlap(before.mask.indices, mask.indices), {}
    if plotted:
        (old, new), _ = ranking.sampled([at.scores(), aware], PAIRS, at.job.rng("scatter params"))
        rank, ranked = ranking.vector_spearman(at.scores(), aware, at.job.rng("ranks"))
        scatter["params"] = _scatter(old, new, rank, ranked, overlap)
    utility = ranking.sum_at(aware, mask.indices)
    return _Round(mask, before.positions, utility, "params", overlap, seconds), scatter


def _move_data(
    at: Surrogate, before: _Round, unaware: np.ndarray, label: str, plotted: bool
) -> tuple[_Round, dict[str, Any]]:
    """(the state with the examples selected again, given the mask; scatter data if `plotted`)."""
    dots, seconds = at.timed_dots(at.projection.restricted(before.mask.indices), label)
    chosen = at.best(dots, len(before.positions))
    overlap, scatter = ranking.jaccard(before.positions, chosen), {}
    if plotted:
        rows = at.job.rng("scatter examples").permutation(len(dots))[:PAIRS]
        old, new, rank = (
            unaware[rows] * at.eta_sc,
            dots[rows] * at.eta_sc,
            ranking.spearman(unaware, dots),
        )
        scatter["examples"] = _scatter(old, new, rank, len(dots), overlap)
    utility, seconds = float(dots[chosen].sum()) * at.eta_sc, before.seconds + seconds
    return _Round(before.mask, chosen, utility, "examples", overlap, seconds), scatter


def _row(
    history: list[_Round], rounds: int, shared: float, finetune: float | None
) -> dict[str, Any]:
    """T rounds compared with none: overlap, utility, and cost relative to the one-shot run."""
    first, now = history[0], history[rounds]
    whole = None if finetune is None else shared + finetune
    gain = now.utility - first.utility
    return {
        "rounds": rounds,
        "moved": now.moved,
        "jaccard_last_round": now.overlap,
        "jaccard_params": ranking.mask_overlap(first.mask.indices, now.mask.indices),
        "jaccard_examples": ranking.jaccard(first.positions, now.positions),
        "utility": now.utility,
        "utility_gain": gain / abs(first.utility) if first.utility else None,
        "seconds": now.seconds,
        "relative_selection": (shared + now.seconds) / shared if shared > 0 else None,
        "relative_end_to_end": (whole + now.seconds) / whole if whole else None,
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


def draw_reselection(result: Result) -> Figures:
    """Overlap, utility and cost over the rounds, and a second figure with the scatter plots."""
    titles = {"data_to_param": "data → param", "param_to_data": "param → data"}
    orders = {titles[order]: rows for order, rows in result["orders"].items()}
    rounds = [r["rounds"] for r in result["orders"]["data_to_param"]]
    figure, axes = plots.panels(1, 3, width=3.9)
    overlaps: dict[str, plots.Values] = {}
    for title, rows in orders.items():
        overlaps |= plots.jaccards(rows, f"{title}: ")
    plots.lines(axes[0], rounds, overlaps)
    axes[0].set_ylabel("Jaccard with the one-shot selection")
    axes[0].set_ylim(0, 1.05)
    plots.legend_above(axes[0], columns=2)
    for one, key, factor, label in (
        (axes[1], "utility_gain", 100.0, "gain of surrogate utility (%)"),
        (axes[2], "relative_selection", 1.0, "cost of selection (× one-shot)"),
    ):
        plots.lines(
            one,
            rounds,
            {f"{t} first": plots.column(rows, key, factor) for t, rows in orders.items()},
        )
        one.set_ylabel(label)
    for one in axes:
        one.set_xlabel("rounds T")
        one.set_xticks(rounds)
    return {"": figure} | (
        {"_scatter": _draw_scatter(result["scatter"])} if result["scatter"] else {}
    )


def _draw_scatter(scatter: Result) -> Any:
    figure, axes = plots.panels(1, len(scatter), height=3.8)
    for one, (side, facts) in zip(axes, scatter.items(), strict=True):
        x, y = np.array(facts["one_shot"]), np.array(facts["rescored"])
        one.plot(x, y, "o", color=COLOURS[0], markersize=3, alpha=0.5, markeredgewidth=0)
        one.ticklabel_format(style="sci", scilimits=(0, 0))
        for values, which in ((x, "x"), (y, "y")):
            sizes = np.abs(values[values != 0])
            if side == "params" and len(sizes):  # heavy tails would collapse on a linear axis
                plots.signed_axis(one, which, values.tolist(), float(np.median(sizes)))
        rank = "—" if facts["spearman"] is None else f"{facts['spearman']:.3f}"
        one.set_title(f"{SIDES[side]}: Spearman {rank}, Jaccard {facts['jaccard']:.3f}", fontsize=9)
        one.set_xlabel(f"one-shot score, {plots.SCORE}", fontsize=8)
        one.set_ylabel("re-scored, other side fixed", fontsize=8)
        one.tick_params(labelsize=7)
    return figure
