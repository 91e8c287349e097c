"""Access to the launcher's TCP store, which processes use to exchange state without a collective.

torchrun hosts a store for the processes it starts; under other launchers rank 0 hosts it once the
process group is initialized. `Connection` is a client; `Word` is the status that a process writes
about itself. Used by `distributed/heartbeat.py` and `distributed/launch.py`. Not part of
Algorithm 1.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Literal

How = Literal["", "done", "failed", "stopped", "followed"]
"""How a process ended: finished, own error, signal, or because another one ended; "" = running."""


@dataclass
class Word:
    """Status that a process publishes to the others."""

    who: str = ""
    how: How = ""
    text: str = ""
    signum: int = 0
    final: bool = False
    """The last status: the process exits once it has been written."""
    knows: list[int] = field(default_factory=list)
    """Ranks whose final status this process has read."""

    def beat(self, number: int) -> str:
        """The stored value; the changing number shows that the process is alive."""
        return json.dumps({"beat": number, **asdict(self)})


@dataclass
class Peer:
    """Known state of another process."""

    rank: int
    word: Word = field(default_factory=Word)
    raw: bytes | None = None
    """Its latest heartbeat; None before the first."""
    silent: float = 0.0
    """Seconds since its heartbeat last changed, as counted by this process."""
    beats: int = 0
    """Number of different heartbeats read."""

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f" ({self.word.who})" if self.word.who else "")

    @property
    def there(self) -> bool:
        return self.word.how == ""

    def hear(self, raw: bytes | None, passed: float) -> None:
        """Update with the value read, `passed` seconds after the previous read."""
        if raw is None or raw == self.raw:
            self.silent += passed
            return
        told = json.loads(raw)
        del told["beat"]
        self.raw, self.silent, self.word = raw, 0.0, Word(**told)
        self.beats += 1


def agent_store() -> bool:
    """Whether the launcher hosts the store, so it exists before this process starts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


class Connection:
    """A separate connection to the store of the process group."""

    def __init__(self, purpose: str, timeout: float = 5.0) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore  # missing in some torch builds

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Raw socket on which no data arrives: recv returns b"" once the store is closed.
        self._sentinel = socket.create_connection((host, port), timeout)
        self._sentinel.setblocking(False)
        wait = timedelta(seconds=timeout)
        store = TCPStore(host, port, None, False, wait, wait_for_workers=False)
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        run = "/".join(os.environ.get(name, "0") for name in names)
        self._store = PrefixStore(f"dualsft/{run}/{purpose}", store)

    def check(self) -> None:
        """Raise if the store is closed; calling the store itself would print a C++ stack trace."""
        with suppress(BlockingIOError):  # still open
            if not self._sentinel.recv(1):
                raise ConnectionError("the store has closed the connection")

    def write(self, key: str, value: str) -> None:
        self.check()
        self._store.set(key, value)

    def has(self, key: str) -> bool:
        self.check()
        return self._store.check([key])

    def read(self, keys: list[str]) -> list[bytes]:
        """Values of existing keys."""
        self.check()
        return self._store.multi_get(keys) if keys else []

    def close(self) -> None:
        self._sentinel.close()
