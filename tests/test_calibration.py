"""Calibrated scores against the dense formula in float64, and what they must not depend on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import oracle
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Runner
from hostile import in_file, reseal
from models import ARCHITECTURES, rows_of, tiny_examples, tiny_model
from transformers import AutoModelForCausalLM

import dualsft
from dualsft.algorithm import calibration
from dualsft.algorithm.calibration import (
    RHOS,
    Solver,
    _choose,
    calibrate,
    check_sketches,
    held_out_scores,
    sketch_of,
    sketch_with,
)
from dualsft.algorithm.gradients import pool_gradient, sketches_only
from dualsft.config import settings
from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.sketch import Sketch, SketchRows
from dualsft.engine.walk import PassSettings
from dualsft.errors import ConfigError, RunError
from dualsft.lab.diagnostics import Wanted
from dualsft.lab.diagnostics.job import diagnose
from dualsft.model.load import decoder_blocks, find_candidates
from dualsft.runs.stages.split import read_split
from dualsft.storage.vectors import ParamVector
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter, silent

CPU = torch.device("cpu")


def gradients(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different lengths around three directions."""
    torch.manual_seed(seed)
    centres = torch.randn(3, dim, dtype=torch.float64)
    rows = centres[torch.arange(count) % 3] + torch.randn(count, dim, dtype=torch.float64)
    return rows * torch.logspace(-3, 3, count, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("count", "dim"), [(12, 40), (60, 16), (20, 20)])
@pytest.mark.parametrize("rho", [1.0, 1e-2, 1e-4])
def test_scores_are_those_of_the_dense_formula(count: int, dim: int, rho: float) -> None:
    pool, val = gradients(count, dim), gradients(9, dim, seed=1)
    got = calibrate(rows_of(pool, exact=True), rows_of(val, exact=True), 0, CPU, rho)
    expected = oracle.calibrated_scores(pool, val, rho)
    assert np.abs(got.scores - expected.numpy()).max() <= 1e-9 * float(expected.abs().max())
    assert got.residual <= 1e-12


@pytest.mark.parametrize(("count", "dim"), [(12, 40), (60, 16)])
@pytest.mark.parametrize("rho", [1.0, 1e-2])
def test_validation_rows_are_scored_as_if_they_were_in_the_pool(
    count: int, dim: int, rho: float
) -> None:
    pool, val = gradients(count, dim), gradients(9, dim, seed=1)
    solver = Solver(rows_of(pool, exact=True), CPU)
    unit = val / val.norm(dim=1, keepdim=True)
    expected = oracle.held_out_scores(pool, val, rho).numpy()
    np.testing.assert_allclose(held_out_scores(solver, unit, rho), expected, rtol=1e-9)
    got = calibrate(rows_of(pool, exact=True), rows_of(val, exact=True), 0, CPU, rho)
    assert got.val_quantile is not None
    np.testing.assert_array_equal(got.val_quantile, (got.scores[:, None] > expected).mean(1))


@pytest.mark.parametrize("part", [0.1, 0.5, 1.0])
def test_the_part_of_the_pool_that_is_like_the_validation_rows_is_found(part: float) -> None:
    """Rows on target are drawn like the validation rows, the others around another centre. The
    quantiles of the former are uniform, and their share is estimated within its error."""
    torch.manual_seed(0)
    shares, count = [], 600
    for _ in range(6):
        centres = torch.randn(2, 400)
        off = torch.arange(count) >= part * count
        pool = centres[off.long()] + 2.5 * torch.randn(count, 400)
        val = centres[0] + 2.5 * torch.randn(120, 400)
        found = calibrate(rows_of(pool), rows_of(val), 0, CPU, 1e-2)
        assert found.val_quantile is not None and found.target_share is not None
        on_target = found.val_quantile[~off.numpy()]
        assert abs(on_target.mean() - 0.5) < 0.12
        share, error = found.target_share
        assert abs(share - part) < 4 * error
        shares.append(share)
    assert abs(np.mean(shares) - part) < 0.08 * part + 0.02


def test_products_that_are_not_quite_symmetric_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 products of some BLAS differ in the last bits across the diagonal: no residual."""
    pool, val = rows_of(gradients(12, 40)), rows_of(gradients(9, 40, seed=1))
    expected = calibrate(pool, val, 0, CPU, 1.0)
    rows = calibration._row_products

    def uneven(*given: object) -> torch.Tensor:
        return rows(*given) * (1 + 1e-6 * torch.ones(12, 12, dtype=torch.float64).triu(1))  # type: ignore

    monkeypatch.setattr(calibration, "_row_products", uneven)
    np.testing.assert_array_equal(calibrate(pool, val, 0, CPU, 1.0).scores, expected.scores)


def test_lengths_repeats_and_order_do_not_change_the_ranking() -> None:
    pool, val = gradients(30, 50), gradients(16, 50, seed=1)
    base = calibrate(rows_of(pool, exact=True), rows_of(val, exact=True), 0, CPU)
    lengths = torch.logspace(2, -2, 30, dtype=torch.float64)[:, None]
    longer = calibrate(rows_of(pool * lengths, exact=True), rows_of(val, exact=True), 0, CPU)
    np.testing.assert_allclose(longer.scores, base.scores, rtol=1e-6, atol=1e-8)
    twice = calibrate(rows_of(torch.cat([pool, pool]), True), rows_of(val, True), 0, CPU, base.rho)
    np.testing.assert_allclose(
        twice.scores[:30], base.scores, rtol=1e-6, atol=1e-8
    )  # now solved in p x p
    np.testing.assert_allclose(twice.scores[30:], base.scores, rtol=1e-6, atol=1e-8)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    moved = calibrate(rows_of(pool[order], True), rows_of(val, True), 0, CPU, base.rho)
    np.testing.assert_allclose(moved.scores, base.scores[order.numpy()], rtol=1e-6, atol=1e-8)


def test_both_sides_agree_on_rho_and_on_the_curve() -> None:
    pool, val = gradients(24, 23), gradients(20, 23, seed=1)
    primal = calibrate(rows_of(pool, True), rows_of(val, True), 5, CPU)
    padded = torch.nn.functional.pad(pool, (0, 2)), torch.nn.functional.pad(val, (0, 2))
    dual = calibrate(rows_of(padded[0], True), rows_of(padded[1], True), 5, CPU)
    assert "sketch entries" in primal.solved_in and "examples" in dual.solved_in
    assert primal.rho == dual.rho
    for one, other in zip(primal.curve, dual.curve, strict=True):
        assert one["cosine"] == pytest.approx(other["cosine"], abs=1e-6)
    a, b = oracle.unit_rows(val[:10]).mean(0), oracle.unit_rows(val[10:]).mean(0)
    solver = Solver(rows_of(pool, True), CPU)
    right = solver.moved(torch.stack([a, b], 1))
    solution = solver.solve(right[:, :1], 1e-2)
    found = solver.agreement(solution, right[:, :1], 1e-2, right[:, 1:], b.norm()[None])
    scores = oracle.calibrated_scores(pool, val[:10], 1e-2)
    weighted = oracle.unit_rows(pool).T @ scores
    expected = torch.cosine_similarity(weighted, b, dim=0)
    assert float(found) == pytest.approx(float(expected), abs=1e-7)


def test_the_smallest_rho_within_the_error_is_chosen() -> None:
    flat = np.full((len(RHOS), 16), 0.5)
    noise = np.random.default_rng(0).normal(0, 1e-3, flat.shape)
    noise -= noise.mean(1, keepdims=True)
    flat[3] += 0.2
    flat[4] += 0.2 - 1e-5
    curve, rho = _choose(flat + noise * (np.arange(len(RHOS)) > 3)[:, None])
    assert rho == RHOS[4]
    assert [point["flat"] for point in curve] == [i in (3, 4) for i in range(len(RHOS))]


def test_parts_of_a_gradient_add_up() -> None:
    whole = gradients(6, 64)
    rows = rows_of(whole * 0.25)
    rows.add(range(6), (whole * 0.75).numpy())
    np.testing.assert_allclose(rows.norms, whole.norm(dim=1), rtol=1e-3)
    np.testing.assert_allclose(rows.total(), whole.sum(0), atol=2e-3 * float(whole.norm()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_walk_sketches_every_gradient(architecture: str) -> None:
    """The sketches of a padded batch are those of the oracle's gradients, one example at a time."""
    model = tiny_model(architecture, dtype=torch.float64)
    rows = tiny_examples(9, 97, 1)
    examples = [Example(e.id, e.index, list(e.input_ids), list(e.labels)) for e in rows]
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    sketch = Sketch(64, seed=3, purpose="calibrated")
    passes = PassSettings(batch_tokens=64, pad_id=0, padding_side="right")
    silent = Reporter(lambda _: None)
    grad_sum, result = pool_gradient(engine, examples, passes, silent, sketch=sketch)
    assert result.sketches is not None
    names = list(engine.candidates)
    for i, example in enumerate(examples):
        gradient = oracle.example_gradient(model, example.input_ids, example.labels, names)
        expected = sketch_of(engine, sketch, ParamVector(gradient))
        np.testing.assert_allclose(result.sketches.row(i), expected, rtol=1e-9, atol=1e-12)
    found = check_sketches(engine, sketch, result.sketches, grad_sum, examples, 0, passes)
    assert found["sketch_sum_error"] < 1e-12 and len(found["sketched_alone"]) == 3
    result.sketches.norms[:] *= 1.01
    with pytest.raises(RunError, match="sketches of the examples do not sum"):
        check_sketches(engine, sketch, result.sketches, grad_sum, examples, 0, passes)


CALIBRATED = ("score.form=calibrated", "score.sketch_dim=256", "split.val=8")
FIXED = (*CALIBRATED, "score.rho=0.01")
ALONE = ("method.params=random",)
"""Nothing reads G: the walks collect sketches only."""
LAST = (*ALONE, "score.sketch_layers=1")
VECTORS = ("grad_sum", "val_grad", "prior_grad")


@pytest.mark.parametrize(
    ("arch", "options"),
    [*((arch, ()) for arch in ARCHITECTURES), ("llama", LAST), ("gpt2", LAST), ("gemma3", LAST)],
)
def test_run_equals_the_oracle(
    arch: str, options: tuple[str, ...], make_run: Runner, model_folder
) -> None:
    """Scores of a float64 run folder, from the oracle's gradients and the run's own ρ."""
    run = make_run("model.dtype=float64", *CALIBRATED, *options, arch=arch, until="selection")
    summary = json.loads((run / "4_scores/summary.json").read_text())
    sketch = Sketch(256, seed=42, purpose="calibrated")
    model = AutoModelForCausalLM.from_pretrained(run / "2_warmup/theta_bar", dtype=torch.float64)
    engine = GhostEngine(model.eval(), find_candidates(model, "block_linear"))
    tokens = pq.read_table(run / "1_split/tokens.parquet").to_pylist()

    prefix, blocks = decoder_blocks(engine.model)
    names = list(engine.candidates)
    if options:
        names = [name for name in names if name.startswith(f"{prefix}.{len(blocks) - 1}.")]

    def sketches(role: str) -> torch.Tensor:
        rows = [row for row in tokens if row["role"] == role]
        found = [oracle.example_gradient(model, r["input_ids"], r["labels"], names) for r in rows]
        return torch.stack([sketch_of(engine, sketch, ParamVector(g)) for g in found])

    pool, val = sketches("pool"), sketches("val")
    expected = oracle.calibrated_scores(pool, val, summary["rho"])
    table = pq.read_table(run / "4_scores/examples.parquet")
    scores = table["score"].to_numpy()
    tolerance = 1e-5 if arch == "gemma3" else 1e-7  # Gemma's norms compute in fp32
    assert np.abs(scores - expected.numpy()).max() <= tolerance * float(expected.abs().max())
    own = oracle.held_out_scores(pool, val, summary["rho"]).numpy()
    near = np.abs(expected.numpy()[:, None] - own) <= tolerance * float(expected.abs().max())
    lower = (expected.numpy()[:, None] > own).mean(1)
    assert (np.abs(table["val_quantile"].to_numpy() - lower) <= near.mean(1) + 1e-12).all()
    assert summary["form"] == "calibrated" and table["exact"].to_pylist() == [True] * len(scores)
    chosen = json.loads((run / "5_selection/ids.json").read_text())
    best = np.argsort(-scores, kind="stable")[: len(chosen)]
    assert set(chosen) == {table["id"][int(i)].as_py() for i in best}
    assert [(run / f"3_gradients/{name}.safetensors").exists() for name in VECTORS] == 3 * [
        not options
    ]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_backward_pass_stops_at_the_first_sketched_block(architecture: str) -> None:
    """The block below runs without a graph, and its input is not needed."""
    engine, examples, passes = walked(architecture)
    sketch = sketch_with(engine, 64, 3, "block_linear", 1)
    _, blocks = decoder_blocks(engine.model)
    graphs: list[bool] = []
    for block in blocks:
        block.register_forward_hook(
            lambda _, __, out: graphs.append(
                (out if torch.is_tensor(out) else out[0]).requires_grad
            )
        )
    result = sketches_only(engine, examples, passes, silent(), "pool", sketch)
    assert graphs and graphs == [False, True] * (len(graphs) // 2)
    whole = sketches_only(
        engine, examples, passes, silent(), "pool", sketch_with(engine, 64, 3, "block_linear")
    )
    assert result.sketches is not None and whole.sketches is not None
    np.testing.assert_array_equal(result.values, whole.values)
    assert (result.sketches.norms < whole.sketches.norms).all()


def walked(architecture: str) -> tuple[GhostEngine, list[Example], PassSettings]:
    """A tiny float64 model, rows, and how they are walked over."""
    model = tiny_model(architecture, dtype=torch.float64)
    rows = tiny_examples(9, 97, 1)
    examples = [Example(e.id, e.index, list(e.input_ids), list(e.labels)) for e in rows]
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    return engine, examples, PassSettings(batch_tokens=64, pad_id=0, padding_side="right")


SPOILED: dict[str, Callable[[SketchRows], object]] = {
    "length": lambda rows: np.multiply(rows.norms, 1.01, out=rows.norms),
    "row lost": lambda rows: rows.norms.put([3], 0.0),
    "row twice": lambda rows: rows.norms.put([3], 2 * rows.norms[3]),
    "rows of others": lambda rows: rows.stored.__setitem__(2, rows.stored[3]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_sketches_are_checked_without_g_too(name: str) -> None:
    engine, examples, passes = walked("llama")
    sketch = sketch_with(engine, 64, 3, "block_linear", 0.5)
    rows = sketches_only(engine, examples, passes, silent(), "pool", sketch).sketches
    assert rows is not None
    found = check_sketches(engine, sketch, rows, None, examples, 0, passes)
    assert found["sketch_sum_error"] < 1e-12
    assert max(probe["error"] for probe in found["sketched_alone"]) < 1e-9
    SPOILED[name](rows)
    with pytest.raises(RunError, match="do not sum to what the walk added up"):
        check_sketches(engine, sketch, rows, None, examples, 0, passes)


def test_scores_without_g_have_the_same_bits(make_run: Runner) -> None:
    """G changes no score; a run that has it already is reused, and `diagnose` computes it."""
    said: list[str] = []
    whole = make_run(*FIXED, *ALONE, "score.keep=projection", out="whole", until="selection")
    alone = make_run(*FIXED, *ALONE, out="alone", until="selection")
    assert (whole / "3_gradients/grad_sum.safetensors").is_file()
    assert not (alone / "3_gradients/grad_sum.safetensors").exists()
    tables = [pq.read_table(run / "4_scores/examples.parquet") for run in (whole, alone)]
    assert tables[0].equals(tables[1])
    for name in ("5_selection/ids.json", "5_selection/mask.safetensors"):
        assert (whole / name).read_bytes() == (alone / name).read_bytes()
    summary = json.loads((alone / "4_scores/summary.json").read_text())
    assert "norms" not in summary and summary["checks"]["sketch_sum_error"] < 1e-3
    gradients = (whole / "3_gradients/manifest.json").read_bytes()
    make_run(*FIXED, *ALONE, out="whole", until="selection", said=said)
    assert (whole / "3_gradients/manifest.json").read_bytes() == gradients
    assert not any("[gradients] started" in line for line in said)


def test_what_is_not_stored_is_computed_for_a_diagnostic(make_run: Runner) -> None:
    found = []
    for extra in (("score.keep=projection",), ()):
        run = make_run(*FIXED, *ALONE, *extra, out="".join(extra) or "alone", until="selection")
        files = diagnose(run, Wanted.of(["heatmap"], []), silent())
        found.append(files[0].read_json()["result"])
    assert found[0] == found[1]


def test_a_budget_beyond_the_target_rows_is_told(make_run: Runner) -> None:
    run = make_run(*CALIBRATED, until="scores")
    path = run / "4_scores/summary.json"
    summary = json.loads(path.read_text())
    for share, warned in ((0.5, False), (0.05, True)):
        path.write_text(json.dumps(summary | {"target_share": share, "target_share_error": 0.01}))
        reseal(run / "4_scores")
        said: list[str] = []
        make_run(*CALIBRATED, f"select.data_budget={share / 2 + 0.1}", until="selection", said=said)
        assert any("exceeds the part of the pool" in line for line in said) == warned, share
    path.write_text(json.dumps(summary | {"target_share": "much"}))
    reseal(run / "4_scores")
    with pytest.raises(RunError, match="summary.json"):
        make_run(*CALIBRATED, "select.data_budget=0.3", until="selection")


@pytest.mark.parametrize("layers", [(), LAST])
@pytest.mark.parametrize(
    "options",
    [
        ("score.batch_tokens=32",),
        ("score.plan=blocks",),
        ("score.plan=host",),
        ("data.padding_side=left",),
        ("score.checkpointing=true",),
    ],
)
def test_how_a_run_computes_does_not_change_its_scores(
    options: tuple[str, ...], layers: tuple[str, ...], make_run: Runner
) -> None:
    found = []
    for extra in ((), options):
        run = make_run("model.dtype=float64", *FIXED, *layers, *extra, until="scores")
        found.append(pq.read_table(run / "4_scores/examples.parquet")["score"].to_numpy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layers", [(), LAST])
def test_sketches_in_a_file_give_the_same_bits(
    layers: tuple[str, ...], make_run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a size, sketches are mapped from files instead of held; also after an interruption."""
    options = ("score.form=calibrated", "resume.every=0", "score.batch_tokens=64", *layers)
    held = make_run(*options, out="held", until="scores")
    for module in ("engine.sketch", "storage.tensor_files"):
        monkeypatch.setattr(f"dualsft.{module}.MAPPED_BYTES", 0)
    memmap, mapped = np.memmap, list[str]()
    monkeypatch.setattr(np, "memmap", lambda *a, **k: mapped.append(a[2]) or memmap(*a, **k))
    add, calls = SketchRows.add, list[int]()

    def failing(self: SketchRows, rows: Sequence[int], sketches: np.ndarray) -> None:
        calls.append(1)
        if len(calls) == 8:
            raise RunError("stopped")
        add(self, rows, sketches)

    monkeypatch.setattr(SketchRows, "add", failing)
    with pytest.raises(RunError, match="stopped"):
        make_run(*options, out="mapped", until="scores")
    monkeypatch.setattr(SketchRows, "add", add)
    run = make_run(*options, out="mapped", until="scores")
    assert {"w+", "c"} <= set(mapped)  # written to a file, and read from one
    for name in ("3_gradients/sketches.safetensors", "4_scores/examples.parquet"):
        assert (run / name).read_bytes() == (held / name).read_bytes()
    assert not list(run.rglob("scratch*"))


def test_fp32_run_chooses_as_float64(make_run: Runner) -> None:
    runs = [
        make_run(
            f"model.dtype={dtype}", "score.rho=0.01", *CALIBRATED, out=dtype, until="selection"
        )
        for dtype in ("float64", "float32")
    ]
    scores = [pq.read_table(r / "4_scores/examples.parquet")["score"].to_numpy() for r in runs]
    assert np.abs(scores[0] - scores[1]).max() <= 5e-3 * np.abs(scores[0]).max()
    chosen = [json.loads((run / "5_selection/ids.json").read_text()) for run in runs]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("score.mode=two_pass", "score.mode: 'two_pass' is not allowed with score.form=calibrated"),
        ("select.rounds=1", "re-selection needs products with u"),
        ("method.params=dualsft", "not allowed with method.params=dualsft, which needs the"),
        ("score.keep=projection", "not allowed with score.keep=projection, which needs the"),
        ("score.sketch_layers=1.5", "score.sketch_layers: 1.5 is not allowed"),
    ],
)
def test_combinations_without_a_meaning_are_refused(option: str, words: str) -> None:
    given = ["score.sketch_layers=0.25"] if "_layers" in words or "which needs" in words else []
    with pytest.raises(ConfigError, match=re.escape(words)):
        settings.load("recommended", [*given, option, "model.path=m", "data.path=d"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("score.sketch_layers=3",),
            "score.sketch_layers: 3 is not allowed; the model has 2 blocks",
        ),
        (
            ("score.sketch_layers=0.5", "score.candidates=*layers.0.mlp*"),
            "has no linear weight in the last 1 of 2 blocks",
        ),
    ],
)
def test_blocks_that_the_model_does_not_have_are_refused(
    options: tuple[str, ...], words: str, make_run: Runner
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_run(*CALIBRATED, *ALONE, *options, until="gradients")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_api_scores_as_the_run_does(dtype: str, make_run: Runner, monkeypatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    run = make_run(f"model.dtype={dtype}", *CALIBRATED, until="selection")
    theta_bar = AutoModelForCausalLM.from_pretrained(
        run / "2_warmup/theta_bar", dtype=getattr(torch, dtype)
    )
    roles = read_split(RunPath(run / "1_split"))
    scores = dualsft.score(
        theta_bar, roles["pool"], roles["val"], eta_ft=2e-5, form="calibrated", sketch_dim=256
    )
    table = pq.read_table(run / "4_scores/examples.parquet")
    np.testing.assert_allclose(
        scores.example_scores, table["score"].to_numpy(), rtol=2e-3, atol=1e-3
    )
    chosen = set(json.loads((run / "5_selection/ids.json").read_text()))
    picked = dualsft.select(scores, data_budget=len(chosen)).data_subset
    assert {roles["pool"][i].id for i in picked} == chosen


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"form": "calibrate"}, "form='calibrate'"),
        ({"sketch_dim": 3}, "sketch_dim=3"),
        ({"rho": 0.0}, "rho=0.0"),
        ({"candidates": "*norm*"}, "compares the gradients of linear weights"),
    ],
)
def test_api_refuses_what_has_no_meaning(given: dict[str, object], words: str) -> None:
    examples = [Example(e.id, e.index, e.input_ids, e.labels) for e in tiny_examples(6)]
    call = {"form": "calibrated", "sketch_dim": 16, **given}
    with pytest.raises(ConfigError, match=re.escape(words)):
        dualsft.score(tiny_model("llama", torch.float32), examples, examples, eta_ft=1e-3, **call)


Tensors = dict[str, torch.Tensor]
SKETCHES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (lambda t: {n: v for n, v in t.items() if n != "val_norms"}, "val_norms"),
    "shape": (lambda t: t | {"pool": t["pool"][:, :8]}, "pool has shape"),
    "rows": (lambda t: t | {"pool": t["pool"][:-1]}, "pool has shape"),
    "dtype": (lambda t: t | {"val": t["val"].float()}, "val is float32"),
    "length": (lambda t: t | {"pool": t["pool"] * 2}, "unit length"),
    "nan": (lambda t: t | {"pool": t["pool"] * torch.nan}, "unit length"),
    "nan of val": (lambda t: t | {"val": t["val"] * torch.nan}, "unit length"),
    "infinite": (lambda t: t | {"pool": t["pool"] * torch.inf}, "unit length"),
    "nan norms": (lambda t: t | {"pool_norms": t["pool_norms"] * torch.nan}, "not lengths"),
    "infinite norms": (lambda t: t | {"val_norms": t["val_norms"] * torch.inf}, "not lengths"),
    "negative norms": (lambda t: t | {"pool_norms": -t["pool_norms"]}, "not lengths"),
    "hidden length": (
        lambda t: t | {"val": t["val"] * 9, "val_norms": t["val_norms"] * 0},
        "unit length",
    ),
    "sum": (lambda t: t | {"val": t["val"].flip(0) * -1}, "validation examples do not sum"),
    "sum of the walk": (lambda t: t | {"pool_sum": t["pool_sum"] * 1.1}, "do not sum to what"),
    "shape of the sum": (lambda t: t | {"pool_sum": t["pool_sum"][:8]}, "pool_sum is not 256"),
}


@pytest.mark.parametrize("name", SKETCHES)
def test_sketches_that_no_run_writes_are_refused(
    name: str, shared_run: Runner, make_run: Runner, tmp_path: Path
) -> None:
    change, words = SKETCHES[name]
    options = (*CALIBRATED, *(LAST if "of the" in name else ()))
    shutil.copytree(shared_run(*options, until="gradients"), tmp_path / "run")
    in_file("sketches.safetensors", change)(tmp_path / "run/3_gradients")
    with pytest.raises(RunError, match=words) as refused:
        make_run(*options, until="scores")
    assert "3_gradients/sketches.safetensors" in str(refused.value) or name.startswith("sum")


def test_too_few_validation_examples_are_named() -> None:
    pool, val = rows_of(gradients(20, 40)), rows_of(gradients(7, 40, seed=1))
    assert "fewer than 8 validation examples" in calibrate(pool, val, 0, CPU).how
    assert calibrate(pool, val, 0, CPU, 0.01).how == "as given"
