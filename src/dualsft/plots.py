"""Figures of a comparison: quality against time, against memory, and the forgetting plane.

Drawn from comparison.json alone, as SVG and PNG. Every method has its own marker beside its colour
(a palette that colour-blind readers can tell apart) and its name at the point.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
MARKERS = "osD^vP*Xh<>p"
FRONTIERS = (
    ("total_seconds", "time, end to end (s)", "time"),
    ("finetune_gib", "peak memory of fine-tuning (GiB)", "memory"),
)


def draw(out: Path) -> list[Path]:
    """The figures of the comparison in `out`; returns their files."""
    tables = json.loads((out / "comparison.json").read_text(encoding="utf-8"))["tables"]
    resources = {_where(t): _points(t) for t in tables if t["kind"] == "resources"}
    made: list[Path] = []
    for table in (t for t in tables if t["kind"] == "results"):
        quality, label, better = _quality(table)
        cost = resources.get(_where(table))
        if quality is None or not cost:
            continue
        points = _points(table)
        stem = "".join(c if c.isalnum() else "_" for c in table["title"])
        for key, text, short in FRONTIERS:
            both = {
                name: (cost[name][key], values[quality])
                for name, values in points.items()
                if name in cost and key in cost[name] and quality in values
            }
            if len(both) > 1:
                path = out / f"frontier_{short}_{stem}"
                made += _scatter(path, both, text, label, better, log=key == "total_seconds")
        made += _forgetting(out / f"forgetting_{stem}", table, points)
    return made


def _where(table: Mapping[str, Any]) -> str:
    """What the table is about: its title less the first part."""
    return table["title"].partition(" · ")[2]


def _points(table: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        row["name"]: {key: value["mean"] for key, value in row["values"].items()}
        for row in table["rows"]
    }


def _quality(table: Mapping[str, Any]) -> tuple[str | None, str, int]:
    """The column that stands for quality: overall, else the first loss."""
    columns = {c["key"]: c for c in table["columns"]}
    for key in ("summary.overall", *columns):
        if key in columns and columns[key]["better"]:
            return key, columns[key]["title"], columns[key]["better"]
    return None, "", 0


def _forgetting(
    path: Path, table: Mapping[str, Any], points: Mapping[str, Mapping[str, float]]
) -> list[Path]:
    """New skill against what was kept: plasticity and stability, or the first loss and its KL."""
    keys = [c["key"] for c in table["columns"]]
    pairs = [("summary.stability", "summary.plasticity")]
    pairs += [(key.replace("loss.", "kl."), key) for key in keys if key.startswith("loss.")]
    for kept, new in pairs:
        both = {n: (v[kept], v[new]) for n, v in points.items() if kept in v and new in v}
        if len(both) > 1:
            up = 1 if kept.startswith("summary") else -1
            names = [k.replace("summary.", "").replace(".", " ") for k in (kept, new)]
            return _scatter(path, both, names[0], names[1], up)
    return []


def _scatter(
    path: Path,
    points: Mapping[str, Sequence[float]],
    across: str,
    up: str,
    better: int,
    log: bool = False,
) -> list[Path]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, (x, y)) in enumerate(points.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(x, y, marker, color=colour, markersize=8, label=name)
        axes.annotate(name, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8)
    widths = [x for x, _ in points.values()]
    if log and min(widths) > 0 and max(widths) > 10 * min(widths):
        axes.set_xscale("log")
    arrow = {1: "higher is better", -1: "lower is better"}.get(better, "")
    axes.set_xlabel(across)
    axes.set_ylabel(f"{up} ({arrow})" if arrow else up)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    files = [path.with_suffix(".svg"), path.with_suffix(".png")]
    for file in files:
        silent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        stamp = silent if file.suffix == ".svg" else None
        figure.savefig(file, dpi=150, metadata=stamp)
    return files
