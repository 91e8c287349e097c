"""The retention term of fine-tuning: against the oracle, in any cut, resumed, and in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import Runner, corpus_rows, write_jsonl
from faults import Killed
from models import assert_equal, snapshot, tiny_model, tiny_plan, tiny_rows
from safetensors.torch import load_file

from dualsft.config import settings
from dualsft.data.examples import training_order
from dualsft.errors import ConfigError, RunError
from dualsft.lab.diagnostics.job import plain_training
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.storage.resume import Pieces
from dualsft.system.progress import Reporter
from dualsft.train import loop as module
from dualsft.train.loop import Hooks, Retention, train
from dualsft.train.optimizer import SparseAdamW

QUIET = Reporter(lambda _: None)
ANCHORS = tiny_rows(5, 7)


def term(dropout: float = 0.0, **changes: Any) -> Retention:
    teacher = tiny_model("gpt2", torch.float64, dropout=dropout).eval()
    values: dict[str, Any] = {"weight": 30.0, "tau": 1.5, "batch_size": 3, "seed": 3}
    return Retention(teacher=teacher, anchors=ANCHORS, **(values | changes))


def trained(
    retention: Retention | None,
    dropout: float = 0.0,
    logged: list[dict[str, Any]] | None = None,
    pieces: Pieces | None = None,
    kill_after: int = 10**9,
    reporter: Reporter = QUIET,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """The weights after four steps on every third entry."""
    model = tiny_model("gpt2", torch.float64, dropout=dropout)
    named = list(model.named_parameters())
    indices = {name: torch.arange(0, p.numel(), 3) for name, p in named}

    def log(step: int = 0, **values: Any) -> None:
        if step and logged is not None:
            logged.append(values)
        if step > kill_after:
            raise Killed

    plan = tiny_plan(max_grad_norm=0.5, lr=3e-2, **changes)
    with SparseAdamW(named, indices, lr=3e-2, free_gradients=True) as optimizer:
        hooks = Hooks(retention=retention)
        train(model, tiny_rows(8, 1), optimizer, plan, reporter, "test", log, pieces, hooks)
    return snapshot(model)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def anchors_of_steps(count: int, per_step: int) -> list[list[Any]]:
    """Passes over all anchors in a new order each, cut into steps."""
    stream = [ANCHORS[i] for epoch in range(9) for i in training_order(ANCHORS, 3, epoch)]
    return [stream[step * per_step : (step + 1) * per_step] for step in range(count)]


def test_the_loop_equals_a_hand_written_adamw() -> None:
    """Four masked steps with both terms, clipped over their sum; the loss of each is logged."""
    logged: list[dict[str, Any]] = []
    got = trained(term(), logged=logged)
    model, teacher = (tiny_model("gpt2", torch.float64).eval() for _ in range(2))
    masks = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in model.named_parameters()}
    for mask in masks.values():
        mask.view(-1)[::3] = True
    rows, rates = tiny_rows(8, 1), oracle.cosine_schedule(4, 3e-2)
    order = [rows[i] for epoch in (0, 1) for i in training_order(rows, 3, epoch)]
    anchors = anchors_of_steps(4, 3)
    expected = oracle.restricted_adamw(
        model, order, rates, 4, masks, max_grad_norm=0.5, retention=(30.0, teacher, 1.5, anchors)
    )[0]
    assert distance(got, expected) < 1e-10
    assert distance(trained(None), got) > 1e-4, "the term must show"
    assert all(values["grad_norm"] > 0.5 for values in logged), "every step is clipped"
    assert logged[0]["retention"] == pytest.approx(0.0, abs=1e-12)  # the student is the teacher
    for step in (1, 2, 3):  # the loss before this step, at the weights after the steps before
        weights = oracle.restricted_adamw(
            model,
            order[: 4 * step],
            rates[:step],
            4,
            masks,
            max_grad_norm=0.5,
            retention=(30.0, teacher, 1.5, anchors),
        )[0]
        student = tiny_model("gpt2", torch.float64)
        student.load_state_dict(weights, strict=False)
        loss = oracle.cwsd_loss(teacher, student, anchors[step], 1.5).item()
        assert logged[step]["retention"] == pytest.approx(loss, rel=1e-8) and loss > 1e-4


@pytest.mark.parametrize(
    "changes",
    [{"micro_batch_size": 1}, {"batch_tokens": 1}, {"checkpointing": True, "padding_side": "left"}],
)
def test_micro_batches_and_checkpointing_change_nothing(changes: dict[str, Any]) -> None:
    assert distance(trained(term()), trained(term(), **changes)) < 1e-9


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """With dropout, which the student has on anchors too and the teacher never."""
    expected = trained(term(0.2), 0.2)
    assert distance(expected, trained(term(0.2))) > 0
    with pytest.raises(Killed):
        trained(term(0.2), 0.2, pieces=Pieces(tmp_path / "s.work", "abc", every=0), kill_after=2)
    again: list[dict[str, Any]] = []
    pieces = Pieces(tmp_path / "s.work", "abc", every=0)
    assert_equal(trained(term(0.2), 0.2, again, pieces), expected)
    assert 0 < len(again) < 4


def test_lack_of_memory_on_anchors_cuts_them_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    real, said, sizes = module.distillation_objective, list[str](), list[int]()

    def full(teacher: Any, student: Any, batch: Any, *more: Any) -> Any:
        if len(batch.input_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(batch.input_ids))
        return real(teacher, student, batch, *more)

    expected = trained(term(), batch_tokens=1000)
    monkeypatch.setattr(module, "distillation_objective", full)
    got = trained(term(), batch_tokens=1000, reporter=Reporter(said.append))
    assert distance(got, expected) < 1e-9 and len(sizes) == 12
    warnings = [line for line in said if "out of memory" in line]
    assert "finetune.checkpointing=true" in warnings[0] and len(warnings) >= 2


def test_an_anchor_without_a_finite_loss_stops_the_step() -> None:
    one = term()
    with torch.no_grad():
        one.teacher.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")  # pyright: ignore
    with pytest.raises(RunError, match=r"step 1: the loss of .* is not finite; nothing was up"):
        trained(one)


# --- whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("method.params=all", "method.data=random"),
        ("method.params=lora", "method.data=random", "method.lora.r=2"),
        ("method.params=lift", "method.data=random", "method.lift.interval=2"),
        ("select.variant=data",),
        ("method.weights=dft", "method.data=random", "method.params=random"),
    ],
    ids=["mask", "all", "lora", "moving mask", "data", "weights"],
)
def test_a_run_of_any_method(words: tuple[str, ...], make_run: Runner, tmp_path: Path) -> None:
    anchors = write_jsonl(tmp_path / "anchors.jsonl", corpus_rows(16, seed=9))
    words = (f"data.anchor_path={anchors}", "split.anchor=null", "finetune.lr=1e-2", *words)
    on = ("finetune.retention=20", "finetune.batch_size=8")
    said: list[str] = []
    run = make_run(*words, *on, out="on", until="finetune", said=said)
    off = make_run(*words, on[1], out="off", until="finetune")
    summary = json.loads((run / "6_finetune/summary.json").read_text())
    expected = {"weight": 20.0, "tau": 1.0, "anchors": 16, "anchors_per_step": 2}
    assert summary["retention"] == expected
    assert "retention" not in json.loads((off / "6_finetune/summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "finetune" and "step" in line]
    assert len(steps) == summary["steps"] and steps[-1]["retention"] > 0
    assert [line for line in said if line.startswith("retention: 20 × CWSD on 2 of 16 anchors")]
    weights = [load_file(r / "6_finetune/model/model.safetensors") for r in (run, off)]
    assert distance(*weights) > 1e-5
    mask = run / "5_selection/mask.safetensors"
    if (
        mask.is_file() and "method.params=lift" not in words
    ):  # entries outside the mask stay those of θ_old
        chosen, base = load_file(mask), load_file(settings_model(run) / "model.safetensors")
        for name, weight in base.items():
            rest = torch.ones(weight.numel(), dtype=torch.bool)
            rest[chosen.get(name, torch.zeros(0, dtype=torch.int64))] = False
            assert torch.equal(weights[0][name].view(-1)[rest], weight.view(-1)[rest])


def settings_model(run: Path) -> Path:
    return Path(settings.load(run / "config.yaml").model.path)


def fingerprint(run: Path) -> dict[str, Any]:
    return json.loads((run / "6_finetune/manifest.json").read_text())["fingerprint"]["settings"]


def test_the_fingerprint_has_it_only_when_it_acts(make_run: Runner) -> None:
    words = ("method.params=all", "method.data=random", "finetune.epochs=1")
    said: list[str] = []
    run = make_run(*words, until="finetune")
    plain = fingerprint(run)
    assert not [key for key in plain if "retention" in key or "tau" in key or "anchor" in key]
    make_run(*words, "finetune.retention_batch=3", "score.tau=2", until="finetune", said=said)
    assert "[finetune] reused: nothing it depends on has changed" in said
    assert any("finetune.retention_batch=3 has no effect" in line for line in said)
    make_run(*words, "finetune.retention=0.5", until="finetune")
    more = fingerprint(run)
    added = {"finetune.retention": 0.5, "anchors per step": 1, "score.tau": 1.0}
    assert more == plain | added
    for changed in ("finetune.retention_batch=2", "score.tau=2", "split.anchor=0.2"):
        said.clear()
        make_run(*words, "finetune.retention=0.5", changed, until="finetune", said=said)
        assert any(line.startswith("[finetune] done") for line in said)


def test_without_anchors_it_is_refused(make_run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(until="selection")
    roles = RunContext.roles
    monkeypatch.setattr(RunContext, "roles", lambda self: roles(self) | {"anchor": []})
    with pytest.raises(ConfigError, match=r"finetune\.retention: 1 needs anchors.*anchor_path"):
        make_run("finetune.retention=1", until="finetune")
    assert not (run / "6_finetune").exists()


def test_diagnostics_that_repeat_the_training_refuse_it(make_run: Runner) -> None:
    run = make_run("finetune.retention=1", until="split")
    ctx = RunContext(settings.load(run / "config.yaml"), RunDir(run), QUIET)
    with pytest.raises(RunError, match=r"finetune\.retention\) is more than a fixed mask"):
        plain_training(ctx)
