"""Attention of grouped heads with fp32 weights on a GPU: the kernel that needs no T × T matrix.

It belongs to no line of Algorithm 1: it is how a model computes when its weights are fp32, in the
walks that `engine/precision.py` widens (lines 5 to 8) and in runs with `model.dtype=float32`.

Where several query heads share a key head and there is no mask, transformers asks PyTorch to share
them (`enable_gqa`). Only the half-precision kernels can; in fp32 PyTorch silently takes the plain
one, which keeps a T × T matrix a head and layer for the backward pass and is about three times as
slow. The keys and values repeated, the memory-efficient kernel takes them: the same numbers up to
rounding, and memory that grows with the tokens. With deterministic algorithms, which that kernel's
backward pass does not promise, everything stays as it is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_OWN: Any = None
"""What transformers computes "sdpa" with; None while it has not been replaced."""


def install(device: torch.device) -> None:
    """From now on, in this process, "sdpa" repeats shared heads where no kernel shares them."""
    global _OWN
    if _OWN is None and device.type == "cuda":
        _OWN = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *more: Any,
    **settings: Any,
) -> tuple[Tensor, None]:
    """What transformers computes, by a kernel that keeps no T × T matrix where there is one."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and attention_mask is None and unshared(key):
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        # all that is read of the module, less the number that asks for sharing
        alike: Any = SimpleNamespace(
            is_causal=getattr(module, "is_causal", True), layer_idx=getattr(module, "layer_idx", 0)
        )
        return _OWN(alike, query, key, value, attention_mask, *more, **settings)
    return _OWN(module, query, key, value, attention_mask, *more, **settings)


def unshared(key: Tensor) -> bool:
    """Whether PyTorch has no kernel for these keys that shares heads, but one for equal heads."""
    fp32_on_gpu = key.device.type == "cuda" and key.dtype == torch.float32
    return fp32_on_gpu and not torch.are_deterministic_algorithms_enabled()
