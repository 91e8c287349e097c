"""Sketches of per-example gradients, and the walk that makes them, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_run
from models import ARCHITECTURES, tiny_model, tiny_rows
from places import place
from torch import Tensor

from dualsft.config import settings
from dualsft.data.examples import Example, collate
from dualsft.engine import sketch as sketch_module
from dualsft.engine.ghost import alone
from dualsft.engine.sketch import Sketch
from dualsft.errors import RunError
from dualsft.lab.methods import less as sketcher_module
from dualsft.lab.methods.greedy import linear_maps
from dualsft.lab.methods.less import Sketcher
from dualsft.lab.methods.per_example import per_example
from dualsft.model.load import find_candidates
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.runs.method import Job
from dualsft.storage.resume import Pieces
from dualsft.system.progress import Reporter

Maker = Callable[..., Job]
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def make_job(corpus: Path, model_folder: Callable[[str], Path], tmp_path: Path) -> Maker:
    """A job without a run: settings, a folder for pieces, a list of what is said."""

    def make(said: list[str] | None = None, pieces: Pieces | None = None, *words: str) -> Job:
        config = settings.load(None, [*small_run(model_folder("llama"), corpus), *words])
        lines = said if said is not None else []
        ctx = RunContext(config, RunDir(tmp_path / "run"), Reporter(lines.append))
        ctx.pieces = pieces or ctx.pieces
        return Job(ctx, "data", place(tmp_path / "part"))

    return make


def maps_of(model: Any) -> dict[str, Any]:
    return linear_maps(model, set(find_candidates(model, "block_linear").names))


def gradients_alone(model: Any, example: Example) -> dict[str, Tensor]:
    """The example's gradient of each block's linear map, [O, I], by plain autograd."""
    candidates = find_candidates(model, "block_linear")
    found: dict[str, Tensor] = {}
    batch = collate([example], 0)
    alone(model, candidates, batch, lambda name, grad: found.update({name: grad.clone()}))
    return {n: g.T if "Conv1D" in repr(maps_of(model)[n]) else g for n, g in found.items()}


def sketched_alone(sketch: Sketch, gradients: dict[str, Tensor]) -> Tensor:
    """Σ over the maps of Lᵀ G R / √dim, written out."""
    total = torch.zeros(sketch.dim, dtype=torch.float64)
    for name, g in gradients.items():
        left = sketch.signs(name, "out", g[:, 0])
        right = sketch.signs(name, "in", g)
        total += (left.T @ g @ right).flatten() / sketch.dim**0.5
    return total


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_batched_sketches_are_those_of_each_example_alone(arch: str, side: str) -> None:
    model, rows = tiny_model(arch), tiny_rows(5, 1)
    sketcher = Sketcher(model, maps_of(model), Sketch(24, 3, "test"))
    with sketcher.tapped() as taps:
        found = sketcher.of_batch(taps, collate(rows, 0, side)).clone()
    for example, got in zip(rows, found, strict=True):
        expected = sketched_alone(sketcher.sketch, gradients_alone(model, example))
        assert float((got - expected).abs().max()) <= 1e-9 * float(expected.abs().max())


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_formed_gradients_give_the_same_in_any_chunks(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny_model(arch), collate(tiny_rows(5, 1), 0)
    sketcher = Sketcher(model, maps_of(model), Sketch(24, 3, "test"))
    with sketcher.tapped() as taps:
        plain = sketcher.of_batch(taps, batch).clone()
    seen: list[int] = []

    def transform(name: str, gradient: Tensor, some: slice) -> Tensor:
        seen.append(len(gradient))
        return gradient.mul_(2.0)

    for limit in (1, 5000, 1 << 22):
        monkeypatch.setattr(sketcher_module, "FORMED_ENTRIES", {"cpu": limit})
        with sketcher.tapped(transform) as taps:
            torch.testing.assert_close(sketcher.of_batch(taps, batch), 2 * plain)
    assert {1, 5} <= set(seen)


def test_lack_of_memory_is_first_answered_by_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("llama"), collate(tiny_rows(4, 1), 0)
    sketcher = Sketcher(model, maps_of(model), Sketch(16, 0, "test"))
    with sketcher.tapped() as taps:
        plain = sketcher.of_batch(taps, batch).clone()
    own = sketcher._differentiate

    def failing(*given: Any) -> Tensor:
        if not sketcher.checkpointing:
            raise FULL
        return own(*given)

    monkeypatch.setattr(sketcher, "_differentiate", failing)
    with sketcher.tapped() as taps:
        found = sketcher.of_batch(taps, batch)
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-14)
    assert sketcher.checkpointing is True


def test_the_model_is_as_before() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    before = {n: (p.requires_grad, p.detach().clone()) for n, p in model.named_parameters()}
    sketcher = Sketcher(model, maps_of(model), Sketch(16, 0, "test"))
    with sketcher.tapped() as taps:
        sketcher.of_batch(taps, collate(tiny_rows(3, 1), 0))
    for name, p in model.named_parameters():
        assert p.requires_grad == before[name][0] and torch.equal(p, before[name][1])
        assert p.grad is None
    assert not any("forward" in vars(m) for m in maps_of(model).values())


def test_inner_products_are_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, 7, 5, generator=generator, dtype=torch.float64)
    b = b + 0.5 * a
    exact = float((a * b).sum())
    drawn = []
    for seed in range(2000):
        sketch = Sketch(16, seed, "test")
        drawn.append(float((sketch.of_matrices("m", a) * sketch.of_matrices("m", b)).sum()))
    values = torch.tensor(drawn)
    assert abs(float(values.mean()) - exact) <= 4 * float(values.std()) / len(drawn) ** 0.5
    assert abs(exact) > 8 * float(values.std()) / len(drawn) ** 0.5  # zero would be seen


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_dense_sketch_is_one_product_with_all_signs(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketch_module, "BLOCK_SIGNS", 24 * 100)  # several blocks a map
    model, rows = tiny_model(arch), tiny_rows(4, 1)
    sketch = Sketch(24, 3, "test", dense=True)
    sketcher = Sketcher(model, maps_of(model), sketch)
    with sketcher.tapped() as taps:
        found = sketcher.of_batch(taps, collate(rows, 0)).clone()
    for example, got in zip(rows, found, strict=True):
        expected = torch.zeros(24, dtype=torch.float64)
        for name, g in gradients_alone(model, example).items():
            flat = g.reshape(-1)
            parts = [
                sketch.block(name, a, min(a + 100, len(flat)), flat)
                for a in range(0, len(flat), 100)
            ]
            signs = torch.cat(parts)
            assert set(signs.flatten().tolist()) == {-1.0, 1.0}
            expected += flat @ signs / 24**0.5
        assert float((got - expected).abs().max()) <= 1e-9 * float(expected.abs().max())


def test_signs_depend_on_seed_purpose_and_name_alone() -> None:
    like = torch.zeros(6)
    first, second = Sketch(12, 0, "a"), Sketch(12, 0, "a")
    first.signs("x", "out", like)
    assert torch.equal(first.signs("y", "in", like), second.signs("y", "in", like))
    assert set(first.signs("y", "in", like).flatten().tolist()) == {-1.0, 1.0}
    for other in (Sketch(12, 1, "a"), Sketch(12, 0, "b")):
        assert not torch.equal(first.signs("y", "in", like), other.signs("y", "in", like))
    assert not torch.equal(first.signs("x", "in", like), first.signs("y", "in", like))


# --- a row of numbers for every example -----------------------------------------------------------


def lengths(batch: Any) -> Tensor:
    return batch.attention_mask.sum(1, keepdim=True).double()


def test_every_example_gets_its_row_and_is_counted(make_job: Maker) -> None:
    job, rows = make_job(None, None, "score.batch_tokens=40"), tiny_rows(12, 1)
    found = per_example(job, tiny_model("llama"), rows, "w", 1, lengths, backward=True)
    assert found[:, 0].tolist() == [e.num_tokens for e in rows]
    assert (job.accounts.backward_examples, job.accounts.forward_examples) == (12, 0)


def test_a_batch_that_does_not_fit_is_halved_once_and_said(make_job: Maker) -> None:
    said: list[str] = []
    job, rows = make_job(said), tiny_rows(12, 1)
    sizes: list[int] = []

    def compute(batch: Any) -> Tensor:
        sizes.append(batch.input_ids.numel())
        if batch.input_ids.numel() > 60:
            raise FULL
        return lengths(batch)

    found = per_example(job, tiny_model("llama"), rows, "w", 1, compute, backward=False)
    assert found[:, 0].tolist() == [e.num_tokens for e in rows]
    assert any("out of memory" in line for line in said)
    assert job.accounts.forward_examples == 12
    assert len([size for size in sizes if size > 60]) == 2  # the whole, one half; not the other


def test_one_example_that_does_not_fit_is_the_end(make_job: Maker) -> None:
    def compute(batch: Any) -> Tensor:
        raise FULL

    with pytest.raises(RunError, match="single example"):
        per_example(
            make_job(), tiny_model("llama"), tiny_rows(3, 1), "w", 1, compute, backward=False
        )


def test_what_is_not_finite_is_named(make_job: Maker) -> None:
    rows = tiny_rows(6, 1)

    def compute(batch: Any) -> Tensor:
        found = lengths(batch)
        return found.masked_fill(found == rows[2].num_tokens, torch.nan)

    with pytest.raises(RunError, match=rows[2].id):
        per_example(make_job(), tiny_model("llama"), rows, "w", 1, compute, backward=False)


def test_a_walk_goes_on_where_it_was_to_the_same_batches(make_job: Maker, tmp_path: Path) -> None:
    model, rows = tiny_model("llama"), tiny_rows(14, 1)
    few = "score.batch_tokens=30"
    shapes: list[torch.Size] = []

    def watched(batch: Any) -> Tensor:
        shapes.append(batch.input_ids.shape)
        return lengths(batch)

    whole = per_example(make_job(None, None, few), model, rows, "w", 1, watched, backward=True)
    every, shapes[:] = list(shapes), []

    def pieces() -> Pieces:
        return Pieces(tmp_path / "s.work", "abc", every=0)

    def killed(batch: Any) -> Tensor:
        if len(shapes) == 3:
            raise KeyboardInterrupt
        return watched(batch)

    with pytest.raises(KeyboardInterrupt):
        per_example(make_job(None, pieces(), few), model, rows, "w", 1, killed, backward=True)
    job = make_job(None, pieces(), few)
    again = per_example(job, model, rows, "w", 1, watched, backward=True)
    assert torch.equal(again, whole)
    assert shapes == every  # three before, the rest after
    assert job.accounts.backward_examples == 14
