"""Half precision: near the boundary, examples are scored again with fp32 weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import Runner
from models import tiny_model
from places import place

from dualsft.algorithm.gradients import rounding_norm
from dualsft.algorithm.scores import dot_alone, rounding_scales
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.passes import widened
from dualsft.engine.walk import PassSettings, cwsd_objective, loss_objective, walk
from dualsft.model.load import find_candidates, load_model
from dualsft.runs.stages.gradients import read_pool
from dualsft.runs.stages.split import read_split
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter
from dualsft.train.optimizer import SparseAdamW


def exact_scores(run: Path) -> dict[str, float]:
    """⟨u, g_n⟩ of every pool example in fp64, alone, from the folder."""
    model = load_model(run / "2_warmup/theta_bar", torch.float64, torch.device("cpu"))
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    stored = ParamVector.load(run / "4_scores/projection.safetensors", engine.candidates.names)
    direction = ParamVector({name: block.double() for name, block in stored.items()})
    settings = PassSettings(batch_tokens=64, pad_id=0, padding_side="right")
    return {
        e.id: dot_alone(engine, e, direction, settings)[0]
        for e in read_split(place(run / "1_split"))["pool"]
    }


def directions_error(run: Path) -> dict[str, float]:
    """‖v − v*‖ / ‖v*‖ of v_new and v_prior: the stored ones against fp64 at the stored weights."""
    theta_bar, theta_old = (
        load_model(folder, torch.bfloat16, torch.device("cpu")).double()
        for folder in (run / "2_warmup/theta_bar", Path(read_config(run)["model"]["path"]))
    )
    engine = GhostEngine(theta_bar, find_candidates(theta_bar, "block_linear"))
    roles = read_split(place(run / "1_split"))
    settings = PassSettings(batch_tokens=64, pad_id=0, padding_side="right")
    found: dict[str, float] = {}
    for name, role, objective in (
        ("val_grad", "val", loss_objective(theta_bar)),
        ("prior_grad", "anchor", cwsd_objective(theta_old, theta_bar, 1.0)),
    ):
        exact = ParamVector.zeros(engine.candidates)
        quiet = Reporter(lambda _: None)
        walk(engine, roles[role], objective, settings, quiet, name, sums=exact)
        stored = ParamVector.load(run / f"3_gradients/{name}.safetensors", engine.candidates.names)
        mean = {n: block / len(roles[role]) for n, block in exact.items()}
        apart = sum(float((stored[n].double() - mean[n]).square().sum()) for n in mean)
        found[name] = (apart / sum(float(b.square().sum()) for b in mean.values())) ** 0.5
    return found


def read_config(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_directions_are_taken_with_fp32_weights(make_run: Runner) -> None:
    """mixed and full: v_new and v_prior as exact as fp32; half: rounded a thousand times more."""
    errors = {
        precision: directions_error(
            make_run(
                "model.dtype=bfloat16",
                "warmup.min_steps=4",
                f"score.precision={precision}",
                until="gradients",
                out=precision,
            )
        )
        for precision in ("mixed", "full", "half")
    }
    for name in ("val_grad", "prior_grad"):
        assert errors["mixed"][name] < 1e-4 and errors["full"][name] < 1e-4, (name, errors)
        assert errors["half"][name] > 1e-3, (name, errors)


def test_full_precision_scores_the_pool_with_fp32_weights(make_run: Runner) -> None:
    options = ("model.dtype=bfloat16", "warmup.min_steps=4", "score.precision=full")
    run = make_run(*options, "score.keep=projection", until="scores")
    exact = exact_scores(run)
    rows = pq.read_table(run / "4_scores/examples.parquet").to_pydict()
    largest = max(abs(s) for s in exact.values())
    errors = [abs(s - exact[i]) for i, s in zip(rows["id"], rows["score"], strict=True)]
    bounds = np.array(rows["bound"])
    assert (np.array(errors) <= bounds + 1e-4 * largest).all()


def test_no_room_for_fp32_weights_is_said(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualsft.engine.passes.free_memory", lambda _: 1000)
    run = make_run("model.dtype=bfloat16", "warmup.min_steps=4", until="gradients")
    manifest = json.loads((run / "3_gradients/manifest.json").read_text())
    told = [w for w in manifest["facts"]["warnings"] if "continuing in half precision" in w]
    assert len(told) == 2, manifest["facts"]["warnings"]  # v_new, v_prior


def test_near_ties_are_scored_again_and_the_selection_is_exact(make_run: Runner) -> None:
    """The boundary gap of this run is wider than fp32 rounding, so the sets are equal."""
    options = ("model.dtype=bfloat16", "score.keep=projection", "warmup.min_steps=4")
    run = make_run(*options, until="selection")
    exact = exact_scores(run)
    rows = pq.read_table(run / "4_scores/examples.parquet").to_pydict()
    rounded = dict(zip(rows["id"], rows["score"], strict=True))
    again = pq.read_table(run / "5_selection/rescored.parquet").to_pydict()
    assert len(again["id"]) > 0
    before = [abs(rounded[i] - exact[i]) for i in again["id"]]
    after = [abs(s - exact[i]) for i, s in zip(again["id"], again["score"], strict=True)]
    assert sum(after) < 0.1 * sum(before)
    summary = json.loads((run / "5_selection/summary.json").read_text())
    assert summary["rescored"] == len(again["id"])
    assert summary["certified_in"] + summary["certified_out"] + len(again["id"]) == len(exact)
    chosen = set(json.loads((run / "5_selection/ids.json").read_text()))
    assert chosen == set(sorted(exact, key=lambda i: -exact[i])[: len(chosen)])
    errors = np.array([abs(rounded[i] - exact[i]) for i in rows["id"]])
    ratio = json.loads((run / "4_scores/summary.json").read_text())["rounding_ratio"]
    pool = read_pool(place(run / "3_gradients/pool.parquet"))
    assert list(pool["id"]) == rows["id"]
    slack = ratio * rounding_scales(pool["inner_sums"], len(pool["id"]))
    assert (errors <= slack).mean() > 0.98 and errors.max() > 0


def test_widened_gives_the_weights_back_bit_for_bit() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16).eval()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.dtype for n, b in model.named_buffers()}
    engine = GhostEngine(model, find_candidates(model, "all"))
    with widened(engine.model, tensor_cores=True):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert {n: b.dtype for n, b in model.named_buffers()} == buffers
    model.float()
    pointers = [p.data_ptr() for p in model.parameters()]
    with widened(engine.model, tensor_cores=True):  # fp32 is left alone
        assert not torch.backends.cuda.matmul.allow_tf32
        assert pointers == [p.data_ptr() for p in model.parameters()]


def test_widened_keeps_the_rounded_scale_of_gemma_s_embeddings() -> None:
    """The same numbers: a bf16 model multiplies by a scale rounded to bf16."""
    model = tiny_model("gemma3", dtype=torch.bfloat16).eval()
    ids = torch.arange(6).view(1, 6)
    engine = GhostEngine(model, find_candidates(model, "all"))
    embedding = model.get_input_embeddings()
    scales = [b.clone() for b in embedding.buffers()]
    weight = embedding.get_parameter("weight").detach()
    factor = scales[0].to(torch.bfloat16)
    with widened(engine.model), torch.no_grad():
        assert torch.equal(embedding(ids), weight.float()[ids] * factor.float())
    assert scales and all(
        torch.equal(a, b) for a, b in zip(scales, embedding.buffers(), strict=True)
    )


def test_rounding_of_theta_bar_is_measured() -> None:
    """An update of 1e-4 to weights of one is lost to bf16: all of it is rounding."""
    weight = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    with SparseAdamW([("w", weight)], None, lr=1e-4) as optimizer:
        assert rounding_norm(optimizer) == 0.0
        weight.sum().backward()
        optimizer.step()
        assert rounding_norm(optimizer) == pytest.approx(1e-4 * 12**0.5, rel=1e-3)
    assert bool((weight == 1).all())


@pytest.mark.parametrize(("lr", "told"), [(1e-6, True), (3e-2, False)])
def test_a_warmup_within_the_rounding_is_told(
    lr: float, told: bool, make_run: Runner, model_folder: Callable[[str], Path]
) -> None:
    said: list[str] = []
    options = ("model.dtype=bfloat16", f"warmup.lr={lr}", "warmup.min_steps=4")
    run = make_run(*options, until="warmup", said=said)
    facts = json.loads((run / "2_warmup/manifest.json").read_text())["facts"]
    old = load_model(model_folder("llama"), torch.bfloat16, torch.device("cpu"))
    bar = load_model(run / "2_warmup/theta_bar", torch.bfloat16, torch.device("cpu"))
    pairs = zip(old.parameters(), bar.parameters(), strict=True)
    moved = sum(float(((b.double() - a.double()) ** 2).sum()) for a, b in pairs) ** 0.5
    assert facts["movement"] == pytest.approx(moved, rel=1e-5, abs=1e-9)
    assert facts["rounding"] > 0
    assert any("rounding θ̄ to bfloat16" in line for line in said) == told


def test_without_room_for_both_models_the_warmup_is_kept(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("dualsft.runs.stages.warmup.weights_vector", full)
    said: list[str] = []
    run = make_run("model.dtype=bfloat16", "warmup.min_steps=4", until="warmup", said=said)
    facts = json.loads((run / "2_warmup/manifest.json").read_text())["facts"]
    assert facts["movement"] is None and facts["rounding"] > 0
    assert any("out of memory with both θ̄ and θ_old" in line for line in said)
