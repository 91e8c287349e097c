"""Asked to stop: SIGTERM and Ctrl-C end a run cleanly, with its progress saved.

Outside of the long loops a signal ends the work at once, by an `Interrupted` that unwinds it (every
write is whole or absent, see `runs/folder.py`). Inside a loop, under `deferred`, it waits for the
end of the current step or batch; `storage/resume.py` then saves the state and raises. A second
signal does not wait. The command line turns `Interrupted` into exit code 128 + signal: 130 and
143. It belongs to no line of Algorithm 1.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)

SAVING = threading.Event()
"""Set while progress is being saved: whoever watches this process leaves it the time."""


class Interrupted(BaseException):
    """The process was asked to stop; not an error, so nothing but the command line catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.saved = ""
        """What was saved before stopping, in words; empty when nothing had to be."""

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


class _State:
    """What the handler and the loops share: a signal is handled in the main thread alone."""

    depth = 0
    pending: int | None = None


def pending() -> bool:
    """Whether a signal waits for the end of the current step."""
    return _State.pending is not None


def stop(saved: str = "", anyway: bool = False) -> None:
    """Raise the signal that waits, if one does; `anyway`: another process was given it."""
    if _State.pending is None and anyway:
        _State.pending = signal.SIGTERM
    if _State.pending is not None:
        interrupted = Interrupted(_State.pending)
        interrupted.saved = saved
        _State.pending = None
        raise interrupted


@contextmanager
def deferred() -> Iterator[None]:
    """A loop that looks at `pending` itself after every step."""
    _State.depth += 1
    try:
        yield
    finally:
        _State.depth -= 1
    if _State.depth == 0:
        stop()


@contextmanager
def handled() -> Iterator[None]:
    """Take the signals over; those that the parent process had ignored (nohup) stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, _on_signal)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
        _State.pending = None


def _on_signal(number: int, _frame: FrameType | None) -> None:
    if _State.depth and _State.pending is None:
        _State.pending = number
        return
    raise Interrupted(number)
