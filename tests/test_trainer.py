"""`score_trainer` and `restrict` in the real Trainer and SFTTrainer: same weights as `dualsft run`,
same scores as the API, unselected entries untouched, and refusals with a cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from conftest import Runner, corpus_rows, write_jsonl
from models import assert_equal, snapshot, tiny_model, tiny_rows, tiny_tokenizer
from peft import LoraConfig, get_peft_model
from places import place
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import dualsft
from dualsft.data.examples import training_order
from dualsft.errors import ConfigError, RunError
from dualsft.integrations.transformers import adam_curvature, trainer_rows
from dualsft.model.load import find_candidates, load_model
from dualsft.runs.stages.selection import read_mask
from dualsft.runs.stages.split import read_split
from dualsft.system.progress import Reporter

ROOT = Path(__file__).parents[1]
QUIET = Reporter(lambda _: None)
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "num_train_epochs": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}


def sft_arguments(folder: Path, **changes: Any) -> SFTConfig:
    return SFTConfig(str(folder), bf16=False, **(ARGUMENTS | changes))


def messages(row: dict[str, str]) -> dict[str, Any]:
    pairs = (("user", row["prompt"]), ("assistant", row["response"]))
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def completion(row: dict[str, str]) -> dict[str, Any]:
    return {"prompt": row["prompt"] + " ", "completion": row["response"]}


def sft(folder: Path, kind: Callable[..., Any] = completion, **changes: Any) -> Any:
    """An SFTTrainer on raw rows, with TRL's defaults (gradient checkpointing, fused head)."""
    rows = corpus_rows(60)
    texts = [f"{row['prompt']} {row['response']}" for row in rows]
    held = [kind(row) for row in corpus_rows(12, seed=5)]
    tables = {"val": held[:6], "anchor": held[6:]}
    given: dict[str, Any] = {
        "model": tiny_model("llama", torch.float32, vocab_size=320),
        "train_dataset": datasets.Dataset.from_list([kind(row) for row in rows]),
        "eval_dataset": {name: datasets.Dataset.from_list(own) for name, own in tables.items()},
        "processing_class": tiny_tokenizer(texts),
    }
    names = set(given) | {"optimizers", "optimizer_cls_and_kwargs", "compute_loss_func"}
    given |= {name: changes.pop(name) for name in names & set(changes)}
    return SFTTrainer(args=sft_arguments(folder, **changes), **given)


def assert_only_the_mask_moved(
    model: PreTrainedModel, before: dict[str, Tensor], mask: dict[str, Tensor]
) -> None:
    for name, p in model.named_parameters():
        changed = (p != before[name]).view(-1)
        inside = torch.zeros_like(changed)
        inside[mask.get(name, torch.tensor([], dtype=torch.int64))] = True
        assert not changed[~inside].any(), name
        assert not inside.any() or changed[inside].float().mean() > 0.5, name


# --- the weights of `dualsft run` --------------------------------------------------------------


@pytest.fixture(scope="module")
def even_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Responses of one length, for which a mean over tokens is a mean over examples."""
    rows = corpus_rows()
    for number, row in enumerate(rows):
        words = ["river", "stone", "cloud", "light"]
        order = [words[(number // 4**place + place) % 4] for place in range(4)]
        row["response"] = " ".join(["paper", *order])
    return write_jsonl(tmp_path_factory.mktemp("even") / "rows.jsonl", rows)


@pytest.mark.parametrize("max_norm", [0.0, 0.2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trl_gives_the_weights_of_a_run(
    shared_run: Runner, even_corpus: Path, tmp_path: Path, accumulation: int, max_norm: float
) -> None:
    """With its mask, its rows in its order, its schedule: equal to fp32 rounding."""
    settings = ("finetune.warmup_ratio=0", "select.data_budget=16", "warmup.min_steps=4")
    settings = (*settings, f"finetune.max_grad_norm={max_norm}", f"data.path={even_corpus}")
    run = shared_run(*settings, until="finetune")
    folder = Path(dualsft.load(str(run / "config.yaml")).model.path)
    chosen = set(json.loads((run / "5_selection/ids.json").read_text()))
    pool = read_split(place(run / "1_split"))["pool"]
    mine = [example for example in pool if example.id in chosen]
    assert len({example.num_response_tokens for example in mine}) == 1
    seed = dualsft.load(str(run / "config.yaml")).seed
    orders = [training_order(mine, seed, epoch) for epoch in range(2)]
    rows = [pool.index(mine[i]) for order in orders for i in order]
    model = load_model(folder, torch.float32, torch.device("cpu"))
    before = snapshot(model)
    columns = {"input_ids": [e.input_ids for e in pool], "labels": [e.labels for e in pool]}
    args = sft_arguments(
        tmp_path,
        learning_rate=json.loads((run / "6_finetune/summary.json").read_text())["lr"],
        lr_scheduler_type="cosine",
        train_sampling_strategy="sequential",
        max_grad_norm=max_norm,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
    )
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    mask = read_mask(run / "5_selection")
    dualsft.restrict(trainer, mask, rows)
    trainer.train()
    norms = [float(log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    assert trainer.state.global_step == 8 and min(norms) > 0.2, "clipping must bite"
    tuned = load_model(run / "6_finetune/model", torch.float32, torch.device("cpu"))
    for (name, p), q in zip(model.named_parameters(), tuned.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6, msg=name)
    assert_only_the_mask_moved(model, before, mask)


# --- scores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [messages, completion])
def test_score_select_and_train_inside_sft_trainer(tmp_path: Path, kind: Any) -> None:
    trainer = sft(tmp_path, kind)
    model, state = trainer.model, torch.get_rng_state()
    assert isinstance(model, PreTrainedModel)
    before = snapshot(model)
    given: dict[str, Any] = {"lam": 0.7, "reporter": QUIET}
    scores = dualsft.score_trainer(trainer, "val", anchors="anchor", warm=12, **given)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(snapshot(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert not trainer._metrics["train"] and not trainer._metrics["eval"]

    rows = trainer_rows(trainer, "train_dataset")
    for row, own in zip(rows, trainer.train_dataset, strict=True):
        assert row.labels == [-100, *own["labels"][1:]], "the labels that SFTTrainer trains on"
    scored = [example.index for example in scores.pool]
    assert len(scored) == len(rows) - 12 and [rows[i] for i in scored] == list(scores.pool)
    theta_bar = tiny_model("llama", torch.float32, vocab_size=320)
    warm = [row for row in rows if row.index not in set(scored)]
    curvature = dualsft.warmup(theta_bar, warm, lr=1e-3, batch_size=4, reporter=QUIET)
    val, anchors = (trainer_rows(trainer, name, name) for name in ("val", "anchor"))
    given |= {"eta_ft": 1e-3, "anchors": anchors, "theta_old": model, "curvature": curvature}
    expected = dualsft.score(theta_bar, list(scores.pool), val, **given)
    np.testing.assert_array_equal(scores.example_scores, expected.example_scores)
    assert float(scores.prior_grad.norm()) > 0

    chosen = dualsft.select(scores, data_budget=10, param_budget=0.05)
    assert chosen.rows == [scored[i] for i in chosen.data_subset]
    wanted = [trainer.train_dataset[row]["input_ids"] for row in chosen.rows]
    optimizer = dualsft.restrict(trainer, chosen.param_mask, chosen.rows)
    assert trainer.train_dataset["input_ids"][:] == wanted
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.optimizer.optimizer is optimizer
    assert_only_the_mask_moved(model, before, chosen.param_mask)


def token_rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    rows = tiny_rows(count, seed)
    return [{"input_ids": list(e.input_ids), "labels": list(e.labels)} for e in rows]


def plain(folder: Path, model: Any = None, **changes: Any) -> Any:
    """A Trainer on tokenized rows, one per batch; no datasets, no TRL."""
    given: dict[str, Any] = {
        "model": model or tiny_model("llama", torch.float32),
        "train_dataset": token_rows(20, 1),
        "eval_dataset": token_rows(4, 2),
    }
    names = set(given) | {"optimizers", "optimizer_cls_and_kwargs", "model_init"}
    given |= {name: changes.pop(name) for name in (names | {"compute_loss_func"}) & set(changes)}
    settings: dict[str, Any] = ARGUMENTS | {"per_device_train_batch_size": 1} | changes
    return Trainer(args=TrainingArguments(str(folder), **settings), **given)


def test_second_moments_of_ones_own_warmup(tmp_path: Path) -> None:
    """θ̄ and ĉ from a Trainer's AdamW, against the moments of the same steps written out."""
    settings: dict[str, Any] = {"max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}
    warm = plain(tmp_path, train_dataset=token_rows(5, 3), adam_beta2=0.95, **settings)
    warm.train()
    model = tiny_model("llama", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    second = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step, row in enumerate(token_rows(5, 3)):
        optimizer.param_groups[0] |= {"lr": 1e-3 * (1 - step / 5), "betas": (0.9, 0.95)}
        ids, labels = (torch.tensor([row[key]]) for key in ("input_ids", "labels"))
        model(input_ids=ids, labels=labels).loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            second[name] = 0.95 * second[name] + 0.05 * p.grad**2
        optimizer.step()
        optimizer.zero_grad()
    found = adam_curvature(warm, find_candidates(warm.model, "block_linear"))
    for name, block in found.items():
        expected = (second[name] / (1 - 0.95**5)).sqrt() + 1e-8
        torch.testing.assert_close(block, expected, rtol=1e-3, atol=1e-7)

    trainer = plain(tmp_path)
    scores = dualsft.score_trainer(trainer, warm=warm, reporter=QUIET)
    expected = dualsft.score(
        model, token_rows(20, 1), token_rows(4, 2), eta_ft=1e-3, curvature=found, reporter=QUIET
    )
    np.testing.assert_allclose(scores.example_scores, expected.example_scores, rtol=1e-2)
    cold = dualsft.score_trainer(trainer, warm=0, reporter=QUIET)
    assert not np.allclose(cold.example_scores, expected.example_scores, rtol=1e-2)


def test_a_list_of_rows_and_a_checkpoint(tmp_path: Path) -> None:
    """Rows that are no datasets.Dataset; training resumes as if it had never stopped."""

    def trained(folder: Path, resume: str | None = None) -> Any:
        trainer = plain(folder, save_strategy="steps", save_steps=3, max_grad_norm=0.2)
        mask = {"model.layers.1.mlp.up_proj.weight": torch.arange(0, 60, 7)}
        dualsft.restrict(trainer, mask, np.arange(4, 12), moments="bfloat16")
        assert len(trainer.train_dataset) == 8
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    whole = trained(tmp_path)
    resumed = trained(tmp_path / "again", resume=str(tmp_path / "checkpoint-3"))
    assert_equal(snapshot(resumed), snapshot(whole))


def test_a_mask_that_moves(tmp_path: Path) -> None:
    """`set_indices` between two steps of a Trainer: both masks were trained, nothing else."""
    trainer = plain(tmp_path)
    before, first, second = snapshot(trainer.model), torch.arange(0, 60, 7), torch.arange(1, 60, 7)
    optimizer = dualsft.restrict(trainer, {WEIGHT: first})

    class Move(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                optimizer.set_indices({WEIGHT: second})

    trainer.add_callback(Move)
    trainer.train()
    assert_only_the_mask_moved(trainer.model, before, {WEIGHT: torch.cat([first, second])})
    assert int(optimizer.moments_of(WEIGHT)["step"]) == 20


def test_selected_rows_are_packed_by_a_second_trainer(tmp_path: Path) -> None:
    """The cure that the refusal of packed rows names."""
    first = sft(tmp_path)
    chosen = first.train_dataset.select(range(12))
    packed = sft(tmp_path, train_dataset=chosen, packing=True, max_length=256)
    assert len(packed.train_dataset) < 12
    before, mask = snapshot(packed.model), {WEIGHT: torch.arange(0, 60, 7)}
    with pytest.raises(ConfigError, match="select them before packing"):
        dualsft.restrict(packed, mask, [0])
    dualsft.restrict(packed, mask)
    packed.train()
    assert_only_the_mask_moved(packed.model, before, mask)


# --- choosing again ----------------------------------------------------------------------------


class Recorded(list[dict[str, list[int]]]):
    """Rows, and the numbers of those that a trainer has read since they were last cleared."""

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        super().__init__(rows)
        self.read: list[int] = []

    def __getitem__(self, i: Any) -> Any:
        self.read.append(i)
        return super().__getitem__(i)


CALIBRATED: dict[str, Any] = {"form": "calibrated", "sketch_dim": 64, "reporter": QUIET}


class Chooser:
    """`choose` for the callback; keeps what was chosen, from which weights, and what was read."""

    def __init__(self, **settings: Any) -> None:
        self.settings: dict[str, Any] = CALIBRATED | {"warm": 0} | settings
        self.chosen: list[dualsft.Selection] = []
        self.weights: list[dict[str, Tensor]] = []
        self.read: list[list[int]] = []

    def __call__(self, trainer: Any) -> dualsft.Selection:
        held = trainer.train_dataset
        before: list[int] = list(getattr(held, "read", ()))
        scores = dualsft.score_trainer(trainer, **self.settings)
        self.weights.append(snapshot(trainer.model))
        self.chosen.append(dualsft.select(scores, data_budget=4, param_budget=0.01))
        if isinstance(held, Recorded):
            self.read.append(before)
            held.read.clear()
        return self.chosen[-1]


def chosen_again(
    folder: Path, chooser: Chooser, make: Any = None, resume: str = "", **changes: Any
) -> Any:
    """A training of 8 steps of two rows that chooses 4 of 20 rows at the steps 0, 3 and 6."""
    settings: dict[str, Any] = {"max_steps": 8, "gradient_accumulation_steps": 2}
    settings |= {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2, **changes}
    trainer = (make or plain)(folder, **settings)
    trainer.add_callback(dualsft.DualSFTCallback(trainer, chooser, every=3))
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def same_choice(a: dualsft.Selection, b: dualsft.api.Selection) -> bool:
    masks = a.param_mask.keys() == b.param_mask.keys()
    masks = masks and all(torch.equal(m, b.param_mask[name]) for name, m in a.param_mask.items())
    return masks and a.rows == b.rows


def test_rows_and_mask_are_chosen_again(tmp_path: Path) -> None:
    """Each choice is that of the API at the weights of its step; its rows and entries are trained.

    The weights are those of a loop written out: its own order, the same optimizer.
    """
    rows, chooser = Recorded(token_rows(20, 1)), Chooser()
    given: dict[str, Any] = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0}
    given |= {"lr_scheduler_type": "constant", "train_dataset": rows}
    trainer = chosen_again(tmp_path, chooser, **given)
    first, second, third = chooser.chosen
    assert not same_choice(first, second) and not same_choice(second, third)
    assert trainer.state.global_step == 8
    read = [*chooser.read[1:], rows.read]
    for chosen, own in zip(chooser.chosen, read, strict=True):
        assert set(own) == set(chosen.rows) and len(own) >= 4

    model = tiny_model("llama", torch.float32)
    optimizer = dualsft.SparseAdamW(model.named_parameters(), {}, lr=1e-2)
    weights = [*chooser.weights, snapshot(trainer.model)]
    for at, (chosen, own) in enumerate(zip(chooser.chosen, read, strict=True)):
        with optimizer.detached():
            val = token_rows(4, 2)
            scores = dualsft.score(model, list(rows), val, eta_ft=1e-2, **CALIBRATED)
        assert same_choice(dualsft.select(scores, data_budget=4, param_budget=0.01), chosen)
        optimizer.set_indices(chosen.param_mask)
        for step in range(2 if at == 2 else 3):
            pair = own[2 * step : 2 * step + 2]
            count = sum(label != -100 for i in pair for label in list(rows)[i]["labels"][1:])
            for i in pair:
                ids, labels = (torch.tensor([list(rows)[i][k]]) for k in ("input_ids", "labels"))
                model(input_ids=ids, labels=labels, num_items_in_batch=count).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, weights[at + 1][name], rtol=0, atol=2e-6)


def sft_on_pairs(folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {"per_device_train_batch_size": 1} | changes
    return sft(folder, completion, **given)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (plain, 4),
        (plain, 6),
        pytest.param(sft_on_pairs, 4, marks=pytest.mark.slow),
        pytest.param(sft_on_pairs, 6, marks=pytest.mark.slow),
    ],
)
def test_choosing_again_resumes_bit_for_bit(tmp_path: Path, make: Any, step: int) -> None:
    """From a checkpoint between two choices, and from one where a choice is due."""
    named = {"val": "val"} if make is sft_on_pairs else {}
    given: dict[str, Any] = {"make": make, "max_grad_norm": 0.2}
    whole, resumed = Chooser(**named), Chooser(**named)
    wanted = chosen_again(tmp_path, whole, **given)
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    found = chosen_again(tmp_path / "again", resumed, resume=checkpoint, **given)
    assert len(whole.chosen) == 3 and len({tuple(chosen.rows) for chosen in whole.chosen}) > 1
    assert len(resumed.chosen) == 1 and same_choice(resumed.chosen[0], whole.chosen[2])
    assert_equal(snapshot(found.model), snapshot(wanted.model))
    union = {
        name: torch.cat([c.param_mask[name] for c in whole.chosen if name in c.param_mask]).unique()
        for name in {name for chosen in whole.chosen for name in chosen.param_mask}
    }
    for name, p in wanted.model.named_parameters():
        changed = (p != whole.weights[0][name]).view(-1).nonzero().squeeze(-1)
        assert torch.isin(changed, union.get(name, changed[:0])).all(), name


@pytest.mark.slow
def test_choosing_again_with_workers_autocast_and_a_warmup(tmp_path: Path) -> None:
    """Workers have the new rows; scoring works under Accelerate's autocast, and keeps its state."""
    given: dict[str, Any] = {"warm": 6, "anchors": token_rows(4, 7)}
    given["theta_old"] = tiny_model("llama", torch.float32)
    found = []
    for workers in (0, 2):
        chooser, folder = Chooser(**given), tmp_path / str(workers)
        trainer = chosen_again(folder, chooser, bf16=True, dataloader_num_workers=workers)
        assert len({tuple(chosen.rows) for chosen in chooser.chosen}) > 1
        found.append(snapshot(trainer.model))
    assert_equal(*found)


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "give False"),
        ({"train_sampling_strategy": "group_by_length"}, "give 'random'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not allowed"),
        ({"restore_callback_states_from_checkpoint": True}, "this callback restores itself"),
        ({"train_dataset": iter([])}, "train_dataset is a stream"),
    ],
)
def test_where_rows_cannot_be_exchanged(tmp_path: Path, changes: dict[str, Any], cure: str) -> None:
    if "train_dataset" in changes:
        trainer, changes = plain(tmp_path), changes.copy()
        trainer.train_dataset = changes.pop("train_dataset")
    else:
        trainer = plain(tmp_path, **changes)
    with pytest.raises(ConfigError, match=cure):
        dualsft.DualSFTCallback(trainer, Chooser(), every=2)
    assert trainer.optimizer is None


def test_a_choice_that_cannot_be_trained(tmp_path: Path) -> None:
    """A callback that was not added, a wrong row, and a checkpoint of another training."""
    trainer = plain(tmp_path)
    dualsft.DualSFTCallback(trainer, Chooser(), every=2)
    with pytest.raises(RunError, match="call trainer.add_callback"):
        trainer.train()
    for rows, cure in (([20], "numbers from 0 to 19"), ([], "numbers from 0 to 19")):
        trainer, wrong = plain(tmp_path), dualsft.Selection({}, np.array(rows), 0, rows)
        trainer.add_callback(dualsft.DualSFTCallback(trainer, lambda _, c=wrong: c, every=2))
        with pytest.raises(ConfigError, match=cure):
            trainer.train()
    chosen_again(tmp_path, Chooser(), max_steps=2)
    for every, rows in ((4, 20), (3, 19)):
        trainer = plain(tmp_path, train_dataset=token_rows(rows, 1), max_steps=4)
        trainer.add_callback(dualsft.DualSFTCallback(trainer, Chooser(), every=every))
        with pytest.raises(ConfigError, match="give what it was started with"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


ROWS = [None, [], "abc", 5, {}, ["x"], [[1]], [float("nan")], [10**9], [-1, -1], [0.5], [True]]
NO_ATTRIBUTES = [None, [], 5, "abc", {}]


@pytest.mark.parametrize("where", ["rows", "attributes", "callback"])
def test_a_checkpoint_with_other_state_than_ours_is_refused(tmp_path: Path, where: str) -> None:
    trainer = plain(tmp_path)
    callback = dualsft.DualSFTCallback(trainer, Chooser(), every=3)
    for value in ROWS if where == "rows" else NO_ATTRIBUTES:
        kept: Any = {"every": 3, "num_rows": 20, "rows": value}
        whole = {"args": {}, "attributes": kept if where == "rows" else value}
        held: Any = {"DualSFTCallback": value if where == "callback" else whole}
        (tmp_path / "trainer_state.json").write_text(
            json.dumps({"global_step": 4, "stateful_callbacks": held})
        )
        state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
        with pytest.raises(ConfigError, match="the checkpoint's trainer_state.json"):
            callback.on_train_begin(trainer.args, state, None)
    kept = {"every": 3, "num_rows": 20}
    held = {"DualSFTCallback": {"attributes": kept}}
    state = TrainerState(global_step=4, stateful_callbacks=held)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="the checkpoint's trainer_state.json"):
        callback.on_train_begin(trainer.args, state, None)
    assert callback.rows == []
    kept["rows"] = [3, 0, 19]
    callback.on_train_begin(trainer.args, state, None)
    assert callback.rows == [3, 0, 19]


# --- refusals ----------------------------------------------------------------------------------


def twice(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return 2 * torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def filtered_gradient(folder: Path) -> Any:
    """A patched forward whose loss has the right value and another gradient."""
    trainer = plain(folder)
    own = trainer.model.forward

    @wraps(own)
    def forward(**inputs: Any) -> Any:
        outputs = own(**inputs)
        outputs.loss = 1.1 * outputs.loss - 0.1 * outputs.loss.detach()
        return outputs

    trainer.model.forward = forward
    return trainer


def lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


SCORING: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "packing": (lambda f: sft(f, packing=True, max_length=64), {"val": "val"}, "packing=False"),
    "dft": (lambda f: sft(f, loss_type="dft"), {"val": "val"}, "loss_type='nll'"),
    "smoothing": (lambda f: plain(f, label_smoothing_factor=0.1), {}, "label_smoothing_factor=0"),
    "twice": (lambda f: plain(f, compute_loss_func=twice), {}, "no compute_loss_func"),
    "filtered": (filtered_gradient, {}, "the gradients of .* differ by 10"),
    "liger": (lambda f: plain(f, use_liger_kernel=True), {}, "fused_linear_cross_entropy': False"),
    "no val": (lambda f: plain(f, eval_dataset=None), {}, "give it one with rows of the skill"),
    "two vals": (sft, {}, r"None is no entry of eval_dataset \(val, anchor\)"),
    "no anchors": (plain, {"anchors": "old"}, "'old' is no entry of eval_dataset"),
    "all warm": (plain, {"warm": 20}, "20 of 20 rows leaves none to score"),
    "untrained": (plain, {"warm": None}, r"train\(\) it first, with optim='adamw_torch'"),
    "adapter": (lambda f: plain(f, lora(tiny_model("llama", torch.float32))), {}, "merge_and_un"),
    "init": (lambda f: plain(f, tiny_model("llama"), lr_scheduler_type="linear"), {}, "model="),
    "raw": (lambda f: plain(f, eval_dataset=[{"input_ids": [1, 2]}]), {}, "no tokenized row"),
    "stream": (sft, {"val": iter([])}, "val is a stream"),
}


@pytest.mark.parametrize("case", SCORING)
def test_what_cannot_be_scored_is_refused(tmp_path: Path, case: str) -> None:
    make, given, cure = SCORING[case]
    trainer = make(tmp_path)
    if case == "untrained":
        given = {"warm": plain(tmp_path)}
    if case == "init":
        trainer.model_init = lambda: None
    before = snapshot(trainer.model)
    with pytest.raises(ConfigError, match=cure):
        dualsft.score_trainer(trainer, **({"warm": 0, "reporter": QUIET} | given))
    assert_equal(snapshot(trainer.model), before)


NORM, WEIGHT = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("settings", "given", "cure"),
    [
        ({"optim": "adafactor"}, {}, "give 'adamw_torch'"),
        ({"weight_decay": 0.1}, {"name": NORM}, "give weight_decay=0"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, {}, "neither optimizers nor"),
        ({}, {"rows": [20]}, "numbers from 0 to 19"),
        ({}, {"rows": []}, "numbers from 0 to 19"),
        ({}, {"half": True}, "fp16 weights; load the model with dtype=torch.float32"),
        ({}, {"twice": True}, "call restrict before train"),
    ],
)
def test_what_a_mask_cannot_train_with_is_refused(
    tmp_path: Path, settings: dict[str, Any], given: dict[str, Any], cure: str
) -> None:
    trainer = plain(tmp_path, **settings)
    mask = {given.get("name", WEIGHT): torch.tensor([3])}
    if "half" in given:  # Trainer itself refuses fp16 on a CPU
        trainer.model.half()
        trainer.args.fp16 = True
    if "twice" in given:
        dualsft.restrict(trainer, mask)
    kept = trainer.optimizer
    with pytest.raises(ConfigError, match=cure):
        dualsft.restrict(trainer, mask, given.get("rows"))
    assert trainer.optimizer is kept and len(trainer.train_dataset) == 20


# --- the example -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "masks"),
    [("trl_sft", messages, 1), ("trl_sft", completion, 1), ("trl_callback", completion, 3)],
)
def test_the_example_runs(
    tmp_path: Path,
    model_folder: Callable[[str], Path],
    name: str,
    kind: Callable[..., Any],
    masks: int,
) -> None:
    """Under 30 lines of code, on a folder and a file of rows."""
    script, model = ROOT / f"examples/{name}.py", model_folder("llama")
    code = script.read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in code.splitlines()) < 30
    rows = write_jsonl(tmp_path / "rows.jsonl", [kind(row) for row in corpus_rows()])
    command = [sys.executable, str(script), str(model), str(rows), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(dualsft.__file__).parents[1])}
    given: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
    done = subprocess.run(command, capture_output=True, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    cpu = torch.device("cpu")
    before = snapshot(load_model(model, torch.float32, cpu))
    tuned = load_model(tmp_path / "out", torch.float32, cpu)
    names = find_candidates(tuned, "block_linear")
    changed = sum(int((p != before[name]).sum()) for name, p in tuned.named_parameters())
    assert 0 < changed <= 0.05 * masks * names.num_entries
