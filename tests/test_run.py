"""Whole runs recomputed from their folders by the oracle, and what they promise."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import oracle_run
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Runner, corpus_rows, small_run, write_jsonl
from faults import content, cut_off
from models import (
    ARCHITECTURES,
    assert_equal,
    snapshot,
    tiny_model,
    tiny_plan,
    tiny_rows,
)
from places import place
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dualsft
from dualsft.data.examples import Batch, Example, training_order
from dualsft.errors import ConfigError, RunError
from dualsft.model.delta import written_whole
from dualsft.model.resolve import resolve_model
from dualsft.runs import folder as rundir
from dualsft.runs import pipeline
from dualsft.runs.stages import finetune, scores
from dualsft.storage.resume import Pieces
from dualsft.system import signals as interrupt
from dualsft.system.progress import Reporter
from dualsft.train import loop as training
from dualsft.train.loop import train
from dualsft.train.optimizer import SparseAdamW

Folders = Callable[[str], Path]
F64 = ("model.dtype=float64", "score.keep=all")
VECTORS = ("grad_sum", "val_grad", "prior_grad", "projection", "param_scores", "example_scores")


def check(run: Path, model: Path, corpus: Path, tolerance: float) -> dict[str, float | bool]:
    report = oracle_run.check_run(run, model, tolerance, source=corpus)
    assert set(VECTORS) <= report.keys()
    wrong = {name: report[name] for name in VECTORS if not report[name] <= tolerance}
    assert not wrong and report["mask"] and report["selection"] and report["ok"]
    return report


# Hugging Face norms compute in fp32 inside a float64 model, and gemma3's amplify it
RUN_TOLERANCE = {"gemma3": 1e-5}


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_run_folder_equals_the_oracle(
    arch: str, mode: str, make_run: Runner, model_folder, corpus: Path
) -> None:
    run = make_run(*F64, f"score.mode={mode}", arch=arch, until="selection")
    check(run, model_folder(arch), corpus, RUN_TOLERANCE.get(arch, 1e-8))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_parameters_as_candidates(
    arch: str, make_run: Runner, model_folder, corpus: Path
) -> None:
    """Embeddings, norms, biases and a tied head too, on the norms as Hugging Face has them."""
    run = make_run(*F64, "score.candidates=all", arch=arch, until="selection")
    check(run, model_folder(arch), corpus, RUN_TOLERANCE.get(arch, 1e-7))


@pytest.mark.parametrize(
    "options",
    [
        ("score.lam_relative=true", "score.tau=2.0"),
        ("score.preservation=l2",),
        ("score.preservation=fisher", "score.lam=50"),
        ("score.preservation=none",),
        ("score.preservation=none", "split.anchor=0"),
        ("score.preservation=l2", "split.anchor=0"),
        ("score.step=adam",),
        ("score.curvature=none",),
        ("warmup.epochs=0",),
        ("warmup.min_steps=7", "warmup.lr=3e-3"),
        ("select.data_budget=17", "select.param_budget=0.3"),
    ],
)
def test_options_equal_the_oracle(
    options: tuple[str, ...], make_run: Runner, model_folder, corpus: Path
) -> None:
    run = make_run(*F64, *options, arch="llama_tied_bias", until="selection")
    check(run, model_folder("llama_tied_bias"), corpus, 1e-7)


@pytest.mark.parametrize(
    ("options", "lam"),
    [
        (("score.mode=two_pass", "score.lam=1"), 1.0),
        (("score.mode=two_pass", "score.step=adam", "score.lam=0.5"), 0.5),
        (("score.form=calibrated", "score.sketch_dim=64", "score.lam=2"), 2.0),
        (("select.variant=param", "score.preservation=fisher", "score.lam=3"), 3.0),
        (("method.data=random", "score.preservation=l2", "score.lam=1"), 1.0),
        (("score.mode=two_pass", "warmup.epochs=0"), None),
    ],
)
def test_lambda_by_the_parameter_scores_equals_the_oracle(
    options: tuple[str, ...], lam: float | None, make_run: Runner, model_folder
) -> None:
    """λ is the ratio of what both terms do to the mask's ranking; a zero v_prior is logged."""
    said: list[str] = []
    run = make_run(*F64, "score.lam_relative=scores", *options, until="selection", said=said)
    report = oracle_run.check_run(run, model_folder("llama"), 1e-7)
    exact = ("grad_sum", "prior_grad", "projection", "param_scores", "rms_new", "lam_effective")
    assert all(report[name] <= 1e-7 for name in exact) and report["mask"]
    if "score.mode=two_pass" in options:
        assert report["ok"] and report["selection"]
    terms = json.loads((run / "4_scores/summary.json").read_text())["rms_param_scores"]
    assert terms["prior"] / terms["new"] == pytest.approx(lam or 0.0, rel=1e-9)
    (line,) = [line for line in said if "as the ratio of terms of the mask's scores" in line]
    assert ("v_prior is zero and has no effect" in line) is (lam is None)


def test_anchors_of_a_file_equal_the_oracle(
    make_run: Runner, model_folder, corpus: Path, tmp_path: Path
) -> None:
    anchors = write_jsonl(tmp_path / "anchors.jsonl", corpus_rows(16, seed=9))
    run = make_run(
        *F64, f"data.anchor_path={anchors}", "split.anchor=null", "score.lam=5", until="selection"
    )
    assert len(oracle_run.load_run(run).role("anchor")) == 16
    check(run, model_folder("llama"), corpus, 1e-8)


def test_one_pass_under_a_curvature_that_dominates(
    make_run: Runner, model_folder, corpus: Path
) -> None:
    """The second-order term really shows, and what the bounds leave open is scored again."""
    said: list[str] = []
    run = make_run(*F64, "score.curvature_scale=1e7", until="selection", said=said)
    check(run, model_folder("llama"), corpus, 1e-7)
    assert any("selected entries have a score ≤ 0" in line for line in said)
    assert json.loads((run / "4_scores/summary.json").read_text())["curvature_share"] > 1
    assert json.loads((run / "5_selection/summary.json").read_text())["rescored"] > 0


def test_warmup_equals_a_hand_written_adamw(make_run: Runner, model_folder, corpus: Path) -> None:
    """θ̄ and ĉ against the oracle's loop over the same order (GPT-2: float64 throughout)."""
    run = make_run(*F64, "warmup.batch_size=5", arch="gpt2", until="warmup")
    rows = [e for e in oracle_run.load_run(run).examples if e.role == "warm"]
    examples = [Example(e.id, e.index, e.input_ids, e.labels) for e in rows]
    ordered = [examples[i] for i in training_order(examples, 42, 0)]
    steps = -(-len(ordered) // 5)
    model = AutoModelForCausalLM.from_pretrained(model_folder("gpt2"), dtype=torch.float64)
    schedule = oracle.cosine_schedule(steps, 1e-3)
    weights, second, taken = oracle.warmup(model, ordered, schedule, 5)
    bar = load_file(run / "2_warmup/theta_bar/model.safetensors")
    assert max(float((bar[n] - w).abs().max()) for n, w in weights.items() if n in bar) < 1e-10
    stored = load_file(run / "2_warmup/curvature.safetensors")
    assert len(stored) == 8, "four matrices a block"
    expected = oracle.curvature({n: second[n] for n in stored}, 0.999, taken, 1e-8)
    for name, c in stored.items():
        assert float((c - expected[name]).norm()) <= 1e-10 * float(expected[name].norm())


def test_finetune_equals_restricted_adamw_and_freezes_the_rest(
    make_run: Runner, model_folder, corpus: Path
) -> None:
    run = make_run(*F64, "finetune.weight_decay=0.1", arch="gpt2")
    base = AutoModelForCausalLM.from_pretrained(model_folder("gpt2"), dtype=torch.float64)
    before = {n: p.detach().clone() for n, p in base.named_parameters()}
    tuned = AutoModelForCausalLM.from_pretrained(run / "6_finetune/model", dtype=torch.float64)
    after = dict(tuned.named_parameters())
    mask = load_file(run / "5_selection/mask.safetensors")
    moved = 0
    for name, p in before.items():
        same = after[name].view(-1) == p.view(-1)
        chosen = torch.zeros_like(same)
        if name in mask:
            chosen[mask[name]] = True
        assert bool(same[~chosen].all())
        moved += int((~same).sum())
    assert moved > 0.9 * sum(i.numel() for i in mask.values())
    ids = set(json.loads((run / "5_selection/ids.json").read_text()))
    rows = [e for e in oracle_run.load_run(run).examples if e.id in ids]
    examples = [Example(e.id, e.index, e.input_ids, e.labels) for e in rows]
    assert len(examples) % 4 == 0  # the oracle cuts evenly
    order = [examples[i] for epoch in (0, 1) for i in training_order(examples, 42, epoch)]
    masks = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in before.items()}
    for name, index in mask.items():
        masks[name].view(-1)[index] = True
    rates = oracle.cosine_schedule(len(order) // 4, 1e-3)
    weights = oracle.restricted_adamw(
        base, order, rates, 4, masks, weight_decay=0.1, max_grad_norm=1.0
    )[0]
    for name, p in after.items():
        assert float((p - weights[name]).detach().abs().max()) < 1e-10


def test_variants(make_run: Runner) -> None:
    data = make_run("select.variant=data", out="data")
    assert not (data / "5_selection/mask.safetensors").exists()
    assert not (data / "6_finetune/delta.safetensors").exists()
    param = make_run("select.variant=param", out="param")
    assert not (param / "5_selection/selected.jsonl").exists()
    facts = json.loads((param / "6_finetune/summary.json").read_text())
    roles = pq.read_table(param / "1_split/split.parquet")["role"].to_pylist()
    assert facts["examples"] == roles.count("pool") + roles.count("warm")
    table = pq.read_table(param / "4_scores/examples.parquet")
    assert table["score"].null_count == len(table) and table["loss"].null_count == 0
    dual = make_run(out="dual", until="selection")
    one, other = (load_file(r / "5_selection/mask.safetensors") for r in (param, dual))
    assert one and one.keys() == other.keys()
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("order", ["data_to_param", "param_to_data"])
def test_rounds_of_reselection(order: str, make_run: Runner, model_folder) -> None:
    """Each round against the oracle's definition, with u kept from the one-shot run."""
    run = make_run(*F64, "select.rounds=2", f"select.order={order}")
    folder = run / "5_selection"
    stored = oracle_run.load_run(run)
    u = load_file(run / "4_scores/projection.safetensors")
    bar = AutoModelForCausalLM.from_pretrained(run / "2_warmup/theta_bar", dtype=torch.float64)
    pool = [e for e in stored.examples if e.role == "pool"]
    mask = load_file(folder / "mask.safetensors")
    ids = json.loads((folder / "ids.json").read_text())
    k = sum(i.numel() for i in mask.values())
    names = list(u)
    ordered = {n: u[n] for n, _ in bar.named_parameters() if n in u}
    for number in (1, 2):
        if (order == "data_to_param") == (number == 1):
            subset = oracle.grad_sum(bar, [e for e in pool if e.id in set(ids)], names)
            mask = oracle.top_k_signed({n: ordered[n] * subset[n] for n in ordered}, k)
        else:
            masked = oracle.apply_mask(ordered, mask)
            scores = oracle.example_scores(bar, pool, masked)
            rows = set(oracle.top_b(scores, [e.index for e in pool], len(ids)))
            ids = [e.id for e in pool if e.index in rows]
        here = folder / f"round_{number}"
        got = load_file(here / "mask.safetensors")
        assert sum(index.numel() for index in got.values()) == k
        assert all(torch.equal(got[n], mask[n]) for n in got)
        assert json.loads((here / "ids.json").read_text()) == ids
    assert json.loads((folder / "summary.json").read_text())["final"] == "round_2"
    assert json.loads((run / "6_finetune/summary.json").read_text())["selection"] == "round_2"
    final = load_file(run / "6_finetune/delta.safetensors")
    assert all(torch.equal(final[f"{n}.idx"], i) for n, i in mask.items() if i.numel())


def test_reuse_and_reasons(make_run: Runner) -> None:
    """A finished stage is reused; a changed budget re-runs from selection on and says why."""
    make_run()
    said: list[str] = []
    make_run(said=said)
    assert sum("reused" in line for line in said) == 7
    said.clear()
    make_run("select.data_budget=0.2", said=said)
    reused = [line.split("]")[0][1:] for line in said if "reused" in line]
    assert reused == ["split", "warmup", "gradients", "scores"]
    again = next(line for line in said if line.startswith("[selection] again"))
    assert "select.data_budget: 0.1 -> 0.2" in again
    said.clear()
    make_run("select.data_budget=0.2", "score.lam=0.5", "score.mode=two_pass", said=said)
    reused = [line.split("]")[0][1:] for line in said if "reused" in line]
    assert reused == ["split", "warmup"]


def test_two_pass_lambda_does_not_repeat_the_gradients(make_run: Runner) -> None:
    make_run("score.mode=two_pass", until="selection")
    said: list[str] = []
    make_run("score.mode=two_pass", "score.lam=0.1", until="selection", said=said)
    assert any("[gradients] reused" in line for line in said)
    assert any("[scores] again (score.lam: 0.8 -> 0.1)" in line for line in said)


def test_param_after_dual_reuses_the_pool_pass(make_run: Runner) -> None:
    """G does not depend on the variant; the other way round the product is missing."""
    make_run(until="selection")
    said: list[str] = []
    make_run("select.variant=param", until="selection", said=said)
    assert any(line.startswith("[gradients] reused: it holds all") for line in said)
    assert any(line.startswith("[scores] again") for line in said)
    make_run("select.variant=param", out="param", until="gradients")
    said.clear()
    make_run(out="param", until="gradients", said=said)
    assert any(line.startswith("[gradients] again (per-example product") for line in said)


def test_failed_self_check_writes_nothing(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped example makes Σ s_D differ from ⟨u, G⟩: refused before anything is written."""
    real = scores.read_pool

    def lossy(path: Path) -> dict:
        pool = real(place(path))
        f = pool["f"].copy()
        f[0] += 0.1 * abs(f).sum()
        return pool | {"f": f}

    monkeypatch.setattr(scores, "read_pool", lossy)
    with pytest.raises(RunError, match="self-check failed"):
        make_run()
    assert not list((make_run(until="gradients")).glob("4_scores*"))


# --- interruptions -------------------------------------------------------------------------------


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


def test_training_after_lack_of_memory_resumes_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The smaller cut is part of the saved state: fp32 sums depend on it in the last bit."""
    real = training.example_objective

    def objective(model: Any, batch: Batch, **options: Any) -> Any:
        if batch.input_ids.numel() > limit[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, batch, **options)

    monkeypatch.setattr(training, "example_objective", objective)
    limit = [30]
    plan = tiny_plan(lr=1e-2, batch_size=8, micro_batch_size=8, batch_tokens=1000)

    def trained(pieces: Pieces) -> dict[str, torch.Tensor]:
        model, quiet = tiny_model("llama", torch.float32), Reporter(lambda _: None)
        with SparseAdamW(model.named_parameters(), None, lr=1e-2, free_gradients=True) as optimizer:
            train(model, tiny_rows(16, 3), optimizer, plan, quiet, "warmup", pieces=pieces)
        return snapshot(model)

    expected = trained(Pieces())
    second = cut_off(trained, tmp_path / "s.work", 2)
    limit[0] = 10**9  # the machine has more memory now
    assert_equal(trained(second), expected)


def test_leftovers_of_killed_processes_go_away(make_run: Runner) -> None:
    run = make_run()
    for name in ("6_finetune.part", "3_gradients.work"):
        (run / name).mkdir()
    (run / ".manifest.json.123.tmp").write_text("half")
    make_run()
    assert not [n for n in os.listdir(run) if n.endswith((".part", ".work", ".tmp"))]


# --- models and files that a user brings ---------------------------------------------------------


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


def test_a_device_that_is_not_there_is_said_first(
    model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    words = [*small_run(model_folder("llama"), corpus), "model.device=cuda"]
    with pytest.raises(ConfigError, match="no cuda device"):
        pipeline.run(dualsft.load(None, words), tmp_path / "run", None, Reporter(lambda _: None))
    assert not (tmp_path / "run/1_split").exists()


def test_export_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part/thesis.txt").write_text("mine")
    with written_whole(tmp_path / "out") as part:
        part.write_text("new")
    assert (tmp_path / "out.part/thesis.txt").read_text() == "mine"
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o666 & ~mask
    with pytest.raises(ValueError, match="stop"), written_whole(tmp_path / "other") as part:
        part.write_text("half")
        raise ValueError("stop")
    assert sorted(os.listdir(tmp_path)) == ["out", "out.part"]
