"""Tables of a comparison, as Markdown, CSV, LaTeX, JSON and one self-contained HTML page.

Reads the run folders of `lab/compare/cells.py` and computes: results (benchmarks if they were run,
losses and KL), resources (shares, passes, seconds, peak memory, counted as in the paper), means
over seeds, and paired differences to a reference method on the same examples. Cells whose split or
evaluation settings differ from the first cell's are left out, so a table never mixes them. The best
value of a column is bold, the second underlined, the third in italics if the table marks it. The
base model is not ranked. Not part of Algorithm 1.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from dualsft.errors import ConfigError
from dualsft.lab.compare.matrix import Cell, Matrix, Table
from dualsft.lab.plots import draw_comparison
from dualsft.lab.report.facts import Rows, peak_gib
from dualsft.lab.report.html import render
from dualsft.lab.report.markdown import table as markdown_table
from dualsft.runs.folder import atomic_write_text
from dualsft.runs.pipeline import finished
from dualsft.runs.preflight import read_manifests, reading
from dualsft.system.paths import Place, RunPath, run_path

CHOOSING = ("warmup", "gradients", "scores", "selection")
RESAMPLES = 2000
BASE = "base model"
REFERENCE = "reference"


@dataclass(frozen=True)
class Column:
    """One measured quantity. `better` is +1 if larger is better, -1 if smaller is, otherwise 0."""

    key: str
    title: str
    better: int
    digits: int = 3
    percent: bool = False


@dataclass(frozen=True)
class CellRecord:
    """One finished cell."""

    cell: Cell
    folder: RunPath
    values: Mapping[str, float | None]
    base: Mapping[str, float | None]
    """The values of the base model, where they exist."""


@dataclass(frozen=True)
class Value:
    """Mean and standard deviation over seeds."""

    mean: float
    std: float | None
    count: int


@dataclass
class TableRow:
    """Row of a table: one method."""

    group: str
    name: str
    values: dict[str, Value]
    seeds: int
    place: dict[str, int] = field(default_factory=dict)
    """Rank in each column: 1 for the best."""
    rank: int | None = None
    """Rank within its group by overall, otherwise by the first ranked column."""


@dataclass
class Result:
    """A computed table."""

    title: str
    kind: str
    columns: list[Column]
    rows: list[TableRow]
    mark: int
    missing: list[str]
    """Titles of the missing cells, with the reason."""
    where: str
    """Model, data and budget of the table."""


# --- reading cells -------------------------------------------------------------------------------


def collect(matrix: Matrix, out: RunPath) -> tuple[list[CellRecord], dict[Cell, str]]:
    """(records of the cells that finished with the matrix's settings, reasons for the others).

    A cell that finished with other settings is out of date and counts as missing.
    """
    records: list[CellRecord] = []
    missing: dict[Cell, str] = {}
    firsts: dict[tuple[str, str, int], tuple[str, Any]] = {}
    for cell in matrix.cells():
        folder = out / cell.path
        manifests, problems = read_manifests(folder) if folder.is_dir() else ({}, [])
        if problems:
            missing[cell] = f"{problems[0]}; run `dualsft compare` again, which makes it anew"
        elif "evaluation" not in manifests:
            missing[cell] = "not finished"
        elif not finished(matrix.config(cell), folder):
            missing[cell] = "made with other settings"
        else:
            # Values measured on different examples must not appear in one table: the split and the
            # evaluation must be those of the first cell of this model, data and seed.
            prints = {stage: manifests[stage]["fingerprint"] for stage in ("split", "evaluation")}
            judged = (prints["split"]["hash"], prints["evaluation"]["settings"])
            key = (cell.model.name, cell.data.name, cell.seed)
            title, first = firsts.setdefault(key, (cell.title, judged))
            if first != judged:
                missing[cell] = f"made with another split or evaluation than {title}"
                continue
            with reading(folder):
                results = (folder / "7_evaluation/results.json").read_json()
                values = measures(results, "after") | resources(folder, manifests)
                records.append(CellRecord(cell, folder, values, measures(results, "before")))
    return records, missing


def measures(results: Mapping[str, Any], side: str) -> dict[str, float | None]:
    """Benchmark scores, aggregates, losses and KL for one side: before or after fine-tuning."""
    found: dict[str, float | None] = {}
    for name, task in (results.get("tasks") or {}).items():
        found[f"task.{name}"] = task[side]["score"]
    for key, value in ((results.get("summary") or {}).get(side) or {}).items():
        found[f"summary.{key}"] = value
    for name, facts in results["files"].items():
        found[f"loss.{name}"] = facts[side]["loss"]
        found[f"kl.{name}"] = facts[side].get("kl_to_base", 0.0)
    return found


def resources(folder: RunPath, manifests: Mapping[str, Any]) -> dict[str, float | None]:
    """Resources of a cell, counted the same way for every method.

    `passes` counts examples seen in forward and backward passes of the selection, relative to the
    size of the corpus.
    """
    tuned = (folder / "6_finetune/summary.json").read_json()
    split = (folder / "1_split/summary.json").read_json()
    counts = split["counts"]
    num_full = split.get("num_full") or sum(counts.values())  # absent in runs made before
    needed = {*manifests["selection"]["fingerprint"]["reads"], "selection"}
    reads = [stage for stage in CHOOSING if stage in needed]
    weighing = list((manifests["finetune"]["facts"].get("accounts") or {}).values())
    accounts = [*manifests["selection"]["facts"]["accounts"].values(), *weighing]
    seen = sum(a["forward_examples"] + a["backward_examples"] for a in accounts)
    if "warmup" in reads:
        steps = manifests["warmup"]["facts"]["steps"]
        seen += steps * manifests["warmup"]["fingerprint"]["settings"]["warmup.batch_size"]
    if "gradients" in reads:
        # The one-pass plan stores f in pool.parquet; without it, scoring reads the pool again.
        pool = (folder / "3_gradients/pool.parquet").read_batches(1)
        two_pass = "f" not in next(pool).schema.names
        per_example = manifests["scores"]["fingerprint"]["settings"].get("per-example scores")
        seen += counts["val"] + counts["anchor"] + counts["pool"] * (1 + (two_pass and per_example))
    seconds = {stage: manifests[stage]["seconds"] for stage in manifests}
    return {
        "data_share": tuned["examples"] / num_full,
        "param_share": tuned["trained_entries"] / tuned["num_parameters"],
        "changed_share": changed_share(tuned),
        "passes": seen / num_full,
        "selection_seconds": sum(seconds[s] for s in reads) + sum(a["seconds"] for a in weighing),
        "total_seconds": sum(seconds[s] for s in (*reads, "split", "finetune")),
        "selection_gib": max(peak_gib(manifests[s]) for s in reads),
        "finetune_gib": peak_gib(manifests["finetune"]),
    }


def changed_share(tuned: Mapping[str, Any]) -> float | None:
    """Share of entries that differ from the base after training.

    More than the mask if the mask moved or dense steps came before it. None for adapters, which are
    merged into whole matrices.
    """
    total = tuned["num_parameters"]
    if tuned.get("changed_entries") is not None:
        return tuned["changed_entries"] / total
    return 1.0 if tuned["trained_entries"] == total else None


# --- tables --------------------------------------------------------------------------------------

RESOURCES = [
    Column("data_share", "data %", 0, 1, percent=True),
    Column("param_share", "parameters %", 0, 2, percent=True),
    Column("changed_share", "changed in the end %", 0, 2, percent=True),
    Column("passes", "passes to select", -1, 2),
    Column("selection_seconds", "selection, s", -1, 1),
    Column("total_seconds", "end to end, s", -1, 1),
    Column("selection_gib", "peak of selection, GiB", -1, 2),
    Column("finetune_gib", "peak of fine-tuning, GiB", -1, 2),
]


def result_columns(records: Sequence[CellRecord]) -> list[Column]:
    """Benchmarks, the aggregates that every cell has, then losses and KL."""
    columns: dict[str, list[Column]] = defaultdict(list)
    for key in records[0].values if records else []:
        kind, _, name = key.partition(".")
        if kind in ("loss", "kl"):
            title = f"{'KL' if kind == 'kl' else kind} {name}"
            columns["file"].append(Column(key, title, -1, 4))
        elif kind == "task" or all(r.values.get(key) is not None for r in records):
            columns[kind].append(Column(key, name, 1, 1, percent=True))
    return [*columns["task"], *columns["summary"], *columns["file"]]


Where = tuple[str, str, str]
"""Names of model, data and budget. One table covers one combination."""


def place_of(cell: Cell) -> Where:
    return cell.model.name, cell.data.name, cell.budget.name


def by_place(records: Sequence[CellRecord]) -> dict[Where, list[CellRecord]]:
    """Records grouped by table."""
    found: dict[Where, list[CellRecord]] = defaultdict(list)
    for record in records:
        found[place_of(record.cell)].append(record)
    return found


def make_table(
    table: Table, matrix: Matrix, records: Sequence[CellRecord], missing: Mapping[Cell, str]
) -> list[Result]:
    """Compute the table for every combination of model, data and budget."""
    found: list[Result] = []
    names = [choice.name for choice in matrix.methods]
    groups = table.groups or {"": [name for name in names if name not in table.reference]}
    found_in = by_place(records)
    for where in dict.fromkeys(place_of(cell) for cell in matrix.cells()):
        part = found_in.get(where, [])
        columns = RESOURCES if table.kind == "resources" else result_columns(part)
        if table.kind == "forgetting":
            keys = ("data_share", "param_share", "total_seconds")
            columns = [*result_columns(part), *(c for c in RESOURCES if c.key in keys)]
        rows = []
        if part and table.kind != "resources":
            base = {record.cell.seed: record.base for record in part}
            rows.append(TableRow("", BASE, _values(list(base.values()), columns), len(base)))
        for group, members in {REFERENCE: table.reference, **groups}.items():
            for name in members:
                own = [r for r in part if r.cell.method.name == name]
                if own:
                    values = _values([r.values for r in own], columns)
                    rows.append(TableRow(group, name, values, len(own)))
        _rank(rows, columns, table.within)
        title = " · ".join([table.title, *(w for w in where if w != "default")])
        gone = [f"{c.title} ({why})" for c, why in missing.items() if place_of(c) == where]
        found.append(Result(title, table.kind, columns, rows, table.mark, gone, " · ".join(where)))
    return found


def _values(
    values: Sequence[Mapping[str, float | None]], columns: Sequence[Column]
) -> dict[str, Value]:
    found = {}
    for column in columns:
        known = [v for one in values if (v := one.get(column.key)) is not None]
        if known:
            spread = float(np.std(known, ddof=1)) if len(known) > 1 else None
            found[column.key] = Value(float(np.mean(known)), spread, len(known))
    return found


def _rank(rows: list[TableRow], columns: Sequence[Column], within: str) -> None:
    """Rank the rows in each column, within groups or over the table, and overall within groups.

    Equal means share a rank. The base model, the references and rows with fewer seeds than others
    are not ranked.
    """
    rivals = [row for row in rows if row.name != BASE and row.group != REFERENCE]
    most = max((row.seeds for row in rivals), default=0)
    competing = [row for row in rivals if row.seeds == most]
    groups: dict[str, list[TableRow]] = defaultdict(list)
    for row in competing:
        groups[row.group].append(row)
    for near in [competing] if within == "table" else groups.values():
        for column in columns:
            for row, place in _places(near, column):
                row.place[column.key] = place
    judged = [c for c in columns if c.better and c not in RESOURCES]
    main = next((c for c in judged if c.key == "summary.overall"), judged[0] if judged else None)
    if main is not None:
        for near in groups.values():
            for row, place in _places(near, main):
                row.rank = place


def _places(rows: Sequence[TableRow], column: Column) -> list[tuple[TableRow, int]]:
    """The rows that have a value in a ranked column, with their place: 1 for the best."""
    have = [row for row in rows if column.better and column.key in row.values]
    means = [column.better * row.values[column.key].mean for row in have]
    places = (1 + sum(other > own for other in means) for own in means)
    return list(zip(have, places, strict=True))


# --- paired differences --------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Method minus reference on the same examples: mean and 95 % interval."""

    where: str
    method: str
    what: str
    mean: float
    low: float
    high: float
    examples: int


def differences(records: Sequence[CellRecord], reference: str) -> list[Difference]:
    """Paired differences of loss and KL on every evaluation set, and of benchmark scores.

    Computed per model, data and budget. The difference of an example is first averaged over the
    seeds that both methods have, because all seeds use the same examples. The bootstrap resamples
    examples.
    """
    found: list[Difference] = []
    for where, part in by_place(records).items():
        ours = {r.cell.seed: r.folder for r in part if r.cell.method.name == reference}
        stored = {seed: _per_example(folder) for seed, folder in ours.items()}
        for method in dict.fromkeys(r.cell.method.name for r in part):
            if method == reference:
                continue
            apart: dict[tuple[str, str], list[float]] = defaultdict(list)
            for record in part:
                if record.cell.method.name != method or record.cell.seed not in stored:
                    continue
                theirs, base = _per_example(record.folder), stored[record.cell.seed]
                for key in theirs.keys() & base.keys():
                    apart[key].append(theirs[key] - base[key])
            for what in sorted({key[0] for key in apart}):
                keys = sorted(key for key in apart if key[0] == what)
                values = np.array([np.mean(apart[key]) for key in keys])
                title = " · ".join(w for w in where if w != "default")
                found.append(_bootstrap(title, method, what, values))
    return found


def _per_example(folder: RunPath) -> dict[tuple[str, str], float]:
    """(quantity, example) -> value: loss and KL of the tuned model, scores of benchmark items."""
    losses = (folder / "7_evaluation/losses.parquet").read_table().to_pydict()
    found: dict[tuple[str, str], float] = {}
    for name, i, loss, kl in zip(
        losses["set"], losses["id"], losses["loss_after"], losses["kl"], strict=True
    ):
        found[f"loss {name}", str(i)] = float(loss)
        found[f"KL {name}", str(i)] = float(kl)
    samples = folder / "7_evaluation/samples.jsonl"
    if samples.is_file():
        for line in samples.read_text().split("\n"):  # splitlines would also split inside texts
            if not line:
                continue
            one = json.loads(line)
            found[str(one["task"]), str(one["id"])] = float(one["score_after"])
    return found


def _bootstrap(where: str, method: str, what: str, apart: np.ndarray) -> Difference:
    rng, count = np.random.default_rng(0), len(apart)
    means = [apart[rng.integers(0, count, count)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(where, method, what, float(apart.mean()), float(low), float(high), count)


# --- writing ------------------------------------------------------------------------------------

MARKS = {
    "md": ("**{}**", "<u>{}</u>", "*{}*"),
    "tex": (r"\textbf{{{}}}", r"\underline{{{}}}", r"\textit{{{}}}"),
    "html": (Markup("<b>{}</b>"), Markup("<u>{}</u>"), Markup("<i>{}</i>")),
}
TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "·": r"$\cdot$", "–": "--"}
TEX |= {"±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}


def write_tables(matrix: Matrix, folder: Place, reference: str) -> list[RunPath]:
    """Write comparison.md, .csv, .tex, .json, the figures, and .html with all of them."""
    out = run_path(folder)
    records, missing = collect(matrix, out)
    if not records:
        why = "; ".join(f"{c.title}: {text}" for c, text in list(missing.items())[:3])
        raise ConfigError(f"{out}: no finished cell ({why}); run `dualsft compare`")
    known = [choice.name for choice in matrix.methods]
    if reference not in known and len(known) > 1 and reference != "dualsft":
        raise ConfigError(
            f"--reference: {reference!r} is not a method of this comparison; use {', '.join(known)}"
        )
    results = [r for t in matrix.tables for r in make_table(t, matrix, records, missing)]
    apart = differences(records, reference)
    content = {
        "name": matrix.name,
        "reference": reference,
        "tables": [dataclasses.asdict(result) for result in results],
        "differences": [dataclasses.asdict(d) for d in apart],
    }
    texts = {
        "comparison.md": formatted("md", matrix.name, results, apart, reference),
        "comparison.csv": _csv(results),
        "comparison.tex": formatted("tex", matrix.name, results, apart, reference),
        "comparison.json": json.dumps(content, indent=1, ensure_ascii=False) + "\n",
    }
    for file, text in texts.items():
        atomic_write_text(out / file, text)
    figures = draw_comparison(out)
    page = out / "comparison.html"
    atomic_write_text(page, formatted("html", matrix.name, results, apart, reference, figures))
    return [*(out / file for file in texts), *figures, page]


def formatted(
    form: str,
    name: str,
    results: Sequence[Result],
    apart: Sequence[Difference],
    reference: str,
    figures: Sequence[RunPath] = (),
) -> str:
    """The tables in one form: md, tex or html."""
    head = ["where", "method", "quantity", f"minus {reference}", "95 % interval", "examples"]
    rows = [
        [*(d.where, d.method, d.what, f"{d.mean:+.4f}", f"[{d.low:+.4f}, {d.high:+.4f}]")]
        + [f"{d.examples:,}"]
        for d in apart
    ]
    return render(
        f"comparison.{form}",
        table=markdown_table,
        title=f"Comparison {name}",
        name=name,
        results=[_formatted_table(result, form) for result in results],
        differences=(head, rows) if apart else None,
        reference=reference,
        base=BASE,
        figures={
            path.stem.replace("_", " "): base64.b64encode(path.read_bytes()).decode("ascii")
            for path in figures
            if path.suffix == ".svg"
        },
    )


def _formatted_table(result: Result, form: str) -> dict[str, Any]:
    grouped = any(row.group for row in result.rows)
    ranked = any(row.rank for row in result.rows)
    most = max((row.seeds for row in result.rows), default=0)
    titles = [c.title + {1: " ↑", -1: " ↓", 0: ""}[c.better] for c in result.columns]
    head = [*["group"] * grouped, "method", *titles, *["rank in group"] * ranked]
    rows: Rows = []
    for row in result.rows:
        name = row.name if row.seeds == most else f"{row.name} ({row.seeds} of {most} seeds)"
        names = [*[row.group] * grouped, name]
        cells = [_cell(column, row, form, result.mark) for column in result.columns]
        rank = [str(row.rank or "–")] * ranked
        rows.append([*(_plain(n, form) for n in names), *cells, *(_plain(r, form) for r in rank)])
    groups = [row.group for row in result.rows]
    return {
        "title": _plain(result.title, form),
        "head": [_plain(title, form) for title in head],
        "rows": rows,
        "missing": result.missing,
        "num_names": 1 + grouped,
        "breaks": [at for at in range(1, len(groups)) if groups[at] != groups[at - 1]],
    }


def _plain(text: str, form: str) -> str:
    return "".join(TEX.get(c, c) for c in text) if form == "tex" else text


def _cell(column: Column, row: TableRow, form: str, mark: int) -> str:
    """Mean ± standard deviation with the column's unit and digits, marked by its place."""
    value = row.values.get(column.key)
    if value is None:
        return _plain("–", form)
    scale = 100.0 if column.percent else 1.0
    text = f"{scale * value.mean:.{column.digits}f}"
    if value.std is not None:
        text += f" ± {scale * value.std:.{column.digits}f}"
    place = row.place.get(column.key, 99)
    text = _plain(text, form)
    return MARKS[form][place - 1].format(text) if place <= min(mark, 3) else text


def _csv(results: Sequence[Result]) -> str:
    """One line per table, method and quantity."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "group", "method", "quantity", "mean", "std", "seeds", "place"])
    for result in results:
        for row in result.rows:
            for column in result.columns:
                if (v := row.values.get(column.key)) is not None:
                    std = "" if v.std is None else v.std
                    place = row.place.get(column.key, "")
                    line = [result.title, row.group, row.name, column.key, v.mean, std, v.count]
                    writer.writerow([*line, place])
    return text.getvalue()
