"""The warmup's own settings: what it moves, how its moments are kept, and what is done again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Runner
from safetensors.torch import load_file


def curvature(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "2_warmup/curvature.safetensors")


def theta_bar(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "2_warmup/theta_bar/model.safetensors")


def stages(said: list[str], word: str) -> list[str]:
    return [line.split("]")[0][1:] for line in said if f"] {word}" in line]


def test_only_candidates_move_when_told(make_run: Runner, model_folder) -> None:
    run = make_run("warmup.trainable=candidates", until="warmup")
    start = load_file(model_folder("llama") / "model.safetensors")
    moved = {name for name, w in theta_bar(run).items() if not torch.equal(w, start[name])}
    assert moved == set(curvature(run)) and "model.embed_tokens.weight" not in moved


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_smaller_moments_give_nearly_the_same_curvature(make_run: Runner, moments: str) -> None:
    few = ("warmup.min_steps=20", "warmup.epochs=1")
    exact = make_run(*few, until="warmup", out="exact")
    rough = make_run(*few, f"warmup.moments={moments}", until="warmup", out="rough")
    expected, got = curvature(exact), curvature(rough)
    assert expected.keys() == got.keys()
    a, b = (torch.cat([c[name].view(-1) for name in expected]) for c in (expected, got))
    assert not torch.equal(a, b)
    error = ((b - a) / a).square().mean().sqrt()
    assert float(error) < (0.02 if moments == "bfloat16" else 0.15)


def test_where_and_how_is_not_what(make_run: Runner) -> None:
    """Offloading and checkpointing redo nothing; another type of the moments does."""
    run = make_run(until="warmup")
    before = curvature(run)
    said: list[str] = []
    make_run("warmup.offload=true", "finetune.checkpointing=true", until="warmup", said=said)
    assert stages(said, "reused") == ["split", "warmup"]
    other = make_run("warmup.offload=true", until="warmup", out="other")
    after = curvature(other)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    said.clear()
    make_run("warmup.moments=bfloat16", until="warmup", said=said)
    again = next(line for line in said if line.startswith("[warmup] again"))
    assert "warmup.moments" in again and stages(said, "reused") == ["split"]


def test_fine_tuning_is_done_again_for_other_moments_alone(make_run: Runner) -> None:
    make_run(until="finetune")
    said: list[str] = []
    make_run("finetune.checkpointing=true", until="finetune", said=said)
    assert stages(said, "reused")[-1] == "finetune"
    said.clear()
    make_run("finetune.moments=int8", until="finetune", said=said)
    assert stages(said, "reused")[-1] == "selection"
    assert any("finetune.moments" in line for line in said if line.startswith("[finetune] again"))
