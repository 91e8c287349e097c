"""Hostile data: random damage, and sizes that would fill the memory.

Random edits of good files end in rows or in a named problem, never in another exception. Files of
gigabytes (a line, a field, a gzip or Parquet bomb, a sparse file) are refused by name; each is read
in a process of its own, whose peak may rise by 512 MB at most.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import malformed as m
import pyarrow as pa
import pytest
from malformed import GOOD, HEAD
from test_malformed import read

import dualsft
from dualsft.errors import ConfigError, DataError, RunError
from dualsft.storage.tensor_files import TensorFile
from dualsft.system.paths import RunPath

# --- random damage -------------------------------------------------------------------------------


def mutate(content: bytes, rng: random.Random) -> bytes:
    """A few random edits: flips, cuts, repeats and insertions of awkward bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 12)]
            case 2:
                data[at:at] = rng.choice([b"\x00", b'"', b"\n", b"\xff", b"[", b"{", b",", b"\r"])
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 30)]
            case _:
                del data[at:]
        data = data or bytearray(b"\n")
    return bytes(data)


def damage_many(suffix: str, count: int, folder: str) -> None:
    """Read `count` damaged files; each gives rows or a problem that names the file."""
    rng = random.Random(f"{suffix} {count}")
    path = Path(folder) / f"c.{suffix}"
    shapes = ("pair",) if suffix in ("csv", "tsv") else ("pair", "messages", "sharegpt", "alpaca")
    whole = [m.container(suffix, [m.SHAPES[name].good] * 4) for name in shapes]
    for _ in range(count):
        path.write_bytes(mutate(rng.choice(whole), rng))
        try:
            rows, report = read(path, bad_rows="skip")
        except (DataError, ConfigError) as problem:
            assert str(path) in problem.problems[0], problem
        else:
            assert len(rows) == report.num_good > 0
            assert report.num_rows == report.num_good + report.num_bad


COUNTS = [150, pytest.param(10_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "jsonl.gz", "json.gz", "csv.gz"])
def test_random_damage_ends_in_rows_or_a_named_problem(
    suffix: str, count: int, tmp_path: Path
) -> None:
    damage_many(suffix, count, str(tmp_path))


@pytest.mark.parametrize("count", COUNTS)
def test_random_damage_to_tables_does_not_crash(count: int, tmp_path: Path) -> None:
    """In a process of its own: what a damaged table can do to the library is end the process."""
    code = "import sys, test_hostile_sizes as t\nfor suffix in sys.argv[3:]:\n"
    code += "    t.damage_many(suffix, int(sys.argv[1]), sys.argv[2])\n"
    folders = [str(Path(dualsft.__file__).parents[1]), str(Path(__file__).parent)]
    words = [str(count), str(tmp_path), "parquet", "arrow", "feather", "parquet.gz"]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# --- hostile sizes -------------------------------------------------------------------------------

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from dualsft.config import settings as config
from dualsft.data.rows import read_rows
from dualsft.errors import ConfigError, DataError

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def read(path):
    data = config.load(None, ["model.path=m", f"data.path={path}", "data.bad_rows=skip"]).data
    Path("/proc/self/clear_refs").write_text("5")
    base, began = memory("VmRSS"), time.process_time()
    try:
        rows, report = read_rows(Path(path), data)
        result = {"rows": len(rows), "said": report.bad[:3] + report.notes()}
    except (ConfigError, DataError) as problem:
        result = {"rows": 0, "said": problem.problems}
    return result | {"extra": memory("VmHWM") - base, "seconds": time.process_time() - began}

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        signal.alarm(240)
        print(json.dumps(read(line.strip())), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(json.dumps({"died": status}), flush=True)
"""
"""Imports once, then reads each file named on its standard input in a fork of its own."""
MEGABYTE = 1 << 20


def columns(**values: Any) -> pa.Table:
    return pa.table(values)


def write_long(path: Path, before: bytes, after: bytes, megabytes: int) -> None:
    with path.open("wb") as file:
        file.write(before)
        for _ in range(megabytes):
            file.write(b"x" * MEGABYTE)
        file.write(after)


def write_sparse(path: Path, before: bytes, gigabytes: int) -> None:
    path.write_bytes(before)
    os.truncate(path, gigabytes << 30)


def write_bomb(path: Path, before: bytes, block: bytes, megabytes: int) -> None:
    """Megabytes of `block`, a thousand times smaller in the file."""
    member = gzip.compress(block * (MEGABYTE // len(block)))
    path.write_bytes(gzip.compress(before) + member * megabytes)


def write_hostile(name: str, path: Path) -> None:
    start, rest = GOOD + b"\n" + GOOD[:-2], b'"}\n' + GOOD + b"\n"
    match name:
        case "line.jsonl":
            write_long(path, start, rest, 100)
        case "element.json":
            write_long(path, b"[" + GOOD + b"," + GOOD[:-2], b'"}]', 100)
        case "field.csv":
            write_long(path, HEAD + b'ask,tell\nask,"', b'"\nask,tell\n', 100)
        case "open_quote.csv":
            write_long(path, HEAD + b'ask,tell\nask,"', b"\n", 300)
        case "name.csv":
            write_long(path, b"prompt,response,", b"\nask,tell,x\n", 100)
        case "columns.jsonl":
            more = b", ".join(b'"c%d": 1' % i for i in range(1_000_000))
            path.write_bytes(GOOD + b"\n" + GOOD[:-1] + b", " + more + b"}\n")
        case "turns.jsonl":
            turns = json.dumps([m.ASK, m.TELL])[1:-1].encode()
            path.write_bytes(b'{"messages": [' + b",".join([turns] * 500_000) + b"]}\n")
        case "nesting.jsonl":
            path.write_bytes(GOOD[:-1] + b', "x": ' + b"[" * 10_000_000 + b"\n" + GOOD)
        case "dictionary.parquet":  # a few kilobytes that mean two gigabytes
            many = pa.DictionaryArray.from_arrays(
                pa.nulls(2000, pa.int32()).fill_null(0), ["x" * MEGABYTE]
            )
            path.write_bytes(m.parquet(columns(prompt=many, response=many), compression="zstd"))
        case "one_value.parquet":
            value = ["x" * (120 * MEGABYTE)]
            path.write_bytes(
                m.parquet(columns(prompt=value, response=["tell"]), compression="zstd")
            )
        case "one_value.arrow":
            value, zstd = ["x" * (120 * MEGABYTE)], pa.ipc.IpcWriteOptions(compression="zstd")
            path.write_bytes(m.arrow_stream(columns(prompt=value, response=["tell"]), options=zstd))
        case "bad_lines.jsonl":
            path.write_bytes(GOOD + b"\n" + b"{\n" * 1_000_000)
        case "blank_lines.jsonl":
            path.write_bytes(GOOD + b"\n" * 5_000_000)
        case "blank_between.jsonl":
            path.write_bytes((GOOD + b" \n" * 500_000) * 10)
        case "objects.jsonl" | "objects.json":
            row = GOOD[:-1] + b', "x": [' + b"{}," * 10_000_000 + b"{}]}"
            path.write_bytes(b"[" + GOOD + b"," + row + b"]" if path.suffix == ".json" else row)
        case "texts.jsonl.gz":  # 20 kilobytes
            row = json.dumps({"prompt": "ab " * 330_000, "response": "tell"}).encode()
            path.write_bytes(gzip.compress(row + b"\n") * 20)
        case "texts.parquet":
            many = ["ab " * 330_000] * 20
            path.write_bytes(m.parquet(columns(prompt=many, response=["tell"] * 20)))
        case "rows.jsonl.gz":  # 30 kilobytes, ten million rows
            path.write_bytes(gzip.compress((GOOD + b"\n") * 100_000) * 100)
        case "rows.arrow":
            zeros, zstd = pa.nulls(100_000, pa.int8()), pa.ipc.IpcWriteOptions(compression="zstd")
            one = pa.DictionaryArray.from_arrays(zeros.fill_null(0), ["ask"])
            table = pa.concat_tables([columns(prompt=one, response=one)] * 100)
            path.write_bytes(m.arrow_stream(table, options=zstd))
        case "rows.parquet":
            nothing = pa.nulls(30_000_000, pa.string())
            path.write_bytes(m.parquet(columns(prompt=nothing, response=nothing)))
        case "padded.jsonl.gz":
            path.write_bytes(gzip.compress(GOOD + b"\n"))
            os.truncate(path, 10 << 30)
        case _ if name.startswith("sparse"):
            kind = path.suffix
            before = {".jsonl": GOOD + b"\n", ".json": b"[" + GOOD, ".csv": HEAD}.get(kind, b"PAR1")
            write_sparse(path, before, 10)
        case _ if name.startswith("bomb"):
            before = {"bomb.json.gz": b"[" + GOOD + b",", "bomb.csv.gz": HEAD}.get(
                name, GOOD + b"\n"
            )
            write_bomb(path, before, b" " if "blank" not in name else b"\n", 1000)
        case _:
            raise ValueError(name)


REFUSED_SIZES = {
    "line.jsonl": "line 2",
    "element.json": "line 1",
    "field.csv": "line 3",
    "open_quote.csv": "line 3",
    "name.csv": "line 1",
    "nesting.jsonl": "line 1",
    "sparse.jsonl": "a sparse file",
    "sparse.json": "a sparse file",
    "sparse.csv": "a sparse file",
    "sparse.parquet": "",
    "sparse.arrow": "",
    "bomb.jsonl.gz": "line 2",
    "bomb.json.gz": "line 1",
    "bomb.csv.gz": "line 2",
    "bomb.parquet.gz": "",
    "bomb.arrow.gz": "",
    "one_value.parquet": "row 1",
    "one_value.arrow": "row 1",
    "dictionary.parquet": "",
    "blank_lines.jsonl": "line 1000002: more than 1,000,000 blank lines",
    "blank_between.jsonl": "blank lines so far (max_blank_lines)",
    "objects.jsonl": "(MAX_PARSED_BYTES)",
    "objects.json": "(MAX_PARSED_BYTES)",
    "rows.parquet": "max_ratio is 100",
    "padded.jsonl.gz": "a sparse file",
    "texts.jsonl.gz": "free_text",
    "texts.parquet": "free_text",
}
"""Each is refused, or the one row that is too large is named."""
SLOW_SIZES = {
    "bad_lines.jsonl": "line 2",
    "bomb_blank.jsonl.gz": "line ",
    "rows.jsonl.gz": "max_ratio is 100",
    "rows.arrow": "max_ratio is 100",
}
HARMLESS_SIZES = ("columns.jsonl", "turns.jsonl")
"""Odd, but no reason to refuse them; or said by name."""


@pytest.fixture(scope="module")
def worker() -> Iterator[subprocess.Popen[str]]:
    source = str(Path(dualsft.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.communicate()


Hostile = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture
def hostile(worker: subprocess.Popen[str], tmp_path: Path) -> Hostile:
    """Have a file read by the worker: (path, what came of it), within 512 MB."""

    def read(name: str) -> tuple[Path, dict[str, Any]]:
        path = tmp_path / name
        write_hostile(name, path)
        assert worker.stdin and worker.stdout
        worker.stdin.write(f"{path}\n")
        worker.stdin.flush()
        result = json.loads(worker.stdout.readline())
        path.unlink()
        assert "died" not in result, f"{name}: the process ended with status {result['died']}"
        assert result["extra"] <= 512 * MEGABYTE, f"{result['extra'] / MEGABYTE:.0f} MB"
        assert result["seconds"] <= 10, f"{result['seconds']:.1f} s of processor time"
        return path, result

    return read


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *REFUSED_SIZES.items(),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_SIZES.items()),
    ],
)
def test_hostile_sizes_are_refused_in_bounded_memory(
    name: str, place: str, hostile: Hostile
) -> None:
    path, result = hostile(name)
    assert result["said"], "nothing was said"
    assert str(path) in result["said"][0] and place in result["said"][0], result["said"]
    assert result["rows"] <= 3 and len(result["said"][0]) < 1500


@pytest.mark.parametrize("name", HARMLESS_SIZES)
def test_wide_and_long_rows_need_bounded_memory(name: str, hostile: Hostile) -> None:
    path, result = hostile(name)
    assert result["rows"] >= 1 or str(path) in result["said"][0], result


# --- files of a run folder: little on disk, much in memory ---------------------------------------


def one_string(times: int, length: int) -> pa.Table:
    index = pa.nulls(times, pa.int32()).fill_null(0)
    return columns(id=pa.DictionaryArray.from_arrays(index, ["x" * length]).cast(pa.string()))


def one_list(length: int) -> pa.Table:
    zeros = pa.nulls(length, pa.int32()).fill_null(0)
    return columns(id=pa.ListArray.from_arrays([0, length], zeros))


BOMBS: dict[str, Callable[[], bytes]] = {
    "lists.json": lambda: b"[" + b"[]," * 5_000_000 + b"[]]",
    "objects.json": lambda: b"[" + b"{}," * 5_000_000 + b"{}]",
    "text.json": lambda: b'"' + b"x" * (140 << 20) + "\N{GRINNING FACE}".encode() + b'"',
    "strings.parquet": lambda: m.parquet(one_string(150, MEGABYTE), compression="zstd"),
    "rows.parquet": lambda: m.parquet(
        columns(id=pa.nulls(40_000_000, pa.int8()).fill_null(0)), compression="zstd"
    ),
    "lists.parquet": lambda: m.parquet(one_list(40_000_000), compression="zstd"),
    "header.safetensors": lambda: (
        (15_000_008).to_bytes(8, "little") + b'{"a":[' + b"{}," * 5_000_000 + b"]}"
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_files_of_a_run_folder_that_grow(name: str, tmp_path: Path) -> None:
    """Refused by name before they are parsed or decoded; the cure is said."""
    path = RunPath(tmp_path) / name
    (tmp_path / name).write_bytes(BOMBS[name]())
    assert (tmp_path / name).stat().st_size < 200 << 20
    readers = {".json": path.read_json, ".parquet": path.read_table}
    read = readers.get(path.suffix, lambda: TensorFile(path))
    with pytest.raises(RunError, match=rf"{name}: .*(remove|copy)") as refused:
        read()
    assert len(str(refused.value)) < 1000


def test_honest_files_of_a_run_folder_are_read(tmp_path: Path) -> None:
    """A hundred thousand ids and tokens; the ids differ, the rest may repeat itself."""
    count = 100_000
    ids = [f"{i:016x}-{i}" for i in range(count)]
    path = RunPath(tmp_path) / "a.parquet"
    table = pa.table({"id": ids, "role": ["pool"] * count, "input_ids": [[7] * 20] * count})
    path.write_table(table)
    assert path.read_table() == table
    assert path.read_table(["role", "id"]) == table.select(["role", "id"])
    batches = list(path.read_batches(200))
    assert batches[0].num_rows == 0 and pa.Table.from_batches(batches) == table
    (RunPath(tmp_path) / "ids.json").write_json(ids * 10)
    assert (RunPath(tmp_path) / "ids.json").read_json() == ids * 10


def test_holes_are_looked_for_where_stat_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may report no blocks for a file that is whole, as ZFS does for a while."""
    whole, sparse = RunPath(tmp_path) / "whole", RunPath(tmp_path) / "sparse"
    write_long(tmp_path / "whole", b"", b"", 130)
    write_sparse(tmp_path / "sparse", b"x", 1)
    monkeypatch.setattr("dualsft.system.paths.blocks_of", lambda state: 0)
    assert whole.size == 130 * MEGABYTE
    with pytest.raises(RunError, match="sparse: has 1,073,741,824 bytes, of which"):
        sparse.open()
    files, refused = RunPath(tmp_path).tree()
    assert set(files) == {"whole", "sparse"} and len(refused) == 1 and "sparse" in refused[0]
    sparse.unlink()
    assert RunPath(tmp_path).tree()[1] == []
