"""SparseAdamW: AdamW whose gradients, moments, decay and master weights exist only where selected.

Algorithm 1, line 12 (MaskedFT); ALGORITHM.md section 2, "Restricted fine-tuning" and "Training".

For each model parameter with selected entries there is one *master*: the 1-D vector of these
entries in fp32 (fp64 for an fp64 model). The masters are what `torch.optim.AdamW` sees as its
parameters, so moments, `param_groups`, schedulers, gradient scalers and clipping are torch's own,
on compact vectors. Two things connect them to the model. A hook inside backward gathers the
selected entries of a gradient into `master.grad`, adding over micro-batches, and frees the dense
gradient at once. After a step the new values are written into the weights, in the model's dtype.
So steps too small for a bf16 weight are not lost, and unselected entries are never written.

A parameter selected whole, in fp32 or fp64, has a master that shares its storage: no copy, and the
update is that of `torch.optim.AdamW` bit for bit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Indices = Mapping[str, Tensor | None]
"""Parameter name -> sorted, unique, flat int64 indices (row-major); None means every entry."""

_MASTER_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
_MARK = "_dualsft_optimizer_attached"


class SparseAdamW(torch.optim.AdamW):
    """AdamW on selected entries of a model's parameters.

    While the optimizer is attached, a parameter with nothing selected has `requires_grad` off, and
    the selected weights belong to it: to load other weights, `close()` it and make a new one.
    Gradients are in the masters, so clear them with `zero_grad()` of the optimizer, not the model.
    There is one parameter group. `close()`, or leaving the `with` block, takes the hooks off.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        indices: Indices | None,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Attach to the parameters; `indices=None` selects every entry of every parameter."""
        self._params = _unique(named_parameters)
        self._requires_grad = {name: p.requires_grad for name, p in self._params.items()}
        self._indices: dict[str, Tensor | None] = {}
        self._masters: dict[str, Tensor] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._closed = False
        selected = self._checked(indices)
        super().__init__([{"params": []}], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.register_step_pre_hook(self._before_step)
        self.register_step_post_hook(self._after_step)
        for p in self._params.values():
            setattr(p, _MARK, True)
        self._select(selected)
        for name in self._masters:  # a gradient already there counts, as for any optimizer
            if self._params[name].grad is not None:
                self._take_gradient(name, self._params[name])

    @property
    def num_selected(self) -> int:
        """Number of entries that this optimizer updates."""
        return sum(master.numel() for master in self._masters.values())

    @property
    def indices(self) -> dict[str, Tensor | None]:
        """Flat indices of each parameter that has selected entries; None means all of them."""
        return dict(self._indices)

    @property
    def masters(self) -> dict[str, Tensor]:
        """Master vector of each parameter with selected entries: the keys of `self.state`."""
        return dict(self._masters)

    def set_indices(self, indices: Indices | None) -> None:
        """Move the mask; call it between a step and the next backward.

        Entries that stay keep master and moments. Entries that enter start from the weight as it is
        now, with zero moments. Entries that leave keep their last weight. The step count of a
        parameter goes on as long as it has selected entries (so bias correction is over for an
        entry that enters late: its first update is up to (1 - beta1) / sqrt(1 - beta2) = 3.2 times
        lr), and a parameter that had none starts anew. Pending gradients are dropped.
        """
        self._refuse_closed()
        self._select(self._checked(indices))
        self.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradient over the selected entries; return its norm before clipping."""
        return nn.utils.clip_grad_norm_(list(self._masters.values()), max_norm)

    def state_dict(self) -> dict[str, Any]:
        """The state of AdamW over the masters, and `indices` and `masters` by parameter name."""
        return {**super().state_dict(), "indices": self.indices, "masters": self.masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore indices, masters and moments, and write the masters into the model's weights."""
        self._refuse_closed()
        if missing := {"state", "param_groups", "indices", "masters"} - state_dict.keys():
            raise ValueError(
                f"state_dict has no {sorted(missing)}: it is not the state of a SparseAdamW"
            )
        selected, saved = self._checked(state_dict["indices"]), state_dict["masters"]
        self._check_masters(selected, saved)
        self._select(selected)
        state = {  # copied: torch would share the saved tensors and then update them in place
            i: {key: value.clone() for key, value in entry.items()}
            for i, entry in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})
        for name, master in self._masters.items():
            master.copy_(saved[name])
            self._write_back(name)
        self.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Accept the one group made at construction and refuse any other."""
        if self.param_groups:
            raise ValueError("SparseAdamW has one parameter group; change it with set_indices()")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Take the hooks off the model and give its parameters their `requires_grad` back.

        State and masters stay readable; the optimizer cannot step any more.
        """
        if self._closed:
            return
        self._closed = True
        self.zero_grad()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for name, p in self._params.items():
            p.requires_grad_(self._requires_grad[name])
            delattr(p, _MARK)

    def __enter__(self) -> SparseAdamW:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("SparseAdamW holds hooks on one model: copy or save its state_dict()")

    def _checked(self, indices: Indices | None) -> dict[str, Tensor | None]:
        """Validate; keep the parameters that have selected entries, in the model's order."""
        if indices is None:
            indices = dict.fromkeys(self._params)
        if unknown := [name for name in indices if name not in self._params]:
            near = difflib.get_close_matches(unknown[0], self._params, n=3)
            raise ValueError(
                f"indices name {len(unknown)} unknown parameters, the first is {unknown[0]!r}; "
                f"the {len(self._params)} known ones include {near or list(self._params)[:3]}"
            )
        selected: dict[str, Tensor | None] = {}
        for name, p in self._params.items():
            index = indices.get(name, torch.empty(0, dtype=torch.int64))
            if index is not None:
                index = _checked_index(name, p, index)
            if (p if index is None else index).numel() == 0:
                continue
            _check_trainable(name, p, self._requires_grad[name])
            whole = index is None or index.numel() == p.numel()
            selected[name] = None if whole else index
        return selected

    def _check_masters(
        self, selected: Mapping[str, Tensor | None], saved: Mapping[str, Tensor]
    ) -> None:
        """Raise unless the saved masters fit the saved indices and this model's dtypes."""
        if list(saved) != list(selected):
            differ = sorted(set(saved) ^ set(selected)) or "their order"
            raise ValueError(
                f"state_dict's masters and indices do not fit this model's parameters: {differ}"
            )
        for name, index in selected.items():
            p = self._params[name]
            want = (p.numel() if index is None else index.numel(), _MASTER_DTYPES[p.dtype])
            if (saved[name].numel(), saved[name].dtype) != want:
                raise ValueError(
                    f"saved master of {name!r} has {saved[name].numel()} entries of "
                    f"{saved[name].dtype}; this model needs {want[0]} of {want[1]}"
                )

    def _select(self, selected: dict[str, Tensor | None]) -> None:
        """Make `selected` the mask: masters, moments, hooks and `requires_grad`."""
        masters: dict[str, Tensor] = {}
        for name, index in selected.items():
            old = self._masters.get(name)
            if old is None:
                masters[name] = _new_master(self._params[name], index)
            elif _same(self._indices[name], index):
                masters[name] = old
            else:
                masters[name] = self._moved(name, old, index)
        for name in self._masters.keys() - masters.keys():
            self.state.pop(self._masters[name], None)
        self._masters, self._indices = masters, selected
        self.param_groups[0]["params"] = list(masters.values())
        self.param_groups[0]["param_names"] = list(masters)
        for name, p in self._params.items():
            p.requires_grad_(name in masters)
            if name not in masters:
                p.grad = None
                if name in self._hooks:
                    self._hooks.pop(name).remove()
            elif name not in self._hooks:
                hook = partial(self._take_gradient, name)
                self._hooks[name] = p.register_post_accumulate_grad_hook(hook)

    def _moved(self, name: str, old: Tensor, index: Tensor | None) -> Tensor:
        """Master for the new `index`, with its state; entries of `old` that stay are carried."""
        p = self._params[name]
        master = _new_master(p, index)
        source, target = _positions_kept(self._indices[name], index, p)
        master[target] = old[source]
        state = self.state.pop(old, {})
        for key, value in state.items():
            if value.shape == old.shape:  # a moment; the step count is a scalar
                state[key] = torch.zeros_like(master)
                state[key][target] = value[source]
        if state:
            self.state[master] = state
        return master

    def _take_gradient(self, name: str, p: Tensor) -> None:
        """Move the selected entries of a fresh gradient into the master's; runs inside backward."""
        if p.grad is None or p.grad.layout != torch.strided:
            what = "taken by another hook" if p.grad is None else f"in layout {p.grad.layout}"
            raise RuntimeError(f"gradient of {name!r} is {what}; SparseAdamW needs it dense")
        master, index = self._masters[name], self._indices[name]
        grad = p.grad.detach().reshape(-1)
        p.grad = None
        if index is not None:
            grad = grad.index_select(0, index)
        grad = grad.to(master.dtype)
        if master.grad is None:
            master.grad = grad
        else:
            master.grad.add_(grad)

    def _before_step(self, *_: object) -> None:
        """Refuse to step when the masters no longer belong to the model's weights."""
        self._refuse_closed()
        for name, master in self._masters.items():
            p = self._params[name]
            shared = self._indices[name] is None and p.dtype == master.dtype
            if p.device != master.device or (shared and p.data_ptr() != master.data_ptr()):
                raise RuntimeError(
                    f"storage of {name!r} was replaced while SparseAdamW was attached; move or "
                    "convert the model first, then make the optimizer"
                )

    def _after_step(self, *_: object) -> None:
        """Write what the step changed into the model."""
        for name, master in self._masters.items():
            if master.grad is not None:
                self._write_back(name)

    def _write_back(self, name: str) -> None:
        """Copy one master into its parameter, in the parameter's dtype."""
        master, index = self._masters[name], self._indices[name]
        weight = self._params[name].detach().view(-1)
        if index is not None:
            weight.index_copy_(0, index, master.to(weight.dtype))
        elif weight.data_ptr() != master.data_ptr():
            weight.copy_(master)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this SparseAdamW is closed; make a new one to train on")


def _unique(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Name -> parameter; refuses one tensor under two names and a tensor that is taken."""
    params: dict[str, nn.Parameter] = {}
    names: dict[int, str] = {}
    for name, p in named_parameters:
        if name in params or id(p) in names:
            raise ValueError(
                f"parameter {name!r} is given twice (also as {names.get(id(p), name)!r}); "
                "give a tied weight once, as model.named_parameters() does"
            )
        if getattr(p, _MARK, False):
            raise ValueError(f"parameter {name!r} has a SparseAdamW attached; close() that first")
        params[name], names[id(p)] = p, name
    return params


def _checked_index(name: str, p: Tensor, index: Tensor) -> Tensor:
    """Validate one parameter's flat indices; return them on the parameter's device."""
    if index.dtype != torch.int64 or index.dim() != 1:
        raise ValueError(
            f"indices of {name!r} are {index.dtype} of shape {tuple(index.shape)}; "
            "they must be 1-D int64 (from a boolean mask: mask.view(-1).nonzero().view(-1))"
        )
    index = index.detach().to(p.device)
    wrong = (index[1:] <= index[:-1]).nonzero()
    if wrong.numel():
        at = int(wrong[0].item())
        raise ValueError(
            f"indices of {name!r} must increase strictly, but position {at} holds "
            f"{int(index[at])} and position {at + 1} holds {int(index[at + 1])}"
        )
    if index.numel() and (int(index[0]) < 0 or int(index[-1]) >= p.numel()):
        raise ValueError(
            f"indices of {name!r} run from {int(index[0])} to {int(index[-1])}, "
            f"outside 0 to {p.numel() - 1}"
        )
    return index


def _check_trainable(name: str, p: nn.Parameter, requires_grad: bool) -> None:
    """Raise when a parameter with selected entries cannot be trained as it is."""
    if p.dtype not in _MASTER_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in _MASTER_DTYPES)
        raise ValueError(f"parameter {name!r} is {p.dtype}; only {allowed} can be trained")
    if not p.is_contiguous():
        raise ValueError(f"parameter {name!r} is not contiguous: its flat indices are undefined")
    if not requires_grad:
        raise ValueError(
            f"parameter {name!r} has selected entries but requires_grad is False; "
            "call requires_grad_(True) on it, or leave it out of the indices"
        )


def _new_master(p: Tensor, index: Tensor | None) -> Tensor:
    """Selected entries of a weight in the master's dtype; a view where nothing has to change."""
    flat = p.detach().view(-1)
    return (flat if index is None else flat[index]).to(_MASTER_DTYPES[p.dtype])


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two checked indices of one parameter select the same entries."""
    return torch.equal(a, b) if a is not None and b is not None else a is b


def _positions_kept(old: Tensor | None, new: Tensor | None, p: Tensor) -> tuple[Tensor, Tensor]:
    """Where the entries selected both before and after stand in the old and in the new vector."""
    everything = torch.arange(p.numel(), device=p.device)
    before = everything if old is None else old
    after = everything if new is None else new
    source = torch.searchsorted(before, after).clamp_(max=before.numel() - 1)
    kept = before[source] == after
    return source[kept], kept.nonzero().view(-1)
