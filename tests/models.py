"""Tiny random models, examples and tokenizers for the tests.

Six architectures that between them have every kind of weight that scoring must know: grouped-query
attention, tied and untied heads, biases, Conv1D, q/k norms, (1 + w) norms, a sliding window short
enough to matter, a padding row in the embedding (gemma3: token 0 occurs in the examples as well).
Every weight is random, norm weights and biases too, so that a wrong rule cannot hide behind a
constant. In float64 the models are float64 throughout (see `exact_norms`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dualsft.data.examples import Example
from dualsft.engine.sketch import SketchRows
from dualsft.train.loop import TrainingPlan

ARCHITECTURES = ("llama", "gemma3", "qwen3", "qwen2", "gpt2", "llama_tied_bias")

CHAT_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

DEFAULT_TEXTS = (
    "Question: what is two plus three? Answer: five.",
    "Write the word backwards: stone becomes enots, and river becomes revir.",
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
)


@dataclass(frozen=True, slots=True)
class TinyExample:
    """A tokenised row; the same fields as the package's own Example."""

    id: str
    index: int
    input_ids: Sequence[int]
    labels: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_response_tokens(self) -> int:
        return sum(label != -100 for label in self.labels[1:])


def tiny_model(
    arch: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    vocab_size: int = 97,
    dropout: float = 0.0,
    **overrides: Any,
) -> Any:
    """A two-layer model of `arch`, random weights, eval mode; `overrides` go to its config."""
    if arch not in _BUILDERS:
        raise ValueError(f"arch={arch!r}: one of {', '.join(ARCHITECTURES)}")
    config_class, model_class, settings = _BUILDERS[arch]
    if arch == "gpt2":
        rates: dict[str, Any] = {f"{k}_pdrop": dropout for k in ("resid", "embd", "attn")}
    else:
        rates = {"attention_dropout": dropout}
    config = config_class(vocab_size=vocab_size, **{**settings, **rates, **overrides})
    with torch.random.fork_rng():
        model: Any = model_class(config)
    model.to(dtype)
    _randomise(model, seed)
    if dtype == torch.float64:
        exact_norms(model)
    return model.eval()


def tiny_examples(
    n: int, vocab: int = 97, seed: int = 0, max_length: int = 15
) -> list[TinyExample]:
    """`n` rows of 4 to `max_length` tokens; one in four has a response in two pieces."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    examples = []
    for index in range(n):
        length = draw(4, max_length)
        ids = [draw(0, vocab - 1) for _ in range(length)]
        start = draw(1, length - 1)
        labels = [-100] * start + ids[start:]
        if index % 4 == 3 and length - start >= 3:
            labels[start + 1] = -100
        examples.append(TinyExample(f"{seed}-{index}", index, ids, labels))
    return examples


def tiny_rows(n: int, seed: int = 0) -> list[Example]:
    """The rows of `tiny_examples` as the package's own examples."""
    rows = tiny_examples(n, 97, seed)
    return [Example(e.id, e.index, list(e.input_ids), list(e.labels)) for e in rows]


def tiny_plan(**changes: Any) -> TrainingPlan:
    """A plan of few small steps for the training loop."""
    values: dict[str, Any] = {
        "lr": 1e-3,
        "epochs": 2,
        "batch_size": 4,
        "warmup_ratio": 0.03,
        "max_grad_norm": 0.0,
        "micro_batch_size": None,
        "batch_tokens": 64,
        "seed": 3,
        "pad_id": 0,
        "padding_side": "right",
    }
    return TrainingPlan(**(values | changes))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """The same names and the same bits."""
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def tiny_tokenizer(
    texts: Sequence[str] = DEFAULT_TEXTS, bos: bool = False, vocab_size: int = 320
) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `texts`, with eos, pad, a chat template and, if asked, a bos.

    With `bos` the tokenizer adds it by itself and the chat template writes it too, as those of
    many real models do: rendering first and tokenising afterwards would then double it.
    """
    specials = ["<pad>", "<eos>"] + (["<bos>"] if bos else [])
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(texts), trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A $B",
            special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        bos_token="<bos>" if bos else None,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_folder(
    path: str | Path,
    arch: str = "llama",
    texts: Sequence[str] = DEFAULT_TEXTS,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    bos: bool = False,
    **overrides: Any,
) -> Path:
    """Write a tiny model and its tokenizer as a Hugging Face folder; return the folder.

    The logits are eight wider than the tokenizer, as padded vocabularies are.
    """
    folder = Path(path)
    tokenizer = tiny_tokenizer(texts, bos=bos)
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    model = tiny_model(arch, dtype, seed, len(tokenizer) + 8, **{**ids, **overrides})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_SHARED: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_GEMMA = {
    **_SHARED,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_TIED_BIAS = {**_SHARED, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
_EXPERTS = {
    **_SHARED,
    "head_dim": 8,
    "num_local_experts": 3,  # three rows on two processes: one has an expert more
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "experts_implementation": "eager",
}
_BUILDERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {**_SHARED, "tie_word_embeddings": False}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _GEMMA),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {**_SHARED, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {**_SHARED, "tie_word_embeddings": False}),
    "gpt2": (GPT2Config, GPT2LMHeadModel, _GPT2),
    "llama_tied_bias": (LlamaConfig, LlamaForCausalLM, _TIED_BIAS),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, _EXPERTS),
}


def _randomise(model: nn.Module, seed: int) -> None:
    """Draw every weight from one generator, in the order of `named_parameters`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise.to(parameter.dtype))
            else:
                parameter.copy_(0.2 * noise)


def exact_norms(model: nn.Module) -> None:
    """Let RMSNorm compute in float64.

    transformers casts its input to float32, which rounds activations and, not linearly, the
    gradients that pass: two correct computations would then agree to 1e-7 only. `tiny_model`
    does this for float64; a float64 model loaded from a folder needs it too. (The rotary tables
    stay float32: left padding is exact only with position_ids that start at 0 on each row.)
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            forward = _gemma_norm if hasattr(module, "eps") else _llama_norm
            module.forward = types.MethodType(forward, module)


def _llama_norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class _Wide(TorchFunctionMode):
    """A cast of float64 to float32 changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        given = dict(kwargs or {})
        wide = any(isinstance(a, torch.Tensor) and a.dtype == torch.float64 for a in args)
        if wide and func is torch.Tensor.float:
            return args[0]
        if wide and func is torch.Tensor.type and args[1:] == (torch.float32,):
            return args[0]
        if wide and func is torch.Tensor.to:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if wide and given.get("dtype") is torch.float32:
            given["dtype"] = torch.float64
        if wide and getattr(func, "__name__", "") in ("matmul", "__matmul__"):
            args = tuple(a.double() if isinstance(a, torch.Tensor) else a for a in args)
        return func(*args, **given)


@contextmanager
def float64(model: nn.Module) -> Iterator[None]:
    """Compute in float64 throughout, also in a norm that the backward calls again.

    Norms, rotary tables and softmax of many models cast to float32, which rounds gradients not
    linearly: two correct computations would then agree to 1e-7 only.
    """

    def wide(forward: Any, *args: Any, **kwargs: Any) -> Any:
        with _Wide():
            return forward(*args, **kwargs)

    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    for module in norms:
        module.forward = partial(wide, module.forward)
    try:
        with _Wide():
            yield
    finally:
        for module in norms:
            del module.forward


def rows_of(sketches: Tensor, exact: bool = False) -> SketchRows:
    """Sketches in memory as `SketchRows`."""
    rows = SketchRows(len(sketches), sketches.shape[1], exact)
    rows.add(range(len(sketches)), sketches.cpu().numpy())
    return rows
