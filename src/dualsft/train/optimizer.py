"""SparseAdamW: AdamW with gradients, moments, decay and master weights for selected entries only.

Algorithm 1, line 12 (MaskedFT), and with all entries selected line 1 (Warmup).

A selected entry of a bf16 model takes 2 bytes of index (`train/compact.py`), the 2 low bytes of the
fp32 master whose high half is the weight (`train/step.py`), and 8, 4 or 2 bytes of moments. A step
is one pass over these vectors, in a fused kernel on CUDA (`train/kernels.py`). Unselected entries
are never written.

Gradients stay in `p.grad`, zero outside the selection. With `free_gradients=True`, which this
package uses, only the selected entries are kept, and each dense gradient is freed inside backward
(`train/gradients.py`). With fp32 or fp64 weights, the update on a CPU equals `torch.optim.AdamW`
bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dualsft.distributed.world import world
from dualsft.model.sharded import gathered_parameters, is_sharded, local_rows, set_requires_grad
from dualsft.train import compact
from dualsft.train import step as adam_step
from dualsft.train.compact import MASTER_DTYPES, CompactIndex, Indices, Moments
from dualsft.train.gradients import FreedGradients, Gradients, ShardedGradients
from dualsft.train.step import PART, SCALARS, Held, Part, Step, run_parts

_MARK = "_dualsft_optimizer_attached"  # set on a parameter while a SparseAdamW is attached to it
_BESIDE_WEIGHT = ("low", "master")  # saved as part of `masters`, not of the moments


class SparseAdamW(torch.optim.Optimizer):
    """AdamW on selected entries of a model's parameters.

    While the optimizer is attached, parameters without selected entries have `requires_grad` off,
    and gradients are zero outside the selection. Do not modify the selected weights in the
    meantime: to load other weights, `close()` the optimizer and create a new one. `close()`, or
    leaving the `with` block, removes the hooks. `state` is keyed by the model's parameters. There
    is one parameter group.

    It works with Accelerate, a GradScaler and a Hugging Face `Trainer`, as
    `optimizers=(optimizer, None)` or `optimizer_cls_and_kwargs=(SparseAdamW, {"params":
    list(model.named_parameters()), "indices": mask, "lr": lr})`. Move and convert the model before
    creating the optimizer. `moments` is the dtype of the moments; bfloat16
    and int8 use stochastic rounding, seeded by `seed`. `offload` keeps moments and low halves in
    host memory between steps. `free_gradients` frees each dense gradient inside backward and stores
    only its selected entries, in `gradients`; `p.grad` stays None. This saves memory, but the
    training loop must clear gradients with this optimizer's `zero_grad()` and clip them with its
    `clip_grad_norm()`. A `Trainer` does neither.
    """

    layout: ClassVar[dict[str, str]] = {}
    """How the tensors of a saved state are split over processes (`storage/resume.py`)."""

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
        _check_numbers(lr, betas, eps, weight_decay, moments)
        self.moments: Moments = moments
        self.offload = offload
        self.seed = seed
        self.free_gradients = free_gradients
        self._params = _unique_parameters(named_parameters)
        self._requires_grad = {name: p.requires_grad for name, p in self._params.items()}
        self._indices: dict[str, CompactIndex | None] = {}
        self._shapes = {name: p.shape for name, p in self._params.items()}
        self._storages: dict[str, int] = {}
        self._closed = False
        selected = compact.checked_indices(self._params, self._requires_grad, indices)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([{"params": []}], defaults)
        self._grads = self._new_gradients()
        self._attach()
        self._select(selected)
        for name in self._indices:  # existing gradients count, as with any optimizer
            if self._params[name].grad is not None:
                self._grads.take(name, self._params[name])

    def _new_gradients(self) -> Gradients:
        return (FreedGradients if self.free_gradients else Gradients)(self._params)

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
        return self._grads.count(name)

    @property
    def indices(self) -> dict[str, Tensor | None]:
        """Flat indices of each parameter with selected entries; None means all of its entries."""
        return {n: None if index is None else index.decode() for n, index in self._indices.items()}

    def index(self, name: str, first: int, last: int) -> Tensor | None:
        """Flat indices of the selected entries from `first` to `last`; None if all are selected."""
        index = self._indices[name]
        return None if index is None else index.decode(first, last)

    @property
    def masters(self) -> dict[str, Tensor]:
        """Masters of each parameter with selected entries, assembled on each access."""
        return {name: self.master(name) for name in self._indices}

    def master(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Masters of the selected entries from `first` to `last`; may be a view of the weight."""
        last = self.count(name) if last is None else last
        held = self.state.get(self._params[name], {})
        return adam_step.read_masters(self.weight(name), self._indices[name], held, first, last)

    def weight(self, name: str) -> Tensor:
        """All weights of a parameter, selected or not, as a flat view."""
        return self._params[name].detach().view(-1)

    def second_moment(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Second moment of these entries in fp32 (fp64 for an fp64 model), without bias correction;
        zero before the first step."""
        p = self._params[name]
        last = self.count(name) if last is None else last
        if held := self.state.get(p):
            return adam_step.read_second_moment(held, first, last, p.device)
        return torch.zeros(last - first, dtype=MASTER_DTYPES[p.dtype], device=p.device)

    def moments_of(self, name: str) -> Held:
        """Step count and moments of one parameter as stored; empty before its first step."""
        return _without_masters(self.state.get(self._params[name], {}))

    def num_updates(self, name: str) -> int:
        """Number of updates of a parameter: the t of its bias corrections."""
        held = self.state.get(self._params[name])
        return int(held["step"]) if held else 0

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Pending gradients at the selected entries in model order, without the clipping factor of
        `free_gradients`."""
        return {name: self._grads.get(name) for name in self._grads.names()}

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
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_params()
        for name, storage in self._storages.items():
            if self._params[name].data_ptr() != storage:
                raise RuntimeError(
                    f"storage of {name!r} was replaced while SparseAdamW was attached; move or "
                    "convert the model first, then create the optimizer"
                )
        self._grads.check()
        pending = [(name, self._params[name]) for name in self._grads.names()]
        for name, p in pending:  # all state first: out-of-memory must not leave half a step
            if p not in self.state:
                self.state[p] = self._new_state(name)
        devices = {p.device for _, p in pending}
        run_parts(self._parts(), devices.pop() if self.offload and len(devices) == 1 else None)
        self._grads.end_step()
        return loss

    def _parts(self) -> Iterator[Part]:
        """Yield the parts of a step; step count and `top` change with a parameter's first part."""
        group, scale = self.param_groups[0], self._grads.scale
        numbers = {name: number for number, name in enumerate(self._params)}
        for name in self._grads.names():
            grad = self._grads.get(name)
            held = self.state[self._params[name]]
            before = dict(held)  # keeps the old `top`, with which the stored codes are decoded
            held["step"] += 1
            if "top" in held:
                largest = torch.linalg.vector_norm(grad, torch.inf)
                scaled = largest if scale is None else largest * scale
                held["top"] = compact.raised_top(held["top"], scaled)
            number, key = int(held["step"]), (0, 0)
            if self.moments != "float32":
                key = compact.noise_key(self.seed, number, numbers[name])
            settings = float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
            step = Step(number, *settings, key, scale, held.get("top"))
            weight, index = self.weight(name), self._indices[name]
            size = PART if self.offload else max(1, grad.numel())
            for first in range(0, grad.numel(), size):
                yield Part(weight, index, grad[first : first + size], before, first, step)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by `GradScaler.step`: whether the step unscales the gradients. The scaler does it,
        in `p.grad`."""
        if self.free_gradients:
            raise RuntimeError(
                "a GradScaler unscales gradients in p.grad, which is never set with "
                "free_gradients=True: create the SparseAdamW without it, or train in bf16"
            )
        return False

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
        norms = [adam_step.norm(grad) for grad in self.gradients.values()]
        if not norms:
            return torch.tensor(0.0)
        return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))

    @torch.no_grad()
    def exchange(self) -> None:
        """All-reduce (sum) the pending gradients over all processes; needs `free_gradients`."""
        self._grads.exchange()

    def span(self, key: str) -> tuple[int, int]:
        """Range of a saved vector over the selected entries that this optimizer loads: all."""
        return 0, self.count(key.partition(".")[2])

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts by parameter number; `indices` and `masters` by name."""
        self._check_params()
        saved = super().state_dict()
        saved["state"] = {i: _without_masters(held) for i, held in saved["state"].items()}
        return {**saved, "indices": self.indices, "masters": self.masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore indices, masters and moments, and write the masters into the model's weights."""
        self._check_open()
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
        indices, masters = state_dict["indices"], state_dict["masters"]
        selected = compact.checked_indices(self._params, self._requires_grad, indices)
        names = list(selected)
        held = {names[i]: entry for i, entry in state_dict["state"].items() if i < len(names)}
        self._check_saved(selected, masters, held)
        self._select(selected)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.restore(masters, held)

    @torch.no_grad()
    def restore(
        self, masters: Mapping[str, Tensor], held: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Load masters, moments and step counts by parameter name; the mask stays the same."""
        self._check_saved(self._indices, masters, held)
        for name, index in self._indices.items():
            p = self._params[name]
            self.state.pop(p, None)
            if name in held:
                state = self.state[p] = self._new_state(name)
                for key, value in held[name].items():
                    state[key].copy_(value)
            adam_step.write_masters(self.weight(name), index, self.state.get(p, {}), masters[name])
        self.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Accept the one group created by the constructor and refuse any other."""
        if self.param_groups:
            raise ValueError("SparseAdamW has one parameter group; change it with set_indices()")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Remove the hooks and restore `requires_grad`; state and masters stay readable."""
        if self._closed:
            return
        self._closed = True
        self.zero_grad()
        self._detach()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Inside, the model is as without this optimizer: no hooks, its own `requires_grad`.

        For other uses of the model between a step and the next backward, such as scoring it.
        """
        self._check_open()
        self._detach()
        try:
            yield
        finally:
            self._attach()
            for name, p in self._params.items():
                p.requires_grad_(name in self._indices)

    def _attach(self) -> None:
        for p in self._params.values():
            setattr(p, _MARK, weakref.ref(self))  # a garbage-collected optimizer does not count
        self._hooks = self._grads.attach()

    def _detach(self) -> None:
        for handle in self._hooks:
            handle.remove()
        for name, p in self._params.items():
            p.requires_grad_(self._requires_grad[name])
            delattr(p, _MARK)

    def __enter__(self) -> SparseAdamW:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("SparseAdamW holds hooks on one model: copy or save its state_dict()")

    # --- the mask --------------------------------------------------------------------------------

    def set_indices(self, indices: Indices | None, carry: bool = True) -> None:
        """Change the mask; call it between a step and the next backward.

        Entries that stay keep their master and moments. With `carry=False` they keep the master
        only, and all moments and step counts are reset. Entries that enter start from the current
        weight with zero moments. Entries that leave keep their last weight. A parameter keeps its
        step count as long as it has selected entries, so an entry that enters late gets almost no
        bias correction: its first update is up to (1 - beta1) / sqrt(1 - beta2) = 3.2 times lr. A
        parameter without selected entries loses its step count. Pending gradients are dropped.
        """
        self._check_open()
        selected = compact.checked_indices(self._params, self._requires_grad, indices)
        self._select(selected, carry)
        self.zero_grad()

    @torch.no_grad()
    def _select(self, selected: dict[str, CompactIndex | None], carry: bool = True) -> None:
        """Make `selected` the mask: move the state, set `requires_grad` and the group's params."""
        before, self._indices = self._indices, selected
        self._grads.select(selected)
        for name, p in self._params.items():
            p.requires_grad_(name in selected)
            if name not in selected:
                p.grad = None
                self.state.pop(p, None)
            elif p in self.state and not (
                carry and compact.same_entries(before[name], selected[name])
            ):
                self._move_state(name, before[name], carry)
        self._storages = {name: self._params[name].data_ptr() for name in selected}
        self.param_groups[0]["params"] = [self._params[name] for name in selected]
        self.param_groups[0]["param_names"] = list(selected)

    def _move_state(self, name: str, before: CompactIndex | None, carry: bool) -> None:
        """Rebuild the state of a parameter for its new index, as `set_indices` describes."""
        p = self._params[name]
        old, new = self.state[p], self._new_state(name)
        source, target = compact.positions_kept(before, self._indices[name], p.numel(), p.device)
        for key, value in old.items():
            if carry and key in SCALARS:
                new[key] = value
            elif carry or key in _BESIDE_WEIGHT:
                new[key][target.to(value.device)] = value[source.to(value.device)]
        self.state[p] = new

    def _new_state(self, name: str) -> Held:
        weight = self.weight(name)
        device = torch.device("cpu") if self.offload else weight.device
        pin = self.offload and weight.device.type == "cuda"
        return adam_step.new_state(weight, self._indices[name], self.moments, device, pin)

    # --- checks ----------------------------------------------------------------------------------

    def _check_saved(
        self,
        selected: Mapping[str, CompactIndex | None],
        masters: Mapping[str, Tensor],
        held: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Raise unless saved masters and moments match the indices and this optimizer's dtypes."""
        if list(masters) != list(selected):
            differ = sorted(set(masters) ^ set(selected)) or "their order"
            raise ValueError(
                f"state_dict's masters and indices do not match this model's parameters: {differ}"
            )
        for name, index in selected.items():
            p = self._params[name]
            count = p.numel() if index is None else len(index)
            moments = compact.moments_dtype(p.dtype, self.moments)
            tensors = [("master", masters[name], MASTER_DTYPES[p.dtype])]
            for key in ("exp_avg", "exp_avg_sq") if name in held else ():
                tensors.append((key, held[name][key], moments))
            for key, saved, want in tensors:
                if (saved.numel(), saved.dtype) != (count, want):
                    raise ValueError(
                        f"saved {key} of {name!r} has {saved.numel()} entries of {saved.dtype}; "
                        f"this optimizer needs {count} of {want} (moments={self.moments!r})"
                    )

    def _check_params(self) -> None:
        """Raise if parameters were sharded or replaced: the new ones would never be trained."""
        if len(self.param_groups) != 1 or self.param_groups[0].get("maximize"):
            raise RuntimeError(
                "SparseAdamW has one parameter group and minimizes; undo the change of "
                "param_groups, or train with two optimizers"
            )
        listed = [id(p) for p in self.param_groups[0]["params"]]
        whole = all(self._params[name].shape == self._shapes[name] for name in self._indices)
        if not whole or listed != [id(self._params[name]) for name in self._indices]:
            raise RuntimeError(
                "parameters were resized or replaced while SparseAdamW was attached: create it "
                "after resize_token_embeddings; it does not work with FSDP and DeepSpeed, which "
                "replace them: train on one device or with DistributedDataParallel"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this SparseAdamW is closed; create a new one to continue training")


class ShardedAdamW(SparseAdamW):
    """`SparseAdamW` of a sharded model: each process has the state of its own rows."""

    layout = {"step": "any", "master": "rows", "exp_avg": "rows", "exp_avg_sq": "rows"}
    _grads: ShardedGradients

    def __init__(
        self, model: nn.Module, names: list[str], indices: Indices | None, **settings: Any
    ) -> None:
        """`indices` are global; entries in the rows of other processes may be left out."""
        self._model = model
        local = {name: nn.Parameter(local_rows(model.get_parameter(name))) for name in names}
        chosen: dict[str, Tensor | None] = {}
        for name in names if indices is None else [name for name in names if name in indices]:
            index = None if indices is None else indices[name]
            if index is not None:
                index = index - world().own(model.get_parameter(name).shape)[0]
                index = index[(index >= 0) & (index < local[name].numel())]
            chosen[name] = index
        super().__init__(local.items(), chosen, free_gradients=True, **settings)
        for name in names:
            set_requires_grad(model, name, name in self.shares)

    def _new_gradients(self) -> Gradients:
        return ShardedGradients(self._params, gathered_parameters(self._model))

    @property
    def shares(self) -> dict[str, list[int]]:
        """Number of selected entries of each parameter, per process."""
        return self._grads.shares

    @property
    def num_selected(self) -> int:
        """Number of selected entries over all processes."""
        return sum(map(sum, self.shares.values()))

    def span(self, key: str) -> tuple[int, int]:
        """Range of a saved vector over the selected entries that belongs to this process."""
        counts, rank = self.shares[key.partition(".")[2]], world().rank
        return sum(counts[:rank]), sum(counts[: rank + 1])

    def total_norm(self) -> Tensor:
        device = next(iter(self._params.values())).device
        return world().norm(super().total_norm().to(device))

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        for name in self._params:
            set_requires_grad(self._model, name, True)


def make_optimizer(
    model: nn.Module,
    named: list[tuple[str, nn.Parameter]],
    indices: Indices | None,
    **settings: Any,
) -> SparseAdamW:
    """The optimizer for `train/loop.py`, for a sharded or an unsharded model."""
    if is_sharded(model):
        return ShardedAdamW(model, [name for name, _ in named], indices, **settings)
    return SparseAdamW(named, indices, free_gradients=True, **settings)


def _without_masters(held: Mapping[str, Tensor]) -> Held:
    return {key: t for key, t in held.items() if key not in _BESIDE_WEIGHT}


def _check_numbers(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, moments: str
) -> None:
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}; it must be at least 0")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"Invalid betas: {betas}; each must be at least 0 and below 1")
    if not (eps >= 0.0 and weight_decay >= 0.0):
        raise ValueError(
            f"Invalid eps {eps} or weight_decay {weight_decay}; both must be at least 0"
        )
    if moments not in compact.MOMENTS:
        allowed = ", ".join(compact.MOMENTS)
        raise ValueError(f"moments is {moments!r}; it must be one of {allowed}")


def _unique_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, nn.Parameter]:
    """Name -> parameter, each given once and without another SparseAdamW attached."""
    params: dict[str, nn.Parameter] = {}
    names: dict[int, str] = {}
    for pair in named_parameters:
        if isinstance(pair, Mapping | Tensor):
            raise ValueError(
                f"the parameters have no names (a {type(pair).__name__} was given), but the mask "
                "is by name: give model.named_parameters(); in a Trainer "
                "optimizer_cls_and_kwargs=(SparseAdamW, {'params': list(model.named_parameters()), "
                "'indices': mask, 'lr': lr})"
            )
        name, p = pair
        if name in params or id(p) in names:
            raise ValueError(
                f"parameter {name!r} is given twice (also as {names.get(id(p), name)!r}); "
                "give a tied weight once, as model.named_parameters() does"
            )
        if getattr(p, _MARK, lambda: None)() is not None:
            raise ValueError(f"parameter {name!r} has a SparseAdamW attached; close() that first")
        params[name], names[id(p)] = p, name
    return params
