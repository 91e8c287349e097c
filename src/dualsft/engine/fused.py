"""Contexts that change how decoder blocks run: fused operations, and recomputed activations.

Not part of Algorithm 1. A model computes norms, gated activations and rotary embeddings between its
matrix products, in scoring (lines 3 to 8) and in training (lines 1 and 12). Eager PyTorch reads and
writes each tensor many times and keeps fp32 copies for the backward pass; the Triton kernels save
only their inputs. `fused_blocks` replaces a model's own modules on CUDA, and only where module and
replacement agree on random inputs; modules that are not recognised are not replaced. Each operation
also has a plain PyTorch expression, for this comparison and for the tests.

`checkpointed` stores only the input of each block and recomputes its activations in the backward
pass: less memory for one more forward pass, and on a CPU the same bits. Unlike the models' own
`gradient_checkpointing_enable` it works in eval mode, in which Algorithm 1 takes its gradients, and
with the taps of the ghost engine: each use of a parameter is observed once, because no backward
runs through the graph of the recomputed forward.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dualsft.model.load import decoder_blocks, text_decoder
from dualsft.model.sharded import device_of, through
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.usage import is_out_of_memory

log = logging.getLogger("dualsft")

HALF_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (torch.float32, *HALF_DTYPES)


@cache
def triton_works() -> bool:
    """Whether Triton is installed and compiles for the current GPU; warns once if not."""
    try:
        from dualsft.engine import kernels

        row = torch.zeros(1, 16, device="cuda")
        kernels.cross_entropy(row, row.new_zeros(1, dtype=torch.int64), row.new_ones(1), None)
    except Exception as problem:  # no Triton, no compiler, unknown GPU raise different types
        if is_out_of_memory(problem):
            raise
        log.warning(
            "Triton kernels cannot be used (%s: %s): results are the same up to rounding, but runs "
            "are slower and need more memory (install a C compiler and a Triton version that "
            "matches this torch)",
            type(problem).__name__,
            str(problem).splitlines()[0] if str(problem) else "",
        )
        return False
    return True


def kernels_for(x: Tensor) -> Any:
    """The kernel module if it supports this tensor; None: use the plain expressions."""
    if not x.is_cuda or x.dtype not in KERNEL_DTYPES or not triton_works():
        return None
    from dualsft.engine import kernels

    return kernels


# --- the operations ----------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """x̂ ⊙ w, or with `offset` x̂ ⊙ (1 + w) (Gemma), in the weight's dtype; x̂ = x / rms(x)."""
    if kernels_for(x) is not None:
        return _RmsNorm.apply(x, weight, eps, offset)  # pyright: ignore[reportReturnType]
    wide = x.to(accumulation_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (1.0 + weight.to(wide.dtype))).to(weight.dtype)
    return normed.to(weight.dtype) * weight


def gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """act(gate) ⊙ up with SiLU or tanh-GELU."""
    if kernels_for(gate) is not None:
        return _Gated.apply(gate, up, gelu)  # pyright: ignore[reportReturnType]
    act = partial(nn.functional.gelu, approximate="tanh") if gelu else nn.functional.silu
    return act(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of q or k: x ⊙ cos + rotate_half(x) ⊙ sin, in x's dtype."""
    if kernels_for(x) is not None:
        return _Rotate.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), -1)
    return (x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """`rms_norm` by kernels; saves its inputs and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        x = x.contiguous()
        y, rstd = kernels_for(x).rms_forward(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = kernels_for(x).rms_backward(
            grad.contiguous(), x, weight, rstd, ctx.offset, ctx.needs_input_grad[1]
        )
        return grad_x, grad_weight, None, None


class _Gated(torch.autograd.Function):
    """`gated` by kernels; saves gate and up, not the activation."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return kernels_for(gate).gated_forward(gate, up, gelu)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return *kernels_for(gate).gated_backward(grad.contiguous(), gate, up, ctx.gelu), None


class _Rotate(torch.autograd.Function):
    """`rotated` by a kernel; its backward is the transposed rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _rotate(grad, *ctx.saved_tensors, back=True), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return kernels_for(x).rotate(x if x.stride(-1) == 1 else x.contiguous(), cos, sin, back)


# --- replacing a model's modules ---------------------------------------------------------------


@contextmanager
def fused_blocks(
    model: PreTrainedModel, *, wide: bool = False, wanted: bool | None = None
) -> Iterator[None]:
    """Inside the context the model has fused norms, gated activations and rotary embeddings.

    By default only if the model is on CUDA in a dtype that the kernels support; `wanted` overrides
    this (the tests run the plain expressions on a CPU). With `wide` the residual stream of a
    half-precision model is fp32, which fused norms accept: the outputs of the blocks are then added
    without rounding the stream, and its gradients are fp32.
    """
    first = next(model.parameters())
    like = torch.empty(0, dtype=first.dtype, device=device_of(model))
    if not (kernels_for(like) is not None if wanted is None else wanted):
        yield
        return
    with ExitStack() as stack:
        for module in model.modules():
            forward = fused_forward(module, first.dtype)
            if forward is not None and "forward" not in vars(module):  # not patched already
                module.forward = forward
                stack.callback(delattr, module, "forward")
        for source in _rotary_modules(model):
            own = source.apply_rotary_pos_emb
            source.apply_rotary_pos_emb = _rotation(own)
            stack.callback(setattr, source, "apply_rotary_pos_emb", own)
        if wide and first.dtype in HALF_DTYPES:
            embedding = model.get_input_embeddings()
            handle = embedding.register_forward_hook(lambda _m, _i, output: output.float())
            stack.callback(handle.remove)
            if not _takes_wide(model, first):
                handle.remove()
                _say_once(model, "its residual stream stays in half precision")
        yield


def _say_once(model: PreTrainedModel, what: str) -> None:
    said: set[str] = vars(model).setdefault("_dualsft_said", set())
    if what not in said:
        said.add(what)
        log.info("%s: not every norm can be fused: %s", type(model).__name__, what)


@torch.no_grad()
def _takes_wide(model: PreTrainedModel, like: Tensor) -> bool:
    """Whether the blocks accept an fp32 residual stream and the last norm casts it back.

    A module that was not replaced would pass fp32 to a half-precision matrix product, which raises
    an error. The residual stream of such a model stays in the model's dtype.
    """
    ids = torch.zeros(1, 2, dtype=torch.long, device=device_of(model))
    decoder = text_decoder(model)
    try:
        result = through(model, lambda: decoder(input_ids=ids, use_cache=False))
        output = result.last_hidden_state
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise
        return False
    return output.dtype == like.dtype


def fused_forward(module: nn.Module, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """A fused replacement for the module's forward that passed the comparison, or None."""
    if any(p.dtype != dtype for p in module.parameters()):
        return None
    return _norm_forward(module) or _gated_forward(module)


def _norm_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    names = {name for name, _ in module.named_parameters(recurse=False)}
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if names != {"weight"} or not isinstance(eps, float) or "Norm" not in type(module).__name__:
        return None
    if module.get_parameter("weight").ndim != 1 or not _takes_one_tensor(module):
        return None

    def forward_of(norm: Any, offset: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: rms_norm(x, norm.weight, eps, offset)

    width = module.get_parameter("weight").shape[0]
    twin = _twin(module)
    noise = torch.Generator().manual_seed(1)
    twin._parameters["weight"] = nn.Parameter(torch.randn(width, generator=noise))
    for offset in (False, True):
        if _agree(twin, forward_of(twin, offset), width):
            return forward_of(module, offset)
    return None


def _gated_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    parts = {name for name, _ in module.named_children()}
    if not {"gate_proj", "up_proj", "down_proj"} <= parts <= {*_PROJECTIONS, "act_fn"}:
        return None
    if not all(isinstance(getattr(module, name), nn.Linear) for name in _PROJECTIONS):
        return None
    if not hasattr(module, "act_fn") or not _takes_one_tensor(module):
        return None

    def forward_of(mlp: Any, gelu: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x), gelu))

    twin = _twin(module)
    noise = torch.Generator().manual_seed(1)
    # small projections suffice: the comparison is about the operations between them
    for name, (inner, outer) in _PROJECTIONS.items():
        linear = twin._modules[name] = nn.Linear(inner, outer)
        linear.weight.data = torch.randn(outer, inner, generator=noise)
    for gelu in (False, True):
        if _agree(twin, forward_of(twin, gelu), _PROJECTIONS["gate_proj"][0]):
            return forward_of(module, gelu)
    return None


_PROJECTIONS = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}


def _takes_one_tensor(module: nn.Module) -> bool:
    """False for a norm with a gate or an MLP with more inputs, which are not replaced."""
    return len(signature(module.forward).parameters) == 1


def _twin(module: nn.Module) -> nn.Module:
    """A shallow copy of the module, without hooks, whose parameters and children can be replaced
    by small ones on the CPU."""
    twin = copy.copy(module)
    twin._parameters, twin._modules = dict(module._parameters), dict(module._modules)
    twin._forward_hooks, twin._forward_pre_hooks = OrderedDict(), OrderedDict()
    vars(twin).pop("forward", None)
    return twin


def _agree(twin: nn.Module, forward: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether both agree in fp32 up to rounding, on small and large inputs, with and without a
    mean, in eval and in training mode (which would reveal a dropout)."""
    noise = torch.Generator().manual_seed(0)
    for scale, mean in ((1.0, 0.0), (1.0, 1.5), (40.0, -20.0), (1e-3, 0.0)):
        x = scale * torch.randn(4, 3, width, generator=noise) + mean
        for training in (False, True):
            vars(twin)["training"] = training
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    own = twin(x)
                    ours = forward(x)
            except (TypeError, ValueError, RuntimeError, AttributeError):
                return False  # the module does not accept a plain tensor: do not replace it
            largest = float(own.abs().max())
            if own.dtype != ours.dtype or not _near(own, ours, largest):
                return False
    return True


def _near(own: Tensor, ours: Tensor, largest: float) -> bool:
    return own.shape == ours.shape and float((own - ours).abs().max()) <= 1e-5 * largest


Rotary = Callable[..., tuple[Tensor, Tensor]]


def _rotation(own: Rotary) -> Rotary:
    """The fused rotation of q and k; calls `own` for any variant of the plain rotation."""

    def rotate_both(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        plain = (more or (1,)) == (1,) and all(
            value == 1 if name == "unsqueeze_dim" else value is None
            for name, value in named.items()
        )
        whole = cos.ndim == 3 and all(x.ndim == 4 and x.shape[-1] == cos.shape[-1] for x in (q, k))
        if not plain or not whole or sin.shape != cos.shape:
            return own(q, k, cos, sin, *more, **named)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    return rotate_both


@torch.no_grad()
def _rotary_modules(model: PreTrainedModel) -> list[Any]:
    """The modeling modules of this model whose `apply_rotary_pos_emb` is the plain rotation."""
    noise = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, 3, 8, generator=noise)
    k = torch.randn(2, 1, 3, 8, generator=noise)
    cos, sin = (torch.randn(2, 3, 8, generator=noise) for _ in range(2))
    found = []
    for name in {type(module).__module__ for module in model.modules()}:
        source = sys.modules.get(name)
        own = getattr(source, "apply_rotary_pos_emb", None)
        if own is None:
            continue
        try:
            expected, actual = own(q, k, cos, sin), _rotation(own)(q, k, cos, sin)
        except (TypeError, ValueError, RuntimeError):  # another signature: do not replace it
            continue
        if all(_near(a, b, 10.0) for a, b in zip(expected, actual, strict=True)):
            found.append(source)
    return found


# --- recomputed activations -------------------------------------------------------------------


@contextmanager
def checkpointed(model: PreTrainedModel, on: bool = True) -> Iterator[None]:
    """Inside the context, backward recomputes the activations of every decoder block."""
    with ExitStack() as stack:
        for block in decoder_blocks(model)[1] if on else ():
            stack.enter_context(_recomputing(block))
        yield


@contextmanager
def _recomputing(block: nn.Module) -> Iterator[None]:
    """Replace the forward of one block by a checkpointed one, and restore it afterwards."""
    patched = vars(block).get("forward")
    forward: Callable[..., Any] = block.forward

    def recomputed(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        # dropout must draw the same noise twice; in eval mode there is none, so skip the RNG state
        return checkpoint(
            forward, *inputs, use_reentrant=False, preserve_rng_state=block.training, **named
        )

    block.forward = recomputed
    try:
        yield
    finally:
        if patched is None:
            del block.forward
        else:
            block.forward = patched
