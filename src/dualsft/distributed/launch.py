"""Multi-process launch (`--gpus N`), and which rank prints an error under a launcher.

Once the settings are validated, `dualsft run --gpus N …` replaces its process (exec) by
`torchrun --standalone --nproc-per-node N -m dualsft run …`. The launcher is torchrun
(`torch.distributed.run`) without its log. It exits with the code of the process that failed first,
or with 128 + signal if it received one, as a single process does.

Under any launcher all processes execute the same command, and most errors occur on every rank.
Rank 0 prints the error; another rank prints its own, prefixed with `[rank N]`, only if it differs.
Not part of Algorithm 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dualsft.config.settings import Config
from dualsft.errors import ConfigError
from dualsft.system import signals as interrupt

FOLLOWERS = (75, 128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes of processes that ended because another one did (75: `heartbeat.EXIT_LOST`)."""
SAVING = 120
"""Seconds that the launcher waits for its processes to save progress when it is stopped."""
SAID = "said"
"""Store key under which rank 0 publishes the error that it printed."""
FIRST_WORD = 5.0
"""Seconds that other ranks wait for rank 0 to print an error that they may share."""


# --- rank and world size ------------------------------------------------------------------------


def size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if _launched() else 1


def _launched() -> bool:
    if "RANK" not in os.environ:  # common case: avoids the import of torch
        return False
    with interrupt.deferred():
        from dualsft.distributed.world import launched
    return launched()


def rank() -> int:
    """Rank of this process; 0 without a launcher."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def check_alone(command: str) -> None:
    """Exit on every rank if the command does not support several processes; rank 0 reports it."""
    if size() == 1:
        return
    if rank() and not _agent_store():  # no agent that would kill rank 0 before it reports
        raise SystemExit(ConfigError.exit_code)
    raise ConfigError(f"dualsft {command} runs in one process; start it without torchrun")


# --- error output -------------------------------------------------------------------------------


def speak(error: BaseException, lines: Sequence[str], write: Callable[[str], None]) -> None:
    """Print why this process ends, unless rank 0 prints the same."""
    if size() == 1:
        for line in lines:
            write(line)
        return
    # The launcher kills the other ranks as soon as one exits: defer signals until this is printed.
    with suppress(interrupt.Interrupted), interrupt.handled(), interrupt.deferred():
        if rank() and _is_first_ones(error):
            return
        for line in lines:
            write(f"[rank {rank()}] {line}" if rank() else line)
        if rank() == 0:
            _let_others_know(error)


def _agent_store() -> bool:
    from dualsft.distributed.store import agent_store

    return agent_store()


def _let_others_know(error: BaseException) -> None:
    from dualsft.distributed.store import Connection

    if _agent_store():
        with suppress(RuntimeError, OSError):
            Connection(SAID).write(SAID, str(error))


def _is_first_ones(error: BaseException) -> bool:
    """Whether rank 0 reports the same error, according to the store."""
    from dualsft.distributed import heartbeat
    from dualsft.distributed.store import Connection

    if isinstance(error, interrupt.Interrupted):
        return True
    if (known := heartbeat.repeated(error)) is not None:
        return known
    if _agent_store():  # else rank 0 hosts the store: already closed, or not yet created
        with suppress(RuntimeError, OSError):
            line, deadline = Connection(SAID), time.monotonic() + FIRST_WORD
            while not line.has(SAID) and time.monotonic() < deadline:
                time.sleep(0.05)
            return line.has(SAID) and line.read([SAID]) == [str(error).encode()]
    return False


# --- --gpus -------------------------------------------------------------------------------------


def spread(gpus: int | None, config: Config, say: Callable[[str], None]) -> None:
    """With --gpus N > 1, replace this process by the launcher; does not return then."""
    if gpus is not None and _launched():
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
    debug = [word for word in sys.orig_argv if word == "--debug"]  # removed from argv by `cli.main`
    words = [*debug, *without_gpus(sys.argv[1:])]
    flags = ["--standalone", f"--nproc-per-node={gpus}", "-m", "dualsft"]
    sys.stdout.flush()
    sys.stderr.flush()
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
        return _told(failed)
    return 0


def _is_ignored(name: str) -> bool:
    number = getattr(signal, name.strip(), None)
    return number is not None and signal.getsignal(number) is signal.SIG_IGN


def _told(failed: Any) -> int:
    """Return the exit code of the first failure; report processes that a signal killed."""
    for number, failure in failed.failures.items():
        if failure.exitcode < 0 and failure.exitcode not in FOLLOWERS:
            name = signal.Signals(-failure.exitcode).name
            why = " (by a user, or by the system: out of memory)" if name == "SIGKILL" else ""
            sys.stderr.write(
                f"error: rank {number} (process {failure.pid}) was killed by {name}{why}\n"
            )
    causes = sorted(
        failed.failures.values(), key=lambda one: (one.exitcode in FOLLOWERS, one.timestamp)
    )
    code = causes[0].exitcode
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:]))
