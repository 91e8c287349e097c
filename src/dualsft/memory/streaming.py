"""A vector in host memory, streamed to the device block by block.

Used by `HostPlacement` (`memory/placement.py`) for the plan "host": G and the direction of
Algorithm 1 lines 3, 5, 6 and 8 do not fit on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualsft.memory.plans import NUM_SLOTS
from dualsft.storage.vectors import LazyVector, ParamVector, Vector

DtypeOf = Callable[[str], torch.dtype]
"""The dtype of a parameter's block, by name."""


@dataclass(eq=False)
class _Slot:
    """A buffer on the device and the block it currently holds."""

    buffer: Tensor
    name: str | None = None
    changed: bool = False
    copied_in: Any = None
    """Event: the copy to the device is done."""
    used: Any = None
    """Event: the last use of the block is done; None when unknown."""
    copied_out: Any = None
    """Event: the copy back to host memory is done."""


class BlockStream:
    """A vector in host memory whose blocks are copied to the device on demand.

    A few buffers ("slots") on the device hold the blocks in use. The next block is predicted from
    the order of the previous batch; its copy in and the copy out of the last block overlap with the
    computation, each on its own CUDA stream. On a CPU these are plain copies. 1-D parameters always
    stay on the device: there are many of them and they are small. A block returned by `read` stays
    valid until three other blocks have been requested, so the direction of q, k and v can be used
    together.
    """

    def __init__(self, home: Mapping[str, Tensor], device: torch.device) -> None:
        self.home = home
        self.device = device
        self._cuda = device.type == "cuda"
        self._in = torch.cuda.Stream(device) if self._cuda else None
        self._out = torch.cuda.Stream(device) if self._cuda else None
        self._small = {name: t.to(device, copy=True) for name, t in home.items() if t.ndim < 2}
        large = [t for t in home.values() if t.ndim >= 2]
        size = max((t.numel() for t in large), default=0)
        self._slots = [  # least recently used first
            _Slot(torch.empty(size, dtype=large[0].dtype, device=device))
            for _ in range(min(NUM_SLOTS, len(large)))
        ]
        self._stored: dict[str, Any] = {}
        self._follows: dict[str, str] = {}
        self._last: str | None = None
        if self._in is not None:
            self._in.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def changed(self, name: str) -> Iterator[Tensor]:
        """The block of one parameter on the device, to accumulate into."""
        if name in self._small:
            yield self._small[name]
            return
        slot = self._take(name)
        self._wait(slot.copied_out)  # a copy out may still read the buffer to be written
        slot.changed, slot.used = True, None
        yield self._view(slot, name)
        slot.used = self._mark()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The block of one parameter on the device, cast to `dtype`."""
        if name in self._small:
            return self._small[name].to(dtype)
        return self._view(self._take(name), name).to(dtype)

    def flush(self) -> None:
        """Copy all modified blocks back to host memory and wait for the copies."""
        for slot in self._slots:
            self._copy_out(slot)
        for name, block in self._small.items():
            self.home[name].copy_(block)
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def _take(self, name: str) -> _Slot:
        """The slot that holds this block; starts the copy of the block expected next."""
        if name != self._last:
            if self._last is not None:
                self._follows[self._last] = name
                previous = self._find(self._last)
                if previous is not None:
                    self._copy_out(previous)
            self._last = name
        slot = self._find(name) or self._copy_in(name)
        self._slots.remove(slot)
        self._slots.append(slot)
        self._wait(slot.copied_in)
        following = self._follows.get(name)
        if following is not None and self._find(following) is None and len(self._slots) > 1:
            self._copy_in(following)
        return slot

    def _find(self, name: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.name == name), None)

    def _copy_in(self, name: str) -> _Slot:
        """Copy a block into the least recently used slot."""
        slot = self._slots.pop(0)
        self._copy_out(slot)
        # without an event for its last use, wait for everything queued on the current stream
        free = slot.copied_out or slot.used or self._mark()
        slot.name, slot.used, slot.copied_out = name, None, None
        with self._on(self._in, free, self._stored.get(name)):
            self._view(slot, name).copy_(self.home[name], non_blocking=True)
            slot.copied_in = self._mark()
        self._slots.append(slot)
        return slot

    def _copy_out(self, slot: _Slot) -> None:
        """Copy a modified block back to host memory."""
        if not slot.changed or slot.name is None:
            return
        with self._on(self._out, slot.used or self._mark()):
            self.home[slot.name].copy_(self._view(slot, slot.name), non_blocking=True)
            slot.copied_out = self._stored[slot.name] = self._mark()
        slot.changed = False

    def _view(self, slot: _Slot, name: str) -> Tensor:
        block = self.home[name]
        return slot.buffer[: block.numel()].view(block.shape)

    def _mark(self) -> Any:
        """Record an event on the current stream; None on a CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def _on(self, stream: Any, *events: Any) -> Iterator[None]:
        """Run the block on `stream`, after `events`."""
        with torch.cuda.stream(stream) if self._cuda else nullcontext():
            for event in events:
                self._wait(event)
            yield


@contextmanager
def in_host_memory(
    vector: Vector,
    names: Sequence[str],
    target: dict[str, Tensor],
    dtype_of: DtypeOf,
    device: torch.device,
    warn: Callable[[str], None],
) -> Iterator[dict[str, Tensor]]:
    """Fill `target` with the named blocks of a vector, in host memory.

    For a GPU all matrices are views of one allocation that is page-locked as a whole inside the
    context. PyTorch's pinned allocator would round each tensor up to a power of two, which can
    waste half of the memory.
    """
    if device.type != "cuda":
        for name, block in on_device(vector, names, dtype_of, "cpu").tensors.items():
            target[name] = block.contiguous()
        yield target
        return
    forms = {name: vector.forms[name] for name in names}
    matrices = {name: form for name, form in forms.items() if len(form.shape) >= 2}
    dtypes = {dtype_of(name) for name in matrices}
    assert len(dtypes) <= 1, f"one dtype for all matrices, not {dtypes}"
    total = sum(form.num_entries for form in matrices.values())
    arena = torch.empty(total, dtype=dtypes.pop() if dtypes else torch.float32)
    start = 0
    for name, form in forms.items():
        if name in matrices:
            block = arena[start : start + form.num_entries]
            start += form.num_entries
        else:
            block = torch.empty(form.num_entries, dtype=dtype_of(name))
        target[name] = _fill(block.view(form.shape), vector, name)
    with _page_locked(arena, warn):
        yield target


def _fill(block: Tensor, vector: Vector, name: str) -> Tensor:
    if isinstance(vector, ParamVector):
        return block.copy_(vector.tensors[name])
    flat = block.view(-1)
    for begin, end in vector.forms[name].chunks():
        flat[begin:end] = vector.piece(name, begin, end)
    return block


@contextmanager
def _page_locked(arena: Tensor, warn: Callable[[str], None]) -> Iterator[None]:
    runtime: Any = torch.cuda.cudart()
    size = arena.numel() * arena.element_size()
    failed = int(runtime.cudaHostRegister(arena.data_ptr(), size, 0)) if size else 0
    if failed:
        with suppress(RuntimeError):  # clear the error: the next kernel launch would raise it
            torch.zeros(1, device="cuda")
        warn(
            f"{size / 2**30:.1f} GiB of the host's memory could not be page-locked (CUDA error "
            f"{failed}); going on with slower copies (score.plan=blocks needs none)"
        )
    try:
        yield
    finally:
        torch.cuda.synchronize()
        if size and not failed:
            runtime.cudaHostUnregister(arena.data_ptr())


def on_device(
    vector: Vector, names: Sequence[str], dtype_of: DtypeOf, device: torch.device | str
) -> ParamVector:
    """The named blocks of a vector on the device, cast to the dtype of their products."""
    if isinstance(vector, ParamVector):
        return ParamVector({name: vector.tensors[name] for name in names}).held(device, dtype_of)
    forms = {name: vector.forms[name] for name in names}
    return LazyVector(forms, vector.device, vector.piece).held(device, dtype_of)
