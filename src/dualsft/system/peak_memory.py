"""Peak memory of a block of code, recorded for every stage, method and diagnostic.

Written to the stage manifests (`runs/folder.py`) and method accounts (`runs/method.py`), and used
by the trials that memory plans are based on. Resident memory is the kernel's peak (VmHWM), GPU
memory the peak of PyTorch's allocator. Never imports torch or initializes CUDA itself. Not part of
Algorithm 1.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, ClassVar


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
    """Peak resident memory since the last reset, in bytes; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
