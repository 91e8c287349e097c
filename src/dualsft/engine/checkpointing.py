"""Activation checkpointing of the decoder blocks: less memory for one more forward pass.

A checkpointed block keeps its input alone; what its backward needs is computed again when the
backward reaches it. The same operations on the same numbers: results keep every bit on a CPU. It
works in training and in eval mode (Algorithm 1 takes its gradients, lines 3 to 8, in eval mode;
the models' own switch works in training mode only), under the ghost engine's taps as well, whose
rules see each use of a parameter once: the graph of the second forward is never walked.
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
    """Every decoder block recomputes its activations in the backward, while the context lasts."""
    with ExitStack() as stack:
        for block in decoder_blocks(model)[1] if on else ():
            stack.enter_context(_recomputing(block))
        yield


@contextmanager
def _recomputing(block: nn.Module) -> Iterator[None]:
    """This block's forward, checkpointed; what stood in its place returns afterwards."""
    patched = vars(block).get("forward")
    forward: Callable[..., Any] = block.forward

    def recomputed(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        # dropout draws again what it drew; without it, no random state need be read
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
