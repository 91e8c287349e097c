"""Any number of processes, replicated or sharded, gives the answer of one process.

World sizes 1, 2 and 3, of which 3 divides neither the pool's batches nor the rows of most
parameters; in float64, where only a defect can move anything, and in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Runner, small_run
from worlds import FP32, FP64, Limits, assert_same_run, distance, run_jobs

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
