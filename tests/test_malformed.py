"""Malformed data: each file is refused or flagged by file, place and field, or read back exactly.

Three outcomes, none silent: a bad row (named with file and 1-based line or row; with
`data.bad_rows=skip` it is left out, counted, and the other rows are unharmed), a file that is
refused whole under both policies, and a harmless oddity whose text comes back character for
character. No exception but `DataError` and `ConfigError` may escape. Random damage
and hostile sizes are in test_hostile_sizes.py.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import malformed as m
import pyarrow as pa
import pytest
from malformed_files import FILES, GOOD, LINES, PARQUET, RESYNC, STREAM, Accepted, Bad
from small_tokenizers import byte_tokenizer

from dualsft.config import settings
from dualsft.data.examples import tokenize
from dualsft.data.rows import read_rows
from dualsft.errors import ConfigError, DataError

TRANSPARENT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function']['name'] }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Changes nothing in a turn, so that a decoded example shows the row's text exactly."""
BYTES = byte_tokenizer(chat_template=TRANSPARENT)


def read(path: Path, **data: str) -> tuple[list[Any], Any]:
    words = [f"data.{key}={value}" for key, value in data.items()]
    config = settings.load(
        None, ["model.path=m", f"data.path={path}", "data.max_length=1000000", *words]
    )
    return read_rows(path, config.data)


def problems(path: Path, **data: str) -> list[str]:
    """What reading says when it refuses; anything but the two user errors is a failure."""
    with pytest.raises((DataError, ConfigError)) as caught:
        rows, report = read(path, **data)
        pytest.fail(f"{path.name} was read silently: {rows} {report}")
    return caught.value.problems


def texts(path: Path, **data: str) -> list[tuple[str, str]]:
    """(whole text, trained text) of each row that is read."""
    rows, report = read(path, **data)
    config = settings.load(
        None, ["model.path=m", f"data.path={path}", "data.max_length=1000000"]
    ).data
    examples, _ = tokenize(rows, BYTES, config, report)
    return [(decode(e.input_ids), decode([i for i in e.labels if i >= 0])) for e in examples]


def decode(ids: list[int]) -> str:
    text = BYTES.decode(ids)
    assert isinstance(text, str)
    return text


def rendered(turns: Sequence[m.Turn]) -> tuple[str, str]:
    """The two texts that a conversation must give."""
    parts = [(r, f"[{r}]", c + ("</s>" if r == "assistant" else "")) for r, c in turns]
    whole = "".join(tag + content for _, tag, content in parts)
    return whole, "".join(content for role, _, content in parts if role == "assistant")


def check_message(text: str, path: Path, place: str, words: Sequence[str]) -> None:
    assert str(path) in text, text
    assert f"{path}, {place}: " in text, f"{place} is not named: {text}"
    for word in words:
        assert word in text, f"{word!r} is not named: {text}"
    assert text.rpartition("; ")[1:] > ("", ""), f"no cure: {text}"
    assert len(text) < 1500 and text.isprintable(), "a message is short and safe to print"


def check_bad_row(path: Path, place: str, words: Sequence[str], total: int, **data: str) -> None:
    """One bad row: named under both policies, and the only one left out."""
    problem, cure = problems(path, **data)
    check_message(problem, path, place, words)
    assert cure.startswith(f"1 of {total} rows of {path} are bad") and "data.bad_rows=skip" in cure
    rows, report = read(path, bad_rows="skip", **data)
    assert (report.num_rows, report.num_bad, report.num_good) == (total, 1, total - 1)
    assert len(rows) == total - 1
    assert report.bad == [problem]
    assert any("1 of" in note for note in report.notes())


# --- rows, over shapes and containers ------------------------------------------------------------


def representable(suffix: str, rows: list[m.Fields]) -> bool:
    """Whether a typed file can hold the rows at all."""
    if suffix.removesuffix(".gz") not in ("parquet", "arrow"):
        return True
    if not set(rows[1]) <= set(rows[0]):
        return False
    try:
        stored = m.table_of(rows).to_pylist()
    except (pa.ArrowException, UnicodeEncodeError):
        return False
    return stored[0] == rows[0]  # a column that takes another type is another file


def row_cases() -> Iterator[Any]:
    for suffix in ("jsonl", "json", "parquet", "arrow", "jsonl.gz"):
        for shape_name, shape in m.SHAPES.items():
            for kind, (row, words) in shape.broken.items():
                rows = [shape.good, row, shape.good]
                if representable(suffix, rows):
                    yield pytest.param(
                        suffix, shape, rows, words, id=f"{suffix}-{shape_name}-{kind}"
                    )


ROW_CASES = list(row_cases())


def test_there_are_enough_cases() -> None:
    kinds = {case.id.split("-", 1)[0] for case in ROW_CASES if case.id}
    assert kinds == {"jsonl", "json", "parquet", "arrow", "jsonl.gz"}
    assert len(ROW_CASES) + len(LINES) * 3 + len(FILES) >= 400


@pytest.mark.parametrize(("suffix", "shape", "rows", "words"), ROW_CASES)
def test_a_bad_row_is_named(
    suffix: str, shape: m.Shape, rows: list[m.Fields], words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / f"corpus.{suffix}"
    path.write_bytes(m.container(suffix, rows))
    check_bad_row(path, m.place(suffix, 2), words, 3, format=shape.format)


@pytest.mark.parametrize("name", m.SHAPES)
def test_good_rows_are_recognised_and_read_exactly(name: str, tmp_path: Path) -> None:
    """The other half: what the broken rows differ from is fine, named or recognised."""
    shape = m.SHAPES[name]
    for suffix in ("jsonl", "json", "parquet", "arrow", "feather", "json.gz", "parquet.gz"):
        path = tmp_path / f"corpus.{suffix}"
        path.write_bytes(m.container(suffix, [shape.good] * 2))
        for named in ("auto", shape.format):
            found = texts(path, format=named)
            if shape.turns:
                assert found == [rendered(shape.turns)] * 2, suffix
            assert len(found) == 2


# --- lines of JSON -------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "jsonl.gz"])
@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line_is_named(kind: str, suffix: str, tmp_path: Path) -> None:
    line, words = LINES[kind]
    path = tmp_path / f"corpus.{suffix}"
    content = b"\r\n".join([GOOD, b" ", line, GOOD])
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    check_bad_row(path, "line 3", words, 3)


@pytest.mark.parametrize("kind", LINES)
def test_a_bad_element_is_named(kind: str, tmp_path: Path) -> None:
    """In a JSON array the rest may be lost with a broken element; it is never silent."""
    line, words = LINES[kind]
    path = tmp_path / "corpus.json"
    path.write_bytes(b"[" + GOOD + b",\n\n" + line + b",\n" + GOOD + b"]\n")
    for policy in ("error", "skip"):
        try:
            rows, report = read(path, bad_rows=policy)
            assert policy == "skip" and report.num_bad == 1 and len(rows) == 2
            found = report.bad
        except (DataError, ConfigError) as problem:
            found = problem.problems
        place = "line 4" if kind in RESYNC and "line 4" in found[0] else "line 3"
        check_message(found[0], path, place, words if place == "line 3" else ())


def test_a_file_with_no_usable_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    for line, _ in LINES.values():
        path.write_bytes(line)
        assert problems(path, bad_rows="skip")[0].startswith(f"{path}, line 1: ")


# --- whole files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_refused_flagged_or_read_exactly(name: str, tmp_path: Path) -> None:
    file, content, expected = FILES[name]
    path = tmp_path / file
    path.write_bytes(content)
    if isinstance(expected, Accepted):
        found = texts(path)
        turns = [(("user", p), ("assistant", r)) for p, r in expected.pairs]
        assert found == [rendered(pair) for pair in turns]
    elif isinstance(expected, Bad):
        check_bad_row(path, expected.place, expected.words, expected.total)
    else:
        for policy in ("error", "skip"):
            text = problems(path, bad_rows=policy)[0]
            assert str(path) in text and text.isprintable() and len(text) < 1500
            assert f"{path}, {expected.place}" in text or not expected.place, text
            assert all(word in text for word in expected.words), text


# --- exact texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "feather", "jsonl.gz", "csv.gz"]
)
@pytest.mark.parametrize("kind", m.TEXTS)
def test_text_comes_back_character_for_character(kind: str, suffix: str, tmp_path: Path) -> None:
    text = m.TEXTS[kind]
    path = tmp_path / f"c.{suffix}"
    path.write_bytes(m.container(suffix, [{"prompt": text, "response": "-" + text}] * 2))
    assert texts(path) == [rendered((("user", text), ("assistant", "-" + text)))] * 2


@pytest.mark.parametrize("name", ["pair", "messages", "sharegpt", "alpaca", "chat_completion"])
def test_raw_utf8_and_escapes_are_the_same_text(name: str, tmp_path: Path) -> None:
    """`é` and `\\u00e9`, in every shape: one text, two spellings."""
    odd = m.TEXTS["rtl"] + m.TEXTS["emoji"] + m.TEXTS["nfd"] + m.TEXTS["line_separators"]
    spelled = json.dumps(m.SHAPES[name].good).replace("tell", "X")
    raw, escaped = (
        spelled.replace("X", json.dumps(odd, ensure_ascii=ascii)[1:-1]) for ascii in (False, True)
    )
    path = tmp_path / "c.jsonl"
    path.write_text(f"{raw}\n{escaped}\n", encoding="utf-8", newline="")
    first, second = texts(path)
    assert first == second
    assert first[1].endswith(odd + "</s>")


# --- places that are no files --------------------------------------------------------------------


def test_places_that_are_no_files(tmp_path: Path) -> None:
    """A pipe would block for ever, a loop of links never ends: each is refused by name."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    places = {
        **dict.fromkeys(("pipe", "zero"), "is not a regular file"),
        **dict.fromkeys(("loop", "broken", "missing", "x" * 300), "does not exist"),
        "folder": "holds no data file",
    }
    for name, what in places.items():
        assert f"{name}.jsonl' {what}; " in problems(tmp_path / f"{name}.jsonl")[0]
    (tmp_path / "real.jsonl").write_bytes(GOOD)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    assert len(read(tmp_path / "link.jsonl")[0]) == 1


# --- folders and several files --------------------------------------------------------------------

Tree = dict[str, bytes]
ALPACA = json.dumps(m.ALPACA).encode()


def info(**entry: Any) -> Tree:
    """A LLaMA-Factory folder with one entry, `mine`, and its file."""
    text = json.dumps({"mine": {"file_name": "a.json", **entry}}).encode()
    return {"dataset_info.json": text, "a.json": b"[" + ALPACA + b"]"}


def saved(state: Any) -> Tree:
    """A folder as `save_to_disk` writes it."""
    return {"state.json": json.dumps(state).encode(), "data.arrow": STREAM}


Words = tuple[str, ...]


def entry(*words: str, **settings: Any) -> tuple[Tree, dict[str, str], Words]:
    """A case of `FOLDERS`: an entry that cannot be used, and what the message says."""
    return info(**settings), {"dataset": "mine"}, words


def listed(content: bytes, *words: str) -> tuple[Tree, dict[str, str], Words]:
    """A case of `FOLDERS`: a dataset_info.json of these bytes."""
    return {"dataset_info.json": content}, {"dataset": "mine"}, words


OUTSIDE = "which is outside its folder"
FOLDERS: dict[str, tuple[Tree, dict[str, str], Words]] = {
    "empty": ({}, {}, ("no data file",)),
    "only_notes": ({"README.md": b"hello", ".hidden.jsonl": GOOD}, {}, ("no data file",)),
    "two_kinds": ({"a.jsonl": GOOD, "b.csv": b""}, {}, ("several kinds (.csv, .jsonl); give a",)),
    "other_split": ({"test.jsonl": GOOD}, {}, ("'train'", "test", "data.split")),
    "empty_file_among_several": ({"a.jsonl": GOOD, "b.jsonl": b""}, {}, ("b.jsonl: there is no",)),
    "bad_row_in_second": ({"a.jsonl": GOOD, "b.jsonl": b"\n{"}, {}, ("b.jsonl, line 2: ",)),
    "bad_row_in_parquet": (
        {"a.parquet": PARQUET, "b.parquet": PARQUET[:-9]},
        {},
        ("b.parquet, row 1: ",),
    ),
    "info_broken": listed(b"{", "dataset_info.json", "JSON"),
    "info_list": listed(b"[]", "dataset_info.json", "object"),
    "info_deep": listed(b"[" * 100_000, "dataset_info.json", "JSON"),
    "info_not_chosen": (info(), {}, ("set data.dataset (mine)",)),
    "info_unknown": (info(), {"dataset": "mime"}, ("has no dataset 'mime'; did you mean 'mine'?",)),
    "info_entry_text": listed(b'{"mine": "a"}', "the entry must be a JSON object"),
    "info_no_file": listed(b'{"mine": {}}', "needs file_name or hf_hub_url"),
    "info_script": entry("script_url 'run.py' is a loading script, which", script_url="run.py"),
    "info_hub_script": entry("is a loading script", hf_hub_url="a/b", script_url="x"),
    "info_ranking": entry("ranking: true is preference data", ranking=True),
    "info_cloud": entry("cloud_file_name 's3://x' is in a cloud bucket", cloud_file_name="s3://x"),
    "info_other_hub": entry("ms_hub_url 'a/b' is on another hub", ms_hub_url="a/b"),
    "info_formatting": entry("formatting 'chatml' is not known", "sharegpt", formatting="chatml"),
    "info_unknown_key": entry("the key 'colums' is not known", colums={}),
    "info_split": entry("split 'test' needs a hub dataset", split="test"),
    "info_columns_list": entry("columns must be an object with string values", columns=["a"]),
    "info_columns_number": entry("columns must be an object with", columns={"prompt": 1}),
    "info_columns_unknown": entry("columns: 'images' cannot be used", columns={"images": "i"}),
    "info_column_missing": entry(
        *("a.json, line 1: ", "'ask'", "'tell'"), columns={"prompt": "ask", "response": "tell"}
    ),
    "info_tags_number": entry("tags must be an object with string values", tags={"role_tag": 3}),
    "info_tags_unknown": entry("tags: 'x' cannot be used", tags={"x": "y"}),
    "info_tags_same": entry(
        "tags use 'x'", formatting="sharegpt", tags={"user_tag": "x", "assistant_tag": "x"}
    ),
    "info_samples": entry("num_samples -3 must be an integer of 1", num_samples=-3),
    "info_samples_none": entry("num_samples 0 must be an integer of 1", num_samples=0),
    "info_file_number": entry("file_name", file_name=3),
    "info_file_missing": entry("names 'b.json', which does not exist", file_name="b.json"),
    "info_outside": entry("'../x.json'", OUTSIDE, file_name="../x.json"),
    "info_absolute": entry("'/etc/passwd'", OUTSIDE, file_name="/etc/passwd"),
    "info_odd_suffix": entry(file_name="dataset_info.json"),
    "saved_broken": ({"state.json": b"nope"}, {}, ("state.json", "JSON")),
    "saved_without_files": (saved({}), {}, ("state.json", "no data file")),
    "saved_files_number": (saved({"_data_files": 5}), {}, ("state.json",)),
    "saved_files_text": (saved({"_data_files": "data.arrow"}), {}, ("state.json",)),
    **{
        f"saved_outside_{name}": (saved({"_data_files": [{"filename": name}]}), {}, (OUTSIDE,))
        for name in ("../x.arrow", "/etc/passwd", "", None)
    },
    "saved_missing": (saved({"_data_files": [{"filename": "b.arrow"}]}), {}, ("'b.arrow'",)),
    "saved_folder": (saved({"_data_files": [{"filename": "."}]}), {}, ()),
    "saved_indices": (
        saved({"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": [1]}),
        {},
        ("indices mapping", "flatten_indices"),
    ),
    "splits_number": ({"dataset_dict.json": b'{"splits": 5}'}, {}, ("dataset_dict.json",)),
    "splits_none": ({"dataset_dict.json": b"{}"}, {}, ("'train'",)),
    "splits_other": ({"dataset_dict.json": b'{"splits": ["test"]}'}, {}, ("'train'", "test")),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_each_folder_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tree, data, words = FOLDERS[name]
    for file, content in tree.items():
        (tmp_path / file).write_bytes(content)
    text = problems(tmp_path, **data)[0]
    assert str(tmp_path) in text and text.isprintable() and len(text) < 1500
    assert all(word in text for word in words), text


def test_good_folders_are_read(tmp_path: Path) -> None:
    """The other half: what the refused folders differ from."""
    trees: list[tuple[Tree, dict[str, str], int]] = [
        ({"a.jsonl": GOOD, "b.jsonl": GOOD}, {}, 2),
        (info(), {"dataset": "mine"}, 1),
        (saved({"_data_files": [{"filename": "data.arrow"}]}), {}, 3),
    ]
    for number, (tree, data, count) in enumerate(trees):
        (tmp_path / str(number)).mkdir()
        for file, content in tree.items():
            (tmp_path / str(number) / file).write_bytes(content)
        assert len(read(tmp_path / str(number), **data)[0]) == count


@pytest.mark.parametrize(
    "item", ["~nosuchuser/x.jsonl", "none/*.jsonl", "[", "a\0b.jsonl", ",", "x" * 5000, "\ud800"]
)
def test_items_that_name_nothing(item: str, tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_bytes(GOOD)
    config = settings.load(None, ["model.path=m", f"data.path={good}"]).data
    for path in (item, f"{good},{item}x"):
        with pytest.raises((DataError, ConfigError), match="data.path: "):
            pytest.fail(f"read silently: {read_rows(path, config)}")
