"""Activation checkpointing of the decoder blocks: less memory at the cost of one more forward pass.

Not part of Algorithm 1. A checkpointed block stores only its input and recomputes its activations
in the backward pass. The operations are the same, so results on a CPU are bit-identical. It works
in training and in eval mode: Algorithm 1 takes its gradients (lines 3 to 8) in eval mode, where the
models' own `gradient_checkpointing_enable` has no effect. It also works with the taps of the ghost
engine: each use of a parameter is observed once, because no backward runs through the graph of the
recomputed forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dualsft.model.load import decoder_blocks


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
