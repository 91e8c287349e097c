"""The state of the selected entries of one parameter, and one AdamW step of it.

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
over memory. With offload, the state is in host memory and `run_parts` copies it to the device part
by part; the arithmetic is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dualsft.engine.fused import triton_works
from dualsft.train import compact
from dualsft.train.compact import CHUNK, MASTER_DTYPES, CompactIndex, Key, Moments, positions

_NORM_CHUNK = 1 << 24  # entries upcast at a time to compute a norm
Held = dict[str, Tensor]
"""Optimizer state of one parameter by name: vectors with one number per entry, and two scalars.

`step` is the number of updates. `exp_avg` and `exp_avg_sq` are the moments, `low` is the lower half
of the masters of bf16 weights, `master` the masters of fp16 weights, and `top` the scale of int8
moments (`train/compact.py`)."""
SCALARS = ("step", "top")


@dataclass(frozen=True)
class Step:
    """The numbers of one step of one parameter."""

    number: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    key: Key
    """Key of the random bits for stochastic rounding of the moments."""
    scale: Tensor | None = None
    """Factor on the gradient (clipping)."""
    top: Tensor | None = None
    """Scale that encodes the new int8 moments; `held["top"]` decodes the stored ones."""

    @property
    def size(self) -> float:
        return self.lr / (1 - self.betas[0] ** self.number)

    @property
    def root_correction(self) -> float:
        """sqrt(1 - beta2^t): the square root of the second moment is divided by it."""
        return (1 - self.betas[1] ** self.number) ** 0.5


@cache
def kernels_for(device_type: str, dtype: torch.dtype) -> ModuleType | None:
    """The fused kernels if they can be used: on CUDA, for weights of at most 32 bits; else None."""
    if device_type != "cuda" or dtype == torch.float64 or not triton_works():
        return None
    from dualsft.train import kernels

    return kernels


def gather(dense: Tensor, index: CompactIndex | None, sums: Tensor | None = None) -> Tensor:
    """The selected entries of a flat gradient, added to `sums` in the masters' dtype if given."""
    kernels = kernels_for(dense.device.type, dense.dtype)
    if kernels is not None and index is not None:
        return kernels.gather(dense, index, sums)
    chosen = dense if index is None else index.gather(dense)
    return chosen if sums is None else sums.to(MASTER_DTYPES[chosen.dtype]).add_(chosen)


def norm(grad: Tensor) -> Tensor:
    """‖grad‖ in fp32 (fp64 for fp64), without upcasting the whole gradient at once."""
    wide = MASTER_DTYPES[grad.dtype]
    if grad.dtype == wide:
        return torch.linalg.vector_norm(grad)
    chunks = [torch.linalg.vector_norm(part, dtype=wide) for part in grad.split(_NORM_CHUNK)]
    return chunks[0] if len(chunks) == 1 else torch.linalg.vector_norm(torch.stack(chunks))


# --- state --------------------------------------------------------------------------------------


def new_state(
    weight: Tensor, index: CompactIndex | None, moments: Moments, device: torch.device, pin: bool
) -> Held:
    """The initial state of a parameter: zero moments, masters equal to the weights."""
    count = weight.numel() if index is None else len(index)
    kind = compact.moments_dtype(weight.dtype, moments)

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device, pin_memory=pin)

    held = {"step": torch.tensor(0.0), "exp_avg": zeros(kind), "exp_avg_sq": zeros(kind)}
    if moments == "int8":
        least = compact.LEAST_TOP
        held["top"] = torch.full((1,), least, dtype=torch.int32, device=weight.device)
    if weight.dtype == torch.bfloat16:
        held["low"] = zeros(torch.int16)
    if weight.dtype == torch.float16:
        held["master"] = zeros(MASTER_DTYPES[weight.dtype])
        held["master"].copy_(weight[positions(index, 0, count)])
    return held


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
        return compact.decode_second(stored, held["top"].to(device))
    return stored.float() if stored.dtype == torch.bfloat16 else stored


# --- the step -----------------------------------------------------------------------------------

_single_tensor_adamw = partial(adamw, foreach=False, fused=False, amsgrad=False, maximize=False)


def update(
    weight: Tensor, index: CompactIndex | None, grad: Tensor, held: Held, first: int, step: Step
) -> None:
    """Update the entries that `grad` and `held` cover; the first of them is entry `first`."""
    for begin in range(0, grad.numel(), CHUNK):
        chunk = slice(begin, min(begin + CHUNK, grad.numel()))
        part = {name: t if name in SCALARS else t[chunk] for name, t in held.items()}
        _update_chunk(weight, index, grad[chunk], part, first + begin, step)


def _update_chunk(
    weight: Tensor, index: CompactIndex | None, grad: Tensor, held: Held, first: int, step: Step
) -> None:
    """The update rule of AdamW for some selected entries (on CUDA: `kernels.py: update`)."""
    where = positions(index, first, first + grad.numel())
    if weight.dtype == torch.float16:
        master = held["master"]
    elif weight.dtype == torch.bfloat16:
        master = join_halves(weight[where], held["low"])
    else:
        master = weight[where]
    grad = grad.to(master.dtype)
    if step.scale is not None:
        grad = grad * step.scale
    exp_avg, exp_avg_sq = stored = held["exp_avg"], held["exp_avg_sq"]
    exact = exp_avg.dtype == master.dtype
    if not exact:
        decoded = compact.decode(exp_avg, exp_avg_sq, held.get("top"))
        exp_avg, exp_avg_sq = (moment.to(master.dtype) for moment in decoded)
    before = torch.tensor(float(step.number - 1))
    _single_tensor_adamw(
        *([master], [grad], [exp_avg], [exp_avg_sq], [], [before]),
        beta1=step.betas[0],
        beta2=step.betas[1],
        lr=step.lr,
        weight_decay=step.weight_decay,
        eps=step.eps,
    )
    if not exact:
        bits = compact.noise(step.key, first, first + grad.numel(), weight.device)
        kind = stored[0].dtype
        codes = compact.encode(exp_avg.float(), exp_avg_sq.float(), kind, step.top, bits)
        for target, code in zip(stored, codes, strict=True):
            target.copy_(code)
    if weight.dtype == torch.bfloat16:
        weight[where], low = split_halves(master)
        held["low"].copy_(low)
    elif weight.dtype == torch.float16 or index is not None:
        weight[where] = master.to(weight.dtype)


# --- offload ------------------------------------------------------------------------------------

PART = 1 << 25
"""Entries per part with offload: at most 320 MiB with fp32 moments and low halves."""
_DEPTH = 3  # parts on the device at a time


@dataclass(frozen=True)
class Part:
    """A range of the selected entries of one parameter, from entry `first`, and their step."""

    weight: Tensor
    index: CompactIndex | None
    grad: Tensor
    held: Held
    """The state of the whole parameter."""
    first: int
    step: Step

    def stored(self) -> Held:
        """This part of the state vectors, where they are stored (views)."""
        here = slice(self.first, self.first + self.grad.numel())
        return {name: t[here] for name, t in self.held.items() if name not in SCALARS}

    def run(self, vectors: Held) -> None:
        """Update with these vectors in place of the stored ones."""
        held = vectors | {name: t for name, t in self.held.items() if name in SCALARS}
        kernels = kernels_for(self.weight.device.type, self.weight.dtype)
        step = update if kernels is None else kernels.update
        step(self.weight, self.index, self.grad, held, self.first, self.step)


def run_parts(parts: Iterable[Part], streamed: torch.device | None = None) -> None:
    """Update every part; state that is not on the weight's device is copied there and back.

    On a CUDA device given as `streamed`, the copies overlap with the updates of other parts.
    """
    if streamed is not None and streamed.type == "cuda":
        _run_streamed(parts, streamed)
        return
    for part in parts:
        stored = part.stored()
        vectors = {name: t.to(part.weight.device) for name, t in stored.items()}
        part.run(vectors)
        for name, t in stored.items():
            if vectors[name] is not t:  # it was not on the device
                t.copy_(vectors[name])


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Copy streams (in, out), reused by every step: the allocator keeps one pool per stream."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _run_streamed(parts: Iterable[Part], device: torch.device) -> None:
    """Copy in, update and copy out on three streams; return when all state is back on the host."""
    here = torch.cuda.current_stream(device)
    inward, outward = _streams(device)
    under_way: deque[tuple[Any, Held]] = deque()
    arrived: deque[tuple[Part, Held, Any]] = deque()

    def copied(t: Tensor) -> Tensor:
        copy = t.to(device, non_blocking=True)
        for stream in (here, outward):  # its memory is not reused while they work on it
            copy.record_stream(stream)
        return copy

    def finish(part: Part, vectors: Held, ready: Any) -> None:
        here.wait_event(ready)
        part.run(vectors)
        outward.wait_stream(here)
        with torch.cuda.stream(outward):
            for name, t in part.stored().items():
                t.copy_(vectors[name], non_blocking=True)
            under_way.append((outward.record_event(), vectors))  # kept alive until copied

    for part in parts:
        while len(under_way) + len(arrived) >= _DEPTH:
            if under_way:
                under_way.popleft()[0].synchronize()
            else:
                finish(*arrived.popleft())
        with torch.cuda.stream(inward):
            vectors = {name: copied(t) for name, t in part.stored().items()}
            arrived.append((part, vectors, inward.record_event()))
        if len(arrived) > 1:
            finish(*arrived.popleft())
    while arrived:
        finish(*arrived.popleft())
    outward.synchronize()
