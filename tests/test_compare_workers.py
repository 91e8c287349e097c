"""`dualsft compare --workers N`: the same cells as in turn, real processes, signals, deaths."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import GREEDY, evaluated_run, matrix_of, quiet, run_all, write_matrix

from dualsft.config import settings
from dualsft.config.settings import Config, DataConfig
from dualsft.lab.compare import cells as comparing
from dualsft.lab.compare import tables as comparison
from dualsft.lab.compare.cells import run_matrix
from dualsft.lab.compare.matrix import Cell, Matrix, load_matrix
from dualsft.runs.folder import RunDir
from dualsft.runs.pipeline import Finished
from dualsft.runs.preflight import FOLDERS
from dualsft.system.paths import RunPath

METHODS = ["dualsft", "dualsft-param", "less", "less+s2ft", "random"]


@pytest.fixture(scope="module")
def words(
    model_folder: Callable[[str], Path], corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    return evaluated_run(model_folder, corpus, tmp_path_factory.mktemp("extra"))


@pytest.fixture(scope="module")
def many(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of METHODS by three real workers, none of which writes a word."""
    folder = tmp_path_factory.mktemp("many")
    matrix = matrix_of(folder, words, methods=METHODS)
    start, made, beside = comparing._start, list[comparing.Worker](), list[int]()

    def counted(*given: Any) -> comparing.Worker:
        made.append(start(*given))
        beside.append(sum(worker.process.poll() is None for worker in made))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "_start", counted)
        mute = "import os; [os.dup2(os.open(os.devnull, os.O_WRONLY), n) for n in (1, 2)]; "
        patch.setattr(comparing, "START", mute + comparing.START)
        run_all(matrix, folder / "many", workers=3)
    logs = [log.read_bytes() for log in folder.glob("many/logs/**/*.log")]
    assert logs == [b""] * len(METHODS) and max(beside) > 1, "cells ran beside each other"
    return folder / "many"


def tables_of(matrix: Matrix, out: Path) -> list[object]:
    """What the result table says, cell by cell."""
    comparison.write_tables(matrix, out, "dualsft")
    results, _ = json.loads((out / "comparison.json").read_text())["tables"]
    assert results["missing"] == []
    return [(row["name"], row["values"]) for row in results["rows"]]


def test_the_same_comparison_as_in_turn(tmp_path: Path, words: list[str], many: Path) -> None:
    """And what two cells share is computed once: those that need it wait for it."""
    matrix, out = matrix_of(tmp_path, words, methods=METHODS), many
    run_all(matrix, tmp_path / "turn")
    assert tables_of(matrix, out) == tables_of(matrix, tmp_path / "turn")
    folders = {c.method.name: out / c.path for c in matrix.cells()}
    assert set(folders) == set(METHODS)
    split = {(folder / "1_split/split.parquet").stat().st_ino for folder in folders.values()}
    assert len(split) == 1
    for name in ("2_warmup/curvature.safetensors", "3_gradients/grad_sum.safetensors"):
        assert os.path.samefile(*(folders[m] / name for m in ("dualsft", "dualsft-param")))
    facts = json.loads((folders["less+s2ft"] / "5_selection/manifest.json").read_text())["facts"]
    assert "taken_over" in facts
    status = json.loads((out / "cells.json").read_text())["cells"]
    assert list(status) == [cell.title for cell in matrix.cells()]


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


def both_training(out: Path, parent: subprocess.Popen[str]) -> list[int]:
    """Wait until two workers are fine-tuning; their numbers."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and parent.poll() is None:
        training = len(list(out.glob("cells/**/6_finetune.part")))
        if training == 2 and len(workers_of(parent.pid)) == 2:
            return workers_of(parent.pid)
        time.sleep(0.05)
    raise AssertionError(f"no two workers: {parent.communicate()[1]}")


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
    assert list(out.glob("cells/**/6_finetune.work"))
    short = load_matrix(path, [*words, "finetune.epochs=1"])
    run_all(short, out, workers=2)


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


def stages_of(run: Path, last: str, target: Path) -> RunPath:
    """A copy of a run folder as it was when this stage had just been finished."""
    for folder in list(FOLDERS.values())[: list(FOLDERS).index(last) + 1]:
        if (run / folder).is_dir():
            shutil.copytree(run / folder, target / folder)
    return RunPath(target)


def running(cell: Cell, config: Config, folder: RunPath) -> comparing.Worker:
    """A worker that is known by its run folder alone: it has no process and no log."""
    none: Any = None
    return comparing.Worker(cell, none, None, none, Finished(config, folder))


def test_who_waits_for_whom(tmp_path: Path, words: list[str], many: Path) -> None:
    """A cell waits for the stage that it can take over, and for nothing else."""
    names = [*METHODS, "smt", "top_loss"]
    matrix = matrix_of(tmp_path, words, methods=names)
    cells = {c.method.name: c for c in matrix.cells()}
    shared = {c: comparing.shared_work(c, matrix.config(c)) for c in matrix.cells()}

    def waiting(worker: comparing.Worker) -> set[str]:
        found = {n for n, c in cells.items() if comparing._awaits(c, [worker], shared)}
        return found - {worker.cell.method.name}

    def awaiting(name: str, last: str) -> set[str]:
        folder = stages_of(many / cells[name].path, last, tmp_path / f"{name} {last}")
        return waiting(running(cells[name], matrix.config(cells[name]), folder))

    for name in METHODS:
        nothing = running(cells[name], matrix.config(cells[name]), RunPath(tmp_path / "none"))
        assert waiting(nothing) == set(cells) - {name}
        assert awaiting(name, "evaluation") == set()
    assert awaiting("random", "split") == set()
    for name, other in [("dualsft", "dualsft-param"), ("dualsft-param", "dualsft")]:
        assert awaiting(name, "split") == {other, "top_loss"}
        assert awaiting(name, "warmup") == awaiting(name, "gradients") == {other}
        assert awaiting(name, "scores") == set()
    assert awaiting("less", "split") == {"less+s2ft"}
    assert awaiting("less", "selection") == set()


def test_a_stage_of_other_settings_is_not_taken_for_the_cells_own(
    tmp_path: Path, words: list[str], many: Path
) -> None:
    """Until it has been made again. What the cell does not need counts as past."""
    changed = [*words, "method.less.epochs=1"]
    matrix = matrix_of(tmp_path, changed, methods=["less"])
    (cell,) = matrix.cells()
    folder = tmp_path / "out" / cell.path
    shutil.copytree(many / cell.path, folder)
    worker = running(cell, matrix.config(cell), RunPath(folder))
    stages = ("split", "warmup", "scores", "selection", "finetune")
    assert [worker.is_past(stage) for stage in stages] == [True, True, True, False, False]
    gone = replace(matrix.config(cell), data=DataConfig(path=str(tmp_path / "gone.jsonl")))
    assert not running(cell, gone, RunPath(folder)).is_past("split"), "the cell itself tells why"
    assert run_matrix(matrix, tmp_path / "out", quiet(), until="selection") == {}
    assert [worker.is_past(stage) for stage in stages] == [True, True, True, True, False]


def test_the_progress_of_a_running_cell(tmp_path: Path, words: list[str]) -> None:
    """The first stage that is being written, and its last record if this process wrote it."""
    matrix = matrix_of(tmp_path, words, methods=["random"])
    (cell,) = matrix.cells()
    run = RunDir(tmp_path / "run")
    worker = running(cell, matrix.config(cell), run.path)
    nothing = worker.progress()
    for folder in ("6_finetune.part", "7_evaluation.part", "5_selection.work"):
        (run.path / folder).mkdir(parents=True)
    run.log_metrics("finetune", work="old", percentage=99.0)
    worker.begun = time.monotonic() + 5
    early = worker.progress()
    assert "finetune" in early and "old" not in early and "finetune" not in nothing
    worker.begun -= 65
    run.log_metrics("finetune", work="epoch 1", percentage=25.0)
    run.log_metrics("finetune", loss=0.5)
    run.log_metrics("evaluation", work="losses", percentage=75.0)
    told = worker.progress()
    assert all(part in told for part in ("finetune", "epoch 1", "25.0", "1:00"))


def test_a_file_with_the_name_of_a_module_is_not_imported(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    matrix = matrix_of(tmp_path, words, methods=["random", GREEDY])
    [(title, why)] = run_matrix(matrix, tmp_path / "out", quiet(), workers=2).items()
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
    monkeypatch.setattr(comparing, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = type("Card", (), {"total_memory": 80 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    gpus = comparing.Gpus.here(4)
    assert gpus.names == names and gpus.memory == 38.0
    assert comparing.Gpus.here(2).memory is None
    plain, limited = (settings.load(None, [*words, *w]) for w in ([], ["model.memory=10"]))
    assert gpus.place(plain, [])[0] == names[0]
    assert gpus.place(plain, [names[0], names[1], names[0]])[0] == names[1]
    assert gpus.place(plain, [])[1].model.memory == 38.0
    assert gpus.place(limited, [])[1].model.memory == 10
