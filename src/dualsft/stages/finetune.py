"""Restricted fine-tuning: Algorithm 1 line 12, θ* ← MaskedFT(θ_old, D_sel, m_θ).

Restarts from θ_old. DualSFT trains the selected entries on D_sel; DualSFT-Param the selected
entries on all of D_train (pool and warm); DualSFT-Data every parameter on D_sel (and then there
is no delta: everything moved). Gradients, moments and decay exist only at the selected entries;
all others keep their bits. Reads 1_split and 5_selection; writes delta.safetensors, model/ (the
merged Hugging Face folder) and summary.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dualsft.context import RunContext
from dualsft.data import Example
from dualsft.delta import take_delta
from dualsft.model import save_model, text_parameters
from dualsft.optim import SparseAdamW
from dualsft.pretrained import weights_hash
from dualsft.rundir import sha256_file
from dualsft.stages.chosen import read_mask
from dualsft.training import FEW_STEPS, TrainingPlan, train


def run(ctx: RunContext, part: Path) -> dict[str, Any]:
    """Fine-tune from θ_old and write the delta and the merged model into `part`."""
    selection = ctx.folder("selection")
    final = selection / json.loads((selection / "summary.json").read_text())["final"]
    variant = ctx.config.select.variant
    indices = None if variant == "data" else read_mask(final)
    examples = training_examples(ctx, final)
    model = ctx.theta_old()
    plan = finetune_plan(ctx)
    num_steps = plan.num_steps(len(examples))
    if num_steps < FEW_STEPS:
        ctx.reporter.warn(
            f"fine-tuning has only {num_steps} steps over {len(examples):,} examples and will "
            "change little (lower finetune.batch_size, raise finetune.epochs "
            "or select.data_budget)"
        )
    with SparseAdamW(
        text_parameters(model),
        indices,
        lr=plan.lr,
        weight_decay=ctx.config.finetune.weight_decay,
        moments=ctx.config.finetune.moments,
        seed=ctx.config.seed,
    ) as optimizer:
        trained = optimizer.num_selected
        train(
            model, examples, optimizer, plan, ctx.reporter, "fine-tuning", _logger(ctx), ctx.pieces
        )
    if indices is not None:
        origin = (Path(ctx.config.model.path).name, weights_hash(ctx.model_folder))
        take_delta(model, indices, *origin).save(part / "delta.safetensors")
    save_model(model, ctx.tokenizer, ctx.model_folder, part / "model")
    summary = {
        "variant": variant,
        "selection": final.name if final != selection else ".",
        "steps": num_steps,
        "examples": len(examples),
        "trained_entries": trained,
        "base_hash": weights_hash(ctx.model_folder),
        "weights": {p.name: sha256_file(p) for p in sorted((part / "model").glob("*.safetensors"))},
    }
    (part / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return {"steps": num_steps, "examples": len(examples), "trained_entries": trained}


def training_examples(ctx: RunContext, final: Path) -> list[Example]:
    """D_sel, or all of D_train for DualSFT-Param."""
    roles = ctx.roles()
    if ctx.config.select.variant == "param":
        return sorted(roles["pool"] + roles["warm"], key=lambda e: e.index)
    wanted = set(json.loads((final / "ids.json").read_text()))
    return [e for e in roles["pool"] if e.id in wanted]


def finetune_plan(ctx: RunContext) -> TrainingPlan:
    config = ctx.config
    return TrainingPlan(
        lr=config.finetune.lr,
        epochs=config.finetune.epochs,
        batch_size=config.finetune.batch_size,
        warmup_ratio=config.finetune.warmup_ratio,
        max_grad_norm=config.finetune.max_grad_norm,
        micro_batch_size=config.finetune.micro_batch_size,
        batch_tokens=ctx.training_tokens,
        seed=config.seed,
        pad_id=ctx.pad_id,
        padding_side=config.data.padding_side,
        checkpointing=config.finetune.checkpointing,
    )


def _logger(ctx: RunContext) -> Any:
    return lambda **values: ctx.rundir.log_metrics("finetune", **values)
