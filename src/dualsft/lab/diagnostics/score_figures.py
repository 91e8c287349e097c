"""Figures of the score diagnostics, each drawn from its JSON.

They correspond to the paper's Tables `local_regret`, `selected_data_main` and
`selected_param_stats_app` and Figures `layerwise_param_heatmap` and `fixed_side_reselection`.
Scores are predicted decreases of the validation loss, in nats per response token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualsft.lab.compare.plots import COLOURS
from dualsft.lab.diagnostics.canvas import (
    bars,
    legend_above,
    lines,
    panels,
    save,
    short_names,
    signed_axis,
)
from dualsft.system.paths import RunPath

SIDES = {"examples": "examples", "params": "parameters"}
SCORE = "predicted loss decrease (nats)"


def data_statistics(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Three panels of bars: alignment, loss, diversity."""
    if "note" in result:
        return []
    figure, axes = panels(1, 3, width=3.2, height=3.2)
    groups = result["groups"]
    names = [name.replace("_", "-") for name in groups]
    kinds = (
        ("alignment", "alignment with validation (cosine)", "{:.3f}"),
        ("loss", "loss (nats per response token)", "{:.2f}"),
        ("diversity", "diversity (1 − mean cosine)", "{:.3f}"),
    )
    for one, (key, label, form) in zip(axes, kinds, strict=True):
        bars(one, names, {key: [facts[key] for facts in groups.values()]}, form)
        one.set_ylabel(label)
    return save(figure, path)


def param_statistics(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Shares of the paper's groups in selection and candidates; enrichment by layer."""
    if "note" in result:
        return []
    figure, axes = panels(1, 2, width=5.4, height=3.6)
    groups = {k: v for k, v in result["groups"].items() if v["pool"] is not None}
    shares = {
        title: [None if v[key] is None else 100 * v[key] for v in groups.values()]
        for key, title in (("selected", "selected"), ("pool", "candidates"))
    }
    names = [name.replace(" layers", "\nlayers").replace(" within", "\nwithin") for name in groups]
    bars(axes[0], names, shares, "{:.1f}")
    axes[0].set_ylabel("share (%)")
    axes[0].tick_params(axis="x", labelsize=7)
    layers = sorted((int(n), v) for n, v in result["layers"].items() if n != "other")
    axes[1].bar([n for n, _ in layers], [v["enrichment"] or 0 for _, v in layers], color=COLOURS[0])
    axes[1].axhline(1.0, color=COLOURS[-1], linestyle="--", linewidth=1, label="candidates")
    axes[1].locator_params(axis="x", integer=True)
    axes[1].set_xlabel("layer")
    axes[1].set_ylabel("enrichment (× share of candidates)")
    legend_above(axes[1])
    return save(figure, path)


def heatmap(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Layer × module: mean |score| relative to its maximum, and the selected share if known."""
    tables = [("mean |score| over the largest", np.array(result["mean_abs_score"], float), True)]
    if result["selected_share"] is not None:
        share = 100 * np.array(result["selected_share"], float)
        tables.append(("selected entries of the block (%)", share, False))
    layers, modules = result["layers"], result["modules"]
    height = max(3.0, 0.8 + 0.17 * len(layers))
    figure, axes = panels(1, len(tables), width=max(3.8, 0.55 * len(modules)), height=height)
    for one, (label, values, scaled) in zip(axes, tables, strict=True):
        largest = np.nanmax(values) if np.isfinite(values).any() else 1.0
        shown = values / largest if scaled and largest > 0 else values
        image = one.imshow(shown, aspect="auto", cmap="viridis", vmin=0)
        one.grid(False)
        names = short_names(modules)
        one.set_xticks(range(len(modules)), [names[m] for m in modules], rotation=60, fontsize=8)
        every = max(1, len(layers) // 14)
        one.set_yticks(range(0, len(layers), every), layers[::every], fontsize=8)
        one.set_ylabel("layer")
        figure.colorbar(image, ax=one, label=label)
    return save(figure, path)


def histograms(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Histograms of both scores on log-like axes, with the cut-off."""
    figure, axes = panels(1, 2)
    for one, (side, title) in zip(axes, SIDES.items(), strict=True):
        facts = result[side]
        edges, counts = np.array(facts["edges"]), np.array(facts["counts"])
        one.stairs(counts, edges, fill=True, color=COLOURS[5], edgecolor=COLOURS[0])
        one.axvline(
            facts["cutoff"],
            color=COLOURS[1],
            linestyle="--",
            label=f"cut-off: {facts['selected']:,} of {facts['total']:,} selected",
        )
        signed_axis(one, "x", facts["edges"], facts["scale"])
        one.set_yscale("symlog", linthresh=1)
        one.set_ylim(0, 2 * counts.max())
        one.set_xlabel(SCORE)
        one.set_ylabel(f"{title} per bin")
        legend_above(one)
    return save(figure, path)


def local_regret(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Jaccard and regret by side and checkpoint."""
    figure, axes = panels(1, 2)
    rows = {(r["side"], r["checkpoint"]): r for r in result["rows"]}
    at = list(dict.fromkeys(r["checkpoint"] for r in result["rows"]))
    for one, (key, label) in zip(
        axes,
        (("jaccard", "Jaccard, aware and unaware"), ("regret_percent", "regret (% of utility)")),
        strict=True,
    ):
        series = {name: [rows[side, name][key] for side in SIDES] for name in at}
        bars(one, list(SIDES.values()), series)
        one.set_ylabel(label)
    axes[0].set_ylim(0, 1.1)
    return save(figure, path)


def coordination_gap(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """The measures without units, for both sides."""
    figure, axes = panels(1, 1, width=6.4)
    keys = {
        "relative_gap": "‖gap‖ / ‖isolated‖",
        "cosine": "cosine",
        "spearman": "Spearman",
        "sign_changes": "sign changes",
        "jaccard": "Jaccard of\nthe selections",
    }
    series = {title: [result[side][key] for key in keys] for side, title in SIDES.items()}
    bars(axes[0], list(keys.values()), series)
    axes[0].set_ylabel("isolated versus aware scores")
    return save(figure, path)


def reselection(result: dict[str, Any], path: RunPath) -> list[RunPath]:
    """Overlap, utility and cost over the rounds, and a second figure with the scatter plots."""
    orders = {"data_to_param": "data → param first", "param_to_data": "param → data first"}
    figure, axes = panels(1, 3, width=3.9)
    for order, title in orders.items():
        rows = result["orders"][order]
        rounds = [r["rounds"] for r in rows]
        short = title.removesuffix(" first")
        for side, name in SIDES.items():
            number = list(orders).index(order) * 2 + list(SIDES).index(side)
            axes[0].plot(
                rounds,
                [r[f"jaccard_{side}"] for r in rows],
                marker="osD^"[number],
                linestyle="-" if side == "examples" else "--",
                color=COLOURS[number],
                label=f"{short}: {name}",
            )
    axes[0].set_ylabel("Jaccard with the one-shot selection")
    axes[0].set_ylim(0, 1.05)
    legend_above(axes[0], columns=2)
    rounds = [r["rounds"] for r in result["orders"]["data_to_param"]]
    for one, key, factor, label in (
        (axes[1], "utility_gain", 100.0, "gain of surrogate utility (%)"),
        (axes[2], "relative_selection", 1.0, "cost of selection (× one-shot)"),
    ):
        series = {
            title: [None if r[key] is None else factor * r[key] for r in result["orders"][order]]
            for order, title in orders.items()
        }
        lines(one, rounds, series)
        one.set_ylabel(label)
    for one in axes:
        one.set_xlabel("rounds T")
        one.set_xticks(rounds)
    files = save(figure, path)
    if result["scatter"]:
        files += _scatter(result["scatter"], path.with_name(f"{path.name}_scatter"))
    return files


def _scatter(scatter: dict[str, Any], path: RunPath) -> list[RunPath]:
    figure, axes = panels(1, len(scatter), height=3.8)
    for one, (side, facts) in zip(axes, scatter.items(), strict=True):
        x, y = np.array(facts["one_shot"]), np.array(facts["rescored"])
        one.plot(x, y, "o", color=COLOURS[0], markersize=3, alpha=0.5, markeredgewidth=0)
        one.ticklabel_format(style="sci", scilimits=(0, 0))
        for values, which in ((x, "x"), (y, "y")):
            sizes = np.abs(values[values != 0])
            if side == "params" and len(sizes):  # heavy tails would collapse on a linear axis
                signed_axis(one, which, values.tolist(), float(np.median(sizes)))
        rank = "—" if facts["spearman"] is None else f"{facts['spearman']:.3f}"
        one.set_title(f"{SIDES[side]}: Spearman {rank}, Jaccard {facts['jaccard']:.3f}", fontsize=9)
        one.set_xlabel(f"one-shot score, {SCORE}", fontsize=8)
        one.set_ylabel("re-scored, other side fixed", fontsize=8)
        one.tick_params(labelsize=7)
    return save(figure, path)
