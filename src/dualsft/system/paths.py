"""Safe paths inside a run folder: all access to run folders goes through `RunPath`.

A run folder may come from an untrusted source, so no entry is assumed to be a plain file.
`RunPath` opens each path component relative to a directory file descriptor, never follows links,
accepts only regular files and folders, and never blocks on a pipe. A write creates a new file
instead of opening an existing one, so a hard link to a file elsewhere is replaced, not written
through. `RunPath` is deliberately not an `os.PathLike`, so it cannot be passed to `open`, pyarrow
or safetensors by mistake. For libraries that require a path, `checked` validates everything below
it and returns one to read from, `checked(for_writing=True)` also refuses hard links, and `made`
creates a folder and gives one to write to. The root folder is named by the user and may itself be a
link.

Not part of Algorithm 1.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dualsft.errors import RunError
from dualsft.system.bounds import (
    blocks_of,
    check_json,
    data_bytes,
    hollow,
    read_table,
    table_batches,
)

if TYPE_CHECKING:
    import pyarrow as pa

MAX_READ_BYTES = 256 << 20
"""Size limit of files that are read at once: JSON, text and figures."""
MAX_NOTED = 100
MAX_ENTRIES = 20_000
MAX_DEPTH = 32

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW  # O_NONBLOCK: a pipe must not block


def without_home(text: str) -> str:
    """The text with `~` for the user's home folder: what a run writes may be handed on."""
    home = os.path.expanduser("~").rstrip("/")
    return re.sub(rf"(?<![\w./-]){re.escape(home)}(?![\w-])", "~", text) if len(home) > 1 else text


_KINDS = {
    stat.S_IFLNK: "a symlink",
    stat.S_IFIFO: "a pipe, not a regular file",
    stat.S_IFSOCK: "a socket, not a regular file",
    stat.S_IFBLK: "a device, not a regular file",
    stat.S_IFCHR: "a device, not a regular file",
}


_noted: dict[RunPath, int] = {}  # files of run folders by number of their last reading, in order


def note_read(path: RunPath) -> None:
    """Remember a file whose content is used, so that an error can name it (`files_read`)."""
    if len(path.parts) > 1 and path.name != "manifest.json":
        number = num_reads() + 1
        _noted.pop(path, None)
        _noted[path] = number
        if len(_noted) > MAX_NOTED:
            del _noted[next(iter(_noted))]


def num_reads() -> int:
    """Number of the latest reading, for `files_read`."""
    return next(reversed(_noted.values()), 0)


def files_read(since: int = 0) -> list[RunPath]:
    """The files of stage folders whose content this process used after reading number `since`."""
    return [path for path, number in _noted.items() if number > since]


def wrong_kind(problem: IsADirectoryError | NotADirectoryError) -> str:
    """The message for a folder in the place of a file, or for a file in the place of a folder."""
    name = problem.filename2 or problem.filename
    if isinstance(problem, NotADirectoryError):
        return f"{name}: is, or lies in, a file where a folder belongs; move it away, and run again"
    return f"{name}: is a folder where a file belongs; remove it and run the same command again"


class RunPath:
    """A path in a run folder, which may or may not exist; methods follow `pathlib.Path`."""

    __slots__ = ("parts", "root")

    def __init__(self, root: str | os.PathLike[str] | RunPath, *names: str) -> None:
        """`root` is the run folder; a `RunPath` given here keeps its own root."""
        self.root: Path = root.root if isinstance(root, RunPath) else Path(root)
        start = root.parts if isinstance(root, RunPath) else ()
        self.parts: tuple[str, ...] = (*start, *(part for name in names for part in _split(name)))

    # --- names -----------------------------------------------------------------------------------

    def __truediv__(self, name: str | os.PathLike[str]) -> RunPath:
        return RunPath(self, os.fspath(name))

    def joinpath(self, *names: str) -> RunPath:
        return RunPath(self, *names)

    @property
    def name(self) -> str:
        return self.parts[-1] if self.parts else self.root.name

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> RunPath:
        assert self.parts, "a run folder's own parent is not part of it"
        return RunPath(self.root, *self.parts[:-1])

    def with_name(self, name: str) -> RunPath:
        return self.parent / name

    def with_suffix(self, suffix: str) -> RunPath:
        return self.with_name(Path(self.name).with_suffix(suffix).name)

    @property
    def location(self) -> Path:
        """The plain path, for messages and disk usage queries only. Never open it."""
        return self.root.joinpath(*self.parts)

    def __str__(self) -> str:
        return str(self.location)

    def __repr__(self) -> str:
        return f"RunPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunPath) and self.location == other.location

    def __lt__(self, other: RunPath) -> bool:
        return self.location < other.location

    def __hash__(self) -> int:
        return hash(self.location)

    # --- querying --------------------------------------------------------------------------------

    def is_file(self) -> bool:
        return self._kind() == stat.S_IFREG

    def is_dir(self) -> bool:
        return self._kind() == stat.S_IFDIR

    def exists(self) -> bool:
        return self._kind() is not None

    def is_taken(self) -> bool:
        """Whether any entry exists here, including links and special files."""
        return self._mode() is not None

    @property
    def size(self) -> int:
        """File size in bytes."""
        with self.open() as file:
            return os.fstat(file.fileno()).st_size

    def names(self) -> list[str]:
        """Sorted entry names, including links and special files; empty if the folder is missing."""
        try:
            folder = self._folder()
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            return sorted(os.listdir(folder))
        finally:
            os.close(folder)

    def glob(self, pattern: str) -> list[RunPath]:
        """Direct entries of the folder that match `pattern`."""
        return [self / name for name in self.names() if fnmatch.fnmatchcase(name, pattern)]

    def tree(self) -> tuple[dict[str, RunPath], list[str]]:
        """Return (regular files below by relative name, descriptions of refused entries)."""
        files: dict[str, RunPath] = {}
        states: dict[str, os.stat_result] = {}
        refused: list[str] = []
        waiting: list[tuple[str, RunPath]] = [("", self)]
        seen = 0
        while waiting:
            prefix, folder = waiting.pop()
            for name in folder.names():
                seen += 1
                if seen > MAX_ENTRIES or prefix.count("/") > MAX_DEPTH:
                    refused.append(
                        f"{prefix}{name} is one of more than {MAX_ENTRIES:,} entries, or deeper "
                        f"than {MAX_DEPTH} folders"
                    )
                    return dict(sorted(files.items())), refused
                place, shown = folder / name, f"{prefix}{name}"
                state = place._state()
                if state is None:
                    continue  # removed since it was listed
                if stat.S_ISREG(state.st_mode):
                    files[shown] = place
                    states[shown] = state
                elif stat.S_ISDIR(state.st_mode):
                    waiting.append((f"{shown}/", place))
                else:
                    refused.append(f"{shown} is {_described(state.st_mode)}")
        if not refused and hollow((state, blocks_of(state)) for state in states.values()):
            refused = _hollow_files(files, states)
        return dict(sorted(files.items())), sorted(refused)

    def checked(self, for_writing: bool = False) -> Path:
        """Validate everything below and return a plain path, for libraries that open files.

        `for_writing` also refuses hard links, which a library may write through.
        """
        if not self.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        files = {"": self}
        if self.is_dir():
            files, refused = self.tree()
            if refused:
                raise RunError("\n".join(f"{self}: {problem}; {_CURE}" for problem in refused))
        for path in files.values():
            state = path._state() if for_writing else None
            if state and stat.S_ISREG(state.st_mode) and state.st_nlink > 1:
                raise RunError(f"{path}: is a hard link; {_CURE}")
            note_read(path)
        return self.location

    @contextlib.contextmanager
    def made(self) -> Iterator[Path]:
        """Create this folder and yield a plain path of it, for libraries that write files into it.

        Until they are done only this user may enter it, and it starts empty, so nobody else can
        plant a link that their files would follow. On Linux the path leads through a handle of the
        folder, so swapping the folder for a link redirects nothing either.
        """
        self.mkdir(parents=True)
        folder = self._folder()
        try:
            shared = stat.S_IMODE(os.fstat(folder).st_mode)
            os.fchmod(folder, stat.S_IRWXU)
            if os.listdir(folder):
                raise RunError(f"{self}: something else writes here; run the same command again")
            by_handle = Path(f"/proc/self/fd/{folder}")
            yield by_handle if by_handle.is_dir() else self.checked()
            os.fchmod(folder, shared)
        finally:
            os.close(folder)

    # --- reading ---------------------------------------------------------------------------------

    def open(self, mode: str = "rb", buffering: int = -1) -> BufferedRandom:
        """Open a regular file for reading ("rb"), appending ("ab+") or as a new file ("wb",
        "wb+")."""
        if mode == "wb":
            self.unlink(missing_ok=True)
        flags = {
            "rb": os.O_RDONLY,
            "ab+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
            "wb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
            "wb+": os.O_RDWR | os.O_CREAT | os.O_EXCL,
        }[mode]
        return cast(BufferedRandom, os.fdopen(self.descriptor(flags), mode, buffering))

    def scratch(self) -> BufferedRandom:
        """A file without a name on the disk of this folder; closing it frees its space."""
        self.mkdir(exist_ok=True)
        path = self / f"scratch-{uuid.uuid4().hex}"
        file = path.open("wb+")
        path.unlink()
        return file

    def descriptor(self, flags: int) -> int:
        """Return a file descriptor of a regular file; for writing, hard links are refused."""
        if not self.parts:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        with self._beside() as (folder, name):
            try:
                file = os.open(name, flags | _FILE, 0o666, dir_fd=folder)
            except OSError as problem:
                raise self._explained(problem) from None
        found = os.fstat(file)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        read = stat.S_ISREG(found.st_mode) and (not writes or flags & os.O_APPEND)
        why = hollow([(found, blocks_of(found))]) if read else None
        why = hollow([(found, data_bytes(file))]) if why else None
        if stat.S_ISREG(found.st_mode) and not why and not (writes and found.st_nlink > 1):
            return file
        os.close(file)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        if stat.S_ISREG(found.st_mode):
            raise RunError(f"{self}: {f'has {why}' if why else 'is a hard link'}; {_CURE}")
        raise RunError(f"{self}: is {_described(found.st_mode)}; {_CURE}")

    def read_bytes(self, limit: int = MAX_READ_BYTES) -> bytes:
        note_read(self)
        with self.open() as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(limit + 1) if size <= limit else b""
        if size > limit or len(content) > limit:
            raise RunError(f"{self}: {size:,} bytes, over the limit of {limit:,}; {_CURE}")
        return content

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def read_json(self, limit: int = MAX_READ_BYTES) -> Any:
        content = self.read_bytes(limit)
        try:
            check_json(content)
        except ValueError as problem:
            raise RunError(f"{self}: {problem}; {_REMAKE}") from problem
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{'/'.join(self.parts[-2:])}: {problem}") from problem

    def read_table(self, columns: list[str] | None = None) -> pa.Table:
        note_read(self)
        with self.open() as file:
            try:
                return read_table(file, columns)
            except ValueError as problem:
                raise RunError(f"{self}: {problem}; {_REMAKE}") from problem

    def read_batches(self, rows: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Read a Parquet file in batches; the first one is empty and has the schema."""
        note_read(self)
        with self.open() as file:
            try:
                yield from table_batches(file, columns, rows)
            except ValueError as problem:
                raise RunError(f"{self}: {problem}; {_REMAKE}") from problem

    # --- writing ---------------------------------------------------------------------------------

    def write_bytes(self, content: bytes) -> None:
        with self.open("wb") as file:
            file.write(content)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def write_json(self, value: Any, ensure_ascii: bool = True) -> None:
        """Write indented JSON, the format of all stage summaries."""
        self.write_text(json.dumps(value, indent=2, ensure_ascii=ensure_ascii) + "\n")

    def write_table(self, table: pa.Table, **options: Any) -> None:
        import pyarrow.parquet as pq

        with self.open("wb") as file:
            pq.write_table(table, file, **options)

    def write_batches(self, tables: Iterator[pa.Table], **options: Any) -> None:
        """Write a Parquet file of at least one table, each as row groups of its own."""
        import pyarrow.parquet as pq

        first = next(tables)
        with self.open("wb") as file, pq.ParquetWriter(file, first.schema, **options) as writer:
            writer.write_table(first)
            for table in tables:
                writer.write_table(table)

    def replace_bytes(self, content: bytes) -> None:
        """Replace the content atomically: readers and crashes see the old or the new content."""
        temporary = self.with_name(f".{self.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.parent.fsync()

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        if not self.parts:
            self.root.mkdir(parents=parents, exist_ok=exist_ok)
            return
        if parents and not self.parent.exists():
            self.parent.mkdir(parents=True, exist_ok=True)
        with self._beside() as (folder, name):
            try:
                os.mkdir(name, dir_fd=folder)
            except FileExistsError:
                if not exist_ok or not self.is_dir():  # is_dir raises for a link
                    raise

    def rename(self, target: RunPath) -> None:
        with self._beside() as (here, name), target._beside() as (there, other):
            os.replace(name, other, src_dir_fd=here, dst_dir_fd=there)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file, or a link without following it."""
        try:
            with self._beside() as (folder, name):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove the entry if it exists: folders recursively, links without following them."""
        mode = self._mode()
        if mode is None:
            return
        if not stat.S_ISDIR(mode):
            self.unlink(missing_ok=True)
            return
        with self._beside() as (folder, name):
            _remove_folder(folder, name)

    def fsync(self) -> None:
        """Flush a file, or a folder's list of entries, to disk."""
        handle = self._folder() if self.is_dir() else self.descriptor(os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def share(self) -> None:
        """Apply the default permissions (umask); safetensors creates files as private."""
        mask = os.umask(0)
        os.umask(mask)
        with self.open() as file:
            os.fchmod(file.fileno(), 0o666 & ~mask)

    def link_to(self, source: RunPath) -> None:
        """Create a hard link to a file of another run, or a copy if links are not supported."""
        os.close(source.descriptor(os.O_RDONLY))  # raises unless it is a regular file
        with source._beside() as (there, other), self._beside() as (here, name):
            try:
                os.link(other, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
                return
            except FileNotFoundError:
                raise
            except OSError:  # different file system, or no support for hard links
                pass
        with source.open() as old, self.open("wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)

    # --- file descriptors ------------------------------------------------------------------------

    def _state(self) -> os.stat_result | None:
        """State of the entry, without following a link; None if it does not exist."""
        try:
            if not self.parts:
                return os.stat(self.root)
            with self._beside() as (folder, name):
                return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _mode(self) -> int | None:
        state = self._state()
        return None if state is None else state.st_mode

    def _kind(self) -> int | None:
        """S_IFREG or S_IFDIR, or None if it does not exist; raises for any other type."""
        mode = self._mode()
        if mode is None:
            return None
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return stat.S_IFMT(mode)
        raise RunError(f"{self}: is {_described(mode)}; {_CURE}")

    def _folder(self) -> int:
        """Open this folder component by component, without following links."""
        handle = os.open(self.root, _FOLDER)
        for depth, part in enumerate(self.parts, 1):
            try:
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
            except OSError as problem:
                raise RunPath(self.root, *self.parts[:depth])._explained(problem) from None
            finally:
                os.close(handle)
            handle = below
        return handle

    @contextlib.contextmanager
    def _beside(self) -> Iterator[tuple[int, str]]:
        """Yield (file descriptor of the parent folder, name in it)."""
        assert self.parts, "the run folder itself is not a place in it"
        folder = self.parent._folder()
        try:
            yield folder, self.name
        finally:
            os.close(folder)

    def _explained(self, problem: OSError) -> Exception:
        """The error to raise: a `RunError` for links and special files, else with the full path."""
        mode = None
        with contextlib.suppress(OSError):
            mode = os.lstat(self.location).st_mode
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return RunError(f"{self}: is {_described(mode)}; {_CURE}")
        return type(problem)(problem.errno, problem.strerror, str(self))


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(problem: BaseException) -> bool:
    """Whether the disk is full: nothing is wrong with a file that cannot be opened then."""
    return isinstance(problem, OSError) and problem.errno in FULL


_CURE = "a run folder holds plain files and folders only: remove it, or put a copy in its place"
_REMAKE = "remove the entry of the run folder that it belongs to, and run the same command again"


def _split(name: str) -> Iterator[str]:
    """Split a relative name into parts; refuse one that leaves the run folder."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise RunError(f"{name!r}: leads out of the run folder; give a name inside it")
    return (part for part in parts if part not in ("", "."))


def _hollow_files(files: dict[str, RunPath], states: dict[str, os.stat_result]) -> list[str]:
    """Describe the files that are sparse, one by one or in total."""
    refused: list[str] = []
    found: list[tuple[os.stat_result, int]] = []
    for name, path in files.items():
        try:
            file = path.descriptor(os.O_RDONLY)  # refuses one that is sparse itself
        except (OSError, RunError) as problem:
            if is_full(problem):
                raise
            refused.append(f"{name} cannot be read: {problem}")
            continue
        found.append((states[name], data_bytes(file)))
        os.close(file)
    if not refused and (why := hollow(found)):
        refused.append(f"its files have {why}")
    return refused


def _remove_folder(parent: int, name: str) -> None:
    """Remove a folder of any depth: folders in it are moved up, so nothing is recursive.

    `shutil.rmtree` fails on a thousand nested folders, which a received run folder may have.
    """
    top = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    try:
        while names := os.listdir(top):
            for one in names:
                if not _is_folder(top, one):
                    os.unlink(one, dir_fd=top)
                    continue
                below = os.open(one, _FOLDER | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for inner in os.listdir(below):
                        if _is_folder(below, inner):
                            new = f"{uuid.uuid4().hex}.removed"
                            os.rename(inner, new, src_dir_fd=below, dst_dir_fd=top)
                        else:
                            os.unlink(inner, dir_fd=below)
                finally:
                    os.close(below)
                os.rmdir(one, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _is_folder(parent: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _described(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "neither a file nor a folder")


Place = Path | RunPath
"""A path given by the user, or a path in a run folder. Open both with their `open` method."""


def run_path(place: Place | str) -> RunPath:
    """Convert to a `RunPath`."""
    return place if isinstance(place, RunPath) else RunPath(place)
