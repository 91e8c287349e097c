"""Fine-tuning: Algorithm 1 line 12, θ* ← MaskedFT(θ_old, D_sel, m_θ), for all methods.

Starts from θ_old, or from the weights that the parameter method wrote to `start`. Trains the mask
or every parameter, on D_sel or all of D_train. The run's methods may move the mask, add an
adapter, weight tokens, or edit the result (`runs/method.py`). Gradients, moments and weight decay
exist only at the selected entries; all other entries stay bit-identical. Reads 1_split and
5_selection; writes delta.safetensors (if the change is sparse), model/ (the merged Hugging Face
folder) and summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Example
from dualsft.errors import ConfigError
from dualsft.model.delta import Delta, extract_delta, save_model, survival, take_delta
from dualsft.model.load import text_parameters
from dualsft.model.resolve import weights_hash
from dualsft.runs.context import RunContext, Settings
from dualsft.runs.method import AfterMethod, Job, ParamMethod, WeightMethod
from dualsft.runs.preflight import reading
from dualsft.runs.stages.selection import final_folder, num_trained, read_mask
from dualsft.storage.manifest import sha256_file
from dualsft.system.paths import RunPath
from dualsft.train.loop import FEW_STEPS, Hooks, Retention, TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW, make_optimizer

LITTLE = 5e-4  # warn if lr × steps is below it: no weight can move further than that
DENSE = 0.2  # share of all parameters; with more changed entries only the model is saved


def settings(ctx: RunContext) -> Settings:
    chosen = ctx.pick("finetune.*", "seed")
    del chosen["finetune.checkpointing"]  # affects memory only
    chosen |= resolved(ctx, num_trained(ctx)) if is_auto(ctx) else {}
    weight, _ = chosen.pop("finetune.retention"), chosen.pop("finetune.retention_batch")
    if weight > 0:  # the anchors are those of the split, which this stage reads
        chosen |= {"finetune.retention": weight, "anchors per step": retention_batch(ctx)}
        chosen |= ctx.pick("score.tau")
    chosen["learning rate"] = learning_rate(ctx)
    # with all/all no earlier stage hashes the weights
    chosen |= ctx.weight_hashes() | ctx.training_settings()
    if not ctx.methods.entries["params"].uses_budget and ctx.methods.load("params").adapter:
        # an adapter is created here, so its budget is a setting of this stage
        chosen |= ctx.pick("select.param_budget", "method.denominator", "score.candidates")
        chosen |= ctx.methods.settings("params")
    return chosen | ctx.methods.settings("weights") | ctx.methods.settings("after")


def together(ctx: RunContext) -> bool:
    """Whether all processes train; requires a static mask and the plain mean loss."""
    params: ParamMethod = ctx.methods.load("params")
    job = Job(ctx, "params", ctx.folder("selection"))
    still = not params.adapter and params.refresh_every(job) is None
    return still and ctx.methods["weights"] is None and ctx.methods["after"] is None


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Fine-tune; write the delta and the merged model to `part`."""
    selection = ctx.folder("selection")
    final = final_folder(selection)
    masked = (final / "mask.safetensors").is_file()
    indices = read_mask(final, ctx.parameter_shapes) if masked else None
    examples = training_examples(ctx, final)
    start = selection / "start"
    model = ctx.load(start) if start.is_dir() else ctx.theta_old()
    before = take_delta(model, indices or {}).values
    params: ParamMethod = ctx.methods.load("params")
    job = Job(ctx, "params", part, examples)
    plan = finetune_plan(ctx, len(examples))
    num_steps = max(1, plan.num_steps(len(examples)) - params.steps_taken(job))
    plan = replace(plan, max_steps=num_steps)
    ctx.reporter.say(describe_plan(ctx, plan, len(examples)))
    warn_of_little(ctx, plan, len(examples))
    hooks, facts, accounts = Hooks(), dict[str, Any](), dict[str, Any]()
    weights: WeightMethod | None = ctx.methods.load("weights")
    weighing = Job(ctx, "weights", part, examples)
    if weights is not None:
        with weighing.measured():
            hooks = weights.hooks(weighing, model)
    named = [*params.attach(job, model).items()] if params.adapter else text_parameters(model)
    with make_optimizer(
        model,
        named,
        indices,
        lr=plan.lr,
        weight_decay=ctx.config.finetune.weight_decay,
        moments=ctx.config.finetune.moments,
        seed=ctx.config.seed,
    ) as optimizer:
        trained = optimizer.num_selected
        every = params.refresh_every(job)
        if every is not None and indices is not None:
            if every >= num_steps:
                ctx.reporter.warn(
                    f"the mask of {params.entry.name} never moves: its interval is {every:,} "
                    f"steps, but training has {num_steps:,} (lower the interval, or train longer)",
                    code="static_mask",
                )
            hooks = _moving(params, job, model, optimizer, indices, every, hooks, num_steps)
        if ctx.config.finetune.retention > 0:
            hooks = replace(hooks, retention=retention_term(ctx))
        log = partial(ctx.rundir.log_metrics, "finetune")
        train(model, examples, optimizer, plan, ctx.reporter, "fine-tuning", log, ctx.pieces, hooks)
    if hooks.retention is not None:
        facts["retention"] = hooks.retention.facts()
        hooks = Hooks()  # frees the teacher
    if params.adapter:
        model = params.detach(job, model)
    if weights is not None:
        accounts["weights"] = weighing.accounts.as_dict()
        if weights.facts:
            facts[weights.entry.name] = {**weights.facts}
    after: AfterMethod | None = ctx.methods.load("after")
    if after is not None:
        editing = Job(ctx, "after", part, examples)
        facts |= after.apply(editing, ctx.theta_old(), model)
        accounts["after"] = editing.accounts.as_dict()
    still = every is None and after is None and not start.is_dir()
    delta, changed, left = _delta(ctx, model, indices if still else None, before)
    if every is not None and changed is not None:
        ctx.reporter.say(
            f"moving mask: {trained:,} entries at a time; {changed:,} in total differ from θ_old"
        )
    if delta is not None:
        delta.save(part / "delta.safetensors")
    save_tuned(ctx, model, part / "model")
    counts = {"steps": num_steps, "examples": len(examples), "trained_entries": trained}
    summary = {
        "variant": ctx.config.select.variant,
        "methods": {axis: entry.name for axis, entry in ctx.methods.entries.items()},
        "selection": final.name if final != selection else ".",
        **counts,
        "num_parameters": ctx.num_parameters,
        "changed_entries": changed,
        **({"survival": left} if left else {}),
        "lr": plan.lr,
        **({"auto": resolved(ctx, len(examples))} if is_auto(ctx) else {}),
        "base_hash": weights_hash(ctx.model_folder),
        "weights": {p.name: sha256_file(p) for p in sorted((part / "model").glob("*.safetensors"))},
        **facts,
    }
    (part / "summary.json").write_json(summary)
    return counts | ({"accounts": accounts} if accounts else {})


def retention_batch(ctx: RunContext) -> int:
    """Anchors per step: finetune.retention_batch, or a quarter of finetune.batch_size."""
    batch_size = ctx.sizes(num_trained(ctx)).batch_size
    return ctx.config.finetune.retention_batch or max(1, batch_size // 4)


def retention_term(ctx: RunContext) -> Retention:
    """The term of `finetune.retention`, with a second copy of θ_old as the teacher."""
    weight, anchors = ctx.config.finetune.retention, ctx.roles()["anchor"]
    if not anchors:
        raise ConfigError(
            f"finetune.retention: {weight:g} needs anchors, and the split has none; give "
            "data.anchor_path or split.anchor, or finetune.retention=0"
        )
    count = min(retention_batch(ctx), len(anchors))
    ctx.reporter.say(
        f"retention: {weight:g} × CWSD on {count:,} of {len(anchors):,} anchors per step; the "
        f"teacher θ_old takes {ctx.model_bytes / 2**30:.2g} GiB more, and each step one pass "
        "of both models over these anchors"
    )
    return Retention(
        weight=weight,
        teacher=ctx.theta_old(),
        tau=ctx.config.score.tau,
        anchors=anchors,
        batch_size=count,
        seed=ctx.config.seed,
    )


def _moving(
    params: ParamMethod,
    job: Job,
    model: PreTrainedModel,
    optimizer: SparseAdamW,
    indices: Mapping[str, Tensor],
    every: int,
    hooks: Hooks,
    num_steps: int,
) -> Hooks:
    """`hooks` plus a new mask every `every` steps, except after the last step."""
    k = sum(index.numel() for index in indices.values())

    def after_step(done: int) -> None:
        if hooks.after_step is not None:
            hooks.after_step(done)
        if done % every == 0 and done < num_steps:
            optimizer.set_indices(params.refresh(job, model, k, done), params.carry)

    return replace(hooks, after_step=after_step, moving=tuple(params.eligible(job)))


def _delta(
    ctx: RunContext,
    model: PreTrainedModel,
    indices: Mapping[str, Tensor] | None,
    before: Mapping[str, Tensor],
) -> tuple[Delta | None, int | None, dict[str, int]]:
    """(delta, number of its entries, how many differ from θ_old by dtype).

    The delta holds the mask's entries, or all entries that differ from θ_old (for a moving mask,
    the union of its masks). It is None if the change is not sparse, because a delta takes up to
    five times the bytes of an entry. `before` holds the values of θ_old at `indices`.
    """
    origin = (Path(ctx.config.model.path).name, weights_hash(ctx.model_folder))
    if indices is not None:
        delta = take_delta(model, indices, *origin)
        return delta, delta.num_entries, survival(before, delta.values)
    dense = ctx.methods.name("params") in ("all", None) or ctx.methods.load("params").adapter
    if dense and ctx.methods["after"] is None:
        return None, None, {}
    base = ctx.theta_old()
    delta = extract_delta(base, model, base_model=origin[0], base_hash=origin[1])
    left = survival(take_delta(base, delta.indices).values, delta.values)
    dense = delta.num_entries > DENSE * ctx.num_parameters
    return None if dense else delta, delta.num_entries, left


def save_tuned(ctx: RunContext, model: PreTrainedModel, folder: RunPath) -> None:
    """Write a model with the tokenizer to a new folder of the run."""
    with folder.made() as path:
        save_model(model, ctx.tokenizer, ctx.model_folder, path)


def training_examples(ctx: RunContext, final: RunPath) -> list[Example]:
    """D_sel, or all of D_train if the data method chose everything."""
    roles = ctx.roles()
    everything = sorted(roles["pool"] + roles["warm"], key=lambda e: e.index)
    if not (final / "ids.json").is_file():
        return everything
    with reading(final / "ids.json"):
        wanted = set((final / "ids.json").read_json())
        chosen = [e for e in everything if e.id in wanted]
        if not wanted or len(chosen) != len(wanted):
            raise ValueError(f"{len(wanted)} ids, of which the split has {len(chosen)}")
        return chosen


def learning_rate(ctx: RunContext) -> float:
    """finetune.lr times `method.lr_ratio`, by default the ratio of the parameter method.

    auto is larger for a mask (`auto_ratio`), unless the ratio is given.
    """
    given, params = ctx.config.method.lr_ratio, ctx.methods.entries["params"]
    if given is not None:
        return ctx.base_lr() * given
    return ctx.base_lr() * params.relative_lr(ctx.config.finetune.lr == "auto")


def is_auto(ctx: RunContext) -> bool:
    """Whether some of finetune.lr, epochs and batch_size follow the size."""
    finetune = ctx.config.finetune
    return "auto" in (finetune.lr, finetune.epochs, finetune.batch_size)


def resolved(ctx: RunContext, num_rows: int) -> dict[str, float | int]:
    """finetune.lr, epochs and batch_size as numbers, for this many training rows."""
    sizes, key = ctx.sizes(num_rows), "finetune."
    values = {"lr": ctx.base_lr(), "epochs": sizes.epochs, "batch_size": sizes.batch_size}
    return {key + name: value for name, value in values.items()}


def describe_plan(ctx: RunContext, plan: TrainingPlan, num_rows: int) -> str:
    """One line with the numbers of the fine-tuning; says which follow the size."""
    finetune = ctx.config.finetune
    numbers = {
        "batch_size": f"batch {plan.batch_size:,}",
        "epochs": f"{plan.epochs:,} epochs",
        "": f"{plan.num_steps(num_rows):,} steps",
        "lr": f"lr {plan.lr:.3g}",
    }
    auto = [name for name in numbers if name and getattr(finetune, name) == "auto"]
    which = f" (auto: {', '.join(auto)})" if auto else ""
    return f"fine-tuning: {num_rows:,} rows, {', '.join(numbers.values())}{which}"


def warn_of_little(ctx: RunContext, plan: TrainingPlan, num_rows: int) -> None:
    """Warn if the fine-tuning will hardly change the model."""
    num_steps = plan.num_steps(num_rows)
    if num_steps < FEW_STEPS:
        ctx.reporter.warn(
            f"fine-tuning has only {num_steps} steps over {num_rows:,} examples and will "
            "change little (lower finetune.batch_size, raise finetune.epochs "
            "or select.data_budget)",
            code="few_steps",
        )
    if plan.lr * num_steps < LITTLE:
        ctx.reporter.warn(
            f"fine-tuning moves a weight by at most about lr x steps = {plan.lr * num_steps:.1g}: "
            "the model will hardly change (set finetune.lr, finetune.epochs and "
            "finetune.batch_size to auto, or raise finetune.lr)",
            code="small_change",
        )


def finetune_plan(ctx: RunContext, num_rows: int) -> TrainingPlan:
    """The training plan for this many rows."""
    finetune, sizes = ctx.config.finetune, ctx.sizes(num_rows)
    return TrainingPlan(
        lr=learning_rate(ctx),
        epochs=sizes.epochs,
        batch_size=sizes.batch_size,
        warmup_ratio=finetune.warmup_ratio,
        max_grad_norm=finetune.max_grad_norm,
        micro_batch_size=finetune.micro_batch_size,
        batch_tokens=ctx.training_tokens,
        seed=ctx.config.seed,
        pad_id=ctx.pad_id,
        padding_side=ctx.config.data.padding_side,
        checkpointing=finetune.checkpointing,
    )
