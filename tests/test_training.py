"""The training loop (schedule, micro-batches, noise, what stops it) and its stages' settings."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import Runner
from models import assert_equal, snapshot, tiny_model, tiny_plan, tiny_rows
from rich.console import Console
from safetensors.torch import load_file

from dualsft.engine.losses import example_objective
from dualsft.errors import RunError
from dualsft.storage.resume import Piece
from dualsft.system.progress import Progress, Reporter
from dualsft.train import loop as training
from dualsft.train import step as adam_step
from dualsft.train.loop import restore, scheduled_rate, train
from dualsft.train.optimizer import SparseAdamW

QUIET = Reporter(lambda _: None)


def trained(
    model: Any, rows: int = 8, reporter: Reporter = QUIET, **changes: Any
) -> dict[str, torch.Tensor]:
    """The weights after training all entries."""
    with SparseAdamW(model.named_parameters(), None, lr=1e-3, free_gradients=True) as optimizer:
        train(model, tiny_rows(rows, 1), optimizer, tiny_plan(**changes), reporter, "test")
    return snapshot(model)


def weights_after(dropout: float = 0.0, **changes: Any) -> dict[str, torch.Tensor]:
    return trained(tiny_model("gpt2", torch.float64, dropout=dropout), 10, **changes)


@pytest.mark.parametrize(
    ("steps", "ratio"), [(1, 0.03), (6, 0.03), (86, 0.03), (50, 0.0), (7, 0.5)]
)
def test_schedule_equals_the_oracle_and_never_starts_at_zero(steps: int, ratio: float) -> None:
    ours = [scheduled_rate(s, steps, 2e-5, ratio) for s in range(steps)]
    assert ours == pytest.approx(oracle.cosine_schedule(steps, 2e-5, ratio), rel=1e-12)
    assert ours[0] > 0 and max(ours) <= 2e-5
    warmup = math.ceil(ratio * steps)
    assert all(a >= b for a, b in zip(ours[warmup:], ours[warmup + 1 :], strict=False))


def test_steps_and_floor() -> None:
    assert tiny_plan().num_steps(10) == 6
    assert tiny_plan(epochs=1, min_steps=11).num_steps(10) == 11
    assert tiny_plan(epochs=0, min_steps=11).num_steps(10) == 0
    assert tiny_plan(epochs=1, min_steps=11, max_epochs=2).num_steps(10) == 6
    assert tiny_plan(epochs=1, min_steps=5, max_epochs=2).num_steps(10) == 5
    assert tiny_plan(epochs=3, min_steps=11, max_epochs=2).num_steps(10) == 9, "epochs stay"


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 3},
        {"batch_tokens": 1},
        {"padding_side": "left"},
    ],
)
def test_micro_batches_change_nothing(changes: dict[str, Any]) -> None:
    reference, other = weights_after(), weights_after(**changes)
    assert max(float((reference[n] - other[n]).abs().max()) for n in reference) < 1e-9


def test_dropout_noise_depends_on_the_seed_alone() -> None:
    """Same seed, same bits, whatever the global random stream did before; and dropout is on."""
    torch.manual_seed(1)
    first = weights_after(dropout=0.3)
    torch.manual_seed(999)
    state = torch.get_rng_state()
    second = weights_after(dropout=0.3)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[n], second[n]) for n in first)
    calm = weights_after(dropout=0.0)
    assert any(not torch.equal(first[n], calm[n]) for n in first)
    other = weights_after(dropout=0.3, seed=4)
    assert any(not torch.equal(first[n], other[n]) for n in first)


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loss", "step 1: the loss of .* is not finite; nothing was updated"),
        ("gradient", "step 1: the gradient over row .* is not finite"),
        ("memory", r"moments of [\d,]+ trained entries .*finetune\.moments"),
    ],
)
def test_a_step_that_cannot_be_taken_changes_nothing(
    what: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", torch.float32)
    if what == "loss":
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    elif what == "gradient":
        nan = torch.tensor(math.nan)
        monkeypatch.setattr(SparseAdamW, "clip_grad_norm", lambda self, limit: nan)
    else:
        monkeypatch.setattr(adam_step, "new_state", full)
    before = snapshot(model)
    with pytest.raises(RunError, match=message):
        trained(model)
    assert_equal(snapshot(model), before)
    assert not model.training


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_in_smaller_micro_batches(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def trial(said: list[str]) -> dict[str, torch.Tensor]:
        plan: dict[str, Any] = {"batch_size": 6, "micro_batch_size": 6, "batch_tokens": 200}
        return trained(tiny_model("llama_tied_bias"), 13, Reporter(said.append), lr=1e-2, **plan)

    expected = trial([])
    real = training.example_objective

    def objective(model: Any, batch: Any, **options: Any) -> Any:
        total, losses = real(model, batch, **options)
        if len(batch.input_ids) > 2 and where == "forward":
            full()
        if len(batch.input_ids) > 2:
            hidden = next(p for n, p in model.named_parameters() if "layers.0.mlp" in n)
            weak.append(hidden.register_hook(full))
        return total, losses

    weak: list[Any] = []

    def step(*args: Any) -> Any:
        for handle in weak:
            handle.remove()
        weak.clear()
        return real_step(*args)

    real_step = training._Loop.step
    monkeypatch.setattr(training, "example_objective", objective)
    monkeypatch.setattr(training._Loop, "step", step)
    said: list[str] = []
    got = trial(said)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-10)
    assert any("out of memory" in line and "step 1" in line for line in said)


def test_memory_short_of_activations_turns_checkpointing_on_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch stays whole, the results keep their bits, and a user's own no is respected."""
    real, on = training.checkpointed, [False]

    @contextmanager
    def watched(model: Any, wanted: bool) -> Iterator[None]:
        on[0] = wanted
        with real(model, wanted):
            yield

    def objective(model: Any, batch: Any, **options: Any) -> Any:
        if not on[0] and len(batch.input_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(batch.input_ids))
        return example_objective(model, batch, **options)

    def trial(checkpointing: bool | None) -> dict[str, torch.Tensor]:
        plan: dict[str, Any] = {"checkpointing": checkpointing, "micro_batch_size": 4}
        return trained(tiny_model("llama", torch.float32), 8, Reporter(said.append), **plan)

    said: list[str] = []
    sizes: list[int] = []
    expected = trial(None)
    monkeypatch.setattr(training, "checkpointed", watched)
    monkeypatch.setattr(training, "example_objective", objective)
    got = trial(None)
    assert_equal(got, expected)
    warnings = [line for line in said if "out of memory" in line]
    assert len(warnings) == 1 and "finetune.checkpointing=true" in warnings[0]
    assert set(sizes) == {4}
    said.clear()
    sizes.clear()
    trial(False)
    assert set(sizes) == {1} and not any("checkpointing" in line for line in said)


def test_progress_line_tells_rate_time_and_memory() -> None:
    lines: list[str] = []
    records: list[dict] = []
    progress = Progress(
        "pool",
        4,
        "examples",
        lambda line, done: lines.append(line),
        lambda **values: records.append(values),
        interval=0.0,
    )
    progress.advance(1, tokens=50, loss=1.5)
    progress.advance(3, tokens=70)
    assert "1/4 examples (25 %)" in lines[0] and "loss 1.5000" in lines[0]
    assert "tok/s" in lines[0] and " left" in lines[0] and "GiB" in lines[0]
    assert "4/4 examples (100 %)" in lines[-1] and " left" not in lines[-1]
    assert records[-1]["percentage"] == 100 and records[-1]["remaining_time"] == 0
    progress.done, progress.width = 1, 48  # beside a bar, which shows the percentage
    short = progress.line(elapsed=60.0)
    assert len(short) <= 48 < len(lines[0]) and short.startswith("pool: 1/4 examples · loss 1.5000")
    assert short.endswith(" left")


def test_progress_on_a_terminal_is_a_bar_each() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    lines: list[str] = []
    reporter = Reporter(lines.append, terminal)
    with reporter.track("outer", 2, "parts") as outer, reporter.track("inner", 3, "steps") as inner:
        inner.advance(1)
        with reporter.track("a\u202eb\x9bc", 2, "steps") as odd:
            odd.advance(1)
        outer.advance(1)
        inner.advance(2)
    shown = terminal.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "inner: 1/3 steps (33 %)" in shown and "outer: 1/2 parts (50 %)" in shown
    assert "a\\u202eb\\u009bc: 1/2 steps" in shown and not set(shown) & {"\u202e", "\x9b"}
    assert [line.partition(" (")[0] for line in lines] == ["inner: 3/3 steps"]


def test_a_resume_keeps_the_checkpointing_that_is_set() -> None:
    """What lack of memory decided is taken over from a piece, what the user sets is not undone."""
    for asked, then, expected in ((True, None, True), (False, True, False), (None, True, True)):
        model = tiny_model("llama", torch.float32)
        with SparseAdamW(model.named_parameters(), None, lr=1e-3, free_gradients=True) as optimizer:
            held = {f"master.{n}": optimizer.master(n).clone() for n in optimizer.names}
            cut = {"batch_tokens": 64, "micro_batch_size": None, "checkpointing": then}
            piece = Piece(held, {"steps": 1, "cut": cut})
            steps, found = restore(optimizer, piece, tiny_plan(checkpointing=asked))
        assert (steps, found.checkpointing, found.batch_tokens) == (1, expected, 64)


# --- settings of the stages: what trains, in which dtype, and what is done again -----------------


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
