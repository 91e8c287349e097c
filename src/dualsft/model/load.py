"""Load a model and its tokenizer, and resolve the candidate parameters.

A multimodal checkpoint is loaded and saved in full, so that the result opens wherever the base
does. Only its text decoder and output head are scored and trained (`text_parameters`).

Candidates (docs/algorithm.md, "Definitions we fix") default to the linear weights inside the
transformer blocks of the text decoder, 3-D for experts. `score.candidates` also accepts `all`, glob
patterns over parameter names, and `!pattern` to exclude names. A tied weight counts once, under the
first name that `named_parameters` gives it.

Reads a local Hugging Face folder; writes nothing. The parameters are the θ of every line of
Algorithm 1.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.integrations import hub_kernels
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from dualsft.errors import ConfigError
from dualsft.model.experts import (
    expert_weights,
    how_experts_run,
    is_experts,
    routers,
    say_how_trained,
)
from dualsft.model.safety import check_folder, check_tokenizer, weight_files
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype
from dualsft.system.bounds import FREE_BYTES, RAISE, TIMES, bounded, tried
from dualsft.system.usage import is_out_of_memory, is_panic

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

MAX_BUILD_SECONDS = TIMES * 30.0
MAX_LOAD_SECONDS = TIMES * 20
MAX_BUILD_MEMORY = TIMES * (4 << 30)
"""Processor time and memory for building a model of a config.json without its weights, and for
loading a tokenizer whose normalizer may take long."""
LARGER = 4
"""Parameters per byte of weights beyond which config.json is wrong; tied ones count twice here."""

# subclasses of nn.Linear in transformers that override forward with the same map
_LINEAR_BY_NAME = {"transformers.models.falcon.modeling_falcon.FalconLinear"}


def choose_device(wanted: str) -> torch.device:
    """Resolve `model.device`; `auto` prefers cuda, then mps, then cpu."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    usable = [name for name, there in (("cuda", cuda), ("mps", mps), ("cpu", True)) if there]
    if wanted != "auto" and wanted not in usable:
        raise ConfigError(
            f"model.device: {wanted!r}, but this machine has no {wanted} device; use "
            f"{' or '.join(map(repr, usable))}"
        )
    return torch.device(usable[0] if wanted == "auto" else wanted)


_MEND = "; repair the file, or make or download the model again"


@contextmanager
def _refused_if_broken(what: str, cure: str = _MEND) -> Iterator[None]:
    """Name the model in errors of transformers, whose parsers and classes raise any type.

    Out-of-memory is not the model's fault and is raised as it is. A panic in Rust is no Exception.
    """
    try:
        yield
    except ConfigError:
        raise
    except BaseException as problem:
        if is_out_of_memory(problem) or not (is_panic(problem) or isinstance(problem, Exception)):
            raise
        reason = f"{type(problem).__name__}: {problem}"
        raise ConfigError(f"model.path: {what}: {reason}{cure}") from problem


def _no_kernel(name: str, *_: Any, **__: Any) -> NoReturn:
    """In place of transformers' function that fetches compiled code from the hub, and runs it.

    It is called for many model types wherever the package `kernels` is installed. With this error
    transformers computes the same in PyTorch, or says which package is missing.
    """
    raise FileNotFoundError(f"{name}: dualsft fetches no compiled code from the hub")


def _load_config(folder: Path, remote: bool) -> Any:
    """The folder's configuration. For the rest of this process, no kernels are fetched."""
    check_folder(folder, remote)
    hub_kernels.get_kernel = _no_kernel
    with _refused_if_broken(f"{str(folder)!r} cannot be loaded"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=remote, local_files_only=True)


def read_model_config(folder: Path, remote: bool = False) -> Any:
    """The configuration of the text model in a folder."""
    return _load_config(folder, remote).get_text_config()


def _auto_class(config: Any) -> Any:
    """The auto class to load with; a multimodal checkpoint is loaded as a multimodal model."""
    whole = config.get_text_config() is not config
    if whole and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        raise ConfigError(
            f"model.path: model_type {config.model_type!r} has no causal language model in this "
            "transformers; give a decoder such as Llama, Qwen, Gemma, Mistral, Phi, OLMo"
        )
    return AutoModelForCausalLM


def _set_attention(config: Any, attention: str) -> None:
    """Set `model.attention`; of what config.json names, `auto` keeps what comes with PyTorch."""
    named = config._attn_implementation
    kept = named if named in ("sdpa", "eager") else None
    config._attn_implementation = kept if attention == "auto" else attention


def _from_config(
    config: Any, remote: bool, dtype: torch.dtype | None, attention: str
) -> PreTrainedModel:
    """The model of a configuration in eval mode, on the current default device."""
    given = how_experts_run(dtype) | ({} if dtype is None else {"dtype": dtype})
    _set_attention(config, attention)
    config.return_dict = True  # a config.json may say otherwise
    return _auto_class(config).from_config(config, trust_remote_code=remote, **given).eval()


def _on_meta(
    config: Any, remote: bool, dtype: torch.dtype | None, attention: str
) -> PreTrainedModel:
    """The model of a configuration without weights, in bounded time and memory."""
    # the address space says nothing about memory where CUDA is: it reserves hundreds of gigabytes
    memory = MAX_BUILD_MEMORY if not torch.cuda.is_available() else None
    with bounded("its parts are too many", MAX_BUILD_SECONDS, memory), torch.device("meta"):
        return _from_config(config, remote, dtype, attention)


def empty_model(
    folder: Path, remote: bool = False, dtype: torch.dtype | None = None, attention: str = "auto"
) -> PreTrainedModel:
    """The model as `load_model` builds it on the meta device: shapes without weights."""
    config = _load_config(folder, remote)
    what = f"no model can be built from the config.json of {str(folder)!r}"
    with _refused_if_broken(what, "; repair it, or download it again"):
        return _on_meta(config, remote, dtype, attention)


def shallow_model(
    folder: Path, depth: int, dtype: torch.dtype, device: torch.device, attention: str, remote: bool
) -> PreTrainedModel:
    """The same architecture with `depth` layers and random weights, to measure memory and time."""
    install_attention(device)
    config = _load_config(folder, remote)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):  # per-layer lists such as layer_types
        if isinstance(value, list) and len(value) == text.num_hidden_layers and "layer" in name:
            setattr(text, name, (value * depth)[:depth])
    if getattr(text, "num_kv_shared_layers", 0):  # layers that reuse an earlier layer's keys
        text.num_kv_shared_layers = 0
    text.num_hidden_layers = depth
    what = f"{type(config).__name__} cannot be built with {depth} layers to measure on"
    with (
        _refused_if_broken(what, "; `dualsft run` does not need that"),
        torch.random.fork_rng(),
        torch.device(device),
    ):
        model: Any = _from_config(config, remote, dtype, attention)
    return model.to(device)


def choose_dtype(
    wanted: str, folder: Path, device: torch.device, remote: bool = False
) -> torch.dtype:
    """Resolve `model.dtype`.

    `auto` is fp32 on cpu and mps. On cuda it is the checkpoint's dtype, with fp16 replaced by bf16.
    """
    if wanted != "auto":
        if wanted == "float64" and reduction_dtype(device) != torch.float64:
            raise ConfigError(
                f"model.dtype: 'float64', but {device.type} does not support it; use float32, or "
                "model.device=cpu"
            )
        return DTYPES[wanted]
    if device.type != "cuda":
        return torch.float32
    config = _load_config(folder, remote)
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return stored if stored in (torch.float32, torch.float64) else torch.bfloat16


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    remote: bool = False,
) -> PreTrainedModel:
    """Load a language model in eval mode, from safetensors only; remote code only if enabled."""
    install_attention(device)
    config = _load_config(folder, remote)
    files = weight_files(folder)  # refuses missing, pickled and truncated weights
    what = f"no model can be built from the config.json of {str(folder)!r}"
    with _refused_if_broken(what, "; repair it, or download it again"):
        _refuse_larger(_on_meta(config, remote, dtype, attention), files, folder)
    with _refused_if_broken(f"{str(folder)!r} cannot be loaded"):
        model, report = _auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=remote,
            local_files_only=True,
            output_loading_info=True,
            **how_experts_run(dtype),
        )
    _refuse_incomplete(folder, report)
    model.config.return_dict = True  # a config.json may say otherwise
    model.to(device)
    # a NaN or infinity in the weights would make every score NaN hours later
    bad = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    if bad:
        raise ConfigError(
            f"model.path: {str(folder)!r} holds a weight that is not finite in {bad[0]} "
            f"({len(bad)} parameters in total); give finite weights, or set another model.dtype "
            "if they overflow in this one"
        )
    say_how_trained(model)
    return model.eval()


def _refuse_larger(model: PreTrainedModel, files: Sequence[Path], folder: Path) -> None:
    """Raise if config.json describes a far larger model than the weights can be.

    transformers would allocate it before it finds that the shapes differ.
    """
    described = sum(p.numel() for p in model.parameters())
    tables = sum(b.nbytes for b in model.buffers())
    stored = sum(file.stat().st_size for file in files)
    if described > LARGER * stored or tables > LARGER * stored + FREE_BYTES:
        what = f"{described:,} parameters and {tables:,} bytes of tables"
        raise ConfigError(
            f"model.path: {folder}: config.json describes {what}, and the weights have {stored:,} "
            f"bytes; repair config.json, or download the model again; {RAISE}"
        )


def _refuse_incomplete(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with missing weights, which would be random and differ between loads."""
    if unused := report["unexpected_keys"]:
        log.warning(
            "%s: the model does not use %d stored tensors; they will not be in the result (%s …)",
            folder.name,
            len(unused),
            min(map(str, unused)),
        )
    for key in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, report[key])):
            raise ConfigError(
                f"model.path: {str(folder)!r} lacks weights that its config.json requires "
                f"({len(names)} {key.replace('_', ' ')}: {', '.join(names[:3])} …); save the model "
                "again"
            )


def load_tokenizer(folder: Path, remote: bool = False) -> Any:
    """Load the folder's tokenizer; one without an end-of-sequence token is refused."""
    check_folder(folder, remote)
    risky = check_tokenizer(folder)
    settings = {"trust_remote_code": remote, "local_files_only": True}
    load = partial(AutoTokenizer.from_pretrained, folder, **settings)
    with _refused_if_broken(f"{str(folder)!r} has no usable tokenizer"):
        if risky:
            tried("loading it", load, MAX_LOAD_SECONDS, MAX_BUILD_MEMORY)
        tokenizer: Any = load()
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path: the tokenizer in {str(folder)!r} has no end-of-sequence token; set "
            "`eos_token` in its tokenizer_config.json"
        )
    return tokenizer


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The linear map from hidden states to logits; scoring applies it in chunks."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{type(model).__name__}: its output head is {type(head).__name__}, not a linear map; "
            "this model cannot be scored"
        )
    return head


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """The module that maps tokens to hidden states; the language model of a multimodal model."""
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    return decoder if any(m is embedding for m in decoder.modules()) else model.base_model


def text_parameters(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """The named parameters that text input uses: those of the text decoder and the output head."""
    parts = (text_decoder(model), model.get_output_embeddings())
    reached = {id(p) for part in parts if part is not None for p in part.parameters()}
    return [(name, p) for name, p in model.named_parameters() if id(p) in reached]


def accepts(module: nn.Module, argument: str) -> bool:
    """Whether the module's forward has a parameter of this name."""
    return argument in inspect.signature(module.forward).parameters


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear map with a known forward: nn.Linear, or GPT-2's Conv1D."""
    if "forward" in vars(module):  # patched on the instance, so the class's forward does not run
        return False
    kind = type(module)
    by_name = f"{kind.__module__}.{kind.__qualname__}" in _LINEAR_BY_NAME
    return kind.forward is nn.Linear.forward or kind is Conv1D or by_name


class Candidates(dict[str, nn.Parameter]):
    """The candidate parameters of a model, in `named_parameters` order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: str) -> None:
        super().__init__(parameters)
        self.spec = spec

    @property
    def names(self) -> list[str]:
        return list(self)

    @property
    def num_entries(self) -> int:
        """Number of candidate entries: the denominator of the parameter budget."""
        return sum(p.numel() for p in self.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of G and of every other vector over the candidates."""
        return accumulation_dtype(next(iter(self.values())).dtype)


def decoder_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the ModuleList of the text decoder's transformer blocks."""
    depth = model.config.get_text_config().num_hidden_layers
    inside = set(text_decoder(model).modules())
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in ((n, m) for n, m in model.named_modules() if m in inside):
        # a list inside a block may have the same length by chance
        nested = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not nested:
            found.append((name, module))
    if len(found) != 1:
        seen = ", ".join(name for name, _ in found) or "none"
        raise ConfigError(
            f"{type(model).__name__}: cannot determine which list of {depth} modules holds its "
            f"blocks (found: {seen}); name the candidates by patterns in score.candidates"
        )
    return found[0]


def find_candidates(model: PreTrainedModel, spec: str) -> Candidates:
    """Resolve `score.candidates` to parameters; a term that matches nothing is refused."""
    everything = dict(text_parameters(model))
    chosen: set[str] = set()
    terms = [term.strip() for term in spec.split(",") if term.strip()]
    excludes = [t[1:] for t in terms if t.startswith("!")]
    includes = [t for t in terms if not t.startswith("!")]
    for term in includes or ["block_linear"]:
        if term == "block_linear":
            matched = _block_linear(model, excludes, spec)
        else:
            pattern = "*" if term == "all" else term
            matched = {name for name in everything if fnmatchcase(name, pattern)}
        if not matched:
            near = ", ".join(list(everything)[:3])
            multimodal = len(everything) < len(list(model.parameters()))
            raise ConfigError(
                f"score.candidates: {term!r} matches no parameter of "
                f"{'the text decoder of ' if multimodal else ''}{type(model).__name__} "
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


def _block_linear(model: PreTrainedModel, excludes: list[str], spec: str) -> set[str]:
    """Every linear weight in a block; a matrix that is not a known linear map is refused.

    Norms, biases, other vectors, embeddings, convolution kernels and routers are not candidates.
    """
    prefix, blocks = decoder_blocks(model)
    routing = set(routers(blocks))
    names: set[str] = set()
    uncovered: dict[str, str] = {}
    for path, module in blocks.named_modules(prefix=prefix):
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}"
            if any(fnmatchcase(name, pattern) for pattern in excludes):
                continue
            linear = expert_weights(module) if is_experts(module) else ("weight",)
            if module in routing or (is_experts(module) and own.endswith("_bias")):
                continue
            if own in linear and (is_experts(module) or is_linear(module)):
                names.add(name)
            elif parameter.ndim >= 2 and not isinstance(module, nn.Embedding | nn.Conv1d):
                uncovered[name] = f"{type(module).__name__}, shape {tuple(parameter.shape)}"
    if uncovered:
        problems = [
            f"{name} ({uncovered[name]}) is a matrix inside a block that no exact rule covers{more}"
            for name, more in alike(uncovered)
        ]
        raise ConfigError([*problems, leave_out(spec, uncovered)])
    return names


def _any_layer(name: str) -> str:
    """A parameter's name as a pattern that matches it in every layer."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def alike(names: Iterable[str]) -> list[tuple[str, str]]:
    """The first of the names that differ only in the layer number, and how many follow it."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_any_layer(name), []).append(name)
    return [
        (group[0], f" (and {len(group) - 1} more like it)" if len(group) > 1 else "")
        for group in groups.values()
    ]


def leave_out(spec: str, names: Iterable[str]) -> str:
    """The cure in an error message: the setting that excludes these parameters in every layer."""
    patterns = dict.fromkeys(f"!{_any_layer(name)}" for name in names)
    return f"leave them out with score.candidates='{','.join([spec, *patterns])}'"


def locate(name: str) -> tuple[int | None, str]:
    """Layer number and module of a parameter: '…layers.3.mlp.up_proj.weight' → 3, 'mlp.up_proj'."""
    match = re.search(r"\.(\d+)\.(.+)$", name)
    if match is None:
        return None, name.removesuffix(".weight")
    return int(match[1]), match[2].removesuffix(".weight")


# --- attention ----------------------------------------------------------------------------------

_SDPA: Any = None
"""The "sdpa" function registered by transformers; None until `install_attention` replaces it."""


def install_attention(device: torch.device) -> None:
    """Replace transformers' "sdpa" for the rest of this process; no effect without CUDA.

    When several query heads share one key head and there is no attention mask, transformers calls
    PyTorch's scaled dot-product attention with `enable_gqa`. Only the half-precision kernels
    support it. In fp32, PyTorch silently falls back to the math kernel, which keeps a T × T matrix
    per head and layer for the backward pass and is about three times slower. Repeating the keys and
    values makes the memory-efficient kernel eligible: the result is the same up to rounding, and
    memory grows linearly with the number of tokens.
    """
    global _SDPA
    if _SDPA is None and device.type == "cuda":
        _SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa


def sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *more: Any,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' "sdpa", with shared key and value heads repeated if no kernel shares them."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and attention_mask is None and needs_repeated_heads(key):
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        # transformers passes enable_gqa if module.num_key_value_groups > 1; the stand-in has only
        # the other attributes that it reads
        module = SimpleNamespace(
            is_causal=getattr(module, "is_causal", True), layer_idx=getattr(module, "layer_idx", 0)
        )
    return _SDPA(module, query, key, value, attention_mask, *more, **settings)


def needs_repeated_heads(key: Tensor) -> bool:
    """Whether no kernel shares these heads: fp32 on CUDA.

    The memory-efficient kernel's backward pass is not deterministic, so nothing changes when
    deterministic algorithms are enabled.
    """
    fp32_on_gpu = key.device.type == "cuda" and key.dtype == torch.float32
    return fp32_on_gpu and not torch.are_deterministic_algorithms_enabled()
