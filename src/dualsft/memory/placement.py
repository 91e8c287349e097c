"""Where G and the direction are stored during a walk.

Algorithm 1 lines 3, 5, 6 and 8. The rules of the ghost engine (`engine/rules.py`) need one
parameter block at a time: the block of G to add to and the block of the direction to multiply with.
A `Placement` provides both for a group of candidates. `placed` creates the one that a plan
(`memory/plans.py`) or a sharded model requires:

    DevicePlacement    both on the device; under the plan "blocks" G moves to the host afterwards
    HostPlacement      both in host memory, copied to the device block by block
    ShardedPlacement   each process holds its own rows (FSDP2), one block at a time is complete
    Scratch            one buffer for all blocks, to measure memory
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from dualsft.distributed.world import all_gather, scatter_sum, world
from dualsft.memory.plans import Plan
from dualsft.memory.streaming import BlockStream, DtypeOf, in_host_memory, on_device
from dualsft.model.load import Candidates
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import ParamVector, ShardedVector, Vector
from dualsft.system.usage import free_memory


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
