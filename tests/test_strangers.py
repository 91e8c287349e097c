"""What a stranger's folder, model or moment may bring: found by a reviewer, kept as tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Runner, small_run
from faults import content
from models import tiny_examples, tiny_model
from places import place
from test_cli import cli

import dualsft
from dualsft.cli import _guarded, folder_config
from dualsft.data.examples import Batch, Example
from dualsft.errors import ConfigError
from dualsft.model.export import written_whole
from dualsft.model.load import empty_model
from dualsft.model.resolve import resolve_model
from dualsft.runs import folder as rundir
from dualsft.runs import pipeline
from dualsft.runs.folder import RunDir
from dualsft.runs.stages import finetune
from dualsft.storage.resume import Pieces
from dualsft.system import signals as interrupt
from dualsft.system.progress import Reporter
from dualsft.system.usage import Smaller
from dualsft.train import loop as training
from dualsft.train.loop import TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW

Folders = Callable[[str], Path]


def changed_copy(folder: Path, target: Path, name: str, **values: Any) -> Path:
    shutil.copytree(folder, target)
    file = target / name
    stored = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(stored | values))
    return target


def test_generation_settings_that_transformers_would_not_write(
    make_run: Runner, model_folder: Folders, tmp_path: Path
) -> None:
    """A temperature without sampling, as many published models have it: kept byte for byte."""
    name = "generation_config.json"
    values = {"temperature": 0.9, "top_p": 0.6}
    model = changed_copy(model_folder("llama"), tmp_path / "model", name, **values)
    run = make_run(f"model.path={model}")
    plain = make_run(out="plain")
    for folder in ("2_warmup/theta_bar", "6_finetune/model"):
        assert (run / folder / name).read_bytes() == (model / name).read_bytes()
        weights = [(r / folder / "model.safetensors").read_bytes() for r in (run, plain)]
        assert weights[0] == weights[1]


@pytest.mark.parametrize("foreign", [{"name": "my app"}, [], {"stages": 1}])
def test_somebody_else_s_folder_is_left_alone(tmp_path: Path, foreign: Any) -> None:
    """A manifest.json is a common name."""
    (tmp_path / "src.js").write_text("x")
    (tmp_path / "manifest.json").write_text(json.dumps(foreign))
    with pytest.raises(ConfigError, match="neither empty nor a run folder"):
        RunDir(tmp_path).create()
    assert json.loads((tmp_path / "manifest.json").read_text()) == foreign


def test_a_stage_folder_is_no_run_folder(make_run: Runner) -> None:
    run = make_run(until="split")
    before = content(run)
    with pytest.raises(ConfigError, match="neither empty nor a run folder"):
        RunDir(run / "1_split").create()
    assert content(run) == before


def test_a_refused_process_writes_nothing(tmp_path: Path) -> None:
    first = RunDir(tmp_path / "run").create()
    before = (first.path / "manifest.json").location.stat()
    with first.lock():
        done = cli("run", "--out", str(first.path), "model.path=x", code=2)
        assert "model.path" in done.stderr
        second = RunDir(first.path)
        with pytest.raises(dualsft.RunError, match="in use by process"):
            second.create()
    assert (first.path / "manifest.json").location.stat().st_ino == before.st_ino


def test_a_stage_command_keeps_the_settings_of_its_folder(make_run: Runner) -> None:
    run = make_run("score.lam=0.3", until="split")
    given = dualsft.load(str(run / "config.yaml"))
    assert folder_config(run, [f"model.path={given.model.path}"], "split") == given


def test_signal_while_a_finished_stage_is_kept(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It waits: the stage is whole, and the next start reuses it."""
    real = rundir.seal

    def seal(part: Path, body: Any) -> None:
        if part.name == "2_warmup.part":
            signal.raise_signal(signal.SIGTERM)
        real(place(part), body)

    monkeypatch.setattr(rundir, "seal", seal)
    with interrupt.handled(), pytest.raises(interrupt.Interrupted) as stopped:
        make_run()
    assert stopped.value.saved == "the stage warmup" and stopped.value.exit_code == 143
    names = sorted(p.name for p in (tmp_path / "run").glob("[0-9]*"))
    assert names == ["1_split", "2_warmup"]
    monkeypatch.undo()
    said: list[str] = []
    make_run(said=said)
    assert any("[warmup] reused" in line for line in said)


def test_signal_between_a_training_and_its_end_saves_the_training(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model is written nothing loops, but what the loop had is not lost."""
    clean = make_run(out="clean")

    def save(*args: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(finetune, "save_model", save)
    with interrupt.handled(), pytest.raises(interrupt.Interrupted) as stopped:
        make_run("resume.every=null")
    assert stopped.value.saved == "warmup: step 3 of 3"
    monkeypatch.undo()
    said: list[str] = []
    run = make_run(said=said)
    assert any("warmup: resuming after 3 of 3 steps" in line for line in said)
    assert content(run) == content(clean)


class Killed(BaseException):
    """Stands for a kill."""


def test_training_after_lack_of_memory_resumes_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The smaller cut is part of the saved state: fp32 sums depend on it in the last bit."""
    rows = [
        Example(e.id, e.index, list(e.input_ids), list(e.labels)) for e in tiny_examples(16, 97, 3)
    ]
    real = training.example_objective

    def objective(model: Any, batch: Batch, **options: Any) -> Any:
        if batch.input_ids.numel() > limit[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, batch, **options)

    monkeypatch.setattr(training, "example_objective", objective)
    limit = [30]

    def trained(pieces: Pieces, kill_at: int = 10**9) -> dict[str, torch.Tensor]:
        model = tiny_model("llama", torch.float32)
        plan = TrainingPlan(
            lr=1e-2,
            epochs=2,
            batch_size=8,
            warmup_ratio=0.1,
            max_grad_norm=1.0,
            micro_batch_size=8,
            batch_tokens=1000,
            seed=5,
            pad_id=0,
            padding_side="right",
        )

        def log(step: int = 0, **_: Any) -> None:
            if step > kill_at:
                raise Killed

        with SparseAdamW(model.named_parameters(), None, lr=1e-2, free_gradients=True) as optimizer:
            train(model, rows, optimizer, plan, Reporter(lambda _: None), "warmup", log, pieces)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = trained(Pieces())
    with pytest.raises(Killed):
        trained(Pieces(tmp_path / "s.work", "abc", every=0), kill_at=2)
    limit[0] = 10**9  # the machine has more memory now
    got = trained(Pieces(tmp_path / "s.work", "abc", every=0))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("key", "cure"),
    [
        ("score.batch_tokens", "score.batch_tokens=40"),
        ("evaluation.batch_tokens", "evaluation.batch_tokens=40"),
        ("finetune.micro_batch_size", "finetune.micro_batch_size=2"),
    ],
)
def test_lack_of_memory_names_the_setting_that_governs_it(key: str, cure: str) -> None:
    assert f"set {cure} to start so" in str(Smaller.than((4, 20), MemoryError(), key))


def test_export_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part/thesis.txt").write_text("mine")
    with written_whole(tmp_path / "out") as part:
        part.write_text("new")
    assert (tmp_path / "out.part/thesis.txt").read_text() == "mine"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o666 & ~current_umask()
    with pytest.raises(ValueError, match="stop"), written_whole(tmp_path / "other") as part:
        part.write_text("half")
        raise ValueError("stop")
    assert sorted(os.listdir(tmp_path)) == ["out", "out.part"]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_damaged_model_of_a_run_is_not_taken(make_run: Runner) -> None:
    run = make_run()
    model = run / "6_finetune/model"
    assert resolve_model(str(model)) == model
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match="not what its run wrote.*model.safetensors"):
        resolve_model(str(model))


@pytest.mark.parametrize("key", ["data.path", "evaluation.prompt", "model.path"])
def test_names_that_are_not_utf8(key: str) -> None:
    given = ["model.path=m", "data.path=d.jsonl"]
    with pytest.raises(ConfigError, match=f"{key}.*not UTF-8"):
        dualsft.load(None, [*given, f"{key}=bad\udcff"])
    with pytest.raises(ConfigError, match="--out.*not valid UTF-8"):
        RunDir("bad\udcff").create()


def test_a_shard_that_is_cut_short_is_named(model_folder: Folders, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder("llama"), model)
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ConfigError, match="model.safetensors: .*truncated; download"):
        resolve_model(str(model))


@pytest.mark.parametrize("values", [{"hidden_act": "zork"}, {"pad_token_id": 99999}])
def test_a_configuration_that_makes_no_model(
    model_folder: Folders, tmp_path: Path, values: dict[str, Any]
) -> None:
    model = changed_copy(model_folder("llama"), tmp_path / "model", "config.json", **values)
    with pytest.raises(ConfigError, match="no model can be built from the config.json of"):
        empty_model(model)


def test_the_quickstart_keeps_its_task() -> None:
    done = cli("quickstart", "select.variant=param", "evaluation.prompt=null", code=2)
    assert "select.variant: cannot be changed in the quickstart" in done.stderr
    assert "evaluation.prompt: cannot be changed" in done.stderr


def test_debug_may_stand_anywhere(tmp_path: Path) -> None:
    done = cli("methods", "--debug")
    assert "dualsft" in done.stdout


def test_what_nobody_foresaw_is_one_line(
    model_folder: Folders,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:

    def fails(problem: Exception) -> Callable[[], None]:
        def action() -> None:
            raise problem

        return action

    assert _guarded(fails(KeyError("x")), debug=False) == 1
    assert _guarded(fails(torch.OutOfMemoryError("CUDA out of memory")), debug=False) == 1
    said = capsys.readouterr().err
    assert "unexpected KeyError" in said and "--debug" in said
    assert "out of memory" in said and "score.batch_tokens" in said


def test_leftovers_of_killed_processes_go_away(make_run: Runner) -> None:
    run = make_run()
    for name in ("6_finetune.part", "3_gradients.work"):
        (run / name).mkdir()
    (run / ".manifest.json.123.tmp").write_text("half")
    make_run()
    assert not [n for n in os.listdir(run) if n.endswith((".part", ".work", ".tmp"))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [5, 10**6]}, "outside the model's vocabulary"),
        ({"labels": [-100]}, "2 ids but 1 labels"),
        ({"labels": [-100, -100]}, "only labels of -100"),
    ],
)
def test_examples_of_the_api_are_checked(change: dict[str, Any], message: str) -> None:
    model = tiny_model("llama", torch.float32)
    good = Example("a", 0, [5, 6], [-100, 6])
    bad = Example(**{"id": "b", "index": 1, "input_ids": [5, 6], "labels": [-100, 6]} | change)
    with pytest.raises(ConfigError, match=rf"pool\[1\] \(b\) has .*{message}"):
        dualsft.score(model, [good, bad], [good], eta_ft=1e-3)
    with pytest.raises(ConfigError, match="eta_ft"):
        dualsft.score(model, [good], [good], eta_ft=-1e-3)


def test_a_device_that_is_not_there_is_said_first(
    model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    words = [*small_run(model_folder("llama"), corpus), "model.device=cuda"]
    with pytest.raises(ConfigError, match="no cuda device"):
        pipeline.run(dualsft.load(None, words), tmp_path / "run", None, Reporter(lambda _: None))
    assert not (tmp_path / "run/1_split").exists()
