"""Optimizer state in host memory, copied to the device part by part for each step.

Algorithm 1, lines 1 and 12 (Warmup, MaskedFT), with `warmup.offload`. Moments and low halves of the
masters are in pinned host memory. The update of one part overlaps with the copy in of the next and
the copy out of the previous part, each on its own stream. At most `_DEPTH` parts are on the device
at a time. The arithmetic is the same as without offload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dualsft.train.step import SCALARS, Held

PART = 1 << 25
"""Entries per part: at most 320 MiB with fp32 moments and low halves."""
_DEPTH = 3


@dataclass(frozen=True)
class Part:
    """Entries from `first` to `last` of one parameter, and the function that updates them."""

    held: Held
    first: int
    last: int
    step: Callable[[Held, int, int], None]

    def host(self) -> Held:
        """This part of the state vectors, where they are stored (views)."""
        return {
            name: t[self.first : self.last] for name, t in self.held.items() if name not in SCALARS
        }

    def run(self, vectors: Held) -> None:
        """Update with these vectors in place of the stored ones."""
        scalars = {name: t for name, t in self.held.items() if name in SCALARS}
        self.step(scalars | vectors, self.first, self.last)


def run_parts(parts: Iterable[Part], device: torch.device) -> None:
    """Update every part; state that is not on `device` is copied there and back."""
    if device.type == "cuda":
        _run_on_cuda(parts, device)
        return
    for part in parts:
        host = part.host()
        vectors = {name: t.to(device) for name, t in host.items()}  # no copy if already there
        part.run(vectors)
        for name, t in host.items():
            if vectors[name] is not t:
                t.copy_(vectors[name])


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Copy streams (in, out), reused by every step: the allocator keeps one pool per stream."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _run_on_cuda(parts: Iterable[Part], device: torch.device) -> None:
    """Copy in, update and copy out on three streams; return when all state is back on the host."""
    here = torch.cuda.current_stream(device)
    inward, outward = _streams(device)
    under_way: deque[tuple[torch.cuda.Event, Held]] = deque()
    arrived: deque[tuple[Part, Held, torch.cuda.Event]] = deque()

    def finish(part: Part, vectors: Held, ready: torch.cuda.Event) -> None:
        here.wait_event(ready)
        part.run(vectors)
        outward.wait_stream(here)
        with torch.cuda.stream(outward):
            for name, t in part.host().items():
                t.copy_(vectors[name], non_blocking=True)
            done = torch.cuda.Event()
            done.record(outward)
        under_way.append((done, vectors))  # keeps the vectors alive until the copy is done

    for part in parts:
        while len(under_way) + len(arrived) >= _DEPTH:
            if under_way:
                under_way.popleft()[0].synchronize()
            else:
                finish(*arrived.popleft())
        with torch.cuda.stream(inward):
            vectors = {name: _taken(t, device, here, outward) for name, t in part.host().items()}
            ready = torch.cuda.Event()
            ready.record(inward)
        arrived.append((part, vectors, ready))
        if len(arrived) > 1:
            finish(*arrived.popleft())
    while arrived:
        finish(*arrived.popleft())
    outward.synchronize()


def _taken(t: Tensor, device: torch.device, *users: torch.cuda.Stream) -> Tensor:
    """A copy on the device whose memory is not reused while `users` still work on it."""
    copy = t.to(device, non_blocking=True)
    for stream in users:
        copy.record_stream(stream)
    return copy
