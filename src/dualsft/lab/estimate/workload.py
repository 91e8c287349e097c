"""Sizes of a corpus: the number of rows per role, their lengths and their batches.

`dualsft estimate` counts all rows and tokenises a sample that includes the longest texts. This
gives the longest example and the distribution of lengths without tokenising a large corpus, which
may take hours. Replaces the split stage (inputs and line 2 of Algorithm 1). Writes nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualsft.algorithm.split import Split, divide
from dualsft.data.examples import Example, tokenize
from dualsft.data.rows import Row, read_rows
from dualsft.runs.context import RunContext

SAMPLE = 1_000
"""Number of rows to tokenise, evenly spaced. A smaller corpus is tokenised whole."""
LONGEST = 50
"""Number of longest rows, by bytes, to tokenise in addition."""
BYTES_A_TOKEN = 80
"""Host memory per token of a tokenised row: an id and a label, each an int object in a list."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the tokenised examples of a role, or of the corpus."""

    sample: np.ndarray
    """Tokens per example, sorted ascending."""
    longest: int
    """Tokens of the longest example."""

    def spread(self, count: int) -> np.ndarray:
        """Lengths of `count` examples, in descending order.

        Exact if the sample has `count` examples, otherwise quantiles of the sample.
        """
        if count == len(self.sample):
            return self.sample[::-1]
        at = (np.arange(count)[::-1] + 0.5) / max(count, 1)
        return np.quantile(self.sample, at, method="nearest")

    def mean(self) -> float:
        return float(self.sample.mean())

    def batches(self, count: int, batch_tokens: int) -> tuple[int, int]:
        """(batches, padded tokens) of `count` examples, batched as by `data.make_batches`."""
        return cut(self.spread(count), batch_tokens)

    def largest(self, count: int, batch_tokens: int) -> int:
        """Padded tokens of the largest batch of `count` examples.

        At least one longest example is assumed if `count` is no smaller than the sample.
        """
        sizes = cut_sizes(self.spread(count), batch_tokens)
        return max([*sizes, self.longest if count >= len(self.sample) else 0])


@dataclass(frozen=True)
class Workload:
    """Number and lengths of the examples per role."""

    counts: dict[str, int]
    lengths: Lengths
    """Lengths in the whole corpus."""
    roles: dict[str, Lengths]
    """Lengths per role, if all rows were tokenised."""
    longest: Example
    typical: Example
    split_seconds: float
    num_bytes: int
    """Bytes of the rows as text."""

    @property
    def num_full(self) -> int:
        return sum(self.counts.values())

    @property
    def num_tokens(self) -> int:
        return int(self.num_full * self.lengths.mean())

    @property
    def host_bytes(self) -> int:
        """Host memory of the tokenised corpus."""
        return self.num_tokens * BYTES_A_TOKEN

    def of(self, role: str) -> Lengths:
        """Lengths of one role, or of the whole corpus if only a sample was tokenised."""
        return self.roles.get(role, self.lengths)


def cut(lengths: np.ndarray, batch_tokens: int) -> tuple[int, int]:
    """(batches, padded tokens) of examples with these lengths, given in descending order."""
    sizes = cut_sizes(lengths, batch_tokens)
    return len(sizes), sum(sizes)


def cut_sizes(lengths: np.ndarray, batch_tokens: int) -> list[int]:
    """Padded tokens per batch of examples with these lengths, given in descending order."""
    sizes, start = [], 0
    while start < len(lengths):
        rows = min(max(1, batch_tokens // int(lengths[start])), len(lengths) - start)
        sizes.append(rows * int(lengths[start]))
        start += rows
    return sizes


def survey(ctx: RunContext) -> Workload:
    """Count the rows, tokenise a sample, and assign roles as the split stage does."""
    data, started = ctx.config.data, time.perf_counter()
    rows, _ = read_rows(ctx.data_path(data.path), data)
    reading = time.perf_counter() - started
    picked = _picked(rows)
    started = time.perf_counter()
    examples, _ = tokenize(
        picked, ctx.tokenizer, data, max_positions=ctx.max_positions, model_type=ctx.model_type
    )
    tokenising = (time.perf_counter() - started) * len(rows) / len(picked)
    trusted: list[Row] = []
    if data.val_path is not None:
        trusted, _ = read_rows(ctx.data_path(data.val_path), data, key="data.val_path")
    whole = len(picked) == len(rows)  # then the split is exactly that of the run
    corpus = examples if whole else _stubs(rows)
    divided, split = divide(corpus, _stubs(trusted), ctx.config.seed, ctx.config.split)
    spread = {row.id for row in _spread(rows)}
    ordered = sorted((e for e in examples if e.id in spread), key=lambda e: e.num_tokens)
    longest = max(examples, key=lambda e: e.num_tokens)
    return Workload(
        counts=split.counts,
        lengths=Lengths(np.array([e.num_tokens for e in ordered]), longest.num_tokens),
        roles=_by_role(divided, split) if whole else {},
        longest=longest,
        typical=ordered[len(ordered) // 2],
        split_seconds=reading + tokenising,
        num_bytes=sum(len(row.raw) for row in rows),
    )


def _by_role(examples: Sequence[Example], split: Split) -> dict[str, Lengths]:
    """Lengths of every role whose examples are all tokenised."""
    found: dict[str, list[int]] = defaultdict(list)
    for example, role in zip(examples, split.roles, strict=True):
        found[role].append(example.num_tokens)
    return {role: Lengths(np.sort(n), max(n)) for role, n in found.items() if min(n) > 0}


def _spread(rows: Sequence[Row]) -> list[Row]:
    if len(rows) <= SAMPLE:
        return list(rows)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, SAMPLE).astype(int)]


def _picked(rows: Sequence[Row]) -> list[Row]:
    """The sample and the longest rows by bytes, in source order."""
    longest = sorted(rows, key=lambda row: len(row.raw))[-LONGEST:]
    return sorted({row.index: row for row in [*_spread(rows), *longest]}.values(), key=_index)


def _index(row: Row) -> int:
    return row.index


def _stubs(rows: Sequence[Row]) -> list[Example]:
    """Examples without tokens. The split only needs their ids and content keys."""
    return [Example(row.id, row.index, [], [], key=row.id.rpartition("-")[0]) for row in rows]
