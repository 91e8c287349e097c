"""Sources: every kind of file, several files, folders, dataset_info.json and the hub."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import malformed as m
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

import dualsft
from dualsft.config import settings
from dualsft.config.settings import DataConfig
from dualsft.data.readers import Limits
from dualsft.data.rows import read_rows, source_lines
from dualsft.data.sources import find_files, source_hash, split_paths
from dualsft.errors import ConfigError, DataError
from dualsft.runs.preflight import check_paths

ROWS = [{"prompt": f"p{i} é", "response": f'r,"{i}"\nsecond line', "n": str(i)} for i in range(5)]
JSONL = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
SUFFIXES = ("json", "csv", "tsv", "parquet", "arrow", "feather")
FILES: dict[str, bytes] = {
    **dict.fromkeys(("c.jsonl", "c.ndjson", "lines.json"), JSONL),
    **{f"c.{suffix}": m.container(suffix, ROWS) for suffix in SUFFIXES},
}
CSV = FILES["c.csv"]


def write(folder: Path, name: str) -> Path:
    path = folder / name
    content = FILES[name.removesuffix(".gz")]
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", [*FILES, *(f"{name}.gz" for name in FILES)])
def test_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    rows, report = read_rows(path, DataConfig(path=str(path)))
    assert [(r.prompt, r.response) for r in rows] == [(r["prompt"], r["response"]) for r in ROWS]
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert report.files == [str(path)]
    compact = [json.dumps(r, ensure_ascii=False, separators=(",", ":")).encode() for r in ROWS]
    expected = JSONL.split(b"\n") if name.startswith(("c.jsonl", "c.ndjson", "lines")) else compact
    assert [row.raw for row in rows] == expected
    chosen = {row.index: row.id for row in (rows[3], rows[1])}
    assert source_lines(path, chosen) == {1: expected[1], 3: expected[3]}


# --- several files -------------------------------------------------------------------------------


def test_lists_and_globs_count_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL + b"\n\n")
    write(tmp_path, "c.csv")
    for text in (f"{tmp_path}/a.jsonl, {tmp_path}/c.csv", f"{tmp_path}/[ac].*"):
        rows, report = read_rows(text, DataConfig(path=text))
        assert [row.index for row in rows] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
        assert [Path(file).name for file in report.files] == ["a.jsonl", "c.csv"]
        assert rows[5].place == f"{tmp_path}/c.csv, line 2"
        lines = source_lines(text, {rows[5].index: rows[5].id})
        assert json.loads(lines[6]) == ROWS[0]


def test_a_changed_second_file_is_found(tmp_path: Path) -> None:
    a, b = write(tmp_path, "c.jsonl"), write(tmp_path, "c.csv")
    rows, _ = read_rows(f"{a},{b}", DataConfig(path=f"{a},{b}"))
    b.write_bytes(CSV.replace(b"p0", b"x0"))
    with pytest.raises(DataError, match="c.csv, line 2: not the row that was read before"):
        source_lines(f"{a},{b}", {rows[5].index: rows[5].id})


def test_a_path_with_a_comma_is_itself(tmp_path: Path) -> None:
    odd = tmp_path / "a,b.jsonl"
    odd.write_bytes(JSONL)
    assert split_paths(f"{odd},x.jsonl") == [str(odd), "x.jsonl"]
    assert split_paths("a.jsonl, b.jsonl,") == ["a.jsonl", "b.jsonl"]
    deep = tmp_path / "x,y/z,w"
    deep.mkdir(parents=True)
    assert split_paths(f"{odd},{deep},{tmp_path}/x,y") == [str(odd), str(deep), f"{tmp_path}/x,y"]
    assert len(read_rows(odd, DataConfig(path=str(odd)))[0]) == 5


def test_a_yaml_list_is_a_list_of_paths(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\nfinetune: {lr: 1}\ndata: {path: [a.jsonl, b.json]}\n")
    assert settings.load(file, []).data.path == "a.jsonl,b.json"


def test_all_wrong_paths_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "c.jsonl")
    with pytest.raises(ConfigError) as caught:
        find_files(f"{path},no.jsonl,{tmp_path}/*.csv", DataConfig(path="x"), "data.val_path")
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        "data.val_path"
    ] * 2
    assert "'no.jsonl' does not exist" in caught.value.problems[0]
    assert "matches no file" in caught.value.problems[1]


def test_a_file_is_named_once(tmp_path: Path) -> None:
    path = write(tmp_path, "c.jsonl")
    with pytest.raises(ConfigError, match="c.jsonl' is named twice; name it once"):
        find_files(f"{path},{tmp_path}/*.jsonl", DataConfig(path="x"))


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    def hashed(path: Path | str, **config: Any) -> str:
        return source_hash(str(path), DataConfig(path=str(path), **config))

    a, b = write(tmp_path, "c.jsonl"), write(tmp_path, "c.csv")
    (tmp_path / "other.jsonl").write_bytes(JSONL)
    assert hashed(a) == hashed(tmp_path / "other.jsonl")
    assert len({hashed(a), hashed(b), hashed(f"{a},{b}"), hashed(f"{b},{a}")}) == 4
    before = hashed(f"{a},{b}")
    b.write_bytes(CSV + b"\r\n")
    assert hashed(f"{a},{b}") != before


# --- folders -------------------------------------------------------------------------------------


def names(path: Path, **config: Any) -> list[str]:
    files = find_files(str(path), DataConfig(path=str(path), **config))
    return [str(file.path.relative_to(path)) for file in files]


def test_a_plain_folder_gives_its_train_files(tmp_path: Path) -> None:
    for name in (
        "data/train-00001.jsonl",
        "data/train-00000.jsonl",
        "data/test.jsonl",
        "README.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(JSONL)
    assert names(tmp_path) == ["data/train-00000.jsonl", "data/train-00001.jsonl"]
    assert names(tmp_path, split="test") == ["data/test.jsonl"]
    with pytest.raises(ConfigError, match=r"no file of the split 'validation'; set .*test, train"):
        names(tmp_path, split="validation")


def test_a_plain_folder_without_splits_gives_all(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", ".hidden.csv"):
        (tmp_path / name).write_bytes(CSV)
    assert names(tmp_path) == ["a.csv", "b.csv"]


def saved(folder: Path, order: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name in order:
        (folder / name).write_bytes(FILES["c.arrow"])
    files = [{"filename": name} for name in order]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    folder = saved(tmp_path / "ds", ["data-00001.arrow", "data-00000.arrow"])
    assert names(folder) == ["data-00001.arrow", "data-00000.arrow"]
    rows, _ = read_rows(folder, DataConfig(path=str(folder)))
    assert len(rows) == 10
    saved(tmp_path / "dict" / "train", ["x.arrow"])
    saved(tmp_path / "dict" / "test", ["y.arrow"])
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names(tmp_path / "dict") == ["train/x.arrow"]
    assert names(tmp_path / "dict", split="test") == ["test/y.arrow"]
    with pytest.raises(ConfigError, match="no split 'dev'; set data.split to one of train, test"):
        names(tmp_path / "dict", split="dev")


# --- dataset_info.json ---------------------------------------------------------------------------


def info(folder: Path, **entries: Any) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    return folder


def test_entries_are_chosen_by_name(tmp_path: Path) -> None:
    write(tmp_path, "c.jsonl")
    write(tmp_path, "c.csv")
    columns = {"columns": {"prompt": "prompt", "response": "response"}}
    info(tmp_path, one={"file_name": "c.jsonl", **columns}, two={"file_name": "c.csv", **columns})
    for path in (tmp_path, tmp_path / "dataset_info.json"):
        config = DataConfig(path=str(path), dataset="two,one")
        rows, report = read_rows(path, config)
        assert [Path(file).name for file in report.files] == ["c.csv", "c.jsonl"]
        assert (len(rows), report.format) == (10, "alpaca")
        assert [row.source for row in rows] == ["two"] * 5 + ["one"] * 5


def test_num_samples_keeps_as_many_rows(tmp_path: Path) -> None:
    write(tmp_path, "c.jsonl")
    columns = {"prompt": "prompt", "response": "response"}
    info(tmp_path, one={"file_name": "c.jsonl", "columns": columns, "num_samples": 2})
    config = DataConfig(path=str(tmp_path), dataset="one")
    rows, report = read_rows(tmp_path, config)
    assert (len(rows), report.num_good, report.num_not_sampled) == (2, 2, 3)
    assert "3 of 5 rows are left out by num_samples" in report.notes()[0]
    assert rows == sorted(rows, key=lambda row: row.index)
    assert rows == read_rows(tmp_path, config)[0]
    assert len(source_lines(tmp_path, {row.index: row.id for row in rows}, config)) == 2


# --- the hub -------------------------------------------------------------------------------------

STAND_IN = """
calls = []
def load_dataset(path, **settings):
    calls.append((path, settings))
    if path == "org/none":
        raise FileNotFoundError("no such dataset")
    return [{"prompt": "p", "response": "r", "when": None}, {"prompt": "é", "response": "s"}]
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """A module `datasets` that only plays `load_dataset`, and a cache of its own."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/datasets.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    # setitem first: it remembers that nothing was there, so that the stand-in goes with the test.
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "datasets")
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return lambda: sys.modules["datasets"].calls


def test_a_hub_dataset_is_loaded_once(tmp_path: Path, hub: Callable[[], list[Any]]) -> None:
    config = DataConfig(path="org/name", subset="main", revision="v1")
    for _ in range(2):
        rows, report = read_rows("org/name", config)
        assert [row.prompt for row in rows] == ["p", "é"]
    wanted = {"name": "main", "data_dir": None, "split": "train", "revision": "v1"}
    assert hub() == [("org/name", wanted)]
    [file] = (tmp_path / "cache/datasets").iterdir()
    assert report.files == [str(file)]
    assert file.read_bytes().splitlines()[0] == rows[0].raw
    read_rows("org/name", DataConfig(path="org/name", split="test"))
    assert hub()[-1][1]["split"] == "test" and len(hub()) == 2


def test_a_hub_entry_of_dataset_info(tmp_path: Path, hub: Callable[[], list[Any]]) -> None:
    columns = {"prompt": "prompt", "response": "response"}
    folder = tmp_path / "lf"
    folder.mkdir()
    info(folder, mine={"hf_hub_url": "org/name", "subset": "s", "columns": columns})
    rows, _ = read_rows(folder, DataConfig(path=str(folder), dataset="mine", outside=True))
    assert len(rows) == 2 and hub()[0][1]["name"] == "s"


@pytest.mark.parametrize("offline", ["", "1"])
def test_a_hub_that_cannot_be_reached_is_asked_once(offline: str, tmp_path: Path) -> None:
    """`datasets` itself asks six times, waits between, and says so on the terminal."""
    code = "from dualsft.data.sources import find_files; find_files('org/name')"
    here = {"PYTHONPATH": str(Path(dualsft.__file__).parents[1]), "HF_HOME": str(tmp_path)}
    here |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": offline}
    here["NO_PROXY"] = "127.0.0.1"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | here, capture_output=True, text=True
    )
    said = done.stderr.splitlines()[-1]
    why = "HF_HUB_OFFLINE is set" if offline else "the hub at http://127.0.0.1:9 cannot be reached"
    assert done.returncode == 1 and "data.path: 'org/name'" in said and why in said, done.stderr
    assert "Retry" not in done.stderr


def test_a_hub_dataset_that_is_not_there(hub: Callable[[], list[Any]]) -> None:
    with pytest.raises(ConfigError, match="'org/none' .* cannot be loaded .*no such dataset"):
        read_rows("org/none", DataConfig(path="org/none"))


def test_without_datasets_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"'org/name' is not a local file .*install dualsft\[data\]"
    ):
        read_rows("org/name", DataConfig(path="org/name"))


def test_preflight_loads_nothing(tmp_path: Path, hub: Callable[[], list[Any]]) -> None:
    words = ["model.path=smollm2-135m", "finetune.lr=1", "data.path=org/name"]
    check_paths(settings.load(None, words))
    assert not (tmp_path / "cache/datasets").exists()


# --- limits --------------------------------------------------------------------------------------


def test_limits_hold_for_every_kind(tmp_path: Path) -> None:
    small = Limits(max_line_bytes=2000, max_columns=3)
    long = [{"prompt": "p" * 5000, "response": "r"}]
    wide = [{f"c{i}": "x" for i in range(4)}]
    for name, content, message in (
        ("l.json", json.dumps(long).encode(), "longer than 2,000 bytes"),
        ("w.json", json.dumps(wide).encode(), "an object with 4 fields; 3 are allowed"),
        ("l.csv", b"prompt,response\n" + b"p" * 5000 + b",r\n", "longer than 2,000 bytes"),
        ("w.csv", b"a,b,c,d\n1,2,3,4\n", "the header has 4 columns; 3 are allowed"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_rows(tmp_path / name, DataConfig(path=name), small)
    for name, rows, message in (("l", long, "bomb|longer than 2,000"), ("w", wide, "4 columns")):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        with pytest.raises(DataError, match=message):
            read_rows(path, DataConfig(path=str(path)), small)


def test_a_run_on_conversations_in_parquet_and_csv(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """The whole pipeline: several kinds, several turns, chosen rows as compact JSON."""
    first = [
        {"messages": [turn for i in range(1 + n % 2) for turn in _round(n, i)], "n": n}
        for n in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(first), tmp_path / "a.parquet")
    lines = ["prompt,response"] + [f"say {n},the word {n}" for n in range(40)]
    (tmp_path / "b.csv").write_text("\n".join(lines))
    said: list[str] = []
    folder = make_run(
        f"data.path={tmp_path}/a.parquet,{tmp_path}/b.csv",
        "data.template=chat",
        "select.data_budget=20",
        said=said,
    )
    chosen = (folder / "5_selection/selected.jsonl").read_text().splitlines()
    assert len(chosen) == 20
    rows = [json.loads(line) for line in chosen]
    compact = {json.dumps(row, separators=(",", ":")) for row in first}
    assert all(line in compact or '"response":"the word ' in line for line in chosen)
    assert {"messages" in row for row in rows} == {True, False}
    assert any("2 files: " in line for line in said)
    again: list[str] = []
    make_run(
        f"data.path={tmp_path}/[ab].*", "data.template=chat", "select.data_budget=20", said=again
    )
    assert "[split] reused: nothing it depends on has changed" in again


def _round(n: int, i: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"question {n} {i}"},
        {"role": "assistant", "content": f"answer {n} {i}"},
    ]


# --- sources of rows -----------------------------------------------------------------------------


def sources(path: object, **config: Any) -> list[str]:
    return [row.source for row in read_rows(str(path), DataConfig(path=str(path), **config))[0]]


def test_rows_of_several_files_have_the_file_as_their_source(tmp_path: Path) -> None:
    a, b = write(tmp_path, "c.jsonl"), tmp_path / "maths.v2.jsonl.gz"
    b.write_bytes(gzip.compress(JSONL))
    assert sources(a) == [""] * 5
    assert sources(f"{a},{b}") == ["c"] * 5 + ["maths.v2"] * 5
    rows, _ = read_rows(f"{a},{b}", DataConfig(path="x"), key="data.val_path")
    assert {row.source for row in rows} == {""}


def test_numbered_parts_are_one_source_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    parts = ("one/train-00000-of-00002.jsonl", "one/train-00001-of-00002.jsonl", "two/train.jsonl")
    for name in parts:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(JSONL)
    assert sources(tmp_path / "one") == [""] * 10
    assert sources(tmp_path) == ["one/train"] * 10 + ["two/train"] * 5
    saved(tmp_path / "ds", ["data-00001.arrow", "data-00000.arrow"])
    both = f"{tmp_path}/two/train.jsonl,{tmp_path}/ds"
    assert sources(both) == ["train"] * 5 + ["ds"] * 10


def test_the_source_field_is_read_from_every_row(tmp_path: Path) -> None:
    def rows(*values: Any) -> Path:
        lines = [{"prompt": "p", "response": f"r{i}", "from": v} for i, v in enumerate(values)]
        lines = [{k: v for k, v in line.items() if v is not Ellipsis} for line in lines]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    assert sources(rows("a", "b c", 7), source_field="from") == ["a", "b c", "7"]
    bad = {
        ...: "field 'from' missing.*set data.source_field to the field that holds it",
        None: "field 'from' is null, must be text",
        True: "field 'from' is a boolean, must be text",
        " ": "field 'from' is empty; write the name",
        "a\nb": "holds a line break or a control character",
        "a" * 201: "longer than 200 characters",
    }
    for value, problem in bad.items():
        with pytest.raises(DataError, match=rf"rows.jsonl, line 2: .*{problem}"):
            sources(rows("a", value), source_field="from")
    assert sources(rows("a", None), source_field="from", bad_rows="skip") == ["a"]
