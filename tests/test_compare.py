"""`dualsft compare`: the whole matrix, shared stages, failures, tables and their numbers."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from matrices import GREEDY, evaluated_run, matrix_of, quiet, run_all
from places import place
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dualsft.cli import app
from dualsft.config import settings as config
from dualsft.config.methods import AXES, names_of, registry, row_name
from dualsft.errors import ConfigError, RunError
from dualsft.lab.compare import matrix as comparison_matrix
from dualsft.lab.compare import records as cell_records
from dualsft.lab.compare import tables as comparison
from dualsft.lab.compare.cells import run_matrix
from dualsft.lab.compare.matrix import load_matrix
from dualsft.lab.evaluation.benchmarks import Item, paired_rows
from dualsft.runs import pipeline
from dualsft.runs.folder import RunDir
from dualsft.storage.manifest import Fingerprint, render_manifest
from dualsft.system.paths import RunPath

HYBRIDS = ("less+s2ft", "less+nanoadam", "spice+s2ft", "spice+nanoadam")


@pytest.fixture
def words(model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path) -> list[str]:
    return evaluated_run(model_folder, corpus, tmp_path)


def every_row() -> list[str]:
    """Each registered method alone, the paper's hybrids, and the whole and one-sided DualSFT."""
    rows = ["sft", "dualsft", *HYBRIDS]
    for axis in AXES:
        for name in registry()[axis]:
            rows.append(row_name({"data": "all", "params": "all", axis: name}))
    return list(dict.fromkeys(rows))


def test_the_whole_method_list_runs_through_compare(tmp_path: Path, words: list[str]) -> None:
    named = [
        {"name": row, **dict(part.split("=") for part in row.split(","))} if "=" in row else row
        for row in every_row()
    ]
    settings = {"warmup.min_steps": 4, "finetune.epochs": 1, "select.param_budget": 0.1}
    matrix = matrix_of(tmp_path, words, methods=named, settings=settings)
    out = tmp_path / "out"
    run_all(matrix, out)
    files = comparison.write_tables(matrix, out, "dualsft")
    assert files and all(path.location.stat().st_size > 0 for path in files)
    tables = json.loads((out / "comparison.json").read_text())["tables"]
    for table in tables:
        rows = {row["name"] for row in table["rows"]}
        assert {choice.name for choice in matrix.methods} <= rows
        assert table["missing"] == []
    results, resources = tables
    assert results["rows"][0]["name"] == comparison.BASE
    for row in resources["rows"]:
        values = {key: value["mean"] for key, value in row["values"].items()}
        assert 0 < values["data_share"] <= 1 and values["total_seconds"] > 0
        assert values["finetune_gib"] > 0
    splits = {(out / c.path / "1_split/split.parquet").stat().st_ino for c in matrix.cells()}
    assert len(splits) == 1, "the split was made once and linked"
    for cell in matrix.cells():  # selections are shared too, and say nothing of who trains on them
        tuned = json.loads((out / cell.path / "6_finetune/summary.json").read_text())
        chosen = json.loads((out / cell.path / "5_selection/summary.json").read_text())
        wanted = names_of(config.to_flat(matrix.config(cell)))
        assert tuned["methods"] == wanted
        assert chosen["methods"] == {axis: wanted[axis] for axis in ("data", "params")}


def test_a_choice_of_examples_is_made_once(tmp_path: Path, words: list[str]) -> None:
    """LESS with another parameter side reuses LESS's examples, including the accounts."""
    rows, out = ["less", "less+s2ft", "less+random"], tmp_path / "out"
    matrix = matrix_of(tmp_path, words, methods=rows)
    said: list[str] = []
    run_all(matrix, out, said)
    assert sum("the examples of less are reused from" in line for line in said) == 2
    run_all(matrix, tmp_path / "alone", said := [], rows[1])
    assert said and not any("reused from" in line for line in said)
    first, second, third = (out / cell.path / "5_selection" for cell in matrix.cells())
    alone = tmp_path / "alone" / matrix.cells()[1].path / "5_selection"
    for name in ("ids.json", "selected.jsonl", "baseline_scores.parquet"):
        for folder in (second, third, alone):
            assert (folder / name).read_bytes() == (first / name).read_bytes()
    for name in ("summary.json", "mask.safetensors"):
        assert (second / name).read_bytes() == (alone / name).read_bytes()
    lender, taker = (json.loads((f / "manifest.json").read_text()) for f in (first, second))
    facts = lender["facts"], taker["facts"]
    cost = facts[0]["accounts"]["data"]
    assert (
        facts[1]["accounts"]["data"] == cost and facts[0]["data_choice"] == facts[1]["data_choice"]
    )
    assert any("warmup has only" in warning for warning in facts[1]["warnings"])
    assert facts[1]["warnings"] == facts[0]["warnings"]
    assert "taken_over" not in facts[0]
    assert facts[1]["taken_over"] == {key: cost[key] for key in ("seconds", "peak_bytes")}
    assert taker["seconds"] > cost["seconds"]
    assert taker["peak_memory"]["rss_bytes"] >= cost["peak_bytes"]
    records, missing = comparison.collect(matrix, place(out))
    took = {record.cell.method.name: record.values for record in records}
    assert not missing and took["less+s2ft"]["passes"] == took["less"]["passes"]
    assert took["less+s2ft"]["selection_seconds"] == taker["seconds"]


@pytest.mark.parametrize(
    ("method", "change", "lent"),
    [
        ("less", "finetune.epochs=3", True),  # LESS trains an adapter of its own,
        ("less", "finetune.lr=3e-3", False),  # at the run's rate
        ("davir", "finetune.lr=3e-3", False),
        ("less", "select.data_budget=9", False),
        ("less", "method.less.rank=4", False),
        ("less", "seed=7", False),
        ("less", "damaged", False),
        ("less", "other weights", False),
    ],
)
def test_only_the_same_question_has_the_same_answer(
    method: str,
    change: str,
    lent: bool,
    tmp_path: Path,
    words: list[str],
    model_folder: Callable[..., Path],
) -> None:
    words = [*words, f"method.data={method}", "method.params=random"]
    lender = pipeline.run(config.load(None, words), tmp_path / "one", "selection", quiet())
    if change == "damaged":
        ids = lender / "5_selection/ids.json"
        ids.write_text(ids.read_text()[:-2] + ' "x"]')
    elif change == "other weights":
        moved = shutil.copytree(model_folder("llama"), tmp_path / "moved")
        tensors = load_file(moved / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
        save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
        words = [*words, f"model.path={moved}"]
    else:
        words = [*words, change]
    said: list[str] = []
    wanted = config.load(None, [*words, "method.params=s2ft"])
    pipeline.run(wanted, tmp_path / "two", "selection", quiet(said), [RunPath(lender)])
    taken = f"the examples of {method} are reused from {lender / '5_selection'}"
    assert (taken in said) == lent


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m: m.pop("facts"),
        lambda m: m["facts"].update(data_choice=[1]),
        lambda m: m["facts"]["data_choice"].pop("facts"),
        lambda m: m["facts"]["accounts"]["data"].update(of_tomorrow=1),
        lambda m: m["files"].pop("ids.json"),
        lambda m: m["files"].pop("baseline_scores.parquet"),
    ],
)
def test_a_lender_that_is_not_understood_is_passed_over(
    break_it: Callable[[dict], object], tmp_path: Path, words: list[str]
) -> None:
    """Sealed as it should be, but of another version: the choice is made anew."""
    words = [*words, "method.data=top_loss"]
    lender = pipeline.run(
        config.load(None, [*words, "method.params=random"]), tmp_path / "one", "selection", quiet()
    )
    folder = lender / "5_selection"
    body = json.loads((folder / "manifest.json").read_text())
    del body["seal"]
    break_it(body)
    (folder / "manifest.json").write_text(render_manifest(body))
    said: list[str] = []
    wanted = config.load(None, [*words, "method.params=s2ft"])
    out = pipeline.run(wanted, tmp_path / "two", "selection", quiet(said), [RunPath(lender)])
    assert not any("are reused from" in line for line in said)
    assert any(f"{folder}: its selection of examples cannot be reused" in x for x in said)
    assert (out / "5_selection/ids.json").read_bytes() == (folder / "ids.json").read_bytes()


def test_only_results_are_kept_when_asked(tmp_path: Path, words: list[str]) -> None:
    """Weights and vectors go, tables stay the same, and finished cells are not made again."""
    methods = ["dualsft", "random", "sft"]
    whole = matrix_of(tmp_path, words, methods=methods)
    run_all(whole, tmp_path / "whole")
    lean = matrix_of(tmp_path, words, methods=methods, keep="results")
    out = tmp_path / "lean"
    run_all(lean, out)
    left = {p.name for p in out.rglob("*.safetensors")}
    assert left == {"mask.safetensors", "delta.safetensors"}
    said: list[str] = []
    run_all(lean, out, said)
    assert sum("keeping its results" in line for line in said) == 3
    assert not [line for line in said if line.endswith(" started")]
    values = []
    for matrix, folder in ((whole, tmp_path / "whole"), (lean, out)):
        comparison.write_tables(matrix, folder, "dualsft")
        [results, _] = json.loads((folder / "comparison.json").read_text())["tables"]
        values.append([row["values"] for row in results["rows"]])
    assert values[0] == values[1]
    changed = load_matrix(tmp_path / "matrix.yaml", [*words, "finetune.epochs=3"])
    said.clear()
    run_all(changed, out, said, only="random")
    assert any("[finetune] again" in line or "[finetune] started" in line for line in said)


def test_a_second_comparison_of_the_same_folder_is_refused(
    tmp_path: Path, words: list[str]
) -> None:
    matrix, out = matrix_of(tmp_path, words, methods=["random"]), tmp_path / "out"
    out.mkdir()
    with RunDir(out).lock(), pytest.raises(RunError, match=r"out: in use by process \d+"):
        run_matrix(matrix, out, quiet())
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_a_failing_cell_does_not_stop_the_rest(tmp_path: Path, words: list[str]) -> None:
    matrix = matrix_of(tmp_path, words, methods=[GREEDY, "random"])
    out = tmp_path / "out"
    failed = run_matrix(matrix, out, quiet())
    assert len(failed) == 1
    [(title, why)] = failed.items()
    assert "greedy" in title and "select.data_budget" in why
    comparison.write_tables(matrix, out, "random")
    text = (out / "comparison.md").read_text()
    assert "Not finished: default · default · default · greedy" in text
    comparison.write_tables(matrix, out, "dualsft")
    assert "`dualsft` has no finished cell here" in (out / "comparison.md").read_text()
    status = json.loads((out / "cells.json").read_text())["cells"]
    assert [bool(cell["failed"]) for cell in status.values()] == [True, False]


def test_other_settings_are_not_mixed_into_one_table(tmp_path: Path, words: list[str]) -> None:
    out = tmp_path / "out"
    first = matrix_of(tmp_path, words, methods=["random", "sft"])
    run_all(first, out)
    for change in ("evaluation.limit=3", "finetune.lr=3e-3"):
        other = load_matrix(tmp_path / "matrix.yaml", [*words, change])
        run_all(other, out, only="sft")
        comparison.write_tables(other, out, "random")
        results, _ = json.loads((out / "comparison.json").read_text())["tables"]
        assert [row["name"] for row in results["rows"]] == [comparison.BASE, "sft"]
        assert results["missing"] == [
            "default · default · default · random · seed 42 (made with other settings)"
        ]
        run_all(other, out)
        comparison.write_tables(other, out, "random")
        results, _ = json.loads((out / "comparison.json").read_text())["tables"]
        assert results["missing"] == [] and len(results["rows"]) == 3


def test_cells_judged_on_other_examples_are_left_out(tmp_path: Path, words: list[str]) -> None:
    """A method's own settings may change the split or the evaluation: not in one table."""
    methods = [
        "random",
        {"name": "fewer", "data": "random", "settings": {"split.val": 5}},
        {"name": "shorter", "data": "random", "settings": {"evaluation.limit": 3}},
    ]
    free = [word for word in words if not word.startswith("split.val")]
    matrix = matrix_of(tmp_path, free, methods=methods)
    run_all(matrix, tmp_path / "out")
    comparison.write_tables(matrix, tmp_path / "out", "random")
    results, _ = json.loads((tmp_path / "out/comparison.json").read_text())["tables"]
    assert [row["name"] for row in results["rows"]] == [comparison.BASE, "random"]
    first = "default · default · default · random · seed 42"
    assert [text.partition("(")[2] for text in results["missing"]] == [
        f"made with another split or evaluation than {first})"
    ] * 2


def test_the_command_line_stands_over_every_cell(tmp_path: Path, words: list[str]) -> None:
    models = {"a": {"settings": {"finetune.lr": 1e-3}, "lr_ratios": {"all": 3}}}
    content = {"methods": ["random"], "models": models}
    plain = matrix_of(tmp_path, words, **content)
    rates = [comparison_matrix.effective_rate(plain.config(c)) for c in plain.cells()]
    assert rates == [pytest.approx(3e-3)]
    given = [*words, "finetune.lr=7e-4", "method.lr_ratio=1"]
    changed = matrix_of(tmp_path, given, **content)
    rates = [comparison_matrix.effective_rate(changed.config(c)) for c in changed.cells()]
    assert rates == [pytest.approx(7e-4)]
    for word in ("seed=7", "select.data_budget=0.5", "method.data=less"):
        with pytest.raises(ConfigError, match=f"{word}: .* of the comparison sets"):
            matrix_of(tmp_path, [*words, word], budgets=[{"data": 0.1}], **content)


def test_names_of_dots_stay_inside_the_folder(tmp_path: Path, words: list[str]) -> None:
    both = {"models": {"..": {}}, "data": {".": {}}}
    (cell,) = matrix_of(tmp_path, words, methods=["random"], **both).cells()
    assert ".." not in cell.path.parts and (tmp_path / cell.path).resolve() == tmp_path / cell.path


def test_tables_are_means_and_places_of_the_cells(tmp_path: Path, words: list[str]) -> None:
    """Every figure again, from the run folders, by hand."""
    tables = [{"title": "T", "within": "table", "reference": ["sft"]}]
    matrix = matrix_of(
        tmp_path, words, methods=["sft", "random", "random+random"], seeds=[1, 2, 3], tables=tables
    )
    out = tmp_path / "out"
    run_all(matrix, out)
    comparison.write_tables(matrix, out, "random")
    losses: dict[str, list[float]] = {}
    for cell in matrix.cells():
        results = json.loads((out / cell.path / "7_evaluation/results.json").read_text())
        losses.setdefault(cell.method.name, []).append(results["files"]["extra"]["after"]["loss"])
    [table] = json.loads((out / "comparison.json").read_text())["tables"]
    rows = {row["name"]: row for row in table["rows"]}
    for name, values in losses.items():
        value = rows[name]["values"]["loss.extra"]
        assert value["mean"] == pytest.approx(np.mean(values), rel=1e-12)
        assert value["std"] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
        assert value["count"] == 3
    order = sorted(("random", "random+random"), key=lambda name: np.mean(losses[name]))
    assert [rows[name]["place"]["loss.extra"] for name in order] == [1, 2]
    assert rows["sft"]["place"] == {} and rows["sft"]["rank"] is None
    with (out / "comparison.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["method"] for line in lines} == {*losses, comparison.BASE}
    text = (out / "comparison.tex").read_text()
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    assert text.count("{") == text.count("}") and r"\textbf{" in text


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\u0085", "\x0b"])
def test_answers_with_odd_line_ends_are_read(odd: str, tmp_path: Path) -> None:
    losses = {"set": ["a"], "id": ["1"], "loss_after": [1.0], "kl": [0.5]}
    rows = [Item("1", 1.0, False, f"so{odd}it is"), Item("2", 0.0, False, "no")]
    paired = paired_rows("gsm8k", rows, rows)
    run = RunDir(tmp_path / "cell").create()
    with run.write_stage("7_evaluation", Fingerprint({}, {})) as part:
        (part / "losses.parquet").write_table(pa.table(losses))
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in paired]
        (part / "samples.jsonl").write_text("".join(lines))
    found = cell_records._per_example(place(tmp_path / "cell"))
    assert found["gsm8k", "1"] == 1.0 and found["gsm8k", "2"] == 0.0
    for name in ("losses.parquet", "samples.jsonl"):  # what tables show is checked by its hash
        path = tmp_path / "cell/7_evaluation" / name
        before = path.read_bytes()
        path.write_bytes(before.replace(b"1", b"2"))
        with pytest.raises(RunError, match=f"{name} .*`dualsft compare` again"):
            cell_records._per_example(place(tmp_path / "cell"))
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"methods": ["les"]}, "did you mean 'less'"),
        ({"methods": []}, "methods: missing"),
        ({"methods": ["random", "random"]}, "'random' is given twice"),
        ({"methods": ["random"], "seeds": ["a"]}, "seeds: ['a'] is not allowed"),
        ({"methods": ["random"], "budgets": [{"rows": 3}]}, "budgets:"),
        ({"methods": ["random"], "seeds": []}, "seeds: [] is not allowed"),
        ({"methods": ["random"], "models": {}}, "models: {} is not allowed"),
        ({"methods": ["random"], "models": ["a/x-1.json", "b/x-1.gz"]}, "two are called 'x-1'"),
        ({"methods": ["random"], "tables": [{"reference": ["sfft"]}]}, "names 'sfft'"),
        ({"methods": ["random"], "colour": 1}, "colour: not a key of a matrix file"),
        (
            {"methods": ["random"], "tables": [{"kind": "pie"}]},
            "tables: kind: 'pie' is not allowed; give results",
        ),
        ({"methods": ["random"], "settings": {"score.lamb": 1}}, "did you mean 'score.lam'"),
        ({"methods": ["random"], "tables": [{"groups": {"a": ["sft"]}}]}, "names 'sft'"),
        (
            {"methods": ["random"], "budgets": [{"data": 0.1}, {"data": 0.1}]},
            "budgets: data0.1 is given twice",
        ),
        (
            {"methods": ["random"], "models": {"a": {"lr_ratios": ["lora"]}}},
            "a.lr_ratios: ['lora']",
        ),
    ],
)
def test_mistakes_in_a_matrix_are_named(
    content: dict[str, object], told: str, tmp_path: Path, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        matrix_of(tmp_path, words, **content)
    assert told in str(caught.value)


def test_compare_by_the_command_line(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text("methods: [random, sft]\nseeds: [42]\n")
    out = tmp_path / "out"
    words = [w for w in words if not w.startswith("evaluation.")]
    done = CliRunner().invoke(app, ["compare", str(path), "--out", str(out), *words])
    assert done.exit_code == 0, done.output
    page = (out / "comparison.html").read_text()
    assert "<script" not in page and "://" not in page
    assert page.count("data:image/svg+xml;base64,") == len(list(out.glob("*.svg"))) > 0
    assert os.path.getsize(out / "comparison.md") > 0
    again = CliRunner().invoke(app, ["compare", str(path), "--out", str(out), "--tables", *words])
    assert again.exit_code == 0 and "cell 1" not in again.output


def test_a_stage_that_loses_a_file_meanwhile_is_not_taken_over(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found whole, pruned before it is linked: the stage is computed, not half of it adopted."""
    lender, own = tmp_path / "lender", tmp_path / "own"
    pipeline.run(config.load(None, words), lender, "warmup", quiet())
    real = pipeline._lender

    def slow(*given: object) -> RunPath | None:
        found = real(*given)  # pyright: ignore[reportArgumentType]
        if found is not None and given[1] == "2_warmup":
            (lender / "2_warmup/curvature.safetensors").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(pipeline, "_lender", slow)
    said: list[str] = []
    pipeline.run(config.load(None, words), own, "warmup", quiet(said), [RunPath(lender)])
    told = [line for line in said if line.startswith("[")]
    assert any(line.startswith("[split] reused") for line in told)
    assert "[warmup] started" in told and (own / "2_warmup/curvature.safetensors").is_file()
    assert not list(own.glob("*.part"))
