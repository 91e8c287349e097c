"""Read Parquet and Arrow files as numbered records, a few hundred rows at a time.

Not part of Algorithm 1. Same interface as `data/readers.py`; the location of a record is its
1-based row. Declared sizes are checked in the file's metadata before a column is read, so a small
file that declares a huge column is refused. Repeated strings stay dictionary-encoded while a batch
is read. Arrow files are in the IPC file or stream format, as written by Hugging Face `datasets` and
Feather.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dualsft.data.readers import CHUNK_BYTES, Reader, Record, Stream, is_gzip
from dualsft.errors import DataError
from dualsft.system.bounds import FREE_BYTES, RAISE, ROW_BYTES, limited_memory

_BATCH_ROWS = 256
_DAMAGE = (pa.ArrowException, ValueError, OverflowError, OSError, EOFError, MemoryError)
"""What pyarrow raises on a damaged file; an invalid length can raise MemoryError."""


class TableReader(Reader):
    """Code shared by Parquet and Arrow: decompression, column checks, batches to records."""

    unit: ClassVar[str] = "row"
    magic: ClassVar[bytes]
    _total: int = 0
    _given: int = 0
    _text: int = 0

    def _records(self) -> Iterator[Record]:
        self._size = self.path.stat().st_size
        try:
            with self._opened() as file:
                batches = self._batches(file)
                while batch := self._next(batches):
                    for start in range(0, batch.num_rows, _BATCH_ROWS):
                        yield from self._rows(batch.slice(start, _BATCH_ROWS))
        except DataError:
            raise
        except _DAMAGE as problem:
            if is_gzip(self.path) and isinstance(problem, OSError | EOFError):
                raise  # the base class reports it as gzip damage
            reason = str(problem)[:200]
            raise self.damage(
                f"the {self.kind} file is damaged, cut off or of another kind ({reason}); "
                "write it again, or give the file its right suffix"
            ) from problem

    def _next(self, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
        """The next batch, in bounded memory: a page may claim gigabytes."""
        most, _ = self.limits.most_bytes(self._size)
        with limited_memory(most + FREE_BYTES):
            return next(batches, None)

    @abstractmethod
    def _batches(self, file: Any) -> Iterator[pa.RecordBatch]:
        """The rows of an open file, a few hundred at a time."""

    def share(self) -> float:
        return self.count / self._total if self._total else 0.0

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The open file; a gzip file is first decompressed into a temporary file."""
        if not is_gzip(self.path):
            with self.path.open("rb") as file:
                self._check_head(file)
                yield file
            return
        with Stream(self.path, self.limits) as stream, tempfile.TemporaryFile() as unpacked:
            while piece := stream.read(CHUNK_BYTES):
                unpacked.write(piece)
            unpacked.seek(0)
            self._check_head(unpacked)
            yield unpacked

    def _check_head(self, file: Any) -> None:
        self.check_kind(file.read(8), self.magic)
        file.seek(0)

    def _check_columns(self, schema: pa.Schema) -> None:
        if len(schema.names) > self.limits.max_columns:
            raise self.damage(
                f"the file has {len(schema.names):,} columns; {self.limits.max_columns:,} are "
                "allowed: keep only those with text"
            )
        if twice := [name for name, times in Counter(schema.names).items() if times > 1]:
            raise self.damage(f"column {twice[0][:60]!r} occurs twice; rename one of them")

    def _rows(self, batch: pa.RecordBatch) -> Iterator[Record]:
        for column in batch.columns:
            _check_column(column)
        sizes = _row_bytes(batch)
        self._text += int(sizes.sum())
        self._given += int(sizes.sum()) + ROW_BYTES * batch.num_rows
        self._check_given(self._given, self._text)
        for fields in self._values(batch, sizes > self.limits.max_line_bytes):
            record = Record(self.count, self.count + 1)
            if isinstance(fields, str):
                record.problem = fields
            else:
                record.values = fields
            self.count += 1
            self.at = self.count + 1
            yield record

    def _check_given(self, num_bytes: int, text: int = 0) -> None:
        most, most_text = self.limits.most_bytes(self._size)
        if num_bytes > most or text > most_text:
            raise self.damage(
                f"the rows hold more than {num_bytes:,} bytes in a file of {self._size:,} "
                f"(max_ratio is {self.limits.max_ratio}; a row counts {ROW_BYTES} and its bytes, "
                f"and its bytes alone once past {self.limits.free_text:,}, free_text), "
                "which looks like a decompression bomb; if it is not, write it as JSON Lines, or "
                + RAISE
            )

    def _values(self, batch: pa.RecordBatch, long: np.ndarray) -> list[dict[str, Any] | str]:
        """The fields of every row, or the problem with it; rows marked `long` are not converted."""
        if not long.any():
            try:
                return _without_nanoseconds(batch).to_pylist()
            except (ValueError, OverflowError, pa.ArrowException):
                pass  # convert row by row to find the bad one
        return [
            self._too_long() if long[i] else self._row_alone(batch, i)
            for i in range(batch.num_rows)
        ]

    def _row_alone(self, batch: pa.RecordBatch, i: int) -> dict[str, Any] | str:
        fields: dict[str, Any] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                fields[name] = column[i].as_py()
            except UnicodeDecodeError as problem:
                return (
                    f"field {name[:60]!r} has a byte at {problem.start + 1} that is not UTF-8; "
                    "write the column as UTF-8 text"
                )
            except (ValueError, OverflowError, pa.ArrowException) as problem:
                return f"field {name[:60]!r} cannot be read ({str(problem)[:100]}); remove it"
        return fields


def _check_column(column: pa.Array) -> None:
    """Raise on invalid offsets, which would crash the process.

    Invalid UTF-8 in a text column is not an error here; the rows that contain it become bad rows.
    """
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as problem:
        if "UTF8" not in str(problem):
            raise
        if pa.types.is_dictionary(column.type):
            inside = column.indices.drop_null().to_numpy(zero_copy_only=False)
            if len(inside) and not 0 <= inside.min() <= inside.max() < len(column.dictionary):
                raise
            return _check_column(column.dictionary)
        if not _is_binary(column.type):
            raise
        large = pa.types.is_large_string(column.type)
        column.view(pa.large_binary() if large else pa.binary()).validate(full=True)


def _row_bytes(batch: pa.RecordBatch) -> np.ndarray:
    """The size of each row's values; small nested columns count by their mean."""
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        kind = column.type
        if pa.types.is_dictionary(kind) and _is_binary(kind.value_type):
            lengths = pc.call_function("binary_length", [column.dictionary]).take(column.indices)
            sizes += lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        elif _is_binary(kind):
            lengths = pc.call_function("binary_length", [column]).fill_null(0)
            sizes += lengths.to_numpy(zero_copy_only=False).astype(np.int64)
        elif column.nbytes < CHUNK_BYTES:
            sizes += column.nbytes // max(1, len(column))
        else:
            sizes += np.array([column.slice(i, 1).nbytes for i in range(len(column))], np.int64)
    return sizes


def _is_binary(kind: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    return any(test(kind) for test in tests) or pa.types.is_large_binary(kind)


def _without_nanoseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert nanosecond columns to text; Python has no type for them."""
    columns = [
        column.cast(pa.string()) if getattr(column.type, "unit", "") == "ns" else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


class ParquetReader(TableReader):
    """Parquet, read in batches after its declared sizes are checked."""

    kind: ClassVar[str] = "Parquet"
    magic: ClassVar[bytes] = b"PAR1"

    def _batches(self, file: Any) -> Iterator[pa.RecordBatch]:
        options: dict[str, Any] = {
            "pre_buffer": False,
            "thrift_container_size_limit": 50 * self.limits.max_columns,
        }
        parquet = pq.ParquetFile(file, **options)
        self._total = parquet.metadata.num_rows
        self._check_columns(parquet.schema_arrow)
        self._check_sizes(parquet.metadata)
        shared = [f.name for f in parquet.schema_arrow if pa.types.is_string(f.type)]
        # dictionary-encoded strings are not copied for every row that repeats them
        parquet = pq.ParquetFile(file, read_dictionary=shared, **options)
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)

    def _check_sizes(self, metadata: pq.FileMetaData) -> None:
        """Refuse a row group far larger than its file, or with rows over the limit.

        Column metadata is not read: pyarrow crashes on some kinds of damage to it.
        """
        self._check_given(ROW_BYTES * metadata.num_rows)
        if metadata.num_row_groups > self.limits.max_groups:
            raise self.damage(
                f"the file has {metadata.num_row_groups:,} row groups; {self.limits.max_groups:,} "
                f"are allowed (max_groups): write it again with more rows in each, or {RAISE}"
            )
        for g in range(metadata.num_row_groups):
            group = metadata.row_group(g)
            a_row = group.total_byte_size // max(1, group.num_rows)
            large = group.total_byte_size > self.limits.most_bytes(self._size)[0]
            if large or a_row > self.limits.max_line_bytes:
                raise self.damage(
                    f"the rows from here on declare {group.total_byte_size:,} bytes ({a_row:,} per "
                    f"row) in a file of {self._size:,}, which looks like a decompression bomb; "
                    "write the file again without the large column"
                )


class ArrowReader(TableReader):
    """Arrow IPC, in file or stream format."""

    kind: ClassVar[str] = "Arrow"
    magic: ClassVar[bytes] = b"ARROW1"

    def _batches(self, file: Any) -> Iterator[pa.RecordBatch]:
        head = file.read(8)
        file.seek(0)
        if head.startswith(b"FEA1"):
            raise self.damage("Feather version 1 is not supported; write it again as version 2")
        if head.startswith(b"ARROW1"):
            reader = pa.ipc.open_file(file)
            self._check_columns(reader.schema)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)
            return
        with pa.ipc.open_stream(file) as stream:
            self._check_columns(stream.schema)
            yield from stream


def to_json(fields: dict[str, Any]) -> bytes:
    """A row as one compact JSON object, fields in order; values without a JSON type as text."""
    try:
        text = json.dumps(
            fields, ensure_ascii=False, separators=(",", ":"), default=_plain, allow_nan=False
        )
    except ValueError:  # NaN and infinity are not valid JSON
        return to_json(_finite(fields))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair can only be written as an escape
        return json.dumps(fields, separators=(",", ":"), default=_plain).encode("ascii")


def _plain(value: object) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
