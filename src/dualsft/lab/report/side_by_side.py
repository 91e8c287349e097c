"""Several runs side by side, as Markdown and HTML.

`dualsft report RUN RUN …` writes the reports of each run and, in `--out`, report.md and report.html
with one column per run: selection, cost, losses, benchmarks, the agreement of the selections, and
the settings that differ. To compare methods over seeds, with intervals and paired differences, use
`dualsft compare`. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dualsft.errors import ConfigError
from dualsft.lab.diagnostics.ranking import mask_jaccard
from dualsft.lab.report.examples import parameter_shapes
from dualsft.lab.report.html import page
from dualsft.lab.report.markdown import table, write_report
from dualsft.lab.report.parts import duration, esc, methods_of, number, peak_gib, percent, section
from dualsft.lab.report.parts import table as html_table
from dualsft.lab.report.warnings import concerns
from dualsft.runs.preflight import FOLDERS, load_summaries
from dualsft.runs.stages.selection import read_mask
from dualsft.storage.manifest import atomic_write_text
from dualsft.system.paths import RunPath

Rows = list[list[str]]


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
    if len(runs) > 1 and len({run.location.resolve() for run in runs}) < len(runs):
        raise ConfigError("report: the same run folder is given twice; name each once")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    if len(runs) == 1:
        path = write_report(runs[0], None if out is None else RunPath(out))
        made = [path, path.with_name("report.html"), path.with_name("model_card.md")]
        return [file for file in made if file.is_file()]
    target = out or Path("side_by_side")
    if target.resolve() in {run.location.resolve() for run in runs}:
        raise ConfigError(f"--out: {target} is one of the runs; give another folder")
    target.mkdir(parents=True, exist_ok=True)
    made = [write_report(run) for run in runs]
    return [
        *(path.with_name("report.html") for path in made),
        *_side_by_side(facts, RunPath(target)),
    ]


def _side_by_side(facts: Mapping[RunPath, Mapping[str, Any]], out: RunPath) -> list[RunPath]:
    names = _names(list(facts))
    found = list(facts.values())
    configs = [_flat(one["config"]) for one in found]
    groups = {
        "Chosen": _chosen(found),
        "Cost": _cost(found),
        "Results": _results(found),
        "Agreement of the selections": _agreement(list(facts), found, names),
        "Warnings": [["warnings", *[_titles(one) for one in found]]],
        "Settings that differ": _differences(configs),
    }
    head = ["", *names]
    title = f"{len(names)} runs side by side"
    markdown, body = [f"# {title}"], []
    for name, rows in groups.items():
        if rows:
            markdown.append(f"## {name}\n\n{table(head, rows)}")
            anchor = name.lower().replace(" ", "-")
            body.append(section(anchor, name, html_table(head, rows, len(head))))
    links = {
        name: Path(os.path.relpath(run.location / "report.html", out.location)).as_posix()
        for name, run in zip(names, facts, strict=True)
    }
    markdown.append("## Each run\n\n" + "\n".join(f"- {n}: {to}" for n, to in links.items()))
    items = "".join(f"<li><a href='{esc(quote(to))}'>{esc(n)}</a></li>" for n, to in links.items())
    body.append(section("each-run", "Each run", f"<ul>{items}</ul>"))
    atomic_write_text(out / "report.md", "\n\n".join(markdown) + "\n")
    atomic_write_text(out / "report.html", page(title, "".join(body), {}))
    return [out / "report.md", out / "report.html"]


def _names(runs: Sequence[RunPath]) -> list[str]:
    """Shortest trailing part of each path that makes the names unique."""
    parts = [run.location.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run) for run in runs]


def _row(label: str, cells: Sequence[str]) -> Rows:
    """One row, or none if no run has a value for it."""
    return [[label, *cells]] if any(cell != "–" for cell in cells) else []


def _chosen(found: Sequence[Mapping[str, Any]]) -> Rows:
    chosen = [one.get("selection", {}) for one in found]

    def counted(c: Mapping[str, Any], key: str, of: str, share: str) -> str:
        return f"{c[key]:,} of {c[of]:,} ({percent(c[share], 2)})" if key in c else "–"

    methods = [
        ", ".join(f"{axis}: {name}" for axis, name in methods_of(one).items()) or "–"
        for one in found
    ]
    rows = _row("methods", methods)
    rows += _row("examples", [counted(c, "b", "num_full", "data_share") for c in chosen])
    rows += _row("parameters", [counted(c, "k", "denominator", "share") for c in chosen])
    lengths = [c.get("response_tokens_selected") for c in chosen]
    return rows + _row("mean response length, tokens", [number(x) for x in lengths])


def _cost(found: Sequence[Mapping[str, Any]]) -> Rows:
    rows: Rows = []
    for stage in FOLDERS:
        manifests = [one["manifests"].get(stage) for one in found]
        cells = [
            "–" if m is None else f"{duration(m['seconds'])}, {peak_gib(m):.2f} GiB"
            for m in manifests
        ]
        rows += _row(stage, cells)
    totals = [sum(m["seconds"] for m in one["manifests"].values()) for one in found]
    return rows + _row("all stages", [duration(total) for total in totals])


def _results(found: Sequence[Mapping[str, Any]]) -> Rows:
    results = [one.get("evaluation", {}) for one in found]
    rows: Rows = []
    for name in dict.fromkeys(name for r in results for name in r.get("files", {})):
        files = [r.get("files", {}).get(name) for r in results]
        losses = [
            "–" if f is None else f"{f['before']['loss']:.4f} → {f['after']['loss']:.4f}"
            for f in files
        ]
        rows += _row(f"loss, {name}", losses)
        kl = ["–" if f is None else f"{f['after']['kl_to_base']:.4f}" for f in files]
        rows += _row(f"KL to base, {name}", kl)
    for name in dict.fromkeys(name for r in results for name in r.get("tasks", {})):
        tasks = [r.get("tasks", {}).get(name) for r in results]
        rows += _row(name, ["–" if t is None else _sides(t, "score") for t in tasks])
    for key in ("plasticity", "stability", "overall"):
        sums = [r.get("summary") for r in results]
        rows += _row(key, ["–" if s is None else _sides(s, key) for s in sums])
    return rows


def _sides(values: Mapping[str, Any], key: str) -> str:
    before, after = values["before"][key], values["after"][key]
    return "–" if after is None else f"{percent(before)} → {percent(after)}"


def _agreement(
    runs: Sequence[RunPath], found: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Rows:
    """Pairwise Jaccard index of the selected examples and of the masks."""
    chosen = [_ids(run, one) for run, one in zip(runs, found, strict=True)]
    rows: Rows = []
    for name, mine in zip(names, chosen, strict=True):
        cells = [
            "–" if mine is None or other is None else f"{_jaccard(mine, other):.3f}"
            for other in chosen
        ]
        rows += _row(f"same examples as {name} (Jaccard)", cells)
    masks = _mask_agreement(runs, found)
    for name, cells in zip(names, masks, strict=True):
        rows += _row(f"same entries of the mask as {name} (Jaccard)", cells)
    return rows


def _mask_agreement(runs: Sequence[RunPath], found: Sequence[Mapping[str, Any]]) -> Rows:
    """Pairwise Jaccard index of the masks; a dash if one is missing or the parameters differ.

    At most two masks are in memory at a time.
    """
    cells = [["–" for _ in runs] for _ in runs]
    own = [
        (at, run / FOLDERS["selection"] / one["selection"]["final"], parameter_shapes(run, one))
        for at, (run, one) in enumerate(zip(runs, found, strict=True))
        if one.get("selection", {}).get("k")
    ]
    for at, folder, shapes in own:
        mine = read_mask(folder)
        for other, path, theirs in own:
            if other < at:
                yours = read_mask(path)
                names = mine.keys() | yours.keys()
                if all(shapes.get(n) == theirs.get(n) is not None for n in names):
                    cells[at][other] = cells[other][at] = f"{mask_jaccard(mine, yours):.3f}"
        cells[at][at] = f"{1:.3f}"
    return cells


def _ids(run: RunPath, facts: Mapping[str, Any]) -> set[str] | None:
    if "b" not in facts.get("selection", {}):
        return None
    path = run / "5_selection" / facts["selection"]["final"] / "ids.json"
    return set(path.read_json())


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def _titles(facts: Mapping[str, Any]) -> str:
    return "; ".join(dict.fromkeys(c.title for c in concerns(facts))) or "none"


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}

    def add(value: Any, prefix: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                add(inner, f"{prefix}.{key}")
        else:
            flat[prefix] = value

    for key, value in config.items():
        add(value, str(key))
    return flat


def _differences(configs: Sequence[Mapping[str, Any]]) -> Rows:
    rows: Rows = []
    for key in dict.fromkeys(key for config in configs for key in config):
        cells = [json.dumps(c[key], default=str) if key in c else "–" for c in configs]
        if len(set(cells)) > 1:
            rows.append([key, *cells])
    return rows
