"""Split: D_full into val, anchor, warm and pool (Algorithm 1, its inputs and line 2).

D_train is what val and anchor leave; D_warm is a part of it and D_pool = D_train \\ D_warm
(ALGORITHM.md section 2, "Splits"). Budgets count against |D_full|, the usable rows of the corpus.

Who goes where is decided by hashing (seed, text), so it does not depend on the order of the file,
and examples with identical tokens move as one group: no text is in two roles.

Writes `split.parquet` (id, role, index), `tokens.parquet` (id, role, input_ids, labels) and
`summary.json` into the stage's folder, in source order; `read_split` reads them back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dualsft.data.examples import DataReport, Example, digest, read_rows, tokenize
from dualsft.errors import ConfigError, RunError
from dualsft.system.paths import RunPath

if TYPE_CHECKING:
    from dualsft.config.settings import SplitConfig
    from dualsft.runs.context import RunContext

TRUSTED = "val-"
"""What the ids of rows of data.val_path begin with: they are rows of another file."""

ROLES = ("val", "anchor", "warm", "pool")

LONG_ROWS = 20_000
"""Reading and tokenising fewer rows takes moments and shows no progress."""

_PAPER = {"val": (1024, Decimal("0.1")), "anchor": (2048, Decimal("0.2"))}
"""The paper's sizes, and the largest share of a small corpus that we let them take."""


@dataclass(frozen=True, slots=True)
class Split:
    """The role of every example, in the order of the examples, and what the user should know."""

    roles: list[str]
    counts: dict[str, int]
    notes: list[str]


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Read and tokenise the corpus, give every row its role, write both into `part`."""
    config = ctx.config
    examples, report = load_examples(ctx, config.data.path)
    trusted: list[Example] = []
    if config.data.val_path is not None:
        trusted, other = load_examples(ctx, config.data.val_path, "data.val_path")
        trusted = [replace(example, id=f"{TRUSTED}{example.id}") for example in trusted]
        for note in other.notes():
            ctx.reporter.warn(note)
    examples, split = divide(examples, trusted, config.seed, config.split)
    for note in [*report.notes(), *split.notes]:
        ctx.reporter.warn(note)
    write_split(part, examples, split, report)
    _check_vocabulary(ctx, examples)
    shares = ", ".join(f"{role} {count:,}" for role, count in split.counts.items())
    ctx.reporter.say(f"{len(examples):,} examples: {shares}")
    return {"counts": split.counts}


def _check_vocabulary(ctx: RunContext, examples: Sequence[Example]) -> None:
    """A token that the model has no embedding for would fail later, without a name."""
    width = getattr(ctx.model_config, "vocab_size", None)
    for example in examples:
        if width is not None and max(example.input_ids) >= width:
            raise ConfigError(
                f"model.path: row {example.index + 1} has token {max(example.input_ids)}, but the "
                f"model's vocabulary has {width}; the tokenizer is not this model's, or its added "
                "tokens were never given embeddings (resize_token_embeddings)"
            )


def load_examples(
    ctx: RunContext, path: str, key: str = "data.path"
) -> tuple[list[Example], DataReport]:
    """A source of rows as tokenised examples, under the run's template and limits.

    `key` is the setting that named it.
    """
    with ctx.reporter.track(f"reading {key}", 100, "% of the bytes") as reading:

        def read(share: float, num_rows: int) -> None:
            if num_rows >= LONG_ROWS:
                reading.advance(int(100 * share) - reading.done)

        rows, report = read_rows(ctx.data_path(path), ctx.config.data, key=key, progress=read)
    if len(report.files) > 1:
        ctx.reporter.say(f"{key}: {len(report.files)} files: {', '.join(report.files)}")
    with ctx.reporter.track(f"tokenising {key}", len(rows), "rows") as tokenising:
        return tokenize(
            rows,
            ctx.tokenizer,
            ctx.config.data,
            report,
            max_positions=ctx.max_positions,
            model_type=ctx.model_type,
            progress=tokenising.advance if len(rows) >= LONG_ROWS else None,
        )


def resolve_budget(budget: int | float, total: int, name: str = "budget") -> int:
    """A budget as a count: an int is one, a float is a fraction of `total`, rounded down, >= 1.

    `name` is the configuration key that an error names.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ConfigError(f"{name}: {budget!r} is not a number; use a count or a fraction")
    if isinstance(budget, int):
        if budget < 0:
            raise ConfigError(f"{name}: {budget} is negative; use a count or a fraction in (0, 1]")
        return budget
    if not 0 < budget <= 1:
        raise ConfigError(
            f"{name}: {budget} is not in (0, 1]; write a fraction, or a count without a point"
        )
    return max(1, int(Decimal(repr(budget)) * total))  # decimal: 0.29 of 100 is 29, not 28


def divide(
    examples: Sequence[Example], trusted: Sequence[Example], seed: int, sizes: SplitConfig
) -> tuple[list[Example], Split]:
    """(all examples, the role of each): the corpus, and after it the trusted rows as D_val.

    Trusted rows count in |D_full|; a row of the corpus with the same text as one of them is left
    out, and that is said.
    """
    texts = {example.key for example in trusted}
    kept = [example for example in examples if example.key not in texts]
    split = assign_roles(kept, seed, sizes.val, sizes.anchor, sizes.warm, len(trusted))
    notes = list(split.notes)
    if len(kept) < len(examples):
        notes.append(
            f"{len(examples) - len(kept):,} rows of data.path have the text of a row of "
            "data.val_path and are left out"
        )
    counts = split.counts | {"val": split.counts["val"] + len(trusted)}
    return [*kept, *trusted], Split([*split.roles, *["val"] * len(trusted)], counts, notes)


def assign_roles(
    examples: Sequence[Example],
    seed: int,
    val: int | float | None = None,
    anchor: int | float | None = None,
    warm: int | float = 0.05,
    num_trusted: int = 0,
) -> Split:
    """Give every example its role; None means the paper's size, less for a small corpus.

    `num_trusted` rows outside the corpus are D_val already, and count in |D_full|.
    """
    total, notes = len(examples) + num_trusted, []
    wanted: dict[str, int] = {}
    for role, budget in (("val", val), ("anchor", anchor), ("warm", warm)):
        if role == "val" and num_trusted:
            wanted[role] = 0
        elif budget is None:
            wanted[role] = _default_count(role, total, notes)
        else:
            wanted[role] = resolve_budget(budget, total, f"split.{role}")
    _check_counts(wanted, len(examples), num_trusted > 0)

    groups: dict[str, list[int]] = defaultdict(list)
    for i, example in enumerate(examples):
        groups[example.key].append(i)
    order = sorted(groups, key=lambda key: digest(seed, key))
    roles = ["pool"] * len(examples)
    for role, count in wanted.items():
        left, passed_over = count, []
        for key in order:
            if len(groups[key]) > left:
                passed_over.append(key)
                continue
            left -= len(groups[key])
            for i in groups[key]:
                roles[i] = role
        order = passed_over
        if left:
            notes.append(
                f"split.{role}: {count - left:,} of {count:,} examples, because identical texts "
                "stay together and no group of them fits the rest"
            )
    counts = {role: roles.count(role) for role in ROLES}
    _check_filled(counts, wanted, len(groups))
    return Split(roles, counts, notes)


def _default_count(role: str, total: int, notes: list[str]) -> int:
    paper, share = _PAPER[role]
    count = min(paper, max(1, int(share * total)))
    if count < paper:
        notes.append(
            f"split.{role}: {count:,} examples instead of the paper's {paper:,}: at most "
            f"{share:.0%} of the {total:,} usable rows"
        )
    return count


def _check_counts(wanted: dict[str, int], total: int, has_val: bool) -> None:
    asked = ", ".join(f"split.{role}={count:,}" for role, count in wanted.items())
    if wanted["val"] == 0 and not has_val:
        raise ConfigError("split.val: 0 leaves nothing to take v_new from; use 1 or more")
    if sum(wanted.values()) >= total:
        raise ConfigError(
            f"{asked}: together {sum(wanted.values()):,} of {total:,} usable rows, which leaves no "
            "pool to select from; lower split.val, split.anchor or split.warm, or bring more data"
        )


def _check_filled(counts: dict[str, int], wanted: dict[str, int], num_texts: int) -> None:
    empty = [
        f"split.{role}={wanted[role]:,}" for role in wanted if wanted[role] > counts[role] == 0
    ]
    if empty:
        got = ", ".join(f"{role} {count:,}" for role, count in counts.items())
        raise ConfigError(
            f"{', '.join(empty)} cannot be filled ({got}): the {sum(counts.values()):,} usable "
            f"rows hold only {num_texts:,} different texts, and identical ones stay together; "
            "change split.val, split.anchor or split.warm, or bring more varied data"
        )
    assert counts["pool"], "no role may hold more than was asked for"


def _place(example: Example) -> tuple[bool, int]:
    """Rows of the corpus in their order, then those of data.val_path."""
    return example.id.startswith(TRUSTED), example.index


def write_split(
    folder: RunPath, examples: Sequence[Example], split: Split, report: DataReport | None = None
) -> None:
    """Write the split and its tokens in source order, and the summary."""
    assert len(examples) == len(split.roles)
    order = sorted(range(len(examples)), key=lambda i: _place(examples[i]))
    rows = [examples[i] for i in order]
    shared = {"id": [row.id for row in rows], "role": [split.roles[i] for i in order]}
    index = pa.array([row.index for row in rows], pa.int64())
    tokens = pa.list_(pa.int32())
    input_ids = pa.array([row.input_ids for row in rows], tokens)
    labels = pa.array([row.labels for row in rows], tokens)
    for name, columns in (
        ("split.parquet", {**shared, "index": index}),
        ("tokens.parquet", {**shared, "input_ids": input_ids, "labels": labels}),
    ):
        (folder / name).write_table(pa.table(columns), compression="zstd")
    (folder / "summary.json").write_json(_summary(rows, split, report), ensure_ascii=False)


def _summary(rows: list[Example], split: Split, report: DataReport | None) -> dict[str, Any]:
    return {
        "num_examples": len(rows),
        "num_texts": len({row.key for row in rows}),
        "num_tokens": sum(row.num_tokens for row in rows),
        "num_response_tokens": sum(row.num_response_tokens for row in rows),
        "counts": split.counts,
        "fractions": {role: count / len(rows) for role, count in split.counts.items()},
        "notes": split.notes,
        "data": report.numbers() if report else None,
        "bad": report.bad if report else [],
    }


def read_split(folder: RunPath) -> dict[str, list[Example]]:
    """The examples of every role, in source order."""
    index = (folder / "split.parquet").read_table(["id", "role", "index"])
    tokens = (folder / "tokens.parquet").read_table()
    if not index.select(["id", "role"]).equals(tokens.select(["id", "role"])):
        raise RunError(f"{folder}: split.parquet and tokens.parquet are not of one split; redo it")
    by_role: dict[str, list[Example]] = {role: [] for role in ROLES}
    for row_id, role, row_index, input_ids, labels in zip(
        index["id"].to_pylist(),
        index["role"].to_pylist(),
        index["index"].to_pylist(),
        _lists(tokens["input_ids"]),
        _lists(tokens["labels"]),
        strict=True,
    ):
        by_role[role].append(Example(row_id, row_index, input_ids, labels))
    return by_role


def _lists(column: pa.ChunkedArray) -> list[list[int]]:
    """Python lists of a list column, through numpy: to_pylist is an order of magnitude slower."""
    result: list[list[int]] = []
    for chunk in column.chunks:
        offsets, values = chunk.offsets.to_numpy(), chunk.values.to_numpy()
        bounds = zip(offsets[:-1], offsets[1:], strict=True)
        result += [values[start:end].tolist() for start, end in bounds]
    return result
