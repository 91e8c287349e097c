"""Fixed-side re-selection: each round re-selects one side given the latest other side.

The paper's Data → Param and Param → Data. u is that of the one-shot run: Data → Param uses
s_θ = u ⊙ G_S with G_S summed over the selected examples, Param → Data uses s_D = ⟨u ⊙ m, g_n⟩.
`select.order` sets which side is re-selected first. Each round_<t>/ holds the complete pair after
that round; 5_selection itself holds the one-shot selection, and `final` in summary.json names the
round that fine-tuning uses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualsft.algorithm.projection import Scored
from dualsft.algorithm.selection import mask_jaccard, select_entries, select_examples
from dualsft.algorithm.topk import TopK
from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.stages.chosen import describe_entries, write_mask, write_selected
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
    """Run the rounds and write their folders; returns entries for the selection's summary."""
    data_to_param = ctx.config.select.order == "data_to_param"
    passes = pass_settings(ctx)
    history = []
    for number in range(1, ctx.config.select.rounds + 1):
        moves_mask = data_to_param == (number % 2 == 1)
        side = "parameters" if moves_mask else "examples"
        label = f"round {number} ({side})"
        if moves_mask:
            rows, k = [pool[i] for i in positions], mask.num_selected
            new_mask = select_entries(engine, rows, scored, k, passes, ctx.reporter, label)
            overlap = mask_jaccard(mask, new_mask)
            mask = new_mask
        else:
            b = len(positions)
            chosen = select_examples(engine, pool, scored, mask, b, passes, ctx.reporter, label)
            shared = len(np.intersect1d(positions, chosen))
            overlap = shared / (len(positions) + len(chosen) - shared)
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
