"""CWSD on tiny problems in float64 (docs/algorithm.md, CWSD).

The logit gradient is omega tau (p - q) / T_n, its pull-back through a network is v_prior, and value
and gradient are exactly 0.0 where the student is the teacher.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from models import ARCHITECTURES, tiny_examples, tiny_model
from oracle import (
    cwsd_gradient,
    cwsd_loss,
    cwsd_weight,
    fisher_gradient,
    gradient_of,
    l2_gradient,
    norm,
    response_logits,
    response_positions,
)
from torch import Tensor, nn

torch.set_num_threads(1)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> bool:
    return float((left - right).abs().max()) <= tolerance * (1 + float(right.abs().max()))


class LogitTable(nn.Module):
    """A "model" whose parameters are its logits: row t for position t, whatever the tokens."""

    def __init__(self, seed: int, sharpness: float = 1.0) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(
            sharpness * torch.randn(20, 11, generator=gen, dtype=torch.float64)
        )

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[None, : input_ids.shape[1]])


def logit_gradient(z_old: Tensor, z: Tensor, tau: float) -> Tensor:
    """omega tau (p - q) / T_n, written out."""
    q_one = torch.softmax(z_old, -1)
    omega = 1 + (q_one * q_one.log()).sum(-1).mean() / math.log(z.shape[-1])
    return omega * tau * (torch.softmax(z / tau, -1) - torch.softmax(z_old / tau, -1)) / len(z)


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 4.0])
def test_cwsd_logit_gradient(tau: float) -> None:
    teacher, student = LogitTable(0, sharpness=3.0), LogitTable(1)
    anchors = tiny_examples(5, vocab=11, seed=3)
    expected = torch.zeros(20, 11, dtype=torch.float64)
    for e in anchors:
        rows = response_positions(e.labels)
        alone = torch.zeros(20, 11, dtype=torch.float64)
        alone[rows] = logit_gradient(teacher.table[rows], student.table[rows], tau).detach()
        got = cwsd_gradient(teacher, student, [e], tau, ["table"])["table"]
        assert close(got, alone, 1e-15)
        assert float(alone.abs().max()) > 1e-3
        expected += alone / len(anchors)
    got = cwsd_gradient(teacher, student, anchors, tau, ["table"])["table"]
    assert close(got, expected, 1e-15)


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


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cwsd_is_exactly_zero_at_theta_old(arch: str) -> None:
    teacher = tiny_model(arch)
    student = copy.deepcopy(teacher)
    names = [name for name, _ in student.named_parameters()]
    anchors = tiny_examples(3, seed=6)
    assert float(cwsd_loss(teacher, student, anchors, 2.0).detach()) == 0.0
    gradient = cwsd_gradient(teacher, student, anchors, 2.0, names)
    assert all(bool((tensor == 0.0).all()) for tensor in gradient.values())
    assert norm(l2_gradient(teacher, student, names)) == 0.0
    assert norm(fisher_gradient(teacher, student, anchors, names)) == 0.0
    with torch.no_grad():
        student.get_parameter(names[-1]).mul_(1.01)
    assert float(cwsd_loss(teacher, student, anchors, 2.0).detach()) > 0.0
    assert norm(cwsd_gradient(teacher, student, anchors, 2.0, names)) > 0.0


def test_cwsd_weight_goes_from_unsure_to_certain() -> None:
    flat = torch.zeros(4, 11, dtype=torch.float64)
    certain = 100 * torch.eye(4, 11, dtype=torch.float64)
    assert float(cwsd_weight(flat)) == pytest.approx(0.0, abs=1e-15)
    assert float(cwsd_weight(certain)) == pytest.approx(1.0, abs=1e-15)
    assert float(cwsd_weight(torch.cat([flat, certain]))) == pytest.approx(0.5, abs=1e-15)
