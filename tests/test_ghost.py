"""The ghost engine against batch-of-one autograd, on every architecture, in float64 and fp32."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from models import ARCHITECTURES, tiny_model, tiny_rows
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualsft.algorithm.scores import dot_alone
from dualsft.data.examples import Example, collate
from dualsft.engine import ghost, losses
from dualsft.engine import rules as ghost_rules
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import comparison, example_objective
from dualsft.engine.walk import PassResult, PassSettings, cwsd_objective, loss_objective, walk
from dualsft.errors import ConfigError, RunError
from dualsft.model.load import find_candidates
from dualsft.storage import vectors
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter

QUIET = Reporter(lambda _: None)


def settings(batch_tokens: int = 64, side: str = "right") -> PassSettings:
    return PassSettings(batch_tokens=batch_tokens, pad_id=0, padding_side=side)


def examples_for(model: nn.Module, count: int = 9, seed: int = 1) -> list[Example]:
    return tiny_rows(count, seed)


def random_direction(engine: GhostEngine, seed: int = 3) -> ParamVector:
    generator = torch.Generator().manual_seed(seed)
    return ParamVector(
        {
            n: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            for n, p in engine.candidates.items()
        }
    )


def engine_of(model: Any, spec: str = "all") -> GhostEngine:
    return GhostEngine(model, find_candidates(model, spec))


def walked(
    engine: GhostEngine, rows: list[Example], how: PassSettings | None = None, **taps: Any
) -> PassResult:
    objective = loss_objective(engine.model)
    return walk(engine, rows, objective, how or settings(), QUIET, "test", **taps)


def full_pass(engine: GhostEngine, rows: list[Example], how: PassSettings) -> tuple:
    sums, direction = ParamVector.zeros(engine.candidates), random_direction(engine)
    return sums, direction, walked(engine, rows, how, sums=sums, direction=direction, bounds=True)


def worst(got: ParamVector, true: dict[str, torch.Tensor]) -> float:
    errors = [
        float((got[n].double() - t.double()).norm()) / max(float(t.double().norm()), 1e-30)
        for n, t in true.items()
    ]
    return max(errors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spec", ["block_linear", "all"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sums_dots_and_bounds(arch: str, spec: str, dtype: torch.dtype) -> None:
    """G, ⟨U, g_n⟩ and ‖g_n,l‖ ≤ bound, both padding sides, batches of several sizes."""
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    exact_model = tiny_model(arch, dtype=torch.float64).eval()
    model = tiny_model(arch, dtype=dtype).eval()
    engine = engine_of(model, spec)
    rows, names = examples_for(model), engine.candidates.names
    grads = [oracle.example_gradient(exact_model, e.input_ids, e.labels, names) for e in rows]
    for batch_tokens, side in ((64, "right"), (64, "left"), (1, "right"), (10_000, "left")):
        sums, direction, result = full_pass(engine, rows, settings(batch_tokens, side))
        assert worst(sums, oracle.add(grads)) <= tolerance
        true = np.array(
            [sum(float((g[n] * direction[n].double()).sum()) for n in names) for g in grads]
        )
        assert np.abs(result.dots - true).max() <= tolerance * np.abs(true).max()
        norms = np.array([[float(g[n].norm()) for n in names] for g in grads])
        assert (norms <= result.inner_sums * (1 + 1e-4) + 1e-12).all()
        losses = [oracle.example_loss(exact_model, e.input_ids, e.labels).item() for e in rows]
        assert np.abs(result.values - losses).max() <= tolerance * max(losses)


def token_sums(model: nn.Module, example: Example, names: list[str]) -> list[float]:
    """Σ_t ‖ε_t‖ ‖a_t‖ of each linear layer, of one example alone, from torch's own hooks."""
    found: dict[str, float] = {}

    def watch(name: str, layer: nn.Module, given: Any, output: Any) -> None:
        def sums(grad: torch.Tensor) -> None:
            found[name] = float((grad.norm(dim=-1) * given[0].detach().norm(dim=-1)).sum())

        output.register_hook(sums)

    layers = {name: model.get_submodule(name.removesuffix(".weight")) for name in names}
    hooks = [x.register_forward_hook(partial(watch, name)) for name, x in layers.items()]
    oracle.example_gradient(model, example.input_ids, example.labels, names)
    for hook in hooks:
        hook.remove()
    return [found[name] for name in names]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bounds_are_not_vacuous(arch: str) -> None:
    """The bound of a linear layer is Σ_t ‖ε_t‖ ‖a_t‖, which is near the true norm.

    The two computations differ by rounding, at most 1.6e-15 where this was measured; another BLAS
    rounds otherwise, so 1e-14. A sum of norms is larger than the norm of the sum by what the tokens
    cancel: 1 to 4.6 times in these rows of 4 to 14 tokens, and 10 is allowed.
    """
    model = tiny_model(arch).eval()
    engine = engine_of(model, "block_linear")
    rows = examples_for(model)
    _, _, result = full_pass(engine, rows, settings())
    names = engine.candidates.names
    for i, e in enumerate(rows):
        expected = token_sums(model, e, names)
        np.testing.assert_allclose(result.inner_sums[i], expected, rtol=1e-14)
        g = oracle.example_gradient(model, e.input_ids, e.labels, names)
        norms = np.array([float(g[n].norm()) for n in names])
        assert (norms > 0).all() and (result.inner_sums[i] <= 10 * norms).all()


@pytest.mark.parametrize("tau", [1.0, 2.5])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cwsd_gradient(arch: str, tau: float) -> None:
    teacher, student = tiny_model(arch, seed=0).eval(), tiny_model(arch, seed=7).eval()
    engine = engine_of(student)
    rows = examples_for(student, seed=2)
    sums = ParamVector.zeros(engine.candidates)
    result = walk(
        engine, rows, cwsd_objective(teacher, student, tau), settings(), QUIET, "t", sums=sums
    )
    true = oracle.cwsd_gradient(teacher, student, rows, tau, engine.candidates.names)
    assert worst(sums.scaled(1 / len(rows)).held(), true) <= 1e-10
    loss = oracle.cwsd_loss(teacher, student, rows, tau).item()
    assert result.values.mean() == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cwsd_is_exactly_zero_at_the_teacher(arch: str) -> None:
    model = tiny_model(arch, dtype=torch.float32).eval()
    twin = tiny_model(arch, dtype=torch.float32).eval()
    engine = engine_of(model)
    sums = ParamVector.zeros(engine.candidates)
    objective = cwsd_objective(twin, model, 1.0)
    walk(engine, examples_for(model), objective, settings(), QUIET, "t", sums=sums)
    assert all(not bool(t.any()) for t in sums.values())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_alone_agrees_and_leaves_no_trace(arch: str) -> None:
    model = tiny_model(arch).eval()
    flags = [p.requires_grad for p in model.parameters()]
    patched = ["forward" in vars(m) for m in model.modules()]
    engine = engine_of(model)
    rows = examples_for(model)
    _, direction, result = full_pass(engine, rows, settings())
    exact, norm = dot_alone(engine, rows[4], direction, settings())
    assert abs(exact - result.dots[4]) <= 1e-12 * direction.norm() * norm
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert ["forward" in vars(m) for m in model.modules()] == patched


def test_training_objective_has_full_gradients() -> None:
    """Outside the engine the same fused loss trains head and embedding too."""
    model = tiny_model("llama_tied_bias").eval()
    rows = examples_for(model)
    batch = collate(rows, 0, "right", torch.device("cpu"))
    objective, losses = example_objective(model, batch, scale=1 / len(rows))
    objective.backward()
    names = [n for n, _ in model.named_parameters()]
    true = oracle.val_grad(model, rows, names)
    got = ParamVector({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert worst(got, true) <= 1e-10
    assert losses.shape == (len(rows),)


def test_kl_of_a_model_to_itself_is_zero_and_positive_otherwise() -> None:
    base, other = tiny_model("qwen3", seed=0).eval(), tiny_model("qwen3", seed=1).eval()
    batch = collate(examples_for(base), 0, "right", torch.device("cpu"))
    same, apart = comparison(base, base, batch), comparison(base, other, batch)
    assert float(same.divergence.abs().max()) < 1e-14 and float(apart.divergence.min()) > 1e-6
    assert torch.equal(same.loss_before, same.loss_after)
    assert torch.equal(same.loss_before, apart.loss_before)
    losses = example_objective(other, batch)[1]
    assert torch.allclose(apart.loss_after, losses, rtol=1e-12)


class _NoDouble(TorchDispatchMode):
    """A device without float64: any operation that makes one there fails."""

    off_device = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        made = tree_leaves(result)
        if not self.off_device and any(getattr(t, "dtype", None) == torch.float64 for t in made):
            raise AssertionError(f"{func} makes float64 on the device")
        return result


def test_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on mps: fp32 sums on the device, fp64 on the host; the same numbers to fp32 rounding."""
    model = tiny_model("llama", dtype=torch.float32).eval()
    teacher = tiny_model("llama", dtype=torch.float32, seed=5).eval()
    engine = engine_of(model)
    rows, batch_of = examples_for(model), settings()
    direction = random_direction(engine)

    def everything() -> tuple:
        sums, prior = (ParamVector.zeros(engine.candidates) for _ in range(2))
        result = walked(engine, rows, batch_of, sums=sums, direction=direction, bounds=True)
        distil = cwsd_objective(teacher, model, 2.0)
        anchors = walk(engine, rows, distil, batch_of, QUIET, "v", sums=prior)
        exact, norm = dot_alone(engine, rows[0], direction, batch_of)
        both = comparison(teacher, model, collate(rows, 0, "right", torch.device("cpu")))
        numbers = [exact, norm, sums.dot(prior), sums.norm(), float(both.divergence.sum())]
        return sums, prior, result, [*numbers, *result.values, *result.dots, *anchors.values]

    with_double = everything()
    guard, plain_cpu = _NoDouble(), torch.Tensor.cpu
    plain_products = vectors.Products.__init__
    with guard, pytest.raises(AssertionError, match="float64 on the device"):
        everything()
    for module in (vectors, ghost, ghost_rules, losses):
        monkeypatch.setattr(module, "reduction_dtype", lambda _: torch.float32)

    def products(self: vectors.Products, *given: Any) -> None:
        """fp64 is allowed once the numbers have left the device."""

        def leave_the_device(x: torch.Tensor) -> torch.Tensor:
            guard.off_device = True
            return plain_cpu(x)

        monkeypatch.setattr(torch.Tensor, "cpu", leave_the_device)
        try:
            plain_products(self, *given)
            assert self._blocks  # read while they are known to be on the host
        finally:
            guard.off_device = False
            monkeypatch.setattr(torch.Tensor, "cpu", plain_cpu)

    monkeypatch.setattr(vectors.Products, "__init__", products)
    with guard:
        without = everything()
    assert all(torch.equal(t, without[0][n]) for n, t in with_double[0].items())
    assert worst(without[1], with_double[1].tensors) <= 1e-5
    assert np.array_equal(with_double[2].inner_sums, without[2].inner_sums)
    size = direction.norm() * with_double[0].norm()
    assert np.allclose(with_double[3], without[3], rtol=1e-5, atol=1e-6 * size)


def test_norm_that_is_not_affine_is_refused() -> None:
    class CubicRMSNorm(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight**3

    model = tiny_model("llama").eval()
    model.model.norm = CubicRMSNorm(model.model.norm.weight)
    engine = engine_of(model)
    with pytest.raises(RunError, match=r"model\.norm\.weight.*not affine"):
        full_pass(engine, examples_for(model), settings())


def test_bypassed_layer_is_caught_by_scoring_alone() -> None:
    """A layer used behind the module's back is invisible to hooks but not to the self-check."""
    model = tiny_model("llama").eval()
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(
        torch.nn.functional.silu(mlp.gate_proj(x))
        * torch.nn.functional.linear(x, mlp.up_proj.weight)
    )
    engine = engine_of(model, "block_linear")
    rows = examples_for(model)
    _, direction, result = full_pass(engine, rows, settings())
    exact, norm = dot_alone(engine, rows[0], direction, settings())
    assert abs(exact - result.dots[0]) > 1e-4 * direction.norm() * norm


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("*.no_such.weight", "matches no parameter"),
        ("block_linear,!*.no_such", "excludes nothing"),
        ("*.q_proj.weight,!*", "leaves no parameter"),
    ],
)
def test_bad_candidates(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_candidates(tiny_model("llama"), spec)


def test_candidate_patterns() -> None:
    model = tiny_model("llama")
    names = find_candidates(model, "*.q_proj.weight,*.norm.weight,!*.layers.0.*").names
    assert names == ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"]
    default = find_candidates(model, "block_linear")
    assert all(p.ndim == 2 and ".layers." in n for n, p in default.items())
    assert len(default) == 14


def test_nonfinite_example_is_named() -> None:
    model = tiny_model("llama", dtype=torch.float32).eval()
    rows = examples_for(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[rows[3].input_ids[0]] = float("nan")
    engine = engine_of(model, "block_linear")
    with pytest.raises(RunError, match="not finite"):
        full_pass(engine, rows, settings())


# --- squares and norms of per-example gradients -------------------------------------------------


def squares_alone(
    engine: GhostEngine, examples: list[Example]
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """(Σ g ⊙ g, ‖g_n‖ of every candidate: [N, L]) by plain autograd."""
    squares = {name: torch.zeros_like(p) for name, p in engine.candidates.items()}
    norms = np.zeros((len(examples), len(engine.columns)))
    for number, example in enumerate(examples):

        def visit(name: str, grad: torch.Tensor, number: int = number) -> None:
            squares[name] += grad**2
            norms[number, engine.columns[name]] = float(grad.norm())

        batch = collate([example], 0)
        ghost.alone(engine.model, engine.candidates, batch, visit)
    return squares, norms


@pytest.mark.parametrize("several", [1, 7])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("whole", [False, True], ids=["block_linear", "everything in the blocks"])
def test_squares_and_norms(
    arch: str, whole: bool, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many gradients are made at a time."""
    everything = "*.h.*" if arch == "gpt2" else "*.layers.*"  # norms and biases too
    engine = engine_of(tiny_model(arch), everything if whole else "block_linear")
    assert engine.separable
    biggest = max(p.numel() for p in engine.candidates.values())
    monkeypatch.setattr(ghost_rules, "APART_BYTES", several * biggest * 8)
    examples = examples_for(engine.model)
    squares, norms = squares_alone(engine, examples)
    direction = random_direction(engine)
    sums = ParamVector.zeros(engine.candidates)
    found = walked(engine, examples, sums=sums, direction=direction, bounds=True, squared=True)
    for name, square in squares.items():
        torch.testing.assert_close(sums[name], square, rtol=1e-9, atol=1e-18)
    np.testing.assert_allclose(found.inner_sums, norms, rtol=1e-6, atol=1e-12)
    plain = walked(engine, examples, direction=direction)
    np.testing.assert_allclose(found.dots, plain.dots, rtol=1e-12)


def test_a_module_that_is_used_twice_is_refused() -> None:
    """A layer in two places of the decoder: the second part of its gradient would be lost."""
    model = tiny_model("llama")
    layers = model.model.layers
    layers[1] = layers[0]
    engine = engine_of(model, "block_linear")
    examples = examples_for(model, 3)
    sums = ParamVector.zeros(engine.candidates)
    with pytest.raises(RunError, match=r"used more than once in a pass.*leave it out"):
        walked(engine, examples, sums=sums, squared=True)
