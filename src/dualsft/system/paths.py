"""The one way into a run folder: places that never lead out of it.

A run folder may come from a stranger, so nothing in it is trusted to be a plain file. `RunPath` is
a place in such a folder. It opens everything relative to a directory handle, one name at a time,
follows no link, accepts regular files and folders only, and never waits for a pipe. What is written
is a new file, never an existing one, so a hard link to a file elsewhere is replaced and not written
through. It is deliberately no `os.PathLike`: `open`, pyarrow or safetensors cannot be handed one by
mistake. A library that insists on a path gets it from `checked`, which looks at everything below it
first. The folder itself is the user's own words: that it is a link is fine.

It belongs to no line of Algorithm 1.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dualsft.errors import RunError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MAX_READ_BYTES = 256 << 20
"""The largest file that is read whole: JSON, text and figures."""
MAX_ENTRIES = 1_000_000
MAX_DEPTH = 32

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_HANDLES = os.open in os.supports_dir_fd  # Windows has none: there the names are looked at first

_KINDS = {
    stat.S_IFLNK: "a symlink",
    stat.S_IFIFO: "a pipe, not a regular file",
    stat.S_IFSOCK: "a socket, not a regular file",
    stat.S_IFBLK: "a device, not a regular file",
    stat.S_IFCHR: "a device, not a regular file",
}


class RunPath:
    """A place in a run folder, there or not; the methods are those of `pathlib.Path`."""

    __slots__ = ("parts", "root")

    def __init__(self, root: str | os.PathLike[str] | RunPath, *names: str) -> None:
        """`root` is the run folder; a `RunPath` stays below its own root."""
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
        """Where it is, for messages and for asking how full a disk is; never to be opened."""
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

    # --- looking ---------------------------------------------------------------------------------

    def is_file(self) -> bool:
        return self._kind() == stat.S_IFREG

    def is_dir(self) -> bool:
        return self._kind() == stat.S_IFDIR

    def exists(self) -> bool:
        return self._kind() is not None

    def is_taken(self) -> bool:
        """Whether anything is here, a link or a pipe too."""
        return self._mode() is not None

    @property
    def size(self) -> int:
        """Bytes of a file."""
        with self.open() as file:
            return os.fstat(file.fileno()).st_size

    def names(self) -> list[str]:
        """What a folder holds, links and special files too; empty where there is no folder."""
        try:
            folder = self._folder()
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            return sorted(os.listdir(folder))
        finally:
            _close(folder)

    def glob(self, pattern: str) -> list[RunPath]:
        """What is directly in a folder and matches."""
        return [self / name for name in self.names() if fnmatch.fnmatchcase(name, pattern)]

    def tree(self) -> tuple[dict[str, RunPath], list[str]]:
        """(regular files below, by relative name; what may not be there, in words)."""
        files: dict[str, RunPath] = {}
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
                mode = place._mode()
                if mode is None:
                    continue  # gone meanwhile
                if stat.S_ISREG(mode):
                    files[shown] = place
                elif stat.S_ISDIR(mode):
                    waiting.append((f"{shown}/", place))
                else:
                    refused.append(f"{shown} is {_described(mode)}")
        return dict(sorted(files.items())), sorted(refused)

    def checked(self) -> Path:
        """A path for a library that opens files itself, after a look at all that is below it."""
        if not self.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        if self.is_dir() and (refused := self.tree()[1]):
            raise RunError("\n".join(f"{self}: {problem}; {_CURE}" for problem in refused))
        return self.location

    # --- reading ---------------------------------------------------------------------------------

    def open(self, mode: str = "rb", buffering: int = -1) -> BufferedRandom:
        """A regular file to read ("rb"), to append to ("ab+") or to write anew ("wb")."""
        if mode == "wb":
            self.unlink(missing_ok=True)
        flags = {
            "rb": os.O_RDONLY,
            "ab+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
            "wb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        }[mode]
        return cast(BufferedRandom, os.fdopen(self.descriptor(flags), mode, buffering))

    def descriptor(self, flags: int) -> int:
        """A handle of a regular file; one to write to has no other name anywhere."""
        if not self.parts:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        with self._beside() as (folder, name):
            try:
                file = os.open(name, flags | _FILE | _NOFOLLOW, 0o666, dir_fd=folder)
            except OSError as problem:
                raise self._explained(problem) from None
        found = os.fstat(file)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if stat.S_ISREG(found.st_mode) and not (writes and found.st_nlink > 1):
            return file
        os.close(file)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        if stat.S_ISREG(found.st_mode):
            raise RunError(f"{self}: has a second name elsewhere (a hard link); {_CURE}")
        raise RunError(f"{self}: is {_described(found.st_mode)}; {_CURE}")

    def read_bytes(self, limit: int = MAX_READ_BYTES) -> bytes:
        with self.open() as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(limit + 1) if size <= limit else b""
        if size > limit or len(content) > limit:
            raise RunError(
                f"{self}: {size:,} bytes, more than the {limit:,} that are read; {_CURE}"
            )
        return content

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def read_json(self) -> Any:
        return json.loads(self.read_bytes())

    def read_table(self, columns: list[str] | None = None) -> pa.Table:
        import pyarrow.parquet as pq

        with self.open() as file:
            return pq.read_table(file, columns=columns)

    def parquet(self) -> pq.ParquetFile:
        """A Parquet file to be read piece by piece."""
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.open())

    # --- writing ---------------------------------------------------------------------------------

    def write_bytes(self, content: bytes) -> None:
        with self.open("wb") as file:
            file.write(content)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def write_json(self, value: Any, ensure_ascii: bool = True) -> None:
        """JSON in lines, as every summary of a stage is."""
        self.write_text(json.dumps(value, indent=2, ensure_ascii=ensure_ascii) + "\n")

    def write_table(self, table: pa.Table, **options: Any) -> None:
        import pyarrow.parquet as pq

        with self.open("wb") as file:
            pq.write_table(table, file, **options)

    def replace_bytes(self, content: bytes) -> None:
        """Give the file this content so that a reader, or a crash, sees the old or the new one."""
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
                if not exist_ok or not self.is_dir():  # which refuses a link
                    raise

    def rename(self, target: RunPath) -> None:
        with self._beside() as (here, name), target._beside() as (there, other):
            os.replace(name, other, src_dir_fd=here, dst_dir_fd=there)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file, or a link itself."""
        try:
            with self._beside() as (folder, name):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove whatever is here, a folder with all it holds, a link without what it leads to."""
        mode = self._mode()
        if mode is None:
            return
        if not stat.S_ISDIR(mode):
            self.unlink(missing_ok=True)
            return
        with self._beside() as (folder, name):
            shutil.rmtree(name, dir_fd=folder)

    def fsync(self) -> None:
        """Make a file, or a folder's list of names, durable."""
        if os.name == "nt":
            return
        handle = self._folder() if self.is_dir() else self.descriptor(os.O_RDONLY)
        if isinstance(handle, int):
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def share(self) -> None:
        """Give a file the permissions of any new file; safetensors makes its own private."""
        mask = os.umask(0)
        os.umask(mask)
        with self.open() as file:
            if os.name != "nt":
                os.fchmod(file.fileno(), 0o666 & ~mask)

    def link_to(self, source: RunPath) -> None:
        """Become a second name of a file of another run, or a copy where there are no such."""
        os.close(source.descriptor(os.O_RDONLY))  # it is a regular file
        with source._beside() as (there, other), self._beside() as (here, name):
            try:
                os.link(other, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
                return
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                pass
        with source.open() as old, self.open("wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)

    # --- handles ---------------------------------------------------------------------------------

    def _mode(self) -> int | None:
        """The type bits of what is here itself, were it a link; None where nothing is."""
        try:
            if not self.parts:
                return os.stat(self.root).st_mode
            with self._beside() as (folder, name):
                return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _kind(self) -> int | None:
        """S_IFREG or S_IFDIR; None where nothing is; what is neither is refused by name."""
        mode = self._mode()
        if mode is None:
            return None
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return stat.S_IFMT(mode)
        raise RunError(f"{self}: is {_described(mode)}; {_CURE}")

    def _folder(self) -> int | str:
        """A handle of this folder, reached name by name; its path where there are no handles."""
        if not _HANDLES:
            for depth in range(1, len(self.parts) + 1):
                RunPath(self.root, *self.parts[:depth])._refuse_link()
            return str(self)
        handle = os.open(self.root, _FOLDER)
        for depth, part in enumerate(self.parts, 1):
            try:
                below = os.open(part, _FOLDER | _NOFOLLOW, dir_fd=handle)
            except OSError as problem:
                raise RunPath(self.root, *self.parts[:depth])._explained(problem) from None
            finally:
                os.close(handle)
            handle = below
        return handle

    @contextlib.contextmanager
    def _beside(self) -> Iterator[tuple[int | None, str]]:
        """(a handle of the folder that this is in, its name there)."""
        assert self.parts, "the run folder itself is not a place in it"
        folder = self.parent._folder()
        try:
            if isinstance(folder, int):
                yield folder, self.name
            else:
                yield None, str(self)
        finally:
            _close(folder)

    def _refuse_link(self) -> None:
        if self.location.is_symlink():
            raise RunError(f"{self}: is a symlink; {_CURE}")

    def _explained(self, problem: OSError) -> Exception:
        """A link, told by name; other errors with the whole path."""
        mode = None
        with contextlib.suppress(OSError):
            mode = os.lstat(self.location).st_mode
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return RunError(f"{self}: is {_described(mode)}; {_CURE}")
        return type(problem)(problem.errno, problem.strerror, str(self))


_CURE = "a run folder holds plain files and folders only: remove it, or put a copy in its place"


def _split(name: str) -> Iterator[str]:
    """The parts of a relative name; a name that leads out is refused."""
    if name.startswith("/") or (os.name == "nt" and Path(name).drive) or "\0" in name:
        raise RunError(f"{name!r}: leads out of the run folder; give a name inside it")
    for part in name.split("/"):
        if part == "..":
            raise RunError(f"{name!r}: leads out of the run folder; give a name inside it")
        if part not in ("", "."):
            yield part


def _close(folder: int | str) -> None:
    if isinstance(folder, int):
        os.close(folder)


def _described(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "neither a file nor a folder")


Place = Path | RunPath
"""A path of the user's own, or a place in a run folder: both are opened by their `open`."""


def run_path(place: Place | str) -> RunPath:
    """A run folder, or a place in one, as what may be opened."""
    return place if isinstance(place, RunPath) else RunPath(place)
