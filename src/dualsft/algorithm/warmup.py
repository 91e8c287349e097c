"""The curvature ĉ of the pilot warmup: Algorithm 1 line 1.

ĉ = sqrt(r / (1 - beta2^t)) + eps, with the second moment r, beta2, step count t and eps of the
warmup optimizer. The training loop is `train/loop.py`.
"""

from __future__ import annotations

import torch

from dualsft.distributed.world import world
from dualsft.model.load import Candidates
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import LazyVector, Seen
from dualsft.train.optimizer import SparseAdamW

PART = 1 << 24  # entries compared at a time


def adam_rms(optimizer: SparseAdamW, candidates: Candidates) -> LazyVector:
    """ĉ over the candidates, read piece by piece from the optimizer's state."""
    group = optimizer.param_groups[0]
    beta2, eps = group["betas"][1], group["eps"]

    def piece(name: str, start: int, stop: int, _: Seen) -> torch.Tensor:
        first = world().held(candidates[name].shape)[0]
        if start == stop:
            return torch.empty(0, dtype=candidates.dtype)
        second = optimizer.second_moment(name, start - first, stop - first)
        # a parameter without updates has second moment zero: avoid dividing by zero
        unbiased = second / (1.0 - beta2 ** float(optimizer.num_updates(name) or 1))
        return unbiased.sqrt_().add_(eps).to(candidates.dtype)

    forms = {name: Form(candidates.dtype, p.shape) for name, p in candidates.items()}
    return LazyVector(forms, next(iter(candidates.values())).device, piece)


@torch.no_grad()
def rounding_norm(optimizer: SparseAdamW) -> float:
    """‖θ̄ − its fp32 master weights‖: the rounding error of θ̄."""
    total = torch.zeros((), dtype=torch.float64)
    for name in optimizer.names:
        weight = optimizer.weight(name)
        for first in range(0, weight.numel(), PART):
            last = min(first + PART, weight.numel())
            exact = optimizer.master(name, first, last)
            apart = torch.linalg.vector_norm(exact - weight[first:last].to(exact))
            total += apart.cpu().double() ** 2
    return float(world().sum_rows_(total).sqrt())
