"""Validation of the hyperparameters, parameters, masks and saved states given to `SparseAdamW`.

Algorithm 1, line 12 (MaskedFT). A mask or state of another model would train the wrong entries, so
every error names the parameter that does not match.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from dualsft.train import step as adam_step
from dualsft.train.compact_index import CompactIndex, checked_index
from dualsft.train.moments import MOMENTS, Moments
from dualsft.train.step import MASTER_DTYPES

Indices = Mapping[str, Tensor | None]
"""Parameter name -> sorted, unique, flat int64 indices (row-major); None means every entry."""
MARK = "_dualsft_optimizer_attached"
"""Attribute set on a parameter while a SparseAdamW is attached to it."""


def check_saved(
    params: Mapping[str, nn.Parameter],
    moments: Moments,
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
        p = params[name]
        count = p.numel() if index is None else len(index)
        master = masters[name]
        if (master.numel(), master.dtype) != (count, MASTER_DTYPES[p.dtype]):
            raise ValueError(
                f"saved master of {name!r} has {master.numel()} entries of {master.dtype}; "
                f"this model needs {count} of {MASTER_DTYPES[p.dtype]}"
            )
        want = adam_step.moments_dtype(p.dtype, moments)
        for key in ("exp_avg", "exp_avg_sq") if name in held else ():
            saved = held[name][key]
            if (saved.numel(), saved.dtype) != (count, want):
                raise ValueError(
                    f"saved {key} of {name!r} has {saved.numel()} entries of {saved.dtype}; "
                    f"this optimizer needs {count} of {want} (moments={moments!r})"
                )


def check_numbers(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, moments: str
) -> None:
    """Raise for invalid hyperparameters."""
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}; it must be at least 0")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"Invalid betas: {betas}; each must be at least 0 and below 1")
    if not (eps >= 0.0 and weight_decay >= 0.0):
        raise ValueError(
            f"Invalid eps {eps} or weight_decay {weight_decay}; both must be at least 0"
        )
    if moments not in MOMENTS:
        raise ValueError(f"moments is {moments!r}; it must be one of {', '.join(MOMENTS)}")


def unique_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, nn.Parameter]:
    """Name -> parameter. Refuses duplicate names, one tensor under two names, and parameters that
    another SparseAdamW is attached to."""
    params: dict[str, nn.Parameter] = {}
    names: dict[int, str] = {}
    for name, p in named_parameters:
        if name in params or id(p) in names:
            raise ValueError(
                f"parameter {name!r} is given twice (also as {names.get(id(p), name)!r}); "
                "give a tied weight once, as model.named_parameters() does"
            )
        if getattr(p, MARK, lambda: None)() is not None:
            raise ValueError(f"parameter {name!r} has a SparseAdamW attached; close() that first")
        params[name], names[id(p)] = p, name
    return params


def checked_indices(
    params: Mapping[str, nn.Parameter],
    requires_grad: Mapping[str, bool],
    indices: Indices | None,
) -> dict[str, CompactIndex | None]:
    """Validate the indices; return those of parameters with selected entries, in model order."""
    if indices is None:
        indices = dict.fromkeys(params)
    if unknown := [name for name in indices if name not in params]:
        near = difflib.get_close_matches(unknown[0], params, n=3)
        raise ValueError(
            f"indices name {len(unknown)} unknown parameters, the first is {unknown[0]!r}; "
            f"the {len(params)} known ones include {near or list(params)[:3]}"
        )
    selected: dict[str, CompactIndex | None] = {}
    for name, p in params.items():
        if name not in indices:
            continue
        index, chosen = None, indices[name]
        if chosen is not None:
            chosen = checked_index(name, p, chosen)
            if 0 < chosen.numel() < p.numel():  # a fully selected parameter needs no index
                index = CompactIndex.encode(chosen, p.numel())
        if (p if chosen is None else chosen).numel() > 0:
            adam_step.check_trainable(name, p, requires_grad[name])
            selected[name] = index
    return selected
