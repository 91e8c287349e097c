"""Can the scores be trusted? Fidelity, agreement of warmups and the predicted gain, on pools.

    python -m benchmarks.pool_checks --data DIR --out DIR [--pools mixed,noisy] [--seeds 3]
        [--measures gain,lds,warmups] [--subsets 50] [--warmups 4]

On the cells of `benchmarks.pools`, with the settings of `recommended`:

- gain: what `dualsft check --gain` says before the run.
- lds: rank correlation, over random subsets of the pool, of the loss of one unseen row after
  training on the subset with the sum of the subset's scores for that row (higher score, lower
  loss); the mean over rows is the linear datamodeling score (LDS). Scores are those of `dualsft
  explain` (calibrated), the cosine and the inner product of the sketches. Subsets are trained for
  one epoch at a small rate, and with the schedule of the pools. Weights are trained in the dtype
  of the run; losses are measured in fp32.
- warmups: overlap (Jaccard) of the top tenth of the pool after independent warmups: the same warm
  rows in another order, another seed (other warm rows, anchors and sketch), and means of the scores
  of several.

One JSON file per pool and seed, rewritten after every part: a second call continues.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import dualsft
from benchmarks.pools import Cell, Trainer, cells_of, options, silent
from dualsft.algorithm.calibration import Solver
from dualsft.algorithm.influence import influences, sketch_queries
from dualsft.data.examples import Example, collate, make_batches
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import example_objective
from dualsft.lab.diagnostics.ranking import jaccard, spearman
from dualsft.lab.gain import measure_gain
from dualsft.runs.context import pass_settings
from dualsft.runs.stages.gradients import SKETCHES, read_sketches, sketch_for
from dualsft.system.paths import RunPath, run_path

SUBSET = 150
SCHEDULES = {"one epoch": (1e-4, 1), "as trained": (7e-4, None)}
"""(learning rate, epochs; None: those of the run) of the trainings on subsets."""
OTHER_SEED = 100  # added to the seed of a run


def gain(cell: Cell) -> None:
    """What the pilot of `dualsft check --gain` predicts."""
    start = time.perf_counter()
    cell.found["gain"] = measure_gain(cell.config(), silent()).as_dict()
    cell.found["gain"]["seconds"] = round(time.perf_counter() - start, 1)
    cell.save()


def lds(cell: Cell) -> None:
    """Trainings on subsets, and how the scores of single rows predict them."""
    cell.run_until_selection(())
    trainer = Trainer(cell)
    trainer.mask = cell.mask("own")
    wide = trainer.ctx.theta_old().float()
    rows, pool = trainer.sets["tune"], trainer.ctx.roles()["pool"]
    subsets = [
        np.random.default_rng([cell.seed, draw, 5]).permutation(len(pool))[:SUBSET]
        for draw in range(cell.args.subsets)
    ]
    found = cell.found.setdefault("lds", {"losses": {name: [] for name in SCHEDULES}})
    for done, subset in enumerate(subsets):
        for name, (lr, epochs) in SCHEDULES.items():
            if len(found["losses"][name]) > done:
                continue
            trainer.fit([pool[i].index for i in subset], lr, epochs)
            wide.load_state_dict(trainer.model.state_dict())
            found["losses"][name].append(_losses(trainer, wide, rows).round(5).tolist())
        if done % 10 == 9:
            cell.save()
    sums = {
        name: np.stack([scores[subset].sum(0) for subset in subsets])
        for name, scores in _row_scores(trainer, rows).items()
    }
    for name, losses in found["losses"].items():
        after = np.array(losses)
        for form, predicted in sums.items():
            each = [spearman(predicted[:, q], -after[:, q]) for q in range(len(rows))]
            values = np.array([value for value in each if value is not None])
            found.setdefault(name, {})[form] = {
                "lds": float(values.mean()),
                "error": float(values.std(ddof=1) / np.sqrt(len(values))),
                "mean_loss": spearman(predicted.mean(1), -after.mean(1)),
            }
    cell.save()


def _losses(trainer: Trainer, model: Any, examples: Sequence[Example]) -> np.ndarray:
    """The loss of every example, in their order."""
    ctx, found = trainer.ctx, np.zeros(len(examples))
    with torch.no_grad():
        for places in make_batches(examples, ctx.batch_tokens):
            rows = [examples[i] for i in places]
            batch = collate(rows, ctx.pad_id, "right", ctx.device)
            found[places] = example_objective(model, batch)[1].double().cpu().numpy()
    return found


def _row_scores(trainer: Trainer, queries: Sequence[Example]) -> dict[str, np.ndarray]:
    """The score of every pool example for each query row, by form: [N, Q]."""
    ctx = trainer.ctx
    model = ctx.theta_bar()
    engine = GhostEngine(model, ctx.candidates(model))
    sketch = sketch_for(ctx, engine)
    assert sketch is not None
    stored = read_sketches(ctx.folder("gradients") / SKETCHES, ctx.counts, sketch.dim)["pool"]
    made, _, _ = sketch_queries(
        engine,
        sketch,
        queries,
        stored,
        ctx.roles()["pool"],
        ctx.config.seed,
        pass_settings(ctx),
        silent(),
    )
    rho = (ctx.folder("scores") / "summary.json").read_json()["rho"]
    solver = Solver(stored, ctx.device)
    calibrated = np.concatenate([part for _, part in influences(solver, made, rho)], axis=1)
    units = torch.cat([block for _, block in made.blocks(solver.device)]).double()
    cosines = stored.times(units.T).cpu().numpy()
    products = cosines * stored.norms[:, None] * made.norms
    return {"calibrated": calibrated, "cosine": cosines, "inner product": products}


def warmups(cell: Cell) -> None:
    """Agreement of the scores of independent warmups."""
    found = cell.found.setdefault("warmups", {})
    pool = cell.pool.folder / "pool.jsonl"
    turned = cell.pool.folder / "turned.jsonl"  # roles do not depend on the order of the file
    turned.write_text("".join(reversed(pool.read_text().splitlines(keepends=True))))
    cell.run_until_selection(())
    runs = [_read_scores(run_path(cell.run))]
    found["another order"] = _overlap(runs, [_scores(cell, "order", f"data.path={turned}")])
    for number in range(1, cell.args.warmups):
        runs.append(_scores(cell, f"seed{number}", f"seed={cell.seed + OTHER_SEED * number}"))
        for size in (1, 2, 4):
            if len(runs) < 2 * size:
                continue
            pairs = [
                _overlap(one, other)
                for one, other in itertools.combinations(_groups(runs, size), 2)
            ]
            found[f"another seed, means of {size}"] = float(np.mean(pairs))
        found["num_warmups"] = len(runs)
        cell.save()


def _scores(cell: Cell, name: str, extra: str) -> dict[str, float]:
    """The scores of a run with another setting, kept in a file."""
    path = cell.pool.folder / f"scores_{name}.json"
    if not path.is_file():
        folder = cell.pool.folder / "other"
        dualsft.run(cell.config([extra]), out=str(folder), until="scores", reporter=silent())
        path.write_text(json.dumps(_read_scores(run_path(folder))))
    return json.loads(path.read_text())


def _read_scores(run: RunPath) -> dict[str, float]:
    """The score of every pool example by its text: an id is the text's hash, and its place."""
    table = (run / "4_scores" / "examples.parquet").read_table(["id", "score"]).to_pydict()
    texts = [one.rpartition("-")[0] for one in table["id"]]
    return dict(zip(texts, table["score"], strict=True))


def _groups(runs: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [runs[i : i + size] for i in range(0, len(runs) - size + 1, size)]


def _overlap(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """Jaccard index of the top tenths by the mean standardised scores of two sets of runs."""
    shared = sorted(set.intersection(*({*scores} for scores in (*one, *other))))
    tops = []
    for runs in (one, other):
        values = np.array([[scores[key] for key in shared] for scores in runs])
        mean = (values / values.std(1, keepdims=True)).mean(0)
        tops.append(np.argsort(-mean, kind="stable")[: len(shared) // 10])
    return jaccard(*tops)


MEASURES = {"gain": gain, "lds": lds, "warmups": warmups}


def main() -> None:
    parser = options("pool_checks", __doc__)
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--subsets", type=int, default=50, help="lds: random subsets")
    parser.add_argument("--warmups", type=int, default=4, help="warmups: runs with other seeds")
    args = parser.parse_args()
    for cell in cells_of(args):
        for name in args.measures.split(","):
            MEASURES[name](cell)
            print(cell.name, cell.seed, name, "done", flush=True)


if __name__ == "__main__":
    main()
