"""Figures of diagnostics and comparisons: panels, bars, lines, axes, legend, saving.

Figures use the Agg canvas (no display, no pyplot) and are saved as SVG and PNG, with a colour-blind
safe palette; series also differ in marker or hatch. Not part of Algorithm 1.

The function `draw_NAME` of a diagnostic takes its result (the JSON alone) and returns its figures
by ending of the file name. They follow the tables and figures of the paper that the registry names
(`lab/diagnostics/__init__.py`). `draw_comparison` draws these of a comparison.json:

- `frontier_time_…`, `frontier_memory_…`: quality against end-to-end time and peak memory.
- `skills_…`: plasticity against stability, if benchmarks were run.
- `forgetting_…`: loss on the first evaluation file (the new skill) against the mean KL to the base
  on the other files. This separates methods even if benchmark scores are near chance. `validation`
  comes from the training corpus and is not used here.
- `grid_…`: the same plane for tuned settings, one curve per method over the grid.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import chdir
from itertools import pairwise
from typing import Any

from dualsft.system.paths import RunPath

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
MARKERS = "osD^vP*Xh<>p"
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "++")
SIDES = {"examples": "examples", "params": "parameters"}
SCORE = "predicted loss decrease (nats)"
GREY = "#888888"
FRONTIERS = (
    ("total_seconds", "time, end to end (s)", "time"),
    ("finetune_gib", "peak memory of fine-tuning (GiB)", "memory"),
)

Result = Mapping[str, Any]
Values = Sequence[float | None]
Figures = dict[str, Any]
"""Figures by ending of the file name, "" for the main one."""


def panels(
    rows: int = 1, columns: int = 1, width: float = 4.6, height: float = 3.4
) -> tuple[Any, list[Any]]:
    """(figure, axes row by row), with a light grid."""
    with chdir("/"):  # matplotlib reads a matplotlibrc of the current folder when it is imported
        import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()
    matplotlib.rcParams["text.parse_math"] = False  # names come from data: `$` is a dollar
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, n + 1) for n in range(rows * columns)]
    for one in axes:
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: RunPath) -> list[RunPath]:
    """Save as SVG and PNG without timestamps, so that the same numbers give the same bytes."""
    _plain_ticks(figure)
    files = _files(path)
    silent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    for file, metadata in zip(files, (silent, None), strict=True):
        with file.open("wb") as out:
            figure.savefig(out, format=file.suffix[1:], dpi=150, metadata=metadata)
    return files


def _plain_ticks(figure: Any) -> None:
    """Labels such as 1e-03 on log axes: matplotlib's own are TeX, which `panels` turns off."""
    from matplotlib.ticker import LogFormatter, LogFormatterMathtext

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        for which in ("major", "minor"):
            if isinstance(getattr(axis, f"get_{which}_formatter")(), LogFormatterMathtext):
                getattr(axis, f"set_{which}_formatter")(LogFormatter())


def _files(path: RunPath) -> list[RunPath]:
    return [path.with_name(f"{path.name}.{kind}") for kind in ("svg", "png")]


def bars(
    axes: Any, labels: Sequence[str], series: Mapping[str, Values], form: str = "{:.2f}"
) -> None:
    """Grouped bars with their values on top; a missing value leaves a gap."""
    count = len(series)
    for number, (name, values) in enumerate(series.items()):
        drawn = axes.bar(
            [i + (number - (count - 1) / 2) * 0.8 / count for i in range(len(labels))],
            [v or 0.0 for v in values],
            0.8 / count,
            color=COLOURS[number % len(COLOURS)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
            label=name,
        )
        texts = ["" if v is None else form.format(v) for v in values]
        axes.bar_label(drawn, texts, fontsize=7, padding=2)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.margins(y=0.15)
    if count > 1:
        legend_above(axes)


def lines(axes: Any, across: Sequence[float], series: Mapping[str, Values]) -> None:
    """Curves with markers over shared x values; missing values interrupt a curve."""
    for number, (name, values) in enumerate(series.items()):
        known = [math.nan if v is None else v for v in values]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(across, known, marker=marker, color=colour, label=name, markersize=5)
    if len(series) > 1:
        legend_above(axes)


def legend_above(axes: Any, columns: int = 3) -> None:
    """A legend above the axes, so that it hides no data, with as many columns as fit."""
    longest = max((len(label) for label in axes.get_legend_handles_labels()[1]), default=0)
    inches = axes.figure.get_figwidth() * axes.get_position().width
    columns = max(1, min(columns, int(inches / (0.5 + 0.065 * longest))))
    where = {"bbox_to_anchor": (0.0, 1.0), "loc": "lower left", "borderaxespad": 0.1}
    axes.legend(fontsize=8, frameon=False, ncols=columns, **where)


def log_axis(axes: Any, ticks: Sequence[int], base: int = 10) -> None:
    """A logarithmic x axis with exactly these ticks; labels that would overlap are left out."""
    axes.set_xscale("log", base=base)
    crowded = [n * 1.6 > after for n, after in pairwise(ticks)]
    labels = ["" if c else f"{n:,}" for n, c in zip(ticks, [*crowded, False], strict=True)]
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()


def signed_axis(axes: Any, which: str, values: Sequence[float], scale: float) -> None:
    """An axis that is linear near zero and logarithmic far from it, with at most five ticks."""
    low, high = math.asinh(min(values) / scale), math.asinh(max(values) / scale)
    places = {scale * math.sinh(part * end) for end in (low, high) for part in (0.6, 1.0)}
    rounded = {float(f"{place:.0e}") for place in places}  # put ticks at the value of their label
    ticks = sorted({0.0, *rounded} if low < 0 < high else rounded)
    labels = [f"{t:.1g}".replace("e-0", "e-") for t in ticks]
    getattr(axes, f"set_{which}scale")("asinh", linear_width=scale)
    getattr(axes, f"set_{which}ticks")(ticks, labels, fontsize=7)
    axes.minorticks_off()


def rows_axis(columns: Sequence[Any], labels: Sequence[str]) -> None:
    """Panels with one labelled row per item, the first on top; only the first panel has labels."""
    for axes in columns:
        axes.set_yticks(range(len(labels)), [])
        axes.set_ylim(len(labels) - 0.5, -0.7)
    columns[0].set_yticks(range(len(labels)), labels, fontsize=8)


def guide(axes: Any, x: float | None = None, y: float | None = None) -> None:
    """A dotted grey line at an x or a y."""
    style = {"color": GREY, "linewidth": 0.8, "linestyle": ":"}
    if x is not None:
        axes.axvline(x, **style)
    if y is not None:
        axes.axhline(y, **style)


def short_names(modules: Sequence[str]) -> dict[str, str]:
    """The last component of each name; the last two if it is ambiguous (attn.c_proj)."""
    last = [m.rsplit(".", 1)[-1] for m in modules]
    return {
        m: end if last.count(end) == 1 else ".".join(m.split(".")[-2:])
        for m, end in zip(modules, last, strict=True)
    }


def column(rows: Sequence[Result], key: str, factor: float = 1.0) -> list[float | None]:
    """A column of a table, times a factor."""
    return [None if row[key] is None else factor * row[key] for row in rows]


def jaccards(rows: Sequence[Result], prefix: str = "") -> dict[str, Values]:
    return {f"{prefix}{title}": column(rows, f"jaccard_{side}") for side, title in SIDES.items()}


# --- comparisons ----------------------------------------------------------------------------------


def draw_comparison(out: RunPath) -> list[RunPath]:
    """Draw the figures of the comparison in `out`. Returns their files."""
    content = (out / "comparison.json").read_json()
    tables = content["tables"]
    resources = {t["where"]: _points(t) for t in tables if t["kind"] == "resources"}
    made: list[RunPath] = []
    stems: set[str] = set()
    for table in (t for t in tables if t["kind"] == "results"):
        stem = _stem(table["title"], stems)
        points, cost = _points(table), resources.get(table["where"], {})
        quality, label, better = _quality(table)
        for key, text, short in FRONTIERS:
            both = {
                name: (cost[name][key], values[quality])
                for name, values in points.items()
                if key in cost.get(name, {}) and quality in values
            }
            path = out / f"frontier_{short}_{stem}"
            made += _scatter(path, both, text, label, better, log=key == "total_seconds")
        unused = ("validation", content.get("tuned_on"))
        made += _forgetting(out / f"forgetting_{stem}", table, unused)
        made += _skills(out / f"skills_{stem}", table)
    curves: dict[str, dict[str, Any]] = {}
    for curve in content.get("frontiers", ()):
        curves.setdefault(curve["where"], {})[curve["method"]] = curve["points"]
    for where, methods in curves.items():
        made += _grid(out / f"grid_{_stem(where, stems)}", methods)
    return made


def _grid(path: RunPath, methods: Mapping[str, Sequence[Mapping[str, float]]]) -> list[RunPath]:
    """Loss of the new skill against KL on old behaviour: a curve per method over the grid."""
    figure, (axes,) = panels(width=6.4, height=4.4)
    for number, (name, points) in enumerate(methods.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        across, up = [p["kl"] for p in points], [p["loss"] for p in points]
        axes.plot(across, up, marker=marker, color=colour, markersize=5, label=name)
    axes.set_xlabel("forgetting: mean KL to the base on old behaviour (lower is better)")
    axes.set_ylabel("new skill: loss (lower is better)")
    figure.legend(loc="outside right upper", fontsize=8)
    return save(figure, path)


def _stem(title: str, taken: set[str]) -> str:
    """File name stem for a table title. Adds a number if the stem is already taken."""
    plain = "".join(c if c.isalnum() else "_" for c in title)
    stem, number = plain, 1
    while stem in taken:
        number += 1
        stem = f"{plain}_{number}"
    taken.add(stem)
    return stem


def _points(table: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        row["name"]: {key: value["mean"] for key, value in row["values"].items()}
        for row in table["rows"]
    }


def _quality(table: Mapping[str, Any]) -> tuple[str, str, int]:
    """(key, title, direction) of the quality column: overall, otherwise the first ranked column."""
    columns = {c["key"]: c for c in table["columns"]}
    for key in ("summary.overall", *columns):
        if key in columns and columns[key]["better"]:
            return key, columns[key]["title"], columns[key]["better"]
    return "", "", 0


def _skills(path: RunPath, table: Mapping[str, Any]) -> list[RunPath]:
    """Plasticity against stability, if benchmarks were run."""
    points = _plane(table, ["summary.stability"], "summary.plasticity")
    return _scatter(path, points, "stability (higher is better)", "plasticity", 1)


def _forgetting(
    path: RunPath, table: Mapping[str, Any], unused: Sequence[str | None]
) -> list[RunPath]:
    """Loss on the new skill against mean KL on the other files, if there are any."""
    keys = [c["key"] for c in table["columns"]]
    files = [key[5:] for key in keys if key.startswith("loss.") and key[5:] not in unused]
    new, old = files[:1], files[1:]
    points = _plane(table, [f"kl.{name}" for name in old], f"loss.{new[0]}") if old else {}
    across = f"forgetting: mean KL to the base on {', '.join(old)} (lower is better)"
    up = f"new skill: loss on {''.join(new)}"
    return _scatter(path, points, textwrap.fill(across, 70), up, -1)


def _plane(
    table: Mapping[str, Any], kept: Sequence[str], new: str
) -> dict[str, tuple[float, float]]:
    """(mean of the columns `kept`, value of the column `new`) per row that has all of them."""
    return {
        name: (sum(values[key] for key in kept) / len(kept), values[new])
        for name, values in _points(table).items()
        if all(key in values for key in (*kept, new))
    }


def _scatter(
    path: RunPath,
    points: Mapping[str, Sequence[float]],
    across: str,
    up: str,
    better: int,
    log: bool = False,
) -> list[RunPath]:
    """Draw a scatter plot and return its files.

    With fewer than two points nothing is drawn, and files of an earlier run are removed.
    """
    if len(points) < 2:
        for file in _files(path):
            file.unlink(missing_ok=True)
        return []
    figure, (axes,) = panels(width=6.4, height=4.4)
    for number, (name, (x, y)) in enumerate(points.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(x, y, marker, color=colour, markersize=8, label=name)
    widths = [x for x, _ in points.values()]
    if log and min(widths) > 0 and max(widths) > 10 * min(widths):
        axes.set_xscale("log")
    arrow = {1: "higher is better", -1: "lower is better"}.get(better, "")
    axes.set_xlabel(across)
    axes.set_ylabel(f"{up} ({arrow})" if arrow else up)
    axes.margins(0.12)
    figure.legend(loc="outside right upper", fontsize=8)
    return save(figure, path)
