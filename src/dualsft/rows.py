"""Rows: a JSONL file as a stream of checked rows, and what was wrong with the others.

Reads `*.jsonl`, `*.jsonl.gz` and `*.json.gz` (one JSON object a line) in the prompt-response
(`prompt` with `response` or `completion`, or the user's own field names) and Alpaca
(`instruction`, optional `input`, `output`) formats. This is D_full, before Algorithm 1 begins.

Nothing is skipped silently. A row that cannot be used is a bad row, named with file, 1-based line,
field and cure: `data.bad_rows: error` stops and shows them, `skip` leaves them out of |D_full| and
counts them (ALGORITHM.md section 2). Damage to the file itself (a truncated or exploding gzip)
always stops.

A row's `index` is its physical line number minus one: blank lines give no row but are counted, so
`index + 1` is the line that an editor shows. `raw` is the line as it came without its b"\\n" (a
b"\\r" stays; a byte order mark belongs to the file, not to the row).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dualsft.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dualsft.config import DataConfig


SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz")
SHOWN_PROBLEMS = 20
KEPT_PROBLEMS = 10_000
_UNRECOGNISED_ROWS = 1_000
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a file may cost before it is refused."""

    max_line_bytes: int = 64 << 20
    max_expanded_bytes: int = 64 << 30
    """Bytes that may come out of a gzip file."""
    max_ratio: int = 200
    """Expansion that a gzip file may have once more than `max_line_bytes` have come out of it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row: its user text and answer, and the bytes it came as."""

    index: int
    id: str
    raw: bytes
    prompt: str
    response: str


@dataclass(slots=True)
class DataReport:
    """What was read, what was left out and what was changed."""

    path: str
    format: str = ""
    template: str = ""
    max_length: int | None = None
    num_rows: int = 0
    """Lines of the file that are not blank."""
    num_good: int = 0
    """Rows that can be used: |D_full|."""
    num_bad: int = 0
    num_truncated: int = 0
    num_double_bos: int = 0
    num_empty_prompts: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line, message) of bad rows, at most KEPT_PROBLEMS of them."""

    @property
    def bad(self) -> list[str]:
        """The messages, in the order of the file."""
        return [message for _, message in sorted(self.problems)]

    def add(self, line: int, problem: str) -> None:
        self.num_bad += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append((line, f"{self.path}, line {line}: {problem}"))

    def notes(self) -> list[str]:
        """What the user should know about rows that were left out or changed."""
        counted = (
            (self.num_bad, "are bad and left out (data.bad_rows=skip)"),
            (self.num_truncated, f"lost prompt tokens from the left to fit {self.max_length}"),
            (self.num_double_bos, "began with more than one BOS; one was kept"),
            (self.num_empty_prompts, "have an empty prompt"),
        )
        lines = [
            f"{self.path}: {number:,} of {self.num_rows:,} rows {what}"
            for number, what in counted
            if number
        ]
        return lines + self.bad[:3] if self.num_bad else lines

    def numbers(self) -> dict[str, Any]:
        """Everything but the messages, for a summary file."""
        return {name: value for name, value in asdict(self).items() if name != "problems"}


class BadRow(ValueError):
    """Why one row cannot be used."""


# --- lines -------------------------------------------------------------------------------------


def check_path(path: Path) -> None:
    """Refuse a path that is no file of a kind that can be read."""
    if not path.name.lower().endswith(SUFFIXES):
        raise ConfigError(
            f"data.path: {path} is not a kind of file that can be read; supported now: "
            "*.jsonl, *.jsonl.gz and *.json.gz, one JSON object a line"
        )
    if not path.is_file():
        what = "does not exist" if not path.exists() else "is not an ordinary file"
        raise ConfigError(f"data.path: {path} {what}; give the path of the corpus")


def _read_lines(path: Path, limits: Limits) -> Iterator[tuple[int, bytes | None]]:
    """(1-based line, bytes without newline) of every non-blank line; None where one is too long."""
    check_path(path)
    line = 1
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            for raw in _split_lines(file, path, limits):
                if line == 1 and raw is not None:
                    raw = _without_mark(path, raw)
                if raw is None or raw.strip():
                    yield line, raw
                line += 1
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise DataError(
            f"{path}, line {line}: the gzip file is damaged or cut off here ({problem}); "
            "copy or download it again (gzip -t tests it)"
        ) from problem
    except _TooLarge as problem:
        raise DataError(
            f"{path}, line {line}: the gzip file expands to more than {problem} bytes, which looks "
            "like a decompression bomb; unpack it and give the *.jsonl file if you mean it"
        ) from problem
    except OSError as problem:
        raise DataError(f"{path}, line {line}: cannot be read ({problem})") from problem


class _TooLarge(Exception):
    """A gzip file gave more bytes than its limit."""


def _split_lines(file: BinaryIO, path: Path, limits: Limits) -> Iterator[bytes | None]:
    """Every line without its newline, None for one over the limit (of which no more is held)."""
    zipped = path.name.lower().endswith(".gz")
    stream = gzip.GzipFile(fileobj=file) if zipped else file
    by_ratio = limits.max_ratio * path.stat().st_size
    most = min(limits.max_expanded_bytes, max(limits.max_line_bytes, by_ratio))
    num_bytes, too_long = 0, False
    while piece := stream.readline(_BUFFER_BYTES if too_long else limits.max_line_bytes + 1):
        num_bytes += len(piece)
        if zipped and num_bytes > most:
            raise _TooLarge(f"{most:,}")
        line = piece.removesuffix(b"\n")
        too_long = too_long or len(line) > limits.max_line_bytes
        if not too_long or piece.endswith(b"\n"):
            yield None if too_long else line
            too_long = False
    if too_long:
        yield None


def _without_mark(path: Path, raw: bytes) -> bytes:
    """The first line without its UTF-8 mark; a file that is visibly something else is refused."""
    if raw.startswith(b"\x1f\x8b"):
        raise DataError(f"{path}, line 1: the file is gzip; rename it to end in .jsonl.gz")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path}, line 1: the file is UTF-16; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )
    return raw.removeprefix(b"\xef\xbb\xbf")


def source_lines(
    path: str | Path, rows: Iterable[int] | Mapping[int, str], limits: Limits | None = None
) -> dict[int, bytes]:
    """The lines of these rows by index, in source order, byte for byte as they came (no newline).

    `rows` are indices, or a mapping of index to row id; then the content hash in the id is compared
    and a file that has changed since it was read is refused.
    """
    ids = dict(rows) if isinstance(rows, Mapping) else dict.fromkeys(rows, "")
    lines: dict[int, bytes] = {}
    for line, raw in _read_lines(Path(path), limits or Limits()):
        index = line - 1
        if raw is not None and index in ids:
            if ids[index] and _id_of(raw, index) != ids[index]:
                break
            lines[index] = raw
            if len(lines) == len(ids):
                return lines
    if gone := ids.keys() - lines.keys():
        raise DataError(
            f"{path}, line {min(gone) + 1}: not the row that was read before; the file has "
            "changed. Restore it, or run the split again"
        )
    return lines


def _id_of(raw: bytes, index: int) -> str | None:
    try:
        return _row_id(_parse(raw), index)
    except BadRow:
        return None


# --- rows --------------------------------------------------------------------------------------


def _parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line, strictly: UTF-8, no NaN, no repeated key."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise BadRow(
            f"byte {problem.start + 1} of the line (0x{raw[problem.start]:02x}) is not UTF-8; "
            "save the file as UTF-8"
        ) from None
    try:
        row = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as problem:
        raise BadRow(
            f"not valid JSON at column {problem.colno}: {problem.msg}; "
            "each line must be one complete JSON object"
        ) from None
    except RecursionError:
        raise BadRow("the JSON is nested too deeply; flatten the row") from None
    except BadRow:
        raise
    except ValueError as problem:  # an integer of thousands of digits
        raise BadRow(f"not valid JSON: {problem}; repair the number") from None
    if not isinstance(row, dict):
        raise BadRow(
            f"{_kind(row)} where a JSON object is needed; write one object a line "
            "(jq -c '.[]' does it for a file that is one list)"
        )
    return row


def _no_constant(name: str) -> None:
    raise BadRow(f"{name} is not valid JSON; remove it or write null")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise BadRow(f"field {name[:60]!r} is given twice in one object; keep one of them")
    return row


def _kind(value: object) -> str:
    """What JSON calls a value."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")


def _row_id(row: dict[str, Any], index: int) -> str:
    canonical = json.dumps(row, sort_keys=True, separators=(",", ":"))
    return f"{hashlib.sha256(canonical.encode()).hexdigest()[:16]}-{index}"


@dataclass(frozen=True, slots=True)
class _Fields:
    """The names under which a format keeps its texts."""

    format: str
    prompt: str
    response: str
    extra: str = ""

    def missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in (self.prompt, self.response) if name not in names]

    def __str__(self) -> str:
        extra = f", optional {self.extra}" if self.extra else ""
        return f"{self.format} ({self.prompt}, {self.response}{extra})"


_FORMATS = (
    _Fields("prompt_response", "prompt", "response"),
    _Fields("prompt_response", "prompt", "completion"),
    _Fields("alpaca", "instruction", "output", "input"),
)
_OWN_NAMES = "name your fields with data.prompt_field=... and data.response_field=..."


class _Recogniser:
    """Finds the format by the first row that has all the fields of one, then reads rows with it."""

    def __init__(self, config: DataConfig, report: DataReport) -> None:
        self.report = report
        own_prompt, own_response = config.prompt_field, config.response_field
        formats = [f for f in _FORMATS if config.format in ("auto", f.format)]
        if not formats:
            raise ConfigError(
                f"data.format: {config.format!r} is not known; use auto, prompt_response or alpaca"
            )
        if (own_prompt or own_response) and config.format == "alpaca":
            raise ConfigError(
                "data.prompt_field and data.response_field do not go with data.format=alpaca; "
                "use data.format=prompt_response, or leave them out"
            )
        if own_prompt or own_response:
            names = [own_response] if own_response else ["response", "completion"]
            formats = [_Fields("prompt_response", own_prompt or "prompt", n) for n in names]
        self.accepted = formats
        self.fields: _Fields | None = formats[0] if len(formats) == 1 else None
        self.known = {name for f in formats for name in (f.prompt, f.response)}
        self.waiting: list[tuple[int, list[str]]] = []

    def row(self, line: int, raw: bytes) -> Row | None:
        """The row of a line; None while no row has shown the format (the line waits, as bad)."""
        values = _parse(raw)
        if self.fields is None:
            self._recognise(line, values)
        if self.fields is None:
            names = sorted(values, key=lambda name: name not in self.known)  # known ones first
            self.waiting.append((line, names[: SHOWN_PROBLEMS + 1]))
            if len(self.waiting) >= _UNRECOGNISED_ROWS:
                self.finish()
            return None
        if missing := self.fields.missing(values):
            raise BadRow(self._missing(missing, list(values)))
        prompt = _text(values, self.fields.prompt)
        if self.fields.extra and values.get(self.fields.extra) is not None:
            extra = _text(values, self.fields.extra)
            prompt = f"{prompt}\n{extra}" if extra else prompt
        response = _text(values, self.fields.response)
        if not response.strip():
            raise BadRow(f"field {self.fields.response!r} is empty; write the response")
        return Row(line - 1, _row_id(values, line - 1), raw, prompt, response)

    def finish(self) -> None:
        """Settle the rows that waited; an error when no format was recognised."""
        if self.fields is None and self.waiting:
            line, names = self.waiting[0]
            accepted = "; ".join(str(fields) for fields in self.accepted)
            raise DataError(
                f"{self.report.path}, line {line}: the fields {_listed(names)} are of no known "
                f"format, nor are those of any later row; accepted: {accepted}; or {_OWN_NAMES}"
            )
        for line, names in self.waiting:
            assert self.fields is not None
            self.report.add(line, self._missing(self.fields.missing(names), names))
        self.waiting = []

    def _recognise(self, line: int, values: dict[str, Any]) -> None:
        fitting = [fields for fields in self.accepted if not fields.missing(values)]
        if len(fitting) > 1:
            raise DataError(
                f"{self.report.path}, line {line}: the fields fit more than one format: "
                f"{'; '.join(str(fields) for fields in fitting)}; set data.format, or {_OWN_NAMES}"
            )
        if fitting:
            self.fields = fitting[0]
            self.finish()

    def _missing(self, missing: list[str], names: list[str]) -> str:
        plural = "field" if len(missing) == 1 else "fields"
        return f"{plural} {_listed(missing)} missing (the row has {_listed(names)}); {_OWN_NAMES}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:60]) for name in names[:SHOWN_PROBLEMS]) or "no fields"
    return shown + (", ..." if len(names) > SHOWN_PROBLEMS else "")


def _text(values: dict[str, Any], name: str) -> str:
    value = values[name]
    if not isinstance(value, str):
        raise BadRow(f"field {name!r} is {_kind(value)}, must be a string; write it as text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise BadRow(
            f"field {name!r} has half a surrogate pair at character {problem.start + 1}, which is "
            "no text; write the whole character"
        ) from None
    return value


def read_rows(
    path: str | Path, config: DataConfig, limits: Limits | None = None
) -> tuple[list[Row], DataReport]:
    """The usable rows of a file, and what was wrong with the others (policy: data.bad_rows)."""
    limits = limits or Limits()
    report = DataReport(path=str(path))
    recogniser = _Recogniser(config, report)
    rows: list[Row] = []
    try:
        for line, raw in _read_lines(Path(path), limits):
            report.num_rows += 1
            try:
                if raw is None:
                    raise BadRow(
                        f"longer than {limits.max_line_bytes:,} bytes; "
                        "split the row, or check that the file has one object a line"
                    )
                row = recogniser.row(line, raw)
            except BadRow as problem:
                report.add(line, str(problem))
            else:
                rows += [row] if row else []
        recogniser.finish()
    except DataError as problem:
        raise DataError([*report.bad[:SHOWN_PROBLEMS], *problem.problems]) from problem
    if not report.num_rows:
        raise DataError(f"{path}: there is no row in the file; give a corpus with data.path")
    report.format = recogniser.fields.format if recogniser.fields else config.format
    report.num_good = len(rows)
    settle(report, config.bad_rows, known=0)
    return rows, report


def settle(report: DataReport, policy: str, known: int) -> None:
    """Apply data.bad_rows to the problems beyond the `known` first ones."""
    num_new = report.num_bad - known
    if not num_new:
        return
    shown = report.bad[:SHOWN_PROBLEMS]
    total = f"{report.num_bad:,} of {report.num_rows:,} rows of {report.path} are bad"
    if policy != "skip":
        cure = "repair them, or leave them out with data.bad_rows=skip"
        raise DataError([*shown, f"{total} ({len(shown)} shown); {cure}"])
    if not report.num_good:
        raise DataError([*shown, f"{total} ({len(shown)} shown): nothing is left; repair them"])
