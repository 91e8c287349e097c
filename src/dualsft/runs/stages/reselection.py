"""Fixed-side re-selection: rounds that re-select one side given the latest other side.

ALGORITHM.md §2 "Re-selection" (the paper's Data → Param and Param → Data). u stays that of the
one-shot run: Data → Param uses s_θ = u ⊙ G_S with G_S summed over the selected examples, Param →
Data uses s_D = ⟨u ⊙ m, g_n⟩. `select.order` says which side moves first. Each round_<t>/ holds
the complete pair it ends with; the one-shot selection stays in 5_selection itself, and
summary.json's `final` names the round that fine-tuning uses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dualsft.algorithm.topk import TopK, top_b, topk_signed
from dualsft.data.examples import Example
from dualsft.distributed.world import world
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import loss_objective, walk
from dualsft.memory.placement import blank
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.stages.chosen import (
    describe_entries,
    product_source,
    write_mask,
    write_selected,
)
from dualsft.runs.stages.scores import Scored, exact_dots
from dualsft.system.paths import RunPath


def reselect(
    ctx: RunContext,
    part: RunPath,
    engine: GhostEngine,
    pool: list[Example],
    scored: Scored,
    mask: TopK,
    positions: np.ndarray,
) -> dict[str, Any]:
    """Run the rounds and write their folders; returns what the selection's summary adds."""
    data_to_param = ctx.config.select.order == "data_to_param"
    history = []
    for number in range(1, ctx.config.select.rounds + 1):
        moves_mask = data_to_param == (number % 2 == 1)
        side = "parameters" if moves_mask else "examples"
        label = f"round {number} ({side})"
        if moves_mask:
            new_mask = select_mask(ctx, engine, pool, scored, positions, mask.num_selected, label)
            overlap = _mask_jaccard(mask, new_mask)
            mask = new_mask
        else:
            chosen = select_examples(ctx, engine, pool, scored, mask, len(positions), label)
            overlap = _jaccard(set(positions.tolist()), set(chosen.tolist()))
            positions = chosen
        folder = part / f"round_{number}"
        folder.mkdir()
        facts: dict[str, Any] = {"round": number, "moved": side, "jaccard": overlap}
        facts |= write_mask(ctx, folder, mask.indices, mask.num_total)
        facts |= describe_entries(ctx, mask)
        write_selected(ctx, folder, [pool[i] for i in positions])
        (folder / "summary.json").write_json(facts)
        history.append({"round": number, "moved": side, "jaccard": overlap})
    return {"rounds": history, "final": f"round_{len(history)}"}


def select_mask(
    ctx: RunContext,
    engine: GhostEngine,
    pool: list[Example],
    scored: Scored,
    positions: np.ndarray,
    k: int,
    label: str,
) -> TopK:
    """Data → Param: top k of u ⊙ G_S."""
    subset_sum = blank(engine.candidates, engine.candidates.dtype)
    chosen = [pool[i] for i in positions]
    objective = loss_objective(engine.model)
    walk(engine, chosen, objective, pass_settings(ctx), ctx.reporter, label, sums=subset_sum)
    source = product_source(scored.projection, subset_sum, scored.terms.eta_sc)
    return topk_signed(source, k)


def select_examples(
    ctx: RunContext,
    engine: GhostEngine,
    pool: list[Example],
    scored: Scored,
    mask: TopK,
    b: int,
    label: str,
) -> np.ndarray:
    """Param → Data: top b of ⟨u ⊙ m, g_n⟩, in ascending position."""
    masked = scored.projection.restricted(mask.indices)
    dots = exact_dots(ctx, engine, pool, masked, label)
    ties = np.array([e.index for e in pool])
    return np.sort(top_b(dots, ties, b))


def _jaccard(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b)


def _mask_jaccard(a: TopK, b: TopK) -> float:
    shared = world().across(
        sum(
            int(torch.isin(index, b.indices[name], assume_unique=True).sum())
            for name, index in a.indices.items()
        )
    )
    return shared / (a.num_selected + b.num_selected - shared)
