"""One AdamW step of the selected entries of one parameter, and the storage of their masters.

Algorithm 1, lines 1 and 12 (Warmup, MaskedFT).

An entry's *master* is its value in fp32 (fp64 for an fp64 model). It accumulates updates that are
too small for a bf16 weight. An fp32 or fp64 weight is its own master. A bf16 weight is the upper
half of its master's bits, rounded: weight = (master + 0x8000) >> 16 in integer arithmetic. Stored
next to it is the difference low = master - (weight << 16), a signed 16-bit integer, so weight and
low give the exact master for any bit pattern. This rounds half away from zero, which differs from
the usual half-to-even only for a master exactly between two bf16 numbers. An fp16 weight has a
separate fp32 master.

`update` is the step in plain PyTorch on any device, chunk by chunk. It calls the single-tensor path
of `torch.optim.AdamW`, so it is bit-identical to it. `train/kernels.py` does the same in one pass
over memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dualsft.engine.fused import triton_works
from dualsft.train import moments as adam_moments
from dualsft.train.compact_index import CHUNK, CompactIndex, positions
from dualsft.train.moments import Key, Moments

_NORM_CHUNK = 1 << 24  # entries upcast at a time to compute a norm
MASTER_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
Held = dict[str, Tensor]
"""Optimizer state of one parameter by name: vectors with one number per entry, and two scalars.

`step` is the number of updates. `exp_avg` and `exp_avg_sq` are the moments, `low` is the lower half
of the masters of bf16 weights, `master` the masters of fp16 weights, and `top` the scale of int8
moments (`train/moments.py`)."""
SCALARS = ("step", "top")


@dataclass(frozen=True)
class Numbers:
    """Hyperparameters of one step of one parameter."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    key: Key
    """Key of the random bits for stochastic rounding of the moments."""

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.betas[0] ** self.step)

    @property
    def root_correction(self) -> float:
        """sqrt(1 - beta2^step): the square root of the second moment is divided by it."""
        return (1 - self.betas[1] ** self.step) ** 0.5


@cache
def kernels_for(device_type: str, dtype: torch.dtype) -> ModuleType | None:
    """The fused kernels if they can be used: on CUDA, for weights of at most 32 bits; else None."""
    if device_type != "cuda" or dtype == torch.float64 or not triton_works():
        return None
    from dualsft.train import kernels as adam_kernels

    return adam_kernels


def gather(dense: Tensor, index: CompactIndex) -> Tensor:
    """The selected entries of a flat tensor, with the fused kernel where available."""
    kernels = kernels_for(dense.device.type, dense.dtype)
    return index.gather(dense) if kernels is None else kernels.gather(dense, index, None)


def new_state(
    weight: Tensor, index: CompactIndex | None, moments: Moments, device: torch.device, pin: bool
) -> Held:
    """The initial state of a parameter: zero moments, masters equal to the weights."""
    count = weight.numel() if index is None else len(index)
    kind = moments_dtype(weight.dtype, moments)

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device, pin_memory=pin)

    held = {"step": torch.tensor(0.0), "exp_avg": zeros(kind), "exp_avg_sq": zeros(kind)}
    if moments == "int8":
        least = adam_moments.LEAST_TOP
        held["top"] = torch.full((1,), least, dtype=torch.int32, device=weight.device)
    if weight.dtype == torch.bfloat16:
        held["low"] = zeros(torch.int16)
    if weight.dtype == torch.float16:
        held["master"] = zeros(MASTER_DTYPES[weight.dtype])
        held["master"].copy_(weight[positions(index, 0, count)])
    return held


def moments_dtype(dtype: torch.dtype, moments: Moments) -> torch.dtype:
    """The storage dtype of the moments of a parameter."""
    if moments == "float32":
        return MASTER_DTYPES[dtype]
    return {"bfloat16": torch.bfloat16, "int8": torch.uint8}[moments]


def bytes_per_entry(dtype: torch.dtype, moments: Moments, whole: bool = False) -> int:
    """Bytes per selected entry of index, master and moments between two steps."""
    master = {torch.bfloat16: 2, torch.float16: 4}.get(dtype, 0)
    both = 16 if dtype == torch.float64 and moments == "float32" else adam_moments.BYTES[moments]
    return (0 if whole else 2) + master + both


def join_halves(weight: Tensor, low: Tensor) -> Tensor:
    """fp32 masters from bf16 weights and their low halves."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def split_halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 weights and low halves of fp32 masters."""
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def read_masters(
    weight: Tensor, index: CompactIndex | None, held: Held, first: int, last: int
) -> Tensor:
    """Masters of the entries from `first` to `last`; may be a view of the weight."""
    if weight.dtype == torch.float16 and held:
        return held["master"][first:last].to(weight.device)
    values = weight[positions(index, first, last)]
    if weight.dtype == torch.bfloat16 and held:
        return join_halves(values, held["low"][first:last].to(weight.device))
    return values.to(MASTER_DTYPES[weight.dtype])


def write_masters(weight: Tensor, index: CompactIndex | None, held: Held, masters: Tensor) -> None:
    """Set the masters of all selected entries: the weights, and `low` or `master` in `held`.

    `held` is empty before a parameter's first step; its masters are then the weights.
    """
    for first in range(0, masters.numel(), CHUNK):
        last = min(first + CHUNK, masters.numel())
        values = masters[first:last].to(weight.device)
        if weight.dtype == torch.bfloat16:
            values, low = split_halves(values)
            if held:
                held["low"][first:last] = low
        elif weight.dtype == torch.float16 and held:
            held["master"][first:last] = values
        weight[positions(index, first, last)] = values.to(weight.dtype)


def read_second_moment(held: Held, first: int, last: int, device: torch.device) -> Tensor:
    """The second moment of the entries from `first` to `last`, without bias correction."""
    stored = held["exp_avg_sq"][first:last].to(device)
    if stored.dtype == torch.uint8:
        return adam_moments.decode_second(stored, held["top"].to(device))
    return stored.float() if stored.dtype == torch.bfloat16 else stored


def norm(grad: Tensor) -> Tensor:
    """‖grad‖ in fp32 (fp64 for fp64), without upcasting the whole gradient at once."""
    wide = MASTER_DTYPES[grad.dtype]
    if grad.dtype == wide:
        return torch.linalg.vector_norm(grad)
    chunks = [torch.linalg.vector_norm(part, dtype=wide) for part in grad.split(_NORM_CHUNK)]
    return chunks[0] if len(chunks) == 1 else torch.linalg.vector_norm(torch.stack(chunks))


def update(
    weight: Tensor,
    index: CompactIndex | None,
    grad: Tensor,
    held: Held,
    first: int,
    numbers: Numbers,
    scale: Tensor | None,
    top: Tensor | None,
) -> None:
    """Update the entries that `grad` and `held` cover; the first of them is entry `first`.

    `scale` multiplies the gradient (clipping). For int8 moments, `held["top"]` decodes the current
    codes and `top` encodes the new ones.
    """
    for begin in range(0, grad.numel(), CHUNK):
        chunk = slice(begin, min(begin + CHUNK, grad.numel()))
        part = {name: t if name in SCALARS else t[chunk] for name, t in held.items()}
        _update_chunk(weight, index, grad[chunk], part, first + begin, numbers, scale, top)


def _update_chunk(
    weight: Tensor,
    index: CompactIndex | None,
    grad: Tensor,
    held: Held,
    first: int,
    numbers: Numbers,
    scale: Tensor | None,
    top: Tensor | None,
) -> None:
    where = positions(index, first, first + grad.numel())
    if weight.dtype == torch.float16:
        master = held["master"]
    elif weight.dtype == torch.bfloat16:
        master = join_halves(weight[where], held["low"])
    else:
        master = weight[where]
    grad = grad.to(master.dtype)
    if scale is not None:
        grad = grad * scale
    exact = held["exp_avg"].dtype == master.dtype
    exp_avg, exp_avg_sq = held["exp_avg"], held["exp_avg_sq"]
    if not exact:
        exp_avg, exp_avg_sq = (
            moment.to(master.dtype)
            for moment in adam_moments.decode(exp_avg, exp_avg_sq, held.get("top"))
        )
    adamw(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(numbers.step - 1))],
        foreach=False,
        fused=False,
        amsgrad=False,
        beta1=numbers.betas[0],
        beta2=numbers.betas[1],
        lr=numbers.lr,
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        maximize=False,
    )
    if not exact:
        bits = adam_moments.noise(numbers.key, first, first + grad.numel(), weight.device)
        kind = held["exp_avg"].dtype
        codes = adam_moments.encode(exp_avg.float(), exp_avg_sq.float(), kind, top, bits)
        held["exp_avg"].copy_(codes[0])
        held["exp_avg_sq"].copy_(codes[1])
    if weight.dtype == torch.bfloat16:
        weight[where], low = split_halves(master)
        held["low"].copy_(low)
    elif weight.dtype == torch.float16 or index is not None:
        weight[where] = master.to(weight.dtype)


def check_trainable(name: str, p: nn.Parameter, requires_grad: bool) -> None:
    """Raise if a parameter with selected entries cannot be trained."""
    if p.dtype not in MASTER_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in MASTER_DTYPES)
        raise ValueError(f"parameter {name!r} is {p.dtype}; only {allowed} can be trained")
    if type(p.detach()) is not Tensor:
        kind = type(p.detach()).__name__
        raise ValueError(f"parameter {name!r} is a {kind}; only plain tensors can be trained")
    if not p.is_contiguous():
        raise ValueError(f"parameter {name!r} is not contiguous: its flat indices are undefined")
    if not requires_grad:
        raise ValueError(
            f"parameter {name!r} has selected entries but requires_grad is False; "
            "call requires_grad_(True) on it, or leave it out of the indices"
        )
