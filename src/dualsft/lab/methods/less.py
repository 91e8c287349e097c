"""LESS: selects examples whose Adam direction agrees with the validation gradients.

Replaces the data selection of Algorithm 1 (lines 10, 11). A LoRA adapter on the attention's linear
layers is trained on D_warm for some epochs. The weights, the moments m, v and the mean learning
rate w (scaled to sum to 1) at the end of each epoch give

    Γ_n   = (β₁ m + (1 − β₁) g_n) / √(β₂ v + (1 − β₂) g_n² + ε)      Adam's direction for n
    score = Σ_epochs w ⟨Γ̃_n / ‖Γ̃_n‖, mean over D_val of g̃ / ‖g̃‖⟩

where ˜ is a seeded projection to `dim` numbers, layer by layer (`engine/sketch.py`), and g_n the
gradient of the example loss with respect to the adapter, without dropout. The b highest scores are
selected. Gradients are computed in batches and not stored: the validation sketches are averaged,
and a training sketch is reduced to its score as soon as it is computed. All of D_val is one
subtask.

`Sketcher` sketches gradients with respect to any linear maps of a model, for LESS (an adapter) and
SPICE. As in the ghost engine (`engine/rules.py`), each use of a linear map is observed with its
input and output gradient. If a transform applies to the entries of the gradient first (LESS's Adam
direction), gradients are formed, for one map at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualsft.config.methods import Entry
from dualsft.data.examples import Batch, Example
from dualsft.engine.fused import checkpointed, fused_blocks
from dualsft.engine.ghost import frozen, start_graph
from dualsft.engine.losses import example_objective
from dualsft.engine.rules import LinearRule
from dualsft.engine.sketch import Sketch
from dualsft.errors import ConfigError
from dualsft.lab.methods.lora import import_peft
from dualsft.lab.methods.per_example import per_example, top
from dualsft.model.load import decoder_blocks, is_linear
from dualsft.runs.method import DataChoice, DataMethod, Job
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.usage import give_back, is_out_of_memory
from dualsft.train.loop import FEW_STEPS, Hooks, scheduled_rate, train
from dualsft.train.optimizer import SparseAdamW

NAME = "less"  # name of the adapter inside the model
CLIP = 1.0  # the original's trainer clips the gradient norm to this value

Transform = Callable[[str, Tensor, slice], Tensor]
"""(parameter, gradients [B, O, I] of some examples, their slice of the batch) -> what to project;
may overwrite the gradients."""

FORMED_ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Maximum entries of per-example gradients of one map formed at a time."""


class Less(DataMethod):
    """Selects the b examples with the highest scores."""

    def __init__(self, entry: Entry, options: Any) -> None:
        super().__init__(entry, options)
        self.pool_roles = ("pool",) if options.exclude_warmup else ("pool", "warm")

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        ctx, options = job.ctx, self.options
        model = ctx.theta_old()
        targets, where = target_maps(model)
        maps = attach(model, targets, options, job.rng)
        ctx.reporter.say(
            f"less: an adapter of rank {options.rank} on {len(targets)} linear layers ({where})"
        )
        checkpoints = self._warm_up(job, model, maps)
        dense = options.projection == "dense"
        sketch = Sketch(options.dim, ctx.config.seed, "less", dense)
        sketcher = Sketcher(model, maps, sketch, ctx.config.score.checkpointing)
        scores = np.zeros(len(pool))
        for number, checkpoint in enumerate(checkpoints, 1):
            checkpoint.load(maps)
            label = f"epoch {number} of {len(checkpoints)}"
            target = validation_direction(job, sketcher, label)
            direction = checkpoint.direction(model.device, options.eps_inside)
            scores += checkpoint.weight * sketch_scores(
                job, sketcher, direction, target, pool, label
            )
        facts = {
            "checkpoint_weights": [c.weight for c in checkpoints],
            "adapter_entries": sum(m.get_parameter("weight").numel() for m in maps.values()),
            "adapted_maps": len(targets),
        }
        return DataChoice(top(scores, pool, b), facts, scores)

    def _warm_up(
        self, job: Job, model: PreTrainedModel, maps: Mapping[str, nn.Module]
    ) -> list[Checkpoint]:
        """Train the adapter on D_warm; returns its state at the end of each epoch."""
        ctx, options, examples = job.ctx, self.options, job.roles["warm"]
        if not examples:
            raise ConfigError(
                "split.warm: method.data=less trains its adapter on D_warm, which is empty; raise "
                "split.warm"
            )
        plan = replace(
            finetune_plan(ctx, len(examples)),
            lr=options.lr or ctx.base_lr(),
            epochs=options.epochs,
            batch_size=options.batch_size,
            warmup_ratio=options.warmup_ratio,
            max_grad_norm=CLIP,
            micro_batch_size=None,
        )
        num_steps = plan.num_steps(len(examples))
        if num_steps < FEW_STEPS:
            ctx.reporter.warn(
                f"less: its warmup has only {num_steps} steps over {len(examples):,} examples; the "
                "moments and the directions are rough (raise split.warm or method.less.epochs, or "
                "lower method.less.batch_size)"
            )
        per_epoch = num_steps // plan.epochs
        rates = [scheduled_rate(s, num_steps, plan.lr, plan.warmup_ratio) for s in range(num_steps)]
        parameters = {name: module.get_parameter("weight") for name, module in maps.items()}
        found: list[Checkpoint] = []
        with SparseAdamW(
            [*parameters.items()], None, lr=plan.lr, seed=plan.seed, free_gradients=True
        ) as optimizer:

            def after_step(done: int) -> None:
                if done % per_epoch == 0:
                    # mean learning rate of the epoch, normalized over the epochs
                    weight = sum(rates[done - per_epoch : done]) / sum(rates)
                    found.append(Checkpoint.of(optimizer, parameters, weight))

            # no saved progress: a resumed warmup would lack the checkpoints of earlier epochs, so
            # it is repeated from the start after a kill
            hooks = Hooks(after_step=after_step)
            train(model, examples, optimizer, plan, ctx.reporter, "less: warmup", hooks=hooks)
        job.accounts.backward_examples += plan.epochs * len(examples)
        return found


@dataclass(frozen=True)
class Checkpoint:
    """Weights and Adam moments of the adapter at the end of an epoch, on the CPU."""

    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    weight: float
    """Weight of this epoch in the score."""
    betas: tuple[float, float]
    eps: float

    @classmethod
    def of(
        cls, optimizer: SparseAdamW, parameters: Mapping[str, nn.Parameter], weight: float
    ) -> Checkpoint:
        """Copy the current state."""
        kept: dict[str, dict[str, Tensor]] = {"weights": {}, "first": {}, "second": {}}
        for name, p in parameters.items():
            moments = optimizer.moments_of(name)
            kept["weights"][name] = p.detach().to("cpu", copy=True)
            kept["first"][name] = moments["exp_avg"].view(p.shape).to("cpu", copy=True)
            kept["second"][name] = moments["exp_avg_sq"].view(p.shape).to("cpu", copy=True)
        group = optimizer.param_groups[0]
        return cls(**kept, weight=weight, betas=group["betas"], eps=group["eps"])

    def load(self, maps: Mapping[str, nn.Module]) -> None:
        """Copy the weights into the adapter."""
        with torch.no_grad():
            for name, module in maps.items():
                module.get_parameter("weight").copy_(self.weights[name])

    def direction(self, device: torch.device, eps_inside: bool) -> Transform:
        """Γ as a transform that `engine/sketch.py` applies to the gradients of a layer."""
        first = {name: m.to(device) for name, m in self.first.items()}
        second = {name: v.to(device) for name, v in self.second.items()}
        (beta1, beta2), eps = self.betas, self.eps

        def transform(name: str, gradient_BOI: Tensor, _: slice) -> Tensor:
            squares = gradient_BOI.square().mul_(1.0 - beta2).add_(second[name], alpha=beta2)
            root = squares.add_(eps).sqrt_() if eps_inside else squares.sqrt_().add_(eps)
            return gradient_BOI.mul_(1.0 - beta1).add_(first[name], alpha=beta1).div_(root)

        return transform


def validation_direction(job: Job, sketcher: Sketcher, label: str) -> Tensor:
    """Mean over D_val of the normalized sketches of plain gradients: [dim]."""
    name, dim = f"less: D_val, {label}", sketcher.sketch.dim
    with sketcher.tapped() as taps:

        def compute(batch: Batch) -> Tensor:
            found = sketcher.of_batch(taps, batch)
            return found / _norms(found)

        val = job.roles["val"]
        rows = per_example(job, sketcher.model, val, name, dim, compute, backward=True)
    return rows.double().mean(0).to(sketcher.model.device, rows.dtype)


def sketch_scores(
    job: Job,
    sketcher: Sketcher,
    direction: Transform,
    target: Tensor,
    pool: list[Example],
    label: str,
) -> np.ndarray:
    """⟨Γ̃_n / ‖Γ̃_n‖, target⟩ of each example at one checkpoint."""
    with sketcher.tapped(direction) as taps:

        def compute(batch: Batch) -> Tensor:
            found = sketcher.of_batch(taps, batch)
            return (found @ target)[:, None] / _norms(found)

        name = f"less: pool, {label}"
        rows = per_example(job, sketcher.model, pool, name, 1, compute, backward=True)
    return rows[:, 0].double().numpy()


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-30)


# --- the adapter ----------------------------------------------------------------------------------


def target_maps(model: PreTrainedModel) -> tuple[list[str], str]:
    """(linear layers that get an adapter, description): those of attention, found by name."""
    prefix, blocks = decoder_blocks(model)
    linear = [path for path, m in blocks.named_modules(prefix=prefix) if is_linear(m)]
    found = [path for path in linear if "attn" in path or "attention" in path]
    if found:
        return found, "attention"
    return linear, "all layers of the blocks, since no name contains attn or attention"


def attach(
    model: PreTrainedModel,
    targets: list[str],
    options: Any,
    rng: Callable[[str], np.random.Generator],
) -> dict[str, nn.Module]:
    """Add a LoRA adapter to the model; returns its linear layers by the name of their weight.

    Initialized as in peft (A uniform, B zero), but seeded by `rng`, in fp32 or wider.
    """
    peft = import_peft("method.data: 'less'")
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        fan_in_fan_out=isinstance(model.get_submodule(targets[0]), Conv1D),
    )
    peft.inject_adapter_in_model(config, model, adapter_name=NAME)
    model.eval()  # peft adds modules in training mode, with dropout
    dtype = accumulation_dtype(next(model.parameters()).dtype)
    maps: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not path.endswith((f".lora_A.{NAME}", f".lora_B.{NAME}")):
            continue
        weight = module.get_parameter("weight")
        weight.data = weight.data.to(dtype)
        with torch.no_grad():
            if ".lora_A." in path:
                bound = weight.shape[1] ** -0.5
                drawn = rng(f"less/{path}").uniform(-bound, bound, tuple(weight.shape))
                weight.copy_(torch.from_numpy(drawn))
            else:
                weight.zero_()
        maps[f"{path}.weight"] = module
    return maps


# --- sketches of gradients ------------------------------------------------------------------------


@dataclass
class SketchTaps:
    """Accumulator of one backward pass: the sketch of each example of the batch."""

    sketch: Sketch
    transform: Transform | None
    dtype: torch.dtype
    device: torch.device
    bounds: bool = False
    num_examples: int = 0
    total: Tensor = field(init=False)

    @property
    def two_sided(self) -> bool:
        """Whether gradients are sketched without forming them."""
        return self.transform is None and not self.sketch.dense

    def begin(self, num_examples: int) -> None:
        """Reset the sketches for a new batch."""
        self.num_examples = num_examples
        shape = (num_examples, self.sketch.dim)
        self.total = torch.zeros(shape, dtype=self.dtype, device=self.device)


class _SketchRule(LinearRule):
    """Adds the sketch of each use of a linear map to the total."""

    def kept(self, taps: Any, x_BTI: Tensor) -> Tensor:
        return taps.sketch.of_inputs(self.names[0], x_BTI) if taps.two_sided else x_BTI

    def observe(self, taps: Any, x_BTI: Tensor, norms_BT: Tensor | None, grad_BTO: Tensor) -> None:
        name, sketch = self.names[0], taps.sketch
        if taps.two_sided:
            taps.total += sketch.of_tokens(name, x_BTI, grad_BTO)
            return
        size = grad_BTO.shape[-1] * x_BTI.shape[-1]
        limit = FORMED_ENTRIES.get(grad_BTO.device.type, FORMED_ENTRIES["cpu"])
        step = max(1, limit // size)
        for start in range(0, len(x_BTI), step):
            some = slice(start, min(start + step, len(x_BTI)))
            left, right = grad_BTO[some].to(taps.dtype), x_BTI[some].to(taps.dtype)
            formed = torch.bmm(left.mT, right)
            if taps.transform is not None:
                formed = taps.transform(name, formed, some)
            taps.total[some] += sketch.of_matrices(name, formed)


class Sketcher:
    """Sketches of per-example gradients with respect to some linear maps of a model.

    While it is tapped, no parameter of the model requires a gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Mapping[str, nn.Module],
        sketch: Sketch,
        checkpointing: bool | None = None,
    ) -> None:
        """`modules` are linear maps, keyed by the name of their weight. `checkpointing` recomputes
        activations in the backward pass; None: off until the first out-of-memory."""
        self.model, self.sketch, self.checkpointing = model, sketch, checkpointing
        self.rules = [_SketchRule(module, {"weight": name}) for name, module in modules.items()]
        self.dtype = accumulation_dtype(next(model.parameters()).dtype)

    @contextmanager
    def tapped(self, transform: Transform | None = None) -> Iterator[SketchTaps]:
        """Observe every backward pass inside the context; restores the model on exit."""
        taps = SketchTaps(self.sketch, transform, self.dtype, self.model.device)
        with ExitStack() as stack:
            stack.enter_context(frozen(self.model))
            stack.enter_context(fused_blocks(self.model, wide=True))
            for rule in self.rules:
                stack.enter_context(rule.attached(taps))  # pyright: ignore[reportArgumentType]
            stack.callback(start_graph(self.model.get_input_embeddings()).remove)
            yield taps

    def of_batch(self, taps: SketchTaps, batch: Batch) -> Tensor:
        """Sketches of the loss gradient of each example of a batch: [B, dim]."""
        try:
            return self._differentiate(taps, batch)
        except Exception as problem:
            if self.checkpointing is not None or not is_out_of_memory(problem):
                raise
        give_back(self.model.device)
        self.checkpointing = True  # same results, less memory
        return self._differentiate(taps, batch)

    def _differentiate(self, taps: SketchTaps, batch: Batch) -> Tensor:
        taps.begin(len(batch.input_ids))
        with torch.enable_grad(), checkpointed(self.model, bool(self.checkpointing)):
            objective, _ = example_objective(self.model, batch)
            objective.backward()
        return taps.total
