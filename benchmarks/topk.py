"""Exact top-k of parameter scores: u ⊙ G read chunk by chunk, against torch.topk and torch.sort.

Algorithm 1 line 9. The scores are never held in full: the source multiplies two fp32 vectors at
every reading, as the selection does. The large size is the number of candidates of a 3B model on a
GPU, and up to a third of the free memory on a CPU. torch.topk needs the full product, so it is
compared at a smaller size, where both must select the same entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Contender, Meter, Section, measure
from benchmarks.options import Options
from dualsft.algorithm.selection import product_source
from dualsft.algorithm.topk import topk_signed
from dualsft.errors import RunError
from dualsft.storage.vectors import ParamVector
from dualsft.system.usage import free_memory

SHARE = 0.05
BLOCK = 3072 * 8192  # entries of a large weight of a 3B model
LARGEST = 2_818_572_288  # candidate entries of the Llama-3.2-3B shape
COMMON = {"cpu": 1 << 26, "cuda": 1 << 28}
LIMITS = {"cpu": 60.0, "cuda": 2.0}
OURS, TOPK, SORT = "topk_signed", "torch.topk", "torch.sort"


def run(options: Options) -> Section:
    """All three at the common size, then only ours at the large size."""
    meter = Meter(options.device)
    common = 1 << 18 if options.quick else COMMON[options.device.type]
    large = 1 << 20 if options.quick else _large(options)
    _check_same(options, 1 << 18)
    contenders: dict[str, Contender] = {
        f"{name}, {common:,} scores": _contender(options, common, choose)
        for name, choose in ((TOPK, _torch_topk), (SORT, _torch_sort), (OURS, _ours))
    }
    contenders[f"{OURS}, {large:,} scores"] = _contender(options, large, _ours)
    found, skipped = measure(meter, contenders, rounds=options.rounds, rehearse=contenders)
    section = Section("top-k", {"share": SHARE, "source": "u x G, fp32, read in chunks"})
    section.skipped = skipped
    for name, measured in found.items():
        count = int(name.split(", ")[1].removesuffix(" scores").replace(",", ""))
        figures = {"ns a score": 1e9 * measured.fastest / count}
        section.add(name, measured, figures=figures, num_scores=count)
    for row in section.rows.values():
        row["ratios"] = _per_score(section.rows, row, common)
    seconds = section.rows[f"{OURS}, {large:,} scores"]["seconds"] * LARGEST / large
    limit = LIMITS[options.device.type]
    section.goal(f"seconds for {LARGEST:,} scores (measured at {large:,})", seconds, limit)
    return section


def _per_score(rows: dict[str, Any], row: dict[str, Any], common: int) -> dict[str, float]:
    """Ratios of time per score to torch's, across sizes."""
    ratios = {}
    for name in (TOPK, SORT):
        base = rows.get(f"{name}, {common:,} scores")
        if base is not None:
            ratios[f"time a score / {name}"] = (row["seconds"] / row["num_scores"]) / (
                base["seconds"] / base["num_scores"]
            )
    return ratios


def _large(options: Options) -> int:
    if options.on_gpu:
        return LARGEST
    return min(LARGEST, free_memory(options.device) // 24)


def vectors(options: Options, count: int) -> tuple[ParamVector, ParamVector]:
    """Two random vectors of `count` entries, in blocks of the size of a weight."""
    torch.manual_seed(0)
    sizes = [min(BLOCK, count - start) for start in range(0, count, BLOCK)]
    made = [
        {f"block.{i}": torch.randn(size, device=options.device) for i, size in enumerate(sizes)}
        for _ in range(2)
    ]
    return ParamVector(made[0]), ParamVector(made[1])


Choose = Callable[[ParamVector, ParamVector, int], object]


def _contender(options: Options, count: int, choose: Choose) -> Contender:
    @contextmanager
    def contender() -> Iterator[Callable[[], object]]:
        left, right = vectors(options, count)
        yield lambda: choose(left, right, int(SHARE * count))

    return contender


def _ours(left: ParamVector, right: ParamVector, k: int) -> dict[str, Tensor]:
    return topk_signed(product_source(left, right, 1.0), k).indices


def _product(left: ParamVector, right: ParamVector) -> Tensor:
    return torch.cat([left[name] * right[name] for name in left])


def _torch_topk(left: ParamVector, right: ParamVector, k: int) -> Tensor:
    return torch.topk(_product(left, right), k, sorted=False).indices


def _torch_sort(left: ParamVector, right: ParamVector, k: int) -> Tensor:
    return torch.sort(_product(left, right), descending=True).indices[:k]


def _check_same(options: Options, count: int) -> None:
    """Raise unless ours and torch select the same entries (ties are rare in random products)."""
    left, right = vectors(options, count)
    k = int(SHARE * count)
    theirs = _product(left, right).sort(descending=True).values[k - 1]
    ours = topk_signed(product_source(left, right, 1.0), k)
    if ours.num_selected != k or ours.threshold != float(theirs):
        raise RunError(f"top-k: our threshold is {ours.threshold}, torch's {float(theirs)}")
