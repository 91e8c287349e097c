"""Pending gradients of `SparseAdamW`: kept in `p.grad`, or moved out of it inside backward.

Algorithm 1, lines 1 and 12 (Warmup, MaskedFT). `Gradients` leaves gradients in `p.grad`, where
other code expects them. `FreedGradients` stores only the selected entries; this package trains with
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualsft.distributed.world import world
from dualsft.train import step as adam_step
from dualsft.train.compact_index import CompactIndex
from dualsft.train.step import MASTER_DTYPES

_BUCKET = 1 << 25  # entries per all-reduce


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
        self.indices: Mapping[str, CompactIndex | None] = {}
        """The mask, set by the optimizer."""
        self._checked = False

    def attach(self) -> list[RemovableHandle]:
        """Register a hook on every parameter, and return the handles.

        Parameters without selected entries are hooked too, because user code may turn their
        `requires_grad` on again. The hooks hold a weak reference: they do not keep this object or
        its optimizer alive.
        """
        hooks: list[RemovableHandle] = []
        owner: weakref.ref[Gradients] = weakref.ref(self)
        for name, p in self.params.items():
            if p.is_floating_point():
                p.requires_grad_(True)  # register_hook requires it; the optimizer resets it later
                hooks.append(self._hook(owner, name, p))
        return hooks

    def _hook(self, owner: weakref.ref[Gradients], name: str, p: Tensor) -> RemovableHandle:
        return p.register_hook(partial(_mask, owner, name))

    def names(self) -> list[str]:
        """Parameters with selected entries and a pending gradient, in model order."""
        return [name for name in self.indices if self.params[name].grad is not None]

    def get(self, name: str) -> Tensor | None:
        """The pending gradient of one parameter at its selected entries; None if there is none."""
        grad = self.params[name].grad
        if grad is None:
            return None
        _check_strided(name, grad)
        dense, index = grad.detach().reshape(-1), self.indices[name]
        return dense if index is None else adam_step.gather(dense, index)

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
        """Raise at the first step if gradients bypassed the hooks.

        With FSDP, for example, backward runs on tensors other than the visible parameters.
        """
        for name in [] if self._checked else self.names():
            grad, chosen = self.params[name].grad, self.get(name)
            assert grad is not None and chosen is not None
            if torch.count_nonzero(grad) != torch.count_nonzero(chosen):
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
        """All-reduce (sum) the gradients over all processes."""
        if world().size > 1:
            raise RuntimeError("exchange() needs SparseAdamW(..., free_gradients=True)")


class FreedGradients(Gradients):
    """Gradients at the selected entries only; dense gradients are freed inside backward.

    Micro-batches accumulate in fp32. `p.grad` is always None outside of backward.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        super().__init__(params)
        self._held: dict[str, Tensor] = {}
        self._used = False

    def _hook(self, owner: weakref.ref[Gradients], name: str, p: Tensor) -> RemovableHandle:
        return p.register_post_accumulate_grad_hook(partial(_take, owner, name))

    def names(self) -> list[str]:
        return [name for name in self.indices if name in self._held]

    def get(self, name: str) -> Tensor | None:
        return self._held.get(name)

    def take(self, name: str, p: Tensor) -> None:
        """Keep the selected entries of a new gradient and free it; runs inside backward."""
        if p.grad is None:
            raise RuntimeError(
                f"p.grad of {name!r} was cleared by another hook before SparseAdamW could read it"
            )
        _check_strided(name, p.grad)
        if name not in self.indices:  # `requires_grad` was turned on again by other code
            p.grad = None
            return
        self.check_cleared()
        dense = p.grad.detach().reshape(-1)
        p.grad = None
        index = self.indices[name]
        kernels = adam_step.kernels_for(dense.device.type, dense.dtype)
        if index is not None and kernels is not None:
            self._held[name] = kernels.gather(dense, index, self._held.get(name))
            return
        self.add(name, dense if index is None else index.gather(dense))

    def add(self, name: str, grad: Tensor) -> None:
        """Accumulate a gradient over the selected entries of one parameter."""
        held = self._held.get(name)
        self._held[name] = grad if held is None else held.to(MASTER_DTYPES[grad.dtype]).add_(grad)

    def check_cleared(self) -> None:
        """Raise if the stored gradients were already used by a step; call it before adding more.

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
        """All-reduce (sum) the gradients over all processes, each of which has all parameters.

        Only selected entries are sent, in the masters' dtype, packed into a few large vectors.
        """
        if world().size == 1:
            return
        waiting: list[str] = []
        for name in self.indices:
            waiting.append(name)
            if sum(map(self._count, waiting)) >= _BUCKET:
                self._exchange(waiting)
                waiting = []
        if waiting:
            self._exchange(waiting)

    def _count(self, name: str) -> int:
        index = self.indices[name]
        return self.params[name].numel() if index is None else len(index)

    def _exchange(self, names: list[str]) -> None:
        counts = [self._count(name) for name in names]
        first = self.params[names[0]]
        dtype = MASTER_DTYPES[first.dtype]
        every = torch.zeros(sum(counts), dtype=dtype, device=first.device)
        for name, part in zip(names, every.split(counts), strict=True):
            if name in self._held:  # otherwise this process contributes zeros
                part.copy_(self._held[name])
        world().sum_(every)
        for name, part in zip(names, every.split(counts), strict=True):
            self._held[name] = part


def _mask(owner: weakref.ref[Gradients], name: str, grad: Tensor) -> Tensor | None:
    return None if (gradients := owner()) is None else gradients.masked(name, grad)


def _take(owner: weakref.ref[Gradients], name: str, p: Tensor) -> None:
    if (gradients := owner()) is not None:
        gradients.take(name, p)


def _check_strided(name: str, grad: Tensor) -> None:
    """Raise for a gradient that is not a dense tensor."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient of {name!r} is in layout {grad.layout}; SparseAdamW needs it dense"
        )
