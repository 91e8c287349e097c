"""Launching several processes (`--gpus N`), and one message when one of them fails.

Once the settings are validated, `dualsft run --gpus N …` replaces its process (exec) by
`torchrun --standalone --nproc-per-node N -m dualsft run …`. The launcher is torchrun
(`torch.distributed.run`) without its log. It exits with the code of the process that failed first,
or with 128 + signal if it received one, as a single process does, and names processes that were
killed by a signal.

Under any launcher all processes execute the same command, and most errors occur on every rank.
Rank 0 prints the error; another rank waits a moment, in which the agent stops it if rank 0 failed
as well, and then prints its own, prefixed with `[rank N]`.

torchrun's agent watches its processes. When one dies or fails, it stops the others (SIGTERM, and
SIGKILL after 30 s) and ends the job. Collectives have a finite timeout (`collective_timeout`),
which ends a job in which a process hangs. The survivors see no more than a broken collective.
`ExitNotes` finds the process at fault: each process that leaves with an error writes a note with
the reason to the store of the process group. A process whose collective broke waits a few seconds
for the notes of the others. It blames a peer that wrote an error of its own; if there is none, the
peers that wrote nothing, which died, hang or are disconnected. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from dualsft.config.settings import Config
from dualsft.errors import ConfigError, DualsftError, RunError
from dualsft.system import signals as interrupt
from dualsft.system.signals import Interrupted

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables set by torchrun, accelerate launch and other torch launchers."""
EXIT_LOST = 75
"""Exit code of a process that ends because of another one (EX_TEMPFAIL: try again)."""
FOLLOWERS = (EXIT_LOST, 128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes of processes that ended because another one did."""
ANYWHERE = ("--quiet", "--verbose", "--debug")
"""Options of the command line that may stand anywhere."""
SAVING = 120
"""Seconds that the launcher waits for its processes to save progress when it is stopped."""
SHARED_ERROR = 5.0
"""Seconds that other ranks wait for rank 0 to print an error that they may share."""
AFTERWARDS = 20
"""A process that ends so many seconds after the first was ended by the agent."""
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


# --- rank and world size ------------------------------------------------------------------------


def launched(alone_too: bool = True) -> bool:
    """Whether a launcher started this process; `alone_too` includes a world of size 1."""
    given = all(name in os.environ for name in ENVIRONMENT)
    return given and (alone_too or os.environ["WORLD_SIZE"] != "1")


def size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def rank() -> int:
    """Rank of this process; 0 without a launcher."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def check_one_process(command: str) -> None:
    """Raise if the command does not support several processes."""
    if size() > 1:
        raise ConfigError(f"dualsft {command} runs in one process; start it without torchrun")


# --- error output -------------------------------------------------------------------------------


def report(error: BaseException, lines: Sequence[str], write: Callable[[str], None]) -> None:
    """Print why this process ends, unless rank 0 prints the same."""
    if size() == 1:
        for line in lines:
            write(line)
        return
    # The agent stops the other ranks as soon as one exits: defer signals until this is printed.
    with suppress(Interrupted), interrupt.handled(), interrupt.deferred():
        if _reported_elsewhere(error):
            return
        for line in lines:
            write(f"[rank {rank()}] {line}" if rank() else line)
        if not isinstance(error, PeerLost | Interrupted):
            _record(error)


def _reported_elsewhere(error: BaseException) -> bool:
    if isinstance(error, PeerLost):
        return not error.reports
    if rank() == 0 or isinstance(error, Interrupted):
        return rank() > 0
    # Most errors occur on all ranks: rank 0 prints it and exits, and the agent stops this one.
    deadline = time.monotonic() + SHARED_ERROR
    while not interrupt.pending() and time.monotonic() < deadline:
        time.sleep(0.05)
    return interrupt.pending()


def _record(error: BaseException) -> None:
    """Write the error to torchrun's error file, which torchrun shows in its summary."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with suppress(OSError):
            get_error_handler().record_exception(error)


# --- --gpus -------------------------------------------------------------------------------------


def spread(gpus: int | None, config: Config, say: Callable[[str], None]) -> None:
    """With --gpus N > 1, replace this process by the launcher; does not return then."""
    if gpus is not None and launched():
        raise ConfigError(
            f"--gpus: this process was started by a launcher (WORLD_SIZE="
            f"{os.environ['WORLD_SIZE']}); leave --gpus out, or start without torchrun"
        )
    if gpus is None or gpus == 1:
        return
    if on_cpu := check_gpus(gpus, config.model.device):
        say(on_cpu)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_each(gpus)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING))
    removed = [word for word in sys.orig_argv if word in ANYWHERE]  # from argv, by `cli.main`
    words = [*removed, *without_gpus(sys.argv[1:])]
    flags = ["--standalone", f"--nproc-per-node={gpus}", "-m", "dualsft"]
    sys.stdout.flush()
    sys.stderr.flush()
    # -m looks in the current folder first, and that may be a run folder with code in it
    os.environ["PYTHONSAFEPATH"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "dualsft.distributed.launch", *flags, *words])


def threads_each(processes: int) -> int:
    """Threads per process if the available cores are divided among `processes`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // processes)


def check_gpus(gpus: int, device: str) -> str:
    """Raise if there are fewer GPUs than processes; returns a note if they run on the CPU."""
    with interrupt.deferred():
        import torch
    count = torch.cuda.device_count()
    if device == "mps" or (device == "auto" and not count and torch.backends.mps.is_available()):
        raise ConfigError("--gpus: several processes need CUDA GPUs, or model.device=cpu")
    if device == "cpu" or (device == "auto" and not count):
        why = "model.device=cpu" if device == "cpu" else "this machine shows no GPU"
        return f"--gpus {gpus}: {gpus} processes on the CPU ({why})"
    if gpus > count:
        shown = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
        most = f"at most --gpus {count}, or " if count else ""
        raise ConfigError(
            f"--gpus: {gpus}, but this machine shows {shown}; use {most}model.device=cpu"
        )
    return ""


def without_gpus(words: Sequence[str]) -> list[str]:
    """Remove --gpus N from the arguments."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--gpus":
            next(rest, None)
        elif not word.startswith("--gpus="):
            kept.append(word)
    return kept


def launch(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments; returns the exit code of the job."""
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if "LOGLEVEL" not in os.environ:  # read by torchrun
        logging.disable(logging.ERROR)  # the processes report their own errors
    options = torchrun.parse_args(list(arguments))
    handled = getattr(options, "signals_to_handle", None)
    if handled is not None:  # keep signals ignored under nohup
        names = [name for name in handled.split(",") if not _is_ignored(name)]
        options.signals_to_handle = ",".join(names)
    try:
        torchrun.run(options)
    except SignalException as stopped:
        return 128 + stopped.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ChildFailedError as failed:
        return _exit_code(failed)
    return 0


def _is_ignored(name: str) -> bool:
    number = getattr(signal, name.strip(), None)
    return number is not None and signal.getsignal(number) is signal.SIG_IGN


def _exit_code(failed: Any) -> int:
    """Exit code of the process that failed first; reports processes that a signal killed."""
    first = min(failure.timestamp for failure in failed.failures.values())
    causes = {
        rank: failure
        for rank, failure in failed.failures.items()
        if failure.timestamp < first + AFTERWARDS  # later: killed by the agent
    }
    for rank, failure in causes.items():
        if failure.exitcode < 0 and failure.exitcode not in FOLLOWERS:
            name = failure.signal_name()
            sys.stderr.write(
                f"error: rank {rank} (process {failure.pid}) was killed by {name}"
                f"{_SIGNAL_CAUSES.get(name, '')}; {RESUME}\n"
            )
    code = min(causes.values(), key=lambda one: (one.exitcode in FOLLOWERS, one.timestamp)).exitcode
    return 128 - code if code < 0 else code


_SIGNAL_CAUSES = {
    "SIGKILL": " (by a user, or by the system: out of memory)",
    "SIGABRT": " (if NCCL timed out, see its message above: another process hangs)",
}


# --- failures -------------------------------------------------------------------------------------


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
        with suppress(Interrupted), interrupt.deferred():
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
        disconnect(error)
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


def disconnect(error: BaseException) -> None:
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


if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:]))
