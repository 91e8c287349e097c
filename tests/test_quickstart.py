"""The quickstart: its corpus, its summary, and (slow tier) its promises on a real model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dualsft.config import settings
from dualsft.data import corpus as zeno
from dualsft.lab.quickstart import run_quickstart
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter

ROOT = Path(__file__).parents[1]


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_corpus_is_deterministic_and_its_wrong_share_exact(tmp_path: Path) -> None:
    first, second = (zeno.write_corpus(tmp_path / name) for name in ("a", "b"))
    assert all(first[n].read_bytes() == second[n].read_bytes() for n in zeno.FILES)
    rows = rows_of(first["corpus"])
    wrong = [row for row in rows if row["answer"] == "wrong"]
    assert len(rows) == zeno.NUM_ROWS and len(wrong) == int(zeno.WRONG_SHARE * zeno.NUM_ROWS)
    by_prompt = {
        row["prompt"]: row["response"]
        for name in ("trusted", "new_skill")
        for row in rows_of(first[name])
    }
    assert len(by_prompt) == 2 * zeno.NUM_CLEAN and not by_prompt.keys() & {
        r["prompt"] for r in rows
    }
    for row in rows:
        words = re.match(r"Write in Zeno: (\w+) has (\d) (\w+) (\w+) in (\w+)\.", row["prompt"])
        assert words is not None
        name, count, colour, thing, place = words.groups()
        right = row["response"] == f" {place} / {thing} {count} / {colour} / {name}"
        assert right == (row["answer"] == "right")


def test_summary_lines(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole quickstart with a tiny model in the place of the real one."""
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache"))
    overrides = [f"model.path={model_folder('llama')}", "data.max_length=200"]
    config = settings.load("quickstart", overrides)
    said: list[str] = []
    lines = list(run_quickstart(config, tmp_path / "run", Reporter(said.append)))
    (told,) = [i for i, line in enumerate(said) if line.startswith("for comparison, ")]
    assert re.search(r"one more pass over the pool, about \d+:\d\d; not in the table", said[told])
    assert next(i for i, line in enumerate(said) if "absolute λ, for comparison" in line) > told
    text = "\n".join(lines)
    parts = [
        "new skill",
        "old behaviour",
        "wrong examples",
        "calibrated scores",
        "the paper's scores",
    ]
    parts += [
        "by module",
        "by layer",
        "asked",
        "before",
        "after",
        "gradients",
        "peak",
        "run folder",
    ]
    assert all(part in text for part in parts)
    assert (tmp_path / "run/report.md").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 123, 2026])
def test_selection_holds_at_most_half_the_pool_s_wrong_share(seed: int, tmp_path: Path) -> None:
    """SmolLM2-135M, the recipe as it is, three seeds."""
    config = settings.load("quickstart", [f"seed={seed}"])
    run = pipeline.run(config, tmp_path / "run", "selection", Reporter(lambda _: None))
    table = pq.read_table(run / "1_split/split.parquet").to_pydict()
    source = rows_of(zeno.write_corpus(tmp_path / "zeno")["corpus"])
    pool = [
        source[i] for i, role in zip(table["index"], table["role"], strict=True) if role == "pool"
    ]
    chosen = rows_of(run / "5_selection/selected.jsonl")
    in_pool, in_selection = (
        np.mean([row["answer"] == "wrong" for row in rows]) for rows in (pool, chosen)
    )
    print(f"seed {seed}: pool {in_pool:.3f}, selection {in_selection:.3f}")
    assert len(chosen) == 40 and in_pool > 0.25
    assert in_selection <= 0.5 * in_pool


@pytest.mark.slow
def test_make_quickstart(tmp_path: Path) -> None:
    """The command as a stranger runs it; its losses, its selection, its own account of time."""
    env = os.environ | {"COLUMNS": "200"}
    env.pop("OMP_NUM_THREADS", None)
    start = time.monotonic()
    done = subprocess.run(
        ["make", "quickstart", f"OUT={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    print(f"{time.monotonic() - start:.0f} s\n{done.stdout[-2500:]}")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run/7_evaluation/results.json").read_text())["files"]
    new, old = results["new_skill"], results["old_behaviour"]
    assert new["after"]["loss"] < 0.2 * new["before"]["loss"]
    assert old["after"]["loss"] < 1.3 * old["before"]["loss"]
    assert "Lisbon / lamps 4 / green / Clara" in done.stdout
