"""A model as a Hugging Face folder, however it is held.

θ̄ of Algorithm 1 line 1 and θ* of line 12 are saved so, for any tool that loads such a folder. The
first process writes; of a sharded model it is sent the others' rows, and no process has them all.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from dualsft.distributed.world import world
from dualsft.model.load import PROCESSOR_FILES
from dualsft.model.sharded import is_sharded, local_rows
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import Seen, Vector, save_tensors


def save_model(model: PreTrainedModel, tokenizer: Any, base: Path, target: Path) -> None:
    """Weights, tokenizer, and what else the base has for its processor, as one folder.

    Written by the first process; of a sharded model the others send it their rows, a chunk at a
    time. The generation settings are the base's own file: transformers refuses to write some that
    it reads (a temperature without sampling), and they are not ours to change.
    """
    main = world().main
    if is_sharded(model):
        if main:
            target.mkdir(parents=True, exist_ok=True)
            model.config.save_pretrained(target)
        save_tensors(target / "model.safetensors", _Weights(model), {})
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
    for name in ("generation_config.json", *PROCESSOR_FILES):
        if (base / name).is_file() and not (target / name).exists():
            shutil.copyfile(base / name, target / name)


class _Weights(Vector):
    """A sharded model's parameters, and its buffers that are saved, as one vector."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        saved = model.state_dict().keys()
        self._buffers = {name: b for name, b in model.named_buffers() if name in saved}
        every = {**self._parameters, **self._buffers}
        self.forms = {name: Form(t.dtype, t.shape) for name, t in every.items()}

    @property
    def device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def share(self, name: str, rank: int) -> tuple[int, int]:
        if name in self._parameters:
            return super().share(name, rank)
        return (0, self.forms[name].num_entries) if rank == 0 else (0, 0)

    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        if name in self._buffers:
            return self._buffers[name].reshape(-1)[start:stop]
        first, _ = world().own(self.forms[name].shape)
        return local_rows(self._parameters[name]).reshape(-1)[start - first : stop - first]
