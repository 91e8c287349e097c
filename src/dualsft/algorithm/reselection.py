"""Fixed-side re-selection: select one side given the latest selection of the other.

The paper's Data → Param and Param → Data. u is that of the one-shot run: Data → Param uses
s_θ = u ⊙ G_S with G_S summed over the selected examples, Param → Data uses s_D = ⟨u ⊙ m, g_n⟩.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dualsft.algorithm.projection import Scored
from dualsft.algorithm.scores import exact_dots
from dualsft.algorithm.selection import product_source
from dualsft.algorithm.topk import TopK, top_b, topk_signed
from dualsft.data.examples import Example
from dualsft.distributed.world import world
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.memory.placement import blank
from dualsft.system.progress import Reporter


def select_entries(
    engine: GhostEngine,
    chosen: Sequence[Example],
    scored: Scored,
    k: int,
    passes: PassSettings,
    reporter: Reporter,
    label: str,
) -> TopK:
    """Data → Param: top k of u ⊙ G_S."""
    subset_sum = blank(engine.candidates, engine.candidates.dtype)
    walk(engine, chosen, loss_objective(engine.model), passes, reporter, label, sums=subset_sum)
    return topk_signed(product_source(scored.projection, subset_sum, scored.terms.eta_sc), k)


def select_examples(
    engine: GhostEngine,
    pool: Sequence[Example],
    scored: Scored,
    mask: TopK,
    b: int,
    passes: PassSettings,
    reporter: Reporter,
    label: str,
) -> np.ndarray:
    """Param → Data: top b of ⟨u ⊙ m, g_n⟩, in ascending position."""
    masked = scored.projection.restricted(mask.indices)
    dots = exact_dots(engine, pool, masked, passes, reporter, label)
    return np.sort(top_b(dots, np.array([e.index for e in pool]), b))


def mask_jaccard(a: TopK, b: TopK) -> float:
    """Jaccard index of two masks."""
    shared = world().across(
        sum(
            int(torch.isin(index, b.indices[name], assume_unique=True).sum())
            for name, index in a.indices.items()
        )
    )
    return shared / (a.num_selected + b.num_selected - shared)
