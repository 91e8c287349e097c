"""Evaluation before and after: loss, perplexity and KL to the base on given files.

For every file of `evaluation.files`, and for the run's own validation split, θ_old and θ* are
compared on the same tokens: the mean example loss (as in ALGORITHM.md §2), the perplexity (exp of
the mean over all response tokens), and for θ* the mean KL(θ_old ‖ θ*) per response token,
averaged over examples. One prompt may be answered greedily by both. Reads 1_split and 6_finetune;
writes results.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dualsft.context import RunContext
from dualsft.data import Example, collate, make_batches
from dualsft.losses import comparison
from dualsft.stages.split import load_examples
from dualsft.templates import Template


def run(ctx: RunContext, part: Path) -> dict[str, Any]:
    """Compare θ_old with θ* and write results.json into `part`."""
    sets = evaluation_sets(ctx)
    before, after = ctx.theta_old(), ctx.load(ctx.folder("finetune") / "model")
    results: dict[str, Any] = {"files": {}}
    for name, examples in sets.items():
        results["files"][name] = compare(ctx, before, after, examples, name)
    if ctx.config.evaluation.prompt:
        results["prompt"] = {
            "prompt": ctx.config.evaluation.prompt,
            "before": answer(ctx, before, ctx.config.evaluation.prompt),
            "after": answer(ctx, after, ctx.config.evaluation.prompt),
        }
    (part / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return {name: facts["after"]["loss"] for name, facts in results["files"].items()}


def evaluation_sets(ctx: RunContext) -> dict[str, list[Example]]:
    """The given files, tokenised as the corpus is, and the validation split."""
    limit = ctx.config.evaluation.limit
    sets: dict[str, list[Example]] = {}
    for name, path in ctx.config.evaluation.files.items():
        sets[name] = load_examples(ctx, path)[0][:limit]
    sets["validation"] = ctx.roles()["val"][:limit]
    return sets


@torch.no_grad()
def compare(
    ctx: RunContext,
    before: PreTrainedModel,
    after: PreTrainedModel,
    examples: list[Example],
    name: str,
) -> dict[str, Any]:
    """Both models on the same examples."""
    budget = ctx.config.evaluation.batch_tokens or ctx.batch_tokens
    totals = {"before": [0.0, 0.0], "after": [0.0, 0.0]}
    divergence, tokens = 0.0, 0
    with ctx.reporter.track(f"evaluation ({name})", len(examples), "examples") as progress:
        for rows in make_batches(examples, budget):
            chosen = [examples[i] for i in rows]
            pad = ctx.pad_id
            batch = collate(chosen, pad, ctx.config.data.padding_side, ctx.device)
            counts = torch.tensor([e.num_response_tokens for e in chosen], dtype=torch.float64)
            both = comparison(before, after, batch)
            for key, losses in (("before", both.loss_before), ("after", both.loss_after)):
                totals[key][0] += float(losses.sum())
                totals[key][1] += float((losses.cpu() * counts).sum())
            divergence += float(both.divergence.sum())
            tokens += int(counts.sum())
            progress.advance(len(rows), tokens=2 * sum(e.num_tokens for e in chosen))
    return {
        "examples": len(examples),
        "response_tokens": tokens,
        "before": _measures(totals["before"], len(examples), tokens),
        "after": {
            **_measures(totals["after"], len(examples), tokens),
            "kl_to_base": divergence / len(examples),
        },
    }


def _measures(total: list[float], num_examples: int, num_tokens: int) -> dict[str, float | None]:
    mean = total[1] / num_tokens
    return {
        "loss": total[0] / num_examples,
        "perplexity": math.exp(mean) if mean < 700 else None,
    }


@torch.no_grad()
def answer(ctx: RunContext, model: PreTrainedModel, prompt: str) -> str:
    """A greedy answer to one prompt, rendered with the corpus's own template."""
    data = ctx.config.data
    template = Template(data.template, ctx.tokenizer, data.add_bos, ctx.model_type)
    (ids,), _ = template.encode_prompts([template.render(prompt, "x")[0]])
    inputs = torch.tensor([ids], device=ctx.device)
    output = model.generate(  # pyright: ignore[reportCallIssue]
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=ctx.config.evaluation.max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=ctx.pad_id,
    )
    return ctx.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
