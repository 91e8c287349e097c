"""What the cells of a comparison measured: one record a cell, means over seeds, differences.

Reads the run folders that `comparing.py` made and computes tables from them, nothing else: results
(benchmarks where they were run, otherwise losses and KL), resources (shares, passes, seconds, peak
memory; the paper's accounting), and paired differences to a reference over the same examples. Cells
whose evaluation or split were made with other settings than the rest are refused: a table never
mixes them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dualsft.comparing import Cell, Matrix, Table
from dualsft.errors import RunError
from dualsft.report import peak_gib, read_manifests

CHOOSING = ("warmup", "gradients", "scores", "selection")
RESAMPLES = 2000
BASE = "base model"
REFERENCE = "reference"


@dataclass(frozen=True)
class Column:
    """One measured quantity; `better` is +1 where larger is better, -1 smaller, 0 neither."""

    key: str
    title: str
    better: int
    digits: int = 3
    percent: bool = False


@dataclass(frozen=True)
class Record:
    """One finished cell."""

    cell: Cell
    folder: Path
    values: Mapping[str, float | None]
    base: Mapping[str, float | None]
    """The same of the base model, where it has them."""


@dataclass(frozen=True)
class Value:
    """Mean and standard deviation over seeds."""

    mean: float
    std: float | None
    count: int


@dataclass
class Row:
    """A method in a table."""

    group: str
    name: str
    values: dict[str, Value]
    place: dict[str, int] = field(default_factory=dict)
    """1 for the best in a column, 2 for the second, …"""
    rank: int | None = None
    """Place within its group by overall, or by the first judged column."""


@dataclass
class Result:
    """A table, ready to be written."""

    title: str
    kind: str
    columns: list[Column]
    rows: list[Row]
    mark: int
    missing: list[str]
    """Cells that are not there."""


# --- reading cells -------------------------------------------------------------------------------


def collect(matrix: Matrix, out: Path) -> tuple[list[Record], list[str]]:
    """(every finished cell, the titles of those that are missing); refuses to mix settings."""
    records, missing = [], []
    seen: dict[str, tuple[Any, str]] = {}
    for cell in matrix.cells():
        folder = out / cell.path
        manifests = read_manifests(folder)[0] if folder.is_dir() else {}
        if "evaluation" not in manifests:
            missing.append(cell.title)
            continue
        for key, stage in (
            ("evaluation", "evaluation"),
            (f"split of {cell.model.name} · {cell.data.name} · seed {cell.seed}", "split"),
        ):
            made = manifests[stage]["fingerprint"]["settings"]
            first = seen.setdefault(key, (made, cell.title))
            if first[0] != made:
                odd = sorted(k for k in {*made, *first[0]} if made.get(k) != first[0].get(k))
                raise RunError(
                    f"{cell.title} and {first[1]} were made with other settings of the {key} "
                    f"({', '.join(odd)}): they cannot be in one table; run `dualsft compare` "
                    "again, which makes what is out of date"
                )
        records.append(_record(cell, folder, manifests))
    return records, missing


def _record(cell: Cell, folder: Path, manifests: Mapping[str, Any]) -> Record:
    results = json.loads((folder / "7_evaluation/results.json").read_text())
    after, before = measures(results, "after"), measures(results, "before")
    return Record(cell, folder, after | resources(folder, manifests), before)


def measures(results: Mapping[str, Any], side: str) -> dict[str, float | None]:
    """Benchmark scores, their aggregates, losses and KL of one side of an evaluation."""
    found: dict[str, float | None] = {}
    for name, task in (results.get("tasks") or {}).items():
        found[f"task.{name}"] = task[side]["score"]
    for key, value in ((results.get("summary") or {}).get(side) or {}).items():
        found[f"summary.{key}"] = value
    for name, facts in results["files"].items():
        found[f"loss.{name}"] = facts[side]["loss"]
        found[f"kl.{name}"] = facts[side].get("kl_to_base", 0.0)
    return found


def resources(folder: Path, manifests: Mapping[str, Any]) -> dict[str, float | None]:
    """What the cell took, measured the same way whatever the method."""
    chosen = json.loads((folder / "5_selection/summary.json").read_text())
    tuned = json.loads((folder / "6_finetune/summary.json").read_text())
    counts = json.loads((folder / "1_split/summary.json").read_text())["counts"]
    num_full = sum(counts.values())
    reads = [s for s in CHOOSING if s == "selection" or s in _reads(manifests)]
    accounts = manifests["selection"]["facts"]["accounts"].values()
    seen = sum(a["forward_examples"] + a["backward_examples"] for a in accounts)
    if "warmup" in reads:
        seen += counts["warm"]
    if "gradients" in reads:
        two_pass = "f" not in pq.read_schema(folder / "3_gradients/pool.parquet").names
        per_example = manifests["scores"]["fingerprint"]["settings"].get("per-example scores")
        seen += counts["val"] + counts["anchor"] + counts["pool"] * (1 + (two_pass and per_example))
    seconds = {stage: manifests[stage]["seconds"] for stage in manifests}
    return {
        "data_share": tuned["examples"] / num_full,
        "param_share": tuned["trained_entries"] / tuned["num_parameters"],
        "passes": seen / num_full,
        "selection_seconds": sum(seconds[s] for s in reads),
        "total_seconds": sum(seconds[s] for s in (*reads, "split", "finetune")),
        "selection_gib": max(peak_gib(manifests[s]) for s in reads),
        "finetune_gib": peak_gib(manifests["finetune"]),
        "budget_share": chosen.get("share"),
    }


def _reads(manifests: Mapping[str, Any]) -> set[str]:
    return set(manifests["selection"]["fingerprint"]["reads"])


# --- tables --------------------------------------------------------------------------------------

RESOURCES = [
    Column("data_share", "data %", 0, 1, percent=True),
    Column("param_share", "parameters %", 0, 2, percent=True),
    Column("passes", "passes to select", -1, 2),
    Column("selection_seconds", "selection, s", -1, 1),
    Column("total_seconds", "end to end, s", -1, 1),
    Column("selection_gib", "peak of selection, GiB", -1, 2),
    Column("finetune_gib", "peak of fine-tuning, GiB", -1, 2),
]


def result_columns(records: Sequence[Record]) -> list[Column]:
    """Benchmarks and their aggregates where every cell has them, otherwise losses and KL."""
    keys = list(records[0].values) if records else []
    columns = [Column(k, k.partition(".")[2], 1, 1, percent=True) for k in keys if "task." in k]
    columns += [
        Column(k, k.partition(".")[2], 1, 1, percent=True)
        for k in keys
        if k.startswith("summary.") and all(r.values.get(k) is not None for r in records)
    ]
    if columns:
        return columns
    for key in keys:
        kind, _, name = key.partition(".")
        if kind in ("loss", "kl"):
            columns.append(Column(key, f"{'KL' if kind == 'kl' else kind} {name}", -1, 4))
    return columns


def make_table(
    table: Table, matrix: Matrix, records: Sequence[Record], missing: Sequence[str]
) -> list[Result]:
    """The table for every model, data and budget of the matrix."""
    found: list[Result] = []
    names = [choice.name for choice in matrix.methods]
    groups = table.groups or {"": [name for name in names if name not in table.reference]}
    split: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        cell = record.cell
        split[cell.model.name, cell.data.name, cell.budget.name].append(record)
    for where, part in split.items():
        columns = RESOURCES if table.kind == "resources" else result_columns(part)
        if table.kind == "forgetting":
            columns = [*result_columns(part), *RESOURCES[:2], RESOURCES[4]]
        rows = [] if table.kind == "resources" else [Row("", BASE, _base_values(part, columns))]
        for group, members in {REFERENCE: table.reference, **groups}.items():
            for name in members:
                own = [r for r in part if r.cell.method.name == name]
                if own:
                    rows.append(Row(group, name, _values([r.values for r in own], columns)))
        _rank(rows, columns, table.within)
        shown = [w for w in where if w != "default"]
        title = " · ".join([table.title, *shown])
        gone = [m for m in missing if all(w in m for w in shown)]
        found.append(Result(title, table.kind, columns, rows, table.mark, gone))
    return found


def _base_values(records: Sequence[Record], columns: Sequence[Column]) -> dict[str, Value]:
    by_seed = {r.cell.seed: r.base for r in records}
    return _values(list(by_seed.values()), columns)


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


def _rank(rows: list[Row], columns: Sequence[Column], within: str) -> None:
    """Places in each column, within groups or over the table, and ranks within groups.

    Equal means share a place; the base model and the references have none.
    """
    competing = [row for row in rows if row.name != BASE and row.group != REFERENCE]
    for column in columns:
        have = [row for row in competing if column.better and column.key in row.values]
        for row in have:
            rivals = [o for o in have if within == "table" or o.group == row.group]
            own = column.better * row.values[column.key].mean
            row.place[column.key] = 1 + sum(
                column.better * other.values[column.key].mean > own for other in rivals
            )
    judged = [c for c in columns if c.better and c not in RESOURCES]
    if not judged:
        return
    main = next((c for c in judged if c.key == "summary.overall"), judged[0])
    for group in {row.group for row in competing}:
        own = [row for row in competing if row.group == group and main.key in row.values]
        own.sort(key=lambda row: -main.better * row.values[main.key].mean)
        for rank, row in enumerate(own, 1):
            row.rank = rank


# --- paired differences --------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A method less the reference on the same examples: mean and a 95 % interval."""

    method: str
    what: str
    mean: float
    low: float
    high: float
    pairs: int


def differences(records: Sequence[Record], reference: str) -> list[Difference]:
    """Loss on every evaluation set, and benchmark scores, paired by example and seed."""
    found: list[Difference] = []
    ours = {r.cell.seed: _per_example(r.folder) for r in records if r.cell.method.name == reference}
    for method in dict.fromkeys(r.cell.method.name for r in records):
        if method == reference:
            continue
        pairs: dict[str, list[float]] = defaultdict(list)
        for record in records:
            if record.cell.method.name != method or record.cell.seed not in ours:
                continue
            theirs, base = _per_example(record.folder), ours[record.cell.seed]
            for key in theirs.keys() & base.keys():
                pairs[key[0]].append(theirs[key] - base[key])
        for what in sorted(pairs):
            found.append(_bootstrap(method, what, np.array(pairs[what])))
    return found


def _per_example(folder: Path) -> dict[tuple[str, str], float]:
    """(quantity, example) to value: losses of the tuned model, and scores of benchmark items."""
    losses = pq.read_table(folder / "7_evaluation/losses.parquet").to_pydict()
    found = {
        (f"loss {name}", str(i)): float(value)
        for name, i, value in zip(losses["set"], losses["id"], losses["loss_after"], strict=True)
    }
    samples = folder / "7_evaluation/samples.jsonl"
    if samples.is_file():
        for line in samples.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            found[str(one["task"]), str(one["id"])] = float(one["score_after"])
    return found


def _bootstrap(method: str, what: str, apart: np.ndarray) -> Difference:
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(apart), (RESAMPLES, len(apart)))
    means = np.array([apart[rows].mean() for rows in drawn])
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float(apart.mean())
    assert math.isfinite(mean)
    return Difference(method, what, mean, float(low), float(high), len(apart))
