"""Tokenize rows into examples, and group examples into batches.

A template (`data/templates.py`) renders and encodes every row (`data/rows.py`) into an `Example`:
token ids, and labels that are -100 outside the responses. The mean loss over the labels is the
example loss of docs/algorithm.md (response tokens, including the end token), which lines 1, 3, 5, 8
and 12 of Algorithm 1 use. A row that is too long is truncated from the left, and counted; if its
last response does not fit, the row is bad.

Batches are bucketed by length under a budget of padded tokens. They do not depend on the order of
the examples: no score may depend on how the examples are batched.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualsft.data.formats import BadRow
from dualsft.data.rows import DataReport, Row, settle
from dualsft.data.templates import Encoded, Template
from dualsft.errors import ConfigError, DataError
from dualsft.system.bounds import RAISE, TIMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dualsft.config.settings import DataConfig
    from dualsft.data.chat import Piece

IGNORE = -100
"""The label of a token outside the responses."""

MAX_TEXT = TIMES * (1 << 20)
"""Most characters of a row that are tokenized, which takes seconds per million; more only if
`TEXT_PER_TOKEN` of them for each token of data.max_length are."""
TEXT_PER_TOKEN = 64
_CHUNK_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized row. `labels[t]` is predicted from position t - 1 (labels are not shifted).

    `id` is the row's content hash and position. `key` is a hash of the tokens and labels, so
    identical texts share it wherever they are in the file.
    """

    id: str
    index: int
    input_ids: list[int]
    labels: list[int]
    key: str = ""
    source: str = ""
    """Name of the source of the row (`data.source_field`); empty if the corpus has only one."""

    def __post_init__(self) -> None:
        if not self.key:
            tokens = array("q", self.input_ids).tobytes() + array("q", self.labels).tobytes()
            object.__setattr__(self, "key", hashlib.sha256(tokens).hexdigest())

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_response_tokens(self) -> int:
        return sum(label != IGNORE for label in self.labels)


def named(examples: Sequence[Example]) -> str:
    """Format examples for a message: row number in the source, and id; at most five."""
    shown = ", ".join(f"row {example.index + 1} ({example.id})" for example in examples[:5])
    more = len(examples) - 5
    return shown + (f" and {more:,} more" if more > 0 else "")


# --- examples in memory ------------------------------------------------------------------------

MASKS = ("completion_mask", "assistant_masks")
"""Columns of TRL that mark the tokens of the responses with 1, instead of labels."""


def as_examples(name: str, rows: Iterable[Any]) -> list[Example]:
    """Examples from tokenized rows of any common kind; `name` is for messages.

    A row is an `Example`; a mapping with `input_ids` and `labels` (or one of `MASKS`), as lists,
    arrays or tensors, such as a row of a `datasets.Dataset`; a batch of such rows with
    `attention_mask`, as a DataLoader gives; or a pair of token lists, prompt and response.
    """
    if isinstance(rows, Mapping | str):
        raise ConfigError(f"{name}: is one {type(rows).__name__}; give a sequence of examples")
    found: list[Example] = []
    for i, row in enumerate(rows):
        if isinstance(row, Example):
            found.append(row)
            continue
        try:
            parts = _token_rows(row)
        except (KeyError, TypeError, ValueError) as problem:
            raise ConfigError(
                f"{name}[{i}] is no tokenized row ({problem}); give an Example, a mapping with "
                f"input_ids and labels (or {MASKS[0]}), or a pair of token lists"
            ) from problem
        for ids, labels, source in parts:
            example = Example("", len(found), ids, labels, source=source)
            found.append(replace(example, id=f"{example.key[:16]}-{len(found)}"))
    return found


def _token_rows(row: Any) -> list[tuple[list[int], list[int], str]]:
    """(ids, labels, source) of a row, or of each row of a batch without its padding."""
    if not isinstance(row, Mapping):
        prompt, response = (_listed(part) for part in row)
        ids, labels = prompt + response, [IGNORE] * len(prompt) + response
        return [(_whole(ids), _whole(labels), "")]
    ids = _listed(row["input_ids"])
    masks = [key for key in MASKS if key in row]
    if "labels" not in row and not masks:
        raise KeyError("it has no labels")
    labels = _listed(row["labels"] if "labels" in row else row[masks[0]])
    batch = bool(ids) and isinstance(ids[0], list)
    each_ids, each_labels = (ids, labels) if batch else ([ids], [labels])
    shown = _listed(row["attention_mask"]) if batch and "attention_mask" in row else None
    source = row.get("source")
    parts = []
    for i, (one, marks) in enumerate(zip(each_ids, each_labels, strict=True)):
        if len(one) != len(marks):
            raise ValueError(f"{len(one)} input_ids and {len(marks)} labels")
        if "labels" not in row:
            marks = [token if mark else IGNORE for token, mark in zip(one, marks, strict=True)]
        kept = [True] * len(one) if shown is None else [bool(mark) for mark in shown[i]]
        pairs = [
            pair for pair, keep in zip(zip(one, marks, strict=True), kept, strict=True) if keep
        ]
        own = source[i] if batch and isinstance(source, list | tuple) else source
        text = own if isinstance(own, str) else ""
        parts.append((_whole([a for a, _ in pairs]), _whole([b for _, b in pairs]), text))
    return parts


def _listed(values: Any) -> list[Any]:
    """A list, array or tensor as a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _whole(values: list[Any]) -> list[int]:
    if not all(isinstance(value, int) for value in values):
        raise TypeError("token ids and labels must be whole numbers")
    return values


# --- examples ----------------------------------------------------------------------------------


def tokenize(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    report: DataReport | None = None,
    *,
    max_positions: int | None = None,
    model_type: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Example], DataReport]:
    """Tokenize the rows in order; also returns the report of `read_rows`, updated.

    `max_positions` is the model's limit; the smaller of it and data.max_length applies. `progress`
    is called with the number of rows and tokens after each chunk.
    """
    report = report or DataReport(path=str(config.path), num_rows=len(rows))
    limit = config.max_length
    cure = f"data.max_length is {limit}; raise data.max_length or shorten the response"
    if max_positions is not None and max_positions < limit:
        limit = max_positions
        cure = f"the model has {limit} positions; shorten the response"
    report = replace(
        report, problems=list(report.problems), template=config.template, max_length=limit
    )
    template = Template(
        config.template, tokenizer, config.add_bos, model_type, config.template_file
    )
    known, examples = report.num_bad, []
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        made = _encode(chunk, template, limit, cure, report)
        examples += made
        if progress is not None:
            progress(len(chunk), sum(example.num_tokens for example in made))
    report.num_good = len(examples)
    settle(report, config.bad_rows, known)
    if not examples:
        raise DataError(f"{report.path}: has no row to tokenize; give a corpus with data.path")
    return examples, report


def _encode(
    rows: Sequence[Row], template: Template, limit: int, cure: str, report: DataReport
) -> list[Example]:
    """Encode rows to examples of at most `limit` tokens; `cure` is for a longer response."""
    rendered: list[tuple[Row, list[Piece]]] = []
    most = max(MAX_TEXT, TEXT_PER_TOKEN * limit)
    for row in rows:
        try:
            pieces = template.render(row)
        except ValueError as problem:
            what = f"{problem}; repair the row, or use another data.template"
            report.add(row.index, _place(row, report), what)
            continue
        if (length := sum(len(text) for text, _ in pieces)) <= most:
            rendered.append((row, pieces))
        else:
            what = f"its text has {length:,} characters, over {most:,} (MAX_TEXT)"
            report.add(row.index, _place(row, report), f"{what}; shorten it, or {RAISE}")
    examples: list[Example] = []
    encoded = template.encode([pieces for _, pieces in rendered])
    for (row, _), tokens in zip(rendered, encoded, strict=True):
        try:
            _check_answers(tokens, row, template)
            ids, labels = _fit(tokens, limit, cure)
        except BadRow as problem:
            report.add(row.index, _place(row, report), str(problem))
            continue
        lost = len(tokens.ids) - len(ids)
        report.num_truncated += lost > 0
        first = next((start for start, _ in tokens.answers), 0)
        report.num_cut_responses += lost > 0 and first < lost + tokens.has_bos
        report.num_double_bos += tokens.doubled_bos
        report.num_split_borders += tokens.split
        report.num_empty_prompts += not row.whole and not row.prompt.strip()
        report.num_special_text += template.holds_special_text(row)
        examples.append(Example(row.id, row.index, ids, labels, source=row.source))
    return examples


def _place(row: Row, report: DataReport) -> str:
    """The location of a row for messages; a row made in memory has only a line number."""
    return row.place or f"{report.path}, line {row.index + 1}"


def _check_answers(tokens: Encoded, row: Row, template: Template) -> None:
    """Every answer must have a token besides its end, and the first answer a token before it."""
    for start, end in tokens.answers:
        if set(tokens.ids[start:end]) <= {template.eos_id, template.bos_id}:
            raise BadRow("the response has no token except its end token; write a longer one")
    if not row.whole and tokens.answers[0][0] == 0:
        raise BadRow(
            "the prompt has no token, so the first token of the response cannot be predicted; "
            "write a prompt, or set data.add_bos=always"
        )


def _fit(tokens: Encoded, limit: int, cure: str) -> tuple[list[int], list[int]]:
    """Truncate ids and labels to the limit: keep the BOS and as many of the last tokens as fit.

    The last response is never truncated; earlier ones may be, from the left.
    """
    labels = [IGNORE] * len(tokens.ids)
    for start, end in tokens.answers:
        labels[start:end] = tokens.ids[start:end]
    labels[0] = IGNORE  # there is no position to predict it from
    over = len(tokens.ids) - limit
    if over <= 0:
        return tokens.ids, labels
    kept = int(tokens.has_bos)
    first, end = tokens.answers[-1]
    room = first - max(1, kept)  # all tokens before the last response except one may be dropped
    if over > room:
        raise BadRow(
            f"response has {end - first} tokens with its end token, and one token must precede "
            f"it; {cure}"
        )
    ids = tokens.ids[:kept] + tokens.ids[kept + over :]
    labels = labels[:kept] + labels[kept + over :]
    labels[0] = IGNORE
    return ids, labels


# --- batches -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded int64 tensors of some examples, each of shape [B, T] (B examples, T tokens)."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    padded_right: bool = False
    """Whether all padding follows the tokens, so that positions count from 0."""


def make_batches(examples: Sequence[Example], batch_tokens: int) -> list[list[int]]:
    """Indices of the examples in batches of similar length, longest first.

    (Number of examples) × (longest in the batch) is at most `batch_tokens`; an example longer than
    `batch_tokens` gets its own batch. The batches do not depend on the order of the examples.
    """
    if batch_tokens < 1:
        raise ConfigError(f"score.batch_tokens: {batch_tokens} is not allowed; use 1 or more")
    order = sorted(
        range(len(examples)),
        key=lambda i: (examples[i].num_tokens, examples[i].key, examples[i].id),
        reverse=True,
    )
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * examples[batches[-1][0]].num_tokens <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def collate(
    examples: Sequence[Example],
    pad_id: int,
    padding_side: str = "right",
    device: torch.device | str = "cpu",
) -> Batch:
    """Pad examples to the longest; positions count real tokens from 0 on either padding side."""
    shape = (len(examples), max(example.num_tokens for example in examples))
    input_ids, labels = torch.full(shape, pad_id), torch.full(shape, IGNORE)
    attention_mask, position_ids = torch.zeros(2, *shape, dtype=torch.int64)
    for i, example in enumerate(examples):
        start = shape[1] - example.num_tokens if padding_side == "left" else 0
        real = slice(start, start + example.num_tokens)
        input_ids[i, real] = torch.tensor(example.input_ids)
        attention_mask[i, real] = 1
        position_ids[i, start:] = torch.arange(shape[1] - start)  # continues into the padding
        labels[i, real] = torch.tensor(example.labels)
    tensors = (input_ids, attention_mask, position_ids, labels)
    return Batch(*(t.to(device) for t in tensors), padded_right=padding_side == "right")


# --- order ------------------------------------------------------------------------------------


def training_order(examples: Sequence[Example], seed: int, epoch: int) -> list[int]:
    """Shuffle the examples for one epoch.

    The order depends on the texts, not on their position in the file; copies of one text are
    numbered, so that each has its own place.
    """
    copies: dict[str, int] = defaultdict(int)
    keyed: list[tuple[bytes, int]] = []
    for i in sorted(range(len(examples)), key=lambda i: (examples[i].key, examples[i].id)):
        key = examples[i].key
        keyed.append((digest(seed, epoch, key, copies[key]), i))
        copies[key] += 1
    return [i for _, i in sorted(keyed)]


def digest(*parts: int | str) -> bytes:
    """A reproducible hash of the parts; every pseudo-random order is derived from it."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).digest()


def generator(*parts: int | str) -> np.random.Generator:
    """A random generator that depends only on the parts."""
    return np.random.default_rng(np.frombuffer(digest(*parts), np.uint32).tolist())
