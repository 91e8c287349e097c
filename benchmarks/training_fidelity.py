"""Effect of dtype and optimizer options on fine-tuning's loss curve and on the warmup's θ̄ and ĉ.

Algorithm 1 lines 1 and 12. Curves: restricted fine-tuning from the same weights, with the same mask
and batches, in bf16 and with low-precision moments, against fp32 throughout. Warmup: each option
produces its own θ̄ and ĉ; ĉ and the scores under score.step=adam, where ĉ matters most, are compared
with those of the default. The default warmup with its rows in another order shows the random
variation.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.agreement import agreement, score
from benchmarks.measuring import Section
from benchmarks.options import Options
from benchmarks.roles import Roles, conditions, read_roles, round_to_bf16
from benchmarks.workload import build_model, copy_as
from dualsft.algorithm.gradients import adam_rms
from dualsft.data.examples import Example
from dualsft.model.load import find_candidates, text_parameters
from dualsft.storage.vectors import ParamVector, Products
from dualsft.system.progress import Reporter
from dualsft.train.compact import MOMENTS, Moments
from dualsft.train.loop import TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW

WARMUP_POOL = {"cpu": 40, "cuda": 800}  # pool examples scored per warmup option
STEPS = {"cpu": 4, "cuda": 60}
BATCH_SIZE = {"cpu": 4, "cuda": 16}
LR = {"warmup": 1e-4, "fine-tuning": 5e-4}


def run(options: Options) -> Section:
    """Compare loss curves, then warmup options; logs each one when it finishes."""
    roles = read_roles(options)
    start = time.perf_counter()

    def said(what: str) -> None:
        print(f"  {what}: {time.perf_counter() - start:.0f} s", flush=True)

    fewer = replace(roles, pool=roles.pool[: WARMUP_POOL[options.device.type]])
    section = Section("training fidelity", conditions(options, roles))
    section.conditions["pool_of_warmup_options"] = len(fewer.pool)
    theta_old = build_model(options.real_model, options.device, torch.float32)
    round_to_bf16(theta_old)
    theta_bar = copy.deepcopy(theta_old)
    curvature = warm_up(options, theta_bar, roles)
    entries = score(theta_bar, fewer).entries
    said("warmup and mask")
    compare_curves(section, options, theta_old, roles, entries)
    said("loss curves")
    print(
        "\n".join(section.lines()), flush=True
    )  # show results so far, in case the rest takes too long
    compare_warmups(section, options, theta_old, fewer, curvature, said)
    return section


def plan(options: Options, roles: Roles, lr: float, clip: float, seed: int = 0) -> TrainingPlan:
    return TrainingPlan(
        lr=lr,
        epochs=1,
        batch_size=2 if options.quick else BATCH_SIZE[options.device.type],
        warmup_ratio=0.03,
        max_grad_norm=clip,
        micro_batch_size=None,
        batch_tokens=options.batch_tokens,
        seed=seed,
        pad_id=roles.settings.pad_id,
        padding_side="right",
    )


def losses_of(
    model: PreTrainedModel, rows: list[Example], optimizer: SparseAdamW, steps: TrainingPlan
) -> np.ndarray:
    """Train the model in place; returns the loss of every step."""
    curve: list[float] = []

    def log(**values: Any) -> None:
        if "loss" in values:
            curve.append(float(values["loss"]))

    train(model, rows, optimizer, steps, Reporter(lambda _: None), "training", log)
    return np.array(curve)


# --- curves of restricted fine-tuning ------------------------------------------------------------


def compare_curves(
    section: Section,
    options: Options,
    theta_old: PreTrainedModel,
    roles: Roles,
    entries: dict[str, Tensor],
) -> None:
    """Compare every dtype and moment type with fp32 and fp32 moments."""
    rows = roles.pool
    steps = plan(options, roles, LR["fine-tuning"], clip=1.0)
    most = (3 if options.quick else STEPS[options.device.type]) * steps.batch_size
    curves: dict[str, np.ndarray] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for moments in MOMENTS:
            model = copy_as(theta_old, dtype)
            with SparseAdamW(
                text_parameters(model), entries, lr=steps.lr, moments=moments, free_gradients=True
            ) as optimizer:
                curves[f"{name}, {moments} moments"] = losses_of(
                    model, rows[:most], optimizer, steps
                )
    reference = curves["fp32, float32 moments"]
    for name, curve in curves.items():
        apart = np.abs(curve - reference)
        section.rows[f"loss curve, {name}"] = {
            "figures": {
                "steps": len(curve),
                "first loss": float(curve[0]),
                "last loss": float(curve[-1]),
                "first difference": float(apart[0]),
                "mean difference": float(apart.mean()),
                "largest difference": float(apart.max()),
            },
            "losses": curve.tolist(),
        }


# --- options of the warmup -----------------------------------------------------------------------


def warm_up(
    options: Options,
    model: PreTrainedModel,
    roles: Roles,
    moments: Moments = "float32",
    candidates_only: bool = False,
    seed: int = 0,
) -> ParamVector:
    """Warm up the model in place, as the warmup stage does; returns ĉ."""
    candidates = find_candidates(model, "block_linear")
    indices = dict.fromkeys(candidates) if candidates_only else None
    steps = plan(options, roles, LR["warmup"], clip=0.0, seed=seed)
    with SparseAdamW(
        text_parameters(model), indices, lr=steps.lr, moments=moments, free_gradients=True
    ) as optimizer:
        losses_of(model, roles.warm, optimizer, steps)
        return adam_rms(optimizer, candidates).held()


def compare_warmups(
    section: Section,
    options: Options,
    theta_old: PreTrainedModel,
    roles: Roles,
    reference: ParamVector,
    said: Callable[[str], None],
) -> None:
    """Compare ĉ and the resulting scores of each option with the default."""
    ways: dict[str, dict[str, Any]] = {
        "default": {},
        "bfloat16 moments": {"moments": "bfloat16"},
        "int8 moments": {"moments": "int8"},
        "candidates only": {"candidates_only": True},
        "candidates only, int8 moments": {"moments": "int8", "candidates_only": True},
        "default, rows in another order": {"seed": 1},
    }
    default = None
    for name, way in ways.items():
        student = copy.deepcopy(theta_old)
        curvature = warm_up(options, student, roles, **way)
        scores = score(student, roles, theta_old, preconditioner=curvature)
        default = default or scores
        figures = {**_curvature_figures(curvature, reference), **agreement(scores, default)}
        section.rows[f"warmup, {name}"] = {"figures": figures}
        said(f"warmup, {name}")
        print("   " + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)


def _curvature_figures(curvature: ParamVector, reference: ParamVector) -> dict[str, float]:
    """‖ĉ − ĉ₀‖ / ‖ĉ₀‖ and the correlation of the two."""
    ones = reference.combine(torch.ones_like)
    vectors = {"c": curvature, "r": reference, "d": curvature.plus(reference, -1.0), "1": ones}
    pairs = [("d", "d"), ("r", "r"), ("c", "c"), ("c", "r"), ("c", "1"), ("r", "1")]
    products = Products(vectors, pairs)
    count = reference.num_entries
    means = {key: products.dot(key, "1") / count for key in ("c", "r")}
    spread = {key: products.dot(key, key) / count - means[key] ** 2 for key in ("c", "r")}
    shared = products.dot("c", "r") / count - means["c"] * means["r"]
    return {
        "relative error of ĉ": products.norm("d") / products.norm("r"),
        "correlation of ĉ": shared / (spread["c"] * spread["r"]) ** 0.5,
    }
