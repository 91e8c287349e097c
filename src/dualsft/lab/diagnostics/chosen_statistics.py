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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.scores import dot_alone
from dualsft.engine.losses import last_hidden
from dualsft.engine.passes import widened
from dualsft.engine.walk import loss_objective, remaining_batches, walk
from dualsft.lab import plots
from dualsft.lab.diagnostics.job import DiagnosticJob, warm_surrogate
from dualsft.lab.diagnostics.ranking import chunks, sampled
from dualsft.lab.plots import COLOURS, SIDES, Figures, Result
from dualsft.memory.placement import at_hand
from dualsft.model.load import locate
from dualsft.runs.context import pass_settings
from dualsft.runs.stages.gradients import read_pool
from dualsft.runs.stages.scores import read_scores
from dualsft.storage.vectors import reduction_dtype

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
    pool, ids = job.scoring.pool, job.selected_ids
    if ids is None:
        return {"note": "the run selects no examples (select.variant=param)"}
    losses = read_pool(job.ctx.folder("gradients") / "pool.parquet")["loss"]
    selected = np.array([i for i, e in enumerate(pool) if e.id in ids])
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

    def diversity(total: Tensor, n: int) -> float | None:
        """1 − mean cosine over all pairs, computed from the sum of the unit vectors."""
        return 1.0 - (float(total @ total) - n) / (n * (n - 1)) if n > 1 else None

    return {
        "groups": {
            name: {
                "examples": len(rows),
                "alignment": float(np.mean([cosines[i] for i in looked_at[name]])),
                "alignment_examples": len(looked_at[name]),
                "loss": float(losses[rows].mean()),
                "diversity": diversity(sums[name], len(rows)),
                "response_tokens": float(lengths[rows].mean()),
            }
            for name, rows in groups.items()
        }
    }


def draw_data_statistics(result: Result) -> Figures:
    """Three panels of bars: alignment, loss, diversity."""
    figure, axes = plots.panels(1, 3, width=3.2, height=3.2)
    groups = result["groups"]
    kinds = (
        ("alignment", "alignment with validation (cosine)", "{:.3f}"),
        ("loss", "loss (nats per response token)", "{:.2f}"),
        ("diversity", "diversity (1 − mean cosine)", "{:.3f}"),
    )
    for one, (key, label, form) in zip(axes, kinds, strict=True):
        names = [name.replace("_", "-") for name in groups]
        plots.bars(one, names, {key: plots.column([*groups.values()], key)}, form)
        one.set_ylabel(label)
    return {"": figure}


def _alignments(job: DiagnosticJob, rows: np.ndarray) -> dict[int, float]:
    """cos(g_n, v_val) of these pool positions; 0 for a zero gradient."""
    ctx, label = job.ctx, "alignment with the validation gradient"
    v_val, passes = at_hand(job.scoring.scored.terms.v_val), pass_settings(job.ctx)
    examples = [job.scoring.pool[i] for i in rows]
    with widened(job.scoring.engine.model) as (model,):
        engine = job.scoring.engine.on(model)
        if engine.separable:
            wanted = {"direction": v_val, "bounds": True, "squared": True}
            objective = loss_objective(model)
            found = walk(engine, examples, objective, passes, ctx.reporter, label, **wanted)
            dots = found.dots
            norms = np.sqrt((found.inner_sums.astype(np.float64) ** 2).sum(1))
        else:  # a model that uses a weight twice: plain autograd, one example at a time
            place = {f"alignment {i}": e for i, e in zip(rows, examples, strict=True)}
            pairs = job.each(
                label,
                "examples",
                [*place],
                lambda key: dot_alone(engine, place[key], v_val, passes),
            )
            dots, norms = np.array(pairs).T
    size = v_val.norm() * norms
    cosines = np.divide(dots, size, out=np.zeros_like(dots), where=size > 0)
    return dict(zip(rows.tolist(), cosines.tolist(), strict=True))


@torch.no_grad()
def _embedding_sums(job: DiagnosticJob, groups: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Sum of the unit embeddings of each group (mean-pooled last hidden states of θ_old)."""
    ctx, pool = job.ctx, job.scoring.pool
    model = ctx.theta_old()
    member = {name: np.isin(np.arange(len(pool)), rows) for name, rows in groups.items()}
    piece = ctx.pieces.load("embeddings")
    done = piece.facts["done"] if piece else 0
    sums: dict[str, Tensor] = dict(piece.tensors) if piece else {}
    track = job.reporter.track("embeddings", len(pool), "examples", done)
    with track as progress, ctx.pieces.loop():
        for rows in remaining_batches(pool, ctx.batch_tokens, done):
            chosen = [pool[i] for i in rows]
            batch = ctx.collate(chosen)
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
            where = f"embeddings: {done:,} of {len(pool):,} examples"
            state = (dict(sums), {"done": done})
            ctx.pieces.tick("embeddings", lambda state=state: state, where)
    return sums


def param_statistics(job: DiagnosticJob) -> dict[str, Any]:
    """Shares and enrichment of the layers, the modules and the paper's groups."""
    mask = job.mask
    if mask is None:
        return {"note": "the run selects no entries (select.variant=data)"}
    sizes = {name: shape.numel() for name, shape in job.ctx.candidate_shapes.items()}
    taken = {name: mask[name].numel() if name in mask else 0 for name in sizes}

    def share(names: list[str], within: list[str] | None = None) -> dict[str, float | None]:
        """Share of the group in the selection and in the candidates, and their ratio."""
        if not names:
            return {"selected": None, "pool": None, "enrichment": None}
        chosen, total = (sum(count[n] for n in within or sizes) for count in (taken, sizes))
        pool = sum(sizes[n] for n in names) / total
        selected = sum(taken[n] for n in names) / chosen if chosen else None
        ratio = None if selected is None else selected / pool
        return {"selected": selected, "pool": pool, "enrichment": ratio}

    layers, modules, families = (defaultdict[str, list[str]](list) for _ in range(3))
    for name in sizes:
        layer, module = locate(name)
        layers["other" if layer is None else str(layer)].append(name)
        modules[module].append(name)
        families[family(module)].append(name)
    numbered = [layer for layer in layers if layer != "other"]
    top = sorted(numbered, key=lambda layer: -sum(taken[n] for n in layers[layer]))[:TOP_LAYERS]
    early = range(max(1, round(len(numbered) * EARLY)))
    ffn = families["ffn"]
    down = [name for name in ffn if locate(name)[1].rsplit(".", 1)[-1] in DOWN]
    return {
        "selected": sum(taken.values()),
        "candidates": sum(sizes.values()),
        "top_layers": [int(layer) for layer in top],
        "groups": {
            f"top {len(top)} layers": share([n for x in top for n in layers[x]]),
            f"early layers (L0–L{early[-1]})": share(
                [n for x in early for n in layers.get(str(x), [])]
            ),
            "attention": share(families["attention"]),
            "FFN": share(ffn),
            "down_proj within FFN": share(down, within=ffn),
        },
        "layers": {layer: share(names) for layer, names in layers.items()},
        "modules": {module: share(names) for module, names in modules.items()},
    }


def draw_param_statistics(result: Result) -> Figures:
    """Shares of the paper's groups in selection and candidates; enrichment by layer."""
    figure, (left, right) = plots.panels(1, 2, width=5.4, height=3.6)
    groups = {k: v for k, v in result["groups"].items() if v["pool"] is not None}
    names = [name.replace(" layers", "\nlayers").replace(" within", "\nwithin") for name in groups]
    titles = {"selected": "selected", "pool": "candidates"}
    shares = {title: plots.column([*groups.values()], key, 100) for key, title in titles.items()}
    plots.bars(left, names, shares, "{:.1f}")
    left.set_ylabel("share (%)")
    left.tick_params(axis="x", labelsize=7)
    layers = sorted((int(n), v) for n, v in result["layers"].items() if n != "other")
    right.bar([n for n, _ in layers], [v["enrichment"] or 0 for _, v in layers], color=COLOURS[0])
    right.axhline(1.0, color=COLOURS[-1], linestyle="--", linewidth=1, label="candidates")
    right.locator_params(axis="x", integer=True)
    right.set_xlabel("layer")
    right.set_ylabel("enrichment (× share of candidates)")
    plots.legend_above(right)
    return {"": figure}


def family(module: str) -> str:
    """attention, ffn or other, from the module's name."""
    if "attn" in module or "attention" in module:
        return "attention"
    words = ("mlp", "ffn", "feed_forward", "expert")
    return "ffn" if any(word in module for word in words) else "other"


def heatmap(job: DiagnosticJob) -> dict[str, Any]:
    """H_{l,m} and, if the run has a mask, the selected share of each block."""
    scores, mask = warm_surrogate(job).scores(), job.mask
    totals: dict[tuple[int, str], list[float]] = {}
    with job.reporter.track("heat map", scores.num_entries, "entries") as progress:
        for name, part in chunks(scores):
            layer, module = locate(name)
            if layer is not None:
                block = totals.setdefault((layer, module), [0.0, 0, 0])
                block[0] += float(part.abs().double().sum())
                block[1] += part.numel()
            progress.advance(part.numel())
    for name, index in (mask or {}).items():
        layer, module = locate(name)
        if layer is not None and (layer, module) in totals:
            totals[layer, module][2] += index.numel()
    layers = sorted({layer for layer, _ in totals})
    modules = list(dict.fromkeys(module for _, module in totals))

    def table(value: int) -> list[list[float | None]]:
        cells = [[totals.get((layer, module)) for module in modules] for layer in layers]
        return [[None if c is None else c[value] / c[1] for c in row] for row in cells]

    return {
        "layers": layers,
        "modules": modules,
        "mean_abs_score": table(0),
        "selected_share": None if mask is None else table(2),
        "chosen_by": other_rule(job, "params"),
    }


def draw_heatmap(result: Result) -> Figures:
    """Layer × module: mean |score| relative to its maximum, and the selected share if known."""
    scores = np.array(result["mean_abs_score"], float)
    largest = np.nanmax(scores) if np.isfinite(scores).any() else 0.0
    tables = {"mean |score| over the largest": scores / largest if largest > 0 else scores}
    if result["selected_share"] is not None:
        share = 100 * np.array(result["selected_share"], float)
        tables["selected entries of the block (%)"] = share
    layers, modules = result["layers"], result["modules"]
    names, every = plots.short_names(modules), max(1, len(layers) // 14)
    height = max(3.0, 0.8 + 0.17 * len(layers))
    figure, axes = plots.panels(1, len(tables), width=max(3.8, 0.55 * len(modules)), height=height)
    for one, (label, values) in zip(axes, tables.items(), strict=True):
        image = one.imshow(values, aspect="auto", cmap="viridis", vmin=0)
        one.grid(False)
        one.set_xticks(range(len(modules)), [names[m] for m in modules], rotation=60, fontsize=8)
        one.set_yticks(range(0, len(layers), every), layers[::every], fontsize=8)
        one.set_ylabel("layer")
        figure.colorbar(image, ax=one, label=label)
    if len(axes) > 1 and (rule := result.get("chosen_by")):
        axes[1].set_title(f"selected by {rule},\nnot by these scores", fontsize=8)
    return {"": figure}


def other_rule(job: DiagnosticJob, axis: Literal["data", "params"]) -> str | None:
    """What the run selected by on this axis in place of the largest scores; None if by these."""
    select, entry = job.ctx.config.select, job.ctx.methods.entries[axis]
    assert entry is not None
    if entry.name != "dualsft":
        return f"method.{axis}={entry.name}"
    if select.rounds:
        return "select.rounds"
    if axis == "data" and select.per_source is not None:
        return "select.per_source"
    if axis == "data" and select.lengths != "any":
        return "select.lengths"
    return None


def histograms(job: DiagnosticJob) -> dict[str, Any]:
    """Counts of both scores in bins that are equally spaced in asinh(score / median |score|).

    The cut-off is that of the run; None if the run did not select the largest of these scores.
    """
    k, b = job.budgets
    at, rules = warm_surrogate(job), {axis: other_rule(job, axis) for axis in ("data", "params")}
    scores = at.scores()
    cutoff = None if rules["params"] else at.mask(k).threshold
    (sample,), _ = sampled([scores], SCALE_SAMPLE, job.rng("histogram"))
    params = _histogram(lambda: (part for _, part in chunks(scores)), sample, cutoff)
    known, bound = job.known_scores()
    unit = plots.SCORE
    if known is None and (found := read_scores(job.ctx.folder("scores"), job.scoring.pool)):
        known, unit = found[0], "calibrated score"
    elif known is None:
        known = at.pool_scores() * at.eta_sc
    cutoff, ids = None, job.selected_ids
    if ids is not None and not rules["data"]:
        cutoff = float(known[[e.id in ids for e in job.scoring.pool]].min())
    values = torch.from_numpy(known)
    examples = _histogram(lambda: [values], known, cutoff)
    examples |= {"selected": b, "largest_bound": float(bound.max()), "unit": unit}
    return {
        "params": params | {"selected": k, "chosen_by": rules["params"]},
        "examples": examples | {"chosen_by": rules["data"]},
    }


def _histogram(
    parts: Callable[[], Iterable[Tensor]], sample: np.ndarray, cutoff: float | None
) -> dict[str, Any]:
    """Histogram of the values in `parts`, which is read twice; `sample` sets the scale."""
    extremes = [(float(part.min()), float(part.max()), part.numel()) for part in parts()]
    low, high = min(e[0] for e in extremes), max(e[1] for e in extremes)
    total = sum(e[2] for e in extremes)
    sizes = np.abs(sample[sample != 0])
    scale = float(np.median(sizes)) if len(sizes) else 1.0
    if not low < high:  # all values are equal
        low, high = low - scale, high + scale
    bins = int(np.clip(2 * total**0.5, 8, BINS))
    even = np.linspace(np.arcsinh(low / scale), np.arcsinh(high / scale), bins + 1)
    edges = np.sinh(even) * scale
    edges[0], edges[-1] = low, high  # exact ends: rounding would drop the extreme values
    inner = torch.from_numpy(edges[1:-1])
    counts, negative = torch.zeros(bins, dtype=torch.int64), 0
    for part in parts():
        where = torch.bucketize(part, inner.to(part), right=True)
        counts += torch.bincount(where, minlength=bins).cpu()
        negative += int((part < 0).sum())
    return {
        "edges": edges.tolist(),
        "scale": scale,
        "counts": counts.tolist(),
        "cutoff": cutoff,
        "total": total,
        "negative": negative,
    }


def draw_histograms(result: Result) -> Figures:
    """Histograms of both scores on log-like axes, with the run's cut-off if it has one."""
    figure, axes = plots.panels(1, 2)
    for one, (side, title) in zip(axes, SIDES.items(), strict=True):
        facts = result[side]
        one.stairs(
            facts["counts"], facts["edges"], fill=True, color=COLOURS[5], edgecolor=COLOURS[0]
        )
        if facts["cutoff"] is not None:
            label = f"cut-off: {facts['selected']:,} of {facts['total']:,} selected"
            one.axvline(facts["cutoff"], color=COLOURS[1], linestyle="--", label=label)
            plots.legend_above(one)
        if rule := facts.get("chosen_by"):
            one.set_title(f"the run selected by {rule},\nnot the largest of these", fontsize=8)
        plots.signed_axis(one, "x", facts["edges"], facts["scale"])
        one.set_yscale("symlog", linthresh=1)
        one.set_ylim(0, 2 * max(facts["counts"]))
        one.set_xlabel(facts.get("unit", plots.SCORE))
        one.set_ylabel(f"{title} per bin")
    return {"": figure}
