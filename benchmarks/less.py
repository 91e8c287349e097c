"""Cost of LESS scoring: projected Adam directions per example, ours against other implementations.

One checkpoint of LESS (docs/methods.md): per example the gradient with respect to a LoRA adapter,
its Adam direction, a seeded projection, and the normalised dot product with a target. Ours computes
per-example gradients in batches and projects them layer by layer. The batch-of-one loop is plain
autograd per example with the same projection, and must give the same scores. The reference is
forward and backward of one LoRA training epoch over the same rows. bergson, if installed, builds
its gradient index for the same adapter and batches: with its own Adam normalisation (no first
moment) and projection of each layer to as many numbers, kept in memory and not scored. Not part of
Algorithm 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measuring import Contender, Meter, Section, measure
from benchmarks.options import Options
from benchmarks.workload import build_model, make_pool
from dualsft.data.examples import Example, collate, make_batches
from dualsft.engine.losses import example_objective, plain_example_loss
from dualsft.engine.sketch import Sketch
from dualsft.errors import RunError
from dualsft.lab.methods.less import Checkpoint, Sketcher, attach, target_maps
from dualsft.lab.methods.table import LessOptions

MODELS = {"cpu": "small", "cuda": "llama-3.2-1b-shape"}
ROWS = {"cpu": 24, "cuda": 64}
SETTINGS = {"cpu": LessOptions(rank=16, dim=1024), "cuda": LessOptions(rank=128, dim=4096)}
"""Square projections (sides 32 and 64), because those of bergson are square."""
QUICK = LessOptions(rank=4, dim=64)
PLAIN, ALONE = "LoRA epoch", "batch-of-one gradients"
OURS, BERGSON = "ours: LESS scores", "bergson: gradient index"
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


class Work:
    """The rows, an adapter with non-zero weights, and the target of the scores."""

    def __init__(self, options: Options) -> None:
        kind = options.device.type
        self.name = options.model if options.quick else MODELS[kind]
        self.less = QUICK if options.quick else SETTINGS[kind]
        self.model: PreTrainedModel = build_model(self.name, options.device)
        rows = options.rows if options.quick else ROWS[kind]
        self.pool = make_pool(rows, self.model.config.vocab_size, 160 if options.quick else 512)
        self.batch_tokens = options.batch_tokens
        targets, _ = target_maps(self.model)
        rng = np.random.default_rng(0)
        self.maps = attach(self.model, targets, self.less, lambda _: rng)
        self.weights = {name: m.get_parameter("weight") for name, m in self.maps.items()}
        first, second = {}, {}
        with torch.no_grad():
            for name, p in self.weights.items():
                drawn = [torch.from_numpy(rng.standard_normal(p.shape)).to(p) for _ in range(3)]
                if ".lora_B." in name:  # with B at zero, A would have no gradient
                    p.copy_(0.01 * drawn[0])
                first[name], second[name] = 1e-4 * drawn[1], (1e-3 * drawn[2]).square()
        self.checkpoint = Checkpoint({}, first, second, 1.0, (0.9, 0.999), 1e-8)
        self.sketch = Sketch(self.less.dim, 0, "less")
        target = torch.from_numpy(rng.standard_normal(self.less.dim))
        self.target = target.to(options.device, torch.float32)

    @property
    def batches(self) -> list[list[Example]]:
        return [[self.pool[i] for i in rows] for rows in make_batches(self.pool, self.batch_tokens)]

    def normalised_dots(self, rows: Tensor) -> Tensor:
        return (rows @ self.target) / torch.linalg.vector_norm(rows, dim=1)


def run(options: Options) -> Section:
    """Measure all implementations; ours and the loop must give the same scores."""
    meter, work = Meter(options.device), Work(options)
    scores: dict[str, Tensor] = {}
    contenders: dict[str, Contender] = {
        PLAIN: _contender(lambda: _epoch(work)),
        ALONE: _contender(lambda: _keep(scores, ALONE, _one_by_one(work))),
        OURS: _contender(lambda: _keep(scores, OURS, _streamed(work))),
    }
    left_out = {}
    if find_spec("bergson") is None:
        left_out = {BERGSON: "not installed"}
    else:
        contenders[BERGSON] = _contender(lambda: _bergson(work))
    found, skipped = measure(meter, contenders, rounds=options.rounds, rehearse=contenders)
    conditions = {
        "model": work.name,
        "dtype": str(options.dtype).removeprefix("torch."),
        "adapter": f"rank {work.less.rank} on {len(work.maps) // 2} maps",
        "projection": work.less.dim,
        "rows": len(work.pool),
        "tokens": sum(e.num_tokens for e in work.pool),
        "batch_tokens": work.batch_tokens,
    }
    section = Section("less", conditions, skipped=skipped | left_out)
    for way, measured in found.items():
        figures = {}
        if way in scores and ALONE in scores:
            error = float((scores[way] - scores[ALONE]).abs().max() / scores[ALONE].abs().max())
            figures = {"largest difference": error}
            if error > TOLERANCE[options.dtype]:
                raise RunError(f"{way}: its scores differ by {error:.2g} of the largest")
        section.add(way, measured, figures=figures)
    section.compare("LoRA epoch", PLAIN)
    section.compare("batch-of-one", ALONE)
    return section


def _contender(call: Callable[[], object]) -> Contender:
    @contextmanager
    def contender() -> Iterator[Callable[[], object]]:
        yield call

    return contender


def _keep(scores: dict[str, Tensor], way: str, found: Tensor) -> None:
    scores[way] = found.double().cpu()


def _epoch(work: Work) -> None:
    """One epoch of LoRA training in batches, forward and backward only."""
    for rows in work.batches:
        objective, _ = example_objective(work.model, collate(rows, 0, device=work.model.device))
        objective.backward()
        for p in work.weights.values():
            p.grad = None


def _streamed(work: Work) -> Tensor:
    """Scores of the pool in order, computed as in `method.data=less`."""
    device = work.model.device
    sketcher = Sketcher(work.model, work.maps, work.sketch)
    scores = torch.zeros(len(work.pool), device=device)
    with sketcher.tapped(work.checkpoint.direction(device, True)) as taps:
        for rows in make_batches(work.pool, work.batch_tokens):
            batch = collate([work.pool[i] for i in rows], 0, device=device)
            scores[rows] = work.normalised_dots(sketcher.of_batch(taps, batch))
    return scores


def _one_by_one(work: Work) -> Tensor:
    """The same scores by plain autograd, one example at a time."""
    device = work.model.device
    direction = work.checkpoint.direction(device, True)
    rows = []
    for example in work.pool:
        plain_example_loss(work.model, collate([example], 0, device=device)).backward()
        total = torch.zeros(1, work.less.dim, device=device)
        for name, p in work.weights.items():
            assert p.grad is not None
            changed = direction(name, p.grad[None], slice(0, 1))
            total += work.sketch.of_matrices(name, changed)
            p.grad = None
        rows.append(total)
    return work.normalised_dots(torch.cat(rows))


def _bergson(work: Work) -> None:
    """bergson's collection of projected, Adam-normalised gradients, in our batches."""
    import bergson  # pyright: ignore[reportMissingImports]
    from bergson.gradients import AdamNormalizer  # pyright: ignore[reportMissingImports]
    from datasets import Dataset

    base: Any = work.model.base_model
    prefix = f"{work.model.base_model_prefix}."
    names = {name.removesuffix(".weight").removeprefix(prefix): name for name in work.maps}
    device = work.model.device
    normalizers = {
        own: AdamNormalizer(work.checkpoint.second[name].to(device)) for own, name in names.items()
    }
    data = Dataset.from_dict(
        {
            "input_ids": [e.input_ids for e in work.pool],
            "labels": [e.labels for e in work.pool],
            "length": [e.num_tokens for e in work.pool],
        }
    )
    side = round(work.less.dim**0.5)
    processor = bergson.GradientProcessor(normalizers=normalizers, projection_dim=side)
    with tempfile.TemporaryDirectory() as folder:
        config = bergson.IndexConfig(
            run_path=folder, loss_reduction="mean", projection_dim=side, token_batch_size=2048
        )
        config.partial_run_path.mkdir(parents=True, exist_ok=True)
        collector = bergson.InMemoryCollector(
            model=base, data=data, cfg=config, processor=processor, target_modules=set(names)
        )
        computer = bergson.CollectorComputer(
            work.model,
            data,
            collector=collector,
            batches=make_batches(work.pool, work.batch_tokens),
            cfg=config,
        )
        computer.run_with_collector_hooks(desc="gradients")
    if len(collector.gradients) != len(work.maps):
        raise RunError(f"{BERGSON}: it saw {len(collector.gradients)} of {len(work.maps)} maps")
