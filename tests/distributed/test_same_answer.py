"""Any number of processes, replicated or sharded, gives the answer of one process.

World sizes 1, 2 and 3, of which 3 divides neither the pool's batches nor the rows of most
parameters; in float64, where only a defect can move anything, and in float32. And every way to
start them: torchrun's two agents on one machine are what two machines do; accelerate starts
torchrun itself.
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
from worlds import FP32, FP64, Limits, assert_same_run, distance, environment, run_jobs

SMALL = ("score.batch_tokens=150", "finetune.micro_batch_size=1")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("llama", ()),
    "gpt2": ("gpt2", ()),
    "llama, everything": ("llama", ("score.candidates=all", "score.mode=two_pass")),
    "gpt2, everything": ("gpt2", ("score.candidates=all",)),
    "qwen3, rounds": ("qwen3", ("select.rounds=2",)),
    "gemma3, checkpointing": (
        "gemma3",
        ("score.checkpointing=true", "finetune.checkpointing=true", "finetune.max_grad_norm=0.05"),
    ),
    "llama, fisher": ("llama", ("score.preservation=fisher", "score.lam_relative=true")),
    "llama, calibrated": ("llama", ("score.form=calibrated", "score.sketch_dim=64")),
    "llama, last block": (
        "llama",
        (
            "score.form=calibrated",
            "score.sketch_dim=64",
            "method.params=random",
            "score.sketch_layers=1",
        ),
    ),
    "gpt2, calibrated": ("gpt2", ("score.form=calibrated", "score.sketch_dim=64")),
    "llama, retention": ("llama", ("finetune.retention=0.7", "finetune.retention_batch=3")),
    "experts": ("gpt_oss", ()),
    "experts, calibrated": ("gpt_oss", ("score.form=calibrated", "score.sketch_dim=64")),
    "llama, whole model": ("llama", ("method.params=all", "method.data=random")),
}


def compare(
    size: int,
    wanted: list[tuple[str, str, str]],
    make_run: Runner,
    model_folder: Callable[[str], Path],
    corpus: Path,
    tmp_path: Path,
) -> None:
    """Each (case, mode, dtype) in a world of this size against one process."""
    jobs, pairs = [], []
    for case, mode, dtype in wanted:
        arch, more = CASES[case]
        given = (*SMALL, *more, f"model.dtype={dtype}")
        slug = f"{case}-{mode}-{dtype}".replace(" ", "").replace(",", "-")
        out = tmp_path / f"many-{slug}"
        words = [*small_run(model_folder(arch), corpus), *given, f"parallel.mode={mode}"]
        jobs.append({"out": str(out), "settings": words})
        one = tmp_path / f"one-{case}-{dtype}"
        if not one.exists():
            make_run(*given, arch=arch, out=one.name)
        pairs.append((one, out, FP64 if dtype == "float64" else FP32))
    said = run_jobs(size, jobs, tmp_path)
    assert said.count("report:") == len(jobs)
    for one, many, limits in pairs:
        check(one, many, limits)


def check(one: Path, many: Path, limits: Limits) -> None:
    if (one / "4_scores").is_dir():
        assert_same_run(one, many, limits)
        return
    model = "6_finetune/model/model"
    assert distance(one / model, many / model) <= limits.weights
    assert (one / "5_selection/ids.json").read_text() == (many / "5_selection/ids.json").read_text()


def test_two_processes(
    make_run: Runner, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    """Two configurations: replicated and sharded, two architectures."""
    wanted = [("llama", "shard", "float64"), ("gpt2", "replicate", "float32")]
    wanted += [
        ("gpt2, calibrated", "shard", "float64"),
        ("llama, calibrated", "replicate", "float64"),
        ("llama, last block", "shard", "float64"),
        ("llama, last block", "replicate", "float64"),
        ("llama, retention", "shard", "float64"),
        ("llama, retention", "replicate", "float64"),
    ]
    compare(2, wanted, make_run, model_folder, corpus, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replicate", "shard"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_world(
    size: int,
    mode: str,
    make_run: Runner,
    model_folder: Callable[[str], Path],
    corpus: Path,
    tmp_path: Path,
) -> None:
    cases = list(CASES) if size > 1 else ["llama", "gpt2, everything"]
    wanted = [(case, mode, "float64") for case in cases]
    wanted += [(case, mode, "float32") for case in ("llama", "gpt2") if size > 1]
    compare(size, wanted, make_run, model_folder, corpus, tmp_path)


# --- other ways to start several processes -------------------------------------------------------


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
    assert said.count("2 processes, each with the whole model") == said.count("run folder: ") == 1
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
