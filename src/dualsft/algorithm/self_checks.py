"""Self-checks of every run: fused logits against the model's, and scores by plain autograd.

Checks of Algorithm 1 lines 5 and 8 (docs/algorithm.md, "What every run checks"): the logits behind
the fused loss against those of the model, and ⟨U, g_n⟩ of single examples by the slow, independent
path (`ghost.alone`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Example
from dualsft.engine.checkpointing import checkpointed
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.losses import both_logits
from dualsft.engine.walk import PassSettings
from dualsft.errors import ConfigError
from dualsft.model.sharded import device_of
from dualsft.storage.vectors import ParamVector, Products, Vector

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""Tolerance of the self-checks by dtype (bf16: at most 4e-4 measured on a real model)."""


def check_fused_loss(
    model: PreTrainedModel, example: Example, settings: PassSettings, tolerance: float
) -> None:
    """Raise if the fused head's logits differ from the model's own on one example.

    A model that transforms its logits in a way that its configuration does not show
    (`engine/losses.py`) would be trained, scored and evaluated with the wrong loss.
    """
    device = device_of(model)
    ours, own = both_logits(model, settings.collate([example], device))
    difference, largest = float((ours - own).abs().max()), float(own.abs().max())
    if not difference <= tolerance * max(1.0, largest):
        raise ConfigError(
            f"{type(model).__name__}: its own logits for example {example.id} (at most "
            f"{largest:.6g}) differ from ours by up to {difference:.6g}; the model changes its "
            "logits in a way that its configuration does not show, and cannot be scored"
        )


def dot_alone(
    engine: GhostEngine, example: Example, direction: Vector, settings: PassSettings
) -> tuple[float, float]:
    """(⟨U, g_n⟩, ‖g_n‖) of one example by plain autograd: no batch, layer rule or fused loss."""
    batch = settings.collate([example], engine.device)
    found: list[Products] = []

    def visit(name: str, gradient: Tensor) -> None:
        block = {"g": ParamVector({name: gradient}), "u": direction}
        found.append(Products(block, [("u", "g"), ("g", "g")]))  # read below: no sync per block

    with checkpointed(engine.model, engine.device.type == "cuda"):  # less memory, slower
        alone(engine.model, engine.candidates, batch, visit)
    return (
        sum(one.dot("u", "g") for one in found),
        sum(one.dot("g", "g") for one in found) ** 0.5,
    )
