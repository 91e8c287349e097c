"""Reverse selection: are the examples and entries with the lowest scores worse than random ones?

The paper's reverse-selection ablation (Fig. reverse_selection). With the run's budgets, each side
is the DualSFT selection (dual), a random draw of the same size (random), or the lowest-scored
examples or entries (reverse): dual + dual, random on either side or both, reverse on either side or
both. Every combination is fine-tuned from θ_old (Algorithm 1 line 12) for the same small number of
steps with the run's schedule, and measured as in the evaluation stage: loss on the validation split
and on the evaluation files, and KL to θ_old. Random sides are drawn several times. Intervals are
over the validation rows, paired with the matched random control. If the run's scores selected only
one side, only that side is varied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Example
from dualsft.errors import RunError
from dualsft.lab.diagnostics.agreement import mean_of
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.lab.diagnostics.trials import (
    Trials,
    plain_training,
    quiet,
    steps_plan,
    stratified_mask,
)
from dualsft.lab.evaluation.stage import compare, evaluation_sets
from dualsft.runs.stages.finetune import finetune_plan, training_examples
from dualsft.runs.stages.selection import read_mask

ARMS = (
    ("dual", "dual"),
    ("random", "dual"),
    ("dual", "random"),
    ("random", "random"),
    ("reverse", "dual"),
    ("dual", "reverse"),
    ("reverse", "reverse"),
)
"""The paper's combinations (examples, entries)."""
AS_RUN = "as run"
"""A side that was not selected by DualSFT's scores: the same as in the run in all combinations."""
PIECE = "reverse"
RESAMPLES = 2000


def run(job: DiagnosticJob) -> dict[str, Any]:
    """Train and measure every combination; finished ones are saved and reused after a kill."""
    ctx, options = job.ctx, job.options
    plain_training(ctx)
    sides = _Sides(job)
    steps = options.steps or finetune_plan(ctx).num_steps(len(sides.examples("dual", 0)))
    plan = steps_plan(ctx, steps, None, None)
    sets = evaluation_sets(ctx)
    before, model = ctx.theta_old(), ctx.theta_old()
    trials = Trials(quiet(ctx), model)
    piece = ctx.pieces.load(PIECE)
    records: dict[str, Any] = piece.facts["records"] if piece else {}
    todo = sides.arms(options.draws)
    with job.reporter.track("reverse selection", len(todo), "trainings", len(records)) as progress:
        for data, params, draw in todo:
            key = f"{data}/{params}/{draw}"
            if key in records:
                continue
            trials.run(sides.examples(data, draw), sides.entries(params, draw), plan, key)
            records[key] = _measured(job, before, model, sets)
            trials.reset()
            progress.advance(1)
            where = f"reverse selection: {len(records):,} of {len(todo):,} trainings"
            with ctx.pieces.loop():
                ctx.pieces.tick(PIECE, lambda: ({}, {"records": records}), where)
    return {
        "steps": steps,
        "draws": options.draws,
        "b": sides.b,
        "k": sides.k,
        "arms": [_arm(records, data, params, todo) for data, params in sides.combinations],
        "contrasts": _contrasts(job, records, sides.combinations, todo),
    }


class _Sides:
    """The examples and entries of each kind (dual, random, reverse)."""

    def __init__(self, job: DiagnosticJob) -> None:
        self.job, self.ctx = job, job.ctx
        final = job.final
        self.mask = read_mask(final) if (final / "mask.safetensors").is_file() else None
        chosen = {axis: entry.name for axis, entry in self.ctx.methods.entries.items() if entry}
        data = chosen.get("data") == "dualsft" and (final / "ids.json").is_file()
        params = chosen.get("params") == "dualsft" and self.mask is not None
        self.dual = training_examples(self.ctx, final)
        self.b = len(self.dual) if data else None
        self.k = None
        if params and self.mask is not None:
            self.k = sum(index.numel() for index in self.mask.values())
        if not data and not params:
            raise RunError(
                "reverse: the run selects neither the highest-scored examples nor entries; use it "
                "on a run of dualsft"
            )
        self.combinations = list(
            dict.fromkeys((d if data else AS_RUN, p if params else AS_RUN) for d, p in ARMS)
        )
        self._reversed: dict[str, Any] = {}

    def arms(self, draws: int) -> list[tuple[str, str, int]]:
        """All trainings (examples, entries, draw): one per combination, or one per random draw."""
        return [
            (data, params, draw)
            for data, params in self.combinations
            for draw in range(draws if "random" in (data, params) else 1)
        ]

    def examples(self, kind: str, draw: int) -> Sequence[Example]:
        if kind in ("dual", AS_RUN):
            return self.dual
        pool = self.job.roles["pool"]
        assert self.b is not None
        if kind == "random":
            chosen = self.job.rng(f"reverse examples {draw}").choice(len(pool), self.b, False)
        else:
            if "examples" not in self._reversed:
                found = self.job.scoring.choose_examples(self.b, reverse=True)
                self._reversed["examples"] = found.positions
            chosen = self._reversed["examples"]
        return [pool[i] for i in np.sort(chosen)]

    def entries(self, kind: str, draw: int) -> Mapping[str, Tensor] | None:
        if kind in ("dual", AS_RUN):
            return self.mask
        assert self.k is not None
        if kind == "random":
            rng, shapes = self.job.rng(f"reverse entries {draw}"), self.ctx.candidate_shapes
            choice = stratified_mask(rng, {n: s.numel() for n, s in shapes.items()}, self.k, False)
        else:
            if "entries" not in self._reversed:
                scoring = self.job.scoring
                self._reversed["entries"] = scoring.choose_entries(self.k, reverse=True).indices
            choice = self._reversed["entries"]
        return {name: index for name, index in choice.items() if index.numel()}


def _measured(
    job: DiagnosticJob,
    before: PreTrainedModel,
    after: PreTrainedModel,
    sets: Mapping[str, list[Example]],
) -> dict[str, Any]:
    ctx, found = quiet(job.ctx), {}
    for name, rows in sets.items():
        facts, each = compare(ctx, before, after, rows, name)
        found[name] = {
            "before": facts["before"]["loss"],
            "loss": facts["after"]["loss"],
            "kl": facts["after"]["kl_to_base"],
            "each": each[:, 1].tolist(),
        }
    return found


def _arm(
    records: Mapping[str, Any], data: str, params: str, todo: Sequence[tuple[str, str, int]]
) -> dict[str, Any]:
    """One combination: each measure averaged over its draws, and the loss of each draw."""
    mine = [records[f"{d}/{p}/{n}"] for d, p, n in todo if (d, p) == (data, params)]
    files = {}
    for name in mine[0]:
        losses = [record[name]["loss"] for record in mine]
        files[name] = {
            "before": mine[0][name]["before"],
            "loss": mean_of(losses),
            "losses": losses,
            "kl": mean_of([record[name]["kl"] for record in mine]),
        }
    return {"data": data, "params": params, "files": files}


def _contrasts(
    job: DiagnosticJob,
    records: Mapping[str, Any],
    combinations: Sequence[tuple[str, str]],
    todo: Sequence[tuple[str, str, int]],
) -> list[dict[str, Any]]:
    """Compare each reverse or dual combination with its matched control, paired by validation row.

    The control has a random draw in place of the side under test. A positive difference means a
    higher loss than the random control. The interval resamples the validation rows, not the
    trainings.
    """
    rng, told = job.rng("reverse bootstrap"), []

    def rows_of(arm: tuple[str, str]) -> np.ndarray:
        mine = [records[f"{d}/{p}/{n}"]["validation"]["each"] for d, p, n in todo if (d, p) == arm]
        return np.mean(mine, axis=0)

    for arm, control in _matched(combinations):
        difference = rows_of(arm) - rows_of(control)
        picks = rng.integers(len(difference), size=(RESAMPLES, len(difference)))
        low, high = np.percentile(difference[picks].mean(1), [2.5, 97.5])
        told.append(
            {
                "arm": "/".join(arm),
                "control": "/".join(control),
                "difference": float(difference.mean()),
                "low": float(low),
                "high": float(high),
            }
        )
    return told


def _matched(
    combinations: Sequence[tuple[str, str]],
) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Pairs (combination, random control). In the control a reversed side is random; dual has one
    control per random side, and one with both random."""
    found: list[tuple[tuple[str, str], tuple[str, str]]] = []
    for data, params in combinations:
        if "reverse" in (data, params):
            control = tuple("random" if side == "reverse" else side for side in (data, params))
            found.append(((data, params), (control[0], control[1])))
        elif "random" not in (data, params):
            for control in (("random", params), (data, "random"), ("random", "random")):
                if control in combinations:
                    found.append(((data, params), control))
    return found
