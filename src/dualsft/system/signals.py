"""Signal handling: SIGTERM and Ctrl-C stop a run cleanly, after saving its progress.

Outside the long loops a signal raises `Interrupted` immediately, which is safe because every write
is atomic (`runs/folder.py`). Inside a loop, under `deferred`, the signal stays pending until the
end of the current step or batch; `storage/resume.py` then saves the state and raises. A second
signal raises immediately. The command line turns `Interrupted` into exit code 128 + signal: 130
and 143. Not part of Algorithm 1.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupted(BaseException):
    """The process was asked to stop. A BaseException, so `except Exception` does not catch it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.saved = ""
        """Description of what was saved before stopping; empty if nothing was saved."""

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


class _State:
    """State shared by the handler and the loops. Python runs handlers in the main thread only."""

    depth = 0
    pending: int | None = None


def pending() -> bool:
    """Whether a signal is pending until the end of the current step."""
    return _State.pending is not None


def stop(saved: str = "", anyway: bool = False) -> None:
    """Raise the pending signal, if any; `anyway` stops because another process got the signal."""
    if _State.pending is None and anyway:
        _State.pending = signal.SIGTERM
    if _State.pending is not None:
        interrupted = Interrupted(_State.pending)
        interrupted.saved = saved
        _State.pending = None
        raise interrupted


@contextmanager
def deferred() -> Iterator[None]:
    """Defer signals in a loop that checks `pending` after every step."""
    _State.depth += 1
    try:
        yield
    finally:
        _State.depth -= 1
    if _State.depth == 0:
        stop()


@contextmanager
def handled() -> Iterator[None]:
    """Install the handlers; signals that the parent process ignores (nohup) stay ignored."""
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


def release() -> None:
    """Let signals end the process at once, without a traceback; ignored ones stay ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def end_with_parent() -> None:
    """Let Linux send SIGTERM to this process when its parent dies, so that none is orphaned."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    if _State.depth and _State.pending is None:
        _State.pending = number
        return
    raise Interrupted(number)
