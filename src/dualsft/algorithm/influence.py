"""The data microscope: which pool examples a query row depends on, and which look wrong.

Calibrated scores (Algorithm 1 line 8, `algorithm/calibration.py`) are linear in what is asked for:
s = Φ (F + ρ I)⁻¹ q, where Φ has the unit sketches of the pool as rows and q is the sketch of any
gradient at θ̄. With the sketches of a run stored, a new query costs one backward pass of its row, a
solve and one read of Φ, and no pass over the pool.

A positive score helps: training on the example moves the model the way the query row does. A
negative one hurts. The support of an example is its score with the mean of all *other* examples
as the query,

    support_n = φ_nᵀ (F + ρ I)⁻¹ Σ_{j ≠ n} φ_j / N = φ_nᵀ (F + ρ I)⁻¹ m − h_n / N,

with m the mean of Φ and h_n = φ_nᵀ (F + ρ I)⁻¹ φ_n (the leverage). An example that the others
contradict has low support.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.calibration import (
    ROUNDING_LIMIT,
    SKETCH_TOLERANCE,
    Solver,
)
from dualsft.algorithm.topk import top_b
from dualsft.data.examples import Example
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.passes import precise
from dualsft.engine.sketch import ROW_BLOCK_BYTES, Sketch, SketchRows
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.errors import RunError
from dualsft.system.progress import Reporter

_CURE = "remove the stages gradients and scores, and run the same `dualsft run` again"
NUM_PROBES = 3  # pool examples sketched again with the queries


@dataclass(frozen=True)
class Extremes:
    """The pool examples with the most positive and the most negative scores for one query."""

    helps: np.ndarray
    """Positions in the pool, largest score first; only positive scores."""
    helps_scores: np.ndarray
    hurts: np.ndarray
    """Positions in the pool, smallest score first; only negative scores."""
    hurts_scores: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, ties: np.ndarray, top: int) -> Extremes:
        """The first `top` of each side; equal scores in increasing order of `ties`."""
        count = min(top, len(scores))
        best, worst = top_b(scores, ties, count), top_b(-scores, ties, count)
        best, worst = best[scores[best] > 0], worst[scores[worst] < 0]
        return cls(best, scores[best], worst, scores[worst])


def influences(
    solver: Solver, queries: SketchRows, rho: float, block_bytes: int = ROW_BLOCK_BYTES
) -> Iterator[tuple[slice, np.ndarray]]:
    """Scores of the pool for each query at unit length: blocks of (queries, scores [N, Q]).

    A block has at most `block_bytes` (at least one query), so nothing of size N x Q is in memory.
    """
    step = max(1, block_bytes // (8 * max(solver.pool.count, solver.pool.dim)))
    for start in range(0, queries.count, step):
        rows = slice(start, min(start + step, queries.count))
        units = torch.from_numpy(queries.stored[rows].astype(np.float64)) / queries.dim**0.5
        solution = solver.solve(solver.moved(units.T), rho)
        yield rows, solver.scores(solution).cpu().numpy()


def supports(solver: Solver, rho: float) -> np.ndarray:
    """How much the other examples support each one: [N]. Low means suspected wrong."""
    pool = solver.pool
    together = _mean_scores(solver, pool, rho)
    return (together - solver.leverages(rho) / pool.count).cpu().numpy()


def _mean_scores(solver: Solver, rows: SketchRows, rho: float) -> Tensor:
    """Scores of the pool for the mean of these unit rows: [N]."""
    total = torch.zeros(rows.dim, dtype=torch.float64, device=solver.device)
    for _, block in rows.blocks(solver.device):
        total += block.to(torch.float64).sum(0)
    right = solver.moved((total / rows.count)[:, None])
    return solver.scores(solver.solve(right, rho))[:, 0]


def sketch_queries(
    engine: GhostEngine,
    sketch: Sketch,
    queries: Sequence[Example],
    pool: SketchRows,
    examples: Sequence[Example],
    seed: int,
    passes: PassSettings,
    reporter: Reporter,
    where: object = "the sketches",
) -> tuple[SketchRows, np.ndarray, list[dict[str, float | str]]]:
    """(sketches and losses of the queries, results of the check), in the precision of v_new.

    A few random examples of the pool are sketched in the same walk: if they differ from the stored
    sketches, these are of another model, seed or split, and the scores would mean nothing; `where`
    names them in the error.
    """
    probes = np.random.default_rng([seed, 22]).permutation(len(examples))[:NUM_PROBES]
    label = f"queries ({len(queries):,}) and pool examples again, as a check ({len(probes):,})"
    rows = [*queries, *(examples[i] for i in probes)]
    with precise(passes.precision, "directions", label, reporter.warn, engine.model) as (wide,):
        at = engine.on(wide)
        found = walk(at, rows, loss_objective(wide), passes, reporter, label, sketch=sketch)
    assert found.sketches is not None
    made, count = found.sketches, len(queries)
    half = engine.model.dtype in HALF_DTYPES
    limit = ROUNDING_LIMIT if half else SKETCH_TOLERANCE[engine.model.dtype]
    # gradients below `smallest` are rounding noise (examples with a loss near zero)
    smallest = float(torch.finfo(engine.candidates.dtype).eps) * float(pool.norms.max())
    checked: list[dict[str, float | str]] = []
    for at_row, i in enumerate(probes.tolist(), count):
        again = made.row(at_row)
        length = max(float(torch.linalg.vector_norm(again)), smallest, 1e-300)
        error = float(torch.linalg.vector_norm(pool.row(i) - again)) / length
        checked.append({"id": examples[i].id, "error": error})
        if not error <= limit:
            raise RunError(
                f"{where}: the stored sketch of example {examples[i].id} differs from that of its "
                f"gradient at θ̄ (relative difference {error:.2g} > {limit:g}); {_CURE}"
            )
    return made.first(count), found.values[:count], checked


def check_scores(
    solver: Solver, val: SketchRows, rho: float, stored: np.ndarray, where: object = "the scores"
) -> float:
    """Relative difference of the stored scores to those of the sketches; raises if too large."""
    found = _mean_scores(solver, val, rho).cpu().numpy()
    apart = float(np.abs(found - stored).max() / max(float(np.abs(found).max()), 1e-300))
    # products of fp32 sketches differ by about 1e-7 between devices, which 1/ρ amplifies
    if not apart <= 1e-2 + 1e-6 / rho:
        raise RunError(
            f"{where}: the scores do not follow from the stored sketches and ρ = {rho:g} (relative "
            f"difference {apart:.2g}); {_CURE}"
        )
    return apart
