"""Workloads: models of a given shape with random weights, and pools with realistic lengths.

A shape costs as much as the trained model, and is created on the device in the dtype of the run
without a download. The rows of a pool are random tokens; their prompt and response lengths are
those of real rows (lengths.json documents their origin), half grade-school mathematics and half
code, so that padding, bucketing and the share of response tokens are realistic.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    OlmoeConfig,
    PreTrainedModel,
)

from dualsft.data.examples import Example, collate
from dualsft.engine.losses import Positions
from dualsft.model.load import find_candidates, load_model, output_head
from dualsft.model.resolve import resolve_model

LENGTHS = Path(__file__).parent / "lengths.json"
SOURCES = ("gsm8k_train", "code_sft")


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder; the head is tied to the embedding."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    config: type = LlamaConfig
    experts: dict[str, int] = field(default_factory=dict)

    def make(self) -> Any:
        return self.config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            use_cache=False,
            **self.experts,
        )


SHAPES = {
    "tiny": Shape(512, 64, 160, 2, 4, 2, 16),
    "small": Shape(8192, 256, 768, 6, 8, 4, 32),
    "smollm2-135m-shape": Shape(49152, 576, 1536, 30, 9, 3, 64),
    "llama-3.2-1b-shape": Shape(128256, 2048, 8192, 16, 32, 8, 64),
    "llama-3.2-3b-shape": Shape(128256, 3072, 8192, 28, 24, 8, 128),
    "gemma-2-9b-shape": Shape(256000, 3584, 14336, 42, 16, 8, 256, Gemma2Config),
    "olmoe-small-shape": Shape(
        8192, 512, 256, 4, 8, 8, 64, OlmoeConfig, {"num_experts": 16, "num_experts_per_tok": 4}
    ),
    "olmoe-shape": Shape(
        50304,
        2048,
        1024,
        16,
        16,
        16,
        128,
        OlmoeConfig,
        {"num_experts": 64, "num_experts_per_tok": 8},
    ),
}


def build_model(
    name: str, device: torch.device, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A shape with random weights, or a real model by name or folder; in eval mode.

    Without a dtype: bf16 on a GPU, fp32 on a CPU.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if name not in SHAPES:
        return load_model(resolve_model(name), dtype, device)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[name].make(), dtype=dtype)
    return model.to(device).eval()


def copy_as(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in another dtype."""
    return copy.deepcopy(model).to(dtype)  # pyright: ignore[reportArgumentType]


def make_pool(rows: int, vocabulary: int, longest: int | None = None) -> list[Example]:
    """Random tokens with the lengths of real rows, alternating sources; longer rows are skipped."""
    stored = json.loads(LENGTHS.read_text())
    lengths = [pair for pairs in zip(*(stored[s] for s in SOURCES), strict=True) for pair in pairs]
    fitting = [pair for pair in lengths if longest is None or sum(pair) <= longest]
    generator = torch.Generator().manual_seed(0)
    pool = []
    for i in range(rows):
        prompt, response = fitting[i % len(fitting)]
        ids = torch.randint(0, vocabulary, (prompt + response,), generator=generator).tolist()
        pool.append(Example(f"row-{i}", i, ids, [-100] * prompt + ids[prompt:]))
    return pool


def fixed_examples(rows: int, tokens: int, vocabulary: int) -> list[Example]:
    """`rows` examples of `tokens` random tokens each; the first quarter is the prompt."""
    generator = torch.Generator().manual_seed(1)
    prompt = tokens // 4
    examples = []
    for i in range(rows):
        ids = torch.randint(0, vocabulary, (tokens,), generator=generator).tolist()
        examples.append(Example(f"row-{i}", i, ids, [-100] * prompt + ids[prompt:]))
    return examples


def _active(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return sum(
        p.numel() * config.num_experts_per_tok // len(p) if p.ndim == 3 else p.numel()
        for p in find_candidates(model, "block_linear").values()
    )


@dataclass(frozen=True)
class Size:
    """Sizes for counting floating-point operations."""

    candidates: int
    """Entries that multiply a token: of routed experts, those of as many as it goes to."""
    head: int
    parameters: int
    tokens: int
    label_tokens: int

    @classmethod
    def of(cls, model: PreTrainedModel, pool: list[Example]) -> Size:
        labels = sum(
            len(Positions.of(collate([e], 0)).row_M) for e in pool
        )  # label positions, as the loss counts them
        return cls(
            candidates=_active(model),
            head=output_head(model).weight.numel(),
            parameters=sum(p.numel() for p in model.parameters()),
            tokens=sum(e.num_tokens for e in pool),
            label_tokens=labels,
        )

    def flops(self, products: float, head_products: int, every_logit: bool = False) -> float:
        """2 · (candidates · products · tokens + head entries · products · rows of logits).

        Attention scores, norms, recomputation and padding are not counted.
        """
        rows = self.tokens if every_logit else self.label_tokens
        return 2.0 * (self.candidates * products * self.tokens + self.head * head_products * rows)
