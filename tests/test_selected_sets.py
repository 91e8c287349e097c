"""What is selected as a set: sources are carried through a run, reported, and kept to quotas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import Runner, corpus_rows, small_run, write_jsonl
from worlds import run_jobs

from dualsft.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100 rows in words.jsonl and 40 in numbers.jsonl."""
    folder = tmp_path_factory.mktemp("two")
    words = write_jsonl(folder / "words.jsonl", corpus_rows(100))
    numbers = write_jsonl(folder / "numbers.jsonl", corpus_rows(40, seed=1))
    return f"data.path={words},{numbers}"


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 rows whose field `set` is a (every third row) or b."""
    rows = [row | {"set": "a" if i % 3 == 0 else "b"} for i, row in enumerate(corpus_rows(120))]
    return write_jsonl(tmp_path_factory.mktemp("one") / "rows.jsonl", rows)


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "5_selection/summary.json").read_text())


def chosen(run: Path) -> list[str]:
    return json.loads((run / "5_selection/ids.json").read_text())


def source_of(run: Path) -> dict[str, str]:
    """Source by id of the examples that are selected from."""
    table = pq.read_table(run / "1_split/split.parquet").to_pylist()
    return {row["id"]: row["source"] for row in table if row["role"] == "pool"}


def test_what_is_selected_of_each_source_is_reported(make_run: Runner, two_files: str) -> None:
    said: list[str] = []
    run = make_run(two_files, "select.data_budget=20", said=said)
    found, source = summary(run), source_of(run)
    taken, pool = Counter(source[i] for i in chosen(run)), Counter(source.values())
    assert set(found["sources"]) == {"words", "numbers"} == set(pool)
    for name, facts in found["sources"].items():
        assert (facts["pool"], facts["selected"]) == (pool[name], taken[name])
    means = [(s["selected"], s["response_tokens_selected"]) for s in found["sources"].values()]
    total = sum(count * (mean or 0) for count, mean in means)
    assert total / 20 == pytest.approx(found["response_tokens_selected"])
    own = found["response_quantiles_selected"]
    assert own["p10"] <= own["median"] <= own["p90"] and own.keys() == {"p10", "median", "p90"}
    line = f"selected of each source: words {taken['words']} of {pool['words']}, numbers"
    assert any(text.startswith(line) for text in said)
    page, text = (run / "report.html").read_text(), (run / "report.md").read_text()
    assert "Sources of the examples" in page and '<td dir="auto">numbers</td>' in page
    assert f"| words | {pool['words']} |" in text and "quantiles: selected" in text


@pytest.mark.parametrize("method", ["random", "all", "dualsft_reversed"])
def test_other_methods_report_sources_too(method: str, make_run: Runner, one_file: Path) -> None:
    run = make_run(
        f"data.path={one_file}",
        "data.source_field=set",
        f"method.data={method}",
        until="selection",
    )
    found = summary(run)["sources"]
    assert found["a"]["pool"] < found["b"]["pool"]
    total = sum(facts["selected"] for facts in found.values())
    assert total == (summary(run)["b"] if method != "all" else 96)  # all but val and anchor


def test_a_run_without_sources_has_none(make_run: Runner) -> None:
    run = make_run(until="selection")
    assert "sources" not in summary(run)
    assert pq.read_schema(run / "1_split/split.parquet").names == ["id", "role", "index"]


def test_a_row_without_the_source_field_stops_the_run(make_run: Runner, one_file: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: field 'kind' missing"):
        make_run(f"data.path={one_file}", "data.source_field=kind", until="split")


# --- quotas --------------------------------------------------------------------------------------


def exact_scores(run: Path) -> dict[str, float]:
    """Scores of a two-pass or calibrated run, which have no bound."""
    table = pq.read_table(run / "4_scores/examples.parquet").to_pylist()
    assert not any(row["bound"] for row in table)
    return {row["id"]: row["score"] for row in table}


def best(scores: dict[str, float], among: list[str], count: int) -> set[str]:
    """The best by score; equal scores by position in the file, which ends the id."""
    line = {i: int(i.rpartition("-")[2]) for i in among}
    return set(sorted(among, key=lambda i: (-scores[i], line[i]))[:count])


# u is mostly curvature, so that the bounds of one pass leave rows of both sources open
CURVED = ("model.dtype=float64", "score.curvature_scale=1e4", "select.data_budget=21")


def test_even_quotas_are_the_exact_top_of_each_source(make_run: Runner, two_files: str) -> None:
    options = (two_files, *CURVED, "select.per_source=even")
    said: list[str] = []
    one = make_run(*options, out="one", until="selection", said=said)
    two = make_run(*options, "score.mode=two_pass", out="two", until="selection")
    scores, source = exact_scores(two), source_of(two)
    ids = {name: [i for i in source if source[i] == name] for name in ("numbers", "words")}
    expected = best(scores, ids["numbers"], 11) | best(scores, ids["words"], 10)
    assert set(chosen(one)) == expected == set(chosen(two))
    assert {n: s["selected"] for n, s in summary(one)["sources"].items()} == {
        "numbers": 11,
        "words": 10,
    }
    assert summary(one)["rescored"] > 0 == summary(two)["rescored"]
    assert summary(two)["boundary_gap"] >= 0
    assert summary(two)["score_threshold"] == min(scores[i] for i in expected)
    again: list[str] = []
    make_run(*options[:-1], out="one", until="selection", said=again)
    done = [line.partition("]")[0].strip("[") for line in again if "] done in" in line]
    assert done == ["selection"], "quotas are no part of the scores"


@pytest.mark.parametrize("method", ["dualsft", "dualsft_reversed"])
@pytest.mark.parametrize("form", ["literal", "calibrated"])
def test_a_mapping_and_the_rest(form: str, method: str, make_run: Runner, one_file: Path) -> None:
    mode = "one_pass" if form == "calibrated" else "two_pass"
    run = make_run(
        f"data.path={one_file}",
        "data.source_field=set",
        f"score.form={form}",
        f"score.mode={mode}",
        f"method.data={method}",
        "select.data_budget=12",
        "select.per_source=a:0.75",
        until="selection",
    )
    sign = -1.0 if method == "dualsft_reversed" else 1.0
    scores, source = {i: sign * s for i, s in exact_scores(run).items()}, source_of(run)
    ids = {name: [i for i in source if source[i] == name] for name in "ab"}
    assert set(chosen(run)) == best(scores, ids["a"], 9) | best(scores, ids["b"], 3)


def test_balanced_lengths_follow_the_pool(make_run: Runner, two_files: str) -> None:
    """Also with copies passed over: the corpus has two in each file."""
    run = make_run(
        two_files,
        "score.mode=two_pass",
        "select.data_budget=30",
        "select.lengths=balanced",
        "select.duplicates=exact",
        until="selection",
    )
    table = pq.read_table(run / "4_scores/examples.parquet").to_pylist()
    tokens = {row["id"]: row["response_tokens"] for row in table}
    lengths = sorted(tokens.values())
    edges = [lengths[-(-len(lengths) * k // 5) - 1] for k in (1, 2, 3, 4)]
    group = {i: sum(n > edge for edge in edges) for i, n in tokens.items()}
    pool, taken = Counter(group.values()), Counter(group[i] for i in chosen(run))
    assert sum(taken.values()) == 30 and len(pool) >= 3
    for g, size in pool.items():
        assert abs(taken[g] - 30 * size / len(tokens)) < 1
    hashes = [i.partition("-")[0] for i in chosen(run)]
    assert len(hashes) == len(set(hashes))


def test_quotas_that_cannot_be_met_stop_the_run_before_scoring(
    make_run: Runner, two_files: str, tmp_path: Path
) -> None:
    for quotas, problem in (
        ("numbers:0.9", r"\d+ examples of 'numbers' are asked for, but the pool has \d+"),
        ("digits:0.1", "the pool has no source 'digits'; it has numbers, words"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_run(two_files, f"select.per_source={quotas}", "select.data_budget=80")
        assert not (tmp_path / "run/3_gradients").exists()
    with pytest.raises(
        ConfigError, match="the rows of this split have none; set data.source_field"
    ):
        make_run("select.per_source=even", out="none")


def test_two_processes_select_the_same(
    make_run: Runner, model_folder: Callable[[str], Path], two_files: str, tmp_path: Path
) -> None:
    options = (two_files, *CURVED, "select.per_source=even", "select.lengths=balanced")
    one = make_run(*options, until="selection")
    words = [*small_run(model_folder("llama"), Path("replaced")), *options, "parallel.mode=shard"]
    run_jobs(2, [{"out": str(tmp_path / "many"), "settings": words}], tmp_path)
    assert chosen(one) == chosen(tmp_path / "many")
    assert summary(one)["sources"] == summary(tmp_path / "many")["sources"]
