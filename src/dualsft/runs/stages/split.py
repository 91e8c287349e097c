"""Split: tokenise the corpus and assign roles (Algorithm 1, inputs and line 2).

The assignment is in `algorithm/split.py`. Writes `split.parquet` (id, role, index, and source where
the rows have one), `tokens.parquet` (id, role, input_ids, labels) and `summary.json`, in the order
of the files; `read_split` reads them back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dualsft.algorithm.split import ROLES, Split, divide
from dualsft.data.examples import IGNORE, Example, tokenize
from dualsft.data.rows import DataReport, read_rows, source_problem
from dualsft.data.sources import source_hash
from dualsft.errors import ConfigError
from dualsft.model.resolve import code_hash, tokenizer_hash
from dualsft.runs.preflight import reading
from dualsft.system.paths import RunPath, without_home

if TYPE_CHECKING:  # `context.py` imports `read_split`
    from dualsft.runs.context import RunContext, Settings

FOREIGN = {"data.val_path": "val-", "data.anchor_path": "anchor-"}
"""Prefix of the ids of rows from these sources, whose indices count from 0 again."""

LONG_ROWS = 20_000
"""With fewer rows, no progress is shown while reading and tokenising."""


def settings(ctx: RunContext) -> Settings:
    chosen = ctx.pick("seed", "split.*") | ctx.data_settings()
    del chosen["data.padding_side"]  # affects batches, not the split
    for key in ("data.path", *FOREIGN):
        if (path := chosen.pop(key)) is not None:
            chosen[f"rows of {key}"] = source_hash(ctx.data_path(path), ctx.config.data, key)
    if ctx.trusted:
        chosen["code of model.path"] = code_hash(ctx.model_folder)
    return chosen | {
        "tokenizer": tokenizer_hash(ctx.model_folder),
        "model type": ctx.model_type,
        "positions of the model": ctx.max_positions,
    }


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Read and tokenise the corpus, assign a role to every row, and write both to `part`."""
    config = ctx.config
    examples, report = load_examples(ctx, config.data.path)
    trusted = load_foreign(ctx, "data.val_path")
    anchors = load_foreign(ctx, "data.anchor_path")
    examples, split = divide(examples, trusted, config.seed, config.split, anchors)
    for note in report.notes():
        ctx.reporter.warn(note)
    for note in split.notes:
        ctx.reporter.warn(note, code="small_corpus")
    write_split(part, examples, split, report)
    check_vocabulary(ctx, examples)
    shares = ", ".join(f"{role} {count:,}" for role, count in split.counts.items())
    ctx.reporter.say(f"{len(examples):,} examples: {shares}")
    return {"counts": split.counts}


def check_vocabulary(ctx: RunContext, examples: Sequence[Example]) -> None:
    """Raise for token ids without an embedding; later errors would not name the row."""
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
    """Read and tokenise the data source that the setting `key` names."""
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


def load_foreign(ctx: RunContext, key: str) -> list[Example]:
    """The examples of data.val_path or data.anchor_path, with its notes; empty if it is null."""
    if (path := ctx.pick(key)[key]) is None:
        return []
    examples, report = load_examples(ctx, path, key)
    for note in report.notes():
        ctx.reporter.warn(note)
    return [replace(example, id=f"{FOREIGN[key]}{example.id}") for example in examples]


def write_split(
    folder: RunPath, examples: Sequence[Example], split: Split, report: DataReport | None = None
) -> None:
    """Write the split and its tokens, and the summary; rows of `FOREIGN` sources come last."""
    assert len(examples) == len(split.roles)
    prefixes = ["", *FOREIGN.values()]
    places = [
        (
            max(i for i, prefix in enumerate(prefixes) if example.id.startswith(prefix)),
            example.index,
        )
        for example in examples
    ]
    num_full = sum(not example.id.startswith(FOREIGN["data.anchor_path"]) for example in examples)
    order = sorted(range(len(examples)), key=lambda i: places[i])
    rows = [examples[i] for i in order]
    shared = {"id": [row.id for row in rows], "role": [split.roles[i] for i in order]}
    own: dict[str, Any] = {"index": pa.array([row.index for row in rows], pa.int64())}
    if any(row.source for row in rows):
        own["source"] = pa.array([row.source or None for row in rows], pa.string())
    tokens = pa.list_(pa.int32())
    input_ids = pa.array([row.input_ids for row in rows], tokens)
    labels = pa.array([row.labels for row in rows], tokens)
    for name, columns in (
        ("split.parquet", shared | own),
        ("tokens.parquet", {**shared, "input_ids": input_ids, "labels": labels}),
    ):
        (folder / name).write_table(pa.table(columns), compression="zstd")
    summary = {
        "num_examples": len(rows),
        "num_full": num_full,
        "num_texts": len({row.key for row in rows}),
        "num_tokens": sum(row.num_tokens for row in rows),
        "num_response_tokens": sum(row.num_response_tokens for row in rows),
        "counts": split.counts,
        "fractions": {role: count / num_full for role, count in split.counts.items()},
        "notes": split.notes,
        "data": report.numbers() if report else None,
        "bad": [without_home(text) for text in report.bad] if report else [],
    }
    (folder / "summary.json").write_json(summary, ensure_ascii=False)


def read_split(folder: RunPath, vocabulary: int | None = None) -> dict[str, list[Example]]:
    """The examples of every role, in source order; refuses token ids beyond the vocabulary."""
    with reading(folder):
        index = (folder / "split.parquet").read_table()
        tokens = (folder / "tokens.parquet").read_table()
        if not index.select(["id", "role"]).equals(tokens.select(["id", "role"])):
            raise ValueError("split.parquet and tokens.parquet are not of one split")
        by_role: dict[str, list[Example]] = {role: [] for role in ROLES}
        for row_id, role, row_index, source, input_ids, labels in zip(
            index["id"].to_pylist(),
            index["role"].to_pylist(),
            index["index"].to_pylist(),
            _sources(index),
            _lists(tokens["input_ids"], vocabulary),
            _lists(tokens["labels"], vocabulary, IGNORE),
            strict=True,
        ):
            if len(input_ids) != len(labels):
                raise ValueError(f"{row_id} has {len(input_ids)} ids but {len(labels)} labels")
            by_role[role].append(Example(row_id, row_index, input_ids, labels, source=source))
        return by_role


def _sources(index: pa.Table) -> list[str]:
    """The source of each row; empty where it has none (rows of data.val_path, a single file)."""
    if "source" not in index.column_names:
        return [""] * len(index)
    found = [name or "" for name in index["source"].cast(pa.string()).to_pylist()]
    for name in set(found):
        if problem := name and source_problem(name):
            raise ValueError(f"the source {name[:60]!r} {problem}")
    return found


def _lists(
    column: pa.ChunkedArray, vocabulary: int | None, ignored: int | None = None
) -> list[list[int]]:
    """Python lists of a list column, via numpy: to_pylist is an order of magnitude slower."""
    result: list[list[int]] = []
    for chunk in column.chunks:
        offsets, values = chunk.offsets.to_numpy(), chunk.values.to_numpy()
        used = values if ignored is None else values[values != ignored]
        if len(used) and not 0 <= used.min() <= used.max() < (vocabulary or math.inf):
            raise ValueError(f"a token outside the model's vocabulary of {vocabulary}")
        bounds = zip(offsets[:-1], offsets[1:], strict=True)
        result += [values[start:end].tolist() for start, end in bounds]
    return result
