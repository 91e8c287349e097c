"""Benchmarks before and after fine-tuning: θ_old and θ* on tasks of lm-evaluation-harness.

The harness builds the requests, filters the answers and scores them, with the models that are
already loaded. Answers are saved while a task runs, so an interrupted evaluation resumes, and the
cells of a comparison share the base model's answers (`SharedAnswers`). Per task: score, 95 % Wilson
interval, number of items, format errors. From the scores: plasticity (the benchmark of the domain),
stability (mean of the other four) and overall (mean of both). If a benchmark is missing, these are
null, never a mean over fewer. Writes samples.jsonl (docs/evaluation.md). Not part of Algorithm 1.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dualsft.errors import RunError
from dualsft.lab.evaluation.sandbox import (
    PROTECTIONS,
    Program,
    ProgramVerdict,
    describe_protection,
    run_candidates,
)
from dualsft.lab.evaluation.tasks import (
    BENCHMARKS,
    DOMAINS,
    NO_NUMBER,
    build_tasks,
    check_positions,
    silenced,
    wanted_tasks,
)
from dualsft.model.resolve import tokenizer_hash, weights_hash
from dualsft.runs.context import RunContext
from dualsft.storage.manifest import atomic_write_text
from dualsft.system.paths import RunPath
from dualsft.system.usage import give_back, is_out_of_memory

DEFAULT_BATCH = 8
GENERATED = 16
"""Batch size factor for generation on a GPU. Generation computes logits for the last token only,
and a decoding step takes about as long for many sequences as for few."""
SIDES = ("before", "after")
Answer = Any
"""[log-likelihood, whether it is greedy], or a generated text."""
Models = Mapping[str, Callable[[], Any]]
"""Side -> function that creates the harness's model object when it is needed."""


@dataclass
class Item:
    """One item of a benchmark and the result of a model on it."""

    id: str
    score: float
    format_error: bool | None = None
    """Whether an answer has the wrong form: no number (GSM8K), does not compile (HumanEval). None
    for multiple choice."""
    text: str | None = None


@dataclass
class Outcome:
    """Result of one model on one benchmark."""

    items: list[Item]
    others: dict[str, float]
    """Other metrics of the harness, by metric and filter."""
    truncated: int
    verdicts: list[ProgramVerdict]


def run_benchmarks(ctx: RunContext, models: Models, part: RunPath) -> dict[str, Any]:
    """Evaluate both models on every task of `evaluation.tasks`: {"tasks": …, "summary": …}."""
    settings = ctx.config.evaluation
    names = wanted_tasks(settings.tasks)
    outcomes: dict[str, dict[str, Outcome]] = {name: {} for name in names}
    for side in SIDES:
        lm: Any = None
        for name in names:
            answers = Answers(ctx, name, side)
            if not answers.complete and lm is None:
                lm = models[side]()
            outcomes[name][side] = answers.outcome(lm)
        del lm
        give_back(ctx.device)
    with (part / "samples.jsonl").open("wb") as lines:
        for name, sides in outcomes.items():
            for row in paired_rows(name, sides["before"].items, sides["after"].items):
                lines.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    tasks = {name: task_facts(ctx, name, sides) for name, sides in outcomes.items()}
    return {"tasks": tasks, "summary": summary(tasks, settings.domain)}


@contextmanager
def harness_model(ctx: RunContext, model: Any) -> Iterator[Any]:
    """Wrap a loaded model for the harness. The model's training mode is restored on exit."""
    training = model.training
    with silenced():
        from lm_eval.models.huggingface import HFLM

        wrapper: Any = HFLM  # its signature is hidden from type checkers
        lm = wrapper(
            pretrained=model,
            tokenizer=copy.deepcopy(ctx.tokenizer),
            backend="causal",
            batch_size=ctx.config.evaluation.task_batch_size or DEFAULT_BATCH,
        )
    try:
        yield lm
    finally:
        model.train(training)


def vllm_model(ctx: RunContext, folder: Path) -> Any:
    """The harness's vLLM model for a model folder, in the run's dtype."""
    from lm_eval.models.vllm_causallms import VLLM

    wrapper: Any = VLLM
    dtype = str(ctx.dtype).removeprefix("torch.")
    batch = ctx.config.evaluation.task_batch_size or "auto"
    with silenced():
        return wrapper(
            pretrained=str(folder), dtype=dtype, batch_size=batch, trust_remote_code=ctx.trusted
        )


class SharedAnswers:
    """The base model's answers to one list of requests, in a folder shared by several runs.

    The file name contains a hash of everything that the answers depend on. Runs that evaluate at
    the same time may each compute the same answers; the file is replaced atomically.
    """

    def __init__(self, ctx: RunContext, name: str, requests: list[Any], batch: Any) -> None:
        what = {
            "requests": [(request.request_type, request.args) for request in requests],
            "weights": weights_hash(ctx.model_folder),
            "tokenizer": tokenizer_hash(ctx.model_folder),
            "dtype": str(ctx.dtype),
            "device": ctx.device.type,
            "backend": ctx.config.evaluation.backend,
            "batch": batch,
            "attention": ctx.config.model.attention,
            "harness": metadata.version("lm_eval"),
        }
        assert ctx.answers is not None
        self.path = ctx.answers / f"{name}-{_sha256(what)[:16]}.json"
        self.reporter = ctx.reporter

    def read(self) -> dict[str, Any] | None:
        """{"answers": …, "truncated": …}, or None if the file is missing or damaged."""
        try:
            stored = self.path.read_json()
            if stored["sha256"] == _sha256(stored["facts"]):
                return stored["facts"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self.reporter.warn(f"{self.path}: damaged; the base model is evaluated again")
        return None

    def write(self, facts: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"facts": facts, "sha256": _sha256(facts)}
        atomic_write_text(self.path, json.dumps(stored, ensure_ascii=False))


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class Answers:
    """Answers of one model to one benchmark, by index of the request. Resumable."""

    def __init__(self, ctx: RunContext, name: str, side: str) -> None:
        settings = ctx.config.evaluation
        self.ctx, self.benchmark = ctx, BENCHMARKS[name]
        self.label = f"{self.benchmark.title} ({side})"
        self.piece_name = f"task-{name}-{side}"
        self.verdicts: dict[tuple[str, str], ProgramVerdict] = {}
        self.tasks = build_tasks(name, settings.data_dir, self._pass_at_1)
        self.requests: list[Any] = []
        for task in self.tasks:
            with silenced():
                task.build_all_requests(limit=settings.limit_tasks, rank=0, world_size=1)
            self.requests += task.instances
        self.given: dict[int, Answer] = {}
        self.truncated = 0
        if (piece := ctx.pieces.load(self.piece_name)) is not None:
            self._load(piece.facts)
        self.shared = None
        if side == "before" and ctx.answers is not None:
            batch = (settings.task_batch_size, self._factor)
            self.shared = SharedAnswers(ctx, name, self.requests, batch)
            if not self.complete and (stored := self.shared.read()) is not None:
                self._load(stored)
                ctx.reporter.say(f"{self.label}: reusing the base model's answers from another run")

    @property
    def complete(self) -> bool:
        return len(self.given) == len(self.requests)

    def _load(self, facts: Mapping[str, Any]) -> None:
        self.given = {int(i): answer for i, answer in facts["answers"].items()}
        self.truncated = facts["truncated"]

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        answers = {str(i): answer for i, answer in self.given.items()}
        return {}, {"answers": answers, "truncated": self.truncated}

    def outcome(self, lm: Any) -> Outcome:
        """Run the requests that have no answer yet, then score."""
        if not self.complete:
            self._ask(lm)
        for index, request in enumerate(self.requests):
            answer = self.given[index]
            request.resps = [tuple(answer) if isinstance(answer, list) else answer]
        return self._score()

    def _ask(self, lm: Any) -> None:
        """Run all open requests, the longest first, a few batches at a time.

        Out of memory then shows up in the first batch. On it the batch size is halved.
        """
        if not self.given:
            self.truncated = self._count_truncated(lm)
        order = sorted(range(len(self.requests)), key=lambda i: (-len(self.requests[i].args[0]), i))
        waiting = [i for i in order if i not in self.given]
        pieces, total = self.ctx.pieces, len(self.requests)
        ask = getattr(lm, self.requests[0].request_type)
        with (
            self.ctx.reporter.track(self.label, total, "requests", len(self.given)) as bar,
            self._larger(lm),
            pieces.loop(),
        ):
            while waiting:
                size = lm.batch_size if isinstance(lm.batch_size, int) else 64
                now = waiting[: size * (1 if self.benchmark.generates else 8)]
                try:
                    with silenced():
                        answers = ask([self.requests[i] for i in now], disable_tqdm=True)
                except Exception as problem:
                    if not is_out_of_memory(problem):
                        raise
                    self._smaller(lm, problem)
                    continue
                self.given |= dict(zip(now, map(_plain, answers), strict=True))
                waiting = waiting[len(now) :]
                bar.advance(len(now))
                where = f"{self.label}: {len(self.given):,} of {total:,} requests"
                pieces.tick(self.piece_name, self._state, where)
        if pieces.folder is not None:
            pieces.forget()
            pieces.save(self.piece_name, *self._state())
        if self.shared is not None:
            self.shared.write(self._state()[1])

    @property
    def _factor(self) -> int:
        return GENERATED if self.benchmark.generates and self.ctx.device.type == "cuda" else 1

    @contextmanager
    def _larger(self, lm: Any) -> Iterator[None]:
        """Use larger batches for generation, and restore the batch size on exit."""
        own, factor = lm.batch_size, self._factor
        if factor == 1 or not isinstance(own, int):
            yield
            return
        lm.batch_size_per_gpu = own * factor
        try:
            yield
        finally:
            lm.batch_size_per_gpu = own

    def _smaller(self, lm: Any, problem: BaseException) -> None:
        size = lm.batch_size
        if not isinstance(size, int) or size == 1:
            raise RunError(
                f"{self.label}: out of memory with a batch size of 1 ({problem}); use "
                "model.dtype=bfloat16 on a GPU, or a machine with more memory"
            ) from None
        lm.batch_size_per_gpu = size // 2
        self.ctx.reporter.warn(
            f"{self.label}: out of memory with batches of {size}; continuing with {size // 2} "
            f"(evaluation.task_batch_size={max(1, size // 2 // self._factor)} starts with it)",
            code="out_of_memory",
        )
        give_back(self.ctx.device)

    def _count_truncated(self, lm: Any) -> int:
        """Count the items whose prompt is too long. The harness truncates these from the left."""
        generates, most = self.benchmark.generates, lm.max_length + 1
        if generates:
            new_tokens = self.requests[0].args[1].get("max_gen_toks", lm.max_gen_toks)
            check_positions(self.benchmark.name, new_tokens, lm.max_length)
            most = lm.max_length - new_tokens
        long: set[tuple[str, int]] = set()
        lengths: dict[str, int] = {}
        for request in self.requests:
            text = request.args[0] + ("" if generates else request.args[1])
            # Every token has at least one character, except BOS, so short texts need no encoding.
            if len(text) + 1 < most:
                continue
            if text not in lengths:
                lengths[text] = len(lm.tok_encode(text))
            if lengths[text] > most:
                long.add((request.task_name, request.doc_id))
        if long:
            self.ctx.reporter.warn(
                f"{self.label}: the prompts of {len(long):,} items are longer than the model's "
                f"{lm.max_length:,} positions and were cut from the left"
            )
        return len(long)

    def _pass_at_1(
        self, references: list[str], predictions: list[list[str]], k: list[int]
    ) -> dict[str, float]:
        """The metric that the harness calls per item. The programs have already been run."""
        (reference,), (candidates,) = references, predictions
        passed = [self.verdicts[candidate, reference].passed for candidate in candidates]
        assert k == [1] and passed
        return {"pass@1": sum(passed) / len(passed)}

    def _run_programs(self) -> None:
        """Run the candidates and tests of all items in the sandbox."""
        todo: dict[tuple[str, str], Program] = {}
        for task in self.tasks:
            for request in task.instances:
                (candidate,) = request.filtered_resps[self.benchmark.filter]
                test = str(task.doc_to_target(request.doc))
                todo[candidate, test] = Program.of(request.doc, candidate, test)
        weak = self.ctx.config.evaluation.allow_weak_sandbox
        label = f"{self.label}, running the programs"
        with self.ctx.reporter.track(label, len(todo), "programs") as bar:
            ran = run_candidates([*todo.values()], advance=bar.advance, allow_weak=weak)
        self.verdicts = dict(zip(todo, ran, strict=True))

    def _score(self) -> Outcome:
        """Apply the harness's filters and metrics to all items."""
        with silenced():
            for task in self.tasks:
                task.apply_filters()
        if self.benchmark.runs_code:
            self._run_programs()
        items: list[Item] = []
        sums: dict[str, float] = {}
        for task in self.tasks:
            requests: dict[int, list[Any]] = {}
            for request in task.instances:
                requests.setdefault(request.doc_id, []).append(request)
            for doc_id, group in requests.items():
                group.sort(key=lambda request: request.idx)
                items.append(self._item(task, doc_id, group, sums))
        others = {key: total / len(items) for key, total in sums.items()}
        return Outcome(items, others, self.truncated, list(self.verdicts.values()))

    def _item(self, task: Any, doc_id: int, group: list[Any], sums: dict[str, float]) -> Item:
        benchmark, doc, score = self.benchmark, group[0].doc, None
        for name in group[0].filtered_resps:
            metrics = task.process_results(doc, [r.filtered_resps[name] for r in group])
            for metric, value in metrics.items():
                if (metric, name) == (benchmark.metric, benchmark.filter):
                    score = float(value)
                else:
                    key = metric if name == "none" else f"{metric} ({name})"
                    sums[key] = sums.get(key, 0.0) + float(value)
        if score is None:
            raise RunError(
                f"{benchmark.name}: this version of lm_eval has no metric {benchmark.metric} with "
                f"filter {benchmark.filter}; install the version in constraints.txt"
            )
        item_id = doc.get("id", doc.get("task_id"))
        if item_id is None or len(self.tasks) > 1:  # ids may repeat across subjects
            item_id = f"{task.task_name}/{doc_id}"
        item = Item(str(item_id), score)
        if benchmark.generates:
            item.text = str(group[0].resps[0])
            answer = group[0].filtered_resps[benchmark.filter]
            item.format_error = answer == NO_NUMBER
            if benchmark.runs_code:
                verdict = self.verdicts[answer[0], str(task.doc_to_target(doc))]
                item.format_error = not verdict.compiled
        return item


def _plain(answer: Any) -> Answer:
    """An answer as JSON values, which store a float exactly."""
    if isinstance(answer, str):
        return answer
    value, greedy = answer
    return [float(value), bool(greedy)]


def paired_rows(
    name: str, before: Sequence[Item], after: Sequence[Item]
) -> Iterator[dict[str, Any]]:
    """Rows of samples.jsonl: both models on one item, for paired tests."""
    for old, new in zip(before, after, strict=True):
        assert old.id == new.id
        row = {"task": name, "id": old.id, "score_before": old.score, "score_after": new.score}
        if old.text is not None:
            row |= {"text_before": old.text, "text_after": new.text}
            row["format_error_before"] = old.format_error
            row["format_error_after"] = new.format_error
        yield row


def task_facts(ctx: RunContext, name: str, sides: Mapping[str, Outcome]) -> dict[str, Any]:
    """The entry of a benchmark in results.json."""
    benchmark, settings = BENCHMARKS[name], ctx.config.evaluation
    metric = benchmark.metric
    if benchmark.filter not in ("none", "create_test"):
        metric += f" ({benchmark.filter})"
    facts: dict[str, Any] = {
        "metric": metric,
        "num_fewshot": benchmark.shots,
        "rows": "hub" if settings.data_dir is None else "evaluation.data_dir",
        "limit": settings.limit_tasks,
        "interval": "Wilson, 95 %",
    } | {side: _side_facts(sides[side]) for side in SIDES}
    if benchmark.runs_code:
        ran = [verdict for side in SIDES for verdict in sides[side].verdicts]
        facts["sandbox"] = describe_protection(ran)
        lacking = {one for verdict in ran for one, held in verdict.protection.items() if not held}
        if lacking:
            missing = "; ".join(PROTECTIONS[one] for one in sorted(lacking))
            ctx.reporter.warn(
                f"{name}: the generated programs were run without {missing} "
                "(evaluation.allow_weak_sandbox)"
            )
    return facts


def _side_facts(outcome: Outcome) -> dict[str, Any]:
    scores = [item.score for item in outcome.items]
    wrong = [item.format_error for item in outcome.items if item.format_error is not None]
    return {
        "score": sum(scores) / len(scores),
        "interval": list(wilson(sum(scores), len(scores))),
        "items": len(scores),
        "format_errors": sum(wrong) if wrong else None,
        "format_error_rate": sum(wrong) / len(wrong) if wrong else None,
        "truncated": outcome.truncated,
        "other_metrics": outcome.others,
    }


def wilson(successes: float, total: int) -> tuple[float, float]:
    """Wilson score interval of a proportion, 95 %."""
    z = 1.959963984540054
    share = successes / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def summary(tasks: Mapping[str, dict[str, Any]], domain: str) -> dict[str, Any]:
    """Stability, plasticity and overall of both models; null if a benchmark is missing."""
    target, rest = DOMAINS[domain]
    needed = {"stability": rest, "plasticity": (target,)}
    missing = {what: [n for n in names if n not in tasks] for what, names in needed.items()}
    notes = [
        f"{what} is null: {', '.join(names)} not in evaluation.tasks"
        for what, names in missing.items()
        if names
    ]
    if notes:
        notes.append("overall is null: it needs stability and plasticity")
    limits = {facts["limit"] for facts in tasks.values()} - {None}
    if limits:
        notes.append(f"only the first {max(limits)} items of each task were used")
    found: dict[str, Any] = {"domain": domain}
    for side in SIDES:
        means: dict[str, float | None] = dict.fromkeys((*needed, "overall"))
        for what, names in needed.items():
            if not missing[what]:
                means[what] = sum(tasks[name][side]["score"] for name in names) / len(names)
        stability, plasticity = means["stability"], means["plasticity"]
        if stability is not None and plasticity is not None:
            means["overall"] = (stability + plasticity) / 2
        found[side] = means
    return found | {"notes": notes}
