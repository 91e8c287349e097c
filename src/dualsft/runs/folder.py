"""The run folder: atomic stage folders, with a reason for every stage that must be re-run.

One numbered folder per step of Algorithm 1 (docs/run_folder.md). A stage is written to
`<folder>.part`, sealed by a manifest (`storage/manifest.py`), and renamed into place. The old stage
is removed only after the new one is complete; after a crash during the swap, the next reader
completes it or rolls it back. Progress of an unfinished stage is in `<folder>.work`
(`storage/resume.py`). Only one process writes at a time. Reads and writes `config.yaml`,
`manifest.json`, `metrics.jsonl` and the stage folders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from dualsft.config.settings import note_own_config, sealed_text
from dualsft.errors import ConfigError, RunError
from dualsft.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Fingerprint,
    atomic_write_text,
    damage,
    first,
    is_whole,
    jsonable,
    read_manifest,
    read_stage_manifest,
    render_manifest,
    seal,
    versions,
)
from dualsft.system import signals as interrupt
from dualsft.system.paths import Place, RunPath, is_full, run_path
from dualsft.system.usage import PeakMemory, check_room, folder_bytes, storage_failure

log = logging.getLogger(__name__)

TAIL_BYTES = 1 << 20
"""Bytes at the end of metrics.jsonl in which the last progress of a stage is looked for."""
STAGE_FOLDER = re.compile(r"[0-9]+_[a-z_]+")
RUN_FILES = {
    *("config.yaml", MANIFEST, "metrics.jsonl", "trackers"),
    *("report.md", "report.html", "model_card.md", "diagnostics", "explain"),
}
BESIDE = ("model/README.md",)
"""Files that reports write beside those of a finished stage (`lab/report/card.py`)."""


@dataclass(frozen=True, slots=True)
class StageState:
    """State of a stage on disk; only a `ready` stage may be read."""

    status: Literal["missing", "stale", "corrupt", "ready"]
    reasons: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        return self.status == "ready"


class StageWriter:
    """A stage being written: `path` is its folder, `writer / "name"` a file in it."""

    def __init__(self, path: RunPath) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.memory = PeakMemory()
        self.seconds = 0.0
        self.elsewhere = 0.0  # seconds spent on reused parts, in the runs that computed them
        self.kept = False  # whether the stage is complete and in place

    def __truediv__(self, name: str) -> RunPath:
        return self.path / name

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add facts to the stage's manifest."""
        self.facts |= jsonable(facts)

    def count(self, seconds: float, peak_bytes: int, on_gpu: bool) -> None:
        """Add the cost of a reused part, as measured in the run that computed it."""
        self.elsewhere += seconds
        if on_gpu:
            self.memory.cuda_bytes = max(self.memory.cuda_bytes or 0, peak_bytes)
        else:
            self.memory.rss_bytes = max(self.memory.rss_bytes, peak_bytes)

    @property
    def peak_memory(self) -> int:
        """Peak bytes: of the GPU if the stage used one, otherwise of the process."""
        return self.memory.cuda_bytes or self.memory.rss_bytes

    def manifest(self, folder: str, fingerprint: Fingerprint) -> dict[str, Any]:
        """The stage's manifest, without the hashes of its files."""
        return {
            "format_version": FORMAT_VERSION,
            "stage": folder.partition("_")[2],
            "fingerprint": fingerprint.as_dict(),
            "facts": self.facts,
            "seconds": round(self.seconds, 3),
            "peak_memory": self.memory.as_dict(),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }


def _beside(path: RunPath, suffix: str) -> RunPath:
    return path.with_name(path.name + suffix)


def _is_run(names: list[str]) -> bool:
    """Whether a folder without a valid manifest.json holds only files of a run, and a stage or the
    settings."""
    stages = {name for name in names if STAGE_FOLDER.fullmatch(name.partition(".")[0])}
    return bool(stages or "config.yaml" in names) and set(names) - stages <= RUN_FILES


class RunDir:
    """One run's folder; `path` need not exist before `create`."""

    def __init__(self, path: Place | str) -> None:
        self.path = run_path(path)
        self.followers: list[Callable[[Mapping[str, Any]], None]] = []
        """Called with each record of metrics.jsonl after it is written."""
        self._lock_depth = 0
        self._lock_file = -1

    def create(self) -> RunDir:
        """Create the folder or open a run folder; any other non-empty folder is refused."""
        try:
            str(self.path).encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(
                f"--out: {str(self.path)!r} is not valid UTF-8, which file names in a run must be; "
                "give another name"
            ) from None
        try:
            if os.path.lexists(self.path.location) and not self.path.is_dir():
                raise ConfigError(f"--out: {str(self.path)!r} is not a folder; give a new folder")
        except RunError as problem:
            raise ConfigError(f"--out: {problem}") from None
        visible = [name for name in self.path.names() if not name.startswith(".")]
        own = MANIFEST in visible and "stages" in read_manifest(self.path / MANIFEST)[0]
        if visible and not own and not _is_run(visible):
            raise ConfigError(
                f"--out: {str(self.path)!r} is neither empty nor a run folder; give a new folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        with self.lock():
            self._write_manifest()
        return self

    def write_config(self, text: str) -> None:
        """Write `config.yaml` with a seal that detects damage."""
        note_own_config(sealed_text(text))
        atomic_write_text(self.path / "config.yaml", sealed_text(text))

    def _write_manifest(self) -> None:
        """Write the run's `manifest.json`: a summary of the finished stages."""
        stages: dict[str, Any] = {}
        for folder in sorted(filter(STAGE_FOLDER.fullmatch, self.path.names())):
            manifest, wrong = read_stage_manifest(self.path / folder)
            if not wrong:
                names = ("stage", "seconds", "peak_memory", "finished")
                summary = {"fingerprint": manifest["fingerprint"].get("hash")}
                stages[folder] = summary | {name: manifest[name] for name in names}
        body = {
            "format_version": FORMAT_VERSION,
            "versions": versions(),
            "platform": platform.platform(),
            "stages": stages,
        }
        atomic_write_text(self.path / MANIFEST, render_manifest(body))

    def log_metrics(self, stage: str, **values: Any) -> None:
        """Append one line to `metrics.jsonl`; nan and inf, not valid in JSON, become strings."""
        assert "time" not in values
        record = {"time": round(time.time(), 3), "stage": stage, **values}
        line = json.dumps(jsonable(record), allow_nan=False) + "\n"
        try:
            with (self.path / "metrics.jsonl").open("ab+") as file:
                if file.seek(0, os.SEEK_END) > 0:  # a crash may have truncated the last line
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else "\n" + line
                file.write(line.encode("ascii"))
        except OSError as problem:
            if not is_full(problem):
                raise
            log.warning("%s: the disk is full; a line of metrics.jsonl was not written", self.path)
        for follow in self.followers:
            follow(record)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The last records of `metrics.jsonl`; a line truncated by a crash is skipped."""
        records: list[dict[str, Any]] = []
        with (
            contextlib.suppress(FileNotFoundError),
            (self.path / "metrics.jsonl").open() as file,
        ):
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            for line in file.read(TAIL_BYTES).splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    record = json.loads(line)
                    if isinstance(record, dict) and {"time", "stage"} <= record.keys():
                        records.append(record)
        return records

    def under_way(self, since: float) -> dict[str, Any]:
        """The `stage` that is being written and its last progress record not older than `since`.

        A killed attempt may have left a later stage, so the first `.part` is the current one.
        """
        parts = sorted(name for name in self.path.names() if name.endswith(".part"))
        if not parts:
            return {}
        stage = parts[0].partition("_")[2].removesuffix(".part")
        for record in reversed(self.read_metrics()):
            if record["time"] < since:
                break
            if record["stage"] == stage and "percentage" in record:
                return record
        return {"stage": stage}

    def stage_path(self, folder: str) -> RunPath:
        """Folder of a finished stage."""
        assert STAGE_FOLDER.fullmatch(folder), folder
        return self.path / folder

    def stage_state(self, folder: str, fingerprint: Fingerprint) -> StageState:
        """Whether a stage can be reused and, if not, why; hashes every file for `ready`."""
        final = self.stage_path(folder)
        self._recover_if_free(folder)
        try:
            if not final.exists():
                return StageState("missing")
        except RunError as problem:
            return StageState("corrupt", (f"{folder} is not a folder: {problem}",))
        manifest, wrong = read_stage_manifest(final)
        if wrong:
            return StageState("corrupt", (wrong,))
        if reasons := fingerprint.explain(manifest):
            return StageState("stale", tuple(reasons))
        reasons, extra = damage(final, manifest)
        if extra := [name for name in extra if name not in BESIDE]:
            log.info(
                "%s: ignoring files that the stage did not write: %s",
                final,
                ", ".join(first(extra)),
            )
        return StageState("corrupt" if reasons else "ready", tuple(reasons))

    @contextlib.contextmanager
    def write_stage(
        self, folder: str, fingerprint: Fingerprint, need: int = 0
    ) -> Iterator[StageWriter]:
        """Yield an empty folder for a stage; on a clean exit it replaces the old stage.

        `need` is the expected size on disk in bytes, as far as it is known. On an exception the
        new folder is removed and the old stage is kept.
        """
        final = self.stage_path(folder)
        part = _beside(final, ".part")
        with self.lock():
            self._recover(folder)
            part.remove()
            check_room(self.path.location, need, f"the stage {folder}")
            part.mkdir()
            writer = StageWriter(part)
            start = time.perf_counter()
            with contextlib.ExitStack() as waiting:
                try:
                    with writer.memory:
                        yield writer
                    writer.seconds = time.perf_counter() - start + writer.elsewhere
                    # computation is done: defer signals until the stage is in place
                    waiting.enter_context(interrupt.deferred())
                    seal(part, writer.manifest(folder, fingerprint))
                except BaseException as problem:
                    failure = storage_failure(problem, part.location, folder_bytes(part))
                    with contextlib.suppress(OSError):
                        part.remove()
                    if failure is not None:
                        raise failure from problem
                    raise
                self._swap(part, final)
                writer.kept = True
                self.discard_work(folder)
                self._write_manifest()

    def adopt(self, folder: str, lender: RunPath) -> bool:
        """Reuse the finished stage of another run folder, manifest included, by hard links.

        Returns False and copies nothing if files have disappeared in the meantime: another process
        is replacing the stage, or removing files that a comparison does not keep.
        """
        final = self.stage_path(folder)
        part = _beside(final, ".part")
        with self.lock():
            self._recover(folder)
            part.remove()
            try:
                part.mkdir()
                for name, file in (lender / folder).tree()[0].items():  # plain files only
                    (part / name).parent.mkdir(parents=True, exist_ok=True)
                    (part / name).link_to(file)
            except FileNotFoundError:
                if has_all(lender / folder):  # no file is missing: another error
                    raise
            if not has_all(part):
                part.remove()
                return False
            self._swap(part, final)
            return True

    def work_path(self, folder: str) -> RunPath:
        """Folder for a running stage's saved progress."""
        return _beside(self.stage_path(folder), ".work")

    def discard_work(self, folder: str) -> None:
        """Remove leftover progress of an unfinished attempt next to a complete stage."""
        self.work_path(folder).remove()
        _beside(self.stage_path(folder), ".part").remove()

    def sweep(self) -> None:
        """Remove temporary files of killed processes; the caller must hold the lock."""
        for file in self.path.glob(".*.tmp"):
            file.remove()

    def _swap(self, part: RunPath, final: RunPath) -> None:
        """Replace the old folder by a sealed one; recoverable after a crash at any point."""
        old = _beside(final, ".old")
        old.remove()
        if final.is_taken():
            final.rename(old)
        part.rename(final)
        self.path.fsync()  # the renames must be on disk before the old stage is deleted
        old.remove()

    def _recover(self, folder: str) -> None:
        """Complete or roll back a swap interrupted by a crash; the caller must hold the lock."""
        final = self.stage_path(folder)
        part, old = _beside(final, ".part"), _beside(final, ".old")
        if not old.is_taken() and final.is_taken():
            return
        if not is_whole(final):
            for candidate in (part, old):  # a sealed .part is newer than .old
                if is_whole(candidate):
                    log.warning("%s: recovering %s after a crash", final, candidate.name)
                    final.remove()
                    candidate.rename(final)
                    self.path.fsync()
                    break
        old.remove()

    def _recover_if_free(self, folder: str) -> None:
        """`_recover` for readers; skipped while another process writes, or if read-only."""
        final = self.stage_path(folder)
        swapping = _beside(final, ".old").is_taken()
        if not swapping and (final.is_taken() or not _beside(final, ".part").is_taken()):
            return
        try:
            free = self._try_lock()
        except OSError:
            return
        if free:
            try:
                self._recover(folder)
            finally:
                self._unlock()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for writing; raises with the owner's name if locked. Reentrant."""
        if not self._try_lock():
            owner = (self.path / ".lock").read_text(encoding="utf-8", errors="replace").strip()
            raise RunError(
                f"{self.path}: in use by {owner or 'another process'}; wait for it to end, or give"
                " another --out"
            )
        try:
            yield
        finally:
            self._unlock()

    def _try_lock(self) -> bool:
        if self._lock_depth == 0:
            file = (self.path / ".lock").descriptor(os.O_RDWR | os.O_CREAT)
            if not locked(file, self.path):
                os.close(file)
                return False
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            self._lock_file = file
        self._lock_depth += 1
        return True

    def _unlock(self) -> None:
        self._lock_depth -= 1
        if self._lock_depth == 0:
            os.ftruncate(self._lock_file, 0)
            os.close(self._lock_file)


def locked(file: int, path: Place) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock.

    Always True on file systems that do not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        log.warning("%s: this file system does not support locks: %s", path, error)
    return True


class FollowedRunDir(RunDir):
    """The run folder for ranks other than 0, which take part in stages but write nothing."""

    def create(self) -> RunDir:
        return self

    def log_metrics(self, stage: str, **values: Any) -> None:
        """No-op; rank 0 writes it."""

    @contextlib.contextmanager
    def write_stage(
        self, folder: str, fingerprint: Fingerprint, need: int = 0
    ) -> Iterator[StageWriter]:
        """Yield a temporary folder that is discarded."""
        with tempfile.TemporaryDirectory(prefix="dualsft-") as name:
            writer = StageWriter(RunPath(name))
            with writer.memory:
                yield writer

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """No-op; rank 0 holds the lock."""
        yield


def has_all(stage: RunPath) -> bool:
    """Whether every file in the manifest exists with the recorded size."""
    manifest, wrong = read_stage_manifest(stage)
    if wrong:
        return False
    places = [(stage / name, entry["size"]) for name, entry in manifest["files"].items()]
    return all(file.is_file() and file.size == size for file, size in places)
