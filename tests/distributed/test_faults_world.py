"""What goes wrong in one process is known to all: a NaN stops every one, lack of memory is agreed.

In real processes; memory runs out by an exception of the kind that CUDA raises.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from models import save_tiny_folder
from worlds import environment, torchrun

FAULTY = Path(__file__).with_name("faulty.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("faults")
    model = save_tiny_folder(folder / "model", "llama", ["a small text"])
    done = subprocess.run(
        torchrun(2, str(FAULTY), str(model), str(folder)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ["nan", "nan, sharded"])
def test_a_nan_in_one_process_stops_all_before_the_update(
    case: str, found: list[dict[str, Any]]
) -> None:
    for one in found:
        assert "the loss of row" in one[case]["error"] and "not finite" in one[case]["error"]
        assert not one[case]["moved"]
    assert found[0][case]["error"] == found[1][case]["error"]


def test_lack_of_memory_in_one_process_makes_all_batches_smaller(
    found: list[dict[str, Any]],
) -> None:
    for one in found:
        assert one["walk, no room"]["said"] and not one["walk"]["said"]
        assert one["walk, no room"]["values"] == pytest.approx(one["walk"]["values"], rel=1e-12)
        assert one["walk, no room"]["norm"] == pytest.approx(one["walk"]["norm"], rel=1e-12)


def test_training_goes_on_with_less_memory_in_all_processes(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["no room"]["error"] is None and one["no room"]["moved"]
        assert len(one["no room"]["said"]) >= 2  # activations recomputed, then smaller batches
    assert found[0]["no room"]["norm"] == found[1]["no room"]["norm"]
