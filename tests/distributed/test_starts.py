"""Every way to start several processes gives the run of one process.

torchrun's two agents on one machine are what two machines do; accelerate starts torchrun itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Runner, small_run
from worlds import FP32, Limits, assert_same_run, environment, run_jobs

SMALL = ("score.batch_tokens=150", "finetune.micro_batch_size=1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(words: list[str], out: Path, settings: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *words, "-m", "dualsft", "run", "--out", str(out), *settings]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said[-3000:]
    return said


@pytest.mark.slow
def test_accelerate_and_two_machines(
    make_run: Runner, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    settings = [*small_run(model_folder("llama"), corpus), *SMALL]
    one = make_run(*SMALL, out="one")
    accelerate = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    plain = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    said = finish(start([*accelerate, *plain], tmp_path / "accelerate", settings))
    assert "2 processes, each with the whole model" in said
    assert_same_run(one, tmp_path / "accelerate", FP32)

    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    machine = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *where]
    sharded = [*settings, "parallel.mode=shard"]
    both = [start(machine, tmp_path / "machines", sharded) for _ in range(2)]
    said = "".join(map(finish, both))
    assert said.count("2 processes, each with its rows of the model") == 1
    assert_same_run(one, tmp_path / "machines", FP32)


@pytest.mark.slow
def test_rows_in_host_memory_and_half_precision(
    make_run: Runner,
    model_folder: Callable[[str], Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bf16 is compared between the modes: one process adds up its micro-batches in another order,
    which half precision shows."""
    monkeypatch.setitem(os.environ, "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    settings = [*small_run(model_folder("gemma3"), corpus), *SMALL]
    half = [*settings, "model.dtype=bfloat16"]
    jobs = {
        "offload": [*settings, "parallel.mode=shard", "parallel.offload=true"],
        "half": [*half, "parallel.mode=replicate"],
        "half sharded": [*half, "parallel.mode=shard"],
    }
    wanted = [{"out": str(tmp_path / name), "settings": words} for name, words in jobs.items()]
    run_jobs(2, wanted, tmp_path)
    one = make_run(*SMALL, arch="gemma3", out="one")
    assert_same_run(one, tmp_path / "offload", FP32)
    limits = Limits(vectors=1e-5, scores=1e-5, weights=1e-7)
    assert_same_run(tmp_path / "half", tmp_path / "half sharded", limits)
