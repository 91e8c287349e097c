"""The tables of docs/results.md from the raw files beside it; `docs/generate.py` puts them in."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).with_name("measured") / "smollm2_gsm8k"
BASE, OWN = "base model", "dualsft"
FILES = {"gsm8k_test": "GSM8K test", "alpaca": "Alpaca", "code": "code"}
TASKS = {
    "gsm8k": "GSM8K, 5-shot, strict",
    "mmlu": "MMLU, 5-shot",
    "arc_challenge": "ARC-Challenge, 0-shot",
    "piqa": "PIQA, 0-shot",
    "humaneval": "HumanEval, 0-shot",
}
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "data_share": ("data %", lambda x: f"{100 * x:.0f}"),
    "param_share": ("parameters %", lambda x: f"{100 * x:.2f}"),
    "passes": ("passes to select", lambda x: f"{x:.2f}"),
    "selection_gib": ("peak of selection, GiB", lambda x: f"{x:.2f}"),
    "finetune_gib": ("peak of fine-tuning, GiB", lambda x: f"{x:.2f}"),
}


def read(name: str) -> Any:
    return json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def tables() -> dict[str, str]:
    """Every table by the name that its place in the page has."""
    comparison = read("comparison")
    results, resources = comparison["tables"]
    differences = {(d["method"], d["what"]): d for d in comparison["differences"]}
    return {
        "losses": losses(results["rows"], differences),
        "costs": costs(results["rows"], resources["rows"]),
        "benchmarks": benchmarks(results["rows"], read("benchmarks")),
        "seeds": seeds(results["rows"], read("seeds")),
    }


def losses(rows: Sequence[Mapping[str, Any]], differences: Mapping[tuple[str, str], Any]) -> str:
    """Losses, their paired differences to DualSFT, and KL to the base model on old behaviour."""
    head = ["", "method"]
    for title in FILES.values():
        head += [title, "less DualSFT's"]
    lines = [[*head, "KL Alpaca", "KL code"]]
    for row, label in _labelled(rows):
        line = label
        for key in FILES:
            found = differences.get((row["name"], f"loss {key}"))
            line += [f"{_mean(row, f'loss.{key}'):.3f}", "" if found is None else _interval(found)]
        line += [f"{_mean(row, f'kl.{key}'):.2f}" for key in ("alpaca", "code")]
        lines.append(line)
    return _markdown(lines)


def costs(rows: Sequence[Mapping[str, Any]], resources: Sequence[Mapping[str, Any]]) -> str:
    """What each method took, in the order of the other tables."""
    by_name = {row["name"]: row for row in resources}
    lines = [["method", *(title for title, _ in COSTS.values())]]
    for row in rows:
        if row["name"] != BASE:
            own = by_name[row["name"]]
            lines.append(
                [row["name"], *(show(_mean(own, key)) for key, (_, show) in COSTS.items())]
            )
    return _markdown(lines)


def benchmarks(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    """Scores with Wilson intervals, the paper's three summaries, answers out of format."""
    head = ["", "method", *TASKS.values(), "stability", "plasticity", "overall", "out of format"]
    lines = [head]
    for row, line in _labelled(rows):
        side = "before" if row["name"] == BASE else "after"
        one = found[OWN if row["name"] == BASE else row["name"]]
        for task in TASKS:
            facts = one["tasks"][task][side]
            low, high = (100 * x for x in facts["interval"])
            line.append(f"{100 * facts['score']:.1f} [{low:.1f}, {high:.1f}]")
        three = one["summary"][side]
        line += [f"{100 * three[key]:.1f}" for key in ("stability", "plasticity", "overall")]
        wrong = one["tasks"]["gsm8k"][side]["format_error_rate"]
        lines.append([*line, f"{100 * wrong:.1f} %"])
    return _markdown(lines)


def seeds(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    """Mean ± deviation over seeds, of losses and of their differences to DualSFT's of that seed."""
    head = ["", "method"]
    for title in FILES.values():
        head += [title, "less DualSFT's"]
    lines = [head]
    for row, line in _labelled([row for row in rows if row["name"] in found]):
        for key in FILES:
            own = {seed: one[key]["loss"] for seed, one in found[row["name"]].items()}
            less = [loss - found[OWN][seed][key]["loss"] for seed, loss in own.items()]
            line.append(_spread(list(own.values()), "{:.3f}".format))
            line.append("" if row["name"] == OWN else _spread(less, _signed))
        lines.append(line)
    return _markdown(lines)


def _labelled(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Each row with its first cells: the group where it begins, and the method."""
    found, group = [], ""
    for row in rows:
        name = f"**{OWN}**" if row["name"] == OWN else row["name"]
        found.append((row, ["" if row["group"] == group else row["group"], name]))
        group = row["group"]
    return found


def _mean(row: Mapping[str, Any], key: str) -> float:
    return row["values"][key]["mean"]


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    return f"{show(statistics.mean(values))} ± {statistics.stdev(values):.3f}"


def _interval(found: Mapping[str, float]) -> str:
    return f"{_signed(found['mean'])} [{_signed(found['low'])}, {_signed(found['high'])}]"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in tables().items():
        mark, end = f"<!-- {name} -->", "<!-- end -->"
        before, rest = page.split(mark)
        page = f"{before}{mark}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return page
