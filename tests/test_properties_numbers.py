"""Properties of the numbers: top-k, delta, vectors and what is saved; for any input.

What is compared is bits, not approximations, wherever bits are what is promised.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from places import place
from properties import Properties, chunked, finite, randoms, scratch, tame, texts
from torch import Tensor, nn

from dualsft.algorithm.scores import bounds
from dualsft.algorithm.topk import top_b, topk_signed
from dualsft.errors import ConfigError
from dualsft.model.delta import Delta, apply_delta, extract_delta, take_delta
from dualsft.storage.manifest import (
    Fingerprint,
    atomic_write_bytes,
    jsonable,
    read_manifest,
    render_manifest,
    sha256_file,
)
from dualsft.storage.vectors import ParamVector

PROPERTIES = Properties()


# --- top-k ---------------------------------------------------------------------------------------

score_arrays = hnp.arrays(
    np.float32, st.integers(2, 40), elements=finite | st.sampled_from([0.0, -0.0, 1.0])
)


def picked(scores: np.ndarray, k: int, cuts: Sequence[int] = (), chunk: int = 7) -> list[int]:
    """Flat positions of the top k, with the scores cut into parameters at `cuts`."""
    borders = [0, *sorted(cuts), scores.size]
    parts = {
        f"p{i}": torch.from_numpy(scores[a:b].copy())
        for i, (a, b) in enumerate(zip(borders, borders[1:], strict=False))
    }
    found = topk_signed(chunked(parts, chunk), k).indices
    return [int(i) + borders[n] for n, name in enumerate(parts) for i in found[name]]


@PROPERTIES.holds(scores=score_arrays, data=st.data())
def borders_and_chunks_change_no_selection(scores: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, scores.size))
    cuts = data.draw(st.lists(st.integers(0, scores.size), max_size=4))
    chunk = data.draw(st.integers(1, 50))
    assert picked(scores, k, cuts, chunk) == picked(scores, k, (), 1 << 20)


@PROPERTIES.holds(scores=score_arrays, data=st.data())
def a_larger_budget_only_adds(scores: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, scores.size - 1))
    small, large = set(picked(scores, k)), set(picked(scores, k + 1))
    assert small < large and (len(small), len(large)) == (k, k + 1)


@PROPERTIES.holds(scores=score_arrays, data=st.data())
def shards_hold_the_global_top(scores: np.ndarray, data: st.DataObject) -> None:
    """The best k of all are among the best k of each shard, ties and all."""
    k = data.draw(st.integers(1, scores.size))
    cut = data.draw(st.integers(1, scores.size - 1))
    left = picked(scores[:cut], min(k, cut))
    right = [cut + i for i in picked(scores[cut:], min(k, scores.size - cut))]
    pool = sorted([*left, *right])
    assert [pool[i] for i in picked(scores[pool], k)] == picked(scores, k)


@PROPERTIES.holds(scores=score_arrays, power=st.integers(-8, 8), data=st.data())
def a_power_of_two_changes_no_selection(
    scores: np.ndarray, power: int, data: st.DataObject
) -> None:
    wide = scores.astype(np.float64)  # so that no scaling rounds
    k = data.draw(st.integers(1, scores.size))
    assert picked(np.ldexp(wide, power), k) == picked(wide, k)


@PROPERTIES.holds(scores=score_arrays, rng=randoms, data=st.data())
def the_best_examples_do_not_depend_on_their_order(
    scores: np.ndarray, rng: random.Random, data: st.DataObject
) -> None:
    b = data.draw(st.integers(1, scores.size))
    order = rng.sample(range(scores.size), scores.size)
    rows = np.arange(scores.size)
    best = top_b(scores, rows, b)
    again = top_b(scores[order], rows[order], b)
    assert [order[i] for i in again] == best.tolist()


@PROPERTIES.holds(
    data=hnp.arrays(np.float64, (6, 4), elements=tame),
    direction=hnp.arrays(np.float64, (2, 2), elements=tame),
)
def the_bound_covers_every_dot_product(data: np.ndarray, direction: np.ndarray) -> None:
    """|Σ_t ε_t · R a_t| ≤ ‖R‖ Σ_t ‖ε_t‖ ‖a_t‖, as the certificate adds it up."""
    outputs, inputs = data[:, :2], data[:, 2:]
    exact = abs(float((outputs * (inputs @ direction.T)).sum()))
    inner = (np.linalg.norm(outputs, axis=1) * np.linalg.norm(inputs, axis=1)).sum()
    [bound] = bounds(np.array([[inner]]), np.array([np.linalg.norm(direction)]))
    assert exact <= bound * (1 + 1e-12)


# --- delta ---------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2)}


class Weights(nn.Module):
    """A model that is nothing but parameters."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def bits(self) -> dict[str, list[int]]:
        sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        return {
            name: p.detach().view(-1).view(sizes[p.element_size()]).tolist()
            for name, p in self.named_parameters()
        }


@st.composite
def weights(draw: st.DrawFn, dtype: torch.dtype) -> Weights:
    """Any finite values, the two zeros and the smallest numbers among them."""
    smallest = [float(torch.finfo(dtype).tiny), -0.0, 0.0, 1.0]
    numbers = st.floats(-6e4, 6e4, width=16) | st.sampled_from(smallest)
    return Weights(
        {
            name: torch.tensor(
                draw(st.lists(numbers, min_size=math.prod(shape), max_size=math.prod(shape))),
                dtype=dtype,
            ).view(shape)
            for name, shape in SHAPES.items()
        }
    )


two_models = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st.tuples(weights(dtype), weights(dtype))
)
masks = st.fixed_dictionaries(
    {
        name: st.sets(st.integers(0, math.prod(shape) - 1)).map(
            lambda chosen: torch.tensor(sorted(chosen), dtype=torch.int64)
        )
        for name, shape in SHAPES.items()
    }
)


@PROPERTIES.holds(models=two_models, mask=masks)
def a_delta_moves_its_entries_and_no_other_bit(
    models: tuple[Weights, Weights], mask: dict[str, Tensor]
) -> None:
    base, tuned = models
    before, target = base.bits(), tuned.bits()
    delta = take_delta(tuned, mask)
    after = Weights(dict(apply_delta(base, delta).named_parameters())).bits()
    for name, index in mask.items():
        chosen = set(index.tolist())
        expected = [target[name][i] if i in chosen else bit for i, bit in enumerate(before[name])]
        assert after[name] == expected
    apply_delta(base, delta)
    assert base.bits() == after  # twice is once
    assert delta.num_entries == sum(index.numel() for index in mask.values())


@PROPERTIES.holds(models=two_models)
def base_and_difference_are_the_tuned_model(models: tuple[Weights, Weights]) -> None:
    base, tuned = models
    delta = extract_delta(base, tuned)
    same = {
        n: [a == b for a, b in zip(x, tuned.bits()[n], strict=True)] for n, x in base.bits().items()
    }
    assert delta.num_entries == sum(not equal for bits in same.values() for equal in bits)
    apply_delta(base, delta)
    assert base.bits() == tuned.bits()


@PROPERTIES.holds(models=two_models, mask=masks)
def deltas_of_other_entries_commute(
    models: tuple[Weights, Weights], mask: dict[str, Tensor]
) -> None:
    base, tuned = models
    rest = {
        name: torch.tensor(sorted(set(range(math.prod(SHAPES[name]))) - set(index.tolist())))
        for name, index in mask.items()
    }
    one = take_delta(tuned, mask)
    two = take_delta(tuned, {name: index.long() for name, index in rest.items()})
    first = apply_delta(apply_delta(Weights(dict(base.named_parameters())), one), two)
    second = apply_delta(apply_delta(base, two), one)
    assert Weights(dict(first.named_parameters())).bits() == base.bits() == tuned.bits()
    assert second is base


@PROPERTIES.holds(models=two_models, mask=masks, name=texts, at=st.floats(0, 1, exclude_max=True))
def a_delta_file_is_read_back_or_refused(
    models: tuple[Weights, Weights], mask: dict[str, Tensor], name: str, at: float
) -> None:
    _, tuned = models
    delta = take_delta(tuned, mask, base_model=name, base_hash="ab12")
    with scratch() as folder:
        path = folder / "delta.safetensors"
        delta.save(path)
        found = Delta.load(path)
        assert (found.base_model, found.base_hash) == (name, "ab12")
        kept = {n: i.tolist() for n, i in mask.items() if i.numel()}
        assert {n: i.tolist() for n, i in found.indices.items()} == kept
        for part in kept:
            assert torch.equal(found.values[part], delta.values[part])
            assert found.values[part].dtype == delta.values[part].dtype
        damaged = bytearray(path.read_bytes())
        damaged[int(at * len(damaged))] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="delta.safetensors"):
            Delta.load(path)


# --- vectors and files ---------------------------------------------------------------------------

vectors = st.dictionaries(
    st.from_regex(r"[a-z]{1,6}(\.[0-9a-z]{1,4}){0,2}", fullmatch=True),
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=4), elements=finite),
    min_size=1,
    max_size=4,
).map(lambda drawn: ParamVector({name: torch.from_numpy(a.copy()) for name, a in drawn.items()}))


@PROPERTIES.holds(
    vector=vectors, facts=st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers())
)
def a_vector_is_read_back_and_its_file_is_its_content(
    vector: ParamVector, facts: dict[str, int]
) -> None:
    with scratch() as folder:
        one, two = folder / "one", folder / "two"
        vector.save(one, **facts)
        vector.save(two, **dict(reversed(facts.items())))
        assert one.read_bytes() == two.read_bytes()
        found = ParamVector.load(one, list(vector))
    assert list(found) == list(vector)
    for name, tensor in vector.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32))


@PROPERTIES.holds(vector=vectors, factor=tame)
def a_vector_s_algebra_is_that_of_one_long_array(vector: ParamVector, factor: float) -> None:
    flat = np.concatenate([t.numpy().reshape(-1) for t in vector.values()]).astype(np.float64)
    exact = float(flat @ flat)
    assert vector.num_entries == flat.size
    assert math.isclose(vector.dot(vector), exact, rel_tol=1e-12)
    assert math.isclose(vector.norm(), math.sqrt(exact), rel_tol=1e-12)
    wide = vector.to("cpu", torch.float64)
    mixed = wide.plus(wide, factor)
    assert math.isclose(mixed.dot(wide), (1 + factor) * exact, rel_tol=1e-9, abs_tol=1e-9 * exact)
    assert math.isclose(wide.scaled(factor).norm(), abs(factor) * wide.norm(), rel_tol=1e-9)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(texts.filter(lambda t: t not in ("seal", "format_version")), values)


@PROPERTIES.holds(body=bodies, at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def a_manifest_is_read_back_or_found_damaged(body: dict[str, Any], at: float, bit: int) -> None:
    body = {"format_version": 1, **jsonable(body)}
    with scratch() as folder:
        path = folder / "manifest.json"
        path.write_text(render_manifest(body))
        found, wrong = read_manifest(place(path))
        assert not wrong and {k: v for k, v in found.items() if k != "seal"} == body
        damaged = bytearray(path.read_bytes())
        damaged[int(at * len(damaged))] ^= 1 << bit
        path.write_bytes(damaged)
        assert read_manifest(place(path))[1], "a changed bit went unnoticed"


@PROPERTIES.holds(value=values)
def anything_can_be_noted_in_a_manifest(value: Any) -> None:
    once = jsonable(value)
    assert json.loads(json.dumps(once, allow_nan=False)) == once == jsonable(once)


plain = st.dictionaries(texts, st.integers() | st.booleans() | texts, max_size=5)


@PROPERTIES.holds(one=plain, two=plain, reads=st.dictionaries(texts, texts, max_size=3))
def a_fingerprint_tells_settings_apart(
    one: dict[str, Any], two: dict[str, Any], reads: dict[str, str]
) -> None:
    first, second = Fingerprint(one, reads), Fingerprint(two, reads)
    backwards = Fingerprint(dict(reversed(one.items())), dict(reversed(reads.items())))
    same = {k: (type(v), v) for k, v in one.items()} == {k: (type(v), v) for k, v in two.items()}
    assert first.hash == backwards.hash
    assert (first.hash == second.hash) == same
    manifest = {"fingerprint": json.loads(json.dumps(first.as_dict()))}
    assert (second.explain(manifest) == []) == same


@PROPERTIES.holds(old=st.binary(max_size=50), new=st.binary(max_size=50))
def a_file_is_replaced_whole(old: bytes, new: bytes) -> None:
    with scratch() as folder:
        for content in (old, new):
            atomic_write_bytes(folder / "f", content)
            assert (folder / "f").read_bytes() == content
        assert [path.name for path in folder.iterdir()] == ["f"]
        hashes = [sha256_file(folder / "f")]
        atomic_write_bytes(folder / "f", old)
        assert (sha256_file(folder / "f") == hashes[0]) == (old == new)


# --- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name: str) -> None:
    PROPERTIES.try_out(name, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_property_at_length(name: str) -> None:
    PROPERTIES.try_out(name, 2_000)
