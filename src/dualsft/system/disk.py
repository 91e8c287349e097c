"""Storage: what a stage will need, whether it is there, and what to say when a write fails.

The need is known from shapes before anything is written: a vector over the candidates is 4 bytes an
entry (8 for an fp64 model), a model folder has the size of its weights in the run's dtype. It
belongs to no line of Algorithm 1.
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
"""For manifests, logs and summaries, which no shape tells."""


def storage_errno(problem: BaseException) -> int | None:
    """The system's error number when a write failed; safetensors and pyarrow wrap it in text."""
    if isinstance(problem, OSError) and problem.errno is not None:
        return problem.errno if problem.errno in FAILING else None
    if type(problem).__name__ in ("SafetensorError", "OSError", "ArrowInvalid"):
        found = re.search(r"(?:os error |errno |Errno )(\d+)", str(problem))
        if found is not None and int(found[1]) in FAILING:
            return int(found[1])
    return None


def cache_root() -> Path:
    """Where converted models and downloaded data are kept."""
    chosen = os.environ.get("DUALSFT_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dualsft"


def free_bytes(path: Path) -> int:
    """Free space where a path is, or will be."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def human(num_bytes: int) -> str:
    """1,234 bytes (1.2 KB): exact, and at a glance."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{num_bytes:,} bytes" + (f" ({size:.1f} {unit})" if unit != "bytes" else "")


def check_room(path: Path, need: int, what: str) -> None:
    """Refuse work whose result is known not to fit."""
    free = free_bytes(path)
    if need + SPARE_BYTES > free:
        raise RunError(
            f"{path}: {what} needs about {human(need)} on disk and {human(free)} are free; free "
            "some space, or give an --out on a larger disk, then run the same command again "
            "(finished stages are kept)"
        )


def storage_failure(problem: BaseException, path: Path, written: int | None) -> RunError | None:
    """The message for a write that failed, or None when the problem is another one."""
    number = storage_errno(problem)
    if number is None:
        return None
    name = getattr(problem, "filename", None)
    where = name if isinstance(name, str) and os.sep in name else path
    try:
        free = human(free_bytes(path))
    except OSError:
        free = "an unknown number of bytes"
    so_far = f", {human(written)} of it were written" if written is not None else ""
    return RunError(
        f"{where}: cannot be written: {os.strerror(number)} ({free} free{so_far}); what was "
        "finished before is intact: make room or repair the disk, then run the same command again"
    )


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a write that fails anywhere under `path` into a message with its cure."""
    try:
        yield
    except Exception as problem:
        failure = storage_failure(problem, path, None)
        if failure is None:
            raise
        raise failure from problem


def folder_bytes(folder: RunPath) -> int:
    """Bytes of the plain files in a folder."""
    return sum(file.size for file in folder.tree()[0].values())
