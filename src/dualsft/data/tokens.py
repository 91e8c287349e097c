"""Read rows that are token ids already: `input_ids` with labels, or with masks of the response.

The same columns as in TRL and axolotl, from a file (`data/formats.py`) or in memory
(`data/examples.py`). Padding (`attention_mask` 0) is removed. Without labels, a token is trained on
where all given masks are 1, as in TRL. Raises ValueError, KeyError or TypeError for a row that is
something else. Not part of Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, pairwise
from typing import Any, NamedTuple

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
