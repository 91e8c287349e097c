"""The peak memory of a block of work: what every stage, method and diagnostic says it took.

No line of Algorithm 1: the numbers beside each of them in the manifests (`runs/folder.py`), in a
method's accounts (`runs/method.py`) and in the trials that plans are made from. The resident peak
is the kernel's own (VmHWM), the GPU's that of PyTorch's allocator; PyTorch is asked only if
somebody else has imported it and uses a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, ClassVar


class PeakMemory:
    """Peak memory while the block runs, in bytes.

    `rss_bytes` is the resident peak of this process; where the system cannot reset it, the peak
    since the process began (`since_start`). `cuda_bytes` is the largest allocated peak of a device,
    None while torch.cuda is not in use. Blocks may nest.
    """

    _open: ClassVar[list[PeakMemory]] = []

    def __init__(self) -> None:
        self.rss_bytes = 0
        self.cuda_bytes: int | None = None
        self.since_start = False

    def __enter__(self) -> PeakMemory:
        self._record()
        try:
            Path("/proc/self/clear_refs").write_text("5")
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
        """Give the peak since the last reset to every open block: the next reset forgets it."""
        rss = _peak_rss()
        cuda = [sys.modules["torch"].cuda.max_memory_allocated(d) for d in _cuda_devices()]
        for block in cls._open:
            block.rss_bytes = max(block.rss_bytes, rss)
            if cuda:
                block.cuda_bytes = max(block.cuda_bytes or 0, *cuda)

    def as_dict(self) -> dict[str, Any]:
        """As a manifest holds it."""
        names = ("rss_bytes", "since_start", "cuda_bytes")
        return {name: getattr(self, name) for name in names}


def _cuda_devices() -> range:
    """The devices to ask; none unless somebody else already uses torch.cuda."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return range(0)
    return range(torch.cuda.device_count())


def _peak_rss() -> int:
    """Resident peak of this process since the last reset, in bytes; 0 where nothing tells it."""
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
