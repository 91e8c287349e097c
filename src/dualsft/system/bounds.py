"""Resource limits for untrusted files: memory and time are bounded before a file is parsed.

A few kilobytes of JSON or Parquet can stand for gigabytes, and a sparse file has any size at no
cost. The limits follow from the bytes that are really there, so that honest files, whose content
hardly repeats itself, are never refused. Each function raises a `ValueError` that says what is too
large; the caller names the file and the cure. Not part of Algorithm 1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

TIMES_GIVEN = os.environ.get("DUALSFT_LIMITS") or "1"
TIMES_VALID = TIMES_GIVEN.isdecimal() and 1 <= int(TIMES_GIVEN) <= 1000
TIMES = int(TIMES_GIVEN) if TIMES_VALID else 1
"""Factor of every limit that a larger honest file may need; the user's word, never a file's."""
RAISE = "DUALSFT_LIMITS=10 in the environment makes the limits 10 times as large"
MAX_PARSED_BYTES = TIMES * (256 << 20)
"""Most memory that the values of a JSON file may need."""
ROW_BYTES = 512
"""Memory that a row needs besides its text."""
MAX_FOLDERS = TIMES * 20_000
"""Most folders that a pattern, or a folder of data, may search."""
FREE_BYTES = TIMES * (128 << 20)
"""Size below which sparse files and strongly compressed tables are accepted."""
MAX_HOLLOW = 8
"""Most times by which the size of files may exceed their space on disk."""
MAX_EXPANSION = 64
"""Most times by which the rows of a table may exceed the size of its file."""
BATCH_ROWS = 1024
MAX_EXTENTS = 100_000

_OBJECT, _LIST, _VALUE = 240, 90, 90  # bytes of a small dict, a list, and any value with its slot


def check_json(content: bytes, most: int = MAX_PARSED_BYTES) -> bytes:
    """Return the content unless its values, once parsed, would need too much memory."""
    need = (3 if content.isascii() else 6) * len(content)  # bytes, text of 1 to 4 times, a value
    for sign, cost in ((b"{", _OBJECT), (b"[", _LIST), (b",", _VALUE), (b":", _VALUE)):
        need += content.count(sign) * cost
    if need > most:
        raise ValueError(
            f"{len(content):,} bytes of JSON that need up to {need:,} bytes of memory, over the "
            f"limit of {most:,}"
        )
    return content


def hollow(files: Iterable[tuple[os.stat_result, int]]) -> str | None:
    """Why these files (state, bytes on disk) are refused together: sparse, or hard links."""
    stated, held, seen = 0, 0, set[tuple[int, int]]()
    for state, num_bytes in files:
        stated += state.st_size
        if (state.st_dev, state.st_ino) not in seen:
            seen.add((state.st_dev, state.st_ino))
            held += num_bytes
    if stated <= FREE_BYTES or stated <= MAX_HOLLOW * held:
        return None
    return f"{stated:,} bytes, of which {held:,} are on disk (a sparse file, or hard links)"


def blocks_of(state: os.stat_result) -> int:
    """Bytes on disk as `stat` says; zero on file systems that do not know, or not yet."""
    return state.st_blocks * 512


def data_bytes(file: int) -> int:
    """Bytes of an open file that are not holes; its size where the file system cannot tell."""
    size, at, total = os.fstat(file).st_size, 0, 0
    for _ in range(MAX_EXTENTS):
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
            at = os.lseek(file, start, os.SEEK_HOLE)
        except OSError as problem:
            total = total if problem.errno == errno.ENXIO else size  # ENXIO: no data behind `at`
            break
        total += at - start
        if at >= size:
            break
    os.lseek(file, 0, os.SEEK_SET)
    return total


def read_table(file: Any, columns: list[str] | None = None) -> pa.Table:
    """Read a Parquet file, or some of its columns, unless its rows are far larger than the file."""
    import pyarrow as pa

    found = list(table_batches(file, columns))
    return pa.Table.from_batches(found[1:], found[0].schema)


def table_batches(
    file: Any, columns: list[str] | None = None, rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The same in batches of `rows`; the first one is empty and has the schema.

    Strings are decoded only once their lengths are known, since a dictionary page repeats one
    string at no cost. Metadata of columns is not read: pyarrow crashes on some damage to it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = os.fstat(file.fileno()).st_size
    most, given = max(FREE_BYTES, MAX_EXPANSION * size), 0

    def check(num_bytes: int) -> None:
        if num_bytes > most:
            raise ValueError(
                f"its rows need more than {most:,} bytes, far more than the {size:,} of the file"
            )

    options: dict[str, Any] = {"pre_buffer": False, "thrift_container_size_limit": 1_000_000}
    try:
        plain = pq.ParquetFile(file, **options)
        names = plain.schema_arrow.names if columns is None else columns
        schema = pa.schema([plain.schema_arrow.field(name) for name in names])
        check(plain.metadata.num_rows * 4 * len(names))
        yield pa.RecordBatch.from_pylist([], schema)
        strings = [field.name for field in schema if pa.types.is_string(field.type)]
        parquet = pq.ParquetFile(file, read_dictionary=strings, **options)
        batches = parquet.iter_batches(min(rows, BATCH_ROWS), columns=names, use_threads=False)
        while True:
            with limited_memory(most + FREE_BYTES):
                batch = next(batches, None)
            if batch is None:
                return
            given += sum(_decoded_bytes(column) for column in batch.columns)
            check(given)
            for column in batch.columns:
                column.validate(full=True)
            yield batch.cast(schema)
    except (pa.ArrowException, MemoryError, OSError, KeyError) as problem:
        raise ValueError(f"not a Parquet table of a run: {str(problem)[:200]}") from problem


def _decoded_bytes(column: pa.Array) -> int:
    """Size of a column with every string written out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return column.nbytes
    lengths = pc.call_function("binary_length", [column.dictionary]).cast(pa.int64())
    return (pc.call_function("sum", [lengths.take(column.indices)]).as_py() or 0) + 4 * len(column)


@contextlib.contextmanager
def bounded(what: str, seconds: float, memory: int | None) -> Iterator[None]:
    """Let code that a file describes use this much processor time and this much more memory.

    Over either, it raises a ValueError that begins with `what`. Only in the main thread; what runs
    inside one call of a library is stopped when that returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_: int, __: FrameType | None) -> NoReturn:
        raise TimeoutError(f"it takes longer than {seconds:g} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with contextlib.nullcontext() if memory is None else limited_memory(memory):
            yield
    except (TimeoutError, MemoryError) as problem:
        raise ValueError(f"{what} ({problem!r}); {RAISE}") from problem
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class OverLimit(ValueError):
    """Work that was given up because it takes too long or too much memory."""


POLL_SECONDS = 0.05


def watched(what: str, action: Callable[[], T], seconds: float, memory: int) -> T:
    """Do what one call of a library does for long without returning to Python, within limits.

    Over these limits of processor time, or growth of the process, it raises an `OverLimit` that
    begins with `what`. The call runs in a thread of its own, since no signal can interrupt it; the
    library must release the GIL. After a refusal the thread works on until the process ends.
    """
    result: list[T] = []
    problems: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            result.append(action())
        except BaseException as problem:
            problems.append(problem)
        done.set()

    began, base = time.process_time(), _memory_in_use()[1]
    threading.Thread(target=work, daemon=True).start()
    while not done.wait(POLL_SECONDS):
        if time.process_time() - began > seconds:
            raise OverLimit(f"{what} takes longer than {seconds:.0f} seconds; {RAISE}")
        if _memory_in_use()[1] - base > memory:
            raise OverLimit(f"{what} needs more than {memory:,} bytes of memory; {RAISE}")
    if problems:
        raise problems[0]
    return result[0]


def tried(what: str, action: Callable[[], object], seconds: int, memory: int) -> None:
    """Do something once in a forked child, to see whether it stays within these limits.

    For a call that does not release the GIL. Over a limit, or when the call ends the child or
    panics in Rust, it raises an `OverLimit` that begins with `what`; any other exception in the
    child is ignored, and so is what the call writes to the terminal.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with limited_memory(memory):
                action()
            code = 0
        except Exception:
            code = 0  # the caller meets it again
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        limits = f"{seconds} seconds or {memory:,} bytes of memory"
        raise OverLimit(f"{what} takes more than {limits}, or crashes; {RAISE}")


def _memory_in_use() -> tuple[int, int]:
    """Address space and resident memory of this process, in bytes; zeros where not known."""
    if sys.platform != "linux":
        return 0, 0
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


@contextlib.contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Let the process grow by `extra` bytes at most: a page may claim gigabytes (Linux only)."""
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = _memory_in_use()[0]
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([used + extra, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
