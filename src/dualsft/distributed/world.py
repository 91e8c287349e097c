"""Distribution of work over processes, and the collectives that combine the results.

A run under torchrun is a `World` of processes that all execute the same stages. Each batch of
examples is assigned to exactly one process, and so is each row of a vector over the candidates
(`own`). Gradients are **summed** over processes, never averaged: G of Algorithm 1 line 3 is a sum
over examples, and a training step divides by the size of the global batch. With one process every
method returns its input, so callers need no separate code path.

The model is replicated or sharded. Replicated: every process holds the whole model, and only sums
are reduced. Sharded: each process holds its rows of every parameter and of G, ĉ, v and u
(`model/sharded.py`, FSDP2).

`world()` returns the current world. `joined()` creates it from torchrun's environment. Code that a
single process runs on its own is wrapped in `single_process()`, which sets a world of size 1.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from dualsft.distributed.launch import ExitNotes, collective_timeout, disconnect, launched
from dualsft.errors import ConfigError, RunError
from dualsft.system.paths import RunPath
from dualsft.system.signals import end_with_parent

T = TypeVar("T")

JOIN_TIMEOUT = timedelta(minutes=10)
"""Timeout for all processes to join."""

CHUNK = 1 << 22  # entries per chunk, which bounds the size of temporary copies
PACK = 1 << 25  # entries per all-reduce of `sum_packed`


@dataclass(frozen=True)
class World:
    """The processes of a run, from the view of one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    sharded: bool = False
    """Whether parameters and vectors are sharded by rows over the processes."""
    offload: bool = False
    """Whether the parameter shards are kept in host memory."""

    # --- identity -------------------------------------------------------------------------------

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes the run folder and logs."""
        return self.rank == 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.size} (process {os.getpid()} on {socket.gethostname()})"

    @property
    def single(self) -> bool:
        """Whether this process is the only one, so that it may act without the others."""
        return self.size == 1

    # --- examples -------------------------------------------------------------------------------

    def turns(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Group items into turns of one per process; the last turn may be incomplete."""
        return [items[i : i + self.size] for i in range(0, len(items), self.size)]

    def mine(self, turn: Sequence[T]) -> T | None:
        """This process's item in a turn, or None."""
        return turn[self.rank] if self.rank < len(turn) else None

    def round_robin(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Items of each process by rank, assigned round-robin."""
        return [items[rank :: self.size] for rank in range(self.size)]

    # --- rows -----------------------------------------------------------------------------------

    def own(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, int]:
        """Flat range of a tensor owned by a process: whole rows, split as FSDP2 does."""
        rank = self.rank if rank is None else rank
        rows = shape[0] if len(shape) else 1
        width = int(np.prod(shape[1:])) if len(shape) else 1
        share = -(-rows // self.size)
        return min(rank * share, rows) * width, min((rank + 1) * share, rows) * width

    def own_chunks(self, shape: Sequence[int], size: int = CHUNK) -> Iterator[tuple[int, int]]:
        """Bounds of flat chunks of the own range; a single empty chunk if the range is empty."""
        first, last = self.own(shape)
        for start in range(first, max(first + 1, last), size):
            yield start, min(start + size, last)

    def held(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, int]:
        """Flat range that a process holds in memory: its own rows if sharded, else all."""
        return self.own(shape, rank) if self.sharded else (0, int(np.prod(shape)))

    # --- object collectives ---------------------------------------------------------------------

    def broadcast(self, value: T) -> T:
        """Broadcast the value of rank 0; the values of other ranks are ignored."""
        if self.size == 1:
            return value
        box = [value if self.main else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # pyright: ignore[reportReturnType]

    def on_main(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 only and broadcast the result."""
        return self.broadcast(make() if self.main else None)  # pyright: ignore[reportReturnType]

    def gather(self, value: T) -> list[T]:
        """Gather the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on any process."""
        if self.size == 1:
            return flags
        shared = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in shared.tolist())

    def barrier(self) -> None:
        """Wait until all processes reach this call."""
        self.any(False)

    def check_equal(self, value: str, what: str) -> None:
        """Raise on all processes if their values differ."""
        found = self.gather(value)
        odd = [rank for rank, other in enumerate(found) if other != found[0]]
        if odd:
            raise RunError(
                f"{what} differs between rank 0 ({found[0]}) and rank {odd[0]} ({found[odd[0]]}); "
                "nothing was written. The processes must run the same code on the same files"
            )

    # --- tensor collectives ---------------------------------------------------------------------

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def sum_array(self, values: np.ndarray) -> np.ndarray:
        """Sum a NumPy array over the processes, in place."""
        if self.size > 1 and values.size:
            dist.all_reduce(torch.from_numpy(values))
        return values

    def concatenated(self, own: Tensor) -> Tensor:
        """Concatenate the 1-D tensors of all processes, of any lengths, on every process."""
        if self.size == 1:
            return own
        counts = self.gather(own.numel())
        padded = own.new_zeros(max(1, *counts))
        padded[: own.numel()] = own
        every = own.new_empty(self.size * len(padded))
        all_gather(every, padded)
        parts = every.view(self.size, -1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def across(self, count: int) -> int:
        """Total count: the sum over processes if sharded, else `count`."""
        return sum(self.gather(count)) if self.sharded else count

    def kept(self, own: Tensor) -> Tensor:
        """The 1-D tensor to keep: this process's own if sharded, else all concatenated."""
        return own if self.sharded else self.concatenated(own)

    def at_main(self, owner: int, make: Callable[[], Tensor], like: Tensor) -> Tensor | None:
        """Call `make` on rank `owner` and send the result to rank 0, in host memory.

        `like` is a host tensor of the same size and dtype that rank 0 may use as receive buffer.
        Returns None on other ranks.
        """
        if owner == 0:
            return make() if self.main else None
        if self.rank == owner:
            dist.send(make().detach().cpu().contiguous(), 0)
        elif self.main:
            dist.recv(like, owner)
            return like
        return None

    # --- replicated or sharded ------------------------------------------------------------------

    def assigned(self, turn: Sequence[T]) -> tuple[T | None, float]:
        """(item of a turn that this process computes, its weight).

        With a sharded model every process takes part in every pass, so a process without an item
        of its own computes the first one with weight 0. With a replicated model it has none.
        """
        own = self.mine(turn)
        return (turn[0], 0.0) if own is None and self.sharded else (own, 1.0)

    def per_process(self, count: int) -> int:
        """An equal share of a count, rounded up; at least 1."""
        return max(1, -(-count // self.size))

    @property
    def vector_layout(self) -> str:
        """How the processes' blocks of an unfinished sum combine (`storage/resume.py`)."""
        return "rows" if self.sharded else "terms"

    def sum_terms_(self, tensor: Tensor) -> Tensor:
        """Sum the processes' terms in place; unchanged if sharded, where the rows are complete."""
        return tensor if self.sharded else self.sum_(tensor)

    def sum_rows_(self, tensor: Tensor) -> Tensor:
        """Sum what each process computed from the rows it holds, in place; unchanged if replicated,
        where each holds all rows."""
        return self.sum_(tensor) if self.sharded else tensor

    def agreed_copies(self, value: str, what: str) -> None:
        """As `check_equal`, for something that each process has a copy or, if sharded, rows of."""
        if not self.sharded:
            self.check_equal(value, what)

    # --- what a run does differently with several processes ---------------------------------------

    def pick(self, whole: T, sharded: T) -> T:
        """`sharded` if parameters and vectors are sharded over the processes, else `whole`."""
        return sharded if self.sharded else whole

    @property
    def description(self) -> str:
        """Number of processes and what each holds, for the log; empty for one process."""
        held = self.pick("the whole model", "its rows of the model")
        return f"{self.size} processes, each with {held}" if self.size > 1 else ""

    def facts(self) -> dict[str, Any]:
        """Entry of a stage manifest; empty for one process that holds the whole model."""
        if self.size == 1 and not self.sharded:
            return {}
        return {"parallel": {"processes": self.size, "sharded": self.sharded}}

    def check_shared(self, folder: RunPath) -> None:
        """Raise unless every process sees what rank 0 writes to `folder`."""
        if self.size == 1:
            return
        probe = folder / f".{self.broadcast(secrets.token_hex(8))}.tmp"
        if self.main:
            probe.write_bytes(b"")
        self.barrier()
        missing = self.gather(probe.is_file()).count(False)
        if self.main:
            probe.unlink()
        if missing:
            raise RunError(
                f"--out: {missing} of {self.size} processes do not see what rank 0 writes to "
                f"{folder}; give a folder on a file system that all machines share"
            )

    # --- training --------------------------------------------------------------------------------

    @property
    def can_retry(self) -> bool:
        """Whether a process that ran out of memory can try again.

        Not with a sharded model: the others wait for it in a collective that it has left.
        """
        return not self.sharded

    def passes(self, shares: Sequence[Sequence[T]]) -> list[tuple[T, bool]]:
        """This process's share, by rank, of the batches of a step, each with whether it counts.

        With a sharded model every process takes part in every pass: a shorter share is filled up
        with a batch that does not count.
        """
        own = [(item, True) for item in shares[self.rank]]
        most = max(map(len, shares)) if self.sharded else 0
        return own + [(shares[0][0], False)] * (most - len(own))

    def sum_packed(
        self,
        vectors: dict[str, Tensor],
        counts: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Sum named vectors over the processes, packed into a few all-reduces.

        `counts` has their lengths, the same on every process. A vector that is missing on a process
        counts as zeros. With one process, returns `vectors`.
        """
        if self.size == 1:
            return vectors
        summed: dict[str, Tensor] = {}
        names = list(counts)
        while names:
            pack = [names.pop(0)]
            while names and sum(counts[name] for name in pack) < PACK:
                pack.append(names.pop(0))
            sizes = [counts[name] for name in pack]
            every = torch.zeros(sum(sizes), dtype=dtype, device=device)
            parts = dict(zip(pack, every.split(sizes), strict=True))
            for name in parts.keys() & vectors.keys():
                parts[name].copy_(vectors[name])
            summed |= parts
            self.sum_(every)
        return summed

    def norm(self, own: Tensor) -> Tensor:
        """Norm of a vector that is split over the processes, from the norm of this one's part."""
        if self.size == 1:
            return own
        return self.sum_(own.double().cpu() ** 2).sqrt().to(own)

    def require_one(self, message: str) -> None:
        """Raise unless there is only one process."""
        if self.size > 1:
            raise RuntimeError(message)


def all_gather(every: Tensor, own: Tensor) -> None:
    """All-gather equally sized tensors into one, by rank."""
    newer = getattr(dist, "all_gather_single", None)  # new name in torch 2.13
    (newer or dist.all_gather_into_tensor)(every, own)


def scatter_sum(own: Tensor, every: Tensor) -> None:
    """Reduce-scatter: sum over the processes and keep this process's share."""
    newer = getattr(dist, "reduce_scatter_single", None)
    (newer or dist.reduce_scatter_tensor)(own, every)


class _Present:
    """Holds the current world."""

    world = World()


def world() -> World:
    """The current world; of size 1 unless `joined` created a larger one."""
    return _Present.world


@contextmanager
def _being(one: World) -> Iterator[World]:
    before, _Present.world = _Present.world, one
    try:
        yield one
    finally:
        _Present.world = before


@contextmanager
def single_process() -> Iterator[None]:
    """Set a world of size 1, for code that a process runs without the others."""
    with _being(World(local_rank=world().local_rank)):
        yield


@contextmanager
def settled(*, sharded: bool, offload: bool) -> Iterator[World]:
    """Set how the model is held in the current world."""
    with _being(replace(world(), sharded=sharded, offload=offload)) as one:
        yield one


def waiting_message() -> str:
    """Message that rank 0 logs before it waits for the other processes; else empty."""
    if not launched(alone_too=False) or world().size > 1 or os.environ["RANK"] != "0":
        return ""
    size, where = os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]
    return f"waiting for {size} processes at {where}:{os.environ['MASTER_PORT']}"


def _rendezvous(rank: int, size: int) -> Any:
    """The store of the processes, once all have joined."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=JOIN_TIMEOUT))
    except dist.DistError as problem:
        raise RunError(
            f"rank {rank} of {size} could not join the others at {where} within "
            f"{JOIN_TIMEOUT.total_seconds() / 60:.0f} minutes ({problem}); start all processes, "
            "with the same MASTER_ADDR and MASTER_PORT"
        ) from None
    return PrefixStore("dualsft", store)


@contextmanager
def joined(use_cuda: bool, alone_too: bool = True) -> Iterator[World]:
    """Initialize the process group from the launcher's environment; destroy it at the end.

    Does nothing without a launcher, inside an outer `joined`, or, without `alone_too`, in a world
    of size 1. An existing process group is used and not destroyed. An error that another process
    caused is replaced by one that names it.
    """
    if not launched(alone_too) or world().size > 1:
        yield world()
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    here = World(rank=rank, size=size, local_rank=local_rank)
    device = _take_device(local_rank) if use_cuda else None
    if dist.is_initialized():
        if "gloo" not in str(dist.get_backend_config()):
            raise ConfigError(
                f"the process group was initialized with {dist.get_backend_config()} only; "
                "collectives on CPU tensors need gloo too: init_process_group('cpu:gloo,cuda:nccl')"
            )
        with _being(here):
            yield here
        return
    timeout = collective_timeout()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent started this process
        end_with_parent()
    store = _rendezvous(rank, size)
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        timeout=timeout,
        device_id=device,
        store=store,
        rank=rank,
        world_size=size,
    )
    notes = ExitNotes(store, rank, size)
    try:
        with _being(here):
            yield here
        here.barrier()  # rank 0 may host the store: leave together
    except BaseException as error:
        explained = notes.explained(error)
        # Aborted, not destroyed: other processes may not reach that call, and it would block. Left
        # alone, gloo's threads would end the interpreter with SIGABRT instead of an exit code.
        disconnect(error)
        if explained is error:
            raise
        raise explained from error
    dist.destroy_process_group()


def _take_device(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"this machine has {count} GPUs, but this is process {local_rank + 1} on it; start at "
            f"most {count} processes per machine (--nproc-per-node {count})"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
