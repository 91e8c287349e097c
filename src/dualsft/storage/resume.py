"""Pieces: the state of unfinished work, so that a killed stage goes on from where it was.

While a stage runs, its long loops (`engine/walk.py`, `train/loop.py`) save what they have so far:
the sum of gradients and the values of the examples done, or masters and moments after a step. A
piece is a folder in `<stage>.work/`, written as `.part`, sealed by a manifest with the SHA-256 of
its file, and renamed; the one before it is kept until two newer ones exist. On the next start the
newest piece that verifies is taken up and the others are named. Pieces carry the fingerprint of
their stage and the versions of what computed them: under other settings they are not used. A
finished stage has none. Orders and noise depend on (seed, epoch, step) alone, so no random state
is saved.

Of many processes (`distributed/world.py`) each writes a file of its own into the piece and the
first one seals it. How the files make one state is its `Layout`, so that a later start may have
any number of processes: with as many as before each takes up its own file, to the same bits.

No line of Algorithm 1: the reason why its lines survive a kill, to the same bits.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dualsft.distributed.world import alone, world
from dualsft.errors import RunError
from dualsft.storage.manifest import FORMAT_VERSION, damage, read_manifest, seal, versions
from dualsft.storage.tensor_files import TensorFile
from dualsft.storage.vectors import save_tensors
from dualsft.system import signals as interrupt
from dualsft.system.disk import FULL, free_bytes, human, storage_errno
from dualsft.system.paths import Place, RunPath, run_path

State = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""Tensors by name, and facts as JSON can hold them (its floats keep every bit)."""

Layout = Literal["same", "any", "terms", "rows"]
"""What the processes' tensors of one name are: equal (`any`: where there is one), terms of a sum,
or one behind the other."""

MAX_SHARE = 0.05
"""Saving may take this share of the time, however often it is asked for."""
KEPT = 2


def _file(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors" if rank else "tensors.safetensors"


@dataclass(frozen=True)
class Piece:
    """A saved state that verified."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Pieces:
    """The pieces of one stage; `Pieces()` keeps none and only answers signals."""

    def __init__(
        self,
        folder: Place | None = None,
        fingerprint: str = "",
        every: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder = None if folder is None else run_path(folder)
        self.every = every
        self._identity = {"fingerprint": fingerprint, "versions": versions()}
        if world().sharded:
            self._identity["sharded"] = True  # sums by rows are no use to whole ones
        self._say = say
        self._saved_at = time.monotonic()
        self._cost = 0.0
        self._full = False
        self._unsaved: tuple[str, Callable[[], State], str] | None = None
        """The newest state of the newest loop: kept until it is saved or another comes."""

    def load(self, name: str, span: Callable[[str], tuple[int, int]] | None = None) -> Piece | None:
        """The newest state of this work that verifies; says which were passed over, and why.

        `span` says which flat range of a tensor kept as rows this process takes up.
        """
        number = world().decided(lambda: self._newest(name))
        if number is None:
            return None
        folder = self._path(name, number)
        manifest, wrong = read_manifest(folder / "manifest.json")
        if wrong:
            raise RunError(f"{folder}: this process cannot read it ({wrong}); {_SHARED}")
        return Piece(_tensors(folder, manifest, span), manifest["facts"])

    def _newest(self, name: str) -> int | None:
        for number in sorted(self._numbers(name), reverse=True):
            folder = self._path(name, number)
            manifest, wrong = read_manifest(folder / "manifest.json")
            if not wrong and manifest.get("identity") != self._identity:
                _discard(folder)  # other settings: no use to anybody
                continue
            if not wrong:
                wrong = "; ".join(damage(folder, manifest)[0])
            if not wrong:
                return number
            self._say(f"{folder.name}: saved progress passed over ({wrong})")
        return None

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Around a loop that calls `tick` after every step."""
        with interrupt.deferred():
            yield

    def tick(self, name: str, snapshot: Callable[[], State], where: str) -> None:
        """After a step: save when it is time; when asked to stop, save and stop."""
        self._unsaved = (name, snapshot, where)
        stopping, due = world().any(interrupt.pending(), world().main and self._due())
        saved = self._keep() if stopping or due else ""
        if stopping:
            interrupt.stop(saved, anyway=True)

    def rescue(self) -> str:
        """Save the newest state that is not saved yet; returns what it is, in words.

        Of many processes one alone cannot: what the last `tick` did not save is lost.
        """
        return self._keep() if world().size == 1 else ""

    def _keep(self) -> str:
        if self.folder is None or self._unsaved is None:
            return ""
        (name, snapshot, where), self._unsaved = self._unsaved, None
        return where if self.save(name, *snapshot()) else ""

    def forget(self) -> None:
        """The newest state is no more: half a step is in it, or its result is kept elsewhere."""
        self._unsaved = None

    def save(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> bool:
        """Keep this state; False when the disk is full, which is said and ends no work.

        `facts["layout"]`, where there is one, says by the first word of a tensor's name how the
        processes' tensors belong together; without it the first process's are all.
        """
        assert self.folder is not None
        start = time.monotonic()
        present = world()
        number = present.decided(lambda: max(self._numbers(name), default=0) + 1)
        final = self._path(name, number)
        part = final.with_name(f"{final.name}.part")
        layout: Mapping[str, Layout] = facts.get("layout", {})
        interrupt.SAVING.set()
        try:
            self._on_main(lambda: self._prepare(part))
            with alone():
                own = tensors if present.main else _own(tensors, layout)
                full = not self._tried(lambda: save_tensors(part / _file(present.rank), own, {}))
            if present.any(full)[0]:
                raise OSError(errno.ENOSPC, "no space left for saved progress")
            body = {"format_version": FORMAT_VERSION, "identity": self._identity}
            self._on_main(lambda: self._seal(part, final, {**body, "facts": dict(facts)}))
        except Exception as problem:
            _discard(part)
            if storage_errno(problem) not in FULL:
                raise
            self._warn_full(part)
            return False
        finally:
            interrupt.SAVING.clear()
            self._cost = time.monotonic() - start
            self._saved_at = time.monotonic()
        if present.main:
            for old in self._numbers(name):
                if old <= number - KEPT:
                    _discard(self._path(name, old))
        return True

    def _prepare(self, part: RunPath) -> None:
        part.parent.mkdir(exist_ok=True)
        part.remove()
        part.mkdir()

    def _seal(self, part: RunPath, final: RunPath, body: Mapping[str, Any]) -> None:
        seal(part, {**body, "world": world().size})
        part.rename(final)
        final.parent.fsync()

    def _on_main(self, work: Callable[[], None]) -> None:
        """Done by the first process; a full disk there is one for all."""
        full = world().main and not self._tried(work)
        if world().any(full)[0]:
            raise OSError(errno.ENOSPC, "no space left for saved progress")

    @staticmethod
    def _tried(work: Callable[[], None]) -> bool:
        """Whether it succeeded; False when the disk is full."""
        try:
            work()
        except Exception as problem:
            if storage_errno(problem) not in FULL:
                raise
            return False
        return True

    def _due(self) -> bool:
        if self.every is None:
            return False
        least = max(self.every, self._cost / MAX_SHARE) if self.every > 0 else 0.0
        return time.monotonic() - self._saved_at >= least

    def _warn_full(self, part: RunPath) -> None:
        if not self._full:
            self._say(
                f"warning: {part}: progress could not be saved, the disk is full "
                f"({human(free_bytes(part.location))} free); going on: a kill would now lose the "
                "work since the last save"
            )
        self._full = True

    def _path(self, name: str, number: int) -> RunPath:
        assert self.folder is not None
        return self.folder / f"{name}.{number:06d}"

    def _numbers(self, name: str) -> list[int]:
        if self.folder is None or not self.folder.is_dir():
            return []
        ends = (path.name.removeprefix(f"{name}.") for path in self.folder.glob(f"{name}.*"))
        return [int(end) for end in ends if end.isdecimal()]


_SHARED = "all processes need the same run folder, on a file system that they share"


def _discard(folder: RunPath) -> None:
    """Remove it if that is possible; what is left is passed over by the next start."""
    with suppress(OSError):
        folder.remove()


def _own(tensors: Mapping[str, Tensor], layout: Mapping[str, Layout]) -> Mapping[str, Tensor]:
    """What a process other than the first keeps: not what is equal everywhere."""
    names = [n for n in tensors if layout.get(n.partition(".")[0], "same") != "same"]
    return tensors if len(names) == len(tensors) else {name: tensors[name] for name in names}


def _tensors(
    folder: RunPath, manifest: Mapping[str, Any], span: Callable[[str], tuple[int, int]] | None
) -> dict[str, Tensor]:
    """This process's tensors of a piece, whatever number of processes wrote it."""
    before, present = manifest.get("world", 1), world()
    layout: Mapping[str, Layout] = manifest["facts"].get("layout", {})
    if before == present.size == 1:
        return TensorFile(folder / _file(0)).tensors()
    if before == present.size:
        own = TensorFile(folder / _file(present.rank)).tensors()
        shared = TensorFile(folder / _file(0)).tensors() if not layout else {}
        return {**shared, **own}
    parts = [TensorFile(folder / _file(rank)).tensors() for rank in range(before)]
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        every = [part[name] for part in parts if name in part]
        kind = layout.get(name.partition(".")[0], "same")
        if kind == "terms":
            found[name] = sum(every[present.rank :: present.size], torch.zeros_like(every[0]))
        elif kind == "rows":
            assert span is not None
            start, stop = span(name)
            found[name] = torch.cat([part.reshape(-1) for part in every])[start:stop].clone()
        else:
            found[name] = every[0]
    return found
