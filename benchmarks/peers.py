"""⟨U, g_n⟩ of every example: ours against batch-of-one gradients and torch.func, same rows.

Algorithm 1 line 8 (GhostDot). The batch-of-one loop is plain autograd per example; torch.func is
vmap over the gradient of one example's loss, in right-padded batches of similar length (a causal
model needs no mask there). Ours are the second walk of two-pass mode, which computes the same
numbers, and the one-pass walk, which also computes G and the certificate. Times are relative to one
plain forward + backward epoch; the results of all are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from transformers import PreTrainedModel

from benchmarks.measuring import Contender, Meter, Section, measure
from benchmarks.options import Options
from benchmarks.scoring import plain, random_direction
from benchmarks.workload import build_model, make_pool
from dualsft.data.examples import Example, collate, make_batches
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.errors import RunError
from dualsft.model.load import find_candidates
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter

MODELS = {"cpu": "small", "cuda": "llama-3.2-1b-shape"}
ROWS = {"cpu": 24, "cuda": 64}
PER_SAMPLE_ROWS = 4  # examples per torch.func batch
PLAIN, ALONE, FUNC = "plain epoch", "batch-of-one gradients", "torch.func per-sample gradients"
DOTS, BOTH = "ours: s_D", "ours: G, s_D, certificate"
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def run(options: Options) -> Section:
    """Measure all implementations of the dot products; their values must agree."""
    meter = Meter(options.device)
    name = options.model if options.quick else MODELS[options.device.type]
    rows = options.rows if options.quick else ROWS[options.device.type]
    model = build_model(name, options.device)
    pool = make_pool(rows, model.config.vocab_size, 160 if options.quick else 512)
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    direction = random_direction(engine).held()
    dots: dict[str, Tensor] = {}
    ways = _ways(options, engine, pool, direction)
    contenders: dict[str, Contender] = {PLAIN: plain(model, pool, options.batch_tokens)}
    contenders |= {way: _recorded(way, call, dots) for way, call in ways.items()}
    found, skipped = measure(meter, contenders, rounds=options.rounds, rehearse=contenders)
    conditions = {
        "model": name,
        "dtype": str(options.dtype).removeprefix("torch."),
        "rows": rows,
        "tokens": sum(e.num_tokens for e in pool),
        "batch_tokens": options.batch_tokens,
        "per_sample_rows": PER_SAMPLE_ROWS,
        "peak": "the direction is held in all of them",
    }
    section = Section("peers", conditions, skipped=skipped)
    for way, measured in found.items():
        figures = {}
        if way in dots and ALONE in dots:
            error = float((dots[way] - dots[ALONE]).abs().max() / dots[ALONE].abs().max())
            figures = {"largest difference": error}
            if error > TOLERANCE[options.dtype]:
                raise RunError(f"{way}: its dot products differ by {error:.2g} of the largest")
        section.add(way, measured, figures=figures)
    section.compare("plain epoch", PLAIN)
    section.compare("batch-of-one", ALONE)
    return section


def _recorded(way: str, call: Callable[[], Tensor], dots: dict[str, Tensor]) -> Contender:
    def recorded() -> None:
        dots[way] = call().double().cpu()

    @contextmanager
    def contender() -> Iterator[Callable[[], object]]:
        yield recorded

    return contender


def _ways(
    options: Options, engine: GhostEngine, pool: list[Example], direction: ParamVector
) -> dict[str, Callable[[], Tensor]]:
    settings = PassSettings(batch_tokens=options.batch_tokens, pad_id=0, padding_side="right")
    quiet = Reporter(lambda _: None)
    objective = loss_objective(engine.model)

    def ours(**what: Any) -> Tensor:
        found = walk(engine, pool, objective, settings, quiet, "walk", direction=direction, **what)
        return torch.from_numpy(found.dots)

    def both() -> Tensor:
        return ours(sums=ParamVector.zeros(engine.candidates), bounds=True)

    def one_by_one() -> Tensor:
        return torch.stack([_alone(engine, e, direction) for e in pool])

    return {
        ALONE: one_by_one,
        FUNC: lambda: _per_sample(engine.model, pool, direction),
        DOTS: ours,
        BOTH: both,
    }


def _alone(engine: GhostEngine, example: Example, direction: ParamVector) -> Tensor:
    """⟨U, g_n⟩ of one example by plain autograd, parameter by parameter."""
    parts: list[Tensor] = []

    def visit(name: str, gradient: Tensor) -> None:
        parts.append(torch.dot(gradient.flatten().float(), direction[name].flatten().float()))

    batch = collate([example], 0, "right", engine.device)
    alone(engine.model, engine.candidates, batch, visit)
    return torch.stack(parts).double().sum()


def _per_sample(model: PreTrainedModel, pool: list[Example], direction: ParamVector) -> Tensor:
    """⟨U, g_n⟩ by vmap(grad) over the candidates, a few examples at a time."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    chosen = {name: weights[name] for name in direction}

    def loss(candidates: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        given = {"input_ids": ids[None], "attention_mask": None, "use_cache": False}
        logits = functional_call(model, weights | candidates, (), given).logits[0, :-1].float()
        target = labels[1:]
        token = torch.nn.functional.cross_entropy(logits, target.clamp(min=0), reduction="none")
        real = (target >= 0).to(token.dtype)
        return (token * real).sum() / real.sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    values = torch.zeros(len(pool), dtype=torch.float64, device=model.device)
    for rows in make_batches(pool, _tokens(pool)):
        batch = collate([pool[i] for i in rows], 0, "right", model.device)
        gradients = per_sample(chosen, batch.input_ids, batch.labels)
        for name, gradient in gradients.items():
            products = gradient.flatten(1).float() @ direction[name].flatten().float()
            values[rows] += products.double()
    return values


def _tokens(pool: list[Example]) -> int:
    """Token budget of a batch with `PER_SAMPLE_ROWS` rows of the longest example."""
    return PER_SAMPLE_ROWS * max(e.num_tokens for e in pool)
