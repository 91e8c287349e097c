"""SparseAdamW in Trainer, SFTTrainer and ordinary loops, against a masked torch.optim.AdamW."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from models import assert_equal, snapshot
from small_tokenizers import byte_tokenizer
from test_optim import (
    Masks,
    backward,
    batch,
    indices_of,
    plain_arithmetic,  # noqa: F401
    random_masks,
    tiny_llama,
)
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from dualsft.train.optimizer import SparseAdamW

LR, DECAY, STEPS = 1e-2, 0.1, 6
Row = dict[str, Tensor]


class MaskedAdamW(torch.optim.AdamW):
    """The reference: gradients times the mask, and unselected entries put back after a step."""

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        named = {n: p for n, p in model.named_parameters() if n in masks and masks[n].any()}
        for name, p in model.named_parameters():
            p.requires_grad_(name in named)
        self.kept = [(p, masks[name]) for name, p in named.items()]
        for p, mask in self.kept:
            p.register_hook(lambda grad, mask=mask: grad * mask)
        super().__init__(named.values(), lr=LR, weight_decay=DECAY)
        self.register_step_pre_hook(self._remember)
        self.register_step_post_hook(self._put_back)

    def _remember(self, *_: object) -> None:
        self.before = [p.detach().clone() for p, _ in self.kept]

    def _put_back(self, *_: object) -> None:
        for (p, mask), before in zip(self.kept, self.before, strict=True):
            p.data.copy_(torch.where(mask, p, before))


def ours(model: nn.Module, masks: Masks, **settings: Any) -> SparseAdamW:
    named = model.named_parameters()
    return SparseAdamW(named, indices_of(masks), lr=LR, weight_decay=DECAY, **settings)


def masks_of(model: nn.Module) -> Masks:
    """Block weights and a part of the embedding, which is the head too when they are tied."""
    masks = random_masks(model, 0.3)
    embedding = model.get_parameter("model.embed_tokens.weight")
    draw = torch.Generator().manual_seed(9)
    masks["model.embed_tokens.weight"] = torch.rand(embedding.shape, generator=draw) < 0.3
    return masks


def assert_trained(model: nn.Module, reference: nn.Module, masks: Masks) -> None:
    """Equal to fp32 rounding; unselected entries have the bits they started with."""
    start = snapshot(tiny_llama(tied=model.config.tie_word_embeddings))  # type: ignore[union-attr]
    there = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        mask = masks.get(name, torch.zeros(p.shape, dtype=torch.bool))
        assert torch.equal(p[~mask], start[name][~mask]), name
        torch.testing.assert_close(p, there[name], rtol=1e-4, atol=2e-6)
        if mask.any():
            assert (p[mask] != start[name][mask]).float().mean() > 0.9, name


# --- Trainer -----------------------------------------------------------------------------------


def arguments(folder: Path, **settings: Any) -> dict[str, Any]:
    given = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return given | settings


def rows(count: int = 24) -> list[Row]:
    return [{"input_ids": ids, "labels": ids} for i in range(count) for ids in batch(i)[:1]]


def door(optimizer: Any) -> dict[str, Any]:
    """The argument of Trainer for an optimizer, or for a class with its settings."""
    if isinstance(optimizer, tuple):
        return {"optimizer_cls_and_kwargs": optimizer}
    return {"optimizers": (optimizer, None)}


def sft_trainer(model: nn.Module, args: dict[str, Any], optimizer: Any) -> Trainer:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokens = [row["input_ids"].tolist() for row in rows()]
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**args, bf16=False, gradient_checkpointing=False),
        train_dataset=datasets.Dataset.from_dict({"input_ids": tokens}),
        processing_class=byte_tokenizer(),
        **door(optimizer),
    )


def plain_trainer(model: nn.Module, args: dict[str, Any], optimizer: Any) -> Trainer:
    given: Any = {"train_dataset": rows()} | door(optimizer)
    return Trainer(model, TrainingArguments(**args), **given)


def run_trainer(
    folder: Path,
    make: Callable[..., Any],
    tied: bool = False,
    resume: str = "",
    trainer_of: Callable[..., Trainer] = plain_trainer,
    **settings: Any,
) -> tuple[LlamaForCausalLM, Masks, list[float]]:
    model = tiny_llama(tied=tied)
    masks = masks_of(model)
    trainer = trainer_of(model, arguments(folder, **settings), make(model, masks))
    trainer.train(resume_from_checkpoint=resume or None)
    norms = [float(log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    return model, masks, norms


@pytest.mark.parametrize("trainer_of", [plain_trainer, sft_trainer])
@pytest.mark.parametrize("max_norm", [0.0, 0.2])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_trainer_trains_as_masked_adamw(
    tmp_path: Path,
    max_norm: float,
    accumulation: int,
    tied: bool,
    trainer_of: Callable[..., Trainer],
) -> None:
    settings: dict[str, Any] = {"max_grad_norm": max_norm, "trainer_of": trainer_of}
    settings["gradient_accumulation_steps"] = accumulation
    model, masks, norms = run_trainer(tmp_path, ours, tied, **settings)
    expected, _, expected_norms = run_trainer(tmp_path, MaskedAdamW, tied, **settings)
    assert_trained(model, expected, masks)
    assert len(norms) == STEPS and norms == pytest.approx(expected_norms, rel=1e-4)
    assert min(norms) > 0.2, "clipping must bite"


def by_class(model: nn.Module, masks: Masks) -> tuple[type, dict[str, Any]]:
    settings = {"indices": indices_of(masks), "lr": LR, "weight_decay": DECAY}
    return SparseAdamW, {"params": list(model.named_parameters())} | settings


@pytest.mark.parametrize("trainer_of", [plain_trainer, sft_trainer])
@pytest.mark.parametrize("tied", [False, True])
def test_trainer_makes_the_optimizer(
    tmp_path: Path, tied: bool, trainer_of: Callable[..., Trainer]
) -> None:
    settings: dict[str, Any] = {"max_grad_norm": 0.2, "trainer_of": trainer_of}
    model, masks, _ = run_trainer(tmp_path, by_class, tied, **settings)
    expected, _, _ = run_trainer(tmp_path, MaskedAdamW, tied, **settings)
    assert_trained(model, expected, masks)

    def without_names(model: nn.Module, masks: Masks) -> tuple[type, dict[str, Any]]:
        return SparseAdamW, {"indices": indices_of(masks), "lr": LR}

    with pytest.raises(ValueError, match=r"have no names .* list\(model.named_parameters\(\)\)"):
        run_trainer(tmp_path, without_names, tied, **settings)


def test_a_trainer_checkpoint_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.2}
    model, masks, norms = run_trainer(tmp_path, ours, **settings)
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed, _, again = run_trainer(tmp_path, ours, resume=checkpoint, **settings)
    assert_equal(snapshot(resumed), snapshot(model))
    assert again == norms
    expected, _, _ = run_trainer(tmp_path / "reference", MaskedAdamW, max_grad_norm=0.2)
    assert_trained(resumed, expected, masks)


def test_trainer_is_refused_what_it_would_not_clear(tmp_path: Path) -> None:
    start = snapshot(tiny_llama())
    models: list[nn.Module] = []

    def lean(model: nn.Module, masks: Masks) -> SparseAdamW:
        models.append(model)
        return ours(model, masks, free_gradients=True)

    with pytest.raises(RuntimeError, match="create the SparseAdamW without it"):
        run_trainer(tmp_path, lean)
    assert_equal(snapshot(models[0]), start)


# --- Loops written by hand ---------------------------------------------------------------------

Clear = Callable[[nn.Module, torch.optim.Optimizer], None]
CLEARINGS: dict[str, Clear] = {
    "model": lambda model, _: model.zero_grad(),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "model_in_place": lambda model, _: model.zero_grad(set_to_none=False),
    "optimizer_in_place": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}


def loop(make: Callable[..., Any], clear: Clear, own_clipping: bool, tied: bool) -> Any:
    model = tiny_llama(tied=tied)
    masks, norms = masks_of(model), []
    optimizer = make(model, masks)
    for step in range(STEPS):
        backward(model, 100 + step)  # dropped, as a batch that went wrong
        clear(model, optimizer)
        backward(model, step, 2)
        if own_clipping and isinstance(optimizer, SparseAdamW):
            norms.append(float(optimizer.clip_grad_norm(0.2)))
        else:
            norms.append(float(clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        clear(model, optimizer)
    return model, masks, norms


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own_clipping", [False, True])
@pytest.mark.parametrize("clearing", CLEARINGS)
def test_whoever_clears_and_clips(clearing: str, own_clipping: bool, tied: bool) -> None:
    model, masks, norms = loop(ours, CLEARINGS[clearing], own_clipping, tied)
    expected, _, expected_norms = loop(MaskedAdamW, CLEARINGS["model"], own_clipping, tied)
    assert_trained(model, expected, masks)
    assert norms == pytest.approx(expected_norms, rel=1e-4) and min(norms) > 0.2


@pytest.mark.parametrize("tied", [False, True])
def test_accelerate(tied: bool) -> None:
    """`prepare`, `accumulate` and `clip_grad_norm_`, in a loop written by hand."""

    def trained(make: Callable[..., Any]) -> tuple[nn.Module, Masks, list[float]]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, norms = tiny_llama(tied=tied), []
        masks = masks_of(model)
        loader: Any = DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]
        wrapped, optimizer, loader = accelerator.prepare(model, make(model, masks), loader)
        for row in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**row).loss)
                if accelerator.sync_gradients:
                    norm: Any = accelerator.clip_grad_norm_(wrapped.parameters(), 0.2)
                    norms.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
        return model, masks, norms

    model, masks, norms = trained(ours)
    expected, _, expected_norms = trained(MaskedAdamW)
    assert_trained(model, expected, masks)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert len(norms) == STEPS and min(norms) > 0.2, "clipping must bite"
    with pytest.raises(RuntimeError, match="create the SparseAdamW without it"):
        trained(lambda model, masks: ours(model, masks, free_gradients=True))


def test_loss_scaling_wants_gradients_to_unscale() -> None:
    model = tiny_llama()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = ours(model, masks_of(model), free_gradients=True)
    ids = batch(0)
    scaler.scale(model(input_ids=ids, labels=ids).loss).backward()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="unscales gradients in p.grad"):
        scaler.step(optimizer)
    assert_equal(snapshot(model), snapshot(tiny_llama()))


def test_loss_scaling() -> None:
    model, expected = tiny_llama(), tiny_llama()
    masks = masks_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, reference = ours(model, masks), MaskedAdamW(expected, masks)
    for step in range(STEPS):
        ids = batch(step)
        scaler.scale(model(input_ids=ids, labels=ids).loss).backward()  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 0.2)
        before = snapshot(model)
        if step == 3:  # an overflow: the step is skipped
            optimizer.param_groups[0]["params"][0].grad.fill_(torch.inf)
            scaler._per_optimizer_states.clear()
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        if step == 3:
            assert_equal(snapshot(model), before)
            continue
        backward(expected, step)
        assert float(norm) == pytest.approx(float(clip_grad_norm_(expected.parameters(), 0.2)))
        reference.step()
        expected.zero_grad()
    assert_trained(model, expected, masks)


# --- What is masked, what is refused -----------------------------------------------------------


def test_a_parameter_that_is_unfrozen_again_counts_for_nothing() -> None:
    model = tiny_llama()
    masks = random_masks(model, 0.3)
    optimizer = ours(model, masks)
    model.requires_grad_(True)
    backward(model, 0)
    norm = optimizer.total_norm()
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e9), norm)
    optimizer.step()
    start = snapshot(tiny_llama())
    for name, p in model.named_parameters():
        changed = p != start[name]
        assert not changed[~masks.get(name, torch.zeros_like(changed))].any()


def test_nan_outside_the_selection_stays_outside() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = SparseAdamW([("p", p)], {"p": torch.tensor([1])}, lr=1e-2)
    (p * torch.tensor([torch.nan, 1.0, torch.inf, 1.0])).sum().backward()
    assert p.grad is not None and p.grad.tolist() == [0, 1, 0, 0]
    optimizer.step()
    assert (p != 1).tolist() == [False, True, False, False]


def test_freed_gradients_never_pile_up() -> None:
    model = tiny_llama()
    optimizer = ours(model, masks_of(model), free_gradients=True)
    backward(model, 0, 2)
    optimizer.step()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="call the optimizer's, or create it without"):
        backward(model, 1)
    optimizer.zero_grad()
    backward(model, 1)
    p = model.get_parameter(optimizer.names[0])
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="has a gradient in p.grad, which free_gradients=True"):
        optimizer.step()


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """It reduces masked gradients; freed ones it would reduce to zeros, which is refused."""
    import torch.distributed as dist

    method = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    try:
        for free in (False, True):
            layer = nn.Linear(4, 4)
            index = {"weight": torch.tensor([1, 5])}
            optimizer = SparseAdamW(layer.named_parameters(), index, lr=0.1, free_gradients=free)
            before = layer.weight.detach().clone()
            wrapped = nn.parallel.DistributedDataParallel(layer)
            wrapped(torch.ones(2, 4)).sum().backward()
            if free:
                with pytest.raises(RuntimeError, match="DistributedDataParallel also needs that"):
                    optimizer.step()
                continue
            optimizer.step()
            assert (layer.weight != before).view(-1).nonzero().view(-1).tolist() == [1, 5]
    finally:
        # the reducer holds the group: freed after it, torch may wait for a thread of gloo forever
        del wrapped
        gc.collect()
        dist.destroy_process_group()


def test_parameters_of_other_libraries_are_refused() -> None:
    """What FSDP and DeepSpeed do: gradients past the hooks, parameters replaced or cut."""
    p = nn.Parameter(torch.ones(4))
    optimizer = SparseAdamW([("p", p)], {"p": torch.tensor([1])}, lr=1e-2)
    p.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="not zero outside the selected entries"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(4))]
    with pytest.raises(RuntimeError, match="or replaced .* FSDP and DeepSpeed"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [p]
    p.grad, p.data = None, p.data[:2]
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="or replaced .* FSDP and DeepSpeed"):
            call()
