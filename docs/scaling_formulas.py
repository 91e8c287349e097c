"""Formulas for the traffic and memory per process, given model, budget and number of processes.

Algorithm 1 with N processes. Traffic is the number of bytes that each process sends (and receives)
with ring algorithms: (N − 1) / N of the tensor for an all-gather or a reduce-scatter, twice that
for an all-reduce. docs/scaling.md has the tables; tests/distributed/test_traffic.py compares
`walk_traffic` and `step_traffic` with the bytes of real collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dualsft.model.load import decoder_blocks

INDEX_BYTES = 2
"""Bytes per selected entry of an index as it is sent (`train/compact.py`)."""
STATE_BYTES = 2 + 2 + 8 + 4
"""Bytes per selected entry of a bf16 model: index, low half of master, fp32 moments, gradient."""
FULL_STATE_BYTES = 2 + 8 + 4
"""Bytes per entry when all entries are trained: the same without the index."""


@dataclass(frozen=True)
class ModelShape:
    """The model sizes used by the formulas, in entries."""

    parameters: int
    blocks: int
    """Entries inside the decoder blocks."""
    largest_block: int
    candidates: int
    largest_candidate: int
    itemsize: int = 2
    """Bytes per weight."""
    sum_itemsize: int = 4
    """Bytes per entry of G."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        candidates: Mapping[str, nn.Parameter],
        itemsize: int | None = None,
    ) -> ModelShape:
        """The sizes of a model; `itemsize` overrides the bytes per weight of the model's dtype."""
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
        """Entries outside the decoder blocks: embeddings, last norm and head."""
        return self.parameters - self.blocks

    @property
    def weights_moved(self) -> int:
        """Bytes all-gathered in one forward and backward pass: blocks twice, the rest once."""
        return self.itemsize * (2 * self.blocks + self.outer)


def ring_bytes(num_bytes: float, size: int) -> float:
    """Bytes sent per process for an all-gather or reduce-scatter of `num_bytes`."""
    return num_bytes * (size - 1) / size


def walk_traffic(
    shape: ModelShape, size: int, sharded: bool, sums: bool = True, direction: bool = True
) -> tuple[float, float]:
    """(bytes per turn, bytes at the end) of a walk; a turn is one batch per process."""
    total = shape.sum_itemsize * shape.candidates * sums
    if not sharded:
        return 0.0, 2 * ring_bytes(total, size)
    beside = shape.itemsize * shape.candidates * direction
    return ring_bytes(shape.weights_moved + beside + total, size), 0.0


def step_traffic(
    shape: ModelShape, size: int, sharded: bool, shares: Iterable[Sequence[int]], turns: int = 1
) -> float:
    """Bytes of an optimizer step of `turns` micro-batches per process.

    `shares` has, for each parameter, the number of its selected entries in each process's rows. All
    messages are padded to the largest of them.
    """
    shares = list(shares)
    if not sharded:
        return 2 * ring_bytes(shape.sum_itemsize * sum(map(sum, shares)), size)
    sent = size * sum(map(max, shares)) * (shape.sum_itemsize + INDEX_BYTES)
    return turns * ring_bytes(shape.weights_moved + sent, size)


def scoring_memory(shape: ModelShape, size: int, sharded: bool) -> float:
    """Bytes per process during the walk over the pool, without activations."""
    vectors = (shape.sum_itemsize + shape.itemsize) * shape.candidates
    if not sharded:
        return shape.itemsize * shape.parameters + vectors
    rows = (shape.itemsize * shape.parameters + vectors) / size
    block = (shape.itemsize + shape.sum_itemsize) * shape.largest_candidate
    return rows + _gathered(shape) + block


def finetuning_memory(shape: ModelShape, size: int, sharded: bool, selected: int) -> float:
    """Bytes per process in restricted fine-tuning of a bf16 model, without activations."""
    if not sharded:
        return shape.itemsize * (shape.parameters + shape.largest_candidate) + (
            STATE_BYTES * selected
        )
    rows = (shape.itemsize * shape.parameters + STATE_BYTES * selected) / size
    return rows + _gathered(shape) + shape.itemsize * shape.largest_candidate


def warmup_memory(shape: ModelShape, size: int, sharded: bool) -> float:
    """Bytes per process in a warmup that trains every parameter, without activations."""
    state = (shape.itemsize + FULL_STATE_BYTES) * shape.parameters
    if not sharded:
        return state
    return state / size + _gathered(shape) + 4 * shape.largest_candidate


def _gathered(shape: ModelShape) -> float:
    """Bytes of gathered weights: two blocks (one is prefetched) and all weights outside them."""
    return shape.itemsize * (2 * shape.largest_block + shape.outer)
