"""Measurement of time and memory, the description of the machine, and the record of a section.

Contenders are measured alternately for several rounds and the fastest call counts, so that a short
disturbance of the machine does not affect the ratios. A contender is a context manager: its setup
(weights, vectors, optimizer state) counts towards peak memory but not time. GPU memory that it does
not free would be counted for the next contender, so it is reported.

Peak memory is peak allocated memory on a GPU. On a CPU it is the peak resident set size of the
process (which Linux allows to be reset), minus the size before the model was created.
"""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dualsft.system.usage import PeakMemory, give_back, is_out_of_memory

Contender = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Sets up its state and yields the call to be timed."""

PACKAGES = ("torch", "transformers", "peft", "triton", "dualsft")
_LEFT_BEHIND = 128 << 20  # library workspaces are not freed


@dataclass
class Measured:
    """Result of one contender: seconds of every timed call, peaks of its setup and calls."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """Peak during the calls, including everything allocated in the setup."""
    setup_bytes: int | None = None
    """Peak during the setup."""

    @property
    def fastest(self) -> float:
        return min(self.seconds)


@dataclass(frozen=True)
class Untimed:
    """Return value of a call with seconds to subtract from its time."""

    seconds: float


class Meter:
    """Clock and memory of one device; `floor` is the memory of the process without a model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.release()
        with PeakMemory() as now:
            pass
        self.floor = now.rss_bytes

    def release(self) -> None:
        """Free unreferenced memory."""
        give_back(self.device)
        if self.device.type == "cpu" and platform.system() == "Linux":
            ctypes.CDLL(None).malloc_trim(0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self, memory: PeakMemory) -> int | None:
        """Peak bytes on this device; None if the system does not provide it."""
        if self.device.type == "cuda":
            return memory.cuda_bytes
        return None if memory.since_start else max(0, memory.rss_bytes - self.floor)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def seconds(self, call: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        result = call()
        self.synchronize()
        took = time.perf_counter() - start
        return took - result.seconds if isinstance(result, Untimed) else took


def measure(
    meter: Meter,
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    warmups: int = 0,
    calls: int = 1,
    rehearse: Collection[str] = (),
    say: Callable[[str], None] = print,
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Measure all contenders alternately for `rounds` rounds: (results, reasons of skipped ones).

    Each round sets up a contender, calls it `warmups` times untimed and `calls` times timed.
    Contenders in `rehearse` get an additional untimed round first. Results are printed after every
    round, so that they are not lost if the rest takes too long.
    """
    measured = {name: Measured() for name in contenders}
    skipped: dict[str, str] = {}
    for number in range(rounds + bool(rehearse)):
        timed = number >= bool(rehearse)
        for name, contender in contenders.items():
            if name in skipped or not (timed or name in rehearse):
                continue
            meter.release() if meter.device.type == "cpu" else gc.collect()
            before = meter.allocated()
            try:
                one = _one_round(meter, contender, warmups, calls)
            except Exception as problem:
                if not is_out_of_memory(problem):
                    raise
                skipped[name] = "out of memory"
                say(f"  {name}: out of memory, left out")
                del measured[name]
                problem.__traceback__ = None
            else:
                _add(measured[name], one, timed)
                peak = "" if one.peak_bytes is None else f", peak {one.peak_bytes / 2**30:.2f} GiB"
                kind = "round" if timed else "rehearsal"
                say(f"  {kind}: {name}: {min(one.seconds):.3f} s{peak}")
            gc.collect()
            if name in skipped:
                meter.release()
            left = meter.allocated() - before
            if left > _LEFT_BEHIND:
                say(f"  {name} left {left / 2**20:,.0f} MiB behind: they are in the peaks below")
    return measured, skipped


def _one_round(meter: Meter, contender: Contender, warmups: int, calls: int) -> Measured:
    one = Measured()
    with ExitStack() as stack:
        with PeakMemory() as setup:
            call = stack.enter_context(contender())
            for _ in range(warmups):
                call()
            meter.synchronize()
        with PeakMemory() as called:
            one.seconds = [meter.seconds(call) for _ in range(calls)]
    one.setup_bytes, one.peak_bytes = meter.peak(setup), meter.peak(called)
    return one


def _add(total: Measured, one: Measured, timed: bool) -> None:
    if timed:
        total.seconds += one.seconds
    for key in ("peak_bytes", "setup_bytes"):
        peaks = [p for p in (getattr(total, key), getattr(one, key)) if p is not None]
        setattr(total, key, max(peaks) if peaks else None)


def product_rate(meter: Meter, dtype: torch.dtype, quick: bool = False) -> tuple[float, str]:
    """(highest FLOP/s of a large matrix product on this device, its shape)."""
    big = meter.device.type == "cuda"
    shapes = (
        [(8192, 8192, 8192), (16384, 8192, 3072), (16384, 4096, 4096), (16384, 16384, 16384)]
        if big
        else [(256, 256, 256)]
        if quick
        else [(1024, 1024, 1024), (512, 1536, 1536)]
    )
    best, where = 0.0, ""
    for m, k, n in shapes:
        a = torch.randn(m, k, device=meter.device, dtype=dtype)
        b = torch.randn(n, k, device=meter.device, dtype=dtype)
        repeats = 20 if big else 4

        def many(a: torch.Tensor = a, b: torch.Tensor = b, repeats: int = repeats) -> None:
            for _ in range(repeats):
                torch.mm(a, b.T)

        many()
        rate = 2.0 * m * k * n * repeats / min(meter.seconds(many) for _ in range(3))
        if rate > best:
            best, where = rate, f"{m} x {k} x {n}"
    return best, where


# --- the record --------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """Description of the machine."""
    facts: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _driver() -> str | None:
    """Version of the GPU driver, if available."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0].strip() if file.exists() else None


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


@dataclass
class Section:
    """Results of one benchmark: each row has raw numbers and its ratios to references."""

    title: str
    conditions: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, measured: Measured, per: int = 1, **more: Any) -> None:
        """Add a measured row; `per` divides the seconds (iterations inside one timed call)."""
        self.rows[name] = {
            "seconds": measured.fastest / per,
            "all_seconds": [s / per for s in measured.seconds],
            "peak_bytes": measured.peak_bytes,
            "setup_bytes": measured.setup_bytes,
            **more,
        }

    def compare(
        self, label: str, reference: str, only: Callable[[str], bool] | None = None
    ) -> None:
        """Add ratios of time and memory to one row, under `label`."""
        if reference not in self.rows:
            return
        base = self.rows[reference]
        for name, row in self.rows.items():
            if only is not None and not only(name):
                continue
            ratios = row.setdefault("ratios", {})
            ratios[f"time / {label}"] = row["seconds"] / base["seconds"]
            if row.get("peak_bytes") and base.get("peak_bytes"):
                ratios[f"memory / {label}"] = row["peak_bytes"] / base["peak_bytes"]

    def goal(self, what: str, value: float | None, limit: float, at_least: bool = False) -> None:
        """Compare a figure with its goal; None means not measured."""
        met = None if value is None else bool(value >= limit if at_least else value <= limit)
        self.goals.append(
            {"what": what, "value": value, "limit": limit, "at_least": at_least, "met": met}
        )

    def lines(self) -> list[str]:
        """The section as a table for the terminal."""
        shown = [f"== {self.title}"]
        shown += [f"   {key}: {value}" for key, value in self.conditions.items()]
        for name, row in self.rows.items():
            cells = []
            if "seconds" in row:
                cells.append(f"{1000 * row['seconds']:11,.1f} ms")
            if row.get("peak_bytes"):
                cells.append(f"{row['peak_bytes'] / 2**30:7.2f} GiB")
            cells += [f"{value:.3f} {key}" for key, value in row.get("ratios", {}).items()]
            cells += [f"{key} {_short(value)}" for key, value in row.get("figures", {}).items()]
            shown.append(f"   {name:<52} " + "  ".join(cells))
        shown += [f"   {name}: left out ({why})" for name, why in self.skipped.items()]
        for goal in self.goals:
            sign = ">=" if goal["at_least"] else "<="
            verdict = {True: "met", False: "NOT met", None: "not measured"}[goal["met"]]
            value = "-" if goal["value"] is None else _short(goal["value"])
            shown.append(f"   goal: {goal['what']} {sign} {goal['limit']}: {value}, {verdict}")
        return shown


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
