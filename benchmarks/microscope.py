"""Suspected rows: do the measures of `dualsft explain` find wrong answers that were planted?

A tenth of the rows of a corpus get the answer of another such row. A warmup on some of them gives
θ̄, and at θ̄ every measure orders the pool by suspicion (Algorithm 1 lines 1 to 8, calibrated). The
figure is average precision: 1 if all planted rows come first, about 0.1 by chance, with an interval
from resampled rows. Measures: support by the other rows of the pool, the score of the run (low is
suspected), loss (high), cosine with v_new (low), and, if bergson is installed, the cosine of its
projected gradients with the mean of those of D_val. D_val is clean, or has planted rows as well.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measuring import Section
from benchmarks.options import Options
from benchmarks.roles import Roles, conditions, read_roles
from benchmarks.training_fidelity import warm_up
from benchmarks.workload import SHAPES, build_model
from dualsft.algorithm.calibration import Solver, calibrate
from dualsft.algorithm.gradients import pool_gradient, validation_gradient
from dualsft.algorithm.influence import supports
from dualsft.data.corpus import skill_rows
from dualsft.data.examples import IGNORE, Example, make_batches
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.sketch import Sketch, SketchRows
from dualsft.model.load import find_candidates
from dualsft.system.progress import Reporter

SHARE = 0.1
ROWS = {"cpu": 150, "cuda": 4000}
DIM, QUICK_DIM = 16384, 256
SIDE = 16  # of bergson's projection of each matrix, its usual choice
NUM_RESAMPLED = 1000


def run(options: Options) -> Section:
    """Average precision of each measure, with a clean D_val and with a planted one."""
    clean = read_clean(options, 60 if options.quick else ROWS[options.device.type])
    roles, wrong = planted(clean)
    model = build_model(options.real_model, options.device, torch.float32)
    warm_up(options, model, roles)
    section = Section("microscope", conditions(options, roles))
    section.conditions |= {"planted in the pool": int(wrong.sum()), "figure": "average precision"}
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    sketch = Sketch(QUICK_DIM if options.quick else DIM, 0, "calibrated")
    passes, say = roles.settings, Reporter(print)
    result = pool_gradient(engine, roles.pool, passes, say, sketch=sketch)[1]
    pool = result.sketches
    assert pool is not None
    solver = Solver(pool, options.device)
    theirs, units = "bergson: cosine with D_val", None
    if find_spec("bergson") is not None:
        rows = [*roles.pool, *clean.val, *roles.val]
        units = _bergson(model, rows, options.batch_tokens).split(
            [len(roles.pool), len(clean.val), len(roles.val)]
        )
    for number, (name, val) in enumerate(
        (("clean D_val", clean.val), ("planted D_val", roles.val)), 1
    ):
        found = validation_gradient(engine, val, passes, say, sketch)[1].sketches
        assert found is not None
        calibrated = calibrate(pool, found, 0, options.device)
        suspicion = {
            "support": -supports(solver, calibrated.rho),
            "score": -calibrated.scores,
            "loss": result.values,
            "cosine with v_new": -_cosines(pool, found),
        }
        if units is not None:
            suspicion[theirs] = -(units[0] @ units[number].mean(0)).numpy()
        for measure, values in suspicion.items():
            low, high = interval(values, wrong)
            figures = {"average precision": average_precision(values, wrong)}
            figures |= {"from": low, "to": high, "rho": calibrated.rho}
            section.rows[f"{measure}, {name}"] = {"figures": figures}
    if units is None:
        section.skipped[theirs] = "the package is not installed"
    return section


def read_clean(options: Options, limit: int) -> Roles:
    """The rows before planting: those of --data, or sentences in Zeno, all with right answers."""
    if options.data is not None or options.real_model in SHAPES:
        return read_roles(options, limit)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "zeno.jsonl"
        rows = skill_rows(0, limit, 0.0)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return read_roles(replace(options, data=file), limit)


def planted(clean: Roles) -> tuple[Roles, np.ndarray]:
    """(the roles with planted rows in val, warm and pool, which rows of the pool are wrong)."""
    rng, made = np.random.default_rng(0), {}
    wrong = np.zeros(len(clean.pool), bool)
    for role in ("val", "warm", "pool"):
        rows: list[Example] = list(getattr(clean, role))
        chosen = rng.permutation(len(rows))[: max(2, round(SHARE * len(rows)))].tolist()
        for i, j in zip(chosen, [*chosen[1:], chosen[0]], strict=True):
            answers = [_response(getattr(clean, role)[k]) for k in (i, j)]
            rows[i] = _answered(rows[i], answers[1])
            if role == "pool":
                wrong[i] = answers[0] != answers[1]
        made[role] = rows
    return replace(clean, **made), wrong


def _response(example: Example) -> list[int]:
    first = next(t for t, label in enumerate(example.labels) if label != IGNORE)
    return list(example.input_ids[first:])


def _answered(example: Example, response: list[int]) -> Example:
    """The prompt of an example with another response."""
    prompt = list(example.input_ids[: len(example.input_ids) - len(_response(example))])
    labels = [IGNORE] * len(prompt) + response
    return Example(example.id, example.index, prompt + response, labels)


def _cosines(pool: SketchRows, val: SketchRows) -> np.ndarray:
    """Cosine of each sketch with that of v_new."""
    mean = val.total()
    return pool.times((mean / torch.linalg.vector_norm(mean))[:, None])[:, 0].numpy()


def average_precision(suspicion: np.ndarray, wrong: np.ndarray) -> float:
    """Mean, over the wrong rows, of the share of wrong rows among those up to it."""
    ordered = wrong[np.argsort(-suspicion, kind="stable")]
    precision = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
    return float(precision[ordered].mean())


def interval(suspicion: np.ndarray, wrong: np.ndarray) -> tuple[float, float]:
    """95 % of the average precisions over resampled rows, right and wrong ones apart."""
    rng, sides = np.random.default_rng(0), (np.flatnonzero(wrong), np.flatnonzero(~wrong))
    found = []
    for _ in range(NUM_RESAMPLED):
        rows = np.concatenate([rng.choice(side, len(side)) for side in sides])
        found.append(average_precision(suspicion[rows], wrong[rows]))
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def _bergson(model: PreTrainedModel, rows: Sequence[Example], batch_tokens: int) -> Tensor:
    """bergson's projected gradients, at unit length."""
    import bergson  # pyright: ignore[reportMissingImports]
    from datasets import Dataset

    data = Dataset.from_dict(
        {
            "input_ids": [e.input_ids for e in rows],
            "labels": [e.labels for e in rows],
            "length": [e.num_tokens for e in rows],
        }
    )
    base: Any = model.base_model
    with tempfile.TemporaryDirectory() as folder:
        config = bergson.IndexConfig(
            run_path=folder, loss_reduction="mean", projection_dim=SIDE, token_batch_size=2048
        )
        config.partial_run_path.mkdir(parents=True, exist_ok=True)
        processor = bergson.GradientProcessor(projection_dim=SIDE)
        collector = bergson.InMemoryCollector(
            model=base, data=data, cfg=config, processor=processor
        )
        batches = make_batches(rows, batch_tokens)
        bergson.CollectorComputer(
            model, data, collector=collector, batches=batches, cfg=config
        ).run_with_collector_hooks(desc="gradients")
    gradients = torch.cat([g.cpu().double() for g in collector.gradients.values()], dim=1)
    return gradients / torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
