"""Learning rate, epochs and batch size that fit a number of rows: what `auto` means in finetune.*.

The paper's settings (2e-5, 3 epochs, 64 rows per step) were made for about 7,500 selected rows,
350 steps. On a few dozen rows they are three steps that change nothing. `sized` keeps what those
settings do, a movement lr × steps of 7e-3, at any size (docs/algorithm.md, "Settings that follow
the size"). Pure functions of counts; Algorithm 1 leaves these values open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualsft.config.fields import Auto

MOVEMENT = 7e-3
"""lr × steps of the paper: 350 steps at 2e-5."""
LEAST_LR, MOST_LR = 2e-5, 1e-4
"""The paper's rate, and the best dense rate of a small model in few steps (SmolLM2-135M, 300 rows,
57 steps; 5e-4 for a mask)."""
MASKED = 3.0
"""Factor for a mask: a twentieth of the entries moves the model less. Measured 5, in the paper 1;
with it the rate of a mask is 6e-5 to 3e-4."""
SMALLEST_BATCH, LARGEST_BATCH = 8, 64
EPOCHS, MOST_EPOCHS = 3, 8
WANTED_STEPS = 60
"""Steps in 3 epochs below which the batch is halved."""
ENOUGH_STEPS = 30
"""Steps below which epochs are added."""


@dataclass(frozen=True)
class Sizes:
    """Training settings for a number of rows."""

    lr: float
    epochs: int
    batch_size: int


def sized(
    num_rows: int,
    masked: bool,
    lr: float | Auto = "auto",
    epochs: int | Auto = "auto",
    batch_size: int | Auto = "auto",
) -> Sizes:
    """The settings for `num_rows` training rows; a number is kept, and the others follow it."""
    given = EPOCHS if epochs == "auto" else epochs
    if batch_size == "auto":
        batch_size = LARGEST_BATCH
        while batch_size > SMALLEST_BATCH and given * _steps(num_rows, batch_size) < WANTED_STEPS:
            batch_size //= 2
    per_epoch = _steps(num_rows, batch_size)
    if epochs == "auto":
        epochs = min(MOST_EPOCHS, max(EPOCHS, math.ceil(ENOUGH_STEPS / per_epoch)))
    if lr == "auto":
        lr = min(MOST_LR, max(LEAST_LR, MOVEMENT / (epochs * per_epoch)))
        lr = float(f"{lr:.2g}") * (MASKED if masked else 1.0)  # no digits that mean nothing
    return Sizes(lr, epochs, batch_size)


def _steps(num_rows: int, batch_size: int) -> int:
    return math.ceil(max(1, num_rows) / batch_size)
