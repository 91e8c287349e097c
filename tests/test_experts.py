"""Routed experts beyond the table of architectures: sketches, idle experts, order, a whole run."""

from __future__ import annotations

import json
import shutil
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
from torch import Tensor, nn

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
    """The sketch that a walk takes is that of the example's own gradient, beside all else."""
    engine = engine_of(name, spec)
    compare(engine, how("left"))
    covered = engine.linear_weights
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


class Expert(nn.Module):
    """An expert as a module of its own, with a bias."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


class SeparateExperts(nn.Module):
    """A layer whose experts are a ModuleList, with one of several ways to select their tokens."""

    def __init__(self, hidden: int, way: str) -> None:
        super().__init__()
        self.gate, self.way = nn.Linear(hidden, 3, bias=False), way
        self.experts = nn.ModuleList(Expert(hidden, 8) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights, index = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            token, slot = token.flip(0), slot.flip(0)  # no order may be assumed
            if self.way == "index_select":
                x = flat.index_select(0, token)
            elif self.way == "three dimensions":
                x = flat[None, token]
            else:
                x = flat[token] if self.way == "getitem" else flat[token] * 1.0
            out.index_add_(0, token, expert(x).flatten(0, -2) * weights[token, slot, None])
        return out.view_as(hidden)


def separate(way: str) -> Any:
    """A tiny Llama with such a layer in place of its last MLP."""
    model = ARCHITECTURES["llama"].build()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model.model.layers[1].mlp = SeparateExperts(32, way).double()
    return model


@pytest.mark.parametrize("way", ["getitem", "index_select", "three dimensions"])
def test_experts_that_are_modules(way: str) -> None:
    """Sums, dots, bounds and sketches, with routers and biases, and one expert without a token."""
    model = separate(way)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[2].zero_()
        model.model.layers[1].mlp.gate.weight[:2].mul_(9.0)
    everything = GhostEngine(model, find_candidates(model, "all"))
    compare(everything, PassSettings(batch_tokens=40, pad_id=0, padding_side="left"))
    default = find_candidates(model, "block_linear").names
    assert "model.layers.1.mlp.experts.2.down.weight" in default
    assert not any("gate.weight" in n for n in default)


def compare(engine: GhostEngine, how: PassSettings) -> None:
    """A walk against the gradient of each example by plain autograd."""
    sketch, sums = Sketch(60, 5, "test"), ParamVector.zeros(engine.candidates)
    direction, names = direction_for(engine), engine.candidates.names
    given = {"direction": direction, "bounds": True, "sketch": sketch, "sums": sums}
    found = observed(engine, rows(), how, **given)
    true = gradients(engine)
    dots = np.array([oracle.dot(g, dict(direction)) for g in true])
    assert np.abs(found.dots - dots).max() <= TOLERANCE * np.abs(dots).max()
    norms = np.array([[float(g[n].norm()) for n in names] for g in true])
    assert (norms <= found.inner_sums * (1 + TOLERANCE) + 1e-14).all()
    assert np.isfinite(found.inner_sums).all()
    total = oracle.add(true)
    for n in names:
        assert float((sums[n] - total[n]).norm()) <= TOLERANCE * float(total[n].norm()) + 1e-14, n
    for i, gradient in enumerate(true):
        expected = sketch_of(engine, sketch, ParamVector(gradient))
        assert float((found.sketches.row(i) - expected).norm()) <= 1e-11 * float(expected.norm())


def test_tokens_that_cannot_be_followed_are_refused() -> None:
    model = separate("multiplied")
    with pytest.raises(ConfigError, match=r"mlp.experts.*cannot be separated") as caught:
        GhostEngine(model, find_candidates(model, "block_linear"))
    cure = str(caught.value).partition("score.candidates='")[2].partition("'")[0]
    left = GhostEngine(model, find_candidates(model, cure)).candidates
    assert left and not any("experts" in n for n in left)


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
    shapes |= {f"b.experts.{i}.up.weight": (2, 2) for i in range(3)}
    picks = {"a.experts.up": [0, 3, 4], "a.experts.down": [1, 4], "b.experts.1.up.weight": [0, 3]}
    indices = {name: torch.tensor(index) for name, index in picks.items()}
    assert per_expert(indices, shapes) == {"a.experts": [3, 1, 1], "b.experts": [0, 2, 0]}
    assert per_expert({"a.conv.weight": torch.tensor([0])}, shapes) == {}


def test_config_json_does_not_say_how_experts_run(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some implementations download kernels; the loss of the routers is no part of ours."""
    folder = tmp_path / "other"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"experts_implementation": "deepgemm", "output_router_logits": True}
    (folder / "config.json").write_text(json.dumps(config))
    for dtype, expected in ((torch.float32, "grouped_mm"), (torch.float64, "eager")):
        model = load_model(folder, dtype, torch.device("cpu"))
        assert model.config._experts_implementation == expected
    assert "auxiliary loss of the routers is no part" in caplog.text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small OLMoE folder, whose files hold every expert apart."""
    folder = tmp_path_factory.mktemp("experts") / "base"
    tokenizer = tiny_tokenizer([f"{row['prompt']} {row['response']}" for row in corpus_rows()])
    special: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = ARCHITECTURES["olmoe"].build(torch.float32, 0, vocab_size=len(tokenizer), **special)
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
