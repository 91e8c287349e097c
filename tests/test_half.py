"""Half precision: near the boundary, examples are scored again with fp32 weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Runner
from models import tiny_model

from dualsft.ghost import GhostEngine, widened
from dualsft.model import find_candidates, load_model
from dualsft.passes import PassSettings, dot_alone
from dualsft.stages.gradients import read_pool
from dualsft.stages.scores import rounding_scales
from dualsft.stages.split import read_split
from dualsft.vectors import ParamVector


@pytest.fixture
def half_run(make_run: Runner) -> Path:
    options = ("model.dtype=bfloat16", "score.keep=projection", "warmup.min_steps=4")
    return make_run(*options, until="selection")


def exact_scores(run: Path) -> dict[str, float]:
    """⟨u, g_n⟩ of every pool example in fp64, alone, from the folder."""
    model = load_model(run / "2_warmup/theta_bar", torch.float64, torch.device("cpu"))
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    stored = ParamVector.load(run / "4_scores/projection.safetensors", engine.candidates.names)
    direction = ParamVector({name: block.double() for name, block in stored.items()})
    settings = PassSettings(batch_tokens=64, pad_id=0, padding_side="right")
    return {
        e.id: dot_alone(engine, e, direction, settings)[0]
        for e in read_split(run / "1_split")["pool"]
    }


def test_near_ties_are_scored_again_and_better(half_run: Path) -> None:
    exact = exact_scores(half_run)
    rows = pq.read_table(half_run / "4_scores/examples.parquet").to_pydict()
    rounded = dict(zip(rows["id"], rows["score"], strict=True))
    again = pq.read_table(half_run / "5_selection/rescored.parquet").to_pydict()
    assert len(again["id"]) > 0
    before = [abs(rounded[i] - exact[i]) for i in again["id"]]
    after = [abs(s - exact[i]) for i, s in zip(again["id"], again["score"], strict=True)]
    assert sum(after) < 0.1 * sum(before)
    summary = json.loads((half_run / "5_selection/summary.json").read_text())
    assert summary["rescored"] == len(again["id"])
    assert summary["certified_in"] + summary["certified_out"] + len(again["id"]) == len(exact)


def test_selection_is_that_of_exact_scores(half_run: Path) -> None:
    """The boundary gap of this run is wider than fp32 rounding, so the sets are equal."""
    exact = exact_scores(half_run)
    chosen = set(json.loads((half_run / "5_selection/ids.json").read_text()))
    best = sorted(exact, key=lambda i: -exact[i])
    assert chosen == set(best[: len(chosen)])


def test_rounding_slack_covers_what_rounding_did(half_run: Path) -> None:
    exact = exact_scores(half_run)
    rows = pq.read_table(half_run / "4_scores/examples.parquet").to_pydict()
    errors = [abs(s - exact[i]) for i, s in zip(rows["id"], rows["score"], strict=True)]
    ratio = json.loads((half_run / "4_scores/summary.json").read_text())["rounding_ratio"]
    pool = read_pool(half_run / "3_gradients/pool.parquet")
    assert list(pool["id"]) == rows["id"]
    assert (np.array(errors) <= ratio * rounding_scales(pool)).mean() > 0.98
    assert max(errors) > 0


def test_widened_gives_the_weights_back_bit_for_bit() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16).eval()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.dtype for n, b in model.named_buffers()}
    engine = GhostEngine(model, find_candidates(model, "all"))
    with widened(engine, tensor_cores=True):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert {n: b.dtype for n, b in model.named_buffers()} == buffers


def test_widened_keeps_the_rounded_scale_of_gemma_s_embeddings() -> None:
    """The same numbers: a bf16 model multiplies by a scale rounded to bf16."""
    model = tiny_model("gemma3", dtype=torch.bfloat16).eval()
    ids = torch.arange(6).view(1, 6)
    engine = GhostEngine(model, find_candidates(model, "all"))
    embedding = model.get_input_embeddings()
    scales = [b.clone() for b in embedding.buffers()]
    weight = embedding.get_parameter("weight").detach()
    factor = scales[0].to(torch.bfloat16)
    with widened(engine), torch.no_grad():
        assert torch.equal(embedding(ids), weight.float()[ids] * factor.float())
    assert scales and all(
        torch.equal(a, b) for a, b in zip(scales, embedding.buffers(), strict=True)
    )


def test_widened_leaves_fp32_alone() -> None:
    model = tiny_model("llama", dtype=torch.float32).eval()
    engine = GhostEngine(model, find_candidates(model, "all"))
    pointers = [p.data_ptr() for p in model.parameters()]
    with widened(engine, tensor_cores=True):
        assert not torch.backends.cuda.matmul.allow_tf32
        assert pointers == [p.data_ptr() for p in model.parameters()]
