"""Training of a sharded model: SparseAdamW with the state of the local rows.

Algorithm 1, line 12 (MaskedFT), and line 1 (Warmup), under FSDP2. Each process has the indices,
masters and moments of its own rows. Inside the backward pass the selected entries of a gradient are
reduce-scattered to the processes that own their rows; the other entries are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.distributed.world import gather, scatter_sum, world
from dualsft.model.sharded import gathered_parameters, is_sharded, local_rows, set_requires_grad
from dualsft.train import step as adam_step
from dualsft.train.compact_index import CompactIndex, num_buckets_of
from dualsft.train.gradients import FreedGradients
from dualsft.train.optimizer import Indices, SparseAdamW
from dualsft.train.step import MASTER_DTYPES


class ShardedAdamW(SparseAdamW):
    """`SparseAdamW` over this process's rows of a sharded model.

    For each gradient the processes all-gather their indices inside the backward pass, then
    reduce-scatter the values at these entries. No process stores anything that grows with the
    selection of all processes.
    """

    def __init__(
        self, model: nn.Module, names: list[str], indices: Indices | None, **settings: Any
    ) -> None:
        """`indices` are global; entries in the rows of other processes may be left out."""
        self._model = model
        self._first = {n: world().own(model.get_parameter(n).shape)[0] for n in names}
        local: list[tuple[str, nn.Parameter]] = []
        chosen: dict[str, Tensor | None] = {}
        for name in names:
            rows = local_rows(model.get_parameter(name))
            local.append((name, nn.Parameter(rows)))
            if indices is None or (name in indices and indices[name] is None):
                chosen[name] = None
            elif name in indices:
                chosen[name] = self._own_part(name, indices[name], rows.numel())
        super().__init__(local, chosen, free_gradients=True, **settings)
        assert isinstance(self._grads, FreedGradients)
        self._freed = self._grads
        self._shares = self._count_shares(chosen)
        gathered = gathered_parameters(model)
        self._taking = [
            gathered[name].register_post_accumulate_grad_hook(partial(self._take, name))
            for name in self._shares
        ]
        for name in names:
            set_requires_grad(model, name, name in self._shares)

    def _own_part(self, name: str, index: Tensor | None, count: int) -> Tensor:
        assert index is not None
        local = index - self._first[name]
        return local[(local >= 0) & (local < count)]

    def _count_shares(self, chosen: Mapping[str, Tensor | None]) -> dict[str, list[int]]:
        """Trained entries per process, for each parameter that any process trains."""
        own = {name: self.count(name) if name in self._indices else 0 for name in chosen}
        every = world().answers(own)
        names = dict.fromkeys(name for found in every for name in found)
        shares = {name: [found.get(name, 0) for found in every] for name in self._params}
        return {name: shares[name] for name in self._params if name in names and any(shares[name])}

    @property
    def shares(self) -> dict[str, list[int]]:
        """Number of selected entries of each parameter, per process."""
        return self._shares

    @property
    def num_selected(self) -> int:
        """Number of selected entries over all processes."""
        return sum(map(sum, self._shares.values()))

    def span(self, key: str) -> tuple[int, int]:
        """Range of a saved vector over the selected entries that belongs to this process."""
        counts, rank = self._shares[key.partition(".")[2]], world().rank
        return sum(counts[:rank]), sum(counts[: rank + 1])

    @torch.no_grad()
    def _take(self, name: str, p: Tensor) -> None:
        """Exchange the selected entries of a new gradient and free it; runs inside backward."""
        if world().size == 1 and p.device == self.weight(name).device:  # nothing to exchange
            self._grads.take(name, p)
            return
        self._freed.check_cleared()
        assert p.grad is not None
        dense, p.grad = p.grad.detach().reshape(-1), None
        shares, rank = self._shares[name], world().rank
        values = self._wanted(name, p.shape, dense).to(MASTER_DTYPES[dense.dtype])
        own = values.new_empty(max(shares))
        scatter_sum(own, values)
        if shares[rank]:
            self._freed.add(name, own[: shares[rank]].to(self.weight(name).device))

    def _wanted(self, name: str, shape: torch.Size, dense: Tensor) -> Tensor:
        """The gradient at the selected entries of each process, padded to the largest share.

        The padding is uninitialized and never read.
        """
        size, shares = world().size, self._shares[name]
        width = max(shares)
        if sum(shares) == dense.numel():  # fully selected: rows are already in rank order
            return nn.functional.pad(dense, (0, size * width - dense.numel()))
        rows = [world().own(shape, rank) for rank in range(size)]
        values = dense.new_empty(size, width)
        for rank, index in enumerate(self._everyones(name, rows, dense.device)):
            first, last = rows[rank]
            if shares[rank]:
                values[rank, : shares[rank]] = adam_step.gather(dense[first:last], index)
        return values.view(-1)

    def _everyones(
        self, name: str, rows: Sequence[tuple[int, int]], device: torch.device
    ) -> Iterator[CompactIndex]:
        """All-gather the indices of each process, in their compact form."""
        shares = self._shares[name]
        num_buckets = [num_buckets_of(last - first) for first, last in rows]
        offsets = torch.zeros(max(shares), dtype=torch.int16, device=device)
        pointers = torch.zeros(max(num_buckets) + 1, dtype=torch.int32, device=device)
        if name in self._indices:
            count, index = self.count(name), self._indices[name]
            if index is None:
                index = CompactIndex.encode(torch.arange(count, device=device), count)
            offsets[:count] = index.offsets.to(device)
            pointers[: index.pointers.numel()] = index.pointers.to(pointers)
        packed = torch.cat([offsets.view(torch.uint8), pointers.view(torch.uint8)])
        every = packed.new_empty(len(rows), packed.numel())  # as bytes: NCCL has no int16
        gather(every.view(-1), packed)
        for rank, count in enumerate(shares):
            border = offsets.nbytes
            some = every[rank, : 2 * count].view(torch.int16)
            where = every[rank, border : border + 4 * (num_buckets[rank] + 1)]
            where = where.clone().view(torch.int32)  # the slice may not be aligned to 4 bytes
            yield CompactIndex(some, where, where)

    def exchange(self) -> None:
        """Does nothing: gradients are already summed in the backward pass."""

    def total_norm(self) -> Tensor:
        own = super().total_norm()
        if world().size == 1:
            return own
        device = next(iter(self._params.values())).device
        return world().sum_(own.double().cpu() ** 2).sqrt().to(device, own.dtype)

    def close(self) -> None:
        if self._closed:
            return
        for handle in self._taking:
            handle.remove()
        super().close()
        for name in self._numbers:
            set_requires_grad(self._model, name, True)


def make_optimizer(
    model: PreTrainedModel,
    named: list[tuple[str, nn.Parameter]],
    indices: Mapping[str, Tensor] | Indices | None,
    **settings: Any,
) -> SparseAdamW:
    """The optimizer for `train/loop.py`, for a sharded or an unsharded model."""
    if is_sharded(model):
        return ShardedAdamW(model, [name for name, _ in named], indices, **settings)
    return SparseAdamW(named, indices, free_gradients=True, **settings)
