"""Saved progress ("pieces"): checkpoints within a stage, from which a killed stage resumes.

The long loops of a stage (`engine/walk.py`, `train/loop.py`) save their state while they run: the
sum of gradients and the values of the examples done, or master weights and moments after a step. A
piece is a folder in `<stage>.work/`. It is written as `.part`, sealed by a manifest with the
SHA-256 of its files, and renamed; the last two are kept. On the next start the newest piece that
verifies is loaded, and skipped ones are logged. A piece carries the fingerprint of its stage and
the package versions; with other settings or versions it is discarded. A finished stage has no
pieces. The order of examples and all noise depend only on (seed, epoch, step), so no random state
is saved.

With several processes (`distributed/world.py`) each writes its own file into the piece, and rank 0
seals it. The `Layout` defines how the files combine, so a run can resume with any number of
processes. With the same number each process loads its own file, and the result is bitwise the same.

Not part of Algorithm 1.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dualsft.distributed.world import single_process, world
from dualsft.errors import RunError
from dualsft.storage.manifest import FORMAT_VERSION, damage, read_manifest, seal, versions
from dualsft.storage.tensor_files import TensorFile
from dualsft.storage.vectors import save_tensors
from dualsft.system import signals as interrupt
from dualsft.system.paths import FULL, Place, RunPath, run_path
from dualsft.system.usage import free_bytes, human, storage_errno

State = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""Tensors by name, and JSON-serializable facts (JSON keeps floats exactly)."""

Layout = Literal["same", "any", "terms", "rows"]
"""How the processes' tensors of one name relate. same: equal, stored by rank 0 only; any: equal on
the processes that have one; terms: terms of a sum; rows: parts of a concatenation."""

MAX_SHARE = 0.05
"""Maximum share of the time spent on saving, regardless of `resume.every` (unless it is 0)."""
KEPT = 2  # pieces to keep: the second is the fallback if the newest is damaged


def slug(label: str) -> str:
    """A label as the name of a piece."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def _file(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors" if rank else "tensors.safetensors"


@dataclass(frozen=True)
class Piece:
    """A loaded state whose hashes were verified."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Pieces:
    """The saved states of one stage; `Pieces()` without a folder only handles signals."""

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
            self._identity["sharded"] = True  # not interchangeable with replicated state
        self._say = say
        self._saved_at = time.monotonic()
        self._cost = 0.0
        self._full = False
        self._unsaved: tuple[str, Callable[[], State], str] | None = None
        """The latest state of the current loop, until it is saved or replaced."""

    def load(self, name: str, span: Callable[[str], tuple[int, int]] | None = None) -> Piece | None:
        """Load the newest state of `name` that verifies; skipped states are logged.

        `span` maps a tensor with layout `rows` to the flat range that this process loads.
        """
        number = world().on_main(lambda: self._newest(name))
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
                _discard(folder)  # other settings or versions
                continue
            if not wrong:
                wrong = "; ".join(damage(folder, manifest)[0])
            if not wrong:
                return number
            self._say(f"{folder.name}: saved progress skipped ({wrong})")
        return None

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Context for a loop that calls `tick` after every step."""
        with interrupt.deferred():
            yield

    def tick(self, name: str, snapshot: Callable[[], State], where: str) -> None:
        """Call after every step: saves if due; on a pending signal saves and raises."""
        self._unsaved = (name, snapshot, where)
        stopping, due = world().any(interrupt.pending(), world().main and self._due())
        saved = self._keep() if stopping or due else ""
        if stopping:
            interrupt.stop(saved, anyway=True)

    def rescue(self) -> str:
        """Save the latest unsaved state after a signal; returns a description of it.

        Does nothing with several processes: saving is collective, and not all may reach this call.
        """
        return self._keep() if world().single else ""

    def _keep(self) -> str:
        if self.folder is None or self._unsaved is None:
            return ""
        (name, snapshot, where), self._unsaved = self._unsaved, None
        return where if self.save(name, *snapshot()) else ""

    def forget(self) -> None:
        """Drop the unsaved state: it is inconsistent (mid-step) or its result is already stored."""
        self._unsaved = None

    def save(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> bool:
        """Save a state; returns False, with a warning, if the disk is full.

        `facts["layout"]`, if present, maps the first component of tensor names to a `Layout`;
        without it only the tensors of rank 0 are stored.
        """
        start = time.monotonic()
        present = world()
        number = present.on_main(lambda: max(self._numbers(name), default=0) + 1)
        final = self._path(name, number)
        part = final.with_name(f"{final.name}.part")
        layout: Mapping[str, Layout] = facts.get("layout", {})
        body = {"format_version": FORMAT_VERSION, "identity": self._identity, "facts": dict(facts)}

        def prepare() -> None:
            part.parent.mkdir(exist_ok=True)
            part.remove()
            part.mkdir()

        def write() -> None:
            with single_process():
                own = tensors if present.main else _own(tensors, layout)
                save_tensors(part / _file(present.rank), own, {})

        def finish() -> None:
            seal(part, {**body, "world": present.size})
            part.rename(final)
            final.parent.fsync()

        try:
            _together(prepare, present.main)
            _together(write)
            _together(finish, present.main)
        except Exception as problem:
            _discard(part)
            if storage_errno(problem) not in FULL:
                raise
            self._warn_full(part)
            return False
        finally:
            self._saved_at = time.monotonic()
            self._cost = self._saved_at - start
        if present.main:
            for old in self._numbers(name):
                if old <= number - KEPT:
                    _discard(self._path(name, old))
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
                f"({human(free_bytes(part.location))} free); the run continues, but a kill "
                "would lose the work since the last save"
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


_SHARED = "all processes need the same run folder, on a shared file system"


def _together(work: Callable[[], None], takes_part: bool = True) -> None:
    """Run `work` on the processes that take part; a full disk on one of them raises on all."""
    full = False
    if takes_part:
        try:
            work()
        except Exception as problem:
            if storage_errno(problem) not in FULL:
                raise
            full = True
    if world().any(full)[0]:
        raise OSError(errno.ENOSPC, "no space left for saved progress")


def _discard(folder: RunPath) -> None:
    """Remove a folder if possible; the next start ignores any remains."""
    with suppress(OSError):
        folder.remove()


def _own(tensors: Mapping[str, Tensor], layout: Mapping[str, Layout]) -> Mapping[str, Tensor]:
    """Tensors that a rank other than 0 stores: all but those equal on every process."""
    names = [n for n in tensors if layout.get(n.partition(".")[0], "same") != "same"]
    return tensors if len(names) == len(tensors) else {name: tensors[name] for name in names}


def _tensors(
    folder: RunPath, manifest: Mapping[str, Any], span: Callable[[str], tuple[int, int]] | None
) -> dict[str, Tensor]:
    """Load this process's tensors of a piece written by any number of processes."""
    before, present = manifest.get("world", 1), world()
    layout: Mapping[str, Layout] = manifest["facts"].get("layout", {})

    def read(rank: int) -> dict[str, Tensor]:
        return TensorFile(folder / _file(rank)).tensors()

    if before == present.size:
        shared = {} if layout or present.main else read(0)
        return {**shared, **read(present.rank)}
    parts = [read(rank) for rank in range(before)]
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        every = [part[name] for part in parts if name in part]
        kind = layout.get(name.partition(".")[0], "same")
        if kind == "terms":
            terms = present.round_robin(every)[present.rank]
            found[name] = sum(terms, torch.zeros_like(every[0]))
        elif kind == "rows":
            assert span is not None
            start, stop = span(name)
            found[name] = torch.cat([part.reshape(-1) for part in every])[start:stop].clone()
        else:
            found[name] = every[0]
    return found
