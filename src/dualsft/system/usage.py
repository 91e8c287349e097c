"""Memory and disk space: what is in use, what is free, and messages when it runs out.

Out of memory: sums over a batch do not depend on how it is split (no result depends on the batch
size beyond rounding, docs/algorithm.md), so a batch that does not fit is computed again in halves,
with a warning (`Smaller`). If a single example does not fit, a `RunError` names what to change.
Peak memory (`PeakMemory`) is recorded for every stage, method and diagnostic: the kernel's peak of
resident memory (VmHWM), and the peak of PyTorch's allocator.

Disk: the required space follows from shapes before anything is written: a vector over the
candidates takes 4 bytes per entry (8 for an fp64 model), a model folder the size of its weights in
the run's dtype. Never initializes CUDA, and imports torch only where a device is given. Not part of
Algorithm 1.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dualsft.errors import RunError
from dualsft.system.paths import FULL, RunPath

if TYPE_CHECKING:
    import torch

_PHRASES = (
    "out of memory",
    "cublas_status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
)

FAILING = FULL | {errno.EIO, errno.EROFS, errno.EFBIG}
SPARE_BYTES = 16 << 20
"""Reserve for manifests, logs and summaries, whose sizes do not follow from shapes."""


# --- memory -------------------------------------------------------------------------------------


def is_panic(problem: BaseException) -> bool:
    """Whether this is a panic of a library in Rust, which is no `Exception` in Python."""
    return type(problem).__module__ == "pyo3_runtime"


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether the error is an out-of-memory error, on a GPU or on the CPU."""
    import torch

    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(problem).lower()
    return isinstance(problem, RuntimeError) and any(phrase in text for phrase in _PHRASES)


class Smaller(Exception):
    """A batch did not fit; retry with `batch_tokens`."""

    def __init__(self, batch_tokens: int, shape: Sequence[int], cure: str) -> None:
        self.batch_tokens = batch_tokens
        rows, tokens = shape
        super().__init__(
            f"out of memory with {rows} examples of {tokens:,} tokens in a batch; continuing with "
            f"at most {batch_tokens:,} tokens, the same sums in smaller pieces ({cure} "
            "starts with it)"
        )

    @classmethod
    def than(cls, shape: Sequence[int], problem: BaseException, key: str) -> Smaller:
        """Half of a batch of shape (examples, tokens); raises if it is a single example.

        `key` is the setting that controls it: tokens per batch, or examples per micro-batch.
        """
        rows, tokens = shape
        if rows == 1:
            raise RunError(
                f"out of memory with a single example of {tokens:,} tokens ({problem}); lower "
                "data.max_length, use model.dtype=bfloat16 on a GPU, or a machine with more memory"
            ) from None
        half = rows // 2
        count = half if key.endswith("micro_batch_size") else tokens * half
        return cls(tokens * half, shape, f"{key}={count}")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: on the GPU, or in host memory for other devices."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(_index(device)))
        # Memory that the caching allocator has reserved but not allocated counts as free.
        most = min(free + torch.cuda.memory_reserved(device), allowed)
        return max(0, most - torch.cuda.memory_allocated(device))
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():  # MemAvailable includes reclaimable caches
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found = [int(lines["MemAvailable"].split()[0]) * 1024]
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip() != "max":  # limit of the container
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        found.append(int(limit.read_text()) - used)
    return max(0, min(found))


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Limit GPU memory of this process to `gib` (model.memory); None removes the limit."""
    if device.type != "cuda":
        return
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    share = 1.0 if gib is None else min(1.0, gib * 2**30 / total)
    torch.cuda.set_per_process_memory_fraction(share, _index(device))


def _index(device: torch.device) -> int:
    """Device index; these PyTorch functions do not accept "cuda" without an index."""
    import torch

    return torch.cuda.current_device() if device.index is None else device.index


def give_back(device: torch.device) -> None:
    """Release the memory of a failed batch before the next attempt."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class PeakMemory:
    """Context manager that measures peak memory of its block, in bytes. Blocks may nest.

    `rss_bytes` is the peak resident memory of this process; if the system cannot reset the counter,
    the peak since the process started (`since_start`). `cuda_bytes` is the largest peak allocation
    of any device, or None if torch.cuda is not in use.
    """

    _open: ClassVar[list[PeakMemory]] = []

    def __init__(self) -> None:
        self.rss_bytes = 0
        self.cuda_bytes: int | None = None
        self.since_start = False

    def __enter__(self) -> PeakMemory:
        self._record()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        except OSError:
            self.since_start = True
        for device in _cuda_devices():
            sys.modules["torch"].cuda.reset_peak_memory_stats(device)
        self._open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._record()
        self._open.remove(self)

    @classmethod
    def _record(cls) -> None:
        """Add the peak since the last reset to all open blocks, before the next reset clears it."""
        rss = _peak_rss()
        cuda = [sys.modules["torch"].cuda.max_memory_allocated(d) for d in _cuda_devices()]
        for block in cls._open:
            block.rss_bytes = max(block.rss_bytes, rss)
            if cuda:
                block.cuda_bytes = max(block.cuda_bytes or 0, *cuda)

    def as_dict(self) -> dict[str, Any]:
        """The form stored in a manifest."""
        names = ("rss_bytes", "since_start", "cuda_bytes")
        return {name: getattr(self, name) for name in names}


def _cuda_devices() -> range:
    """All CUDA devices; empty unless torch.cuda is already initialized."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return range(0)
    return range(torch.cuda.device_count())


def _peak_rss() -> int:
    """Peak resident memory since the last reset, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_memory_gib() -> float:
    """Peak memory of this process in GiB: GPU memory if CUDA is in use, else resident memory."""
    if _cuda_devices():
        return sys.modules["torch"].cuda.max_memory_allocated() / 2**30
    return _peak_rss() / 2**30


# --- disk ---------------------------------------------------------------------------------------


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
            f"{path}: {what} needs about {human(need)} on disk, besides a reserve of "
            f"{human(SPARE_BYTES)}, and {human(free)} are free; free some space, or give an --out "
            "on a larger disk, then run the same command again (finished stages are kept)"
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
