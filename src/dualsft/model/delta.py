"""Save a model, or its sparse delta: the entries that fine-tuning changed, and their new values.

θ̄ (line 1 of Algorithm 1) and θ* (line 12) are saved as ordinary Hugging Face folders with their
tokenizer, which load in other tools.

`6_finetune/delta.safetensors` is the compact form of θ*. For each parameter with changed entries it
holds `<param>.idx` (int64, flat, sorted) and `<param>.val` (the new values, in the model's dtype).
The header records the base model, the hash of its weights and the hash of the delta, so that a
damaged file is found before it is merged. The file stores values, not differences, so that base +
delta equals the merged model bit for bit. `apply_delta` and `extract_delta` are inverses. Results
of `merge`, `extract` and `compact` are written atomically.

A compact file (`compact`) has `<param>.gap` in place of `<param>.idx`: the number of entries that
are left out before each changed one, in 8 or 16 bits. On request it stores the changes in bfloat16
in place of the values; the header then names the dtype in which they are added to the base.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from dualsft.config.parse import show
from dualsft.distributed.world import world
from dualsft.errors import ConfigError, RunError
from dualsft.model.load import DTYPES, choose_dtype, load_model, load_tokenizer
from dualsft.model.resolve import resolve_model, weights_hash
from dualsft.model.sharded import entries_of, is_sharded, saved_weights
from dualsft.storage.gaps import from_gaps, to_gaps
from dualsft.storage.manifest import read_stage_manifest
from dualsft.storage.tensor_files import TensorFile
from dualsft.storage.vectors import ParamVector, Vector, of_all, save_tensors
from dualsft.system.paths import Place, RunPath
from dualsft.system.usage import explained

FORMAT = "dualsft-delta-2"
UNHASHED = "dualsft-delta-1"  # the first format, without a content hash; still readable
COMPACT = "dualsft-delta-3"  # gaps in place of indices
SERVED = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""dtypes in which models are served, and in which a small change of a weight can be lost."""
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of a multimodal checkpoint beside weights and tokenizer; copied with the weights."""
_CPU = torch.device("cpu")
_NAME = "delta.safetensors"
_GIVE = f"give the {_NAME} of a run folder"
_AGAIN = "copy it again, or run `dualsft finetune` on its run folder again"


@dataclass(frozen=True)
class Delta:
    """New values at flat indices per parameter, and the base model that they apply to."""

    indices: dict[str, Tensor]
    values: dict[str, Tensor]
    base_model: str = ""
    base_hash: str = ""
    added_in: str = ""
    """If the values are changes: the dtype in which they are added to the base."""

    @property
    def num_entries(self) -> int:
        """Number of entries over all processes; in a sharded run each holds only its own rows."""
        return world().across(sum(i.numel() for i in self.indices.values()))

    @property
    def dtype(self) -> torch.dtype | None:
        """dtype that holds all fine-tuned weights; None for a delta without entries."""
        if self.added_in:
            return DTYPES[self.added_in]
        dtypes = [value.dtype for value in self.values.values()]
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def save(self, path: Place, compact: bool = False) -> None:
        """Write the delta file. Rank 0 writes; the other processes send it their entries."""
        assert compact or not self.added_in, "only a compact file holds changes"
        tensors: dict[str, Tensor] = {}
        for name, index in self.indices.items():
            index = index.to("cpu", torch.int64).contiguous()
            tensors |= {f"{name}.gap": to_gaps(index)} if compact else {f"{name}.idx": index}
            tensors[f"{name}.val"] = self.values[name].to("cpu").contiguous()
        every = of_all(tensors)
        # a parameter without changed entries in any process is left out
        used = {name: t for name, t in tensors.items() if every.forms[name].num_entries}
        every = every if len(used) == len(tensors) else of_all(used)
        header = {"format": COMPACT if compact else FORMAT}
        header |= {"base_model": self.base_model, "base_hash": self.base_hash}
        header |= {"added_in": self.added_in} if self.added_in else {}
        every.write(path, header | {"sha256": _content_hash(every, header)})

    @classmethod
    def load(cls, path: Place) -> Delta:
        """Read and check a delta file; an error names every parameter that is invalid."""
        try:
            place = _place(path)
            if not place.is_file():
                raise ConfigError(_no_file(place))
            file = TensorFile(place, _AGAIN)
            header, tensors = dict(file.metadata), file.tensors()
        except OSError as problem:
            raise ConfigError(f"{path}: cannot be read: {problem.strerror}; {_AGAIN}") from problem
        except RunError as problem:
            raise ConfigError(str(problem)) from problem
        if (stated := header.get("format")) not in (FORMAT, UNHASHED, COMPACT):
            cure = _GIVE
            if re.fullmatch(r"dualsft-delta-\d+", str(stated)):
                cure = f"newer than {COMPACT!r}, the last that this dualsft reads: upgrade dualsft"
            raise ConfigError(
                f"{path}: its header has format {show(stated)}, not {FORMAT!r}; {cure}"
            )
        stated = header.pop("sha256", None)
        if header["format"] != UNHASHED and stated != _content_hash(ParamVector(tensors), header):
            raise ConfigError(
                f"{path}: its content does not match the hash in its header: the file is "
                f"damaged; {_AGAIN}"
            )
        added_in = header.get("added_in", "")
        if added_in and (header["format"] != COMPACT or added_in not in DTYPES):
            raise ConfigError(
                f"{path}: its header has added_in {show(added_in)}, which is not one of "
                f"{', '.join(DTYPES)} in a file of format {COMPACT}; copy the delta again"
            )
        names = sorted({key.rpartition(".")[0] for key in tensors})
        rule = "idx must be int64 and increasing, val finite and of the same length"
        if header["format"] == COMPACT:
            rule = "gap must be uint8 or uint16 and end with an index, val finite with one for each"
            for name in names:
                tensors.pop(f"{name}.idx", None)
                with suppress(ValueError, KeyError):
                    tensors[f"{name}.idx"] = from_gaps(tensors.pop(f"{name}.gap"))
        if problems := [f"{path}: {n}: {rule}" for n in names if _lacks(tensors, n)]:
            raise ConfigError(
                [*problems, f"values may be {', '.join(DTYPES)}; copy the delta again"]
            )
        return cls(
            {n: tensors[f"{n}.idx"] for n in names},
            {n: tensors[f"{n}.val"] for n in names},
            header.get("base_model", ""),
            header.get("base_hash", ""),
            added_in,
        )

    def on(self, model: nn.Module) -> Delta:
        """This delta as new values on its base; raises for a model that it does not fit."""
        parameters = dict(model.named_parameters())
        problems = []
        for name, index in self.indices.items():
            count = parameters[name].numel() if name in parameters else 0
            if name not in parameters:
                problems.append(f"the delta has {name!r}, which the model does not have")
            elif index.numel() and (int(index.min()) < 0 or int(index.max()) >= count):
                problems.append(f"the delta indexes {name!r} outside its {count} entries")
        if problems:
            raise ConfigError([*problems, "give the base model that the delta was made from"])
        if not self.added_in:
            return self
        old = take_delta(model, self.indices).values
        values = {
            name: (old[name].double() + change.double()).to(self.dtype)
            for name, change in self.values.items()
        }
        return replace(self, values=finite(values), added_in="")


def _place(path: Place) -> RunPath:
    """The path to open: a symbolic link is followed, except inside a stage folder."""
    if isinstance(path, RunPath):
        return path
    stage = not read_stage_manifest(path.parent)[1]
    real = path if stage else path.resolve()
    return RunPath(real.parent, real.name)


def _no_file(path: RunPath) -> str:
    """Why there is no delta at `path`, and what to give instead."""
    if path.is_dir():
        return f"{path}: is a folder; {_GIVE}"
    stage = read_stage_manifest(path.parent)[0]
    if stage.get("stage") != "finetune" or path.name in stage["files"] or _NAME in stage["files"]:
        return f"{path}: no such file; {_GIVE}"
    merged = path.with_name("model")
    return (
        f"{path}: no such file; this fine-tuning wrote no delta: use its merged model, {merged}, "
        "or make a delta of it with `dualsft export extract`"
    )


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
    # isfinite and arithmetic do not exist for 8-bit floats
    return not rising or value.dtype not in DTYPES.values() or not bool(value.isfinite().all())


def finite(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values themselves; refuses values that a cast, a sum or a weight made infinite."""
    problems = [
        f"{name}: {count:,} of its {len(value):,} new values overflow in {_word(value.dtype)}"
        for name, value in values.items()
        if (count := len(value) - int(value.isfinite().sum()))
    ]
    if problems:
        cure = "give a smaller --weight or another --dtype (in Python, a model of another dtype)"
        raise ConfigError([*problems, f"{cure}; without these, the delta does not fit this base"])
    return values


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
    delta = (delta if isinstance(delta, Delta) else Delta.load(Path(delta))).on(model)
    parameters = dict(model.named_parameters())
    cast = {
        n: value.to(parameters[n].device, parameters[n].dtype) for n, value in delta.values.items()
    }
    for name, value in finite(cast).items():
        p = parameters[name]
        p.view(-1)[delta.indices[name].to(p.device)] = value
    return model


@torch.no_grad()
def extract_delta(base: nn.Module, tuned: nn.Module, **origin: Any) -> Delta:
    """The entries whose bits differ between two models of the same shape, `base` and `tuned`.

    `origin` is stored with a delta: text by name, such as base_model.
    """
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


@torch.no_grad()
def combine_deltas(
    model: nn.Module, deltas: Sequence[Delta], weights: Sequence[float] | None = None
) -> tuple[Delta, int]:
    """(base + Σ weight · change as one delta, number of entries that several deltas change).

    `model` is the base. By default every weight is 1: an entry that one delta changes then gets its
    value bit for bit.
    """
    weights = [1.0] * len(deltas) if weights is None else list(weights)
    if not deltas or len(weights) != len(deltas) or not all(map(math.isfinite, weights)):
        raise ConfigError(f"{len(deltas)} deltas and weights {weights}: give one number per delta")
    whole = [delta.on(model) for delta in deltas]
    indices: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    num_shared = 0
    for name, p in model.named_parameters():
        parts = [(d, w) for d, w in zip(whole, weights, strict=True) if name in d.indices]
        if not parts:
            continue
        index = torch.cat([delta.indices[name] for delta, _ in parts]).unique()
        old = entries_of(p, index)
        total, times, own = old.to(torch.float64, copy=True), torch.zeros_like(index), []
        for delta, weight in parts:
            value, here = delta.values[name], torch.searchsorted(index, delta.indices[name])
            before = old[here]
            moved = _bits(value).ne(_bits(before.to(value.dtype)))
            total[here] += weight * (value.double() - before.double())
            times[here] += moved
            own.append((here, value, moved & (weight == 1)))
        dtype = reduce(torch.promote_types, (value.dtype for _, value, _ in own))
        new = torch.where(times > 0, total, old).to(dtype)
        for here, value, exact in own:
            alone = exact & (times[here] == 1)
            new[here[alone]] = value[alone].to(dtype)
        indices[name], values[name] = index, new
        num_shared += int((times > 1).sum())
    return replace(whole[0], indices=indices, values=finite(values)), num_shared


@torch.no_grad()
def moved_entries(model: nn.Module, delta: Delta) -> tuple[Delta, dict[str, Tensor]]:
    """(new values of the entries whose bits differ from the base's, changes in float64)."""
    whole = delta.on(model)
    old = take_delta(model, whole.indices).values
    moved = {n: _bits(v).ne(_bits(old[n].to(v.dtype))) for n, v in whole.values.items()}
    moved = {name: chosen for name, chosen in moved.items() if bool(chosen.any())}
    indices = {name: whole.indices[name][chosen] for name, chosen in moved.items()}
    values = {name: whole.values[name][chosen] for name, chosen in moved.items()}
    changes = {n: v.double() - old[n][moved[n]].double() for n, v in values.items()}
    return replace(whole, indices=indices, values=values), changes


def survival(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, int]:
    """How many entries differ from the base, in their own dtype and after a cast to `SERVED`."""
    own = Delta({}, dict(new)).dtype or torch.float32
    served = SERVED if own.itemsize > 2 else {}
    dtypes = {_word(own): own, **served}
    return {
        label: world().across(
            sum(int((old[n].to(dtype) != value.to(dtype)).sum()) for n, value in new.items())
        )
        for label, dtype in dtypes.items()
    }


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bits(p: Tensor) -> Tensor:
    views = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return p.detach().contiguous().view(views[p.element_size()])


# --- models as folders ----------------------------------------------------------------------------


def save_model(model: PreTrainedModel, tokenizer: Any, base: Path, target: Path) -> None:
    """Save the weights, the tokenizer and the base's processor files to one folder.

    Rank 0 writes; for a sharded model the other processes send it their rows in chunks, so no
    process gathers the full model. generation_config.json is copied from the base: transformers
    refuses to write some settings that it reads (a temperature without sampling), and they must not
    change.
    """
    main = world().main
    if is_sharded(model):
        if main:
            target.mkdir(parents=True, exist_ok=True)
            model.config.save_pretrained(target)
        save_tensors(target / "model.safetensors", saved_weights(model), {})
    elif main:
        settings, model.generation_config = model.generation_config, GenerationConfig()
        try:
            model.save_pretrained(target)
        finally:
            model.generation_config = settings
        (target / "generation_config.json").unlink(missing_ok=True)
    if not main:
        return
    tokenizer.save_pretrained(target)
    for name in ("generation_config.json", *_PROCESSOR_FILES):
        if (base / name).is_file() and not (target / name).exists():
            shutil.copyfile(base / name, target / name)


def _rounded(x: Tensor, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Cast to one of the two neighbours in `dtype`, the closer one more often; unbiased."""
    near = x.to(dtype)
    beyond = torch.where(x > near, torch.inf, -torch.inf).to(dtype)
    other = torch.nextafter(near, beyond)
    share = (x.double() - near.double()) / (other.double() - near.double())
    return torch.where(torch.rand(x.shape, generator=rng) < share, other, near)


@dataclass(frozen=True)
class Merged:
    """What an export did: entries written, entries of several deltas, entries that differ."""

    num_entries: int
    num_shared: int
    survival: Mapping[str, int]

    def lines(self, done: str) -> list[str]:
        """Lines for a person; `done` says what was done with the entries."""
        lines = [f"{self.num_entries:,} entries {done}"]
        if self.num_shared:
            lines.append(f"{self.num_shared:,} of them are changed by several deltas: summed")
        own, *others = (f"{n:,} in {dtype}" for dtype, n in self.survival.items())
        cast = f"; after a cast {', '.join(others)}" if others else ""
        return [*lines, f"entries that differ from the base: {own}{cast}"]


def load_for(
    base: str, paths: Sequence[Path], force: bool = False
) -> tuple[Path, PreTrainedModel, list[Delta]]:
    """(folder, base model in the dtype of the deltas, deltas); refuses deltas of other weights."""
    folder = resolve_model(base)
    deltas = [Delta.load(path) for path in paths]
    found = weights_hash(folder)
    for path, delta in zip(paths, deltas, strict=True):
        if delta.base_hash and delta.base_hash != found and not force:
            raise ConfigError(
                f"{path}: made from {show(delta.base_model)} with weights {delta.base_hash[:12]}…, "
                f"but {base!r} has {found[:12]}…; give that base, or `export merge` with --force"
            )
    dtypes = [delta.dtype for delta in deltas if delta.dtype is not None]
    dtype = reduce(torch.promote_types, dtypes) if dtypes else _dtype("auto", folder)
    return folder, load_model(folder, dtype, _CPU), deltas


def merge(
    base: str,
    paths: Sequence[Path],
    out: Path,
    dtype: str = "auto",
    force: bool = False,
    weights: Sequence[float] | None = None,
    stochastic: bool = False,
) -> Merged:
    """Write base + deltas as a Hugging Face folder.

    `auto` is the dtype of the run, taken from the delta's values. A narrower one loses changes of
    less than half the distance of its numbers; `stochastic` rounds the changed entries up or down
    at random, so that the changes are right on average.
    """
    check_target(out)
    folder, model, deltas = load_for(base, paths, force)
    chosen = model.dtype if dtype == "auto" else _dtype(dtype, folder)
    delta, num_shared = combine_deltas(model, deltas, weights)
    old = take_delta(model, delta.indices).values
    left = survival(old, delta.values)
    if stochastic and chosen.itemsize >= model.dtype.itemsize:
        narrower = f"a dtype narrower than {_word(model.dtype)}"
        raise ConfigError(f"--stochastic: has no effect without --dtype; give {narrower}")
    if chosen != model.dtype:
        model = load_model(folder, chosen, _CPU)
    if stochastic:
        rng = torch.Generator().manual_seed(0)
        values = {n: _rounded(value, chosen, rng) for n, value in delta.values.items()}
        left |= survival({n: o.to(chosen) for n, o in old.items()}, values)
        delta = replace(delta, values=values)
    apply_delta(model, delta)
    with written_whole(out) as part:
        save_model(model, load_tokenizer(folder), folder, part)
    return Merged(delta.num_entries, num_shared, left)


def compact(base: str, path: Path, out: Path, lossy: bool = False) -> tuple[int, float]:
    """Write a delta in fewer bytes; returns the number of entries and the relative error.

    Entries whose bits are those of the base are left out, and the indices become gaps, so that the
    merged model stays the same bit for bit. `lossy` stores each change in bfloat16 in place of the
    new value; the error is the root mean square of what this alters, relative to the changes.
    """
    check_target(out)
    _, model, (delta,) = load_for(base, [path])
    whole, changes = moved_entries(model, delta)
    dtype = whole.dtype or model.dtype
    if lossy and dtype.itemsize < 4:
        raise ConfigError(f"--lossy: the values of {path} have 16 bits already; leave it out")
    error = 0.0
    if lossy:
        rounded = finite({name: change.to(torch.bfloat16) for name, change in changes.items()})
        squares = sum(float(change.square().sum()) for change in changes.values())
        wrong = sum(float((rounded[n].double() - c).square().sum()) for n, c in changes.items())
        error = math.sqrt(wrong / squares) if squares else 0.0
        whole = replace(whole, values=rounded, added_in=_word(dtype))
    with written_whole(out) as part:
        whole.save(part, compact=True)
    return whole.num_entries, error


def extract(base: str, tuned: Path, out: Path, dtype: str = "auto") -> int:
    """Write the entries in which `tuned` differs from `base`; returns the number of entries."""
    check_target(out)
    folder = resolve_model(base)
    chosen = _dtype(dtype, folder)
    before = load_model(folder, chosen, _CPU)
    after = load_model(resolve_model(str(tuned)), chosen, _CPU)
    origin = {"base_model": Path(base).name, "base_hash": weights_hash(folder)}
    delta = extract_delta(before, after, **origin)
    with written_whole(out) as part:
        delta.save(part)
    return delta.num_entries


def check_target(out: Path) -> None:
    """Refuse an existing target and create its parent folder, before any model is loaded."""
    if out.exists():
        raise ConfigError(f"{out}: already exists; give a new name")
    with explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder; rename it to `out` when the block succeeds."""
    with explained(out):
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            part = scratch / out.name
            yield part
            for file in RunPath(scratch).tree()[0].values():
                file.share()
            part.rename(out)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _dtype(name: str, folder: Path) -> torch.dtype:
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"--dtype: {name!r} is not one of auto, {', '.join(DTYPES)}")
    return choose_dtype(name, folder, _CPU)
