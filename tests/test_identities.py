"""The oracle's formulas are the paper's, on tiny problems in float64 (docs/algorithm.md).

Theorem 1 (scores are Shapley values) by brute force over all coalitions, Prop. 1 (coordination gap)
in a network, and the gradient of CWSD in closed form. The package is compared with the oracle
elsewhere; here is what the oracle itself stands on.
"""

from __future__ import annotations

import math

import pytest
import torch
from models import tiny_examples, tiny_model
from oracle import (
    apply_mask,
    cwsd_gradient,
    cwsd_loss,
    example_scores,
    grad_sum,
    gradient_of,
    param_scores,
    projection,
    reselect_params,
    response_logits,
    scale,
    shapley,
    top_k_signed,
    val_grad,
)
from torch import Tensor, nn

torch.set_num_threads(1)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> bool:
    return float((left - right).abs().max()) <= tolerance * (1 + float(right.abs().max()))


# ---------------------------------------------------------------- Theorem 1


@pytest.mark.parametrize("sizes", [(8, 7), (1, 5), (6, 1)])
def test_the_oracle_s_scores_are_shapley_values(sizes: tuple[int, int]) -> None:
    """Of the local utility with the diagonal proxy: both kinds of scores, lambda included."""
    gen = torch.Generator().manual_seed(1)
    n, d = sizes
    lam, eta = 0.8, 0.3
    g, new, prior, root = (
        torch.randn(shape, generator=gen, dtype=torch.float64)
        for shape in ((n, d), (d,), (d,), (d,))
    )
    total, c = g.sum(0), root.abs() + 0.1
    v = new + lam * prior

    def utility(update: Tensor) -> float:
        """Eq. taylor_local_utility without its remainder."""
        return float(-v @ update - 0.5 * update @ (c * update))

    def of_parameters(chosen: frozenset[int]) -> float:
        mask = torch.tensor([float(i in chosen) for i in range(d)], dtype=torch.float64)
        return utility(-eta * mask * total)

    def of_examples(chosen: frozenset[int]) -> float:
        return utility(-eta * g[sorted(chosen)].sum(0))

    u = projection({"w": new}, {"w": prior}, {"w": total}, {"w": c}, lam, False, eta)
    for num, game, scores in (
        (d, of_parameters, param_scores(u, {"w": total})["w"]),
        (n, of_examples, g @ u["w"]),
    ):
        phi = shapley(num, game)
        assert close(scores, phi)
        assert abs(float(phi.sum()) - game(frozenset(range(num)))) < 1e-10  # efficiency

    relative = projection({"w": v}, {"w": prior}, {"w": total}, None, lam, True, eta, step="sgd")
    assert close(relative["w"], eta * (v + lam * prior * v.norm() / prior.norm()))
    adam = projection({"w": v}, {"w": prior}, {"w": total}, {"w": c}, lam, False, eta, 50.0, "adam")
    assert close(adam["w"], eta * (v + lam * prior) / c - eta**2 / 2 * 50 * total)


def test_shapley_of_games_that_are_not_quadratic() -> None:
    """On quadratic games other averages (Banzhaf's) give the same values; on these they do not."""
    together = shapley(5, lambda s: float({0, 1, 2} <= s))
    assert together.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    gloves = shapley(3, lambda s: float(0 in s and len(s) > 1))
    assert gloves.tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6])


# ---------------------------------------------------------------- Proposition 1


def test_coordination_gap_in_a_network() -> None:
    """Isolated minus mask-aware scores on a model's own gradients, on both sides."""
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


# ---------------------------------------------------------------- CWSD


def logit_gradient(z_old: Tensor, z: Tensor, tau: float) -> Tensor:
    """omega tau (p - q) / T_n, written out."""
    q_one = torch.softmax(z_old, -1)
    omega = 1 + (q_one * q_one.log()).sum(-1).mean() / math.log(z.shape[-1])
    return omega * tau * (torch.softmax(z / tau, -1) - torch.softmax(z_old / tau, -1)) / len(z)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_cwsd_value(tau: float) -> None:
    """omega tau^2 mean_t KL, the KL from torch; omega from the teacher at temperature 1."""
    teacher, student = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    total = 0.0
    anchors = tiny_examples(3, seed=4)
    for e in anchors:
        z_old = response_logits(teacher, e.input_ids, e.labels).detach()
        z = response_logits(student, e.input_ids, e.labels).detach()
        kl = nn.functional.kl_div(
            torch.log_softmax(z / tau, -1), torch.softmax(z_old / tau, -1), reduction="sum"
        )
        entropy = torch.distributions.Categorical(logits=z_old).entropy().mean()
        total += float((1 - entropy / math.log(97)) * tau**2 * kl / len(z)) / len(anchors)
    value = cwsd_loss(teacher, student, anchors, tau).detach()
    assert float(value) == pytest.approx(total, rel=1e-12)


def test_cwsd_gradient_is_the_jacobian_product() -> None:
    """v_prior = mean over anchors of J^T omega tau (p - q) / T_n, through a network."""
    teacher, student = tiny_model("gemma3", seed=0), tiny_model("gemma3", seed=1)
    names = [name for name, _ in student.named_parameters()]
    anchors, tau = tiny_examples(3, seed=5), 2.0
    surrogate = []
    for e in anchors:
        z = response_logits(student, e.input_ids, e.labels)
        z_old = response_logits(teacher, e.input_ids, e.labels)
        surrogate.append((z * logit_gradient(z_old, z, tau).detach()).sum() / len(anchors))
    expected = gradient_of(torch.stack(surrogate).sum(), student, names)
    got = cwsd_gradient(teacher, student, anchors, tau, names)
    assert all(close(got[name], expected[name]) for name in names)
    whole = gradient_of(cwsd_loss(teacher, student, anchors, tau), student, names)
    assert all(close(got[name], whole[name]) for name in names)
