"""`--gpus` and launchers, as a stranger uses them: real processes, one voice, one exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import small_run, write_jsonl
from typer.testing import CliRunner

import dualsft
from dualsft import cli
from dualsft.distributed import launch
from dualsft.errors import ConfigError

Folders = Callable[[str], Path]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
DONE_ALONE = [
    ("report", "run"),
    ("check",),
    ("estimate",),
    ("diagnose", "run"),
    ("compare", "compare_quick"),
    ("methods",),
    ("quickstart",),
    ("export", "merge", "a", "b", "c"),
]


def environment(**more: str) -> dict[str, str]:
    source = str(Path(dualsft.__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "OMP_NUM_THREADS")}
    return {**env, "PYTHONPATH": source, "COLUMNS": "300", **more}


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment(**env),
        timeout=120,
        check=False,
    )


# --- what is not run ------------------------------------------------------------------------------


def test_code_in_the_current_folder_is_not_run(
    model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    """`cd RUN; dualsft … --gpus 2`, where RUN brings a package called dualsft."""
    canary = tmp_path / "canary"
    for package in ("dualsft", "torch", "pip"):
        (tmp_path / "run" / package).mkdir(parents=True)
        code = f"open({str(canary)!r}, 'w')"
        (tmp_path / "run" / package / "__init__.py").write_text(code)
    settings = small_run(model_folder("llama"), corpus)
    words = ["run", "--out", "out", "--until", "split", "--gpus", "2", *settings]
    script = "import sys; sys.argv[0] = 'dualsft'; from dualsft.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path / "run",
        env=environment(),
        timeout=120,
        check=False,
    )
    assert not canary.exists()
    assert done.returncode == 0 and (tmp_path / "run/out/1_split").is_dir(), done.stderr


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("score.lamda=1",), "did you mean"),
        (("model.device=cuda",), "--gpus: 2, but this machine shows no GPU; use model.device=cpu"),
        (("--until", "nothing"), "--until: 'nothing' is not a stage"),
    ],
)
def test_a_mistake_starts_nothing(
    words: tuple[str, ...], told: str, model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    settings = small_run(model_folder("llama"), corpus)
    out = str(tmp_path / "run")
    done = python(
        *("-m", "dualsft", "run", "--gpus", "2", "--out", out, *settings, *words),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 2 and told in done.stderr
    assert done.stdout == "" and not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["run", "split", "score", "evaluate"])
def test_gpus_under_a_launcher_is_refused(
    command: str, model_folder: Folders, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, rank=0)
    folder = [] if command == "run" else ["folder"]
    words = [command, *folder, "--gpus", "1", *small_run(model_folder("llama"), corpus)]
    refused = CliRunner().invoke(cli.app, words).exception
    assert isinstance(refused, ConfigError) and "started by a launcher (WORLD_SIZE=2)" in str(
        refused
    )


def launched(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """As one of two processes of a launcher."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "WORLD_SIZE": "2"}
    for name, value in {**place, "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("words", DONE_ALONE, ids=lambda words: words[0])
def test_a_command_that_is_not_parallel_refuses_on_every_rank(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        launched(monkeypatch, rank)
        refused = CliRunner().invoke(cli.app, words).exception
        assert isinstance(refused, ConfigError) and refused.exit_code == 2
        told = f"dualsft {words[0]} runs in one process; start it without torchrun"
        assert str(refused) == told


def test_one_process_of_a_launcher_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, rank=0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch.size() == 1
    assert CliRunner().invoke(cli.app, ["methods"]).exit_code == 0


# --- one voice ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_error_of_all_is_said_once(model_folder: Folders, tmp_path: Path) -> None:
    """Found before the processes meet, and while they work together."""
    done = python(*TORCHRUN, "-m", "dualsft", "run", "no_such_recipe", OMP_NUM_THREADS="1")
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("error: no_such_recipe:")]
    assert len(told) == 1 and "[rank 1]" not in done.stderr, done.stderr
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "x", "response": ""}] * 40)
    words = small_run(model_folder("llama"), rows)
    out = str(tmp_path / "run")
    done = python("-m", "dualsft", "run", "--gpus", "2", "--out", out, *words)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert "rows.jsonl" in done.stderr and len(lines) == len(set(lines)), done.stderr
    assert all(line.startswith("error: ") for line in lines), done.stderr


# --- the work -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_two_processes(model_folder: Folders, corpus: Path, tmp_path: Path) -> None:
    """The same selection as in one process; nothing is said twice, and nothing by torchrun."""
    words = small_run(model_folder("llama"), corpus)
    out, alone = tmp_path / "run", tmp_path / "alone"
    done = python("-m", "dualsft", "run", "--gpus", "2", "--out", str(out), *words)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "--gpus 2: 2 processes on the CPU (model.device=cpu)"
    for line in (f"run folder: {out}", "[split] started", "2 processes, each with the whole model"):
        assert said.count(line) == 1, done.stdout
    assert "OMP_NUM_THREADS" not in done.stderr and "torch/distributed" not in done.stderr
    done = python("-m", "dualsft", "run", "--gpus", "1", "--out", str(alone), *words)
    assert done.returncode == 0 and "2 processes" not in done.stdout, done.stderr
    name = "5_selection/selected.jsonl"
    assert (out / name).read_bytes() == (alone / name).read_bytes()
    done = python("-m", "dualsft", "evaluate", str(out), "--gpus", "2")
    assert done.returncode == 0 and "[evaluation] reused" in done.stdout, done.stderr
