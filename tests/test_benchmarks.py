"""Every benchmark runs through the real command, as small as it can be, and says what docs say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import microscope, peers, pool_checks, pools
from benchmarks.__main__ import SECTIONS, parse
from benchmarks.roles import read_roles
from dualsft.config.settings import to_flat

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one quick run of everything."""
    out = tmp_path_factory.mktemp("bench") / "quick.json"
    words = [sys.executable, "-m", "benchmarks", "--device", "cpu", "--quick", "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert list(found["sections"]) == list(SECTIONS)
    for section in found["sections"].values():  # every row of the file is a line of the table
        assert section["rows"]
        assert all(f"   {name}" in done.stdout for name in section["rows"])
    return found


@pytest.mark.parametrize("name", ["scoring", "finetuning", "topk", "peers"])
def test_every_row_is_measured_and_compared(record: dict[str, Any], name: str) -> None:
    section = record["sections"][name]
    assert section["rows"] and not section["skipped"]
    for row in section["rows"].values():
        assert row["seconds"] > 0
        assert row["ratios"]
        assert all(0 < ratio < math.inf for ratio in row["ratios"].values())


def test_peers_compute_the_same_numbers(record: dict[str, Any]) -> None:
    rows = record["sections"]["peers"]["rows"]
    for way in (peers.FUNC, peers.DOTS, peers.BOTH):
        assert rows[way]["figures"]["largest difference"] < 1e-4


def test_fidelity_has_the_figures_of_the_page(record: dict[str, Any]) -> None:
    rows = record["sections"]["fidelity"]["rows"]
    exact = rows["scores in fp32 / fp64, v_new and CWSD"]["figures"]
    assert exact["Spearman of examples"] > 0.999
    rough = rows["scores in bf16 / fp64, v_new and CWSD"]["figures"]
    assert exact["largest error of a score"] < rough["largest error of a score"] < 0.2


def test_training_fidelity_has_the_figures_of_the_page(record: dict[str, Any]) -> None:
    rows = record["sections"]["training_fidelity"]["rows"]
    curves = {name: row for name, row in rows.items() if name.startswith("loss curve")}
    assert len(curves) == 6
    assert curves["loss curve, fp32, float32 moments"]["figures"]["largest difference"] == 0.0
    bf16 = curves["loss curve, bf16, float32 moments"]["figures"]
    assert 0 < bf16["mean difference"] <= bf16["largest difference"] < 0.1
    same, other = rows["warmup, default"], rows["warmup, default, rows in another order"]
    assert same["figures"]["relative error of ĉ"] == 0.0
    eight = rows["warmup, int8 moments"]["figures"]["relative error of ĉ"]
    assert 0 < eight < other["figures"]["relative error of ĉ"]


# --- the parts -----------------------------------------------------------------------------------


def test_average_precision() -> None:
    wrong = np.array([True, False, True, False])
    assert microscope.average_precision(np.array([3.0, 1.0, 2.0, 0.0]), wrong) == 1
    found = microscope.average_precision(np.array([3.0, 2.0, 1.0, 0.0]), wrong)
    assert found == pytest.approx((1 + 2 / 3) / 2)


def test_planted_rows_have_the_answers_of_others() -> None:
    roles = read_roles(parse(["--device", "cpu", "--quick"])[0], 60)
    made, wrong = microscope.planted(roles)
    assert wrong.sum() == 4
    for before, after, swapped in zip(roles.pool, made.pool, wrong, strict=True):
        prompt = before.num_tokens - before.num_response_tokens
        assert before.input_ids[:prompt] == after.input_ids[:prompt]
        assert after.labels == [*[-100] * prompt, *after.input_ids[prompt:]]
        assert (before.input_ids[prompt:] != after.input_ids[prompt:]) == swapped
    answers = [
        sorted(map(tuple, map(microscope._response, rows))) for rows in (roles.pool, made.pool)
    ]
    assert answers[0] == answers[1]


def test_settings_of_arms_and_masks_are_accepted(tmp_path: Path) -> None:
    pool = pools.Pool(tmp_path, [], "gsm8k", 300)
    for extra in (*pools.SELECTORS.values(), *pools.MASKS.values()):
        config = to_flat(pools.settings_of(pool, 8, "smollm2-135m", extra))
        for key, value in (item.split("=") for item in extra):
            assert str(config[key]).lower() == value or config[key] == float(value)


def test_overlap_of_warmups_is_that_of_the_mean_standardised_scores() -> None:
    first = {f"{i:02}": float(i) for i in range(40)}
    other = {f"{i:02}": 100.0 * (i < 2) + i % 2 for i in range(38)}
    assert pool_checks._overlap([first], [first]) == 1
    assert pool_checks._overlap([first], [other]) == 0  # the top three of 38 that both have
    both = pool_checks._overlap([first, other], [other])
    assert both == pytest.approx(2 / 4)  # 00 and 01 are the first two of both
    assert pool_checks._overlap([{k: 1e6 * v for k, v in first.items()}, other], [other]) == both


def test_warmups_are_averaged_in_disjoint_groups() -> None:
    assert pool_checks._groups([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert pool_checks._groups([1, 2, 3], 1) == [[1], [2], [3]]


def test_page_names_what_can_be_run() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in SECTIONS)
    assert "make bench-gpu" in page and "python -m benchmarks" in page
