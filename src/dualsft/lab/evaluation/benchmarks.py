"""Benchmarks before and after fine-tuning: θ_old and θ* on tasks of lm-evaluation-harness.

The harness builds the requests, filters the answers and scores them, with the models that are
already loaded. Answers are saved while a task runs, so an interrupted evaluation resumes. Per task:
score, 95 % Wilson interval, number of items, format errors. From the scores: plasticity (the
benchmark of the domain), stability (mean of the other four) and overall (mean of both). If a
benchmark is missing, these are null, never a mean over fewer. Writes samples.jsonl
(docs/evaluation.md). Not part of Algorithm 1.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualsft.errors import RunError
from dualsft.lab.evaluation.base_answers import Kept, Turn
from dualsft.lab.evaluation.sandbox import ProgramVerdict, describe_protection, run_candidates
from dualsft.lab.evaluation.tasks import (
    BENCHMARKS,
    DOMAINS,
    NO_NUMBER,
    Benchmark,
    build_tasks,
    quiet,
    refuse_no_room,
    wanted_tasks,
)
from dualsft.runs.context import RunContext
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
    format_error: bool | None
    text: str | None


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
    turn = Turn(ctx)
    # If another cell is evaluating the base model, evaluate the tuned one first and reuse its
    # answers afterwards.
    for side in SIDES if turn.free() else reversed(SIDES):
        lm: Any = None
        with turn if side == "before" else nullcontext():
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
    with quiet():
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
    with quiet():
        return wrapper(
            pretrained=str(folder), dtype=dtype, batch_size=batch, trust_remote_code=ctx.trusted
        )


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
            with quiet():
                task.build_all_requests(limit=settings.limit_tasks, rank=0, world_size=1)
            self.requests += task.instances
        piece = ctx.pieces.load(self.piece_name)
        self.given: dict[int, Answer] = {}
        self.truncated = 0
        if piece is not None:
            self.given = {int(i): answer for i, answer in piece.facts["answers"].items()}
            self.truncated = piece.facts["truncated"]
        self.kept = None
        if side == "before" and ctx.answers is not None:
            batch = (settings.task_batch_size, self._factor)
            self.kept = Kept(ctx.answers, ctx, name, self.requests, batch)
        stored = self.kept.read() if self.kept is not None and not self.complete else None
        if stored is not None:
            self.given = {int(i): answer for i, answer in stored["answers"].items()}
            self.truncated = stored["truncated"]
            ctx.reporter.say(f"{self.label}: reusing the base model's answers from another run")

    @property
    def complete(self) -> bool:
        return len(self.given) == len(self.requests)

    def outcome(self, lm: Any) -> Outcome:
        """Run the requests that have no answer yet, then score."""
        if not self.complete:
            self._ask(lm)
        for request, index in zip(self.requests, range(len(self.requests)), strict=True):
            answer = self.given[index]
            request.resps = [tuple(answer) if isinstance(answer, list) else answer]
        return self._score()

    def _ask(self, lm: Any) -> None:
        """Run all open requests, the longest first, a few batches at a time.

        Out of memory then shows up in the first batch. On it the batch size is halved.
        """
        kind = self.requests[0].request_type
        if not self.given:
            self.truncated = self._count_truncated(lm)
        order = sorted(range(len(self.requests)), key=lambda i: (-len(self.requests[i].args[0]), i))
        waiting = [i for i in order if i not in self.given]
        pieces, done = self.ctx.pieces, len(self.given)
        total = len(self.requests)
        with (
            self.ctx.reporter.track(self.label, total, "requests", done) as bar,
            self._larger(lm),
            pieces.loop(),
        ):
            while waiting:
                size = lm.batch_size if isinstance(lm.batch_size, int) else 64
                now = waiting[: size * (1 if self.benchmark.generates else 8)]
                try:
                    with quiet():
                        ask = getattr(lm, kind)
                        answers = ask([self.requests[i] for i in now], disable_tqdm=True)
                except Exception as problem:
                    if not is_out_of_memory(problem):
                        raise
                    self._smaller(lm, problem)
                    continue
                self.given |= dict(zip(now, (_plain(a) for a in answers), strict=True))
                waiting = waiting[len(now) :]
                bar.advance(len(now))
                where = f"{self.label}: {len(self.given):,} of {total:,} requests"
                pieces.tick(self.piece_name, self._state, where)
        if pieces.folder is not None:
            pieces.forget()
            pieces.save(self.piece_name, *self._state())
        if self.kept is not None:
            self.kept.write(self._state()[1])

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        answers = {str(i): answer for i, answer in self.given.items()}
        return {}, {"answers": answers, "truncated": self.truncated}

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
            f"(set evaluation.task_batch_size={max(1, size // 2 // self._factor)} to start so)",
            code="out_of_memory",
        )
        give_back(self.ctx.device)

    def _count_truncated(self, lm: Any) -> int:
        """Count the items whose prompt is too long. The harness truncates these from the left."""
        room = lm.max_length
        kwargs = self.requests[0].args[1] if self.benchmark.generates else {}
        if self.benchmark.generates:
            new = kwargs.get("max_gen_toks", lm.max_gen_toks)
            refuse_no_room(self.benchmark.name, new, lm.max_length)
            room -= new
        long: set[tuple[str, int]] = set()
        lengths: dict[str, int] = {}
        for request in self.requests:
            text = request.args[0] + ("" if self.benchmark.generates else request.args[1])
            # Every token has at least one character, except BOS, so short texts need no encoding.
            if len(text) < room:
                continue
            if text not in lengths:
                lengths[text] = len(lm.tok_encode(text))
            if lengths[text] > room + (0 if self.benchmark.generates else 1):
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
        pairs: list[tuple[str, str]] = []
        for task in self.tasks:
            for request in task.instances:
                (candidate,) = request.filtered_resps[self.benchmark.filter]
                pairs.append((candidate, str(task.doc_to_target(request.doc))))
        todo = list(dict.fromkeys(pairs))
        label = f"{self.label}, running the programs"
        with self.ctx.reporter.track(label, len(todo), "programs") as bar:
            self.verdicts = dict(zip(todo, run_candidates(todo, advance=bar.advance), strict=True))

    def _score(self) -> Outcome:
        """Apply the harness's filters and metrics to all items."""
        with quiet():
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
        own = doc.get("id", doc.get("task_id"))
        if own is None or len(self.tasks) > 1:  # ids may repeat across subjects
            own = f"{task.task_name}/{doc_id}"
        place = str(own)
        text = str(group[0].resps[0]) if benchmark.generates else None
        return Item(place, score, self._format_error(task, group), text)

    def _format_error(self, task: Any, group: list[Any]) -> bool | None:
        """Whether the answer has the wrong form: no number (GSM8K), does not compile (HumanEval).

        None for multiple choice.
        """
        if not self.benchmark.generates:
            return None
        found = group[0].filtered_resps[self.benchmark.filter]
        if self.benchmark.runs_code:
            pair = (found[0], str(task.doc_to_target(group[0].doc)))
            return not self.verdicts[pair].compiled
        return found == NO_NUMBER


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
            row |= {
                "text_before": old.text,
                "text_after": new.text,
                "format_error_before": old.format_error,
                "format_error_after": new.format_error,
            }
        yield row


def task_facts(ctx: RunContext, name: str, sides: Mapping[str, Outcome]) -> dict[str, Any]:
    """The entry of a benchmark in results.json."""
    benchmark, settings = BENCHMARKS[name], ctx.config.evaluation
    facts: dict[str, Any] = {
        "metric": _metric_name(benchmark),
        "num_fewshot": benchmark.shots,
        "rows": "hub" if settings.data_dir is None else "evaluation.data_dir",
        "limit": settings.limit_tasks,
        "interval": "Wilson, 95 %",
    }
    for side in SIDES:
        facts[side] = _side_facts(sides[side])
    if benchmark.runs_code:
        ran = [verdict for side in SIDES for verdict in sides[side].verdicts]
        facts["sandbox"] = describe_protection(ran)
        weak = [what for what, how in facts["sandbox"].items() if "only" in how]
        if weak:
            ctx.reporter.warn(
                f"{name}: this machine's kernel did not help to hold the generated code in "
                f"({', '.join(weak)}); it was held by the interpreter alone"
            )
    return facts


def _metric_name(benchmark: Benchmark) -> str:
    named = benchmark.filter not in ("none", "create_test")
    return f"{benchmark.metric} ({benchmark.filter})" if named else benchmark.metric


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


def wilson(successes: float, total: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a proportion, 95 % by default."""
    share = successes / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def summary(tasks: Mapping[str, dict[str, Any]], domain: str) -> dict[str, Any]:
    """Stability, plasticity and overall of both models; null if a benchmark is missing."""
    target, rest = DOMAINS[domain]
    missing = {
        "stability": [name for name in rest if name not in tasks],
        "plasticity": [name for name in (target,) if name not in tasks],
    }
    notes = [
        f"{what} is null: {', '.join(names)} not in evaluation.tasks"
        for what, names in missing.items()
        if names
    ]
    if any(missing.values()):
        notes.append("overall is null: it needs stability and plasticity")
    limits = {facts["limit"] for facts in tasks.values()} - {None}
    if limits:
        notes.append(f"only the first {max(limits)} items of each task were used")
    found: dict[str, Any] = {"domain": domain}
    for side in SIDES:
        scores = {name: facts[side]["score"] for name, facts in tasks.items()}
        plasticity = None if missing["plasticity"] else scores[target]
        stability = None
        if not missing["stability"]:
            stability = sum(scores[name] for name in rest) / len(rest)
        overall = None
        if stability is not None and plasticity is not None:
            overall = (stability + plasticity) / 2
        found[side] = {"stability": stability, "plasticity": plasticity, "overall": overall}
    return found | {"notes": notes}
