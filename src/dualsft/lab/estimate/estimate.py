"""`dualsft estimate`: memory, time and disk space of every stage of Algorithm 1, before a run.

The sizes of weights, vectors and optimizer states follow from the model's shapes. Memory and time
per batch are measured on copies of the model with one and two layers (`lab/estimate/probe.py`).
Rows are counted and a sample of them is tokenised (`lab/estimate/workload.py`). The plan of a walk
is the one that the run would choose (`memory/plans.py`). If a stage does not fit, settings that
reduce memory are tried, and the first that fit are suggested. Writes nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from dualsft.algorithm.scores import NUM_ALONE, NUM_ALONE_HALF
from dualsft.config import settings
from dualsft.config.settings import Config
from dualsft.engine.fused import HALF_DTYPES
from dualsft.lab.estimate.probe import Probe, Trial, probe
from dualsft.lab.estimate.training_costs import Room, Training, finetune_cures, warmup_cures
from dualsft.lab.estimate.walk_costs import Walk, has_room_for_fp32
from dualsft.lab.estimate.workload import Workload, survey
from dualsft.memory.plans import GIB, Plan
from dualsft.model.load import empty_model, find_candidates, shallow_model, text_parameters
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.runs.method import Job
from dualsft.runs.preflight import FOLDERS, STAGE_NAMES, check_paths, check_stage
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.runs.stages.gradients import one_pass_wanted
from dualsft.runs.stages.scores import kept_vectors
from dualsft.runs.stages.selection import data_budget, param_budget
from dualsft.runs.stages.warmup import warmup_plan
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.progress import Reporter
from dualsft.system.usage import free_bytes, free_memory, peak_memory_gib

OPEN_SHARE = 0.1
"""Share of the pool that is scored again in half precision, because it is near the boundary (a
tenth of GSM8K with SmolLM2-135M)."""
IO_BYTES = 1e9
"""File throughput in bytes per second: a guess. I/O is a small part of the time."""
FORWARDS = 4
"""Cost of the evaluation in forward passes: both models, and the comparison of their logits."""
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
    """Settings that make it fit, or the memory needed if none do."""


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
    """Estimate what `dualsft run` would need with these settings. Measures for some seconds."""
    settings.validate(config)
    check_paths(config)
    last = check_stage(until)
    ctx = RunContext(config, RunDir(Path(out)), reporter or Reporter())
    ctx.reporter.say("reading the data and measuring copies with one and two layers …")
    return _Estimator(ctx).table(STAGE_NAMES.index(last))


class _Estimator:
    """Sizes, measurements and machine of one run."""

    def __init__(self, ctx: RunContext) -> None:
        self.ctx, self.config = ctx, ctx.config
        empty = empty_model(ctx.model_folder, ctx.trusted)
        candidates = find_candidates(empty, ctx.config.score.candidates)
        self.shapes = {name: tuple(p.shape) for name, p in candidates.items()}
        self.num_candidates = sum(map(prod, self.shapes.values()))
        self.num_parameters = sum(p.numel() for p in empty.parameters())
        self.num_trainable = sum(p.numel() for _, p in text_parameters(empty))
        self.itemsize = ctx.dtype.itemsize
        self.wide = accumulation_dtype(ctx.dtype).itemsize
        self.model_bytes = self.num_parameters * self.itemsize
        self.vector_bytes = self.num_candidates * self.wide
        self.work: Workload = survey(ctx)
        self.room = self.before = machine(ctx, self.model_bytes, self.work)
        self.probe: Probe = self._probe()
        if not self.room.on_cpu:  # measure again: CUDA has loaded its libraries into this process
            self.room = machine(ctx, self.model_bytes, self.work)

    def _probe(self) -> Probe:
        ctx = self.ctx
        depth = int(ctx.model_config.num_hidden_layers)
        trial = Trial(
            longest=self.work.longest,
            typical=self.work.typical,
            batch_tokens=ctx.batch_tokens,
            pad_id=ctx.pad_id,
            padding_side=ctx.config.data.padding_side,
            candidates=ctx.config.score.candidates,
            tau=ctx.config.score.tau,
        )

        def build(layers: int) -> Any:
            attention = ctx.config.model.attention
            return shallow_model(
                ctx.model_folder, layers, ctx.dtype, ctx.device, attention, ctx.trusted
            )

        return probe(build, depth, trial, ctx.device)

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
        needs = self.ctx.methods.needs
        idle = [self._warmup] if "warmup" not in needs else []
        idle += [self._gradients, self._scores] if "scores" not in needs else []
        stages = [stage for stage in stages if stage not in idle]
        return Estimate(
            device=str(self.ctx.device),
            device_memory=self.room.host_bytes if self.room.on_cpu else self.room.device_bytes,
            host_memory=self.room.host_bytes,
            disk_free=free_bytes(self.ctx.rundir.path.location.absolute()),
            num_parameters=self.num_parameters,
            num_candidates=self.num_candidates,
            num_rows=self.work.num_full,
            num_tokens=self.work.num_tokens,
            longest=self.work.longest.num_tokens,
            stages=tuple(stage() for stage in stages),
        )

    # --- stages ---------------------------------------------------------------------------------

    def _split(self) -> StageEstimate:
        work = self.work
        host = 2 * work.num_bytes
        note = ", ".join(f"{role} {count:,}" for role, count in work.counts.items())
        return self._stage("split", 0, host, work.split_seconds, 4 * work.num_tokens, note)

    def _warmup(self) -> StageEstimate:
        disk = self.model_bytes
        if not warmup_plan(self.ctx).num_steps(self.work.counts["warm"]):
            return self._stage("warmup", self.model_bytes, 0, self._io(disk), disk, "no warmup")
        steps = warmup_cures(self.config)
        return self._training("warmup", self._warmup_needs, steps, disk + self.vector_bytes)

    def _warmup_needs(self, config: Config) -> Training:
        whole = config.warmup.trainable == "all"
        return Training(
            num_entries=self.num_trainable if whole else self.num_candidates,
            whole=True,
            moments=config.warmup.moments,
            offload=config.warmup.offload,
            memory=self.probe.warmup if whole else self.probe.finetune,
            plan=warmup_plan(replace(self.ctx, config=config)),
            num_examples=self.work.counts["warm"],
            lengths=self.work.of("warm"),
        )

    def _finetune(self) -> StageEstimate:
        disk = self.model_bytes
        if self._num_selected():
            disk += self._num_selected() * (4 + self.itemsize)
        steps = finetune_cures(self.config)
        return self._training("finetune", self._finetune_needs, steps, disk)

    def _num_selected(self) -> int:
        """Entries in the mask. 0 if every parameter is trained, or an adapter."""
        params = self.ctx.methods.load("params")
        if not params.entry.uses_budget:
            return 0
        return param_budget(
            self.ctx, params.eligible(Job(self.ctx, "params", self.ctx.rundir.path))
        )

    def _num_trained(self) -> int:
        """Examples per epoch of fine-tuning."""
        counts, data = self.work.counts, self.ctx.methods.load("data")
        num_pool = sum(counts[role] for role in data.pool_roles)
        if not data.entry.uses_budget:
            return num_pool
        return data_budget(self.ctx, self.work.num_full, num_pool)

    def _finetune_needs(self, config: Config) -> Training:
        whole, roles = not self._num_selected(), self.ctx.methods.load("data").pool_roles
        return Training(
            num_entries=self.num_trainable if whole else self._num_selected(),
            whole=whole,
            moments=config.finetune.moments,
            offload=False,
            memory=self.probe.warmup if whole else self.probe.finetune,
            plan=finetune_plan(replace(self.ctx, config=config)),
            num_examples=self._num_trained(),
            lengths=self.work.of(roles[0]) if len(roles) == 1 else self.work.lengths,
        )

    def _training(
        self,
        name: str,
        needs: Callable[[Config], Training],
        cures: Iterator[tuple[str, Config]],
        disk: int,
    ) -> StageEstimate:
        """Estimate a training stage. If it does not fit, suggest the first cure that does."""
        asked = needs(self.config)
        device, host, note = asked.peak(self.room)
        seconds = asked.seconds(self.probe) + self._io(self.model_bytes + disk)
        cure = ""
        if not self.room.fits(device, host):
            helps = (words for words, c in cures if self.room.fits(*needs(c).peak(self.room)[:2]))
            cure = next((f"set {words}" for words in helps), "")
        return self._stage(name, device, host, seconds, disk, note, cure)

    def _gradients(self) -> StageEstimate:
        counts = self.work.counts
        warmed = warmup_plan(self.ctx).num_steps(counts["warm"]) > 0
        walks = [self._walk("val", wide=self._widens("mixed", "full"))]
        seconds = 0.0
        if self.config.score.preservation == "cwsd" and warmed:
            wide = self._widens("mixed", "full", num_models=2)
            walks.append(self._walk("anchor", wide=wide, teacher=True))
            num_batches, tokens = self.work.of("anchor").batches(
                counts["anchor"], self.ctx.batch_tokens
            )
            line = self.probe.forward_seconds  # the teacher's forward pass over the anchors
            seconds += num_batches * line.fixed + tokens * line.slope
        one_pass = one_pass_wanted(self.ctx)
        walks.append(self._walk("pool", wide=self._widens("full"), direction=one_pass))
        planned = [walk.planned(self.ctx, self.room) for walk in walks]
        disk = 3 * self.vector_bytes
        seconds += sum(one.seconds for one in planned) + self._io(2 * disk + self.model_bytes)
        device, host = max(one.device for one in planned), max(one.host for one in planned)
        return self._walked("gradients", planned[-1].plan, device, host, seconds, disk)

    def _scores(self) -> StageEstimate:
        disk = len(kept_vectors(self.ctx)) * self.vector_bytes
        wanted, count = self.ctx.methods.scored("data"), NUM_ALONE_HALF if self._half else NUM_ALONE
        seconds = self._io(self.model_bytes + 4 * self.vector_bytes + disk)
        line, tokens = self.probe.step_seconds, self.work.lengths.mean()
        seconds += count * (line.fixed + tokens * line.slope)
        device, host = self._alone() + self._at_hand(self.vector_bytes), 0
        if self._half:  # the engine scores the self-check examples once more in fp32
            probes = self._walk("pool", count, wide=True, sums=False, direction=True)
            planned = probes.planned(self.ctx, self.room)
            device, seconds = max(device, planned.device), seconds + planned.seconds
        if one_pass_wanted(self.ctx) or not wanted:
            return self._stage("scores", device, 0, seconds, disk, "from the pool pass")
        pool = self._walk("pool", wide=self._widens("full"), sums=False, direction=True).planned(
            self.ctx, self.room
        )
        device, host = max(device, pool.device), pool.host
        return self._walked("scores", pool.plan, device, host, seconds + pool.seconds, disk)

    def _selection(self) -> StageEstimate:
        chosen = self._num_selected()
        device, host = self.model_bytes + 2 * self._at_hand(self.vector_bytes), 16 * chosen
        seconds = self.num_candidates * TOPK_SECONDS[self.ctx.device.type]
        seconds += self._io(self.model_bytes + 4 * self.vector_bytes)
        if self._half and self.ctx.methods.scored("data"):
            count = math.ceil(OPEN_SHARE * self.work.counts["pool"])
            again = self._walk("pool", count, wide=True, sums=False, direction=True)
            planned = again.planned(self.ctx, self.room)
            device, host = max(device, planned.device), max(host, planned.host)
            seconds += planned.seconds
        subset = int(self.work.num_bytes * min(1.0, self._share_selected()))
        note = f"k = {chosen:,}" if chosen else "all parameters"
        methods = self.ctx.methods
        own = [e.name for axis, e in methods.entries.items() if not methods.scored(axis)]
        own = [name for name in own if name not in ("all", "random")]
        if own:
            note += f"; the passes of {', '.join(own)} are not counted"
        return self._stage("selection", device, host, seconds, 8 * chosen + subset, note)

    @property
    def _half(self) -> bool:
        return self.ctx.dtype in HALF_DTYPES

    def _alone(self) -> int:
        """Memory to score one example by plain autograd: the model, widened to fp32 if it is in
        half precision, and the activations of the longest example."""
        memory = self.probe.wide.loss
        activations = (None if self.room.on_cpu else memory.recomputed) or memory.kept
        batch = int(activations.at(self.work.of("pool").longest)) if activations else 0
        return (2 if self._half else 1) * self.model_bytes + batch

    def _share_selected(self) -> float:
        if not self.ctx.methods.entries["data"].uses_budget:
            return 0.0
        return self._num_trained() / self.work.num_full

    def _evaluation(self) -> StageEstimate:
        asked, num_sets = self.config.evaluation, 1 + len(self.config.evaluation.files)
        val, lengths = self.work.counts["val"], self.work.of("val")
        rows = num_sets * (min(val, asked.limit) if asked.limit else val)
        tokens, longest = asked.batch_tokens or self.ctx.batch_tokens, lengths.longest
        if num_sets == 1:  # the sizes of evaluation.files are not known
            tokens = max(longest, min(tokens, int(rows * lengths.mean())))

        def peak(tokens: int) -> int:
            return 2 * self.model_bytes + 2 * int(self.probe.forward.at(tokens))

        while tokens > longest and not self.room.fits(peak(tokens)):
            tokens = max(longest, tokens // 2)  # the stage halves its batches the same way
        num_batches, padded = lengths.batches(rows, tokens)
        line = self.probe.forward_seconds
        seconds = FORWARDS * (num_batches * line.fixed + padded * line.slope)
        seconds += self._io(2 * self.model_bytes)
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
    ) -> Walk:
        """A walk over the examples of a role, or over `count` of them.

        With `wide`, a half-precision model is widened to fp32.
        """
        wide = wide and self._half
        num_bytes = (2 if teacher else 1) * self.model_bytes * (2 if wide else 1)
        return Walk(
            shapes=self.shapes,
            measured=self.probe.wide if wide else self.probe.walks,
            objective="cwsd" if teacher else "loss",
            weights=num_bytes,
            sum_itemsize=self.wide if sums else 0,
            direction_itemsize=(self.wide if wide else self.itemsize) if direction else 0,
            num_examples=self.work.counts[role] if count is None else count,
            lengths=self.work.of(role),
        )

    def _widens(self, *precisions: str, num_models: int = 1) -> bool:
        """Whether a walk that wants fp32 weights under these values of score.precision gets them:
        the setting must be one of them, and the memory must suffice."""
        asked = self.config.score.precision in precisions
        return asked and has_room_for_fp32(self.room, num_models)

    def _walked(
        self, name: str, plan: Plan, device: int, host: int, seconds: float, disk: int
    ) -> StageEstimate:
        note, cure = plan.describe(), ""
        if not self.room.fits(device, host):
            score = self.config.score
            asked = score.plan != "auto" or score.checkpointing is False
            free = "leave score.plan and score.checkpointing at their defaults, " if asked else ""
            cure = f"{free}lower data.max_length, or {self.room.larger(device, host)}"
        return self._stage(name, device, host, seconds, disk, note, cure)

    # --- memory ---------------------------------------------------------------------------------

    def _at_hand(self, num_bytes: int) -> int:
        """GPU bytes of a vector, or 0 if it does not fit (`at_hand` in `runs/stages/chosen.py`)."""
        free = self.room.device_bytes - self.model_bytes
        return num_bytes if not self.room.on_cpu and num_bytes <= free // 2 else 0

    def _io(self, num_bytes: int) -> float:
        return num_bytes / IO_BYTES

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
        assert name in FOLDERS
        fits, total = self.room.fits(device, host), self.room.hosted(device, host)
        if name == "split":  # loads no model
            total = self.before.base + host
            fits = total <= self.room.host_bytes
        return StageEstimate(
            name=name,
            device_bytes=0 if self.room.on_cpu else device,
            host_bytes=total,
            seconds=seconds,
            disk_bytes=disk,
            note=note,
            fits=fits,
            cure="" if fits else cure or self.room.larger(device, host),
        )


def machine(ctx: RunContext, model_bytes: int, work: Workload) -> Room:
    """Free memory of this machine. A run starts with the same base usage as this process."""
    resident = _resident_bytes()
    host = free_memory(torch.device("cpu")) + resident
    free = free_memory(ctx.device) if ctx.device.type == "cuda" else host
    return Room(
        on_cpu=ctx.device.type != "cuda",
        device_bytes=int(min((ctx.config.model.memory or 2**20) * GIB, free)),
        host_bytes=host,
        base=resident + work.host_bytes,
        model_bytes=model_bytes,
        dtype=ctx.dtype,
    )


def _resident_bytes() -> int:
    """Resident memory of this process; its peak on systems without /proc."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(peak_memory_gib() * GIB)
