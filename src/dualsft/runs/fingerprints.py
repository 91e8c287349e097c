"""What each stage's result depends on: the settings, and the hashes of what it reads from outside.

The fingerprint of a stage (`runs/pipeline.py`) is made of these and of the stages before it: a
changed value re-runs exactly the stages that name it here, and a setting that changes no result
(where things are kept, how many processes there are) is named by none. Every line of Algorithm 1
has its stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dualsft.config import settings
from dualsft.config.methods import Entry
from dualsft.data.sources import source_hash
from dualsft.engine.fused import HALF_DTYPES
from dualsft.memory.plans import TRAINING_BATCH_TOKENS
from dualsft.model.resolve import code_hash, tokenizer_hash, weights_hash
from dualsft.runs.context import RunContext
from dualsft.runs.folder import sha256_file
from dualsft.runs.stages import finetune, gradients

Settings = dict[str, Any]


def pick(ctx: RunContext, *keys: str) -> Settings:
    """Config values by full key; `section.*` takes the whole section."""
    flat = settings.to_flat(ctx.config)
    chosen: Settings = {}
    for key in keys:
        if key.endswith(".*"):
            chosen |= {name: v for name, v in flat.items() if name.startswith(key[:-1])}
        else:
            chosen[key] = flat[key]
    return chosen


def split_settings(ctx: RunContext) -> Settings:
    chosen = pick(ctx, "seed", "data.*", "split.*")
    del chosen["data.padding_side"]
    for key in ("data.path", "data.val_path"):
        name = chosen.pop(key)
        if name is None:
            continue
        chosen[f"rows of {key}"] = source_hash(ctx.data_path(name), ctx.config.data, key)
    hash_template(ctx, chosen)
    if ctx.config.model.trust_remote_code:
        chosen["code of model.path"] = code_hash(ctx.model_folder)
    return chosen | {
        "tokenizer": tokenizer_hash(ctx.model_folder),
        "model type": ctx.model_type,
        "positions of the model": ctx.max_positions,
    }


def hash_template(ctx: RunContext, chosen: Settings) -> None:
    """A template file counts by its content."""
    if ctx.config.data.template_file is not None:
        chosen["data.template_file"] = sha256_file(Path(ctx.config.data.template_file).expanduser())


def _compute(ctx: RunContext) -> Settings:
    """What decides the bits of any pass through the model."""
    dtype = str(ctx.dtype).removeprefix("torch.")
    chosen = pick(ctx, "model.attention", "model.deterministic", "data.padding_side")
    return {"dtype": dtype, "device": ctx.device.type, "batch_tokens": ctx.batch_tokens} | chosen


def _training(ctx: RunContext) -> Settings:
    """How rows are packed for training, where that is not as usual: dropout is drawn a pass."""
    usual = TRAINING_BATCH_TOKENS[ctx.device.type]
    return {} if ctx.training_tokens == usual else {"training tokens": ctx.training_tokens}


def _precision(ctx: RunContext) -> Settings:
    """Which walks have fp32 weights; without half precision all of them do."""
    return pick(ctx, "score.precision") if ctx.dtype in HALF_DTYPES else {}


def warmup_settings(ctx: RunContext) -> Settings:
    chosen = pick(
        ctx, "warmup.*", "finetune.warmup_ratio", "finetune.micro_batch_size", "score.candidates"
    )
    del chosen["warmup.offload"]  # where the optimizer's state is changes no result
    chosen["warmup.lr"] = ctx.config.warmup.lr or ctx.config.finetune.lr
    chosen["warmup.batch_size"] = ctx.config.warmup.batch_size or ctx.config.finetune.batch_size
    return chosen | _compute(ctx) | _training(ctx) | _weights(ctx)


def _weights(ctx: RunContext) -> Settings:
    """θ_old by its content."""
    return {
        "weights of model.path": weights_hash(ctx.model_folder),
        "config.json of model.path": sha256_file(ctx.model_folder / "config.json"),
    }


_DIRECTION = (
    "score.lam",
    "score.lam_relative",
    "score.curvature",
    "score.curvature_scale",
    "score.step",
    "finetune.lr",
)


def gradients_settings(ctx: RunContext, product: bool | None = None) -> Settings:
    chosen = pick(ctx, "score.preservation") | _compute(ctx) | _precision(ctx)
    if ctx.config.score.preservation == "cwsd":
        chosen |= pick(ctx, "score.tau")
    product = gradients.one_pass_wanted(ctx) if product is None else product
    chosen["per-example product in the pool pass"] = product
    return chosen | (pick(ctx, *_DIRECTION) if product else {})


def gradients_with_product(ctx: RunContext) -> Settings | None:
    """G alone is wanted, and a pool pass that also made the product has it too."""
    wanted = gradients.one_pass_wanted(ctx)
    return None if wanted else gradients_settings(ctx, product=True)


def scores_settings(ctx: RunContext) -> Settings:
    per_example = ctx.methods.scored("data")
    chosen = pick(ctx, *_DIRECTION, "score.mode", "score.keep")
    return chosen | {"per-example scores": per_example} | _precision(ctx)


def selection_settings(ctx: RunContext) -> Settings:
    chosen, methods = pick(ctx, "select.*"), ctx.methods
    if not methods.entries["data"].uses_budget:
        del chosen["select.data_budget"]
    if methods.entries["params"].uses_budget:
        chosen |= pick(ctx, "method.denominator")
    else:
        del chosen["select.param_budget"]
    if not ctx.config.select.rounds:
        del chosen["select.order"]
    chosen |= methods.settings("data") | methods.settings("params")
    return chosen | _own_passes(ctx, methods.entries.values())


def data_choice_settings(ctx: RunContext) -> Settings:
    """The part of the selection's that its examples depend on (`runs/stages/reuse.py`)."""
    own = _own_passes(ctx, [ctx.methods.entries["data"]])
    return pick(ctx, "select.data_budget") | ctx.methods.settings("data") | own


def _own_passes(ctx: RunContext, entries: Iterable[Entry]) -> Settings:
    """What methods depend on that look at the model themselves; DualSFT's own reads stages that
    depend on these."""
    others = [entry for entry in entries if "scores" not in entry.needs and entry.name != "all"]
    chosen: Settings = {}
    if others:
        chosen |= _weights(ctx) | _compute(ctx) | _training(ctx)
        chosen |= pick(ctx, "score.candidates", "seed")
    if any(entry.trains for entry in others):
        chosen |= pick(ctx, "finetune.*")
        del chosen["finetune.checkpointing"]
    return chosen


def _adapter_budget(ctx: RunContext) -> Settings:
    """The budget of an adapter, which the fine-tuning itself makes."""
    adapter = ctx.methods.load("params").adapter
    keys = ("select.param_budget", "method.denominator", "score.candidates")
    return pick(ctx, *keys) | ctx.methods.settings("params") if adapter else {}


def finetune_settings(ctx: RunContext) -> Settings:
    chosen = pick(ctx, "finetune.*", "seed")
    del chosen["finetune.checkpointing"]  # changes memory, no result
    chosen["learning rate"] = finetune.learning_rate(ctx)
    chosen |= (
        _weights(ctx) | _compute(ctx) | _training(ctx)
    )  # nothing else need name the model: all, all
    chosen |= {} if ctx.methods.entries["params"].uses_budget else _adapter_budget(ctx)
    return chosen | ctx.methods.settings("weights") | ctx.methods.settings("after")
