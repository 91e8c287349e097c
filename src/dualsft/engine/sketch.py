"""Sketches of per-example gradients: each example's gradient in a few thousand numbers, in batches.

For the methods that compare examples by their gradients (LESS, SPICE; METHODS.md B1, B3), beside
Algorithm 1's own scoring. A linear map's gradient G_n = Σ_t ε_t a_tᵀ becomes Lᵀ G_n R / √dim with
random signs L and R of its own, p x q = dim numbers, and the maps' sketches are added up. Inner
products of sketches are those of the gradients in expectation; each map's error is that of a p- and
a q-dimensional projection, and with many maps the errors average out. Nothing of an example's full
gradient exists: (Lᵀ ε_t)(Rᵀ a_t)ᵀ is summed over its tokens. Where something is done to the
gradient entry by entry first (LESS's Adam direction), one map's gradients at a time are formed.

A dense sketch multiplies each map's gradient, as one long row, by a matrix of random signs that is
made anew in chunks: the classic projection, with somewhat smaller errors and a cost of dim signs
for every entry and batch.

The signs depend on the seed, the purpose and the map's name alone. What is tapped is what the ghost
engine taps (`engine/rules.py`): the input and the output gradient of each use of a linear map.

Shape letters: B examples, T positions, I inputs, O outputs, p and q numbers of a sketch's sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, digest
from dualsft.engine.checkpointing import checkpointed
from dualsft.engine.fused import fused_blocks
from dualsft.engine.losses import example_objective
from dualsft.engine.rules import LinearRule
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.usage import give_back, is_out_of_memory

Transform = Callable[[str, Tensor, slice], Tensor]
"""(parameter, gradients [B, O, I] of some examples, which of the batch) to what is projected; may
reuse the gradients."""

BLOCK_SIGNS = 1 << 24
"""Signs of a dense sketch that exist at a time; they depend on it."""
FORMED_ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Entries of per-example gradients of one map that exist at a time, where they are formed."""


def sides(dim: int) -> tuple[int, int]:
    """p x q = dim, as near to each other as they can be, p <= q."""
    p = next(p for p in range(int(dim**0.5), 0, -1) if dim % p == 0)
    return p, dim // p


@dataclass
class Sketch:
    """The random signs of every linear map."""

    dim: int
    seed: int
    purpose: str
    dense: bool = False
    _signs: dict[tuple[str, str, torch.dtype], Tensor] = field(default_factory=dict)

    def signs(self, name: str, side: str, like: Tensor) -> Tensor:
        """L (side "out") or R ("in") of a map, [features of `like`, p or q], made once."""
        key = (name, side, like.dtype)
        if key not in self._signs:
            words = np.frombuffer(digest(self.seed, self.purpose, name, side), np.uint32)
            width = sides(self.dim)[0 if side == "out" else 1]
            rng = np.random.default_rng(words.tolist())
            bits = rng.integers(0, 2, (like.shape[-1], width), dtype=np.int8)
            self._signs[key] = torch.from_numpy(2 * bits - 1).to(like.device, like.dtype)
        return self._signs[key]

    def of_tokens(self, name: str, x_BTI: Tensor, grad_BTO: Tensor) -> Tensor:
        """Two-sided sketches of Σ_t ε_t a_tᵀ, which is not formed: [B, dim]."""
        wide = accumulation_dtype(grad_BTO.dtype)
        left_BTp = (grad_BTO @ self.signs(name, "out", grad_BTO)).to(wide)
        right_BTq = (x_BTI @ self.signs(name, "in", x_BTI)).to(wide)
        return torch.bmm(left_BTp.mT, right_BTq).flatten(1) / self.dim**0.5

    def block(self, name: str, start: int, stop: int, like: Tensor) -> Tensor:
        """The dense signs of some entries of a map: [stop - start, dim], never kept."""
        words = np.frombuffer(digest(self.seed, self.purpose, name, start), np.uint32)
        rng = np.random.default_rng(words.tolist())
        bits = rng.integers(0, 2, (stop - start, self.dim), dtype=np.int8)
        return torch.from_numpy(bits).to(like.device, like.dtype).mul_(2).sub_(1)

    def of_matrices(self, name: str, matrix_BOI: Tensor) -> Tensor:
        """Sketches of matrices as they are: [B, dim]."""
        if self.dense:
            flat, step = matrix_BOI.flatten(1), max(1, BLOCK_SIGNS // self.dim)
            total = flat.new_zeros(len(flat), self.dim)
            for start in range(0, flat.shape[1], step):
                stop = min(start + step, flat.shape[1])
                total.addmm_(flat[:, start:stop], self.block(name, start, stop, flat))
            return total / self.dim**0.5
        right_BOq = matrix_BOI @ self.signs(name, "in", matrix_BOI)
        left_Op = self.signs(name, "out", matrix_BOI[..., 0])
        return (left_Op.T @ right_BOq).flatten(1) / self.dim**0.5


@dataclass
class SketchTaps:
    """What one backward collects: the sketch of each example of the batch."""

    sketch: Sketch
    transform: Transform | None
    dtype: torch.dtype
    device: torch.device
    bounds: bool = False
    num_examples: int = 0
    total: Tensor = field(init=False)

    def begin(self, num_examples: int) -> None:
        """Forget the previous batch."""
        self.num_examples = num_examples
        shape = (num_examples, self.sketch.dim)
        self.total = torch.zeros(shape, dtype=self.dtype, device=self.device)


class _SketchRule(LinearRule):
    """A linear map's use, sketched."""

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
    """Sketches of the examples' gradients with respect to some linear maps of a model.

    The model is not trained while it is used so: no parameter of it needs a gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Mapping[str, nn.Module],
        sketch: Sketch,
        checkpointing: bool | None = None,
    ) -> None:
        """`modules` are linear maps by the name of their weight. Activations are recomputed in the
        backward as `checkpointing` says; None is once memory has run out."""
        self.model, self.sketch, self.checkpointing = model, sketch, checkpointing
        self.rules = [_SketchRule(module, {"weight": name}) for name, module in modules.items()]
        self.dtype = accumulation_dtype(next(model.parameters()).dtype)

    @contextmanager
    def tapped(self, transform: Transform | None = None) -> Iterator[SketchTaps]:
        """Observe every backward inside the block; the model is as before afterwards."""
        taps = SketchTaps(self.sketch, transform, self.dtype, self.model.device)
        with ExitStack() as stack:
            for p in self.model.parameters():
                if p.requires_grad:
                    stack.callback(p.requires_grad_, True)
                    p.requires_grad_(False)
            stack.enter_context(fused_blocks(self.model, wide=True))
            for rule in self.rules:
                stack.enter_context(rule.attached(taps))  # pyright: ignore[reportArgumentType]
            handle = self.model.get_input_embeddings().register_forward_hook(_start_graph)
            stack.callback(handle.remove)
            yield taps

    def of_batch(self, taps: SketchTaps, batch: Batch) -> Tensor:
        """The sketches of a batch's examples, [B, dim]: of the gradient of each example's loss."""
        try:
            return self._differentiate(taps, batch)
        except Exception as problem:
            if self.checkpointing is not None or not is_out_of_memory(problem):
                raise
        give_back(self.model.device)
        self.checkpointing = True  # the same numbers
        return self._differentiate(taps, batch)

    def _differentiate(self, taps: SketchTaps, batch: Batch) -> Tensor:
        taps.begin(len(batch.input_ids))
        with torch.enable_grad(), checkpointed(self.model, bool(self.checkpointing)):
            objective, _ = example_objective(self.model, batch)
            objective.backward()
        return taps.total


def _start_graph(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output if output.requires_grad else output.requires_grad_()
