"""What goes wrong in one process is known to all: a NaN stops every one, lack of memory is agreed.

In real processes; memory runs out by an exception of the kind that CUDA raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Runner, small_run
from models import save_tiny_folder
from worlds import FP32, assert_same_run, run_world

FAULTY = Path(__file__).with_name("faulty.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("faults")
    model = save_tiny_folder(folder / "model", "llama", ["a small text"])
    run_world(2, FAULTY, model, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ["nan", "nan, sharded"])
def test_a_nan_in_one_process_stops_all_before_the_update(
    case: str, found: list[dict[str, Any]]
) -> None:
    for one in found:
        assert "the loss of row" in one[case]["error"] and "not finite" in one[case]["error"]
        assert not one[case]["moved"]
    assert found[0][case]["error"] == found[1][case]["error"]


@pytest.mark.parametrize("case", ["walk, no room", "walk, no room anywhere", "walk, no place"])
def test_lack_of_memory_changes_the_plan_of_all_and_no_number(
    case: str, found: list[dict[str, Any]]
) -> None:
    """In one process, in both with batches of different shapes, and before the first batch."""
    for one in found:
        assert one[case]["said"] and not one["walk"]["said"]
        assert one[case]["values"] == pytest.approx(one["walk"]["values"], rel=1e-12)
        assert one[case]["norm"] == pytest.approx(one["walk"]["norm"], rel=1e-12)


def test_training_goes_on_with_less_memory_in_all_processes(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["no room"]["error"] is None and one["no room"]["moved"]
        assert len(one["no room"]["said"]) >= 2  # activations recomputed, then smaller batches
    assert found[0]["no room"]["norm"] == found[1]["no room"]["norm"]


EVALUATION = """
import sys, torch
from dualsft.config import settings as config
from dualsft.engine import losses
from dualsft.runs import pipeline
from dualsft.distributed.world import joined, world
from dualsft.system.progress import Reporter
from dualsft.lab.evaluation import stage as evaluation

def short(before, after, batch, true=evaluation.comparison):
    if world().rank == 1 and len(batch.input_ids) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory (made up)")
    return true(before, after, batch)

with joined(False):
    evaluation.comparison = short
    pipeline.run(config.load(None, sys.argv[2:]), sys.argv[1], None, Reporter(lambda _: None))
"""


def test_evaluation_counts_every_row_once_when_memory_runs_out(
    make_run: Runner, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    script = tmp_path / "evaluation.py"
    script.write_text(EVALUATION)
    one, many = make_run("score.batch_tokens=120", out="one"), tmp_path / "many"
    words = [*small_run(model_folder("llama"), corpus), "score.batch_tokens=120"]
    run_world(2, script, many, *words)
    assert_same_run(one, many, FP32)


def test_processes_with_other_settings_are_refused(
    model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    """And those that do not see the same run folder."""
    script = tmp_path / "apart.py"
    script.write_text(
        "import os, sys\n"
        "from dualsft.config import settings as config\n"
        "from dualsft.runs import pipeline\n"
        "from dualsft.distributed.world import joined\n"
        "from dualsft.errors import RunError\n"
        "from dualsft.system.progress import Reporter\n"
        "rank, out = os.environ['RANK'], sys.argv[1]\n"
        "with joined(False):  # the group outlives the errors and is destroyed at the end\n"
        "    for words, folder in (([f'seed={rank}'], out), ([], out + rank)):\n"
        "        try:\n"
        "            pipeline.run(config.load(None, [*sys.argv[2:], *words]), folder, None,\n"
        "                         Reporter(lambda _: None))\n"
        "        except RunError as problem:\n"
        "            print(f'[{rank}] {problem}', flush=True)\n"
    )
    words = small_run(model_folder("llama"), corpus)
    said = run_world(2, script, tmp_path / "out", *words)
    assert said.count("the configuration (its hash) differs between rank 0") == 2, said[-3000:]
    assert said.count("1 of 2 processes do not see what rank 0 writes") == 2, said[-3000:]
    assert not list(tmp_path.glob("out*/1_split"))


def test_a_failed_world_leaves_no_process_group_behind(tmp_path: Path) -> None:
    """Its threads would end the interpreter with SIGABRT, one run in four, and hide the code."""
    script = tmp_path / "failed.py"
    script.write_text(
        "import os\n"
        "import torch.distributed as dist\n"
        "from dualsft.distributed.world import joined, world\n"
        "from dualsft.errors import RunError\n"
        "try:\n"
        "    with joined(False):\n"
        "        world().check_equal(os.environ['RANK'], 'the rank')\n"
        "except RunError as problem:\n"
        "    print(f'left: {dist.is_initialized()}, {problem}', flush=True)\n"
    )
    said = run_world(2, script)
    assert said.count("left: False, the rank differs between rank 0") == 2, said
