"""Python API: `warmup`, `score` and `select` on a model and tokenized examples in memory.

Algorithm 1 lines 1 to 11 for callers with their own checkpoint, data and training loop. Calls the
same functions of `algorithm/` as the stages of `dualsft run`, without a run folder. Examples are
rows of a `datasets.Dataset`, dicts, token lists, batches of a DataLoader or `Example`s
(`data/examples.py: as_examples`).

    curvature = dualsft.warmup(theta_bar, warm, lr=1e-4)
    scores = dualsft.score(theta_bar, pool, val, eta_ft=2e-5, anchors=anchors, theta_old=base)
    chosen = dualsft.select(scores, data_budget=0.1, param_budget=0.05)
    optimizer = dualsft.SparseAdamW(model.named_parameters(), chosen.param_mask, lr=2e-5)
    Trainer(model, args, train_dataset=data, optimizers=(optimizer, None)).train()

`score_trainer` does the first two lines with what a `Trainer` holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from transformers import PreTrainedModel

from dualsft.algorithm.calibration import scored_by_sketches, sketch_with
from dualsft.algorithm.duplicates import Duplicates
from dualsft.algorithm.gradients import (
    adam_rms,
    pool_gradient,
    prior_gradient,
    validation_gradient,
)
from dualsft.algorithm.projection import Scored, projection_terms
from dualsft.algorithm.quotas import LengthRule, PerSource, make_strata
from dualsft.algorithm.scores import (
    TOLERANCE,
    check_alone,
    check_fused_loss,
    check_sum,
    describe_projection,
    one_pass_bounds,
    products_of,
    rounding_scales,
)
from dualsft.algorithm.selection import choose_entries, choose_examples, rescore
from dualsft.algorithm.split import resolve_budget
from dualsft.config.settings import FinetuneConfig, ScoreConfig
from dualsft.data.examples import Example, as_examples
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.passes import Precision
from dualsft.engine.walk import PassSettings
from dualsft.errors import ConfigError
from dualsft.integrations.scores import Scores, Selection, described
from dualsft.integrations.transformers import (
    adam_curvature,
    check_trainer_loss,
    own_forward,
    plain_model,
    split_warm,
    trainer_rows,
)
from dualsft.model.load import find_candidates, text_parameters
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter
from dualsft.train.loop import TrainingPlan, train
from dualsft.train.optimizer import make_optimizer

if TYPE_CHECKING:
    from transformers import Trainer


def _examples(name: str, given: Iterable[Any], model: PreTrainedModel) -> list[Example]:
    """The given rows as examples; raises for those that would fail later, or have no loss."""
    vocabulary = len(model.get_input_embeddings().get_parameter("weight"))
    examples = as_examples(name, given)
    for i, example in enumerate(examples):
        reason = ""
        if len(example.input_ids) != len(example.labels):
            reason = f"{len(example.input_ids)} ids but {len(example.labels)} labels"
        elif not example.num_response_tokens:
            reason = "only labels of -100, so it has no loss"
        elif not all(0 <= token < vocabulary for token in example.input_ids):
            reason = f"a token outside the model's vocabulary of {vocabulary}"
        if reason:
            raise ConfigError(f"{name}[{i}] ({example.id}) has {reason}; repair the example")
    return examples


def warmup(
    model: PreTrainedModel,
    examples: Iterable[Any],
    *,
    lr: float,
    batch_size: int = 16,
    epochs: int = 1,
    min_steps: int = 64,
    max_epochs: int | None = 7,
    candidates: str = "block_linear",
    batch_tokens: int = 1024,
    seed: int = 42,
    reporter: Reporter | None = None,
) -> ParamVector:
    """Train `model` in place, from θ_old to θ̄; returns ĉ (Algorithm 1 line 1).

    All parameters are trained with AdamW as in the warmup of `dualsft run`: mean loss of the
    examples of a batch, cosine schedule, no clipping. There are at least `min_steps`
    optimizer steps, for which the examples are repeated up to `max_epochs` times. `candidates`
    names the parameters of ĉ, as the setting score.candidates.
    `batch_tokens` limits a forward pass; `seed` orders the examples.
    """
    rows = _examples("examples", examples, model)
    if not rows:
        raise ConfigError("warmup: examples must not be empty")
    if not 0 < lr < math.inf:
        raise ConfigError(f"warmup: lr={lr} is not allowed; give a learning rate > 0")
    plan = TrainingPlan(
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
        warmup_ratio=FinetuneConfig().warmup_ratio,
        max_grad_norm=0.0,
        micro_batch_size=None,
        batch_tokens=batch_tokens,
        seed=seed,
        pad_id=0,
        padding_side="right",
        min_steps=min_steps,
        max_epochs=max_epochs,
    )
    say, found = reporter or Reporter(), find_candidates(model, candidates)
    GhostEngine(model, found)  # fail on unsupported layers before the training
    with make_optimizer(model, text_parameters(model), None, lr=lr, seed=seed) as optimizer:
        train(model, rows, optimizer, plan, say, "warmup")
        curvature = adam_rms(optimizer, found).held()
    model.eval()
    return curvature


def score(
    model: PreTrainedModel,
    pool: Iterable[Any],
    val: Iterable[Any],
    *,
    eta_ft: float,
    form: Literal["literal", "calibrated"] = "literal",
    sketch_dim: int = 16384,
    rho: float | None = None,
    anchors: Iterable[Any] = (),
    theta_old: PreTrainedModel | None = None,
    curvature: ParamVector | None = None,
    lam: float = 0.8,
    lam_relative: bool | Literal["scores"] = False,
    tau: float = 1.0,
    curvature_scale: float = 1.0,
    candidates: str = "block_linear",
    batch_tokens: int = 1024,
    precision: Precision = "mixed",
    seed: int = 42,
    reporter: Reporter | None = None,
) -> Scores:
    """Score a pool at `model` (θ̄) in one pass; CWSD when `theta_old` and `anchors` are given.

    `eta_ft` is the learning rate of the fine-tuning to come; `curvature` is ĉ, which `warmup` gives
    (without it, the second-order term is zero). `theta_old` and `anchors` protect old behaviour,
    with the weight `lam` and the temperature `tau`. `form`, `sketch_dim`, `rho`, `lam`,
    `lam_relative`, `tau`, `curvature_scale` and `candidates` are as the settings `score.*`: the
    calibrated form finds the target examples in a mixed pool, the literal form is the paper's.

    Uses the same functions as the stages of `dualsft run`. In half precision the directions are
    computed with fp32 weights (`precision`, as `score.precision`). `seed` selects the examples of
    the self-check.
    """
    pool, val, anchors = (
        _examples(name, rows, model)
        for name, rows in (("pool", pool), ("val", val), ("anchors", anchors))
    )
    if (theta_old is None) != (not anchors):
        raise ConfigError("score: give both theta_old and anchors for CWSD, or neither")
    if not pool or not val:
        raise ConfigError("score: pool and val must not be empty")
    if form not in ("literal", "calibrated"):
        raise ConfigError(f"score: form={form!r} is not allowed; give 'literal' or 'calibrated'")
    if lam_relative not in (False, True, "scores"):
        raise ConfigError(
            f"score: lam_relative={lam_relative!r} is not allowed; give True, False or 'scores'"
        )
    if lam_relative == "scores" and form == "literal":
        raise ConfigError(
            "score: lam_relative='scores' is not allowed with form='literal', whose one pass needs "
            "the weight of v_prior before G is known; give form='calibrated'"
        )
    if not isinstance(sketch_dim, int) or sketch_dim < 16:
        raise ConfigError(f"score: sketch_dim={sketch_dim!r} is not allowed; give a count >= 16")
    if rho is not None and not 1e-6 <= rho < math.inf:
        raise ConfigError(f"score: rho={rho!r} is not allowed; give a number >= 1e-6, or None")
    if not 0 < eta_ft < math.inf:
        raise ConfigError(f"score: eta_ft={eta_ft} is not allowed; give a learning rate > 0")
    settings = ScoreConfig(
        lam=lam, lam_relative=lam_relative, tau=tau, curvature_scale=curvature_scale
    )
    model.eval()
    engine = GhostEngine(model, find_candidates(model, candidates))
    passes = PassSettings(
        batch_tokens=batch_tokens, pad_id=0, padding_side="right", precision=precision
    )
    say, tolerance = reporter or Reporter(), TOLERANCE[model.dtype]
    check_fused_loss(model, val[0], passes, tolerance)
    sketch = None
    if form == "calibrated":
        sketch = sketch_with(engine, sketch_dim, seed, candidates)
    mean, validation = validation_gradient(engine, val, passes, say, sketch)
    val_grad = mean.held()
    kind = "none" if theta_old is None else "cwsd"
    teacher = None if theta_old is None else theta_old.eval
    prior_grad = prior_gradient(kind, engine, teacher, anchors, tau, passes, say)[0].held()
    known = (settings, eta_ft, len(pool), val_grad, prior_grad, curvature)
    product = projection_terms(*known).estimate() if sketch is None else None
    grad_sum, result = pool_gradient(engine, pool, passes, say, product, sketch)
    grad_sum = grad_sum.held()
    terms = projection_terms(*known, grad_sum)
    direction = terms.estimate()
    scored = Scored.of(terms, grad_sum, prior_grad)
    projection = scored.projection.held()
    scored = replace(scored, projection=projection)
    products = products_of(scored, direction)
    summary = describe_projection(settings, scored, products)
    norm, dots = products.norm("direction"), None if sketch is not None else result.dots
    scales = rounding_scales(None if dots is None else result.inner_sums, len(pool))
    checks = {} if dots is None else check_sum(dots, products, terms.eta_sc, tolerance)
    checks |= check_alone(
        engine, pool, dots, direction, norm, terms.eta_sc, scales, seed, passes, say
    )
    quantile = None

    def again(rows: np.ndarray) -> np.ndarray:
        assert form == "literal", "calibrated scores are exact"
        return rescore(engine, [pool[i] for i in rows], scored, passes, say)

    if sketch is not None:
        assert result.sketches is not None and validation.sketches is not None
        pair = (result.sketches, validation.sketches)
        found, more = scored_by_sketches(
            engine, sketch, *pair, grad_sum, val_grad, pool, seed, rho, passes, say
        )
        example_scores, bound = found.scores, np.zeros(len(pool))
        quantile = found.val_quantile
        checks, summary = checks | more, summary | {"form": form} | found.facts()
    else:
        example_scores = result.dots * terms.eta_sc
        bound = one_pass_bounds(engine, result.inner_sums, products) * terms.eta_sc
        if model.dtype in HALF_DTYPES:
            bound += checks["rounding_ratio"] * scales
    return Scores(
        example_scores=example_scores,
        bound=bound,
        losses=result.values,
        grad_sum=grad_sum,
        val_grad=val_grad,
        prior_grad=prior_grad,
        projection=projection,
        eta_sc=terms.eta_sc,
        pool=pool,
        ties=np.array([example.index for example in pool]),
        summary=summary | {"checks": checks},
        scored=scored,
        rescore=again,
        val_quantile=quantile,
        say=say.say,
        theta_bar=described(engine, passes),
    )


def select(
    scores: Scores,
    *,
    data_budget: int | float = 0.1,
    param_budget: int | float = 0.05,
    duplicates: Duplicates = "keep",
    per_source: PerSource = None,
    lengths: LengthRule = "any",
    sources: Sequence[str] | None = None,
) -> Selection:
    """The exact signed top-k and top-b.

    `duplicates`, `per_source` and `lengths` are as the settings `select.*`; `sources` names the
    source of each pool example, unless `Example.source` does. An integer budget is
    a count, a float a fraction of the candidates or the pool (in `dualsft run`, of the whole
    corpus).
    """
    k = resolve_budget(param_budget, scores.grad_sum.num_entries, "param_budget")
    if k > scores.grad_sum.num_entries:
        raise ConfigError(f"param_budget: {k:,} of {scores.grad_sum.num_entries:,} candidates")
    mask = choose_entries(scores.scored, k)
    count = len(scores.example_scores)
    b = resolve_budget(data_budget, count, "data_budget")
    if b > count:
        raise ConfigError(f"data_budget: {b:,} of a pool of {count:,}; lower it")
    chosen = choose_examples(
        scores.example_scores,
        scores.bound,
        scores.ties,
        b,
        scores.rescore,
        scores.say,
        examples=scores.pool,
        duplicates=duplicates,
        strata=make_strata(b, scores.pool, per_source, lengths, sources),
    )
    rows = [scores.pool[i].index for i in chosen.positions]
    return Selection(mask.indices, chosen.positions, len(chosen.rescored), rows)


def score_trainer(
    trainer: Trainer,
    val: Any = None,
    *,
    anchors: Any = None,
    theta_old: PreTrainedModel | None = None,
    warm: int | float | Trainer = 0.05,
    candidates: str = "block_linear",
    batch_tokens: int = 1024,
    seed: int = 42,
    reporter: Reporter | None = None,
    **settings: Any,
) -> Scores:
    """Score the train_dataset of a Hugging Face `Trainer` or TRL `SFTTrainer` at its model.

    `val` and `anchors` are tokenized datasets with the trainer's columns, or names of entries of
    its `eval_dataset`; `val` is `eval_dataset` by default. `warm` is the count or share of rows
    for the warmup of a copy of the model (they are not scored), 0 for none, or another trainer that
    has trained with AdamW: its model is θ̄, and its second moments give ĉ. `theta_old` is the model
    whose behaviour the anchors keep, by default the trainer's as it is now. Learning rate and batch
    size are the trainer's; `settings` are those of `score`. Then:

        chosen = dualsft.select(scores, data_budget=0.1, param_budget=0.05)
        dualsft.restrict(trainer, chosen.param_mask, chosen.rows)
        trainer.train()
    """
    model, args = plain_model(trainer), trainer.args
    if args.world_size > 1:
        raise ConfigError(
            "score_trainer: one process computes the scores; score without torchrun, save "
            "param_mask and rows of the selection, and give them to restrict in every process"
        )
    shared: Any = {"candidates": candidates, "batch_tokens": batch_tokens, "seed": seed}
    shared |= {"reporter": reporter}
    pool = _examples("train_dataset", trainer_rows(trainer, "train_dataset"), model)
    new = _examples("val", trainer_rows(trainer, "val", val), model)
    old = [] if anchors is None else trainer_rows(trainer, "anchors", anchors)
    check_trainer_loss(trainer, find_candidates(model, candidates), new[0])
    theta_bar, curvature = model, None
    if not isinstance(warm, int | float):
        theta_bar = plain_model(warm)
        curvature = adam_curvature(warm, find_candidates(theta_bar, candidates))
    elif warm:
        taken, pool = split_warm(pool, warm, seed)
        with own_forward(model):
            theta_bar = deepcopy(model)
        size = args.train_batch_size * args.gradient_accumulation_steps
        curvature = warmup(theta_bar, taken, lr=args.learning_rate, batch_size=size, **shared)
    known = {"eta_ft": args.learning_rate, "curvature": curvature, "anchors": old}
    with own_forward(theta_bar):
        teacher = (theta_old or model) if old else None
        return score(theta_bar, pool, new, theta_old=teacher, **known, **shared, **settings)
