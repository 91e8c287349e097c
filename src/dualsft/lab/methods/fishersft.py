"""FisherSFT: the examples whose tokens' features span the most, by log det (METHODS.md B2).

With the trunk frozen, predicting the next token is a logistic regression on the features x_t that
enter the output head; its information is bounded from below by a multiple of Σ x_t x_tᵀ. So

    f(S) = log det(V₀ + Σ_{i∈S} X_iᵀ X_i),     V₀ = λ I

is maximised greedily, X_i being the features at the positions that predict example i's response.
Labels, validation data and gradients play no part: one forward pass. Features are projected to
`dim` numbers by a seeded Gaussian matrix, and of each example only its strongest directions are
kept, as a factor F_i of `rank` rows with F_iᵀ F_i ≈ X_iᵀ X_i.

The gain of an example is log det(I + F_i V⁻¹ F_iᵀ) and never grows while S does, so old gains are
upper bounds: only the examples on top are evaluated again, and the choice is that of the plain
greedy rule. V⁻¹ follows each choice by Woodbury's identity in fp64 and is built anew at times.

Shape letters: N examples, q rows of a factor, r numbers of a projected feature.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example
from dualsft.engine.losses import Positions, last_hidden
from dualsft.lab.methods.per_example import per_example
from dualsft.lab.methods.spice import placed
from dualsft.model.load import output_head
from dualsft.runs.method import DataChoice, DataMethod, Job
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype

REBUILD = 500  # choices between two inverses that are computed from V itself
ON_TOP = 64  # examples evaluated again at a time
CHUNK = 2048  # examples of a chunk when all gains are computed


class FisherSFT(DataMethod):
    """b examples, greedily, by the log det of their features at θ_old."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        factors, energy = self._factors(job, pool)
        rows = placed(factors, job.ctx.device)
        kept = float(torch.linalg.vector_norm(rows, dtype=reduction_dtype(rows.device)) ** 2)
        level = self.options.prior * float(energy.mean()) / rows.shape[-1]
        with job.ctx.reporter.track("fishersft: greedy", b, "examples") as progress:
            chosen, gains = lazy_greedy(rows, b, level, progress.advance)
        facts = {
            "log_det_gain": float(gains.sum()),
            "feature_energy_kept": kept / float(energy.sum()),
            "prior": level,
        }
        return DataChoice(chosen, facts)

    def _factors(self, job: Job, pool: list[Example]) -> tuple[Tensor, Tensor]:
        """(F [N, q, r], the features' energy ‖X_i‖² [N]), in the host's memory."""
        model = job.ctx.theta_old()
        basis = self._projection(job, model)
        width, rank = basis.shape[1], 1
        if self.options.mode == "token_gram":
            rank = min(self.options.rank, width)

        @torch.no_grad()
        def compute(batch: Batch) -> Tensor:
            found = []
            for x in features(model, batch):
                projected = x @ basis
                if self.options.mode == "pooled":
                    projected = pooled(projected)
                energy = projected.square().sum().view(1)
                found.append(torch.cat([factor(projected, rank).flatten(), energy]))
            return torch.stack(found)

        size = rank * width
        label = "features of the pool"
        rows = per_example(job, model, pool, label, size + 1, compute, backward=False)
        return rows[:, :size].unflatten(1, (rank, width)), rows[:, size]

    def _projection(self, job: Job, model: PreTrainedModel) -> Tensor:
        """A seeded Gaussian [D, r]; the identity where the features are no wider than that."""
        head = output_head(model)
        width, dim = head.in_features, self.options.dim
        dtype = accumulation_dtype(head.weight.dtype)
        if width <= dim:
            return torch.eye(width, dtype=dtype, device=head.weight.device)
        drawn = job.rng("fishersft/projection").standard_normal((width, dim)) / dim**0.5
        return torch.from_numpy(drawn).to(head.weight.device, dtype)


def features(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, ...]:
    """What enters the output head where the response is predicted: [T_i, D] of each example."""
    positions = Positions.of(batch)
    hidden = last_hidden(model, batch)[positions.row_M, positions.column_M]
    return hidden.to(accumulation_dtype(hidden.dtype)).split(positions.count_B.tolist())


def pooled(x_Tr: Tensor) -> Tensor:
    """The tokens' mean, of norm one: [1, r]."""
    mean = x_Tr.mean(0, keepdim=True)
    return mean / torch.linalg.vector_norm(mean).clamp_min(1e-30)


def factor(x_Tr: Tensor, rank: int) -> Tensor:
    """F [rank, r] with Fᵀ F the best approximation of Xᵀ X of that rank; exact for few tokens."""
    tokens, width = x_Tr.shape
    if tokens <= rank:
        return torch.nn.functional.pad(x_Tr, (0, 0, 0, rank - tokens))
    if tokens <= width:  # the smaller of the two Gram matrices
        vectors = torch.linalg.eigh(x_Tr @ x_Tr.T).eigenvectors
        return vectors[:, -rank:].T @ x_Tr
    values, vectors = torch.linalg.eigh(x_Tr.T @ x_Tr)
    return values[-rank:].clamp_min(0.0).sqrt()[:, None] * vectors[:, -rank:].T


# --- the greedy rule ------------------------------------------------------------------------------


class Information:
    """V = V₀ + Σ F_iᵀ F_i and its inverse, in fp64 where the device has it."""

    def __init__(self, width: int, level: float, device: torch.device) -> None:
        self.dtype = reduction_dtype(device)
        self.matrix = torch.eye(width, dtype=self.dtype, device=device) * level
        self.inverse = torch.eye(width, dtype=self.dtype, device=device) / level
        self.num_added = 0

    def gains(self, factors_Nqr: Tensor) -> np.ndarray:
        """log det(I + F V⁻¹ Fᵀ) of each, a chunk at a time."""
        found = []
        for start in range(0, len(factors_Nqr), CHUNK):
            f = factors_Nqr[start : start + CHUNK].to(self.dtype)
            inner = f @ self.inverse @ f.mT
            inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
            diagonal = torch.linalg.cholesky(inner).diagonal(dim1=-2, dim2=-1)
            found.append(2.0 * diagonal.log().sum(-1))
        return torch.cat(found).cpu().numpy().astype(np.float64)

    def add(self, factor_qr: Tensor) -> None:
        """V += Fᵀ F; the inverse by Woodbury's identity, and every so often from V."""
        f = factor_qr.to(self.dtype)
        self.matrix.addmm_(f.T, f)
        self.num_added += 1
        if self.num_added % REBUILD == 0:
            self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(self.matrix))
            return
        moved = f @ self.inverse
        inner = moved @ f.T
        inner.diagonal().add_(1.0)
        self.inverse -= moved.T @ torch.cholesky_solve(moved, torch.linalg.cholesky(inner))


def lazy_greedy(
    factors_Nqr: Tensor, b: int, level: float, step: Callable[[int], None] = lambda _: None
) -> tuple[np.ndarray, np.ndarray]:
    """(positions in the order they were chosen, the gain of each): the plain greedy choice.

    Of equal gains the first. `level` is λ of V₀ = λ I.
    """
    information = Information(factors_Nqr.shape[-1], level, factors_Nqr.device)
    upper = information.gains(factors_Nqr)
    evaluated = np.zeros(len(upper), np.int64)  # after how many choices the gain was computed
    chosen, gains = [], []
    for number in range(b):
        while evaluated[best := int(upper.argmax())] < number:
            near = np.argpartition(-upper, min(ON_TOP, len(upper)) - 1)[:ON_TOP]
            stale = np.sort(np.append(near[near != best], best))
            stale = stale[(evaluated[stale] < number) & np.isfinite(upper[stale])]
            index = torch.from_numpy(stale).to(factors_Nqr.device)
            upper[stale] = information.gains(factors_Nqr[index])
            evaluated[stale] = number
        chosen.append(best)
        gains.append(float(upper[best]))
        information.add(factors_Nqr[best])
        upper[best] = -np.inf
        step(1)
    return np.array(chosen), np.array(gains)
