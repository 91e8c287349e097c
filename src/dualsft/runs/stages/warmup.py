"""Pilot warmup: Algorithm 1 line 1, (θ̄, ĉ) ← Warmup(θ_old, D_warm).

One epoch of AdamW over D_warm without gradient clipping; trains all parameters, or only the
candidates (`warmup.trainable: candidates`). bf16 weights have an fp32 master copy.
ĉ = sqrt(r / (1 − β₂^t)) + ε uses the second moment r, β₂, step count and ε of this optimizer and is
written piece by piece. `warmup.moments` and `warmup.offload` reduce the optimizer's memory
(`train/optimizer.py`). With `warmup.epochs: 0`, θ̄ is θ_old, and ĉ does not exist. In half precision
θ̄ is the rounded master copy; the rounding is compared with the distance that the warmup moved, and
a warning is logged if it is large. Reads 1_split; writes 2_warmup/theta_bar (a Hugging Face folder)
and curvature.safetensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from dualsft.algorithm.gradients import adam_rms, rounding_norm
from dualsft.algorithm.scores import TOLERANCE, check_fused_loss
from dualsft.distributed.world import world
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import GhostEngine
from dualsft.model.load import text_parameters
from dualsft.model.sharded import weights_vector
from dualsft.runs.context import RunContext, Settings, pass_settings
from dualsft.runs.stages.finetune import finetune_plan, save_tuned
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.paths import RunPath
from dualsft.system.usage import give_back, is_out_of_memory
from dualsft.train.loop import FEW_STEPS, TrainingPlan, train
from dualsft.train.optimizer import make_optimizer

ROUNDED_SHARE = 0.3
"""Warn if rounding exceeds this share of θ̄'s movement. At 0.6, a bf16 run of SmolLM2-135M selected
half of an fp32 run's examples (docs/results.md)."""


def settings(ctx: RunContext) -> Settings:
    keys = ("finetune.warmup_ratio", "finetune.micro_batch_size", "score.candidates")
    chosen = ctx.pick("warmup.*", *keys)
    del chosen["warmup.offload"]  # location of the optimizer state: no effect on results
    if chosen["warmup.max_epochs"] is None:  # a warmup of an earlier version stays valid
        del chosen["warmup.max_epochs"]
    plan = warmup_plan(ctx)
    chosen |= {"warmup.lr": plan.lr, "warmup.batch_size": plan.batch_size}
    return chosen | ctx.training_settings() | ctx.weight_hashes()


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Write θ̄ and ĉ to `part`."""
    examples = ctx.roles()["warm"]
    plan = warmup_plan(ctx)
    num_steps = plan.num_steps(len(examples))
    if num_steps == 0:
        ctx.reporter.say(
            "warmup.epochs is 0: gradients are taken at θ_old, without curvature ĉ, and CWSD is "
            "exactly zero"
        )
        save_tuned(ctx, ctx.theta_old(), part / "theta_bar")
        return {"steps": 0, "examples": 0}
    if num_steps < FEW_STEPS:
        cure = "raise split.warm, lower warmup.batch_size, or set warmup.min_steps"
        if num_steps < plan.min_steps:  # warmup.max_epochs passes were not enough
            cure = f"raise split.warm; warmup.max_epochs is {plan.max_epochs}"
        ctx.reporter.warn(
            f"the warmup has only {num_steps} steps over {len(examples)} examples; ĉ and θ̄ are "
            f"rough ({cure})",
            code="short_warmup",
        )
    model = ctx.theta_old()
    candidates = ctx.candidates(model)
    GhostEngine(model, candidates)  # fail on unsupported layers before the warmup
    check_fused_loss(model, examples[0], pass_settings(ctx), TOLERANCE[ctx.dtype])
    only_candidates = ctx.config.warmup.trainable == "candidates"
    with make_optimizer(
        model,
        text_parameters(model),
        dict.fromkeys(candidates.names) if only_candidates else None,
        lr=plan.lr,
        moments=ctx.config.warmup.moments,
        offload=ctx.config.warmup.offload,
        seed=ctx.config.seed,
    ) as optimizer:
        log = partial(ctx.rundir.log_metrics, "warmup")
        train(model, examples, optimizer, plan, ctx.reporter, "warmup", log, ctx.pieces)
        curvature = adam_rms(optimizer, candidates)
        curvature.save(part / "curvature.safetensors")
        norm, names = curvature.norm(), optimizer.names
        rounding = rounding_norm(optimizer) if ctx.dtype in HALF_DTYPES else None
    save_tuned(ctx, model, part / "theta_bar")
    facts = {"steps": num_steps, "examples": len(examples), "curvature_norm": norm}
    if rounding is None:
        return facts
    movement = _movement(ctx, model, names)
    if movement is not None and rounding > ROUNDED_SHARE * movement:
        dtype = str(ctx.dtype).removeprefix("torch.")
        ctx.reporter.warn(
            f"rounding θ̄ to {dtype} moved it by {rounding:.3g}; warmup and rounding together moved "
            f"it by {movement:.3g}: scores at θ̄ depend on the rounding, and a run in float32 may "
            "select other examples (set model.dtype=float32, or lengthen the warmup: split.warm, "
            "warmup.min_steps, warmup.lr)",
            code="rounded_theta_bar",
        )
    return facts | {"movement": movement, "rounding": rounding}


def _movement(ctx: RunContext, model: PreTrainedModel, names: list[str]) -> float | None:
    """‖θ̄ − θ_old‖ over the trained parameters; None, with a warning, if out of memory."""
    wide = accumulation_dtype(ctx.dtype)
    try:
        here, before = (weights_vector(m, names) for m in (model, ctx.theta_old()))
        return here.to(ctx.device, wide).plus(before.to(ctx.device, wide), -1.0).norm()
    except Exception as problem:
        # no process of a sharded world may go on without the others
        if not world().pick(is_out_of_memory(problem), False):
            raise
    give_back(ctx.device)
    ctx.reporter.warn(
        "out of memory with both θ̄ and θ_old: the movement of the warmup is not measured"
    )
    return None


def warmup_plan(ctx: RunContext) -> TrainingPlan:
    """Training plan from warmup.*, with finetune.* as defaults; no gradient clipping."""
    auto = ctx.config.finetune.batch_size == "auto"
    warmup, plan = ctx.config.warmup, finetune_plan(ctx, ctx.counts["warm"] if auto else 1)
    return replace(
        plan,
        lr=warmup.lr or ctx.base_lr(),
        epochs=warmup.epochs,
        batch_size=warmup.batch_size or plan.batch_size,
        max_grad_norm=0.0,
        min_steps=warmup.min_steps,
        max_epochs=warmup.max_epochs,
    )
