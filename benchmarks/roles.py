"""Rows of the fidelity benchmarks, split into the roles of Algorithm 1 (its inputs).

Trained models use real rows and their own tokenizer; shapes with random weights use random tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.options import Options
from benchmarks.workload import SHAPES, make_pool
from dualsft.config.fields import DataConfig
from dualsft.data.corpus import builtin_file, builtin_names
from dualsft.data.examples import Example, tokenize
from dualsft.data.rows import read_rows
from dualsft.engine.walk import PassSettings
from dualsft.model.load import load_tokenizer, read_model_config
from dualsft.model.resolve import cache_root, resolve_model

ROWS = {"cpu": 40, "cuda": 4000}
SHARES = {"val": 0.1, "anchor": 0.1, "warm": 0.2}  # the rest is the pool


@dataclass(frozen=True)
class Roles:
    """The rows of each role, and the batching settings."""

    val: list[Example]
    anchor: list[Example]
    warm: list[Example]
    pool: list[Example]
    settings: PassSettings

    def counts(self) -> dict[str, int]:
        return {role: len(getattr(self, role)) for role in ("val", "anchor", "warm", "pool")}


def conditions(options: Options, roles: Roles) -> dict[str, Any]:
    """Model, data and role sizes, for the record."""
    return {
        "model": Path(options.real_model).name,
        "data": _data_name(options),
        "rows": roles.counts(),
        "pool_tokens": sum(e.num_tokens for e in roles.pool),
        "batch_tokens": options.batch_tokens,
    }


def _data_name(options: Options) -> str:
    if options.real_model in SHAPES:
        return "random tokens"
    return options.data.name if options.data else "built-in corpus"


def read_roles(options: Options, limit: int | None = None) -> Roles:
    """At most `limit` rows in source order, split into roles; random tokens for a shape."""
    if options.real_model in SHAPES:
        vocabulary, pad_id = SHAPES[options.real_model].vocabulary, 0
        examples = make_pool(limit or 40, vocabulary, 120)
    else:
        folder = resolve_model(options.real_model)
        tokenizer = load_tokenizer(folder)
        pad_id = tokenizer.pad_token_id or tokenizer.eos_token_id
        path = options.data or builtin_file(_builtin_corpus(), cache_root())
        template = "chat" if tokenizer.chat_template else "plain"
        config = DataConfig(
            path=str(path),
            template=template,
            prompt_field=options.fields[0] if options.fields else None,
            response_field=options.fields[1] if options.fields else None,
            max_length=1024,
            bad_rows="skip",
        )
        rows, report = read_rows(Path(path), config)
        limit = limit or (40 if options.quick else ROWS[options.device.type])
        model = read_model_config(folder)
        examples, _ = tokenize(
            rows[:limit],
            tokenizer,
            config,
            report,
            max_positions=model.max_position_embeddings,
            model_type=model.model_type,
        )
    roles, start = {}, 0
    for role, share in SHARES.items():
        count = max(2, int(share * len(examples)))
        roles[role] = examples[start : start + count]
        start += count
    settings = PassSettings(batch_tokens=options.batch_tokens, pad_id=pad_id, padding_side="right")
    return Roles(**roles, pool=examples[start:], settings=settings)


def _builtin_corpus() -> str:
    return next(name for name in builtin_names() if "corpus" in name)


@torch.no_grad()
def round_to_bf16(model: PreTrainedModel) -> None:
    """Round the weights to values that bf16 and wider dtypes represent exactly."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
