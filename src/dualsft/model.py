"""The model: loading, its candidate parameters, and where each of them sits.

Candidates (ALGORITHM.md §2, "Candidate parameters") default to the 2-D linear weights inside the
transformer blocks of the text decoder. `score.candidates` may also say `all`, glob patterns over
parameter names, and `!pattern` to leave some out. A weight is named once, under the first name that
`named_parameters` gives it, however often it is used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualsft.errors import ConfigError
from dualsft.vectors import accumulation_dtype

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: 'cuda', but this machine shows no CUDA device; use 'cpu'")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def read_model_config(folder: Path) -> Any:
    """The configuration of the text model in a folder."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as problem:  # its own validators raise errors of their own
        raise ConfigError(f"model.path: {str(folder)!r} cannot be loaded: {problem}") from problem
    return config.get_text_config()


def empty_model(folder: Path) -> PreTrainedModel:
    """The model's shapes without its weights."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def choose_dtype(wanted: str, folder: Path, device: torch.device) -> torch.dtype:
    """`auto` is fp32 on a CPU; on a GPU the checkpoint's own, with fp16 read as bf16."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    stored = getattr(read_model_config(folder), "dtype", None)
    return stored if stored in (torch.float32, torch.float64) else torch.bfloat16


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device, attention: str = "sdpa"
) -> PreTrainedModel:
    """A causal language model in eval mode, from safetensors only, no remote code."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as problem:  # config, safetensors and model classes each raise their own
        raise ConfigError(f"model.path: {str(folder)!r} cannot be loaded: {problem}") from problem
    model, report = loaded
    _refuse_incomplete(folder, report)
    model.to(device)
    model.eval()
    return model


def _refuse_incomplete(folder: Path, report: Any) -> None:
    """A weight that is not in the files would be random, and another at every load."""
    for key in ("missing_keys", "mismatched_keys"):
        names = report[key] if isinstance(report, Mapping) else getattr(report, key)
        if names:
            shown = ", ".join(str(name) for name in sorted(map(str, names))[:3])
            raise ConfigError(
                f"model.path: {str(folder)!r} lacks weights that its config.json asks for "
                f"({len(names)} {key.replace('_', ' ')}: {shown} …); save the model again"
            )


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as problem:
        raise ConfigError(
            f"model.path: {str(folder)!r} holds no usable tokenizer: {problem}"
        ) from problem
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path: the tokenizer in {str(folder)!r} has no end token; set `eos_token` in "
            "its tokenizer_config.json"
        )
    return tokenizer


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The map from hidden states to logits; scoring computes it chunk by chunk."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{type(model).__name__}: its output head is {type(head).__name__}, not a linear map; "
            "this model cannot be scored"
        )
    return head


def is_linear(module: nn.Module) -> bool:
    """A plain linear map whose forward we know exactly: nn.Linear, or GPT-2's transposed Conv1D."""
    if "forward" in vars(module):  # patched on the instance: not the map its class promises
        return False
    return type(module).forward is nn.Linear.forward or type(module) is Conv1D


@dataclass(frozen=True)
class Candidates(Mapping[str, Tensor]):
    """The candidate parameters of one model, in `named_parameters` order."""

    parameters: dict[str, nn.Parameter]
    spec: str

    def __getitem__(self, name: str) -> nn.Parameter:
        return self.parameters[name]

    def __iter__(self):  # noqa: ANN204
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    @cached_property
    def names(self) -> list[str]:
        return list(self.parameters)

    @property
    def num_entries(self) -> int:
        """The denominator of the parameter budget."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        """dtype of G and every other vector over these candidates."""
        return accumulation_dtype(next(iter(self.parameters.values())).dtype)


def decoder_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of the transformer blocks of the text decoder."""
    depth = model.config.get_text_config().num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if len(found) != 1:
        seen = ", ".join(name for name, _ in found) or "none"
        raise ConfigError(
            f"{type(model).__name__}: cannot tell which list of {depth} modules holds its blocks "
            f"(found: {seen}); name the candidates by patterns in score.candidates"
        )
    return found[0]


def find_candidates(model: PreTrainedModel, spec: str) -> Candidates:
    """Resolve `score.candidates` to parameters; an empty or unmatched term is an error."""
    everything = dict(model.named_parameters())
    chosen: set[str] = set()
    terms = [term.strip() for term in spec.split(",") if term.strip()]
    includes = [t for t in terms if not t.startswith("!")]
    excludes = [t[1:] for t in terms if t.startswith("!")]
    for term in includes or ["block_linear"]:
        matched = _match(model, everything, term, excludes)
        if not matched:
            near = ", ".join(list(everything)[:3])
            raise ConfigError(
                f"score.candidates: {term!r} matches no parameter of {type(model).__name__} "
                f"(its names look like: {near} …)"
            )
        chosen |= matched
    for term in excludes:
        matched = {name for name in everything if fnmatchcase(name, term)}
        if not matched:
            raise ConfigError(f"score.candidates: '!{term}' excludes nothing; check the pattern")
        chosen -= matched
    if not chosen:
        raise ConfigError(f"score.candidates: {spec!r} leaves no parameter to choose from")
    return Candidates({n: p for n, p in everything.items() if n in chosen}, spec)


def _match(
    model: PreTrainedModel, everything: dict[str, nn.Parameter], term: str, excludes: list[str]
) -> set[str]:
    if term == "all":
        return set(everything)
    if term == "block_linear":
        return _block_linear(model, excludes)
    return {name for name in everything if fnmatchcase(name, term)}


def _block_linear(model: PreTrainedModel, excludes: list[str]) -> set[str]:
    """Every linear weight in a block; a matrix there that is no known linear map is refused."""
    prefix, blocks = decoder_blocks(model)
    names: set[str] = set()
    for path, module in blocks.named_modules(prefix=prefix):
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}"
            if any(fnmatchcase(name, pattern) for pattern in excludes):
                continue
            if own == "weight" and is_linear(module):
                names.add(name)
            elif parameter.ndim >= 2 and not isinstance(module, nn.Embedding):
                raise ConfigError(
                    f"{name} ({type(module).__name__}, shape {tuple(parameter.shape)}) is a matrix "
                    "inside a block that no exact rule covers; leave it out by name with "
                    f"score.candidates='block_linear,!{name}'"
                )
    return names


def locate(name: str) -> tuple[int | None, str]:
    """Layer number and module of a parameter, for tables: ('…layers.3.mlp.up_proj.weight') → 3."""
    match = re.search(r"\.(\d+)\.(.+)$", name)
    if match is None:
        return None, name.removesuffix(".weight")
    return int(match[1]), match[2].removesuffix(".weight")
