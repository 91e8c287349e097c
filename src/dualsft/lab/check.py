"""`dualsft check`: show what a run would do, and check the model and the corpus.

Reports the candidates, the split, the budgets in rows and entries, and three examples rendered with
the template and the response marked. Checks for doubled BOS tokens, and checks the engine on this
model: the gradient of one example by plain autograd against the same example in a padded batch by
the ghost rules, and the fused loss against the model's own. Writes nothing. Not part of
Algorithm 1.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import numpy as np
import torch

from dualsft.algorithm.scores import TOLERANCE, check_fused_loss, dot_alone
from dualsft.algorithm.split import divide
from dualsft.config.settings import Config
from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.model.load import locate
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.folder import RunDir
from dualsft.runs.method import Job
from dualsft.runs.stages.finetune import describe_plan, finetune_plan, warn_of_little
from dualsft.runs.stages.selection import denominator, num_trained, param_budget
from dualsft.runs.stages.split import ALL_BAD, load_examples, load_foreign
from dualsft.runs.stages.warmup import warmup_plan
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter, silent

NUM_SHOWN = 3
NUM_BATCH = 4


def check(config: Config, reporter: Reporter) -> list[str]:
    """Log what a run would do. Returns the problems found (empty: ready to run)."""
    ctx = RunContext(config, RunDir("."), reporter)
    examples = _data(ctx)
    _show_examples(ctx, examples)
    problems = [*_bos(ctx, examples), *_model(ctx, examples)]
    for problem in problems:
        reporter.say(f"PROBLEM: {problem}")
    if not problems:
        reporter.say("check passed: ready to run")
    return problems


def _data(ctx: RunContext) -> list[Example]:
    """Report the corpus, the split and the budget of examples."""
    config = ctx.config
    examples, report = load_examples(ctx, config.data.path)
    trusted = load_foreign(ctx, "data.val_path")
    anchors = load_foreign(ctx, "data.anchor_path")
    examples, split = divide(examples, trusted, config.seed, config.split, anchors)
    say = ctx.reporter.say
    say(
        f"corpus: {report.num_rows:,} rows, format {report.format}, {report.num_bad:,} bad, "
        f"{report.num_truncated:,} truncated; {sum(e.num_tokens for e in examples):,} tokens"
    )
    for note in [*report.notes(ALL_BAD), *split.notes]:
        ctx.reporter.warn(note)
    say("split: " + ", ".join(f"{role} {count:,}" for role, count in split.counts.items()))
    ctx.split_counts = split.counts
    count, data = num_trained(ctx), ctx.methods.load("data")
    if data.entry.uses_budget:
        num_pool = sum(split.counts[role] for role in data.pool_roles)
        say(f"would select {count:,} of {num_pool:,} pool examples")
    warmup, plan = warmup_plan(ctx), finetune_plan(ctx, count)
    num_steps = warmup.num_steps(split.counts["warm"])
    say(f"optimizer steps: warmup {num_steps:,}, fine-tuning {plan.num_steps(count):,}")
    say(f"warmup: batch {warmup.batch_size:,}, {num_steps:,} steps, lr {warmup.lr:.3g}")
    say(describe_plan(ctx, plan, count))
    warn_of_little(ctx, plan, count)
    return examples


def _show_examples(ctx: RunContext, examples: list[Example]) -> None:
    """Log three rows as the model will see them. ⟦…⟧ marks the tokens in the loss."""
    for example in examples[:NUM_SHOWN]:
        pairs = zip(example.input_ids, example.labels, strict=True)
        shown = ""
        for is_response, group in groupby(pairs, key=lambda pair: pair[1] != -100):
            text = ctx.tokenizer.decode([token for token, _ in group])
            shown += f"⟦{text}⟧" if is_response else text
        ctx.reporter.say(
            f"row {example.index + 1} ({example.num_tokens} tokens, "
            f"{example.num_response_tokens} in the response):\n{shown}"
        )


def _bos(ctx: RunContext, examples: list[Example]) -> list[str]:
    bos = ctx.tokenizer.bos_token_id
    doubled = [e.index + 1 for e in examples if bos is not None and e.input_ids[:2] == [bos, bos]]
    if doubled:
        return [f"{len(doubled):,} rows begin with two BOS tokens (first: row {doubled[0]})"]
    starts = sum(e.input_ids[0] == bos for e in examples)
    ctx.reporter.say(f"BOS: {starts:,} of {len(examples):,} examples begin with it, none twice")
    return []


def _model(ctx: RunContext, examples: list[Example]) -> list[str]:
    """Report the candidates, and check the engine against plain autograd on this model."""
    model = ctx.theta_old()
    candidates = ctx.candidates(model)
    engine = GhostEngine(model, candidates)
    modules: dict[str, int] = defaultdict(int)
    for name, p in candidates.items():
        modules[locate(name)[1]] += p.numel()
    say = ctx.reporter.say
    total = sum(p.numel() for p in model.parameters())
    say(
        f"candidates ({candidates.spec}): {len(candidates):,} tensors, {candidates.num_entries:,} "
        f"of {total:,} parameters ({100 * candidates.num_entries / total:.1f} %)"
    )
    for module, count in modules.items():
        say(f"  {module}: {count:,}")
    params = ctx.methods.load("params")
    if params.entry.uses_budget:
        eligible = params.eligible(Job(ctx, "params", ctx.rundir.path))
        k, total = param_budget(ctx, eligible), denominator(ctx, eligible)
        of = ctx.config.method.denominator.replace("all", "parameters")
        say(f"would train {k:,} entries ({100 * k / total:.2f} % of the {of})")
    check_fused_loss(model, examples[0], pass_settings(ctx), TOLERANCE[ctx.dtype])
    return _alone_against_batch(ctx, engine, examples)


def _alone_against_batch(
    ctx: RunContext, engine: GhostEngine, examples: list[Example]
) -> list[str]:
    """Compare ⟨U, g_n⟩ of one example in a padded batch of mixed lengths with plain autograd.

    U is a random direction. The shortest example is used, because it has the most padding.
    """
    by_length = sorted(examples, key=lambda e: e.num_tokens)
    picks = np.linspace(0, len(by_length) - 1, min(NUM_BATCH, len(by_length))).astype(int)
    batch = [by_length[i] for i in dict.fromkeys(picks.tolist())]
    generator = torch.Generator().manual_seed(ctx.config.seed)
    direction = ParamVector(
        {
            name: torch.randn(p.shape, generator=generator).to(p.device, engine.candidates.dtype)
            for name, p in engine.candidates.items()
        }
    )
    settings = pass_settings(ctx)
    together = PassSettings(
        batch_tokens=len(batch) * max(e.num_tokens for e in batch),
        pad_id=settings.pad_id,
        padding_side=settings.padding_side,
    )
    objective = loss_objective(engine.model)
    result = walk(engine, batch, objective, together, silent(), "check", direction=direction)
    shortest = batch[0]
    exact, norm = dot_alone(engine, shortest, direction, settings)
    if norm == 0.0:
        return [
            f"the gradient of row {shortest.index + 1} is 0 in all candidates, so its score says "
            f"nothing: are the weights of {ctx.config.model.path} zero? Give another model.path"
        ]
    error, tolerance = abs(exact - result.dots[0]) / (direction.norm() * norm), TOLERANCE[ctx.dtype]
    ctx.reporter.say(
        f"gradient of one example (autograd) vs in a padded batch (ghost): error {error:.1e} "
        f"of ‖u‖‖g‖, tolerance {tolerance:g}"
    )
    if not error <= tolerance:
        return [
            f"the gradient of row {shortest.index + 1} depends on its batch, or the ghost rules do "
            f"not fit this model (error {error:.1e} > {tolerance:g}); scores would be wrong"
        ]
    return []
