"""What makes SparseAdamW small: compact indices, low halves, moments in fewer bits, offloading."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_equal, snapshot
from test_optim import plain_arithmetic  # noqa: F401
from torch import Tensor, nn

from dualsft.train import compact
from dualsft.train import optimizer as optim
from dualsft.train import step as adam_step
from dualsft.train.compact import BUCKET, MOMENTS, CompactIndex, Moments
from dualsft.train.optimizer import SparseAdamW

SHAPES = {"w": (300, 251), "small": (7,), "left_out": (4, 4)}


class Toy(nn.Module):
    """Parameters whose gradients are given: no product, so that every dtype runs anywhere."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=draw).to(dtype)
            self.register_parameter(name, nn.Parameter(value))

    def backward(self, step: int) -> None:
        draw = torch.Generator().manual_seed(100 + step)
        total = torch.zeros((), dtype=torch.float64)
        for _, p in self.named_parameters():
            size = torch.logspace(-7, -2, p.numel(), dtype=torch.float64).view(p.shape)
            slope = size * torch.randn(p.shape, generator=draw, dtype=torch.float64)
            total = total + (p.double() * slope).sum()
        total.backward()


def some_indices(share: float = 0.3, seed: int = 5) -> dict[str, Tensor | None]:
    draw = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(SHAPES["w"], generator=draw) < share).view(-1)
    return {"w": chosen.nonzero().view(-1), "small": None}


def made(
    dtype: torch.dtype, moments: Moments = "float32", indices: Any = "some", **options: Any
) -> tuple[Toy, SparseAdamW]:
    model = Toy(dtype)
    chosen = some_indices() if indices == "some" else indices
    values: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "moments": moments} | options
    return model, SparseAdamW(model.named_parameters(), chosen, free_gradients=True, **values)


def train(model: Toy, optimizer: SparseAdamW, steps: range) -> None:
    for step in steps:
        model.backward(2 * step)
        if step % 2:
            model.backward(2 * step + 1)
        optimizer.clip_grad_norm(0.05)
        optimizer.step()
        optimizer.zero_grad()


def bits_of(model: nn.Module, optimizer: SparseAdamW) -> dict[str, Tensor]:
    state = {
        f"{name}.{key}": t.clone()
        for name, p in model.named_parameters()
        for key, t in optimizer.state.get(p, {}).items()
    }
    return state | snapshot(model)


# --- Compact indices ---------------------------------------------------------------------------


@st.composite
def index_sets(draw: Any) -> tuple[int, list[int]]:
    """A size around bucket borders, and positions that crowd around them too."""
    size = draw(st.integers(1, 4 * BUCKET + 3))
    near = [b * BUCKET + d for b in range(5) for d in (-2, -1, 0, 1, BUCKET // 2)]
    position = st.one_of(st.integers(0, size - 1), st.sampled_from(near))
    chosen = draw(st.sets(position, max_size=60))
    return size, sorted(i for i in chosen if 0 <= i < size)


@settings(max_examples=150, deadline=None)
@given(index_sets(), st.data())
def test_compact_indices_give_back_every_range(case: tuple[int, list[int]], data: Any) -> None:
    size, chosen = case
    index = torch.tensor(chosen, dtype=torch.int64)
    compact = CompactIndex.encode(index, size)
    assert torch.equal(compact.decode(), index)
    first = data.draw(st.integers(0, len(chosen)))
    last = data.draw(st.integers(first, len(chosen)))
    assert torch.equal(compact.decode(first, last), index[first:last])
    begin, end = compact.buckets(first, last)
    assert all(begin <= i // BUCKET < end for i in chosen[first:last])
    assert torch.equal(compact.gather(torch.arange(size)), index)
    num_buckets = -(-size // BUCKET)
    assert compact.nbytes == 2 * len(chosen) + 8 * (num_buckets + 1)


# --- Low halves of the masters -----------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 2**32 - 1),
            st.sampled_from([0, 1 << 31, 1, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x00008000]),
            st.builds(
                lambda h, d: (h << 16) + 0x8000 + d, st.integers(0, 65534), st.integers(-1, 1)
            ),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_weight_and_low_half_give_the_master_back(patterns: list[int]) -> None:
    """Any bits: denormals, both zeros, the largest finite numbers, NaNs, halves of a step."""
    signed = torch.tensor([b - (1 << 32) if b >> 31 else b for b in patterns]).to(torch.int32)
    master = signed.view(torch.float32)
    weight, low = adam_step.split_halves(master)
    assert weight.dtype == torch.bfloat16 and low.dtype == torch.int16
    assert torch.equal(adam_step.join_halves(weight, low).view(torch.int32), signed)
    nearest, tie = master.bfloat16(), (signed & 0xFFFF) == 0x8000
    usual = ~tie & ~master.isnan()
    assert torch.equal(weight[usual], nearest[usual]), "round to nearest, but for exact ties"
    again = adam_step.split_halves(adam_step.join_halves(nearest, torch.zeros_like(low)))
    kept = ~master.isnan()
    assert torch.equal(again[0][kept], nearest[kept]) and not again[1][kept].any()


# --- Moments in fewer bits ---------------------------------------------------------------------


def hashed(count: int, step: int = 1) -> Tensor:
    key = compact.noise_key(3, step, 0)
    return compact.noise(key, 0, count, torch.device("cpu"))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.uint8])
def test_random_rounding_has_the_right_mean(kind: torch.dtype) -> None:
    """65,536 roundings of one number average to it, within four standard errors."""
    count = 1 << 16
    top = torch.zeros(1, dtype=torch.int32)
    for m, v in [(3e-3, 1.7e-5), (-2.1e-4, 3e-7), (5.5e-6, 1e-3), (0.3, 0.9)]:
        first, second = torch.full((count,), m), torch.full((count,), v)
        codes = compact.encode(first, second, kind, top, hashed(count))
        got = compact.decode(*codes, top)
        for values, true in zip(got, (first[0], second[0]), strict=True):
            spread = float(values.std()) / count**0.5
            assert abs(float(values.mean()) - float(true)) <= 4 * spread + 1e-7 * abs(float(true))
            assert values.unique().numel() >= 2


@settings(max_examples=200, deadline=None)
@given(st.floats(-59, 4), st.floats(-11, 2.8), st.booleans(), st.integers(0, 10**6))
def test_int8_codes_are_within_an_eighth_of_an_octave(
    octave: float, ratio: float, negative: bool, step: int
) -> None:
    """v within 2^(1/4) and m within 2^(1/8) of what was coded, over the whole range."""
    v = torch.tensor([2.0**octave])
    m = v.sqrt() * 2.0**ratio * (-1 if negative else 1)
    top = torch.tensor([2], dtype=torch.int32)
    codes = compact.encode(m, v, torch.uint8, top, hashed(1, step))
    got_m, got_v = compact.decode(*codes, top)
    assert abs(float((got_v / v).log2())) <= 0.2501
    assert abs(float((got_m / m).log2())) <= 0.1251


def test_int8_zero_stays_zero_and_small_stays_positive() -> None:
    m = torch.tensor([0.0, 0.0, 1e-30, 1e-12, 50.0, -50.0])
    v = torch.tensor([0.0, 1e-4, 1e-38, 1e-30, 1.0, 1.0])
    top = torch.zeros(1, dtype=torch.int32)
    codes = compact.encode(m, v, torch.uint8, top, hashed(6))
    got_m, got_v = compact.decode(*codes, top)
    assert got_m[0] == got_v[0] == got_m[1] == 0
    assert (got_v[1:] > 0).all() and torch.equal(got_v[2:4], torch.full((2,), 2.0**-63.5))
    assert got_m[4] == 16 and got_m[5] == -16, "saturates at 2^4 roots of v"


def test_int8_codes_move_with_the_largest_gradient_without_a_change() -> None:
    """The grid stays: coded numbers are coded again to themselves, whatever the new top."""
    low = torch.tensor([-6], dtype=torch.int32)
    second = torch.arange(1, 256, dtype=torch.uint8).repeat(2)
    first = torch.cat([torch.arange(1, 128, dtype=torch.uint8)] * 5)[: second.numel()]
    m, v = compact.decode(first, second, low)
    high = compact.raised_top(low, torch.tensor(0.7))
    assert high.tolist() == [0] and compact.raised_top(high, torch.tensor(0.0)).tolist() == [0]
    assert compact.raised_top(high, torch.tensor(1e-3)).tolist() == [0], "it never falls"
    codes = compact.encode(m, v, torch.uint8, high, hashed(second.numel()))
    got_m, got_v = compact.decode(*codes, high)
    kept = second > 48  # what 6 octaves of sqrt(v) leave in the range
    assert kept.sum() > 400
    assert torch.equal(got_v[kept], v[kept]) and torch.equal(got_m[kept], m[kept])


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_the_second_moment_does_not_freeze(moments: Moments) -> None:
    """Gradients of one size: the mean of v follows 1 - beta2^t, though a step moves it by 0.1 %."""
    p = nn.Parameter(torch.ones(4096))
    optimizer = SparseAdamW([("p", p)], None, lr=0.0, moments=moments)
    for _ in range(600):
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = 0.25 * (1 - 0.999**600)
    mean = float(optimizer.second_moment("p").mean())
    assert mean == pytest.approx(expected, rel=0.02)
    nearest = torch.tensor(0.0, dtype=torch.bfloat16)
    for _ in range(600):
        nearest = (nearest.float() * 0.999 + 0.001 * 0.25).bfloat16()
    assert float(nearest) < 0.9 * expected, "rounded to nearest it would stop"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_fewer_bits_take_nearly_the_same_steps(moments: Moments, dtype: torch.dtype) -> None:
    model, exact = made(dtype)
    other, rough = made(dtype, moments)
    start = exact.masters["w"].clone()
    train(model, exact, range(30))
    train(other, rough, range(30))
    way = exact.masters["w"] - start
    difference = rough.masters["w"] - exact.masters["w"]
    assert float(difference.norm() / way.norm()) < 0.12
    root = exact.second_moment("w").sqrt()
    error = (rough.second_moment("w").sqrt() - root) / root
    assert float(error.square().mean().sqrt()) < (0.02 if moments == "bfloat16" else 0.2)


# --- The optimizer -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moments", MOMENTS)
def test_chunks_and_offloading_change_no_bit(
    dtype: torch.dtype, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made(dtype, moments)
    train(model, optimizer, range(4))
    for module in (adam_step, compact):
        monkeypatch.setattr(module, "CHUNK", 1000)
    monkeypatch.setattr(optim, "PART", 7001)
    other, offloaded = made(dtype, moments, offload=True)
    train(other, offloaded, range(4))
    assert_equal(bits_of(model, optimizer), bits_of(other, offloaded))
    assert not torch.equal(model.get_parameter("w"), Toy(dtype).get_parameter("w"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("whole", [False, True])
def test_resuming_from_a_file_continues_bit_for_bit(
    dtype: torch.dtype, moments: Moments, whole: bool
) -> None:
    model, optimizer = made(dtype, moments, indices=None if whole else "some")
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    train(model, optimizer, range(5, 9))
    other, resumed = made(dtype, moments, indices=some_indices(0.5, seed=8))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(other, resumed, range(5, 9))
    assert_equal(bits_of(model, optimizer), bits_of(other, resumed))


def test_the_seed_of_the_rounding_counts() -> None:
    runs = [made(torch.float32, "int8", seed=seed) for seed in (0, 0, 1)]
    for model, optimizer in runs:
        train(model, optimizer, range(3))
    same, again, other = (bits_of(*run) for run in runs)
    assert_equal(same, again)
    assert not torch.equal(same["w.exp_avg"], other["w.exp_avg"])


def test_moments_of_another_type_are_refused() -> None:
    model, optimizer = made(torch.float32, "bfloat16")
    train(model, optimizer, range(1))
    _, other = made(torch.float32, "int8")
    with pytest.raises(ValueError, match=r"exp_avg of 'w' .*bfloat16; .*uint8 \(moments='int8'\)"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="moments is 'int4'; it must be one of float32"):
        made(torch.float32, "int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bytes_held_are_the_documented_ones(dtype: torch.dtype, moments: Moments) -> None:
    model, optimizer = made(dtype, moments)
    masked, whole = optimizer.count("w"), optimizer.count("small")
    pointers = 8 * (-(-model.get_parameter("w").numel() // BUCKET) + 1)
    assert optimizer.nbytes == 2 * masked + pointers
    model.backward(0)
    gradients = dtype.itemsize * (masked + whole)
    assert optimizer.nbytes == 2 * masked + pointers + gradients
    optimizer.step()
    optimizer.zero_grad()
    scalars = 2 * (4 + (4 if moments == "int8" else 0))
    both = 16 if dtype == torch.float64 and moments == "float32" else compact.BYTES[moments]
    each = both + {torch.bfloat16: 2, torch.float16: 4}.get(dtype, 0)
    assert optimizer.nbytes == (each + 2) * masked + each * whole + pointers + scalars
    reachable = [t for held in optimizer.state.values() for t in held.values()]
    reachable += [t for c in optimizer._indices.values() if c for t in (c.offsets, c.pointers)]
    assert optimizer.nbytes == sum(t.nbytes for t in reachable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_is_applied_once_however_it_is_called(dtype: torch.dtype) -> None:
    """Twice is as once with the smaller limit; a backward after it adds to what was clipped."""
    model, optimizer = made(dtype)
    model.backward(0)
    pending = {name: grad.double() for name, grad in optimizer.gradients.items()}
    norm = float(optimizer.clip_grad_norm(1e-3))
    assert norm == pytest.approx(sum(float(g.square().sum()) for g in pending.values()) ** 0.5)
    assert float(optimizer.clip_grad_norm(1e-4)) == pytest.approx(1e-3, rel=1e-2)
    model.backward(1)
    other, fresh = made(dtype)
    other.backward(1)
    for name, grad in optimizer.gradients.items():
        clipped = pending[name] * (1e-4 / norm)
        expected = clipped + fresh.gradients[name].double()
        torch.testing.assert_close(grad.double(), expected, rtol=1e-2, atol=1e-9)
    optimizer.step()
    assert optimizer.num_updates("w") == 1


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_moving_mask_carries_codes_and_low_halves(moments: Moments) -> None:
    model, optimizer = made(torch.bfloat16, moments)
    train(model, optimizer, range(3))
    index = optimizer.indices["w"]
    assert index is not None
    masters, second = optimizer.masters["w"], optimizer.second_moment("w")
    optimizer.set_indices({"w": torch.cat([index[::2], index[-1:] + 1]).unique()})
    moved = optimizer.indices["w"]
    assert moved is not None
    stayed = torch.isin(moved, index)
    assert 1000 < stayed.sum() < index.numel()
    before = torch.isin(index, moved)
    assert torch.equal(optimizer.masters["w"][stayed], masters[before])
    assert torch.equal(optimizer.second_moment("w")[stayed], second[before])
    assert not optimizer.second_moment("w")[~stayed].any()
    assert optimizer.num_updates("w") == 3


def test_second_moments_and_masters_can_be_read_in_pieces() -> None:
    model, optimizer = made(torch.bfloat16, "int8")
    assert not optimizer.second_moment("w").any() and optimizer.num_updates("w") == 0
    train(model, optimizer, range(2))
    for read in (optimizer.master, optimizer.second_moment):
        assert torch.equal(read("w")[100:7000], read("w", 100, 7000))
        assert read("w").dtype == torch.float32


# --- Kernels -----------------------------------------------------------------------------------


def test_kernels_agree_with_the_plain_path() -> None:
    """In a process of its own: Triton decides at import that it interprets."""
    tests = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(tests.parent / "src")
    command = [sys.executable, str(tests / "adam_kernel_checks.py"), "cpu"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("agrees") == 24
