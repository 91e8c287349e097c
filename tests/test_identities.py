"""The paper's identities and bounds on tiny problems in float64 (docs/algorithm.md).

Theorem 1 (Shapley), Prop. 1 (coordination gap), diagonal-proxy perturbation and the two stability
corollaries, truncation orders, score drift; CWSD is in test_identities_cwsd.py. `Problem` is a
validation gradient v, example gradients g (one row each), a Hessian H and a diagonal c: random
ones, and those of a softmax regression, whose smoothness constants are known exactly.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import TinyExample, tiny_examples, tiny_model
from oracle import (
    Vector,
    apply_mask,
    cosine_schedule,
    dot,
    example_gradient,
    example_loss,
    example_scores,
    grad_sum,
    norm,
    param_scores,
    projection,
    reselect_params,
    restricted_adamw,
    scale,
    shapley,
    top_b,
    top_k_signed,
    val_grad,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(1)

ORDERS = ("first", "diag", "full")


@dataclass(frozen=True)
class Problem:
    """v_val, g (N x D), H, c and eta of one local surrogate."""

    v: Tensor
    g: Tensor
    h: Tensor
    c: Tensor
    eta: float

    @property
    def total(self) -> Tensor:
        return self.g.sum(0)

    def quadratic(self, order: str) -> Tensor:
        """The matrix that the utility of this order uses in place of the Hessian."""
        return {"first": torch.zeros_like(self.h), "diag": self.c.diag(), "full": self.h}[order]

    def utility(self, update: Tensor, order: str) -> float:
        """Eq. taylor_local_utility without its remainder."""
        return float(-self.v @ update - 0.5 * update @ self.quadratic(order) @ update)

    def interactions(self, order: str) -> Tensor:
        """M (N x D), Eq. interaction_matrices."""
        direction = self.eta * self.v - self.eta**2 / 2 * (self.quadratic(order) @ self.total)
        return direction * self.g


def random_problem(seed: int, n: int = 8, d: int = 7, eta: float = 0.3) -> Problem:
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    root = randn(d, d)
    return Problem(randn(d), randn(n, d), (root + root.T) / 2, randn(d).abs() + 0.1, eta)


class SoftmaxRegression:
    """Cross-entropy of W x, W 2 x 4: a real loss with constants that can be written down."""

    def __init__(self, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.x = torch.randn(7, 4, generator=gen, dtype=torch.float64)
        self.y = torch.randint(0, 2, (7,), generator=gen)
        self.x_val = torch.randn(5, 4, generator=gen, dtype=torch.float64)
        self.y_val = torch.randint(0, 2, (5,), generator=gen)
        self.w = torch.randn(8, generator=gen, dtype=torch.float64)

    def losses(self, w: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.x @ w.view(2, 4).T, self.y, reduction="none")

    def val_loss(self, w: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.x_val @ w.view(2, 4).T, self.y_val)

    def gradients(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """v (D) and g (N x D) at w."""
        jacobian = torch.autograd.functional.jacobian
        v, g = jacobian(self.val_loss, w), jacobian(self.losses, w)
        assert isinstance(v, Tensor) and isinstance(g, Tensor)
        return v, g

    def problem(self, eta: float = 0.3) -> Problem:
        v, g = self.gradients(self.w)
        h = torch.autograd.functional.hessian(self.val_loss, self.w)
        assert isinstance(h, Tensor)
        return Problem(v, g, h, g.pow(2).mean(0).sqrt() + 1e-8, eta)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "random": lambda: random_problem(1),
    "one example": lambda: random_problem(2, n=1, d=5),
    "one coordinate": lambda: random_problem(3, n=6, d=1),
    "softmax regression": lambda: SoftmaxRegression(4).problem(),
}


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> bool:
    return float((left - right).abs().max()) <= tolerance * (1 + float(right.abs().max()))


# ---------------------------------------------------------------- Theorem 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_parameter_scores_are_shapley_values(make: Callable[[], Problem], order: str) -> None:
    p = make()
    num = len(p.v)

    def utility(chosen: frozenset[int]) -> float:
        mask = torch.tensor([float(d in chosen) for d in range(num)], dtype=torch.float64)
        return p.utility(-p.eta * mask * p.total, order)

    phi = shapley(num, utility)
    assert close(p.interactions(order).sum(0), phi)
    assert abs(float(phi.sum()) - utility(frozenset(range(num)))) < 1e-10  # efficiency


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_example_scores_are_shapley_values(make: Callable[[], Problem], order: str) -> None:
    p = make()
    num = len(p.g)

    def utility(chosen: frozenset[int]) -> float:
        return p.utility(-p.eta * p.g[sorted(chosen)].sum(0), order)

    phi = shapley(num, utility)
    assert close(p.interactions(order).sum(1), phi)
    assert abs(float(phi.sum()) - utility(frozenset(range(num)))) < 1e-10


def test_second_order_scores_are_not_marginals_to_the_empty_set() -> None:
    """The averaging over coalitions matters: the first step's gain alone is another number."""
    p = random_problem(5)
    alone = torch.tensor([p.utility(-p.eta * g, "full") for g in p.g], dtype=torch.float64)
    assert not close(p.interactions("full").sum(1), alone, 1e-3)


def test_oracle_scores_are_the_diagonal_shapley_values() -> None:
    """projection, param_scores and the row sums <u, g_n> agree with M^(diag), lambda included."""
    p = random_problem(6)
    prior = torch.randn(len(p.v), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lam = 0.8
    u = projection(
        {"w": p.v - lam * prior}, {"w": prior}, {"w": p.total}, {"w": p.c}, lam, False, p.eta
    )
    assert close(param_scores(u, {"w": p.total})["w"], p.interactions("diag").sum(0))
    assert close(p.g @ u["w"], p.interactions("diag").sum(1))
    relative = projection(
        {"w": p.v}, {"w": prior}, {"w": p.total}, None, lam, True, p.eta, step="sgd"
    )
    assert close(relative["w"], p.eta * (p.v + lam * prior * p.v.norm() / prior.norm()))
    adam = projection(
        {"w": p.v}, {"w": prior}, {"w": p.total}, {"w": p.c}, lam, False, p.eta, 50.0, "adam"
    )
    assert close(adam["w"], p.eta * (p.v + lam * prior) / p.c - p.eta**2 / 2 * 50 * p.total)


# ---------------------------------------------------------------- Proposition 1


def test_coordination_gap_of_both_sides() -> None:
    """Isolated minus mask-aware scores, the latter taken as marginals of the joint utility."""
    p = random_problem(7)
    mask = torch.tensor([1.0, 0, 1, 0, 0, 1, 0], dtype=torch.float64)
    kept = [0, 3, 4]

    def joint(examples: list[int], m: Tensor) -> float:
        return float(-p.v @ (-p.eta * m * p.g[examples].sum(0)))

    for n in range(len(p.g)):
        others = [i for i in kept if i != n]
        aware = joint([*others, n], mask) - joint(others, mask)
        frozen = sum(float(p.v[d] * p.g[n, d]) for d in range(7) if mask[d] == 0)
        isolated = p.eta * float(p.v @ p.g[n])
        assert isolated - aware == pytest.approx(p.eta * frozen, abs=1e-12)
    for d in range(7):
        unit = torch.eye(7, dtype=torch.float64)[d]
        without = mask * (1 - unit)
        aware = joint(kept, without + unit) - joint(kept, without)
        excluded = sum(float(p.g[n, d]) for n in range(len(p.g)) if n not in kept)
        isolated = p.eta * float(p.v[d] * p.total[d])
        assert isolated - aware == pytest.approx(p.eta * float(p.v[d]) * excluded, abs=1e-12)


def test_coordination_gap_in_a_network() -> None:
    """The same on a model's own gradients, with the oracle's re-selection on both sides."""
    model, pool, val = tiny_model("qwen2"), tiny_examples(6, seed=1), tiny_examples(3, seed=2)
    names = [n for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    total, v = grad_sum(model, pool, names), val_grad(model, val, names)
    eta = 0.1
    u = scale(v, eta)
    mask = top_k_signed(param_scores(u, total), 50)
    assert sum(len(indices) for indices in mask.values()) == 50
    frozen = {name: tensor - apply_mask(u, mask)[name] for name, tensor in u.items()}
    gap = example_scores(model, pool, u) - example_scores(model, pool, apply_mask(u, mask))
    assert close(gap, example_scores(model, pool, frozen))
    assert float(gap.abs().max()) > 0.1 * float(example_scores(model, pool, u).abs().max())

    kept, dropped = pool[:2], pool[2:]
    aware = param_scores(u, grad_sum(model, kept, names))
    excluded = param_scores(u, grad_sum(model, dropped, names))
    isolated = param_scores(u, total)
    assert all(close(isolated[n] - aware[n], excluded[n]) for n in names)
    again = reselect_params(model, kept, u, 50)
    assert all(torch.equal(again[n], top_k_signed(aware, 50)[n]) for n in names)
    assert any(not torch.equal(again[n], mask[n]) for n in names)


# ---------------------------------------------------------------- diagonal proxy and stability


def spectral(p: Problem) -> float:
    return float(torch.linalg.matrix_norm(p.h - p.c.diag(), ord=2))


def largest_example(p: Problem) -> float:
    return float(p.g.norm(dim=1).max())


@pytest.mark.parametrize("seed", range(8))
def test_diagonal_proxy_perturbation(seed: int) -> None:
    p = random_problem(seed) if seed % 2 else SoftmaxRegression(seed).problem()
    rest = (p.h - p.c.diag()) @ p.total
    by_parameter = (p.interactions("diag") - p.interactions("full")).sum(0)
    by_example = (p.interactions("diag") - p.interactions("full")).sum(1)
    assert close(by_parameter, p.eta**2 / 2 * rest * p.total)
    assert close(by_example, p.eta**2 / 2 * (p.g @ rest))
    size = p.eta**2 / 2 * spectral(p)
    assert float(by_parameter.abs().max()) <= size * float(p.total.norm()) ** 2
    assert float(by_example.abs().max()) <= size * largest_example(p) * float(p.total.norm())


def test_diagonal_proxy_bounds_are_attained() -> None:
    """Their constants are the smallest: G an eigenvector and, for parameters, one coordinate."""
    base = random_problem(0, n=2, d=4)
    g = torch.tensor([[0.0, 2, 0, 0], [0, 1, 0, 0]], dtype=torch.float64)
    p = Problem(base.v, g, base.c.diag() + 5 * torch.eye(4, dtype=torch.float64), base.c, 0.3)
    size = p.eta**2 / 2 * spectral(p)
    by_parameter = (p.interactions("diag") - p.interactions("full")).sum(0)
    by_example = (p.interactions("diag") - p.interactions("full")).sum(1)
    assert float(by_parameter.abs().max()) == pytest.approx(size * 3.0**2, rel=1e-12)
    assert float(by_example.abs().max()) == pytest.approx(size * 2 * 3, rel=1e-12)


def top_parameters(scores: Tensor, k: int) -> list[int]:
    return top_k_signed({"w": scores}, k)["w"].tolist()


def top_examples(scores: Tensor, b: int) -> list[int]:
    return top_b(scores, range(len(scores)), b)


@pytest.mark.parametrize("side", ["parameters", "examples"])
def test_stability_corollaries(side: str) -> None:
    """A boundary gap above the bound keeps the set; below it, some sets do change."""
    stable = changed = 0
    for seed in range(60):
        p = random_problem(seed, eta=10 ** (-2 * (seed % 3) / 2 - 0.5))
        if side == "parameters":
            axis, reach, top = 0, float(p.total.norm()), top_parameters
        else:
            axis, reach, top = 1, largest_example(p), top_examples
        diag, full = (p.interactions(order).sum(axis) for order in ("diag", "full"))
        bound = p.eta**2 * spectral(p) * float(p.total.norm()) * reach
        ranked = diag.sort(descending=True).values
        for k in range(1, len(diag)):
            same = top(diag, k) == top(full, k)
            if float(ranked[k - 1] - ranked[k]) > bound:
                assert same
                stable += 1
            else:
                changed += not same
    assert stable > 20 and changed > 20


def test_data_stability_bound_is_sharp() -> None:
    """Just above the bound the set is kept, just below it changes (B_g = |G| along one axis)."""
    for excess, same in ((1.01, True), (0.99, False)):
        eta, size, length = 0.3, 4.0, 2.0
        axis = torch.tensor([1.0, 0, 0], dtype=torch.float64)
        g = length * torch.stack([axis, -axis, axis])
        c = torch.full((3,), 0.5, dtype=torch.float64)
        slope = eta**2 * size * length / 2 * excess
        v = (slope + eta**2 / 2 * 0.5 * length) / eta * axis
        p = Problem(v, g, c.diag() + size * torch.outer(axis, axis), c, eta)
        diag, full = (p.interactions(order).sum(1) for order in ("diag", "full"))
        ranked = diag.sort(descending=True).values
        bound = eta**2 * largest_example(p) * spectral(p) * float(p.total.norm())
        assert float(ranked[1] - ranked[2]) == pytest.approx(excess * bound, rel=1e-9)
        assert top_examples(diag, 2) == [0, 2]
        assert (top_examples(full, 2) == [0, 2]) is same


def test_parameter_set_changes_below_the_bound() -> None:
    """Two coordinates, first-order nearly tied; the Hessian the diagonal ignores swaps them."""
    v = torch.tensor([1.01, 1.0], dtype=torch.float64)
    g = torch.ones(1, 2, dtype=torch.float64)
    h = torch.tensor([[2.0, 0], [0, 0.5]], dtype=torch.float64)
    c = torch.ones(2, dtype=torch.float64)
    swapped = Problem(v, g, h, c, 0.1)
    kept = Problem(v, g, h, c, 0.001)
    for p, same in ((swapped, False), (kept, True)):
        diag, full = (p.interactions(order).sum(0) for order in ("diag", "full"))
        gap = float(diag[0] - diag[1])
        assert (gap > p.eta**2 * spectral(p) * float(p.total.norm()) ** 2) is same
        assert top_parameters(diag, 1) == [0]
        assert (top_parameters(full, 1) == [0]) is same


# ---------------------------------------------------------------- local truncation


def validation_loss(model: Any, examples: list[TinyExample]) -> Tensor:
    return torch.stack([example_loss(model, e.input_ids, e.labels) for e in examples]).mean()


def moved(model: Any, direction: Vector, amount: float) -> Any:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(amount * direction[name])
    return model


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["parameters", "examples"])
def test_truncation_orders_in_a_network(arch: str, side: str) -> None:
    """Halving eta divides the first-order error by 4, the second-order error by 8."""
    model, val, pool = tiny_model(arch), tiny_examples(3, seed=1), tiny_examples(4, seed=2)
    names = [name for name, _ in model.named_parameters()]
    direction = grad_sum(model, pool if side == "parameters" else pool[:2], names)
    if side == "parameters":
        direction = apply_mask(direction, top_k_signed(direction, 4000))
    direction = scale(direction, 1 / norm(direction))
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        loss = validation_loss(model, val)
        v = torch.autograd.grad(loss, parameters, create_graph=True)
        slope = sum((g * direction[n]).sum() for n, g in zip(names, v, strict=True))
        assert isinstance(slope, Tensor)
        hessian_product = torch.autograd.grad(slope, parameters)
    bend = dot(direction, dict(zip(names, hessian_product, strict=True)))

    first, second = [], []
    for eta in (0.04, 0.02, 0.01, 0.005):
        with torch.no_grad():
            gain = float(loss - validation_loss(moved(model, direction, -eta), val))
        first.append(abs(gain - eta * float(slope.detach())))
        second.append(abs(gain - eta * float(slope.detach()) + eta**2 / 2 * bend))
    assert min(second) > 1e-12  # far above rounding
    assert math.log2(first[-2] / first[-1]) == pytest.approx(2, abs=0.1)
    assert math.log2(second[-2] / second[-1]) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_truncation_bounds_with_known_constants(seed: int) -> None:
    """beta = mean |x|^2 / 2 and rho = sqrt(2/27) mean |x|^3 for softmax cross-entropy."""
    task = SoftmaxRegression(seed)
    p = task.problem()
    lengths = task.x_val.norm(dim=1)
    beta, rho = float((lengths**2).mean()) / 2, math.sqrt(2 / 27) * float((lengths**3).mean())
    for eta in (1.0, 0.3, 0.1, 0.03):
        for chosen in ([0], [1, 4], list(range(7))):
            direction = p.g[chosen].sum(0)
            size = eta * float(direction.norm())
            gain = float(task.val_loss(task.w) - task.val_loss(task.w - eta * direction))
            first = p.utility(-eta * direction, "first")
            second = p.utility(-eta * direction, "full")
            assert abs(gain - first) <= beta / 2 * size**2
            assert abs(gain - second) <= rho / 6 * size**3


# ---------------------------------------------------------------- score drift


@pytest.mark.parametrize("seed", range(4))
def test_score_drift_bound_with_known_constants(seed: int) -> None:
    """Along gradient descent on a subset, with Lipschitz constants that hold everywhere."""
    task, eta = SoftmaxRegression(seed), 0.1
    lengths, lengths_val = task.x.norm(dim=1), task.x_val.norm(dim=1)
    bound_g, lipschitz_g = math.sqrt(2) * lengths, lengths**2 / 2
    bound_v = math.sqrt(2) * float(lengths_val.mean())
    lipschitz_v = float((lengths_val**2).mean()) / 2

    def scores(w: Tensor) -> tuple[Tensor, Tensor]:
        v, g = task.gradients(w)
        return eta * (g @ v), eta * v * g.sum(0)

    by_example, by_parameter = scores(task.w)
    w, share = task.w, []
    for _ in range(12):
        w = w - 0.05 * task.gradients(w)[1][:4].sum(0)
        distance = float((w - task.w).norm())
        now_example, now_parameter = scores(w)
        drift = (now_example - by_example).abs()
        limit = eta * (bound_v * lipschitz_g + bound_g * lipschitz_v) * distance
        assert bool((drift <= limit).all())
        share.append(float((drift / limit).max()))
        drift_parameter = (now_parameter - by_parameter).abs()
        limit = eta * (bound_v * lipschitz_g.sum() + bound_g.sum() * lipschitz_v) * distance
        assert bool((drift_parameter <= limit).all())
    assert min(share) > 0.02  # the scores do drift, by a visible part of the bound


def test_score_drift_along_restricted_training() -> None:
    """In a network, with B and L measured as the largest norms and secants on the trajectory."""
    model, pool, val = tiny_model("qwen3"), tiny_examples(4, seed=1), tiny_examples(3, seed=2)
    names = [n for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    gen = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    masks = {n: torch.rand(parameters[n].shape, generator=gen) < 0.3 for n in names}
    rates = cosine_schedule(6, 1e-2)
    path = [model]
    for steps in (1, 2, 4, 6):
        weights, _, _ = restricted_adamw(model, (pool * 2)[:steps], rates[:steps], 1, masks)
        path.append(copy.deepcopy(model))
        path[-1].load_state_dict(weights, strict=False)
    eta, probe = 0.1, pool[0]
    v = [val_grad(m, val, names) for m in path]
    g = [example_gradient(m, probe.input_ids, probe.labels, names) for m in path]

    def distance(left: Vector, right: Vector) -> float:
        return norm({n: left[n] - right[n] for n in names})

    w = [{n: p.detach() for n, p in m.named_parameters() if n in names} for m in path]
    far = [distance(w[t], w[0]) for t in range(1, len(path))]
    assert far[0] > 0
    lipschitz_v = max(distance(v[t], v[0]) / far[t - 1] for t in range(1, len(path)))
    lipschitz_g = max(distance(g[t], g[0]) / far[t - 1] for t in range(1, len(path)))
    factor = max(map(norm, v)) * lipschitz_g + max(map(norm, g)) * lipschitz_v
    drift = [eta * abs(dot(v[t], g[t]) - dot(v[0], g[0])) for t in range(1, len(path))]
    share = [d / (eta * factor * f) for d, f in zip(drift, far, strict=True)]
    assert max(share) <= 1 and min(share) > 1e-3
