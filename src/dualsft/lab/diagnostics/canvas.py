"""Shared drawing functions of the diagnostics' figures: panels, bars, lines, legend, saving.

Figures use the Agg canvas (no display, no pyplot) and are saved as SVG and PNG. They use the
color-blind-safe palette of `lab/compare/plots.py`; series also differ in marker or hatch. Not part
of Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dualsft.lab.compare.plots import COLOURS, MARKERS
from dualsft.system.paths import RunPath

HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "++")


def panels(
    rows: int = 1, columns: int = 1, width: float = 4.6, height: float = 3.4
) -> tuple[Any, list[Any]]:
    """(figure, axes row by row), with a light grid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
    files = [path.with_name(f"{path.name}.svg"), path.with_name(f"{path.name}.png")]
    for file in files:
        silent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        kind = file.suffix[1:]
        with file.open("wb") as out:
            stamp = silent if kind == "svg" else None
            figure.savefig(out, format=kind, dpi=150, metadata=stamp)
    return files


def bars(
    axes: Any,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    form: str = "{:.2f}",
) -> None:
    """Grouped bars with their values on top; a missing value leaves a gap."""
    count = len(series)
    for number, (name, values) in enumerate(series.items()):
        at = [i + (number - (count - 1) / 2) * 0.8 / count for i in range(len(labels))]
        heights = [0.0 if v is None else v for v in values]
        drawn = axes.bar(
            at,
            heights,
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


def lines(axes: Any, across: Sequence[float], series: Mapping[str, Sequence[float | None]]) -> None:
    """Curves with markers over shared x values; missing values interrupt a curve."""
    for number, (name, values) in enumerate(series.items()):
        known = [float("nan") if v is None else v for v in values]
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


def short_names(modules: Sequence[str]) -> dict[str, str]:
    """The last component of each name; the last two if it is ambiguous (attn.c_proj)."""
    last = [m.rsplit(".", 1)[-1] for m in modules]
    return {
        m: end if last.count(end) == 1 else ".".join(m.split(".")[-2:])
        for m, end in zip(modules, last, strict=True)
    }


def signed_axis(axes: Any, which: str, values: Sequence[float], scale: float) -> None:
    """An axis that is linear near zero and logarithmic far from it, with at most five ticks."""
    low, high = math.asinh(min(values) / scale), math.asinh(max(values) / scale)
    places = {scale * math.sinh(part * end) for end in (low, high) for part in (0.6, 1.0)}
    rounded = {float(f"{place:.0e}") for place in places}  # put ticks at the value of their label
    ticks = sorted({0.0, *rounded} if low < 0 < high else rounded)
    labels = ["0" if t == 0 else f"{t:.0e}".replace("e-0", "e-") for t in ticks]
    getattr(axes, f"set_{which}scale")("asinh", linear_width=scale)
    getattr(axes, f"set_{which}ticks")(ticks, labels, fontsize=7)
    axes.minorticks_off()
