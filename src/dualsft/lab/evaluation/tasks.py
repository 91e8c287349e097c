"""The benchmarks of the paper's tables, as lm-evaluation-harness defines them.

HumanEval 0-shot, PIQA and ARC-Challenge 0-shot, MMLU 5-shot, GSM8K 5-shot. Prompts, targets,
few-shot examples, filters and metrics come from the harness's task files. Set here: the number of
shots, 512 new tokens for HumanEval, and its pass@1, which runs in our sandbox. Rows come from the
hub, or from files in `evaluation.data_dir`, mapped to the hub's field names (docs/evaluation.md).
The checks that run before any stage (names, files, packages) import nothing heavy. Not part of
Algorithm 1.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dualsft.errors import ConfigError, DataError, RunError

Row = dict[str, Any]

SHOT_SEED = 1234
"""The harness's default seed for sampling few-shot examples."""
HUMANEVAL_TOKENS = 512
NO_NUMBER = "[invalid]"
"""Result of the harness's regex filter if nothing matches."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: its definition in the harness, the files it reads, its metric."""

    name: str
    title: str
    definition: str
    """Glob of the harness's YAML files, relative to its folder of tasks."""
    files: Mapping[str, str]
    """Split of the hub dataset -> stem of the local file."""
    fields: tuple[str, ...]
    shots: int = 0
    metric: str = "acc"
    filter: str = "none"
    new_tokens: int = 0
    """Maximum tokens to generate: ours for HumanEval, the harness's default for GSM8K. 0 for
    multiple choice."""
    runs_code: bool = False

    @property
    def generates(self) -> bool:
        return self.new_tokens > 0


_BENCHMARKS = (
    Benchmark(
        "humaneval",
        "HumanEval",
        "humaneval/humaneval.yaml",
        {"test": "humaneval"},
        ("task_id", "prompt", "test", "entry_point"),
        metric="pass@1",
        filter="create_test",
        new_tokens=HUMANEVAL_TOKENS,
        runs_code=True,
    ),
    Benchmark(
        "piqa",
        "PIQA",
        "piqa/piqa.yaml",
        {"validation": "piqa_validation"},
        ("goal", "sol1", "sol2", "label"),
    ),
    Benchmark(
        "arc_challenge",
        "ARC-C",
        "arc/arc_challenge.yaml",
        {"test": "arc_challenge_test"},
        ("question", "choices", "answerKey"),
    ),
    Benchmark(
        "mmlu",
        "MMLU",
        "mmlu/default/mmlu_*.yaml",
        {"test": "mmlu_test", "dev": "mmlu_dev"},
        ("subject", "question", "choices", "answer"),
        shots=5,
    ),
    Benchmark(
        "gsm8k",
        "GSM8K",
        "gsm8k/gsm8k.yaml",
        {"test": "gsm8k_test", "train": "gsm8k_train"},
        ("question", "answer"),
        shots=5,
        metric="exact_match",
        filter="strict-match",
        new_tokens=256,
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _BENCHMARKS}

DOMAINS: dict[str, tuple[str, tuple[str, ...]]] = {
    "code": ("humaneval", ("piqa", "arc_challenge", "mmlu", "gsm8k")),
    "math": ("gsm8k", ("piqa", "arc_challenge", "mmlu", "humaneval")),
}
"""Domain -> (benchmark for plasticity, benchmarks for stability)."""


def wanted_tasks(tasks: str | None) -> list[str]:
    """The names in `evaluation.tasks`, in order, without duplicates."""
    return list(dict.fromkeys(tasks.split(","))) if tasks else []


def task_files(tasks: Sequence[str], data_dir: str | None) -> dict[str, Path]:
    """Local files of these tasks by stem: `stem.jsonl` or `stem.jsonl.gz`. Missing ones are left
    out."""
    found: dict[str, Path] = {}
    if data_dir is None:
        return found
    folder = Path(data_dir).expanduser()
    for stem in (stem for name in tasks for stem in BENCHMARKS[name].files.values()):
        for path in (folder / f"{stem}.jsonl.gz", folder / f"{stem}.jsonl"):
            with contextlib.suppress(OSError):
                if path.is_file():
                    found[stem] = path
    return found


def task_problems(values: Mapping[str, Any]) -> list[str]:
    """Missing packages and missing or invalid files of `evaluation.tasks`.

    Runs before any stage, so it imports nothing heavy.
    """
    tasks = wanted_tasks(values.get("evaluation.tasks"))
    if not tasks:
        return []
    problems: list[str] = []
    missing = [name for name in ("lm_eval", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        problems.append(
            f"evaluation.tasks: {','.join(tasks)!r} needs {' and '.join(missing)}; "
            "pip install 'dualsft[eval]', or leave evaluation.tasks out"
        )
    if values.get("evaluation.backend") == "vllm" and importlib.util.find_spec("vllm") is None:
        problems.append(
            "evaluation.backend: 'vllm' needs the package vllm, which is not installed; "
            "pip install vllm, or use evaluation.backend=hf"
        )
    data_dir = values.get("evaluation.data_dir")
    if data_dir is None:
        return problems
    files = task_files(tasks, data_dir)
    for benchmark in map(BENCHMARKS.__getitem__, tasks):
        for stem in benchmark.files.values():
            if stem not in files:
                problems.append(
                    f"evaluation.data_dir: {str(data_dir)!r} has no {stem}.jsonl or "
                    f"{stem}.jsonl.gz, which {benchmark.name} reads; add the file, leave "
                    f"{benchmark.name} out of evaluation.tasks, or leave evaluation.data_dir out "
                    "to read from the hub"
                )
                continue
            try:
                task_rows(files[stem], benchmark)
            except DataError as problem:
                problems.append(f"evaluation.data_dir: {problem}")
    return problems


def check_positions(name: str, new_tokens: int, max_positions: int | None) -> None:
    """Refuse a task whose answers would leave no positions for the prompt.

    Called before any stage, and with the harness's numbers before generation.
    """
    if max_positions is not None and new_tokens >= max_positions:
        raise ConfigError(
            f"evaluation.tasks: {name} generates {new_tokens} tokens and the model has only "
            f"{max_positions} positions; leave it out"
        )


def task_rows(path: Path, benchmark: Benchmark) -> list[Row]:
    """Rows of a local file, with the hub's field names. Errors name the line of the row."""
    rows: list[Row] = []
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(line, benchmark, f"{path}:{number}"))
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read ({problem}); give a UTF-8 JSONL file") from None
    least = benchmark.shots if path.name.split(".")[0].endswith(("_train", "_dev")) else 1
    if len(rows) < least:
        raise DataError(
            f"{path}: has {len(rows)} rows and {benchmark.name} needs {least}; give the "
            "benchmark's own rows, one object per line"
        )
    return rows


def _row(line: str, benchmark: Benchmark, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where}: not valid JSON ({problem}); write one object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not an object; write one with {', '.join(benchmark.fields)}")
    missing = [name for name in benchmark.fields if name not in row]
    if missing:
        raise DataError(f"{where}: field {missing[0]!r} is missing, which {benchmark.name} reads")
    if benchmark.name == "arc_challenge" and isinstance(row["choices"], list):
        row = {**row, "choices": {"text": row["choices"], "label": row.get("labels")}}
    if problem := _wrong(benchmark, row):
        raise DataError(f"{where}: {problem}; give the benchmark's own rows")
    return {name: row[name] for name in (*benchmark.fields, "id") if name in row}


def _wrong(benchmark: Benchmark, row: Row) -> str | None:
    """Why a row cannot be scored, or None. Such a row would count as a wrong answer."""
    name = benchmark.name
    others = {"label", "answer", "choices"} if name in ("piqa", "mmlu", "arc_challenge") else set()
    for field in benchmark.fields:
        if field not in others and not isinstance(row[field], str):
            return f"field {field!r} is {row[field]!r} and must be a string"
    if name == "piqa" and not _is_number(row["label"], 2):
        return f"field 'label' is {row['label']!r} and must be 0 or 1"
    if name == "mmlu":
        if not _are_texts(row["choices"]) or len(row["choices"]) != 4:
            return "field 'choices' must have four strings"
        if not _is_number(row["answer"], 4):
            return f"field 'answer' is {row['answer']!r} and must be 0, 1, 2 or 3"
    if name == "arc_challenge":
        both: dict[str, Any] = row["choices"] if isinstance(row["choices"], dict) else {}
        texts, labels = both.get("text"), both.get("label")
        if not _are_texts(texts) or not _are_texts(labels) or len(texts) != len(labels):
            return "field 'choices' must have strings and a label (field 'labels') for each"
        if row["answerKey"] not in labels:
            return f"answerKey {row['answerKey']!r} is not one of its labels"
    if name == "gsm8k" and "####" not in row["answer"]:
        return "field 'answer' has no number after ####"
    return None


def _is_number(value: Any, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) for v in values)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hide the log messages and progress bars of the harness; we log our own."""
    levels = {name: logging.getLogger(name).level for name in ("lm_eval", "datasets", "evaluate")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


PassAt1 = Callable[..., dict[str, float]]


def definitions(name: str) -> dict[str, dict[str, Any]]:
    """The harness's task configurations of a benchmark, by task name (MMLU: one per subject).

    Functions named in the YAML files are not imported: HumanEval's module would download and run
    code.
    """
    try:
        import lm_eval.tasks
        from lm_eval.tasks._yaml_loader import load_yaml
    except ImportError as problem:
        raise ConfigError(
            f"evaluation.tasks: lm_eval cannot be used ({problem}); pip install -U 'dualsft[eval]'"
        ) from None
    root = Path(str(lm_eval.tasks.__file__)).parent
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(root.glob(BENCHMARKS[name].definition)):
        config = load_yaml(path, resolve_func=False)
        for structural in ("tag", "group", "task_list"):
            config.pop(structural, None)
        found[config["task"]] = config
    if not found:
        raise ConfigError(
            f"evaluation.tasks: this version of lm_eval has no {BENCHMARKS[name].definition}; "
            "pip install -U 'dualsft[eval]'"
        )
    return found


def with_paper_settings(
    name: str, config: dict[str, Any], pass_at_1: PassAt1 | None
) -> dict[str, Any]:
    """Set the paper's number of shots; for HumanEval also 512 tokens and pass@1 in our sandbox."""
    config = {**config, "num_fewshot": BENCHMARKS[name].shots}
    if not BENCHMARKS[name].runs_code:
        return config
    (metric,) = config["metric_list"]
    (chain,) = config["filter_list"]
    (step,) = chain["filter"]
    names = (Path(metric["metric"]).name, Path(step["filter_fn"]).name)
    if names != ("utils.pass_at_k", "utils.build_predictions") or metric["k"] != [1]:
        raise RunError(
            f"humaneval: this version of lm_eval defines it with {names}, which is not supported; "
            "install the version in constraints.txt"
        )
    return {
        **config,
        "metric_list": [{**metric, "metric": pass_at_1}],
        "filter_list": [{**chain, "filter": [{**step, "filter_fn": build_predictions}]}],
        "generation_kwargs": {**config["generation_kwargs"], "max_gen_toks": HUMANEVAL_TOKENS},
    }


def build_predictions(resps: list[list[str]], docs: list[Row]) -> list[list[str]]:
    """Candidate programs: prompt followed by completion."""
    return [[doc["prompt"] + text for text in many] for many, doc in zip(resps, docs, strict=True)]


def build_tasks(name: str, data_dir: str | None, pass_at_1: PassAt1 | None = None) -> list[Any]:
    """The harness's task objects of a benchmark (MMLU: one per subject)."""
    configs = definitions(name)
    splits = local_splits(name, data_dir, configs) if data_dir is not None else None
    tasks: list[Any] = []
    with silenced():
        from lm_eval.api.task import ConfigurableTask

        for leaf, config in configs.items():
            config = with_paper_settings(name, config, pass_at_1)
            if splits is not None:
                config["custom_dataset"] = _dataset(splits[leaf])
            try:
                task = ConfigurableTask(config=config)
            except Exception as problem:
                if splits is not None:
                    raise
                raise RunError(
                    f"{leaf}: cannot load its dataset {config.get('dataset_path')} from the hub "
                    f"({type(problem).__name__}: {' '.join(str(problem).split())[:200]}); set "
                    "evaluation.data_dir to a folder with the benchmarks' files "
                    "(docs/evaluation.md); finished stages are kept"
                ) from None
            task.set_fewshot_seed(SHOT_SEED)
            tasks.append(task)
    return tasks


def local_splits(
    name: str, data_dir: str, configs: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, list[Row]]]:
    """Task -> split -> rows, from the files in `data_dir`. MMLU rows are grouped by subject."""
    benchmark, files = BENCHMARKS[name], task_files([name], data_dir)
    rows = {split: task_rows(files[stem], benchmark) for split, stem in benchmark.files.items()}
    if name != "mmlu":
        return {leaf: rows for leaf in configs}
    divided: dict[str, dict[str, list[Row]]] = {leaf: {} for leaf in configs}
    for split, stem in benchmark.files.items():
        by_subject: dict[str, list[Row]] = defaultdict(list)
        for row in rows[split]:
            by_subject[row["subject"]].append(row)
        for leaf, config in configs.items():
            divided[leaf][split] = by_subject[config["dataset_name"]]
        least = benchmark.shots if split == "dev" else 1
        short = [leaf for leaf in configs if len(divided[leaf][split]) < least]
        if short:
            raise DataError(
                f"{files[stem]}: {len(short)} of {len(configs)} subjects have fewer than {least} "
                f"rows ({', '.join(short[:5])}); MMLU needs all subjects, give the complete file"
            )
    return divided


def _dataset(splits: Mapping[str, list[Row]]) -> Callable[..., Any]:
    """Function that the harness calls instead of `datasets.load_dataset`.

    The harness opens `train` even for 0-shot tasks, which never use it, so an empty one is added.
    """
    import datasets

    made: Any = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
    made.setdefault("train", datasets.Dataset.from_list([]))
    return lambda **_: datasets.DatasetDict(made)
