"""How exact the fast paths are: scores in bf16 and fp32 against fp64, and what training options do.

Algorithm 1 lines 1 to 9 and 12, on a trained model (SmolLM2-135M unless told otherwise) and real
rows. First a warmup in fp32 gives θ̄, rounded to bf16, so that every dtype starts from the same
weights: what differs is the arithmetic. At θ̄ the walks over validation rows, anchors and pool are
made in each dtype, with λ = 0 (v_new alone) and with CWSD at the relative λ, and the example scores
(Spearman), the 10 % of examples and the 5 % of entries (Jaccard) are compared with fp64's.
`training_fidelity.py` adds the loss curves of restricted fine-tuning and the options of the warmup.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import training_fidelity as training
from benchmarks.agreement import DATA_BUDGET, LAM, PARAM_BUDGET, Roles, Scores, agreement, score
from benchmarks.measuring import Section
from benchmarks.options import Options
from benchmarks.workload import SHAPES, build_model, copy_as, make_pool
from dualsft.config_fields import DataConfig
from dualsft.corpus import builtin_file, builtin_names
from dualsft.data import read_rows, tokenize
from dualsft.model import load_tokenizer, read_model_config
from dualsft.passes import PassSettings
from dualsft.pretrained import cache_root, resolve_model

ROWS = {"cpu": 40, "cuda": 4000}
WARMUP_POOL = {"cpu": 40, "cuda": 800}  # examples scored for each option of the warmup
SHARES = {"val": 0.1, "anchor": 0.1, "warm": 0.2}  # the rest is the pool
GOALS = {"Spearman of examples": 0.999, "Jaccard of examples": 0.98, "Jaccard of entries": 0.98}


def run(options: Options) -> Section:
    """Arithmetic, fine-tuning curves and warmup options, in that order; each said when it ends."""
    roles = read_roles(options)
    start = time.perf_counter()

    def said(what: str) -> None:
        print(f"  {what}: {time.perf_counter() - start:.0f} s", flush=True)

    theta_old = build_model(options.real_model, options.device, torch.float32)
    round_to_bf16(theta_old)
    theta_bar = copy.deepcopy(theta_old)
    curvature = training.warm_up(options, theta_bar, roles)
    round_to_bf16(theta_bar)
    said("warmup")
    section = Section("fidelity", _conditions(options, roles))
    entries = compare_arithmetic(
        section, theta_old, theta_bar, roles, said, trained=options.real_model not in SHAPES
    )
    print("\n".join(section.lines()), flush=True)
    training.compare_curves(section, options, theta_old, roles, entries)
    said("loss curves")
    fewer = replace(roles, pool=roles.pool[: WARMUP_POOL[options.device.type]])
    training.compare_warmups(section, options, theta_old, fewer, curvature, said)
    return section


def _conditions(options: Options, roles: Roles) -> dict[str, Any]:
    return {
        "model": Path(options.real_model).name,
        "data": _data_name(options),
        "rows": {role: len(getattr(roles, role)) for role in ("val", "anchor", "warm", "pool")},
        "pool_of_warmup_options": min(len(roles.pool), WARMUP_POOL[options.device.type]),
        "pool_tokens": sum(e.num_tokens for e in roles.pool),
        "data_budget": DATA_BUDGET,
        "param_budget": PARAM_BUDGET,
        "lambda": f"{LAM}, relative",
        "batch_tokens": options.batch_tokens,
    }


def _data_name(options: Options) -> str:
    if options.real_model in SHAPES:
        return "random tokens"
    return options.data.name if options.data else "built-in corpus"


def read_roles(options: Options) -> Roles:
    """Rows in their order, dealt out to the roles; random tokens for a shape."""
    if options.real_model in SHAPES:
        vocabulary, pad_id = SHAPES[options.real_model].vocabulary, 0
        examples = make_pool(40, vocabulary, 120)
    else:
        folder = resolve_model(options.real_model)
        tokenizer = load_tokenizer(folder)
        pad_id = tokenizer.pad_token_id or tokenizer.eos_token_id
        path = options.data or builtin_file(_builtin_corpus(), cache_root())
        template = "chat" if tokenizer.chat_template else "plain"
        config = DataConfig(
            path=str(path),
            template=template,
            prompt_field=options.fields[0] if options.fields else None,
            response_field=options.fields[1] if options.fields else None,
            max_length=1024,
            bad_rows="skip",
        )
        rows, report = read_rows(Path(path), config)
        limit = 40 if options.quick else ROWS[options.device.type]
        positions = read_model_config(folder).max_position_embeddings
        examples, _ = tokenize(rows[:limit], tokenizer, config, report, max_positions=positions)
    roles, start = {}, 0
    for role, share in SHARES.items():
        count = max(2, int(share * len(examples)))
        roles[role] = examples[start : start + count]
        start += count
    settings = PassSettings(batch_tokens=options.batch_tokens, pad_id=pad_id, padding_side="right")
    return Roles(**roles, pool=examples[start:], settings=settings)


def _builtin_corpus() -> str:
    return next(name for name in builtin_names() if "corpus" in name)


@torch.no_grad()
def round_to_bf16(model: PreTrainedModel) -> None:
    """Weights that every dtype from bf16 on holds exactly."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def compare_arithmetic(
    section: Section,
    theta_old: PreTrainedModel,
    theta_bar: PreTrainedModel,
    roles: Roles,
    said: Callable[[str], None],
    trained: bool,
) -> dict[str, Tensor]:
    """bf16 and fp32 against fp64 from the same weights; returns the fp64 mask of v_new alone."""
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
    return made["fp64", "v_new"].entries
