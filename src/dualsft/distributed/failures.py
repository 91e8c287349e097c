"""Failures of a run with several processes: which process is to blame, and one message about it.

torchrun's agent watches its processes. When one dies or fails, it stops the others (SIGTERM, and
SIGKILL after 30 s) and ends the job; `dualsft run --gpus N` is torchrun too. Collectives have a
finite timeout (`collective_timeout`), which ends a job in which a process hangs.

The survivors see no more than a broken collective. `ExitNotes` finds the process at fault: each
process that leaves with an error writes a note with the reason to the store of the process group.
A process whose collective broke waits a few seconds for the notes of the others. A peer that wrote
its own error is to blame; else the peers that wrote nothing: they died, hang or are disconnected.
Not part of Algorithm 1.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

from dualsft.errors import ConfigError, DualsftError, RunError
from dualsft.system import signals
from dualsft.system.signals import Interrupted

EXIT_LOST = 75
"""Exit code of a process that ends because of another one (EX_TEMPFAIL: try again)."""
COLLECTIVE_TIMEOUT = 3600.0
"""Seconds that a collective waits for all processes. Long, because some phases run on rank 0 only
(split, writing the model) while the others wait; a process that dies is noticed by the agent at
once. Environment: DUALSFT_COLLECTIVE_TIMEOUT."""
NOTE_TIMEOUT = 5.0
"""Seconds to wait for the notes of the other processes."""
HOST_GRACE = 1.0
"""Seconds that rank 0 stays for the others to read the notes, if it hosts the store itself."""
POLL = 0.05
RESUME = "run the same command again to resume from the last saved state"


class PeerLost(RunError):
    """Another process of the run died or failed, so this one cannot continue."""

    exit_code = EXIT_LOST
    reports = True
    """Whether this process prints the error: the first of those that noticed it."""


def collective_timeout() -> timedelta:
    """The timeout of collectives, from the environment or the default."""
    text = os.environ.get("DUALSFT_COLLECTIVE_TIMEOUT", f"{COLLECTIVE_TIMEOUT:g}")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(
            f"DUALSFT_COLLECTIVE_TIMEOUT: {text!r} in the environment; give seconds, such as "
            f"{COLLECTIVE_TIMEOUT:g}"
        )
    return timedelta(seconds=seconds)


def end_with_agent() -> None:
    """Let Linux send SIGTERM to this process if torchrun's agent dies, so that none is orphaned."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class ExitNotes:
    """The notes that the processes of a world leave in its store when they end with an error."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        store.set(f"name/{rank}", f"rank {rank} (process {os.getpid()} on {socket.gethostname()})")

    def explained(self, error: BaseException) -> BaseException:
        """Write the note of this process; return the error to raise, which names who is to blame.

        An error of this process is returned unchanged. A broken collective becomes `PeerLost`, or
        `Interrupted` if a peer received a signal.
        """
        result = error
        # The agent stops this process as soon as it sees that another one ended: explain it first.
        with suppress(Interrupted), signals.deferred():
            try:
                result = self._explained(error)
            except (RuntimeError, OSError):  # the store is hosted by the launcher or by rank 0
                if is_broken(error):
                    result = PeerLost(
                        "rank 0 or the launcher, which hosts the store of the processes, died or "
                        f"is disconnected; {RESUME}"
                    )
        return result

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, Interrupted | KeyboardInterrupt):
            self._leave(signum=error.signum if isinstance(error, Interrupted) else signal.SIGINT)
            return error
        if not is_broken(error):
            self._leave(failed=one_line(error))
            return error
        self._leave()
        _disconnect(error)
        notes = self._notes()
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(HOST_GRACE)
        failed = [rank for rank, note in notes.items() if "failed" in note]
        missing = [rank for rank in range(self._size) if rank not in notes]
        stopped = [note["signum"] for note in notes.values() if "signum" in note]
        if failed:
            text = f"{self._name(failed[0])} failed: {notes[failed[0]]['failed']}"
        elif missing and "timed out" in str(error).lower():
            text = (
                f"{self._names(missing)} did not join the others within "
                f"{collective_timeout().total_seconds():g} s: hung, or busy for longer (set "
                "DUALSFT_COLLECTIVE_TIMEOUT to more seconds)"
            )
        elif missing:
            text = f"{self._names(missing)} died, hangs or is disconnected"
        elif stopped:
            return Interrupted(stopped[0])
        else:
            return error
        lost = PeerLost(f"{text}; {RESUME}")
        witnesses = [rank for rank, note in notes.items() if not note]
        lost.reports = self._rank == min(witnesses) and 0 not in failed  # rank 0 prints its own
        return lost

    def _leave(self, **note: Any) -> None:
        self._store.set(f"left/{self._rank}", json.dumps(note))

    def _notes(self) -> dict[int, dict[str, Any]]:
        """Notes by rank: of all processes, or of those that wrote one within `NOTE_TIMEOUT`."""
        notes: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + NOTE_TIMEOUT
        while len(notes) < self._size and time.monotonic() < deadline:
            time.sleep(POLL)
            for rank in range(self._size):
                if rank not in notes and self._store.check([f"left/{rank}"]):
                    notes[rank] = json.loads(self._store.get(f"left/{rank}"))
        return notes

    def _name(self, rank: int) -> str:
        return self._store.get(f"name/{rank}").decode()

    def _names(self, ranks: list[int]) -> str:
        return " or ".join(self._name(rank) for rank in ranks[:8])


def _disconnect(error: BaseException) -> None:
    """Close the connections of this process, so that peers that wait for it notice the failure."""
    import torch.distributed as dist

    traceback.clear_frames(error.__traceback__)  # they keep the process group alive
    with suppress(Exception):  # only hastens what the end of this process does anyway
        dist.distributed_c10d._abort_process_group()


def is_broken(error: BaseException) -> bool:
    """Whether the error is one that a collective raises when a peer is lost or late."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return type(error) is RuntimeError and any(name in text for name in ("gloo", "NCCL", "nccl"))


def one_line(error: BaseException) -> str:
    """The message of an error in one line of at most 300 characters."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DualsftError) and text else f"{type(error).__name__}: {text}"
