"""The solve of the calibrated scores: time and memory for pools of 3,000 to 100,000 examples.

`algorithm/calibration.py`: F from the sketches, ρ from halves of D_val, the scores. The sketches
are random rows that share a few directions, so the choice of ρ has something to find. Those of a
large pool are in a mapped file, as in a run; its pages are counted apart from the memory that the
process holds itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import Contender, Meter, Section, measure
from benchmarks.options import Options
from dualsft.algorithm.calibration import calibrate
from dualsft.engine.sketch import SketchRows

COUNTS = {"cpu": (3_000, 100_000), "cuda": (3_000, 20_000, 100_000)}
DIMS = {"cpu": 4_096, "cuda": 16_384}  # at 16,384 two CPU cores take ten minutes for F alone
NUM_VAL = 256
SHARED = 64  # directions that rows have in common


def run(options: Options) -> Section:
    """One row per pool size."""
    kind = options.device.type
    counts, dim = ((40, 300), 64) if options.quick else (COUNTS[kind], DIMS[kind])
    held: dict[str, int] = {}
    contenders: dict[str, Contender] = {
        _name(count): _contender(options, count, dim, held) for count in counts
    }
    meter = Meter(options.device)
    found, skipped = measure(meter, contenders, rounds=1)
    conditions = {"numbers per sketch": dim, "validation examples": NUM_VAL}
    section = Section("solve of the calibrated scores", conditions, skipped=skipped)
    for name, measured in found.items():
        section.add(name, measured, held_bytes=held[name])
    section.compare(_name(counts[0]), _name(counts[0]))
    return section


def _name(count: int) -> str:
    return f"{count:,} examples"


def _contender(options: Options, count: int, dim: int, held: dict[str, int]) -> Contender:
    @contextmanager
    def contender() -> Iterator[Any]:
        pool, val = rows(count, dim, 0), rows(NUM_VAL, dim, 1)

        def call() -> None:
            with _anonymous() as peak:
                calibrate(pool, val, 0, options.device)
            held[_name(count)] = max(peak)

        yield call

    return contender


def rows(count: int, dim: int, seed: int) -> SketchRows:
    """Random sketches, each near one of a few shared directions."""
    rng, made = np.random.default_rng(seed), SketchRows(count, dim)
    shared = np.random.default_rng(7).standard_normal((SHARED, dim), dtype=np.float32)
    for start in range(0, count, 2_000):
        stop = min(start + 2_000, count)
        noise = rng.standard_normal((stop - start, dim), dtype=np.float32)
        made.add(range(start, stop), noise + shared[rng.integers(0, SHARED, stop - start)])
    return made


@contextmanager
def _anonymous() -> Iterator[list[int]]:
    """Samples of the memory that is not backed by a file, over the memory at the start; empty
    where the system does not tell."""
    status, done, samples = Path("/proc/self/status"), threading.Event(), [0]

    def now() -> int:
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) << 10 for line in lines if "RssAnon" in line), 0)

    start = now()

    def sample() -> None:
        while not done.wait(0.05):
            samples.append(now() - start)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
