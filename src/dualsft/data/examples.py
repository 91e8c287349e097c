"""Tokenize rows into examples, and group examples into batches.

A template (`data/templates.py`) renders and encodes every row (`data/rows.py`) into an `Example`:
token ids, and labels that are -100 outside the responses. The mean loss over the labels is the
example loss of docs/algorithm.md (response tokens, including the end token), which lines 1, 3, 5, 8
and 12 of Algorithm 1 use. A row that is too long is shortened as data.truncation says, and counted;
if its last response does not fit, the row is bad (with `right`: if nothing of a response is left).

Batches are bucketed by length under a budget of padded tokens. They do not depend on the order of
the examples: no score may depend on how the examples are batched.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualsft.config.settings import from_mapping
from dualsft.data.layouts import BadRow
from dualsft.data.rows import KEPT_PROBLEMS, DataReport, Row, read_values, settle
from dualsft.data.templates import Encoded, Template
from dualsft.data.tokens import IGNORE, MASKS, TokenFile, TokenRow, token_row, whole_numbers
from dualsft.errors import ConfigError, DataError
from dualsft.system.bounds import RAISE, TIMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dualsft.config.settings import DataConfig
    from dualsft.data.formats import Piece, Turn

logger = logging.getLogger(__name__)

MAX_TEXT = TIMES * (1 << 20)
"""Most characters of a row that are tokenized, which takes seconds per million; more only if
`TEXT_PER_TOKEN` of them for each token of data.max_length are."""
TEXT_PER_TOKEN = 64
MAX_WRITTEN = TIMES * (2 << 20)
WRITTEN_PER_ROW = TIMES * (16 << 10)
WRITTEN_PER_BYTE = TIMES * 8
"""Most characters that a template may write for a thousand rows: some anyway, and for each row and
each of its bytes. Default system prompts of up to 10,000 characters exist."""
_CHUNK_ROWS = 1_000
_CHUNK_TEXT = 1 << 20  # characters that are tokenized together, which need some hundred bytes each


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized row. `labels[t]` is predicted from position t - 1 (labels are not shifted).

    `id` is the row's content hash and position. `key` is a hash of the tokens and labels, so
    identical texts share it wherever they are in the file.
    """

    id: str
    index: int
    input_ids: Sequence[int]
    labels: Sequence[int]
    key: str = ""
    source: str = ""
    """Name of the source of the row (`data.source_field`); empty if the corpus has only one."""

    def __post_init__(self) -> None:
        if not self.key:
            ids, labels = (np.asarray(part, np.int64) for part in (self.input_ids, self.labels))
            key = hashlib.sha256(ids.tobytes() + labels.tobytes()).hexdigest()
            object.__setattr__(self, "key", key)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(np.asarray(self.labels) != IGNORE))

    def stored(self, file: TokenFile) -> Example:
        """The same example with its tokens in a file."""
        input_ids, labels = file.add(self.input_ids, self.labels)
        return replace(self, input_ids=input_ids, labels=labels)


def named(examples: Sequence[Example]) -> str:
    """Format examples for a message: row number in the source, and id; at most five."""
    shown = ", ".join(f"row {example.index + 1} ({example.id})" for example in examples[:5])
    more = len(examples) - 5
    return shown + (f" and {more:,} more" if more > 0 else "")


# --- examples in memory ------------------------------------------------------------------------


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
        for (ids, labels), source in parts:
            example = Example("", len(found), ids, labels, source=source)
            found.append(replace(example, id=f"{example.key[:16]}-{len(found)}"))
    return found


def encode(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_type: str = "",
    **data: Any,
) -> list[Example]:
    """Examples from rows of text: dicts in any format of `data.path`, such as a generator of them
    or a `datasets.Dataset`, tokenized as `dualsft run` does.

    `data` are settings of the section data by name (`template="plain"`, `max_length=512`).
    `model_type` is that of the model's configuration, for `add_bos`.
    """
    config = from_mapping({"model": {"path": "."}, "data": {"path": "rows", **data}}).data
    read, report = read_values(rows, config)
    examples, report = tokenize(read, tokenizer, config, report, model_type=model_type)
    for note in report.notes():
        logger.warning(note)
    return examples


def _token_rows(row: Any) -> list[tuple[TokenRow, str]]:
    """The tokens and the source of a row, or of each row of a batch."""
    if not isinstance(row, Mapping):
        prompt, response = (whole_numbers("token ids", part) for part in row)
        return [(TokenRow(prompt + response, [IGNORE] * len(prompt) + response), "")]
    lists = {key: v.tolist() if hasattr(v, "tolist") else v for key, v in row.items()}
    ids = lists["input_ids"]
    rows = [lists]
    if ids and isinstance(ids[0], Sequence):
        wide = {k for k, v in lists.items() if isinstance(v, list | tuple) and len(v) == len(ids)}
        rows = [{k: v[i] if k in wide else v for k, v in lists.items()} for i in range(len(ids))]
    sources = [one.get("source") for one in rows]
    return [
        (token_row(one), source if isinstance(source, str) else "")
        for one, source in zip(rows, sources, strict=True)
    ]


# --- examples ----------------------------------------------------------------------------------


def tokenize(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    report: DataReport | None = None,
    *,
    max_positions: int | None = None,
    model_type: str = "",
    file: TokenFile | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Example], DataReport]:
    """Tokenize the rows in order; also returns the report of `read_rows`, updated.

    The rows may still be being read (`stream_rows` with the same report). `max_positions` is the
    model's limit; the smaller of it and data.max_length applies. With `file`, the tokens are kept
    there. `progress` is called with the number of rows and tokens after each chunk.
    """
    limit, part = config.max_length, "prompt" if config.truncation == "right" else "response"
    cure = f"data.max_length is {limit}; raise data.max_length or shorten the {part}"
    if max_positions is not None and max_positions < limit:
        limit = max_positions
        cure = f"the model has {limit} positions; shorten the {part}"
    found = DataReport(path=str(config.path), max_length=limit, truncation=config.truncation)
    read = found if report is None else report
    found.path = read.path
    template = Template(
        config.template, tokenizer, config.add_bos, model_type, config.template_file
    )
    examples: list[Example] = []
    left = iter(rows)
    while chunk := list(islice(left, _CHUNK_ROWS)):
        if report is None:
            found.num_rows += len(chunk)
        elif report.num_bad and config.bad_rows != "skip":
            continue  # the error is raised when all rows have been read
        made = _encode(chunk, template, limit, cure, found)
        examples += made if file is None else (example.stored(file) for example in made)
        if progress is not None:
            progress(len(chunk), sum(example.num_tokens for example in made))
    known = 0 if report is None else report.num_bad
    found = _joined(report, found) if report is not None else found
    found.template, found.num_good = config.template, len(examples)
    settle(found, config.bad_rows, known)
    if not examples:
        raise DataError(f"{found.path}: has no row to tokenize; give a corpus with data.path")
    return examples, found


def _joined(report: DataReport, found: DataReport) -> DataReport:
    """The report of reading the rows with what was found in tokenising them."""
    counts = {
        name: getattr(report, name) + getattr(found, name)
        for name in asdict(found)
        if name.startswith("num_")
    }
    problems = (report.problems + found.problems)[:KEPT_PROBLEMS]
    limits = {"max_length": found.max_length, "truncation": found.truncation}
    return replace(report, problems=problems, **counts, **limits)


def _encode(
    rows: Sequence[Row], template: Template, limit: int, cure: str, report: DataReport
) -> list[Example]:
    """Encode rows to examples of at most `limit` tokens; `cure` is for a longer response."""
    rendered: list[tuple[Row, list[Piece]]] = []
    examples: list[Example] = []
    most = max(MAX_TEXT, TEXT_PER_TOKEN * limit)
    waiting = written = own = 0
    allowed = MAX_WRITTEN
    for row in rows:
        try:
            pieces = [] if _is_given(row) else template.render(row)
        except ValueError as problem:
            what = f"{problem}; repair the row, or use another data.template"
            report.add(row.index, _place(row, report), what)
            continue
        length = sum(len(text) for text, _ in pieces)
        written, own = written + length, own + len(row.raw)
        allowed += WRITTEN_PER_ROW + WRITTEN_PER_BYTE * len(row.raw)
        if written > allowed:
            raise ConfigError(
                f"data.template={template.name}: it writes {written:,} characters for rows of "
                f"{own:,} bytes (MAX_WRITTEN); use another template, or {RAISE}"
            )
        if length > most:
            what = f"its text has {length:,} characters, over {most:,} (MAX_TEXT)"
            report.add(row.index, _place(row, report), f"{what}; shorten it, or {RAISE}")
            continue
        rendered.append((row, pieces))
        waiting += length
        if waiting > _CHUNK_TEXT:
            examples += _encode_rendered(rendered, template, limit, cure, report)
            rendered, waiting = [], 0
    return examples + _encode_rendered(rendered, template, limit, cure, report)


def _encode_rendered(
    rendered: Sequence[tuple[Row, list[Piece]]],
    template: Template,
    limit: int,
    cure: str,
    report: DataReport,
) -> list[Example]:
    examples: list[Example] = []
    usual = iter(template.encode([pieces for _, pieces in rendered if pieces]))
    for row, pieces in rendered:
        tokens = next(usual) if pieces else template.encode_given(row)
        try:
            _check_answers(tokens, row, template)
            if report.truncation == "prompt" and len(tokens.ids) > limit:
                fitting = _shorten(row, template, limit, cure)
                report.num_truncated += 1
                report.num_cut_responses += len(fitting.answers) < len(tokens.answers)
                tokens = fitting
            ids, labels = _fit(tokens, limit, cure, report.truncation == "right")
        except BadRow as problem:
            report.add(row.index, _place(row, report), str(problem))
            continue
        lost = len(tokens.ids) - len(ids)
        report.num_truncated += lost > 0
        (first, _), (_, end) = tokens.answers[0], tokens.answers[-1]
        cut = end > limit if report.truncation == "right" else first < lost + tokens.has_bos
        report.num_cut_responses += lost > 0 and cut
        report.num_double_bos += tokens.doubled_bos
        report.num_split_borders += tokens.split
        report.num_empty_prompts += not row.whole and not row.prompt.strip()
        report.num_special_text += template.holds_special_text(row)
        examples.append(Example(row.id, row.index, ids, labels, source=row.source))
    return examples


def _is_given(row: Row) -> bool:
    """Whether the row brings its tokens, or pieces that are encoded as they are."""
    return row.tokens is not None or bool(row.pieces)


def _place(row: Row, report: DataReport) -> str:
    """The location of a row for messages; a row made in memory has only a line number."""
    return row.place or f"{report.path}, line {row.index + 1}"


def _check_answers(tokens: Encoded, row: Row, template: Template) -> None:
    """Every answer must have a token besides its end, and the first answer a token before it."""
    if not tokens.answers:
        raise BadRow("no text with 'label' true has a token; mark the response")
    for start, end in tokens.answers:
        if set(tokens.ids[start:end]) <= {template.eos_id, template.bos_id}:
            raise BadRow("the response has no token except its end token; write a longer one")
    if not row.whole and tokens.answers[0][0] == 0:
        raise BadRow(
            "the prompt has no token, so the first token of the response cannot be predicted; "
            "write a prompt, or set data.add_bos=always"
        )


def _shorten(row: Row, template: Template, limit: int, cure: str) -> Encoded:
    """The tokens of a row without its oldest rounds, then without the beginning of its last user
    text, as little as needed; what the template writes around the turns stays whole."""

    def encoded(prompt: str, turns: Sequence[Turn], trained_from: int) -> Encoded:
        part = replace(row, prompt=prompt, turns=tuple(turns), trained_from=trained_from)
        try:
            return template.encode([template.render(part)])[0]
        except ValueError as problem:
            raise BadRow(f"{problem}; {cure}") from None

    users = [at for at, turn in enumerate(row.turns) if turn["role"] == "user"]
    if row.whole or (row.turns and not users):
        raise BadRow(f"data.truncation=prompt: the row has no user text to shorten; {cure}")
    turns, trained_from = list(row.turns), row.trained_from
    for start in users[1:]:
        head, dropped = row.turns[: users[0]], start - users[0]
        turns = [*head, *row.turns[start:]]
        trained_from = max(min(row.trained_from, len(head)), row.trained_from - dropped)
        if len((found := encoded(row.prompt, turns, trained_from)).ids) <= limit:
            return found
    at = users[0] if users else 0
    text = turns[at]["content"] if turns else row.prompt

    def without(count: int) -> Encoded:
        rest = text[count:]
        cut = [*turns[:at], {**turns[at], "content": rest}, *turns[at + 1 :]] if turns else []
        return encoded(rest, cut, trained_from)

    counts = range(len(text))
    best = bisect_left(counts, True, key=lambda count: len(without(count).ids) <= limit)
    if best == len(counts):
        raise BadRow(
            f"the response and the template's own text have more than {limit} tokens; {cure}"
        )
    return without(best)


def _fit(
    tokens: Encoded, limit: int, cure: str, from_right: bool = False
) -> tuple[list[int], list[int]]:
    """Truncate ids and labels to the limit: keep the BOS and as many of the last tokens as fit.

    The last response is never truncated; earlier ones may be, from the left. `from_right` keeps the
    first tokens instead, as TRL's keep_start does.
    """
    labels = [IGNORE] * len(tokens.ids)
    for start, end in tokens.answers:
        labels[start:end] = tokens.ids[start:end]
    labels[0] = IGNORE  # there is no position to predict it from
    over = len(tokens.ids) - limit
    if over <= 0:
        return tokens.ids, labels
    if from_right:
        if all(label == IGNORE for label in labels[:limit]):
            raise BadRow(
                f"the first response begins after {tokens.answers[0][0]} tokens, so nothing of it "
                f"is left; {cure}"
            )
        return tokens.ids[:limit], labels[:limit]
    kept = int(tokens.has_bos)
    first, end = tokens.answers[-1]
    room = first - max(1, kept)  # all tokens before the last response except one may be dropped
    if over > room:
        raise BadRow(
            f"response has {end - first} tokens with its end token, and one token must precede "
            f"it; {cure}"
        )
    if kept and kept + over < first and tokens.ids[kept + over] == tokens.ids[0]:
        kept, over = 0, kept + over  # the rest opens with a BOS: some templates open turns with it
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
        input_ids[i, real] = torch.from_numpy(np.array(example.input_ids, np.int64))
        attention_mask[i, real] = 1
        position_ids[i, start:] = torch.arange(shape[1] - start)  # continues into the padding
        labels[i, real] = torch.from_numpy(np.array(example.labels, np.int64))
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
