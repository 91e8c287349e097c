"""`dualsft check --gain`: will selecting rows help this corpus? A pilot on a few hundred rows.

D_val is split into A, which selects, and B, which judges. Small real runs of the pipeline in a
temporary folder score a sample of the pool with A, fine-tune θ_old on the chosen rows and on random
samples of the same size, and measure the loss of B. The gain is the mean loss of the draws less
that of the chosen rows. Its 80 % interval has two parts, added in quadrature:

    draws   t · s · √(1 + 1/R)   s: spread of the R draws; the chosen rows count as one more draw,
                                 so chance alone puts a gain above the interval in one of ten cases
    rows    z · bootstrap error of the mean paired difference over the rows of B

Also measured: whether D_val has a direction (cosine of its halves), whether another seed selects
the same rows, and how the chosen rows differ from the others (docs/evaluation.md). Writes nothing
outside the temporary folder. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualsft.algorithm.calibration import half_cosine
from dualsft.algorithm.split import ROLES, divide
from dualsft.config.fields import EvaluationConfig, ResumeConfig
from dualsft.config.settings import Config
from dualsft.data.examples import digest
from dualsft.data.rows import Row, read_rows
from dualsft.errors import ConfigError, DataError
from dualsft.lab.diagnostics.ranking import Bootstrap, jaccard, spearman
from dualsft.lab.estimate.workload import stub
from dualsft.runs import pipeline
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.runs.stages.gradients import SKETCHES, read_sketches, sketches_wanted
from dualsft.runs.stages.selection import num_trained
from dualsft.runs.stages.warmup import warmup_plan
from dualsft.system.paths import RunPath
from dualsft.system.progress import Progress, Reporter, silent
from dualsft.train.loop import most_lr, sized

NUM_ROWS = 320
"""Rows of the pool in the pilot, unless --gain-rows is given."""
NUM_DRAWS = 4
T_QUANTILE = 1.638  # 90 %, Student's t with NUM_DRAWS - 1 degrees of freedom
Z_QUANTILE = 1.282  # 90 %, normal
NUM_RESAMPLES = 2000
LEAST_HALF = 8
"""Fewest rows of A and of B; with fewer, an interval would mean nothing."""
MOST_WARMUP_STEPS = 40
SMALL, SMALL_SHARE = 0.01, 0.05
"""A gain does not matter below 0.01, or below a twentieth of what random rows teach."""
SOURCE = "source"
"""Field of a row that names where it comes from."""


@dataclass(frozen=True)
class Gain:
    """What the pilot found; losses are those of B, means over its rows."""

    num_rows: int
    """Rows of the pool in the pilot."""
    num_chosen: int
    num_selecting: int
    """Rows of A."""
    num_judging: int
    """Rows of B."""
    half_cosine: float | None
    """Mean cosine of the mean unit sketches of halves of A; None without sketches."""
    spearman: float | None
    """Rank correlation of the scores with those of another seed; None without scores."""
    jaccard: float | None
    """Overlap of the top tenth with that of another seed."""
    standardised_score: float | None
    """Mean score of the chosen rows, in standard deviations above the mean of the sample."""
    response_tokens: dict[str, float]
    sources: dict[str, dict[str, float]]
    """Share of each source in the sample and among the chosen rows; empty without sources."""
    base_loss: float
    chosen_loss: float
    random_losses: list[float]
    gain: float
    low: float
    high: float
    error_of_draws: float
    """Half width of the interval from the draws alone."""
    error_of_rows: float
    """Half width of the interval from the rows of B alone."""

    @property
    def matters(self) -> float:
        """The smallest gain that is worth a selection."""
        return max(SMALL, SMALL_SHARE * (self.base_loss - float(np.mean(self.random_losses))))

    @property
    def verdict(self) -> str:
        """`help`, `random` or `unclear`."""
        if self.low > 0:
            return "help"
        return "random" if self.high <= self.matters else "unclear"

    @property
    def advice(self) -> str:
        """The verdict in one sentence."""
        sizes = f"{self.gain:.3f} [{self.low:.3f}, {self.high:.3f}]"
        if self.verdict == "help":
            return f"selection is expected to help: loss lower by {sizes}"
        if self.verdict == "random":
            return (
                "use random rows (method.data=random): no gain beyond chance can be expected "
                f"({sizes})"
            )
        more = "--gain-rows" if self.error_of_draws >= self.error_of_rows else "validation rows"
        return f"cannot tell from {self.num_rows:,} rows ({sizes}): give more {more}"

    def as_dict(self) -> dict[str, Any]:
        """As a dictionary for JSON."""
        return asdict(self) | {"verdict": self.verdict, "advice": self.advice}

    def lines(self) -> list[str]:
        """The result in words."""

        def number(value: float | None) -> str:
            return "–" if value is None else f"{value:.2f}"

        draws = ", ".join(f"{loss:.3f}" for loss in self.random_losses)
        tokens = self.response_tokens
        return [
            f"D_val agrees with itself: cosine of its halves {number(self.half_cosine)} "
            f"({self.num_selecting:,} rows)",
            f"another seed: rank correlation {number(self.spearman)}, overlap of the top tenth "
            f"{number(self.jaccard)}",
            f"chosen rows: {number(self.standardised_score)} standard deviations above the mean "
            f"score; {tokens['chosen']:.0f} response tokens, {tokens['sample']:.0f} in the sample",
            *(
                f"  {name}: {100 * share['chosen']:.0f} % of the chosen rows, "
                f"{100 * share['sample']:.0f} % of the sample"
                for name, share in self.sources.items()
            ),
            f"loss of the {self.num_judging:,} judging rows: {self.base_loss:.3f} before, "
            f"{self.chosen_loss:.3f} after {self.num_chosen:,} chosen rows; random rows {draws} "
            "(with more rows the difference is usually smaller)",
            self.advice,
        ]


def measure_gain(config: Config, reporter: Reporter, num_rows: int | None = None) -> Gain:
    """Run the pilot. Costs a few percent of a large run, but can exceed one on a small corpus."""
    ctx = RunContext(config, RunDir("."), reporter)
    data = ctx.methods.entries["data"]
    if not data.uses_budget or data.name == "random":
        raise ConfigError(f"--gain: method.data={data.name} does not select rows; leave it out")
    with tempfile.TemporaryDirectory(prefix="dualsft-gain-") as folder:
        pilot = _Pilot(ctx, Path(folder), NUM_ROWS if num_rows is None else num_rows)
        reporter.say(pilot.cost())
        with reporter.track("pilot", pilot.total, "row passes") as progress:
            return pilot.run(progress)


def interval(chosen: np.ndarray, draws: np.ndarray, seed: int) -> tuple[float, float, float]:
    """(gain, half width from the draws, half width from the rows) of losses [B] and [R, B]."""
    apart = draws.mean(0) - chosen
    rng = np.random.default_rng([seed, 31])
    weights = Bootstrap.of(len(apart), NUM_RESAMPLES, rng).weights
    error_of_rows = Z_QUANTILE * float((weights @ apart / len(apart)).std(ddof=1))
    spread = float(draws.mean(1).std(ddof=1))
    error_of_draws = T_QUANTILE * spread * math.sqrt(1 + 1 / len(draws))
    return float(apart.mean()), error_of_draws, error_of_rows


class _Pilot:
    """The files, settings and runs of one pilot."""

    def __init__(self, ctx: RunContext, folder: Path, num_rows: int) -> None:
        self.ctx, self.folder = ctx, folder
        rows, roles = _roles(ctx)
        ctx.split_counts = {role: len(ids) for role, ids in roles.items()}
        self.b = num_trained(ctx)
        rng = np.random.default_rng(np.frombuffer(digest(ctx.config.seed, "gain"), np.uint32))

        def some(role: str, count: int) -> list[str]:
            ids = roles[role]
            return [ids[i] for i in sorted(rng.permutation(len(ids))[:count])]

        pool = some("pool", num_rows)
        self.num_rows, quarter = len(pool), max(8, len(pool) // 4)
        self.warm, self.anchor = some("warm", quarter), some("anchor", quarter)
        # a text that selects must not judge
        val = list({_content(rows[i]): i for i in roles["val"]}.values())
        half = min(len(val) // 2, max(LEAST_HALF, self.num_rows))
        if half < LEAST_HALF:
            raise ConfigError(
                f"--gain: D_val has {len(val):,} different rows; one half selects and the other "
                f"judges, and each needs {LEAST_HALF}: give more rows in data.val_path, or raise "
                "split.val"
            )
        order = rng.permutation(len(val))
        self.select, self.judge = ([val[i] for i in part] for part in (order[:half], order[-half:]))
        num_pool = sum(len(roles[role]) for role in ctx.methods.load("data").pool_roles)
        self.num_chosen = max(4, min(self.num_rows // 2, round(self.num_rows * self.b / num_pool)))
        if self.num_rows < 2 * self.num_chosen:
            raise ConfigError(
                f"--gain: {self.num_rows:,} rows of the pool are too few to choose from; give a "
                "larger --gain-rows, or more rows"
            )
        corpus = [*pool, *self.warm, *self.anchor]
        sizes = {"corpus": corpus, "select": self.select, "judge": self.judge}
        self.files = {
            name: self._write(name, [rows[i] for i in ids]) for name, ids in sizes.items()
        }
        self.source_of = _sources([rows[i] for i in corpus])
        self.config = self._settings()

    def _write(self, name: str, rows: Sequence[Row]) -> str:
        """Write rows as JSON lines; raises if they would be read differently."""
        path = self.folder / f"{name}.jsonl"
        path.write_bytes(b"".join(row.raw + b"\n" for row in rows))
        try:
            again, _ = read_rows(str(path), self._data(str(path)))
        except DataError:
            again = []
        if [_content(row) for row in again] != [_content(row) for row in rows]:
            raise ConfigError(
                "--gain: the rows of this source cannot be read without its description "
                "(dataset_info.json); give data.path and data.val_path as JSON lines, or name "
                "their fields (data.prompt_field, data.response_field)"
            )
        return str(path)

    def _data(self, path: str, val_path: str | None = None) -> Any:
        plain = {"dataset": None, "subset": None, "split": None, "revision": None}
        return replace(self.ctx.config.data, path=path, val_path=val_path, **plain)

    def _settings(self) -> Config:
        """The run's settings for the pilot's rows, with the same lr × steps where possible."""
        ctx, config = self.ctx, self.ctx.config
        run, warmup = finetune_plan(ctx, self.b), warmup_plan(ctx)
        sizes = sized(self.num_chosen)
        self.plan = replace(run, epochs=sizes.epochs, batch_size=sizes.batch_size)
        params, steps = ctx.methods.entries["params"], self.plan.num_steps(self.num_chosen)
        most = max(run.lr, most_lr(ctx.width) * params.relative_lr(auto=True))
        lr = min(most, max(run.lr, run.lr * run.num_steps(self.b) / steps))
        self.plan = replace(self.plan, lr=lr)
        self.warmup = replace(
            warmup,
            batch_size=sized(len(self.warm)).batch_size,
            min_steps=min(MOST_WARMUP_STEPS, warmup.num_steps(ctx.counts["warm"])),
        )
        base = ctx.base_lr()
        return replace(
            config,
            data=self._data(self.files["corpus"], self.files["select"]),
            split=replace(config.split, val=None, anchor=len(self.anchor), warm=len(self.warm)),
            warmup=replace(
                config.warmup,
                lr=self.warmup.lr,
                batch_size=self.warmup.batch_size,
                min_steps=self.warmup.min_steps,
            ),
            select=replace(config.select, data_budget=self.num_chosen),
            method=replace(config.method, lr_ratio=self.plan.lr / base),
            finetune=replace(
                config.finetune,
                lr=base,
                epochs=self.plan.epochs,
                batch_size=self.plan.batch_size,
            ),
            evaluation=EvaluationConfig(
                files={"judge": self.files["judge"]},
                batch_tokens=config.evaluation.batch_tokens,
            ),
            resume=ResumeConfig(every=None),
        )

    def _draw(self, number: int) -> Config:
        """The settings of a run on random rows."""
        methods = self.ctx.methods
        others = {entry.name for axis, entry in methods.entries.items() if axis != "data"}
        kept = {k: v for k, v in methods.options.items() if k.partition(".")[0] in others}
        options = {**kept, "random.draw": number}
        return replace(
            self.config,
            method=replace(self.config.method, data="random", options=options),
            select=replace(self.config.select, rounds=0, duplicates="keep"),
        )

    # --- cost -----------------------------------------------------------------------------------

    @property
    def scoring(self) -> int:
        """Row passes of a warmup and a scoring."""
        if "scores" not in self.ctx.methods.needs:
            return 0
        warmed = self.warmup.num_steps(len(self.warm)) * self.warmup.batch_size
        return warmed + len(self.select) + 2 * len(self.anchor) + self.num_rows

    @property
    def training(self) -> int:
        """Row passes of a fine-tuning and its evaluation."""
        trained = self.plan.num_steps(self.num_chosen) * self.plan.batch_size
        return trained + 2 * (len(self.select) + len(self.judge))

    @property
    def total(self) -> int:
        return 2 * self.scoring + (1 + NUM_DRAWS) * self.training

    def cost(self) -> str:
        """What the pilot will do, in one line."""
        plan = self.plan
        return (
            f"pilot: {self.num_rows:,} rows of the pool scored with {len(self.select):,} rows of "
            f"D_val, {1 + NUM_DRAWS} fine-tunings on {self.num_chosen:,} rows "
            f"({plan.num_steps(self.num_chosen):,} steps of {plan.batch_size}, lr {plan.lr:.3g}), "
            f"judged by {len(self.judge):,} rows of D_val: about {self.total:,} passes over a row"
        )

    # --- runs -----------------------------------------------------------------------------------

    def run(self, progress: Progress) -> Gain:
        chosen = self._run("chosen", self.config, "evaluation")
        before, losses = _losses(chosen)
        progress.advance(self.scoring + self.training)
        facts = self._chosen_facts(chosen)
        if self.ctx.methods.scored("data"):
            other = replace(self.config, seed=(self.config.seed + 1) % 2**32)
            facts |= _agreement(chosen, self._run("again", other, "scores"))
        progress.advance(self.scoring)
        draws = []
        for number in range(1, NUM_DRAWS + 1):
            random = self._run("random", self._draw(number), "evaluation", [chosen])
            draws.append(_losses(random)[1])
            progress.advance(self.training)
        gain, by_draws, by_rows = interval(losses, np.stack(draws), self.config.seed)
        width = math.hypot(by_draws, by_rows)
        return Gain(
            num_rows=self.num_rows,
            num_chosen=self.num_chosen,
            num_selecting=len(self.select),
            num_judging=len(losses),
            base_loss=float(before.mean()),
            chosen_loss=float(losses.mean()),
            random_losses=[float(draw.mean()) for draw in draws],
            gain=gain,
            low=gain - width,
            high=gain + width,
            error_of_draws=by_draws,
            error_of_rows=by_rows,
            **facts,
        )

    def _run(
        self, name: str, config: Config, until: str, lenders: Sequence[RunPath] = ()
    ) -> RunPath:
        return RunPath(pipeline.run(config, self.folder / name, until, silent(), lenders))

    def _chosen_facts(self, run: RunPath) -> dict[str, Any]:
        """How the chosen rows differ from the sample."""
        ids = set((run / "5_selection/ids.json").read_json())
        summary = (run / "5_selection/summary.json").read_json()
        split = (run / "1_split/split.parquet").read_table().to_pydict()
        places = dict(zip(split["id"], split["index"], strict=True))
        pool = [i for i, role in zip(split["id"], split["role"], strict=True) if role == "pool"]
        facts: dict[str, Any] = {
            "half_cosine": None,
            "spearman": None,
            "jaccard": None,
            "standardised_score": None,
            "response_tokens": {
                "chosen": summary["response_tokens_selected"],
                "sample": summary["response_tokens_pool"],
            },
            "sources": {},
        }
        if self.source_of:
            sample, chosen = (
                Counter(self.source_of[places[i]] for i in rows) for rows in (pool, ids)
            )
            facts["sources"] = {
                name: {"sample": count / sample.total(), "chosen": chosen[name] / chosen.total()}
                for name, count in sorted(sample.items())
            }
        if self.ctx.methods.scored("data"):
            scores = _scores(run)
            values = np.array([*scores.values()])
            mean = np.mean([scores[i] for i in ids]) - values.mean()
            facts["standardised_score"] = float(mean / max(values.std(), 1e-300))
        pilot = RunContext(self.config, RunDir(run), self.ctx.reporter)
        if sketches_wanted(pilot):
            dim = self.config.score.sketch_dim
            sketches = read_sketches(run / "3_gradients" / SKETCHES, pilot.counts, dim)
            facts["half_cosine"] = half_cosine(sketches["val"], self.config.seed)
        return facts


def _roles(ctx: RunContext) -> tuple[dict[str, Row], dict[str, list[str]]]:
    """(rows by id, ids by role): the split of the run; tokenises nothing."""
    data = ctx.config.data
    corpus, _ = read_rows(ctx.data_path(data.path), data)
    trusted: list[Row] = []
    if data.val_path is not None:
        trusted, _ = read_rows(ctx.data_path(data.val_path), data, key="data.val_path")
    given, held = list(map(stub, corpus)), list(map(stub, trusted))
    examples, split = divide(given, held, ctx.config.seed, ctx.config.split)
    rows = {row.id: row for row in corpus}
    roles: dict[str, list[str]] = {role: [] for role in ROLES}
    first_trusted = len(examples) - len(trusted)
    for i, (example, role) in enumerate(zip(examples, split.roles, strict=True)):
        key = example.id
        if i >= first_trusted:  # ids of another file
            key = f"val-{key}"
            rows[key] = trusted[i - first_trusted]
        roles[role].append(key)
    return rows, roles


def _content(row: Row) -> tuple[Any, ...]:
    said = row.prompt, row.response, row.turns, row.tools, row.trained_from, row.whole
    return *said, row.pieces, row.tokens


def _sources(rows: Sequence[Row]) -> list[str]:
    """The file of each row, or its field `source`; empty if there is only one."""
    found: dict[str, Callable[[Row], str]] = {
        "file": lambda row: Path(row.place.rpartition(", ")[0]).name,
        "field": lambda row: str(json.loads(row.raw).get(SOURCE, "")),
    }
    for name_of in found.values():
        names = [name_of(row) for row in rows]
        if 1 < len(set(names)) <= len(rows) // 4:
            return names
    return []


def _losses(run: RunPath) -> tuple[np.ndarray, np.ndarray]:
    """(loss before, loss after) of every judging row."""
    table = (run / "7_evaluation/losses.parquet").read_table().to_pydict()
    judged = np.array(table["set"]) == "judge"
    return np.array(table["loss_before"])[judged], np.array(table["loss_after"])[judged]


def _scores(run: RunPath) -> dict[str, float]:
    table = (run / "4_scores/examples.parquet").read_table()
    return dict(zip(table["id"].to_pylist(), table["score"].to_pylist(), strict=True))


def _agreement(one: RunPath, other: RunPath) -> dict[str, float | None]:
    """Spearman and overlap of the top tenth over the rows that both runs scored."""
    ours, theirs = _scores(one), _scores(other)
    shared = [i for i in ours if i in theirs]
    a, b = (np.array([scores[i] for i in shared]) for scores in (ours, theirs))
    count = max(1, len(shared) // 10)
    tops = [np.argsort(-values, kind="stable")[:count] for values in (a, b)]
    return {"spearman": spearman(a, b), "jaccard": jaccard(*tops)}
