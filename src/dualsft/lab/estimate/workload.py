"""The rows of a run in numbers: how many in each role, how long, in how many batches.

`dualsft estimate` counts all rows and tokenises a sample of them, the longest texts included, so
that the longest example and the length of the others are known without the hours that tokenising a
large corpus may take. It stands for the split, before Algorithm 1 begins; nothing is written.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualsft.algorithm.split import Split, divide
from dualsft.data.examples import Example, read_rows, tokenize
from dualsft.data.rows import Row
from dualsft.runs.context import RunContext

SAMPLE = 1_000
"""Rows that are tokenised, spread over the corpus; all when there are no more."""
LONGEST = 50
"""Rows of the most bytes, tokenised besides."""
BYTES_A_TOKEN = 80
"""Host memory of a tokenised row: an id and a label, each an int object in a list."""


@dataclass(frozen=True)
class Lengths:
    """How long the examples of some role are, as far as they were tokenised."""

    sample: np.ndarray
    """Tokens, increasing."""
    longest: int
    """The most tokens that one of them may have."""

    def spread(self, count: int) -> np.ndarray:
        """Lengths of `count` of these examples, the longest first; exact when all are known."""
        if count == len(self.sample):
            return self.sample[::-1]
        at = (np.arange(count)[::-1] + 0.5) / max(count, 1)
        return np.quantile(self.sample, at, method="nearest")

    def mean(self) -> float:
        return float(self.sample.mean())

    def batches(self, count: int, batch_tokens: int) -> tuple[int, int]:
        """(batches, padded tokens) of `count` examples, cut as `data.make_batches` cuts them."""
        return cut(self.spread(count), batch_tokens)

    def largest(self, count: int, batch_tokens: int) -> int:
        """Padded tokens of the largest batch of `count` examples; the longest may be among many."""
        sizes = cut_sizes(self.spread(count), batch_tokens)
        return max([*sizes, self.longest if count >= len(self.sample) else 0])


@dataclass(frozen=True)
class Workload:
    """Counts of the roles and the lengths they have."""

    counts: dict[str, int]
    lengths: Lengths
    """Of the whole corpus."""
    roles: dict[str, Lengths]
    """Of each role, where all rows were tokenised."""
    longest: Example
    typical: Example
    split_seconds: float
    num_bytes: int
    """Of the rows as text."""

    @property
    def num_full(self) -> int:
        return sum(self.counts.values())

    @property
    def num_tokens(self) -> int:
        return int(self.num_full * self.lengths.mean())

    @property
    def host_bytes(self) -> int:
        """The tokenised corpus in the memory of a stage."""
        return self.num_tokens * BYTES_A_TOKEN

    def of(self, role: str) -> Lengths:
        """The lengths of one role; those of the corpus where only a sample was tokenised."""
        return self.roles.get(role, self.lengths)


def cut(lengths: np.ndarray, batch_tokens: int) -> tuple[int, int]:
    """(batches, padded tokens) of examples of these lengths, the longest first."""
    sizes = cut_sizes(lengths, batch_tokens)
    return len(sizes), sum(sizes)


def cut_sizes(lengths: np.ndarray, batch_tokens: int) -> list[int]:
    """Padded tokens of every batch of examples of these lengths, the longest first."""
    sizes, start = [], 0
    while start < len(lengths):
        rows = min(max(1, batch_tokens // int(lengths[start])), len(lengths) - start)
        sizes.append(rows * int(lengths[start]))
        start += rows
    return sizes


def survey(ctx: RunContext) -> Workload:
    """Count the rows, tokenise some, and divide them as the split would."""
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
    whole = len(picked) == len(rows)  # then the split is the run's own, row by row
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
    """The lengths of every role all of whose examples are tokenised."""
    found: dict[str, list[int]] = defaultdict(list)
    for example, role in zip(examples, split.roles, strict=True):
        found[role].append(example.num_tokens)
    return {role: Lengths(np.sort(n), max(n)) for role, n in found.items() if min(n) > 0}


def _spread(rows: Sequence[Row]) -> list[Row]:
    if len(rows) <= SAMPLE:
        return list(rows)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, SAMPLE).astype(int)]


def _picked(rows: Sequence[Row]) -> list[Row]:
    """The sample and the rows of the most bytes, in the order of the source."""
    longest = sorted(rows, key=lambda row: len(row.raw))[-LONGEST:]
    return sorted({row.index: row for row in [*_spread(rows), *longest]}.values(), key=_index)


def _index(row: Row) -> int:
    return row.index


def _stubs(rows: Sequence[Row]) -> list[Example]:
    """Examples without tokens, told apart by their content: enough to be divided."""
    return [Example(row.id, row.index, [], [], key=row.id.rpartition("-")[0]) for row in rows]
