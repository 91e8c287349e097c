"""SparseAdamW: AdamW with gradients, moments, decay and master weights for selected entries only.

Algorithm 1, line 12 (MaskedFT), and with all entries selected line 1 (Warmup).

A selected entry of a bf16 model takes 2 bytes of index (`train/compact_index.py`), the 2 low bytes
of the fp32 master whose high half is the weight (`train/step.py`), and 8, 4 or 2 bytes of moments
(`train/moments.py`). A step is one pass over these vectors, in a fused kernel on CUDA
(`train/kernels.py`). Unselected entries are never written.

By default gradients stay in `p.grad`. A hook zeroes the unselected entries before they are
accumulated, so gradient accumulation, clipping, loss scaling and any `zero_grad()` work as usual.
With `free_gradients=True`, which this package trains with, a hook inside backward copies the
selected entries of a gradient (2 bytes each for bf16) and frees the dense gradient at once.
Micro-batches then accumulate in fp32.

With fp32 or fp64 weights, which are their own masters, the update on a CPU equals
`torch.optim.AdamW` bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualsft.train import moments as adam_moments
from dualsft.train import step as adam_step
from dualsft.train.checks import (
    MARK,
    Indices,
    check_numbers,
    check_saved,
    checked_indices,
    unique_parameters,
)
from dualsft.train.compact_index import CompactIndex, positions_kept, same_entries
from dualsft.train.gradients import FreedGradients, Gradients
from dualsft.train.moments import Moments
from dualsft.train.offload import PART, Part, run_parts
from dualsft.train.step import MASTER_DTYPES, SCALARS, Held, Numbers

_BESIDE_WEIGHT = ("low", "master")  # saved as part of `masters`, not of the moments


class SparseAdamW(torch.optim.Optimizer):
    """AdamW on selected entries of a model's parameters.

    While the optimizer is attached, parameters without selected entries have `requires_grad` off,
    and gradients are zero outside the selection. Do not modify the selected weights in the
    meantime: to load other weights, `close()` the optimizer and create a new one. `close()`, or
    leaving the `with` block, removes the hooks. `state` is keyed by the model's parameters. There
    is one parameter group.

    It works with a Hugging Face `Trainer`: `Trainer(..., optimizers=(optimizer, None))`. Move and
    convert the model before creating the optimizer.

    `moments` is the dtype of the moments; bfloat16 and int8 use stochastic rounding, seeded by
    `seed`. `offload` keeps moments and low halves in host memory between steps. `free_gradients`
    frees each dense gradient inside backward and stores only its selected entries, in `gradients`;
    `p.grad` stays None. This saves memory, but the training loop must clear gradients with this
    optimizer's `zero_grad()` and clip them with its `clip_grad_norm()`. A `Trainer` does neither.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        indices: Indices | None,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments: Moments = "float32",
        offload: bool = False,
        seed: int = 0,
        free_gradients: bool = False,
    ) -> None:
        """Attach to the parameters; `indices=None` selects every entry of every parameter."""
        check_numbers(lr, betas, eps, weight_decay, moments)
        self.moments: Moments = moments
        self.offload = offload
        self.seed = seed
        self.free_gradients = free_gradients
        self._params = unique_parameters(named_parameters)
        self._numbers = {name: number for number, name in enumerate(self._params)}
        self._requires_grad = {name: p.requires_grad for name, p in self._params.items()}
        self._indices: dict[str, CompactIndex | None] = {}
        self._grads = (FreedGradients if free_gradients else Gradients)(self._params)
        self._shapes = {name: p.shape for name, p in self._params.items()}
        self._storages: dict[str, int] = {}
        self._closed = False
        selected = checked_indices(self._params, self._requires_grad, indices)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([{"params": []}], defaults)
        for p in self._params.values():
            setattr(p, MARK, weakref.ref(self))  # a garbage-collected optimizer does not count
        self._hooks = self._grads.attach()
        self._select(selected)
        for name in self._indices:  # existing gradients count, as with any optimizer
            if self._params[name].grad is not None:
                self._grads.take(name, self._params[name])

    # --- state -----------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Parameters with selected entries, in model order."""
        return list(self._indices)

    @property
    def num_selected(self) -> int:
        """Number of entries that this optimizer updates."""
        return sum(map(self.count, self._indices))

    def count(self, name: str) -> int:
        """Number of selected entries of one parameter."""
        index = self._indices[name]
        return self._params[name].numel() if index is None else len(index)

    @property
    def indices(self) -> dict[str, Tensor | None]:
        """Flat indices of each parameter with selected entries; None means all of its entries."""
        return {n: None if index is None else index.decode() for n, index in self._indices.items()}

    @property
    def masters(self) -> dict[str, Tensor]:
        """Masters of each parameter with selected entries, assembled on each access."""
        return {name: self.master(name) for name in self._indices}

    def master(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Masters of the selected entries from `first` to `last`.

        A view of the weight if the parameter is fully selected and its own master.
        """
        last = self.count(name) if last is None else last
        held = self.state.get(self._params[name], {})
        return adam_step.read_masters(self._flat(name), self._indices[name], held, first, last)

    def weight(self, name: str) -> Tensor:
        """All weights of a parameter, selected or not, as a flat view."""
        return self._flat(name)

    def index(self, name: str, first: int, last: int) -> Tensor | None:
        """Flat indices of the selected entries from `first` to `last`; None if all are selected."""
        index = self._indices[name]
        return None if index is None else index.decode(first, last)

    def second_moment(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Second moment of the selected entries from `first` to `last`, without bias correction.

        In fp32 (fp64 for an fp64 model), not divided by 1 - beta2^t; zero before the first step.
        """
        p = self._params[name]
        last = self.count(name) if last is None else last
        if held := self.state.get(p):
            return adam_step.read_second_moment(held, first, last, p.device)
        return torch.zeros(last - first, dtype=MASTER_DTYPES[p.dtype], device=p.device)

    def moments_of(self, name: str) -> Held:
        """Step count and moments of one parameter as stored; empty before its first step."""
        held = self.state.get(self._params[name], {})
        return {key: t for key, t in held.items() if key not in _BESIDE_WEIGHT}

    def num_updates(self, name: str) -> int:
        """Number of updates of a parameter: the t of its bias corrections."""
        held = self.state.get(self._params[name])
        return int(held["step"]) if held else 0

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Pending gradients at the selected entries, unclipped with `free_gradients`; in model
        order."""
        return {name: self._gradient(name) for name in self._grads.names()}

    @property
    def nbytes(self) -> int:
        """Bytes held by this optimizer: indices, gradients, masters and moments."""
        held = (t for state in self.state.values() for t in state.values())
        indices = sum(index.nbytes for index in self._indices.values() if index is not None)
        return indices + self._grads.nbytes + sum(t.nbytes for t in held)

    # --- the optimizer interface -----------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the selected entries of every parameter that has a gradient."""
        self._refuse_closed()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_params()
        self._check_storages()
        self._grads.check()
        pending = self._grads.names()
        for name in pending:  # allocate all state first: out-of-memory must not leave half a step
            if self._params[name] not in self.state:
                self.state[self._params[name]] = self._new_state(name)
        parts = self._parts()
        devices = {self._params[name].device for name in pending}
        if self.offload and len(devices) == 1:
            run_parts(parts, devices.pop())
        else:
            for part in parts:
                part.run(part.host())
        self._grads.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the pending gradients; with `free_gradients` they are always set to None."""
        self._grads.clear()
        super().zero_grad(set_to_none=set_to_none or self.free_gradients)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradient over the selected entries; return its norm before clipping.

        With `free_gradients` the step applies the factor; otherwise `p.grad` is scaled in place.
        """
        return self._grads.clip(self.total_norm(), max_norm)

    def total_norm(self) -> Tensor:
        """The norm of the stored gradients; with `free_gradients`, before clipping."""
        norms = [adam_step.norm(self._gradient(name)) for name in self._grads.names()]
        if not norms:
            return torch.tensor(0.0)
        return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))

    def span(self, key: str) -> tuple[int, int]:
        """Range of a saved vector over the selected entries that this optimizer loads: all."""
        return 0, self.count(key.partition(".")[2])

    @torch.no_grad()
    def exchange(self) -> None:
        """All-reduce (sum) the pending gradients over all processes; needs `free_gradients`."""
        self._grads.exchange()

    def set_indices(self, indices: Indices | None, carry: bool = True) -> None:
        """Change the mask; call it between a step and the next backward.

        Entries that stay keep their master and moments. With `carry=False` they keep the master
        only, and all moments and step counts are reset. Entries that enter start from the current
        weight with zero moments. Entries that leave keep their last weight. A parameter keeps its
        step count as long as it has selected entries, so an entry that enters late gets almost no
        bias correction: its first update is up to (1 - beta1) / sqrt(1 - beta2) = 3.2 times lr. A
        parameter without selected entries loses its step count. Pending gradients are dropped.
        """
        self._refuse_closed()
        self._select(checked_indices(self._params, self._requires_grad, indices), carry)
        self.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts by parameter number; `indices` and `masters` by name."""
        self._check_params()
        saved = super().state_dict()
        saved["state"] = {
            i: {key: t for key, t in held.items() if key not in _BESIDE_WEIGHT}
            for i, held in saved["state"].items()
        }
        return {**saved, "indices": self.indices, "masters": self.masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore indices, masters and moments, and write the masters into the model's weights."""
        self._refuse_closed()
        if missing := {"state", "param_groups", "indices", "masters"} - state_dict.keys():
            raise ValueError(
                f"state_dict has no {sorted(missing)}: it is not the state of a SparseAdamW"
            )
        if self.free_gradients and self._indices and not state_dict["state"]:
            raise RuntimeError(
                "this state has no updates to restore. Accelerate and Trainer load such a state "
                "before training, but they clear and clip p.grad, which is never set with "
                "free_gradients=True: create the SparseAdamW without it"
            )
        selected = checked_indices(self._params, self._requires_grad, state_dict["indices"])
        masters = state_dict["masters"]
        names = list(selected)
        held = {names[i]: entry for i, entry in state_dict["state"].items() if i < len(names)}
        check_saved(self._params, self.moments, selected, masters, held)
        self._select(selected)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.restore(masters, held)

    @torch.no_grad()
    def restore(
        self, masters: Mapping[str, Tensor], held: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Load masters, moments and step counts by parameter name; the mask stays the same."""
        check_saved(self._params, self.moments, self._indices, masters, held)
        for name, index in self._indices.items():
            p = self._params[name]
            self.state.pop(p, None)
            if name in held:
                state = self.state[p] = self._new_state(name)
                for key, value in held[name].items():
                    state[key].copy_(value)
            adam_step.write_masters(self._flat(name), index, self.state.get(p, {}), masters[name])
        self.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Accept the one group created by the constructor and refuse any other."""
        if self.param_groups:
            raise ValueError("SparseAdamW has one parameter group; change it with set_indices()")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Remove the hooks and restore `requires_grad` of the parameters.

        State and masters stay readable; the optimizer can no longer step.
        """
        if self._closed:
            return
        self._closed = True
        self.zero_grad()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for name, p in self._params.items():
            p.requires_grad_(self._requires_grad[name])
            delattr(p, MARK)

    def __enter__(self) -> SparseAdamW:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("SparseAdamW holds hooks on one model: copy or save its state_dict()")

    # --- gradients and steps ---------------------------------------------------------------------

    def _flat(self, name: str) -> Tensor:
        return self._params[name].detach().view(-1)

    def _new_state(self, name: str) -> Held:
        weight = self._flat(name)
        away = self.offload and weight.device.type != "cpu"
        device = torch.device("cpu") if away else weight.device
        pin = away and weight.device.type == "cuda"
        return adam_step.new_state(weight, self._indices[name], self.moments, device, pin)

    def _gradient(self, name: str) -> Tensor:
        """The pending gradient over the selected entries of a parameter that has one."""
        grad = self._grads.get(name)
        assert grad is not None
        return grad

    def _parts(self) -> Iterator[Part]:
        """Yield the parts of a step; step count and `top` change with a parameter's first part."""
        group = self.param_groups[0]
        for name in self._grads.names():
            grad = self._gradient(name)
            held = self.state[self._params[name]]
            before = dict(held)  # keeps the old `top`, with which the stored codes are decoded
            held["step"] += 1
            if "top" in held:
                largest = torch.linalg.vector_norm(grad, torch.inf)
                scaled = largest if self._grads.scale is None else largest * self._grads.scale
                held["top"] = adam_moments.raised_top(held["top"], scaled)
            step = int(held["step"])
            key = (0, 0)
            if self.moments != "float32":
                key = adam_moments.noise_key(self.seed, step, self._numbers[name])
            lr, betas = float(group["lr"]), group["betas"]
            numbers = Numbers(step, lr, betas, group["eps"], group["weight_decay"], key)
            run = partial(self._update, name, grad, numbers, held.get("top"))
            size = PART if self.offload else max(1, grad.numel())
            for first in range(0, grad.numel(), size):
                yield Part(before, first, min(first + size, grad.numel()), run)

    def _update(
        self,
        name: str,
        grad: Tensor,
        numbers: Numbers,
        top: Tensor | None,
        held: Held,
        first: int,
        last: int,
    ) -> None:
        """Update the entries from `first` to `last` of one parameter."""
        weight, some = self._flat(name), grad[first:last]
        kernels = adam_step.kernels_for(weight.device.type, weight.dtype)
        update = adam_step.update if kernels is None else kernels.update
        update(weight, self._indices[name], some, held, first, numbers, self._grads.scale, top)

    def _check_params(self) -> None:
        """Raise if parameters were sharded or replaced: the new ones would never be trained."""
        listed = [id(p) for group in self.param_groups for p in group["params"]]
        whole = all(self._params[name].shape == self._shapes[name] for name in self._indices)
        if not whole or listed != [id(self._params[name]) for name in self._indices]:
            raise RuntimeError(
                "parameters were replaced while SparseAdamW was attached, as FSDP and DeepSpeed "
                "do; it does not work with them: train on one device or with "
                "DistributedDataParallel"
            )

    def _check_storages(self) -> None:
        """Raise if a weight has new storage, so that its masters no longer match."""
        for name, storage in self._storages.items():
            if self._params[name].data_ptr() != storage:
                raise RuntimeError(
                    f"storage of {name!r} was replaced while SparseAdamW was attached; move or "
                    "convert the model first, then create the optimizer"
                )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this SparseAdamW is closed; create a new one to continue training")

    # --- the mask --------------------------------------------------------------------------------

    @torch.no_grad()
    def _select(self, selected: dict[str, CompactIndex | None], carry: bool = True) -> None:
        """Make `selected` the mask: move the state, set `requires_grad` and the group's params."""
        before, self._indices = self._indices, selected
        self._grads.indices = selected
        for name, p in self._params.items():
            if name not in selected:
                self.state.pop(p, None)
            elif p in self.state and not (carry and same_entries(before[name], selected[name])):
                self._move_state(name, before[name], carry)
        self._storages = {name: self._params[name].data_ptr() for name in selected}
        self.param_groups[0]["params"] = [self._params[name] for name in selected]
        self.param_groups[0]["param_names"] = list(selected)
        for name, p in self._params.items():
            p.requires_grad_(name in selected)
            if name not in selected:
                p.grad = None

    def _move_state(self, name: str, before: CompactIndex | None, carry: bool) -> None:
        """Rebuild the state of a parameter for its new index, as `set_indices` describes."""
        p = self._params[name]
        old, new = self.state[p], self._new_state(name)
        source, target = positions_kept(before, self._indices[name], p.numel(), p.device)
        for key, value in old.items():
            if not carry and key not in _BESIDE_WEIGHT:
                continue
            if key in SCALARS:
                new[key] = value
            else:
                new[key][target.to(value.device)] = value[source.to(value.device)]
        self.state[p] = new
