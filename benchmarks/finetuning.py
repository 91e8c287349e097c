"""Cost of restricted fine-tuning: step time and peak memory against LoRA, SHiRA and full AdamW.

Algorithm 1 line 12 (MaskedFT). A step is forward and backward of one micro-batch (2 x 4,096 tokens
on a GPU), clipping and the optimizer update. All methods use the same model, batch, chunked loss
(`losses.example_objective`) and per-block checkpointing, so only the method differs:

- `SparseAdamW` on 5 % of the block linears;
- PEFT LoRA of rank 64 on every linear layer, adapters and moments in fp32 like our master weights
  and moments; the goals refer to this row;
- the same with bf16 adapters and moments, which needs the least memory;
- SHiRA with as many entries as ours;
- full AdamW with its state in the model's dtype;
- LoRA as usually run: the model's own loss with full logits, under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, ShiraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.measuring import Contender, Meter, Section, measure
from benchmarks.options import Options
from benchmarks.workload import build_model, fixed_examples
from dualsft.data.examples import Batch, Example, collate
from dualsft.engine.fused import checkpointed
from dualsft.engine.losses import example_objective
from dualsft.model.load import find_candidates, text_parameters
from dualsft.system.progress import Reporter
from dualsft.train.compact import Moments
from dualsft.train.loop import TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW

BUDGET = 0.05
RANK = 64
WARMUPS = 1  # untimed calls of STEPS steps each
STEPS = 3
ROWS = 2
TOKENS = {"cpu": 128, "cuda": 4096}
OURS = "DualSFT 5 %"
LORA, FULL = f"LoRA r={RANK}", "full AdamW"
GOALS = ((f"memory / {LORA}", 0.95), (f"time / {LORA}", 0.8), (f"time / {FULL}", 1.0))

Prepared = tuple[Callable[[], object], int]
"""A call of `STEPS` steps, and the number of entries it trains."""
Method = Callable[[PreTrainedModel, list[Example], Options, bool], Prepared]
"""Prepares a model for training; the last argument is checkpointing."""


def run(options: Options) -> Section:
    """Measure every method with and without checkpointing."""
    meter = Meter(options.device)
    tokens = 32 if options.quick else TOKENS[options.device.type]
    trained: dict[str, int] = {}
    contenders: dict[str, Contender] = {}
    for checkpointing in (True, False):
        for name, method in methods().items():
            row = f"{name}, {_mode(checkpointing)}"
            references = [f"{label}, {_mode(checkpointing)}" for label in (LORA, FULL)]
            if not options.wanted(row, *references):
                continue
            contenders[row] = contender(options, method, checkpointing, tokens, row, trained)
    found, skipped = measure(meter, contenders, rounds=options.rounds, warmups=WARMUPS)
    section = Section("fine-tuning", _conditions(options, tokens), skipped=skipped)
    for name, measured in found.items():
        section.add(name, measured, per=STEPS, figures={"trained entries": trained[name]})
    for checkpointing in (True, False):
        mode = _mode(checkpointing)
        for label in (LORA, FULL):
            section.compare(label, f"{label}, {mode}", partial(_ends, f", {mode}"))
        for key, limit in GOALS if options.on_gpu else ():
            ours = section.rows.get(f"{OURS}, {mode}", {})
            section.goal(f"{OURS}, {mode}, {key}", ours.get("ratios", {}).get(key), limit)
    return section


def _mode(checkpointing: bool) -> str:
    return "checkpointing" if checkpointing else "no checkpointing"


def _ends(suffix: str, name: str) -> bool:
    return name.endswith(suffix)


def _conditions(options: Options, tokens: int) -> dict[str, Any]:
    return {
        "model": Path(options.model).name,
        "dtype": str(options.dtype).removeprefix("torch."),
        "micro_batch": f"{ROWS} x {tokens} tokens, a quarter of them prompt",
        "steps_timed": STEPS * options.rounds,
        "rounds": options.rounds,
        "loss": "losses.example_objective for all but the row that says otherwise",
    }


def methods() -> dict[str, Method]:
    """The methods by name."""
    return {
        OURS: partial(_sparse, moments="float32"),
        f"{OURS}, bf16 moments": partial(_sparse, moments="bfloat16"),
        f"{OURS}, int8 moments": partial(_sparse, moments="int8"),
        LORA: partial(_lora, wide=True),
        f"{LORA}, bf16 adapters": partial(_lora, wide=False),
        f"{LORA}, own loss": partial(_lora, wide=True, own_loss=True),
        "SHiRA 5 %": _shira,
        FULL: _full,
    }


def contender(
    options: Options,
    method: Method,
    checkpointing: bool,
    tokens: int,
    row: str,
    trained: dict[str, int],
) -> Contender:
    """A new model prepared by the method; the timed call runs `STEPS` steps."""

    @contextmanager
    def setup() -> Iterator[Callable[[], object]]:
        model = build_model(options.model, options.device)
        examples = fixed_examples(ROWS * STEPS, tokens, model.config.vocab_size)
        steps, trained[row] = method(model, examples, options, checkpointing)
        yield steps

    return setup


def random_indices(model: PreTrainedModel, share: float) -> dict[str, Tensor]:
    """A random mask of this share of every block linear, as sorted flat indices."""
    indices = {}
    for name, parameter in find_candidates(model, "block_linear").items():
        chosen = torch.rand(parameter.numel(), device=parameter.device) < share
        indices[name] = chosen.nonzero().view(-1)
    return indices


def _sparse(
    model: PreTrainedModel,
    examples: list[Example],
    options: Options,
    checkpointing: bool,
    moments: Moments,
) -> Prepared:
    """Restricted fine-tuning as in a run, with the library's training loop."""
    optimizer = SparseAdamW(
        text_parameters(model),
        random_indices(model, BUDGET),
        lr=1e-5,
        moments=moments,
        free_gradients=True,
    )
    plan = TrainingPlan(
        lr=1e-5,
        epochs=1,
        batch_size=ROWS,
        warmup_ratio=0.0,
        max_grad_norm=1.0,
        micro_batch_size=ROWS,
        batch_tokens=1 << 20,
        seed=0,
        pad_id=0,
        padding_side="right",
        checkpointing=checkpointing,
    )
    reporter = Reporter(_refuse_warnings)
    return (
        lambda: train(model, examples, optimizer, plan, reporter, "steps"),
        optimizer.num_selected,
    )


def _refuse_warnings(line: str) -> None:
    """Raise on warnings: out of memory, the loop would continue with smaller batches."""
    if line.startswith("warning"):
        raise torch.OutOfMemoryError(line)


def _lora(
    model: PreTrainedModel,
    examples: list[Example],
    options: Options,
    checkpointing: bool,
    wide: bool,
    own_loss: bool = False,
) -> Prepared:
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", bias="none")
    adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=wide)
    loss = _own_loss(adapted, options) if own_loss else _shared_loss(model)
    return _torch_steps(model, examples, options, checkpointing, loss)


def _shira(
    model: PreTrainedModel, examples: list[Example], options: Options, checkpointing: bool
) -> Prepared:
    """SHiRA with as many entries as ours: each target layer has r · (rows + columns)."""
    shapes = [p.shape for p in find_candidates(model, "block_linear").values()]
    wanted = BUDGET * sum(rows * columns for rows, columns in shapes)
    rank = max(1, round(wanted / sum(rows + columns for rows, columns in shapes)))
    config = ShiraConfig(r=rank, target_modules=_block_linear_modules(model))
    config.mask_fn = _random_mask  # the default draws a permutation on the CPU, which takes minutes
    get_peft_model(model, config, autocast_adapter_dtype=False)
    return _torch_steps(model, examples, options, checkpointing, _shared_loss(model))


def _block_linear_modules(model: PreTrainedModel) -> list[str]:
    return sorted({name.split(".")[-2] for name in find_candidates(model, "block_linear")})


def _random_mask(base_layer: nn.Module, r: int, random_seed: int | None = None, **_: Any) -> Tensor:
    """A random mask of r · (rows + columns) entries of the layer, drawn on its device."""
    weight = base_layer.get_parameter("weight")
    chosen = torch.randperm(weight.numel(), device=weight.device)[: r * sum(weight.shape)]
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[chosen] = True
    return mask.view(weight.shape)


def _full(
    model: PreTrainedModel, examples: list[Example], options: Options, checkpointing: bool
) -> Prepared:
    model.requires_grad_(True)
    return _torch_steps(model, examples, options, checkpointing, _shared_loss(model))


Loss = Callable[[Batch], tuple[Tensor, Tensor]]
"""(scalar to differentiate, values that are read once per step)."""


def _shared_loss(model: PreTrainedModel) -> Loss:
    """The chunked loss of the library; PEFT adds its adapters to the same model in place."""
    return lambda batch: example_objective(model, batch, scale=1.0 / len(batch.input_ids))


def _own_loss(model: Any, options: Options) -> Loss:
    """The model's own forward with labels, under autocast if the adapters are fp32."""

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        cast = torch.autocast("cuda", torch.bfloat16) if options.on_gpu else nullcontext()
        with cast:
            value = model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
            ).loss
        return value, value.detach()

    return loss


def _torch_steps(
    model: PreTrainedModel,
    examples: list[Example],
    options: Options,
    checkpointing: bool,
    loss: Loss,
) -> Prepared:
    """Steps of torch AdamW on all trainable parameters of the model."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5, weight_decay=0.0, fused=options.on_gpu)
    batches = [examples[i : i + ROWS] for i in range(0, len(examples), ROWS)]
    model.train()

    def steps() -> None:
        with checkpointed(model, checkpointing):
            for rows in batches:
                objective, values = loss(collate(rows, 0, "right", options.device))
                objective.backward()
                nn.utils.clip_grad_norm_(trainable, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                float(values.sum())

    return steps, sum(p.numel() for p in trainable)
