"""Real processes that die, hang, fail or finish: the job ends soon, and says because of whom."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dualsft
from dualsft.distributed import launch
from dualsft.distributed.launch import EXIT_LOST, collective_timeout
from dualsft.distributed.world import World, joined
from dualsft.errors import DualsftError, RunError
from dualsft.system import signals as interrupt

# what PyTorch's store prints by itself, now and then, when the process that holds it leaves first
_STORE = re.compile(
    r"\[rank\d+\]:\[W[^\n]*TCPStore[^\n]*\n(Exception raised from[^\n]*\n(frame #[^\n]*\n)*\n?)?"
)

# --- what the processes do (this file is also their program) --------------------------------------


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def work_together() -> None:
    """Collectives for ever, as a run has them."""
    while True:
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)


def work(mode: str, world: World) -> None:
    """One of the lives that a process may have; `ready` is written when all have begun it."""
    dist.barrier()
    os.write(1, f"ready {world.rank} {os.getpid()}\n".encode())  # whole, beside the others' lines
    if mode == "together":
        work_together()
    elif mode == "steps":  # as `Pieces.tick` does: signals are handled at the end of a step
        with interrupt.deferred():
            while True:
                time.sleep(0.05)
                if world.any(interrupt.pending())[0]:
                    interrupt.stop("the step", anyway=True)
    elif mode == "apart":  # no collectives: only the agent notices
        time.sleep(600)
    elif mode == "wait":  # the others wait in a collective that the last one never enters
        if world.rank == world.size - 1:
            time.sleep(600)
        dist.barrier()
    elif mode == "fail":
        if world.rank == 1:
            raise RunError("the rows of the moon are missing")
        work_together()
    elif mode == "fail apart":
        if world.rank == 1:
            raise RunError("a defect")
        time.sleep(600)
    elif mode == "all fail":
        raise RunError("no row is left")
    elif mode == "done":
        time.sleep(3 * world.rank)
    elif mode == "done backwards":
        time.sleep(3 * (world.size - 1 - world.rank))
    else:
        raise AssertionError(mode)


def main(mode: str) -> int:
    """As the command line ends: one line for an error, 128 + the signal when asked to stop."""
    torch.set_num_threads(1)
    try:
        with interrupt.handled(), joined(use_cuda=False) as world:
            work(mode, world)
    except interrupt.Interrupted as stopped:
        launch.report(stopped, [f"stopped by {stopped}"], say)
        return stopped.exit_code
    except DualsftError as problem:
        launch.report(problem, [f"error: {problem}"], say)
        return problem.exit_code
    return 0


# --- how they are started -------------------------------------------------------------------------


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["dualsft.distributed.world", "pytest"])  # torch is imported once


def by_hand(mode: str, env: dict[str, str], output: Path) -> None:
    """One process of a world that nobody but its own processes knows of."""
    os.environ.update(env)
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(output.with_suffix(f".{end}"), os.O_WRONLY | os.O_CREAT), number)
    sys.exit(main(mode))


class Job:
    """Processes of one world, started by the given launcher module, or without one."""

    def __init__(self, folder: Path, mode: str, size: int, launcher: str, **env: str) -> None:
        self.folder, self.size = folder, size
        self.launcher: subprocess.Popen[bytes] | None = None
        self.processes: list[ForkServerProcess] = []
        if launcher:
            flags = ["--standalone", f"--nproc-per-node={size}", __file__, mode]
            env |= {"PYTHONPATH": str(Path(dualsft.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
            with open(folder / "job.out", "wb") as out, open(folder / "job.err", "wb") as err:
                command = [sys.executable, "-m", launcher, *flags]
                self.launcher = subprocess.Popen(
                    command, env={**os.environ, **env}, stdout=out, stderr=err
                )
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        for rank in range(size):
            arguments = mode, {**env, "RANK": str(rank)}, folder / f"rank{rank}"
            self.processes.append(FORKS.Process(target=by_hand, args=arguments, daemon=True))
            self.processes[-1].start()

    def said(self, name: str | None = None) -> str:
        """The error output, of one of the processes that were started or of all."""
        paths = self.folder.glob("*.err" if name is None else f"{name}.err")
        return "\n".join(path.read_text(errors="replace") for path in sorted(paths))

    def ready(self) -> dict[int, int]:
        out = "\n".join(path.read_text() for path in self.folder.glob("*.out"))
        return {int(rank): int(pid) for rank, pid in re.findall(r"ready (\d+) (\d+)\n", out)}

    def pids(self) -> dict[int, int]:
        """The processes by rank, once all are at work."""
        deadline = time.monotonic() + 60
        while len(found := self.ready()) < self.size:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)
        return found

    def codes(self, limit: float, *ranks: int) -> list[int | None]:
        """The exit codes of what was started, all within `limit` seconds from now."""
        if self.launcher is not None:
            return [self.launcher.wait(limit)]
        deadline = time.monotonic() + limit
        wanted = [self.processes[rank] for rank in ranks or range(self.size)]
        for one in wanted:
            one.join(max(0.1, deadline - time.monotonic()))
        return [one.exitcode for one in wanted]

    def close(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
            for pid in self.ready().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for one in self.processes:
            one.kill()
            one.join()


Start = Callable[..., Job]
TORCHRUN, GPUS = "torch.distributed.run", "dualsft.distributed.launch"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(mode: str, size: int = 2, launcher: str = "", **env: str) -> Job:
        jobs.append(Job(tmp_path, mode, size, launcher, **env))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def named(rank: int, pid: int) -> str:
    return f"rank {rank} (process {pid} on {socket.gethostname()})"


# --- without an agent: the survivors find out by a broken collective ------------------------------


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (2, 0), (3, 1)])
def test_a_killed_process_is_named(start: Start, size: int, victim: int) -> None:
    """By the first survivor, in one line of ours; also when it held the store."""
    job = start("together", size)
    pids = job.pids()
    os.kill(pids[victim], signal.SIGKILL)
    codes = job.codes(30)
    assert codes[victim] == -signal.SIGKILL
    survivors = sorted(set(range(size)) - {victim})
    assert [codes[rank] for rank in survivors] == [EXIT_LOST] * len(survivors), job.said()
    said = job.said(f"rank{survivors[0]}")
    who = named(victim, pids[victim]) + " died" if victim else "rank 0 or the launcher"
    assert f"error: {who}" in said and "same command again" in said
    for rank in survivors[1:]:
        assert "error:" not in job.said(f"rank{rank}")


def test_a_hung_process_is_named(start: Start) -> None:
    """A collective waits for it until the timeout; its connections stay open."""
    job = start("wait", 3, DUALSFT_COLLECTIVE_TIMEOUT="4")
    pids = job.pids()
    os.kill(pids[2], signal.SIGSTOP)
    assert job.codes(30, 0, 1) == [EXIT_LOST] * 2, job.said()
    assert f"error: {named(2, pids[2])} did not join the others within 4 s" in job.said("rank0")


def test_a_failed_process_is_named_by_the_others(start: Start) -> None:
    job = start("fail", 3)
    pids = job.pids()
    assert job.codes(40) == [EXIT_LOST, 1, EXIT_LOST], job.said()
    assert "[rank 1] error: the rows of the moon are missing" in job.said("rank1")
    told = f"error: {named(1, pids[1])} failed: the rows of the moon are missing"
    assert told in job.said("rank0") and "error" not in job.said("rank2")


def test_an_error_of_all_is_their_own(start: Start) -> None:
    job = start("all fail", 3)
    assert job.codes(60) == [1, 1, 1]
    assert job.said("rank0") == "error: no row is left\n"


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_cleanly(start: Start) -> None:
    job = start("steps")
    os.kill(job.pids()[1], signal.SIGTERM)
    assert job.codes(20) == [143, 143], job.said()
    assert _STORE.sub("", job.said()) == "stopped by SIGTERM\n\n"


@pytest.mark.slow
def test_a_stop_outside_of_the_steps_stops_those_who_wait(start: Start) -> None:
    """The first waits in a collective for one that is stopped: stopped as well, not broken."""
    job = start("wait")
    os.kill(job.pids()[1], signal.SIGINT)
    assert job.codes(30) == [130, 130], job.said()
    assert "stopped by SIGINT" in job.said("rank0")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["done", "done backwards"])
def test_processes_may_finish_apart(start: Start, mode: str) -> None:
    """The holder of the store first or last."""
    job = start(mode, 2)
    assert set(job.codes(90)) == {0}, job.said()
    assert job.said().strip() == ""


# --- with an agent: torchrun, and `dualsft run --gpus` --------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "mode", "code"), [(TORCHRUN, "together", 1), (GPUS, "apart", 137)]
)
def test_a_killed_process_under_an_agent_is_named(
    start: Start, launcher: str, mode: str, code: int
) -> None:
    """At once, also when no collective waits for it."""
    job = start(mode, 2, launcher)
    pids = job.pids()
    os.kill(pids[1], signal.SIGKILL)
    assert job.codes(25) == [code], job.said()
    if launcher == TORCHRUN:
        assert f"error: {named(1, pids[1])} died" in job.said() and "SIGKILL" in job.said()
    else:
        told = f"error: rank 1 (process {pids[1]}) was killed by SIGKILL (by a user, or by the"
        assert told in job.said() and "same command again" in job.said()


@pytest.mark.parametrize("launcher", [TORCHRUN, GPUS])
def test_an_error_under_an_agent_is_printed_once(start: Start, launcher: str) -> None:
    """Of one process by itself, with its rank; the other is ended at once."""
    job = start("fail apart", 2, launcher)
    job.pids()  # all have started
    assert job.codes(40) == [1], job.said()
    lines = [line for line in job.said().splitlines() if line.endswith("error: a defect")]
    assert lines == ["[rank 1] error: a defect"], job.said()
    if launcher == TORCHRUN:
        assert "RunError: a defect" in job.said()  # in torchrun's summary, from the error file


def test_an_error_of_all_under_an_agent_is_printed_once(start: Start) -> None:
    job = start("all fail", 2, GPUS)
    assert job.codes(120) == [1] and job.said() == "error: no row is left\n"


@pytest.mark.slow
def test_a_hung_process_under_an_agent_is_named(start: Start) -> None:
    """After the timeout; the agent kills it 30 s later, because it does not stop."""
    job = start("wait", 2, GPUS, DUALSFT_COLLECTIVE_TIMEOUT="4")
    pids = job.pids()
    os.kill(pids[1], signal.SIGSTOP)
    assert job.codes(60) == [EXIT_LOST], job.said()
    assert f"{named(1, pids[1])} did not join the others" in job.said()
    assert "was killed" not in job.said() and not _lives(pids[1])


def test_a_killed_agent_leaves_no_orphans(start: Start) -> None:
    job = start("apart", 2, TORCHRUN)
    pids = job.pids()
    assert job.launcher is not None
    job.launcher.kill()
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.1)
    assert "stopped by SIGTERM" in job.said()


def _lives(pid: int) -> bool:
    """Whether a process runs: one that nobody waits for stays in the table as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_wrong_timeout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALSFT_COLLECTIVE_TIMEOUT", "soon")
    with pytest.raises(dualsft.ConfigError, match="DUALSFT_COLLECTIVE_TIMEOUT: 'soon'"):
        collective_timeout()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
