"""Files of a selection: mask and subset, written by selection and re-selection.

Algorithm 1 lines 9 to 11. A mask is stored as sorted flat indices by parameter name, a subset as
the lines of the source file, byte for byte. Writes the files of 5_selection and of its rounds;
fine-tuning reads them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dualsft.algorithm.topk import TopK
from dualsft.data.examples import Example
from dualsft.data.rows import source_lines
from dualsft.distributed.world import world
from dualsft.model.load import locate
from dualsft.runs.context import RunContext
from dualsft.storage.tensor_files import TensorFile
from dualsft.storage.vectors import of_all
from dualsft.system.paths import Place, RunPath


def write_mask(
    ctx: RunContext, folder: RunPath, indices: Mapping[str, Tensor], denominator: int
) -> dict[str, Any]:
    """Write mask.safetensors; returns the number of selected entries per layer and module."""
    every = of_all(own_part(indices, ctx.parameter_shapes))
    every.write(folder / "mask.safetensors", {})
    counts = {name: form.num_entries for name, form in every.forms.items()}
    layers: dict[str, int] = defaultdict(int)
    modules: dict[str, int] = defaultdict(int)
    for name, entries in counts.items():
        layer, module = locate(name)
        layers["other" if layer is None else str(layer)] += entries
        modules[module] += entries
    count, of = sum(counts.values()), ctx.config.method.denominator
    share = count / denominator
    named = {"candidates": "candidates", "all": "parameters", "eligible": "eligible entries"}[of]
    ctx.reporter.say(f"parameters: {count:,} of {denominator:,} {named} ({100 * share:.2f} %)")
    return {
        "k": count,
        "denominator": denominator,
        "denominator_of": of,
        "share": share,
        "per_layer": dict(layers),
        "per_module": dict(modules),
    }


def describe_entries(ctx: RunContext, mask: TopK) -> dict[str, Any]:
    """Threshold, boundary gap and number of nonpositive scores of a top-k; warns of the last."""
    if mask.num_nonpositive:
        ctx.reporter.warn(
            f"{mask.num_nonpositive:,} of the {mask.num_selected:,} selected entries have a score "
            "≤ 0: the budget exceeds what the scores recommend (lower select.param_budget)",
            code="nonpositive_scores",
        )
    gap = None if mask.next_score is None else mask.threshold - mask.next_score
    return {
        "threshold": mask.threshold,
        "param_boundary_gap": gap,
        "num_nonpositive_params": mask.num_nonpositive,
    }


def write_baseline_scores(path: RunPath, pool: list[Example], scores: np.ndarray) -> None:
    """Write id and score of every example ranked by a data method; larger is better."""
    columns = {"id": [e.id for e in pool], "score": np.asarray(scores, dtype=np.float64)}
    path.write_table(pa.table(columns))


def write_selected(ctx: RunContext, folder: RunPath, chosen: list[Example]) -> None:
    """Write selected.jsonl and ids.json, in source order.

    JSON lines are copied byte for byte; rows of other formats are written as compact JSON.
    """
    rows = sorted(chosen, key=lambda e: e.index)
    data = ctx.config.data
    lines = source_lines(ctx.data_path(data.path), {e.index: e.id for e in rows}, data)
    with (folder / "selected.jsonl").open("wb") as out:
        for row in rows:
            out.write(lines[row.index] + b"\n")
    (folder / "ids.json").write_text(json.dumps([row.id for row in rows]) + "\n")


def read_mask(
    folder: Place, shapes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """Selected flat indices by parameter name; parameters without selected entries are omitted.

    Given the parameters' shapes, each process of a sharded world keeps the indices in its rows.
    """
    found: dict[str, Tensor] = {}
    for name, index in TensorFile(folder / "mask.safetensors").tensors().items():
        if index.numel():
            found[name] = index if shapes is None else own_part({name: index}, shapes)[name]
    return found


def own_part(
    indices: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """The indices in this process's rows of each parameter."""
    found = {}
    for name, index in indices.items():
        borders = torch.tensor(world().held(shapes[name])).to(index)
        first, last = torch.searchsorted(index, borders).tolist()
        found[name] = index[first:last]
    return found
