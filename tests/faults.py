"""The command line in forked children of a warm parent: killed, cut short, or on a failing disk.

A cold start costs seconds, so `Launcher` starts one process that has imported everything and forks
a child for each run: a real process, which a test may SIGKILL at any moment. A child can be told to
`break` at the k-th call that changes a run folder (open, write, fsync, rename, unlink, mkdir,
rmdir, truncate, and the files that safetensors and pyarrow write): either it dies there without
cleaning up, the write half done, or the call fails with an error of the disk.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualsft.storage.resume import KEPT, Pieces

DIED = 77
"""Exit status of a child that broke off at an I/O call."""


@dataclass(frozen=True)
class Fault:
    """What happens at the k-th change of a folder: `error` 0 ends the process there."""

    folder: Path
    at: int
    error: int = 0
    keeps_failing: bool = False
    """A full disk stays full; otherwise the next call works again."""


class _Breaker:
    """Counts the calls that change files under a folder and breaks off at one of them."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.root = os.path.realpath(fault.folder)
        self.calls: list[str] = []
        """What was called on which file, in order."""

    def ours(self, path: Any) -> bool:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        try:
            return os.path.realpath(os.fspath(path)).startswith(self.root)
        except (TypeError, ValueError):
            return False

    def hit(self, name: str, path: Any) -> bool:
        """One more call; whether it is the one (or a later one of a disk that stays broken)."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        gone = name in ("unlink", "remove") and not os.path.lexists(path)
        name = "look" if name in LEAVES_AS_IT_IS or gone else name
        self.calls.append(f"{name} {os.path.relpath(os.path.realpath(path), self.root)}")
        count, at = len(self.calls), self.fault.at
        return count == at or (self.fault.keeps_failing and count > at)

    def act(self, path: Any) -> None:
        if not self.fault.error:
            os._exit(DIED)
        raise OSError(self.fault.error, os.strerror(self.fault.error), str(path))

    def guard(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, which gets its path or descriptor first."""

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            reads = name == "open" and not args[0] & (os.O_WRONLY | os.O_RDWR)
            folder = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
            place = path
            if folder is not None:  # the name is relative to a directory handle
                place = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
            if self.ours(place) and self.hit("look" if reads else name, place):
                self.act(place)
            return real(path, *args, **kwargs)

        call.__name__ = name
        return call

    def open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            changes = any(letter in mode for letter in "wax+") and self.ours(file)
            if changes and self.hit("open", file):
                self.act(file)
            stream = real(file, mode, *args, **kwargs)
            return _Stream(stream, self, file) if changes else stream

        return call

    def whole(self, real: Callable[..., Any], where: Callable[..., Any]) -> Callable[..., Any]:
        """A library that writes a whole file by itself: break with half of it there."""

        def call(*args: Any, **kwargs: Any) -> Any:
            path = where(*args, **kwargs)
            if not (self.ours(path) and self.hit("save", path)):
                return real(*args, **kwargs)
            real(*args, **kwargs)
            os.truncate(path, os.path.getsize(path) // 2)
            if self.fault.error and "safetensors" in str(path):
                from safetensors import SafetensorError

                text = os.strerror(self.fault.error)
                raise SafetensorError(f"I/O error: {text} (os error {self.fault.error})")
            self.act(path)
            raise AssertionError

        return call

    def install(self) -> None:
        import pyarrow.parquet as parquet
        import safetensors.torch as safe

        for name in ("open", "fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"):
            setattr(os, name, self.guard(name, getattr(os, name)))
        for name in ("write", "ftruncate", "chmod"):
            setattr(os, name, self.guard(name, getattr(os, name)))
        builtins.open = io.open = self.open(builtins.open)  # type: ignore[assignment]
        write_table = self.whole(parquet.write_table, lambda table, where, **_: where)
        parquet.write_table = write_table  # type: ignore[assignment]
        inner: Any = safe.__dict__
        real = inner["serialize_file"]
        inner["serialize_file"] = self.whole(real, lambda tensors, path, *_, **__: path)


class _Stream:
    """A file opened for writing, whose writes count; a broken one leaves half of its bytes."""

    def __init__(self, stream: Any, breaker: _Breaker, path: Any) -> None:
        self._stream, self._breaker, self._path = stream, breaker, path

    def write(self, data: Any) -> int:
        if self._breaker.hit("write", self._path):
            self._stream.write(data[: len(data) // 2])
            self._stream.flush()
            self._breaker.act(self._path)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Stream:
        self._stream.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> Any:
        return self._stream.__exit__(*exc_info)

    def __iter__(self) -> Any:
        return iter(self._stream)


# --- in this process ----------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


class Interrupting(Pieces):
    """Dies after some ticks, behind the save."""

    ticks_left = 10**9

    def tick(self, name: str, snapshot: Any, where: str) -> None:
        super().tick(name, snapshot, where)
        self.ticks_left -= 1
        if self.ticks_left <= 0:
            raise Killed

    @property
    def ticks(self) -> int:
        """How many there were."""
        return 10**9 - self.ticks_left


def cut_off(compute: Callable[[Pieces], object], folder: Path, ticks: int) -> Interrupting:
    """Compute, die after that many ticks; what a second start finds in the folder."""
    first = Interrupting(folder, "abc", every=0)
    first.ticks_left = ticks
    try:
        compute(first)
    except Killed:
        return Interrupting(folder, "abc", every=0)
    raise AssertionError("it was over before it was killed")


@contextmanager
def stopped_at(tick: int, label: str, end: BaseException) -> Iterator[None]:
    """A run in this process ends at the n-th tick of a loop, behind its save."""
    real, seen = Pieces.tick, [0]

    def spy(self: Pieces, name: str, *rest: Any) -> None:
        real(self, name, *rest)
        seen[0] += name == label
        if seen[0] == tick and name == label:
            raise end

    Pieces.tick = spy  # type: ignore[method-assign]
    try:
        yield
    except type(end):
        return
    finally:
        Pieces.tick = real  # type: ignore[method-assign]
    raise AssertionError("it was over before it was stopped")


def soak(folder: Path, cycles: int) -> None:
    """Save, load and rotate: no descriptor more, 16 MB at most, no more folders than are kept."""

    def held() -> tuple[int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * resource.getpagesize()

    before, most = (0, 0), 0
    for number in range(cycles):
        if number == cycles // 10:  # what is cached once is there by now
            before = held()
        pieces = Pieces(folder / "soak.work", "abc", every=0)
        state = {"x": torch.full((64, 64), float(number))}
        pieces.tick("walk", lambda s=state, n=number: (s, {"number": n}), "")
        piece = pieces.load("walk")
        assert piece is not None and piece.facts["number"] == number
        assert torch.equal(piece.tensors["x"], state["x"])
        most = max(most, len(os.listdir(folder / "soak.work")))
    fds, rss = held()
    assert fds <= before[0] and rss - before[1] <= 16 << 20, (before, fds, rss)
    assert most <= KEPT, most


# --- the parent ---------------------------------------------------------------------------------


class Launcher:
    """A warm process that forks one child at a time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        source = Path(__file__).resolve().parents[1] / "src"
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), "COLUMNS": "300"}
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert self._ask({"do": "hello"})["ready"]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(message) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the warm process died"
        return json.loads(answer)

    def start(
        self, words: Sequence[str], fault: Fault | None = None, unforeseen: bool = False
    ) -> int:
        """Begin `dualsft …` in a child; returns its process id.

        `unforeseen` leaves out the look at the free space, so that a small disk really fills up.
        """
        message: dict[str, Any] = {"do": "start", "words": list(words), "log": str(self.log)}
        message["unforeseen"] = unforeseen
        self.log.write_text("")
        if fault is not None:
            message["fault"] = {
                "folder": str(fault.folder),
                "at": fault.at,
                "error": fault.error,
                "keeps_failing": fault.keeps_failing,
            }
        return self._ask(message)["pid"]

    def wait(self) -> int:
        """Exit code of the child; negative for a signal."""
        return self._ask({"do": "wait"})["code"]

    def run(
        self, words: Sequence[str], fault: Fault | None = None, unforeseen: bool = False
    ) -> int:
        """`start`, then `wait`."""
        self.start(words, fault, unforeseen)
        return self.wait()

    def signal(self, pid: int, signum: int) -> None:
        """Signal the child; one that has ended is not reaped yet, so its id is still its own."""
        self._ask({"do": "kill", "pid": pid, "signal": signum})

    @property
    def said(self) -> str:
        """What the last child printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        if self._server.stdin is not None:
            self._server.stdin.close()
        self._server.wait(timeout=30)


class Bench:
    """A model, a corpus, and a warm process that runs the command line on them."""

    def __init__(self, folder: Path) -> None:
        from conftest import corpus_rows, small_run, write_jsonl
        from models import save_tiny_folder

        self.folder = folder
        rows = corpus_rows(60)
        texts = [f"{row['prompt']} {row['response']}" for row in rows]
        model = save_tiny_folder(folder / "model", "llama", texts)
        self.settings = small_run(model, write_jsonl(folder / "rows.jsonl", rows))
        self.launcher = Launcher(folder / "log")

    def words(self, out: str | Path, *more: str) -> list[str]:
        return ["run", "--out", str(self.folder / out), *self.settings, *more]


def changes(launcher: Launcher, words: Sequence[str], folder: Path) -> list[str]:
    """The calls of a run that change its folder, in order: what is called, and on which file."""
    never = Fault(folder, at=1 << 60, error=errno.EIO)
    assert launcher.run([*words], never) == 0, launcher.said
    lines = [line for line in launcher.said.splitlines() if line.startswith(CHANGES)]
    return json.loads(lines[-1].removeprefix(CHANGES))


def turning_points(calls: Sequence[str]) -> list[int]:
    """The crash points, counted from 1, that leave a folder no other one leaves.

    To die before a call leaves what the call before it left, so a point behind a call that changes
    neither names nor bytes is the point before it once more (a write is not: half of it is there).
    Of what is left the first of each kind: the hundred writes of one file, and the files of the
    second save on the way, are the same crash again.
    """
    kinds: dict[str, int] = {}
    for number, (before, call) in enumerate(zip(["begin .", *calls], calls, strict=False), 1):
        half = call.startswith(("write ", "save "))
        if half or not before.startswith("look "):
            kinds.setdefault(re.sub(r"\d{2,}", "#", call if half else before), number)
    return sorted(kinds.values())


def content(run: Path) -> dict[str, str]:
    """SHA-256 of every file of every finished stage, as the manifests state them."""
    found: dict[str, str] = {}
    for manifest in sorted(run.glob("[0-9]_*/manifest.json")):
        if STAGE_ENDS.isdisjoint({manifest.parent.suffix}):
            files = json.loads(manifest.read_text())["files"]
            found |= {f"{manifest.parent.name}/{n}": e["sha256"] for n, e in files.items()}
    return found


WARM = (
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
    "typer._adapters",
    "dualsft.cli",
    "dualsft.runs.pipeline",
)
"""What a run imports, half of its time if every child did it again."""
LEAVES_AS_IT_IS = {"fsync", "chmod"}
CHANGES = "changes: "
STAGE_ENDS = {".part", ".old", ".work"}


# --- the warm process ---------------------------------------------------------------------------


def _child(message: dict[str, Any]) -> None:
    """Become `dualsft …`: its output goes to the log, its exit code is the child's."""
    log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.argv = ["dualsft", *message["words"]]
    breaker = None
    if "fault" in message:
        fault = message["fault"]
        breaker = _Breaker(Fault(**{**fault, "folder": Path(fault["folder"])}))
        breaker.install()
    from dualsft.cli import main
    from dualsft.runs import folder as rundir

    if message["unforeseen"]:
        rundir.check_room = lambda path, need, what: None
    code: Any = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    if breaker is not None:
        print(f"{CHANGES}{json.dumps(breaker.calls)}", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _serve() -> None:
    for name in WARM:
        with suppress(ModuleNotFoundError):  # other versions have other modules
            importlib.import_module(name)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    pid = 0
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any] = {"ready": True}
        if message["do"] == "start":
            pid = os.fork()
            if pid == 0:
                _child(message)
            answer = {"pid": pid}
        elif message["do"] == "kill":
            os.kill(message["pid"], message["signal"])
        elif message["do"] == "wait":
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
