"""Where G and the direction are stored during a walk.

Algorithm 1 lines 3, 5, 6 and 8. The rules of the ghost engine (`engine/rules.py`) need one
parameter block at a time: the block of G to add to and the block of the direction to multiply with.
A `Placement` provides both for a group of candidates. `placed` creates the one that a plan
(`memory/plans.py`) or a sharded model requires:

    DevicePlacement    both on the device; under the plan "blocks" G moves to the host afterwards
    HostPlacement      both in host memory, copied to the device block by block
    ShardedPlacement   each process holds its own rows (FSDP2), one block at a time is complete
    Scratch            one buffer for all blocks, to measure memory

A `BlockStream` is a vector in host memory whose blocks are copied to the device on demand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualsft.distributed.world import all_gather, scatter_sum, world
from dualsft.memory.plans import NUM_SLOTS, Plan
from dualsft.model.load import Candidates
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import LazyVector, ParamVector, ShardedVector, Vector
from dualsft.system.usage import free_memory

DtypeOf = Callable[[str], torch.dtype]
"""The dtype of a parameter's block, by name."""


class Placement(ABC):
    """G and the direction of some candidates during a walk; either may be absent."""

    has_sums: bool
    has_direction: bool

    @abstractmethod
    def sum_block(self, name: str) -> AbstractContextManager[Tensor]:
        """The block of G of one parameter on the device, to accumulate into."""

    @abstractmethod
    def direction_block(self, name: str, dtype: torch.dtype) -> Tensor:
        """The block of the direction of one parameter on the device, in `dtype`."""

    def batch(self) -> AbstractContextManager[None]:
        """Wraps the forward and backward pass of one batch; entered by all processes."""
        return nullcontext()

    def flush(self) -> None:  # noqa: B027
        """Write what is still on its way into the vector of G, so that it can be saved."""

    @abstractmethod
    def close(self) -> None:
        """Release the blocks; a later `flush` does nothing."""


class DevicePlacement(Placement):
    """G and the direction as tensors on the device."""

    def __init__(
        self, sums: ParamVector | None = None, direction: Mapping[str, Tensor] | None = None
    ) -> None:
        self._sums, self._direction = sums, direction
        self.has_sums, self.has_direction = sums is not None, direction is not None

    @contextmanager
    def sum_block(self, name: str) -> Iterator[Tensor]:
        assert self._sums is not None
        yield self._sums.tensors[name]

    def direction_block(self, name: str, dtype: torch.dtype) -> Tensor:
        assert self._direction is not None
        return self._direction[name].to(dtype)

    def close(self) -> None:
        self._sums = self._direction = None


class HostPlacement(Placement):
    """G and the direction in host memory, copied to the device block by block."""

    def __init__(
        self,
        sums: Mapping[str, Tensor] | None,
        direction: Mapping[str, Tensor] | None,
        device: torch.device,
    ) -> None:
        self._sums = None if sums is None else BlockStream(sums, device)
        self._direction = None if direction is None else BlockStream(direction, device)
        self.has_sums, self.has_direction = sums is not None, direction is not None

    def sum_block(self, name: str) -> AbstractContextManager[Tensor]:
        assert self._sums is not None
        return self._sums.changed(name)

    def direction_block(self, name: str, dtype: torch.dtype) -> Tensor:
        assert self._direction is not None
        return self._direction.read(name, dtype)

    def flush(self) -> None:
        if self._sums is not None:
            self._sums.flush()

    def close(self) -> None:
        self._sums = self._direction = None


class ShardedPlacement(Placement):
    """G and the direction of a sharded model: each process holds its own rows.

    The rules see gathered weights. The matching block of the direction is all-gathered on request
    and dropped after use. Each process computes a whole block of G for its batch, which is
    reduce-scattered (a sum in G's dtype, not an average), so that each process keeps the sum over
    its own rows. The output head is used a different number of times per process (once per chunk of
    logits), so its collectives cannot run on request: `late` names its parameters, whose blocks are
    gathered at the start of a batch and reduced at its end.
    """

    def __init__(
        self,
        sums: ParamVector | None,
        direction: Vector | None,
        names: Sequence[str],
        dtype_of: DtypeOf,
        device: torch.device,
        late: Collection[str],
    ) -> None:
        self.has_sums, self.has_direction = sums is not None, direction is not None
        self._sums, self._device = sums, device
        self._late = [name for name in names if name in late]
        self._pending: dict[str, Tensor] = {}
        self._gathered_early: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}
        for vector in (sums, direction):
            if vector is not None:
                self._shapes |= {name: vector.forms[name].shape for name in names}
        for name in names if direction is not None else ():
            assert direction is not None
            first, _ = world().own(self._shapes[name])
            rows = torch.zeros(self._share(name), dtype=dtype_of(name), device=device)
            for start, stop in world().own_chunks(self._shapes[name]):
                rows[start - first : stop - first] = direction.piece(name, start, stop)
            self._rows[name] = rows

    @contextmanager
    def batch(self) -> Iterator[None]:
        for name in self._late if self.has_direction else ():
            self._gathered_early[name] = self._gathered(name)
        yield
        for name in self._late if self.has_sums else ():
            block = self._pending.pop(name, None)
            self._reduce(name, self._zeros(name) if block is None else block)
        self._gathered_early.clear()

    @contextmanager
    def sum_block(self, name: str) -> Iterator[Tensor]:
        """A whole block, initially zero, for this batch's part of G."""
        block = self._pending.get(name)
        if block is None:
            block = self._zeros(name)
        yield block[: self._shapes[name].numel()].view(self._shapes[name])
        if name in self._late:
            self._pending[name] = block
        else:
            self._reduce(name, block)

    def direction_block(self, name: str, dtype: torch.dtype) -> Tensor:
        early = self._gathered_early.get(name)
        return (self._gathered(name) if early is None else early).to(dtype)

    def close(self) -> None:
        self._sums = None
        self._rows.clear()

    def _share(self, name: str) -> int:
        """Entries of the largest shard of a block, which is rank 0's."""
        first, last = world().own(self._shapes[name], 0)
        return last - first

    def _zeros(self, name: str) -> Tensor:
        assert self._sums is not None
        size = world().size * self._share(name)
        return torch.zeros(size, dtype=self._sums.forms[name].dtype, device=self._device)

    def _gathered(self, name: str) -> Tensor:
        rows, shape = self._rows[name], self._shapes[name]
        every = rows.new_empty(world().size * len(rows))
        all_gather(every, rows)
        return every[: shape.numel()].view(shape)

    def _reduce(self, name: str, block: Tensor) -> None:
        assert self._sums is not None
        own = block.new_empty(self._share(name))
        scatter_sum(own, block)
        rows = self._sums.tensors[name]
        rows.view(-1).add_(own[: rows.numel()])


class Scratch(Placement):
    """Placeholder for G and the direction in memory measurements: all blocks share one buffer."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        sums: bool = True,
        direction: bool = True,
    ) -> None:
        self.has_sums, self.has_direction = sums, direction
        self._shapes = {name: p.shape for name, p in like.items()}
        largest = max(shape.numel() for shape in self._shapes.values())
        self._sums = torch.zeros(largest, dtype=dtype, device=device)
        self._directions: dict[torch.dtype, Tensor] = {}

    @contextmanager
    def sum_block(self, name: str) -> Iterator[Tensor]:
        yield self._view(self._sums, name)

    def direction_block(self, name: str, dtype: torch.dtype) -> Tensor:
        size, buffer = self._shapes[name].numel(), self._directions.get(dtype)
        if buffer is None or buffer.numel() < size:
            buffer = torch.zeros(size, dtype=dtype, device=self._sums.device)
            self._directions[dtype] = buffer
        return self._view(buffer, name)

    def close(self) -> None:
        self._directions.clear()

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        shape = self._shapes[name]
        return buffer[: shape.numel()].view(shape)


@contextmanager
def placed(
    plan: Plan,
    names: Sequence[str],
    candidates: Candidates,
    sums: ParamVector | None,
    direction: Vector | None,
    device: torch.device,
    late: Collection[str],
    warn: Callable[[str], None],
) -> Iterator[Placement]:
    """G and the direction of the candidates `names`, as the plan requires.

    The direction is held in the dtype of its products: the model's for matrices, G's for 1-D
    parameters. `late` is for `ShardedPlacement`.
    """

    def dtype_of(name: str) -> torch.dtype:
        return candidates[name].dtype if candidates[name].ndim >= 2 else candidates.dtype

    with ExitStack() as stack:

        def hosted(vector: Vector, target: dict[str, Tensor], dtype: DtypeOf) -> dict[str, Tensor]:
            home = in_host_memory(vector, names, target, dtype, device, warn)
            blocks = stack.enter_context(home)
            return {name: blocks[name] for name in names}

        if plan.placement == "host" and not world().sharded:
            placement = HostPlacement(
                None if sums is None else hosted(sums, sums.tensors, lambda _: candidates.dtype),
                None if direction is None else hosted(direction, {}, dtype_of),
                device,
            )
        else:
            if sums is not None:
                move(sums, names, device)
            if world().sharded:
                placement = ShardedPlacement(sums, direction, names, dtype_of, device, late)
            else:
                here = None if direction is None else on_device(direction, names, dtype_of, device)
                placement = DevicePlacement(sums, here)
        stack.callback(placement.close)
        yield placement
    if sums is not None and plan.placement == "blocks":  # free device memory for the next group
        move(sums, names, "cpu")


# --- vectors -----------------------------------------------------------------------------------


def blank(like: Mapping[str, Tensor], dtype: torch.dtype) -> ParamVector:
    """Zeros that take no memory until a walk allocates them where its plan requires."""
    if world().sharded:
        return ShardedVector.blank({name: Form(dtype, p.shape) for name, p in like.items()})
    return ParamVector({name: _blank_block(p.shape, dtype) for name, p in like.items()})


def reset(sums: ParamVector) -> None:
    """Replace the blocks of a vector by blank ones, which frees their memory."""
    for name, block in sums.tensors.items():
        sums.tensors[name] = _blank_block(block.shape, block.dtype)


def _blank_block(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)  # stride 0: one element of storage


def move(sums: ParamVector, names: Sequence[str], device: torch.device | str) -> None:
    """Move the named blocks of a vector to a device, one at a time; allocates blank blocks."""
    for name in names:
        block = sums.tensors[name]
        if block.numel() > 1 and not any(block.stride()):  # blank
            sums.tensors[name] = torch.zeros(block.shape, dtype=block.dtype, device=device)
        else:
            sums.tensors[name] = block.to(device).contiguous()


MEMORY_SHARE = 0.5
"""Maximum share of a GPU's free memory for a vector that could be read from disk instead."""


def at_hand(vector: Vector) -> Vector:
    """The vector in GPU memory if it fits, otherwise unchanged (lazy).

    Every reading of a lazy u reads the files of its terms, up to four of the vector's own size, and
    copies them to the GPU. Holding u does this once, for 4 bytes of GPU memory per entry. On a CPU
    a lazy reading costs some 9 ns more per entry, which is negligible compared with the gradients
    of the pool, and leaves the memory to the page cache.
    """
    on_gpu = vector.device.type == "cuda" and not world().sharded
    fits = on_gpu and vector.num_bytes <= MEMORY_SHARE * free_memory(vector.device)
    return vector.held() if fits else vector


# --- vectors in host memory -----------------------------------------------------------------------


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
            f"{failed}); continuing with slower copies (score.plan=blocks needs none)"
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
