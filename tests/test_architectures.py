"""Anyone's model: the engine against batch-of-one autograd on every architecture of the table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, table
from conftest import corpus_rows, small_run
from models import float64, tiny_examples, tiny_tokenizer
from safetensors.torch import load_file

from dualsft.algorithm.scores import check_fused_loss
from dualsft.config import settings
from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import LogitMap
from dualsft.engine.walk import PassSettings, cwsd_objective, loss_objective, walk
from dualsft.errors import ConfigError
from dualsft.model.load import (
    choose_device,
    choose_dtype,
    decoder_blocks,
    empty_model,
    find_candidates,
    load_model,
    text_parameters,
)
from dualsft.runs import pipeline
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter

QUIET = Reporter(lambda _: None)
TOLERANCE = 1e-11  # float64; the largest error measured over the whole table is 5e-15


def rows() -> list[Example]:
    """Eight rows of 4 to 12 tokens; none holds a token that a model reserves (90 and above)."""
    return [
        Example(e.id, e.index, list(e.input_ids), list(e.labels))
        for e in tiny_examples(8, VOCAB - 10, seed=1, max_length=12)
    ]


def how(side: str) -> PassSettings:
    return PassSettings(batch_tokens=40, pad_id=0, padding_side=side)


def direction_for(engine: GhostEngine) -> ParamVector:
    generator = torch.Generator().manual_seed(3)
    draw = {n: torch.randn(p.shape, generator=generator) for n, p in engine.candidates.items()}
    return ParamVector({n: t.to(engine.candidates.dtype) for n, t in draw.items()})


@pytest.mark.parametrize("kind", ["block_linear", "all"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_sums_and_bounds(name: str, kind: str) -> None:
    """G, ⟨U, g_n⟩, the loss and ‖g_n,l‖ ≤ bound, padded on either side, against autograd alone."""
    one = ARCHITECTURES[name]
    model = one.build()
    engine = GhostEngine(model, find_candidates(model, one.spec(kind)))
    names, examples = engine.candidates.names, rows()
    assert names
    direction = direction_for(engine)
    with float64(model):
        grads = [oracle.example_gradient(model, e.input_ids, e.labels, names) for e in examples]
        true = np.array([oracle.dot(g, dict(direction)) for g in grads])
        norms = np.array([[float(g[n].norm()) for n in names] for g in grads])
        losses = [float(oracle.example_loss(model, e.input_ids, e.labels)) for e in examples]
        total = oracle.add(grads)
        for side in ("right", "left"):
            sums = ParamVector.zeros(engine.candidates)
            result = walk(
                engine,
                examples,
                loss_objective(model),
                how(side),
                QUIET,
                "test",
                sums=sums,
                direction=direction,
                bounds=True,
            )
            assert np.abs(result.values - losses).max() <= TOLERANCE
            assert np.abs(result.dots - true).max() <= TOLERANCE * np.abs(true).max()
            assert (norms <= result.inner_sums * (1 + TOLERANCE) + 1e-14).all()
            for n in names:
                error = float((sums[n] - total[n]).norm())
                assert error <= TOLERANCE * float(total[n].norm()) + 1e-14, n


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_refusal_names_the_weights_and_the_cure(name: str) -> None:
    """What has no rule is refused by name; the settings in the message are those of the table."""
    one = ARCHITECTURES[name]
    model = one.build()
    for kind in ("block_linear", "all"):
        left_out = set(one.spec(kind).split(",")[1:])
        if not left_out:
            GhostEngine(model, find_candidates(model, kind))
            continue
        with pytest.raises(ConfigError, match="leave them out with") as caught:
            GhostEngine(model, find_candidates(model, kind))
        *named, cure = caught.value.problems
        found = cure.partition("score.candidates='")[2].rstrip("'").split(",")
        assert found[0] == kind and set(found[1:]) == left_out
        assert len(named) == len(left_out)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folder_loads_as_it_comes(name: str, tmp_path: Path) -> None:
    """Saved by transformers and loaded by us with the default settings: weights and names."""
    model = ARCHITECTURES[name].build(torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32, choose_device("cpu"))
    stored, read = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert type(loaded) is type(model) and stored.keys() == read.keys()
    assert all(torch.equal(p, read[n]) for n, p in stored.items())
    shapes = {n: p.shape for n, p in empty_model(tmp_path).named_parameters()}
    assert shapes == {n: p.shape for n, p in stored.items()}


SHAPED = [name for name in ARCHITECTURES if LogitMap.of(ARCHITECTURES[name].build()) != LogitMap()]


@pytest.mark.parametrize("name", SHAPED)
def test_cwsd_through_changed_logits(name: str) -> None:
    """Scaled and soft-capped logits on both sides of the distillation, and in its gradient."""
    one = ARCHITECTURES[name]
    teacher, student = (one.build(seed=seed) for seed in (0, 7))
    engine = GhostEngine(student, find_candidates(student, one.spec("all")))
    sums, examples = ParamVector.zeros(engine.candidates), rows()[:4]
    with float64(teacher), float64(student):
        objective = cwsd_objective(teacher, student, 2.0)
        result = walk(engine, examples, objective, how("right"), QUIET, "test", sums=sums)
        true = oracle.cwsd_gradient(teacher, student, examples, 2.0, engine.candidates.names)
        loss = float(oracle.cwsd_loss(teacher, student, examples, 2.0))
    assert result.values.mean() == pytest.approx(loss, rel=1e-10)
    for n, g in sums.scaled(1 / len(examples)).items():
        assert float((g - true[n]).norm()) <= 1e-10 * float(true[n].norm()) + 1e-14, n


def test_some_models_change_their_logits() -> None:
    assert {"gemma2", "granite", "cohere", "nanochat"} <= set(SHAPED)


def test_unknown_change_of_the_logits_is_refused() -> None:
    """A scale that the model applies and its configuration does not tell."""
    model = ARCHITECTURES["cohere"].build()
    check_fused_loss(model, rows()[0], how("right"), 1e-6)
    model.config.logit_scale = 1.0  # the model has read the true one already
    with pytest.raises(ConfigError, match=r"CohereForCausalLM: .* changes its logits"):
        check_fused_loss(model, rows()[0], how("right"), 1e-6)


WHOLE = [name for name, one in ARCHITECTURES.items() if one.whole]


@pytest.mark.parametrize("name", WHOLE)
def test_only_the_text_decoder_of_a_multimodal_model(name: str) -> None:
    model = ARCHITECTURES[name].build()
    reached = dict(text_parameters(model))
    unreached = {n for n, _ in model.named_parameters()} - reached.keys()
    assert unreached and not any("language_model" in n or "lm_head" in n for n in unreached)
    prefix, _ = decoder_blocks(model)
    assert "language_model" in prefix
    assert all(n.startswith(prefix) for n in find_candidates(model, "block_linear"))
    with pytest.raises(ConfigError, match="no parameter of the text decoder of"):
        find_candidates(model, "*vis*")


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer("Say alpha beta", return_tensors="pt").input_ids
logits = []
for kind in (AutoModelForImageTextToText, AutoModelForCausalLM):
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    missing = report["missing_keys"] if isinstance(report, dict) else report.missing_keys
    assert not missing, missing
    logits.append(model.eval()(input_ids=ids).logits)
assert torch.equal(*logits)
print(type(model).__name__, float(logits[0].sum()))
"""


def save_whole(name: str, folder: Path) -> Path:
    """A multimodal folder as a hub has it: weights, tokenizer, a processor's configuration."""
    texts = [f"{row['prompt']} {row['response']}" for row in corpus_rows()]
    tokenizer = tiny_tokenizer(texts)
    base = ARCHITECTURES[name].settings
    text = base["text_config"] | {
        "vocab_size": len(tokenizer) + 8,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    last = len(tokenizer) + 7
    tokens = {k: last - i for i, k in enumerate(k for k in base if k.endswith(("_id", "_index")))}
    model = ARCHITECTURES[name].build(torch.float32, text_config=text, **tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_size": 28}))
    return folder


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_whole_run_on_a_multimodal_folder(name: str, corpus: Path, tmp_path: Path) -> None:
    """From a saved folder to a result that transformers loads in a process of its own."""
    base = save_whole(name, tmp_path / "base")
    words = [*small_run(base, corpus), "select.data_budget=12", "warmup.min_steps=3"]
    folder = pipeline.run(settings.load(None, words), tmp_path / "run", None, QUIET)
    tuned = folder / "6_finetune/model"
    assert (tuned / "preprocessor_config.json").is_file()
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tuned)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = (load_file(f / "model.safetensors") for f in (base, tuned))
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed and all("language_model" in n and ".layers." in n for n in changed)
    delta: dict[str, Any] = load_file(folder / "6_finetune/delta.safetensors")
    assert {n.removesuffix(".idx") for n in delta if n.endswith(".idx")} <= {
        n for n, _ in ARCHITECTURES[name].build().named_parameters()
    }


def test_dtype_on_a_gpu_is_the_checkpoint_s(tmp_path: Path) -> None:
    """A multimodal configuration may state it at its top alone."""
    folder = save_whole("gemma3", tmp_path / "base")
    assert choose_dtype("auto", folder, torch.device("cuda")) == torch.float32
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].pop("dtype", None)
    for stored, expected in (("float32", torch.float32), ("float16", torch.bfloat16)):
        (folder / "config.json").write_text(json.dumps(config | {"dtype": stored}))
        assert choose_dtype("auto", folder, torch.device("cuda")) == expected


DOCS = (Path(__file__).parents[1] / "docs/models.md").read_text(encoding="utf-8")


def test_table_of_the_docs() -> None:
    """docs/models.md holds this very table."""
    assert table() in DOCS


def test_cure_of_the_docs() -> None:
    """The patterns that docs/models.md gives for mixtures of experts work."""
    without, routed = re.findall(r"score\.candidates='(block_linear,[^']+)'", DOCS)
    for name, spec in (("dbrx", without), ("qwen3_moe", routed)):
        model = ARCHITECTURES[name].build()
        names = GhostEngine(model, find_candidates(model, spec)).candidates.names
        assert names and any("gate.weight" in n for n in names) == (name == "qwen3_moe")
