"""Where G and the direction are while a walk runs: on the device, or in the host's memory.

The rules of the ghost engine (Algorithm 1 lines 3, 5, 6 and 8) ask for one parameter's block at a
time: `lent(name)` gives G's to be added to, `factor(name, dtype)` the direction's to multiply with.
A `ParamVector` on the device has both at hand. A `Streamed` vector lives in the host's memory and
has a few slots on the device: the block that is asked for next, as it was in the batch before, is
on its way in while the present one is in use and the last one is on its way out, each on a CUDA
stream of its own. On a CPU the same moves are plain copies. 1-D parameters always stay on the
device: they are many, and small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dualsft.distributed.world import world
from dualsft.memory.plans import NUM_SLOTS
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import LazyVector, ParamVector, ShardedVector, Vector


class Lender(Protocol):
    """G: each parameter's block in turn, to be added to in place."""

    def lent(self, name: str) -> AbstractContextManager[Tensor]: ...


class Factors(Protocol):
    """The direction: each parameter's block in turn, in the dtype of the product it enters."""

    def factor(self, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(eq=False)
class _Slot:
    """A buffer on the device and the block that is in it."""

    buffer: Tensor
    name: str | None = None
    changed: bool = False
    came: Any = None
    """Event: the block is here."""
    used: Any = None
    """Event: the last use of the block is over; None when that cannot be told."""
    left: Any = None
    """Event: the block is in the host's memory."""


class Streamed:
    """A vector in the host's memory, used block by block on the device.

    A block handed out by `factor` stays valid until three others have been, so the direction of q,
    k and v may be used together.
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
        count = min(NUM_SLOTS, len(large))
        self._slots = [
            _Slot(torch.empty(size, dtype=large[0].dtype, device=device)) for _ in range(count)
        ]
        """The least recently used first."""
        self._stored: dict[str, Any] = {}
        self._follows: dict[str, str] = {}
        self._last: str | None = None
        if self._in is not None:
            self._in.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def lent(self, name: str) -> Iterator[Tensor]:
        """This parameter's block on the device, to be added to."""
        if name in self._small:
            yield self._small[name]
            return
        slot = self._take(name)
        self._wait(slot.left)
        slot.changed, slot.used = True, None
        yield self._view(slot, name)
        slot.used = self._mark()

    def factor(self, name: str, dtype: torch.dtype) -> Tensor:
        """This parameter's block on the device, in the dtype of a product."""
        if name in self._small:
            return self._small[name].to(dtype)
        return self._view(self._take(name), name).to(dtype)

    def settle(self) -> None:
        """Bring home what was changed, and wait for it."""
        for slot in self._slots:
            self._send_home(slot)
        for name, block in self._small.items():
            self.home[name].copy_(block)
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def _take(self, name: str) -> _Slot:
        """The slot with this block, and the next block on its way."""
        if name != self._last:
            if self._last is not None:
                self._follows[self._last] = name
                previous = self._find(self._last)
                if previous is not None:
                    self._send_home(previous)
            self._last = name
        slot = self._find(name) or self._bring(name)
        self._slots.remove(slot)
        self._slots.append(slot)
        self._wait(slot.came)
        following = self._follows.get(name)
        if following is not None and self._find(following) is None and len(self._slots) > 1:
            self._bring(following)
        return slot

    def _find(self, name: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.name == name), None)

    def _bring(self, name: str) -> _Slot:
        """Copy a block into the slot that was used longest ago."""
        slot = self._slots.pop(0)
        self._send_home(slot)
        free = slot.left or slot.used or self._mark()
        slot.name, slot.used, slot.left = name, None, None
        with self._on(self._in, free, self._stored.get(name)):
            self._view(slot, name).copy_(self.home[name], non_blocking=True)
            slot.came = self._mark()
        self._slots.append(slot)
        return slot

    def _send_home(self, slot: _Slot) -> None:
        """Copy a changed block to the host's memory."""
        if not slot.changed or slot.name is None:
            return
        with self._on(self._out, slot.used or self._mark()):
            self.home[slot.name].copy_(self._view(slot, slot.name), non_blocking=True)
            slot.left = self._stored[slot.name] = self._mark()
        slot.changed = False

    def _view(self, slot: _Slot, name: str) -> Tensor:
        block = self.home[name]
        return slot.buffer[: block.numel()].view(block.shape)

    def _mark(self) -> Any:
        """An event behind all that the current stream was given; None on a CPU."""
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
        """On this stream, behind these events."""
        with torch.cuda.stream(stream) if self._cuda else nullcontext():
            for event in events:
                self._wait(event)
            yield


class Scratch:
    """Stands for G and the direction when memory is measured: one buffer for every block."""

    def __init__(self, like: Mapping[str, Tensor], sums: torch.dtype, device: torch.device) -> None:
        self.shapes = {name: p.shape for name, p in like.items()}
        largest = max(shape.numel() for shape in self.shapes.values())
        self._sums = torch.zeros(largest, dtype=sums, device=device)
        self._factors: dict[torch.dtype, Tensor] = {}

    @contextmanager
    def lent(self, name: str) -> Iterator[Tensor]:
        yield self._view(self._sums, name)

    def factor(self, name: str, dtype: torch.dtype) -> Tensor:
        size, buffer = self.shapes[name].numel(), self._factors.get(dtype)
        if buffer is None or buffer.numel() < size:
            self._factors[dtype] = torch.zeros(size, dtype=dtype, device=self._sums.device)
        return self._view(self._factors[dtype], name)

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        shape = self.shapes[name]
        return buffer[: shape.numel()].view(shape)


def factor_dtype(parameter: Tensor, accumulation: torch.dtype) -> torch.dtype:
    """What the direction is held in: the model's dtype for a matrix, G's for a vector."""
    return parameter.dtype if parameter.ndim >= 2 else accumulation


def blank(like: Mapping[str, Tensor], dtype: torch.dtype) -> ParamVector:
    """Zeros that take no memory until a walk puts them where its plan says."""
    if world().sharded:
        return ShardedVector.blank({name: Form(dtype, p.shape) for name, p in like.items()})
    return ParamVector({name: _zeros(p.shape, dtype) for name, p in like.items()})


def _zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)


def reset(sums: ParamVector) -> None:
    """Make a vector blank, and free what it held."""
    for name, block in sums.tensors.items():
        sums.tensors[name] = _zeros(block.shape, block.dtype)


def is_blank(block: Tensor) -> bool:
    """Whether a block takes no memory yet."""
    return block.numel() > 1 and not any(block.stride())


def move(sums: ParamVector, names: Sequence[str], device: torch.device | str) -> None:
    """Put some blocks of a vector on a device, one after the other."""
    for name in names:
        block = sums.tensors[name]
        if is_blank(block):
            sums.tensors[name] = torch.zeros(block.shape, dtype=block.dtype, device=device)
        else:
            sums.tensors[name] = block.to(device).contiguous()


def on_device(
    vector: Vector, names: Sequence[str], dtype_of: Callable[[str], torch.dtype], device: Any
) -> ParamVector:
    """Some blocks of a vector in the dtype of their products, on the device."""
    if isinstance(vector, ParamVector):
        return ParamVector({name: vector.tensors[name] for name in names}).held(device, dtype_of)
    forms = {name: vector.forms[name] for name in names}
    return LazyVector(forms, vector.device, vector.piece).held(device, dtype_of)


@contextmanager
def in_host_memory(
    vector: Vector,
    names: Sequence[str],
    target: dict[str, Tensor],
    dtype_of: Callable[[str], torch.dtype],
    device: torch.device,
    warn: Callable[[str], None],
) -> Iterator[dict[str, Tensor]]:
    """Fill `target` with some blocks of a vector, in host memory that the device can reach.

    For a GPU the matrices become views of one allocation, page-locked as a whole while the context
    lasts: the allocator for pinned tensors rounds each up to a power of two, and may waste half.
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
        with suppress(RuntimeError):  # the next launch would report the error as its own
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
