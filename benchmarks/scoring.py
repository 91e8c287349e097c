"""Cost of scoring: each walk over the pool against one plain training epoch.

Algorithm 1 lines 3, 5, 6 and 8. The reference is the plain epoch: Hugging Face forward with labels
and backward into `.grad` for every parameter, same rows, same length-bucketed batches, at the best
of several batch sizes. Measured walks: one-pass (G, s_D and the certificate's sums), one-pass
without the certificate, the walk of the calibrated form (G and a sketch of each gradient; sketches
alone, of all blocks or of the last ones), both walks of two-pass mode (the first is also the walk
for v_new), and CWSD with a separate teacher. Peak memory includes the model and the vectors of the
walk, placed by the plan (`score.plan`): the default plan for all walks, smaller plans for the
one-pass walk. The preparation before the first batch (trial batches, pinned memory, computing and
moving U) does not depend on the pool size; its time is reported separately.

FLOPs are the mathematically required ones (`workload.Size.flops`): recomputation and padding add
time but not FLOPs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measuring import (
    Contender,
    Measured,
    Meter,
    Section,
    Untimed,
    measure,
    product_rate,
)
from benchmarks.options import Options
from benchmarks.workload import Size, build_model, make_pool
from dualsft.algorithm.calibration import sketch_with
from dualsft.config.settings import ScoreConfig
from dualsft.data.examples import Batch, Example, collate, make_batches
from dualsft.engine.fused import fused_blocks
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import HeadObserver
from dualsft.engine.walk import PassSettings, cwsd_objective, loss_objective, walk
from dualsft.memory.placement import blank
from dualsft.memory.plans import GIB, Wishes
from dualsft.model.load import find_candidates
from dualsft.storage.vectors import CHUNK, LazyVector, ParamVector
from dualsft.system.progress import Reporter

PLAIN_TOKENS = {"cpu": (256, 512, 1024), "cuda": (4096, 8192, 16384, 32768)}
PLAIN = "plain epoch"
ONE_PASS = "one pass: G, s_D, certificate"
SKETCHED = "calibrated: G and sketches"
ALONE = "calibrated: sketches alone"
FIRST, SECOND, BOTH = "two-pass, first: G (and v_new)", "two-pass, second: s_D", "two-pass, both"
CWSD = "CWSD, teacher and student"
SMALL_BYTES = 22e9
SMALL = f"{ONE_PASS}, within {SMALL_BYTES / 1e9:.0f} GB"


@dataclass(frozen=True)
class Walk:
    """What a walk computes, its number of products, and the requested plan."""

    products: float
    """Products per candidate entry and token."""
    sums: bool = False
    direction: bool = False
    bounds: bool = False
    distil: bool = False
    sketch: bool = False
    layers: int | float = 1.0
    """The blocks that are sketched, as score.sketch_layers."""
    wishes: Wishes = Wishes()

    @property
    def head_products(self) -> int:
        """Products per head entry and label: forward, input gradient, teacher's forward."""
        return 2 + self.distil


FULL = Walk(4, sums=True, direction=True, bounds=True)
WALKS = {
    ONE_PASS: FULL,
    "one pass without the certificate": Walk(4, sums=True, direction=True),
    SKETCHED: Walk(3, sums=True, sketch=True),
    ALONE: Walk(2, sketch=True),
    f"{ALONE}, last half": Walk(1.5, sketch=True, layers=0.5),
    f"{ALONE}, last quarter": Walk(1.25, sketch=True, layers=0.25),
    f"{ALONE}, last block": Walk(1, sketch=True, layers=1),
    FIRST: Walk(3, sums=True),
    SECOND: Walk(3, direction=True),
    CWSD: Walk(4, sums=True, distil=True),
    f"{ONE_PASS}, plan host": replace(FULL, wishes=Wishes(placement="host")),
    f"{ONE_PASS}, plan blocks": replace(FULL, wishes=Wishes(placement="blocks")),
    f"{ONE_PASS}, recomputing": replace(FULL, wishes=Wishes(checkpointing=True)),
    SMALL: replace(FULL, wishes=Wishes(memory=SMALL_BYTES / GIB)),
}
GOALS = {ONE_PASS: 1.25, BOTH: 1.95}
MEMORY_GOALS = {ONE_PASS: 40e9, SMALL: SMALL_BYTES}
SHARE_GOAL = 0.55
SKETCH_GOAL = 1.15
"""Time of the calibrated form's walk over that of the paper's scores."""


def run(options: Options) -> Section:
    """Measure the walks; returns table, ratios and goals."""
    meter = Meter(options.device)
    rate, where = product_rate(meter, options.dtype, options.quick)
    model = build_model(options.model, options.device)
    pool = make_pool(options.rows, model.config.vocab_size, 160 if options.quick else None)
    size = Size.of(model, pool)
    sizes = PLAIN_TOKENS[options.device.type][: 2 if options.quick else None]
    contenders: dict[str, Contender] = {
        f"{PLAIN}, {tokens:,} tokens a batch": plain(model, pool, tokens) for tokens in sizes
    }
    plans: dict[str, Any] = {}
    for name, one in WALKS.items():
        if options.wanted(name) and (name != SMALL or options.on_gpu):
            contenders[name] = walking(options, model, pool, one, plans.setdefault(name, {}))
    rehearse = [name for name in contenders if name.startswith(PLAIN) or name in (ONE_PASS, CWSD)]
    found, skipped = measure(meter, contenders, rounds=options.rounds, rehearse=rehearse)
    section = Section("scoring", conditions(options, size, rate, where), skipped=skipped)
    _fill(section, found, size, rate, plans)
    sketched = section.rows.get(SKETCHED, {}).get("ratios", {}).get("time / one pass")
    section.goal(f"{SKETCHED}, time / one pass", sketched, SKETCH_GOAL)
    if options.on_gpu:
        _goals(section)
    return section


def conditions(options: Options, size: Size, rate: float, where: str) -> dict[str, Any]:
    return {
        "model": Path(options.model).name,
        "dtype": str(options.dtype).removeprefix("torch."),
        "rows": options.rows,
        "tokens": size.tokens,
        "label_tokens": size.label_tokens,
        "parameters": size.parameters,
        "candidate_entries": size.candidates,
        "batch_tokens": options.batch_tokens,
        "rounds": options.rounds,
        "product_rate": rate,
        "product_shape": where,
        "flops": "2 x (candidate entries x products x tokens + head entries x products x labels)",
    }


def _fill(
    section: Section, found: dict[str, Measured], size: Size, rate: float, plans: dict[str, Any]
) -> None:
    epochs = [name for name in found if name.startswith(PLAIN)]
    best = min(epochs, key=lambda name: found[name].fastest, default="none fits")
    section.conditions["reference"] = best
    for name, measured in found.items():
        section.add(name, measured, **plans.get(name, {}))
    if FIRST in found and SECOND in found:
        one, two = section.rows[FIRST], section.rows[SECOND]
        peaks = [row["peak_bytes"] for row in (one, two) if row["peak_bytes"]]
        section.rows[BOTH] = {
            "seconds": one["seconds"] + two["seconds"],
            "peak_bytes": max(peaks) if peaks else None,
        }
    section.compare("plain epoch", best)
    if ONE_PASS in section.rows:
        section.compare("one pass", ONE_PASS, lambda name: name == SKETCHED)
    for name, row in section.rows.items():
        work = _flops(name, size)
        row["figures"] = {
            "tok/s": round(size.tokens / row["seconds"]),
            "share of the product rate": work / row["seconds"] / rate,
        }


def _goals(section: Section) -> None:
    for name, limit in GOALS.items():
        ratio = section.rows.get(name, {}).get("ratios", {}).get("time / plain epoch")
        section.goal(f"{name}, time / plain epoch", ratio, limit)
    for name, limit in MEMORY_GOALS.items():
        section.goal(f"{name}, peak bytes", section.rows.get(name, {}).get("peak_bytes"), limit)
    share = section.rows.get(ONE_PASS, {}).get("figures", {}).get("share of the product rate")
    section.goal(f"{ONE_PASS}, share of the product rate", share, SHARE_GOAL, at_least=True)


def _flops(name: str, size: Size) -> float:
    if name in WALKS:
        return size.flops(WALKS[name].products, WALKS[name].head_products)
    if name == BOTH:
        return _flops(FIRST, size) + _flops(SECOND, size)
    return size.flops(3, 3, every_logit=True)  # plain epoch: forward, input and weight gradients


def plain(model: PreTrainedModel, pool: list[Example], batch_tokens: int) -> Contender:
    """Forward with labels, backward into .grad: a training epoch without the optimizer."""

    def epoch() -> None:
        for rows in make_batches(pool, batch_tokens):
            batch = collate([pool[i] for i in rows], 0, "right", model.device)
            model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
            ).loss.backward()

    @contextmanager
    def contender() -> Iterator[Any]:
        model.requires_grad_(True)
        try:
            yield epoch
        finally:
            model.zero_grad(set_to_none=True)

    return contender


def walking(
    options: Options, model: PreTrainedModel, pool: list[Example], what: Walk, seen: dict[str, Any]
) -> Contender:
    """One walk with its vectors; its plan and preparation time are stored in `seen`.

    CWSD adds a teacher. The time before the first batch is not counted.
    """

    @contextmanager
    def contender() -> Iterator[Any]:
        engine = GhostEngine(model, find_candidates(model, "block_linear"))
        collected: dict[str, Any] = {"bounds": what.bounds}
        if what.direction:
            collected["direction"] = random_direction(engine)
        if what.sketch:
            dim = ScoreConfig().sketch_dim
            collected["sketch"] = sketch_with(engine, dim, 0, "block_linear", what.layers)
        teacher = build_model(options.model, options.device) if what.distil else None
        inner = cwsd_objective(teacher, model, 1.0) if teacher else loss_objective(model)
        began: list[float] = []

        def objective(batch: Batch, observer: HeadObserver | None) -> tuple[Tensor, Tensor]:
            if "plan" in seen and not began:  # trial batches run before the plan is set
                began.append(time.perf_counter())
            return inner(batch, observer)

        settings = PassSettings(
            batch_tokens=options.batch_tokens,
            pad_id=0,
            padding_side="right",
            wishes=what.wishes,
            note=lambda _, plan, memory: seen.update(plan=plan.facts()),
        )

        def call() -> Untimed:
            seen.pop("plan", None)
            began.clear()
            if what.sums:
                collected["sums"] = blank(engine.candidates, engine.candidates.dtype)
            start = time.perf_counter()
            walk(engine, pool, objective, settings, Reporter(_only_warnings), "walk", **collected)
            seen["preparing_seconds"] = began[0] - start
            return Untimed(began[0] - start)

        with fused_blocks(teacher, wide=True) if teacher else nullcontext():
            yield call

    return contender


def _only_warnings(line: str) -> None:
    if line.startswith("warning"):
        print(f"  {line}", flush=True)


def random_direction(engine: GhostEngine) -> LazyVector:
    """U as in a run, a lazy vector over the candidates; one random piece is repeated."""
    piece = torch.randn(CHUNK, device=engine.device) * 1e-3
    forms = ParamVector(engine.candidates).forms

    def compute(name: str, start: int, stop: int, _: Any) -> Tensor:
        count = stop - start
        return piece[:count] if count <= CHUNK else piece.repeat(-(-count // CHUNK))[:count]

    return LazyVector(forms, engine.device, compute)
