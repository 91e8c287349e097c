"""`dualsft estimate`: every stage, what to change, the fit over layers, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import corpus_rows, small_run, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from test_cli import cli
from typer.testing import CliRunner
from worlds import short_training

import dualsft
from dualsft import cli as command_line
from dualsft.config import settings
from dualsft.config.settings import Config
from dualsft.data.examples import Example, collate, make_batches
from dualsft.lab.check import check
from dualsft.lab.estimate import estimate as estimation
from dualsft.lab.estimate import probe as probing
from dualsft.lab.estimate.probe import Memory, Probe, Walks, deeper, saved_bytes
from dualsft.lab.estimate.workload import Lengths, Machine, Training, Workload, batch_sizes, survey
from dualsft.memory.plans import GIB, HEADROOM, Activations, LinearFit
from dualsft.model.load import shallow_model
from dualsft.runs.preflight import FOLDERS

Folders = Callable[[str], Path]


def tokens(count: int, name: str = "e") -> Example:
    ids = [3 + i % 50 for i in range(count)]
    return Example(name, 0, ids, ids)


@pytest.fixture
def config(model_folder: Folders, corpus: Path) -> Config:
    return settings.load(None, small_run(model_folder("llama"), corpus))


# --- the whole ------------------------------------------------------------------------------------


def test_every_stage_has_a_line_and_nothing_is_written(config: Config, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = dualsft.estimate(config, tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before
    assert [stage.name for stage in found.stages] == list(FOLDERS)
    assert found.fits and all(stage.fits and not stage.cure for stage in found.stages)
    assert all(stage.host_bytes > 0 and stage.seconds > 0 for stage in found.stages)
    assert all(stage.device_bytes == 0 for stage in found.stages)  # the CPU is the host
    json.dumps(found.as_dict())


def test_only_the_stages_that_are_wanted(config: Config, tmp_path: Path) -> None:
    found = dualsft.estimate(config, tmp_path / "run", until="gradients")
    assert [stage.name for stage in found.stages] == ["split", "warmup", "gradients"]


def test_counts_and_shapes_are_those_of_a_run(
    config: Config, tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    found = dualsft.estimate(config, tmp_path / "other")
    run = make_run(until="selection")
    split = json.loads((run / "1_split/summary.json").read_text())
    assert found.num_rows == split["num_examples"]
    assert found.num_tokens == pytest.approx(split["num_tokens"], rel=0.01)
    roles = ", ".join(f"{role} {count:,}" for role, count in split["counts"].items())
    assert found.stages[0].note == roles
    summary = json.loads((run / "5_selection/summary.json").read_text())
    assert found.num_candidates == summary["denominator"]
    assert f"k = {summary['k']:,}" in found.stages[4].note
    gradients = run / "3_gradients"
    vectors = sum(path.stat().st_size for path in gradients.glob("*.safetensors"))
    assert found.stages[2].disk_bytes == pytest.approx(vectors, rel=0.1)


def test_sketches_alone_write_no_vectors(
    model_folder: Folders, corpus: Path, tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    words = ["score.form=calibrated", "score.sketch_dim=256", "method.params=random"]
    run = make_run(*words, "score.sketch_layers=1", until="gradients")
    stored = (run / "3_gradients/sketches.safetensors").stat().st_size
    for more in ("score.sketch_layers=1", "score.sketch_layers=1.0"):
        config = settings.load(None, [*small_run(model_folder("llama"), corpus), *words, more])
        found = dualsft.estimate(config, tmp_path / "other", until="gradients")
        assert found.stages[2].disk_bytes == pytest.approx(stored, rel=0.15)
        assert found.stages[2].disk_bytes < 4 * found.num_candidates


def test_blocks_that_are_not_sketched_cost_a_forward_pass(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five blocks the last two are walked through, and the first three run forward only."""

    def line(fixed: float, slope: float) -> LinearFit:
        return LinearFit(fixed, slope)

    def measured(_: object, __: object, model: object) -> Any:
        layers = model.config.num_hidden_layers  # type: ignore[attr-defined]
        walks = Walks(Memory(None, None), Memory(None, None), line(1 + 3 * layers, 5 * layers))
        found = Probe(
            warmup=Memory(None, None),
            finetune=Memory(None, None),
            walks=walks,
            wide=walks,
            forward=line(0, 0),
            step_seconds=line(0, 0),
            forward_seconds=line(1 + layers, 2 * layers),
            update_seconds=0.0,
        )
        return SimpleNamespace(probe=lambda: found)

    monkeypatch.setattr(probing, "_Measurement", measured)
    words = {"form": "calibrated", "sketch_layers": 0.4}
    part = replace(
        config,
        score=replace(config.score, **words),
        method=replace(config.method, params="random"),
    )
    ctx = estimation.RunContext(part, estimation.RunDir(tmp_path), estimation.Reporter(print))
    ctx.model_config.num_hidden_layers = 5
    walks = probing.probe(ctx, None).walks  # type: ignore[arg-type]
    assert walks.seconds == line(1 + 3 * 2 + 3, 5 * 2 + 2 * 3)


def pretend_gpu(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is said to be a GPU of this size; what a batch takes is still the CPU's."""
    real = estimation.this_machine

    def machine(ctx: estimation.RunContext, model_bytes: int, work: Workload) -> Machine:
        found = real(ctx, model_bytes, work)
        return replace(found, on_cpu=False, device_bytes=int(gib * GIB))

    monkeypatch.setattr(estimation, "this_machine", machine)


@pytest.mark.parametrize("gib", [0.001, 0.2])
def test_a_small_gpu_does_not_fit_and_settings_are_named(
    gib: float, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(gib, monkeypatch)
    config = replace(config, warmup=replace(config.warmup, moments="int8"))
    found = estimation.estimate(config, tmp_path / "run")
    assert found.device_memory == int(gib * GIB)
    assert all(stage.device_bytes > 0 for stage in found.stages[1:])
    assert found.fits == (gib > 0.1)
    for stage in found.stages:
        assert bool(stage.cure) != stage.fits
    if not found.fits:
        cures = {stage.name: stage.cure for stage in found.stages}
        named = [word for word in cures["warmup"].split() if "=" in word]
        assert named[:2] == ["warmup.offload=true", "warmup.trainable=candidates"]
        settings.load(None, ["model.path=m", "data.path=d", *(w.strip(",") for w in named)])
        assert "set finetune.moments=int8 or a lower data.max_length" in cures["finetune"]
        assert all("a GPU with" in cure for cure in cures.values() if cure)


# --- training -------------------------------------------------------------------------------------


def training(**changes: object) -> Training:
    """A billion whole parameters; a micro-batch of 1,000 tokens takes 1 GiB, or a quarter."""
    line = LinearFit(0.0, GIB / 1000)
    small = LinearFit(0.0, GIB / 4000)
    plan = short_training(lr=1e-5, batch_size=40, max_grad_norm=0.0, micro_batch_size=None)
    base = Training(
        num_entries=2**30,
        whole=True,
        moments="float32",
        offload=False,
        memory=Memory(Activations(line, line), Activations(small, small)),
        plan=plan,
        num_examples=40,
        lengths=Lengths(np.full(100, 100), 100),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def gpu(gib: float, dtype: torch.dtype = torch.bfloat16) -> Machine:
    return Machine(
        on_cpu=False,
        device_bytes=int(gib * GIB / (1 - HEADROOM)) + 1,
        host_bytes=64 * GIB,
        base=GIB,
        model_bytes=2**30 * dtype.itemsize,
        dtype=dtype,
    )


TEN = replace(training().plan, batch_size=10)
ANCHORS = (10, Lengths(np.full(50, 100), 100))
WHOLE, CUT = "1,000 tokens per micro-batch", "activations recomputed"


@pytest.mark.parametrize(
    ("changes", "machine", "device", "host", "note"),
    [
        # model 2, low half 2, moments 8, fp32 gradient sums 4, and 1 GiB for the batch
        ({}, gpu(100), 2 + 2 + 8 + 4 + 1, 0, WHOLE),
        ({"moments": "int8"}, gpu(100), 11, 0, WHOLE),
        ({}, gpu(100, dtype=torch.float32), 4 + 8 + 4 + 1, 0, WHOLE),
        ({"num_entries": 2**25, "whole": False}, gpu(100), 2 + (2 + 2 + 8 + 4) / 32 + 1, 0, WHOLE),
        # one micro-batch keeps its gradients in the type of the weights
        ({"plan": TEN, "num_examples": 10}, gpu(100), 2 + 2 + 8 + max(1, 2), 0, WHOLE),
        ({"offload": True}, gpu(100), 2 + 3 * 10 / 32 + 4 + 1, 10, WHOLE),
        # retention holds a second model, and always sums gradients
        ({"anchors": ANCHORS}, gpu(100), 2 + 17, 0, WHOLE),
        ({"plan": TEN, "num_examples": 10, "anchors": ANCHORS}, gpu(100), 2 + 17, 0, WHOLE),
        # the loop saves memory by itself before anything must be set
        ({}, gpu(17), 17, 0, WHOLE),
        ({}, gpu(16.5), 16.25, 0, f"{WHOLE}, {CUT}"),
        ({}, gpu(16.1), 16.1, 0, f"400 tokens per micro-batch, {CUT}"),
    ],
)
def test_bytes_of_training(
    changes: dict[str, object], machine: Machine, device: float, host: float, note: str
) -> None:
    found = training(**changes).peak(machine)
    assert machine.fits(found[0])
    assert (found[0] / GIB, found[1] / GIB) == pytest.approx((device, host))
    assert found[2] == note


def test_what_cannot_fit_does_not() -> None:
    assert not gpu(16).fits(training().peak(gpu(16))[0])


def test_the_estimate_of_a_run_with_retention(config: Config, tmp_path: Path) -> None:
    """A tight GPU: what does not fit names the setting."""
    more = replace(config, finetune=replace(config.finetune, retention=1.0))
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(0.0001, patch)
        cures = [dualsft.estimate(c, tmp_path / "run").stages[5].cure for c in (config, more)]
    assert "finetune.retention=0" in cures[1] and "finetune.retention=0" not in cures[0]


# --- the fit over layers and rows -----------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "qwen3"])
def test_one_and_two_layers_foretell_five(arch: str, model_folder: Folders) -> None:
    folder = model_folder(arch)
    device = torch.device("cpu")

    def line(layers: int) -> LinearFit:
        model = shallow_model(folder, layers, torch.float32, device, "auto", False)
        assert model.config.num_hidden_layers == layers
        points = []
        for rows in (2, 4):
            batch = collate([tokens(12)] * rows, 0)
            points.append((12 * rows, saved_bytes(model, batch)))
        return LinearFit.through(*points)

    foretold, real = deeper(line(1), line(2), 5), line(5)
    for count in (24, 48, 480):
        assert foretold.at(count) == pytest.approx(real.at(count), rel=0.02)
    assert real.at(480) > 2 * line(1).at(480)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60), most=st.integers(1, 200))
def test_batches_are_cut_as_the_walk_cuts_them(lengths: list[int], most: int) -> None:
    examples = [tokens(length, str(i)) for i, length in enumerate(lengths)]
    batches = make_batches(examples, most)
    padded = [len(rows) * max(lengths[i] for i in rows) for rows in batches]
    assert sorted(batch_sizes(np.sort(lengths)[::-1], most)) == sorted(padded)


def test_a_sample_of_the_rows_has_the_longest_and_the_mean(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ctx = estimation.RunContext(config, estimation.RunDir(tmp_path), estimation.Reporter(print))
    whole = survey(ctx)
    monkeypatch.setattr("dualsft.lab.estimate.workload.SAMPLE", 30)
    monkeypatch.setattr("dualsft.lab.estimate.workload.LONGEST", 5)
    some = survey(ctx)
    assert 30 <= len(some.lengths.sample) <= 60 < len(whole.lengths.sample)
    assert some.of("warm") is some.lengths
    assert some.counts == whole.counts
    assert some.longest.num_tokens == whole.longest.num_tokens
    assert some.num_tokens == pytest.approx(whole.num_tokens, rel=0.1)


def test_anchors_of_a_file_do_not_count_in_the_corpus(
    model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    anchors = write_jsonl(tmp_path / "anchors.jsonl", corpus_rows(20, seed=9))
    words = [f"data.anchor_path={anchors}", "split.anchor=null"]
    config = settings.load(None, [*small_run(model_folder("llama"), corpus), *words])
    said: list[str] = []
    ctx = estimation.RunContext(config, estimation.RunDir(tmp_path), estimation.Reporter(print))
    work = survey(ctx)
    assert work.counts == {"val": 12, "anchor": 20, "warm": 12, "pool": 96} and work.num_full == 120
    check(config, estimation.Reporter(said.append))
    assert "split: val 12, anchor 20, warm 12, pool 96" in said
    assert "would select 12 of 96 pool examples" in said


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_writes_json_alone(
    model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    words = small_run(model_folder("llama"), corpus)
    done = cli("estimate", *words, "--json", "e.json", cwd=tmp_path)
    assert all(name in done.stdout for name in FOLDERS)
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
    assert json.loads((tmp_path / "e.json").read_text())["fits"] is True


def test_the_exit_code_is_1_and_the_cure_is_printed_when_it_does_not_fit(
    model_folder: Folders, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(0.001, monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(command_line.console, "print", lambda text, **_: said.append(str(text)))
    done = CliRunner().invoke(
        command_line.app, ["estimate", *small_run(model_folder("llama"), corpus)]
    )
    assert done.exit_code == 1
    (line,) = [text for text in said if text.startswith("warmup does not fit: ")]
    assert "a GPU with" in line


def test_wrong_settings_are_refused_as_for_a_run(corpus: Path, tmp_path: Path) -> None:
    words = ("model.path=nowhere", f"data.path={corpus}", "lr=1")
    said = cli("estimate", *words, code=2, cwd=tmp_path).stderr
    assert "model.path" in said and "lr" in said
    assert "--until" in cli("estimate", "--until", "scoring", code=2, cwd=tmp_path).stderr
