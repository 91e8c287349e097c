"""Read rows that are token ids already: `input_ids` with labels, or with masks of the response.

The same columns as in TRL and axolotl, from a file (`data/formats.py`) or in memory
(`data/examples.py`). Padding (`attention_mask` 0) is removed. Without labels, a token is trained on
where all given masks are 1, as in TRL. Raises ValueError, KeyError or TypeError for a row that is
something else.

A `TokenFile` keeps the tokens of a pool on disk: batches read their rows from it, so that memory
does not grow with the number of tokens. Not part of Algorithm 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedRandom
from itertools import compress, pairwise
from typing import Any, NamedTuple, overload

import numpy as np

from dualsft.system.paths import RunPath

IGNORE = -100
"""The label of a token outside the responses."""
MASKS = ("completion_mask", "assistant_masks")
"""Columns of TRL that mark the tokens of the responses with 1, instead of labels."""


class TokenRow(NamedTuple):
    """Token ids and labels of one row; `labels[t]` is predicted from position t - 1."""

    ids: list[int]
    labels: list[int]


def token_row(row: Mapping[str, Any]) -> TokenRow:
    """The ids and labels of one row."""
    masks = [name for name in MASKS if row.get(name) is not None]
    if row.get("labels") is None and not masks:
        raise KeyError("it has no labels")
    names = ["labels"] if row.get("labels") is not None else masks
    names += ["attention_mask"] if row.get("attention_mask") is not None else []
    columns = {name: whole_numbers(f"field {name!r}", row[name]) for name in ("input_ids", *names)}
    ids = columns.pop("input_ids")
    for name, values in columns.items():
        if len(values) != len(ids):
            raise ValueError(f"{len(ids)} input_ids and {len(values)} {name}")
        if name != "labels" and not set(values) <= {0, 1}:
            raise ValueError(f"field {name!r} has other values than 0 and 1")
    shown = columns.get("attention_mask", [1] * len(ids))
    if sum(a != b for a, b in pairwise([0, *shown, 0])) > 2:
        raise ValueError("field 'attention_mask' has zeros between its ones")
    positions = row.get("position_ids")
    lengths = row.get("seq_lengths")
    starts = 0 if positions is None else whole_numbers("field 'position_ids'", positions).count(0)
    if starts > 1 and all(shown) or lengths is not None and len(lengths) > 1:
        raise ValueError("it packs several examples; give one example per row")
    labels = columns.get("labels")
    if labels is None:
        marked = zip(*(columns[name] for name in masks), strict=True)
        labels = [token if all(m) else IGNORE for token, m in zip(ids, marked, strict=True)]
    return TokenRow(list(compress(ids, shown)), list(compress(labels, shown)))


def whole_numbers(what: str, values: Any) -> list[int]:
    """A list, array or tensor of whole numbers as a list; `what` is for messages."""
    found = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(f"{what} must be a list of whole numbers")
    if not all(isinstance(value, int) for value in found):
        raise TypeError(f"{what} must be whole numbers")
    return list(map(int, found))


# --- tokens on disk -----------------------------------------------------------------------------

HELD_BYTES = 16 << 20
"""Most bytes of a `TokenFile` in memory: a smaller pool needs no file."""


class TokenFile:
    """Ids and labels of many rows, 8 bytes a token: the last ones in memory, the others in a
    file without a name in `folder`, whose space is freed with the object."""

    def __init__(self, folder: RunPath) -> None:
        self._folder = folder
        self._file: BufferedRandom | None = None
        self._written = 0  # numbers in the file
        self._tail = np.empty(HELD_BYTES // 4, np.int32)  # its pages exist when they are used
        self._held = 0

    def add(self, ids: Sequence[int], labels: Sequence[int]) -> tuple[StoredTokens, StoredTokens]:
        """Store a row; what is returned reads it when it is used."""
        row = np.concatenate([np.asarray(part, np.int32) for part in (ids, labels)])
        if self._held + len(row) > len(self._tail):
            self._write(self._tail[: self._held])
            self._held = 0
        at = self._written + self._held
        if len(row) > len(self._tail):
            self._write(row)
        else:
            self._tail[self._held : self._held + len(row)] = row
            self._held += len(row)
        return StoredTokens(self, at, len(ids)), StoredTokens(self, at + len(ids), len(labels))

    def read(self, at: int, count: int) -> np.ndarray:
        """`count` numbers from the given one on."""
        if at >= self._written:
            return self._tail[at - self._written :][:count].copy()
        assert self._file is not None
        content = bytearray()
        while len(content) < 4 * count:
            more = os.pread(self._file.fileno(), 4 * count - len(content), 4 * at + len(content))
            if not more:
                raise OSError(f"{self._folder}: the temporary file of tokens ends too early")
            content += more
        return np.frombuffer(content, np.int32)

    def _write(self, numbers: np.ndarray) -> None:
        self._file = self._file or self._folder.scratch()
        self._file.write(numbers.tobytes())
        self._file.flush()
        self._written += len(numbers)


class StoredTokens(Sequence[int]):
    """Numbers in a `TokenFile`, as a sequence that is read when it is used."""

    __slots__ = ("_at", "_count", "_file")

    def __init__(self, file: TokenFile, at: int, count: int) -> None:
        self._file, self._at, self._count = file, at, count

    def __len__(self) -> int:
        return self._count

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._file.read(self._at, self._count).astype(dtype or np.int32, copy=bool(copy))

    def tolist(self) -> list[int]:
        return self._file.read(self._at, self._count).tolist()

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.tolist() == list(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.tolist(),)

    def __repr__(self) -> str:
        return repr(self.tolist())
