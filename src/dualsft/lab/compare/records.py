"""Finished cells of a comparison: their values, tuned settings, frontiers, paired differences.

Reads the run folders of `lab/compare/cells.py`. Cells whose split or evaluation settings differ
from the first cell's are left out, so a table never mixes them.

With `tune`, every cell is run once per value of a grid that all methods share. `tuned` keeps, per
method, the value with the lowest loss on one evaluation file that is used for nothing else (mean
over seeds); what the others cost is the cost of tuning. A method's frontier is the loss of the new
skill (the first evaluation file) against the mean KL to the base on the other files, over the grid.
`equal_kl` compares methods at one KL, that of the tuned reference: between two points of the grid
losses are interpolated, from the base model (KL 0) on; beyond the last point nothing is
extrapolated. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dualsft.errors import RunError
from dualsft.lab.compare.matrix import Cell, Matrix, effective_rate
from dualsft.lab.report.facts import peak_gib
from dualsft.runs.pipeline import finished
from dualsft.runs.preflight import read_manifests, reading
from dualsft.storage.manifest import damage, read_stage_manifest
from dualsft.system.paths import RunPath

CHOOSING = ("warmup", "gradients", "scores", "selection")
RESAMPLES = 2000


@dataclass(frozen=True)
class CellRecord:
    """One finished cell."""

    cell: Cell
    folder: RunPath
    values: Mapping[str, float | None]
    base: Mapping[str, float | None]
    """The values of the base model, where they exist."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage by fingerprint; stages that cells share have the same."""


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
                rate = effective_rate(matrix.config(cell))
                values["lr"] = rate if isinstance(rate, float) else None
                stages = {m["fingerprint"]["hash"]: m["seconds"] for m in manifests.values()}
                base = measures(results, "before")
                records.append(CellRecord(cell, folder, values, base, stages))
    return records, missing


def measures(results: Mapping[str, Any], side: str) -> dict[str, float | None]:
    """Benchmark scores, aggregates, losses and KL for one side: before or after fine-tuning."""
    found: dict[str, Any] = {}
    for name, task in (results.get("tasks") or {}).items():
        found[f"task.{name}"] = task[side]["score"]
    for key, value in ((results.get("summary") or {}).get(side) or {}).items():
        found[f"summary.{key}"] = value
    for name, facts in results["files"].items():
        found[f"loss.{name}"] = facts[side]["loss"]
        found[f"kl.{name}"] = facts[side].get("kl_to_base", 0.0)
    return {key: None if value is None else float(value) for key, value in found.items()}


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


# --- tuning --------------------------------------------------------------------------------------


def tuned(matrix: Matrix, records: Sequence[CellRecord]) -> tuple[list[CellRecord], list[str]]:
    """(records at the best value of each method, notes): the mean loss over seeds decides.

    A value that lacks a seed which another has does not compete. The records get the seconds that
    the other values took, without the stages that they share with it.
    """
    if matrix.tune is None:
        return list(records), []
    key, kept, notes = f"loss.{matrix.tune.on}", [], []
    order = [choice.name for choice in matrix.tune.grid]
    for (where, method), values in by_value(records).items():
        most = max(map(len, values.values()))
        losses = {
            name: float(np.mean([_number(record.values, key) for record in own]))
            for name, own in values.items()
            if len(own) == most
        }
        best = min(losses, key=lambda name: losses[name])
        title = " · ".join([*(w for w in where if w != "default"), method])
        if len(order) > 1 and best in (order[0], order[-1]):
            notes.append(f"{title}: {best} is the best and at the edge of the grid")
        for record in values[best]:
            spent = {
                stage: seconds
                for name, own in values.items()
                for other in own
                if name != best and other.cell.seed == record.cell.seed
                for stage, seconds in other.stages.items()
                if stage not in record.stages
            }
            cost = {"tuning_seconds": sum(spent.values())}
            kept.append(replace(record, values={**record.values, **cost}))
    return kept, notes


def by_value(
    records: Sequence[CellRecord],
) -> dict[tuple[Where, str], dict[str, list[CellRecord]]]:
    """Records by place and method, then by value of the grid."""
    found: dict[tuple[Where, str], dict[str, list[CellRecord]]] = defaultdict(dict)
    for record in records:
        cell = record.cell
        values = found[place_of(cell), cell.method.name]
        values.setdefault(cell.value.name, []).append(record)
    return found


def _number(values: Mapping[str, float | None], key: str) -> float:
    value = values[key]
    assert value is not None
    return value


@dataclass(frozen=True)
class Skills:
    """The evaluation files of a frontier: one of the new skill, the others of old behaviour."""

    new: str
    old: tuple[str, ...]

    @classmethod
    def of(cls, matrix: Matrix, records: Sequence[CellRecord]) -> Skills | None:
        """The first file, and the others without the one that decides; None without the latter."""
        unused = ("validation", matrix.tune.on if matrix.tune else None)
        keys = records[0].values if records else []
        files = [key[5:] for key in keys if key.startswith("loss.") and key[5:] not in unused]
        return cls(files[0], tuple(files[1:])) if len(files) > 1 else None

    def point(self, values: Mapping[str, float | None]) -> tuple[float, float]:
        """(mean KL to the base on old behaviour, loss of the new skill)."""
        kl = float(np.mean([_number(values, f"kl.{name}") for name in self.old]))
        return kl, _number(values, f"loss.{self.new}")


def frontiers(records: Sequence[CellRecord], skills: Skills) -> list[dict[str, Any]]:
    """KL and loss of every method at every value of the grid, means over seeds, for figures."""
    found = []
    for (where, method), values in by_value(records).items():
        points = []
        for name, own in values.items():
            kl, loss = np.mean([skills.point(record.values) for record in own], axis=0)
            points.append({"value": name, "kl": float(kl), "loss": float(loss), "seeds": len(own)})
        base = np.mean([skills.point(record.base)[1] for own in values.values() for record in own])
        points.append({"value": "base model", "kl": 0.0, "loss": float(base), "seeds": 0})
        points.sort(key=lambda point: point["kl"])
        found.append({"where": " · ".join(where), "method": method, "points": points})
    return found


def equal_kl(
    records: Sequence[CellRecord], best: Sequence[CellRecord], skills: Skills, reference: str
) -> tuple[list[CellRecord], list[Difference]]:
    """(the tuned records with their method's loss at the reference's KL, paired differences to it).

    With every seed, the target is the KL of the tuned reference of that seed. A method whose grid
    ends below it has no value there.
    """
    kept: list[CellRecord] = []
    apart: dict[tuple[Where, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sole = {(place_of(r.cell), r.cell.seed): r for r in best if r.cell.method.name == reference}
    groups = by_value(records)
    for record in best:
        where, method = place_of(record.cell), record.cell.method.name
        ours = sole.get((where, record.cell.seed))
        at_target = None
        if ours is not None:
            values = groups[where, method].values()
            curve = [r for own in values for r in own if r.cell.seed == record.cell.seed]
            at_target = _interpolated(curve, skills, skills.point(ours.values)[0])
        if at_target is not None and ours is not None:
            their_losses = _losses(ours.folder, skills.new)["after"]
            for example, loss in at_target.items():
                apart[where, method][example].append(loss - their_losses[example])
        mean = None if at_target is None else float(np.mean(list(at_target.values())))
        kept.append(replace(record, values={**record.values, "loss_at_kl": mean}))
    what = f"loss {skills.new} at equal KL"
    found = [
        _bootstrap(
            " · ".join(w for w in where if w != "default"),
            method,
            what,
            np.array([np.mean(losses[example]) for example in sorted(losses)]),
        )
        for (where, method), losses in apart.items()
        if method != reference
    ]
    return kept, found


def _interpolated(
    curve: Sequence[CellRecord], skills: Skills, target: float
) -> dict[str, float] | None:
    """Loss of each example at this KL, between the two nearest points; None beyond the last."""
    points = sorted(curve, key=lambda record: skills.point(record.values)[0])
    kls = [0.0, *(skills.point(record.values)[0] for record in points)]
    if target > kls[-1]:
        return None
    above = max(1, int(np.searchsorted(kls, target)))
    low, high = kls[above - 1], kls[above]
    share = (target - low) / (high - low) if high > low else 1.0
    upper = _losses(points[above - 1].folder, skills.new)
    lower = upper["before"]
    if above > 1:
        lower = _losses(points[above - 2].folder, skills.new)["after"]
    return {
        example: (1.0 - share) * lower[example] + share * loss
        for example, loss in upper["after"].items()
    }


def _losses(folder: RunPath, name: str) -> dict[str, dict[str, float]]:
    """Losses of the examples of one evaluation file, before and after fine-tuning."""
    path = _unchanged(folder, "losses.parquet")
    with reading(path):
        table = path.read_table().to_pydict()
        own = [i for i, one in enumerate(table["set"]) if one == name]
        return {
            side: {str(table["id"][i]): float(table[f"loss_{side}"][i]) for i in own}
            for side in ("before", "after")
        }


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
    found: dict[tuple[str, str], float] = {}
    path = _unchanged(folder, "losses.parquet")
    with reading(path):
        losses = path.read_table().to_pydict()
        for name, i, loss, kl in zip(
            losses["set"], losses["id"], losses["loss_after"], losses["kl"], strict=True
        ):
            found[f"loss {name}", str(i)] = float(loss)
            found[f"KL {name}", str(i)] = float(kl)
    if (folder / "7_evaluation/samples.jsonl").is_file():
        samples = _unchanged(folder, "samples.jsonl")
        with reading(samples):
            for line in samples.read_text().split("\n"):  # splitlines would split inside texts
                if line:
                    one = json.loads(line)
                    found[str(one["task"]), str(one["id"])] = float(one["score_after"])
    return found


def _unchanged(folder: RunPath, name: str) -> RunPath:
    """A file of the evaluation, after a check of its hash: what it holds is shown in tables."""
    stage = folder / "7_evaluation"
    manifest, wrong = read_stage_manifest(stage)
    reasons = [wrong] if wrong else damage(stage, manifest, only={name})[0]
    if reasons:
        raise RunError(f"{stage}: {reasons[0]}; run the same `dualsft compare` again")
    return stage / name


def _bootstrap(where: str, method: str, what: str, apart: np.ndarray) -> Difference:
    rng, count = np.random.default_rng(0), len(apart)
    means = [apart[rng.integers(0, count, count)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(where, method, what, float(apart.mean()), float(low), float(high), count)
