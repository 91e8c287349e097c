"""Split: tokenise the corpus and assign roles (Algorithm 1, inputs and line 2).

The assignment is in `algorithm/split.py`. Writes `split.parquet` (id, role, index, and source where
the rows have one), `tokens.parquet` (id, role, input_ids, labels) and `summary.json`, in the order
of the files; `read_split` reads them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dualsft.algorithm.split import ROLES, Split, divide
from dualsft.data.examples import IGNORE, Example, tokenize
from dualsft.data.rows import DataReport, source_problem, stream_rows
from dualsft.data.sources import source_hash
from dualsft.data.tokens import TokenFile
from dualsft.errors import ConfigError
from dualsft.model.resolve import code_hash, tokenizer_hash
from dualsft.runs.preflight import reading
from dualsft.system.paths import RunPath, without_home

if TYPE_CHECKING:  # `context.py` imports `read_split`
    from dualsft.runs.context import RunContext, Settings

FOREIGN = {"data.val_path": "val-", "data.anchor_path": "anchor-"}
"""Prefix of the ids of rows from these sources, whose indices count from 0 again."""

ALL_BAD = "1_split/summary.json of a run lists them"
"""For `DataReport.notes` of data.path."""

LONG_ROWS = 20_000
"""With fewer rows, no progress is shown while reading and tokenising."""

WRITTEN_ROWS = 1_000
"""Rows of a row group of tokens.parquet."""


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
    for note in report.notes(ALL_BAD):
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
        largest = int(np.max(np.asarray(example.input_ids)))
        if width is not None and largest >= width:
            raise ConfigError(
                f"model.path: row {example.index + 1} has token {largest}, but the "
                f"model's vocabulary has {width}; the tokenizer is not this model's, or its added "
                "tokens were never given embeddings (resize_token_embeddings)"
            )


def load_examples(
    ctx: RunContext, path: str, key: str = "data.path"
) -> tuple[list[Example], DataReport]:
    """Read and tokenise the data source that the setting `key` names; the tokens are kept in a
    `TokenFile`, so that neither they nor the rows are all in memory."""
    report, file = DataReport(path=ctx.data_path(path)), TokenFile(ctx.rundir.path)
    with ctx.reporter.track(f"reading {key}", 100, "% of the bytes") as progress:
        share = 0.0

        def read(now: float, _: int) -> None:
            nonlocal share
            share = now

        def tokenised(_: int, num_tokens: int) -> None:
            if report.num_rows >= LONG_ROWS:
                progress.advance(int(100 * share) - progress.done, num_tokens)

        examples, report = tokenize(
            stream_rows(report, ctx.config.data, key=key, progress=read),
            ctx.tokenizer,
            ctx.config.data,
            report,
            max_positions=ctx.max_positions,
            model_type=ctx.model_type,
            file=file,
            progress=tokenised,
        )
        if report.num_rows >= LONG_ROWS:
            progress.advance(100 - progress.done)
    if len(report.files) > 1:
        ctx.reporter.say(f"{key}: {len(report.files)} files: {', '.join(report.files)}")
    return examples, report


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
    (folder / "split.parquet").write_table(pa.table(shared | own), compression="zstd")
    (folder / "tokens.parquet").write_batches(_token_tables(rows, shared), compression="zstd")
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


def _token_tables(rows: Sequence[Example], shared: Mapping[str, list[str]]) -> Iterator[pa.Table]:
    """The columns of tokens.parquet, `WRITTEN_ROWS` rows at a time."""
    for start in range(0, len(rows), WRITTEN_ROWS):
        part = slice(start, start + WRITTEN_ROWS)
        columns = {name: values[part] for name, values in shared.items()}
        for name in ("input_ids", "labels"):
            parts = [np.asarray(getattr(row, name), np.int32) for row in rows[part]]
            ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
            columns[name] = pa.ListArray.from_arrays(ends, np.concatenate(parts))
        yield pa.table(columns)


def read_split(folder: RunPath, vocabulary: int | None = None) -> dict[str, list[Example]]:
    """The examples of every role, in source order, with their tokens in a `TokenFile`; refuses
    token ids beyond the vocabulary."""
    with reading(folder):
        index = (folder / "split.parquet").read_table()
        by_role: dict[str, list[Example]] = {role: [] for role in ROLES}
        sources, done = _sources(index), 0
        file = TokenFile(RunPath(folder.root))
        for tokens in (folder / "tokens.parquet").read_batches(WRITTEN_ROWS):
            rows = index.slice(done, len(tokens))
            same = ["id", "role"]
            if not rows.select(same).equals(pa.Table.from_batches([tokens]).select(same)):
                raise ValueError(_TWO_SPLITS)
            for row_id, role, row_index, source, input_ids, labels in zip(
                rows["id"].to_pylist(),
                rows["role"].to_pylist(),
                rows["index"].to_pylist(),
                sources[done : done + len(tokens)],
                _lists(tokens["input_ids"], vocabulary),
                _lists(tokens["labels"], vocabulary, IGNORE),
                strict=True,
            ):
                if len(input_ids) != len(labels):
                    raise ValueError(f"{row_id} has {len(input_ids)} ids but {len(labels)} labels")
                example = Example(row_id, row_index, input_ids, labels, source=source)
                by_role[role].append(example.stored(file))
            done += len(tokens)
        if done != len(index):
            raise ValueError(_TWO_SPLITS)
        return by_role


_TWO_SPLITS = "split.parquet and tokens.parquet are not of one split"


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
    column: pa.ListArray, vocabulary: int | None, ignored: int | None = None
) -> list[np.ndarray]:
    """The lists of a column as arrays of numbers, all of them within the vocabulary."""
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    used = values if ignored is None else values[values != ignored]
    if len(used) and not 0 <= used.min() <= used.max() < (vocabulary or math.inf):
        raise ValueError(f"a token outside the model's vocabulary of {vocabulary}")
    return [values[start:end] for start, end in pairwise(offsets)]
