"""The quickstart: Algorithm 1 on a real small model and a generated corpus.

Runs the `quickstart` recipe and prints a summary: the loss on the new skill and on old behaviour,
the share of wrong examples in the pool and in the selection (with the recipe's scores, and for
comparison with the paper's, λ = 0.8 absolute), the selected parameters by layer and module, one
prompt answered before and after, and the time and memory of each stage.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualsft.algorithm.projection import projection_terms
from dualsft.algorithm.topk import top_b
from dualsft.config import settings
from dualsft.config.settings import Config
from dualsft.data.rows import source_lines
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import loss_objective, walk
from dualsft.errors import ConfigError
from dualsft.lab.report.ending import files, losses, selected
from dualsft.lab.report.facts import peak_gib
from dualsft.runs import pipeline
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.folder import RunDir
from dualsft.runs.preflight import load_summaries
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter, clock


def check_own_task(config: Config) -> None:
    """Refuse settings that change the task, because the summary is specific to it."""
    own, given = (settings.to_flat(c) for c in (settings.load("quickstart"), config))
    keys = ("data.path", "data.val_path", "evaluation.files", "evaluation.prompt", "select.variant")
    problems = [
        f"{key}: cannot be changed in the quickstart, whose summary is specific to its task; use "
        "`dualsft run recommended …`"
        for key in keys
        if given[key] != own[key]
    ]
    if problems:
        raise ConfigError(problems)


def run_quickstart(config: Config, out: Path, reporter: Reporter) -> Iterator[str]:
    """Run all stages into `out` and yield the lines of the summary."""
    pipeline.run(config, out, None, reporter)
    ctx = RunContext(config, RunDir(out), reporter)
    facts = load_summaries(RunPath(out))
    wrong = list(
        _wrong(ctx, facts["manifests"])
    )  # a pass over the pool; do it before printing the summary
    yield ""
    yield from losses(facts, ("new_skill", "old_behaviour"))
    yield from wrong
    yield from selected(facts)
    yield from _parameters(facts)
    prompt = facts["evaluation"]["prompt"]
    for title, key in (("asked", "prompt"), ("before", "before"), ("after", "after")):
        yield f"{title:<8}{' '.join(prompt[key].split())}"
    yield ""
    for stage, manifest in facts["manifests"].items():
        yield f"{stage:<12}{manifest['seconds']:8.1f} s   peak {peak_gib(manifest):.2f} GiB"
    yield ""
    yield from files(RunPath(out))


def _wrong(ctx: RunContext, manifests: dict[str, Any]) -> Iterator[str]:
    """Share of wrong answers in the pool, in the selection, and in a selection by absolute λ."""
    pool = ctx.roles()["pool"]
    lines = source_lines(ctx.data_path(ctx.config.data.path), [e.index for e in pool])
    wrong = np.array([json.loads(lines[e.index])["answer"] == "wrong" for e in pool])
    chosen = set((ctx.folder("selection") / "ids.json").read_json())
    selected = np.array([e.id in chosen for e in pool])
    score = ctx.config.score
    words = {False: "absolute", True: "relative", "scores": "by the parameter scores"}
    literal = f"literal, λ = {score.lam:g} {words[score.lam_relative]}"
    kind = literal if score.form == "literal" else "calibrated scores"
    yield f"wrong examples      pool {100 * wrong.mean():5.1f} %"
    yield f"  selected          {100 * wrong[selected].mean():10.1f} %   ({kind})"
    counts = manifests["split"]["facts"]["counts"]
    passed = counts["val"] + 2 * counts["anchor"] + counts["pool"]
    seconds = manifests["gradients"]["seconds"] * counts["pool"] / passed
    ctx.reporter.say(
        "for comparison, the share of wrong examples that the paper's absolute λ would select: one "
        f"more pass over the pool, about {clock(seconds)}; not in the table of times below"
    )
    absolute = replace(ctx.config, score=replace(score, lam=0.8, lam_relative=False))
    other = _top_under(ctx, absolute, int(selected.sum()))
    share = 100 * wrong[other].mean()
    yield f"  selected          {share:10.1f} %   (the paper's scores, λ = 0.8)"
    yield ""


def _top_under(ctx: RunContext, config: Config, b: int) -> np.ndarray:
    """Positions in the pool of the top b under other score settings. Takes one pass."""
    pool = ctx.roles()["pool"]
    model = ctx.theta_bar()
    engine = GhostEngine(model, ctx.candidates(model))
    val_grad, prior_grad, grad_sum = (
        ctx.vector("gradients", name, engine.candidates)
        for name in ("val_grad", "prior_grad", "grad_sum")
    )
    curvature = ctx.curvature(engine.candidates)
    lr = ctx.base_lr()
    terms = projection_terms(config.score, lr, len(pool), val_grad, prior_grad, curvature)
    label = "pool under the paper's absolute λ, for comparison"
    objective, passes = loss_objective(model), pass_settings(ctx)
    direction = terms.projection(grad_sum)
    result = walk(engine, pool, objective, passes, ctx.reporter, label, direction=direction)
    return top_b(result.dots, [e.index for e in pool], b)


def _parameters(facts: dict[str, Any]) -> Iterator[str]:
    chosen = facts["selection"]
    total = chosen["k"]
    modules = Counter(chosen["per_module"]).most_common()
    shares = (f"{name.split('.')[-1]} {100 * n / total:.0f} %" for name, n in modules)
    yield f"  by module  {', '.join(shares)}"
    layers = Counter(chosen["per_layer"]).most_common(8)
    yield f"  by layer   {', '.join(f'{name}: {100 * n / total:.0f} %' for name, n in layers)} …"
    yield ""
