"""Run generated programs (HumanEval pass@1), each in processes of its own that are shut in.

A candidate passes under the same rule as in the harness's `code_eval`: candidate and test finish
without an exception within three seconds. Every program gets a fresh interpreter
(`lab/evaluation/sandbox_child.py`), which forks into a process for the program and one for the
tests. Neither can reach anything outside, nor the program its tests. There is no folder to clean
up: the only one is a tmpfs that disappears with the processes, and these die with this one. A
machine whose kernel does not offer all protections is refused, unless the user insists
(`evaluation.allow_weak_sandbox`). Not part of Algorithm 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualsft.errors import ConfigError, RunError

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_SECONDS = 60.0
"""Time for the interpreter to start and isolate itself, generous for a busy machine."""
_MOST_ANSWER = 4096
"""Maximum bytes of an answer."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/proc",  # the tmpfs
    "TMPDIR": "/proc",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Program:
    """A generated program and its test."""

    candidate: str
    test: str
    """Ends with a call of its `check` with the function under test."""
    entry: str
    """Name of the function under test: all that the test uses of the candidate."""
    helpers: str = ""
    """What the test may use besides: the code of the prompt before that function."""

    @classmethod
    def of(cls, row: Mapping[str, str], candidate: str, test: str) -> Program:
        """The program for a row of HumanEval."""
        entry = row["entry_point"]
        return cls(candidate, test, entry, row["prompt"].rpartition(f"def {entry}(")[0])


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of one program, in seconds and bytes."""

    seconds: float = 3.0
    """Wall time, as in the harness."""
    memory: int = 2 * 2**30
    file: int = 2**20
    folder: int = 2**24
    """Bytes of all files together."""
    entries: int = 1024
    """Files and folders."""
    threads: int = 64


@dataclass(frozen=True, slots=True)
class ProgramVerdict:
    """Result of one program."""

    passed: bool
    reason: str
    """passed, failed: ERROR, timed out, or ended early (exited before the end of its tests)."""
    compiled: bool
    """Whether the candidate compiles; True if unknown."""
    protection: dict[str, bool] = field(default_factory=dict)
    """Which kernel protections were active."""


PROTECTIONS = {
    "namespaces": "user and mount namespaces (a container's profile or a sysctl may forbid them)",
    "landlock": "Landlock (Linux 5.13, in the kernel's list of security modules)",
    "seccomp": "seccomp filters on x86_64 or aarch64",
}
"""What every program is held by, and what it needs."""


def run_candidate(
    program: Program, limits: SandboxLimits | None = None, allow_weak: bool = False
) -> ProgramVerdict:
    """Run one program in the sandbox. Without `allow_weak`, every protection is required."""
    limits = limits or SandboxLimits()
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(_CHILD), json.dumps(asdict(limits))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=_ENVIRONMENT,
        start_new_session=True,
    )
    with process:
        try:
            return _judge(process, program, limits, allow_weak)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def run_candidates(
    programs: Sequence[Program],
    limits: SandboxLimits | None = None,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
    allow_weak: bool = False,
) -> list[ProgramVerdict]:
    """Verdicts of programs, in order. Runs `workers` programs in parallel."""
    workers = workers or max(1, min(8, (os.cpu_count() or 1) // 2))
    verdicts: list[ProgramVerdict] = []
    pool = ThreadPoolExecutor(workers)
    try:
        for verdict in pool.map(lambda one: run_candidate(one, limits, allow_weak), programs):
            verdicts.append(verdict)
            advance(1)
    finally:
        pool.shutdown(cancel_futures=True)
    return verdicts


def check_sandbox(allow_weak: bool) -> None:
    """Raise unless this machine can hold a program, or the user accepts what it offers."""
    run_candidate(Program("", "", "none"), allow_weak=allow_weak)


def describe_protection(verdicts: Sequence[ProgramVerdict]) -> dict[str, str]:
    """Describe the isolation of the programs: the protections that every one of them had."""
    found = [v.protection for v in verdicts if v.protection]
    active = [name for name in PROTECTIONS if found and all(one[name] for one in found)]

    def held(*names: str) -> str:
        return " and ".join(name for name in active if name in names) or "nothing"

    return {
        "network": held("namespaces", "seccomp"),
        "processes": held("namespaces", "seccomp"),
        "files": held(*PROTECTIONS),
        "limits": "rlimits and a wall clock" + (", tmpfs" if "namespaces" in active else ""),
    }


def _judge(
    process: subprocess.Popen[bytes], program: Program, limits: SandboxLimits, allow_weak: bool
) -> ProgramVerdict:
    """Read the active protections, send the program, read the verdict, each with a timeout."""
    assert process.stdin is not None
    protection, rest = _read(process, b"", _START_SECONDS)
    if not protection:
        raise RunError(
            "the sandbox for generated code did not start (it needs to start a Python interpreter "
            "with 2 GiB of address space); leave humaneval out of evaluation.tasks"
        )
    missing = [text for name, text in PROTECTIONS.items() if not protection[name]]
    if missing and not allow_weak:
        raise ConfigError(
            "evaluation.tasks: humaneval runs programs that the models write, and this machine "
            f"cannot hold them in without {'; '.join(missing)}; evaluate where there is, leave "
            "humaneval out, or accept the risk with evaluation.allow_weak_sandbox=true on this "
            "command line"
        )
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asdict(program)).encode())
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    answer, _ = _read(process, rest, limits.seconds)
    if answer is None:
        return ProgramVerdict(False, "timed out", True, protection)
    reason, compiled = str(answer.get("reason", "ended early")), answer.get("compiled")
    return ProgramVerdict(reason == "passed", reason, compiled is not False, protection)


def _read(
    process: subprocess.Popen[bytes], rest: bytes, seconds: float
) -> tuple[dict[str, Any] | None, bytes]:
    """A line of JSON from the checker, and the bytes after it.

    None after so many seconds, {} if the checker has ended.
    """
    assert process.stdout is not None
    deadline, ready = time.monotonic() + seconds, select.poll()
    ready.register(process.stdout, select.POLLIN)
    while b"\n" not in rest:
        left = deadline - time.monotonic()
        if left <= 0 or not ready.poll(left * 1000):
            return None, rest
        piece = os.read(process.stdout.fileno(), _MOST_ANSWER)
        rest += piece
        if not piece or len(rest) > _MOST_ANSWER:
            return {}, b""
    line, _, rest = rest.partition(b"\n")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # a test may write arbitrary bytes to the pipe
        found = {}
    return found if isinstance(found, dict) else {}, rest
