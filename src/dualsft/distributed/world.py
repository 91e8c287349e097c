"""Many processes, one answer: who computes what, and how it comes together.

A run under torchrun is one `World` of processes that all execute the same stages. Examples are
shared out batch by batch, each to exactly one process; vectors over the candidates are shared out
by rows, each row to exactly one process (`own`). Gradients are **summed** over the processes and
never averaged: G of Algorithm 1 line 3 is a sum over examples, and a training step divides by the
size of its whole batch. With one process every method here returns what it is given: the callers
have one code path.

How the model itself is held is the world's mode. Replicated, every process has all of it and only
sums meet. Sharded, each has its rows of every parameter, of G, ĉ, v and u (`model/sharded.py`,
FSDP2).

The present world is `world()`. `joined()` makes it from torchrun's environment; under `alone()` a
part that only the first process executes sees a world of one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dualsft.errors import ConfigError, RunError

T = TypeVar("T")

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, accelerate launch and every other launcher of torch sets."""
MEETING = timedelta(minutes=10)
"""All processes must have started within this time."""
PATIENCE = timedelta(days=30)
"""A collective waits as long as its peers live: that they do is watched by
`distributed/heartbeat.py`."""

CHUNK = 1 << 22  # entries handled at a time where a temporary copy is needed


@dataclass(frozen=True)
class World:
    """The processes of this run, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    sharded: bool = False
    """Whether parameters and vectors are held by rows, one share a process."""
    offload: bool = False
    """Whether the shares of the parameters live in the host's memory."""

    # --- who ------------------------------------------------------------------------------------

    @property
    def main(self) -> bool:
        """The process that writes the run folder and speaks."""
        return self.rank == 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.size} (process {os.getpid()} on {socket.gethostname()})"

    # --- examples -------------------------------------------------------------------------------

    def turns(self, items: Sequence[T]) -> list[Sequence[T]]:
        """The items in turns of at most one a process; the last turn may leave some idle."""
        return [items[i : i + self.size] for i in range(0, len(items), self.size)]

    def mine(self, turn: Sequence[T]) -> T | None:
        """This process's item of a turn, if it has one."""
        return turn[self.rank] if self.rank < len(turn) else None

    def dealt(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Each process's share of the items, as cards are dealt."""
        return [items[rank :: self.size] for rank in range(self.size)]

    # --- rows -----------------------------------------------------------------------------------

    def own(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, int]:
        """The flat range of a tensor that belongs to a process: whole rows, as FSDP2 cuts them."""
        rank = self.rank if rank is None else rank
        rows = shape[0] if len(shape) else 1
        width = int(np.prod(shape[1:])) if len(shape) else 1
        share = -(-rows // self.size)
        return min(rank * share, rows) * width, min((rank + 1) * share, rows) * width

    def own_chunks(self, shape: Sequence[int], size: int = CHUNK) -> Iterator[tuple[int, int]]:
        """Borders of the flat chunks of that range; one empty chunk when it has no entry."""
        first, last = self.own(shape)
        for start in range(first, max(first + 1, last), size):
            yield start, min(start + size, last)

    def held(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, int]:
        """The flat range that a process has in memory: its own when sharded, otherwise all."""
        return self.own(shape, rank) if self.sharded else (0, int(np.prod(shape)))

    # --- words ----------------------------------------------------------------------------------

    def told(self, value: T) -> T:
        """What the first process says; the others' own value is not looked at."""
        if self.size == 1:
            return value
        box = [value if self.main else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # pyright: ignore[reportReturnType]

    def decided(self, make: Callable[[], T]) -> T:
        """What `make` gives in the first process, which alone calls it."""
        return self.told(make() if self.main else None)  # pyright: ignore[reportReturnType]

    def answers(self, value: T) -> list[T]:
        """What every process says, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether any process has it."""
        if self.size == 1:
            return flags
        shared = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in shared.tolist())

    def barrier(self) -> None:
        """Until all are here."""
        self.any(False)

    def agreed(self, value: str, what: str) -> None:
        """Refuse to go on when the processes do not have the same."""
        found = self.answers(value)
        odd = [rank for rank, other in enumerate(found) if other != found[0]]
        if odd:
            raise RunError(
                f"{what} differs between rank 0 ({found[0]}) and rank {odd[0]} ({found[odd[0]]}); "
                "nothing was written. The processes must run the same code on the same files"
            )

    # --- sums -----------------------------------------------------------------------------------

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest of the processes' values, entry by entry, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum over the processes of an array, in place."""
        if self.size > 1 and values.size:
            dist.all_reduce(torch.from_numpy(values))
        return values

    def joined(self, own: Tensor) -> Tensor:
        """The processes' 1-D tensors of any lengths one after the other, on every process."""
        if self.size == 1:
            return own
        counts = self.answers(own.numel())
        padded = own.new_zeros(max(1, *counts))
        padded[: own.numel()] = own
        every = own.new_empty(self.size * len(padded))
        gather(every, padded)
        parts = every.view(self.size, -1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def across(self, count: int) -> int:
        """How many there are, when each process holds `count` of what is its own."""
        return sum(self.answers(count)) if self.sharded else count

    def kept(self, own: Tensor) -> Tensor:
        """What a process keeps of the processes' 1-D tensors: its own when sharded, else all."""
        return own if self.sharded else self.joined(own)

    def at_main(self, owner: int, make: Callable[[], Tensor], like: Tensor) -> Tensor | None:
        """What `make` gives in the process `owner`, as the first process has it (in host memory).

        `like` is an empty host tensor of its size and dtype, which the first process may write to.
        """
        if owner == 0:
            return make() if self.main else None
        if self.rank == owner:
            dist.send(make().detach().cpu().contiguous(), 0)
        elif self.main:
            dist.recv(like, owner)
            return like
        return None


def gather(every: Tensor, own: Tensor) -> None:
    """All processes' equal shares into one tensor, by rank."""
    newer = getattr(dist, "all_gather_single", None)  # its name since torch 2.13
    (newer or dist.all_gather_into_tensor)(every, own)


def scatter_sum(own: Tensor, every: Tensor) -> None:
    """The sum over the processes of equal shares: each process is given its own."""
    newer = getattr(dist, "reduce_scatter_single", None)
    (newer or dist.reduce_scatter_tensor)(own, every)


class _Present:
    """The world that this process is in."""

    world = World()


def world() -> World:
    """The present world: of one process, unless `joined` made a larger one."""
    return _Present.world


@contextmanager
def _being(one: World) -> Iterator[World]:
    before, _Present.world = _Present.world, one
    try:
        yield one
    finally:
        _Present.world = before


@contextmanager
def alone() -> Iterator[None]:
    """For what the first process does by itself while the others wait: a world of one."""
    with _being(World(local_rank=world().local_rank)):
        yield


@contextmanager
def settled(*, sharded: bool, offload: bool) -> Iterator[World]:
    """The present world with the model held so."""
    with _being(replace(world(), sharded=sharded, offload=offload)) as one:
        yield one


def launched(alone_too: bool = True) -> bool:
    """Whether a launcher has started this process, as one of several or alone as well."""
    given = all(name in os.environ for name in ENVIRONMENT)
    return given and (alone_too or os.environ["WORLD_SIZE"] != "1")


def place_of_meeting() -> str:
    """Where the first of several processes is about to wait for the others; empty otherwise."""
    if not launched(alone_too=False) or world().size > 1 or os.environ["RANK"] != "0":
        return ""
    size, where = os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]
    return f"waiting for {size} processes at {where}:{os.environ['MASTER_PORT']}"


def _meet(rank: int, size: int) -> Any:
    """The store through which the processes find each other, once all are there."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=MEETING))
    except dist.DistError as problem:
        raise RunError(
            f"rank {rank} of {size} did not meet the others at {where} within "
            f"{MEETING.total_seconds() / 60:.0f} minutes ({problem}); start all processes, with "
            "the same MASTER_ADDR and MASTER_PORT"
        ) from None
    return PrefixStore("dualsft", store)


@contextmanager
def joined(use_cuda: bool, alone_too: bool = True) -> Iterator[World]:
    """Take part in the world that the launcher's environment describes; leave it at the end.

    Without a launcher, and inside an outer `joined`, nothing happens; nor, without `alone_too`, in
    a world of one process. A process group that the caller has made is used and left as it is.
    """
    if not launched(alone_too) or world().size > 1:
        yield world()
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _take_device(local_rank) if use_cuda else None
    made = not dist.is_initialized()
    if made:
        backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
        store = _meet(rank, size)
        named = {"store": store, "rank": rank, "world_size": size}
        dist.init_process_group(backend, timeout=PATIENCE, device_id=device, **named)
    elif "gloo" not in str(dist.get_backend_config()):
        raise ConfigError(
            f"the process group was made with {dist.get_backend_config()} alone; words between the "
            "processes need gloo too: init_process_group('cpu:gloo,cuda:nccl')"
        )
    with _being(World(rank=rank, size=size, local_rank=local_rank)) as one:
        yield one
    if made:  # after an error the others may not come to it: the process ends without
        dist.destroy_process_group()


def _take_device(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"this machine has {count} GPUs, and this is its process {local_rank + 1}; start at "
            f"most {count} processes on it (--nproc-per-node {count})"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
