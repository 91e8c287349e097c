"""Real processes that die, hang, fail or finish: the others end, and say because of whom."""

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
from dualsft.distributed import heartbeat
from dualsft.distributed.world import World, joined
from dualsft.errors import DualsftError, RunError
from dualsft.system import signals as interrupt

# what PyTorch's store says of its own, now and then, when the process that holds it leaves first
_STORE = re.compile(
    r"\[rank\d+\]:\[W[^\n]*TCPStore[^\n]*\n(Exception raised from[^\n]*\n(frame #[^\n]*\n)*\n?)?"
)

# --- what the processes do (this file is also their program) --------------------------------------


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def meet() -> None:
    """Collectives for ever, as a run has them."""
    while True:
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)


def work(mode: str, world: World) -> None:
    """One of the lives that a process may have; `ready` is written when all have begun it."""
    dist.barrier()
    os.write(1, f"ready {world.rank} {os.getpid()}\n".encode())  # whole, beside the others' lines
    if mode == "meet":
        meet()
    elif mode == "steps":  # as `Pieces.tick` does: the end of a step is where a signal is answered
        with interrupt.deferred():
            while True:
                time.sleep(0.05)
                if world.any(interrupt.pending())[0]:
                    interrupt.stop("the step", anyway=True)
    elif mode == "apart":  # nobody meets: only the beats tell
        time.sleep(600)
    elif mode == "wait":  # the others wait in a collective that the last one never enters
        if world.rank == world.size - 1:
            time.sleep(600)
        dist.barrier()
    elif mode == "fail":
        if world.rank == 1:
            time.sleep(0.5)
            raise RunError("the rows of the moon are missing")
        meet()
    elif mode == "fail apart":
        if world.rank == 1:
            raise ValueError("a defect")
        time.sleep(600)
    elif mode == "all fail":
        raise RunError("no row is left")
    elif mode == "out of step":  # it never comes to the end of its step
        with interrupt.deferred():
            if world.rank == 0:
                time.sleep(600)
            dist.barrier()
    elif mode == "done":
        time.sleep(float(os.environ["APART"]) * world.rank)
    elif mode == "done backwards":
        time.sleep(float(os.environ["APART"]) * (world.size - 1 - world.rank))
    elif mode == "twice":
        pass
    else:
        raise AssertionError(mode)


def main(mode: str) -> int:
    """As the command line ends: one line for an error, 128 + the signal when asked to stop."""
    torch.set_num_threads(1)
    try:
        with interrupt.handled(), joined(use_cuda=False) as world:
            for _ in range(2 if mode == "twice" else 1):
                with heartbeat.watched(world, say):
                    work(mode, world)
    except interrupt.Interrupted as stopped:
        say(f"stopped by {stopped}")
        return stopped.exit_code
    except DualsftError as problem:
        again = "again: " if heartbeat.repeated(problem) else ""
        say(f"error: {again}{problem}")
        return problem.exit_code
    return 0


# --- how they are started -------------------------------------------------------------------------


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["dualsft.distributed.heartbeat", "pytest"])  # torch is imported once


def by_hand(mode: str, env: dict[str, str], output: Path) -> None:
    """One process of a world that nobody but its own processes knows of."""
    os.environ.update(env)
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(output.with_suffix(f".{end}"), os.O_WRONLY | os.O_CREAT), number)
    sys.exit(main(mode))


class Job:
    """Processes of one world, started by hand or by torchrun."""

    def __init__(self, folder: Path, mode: str, size: int, *, torchrun: bool, **env: str) -> None:
        self.folder, self.size = folder, size
        self.launcher: subprocess.Popen[bytes] | None = None
        self.processes: list[ForkServerProcess] = []
        if torchrun:
            flags = ["--standalone", f"--nproc-per-node={size}", __file__, mode]
            env |= {"PYTHONPATH": str(Path(dualsft.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
            with open(folder / "job.out", "wb") as out, open(folder / "job.err", "wb") as err:
                command = [sys.executable, "-m", "torch.distributed.run", *flags]
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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(mode: str, size: int = 2, *, torchrun: bool = False, **env: str) -> Job:
        jobs.append(Job(tmp_path, mode, size, torchrun=torchrun, **env))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def named(rank: int, pid: int) -> str:
    return f"rank {rank} (process {pid} on {socket.gethostname()})"


# --- death ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (2, 0), (3, 1)])
def test_a_killed_process_is_named_by_those_that_met_it(
    start: Start, size: int, victim: int
) -> None:
    """Also when it held the store: one line of ours, none of the transport's."""
    job = start("meet", size)
    pids = job.pids()
    os.kill(pids[victim], signal.SIGKILL)
    codes = job.codes(20)
    assert codes[victim] == -signal.SIGKILL
    for rank in set(range(size)) - {victim}:
        assert codes[rank] == heartbeat.EXIT_LOST, job.said()
        said = job.said(f"rank{rank}")
        assert f"error: {named(victim, pids[victim])} died" in said.replace("again: ", "")
        assert "same command again" in said and "gloo" not in said


def test_a_killed_process_under_torchrun_is_named(start: Start) -> None:
    job = start("meet", 3, torchrun=True)
    pids = job.pids()
    os.kill(pids[1], signal.SIGKILL)
    assert job.codes(40) != [0]
    assert f"{named(1, pids[1])} died" in job.said() and "gloo" not in job.said()


@pytest.mark.parametrize("mode", ["apart", "wait"])
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_silent_process_is_missed(start: Start, mode: str, stop: signal.Signals) -> None:
    """Nobody meets it, or a collective waits for it; stopped, its connections stay open."""
    job = start(mode, 3, DUALSFT_PEER_TIMEOUT="4")
    pids = job.pids()
    os.kill(pids[2], stop)
    assert job.codes(20, 0, 1) == [heartbeat.EXIT_LOST] * 2, job.said()
    for rank in (0, 1):
        assert named(2, pids[2]) in job.said(f"rank{rank}")


@pytest.mark.slow
def test_a_stopped_holder_of_the_store_is_missed(start: Start) -> None:
    job = start("apart", 3, DUALSFT_PEER_TIMEOUT="4")
    pids = job.pids()
    os.kill(pids[0], signal.SIGSTOP)
    assert job.codes(20, 1, 2) == [heartbeat.EXIT_LOST] * 2, job.said()
    for rank in (1, 2):
        assert f"{named(0, pids[0])} has not responded for 4 s" in job.said(f"rank{rank}")


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphans(start: Start) -> None:
    job = start("apart", 2, torchrun=True)
    pids = job.pids()
    assert job.launcher is not None
    job.launcher.kill()
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.1)
    assert job.said().count("cannot be reached; exiting") == 2 and "the launcher at" in job.said()


def _lives(pid: int) -> bool:
    """Whether a process runs: one that nobody waits for stays in the table as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# --- failure --------------------------------------------------------------------------------------


@pytest.mark.parametrize("torchrun", [False, True])
def test_the_others_name_the_process_that_failed(start: Start, torchrun: bool) -> None:
    job = start("fail", 3, torchrun=torchrun)
    pids = job.pids()
    codes = job.codes(40)
    told = f"{named(1, pids[1])} failed: the rows of the moon are missing"
    if torchrun:
        assert codes == [1] and told in job.said()
        return
    assert codes == [heartbeat.EXIT_LOST, 1, heartbeat.EXIT_LOST], job.said()
    assert "error: the rows of the moon are missing" in job.said("rank1")
    assert f"error: {told}" in job.said("rank0") and f"again: {told}" in job.said("rank2")


@pytest.mark.slow
def test_a_process_that_cannot_notice_a_failure_is_ended(start: Start) -> None:
    job = start("fail apart")
    pids = job.pids()
    assert job.codes(30) == [heartbeat.EXIT_LOST, 1], job.said()
    assert f"[rank 0] {named(1, pids[1])} failed: ValueError: a defect; exiting" in job.said(
        "rank0"
    )


def test_an_error_that_all_have_is_everybodys_own(start: Start) -> None:
    """And those behind the first know that it says the same."""
    job = start("all fail", 3)
    assert job.codes(60) == [1, 1, 1]
    assert job.said("rank0") == "error: no row is left\n"
    for rank in ("rank1", "rank2"):
        assert _STORE.sub("", job.said(rank)) == "error: again: no row is left\n"


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_cleanly(start: Start) -> None:
    job = start("steps")
    os.kill(job.pids()[1], signal.SIGTERM)
    assert job.codes(20) == [143, 143], job.said()
    assert _STORE.sub("", job.said()) == "stopped by SIGTERM\n\nstopped by SIGTERM\n"


@pytest.mark.slow
def test_a_stop_outside_of_the_steps_stops_those_who_wait(start: Start) -> None:
    """The first waits in a collective for one that is stopped: stopped as well, not broken."""
    job = start("wait")
    os.kill(job.pids()[1], signal.SIGINT)
    assert job.codes(30) == [130, 130], job.said()
    assert "stopped by SIGINT" in job.said("rank0")


@pytest.mark.slow
def test_a_process_that_does_not_come_to_the_end_of_its_step_is_ended(start: Start) -> None:
    """Inside a collective Python hears no signal; the watch does."""
    job = start("out of step", DUALSFT_STOP_TIMEOUT="2")
    os.kill(job.pids()[1], signal.SIGTERM)
    assert job.codes(30) == [143, 143], job.said()
    assert "[rank 1] received SIGTERM 2 s ago, but the step has not finished" in job.said("rank1")
    assert "[rank 0] rank 1 (" in job.said("rank0")


# --- the good end ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "torchrun"), [("done", False), ("done backwards", False), ("done", True)]
)
def test_processes_may_finish_apart(start: Start, mode: str, torchrun: bool) -> None:
    """Longer apart than a silence may last, and the holder of the store first or last."""
    job = start(mode, 2, torchrun=torchrun, DUALSFT_PEER_TIMEOUT="3", APART="7")
    assert set(job.codes(90)) == {0}, job.said()
    assert job.said().strip() == ""


@pytest.mark.slow
def test_one_group_may_be_watched_twice(start: Start) -> None:
    job = start("twice", torchrun=True)
    assert job.codes(60) == [0] and job.said() == ""


def test_a_world_of_one_is_not_watched() -> None:
    before = signal.set_wakeup_fd(-1)
    with heartbeat.watched(World(), say):
        assert signal.set_wakeup_fd(-1) == before == -1


def test_a_wrong_timeout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALSFT_PEER_TIMEOUT", "soon")
    with (
        pytest.raises(dualsft.ConfigError, match="DUALSFT_PEER_TIMEOUT: 'soon'"),
        heartbeat.watched(World(size=2), say),
    ):
        raise AssertionError("it must not begin")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
