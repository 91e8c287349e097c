"""Properties of what is saved: deltas, manifests, fingerprints; for any input.

What is compared is bits, not approximations, wherever bits are what is promised.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy as copy
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from places import place
from properties import Properties, scratch, texts
from torch import Tensor, nn

from dualsft.errors import ConfigError
from dualsft.model.delta import Delta, apply_delta, combine_deltas, extract_delta, take_delta
from dualsft.storage.gaps import from_gaps, to_gaps
from dualsft.storage.manifest import (
    Fingerprint,
    jsonable,
    read_manifest,
    render_manifest,
)

PROPERTIES = Properties()


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


@PROPERTIES.holds(
    models=two_models,
    mask=masks,
    name=texts,
    at=st.floats(0, 1, exclude_max=True),
    compact=st.booleans(),
)
def a_delta_file_is_read_back_or_refused(
    models: tuple[Weights, Weights], mask: dict[str, Tensor], name: str, at: float, compact: bool
) -> None:
    _, tuned = models
    delta = take_delta(tuned, mask, base_model=name, base_hash="ab12")
    with scratch() as folder:
        path = folder / "delta.safetensors"
        delta.save(path, compact)
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


@PROPERTIES.holds(
    left_out=st.lists(st.sampled_from([0, 1, 254, 255, 256, 510, 65534, 65535, 70000]), max_size=9)
)
def indices_are_their_gaps(left_out: list[int]) -> None:
    """Also where a gap needs several numbers, in the type that takes fewer bytes."""
    index = torch.tensor(left_out, dtype=torch.int64).add(1).cumsum(0) - 1
    gaps = to_gaps(index)
    assert from_gaps(gaps).tolist() == index.tolist()
    sizes = [width * sum(g // top + 1 for g in left_out) for width, top in ((1, 255), (2, 65535))]
    assert gaps.numel() * gaps.itemsize == min(sizes)


@PROPERTIES.holds(models=two_models, others=two_models, mask=masks, more=masks)
def deltas_sum_and_count_what_they_share(
    models: tuple[Weights, Weights],
    others: tuple[Weights, Weights],
    mask: dict[str, Tensor],
    more: dict[str, Tensor],
) -> None:
    base, (tuned, other) = models[0].double(), (models[1].double(), others[1].double())
    deltas = [take_delta(tuned, mask), take_delta(other, more)]
    one, none = combine_deltas(base, deltas[:1])
    both, shared = combine_deltas(base, deltas)
    before, after = (dict(m.named_parameters()) for m in (base, apply_delta(copy(base), both)))
    moved = 0
    for name, p in before.items():
        total, times = p.detach().view(-1).tolist(), [0] * p.numel()
        for delta in deltas:
            for i, v in zip(delta.indices[name].tolist(), delta.values[name].tolist(), strict=True):
                old = p.detach().view(-1)[i].item()
                moves = v != old or math.copysign(1, v) != math.copysign(1, old)
                total[i] = total[i] + (v - old) if times[i] else v
                times[i] += moves
        moved += sum(t > 1 for t in times)
        found = after[name].detach().view(-1).tolist()
        for got, wanted, t in zip(found, total, times, strict=True):
            assert got == wanted if t < 2 else math.isclose(got, wanted, rel_tol=1e-9, abs_tol=1e-9)
    assert shared == moved and none == 0
    alone = [dict(apply_delta(copy(base), d).named_parameters()) for d in (one, deltas[0])]
    assert all(torch.equal(p, alone[1][n]) for n, p in alone[0].items())


# --- manifests -----------------------------------------------------------------------------------


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


# --- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name: str) -> None:
    PROPERTIES.try_out(name, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_property_at_length(name: str) -> None:
    PROPERTIES.try_out(name, 2_000)
