"""Read the files of a corpus into checked rows, and report the rows that cannot be used.

`data/sources.py` resolves a path to files, `data/readers.py` and `data/tables.py` turn a file into
records, `data/layouts.py` detects their format, and `data/formats.py` turns a record into a
conversation. The rows are D_full, the input of
Algorithm 1.

No row is skipped silently. A row that cannot be used is reported with file, 1-based line (or row),
field and cure. `data.bad_rows: error` stops and lists them; `skip` leaves them out of |D_full| and
counts them (docs/data.md, "Rows that cannot be used"). Damage to the file itself always stops.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualsft.data.formats import Piece, Turn, conversation
from dualsft.data.layouts import BadRow, Recogniser, ascii_safe, counted, kind, listed
from dualsft.data.readers import (
    CHUNK_BYTES,
    Limits,
    LinesReader,
    Reader,
    Record,
    ValuesReader,
    too_much_memory,
)
from dualsft.data.sources import LONGEST_SOURCE, SourceFile, find_files, make_reader
from dualsft.data.tables import to_json
from dualsft.data.tokens import TokenRow
from dualsft.errors import DataError
from dualsft.system.bounds import RAISE
from dualsft.system.paths import without_home

if TYPE_CHECKING:
    from dualsft.config.settings import DataConfig

SHOWN_PROBLEMS = 20
KEPT_PROBLEMS = 10_000
_NOTED_PROBLEMS = 3
_PROGRESS_ROWS = 1_000
_LOST = {
    "left": "prompt tokens from the left",
    "prompt": "earlier rounds or the beginning of the prompt",
    "right": "tokens at the end",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row: its location, its bytes and its content (see `Conversation`)."""

    index: int
    """0-based position in the source (`Record.index`), continued over several files."""
    id: str
    raw: bytes
    """A JSON line as it is in the file, without its newline; for other kinds of files, the fields
    as one compact JSON object."""
    prompt: str
    response: str
    place: str = ""
    source: str = ""
    """Name of the source: `data.source_field`, or its file or entry where there are several."""
    turns: tuple[Turn, ...] = ()
    tools: tuple[Turn, ...] = ()
    trained_from: int = 0
    whole: bool = False
    pieces: tuple[Piece, ...] = ()
    tokens: TokenRow | None = None


@dataclass(slots=True)
class DataReport:
    """Counts of the rows that were read, left out and changed."""

    path: str
    format: str = ""
    template: str = ""
    max_length: int | None = None
    truncation: str = "left"
    files: list[str] = field(default_factory=list)
    num_rows: int = 0
    """Rows in the files; blank lines do not count."""
    num_good: int = 0
    """Usable rows: |D_full|."""
    num_bad: int = 0
    num_truncated: int = 0
    num_cut_responses: int = 0
    num_double_bos: int = 0
    num_empty_prompts: int = 0
    num_split_borders: int = 0
    num_special_text: int = 0
    num_repeated_ids: int = 0
    num_not_sampled: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(index, message) of bad rows, at most KEPT_PROBLEMS."""

    @property
    def bad(self) -> list[str]:
        """The messages, in source order."""
        return [message for _, message in sorted(self.problems)]

    def add(self, index: int, place: str, problem: str) -> None:
        self.num_bad += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append((index, f"{place}: {problem}"))

    def notes(self, where: str = "data.bad_rows=error shows up to 20") -> list[str]:
        """Warnings about rows that were left out or changed; `where` lists the other bad ones."""
        split = (
            "have a token across the border of prompt and response; the parts were encoded apart"
        )
        special = (
            "hold the text of a special token (such as an end token), which becomes that token"
        )
        cut = "a" if self.truncation == "right" else "an earlier"
        counts = (
            (self.num_bad, "are bad and left out (data.bad_rows=skip)"),
            (self.num_truncated, f"lost {_LOST[self.truncation]} to fit {self.max_length}"),
            (self.num_cut_responses, f"lost tokens of {cut} response in that cut"),
            (self.num_double_bos, "began with more than one BOS; one was kept"),
            (self.num_empty_prompts, "have an empty prompt"),
            (self.num_split_borders, split),
            (self.num_special_text, special),
            (self.num_repeated_ids, "have the 'id' of an earlier row"),
            (self.num_not_sampled, "are left out by num_samples of dataset_info.json"),
        )
        lines = [
            f"{self.path}: {number:,} of {counted(self.num_rows, 'row')} {_agreed(number, what)}"
            for number, what in counts
            if number
        ]
        lines += self.bad[:_NOTED_PROBLEMS]
        if (rest := self.num_bad - _NOTED_PROBLEMS) > 0:
            lines.append(f"{self.path}: and {counted(rest, 'more bad row')}; {where}")
        return lines

    def numbers(self) -> dict[str, Any]:
        """All fields except the messages, for a summary file."""
        numbers = {name: value for name, value in asdict(self).items() if name != "problems"}
        files = [without_home(file) for file in self.files]
        return numbers | {"path": without_home(self.path), "files": files}


def _agreed(number: int, what: str) -> str:
    """A phrase that begins with a plural verb, in the singular if the number is 1."""
    verb, _, rest = what.partition(" ")
    one = {"are": "is", "have": "has", "hold": "holds"} if number == 1 else {}
    return f"{one.get(verb, verb)} {rest}"


# --- records -----------------------------------------------------------------------------------


def _records(
    files: Sequence[SourceFile], limits: Limits
) -> Iterator[tuple[SourceFile, Reader, int, Record]]:
    """(file, its reader, index in the whole source, record) over all files."""
    before = 0
    for file in files:
        reader = make_reader(file, limits)
        empty = True
        for record in reader:
            empty = False
            yield file, reader, before + record.index, record
        if empty:
            raise DataError(f"{file.path}: there is no row in the file; remove it, or add rows")
        before += reader.count


def _fields(record: Record, limits: Limits) -> dict[str, Any]:
    """The fields of a record; raises BadRow if it has a problem."""
    if record.problem:
        raise BadRow(record.problem)
    if record.values is not None:
        return record.values
    assert record.text is not None
    return _parse(record.text, limits)


def _raw(reader: Reader, record: Record, values: dict[str, Any]) -> bytes:
    """The bytes of a row in selected.jsonl."""
    if isinstance(reader, LinesReader) and record.text is not None:
        return record.text
    return to_json(values)


def _parse(raw: bytes, limits: Limits) -> dict[str, Any]:
    """Parse the JSON object of a row strictly: UTF-8, no NaN, no repeated key."""
    if len(raw) > CHUNK_BYTES and (why := too_much_memory(raw)):
        raise BadRow(why)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise BadRow(
            f"byte {problem.start + 1} of the row (0x{raw[problem.start]:02x}) is not UTF-8; "
            "save the file as UTF-8"
        ) from None

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > limits.max_columns:
            raise BadRow(
                f"an object with {len(pairs):,} fields; {limits.max_columns:,} are allowed: keep "
                "only those with text"
            )
        row = dict(pairs)
        if len(row) < len(pairs):
            seen: set[str] = set()
            name = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise BadRow(f"field {ascii_safe(name)} is given twice in one object; keep one of them")
        return row

    def no_constant(name: str) -> None:
        raise BadRow(f"{name} is not valid JSON; remove it or write null")

    try:
        row = json.loads(text, parse_constant=no_constant, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as problem:
        raise BadRow(
            f"not valid JSON at column {problem.colno}: "
            f"{_comma(problem) or f'{problem.msg}; each line must be one complete JSON object'}"
        ) from None
    except RecursionError:
        raise BadRow("the JSON is nested too deeply; flatten the row") from None
    except BadRow:
        raise
    except ValueError as problem:  # an integer of thousands of digits
        raise BadRow(f"not valid JSON: {problem}; write a shorter number") from None
    if not isinstance(row, dict):
        raise BadRow(
            f"{kind(row)} where a JSON object is needed; write one object per row "
            "(jq -c '.[]' converts a file with one list to JSON Lines)"
        )
    return row


def _comma(problem: json.JSONDecodeError) -> str:
    """The comma that is the cause, and the cure; empty if another thing is."""
    before, after = problem.doc[: problem.pos].rstrip(), problem.doc[problem.pos :].strip()
    if problem.msg == "Extra data":
        return "" if after.strip(", ") else "a comma after the row; remove it"
    if problem.msg.startswith("Illegal trailing comma"):  # Python 3.13: at the comma
        before, after = f"{before},", after[1:].lstrip()
    if not before.endswith(",") or after[:1] not in ("}", "]", ","):
        return ""
    what = (
        "two commas side by side" if after[0] == "," else f"a comma before the closing {after[0]!r}"
    )
    return f"{what}; remove {'one' if after[0] == ',' else 'it'}"


def _row_id(values: dict[str, Any], raw: bytes, index: int) -> str:
    """A hash of the content, independent of its JSON formatting, followed by the index."""
    try:
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError):  # a table's own types: its JSON form is already canonical
        canonical = raw
    return f"{hashlib.sha256(canonical).hexdigest()[:16]}-{index}"


# --- rows --------------------------------------------------------------------------------------


def _source(values: dict[str, Any], name: str) -> str:
    """The source of a row: the text or number in the field that `data.source_field` names."""
    if name not in values:
        raise BadRow(
            f"field {name!r} missing (the row has {listed(list(values))}); add the row's source, or"
            " set data.source_field to the field that holds it"
        )
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRow(f"field {name!r} is {kind(value)}, must be text: the name of the row's source")
    if problem := source_problem(str(value)):
        raise BadRow(f"field {name!r} {problem}; write the name of the row's source")
    return str(value)


def source_problem(name: str) -> str:
    """Why a text cannot be the name of a source; empty if it can."""
    if not name.strip():
        return "is empty"
    if len(name) > LONGEST_SOURCE:
        return f"is longer than {LONGEST_SOURCE} characters"
    return "" if name.isprintable() else "holds a line break or a control character"


class _Collector:
    """Collects rows and problems while the files are read.

    `source_of` gives the source of a row from its file and its fields.
    """

    def __init__(
        self,
        config: DataConfig,
        report: DataReport,
        limits: Limits,
        source_of: Callable[[SourceFile, dict[str, Any]], str],
    ) -> None:
        self.config, self.report, self.limits = config, report, limits
        self.source_of = source_of
        self.rows: list[Row] = []
        self.num_taken = 0
        self._recognisers: dict[Path, Recogniser] = {}
        self._ids: set[int] = set()

    def add(self, file: SourceFile, reader: Reader, index: int, record: Record) -> None:
        """Add one record: a row, a problem, or a row that waits until its format is known."""
        if file.path not in self._recognisers:  # one per file, because a list may mix formats
            self._recognisers[file.path] = Recogniser(self.config, file.layout)
        recogniser = self._recognisers[file.path]
        place = f"{file.path}, {reader.unit} {record.line}"
        self.report.num_rows += 1
        try:
            values = _fields(record, self.limits)
            layout = recogniser.find(index, place, values)
            if layout is not None:
                content = conversation(values, layout)
                raw = _raw(reader, record, values)
                row_id = _row_id(values, raw, index)
                source = self.source_of(file, values)
                row = Row(index, row_id, raw, place=place, source=source, **content._asdict())
                self.rows.append(row)
                self.report.num_repeated_ids += self._is_repeated(values.get("id"))
        except BadRow as problem:
            self.report.add(index, place, str(problem))
            most, bad = self.limits.max_bad_rows, self.report.num_bad
            if bad > most and bad > 0.9 * self.report.num_rows:
                raise DataError(
                    f"{file.path}: {bad:,} of the first {self.report.num_rows:,} rows are bad, "
                    f"over {most:,} (max_bad_rows); check that the file is of its kind, or {RAISE}"
                ) from None
        if recogniser.layout is not None:
            self._settle(recogniser)

    def take(self, file: SourceFile) -> list[Row]:
        """The rows since the last call, which are of this file: of an entry with num_samples in
        dataset_info.json that many, by smallest hash."""
        rows, self.rows = self.rows, []
        if file.num_samples is not None and len(rows) > file.num_samples:
            chosen = sorted(rows, key=lambda row: row.id)[: file.num_samples]
            self.report.num_not_sampled += len(rows) - len(chosen)
            rows = sorted(chosen, key=lambda row: row.index)
        self.num_taken += len(rows)
        return rows

    def finish(self) -> None:
        for recogniser in self._recognisers.values():
            self._settle(recogniser)
        found = {r.layout.format: None for r in self._recognisers.values() if r.layout}
        self.report.format = ", ".join(found) or self.config.format

    def _settle(self, recogniser: Recogniser) -> None:
        for index, place, problem in recogniser.settle():
            self.report.add(index, place, problem)

    def _is_repeated(self, name: object) -> bool:
        """Whether an earlier row has this `id`; only hashes are kept, to save memory."""
        if not isinstance(name, str | int):
            return False
        number = hash(repr(name))
        known = number in self._ids
        self._ids.add(number)
        return known


def read_rows(
    path: str | Path,
    config: DataConfig,
    limits: Limits | None = None,
    key: str = "data.path",
    progress: Callable[[float, int], None] | None = None,
) -> tuple[list[Row], DataReport]:
    """Read the usable rows of a path, and report the others (`stream_rows`)."""
    report = DataReport(path=str(path))
    return list(stream_rows(report, config, limits, key, progress)), report


def stream_rows(
    report: DataReport,
    config: DataConfig,
    limits: Limits | None = None,
    key: str = "data.path",
    progress: Callable[[float, int], None] | None = None,
) -> Iterator[Row]:
    """The usable rows of `report.path` as they are read; the others are reported (data.bad_rows).

    `key` is the setting that names the path; only rows of data.path have a source. `progress` is
    called with the fraction of bytes read and the number of rows.
    """
    limits = limits or Limits()
    files = find_files(report.path, config, key)
    report.files = [str(file.path) for file in files]
    field_name = config.source_field if key == "data.path" else None
    several = key == "data.path" and len({file.source for file in files}) > 1

    def source_of(file: SourceFile, values: dict[str, Any]) -> str:
        if field_name is not None:
            return _source(values, field_name)
        return file.source if several else ""

    collector = _Collector(config, report, limits, source_of)
    sizes = {file.path: file.path.stat().st_size for file in files}
    total, finished, current = max(1, sum(sizes.values())), 0, files[0].path
    last = files[0]
    try:
        for file, reader, index, record in _records(files, limits):
            if file.path != current:
                finished, current = finished + sizes[current], file.path
            if file is not last:
                yield from collector.take(last)
                last = file
            collector.add(file, reader, index, record)
            if file.num_samples is None:
                yield from collector.take(file)
            if progress is not None and report.num_rows % _PROGRESS_ROWS == 0:
                done = finished + reader.share() * sizes[current]
                progress(min(1.0, done / total), report.num_rows)
        yield from collector.take(last)
        collector.finish()
    except DataError as problem:
        raise DataError([*report.bad[:SHOWN_PROBLEMS], *problem.problems]) from problem
    report.num_good = collector.num_taken
    settle(report, config.bad_rows, known=0)


def read_values(
    values: Iterable[Mapping[str, Any]], config: DataConfig
) -> tuple[list[Row], DataReport]:
    """The usable rows among rows in memory, as `read_rows` does for files."""
    limits, report = Limits(), DataReport(path="rows")
    reader, file = ValuesReader(values, limits), SourceFile(Path("rows"))
    name = config.source_field
    collector = _Collector(
        config, report, limits, lambda _, row: "" if name is None else _source(row, name)
    )
    for record in reader:
        collector.add(file, reader, record.index, record)
    collector.finish()
    report.num_good = len(collector.rows)
    settle(report, config.bad_rows, known=0)
    return collector.rows, report


def settle(report: DataReport, policy: str, known: int) -> None:
    """Apply data.bad_rows to the problems found after the first `known` ones."""
    if report.num_bad == known:
        return
    shown = report.bad[:SHOWN_PROBLEMS]
    total = f"{report.num_bad:,} of {counted(report.num_rows, 'row')} of {report.path} "
    total += _agreed(report.num_bad, "are bad")
    if policy != "skip":
        cure = "repair them, or leave them out with data.bad_rows=skip"
        raise DataError([*shown, f"{total} ({len(shown)} shown); {cure}"])
    if not report.num_good:
        raise DataError([*shown, f"{total} ({len(shown)} shown): no row is left; repair them"])


def source_lines(
    path: str | Path,
    rows: Iterable[int] | Mapping[int, str],
    config: DataConfig | None = None,
) -> dict[int, bytes]:
    """These rows by index, in source order: JSON lines byte for byte, others as compact JSON.

    `rows` are indices, or a mapping from index to row id. With ids, the content hash is compared,
    and a file that has changed since it was read is refused.
    """
    limits = Limits()
    ids = dict(rows) if isinstance(rows, Mapping) else dict.fromkeys(rows, "")
    lines: dict[int, bytes] = {}
    place = str(path)
    for file, reader, index, record in _records(find_files(str(path), config), limits):
        if index in ids:
            raw = _same(reader, record, index, ids[index], limits)
            if raw is None:
                place = f"{file.path}, {reader.unit} {record.line}"
                break
            lines[index] = raw
            if len(lines) == len(ids):
                return lines
        place = f"{file.path}, {reader.unit} {record.line + 1}"  # where a missing row would be
    if ids.keys() - lines.keys():
        raise DataError(
            f"{place}: not the row that was read before: the file has changed; restore it, or run "
            "the split again"
        )
    return lines


def _same(reader: Reader, record: Record, index: int, row_id: str, limits: Limits) -> bytes | None:
    """The bytes of a record; None if its id differs from `row_id` (an empty id matches any row)."""
    try:
        values = _fields(record, limits)
    except BadRow:
        return None
    raw = _raw(reader, record, values)
    return raw if not row_id or _row_id(values, raw, index) == row_id else None
