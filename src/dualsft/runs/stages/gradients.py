"""Gradients at θ̄: Algorithm 1 lines 3 to 6 (G, v_new, v_prior).

v_new is the gradient of the mean validation loss, G the sum over the scoring pool. In one-pass mode
(docs/algorithm.md, "One pass instead of two") the pool pass also computes f_n = ⟨U₀, g_n⟩ for a
direction U₀ known in advance, and the inner sums of the bound on the error of U₀. DualSFT-Param
needs only G. The calibrated form needs G and the sketches of val and pool.
Each vector is written as soon as it is computed and read back on access, so during the pool pass
only G and the direction are in memory, and the teacher of v_prior is freed. With calibrated example
scores and entries that are not selected by score nothing reads these vectors: the walks then
collect sketches only, in the last blocks that `score.sketch_layers` names. Reads 1_split and
2_warmup; writes grad_sum, val_grad, prior_grad (safetensors) if needed, pool.parquet and, in the
calibrated form, sketches.safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dualsft.algorithm.calibration import sketch_with
from dualsft.algorithm.gradients import (
    pool_gradient,
    prior_gradient,
    sketches_only,
    validation_gradient,
)
from dualsft.algorithm.projection import projection_terms
from dualsft.algorithm.scores import TOLERANCE, check_fused_loss
from dualsft.config.methods import AXES
from dualsft.data.examples import Example
from dualsft.distributed.world import world
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.sketch import Sketch, SketchRows
from dualsft.engine.walk import PassResult, PassSettings
from dualsft.runs.context import RunContext, Settings, pass_settings
from dualsft.runs.preflight import reading
from dualsft.storage.tensor_files import TensorFile
from dualsft.storage.vectors import LazyVector, Vector, save_tensors
from dualsft.system.paths import RunPath
from dualsft.system.usage import give_back

SKETCHES = "sketches.safetensors"
CPU = torch.device("cpu")
DIRECTION = (
    "score.lam",
    "score.lam_relative",
    "score.curvature",
    "score.curvature_scale",
    "score.step",
    "finetune.lr",
)
"""Settings of u and U₀."""


def settings(ctx: RunContext, product: bool | None = None, vectors: bool | None = None) -> Settings:
    chosen = ctx.compute_settings() | precision_settings(ctx)
    product = one_pass_wanted(ctx) if product is None else product
    chosen["per-example product in the pool pass"] = product
    if sketches_wanted(ctx):
        chosen |= ctx.pick("score.form", "score.sketch_dim", "seed")
        if some_layers(ctx):
            chosen |= ctx.pick("score.sketch_layers")
    if not (vectors_wanted(ctx) if vectors is None else vectors):
        return chosen | {"G, v_new, v_prior": False}
    chosen |= ctx.pick("score.preservation")
    if ctx.config.score.preservation == "cwsd":
        chosen |= ctx.pick("score.tau")
    return chosen | (ctx.pick(*DIRECTION) if product else {})


def richer_settings(ctx: RunContext) -> Settings | None:
    """If only G is needed: the settings of a pool pass that computes G and the product. If only
    sketches are needed: those of one that computes G too."""
    if not vectors_wanted(ctx):
        return settings(ctx, vectors=True)
    needs_more = one_pass_wanted(ctx) or sketches_wanted(ctx)
    return None if needs_more else settings(ctx, product=True)


def precision_settings(ctx: RunContext) -> Settings:
    """Which walks use fp32 weights; relevant only for half-precision models."""
    return ctx.pick("score.precision") if ctx.dtype in HALF_DTYPES else {}


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Write the vectors and what the walks collected per example to `part`."""
    roles = ctx.roles()
    model = ctx.theta_bar()
    engine = GhostEngine(model, ctx.candidates(model))
    passes = pass_settings(ctx)
    check_fused_loss(model, roles["val"][0], passes, TOLERANCE[ctx.dtype])
    sketch = sketch_for(ctx, engine)
    if sketch is not None and (others := len(engine.candidates) - len(engine.linear_weights)):
        ctx.reporter.say(f"sketches leave out {others:,} candidates that are not linear weights")
    val, pool, direction, prior_loss = roles["val"], roles["pool"], None, None
    if vectors_wanted(ctx):
        mean, validation = validation_gradient(engine, val, passes, ctx.reporter, sketch)
        val_grad = _stored(ctx, mean, part / "val_grad.safetensors")
        del mean
        prior, prior_loss = prior_of(ctx, engine, roles["anchor"], passes)
        prior_grad = _stored(ctx, prior, part / "prior_grad.safetensors")
        del prior
        give_back(ctx.device)  # free the teacher and the buffers of the two walks
        if one_pass_wanted(ctx):
            curvature, lr = ctx.curvature(engine.candidates), ctx.base_lr()
            score = ctx.config.score
            terms = projection_terms(score, lr, len(pool), val_grad, prior_grad, curvature)
            direction = terms.estimate()
        grad_sum, result = pool_gradient(engine, pool, passes, ctx.reporter, direction, sketch)
        grad_sum.save(part / "grad_sum.safetensors", n_sc=len(pool))
    else:
        assert sketch is not None
        validation = sketches_only(engine, val, passes, ctx.reporter, "validation", sketch)
        result = sketches_only(engine, pool, passes, ctx.reporter, "pool", sketch)
    columns = None if direction is None else list(engine.columns)
    _write_pool(part / "pool.parquet", pool, result, columns)
    if sketch is not None:
        found = {"pool": result.sketches, "val": validation.sketches}
        _write_sketches(part / SKETCHES, sketch, found, sums=not vectors_wanted(ctx))
    return {
        "n_sc": len(pool),
        "validation_loss": float(validation.values.mean()),
        "preservation_loss": prior_loss,
        "pool_loss": float(result.values.mean()),
        "candidates": engine.candidates.num_entries,
        "tokens": {role: sum(e.num_tokens for e in rows) for role, rows in roles.items()},
    }


def _stored(ctx: RunContext, vector: Vector, path: RunPath) -> Vector:
    """Write a vector and return it as a lazy vector that reads from the file."""
    vector.save(path)
    path = world().broadcast(path)  # broadcast: only rank 0's file is kept
    if ctx.device.type == "cuda":
        ctx.pieces.forget()  # the saved progress of the walk still references its memory
    return LazyVector.open(path, list(vector), ctx.device)


def prior_of(
    ctx: RunContext, engine: GhostEngine, anchors: list[Example], passes: PassSettings
) -> tuple[Vector, float]:
    """(v_prior, preservation loss) under the run's settings."""
    kind, tau = ctx.config.score.preservation, ctx.config.score.tau
    load = ctx.theta_old if ctx.warmed_up else None
    return prior_gradient(kind, engine, load, anchors, tau, passes, ctx.reporter)


def one_pass_wanted(ctx: RunContext) -> bool:
    """Whether the pool pass also computes the per-example product."""
    score = ctx.config.score
    literal = score.form == "literal" and score.mode == "one_pass"
    return literal and ctx.methods.scored("data")


def sketches_wanted(ctx: RunContext) -> bool:
    """Whether the passes over val and pool also sketch each gradient."""
    return ctx.config.score.form == "calibrated" and ctx.methods.scored("data")


def vectors_wanted(ctx: RunContext) -> bool:
    """Whether anything reads G, v_new and v_prior: literal example scores, a method on another axis
    that selects by score, or files that `score.keep` asks for."""
    others = any(ctx.methods.scored(axis) for axis in AXES if axis != "data")
    return not sketches_wanted(ctx) or others or ctx.config.score.keep != "gradients"


def some_layers(ctx: RunContext) -> bool:
    """Whether sketches cover some of the blocks only (1 is the last block, 1.0 all of them)."""
    return repr(ctx.config.score.sketch_layers) != "1.0"


def vectors_now(ctx: RunContext, engine: GhostEngine) -> tuple[Vector, Vector, Vector]:
    """(v_new, v_prior, G), for a run whose gradients stage did not need them; computed once."""
    if ctx.vectors is not None:
        return ctx.vectors
    ctx.reporter.say(
        "the run needed no G, v_new and v_prior; computing them (score.keep saves them)"
    )
    roles, passes = ctx.roles(), pass_settings(ctx)
    val_grad = validation_gradient(engine, roles["val"], passes, ctx.reporter)[0].held()
    prior_grad = prior_of(ctx, engine, roles["anchor"], passes)[0].held()
    grad_sum = pool_gradient(engine, roles["pool"], passes, ctx.reporter)[0]
    ctx.vectors = (val_grad, prior_grad, grad_sum)
    return ctx.vectors


def has_vectors(ctx: RunContext) -> bool:
    """Whether the finished stage holds G, v_new and v_prior, needed or not."""
    return (ctx.folder("gradients") / "grad_sum.safetensors").is_file()


def sketch_bytes(dim: int, counts: Mapping[str, int]) -> int:
    """Bytes of the sketches of val and pool."""
    return 2 * dim * (counts["val"] + counts["pool"])


def disk_bytes(ctx: RunContext) -> int:
    """Bytes that this stage writes."""
    dim = ctx.config.score.sketch_dim
    sketches = sketch_bytes(dim, ctx.counts) if sketches_wanted(ctx) else 0
    return (3 * ctx.vector_bytes if vectors_wanted(ctx) else 0) + sketches


def sketch_for(ctx: RunContext, engine: GhostEngine) -> Sketch | None:
    """The sketch of the calibrated form; None in the literal form."""
    if not sketches_wanted(ctx):
        return None
    score = ctx.config.score
    seed, dim, layers = ctx.config.seed, score.sketch_dim, score.sketch_layers
    return sketch_with(engine, dim, seed, score.candidates, layers)


def _write_sketches(
    path: RunPath, sketch: Sketch, rows: Mapping[str, SketchRows | None], sums: bool
) -> None:
    """Write rows and lengths; with `sums` also what the walk added up, for the check without G."""
    tensors: dict[str, Tensor] = {}
    for role, found in rows.items():
        assert found is not None
        tensors |= {role: torch.from_numpy(found.stored)}
        tensors |= {f"{role}_norms": torch.from_numpy(found.norms)}
        tensors |= {f"{role}_sum": torch.from_numpy(found.added)} if sums else {}
    save_tensors(path, tensors, {"dim": str(sketch.dim), "seed": str(sketch.seed)})


def read_sketches(path: RunPath, counts: Mapping[str, int], dim: int) -> dict[str, SketchRows]:
    """The sketches of val and pool; raises unless they have the form that this stage writes."""
    found: dict[str, SketchRows] = {}
    with reading(path):
        tensors = TensorFile(path).tensors()
        for role in ("val", "pool"):
            stored, norms = tensors[role].numpy(), tensors[f"{role}_norms"].numpy()
            rows = SketchRows(0, dim, exact=stored.dtype == np.float64)
            if (stored.dtype, norms.dtype) != (rows.stored.dtype, rows.norms.dtype):
                raise ValueError(f"{role} is {stored.dtype} with {norms.dtype} lengths")
            if stored.shape != (counts[role], dim) or norms.shape != (counts[role],):
                raise ValueError(f"{role} has shape {stored.shape}, not {(counts[role], dim)}")
            rows.count, rows.stored, rows.norms = counts[role], stored, norms
            lengths = [torch.linalg.vector_norm(b, dim=1) for _, b in rows.blocks(CPU)]
            if not np.isfinite(norms).all() or (norms < 0).any():
                raise ValueError(f"{role}_norms has entries that are not lengths")
            length = torch.cat(lengths).numpy()
            if not (length < 1.01).all() or (length[norms > 0] < 0.99).any():  # also false for nan
                raise ValueError(f"{role} has rows that are not of unit length")
            if f"{role}_sum" in tensors:
                rows.added = tensors[f"{role}_sum"].numpy()
                if rows.added.shape != (dim,) or rows.added.dtype != np.float64:
                    raise ValueError(f"{role}_sum is not {dim} float64 numbers")
            found[role] = rows
    return found


def _write_pool(
    path: RunPath, pool: list[Example], result: PassResult, columns: list[str] | None
) -> None:
    """Write id, loss, response_tokens; given columns, also f and the inner sums (one pass)."""
    table: dict[str, Any] = {
        "id": [e.id for e in pool],
        "loss": result.values,
        "response_tokens": pa.array([e.num_response_tokens for e in pool], pa.int32()),
    }
    if columns is not None:
        table["f"] = result.dots
        flat = pa.array(result.inner_sums.reshape(-1))
        table["inner_sums"] = pa.FixedSizeListArray.from_arrays(flat, len(columns))
    metadata = {} if columns is None else {"parameters": "\n".join(columns)}
    path.write_table(pa.table(table).replace_schema_metadata(metadata))


def read_pool(path: RunPath) -> dict[str, np.ndarray]:
    """The columns of pool.parquet as arrays; `inner_sums` is [N, L]."""
    with reading(path):
        table = path.read_table()
        for field in table.schema:
            plain = pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
            if table[field.name].null_count or not (plain or field.name in ("id", "inner_sums")):
                raise ValueError(f"{field.name} is not a column of numbers")
        columns = {
            name: np.asarray(table[name].to_pylist() if name == "id" else table[name].to_numpy())
            for name in table.column_names
            if name != "inner_sums"
        }
        if "inner_sums" in table.column_names:
            sums = table["inner_sums"].combine_chunks()
            columns["inner_sums"] = sums.flatten().to_numpy().reshape(len(table), -1)
        return columns
