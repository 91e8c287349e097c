"""Out of memory: recognised on every device, and answered with a smaller batch.

Sums over a batch do not depend on how it is cut (ALGORITHM.md §2: no result depends on the batch
size beyond rounding), so a batch that does not fit is computed again in halves, said aloud. When a
single example does not fit, the cure is the user's. It belongs to no line of Algorithm 1.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from dualsft.errors import RunError

_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the CPU."""
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(problem).lower()
    return isinstance(problem, RuntimeError) and any(phrase in text for phrase in _PHRASES)


class Smaller(Exception):
    """A batch did not fit; `batch_tokens` is what to try next."""

    def __init__(self, batch_tokens: int, shape: Sequence[int], cure: str) -> None:
        self.batch_tokens = batch_tokens
        rows, tokens = shape
        super().__init__(
            f"out of memory with {rows} examples of {tokens:,} tokens in a batch; going on with "
            f"at most {batch_tokens:,} tokens, the same sums in smaller pieces (set {cure} to "
            "start so)"
        )

    @classmethod
    def than(cls, shape: Sequence[int], problem: BaseException, key: str) -> Smaller:
        """Half of a batch of this shape (examples, tokens); one example alone is the end.

        `key` is the setting that governs it: tokens a batch, or examples a micro-batch.
        """
        rows, tokens = shape
        if rows == 1:
            raise RunError(
                f"out of memory with a single example of {tokens:,} tokens ({problem}); lower "
                "data.max_length, use model.dtype=bfloat16 on a GPU, or a machine with more memory"
            ) from None
        half = rows // 2
        count = half if key.endswith("micro_batch_size") else tokens * half
        return cls(tokens * half, shape, f"{key}={count}")


def give_back(device: torch.device) -> None:
    """Free what a failed batch held, so that the next try has it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
