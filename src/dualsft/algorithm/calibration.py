"""Calibrated example scores: which examples move the model the way the validation examples do.

`score.form: calibrated` replaces s_D of Algorithm 1 line 8. The literal score ⟨u, g_n⟩ grows with
‖g_n‖, so on a mixed pool short examples with large gradients win, whatever they are about. Here
every example counts by the direction of its gradient, and directions that all of the pool shares
count less. With φ_n the sketch of g_n (`engine/sketch.py`) at unit length, v the mean of the
sketches of the validation examples, each at unit length, and F = Σ_n φ_n φ_nᵀ / N:

    s_n = φ_nᵀ (F + ρ I)⁻¹ v

A very large ρ gives the cosine with v. F is a mean, so a pool written twice ranks as before.

The system is solved in the smaller of N x N and p x p (p numbers per sketch), in float64. In the
N x N form, with M = Φ Φᵀ / N, s = (M + ρ I)⁻¹ Φ v, which is the same vector. The sketches are read
in blocks; the matrix and its factor are in memory, at most 24 p² bytes (6 GiB for p = 16,384).

ρ is chosen from the data. D_val is split into random halves A and B, and the pool is scored for A.
For each ρ we measure the mean cosine of Σ_n s_n φ_n with B over several splits, and use the
smallest ρ whose cosine is within one standard error (of the paired differences) of the best. The
measurements behind this are in docs/results.md, "Which example scores find the target".

The validation examples are scored too, each against the others, as if it were in the pool
(`held_out_scores`). That gives the scores a scale: `val_quantile` of a pool example is the share of
validation examples with a lower score, and is uniform over the part of the pool that is drawn like
the validation examples. How large that part is follows from the upper third (`target_share`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.split import resolve_budget
from dualsft.data.examples import Example
from dualsft.distributed.world import world
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.passes import widened
from dualsft.engine.sketch import ROW_BLOCK_BYTES, Sketch, SketchRows
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.errors import CheckError, ConfigError, RunError
from dualsft.model.load import decoder_blocks
from dualsft.storage.vectors import ParamVector, Vector
from dualsft.system.progress import Progress, Reporter, silent

RHOS = tuple(10.0 ** (-exponent / 2) for exponent in range(0, 9))
"""Candidates for ρ, half decades from 1 to 1e-4. The eigenvalues of F add up to one."""
DEFAULT_RHO = 10.0**-2.5
"""Used when there are too few validation examples to choose: best or nearly so in every pool of
docs/results.md."""
NUM_SPLITS = 8
MIN_VALIDATION = 8  # examples; with fewer, halves say too little to choose ρ
RESIDUAL_LIMIT = 1e-8  # a larger relative residual of the solve is an error
SKETCH_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}
"""Relative error of sketches, by the model's dtype; stored fp16 rows alone make about 3e-4."""
HALF_SKETCH_TOLERANCE = 5e-2
ROUNDING_LIMIT = 0.3  # of a sketch's length; random bf16 models of 28 layers reach 0.12
SLACK_FACTOR = 4.0  # safety factor on the rounding error that the probes measure
NUM_ALONE = 3  # examples sketched again by plain autograd
UPPER = 1 / 3
"""Part of the validation examples whose scores count for `target_share`. A smaller one keeps more
rows off target out, and is known less well."""


@dataclass(frozen=True)
class Calibration:
    """The scores, and how ρ was chosen."""

    scores: np.ndarray
    """s_n of each pool example: [N]."""
    rho: float
    curve: list[dict[str, float | bool]]
    """For each candidate ρ: mean cosine with the other half, its standard error relative to the
    best, and whether it is within that error of the best."""
    solved_in: str
    residual: float
    given: bool = False
    """Whether ρ was given instead of chosen."""
    val_quantile: np.ndarray | None = None
    """Share of the validation examples with a lower score: [N]. None if there are too few."""
    target_share: tuple[float, float] | None = None
    """Share of the pool that is like the validation examples, and its standard error."""

    @property
    def how(self) -> str:
        """How ρ was chosen, in words."""
        if not self.curve:
            few = f"the default: fewer than {MIN_VALIDATION} validation examples to choose it from"
            return "as given" if self.given else few
        flat = [point["rho"] for point in self.curve if point["flat"]]
        return f"from halves of D_val; as good from {min(flat):.2g} to {max(flat):.2g}"

    def facts(self) -> dict[str, Any]:
        flat = [point["rho"] for point in self.curve if point["flat"]]
        return {
            "rho": self.rho,
            "rho_flat": [min(flat), max(flat)] if flat else None,
            "rho_curve": self.curve,
            "solved_in": self.solved_in,
            "residual": self.residual,
            "target_share": self.target_share and self.target_share[0],
            "target_share_error": self.target_share and self.target_share[1],
        }


class Solver:
    """(F + ρ I)⁻¹ of a pool, in the smaller of its two sides."""

    def __init__(
        self, pool: SketchRows, device: torch.device, reporter: Reporter | None = None
    ) -> None:
        # other devices lack float64
        self.pool, self.device = pool, device if device.type == "cuda" else torch.device("cpu")
        device = self.device
        self.dual = pool.count <= pool.dim
        products = _row_products if self.dual else _moments
        label = "products of the sketches"
        with (reporter or silent()).track(label, pool.count, "examples") as progress:
            found = products(pool, device, progress)
        # fp32 products need not be symmetric to the last bit, and Cholesky reads the lower triangle
        self.matrix = (found.tril() + found.tril(-1).T).div_(pool.count)
        self.worst = 0.0
        """Largest relative residual of the solves so far."""
        self._factored: tuple[float, Tensor] | None = None  # the last ρ and its factor

    @property
    def side(self) -> str:
        size = len(self.matrix)
        return f"{size:,} x {size:,} ({'examples' if self.dual else 'sketch entries'})"

    def moved(self, queries_pQ: Tensor) -> Tensor:
        """The queries as right-hand sides: Φ q in the N x N form, q itself in the other."""
        queries = queries_pQ.to(self.device, torch.float64)
        return self.pool.times(queries) if self.dual else queries

    def factor(self, rho: float) -> Tensor:
        """Cholesky factor of matrix + ρ I; that of the last ρ is kept."""
        if self._factored is None or self._factored[0] != rho:
            self._factored = None  # free it before the next
            damped = self.matrix.clone()
            damped.diagonal().add_(rho)
            factor, failed = torch.linalg.cholesky_ex(damped)
            if int(failed):
                raise RunError(
                    f"score.rho: {rho:g} is too small for the sketches of this pool; raise it"
                )
            self._factored = rho, factor
        return self._factored[1]

    def solve(self, right: Tensor, rho: float) -> Tensor:
        """(matrix + ρ I)⁻¹ right, by a Cholesky factorization."""
        solution = torch.cholesky_solve(right, self.factor(rho))
        residual = torch.linalg.vector_norm(right - self.matrix @ solution - rho * solution, dim=0)
        worst = float((residual / torch.linalg.vector_norm(right, dim=0).clamp_min(1e-300)).max())
        if not worst <= RESIDUAL_LIMIT:
            raise CheckError(
                f"self-check failed: the solve of the calibrated scores has a relative residual of "
                f"{worst:.2g} (allowed {RESIDUAL_LIMIT:g}) at ρ = {rho:g}; nothing was written"
            )
        self.worst = max(self.worst, worst)
        return solution

    def scores(self, solution: Tensor) -> Tensor:
        """s_n for each column of a solution: [N, Q]."""
        return solution if self.dual else self.pool.times(solution)

    def leverages(self, rho: float) -> Tensor:
        """φ_nᵀ (F + ρ I)⁻¹ φ_n of each example: [N].

        With L the factor, the p x p form sums the squares of L⁻¹ φ_n, and the N x N form uses
        Φ (F + ρ I)⁻¹ Φᵀ = N (I − ρ (M + ρ I)⁻¹).
        """
        factor = self.factor(rho)
        if not self.dual:
            parts = [_squares(factor, block.T) for _, block in self.pool.blocks(self.device)]
            return torch.cat(parts)
        count = self.pool.count
        unit, step = torch.eye(count, device=self.device), max(1, ROW_BLOCK_BYTES // (8 * count))
        parts = [_squares(factor, columns) for columns in unit.split(step, dim=1)]
        return count * (1 - rho * torch.cat(parts))

    def inner_products(self, queries_Qp: Tensor, rho: float) -> Tensor:
        """qᵀ (F + ρ I)⁻¹ q' for each pair of queries: [Q, Q].

        The N x N form uses (F + ρ I)⁻¹ = (I − Φᵀ (M + ρ I)⁻¹ Φ / N) / ρ.
        """
        queries = queries_Qp.to(self.device, torch.float64)
        right = self.moved(queries.T)
        solution = self.solve(right, rho)
        if not self.dual:
            return queries @ solution
        return (queries @ queries.T - right.T @ solution / self.pool.count) / rho

    def agreement(
        self, solution: Tensor, right: Tensor, rho: float, other: Tensor, lengths: Tensor
    ) -> Tensor:
        """Cosine of Σ_n s_n φ_n with another query per column, without reading the pool again.

        `right` and `other` are right-hand sides, `lengths` the norms of the other queries. Both
        forms use matrix @ solution = right − ρ solution.
        """
        image = right - rho * solution
        dots = (other * (solution if self.dual else image)).sum(0)
        squares = ((solution if self.dual else image) * image).sum(0)
        if self.dual:  # ‖Φᵀ s‖² = N sᵀ M s, and the dot is (Φ b)ᵀ s
            squares = squares * self.pool.count
        return dots / (squares.clamp_min(0).sqrt() * lengths).clamp_min(1e-300)


def calibrate(
    pool: SketchRows,
    val: SketchRows,
    seed: int,
    device: torch.device,
    rho: float | None = None,
    reporter: Reporter | None = None,
) -> Calibration:
    """Scores of the pool for these validation examples; `rho`, if given, is used as it is."""
    solver = Solver(pool, device, reporter)
    device = solver.device
    val_Vp = torch.cat([block for _, block in val.blocks(device)]).to(torch.float64)
    halves = [] if rho is not None else _halves(val.count, seed)
    means = [val_Vp.mean(0), *(val_Vp[rows].mean(0) for pair in halves for rows in pair)]
    queries = torch.stack(means, dim=1)
    right = solver.moved(queries)
    first, second = right[:, 1::2], right[:, 2::2]
    # each half predicts the other
    halved, others = torch.cat([first, second], 1), torch.cat([second, first], 1)
    lengths = torch.linalg.vector_norm(queries, dim=0)
    lengths = torch.cat([lengths[2::2], lengths[1::2]])
    found: list[np.ndarray] = []
    quantile, share = None, None
    candidates = RHOS if halves else ()
    with (reporter or silent()).track("solving", len(candidates) + 1, "systems") as progress:
        for candidate in candidates:
            solution = solver.solve(halved, candidate)
            cosines = solver.agreement(solution, halved, candidate, others, lengths)
            found.append(cosines.cpu().numpy())
            progress.advance(1)
        curve, chosen = _choose(np.array(found)) if halves else ([], DEFAULT_RHO)
        used = chosen if rho is None else rho
        scores = solver.scores(solver.solve(right[:, :1], used))[:, 0].cpu().numpy()
        progress.advance(1)
    if val.count >= MIN_VALIDATION:
        own = np.sort(held_out_scores(solver, val_Vp, used))
        quantile = np.searchsorted(own, scores) / len(own)
        share = target_share(scores, own)
    side, worst = solver.side, solver.worst
    return Calibration(scores, used, curve, side, worst, rho is not None, quantile, share)


def held_out_scores(solver: Solver, val_Vp: Tensor, rho: float) -> np.ndarray:
    """The score that each validation example would have as a member of the pool: [V].

    The target is the mean of the *other* validation examples. A pool example is part of F, which
    divides its score by 1 + φᵀ (F + ρ I)⁻¹ φ / N, F without it; a validation example is divided by
    the same. So an example of the pool that is drawn like the validation examples has a score that
    is drawn like these.
    """
    products = solver.inner_products(val_Vp, rho)
    own = products.diagonal()
    others = (products.sum(1) - own) / (len(products) - 1)
    return (others / (1 + own / solver.pool.count)).cpu().numpy()


def target_share(scores: np.ndarray, own: np.ndarray) -> tuple[float, float]:
    """(share of the pool that is drawn like the validation examples, its standard error).

    From the pool's scores and the validation examples' own, sorted. A share π of such examples
    puts about π / 3 of the pool above the lowest score of the upper third of validation examples;
    examples off target can only add to that.
    """
    above = max(1, round(UPPER * len(own)))
    part, upper = float((scores >= own[-above]).mean()), above / len(own)
    share = min(1.0, part / upper)
    # the third is that of a sample, and so is the pool
    variance = share**2 * (1 - upper) / above + part * (1 - part) / len(scores) / upper**2
    return share, float(np.sqrt(variance))


def _squares(factor: Tensor, columns: Tensor) -> Tensor:
    """Squared norms of L⁻¹ times each column."""
    solved = torch.linalg.solve_triangular(factor, columns.to(factor.dtype), upper=False)
    return solved.square().sum(0)


def _halves(count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random halves of the validation examples; none if there are too few."""
    if count < MIN_VALIDATION:
        return []
    rng = np.random.default_rng([seed, 20])
    orders = [rng.permutation(count) for _ in range(NUM_SPLITS)]
    return [(order[: count // 2], order[count // 2 :]) for order in orders]


def half_cosine(val: SketchRows, seed: int) -> float | None:
    """Mean cosine of the mean unit sketches of two halves of D_val; None for too few examples."""
    rows = torch.cat([block for _, block in val.blocks(torch.device("cpu"))]).double()
    cosines = [
        torch.cosine_similarity(rows[first].mean(0), rows[second].mean(0), dim=0)
        for first, second in _halves(val.count, seed)
    ]
    return float(torch.stack(cosines).mean()) if cosines else None


def _choose(cosines: np.ndarray) -> tuple[list[dict[str, float | bool]], float]:
    """(curve over RHOS, chosen ρ) from cosines [ρ, half]: the smallest ρ within one standard error
    of the best. The halves are the same for every ρ, so the errors are of paired differences."""
    means = cosines.mean(1)
    deficits = cosines[means.argmax()] - cosines
    # two halves of a split share their examples: the splits are the sample
    per_split = deficits.reshape(len(RHOS), 2, -1).mean(1)
    errors = per_split.std(1, ddof=1) / np.sqrt(per_split.shape[1])
    flat = per_split.mean(1) <= errors
    curve: list[dict[str, float | bool]] = [
        {"rho": rho, "cosine": float(mean), "error": float(error), "flat": bool(within)}
        for rho, mean, error, within in zip(RHOS, means, errors, flat, strict=True)
    ]
    return curve, min(rho for rho, within in zip(RHOS, flat, strict=True) if within)


def _row_products(pool: SketchRows, device: torch.device, progress: Progress) -> Tensor:
    """Φ Φᵀ in float64, block by block: [N, N]."""
    total = torch.empty(pool.count, pool.count, dtype=torch.float64, device=device)
    for rows, left in pool.blocks(device):
        for columns, right in pool.blocks(device):
            if columns.start > rows.start:
                break
            product = (left @ right.T).to(torch.float64)
            total[rows, columns] = product
            total[columns, rows] = product.T
        progress.advance(len(left))
    return total


def _moments(pool: SketchRows, device: torch.device, progress: Progress) -> Tensor:
    """Φᵀ Φ in float64, block by block: [p, p]."""
    total = torch.zeros(pool.dim, pool.dim, dtype=torch.float64, device=device)
    for _, block in pool.blocks(device):
        total += (block.T @ block).to(torch.float64)
        progress.advance(len(block))
    return total


def sketch_of(engine: GhostEngine, sketch: Sketch, vector: Vector) -> Tensor:
    """Sketch of a vector over (some of) the candidates: [dim], float64. Each process reads its own
    rows."""
    total = torch.zeros(sketch.dim, dtype=torch.float64)
    for name, transposed in engine.linear_weights.items():
        covered = sketch.weights is None or name in sketch.weights
        if name not in vector or not covered:
            continue
        shape = vector.forms[name].shape
        start, stop = world().own(shape)
        *outer, width = shape  # the experts of a layer are one matrix, one below the other
        rows = vector.piece(name, start, stop).view(-1, width)
        total += sketch.of_rows(name, rows, start // width, prod(outer), transposed).cpu()
    return world().sum_(total)


def check_total(
    rows: SketchRows, expected: Tensor | None, tolerance: float, what: str, sum_of: str
) -> float:
    """Relative difference of the sum of sketches to `expected`, the sketch of the sum of gradients;
    raise if too large. None: that sum was not computed, and the rows are compared with the sum that
    the walk kept beside them."""
    if expected is None:
        expected, sum_of = torch.from_numpy(rows.added), "what the walk added up"
    else:
        sum_of = f"the sketch of {sum_of}"
    # rounding adds up like a random walk, relative to the lengths of the rows
    lengths = float(np.sqrt((rows.norms.astype(np.float64) ** 2).sum()))
    size = max(float(torch.linalg.vector_norm(expected)), lengths, 1e-300)
    apart = float(torch.linalg.vector_norm(rows.total() - expected)) / size
    if not apart <= tolerance:
        raise CheckError(
            f"self-check failed: the sketches of the {what} do not sum to {sum_of} (relative "
            f"difference {apart:.2g} > {tolerance:g}); nothing was written. Either they were "
            "changed, or the model uses its parameters outside the supported layers: please file "
            "an issue"
        )
    return apart


def sketch_with(
    engine: GhostEngine, dim: int, seed: int, candidates: str, layers: int | float = 1.0
) -> Sketch:
    """The sketch of the calibrated form: of all linear candidates, or of those in the last blocks
    (`score.sketch_layers`); raises if there is nothing that it could cover."""
    weights = engine.linear_weights
    if not weights:
        raise ConfigError(
            f"score.form: 'calibrated' compares the gradients of linear weights, and "
            f"score.candidates={candidates} has none; give block_linear, or score.form=literal"
        )
    if layers != 1.0 or isinstance(layers, int):
        prefix, blocks = decoder_blocks(engine.model)
        count = resolve_budget(layers, len(blocks), "score.sketch_layers")
        if count > len(blocks):
            raise ConfigError(
                f"score.sketch_layers: {layers} is not allowed; the model has {len(blocks)} blocks"
            )
        last = {f"{prefix}.{i}." for i in range(len(blocks) - count, len(blocks))}
        weights = [name for name in weights if name.startswith(tuple(last))]
        if not weights:
            raise ConfigError(
                f"score.sketch_layers: score.candidates={candidates} has no linear weight in the "
                f"last {count:,} of {len(blocks)} blocks; give more blocks, or other candidates"
            )
    return Sketch(dim, seed, "calibrated", weights=frozenset(weights))


def check_sketches(
    engine: GhostEngine,
    sketch: Sketch,
    pool: SketchRows,
    grad_sum: Vector | None,
    examples: Sequence[Example],
    seed: int,
    passes: PassSettings,
) -> dict[str, Any]:
    """Raise unless the sketches of the pool are what they must be.

    Two checks: Σ_n φ_n, at original lengths, is the sketch of G (or, without G, the sum that the
    walk kept); and a few random examples are sketched again from their gradient by plain autograd,
    without batch, layer rules or fused loss.
    A half-precision model is converted to fp32 for that, and the engine sketches the examples in
    fp32 too: comparing these two checks the engine, comparing them with the stored sketches
    measures the rounding.
    """
    half = engine.model.dtype in HALF_DTYPES
    tolerance = SKETCH_TOLERANCE.get(engine.model.dtype, HALF_SKETCH_TOLERANCE)
    expected = None if grad_sum is None else sketch_of(engine, sketch, grad_sum)
    apart = check_total(pool, expected, tolerance, "examples", "G")
    probed: list[dict[str, Any]] = []
    probes = np.random.default_rng([seed, 21]).permutation(len(examples))[:NUM_ALONE]
    limit = SKETCH_TOLERANCE.get(engine.candidates.dtype, tolerance)
    smallest = float(torch.finfo(engine.candidates.dtype).eps) * float(pool.norms.max())
    with widened(engine.model) as (wide,):
        exactly, again, rows = engine.on(wide), pool, probes.tolist()
        if half:
            chosen, objective = [examples[i] for i in rows], loss_objective(wide)
            label = "probes, sketched in fp32"
            found_again = walk(exactly, chosen, objective, passes, silent(), label, sketch=sketch)
            assert found_again.sketches is not None
            again, rows = found_again.sketches, list(range(len(chosen)))
        for i, position in zip(probes.tolist(), rows, strict=True):
            parts: list[Tensor] = []

            def visit(name: str, gradient: Tensor, parts: list[Tensor] = parts) -> None:
                parts.append(sketch_of(exactly, sketch, ParamVector({name: gradient})))

            batch = passes.collate([examples[i]], engine.device)
            alone(wide, exactly.candidates, batch, visit)
            found = torch.stack(parts).sum(0)
            # gradients below `smallest` are rounding noise (examples with a loss near zero)
            length = max(float(torch.linalg.vector_norm(found)), smallest, 1e-300)
            error = float(torch.linalg.vector_norm(again.row(position) - found)) / length
            rounding = float(torch.linalg.vector_norm(pool.row(i) - found)) / length
            probed.append({"id": examples[i].id, "error": error, "rounding": rounding})
            if not error <= limit:
                raise CheckError(
                    f"self-check failed: the sketch of example {examples[i].id} differs from that "
                    f"of its gradient by plain autograd (relative difference {error:.2g} > "
                    f"{limit:g}); nothing was written"
                )
            if not rounding <= ROUNDING_LIMIT:
                raise CheckError(
                    f"self-check failed: rounding changes the sketch of example {examples[i].id} "
                    f"by {rounding:.2g} of its length (limit {ROUNDING_LIMIT:g}); nothing was "
                    "written (use score.precision=full or model.dtype=float32)"
                )
    return {"sketch_tolerance": tolerance, "sketch_sum_error": apart, "sketched_alone": probed}


def scored_by_sketches(
    engine: GhostEngine,
    sketch: Sketch,
    pool: SketchRows,
    val: SketchRows,
    grad_sum: Vector | None,
    val_grad: Vector | None,
    examples: Sequence[Example],
    seed: int,
    rho: float | None,
    passes: PassSettings,
    reporter: Reporter,
) -> tuple[Calibration, dict[str, Any]]:
    """Check the sketches and solve for the scores: (scores, results of the checks). G and v_new are
    None if they were not computed."""
    checks = check_sketches(engine, sketch, pool, grad_sum, examples, seed, passes)
    expected = None if val_grad is None else sketch_of(engine, sketch, val_grad) * val.count
    check_total(val, expected, checks["sketch_tolerance"], "validation examples", "v_new")
    found = calibrate(pool, val, seed, engine.device, rho, reporter)
    worst = max(probe["rounding"] for probe in checks["sketched_alone"])
    slack = SLACK_FACTOR * worst * float(np.abs(found.scores).max())
    return found, checks | {"rounding_slack": slack, "rounding_ratio": 0.0}
