"""G and the direction of a sharded model during a walk, each process holding its own rows.

Algorithm 1 lines 3, 5, 6 and 8 under FSDP2. The rules of the ghost engine (`engine/rules.py`) see
gathered weights. The matching block of the direction is all-gathered, and a batch's block of G is
reduce-scattered to the processes that hold its rows: a sum in G's dtype, not an average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dualsft.distributed.world import gather, scatter_sum, world
from dualsft.storage.vectors import ShardedVector, Vector


class ShardedPlacement:
    """G and the direction sharded by rows (`placement.Lender`, `placement.Factors`).

    Each block of the direction is gathered on request and dropped after use. Each process computes
    a whole block of G for its batch; the blocks are reduce-scattered, so that each process keeps
    the sum over its own rows. The output head is used a different number of times per process
    (once per chunk of logits), so its collectives cannot run on request: `late` names its
    parameters, whose blocks are gathered at the start of a batch and reduced at its end.
    """

    def __init__(
        self,
        sums: ShardedVector | None,
        direction: Vector | None,
        names: list[str],
        dtype_of: Callable[[str], torch.dtype],
        device: torch.device,
        late: set[str],
    ) -> None:
        self.sums, self.device = sums, device
        self.late = [name for name in names if name in late]
        self._pending: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}
        for vector in (sums, direction):
            if vector is not None:
                self._shapes |= {name: vector.forms[name].shape for name in names}
        for name in names if direction is not None else ():
            assert direction is not None
            first, last = world().own(self._shapes[name])
            rows = torch.zeros(self._share(name), dtype=dtype_of(name), device=device)
            for start, stop in world().own_chunks(self._shapes[name]):
                rows[start - first : stop - first] = direction.piece(name, start, stop)
            self._rows[name] = rows

    def _share(self, name: str) -> int:
        """Entries of the largest shard of a block, which is rank 0's."""
        first, last = world().own(self._shapes[name], 0)
        return last - first

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Wraps the forward and backward pass of one batch; entered by all processes."""
        for name in self.late if self._rows else ():
            self._factors[name] = self._gathered(name)
        yield
        for name in self.late if self.sums is not None else ():
            self._reduce(name, self._pending.pop(name, None))
        self._factors.clear()

    @contextmanager
    def lent(self, name: str) -> Iterator[Tensor]:
        """A whole block, initially zero, to accumulate this batch's part of G into."""
        block = self._pending.get(name)
        if block is None:
            block = self._blank(name)
        yield block[: self._shapes[name].numel()].view(self._shapes[name])
        if name in self.late:
            self._pending[name] = block
        else:
            self._reduce(name, block)

    def factor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole block of the direction, cast to `dtype`."""
        block = self._factors[name] if name in self._factors else self._gathered(name)
        return block.to(dtype)

    def _blank(self, name: str) -> Tensor:
        assert self.sums is not None
        size = world().size * self._share(name)
        return torch.zeros(size, dtype=self.sums.forms[name].dtype, device=self.device)

    def _gathered(self, name: str) -> Tensor:
        rows = self._rows[name]
        every = rows.new_empty(world().size * len(rows))
        gather(every, rows)
        shape = self._shapes[name]
        return every[: shape.numel()].view(shape)

    def _reduce(self, name: str, block: Tensor | None) -> None:
        assert self.sums is not None
        block = self._blank(name) if block is None else block
        own = block.new_empty(self._share(name))
        scatter_sum(own, block)
        rows = self.sums.tensors[name]
        rows.view(-1).add_(own[: rows.numel()])
