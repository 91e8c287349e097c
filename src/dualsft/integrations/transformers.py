"""Inside a Hugging Face `Trainer` or a TRL `SFTTrainer`: its rows, its loss, its AdamW, our mask.

What `dualsft.score_trainer` (`api.py`) reads, and `restrict`, which is Algorithm 1 line 12 in their
loop: the trainer updates only the entries of m_θ, on the rows of D_sel. TRL is never imported.

`restrict` is a function to call before `trainer.train()`, and no callback: `train()` builds the
dataloader, counts the steps, and makes optimizer and scheduler from that count, before it calls any
callback. Before `train()`, `train_dataset` and `optimizer` are plain attributes: `restrict` sets
them as `Trainer(..., optimizers=(optimizer, None))` would, and everything else (steps, schedule,
clipping, accumulation, checkpoints) follows by itself.

`DualSFTCallback` chooses again during the training. A trainer fetches batches ahead, in one or more
processes, and counts its steps before the first: rows can be exchanged only where it makes a new
iterator, at the beginning of an epoch. So its dataset is a `Round`, whose epoch has as many rows as
the wanted number of steps trains on, whatever the number of chosen rows. The chosen rows are in the
checkpoint's trainer_state.json, the mask and its moments in its optimizer.pt.

Rows are read through the trainer's own collator, one at a time, so labels are those that it trains
on, however they came about. The trainer's loss is compared with ours, in value and gradient: this
finds whatever replaces it, known to us or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from dualsft.algorithm.split import assign_roles, resolve_budget
from dualsft.data.examples import IGNORE, Example, as_examples, collate
from dualsft.engine.fused import HALF_DTYPES
from dualsft.engine.ghost import alone
from dualsft.errors import ConfigError, RunError
from dualsft.model.load import Candidates
from dualsft.model.sharded import device_of
from dualsft.storage.vectors import ParamVector
from dualsft.train.optimizer import SparseAdamW

if TYPE_CHECKING:
    # at run time it needs accelerate; the user has imported it
    from transformers import Trainer, TrainerState

logger = logging.getLogger(__name__)

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
    in_half = model.dtype in HALF_DTYPES or hasattr(model, "_original_forward")  # Accelerate's
    tolerance = HALF_TOLERANCE if in_half else LOSS_TOLERANCE
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
    problems += _undecayed(trainer, param_mask)
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


def _undecayed(trainer: Trainer, param_mask: Mapping[str, Tensor | None]) -> list[str]:
    assert trainer.model is not None
    plain = sorted(set(param_mask) - set(trainer.get_decay_parameter_names(trainer.model)))
    if not trainer.args.weight_decay or not plain:
        return []
    return [
        f"weight_decay: Trainer decays no norms and biases, but SparseAdamW decays all that it "
        f"trains, here {plain[0]} too; give weight_decay=0, or leave them out of the mask"
    ]


def _wrong_rows(trainer: Trainer, rows: Sequence[int] | np.ndarray) -> list[str]:
    dataset: Any = trainer.train_dataset
    if not hasattr(dataset, "__len__"):
        return ["train_dataset: rows of a stream cannot be chosen; give a dataset with a length"]
    if getattr(trainer.args, "packing", False):
        return ["packing: rows are packed already; select them before packing, then give no rows"]
    if not len(rows) or min(rows) < 0 or max(rows) >= len(dataset):
        return [f"rows: must be one or more numbers from 0 to {len(dataset) - 1:,}"]
    return []


# --- choosing again ----------------------------------------------------------------------------


class _Choice(Protocol):
    """What `dualsft.select` returns, or anything with these two."""

    @property
    def param_mask(self) -> Mapping[str, Tensor | None]: ...

    @property
    def rows(self) -> Sequence[int]: ...


class Round(Dataset[Any]):
    """`size` rows of a dataset: the chosen ones, repeated or drawn from, each as often within one.

    The rows may be exchanged between two iterators of a DataLoader.
    """

    def __init__(self, dataset: Any, size: int) -> None:
        self.dataset, self.size = dataset, size
        self._order: list[int] = []

    def fill(self, rows: Sequence[int], seed: int) -> None:
        shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
        self._order = [int(rows[shuffled[i % len(rows)]]) for i in range(self.size)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if not self._order:
            raise RunError("no rows are chosen yet; call trainer.add_callback with the callback")
        return self.dataset[self._order[i]]


class DualSFTCallback(TrainerCallback, ExportableState):
    """Choose rows and weight entries again every so many steps of a `Trainer` or `SFTTrainer`.

        def choose(trainer):
            scores = dualsft.score_trainer(trainer, form="calibrated")
            return dualsft.select(scores, data_budget=0.1, param_budget=0.05)

        trainer.add_callback(dualsft.DualSFTCallback(trainer, choose, every=100))
        trainer.train()

    `choose` sees the trainer with its whole train_dataset and with its model as it is at that step,
    without a mask. It is called before the first step and then after every `every` optimizer steps,
    and must give the same again for the same weights. An epoch of the trainer is `every` steps, so
    `num_train_epochs` counts choices, and `max_steps` counts steps as usual.

    Entries that stay in the mask keep their moments, entries that enter start with none, and
    entries that leave keep their last value; with `carry=False` all moments start again
    (`SparseAdamW.set_indices`). `settings` are of `SparseAdamW`, as in `restrict`. A training that
    resumes from a checkpoint goes on with its rows and mask.
    """

    def __init__(
        self,
        trainer: Trainer,
        choose: Callable[[Trainer], _Choice],
        every: int,
        *,
        carry: bool = True,
        **settings: Any,
    ) -> None:
        """Make the trainer train rows and entries that are exchanged; call it before `train()`."""
        args, dataset = trainer.args, trainer.train_dataset
        problems = [] if every >= 1 else [f"every={every} is not allowed; give a number of steps"]
        if not hasattr(dataset, "__len__"):
            problems.append("train_dataset is a stream; give a dataset with a length")
        for name, allowed, why in _EXCHANGEABLE:
            if (value := getattr(args, name, allowed[0])) not in allowed:
                problems.append(f"{name}={value!r} is not allowed: {why}; give {allowed[0]!r}")
        if problems:
            raise ConfigError([f"DualSFTCallback: {problem}" for problem in problems])
        self.optimizer = restrict(trainer, {}, **settings)
        self.trainer, self.choose, self.every, self.carry = trainer, choose, every, carry
        self.rows: list[int] = []
        """Row numbers that are trained on now."""
        size = every * args.train_batch_size * args.gradient_accumulation_steps
        self._round = Round(dataset, size)
        trainer.train_dataset = self._round  # type: ignore[assignment]
        self._kept = False

    def state(self) -> dict[str, Any]:
        """What trainer_state.json of a checkpoint keeps."""
        kept = {"rows": self.rows, "every": self.every, "num_rows": len(self._round.dataset)}
        return {"args": {}, "attributes": kept}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Resume the rows of a checkpoint that was saved between two choices."""
        self._kept = state.global_step % self.every != 0
        if not state.global_step:
            return
        held: Any = state.stateful_callbacks
        for name in (type(self).__name__, "attributes"):
            held = held.get(name) if isinstance(held, dict) else None
        kept: dict[str, Any] = held if isinstance(held, dict) else {}
        now = self.state()["attributes"]
        if any(kept.get(name) != now[name] for name in ("every", "num_rows")):
            shown = ", ".join(f"{name}={kept.get(name)!r:.40}" for name in ("every", "num_rows"))
            raise ConfigError(
                f"DualSFTCallback: the checkpoint's trainer_state.json has {shown}, and this "
                f"training every={self.every} and {now['num_rows']:,} rows; give what it was "
                "started with"
            )
        rows, most = kept.get("rows"), now["num_rows"] - 1
        ours = isinstance(rows, list) and all(type(i) is int and 0 <= i <= most for i in rows)
        if not rows or not ours:
            raise ConfigError(
                f"DualSFTCallback: rows={rows!r:.60} in the checkpoint's trainer_state.json is not "
                f"allowed: it must be a list of numbers from 0 to {most:,}; copy the checkpoint "
                "again, or resume from another one"
            )
        self.rows = rows

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Exchange rows and mask before the trainer makes an iterator over its rows."""
        step = state.global_step
        if not self._kept:
            self._exchange(step)
        self._kept = False
        self._round.fill(self.rows, args.seed + step - step % self.every)

    def _exchange(self, step: int) -> None:
        trainer, model = self.trainer, plain_model(self.trainer)
        trainer.train_dataset, training = self._round.dataset, model.training
        try:
            with self.optimizer.detached():
                chosen = self.choose(trainer)
            if problems := _undecayed(trainer, chosen.param_mask) + _wrong_rows(
                trainer, chosen.rows
            ):
                raise ConfigError(problems)
        finally:
            trainer.train_dataset = self._round  # type: ignore[assignment]
            model.train(training)
        new = len(set(chosen.rows) - set(self.rows))
        self.rows = [int(row) for row in chosen.rows]
        self.optimizer.set_indices(chosen.param_mask, self.carry)
        logger.info(
            "step %d: %d rows chosen, %d of them new, %d weight entries",
            *(step, len(self.rows), new, self.optimizer.num_selected),
        )


_EXCHANGEABLE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("world_size", (1,), "one process computes the scores"),
    ("auto_find_batch_size", (False,), "it would change the number of rows of a step"),
    ("dataloader_persistent_workers", (False,), "the workers would keep the old rows"),
    ("train_sampling_strategy", ("random", "sequential"), "it orders the rows of the first choice"),
    ("restore_callback_states_from_checkpoint", (False,), "this callback restores itself"),
)
"""Arguments of a trainer, their allowed values, and why no others."""
