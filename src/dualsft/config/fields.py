"""The sections of a run's settings: each field's type, default and meaning, in one place.

The settings are the decisions of ALGORITHM.md section 2 and the inputs of Algorithm 1. A field's
annotation says what it accepts, its default is the paper's value, the string under it is its
documentation. `config/settings.py` puts the sections together, checks, reads and writes them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from dualsft.config.parse import Bounds, Names, Options, Paths

Budget = Annotated[int | float, Bounds(above=0)]
Count = Annotated[int, Bounds(least=1)]
Whole = Annotated[int, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
NonNegative = Annotated[float, Bounds(least=0)]
Moments = Literal["float32", "bfloat16", "int8"]
TASK_NAMES = ("humaneval", "piqa", "arc_challenge", "mmlu", "gsm8k")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The weights to start from (theta_old)."""

    path: str
    """Hugging Face folder, hub id (org/name), .gguf file, or short name such as smollm2-135m."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; null is its main branch."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model; only when you trust its authors. Given on the
    command line or in Python each time: never read from a file, never stored."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Type of the weights in memory; auto is float32 on a CPU or mps, and on cuda the type they are
    stored in (float16 is read as bfloat16)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto is cuda when there is one, then mps."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of transformers; auto is sdpa when the model has it, else eager."""
    deterministic: bool = False
    """On a GPU: the same bits every time, after a resume too, at some cost in speed; a CPU always
    gives the same bits."""
    memory: Positive | None = None
    """GiB of the GPU's memory that the run may use; null is what is free when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The corpus D_full and how a row becomes tokens."""

    path: Annotated[str, Paths()]
    """The corpus: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, or .gz of these), a glob, a
    folder (plain files, `save_to_disk`, LLaMA-Factory's dataset_info.json), a Hugging Face hub id
    (extra `data`), or a list of these."""
    val_path: Annotated[str, Paths()] | None = None
    """A trusted source for D_val, read as data.path is; null takes D_val from the corpus."""
    dataset: Annotated[str, Names()] | None = None
    """Entries of dataset_info.json to read, comma-separated."""
    subset: str | None = None
    """Subset (configuration) of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset or of a folder with several; null is train."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset; null is its default branch."""
    format: Literal[
        "auto",
        "prompt_response",
        "prompt_completion",
        "alpaca",
        "messages",
        "openai",
        "sharegpt",
        "text",
    ] = "auto"
    """Fields of a row; auto looks at the rows."""
    template: Literal["chat", "magicoder", "alpaca", "plain"] = "chat"
    """Text around prompt and response; chat is the tokenizer's own template."""
    template_file: str | None = None
    """A Jinja file that takes the place of the tokenizer's chat template."""
    prompt_field: str | None = None
    """Name of the prompt field, when it is not a usual one; needs data.response_field."""
    response_field: str | None = None
    """Name of the response field, when it is not a usual one; needs data.prompt_field."""
    messages_field: str | None = None
    """Name of the field with the turns, when it is neither messages nor conversations."""
    system_field: str | None = None
    """Name of a field with the system text, when it is not a usual one."""
    max_length: Annotated[int, Bounds(least=8)] = 2048
    """Most tokens of an example, prompt included."""
    bad_rows: Literal["error", "skip"] = "error"
    """Rows that cannot be used (broken JSON, missing or empty fields, a response that does not
    fit): name them all and stop, or leave them out and say so."""
    padding_side: Literal["right", "left"] = "right"
    """Side on which a batch is padded; changes no score."""
    add_bos: Literal["auto", "always", "never"] = "auto"
    """Whether a row starts with the begin token; auto does as the tokenizer does, never twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """How D_full is divided; integers are counts, decimals are fractions of |D_full|."""

    val: Budget | None = None
    """Validation examples (v_new); null is the paper's 1024, at most 10 % of a small corpus."""
    anchor: Budget | None = None
    """Anchor examples (v_prior); null is the paper's 2048, at most 20 % of a small corpus."""
    warm: Budget = 0.05
    """Examples of the pilot warmup; they are not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """The pilot warmup: theta_old to theta_bar, and the curvature from its optimizer."""

    lr: Positive | None = None
    """Peak learning rate; null is finetune.lr."""
    epochs: Whole = 1
    """Passes over the warm examples; 0 means theta_bar = theta_old and no curvature."""
    batch_size: Count | None = None
    """Examples in an optimizer step; null is finetune.batch_size."""
    min_steps: Whole = 0
    """Repeat epochs until there are at least this many optimizer steps."""
    trainable: Literal["all", "candidates"] = "all"
    """Parameters that the warmup moves: all, or only those that compete (score.candidates)."""
    moments: Moments = "float32"
    """Type of the optimizer's moments, whose second one becomes the curvature: bfloat16 and int8
    (a logarithmic code of 8 bits) are rounded at random, without bias."""
    offload: bool = False
    """Keep moments and master weights in the host's memory and bring them over step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig:
    """Gradients, the projection u and both scores."""

    lam: Annotated[float, Bounds(least=0, most=1e30)] = 0.8
    """Weight of preservation: v_val = v_new + lam * v_prior."""
    lam_relative: bool = False
    """Rescale v_prior to the norm of v_new before lam."""
    tau: Positive = 1.0
    """Temperature of the CWSD loss."""
    preservation: Literal["cwsd", "l2", "fisher", "none"] = "cwsd"
    """What v_prior is the gradient of."""
    curvature: Literal["adam_rms", "none"] = "adam_rms"
    """Diagonal of the second-order term: the warmup optimizer's root second moment, or none."""
    curvature_scale: Annotated[float, Bounds(least=0, most=1e30)] = 1.0
    """Factor on the curvature in u."""
    step: Literal["sgd", "adam"] = "sgd"
    """The step the scores assume: sgd is the paper, adam divides the direction by the curvature."""
    mode: Literal["one_pass", "two_pass"] = "one_pass"
    """Passes over the pool: two as in the paper, or one with a certificate."""
    candidates: Annotated[str, Names()] = "block_linear"
    """Parameters that compete: block_linear, all, or comma-separated glob patterns over parameter
    names; a leading ! excludes, and exclusions alone start from block_linear."""
    keep: Annotated[str, Names(("gradients", "param_scores", "projection", "all"))] = "gradients"
    """Parameter-sized files to save beside the gradients (which are always saved, since selection
    reads them): param_scores, projection, or all; each as large as the candidates in fp32."""
    batch_tokens: Count | None = None
    """Most tokens in a scoring batch, padding included; changes no score beyond rounding; null is
    1,024 on a CPU; on a GPU as many as take 12 GiB (at least 4,096, at most 32,768)."""
    plan: Literal["auto", "device", "host", "blocks"] = "auto"
    """Where G and the direction are while the pool is walked: on the device; in the host's memory,
    brought over layer by layer; or on the device for some layers at a time, with several walks.
    auto takes the first that fits, and a smaller one when memory runs out."""
    checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them; null is when they would
    not fit otherwise."""
    precision: Literal["mixed", "half", "full"] = "mixed"
    """For a model in bfloat16 or float16: which walks have fp32 weights (TF32 products on a GPU,
    about half the speed). mixed: those over D_val and D_anchor, where rounding would be in every
    score; half: none; full: the pool's too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectConfig:
    """Which examples and which parameter entries are kept."""

    variant: Literal["dual", "data", "param"] = "dual"
    """Select both sides, only examples, or only parameter entries."""
    data_budget: Budget = 0.1
    """Examples to keep: a count, or a fraction of |D_full|."""
    param_budget: Budget = 0.05
    """Parameter entries to train: a count, or a fraction of the candidates."""
    rounds: Whole = 0
    """Re-selections of one side given the other."""
    order: Literal["data_to_param", "param_to_data"] = "data_to_param"
    """Which side the first round re-selects: parameters given the data, or the reverse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """Which method answers on each axis; `dualsft methods` lists them. Settings of a method itself
    are method.NAME.OPTION, such as method.less.dim."""

    data: str | None = None
    """What chooses the examples; null is dualsft, or what select.variant says."""
    params: str | None = None
    """What chooses the entries; null is dualsft, or what select.variant says."""
    weights: str | None = None
    """How tokens or examples count in training; null is the mean over the response tokens."""
    after: str | None = None
    """What is done to the trained weights; null is nothing."""
    preset: Literal["default", "paper"] = "default"
    """Where the methods' own options start: our defaults, or the DualSFT paper's literal values."""
    lr_ratio: Positive | None = None
    """Learning rate of fine-tuning over finetune.lr; null is the ratio of the paper's tables for
    the method that trains (1 for dualsft and for all parameters)."""
    denominator: Literal["candidates", "all", "eligible"] = "candidates"
    """What a fraction in select.param_budget is of: the candidates (score.candidates), all
    parameters, or what the method itself can choose from."""
    options: Annotated[dict[str, Any], Options()] = dataclasses.field(default_factory=dict)
    """Options of the methods as one mapping, NAME.OPTION -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig:
    """Restricted fine-tuning of theta_old on what was selected."""

    lr: Positive = 2e-5
    """Peak learning rate; also eta_ft of the scores."""
    epochs: Count = 3
    """Passes over the selected examples."""
    batch_size: Count = 64
    """Examples in an optimizer step."""
    micro_batch_size: Count | None = None
    """Examples in a forward pass; null is as many as score.batch_tokens allows, or 8,192 tokens on
    a GPU and 1,024 on a CPU."""
    max_grad_norm: NonNegative = 1.0
    """Clip the gradient of the trained entries to this norm; 0 is off. The warmup never clips."""
    moments: Moments = "float32"
    """Type of the optimizer's moments: bfloat16 and int8 (a logarithmic code of 8 bits) are rounded
    at random, without bias."""
    checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them (the warmup too); null is
    when they would not fit otherwise."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay on the trained entries."""
    warmup_ratio: Annotated[float, Bounds(least=0, below=1)] = 0.03
    """Share of the steps with a rising learning rate, before the cosine; the warmup uses it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """What the base and the tuned model are compared on."""

    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """Files in the format of data.path: name -> path, a list of paths (named by their stems), or
    as a flag name:path,name2:path2."""
    batch_tokens: Count | None = None
    """Most tokens in an evaluation batch; null is score.batch_tokens."""
    prompt: str | None = None
    """A prompt that both models answer, greedily."""
    max_new_tokens: Count = 48
    """Longest answer to evaluation.prompt."""
    limit: Count | None = None
    """Most examples of each file; null is all."""
    tasks: Annotated[str, Names(TASK_NAMES)] | None = None
    """Benchmarks that both models are asked, with the paper's settings (extra `eval`): any of
    humaneval, piqa, arc_challenge, mmlu, gsm8k; null is none."""
    domain: Literal["code", "math"] = "code"
    """Which benchmark is plasticity: humaneval (code) or gsm8k (math); stability is the mean of
    the four others."""
    data_dir: str | None = None
    """Folder with the benchmarks' rows as files (docs/evaluation.md); null takes them from the
    hub."""
    limit_tasks: Count | None = None
    """Most items of a benchmark (of mmlu: of each subject); null is all."""
    task_batch_size: Count | None = None
    """Requests in a batch of a benchmark, on a GPU 16 times as many where answers are generated;
    null is 8 (with vllm what it chooses)."""
    backend: Literal["hf", "vllm"] = "hf"
    """What answers the benchmarks: the loaded models, or vLLM where it is installed."""
    allow_code_execution: bool = False
    """Run the programs that the models write for humaneval, in a sandbox; the flag
    --allow-code-execution sets it. Never read from a file, never stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """What is kept of a stage while it runs, so that a kill loses little; changes no result."""

    every: NonNegative | None = 60.0
    """Seconds between saves of a stage's progress (never more than 5 % of its time, unless 0, which
    saves after every step and batch); null saves only when asked to stop (Ctrl-C, SIGTERM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How several processes (torchrun, --gpus) hold the model; changes no result but rounding."""

    mode: Literal["auto", "replicate", "shard"] = "auto"
    """replicate: every process has the whole model, and examples are shared out; shard: each has
    its rows of every parameter and vector (FSDP2); auto shards what does not fit one GPU."""
    offload: bool = False
    """With shard: each process's rows wait in the host's memory, and on the GPU only in use."""
