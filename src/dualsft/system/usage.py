"""Out-of-memory detection on all devices, and fallback to smaller batches.

Sums over a batch do not depend on how it is split (no result depends on the batch size beyond
rounding, docs/algorithm.md). A batch that does not fit is therefore recomputed in halves, with a
warning. If a single example does not fit, a `RunError` names what to change. Not part of
Algorithm 1.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from dualsft.errors import RunError

_PHRASES = (
    "out of memory",
    "cublas_status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
)


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether the error is an out-of-memory error, on a GPU or on the CPU."""
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
            f"out of memory with {rows} examples of {tokens:,} tokens in a batch; going on with "
            f"at most {batch_tokens:,} tokens, the same sums in smaller pieces (set {cure} to "
            "start so)"
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
    total = torch.cuda.get_device_properties(device).total_memory
    share = 1.0 if gib is None else min(1.0, gib * 2**30 / total)
    torch.cuda.set_per_process_memory_fraction(share, _index(device))


def _index(device: torch.device) -> int:
    """Device index; these PyTorch functions do not accept "cuda" without an index."""
    return torch.cuda.current_device() if device.index is None else device.index


def give_back(device: torch.device) -> None:
    """Release the memory of a failed batch before the next attempt."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
