"""Diagonal versus full Hessian on slices of entries: how well does ĉ ⊙ G approximate H G?

Reproduces the paper's Tables diag_full_main and diag_full_multilayer (appendix diag_full_rank). For
the modules o_proj and down_proj in several layers, a slice B of entries is drawn by score: a third
each from the low, middle and high thirds of the block's scores, fixed before the comparison. At
θ_old and at θ̄, with H the Hessian of L_val = L_new + λ L_prior,

    u_full = v − (η_sc / 2) H_B G_B        u_diag = v − (η_sc / 2) ĉ_B ⊙ G_B

give scores ⟨u, g_n,B⟩ of examples and u ⊙ G_B of entries, whose ranks are compared. H_B G_B is an
exact Hessian-vector product by double backward, with eager attention (the fused kernels have no
second derivative). Rows with `reference: model` use (H G)_B instead, with G over all candidates:
the full-Hessian score of Prop. direct_score_gap, of which the paper's slice is a part.

At the paper's scale the second-order term is about a millionth of u (docs/algorithm.md), so u_full
and u_diag give the same ranks whatever ĉ is. `second` therefore compares the terms H G and ĉ ⊙ G
directly. v, H and G are computed over samples of D_val, anchors and pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example, make_batches
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.losses import Positions, model_inputs, plain_example_loss
from dualsft.errors import ConfigError
from dualsft.lab import plots
from dualsft.lab.diagnostics import ranking
from dualsft.lab.diagnostics.chosen_statistics import family
from dualsft.lab.diagnostics.job import DiagnosticJob, gradient_sum, quiet, warm_surrogate
from dualsft.lab.plots import COLOURS, Figures, Result
from dualsft.model.load import Candidates, load_model, locate
from dualsft.runs.context import RunContext
from dualsft.storage.vectors import Vector, accumulation_dtype
from dualsft.system.usage import Smaller, give_back, is_out_of_memory

PAPER_LAYERS, PAPER_DEPTH = (3, 8, 10, 14, 16, 21, 24, 27), 28
EARLY, LATE = 9.5 / 27, 22.5 / 27
"""Borders of the regions as shares of the depth: the paper's layers 3, 8 | 10 … 21 | 24, 27."""
TOP = 0.05
"""Share of the ranking whose overlap is reported."""
BATCH_TOKENS = 2048
"""Most tokens per batch in double backward, which keeps the graph of the first backward."""

Sums = dict[str, np.ndarray]
"""[3, |B|] for the parameter of each slice B: v, H_B G_B and (H G)_B."""


@dataclass(frozen=True)
class Slice:
    """A set of entries of one parameter."""

    parameter: str
    layer: int
    region: str
    module: str
    coordinates: Tensor
    """Flat indices, ascending."""

    def of(self, block: Tensor) -> np.ndarray:
        """The entries of the slice in a tensor of the parameter's shape, in fp64."""
        flat = block.detach().reshape(-1)
        return flat[self.coordinates.to(flat.device)].double().cpu().numpy()


def hessian(job: DiagnosticJob) -> dict[str, Any]:
    """Compare at both checkpoints; a finished checkpoint is saved and reused after a kill."""
    slices, roles = choose_slices(job), job.roles
    names = ("init", "warmup")
    if not job.ctx.warmed_up:
        job.reporter.say("no warmup, so θ̄ = θ_old and ĉ is undefined: u_diag is first-order")
        names = ("warmup",)
    for name in names:
        if name not in job.records:
            rows = _Checkpoint(job, name, slices).rows()
            job.record(name, rows, f"diagonal against full Hessian: {name}")
    rows = [row for name in names for row in job.records[name]]
    return {
        "slice_size": max(len(s.coordinates) for s in slices),
        "pool_rows": min(job.options.pool_rows, len(roles["pool"])),
        "val_rows": min(job.options.val_rows, len(roles["val"])),
        "lam_effective": job.scoring.scored.terms.lam_effective,
        "rows": rows,
        "means": _means(rows),
    }


def eager_model(ctx: RunContext, name: str) -> PreTrainedModel:
    """θ_old ("init") or θ̄ ("warmup") for second derivatives: in fp32 or fp64, eager attention."""
    folder = ctx.model_folder if name == "init" else ctx.folder("warmup") / "theta_bar"
    dtype = accumulation_dtype(ctx.dtype)
    return load_model(ctx.local(folder), dtype, ctx.device, "eager", ctx.trusted)


def choose_slices(job: DiagnosticJob) -> list[Slice]:
    """Draw the slices by the scores of the run."""
    options, scores = job.options, warm_surrogate(job).scores()
    placed = {name: locate(name) for name in scores}
    depth = 1 + max((layer for layer, _ in placed.values() if layer is not None), default=0)
    if options.layers:
        layers = ranking.counts(options.layers, "diagnose.hessian.layers")
    else:
        layers = sorted({round(n * (depth - 1) / (PAPER_DEPTH - 1)) for n in PAPER_LAYERS})
    wanted = [word.strip() for word in (options.modules or _last_matrices(job)).split(",")]
    slices = []
    for name, (layer, module) in placed.items():
        if layer in layers and any(module == w or module.endswith(f".{w}") for w in wanted):
            rng = job.rng(f"hessian {name}")
            chosen = stratified_slice(rng, scores[name].reshape(-1), options.slice_size)
            slices.append(Slice(name, layer, region(layer, depth), module, chosen))
    if not slices:
        known = sorted({module for _, module in placed.values()})
        raise ConfigError(
            f"diagnose.hessian.modules: {options.modules!r} in layers {layers} matches no "
            f"candidate; available: {depth} layers with {', '.join(known)}"
        )
    return slices


def _last_matrices(job: DiagnosticJob) -> str:
    """Names of the last matrix of attention and of the MLP in a block: their output projections."""
    last: dict[str, str] = {}
    for name, shape in job.ctx.candidate_shapes.items():
        layer, module = locate(name)
        if layer is not None and len(shape) == 2 and family(module) != "other":
            last[family(module)] = module
    return ",".join(last.values())


def region(layer: int, depth: int) -> str:
    """Region of a layer: early, middle or late."""
    share = layer / max(1, depth - 1)
    return "early" if share < EARLY else "middle" if share < LATE else "late"


def stratified_slice(rng: np.random.Generator, scores: Tensor, size: int) -> Tensor:
    """Flat indices of about `size` entries, a third from each third of the scores."""
    order = torch.argsort(scores, stable=True).cpu().numpy()
    found = []
    for stratum in np.array_split(order, 3):
        found.append(rng.choice(stratum, min(len(stratum), -(-size // 3)), replace=False))
    return torch.from_numpy(np.sort(np.concatenate(found)))


class _Checkpoint:
    """Gradients and Hessian-vector products of all slices at one θ."""

    def __init__(self, job: DiagnosticJob, name: str, slices: Sequence[Slice]) -> None:
        self.job, self.ctx, self.name, self.slices = job, job.ctx, name, slices
        self.model = eager_model(job.ctx, name)
        self.engine = GhostEngine(self.model, job.ctx.candidates(self.model))
        self.pool = self._sample("pool", job.options.pool_rows)
        self.lam = job.scoring.scored.terms.lam_effective
        self.preservation = job.ctx.config.score.preservation if self.lam else "none"

    def _sample(self, role: str, count: int, purpose: str | None = None) -> list[Example]:
        return ranking.sample(
            self.job.rng(f"hessian {purpose or role}"), self.job.roles[role], count
        )

    def rows(self) -> list[dict[str, Any]]:
        each = self.gradients(self.model, self.pool, "gradients of examples")
        grad_sum = gradient_sum(quiet(self.ctx), self.engine, self.pool, "G")
        sums = self.second_order(each, grad_sum)
        curvature = self.ctx.curvature(self.engine.candidates)
        scale = self.ctx.config.score.curvature_scale
        eta_sc = self.ctx.base_lr() / len(self.pool)
        rows = []
        for one in self.slices:
            name = one.parameter
            diagonal = np.zeros(len(one.coordinates))
            if curvature is not None:
                diagonal = scale * one.of(curvature[name])
            v, in_slice, in_model = sums[name]
            for reference, product in (("slice", in_slice), ("model", in_model)):
                rows.append(
                    {"checkpoint": self.name, "parameter": name, "layer": one.layer}
                    | {"region": one.region, "module": one.module, "reference": reference}
                    | compared(v, product, diagonal, each[name], eta_sc)
                )
        return rows

    def gradients(
        self, model: PreTrainedModel, rows: list[Example], what: str
    ) -> dict[str, np.ndarray]:
        """g_n at every slice, computed one row at a time: [N, |B|] per slice."""
        slices = {s.parameter: s for s in self.slices}
        found: dict[str, list[np.ndarray]] = {name: [] for name in slices}
        every = self.ctx.candidates(model)
        some = Candidates({name: every[name] for name in found}, every.spec)
        label = f"{what} at the slices ({self.name})"
        with self.job.reporter.track(label, len(rows), "examples") as progress:
            for example in rows:
                batch = self.ctx.collate([example])
                alone(model, some, batch, lambda n, g: found[n].append(slices[n].of(g)))
                progress.advance(1, tokens=example.num_tokens)
        return {name: np.stack(values) for name, values in found.items()}

    def second_order(self, each: Mapping[str, np.ndarray], grad_sum: Vector) -> Sums:
        """v, H_B G_B and (H G)_B of every slice."""
        count = self.job.options.val_rows
        own = {name: torch.from_numpy(rows.sum(0)) for name, rows in each.items()}
        sums: Sums = {s.parameter: np.zeros((3, len(s.coordinates))) for s in self.slices}
        val = self._sample("val", count, "validation")
        self._add(sums, val, lambda b: plain_example_loss(self.model, b) / len(val), own, grad_sum)
        if self.preservation == "none":
            return sums
        teacher, anchors = eager_model(self.ctx, "init"), self._sample("anchor", count, "anchors")
        if self.preservation == "cwsd":
            scale, tau = self.lam / len(anchors), self.ctx.config.score.tau

            def prior(batch: Batch) -> Tensor:
                return scale * plain_cwsd(teacher, self.model, batch, tau)

            self._add(sums, anchors, prior, own, grad_sum)
            return sums
        # ½ Σ F (θ − θ_old)² has the Hessian Diag(F): F = 1 for l2, and for fisher the mean squared
        # gradient of the sampled anchors at θ_old
        squares = {name: np.ones((1, 1)) for name in each}
        if self.preservation == "fisher":
            squares = self.gradients(teacher, anchors, "Fisher")
        new, old = (dict(model.named_parameters()) for model in (self.model, teacher))
        for one in self.slices:
            name = one.parameter
            moved = one.of(new[name].detach() - old[name].detach())
            factors = np.stack([moved, each[name].sum(0), one.of(grad_sum[name])])
            sums[name] += self.lam * (squares[name] ** 2).mean(0) * factors
        return sums

    def _add(
        self,
        sums: Sums,
        rows: list[Example],
        loss: Callable[[Batch], Tensor],
        own: Mapping[str, Tensor],
        grad_sum: Vector,
    ) -> None:
        """Add the gradients and Hessian-vector products of a loss over rows, in batches."""
        label = f"Hessian-vector products ({self.name})"
        waiting = make_batches(rows, min(self.ctx.batch_tokens, BATCH_TOKENS))
        with self.job.reporter.track(label, len(rows), "examples") as progress:
            while waiting:
                chosen = waiting.pop(0)
                batch = self.ctx.collate([rows[i] for i in chosen])
                try:
                    found = self.products(loss(batch), own, grad_sum)
                except Exception as problem:
                    if not is_out_of_memory(problem):
                        raise
                    smaller = Smaller.than(batch.input_ids.shape, problem, "score.batch_tokens")
                    self.job.reporter.warn(f"{label}: {smaller}", code="out_of_memory")
                    left = [i for part in (chosen, *waiting) for i in part]
                    rest = make_batches([rows[i] for i in left], smaller.batch_tokens)
                    waiting = [[left[i] for i in part] for part in rest]
                    problem.__traceback__ = None  # it keeps the autograd graph alive
                    give_back(self.engine.device)
                    continue
                for name, values in found.items():
                    sums[name] += values
                progress.advance(len(chosen))

    def products(self, loss: Tensor, own: Mapping[str, Tensor], grad_sum: Vector) -> Sums:
        """∇loss, its Hessian times G_B (`own`) and times G, at every slice."""
        device, candidates = self.engine.device, self.engine.candidates
        firsts = torch.autograd.grad(loss, list(candidates.values()), create_graph=True)
        first = dict(zip(candidates, firsts, strict=True))
        blocks = [candidates[s.parameter] for s in self.slices]
        # ∇⟨∇loss, G⟩ = H G with the G of all candidates, for all slices at once
        along = torch.stack([(g * grad_sum[n].to(device)).sum() for n, g in first.items()]).sum()
        second = torch.autograd.grad(along, blocks, retain_graph=True)
        found = {}
        for one, whole, block in zip(self.slices, second, blocks, strict=True):
            name = one.parameter
            # H_B G_B: the same with G restricted to the slice, which needs one backward per slice
            flat = first[name].reshape(-1)[one.coordinates.to(device)]
            along = (flat * own[name].to(device, candidates.dtype)).sum()
            (part,) = torch.autograd.grad(along, block, retain_graph=True)
            found[name] = np.stack([one.of(tensor) for tensor in (first[name], part, whole)])
        return found


def compared(
    v: np.ndarray, full: np.ndarray, diagonal: np.ndarray, each: np.ndarray, eta_sc: float
) -> dict[str, Any]:
    """Rank agreement of example and entry scores, and of the second-order terms.

    `full` is H G, `diagonal` is ĉ, `each` are the example gradients [N, |B|].
    """
    total = each.sum(0)
    diag = diagonal * total
    u_full, u_diag = (v - 0.5 * eta_sc * term for term in (full, diag))
    size, of_full, of_diag = (float(np.linalg.norm(x)) for x in (v, full, diag))
    return {
        "data": _ranks(each @ u_full, each @ u_diag),
        "param": _ranks(u_full * total, u_diag * total),
        "second": {
            "rho": ranking.spearman(full, diag),
            "cosine": ranking.cosine(full, diag),
            "norm_ratio": of_diag / of_full if of_full > 0 else None,
            "share_full": 0.5 * eta_sc * of_full / size if size > 0 else None,
            "share_diag": 0.5 * eta_sc * of_diag / size if size > 0 else None,
        },
    }


def _ranks(full: np.ndarray, diag: np.ndarray) -> dict[str, float | None]:
    return {
        "rho": ranking.spearman(full, diag),
        "pair": ranking.pair_agreement(full, diag),
        "top": ranking.top_overlap(full, diag, TOP),
    }


def _means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over all slices of a checkpoint, and over each region and module in it."""
    keys = ("checkpoint", "reference", "region", "module")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["checkpoint"], row["reference"], "all", "all"].append(row)
        groups[tuple(row[key] for key in keys)].append(row)
    means = []
    for group, mine in groups.items():
        entry: dict[str, Any] = {**dict(zip(keys, group, strict=True)), "slices": len(mine)}
        for part in ("data", "param", "second"):
            entry[part] = {
                key: ranking.mean_of([r[part][key] for r in mine]) for key in mine[0][part]
            }
        means.append(entry)
    return means


def draw_hessian(result: Result) -> Figures:
    """Agreement of the scores and of the second-order terms, by region and module."""
    means = [m for m in result["means"] if m["region"] != "all" and m["reference"] == "slice"]
    short = plots.short_names(list(dict.fromkeys(m["module"] for m in means)))
    places = list(dict.fromkeys((m["region"], m["module"]) for m in means))
    figure, columns = plots.panels(1, 3, 3.6, 1.6 + 0.4 * len(places))
    shown = {
        "data": "ρ of example scores",
        "param": "ρ of entry scores",
        "second": "ρ of the terms H G and ĉ ⊙ G",
    }
    for axes, (part, title) in zip(columns, shown.items(), strict=True):
        for number, checkpoint in enumerate(dict.fromkeys(m["checkpoint"] for m in means)):
            mine = [m for m in means if m["checkpoint"] == checkpoint]
            axes.barh(
                [places.index((m["region"], m["module"])) + 0.2 * (2 * number - 1) for m in mine],
                [m[part]["rho"] or 0.0 for m in mine],
                height=0.36,
                color=COLOURS[number],
                hatch=plots.HATCHES[number],
                edgecolor="white",
                label=checkpoint,
            )
        axes.set_title(title, fontsize=9)
        plots.guide(axes, x=0.0)
        axes.set_xlim(-1.02, 1.02)
        axes.set_xlabel("Spearman ρ")
    plots.rows_axis(columns, [f"{region}, {short[module]}" for region, module in places])
    columns[-1].legend(fontsize=7, loc="lower left")
    return {"": figure}


def plain_cwsd(
    teacher: PreTrainedModel, student: PreTrainedModel, batch: Batch, tau: float
) -> Tensor:
    """Σ_n ω_n τ² mean KL(teacher ‖ student) in plain autograd, which has a second derivative."""
    positions = Positions.of(batch)

    def logits(model: PreTrainedModel) -> Tensor:
        found = model(**model_inputs(model, batch)).logits
        chosen = found[positions.row_M, positions.column_M]
        return chosen.to(accumulation_dtype(chosen.dtype))

    with torch.no_grad():
        old = logits(teacher)
        plain, log_q = torch.log_softmax(old, -1), torch.log_softmax(old / tau, -1)
        entropy = positions.per_example_mean(-(plain.exp() * plain).sum(-1))
        weight = positions.per_token(1.0 - entropy / np.log(old.shape[-1]))
    log_p = torch.log_softmax(logits(student) / tau, -1)
    kl = tau**2 * (log_q.exp() * (log_q - log_p)).sum(-1)
    return (kl * weight.to(kl.dtype)).sum()
