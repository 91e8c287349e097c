"""The sections of `Config`: type, default and documentation of every setting, and checks.

These are the inputs of Algorithm 1 and the options of the run. A field's annotation defines what
it accepts, its default is the paper's value where the paper has one (the one-pass mode gives the
selection of the paper's two passes), and the string below it is its documentation (`docs/config.md`
is generated from it). Contradictions between settings and settings without effect
are at the end of the file. `config/settings.py` combines, reads and writes the sections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

from dualsft.config.parse import Bounds, Names, show

Budget = Annotated[int | float, Bounds(above=0)]
Count = Annotated[int, Bounds(least=1)]
Whole = Annotated[int, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
NonNegative = Annotated[float, Bounds(least=0)]
Auto = Literal["auto"]
Moments = Literal["float32", "bfloat16", "int8"]
Quotas = Literal["even", "proportional"] | dict[str, int | float]
TASK_NAMES = ("humaneval", "piqa", "arc_challenge", "mmlu", "gsm8k")
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to start from (theta_old)."""

    path: str
    """Hugging Face folder, hub id (org/name), .gguf file, or a short name such as smollm2-135m."""
    revision: str | None = None
    """Branch, tag or commit of a hub id. null: the main branch."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. Enable only if you trust its authors. Accepted
    only on the command line or in Python; never read from a file, never stored."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Data type of the weights in memory. auto: float32 on CPU and mps; on cuda the stored type
    (float16 is loaded as bfloat16)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to run on. auto: cuda if available, then mps, then cpu."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation in transformers. auto: sdpa if the model supports it, else eager."""
    deterministic: bool = False
    """Bitwise reproducible results on a GPU, also after a resume, at some cost in speed. Results on
    a CPU are always bitwise reproducible."""
    memory: Positive | None = None
    """GPU memory that the run may use, in GiB. null: the memory that is free at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The corpus D_full and how rows are tokenized."""

    path: Annotated[str, "paths"]
    """The corpus: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, or .gz of these), a glob, a
    folder (plain files, `save_to_disk`, LLaMA-Factory's dataset_info.json), a Hugging Face hub id
    (extra `data`), or a list of these."""
    val_path: Annotated[str, "paths"] | None = None
    """A trusted source for D_val, in the forms of data.path. null: take D_val from the corpus."""
    anchor_path: Annotated[str, "paths"] | None = None
    """A source with rows of the behaviour to keep: all of them are D_anchor, in the forms of
    data.path. They do not count in |D_full|. null: take D_anchor from the corpus."""
    dataset: Annotated[str, Names()] | None = None
    """Entries of dataset_info.json to read, comma-separated."""
    subset: str | None = None
    """Subset (configuration) of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset, or of a folder with several splits. null: train."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset. null: the default branch."""
    outside: bool = False
    """Read what a file of a data folder names outside of it: a dataset of the hub in hf_hub_url of
    dataset_info.json, or a link. Leave it off for folders from others."""
    format: Literal[
        "auto",
        "prompt_response",
        "prompt_completion",
        "alpaca",
        "messages",
        "openai",
        "sharegpt",
        "text",
        "segments",
        "tokens",
    ] = "auto"
    """Row format. auto: detected from the fields of the rows."""
    template: Literal["chat", "magicoder", "alpaca", "plain"] = "chat"
    """Template for prompt and response. chat: the chat template of the tokenizer."""
    template_file: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    prompt_field: str | None = None
    """Name of the prompt field, if not detected automatically."""
    response_field: str | None = None
    """Name of the response field, if not detected automatically; chosen for preference pairs."""
    input_field: str | None = None
    """Name of a field whose text follows the prompt on a new line (alpaca's input)."""
    messages_field: str | None = None
    """Name of the field that holds the turns, if not messages or conversations."""
    text_field: str | None = None
    """Name of the field that holds a whole text to train on, if not text."""
    system_field: str | None = None
    """Name of the field that holds the system prompt, if not detected automatically."""
    source_field: str | None = None
    """Name of the field that holds the source of a row of data.path, such as the dataset that it is
    from. null: its file or dataset_info.json entry, if data.path names several."""
    max_length: Annotated[int, Bounds(least=8)] = 2048
    """Maximum number of tokens per example, including the prompt."""
    truncation: Literal["left", "prompt", "right"] = "left"
    """How a longer row is shortened. left: tokens from the left, the BOS kept; prompt: whole
    earlier rounds, then the beginning of the user's text, so that the template's own text stays;
    right: tokens from the end, as TRL's keep_start, also of the response."""
    bad_rows: Literal["error", "skip"] = "error"
    """How to handle invalid rows (broken JSON, missing or empty fields, a response that does not
    fit). error: list them and stop; skip: leave them out and report how many."""
    padding_side: Literal["right", "left"] = "right"
    """Padding side of batches; does not change scores."""
    add_bos: Literal["auto", "always", "never"] = "auto"
    """Whether to prepend the BOS token, at most once. auto: as the tokenizer does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Split of D_full. Integers are counts, decimals are fractions of |D_full|."""

    val: Budget | None = None
    """Validation examples (v_new). null: 1024 as in the paper, at most 10 % of a small corpus."""
    anchor: Annotated[int | float, Bounds(least=0)] | None = None
    """Anchor examples (v_prior, retention). null: 2048 as in the paper, at most 20 % of a small
    corpus. 0: none, so that their rows are in the pool."""
    warm: Budget = 0.05
    """Examples for the pilot warmup; they are not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """The pilot warmup: trains theta_old to theta_bar and gives the curvature."""

    lr: Positive | None = None
    """Peak learning rate. null: finetune.lr."""
    epochs: Whole = 1
    """Passes over the warmup examples. 0: theta_bar = theta_old and no curvature."""
    batch_size: Count | None = None
    """Examples per optimizer step. null: finetune.batch_size; if that is auto, from the number of
    warmup examples."""
    min_steps: Whole = 0
    """Minimum number of optimizer steps; epochs are repeated to reach it."""
    max_epochs: Count | None = None
    """Most passes that min_steps may ask for: with few examples, more of them learn their mistakes
    by heart. null: no limit."""
    trainable: Literal["all", "candidates"] = "all"
    """Parameters that the warmup trains: all, or only the candidates (score.candidates)."""
    moments: Moments = "float32"
    """Data type of the optimizer moments; the second moment becomes the curvature. bfloat16 and
    int8 (an 8-bit logarithmic code) use unbiased stochastic rounding."""
    offload: bool = False
    """Keep moments and master weights in host memory and copy them to the device in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig:
    """Gradients, the projection u, and the example and parameter scores."""

    form: Literal["literal", "calibrated"] = "literal"
    """Example scores. literal: the paper's inner product with u; calibrated: gradients at unit
    length, compared with D_val after damping what the whole pool shares (docs/algorithm.md)."""
    sketch_dim: Annotated[int, Bounds(least=16)] = 16384
    """Numbers per example that the calibrated form keeps of its gradient, 2 bytes each."""
    sketch_layers: Budget = 1.0
    """Transformer blocks whose gradients the calibrated form compares, counted from the last: a
    count, or a fraction of the blocks. With fewer, the backward pass stops at the first of them:
    less time and memory. 0.5 chose as well as all blocks, less chose worse (docs/performance.md).
    Not with a mask that is selected by score, which needs the gradient of all blocks."""
    rho: Annotated[float, Bounds(least=1e-6)] | None = None
    """Damping of the calibrated form. null: chosen from random halves of D_val."""
    lam: Annotated[float, Bounds(least=0, most=1e30)] = 0.8
    """Weight of the preservation gradient: v_val = v_new + lam * v_prior."""
    lam_relative: bool | Literal["scores"] = False
    """Rescale v_prior before applying lam. true: to the norm of v_new; scores: so that lam is the
    ratio of the two terms of the parameter scores (RMS of v_prior * G to RMS of v_new * G)."""
    tau: Positive = 1.0
    """Temperature of the CWSD loss."""
    preservation: Literal["cwsd", "l2", "fisher", "none"] = "cwsd"
    """The loss whose gradient is v_prior."""
    curvature: Literal["adam_rms", "none"] = "adam_rms"
    """Diagonal of the second-order term. adam_rms: root of the warmup's second moment."""
    curvature_scale: Annotated[float, Bounds(least=0, most=1e30)] = 1.0
    """Factor applied to the curvature in u."""
    step: Literal["sgd", "adam"] = "sgd"
    """Optimizer step that the scores assume. sgd: the paper; adam: u divided by the curvature."""
    mode: Literal["one_pass", "two_pass"] = "one_pass"
    """Passes over the pool: two as in the paper, or one with certified bounds on the scores."""
    candidates: Annotated[str, Names()] = "block_linear"
    """Parameters to select from: block_linear, all, or comma-separated glob patterns over parameter
    names. A leading ! excludes; a list with only exclusions starts from block_linear."""
    keep: Annotated[str, Names(("gradients", "param_scores", "projection", "all"))] = "gradients"
    """Parameter-sized files to save in addition to the gradients: param_scores, projection, or all.
    Each has the size of the candidates in fp32. G, v_new and v_prior are computed and saved only if
    something reads them: a mask selected by score, literal example scores, or these files."""
    batch_tokens: Count | None = None
    """Maximum tokens per scoring batch, including padding; changes scores only by rounding. null:
    1,024 on a CPU; on a GPU as many as fit in 12 GiB (at least 4,096, at most 32,768)."""
    plan: Literal["auto", "device", "host", "blocks"] = "auto"
    """Where G and the direction are kept during the pass over the pool. device: on the device;
    host: in host memory, copied layer by layer; blocks: on the device for a group of layers at a
    time, with one pass per group. auto: the first that fits, and a smaller one if out of
    memory."""
    checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of storing them. null: only if they would
    not fit in memory."""
    precision: Literal["mixed", "half", "full"] = "mixed"
    """For a bfloat16 or float16 model: which passes use fp32 weights (TF32 products on a GPU, about
    half the speed). mixed: those over D_val and D_anchor, whose rounding error enters every score;
    half: none; full: also the pass over the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectConfig:
    """How many examples and parameter entries to select."""

    variant: Literal["dual", "data", "param"] = "dual"
    """What to select. dual: examples and parameter entries; data: examples; param: entries."""
    data_budget: Budget = 0.1
    """Examples to select: a count, or a fraction of |D_full|."""
    param_budget: Budget = 0.05
    """Parameter entries to train: a count, or a fraction of the candidates."""
    rounds: Whole = 0
    """Number of rounds that re-select one side given the other."""
    duplicates: Literal["keep", "exact", "near"] = "keep"
    """Rows that repeat a row with a higher score. keep: select them by score, as in the paper;
    exact: pass over identical texts; near: also over nearly identical ones."""
    per_source: Annotated[Quotas, "quotas"] | None = None
    """Quotas of the data budget by source (data.source_field). even: the same number of every
    source; proportional: its share of the pool; or source:share or source:count pairs, as in
    gsm8k:0.5,code:100, where the rest goes to the best scores of the other sources. null: none."""
    lengths: Literal["any", "balanced"] = "any"
    """balanced: the selected responses follow the pool's distribution of lengths (in five groups;
    with select.per_source: of each source). any: as the scores say."""
    order: Literal["data_to_param", "param_to_data"] = "data_to_param"
    """Order of rounds: first re-select parameters given the data, or data given parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """The method of each axis; `dualsft methods` lists them. Options of a method are set as
    method.NAME.OPTION, such as method.less.dim."""

    data: str | None = None
    """Method that selects the examples. null: as given by select.variant (default dualsft)."""
    params: str | None = None
    """Method that selects the parameter entries. null: as given by select.variant."""
    weights: str | None = None
    """Method that weights tokens or examples in training. null: mean over the response tokens."""
    after: str | None = None
    """Method applied to the trained weights. null: none."""
    preset: Literal["default", "paper"] = "default"
    """Initial values of the method options: the defaults, or those stated in the DualSFT paper."""
    lr_ratio: Positive | None = None
    """Ratio of the fine-tuning learning rate to finetune.lr. null: the ratio in the paper's tables
    for the method that trains (1 for dualsft and for all parameters)."""
    denominator: Literal["candidates", "all", "eligible"] = "candidates"
    """Base of a fraction in select.param_budget: the candidates (score.candidates), all parameters,
    or the entries that the method can select from."""
    options: Annotated[dict[str, Any], "options"] = dataclasses.field(default_factory=dict)
    """Options of all methods as one mapping, NAME.OPTION -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig:
    """Fine-tuning of the selected entries of theta_old on the selected examples."""

    lr: Positive | Auto = 2e-5
    """Peak learning rate; also eta_ft in the scores. auto: from the size of the corpus and the
    model, more for a mask (docs/algorithm.md)."""
    epochs: Count | Auto = 3
    """Passes over the selected examples. auto: from their number, 3 to 8."""
    batch_size: Count | Auto = 64
    """Examples per optimizer step. auto: from the number of examples, 8 to 64."""
    micro_batch_size: Count | None = None
    """Examples per forward pass. null: as many as score.batch_tokens allows; if that is null too,
    8,192 tokens on a GPU and 1,024 on a CPU."""
    max_grad_norm: NonNegative = 1.0
    """Clip the gradient of the trained entries to this norm; 0: off. The warmup never clips."""
    moments: Moments = "float32"
    """Data type of the optimizer moments. bfloat16 and int8 (an 8-bit logarithmic code) use
    unbiased stochastic rounding."""
    checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of storing them; applies to the warmup
    too. null: only if they would not fit in memory."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of the trained entries."""
    warmup_ratio: Annotated[float, Bounds(least=0, below=1)] = 0.03
    """Fraction of steps with linear warmup before cosine decay; applies to the pilot warmup too."""
    retention: NonNegative = 0.0
    """Weight of the retention term: each step adds this times the mean CWSD loss (score.tau) of a
    few anchors, with theta_old as teacher, a second copy of the model. 0: off."""
    retention_batch: Count | None = None
    """Anchors per step of the retention term. null: a quarter of finetune.batch_size, at least
    1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Comparison of the base model and the fine-tuned model."""

    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """Files in the format of data.path: a mapping name -> path, a list of paths (named by file
    stem), or name:path,name2:path2 as a flag."""
    batch_tokens: Count | None = None
    """Maximum tokens per evaluation batch. null: score.batch_tokens."""
    prompt: str | None = None
    """A prompt that both models complete with greedy decoding."""
    max_new_tokens: Count = 48
    """Maximum new tokens for evaluation.prompt."""
    limit: Count | None = None
    """Maximum examples per file. null: all."""
    tasks: Annotated[str, Names(TASK_NAMES)] | None = None
    """Benchmarks to run on both models with the paper's settings (extra `eval`): any of humaneval,
    piqa, arc_challenge, mmlu, gsm8k. null: none."""
    domain: Literal["code", "math"] = "code"
    """Benchmark that measures plasticity: humaneval (code) or gsm8k (math). Stability is the mean
    of the four others."""
    data_dir: str | None = None
    """Folder with the benchmark data as files (docs/evaluation.md). null: download from the hub."""
    limit_tasks: Count | None = None
    """Maximum items per benchmark (for mmlu: per subject). null: all."""
    task_batch_size: Count | None = None
    """Requests per benchmark batch; 16 times as many for generation on a GPU. null: 8 (with vllm:
    auto)."""
    backend: Literal["hf", "vllm"] = "hf"
    """Backend that runs the benchmarks. hf: the loaded models; vllm: vLLM, if installed."""
    allow_code_execution: bool = False
    """Run the programs that the models generate for humaneval, in a sandbox. Set by the flag
    --allow-code-execution; never read from a file, never stored."""
    allow_weak_sandbox: bool = False
    """Run them also on a machine whose kernel lacks a protection of the sandbox. Only from the
    command line or Python; never read from a file, never stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """How often the progress of a running stage is saved; does not change results."""

    every: NonNegative | None = 60.0
    """Seconds between saves of a stage's progress. Saving takes at most 5 % of the time. 0: save
    after every step and batch, without that limit; null: save only when stopped (Ctrl-C,
    SIGTERM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Parallelism over processes (torchrun, --gpus); changes results only by rounding."""

    mode: Literal["auto", "replicate", "shard"] = "auto"
    """replicate: every process holds the whole model, and examples are distributed; shard: each
    process holds its rows of every parameter and vector (FSDP2); auto: shard if scoring or
    the warmup would not fit on one GPU."""
    offload: bool = False
    """With shard: keep each process's rows in host memory and copy them to the GPU when used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Trackers that receive the records of metrics.jsonl; does not change results."""

    report_to: Annotated[str, Names((*TRACKERS, "all", "none"))] | None = None
    """Trackers, comma-separated: any of tensorboard, wandb, mlflow, trackio (extra `trackers`), or
    all of them that are installed. null: none."""
    project: str | None = None
    """Project (mlflow: experiment) of the run in a tracker. null: dualsft, unless WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME is set."""
    run_name: str | None = None
    """Name of the run in a tracker. null: the name of the run folder."""


# --- checks across settings, on flat values such as {"score.lam": 0.8} ----------------------------


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """Contradictions between fields. An invalid field is absent from `values`, so never matches."""
    get = values.get
    problems: list[str] = []

    def refuse(key: str, other: str, cure: str) -> None:
        """Record that the value of `key` is not allowed with `other`, such as warmup.epochs=0."""
        problems.append(f"{key}: {show(get(key))} is not allowed with {other}; {cure}")

    if get("score.step") == "adam" and get("warmup.epochs") == 0:
        other = "warmup.epochs=0, which leaves no curvature to divide by"
        refuse("score.step", other, "give score.step=sgd, or warmup.epochs >= 1")
    variant = get("select.variant", "dual")
    if get("select.rounds", 0) > 0 and variant != "dual":
        other = f"select.variant={variant}, which selects one side"
        refuse("select.rounds", other, "give select.rounds=0 or variant dual")
    form = get("data.format", "auto")
    pair = ("data.prompt_field", "data.response_field")
    given = [key for key in (*pair, "data.input_field") if get(key) is not None]
    for one in given:
        allowed = ("auto", "prompt_response", "prompt_completion")
        if form not in (*allowed, *(["alpaca"] if one == "data.input_field" else [])):
            cure = "give data.format=prompt_response, or leave the field names out"
            refuse(one, f"data.format={form}, whose fields have other names", cure)
    if form == "prompt_completion":
        for one, other in (pair, pair[::-1]):
            if get(one) is not None and other in values and get(other) is None:
                problems.append(f"{one}: {show(get(one))} is not allowed alone; give {other} too")
    whole = {
        "data.messages_field": ("a list of turns", ("auto", "messages", "openai", "sharegpt")),
        "data.text_field": ("one text", ("auto", "text")),
    }
    for one, (what, forms) in whole.items():
        if get(one) is None:
            continue
        for other in given:
            cure = f"a row is {what} or a prompt and its response: leave one of the two out"
            refuse(one, other, cure)
        if form not in forms:
            cure = f"give data.format={' or '.join(forms[1:])}, or leave it out"
            refuse(one, f"data.format={form}", cure)
    if get("data.messages_field") is not None and get("data.text_field") is not None:
        refuse("data.text_field", "data.messages_field", "leave one of the two out")
    template = get("data.template", "chat")
    if get("data.template_file") is not None and template != "chat":
        cure = "give data.template=chat, or leave it out"
        refuse("data.template_file", f"data.template={template}", cure)
    for role in ("val", "anchor"):
        if get(f"data.{role}_path") is not None and get(f"split.{role}"):
            other = f"data.{role}_path, whose rows are all of D_{role}"
            refuse(f"split.{role}", other, "leave one of the two out")
    if "validation" in (get("evaluation.files") or {}):
        problems.append(
            "evaluation.files: the name 'validation' is taken: the run uses it for D_val; write"
            " another_name:PATH"
        )
    if get("select.rounds") and get("select.duplicates", "keep") != "keep":
        refuse("select.duplicates", "select.rounds, which re-select without it", "leave one out")
    if get("select.rounds"):
        for key, off in (("select.per_source", None), ("select.lengths", "any")):
            if get(key, off) != off:
                refuse(key, "select.rounds, which re-select without it", "leave one out")
    quotas = get("select.per_source")
    if isinstance(quotas, dict):
        total = sum(Decimal(repr(share)) for share in quotas.values() if isinstance(share, float))
        if total > 1:
            problems.append(
                f"select.per_source: the shares add up to {total}; give shares of at most 1 in all"
            )
    if get("score.form") == "calibrated":
        other = "score.form=calibrated, whose scores come from the sketches of one pass"
        if get("score.mode") == "two_pass":
            refuse("score.mode", other, "leave it out")
        if get("select.rounds"):
            cure = "give score.form=literal, or leave it out: re-selection needs products with u"
            refuse("select.rounds", other, cure)
    if get("split.anchor") == 0 and get("data.anchor_path") is None:
        none = "split.anchor=0, which leaves no anchors"
        given = get("score.preservation", "cwsd")
        if given in ("cwsd", "fisher") and get("warmup.epochs", 1) != 0:
            cure = "give score.preservation=none or l2, data.anchor_path, or split.anchor=null"
            problems.append(f"score.preservation: {given} is not allowed with {none}; {cure}")
        if get("finetune.retention"):
            refuse("finetune.retention", none, "give data.anchor_path, or split.anchor=null")
    shares = {key: get(key) for key in ("split.val", "split.anchor", "split.warm")}
    fractions = {key: share for key, share in shares.items() if isinstance(share, float)}
    if sum(fractions.values()) >= 1:
        given = ", ".join(f"{key}={share}" for key, share in fractions.items())
        problems.append(f"{given}: leaves no pool to select from; give fractions that sum below 1")
    return problems


def missing_consent(values: Mapping[str, Any]) -> list[str]:
    """Problems if humaneval, which runs generated programs, was not allowed explicitly."""
    asked = (values["evaluation.tasks"] or "").split(",")
    if "humaneval" not in asked or values["evaluation.allow_code_execution"]:
        return []
    return [
        f"evaluation.tasks: {show(values['evaluation.tasks'])} runs programs that the models write;"
        " allow it with --allow-code-execution (evaluation.allow_code_execution=true) on this"
        " command line, or leave humaneval out"
    ]


def idle_options(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Settings that differ from the default but have no effect here, one line each."""
    found: list[str] = []

    def idle(cause: str, *keys: str) -> None:
        """Record that `keys` have no effect with `cause`, such as `select.rounds=0`."""
        for key in keys:
            if repr(values[key]) != repr(defaults[key]):
                found.append(f"{key}={show(values[key])} has no effect with {cause}")

    preservation, curvature = values["score.preservation"], values["score.curvature"]
    if values["finetune.retention"] == 0:
        idle("finetune.retention=0", "finetune.retention_batch")
        if preservation != "cwsd":
            idle(f"score.preservation={preservation}", "score.tau")
    if preservation == "none":
        idle("score.preservation=none", "score.lam", "score.lam_relative")
        if values["finetune.retention"] == 0:
            idle("score.preservation=none and finetune.retention=0", "data.anchor_path")
    if curvature == "none":
        idle("score.curvature=none", "score.curvature_scale")
    if values["score.form"] == "literal":
        idle("score.form=literal", "score.sketch_dim", "score.sketch_layers", "score.rho")
    if values["select.rounds"] == 0:
        idle("select.rounds=0", "select.order")
    if values["select.variant"] == "data":
        idle("select.variant=data", "select.param_budget")
    if values["select.variant"] == "param":
        idle("select.variant=param", "select.data_budget", "score.mode", "score.form")
    for axis, key in (("data", "select.data_budget"), ("params", "select.param_budget")):
        if values[f"method.{axis}"] == "all":
            idle(f"method.{axis}=all", key)
    if values["evaluation.prompt"] is None:
        idle("evaluation.prompt=null", "evaluation.max_new_tokens")
    if values["evaluation.tasks"] is None:
        names = ("domain", "data_dir", "limit_tasks", "task_batch_size", "backend")
        idle("evaluation.tasks=null", *(f"evaluation.{name}" for name in names))
    if values["warmup.epochs"] == 0:
        idle(
            "warmup.epochs=0",
            "warmup.lr",
            "warmup.batch_size",
            "warmup.min_steps",
            "warmup.max_epochs",
        )
        at_start = "with warmup.epochs=0 (theta_bar = theta_old)"
        if preservation != "none":
            found.append(f"score.preservation={preservation} is exactly zero {at_start}")
        if curvature != "none":
            found.append(f"score.curvature={curvature} is none {at_start}")
    if values["log.report_to"] is None:
        idle("log.report_to=null", "log.project", "log.run_name")
    if values["parallel.mode"] == "replicate":
        idle("parallel.mode=replicate", "parallel.offload")
    if values["parallel.mode"] == "shard":
        idle("parallel.mode=shard", "score.plan")
    micro, batch = values["finetune.micro_batch_size"], values["finetune.batch_size"]
    if micro is not None and batch != "auto" and micro > batch:
        found.append(f"finetune.micro_batch_size={micro} acts as finetune.batch_size={batch}")
    return found
