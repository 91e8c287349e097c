"""Inside a Hugging Face `Trainer` or a TRL `SFTTrainer`: its rows, its loss, its AdamW, our mask.

What `dualsft.score_trainer` (`api.py`) reads, and `restrict`, which is Algorithm 1 line 12 in their
loop: the trainer updates only the entries of m_θ, on the rows of D_sel. TRL is never imported.

Why a function to call before `trainer.train()`, and no callback: `train()` builds the dataloader,
counts the steps, and makes optimizer and scheduler from that count, before it calls any callback;
`on_init_end` comes before SFTTrainer has patched its model, and knows no dataset. A callback could
exchange these objects only behind the trainer's back. Before `train()` they are plain attributes:
`restrict` sets `train_dataset` and `optimizer`, as `Trainer(..., optimizers=(optimizer, None))`
would, and everything else (steps, schedule, clipping, accumulation, checkpoints) follows by itself.
For the same reason there is no selection in the middle of a training: the trainer's checkpoint has
no place for the rows in use, and resuming would replay the wrong ones. (A mask alone can move, by
`set_indices` of the optimizer.)

Rows are read through the trainer's own collator, one at a time, so labels are those that it trains
on, however they came about. The trainer's loss is compared with ours, in value and gradient: this
finds whatever replaces it, known to us or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedModel

from dualsft.algorithm.split import assign_roles, resolve_budget
from dualsft.data.examples import IGNORE, Example, as_examples, collate
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import alone
from dualsft.errors import ConfigError
from dualsft.model.load import Candidates
from dualsft.model.sharded import device_of
from dualsft.storage.vectors import ParamVector
from dualsft.train.optimizer import SparseAdamW

if TYPE_CHECKING:
    from transformers import Trainer  # at run time it needs accelerate; the user has imported it

LOSS_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
"""Relative difference allowed between a trainer's loss or gradient and ours, for one row."""


# --- what a trainer trains on ------------------------------------------------------------------


def plain_model(trainer: Trainer) -> PreTrainedModel:
    """The trainer's model; raises where it could not be scored or trained with a mask."""
    model, args = trainer.model, trainer.args
    problems = []
    if not isinstance(model, PreTrainedModel):
        problems.append(
            f"trainer.model: {type(model).__name__} is not a Hugging Face model; give the model "
            "itself (of a PEFT model merge_and_unload(), or train the adapter without a mask)"
        )
    if trainer.model_init is not None:
        problems.append("trainer.model_init: train() would make another model; give model=")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or args.n_gpu > 1:
        problems.append(
            "trainer.args: FSDP, DeepSpeed and DataParallel are not supported; train on one GPU "
            "(CUDA_VISIBLE_DEVICES=0), or with DistributedDataParallel (torchrun)"
        )
    if problems:
        raise ConfigError(problems)
    assert isinstance(model, PreTrainedModel)
    return model


def trainer_rows(trainer: Trainer, name: str, given: Any = None) -> list[Example]:
    """Rows as the trainer sees them; `index` is the row's number.

    `given` is a tokenized dataset, or the name of an entry of `eval_dataset`; None is
    `train_dataset` or, for other names than that, `eval_dataset`.
    """
    training = name == "train_dataset"
    dataset: Any = trainer.train_dataset if training else _given(trainer, name, given)
    columns = getattr(dataset, "column_names", None) or ()
    if getattr(trainer.args, "packing", False) or "seq_lengths" in columns:
        raise ConfigError(
            f"{name} is packed, and a packed row is several examples; score with packing=False, "
            "then give the selected rows (they are tokenized) to a second trainer with packing"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(f"{name} is a stream; give a dataset with a length, as rows are chosen")
    loader = trainer.get_eval_dataloader(dataset)
    assert loader.collate_fn is not None
    batches = (loader.collate_fn([loader.dataset[i]]) for i in range(len(dataset)))
    # nothing predicts the first token, though SFTTrainer labels it
    return [replace(e, labels=[IGNORE, *e.labels[1:]]) for e in as_examples(name, batches)]


def _given(trainer: Trainer, name: str, given: Any) -> Any:
    held = trainer.eval_dataset
    if isinstance(given, str) or (given is None and isinstance(held, Mapping)):
        entries = dict(held) if isinstance(held, Mapping) else {}
        if given not in entries:
            allowed = ", ".join(entries) or "none: it is no dict"
            raise ConfigError(f"{name}: {given!r} is no entry of eval_dataset ({allowed})")
        return entries[given]
    if given is None and held is None:
        raise ConfigError(
            f"{name}: the trainer has no eval_dataset; give it one with rows of the skill to learn "
            f"(they are never trained on), or give tokenized rows as {name}"
        )
    return held if given is None else given


def split_warm(
    rows: Sequence[Example], share: int | float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(rows for the warmup, the others), by hashes of their tokens as in `dualsft run`."""
    count = resolve_budget(share, len(rows), "warm")
    if count >= len(rows):
        raise ConfigError(f"warm: {count:,} of {len(rows):,} rows leaves none to score; give less")
    roles = assign_roles(rows, seed, warm=count, num_trusted=1, has_anchors=True).roles
    found: dict[str, list[Example]] = {"warm": [], "pool": []}
    for row, role in zip(rows, roles, strict=True):
        found[role].append(row)
    return found["warm"], found["pool"]


# --- its loss ----------------------------------------------------------------------------------


@contextmanager
def own_forward(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Inside, the forward of the model's class, without what is patched over this object's.

    TRL and Accelerate set `model.forward`; a copy of such a model would call the original's.
    """
    patched = vars(model).pop("forward", None)
    try:
        yield model
    finally:
        if patched is not None:
            model.forward = patched


def check_trainer_loss(trainer: Trainer, candidates: Candidates, row: Example) -> None:
    """Raise if the trainer's loss of one row, or its gradient, is not that of Algorithm 1."""
    model, (name, p) = plain_model(trainer), next(iter(candidates.items()))
    liger = trainer.args.liger_kernel_config or {}
    if trainer.args.use_liger_kernel and liger.get("fused_linear_cross_entropy", True):
        raise ConfigError(
            "use_liger_kernel=True replaces the loss when train() starts, where it cannot be "
            "checked; give liger_kernel_config={'fused_linear_cross_entropy': False}, or leave it"
        )
    model.eval()
    found: list[Tensor] = []
    batch = collate([row], 0, device=device_of(model))
    with own_forward(model):
        ours = alone(
            model, Candidates({name: p}, name), batch, lambda _, gradient: found.append(gradient)
        )
    inputs = {"input_ids": batch.input_ids, "labels": batch.labels}
    inputs["attention_mask"] = batch.attention_mask
    count = torch.tensor(row.num_response_tokens, device=batch.input_ids.device)
    counted = {k: deepcopy(v) for k, v in vars(trainer).items() if k in _COUNTED}
    required = p.requires_grad
    try:
        p.requires_grad_(True)
        model.training = True  # of this module only: its training path, without dropout below it
        loss: Any = trainer.compute_loss(model, inputs, num_items_in_batch=count)
        (theirs,), loss = torch.autograd.grad(loss, p), float(loss.detach())
    finally:
        model.training = False
        p.requires_grad_(required)
        vars(trainer).update(counted)
    apart = float((theirs - found[0]).norm() / found[0].norm().clamp_min(1e-30))
    tolerance = HALF_TOLERANCE if model.dtype in HALF_DTYPES else LOSS_TOLERANCE
    if not (apart <= tolerance and abs(loss - ours) <= tolerance * max(1.0, abs(ours))):
        raise ConfigError(
            f"{type(trainer).__name__}: its loss of row {row.index} is {loss:.6g} and the "
            f"mean cross-entropy of its labels {ours:.6g}; the gradients of {name} differ by "
            f"{apart:.1%}. Scores would not be about this training; use the plain loss "
            "(loss_type='nll', label_smoothing_factor=0, no compute_loss_func, no router loss, "
            "no kernel that replaces the loss)"
        )


_COUNTED = ("_metrics", "_total_train_tokens")
"""What SFTTrainer counts in `compute_loss`, for its log."""


# --- its AdamW ---------------------------------------------------------------------------------


def adam_curvature(trainer: Trainer, candidates: Candidates) -> ParamVector:
    """ĉ over the candidates, from the AdamW of a trainer that has trained (line 1)."""
    optimizer: Any = trainer.optimizer
    groups, state = (optimizer.param_groups, optimizer.state) if optimizer else ((), {})
    group_of = {id(p): group for group in groups for p in group["params"]}
    curvature = {}
    for name, p in candidates.items():
        held = state.get(p, {})
        second = held.get("exp_avg_sq")
        if second is None or second.shape != p.shape or "step" not in held:
            raise ConfigError(
                f"warm: the trainer's optimizer has no second moment of {name}; train() it first, "
                "with optim='adamw_torch' and all weights"
            )
        group = group_of[id(p)]
        unbiased = second.to(candidates.dtype) / (1.0 - group["betas"][1] ** float(held["step"]))
        curvature[name] = unbiased.sqrt_().add_(group["eps"])
    return ParamVector(curvature)


# --- the mask and the rows ---------------------------------------------------------------------


def restrict(
    trainer: Trainer,
    param_mask: Mapping[str, Tensor | None],
    rows: Sequence[int] | np.ndarray | None = None,
    **settings: Any,
) -> SparseAdamW:
    """Let `trainer.train()` update only these weight entries, on these rows of its train_dataset.

    Call it once, before `train()`. Learning rate, betas, eps and weight decay are those of
    `trainer.args`, schedule and clipping the trainer's own. `settings` are of `SparseAdamW`
    (`moments`, `offload`). Returns the optimizer, which is `trainer.optimizer` now.
    """
    model, args = plain_model(trainer), trainer.args
    problems = []
    if trainer.optimizer or trainer.optimizer_cls_and_kwargs or trainer.lr_scheduler:
        problems.append(
            "trainer: it has an optimizer or a schedule already; give neither optimizers nor "
            "optimizer_cls_and_kwargs, and call restrict before train()"
        )
    if not str(getattr(args.optim, "value", args.optim)).startswith("adamw_torch"):
        problems.append(f"optim: {args.optim} is not allowed with a mask; give 'adamw_torch'")
    if args.fp16 and model.dtype == torch.float16:
        problems.append(
            "fp16: loss scaling does not work with fp16 weights; load the model with "
            "dtype=torch.float32, or train with bf16=True"
        )
    plain = sorted(set(param_mask) - set(trainer.get_decay_parameter_names(model)))
    if args.weight_decay and plain:
        problems.append(
            f"weight_decay: Trainer decays no norms and biases, but SparseAdamW decays all that it "
            f"trains, here {plain[0]} too; give weight_decay=0, or leave them out of the mask"
        )
    if rows is not None:
        problems += _wrong_rows(trainer, rows)
    if problems:
        raise ConfigError(problems)
    trainer.optimizer = SparseAdamW(
        model.named_parameters(),
        param_mask,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        **settings,
    )
    if rows is not None:
        dataset, chosen = trainer.train_dataset, [int(row) for row in rows]
        own: Any = getattr(dataset, "select", None)  # a datasets.Dataset stays one
        trainer.train_dataset = own(chosen) if own else Subset[Any](dataset, chosen)  # type: ignore[arg-type]
    return trainer.optimizer


def _wrong_rows(trainer: Trainer, rows: Sequence[int] | np.ndarray) -> list[str]:
    dataset: Any = trainer.train_dataset
    if not hasattr(dataset, "__len__"):
        return ["train_dataset: rows of a stream cannot be chosen; give a dataset with a length"]
    if getattr(trainer.args, "packing", False):
        return ["packing: rows are packed already; select them before packing, then give no rows"]
    if not len(rows) or min(rows) < 0 or max(rows) >= len(dataset):
        return [f"rows: must be one or more numbers from 0 to {len(dataset) - 1:,}"]
    return []
