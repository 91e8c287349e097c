"""A delta as a PEFT adapter: it loads, merges, unloads and switches like any other.

SHiRA, PEFT's sparse adapter, wants exactly r · (in + out) entries in every layer, with one r. A
mask chosen over all layers has another count in each, so entries are added whose change is zero.
Two kinds of adapter follow:

- `shira`: one r, the largest that a layer needs. PEFT loads it without this package. Where a few
  layers hold much of the mask, most of the file is zeros.
- `sparse`: an r for each layer, and indices as the gaps between them. Small, but to load it, PEFT
  must know the kind: `import dualsft.integrations.peft` registers it.

Both hold the change of each entry, so base + adapter is the merged model to rounding. Reads a base
model and a delta file; writes adapter_config.json, adapter_model.safetensors and README.md. Not
part of Algorithm 1.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dualsft.errors import ConfigError
from dualsft.model.delta import (
    Delta,
    check_target,
    finite,
    load_for,
    moved_entries,
    written_whole,
)
from dualsft.model.resolve import is_hub_id
from dualsft.storage.gaps import from_gaps, to_gaps
from dualsft.storage.manifest import atomic_write_text
from dualsft.storage.vectors import save_tensors

try:
    import peft
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from peft.tuners.shira import ShiraConfig, ShiraModel
except ImportError as problem:
    raise ConfigError(
        f"adapters need peft 0.17 or later ({problem}); pip install 'dualsft[peft]'"
    ) from problem

SPARSE = "DUALSFT_SPARSE"
WEIGHTS = "adapter_model.safetensors"
Kind = Literal["shira", "sparse"]


@dataclass
class SparseConfig(ShiraConfig):
    """`ShiraConfig` with an r for each layer."""

    rank_pattern: dict[str, int] = field(default_factory=dict)
    """r of a layer, by the name of its module; `r` where it is missing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = SPARSE


class SparseModel(ShiraModel):
    """`ShiraModel` with an r for each layer, and with gaps in place of indices in files."""

    def _create_and_replace(
        self, shira_config: SparseConfig, adapter_name: str, *place: Any, **more: Any
    ) -> None:
        own = copy.copy(shira_config)
        own.r = own.rank_pattern.get(more["current_key"], own.r)
        super()._create_and_replace(own, adapter_name, *place, **more)

    @classmethod
    def _get_adapter_state_dict(cls, *given: Any, **more: Any) -> dict[str, Tensor]:
        found = super()._get_adapter_state_dict(*given, **more)
        model = given[0] if given else more["model"]
        for name, layer in _layers(model).items():
            for key in [k for k in found if k.startswith(f"{name}.shira_indices")]:
                rows, columns = found.pop(key).long()
                gap_key = f"{name}.shira_gaps{key.removeprefix(f'{name}.shira_indices')}"
                found[gap_key] = to_gaps(rows * layer.in_features + columns)
        return found

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        for name, layer in _layers(model).items():
            gaps = state_dict.pop(f"{name}.shira_gaps", None)
            if gaps is not None:
                shape = (layer.out_features, layer.in_features)
                state_dict[f"{name}.shira_indices"] = _places(from_gaps(gaps), shape)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


def _layers(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if hasattr(m, "shira_indices")}


def _places(flat: Tensor, layer_shape: Sequence[int]) -> Tensor:
    """(row, column) of flat indices, checked against the layer."""
    rows, columns = layer_shape
    if len(flat) and int(flat[-1]) >= rows * columns:
        raise ConfigError(
            f"the adapter has an entry {int(flat[-1]):,} of a layer with {rows * columns:,}; load "
            "it on the base model that it was made from"
        )
    dtype = torch.int16 if max(layer_shape) < 1 << 15 else torch.int32
    return torch.stack([flat // columns, flat % columns]).to(dtype)


_TABLES: list[tuple[dict[Any, Any], Any]] = [
    (peft.PEFT_TYPE_TO_CONFIG_MAPPING, SparseConfig),
    (peft.PEFT_TYPE_TO_TUNER_MAPPING, SparseModel),
    (PEFT_TYPE_TO_PREFIX_MAPPING, SparseModel.prefix),
]
for _table, _entry in _TABLES:  # `peft.utils.register_peft_method` takes only PEFT's own names
    _table[SPARSE] = _entry


@dataclass(frozen=True)
class Adapter:
    """What `write_adapter` wrote: entries of the delta, entries in the file, its r, its bytes."""

    num_entries: int
    num_stored: int
    r: int
    num_bytes: int


def write_adapter(base: str, path: Path, out: Path, kind: Kind = "shira") -> Adapter:
    """Write the delta in the file `path` as an adapter of `base`, in a new folder."""
    if kind not in get_args(Kind):
        raise ConfigError(f"--kind: {kind!r} is not allowed; give {' or '.join(get_args(Kind))}")
    check_target(out)
    _, model, (delta,) = load_for(base, [path])
    moved, changes = moved_entries(model, delta)
    changes = finite({name: change.float() for name, change in changes.items()})
    layers = _linear_layers(model, moved, path)
    ranks = _ranks(moved, layers, kind)
    tensors: dict[str, Tensor] = {}
    num_stored = 0
    for name, layer in layers.items():
        shape = layer.weight.shape
        count = ranks[name] * sum(shape)
        index, change = _filled(moved.indices[name], changes[name], count, shape.numel())
        key = f"base_model.model.{_module(name)}.shira"
        sparse = {f"{key}_gaps": to_gaps(index)} if kind == "sparse" else {}
        tensors |= {
            f"{key}_weight": change,
            **(sparse or {f"{key}_indices": _places(index, shape)}),
        }
        num_stored += count
    config = _config(base, {_module(name): r for name, r in ranks.items()}, kind)
    with written_whole(out) as part:
        config.save_pretrained(str(part))
        save_tensors(part / WEIGHTS, tensors, {})
        atomic_write_text(part / "README.md", _readme(config, kind, delta.base_hash))
    return Adapter(moved.num_entries, num_stored, config.r, (out / WEIGHTS).stat().st_size)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _ranks(moved: Delta, layers: Mapping[str, nn.Linear], kind: Kind) -> dict[str, int]:
    """r of each layer: so that r · (in + out) entries hold its own."""
    ranks = {n: -(-len(moved.indices[n]) // sum(p.weight.shape)) for n, p in layers.items()}
    if kind == "shira":
        ranks = dict.fromkeys(ranks, max(ranks.values(), default=0))
    if problems := [
        f"{name} needs r={ranks[name]}: {ranks[name] * sum(layer.weight.shape):,} entries, more "
        f"than its {layer.weight.numel():,}"
        for name, layer in layers.items()
        if ranks[name] * sum(layer.weight.shape) > layer.weight.numel()
    ]:
        other = "--kind sparse or " if kind == "shira" else ""
        raise ConfigError([*problems, f"use {other}`dualsft export merge`"])
    return ranks


def _config(base: str, ranks: dict[str, int], kind: Kind) -> ShiraConfig:
    common: dict[str, Any] = {
        "r": max(ranks.values(), default=0),
        "mask_type": "delta",  # no mask is drawn on loading: the file has the indices
        "base_model_name_or_path": base if is_hub_id(base) else Path(base).name,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    sparse = kind == "sparse"
    config = SparseConfig(**common, rank_pattern=ranks) if sparse else ShiraConfig(**common)
    config.target_modules = sorted(ranks)  # given above, it would become a set, in any order
    return config


def _linear_layers(model: nn.Module, moved: Delta, path: Path) -> dict[str, nn.Linear]:
    """The layer of each changed parameter; refuses what is not the weight of one nn.Linear."""
    layers: dict[str, nn.Linear] = {}
    problems = []
    every = [p for _, p in model.named_parameters(remove_duplicate=False)]
    for name in moved.indices:
        module_name, _, own = name.rpartition(".")
        module = model.get_submodule(module_name)
        if not isinstance(module, nn.Linear) or own != "weight":
            problems.append(f"{path}: {name} is not the weight of an nn.Linear")
        elif sum(p is module.weight for p in every) > 1:
            problems.append(f"{path}: {name} is the weight of several layers")
        else:
            layers[name] = module
    if problems:
        cure = "PEFT's sparse adapters hold nothing else: use `dualsft export merge`"
        raise ConfigError([*problems, cure])
    return layers


def _filled(index: Tensor, change: Tensor, count: int, numel: int) -> tuple[Tensor, Tensor]:
    """Sorted indices and fp32 changes of `count` entries: the given ones, and others unchanged."""
    free = torch.ones(numel, dtype=torch.bool)
    free[index] = False
    others = free.nonzero().squeeze(-1)[: count - len(index)]
    together, order = torch.cat([index, others]).sort()
    return together, torch.cat([change, torch.zeros(len(others))])[order]


def _readme(config: ShiraConfig, kind: Kind, base_hash: str) -> str:
    register = "import dualsft.integrations.peft  # PEFT learns this kind of adapter\n"
    return f"""---
library_name: peft
base_model: {json.dumps(config.base_model_name_or_path)}
tags: [dualsft]
---

A sparse adapter of `{config.base_model_name_or_path}`: the weight entries that DualSFT changed,
and by how much. The base weights have the hash `{base_hash}`.

```python
{register if kind == "sparse" else ""}from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("BASE_FOLDER")
model = PeftModel.from_pretrained(model, "FOLDER").merge_and_unload()
```
"""
