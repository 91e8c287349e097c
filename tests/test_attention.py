"""Repeated key heads in fp32: the same numbers, asked of PyTorch in a form its kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, tiny_examples, tiny_model
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dualsft.data.examples import collate
from dualsft.engine.losses import example_objective
from dualsft.model import load as attention

GROUPED = ("llama", "qwen3", "qwen2", "llama_tied_bias")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, and as before afterwards."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setattr(attention, "_SDPA", None)
    attention.install_attention(torch.device("cuda"))
    yield
    ALL_ATTENTION_FUNCTIONS["sdpa"] = before


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """(query heads, key heads, whether sharing was asked for) of every call of PyTorch."""
    calls: list[tuple[int, int, bool]] = []
    own = functional.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, **more: Any) -> Any:
        calls.append((query.shape[1], key.shape[1], more.get("enable_gqa", False)))
        return own(query, key, value, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    return calls


def _gradients(arch: str) -> dict[str, torch.Tensor]:
    model = tiny_model(arch, dtype=torch.float64).eval()
    examples: Any = tiny_examples(3)
    batch = collate(examples, 0, "right", torch.device("cpu"))
    example_objective(model, batch)[0].backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_are_the_same(
    arch: str,
    installed: None,
    asked: list[tuple[int, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = _gradients(arch)
    if arch in GROUPED:  # transformers' own way, which fp32 kernels do not take
        assert any(shares and heads > keys for heads, keys, shares in asked)
    asked.clear()
    monkeypatch.setattr(attention, "needs_repeated_heads", lambda key: True)
    repeated = _gradients(arch)
    assert asked and all(heads == keys and not shares for heads, keys, shares in asked)
    for name, grad in plain.items():
        torch.testing.assert_close(repeated[name], grad, rtol=1e-9, atol=1e-12)


def test_only_where_no_kernel_shares_heads(installed: None) -> None:
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention.sdpa
    key = torch.zeros(1, 2, 3, 4)
    assert not attention.needs_repeated_heads(key)  # a CPU's kernel does
    on_gpu: Any = type("Key", (), {"device": torch.device("cuda"), "dtype": torch.float32})
    assert attention.needs_repeated_heads(on_gpu)
    on_gpu.dtype = torch.bfloat16
    assert not attention.needs_repeated_heads(on_gpu)
    on_gpu.dtype = torch.float32
    torch.use_deterministic_algorithms(True)
    try:
        assert not attention.needs_repeated_heads(on_gpu)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setattr(attention, "_SDPA", None)
    attention.install_attention(torch.device("cpu"))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
