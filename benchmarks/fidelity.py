"""Accuracy of the fast paths: scores in bf16 and fp32 against fp64.

Algorithm 1 lines 1 to 9, on a trained model (default SmolLM2-135M) and real rows. A warmup in fp32
gives θ̄, which is rounded to bf16 so that every dtype starts from the same weights and only the
arithmetic differs. The walks over validation rows, anchors and pool at θ̄ run in each dtype, with
λ = 0 (only v_new) and with CWSD at the relative λ. The example scores (Spearman), the top 10 % of
examples and the top 5 % of entries (Jaccard) are compared with those of fp64.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from benchmarks.agreement import DATA_BUDGET, LAM, PARAM_BUDGET, Scores, agreement, score
from benchmarks.measuring import Section
from benchmarks.options import Options
from benchmarks.roles import Roles, conditions, read_roles, round_to_bf16
from benchmarks.training_fidelity import warm_up
from benchmarks.workload import SHAPES, build_model, copy_as

GOALS = {"Spearman of examples": 0.999, "Jaccard of examples": 0.98, "Jaccard of entries": 0.98}


def run(options: Options) -> Section:
    """Compare the walks in each dtype; logs each one when it finishes."""
    roles = read_roles(options)
    start = time.perf_counter()

    def said(what: str) -> None:
        print(f"  {what}: {time.perf_counter() - start:.0f} s", flush=True)

    theta_old = build_model(options.real_model, options.device, torch.float32)
    round_to_bf16(theta_old)
    theta_bar = copy.deepcopy(theta_old)
    warm_up(options, theta_bar, roles)
    round_to_bf16(theta_bar)
    said("warmup")
    budgets = {
        "data_budget": DATA_BUDGET,
        "param_budget": PARAM_BUDGET,
        "lambda": f"{LAM}, relative",
    }
    section = Section("fidelity", conditions(options, roles) | budgets)
    trained = options.real_model not in SHAPES
    compare_arithmetic(section, theta_old, theta_bar, roles, said, trained)
    return section


def compare_arithmetic(
    section: Section,
    theta_old: PreTrainedModel,
    theta_bar: PreTrainedModel,
    roles: Roles,
    said: Callable[[str], None],
    trained: bool,
) -> None:
    """Compare bf16 and fp32 with fp64, from the same weights."""
    made: dict[tuple[str, str], Scores] = {}
    for name, dtype in (
        ("fp64", torch.float64),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
    ):
        student = copy_as(theta_bar, dtype)
        teacher = copy_as(theta_old, dtype)
        made[name, "v_new"] = score(student, roles)
        said(f"scores in {name}")
        made[name, "v_new and CWSD"] = score(student, roles, teacher)
        said(f"scores in {name}, CWSD")
        if name == "bf16":
            made["bf16 throughout", "v_new"] = score(student, roles, precision="half")
            said("scores in bf16 throughout")
    for (name, what), scores in made.items():
        if name == "fp64":
            continue
        figures = agreement(scores, made["fp64", what])
        section.rows[f"scores in {name} / fp64, {what}"] = {"figures": figures}
        if name == "bf16" and trained:
            for key, limit in GOALS.items():
                section.goal(f"bf16, {what}, {key}", figures[key], limit, at_least=True)
