"""Does the selection find the target, and is it worth training on? Mixed, noisy and clean pools.

    python -m benchmarks.pools --data DIR --out DIR [--pools mixed,code] [--seeds 3,4,5]
        [--arms recommended,less] [--masks own,short] [--pairs less:s2ft,random:random]
        [--rates 3e-4,7e-4] [--draws 8]

Makes pools of 3,000 rows from GSM8K, Alpaca and code (gzip JSONL in --data), lets the package
select from them with `recommended` and with other scores, and trains on the result: a mask, 3
epochs, 16 rows per step. The mask has the entries with the largest scores u ⊙ G, or it is one of
MASKS, each trained on the same rows; --pairs trains the rows of one way to select under the mask of
another. Two references are trained in the same way with several draws: random rows of the pool, and
random rows of its target part. The learning rate of each arm is the best of --rates on rows held
apart (draws: tuned on the first). Reported per arm: the loss of unseen target rows, KL to the base
and loss on rows of other behaviour, and the share of selected rows that are off target, wrong or
copies.

One JSON file per pool and seed, rewritten after every training: a second call continues. Several
processes may work on one folder (--share 1/4): each takes its part of the cells.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dualsft
from dualsft.algorithm.duplicates import repeated_texts
from dualsft.config.settings import Config
from dualsft.data.examples import Batch, Example, collate, make_batches
from dualsft.engine.losses import comparison, example_objective
from dualsft.model.load import text_parameters
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.runs.stages.selection import read_mask
from dualsft.runs.stages.split import load_examples
from dualsft.system.paths import run_path
from dualsft.system.progress import Reporter
from dualsft.train.loop import Hooks, train
from dualsft.train.optimizer import make_optimizer

POOLS = ("mixed", "code", "tenth", "noisy", "copies", "clean")
MIXED = ("mixed", "code", "tenth")  # with rows off target, so draws of target rows are trained too
NUM_VAL, NUM_TUNE, NUM_OLD = 256, 100, 100
NUM_TEST = {"gsm8k": 300, "code": 200}
BUDGET = {"tenth": 1 / 30}  # a third of its target rows; a tenth of the pool elsewhere
LONGEST = 1600  # characters of prompt and response
SELECTORS: dict[str, tuple[str, ...]] = {
    "recommended": (),
    "short": ("warmup.min_steps=0",),
    "cosine": ("score.rho=1e6",),
    "literal": ("score.form=literal", "select.duplicates=keep"),
    "v_new": ("score.form=literal", "select.duplicates=keep", "score.lam=0"),
    "paper": ("score.form=literal", "select.duplicates=keep", "score.lam_relative=false"),
    "top_loss": ("method.data=top_loss",),
    "less": ("method.data=less",),
    "spice": ("method.data=spice",),
}
"""Settings of each way to select, on top of `recommended`."""
DRAWN = {"q25": 0.25, "q50": 0.5}
"""Ways to select that draw at random above a quantile of the validation rows' scores."""
MASKS: dict[str, tuple[str, ...]] = {
    "own": (),
    "short": ("warmup.min_steps=0",),
    "short_new": ("warmup.min_steps=0", "score.lam=0"),
    "start": ("warmup.epochs=0",),
    "new": ("score.lam=0",),
    "paper": ("score.lam_relative=false",),
    "s2ft": ("method.params=s2ft",),
    "lift": ("method.params=lift",),
    "random": ("method.params=random",),
}
"""Settings of each way to choose the mask, on top of `recommended` with `method.params=dualsft`:
after its warmup, after one
epoch of it, the same without preservation, at θ_old, after the warmup without preservation, with
the paper's absolute λ, and the masks of three other methods."""
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NAMES = ("Amara", "Bruno", "Chloe", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jamal")


@dataclass(frozen=True)
class Row:
    """A row of a pool: its text, where it is from, and whether it is what we want."""

    prompt: str
    response: str
    kind: str
    """gsm8k, alpaca, code, or wrong."""
    origin: int = -1
    """Rows with the same number are copies of one another."""

    def json(self) -> str:
        return json.dumps({"prompt": self.prompt, "response": self.response})


@dataclass(frozen=True)
class Pool:
    """The files of one pool, and the kind and origin of its rows."""

    folder: Path
    rows: list[Row]
    target: str
    budget: int

    def is_target(self, i: int) -> bool:
        return self.rows[i].kind == self.target


def read_source(data: Path, name: str) -> list[Row]:
    """The rows of one corpus as prompt and response; long ones are left out."""
    file, kind = {
        "gsm8k": ("gsm8k_train", "gsm8k"),
        "gsm8k_test": ("gsm8k_test", "gsm8k"),
        "alpaca": ("alpaca_5k", "alpaca"),
        "code": ("code_sft", "code"),
    }[name]
    rows = []
    with gzip.open(data / f"{file}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            prompt = row.get("question") or row.get("prompt") or row.get("instruction")
            if row.get("input"):
                prompt += "\n\n" + row["input"]
            response = row.get("answer") or row.get("response") or row.get("output")
            if prompt and response and len(prompt) + len(response) <= LONGEST:
                rows.append(Row(prompt, response, kind))
    return rows


def make_pool(name: str, seed: int, num_rows: int, data: Path, folder: Path) -> Pool:
    """Write pool, val, tune, test and old behaviour of one pool and seed."""
    rng = random.Random(f"{name} {seed}")
    target = "code" if name == "code" else "gsm8k"
    corpora = {kind: read_source(data, kind) for kind in ("gsm8k", "alpaca", "code")}
    for rows in corpora.values():
        rng.shuffle(rows)
    take = {kind: iter(rows) for kind, rows in corpora.items()}

    def draw(kind: str, count: int) -> list[Row]:
        return [next(take[kind]) for _ in range(count)]

    unseen = take[target]
    if target == "gsm8k":
        held = read_source(data, "gsm8k_test")
        rng.shuffle(held)
        unseen = iter(held)
    test = [next(unseen) for _ in range(NUM_TEST[target])]
    tune = [next(unseen) for _ in range(NUM_TUNE)]
    val = draw(target, NUM_VAL)
    old = {kind: draw(kind, NUM_OLD) for kind in ("alpaca", "code", "gsm8k") if kind != target}
    anchors = [row for kind in old for row in draw(kind, NUM_VAL // 2)]
    shares = {
        "mixed": (1 / 3, 1 / 3, 1 / 3),
        "code": (1 / 3, 1 / 3, 1 / 3),
        "tenth": (0.1, 0.45, 0.45),
    }
    if name in shares:
        counts = zip(corpora, shares[name], strict=True)
        pool = [row for kind, share in counts for row in draw(kind, round(share * num_rows))]
    elif name == "copies":
        pool = [
            copy
            for i, row in enumerate(draw("gsm8k", num_rows // 3))
            for copy in copies(row, i, rng)
        ]
    else:
        pool = draw("gsm8k", num_rows)
    if name == "noisy":
        wrong = 2 * num_rows // 5
        answers = [row.response for row in pool[:wrong]]
        answers = answers[1:] + answers[:1]  # every answer is another row's
        swapped = zip(pool[:wrong], answers, strict=True)
        pool[:wrong] = [Row(row.prompt, answer, "wrong") for row, answer in swapped]
    rng.shuffle(pool)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"pool": pool, "val": val, "tune": tune, "test": test, "anchors": anchors, **old}
    for file, rows in files.items():
        text, path = "".join(row.json() + "\n" for row in rows), folder / f"{file}.jsonl"
        if not path.is_file() or path.read_text() != text:  # another process may be reading it
            path.write_text(text)
    return Pool(folder, pool, target, round(BUDGET.get(name, 0.1) * num_rows))


def copies(row: Row, origin: int, rng: random.Random) -> list[Row]:
    """A row as it is, with the question's sentences in another order, and with other names and
    number words."""
    sentences = re.split(r"(?<=[.?!])\s+", row.prompt)
    rng.shuffle(sentences)
    words = set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+\b", row.prompt))
    other = {word: rng.choice(NAMES) for word in sorted(words)}
    other |= {word: rng.choice(NUMBERS) for word in NUMBERS}

    def renamed(text: str) -> str:
        return re.sub(r"\b[A-Za-z]+\b", lambda m: other.get(m[0], m[0]), text)

    return [
        Row(row.prompt, row.response, row.kind, origin),
        Row(" ".join(sentences), row.response, row.kind, origin),
        Row(renamed(row.prompt), renamed(row.response), row.kind, origin),
    ]


def settings_of(pool: Pool, seed: int, model: str, extra: Sequence[str]) -> Config:
    """`recommended` for this pool, with the same training settings for every arm."""
    return dualsft.load(
        "recommended",
        [
            f"model.path={model}",
            f"data.path={pool.folder / 'pool.jsonl'}",
            f"data.val_path={pool.folder / 'val.jsonl'}",
            "data.max_length=1024",
            "split.anchor=64",
            "score.preservation=cwsd",
            "score.lam_relative=true",
            f"seed={seed}",
            "warmup.lr=1e-4",
            "warmup.batch_size=16",
            "warmup.max_epochs=null",
            "finetune.lr=5e-4",
            "finetune.batch_size=16",
            "finetune.epochs=3",
            f"select.data_budget={pool.budget}",
            "method.params=dualsft",
            *extra,
        ],
    )


class Cell:
    """One pool and seed: selections by the package, trainings, and the results so far."""

    def __init__(self, name: str, seed: int, args: argparse.Namespace) -> None:
        self.args, self.seed, self.name = args, seed, name
        self.pool = make_pool(name, seed, args.rows, args.data, args.work / f"{name}_{seed}")
        self.path = args.out / f"{name}_{seed}.json"
        self.found: dict[str, Any] = {"pool": name, "seed": seed, "model": args.model}
        self.found |= {"rows": args.rows, "budget": self.pool.budget, "selected": {}, "trained": {}}
        if self.path.is_file():
            self.found = json.loads(self.path.read_text())
        self.run = self.pool.folder / "run"

    def config(self, extra: Sequence[str] = ()) -> Config:
        return settings_of(self.pool, self.seed, self.args.model, (*extra, *self.args.set))

    def run_until_selection(self, extra: Sequence[str]) -> None:
        config = self.config(extra)
        dualsft.run(config, out=str(self.run), until="selection", reporter=silent())

    def save(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1))
        part.replace(self.path)

    def select(self, arm: str) -> None:
        """Let the package select with this arm's scores; keep the rows and what they are."""
        if arm in self.found["selected"]:
            return
        start = time.perf_counter()
        self.run_until_selection(SELECTORS.get(arm, ()))
        if arm in DRAWN:
            rows = self.draw_above(DRAWN[arm])
        else:
            ids = json.loads((self.run / "5_selection" / "ids.json").read_text())
            at = {e.id: e.index for role in self.context().roles().values() for e in role}
            rows = [at[one] for one in ids]
        facts = {"rows": rows, "seconds": round(time.perf_counter() - start, 1)}
        facts |= self.describe(rows)
        summary = json.loads((self.run / "4_scores" / "summary.json").read_text())
        facts |= {"rho": summary.get("rho")}
        self.found["selected"][arm] = facts
        self.save()

    def draw_above(self, quantile: float) -> list[int]:
        """Rows drawn at random from those that score at least as high as this quantile of the
        validation rows, without near-copies; the best of the others if they are too few."""
        folder = run_path(self.run / "4_scores")
        quantiles, scores = (
            (folder / "examples.parquet").read_table([name])[name].to_numpy()
            for name in ("val_quantile", "score")
        )
        pool = self.context().roles()["pool"]
        index = np.array([e.index for e in pool])
        key = np.random.default_rng([self.seed, 77]).random(len(pool))
        key = np.where(quantiles >= quantile, key, scores - scores.max() - 1)
        key[repeated_texts("near", pool, key, index)] = -np.inf
        return sorted(index[np.argsort(-key)[: self.pool.budget]].tolist())

    def mask(self, name: str) -> dict[str, torch.Tensor]:
        """The entries that the package selects with the settings of this mask."""
        path = self.pool.folder / f"mask_{name}.pt"
        if not path.is_file():
            self.run_until_selection(MASKS[name])
            torch.save(read_mask(run_path(self.run / "5_selection")), path)
        return torch.load(path, weights_only=True)

    def describe(self, rows: Sequence[int]) -> dict[str, Any]:
        pool = self.pool
        origins = Counter(pool.rows[i].origin for i in rows if pool.rows[i].origin >= 0)
        return {
            "off_target": 1 - sum(map(pool.is_target, rows)) / len(rows),
            "copies": sum(count - 1 for count in origins.values()) / len(rows),
        }

    def context(self) -> RunContext:
        return RunContext(self.config(), RunDir(str(self.run)), silent())

    def draws(self, only_target: bool) -> Iterator[list[int]]:
        """Random rows of the examples that the package selects from."""
        split = self.context().roles()
        eligible = [e.index for e in split["pool"]]
        if only_target:
            eligible = [i for i in eligible if self.pool.is_target(i)]
            seen: set[int] = set()  # of copies the first
            eligible = [
                i
                for i in eligible
                if (origin := self.pool.rows[i].origin) < 0
                or (origin not in seen and not seen.add(origin))
            ]
        for draw in range(self.args.draws):
            rng = np.random.default_rng([self.seed, draw, only_target])
            yield sorted(rng.permutation(eligible)[: self.pool.budget].tolist())

    def train_all(self) -> None:
        """Train every mask on the rows of every arm and every draw, each at its best rate."""
        masks = {name: self.mask(name) for name in self.args.masks}
        trainer = Trainer(self)
        for name, trainer.mask in masks.items():
            suffix = "" if name == "own" else f"@{name}"
            for arm in self.args.arms:
                self.tuned(trainer, arm + suffix, self.found["selected"][arm]["rows"])
            for reference, only_target in (("random", False), ("target", True)):
                if only_target and self.name not in MIXED:
                    continue
                rate = None
                for i, rows in enumerate(self.draws(only_target)):
                    rate = self.tuned(trainer, f"{reference}{i}{suffix}", rows, rate)
        for arm, mask in self.args.pairs:
            trainer.mask = self.mask(mask)
            first = next(self.draws(False)) if arm == "random" else None
            rows = first or self.found["selected"][arm]["rows"]
            self.tuned(trainer, f"{'random0' if first else arm}@{mask}", rows)

    def tuned(
        self, trainer: Trainer, arm: str, rows: list[int], rate: float | None = None
    ) -> float:
        """Train at each rate (or the given one); returns the best on the rows held apart."""
        results = self.found["trained"].setdefault(arm, {})
        for lr in self.args.rates if rate is None else (rate,):
            if f"{lr:g}" not in results:
                results[f"{lr:g}"] = trainer.train(rows, lr) | self.describe(rows)
                self.save()
        return min(map(float, results), key=lambda lr: results[f"{lr:g}"]["tune"])


class Trainer:
    """θ_old in memory, trained and restored again and again."""

    def __init__(self, cell: Cell) -> None:
        self.ctx = ctx = cell.context()
        self.model, self.base = ctx.theta_old(), ctx.theta_old()
        self.mask: dict[str, torch.Tensor] = {}
        roles = ctx.roles()
        self.examples = {e.index: e for role in ("pool", "warm") for e in roles[role]}
        files = {p.stem: str(p) for p in sorted(cell.pool.folder.glob("*.jsonl"))}
        wanted = [name for name in files if name not in ("pool", "val", "anchors")]
        self.sets = {name: load_examples(ctx, files[name])[0] for name in wanted}

    def train(self, rows: Sequence[int], lr: float) -> dict[str, float]:
        """Losses after training the mask on these rows at this rate."""
        start = time.perf_counter()
        self.fit(rows, lr)
        return self.judge() | {"seconds": round(time.perf_counter() - start, 1)}

    def judge(self) -> dict[str, float]:
        """Losses of the model as it is, and KL to the base on rows of other behaviour."""
        found: dict[str, float] = {}
        for name, examples in self.sets.items():
            if name in ("test", "tune"):
                found[name] = self.loss(examples)
            else:
                found[name], found[f"{name}_kl"] = self.against_base(examples)
        return found

    def fit(self, rows: Sequence[int], lr: float, epochs: int | None = None) -> None:
        """Train the mask on these rows, from θ_old."""
        self.restore()
        self.optimize(self.mask, rows, lr, epochs)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the model to θ_old."""
        for parameter, original in zip(
            self.model.parameters(), self.base.parameters(), strict=True
        ):
            parameter.copy_(original)

    def optimize(
        self,
        mask: dict[str, torch.Tensor] | None,
        rows: Sequence[int],
        lr: float,
        epochs: int | None = None,
        hooks: Hooks = Hooks(),  # noqa: B008
        named: list[tuple[str, torch.nn.Parameter]] | None = None,
    ) -> None:
        """Train the model as it is on these rows; without a mask all of its parameters."""
        plan = replace(finetune_plan(self.ctx, len(rows)), lr=lr)
        plan = replace(plan, epochs=epochs or plan.epochs)
        settings = {"lr": lr, "weight_decay": 0.0, "moments": "float32", "seed": 0}
        named = named or text_parameters(self.model)
        with make_optimizer(self.model, named, mask, **settings) as optimizer:
            chosen = [self.examples[i] for i in rows]
            train(self.model, chosen, optimizer, plan, silent(), "training", hooks=hooks)

    def batches(self, examples: Sequence[Example]) -> Iterator[Batch]:
        for rows in make_batches(examples, self.ctx.batch_tokens):
            yield collate([examples[i] for i in rows], self.ctx.pad_id, "right", self.ctx.device)

    @torch.no_grad()
    def loss(self, examples: Sequence[Example]) -> float:
        losses = [example_objective(self.model, batch)[1] for batch in self.batches(examples)]
        return float(torch.cat(losses).double().mean())

    @torch.no_grad()
    def against_base(self, examples: Sequence[Example]) -> tuple[float, float]:
        """(mean loss, mean KL to the base)."""
        found = [comparison(self.base, self.model, batch) for batch in self.batches(examples)]
        losses, kls = (
            torch.cat([getattr(one, name) for one in found]).double().mean()
            for name in ("loss_after", "divergence")
        )
        return float(losses), float(kls)


def silent() -> Reporter:
    return Reporter(lambda _: None)


def options(module: str, text: str | None) -> argparse.ArgumentParser:
    """The options that say which cells, from what, into which folder."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=text)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, required=True, help="folder of the gzip JSONL files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of pools and runs; default: OUT/work")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rows", type=int, default=3000, help="rows of a pool")
    parser.add_argument("--share", default="1/1", help="this process's part of the cells")
    parser.add_argument("--set", nargs="*", default=[], help="key=value of every run")
    return parser


def cells_of(args: argparse.Namespace) -> Iterator[Cell]:
    """This process's cells, one after the other."""
    args.work = args.work or args.out / "work"
    args.out.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, args.share.split("/"))
    cells = [(pool, int(s)) for s in args.seeds.split(",") for pool in args.pools.split(",")]
    for name, seed in cells[part - 1 :: parts]:
        yield Cell(name, seed, args)


def main() -> None:
    parser = options("pools", __doc__)
    parser.add_argument("--arms", default="recommended,literal,cosine,top_loss")
    parser.add_argument("--masks", default="own", help=f"of {', '.join(MASKS)}")
    parser.add_argument("--pairs", default="", help="ARM:MASK,...; arm `random` is the first draw")
    parser.add_argument("--rates", default="1e-4,3e-4,7e-4")
    parser.add_argument("--draws", type=int, default=8)
    args = parser.parse_args()
    args.arms, args.masks = args.arms.split(","), args.masks.split(",")
    args.pairs = [tuple(pair.split(":")) for pair in args.pairs.split(",") if pair]
    args.rates = [float(rate) for rate in args.rates.split(",")]
    paired = [arm for arm, _ in args.pairs if arm not in ("random", *args.arms)]
    for cell in cells_of(args):
        for arm in [*paired, *args.arms]:
            cell.select(arm)
        cell.train_all()
        last = args.arms[-1]
        share = cell.found["selected"][last]["off_target"]
        print(cell.name, cell.seed, last, f"off target {share:.1%}", flush=True)


if __name__ == "__main__":
    main()
