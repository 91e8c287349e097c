"""topk.py in a world of several processes: real ones, over gloo, against a full stable sort.

To start a process takes seconds, so three are started once for this file. They form worlds of 3, 2
and 1 in turn, try every case in each, and write down what they found; the tests read that.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from properties import chunked
from test_topk import by_full_sort, denormals, split
from torch import Tensor

from dualsft.algorithm import topk, topk_reading
from dualsft.algorithm.topk import TopK, topk_signed
from dualsft.algorithm.topk_reading import ScoreSource
from dualsft.distributed.world import World, joined, single_process

SIZES = (1, 2, 3)
NUM_RANDOM = 50
PATIENCE = timedelta(seconds=60)
"""How long a process waits for the others: one that waits in vain fails, and its test with it."""
LIMIT = 240.0  # seconds for all of it; some 25 are needed

Cuts = dict[str, list[int]]
"""For each parameter the borders of the ranks' flat ranges: one more than there are ranks."""


# --- sources ------------------------------------------------------------------------------------


def share(tensors: dict[str, Tensor], cuts: Cuts, rank: int, chunk: int) -> ScoreSource:
    """The rows of one rank, chunk by chunk; an empty chunk where it has none."""

    def read() -> Iterator[tuple[str, int, Tensor]]:
        for name, tensor in tensors.items():
            flat, (first, last) = tensor.view(-1), cuts[name][rank : rank + 2]
            for start in range(first, max(last, first + 1), chunk):
                yield name, start, flat[start : min(start + chunk, last)]

    return read


def by_rows(tensors: dict[str, Tensor], one: World) -> Cuts:
    """As the world itself shares out rows."""
    return {
        name: [one.own(tensor.shape, rank)[0] for rank in range(one.size)] + [tensor.numel()]
        for name, tensor in tensors.items()
    }


def anyhow(rng: np.random.Generator, tensors: dict[str, Tensor], size: int) -> Cuts:
    """Any borders; now and then ranks with nothing at all, or one with everything."""
    lone = rng.integers(0, size) if rng.random() < 0.2 else None
    cuts = {}
    for name, tensor in tensors.items():
        inner = np.sort(rng.integers(0, tensor.numel() + 1, size - 1))
        if lone is not None:
            inner = np.where(np.arange(size - 1) < lone, 0, tensor.numel())
        cuts[name] = [0, *inner.tolist(), tensor.numel()]
    return cuts


def scores_of_a_kind(rng: np.random.Generator, count: int, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    few = [0.0, -0.0, 1.0, -1.0, info.max, info.min, info.smallest_normal]
    kind = rng.choice(["normal", "few", "equal", "denormal", "zeros", "close", "negative"])
    normal = torch.from_numpy(rng.standard_normal(count)).to(dtype)
    if kind == "few":
        return torch.from_numpy(rng.choice(few, count)).to(dtype)
    if kind == "equal":
        return torch.full((count,), float(rng.choice(few)), dtype=dtype)
    if kind == "denormal":
        return denormals(dtype)[torch.from_numpy(rng.integers(0, 243, count))]
    if kind == "zeros":
        return torch.from_numpy(rng.choice([0.0, -0.0], count)).to(dtype)
    if kind == "close":
        return 1 + torch.from_numpy(rng.integers(-3, 4, count)).to(dtype) * info.eps
    return -normal.abs() if kind == "negative" else normal


# --- what the processes do ----------------------------------------------------------------------


@contextmanager
def sizes_of(sample: int, spare: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_reading, "SAMPLE", sample)
        patch.setattr(topk_reading, "SPARE", spare)
        yield


def differences(
    one: World, tensors: dict[str, Tensor], cuts: Cuts, k: int, chunk: int
) -> list[str]:
    """What of the selection is not as a full sort of all processes' scores says."""
    found = topk_signed(share(tensors, cuts, one.rank, chunk), k)
    indices, ordered = by_full_sort(tensors, k)
    expected = TopK(
        indices={name: torch.tensor(index, dtype=torch.int64) for name, index in indices.items()},
        threshold=float(ordered[k - 1]),
        next_score=None if k == len(ordered) else float(ordered[k]),
        num_selected=k,
        num_total=len(ordered),
        num_nonpositive=int((ordered[:k] <= 0).sum()),
    )
    return [
        f"{field}: {getattr(found, field)}, not {getattr(expected, field)}"
        for field in TopK.__dataclass_fields__
        if not same(getattr(found, field), getattr(expected, field))
    ]


def same(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, dict):
        return ours == theirs
    return list(ours) == list(theirs) and all(
        ours[name].dtype == torch.int64 and torch.equal(ours[name], theirs[name]) for name in ours
    )


def random_cases(one: World) -> Any:
    """Shapes, scores, budgets, borders and sizes of the sample from seeds; what went wrong."""
    wrong = []
    for seed in range(1000 * one.size, 1000 * one.size + NUM_RANDOM):
        rng = np.random.default_rng(seed)
        dtype = torch.float32 if rng.random() < 0.5 else torch.float64
        shapes = [rng.integers(0, (9, 12)).tolist() for _ in range(rng.integers(1, 6))] + [[1, 7]]
        flat = scores_of_a_kind(rng, sum(rows * width for rows, width in shapes), dtype)
        parts = flat.split([rows * width for rows, width in shapes])
        tensors = {
            f"p{i}": part.view(*shape)
            for i, (part, shape) in enumerate(zip(parts, shapes, strict=True))
        }
        cuts = by_rows(tensors, one) if rng.random() < 0.5 else anyhow(rng, tensors, one.size)
        total = flat.numel()
        k = [1, total, int(rng.integers(1, total + 1))][rng.integers(0, 3)]
        chunk = int(rng.integers(1, 80))
        with sizes_of(*((1 << 20, 1 << 20) if seed % 3 == 0 else rng.integers(1, 40, 2).tolist())):
            found = differences(one, tensors, cuts, k, chunk)
        wrong += [f"seed {seed}: {words}" for words in found]
    return wrong


def ties_across_borders(one: World) -> Any:
    """Every fourth score ties; the cut falls before, inside and after every rank's rows."""
    flat = torch.zeros(96)
    flat[::4] = 2.0
    tensors = split(flat, 30, 0, 41, 1)
    wrong = []
    for cuts in (by_rows(tensors, one), anyhow(np.random.default_rng(1), tensors, one.size)):
        for k in (1, 2, 5, 9, 13, 17, 21, 24, 25, 60, 95, 96):
            with sizes_of(16, 2):
                wrong += [f"k {k}: {words}" for words in differences(one, tensors, cuts, k, 20)]
    return wrong


def large_case(one: World) -> Any:
    """More scores than the real sample holds, and samples that must be thinned to one stride."""
    flat = torch.from_numpy(np.random.default_rng(5).standard_normal(1_500_000, np.float32))
    tensors = {"a": flat[:900_000].view(900, 1000), "b": flat[900_000:].view(6, 100_000)}
    by_row = by_rows(tensors, one)
    in_one = {name: [0] * one.size + [tensor.numel()] for name, tensor in tensors.items()}
    readings = [
        count_readings(share(tensors, cuts, one.rank, 100_003), 75_000) for cuts in (by_row, in_one)
    ]
    with sizes_of(1 << 12, 1 << 20):
        survey = topk_reading.surveyed(topk_reading.look(share(tensors, by_row, one.rank, 9973)))
    wrong = differences(one, tensors, by_row, 75_000, 99_991)
    return {"wrong": wrong, "readings": readings, "sampled": survey.sample.numel()}


def count_readings(source: ScoreSource, k: int) -> int:
    count = 0

    def counted() -> Iterator[tuple[str, int, Tensor]]:
        nonlocal count
        count += 1
        return source()

    topk_signed(counted, k)
    return count


def misleading_samples(one: World) -> Any:
    """What the samples meet says nothing of the rest: histograms of all processes' keys decide."""
    wrong, readings = [], {}
    for dtype in (torch.float32, torch.float64):
        for kind, sampled in (("low", -9.0), ("high", 9.0)):
            tensors = {"w": torch.zeros(600, 10, dtype=dtype)}
            cuts = by_rows(tensors, one)
            with sizes_of(64, 8):
                for rank in range(one.size):
                    with single_process():
                        at = (
                            topk_reading.look(share(tensors, cuts, rank, 1000)).at + cuts["w"][rank]
                        )
                    tensors["w"].view(-1)[torch.from_numpy(at)] = sampled
                rest = tensors["w"] != sampled
                random = np.random.default_rng(2).standard_normal(int(rest.sum()))
                tensors["w"][rest] = torch.from_numpy(random).to(dtype)
                for k in (1, 60, 3000, 5999, 6000):
                    wrong += differences(one, tensors, cuts, k, 1000)
                source = share(tensors, cuts, one.rank, 1000)
                readings[f"{kind} {dtype}"] = count_readings(source, 2000)
    return {"wrong": wrong, "readings": readings}


def words_of(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def failures(one: World) -> Any:
    """What each process says to a fault in the last one; after each the world must still work."""
    last = one.rank == one.size - 1
    tensors = {"a": torch.arange(40.0).view(8, 5), "b": torch.ones(12, 5)}
    cuts = by_rows(tensors, one)
    good = share(tensors, cuts, one.rank, 3)

    def changed(place: str, index: int, value: float) -> ScoreSource:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        copies[place].view(-1)[index] = value
        return share(copies, cuts, one.rank, 3)

    def later(reading: int) -> ScoreSource:
        """Other scores from that reading on, in the last process."""
        count = 0

        def read() -> Iterator[tuple[str, int, Tensor]]:
            nonlocal count
            count += 1
            return (changed("b", 59, 7.0) if last and count > reading else good)()

        return read

    def broken() -> Iterator[tuple[str, int, Tensor]]:
        yield "a", 0, torch.ones(0)
        raise OSError("the disk is gone")

    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    doubles = {name: tensor.double() for name, tensor in tensors.items()}
    turned = dict(reversed(tensors.items()))
    found = {
        "nan": lambda: topk_signed(changed("b", 59, torch.nan), 5),
        "infinity": lambda: topk_signed(changed("a", 39, -torch.inf), 5),
        "later": lambda: topk_signed(later(1), 5),
        "disk": lambda: topk_signed(broken if last else good, 5),
        "half": lambda: topk_signed(share(halves, cuts, one.rank, 3) if last else good, 5),
        "double": lambda: topk_signed(share(doubles, cuts, one.rank, 3) if last else good, 5),
        "order": lambda: topk_signed(share(turned, cuts, one.rank, 3) if last else good, 5),
        "whole": lambda: topk_signed(chunked(tensors), 5),
        "k": lambda: topk_signed(good, 5 + last),
        "large k": lambda: topk_signed(good, 101),
    }
    said = {}
    for name, work in found.items():
        said[name] = [words_of(work), differences(one, tensors, cuts, 5, 3)]
    with pytest.MonkeyPatch.context() as patch:
        if last:
            true = topk._settled
            patch.setattr(topk, "_settled", lambda *a: {n: i[1:] for n, i in true(*a).items()})
        words = words_of(lambda: topk_signed(good, 5))
    said["mask"] = [words, differences(one, tensors, cuts, 5, 3)]
    return said


JOBS: Sequence[Callable[[World], Any]] = (
    random_cases,
    ties_across_borders,
    large_case,
    misleading_samples,
    failures,
)


def process(rank: int, folder: Path) -> None:
    """One of the processes: every world that it is in, every job in each."""
    torch.set_num_threads(1)
    for size in reversed(SIZES):  # the largest first: no process has to wait for it
        if rank >= size:
            continue
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group(
            "gloo",
            init_method=(folder / f"meeting_{size}").as_uri(),
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )
        with joined(use_cuda=False) as one:
            assert (one.rank, one.size) == (rank, size)
            found = {job.__name__: job(one) for job in JOBS}
        dist.destroy_process_group()
        (folder / f"{size}_{rank}.json").write_text(json.dumps(found))


Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the processes wrote down, by the size of the world and rank."""
    folder = tmp_path_factory.mktemp("world")
    context = multiprocessing.get_context("spawn")
    every = [context.Process(target=process, args=(rank, folder)) for rank in range(max(SIZES))]
    for one in every:
        one.start()
    end = time.monotonic() + LIMIT
    while any(one.is_alive() for one in every) and time.monotonic() < end:
        if any(one.exitcode for one in every):
            break
        time.sleep(0.05)
    hung = [rank for rank, one in enumerate(every) if one.is_alive()]
    codes = [one.exitcode for one in every]
    for one in every:
        one.kill()
        one.join()
    assert not hung and not any(codes), f"exit codes {codes}; still alive: ranks {hung}"
    return {
        size: [json.loads((folder / f"{size}_{rank}.json").read_text()) for rank in range(size)]
        for size in SIZES
    }


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("job", ["random_cases", "ties_across_borders"])
def test_all_processes_have_the_answer_of_one(found: Found, size: int, job: str) -> None:
    assert len(found[size]) == size
    for rank, said in enumerate(found[size]):
        assert said[job] == [], f"rank {rank}"


@pytest.mark.parametrize("size", SIZES)
def test_samples_of_all_processes_bracket_the_answer_at_once(found: Found, size: int) -> None:
    for said in found[size]:
        assert said["large_case"]["wrong"] == []
        assert said["large_case"]["readings"] == [2, 2]  # by rows, and all in the last process
        assert 1 << 11 <= said["large_case"]["sampled"] <= (1 << 12) + size


@pytest.mark.parametrize("size", SIZES)
def test_samples_that_mislead_cost_readings_and_never_the_answer(found: Found, size: int) -> None:
    every = [said["misleading_samples"] for said in found[size]]
    for said in every:
        assert said["wrong"] == [] and said["readings"]
        assert said["readings"] == every[0]["readings"]
        for case, count in said["readings"].items():
            # a look, a guess, two or four histograms, the answer; a low bracket may hold it already
            least, most = (2 if "low" in case else 4), (5 if "32" in case else 7)
            assert least <= count <= most, case


FAULTS = {
    "nan": ("CheckError", "score of 'b' at flat index 59 is nan"),
    "infinity": ("CheckError", "score of 'a' at flat index 39 is -inf"),
    "later": ("RunError", "yielded different scores on a later reading"),
    "disk": ("OSError", "the disk is gone"),
    "half": ("ValueError", "scores of 'a' are torch.bfloat16"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", SIZES)
def test_what_stops_one_process_stops_all(found: Found, size: int, fault: str) -> None:
    """The one with the fault says what it is; the others too, and whose it is."""
    kind, words = FAULTS[fault]
    for rank, said in enumerate(found[size]):
        (raised, message), after = said["failures"][fault]
        assert words in message
        assert after == [], "the next selection in this world went wrong"
        if rank == size - 1:
            assert raised == kind and "another process" not in message
        else:
            assert raised == "RunError"
            assert message.startswith(f"the selection failed in another process, rank {size - 1}: ")
            assert f"{kind}: " in message


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1])
def test_shares_that_do_not_fit_are_refused_by_all(found: Found, size: int) -> None:
    last = size - 1
    expected = {
        "double": f"rank {last} has torch.float64 scores of 2 parameters (a, b), and rank 0 has",
        "order": f"rank {last} has torch.float32 scores of 2 parameters (b, a), and rank 0 has",
        "whole": "rank 1 has 'a' from flat index 0, but an earlier rank has it up to 40; each",
        "k": f"the number of scores to select differs between rank 0 (5) and rank {last} (6)",
        "large k": "k is 101, but there are only 100 scores to select from",
        "mask": "the mask differs between rank 0 (",
    }
    for fault, words in expected.items():
        messages = [said["failures"][fault] for said in found[size]]
        assert all(words in message for (_, message), _ in messages), messages
        assert all(one == other for one, other in pairwise(messages))
        assert all(after == [] for _, after in messages)
