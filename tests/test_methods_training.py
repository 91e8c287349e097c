"""Weighting, editing after training, adapters: against brute force in fp64, and through whole runs.

The oracles are written from docs/methods.md on the models' own logits and plain autograd.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES as FAMILIES
from conftest import Runner, small_run
from faults import cut_off
from models import ARCHITECTURES, assert_equal, snapshot, tiny_model, tiny_plan, tiny_rows
from places import place
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from dualsft.config import settings
from dualsft.data.examples import Example, collate
from dualsft.errors import ConfigError, RunError
from dualsft.lab.methods.lora import linear_names
from dualsft.lab.methods.magnitudes import prune
from dualsft.lab.methods.table import FlowOptions
from dualsft.lab.methods.token_weights import control_tokens, flow_weights
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.runs.method import Job
from dualsft.storage.resume import Pieces
from dualsft.system.progress import Reporter
from dualsft.train.loop import Hooks, train
from dualsft.train.optimizer import SparseAdamW

Maker = Callable[..., Job]


@pytest.fixture
def make_job(corpus: Path, model_folder: Callable[[str], Path], tmp_path: Path) -> Maker:
    """A job on these examples, whose run is composed by the settings."""

    def make(axis: Any, examples: list[Example], *overrides: str) -> Job:
        config = settings.load(None, [*small_run(model_folder("llama"), corpus), *overrides])
        ctx = RunContext(config, RunDir(tmp_path / "run"), Reporter(lambda _: None))
        return Job(ctx, axis, place(tmp_path / "part"), examples)

    return make


def hooks_of(job: Job, model: Any) -> Hooks:
    return job.ctx.methods.load("weights").hooks(job, model)


def through_hooks(
    model: Any, hooks: Hooks, pieces: Sequence[Sequence[Example]], side: str = "right"
) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients and reported losses of one optimizer step cut into these micro-batches."""
    model.zero_grad()
    assert hooks.before_step is not None
    hooks.before_step(model, pieces)
    losses: list[float] = []
    for piece in pieces:
        objective, each = hooks.objective(model, collate(piece, 0, side), piece, math.nan)
        objective.backward()
        losses += each.tolist()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return grads, losses


def plain_tokens(model: Any, example: Example) -> Tensor:
    """Losses of an example's response tokens by the model's own logits, alone and unpadded."""
    ids, labels = torch.tensor([example.input_ids]), torch.tensor(example.labels[1:])
    logits = model(input_ids=ids).logits[0, :-1]
    return cross_entropy(logits, labels, reduction="none", ignore_index=-100)[labels != -100]


def plain_gradients(model: Any, objective: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    objective.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], rel: float = 1e-9) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name] - value).abs().max()
        assert float(error) <= rel * max(1e-3, float(value.abs().max())), name


def cut(rows: list[Example], size: int) -> list[list[Example]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, torch.float64)


# --- FLOW ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("normalize", [False, True])
def test_flow_is_its_formula(make_job: Maker, model: Any, normalize: bool, side: str) -> None:
    rows = tiny_rows(9, 1)
    job = make_job("weights", rows, "method.weights=flow", f"method.flow.normalize={normalize}")
    hooks = hooks_of(job, model)
    assert job.accounts.forward_examples == 9 and job.accounts.backward_examples == 0
    with torch.no_grad():
        base = np.array([float(plain_tokens(model, e).mean()) for e in rows])
    weights = np.exp(-base / np.median(base))
    if normalize:
        weights /= weights.mean()
    with torch.no_grad():  # the weights are of the base model, whatever it becomes
        for p in model.parameters():
            p.mul_(1.01)
    batch = rows[:6]
    tokens = [plain_tokens(model, e) for e in batch]
    count = sum(map(len, tokens))
    objective = sum(w * t.sum() for w, t in zip(weights, tokens, strict=False)) / count
    expected = plain_gradients(model, objective)  # type: ignore[arg-type]
    for size in (6, 2):
        got, losses = through_hooks(model, hooks, cut(batch, size), side)
        assert_close(got, expected, 1e-6 if side == "left" else 1e-9)
        assert losses == pytest.approx([float(t.mean()) for t in tokens]), "reported unweighted"


def test_flow_at_the_median_weighs_one_over_e() -> None:
    rows, losses = tiny_rows(5, 1), np.array([3.0, 0.5, 2.0, 9.0, 1.0])
    weights, tau = flow_weights(losses, rows, FlowOptions())
    assert tau == 2.0 and weights[2] == math.exp(-1) == np.median(weights)
    assert flow_weights(losses, rows, FlowOptions(tau=1.0))[0][0] == math.exp(-3)
    assert flow_weights(losses, rows, FlowOptions(normalize=True))[0].mean() == pytest.approx(1)


def test_flow_refuses_what_it_cannot_weigh() -> None:
    rows = tiny_rows(3, 1)
    with pytest.raises(RunError, match="row 2 .*not finite"):
        flow_weights(np.array([1.0, np.nan, 2.0]), rows, FlowOptions())
    with pytest.raises(RunError, match=r"median loss .* is 0.*method\.flow\.tau"):
        flow_weights(np.zeros(3), rows, FlowOptions())


# --- STM ----------------------------------------------------------------------------------------


def stm_masks(model: Any, rows: list[Example], threshold: float, ends: set[int]) -> list[Tensor]:
    """True where a token counts, token by token as the paper says it."""
    found = []
    for e in rows:
        with torch.no_grad():
            perplexity = plain_tokens(model, e).exp().tolist()
        tokens = [label for label in e.labels[1:] if label != -100]
        keep = [t in ends or p <= threshold for t, p in zip(tokens, perplexity, strict=True)]
        found.append(torch.tensor(keep))
    return found


@pytest.mark.parametrize("keep_ends", [False, True])
def test_stm_is_its_formula(make_job: Maker, model: Any, keep_ends: bool) -> None:
    rows = tiny_rows(8, 1)
    last = {"input_ids": [*rows[0].input_ids[:-1], 1], "labels": [*rows[0].labels[:-1], 1]}
    rows[0] = replace(rows[0], **last)  # 1 is the tokenizer's end token
    job = make_job(
        "weights",
        rows,
        "method.weights=stm",
        "method.stm.threshold=100",
        f"method.stm.keep_ends={keep_ends}",
    )
    method = job.ctx.methods.load("weights")
    hooks = method.hooks(job, model)
    assert job.ctx.tokenizer.eos_token_id == 1
    ends = set(control_tokens(job.ctx.tokenizer, model)) if keep_ends else set()
    masks = stm_masks(model, rows, 100.0, ends)
    survivors = sum(int(m.sum()) for m in masks)
    assert 0 < survivors < sum(map(len, masks)), "the threshold must cut"
    assert method.facts["surviving_tokens"] == survivors
    if keep_ends:
        assert masks[0][-1]
    total = sum((plain_tokens(model, e) * m).sum() for e, m in zip(rows, masks, strict=True))
    expected = plain_gradients(model, total / survivors)  # type: ignore[arg-type]
    for size in (8, 3):
        got, losses = through_hooks(model, hooks, cut(rows, size))
        assert_close(got, expected)
    plain = [float(plain_tokens(model, e).mean()) for e in rows]
    assert losses == pytest.approx(plain), "reported over all tokens"


def test_stm_where_nothing_survives_is_zero_not_nan(make_job: Maker) -> None:
    model, rows = tiny_model("llama", torch.float64), tiny_rows(6, 1)
    options = ("method.weights=stm", "method.stm.threshold=0.5", "method.stm.keep_ends=false")
    job = make_job("weights", rows, *options)
    hooks = hooks_of(job, model)
    grads, losses = through_hooks(model, hooks, cut(rows, 2))
    assert all(bool((g == 0).all()) for g in grads.values()) and grads
    assert all(map(math.isfinite, losses))
    assert any("masks every token" in line for line in job.ctx.reporter.warnings)


@pytest.mark.parametrize("mode", ["lowest", "random"])
def test_stm_controls_mask_as_many(make_job: Maker, mode: str) -> None:
    model, rows = tiny_model("llama", torch.float64), tiny_rows(12, 1)
    options = ("method.weights=stm", "method.stm.threshold=100", "method.stm.keep_ends=false")

    def kept(*more: str) -> dict[str, np.ndarray]:
        hooks = hooks_of(make_job("weights", rows, *options, *more), model)
        weights = hooks.objective.__self__.weights  # type: ignore[attr-defined]
        return {e.id: weights(e).bool().numpy() for e in rows}

    highest, control = kept(), kept(f"method.stm.mode={mode}")
    differ = 0
    for e in rows:
        assert control[e.id].sum() == highest[e.id].sum()
        differ += not np.array_equal(control[e.id], highest[e.id])
        if mode == "lowest" and 0 < control[e.id].sum() < len(control[e.id]):
            with torch.no_grad():
                loss = plain_tokens(model, e).numpy()
            assert loss[~control[e.id]].max() <= loss[control[e.id]].min()
    assert differ > 0
    again = kept(f"method.stm.mode={mode}")
    assert all(np.array_equal(control[k], again[k]) for k in control), "the same by seed"
    if mode == "random":
        other = kept(f"method.stm.mode={mode}", "seed=9")
        assert any(not np.array_equal(control[k], other[k]) for k in control)


# --- TALR and DFT -------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["none", "batch_sum"])
def test_talr_is_its_formula(make_job: Maker, model: Any, normalize: str) -> None:
    rows = tiny_rows(6, 1)
    job = make_job(
        "weights", rows, "method.weights=talr", f"method.talr.normalize={normalize}",
        "method.talr.floor=0.3",
    )  # fmt: skip
    hooks = hooks_of(job, model)
    tokens = [plain_tokens(model, e) for e in rows]
    tau = float(np.median([float(t.mean()) for t in tokens]))
    weights = [(-t.detach() / tau).exp().clamp(min=0.3) for t in tokens]
    floored = sum(int((w == 0.3).sum()) for w in weights)
    assert 0 < floored < sum(map(len, weights))
    below = sum(map(len, tokens)) if normalize == "none" else float(sum(w.sum() for w in weights))
    total = sum((w * t).sum() for w, t in zip(weights, tokens, strict=True))
    expected = plain_gradients(model, total / below)  # type: ignore[arg-type]
    for size in (6, 2, 1):
        before = job.accounts.forward_examples
        got, losses = through_hooks(model, hooks, cut(rows, size))
        assert_close(got, expected)
        assert job.accounts.forward_examples == before + 6, "the pass for tau is counted"
    assert losses == pytest.approx([float(t.mean()) for t in tokens])


def test_dft_is_talr_at_one_and_weighs_by_probability(make_job: Maker, model: Any) -> None:
    rows = tiny_rows(5, 1)
    dft = make_job("weights", rows, "method.weights=dft")
    talr = make_job(
        "weights", rows, "method.weights=talr", "method.talr.tau=1", "method.talr.floor=0"
    )
    ours, _ = through_hooks(model, hooks_of(dft, model), cut(rows, 2))
    same, _ = through_hooks(model, hooks_of(talr, model), cut(rows, 2))
    assert_equal(ours, same)
    assert dft.accounts.forward_examples == 0
    tokens = torch.cat([plain_tokens(model, e) for e in rows])
    held = plain_gradients(model, ((-tokens).exp().detach() * tokens).mean())
    assert_close(ours, held)
    tokens = torch.cat([plain_tokens(model, e) for e in rows])
    flowing = plain_gradients(model, ((-tokens).exp() * tokens).mean())
    with pytest.raises(AssertionError):
        assert_close(ours, flowing, 1e-3)


def test_talr_temperature_sees_the_noise_of_the_step(make_job: Maker) -> None:
    """With dropout: the losses behind tau are those that are then differentiated."""
    model, rows = tiny_model("gpt2", torch.float64, dropout=0.3).train(), tiny_rows(6, 1)
    hooks = hooks_of(make_job("weights", rows, "method.weights=talr"), model)
    torch.manual_seed(4)
    _, losses = through_hooks(model, hooks, cut(rows, 2))
    step = hooks.objective.__self__  # type: ignore[attr-defined]
    assert step.tau == pytest.approx(float(np.median(losses)), rel=1e-12)


def test_talr_of_past_steps(make_job: Maker) -> None:
    model, rows = tiny_model("llama", torch.float64), tiny_rows(6, 1)
    options = ("method.talr.window=past", "method.talr.momentum=0.75")
    job = make_job("weights", rows, "method.weights=talr", *options)
    hooks = hooks_of(job, model)
    step = hooks.objective.__self__  # type: ignore[attr-defined]
    _, first = through_hooks(model, hooks, cut(rows[:4], 2))
    assert step.tau == pytest.approx(np.median(first)) and job.accounts.forward_examples == 4
    hooks.after_step(1)  # type: ignore[misc]
    _, second = through_hooks(model, hooks, cut(rows[2:], 2))
    assert step.tau == pytest.approx(np.median(first)) and job.accounts.forward_examples == 4
    hooks.after_step(2)  # type: ignore[misc]
    expected = 0.75 * np.median(first) + 0.25 * np.median(second)
    assert hooks.state is not None and hooks.state()["past"] == pytest.approx(expected)


def test_talr_temperature_has_a_floor(make_job: Maker) -> None:
    model, rows = tiny_model("llama", torch.float64), tiny_rows(4, 1)
    options = ("method.weights=talr", "method.talr.least_tau=1000")
    hooks = hooks_of(make_job("weights", rows, *options), model)
    through_hooks(model, hooks, cut(rows, 2))
    assert hooks.objective.__self__.tau == 1000  # type: ignore[attr-defined]


PLAN = tiny_plan(lr=1e-2, epochs=3, warmup_ratio=0.1, max_grad_norm=1.0, batch_tokens=40, seed=5)


@pytest.mark.parametrize("window", ["step", "past"])
def test_talr_goes_on_to_the_same_bits(make_job: Maker, tmp_path: Path, window: str) -> None:
    rows = tiny_rows(10, 1)

    def trained(pieces: Pieces) -> dict[str, Tensor]:
        model = tiny_model("gpt2", torch.float32, dropout=0.2)
        options = ("method.weights=talr", f"method.talr.window={window}")
        hooks = hooks_of(make_job("weights", rows, *options), model)
        with SparseAdamW(model.named_parameters(), None, lr=1e-2, free_gradients=True) as optimizer:
            train(
                model, rows, optimizer, PLAN, Reporter(lambda _: None), "t", pieces=pieces,
                hooks=hooks,
            )  # fmt: skip
        return snapshot(model)

    expected = trained(Pieces())
    for kill_at in (1, 4):
        assert_equal(trained(cut_off(trained, tmp_path / f"{kill_at}.work", kill_at)), expected)


def test_memory_that_runs_out_before_a_step_is_handled(make_job: Maker) -> None:
    """The pass for tau does not fit once: the step is tried again, with less memory."""
    rows, said = tiny_rows(8, 1), []

    def trained(fail: bool) -> dict[str, Tensor]:
        model = tiny_model("llama", torch.float64)
        hooks = hooks_of(make_job("weights", rows, "method.weights=talr"), model)
        before, calls = hooks.before_step, [0]

        def failing(model: Any, pieces: Any) -> None:
            calls[0] += 1
            if fail and calls[0] == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            assert before is not None
            before(model, pieces)

        hooks = replace(hooks, before_step=failing)
        with SparseAdamW(model.named_parameters(), None, lr=1e-2, free_gradients=True) as optimizer:
            train(model, rows, optimizer, PLAN, Reporter(said.append), "t", hooks=hooks)
        return snapshot(model)

    assert_close(trained(fail=True), trained(fail=False))
    assert any("out of memory with" in line for line in said)


# --- FAPM ---------------------------------------------------------------------------------------


def fapm_oracle(base: Tensor, trained: Tensor, keep: float) -> Tensor:
    """By a full, stable sort in fp64."""
    old, new = base.double().flatten(), trained.double().flatten()
    delta = (new - old).abs()
    score = delta - old.abs().mean() * delta / old.abs()
    score[old == 0] = -math.inf
    order = sorted(range(len(old)), key=lambda i: (-float(score[i]), i))
    result = base.flatten().clone()
    chosen = order[: int(keep * len(old))]
    result[chosen] = trained.flatten()[chosen]
    return result.view_as(base)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [0.0, 0.1, 0.37, 1.0])
def test_fapm_is_a_full_sort(dtype: torch.dtype, keep: float) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(30, 17, generator=generator).to(dtype)
    trained = (base + 0.1 * torch.randn(30, 17, generator=generator)).to(dtype)
    base[0, :5] = 0
    trained[0, 0] = 0  # 0 / 0
    trained[5:9] = base[5:9]
    before = base.clone()
    expected = fapm_oracle(base, trained, keep)
    changed = int((base != trained).sum())
    counts = prune(base, trained, keep)
    assert torch.equal(trained, expected) and torch.equal(base, before), "the base stays"
    assert counts == (changed, int((base != trained).sum()))


# --- LoRA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lora_targets_are_pefts_all_linear(arch: str) -> None:
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = set(linear_names(tiny_model(arch, torch.float32)))
    wrapped = peft.get_peft_model(
        tiny_model(arch, torch.float32), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    inner: Any = wrapped.base_model.model
    assert names == {n for n, m in inner.named_modules() if isinstance(m, BaseTunerLayer)}
    assert not any("lm_head" in name for name in names)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3"])
def test_lora_merged_equals_the_adapter_on_the_base(
    make_run: Runner, model_folder: Callable[[str], Path], arch: str, dora: bool
) -> None:
    import peft

    said: list[str] = []
    run = make_run(
        "method.data=random", "method.params=lora", "method.lora.r=3", "method.lora.alpha=6",
        f"method.lora.dora={dora}", "finetune.lr=1e-2", arch=arch, said=said, until="finetune",
    )  # fmt: skip
    folder = model_folder(arch)
    base = AutoModelForCausalLM.from_pretrained(folder)
    names = {n: p.detach().clone() for n, p in base.named_parameters()}
    merged = AutoModelForCausalLM.from_pretrained(run / "6_finetune/model")
    assert {n: p.shape for n, p in merged.named_parameters()} == {
        n: t.shape for n, t in names.items()
    }
    adapted = peft.PeftModel.from_pretrained(base, run / "6_finetune/adapter").eval()
    ids = torch.tensor([[5, 8, 13, 40, 7]])
    with torch.no_grad():
        ours, theirs = merged.eval()(ids).logits, adapted(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())
    assert float((ours - plain).abs().max()) > 1e-2, "it has learned something"
    linear = {f"{name}.weight" for name in linear_names(merged)}
    for name, p in merged.named_parameters():
        assert torch.equal(p, names[name]) == (name not in linear), name
    stored = json.loads((run / "6_finetune/adapter/adapter_config.json").read_text())
    assert (stored["r"], stored["lora_alpha"], stored["use_dora"]) == (3, 6, dora)
    assert stored["base_model_name_or_path"] == folder.name
    assert stored["target_modules"] == sorted(stored["target_modules"]), "the same in any process"
    summary = json.loads((run / "6_finetune/summary.json").read_text())
    saved = load_file(run / "6_finetune/adapter/adapter_model.safetensors")
    count = sum(t.numel() for t in saved.values())
    assert summary["trained_entries"] == count and summary["lr"] == pytest.approx(0.1)
    assert any(f"{count:,} trainable entries" in line for line in said)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_stay_within_the_budget(make_run: Runner, dora: bool) -> None:
    """The largest rank that fits: one more would not."""
    words = ["method.data=random", "method.params=lora", f"method.lora.dora={dora}"]
    run = make_run(*words, "select.param_budget=2640", until="finetune")
    saved = load_file(run / "6_finetune/adapter/adapter_model.safetensors")
    stored = json.loads((run / "6_finetune/adapter/adapter_config.json").read_text())
    count = sum(t.numel() for t in saved.values())
    a_rank = sum(t.numel() for name, t in saved.items() if "magnitude" not in name) // stored["r"]
    assert count <= 2640 < count + a_rank


def test_a_budget_below_rank_one_is_refused_after_the_split(
    make_run: Runner, tmp_path: Path
) -> None:
    words = ["method.data=less", "method.params=lora", "select.param_budget=20"]
    with pytest.raises(ConfigError, match="adapters of rank 1 have"):
        make_run(*words, out="small")
    assert (tmp_path / "small/1_split").is_dir()
    assert not (tmp_path / "small/5_selection").exists()


def test_lora_starts_by_seed_and_in_the_models_dtype_when_asked(make_job: Maker) -> None:

    def start(*options: str) -> dict[str, Tensor]:
        job = make_job("params", [], "method.params=lora", "method.lora.r=2", *options)
        torch.rand(3)  # the global stream must not matter
        model = tiny_model("gpt2", torch.bfloat16)
        found = job.ctx.methods.load("params").attach(job, model)
        return {n: p.detach().clone() for n, p in found.items()}

    state = torch.get_rng_state()
    one = start()
    assert_equal(one, start())
    assert {p.dtype for p in one.values()} == {torch.float32}, "wider than the model"
    other = start("seed=7")
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert {p.dtype for p in start("method.lora.dtype=model").values()} == {torch.bfloat16}
    torch.set_rng_state(state)


def test_lora_without_peft_says_what_to_install(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"method.params: 'lora'.*pip install 'dualsft\[peft\]'"):
        make_run("method.data=random", "method.params=lora", out="none")
    assert not (tmp_path / "none/5_selection").exists(), "before anything is chosen"


def test_lora_where_peft_refuses_says_so(make_job: Maker) -> None:
    job = make_job("params", [], "method.params=lora", "method.lora.r=2")
    with pytest.raises(ConfigError, match=r"method.params: 'lora' .*Mamba.*method\.lora"):
        job.ctx.methods.load("params").attach(job, FAMILIES["mamba2"].build(torch.float32))


# --- whole runs ---------------------------------------------------------------------------------


def first_step(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(e for e in lines if e["stage"] == "finetune" and e.get("step") == 1)


def facts_of(run: Path, file: str = "summary") -> dict[str, Any]:
    return json.loads((run / f"6_finetune/{file}.json").read_text())


def test_runs_report_the_unweighted_loss(make_run: Runner) -> None:
    base = ("method.data=random", "method.params=random", "finetune.max_grad_norm=0")
    plain = make_run(*base, arch="gpt2", out="plain", until="finetune")
    sft, hashes = first_step(plain), {json.dumps(facts_of(plain)["weights"])}
    for name in ("flow", "stm", "talr", "dft"):
        run = make_run(*base, f"method.weights={name}", arch="gpt2", out=name, until="finetune")
        summary, step = facts_of(run), first_step(run)
        hashes.add(json.dumps(summary["weights"]))
        assert step["loss"] == pytest.approx(sft["loss"], rel=1e-6), f"{name} is logged unweighted"
        assert step["grad_norm"] != pytest.approx(sft["grad_norm"], rel=1e-3)
        passes = facts_of(run, "manifest")["facts"]["accounts"]["weights"]["forward_examples"]
        trained, epochs = summary["examples"], 2
        assert passes == {"flow": trained, "stm": trained, "talr": epochs * trained, "dft": 0}[name]
    assert len(hashes) == 5, "five different models"


def test_run_with_fapm_keeps_a_tenth(make_run: Runner, model_folder: Callable) -> None:
    base = ("method.data=random", "method.params=all")
    runs = [
        make_run(*base, *more, arch="gpt2", out=f"run{len(more)}", until="finetune")
        for more in ((), ("method.after=fapm",))
    ]
    summary = facts_of(runs[1])
    assert summary["changed_entries"] == summary["fapm"]["kept_entries"]
    assert 0.05 < summary["fapm"]["share"] <= 0.1
    places = (model_folder("gpt2"), *(run / "6_finetune/model" for run in runs))
    old, dense, pruned = (load_file(folder / "model.safetensors") for folder in places)
    for name, base_weight in old.items():
        assert torch.equal(pruned[name], fapm_oracle(base_weight, dense[name], 0.1)), name


@pytest.mark.parametrize(
    "option",
    ["stm.threshold=0", "talr.momentum=1", "fapm.keep=1.5", "flow.tau=-1", "lora.dropout=1"],
)
def test_options_outside_their_bounds_are_refused(
    corpus: Path, model_folder: Callable[[str], Path], option: str
) -> None:
    axis = {"fapm": "after", "lora": "params"}.get(option.partition(".")[0], "weights")
    given = [f"method.{axis}={option.partition('.')[0]}", f"method.{option}"]
    with pytest.raises(ConfigError, match=rf"method\.{option.partition('=')[0]}"):
        settings.load(None, [*small_run(model_folder("llama"), corpus), *given])
