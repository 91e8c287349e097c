"""Generated programs in the sandbox: right verdicts, and nothing gets out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from socket import create_server

import pytest

from dualsft.lab.evaluation import sandbox as code_sandbox
from dualsft.lab.evaluation.sandbox import (
    ProgramVerdict,
    SandboxLimits,
    describe_protection,
    run_candidate,
    run_candidates,
)

TEST = "def check(add):\n    assert add(2, 3) == 5\n    assert add(-1, 1) == 0\ncheck(add)"
GOOD = "def add(a, b):\n    return a + b\n"
QUICK, CALM = SandboxLimits(seconds=1.0), SandboxLimits(seconds=10)


def judge(candidate: str, limits: SandboxLimits | None = None) -> ProgramVerdict:
    return run_candidate(candidate, TEST, limits or QUICK)


PROGRAMS = {
    "right": (GOOD, True),
    "wrong": ("def add(a, b):\n    return a * b\n", False),
    "no function": ("x = 1\n", False),
    "syntax": ("def add(a, b) return a\n", False),
    "main guard is not run": (GOOD + "if __name__ == '__main__':\n    raise ValueError\n", True),
    "standard library": ("import math\nfrom typing import List\n" + GOOD, True),
    "installed package": ("import numpy\n" + GOOD, True),
    "threads": (
        "import threading\nt = threading.Thread(target=print)\nt.start(); t.join()\n" + GOOD,
        True,
    ),
    "prints": ("print('x' * 100)\n" + GOOD, True),
    "reads input": ("input()\n" + GOOD, False),
    "raises": ("raise KeyError\n" + GOOD, False),
    "sys.exit": ("import sys\nsys.exit(0)\n" + GOOD, False),
}
"""By name: candidate, and whether it passes."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_verdicts_are_those_of_a_plain_interpreter(name: str) -> None:
    """The reference runs candidate and test as code_eval does: exec in an empty namespace."""
    candidate, passes = PROGRAMS[name]
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; exec(sys.argv[1], {})", f"{candidate}\n{TEST}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    ended = plain.returncode == 0 and name != "sys.exit"  # which code_eval counts as a failure
    assert ended == passes
    verdict = judge(candidate, CALM)
    assert verdict.passed == passes, verdict
    assert verdict.compiled == (name != "syntax")


HOSTILE = {
    "os._exit": "import os\nos._exit(0)\n",
    "exit in a thread": "import os, threading\nthreading.Thread(target=lambda: os._exit(0)).start()"
    "\nimport time\ntime.sleep(9)\n",
    "infinite loop": "while True:\n    pass\n",
    "sleeps": "import time\ntime.sleep(60)\n",
    "swallows everything": "while True:\n    try:\n        while True: pass\n"
    "    except BaseException: pass\n",
    "memory": "x = []\nwhile True:\n    x.append(bytearray(10**8))\n",
    "fork bomb": "import os\nwhile True:\n    os.fork()\n",
    "fork bomb that goes on": "import os\nwhile True:\n    try:\n        os.fork()\n"
    "    except OSError: pass\n",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'exit 0'], check=True)\n",
    "stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()\n",
    "signals itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "no builtins": "__builtins__ = {}\nimport builtins\nbuiltins.__dict__.clear()\n",
    "other AssertionError": "import builtins\nbuiltins.AssertionError = None\n"
    "def add(a, b): return 0\n",
    "other exec and compile": "import builtins\nbuiltins.exec = builtins.compile = print\n"
    "def add(a, b): return 0\n",
    "own check": "def check(f): pass\ndef add(a, b): return 0\n",
    "fake answer": "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, "
    'b\'{"token": "x", "reason": "passed", "compiled": true}\\n\')\n'
    "    except OSError: pass\nos._exit(0)\n",
    "floods the pipe": "import os\nfor fd in range(3, 64):\n    try:\n"
    "        os.write(fd, b'x' * 10**6)\n    except OSError: pass\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_do_not_pass(name: str) -> None:
    hostile = HOSTILE[name]
    candidate = hostile if "def add" in hostile else hostile + GOOD
    assert not judge(candidate).passed
    assert judge(GOOD, CALM).passed, "the next program is not hurt"


@pytest.mark.parametrize(
    "answer",
    ["b'[' * 4000", "b'{}'", "b'{\"token\": 3}'", "b'[1]'", "b'\\xff'"],
    ids=["deep", "empty", "no reason", "a list", "no text"],
)
def test_an_answer_of_the_programs_own_is_no_verdict(answer: str) -> None:
    """It may write to any pipe that it finds: that ends its own judgement and no other."""
    program = f"import os\nfor fd in range(3, 20):\n    try: os.write(fd, {answer} + b'\\n')\n"
    program += "    except OSError: pass\nos._exit(0)\n"
    verdict, good = run_candidates([(program, ""), (GOOD, TEST)])
    assert not verdict.passed and good.passed


def test_a_fork_bomb_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of this test have a HOME below tmp_path, which /proc shows."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def alive() -> int:
        found = 0
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += f"HOME={tmp_path}".encode() in place.read_bytes()
        return found

    counts: list[int] = []
    watch = threading.Timer(0.7, lambda: counts.append(alive()))
    watch.start()
    assert not judge(HOSTILE["fork bomb that goes on"]).passed
    watch.join()
    assert counts[0] <= 2 and alive() == 0


LAYER = """
import ctypes, os, sys
sys.path.insert(0, {folder!r})
import sandbox_child as child
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
taken = {take}
import _socket
def refused(action):
    try:
        action()
    except OSError:
        return True
    return False
def fork():
    if os.fork() == 0:
        os._exit(0)
acts = dict(
    socket=lambda: _socket.socket(),
    connect=lambda: _socket.socket().connect(("127.0.0.1", {port})),
    fork=fork,
    kill=lambda: os.kill(os.getppid(), 0),
    write=lambda: open({outside!r}, "w"),
    beside=lambda: os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=os.open("..", os.O_RDONLY)),
    under=lambda: __import__("_posixsubprocess"),
)
print(taken is not False, *(name for name, act in acts.items() if refused(act)))
"""


@pytest.mark.parametrize(
    ("take", "holds"),
    [
        ("child.leave_network(libc)", {"connect"}),
        ("child.landlock(libc, os.getcwd())", {"write"}),
        ("child.seccomp(libc)", {"socket", "connect", "fork", "kill"}),
        ("child.guard(os.getcwd(), True)", {"socket", "connect", "fork", "kill", "write"}),
        ("child.guard(os.getcwd(), True)", {"beside", "under"}),
    ],
)
def test_each_layer_holds_by_itself(take: str, holds: set[str], tmp_path: Path) -> None:
    """A kernel may lack a layer; then it must say so."""
    inside = tmp_path / "inside"
    inside.mkdir()
    with create_server(("127.0.0.1", 0)) as server:
        script = LAYER.format(
            folder=str(Path(code_sandbox.__file__).parent),
            take=take,
            port=server.getsockname()[1],
            outside=str(tmp_path / "outside"),
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=inside, check=True
        )
    taken, *refused = done.stdout.split()
    assert taken == "False" or holds <= set(refused), done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "open({new!r}, 'w').write('x')",
        "os.close(os.open({new!r}, 65))",
        "pathlib.Path({new!r}).touch()",
        "os.mkdir({new!r})",
        "os.symlink('/', {new!r})",
        "os.remove({path!r})",
        "os.truncate({path!r}, 0)",
        "shutil.rmtree({folder!r})",
        "os.fchmod(os.open({path!r}, os.O_RDONLY), 0)",
        "os.chmod('kept', 0, dir_fd=os.open({folder!r}, os.O_RDONLY))",
        "import ctypes; ctypes.pythonapi.chmod({path!r}.encode(), 0)",
        "os.utime({path!r}, (1, 1))",
        "os.utime(os.open({path!r}, os.O_RDONLY), (1, 1))",
        "os.setxattr({path!r}, 'user.x', b'y')",
    ],
)
def test_nothing_outside_is_written_removed_or_changed(line: str, tmp_path: Path) -> None:
    kept = tmp_path / "folder/kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    words = {"path": str(kept), "folder": str(kept.parent), "new": str(kept.parent / "written")}

    def seen() -> list[object]:
        state = kept.stat()
        facts = [state.st_mode, state.st_mtime_ns, kept.read_text(), os.listxattr(kept)]
        return [*facts, os.listdir(kept.parent)]

    before = seen()
    imports = "import os, pathlib, shutil\n"
    verdict = judge(f"{imports}{line.format(**words)}\n" + GOOD, CALM)
    assert seen() == before
    assert "ctypes" in line or not verdict.passed


def test_the_folder_is_empty_writable_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = (
        "import os\nassert os.listdir('.') == [] and os.getcwd() == os.environ['HOME']\n"
        "open('mine', 'w').write('x')\nassert open('mine').read() == 'x'\n"
    )
    assert judge(said + GOOD, CALM).passed
    large = "open('mine', 'wb').write(b'x' * 2**22)\n"
    assert judge(large + GOOD, CALM).reason == "failed: OSError"
    assert not list(tmp_path.iterdir())


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    said = "import os\nassert 'HF_TOKEN' not in os.environ and len(os.environ) < 10\n"
    assert judge(said + GOOD, CALM).passed


@pytest.mark.parametrize("how", ["socket", "_socket"])
def test_no_connection_is_made(how: str) -> None:
    with create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        connect = f"import {how} as s\nc = s.socket()\nc.connect(('127.0.0.1', {port}))\n"
        assert not judge(connect + GOOD, CALM).passed
        with pytest.raises(TimeoutError):
            server.accept()


def test_the_parent_is_not_killed() -> None:
    kill = "import os, signal\n{}\n"
    for call in ("os.kill(os.getppid(), signal.SIGTERM)", "os.killpg(1, 9)", "os.kill(-1, 9)"):
        assert not judge(kill.format(call) + GOOD, CALM).passed


def test_huge_output_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    loud = "import sys\nfor _ in range(50):\n    sys.stdout.write('x' * 10**6)\n"
    assert judge(loud + "sys.stderr.write('y' * 10**6)\n" + GOOD, SandboxLimits(seconds=20)).passed
    said = capfd.readouterr()
    assert said.out == "" and said.err == ""


def test_many_run_in_order_and_report_what_held_them() -> None:
    seen: list[int] = []
    wrong = GOOD.replace("+", "*")
    verdicts = run_candidates(
        [(GOOD, TEST), (wrong, TEST)] * 3, CALM, workers=2, advance=seen.append
    )
    assert [v.passed for v in verdicts] == [True, False] * 3
    assert sum(seen) == 6 and threading.active_count() < 10
    taken = verdicts[0].protection
    words = describe_protection(verdicts)
    assert ("seccomp" in words["network"]) == taken["seccomp"]
    assert (words["files"] == "Landlock") == taken["landlock"]
    without = ProgramVerdict(True, "passed", True, dict.fromkeys(taken, False))
    assert "only" in describe_protection([*verdicts, without])["network"]
