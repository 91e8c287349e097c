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

from dualsft.algorithm.split import divide
from dualsft.data.examples import Example, tokenize
from dualsft.data.rows import Row, read_rows
from dualsft.runs.context import RunContext

SAMPLE = 1_000
"""Number of rows to tokenise, evenly spaced. A smaller corpus is tokenised whole."""
LONGEST = 50
"""Number of longest rows, by bytes, to tokenise in addition."""
BYTES_PER_TOKEN = 80
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

    def batches(self, count: int, batch_tokens: int) -> list[int]:
        """Padded tokens of each batch of `count` examples."""
        return batch_sizes(self.spread(count), batch_tokens)

    def largest(self, count: int, batch_tokens: int) -> int:
        """Padded tokens of the largest batch of `count` examples.

        At least one longest example is assumed if `count` is no smaller than the sample.
        """
        longest = self.longest if count >= len(self.sample) else 0
        return max([*self.batches(count, batch_tokens), longest])


def batch_sizes(lengths: np.ndarray, batch_tokens: int) -> list[int]:
    """Padded tokens of each batch of examples with these lengths, given in descending order; the
    batches are those of `data.make_batches`."""
    sizes, start = [], 0
    while start < len(lengths):
        rows = min(max(1, batch_tokens // int(lengths[start])), len(lengths) - start)
        sizes.append(rows * int(lengths[start]))
        start += rows
    return sizes


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
        return self.num_tokens * BYTES_PER_TOKEN

    def of(self, role: str) -> Lengths:
        """Lengths of one role, or of the whole corpus if only a sample was tokenised."""
        return self.roles.get(role, self.lengths)


def survey(ctx: RunContext) -> Workload:
    """Count the rows, tokenise a sample, and assign roles as the split stage does."""
    data, started = ctx.config.data, time.perf_counter()
    rows, _ = read_rows(ctx.data_path(data.path), data)
    reading = time.perf_counter() - started
    spaced = range(len(rows))
    if len(rows) > SAMPLE:
        spaced = np.linspace(0, len(rows) - 1, SAMPLE).astype(int)
    longest_rows = np.argsort([len(row.raw) for row in rows], kind="stable")[-LONGEST:]
    picked = sorted({*map(int, spaced), *map(int, longest_rows)})
    started = time.perf_counter()
    examples, _ = tokenize(
        [rows[i] for i in picked],
        ctx.tokenizer,
        data,
        max_positions=ctx.max_positions,
        model_type=ctx.model_type,
    )
    tokenising = (time.perf_counter() - started) * len(rows) / len(picked)
    trusted: list[Row] = []
    if data.val_path is not None:
        trusted, _ = read_rows(ctx.data_path(data.val_path), data, key="data.val_path")
    whole = len(picked) == len(rows)  # then the split is exactly that of the run
    corpus = examples if whole else _stubs(rows)
    divided, split = divide(corpus, _stubs(trusted), ctx.config.seed, ctx.config.split)
    by_role: dict[str, list[int]] = defaultdict(list)
    for example, role in zip(divided, split.roles, strict=True):
        by_role[role].append(example.num_tokens)
    sampled = {rows[i].id for i in spaced}
    ordered = sorted((e for e in examples if e.id in sampled), key=lambda e: e.num_tokens)
    longest = max(examples, key=lambda e: e.num_tokens)
    return Workload(
        counts=split.counts,
        lengths=Lengths(np.array([e.num_tokens for e in ordered]), longest.num_tokens),
        # stubs have no tokens, so a role that contains some has no lengths of its own
        roles={r: Lengths(np.sort(n), max(n)) for r, n in by_role.items() if min(n) > 0},
        longest=longest,
        typical=ordered[len(ordered) // 2],
        split_seconds=reading + tokenising,
        num_bytes=sum(len(row.raw) for row in rows),
    )


def _stubs(rows: Sequence[Row]) -> list[Example]:
    """Examples without tokens. The split only needs their ids and content keys."""
    return [Example(row.id, row.index, [], [], key=row.id.rpartition("-")[0]) for row in rows]
