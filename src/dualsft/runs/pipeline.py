"""Algorithm 1 as an ordered list of stages over a run folder.

    split → warmup → gradients → scores → selection → finetune → evaluation → report

Each stage lists the settings it depends on and the stages it reads; its fingerprint is a hash of
both. A finished stage is reused as long as its fingerprint matches, and a changed setting re-runs
exactly the stages that depend on it, with the reason in the log. Stages are written atomically
(`runs/folder.py`); an interrupted stage resumes from its last saved state (`storage/resume.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from dualsft.config import settings
from dualsft.config.methods import parts
from dualsft.config.settings import Config
from dualsft.distributed.launch import launched
from dualsft.distributed.world import joined, settled, single_process, waiting_message, world
from dualsft.errors import ConfigError
from dualsft.model.load import choose_device
from dualsft.runs.context import RunContext, Settings, repeatable
from dualsft.runs.folder import FollowedRunDir, RunDir, has_all
from dualsft.runs.preflight import (
    FOLDERS,
    STAGE_NAMES,
    check_consent,
    check_paths,
    check_stage,
    outdated,
    read_manifests,
)
from dualsft.runs.stages import finetune, gradients, scores, selection, split, warmup
from dualsft.storage.manifest import Fingerprint, read_stage_manifest, sha256_text, versions
from dualsft.storage.resume import Pieces
from dualsft.system.paths import Place, RunPath
from dualsft.system.progress import Reporter, clock, silent
from dualsft.system.signals import Interrupted
from dualsft.system.usage import explained

log = logging.getLogger(__name__)

STATE_BYTES = 2 + 8 + 4  # per entry: low half of the bf16 master, fp32 moments, gradient
MOST_OF_GPU = 0.7  # share of a GPU that weights and state may take before mode auto shards


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline: its function, its settings and the stages it reads."""

    name: str
    run: Callable[[RunContext, RunPath], dict[str, Any]]
    settings: Callable[[RunContext], Settings]
    reads: tuple[str, ...]
    richer: Callable[[RunContext], Settings | None] = lambda _: None
    """Settings of a finished stage whose result contains this one's and can be reused for it."""
    need: Callable[[RunContext], int] = lambda _: 0
    """Size of its result on disk in bytes, as far as it follows from the shapes."""
    needed: str | None = None
    """Name that a method's `needs` must contain for this stage to run; None means always."""
    together: Callable[[RunContext], bool] = lambda _: True
    """Whether all processes take part; otherwise rank 0 computes it and the others wait."""
    check: Callable[[RunContext], None] = lambda _: None
    """Raises before the first stage runs if this stage would fail."""

    def runs(self, ctx: RunContext) -> bool:
        """Whether the methods of this run need the stage."""
        return self.needed is None or self.needed in ctx.methods.needs

    def fingerprints(self, ctx: RunContext, hashes: Mapping[str, str]) -> list[Fingerprint]:
        """Fingerprints that allow reuse: the stage's own and that of a richer result, if any."""
        reads = {name: hashes[name] for name in self.reads if name in hashes}
        found = (self.settings(ctx), self.richer(ctx))
        return [Fingerprint(one, reads) for one in found if one is not None]


STAGES: tuple[Stage, ...] = (
    Stage("split", split.run, split.settings, (), together=lambda _: False),
    Stage(
        "warmup",
        warmup.run,
        warmup.settings,
        ("split",),
        need=lambda ctx: ctx.model_bytes + ctx.vector_bytes,
        needed="warmup",
    ),
    Stage(
        "gradients",
        gradients.run,
        gradients.settings,
        ("split", "warmup"),
        gradients.richer_settings,
        need=gradients.disk_bytes,
        needed="scores",
    ),
    Stage(
        "scores",
        scores.run,
        scores.settings,
        ("split", "warmup", "gradients"),
        scores.richer_settings,
        need=lambda ctx: len(scores.kept_vectors(ctx)) * ctx.vector_bytes,
        needed="scores",
    ),
    Stage(
        "selection",
        selection.run,
        selection.settings,
        ("split", "warmup", "gradients", "scores"),
        together=lambda ctx: ctx.methods.parallel,
    ),
    Stage(
        "finetune",
        finetune.run,
        finetune.settings,
        ("split", "selection"),
        need=lambda ctx: ctx.model_bytes,
        together=finetune.together,
    ),
)


def stages() -> tuple[Stage, ...]:
    """All stages in order: those above, and the ones registered by `lab`."""
    return (*STAGES, *parts("stages"))


def run(
    config: Config,
    out: str | Place = "run",
    until: str | None = None,
    reporter: Reporter | None = None,
    lenders: Sequence[RunPath] = (),
    answers: RunPath | None = None,
) -> Path:
    """Run Algorithm 1 into the folder `out`, up to and including the stage `until`.

    Reuses finished stages whose fingerprint matches, also from the cached runs `lenders`. The base
    model's benchmark answers are cached in the folder `answers` for other runs. Returns the run
    folder.
    """
    settings.validate(config)
    check_paths(config)
    check_consent(config, until)
    last = check_stage(until)
    reporter = reporter or Reporter()
    use_cuda = choose_device(config.model.device).type == "cuda"
    if waiting := waiting_message():
        reporter.say(waiting)
    with joined(use_cuda, config.parallel.mode == "shard") as present:
        kind = RunDir if present.main else FollowedRunDir
        rundir, voice = kind(out), reporter if present.main else silent()
        ctx = RunContext(config, rundir, voice, lenders=lenders, answers=answers)
        for warning in settings.warnings(config):
            ctx.reporter.warn(warning)
        for stage in stages():
            if STAGE_NAMES.index(stage.name) <= STAGE_NAMES.index(last):
                stage.check(ctx)
        with explained(rundir.path.location), ExitStack() as held:
            rundir.create()
            held.enter_context(rundir.lock())
            _check_same(rundir, config)
            held.enter_context(_described_by(rundir, config))
            held.enter_context(repeatable(config.model.deterministic))
            held.enter_context(_settled(ctx))
            for tracked in parts("trackers") if present.main else ():
                held.enter_context(tracked(ctx))
            _run_stages(ctx, last)
    return rundir.path.location


def _check_same(rundir: RunDir, config: Config) -> None:
    """Raise unless all processes have the same settings, packages and run folder."""
    text = "\n".join([settings.to_yaml(config), *settings.consent_of(config)])
    world().check_equal(sha256_text(text), "the configuration (its hash)")
    world().check_equal(json.dumps(versions(), sort_keys=True), "what is installed")
    world().check_shared(rundir.path)


@contextmanager
def _settled(ctx: RunContext) -> Iterator[None]:
    """Set the world to replicated or sharded, as chosen by `parallel.mode`."""
    parallel, present = ctx.config.parallel, world()
    present.on_main(lambda: str(ctx.model_folder))  # rank 0 downloads the model first
    sharded = launched(parallel.mode == "shard") and present.on_main(lambda: _is_sharded(ctx))
    if sharded and (problems := _not_sharded(ctx.config)):
        raise ConfigError(problems)
    with settled(sharded=sharded, offload=sharded and parallel.offload) as present:
        if present.description:
            ctx.reporter.say(present.description)
            _warn_of_noise(ctx)
        elif parallel.mode == "shard" and not sharded:
            ctx.reporter.warn(
                "parallel.mode=shard has no effect: not started by a launcher (torchrun)"
            )
        yield


def _warn_of_noise(ctx: RunContext) -> None:
    """Warn about dropout: each process draws it for its own examples."""
    for name, value in ctx.model_config.to_dict().items():
        if "drop" in name and isinstance(value, float) and 0 < value < 1:
            ctx.reporter.warn(
                f"the model has dropout ({name}={value}): the dropout masks depend on the number "
                "of processes, so results differ between numbers of processes by more than rounding"
            )
            return


def _not_sharded(config: Config) -> list[str]:
    """Problems with settings that sharded models do not support."""
    cure = "with a sharded model; or use parallel.mode=replicate"
    problems = [
        f"{name}.moments: int8 has one scale for a whole parameter; use bfloat16 or float32 {cure}"
        for name, part in (("warmup", config.warmup), ("finetune", config.finetune))
        if part.moments == "int8"
    ]
    if config.score.preservation == "fisher" and config.score.candidates != "block_linear":
        problems.append(
            "score.preservation: fisher squares full gradients, also of embeddings and heads; use "
            f"cwsd or l2, or score.candidates=block_linear, {cure}"
        )
    return problems


def _is_sharded(ctx: RunContext) -> bool:
    """Whether to shard: `parallel.mode`; auto shards if scoring or the warmup would fill a GPU."""
    mode, device = ctx.config.parallel.mode, ctx.device
    if mode != "auto" or device.type != "cuda":
        return mode == "shard"
    # bytes without activations (docs/scaling.md): G and the direction, or the optimizer's state
    needs = [ctx.model_bytes + ctx.vector_bytes + ctx.num_candidates * ctx.dtype.itemsize]
    warmup = ctx.config.warmup
    if warmup.epochs and not warmup.offload and warmup.trainable == "all":
        needs.append(ctx.model_bytes + STATE_BYTES * ctx.num_parameters)
    return max(needs) > MOST_OF_GPU * torch.cuda.mem_get_info(device)[1]


class _Onlooker(RunContext):
    """Read-only view of a run, for a process that must not touch the GPU."""

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.config.model.device)


class Finished:
    """Which stages of a run folder were made with these settings, by their manifests.

    May be asked again while the run goes on. A stage that was found is not looked at again, and a
    fingerprint is computed once, when there is a manifest to compare with: it hashes the corpus.
    """

    def __init__(self, config: Config, out: RunPath) -> None:
        self.rundir = RunDir(out)
        self._ctx = _Onlooker(config, self.rundir, silent())
        self._left = [stage for stage in stages() if stage.runs(self._ctx)]
        self._hashes: dict[str, str] = {}
        self._wanted: dict[str, list[Fingerprint]] = {}

    def up_to(self, last: str, whole: bool = False) -> bool:
        """Whether all needed stages up to this one are finished.

        `whole` asks for all of their files too, by name and size.
        """
        while self._left and STAGE_NAMES.index(self._left[0].name) <= STAGE_NAMES.index(last):
            stage = self._left[0]
            folder = self._ctx.folder(stage.name)
            manifest, wrong = read_stage_manifest(folder)
            if wrong or (whole and not has_all(folder)):
                return False
            if stage.name not in self._wanted:
                self._wanted[stage.name] = stage.fingerprints(self._ctx, self._hashes)
            wanted = self._wanted[stage.name]
            match = next((one for one in wanted if not one.explain(manifest)), None)
            if match is None:
                return False
            self._hashes[stage.name] = match.hash
            self._left.pop(0)
        return True


def finished(config: Config, out: RunPath) -> bool:
    """Whether all stages of a run folder were computed with these settings.

    Compares manifests only, because large files may have been removed since (`dualsft compare`
    with keep: results).
    """
    return Finished(config, out).up_to(STAGE_NAMES[-1])


def _run_stages(ctx: RunContext, last: str) -> None:
    """Run every stage up to `last`; with the last stage, also write the report."""
    rundir = ctx.rundir
    if world().main:
        rundir.sweep()
    assert ctx.device, "an unavailable device is reported before any work"
    hashes: dict[str, str] = {}
    for stage in stages():
        if stage.runs(ctx):
            hashes[stage.name] = _ensure(ctx, stage, hashes)
        else:
            ctx.reporter.say(f"[{stage.name}] not needed by {ctx.methods.title}")
        if stage.name == "split" and STAGE_NAMES.index(last) >= STAGE_NAMES.index("selection"):
            selection.check_budgets(ctx)
            if STAGE_NAMES.index(last) >= STAGE_NAMES.index("finetune"):
                # the stage warns too, for the report: but after hours of scoring
                plan = finetune.finetune_plan(ctx, rows := selection.num_trained(ctx))
                finetune.warn_of_little(ctx, plan, rows)
        if stage.name == last:
            for name in outdated(read_manifests(rundir.path)[0]):
                ctx.reporter.say(f"[{name}] is now out of date; `dualsft run` recomputes it")
            return
    if world().main:
        for write_report in parts("report"):
            write_report(rundir.path)
    ctx.reporter.say(f"report: {rundir.path / 'report.md'}")


@contextmanager
def _described_by(rundir: RunDir, config: Config) -> Iterator[None]:
    """Write config.yaml for this run; restore the previous file if the run fails."""
    if not world().main:
        yield
        return
    path = rundir.path / "config.yaml"
    before = path.read_bytes(settings.MAX_CONFIG_BYTES) if path.is_file() else None
    rundir.write_config(settings.to_yaml(config))
    try:
        yield
    except Exception:
        if before is not None:
            path.replace_bytes(before)
        raise


def _lender(ctx: RunContext, folder: str, fingerprint: Fingerprint) -> RunPath | None:
    """A cached run with this stage, finished and intact; None if there is none."""
    for other in ctx.lenders:
        same = other.location.absolute() == ctx.rundir.path.location.absolute()
        manifest, wrong = ({}, "itself") if same else read_stage_manifest(other / folder)
        stated = not wrong and not fingerprint.explain(manifest)
        if stated and RunDir(other).stage_state(folder, fingerprint).ready:
            return other
    return None


def _reused(ctx: RunContext, stage: Stage, hashes: Mapping[str, str]) -> tuple[Fingerprint, bool]:
    """(fingerprint, whether a finished stage with it is in place); logs the outcome.

    Looks here first, then in the cached runs.
    """
    folder = FOLDERS[stage.name]
    fingerprint, *richer = stage.fingerprints(ctx, hashes)
    state = ctx.rundir.stage_state(folder, fingerprint)
    found, where = None, ""
    if state.ready:
        found, where = fingerprint, ": nothing it depends on has changed"
    elif state.status == "stale":
        found = next((one for one in richer if ctx.rundir.stage_state(folder, one).ready), None)
        where = ": it holds all that is needed"
    for wanted in (fingerprint, *richer) if found is None else ():
        lender = _lender(ctx, folder, wanted)
        if lender is not None and ctx.rundir.adopt(folder, lender):
            found, where = wanted, f" from {lender}"
            break
    if found is not None:
        ctx.rundir.discard_work(folder)
        ctx.reporter.say(f"[{stage.name}] reused{where}")
        return found, True
    redo = state.status in ("stale", "corrupt")
    why = f"again ({'; '.join(state.reasons)})" if redo else "started"
    ctx.reporter.say(f"[{stage.name}] {why}")
    return fingerprint, False


def _ensure(ctx: RunContext, stage: Stage, hashes: Mapping[str, str]) -> str:
    """Reuse the finished stage or run it; returns its fingerprint's hash."""
    present = world()
    fingerprint, ready = present.on_main(lambda: _reused(ctx, stage, hashes))
    log.debug("%s: fingerprint %s", stage.name, json.dumps(fingerprint.as_dict(), default=str))
    if not ready:
        if stage.together(ctx):
            _compute_stage(ctx, stage, fingerprint)
        elif present.main:
            if present.description and stage.name != "split":
                what = ctx.methods.title
                ctx.reporter.say(f"[{stage.name}] runs on rank 0 only: {what} is not distributed")
            with single_process():
                _compute_stage(ctx, stage, fingerprint)
        present.barrier()  # wait until rank 0 has moved the stage into place
    return fingerprint.hash


def _compute_stage(ctx: RunContext, stage: Stage, fingerprint: Fingerprint) -> None:
    folder, reporter = FOLDERS[stage.name], ctx.reporter
    reporter.warnings.clear()
    reporter.codes.clear()
    ctx.plans.clear()
    reporter.metrics = partial(ctx.rundir.log_metrics, stage.name)
    reporter.metrics(fingerprint=fingerprint.hash)
    work, every = ctx.rundir.work_path(folder), ctx.config.resume.every
    ctx.pieces = Pieces(work, fingerprint.hash, every, reporter.say)
    writer = None
    try:
        with ctx.rundir.write_stage(folder, fingerprint, stage.need(ctx)) as writer:
            facts = stage.run(ctx, writer.path)
            if reused := facts.get("taken_over"):
                writer.count(reused["seconds"], reused["peak_bytes"], ctx.device.type == "cuda")
            plans = {"plans": dict(ctx.plans)} if ctx.plans else {}
            codes = [reporter.codes[warning] for warning in reporter.warnings]
            warned = {"warnings": list(reporter.warnings), "warning_codes": codes}
            writer.note(facts | plans | world().facts() | warned)
    except Interrupted as stopped:  # outside a loop: save the state of the last loop
        if writer is not None and writer.kept:
            stopped.saved = f"the stage {stage.name}"
        stopped.saved = stopped.saved or ctx.pieces.rescue()
        raise
    ctx.pieces = Pieces()
    reporter.metrics(seconds=round(writer.seconds, 3), peak_bytes=writer.peak_memory)
    peak = writer.peak_memory / 2**30
    reporter.say(f"[{stage.name}] done in {clock(writer.seconds)}, peak memory {peak:.2f} GiB")
