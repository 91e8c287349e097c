"""Curves of training: loss and learning rate by step, read from metrics.jsonl and laid out.

metrics.jsonl is a log: a resumed or repeated stage writes its steps again, a crash may cut a line,
and a received file may hold anything. `read_curves` keeps the last attempt of each stage, up to the
time at which the stage was finished. `charts` thins the curves of one or several runs to `POINTS`
means, whatever their length, and computes positions in percent of the plot; pages/parts.html draws
them. Computes no result of a run. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from dualsft.system.bounds import TIMES
from dualsft.system.paths import RunPath

TITLES = {"warmup": "Warmup", "finetune": "Fine-tuning"}
"""The stages that log their steps."""
MAX_METRICS_BYTES = TIMES * (64 << 20)
MAX_LINES = TIMES * 1_000_000
MAX_LINE = 4096
"""Limits of metrics.jsonl; what is beyond them is not drawn."""
MAX_VALUE, MAX_STEP = 1e30, 10**9
TINY = 1e-250
"""Values nearer to 0 are drawn as 0: the steps between their ticks would not be floats."""
POINTS, STRIPS, TABLE_ROWS = 200, 80, 12
COLOURS = 7
"""Series that differ in colour; the next ones are dashed."""
WIDE = 10.0
"""Ratio of the peak learning rates from which their axis is logarithmic."""
DECADES = 2
"""Decades below the smallest peak that a logarithmic axis shows."""


@dataclass
class Curve:
    """One training: the number, the loss and the learning rate of each step."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    lr: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, loss: float, lr: float) -> None:
        """Append a step; one that was logged before replaces it and all after it."""
        if self.steps and step <= self.steps[-1]:
            cut = bisect_left(self.steps, step)
            for values in (self.steps, self.loss, self.lr):
                del values[cut:]
        self.steps.append(step)
        self.loss.append(loss)
        self.lr.append(lr)


def read_curves(run: RunPath, facts: Mapping[str, Any]) -> dict[str, Curve]:
    """The curve of each training of a run that is finished or under way.

    A finished stage has one only if the log ends with its last step: it may have been reused from
    another run, and the log be that of an earlier attempt.
    """
    manifests, ends = facts["manifests"], dict[str, float]()
    for stage in TITLES:
        if stage in manifests:
            ends[stage] = datetime.fromisoformat(manifests[stage]["finished"]).timestamp() + 1
        elif stage not in facts["outdated"] and not (
            stage == "warmup" and "selection" in manifests
        ):
            ends[stage] = math.inf  # under way; a selection without a warmup needed none
    curves: dict[str, Curve] = {}
    path, num_bytes = run / "metrics.jsonl", 0
    if not path.is_file():
        return curves
    with path.open() as file:
        for _ in range(MAX_LINES):
            line = file.readline(MAX_LINE)
            num_bytes += len(line)
            if not line or num_bytes > MAX_METRICS_BYTES:
                break
            if b'"step"' in line and (record := _parsed(line)):
                stage, time, step, loss, lr = record
                if time <= ends.get(stage, -math.inf):
                    curves.setdefault(stage, Curve()).add(step, loss, lr)
    return {
        stage: curves[stage]
        for stage in TITLES
        if stage in curves and _is_whole(curves[stage], manifests.get(stage))
    }


def _parsed(line: bytes) -> tuple[str, float, int, float, float] | None:
    """(training, time, step, loss, learning rate) of a line; None if it is no step."""
    try:
        record = json.loads(line)
        name, step = record["stage"], record["step"]
        time, loss, lr = (record[key] for key in ("time", "loss", "lr"))
        numbers = all(type(one) in (int, float) for one in (time, loss, lr))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (numbers and isinstance(name, str) and type(step) is int and 0 < step <= MAX_STEP):
        return None
    if not (abs(time) < MAX_VALUE and abs(loss) < MAX_VALUE and 0 <= lr < MAX_VALUE):
        return None  # also nan, which json.loads reads
    return name, float(time), step, float(loss), float(lr)


def _is_whole(curve: Curve, manifest: Mapping[str, Any] | None) -> bool:
    return manifest is None or curve.steps[-1] == manifest["facts"].get("steps")


# --- charts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thinned:
    """A curve as at most `POINTS` points, each the mean over the steps since the one before."""

    x: np.ndarray
    loss: np.ndarray
    low: np.ndarray
    high: np.ndarray
    trend: np.ndarray
    """Moving average of the loss over a twentieth of the steps."""
    lr: np.ndarray


def thinned(curve: Curve) -> Thinned:
    steps = np.array(curve.steps)
    values = np.clip([curve.loss, curve.lr], -MAX_VALUE, MAX_VALUE)
    loss, lr = np.where(np.abs(values) < TINY, 0.0, values)
    count = len(steps)
    edges = np.linspace(0, count, min(count, POINTS) + 1).astype(int)
    first, last = edges[:-1], edges[1:] - 1
    half = count // 40
    sums = np.concatenate([[0.0], np.cumsum(loss)])
    middle = (first + last) // 2
    start, stop = np.maximum(middle - half, 0), np.minimum(middle + half + 1, count)
    return Thinned(
        x=steps[last],
        loss=np.add.reduceat(loss, first) / np.diff(edges),
        low=np.minimum.reduceat(loss, first),
        high=np.maximum.reduceat(loss, first),
        trend=(sums[stop] - sums[start]) / (stop - start),
        lr=lr[last],
    )


Chart = dict[str, Any]


def charts(runs: Mapping[str, Mapping[str, Curve]]) -> list[dict[str, Any]]:
    """For each training: its title, a chart of the loss and one of the learning rate, with one line
    per run, and a table of both. A single run also has the spread of its losses."""
    found = []
    for stage, title in TITLES.items():
        curves = {name: own[stage] for name, own in runs.items() if stage in own}
        series = {name: thinned(one) for name, one in curves.items() if len(one.steps) > 1}
        if not series:
            continue
        num_steps = max(int(one.x[-1]) for one in series.values())
        styles = {name: (at % COLOURS, at >= COLOURS) for at, name in enumerate(runs)}
        peaks = [float(one.lr.max()) for one in series.values()]
        wide = min(peaks) > 0 and max(peaks) > max(WIDE * min(peaks), 1e-100)
        floor = max(min(peaks) * 10.0**-DECADES, max(peaks) * 1e-9)
        drawn = [
            _chart("loss", {name: one.trend for name, one in series.items()}, series),
            _chart(
                "learning rate",
                {name: one.lr for name, one in series.items()},
                series,
                floor if wide else None,
            ),
        ]
        for chart in drawn:
            chart["lines"] = [(*styles[name], points) for name, points in chart["lines"]]
        found.append(
            {
                "title": f"{title}, {num_steps:,} steps",
                "legend": [(name, *styles[name]) for name in series if len(runs) > 1],
                "charts": drawn,
                "table": _table(series, num_steps),
            }
        )
    return found


def _chart(
    label: str,
    lines: Mapping[str, np.ndarray],
    series: Mapping[str, Thinned],
    floor: float | None = None,
) -> Chart:
    """Positions of lines, ticks and strips with the numbers; from `floor` up, logarithmic."""
    num_steps = max(int(one.x[-1]) for one in series.values())
    [alone] = series.values() if len(series) == 1 and label == "loss" else [None]
    together = np.concatenate([*lines.values(), *([alone.loss] if alone else [])])
    shown = together if floor is None else np.log10(np.maximum(together, floor))
    low, high = float(shown.min()), float(shown.max())
    low = 0.0 if label == "learning rate" and floor is None else low
    pad = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - pad * (low != 0.0), high + pad

    def line(x: np.ndarray, y: np.ndarray) -> str:
        return " ".join(
            f"{a:.2f},{b:.2f}"
            for a, b in zip((100 * x / num_steps).tolist(), down(y).tolist(), strict=True)
        )

    def down(y: np.ndarray) -> np.ndarray:
        own = y if floor is None else np.log10(np.maximum(y, floor))
        return np.clip(100 * (high - own) / (high - low), -100, 200)

    ticks = np.array(ticks_of(low, high) if floor is None else _decades(low, high))
    chart: Chart = {
        "label": label,
        "x_ticks": [(100 * x / num_steps, number_text(x)) for x in ticks_of(0, num_steps, 4)],
        "y_ticks": [(at, number_text(y)) for at, y in zip(down(ticks), ticks, strict=True)],
        "lines": [(name, line(series[name].x, values)) for name, values in lines.items()],
        "strips": _strips(label, lines, series, num_steps),
    }
    if alone is not None:
        chart["faint"] = line(alone.x, alone.loss)
        both, edge = np.concatenate([alone.x, alone.x[::-1]]), alone.low[::-1]
        chart["band"] = line(both, np.concatenate([alone.high, edge]))
    return chart


def _strips(
    label: str, lines: Mapping[str, np.ndarray], series: Mapping[str, Thinned], num_steps: int
) -> list[tuple[float, float, str]]:
    """(left, width, text) of strips that show the numbers under the pointer."""
    edges = np.linspace(0, num_steps, min(STRIPS, num_steps) + 1)
    strips = []
    for left, right in pairwise(edges.tolist()):
        text = [f"step {round(right):,}"]
        for name, values in lines.items():
            x = series[name].x
            if left < x[-1]:
                at = min(int(np.searchsorted(x, right)), len(x) - 1)
                text.append(f"{name or label}: {values[at]:.4g}")
        strips.append((100 * left / num_steps, 100 * (right - left) / num_steps, "\n".join(text)))
    return strips


def _table(series: Mapping[str, Thinned], num_steps: int) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the numbers at a few steps."""
    wanted = np.unique(np.linspace(1, num_steps, TABLE_ROWS).round().astype(int))
    head = ["step"]
    for name in series:
        before = f"{name}: " if name else ""
        head += [f"{before}loss", f"{before}learning rate"]
    rows = []
    for step in wanted.tolist():
        row = [f"{step:,}"]
        for one in series.values():
            at = int(np.searchsorted(one.x, step))
            inside = at < len(one.x)
            row += [f"{one.loss[at]:.4f}", f"{one.lr[at]:.3g}"] if inside else ["–", "–"]
        rows.append(row)
    return head, rows


def ticks_of(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between two numbers."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12 - math.floor(math.log10(step))) for k in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    return [10.0**k for k in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]


def number_text(value: float) -> str:
    """A tick label: integers with separators, others with up to three digits."""
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.3g}"
