"""`dualsft estimate`: memory, time and disk of every stage of Algorithm 1, before anything runs.

Sizes of weights, vectors and optimizer states follow from the model's shapes; what a batch takes is
measured on copies of one and two layers (`probe.py`); rows are counted and a sample of them is
tokenised (`workload.py`); the plan of the walks is the one that the run would choose (`plans.py`).
Where a stage does not fit, the settings that make it fit are tried and said. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from dualsft import config as settings
from dualsft.config import Config
from dualsft.context import RunContext, pass_settings
from dualsft.disk import free_bytes
from dualsft.fused import HALF_DTYPES
from dualsft.memory import free_memory
from dualsft.method import Job
from dualsft.model import empty_model, find_candidates, shallow_model, text_parameters
from dualsft.plans import GIB, Demand, Plan, choose, unmeasured
from dualsft.preflight import FOLDERS, STAGE_NAMES, check_paths, check_stage
from dualsft.probe import Memory, Probe, Trial, probe
from dualsft.progress import Reporter, peak_memory_gib
from dualsft.rundir import RunDir
from dualsft.stages.finetune import finetune_plan
from dualsft.stages.gradients import one_pass_wanted
from dualsft.stages.scores import NUM_ALONE, NUM_ALONE_HALF, kept_vectors
from dualsft.stages.selection import data_budget, param_budget
from dualsft.stages.warmup import warmup_plan
from dualsft.training_costs import Room, Training, finetune_cures, warmup_cures
from dualsft.vectors import accumulation_dtype
from dualsft.workload import Workload, survey

IO_BYTES = 1e9
"""Bytes a second that files are read and written with: a guess, and a small part of the time."""
FORWARDS = 4
"""Of the evaluation: both models, and their logits compared."""
TOPK_SECONDS = {"cuda": 1e-9, "cpu": 15e-9, "mps": 15e-9}
"""An entry in the selection: two readings of u ⊙ G (`topk.py`)."""


@dataclass(frozen=True)
class StageEstimate:
    """One line of the table; bytes and seconds."""

    name: str
    device_bytes: int
    """0 where the device is the CPU: then everything is in `host_bytes`."""
    host_bytes: int
    seconds: float
    disk_bytes: int
    note: str
    fits: bool = True
    cure: str = ""
    """Settings that make it fit, or what is needed when none does."""


@dataclass(frozen=True)
class Estimate:
    """Every stage, and what this machine has."""

    device: str
    device_memory: int
    """Bytes that the run may use; of the host where the device is the CPU."""
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
        """For JSON."""
        return asdict(self) | {"fits": self.fits, "disk_bytes": self.disk_bytes}


def estimate(
    config: Config,
    out: str | Path = "run",
    until: str | None = None,
    reporter: Reporter | None = None,
) -> Estimate:
    """What `dualsft run` would take with these settings; measures for some seconds."""
    settings.validate(config)
    check_paths(config)
    last = check_stage(until)
    ctx = RunContext(config, RunDir(Path(out)), reporter or Reporter())
    ctx.reporter.say("reading the data, and measuring copies of one and two layers …")
    return _Estimator(ctx).table(STAGE_NAMES.index(last))


class _Estimator:
    """One run's sizes, measurements and machine."""

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
        self.room = machine(ctx, self.model_bytes, self.work)
        self.probe: Probe = self._probe()
        if not self.room.on_cpu:  # the libraries that CUDA loads are in this process now
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
        """The stages up to number `last`."""
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
            disk_free=free_bytes(self.ctx.rundir.path.absolute()),
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
            work=self.work,
        )

    def _finetune(self) -> StageEstimate:
        disk = self.model_bytes
        if self._num_selected():
            disk += self._num_selected() * (4 + self.itemsize)
        steps = finetune_cures(self.config)
        return self._training("finetune", self._finetune_needs, steps, disk)

    def _num_selected(self) -> int:
        """Entries in the mask; none where every parameter is trained, or an adapter."""
        params = self.ctx.methods.load("params")
        if not params.entry.uses_budget:
            return 0
        return param_budget(self.ctx, params.eligible(Job(self.ctx, "params", Path())))

    def _num_trained(self) -> int:
        """Examples that fine-tuning sees in an epoch."""
        counts, data = self.work.counts, self.ctx.methods.load("data")
        num_pool = sum(counts[role] for role in data.pool_roles)
        if not data.entry.uses_budget:
            return num_pool
        return data_budget(self.ctx, self.work.num_full, num_pool)

    def _finetune_needs(self, config: Config) -> Training:
        whole = not self._num_selected()
        return Training(
            num_entries=self.num_trainable if whole else self._num_selected(),
            whole=whole,
            moments=config.finetune.moments,
            offload=False,
            memory=self.probe.warmup if whole else self.probe.finetune,
            plan=finetune_plan(replace(self.ctx, config=config)),
            num_examples=self._num_trained(),
            work=self.work,
        )

    def _training(
        self,
        name: str,
        needs: Callable[[Config], Training],
        cures: Iterator[tuple[str, Config]],
        disk: int,
    ) -> StageEstimate:
        """A training stage as it is set; when that does not fit, the first cure that does."""
        asked = needs(self.config)
        device, host, note = asked.peak(self.room)
        seconds = asked.seconds(self.probe) + self._io(self.model_bytes + disk)
        cure = ""
        if not self.room.fits(device, host):
            helps = (words for words, c in cures if self.room.fits(*needs(c).peak(self.room)[:2]))
            cure = next((f"set {words}" for words in helps), "")
        return self._stage(name, device, host, seconds, disk, note, cure)

    def _gradients(self) -> StageEstimate:
        one_pass, counts = one_pass_wanted(self.ctx), self.work.counts
        warmed = warmup_plan(self.ctx).num_steps(counts["warm"]) > 0
        walks = [("v_new", self._direction(self._walk(False, self.probe.walk), 1), counts["val"])]
        if self.config.score.preservation == "cwsd" and warmed:
            found = self._walk(False, self.probe.cwsd, num_models=2)
            walks.append(("v_prior", self._direction(found, 2), counts["anchor"]))
        walks.append(("pool", self._walk(one_pass, self.probe.walk), counts["pool"]))
        wide = ("v_new", "v_prior", *(["pool"] if self.config.score.precision == "full" else []))
        seconds = sum(
            self._walk_seconds(plan, count) * (2 if self._fp32 and label in wide else 1)
            for label, (plan, _, _), count in walks
        )
        if len(walks) == 3:  # the teacher looks at the anchors as well
            num_batches, tokens = self.work.batches(counts["anchor"], self.ctx.batch_tokens)
            line = self.probe.forward_seconds
            seconds += num_batches * line.fixed + tokens * line.slope
        disk = 3 * self.vector_bytes
        device = max(found[1] for _, found, _ in walks)
        host = max(found[2] for _, found, _ in walks)
        plan = walks[-1][1][0]
        return self._walked(
            "gradients", plan, device, host, seconds + self._io(2 * disk + self.model_bytes), disk
        )

    @property
    def _fp32(self) -> bool:
        """Whether the walks over D_val and D_anchor have fp32 weights (`precision.py`)."""
        return self._half and self.config.score.precision != "half"

    def _direction(self, found: tuple[Plan, int, int], num_models: int) -> tuple[Plan, int, int]:
        """A walk for v_new or v_prior: fp32 weights where they fit."""
        plan, device, host = found
        wider = device + num_models * self.model_bytes
        return plan, wider if self._fp32 and self.room.fits(wider) else device, host

    def _scores(self) -> StageEstimate:
        disk = len(kept_vectors(self.ctx)) * self.vector_bytes
        wanted = self.ctx.methods.scored("data")
        seconds = self._io(self.model_bytes + 4 * self.vector_bytes + disk)
        if one_pass_wanted(self.ctx) or not wanted:
            device = self._alone() + self._at_hand(self.vector_bytes)
            line, tokens = self.probe.step_seconds, self.work.lengths.mean()
            count = NUM_ALONE_HALF if self._half else NUM_ALONE
            seconds += count * (line.fixed + tokens * line.slope) if wanted else 0
            return self._stage("scores", device, 0, seconds, disk, "from the pool pass")
        plan, device, host = self._walk(True, self.probe.walk, sums=False)
        seconds += self._walk_seconds(plan, self.work.counts["pool"])
        return self._walked("scores", plan, device, host, seconds, disk)

    def _selection(self) -> StageEstimate:
        chosen = self._num_selected()
        device = self.model_bytes + 2 * self._at_hand(self.vector_bytes)
        if self._half and self.ctx.methods.scored("data"):  # what is scored again
            device = max(device, self._alone() + self.vector_bytes)
        seconds = self.num_candidates * TOPK_SECONDS[self.ctx.device.type]
        seconds += self._io(self.model_bytes + 4 * self.vector_bytes)
        subset = int(self.work.num_bytes * min(1.0, self._share_selected()))
        note = f"k = {chosen:,}" if chosen else "all parameters"
        methods = self.ctx.methods
        own = [e.name for axis, e in methods.entries.items() if not methods.scored(axis)]
        own = [name for name in own if name not in ("all", "random")]
        if own:
            note += f"; the passes of {', '.join(own)} are not counted"
        return self._stage("selection", device, 16 * chosen, seconds, 8 * chosen + subset, note)

    @property
    def _half(self) -> bool:
        return self.ctx.dtype in HALF_DTYPES

    def _alone(self) -> int:
        """One example by plain autograd: the model, in half precision widened to fp32, and what its
        activations take then."""
        lean = self.probe.walk.recomputed if not self.room.on_cpu else None
        activations = lean or self.probe.walk.kept
        batch = int(activations.at(self.work.longest.num_tokens)) if activations else 0
        return (2 if self._half else 1) * (self.model_bytes + batch)

    def _share_selected(self) -> float:
        if not self.ctx.methods.entries["data"].uses_budget:
            return 0.0
        return self._num_trained() / self.work.num_full

    def _evaluation(self) -> StageEstimate:
        asked, num_sets = self.config.evaluation, 1 + len(self.config.evaluation.files)
        val = self.work.counts["val"]
        rows = num_sets * (min(val, asked.limit) if asked.limit else val)
        tokens, longest = asked.batch_tokens or self.ctx.batch_tokens, self.work.longest.num_tokens

        def peak(tokens: int) -> int:
            return 2 * self.model_bytes + 2 * int(self.probe.forward.at(tokens))

        while tokens > longest and not self.room.fits(peak(tokens)):
            tokens = max(longest, tokens // 2)  # as the stage does by itself
        num_batches, padded = self.work.batches(rows, tokens)
        line = self.probe.forward_seconds
        seconds = FORWARDS * (num_batches * line.fixed + padded * line.slope)
        seconds += self._io(2 * self.model_bytes)
        note = f"{tokens:,} tokens a batch"
        note += ", files taken to be as long as the validation" if num_sets > 1 else ""
        return self._stage("evaluation", peak(tokens), 0, seconds, 0, note)

    # --- walks ----------------------------------------------------------------------------------

    def _walk(
        self, direction: bool, memory: Memory, num_models: int = 1, sums: bool = True
    ) -> tuple[Plan, int, int]:
        """(the plan that a walk would take, its bytes on the device, in the host's memory)."""
        demand = Demand(
            shapes=self.shapes,
            held=num_models * self.model_bytes,
            sum_itemsize=self.wide if sums else 0,
            direction_itemsize=self.itemsize if direction else 0,
            longest=self.work.longest.num_tokens,
            kept=memory.kept,
            recomputed=memory.recomputed,
        )
        wishes, most = pass_settings(self.ctx).wishes, self.ctx.batch_tokens
        if self.room.on_cpu:
            plan = unmeasured(most, wishes, len(self.shapes))[0]
        else:
            free = max(0, self.room.host_bytes - self.room.base)
            plan = choose(demand, self.room.device_bytes, free, most, wishes)[0]
        activations = demand.activations(plan.checkpointing) or memory.recomputed
        tokens = max(plan.batch_tokens, demand.longest)
        vectors = demand.vectors(plan.placement, plan.num_groups)
        batch = int(activations.at(tokens)) if activations else self.room.device_bytes
        return plan, demand.held + vectors + batch, demand.host(plan.placement)

    def _walk_seconds(self, plan: Plan, count: int) -> float:
        num_batches, tokens = self.work.batches(count, max(1, plan.batch_tokens))
        line = self.probe.walk_seconds
        again = 4 / 3 if plan.checkpointing else 1.0
        return plan.num_groups * again * (num_batches * line.fixed + tokens * line.slope)

    def _walked(
        self, name: str, plan: Plan, device: int, host: int, seconds: float, disk: int
    ) -> StageEstimate:
        note, cure = plan.describe(), ""
        if not self.room.fits(device, host):
            score = self.config.score
            asked = score.plan != "auto" or score.checkpointing is False
            free = "leave score.plan and score.checkpointing to the run, " if asked else ""
            cure = f"{free}lower data.max_length, or {self.room.larger(device, host)}"
        return self._stage(name, device, host, seconds, disk, note, cure)

    # --- room -----------------------------------------------------------------------------------

    def _at_hand(self, num_bytes: int) -> int:
        """A vector that is held on a GPU where there is room for it (`stages/chosen.py`)."""
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
        if name == "split":  # no model is loaded
            total = self.room.base + host
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
    """What is free here; a run begins with what this process holds now."""
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
    """What this process holds."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(peak_memory_gib() * GIB)
