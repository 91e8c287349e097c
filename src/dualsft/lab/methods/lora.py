"""LoRA: low-rank adapters on every linear layer of the text decoder, with PEFT.

Selects no entries. `attach` adds adapters to θ_old, the loop of Algorithm 1 line 12 trains them,
and `detach` saves them as a PEFT folder (`adapter/`, loadable with `PeftModel.from_pretrained` on
the base model) and merges them, so that the result is a plain model. DoRA is an option.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualsft.config.methods import Entry
from dualsft.errors import ConfigError
from dualsft.lab.methods.table import LoraOptions
from dualsft.model.load import empty_model, text_decoder
from dualsft.model.resolve import is_hub_id
from dualsft.runs.method import Job, ParamChoice, ParamMethod
from dualsft.runs.stages.selection import param_budget

FOLDER = "adapter"


class Lora(ParamMethod):
    """Adapters of rank r on the linear layers of the text decoder."""

    adapter = True
    options: LoraOptions
    _peft: Any = None
    """The PEFT wrapper around the model being trained."""

    def __init__(self, entry: Entry, options: Any) -> None:
        super().__init__(entry, options)
        import_peft()  # fails at the start of the run, not after examples have been selected

    def check(self, job: Job) -> None:
        """Refuse a budget below rank 1 at the start, before examples are selected."""
        empty = empty_model(job.ctx.model_folder, job.ctx.trusted)
        self._rank(job, empty, linear_names(empty))

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        return None

    def attach(self, job: Job, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        peft, options, device = import_peft(), self.options, model.device
        total = sum(p.numel() for p in model.parameters())
        names = linear_names(model)
        transposed = {isinstance(model.get_submodule(name), Conv1D) for name in names}
        rank = self._rank(job, model, names)
        settings = peft.LoraConfig(
            r=rank,
            lora_alpha=options.alpha if options.alpha is not None else 2 * rank,
            lora_dropout=options.dropout,
            target_modules=names,
            use_dora=options.dora,
            fan_in_fan_out=transposed == {True},
            bias="none",
            task_type="CAUSAL_LM",
        )
        wide = options.dtype == "float32"
        # PEFT initializes adapters from the global generator; seed it without affecting the run
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(job.rng("adapter").integers(1 << 62)))
            try:
                self._peft = peft.get_peft_model(model, settings, autocast_adapter_dtype=wide)
            except ValueError as problem:  # architectures that PEFT refuses or restricts
                raise ConfigError(
                    f"method.params: 'lora' cannot be added to {type(model).__name__}; PEFT "
                    f"reports: {problem} (change method.lora.*, or use another method.params)"
                ) from problem
        settings.base_model_name_or_path = job.ctx.config.model.path
        found = {name: p for name, p in model.named_parameters() if p.requires_grad}
        count = sum(p.numel() for p in found.values())
        job.ctx.reporter.say(
            f"{'DoRA' if options.dora else 'LoRA'}: rank {rank} on {len(names):,} linear layers, "
            f"{count:,} trainable entries ({100 * count / total:.2f} % of the {total:,} parameters)"
        )
        return found

    def _rank(self, job: Job, model: PreTrainedModel, names: list[str]) -> int:
        """`method.lora.r`, or the largest rank whose adapters fit the parameter budget."""
        if self.options.r is not None:
            return self.options.r
        per_rank, beside = 0, 0
        for name in names:
            module = model.get_submodule(name)
            shape = module.get_parameter("weight").shape
            per_rank += sum(shape)
            if self.options.dora:  # one magnitude per output
                beside += shape[1 if isinstance(module, Conv1D) else 0]
        shapes = {name: p.shape for name, p in model.named_parameters()}
        k = param_budget(job.ctx, shapes)
        if k < per_rank + beside:
            raise ConfigError(
                f"select.param_budget: {job.ctx.config.select.param_budget!r} is {k:,} entries, "
                f"and adapters of rank 1 have {per_rank + beside:,}; raise it, or set method.lora.r"
            )
        return (k - beside) // per_rank

    def detach(self, job: Job, model: PreTrainedModel) -> PreTrainedModel:
        folder = job.part / FOLDER
        with folder.made() as path:
            self._peft.save_pretrained(str(path), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        stored = (folder / "adapter_config.json").read_json()
        base = job.ctx.config.model.path  # PEFT looks for it; others get its name, not our folders
        stored["base_model_name_or_path"] = base if is_hub_id(base) else Path(base).name
        stored["target_modules"].sort()  # PEFT writes a set, whose order differs between processes
        (folder / "adapter_config.json").write_json(stored)
        merged = self._peft.merge_and_unload()
        self._peft = None
        merged.requires_grad_(True)
        vars(merged).pop("peft_config", None)
        return merged


def linear_names(model: PreTrainedModel) -> list[str]:
    """The linear layers of the text decoder without the output head: PEFT's "all-linear", without
    the other towers of a multimodal model."""
    head, inside = model.get_output_embeddings(), set(text_decoder(model).modules())
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module in inside and module is not head
    ]
    if not names:
        raise ConfigError(
            f"method.params: 'lora' finds no linear layer in {type(model).__name__}; use another "
            "method.params"
        )
    return names


def import_peft(method: str = "method.params: 'lora'") -> Any:
    """Import the optional package; if it is missing, the error says what to install."""
    try:
        import peft
    except ImportError as problem:
        raise ConfigError(
            f"{method} needs the package peft ({problem}); pip install 'dualsft[peft]', or use "
            "another method"
        ) from None
    return peft
