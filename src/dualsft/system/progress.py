"""Progress reporting: units done, throughput, remaining time and peak memory.

The library never prints. A `Reporter` formats progress as lines of text and passes them to a
callback (the command line prints them) or to the `dualsft` logger, every few seconds. Given a
terminal, it shows bars of `rich.progress` instead. Not part of Algorithm 1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dualsft.system.paths import without_home
from dualsft.system.usage import peak_memory_gib

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("dualsft")

BAR = 12  # columns of a bar
RECORD_SECONDS = 5.0  # interval of progress records in metrics.jsonl

Show = Callable[[str, int], None]
"""Shows a line about a task, of which so many units are done."""


_BIDI = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_CONTROLS = {*range(32), *range(127, 160), 0x2028, 0x2029, *_BIDI} - {ord("\n"), ord("\t")}
_ESCAPES = {code: f"\\u{code:04x}" for code in _CONTROLS}


def escaped(text: str) -> str:
    """Text with control and direction characters written out, but for newlines and tabs.

    Messages and cards quote rows, names and settings, which neither a terminal nor a page must
    obey.
    """
    return text.translate(_ESCAPES)


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
    show: Show
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
    width: int | None = None
    """Columns of the terminal beside the bar; None: lines of a log."""

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
            self.show(self.line(now - self.started), self.done)
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
        """The state in words; shortened to `width`, the less important parts first."""
        state = self.state(elapsed)
        rate = self.tokens / max(elapsed, 1e-9)
        left = clock(float(state["remaining_time"]))
        parts = {
            "done": f"{self.label}: {self.done:,}/{self.total:,} {self.unit}",
            "percent": f" ({100 * self.done / max(1, self.total):.0f} %)",
            "loss": self.extra,
            "rate": f" · {rate:,.0f} tok/s" if self.tokens else "",
            "spent": f" · {clock(elapsed)} spent",
            "left": f" · {left} left" if self.done < self.total else "",
            "peak": f" · peak {peak_memory_gib():.2f} GiB",
        }
        for name in ("spent", "percent", "peak", "rate"):
            if self.width and len("".join(parts.values())) > self.width and self.done < self.total:
                del parts[name]
        return "".join(parts.values())


NOTE = "note"
"""Code of a warning without an entry in `lab/report/pages/warnings.yaml`."""


class Reporter:
    """Receives messages, warnings and progress of a run; bars are shown on the given terminal."""

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        terminal: Console | None = None,
        interval: float = 5.0,
    ) -> None:
        self._write = write or log.info
        self._warn = write or log.warning
        self.interval = interval
        self.warnings: list[str] = []
        self.codes: dict[str, str] = {}
        """The code of each warning: reports look up what it means and its cure."""
        self.metrics: Callable[..., None] | None = None
        self._bars = None
        if terminal is not None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars

            text = TextColumn("{task.description}", markup=False)
            self._bars = Bars(
                BarColumn(BAR), text, console=terminal, auto_refresh=False, transient=True
            )

    def say(self, message: str) -> None:
        self._write(message)

    def warn(self, message: str, code: str = NOTE) -> None:
        """Log a warning and keep it, with its code, for the stage's manifest and the report."""
        message = without_home(message)
        self.warnings.append(message)
        self.codes[message] = code
        self._warn(f"warning: {message}")

    @contextmanager
    def track(self, label: str, total: int, unit: str, done: int = 0) -> Iterator[Progress]:
        """Track `total` units of work, of which `done` were completed by an earlier process."""
        if done:
            self.say(f"{label}: resuming after {done:,} of {total:,} {unit}")
        with self._display(label, total) as (show, interval):
            task = Progress(label, total, unit, show, self.metrics, interval)
            task.done = task.begun = done
            if self._bars is not None:
                task.width = self._bars.console.width - BAR - 2
            yield task

    @contextmanager
    def _display(self, label: str, total: int) -> Iterator[tuple[Show, float]]:
        """How and how often to show the state of one task: as lines, or as a bar."""
        bars = self._bars
        if bars is None:
            yield lambda line, done: self._write(line), self.interval
            return
        bars.start()
        task = bars.add_task(escaped(label), total=total)

        def show(line: str, done: int) -> None:
            if done >= total:
                self._write(line)  # stays above the bars
            else:
                bars.update(task, completed=done, description=escaped(line), refresh=True)

        try:
            yield show, 0.2
        finally:
            bars.remove_task(task)
            if not bars.tasks:  # tracked tasks may be nested
                bars.stop()


def silent() -> Reporter:
    """A reporter that shows nothing, for work inside other work."""
    return Reporter(lambda _: None)
