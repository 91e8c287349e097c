"""Chunked reading of parameter scores for the top-k: integer keys, sampling and checks.

Algorithm 1 line 9 (TopK_signed). `algorithm/topk.py` reads a `ScoreSource` several times, each time
in the same chunks. The first reading checks that every score is finite and takes an evenly spread
sample; later readings check that the sampled scores are unchanged. With several processes each
reads its own rows (`distributed/world.py`); this module gathers the results of the first reading
and raises an error on all processes if one fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from dualsft.distributed.world import world
from dualsft.errors import CheckError, RunError

P = ParamSpec("P")
T = TypeVar("T")

ScoreSource = Callable[[], Iterator[tuple[str, int, Tensor]]]
"""Called once per reading; yields (parameter name, flat offset, 1-D chunk of its scores).

Parameters come in `named_parameters` order and chunks in flat order; every call must yield the same
scores, all float32 or all float64. A chunk may be a temporary: no reference to it is kept.

With several processes, each yields only its own rows, at their offsets in the full parameter, and
an empty chunk for a parameter of which it has no rows. Rows are in rank order.
"""

SAMPLE = 1 << 20
"""Maximum number of keys in the sample; with fewer scores the sample is complete."""
SPARE = 1 << 20
"""Minimum of the number of positions that may be kept beyond k before the k-th key is known."""
KEY_DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64}
NOT_REPEATABLE = (
    "the score source yielded different scores on a later reading; they must not change"
)


@dataclass(frozen=True)
class _Share:
    """Result of a process's first reading, gathered on all processes."""

    spans: dict[str, tuple[int, int]]
    """Flat range of its rows in each parameter, in reading order."""
    dtype: torch.dtype
    num_scores: int
    num_taken: int
    """Size of its sample."""
    stride: int
    """Number of scores per sampled score: a power of two."""


@dataclass(frozen=True)
class Look:
    """First reading of this process's scores: its share, and a sample of keys."""

    share: _Share
    at: np.ndarray
    """Positions of the sample among these scores in reading order, increasing."""
    keys: Tensor
    """Keys at these positions, on the CPU."""


@dataclass(frozen=True)
class Survey:
    """Result of the first reading: this process's own, and the total over all processes."""

    own: Look
    num_total: int
    sample: Tensor
    """Sampled keys of all processes, thinned to a common stride; on the CPU."""

    @property
    def dtype(self) -> torch.dtype:
        return self.own.share.dtype

    @property
    def spare(self) -> int:
        """Number of positions that may be held beyond k."""
        return max(SPARE, self.num_total >> 6)


def together(work: Callable[P, T]) -> Callable[P, T]:
    """Decorator: if `work` fails in one process it fails in all, so that none waits forever."""

    @wraps(work)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            found = work(*args, **kwargs)
        except Exception as error:
            world().any(True)  # pairs with the collective call of the processes that succeed
            world().gather(f"{type(error).__name__}: {error}")
            raise
        if any(world().any(False)):
            said = world().gather("")
            rank = next(rank for rank, words in enumerate(said) if words)
            raise RunError(f"the selection failed in another process, rank {rank}: {said[rank]}")
        return found

    return guarded


def ordered_keys(scores: Tensor) -> Tensor:
    """Map scores to integers of the same order; integer operations only, so denormals stay exact.

    IEEE floats are sign and magnitude, integers are two's complement: the key is +magnitude or
    -magnitude, which also makes -0 and +0 equal.
    """
    key_dtype = KEY_DTYPES[scores.dtype]
    bits = scores.view(key_dtype)
    sign = bits >> (torch.iinfo(key_dtype).bits - 1)  # 0 or -1
    keys = sign & torch.iinfo(key_dtype).max
    keys ^= bits
    keys -= sign
    return keys


def score_of_key(key: int, dtype: torch.dtype) -> float:
    """Invert `ordered_keys` for one key."""
    magnitude = torch.tensor([abs(key)], dtype=KEY_DTYPES[dtype]).view(dtype).item()
    return -magnitude if key < 0 else magnitude


def key_of_infinity(dtype: torch.dtype) -> int:
    """Key of infinity: the keys of finite scores lie between its negative and it."""
    return int(torch.tensor([torch.inf], dtype=dtype).view(KEY_DTYPES[dtype]).item())


def _refuse_nonfinite(name: str, offset: int, scores: Tensor) -> None:
    """Raise for the first NaN or infinity of a chunk; both show up in its minimum or maximum."""
    if all(map(math.isfinite, torch.stack(torch.aminmax(scores)).tolist())):
        return
    position = int((~torch.isfinite(scores)).nonzero()[0].item())
    raise CheckError(
        f"score of {name!r} at flat index {offset + position} is {scores[position].item()}; "
        "scores must be finite: check for a diverged warmup or an overflow in the gradients"
    )


def read(source: ScoreSource) -> Iterator[tuple[str, int, Tensor]]:
    """Read the source once and check the order and dtype of its chunks."""
    ends: dict[str, int] = {}
    current: str | None = None
    dtype: torch.dtype | None = None
    for name, offset, scores in source():
        if scores.dtype not in KEY_DTYPES or (dtype is not None and scores.dtype != dtype):
            raise ValueError(
                f"scores of {name!r} are {scores.dtype}; all must be float32 or all float64"
                + ("" if dtype is None else f", and earlier ones are {dtype}")
            )
        if scores.dim() != 1:
            raise ValueError(f"chunk of {name!r} has shape {tuple(scores.shape)}; it must be 1-D")
        if (name != current and name in ends) or offset < ends.get(name, 0):
            raise ValueError(
                f"chunk of {name!r} at flat offset {offset} is out of order; "
                "the chunks of a parameter must be consecutive and in flat order, for ties"
            )
        dtype, current, ends[name] = scores.dtype, name, offset + scores.numel()
        yield name, offset, scores


@together
def look(source: ScoreSource) -> Look:
    """The first reading: check that all scores are finite and take an evenly spread sample.

    One of every `stride` positions is taken, at a varying offset, so that the sample does not
    always hit the same column of a weight. The stride doubles when the sample is full.
    """
    at, keys = [np.empty(0, np.int64)], [torch.empty(0, dtype=torch.int32)]
    num_scores, num_taken, stride = 0, 0, 1
    dtype = torch.float32
    spans: dict[str, tuple[int, int]] = {}
    for name, offset, scores in read(source):
        size, dtype = scores.numel(), scores.dtype
        spans[name] = (spans.get(name, (offset,))[0], offset + size)
        if not size:
            continue
        _refuse_nonfinite(name, offset, scores)
        while num_taken + size // stride > SAMPLE:
            at, keys = [np.concatenate(at)[::2]], [torch.cat(keys)[::2]]
            num_taken, stride = len(at[0]), 2 * stride
        if count := (num_scores + size) // stride - num_scores // stride:
            # one position per window of `width`, at a pseudo-random offset (multiplicative hash)
            width, order = size // count, np.arange(count)
            places = order * width + ((order + num_scores) * 2654435761 >> 15) % width
            at.append(places + num_scores)
            keys.append(ordered_keys(scores[torch.from_numpy(places).to(scores.device)]).cpu())
            num_taken += count
        num_scores += size
    merged = torch.cat([part.to(KEY_DTYPES[dtype]) for part in keys])
    share = _Share(spans, dtype, num_scores, num_taken, stride)
    return Look(share, at=np.concatenate(at), keys=merged)


def surveyed(own: Look) -> Survey:
    """Gather the first readings of all processes, check them, and merge their samples."""
    shares = world().gather(own.share)
    _refuse_misfits(shares)
    stride = max(share.stride for share in shares)
    most = SAMPLE + len(shares)  # each sample may exceed its limit by one
    while sum(-(-share.num_taken * share.stride // stride) for share in shares) > most:
        stride *= 2
    return Survey(
        own=own,
        num_total=sum(share.num_scores for share in shares),
        sample=world().concatenated(own.keys[:: stride // own.share.stride]),
    )


def _refuse_misfits(shares: Sequence[_Share]) -> None:
    """Raise if the processes yield different parameters, or overlapping rows of one."""
    first = shares[0]
    for rank, share in enumerate(shares):
        if list(share.spans) != list(first.spans) or share.dtype != first.dtype:
            raise ValueError(
                f"rank {rank} has {share.dtype} scores of {_listed(share.spans)}, and rank 0 has "
                f"{first.dtype} scores of {_listed(first.spans)}; every process must yield every "
                "parameter, in the same order, at least as an empty chunk"
            )
    for name in first.spans:
        end = 0
        for rank, (start, stop) in enumerate(share.spans[name] for share in shares):
            if start < stop and start < end:
                raise ValueError(
                    f"rank {rank} has {name!r} from flat index {start}, but an earlier rank has it "
                    f"up to {end}; each process must yield only its own rows, in rank order"
                )
            end = stop if start < stop else end


def _listed(names: Mapping[str, object]) -> str:
    few = ", ".join(list(names)[:3])
    return f"{len(names)} parameters ({few}{', ...' if len(names) > 3 else ''})"


def reread(source: ScoreSource, survey: Survey) -> Iterator[tuple[str, int, Tensor]]:
    """A later reading; raises if sampled keys have changed or scores are missing."""
    done, own = 0, survey.own
    spans = {}
    for name, offset, scores in read(source):
        first, last = np.searchsorted(own.at, [done, done + scores.numel()])
        places = torch.from_numpy(own.at[first:last] - done).to(scores.device)
        seen = ordered_keys(scores[places]).cpu()
        if scores.dtype != survey.dtype or not torch.equal(seen, own.keys[first:last]):
            raise RunError(NOT_REPEATABLE)
        yield name, offset, scores
        done += scores.numel()
        spans[name] = (spans.get(name, (offset,))[0], offset + scores.numel())
    if done != own.share.num_scores or list(spans.items()) != list(own.share.spans.items()):
        raise RunError(NOT_REPEATABLE)
