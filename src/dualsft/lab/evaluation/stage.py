"""The evaluation stage: loss, perplexity and KL to the base, before and after fine-tuning.

For every file in `evaluation.files`, and for the run's validation split, θ_old and θ* are compared
on the same tokens: the mean example loss (docs/algorithm.md), the perplexity (exp of the mean over
all response tokens), and for θ* the mean KL(θ_old ‖ θ*) per response token, averaged over examples.
Optionally both models answer one prompt greedily (`evaluation.prompt`) and run the paper's
benchmarks (`evaluation.tasks`, `lab/evaluation/benchmarks.py`). Reads 1_split and 6_finetune.
Writes results.json, losses.parquet (losses per example) and samples.jsonl (benchmark items). Not
part of Algorithm 1.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import torch
from transformers import PreTrainedModel

from dualsft.data.examples import Example, digest, named
from dualsft.data.sources import source_hash
from dualsft.data.templates import Template
from dualsft.distributed.world import single_process, world
from dualsft.engine.losses import comparison
from dualsft.engine.walk import remaining_batches
from dualsft.errors import RunError
from dualsft.lab.evaluation.benchmarks import harness_model, run_benchmarks, vllm_model
from dualsft.lab.evaluation.sandbox import check_sandbox
from dualsft.lab.evaluation.tasks import BENCHMARKS, check_positions, task_files, wanted_tasks
from dualsft.memory.plans import OutOfMemory, memory_errors_shared
from dualsft.model.sharded import is_sharded, release
from dualsft.runs.context import RunContext, Settings
from dualsft.runs.pipeline import Stage
from dualsft.runs.stages.split import load_examples
from dualsft.storage.manifest import sha256_file
from dualsft.system.paths import RunPath
from dualsft.system.usage import Smaller, give_back


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Compare θ_old with θ* and write the results into `part`."""
    sets = evaluation_sets(ctx)
    before, after = ctx.theta_old(), ctx.load(ctx.folder("finetune") / "model")
    results: dict[str, Any] = {"files": {}}
    losses: list[pa.Table] = []
    for name, examples in sets.items():
        results["files"][name], rows = compare(ctx, before, after, examples, name)
        losses.append(loss_table(name, examples, rows))
    warn_if_worse(ctx, results["files"]["validation"])
    (part / "losses.parquet").write_table(pa.concat_tables(losses))
    if ctx.config.evaluation.prompt:
        results["prompt"] = {
            "prompt": ctx.config.evaluation.prompt,
            "before": answer(ctx, before, ctx.config.evaluation.prompt),
            "after": answer(ctx, after, ctx.config.evaluation.prompt),
        }
    if ctx.config.evaluation.tasks:
        models = None if ctx.config.evaluation.backend == "vllm" else (before, after)
        del before, after
        results |= _benchmarks(ctx, models, part)
    (part / "results.json").write_json(results, ensure_ascii=False)
    return {name: facts["after"]["loss"] for name, facts in results["files"].items()}


def warn_if_worse(ctx: RunContext, validation: dict[str, Any]) -> None:
    """Warn if the fine-tuning did not lower the loss of the rows that define the new skill."""
    before, after = validation["before"]["loss"], validation["after"]["loss"]
    if after >= before:
        ctx.reporter.warn(
            f"validation loss {before:.3f} before and {after:.3f} after the fine-tuning: it taught "
            "nothing that the validation rows need (lower finetune.lr, or look at the selected "
            "rows)",
            code="worse_loss",
        )


def _benchmarks(
    ctx: RunContext, pair: tuple[PreTrainedModel, PreTrainedModel] | None, part: RunPath
) -> dict[str, Any]:
    """Run the benchmarks on the main process, which needs both models unsharded.

    `pair` is None with the vLLM backend, which loads the models itself.
    """
    if not world().main:
        return {}
    tuned = ctx.folder("finetune") / "model"
    with single_process(), ExitStack() as left:
        if pair is None:
            give_back(ctx.device)  # vLLM needs the memory that the loaded models used
            makers = {
                "before": lambda: vllm_model(ctx, ctx.model_folder),
                "after": lambda: vllm_model(ctx, ctx.local(tuned)),
            }
            return run_benchmarks(ctx, makers, part)
        before, after = (ctx.theta_old(), ctx.load(tuned)) if is_sharded(pair[0]) else pair
        makers = {
            "before": lambda: left.enter_context(harness_model(ctx, before)),
            "after": lambda: left.enter_context(harness_model(ctx, after)),
        }
        return run_benchmarks(ctx, makers, part)


def evaluation_sets(ctx: RunContext) -> dict[str, list[Example]]:
    """The files of `evaluation.files`, tokenised like the corpus, and the validation split."""
    limit = ctx.config.evaluation.limit
    sets: dict[str, list[Example]] = {}
    for name, path in ctx.config.evaluation.files.items():
        examples, report = load_examples(ctx, path, f"evaluation.files: {name}")
        for note in report.notes():
            ctx.reporter.warn(note)
        sets[name] = examples[:limit]
    sets["validation"] = ctx.roles()["val"][:limit]
    return sets


@torch.no_grad()
def compare(
    ctx: RunContext,
    before: PreTrainedModel,
    after: PreTrainedModel,
    examples: list[Example],
    name: str,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Run both models on the same examples.

    Returns the facts for results.json and a (examples, 3) tensor of loss before, loss after and KL.
    Resumable. Continues with smaller batches after running out of memory.
    """
    budget = ctx.config.evaluation.batch_tokens or ctx.batch_tokens
    each, done = torch.zeros(len(examples), 3, dtype=torch.float64), 0
    piece_name = f"evaluation-{digest(name).hex()[:12]}"
    if (piece := ctx.pieces.load(piece_name)) is not None:
        each, done = piece.tensors["losses"], piece.facts["done"]
        budget = piece.facts["batch_tokens"]
    label = f"evaluation ({name})"
    waiting = world().turns(remaining_batches(examples, budget, done))
    with (
        ctx.reporter.track(label, len(examples), "examples", done) as progress,
        ctx.pieces.loop(),
    ):
        while waiting:
            turn = waiting[0]
            try:
                _compare_batch(ctx, before, after, examples, turn, each, label)
            except OutOfMemory as problem:  # all processes retry the turn with smaller batches
                assert problem.shape is not None
                smaller = Smaller.than(problem.shape, problem, "evaluation.batch_tokens")
                ctx.reporter.warn(f"{label}: {smaller}", code="out_of_memory")
                budget = smaller.batch_tokens
                waiting = world().turns(remaining_batches(examples, budget, done))
                continue
            waiting.pop(0)
            rows = [examples[i] for batch in turn for i in batch]
            done += len(rows)
            progress.advance(len(rows), tokens=2 * sum(e.num_tokens for e in rows))
            where = f"{label}: {done:,} of {len(examples):,} examples"
            facts = {"done": done, "batch_tokens": budget, "layout": {"losses": "terms"}}
            ctx.pieces.tick(piece_name, lambda facts=facts: ({"losses": each}, facts), where)
    world().sum_(each)
    return _facts(examples, each), each


def _compare_batch(
    ctx: RunContext,
    before: PreTrainedModel,
    after: PreTrainedModel,
    examples: list[Example],
    turn: Sequence[list[int]],
    each: torch.Tensor,
    label: str,
) -> None:
    """Run this process's batch of a turn and store the result in `each`."""
    rows, weight = world().assigned(turn)
    chosen = [examples[i] for i in rows or ()]
    shape = (len(chosen), max(e.num_tokens for e in chosen)) if chosen else None
    measured = torch.zeros(0, 3)
    with memory_errors_shared(label, shape, "lower evaluation.batch_tokens"):
        if chosen:
            both = comparison(before, after, ctx.collate(chosen))
            columns = (both.loss_before, both.loss_after, both.divergence)
            measured = torch.stack([column.double().cpu() for column in columns], dim=1)
    finite = measured.isfinite().all(dim=1).tolist()
    if bad := [e for e, ok in zip(chosen, finite, strict=True) if not ok]:
        raise RunError(
            f"{label}: the loss of {named(bad)} is not finite; nothing was written (look at these "
            "rows, lower finetune.lr, or use model.dtype=float32)"
        )
    if weight and chosen:
        each[rows] = measured


def _facts(examples: list[Example], each: torch.Tensor) -> dict[str, Any]:
    """Mean losses and KL over examples, and perplexities over all response tokens."""
    counts = torch.tensor([e.num_response_tokens for e in examples], dtype=torch.float64)
    tokens = int(counts.sum())

    def measures(losses: torch.Tensor) -> dict[str, float | None]:
        mean = float((losses * counts).sum()) / tokens
        return {
            "loss": float(losses.sum()) / len(examples),
            "perplexity": math.exp(mean) if mean < 700 else None,
        }

    loss_before, loss_after, divergence = each.T
    return {
        "examples": len(examples),
        "response_tokens": tokens,
        "before": measures(loss_before),
        "after": measures(loss_after) | {"kl_to_base": float(divergence.sum()) / len(examples)},
    }


def loss_table(name: str, examples: list[Example], each: torch.Tensor) -> pa.Table:
    """Rows of losses.parquet: both models on one example, for paired tests."""
    columns = dict(zip(("loss_before", "loss_after", "kl"), each.T.numpy(), strict=True))
    return pa.table({"set": [name] * len(examples), "id": [e.id for e in examples], **columns})


@torch.no_grad()
def answer(ctx: RunContext, model: PreTrainedModel, prompt: str) -> str:
    """Greedy answer to one prompt, rendered with the corpus template."""
    data = ctx.config.data
    template = Template(
        data.template, ctx.tokenizer, data.add_bos, ctx.model_type, data.template_file
    )
    ids = template.prompt_ids(prompt)
    inputs = torch.tensor([ids], device=ctx.device)
    try:
        output = model.generate(  # pyright: ignore[reportCallIssue]
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=ctx.config.evaluation.max_new_tokens,
            do_sample=False,
            num_beams=1,  # a model's own generation_config.json may ask for a million
            num_return_sequences=1,
            use_cache=True,
            pad_token_id=ctx.pad_id,
        )
    except (TypeError, ValueError, AttributeError) as problem:
        raise RunError(
            f"evaluation.prompt: the model's generation_config.json does not allow an answer "
            f"({type(problem).__name__}: {problem}); repair or remove the file, or leave "
            "evaluation.prompt out"
        ) from problem
    release(model)
    return ctx.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()


# --- the stage -----------------------------------------------------------------------------------


def evaluation_settings(ctx: RunContext) -> Settings:
    """Settings and file hashes for the fingerprint. The harness version defines the prompts."""
    evaluation = ctx.config.evaluation
    chosen = ctx.pick("evaluation.*") | ctx.data_settings()
    for key in ("data.path", "data.val_path", "data.anchor_path", "data.source_field"):
        chosen.pop(key, None)
    del chosen["evaluation.allow_code_execution"], chosen["evaluation.allow_weak_sandbox"]
    chosen["evaluation.files"] = {
        name: source_hash(ctx.data_path(path), ctx.config.data, f"evaluation.files: {name}")
        for name, path in evaluation.files.items()
    }
    chosen["losses of examples"] = True
    if evaluation.tasks is not None:
        files = task_files(wanted_tasks(evaluation.tasks), evaluation.data_dir)
        hashes = {stem: sha256_file(path) for stem, path in files.items()}
        chosen["lm_eval"] = importlib.metadata.version("lm_eval")
        chosen["evaluation.data_dir"] = hashes or None
    return chosen


def _check(ctx: RunContext) -> None:
    """Check before any stage that the benchmarks fit the model's context, and the sandbox."""
    for name in wanted_tasks(ctx.config.evaluation.tasks):
        check_positions(name, BENCHMARKS[name].new_tokens, ctx.max_positions)
        if BENCHMARKS[name].runs_code:
            check_sandbox(ctx.config.evaluation.allow_weak_sandbox)


STAGE = Stage("evaluation", run, evaluation_settings, ("split", "finetune"), check=_check)
