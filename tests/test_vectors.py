"""Vectors over the candidates: lazy ones give the bits of held ones, and hold nothing."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualsft.algorithm.projection import ProjectionTerms, projection_terms
from dualsft.algorithm.selection import product_source
from dualsft.algorithm.topk import topk_signed
from dualsft.config import settings
from dualsft.errors import RunError
from dualsft.memory import placement
from dualsft.storage import tensor_files
from dualsft.storage.tensor_files import Form, TensorFile, write_tensors
from dualsft.storage.vectors import LazyVector, ParamVector, Products, Vector, save_tensors

CPU = torch.device("cpu")
SHAPES = {"b.weight": (5, 9), "a.bias": (7,), "b.0": (), "c.none": (0, 3), "d": (2, 3, 4)}
N_SC = 6


def random_vector(seed: int, dtype: torch.dtype = torch.float32) -> ParamVector:
    rng = torch.Generator().manual_seed(seed)
    draw = {n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in SHAPES.items()}
    return ParamVector({n: t.to(dtype) for n, t in draw.items()})


def stored(vector: Vector, path: Path) -> LazyVector:
    vector.save(path)
    return LazyVector.open(path, list(vector))


def same(a: Vector, b: Vector) -> bool:
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype == a.forms[n].dtype
        and a[n].shape == b[n].shape == a.forms[n].shape
        and torch.equal(a[n], b[n])
        for n in a
    )


@pytest.fixture(params=[1, 4, 1 << 22])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces of a few entries, and pieces larger than any block."""
    monkeypatch.setattr(tensor_files, "CHUNK", request.param)
    return request.param


# --- the algebra --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_lazy_vector_is_what_it_is_computed_from(
    tmp_path: Path, chunk: int, dtype: torch.dtype
) -> None:
    a, b = random_vector(1, dtype), random_vector(2, dtype)
    lazy_a, lazy_b = stored(a, tmp_path / "a"), stored(b, tmp_path / "b")
    assert same(lazy_a, a) and lazy_a.num_entries == a.num_entries == 45 + 7 + 1 + 24
    assert lazy_a.num_bytes == a.num_entries * dtype.itemsize
    for made, block in (
        (lazy_a.scaled(0.3), lambda x, _: x * 0.3),
        (lazy_a.plus(lazy_b, -1.7), lambda x, y: torch.add(x, y, alpha=-1.7)),
        (lazy_a.combine(torch.mul, lazy_b).plus(a), lambda x, y: x * y + x),
    ):
        expected = ParamVector({n: block(a[n], b[n]) for n in a})
        assert same(made, expected) and same(made.held(), expected)
        assert made.dot(lazy_b) == expected.dot(b) and made.norm() == expected.norm()
        assert made.block_norms() == expected.block_norms()
        assert made.cosine(lazy_b) == expected.cosine(b)
        assert same(made.to("cpu", torch.float64), expected.to("cpu", torch.float64))


def test_reductions_are_those_of_whole_blocks_in_double_precision() -> None:
    """The definition, in the order that run folders of earlier versions were summed in."""
    a, b = random_vector(1), random_vector(2)
    blocks = {n: float(torch.dot(a[n].double().view(-1), b[n].double().view(-1))) for n in a}
    squares = {n: float(torch.dot(*[a[n].double().view(-1)] * 2)) for n in a}
    assert a.dot(b) == float(sum(blocks.values()))
    assert a.dot(dict(b)) == a.dot(b)
    assert a.block_norms() == {n: v**0.5 for n, v in squares.items()}
    assert a.norm() == sum((v**0.5) ** 2 for v in squares.values()) ** 0.5
    zero = ParamVector.zeros(a)
    assert a.cosine(zero) is None and a.cosine(a) == pytest.approx(1.0)


def test_products_of_several_vectors_are_those_of_pairs(tmp_path: Path) -> None:
    a, b = random_vector(1), random_vector(2, torch.float64)
    lazy = stored(a, tmp_path / "a")
    vectors = {"a": a, "lazy": lazy, "b": b, "sum": lazy.plus(lazy)}
    pairs = [("a", "a"), ("b", "b"), ("a", "b"), ("sum", "lazy")]
    products = Products(vectors, pairs)
    assert products.dot("a", "b") == a.dot(b) and products.norm("b") == b.norm()
    assert products.cosine("a", "b") == a.cosine(b)
    assert products.dot("sum", "lazy") == 2 * a.dot(a)
    with pytest.raises(KeyError):
        products.norm("sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_gives_each_parameter_its_own_dtype(dtype: torch.dtype) -> None:
    a = random_vector(1)
    held = a.scaled(2.0).held("cpu", lambda n: dtype if len(SHAPES[n]) >= 2 else torch.float32)
    for name, shape in SHAPES.items():
        assert held[name].dtype == (dtype if len(shape) >= 2 else torch.float32)
        assert torch.equal(held[name], (a[name] * 2.0).to(held[name].dtype))
    assert held.held()["d"] is held["d"], "a block that is right already is not copied"


def test_the_algebra_leaves_its_parts_alone() -> None:
    a = random_vector(1)
    before = {n: t.clone() for n, t in a.items()}
    a.plus(a, 0.0).held()["d"].zero_()
    a.combine(lambda t: t).held()["d"].zero_()
    assert same(a, ParamVector(before))


@given(data=st.data())
def test_restricted_keeps_the_chosen_entries_and_zeroes_the_others(data: st.DataObject) -> None:
    a = random_vector(3)
    picks = data.draw(st.sets(st.integers(0, 44)))
    index = torch.tensor(sorted(picks), dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "CHUNK", data.draw(st.integers(1, 50)))
        masked = a.restricted({"b.weight": index}).held()
    expected = torch.zeros(45)
    expected[index] = a["b.weight"].view(-1)[index]
    assert torch.equal(masked["b.weight"].view(-1), expected)
    assert not masked["d"].any() and masked.num_entries == a.num_entries


# --- files --------------------------------------------------------------------------------------


def library_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """What safetensors itself writes, with the metadata put in order."""
    save_file(tensors, str(path), metadata={"format": "pt", **metadata})
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return content[:8] + text.ljust(size) + content[8 + size :]


def test_a_file_has_the_bytes_of_the_library(tmp_path: Path, chunk: int) -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.{str(dtype)[6:]}": torch.randint(0, 2, shape, generator=rng).to(dtype)
        for dtype in tensor_files._CODES
        for name, shape in {**SHAPES, 'ü"\x01': (3,)}.items()
    }
    for part in (tensors, dict(reversed(tensors.items())), {"x": tensors["d.bool"]}, {}):
        for header in ({}, {"z": "1", "a": "ü", "n_sc": "7"}):
            expected = library_file(tmp_path / "theirs", part, header)
            save_tensors(tmp_path / "ours", part, header)
            assert (tmp_path / "ours").read_bytes() == expected
    save_tensors(tmp_path / "ours", tensors, {})
    read = load_file(str(tmp_path / "ours"))
    assert read.keys() == tensors.keys()
    for name, found in read.items():
        assert found.dtype == tensors[name].dtype and torch.equal(found, tensors[name])


def test_a_block_that_is_a_view_is_stored_as_it_reads(tmp_path: Path) -> None:
    wide = torch.arange(24.0).view(4, 6)
    save_tensors(tmp_path / "x", {"t": wide.T, "half": wide[:, ::2]}, {})
    found = load_file(str(tmp_path / "x"))
    assert torch.equal(found["t"], wide.T) and torch.equal(found["half"], wide[:, ::2])


def test_a_nonfinite_number_is_refused_by_name_and_nothing_is_left(
    tmp_path: Path, chunk: int
) -> None:
    for bad in (math.nan, math.inf):
        vector = random_vector(1)
        vector["d"].view(-1)[-1] = bad
        assert vector.first_nonfinite() == "d"
        for form in (vector, vector.scaled(2.0)):
            with pytest.raises(RunError, match=r"v\.safetensors: d holds a non-finite number"):
                form.save(tmp_path / "v.safetensors")
            assert not list(tmp_path.iterdir())
    assert random_vector(1).first_nonfinite() is None


def test_a_write_that_fails_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    def pieces(name: str) -> Iterator[Tensor]:
        if name == "b":
            raise OSError(28, "No space left on device")
        yield torch.zeros(3)

    forms = {name: Form(torch.float32, torch.Size([3])) for name in "ab"}
    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "x", forms, pieces, {})
    assert not list(tmp_path.iterdir())


def test_a_file_over_other_parameters_is_refused(tmp_path: Path) -> None:
    random_vector(1).save(tmp_path / "v")
    with pytest.raises(RunError, match=r"v: its parameters are not the model's candidates.*extra"):
        LazyVector.open(tmp_path / "v", [*SHAPES, "extra"])


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    random_vector(1).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(RunError, match=r"v\.safetensors: cannot be read .* outside the file"):
        LazyVector.open(path, list(SHAPES))
    path.write_bytes(whole)
    cut = LazyVector.open(path, list(SHAPES))
    path.write_bytes(whole[:-4])  # after it was opened
    with pytest.raises(RunError, match=r"v\.safetensors: ends within"):
        cut.norm()
    lies = whole.replace(b'"shape":[5,9]', b'"shape":[5,8]')
    for content in (b"", b"\x08", whole[:40], b"\x02" + bytes(7) + b"[]", lies):
        path.write_bytes(content)
        with pytest.raises(RunError, match=r"v\.safetensors: cannot be read as safetensors"):
            TensorFile(path)


# --- Eq. (u) with nothing held ------------------------------------------------------------------


def terms_of(make: Callable[[int], Vector], **score: Any) -> tuple[ProjectionTerms, Vector]:
    config = settings.load(None, ["model.path=x", "data.path=x"])
    config = replace(config, score=replace(config.score, **score))
    curvature = make(3).combine(torch.abs)
    assert isinstance(config.finetune.lr, float)
    return projection_terms(
        config.score, config.finetune.lr, N_SC, make(1), make(2), curvature
    ), make(4)


@pytest.mark.parametrize(
    "score", [{}, {"step": "adam"}, {"curvature": "none"}, {"lam": 0.0}], ids=str
)
def test_u_is_eq_u_and_the_residual_what_the_estimate_misses(
    tmp_path: Path, chunk: int, score: dict[str, Any]
) -> None:
    terms, grad_sum = terms_of(
        lambda seed: stored(random_vector(seed, torch.float64), tmp_path / str(seed)), **score
    )
    v, p, c, g = (random_vector(seed, torch.float64) for seed in (1, 2, 3, 4))
    c = c.combine(torch.abs)
    lam = score.get("lam", 0.8)
    half = 0.0 if score.get("curvature") == "none" else terms.eta_sc / 2
    for name in SHAPES:
        step = c[name] if score.get("step") == "adam" else 1.0
        v_val = v[name] + lam * p[name]
        u = (v_val - half * c[name] * g[name]) / step
        u0 = (v_val - half * c[name] * N_SC * v[name]) / step
        torch.testing.assert_close(terms.projection(grad_sum)[name], u, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(terms.estimate()[name], u0, rtol=1e-12, atol=1e-12)
        residual = terms.residual(grad_sum)[name]
        torch.testing.assert_close(residual, u0 - u, rtol=1e-6, atol=1e-15)


class Counting:
    """Vectors whose pieces are counted while they are alive."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.forms = {f"p{i}": Form(torch.float32, torch.Size([size])) for i in range(num_blocks)}
        self.alive, self.most, self.made = 0, 0, 0

    def vector(self, seed: int) -> LazyVector:
        def compute(name: str, start: int, stop: int, seen: dict[int, Tensor]) -> Tensor:
            rng = torch.Generator().manual_seed(1000 * seed + int(name[1:]))
            piece = torch.rand(stop - start, generator=rng).add_(0.5)
            weakref.finalize(piece, self._gone)
            self.alive, self.made = self.alive + 1, self.made + 1
            self.most = max(self.most, self.alive)
            return piece

        return LazyVector(self.forms, CPU, compute)

    def _gone(self) -> None:
        self.alive -= 1


@pytest.fixture
def counting() -> Iterator[Counting]:
    gc.disable()  # pieces must go when they are no longer used, not when garbage is collected
    yield Counting(num_blocks=40, size=64)
    gc.enable()


def test_no_more_than_a_few_pieces_are_alive_while_u_is_used(
    counting: Counting, tmp_path: Path
) -> None:
    """u has four parts: each is made once a place, and all are gone at the next."""
    terms, grad_sum = terms_of(counting.vector)
    u, blocks = terms.projection(grad_sum), len(counting.forms)
    vectors = {"u": u, "G": grad_sum, "v": terms.v_val, "r": terms.residual(grad_sum)}

    def used(work: Callable[[], object], readings: int = 1, parts: int = 4) -> None:
        counting.most, counting.made = counting.alive, 0
        result = work()
        assert counting.made == parts * readings * blocks
        assert counting.most <= parts
        del result
        assert counting.alive == 0

    used(lambda: Products(vectors, [("u", "G"), ("v", "v"), ("r", "r")]))
    used(lambda: u.held("cpu", lambda _: torch.bfloat16))
    used(lambda: u.save(tmp_path / "u.safetensors"))
    used(lambda: u.first_nonfinite())
    used(lambda: u.restricted({"p3": torch.tensor([1, 5])}).norm())
    used(lambda: list(map(_drop, product_source(u, grad_sum, 1e-9)())))
    used(lambda: topk_signed(product_source(u, grad_sum, 1e-9), 100), readings=2)


def _drop(chunk: tuple[str, int, Tensor]) -> int:
    return chunk[1]


# --- s_θ ----------------------------------------------------------------------------------------


def test_the_source_of_scores_reads_the_same_lazily_and_held(tmp_path: Path, chunk: int) -> None:
    a, b = random_vector(1), random_vector(2)
    lazy = [stored(v, tmp_path / str(i)) for i, v in enumerate((a, b))]
    held = [(n, s, t.clone()) for n, s, t in product_source(a, b, 0.5)()]
    assert {n for n, _, _ in held} == set(SHAPES), "a parameter without entries is named too"
    again = product_source(lazy[0], lazy[1], 0.5)
    for (n1, s1, t1), (n2, s2, t2) in zip(held, again(), strict=True):
        assert (n1, s1) == (n2, s2) and torch.equal(t1, t2)
    flat = torch.cat([t for _, _, t in held])
    expected = torch.cat([(a[n] * b[n]).mul_(0.5).view(-1) for n in SHAPES])
    assert np.array_equal(flat.numpy(), expected.numpy())


@pytest.mark.parametrize(("free", "is_held"), [(10_000, True), (600, False)])
def test_a_vector_is_held_on_a_gpu_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, free: int, is_held: bool
) -> None:
    vector = random_vector(1).scaled(2.0)
    assert placement.at_hand(vector) is vector, "never on a CPU"
    monkeypatch.setattr(placement, "free_memory", lambda _: free)
    held = ParamVector({})
    monkeypatch.setattr(LazyVector, "device", torch.device("cuda"))
    monkeypatch.setattr(LazyVector, "held", lambda _: held)
    assert placement.at_hand(vector) is (held if is_held else vector)
