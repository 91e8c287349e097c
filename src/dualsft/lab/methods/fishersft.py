"""FisherSFT: greedy selection of examples by the log det of their token features.

Replaces the data selection of Algorithm 1 (lines 10, 11). With the trunk frozen, predicting the
next token is a logistic regression on the features x_t that enter the output head. Its Fisher
information is bounded from below by a multiple of Σ x_t x_tᵀ, so

    f(S) = log det(V₀ + Σ_{i∈S} X_iᵀ X_i),     V₀ = λ I

is maximized greedily, where X_i are the features at the positions that predict the response of
example i. The method uses no labels, validation data or gradients, and needs one forward pass.
Features are projected to `dim` numbers by a seeded Gaussian matrix. Of each example only the
strongest directions are kept, as a factor F_i of `rank` rows with F_iᵀ F_i ≈ X_iᵀ X_i.

The gain of an example, log det(I + F_i V⁻¹ F_iᵀ), never increases as S grows, so an old gain is an
upper bound. Only the examples with the largest bounds are re-evaluated, and the result equals that
of the plain greedy rule. V⁻¹ is updated by Woodbury's identity in fp64 and recomputed every
`REBUILD` choices.

Shape letters: N examples, q rows of a factor, r dimension of a projected feature.
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

REBUILD = 500  # choices between recomputations of V⁻¹ from V, which limits rounding errors
ON_TOP = 64  # examples re-evaluated at a time
CHUNK = 2048  # examples per chunk when gains are computed


class FisherSFT(DataMethod):
    """Selects b examples greedily by the log det of their features at θ_old."""

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
        """(F [N, q, r], energy of the features ‖X_i‖² [N]), on the CPU."""
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
        """A seeded Gaussian matrix [D, r]; the identity if the model is no wider than `dim`."""
        head = output_head(model)
        width, dim = head.in_features, self.options.dim
        dtype = accumulation_dtype(head.weight.dtype)
        if width <= dim:
            return torch.eye(width, dtype=dtype, device=head.weight.device)
        drawn = job.rng("fishersft/projection").standard_normal((width, dim)) / dim**0.5
        return torch.from_numpy(drawn).to(head.weight.device, dtype)


def features(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, ...]:
    """Inputs of the output head at positions that predict the response: [T_i, D] per example."""
    positions = Positions.of(batch)
    hidden = last_hidden(model, batch)[positions.row_M, positions.column_M]
    return hidden.to(accumulation_dtype(hidden.dtype)).split(positions.count_B.tolist())


def pooled(x_Tr: Tensor) -> Tensor:
    """Normalized mean over the tokens: [1, r]."""
    mean = x_Tr.mean(0, keepdim=True)
    return mean / torch.linalg.vector_norm(mean).clamp_min(1e-30)


def factor(x_Tr: Tensor, rank: int) -> Tensor:
    """F [rank, r] where Fᵀ F is the best rank-`rank` approximation of Xᵀ X.

    Exact, and zero-padded, if there are at most `rank` tokens.
    """
    tokens, width = x_Tr.shape
    if tokens <= rank:
        return torch.nn.functional.pad(x_Tr, (0, 0, 0, rank - tokens))
    if tokens <= width:  # decompose the smaller of the two Gram matrices
        vectors = torch.linalg.eigh(x_Tr @ x_Tr.T).eigenvectors
        return vectors[:, -rank:].T @ x_Tr
    values, vectors = torch.linalg.eigh(x_Tr.T @ x_Tr)
    return values[-rank:].clamp_min(0.0).sqrt()[:, None] * vectors[:, -rank:].T


# --- the greedy rule ------------------------------------------------------------------------------


class Information:
    """V = V₀ + Σ F_iᵀ F_i and its inverse, in fp64 where the device supports it."""

    def __init__(self, width: int, level: float, device: torch.device) -> None:
        self.dtype = reduction_dtype(device)
        self.matrix = torch.eye(width, dtype=self.dtype, device=device) * level
        self.inverse = torch.eye(width, dtype=self.dtype, device=device) / level
        self.num_added = 0

    def gains(self, factors_Nqr: Tensor) -> np.ndarray:
        """log det(I + F V⁻¹ Fᵀ) of each factor, computed in chunks."""
        found = []
        for start in range(0, len(factors_Nqr), CHUNK):
            f = factors_Nqr[start : start + CHUNK].to(self.dtype)
            inner = f @ self.inverse @ f.mT
            inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
            diagonal = torch.linalg.cholesky(inner).diagonal(dim1=-2, dim2=-1)
            found.append(2.0 * diagonal.log().sum(-1))
        return torch.cat(found).cpu().numpy().astype(np.float64)

    def add(self, factor_qr: Tensor) -> None:
        """V += Fᵀ F; updates V⁻¹ by Woodbury's identity, or from V every `REBUILD` calls."""
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
    """(chosen positions in order, gain of each); the same result as the plain greedy rule.

    Ties go to the first example. `level` is λ of V₀ = λ I.
    """
    information = Information(factors_Nqr.shape[-1], level, factors_Nqr.device)
    upper = information.gains(factors_Nqr)
    evaluated = np.zeros(len(upper), np.int64)  # number of choices made when the gain was computed
    chosen, gains = [], []
    for number in range(b):
        # a current gain that is at least every upper bound is the largest gain
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
