"""FSDP2 over nccl on one GPU: the sharded run is the plain run; its rows may live in host memory.

One process, since one GPU is what there is: gathering and scattering are real nccl calls of a world
of one. More processes are run by tests/distributed over gloo.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import small_run
from worlds import FP32, Limits, assert_same_run, environment, torchrun

from dualsft.config import settings
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter

pytestmark = pytest.mark.gpu

HALF = Limits(vectors=2e-3, scores=2e-2, weights=1e-3)
"""Kernels sum in another order when a block of G is added up batch by batch."""


@pytest.mark.parametrize(
    ("dtype", "limits", "more"),
    [
        ("float32", FP32, ()),
        ("float32", FP32, ("parallel.offload=true",)),
        ("bfloat16", HALF, ("score.candidates=all",)),
    ],
)
def test_a_sharded_run_is_the_plain_run(
    dtype: str,
    limits: Limits,
    more: tuple[str, ...],
    model_folder: Callable[[str], Path],
    corpus: Path,
    tmp_path: Path,
) -> None:
    words = [
        *(w for w in small_run(model_folder("llama"), corpus) if not w.startswith("model.device")),
        "model.device=cuda",
        "model.deterministic=true",
        f"model.dtype={dtype}",
        "score.batch_tokens=150",
        "finetune.micro_batch_size=1",
    ]
    common = [w for w in more if not w.startswith("parallel.")]
    config = settings.load(None, [*words, *common])
    pipeline.run(config, tmp_path / "plain", None, Reporter(lambda _: None))
    sharded = [*words, *more, "parallel.mode=shard"]
    command = torchrun(1, "-m", "dualsft", "run", "--out", str(tmp_path / "sharded"), *sharded)
    env = environment()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_same_run(tmp_path / "plain", tmp_path / "sharded", limits)
