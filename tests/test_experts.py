"""Routed experts beyond the table of architectures: sketches, idle experts, order, a whole run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from architectures import ARCHITECTURES
from conftest import corpus_rows, small_run
from models import float64, tiny_tokenizer
from safetensors.torch import load_file
from test_architectures import QUIET, TOLERANCE, direction_for, how, rows
from torch import Tensor

from dualsft.algorithm.calibration import sketch_of
from dualsft.algorithm.selection import per_expert
from dualsft.config import settings
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.sketch import Sketch
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.errors import ConfigError, RunError
from dualsft.model.delta import merge
from dualsft.model.load import find_candidates, load_model
from dualsft.runs import pipeline
from dualsft.storage.vectors import ParamVector

ROUTED = "block_linear,*.mlp.gate.weight"
DROPPED = 4  # an index of num_experts: a token without an expert in this slot


def engine_of(name: str, spec: str = "block_linear") -> GhostEngine:
    model = ARCHITECTURES[name].build()
    return GhostEngine(model, find_candidates(model, spec))


def observed(engine: GhostEngine, examples: Any, how: PassSettings, **more: Any) -> Any:
    with float64(engine.model):
        loss = loss_objective(engine.model)
        return walk(engine, examples, loss, how, QUIET, "test", **more)


def gradients(engine: GhostEngine) -> list[dict[str, Tensor]]:
    names = engine.candidates.names
    with float64(engine.model):
        return [oracle.example_gradient(engine.model, e.input_ids, e.labels, names) for e in rows()]


@pytest.mark.parametrize(
    ("name", "spec"),
    [("qwen2_moe", ROUTED), ("deepseek_v3", ROUTED), ("gpt_oss", "all,!*.sinks")],
)
def test_sketches_of_each_example(name: str, spec: str) -> None:
    """The sketch that a walk takes is that of the example's own gradient, and adds up to G's."""
    engine = engine_of(name, spec)
    sketch, sums = Sketch(60, 5, "test"), ParamVector.zeros(engine.candidates)
    found = observed(engine, rows(), how("left"), sums=sums, sketch=sketch).sketches
    for i, gradient in enumerate(gradients(engine)):
        expected = sketch_of(engine, sketch, ParamVector(gradient))
        assert float((found.row(i) - expected).norm()) <= TOLERANCE * float(expected.norm())
    total = sketch_of(engine, sketch, sums)
    assert float((found.total() - total).norm()) <= TOLERANCE * float(total.norm())
    covered = set(engine.linear_weights)
    assert any("experts.gate_up_proj" in n for n in covered) and not any(
        "bias" in n for n in covered
    )


@pytest.mark.parametrize("batch_tokens", [12, 400])
def test_neither_batches_nor_order_change_a_score(batch_tokens: int) -> None:
    engine = engine_of("olmoe", ROUTED)
    direction, examples = direction_for(engine), rows()
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(1)).tolist()
    given = {"direction": direction, "bounds": True}
    one = observed(engine, examples, how("right"), **given)
    shuffled = [examples[i] for i in order]
    two = observed(engine, shuffled, replace(how("right"), batch_tokens=batch_tokens), **given)
    for a, b in ((one.dots, two.dots), (one.inner_sums, two.inner_sums)):
        assert np.abs(a[order] - b).max() <= TOLERANCE * np.abs(a).max()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_idle_experts_and_tokens_without_one(name: str) -> None:
    """Expert 2 gets no token, some tokens no second expert: gradient zero there, not missing."""
    engine = engine_of(name)
    for block in engine.model.model.layers:
        router = block.mlp.gate if name == "mixtral" else block.mlp.router
        own = router.forward

        def routed(x: Tensor, own: Any = own) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, index = own(x)
            index = torch.where(index == 2, 3, index)
            if name == "mixtral":  # its plain forward knows tokens without an expert
                dropped = x[:, :1] > 0.3
                index = torch.where(dropped & (torch.arange(2) == 1), DROPPED, index)
            return logits, weights, index

        router.forward = routed
    sums, direction = ParamVector.zeros(engine.candidates), direction_for(engine)
    result = observed(engine, rows(), how("right"), sums=sums, direction=direction, bounds=True)
    true = gradients(engine)
    total = oracle.add(true)
    dots = np.array([oracle.dot(g, dict(direction)) for g in true])
    assert np.abs(result.dots - dots).max() <= TOLERANCE * np.abs(dots).max()
    for n in (n for n in engine.candidates if "experts" in n):
        assert float((sums[n] - total[n]).norm()) <= TOLERANCE * float(total[n].norm()), n
        assert not sums[n][2].any() and sums[n][3].any()


def other_forward(module: Any) -> None:
    kind = type(module)

    def forward(self: Any, *inputs: Tensor) -> Tensor:
        return 1.5 * kind.forward(self, *inputs)

    module.__class__ = type("Odd", (kind,), {"forward": forward})


def other_router(module: Any) -> None:
    kind = type(module)

    def forward(self: Any, x: Tensor) -> Any:
        return kind.forward(self, x + 0 * torch.nn.functional.linear(x, self.weight).sum())

    module.__class__ = type("Odd", (kind,), {"forward": forward})


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("experts", other_forward, "does not compute its experts as"),
        ("gate", other_router, "does not use its weight in one linear map"),
    ],
)
def test_what_computes_something_else_is_refused(part: str, change: Any, reason: str) -> None:
    engine = engine_of("mixtral", ROUTED)
    change(getattr(engine.model.model.layers[1].mlp, part))
    with pytest.raises(RunError, match=rf"layers.1.mlp.{part}.*Odd {reason}"):
        observed(engine, rows(), how("right"))


def test_tokens_in_another_order_are_refused() -> None:
    """A list of tokens that takes turns among the examples, as no rule reads it."""
    model = ARCHITECTURES["qwen2_moe"].build()
    block = model.model.layers[0].mlp
    own = type(block).forward
    block.forward = lambda x: own(block, x.transpose(0, 1).contiguous()).transpose(0, 1)
    with pytest.raises(ConfigError, match=r"layers.0.mlp.*cannot be separated"):
        GhostEngine(model, find_candidates(model, "block_linear"))


@pytest.mark.parametrize("method", ["smt", "lift", "s2ft", "model_shapley"])
def test_methods_for_matrices_are_refused(
    method: str, base: Path, corpus: Path, tmp_path: Path
) -> None:
    """They would give the whole budget to the attention; the cure in the message works."""
    words = [*small_run(base, corpus), f"method.params={method}", "method.data=random"]
    with pytest.raises(ConfigError, match="holds one per expert") as caught:
        pipeline.run(settings.load(None, words), tmp_path / "run", None, QUIET)
    cure = str(caught.value).partition("score.candidates='")[2].partition("'")[0]
    left = find_candidates(ARCHITECTURES["olmoe"].build(), cure)
    assert left and all(p.ndim == 2 for p in left.values())


def test_per_expert() -> None:
    shapes = {"a.experts.up": (3, 2, 2), "a.experts.down": (3, 1, 2), "a.conv.weight": (3, 1, 4)}
    indices = {"a.experts.up": [0, 3, 4], "a.experts.down": [1, 4], "a.conv.weight": [0]}
    found = per_expert({n: torch.tensor(i) for n, i in indices.items()}, shapes)
    assert found == {"a.experts": [3, 1, 1]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small OLMoE folder, whose files hold every expert apart."""
    folder = tmp_path_factory.mktemp("experts") / "base"
    tokenizer = tiny_tokenizer([f"{row['prompt']} {row['response']}" for row in corpus_rows()])
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = ARCHITECTURES["olmoe"].build(torch.float32, vocab_size=len(tokenizer), **special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_whole_run(base: Path, corpus: Path, tmp_path: Path) -> None:
    """Both modes choose alike; the model is the base and the delta, also in the files' names; a
    second command finds all stages done."""
    words = [*small_run(base, corpus), "warmup.min_steps=2", "finetune.epochs=1"]
    folders = [
        pipeline.run(
            settings.load(None, [*words, f"score.mode={mode}"]), tmp_path / mode, None, QUIET
        )
        for mode in ("one_pass", "two_pass")
    ]
    masks = [load_file(f / "5_selection/mask.safetensors") for f in folders]
    assert masks[0].keys() == masks[1].keys()
    assert all(torch.equal(index, masks[1][name]) for name, index in masks[0].items())
    assert len({(f / "5_selection/ids.json").read_text() for f in folders}) == 1
    summary = json.loads((folders[0] / "5_selection/summary.json").read_text())
    inside = [n for name, n in summary["per_module"].items() if "experts" in name]
    assert sum(map(sum, summary["per_expert"].values())) == sum(inside) > 0
    assert "| expert, of 8 |" in (folders[0] / "report.md").read_text()

    tuned = folders[0] / "6_finetune"
    merge(str(base), [tuned / "delta.safetensors"], tmp_path / "merged")
    merged, own = (
        load_file(f / "model.safetensors") for f in (tmp_path / "merged", tuned / "model")
    )
    assert merged.keys() == own.keys() == load_file(base / "model.safetensors").keys()
    assert all(torch.equal(value, own[name]) for name, value in merged.items())
    before, after = (
        dict(load_model(f, torch.float32, torch.device("cpu")).named_parameters())
        for f in (base, tuned / "model")
    )
    for name, p in before.items():
        changed = (p != after[name]).flatten().nonzero().flatten()
        assert torch.isin(changed, masks[0].get(name, changed[:0])).all(), name

    first = (tuned / "model/model.safetensors").read_bytes()
    (tuned / "manifest.json").unlink()  # as if it had been killed there
    pipeline.run(settings.load(None, [*words, "score.mode=one_pass"]), folders[0], None, QUIET)
    assert (tuned / "model/model.safetensors").read_bytes() == first
