"""Reading parameter scores in chunks, for the top-k: their order as integers, and a first look.

Algorithm 1, line 9 (TopK_signed). A `ScoreSource` is read several times by `algorithm/topk.py`,
each time in the same chunks. The first reading checks that every score is finite and takes a
sample, spread evenly; later ones check that the sample still shows the same scores. Of several
processes each reads its own rows (`distributed/world.py`): what they tell each other of the first
reading, and what they refuse together, is here.
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
from dualsft.errors import RunError

P = ParamSpec("P")
T = TypeVar("T")

ScoreSource = Callable[[], Iterator[tuple[str, int, Tensor]]]
"""Called once a reading; yields (parameter name, flat offset, 1-D chunk of its scores).

Parameters come in `named_parameters` order and chunks in flat order; every call must yield the same
scores, all float32 or all float64. A chunk may be a temporary: no reference to it is kept.

A process of several yields its own rows alone, at their offsets in the whole parameter, and an
empty chunk of a parameter of which it has none; a rank's rows lie before those of the next.
"""

SAMPLE = 1 << 20
"""Most keys in the sample; all of them when there are no more."""
SPARE = 1 << 20
"""Least number of positions that may be kept beyond k while the k-th key is only bracketed."""
KEY_DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64}
NOT_REPEATABLE = "the score source gave other scores on a later reading; each call must repeat them"


@dataclass(frozen=True)
class _Share:
    """What a process tells the others of its first reading."""

    spans: dict[str, tuple[int, int]]
    """Flat range that it has of each parameter, in reading order."""
    dtype: torch.dtype
    num_scores: int
    num_taken: int
    """Size of its sample."""
    stride: int
    """How many of its scores one of the sample stands for: a power of two."""


@dataclass(frozen=True)
class Look:
    """The first reading of this process's scores: what it tells of them, and a sample of keys."""

    share: _Share
    at: np.ndarray
    """Positions of the sample among these scores in reading order, increasing."""
    keys: Tensor
    """Keys at these positions, on the CPU."""


@dataclass(frozen=True)
class Survey:
    """What the first reading says: of this process's own scores, and of all together."""

    own: Look
    num_total: int
    sample: Tensor
    """Keys of all processes' samples, brought to one stride; on the CPU."""

    @property
    def dtype(self) -> torch.dtype:
        return self.own.share.dtype

    @property
    def spare(self) -> int:
        """How many positions beyond k may be held."""
        return max(SPARE, self.num_total >> 6)


def chunked(tensors: Mapping[str, Tensor], chunk: int = 1 << 22) -> ScoreSource:
    """Make a source of scores that are already in memory; the chunks are views, not copies."""
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"scores of {name!r} are not contiguous; pass tensor.contiguous()")

    def read() -> Iterator[tuple[str, int, Tensor]]:
        for name, tensor in tensors.items():
            flat = tensor.detach().view(-1)
            for start in range(0, max(flat.numel(), 1), chunk):
                yield name, start, flat[start : start + chunk]

    return read


def together(work: Callable[P, T]) -> Callable[P, T]:
    """Work that fails in all processes when it fails in one, so that none waits for it forever."""

    @wraps(work)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            found = work(*args, **kwargs)
        except Exception as error:
            world().any(True)
            world().answers(f"{type(error).__name__}: {error}")
            raise
        if any(world().any(False)):
            said = world().answers("")
            rank = next(rank for rank, words in enumerate(said) if words)
            raise RunError(f"the selection failed in another process, rank {rank}: {said[rank]}")
        return found

    return guarded


def ordered_keys(scores: Tensor) -> Tensor:
    """Map scores to integers of the same order; integer work only, so denormals stay exact.

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
    """Raise for the first NaN or infinity of a chunk; both show in its extremes."""
    if all(map(math.isfinite, torch.stack(torch.aminmax(scores)).tolist())):
        return
    position = int((~torch.isfinite(scores)).nonzero()[0].item())
    raise RunError(
        f"score of {name!r} at flat index {offset + position} is {scores[position].item()}; "
        "scores must be finite: look for a diverged warmup or an overflow in the gradients"
    )


def read(source: ScoreSource) -> Iterator[tuple[str, int, Tensor]]:
    """Read the source once, checking the order and type of its chunks."""
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
                f"chunk of {name!r} at flat offset {offset} comes out of order; "
                "ties need one run of chunks a parameter, in flat order"
            )
        dtype, current, ends[name] = scores.dtype, name, offset + scores.numel()
        yield name, offset, scores


@together
def look(source: ScoreSource) -> Look:
    """The first reading: all scores are finite, and a sample of them, spread evenly.

    One position out of every `stride` is taken, at a place that varies, so that rows of a weight
    are not always met in the same column. The stride doubles when the sample is full.
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
    """All processes' first readings together: they must fit, and their samples become one."""
    shares = world().answers(own.share)
    _refuse_misfits(shares)
    stride = max(share.stride for share in shares)
    most = SAMPLE + len(shares)  # a sample may be one larger than full
    while sum(-(-share.num_taken * share.stride // stride) for share in shares) > most:
        stride *= 2
    return Survey(
        own=own,
        num_total=sum(share.num_scores for share in shares),
        sample=world().joined(own.keys[:: stride // own.share.stride]),
    )


def _refuse_misfits(shares: Sequence[_Share]) -> None:
    """Raise when the processes do not name the same parameters, or hold the same rows of one."""
    first = shares[0]
    for rank, share in enumerate(shares):
        if list(share.spans) != list(first.spans) or share.dtype != first.dtype:
            raise ValueError(
                f"rank {rank} has {share.dtype} scores of {_listed(share.spans)}, and rank 0 has "
                f"{first.dtype} scores of {_listed(first.spans)}; every process must yield every "
                "parameter, in the same order, if only an empty chunk of it"
            )
    for name in first.spans:
        end = 0
        for rank, (start, stop) in enumerate(share.spans[name] for share in shares):
            if start < stop and start < end:
                raise ValueError(
                    f"rank {rank} has {name!r} from flat index {start} on, and an earlier rank up "
                    f"to {end}; each process must yield its own rows alone, in the order of ranks"
                )
            end = stop if start < stop else end


def _listed(names: Mapping[str, object]) -> str:
    few = ", ".join(list(names)[:3])
    return f"{len(names)} parameters ({few}{', ...' if len(names) > 3 else ''})"


def reread(source: ScoreSource, survey: Survey) -> Iterator[tuple[str, int, Tensor]]:
    """A later reading; the sample must show the keys of the first one, and no score be missing."""
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
