"""Reports of run folders: what was selected, what it cost, what changed.

`write_report` writes report.md, report.html (`lab/report/html.py`) and the model card
(`lab/report/card.py`). For an incomplete run, they cover the finished stages.

`dualsft report RUN RUN …` also writes report.md and report.html with one column per run: selection,
training, cost, losses, benchmarks, the agreement of the selections, and the settings that differ.
report.html also has the curves of training of all runs. To compare
methods over seeds, with intervals and paired differences, use `dualsft compare`. Reads the JSON
files of the stages and computes nothing new. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualsft.errors import ConfigError
from dualsft.lab.diagnostics.ranking import mask_overlap
from dualsft.lab.report.card import table, write_cards
from dualsft.lab.report.curves import charts, read_curves
from dualsft.lab.report.examples import parameter_shapes
from dualsft.lab.report.facts import (
    Facts,
    Rows,
    concerns,
    duration,
    flat,
    methods_of,
    number,
    peak_gib,
    percent,
    training_values,
)
from dualsft.lab.report.html import render, write_html
from dualsft.runs.preflight import FOLDERS, load_summaries, reading
from dualsft.runs.stages.selection import read_mask
from dualsft.storage.manifest import atomic_write_text
from dualsft.system.paths import RunPath


def write_report(run: RunPath, out: RunPath | None = None) -> RunPath:
    """Write report.md, report.html and model_card.md into `out` (default: the run folder).

    Returns the path of report.md.
    """
    out = out or run
    path = out / "report.md"
    with reading(run):
        facts = load_summaries(run)
        write_html(run, facts, out)
        write_cards(run, facts, out)
        values = {"name": run.name, "facts": facts, "methods": methods_of(facts)}
        values["concerns"] = concerns(facts)
        atomic_write_text(path, render("report.md", table=table, run=run, **values))
    return path


# --- several runs side by side ------------------------------------------------------------------


def write_reports(folders: Sequence[Path], out: Path | None) -> list[RunPath]:
    """Write the reports of each run and, for several runs, the side-by-side report."""
    runs = [RunPath(folder) for folder in folders]
    facts = {run: load_summaries(run) for run in runs}
    empty = [
        f"{run}: no finished stage; make one with `dualsft run --out {run}`"
        for run, found in facts.items()
        if not found["manifests"]
    ]
    if empty:
        raise ConfigError(empty)
    places = {run.location.resolve() for run in runs}
    if len(places) < len(runs):
        raise ConfigError("report: the same run folder is given twice; name each once")
    target = out or Path("side_by_side")
    if len(runs) > 1 and target.resolve() in places:
        raise ConfigError(f"--out: {target} is one of the runs; give another folder")
    if out is not None or len(runs) > 1:
        target.mkdir(parents=True, exist_ok=True)
    if len(runs) == 1:
        path = write_report(runs[0], None if out is None else RunPath(out))
        made = [path, path.with_name("report.html"), path.with_name("model_card.md")]
        return [file for file in made if file.is_file()]
    pages = [write_report(run).with_name("report.html") for run in runs]
    with reading(", ".join(map(str, runs))):
        return [*pages, *_side_by_side(facts, RunPath(target))]


def _side_by_side(facts: Mapping[RunPath, Facts], out: RunPath) -> list[RunPath]:
    runs, found = list(facts), list(facts.values())
    names = _names(runs)
    groups = {
        "Chosen": _chosen(found),
        "Training": _training(found),
        "Cost": _cost(found),
        "Results": _results(found),
        "Agreement of the selections": _agreement(runs, found, names),
        "Warnings": [["warnings", *map(_titles, found)]],
        "Settings that differ": _differences([_settings(one) for one in found]),
    }
    values = {
        "title": f"{len(names)} runs side by side",
        "head": ["", *names],
        "groups": {name: rows for name, rows in groups.items() if rows},
        "trainings": charts(
            {n: read_curves(run, facts[run]) for n, run in zip(names, runs, strict=True)}
        ),
        "links": {
            name: Path(os.path.relpath(run.location / "report.html", out.location)).as_posix()
            for name, run in zip(names, runs, strict=True)
        },
    }
    made = []
    for kind in ("md", "html"):
        made.append(out / f"report.{kind}")
        atomic_write_text(made[-1], render(f"side_by_side.{kind}", table=table, **values))
    return made


def _names(runs: Sequence[RunPath]) -> list[str]:
    """Shortest trailing part of each path that makes the names unique."""
    parts = [run.location.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


def _row(label: str, values: Sequence[Any], show: Callable[[Any], str]) -> Rows:
    """One row with a dash where a run has no value, or none if no run has one."""
    cells = ["–" if value is None else show(value) for value in values]
    return [[label, *cells]] if any(cell != "–" for cell in cells) else []


def _chosen(found: Sequence[Facts]) -> Rows:
    chosen = [one.get("selection", {}) for one in found]

    def methods(one: Facts) -> str:
        return ", ".join(f"{axis}: {name}" for axis, name in methods_of(one).items()) or "–"

    def counted(key: str, of: str, share: str) -> Callable[[Any], str]:
        return lambda c: f"{c[key]:,} of {c[of]:,} ({percent(c[share], 2)})" if key in c else "–"

    def mask(one: Facts) -> str:
        text = counted("k", "denominator", "share")(one.get("selection", {}))
        without = "selection" in one and text == "–"
        return f"none ({methods_of(one).get('params', 'all')})" if without else text

    lengths = [c.get("response_tokens_selected") for c in chosen]
    return [
        *_row("methods", found, methods),
        *_row("examples", chosen, counted("b", "num_full", "data_share")),
        *_row("mask", found, mask),
        *_row("mean response length, tokens", lengths, number),
    ]


def _training(found: Sequence[Facts]) -> Rows:
    values = [training_values(one) for one in found]
    keys = dict.fromkeys(key for one in values for key in one)
    return [row for key in keys for row in _row(key, [one.get(key) for one in values], str)]


def _cost(found: Sequence[Facts]) -> Rows:
    rows: Rows = []
    for stage in FOLDERS:
        manifests = [one["manifests"].get(stage) for one in found]
        rows += _row(stage, manifests, lambda m: f"{duration(m['seconds'])}, {peak_gib(m):.2f} GiB")
    totals = [sum(m["seconds"] for m in one["manifests"].values()) for one in found]
    return rows + _row("all stages", totals, duration)


def _results(found: Sequence[Facts]) -> Rows:
    results = [one.get("evaluation", {}) for one in found]
    rows: Rows = []
    for name in dict.fromkeys(name for r in results for name in r.get("files", {})):
        files = [r.get("files", {}).get(name) for r in results]
        rows += _row(
            f"loss, {name}",
            files,
            lambda f: f"{f['before']['loss']:.4f} → {f['after']['loss']:.4f}",
        )
        rows += _row(f"KL to base, {name}", files, lambda f: f"{f['after']['kl_to_base']:.4f}")
    for name in dict.fromkeys(name for r in results for name in r.get("tasks", {})):
        rows += _row(name, [r.get("tasks", {}).get(name) for r in results], _sides("score"))
    for key in ("plasticity", "stability", "overall"):
        rows += _row(key, [r.get("summary") for r in results], _sides(key))
    return rows


def _sides(key: str) -> Callable[[Any], str]:
    def show(values: Any) -> str:
        before, after = values["before"][key], values["after"][key]
        return "–" if after is None else f"{percent(before)} → {percent(after)}"

    return show


def _agreement(runs: Sequence[RunPath], found: Sequence[Facts], names: Sequence[str]) -> Rows:
    """Pairwise Jaccard index of the selected examples and of the masks."""
    ids: list[set[str] | None] = []
    for run, one in zip(runs, found, strict=True):
        chosen = one.get("selection", {})
        path = run / FOLDERS["selection"] / chosen.get("final", "") / "ids.json"
        ids.append(set(path.read_json()) if "b" in chosen else None)
    rows: Rows = []
    for name, mine in zip(names, ids, strict=True):
        shared = [None if mine is None or other is None else _jaccard(mine, other) for other in ids]
        rows += _row(f"same examples as {name} (Jaccard)", shared, "{:.3f}".format)
    for name, shared in zip(names, _mask_agreement(runs, found), strict=True):
        rows += _row(f"same entries of the mask as {name} (Jaccard)", shared, "{:.3f}".format)
    return rows


def _mask_agreement(
    runs: Sequence[RunPath], found: Sequence[Facts]
) -> Sequence[Sequence[float | None]]:
    """Pairwise Jaccard index of the masks; None if one is missing or the parameters differ.

    At most two masks are in memory at a time.
    """
    shared: list[list[float | None]] = [[None] * len(runs) for _ in runs]
    own = [
        (at, run / FOLDERS["selection"] / one["selection"]["final"], parameter_shapes(run, one))
        for at, (run, one) in enumerate(zip(runs, found, strict=True))
        if one.get("selection", {}).get("k")
    ]
    for at, folder, shapes in own:
        mine = read_mask(folder)
        shared[at][at] = 1.0
        for other, path, theirs in own:
            if other < at:
                yours = read_mask(path)
                names = mine.keys() | yours.keys()
                if all(shapes.get(n) == theirs.get(n) is not None for n in names):
                    shared[at][other] = shared[other][at] = mask_overlap(mine, yours)
    return shared


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def _titles(facts: Facts) -> str:
    return "; ".join(dict.fromkeys(c.title for c in concerns(facts))) or "none"


def _settings(facts: Facts) -> dict[str, Any]:
    """The settings by key; methods by the names that select.variant stands for."""
    found = dict(flat(facts["config"]))
    for axis, name in methods_of(facts).items():
        if found.get(key := f"method.{axis}", name) is None:
            found[key] = name
    return found


def _differences(configs: Sequence[Mapping[str, Any]]) -> Rows:
    rows: Rows = []
    for key in dict.fromkeys(key for config in configs for key in config):
        cells = [json.dumps(c[key], default=str) if key in c else "–" for c in configs]
        if len(set(cells)) > 1:
            rows.append([key, *cells])
    return rows
