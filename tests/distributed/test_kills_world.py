"""A process that is killed takes its job down, by name and soon; the next start goes on.

Real processes under torchrun, killed with SIGKILL. The next start has as many processes (the same
bits as a run that nobody disturbed) or another number of them (the same selection).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import small_run
from safetensors.torch import load_file
from worlds import WORKER, assert_same_selection, distance, environment, run_jobs, torchrun

SLOWLY = (
    "resume.every=0",
    "score.batch_tokens=60",
    "finetune.micro_batch_size=1",
    "warmup.min_steps=12",
    "finetune.epochs=4",
)
MOMENTS = (
    ("[split] started", 0, "replicate"),
    ("warmup: 1/", 1, "shard"),
    ("warmup: 1/", 0, "replicate"),
    ("v_new", 1, "replicate"),
    ("v_prior", 0, "shard"),
    ("pool (G and f): ", 1, "shard"),
    ("pool (G and f): ", 0, "replicate"),
    ("[selection] started", 1, "shard"),
    ("fine-tuning: 1/", 1, "replicate"),
    ("fine-tuning: 1/", 0, "shard"),
)


@dataclass
class Started:
    """A world that runs in the background, and what it says."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, size: int, job: dict, file: Path) -> Started:
        file.write_text(json.dumps([job]))
        process = subprocess.Popen(
            torchrun(size, str(WORKER), str(file)),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started = cls(process)
        threading.Thread(target=started._read, daemon=True).start()
        return started

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, text: str, limit: float = 120) -> None:
        until = time.monotonic() + limit
        while not any(text in line for line in list(self.lines)):
            assert time.monotonic() < until, f"never said {text!r}: {''.join(self.lines)[-3000:]}"
            assert self.process.poll() is None, "".join(self.lines)[-3000:]
            time.sleep(0.005)

    def pid(self, rank: int) -> int:
        said = re.search(rf"worker {rank} is process (\d+);", "".join(self.lines))
        assert said is not None
        return int(said[1])

    def end(self, limit: float) -> float:
        """Seconds until it has ended by itself."""
        start = time.monotonic()
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"hangs: {''.join(self.lines)[-3000:]}") from None
        return time.monotonic() - start


def kill(job: dict, moment: str, rank: int, folder: Path, number: int = 0) -> Started:
    """Start two processes, kill one at this moment, and see the job end."""
    started = Started.of(2, job, folder / f"killed-{number}.json")
    started.wait_for(moment)
    until = time.monotonic() + 20
    work = re.split(r"[ :]", moment.replace("_", "-"))[0]
    saved = f"*.work/{work}*[0-9]/manifest.json"
    while not moment.startswith("[") and not list(Path(job["out"]).glob(saved)):
        assert time.monotonic() < until, "no progress is saved"
        time.sleep(0.002)
    os.kill(started.pid(rank), signal.SIGKILL)
    assert started.end(60) < 30
    assert started.process.returncode != 0
    said = "".join(started.lines)
    assert "report:" not in said
    assert re.search(rf"rank\W+{rank}\b", said), said[-3000:]
    return started


def assert_same_bits(one: Path, other: Path) -> None:
    for name in ("5_selection/mask", "6_finetune/delta", "6_finetune/model/model"):
        a, b = (load_file(str(run / f"{name}.safetensors")) for run in (one, other))
        assert a.keys() == b.keys()
        assert all(a[key].equal(b[key]) for key in a), name
    assert_same_selection(one, other)


def job(out: Path, model: Path, corpus: Path, mode: str) -> dict:
    words = [*small_run(model, corpus), *SLOWLY, f"parallel.mode={mode}"]
    return {"out": str(out), "settings": words}


def test_a_killed_process_ends_the_job_and_the_next_start_goes_on(
    model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    made = job(tmp_path / "killed", model_folder("llama"), corpus, "shard")
    kill(made, "pool (G and f): ", 1, tmp_path)
    whole = job(tmp_path / "whole", model_folder("llama"), corpus, "shard")
    said = run_jobs(2, [made, whole], tmp_path)
    assert "resuming after" in said
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_ten_moments(model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path) -> None:
    """Each killed run is gone on with by two processes, to the bits of the undisturbed one."""
    model = model_folder("llama")
    wholes = {m: job(tmp_path / f"whole-{m}", model, corpus, m) for m in ("replicate", "shard")}
    jobs = []
    for number, (moment, rank, mode) in enumerate(MOMENTS):
        made = job(tmp_path / f"killed-{number}", model, corpus, mode)
        kill(made, moment, rank, tmp_path, number)
        jobs.append(made)
    run_jobs(2, [*jobs, *wholes.values()], tmp_path, limit=600)
    for made, (_, _, mode) in zip(jobs, MOMENTS, strict=True):
        assert_same_bits(Path(wholes[mode]["out"]), Path(made["out"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "mode"),
    [
        ("warmup: 1/", "shard"),
        ("pool (G and f): ", "replicate"),
        ("pool (G and f): ", "shard"),
        ("fine-tuning: 1/", "shard"),
    ],
)
def test_two_processes_are_followed_by_one_and_by_three(
    moment: str, mode: str, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    model = model_folder("gpt2")
    made = [job(tmp_path / f"after-{size}", model, corpus, mode) for size in (1, 3)]
    for number, one in enumerate(made):
        kill(one, moment, 1, tmp_path, number)
    whole = job(tmp_path / "whole", model, corpus, mode)
    for size, one in zip((1, 3), made, strict=True):
        said = run_jobs(size, [one, *([whole] if size == 1 else [])], tmp_path)
        assert "resuming after" in said
    for one in made:
        out = Path(one["out"])
        assert_same_selection(tmp_path / "whole", out)
        tuned = "6_finetune/model/model"
        assert distance(tmp_path / "whole" / tuned, out / tuned) <= 1e-6
