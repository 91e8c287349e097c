"""Sketches with respect to any linear maps of a model, for LESS (an adapter) and SPICE.

Not part of Algorithm 1. As in the ghost engine (`engine/rules.py`), each use of a linear map is
observed with its input and output gradient. If a transform applies to the entries of the gradient
first (LESS's Adam direction), gradients are formed, for one map at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.data.examples import Batch
from dualsft.engine.fused import checkpointed, fused_blocks
from dualsft.engine.ghost import frozen, start_graph
from dualsft.engine.losses import example_objective
from dualsft.engine.rules import LinearRule
from dualsft.engine.sketch import Sketch
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.usage import give_back, is_out_of_memory

Transform = Callable[[str, Tensor, slice], Tensor]
"""(parameter, gradients [B, O, I] of some examples, their slice of the batch) -> what to project;
may overwrite the gradients."""

FORMED_ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Maximum entries of per-example gradients of one map formed at a time."""


@dataclass
class SketchTaps:
    """Accumulator of one backward pass: the sketch of each example of the batch."""

    sketch: Sketch
    transform: Transform | None
    dtype: torch.dtype
    device: torch.device
    bounds: bool = False
    num_examples: int = 0
    total: Tensor = field(init=False)

    def begin(self, num_examples: int) -> None:
        """Reset the sketches for a new batch."""
        self.num_examples = num_examples
        shape = (num_examples, self.sketch.dim)
        self.total = torch.zeros(shape, dtype=self.dtype, device=self.device)


class _SketchRule(LinearRule):
    """Adds the sketch of each use of a linear map to the total."""

    def observe(self, taps: Any, x_BTI: Tensor, norms_BT: Tensor | None, grad_BTO: Tensor) -> None:
        name, sketch = self.names[0], taps.sketch
        if taps.transform is None and not sketch.dense:
            taps.total += sketch.of_tokens(name, x_BTI, grad_BTO)
            return
        size = grad_BTO.shape[-1] * x_BTI.shape[-1]
        limit = FORMED_ENTRIES.get(grad_BTO.device.type, FORMED_ENTRIES["cpu"])
        step = max(1, limit // size)
        for start in range(0, len(x_BTI), step):
            some = slice(start, min(start + step, len(x_BTI)))
            left, right = grad_BTO[some].to(taps.dtype), x_BTI[some].to(taps.dtype)
            formed = torch.bmm(left.mT, right)
            if taps.transform is not None:
                formed = taps.transform(name, formed, some)
            taps.total[some] += sketch.of_matrices(name, formed)


class Sketcher:
    """Sketches of per-example gradients with respect to some linear maps of a model.

    While it is tapped, no parameter of the model requires a gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Mapping[str, nn.Module],
        sketch: Sketch,
        checkpointing: bool | None = None,
    ) -> None:
        """`modules` are linear maps, keyed by the name of their weight. `checkpointing` recomputes
        activations in the backward pass; None: off until the first out-of-memory."""
        self.model, self.sketch, self.checkpointing = model, sketch, checkpointing
        self.rules = [_SketchRule(module, {"weight": name}) for name, module in modules.items()]
        self.dtype = accumulation_dtype(next(model.parameters()).dtype)

    @contextmanager
    def tapped(self, transform: Transform | None = None) -> Iterator[SketchTaps]:
        """Observe every backward pass inside the context; restores the model on exit."""
        taps = SketchTaps(self.sketch, transform, self.dtype, self.model.device)
        with ExitStack() as stack:
            stack.enter_context(frozen(self.model))
            stack.enter_context(fused_blocks(self.model, wide=True))
            for rule in self.rules:
                stack.enter_context(rule.attached(taps))  # pyright: ignore[reportArgumentType]
            stack.callback(start_graph(self.model.get_input_embeddings()).remove)
            yield taps

    def of_batch(self, taps: SketchTaps, batch: Batch) -> Tensor:
        """Sketches of the loss gradient of each example of a batch: [B, dim]."""
        try:
            return self._differentiate(taps, batch)
        except Exception as problem:
            if self.checkpointing is not None or not is_out_of_memory(problem):
                raise
        give_back(self.model.device)
        self.checkpointing = True  # same results, less memory
        return self._differentiate(taps, batch)

    def _differentiate(self, taps: SketchTaps, batch: Batch) -> Tensor:
        taps.begin(len(batch.input_ids))
        with torch.enable_grad(), checkpointed(self.model, bool(self.checkpointing)):
            objective, _ = example_objective(self.model, batch)
            objective.backward()
        return taps.total
