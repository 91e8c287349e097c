"""The parts by themselves: `score` and `select` on a model and token lists in memory.

The same engine, projection and certificate as `dualsft run`, without a run folder: Algorithm 1
lines 3 to 11 for callers who bring their own checkpoint, batches and training loop.

    scores = dualsft.score(theta_bar, pool, val, eta_ft=2e-5, anchors=anchors, theta_old=base)
    chosen = dualsft.select(scores, data_budget=0.1, param_budget=0.05)
    optimizer = dualsft.SparseAdamW(model.named_parameters(), chosen.param_mask, lr=2e-5)
    Trainer(model, args, train_dataset=data, optimizers=(optimizer, None)).train()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.certificate import bounds, judge, settle
from dualsft.algorithm.projection import ProjectionTerms, effective_lambda
from dualsft.algorithm.self_checks import TOLERANCE, check_fused_loss, dot_alone
from dualsft.algorithm.topk import topk_signed
from dualsft.data.examples import Example
from dualsft.engine.fused import fused_blocks
from dualsft.engine.ghost import GhostEngine, widened
from dualsft.engine.walk import Objective, PassSettings, cwsd_objective, loss_objective, walk
from dualsft.errors import ConfigError, RunError
from dualsft.model.load import find_candidates
from dualsft.runs.stages.chosen import product_source
from dualsft.runs.stages.split import resolve_budget
from dualsft.storage.vectors import ParamVector, Vector
from dualsft.system.progress import Reporter


@dataclass(frozen=True)
class Scores:
    """s_D with a bound each, u and G; s_θ is u ⊙ G."""

    example_scores: np.ndarray
    """⟨U₀, g_n⟩ · eta_sc, within `bound` of the exact ⟨u, g_n⟩."""
    bound: np.ndarray
    losses: np.ndarray
    grad_sum: ParamVector
    val_grad: ParamVector
    prior_grad: ParamVector
    projection: ParamVector
    """u / eta_sc."""
    eta_sc: float
    rescore: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    """Exact scores of the pool examples at these positions (one pass over them)."""


def _check_examples(name: str, examples: Sequence[Example], vocabulary: int) -> None:
    """What would fail later without a name, or quietly score nothing."""
    for i, example in enumerate(examples):
        if not isinstance(example, Example):
            raise ConfigError(f"score: {name}[{i}] is {type(example).__name__}; give an Example")
        reason = ""
        if len(example.input_ids) != len(example.labels):
            reason = f"{len(example.input_ids)} ids but {len(example.labels)} labels"
        elif not example.num_response_tokens:
            reason = "no label that is not -100, so there is no loss"
        elif not all(0 <= token < vocabulary for token in example.input_ids):
            reason = f"a token outside the model's vocabulary of {vocabulary}"
        if reason:
            raise ConfigError(f"score: {name}[{i}] ({example.id}) has {reason}; repair the example")


@dataclass(frozen=True)
class Selection:
    """The mask as sorted flat indices by parameter, the subset as positions in the pool."""

    param_mask: dict[str, Tensor]
    data_subset: np.ndarray
    num_rescored: int


def score(
    model: PreTrainedModel,
    pool: Sequence[Example],
    val: Sequence[Example],
    *,
    eta_ft: float,
    anchors: Sequence[Example] = (),
    theta_old: PreTrainedModel | None = None,
    curvature: ParamVector | None = None,
    lam: float = 0.8,
    lam_relative: bool = False,
    tau: float = 1.0,
    curvature_scale: float = 1.0,
    candidates: str = "block_linear",
    batch_tokens: int = 1024,
    reporter: Reporter | None = None,
) -> Scores:
    """Score a pool at `model` (θ̄) in one pass; CWSD when `theta_old` and `anchors` are given."""
    if (theta_old is None) != (not anchors):
        raise ConfigError("score: give both theta_old and anchors for CWSD, or neither")
    if not pool or not val:
        raise ConfigError("score: pool and val must not be empty")
    if not 0 < eta_ft < math.inf:
        raise ConfigError(f"score: eta_ft={eta_ft} is not allowed; give a learning rate > 0")
    vocabulary = len(model.get_input_embeddings().get_parameter("weight"))
    for name, examples in (("pool", pool), ("val", val), ("anchors", anchors)):
        _check_examples(name, examples, vocabulary)
    model.eval()
    engine = GhostEngine(model, find_candidates(model, candidates))
    settings = PassSettings(batch_tokens=batch_tokens, pad_id=0, padding_side="right")
    objective, say = loss_objective(model), reporter or Reporter()
    tolerance = TOLERANCE[next(model.parameters()).dtype]
    check_fused_loss(model, pool[0], settings, tolerance)
    val_grad = ParamVector.zeros(engine.candidates)
    walk(engine, val, objective, settings, say, "v_new (validation)", sums=val_grad)
    val_grad = val_grad.scaled(1.0 / len(val)).held()
    prior_grad = ParamVector.zeros(engine.candidates)
    if theta_old is not None:
        theta_old.eval()
        distil = cwsd_objective(theta_old, model, tau)
        with fused_blocks(theta_old, wide=True):  # the teacher computes as the student does
            walk(engine, anchors, distil, settings, say, "v_prior (CWSD)", sums=prior_grad)
        prior_grad = prior_grad.scaled(1.0 / len(anchors)).held()
    factor = effective_lambda(lam, lam_relative, val_grad, prior_grad)
    terms = ProjectionTerms(
        val_grad=val_grad,
        v_val=val_grad.plus(prior_grad, factor),
        curvature=curvature,
        preconditioner=None,
        curvature_scale=curvature_scale,
        eta_ft=eta_ft,
        n_sc=len(pool),
        lam_effective=factor,
    )
    grad_sum = ParamVector.zeros(engine.candidates)
    result = walk(
        engine,
        pool,
        objective,
        settings,
        say,
        "pool (G and f)",
        sums=grad_sum,
        direction=terms.estimate(),
        bounds=True,
    )
    _check_alone(engine, pool[0], objective, settings, terms.estimate())
    residual = terms.residual(grad_sum).block_norms()
    bound = bounds(result.inner_sums, np.array([residual[name] for name in engine.columns]))
    projection = terms.projection(grad_sum).held()

    def rescore(positions: np.ndarray) -> np.ndarray:
        rows = [pool[i] for i in positions]
        again = walk(engine, rows, objective, settings, say, "re-scoring", direction=projection)
        return again.dots * terms.eta_sc

    return Scores(
        example_scores=result.dots * terms.eta_sc,
        bound=bound * terms.eta_sc,
        losses=result.values,
        grad_sum=grad_sum,
        val_grad=val_grad,
        prior_grad=prior_grad,
        projection=projection,
        eta_sc=terms.eta_sc,
        rescore=rescore,
    )


def _check_alone(
    engine: GhostEngine,
    example: Example,
    objective: Objective,
    settings: PassSettings,
    direction: Vector,
) -> None:
    """One example by the engine and by plain autograd, both with fp32 weights or better."""
    with widened(engine.model):
        exact, norm = dot_alone(engine, example, direction, settings)
        quiet = Reporter(lambda _: None)
        found = walk(engine, [example], objective, settings, quiet, "alone", direction=direction)
    ours = float(found.dots[0])
    if not abs(exact - ours) <= TOLERANCE[engine.candidates.dtype] * direction.norm() * norm:
        raise RunError(
            f"self-check failed: example {example.id} scores {ours:.6g} by the engine and "
            f"{exact:.6g} alone by plain autograd"
        )


def select(
    scores: Scores, *, data_budget: int | float = 0.1, param_budget: int | float = 0.05
) -> Selection:
    """The exact signed top-k and top-b; fractions are of the candidates and of the pool
    (`dualsft run` counts the data budget against the whole corpus)."""
    k = resolve_budget(param_budget, scores.grad_sum.num_entries, "param_budget")
    if k > scores.grad_sum.num_entries:
        raise ConfigError(f"param_budget: {k:,} of {scores.grad_sum.num_entries:,} candidates")
    mask = topk_signed(product_source(scores.projection, scores.grad_sum, scores.eta_sc), k)
    count = len(scores.example_scores)
    b = resolve_budget(data_budget, count, "data_budget")
    if b > count:
        raise ConfigError(f"data_budget: {b:,} of a pool of {count:,}; lower it")
    verdict = judge(scores.example_scores, scores.bound, b)
    exact = scores.example_scores.copy()
    open_rows = np.flatnonzero(verdict.open & (scores.bound > 0))
    if len(open_rows):
        exact[open_rows] = scores.rescore(open_rows)
    chosen = settle(verdict, exact, np.arange(count), b)
    return Selection(mask.indices, chosen, len(open_rows))
