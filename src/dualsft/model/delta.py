"""The sparse delta: the entries that fine-tuning changed, and their new values.

`6_finetune/delta.safetensors` is part of the result of line 12 of Algorithm 1. For each parameter
with changed entries it holds `<param>.idx` (int64, flat, sorted) and `<param>.val` (the new values,
in the model's dtype). The header records the base model, the hash of its weights and the hash of
the delta, so that a damaged file is found before it is merged. The file stores values, not
differences, so that base + delta equals the merged model bit for bit. `apply_delta` and
`extract_delta` are inverses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualsft.distributed.world import world
from dualsft.errors import ConfigError, RunError
from dualsft.model.sharded import entries_of
from dualsft.storage.manifest import read_stage_manifest
from dualsft.storage.tensor_files import TensorFile
from dualsft.storage.vectors import ParamVector, Vector, of_all
from dualsft.system.paths import Place, RunPath

FORMAT = "dualsft-delta-2"
UNHASHED = "dualsft-delta-1"  # the first format, without a content hash; still readable


@dataclass(frozen=True)
class Delta:
    """New values at flat indices per parameter, and the base model that they apply to."""

    indices: dict[str, Tensor]
    values: dict[str, Tensor]
    base_model: str = ""
    base_hash: str = ""

    @property
    def num_entries(self) -> int:
        """Number of entries over all processes; in a sharded run each holds only its own rows."""
        return world().across(sum(i.numel() for i in self.indices.values()))

    def save(self, path: Place) -> None:
        """Write the delta file. Rank 0 writes; the other processes send it their entries."""
        tensors: dict[str, Tensor] = {}
        for name, index in self.indices.items():
            tensors[f"{name}.idx"] = index.to("cpu", torch.int64).contiguous()
            tensors[f"{name}.val"] = self.values[name].to("cpu").contiguous()
        every = of_all(tensors)
        # a parameter without changed entries in any process is left out
        used = {name: t for name, t in tensors.items() if every.forms[name].num_entries}
        every = every if len(used) == len(tensors) else of_all(used)
        header = {"format": FORMAT, "base_model": self.base_model, "base_hash": self.base_hash}
        every.write(path, header | {"sha256": _content_hash(every, header)})

    @classmethod
    def load(cls, path: Place) -> Delta:
        """Read and check a delta file; an error names every parameter that is invalid."""
        try:
            file = TensorFile(_place(path))
            header, tensors = dict(file.metadata), file.tensors()
        except (OSError, RunError) as problem:
            raise ConfigError(f"{path}: cannot be read as a delta: {problem}") from problem
        if header.get("format") not in (FORMAT, UNHASHED):
            raise ConfigError(
                f"{path}: its header has format {header.get('format')!r}, not {FORMAT!r}; give "
                "the delta.safetensors of a run folder"
            )
        stated = header.pop("sha256", None)
        if header["format"] == FORMAT and stated != _content_hash(ParamVector(tensors), header):
            raise ConfigError(
                f"{path}: its content does not match the hash in its header: the file is "
                "damaged; copy it again, or run `dualsft finetune` on its run folder again"
            )
        names = sorted({key.rpartition(".")[0] for key in tensors})
        rule = "idx must be int64 and increasing, val finite and of the same length"
        if problems := [f"{path}: {n}: {rule}" for n in names if _lacks(tensors, n)]:
            raise ConfigError(problems)
        return cls(
            {n: tensors[f"{n}.idx"] for n in names},
            {n: tensors[f"{n}.val"] for n in names},
            header.get("base_model", ""),
            header.get("base_hash", ""),
        )


def _place(path: Place) -> RunPath:
    """The path to open: a symbolic link is followed, except inside a stage folder."""
    if isinstance(path, RunPath):
        return path
    stage = not read_stage_manifest(path.parent)[1]
    real = path if stage else path.resolve()
    return RunPath(real.parent, real.name)


def _content_hash(tensors: Vector, header: Mapping[str, str]) -> str:
    """One hash over the header's fields and the name, dtype, shape and bits of every tensor."""
    total = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode())
    for name in sorted(tensors):
        form = tensors.forms[name]
        total.update(f"{name} {form.dtype} {tuple(form.shape)}".encode())
        for piece in tensors.collected(name):
            total.update(_bits(piece).numpy().data)
    return total.hexdigest()


def _lacks(tensors: Mapping[str, Tensor], name: str) -> bool:
    index, value = tensors.get(f"{name}.idx"), tensors.get(f"{name}.val")
    if index is None or value is None or index.shape != value.shape or index.ndim != 1:
        return True
    rising = index.dtype == torch.int64 and bool((index[1:] > index[:-1]).all())
    return not rising or not value.is_floating_point() or not bool(value.isfinite().all())


@torch.no_grad()
def take_delta(
    model: nn.Module, indices: Mapping[str, Tensor], base_model: str = "", base_hash: str = ""
) -> Delta:
    """The model's current values at `indices`."""
    parameters = dict(model.named_parameters())
    values = {name: entries_of(parameters[name], index) for name, index in indices.items()}
    return Delta({n: i.cpu() for n, i in indices.items()}, values, base_model, base_hash)


@torch.no_grad()
def apply_delta(model: nn.Module, delta: Delta | str | Path) -> nn.Module:
    """Write a delta's values into the model in place, and return the model."""
    delta = delta if isinstance(delta, Delta) else Delta.load(Path(delta))
    parameters = dict(model.named_parameters())
    problems = []
    for name, index in delta.indices.items():
        count = parameters[name].numel() if name in parameters else 0
        if name not in parameters:
            problems.append(f"the delta has {name!r}, which the model does not have")
        elif index.numel() and (int(index.min()) < 0 or int(index.max()) >= count):
            problems.append(f"the delta indexes {name!r} outside its {count} entries")
    if problems:
        raise ConfigError([*problems, "give the base model that the delta was made from"])
    for name, index in delta.indices.items():
        p = parameters[name]
        p.view(-1)[index.to(p.device)] = delta.values[name].to(p.device, p.dtype)
    return model


@torch.no_grad()
def extract_delta(base: nn.Module, tuned: nn.Module, **origin: Any) -> Delta:
    """The entries whose bits differ between two models of the same shape."""
    before, after = dict(base.named_parameters()), dict(tuned.named_parameters())
    if {n: p.shape for n, p in before.items()} != {n: p.shape for n, p in after.items()}:
        odd = sorted(before.keys() ^ after.keys())[:3]
        raise ConfigError(f"the two models have different parameters or shapes {odd}")
    indices = {}
    for name, p in before.items():
        same = _bits(p).eq(_bits(after[name].to(p.dtype)))
        index = torch.nonzero(~same.view(-1)).squeeze(-1).cpu()
        if index.numel():
            indices[name] = index
    return take_delta(tuned, indices, **origin)


def _bits(p: Tensor) -> Tensor:
    views = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return p.detach().contiguous().view(views[p.element_size()])
