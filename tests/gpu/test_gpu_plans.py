"""On a CUDA device: every memory plan gives the numbers of the plan that holds everything.

And its promises: a smaller plan has a smaller peak, and the peak that the chooser predicts is the
one that a walk then has. Run there with `python -m pytest tests/gpu -m gpu`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_examples, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.memory.placement import BlockStream, blank, in_host_memory
from dualsft.memory.plans import Plan, Wishes
from dualsft.model.load import find_candidates
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter
from dualsft.system.usage import limit_memory

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PLANS: list[tuple[Any, bool]] = [
    ("device", True),
    ("host", False),
    ("host", True),
    ("blocks", False),
    ("blocks", True),
]


def rows(count: int, vocabulary: int, length: int = 0, seed: int = 3) -> list[Example]:
    """Examples of one length with every token a label, or the tiny ones of mixed lengths."""
    if not length:
        tiny = tiny_examples(count, vocabulary, seed)
        return [Example(e.id, e.index, list(e.input_ids), list(e.labels)) for e in tiny]
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, vocabulary, length).tolist() for _ in range(count)]
    return [Example(f"e{i}", i, ids, list(ids)) for i, ids in enumerate(tokens)]


def walked(model: Any, examples: list[Example], wishes: Wishes, tokens: int, spec: str) -> Any:
    """(results by name, the plans, bytes at the peak of the walk)."""
    engine = GhostEngine(model, find_candidates(model, spec))
    generator = torch.Generator().manual_seed(0)
    direction = ParamVector(
        {n: torch.randn(p.shape, generator=generator) for n, p in engine.candidates.items()}
    ).to(CUDA)
    sums = blank(engine.candidates, engine.candidates.dtype)
    plans: list[Plan] = []

    def note(label: str, plan: Plan, memory: int) -> None:
        plans.append(plan)
        torch.cuda.reset_peak_memory_stats()  # the trial is over

    said: list[str] = []
    settings = PassSettings(
        batch_tokens=tokens, pad_id=0, padding_side="right", wishes=wishes, note=note
    )
    objective, reporter = loss_objective(model), Reporter(said.append)
    result = walk(
        engine,
        examples,
        objective,
        settings,
        reporter,
        "pool",
        sums=sums,
        direction=direction,
        bounds=True,
    )
    peak = torch.cuda.max_memory_allocated()
    arrays = {n: torch.from_numpy(getattr(result, n)) for n in ("values", "dots", "inner_sums")}
    print(wishes, plans[-1].describe(), f"{peak / 2**20:.0f} MiB", said[-1:])
    return arrays | {name: block.cpu().clone() for name, block in sums.items()}, plans, peak


@pytest.mark.parametrize(("placement", "checkpointing"), PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_every_plan_equals_the_one_on_the_device(
    arch: str, dtype: torch.dtype, placement: Any, checkpointing: bool
) -> None:
    model = tiny_model(arch, dtype).cuda()
    examples = rows(40, 97)
    expected, plans, _ = walked(model, examples, Wishes(), 200, "all")
    assert plans[0].placement == "device" and not plans[0].checkpointing
    wishes = Wishes(placement=placement, checkpointing=checkpointing)
    got, plans, _ = walked(model, examples, wishes, 200, "all")
    assert [(p.placement, p.checkpointing) for p in plans] == [(placement, checkpointing)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, block in expected.items():
        error = float((got[name] - block).norm() / block.norm())
        assert error <= tolerance, (name, error)


def test_streamed_blocks_never_overtake_each_other() -> None:
    """Many turns of large blocks with long work on each: a lost event shows as a wrong sum."""
    names = [f"p{i}" for i in range(9)]
    target = {name: torch.zeros(1500 + 100 * i, 2000) for i, name in enumerate(names)}
    vector = ParamVector(target)
    factor = torch.randn(2000, 2000, device=CUDA)
    home: dict[str, torch.Tensor] = {}
    with in_host_memory(vector, names, home, lambda _: torch.float32, CUDA, pytest.fail):
        assert all(block.is_pinned() for block in home.values())
        streamed = BlockStream(home, CUDA)
        for turn in range(20):
            for i, name in enumerate(names if turn % 4 else reversed(names)):
                with streamed.changed(name) as block:
                    for _ in range(3):  # work that takes longer than a copy's launch
                        torch.mm(block, factor)
                    block.add_(float(turn + i % 3))
        streamed.flush()
    for name, block in home.items():
        i = names.index(name)
        turns = [(t, i % 3 if t % 4 else (len(names) - 1 - i) % 3) for t in range(20)]
        assert bool((block == sum(t + k for t, k in turns)).all()), name
    read = BlockStream(home, CUDA)
    for _ in range(5):
        for i in range(0, 9, 3):
            three = [read.read(name, torch.float32) for name in names[i : i + 3]]
            for block, name in zip(three, names[i : i + 3], strict=True):
                assert float(block.sum()) == pytest.approx(float(home[name].sum()), rel=1e-5)


def llama_300m() -> Any:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


@contextmanager
def fresh() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    limit_memory(CUDA, None)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("placement", ["device", "host", "blocks"])
def test_the_predicted_peak_is_the_peak(placement: Any, checkpointing: bool) -> None:
    with fresh():
        model = llama_300m()
        examples = rows(48, 32000, length=512)
        wishes = Wishes(placement=placement, checkpointing=checkpointing)
        _, plans, peak = walked(model, examples, wishes, 8192, "block_linear")
        predicted = plans[-1].peak
        assert len(plans) == 1 and predicted is not None
        assert abs(predicted - peak) <= 0.1 * peak, (predicted / peak, plans)


@pytest.mark.parametrize("gib", [9.0, 5.0, 3.0])
def test_a_run_stays_below_the_memory_it_may_use(gib: float) -> None:
    """model.memory: another plan is chosen, and nothing runs out on the way."""
    with fresh():
        model = llama_300m()
        examples = rows(48, 32000, length=512)
        expected, _, _ = walked(model, examples, Wishes(), 8192, "block_linear")
        torch.cuda.empty_cache()
        limit_memory(CUDA, gib)
        got, plans, peak = walked(model, examples, Wishes(memory=gib), 8192, "block_linear")
        assert len(plans) == 1, "the first plan fits"
        assert peak <= gib * 2**30
        for name, block in expected.items():
            assert float((got[name] - block).norm() / block.norm()) <= 2e-2, name
