"""The formulas of `docs/scaling_formulas.py` against counted bytes of real collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import save_tiny_folder
from worlds import run_world

from docs.scaling_formulas import ModelShape, finetuning_memory, scoring_memory, walk_traffic

TRAFFIC = Path(__file__).with_name("traffic.py")
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)] + [2])
def test_counted_bytes(size: int, tmp_path: Path) -> None:
    """One batch a process and one micro-batch a process: a turn, and a step."""
    folder = save_tiny_folder(tmp_path / "model", "llama", ["a small text"], **WIDE)
    said = run_world(size, TRAFFIC, folder)
    (line,) = [line for line in said.splitlines() if line.startswith("TRAFFIC ")]
    found = json.loads(line.removeprefix("TRAFFIC "))
    assert [(x["what"], x["sharded"]) for x in found] == [
        ("walk", False),
        ("step", False),
        ("walk", True),
        ("step", True),
    ]
    for one in found:
        assert abs(one["sent"] - one["said"]) <= 0.05 * one["said"], one
        assert (one["sent"] > 0) == (size > 1)


def test_formulas_by_hand() -> None:
    """A model of two blocks of 100 and 20 outside, 150 candidates, four processes."""
    shape = ModelShape(
        parameters=220, blocks=200, largest_block=100, candidates=150, largest_candidate=40
    )
    assert walk_traffic(shape, 4, sharded=False) == (0.0, 2 * 600 * 3 / 4)
    weights = 2 * (2 * 200 + 20)
    assert walk_traffic(shape, 4, sharded=True) == ((weights + 300 + 600) * 3 / 4, 0.0)
    assert scoring_memory(shape, 4, sharded=False) == 440 + 6 * 150
    gathered = 2 * (200 + 20)
    assert scoring_memory(shape, 4, sharded=True) == (440 + 900) / 4 + gathered + 6 * 40
    assert finetuning_memory(shape, 4, sharded=True, selected=8) == 440 / 4 + 32 + gathered + 80
