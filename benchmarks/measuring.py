"""Seconds, bytes, the machine, and the record they are written to.

Contenders are measured in turn, several rounds of each, and the fastest counts: a busy moment of
the machine hits one round of one contender and not the ratio. A contender is a context manager:
what it sets up is in the peak (weights, vectors, optimizer state) but not in the seconds, and what
it leaves behind on a GPU would be charged to the next, so that is said.

Peak memory is the most that was allocated on a GPU. On a CPU it is the resident high-water mark of
the process, which Linux lets a process reset, less what the process held before the model was made.
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

from dualsft.system.peak_memory import PeakMemory
from dualsft.system.usage import give_back, is_out_of_memory

Contender = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Sets up what is needed and yields the call to be timed."""

PACKAGES = ("torch", "transformers", "peft", "triton", "dualsft")
_LEFT_BEHIND = 128 << 20  # workspaces of the libraries stay


@dataclass
class Measured:
    """One contender: the seconds of every timed call, and the peaks of its setup and calls."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """While it was called; everything that was held is in it."""
    setup_bytes: int | None = None
    """While it was set up."""

    @property
    def fastest(self) -> float:
        return min(self.seconds)


@dataclass(frozen=True)
class Untimed:
    """What a call may return: seconds of it that are not to count, and why."""

    seconds: float


class Meter:
    """Clock and memory of one device; `floor` is what the process holds without any model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.release()
        with PeakMemory() as now:
            pass
        self.floor = now.rss_bytes

    def release(self) -> None:
        """Give back what nobody holds."""
        give_back(self.device)
        if self.device.type == "cpu" and platform.system() == "Linux":
            ctypes.CDLL(None).malloc_trim(0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self, memory: PeakMemory) -> int | None:
        """Its bytes on this device; None where the system does not tell."""
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
    """All contenders in turn, `rounds` times: (what was measured, why some were not).

    Each round sets a contender up, calls it `warmups` times untimed and `calls` times timed. Those
    in `rehearse` have a round before the others whose seconds do not count. What a round gave is
    said at once, so that it is not lost when the rest takes too long.
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
    """Most floating-point operations a second that a large product reaches here, and its shape."""
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
    """What the figures were measured on."""
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
    """The kernel driver's version, where the system shows it."""
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
    """One benchmark's figures. Every row has its raw numbers and, by reference, its ratios."""

    title: str
    conditions: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, measured: Measured, per: int = 1, **more: Any) -> None:
        """A measured row; `per` divides the seconds (calls inside one timed call)."""
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
        """Ratios of time and memory to one row, under `label`."""
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
        """A figure against what it should be; None says that it was not measured."""
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
