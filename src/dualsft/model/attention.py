"""Grouped-query attention in fp32 on a GPU without a T × T attention matrix.

Not part of Algorithm 1. Used whenever a model computes with fp32 weights on a GPU: in the passes
that `engine/precision.py` runs in fp32 (lines 5 to 8), and in runs with `model.dtype=float32`.

When several query heads share one key head and there is no attention mask, transformers calls
PyTorch's scaled dot-product attention with `enable_gqa`. Only the half-precision kernels support
it. In fp32, PyTorch silently falls back to the math kernel, which keeps a T × T matrix per head and
layer for the backward pass and is about three times slower. Repeating the keys and values makes the
memory-efficient kernel eligible: the result is the same up to rounding, and memory grows linearly
with the number of tokens. That kernel's backward pass is not deterministic, so nothing changes when
deterministic algorithms are enabled.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_OWN: Any = None
"""The "sdpa" function registered by transformers; None until `install` replaces it."""


def install(device: torch.device) -> None:
    """Replace transformers' "sdpa" for the rest of this process; no effect without CUDA."""
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
    """transformers' "sdpa", with shared key and value heads repeated if no kernel shares them."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and attention_mask is None and unshared(key):
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        # transformers passes enable_gqa if module.num_key_value_groups > 1; the stand-in has only
        # the other attributes that it reads
        alike: Any = SimpleNamespace(
            is_causal=getattr(module, "is_causal", True), layer_idx=getattr(module, "layer_idx", 0)
        )
        return _OWN(alike, query, key, value, attention_mask, *more, **settings)
    return _OWN(module, query, key, value, attention_mask, *more, **settings)


def unshared(key: Tensor) -> bool:
    """Whether these keys need repeated heads: fp32 on CUDA, without deterministic algorithms."""
    fp32_on_gpu = key.device.type == "cuda" and key.dtype == torch.float32
    return fp32_on_gpu and not torch.are_deterministic_algorithms_enabled()
