"""`dualsft compare --workers N`: the same cells as in turn, real processes, signals, deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import corpus_rows, small_run, write_jsonl

from dualsft import comparing_workers, comparison_tables
from dualsft import config as settings
from dualsft.comparing import run_matrix
from dualsft.comparison_matrix import Matrix, load_matrix
from dualsft.progress import Reporter

METHODS = ["dualsft", "dualsft-param", "less", "less+s2ft", "random"]


@pytest.fixture
def words(model_folder, corpus: Path, tmp_path: Path) -> list[str]:  # noqa: ANN001
    extra = write_jsonl(tmp_path / "extra.jsonl", corpus_rows(15, seed=9))
    return [*small_run(model_folder("llama"), corpus), f"evaluation.files=extra:{extra}"]


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


def test_the_same_comparison_as_in_turn(tmp_path: Path, words: list[str]) -> None:
    """And what two cells share is computed once: those that need it wait for it."""
    matrix = load_matrix(write_matrix(tmp_path, methods=METHODS), words)
    said: list[str] = []
    assert run_matrix(matrix, tmp_path / "many", Reporter(said.append), workers=3) == {}
    assert run_matrix(matrix, tmp_path / "turn", Reporter([].append), strict=True) == {}
    assert tables_of(matrix, tmp_path / "many") == tables_of(matrix, tmp_path / "turn")
    folders = {c.method.name: tmp_path / "many" / c.path for c in matrix.cells()}
    for name in ("2_warmup/curvature.safetensors", "3_gradients/grad_sum.safetensors"):
        assert os.path.samefile(*(folders[m] / name for m in ("dualsft", "dualsft-param")))
    facts = json.loads((folders["less+s2ft"] / "5_selection/manifest.json").read_text())["facts"]
    assert "taken_over" in facts
    for cell in matrix.cells():
        assert any(line.startswith(f"{cell.title}: done in") for line in said)
    status = json.loads((tmp_path / "many/cells.json").read_text())["cells"]
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
    log = (out / "logs" / ("_".join(param.relative_to(out).parts[1:]) + ".log")).read_text()
    assert "[gradients] taken over" in log
    run_matrix(matrix, out, Reporter([].append), workers=2)
    logs = [log.read_text() for log in out.glob("logs/*.log")]
    assert sum("results are kept" in log for log in logs) == 2
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
        logs = [log.read_text() for log in out.glob("logs/*.log")]
        if sum("[split] done" in log for log in logs) == 2 and len(workers_of(running.pid)) == 2:
            return workers_of(running.pid)
        time.sleep(0.05)
    raise AssertionError(f"no two workers: {running.communicate()[1]}")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_comparison_goes_on(how: int, tmp_path: Path, words: list[str]) -> None:
    """Ctrl-C is passed on and waited for; when the parent is killed the workers end too."""
    path, out = write_matrix(tmp_path, methods=["sft", "random"]), tmp_path / "out"
    long = [*words, "finetune.epochs=400"]
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
    assert any("stopped by" in log.read_text() for log in out.glob("logs/*.log"))
    short = load_matrix(path, [*words, "finetune.epochs=1"])
    assert run_matrix(short, out, Reporter([].append), workers=2) == {}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_worker_that_is_killed_is_named(tmp_path: Path, words: list[str]) -> None:
    path, out = write_matrix(tmp_path, methods=["sft", "random"]), tmp_path / "out"
    running = start(path, out, [*words, "finetune.epochs=150"])
    os.kill(both_training(out, running)[0], signal.SIGKILL)
    _, told = running.communicate(timeout=300)
    assert running.returncode == 1 and "died of SIGKILL" in told
    status = json.loads((out / "cells.json").read_text())["cells"]
    assert sum(bool(cell["failed"]) for cell in status.values()) == 1


def test_who_waits_for_whom(tmp_path: Path, words: list[str]) -> None:
    """A cell waits for the stage that it can take over, and for nothing else."""
    matrix = load_matrix(write_matrix(tmp_path, methods=[*METHODS, "smt", "top_loss"]), words)
    cells = {c.method.name: c for c in matrix.cells()}
    shared = {c: comparing_workers.shared_work(c, matrix.config(c)) for c in matrix.cells()}
    worker = comparing_workers.Worker(cells["less"], None, None, tmp_path, 0.0)  # pyright: ignore[reportArgumentType]

    def awaiting() -> set[str]:
        waits = comparing_workers._awaited
        return {name for name, c in cells.items() if waits(c, [worker], shared, tmp_path)}

    first = awaiting()
    assert "less+s2ft" in first and "random" not in first
    for stage in ("2_warmup", "5_selection"):
        (tmp_path / cells["less"].path / stage).mkdir(parents=True)
        (tmp_path / cells["less"].path / stage / "manifest.json").write_text("{}")
    assert awaiting() == set()


def test_places_share_the_gpus(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Cards that are not here are stood for: dealt out in turn, with equal parts of the memory."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    card = torch.device("cuda")
    monkeypatch.setattr(comparing_workers, "choose_device", lambda _: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    props = type("P", (), {"total_memory": 80 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: props)
    said: list[str] = []
    found = comparing_workers.places(settings.load(None, words), 4, Reporter(said.append))
    assert [p.environment["CUDA_VISIBLE_DEVICES"] for p in found] == ["0", "1", "0", "1"]
    assert {p.memory for p in found} == {38.0} and "38.0 GiB" in said[0]
    set_by_user = settings.load(None, [*words, "model.memory=10"])
    assert {p.memory for p in comparing_workers.places(set_by_user, 4, Reporter())} == {None}
    assert {
        p.memory for p in comparing_workers.places(settings.load(None, words), 2, Reporter())
    } == {None}
