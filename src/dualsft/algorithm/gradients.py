"""Gradients at θ̄: Algorithm 1 lines 3 and 5 (G and v_new); line 6 is `preservation.py`.

v_new is the gradient of the mean validation loss, G the sum over the scoring pool. Given a
direction U₀ known before the pool pass (`ProjectionTerms.estimate`), the same pass also computes
f_n = ⟨U₀, g_n⟩ and the inner sums of the bound on the error of U₀ (`certificate.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.precision import precise
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.engine.walk_state import PassResult
from dualsft.memory.placement import blank
from dualsft.storage.vectors import Vector
from dualsft.system.progress import Reporter


def validation_gradient(
    engine: GhostEngine, val: Sequence[Example], passes: PassSettings, reporter: Reporter
) -> tuple[Vector, np.ndarray]:
    """(v_new, loss of each validation example): Algorithm 1 line 5."""
    sums, label = blank(engine.candidates, engine.candidates.dtype), "v_new (validation)"
    with precise(passes.precision, "directions", label, reporter.warn, engine.model) as (wide,):
        at, objective = engine.on(wide), loss_objective(wide)
        result = walk(at, val, objective, passes, reporter, label, sums=sums)
    return sums.scaled(1.0 / len(val)), result.values


def pool_gradient(
    engine: GhostEngine,
    pool: Sequence[Example],
    passes: PassSettings,
    reporter: Reporter,
    direction: Vector | None = None,
) -> tuple[Vector, PassResult]:
    """(G, per-example losses and, given a direction, f_n and inner sums): Algorithm 1 line 3."""
    grad_sum = blank(engine.candidates, engine.candidates.dtype)
    label = "pool (G)" if direction is None else "pool (G and f)"
    with precise(passes.precision, "pool", label, reporter.warn, engine.model) as (wide,):
        result = walk(
            engine.on(wide),
            pool,
            loss_objective(wide),
            passes,
            reporter,
            label,
            sums=grad_sum,
            direction=direction,
            bounds=direction is not None,
        )
    return grad_sum, result
