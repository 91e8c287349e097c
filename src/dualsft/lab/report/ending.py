"""The lines that end `dualsft run` and `dualsft quickstart`: the results in short.

The loss on each evaluation file before and after with its KL to the base, the benchmarks, what was
selected, and the files to look at next. Read from the summaries of a run folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dualsft.lab.report.facts import Facts, competitors, percent
from dualsft.runs.preflight import FOLDERS, load_summaries
from dualsft.system.paths import RunPath

NEXT = {
    "report.html": "everything, in one page",
    f"{FOLDERS['selection']}/selected.jsonl": "the selected rows",
    f"{FOLDERS['finetune']}/model": "the fine-tuned model, a Hugging Face folder",
    f"{FOLDERS['finetune']}/delta.safetensors": "only what changed in it",
}
"""Files that a run made, and what they are."""


def ending(run: RunPath) -> Iterator[str]:
    """All lines, for any finished run."""
    facts = load_summaries(run)
    yield ""
    yield from losses(facts)
    yield from _benchmarks(facts)
    yield from selected(facts)
    yield ""
    yield from files(run)


def losses(facts: Facts, names: Sequence[str] = ()) -> Iterator[str]:
    """The loss of each evaluation file, or of those named, before and after; the KL to the base."""
    found: Mapping[str, Any] = facts.get("evaluation", {}).get("files", {})
    rows = {name: found[name] for name in names or found}
    if not rows:
        return
    titles = {name: _title(name) for name in rows}
    width = max(18, *(len(title) + 1 for title in titles.values()))
    yield f"{'loss':<{width}}{'before':>8}{'after':>9}"
    for name, result in rows.items():
        before, after = result["before"]["loss"], result["after"]["loss"]
        kl = result["after"]["kl_to_base"]
        yield f"{titles[name]:<{width}}{before:8.3f}{after:9.3f}   KL to base {kl:.3f}"
    if [*rows] == ["validation"]:
        yield "old behaviour was not measured: evaluation.files=NAME:FILE adds rows of it"
    yield ""


def _title(name: str) -> str:
    return "new skill (validation)" if name == "validation" else name.replace("_", " ")


def _benchmarks(facts: Facts) -> Iterator[str]:
    tasks: Mapping[str, Any] = facts.get("evaluation", {}).get("tasks") or {}
    for name, task in tasks.items():
        before, after = (percent(task[when]["score"]) for when in ("before", "after"))
        yield f"{name:<18}{before:>8}{after:>9}"
    if tasks:
        yield ""


def selected(facts: Facts) -> Iterator[str]:
    """How many rows and parameters were selected, of how many."""
    chosen: Mapping[str, Any] = facts.get("selection", {})
    if "b" in chosen:
        share = percent(chosen["data_share"], 2)
        yield f"rows selected: {chosen['b']:,} of {chosen['num_full']:,} ({share})"
    if "k" in chosen:
        share, of = percent(chosen["share"], 2), competitors(chosen)
        yield f"parameters selected: {chosen['k']:,} of {chosen['denominator']:,} {of} ({share})"


def files(run: RunPath) -> Iterator[str]:
    """The files to look at next."""
    yield f"run folder: {run}"
    there = {name: what for name, what in NEXT.items() if run.joinpath(*name.split("/")).exists()}
    for name, what in there.items():
        yield f"  {name:<32} {what}"
