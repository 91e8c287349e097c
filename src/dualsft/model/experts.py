"""Mixtures of experts: which modules hold experts and routers, and how transformers runs them.

transformers stores the routed experts of a layer as 3-D parameters of one module, [expert, out, in]
or [expert, in, out], and computes them by an exchangeable function (`experts_implementation`). What
this interface says about a module is all that is read here, so a class with it needs no entry.

Not part of Algorithm 1; the 3-D weights are candidates (θ) like any other linear weight.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds the routed experts of a layer as 3-D parameters."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def expert_weights(module: Any) -> tuple[str, str]:
    """The names of the 3-D weights of an experts module, in the order of their use."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules whose matrix routes tokens: beside the experts, with one row for each."""
    found: list[nn.Module] = []
    for parent in model.modules():
        experts: Any = next((m for n, m in parent.named_children() if n == "experts"), None)
        separate = isinstance(experts, nn.ModuleList)
        count = len(experts) if separate else getattr(experts, "num_experts", 0)
        for beside in parent.children() if count else ():
            every = [(m, p) for m in beside.modules() for p in m.parameters(recurse=False)]
            matrices = [(m, p) for m, p in every if p.ndim == 2]
            if len(matrices) == 1 and len(matrices[0][1]) == count:
                found.append(matrices[0][0])
    return found


def separate_experts(model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """The layers whose experts are modules of their own, each with its experts."""
    lists = [(m, e) for m in model.modules() for n, e in m.named_children() if n == "experts"]
    return [(layer, list(e)) for layer, e in lists if isinstance(e, nn.ModuleList)]


def how_experts_run(dtype: torch.dtype | None) -> dict[str, Any]:
    """What a loader is told, whatever config.json says: some implementations download kernels.

    None is the choice of transformers: products of groups of rows where the device has a kernel for
    them. There is none in float64, which takes one expert after the other.
    """
    return {"experts_implementation": "eager" if dtype == torch.float64 else None}


def say_how_trained(model: nn.Module) -> None:
    """Log what scores and training do not contain: the auxiliary loss of the routers."""
    config = getattr(model, "config", None)
    if config is not None and getattr(config.get_text_config(), "output_router_logits", False):
        log.warning(
            "config.json sets output_router_logits: the auxiliary loss of the routers is no part "
            "of scores and training, which use the loss of the tokens alone"
        )
