"""Do sketches of the last blocks choose the same rows? Quality of cheaper calibrated scores.

    python -m benchmarks.sketch_layers --data DIR --out FILE.json [--pools noisy,code,clean]

Per pool: a short warmup on rows of the pool's own mixture, then one walk over D_val and the pool in
which the sketch of each group of blocks is kept apart. Sketches of groups add up, so every form
(`score.sketch_layers`) comes from the same gradients. The form `head` needs no backward pass
through the model: at each response token it takes the gradient of the loss with respect to the
normalised last hidden state, times that state. Reported per form: rows off target and wrong among
the chosen tenth, the AUC of the target rows, the overlap with the full form, and the estimated
share of the pool on target.

`--cost N` measures what the walks cost instead, on N rows of the first pool: seconds of the CPU
(process time with one thread, which other work on the machine does not change) relative to a plain
epoch, forward and backward with the gradient of every parameter, and the bytes that autograd keeps.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import dualsft
from benchmarks.measuring import machine, versions
from dualsft.algorithm.calibration import calibrate, sketch_with
from dualsft.config.fields import DataConfig
from dualsft.data.examples import Batch, Example, collate, make_batches, tokenize
from dualsft.data.rows import read_rows
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import example_objective
from dualsft.engine.sketch import Sketch, SketchRows
from dualsft.memory.placement import DevicePlacement
from dualsft.model.load import (
    find_candidates,
    load_model,
    load_tokenizer,
    locate,
    output_head,
)
from dualsft.model.resolve import resolve_model
from dualsft.storage.vectors import ParamVector

CPU = torch.device("cpu")
POOLS: dict[str, tuple[str, dict[str, int]]] = {
    "noisy": ("gsm8k", {"gsm8k": 90, "wrong": 60, "alpaca": 90, "arc": 90}),
    "code": ("code", {"code": 90, "wrong": 60, "gsm8k": 90, "alpaca": 90}),
    "clean": ("gsm8k", {"gsm8k": 330}),
}
"""Kind of the target rows, and rows of each kind. A wrong row is a target row with the answer of
another."""
NUM_VAL, NUM_WARM = 32, 16
DIM, SEED = 16_384, 42


def rows_of(data: Path, kind: str, longest: int) -> list[tuple[str, str]]:
    """Prompts and responses of a corpus, without long rows."""
    names = {
        "gsm8k": "gsm8k_train",
        "alpaca": "alpaca_5k",
        "arc": "arc_challenge_test",
        "code": "code_sft",
    }
    found = []
    with gzip.open(data / f"{names[kind]}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if kind == "arc":
                choices = zip(row["labels"], row["choices"], strict=True)
                prompt = "\n".join([row["question"], *(f"{x}. {text}" for x, text in choices)])
                response = f"{row['answerKey']}. {row['choices'][row['label']]}"
            else:
                prompt = row.get("question") or row.get("prompt") or row.get("instruction")
                prompt += "\n" + row["input"] if row.get("input") else ""
                response = row.get("answer") or row.get("response") or row.get("output")
            if response and len(prompt) + len(response) <= longest:
                found.append((prompt, response))
    return found


def make_pool(name: str, data: Path, folder: Path, longest: int) -> dict[str, list[str]]:
    """Write pool, warm and val rows of one pool; returns the kind of each row."""
    target, counts = POOLS[name]
    rng = random.Random(f"{name} {SEED}")
    corpora = {kind: rows_of(data, kind, longest) for kind in {*counts, target} - {"wrong"}}
    for rows in corpora.values():
        rng.shuffle(rows)

    def draw(kind: str, count: int) -> list[tuple[str, str, str]]:
        source = corpora[target if kind == "wrong" else kind]
        taken, source[:] = source[:count], source[count:]
        answers = [answer for _, answer in taken]
        answers = answers[1:] + answers[:1] if kind == "wrong" else answers
        return [(p, answer, kind) for (p, _), answer in zip(taken, answers, strict=True)]

    total = sum(counts.values())
    roles = {
        "val": draw(target, NUM_VAL),
        "warm": [r for kind, n in counts.items() for r in draw(kind, round(NUM_WARM * n / total))],
        "pool": [row for kind, count in counts.items() for row in draw(kind, count)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for role, rows in roles.items():
        rng.shuffle(rows)
        lines = [json.dumps({"prompt": p, "response": r}) + "\n" for p, r, _ in rows]
        (folder / f"{role}.jsonl").write_text("".join(lines))
    return {role: [kind for _, _, kind in rows] for role, rows in roles.items()}


def examples_of(path: Path, tokenizer: Any) -> list[Example]:
    config = DataConfig(path=str(path), max_length=1024)
    rows, report = read_rows(path, config)
    return tokenize(rows, tokenizer, config, report)[0]


class ByGroup(Sketch):
    """A sketch that also keeps the part of each group of blocks, and that of the head's inputs."""

    def __init__(self, dim: int, starts: Sequence[int]) -> None:
        super().__init__(dim, SEED, "calibrated")
        self.starts = starts
        """First block of each group, ascending; the first is 0."""
        self.parts = torch.empty(0)

    def begin(self, count: int) -> None:
        self.parts = torch.zeros(count, len(self.starts) + 1, self.dim)

    def of_tokens(self, name: str, right_BTq: Tensor, grad_BTO: Tensor) -> Tensor:
        part = super().of_tokens(name, right_BTq, grad_BTO)
        block = locate(name)[0]
        assert block is not None
        self.parts[:, int(np.searchsorted(self.starts, block, "right")) - 1] += part
        return part

    def of_head(self, hidden: Tensor, pulled: Tensor, example: Tensor) -> None:
        """Add Σ_t (Lᵀ ε_t)(Rᵀ h_t)ᵀ of a chunk of response tokens, ε the gradient of h."""
        left = pulled @ self.signs("head", "out", pulled)
        right = hidden @ self.signs("head", "in", hidden)
        for i in example.unique().tolist():
            own = example == i
            self.parts[i, -1] += (left[own].T @ right[own]).flatten() / self.dim**0.5


def sketched(
    model: PreTrainedModel, examples: Sequence[Example], sketch: ByGroup, batch_tokens: int
) -> Tensor:
    """Sketches of the examples per group of blocks, and of the head: [N, groups + 1, dim]."""
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    weight = output_head(model).weight.detach()
    found = torch.zeros(len(examples), len(sketch.starts) + 1, sketch.dim)
    start, done = time.perf_counter(), 0

    def observer(hidden: Tensor, gradient: Tensor, example: Tensor) -> None:
        sketch.of_head(hidden, gradient.to(weight.dtype) @ weight, example)

    with engine.tapped(sketch=sketch) as taps:
        for rows in make_batches(examples, batch_tokens):
            batch = collate([examples[i] for i in rows], 0, "right", model.device)
            taps.begin(len(rows))
            sketch.begin(len(rows))
            example_objective(model, batch, observer=observer)[0].backward()
            found[rows] = sketch.parts
            done += sum(examples[i].num_tokens for i in rows)
            rate = done / (time.perf_counter() - start)
            print(f"  {done:,} tokens, {rate:.0f} tok/s", flush=True)
    return found


def forms(num_blocks: int) -> dict[str, int]:
    """First sketched block of each form: all blocks, the last half, quarter, eighth, the last."""
    shares = {"full": 1.0, "half": 0.5, "quarter": 0.25, "eighth": 0.125}
    first = {name: num_blocks - max(1, int(share * num_blocks)) for name, share in shares.items()}
    return first | {"last block": num_blocks - 1}


def stored(rows: Tensor) -> SketchRows:
    found = SketchRows(len(rows), rows.shape[1])
    found.add(range(len(rows)), rows.double().numpy())
    return found


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Chance that a positive row scores above another."""
    ranks = scores.argsort().argsort() + 1.0
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (~positive).sum()))


def judged(name: str, kinds: list[str], parts: dict[str, Tensor], first: dict[str, int]) -> Any:
    """Quality of each form on one pool."""
    starts = sorted(set(first.values()))
    target, kind = POOLS[name][0], np.array(kinds)
    budget, found, chosen = len(kinds) // 10, {}, {}
    for form in (*first, "head"):
        at = slice(starts.index(first[form]), -1) if form in first else slice(-1, None)
        rows = {role: stored(whole[:, at].sum(1)) for role, whole in parts.items()}
        one = calibrate(rows["pool"], rows["val"], SEED, CPU)
        best = np.argsort(-one.scores, kind="stable")[:budget]
        chosen[form] = set(best.tolist())
        both = len(chosen[form] & chosen["full"])
        share = one.target_share
        found[form] = {
            "first_block": first.get(form),
            "off_target": float(np.mean([k not in (target, "wrong") for k in kind[best]])),
            "wrong": float(np.mean(kind[best] == "wrong")),
            "kinds": dict(Counter(kind[best].tolist())),
            "auc": auc(one.scores, kind == target) if (kind != target).any() else None,
            "overlap_with_full": both / budget,
            "rho": one.rho,
            "target_share": share and share[0],
        }
    return {"rows": len(kinds), "budget": budget, "target": target, "forms": found}


@contextmanager
def plain(engine: GhostEngine) -> Iterator[Callable[[Batch], None]]:
    """Forward with labels and backward into .grad, as in training without the optimizer."""
    model = engine.model.requires_grad_(True)

    def call(batch: Batch) -> None:
        model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
        ).loss.backward()

    yield call
    model.zero_grad(set_to_none=True)


@contextmanager
def forward(engine: GhostEngine) -> Iterator[Callable[[Batch], None]]:
    with torch.no_grad():
        yield lambda batch: (example_objective(engine.model, batch), None)[1]


@contextmanager
def walking(engine: GhostEngine, **given: Any) -> Iterator[Callable[[Batch], None]]:
    with engine.tapped(**given) as taps:

        def call(batch: Batch) -> None:
            taps.begin(len(batch.input_ids))
            example_objective(engine.model, batch)[0].backward()

        yield call


def costs(model: PreTrainedModel, rows: Sequence[Example], batch_tokens: int) -> dict[str, Any]:
    """CPU seconds of each walk, relative to the plain epoch (the best of two rounds), and the bytes
    that its graph keeps of the largest batch."""
    batches = [collate([rows[i] for i in some], 0) for some in make_batches(rows, batch_tokens)]
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    contenders: dict[str, Callable[[], AbstractContextManager[Callable[[Batch], None]]]] = {
        "plain epoch": partial(plain, engine),
        "forward": partial(forward, engine),
    }
    layers: dict[str, int | float] = {"full": 1.0, "half": 0.5, "quarter": 0.25, "eighth": 0.125}
    for name, part in (layers | {"last block": 1}).items():
        sketch = sketch_with(engine, DIM, SEED, "block_linear", part)
        only = engine.observed_for(sketch)
        contenders[name] = partial(walking, engine, sketch=sketch, only=only)
    sums = DevicePlacement(ParamVector.zeros(engine.candidates))
    whole = sketch_with(engine, DIM, SEED, "block_linear")
    contenders["full, with G"] = partial(walking, engine, placement=sums, sketch=whole)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    kept: dict[str, int] = {}
    for turn in range(3):  # the first draws the signs and is not timed
        for name, contender in contenders.items():
            with contender() as call:
                before = time.process_time()
                if turn == 0:
                    kept[name] = kept_bytes(model, partial(call, batches[0]))
                else:
                    for batch in batches:
                        call(batch)
                    seconds[name].append(time.process_time() - before)
            print(f"  {name}: {time.process_time() - before:.1f} s", flush=True)
    best = {name: min(found) for name, found in seconds.items()}
    return {
        "rows": len(rows),
        "tokens": sum(e.num_tokens for e in rows),
        "batch_tokens": batch_tokens,
        "cpu_seconds": seconds,
        "time_over_plain_epoch": {n: s / best["plain epoch"] for n, s in best.items()},
        "kept_bytes": kept,
    }


def kept_bytes(model: PreTrainedModel, call: Callable[[], None]) -> int:
    """Bytes that autograd keeps for the backward pass of a call, without the weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address repeats
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    found = {at: t.untyped_storage().nbytes() for at, t in saved.items() if at not in own}
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sketch_layers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, required=True, help="folder of the gzip JSONL files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--work", type=Path, default=Path("runs/sketch_layers"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--longest", type=int, default=600, help="characters of a row")
    parser.add_argument("--warm-steps", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--cost", type=int, help="measure the cost on so many rows")
    args = parser.parse_args()
    folder = resolve_model(args.model)
    tokenizer = load_tokenizer(folder)
    record: dict[str, Any] = {
        "model": args.model,
        "dtype": "float32",
        "sketch_dim": DIM,
        "warmup": {"steps": args.warm_steps, "rows": NUM_WARM, "batch": 8, "lr": 1e-4},
        "longest": args.longest,
        "machine": machine(CPU),
        "versions": versions(),
        "pools": {},
    }
    for name in args.pools.split(","):
        print(name, flush=True)
        kinds = make_pool(name, args.data, args.work / name, args.longest)
        rows = {role: examples_of(args.work / name / f"{role}.jsonl", tokenizer) for role in kinds}
        if args.cost:
            model = load_model(folder, torch.float32, CPU)
            record["cost"] = costs(model, rows["pool"][: args.cost], args.batch_tokens)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            return
        kept = args.work / name / "sketches.safetensors"
        first = forms(num_blocks(folder))
        if not kept.is_file():
            model = load_model(folder, torch.float32, CPU)
            if args.warm_steps:
                dualsft.warmup(
                    model, rows["warm"], lr=1e-4, batch_size=8, min_steps=args.warm_steps
                )
            sketch = ByGroup(DIM, sorted(set(first.values())))
            parts = {
                role: sketched(model, rows[role], sketch, args.batch_tokens)
                for role in ("val", "pool")
            }
            save_file(parts, kept)
        parts = load_file(kept)
        record["pools"][name] = judged(name, kinds["pool"], parts, first)
        tokens = sum(e.num_tokens for e in rows["pool"])
        record["pools"][name] |= {"tokens": tokens, "rows_by_kind": POOLS[name][1]}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record["pools"][name]["forms"], indent=1), flush=True)


def num_blocks(folder: Path) -> int:
    """Number of blocks of a model."""
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


if __name__ == "__main__":
    main()
