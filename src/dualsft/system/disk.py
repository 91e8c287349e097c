"""Disk space: checks before a stage writes, and error messages for failed writes.

The required space follows from shapes before anything is written: a vector over the candidates
takes 4 bytes per entry (8 for an fp64 model), a model folder the size of its weights in the run's
dtype. Not part of Algorithm 1.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualsft.errors import RunError
from dualsft.system.paths import RunPath

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
FAILING = FULL | {errno.EIO, errno.EROFS, errno.EFBIG}
SPARE_BYTES = 16 << 20
"""Reserve for manifests, logs and summaries, whose sizes do not follow from shapes."""


def storage_errno(problem: BaseException) -> int | None:
    """The errno of a failed write, else None; safetensors and pyarrow only give it as text."""
    if isinstance(problem, OSError) and problem.errno is not None:
        return problem.errno if problem.errno in FAILING else None
    if type(problem).__name__ in ("SafetensorError", "OSError", "ArrowInvalid"):
        found = re.search(r"(?:os error |errno |Errno )(\d+)", str(problem))
        if found is not None and int(found[1]) in FAILING:
            return int(found[1])
    return None


def cache_root() -> Path:
    """Cache folder for converted models and downloaded data."""
    chosen = os.environ.get("DUALSFT_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dualsft"


def free_bytes(path: Path) -> int:
    """Free bytes on the file system of a path, which need not exist yet."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def human(num_bytes: int) -> str:
    """Format a size exactly and rounded: 1,234 bytes (1.2 KB)."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{num_bytes:,} bytes" + (f" ({size:.1f} {unit})" if unit != "bytes" else "")


def check_room(path: Path, need: int, what: str) -> None:
    """Raise if `need` bytes do not fit on the disk of `path`."""
    free = free_bytes(path)
    if need + SPARE_BYTES > free:
        raise RunError(
            f"{path}: {what} needs about {human(need)} on disk and {human(free)} are free; free "
            "some space, or give an --out on a larger disk, then run the same command again "
            "(finished stages are kept)"
        )


def storage_failure(problem: BaseException, path: Path, written: int | None) -> RunError | None:
    """The error to raise for a failed write, or None if `problem` is not one."""
    number = storage_errno(problem)
    if number is None:
        return None
    name = getattr(problem, "filename", None)
    where = name if isinstance(name, str) and os.sep in name else path
    try:
        free = human(free_bytes(path))
    except OSError:
        free = "an unknown number of bytes"
    so_far = f", {human(written)} written" if written is not None else ""
    return RunError(
        f"{where}: cannot be written: {os.strerror(number)} ({free} free{so_far}); earlier "
        "results are intact: free disk space or repair the disk, then run the same command again"
    )


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a failed write under `path` into a `RunError` that names the cure."""
    try:
        yield
    except Exception as problem:
        failure = storage_failure(problem, path, None)
        if failure is None:
            raise
        raise failure from problem


def folder_bytes(folder: RunPath) -> int:
    """Total bytes of the regular files in a folder."""
    return sum(file.size for file in folder.tree()[0].values())
