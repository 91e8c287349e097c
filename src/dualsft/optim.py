"""SparseAdamW: AdamW whose gradients, moments, decay and master weights exist only where selected.

Algorithm 1, line 12 (MaskedFT), and with everything selected line 1 (Warmup); ALGORITHM.md section
2, "Restricted fine-tuning" and "Training".

Per selected entry of a bf16 model there are 2 bytes of index (`compact_index.py`), the 2 low bytes
of the fp32 master whose high half is the weight (`adam_step.py`), and 8, 4 or 2 bytes of moments
(`adam_moments.py`); and between backward and step 2 bytes of gradient. A hook inside backward
gathers the selected entries of a gradient and frees the dense one at once; a second micro-batch is
added to the first in fp32. A step is one pass over these vectors, in a fused kernel on CUDA
(`adam_kernels.py`). Entries that are not selected are never written.

With fp32 or fp64 weights, which are their own masters, the update is that of `torch.optim.AdamW`
bit for bit on a CPU.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualsft import adam_moments, adam_step
from dualsft.adam_moments import Moments
from dualsft.adam_offload import PART, Part, run_parts
from dualsft.adam_step import MASTER_DTYPES, SCALARS, Held, Numbers
from dualsft.compact_index import CompactIndex, checked_index, positions_kept, same_entries
from dualsft.distributed import world
from dualsft.optim_checks import MARK, check_numbers, check_saved, unique_parameters

Indices = Mapping[str, Tensor | None]
"""Parameter name -> sorted, unique, flat int64 indices (row-major); None means every entry."""

_BESIDE_WEIGHT = ("low", "master")  # what a state dict holds as part of the masters
_BUCKET = 1 << 25  # entries that are added up over the processes at a time


class SparseAdamW(torch.optim.Optimizer):
    """AdamW on selected entries of a model's parameters.

    While the optimizer is attached, a parameter with nothing selected has `requires_grad` off, and
    the selected weights belong to it: to load other weights, `close()` it and make a new one.
    Gradients are taken out of the parameters inside backward and are in `gradients`, so clear them
    with `zero_grad()` of the optimizer, not the model. `state` is keyed by the model's parameters.
    There is one parameter group. `close()`, or leaving the `with` block, takes the hooks off.

    `moments` is the type they are kept in; bfloat16 and int8 are rounded at random, by `seed`.
    `offload` keeps moments and low halves in the host's memory between steps.
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
    ) -> None:
        """Attach to the parameters; `indices=None` selects every entry of every parameter."""
        check_numbers(lr, betas, eps, weight_decay, moments)
        self.moments: Moments = moments
        self.offload = offload
        self.seed = seed
        self._params = unique_parameters(named_parameters)
        self._numbers = {name: number for number, name in enumerate(self._params)}
        self._requires_grad = {name: p.requires_grad for name, p in self._params.items()}
        self._indices: dict[str, CompactIndex | None] = {}
        self._grads: dict[str, Tensor] = {}
        self._scale: Tensor | None = None
        self._storages: dict[str, int] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._closed = False
        selected = self._checked(indices)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([{"params": []}], defaults)
        for p in self._params.values():
            setattr(p, MARK, weakref.ref(self))
        self._select(selected)
        for name in self._indices:  # a gradient already there counts, as for any optimizer
            if self._params[name].grad is not None:
                self._take_gradient(name, self._params[name])

    # --- what it holds ---------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Parameters that have selected entries, in the model's order."""
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
        """Flat indices of each parameter that has selected entries; None means all of them."""
        return {n: None if index is None else index.decode() for n, index in self._indices.items()}

    @property
    def masters(self) -> dict[str, Tensor]:
        """Master vector of each parameter with selected entries, put together anew."""
        return {name: self.master(name) for name in self._indices}

    def master(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Masters of the selected entries from `first` to `last`.

        A view of the weight where a whole parameter is its own master.
        """
        last = self.count(name) if last is None else last
        held = self.state.get(self._params[name], {})
        return adam_step.read_masters(self._flat(name), self._indices[name], held, first, last)

    def weight(self, name: str) -> Tensor:
        """A parameter's weights as one flat view, selected or not."""
        return self._flat(name)

    def index(self, name: str, first: int, last: int) -> Tensor | None:
        """Flat indices of the selected entries from `first` to `last`; None means all of them."""
        index = self._indices[name]
        return None if index is None else index.decode(first, last)

    def second_moment(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Second moment of the selected entries from `first` to `last`, as the recursion left it:

        in fp32 (fp64 for an fp64 model), not divided by 1 - beta2^t; zero before the first step.
        """
        p = self._params[name]
        last = self.count(name) if last is None else last
        if held := self.state.get(p):
            return adam_step.read_second_moment(held, first, last, p.device)
        return torch.zeros(last - first, dtype=MASTER_DTYPES[p.dtype], device=p.device)

    def moments_of(self, name: str) -> Held:
        """Step count and moments of one parameter as they are held; empty before its first step."""
        held = self.state.get(self._params[name], {})
        return {key: t for key, t in held.items() if key not in _BESIDE_WEIGHT}

    def num_updates(self, name: str) -> int:
        """How often a parameter was updated: the t of its bias corrections."""
        held = self.state.get(self._params[name])
        return int(held["step"]) if held else 0

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Pending gradients over the selected entries, as backward left them; in model order."""
        return {name: self._grads[name] for name in self._indices if name in self._grads}

    @property
    def nbytes(self) -> int:
        """Bytes of everything this optimizer holds: indices, gradients, masters and moments."""
        held = (t for state in self.state.values() for t in state.values())
        indices = sum(index.nbytes for index in self._indices.values() if index is not None)
        return indices + sum(t.nbytes for t in (*self._grads.values(), *held))

    # --- an optimizer ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every selected entry whose parameter has a gradient."""
        self._refuse_closed()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_storages()
        for name in self.gradients:  # all memory is taken before anything is updated
            if self._params[name] not in self.state:
                self.state[self._params[name]] = self._new_state(name)
        parts = self._parts()
        devices = {self._params[name].device for name in self._grads}
        if self.offload and len(devices) == 1:
            run_parts(parts, devices.pop())
        else:
            for part in parts:
                part.run(part.host())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the pending gradients; they are always removed, never set to zero."""
        self._grads.clear()
        self._scale = None
        super().zero_grad(set_to_none=True)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradient over the selected entries; return its norm before clipping.

        The factor is kept and applied by the step, so nothing is written here and nothing waits.
        """
        total = self.total_norm()
        if self._scale is not None:
            total = total * self._scale
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._scale = factor if self._scale is None else self._scale * factor
        return total

    def total_norm(self) -> Tensor:
        """The norm of the pending gradients, not clipped."""
        norms = [adam_step.norm(grad) for grad in self.gradients.values()]
        if not norms:
            return torch.tensor(0.0)
        return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))

    def span(self, key: str) -> tuple[int, int]:
        """Which flat range of a saved vector over the selected entries is this optimizer's: all."""
        return 0, self.count(key.partition(".")[2])

    @torch.no_grad()
    def exchange(self) -> None:
        """Add up the pending gradients of all processes, each of which has all parameters.

        Only selected entries meet, in the masters' dtype, a few large vectors at a time.
        """
        present = world()
        if present.size == 1:
            return
        waiting: list[str] = []
        for name in self.names:
            waiting.append(name)
            if sum(map(self.count, waiting)) >= _BUCKET:
                self._exchange(waiting)
                waiting = []
        if waiting:
            self._exchange(waiting)

    def _exchange(self, names: list[str]) -> None:
        counts = [self.count(name) for name in names]
        first = self._params[names[0]]
        dtype = MASTER_DTYPES[first.dtype]
        every = torch.zeros(sum(counts), dtype=dtype, device=first.device)
        for name, part in zip(names, every.split(counts), strict=True):
            if name in self._grads:
                part.copy_(self._grads[name])
        world().sum_(every)
        for name, part in zip(names, every.split(counts), strict=True):
            self._grads[name] = part

    def set_indices(self, indices: Indices | None, carry: bool = True) -> None:
        """Move the mask; call it between a step and the next backward.

        Entries that stay keep master and moments; without `carry` their masters alone, and moments
        and step counts start anew everywhere. Entries that enter start from the weight as it is
        now, with zero moments. Entries that leave keep their last weight. The step count of a
        parameter goes on as long as it has selected entries (so bias correction is over for an
        entry that enters late: its first update is up to (1 - beta1) / sqrt(1 - beta2) = 3.2 times
        lr), and a parameter that had none starts anew. Pending gradients are dropped.
        """
        self._refuse_closed()
        self._select(self._checked(indices), carry)
        self.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts by number, and `indices` and `masters` by parameter name."""
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
        selected, masters = self._checked(state_dict["indices"]), state_dict["masters"]
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
        """Take up masters, moments and step counts by parameter name, under the present mask."""
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

    def _take_gradient(self, name: str, p: Tensor) -> None:
        """Keep the selected entries of a fresh gradient, free it; runs inside backward."""
        if p.grad is None or p.grad.layout != torch.strided:
            what = "taken by another hook" if p.grad is None else f"in layout {p.grad.layout}"
            raise RuntimeError(f"gradient of {name!r} is {what}; SparseAdamW needs it dense")
        if self._scale is not None:  # clipped, and yet more is added: make the clipping real
            factor, self._scale = self._scale, None
            for key, grad in self._grads.items():
                self._grads[key] = grad.to(MASTER_DTYPES[grad.dtype]) * factor
        dense, sums = p.grad.detach().reshape(-1), self._grads.get(name)
        p.grad = None
        index = self._indices[name]
        kernels = adam_step.kernels_for(dense.device.type, dense.dtype)
        if index is not None and kernels is not None:
            self._grads[name] = kernels.gather(dense, index, sums)
            return
        self.add_gradient(name, dense if index is None else index.gather(dense))

    def add_gradient(self, name: str, grad: Tensor) -> None:
        """Add a gradient over the selected entries of one parameter to what is pending."""
        sums = self._grads.get(name)
        self._grads[name] = grad if sums is None else sums.to(MASTER_DTYPES[grad.dtype]).add_(grad)

    def _parts(self) -> Iterator[Part]:
        """The step in parts; a parameter's count and scale are set when its first part comes."""
        group = self.param_groups[0]
        for name, grad in self.gradients.items():
            held = self.state[self._params[name]]
            before = dict(held)
            held["step"] += 1
            if "top" in held:
                largest = torch.linalg.vector_norm(grad, torch.inf)
                scaled = largest if self._scale is None else largest * self._scale
                held["top"] = adam_moments.raised_top(held["top"], scaled)
            step = int(held["step"])
            key = (0, 0)
            if self.moments != "float32":
                key = adam_moments.noise_key(self.seed, step, self._numbers[name])
            lr, betas = float(group["lr"]), group["betas"]
            numbers = Numbers(step, lr, betas, group["eps"], group["weight_decay"], key)
            run = partial(self._update, name, numbers, held.get("top"))
            size = PART if self.offload else max(1, grad.numel())
            for first in range(0, grad.numel(), size):
                yield Part(before, first, min(first + size, grad.numel()), run)

    def _update(
        self, name: str, numbers: Numbers, top: Tensor | None, held: Held, first: int, last: int
    ) -> None:
        """Step the entries from `first` to `last` of one parameter."""
        weight, grad = self._flat(name), self._grads[name][first:last]
        kernels = adam_step.kernels_for(weight.device.type, weight.dtype)
        update = adam_step.update if kernels is None else kernels.update
        update(weight, self._indices[name], grad, held, first, numbers, self._scale, top)

    def _check_storages(self) -> None:
        """Refuse to step when the masters no longer belong to the model's weights."""
        for name, storage in self._storages.items():
            if self._params[name].data_ptr() != storage:
                raise RuntimeError(
                    f"storage of {name!r} was replaced while SparseAdamW was attached; move or "
                    "convert the model first, then make the optimizer"
                )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this SparseAdamW is closed; make a new one to train on")

    # --- the mask --------------------------------------------------------------------------------

    def _checked(self, indices: Indices | None) -> dict[str, CompactIndex | None]:
        """Validate; keep the parameters that have selected entries, in the model's order."""
        if indices is None:
            indices = dict.fromkeys(self._params)
        if unknown := [name for name in indices if name not in self._params]:
            near = difflib.get_close_matches(unknown[0], self._params, n=3)
            raise ValueError(
                f"indices name {len(unknown)} unknown parameters, the first is {unknown[0]!r}; "
                f"the {len(self._params)} known ones include {near or list(self._params)[:3]}"
            )
        selected: dict[str, CompactIndex | None] = {}
        for name, p in self._params.items():
            if name not in indices:
                continue
            index, chosen = None, indices[name]
            if chosen is not None:
                chosen = checked_index(name, p, chosen)
                if 0 < chosen.numel() < p.numel():
                    index = CompactIndex.encode(chosen, p.numel())
            if (p if chosen is None else chosen).numel() > 0:
                adam_step.check_trainable(name, p, self._requires_grad[name])
                selected[name] = index
        return selected

    @torch.no_grad()
    def _select(self, selected: dict[str, CompactIndex | None], carry: bool = True) -> None:
        """Make `selected` the mask: state, hooks and `requires_grad`."""
        before, self._indices = self._indices, selected
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
                if name in self._hooks:
                    self._hooks.pop(name).remove()
            elif name not in self._hooks:
                hook = partial(_hand_over, weakref.ref(self), name)
                self._hooks[name] = p.register_post_accumulate_grad_hook(hook)

    def _move_state(self, name: str, before: CompactIndex | None, carry: bool) -> None:
        """State under the new index; what is kept of the entries that stay, `set_indices` says."""
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


def _hand_over(owner: weakref.ref[SparseAdamW], name: str, p: Tensor) -> None:
    """The hook on a parameter: it does not keep an optimizer alive that nobody else holds."""
    optimizer = owner()
    if optimizer is not None:
        optimizer._take_gradient(name, p)
