"""Save a model as a Hugging Face folder, sharded or not.

Saves θ̄ (line 1 of Algorithm 1) and θ* (line 12). Rank 0 writes. The other processes of a sharded
model send it their rows in chunks, so no process gathers the full model.
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
    """Save the weights, the tokenizer and the base's processor files to one folder.

    Rank 0 writes; for a sharded model the other processes send it their rows in chunks.
    generation_config.json is copied from the base: transformers refuses to write some settings that
    it reads (a temperature without sampling), and they must not change.
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
    """The parameters and the persistent buffers of a sharded model, as one vector."""

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
        # every process holds the full buffers; rank 0 writes its own
        return (0, self.forms[name].num_entries) if rank == 0 else (0, 0)

    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        if name in self._buffers:
            return self._buffers[name].reshape(-1)[start:stop]
        first, _ = world().own(self.forms[name].shape)
        return local_rows(self._parameters[name]).reshape(-1)[start - first : stop - first]
