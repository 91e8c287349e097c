"""What saved progress costs: a save against a step, its size against a full one, and hashing.

Restricted fine-tuning of 1 % of the block linears as a run does it, with and without a save after
every step, and full AdamW with saves. A save writes masters and moments, makes them durable and
hashes them. A run saves every `resume.every` seconds (60), and never for more than 5 % of its time.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.finetuning import random_indices
from benchmarks.measuring import Contender, Meter, Section, measure
from benchmarks.options import Options
from benchmarks.workload import build_model, fixed_examples
from dualsft.model.load import text_parameters
from dualsft.storage.manifest import sha256_file
from dualsft.storage.resume import MAX_SHARE, Pieces
from dualsft.system.progress import silent
from dualsft.train.loop import TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW

SHARE = 0.01
STEPS, ROWS, TOKENS = 3, 2, 512
EVERY = 60.0
PLAIN, SAVED, FULL = "1 %, no saves", "1 %, a save after each step", "full AdamW, the same"


class Timed(Pieces):
    """Notes the seconds of each save: the difference of two trainings is smaller than its noise."""

    seconds: ClassVar[list[float]] = []

    def save(self, *state: Any) -> bool:
        start = time.perf_counter()
        saved = super().save(*state)
        self.seconds.append(time.perf_counter() - start)
        return saved


def run(options: Options) -> Section:
    """Steps with and without saves, in one folder on the disk of temporary files."""
    meter = Meter(options.device)
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, Contender] = {
            PLAIN: _contender(options, None, SHARE, Pieces),
            SAVED: _contender(options, Path(folder) / "sparse.work", SHARE, Timed),
            FULL: _contender(options, Path(folder) / "full.work", None, Pieces),
        }
        found, skipped = measure(meter, contenders, rounds=options.rounds)
        sizes = {name: _largest(Path(folder) / name) for name in ("sparse.work", "full.work")}
        file = max(Path(folder).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        sha256_file(file)  # reads it once: the disk is not measured
        start = time.process_time()  # of one core, whatever else the machine does
        sha256_file(file)
        rate = file.stat().st_size / (time.process_time() - start) / 1e9
    conditions = {"model": Path(options.model).name, "rows": ROWS, "steps": STEPS}
    section = Section("saving", conditions, skipped=skipped)
    for name, measured in found.items():
        section.add(name, measured, per=STEPS)
    section.compare(PLAIN, PLAIN)
    if PLAIN in found and SAVED in found:
        step = section.rows[PLAIN]["seconds"]
        save = min(Timed.seconds)
        stall = save / (max(EVERY, save / MAX_SHARE) + save)
        section.rows[SAVED]["figures"] = {"a save / a step": save / step, "GB/s hashed": rate}
        section.goal("share of the time spent on saving, every 60 s", stall, MAX_SHARE)
    ratio = sizes["sparse.work"] / sizes["full.work"] if sizes["full.work"] else None
    section.goal("bytes of a save / one of full AdamW", ratio, 0.15)
    section.goal("GB/s hashed", rate, 1.0, at_least=True)
    return section


def _largest(folder: Path) -> int:
    return max((path.stat().st_size for path in folder.rglob("*.safetensors")), default=0)


def _contender(
    options: Options, folder: Path | None, share: float | None, kind: type[Pieces]
) -> Contender:
    """Training steps with saves into a folder; without a share every parameter is trained."""

    @contextmanager
    def setup() -> Iterator[Callable[[], object]]:
        model = build_model(options.model, options.device)
        tokens = 32 if options.quick else TOKENS
        examples = fixed_examples(ROWS * STEPS, tokens, model.config.vocab_size)
        indices = None if share is None else random_indices(model, share)
        named = text_parameters(model)
        optimizer = SparseAdamW(named, indices, lr=1e-5, free_gradients=True)
        plan = TrainingPlan(
            lr=1e-5,
            epochs=1,
            batch_size=ROWS,
            warmup_ratio=0.0,
            max_grad_norm=1.0,
            micro_batch_size=ROWS,
            batch_tokens=1 << 20,
            seed=0,
            pad_id=0,
            padding_side="right",
        )

        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # what the round before saved
        pieces = kind(folder, options.model, every=0.0 if folder else None)
        yield lambda: train(model, examples, optimizer, plan, silent(), "steps", pieces=pieces)

    return setup
