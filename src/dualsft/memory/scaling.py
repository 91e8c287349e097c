"""What a process sends and holds, as formulas of the model, the budget and the number of processes.

Algorithm 1 by N processes. Bytes are those of ring algorithms, sent by each process (and as many
received): N − 1 of N parts of what is gathered or scattered, twice that of what is added up
everywhere. docs/scaling.md has the tables; tests/distributed/test_traffic.py counts the bytes of
real collectives against `walk_traffic` and `step_traffic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dualsft.model.load import decoder_blocks

INDEX_BYTES = 2
"""Of a selected entry's place in its process's rows, as it is sent (`train/compact_index.py`)."""
STATE_BYTES = 2 + 2 + 8 + 4
"""Of a selected entry of a bf16 model: place, low half of the master, fp32 moments, gradient."""
FULL_STATE_BYTES = 2 + 8 + 4
"""Of an entry when all are trained: no place."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the formulas need, in entries."""

    parameters: int
    blocks: int
    """Inside the decoder blocks."""
    largest_block: int
    candidates: int
    largest_candidate: int
    itemsize: int = 2
    """Bytes of a weight."""
    sum_itemsize: int = 4
    """Bytes of an entry of G."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        candidates: Mapping[str, nn.Parameter],
        itemsize: int | None = None,
    ) -> ModelShape:
        """Of a model, in its own dtype unless another weight's bytes are given."""
        counts = [sum(p.numel() for p in block.parameters()) for block in decoder_blocks(model)[1]]  # pyright: ignore[reportArgumentType]
        sizes = [p.numel() for p in candidates.values()]
        itemsize = itemsize or next(iter(candidates.values())).itemsize
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            blocks=sum(counts),
            largest_block=max(counts),
            candidates=sum(sizes),
            largest_candidate=max(sizes),
            itemsize=itemsize,
            sum_itemsize=8 if itemsize == 8 else 4,
        )

    @property
    def outer(self) -> int:
        """Embeddings, last norm and head."""
        return self.parameters - self.blocks

    @property
    def weights_moved(self) -> int:
        """Bytes gathered by one forward and backward pass: blocks twice, what is outside once."""
        return self.itemsize * (2 * self.blocks + self.outer)


def parts(num_bytes: float, size: int) -> float:
    """Of a gather or a scatter."""
    return num_bytes * (size - 1) / size


def walk_traffic(
    shape: ModelShape, size: int, sharded: bool, sums: bool = True, direction: bool = True
) -> tuple[float, float]:
    """(bytes a turn, bytes at the end) of a walk over examples: one batch a process is a turn."""
    total = shape.sum_itemsize * shape.candidates * sums
    if not sharded:
        return 0.0, 2 * parts(total, size)
    beside = shape.itemsize * shape.candidates * direction
    return parts(shape.weights_moved + beside + total, size), 0.0


def step_traffic(
    shape: ModelShape, size: int, sharded: bool, shares: Iterable[Sequence[int]], turns: int = 1
) -> float:
    """Bytes of an optimizer step of `turns` micro-batches a process.

    `shares` has, for each parameter, the number of its selected entries in each process's rows; the
    largest counts, since all are sent as long.
    """
    shares = list(shares)
    if not sharded:
        return 2 * parts(shape.sum_itemsize * sum(map(sum, shares)), size)
    sent = size * sum(map(max, shares)) * (shape.sum_itemsize + INDEX_BYTES)
    return turns * parts(shape.weights_moved + sent, size)


def scoring_memory(shape: ModelShape, size: int, sharded: bool) -> float:
    """Bytes that a process holds while it walks over the pool, without activations."""
    vectors = (shape.sum_itemsize + shape.itemsize) * shape.candidates
    if not sharded:
        return shape.itemsize * shape.parameters + vectors
    rows = (shape.itemsize * shape.parameters + vectors) / size
    block = (shape.itemsize + shape.sum_itemsize) * shape.largest_candidate
    return rows + _gathered(shape) + block


def finetuning_memory(shape: ModelShape, size: int, sharded: bool, selected: int) -> float:
    """Bytes that a process holds in restricted fine-tuning of a bf16 model, without activations."""
    if not sharded:
        return shape.itemsize * (shape.parameters + shape.largest_candidate) + (
            STATE_BYTES * selected
        )
    rows = (shape.itemsize * shape.parameters + STATE_BYTES * selected) / size
    return rows + _gathered(shape) + shape.itemsize * shape.largest_candidate


def warmup_memory(shape: ModelShape, size: int, sharded: bool) -> float:
    """Bytes that a process holds in the warmup of every parameter, without activations."""
    state = (shape.itemsize + FULL_STATE_BYTES) * shape.parameters
    if not sharded:
        return state
    return state / size + _gathered(shape) + 4 * shape.largest_candidate


def _gathered(shape: ModelShape) -> float:
    """Weights that are whole at a time: two blocks (one is on its way), and what is outside."""
    return shape.itemsize * (2 * shape.largest_block + shape.outer)
