"""What a stage is given: the settings, the run folder, and one way to load each thing it reads.

Stages share nothing in memory: each reads what earlier stages wrote, so `dualsft run` and the
single stage commands are the same computation, and any number can be recomputed from the folder
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dualsft.config import Config
from dualsft.corpus import BUILTIN, builtin_file
from dualsft.data import Example, pad_token_id
from dualsft.model import (
    Candidates,
    choose_device,
    choose_dtype,
    empty_model,
    find_candidates,
    load_model,
    load_tokenizer,
    read_model_config,
)
from dualsft.passes import PassSettings
from dualsft.preflight import FOLDERS
from dualsft.pretrained import cache_root, resolve_model
from dualsft.progress import Reporter
from dualsft.rundir import RunDir
from dualsft.stages.split import read_split
from dualsft.vectors import ParamVector


@dataclass
class RunContext:
    """One run: its settings, its folder, its voice."""

    config: Config
    rundir: RunDir
    reporter: Reporter

    def folder(self, stage: str) -> Path:
        return self.rundir.path / FOLDERS[stage]

    @cached_property
    def model_folder(self) -> Path:
        """θ_old as a local Hugging Face folder."""
        return resolve_model(self.config.model.path)

    def data_path(self, path: str) -> Path:
        """A corpus file; `builtin:NAME/FILE` is one that the package generates."""
        if path.startswith(BUILTIN):
            return builtin_file(path, cache_root())
        return Path(path).expanduser()

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.config.model.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return choose_dtype(self.config.model.dtype, self.model_folder, self.device)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.model_folder)

    @property
    def pad_id(self) -> int:
        """What batches are padded with; the tokenizer itself is left as it came."""
        return pad_token_id(self.tokenizer)

    @cached_property
    def num_candidates(self) -> int:
        """Entries that compete, from the model's shapes alone."""
        return find_candidates(
            empty_model(self.model_folder), self.config.score.candidates
        ).num_entries

    @cached_property
    def model_config(self) -> Any:
        """The text model's configuration, read without its weights."""
        return read_model_config(self.model_folder)

    @property
    def model_type(self) -> str:
        return str(self.model_config.model_type)

    @property
    def max_positions(self) -> int | None:
        return getattr(self.model_config, "max_position_embeddings", None)

    @cached_property
    def batch_tokens(self) -> int:
        """Padded tokens a batch: as set, or what suits the device."""
        return self.config.score.batch_tokens or (16384 if self.device.type == "cuda" else 1024)

    def load(self, folder: Path) -> PreTrainedModel:
        return load_model(folder, self.dtype, self.device, self.config.model.attention)

    def theta_old(self) -> PreTrainedModel:
        return self.load(self.model_folder)

    def theta_bar(self) -> PreTrainedModel:
        """The warmed-up model; equal to θ_old when there was no warmup."""
        return self.load(self.folder("warmup") / "theta_bar")

    @property
    def warmed_up(self) -> bool:
        """Whether there was a warmup, and so a curvature ĉ."""
        return (self.folder("warmup") / "curvature.safetensors").is_file()

    def candidates(self, model: PreTrainedModel) -> Candidates:
        return find_candidates(model, self.config.score.candidates)

    def roles(self) -> dict[str, list[Example]]:
        """val, anchor, warm, pool: the examples of each role, in source order."""
        return read_split(self.folder("split"))

    def vector(self, stage: str, name: str, candidates: Candidates) -> ParamVector:
        return ParamVector.load(
            self.folder(stage) / f"{name}.safetensors", candidates.names, self.device
        )

    def curvature(self, candidates: Candidates) -> ParamVector | None:
        """ĉ, or None when there was no warmup."""
        return self.vector("warmup", "curvature", candidates) if self.warmed_up else None


def pass_settings(ctx: RunContext) -> PassSettings:
    """How this run makes batches."""
    return PassSettings(
        batch_tokens=ctx.batch_tokens,
        pad_id=ctx.pad_id,
        padding_side=ctx.config.data.padding_side,
    )
