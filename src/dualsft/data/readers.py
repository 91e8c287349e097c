"""Read text files as numbered records, streamed with bounded memory.

Reads JSON Lines, a JSON array (element by element), CSV and TSV, each plain or gzip.
`data/tables.py` has the same interface for Parquet and Arrow. A record is one row as it is in the
file: the JSON text, or the fields. A problem with one record is stored in the record, and reading
continues. Damage to the file itself (a truncated gzip file or a decompression bomb, a list or quote
that never closes, a line that never ends) raises a `DataError` that names the location. The records
are D_full of Algorithm 1 before any row is checked.

When a file has been read, `count` is the offset for the indices of the next file.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from dualsft.data.layouts import counted
from dualsft.errors import DataError
from dualsft.system.bounds import FREE_BYTES, RAISE, ROW_BYTES, TIMES, check_json

CHUNK_BYTES = 1 << 20
_LONGEST_FACTOR = 4
_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"
INDEX_COLUMN = "Unnamed: 0"
"""The name of a first column without one, as pandas reads it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Size limits; a file that exceeds one is refused. `DUALSFT_LIMITS=N` makes them larger."""

    max_line_bytes: int = TIMES * (32 << 20)
    """Bytes per row; reading stops at a line of more than four times as many."""
    max_expanded_bytes: int = TIMES * (64 << 30)
    """Bytes that a gzip file may expand to."""
    max_ratio: int = TIMES * 100
    """Times by which the rows of a compressed file may exceed it, once over `free_bytes`. A row
    counts as its bytes and `ROW_BYTES`."""
    free_bytes: int = FREE_BYTES
    free_text: int = TIMES * (4 << 20)
    """The same without `ROW_BYTES`: it takes seconds to tokenize."""
    max_columns: int = TIMES * 10_000
    """Fields per row."""
    max_blank_lines: int = TIMES * 1_000_000
    """Blank lines of a file that has not ten times as many others."""
    max_bad_rows: int = TIMES * 100_000
    """Bad rows, if there are not ten times as many good ones."""
    max_groups: int = TIMES * 10_000
    """Row groups of a Parquet file."""

    def most_bytes(self, packed: int) -> tuple[int, int]:
        """Bytes that a compressed file of this size may expand to: with `ROW_BYTES`, without."""
        with_rows, text = (
            min(self.max_expanded_bytes, max(free, self.max_ratio * packed))
            for free in (self.free_bytes, self.free_text)
        )
        return with_rows, text


@dataclass(slots=True)
class Record:
    """One row as it is in its file: JSON text, fields, or a problem."""

    index: int
    """0-based: the physical line minus one (JSON Lines, where blank lines count), or the number of
    the element (JSON array) or data row (CSV, tables)."""
    line: int
    """The physical line where the record begins, or the row of a table; 1-based."""
    text: bytes | None = None
    values: dict[str, Any] | None = None
    problem: str = ""


class Stream:
    """The bytes of a file, decompressed if it is gzip, and counted against the limits."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._zipped = is_gzip(path)
        self._size = path.stat().st_size
        self._file: BinaryIO = path.open("rb", buffering=CHUNK_BYTES)
        self._bytes: Any = gzip.GzipFile(fileobj=self._file) if self._zipped else self._file
        self._limits = limits
        self._most = limits.most_bytes(0)
        self._given = self._text = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        return self._counted(self._bytes.read(size))

    def readline(self, size: int) -> bytes:
        piece = self._bytes.readline(size)
        self.count(len(piece), rows=1)
        return piece

    def share(self) -> float:
        """Fraction of the file that has been read."""
        return self._file.tell() / max(1, self._size)

    def count(self, num_bytes: int, rows: int = 0) -> None:
        """Count bytes against the limits of a compressed file, which grow with what is read."""
        self._given += num_bytes + ROW_BYTES * rows
        self._text += num_bytes
        if self._zipped and (self._given > self._most[0] or self._text > self._most[1]):
            self._most = self._limits.most_bytes(self._file.tell())
            for given, most in zip((self._given, self._text), self._most, strict=True):
                if given > most:
                    raise _TooLarge(f"{most:,}")

    def _counted(self, piece: bytes) -> bytes:
        self.count(len(piece))
        return piece


class _TooLarge(Exception):
    """A gzip file expanded to more bytes than its limit."""


def too_much_memory(text: bytes) -> str | None:
    """Why a row is refused whose values would need far more memory than its text."""
    try:
        check_json(text)
    except ValueError as problem:
        return f"{problem} (MAX_PARSED_BYTES); shorten the row, or {RAISE}"
    return None


def is_gzip(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


class Reader(ABC):
    """Iterates over the records of one file, in order and only once."""

    unit: ClassVar[str] = "line"
    kind: ClassVar[str]

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self.count = 0
        self.at = 1
        """The current line or row, for error messages."""
        self._stream: Stream | None = None

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from self._records()
        except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
            raise self.damage(
                f"the gzip file is damaged or cut off here ({problem}); "
                "copy or download it again (gzip -t tests it)"
            ) from problem
        except _TooLarge as problem:
            raise self.damage(
                f"the gzip file expands to more than {problem} bytes (max_ratio is "
                f"{self.limits.max_ratio}; a row counts {ROW_BYTES} and its bytes, and its bytes "
                f"alone once past {self.limits.free_text:,}, free_text), which looks "
                f"like a decompression bomb; if it is not, give the unpacked file, or {RAISE}"
            ) from problem
        except OSError as problem:
            raise self.damage(f"cannot be read ({problem}); copy the file again") from problem

    @abstractmethod
    def _records(self) -> Iterator[Record]: ...

    def share(self) -> float:
        """Fraction of the file that has been read, between 0 and 1."""
        return self._stream.share() if self._stream else 0.0

    def damage(self, what: str) -> DataError:
        """An error for damage at the current location, as one printable line."""
        line = "".join(c if c.isprintable() else " " for c in what)
        return DataError(f"{self.path}, {self.unit} {self.at}: {' '.join(line.split())}")

    def check_kind(self, head: bytes, own: bytes = b"\0") -> None:
        """Refuse a file whose first bytes show another kind than its name."""
        for magic, kind, cure in _OTHER_KINDS:
            if head.startswith(magic) and magic != own:
                raise self.damage(f"the file is {kind}, not {self.kind}; {cure}")

    def _lines(self) -> Iterator[bytes | None]:
        """Every physical line without its newline; None for a line over the limit."""
        most = self.limits.max_line_bytes
        with Stream(self.path, self.limits) as self._stream:
            length = blank = 0
            most_blank = self.limits.max_blank_lines
            while piece := self._stream.readline(CHUNK_BYTES if length > most else most + 1):
                line = piece.removesuffix(b"\n")
                length += len(line)
                if length > _LONGEST_FACTOR * most:
                    raise self.damage(
                        f"the line does not end within {length:,} bytes; a row may have {most:,}: "
                        "check that this is a text file with one row per line"
                    )
                if length <= most or piece.endswith(b"\n"):
                    if self.at == 1 and length <= most:
                        self.check_kind(line)
                        line = line.removeprefix(_MARK)
                    yield line if length <= most else None
                    blank += not line or line.isspace()
                    if blank > most_blank and blank > 0.9 * self.at:
                        raise self.damage(
                            f"more than {most_blank:,} blank lines so far (max_blank_lines), and "
                            f"hardly any others; remove them, or {RAISE}"
                        )
                    self.at, length = self.at + 1, 0
            if length > most:
                yield None

    def _too_long(self) -> str:
        return (
            f"longer than {self.limits.max_line_bytes:,} bytes; split the row, or check that the "
            "file has one row per line"
        )


_OTHER_KINDS = (
    (b"\x1f\x8b", "gzip", "rename it to end in .gz (as in .jsonl.gz)"),
    (b"\xff\xfe", "UTF-16", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"\xfe\xff", "UTF-16", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"PAR1", "Parquet", "rename it to end in .parquet"),
    (b"ARROW1", "Arrow", "rename it to end in .arrow"),
    (b"PK\x03\x04", "a zip archive", "unpack it and give the file inside"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unpack it (zstd -d), or use gzip"),
    (b"BZh", "bzip2", "unpack it (bunzip2), or use gzip"),
    (b"\xfd7zXZ", "xz", "unpack it (xz -d), or use gzip"),
)


class LinesReader(Reader):
    """JSON Lines: one JSON object per line; blank lines give no record but count in the index."""

    kind: ClassVar[str] = "JSON"

    def _records(self) -> Iterator[Record]:
        for line in self._lines():
            self.count = self.at
            if line is None:
                yield Record(self.at - 1, self.at, problem=self._too_long())
            elif line.strip():
                yield Record(self.at - 1, self.at, text=line)


_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}\[\],]', re.DOTALL)
"""Tokens that determine where an element ends: strings, brackets, commas. A lone `"` opens a string
that continues beyond the buffer."""
_CLOSES = {b"}": b"{", b"]": b"["}


class ArrayReader(Reader):
    """A JSON array, read one element at a time; only the current element is in memory."""

    kind: ClassVar[str] = "JSON"

    def _records(self) -> Iterator[Record]:
        with Stream(self.path, self.limits) as self._stream:
            held = self._stream.read(CHUNK_BYTES)
            self.check_kind(held)
            start = held.index(b"[") + 1
            self.at += held.count(b"\n", 0, start)
            position, comma, closed = start, False, False
            opened = bytearray()
            while True:
                match = _TOKEN.search(held, position)
                if match is None or match[0] == b'"':
                    position = (len(held) if match is None else match.start()) - start
                    held, start = self._more(held[start:], closed), 0
                    continue
                position, token = match.end(), match[0]
                if opened and token in _CLOSES:
                    if opened.pop() != ord(_CLOSES[token]):
                        self.at += _blank_lines(held[start:])
                        raise self.damage(
                            "a bracket or brace never closes in the element that begins here; "
                            "repair the JSON"
                        )
                    closed = not opened
                elif not opened and token in (b",", b"]"):
                    raw = held[start : match.start()]
                    if raw.strip(_SPACE) or comma or token == b",":
                        yield self._element(raw)
                    self.at += raw.count(b"\n")
                    start, comma, closed = match.end(), True, False
                    if token == b"]":
                        break
                elif not opened and (closed or token == b"}"):
                    self.at += held.count(b"\n", start, match.start())
                    what = "a } is unmatched" if token == b"}" else "a comma is missing before this"
                    raise self.damage(f"{what} in the JSON list; repair the file")
                elif token in (b"{", b"["):
                    opened += token
            self._check_end(held[start:])

    def _more(self, held: bytes, closed: bool) -> bytes:
        """The bytes held for this element plus at least as many new ones.

        Doubling the buffer keeps the total time linear in the length of the element.
        """
        assert self._stream is not None
        if len(held) > CHUNK_BYTES and (why := too_much_memory(held)):
            self.at += _blank_lines(held)
            raise self.damage(f"the element that begins here has {why}")
        if len(held) > self.limits.max_line_bytes:
            self.at += _blank_lines(held)
            raise self.damage(
                f"the element that begins here is longer than {self.limits.max_line_bytes:,} "
                "bytes; split it, or check the file for a quote or bracket that never closes"
            )
        more = self._stream.read(max(CHUNK_BYTES, len(held)))
        if not more and closed:
            self.at += held.count(b"\n")
            raise self.damage("the JSON list does not end: the last ] is missing; add it")
        if not more:
            self.at += _blank_lines(held)
            raise self.damage(
                "the JSON list does not end: the element that begins here is cut off, or a quote "
                "or bracket in it never closes; copy the file again or repair it"
            )
        return held + more

    def _element(self, raw: bytes) -> Record:
        assert self._stream is not None
        self._stream.count(0, rows=1)
        text = raw.strip(_SPACE)
        record = Record(self.count, self.at + (_blank_lines(raw) if text else 0), text)
        if not text:
            record.problem = "no element next to a comma; remove the comma"
        elif len(text) > self.limits.max_line_bytes:
            record.problem = self._too_long()
        self.count += 1
        return record

    def _check_end(self, rest: bytes) -> None:
        assert self._stream is not None
        while rest:
            if rest.strip(_SPACE):
                self.at += _blank_lines(rest)
                raise self.damage("there is text after the end of the JSON list; remove it")
            self.at += rest.count(b"\n")
            rest = self._stream.read(CHUNK_BYTES)


def _blank_lines(text: bytes) -> int:
    """Number of newlines before the first non-space byte."""
    return text.count(b"\n", 0, len(text) - len(text.lstrip(_SPACE)))


def json_reader(path: Path, limits: Limits) -> Reader:
    """The reader for a .json file: a single list, or JSON Lines."""
    probe = LinesReader(path, limits)
    try:
        with Stream(path, limits) as stream:
            head = stream.read(CHUNK_BYTES).removeprefix(_MARK).lstrip(_SPACE)
    except (EOFError, zlib.error, OSError, _TooLarge):
        return probe  # it raises the same error with the location
    return ArrayReader(path, limits) if head.startswith(b"[") else probe


class CsvReader(Reader):
    """CSV with a header (RFC 4180: quotes doubled inside quotes, which may hold newlines).

    The delimiter is the one of `delimiters` that the header has. The first column may have no name
    (the index that pandas writes).
    """

    kind: ClassVar[str] = "CSV"
    delimiters: ClassVar[str] = ",;\t|"

    def _records(self) -> Iterator[Record]:
        self._began, self._pulled, self._ended = 1, 0, False
        before = csv.field_size_limit(self.limits.max_line_bytes)
        try:
            self._found_delimiter = self._delimiter()
            rows = csv.reader(self._text(), delimiter=self._found_delimiter, strict=True)
            names: list[str] = []
            while (cells := self._next(rows)) is not None:
                if isinstance(cells, str) or (cells and names):
                    yield self._row(names, cells)
                elif cells:
                    names = self._header(cells)
        finally:
            csv.field_size_limit(before)

    def _delimiter(self) -> str:
        """The delimiter in the first line that is not blank; what is quoted does not count."""
        if len(self.delimiters) == 1:
            return self.delimiters
        with Stream(self.path, self.limits) as stream:
            head = stream.read(CHUNK_BYTES).removeprefix(_MARK).lstrip(b"\r\n")
        self.check_kind(head)
        header = re.sub(rb'"[^"]*"?', b"", head).partition(b"\n")[0].decode("utf-8", "replace")
        found = [mark for mark in self.delimiters if mark in header]
        if len(found) > 1:
            raise self.damage(
                f"the header has {' and '.join(map(repr, found))}, so its delimiter is not clear; "
                "put a column name that holds one of them in quotes"
            )
        return found[0] if found else ","

    def _text(self) -> Iterator[str]:
        for line in self._lines():
            if line is None:
                raise self.damage(self._too_long())
            self._pulled = self.at
            # bad bytes become surrogates, so that only the rows that hold them are bad
            yield line.decode("utf-8", "surrogateescape") + "\n"
        self._ended = True

    def _next(self, rows: Iterator[list[str]]) -> list[str] | str | None:
        """The cells of the next record, the problem with it, or None at the end."""
        self._began = self._pulled + 1
        try:
            return next(rows)
        except StopIteration:
            return None
        except csv.Error as problem:
            if self._ended or "field larger" in str(problem):
                self.at = self._began
                raise self.damage(
                    "a quote that opens in this record is never closed, or the field is longer "
                    f"than {self.limits.max_line_bytes:,} bytes ({problem}); close the quote "
                    "(write a quote inside a quoted field twice)"
                ) from None
            return f"not valid CSV: {problem}; write a quote inside a quoted field twice"

    def _header(self, cells: list[str]) -> list[str]:
        if len(cells) > self.limits.max_columns:
            raise self.damage(
                f"the header has {len(cells):,} columns; {self.limits.max_columns:,} are allowed: "
                "keep only those with text"
            )
        if len(cells) > 1 and not cells[0].strip():
            cells = [INDEX_COLUMN, *cells[1:]]
        for number, name in enumerate(cells, 1):
            if not name.strip():
                raise self.damage(
                    f"column {number} has no name; name it in the header, or remove it"
                )
            if cells.index(name) != number - 1:
                raise self.damage(f"the header names {name[:60]!r} twice; rename one column")
            if not name.isprintable() and _undecoded(name):
                raise self.damage(f"the name of column {number} is not UTF-8; save it as UTF-8")
        return cells

    def _row(self, names: list[str], cells: list[str] | str) -> Record:
        record = Record(self.count, self._began)
        self.count += 1
        if isinstance(cells, str):
            record.problem = cells
        elif len(cells) != len(names):
            cure = "add the missing one, empty if it has no text"
            if len(cells) > len(names):
                cure = "quote a field that holds the delimiter, a quote or a newline"
            record.problem = (
                f"the row has {counted(len(cells), 'field')} and the header {len(names):,}, "
                f"delimited by {self._found_delimiter!r}; {cure}"
            )
        else:
            record.values = dict(zip(names, cells, strict=True))
            bad = next(((n, b) for n, c in record.values.items() if (b := _undecoded(c))), None)
            if bad is not None:
                record.problem = (
                    f"field {bad[0][:60]!r} has a byte (0x{ord(bad[1]) & 0xFF:02x}) that is not "
                    "UTF-8; save the file as UTF-8"
                )
        return record


class TsvReader(CsvReader):
    """CSV with tabs as delimiters."""

    delimiters: ClassVar[str] = "\t"


class ValuesReader(Reader):
    """Rows in memory, as mappings."""

    unit: ClassVar[str] = "row"
    kind: ClassVar[str] = "rows"

    def __init__(self, rows: Iterable[Mapping[str, Any]], limits: Limits) -> None:
        super().__init__(Path("rows"), limits)
        self._rows = rows

    def _records(self) -> Iterator[Record]:
        for index, row in enumerate(self._rows):
            problem = "" if isinstance(row, Mapping) else "is no mapping of fields; give a dict"
            values = dict(row) if isinstance(row, Mapping) else None
            yield Record(index, index + 1, values=values, problem=problem)


_SURROGATE = re.compile("[\udc80-\udcff]")


def _undecoded(text: str) -> str:
    """The first byte that was not UTF-8, as its surrogate escape; empty if there is none."""
    found = _SURROGATE.search(text) if not text.isascii() else None
    return found[0] if found else ""
