"""Pieces: the state of unfinished work, so that a killed stage goes on from where it was.

While a stage runs, its long loops (`passes.py`, `training.py`) save what they have so far: the sum
of gradients and the values of the examples done, or masters and moments after a step. A piece is a
folder in `<stage>.work/`, written as `.part`, sealed by a manifest with the SHA-256 of its file,
and renamed; the one before it is kept until two newer ones exist. On the next start the newest
piece that verifies is taken up and the others are named. Pieces carry the fingerprint of their
stage and the versions of what computed them: under other settings they are not used. A finished
stage has none. Orders and noise depend on (seed, epoch, step) alone, so no random state is saved.

No line of Algorithm 1: the reason why its lines survive a kill, to the same bits.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dualsft import interrupt
from dualsft.disk import FULL, free_bytes, human, storage_errno
from dualsft.manifest import FORMAT_VERSION, damage, fsync, read_manifest, seal, versions
from dualsft.vectors import save_tensors

State = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""Tensors by name, and facts as JSON can hold them (its floats keep every bit)."""

MAX_SHARE = 0.05
"""Saving may take this share of the time, however often it is asked for."""
KEPT = 2
_TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class Piece:
    """A saved state that verified."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Pieces:
    """The pieces of one stage; `Pieces()` keeps none and only answers signals."""

    def __init__(
        self,
        folder: Path | None = None,
        fingerprint: str = "",
        every: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder = folder
        self.every = every
        self._identity = {"fingerprint": fingerprint, "versions": versions()}
        self._say = say
        self._saved_at = time.monotonic()
        self._cost = 0.0
        self._full = False
        self._unsaved: tuple[str, Callable[[], State], str] | None = None
        """The newest state of the newest loop: kept until it is saved or another comes."""

    def load(self, name: str) -> Piece | None:
        """The newest state of this work that verifies; says which were passed over, and why."""
        for number in sorted(self._numbers(name), reverse=True):
            folder = self._path(name, number)
            manifest, wrong = read_manifest(folder / "manifest.json")
            if not wrong and manifest.get("identity") != self._identity:
                shutil.rmtree(folder, ignore_errors=True)  # other settings: no use to anybody
                continue
            if not wrong:
                wrong = "; ".join(damage(folder, manifest)[0])
            if not wrong:
                return Piece(load_file(str(folder / _TENSORS)), manifest["facts"])
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
        stopping = interrupt.pending()
        saved = self.rescue() if stopping or self._due() else ""
        if stopping:
            interrupt.stop(saved)

    def rescue(self) -> str:
        """Save the newest state that is not saved yet; returns what it is, in words."""
        if self.folder is None or self._unsaved is None:
            return ""
        (name, snapshot, where), self._unsaved = self._unsaved, None
        return where if self.save(name, *snapshot()) else ""

    def forget(self) -> None:
        """The newest state is no more: half a step is in it, or its result is kept elsewhere."""
        self._unsaved = None

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bool:
        """Keep this state; False when the disk is full, which is said and ends no work."""
        assert self.folder is not None
        start = time.monotonic()
        number = max(self._numbers(name), default=0) + 1
        final = self._path(name, number)
        part = final.with_name(f"{final.name}.part")
        try:
            self.folder.mkdir(exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            save_tensors(part / _TENSORS, tensors, {})
            body = {"format_version": FORMAT_VERSION, "identity": self._identity}
            seal(part, {**body, "facts": dict(facts)})
            part.rename(final)
            fsync(self.folder)
        except Exception as problem:
            shutil.rmtree(part, ignore_errors=True)
            if storage_errno(problem) not in FULL:
                raise
            self._warn_full(part)
            return False
        finally:
            self._cost = time.monotonic() - start
            self._saved_at = time.monotonic()
        for old in self._numbers(name):
            if old <= number - KEPT:
                shutil.rmtree(self._path(name, old), ignore_errors=True)
        return True

    def _due(self) -> bool:
        if self.every is None:
            return False
        least = max(self.every, self._cost / MAX_SHARE) if self.every > 0 else 0.0
        return time.monotonic() - self._saved_at >= least

    def _warn_full(self, part: Path) -> None:
        if not self._full:
            self._say(
                f"warning: {part}: progress could not be saved, the disk is full "
                f"({human(free_bytes(part))} free); going on: a kill would now lose the work "
                "since the last save"
            )
        self._full = True

    def _path(self, name: str, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.{number:06d}"

    def _numbers(self, name: str) -> list[int]:
        if self.folder is None or not self.folder.is_dir():
            return []
        ends = (path.name.removeprefix(f"{name}.") for path in self.folder.glob(f"{name}.*"))
        return [int(end) for end in ends if end.isdecimal()]
