"""`dualsft explain`: which pool examples help or hurt a query row, and which are suspected wrong.

Works on a run with `score.form=calibrated` whose scores are finished; the arithmetic is in
`algorithm/influence.py`. Query rows are read and tokenised as the run's data, and take one backward
pass at θ̄ each; without a query no model is loaded. Reads 1_split, 2_warmup (only with a query),
3_gradients/sketches.safetensors and 4_scores, and the selection if there is one. Writes
RUN/explain/NAME/: influences.parquet, queries.parquet (with a query), suspects.parquet,
summary.json and explain.html. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dualsft.algorithm.calibration import Solver
from dualsft.algorithm.influence import Extremes, check_scores, influences, sketch_queries, supports
from dualsft.config import settings
from dualsft.data.examples import Example
from dualsft.data.sources import source_hash
from dualsft.distributed import launch
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.sketch import SketchRows
from dualsft.errors import ConfigError, RunError
from dualsft.lab.report.examples import Examples, collect_examples, pack, texts_of, unpack
from dualsft.lab.report.html import (
    EXPLAIN,
    EXPLAIN_NAME,
    check_files,
    consistent,
    find_tokenizer,
    render,
)
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.folder import RunDir, atomic_write_text
from dualsft.runs.preflight import check_run_folder, load_summaries, reading
from dualsft.runs.stages.gradients import SKETCHES, read_sketches, sketch_for, sketches_wanted
from dualsft.runs.stages.split import check_vocabulary, load_examples
from dualsft.storage.manifest import versions
from dualsft.system.paths import RunPath, run_path
from dualsft.system.progress import Reporter
from dualsft.system.usage import PeakMemory

SUSPECTED = "loss"
"""The measure that orders the suspects, high first: the one that finds planted wrong answers best
on real rows (docs/explain.md)."""
STAGES = ("split", "warmup", "gradients", "scores", "selection")
Query = str | Path | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Explanation:
    """What `dualsft explain` wrote, as pyarrow tables; `table.to_pandas()` needs pandas."""

    folder: Path
    influences: pa.Table
    """query, rank, side, score, id, index, prompt, response, selected; no rows without a query."""
    suspects: pa.Table
    """Every pool example, most suspected first."""
    queries: pa.Table
    summary: dict[str, Any]


@dataclass(frozen=True)
class _Pool:
    """The pool of a run as its files have it; positions are those of the pool."""

    sketches: SketchRows
    val: SketchRows
    rho: float
    scores: np.ndarray
    losses: np.ndarray
    response_tokens: np.ndarray
    ids: list[str]
    lines: np.ndarray
    """Row in the source of each example."""
    places: np.ndarray
    """Position of each example among all examples of the split."""


@dataclass(frozen=True)
class _Answers:
    """The query rows, and for each the extremes of the pool."""

    examples: Sequence[Example] = ()
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    norms: np.ndarray = field(default_factory=lambda: np.zeros(0))
    extremes: Sequence[Extremes] = ()
    checked: Sequence[dict[str, Any]] = ()
    source: dict[str, Any] | None = None
    """File and hash of the query; None without a query."""


@dataclass(frozen=True)
class _Found:
    """Everything that the files are made of."""

    pool: _Pool
    solver: Solver
    support: np.ndarray
    scores_error: float
    answers: _Answers
    shown: Examples
    """All examples of the split with their texts, as in the report."""
    query_texts: list[list[str]]

    def facts(self) -> dict[str, Any]:
        pool, answers = self.pool, self.answers
        return {
            "query": answers.source,
            "num_queries": len(answers.examples),
            "num_pool": len(pool.ids),
            "backward_passes": len(answers.examples) + len(answers.checked),
            "suspected_by": SUSPECTED,
            "rho": pool.rho,
            "sketch_dim": pool.sketches.dim,
            "solved_in": self.solver.side,
            "token_cap": self.shown.token_cap,
            "no_text": self.shown.no_text or None,
            "checks": {
                "residual": self.solver.worst,
                "scores_error": self.scores_error,
                "sketched_again": list(answers.checked),
            },
        }


def explain(
    run: str | Path | RunPath,
    query: Query | None = None,
    *,
    top: int = 10,
    name: str | None = None,
    consent: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> Explanation:
    """Explain a scored run: influences of its pool on the query rows, and its suspected rows.

    `query` is a path (any format of `data.path`) or a list of rows; without it only the suspects
    are computed. `top` is the number of examples per query and side. `name` is the folder under
    RUN/explain (default: that of the query file, `rows`, or `suspects`); an earlier result of that
    name is replaced. `consent` has settings that a run folder from someone else cannot give, such
    as `model.path=...`.
    """
    launch.check_one_process("explain")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ConfigError(f"--top: {top!r} is not allowed; give a count (integer >= 1)")
    name = _checked_name(name, query)
    folder = run_path(run)
    check_run_folder(folder)
    config = settings.load(folder / "config.yaml", consent)
    ctx = RunContext(config, RunDir(folder), reporter or Reporter())
    if not sketches_wanted(ctx):
        raise ConfigError(
            f"{folder}: explain needs the sketches of score.form=calibrated with method.data="
            f"dualsft, and this run has score.form={config.score.form}, method.data="
            f"{config.method.data}; score it in a new folder with `dualsft run {folder}/config.yaml"
            " --out NEW --until scores score.form=calibrated method.data=dualsft`"
        )
    with ctx.rundir.lock():
        facts = load_summaries(folder)
        if "scores" not in facts["manifests"]:
            raise RunError(
                f"{folder}: has no finished, up-to-date stage scores; run `dualsft score {folder}` "
                "first"
            )
        check_files(folder, facts, gradients=SKETCHES)
        start = time.perf_counter()
        with PeakMemory() as memory:
            found = _compute(ctx, facts, query, top)
        made = _tables(found)
        hashes = {s: m["fingerprint"]["hash"] for s, m in facts["manifests"].items()}
        summary = {
            "name": name,
            "stages": {s: hash for s, hash in hashes.items() if s in STAGES},
            "top": top,
            **found.facts(),
            "seconds": round(time.perf_counter() - start, 3),
            "peak_memory": memory.as_dict(),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }
        out = _write(folder, name, made, summary, _page(folder, name, summary, found))
    return Explanation(out.location, made["influences"], made["suspects"], made["queries"], summary)


def _checked_name(name: str | None, query: Query | None) -> str:
    if name is None:
        if query is None:
            return "suspects"
        if not isinstance(query, str | Path):
            return "rows"
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(str(query)).name.partition(".")[0]).strip("-")
        return stem[:100] or "query"
    if not EXPLAIN_NAME.fullmatch(name):
        raise ConfigError(
            f"--name: {name!r} is not allowed; give up to 100 letters, digits, '_', '-' or '.', "
            "the first not '.' or '-'"
        )
    return name


# --- reading ------------------------------------------------------------------------------------


def _read_pool(ctx: RunContext, facts: Mapping[str, Any]) -> _Pool:
    """The pool's sketches, scores and places, each checked: hashes do not stop a forger."""
    with reading(path := ctx.folder("scores") / "summary.json"):
        summary = facts["scores"]
        rho, dim = summary["rho"], ctx.config.score.sketch_dim
        if summary["form"] != "calibrated" or summary["sketch_dim"] != dim:
            raise ValueError(f"{summary['form']} scores with sketch_dim {summary['sketch_dim']}")
        if not isinstance(rho, float) or not 0 < rho < math.inf:
            raise ValueError(f"rho is {rho!r}")
    with reading(ctx.folder("split") / "split.parquet"):
        split = (ctx.folder("split") / "split.parquet").read_table(["id", "role", "index"])
        roles = np.array(split["role"].to_pylist())
        places = np.flatnonzero(roles == "pool")
        ids = split["id"].take(places).to_pylist()
        lines = split["index"].take(places).to_numpy().astype(np.int64, casting="safe")
        counts = {role: int((roles == role).sum()) for role in ("val", "pool")}
        if not all(counts.values()):
            raise ValueError(f"the split has {counts}")
    with reading(path := ctx.folder("scores") / "examples.parquet"):
        table = path.read_table(["id", "score", "loss", "response_tokens"])
        if table["id"].to_pylist() != ids:
            raise ValueError("its examples are not those of the pool")
        scores, losses = (
            table[column].to_numpy().astype(np.float64, casting="safe")
            for column in ("score", "loss")
        )
        if not np.isfinite(scores).all() or not np.isfinite(losses).all():
            raise ValueError("it has scores or losses that are not finite")
        tokens = table["response_tokens"].to_numpy().astype(np.int64, casting="safe")
    rows = read_sketches(ctx.folder("gradients") / SKETCHES, counts, dim)
    return _Pool(rows["pool"], rows["val"], rho, scores, losses, tokens, ids, lines, places)


def _compute(ctx: RunContext, facts: Mapping[str, Any], query: Query | None, top: int) -> _Found:
    asked = None if query is None else _read_query(ctx, query)
    pool, folder = _read_pool(ctx, facts), ctx.rundir.path
    with ctx.reporter.track("solving for the support", 1, "system") as progress:
        solver = Solver(pool.sketches, ctx.device)
        stored = f"{ctx.folder('scores') / 'examples.parquet'} and 3_gradients/sketches.safetensors"
        apart = check_scores(solver, pool.val, pool.rho, pool.scores, stored)
        support = supports(solver, pool.rho)
        progress.advance(1)
    answers = _Answers() if asked is None else _ask(ctx, pool, solver, *asked, top)
    tokenizer, why = find_tokenizer(folder, facts)
    with consistent(folder):
        shown = collect_examples(folder, facts, tokenizer, why)
    texts = _texts(answers.examples, None if shown.no_text else tokenizer)
    return _Found(pool, solver, support, apart, answers, shown, texts)


def _read_query(ctx: RunContext, query: Query) -> tuple[list[Example], dict[str, Any]]:
    """(query rows tokenised as the run's data, file name and hash)."""
    with tempfile.TemporaryDirectory(prefix="dualsft-") as temporary:
        file = str(query)
        if not isinstance(query, str | Path):
            file = f"{temporary}/rows.jsonl"
            lines = [json.dumps(dict(row), ensure_ascii=False) + "\n" for row in query]
            atomic_write_text(file, "".join(lines))
        sha256 = source_hash(ctx.data_path(file), ctx.config.data, "--query")
        examples, report = load_examples(ctx, file, "--query")
    for note in report.notes():
        ctx.reporter.warn(note)
    check_vocabulary(ctx, examples)
    return examples, {"file": Path(file).name, "sha256": sha256}


def _ask(
    ctx: RunContext,
    pool: _Pool,
    solver: Solver,
    examples: list[Example],
    source: dict[str, Any],
    top: int,
) -> _Answers:
    """Sketch the query rows at θ̄ and solve for each."""
    model = ctx.theta_bar()
    engine = GhostEngine(model, ctx.candidates(model))
    sketch = sketch_for(ctx, engine)
    assert sketch is not None
    stored, seed = ctx.roles()["pool"], ctx.config.seed
    made, losses, checked = sketch_queries(
        engine,
        sketch,
        examples,
        pool.sketches,
        stored,
        seed,
        pass_settings(ctx),
        ctx.reporter,
        ctx.folder("gradients") / SKETCHES,
    )
    for example, norm in zip(examples, made.norms, strict=True):
        if not norm:
            ctx.reporter.warn(
                f"--query: row {example.index + 1} has no gradient (the model predicts its response"
                " with certainty): nothing influences it"
            )
    extremes: list[Extremes] = []
    with ctx.reporter.track("influences", len(examples), "queries") as progress:
        for rows, scores in influences(solver, made, pool.rho):
            extremes += [Extremes.of(column, pool.lines, top) for column in scores.T]
            progress.advance(rows.stop - rows.start)
    return _Answers(examples, losses, made.norms, extremes, checked, source)


# --- tables -------------------------------------------------------------------------------------


def _texts(rows: Sequence[Example], tokenizer: Any) -> list[list[str]]:
    """Texts of the query rows: prompt, response, prompt, ..., decoded as those of the pool."""
    if tokenizer is None or not rows:
        return [[] for _ in rows]
    offsets = np.cumsum([0, *(e.num_tokens for e in rows)])
    ids = np.concatenate([np.array(e.input_ids) for e in rows])
    labels = np.concatenate([np.array(e.labels) for e in rows])
    batch = offsets, ids, labels != -100
    return next(iter(texts_of([batch], tokenizer, max(e.num_tokens for e in rows))))


def _tables(found: _Found) -> dict[str, pa.Table]:
    """influences, suspects and queries."""
    pool, support, shown, answers = found.pool, found.support, found.shown, found.answers
    texts = [text for chunk in shown.chunks for text in unpack(chunk)]
    texts = [texts[at] for at in pool.places] if texts else [[] for _ in pool.ids]
    decided = any(shown.in_state(state).any() for state in ("selected", "rejected"))
    chosen = shown.in_state("selected")[pool.places]

    def about(rows: np.ndarray) -> dict[str, Any]:
        selected = pa.array(chosen[rows]) if decided else pa.nulls(len(rows), pa.bool_())
        return {
            "id": pa.array([pool.ids[i] for i in rows], pa.string()),
            "index": pool.lines[rows],
            "selected": selected,
            **_columns([texts[i] for i in rows]),
        }

    order = np.lexsort((pool.lines, -pool.losses))
    suspects = {
        "rank": np.arange(1, len(order) + 1),
        "support": support[order],
        "score": pool.scores[order],
        "loss": pool.losses[order],
        "response_tokens": pool.response_tokens[order],
    } | about(order)
    sides = [
        (example.index, side, rows, scores)
        for example, one in zip(answers.examples, answers.extremes, strict=True)
        for side, rows, scores in (
            ("helps", one.helps, one.helps_scores),
            ("hurts", one.hurts, one.hurts_scores),
        )
    ]
    none = np.zeros(0, np.int64)
    influenced = {
        "query": np.concatenate([none, *(np.full(len(rows), q) for q, _, rows, _ in sides)]),
        "rank": np.concatenate([none, *(np.arange(len(rows)) + 1 for _, _, rows, _ in sides)]),
        "side": pa.array([side for _, side, rows, _ in sides for _ in rows], pa.string()),
        "score": np.concatenate([np.zeros(0), *(scores for *_, scores in sides)]),
    } | about(np.concatenate([none, *(rows for _, _, rows, _ in sides)]))
    queries = {
        "query": np.array([e.index for e in answers.examples], np.int64),
        "id": pa.array([e.id for e in answers.examples], pa.string()),
        "loss": answers.losses,
        "gradient_norm": answers.norms,
        "response_tokens": np.array([e.num_response_tokens for e in answers.examples], np.int64),
        **_columns(found.query_texts),
    }
    named = {"influences": influenced, "suspects": suspects, "queries": queries}
    return {name: pa.table(columns) for name, columns in named.items()}


def _columns(texts: Sequence[list[str]]) -> dict[str, pa.Array]:
    """Texts that alternate, as prompt and response; null without a text."""
    parts = {"prompt": slice(0, None, 2), "response": slice(1, None, 2)}
    return {
        name: pa.array(["".join(text[part]) if text else None for text in texts], pa.string())
        for name, part in parts.items()
    }


# --- writing ------------------------------------------------------------------------------------


def _page(run: RunPath, name: str, summary: Mapping[str, Any], found: _Found) -> str:
    """explain.html: the example browser of the report, ordered by suspicion, and the queries."""
    pool, shown, answers = found.pool, found.shown, found.answers
    column: list[float | None] = [None] * shown.count
    for place, value in zip(pool.places.tolist(), found.support.tolist(), strict=True):
        column[place] = float(f"{value:.9g}")
    heads = [("loss", "loss"), ("support", "support"), ("score", "score")]
    columns = {**shown.columns, "support": column, "heads": heads}
    blocks = {"examples-data": pack(columns)}
    blocks |= {f"text-{at}": chunk for at, chunk in enumerate(shown.chunks)}

    def pairs(rows: np.ndarray, scores: np.ndarray) -> list[tuple[int, float]]:
        both = zip(pool.places[rows].tolist(), scores.tolist(), strict=True)
        return [(place, float(f"{score:.9g}")) for place, score in both]

    if answers.source is not None:
        rows = zip(
            answers.examples, answers.losses, found.query_texts, answers.extremes, strict=True
        )
        blocks["queries-data"] = pack(
            [
                {
                    "line": example.index,
                    "id": example.id,
                    "loss": float(loss),
                    "text": text,
                    "helps": pairs(one.helps, one.helps_scores),
                    "hurts": pairs(one.hurts, one.hurts_scores),
                }
                for example, loss, text, one in rows
            ]
        )
    listed = [
        ("examples of the pool", f"{summary['num_pool']:,}"),
        ("query rows", f"{summary['num_queries']:,}"),
        ("backward passes", f"{summary['backward_passes']:,}"),
        ("ρ of the run", f"{summary['rho']:.3g}"),
        ("numbers per sketch", f"{summary['sketch_dim']:,}"),
        ("time", f"{summary['seconds']:.1f} s"),
    ]
    return render(
        "explain.html",
        title=f"DualSFT explain {name}, run {run.location.resolve().name}",
        facts=listed,
        blocks=blocks,
        report=(run / "report.html").is_file(),
        asked=answers.source is not None,
        suspects=True,
        suspected_by=SUSPECTED,
        no_text=shown.no_text,
        token_cap=shown.token_cap,
    )


def _write(
    run: RunPath, name: str, made: Mapping[str, pa.Table], summary: Mapping[str, Any], page: str
) -> RunPath:
    """Write RUN/explain/NAME; an earlier result stays until the new one is complete."""
    final, part = run / EXPLAIN / name, run / EXPLAIN / f".{name}.part"
    (run / EXPLAIN).mkdir(exist_ok=True)
    part.remove()
    part.mkdir()
    for table, content in made.items():
        if table == "suspects" or summary["query"] is not None:
            (part / f"{table}.parquet").write_table(content, compression="zstd")
    (part / "summary.json").write_json(summary, ensure_ascii=False)
    atomic_write_text(part / "explain.html", page)
    final.remove()
    part.rename(final)
    return final
