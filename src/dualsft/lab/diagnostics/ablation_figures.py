"""Figures of the score ablations and of the certificate, each drawn from its JSON.

They correspond to the paper's Tables `cwsd_ablation` and `anchor_size_sensitivity` and Figures
`ablation_components` and `hyperparameter_sensitivity`, but show overlaps of selections instead of
accuracies.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from dualsft.lab.compare.plots import COLOURS
from dualsft.lab.diagnostics.canvas import bars, legend_above, lines, panels, save
from dualsft.system.paths import RunPath

JACCARDS = {"jaccard_examples": "examples", "jaccard_params": "parameters"}


def preservation(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Overlap with the run's own selection by kind of preservation, for both forms of λ."""
    figure, axes = panels(1, 2, width=5.0)
    for one, relative in zip(axes, (False, True), strict=True):
        rows = [r for r in result["rows"] if r["lam_relative"] == relative]
        names = [f"{r['preservation']}\nλ‖v_prior‖/‖v_new‖\n{r['share'] or 0:.2g}" for r in rows]
        bars(one, names, {title: [r[key] for r in rows] for key, title in JACCARDS.items()})
        own = result["own"]
        word = "relative" if relative else "absolute"
        one.set_title(f"{word} λ = {own['lam']:g}", fontsize=9, pad=18)
        one.tick_params(axis="x", labelsize=7)
        form = "relative λ" if own["lam_relative"] else "absolute λ"
        one.set_ylabel(f"Jaccard with the run ({own['preservation']}, {form})", fontsize=8)
        one.set_ylim(0, 1.1)
    return save(figure, path)


def anchor_size(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Cosine of v_prior and overlap of both selections, over the number of anchors."""
    if "note" in result:
        return []
    figure, axes = panels()
    rows = result["rows"]
    sizes = [r["anchors"] for r in rows]
    series = {"cosine of v_prior": [r["cosine"] for r in rows]}
    series |= {f"Jaccard, {title}": [r[key] for r in rows] for key, title in JACCARDS.items()}
    lines(axes[0], sizes, series)
    axes[0].set_xscale("log", base=2)
    crowded = [n * 1.6 > after for n, after in pairwise(sizes)]  # labels would overlap
    labels = ["" if c else f"{n:,}" for n, c in zip(sizes, [*crowded, False], strict=True)]
    axes[0].set_xticks(sizes, labels)
    axes[0].minorticks_off()
    axes[0].set_xlabel("anchors")
    axes[0].set_ylabel(f"agreement with {result['reference']:,} anchors")
    return save(figure, path)


def components(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Overlap and rank correlation with the full selection, without each component."""
    figure, axes = panels(1, 2, width=4.8)
    names = [f"without\n{r['without']}" for r in result["rows"]]
    kinds = (
        ("jaccard", "Jaccard with the full selection"),
        ("spearman", "Spearman with its scores"),
    )
    for one, (key, label) in zip(axes, kinds, strict=True):
        series = {
            title: [r[f"{key}_{side}"] for r in result["rows"]]
            for side, title in (("examples", "examples"), ("params", "parameters"))
        }
        bars(one, names, series, "{:.3f}")
        one.set_ylabel(label)
    share = result["curvature_share"]
    figure.suptitle(f"second-order share of u: {share:.2g}", fontsize=9)
    return save(figure, path)


def sensitivity(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Four panels, over b, k, λ and τ."""
    figure, axes = panels(2, 2, width=4.4, height=3.1)
    for one, key, label in (
        (axes[0], "data_budgets", "data budget b (% of all rows)"),
        (axes[1], "param_budgets", "parameter budget k (% of candidates)"),
    ):
        rows = result[key]
        across = [100 * r["share"] for r in rows]
        percent = {"share of positive score": "utility_share", "score ≤ 0": "nonpositive"}
        series = {
            title: [None if r[field] is None else 100 * r[field] for r in rows]
            for title, field in percent.items()
        }
        lines(one, across, series)
        one.set_xlabel(label)
        one.set_ylabel("selected (%)")
        own = result["own"][key]
        if isinstance(own, float):
            one.axvline(100 * own, color=COLOURS[-1], linestyle=":", label="the run's")
            legend_above(one)
    for one, key, field_name, label in (
        (axes[2], "lambdas", "lam", "λ"),
        (axes[3], "taus", "tau", "temperature τ"),
    ):
        rows = result[key]
        lines(
            one,
            [r[field_name] for r in rows],
            {title: [r[field] for r in rows] for field, title in JACCARDS.items()},
        )
        one.axvline(result["own"][key], color=COLOURS[-1], linestyle=":", label="the run's")
        legend_above(one)
        one.set_ylim(0, 1.05)
        one.set_xlabel(label)
        one.set_ylabel("Jaccard with the run")
    return save(figure, path)


def boundary(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """The gap at both selection boundaries and the errors that could bridge it, on a log scale."""
    figure, axes = panels(1, 2, width=4.8)
    kinds = {
        "gap": "boundary gap",
        "twice_largest_error": "2 × largest\nmeasured error",
        "bound": "bound of the\ncorollary",
        "rounding": "rounding",
    }
    for one, (side, title) in zip(
        axes, {"examples": "examples", "params": "parameters"}.items(), strict=True
    ):
        facts = result[side]
        shown = {label: facts.get(key) for key, label in kinds.items()}
        shown = {label: v for label, v in shown.items() if v is not None and v > 0}
        bars(one, list(shown), {title: list(shown.values())}, "{:.1e}")
        if shown:
            one.set_yscale("log")
        word = "the same" if facts["same_selection"] else "a different"
        one.set_title(
            f"{title}: the full Hessian selects {word} set (Jaccard {facts['jaccard_full']:.4f})",
            fontsize=8,
        )
        one.set_ylabel("score (nats)")
    return save(figure, path)
