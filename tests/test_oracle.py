"""The oracle itself against what it can be checked with: transformers and finite differences.

A wrong oracle would make a wrong package pass. Its losses are the model's own, its gradients the
slopes of these losses, and `check_run` notices a run folder in which one file is spoilt. Its AdamW
loops and its selection are those of torch and of a full sort because the package's are
(`test_optim.py`, `test_topk.py`) and runs equal the oracle (`test_run.py`).
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import Runner
from models import ARCHITECTURES, tiny_examples, tiny_model
from oracle import cosine_schedule, example_gradient, example_loss
from oracle_run import check_run, read_lines
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_example_loss_is_the_models_own(arch: str) -> None:
    model = tiny_model(arch)
    for e in tiny_examples(4, seed=1):
        own = model(input_ids=torch.tensor([e.input_ids]), labels=torch.tensor([e.labels])).loss
        assert float(example_loss(model, e.input_ids, e.labels).detach()) == pytest.approx(
            float(own.detach()), rel=1e-5
        )  # transformers computes its loss in float32


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradient_by_finite_differences(arch: str) -> None:
    """In a random direction over all parameters, the padding row left out (it gets no gradient)."""
    model, e = tiny_model(arch), tiny_examples(1, seed=2)[0]
    names = [name for name, _ in model.named_parameters()]
    gradient = example_gradient(model, e.input_ids, e.labels, names)
    gen = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(g.shape, generator=gen, dtype=g.dtype) for n, g in gradient.items()}
    if arch == "gemma3":
        direction["model.embed_tokens.weight"][0] = 0

    def loss_at(step: float) -> float:
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in shifted.named_parameters():
                parameter.add_(step * direction[name])
            return float(example_loss(shifted, e.input_ids, e.labels))

    slope = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    expected = sum(float((gradient[n] * direction[n]).sum()) for n in names)
    assert slope == pytest.approx(expected, rel=1e-6)


def test_cosine_schedule() -> None:
    rates = cosine_schedule(100, 2.0)
    assert rates[:4] == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0])
    assert rates[3 + 97 // 2] == pytest.approx(1 + math.cos(math.pi * (97 // 2) / 97))
    assert 0 < rates[-1] < 1e-3
    assert cosine_schedule(1, 2.0) == [2.0]
    assert len(cosine_schedule(34, 1.0)) == 34 and cosine_schedule(34, 1.0)[0] == 0.5


# ---------------------------------------------------------------- check_run


@pytest.fixture(scope="module")
def finished(shared_run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run, to be spoilt."""
    words = ("model.dtype=float64", "score.keep=all", "score.curvature_scale=1e4")
    run = shared_run(*words, until="selection")
    return Path(shutil.copytree(run, tmp_path_factory.mktemp("oracle") / "run"))


def spoil_vector(path: Path) -> None:
    vector = load_file(path)
    name = sorted(vector)[0]
    vector[name].view(-1)[vector[name].abs().argmax()] += 0.01 * float(vector[name].norm())
    save_file(vector, path)


def spoil_mask(path: Path) -> None:
    mask = load_file(path)
    name = next(n for n in mask if len(mask[n]))
    free = next(i for i in range(10**6) if i not in mask[name].tolist())
    mask[name][0] = free
    save_file({**mask, name: mask[name].sort().values}, path)


def spoil_scores(path: Path) -> None:
    rows = pq.read_table(path).to_pydict()
    rows["score"][1] += 2 * (rows["bound"][1] + 1)
    pq.write_table(pa.table(rows), path)


def spoil_selection(path: Path) -> None:
    source = yaml.safe_load((path.parents[1] / "config.yaml").read_text())["data"]["path"]
    chosen, lines = read_lines(path), read_lines(source)
    kept = [*chosen[:-1], next(line for line in lines if line not in chosen)]
    path.write_text("".join(line + "\n" for line in lines if line in kept))


def spoil_summary(path: Path) -> None:
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"u_dot_G": 2 * summary["u_dot_G"]}))


@pytest.mark.parametrize(
    ("file", "spoil", "key"),
    [
        ("3_gradients/grad_sum.safetensors", spoil_vector, "grad_sum"),
        ("3_gradients/val_grad.safetensors", spoil_vector, "val_grad"),
        ("3_gradients/prior_grad.safetensors", spoil_vector, "prior_grad"),
        ("4_scores/params.safetensors", spoil_vector, "param_scores"),
        ("2_warmup/curvature.safetensors", spoil_vector, "param_scores"),
        ("4_scores/examples.parquet", spoil_scores, "example_scores"),
        ("4_scores/summary.json", spoil_summary, "u_dot_G"),
        ("5_selection/mask.safetensors", spoil_mask, "mask"),
        ("5_selection/selected.jsonl", spoil_selection, "selection"),
    ],
)
def test_check_run_notices(
    finished: Path,
    model_folder: Callable[[str], Path],
    file: str,
    spoil: Callable[[Path], None],
    key: str,
) -> None:
    path = finished / file
    kept = path.read_bytes()
    try:
        spoil(path)
        report = check_run(finished, model_folder("llama"), 1e-6)
    finally:
        path.write_bytes(kept)
    assert report["ok"] is False
    assert report[key] is False or float(report[key]) > 1e-6
