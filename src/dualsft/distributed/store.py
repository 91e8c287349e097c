"""The store of a launcher: where processes read of one another without a collective.

torchrun holds a store for the processes it starts; under other launchers the first process holds it
from the making of the process group on. `Connection` talks to it, `Word` is what a process writes
there about itself (`distributed/heartbeat.py`, `distributed/launch.py`). Belongs to no line of
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
"""How a process has left: by itself, by its own error, by a signal, or because of another one."""


@dataclass
class Word:
    """What a process tells the others."""

    who: str = ""
    how: How = ""
    text: str = ""
    signum: int = 0
    final: bool = False
    """Nothing more will be said: it goes as soon as this is heard."""
    knows: list[int] = field(default_factory=list)
    """The processes whose final word it has read."""

    def beat(self, number: int) -> str:
        """As it is written; the number shows that the process lives."""
        return json.dumps({"beat": number, **asdict(self)})


@dataclass
class Peer:
    """What is known of another process."""

    rank: int
    word: Word = field(default_factory=Word)
    raw: bytes | None = None
    """Its newest beat; None before the first."""
    silent: float = 0.0
    beats: int = 0
    """How many different ones were read."""

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f" ({self.word.who})" if self.word.who else "")

    @property
    def there(self) -> bool:
        return self.word.how == ""

    def hear(self, raw: bytes | None, passed: float) -> None:
        """What was read, `passed` seconds after the last reading."""
        if raw is None or raw == self.raw:
            self.silent += passed
            return
        told = json.loads(raw)
        del told["beat"]
        self.raw, self.silent, self.word = raw, 0.0, Word(**told)
        self.beats += 1


def agent_store() -> bool:
    """Whether the launcher itself holds the store, from before the first line of this process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


class Connection:
    """A connection of one's own to the store that the process group was made with."""

    def __init__(self, purpose: str, timeout: float = 5.0) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore  # not in every build of torch

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._sentinel = socket.create_connection((host, port), timeout)
        self._sentinel.setblocking(False)
        wait = timedelta(seconds=timeout)
        store = TCPStore(host, port, None, False, wait, wait_for_workers=False)
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        run = "/".join(os.environ.get(name, "0") for name in names)
        self._store = PrefixStore(f"dualsft/{run}/{purpose}", store)

    def check(self) -> None:
        """Raise when the store has gone; asking the store itself would print a C++ stack."""
        with suppress(BlockingIOError):  # nothing ever comes, but the end
            if not self._sentinel.recv(1):
                raise ConnectionError("the store has closed the connection")

    def write(self, key: str, value: str) -> None:
        self.check()
        self._store.set(key, value)

    def has(self, key: str) -> bool:
        self.check()
        return self._store.check([key])

    def read(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there."""
        self.check()
        return self._store.multi_get(keys) if keys else []

    def close(self) -> None:
        self._sentinel.close()
