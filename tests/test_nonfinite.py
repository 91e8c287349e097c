"""NaN and infinity: the work stops before an update or a write, and names step and rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Runner, small_run
from models import tiny_model, tiny_rows
from safetensors.torch import load_file, save_file

from dualsft.config import settings
from dualsft.data.examples import Batch
from dualsft.engine import losses
from dualsft.engine import walk as passes
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.errors import ConfigError, RunError
from dualsft.lab.check import check
from dualsft.lab.evaluation import stage as evaluation
from dualsft.model.load import find_candidates
from dualsft.runs.preflight import FOLDERS
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter
from dualsft.train import loop as training

QUIET = Reporter(lambda _: None)
BAD = [float("nan"), float("inf"), float("-inf")]


def spoiled(objective: Any, row: int, value: float, gradient: bool) -> Any:
    """The objective with one example's loss, or only its gradient, made non-finite."""
    poison = tiny_rows(11, 3)[row].input_ids

    def call(batch: Batch, observer: Any) -> Any:
        total, values = objective(batch, observer)
        rows = batch.input_ids[:, : len(poison)].tolist()
        if poison not in rows:
            return total, values
        if not gradient:
            values = values.clone()
            values[rows.index(poison)] = value
            return total, values
        return total * value, values

    return call


def walked(**spoil: Any) -> ParamVector:
    model = tiny_model("llama")
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    sums = ParamVector.zeros(engine.candidates)
    chosen = spoiled(loss_objective(model), **spoil) if spoil else loss_objective(model)
    settings = PassSettings(batch_tokens=40, pad_id=0, padding_side="right")
    walk(engine, tiny_rows(11, 3), chosen, settings, QUIET, "v_new", sums=sums)
    return sums


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("row", "gradient"), [(0, False), (7, False), (4, True)])
def test_a_loss_or_gradient_is_traced_to_its_row(row: int, gradient: bool, value: float) -> None:
    """Of a gradient behind a finite loss only the sum shows it: examples are walked one by one."""
    with pytest.raises(RunError) as stopped:
        walked(row=row, value=value, gradient=gradient)
    name = f"row {row + 1} ({tiny_rows(11, 3)[row].id})"
    known = f"is not finite for {name}" if gradient else f"the loss or gradient of {name} is not"
    assert known in str(stopped.value) and "nothing was written" in str(stopped.value)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_are_refused_at_load(
    make_run: Runner, model_folder: Callable[[str], Path], name: str, value: float, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"not finite in {name}"):
        make_run(f"model.path={folder}")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("factor", [0.0, 1e-40])
def test_weights_of_zero_are_named(
    make_run: Runner,
    model_folder: Callable[[str], Path],
    corpus: Path,
    factor: float,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    vanished = {name: weight * factor for name, weight in weights.items()}
    save_file(vanished, folder / "model.safetensors", metadata={"format": "pt"})
    [problem] = check(settings.load(None, small_run(folder, corpus)), QUIET)
    assert "is 0 in all candidates" in problem and f"weights of {folder} zero?" in problem
    make_run(f"model.path={folder}", until="scores")
    with pytest.raises(
        RunError, match=r"fishersft: the features .* are all 0.*another model\.path"
    ):
        make_run(f"model.path={folder}", "method.data=fishersft")


def poison_objective(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int, value: float
) -> None:
    """From its n-th call on, the function returns one non-finite value per example."""
    real, calls = getattr(module, name), [0]

    def spoil(*args: Any, **kwargs: Any) -> Any:
        result = list(real(*args, **kwargs))
        calls[0] += 1
        if calls[0] >= call:
            result[1] = torch.full_like(result[1], value)
        return tuple(result)

    monkeypatch.setattr(module, name, spoil)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("module", "name", "call", "stage"),
    [
        (training, "example_objective", 1, "warmup"),
        (training, "example_objective", 3, "warmup"),
        (passes, "example_objective", 2, "gradients"),
        (passes, "distillation_objective", 1, "gradients"),
    ],
)
def test_a_stage_stops_and_leaves_nothing(
    make_run: Runner,
    shared_run: Runner,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: Any,
    name: str,
    call: int,
    stage: str,
    value: float,
) -> None:
    with monkeypatch.context() as patch:
        poison_objective(patch, module, name, call, value)
        with pytest.raises(RunError) as stopped:
            make_run("resume.every=0")
    message = str(stopped.value)
    assert "not finite" in message and "nothing was" in message
    assert ("step" in message) == (stage == "warmup")
    folders = sorted(p.name for p in (tmp_path / "run").glob("[0-9]_*") if "." not in p.name)
    names = list(FOLDERS.values())
    assert folders == names[: names.index(FOLDERS[stage])], "only the stages before it"
    clean, again = (run("resume.every=0", until="finetune") for run in (shared_run, make_run))
    for file in ("5_selection/selected.jsonl", "6_finetune/delta.safetensors"):
        assert (again / file).read_bytes() == (clean / file).read_bytes()


@pytest.mark.parametrize("value", BAD)
def test_evaluation_refuses_to_write_what_is_no_number(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch, value: float, tmp_path: Path
) -> None:
    real = evaluation.comparison

    def spoil(*args: Any) -> losses.Comparison:
        both = real(*args)
        both.loss_after[0] = value
        return both

    monkeypatch.setattr(evaluation, "comparison", spoil)
    with pytest.raises(RunError, match=r"evaluation \(validation\): the loss of .* is not finite"):
        make_run()
    assert not (tmp_path / "run/7_evaluation").exists()


def test_a_model_of_zeros_is_named(
    model_folder: Callable[[str], Path], make_run: Runner, tmp_path: Path
) -> None:
    """No gradient reaches a block, so all scores are zero and select nothing better."""
    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "zeros"))
    weights = {n: torch.zeros_like(w) for n, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    run = make_run(f"model.path={folder}", until="selection")
    warnings = json.loads((run / "5_selection/manifest.json").read_text())["facts"]["warnings"]
    assert any("all scores are zero" in line for line in warnings), warnings
