"""Progress reporting: units done, throughput, remaining time and peak memory.

The library never prints. A `Reporter` formats progress as lines of text and passes them to a
callback (the command line prints them) or to the `dualsft` logger. On a terminal one line is
rewritten in place; otherwise a line is logged every few seconds. Not part of Algorithm 1.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("dualsft")

RECORD_SECONDS = 5.0  # interval of progress records in metrics.jsonl


def peak_memory_gib() -> float:
    """Peak memory of this process in GiB: GPU memory if CUDA is in use, else resident memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) / 2**20
    except OSError:
        pass
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def clock(seconds: float) -> str:
    """Format a duration as 1:05 or 2:03:40."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


@dataclass
class Progress:
    """Progress of one task with a known number of units."""

    label: str
    total: int
    unit: str
    show: Callable[[str, bool], None]
    record: Callable[..., None] | None = None
    interval: float = 5.0
    started: float = field(default_factory=time.monotonic)
    shown: float = 0.0
    recorded: float = 0.0
    done: int = 0
    begun: int = 0
    """Units completed before this process started."""
    tokens: int = 0
    extra: str = ""

    def advance(self, units: int, tokens: int = 0, loss: float | None = None) -> None:
        """Add finished units; show and record the state at most once per interval."""
        self.done += units
        self.tokens += tokens
        if loss is not None:
            self.extra = f" · loss {loss:.4f}"
        now = time.monotonic()
        last = self.done >= self.total
        if last or now - self.shown >= self.interval:
            self.shown = now
            self.show(self.line(now - self.started), last)
        if self.record is not None and (last or now - self.recorded >= RECORD_SECONDS):
            self.recorded = now
            self.record(**self.state(now - self.started))

    def state(self, elapsed: float) -> dict[str, float | str]:
        """The state as numbers, for metrics.jsonl."""
        here = self.done - self.begun
        remaining = elapsed / here * (self.total - self.done) if here else 0.0
        return {
            "work": self.label,
            "done": self.done,
            "total": self.total,
            "percentage": round(100 * self.done / max(1, self.total), 2),
            "elapsed_time": round(elapsed, 3),
            "remaining_time": round(remaining, 3),
            "tokens_per_second": round(self.tokens / max(elapsed, 1e-9), 1),
        }

    def line(self, elapsed: float) -> str:
        state = self.state(elapsed)
        rate = self.tokens / max(elapsed, 1e-9)
        speed = f" · {rate:,.0f} tok/s" if self.tokens else ""
        left = f" · {clock(float(state['remaining_time']))} left" if self.done < self.total else ""
        return (
            f"{self.label}: {self.done:,}/{self.total:,} {self.unit} "
            f"({100 * self.done / max(1, self.total):.0f} %){self.extra}{speed} · "
            f"{clock(elapsed)} spent{left} · peak {peak_memory_gib():.2f} GiB"
        )


NOTE = "note"
"""The code of a warning that explains itself; the others are keys of `lab/report/warnings.py`."""


class Reporter:
    """Receives messages, warnings and progress of a run."""

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        rewrite: Callable[[str, bool], None] | None = None,
        interval: float = 5.0,
    ) -> None:
        self._write = write or log.info
        self._warn = write or log.warning
        self._rewrite = rewrite
        self.interval = interval
        self.warnings: list[str] = []
        self.codes: dict[str, str] = {}
        """The code of each warning: reports look up what it means and its cure."""
        self.metrics: Callable[..., None] | None = None

    def say(self, message: str) -> None:
        self._write(message)

    def warn(self, message: str, code: str = NOTE) -> None:
        """Log a warning and keep it, with its code, for the stage's manifest and the report."""
        self.warnings.append(message)
        self.codes[message] = code
        self._warn(f"warning: {message}")

    @contextmanager
    def track(self, label: str, total: int, unit: str, done: int = 0) -> Iterator[Progress]:
        """Track `total` units of work, of which `done` were completed by an earlier process."""
        if done:
            self.say(f"{label}: resuming after {done:,} of {total:,} {unit}")

        def show(line: str, last: bool) -> None:
            if self._rewrite is not None:
                self._rewrite(line, last)
            else:
                self._write(line)

        interval = 0.2 if self._rewrite is not None else self.interval
        yield Progress(label, total, unit, show, self.metrics, interval, done=done, begun=done)
