"""Generation of benchmark answers (GSM8K, HumanEval): the same prompts in larger batches.

With a small model this dominates `dualsft evaluate`: each new token launches every kernel once,
whatever the batch size, until the GPU is saturated. The prompts have the length of five-shot GSM8K
prompts and all answers the same number of tokens, so only the batch size varies. Not part of
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.measuring import Contender, Meter, Section, measure
from benchmarks.options import Options
from benchmarks.workload import build_model
from dualsft.lab.evaluation.benchmarks import DEFAULT_BATCH, GENERATED

PROMPT, NEW = 900, 48
"""Tokens per prompt and per answer on a GPU."""


def run(options: Options) -> Section:
    """Batch sizes from the harness default to the one used on a GPU, and twice that."""
    meter = Meter(options.device)
    sizes = [DEFAULT_BATCH * factor for factor in (1, 4, GENERATED, 2 * GENERATED)]
    prompt, new = PROMPT, NEW
    if not options.on_gpu:
        sizes, prompt, new = [1, 2, 4], 32, 4
    model = build_model(options.model, options.device)
    torch.manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = torch.randint(0, vocabulary, (sizes[-1], prompt), device=options.device)
    contenders: dict[str, Contender] = {
        f"batches of {size}": partial(_answering, model, prompts, size, new) for size in sizes
    }
    found, skipped = measure(meter, contenders, rounds=options.rounds)
    section = Section(
        "generated answers",
        {"model": options.model, "prompts": f"{len(prompts)} of {prompt} tokens", "new": new},
    )
    section.skipped = skipped
    for name, measured in found.items():
        section.add(name, measured, figures={"answers a second": len(prompts) / measured.fastest})
    section.compare(f"batches of {sizes[0]}", f"batches of {sizes[0]}")
    return section


@contextmanager
def _answering(
    model: PreTrainedModel, prompts: torch.Tensor, size: int, new: int
) -> Iterator[Callable[[], object]]:
    """Greedy answers to all prompts, `size` at a time, after a warmup on the first batch."""

    def ask(asked: torch.Tensor = prompts, new: int = new) -> None:
        for batch in asked.split(size):
            model.generate(  # pyright: ignore[reportCallIssue]
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                use_cache=True,  # as the harness does; the config of a shape is for training
                pad_token_id=0,
            )

    ask(prompts[:size], 2)
    yield ask
