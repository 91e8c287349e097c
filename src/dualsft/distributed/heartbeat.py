"""Heartbeat between processes: detect a dead process within a minute, and end the run.

Collectives have practically no timeout (`world.PATIENCE`), so dead peers are detected here. Every
process writes a heartbeat to the launcher's store once a second and reads those of the others. A
process logs the reason and exits when

- the heartbeat of a peer has not changed for `PEER_TIMEOUT` (environment: DUALSFT_PEER_TIMEOUT,
  seconds);
- a peer has failed or stopped and this process still runs `FOLLOW_TIMEOUT` later: it is blocked in
  a collective that the peer will not enter;
- the store, or the process that hosts it, has been unreachable for `STORE_TIMEOUT`;
- it received a signal and has not finished its step within `STOP_TIMEOUT` (environment:
  DUALSFT_STOP_TIMEOUT): a collective blocks Python's signal handlers.

Usually the collective fails first. `watched` then waits a few seconds to find out which peer ended,
and raises `PeerLost` with its name instead of the long error of the backend.

Silence is measured in this process's own heartbeats, so time during which this process did not run
(suspended machine, busy cores) does not count against the peers. A peer is silent if it is stopped
(SIGSTOP), disconnected, or in a single call that holds the GIL. Computation, loading and writing
release the GIL, but sorting a list of 5 million numbers took 3 s and writing them as JSON 6 s on a
busy machine. Hence the timeout of 30 s: a false alarm would recur at the same place in every
attempt, and most deaths are detected earlier by a failed collective. Not part of Algorithm 1.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from dualsft.distributed.store import Connection, How, Peer, Word, agent_store
from dualsft.distributed.world import World
from dualsft.errors import ConfigError, DualsftError, RunError
from dualsft.system import signals as interrupt
from dualsft.system.signals import Interrupted

EXIT_LOST = 75
"""Exit code of a process that ends because of another one (EX_TEMPFAIL: try again)."""
PEER_TIMEOUT = 30.0
FOLLOW_TIMEOUT = 10.0
STORE_TIMEOUT = 5.0
STOP_TIMEOUT = 300.0
BEAT = 1.0
"""Seconds between heartbeats."""
HURRY = 0.1
"""Seconds between heartbeats while starting and leaving."""
SUSPECT = 4.0
"""Seconds of silence after which a peer is blamed for a failed collective."""
PARTING = 7.0
"""Seconds that a leaving process waits to find the cause; must be below FOLLOW_TIMEOUT."""

GO_ON = "run the same command again to resume from the last saved state"


class PeerLost(RunError):
    """Another process of the run died or failed, so this one cannot continue."""

    exit_code = EXIT_LOST


@dataclass(frozen=True)
class _Verdict:
    """Why this process ends."""

    text: str
    signum: int = 0

    @property
    def exit_code(self) -> int:
        return 128 + self.signum if self.signum else EXIT_LOST


# --- watchdog -----------------------------------------------------------------------------------


class _Left:
    """The last error raised by `watched`, and whether rank 0 reports the same."""

    error: BaseException | None = None
    repeated = False
    count = itertools.count()


def repeated(error: BaseException) -> bool | None:
    """Whether rank 0 reports the same error; None for an error not raised by `watched`."""
    return _Left.repeated if _Left.error is error else None


@contextmanager
def watched(world: World, say: Callable[[str], None]) -> Iterator[None]:
    """Exchange heartbeats with the other processes while the block runs.

    If the watchdog must exit the process, it passes one line with the reason to `say` first. An
    error raised in the block is published to the peers and re-raised unchanged, unless a peer
    caused it: then it becomes `PeerLost`, or `Interrupted` if the peer received a signal.
    """
    if world.size == 1:
        yield
        return
    watch = _Watch(world, say)
    try:
        watch.start()
        yield
    except BaseException as error:
        other = watch.leave(error)
        if other is error:
            raise
        raise other from error
    else:
        watch.finish()
    finally:
        watch.close()


class _Watch:
    """Two threads: one exchanges heartbeats and may block; the other checks the timeouts."""

    def __init__(self, world: World, say: Callable[[str], None]) -> None:
        self._patience = _seconds("DUALSFT_PEER_TIMEOUT", PEER_TIMEOUT)
        self._stop_patience = _seconds("DUALSFT_STOP_TIMEOUT", STOP_TIMEOUT)
        self._beat = min(BEAT, self._patience / 4)
        self._rank = world.rank
        self._say = say
        self._peers = {rank: Peer(rank) for rank in range(world.size) if rank != world.rank}
        self._own = Word(who=f"process {os.getpid()} on {socket.gethostname()}")
        self._purpose = f"beats{next(_Left.count)}"
        self._news = threading.Condition()
        """Guards the fields below; notified after every exchange."""
        self._asked_to_post, self._posted = 0, 0
        self._exchange_began: float | None = None
        self._heard_at = time.monotonic()
        self._connected = False
        self._store_lost = False
        self._leaving = False
        self._clocks: dict[str, float] = {}
        """Seconds for which each reason to exit has held continuously."""
        self._signum = 0
        self._wake = threading.Event()
        self._over = threading.Event()
        self._signals: tuple[int, int] | None = None
        self._threads = [
            threading.Thread(target=work, name=f"dualsft {work.__name__}", daemon=True)
            for work in (self._exchange, self._judge)
        ]

    def start(self) -> None:
        """Start the threads and wait for the first heartbeat, with the name, of every peer."""
        self._listen()
        for thread in self._threads:
            thread.start()
        self._wait(lambda: self._all_met() or self._over.is_set(), self._patience)

    def _all_met(self) -> bool:
        return all(peer.raw is not None for peer in self._peers.values())

    def close(self) -> None:
        self._over.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(2.0)
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            for end in self._signals:
                os.close(end)

    # --- signals: received here even if the main thread is blocked in a collective ----------------

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
        if before == -1:
            self._signals = ends
            return
        signal.set_wakeup_fd(before)  # belongs to an event loop: restore it
        for end in ends:
            os.close(end)

    def _asked_to_stop(self) -> bool:
        if self._signals is not None:
            with suppress(BlockingIOError):
                for number in os.read(self._signals[0], 64):
                    if _ends_the_run(number):
                        self._signum = self._signum or number
        if interrupt.pending() and not self._signum:
            self._signum = signal.SIGTERM
        return self._signum != 0

    # --- heartbeat thread -------------------------------------------------------------------------

    def _exchange(self) -> None:
        line: Connection | None = None
        for beat in itertools.count():
            last = self._over.is_set()
            self._exchange_began = time.monotonic()
            try:
                line = line or Connection(self._purpose)
                self._turn(line, beat)
                lost = False
            except (RuntimeError, OSError):  # torch's DistError is a RuntimeError
                lost = True
                if line is not None:
                    line.close()
                line = None
            self._exchange_began = None
            with self._news:
                self._store_lost = lost
                self._connected = self._connected or not lost
                self._news.notify_all()
            if last:
                break
            hurry = self._leaving or not self._all_met()
            self._wake.wait(HURRY if hurry else self._beat)
            self._wake.clear()
        if line is not None:
            line.close()

    def _turn(self, line: Connection, beat: int) -> None:
        """Write the status of this process and read those of the peers."""
        with self._news:
            version, own = self._asked_to_post, self._own.beat(beat)
        line.write(f"{self._rank}", own)
        known = [p for p in self._peers.values() if p.raw is not None or line.has(f"{p.rank}")]
        values = line.read([f"{peer.rank}" for peer in known])
        found = dict(zip((peer.rank for peer in known), values, strict=True))
        with self._news:
            self._posted = version
            self._note(found)

    def _note(self, found: dict[int, bytes]) -> None:
        now = time.monotonic()
        # Capped, so that time during which this process did not run is not counted as silence.
        passed, self._heard_at = min(now - self._heard_at, 2 * self._beat), now
        for peer in self._peers.values():
            peer.hear(found.get(peer.rank), passed)
        knows = [peer.rank for peer in self._peers.values() if peer.word.final]
        if knows != self._own.knows:
            self._own.knows = knows
            self._wake.set()  # publish at once: a leaving peer waits for it

    # --- timeout thread ---------------------------------------------------------------------------

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._over.wait(0.25):
            now = time.monotonic()
            passed, before = min(now - before, 1.0), now
            with self._news:
                verdict = None if self._leaving else self._verdict(passed)
            if verdict is not None:
                self._end(verdict)

    def _counted(self, clock: str, running: bool, passed: float) -> float:
        self._clocks[clock] = self._clocks.get(clock, 0.0) + passed if running else 0.0
        return self._clocks[clock]

    def _verdict(self, passed: float) -> _Verdict | None:
        """The reason to exit now, or None; `passed` is the time since the last check in seconds."""
        peers = self._peers.values()
        for peer in peers:
            if peer.there and peer.silent >= self._patience:
                return _Verdict(f"{peer.name} has sent no heartbeat for {self._patience:g} s")
        left = [peer for peer in peers if peer.word.how not in ("", "done")]
        if self._counted("follow", bool(left), passed) >= FOLLOW_TIMEOUT:
            return self._cause(SUSPECT) or _Verdict(f"{left[0].name} has exited")
        unreached = self._store_lost and not self._connected
        if self._counted("unreached", unreached, passed) >= STORE_TIMEOUT:
            self._say(f"[rank {self._rank}] the store cannot be reached; peers are not monitored")
            self._over.set()
            self._news.notify_all()
            return None
        # Losing the store is expected once the peer that hosts it has left.
        closing = self._holder is not None and not self._holder.there
        lost = self._store_lost and self._connected and not closing
        if self._counted("store", lost, passed) >= STORE_TIMEOUT:
            return _Verdict(f"{self._holder_name} cannot be reached")
        began = self._exchange_began
        stalled = began is not None and time.monotonic() - began > self._beat and not closing
        if self._counted("stalled", stalled, passed) >= self._patience:
            return _Verdict(f"{self._holder_name} has not responded for {self._patience:g} s")
        stuck = self._asked_to_stop() and not interrupt.SAVING.is_set()
        if self._counted("stop", stuck, passed) >= self._stop_patience:
            name = signal.Signals(self._signum).name
            text = f"received {name} {self._stop_patience:g} s ago, but the step has not finished"
            return _Verdict(text, self._signum)
        return None

    @property
    def _holder(self) -> Peer | None:
        """The peer that hosts the store; None if this process or the launcher hosts it."""
        return None if agent_store() else self._peers.get(0)

    @property
    def _holder_name(self) -> str:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return f"the launcher at {where}" if self._holder is None else self._holder.name

    def _cause(self, silence: float) -> _Verdict | None:
        """The peer that caused a failure, if known; failures take precedence over signals."""
        peers = list(self._peers.values())
        for peer in peers:
            if peer.word.how == "failed":
                return _Verdict(f"{peer.name} failed: {peer.word.text}")
        for peer in peers:
            if peer.there and peer.silent >= silence:
                return _Verdict(f"{peer.name} died or is disconnected")
        if self._store_lost and self._holder is not None and self._holder.there:
            return _Verdict(f"{self._holder.name} died or is disconnected")
        for peer in peers:
            if peer.word.how == "stopped":
                return _Verdict(f"{peer.name} {peer.word.text}", peer.word.signum)
        for peer in peers:
            if peer.word.how == "followed" and peer.word.text:
                return _Verdict(peer.word.text)
        return None

    def _end(self, verdict: _Verdict) -> None:
        """Exit the process from this thread: the main thread is blocked."""
        how = "stopped" if verdict.signum else "followed"
        self._tell(how, verdict.text, verdict.signum, final=True)
        self._wait(self._all_know, 2.0)
        line = f"[rank {self._rank}] {verdict.text}; exiting: {GO_ON}"

        def speak() -> None:
            self._say(line)
            sys.stdout.flush()
            sys.stderr.flush()

        # In a thread: a full pipe must not block the exit.
        last_word = threading.Thread(target=speak, daemon=True)
        last_word.start()
        last_word.join(3.0)
        os._exit(verdict.exit_code)

    # --- leaving ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Publish that the work is done; the host of the store waits until all peers have left."""
        with self._news:
            self._leaving = True
        with interrupt.deferred():
            self._tell("done")
            self._wait(self._all_left if self._holds_store else self._heard, 30.0)

    def leave(self, error: BaseException) -> BaseException:
        """Publish an error; returns the error to raise, which differs if a peer caused it."""
        with self._news:
            self._leaving = True
        found = [error]
        with suppress(Interrupted), interrupt.deferred():  # already leaving: ignore signals
            found.append(self._explained(error))
            self._tell(self._own.how, self._own.text, self._own.signum, final=True)
            _Left.error, _Left.repeated = found[-1], self._first_says_the_same()
            self._wait(self._all_know, 3.0)
        return found[-1]

    def _first_says_the_same(self) -> bool:
        first = self._peers.get(0)
        if first is None or not self._wait(lambda: first.word.final or self._gone(first), 2.0):
            return False
        its_failure = first.word.how == "failed" and self._own.how == "followed"
        return its_failure or first.word.text == self._own.text

    @property
    def _holds_store(self) -> bool:
        return self._rank == 0 and not agent_store()

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, Interrupted | KeyboardInterrupt):
            number = error.signum if isinstance(error, Interrupted) else signal.SIGINT
            self._tell("stopped", f"was asked to stop ({signal.Signals(number).name})", number)
            before = {peer.rank: peer.beats for peer in self._peers.values()}
            self._wait(lambda: self._all_are_seen(before), PARTING)
            verdict = self._cause(min(SUSPECT, self._patience))
            if verdict is not None and not verdict.signum:
                self._say(f"[rank {self._rank}] {verdict.text}")
            return error
        if not _is_broken(error):
            self._tell("failed", _in_a_line(error))
            return error
        self._tell("followed")
        self._wait(self._someone_is_to_blame, PARTING)
        verdict = self._cause(min(SUSPECT, self._patience))
        if verdict is None:
            self._tell("failed", _in_a_line(error))
            return error
        self._tell("stopped" if verdict.signum else "followed", verdict.text, verdict.signum)
        if verdict.signum:
            return Interrupted(verdict.signum)
        return PeerLost(f"{verdict.text}; {GO_ON}")

    def _tell(self, how: How, text: str = "", signum: int = 0, *, final: bool = False) -> None:
        with self._news:
            self._own = replace(self._own, how=how, text=text, signum=signum, final=final)
            self._asked_to_post += 1
        self._wake.set()

    def _wait(self, until: Callable[[], bool], seconds: float) -> bool:
        with self._news:
            return self._news.wait_for(until, seconds)

    def _gone(self, peer: Peer) -> bool:
        return peer.silent >= min(SUSPECT, self._patience)

    def _heard(self) -> bool:
        """Whether the latest status is written, or the store is lost."""
        return self._store_lost or self._posted == self._asked_to_post

    def _all_left(self) -> bool:
        """Whether every peer has left, with or without a final status."""
        there = [peer for peer in self._peers.values() if peer.there and not self._gone(peer)]
        return self._heard() and (not there or self._store_lost)

    def _all_are_seen(self, before: dict[int, int]) -> bool:
        """Whether each peer has left or has sent two heartbeats since `before`."""
        unseen = [
            peer
            for peer in self._peers.values()
            if peer.there and not self._gone(peer) and peer.beats < before[peer.rank] + 2
        ]
        return self._heard() and (not unseen or self._store_lost)

    def _all_know(self) -> bool:
        """Whether this process may exit: its status is written and, if it hosts the store, read."""
        told = all(
            self._rank in peer.word.knows or peer.word.how == "done" or self._gone(peer)
            for peer in self._peers.values()
        )
        return self._heard() and (told or not self._holds_store)

    def _someone_is_to_blame(self) -> bool:
        failed = any(peer.word.how == "failed" for peer in self._peers.values())
        lost = any(peer.there and self._gone(peer) for peer in self._peers.values())
        return failed or lost or self._all_left()


# --- helpers ------------------------------------------------------------------------------------


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = 0.0
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}: {text!r} in the environment; give seconds, such as {default:g}")
    return value


def _ends_the_run(number: int) -> bool:
    """Whether the handler of a signal, ours or Python's default, ends the run."""
    ours: tuple[Any, ...] = (interrupt._on_signal, signal.default_int_handler)
    return number in interrupt.SIGNALS and signal.getsignal(number) in ours


def _is_broken(error: BaseException) -> bool:
    """Whether the error is one that a collective raises when a peer is lost."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return type(error) is RuntimeError and any(name in text for name in ("gloo", "NCCL", "nccl"))


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DualsftError) and text else f"{type(error).__name__}: {text}"
