"""Sketches of per-example gradients: random projections to a few thousand numbers, in batches.

For the calibrated scores of Algorithm 1 line 8 (`algorithm/calibration.py`), and for methods that
compare examples by their gradients (LESS and SPICE, docs/methods.md). The gradient
G_n = Σ_t ε_t a_tᵀ of a linear map becomes Lᵀ G_n R / √dim, where L and R are random signs of that
map and the result has p x q = dim numbers. The sketches of all maps are added up. Inner products of
sketches equal those of the gradients in expectation; the error per map is that of a p- and a
q-dimensional projection, and averages out over many maps. The full gradient of an example is never
formed: (Lᵀ ε_t)(Rᵀ a_t)ᵀ is summed over its tokens.

A dense sketch multiplies the flattened gradient of each map by a matrix of random signs that is
generated in chunks: the classic projection, with somewhat smaller errors, at a cost of dim signs
per entry and batch.

The signs depend only on the seed, the purpose and the name of the map.

Shape letters: B examples, T positions, I inputs, O outputs, p and q numbers of a sketch's sides.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dualsft.data.examples import generator
from dualsft.distributed.world import world
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.paths import RunPath

BLOCK_SIGNS = 1 << 24
"""Signs of a dense sketch generated at a time. Changing it changes the signs."""


def sides(dim: int) -> tuple[int, int]:
    """(p, q) with p x q = dim, p <= q, and p as large as possible."""
    p = next(p for p in range(int(dim**0.5), 0, -1) if dim % p == 0)
    return p, dim // p


@dataclass
class Sketch:
    """The random signs of every linear map."""

    dim: int
    seed: int
    purpose: str
    dense: bool = False
    weights: frozenset[str] | None = None
    """The linear weights that it covers; None: every one that it is given."""
    _signs: dict[tuple[str, str, torch.dtype], Tensor] = field(default_factory=dict)

    def signs(self, name: str, side: str, like: Tensor, features: int | None = None) -> Tensor:
        """L (side "out") or R (side "in") of a map, [features, p or q]; cached. By default as many
        features as `like` has."""
        key = (name, side, like.dtype)
        if key not in self._signs:
            signs = self._drawn(name, side, features or like.shape[-1])
            self._signs[key] = torch.from_numpy(signs).to(like.device, like.dtype)
        return self._signs[key]

    def _drawn(self, name: str, side: str, features: int) -> np.ndarray:
        rng = generator(self.seed, self.purpose, name, side)
        width = sides(self.dim)[0 if side == "out" else 1]
        return 2 * rng.integers(0, 2, (features, width), np.int8) - 1

    def of_inputs(self, name: str, x_BTI: Tensor) -> Tensor:
        """Rᵀ a_t, all that a sketch needs of the inputs: [B, T, q]."""
        return x_BTI @ self.signs(name, "in", x_BTI)

    def of_tokens(self, name: str, right_BTq: Tensor, grad_BTO: Tensor) -> Tensor:
        """Two-sided sketches of Σ_t ε_t a_tᵀ from `of_inputs`, without forming it: [B, dim]."""
        wide = accumulation_dtype(grad_BTO.dtype)
        left_BTp = (grad_BTO @ self.signs(name, "out", grad_BTO)).to(wide)
        return self.of_sides(left_BTp, right_BTq.to(wide))

    def of_sides(self, left_BTp: Tensor, right_BTq: Tensor) -> Tensor:
        """The sketch from Lᵀ ε_t and Rᵀ a_t: [B, dim]."""
        return torch.bmm(left_BTp.mT, right_BTq).flatten(1) / self.dim**0.5

    def of_rows(
        self, name: str, rows: Tensor, first: int, num_rows: int, transposed: bool
    ) -> Tensor:
        """Two-sided sketch of some rows of a weight's gradient, from row `first` of `num_rows`.

        `transposed`: the rows are those of a weight [I, O] (GPT-2's Conv1D). In float64: [dim].
        """
        wide = rows.to(torch.float64)
        near, far = ("in", "out") if transposed else ("out", "in")
        own = torch.from_numpy(self._drawn(name, near, num_rows)[first : first + len(rows)])
        other = torch.from_numpy(self._drawn(name, far, rows.shape[1]))
        small = own.to(wide).T @ wide @ other.to(wide)
        return (small.T if transposed else small).flatten() / self.dim**0.5

    def block(self, name: str, start: int, stop: int, like: Tensor) -> Tensor:
        """Dense signs of the entries from `start` to `stop` of a map: [stop - start, dim]."""
        rng = generator(self.seed, self.purpose, name, start)
        bits = rng.integers(0, 2, (stop - start, self.dim), dtype=np.int8)
        return torch.from_numpy(bits).to(like.device, like.dtype).mul_(2).sub_(1)

    def of_matrices(self, name: str, matrix_BOI: Tensor) -> Tensor:
        """Sketches of gradients that have been formed: [B, dim]."""
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


ROW_BLOCK_BYTES = 256 << 20
"""Bytes of sketches that are converted to products' dtype at a time."""
MAPPED_BYTES = 1 << 30
"""Larger arrays of sketches are in a file that the system pages in and out, not in memory."""


class SketchRows:
    """The sketches of many examples: unit rows in fp16 and their lengths, 2 bytes per number.

    A unit row is stored times √dim, so its entries are of the order of one, where fp16 has eleven
    bits. `exact` stores float64 instead (for models in float64). More than `MAPPED_BYTES` are kept
    in a file without a name in `folder`, whose space is freed with the object.
    """

    def __init__(
        self, count: int, dim: int, exact: bool = False, folder: RunPath | None = None
    ) -> None:
        self.count, self.dim, self.exact = count, dim, exact
        self.stored = _zeros((count, dim), np.float64 if exact else np.float16, folder)
        self.norms = np.zeros(count, np.float64 if exact else np.float32)
        self.added = np.zeros(dim)
        """Sum of everything that was added, independent of the rows: [dim]."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, as in saved progress."""
        return {"sketches": self.stored, "sketch_norms": self.norms, "sketches_added": self.added}

    def clear(self) -> None:
        for array in self.arrays.values():
            array[...] = 0

    def reduce(self) -> None:
        """Gather the rows of all processes; each row is nonzero on one of them, so sums are
        exact."""
        world().sum_array(self.norms)
        world().sum_array(self.added)
        for rows in _row_slices(self.count, self.dim * 4):
            part = self.stored[rows].astype(np.promote_types(self.stored.dtype, np.float32))
            self.stored[rows] = world().sum_array(part)

    def add(self, rows: Sequence[int], sketches_Bp: np.ndarray) -> None:
        """Add sketches to these rows (parts of a gradient arrive in several walks)."""
        at = np.asarray(rows)
        total = sketches_Bp.astype(np.float64)
        self.added += total.sum(0)
        if self.norms[at].any():
            total += self.stored[at] * (self.norms[at, None].astype(np.float64) / self.dim**0.5)
        norms = np.linalg.norm(total, axis=1)
        total *= (self.dim**0.5 / np.maximum(norms, 1e-300))[:, None]
        self.stored[at], self.norms[at] = total, norms

    def blocks(self, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """Unit rows in blocks, in fp32 (float64 if exact)."""
        wide = torch.float64 if self.exact else torch.float32
        for rows in _row_slices(self.count, self.dim * wide.itemsize):
            block = torch.from_numpy(self.stored[rows]).to(device).to(wide)
            yield rows, block / self.dim**0.5

    def times(self, queries_pQ: Tensor) -> Tensor:
        """Unit rows times queries, in the dtype of the queries: [N, Q]."""
        parts = [
            block.to(queries_pQ.dtype) @ queries_pQ for _, block in self.blocks(queries_pQ.device)
        ]
        return torch.cat(parts)

    def first(self, count: int) -> SketchRows:
        """The first rows."""
        part = SketchRows(0, self.dim, self.exact)
        part.count, part.stored, part.norms = count, self.stored[:count], self.norms[:count]
        return part

    def row(self, i: int) -> Tensor:
        """One sketch at its original length: [dim], float64."""
        row = torch.from_numpy(self.stored[i].astype(np.float64))
        return row * (float(self.norms[i]) / self.dim**0.5)

    def total(self) -> Tensor:
        """Sum of the rows at their original lengths: [dim], float64."""
        norms = torch.from_numpy(self.norms.astype(np.float64))
        total = torch.zeros(self.dim, dtype=torch.float64)
        for rows, block in self.blocks(torch.device("cpu")):
            total += norms[rows] @ block.to(torch.float64)
        return total


def _zeros(shape: tuple[int, int], dtype: type, folder: RunPath | None) -> np.ndarray:
    if math.prod(shape) * np.dtype(dtype).itemsize <= MAPPED_BYTES:
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile() if folder is None else folder.scratch() as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def _row_slices(count: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, ROW_BLOCK_BYTES // row_bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
