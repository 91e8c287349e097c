"""Figures of the diagnostics that train or perturb, each drawn from its JSON.

Score fidelity over the horizon (the paper's Table score_fidelity_long_horizon as curves), diagonal
versus full Hessian by region (Table diag_full_multilayer), score drift with its bound (Eq.
score_drift_bound), reverse selection (Fig. reverse_selection). Saved as SVG and PNG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualsft.lab.compare.plots import COLOURS, MARKERS
from dualsft.lab.diagnostics.canvas import HATCHES, legend_above, panels, save, short_names
from dualsft.system.paths import RunPath

SIDES = {"data": "subsets of examples", "param": "masks of entries"}
Result = Mapping[str, Any]


def fidelity(result: Result, path: RunPath) -> list[RunPath]:
    """ρ and pairwise agreement over K with 95 % intervals; every form of u; the LDS over K."""
    objective = _objective(result)
    rows = [r for r in result["rows"] if r["objective"] == objective]
    figure, places = panels(2, 2, 4.8, 3.4)
    measures = (("rho", "Spearman ρ", 0.0), ("pair", "pairwise agreement (%)", 50.0))
    for across, (side, title) in enumerate(SIDES.items()):
        for down, (key, name, chance) in enumerate(measures):
            axes = places[2 * down + across]
            _horizons(axes, [r for r in rows if r["side"] == side and r["paper_row"]], key)
            axes.axhline(chance, color="#888888", linewidth=0.8, linestyle=":")
            axes.set_ylabel(name)
            axes.set_title(title if down == 0 else "")
            if down == 1:
                axes.set_xlabel("AdamW steps K from the checkpoint")
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    what = "L_val = L_new + λ L_prior" if objective == "own" else "L_new"
    figure.suptitle(f"Score fidelity: predicted against realised gain in {what}", fontsize=10)
    files = save(figure, path)
    files += _forms(rows, path.with_name(f"{path.name}_forms"))
    return files + _lds(result["lds"], path.with_name(f"{path.name}_lds"))


def _objective(result: Result) -> str:
    own = any(r["objective"] == "own" for r in result["rows"])
    return "own" if own else "new"


def _horizons(axes: Any, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """One curve per row of the paper's table."""
    names = list(dict.fromkeys(r["paper_row"] for r in rows))
    for number, name in enumerate(names):
        mine = [r for r in rows if r["paper_row"] == name and r["K"] != "mean"]
        mine = [r for r in mine if r[key] is not None]
        if not mine:
            continue
        shift = 1.0 + 0.04 * (number - (len(names) - 1) / 2)  # keeps error bars from overlapping
        x, y = [r["K"] * shift for r in mine], [r[key] for r in mine]
        ends = [r[f"{key}_interval"] for r in mine]
        low = [
            max(0.0, v - e[0]) if e[0] is not None else 0.0 for v, e in zip(y, ends, strict=True)
        ]
        high = [
            max(0.0, e[1] - v) if e[1] is not None else 0.0 for v, e in zip(y, ends, strict=True)
        ]
        axes.errorbar(
            x,
            y,
            yerr=[low, high],
            color=COLOURS[number],
            marker=MARKERS[number],
            markersize=5,
            linewidth=1.2,
            capsize=2,
            elinewidth=0.8,
            label=name,
        )
    axes.set_xscale("log")
    ticks = sorted({r["K"] for r in rows if r["K"] != "mean"})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()


def _forms(rows: Sequence[Mapping[str, Any]], path: RunPath) -> list[RunPath]:
    """ρ averaged over K for every form of u: the effect of curvature, λ and step."""
    means = [r for r in rows if r["K"] == "mean" and r["rho"] is not None]
    if not means:
        return []
    labels = list(dict.fromkeys(_form(r) for r in means))
    figure, (axes,) = panels(1, 1, 7.2, 1.2 + 0.22 * len(labels))
    for number, (side, name) in enumerate(SIDES.items()):
        mine = {_form(r): r for r in means if r["side"] == side}
        y = [i + 0.14 * (2 * number - 1) for i, label in enumerate(labels) if label in mine]
        found = [mine[label] for label in labels if label in mine]
        x = [r["rho"] for r in found]
        ends = [
            [v if e is None else e for e in r["rho_interval"]]
            for r, v in zip(found, x, strict=True)
        ]
        axes.hlines(y, [e[0] for e in ends], [e[1] for e in ends], COLOURS[number], linewidth=0.9)
        axes.plot(x, y, MARKERS[number], color=COLOURS[number], markersize=4, label=name)
    axes.axvline(0.0, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("Spearman ρ, mean over K (95 % interval)")
    legend_above(axes)
    return save(figure, path)


def _form(row: Mapping[str, Any]) -> str:
    return f"{row['checkpoint']} · {row['order']} · λ {row['lam']} · {row['step']}"


def _lds(rows: Sequence[Mapping[str, Any]], path: RunPath) -> list[RunPath]:
    """The linear datamodeling score over K."""
    known = [r for r in rows if r["lds"] is not None]
    if not known:
        return []
    figure, (axes,) = panels(1, 1, 5.6, 3.8)
    curves = list(dict.fromkeys((r["checkpoint"], r["step"]) for r in known))
    for number, curve in enumerate(curves):
        mine = [r for r in known if (r["checkpoint"], r["step"]) == curve]
        x, y = [r["K"] for r in mine], [r["lds"] for r in mine]
        bands = [
            (v, v) if r["low"] is None else (r["low"], r["high"])
            for r, v in zip(mine, y, strict=True)
        ]
        colour = COLOURS[number]
        axes.fill_between(x, [b[0] for b in bands], [b[1] for b in bands], color=colour, alpha=0.15)
        label = f"{curve[0]}, {curve[1]} step"
        axes.plot(x, y, color=colour, marker=MARKERS[number], markersize=5, label=label)
    axes.axhline(0.0, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    ticks = sorted({r["K"] for r in known})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("AdamW steps K from the checkpoint")
    axes.set_ylabel("linear datamodeling score (mean ρ)")
    legend_above(axes, 4)
    return save(figure, path)


def hessian(result: Result, path: RunPath) -> list[RunPath]:
    """Agreement of the scores and of the second-order terms, by region and module."""
    means = [m for m in result["means"] if m["region"] != "all" and m["reference"] == "slice"]
    short = short_names(list(dict.fromkeys(m["module"] for m in means)))
    places = list(dict.fromkeys((m["region"], short[m["module"]]) for m in means))
    figure, columns = panels(1, 3, 3.6, 1.6 + 0.4 * len(places))
    shown = (
        ("data", "rho", "ρ of example scores"),
        ("param", "rho", "ρ of entry scores"),
        ("second", "rho", "ρ of the terms H G and ĉ ⊙ G"),
    )
    kinds = list(dict.fromkeys(m["checkpoint"] for m in means))
    for axes, (part, key, title) in zip(columns, shown, strict=True):
        for number, checkpoint in enumerate(kinds):
            mine = {
                (m["region"], short[m["module"]]): m[part][key]
                for m in means
                if m["checkpoint"] == checkpoint
            }
            y = [i + 0.2 * (2 * number - 1) for i in range(len(places))]
            axes.barh(
                y,
                [mine.get(place) or 0.0 for place in places],
                height=0.36,
                color=COLOURS[number],
                hatch=HATCHES[number],
                edgecolor="white",
                label=checkpoint,
            )
        axes.set_title(title, fontsize=9)
        axes.axvline(0.0, color="#888888", linewidth=0.8)
        axes.set_xlim(-1.02, 1.02)
        axes.set_xlabel("Spearman ρ")
        axes.set_yticks(range(len(places)), [])
        axes.set_ylim(len(places) - 0.5, -0.5)
    columns[0].set_yticks(range(len(places)), [f"{r}, {m}" for r, m in places], fontsize=8)
    columns[-1].legend(fontsize=7, loc="lower left")
    return save(figure, path)


def drift(result: Result, path: RunPath) -> list[RunPath]:
    """Measured drift and its bound along the trajectory; rank correlation with scores at θ̄."""
    figure, (left, right) = panels(1, 2, 4.6, 3.9)
    points = result["points"]
    steps = [p["step"] for p in points]
    curves = (("max_drift", "largest drift", "-"), ("median_drift", "median drift", "--"))
    for number, (key, name, line) in enumerate(curves):
        values = [p["data"][key] for p in points]
        colour, marker = COLOURS[number], MARKERS[number]
        left.plot(steps, values, line, color=colour, marker=marker, markersize=5, label=name)
    bound = [p["data"]["bound"] for p in points]
    left.plot(steps, bound, ":", color=COLOURS[6], marker=MARKERS[3], markersize=5, label="bound")
    gap = result["spread"]["median_gap"]
    if gap:
        left.axhline(gap, color=COLOURS[2], linewidth=1, label="median gap between two scores")
    positive = [v for p in points for v in (p["data"]["bound"], p["data"]["median_drift"]) if v > 0]
    if positive:
        left.set_yscale("log")
    left.set_ylabel("|change of an example's score| (loss)")
    legend_above(left, 2)
    for number, (side, name) in enumerate((("data", "examples"), ("param", "entries"))):
        known = [(p["step"], p[side]["rho"]) for p in points if p[side]["rho"] is not None]
        x, y = [k[0] for k in known], [k[1] for k in known]
        right.plot(x, y, color=COLOURS[number], marker=MARKERS[number], markersize=5, label=name)
    right.set_ylabel("Spearman ρ with the scores at θ̄")
    legend_above(right)
    where = "θ_old" if result["start"] == "old" else "θ̄"
    for axes in (left, right):
        axes.set_xlabel(f"optimizer step of fine-tuning from {where}")
    return save(figure, path)


def reverse(result: Result, path: RunPath) -> list[RunPath]:
    """Loss of every combination after training, one panel per file, and KL to θ_old."""
    arms = result["arms"]
    files = list(arms[0]["files"])
    figure, columns = panels(1, len(files) + 1, 3.4, 1.2 + 0.42 * len(arms))
    order = {"dual": 0, "as run": 0, "random": 1, "reverse": 2}
    labels = [f"D {arm['data']}, P {arm['params']}" for arm in arms]
    ranks = [max(order[arm["data"]], order[arm["params"]]) for arm in arms]
    measures = [(name, "loss", f"loss on {name}") for name in files]
    measures.append(("validation", "kl", "KL to θ_old on validation (nats)"))
    for axes, (name, key, title) in zip(columns, measures, strict=True):
        values = [arm["files"][name][key] for arm in arms]
        for i, (value, rank) in enumerate(zip(values, ranks, strict=True)):
            axes.plot(value, i, MARKERS[rank], color=COLOURS[rank], markersize=7)
            if key == "loss":
                draws = arms[i]["files"][name]["losses"]
                axes.hlines(i, min(draws), max(draws), COLOURS[rank], linewidth=1)
        if key == "loss":
            before = arms[0]["files"][name]["before"]
            axes.axvline(before, color="#888888", linestyle=":", linewidth=1)
            axes.annotate("θ_old", (before, -0.45), fontsize=7, color="#555555")
        axes.set_xlabel(title, fontsize=8)
        axes.set_yticks(range(len(arms)), [])
        axes.set_ylim(len(arms) - 0.5, -0.7)
    columns[0].set_yticks(range(len(arms)), labels, fontsize=8)
    steps = result["steps"]
    figure.suptitle(f"Reverse selection after {steps} steps (lower is better)", fontsize=10)
    return save(figure, path)
