"""Save a model as a Hugging Face folder; merge a delta into its base, or extract one.

Saves θ̄ (line 1 of Algorithm 1) and θ* (line 12). The merged model is an ordinary Hugging Face
folder with its tokenizer, which loads in other tools. A delta (`model/delta.py`) is the compact
form of the same result. Results of `merge` and `extract` are written atomically.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from dualsft.distributed.world import world
from dualsft.errors import ConfigError
from dualsft.model.delta import Delta, apply_delta, extract_delta
from dualsft.model.load import DTYPES, choose_dtype, load_model, load_tokenizer
from dualsft.model.resolve import resolve_model, weights_hash
from dualsft.model.sharded import is_sharded, saved_weights
from dualsft.storage.vectors import save_tensors
from dualsft.system.paths import RunPath
from dualsft.system.usage import explained

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of a multimodal checkpoint beside weights and tokenizer; copied with the weights."""
_CPU = torch.device("cpu")


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


def merge(base: str, delta_path: Path, out: Path, dtype: str = "auto", force: bool = False) -> int:
    """Write base + delta as a Hugging Face folder; returns the number of entries merged.

    `auto` is the dtype of the run, taken from the delta's values.
    """
    folder = resolve_model(base)
    delta = Delta.load(delta_path)
    _check_target(out)
    found = weights_hash(folder)
    if delta.base_hash and delta.base_hash != found and not force:
        raise ConfigError(
            f"{delta_path}: made from {delta.base_model!r} with weights {delta.base_hash[:12]}…, "
            f"but {base!r} has {found[:12]}…; give that base, or --force to merge anyway"
        )
    values = list(delta.values.values())
    chosen = values[0].dtype if dtype == "auto" and values else _dtype(dtype, folder)
    model = load_model(folder, chosen, _CPU)
    apply_delta(model, delta)
    with written_whole(out) as part:
        save_model(model, load_tokenizer(folder), folder, part)
    return delta.num_entries


def extract(base: str, tuned: Path, out: Path, dtype: str = "auto") -> int:
    """Write the entries in which `tuned` differs from `base`; returns the number of entries."""
    _check_target(out)
    folder = resolve_model(base)
    chosen = _dtype(dtype, folder)
    before = load_model(folder, chosen, _CPU)
    after = load_model(resolve_model(str(tuned)), chosen, _CPU)
    origin = {"base_model": Path(base).name, "base_hash": weights_hash(folder)}
    delta = extract_delta(before, after, **origin)
    with written_whole(out) as part:
        delta.save(part)
    return delta.num_entries


def _check_target(out: Path) -> None:
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
