"""Several processes from one command: `--gpus N`, and what a process under a launcher may say.

`dualsft run --gpus N …` becomes `torchrun --standalone --nproc-per-node N -m dualsft run …` by
replacing its process with the launcher's, once the settings have been found good. The launcher here
is torchrun's own (`torch.distributed.run`), less its log: it ends with the exit code of the process
that failed first, or 128 + the signal it was given, as a single process does.

Under any launcher all processes execute the same command, and most errors are everybody's. The
first process speaks; another one speaks, as `[rank N]`, when what it has to say is not the same.
Belongs to no line of Algorithm 1.
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
"""Exit codes of processes that ended because another one did (`heartbeat.EXIT_LOST`)."""
SAVING = 120
"""Seconds that the launcher gives its processes to save their progress when it is stopped."""
SAID = "said"
FIRST_WORD = 5.0
"""Seconds that the other processes give the first one to say what they all have to say."""


# --- who this process is ------------------------------------------------------------------------


def size() -> int:
    """How many processes the launcher has started; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if _launched() else 1


def _launched() -> bool:
    if "RANK" not in os.environ:  # as mostly: torch need not be imported to know
        return False
    with interrupt.deferred():
        from dualsft.distributed.world import launched
    return launched()


def rank() -> int:
    """The number of this process among those of the launcher; 0 without one."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def check_alone(command: str) -> None:
    """Refuse, in every process, a command that does not work in parallel; the first one says so."""
    if size() == 1:
        return
    if rank() and not _agent_store():  # nobody ends the first process before it has spoken
        raise SystemExit(ConfigError.exit_code)
    raise ConfigError(f"dualsft {command} runs in one process; start it without torchrun")


# --- what it may say ----------------------------------------------------------------------------


def speak(error: BaseException, lines: Sequence[str], write: Callable[[str], None]) -> None:
    """Say why this process ends, unless it is another one than the first and says the same."""
    if size() == 1:
        for line in lines:
            write(line)
        return
    # the launcher ends the others as soon as one has ended: not before they have spoken
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
    """Whether the first process says the same, as far as the store can tell."""
    from dualsft.distributed import heartbeat
    from dualsft.distributed.store import Connection

    if isinstance(error, interrupt.Interrupted):
        return True
    if (known := heartbeat.repeated(error)) is not None:
        return known
    if _agent_store():  # otherwise the store was the first process's: gone, or not yet made
        with suppress(RuntimeError, OSError):
            line, deadline = Connection(SAID), time.monotonic() + FIRST_WORD
            while not line.has(SAID) and time.monotonic() < deadline:
                time.sleep(0.05)
            return line.has(SAID) and line.read([SAID]) == [str(error).encode()]
    return False


# --- --gpus -------------------------------------------------------------------------------------


def spread(gpus: int | None, config: Config, say: Callable[[str], None]) -> None:
    """Where --gpus asks for several processes: become their launcher, and do not return."""
    if gpus is not None and _launched():
        raise ConfigError(
            f"--gpus: this process was started by a launcher (WORLD_SIZE="
            f"{os.environ['WORLD_SIZE']}); leave --gpus away, or start without torchrun"
        )
    if gpus is None or gpus == 1:
        return
    if on_cpu := check_gpus(gpus, config.model.device):
        say(on_cpu)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_each(gpus)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING))
    debug = [word for word in sys.orig_argv if word == "--debug"]  # `cli.main` has taken it out
    words = [*debug, *without_gpus(sys.argv[1:])]
    flags = ["--standalone", f"--nproc-per-node={gpus}", "-m", "dualsft"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "dualsft.distributed.launch", *flags, *words])


def threads_each(processes: int) -> int:
    """Threads for each of so many processes on the cores that this one may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // processes)


def check_gpus(gpus: int, device: str) -> str:
    """Refuse more processes than GPUs; where all go to the CPU, that is said."""
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
    """The same command without --gpus N."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--gpus":
            next(rest, None)
        elif not word.startswith("--gpus="):
            kept.append(word)
    return kept


def launch(arguments: Sequence[str]) -> int:
    """torchrun with these arguments; returns the exit code of what it started."""
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if "LOGLEVEL" not in os.environ:  # torchrun's own variable
        logging.disable(logging.ERROR)  # the processes have said what went wrong
    options = torchrun.parse_args(list(arguments))
    handled = getattr(options, "signals_to_handle", None)
    if handled is not None:  # nohup stays in force
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
    """The exit code of the first failure; names the processes that could say nothing themselves."""
    for number, failure in failed.failures.items():
        if failure.exitcode < 0 and failure.exitcode not in FOLLOWERS:
            name = signal.Signals(-failure.exitcode).name
            why = " (by hand, or by the system for want of memory)" if name == "SIGKILL" else ""
            sys.stderr.write(f"error: rank {number} (process {failure.pid}) died of {name}{why}\n")
    causes = sorted(
        failed.failures.values(), key=lambda one: (one.exitcode in FOLLOWERS, one.timestamp)
    )
    code = causes[0].exitcode
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:]))
