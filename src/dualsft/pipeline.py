"""The table of contents: Algorithm 1 as ordered stages over a run folder.

    split → warmup → gradients → scores → selection → finetune → evaluation → report

Each stage names the settings it depends on and the stages it reads. Its fingerprint is made of
both, so a finished stage is reused while nothing it depends on has changed, and a changed setting
re-runs exactly what depends on it, saying why. A stage is written whole or not at all
(`rundir.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualsft import config as settings
from dualsft.config import Config
from dualsft.context import FOLDERS, RunContext
from dualsft.corpus import BUILTIN
from dualsft.errors import ConfigError
from dualsft.pretrained import SHORT_NAMES, find_model, tokenizer_hash, weights_hash
from dualsft.progress import Reporter, clock
from dualsft.report import write_report
from dualsft.rundir import Fingerprint, RunDir, sha256_file
from dualsft.stages import evaluation, finetune, gradients, scores, selection, split, warmup

Settings = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One step of the flow: what it runs, what it depends on, what it reads."""

    name: str
    run: Callable[[RunContext, Path], dict[str, Any]]
    settings: Callable[[RunContext], Settings]
    reads: tuple[str, ...]
    richer: Callable[[RunContext], Settings | None] = lambda _: None
    """Settings of a finished stage that holds all this one would, and more."""


def _pick(ctx: RunContext, *keys: str) -> Settings:
    """Config values by full key; `section.*` takes the whole section."""
    flat = settings.to_flat(ctx.config)
    chosen: Settings = {}
    for key in keys:
        if key.endswith(".*"):
            chosen |= {name: v for name, v in flat.items() if name.startswith(key[:-1])}
        else:
            chosen[key] = flat[key]
    return chosen


def _split_settings(ctx: RunContext) -> Settings:
    chosen = _pick(ctx, "seed", "data.*", "split.*")
    del chosen["data.padding_side"]
    for key in ("data.path", "data.val_path"):
        name = chosen.pop(key)
        if name is None:
            continue
        chosen[f"rows of {key}"] = sha256_file(ctx.data_path(name))
    return chosen | {"tokenizer": tokenizer_hash(ctx.model_folder), "model type": ctx.model_type}


def _compute(ctx: RunContext) -> Settings:
    """What decides the bits of any pass through the model."""
    dtype = str(ctx.dtype).removeprefix("torch.")
    return {
        "dtype": dtype,
        "device": ctx.device.type,
        "batch_tokens": ctx.batch_tokens,
    } | _pick(ctx, "model.attention", "data.padding_side")


def _warmup_settings(ctx: RunContext) -> Settings:
    chosen = _pick(
        ctx, "warmup.*", "finetune.warmup_ratio", "finetune.micro_batch_size", "score.candidates"
    )
    chosen["warmup.lr"] = ctx.config.warmup.lr or ctx.config.finetune.lr
    chosen["warmup.batch_size"] = ctx.config.warmup.batch_size or ctx.config.finetune.batch_size
    return (
        chosen
        | _compute(ctx)
        | {
            "weights of model.path": weights_hash(ctx.model_folder),
            "config.json of model.path": sha256_file(ctx.model_folder / "config.json"),
        }
    )


_DIRECTION = (
    "score.lam",
    "score.lam_relative",
    "score.curvature",
    "score.curvature_scale",
    "score.step",
    "finetune.lr",
)


def _gradients_settings(ctx: RunContext, product: bool | None = None) -> Settings:
    chosen = _pick(ctx, "score.preservation") | _compute(ctx)
    if ctx.config.score.preservation == "cwsd":
        chosen |= _pick(ctx, "score.tau")
    product = gradients.one_pass_wanted(ctx) if product is None else product
    chosen["per-example product in the pool pass"] = product
    return chosen | (_pick(ctx, *_DIRECTION) if product else {})


def _gradients_with_product(ctx: RunContext) -> Settings | None:
    """G alone is wanted, and a pool pass that also made the product has it too."""
    wanted = gradients.one_pass_wanted(ctx)
    return None if wanted else _gradients_settings(ctx, product=True)


def _scores_settings(ctx: RunContext) -> Settings:
    per_example = ctx.config.select.variant != "param"
    chosen = _pick(ctx, *_DIRECTION, "score.mode", "score.keep")
    return chosen | {"per-example scores": per_example}


def _selection_settings(ctx: RunContext) -> Settings:
    chosen = _pick(ctx, "select.*")
    unused = {"data": "select.param_budget", "param": "select.data_budget"}
    chosen.pop(unused.get(ctx.config.select.variant, ""), None)
    if not ctx.config.select.rounds:
        del chosen["select.order"]
    return chosen


def _finetune_settings(ctx: RunContext) -> Settings:
    return _pick(ctx, "finetune.*", "seed")


def _evaluation_settings(ctx: RunContext) -> Settings:
    chosen = _pick(ctx, "evaluation.*", "data.*")
    del chosen["data.path"], chosen["data.val_path"]
    files = ctx.config.evaluation.files
    hashes = {name: sha256_file(ctx.data_path(path)) for name, path in files.items()}
    return chosen | {"evaluation.files": hashes}


STAGES: tuple[Stage, ...] = (
    Stage("split", split.run, _split_settings, ()),
    Stage("warmup", warmup.run, _warmup_settings, ("split",)),
    Stage(
        "gradients",
        gradients.run,
        _gradients_settings,
        ("split", "warmup"),
        _gradients_with_product,
    ),
    Stage("scores", scores.run, _scores_settings, ("split", "warmup", "gradients")),
    Stage("selection", selection.run, _selection_settings, ("split", "gradients", "scores")),
    Stage("finetune", finetune.run, _finetune_settings, ("split", "selection")),
    Stage("evaluation", evaluation.run, _evaluation_settings, ("split", "finetune")),
)
STAGE_NAMES: tuple[str, ...] = (*(stage.name for stage in STAGES), "report")


def run(
    config: Config,
    out: str | Path = "run",
    until: str | None = None,
    reporter: Reporter | None = None,
) -> Path:
    """Run Algorithm 1 into the folder `out`, up to and including the stage `until`.

    Finished stages whose settings have not changed are reused. Returns the run folder.
    """
    settings.validate(config)
    check_paths(config)
    last = until or "report"
    if last not in STAGE_NAMES:
        raise ConfigError(f"--until: {last!r} is not a stage; use one of {', '.join(STAGE_NAMES)}")
    rundir = RunDir(Path(out))
    rundir.create()
    ctx = RunContext(config, rundir, reporter or Reporter())
    for warning in settings.warnings(config):
        ctx.reporter.warn(warning)
    with rundir.lock():
        rundir.write_config(settings.to_yaml(config))
        hashes: dict[str, str] = {}
        for stage in STAGES:
            hashes[stage.name] = _ensure(ctx, stage, hashes)
            if stage.name == last:
                return rundir.path
        write_report(rundir.path)
    ctx.reporter.say(f"report: {rundir.path / 'report.md'}")
    return rundir.path


def check_paths(config: Config) -> None:
    """Everything the settings name must be there before any work begins; all misses at once."""
    problems: list[str] = []
    if config.model.path not in SHORT_NAMES:
        try:
            find_model(config.model.path)
        except ConfigError as problem:
            problems += problem.problems
    files = {"data.path": config.data.path, "data.val_path": config.data.val_path}
    files |= {f"evaluation.files: {name}": path for name, path in config.evaluation.files.items()}
    for key, path in files.items():
        if path is not None and not path.startswith(BUILTIN) and not Path(path).is_file():
            problems.append(f"{key}: {path!r} is not a file; give a .jsonl or .jsonl.gz file")
    if problems:
        raise ConfigError(problems)


def _ensure(ctx: RunContext, stage: Stage, hashes: dict[str, str]) -> str:
    """Reuse the finished stage or run it; returns its fingerprint's hash."""
    folder = FOLDERS[stage.name]
    reads = {name: hashes[name] for name in stage.reads}
    fingerprint = Fingerprint(stage.settings(ctx), reads)
    state = ctx.rundir.stage_state(folder, fingerprint)
    richer = stage.richer(ctx)
    if state.status == "stale" and richer is not None:
        other = Fingerprint(richer, reads)
        if ctx.rundir.stage_state(folder, other).ready:
            ctx.reporter.say(f"[{stage.name}] reused: it holds all that is needed, and more")
            return other.hash
    if state.ready:
        ctx.reporter.say(f"[{stage.name}] reused: nothing it depends on has changed")
        return fingerprint.hash
    redo = state.status in ("stale", "corrupt")
    why = f"again ({'; '.join(state.reasons)})" if redo else "started"
    ctx.reporter.say(f"[{stage.name}] {why}")
    ctx.reporter.warnings.clear()
    ctx.reporter.metrics = lambda **values: ctx.rundir.log_metrics(stage.name, **values)
    with ctx.rundir.write_stage(folder, fingerprint) as writer:
        facts = stage.run(ctx, writer.path)
        writer.note(facts | {"warnings": list(ctx.reporter.warnings)})
    peak = writer.peak_memory / 2**30
    ctx.reporter.say(f"[{stage.name}] done in {clock(writer.seconds)}, peak memory {peak:.2f} GiB")
    return fingerprint.hash
