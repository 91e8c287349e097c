"""Starting worlds of real processes, and comparing the run folders they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from dualsft.train.loop import TrainingPlan

WORKER = Path(__file__).parent / "distributed/worker.py"
VECTORS = (
    "2_warmup/curvature",
    "3_gradients/grad_sum",
    "3_gradients/val_grad",
    "3_gradients/prior_grad",
)


def short_training(**changes: Any) -> TrainingPlan:
    """A plan for a few steps over a few rows."""
    plan = TrainingPlan(
        lr=1e-3,
        epochs=1,
        batch_size=6,
        warmup_ratio=0.0,
        max_grad_norm=1.0,
        micro_batch_size=2,
        batch_tokens=1000,
        seed=0,
        pad_id=0,
        padding_side="right",
    )
    return replace(plan, **changes)


def environment() -> dict[str, str]:
    """Where the package and these helpers are found, one thread a process."""
    tests = Path(__file__).parent
    places = [
        str(tests.parent / "src"),
        str(tests.parent),
        str(tests),
        os.environ.get("PYTHONPATH"),
    ]
    path = os.pathsep.join(filter(None, places))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def torchrun(size: int, *words: str) -> list[str]:
    """A command line that starts `size` processes on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(size), *words]


def run_world(size: int, *words: str | Path, limit: float = 200) -> str:
    """Run a program in `size` processes to its end; returns its standard output."""
    done = subprocess.run(
        torchrun(size, *map(str, words)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def run_jobs(size: int, jobs: list[dict], folder: Path, limit: float = 300) -> str:
    """These runs one after the other in one world; returns what was said."""
    file = folder / f"jobs-{size}-{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps(jobs))
    return run_world(size, WORKER, file, limit=limit)


@dataclass(frozen=True)
class Limits:
    """How far two runs may be apart, relative to the size of what is compared."""

    vectors: float
    scores: float
    weights: float


FP32 = Limits(vectors=5e-6, scores=5e-6, weights=1e-6)
FP64 = Limits(vectors=1e-12, scores=1e-11, weights=1e-13)


def assert_same_run(one: Path, many: Path, limits: Limits) -> None:
    """Scores and vectors to rounding, selections exactly, the model to a tolerance."""
    for name in VECTORS:
        if not (one / f"{name}.safetensors").is_file():  # the run needs no G
            assert not (many / f"{name}.safetensors").exists()
            continue
        assert distance(one / name, many / name) <= limits.vectors, name
    examples = [pq.read_table(run / "4_scores/examples.parquet") for run in (one, many)]
    assert examples[0]["id"] == examples[1]["id"]
    for column in ("score", "loss"):
        a, b = (table[column].to_numpy() for table in examples)
        assert np.abs(a - b).max() <= limits.scores * np.abs(a).max(), column
    assert_same_selection(one, many)
    assert distance(one / "6_finetune/model/model", many / "6_finetune/model/model") <= (
        limits.weights
    )
    results = [json.loads((run / "7_evaluation/results.json").read_text()) for run in (one, many)]
    for side in ("before", "after"):
        a, b = (found["files"]["validation"][side]["loss"] for found in results)
        assert abs(a - b) <= max(limits.scores, 1e-12) * abs(a)


def assert_same_selection(one: Path, many: Path) -> None:
    masks = [load_file(str(run / "5_selection/mask.safetensors")) for run in (one, many)]
    assert masks[0].keys() == masks[1].keys()
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])
    chosen = [(run / "5_selection/selected.jsonl").read_bytes() for run in (one, many)]
    assert chosen[0] == chosen[1]


def distance(a: Path, b: Path) -> float:
    """‖a − b‖ / ‖a‖ of two files of tensors with the same names and shapes."""
    x, y = (load_file(f"{path}.safetensors") for path in (a, b))
    assert {n: t.shape for n, t in x.items()} == {n: t.shape for n, t in y.items()}
    gap = sum(float((x[n].double() - y[n].double()).square().sum()) for n in x)
    return (gap / sum(float(t.double().square().sum()) for t in x.values())) ** 0.5
