"""`dualsft compare --workers N`: the same cells as in turn, real processes, signals, deaths."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import corpus_rows, small_run, write_jsonl

from dualsft.config import settings
from dualsft.lab.compare import pages as comparison_tables
from dualsft.lab.compare import workers as comparing_workers
from dualsft.lab.compare.cells import run_matrix
from dualsft.lab.compare.matrix import Matrix, load_matrix
from dualsft.system.progress import Reporter

METHODS = ["dualsft", "dualsft-param", "less", "less+s2ft", "random"]


@pytest.fixture(scope="module")
def words(model_folder, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:  # noqa: ANN001
    extra = write_jsonl(tmp_path_factory.mktemp("extra") / "extra.jsonl", corpus_rows(15, seed=9))
    return [*small_run(model_folder("llama"), corpus), f"evaluation.files=extra:{extra}"]


@pytest.fixture(scope="module")
def many(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A comparison of METHODS by three real workers: its folder, and what the parent said."""
    folder, said = tmp_path_factory.mktemp("many"), list[str]()
    matrix = load_matrix(write_matrix(folder, methods=METHODS), words)
    assert run_matrix(matrix, folder / "many", Reporter(said.append), workers=3) == {}
    return folder / "many", said


def write_matrix(tmp_path: Path, **content: object) -> Path:
    path = tmp_path / "matrix.yaml"
    path.write_text(yaml.safe_dump({"name": "test", "seeds": [42], **content}))
    return path


def tables_of(matrix: Matrix, out: Path) -> list[object]:
    """What the result table says, cell by cell."""
    comparison_tables.write_tables(matrix, out, "dualsft")
    results, _ = json.loads((out / "comparison.json").read_text())["tables"]
    assert results["missing"] == []
    return [(row["name"], row["values"]) for row in results["rows"]]


def test_the_same_comparison_as_in_turn(
    tmp_path: Path, words: list[str], many: tuple[Path, list[str]]
) -> None:
    """And what two cells share is computed once: those that need it wait for it."""
    matrix = load_matrix(write_matrix(tmp_path, methods=METHODS), words)
    out, said = many
    assert run_matrix(matrix, tmp_path / "turn", Reporter([].append), strict=True) == {}
    assert tables_of(matrix, out) == tables_of(matrix, tmp_path / "turn")
    folders = {c.method.name: out / c.path for c in matrix.cells()}
    assert set(folders) == set(METHODS)
    split = {(folder / "1_split/split.parquet").stat().st_ino for folder in folders.values()}
    assert len(split) == 1
    for name in ("2_warmup/curvature.safetensors", "3_gradients/grad_sum.safetensors"):
        assert os.path.samefile(*(folders[m] / name for m in ("dualsft", "dualsft-param")))
    facts = json.loads((folders["less+s2ft"] / "5_selection/manifest.json").read_text())["facts"]
    assert "taken_over" in facts
    for cell in matrix.cells():
        assert any(line.startswith(f"{cell.title}: done in") for line in said)
    status = json.loads((out / "cells.json").read_text())["cells"]
    assert list(status) == [cell.title for cell in matrix.cells()]


def test_only_results_are_kept_and_failures_are_told(tmp_path: Path, words: list[str]) -> None:
    """Nothing is pruned that a later cell takes over; one that fails does not stop the rest."""
    greedy = {"name": "greedy", "data": "random", "settings": {"select.data_budget": 5000}}
    path = write_matrix(tmp_path, methods=[greedy, *METHODS[:2]], keep="results")
    matrix, out = load_matrix(path, words), tmp_path / "out"
    [(title, why)] = run_matrix(matrix, out, Reporter([].append), workers=2).items()
    assert "greedy" in title and "select.data_budget" in why
    kept = {p.name for p in out.rglob("*.safetensors")}
    assert kept == {"mask.safetensors", "delta.safetensors"}
    param = next(out / c.path for c in matrix.cells() if c.method.name == "dualsft-param")
    log = (out / "logs" / param.relative_to(out / "cells")).with_suffix(".log").read_text()
    assert "[gradients] taken over" in log
    run_matrix(matrix, out, Reporter([].append), workers=2)
    logs = [log.read_text() for log in out.glob("logs/**/*.log")]
    assert sum("keeping its results" in log for log in logs) == 2
    status = json.loads((out / "cells.json").read_text())["cells"]
    assert [bool(cell["failed"]) for cell in status.values()] == [True, False, False]


def start(path: Path, out: Path, words: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dualsft", "compare", str(path), "--out", str(out)]
    return subprocess.Popen(
        [*command, "--workers", "2", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(parent: int) -> list[int]:
    """Processes that this one has started and that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def both_training(out: Path, running: subprocess.Popen[str]) -> list[int]:
    """Wait until two workers are at work on a stage; their numbers."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.poll() is None:
        logs = [log.read_text() for log in out.glob("logs/**/*.log")]
        split = sum("[split] done" in log or "[split] taken over" in log for log in logs)
        if split == 2 and len(workers_of(running.pid)) == 2:
            return workers_of(running.pid)
        time.sleep(0.05)
    raise AssertionError(f"no two workers: {running.communicate()[1]}")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_comparison_goes_on(how: int, tmp_path: Path, words: list[str]) -> None:
    """Ctrl-C is passed on and waited for; when the parent is killed the workers end too."""
    path, out = write_matrix(tmp_path, methods=["sft", "random"]), tmp_path / "out"
    long = [*words, "finetune.epochs=3000"]
    running = start(path, out, long)
    workers = both_training(out, running)
    running.send_signal(how)
    _, told = running.communicate(timeout=60)
    if how == signal.SIGINT:
        assert running.returncode == 130 and "saved the progress of 2 cells" in told
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert any("stopped by" in log.read_text() for log in out.glob("logs/**/*.log"))
    short = load_matrix(path, [*words, "finetune.epochs=1"])
    assert run_matrix(short, out, Reporter([].append), workers=2) == {}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_worker_that_is_killed_is_named(tmp_path: Path, words: list[str]) -> None:
    path, out = write_matrix(tmp_path, methods=["sft", "random"]), tmp_path / "out"
    running = start(path, out, [*words, "finetune.epochs=600"])
    os.kill(both_training(out, running)[0], signal.SIGKILL)
    _, told = running.communicate(timeout=300)
    assert running.returncode == 1 and "killed by SIGKILL" in told
    status = json.loads((out / "cells.json").read_text())["cells"]
    assert sum(bool(cell["failed"]) for cell in status.values()) == 1


def log_of(out: Path, method: str) -> list[bytes]:
    """The lines that the worker of this method has left."""
    (log,) = out.glob(f"logs/**/{method}/*.log")
    return log.read_bytes().split(b"\n")


def up_to(said: list[bytes], stage: str, passed: bool) -> list[bytes]:
    """A worker's lines when it has this stage, or just before: a stage ends with its last line."""
    last = max(i for i, line in enumerate(said) if line.startswith(f"[{stage}] ".encode()))
    return said[: last + passed]


def test_who_waits_for_whom(tmp_path: Path, words: list[str], many: tuple[Path, list[str]]) -> None:
    """A cell waits for the stage that it can take over, and for nothing else.

    The lines are those of real workers, cut where a stage ends or just before: that stages are
    found in them is what is tested, so none is written here.
    """
    matrix = load_matrix(write_matrix(tmp_path, methods=[*METHODS, "smt", "top_loss"]), words)
    cells = {c.method.name: c for c in matrix.cells()}
    shared = {c: comparing_workers.shared_work(c, matrix.config(c)) for c in matrix.cells()}
    log = tmp_path / "log"

    def awaiting(running: str, said: list[bytes]) -> set[str]:
        log.write_bytes(b"\n".join(said))
        worker: Any = comparing_workers.Worker(cells[running], None, None, log, 0.0)  # pyright: ignore[reportArgumentType]
        found = {n for n, c in cells.items() if comparing_workers._awaits(c, [worker], shared)}
        return found - {running}

    for name in METHODS:
        said = log_of(many[0], name)
        assert awaiting(name, []) == set(cells) - {name}
        assert awaiting(name, up_to(said, "split", False)) == set(cells) - {name}
        assert awaiting(name, up_to(said, "evaluation", True)) == set()
    assert awaiting("random", up_to(log_of(many[0], "random"), "split", True)) == set()
    pair = {"dualsft", "dualsft-param"}
    for name in pair:  # the first computes, the second takes over
        said, other = log_of(many[0], name), pair - {name}
        assert awaiting(name, up_to(said, "split", True)) == other | {"top_loss"}
        assert awaiting(name, up_to(said, "warmup", False)) == other | {"top_loss"}
        assert awaiting(name, up_to(said, "warmup", True)) == other
        assert awaiting(name, up_to(said, "scores", False)) == other
        assert awaiting(name, up_to(said, "scores", True)) == set()
    again, cell = tmp_path / "again", cells["less"].path
    shutil.copytree(many[0] / cell, again / cell)
    changed = [*words, "method.less.epochs=1"]
    matrix = load_matrix(write_matrix(tmp_path, methods=["less"]), changed)
    assert run_matrix(matrix, again, Reporter([].append), until="selection", workers=2) == {}
    for out in (many[0], again):  # there the split is found, and the selection made once more
        said = log_of(out, "less")
        assert sum(line.startswith(b"[selection] ") for line in said) == 2
        assert awaiting("less", up_to(said, "split", True)) == {"less+s2ft"}
        assert awaiting("less", up_to(said, "selection", False)) == {"less+s2ft"}
        assert awaiting("less", up_to(said, "selection", True)) == set()


def test_cells_that_no_budget_tells_apart_are_made_once(tmp_path: Path, words: list[str]) -> None:
    budgets = [{"data": 0.1, "params": 0.05}, {"data": 0.2, "params": 0.05}]
    matrix = load_matrix(write_matrix(tmp_path, methods=["sft"], budgets=budgets), words)
    out = tmp_path / "out"
    assert run_matrix(matrix, out, Reporter([].append), workers=2) == {}
    logs = [log.read_text() for log in out.glob("logs/**/*.log")]
    assert sorted("[finetune] taken over" in log for log in logs) == [False, True]


def test_a_file_with_the_name_of_a_module_is_not_imported(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    too_much = {"name": "greedy", "data": "random", "settings": {"select.data_budget": 5000}}
    matrix = load_matrix(write_matrix(tmp_path, methods=["random", too_much]), words)
    [(title, why)] = run_matrix(matrix, tmp_path / "out", Reporter([].append), workers=2).items()
    assert "greedy" in title and "select.data_budget" in why
    assert not list(tmp_path.glob("out/logs/**/*.failed"))


@pytest.mark.parametrize(
    ("shown", "names"),
    [
        (None, ("0", "1")),
        (" 3, 5", ("3", "5")),
        ("0,1,-1,2", ("0", "1")),
        ("MIG-a,MIG-b,", ("MIG-a", "MIG-b")),
    ],
)
def test_workers_share_the_gpus(
    monkeypatch: pytest.MonkeyPatch, words: list[str], shown: str | None, names: tuple[str, ...]
) -> None:
    """Cards that are not here are stood for: the least taken one, equal parts of its memory."""
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(comparing_workers, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = type("Card", (), {"total_memory": 80 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    gpus = comparing_workers.Gpus.here(4)
    assert gpus.names == names and gpus.memory == 38.0
    assert comparing_workers.Gpus.here(2).memory is None
    plain, limited = (settings.load(None, [*words, *w]) for w in ([], ["model.memory=10"]))
    assert gpus.place(plain, [])[0] == names[0]
    assert gpus.place(plain, [names[0], names[1], names[0]])[0] == names[1]
    assert gpus.place(plain, [])[1].model.memory == 38.0
    assert gpus.place(limited, [])[1].model.memory == 10
