"""topk.py against a full stable sort, on inputs chosen to break it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import chunked
from torch import Tensor

from dualsft.algorithm import topk_reading
from dualsft.algorithm.topk import top_b, topk_signed
from dualsft.algorithm.topk_reading import ScoreSource
from dualsft.errors import RunError

DTYPES = [torch.float32, torch.float64]


def by_full_sort(tensors: dict[str, Tensor], k: int) -> tuple[dict[str, list[int]], np.ndarray]:
    """Indices by one stable descending sort of everything, and all scores in that order."""
    flat = torch.cat([t.reshape(-1) for t in tensors.values()]).numpy()
    order = np.argsort(-flat, kind="stable")
    chosen = np.sort(order[:k])
    indices, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel()
        indices[name] = (chosen[(chosen >= start) & (chosen < stop)] - start).tolist()
        start = stop
    return indices, flat[order]


def assert_same_as_sort(tensors: dict[str, Tensor], k: int, chunk: int = 1 << 22) -> None:
    result = topk_signed(chunked(tensors, chunk), k)
    indices, ordered = by_full_sort(tensors, k)
    assert {name: index.tolist() for name, index in result.indices.items()} == indices
    assert all(index.dtype == torch.int64 for index in result.indices.values())
    assert result.threshold == ordered[k - 1]
    assert result.next_score == (None if k == len(ordered) else ordered[k])
    assert (result.num_selected, result.num_total) == (k, len(ordered))
    assert result.num_nonpositive == int((ordered[:k] <= 0).sum())


def split(flat: Tensor, *sizes: int) -> dict[str, Tensor]:
    rest = flat.numel() - sum(sizes)
    return {f"p{i}": part for i, part in enumerate(flat.split([*sizes, rest]))}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def denormals(dtype: torch.dtype) -> Tensor:
    tiny = torch.finfo(dtype).smallest_normal
    steps = torch.arange(-40, 41, dtype=dtype)
    smallest = 2.0**-149 if dtype == torch.float32 else 2.0**-1074
    assert (steps[steps != 0] * smallest != 0).all(), "denormals are flushed to zero here"
    return torch.cat([steps * smallest, steps * tiny, steps * tiny / 64])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
@pytest.mark.parametrize(
    "kind", ["random", "equal", "zero", "negative", "denormal", "zeros", "extreme", "close"]
)
def test_equals_full_sort(kind: str, chunk: int, dtype: torch.dtype) -> None:
    random = torch.randn(243, generator=generator(), dtype=dtype)
    info = torch.finfo(dtype)
    scores = {
        "random": random,
        "equal": torch.full((243,), -1.5, dtype=dtype),
        "zero": torch.zeros(243, dtype=dtype),
        "negative": -random.abs() - info.eps,
        "denormal": denormals(dtype),
        "zeros": torch.tensor([0.0, -0.0, -0.0, 1.0, 0.0, -0.0, -1.0, -0.0, 0.0], dtype=dtype),
        "extreme": torch.tensor([info.max, info.min, 1.0, info.max, info.min, -0.0], dtype=dtype),
        "close": 1 + torch.randint(-3, 4, (243,), generator=generator()).to(dtype) * info.eps,
    }[kind]
    tensors = split(scores, 0, scores.numel() // 3, 0, 1)
    for k in {1, 2, scores.numel() // 2, scores.numel() - 1, scores.numel()}:
        assert_same_as_sort(tensors, k, chunk)


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 3.0e38])


def test_ten_million_against_a_full_sort() -> None:
    flat = torch.randn(10**7, generator=generator()) * torch.randn(10**7, generator=generator(1))
    order = torch.sort(flat, descending=True, stable=True)
    for chunk, k in [(1 << 20, 500_000), (999_983, 9_000_000)]:
        readings = []
        source = chunked(split(flat, 123, 6_000_000), chunk)
        result = topk_signed(lambda: (readings.append(1), source())[1], k)  # noqa: B023
        assert len(readings) == 2, "the sample is right at once"
        expected = order.indices[:k].sort().values
        offsets = [0, 123, 6_000_123]
        found = torch.cat(
            [i + start for i, start in zip(result.indices.values(), offsets, strict=True)]
        )
        assert torch.equal(found, expected)
        assert result.threshold == order.values[k - 1].item()
        assert result.next_score == order.values[k].item()
        assert result.num_nonpositive == int((order.values[:k] <= 0).sum())


def against_the_sample(size: int, chunk: int, sampled: float, dtype: torch.dtype) -> Tensor:
    """Random scores, except that everything the sample meets is one value."""
    at = topk_reading.look(chunked({"w": torch.zeros(size)}, chunk)).at
    assert 8 <= len(at) < size // 8
    scores = torch.randn(size, generator=generator(), dtype=dtype)
    scores[torch.from_numpy(at)] = sampled
    return scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "low", "high", "equal", "two", "near"])
def test_a_sample_that_misleads_costs_readings_and_never_the_answer(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk_reading, "SAMPLE", 64)
    monkeypatch.setattr(topk_reading, "SPARE", 8)
    size, chunk = 6000, 1000
    scores = {
        "random": torch.randn(size, generator=generator(1), dtype=dtype),
        "low": against_the_sample(size, chunk, -9.0, dtype),
        "high": against_the_sample(size, chunk, 9.0, dtype),
        "equal": torch.full((size,), -2.5, dtype=dtype),
        "two": torch.arange(size, dtype=dtype) % 2,
        "near": 1 + torch.randint(-3, 4, (size,), generator=generator()) * torch.finfo(dtype).eps,
    }[kind].to(dtype)
    assert topk_reading.look(chunked({"w": scores}, chunk)).keys.numel() <= 64
    for k in (1, 60, 2999, 3000, 3001, 5999, 6000):
        assert_same_as_sort({"w": scores}, k, chunk)
    readings = 0

    def source() -> Iterator[tuple[str, int, Tensor]]:
        nonlocal readings
        readings += 1
        return chunked({"w": scores}, chunk)()

    topk_signed(source, 2000)
    most = 5 if dtype == torch.float32 else 7  # a look, a guess, two or four histograms, the answer
    assert 3 < readings <= most


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(
        hnp.arrays(np.float32, st.integers(0, 60), elements=st.one_of(finite32, few)),
        min_size=1,
        max_size=5,
    ).filter(lambda parts: sum(part.size for part in parts) > 0),
    fraction=st.floats(0, 1),
    chunk=st.integers(1, 70),
    sample=st.integers(1, 40) | st.just(1 << 20),
    wide=st.booleans(),
)
def test_equals_full_sort_on_anything_with_any_sample(
    parts: list[np.ndarray], fraction: float, chunk: int, sample: int, wide: bool
) -> None:
    tensors = {f"p{i}": torch.from_numpy(part) for i, part in enumerate(parts)}
    if wide:  # products of two fp32 numbers fill the low digits of an fp64 key
        tensors = {name: tensor.double() * 1.1 for name, tensor in tensors.items()}
    total = sum(tensor.numel() for tensor in tensors.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_reading, "SAMPLE", sample)
        patch.setattr(topk_reading, "SPARE", 1)
        assert_same_as_sort(tensors, max(1, int(fraction * total)), chunk)


@pytest.mark.slow
def test_hundred_million_against_a_partition() -> None:
    n, k = 10**8, 5 * 10**6
    flat = torch.randn(n, generator=generator())
    flat *= torch.randn(n, generator=generator(1))
    result = topk_signed(chunked(split(flat, 40_000_001)), k)
    values = flat.numpy()
    threshold = np.partition(values, n - k)[n - k]
    above = np.flatnonzero(values > threshold)
    ties = np.flatnonzero(values == threshold)[: k - above.size]
    expected = np.sort(np.concatenate([above, ties]))
    found = np.concatenate(
        [result.indices["p0"].numpy(), result.indices["p1"].numpy() + 40_000_001]
    )
    assert np.array_equal(found, expected)
    assert result.threshold == threshold
    assert result.num_selected == k and result.num_total == n


def test_the_source_is_read_in_chunks_a_few_times_and_never_kept() -> None:
    scores = torch.randn(1000, generator=generator())
    readings = 0

    def source() -> Iterator[tuple[str, int, Tensor]]:
        nonlocal readings
        readings += 1
        buffer = torch.empty(100)
        for start in range(0, 1000, 100):
            buffer.copy_(scores[start : start + 100])
            yield "w", start, buffer
            buffer.fill_(torch.nan)

    result = topk_signed(source, 50)
    assert readings == 2
    assert result.indices["w"].tolist() == by_full_sort({"w": scores}, 50)[0]["w"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_scores_are_refused_by_name_and_index(bad: float, dtype: torch.dtype) -> None:
    tensors = {"good": torch.ones(20, dtype=dtype), "layer.w": torch.ones(4, 5, dtype=dtype)}
    tensors["layer.w"][3, 1] = bad
    for chunk in (3, 1 << 22):
        with pytest.raises(RunError, match=rf"'layer\.w' at flat index 16 is {bad}"):
            topk_signed(chunked(tensors, chunk), 1)


def test_nan_with_the_sign_bit_is_refused() -> None:
    bits = torch.tensor([0, -1, 0], dtype=torch.int32)  # -1 is a NaN with every bit set
    with pytest.raises(RunError, match="'w' at flat index 1 is nan"):
        topk_signed(chunked({"w": bits.view(torch.float32)}), 2)


def test_impossible_k_is_refused_with_both_numbers() -> None:
    source = chunked({"w": torch.ones(6), "empty": torch.ones(0)})
    with pytest.raises(ValueError, match="k is 0"):
        topk_signed(source, 0)
    with pytest.raises(ValueError, match="k is 7, but there are only 6"):
        topk_signed(source, 7)
    with pytest.raises(ValueError, match="k is 1, but there are only 0"):
        topk_signed(chunked({}), 1)


def test_bad_sources_are_refused() -> None:
    one, two = torch.ones(4), torch.ones(4, dtype=torch.float64)

    def fixed(*chunks: tuple[str, int, Tensor]) -> ScoreSource:
        return lambda: iter(chunks)

    with pytest.raises(ValueError, match=r"'b' are torch.float64.*earlier ones are torch.float32"):
        topk_signed(fixed(("a", 0, one), ("b", 0, two)), 1)
    with pytest.raises(ValueError, match="'a' are torch.bfloat16"):
        topk_signed(fixed(("a", 0, one.bfloat16())), 1)
    with pytest.raises(ValueError, match=r"'a' has shape \(2, 2\)"):
        topk_signed(fixed(("a", 0, one.view(2, 2))), 1)
    with pytest.raises(ValueError, match="'a' at flat offset 0 is out of order"):
        topk_signed(fixed(("a", 4, one), ("a", 0, one)), 1)
    with pytest.raises(ValueError, match="'a' at flat offset 4 is out of order"):
        topk_signed(fixed(("a", 0, one), ("b", 0, one), ("a", 4, one)), 1)


@pytest.mark.parametrize("changed", [1, 2, 3, 4])
def test_a_change_on_any_later_reading_is_refused(
    changed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk_reading, "SAMPLE", 64)
    monkeypatch.setattr(topk_reading, "SPARE", 8)
    same, other = torch.ones(5000), torch.full((5000,), 2.0)
    order = [other if reading == changed else same for reading in range(5)]
    readings = iter(order)
    with pytest.raises(RunError, match="yielded different scores"):
        topk_signed(lambda: iter([("w", 0, next(readings))]), 500)
    assert len(list(readings)) == 4 - changed  # found on the very reading that changed


def test_a_source_that_grows_shorter_is_refused() -> None:
    readings = iter([torch.ones(4), torch.ones(3)])
    with pytest.raises(RunError, match="yielded different scores"):
        topk_signed(lambda: iter([("w", 0, next(readings))]), 2)


def test_top_b_is_signed_and_breaks_ties_by_source_row() -> None:
    scores = np.array([0.0, -5.0, 2.0, -0.0, 2.0, 1.0])
    rows = [30, 10, 9, 7, 4, 100]
    assert top_b(scores, rows, 6).tolist() == [4, 2, 5, 3, 0, 1]
    assert top_b(torch.from_numpy(scores), np.array(rows), 1).tolist() == [4]


@given(
    scores=hnp.arrays(np.float64, st.integers(1, 40), elements=st.sampled_from([-1.0, 0.0, 0.5])),
    seed=st.integers(0, 99),
)
def test_top_b_equals_sorted(scores: np.ndarray, seed: int) -> None:
    rows = np.random.default_rng(seed).permutation(scores.size)
    expected = sorted(range(scores.size), key=lambda i: (-scores[i], rows[i]))
    for b in range(1, scores.size + 1):
        assert top_b(scores, rows, b).tolist() == expected[:b]


def test_top_b_refuses_bad_input() -> None:
    scores = np.array([1.0, np.nan, 3.0])
    with pytest.raises(RunError, match=r"position 1 \(tie order 8\) is nan"):
        top_b(scores, [5, 8, 9], 1)
    with pytest.raises(RunError, match="position 0 .* is inf"):
        top_b(np.array([np.inf]), [0], 1)
    for b in (0, 4):
        with pytest.raises(ValueError, match=f"b is {b}; it must be from 1 to the 3"):
            top_b(np.ones(3), [0, 1, 2], b)
    with pytest.raises(ValueError, match=r"shape \(3,\) and tie_order of shape \(2,\)"):
        top_b(np.ones(3), [0, 1], 1)
