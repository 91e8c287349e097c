"""Training of a sharded model: the optimizer's state over the local rows.

Algorithm 1, line 12 (MaskedFT), and line 1 (Warmup), under FSDP2. Indices, masters and moments
exist for the rows that a process has. Inside the backward pass the selected entries of a gradient
leave the process that computed it and meet at the one that has their rows; the rest of it goes
nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.adam_step import MASTER_DTYPES
from dualsft.compact_index import CompactIndex
from dualsft.distributed import scatter_sum, world
from dualsft.optim import Indices, SparseAdamW
from dualsft.sharding import gathered_parameters, is_sharded, local_rows, set_requires_grad


class ShardedAdamW(SparseAdamW):
    """`SparseAdamW` over this process's rows of a sharded model.

    Inside the backward pass the selected entries of a gradient are gathered into one vector, which
    is in the order of the rows, and so of the processes: each is given the sum of its own part.
    """

    def __init__(
        self, model: nn.Module, names: list[str], indices: Indices | None, **settings: Any
    ):
        self._gathered = gathered_parameters(model)
        self._model = model
        self._everywhere: dict[str, CompactIndex | None] = {}
        self._counts: dict[str, list[int]] = {}
        local: list[tuple[str, nn.Parameter]] = []
        chosen: dict[str, Tensor | None] = {}
        for name in names:
            p = model.get_parameter(name)
            local.append((name, nn.Parameter(local_rows(p))))
            if indices is not None and name not in indices:
                continue
            index = None if indices is None else indices[name]
            if index is not None and not index.numel():
                continue
            chosen[name] = self._locate(name, p, index)
        super().__init__(local, chosen, **settings)
        self._taking = [
            self._gathered[name].register_post_accumulate_grad_hook(partial(self._take, name))
            for name in self._everywhere
        ]
        for name in names:
            set_requires_grad(model, name, name in self._everywhere)

    def _locate(self, name: str, p: Tensor, index: Tensor | None) -> Tensor | None:
        """The local part of a parameter's index; notes the whole one, and everybody's share."""
        borders = [world().own(p.shape, rank) for rank in range(world().size)]
        if index is None:
            self._everywhere[name] = None
            self._counts[name] = [last - first for first, last in borders]
            return None
        edges = torch.tensor([first for first, _ in borders] + [p.numel()])
        at = torch.searchsorted(index.cpu(), edges).tolist()
        self._counts[name] = [b - a for a, b in zip(at, at[1:], strict=False)]
        whole = index.numel() == p.numel()
        device = self._gathered[name].device
        self._everywhere[name] = None if whole else CompactIndex.encode(index.to(device), p.numel())
        rank = world().rank
        return index[at[rank] : at[rank + 1]] - borders[rank][0]

    @property
    def num_selected(self) -> int:
        """Entries of all processes."""
        return sum(map(sum, self._counts.values()))

    def span(self, key: str) -> tuple[int, int]:
        """Which flat range of a saved vector over the selected entries is this process's."""
        counts, rank = self._counts[key.partition(".")[2]], world().rank
        return sum(counts[:rank]), sum(counts[: rank + 1])

    @torch.no_grad()
    def _take(self, name: str, p: Tensor) -> None:
        assert p.grad is not None
        dense, p.grad = p.grad.detach().reshape(-1), None
        index, counts = self._everywhere[name], self._counts[name]
        values = dense if index is None else index.gather(dense)
        width, rank = max(counts), world().rank
        every = torch.zeros(
            len(counts), width, dtype=MASTER_DTYPES[dense.dtype], device=dense.device
        )
        for part, count, entries in zip(every, counts, values.split(counts), strict=True):
            part[:count] = entries
        own = every.new_empty(width)
        scatter_sum(own, every.view(-1))
        if counts[rank]:
            self.add_gradient(name, own[: counts[rank]].to(self.weight(name).device))

    def exchange(self) -> None:
        """Gradients are summed in the backward pass already."""

    def total_norm(self) -> Tensor:
        squares = super().total_norm().double() ** 2
        return world().sum_(squares.cpu()).sqrt()

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
    """The optimizer of a model's parameters, however the model is held."""
    if is_sharded(model):
        return ShardedAdamW(model, [name for name, _ in named], indices, **settings)
    return SparseAdamW(named, indices, **settings)
