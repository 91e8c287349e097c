"""Building blocks of report.html: tables, cards, bars and drawings that need no JavaScript.

The heat map of the mask, the histogram of scores and the bars of time and memory are inline SVG or
plain HTML. Heat maps use one hue from light to dark; the histogram uses two colours that
colour-blind readers can tell apart. All text that comes from a run is escaped. Not part of
Algorithm 1.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

STOPS = ((247, 251, 255), (107, 174, 214), (8, 48, 107))
CHOSEN, REST = "#D55E00", "#8FB8DE"
CLOSE = 52
"""Horizontal distance, in SVG units, below which two labels would overlap."""
LOSS_NOTE = (
    "The loss is a mean over examples; the perplexity is the exponential of the mean over all "
    "response tokens, so one can rise while the other falls."
)


def esc(value: object) -> str:
    """Escape text for HTML, also inside attributes."""
    return html.escape(str(value), quote=True)


def number(value: float | None, digits: int = 4) -> str:
    """Format a number: integers with separators, others with `digits` digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def methods_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """The method of each axis, from fine-tuning if it has run, otherwise from the selection.

    Runs that share a selection may train differently, so fine-tuning comes first. Empty for old
    runs, which do not record methods.
    """
    for stage in ("finetune", "selection"):
        if named := facts.get(stage, {}).get("methods"):
            return named
    return {}


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def peak_gib(manifest: Mapping[str, Any]) -> float:
    """Peak memory of a stage: of the GPU if one was used, otherwise resident host memory."""
    memory = manifest["peak_memory"]
    return (memory["cuda_bytes"] or memory["rss_bytes"] or 0) / 2**30


def section(anchor: str, title: str, body: str, lead: str = "") -> str:
    """A section of the page. Empty if it has no body."""
    if not body:
        return ""
    intro = f"<p class='lead'>{lead}</p>" if lead else ""
    return f"<section id='{esc(anchor)}'><h2>{esc(title)}</h2>{intro}{body}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1) -> str:
    """An HTML table. The first `words` columns are text, the others are right-aligned numbers."""

    def cells(row: Sequence[object], tag: str) -> str:
        parts = []
        for at, cell in enumerate(row):
            kind = "" if at < words else " class='num'"
            parts.append(f"<{tag}{kind} dir='auto'>{esc(cell)}</{tag}>")
        return "<tr>" + "".join(parts) + "</tr>"

    body = "".join(cells(row, "td") for row in rows)
    return (
        f"<div class='scroll'><table><thead>{cells(head, 'th')}</thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def card(title: str, big: str, lines: Sequence[str]) -> str:
    """One card of the summary: chosen, cost, gained or kept."""
    items = "".join(f"<li>{esc(line)}</li>" for line in lines)
    top = f"<h3>{esc(title)}</h3><p class='big'>{esc(big)}</p>"
    return f"<div class='card'>{top}<ul>{items}</ul></div>"


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, str]]]], head: Sequence[str]) -> str:
    """A table with a bar behind each number, scaled per column."""
    widths = [max((row[at][0] for _, row in rows), default=0) for at in range(len(head) - 1)]
    lines = []
    for name, values in rows:
        cells = "".join(
            f"<td class='num bar'><i style='width:{100 * value / (most or 1):.1f}%'></i>"
            f"<span>{esc(text)}</span></td>"
            for (value, text), most in zip(values, widths, strict=True)
        )
        lines.append(f"<tr><td>{esc(name)}</td>{cells}</tr>")
    names = "".join(f"<th{' class=num' if at else ''}>{esc(h)}</th>" for at, h in enumerate(head))
    return (
        f"<div class='scroll'><table><thead><tr>{names}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def colour(level: float) -> str:
    """Map 0..1 to one hue from light to dark."""
    level = min(1.0, max(0.0, level)) * (len(STOPS) - 1)
    low = min(int(level), len(STOPS) - 2)
    mixed = (
        round(a + (b - a) * (level - low)) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True)
    )
    return "#" + "".join(f"{c:02x}" for c in mixed)


def heat_map(cells: Sequence[Mapping[str, Any]]) -> str:
    """Columns are layers, rows are modules. Colour and number are the selected share, in percent
    of the matrix."""
    layers = list(dict.fromkeys(cell["layer"] for cell in cells))
    modules = list(dict.fromkeys(cell["module"] for cell in cells))
    shares = [_share(cell) for cell in cells]
    most = max((s for s in shares if s is not None), default=0.0) or 1.0
    left, top, high = 8 + 6.6 * max(map(len, modules)), 22, 24
    wide = 34 if len(layers) <= 24 else 30
    parts = []
    for at, layer in enumerate(layers):
        x = left + wide * at + wide / 2
        parts.append(f"<text x='{x:.1f}' y='15' text-anchor='middle'>{esc(layer)}</text>")
    for at, module in enumerate(modules):
        y = top + high * at + 16
        parts.append(f"<text x='{left - 6:.1f}' y='{y}' text-anchor='end'>{esc(module)}</text>")
    for at, (cell, share) in enumerate(zip(cells, shares, strict=True)):
        x = left + wide * layers.index(cell["layer"])
        y = top + high * modules.index(cell["module"])
        fill = "#dddddd" if share is None else colour(share / most)
        ink = "#ffffff" if share is not None and share / most > 0.55 else "#1b1b1b"
        word = "" if share is None else f"{100 * share:.1f}" if share < 0.995 else "100"
        said = f"{cell['name']}: {cell['count']:,} selected" + (
            "" if share is None else f", {percent(share, 2)}"
        )
        parts.append(
            f"<g class='cell' data-cell='{at}'><title>{esc(said)}</title>"
            f"<rect x='{x:.1f}' y='{y}' width='{wide - 1}' height='{high - 1}' fill='{fill}'/>"
            f"<text x='{x + wide / 2 - 0.5:.1f}' y='{y + 15.5}' text-anchor='middle' fill='{ink}'>"
            f"{word}</text></g>"
        )
    width, height = left + wide * len(layers) + 4, top + high * len(modules) + 4
    return (
        f"<div class='scroll'><svg class='heat' role='img' aria-label='mask by layer and module' "
        f"viewBox='0 0 {width:.0f} {height}' width='{width:.0f}' height='{height}'>"
        f"{''.join(parts)}</svg></div>"
    )


def _share(cell: Mapping[str, Any]) -> float | None:
    return cell["count"] / int(np.prod(cell["shape"])) if cell["shape"] else None


def histogram(chosen: np.ndarray, rest: np.ndarray, cut: float | None, label: str) -> str:
    """Stacked histogram of the scores of selected and rejected examples, with the cut-off.

    The x range spans the 0.5 to 99.5 percentiles and the cut-off. Scores outside it are counted in
    the outermost bins.
    """
    both = np.concatenate([chosen, rest])
    if len(both) < 2 or both.min() == both.max():
        return ""
    low, high = (float(edge) for edge in np.percentile(both, [0.5, 99.5]))
    if cut is not None:
        low, high = min(low, cut), max(high, cut)
    if low == high:
        low, high = float(both.min()), float(both.max())
    edges = np.linspace(low, high, 61)
    sides = [np.histogram(np.clip(v, low, high), edges)[0] for v in (rest, chosen)]
    tallest = int((sides[0] + sides[1]).max())
    left, top, wide, tall = 72, 26, 600, 170
    base, step = top + tall, wide / 60
    parts = []
    for at in range(60):
        y = float(base)
        for counts, fill in zip(sides, (REST, CHOSEN), strict=True):
            height = tall * int(counts[at]) / tallest
            y -= height
            if height:
                parts.append(
                    f"<rect x='{left + at * step:.1f}' y='{y:.1f}' width='{step - 0.6:.1f}' "
                    f"height='{height:.1f}' fill='{fill}'/>"
                )

    def across(value: float) -> float:
        return left + wide * (value - low) / (high - low)

    def words(x: float, y: float, anchor: str, text: str) -> str:
        return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{esc(text)}</text>"

    def upright(x: float, y1: float, y2: float, look: str) -> str:
        return f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{y1}' y2='{y2}' {look}/>"

    ticks = {low: "start", high: "end"}
    if low < 0 < high:
        near = {low: across(0) - left < CLOSE, high: left + wide - across(0) < CLOSE}
        ticks = {edge: anchor for edge, anchor in ticks.items() if not near[edge]} | {0: "middle"}
        parts.append(upright(across(0), top, base, "stroke='#888'"))
    for value, anchor in ticks.items():
        parts.append(upright(across(value), base, base + 4, "stroke='#888'"))
        parts.append(words(across(value), base + 16, anchor, f"{value:.3g}"))
    if cut is not None:
        parts.append(upright(across(cut), top, base, "stroke='#1b1b1b' stroke-dasharray='4 3'"))
        at = min(max(across(cut), left + CLOSE), left + wide - CLOSE)
        parts.append(words(at, top - 6, "middle", f"cut-off {cut:.3g}"))
    parts.append(words(left - 6, top + 10, "end", f"{tallest:,}"))
    parts.append(words(left - 6, base, "end", "0"))
    parts.append(f"<line x1='{left}' x2='{left + wide}' y1='{base}' y2='{base}' stroke='#888'/>")
    parts.append(words(left + wide / 2, base + 34, "middle", label))
    middle = f"transform='translate(14 {top + tall / 2}) rotate(-90)' text-anchor='middle'"
    parts.append(f"<text {middle}>examples per bin</text>")
    line = "dashed: the cut-off" if cut is not None else "the two overlap, so there is no cut-off"
    legend = (
        f"<p class='legend'><b style='background:{CHOSEN}'></b> selected "
        f"<b style='background:{REST}'></b> rejected"
        f"{f'; {line}' if len(rest) else ''}. The outermost bars include all scores beyond.</p>"
    )
    size = f"viewBox='0 0 {left + wide + 8} {base + 42}' width='{left + wide + 8}'"
    return (
        f"<div class='scroll'><svg class='chart' role='img' aria-label='histogram of scores' "
        f"{size} height='{base + 42}'>{''.join(parts)}</svg></div>{legend}"
    )


def numbers_of(value: Any, depth: int = 0) -> str:
    """Render any JSON value as tables. A dictionary gives one row per key; a list of flat
    dictionaries gives one table with a column per key."""
    if isinstance(value, Mapping):
        plain = [[k, _leaf(v)] for k, v in value.items() if not _nested(v)]
        text = table(["quantity", "value"], plain) if plain else ""
        for key, inner in value.items():
            if _nested(inner):
                opened = " open" if depth == 0 and len(value) <= 3 else ""
                body = numbers_of(inner, depth + 1)
                text += f"<details{opened}><summary>{esc(key)}</summary>{body}</details>"
        return text
    if isinstance(value, list) and value and all(_flat(row) for row in value):
        head = list(dict.fromkeys(key for row in value for key in row))
        rows = [[_leaf(row.get(key)) for key in head] for row in value[:200]]
        more = f"<p>{len(value) - 200:,} more rows in the JSON.</p>" if len(value) > 200 else ""
        return table(head, rows) + more
    if isinstance(value, list) and any(_nested(v) for v in value):
        return "".join(numbers_of(v, depth + 1) for v in value[:50])
    return f"<p>{esc(_leaf(value))}</p>"


def _flat(row: Any) -> bool:
    return isinstance(row, Mapping) and not any(_nested(v) for v in row.values())


def _nested(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(v, Mapping | list) for v in value)


def _leaf(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list):
        shown = ", ".join(_leaf(v) for v in value[:40])
        return shown + (f", … ({len(value):,} in all)" if len(value) > 40 else "")
    return str(value)
