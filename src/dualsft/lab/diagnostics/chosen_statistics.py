"""Statistics of the selected examples and entries, heat map, score histograms.

Reproduces the paper's appendix `selection_statistics`, from the stages of Algorithm 1 lines 3 to
11.

* Examples (Table `selected_data_main`): alignment is the mean cosine between g_n and v_val at θ̄,
  over at most `limit` examples per group; the loss is that of the pool pass at θ̄; diversity is 1
  minus the mean cosine over all pairs of mean-pooled last hidden states of θ_old, exact for every
  group since Σ_{i<j} cos = (‖Σ φ̂‖² − n) / 2.
* Entries (Table `selected_param_stats_app`): shares within the candidates, enrichment, the five
  layers with the largest shares, early layers, down_proj within the FFN.
* The heat map is H_{l,m}, the mean |s_θ| of a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.scores import dot_alone
from dualsft.data.examples import Example, collate
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import last_hidden
from dualsft.engine.precision import widened
from dualsft.engine.walk import loss_objective, remaining_batches, walk
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.lab.diagnostics.ranking import sampled
from dualsft.lab.diagnostics.surrogate import budgets, known_scores, warm_surrogate
from dualsft.memory.placement import at_hand
from dualsft.model.load import locate
from dualsft.runs.context import pass_settings
from dualsft.runs.stages.chosen import read_mask
from dualsft.runs.stages.gradients import read_pool
from dualsft.storage.vectors import Vector, reduction_dtype

TOP_LAYERS = 5
EARLY = 10 / 28
"""The paper's early layers, L0 to L9 of 28, as a share of the depth."""
DOWN = frozenset({"down_proj", "c_proj", "fc2", "w2", "wo", "dense_4h_to_h"})
"""Names of the last FFN matrix in the known architectures."""
BINS = 80
"""Most bins in a histogram."""
SCALE_SAMPLE = 1 << 20
"""Entries in the sample that sets the scale of the histogram of entries."""


def data_statistics(job: DiagnosticJob) -> dict[str, Any]:
    """Alignment, loss, diversity and length of selected, random, top-loss and all examples."""
    if not (job.final / "ids.json").is_file():
        return {"note": "the run selects no examples (select.variant=param)"}
    pool = job.scoring.pool
    losses = read_pool(job.ctx.folder("gradients") / "pool.parquet")["loss"]
    selected = np.array([i for i, e in enumerate(pool) if e.id in job.selected_ids])
    count, rng = len(selected), job.rng("groups")
    groups = {
        "selected": selected,
        "random": np.sort(rng.permutation(len(pool))[:count]),
        "top_loss": np.sort(np.lexsort((np.arange(len(pool)), -losses))[:count]),
        "pool": np.arange(len(pool)),
    }
    limit = job.options.limit
    looked_at = {
        name: rows if len(rows) <= limit else np.sort(rng.permutation(rows)[:limit])
        for name, rows in groups.items()
    }
    cosines = _alignments(job, np.unique(np.concatenate(list(looked_at.values()))))
    sums = _embedding_sums(job, groups)
    lengths = np.array([e.num_response_tokens for e in pool])
    return {
        "groups": {
            name: {
                "examples": len(rows),
                "alignment": float(np.mean([cosines[i] for i in looked_at[name]])),
                "alignment_examples": len(looked_at[name]),
                "loss": float(losses[rows].mean()),
                "diversity": _diversity(sums[name], len(rows)),
                "response_tokens": float(lengths[rows].mean()),
            }
            for name, rows in groups.items()
        }
    }


def _alignments(job: DiagnosticJob, rows: np.ndarray) -> dict[int, float]:
    """cos(g_n, v_val) of these pool positions; 0 for a zero gradient."""
    scoring, label = job.scoring, "alignment with the validation gradient"
    v_val, engine = at_hand(scoring.scored.terms.v_val), scoring.engine
    examples = [scoring.pool[i] for i in rows]
    with widened(engine.model) as (model,):
        at = engine.on(model)
        way = _walked if at.separable else _one_by_one
        dots, norms = way(job, at, examples, v_val, label)
    size = v_val.norm() * norms
    cosines = np.divide(dots, size, out=np.zeros_like(dots), where=size > 0)
    return dict(zip(rows.tolist(), cosines.tolist(), strict=True))


def _walked(
    job: DiagnosticJob, engine: GhostEngine, examples: list[Example], v_val: Vector, label: str
) -> tuple[np.ndarray, np.ndarray]:
    """(⟨g_n, v_val⟩, ‖g_n‖) of every example, in batches; needs a separable engine."""
    found = walk(
        engine,
        examples,
        loss_objective(engine.model),
        pass_settings(job.ctx),
        job.reporter,
        label,
        direction=v_val,
        bounds=True,
        squared=True,
    )
    return found.dots, np.sqrt((found.inner_sums.astype(np.float64) ** 2).sum(1))


def _one_by_one(
    job: DiagnosticJob, engine: GhostEngine, examples: list[Example], v_val: Vector, label: str
) -> tuple[np.ndarray, np.ndarray]:
    """The same by plain autograd, one example at a time, for models that use a weight twice."""
    settings, pieces = pass_settings(job.ctx), job.ctx.pieces
    piece = pieces.load("alignment")
    found = piece.tensors["found"] if piece else torch.zeros(2, len(examples), dtype=torch.float64)
    done = piece.facts["done"] if piece else 0
    with job.reporter.track(label, len(examples), "examples", done) as progress, pieces.loop():
        for number in range(done, len(examples)):
            example = examples[number]
            found[:, number] = torch.tensor(dot_alone(engine, example, v_val, settings))
            progress.advance(1, tokens=example.num_tokens)
            where = f"{label}: {number + 1:,} of {len(examples):,} examples"
            state = ({"found": found}, {"done": number + 1})
            pieces.tick("alignment", lambda state=state: state, where)
    return found[0].numpy(), found[1].numpy()


@torch.no_grad()
def _embedding_sums(job: DiagnosticJob, groups: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Sum of the unit embeddings of each group (mean-pooled last hidden states of θ_old)."""
    ctx, pool = job.ctx, job.scoring.pool
    model = ctx.theta_old()
    member = {name: np.isin(np.arange(len(pool)), rows) for name, rows in groups.items()}
    piece = ctx.pieces.load("embeddings")
    done = piece.facts["done"] if piece else 0
    sums: dict[str, Tensor] = dict(piece.tensors) if piece else {}
    label = "embeddings"
    with (
        job.reporter.track(label, len(pool), "examples", done) as progress,
        ctx.pieces.loop(),
    ):
        for rows in remaining_batches(pool, ctx.batch_tokens, done):
            chosen = [pool[i] for i in rows]
            batch = collate(chosen, ctx.pad_id, ctx.config.data.padding_side, ctx.device)
            hidden = last_hidden(model, batch)
            wide = reduction_dtype(hidden.device)
            real = batch.attention_mask[..., None].to(wide)
            mean = ((hidden.to(wide) * real).sum(1) / real.sum(1)).cpu().double()
            unit = mean / mean.norm(dim=1, keepdim=True).clamp_min(1e-300)
            for name, inside in member.items():
                part = unit[torch.from_numpy(inside[rows])].sum(0)
                sums[name] = sums[name] + part if name in sums else part
            done += len(rows)
            progress.advance(len(rows), tokens=sum(e.num_tokens for e in chosen))
            where = f"{label}: {done:,} of {len(pool):,} examples"
            state = (dict(sums), {"done": done})
            ctx.pieces.tick("embeddings", lambda state=state: state, where)
    return sums


def _diversity(total: Tensor, count: int) -> float | None:
    """1 − mean cosine over all pairs, computed from the sum of the unit vectors."""
    if count < 2:
        return None
    return 1.0 - (float(total @ total) - count) / (count * (count - 1))


def param_statistics(job: DiagnosticJob) -> dict[str, Any]:
    """Shares and enrichment of the layers, the modules and the paper's groups."""
    if not (job.final / "mask.safetensors").is_file():
        return {"note": "the run selects no entries (select.variant=data)"}
    mask = read_mask(job.final)
    places = {name: locate(name) for name in job.ctx.candidate_shapes}
    sizes = {name: shape.numel() for name, shape in job.ctx.candidate_shapes.items()}
    taken = {name: mask[name].numel() if name in mask else 0 for name in sizes}
    layers: dict[str, list[str]] = defaultdict(list)
    modules: dict[str, list[str]] = defaultdict(list)
    families: dict[str, list[str]] = defaultdict(list)
    for name, (layer, module) in places.items():
        layers["other" if layer is None else str(layer)].append(name)
        modules[module].append(name)
        families[family(module)].append(name)
    by_share = sorted(
        (layer for layer in layers if layer != "other"),
        key=lambda layer: -sum(taken[n] for n in layers[layer]),
    )
    depth = len(by_share)
    early = range(max(1, round(depth * EARLY)))
    top = by_share[: min(TOP_LAYERS, depth)]
    ffn = families.get("ffn", [])
    down = [name for name in ffn if places[name][1].rsplit(".", 1)[-1] in DOWN]
    groups = {
        f"top {len(top)} layers": _share([n for x in top for n in layers[x]], taken, sizes),
        f"early layers (L0–L{early[-1]})": _share(
            [n for x in early for n in layers.get(str(x), [])], taken, sizes
        ),
        "attention": _share(families.get("attention", []), taken, sizes),
        "FFN": _share(ffn, taken, sizes),
        "down_proj within FFN": _share(down, taken, sizes, within=ffn),
    }
    return {
        "selected": sum(taken.values()),
        "candidates": sum(sizes.values()),
        "top_layers": [int(layer) for layer in top],
        "groups": groups,
        "layers": {layer: _share(names, taken, sizes) for layer, names in layers.items()},
        "modules": {module: _share(names, taken, sizes) for module, names in modules.items()},
    }


def family(module: str) -> str:
    """attention, ffn or other, from the module's name."""
    if "attn" in module or "attention" in module:
        return "attention"
    words = ("mlp", "ffn", "feed_forward", "expert")
    return "ffn" if any(word in module for word in words) else "other"


def _share(
    names: list[str],
    taken: Mapping[str, int],
    sizes: Mapping[str, int],
    within: list[str] | None = None,
) -> dict[str, float | None]:
    """Share of the group in the selection and in the candidates, and their ratio."""
    frame = list(sizes) if within is None else within
    chosen, total = sum(taken[n] for n in frame), sum(sizes[n] for n in frame)
    if not names or not total:
        return {"selected": None, "pool": None, "enrichment": None}
    pool = sum(sizes[n] for n in names) / total
    selected = sum(taken[n] for n in names) / chosen if chosen else None
    return {
        "selected": selected,
        "pool": pool,
        "enrichment": None if selected is None else selected / pool,
    }


def heatmap(job: DiagnosticJob) -> dict[str, Any]:
    """H_{l,m} and, if the run has a mask, the selected share of each block."""
    at = warm_surrogate(job)
    scores = at.scores(at.projection, at.scored.grad_sum)
    masked = (job.final / "mask.safetensors").is_file()
    mask = read_mask(job.final) if masked else {}
    totals: dict[tuple[int, str], list[float]] = {}
    with job.reporter.track("heat map", len(scores.forms), "parameters") as progress:
        for name, form in scores.forms.items():
            layer, module = locate(name)
            progress.advance(1)
            if layer is None:
                continue
            block = totals.setdefault((layer, module), [0.0, 0.0, 0.0])
            for start, stop in form.chunks():
                block[0] += float(scores.piece(name, start, stop).abs().double().sum())
            block[1] += form.num_entries
            block[2] += mask[name].numel() if name in mask else 0
    layers = sorted({layer for layer, _ in totals})
    modules = list(dict.fromkeys(module for _, module in totals))

    def table(value: int) -> list[list[float | None]]:
        cells = [[totals.get((layer, module)) for module in modules] for layer in layers]
        return [[None if c is None else c[value] / c[1] for c in row] for row in cells]

    return {
        "layers": layers,
        "modules": modules,
        "mean_abs_score": table(0),
        "selected_share": table(2) if masked else None,
    }


def histograms(job: DiagnosticJob) -> dict[str, Any]:
    """Counts of both scores in bins that are equally spaced in asinh(score / median |score|)."""
    k, b = budgets(job)
    at = warm_surrogate(job)
    scores = at.scores(at.projection, at.scored.grad_sum)
    mask = at.mask(at.projection, at.scored.grad_sum, k)
    sides: dict[str, Any] = {"params": _histogram_of_vector(job, scores, mask.threshold, k)}
    known, bound = known_scores(job)
    if known is None:
        known = at.pool_scores() * at.eta_sc
    cut = float(known[at.best(known, b)].min())
    edges, scale = _edges(known, len(known))
    sides["examples"] = {
        "edges": edges.tolist(),
        "scale": scale,
        "counts": np.histogram(known, edges)[0].tolist(),
        "cutoff": cut,
        "selected": b,
        "total": len(known),
        "negative": int((known < 0).sum()),
        "largest_bound": float(bound.max()),
    }
    return sides


def _histogram_of_vector(
    job: DiagnosticJob, scores: Vector, cutoff: float, k: int
) -> dict[str, Any]:
    (sample,), _ = sampled([scores], SCALE_SAMPLE, job.rng("histogram"))
    low, high = sample.min(), sample.max()
    for piece in _pieces(scores):
        low, high = min(low, float(piece.min())), max(high, float(piece.max()))
    edges, scale = _edges(sample, scores.num_entries, float(low), float(high))
    inner = torch.from_numpy(edges[1:-1])
    total, negative = torch.zeros(len(edges) - 1, dtype=torch.int64), 0
    for piece in _pieces(scores):
        where = torch.bucketize(piece, inner.to(piece), right=True)
        total += torch.bincount(where, minlength=len(total)).cpu()
        negative += int((piece < 0).sum())
    return {
        "edges": edges.tolist(),
        "scale": scale,
        "counts": total.tolist(),
        "cutoff": cutoff,
        "selected": k,
        "total": scores.num_entries,
        "negative": negative,
    }


def _pieces(vector: Vector) -> Iterator[Tensor]:
    for name, form in vector.forms.items():
        for start, stop in form.chunks():
            yield vector.piece(name, start, stop)


def _edges(
    values: np.ndarray, total: int, low: float | None = None, high: float | None = None
) -> tuple[np.ndarray, float]:
    """(edges from smallest to largest value, equally spaced in asinh(value / scale); the scale)."""
    low = float(values.min()) if low is None else low
    high = float(values.max()) if high is None else high
    sizes = np.abs(values[values != 0])
    scale = float(np.median(sizes)) if len(sizes) else 1.0
    if not low < high:  # all values are equal
        low, high = low - scale, high + scale
    bins = int(np.clip(2 * total**0.5, 8, BINS))
    even = np.linspace(np.arcsinh(low / scale), np.arcsinh(high / scale), bins + 1)
    edges = np.sinh(even) * scale
    edges[0], edges[-1] = low, high  # exact ends: rounding would drop the extreme values
    return edges, scale
