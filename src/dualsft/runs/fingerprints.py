"""The inputs of each stage's fingerprint: settings, and hashes of files outside the run folder.

The fingerprint of a stage (`runs/pipeline.py`) combines these with the fingerprints of the stages
it reads. A changed value re-runs exactly the stages that list it here. Settings that do not affect
results (storage locations, number of processes) are not listed.
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
    """Config values by full key; `section.*` selects the whole section."""
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
    del chosen["data.padding_side"]  # affects batches, not the split
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
    """Replace the path of the template file by a hash of its content."""
    if ctx.config.data.template_file is not None:
        chosen["data.template_file"] = sha256_file(Path(ctx.config.data.template_file).expanduser())


def _compute(ctx: RunContext) -> Settings:
    """Settings that affect the numerics of every pass through the model."""
    dtype = str(ctx.dtype).removeprefix("torch.")
    chosen = pick(ctx, "model.attention", "model.deterministic", "data.padding_side")
    return {"dtype": dtype, "device": ctx.device.type, "batch_tokens": ctx.batch_tokens} | chosen


def _training(ctx: RunContext) -> Settings:
    """Tokens per training pass if not the default; dropout is drawn per pass."""
    usual = TRAINING_BATCH_TOKENS[ctx.device.type]
    return {} if ctx.training_tokens == usual else {"training tokens": ctx.training_tokens}


def _precision(ctx: RunContext) -> Settings:
    """Which walks use fp32 weights; relevant only for half-precision models."""
    return pick(ctx, "score.precision") if ctx.dtype in HALF_DTYPES else {}


def warmup_settings(ctx: RunContext) -> Settings:
    chosen = pick(
        ctx, "warmup.*", "finetune.warmup_ratio", "finetune.micro_batch_size", "score.candidates"
    )
    del chosen["warmup.offload"]  # location of the optimizer state: no effect on results
    chosen["warmup.lr"] = ctx.config.warmup.lr or ctx.config.finetune.lr
    chosen["warmup.batch_size"] = ctx.config.warmup.batch_size or ctx.config.finetune.batch_size
    return chosen | _compute(ctx) | _training(ctx) | _weights(ctx)


def _weights(ctx: RunContext) -> Settings:
    """Hashes of θ_old's weights and config."""
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
    """Settings of a pool pass that also computes the per-example product, if only G is needed.

    Its result contains G, so a finished stage with these settings can be reused.
    """
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
    """The selection settings that affect its examples (`runs/stages/reuse.py`)."""
    own = _own_passes(ctx, [ctx.methods.entries["data"]])
    return pick(ctx, "select.data_budget") | ctx.methods.settings("data") | own


def _own_passes(ctx: RunContext, entries: Iterable[Entry]) -> Settings:
    """Settings of methods that run the model themselves.

    DualSFT's own methods read the scores instead, a stage whose fingerprint covers these settings.
    """
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
    """Budget settings of an adapter, which is created by the fine-tuning stage."""
    adapter = ctx.methods.load("params").adapter
    keys = ("select.param_budget", "method.denominator", "score.candidates")
    return pick(ctx, *keys) | ctx.methods.settings("params") if adapter else {}


def finetune_settings(ctx: RunContext) -> Settings:
    chosen = pick(ctx, "finetune.*", "seed")
    del chosen["finetune.checkpointing"]  # affects memory only
    chosen["learning rate"] = finetune.learning_rate(ctx)
    chosen |= (
        _weights(ctx) | _compute(ctx) | _training(ctx)
    )  # with all/all no earlier stage hashes the weights
    chosen |= {} if ctx.methods.entries["params"].uses_budget else _adapter_budget(ctx)
    return chosen | ctx.methods.settings("weights") | ctx.methods.settings("after")
