"""`tune` in a comparison: the value that is kept, its cost, frontiers, and losses at equal KL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import corpus_rows, small_run, write_jsonl
from matrices import matrix_of, run_all
from places import place

from dualsft.errors import ConfigError
from dualsft.lab.compare.matrix import Matrix
from dualsft.lab.compare.records import collect, tuned
from dualsft.lab.compare.tables import write_tables

RATIOS, SEEDS = (0.5, 2, 8), (1, 2)
TUNE = {"on": "apart", "method.lr_ratio": list(RATIOS)}
TABLES = [
    {"title": "Results"},
    {"title": "Frontier", "kind": "frontier", "within": "table"},
    {"title": "Resources", "kind": "resources"},
]


def words_of(model: Path, corpus: Path, folder: Path) -> list[str]:
    """A short run with files of the new skill, of old behaviour, and one that decides."""
    names = ("new", "old", "apart")
    files = [
        f"{name}:{write_jsonl(folder / f'{name}.jsonl', corpus_rows(12, seed=20 + i))}"
        for i, name in enumerate(names)
    ]
    return [*small_run(model, corpus), f"evaluation.files={','.join(files)}"]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path], corpus: Path
) -> tuple[Matrix, Path, dict[str, Any]]:
    """A comparison over three rates and two seeds, and its comparison.json."""
    folder = tmp_path_factory.mktemp("tuning")
    words = words_of(model_folder("llama"), corpus, folder)
    rows = ["sft", "random+random", "dualsft"]
    matrix = matrix_of(folder, words, methods=rows, seeds=SEEDS, tune=TUNE, tables=TABLES)
    out = folder / "out"
    run_all(matrix, out)
    write_tables(matrix, place(out), "dualsft")
    return matrix, out, json.loads((out / "comparison.json").read_text())


def losses_of(run: Path, name: str, column: str) -> np.ndarray:
    table = pq.read_table(run / "7_evaluation/losses.parquet").to_pandas()
    return table[table["set"] == name].sort_values("id")[column].to_numpy()


def run_of(out: Path, method: str, ratio: float, seed: int) -> Path:
    return out / f"cells/default/default/default/{method}/method.lr_ratio={ratio}/seed-{seed}"


def test_each_method_keeps_its_best_value_over_all_seeds(made: Any) -> None:
    matrix, out, content = made
    for method in (choice.name for choice in matrix.methods):
        means = {
            ratio: np.mean(
                [losses_of(run_of(out, method, ratio, s), "apart", "loss_after") for s in SEEDS]
            )
            for ratio in RATIOS
        }
        best = min(means, key=lambda ratio: means[ratio])
        kept = [one["value"] for one in content["tuned"] if f" {method} " in one["cell"]]
        assert kept == [f"method.lr_ratio={best}"] * len(SEEDS), (method, means)
        edge = any(f"{method}: method.lr_ratio={best} is" in note for note in content["notes"])
        assert edge == (best in (RATIOS[0], RATIOS[-1]))
        results = next(t for t in content["tables"] if t["title"] == "Results")
        row = next(row for row in results["rows"] if row["name"] == method)
        here = [losses_of(run_of(out, method, best, s), "new", "loss_after").mean() for s in SEEDS]
        assert row["values"]["loss.new"]["mean"] == pytest.approx(np.mean(here), abs=1e-9)
        assert row["seeds"] == len(SEEDS)


def test_a_rate_of_fine_tuning_repeats_no_selection(made: Any) -> None:
    _, out, _ = made
    for stage in ("4_scores/summary.json", "5_selection/mask.safetensors"):
        files = {(run_of(out, "dualsft", r, 1) / stage).stat().st_ino for r in RATIOS}
        assert len(files) == 1, "linked, not made again"


def test_the_cost_of_tuning_is_what_the_other_values_took(made: Any) -> None:
    """Their fine-tuning and evaluation; shared stages count once, with the kept value."""
    matrix, out, content = made
    records, _ = collect(matrix, place(out))
    for record in tuned(matrix, records)[0]:
        cell, spent = record.cell, 0.0
        for ratio in RATIOS:
            if cell.value.name != f"method.lr_ratio={ratio}":
                run = run_of(out, cell.method.name, ratio, cell.seed)
                for stage in ("6_finetune", "7_evaluation"):
                    spent += json.loads((run / stage / "manifest.json").read_text())["seconds"]
        assert record.values["tuning_seconds"] == pytest.approx(spent)
    resources = next(t for t in content["tables"] if t["kind"] == "resources")
    assert all("tuning_seconds" in row["values"] for row in resources["rows"])


def test_losses_at_equal_kl_are_interpolated_per_example(made: Any) -> None:
    """Against np.interp over each example, and nothing beyond the grid."""
    _, out, content = made
    kept = {one["cell"].rsplit(" · ", 1)[0]: one["value"] for one in content["tuned"]}
    value = next(v for cell, v in kept.items() if " dualsft " in cell)
    best = float(value.partition("=")[2])
    frontier = next(t for t in content["tables"] if t["kind"] == "frontier")
    rows = {row["name"]: row["values"] for row in frontier["rows"]}
    apart = {d["method"]: d for d in content["differences"] if d["what"].endswith("at equal KL")}
    for method in ("sft", "random+random"):
        found, pairs = [], []
        for seed in SEEDS:
            ours = run_of(out, "dualsft", best if best % 1 else int(best), seed)
            target = losses_of(ours, "old", "kl").mean()
            runs = [run_of(out, method, ratio, seed) for ratio in RATIOS]
            kls = [0.0, *(losses_of(run, "old", "kl").mean() for run in runs)]
            order = np.argsort(kls)
            curve = [
                losses_of(runs[0], "new", "loss_before"),
                *(losses_of(run, "new", "loss_after") for run in runs),
            ]
            if target <= max(kls):
                points = np.array(curve)[order].T
                at = [np.interp(target, np.array(kls)[order], one) for one in points]
                found.append(np.mean(at))
                pairs.append(np.array(at) - losses_of(ours, "new", "loss_after"))
        if not found:
            assert "loss_at_kl" not in rows[method] and method not in apart
            continue
        assert rows[method]["loss_at_kl"]["count"] == len(found)
        assert rows[method]["loss_at_kl"]["mean"] == pytest.approx(np.mean(found), abs=1e-9)
        assert apart[method]["mean"] == pytest.approx(np.mean(pairs), abs=1e-9)
    assert any("loss_at_kl" in rows[method] for method in ("sft", "random+random"))
    ours = rows["dualsft"]
    assert ours["loss_at_kl"]["mean"] == pytest.approx(ours["loss.new"]["mean"], abs=1e-9)
    assert ours["lr"]["mean"] == pytest.approx(best * 1e-3)


def test_frontiers_run_from_the_base_over_the_grid(made: Any) -> None:
    matrix, out, content = made
    curves = {curve["method"]: curve["points"] for curve in content["frontiers"]}
    assert curves.keys() == {choice.name for choice in matrix.methods}
    for points in curves.values():
        assert points[0]["value"] == "base model" and points[0]["kl"] == 0
        assert len(points) == 1 + len(RATIOS)
        assert [p["kl"] for p in points] == sorted(p["kl"] for p in points)
    assert (out / "grid_default___default___default.svg").stat().st_size > 0
    page = (out / "comparison.html").read_text()
    assert "grid default" in page and "Frontier" in page
    assert "at the KL of dualsft" in (out / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("tune", "said"),
    [
        ({"method.lr_ratio": [1, 2]}, "tune: .*`on: FILE`"),
        ({"on": "apart"}, "tune: .*lists of values"),
        ({"on": "apart", "method.lr_ratio": 2}, "tune.method.lr_ratio: 2 .*a list of values"),
        ({"on": "apart", "method.lr_ratio": [2, 2]}, "given twice"),
        ({"on": "nowhere", "method.lr_ratio": [1, 2]}, "not in evaluation.files .*add a file"),
        ({"on": "apart", "method.lr_ration": [1, 2]}, "method.lr_ration"),
    ],
)
def test_a_wrong_grid_is_refused(
    tune: Any, said: str, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    words = words_of(model_folder("llama"), corpus, tmp_path)
    with pytest.raises(ConfigError, match=said):
        matrix_of(tmp_path, words, methods=["sft"], tune=tune)


def test_a_frontier_needs_a_grid_and_a_grid_is_not_overridden(
    model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    words = words_of(model_folder("llama"), corpus, tmp_path)
    with pytest.raises(ConfigError, match="kind frontier needs `tune`"):
        matrix_of(tmp_path, words, methods=["sft"], tables=TABLES)
    with pytest.raises(ConfigError, match="`tune` of the comparison sets method.lr_ratio"):
        matrix_of(tmp_path, [*words, "method.lr_ratio=3"], methods=["sft"], tune=TUNE)
