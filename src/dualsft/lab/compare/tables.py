"""Tables of a comparison, as Markdown, CSV, LaTeX, JSON and one self-contained HTML page.

Computes from the records of `lab/compare/records.py`: results (benchmarks if they were run, losses
and KL), resources (shares, passes, seconds, peak memory, counted as in the paper) and, for tuned
settings, the frontier (the chosen rate, loss and KL there, and the loss at equal KL), as means over
seeds. The best value of a column is bold, the second underlined, the third in italics if the table
marks it. The base model is not ranked. Not part of Algorithm 1.
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
from dualsft.lab.compare.records import (
    CellRecord,
    Difference,
    Skills,
    by_place,
    collect,
    differences,
    equal_kl,
    frontiers,
    place_of,
    tuned,
)
from dualsft.lab.plots import draw_comparison
from dualsft.lab.report.facts import Rows
from dualsft.lab.report.html import render
from dualsft.lab.report.markdown import table as markdown_table
from dualsft.runs.folder import atomic_write_text
from dualsft.system.paths import Place, RunPath, run_path

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
TUNING = Column("tuning_seconds", "tuning, s", -1, 1)


def frontier_columns(skills: Skills, reference: str) -> list[Column]:
    """The tuned rate, loss and KL there, and the loss at the reference's KL."""
    return [
        Column("lr", "learning rate", 0, 6),
        Column(f"loss.{skills.new}", f"loss {skills.new}", -1, 4),
        *(Column(f"kl.{name}", f"KL {name}", -1, 4) for name in skills.old),
        Column("loss_at_kl", f"loss {skills.new} at the KL of {reference}", -1, 4),
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


def make_table(
    table: Table,
    matrix: Matrix,
    records: Sequence[CellRecord],
    missing: Mapping[Cell, str],
    frontier: Sequence[Column] = (),
) -> list[Result]:
    """Compute the table for every combination of model, data and budget.

    `frontier` are the columns of a table of that kind.
    """
    found: list[Result] = []
    names = [choice.name for choice in matrix.methods]
    groups = table.groups or {"": [name for name in names if name not in table.reference]}
    found_in = by_place(records)
    for where in dict.fromkeys(place_of(cell) for cell in matrix.cells()):
        part = found_in.get(where, [])
        columns = result_columns(part)
        if table.kind == "resources":
            columns = [*RESOURCES, *([TUNING] if matrix.tune else [])]
        elif table.kind == "frontier":
            columns = list(frontier)
        elif table.kind == "forgetting":
            keys = ("data_share", "param_share", "total_seconds")
            columns = [*columns, *(c for c in RESOURCES if c.key in keys)]
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
    judged = [c for c in columns if c.better and c not in (*RESOURCES, TUNING)]
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


# --- writing ------------------------------------------------------------------------------------

MARKS = {
    "md": ("**{}**", "<u>{}</u>", "*{}*"),
    "tex": (r"\textbf{{{}}}", r"\underline{{{}}}", r"\textit{{{}}}"),
    "html": (Markup("<b>{}</b>"), Markup("<u>{}</u>"), Markup("<i>{}</i>")),
}
TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "·": r"$\cdot$", "–": "--"}
TEX |= {"±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}
# names of sets may come with a folder from elsewhere, and LaTeX can read and write files
TEX |= {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "\n": " ", "\r": " "}
TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


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
    best, notes = tuned(matrix, records)
    apart, columns, curves = differences(best, reference), list[Column](), list[dict[str, Any]]()
    if matrix.tune is not None and (skills := Skills.of(matrix, records)) is not None:
        best, at_equal = equal_kl(records, best, skills, reference)
        apart, columns = apart + at_equal, frontier_columns(skills, reference)
        curves = frontiers(records, skills)
    results = [r for t in matrix.tables for r in make_table(t, matrix, best, missing, columns)]
    content = {
        "name": matrix.name,
        "reference": reference,
        "tables": [dataclasses.asdict(result) for result in results],
        "differences": [dataclasses.asdict(d) for d in apart],
    }
    if matrix.tune is not None:
        chosen = [{"cell": r.cell.title, "value": r.cell.value.name} for r in best]
        content |= {"tuned": chosen, "tuned_on": matrix.tune.on, "notes": notes}
        content |= {"frontiers": curves}
    texts = {
        "comparison.md": formatted("md", matrix.name, results, apart, reference, notes=notes),
        "comparison.csv": _csv(results),
        "comparison.tex": formatted("tex", matrix.name, results, apart, reference),
        "comparison.json": json.dumps(content, indent=1, ensure_ascii=False) + "\n",
    }
    for file, text in texts.items():
        atomic_write_text(out / file, text)
    figures = draw_comparison(out)
    page = out / "comparison.html"
    text = formatted("html", matrix.name, results, apart, reference, figures, notes)
    atomic_write_text(page, text)
    return [*(out / file for file in texts), *figures, page]


def formatted(
    form: str,
    name: str,
    results: Sequence[Result],
    apart: Sequence[Difference],
    reference: str,
    figures: Sequence[RunPath] = (),
    notes: Sequence[str] = (),
) -> str:
    """The tables in one form: md, tex or html."""
    head = ["where", "method", "quantity", f"minus {reference}", "95 % interval", "examples"]
    rows = [
        [*(_plain(text, form) for text in (d.where, d.method, d.what)), f"{d.mean:+.4f}"]
        + [f"[{d.low:+.4f}, {d.high:+.4f}]", f"{d.examples:,}"]
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
        notes=notes,
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
        "missing": [_plain(name, form) for name in result.missing],
        "num_names": 1 + grouped,
        "breaks": [at for at in range(1, len(groups)) if groups[at] != groups[at - 1]],
    }


def _plain(text: str, form: str) -> str:
    """Text that the form shows as it is; the pages of the others escape it."""
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
