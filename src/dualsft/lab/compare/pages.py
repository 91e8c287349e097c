"""Tables of a comparison as Markdown, CSV, LaTeX, JSON and one self-contained HTML page.

Formats the tables of `lab/compare/tables.py` and computes nothing. The best value of a column is
bold, the second underlined, the third in italics if the table marks it. The base model is not
ranked. Not part of Algorithm 1.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import json
from collections.abc import Sequence

from dualsft.errors import ConfigError
from dualsft.lab.compare.matrix import Matrix
from dualsft.lab.compare.plots import draw
from dualsft.lab.compare.tables import (
    BASE,
    Column,
    Difference,
    Result,
    TableRow,
    Value,
    collect,
    differences,
    make_table,
)
from dualsft.lab.report.markdown import table as markdown_table
from dualsft.runs.folder import atomic_write_text
from dualsft.system.paths import Place, RunPath, run_path

_MARKS = {
    "md": ("**{}**", "<u>{}</u>", "*{}*"),
    "tex": (r"\textbf{{{}}}", r"\underline{{{}}}", r"\textit{{{}}}"),
    "html": ("<b>{}</b>", "<u>{}</u>", "<i>{}</i>"),
}
_ESCAPES = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "·": r"$\cdot$"}


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
    args = (matrix.name, results, apart, reference)
    texts = {
        "comparison.md": markdown(*args),
        "comparison.csv": as_csv(results),
        "comparison.tex": latex(results),
        "comparison.json": as_json(*args),
    }
    for file, text in texts.items():
        atomic_write_text(out / file, text)
    figures = draw(out)
    shown = [path for path in figures if path.suffix == ".svg"]
    atomic_write_text(out / "comparison.html", page(*args, shown))
    return [*(out / file for file in texts), *figures, out / "comparison.html"]


def number(column: Column, value: Value | None) -> str:
    """Format mean ± standard deviation with the column's unit and digits."""
    if value is None:
        return "–"
    scale = 100.0 if column.percent else 1.0
    text = f"{scale * value.mean:.{column.digits}f}"
    return text if value.std is None else f"{text} ± {scale * value.std:.{column.digits}f}"


def _cell(column: Column, row: TableRow, form: str, mark: int) -> str:
    text = number(column, row.values.get(column.key))
    if form == "tex":
        text = text.replace("±", r"$\pm$").replace("–", "--")
    place = row.place.get(column.key, 99)
    return _MARKS[form][place - 1].format(text) if place <= min(mark, 3) else text


def _head(result: Result) -> list[str]:
    grouped = any(row.group for row in result.rows)
    titles = [c.title + {1: " ↑", -1: " ↓", 0: ""}[c.better] for c in result.columns]
    ranked = ["rank in group"] if any(row.rank for row in result.rows) else []
    return [*(["group"] if grouped else []), "method", *titles, *ranked]


def _lines(result: Result, form: str) -> list[list[str]]:
    grouped = any(row.group for row in result.rows)
    ranked = any(row.rank for row in result.rows)
    most = max((row.seeds for row in result.rows), default=0)
    return [
        [
            *([row.group] if grouped else []),
            row.name if row.seeds == most else f"{row.name} ({row.seeds} of {most} seeds)",
            *(_cell(c, row, form, result.mark) for c in result.columns),
            *([str(row.rank or "–")] if ranked else []),
        ]
        for row in result.rows
    ]


def _num_names(result: Result) -> int:
    """Number of leading columns that hold names."""
    return 1 + any(row.group for row in result.rows)


def markdown(
    name: str, results: Sequence[Result], apart: Sequence[Difference], reference: str
) -> str:
    parts = [f"# Comparison `{name}`"]
    for result in results:
        parts += [f"## {result.title}", markdown_table(_head(result), _lines(result, "md"))]
        if result.missing:
            parts.append(f"Not finished: {'; '.join(result.missing)}.")
    if apart:
        rows = [
            [d.where, d.method, d.what, f"{d.mean:+.4f}", f"[{d.low:+.4f}, {d.high:+.4f}]"]
            + [f"{d.examples:,}"]
            for d in apart
        ]
        head = ["where", "method", "quantity", f"minus {reference}", "95 % interval", "examples"]
        parts += [
            f"## Paired differences to {reference}",
            "On the same examples, averaged over the seeds that both have; the interval is a "
            "bootstrap over examples.",
            markdown_table(head, rows),
        ]
    else:
        parts.append(
            f"No paired differences: `{reference}` has no finished cell here (choose another with "
            "--reference)."
        )
    parts.append(
        "Mean ± standard deviation over seeds. The best of a column is bold, the second "
        "underlined, the third (if marked) in italics. References, rows with missing seeds and "
        f"`{BASE}` are not ranked."
    )
    return "\n\n".join(parts) + "\n"


def as_csv(results: Sequence[Result]) -> str:
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


def _tex(text: str) -> str:
    return "".join(_ESCAPES.get(c, c) for c in text)


def latex(results: Sequence[Result]) -> str:
    """One booktabs table per result."""
    parts = []
    for result in results:
        head = [
            _tex(h).replace("↑", r"$\uparrow$").replace("↓", r"$\downarrow$") for h in _head(result)
        ]
        lines, last = [], None
        for row, cells in zip(result.rows, _lines(result, "tex"), strict=True):
            if last is not None and row.group != last:
                lines.append(r"\midrule")
            last = row.group
            names = _num_names(result)
            lines.append(" & ".join([*map(_tex, cells[:names]), *cells[names:]]) + r" \\")
        gone = f"% Not finished: {'; '.join(result.missing)}." if result.missing else ""
        if not result.rows:
            parts.append(f"% {result.title}: no finished cell\n{gone}")
            continue
        parts.append(
            "\n".join(
                [
                    *([gone] if gone else []),
                    r"\begin{table}[t]",
                    r"\centering",
                    rf"\caption{{{_tex(result.title)}}}",
                    rf"\begin{{tabular}}{{{'l' * len(head)}}}",
                    r"\toprule",
                    " & ".join(head) + r" \\",
                    r"\midrule",
                    *lines,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            ).replace("–", "--")
        )
    return "% needs \\usepackage{booktabs}\n" + "\n\n".join(parts) + "\n"


def as_json(
    name: str, results: Sequence[Result], apart: Sequence[Difference], reference: str
) -> str:
    """All tables and differences as numbers. The figures are drawn from this file."""
    content = {
        "name": name,
        "reference": reference,
        "tables": [dataclasses.asdict(result) for result in results],
        "differences": [dataclasses.asdict(d) for d in apart],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def page(
    name: str,
    results: Sequence[Result],
    apart: Sequence[Difference],
    reference: str,
    figures: Sequence[RunPath],
) -> str:
    """One HTML page without scripts or network requests."""
    parts = [f"<h1>Comparison {html.escape(name)}</h1>"]
    for result in results:
        head = "".join(f"<th>{html.escape(h)}</th>" for h in _head(result))
        body = []
        for row, cells in zip(result.rows, _lines(result, "html"), strict=True):
            names = _num_names(result)
            shown = [*map(html.escape, cells[:names]), *cells[names:]]
            kind = ' class="base"' if row.name == BASE else ""
            body.append(f"<tr{kind}>" + "".join(f"<td>{c}</td>" for c in shown) + "</tr>")
        parts.append(
            f"<h2>{html.escape(result.title)}</h2><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table>"
        )
        if result.missing:
            parts.append(f"<p>Not finished: {html.escape('; '.join(result.missing))}.</p>")
    if apart:
        body = "".join(
            f"<tr><td>{html.escape(d.where)}</td><td>{html.escape(d.method)}</td>"
            f"<td>{html.escape(d.what)}</td><td>{d.mean:+.4f}</td>"
            f"<td>[{d.low:+.4f}, {d.high:+.4f}]</td><td>{d.examples:,}</td></tr>"
            for d in apart
        )
        parts.append(
            f"<h2>Paired differences to {html.escape(reference)}</h2><table><thead><tr>"
            "<th>where</th><th>method</th><th>quantity</th><th>difference</th>"
            "<th>95 % interval</th><th>examples</th></tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )
    for figure in figures:
        drawn = figure.read_text()
        parts.append(f"<figure>{drawn[drawn.index('<svg') :]}</figure>")
    return _PAGE.format(title=html.escape(name), body="\n".join(parts))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; color: #1b1b1b; background: #fff }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
thead th {{ border-bottom: 2px solid #444 }}
tr.base td {{ color: #666; font-style: italic }}
figure {{ margin: 1rem 0 }} figure svg {{ max-width: 100%; height: auto }}
</style></head><body>
{body}
</body></html>
"""
