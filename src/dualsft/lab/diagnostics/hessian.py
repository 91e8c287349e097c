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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.algorithm.projection import param_scores
from dualsft.data.examples import Batch, Example, collate, make_batches
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.losses import Positions, model_inputs, plain_example_loss
from dualsft.engine.walk import loss_objective, walk
from dualsft.errors import ConfigError
from dualsft.lab.diagnostics.agreement import mean_of, pair_agreement, top_overlap
from dualsft.lab.diagnostics.chosen_statistics import family
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.lab.diagnostics.ranking import cosine, counts, spearman
from dualsft.lab.diagnostics.trials import quiet, sample
from dualsft.memory.placement import blank
from dualsft.model.load import Candidates, load_model, locate
from dualsft.runs.context import RunContext, pass_settings
from dualsft.storage.vectors import Vector, accumulation_dtype
from dualsft.system.paths import Place
from dualsft.system.usage import Smaller, give_back, is_out_of_memory

PAPER_LAYERS, PAPER_DEPTH = (3, 8, 10, 14, 16, 21, 24, 27), 28
EARLY, LATE = 9.5 / 27, 22.5 / 27
"""Borders of the regions as shares of the depth: the paper's layers 3, 8 | 10 … 21 | 24, 27."""
TOP = 0.05
"""Share of the ranking whose overlap is reported."""
BATCH_TOKENS = 2048
"""Most tokens per batch in double backward, which keeps the graph of the first backward."""
PIECE = "hessian"


@dataclass(frozen=True)
class Slice:
    """A set of entries of one parameter."""

    parameter: str
    layer: int
    region: str
    module: str
    coordinates: Tensor
    """Flat indices, ascending."""


def run(job: DiagnosticJob) -> dict[str, Any]:
    """Compare at both checkpoints; a finished checkpoint is saved and reused after a kill."""
    ctx = job.ctx
    slices = choose_slices(job)
    piece = ctx.pieces.load(PIECE)
    rows: list[dict[str, Any]] = piece.facts["rows"] if piece else []
    folders: dict[str, Place] = {
        "init": ctx.model_folder,
        "warmup": ctx.folder("warmup") / "theta_bar",
    }
    if not ctx.warmed_up:
        job.reporter.say("no warmup, so θ̄ = θ_old and ĉ is undefined: u_diag is first-order")
        del folders["init"]
    for name, folder in folders.items():
        if any(row["checkpoint"] == name for row in rows):
            continue
        dtype = accumulation_dtype(ctx.dtype)
        model = load_model(ctx.local(folder), dtype, ctx.device, "eager", ctx.trusted)
        rows += _Checkpoint(job, name, model, slices).rows()
        del model
        with ctx.pieces.loop():
            where = f"diagonal against full Hessian: {name}"
            ctx.pieces.tick(PIECE, lambda rows=rows: ({}, {"rows": rows}), where)
    return {
        "slice_size": max(len(s.coordinates) for s in slices),
        "pool_rows": min(job.options.pool_rows, len(job.roles["pool"])),
        "val_rows": min(job.options.val_rows, len(job.roles["val"])),
        "lam_effective": job.scoring.scored.terms.lam_effective,
        "rows": rows,
        "means": _means(rows),
    }


def choose_slices(job: DiagnosticJob) -> list[Slice]:
    """Draw the slices by the scores of the run."""
    options, scored = job.options, job.scoring.scored
    names = job.scoring.engine.candidates.names
    placed = {name: locate(name) for name in names}
    depth = 1 + max((layer for layer, _ in placed.values() if layer is not None), default=0)
    if options.layers:
        layers = counts(options.layers, "diagnose.hessian.layers")
    else:
        layers = sorted({round(n * (depth - 1) / (PAPER_DEPTH - 1)) for n in PAPER_LAYERS})
    wanted = [word.strip() for word in (options.modules or _last_matrices(job)).split(",")]
    scores = param_scores(scored.terms.eta_sc, scored.projection, scored.grad_sum)
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

    def __init__(
        self, job: DiagnosticJob, name: str, model: PreTrainedModel, slices: Sequence[Slice]
    ) -> None:
        self.job, self.ctx, self.name, self.slices = job, job.ctx, name, slices
        self.model, self.parameters = model, dict(model.named_parameters())
        self.engine = GhostEngine(model, job.ctx.candidates(model))
        self.pool = sample(job.rng("hessian pool"), job.roles["pool"], job.options.pool_rows)
        self.lam = job.scoring.scored.terms.lam_effective
        self.preservation = job.ctx.config.score.preservation if self.lam else "none"
        self.teacher: PreTrainedModel | None = None
        if self.preservation != "none":
            dtype = accumulation_dtype(self.ctx.dtype)
            folder = self.ctx.model_folder
            self.teacher = load_model(folder, dtype, self.ctx.device, "eager", self.ctx.trusted)

    def rows(self) -> list[dict[str, Any]]:
        each = self._examples()  # g_n,B: [N, |B|] for each slice
        sums = blank(self.engine.candidates, self.engine.candidates.dtype)
        ctx = quiet(self.ctx)
        objective = loss_objective(self.model)
        walk(self.engine, self.pool, objective, pass_settings(ctx), ctx.reporter, "G", sums=sums)
        gradient, in_slice, in_model = self._second(each, sums)
        curvature = self.ctx.curvature(self.engine.candidates)
        scale = self.ctx.config.score.curvature_scale
        told = []
        for one in self.slices:
            name, index = one.parameter, one.coordinates
            diagonal = np.zeros(len(index))
            if curvature is not None:
                diagonal = scale * _at(curvature[name], index)
            for reference, products in (("slice", in_slice), ("model", in_model)):
                found = compared(
                    gradient[name],
                    products[name],
                    diagonal,
                    each[name],
                    self.ctx.config.finetune.lr / len(self.pool),
                )
                told.append(
                    {"checkpoint": self.name, "parameter": name, "layer": one.layer}
                    | {"region": one.region, "module": one.module, "reference": reference}
                    | found
                )
        return told

    def _examples(self) -> dict[str, np.ndarray]:
        """g_n of the sampled pool at every slice: [N, |B|] per slice."""
        label = f"gradients of examples at the slices ({self.name})"
        return self._at_slices(self.model, self.pool, label)

    def _at_slices(
        self, model: PreTrainedModel, rows: list[Example], label: str
    ) -> dict[str, np.ndarray]:
        """Gradient of each row's loss at every slice, computed one row at a time."""
        found: dict[str, list[np.ndarray]] = {s.parameter: [] for s in self.slices}
        where = {s.parameter: s.coordinates for s in self.slices}
        every = self.ctx.candidates(model)
        some = Candidates({name: every[name] for name in found}, every.spec)
        with self.job.reporter.track(label, len(rows), "examples") as progress:
            for example in rows:
                batch = _collate(self.ctx, [example], model)
                alone(model, some, batch, lambda n, g: found[n].append(_at(g, where[n])))
                progress.advance(1, tokens=example.num_tokens)
        return {name: np.stack(values) for name, values in found.items()}

    def _second(
        self, each: Mapping[str, np.ndarray], grad_sum: Vector
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
        """(v, H_B G_B, (H G)_B) of every slice."""
        job, roles = self.job, self.job.roles
        totals = _Totals(self, each, grad_sum)
        val = sample(job.rng("hessian validation"), roles["val"], job.options.val_rows)
        self._over(val, lambda b: plain_example_loss(self.model, b) / len(val), "L_new", totals)
        if self.preservation == "cwsd":
            anchors = sample(job.rng("hessian anchors"), roles["anchor"], job.options.val_rows)
            teacher, tau = self.teacher, self.ctx.config.score.tau
            assert teacher is not None
            scale = self.lam / len(anchors)
            self._over(
                anchors,
                lambda b: scale * plain_cwsd(teacher, self.model, b, tau),
                "L_prior",
                totals,
            )
        elif self.preservation != "none":
            self._quadratic(each, grad_sum, totals)
        return totals.gradient, totals.in_slice, totals.in_model

    def _quadratic(self, each: Mapping[str, np.ndarray], grad_sum: Vector, totals: _Totals) -> None:
        """Add the terms of ½ Σ F (θ − θ_old)², whose Hessian is Diag(F): F = 1 for l2, the Fisher
        diagonal for fisher."""
        assert self.teacher is not None
        old, weights = dict(self.teacher.named_parameters()), self._fisher()
        for one in self.slices:
            name, index = one.parameter, one.coordinates
            factor = self.lam * weights[name]
            moved = self.parameters[name].detach() - old[name].detach()
            totals.gradient[name] += factor * _at(moved, index)
            totals.in_slice[name] += factor * each[name].sum(0)
            totals.in_model[name] += factor * _at(grad_sum[name], index)

    def _fisher(self) -> dict[str, np.ndarray]:
        """F at the slices: mean squared gradient of the sampled anchors at θ_old; ones for l2."""
        assert self.teacher is not None
        if self.preservation == "l2":
            return {s.parameter: np.ones(len(s.coordinates)) for s in self.slices}
        job = self.job
        anchors = sample(job.rng("hessian anchors"), job.roles["anchor"], job.options.val_rows)
        found = self._at_slices(self.teacher, anchors, f"Fisher at the slices ({self.name})")
        return {name: (rows**2).mean(0) for name, rows in found.items()}

    def _over(
        self,
        rows: list[Example],
        loss: Callable[[Batch], Tensor],
        what: str,
        totals: _Totals,
    ) -> None:
        """Add the gradients and Hessian-vector products of a loss over rows, in batches."""
        label = f"Hessian-vector products of {what} ({self.name})"
        budget = min(self.ctx.batch_tokens, BATCH_TOKENS)
        with self.job.reporter.track(label, len(rows), "examples") as progress:
            waiting = make_batches(rows, budget)
            while waiting:
                chosen = waiting.pop(0)
                batch = _collate(self.ctx, [rows[i] for i in chosen], self.model)
                try:
                    found = totals.of(loss(batch))
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
                totals.add(found)
                progress.advance(len(chosen))


class _Totals:
    """Sums over batches of gradients and of Hessian-vector products at the slices."""

    def __init__(self, at: _Checkpoint, each: Mapping[str, np.ndarray], grad_sum: Vector) -> None:
        self.slices, self.grad_sum = at.slices, grad_sum
        self.parameters: dict[str, nn.Parameter] = at.engine.candidates
        self.device, self.dtype = at.engine.device, at.engine.candidates.dtype
        self.own = {name: torch.from_numpy(rows.sum(0)) for name, rows in each.items()}
        self.gradient, self.in_slice, self.in_model = (
            {s.parameter: np.zeros(len(s.coordinates)) for s in at.slices} for _ in range(3)
        )

    def of(self, loss: Tensor) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(∇loss, its Hessian times G_B, its Hessian times G) of every slice."""
        names = list(self.parameters)
        firsts = torch.autograd.grad(loss, list(self.parameters.values()), create_graph=True)
        first = dict(zip(names, firsts, strict=True))
        blocks = [self.parameters[s.parameter] for s in self.slices]
        # ∇⟨∇loss, G⟩ = H G with the G of all candidates, for all slices at once
        along = torch.stack(
            [(first[n] * self.grad_sum[n].to(self.device)).sum() for n in names]
        ).sum()
        second = torch.autograd.grad(along, blocks, retain_graph=True)
        found = {}
        for one, whole, block in zip(self.slices, second, blocks, strict=True):
            name, index = one.parameter, one.coordinates
            # H_B G_B: the same with G restricted to the slice, which needs one backward per slice
            flat = first[name].reshape(-1)[index.to(self.device)]
            along = (flat * self.own[name].to(self.device, self.dtype)).sum()
            (part,) = torch.autograd.grad(along, block, retain_graph=True)
            found[name] = _at(first[name], index), _at(part, index), _at(whole, index)
        return found

    def add(self, found: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """Add the result of a batch."""
        for name, values in found.items():
            totals = (self.gradient, self.in_slice, self.in_model)
            for total, value in zip(totals, values, strict=True):
                total[name] += value


def compared(
    gradient: np.ndarray,
    full: np.ndarray,
    diagonal: np.ndarray,
    each: np.ndarray,
    eta_sc: float,
) -> dict[str, Any]:
    """Rank agreement of example and entry scores, and of the second-order terms.

    `gradient` is v, `full` is H G, `diagonal` is ĉ, `each` are the example gradients [N, |B|].
    """
    total = each.sum(0)
    second = {"full": full, "diag": diagonal * total}
    u = {kind: gradient - 0.5 * eta_sc * term for kind, term in second.items()}
    size, of_full, of_diag = (
        float(np.linalg.norm(x)) for x in (gradient, second["full"], second["diag"])
    )
    return {
        "data": _ranks(each @ u["full"], each @ u["diag"]),
        "param": _ranks(u["full"] * total, u["diag"] * total),
        "second": {
            "rho": spearman(second["full"], second["diag"]),
            "cosine": cosine(second["full"], second["diag"]),
            "norm_ratio": of_diag / of_full if of_full > 0 else None,
            "share_full": 0.5 * eta_sc * of_full / size if size > 0 else None,
            "share_diag": 0.5 * eta_sc * of_diag / size if size > 0 else None,
        },
    }


def _ranks(full: np.ndarray, diag: np.ndarray) -> dict[str, float | None]:
    return {
        "rho": spearman(full, diag),
        "pair": pair_agreement(full, diag),
        "top": top_overlap(full, diag, TOP),
    }


def _means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over all slices of a checkpoint, and over each region and module in it."""
    keys: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        head = (row["checkpoint"], row["reference"])
        keys.setdefault((*head, "all", "all"), []).append(row)
        keys.setdefault((*head, row["region"], row["module"]), []).append(row)
    told = []
    for (checkpoint, reference, where, module), mine in keys.items():
        entry: dict[str, Any] = {"checkpoint": checkpoint, "reference": reference}
        entry |= {"region": where, "module": module, "slices": len(mine)}
        for part in ("data", "param", "second"):
            entry[part] = {key: mean_of([r[part][key] for r in mine]) for key in mine[0][part]}
        told.append(entry)
    return told


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


def _at(block: Tensor, index: Tensor) -> np.ndarray:
    """The entries at these flat indices, in fp64."""
    flat = block.detach().reshape(-1)
    return flat[index.to(flat.device)].double().cpu().numpy()


def _collate(ctx: RunContext, rows: list[Example], model: PreTrainedModel) -> Batch:
    return collate(rows, ctx.pad_id, ctx.config.data.padding_side, model.device)
