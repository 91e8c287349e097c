"""Selection: Algorithm 1 lines 9 to 11, m_θ ← TopK(s_θ, k) and D_sel ← TopB(s_D, b).

Exact, signed, global over all candidates. The parameter scores u ⊙ G are computed chunk by chunk
each time the top-k reads them and are never held in full. The certificate decides which examples
are certainly in or out; the rest, and in half precision those that rounding could move across the
boundary, are scored exactly.

Fixed-side re-selection (the paper's Data → Param and Param → Data) selects one side given the
latest selection of the other, with the u of the one-shot run: s_θ = u ⊙ G_S with G_S summed over
the selected examples, and s_D = ⟨u ⊙ m, g_n⟩.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.duplicates import Duplicates, repeated_texts
from dualsft.algorithm.projection import Scored, param_scores
from dualsft.algorithm.quotas import Draw, Strata
from dualsft.algorithm.scores import exact_dots, judge, settle
from dualsft.algorithm.topk import TopK, top_b, topk_signed
from dualsft.algorithm.topk_reading import ScoreSource
from dualsft.data.examples import Example
from dualsft.distributed.world import world
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.passes import widened
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.memory.placement import at_hand, blank
from dualsft.storage.vectors import CHUNK, ParamVector, Vector
from dualsft.system.progress import Reporter

CARD_CHUNK = 1 << 26
"""Entries per chunk of vectors on a GPU. Small chunks are bound by kernel launches (2.8e9 scores
took 2.3 s on an H200 in chunks of 2^22)."""


def product_source(left: Vector, right: Vector, eta_sc: float) -> ScoreSource:
    """eta_sc · left ⊙ right in chunks, recomputed at every reading; only this process's rows."""
    left, right = at_hand(left), at_hand(right)
    scores = param_scores(eta_sc, left, right)
    on_card = all(isinstance(v, ParamVector) and v.device.type == "cuda" for v in (left, right))
    size = CARD_CHUNK if on_card else CHUNK

    def read() -> Iterator[tuple[str, int, Tensor]]:
        for name, form in scores.forms.items():
            for start, stop in world().own_chunks(form.shape, size):
                yield name, start, scores.piece(name, start, stop)

    return read


def choose_entries(scored: Scored, k: int, reverse: bool = False) -> TopK:
    """The exact signed top k of u ⊙ G; `reverse` takes the bottom k."""
    eta_sc = scored.terms.eta_sc * (-1.0 if reverse else 1.0)
    return topk_signed(product_source(scored.projection, scored.grad_sum, eta_sc), k)


@dataclass(frozen=True)
class Chosen:
    """The selected positions of the pool and how they were found."""

    positions: np.ndarray
    scores: np.ndarray
    """Best known score of every pool example, eta_sc included; -inf if it was passed over because
    it repeats another."""
    bound: np.ndarray
    """Bound on the error of each score; zero where it was scored exactly."""
    rescored: np.ndarray
    """Positions scored exactly by this stage."""
    inside: int
    outside: int
    draws: list[Drawn]
    """The strata that were drawn from; one without quotas."""


@dataclass(frozen=True)
class Drawn:
    """One stratum: the positions that could be taken, and those that were."""

    rows: np.ndarray
    taken: np.ndarray


def choose_examples(
    scores: np.ndarray,
    bound: np.ndarray,
    ties: np.ndarray,
    b: int,
    rescore: Callable[[np.ndarray], np.ndarray],
    say: Callable[[str], None],
    reverse: bool = False,
    examples: Sequence[Example] = (),
    duplicates: Duplicates = "keep",
    strata: Strata | None = None,
) -> Chosen:
    """The exact top b, by the certificate where it decides and by exact scores elsewhere.

    `bound` is the bound on the error of each score; in half precision it includes the measured
    rounding. `rescore` computes exact scores at given positions. `ties` orders equal scores.
    `reverse` takes the bottom b, by negating every score. Copies among `examples` are passed over
    as `duplicates` says. With `strata` of b examples (`algorithm/quotas.py`), the result is the
    exact top of each stratum; copies are found in the whole pool, and fill a stratum that has too
    few other rows.
    """
    count, sign = len(scores), -1.0 if reverse else 1.0
    score, bound, copies = sign * scores, bound.copy(), np.empty(0, np.int64)
    if duplicates != "keep":
        if bound.any():  # which copy stays depends on the exact scores
            score, bound = sign * rescore(np.arange(count)), np.zeros(count)
        copies = repeated_texts(duplicates, examples, score, ties)
        if len(copies):
            say(f"{len(copies):,} of {count:,} examples repeat others")
    rescored: list[np.ndarray] = [np.empty(0, np.int64)]
    drawn: list[Drawn] = []
    inside = outside = 0
    strata = strata or Strata([Draw(np.arange(count), b)])
    for second in (False, True):
        step = strata.last(_all_taken(drawn)) if second else strata.draws
        draws = [_without_copies(draw, copies) for draw in step if draw.count]
        verdicts = [judge(score[draw.rows], bound[draw.rows], draw.count) for draw in draws]
        certain_in = sum(int(verdict.inside.sum()) for verdict in verdicts)
        certain_out = sum(int(verdict.outside.sum()) for verdict in verdicts)
        undecided = [draw.rows[v.open] for draw, v in zip(draws, verdicts, strict=True)]
        open_rows = np.sort(np.concatenate([np.empty(0, np.int64), *undecided]))
        inexact = open_rows[bound[open_rows] > 0]
        if len(inexact):
            num_rows = sum(len(draw.rows) for draw in draws)
            say(
                f"certificate: {certain_in:,} in, {certain_out:,} out, "
                f"{len(inexact):,} of {num_rows:,} examples are scored exactly"
            )
            score[inexact] = sign * rescore(inexact)
            bound[inexact] = 0.0
        for draw, verdict in zip(draws, verdicts, strict=True):
            taken = settle(verdict, score[draw.rows], ties[draw.rows], draw.count)
            drawn.append(Drawn(draw.rows, draw.rows[taken]))
        inside, outside = inside + certain_in, outside + certain_out
        rescored.append(inexact)
    positions = _all_taken(drawn)
    score[np.setdiff1d(copies, positions)] = -np.inf
    return Chosen(positions, score, bound, np.concatenate(rescored), inside, outside, drawn)


def _all_taken(drawn: Sequence[Drawn]) -> np.ndarray:
    return np.sort(np.concatenate([np.empty(0, np.int64), *(draw.taken for draw in drawn)]))


def _without_copies(draw: Draw, copies: np.ndarray) -> Draw:
    """The draw without these rows (best first), except for the best it needs to be filled."""
    if not len(copies):
        return draw
    rows = np.setdiff1d(draw.rows, copies, assume_unique=True)
    missing = max(0, draw.count - len(rows))
    own = copies[np.isin(copies, draw.rows)]
    return Draw(np.sort(np.concatenate([rows, own[:missing]])), draw.count)


def rescore(
    engine: GhostEngine,
    examples: Sequence[Example],
    scored: Scored,
    passes: PassSettings,
    reporter: Reporter,
) -> np.ndarray:
    """Exact s_D = ⟨u, g_n⟩ of these examples, with fp32 weights or better."""
    with widened(engine.model, tensor_cores=True) as (wide,):
        at, u = engine.on(wide), scored.projection
        dots = exact_dots(at, examples, u, passes, reporter, "re-scoring")
    return dots * scored.terms.eta_sc


def reselect_entries(
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


def reselect_examples(
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


def per_expert(
    indices: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Selected weight entries of each routed expert, by the module that holds those of a layer.

    Experts are the parts of 3-D parameters that are not the weight of a convolution, or modules of
    a list named `experts`. Empty if none has a selected entry.
    """
    found: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for name, shape in shapes.items():
        index = indices.get(name, torch.empty(0, dtype=torch.int64))
        owner, _, own = name.rpartition(".")
        if one := re.fullmatch(r"(.+\.experts)\.(\d+)\..+", name):
            found[one[1]][int(one[2])] += index.numel()
        elif len(shape) == 3 and own != "weight":
            counts = torch.bincount(index // math.prod(shape[1:]), minlength=shape[0]).tolist()
            for expert, count in enumerate(counts):
                found[owner][expert] += count
    every = {owner: [n for _, n in sorted(counts.items())] for owner, counts in found.items()}
    return every if any(map(any, every.values())) else {}
