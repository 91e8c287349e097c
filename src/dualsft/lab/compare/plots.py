"""Figures of a comparison: quality against time and memory, and learning against forgetting.

- `frontier_time_…`, `frontier_memory_…`: quality against end-to-end time and peak memory.
- `skills_…`: plasticity against stability, if benchmarks were run.
- `forgetting_…`: loss on the first evaluation file (the new skill) against the mean KL to the base
  on the other files. This separates methods even if benchmark scores are near chance. `validation`
  comes from the training corpus and is not used here.

Reads comparison.json and writes SVG and PNG. Every method has its own marker, a colour from a
colour-blind safe palette, and its name in the legend. Not part of Algorithm 1.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dualsft.system.paths import RunPath

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
MARKERS = "osD^vP*Xh<>p"
ENDINGS = (".svg", ".png")
FRONTIERS = (
    ("total_seconds", "time, end to end (s)", "time"),
    ("finetune_gib", "peak memory of fine-tuning (GiB)", "memory"),
)


def draw(out: RunPath) -> list[RunPath]:
    """Draw the figures of the comparison in `out`. Returns their files."""
    tables = (out / "comparison.json").read_json()["tables"]
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
        made += _forgetting(out / f"forgetting_{stem}", table)
        made += _skills(out / f"skills_{stem}", table)
    return made


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


def _forgetting(path: RunPath, table: Mapping[str, Any]) -> list[RunPath]:
    """Loss on the new skill against mean KL on the other files, if there are any."""
    keys = [c["key"] for c in table["columns"]]
    files = [key[5:] for key in keys if key.startswith("loss.") and key != "loss.validation"]
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
    files = [path.with_suffix(ending) for ending in ENDINGS]
    if len(points) < 2:
        for file in files:
            file.unlink(missing_ok=True)
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
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
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8)
    for file in files:
        silent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        stamp = silent if file.suffix == ".svg" else None
        with file.open("wb") as target:
            figure.savefig(target, format=file.suffix[1:], dpi=150, metadata=stamp)
    return files
