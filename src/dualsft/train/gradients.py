"""Pending gradients of `SparseAdamW`, in one of three places.

Algorithm 1, lines 1 and 12 (Warmup, MaskedFT). `Gradients` leaves them in `p.grad`, where other
code expects them. `FreedGradients` stores only the selected entries; this package trains with it.
`ShardedGradients` does so for the local rows of a sharded model. What differs between replicated
and sharded training is in `exchange` and `take`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualsft.distributed.world import all_gather, scatter_sum, world
from dualsft.train.compact import MASTER_DTYPES, CompactIndex, num_buckets_of
from dualsft.train.step import gather

Mask = Mapping[str, CompactIndex | None]


class Gradients:
    """Dense gradients in `p.grad`, zero outside the selection.

    A hook zeroes the unselected entries of a gradient before it is accumulated. Everything that
    reads or writes `p.grad` afterwards works as usual: accumulation, DistributedDataParallel, loss
    scaling, clipping, and `zero_grad()` of the model or the optimizer.
    """

    scale: Tensor | None = None
    """Factor that the step applies to the gradients (clipping)."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = params
        self.indices: Mask = {}
        self._checked = False

    def attach(self) -> list[RemovableHandle]:
        """Register a hook on every parameter, and return the handles.

        User code may turn on `requires_grad` of parameters without selected entries again.
        """
        return [
            self._hook(name, p.requires_grad_(True))  # hooks need it; the optimizer resets it later
            for name, p in self.params.items()
            if p.is_floating_point()
        ]

    def _hook(self, name: str, p: Tensor) -> RemovableHandle:
        return p.register_hook(_while_alive(self.masked, name))

    def select(self, indices: Mask) -> None:
        """Use this mask from now on."""
        self.indices = indices

    def names(self) -> list[str]:
        """Parameters with selected entries and a pending gradient, in model order."""
        return [name for name in self.indices if self.params[name].grad is not None]

    def count(self, name: str) -> int:
        """Number of selected entries of one parameter of the mask."""
        index = self.indices[name]
        return self.params[name].numel() if index is None else len(index)

    def get(self, name: str) -> Tensor:
        """The pending gradient of one of `names()` at its selected entries."""
        grad = self.params[name].grad
        assert grad is not None
        _check_strided(name, grad)
        return gather(grad.detach().reshape(-1), self.indices[name])

    def take(self, name: str, p: Tensor) -> None:
        """Mask a gradient that was in `p.grad` before the hooks were registered."""
        assert p.grad is not None
        p.grad = self.masked(name, p.grad)

    def masked(self, name: str, grad: Tensor) -> Tensor:
        """The gradient with unselected entries set to zero; does not modify its argument."""
        _check_strided(name, grad)
        if name not in self.indices:
            return torch.zeros_like(grad)
        index = self.indices[name]
        return grad if index is None else index.masked(grad.reshape(-1)).view(grad.shape)

    def clip(self, norm: Tensor, max_norm: float) -> Tensor:
        """Clip gradients, whose total norm is `norm`, to `max_norm`; return the norm before."""
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for name in self.names():
            grad = self.params[name].grad
            assert grad is not None
            grad.mul_(factor.to(grad.device))
        return norm

    def clear(self) -> None:
        """Drop the gradients stored outside `p.grad`."""

    def check(self) -> None:
        """Raise at the first step if gradients bypassed the hooks, as with FSDP."""
        for name in [] if self._checked else self.names():
            grad = self.params[name].grad
            assert grad is not None
            if torch.count_nonzero(grad) != torch.count_nonzero(self.get(name)):
                raise RuntimeError(
                    f"the gradient of {name!r} is not zero outside the selected entries: backward "
                    "did not compute it for this parameter. SparseAdamW does not work with FSDP "
                    "or DeepSpeed; a gradient that you set yourself must be zero there"
                )
        self._checked = True

    def end_step(self) -> None:
        """Called after each optimizer step."""

    @property
    def nbytes(self) -> int:
        """Bytes of gradients stored outside `p.grad`."""
        return 0

    def exchange(self) -> None:
        """Sum the gradients over all processes."""
        world().require_one("exchange() needs SparseAdamW(..., free_gradients=True)")


class FreedGradients(Gradients):
    """Gradients at the selected entries only; dense gradients are freed inside backward.

    Micro-batches accumulate in fp32. `p.grad` is always None outside of backward.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        super().__init__(params)
        self._held: dict[str, Tensor] = {}
        self._used = False

    def _hook(self, name: str, p: Tensor) -> RemovableHandle:
        return p.register_post_accumulate_grad_hook(_while_alive(self.take, name))

    def names(self) -> list[str]:
        return [name for name in self.indices if name in self._held]

    def get(self, name: str) -> Tensor:
        return self._held[name]

    def take(self, name: str, p: Tensor) -> None:
        """Keep the selected entries of a new gradient and free it; runs inside backward."""
        if p.grad is None:
            raise RuntimeError(
                f"p.grad of {name!r} was cleared by another hook before SparseAdamW could read it"
            )
        _check_strided(name, p.grad)
        dense, p.grad = p.grad.detach().reshape(-1), None
        if self._wants(name):  # else `requires_grad` was turned on again by other code
            self._check_cleared()
            self._add(name, dense, p.shape)

    def _wants(self, name: str) -> bool:
        return name in self.indices

    def _add(self, name: str, dense: Tensor, shape: torch.Size) -> None:
        self._held[name] = gather(dense, self.indices[name], self._held.get(name))

    def _check_cleared(self) -> None:
        """Raise if the stored gradients were already used by a step.

        If they were clipped but not used yet, apply the clipping factor now, so that it does not
        scale the gradients added later.
        """
        if self._used:
            raise RuntimeError(
                "backward ran after step() without a call of this SparseAdamW's zero_grad() in "
                "between; with free_gradients=True, zero_grad() of the model does not clear the "
                "gradients: call the optimizer's, or create it without free_gradients"
            )
        if self.scale is not None:
            factor, self.scale = self.scale, None
            for key, grad in self._held.items():
                self._held[key] = grad.to(MASTER_DTYPES[grad.dtype]) * factor

    def clip(self, norm: Tensor, max_norm: float) -> Tensor:
        """Store the clipping factor for the step: no write to memory, no device synchronization."""
        if self.scale is not None:
            norm = norm * self.scale
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.scale = factor if self.scale is None else self.scale * factor
        return norm

    def clear(self) -> None:
        self._held.clear()
        self.scale, self._used = None, False

    def check(self) -> None:
        for name in self.indices:
            if self.params[name].grad is not None:
                raise RuntimeError(
                    f"{name!r} has a gradient in p.grad, which free_gradients=True does not use; "
                    "create the SparseAdamW without it (DistributedDataParallel also needs that)"
                )

    def end_step(self) -> None:
        self._used = True

    @property
    def nbytes(self) -> int:
        return sum(grad.nbytes for grad in self._held.values())

    def exchange(self) -> None:
        """Sum the selected entries over all processes, in the masters' dtype."""
        if not self.indices:
            return
        counts = {name: self.count(name) for name in self.indices}
        like = self.params[next(iter(counts))]
        self._held = world().sum_packed(self._held, counts, MASTER_DTYPES[like.dtype], like.device)


class ShardedGradients(FreedGradients):
    """Gradients of this process's rows of a sharded model, summed over the processes in backward.

    For each gradient of a `gathered` parameter the processes all-gather their indices, then
    reduce-scatter the values at these entries; the other entries are not sent. No process stores
    anything that grows with the selection of all processes. `params` are the local rows.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], gathered: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(params)
        self.gathered = gathered
        self.shares: dict[str, list[int]] = {}
        """Selected entries per process, of each parameter with selected entries in any process."""

    def _hook(self, name: str, p: Tensor) -> RemovableHandle:
        return super()._hook(name, self.gathered[name].requires_grad_(True))

    def select(self, indices: Mask) -> None:
        super().select(indices)
        counts = world().gather({name: self.count(name) for name in indices})
        shares = {name: [found.get(name, 0) for found in counts] for name in self.params}
        self.shares = {name: share for name, share in shares.items() if any(share)}

    def _wants(self, name: str) -> bool:
        return name in self.shares

    @torch.no_grad()
    def _add(self, name: str, dense: Tensor, shape: torch.Size) -> None:
        """Exchange the selected entries of a new gradient and keep those of the local rows."""
        shares = self.shares[name]
        values = self._wanted(name, dense, shape).to(MASTER_DTYPES[dense.dtype])
        own = values.new_empty(max(shares))
        scatter_sum(own, values)
        if count := shares[world().rank]:
            rows = own[:count].to(self.params[name].device)
            self._held[name] = gather(rows, None, self._held.get(name))

    def _wanted(self, name: str, dense: Tensor, shape: torch.Size) -> Tensor:
        """The gradient at the entries of each process, padded to the largest share (not read)."""
        shares = self.shares[name]
        size, width = len(shares), max(shares)
        if sum(shares) == dense.numel():  # fully selected: rows are already in rank order
            return nn.functional.pad(dense, (0, size * width - dense.numel()))
        rows = [world().own(shape, rank) for rank in range(size)]
        values = dense.new_empty(size, width)
        num_buckets = [num_buckets_of(last - first) for first, last in rows]
        for rank, index in enumerate(self._everyones(name, num_buckets, dense.device)):
            first, last = rows[rank]
            if shares[rank]:
                values[rank, : shares[rank]] = gather(dense[first:last], index)
        return values.view(-1)

    def _everyones(
        self, name: str, num_buckets: list[int], device: torch.device
    ) -> Iterator[CompactIndex]:
        """All-gather the indices of each process, in their compact form."""
        shares = self.shares[name]
        offsets = torch.zeros(max(shares), dtype=torch.int16, device=device)
        pointers = torch.zeros(max(num_buckets) + 1, dtype=torch.int32, device=device)
        if name in self.indices:
            count, index = self.count(name), self.indices[name]
            if index is None:
                index = CompactIndex.encode(torch.arange(count, device=device), count)
            offsets[:count] = index.offsets.to(device)
            pointers[: index.pointers.numel()] = index.pointers.to(pointers)
        packed = torch.cat([offsets.view(torch.uint8), pointers.view(torch.uint8)])
        every = packed.new_empty(len(shares), packed.numel())  # as bytes: NCCL has no int16
        all_gather(every.view(-1), packed)
        for rank, count in enumerate(shares):
            border = offsets.nbytes
            some = every[rank, : 2 * count].view(torch.int16)
            where = every[rank, border : border + 4 * (num_buckets[rank] + 1)]
            where = where.clone().view(torch.int32)  # the slice may not be aligned to 4 bytes
            yield CompactIndex(some, where, where)

    def exchange(self) -> None:
        """Does nothing: gradients are already summed in the backward pass."""


def _while_alive(method: Callable[[str, Tensor], Any], name: str) -> Callable[[Tensor], Any]:
    """A hook that calls `method(name, tensor)`, and does not keep the method's object alive."""
    weak = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> Any:
        return None if (call := weak()) is None else call(name, tensor)

    return hook


def _check_strided(name: str, grad: Tensor) -> None:
    """Raise for a gradient that is not a dense tensor."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient of {name!r} is in layout {grad.layout}; SparseAdamW needs it dense"
        )
