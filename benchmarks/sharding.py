"""Overhead of sharding: FSDP2 on a single process against the plain model.

Algorithm 1 lines 3, 8 and 12. Runs the one-pass walk over the pool, and steps of restricted
fine-tuning, on the same model, rows and batches: plain, and wrapped by `fully_shard` over one
process (nccl on a GPU, gloo on a CPU). All collectives are then local copies, so the difference is
the bookkeeping and these copies.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.finetuning import BUDGET, ROWS, STEPS, TOKENS, WARMUPS
from benchmarks.measuring import Contender, Meter, Section, measure
from benchmarks.options import Options
from benchmarks.scoring import random_direction
from benchmarks.workload import build_model, fixed_examples, make_pool
from dualsft.data.examples import Example
from dualsft.distributed.world import joined, settled
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.memory.placement import blank
from dualsft.memory.plans import Wishes
from dualsft.model.load import find_candidates, load_model, text_parameters
from dualsft.model.sharded import load_sharded
from dualsft.system.progress import Reporter
from dualsft.train.loop import TrainingPlan, train
from dualsft.train.optimizer import make_optimizer

PLAIN, SHARDED = "as it is", "sharded over one process"
WALK, TUNING = "one-pass walk", "restricted fine-tuning"
GOAL = 1.05


def run(options: Options) -> Section:
    """Measure both workloads on both forms of the model; returns ratios and goals."""
    meter = Meter(options.device)
    with tempfile.TemporaryDirectory() as name, _world_of_one(), joined(options.on_gpu):
        model = build_model(options.model, options.device)
        pool = make_pool(options.rows, model.config.vocab_size, 160 if options.quick else None)
        tokens = 32 if options.quick else TOKENS[options.device.type]
        rows = fixed_examples(ROWS, tokens, model.config.vocab_size)
        model.save_pretrained(name)
        del model
        contenders = {
            f"{work}, {form}": _contender(options, Path(name), form, work, pool, rows)
            for work in (WALK, TUNING)
            for form in (PLAIN, SHARDED)
        }
        found, skipped = measure(meter, contenders, rounds=options.rounds, warmups=WARMUPS)
    conditions = {
        "model": Path(options.model).name,
        "dtype": str(options.dtype).removeprefix("torch."),
        "rows": options.rows,
        "batch_tokens": options.batch_tokens,
        "micro_batch": f"{ROWS} x {tokens} tokens",
        "rounds": options.rounds,
    }
    section = Section("sharding", conditions, skipped=skipped)
    for name, measured in found.items():
        section.add(name, measured, per=STEPS if name.startswith(TUNING) else 1)
    for work in (WALK, TUNING):
        section.compare(work, f"{work}, {PLAIN}", lambda name, work=work: name.startswith(work))
        ratio = section.rows.get(f"{work}, {SHARDED}", {}).get("ratios", {}).get(f"time / {work}")
        if options.on_gpu:
            section.goal(f"{work}, sharded / plain, time", ratio, GOAL)
    return section


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Set the launcher's environment variables for a world of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    before = {key: os.environ.get(key) for key in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _contender(
    options: Options, folder: Path, form: str, work: str, pool: list[Example], rows: list[Example]
) -> Contender:
    @contextmanager
    def contender() -> Iterator[Any]:
        sharded = form == SHARDED
        load = load_sharded if sharded else load_model
        with settled(sharded=sharded, offload=False), ExitStack() as stack:
            model = load(folder, options.dtype, options.device)
            if work == WALK:
                yield _walking(options, model, pool)
            else:
                yield _tuning(model, rows, stack)

    return contender


def _walking(options: Options, model: PreTrainedModel, pool: list[Example]) -> Any:
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    direction, silent = random_direction(engine), Reporter(lambda _: None)
    settings = PassSettings(
        batch_tokens=options.batch_tokens,
        pad_id=0,
        padding_side="right",
        wishes=Wishes(placement="device", checkpointing=False, exact_batch=True),
    )
    objective = loss_objective(model)

    def call() -> None:
        sums = blank(engine.candidates, engine.candidates.dtype)
        walk(
            engine,
            pool,
            objective,
            settings,
            silent,
            "walk",
            sums=sums,
            direction=direction,
            bounds=True,
        )

    return call


def _tuning(model: PreTrainedModel, rows: list[Example], stack: ExitStack) -> Any:
    """Training steps with every twentieth entry selected: as many indices as a 5 % budget."""
    every = round(1 / BUDGET)
    candidates = find_candidates(model, "block_linear")
    indices = {name: torch.arange(0, p.numel(), every) for name, p in candidates.items()}
    optimizer = make_optimizer(model, text_parameters(model), indices, lr=1e-5)
    stack.enter_context(optimizer)
    plan = TrainingPlan(
        lr=1e-5,
        epochs=STEPS,
        batch_size=len(rows),
        warmup_ratio=0.0,
        max_grad_norm=1.0,
        micro_batch_size=len(rows),
        batch_tokens=1 << 20,
        seed=0,
        pad_id=0,
        padding_side="right",
        checkpointing=True,
    )
    return lambda: train(model, rows, optimizer, plan, Reporter(lambda _: None), "fine-tuning")
