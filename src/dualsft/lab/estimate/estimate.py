"""`dualsft estimate`: memory, time and disk space of every stage of Algorithm 1, before a run.

The sizes of weights, vectors and optimizer states follow from the model's shapes. Memory and time
per batch are measured on copies of the model with one and two layers (`lab/estimate/probe.py`).
Rows are counted, a sample of them is tokenised, and training stages are computed in
`lab/estimate/workload.py`; a walk has the plan that the run would choose (`memory/plans.py`). For a
stage that does not fit, the settings that reduce its memory are named. Writes nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dualsft.algorithm.scores import NUM_ALONE, NUM_ALONE_HALF
from dualsft.config import settings
from dualsft.config.settings import Config
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.sketch import MAPPED_BYTES
from dualsft.lab.estimate.probe import probe
from dualsft.lab.estimate.workload import Machine, Training, Workload, survey
from dualsft.memory.plans import GIB, Demand, Plan, choose, unmeasured
from dualsft.model.load import empty_model, text_parameters
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.folder import RunDir
from dualsft.runs.method import Job
from dualsft.runs.preflight import STAGE_NAMES, check_paths, check_stage
from dualsft.runs.stages.finetune import describe_plan, finetune_plan, retention_batch
from dualsft.runs.stages.gradients import (
    one_pass_wanted,
    sketch_bytes,
    sketches_wanted,
    vectors_wanted,
)
from dualsft.runs.stages.scores import kept_vectors
from dualsft.runs.stages.selection import num_trained, param_budget
from dualsft.runs.stages.warmup import warmup_plan
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.progress import Reporter
from dualsft.system.usage import PeakMemory, free_bytes, free_memory

OPEN_SHARE = 0.1
"""Share of the pool that is scored again in half precision, because it is near the boundary (a
tenth of GSM8K with SmolLM2-135M)."""
IO_BYTES = 1e9
"""File throughput in bytes per second: a guess. I/O is a small part of the time."""
FORWARDS = 4
"""Cost of the evaluation in forward passes: both models, and the comparison of their logits."""
RECOMPUTED = 4 / 3
"""Time factor of a walk that recomputes activations."""
TOPK_SECONDS = {"cuda": 1e-9, "cpu": 15e-9, "mps": 15e-9}
"""Seconds per entry of the selection, which reads u ⊙ G twice (`algorithm/topk.py`)."""


@dataclass(frozen=True)
class StageEstimate:
    """Estimate of one stage, in bytes and seconds."""

    name: str
    device_bytes: int
    """0 on a CPU, where everything counts in `host_bytes`."""
    host_bytes: int
    seconds: float
    disk_bytes: int
    note: str
    fits: bool = True
    cure: str = ""
    """If it does not fit: settings that reduce its memory, and the memory that it needs."""


@dataclass(frozen=True)
class Estimate:
    """Estimates of all stages, and the resources of this machine."""

    device: str
    device_memory: int
    """Bytes that the run may use: of the GPU, or of the host on a CPU."""
    host_memory: int
    disk_free: int
    num_parameters: int
    num_candidates: int
    num_rows: int
    num_tokens: int
    longest: int
    finetuning: str
    """Rows, batch size, epochs, steps and learning rate of the fine-tuning, in one line."""
    stages: tuple[StageEstimate, ...]

    @property
    def fits(self) -> bool:
        return self.enough_disk and all(stage.fits for stage in self.stages)

    @property
    def disk_bytes(self) -> int:
        return sum(stage.disk_bytes for stage in self.stages)

    @property
    def enough_disk(self) -> bool:
        return self.disk_bytes <= self.disk_free

    def as_dict(self) -> dict[str, Any]:
        """As a dictionary for JSON."""
        return asdict(self) | {"fits": self.fits, "disk_bytes": self.disk_bytes}


def estimate(
    config: Config,
    out: str | Path = "run",
    until: str | None = None,
    reporter: Reporter | None = None,
) -> Estimate:
    """Estimate what `dualsft run` would need with these settings. Measures for some seconds.

    `out` is where the run folder would be written, and `until` the last stage.
    """
    settings.validate(config)
    check_paths(config)
    last = check_stage(until)
    ctx = RunContext(config, RunDir(Path(out)), reporter or Reporter())
    ctx.reporter.say("reading the data and measuring copies with one and two layers …")
    return _Estimator(ctx).table(STAGE_NAMES.index(last))


@dataclass(frozen=True)
class PlannedWalk:
    """Plan of a walk, its bytes on the device and on the host, and its seconds."""

    plan: Plan
    device: int
    host: int
    seconds: float


class _Estimator:
    """Sizes, measurements and machine of one run."""

    def __init__(self, ctx: RunContext) -> None:
        self.ctx, self.config, self.methods = ctx, ctx.config, ctx.methods
        self.shapes, self.num_candidates = ctx.candidate_shapes, ctx.num_candidates
        self.num_parameters = ctx.num_parameters
        empty = empty_model(ctx.model_folder, ctx.trusted)
        self.num_trainable = sum(p.numel() for _, p in text_parameters(empty))
        self.half = ctx.dtype in HALF_DTYPES
        self.wide = accumulation_dtype(ctx.dtype).itemsize
        self.model_bytes, self.vector_bytes = ctx.model_bytes, ctx.vector_bytes
        self.work = survey(ctx)
        ctx.split_counts = self.work.counts
        self.machine = this_machine(ctx, self.model_bytes, self.work)
        self.split_base = self.machine.base  # the split loads no model and does not use CUDA
        self.probe = probe(ctx, self.work)
        if not self.machine.on_cpu:  # again: CUDA has loaded its libraries into this process
            self.machine = this_machine(ctx, self.model_bytes, self.work)
        data, params = self.methods.load("data"), self.methods.load("params")
        self.pool_roles = data.pool_roles
        self.num_trained = num_trained(ctx)
        self.num_selected = 0
        """Entries in the mask. 0 if every parameter is trained, or an adapter."""
        if params.entry.uses_budget:
            eligible = params.eligible(Job(ctx, "params", ctx.rundir.path))
            self.num_selected = param_budget(ctx, eligible)

    def table(self, last: int) -> Estimate:
        """Estimate the stages up to index `last`."""
        stages = (
            self._split,
            self._warmup,
            self._gradients,
            self._scores,
            self._selection,
            self._finetune,
            self._evaluation,
        )[: last + 1]
        idle = [] if "warmup" in self.methods.needs else [self._warmup]
        idle += [] if "scores" in self.methods.needs else [self._gradients, self._scores]
        machine = self.machine
        return Estimate(
            device=str(self.ctx.device),
            device_memory=machine.host_bytes if machine.on_cpu else machine.device_bytes,
            host_memory=machine.host_bytes,
            disk_free=free_bytes(self.ctx.rundir.path.location.absolute()),
            num_parameters=self.num_parameters,
            num_candidates=self.num_candidates,
            num_rows=self.work.num_full,
            num_tokens=self.work.num_tokens,
            longest=self.work.longest.num_tokens,
            finetuning=describe_plan(
                self.ctx, finetune_plan(self.ctx, self.num_trained), self.num_trained
            ),
            stages=tuple(stage() for stage in stages if stage not in idle),
        )

    # --- stages ---------------------------------------------------------------------------------

    def _split(self) -> StageEstimate:
        work = self.work
        total = self.split_base + 2 * work.num_bytes
        fits = total <= self.machine.host_bytes
        return StageEstimate(
            name="split",
            device_bytes=0,
            host_bytes=total,
            seconds=work.split_seconds,
            disk_bytes=4 * work.num_tokens,
            note=", ".join(f"{role} {count:,}" for role, count in work.counts.items()),
            fits=fits,
            cure="" if fits else f"use a machine with {total / GIB:.1f} GiB of memory",
        )

    def _warmup(self) -> StageEstimate:
        config, num_examples = self.config.warmup, self.work.counts["warm"]
        plan, disk = warmup_plan(self.ctx), self.model_bytes
        if not plan.num_steps(num_examples):
            return self._stage("warmup", self.model_bytes, 0, disk / IO_BYTES, disk, "no warmup")
        whole = config.trainable == "all"
        training = Training(
            num_entries=self.num_trainable if whole else self.num_candidates,
            whole=True,
            moments=config.moments,
            offload=config.offload,
            memory=self.probe.warmup if whole else self.probe.finetune,
            plan=plan,
            num_examples=num_examples,
            lengths=self.work.of("warm"),
        )
        cures = ("warmup.offload=true", "warmup.moments=int8", "warmup.trainable=candidates")
        return self._training("warmup", training, disk + self.vector_bytes, cures)

    def _finetune(self) -> StageEstimate:
        whole, roles = not self.num_selected, self.pool_roles
        training = Training(
            num_entries=self.num_trainable if whole else self.num_selected,
            whole=whole,
            moments=self.config.finetune.moments,
            offload=False,
            memory=self.probe.warmup if whole else self.probe.finetune,
            plan=finetune_plan(self.ctx, self.num_trained),
            num_examples=self.num_trained,
            lengths=self.work.of(roles[0]) if len(roles) == 1 else self.work.lengths,
        )
        disk = self.model_bytes + self.num_selected * (4 + self.ctx.dtype.itemsize)
        cures = ("finetune.moments=int8",)
        if self.config.finetune.retention > 0:
            count = min(retention_batch(self.ctx), self.work.counts["anchor"])
            training = replace(training, anchors=(count, self.work.of("anchor")))
            cures = (*cures, "finetune.retention=0")
        return self._training("finetune", training, disk, cures)

    def _training(
        self, name: str, training: Training, disk: int, cures: tuple[str, ...]
    ) -> StageEstimate:
        """`cures` are the settings to name if the stage does not fit."""
        device, host, note = training.peak(self.machine)
        seconds = training.seconds(self.probe) + (self.model_bytes + disk) / IO_BYTES
        if self.config.finetune.checkpointing is False:
            cures = ("finetune.checkpointing=true", *cures)
        flat = settings.to_flat(self.config)
        given = {f"{key}={str(value).lower()}" for key, value in flat.items()}
        unset = [cure for cure in cures if cure not in given]
        words = f"set {' or '.join([*unset, 'a lower data.max_length'])}, or "
        cure = words + self.machine.larger(device, host)
        return self._stage(name, device, host, seconds, disk, note, cure)

    def _gradients(self) -> StageEstimate:
        counts = self.work.counts
        warmed = warmup_plan(self.ctx).num_steps(counts["warm"]) > 0
        vectors = vectors_wanted(self.ctx)
        walks = [self._walk("val", wide=self._widens("mixed", "full"), sums=vectors)]
        seconds = 0.0
        if self.config.score.preservation == "cwsd" and warmed and vectors:
            wide = self._widens("mixed", "full", num_models=2)
            walks.append(self._walk("anchor", wide=wide, teacher=True))
            batches = self.work.of("anchor").batches(counts["anchor"], self.ctx.batch_tokens)
            seconds += sum(map(self.probe.forward_seconds.at, batches))  # the teacher's pass
        one_pass, sketched = one_pass_wanted(self.ctx), sketches_wanted(self.ctx)
        wide = self._widens("full")
        walks.append(self._walk("pool", wide=wide, sums=vectors, direction=one_pass))
        sketches = sketch_bytes(self.config.score.sketch_dim, counts) if sketched else 0
        disk = 3 * self.vector_bytes * vectors + sketches
        seconds += sum(walk.seconds for walk in walks) + (2 * disk + self.model_bytes) / IO_BYTES
        device, host = max(walk.device for walk in walks), max(walk.host for walk in walks)
        host += min(sketches, MAPPED_BYTES)
        return self._walked("gradients", walks[-1].plan, device, host, seconds, disk)

    def _scores(self) -> StageEstimate:
        disk = len(kept_vectors(self.ctx)) * self.vector_bytes
        read = 4 * self.vector_bytes * vectors_wanted(self.ctx)
        seconds = (self.model_bytes + read + disk) / IO_BYTES
        # the self-check scores some examples by plain autograd, with the model widened to fp32
        count, line = NUM_ALONE_HALF if self.half else NUM_ALONE, self.probe.step_seconds
        seconds += count * (line.fixed + self.work.lengths.mean() * line.slope)
        memory = self.probe.wide.loss
        activations = (None if self.machine.on_cpu else memory.recomputed) or memory.kept
        device = (2 if self.half else 1) * self.model_bytes
        device += self._vector_on_device() if vectors_wanted(self.ctx) else 0
        device += int(activations.at(self.work.of("pool").longest)) if activations else 0
        if self.half:  # the engine scores the self-check examples once more in fp32
            uses_u = vectors_wanted(self.ctx)
            again = self._walk("pool", count, wide=True, sums=False, direction=uses_u)
            device, seconds = max(device, again.device), seconds + again.seconds
        if sketches_wanted(self.ctx):
            dim, counts = self.config.score.sketch_dim, self.work.counts
            side = min(dim, counts["pool"])
            host = min(sketch_bytes(dim, counts), MAPPED_BYTES)
            host += 24 * side**2  # the matrix, its copy and its factor
            return self._stage("scores", device, host, seconds, disk, "from the sketches")
        if one_pass_wanted(self.ctx) or not self.methods.scored("data"):
            return self._stage("scores", device, 0, seconds, disk, "from the pool pass")
        pool = self._walk("pool", wide=self._widens("full"), sums=False, direction=True)
        device, seconds = max(device, pool.device), seconds + pool.seconds
        return self._walked("scores", pool.plan, device, pool.host, seconds, disk)

    def _selection(self) -> StageEstimate:
        chosen, methods = self.num_selected, self.methods
        vectors = 2 * self._vector_on_device() if vectors_wanted(self.ctx) else 0
        device, host = self.model_bytes + vectors, 16 * chosen
        seconds = self.num_candidates * TOPK_SECONDS[self.ctx.device.type]
        seconds += (self.model_bytes + 4 * self.vector_bytes) / IO_BYTES
        if self.half and methods.scored("data") and not sketches_wanted(self.ctx):
            count = math.ceil(OPEN_SHARE * self.work.counts["pool"])
            again = self._walk("pool", count, wide=True, sums=False, direction=True)
            device, host = max(device, again.device), max(host, again.host)
            seconds += again.seconds
        disk = 8 * chosen
        if methods.entries["data"].uses_budget:
            disk += int(self.work.num_bytes * min(1.0, self.num_trained / self.work.num_full))
        note = f"k = {chosen:,}" if chosen else "all parameters"
        others = [e.name for axis, e in methods.entries.items() if not methods.scored(axis)]
        if others := [name for name in others if name not in ("all", "random")]:
            note += f"; the passes of {', '.join(others)} are not counted"
        return self._stage("selection", device, host, seconds, disk, note)

    def _evaluation(self) -> StageEstimate:
        asked, num_sets = self.config.evaluation, 1 + len(self.config.evaluation.files)
        val, lengths = self.work.counts["val"], self.work.of("val")
        rows = num_sets * (min(val, asked.limit) if asked.limit else val)
        tokens, longest = asked.batch_tokens or self.ctx.batch_tokens, lengths.longest
        if num_sets == 1:  # the sizes of evaluation.files are not known
            tokens = max(longest, min(tokens, int(rows * lengths.mean())))

        def peak(tokens: int) -> int:
            return 2 * self.model_bytes + 2 * int(self.probe.forward.at(tokens))

        while tokens > longest and not self.machine.fits(peak(tokens)):
            tokens = max(longest, tokens // 2)  # the stage halves its batches the same way
        batches = lengths.batches(rows, tokens)
        seconds = FORWARDS * sum(map(self.probe.forward_seconds.at, batches))
        seconds += 2 * self.model_bytes / IO_BYTES
        note = f"{tokens:,} tokens per batch"
        note += ", files assumed to be as long as the validation split" if num_sets > 1 else ""
        return self._stage("evaluation", peak(tokens), 0, seconds, 0, note)

    # --- walks ----------------------------------------------------------------------------------

    def _walk(
        self,
        role: str,
        count: int | None = None,
        *,
        wide: bool,
        teacher: bool = False,
        sums: bool = True,
        direction: bool = False,
    ) -> PlannedWalk:
        """A walk over the examples of a role, or over `count` of them.

        With `wide`, a half-precision model is widened to fp32 (`engine/passes.py`), and the
        activations were measured in fp32. With `teacher`, it computes the CWSD loss.
        """
        wide, machine, lengths = wide and self.half, self.machine, self.work.of(role)
        itemsize = self.wide if wide else self.ctx.dtype.itemsize
        measured = self.probe.wide if wide else self.probe.walks
        memory = measured.cwsd if teacher else measured.loss
        count = self.work.counts[role] if count is None else count
        demand = Demand(
            shapes=self.shapes,
            held=(2 if teacher else 1) * self.num_parameters * itemsize,
            sum_itemsize=self.wide if sums else 0,
            direction_itemsize=itemsize if direction else 0,
            longest=lengths.longest,
            kept=memory.kept,
            recomputed=memory.recomputed,
        )
        wishes = pass_settings(self.ctx).wishes
        most = max(1, min(self.ctx.batch_tokens, int(count * lengths.mean())))
        if machine.on_cpu:
            plan = unmeasured(most, wishes, len(self.shapes))[0]
        else:
            free = max(0, machine.host_bytes - machine.base)
            plan = choose(demand, machine.device_bytes, free, most, wishes)[0]
        activations = demand.activations(plan.checkpointing) or memory.recomputed
        batch_tokens = max(1, plan.batch_tokens)
        largest = lengths.largest(count, batch_tokens)
        batch = int(activations.at(largest)) if activations else machine.device_bytes
        device = demand.held + demand.vectors(plan.placement, plan.num_groups) + batch
        seconds = sum(map(measured.seconds.at, lengths.batches(count, batch_tokens)))
        seconds *= plan.num_groups * (RECOMPUTED if plan.checkpointing else 1.0)
        return PlannedWalk(plan, device, demand.host(plan.placement), seconds)

    def _widens(self, *precisions: str, num_models: int = 1) -> bool:
        """Whether a walk that wants fp32 weights under these values of score.precision gets them:
        the setting must be one of them, and the memory must suffice."""
        return self.config.score.precision in precisions and self.machine.widens(num_models)

    def _walked(
        self, name: str, plan: Plan, device: int, host: int, seconds: float, disk: int
    ) -> StageEstimate:
        score = self.config.score
        asked = score.plan != "auto" or score.checkpointing is False
        defaults = "leave score.plan and score.checkpointing at their defaults, " if asked else ""
        cure = f"{defaults}lower data.max_length, or {self.machine.larger(device, host)}"
        return self._stage(name, device, host, seconds, disk, plan.describe(), cure)

    def _vector_on_device(self) -> int:
        """GPU bytes of a vector; 0 if it does not fit (`algorithm/projection.py`, `at_hand`)."""
        free = self.machine.device_bytes - self.model_bytes
        fits = not self.machine.on_cpu and self.vector_bytes <= free // 2
        return self.vector_bytes if fits else 0

    def _stage(
        self,
        name: str,
        device: int,
        host: int,
        seconds: float,
        disk: int,
        note: str,
        cure: str = "",
    ) -> StageEstimate:
        machine = self.machine
        fits = machine.fits(device, host)
        return StageEstimate(
            name=name,
            device_bytes=0 if machine.on_cpu else device,
            host_bytes=machine.hosted(device, host),
            seconds=seconds,
            disk_bytes=disk,
            note=note,
            fits=fits,
            cure="" if fits else cure or machine.larger(device, host),
        )


def this_machine(ctx: RunContext, model_bytes: int, work: Workload) -> Machine:
    """Free memory of this machine. A run starts with the same base usage as this process."""
    with PeakMemory() as now:  # an empty block: the resident memory of this process
        pass
    host = free_memory(torch.device("cpu")) + now.rss_bytes
    free = free_memory(ctx.device) if ctx.device.type == "cuda" else host
    return Machine(
        on_cpu=ctx.device.type != "cuda",
        device_bytes=int(min((ctx.config.model.memory or 2**20) * GIB, free)),
        host_bytes=host,
        base=now.rss_bytes + work.host_bytes,
        model_bytes=model_bytes,
        dtype=ctx.dtype,
    )
