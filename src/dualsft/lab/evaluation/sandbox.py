"""Run generated programs (HumanEval pass@1), each in its own sandboxed process.

A candidate passes under the same rule as in the harness's `code_eval`: candidate and test finish
without an exception within three seconds. Every program gets a fresh interpreter
(`lab/evaluation/sandbox_child.py`) in an empty folder, with a minimal environment, limits on
memory, time, file size and processes, no network, no input, and its output discarded. After the
time limit the whole process group is killed. A program written to attack this sandbox from inside
its interpreter could still fake a pass, as in the harness, but cannot reach anything outside. Not
part of Algorithm 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualsft.errors import RunError

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_SECONDS = 60.0
"""Time for the interpreter to start and isolate itself, generous for a busy machine."""
_MOST_ANSWER = 4096
"""Maximum bytes of an answer. A program that writes more to the pipe fails."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of one program, in seconds and bytes."""

    seconds: float = 3.0
    """Wall time, as in the harness."""
    memory: int = 2 * 2**30
    file: int = 2**20
    processes: int = 64


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


def run_candidate(candidate: str, test: str, limits: SandboxLimits | None = None) -> ProgramVerdict:
    """Run one candidate and its test in the sandbox."""
    limits = limits or SandboxLimits()
    folder = os.path.realpath(tempfile.mkdtemp(prefix="dualsft-sandbox-"))
    reading, writing = os.pipe()
    job = {
        "candidate": candidate,
        "test": test,
        "limits": asdict(limits) | {"cpu": int(limits.seconds) + 1},
        "token": secrets.token_hex(16),
        "pipe": writing,
    }
    try:
        try:
            process = _start(folder, writing)
        finally:
            os.close(writing)
        try:
            return _judge(process, reading, job, limits)
        finally:
            _kill(process)
    finally:
        os.close(reading)
        shutil.rmtree(folder, ignore_errors=True)


def run_candidates(
    pairs: Sequence[tuple[str, str]],
    limits: SandboxLimits | None = None,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> list[ProgramVerdict]:
    """Verdicts of (candidate, test) pairs, in order. Runs `workers` programs in parallel."""
    workers = workers or max(1, min(8, (os.cpu_count() or 1) // 2))
    verdicts: list[ProgramVerdict] = []
    pool = ThreadPoolExecutor(workers)
    try:
        for verdict in pool.map(lambda pair: run_candidate(pair[0], pair[1], limits), pairs):
            verdicts.append(verdict)
            advance(1)
    finally:
        pool.shutdown(cancel_futures=True)
    return verdicts


def describe_protection(verdicts: Sequence[ProgramVerdict]) -> dict[str, str]:
    """Describe the isolation of the programs: the protections that every one of them had."""
    found = [v.protection for v in verdicts if v.protection]
    names = ("network_namespace", "seccomp", "landlock")
    active = {name for name in names if found and all(one[name] for one in found)}
    inner = "audit hook of the interpreter only"
    network = [name.replace("_", " ") for name in names[:2] if name in active]
    return {
        "network": " and ".join(network) or inner,
        "processes": "seccomp" if "seccomp" in active else f"rlimit and {inner}",
        "files": "Landlock" if "landlock" in active else inner,
        "limits": "rlimits and a wall clock",
    }


def _start(folder: str, writing: int) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-B", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=environment,
        pass_fds=(writing,),
        start_new_session=True,
    )


def _judge(
    process: subprocess.Popen[bytes], reading: int, job: dict[str, Any], limits: SandboxLimits
) -> ProgramVerdict:
    """Send the job, then read the active protections and the answer, each with a timeout."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
    first, rest = _read_line(reading, b"", time.monotonic() + _START_SECONDS)
    protection = _parse(first)
    if protection is None:
        raise RunError(
            "the sandbox for generated code did not start (it needs to start a Python interpreter "
            "with 2 GiB of address space); leave humaneval out of evaluation.tasks"
        )
    line, _ = _read_line(reading, rest, time.monotonic() + limits.seconds)
    if line is None:
        return ProgramVerdict(False, "timed out", True, protection)
    answer = _parse(line)
    forms = {"token": str, "reason": str, "compiled": bool}
    whole = answer is not None and all(isinstance(answer.get(k), t) for k, t in forms.items())
    if answer is None or not whole or answer["token"] != job["token"]:
        return ProgramVerdict(False, "ended early", True, protection)
    reason = answer["reason"]
    return ProgramVerdict(reason == "passed", reason, answer["compiled"], protection)


def _read_line(reading: int, rest: bytes, deadline: float) -> tuple[bytes | None, bytes]:
    """(a line, the bytes after it). The line is None after the deadline and b"" if the pipe is
    closed or the line is too long."""
    while b"\n" not in rest:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            return None, rest
        piece = os.read(reading, _MOST_ANSWER)
        rest += piece
        if not piece or len(rest) > _MOST_ANSWER:
            return b"", b""
    line, _, rest = rest.partition(b"\n")
    return line, rest


def _parse(line: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads(line or b"")
    except (ValueError, RecursionError):  # the program may write arbitrary bytes to the pipe
        return None
    return found if isinstance(found, dict) else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, including any processes that the program started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
