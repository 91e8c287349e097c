"""What a selection leaves on disk, and the parameter scores it is made from.

s_θ = u ⊙ G (Algorithm 1 line 8) is formed chunk by chunk for the radix passes. A mask is written
as sorted flat indices under the parameters' names, a subset as the source's own lines, byte for
byte: the files of 5_selection and of each of its rounds, for the selection, re-selection and
fine-tuning.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dualsft.context import RunContext
from dualsft.data import Example, source_lines
from dualsft.model import locate
from dualsft.stages.projection import param_score_chunk
from dualsft.topk import ScoreSource, TopK
from dualsft.vectors import CHUNK, ParamVector, save_tensors


def product_source(left: ParamVector, right: ParamVector, eta_sc: float) -> ScoreSource:
    """eta_sc · left ⊙ right in chunks, recomputed at every reading."""

    def read() -> Iterator[tuple[str, int, Tensor]]:
        for name, block in left.items():
            a, b = block.view(-1), right[name].view(-1)
            for start in range(0, max(1, a.numel()), CHUNK):
                stop = start + CHUNK
                yield name, start, param_score_chunk(eta_sc, a[start:stop], b[start:stop])

    return read


def write_mask(ctx: RunContext, folder: Path, mask: TopK) -> dict[str, Any]:
    """mask.safetensors, and the numbers that say what was selected where."""
    save_tensors(folder / "mask.safetensors", mask.indices, {})
    layers: dict[str, int] = defaultdict(int)
    modules: dict[str, int] = defaultdict(int)
    for name, index in mask.indices.items():
        layer, module = locate(name)
        layers["other" if layer is None else str(layer)] += index.numel()
        modules[module] += index.numel()
    if mask.num_nonpositive:
        ctx.reporter.warn(
            f"{mask.num_nonpositive:,} of the {mask.num_selected:,} selected entries have a score "
            "≤ 0: the budget exceeds what the scores recommend (lower select.param_budget)"
        )
    share = mask.num_selected / mask.num_total
    ctx.reporter.say(
        f"parameters: {mask.num_selected:,} of {mask.num_total:,} candidates ({100 * share:.2f} %)"
    )
    gap = None if mask.next_score is None else mask.threshold - mask.next_score
    return {
        "k": mask.num_selected,
        "denominator": mask.num_total,
        "share": share,
        "threshold": mask.threshold,
        "param_boundary_gap": gap,
        "num_nonpositive_params": mask.num_nonpositive,
        "per_layer": dict(layers),
        "per_module": dict(modules),
    }


def write_selected(ctx: RunContext, folder: Path, chosen: list[Example]) -> None:
    """selected.jsonl: the chosen rows in source order, JSON lines byte for byte as they came, rows
    of another kind as compact JSON; ids.json."""
    rows = sorted(chosen, key=lambda e: e.index)
    data = ctx.config.data
    lines = source_lines(ctx.data_path(data.path), {e.index: e.id for e in rows}, data)
    with (folder / "selected.jsonl").open("wb") as out:
        for row in rows:
            out.write(lines[row.index] + b"\n")
    (folder / "ids.json").write_text(json.dumps([row.id for row in rows]) + "\n")


def read_mask(folder: Path) -> dict[str, Tensor]:
    """The selected flat indices by parameter name; parameters without any are left out."""
    stored = load_file(str(folder / "mask.safetensors"))
    return {name: index for name, index in stored.items() if index.numel()}
