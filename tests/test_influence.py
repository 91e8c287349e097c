"""Influences and supports against the dense formulas in float64, and through the engine."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from models import ARCHITECTURES, rows_of, tiny_model, tiny_rows
from test_calibration import CPU, gradients

from dualsft.algorithm.calibration import Solver, calibrate, sketch_of
from dualsft.algorithm.gradients import pool_gradient
from dualsft.algorithm.influence import (
    Extremes,
    check_scores,
    influences,
    sketch_queries,
    supports,
)
from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.sketch import Sketch, SketchRows
from dualsft.engine.walk import PassSettings
from dualsft.errors import RunError
from dualsft.model.load import find_candidates
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter

SHAPES = [(12, 40), (60, 16), (20, 20)]
RHOS = [10.0, 1e-2, 1e-4]


def solver_of(pool: torch.Tensor) -> Solver:
    return Solver(rows_of(pool, exact=True), CPU)


def all_influences(solver: Solver, queries: SketchRows, rho: float, **given: int) -> np.ndarray:
    return np.concatenate([found for _, found in influences(solver, queries, rho, **given)], axis=1)


def close(found: np.ndarray, expected: torch.Tensor, tolerance: float = 1e-9) -> bool:
    return np.abs(found - expected.numpy()).max() <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize(("count", "dim"), SHAPES)
@pytest.mark.parametrize("rho", RHOS)
def test_influences_are_those_of_the_dense_formula(count: int, dim: int, rho: float) -> None:
    pool, queries = gradients(count, dim), gradients(7, dim, seed=2)
    found = all_influences(solver_of(pool), rows_of(queries, exact=True), rho)
    assert found.shape == (count, 7)
    assert close(found, oracle.influences(pool, queries, rho))


@pytest.mark.parametrize(("count", "dim"), SHAPES)
@pytest.mark.parametrize("rho", RHOS)
def test_supports_are_those_of_the_dense_formula(count: int, dim: int, rho: float) -> None:
    pool = gradients(count, dim)
    assert close(supports(solver_of(pool), rho), oracle.support(pool, rho))


def test_supports_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("calibration", "influence"):
        monkeypatch.setattr(f"dualsft.algorithm.{module}.ROW_BLOCK_BYTES", 500)
    monkeypatch.setattr("dualsft.engine.sketch.ROW_BLOCK_BYTES", 500)
    for count, dim in SHAPES:
        pool = gradients(count, dim)
        assert close(supports(solver_of(pool), 1e-2), oracle.support(pool, 1e-2))


def test_blocks_of_queries_do_not_change_their_scores() -> None:
    for count, dim in SHAPES:
        solver, queries = solver_of(gradients(count, dim)), rows_of(gradients(7, dim, 2), True)
        whole = all_influences(solver, queries, 1e-2)
        for block_bytes in (1, 3 * 8 * max(count, dim)):
            blocks = list(influences(solver, queries, 1e-2, block_bytes))
            assert len(blocks) == (7 if block_bytes == 1 else 3)
            assert [rows.start for rows, _ in blocks] == [
                *range(0, 7, 1 if block_bytes == 1 else 3)
            ]
            np.testing.assert_allclose(
                np.concatenate([found for _, found in blocks], axis=1), whole, rtol=1e-9
            )


def test_the_scores_of_a_run_are_the_mean_of_the_influences_of_its_val() -> None:
    """Linearity: v is the mean of the unit queries."""
    pool, val = gradients(30, 50), gradients(9, 50, seed=1)
    run = calibrate(rows_of(pool, True), rows_of(val, True), 0, CPU, 1e-2)
    found = all_influences(solver_of(pool), rows_of(val, True), 1e-2)
    np.testing.assert_allclose(found.mean(1), run.scores, rtol=1e-9, atol=1e-12)


def test_extremes_have_a_sign_and_a_stable_order() -> None:
    scores = np.array([0.5, -1.0, 0.0, 0.5, -0.25, 2.0])
    found = Extremes.of(scores, np.array([9, 1, 2, 3, 4, 5]), 10)
    assert found.helps.tolist() == [5, 3, 0] and found.helps_scores.tolist() == [2.0, 0.5, 0.5]
    assert found.hurts.tolist() == [1, 4] and found.hurts_scores.tolist() == [-1.0, -0.25]
    assert Extremes.of(scores, np.arange(6), 1).helps.tolist() == [5]


def test_scores_that_do_not_follow_from_the_sketches_are_refused() -> None:
    pool, val = gradients(30, 50), rows_of(gradients(9, 50, seed=1), True)
    scores = calibrate(rows_of(pool, True), val, 0, CPU, 1e-2).scores
    assert check_scores(solver_of(pool), val, 1e-2, scores) <= 1e-9
    for rho, stored in ((1.0, scores), (1e-2, -scores), (1e-2, np.full(30, np.nan))):
        with pytest.raises(RunError, match="the scores do not follow from the stored sketches"):
            check_scores(solver_of(pool), val, rho, stored)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_queries_through_the_engine(architecture: str) -> None:
    """Influences from walks equal those of autograd's gradients, one example at a time."""
    model = tiny_model(architecture, dtype=torch.float64)
    examples = tiny_rows(13, 1)
    pool, queries = examples[:9], examples[9:]
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    sketch = Sketch(64, seed=3, purpose="calibrated")
    passes = PassSettings(batch_tokens=64, pad_id=0, padding_side="right")
    said: list[str] = []
    silent = Reporter(said.append)
    stored = pool_gradient(engine, pool, passes, silent, sketch=sketch)[1].sketches
    assert stored is not None

    def ask(sketch: Sketch, stored: SketchRows = stored):
        return sketch_queries(engine, sketch, queries, stored, pool, 0, passes, silent)

    made, losses, checked = ask(sketch)
    label = "queries (4) and pool examples again, as a check (3)"
    assert any(line.startswith(f"{label}: 7/7 examples (100 %)") for line in said)
    names = list(engine.candidates)

    def expected(examples: list[Example]) -> torch.Tensor:
        found = [oracle.example_gradient(model, e.input_ids, e.labels, names) for e in examples]
        return torch.stack([sketch_of(engine, sketch, ParamVector(g)) for g in found])

    dense = expected(queries)
    for i in range(len(queries)):
        np.testing.assert_allclose(made.row(i), dense[i], rtol=1e-9, atol=1e-12)
    wanted = oracle.influences(expected(pool), dense, 1e-2)
    assert close(all_influences(Solver(stored, CPU), made, 1e-2), wanted, 1e-7)
    assert len(losses) == made.count == len(queries) == 4
    assert len(checked) == 3 and all(float(probe["error"]) < 1e-9 for probe in checked)
    with pytest.raises(RunError, match="the stored sketch of example"):
        ask(Sketch(64, seed=4, purpose="calibrated"))
