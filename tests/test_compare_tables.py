"""The packaged comparisons are the paper's, and tables rank and mark as they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import corpus_rows, write_jsonl
from places import place
from typer.testing import CliRunner

from dualsft.cli import app
from dualsft.lab.compare import matrix as comparison_matrix
from dualsft.lab.compare.matrix import Cell, Matrix, load_matrix
from dualsft.lab.compare.records import CellRecord, changed_share
from dualsft.lab.compare.tables import Result, formatted, make_table
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter

CONSENT = ["evaluation.allow_code_execution=true"]
TABLES = [name for name in comparison_matrix.comparison_names() if name.startswith("table_")]
# --- recipes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", comparison_matrix.comparison_names())
def test_every_recipe_is_parsed_and_dry_run(name: str, corpus: Path) -> None:
    """The packaged comparisons, the paper's tables among them: every cell's settings are valid."""
    from_hub = name.startswith(("table_", "ablation_"))
    given = CONSENT if from_hub else [f"data.path={corpus}"]
    result = CliRunner().invoke(app, ["compare", name, "--dry-run", *given])
    assert result.exit_code == 0, result.output
    matrix = load_matrix(name, given)
    assert f"{len(matrix.cells())} cells" in result.output
    assert result.output.count(" data: ") == len(matrix.cells())
    none = CliRunner().invoke(app, ["compare", name, "--dry-run", "--only", "no such", *given])
    assert none.exit_code != 0 and "no cell matches" in str(none.exception)


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_corpora_are_read_in_the_hubs_form(
    name: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Magicoder-Evol-Instruct has instruction and response, MetaMathQA query and response."""
    matrix = load_matrix(name, CONSENT)
    cell = matrix.cells()[0]
    prompt = {"magicoder": "instruction", "metamathqa": "query"}[cell.data.name]
    rows = [{prompt: row["prompt"], "response": row["response"]} for row in corpus_rows()]
    given = matrix.config(cell)
    local = replace(
        given,
        model=replace(given.model, path=str(model_folder("llama")), device="cpu"),
        data=replace(given.data, path=str(write_jsonl(tmp_path / "rows.jsonl", rows))),
        split=replace(given.split, val=0.1, anchor=0.1),
        evaluation=replace(given.evaluation, tasks=None),
    )
    run = pipeline.run(local, tmp_path / "run", "split", Reporter([].append))
    assert (run / "1_split/split.parquet").is_file()


# --- ranking and marking --------------------------------------------------------------------------

LOSSES = {"sft": 0.1, "random": 0.4, "top_loss": 0.2, "less": 0.3, "s2ft": 0.5, "lift": 0.5}


def table_of(
    tmp_path: Path, table: Mapping[str, object], gone: Callable[[Cell], bool] = lambda _: False
) -> tuple[list[Result], Matrix]:
    """Three seeds of six methods with made-up losses; `gone` says which cells are missing."""
    content = {"methods": list(LOSSES), "seeds": [1, 2, 3], "tables": [table]}
    path = tmp_path / "matrix.yaml"
    path.write_text(yaml.safe_dump({**content, "models": {"one": "x", "two": "y"}}))
    matrix = load_matrix(path, ["data.path=x", "finetune.lr=1e-3"])
    cells = [cell for cell in matrix.cells() if not gone(cell)]
    took = {"data_share": 0.1, "param_share": 0.05, "changed_share": 0.9, "total_seconds": 7.0}
    records = [
        CellRecord(
            cell,
            place(tmp_path),
            {"loss.new": LOSSES[cell.method.name] + 0.01 * cell.seed, "kl.new": 1.0, **took},
            {"loss.new": 2.0, "kl.new": 0.0},
        )
        for cell in cells
    ]
    missing = {cell: "not finished" for cell in matrix.cells() if gone(cell)}
    return make_table(matrix.tables[0], matrix, records, missing), matrix


def test_places_and_ranks_are_within_groups(tmp_path: Path) -> None:
    groups = {"data": ["random", "top_loss", "less"], "params": ["s2ft", "lift"]}
    table = {"title": "T", "reference": ["sft"], "groups": groups}
    [one, two], _ = table_of(tmp_path, table)
    assert one.where == "one · default · default" and two.where.startswith("two · ")
    ranks = {row.name: (row.group, row.rank, row.place.get("loss.new")) for row in one.rows}
    assert ranks == {
        "base model": ("", None, None),
        "sft": ("reference", None, None),
        "random": ("data", 3, 3),
        "top_loss": ("data", 1, 1),
        "less": ("data", 2, 2),
        "s2ft": ("params", 1, 1),  # equal means share a place
        "lift": ("params", 1, 1),
    }
    assert one.rows[2].values["loss.new"].mean == pytest.approx(0.42)
    assert one.rows[2].values["loss.new"].std == pytest.approx(0.01)


def test_three_places_over_the_whole_table_are_marked(tmp_path: Path) -> None:
    table = {"title": "T", "reference": ["sft"], "within": "table", "mark": 3}
    [one, _], _ = table_of(tmp_path, table)
    text = formatted("md", "m", [one], [], "dualsft")
    assert "| **0.2200 ± 0.0100** |" in text and "| <u>0.3200 ± 0.0100</u> |" in text
    assert "| *0.4200 ± 0.0100* |" in text and "| 0.5200 ± 0.0100 |" in text
    assert "the third (if marked) in italics" in text
    tex = formatted("tex", "m", [replace(one, title=r"\input{x} ~^")], [], "dualsft")
    assert r"\textbackslash{}input\{x\} \textasciitilde{}\textasciicircum{}" in tex
    assert "&lt;b>" in formatted("md", "m", [replace(one, title="<b>")], [], "dualsft")
    assert r"\textit{0.4200 $\pm$ 0.0100}" in tex and r"\textbf{0.2200 $\pm$ 0.0100}" in tex


def test_forgetting_tables_have_what_it_took_and_resources_what_changed(tmp_path: Path) -> None:
    [one, _], _ = table_of(tmp_path, {"title": "T", "kind": "forgetting"})
    keys = ["loss.new", "kl.new", "data_share", "param_share", "total_seconds"]
    assert [column.key for column in one.columns] == keys
    [one, _], _ = table_of(tmp_path, {"title": "T", "kind": "resources"})
    assert one.rows[0].values["changed_share"].mean == pytest.approx(0.9)
    tuned = {"num_parameters": 100, "trained_entries": 5}
    assert changed_share({**tuned, "changed_entries": 95}) == 0.95
    assert changed_share({**tuned, "changed_entries": None}) is None
    assert changed_share({"num_parameters": 100, "trained_entries": 100}) == 1.0


def test_what_lacks_a_seed_or_everything_is_told_and_does_not_compete(tmp_path: Path) -> None:
    """The best method lacks a seed of the first model; of the second there is nothing."""

    def gone(cell: Cell) -> bool:
        return cell.model.name == "two" or (cell.method.name, cell.seed) == ("top_loss", 3)

    results, _ = table_of(tmp_path, {"title": "T", "reference": ["sft"]}, gone)
    one, two = results
    rows = {row.name: row for row in one.rows}
    assert rows["top_loss"].place == {} and rows["top_loss"].rank is None
    assert rows["less"].place["loss.new"] == 1 and rows["less"].rank == 1
    assert two.rows == [] and len(two.missing) == 18
    text = formatted("md", "m", results, [], "dualsft")
    assert "| top_loss (2 of 3 seeds) |" in text and "## T · two" in text
    assert text.count("Not finished: ") == 2
    page = formatted("html", "m", results, [], "dualsft")
    assert "top_loss (2 of 3 seeds)" in page and page.count("Not finished: ") == 2
    tex = formatted("tex", "m", results, [], "dualsft")
    assert tex.count("% Not finished: ") == 2 and tex.count(r"\begin{table}") == 1
