"""Read what a run decided about its rows: the score, rank and state of each.

Reads 4_scores and 5_selection, for the report and for exports. Not part of Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dualsft.system.paths import RunPath

STATES = ("selected", "rejected", "validation", "anchor", "warmup", "pool")
NEAR_SHARE, NEAR_LEAST, NEAR_MOST = 0.05, 10, 500


def scores_of(
    run: RunPath, facts: Mapping[str, Any], ids: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(best known score, its error bound, loss) per row; nan if not available."""
    place = {name: i for i, name in enumerate(ids)}
    score, bound, loss = (np.full(len(ids), np.nan) for _ in range(3))
    current = facts["manifests"]
    if "scores" in current:
        table = (run / "4_scores/examples.parquet").read_table()
        at = np.array([place[name] for name in table["id"].to_pylist()], dtype=np.int64)
        for target, name in ((score, "score"), (bound, "bound"), (loss, "loss")):
            target[at] = table[name].to_numpy().astype(np.float64)
    if "selection" in current:
        for name in ("rescored", "baseline_scores"):
            path = run / f"5_selection/{name}.parquet"
            if path.name in current["selection"]["files"]:
                table = path.read_table(["id", "score"])
                at = np.array([place[i] for i in table["id"].to_pylist()], dtype=np.int64)
                score[at] = table["score"].to_numpy()
                bound[at] = 0.0
    return score, bound, loss


def states_of(
    run: RunPath, facts: Mapping[str, Any], ids: list[str], roles: list[str]
) -> list[str]:
    """State of every row, one of `STATES`."""
    names = {"val": "validation", "anchor": "anchor", "warm": "warmup", "pool": "pool"}
    if "selection" not in facts["manifests"]:
        return [names[role] for role in roles]
    if "b" not in facts["selection"]:  # no data selection: fine-tuning uses all of D_train
        names |= {"pool": "selected", "warm": "selected"}
        return [names[role] for role in roles]
    final = run / "5_selection" / facts["selection"]["final"]
    chosen = set((final / "ids.json").read_json())
    names["pool"] = "rejected"
    warm = (i for i, role in zip(ids, roles, strict=True) if role == "warm")
    if "warmup" not in facts["manifests"] or any(i in chosen for i in warm):
        names["warm"] = "rejected"  # warmup rows were in this method's pool
    return ["selected" if i in chosen else names[role] for i, role in zip(ids, roles, strict=True)]


def ranks_of(
    score: np.ndarray, chosen: np.ndarray, offered: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(rank by score from 1, or 0 without a score; whether the row is near the boundary).

    Near means within a fixed number of ranks of the last selected one, on either side. If the
    method selects low scores, ranks start at the lowest.
    """
    rank, near = np.zeros(len(score), np.int64), np.zeros(len(score), bool)
    rows = np.flatnonzero(offered & np.isfinite(score))
    if not len(rows):
        return rank, near
    inside = chosen[rows]
    sign = 1.0
    if inside.any() and not inside.all():
        sign = 1.0 if np.median(score[rows][inside]) >= np.median(score[rows][~inside]) else -1.0
    order = rows[np.argsort(-sign * score[rows], kind="stable")]
    rank[order] = np.arange(1, len(order) + 1)
    b = int(inside.sum())
    if 0 < b < len(rows):
        reach = int(np.clip(round(NEAR_SHARE * b), NEAR_LEAST, NEAR_MOST))
        near[order[max(0, b - reach) : b + reach]] = True
    return rank, near
