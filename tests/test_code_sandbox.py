"""Generated programs in the sandbox: right verdicts, no forged pass, and nothing gets out."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import probes
import pytest
from probes import FILES, PROBES, REFUSALS, Outside

from dualsft.config import settings
from dualsft.errors import ConfigError
from dualsft.lab.evaluation import sandbox as code_sandbox
from dualsft.lab.evaluation import sandbox_child as child
from dualsft.lab.evaluation import stage
from dualsft.lab.evaluation.sandbox import (
    PROTECTIONS,
    Program,
    ProgramVerdict,
    SandboxLimits,
    describe_protection,
    run_candidate,
    run_candidates,
)

TEST = "def check(add):\n    assert add(2, 3) == 5\n    assert add(-1, 1) == 0\ncheck(add)"
GOOD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return 0\n"
QUICK, CALM = SandboxLimits(seconds=1.0), SandboxLimits(seconds=20)
SOURCE = Path(code_sandbox.__file__).parents[3]


def judge(candidate: str, limits: SandboxLimits | None = None, test: str = TEST) -> ProgramVerdict:
    return run_candidate(Program(candidate, test, "add"), limits or QUICK)


PROGRAMS = {
    "right": (GOOD, True),
    "wrong": ("def add(a, b):\n    return a * b\n", False),
    "no function": ("x = 1\n", False),
    "no callable": ("add = 5\n", False),
    "syntax": ("def add(a, b) return a\n", False),
    "main guard is not run": (GOOD + "if __name__ == '__main__':\n    raise ValueError\n", True),
    "standard library": ("import math\nfrom typing import List\n" + GOOD, True),
    "installed package": (
        "import numpy\ndef add(a, b):\n    return numpy.int64(a) + numpy.int64(b)\n",
        True,
    ),
    "threads": (
        "import threading\nt = threading.Thread(target=print)\nt.start(); t.join()\n" + GOOD,
        True,
    ),
    "random numbers and time": ("import random, time, tempfile\ntime.ctime()\n" + GOOD, True),
    "prints": ("print('x' * 100)\n" + GOOD, True),
    "null device": ("import os\nprint('x', file=open(os.devnull, 'w'))\n" + GOOD, True),
    "reads input": ("input()\n" + GOOD, False),
    "raises": ("raise KeyError\n" + GOOD, False),
    "raises its own": ("class E(LookupError): pass\ndef add(a, b): raise E\n", False),
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


VALUES = """
import collections, numpy
class Own(int): pass
Pair = collections.namedtuple('Pair', 'a b')
VALUES = [
    None, True, 0, -2**70, 10**5000, 0.1, -0.0, float('inf'), 1e-320, 1 + 2j, '', '\\ud800é\\n',
    b'\\xff', bytearray(b'x'), [], [1, [2, (3,)]], (), {1, 'a', (2,)}, frozenset({1}), {},
    {(1, 2): {3: None}}, Own(3), Pair(1, 2), collections.Counter('aab'),
    collections.OrderedDict(a=1), numpy.float64(0.5),
]
def add(i): return VALUES[i]
"""
SAME = """
for i, value in enumerate(VALUES):
    got = add(i)
    assert got == value and isinstance(value, type(got)), value
assert add(1) is True and str(add(6)) == '-0.0'
"""


def test_values_arrive_as_they_are() -> None:
    helpers = VALUES.replace("def add", "def other")
    assert run_candidate(Program(VALUES, SAME, "add", helpers), CALM).reason == "passed"
    more = "def add(x):\n    if x == 1: return (i for i in (1, 2))\n    if x: return map(str, x)\n"
    more += "    raise ValueError\n"
    test = "assert list(add(1)) == [1, 2] and set(add((3, 4))) == {'3', '4'}\n"
    test += "try: add(0)\nexcept ValueError: pass\nelse: assert False\nassert add(x=1) != [1, 2]\n"
    assert judge(more, CALM, test).reason == "passed"
    assert judge("def add(a, b): return object()\n", CALM).reason == "failed: AssertionError"


def test_a_test_may_use_the_helpers_of_its_prompt() -> None:
    """As those of HumanEval/32, 38 and 50 do; the program's own helper is not used."""
    helpers = "import math\ndef double(x):\n    return math.prod((2, x))\n"
    test = "assert double(add(1, 2)) == 6"
    for candidate, passes in ((GOOD, True), (WRONG + "def double(x): return 6\n", False)):
        program = Program(helpers + candidate, test, "add", helpers)
        assert run_candidate(program, CALM).passed == passes


HOSTILE = {
    "os._exit": "import os\nos._exit(0)\n" + GOOD,
    "exit in a thread": "import os, threading\nthreading.Thread(target=lambda: os._exit(0)).start()"
    "\nimport time\ntime.sleep(9)\n" + GOOD,
    "exit in the function": "import os\ndef add(a, b): os._exit(0)\n",
    "infinite loop": "while True:\n    pass\n" + GOOD,
    "swallows everything": "while True:\n    try:\n        while True: pass\n"
    "    except BaseException: pass\n" + GOOD,
    "memory": "x = []\nwhile True:\n    x.append(bytearray(10**8))\n" + GOOD,
    "endless answer": "import itertools\ndef add(a, b): return itertools.count()\n",
    "stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()\n" + GOOD,
    "signals itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + GOOD,
    "no builtins": "__builtins__ = {}\nimport builtins\nbuiltins.__dict__.clear()\n" + GOOD,
}
FRAMES = (
    "import gc, json, os, sys\nplaces, frame = [vars(sys.modules['__main__'])], sys._getframe()\n"
)
FRAMES += "while frame: places += [frame.f_locals, frame.f_globals]; frame = frame.f_back\n"
ANSWER = "answer = json.dumps({'token': next((p['token'] for p in places if 'token' in p), 'x'), "
ANSWER += "'reason': 'passed', 'compiled': True}).encode() + b'\\n'\n"
WRITE = "for fd in range(64):\n    try: os.write(fd, {})\n    except OSError: pass\n"
FORGED = {
    "other AssertionError": "import builtins\nbuiltins.AssertionError = None\n",
    "other exec and compile": "import builtins\nbuiltins.exec = builtins.compile = print\n",
    "other abs, len and isinstance": "import builtins\nabs = builtins.abs = lambda x: 5\n",
    "own check": "def check(f): pass\n",
    "equals everything": "class E(int):\n    def __eq__(self, o): return True\n"
    "    __ne__ = __lt__ = __gt__ = __eq__\ndef add(a, b): return E()\n",
    "equals everything, an object": "class E:\n    def __eq__(self, o): return True\n"
    "def add(a, b): return E()\n",
    "frames": FRAMES + ANSWER + WRITE.format("answer") + "os._exit(0)\n",
    "frames of the function": f"{FRAMES}{ANSWER}def add(a, b):\n    for fd in range(64):\n"
    "        try: os.write(fd, answer)\n        except OSError: pass\n    os._exit(0)\n",
    "patched writer": FRAMES + "for p in places:\n    for k in list(p):\n        if k in ('write', "
    "'send', 'answer', 'dump', 'finish'): p[k] = lambda *a, **k: None\n",
    "patched json": 'import json\njson.dumps = lambda *a, **k: \'{"reason": "passed"}\'\n',
    "patched os": "import os\nwrite = os.write\nos.write = lambda fd, b: write(fd, b'passed')\n",
    "reads the tests": FRAMES + "text = repr([places, gc.get_objects()])\n"
    "def add(a, b): return (5 if a == 2 else 0) if 'assert %s' % 'add' in text else 7\n",
    "prints the marker": 'print(\'passed\')\nprint(\'{"reason": "passed", "compiled": true}\')\n',
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\n",
    "trace": "import sys\nsys.settrace(lambda f, e, a: f.f_globals.update(add=sum))\n",
    "answers in advance": "import os\n" + WRITE.format("b'[null, null]\\n' * 9"),
    "deep answer": "import os\n" + WRITE.format("b'[' * 4000 + b'\\n'") + "os._exit(0)\n",
    "unhashable answer": "import os\n" + WRITE.format("""b'[["set", [["list", []]]], null]\\n'"""),
    "an exception that is none": "import os\n" + WRITE.format("""b'[null, "print"]\\n'"""),
    "no text": "import os\n" + WRITE.format("b'\\xff\\n'"),
    "floods the pipe": "import os\n" + WRITE.format("b'x' * 10**6"),
    "swallows the test": "'''",
    "files beside the tests": "for n in ('copy', 'math'): open(n + '.py', 'w').write('abs=id')\n",
    "changes its argument": "def add(a, b):\n    if isinstance(a, list): a.clear()\n    return 0\n",
}


@pytest.mark.parametrize("name", [*HOSTILE, *FORGED])
def test_hostile_programs_do_not_pass(name: str) -> None:
    """The function that forges is wrong."""
    program = HOSTILE.get(name) or WRONG + FORGED[name]
    more = (
        "import copy, math\nxs = [1]\nassert add(xs, 0) == len(xs)\nassert abs(add(1, 1) - 2) < 1"
    )
    assert not judge(program).passed
    assert name in HOSTILE or not judge(program, test=more).passed


def test_a_test_that_catches_everything_is_not_passed_by_an_end() -> None:
    test = "try: add(1, 2)\nexcept BaseException: pass"
    assert judge("def add(a, b): raise KeyError", CALM, test).passed
    assert judge("import os\ndef add(a, b): os._exit(0)", CALM, test).reason == "ended early"


# --- nothing gets out -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    with probes.outside() as found:
        yield found


def refused(reason: str) -> bool:
    return reason in ("timed out", "ended early") or reason.removeprefix("failed: ") in REFUSALS


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_fails_and_changes_nothing_outside(name: str, outside: Outside) -> None:
    verdict, same = outside.attempt(name)
    assert refused(verdict.reason), verdict
    assert same


def test_the_probes_can_succeed(outside: Outside) -> None:
    """Harmless ones, in an interpreter that nothing holds."""
    for name in ("append", "read", "chmod", "hard link outside", "kill", "socket", "pair", "fork"):
        program = outside.program(PROBES[name].replace("PID, 9", "PID, 0"))
        before = outside.seen()
        subprocess.run(
            [sys.executable, "-c", f"{program.candidate}\nprobe()"], cwd=outside.folder, check=True
        )
        changes = name in ("append", "chmod", "hard link outside", "socket")
        assert (outside.seen() != before) == changes, name
        assert outside.connected() == (name == "socket")
        outside.new.unlink(missing_ok=True)


ORDINARY = """
set -e
for top in {tops}; do
    kept=$(mktemp -d); mount --bind $top $kept; mount -t tmpfs -o mode=755 none $top
    for place in {places}; do case $place in $top/*)
        mkdir -p $place; mount --bind $kept/${{place#$top/}} $place;;
    esac; done
done
exec setpriv --reuid=65534 --regid=65534 --clear-groups {python} -B {script}
"""
"""Probes as an ordinary user, who must be able to read the interpreter and nothing more."""


def attempts_of_an_ordinary_user() -> dict[str, Any]:
    script, places = (
        Path(probes.__file__),
        [sys.base_prefix, sys.prefix, str(SOURCE), probes.__file__],
    )
    command = [sys.executable, "-B", str(script)]
    if os.getuid() == 0:
        above = [[*reversed(Path(place).resolve().parents)] for place in places]
        closed = [next((p for p in one if not p.stat().st_mode & 1), None) for one in above]
        tops = dict.fromkeys(str(one) for one in closed if one)
        folders = [str(Path(place).resolve()) for place in (*places[:3], script.parent)]
        words = {"tops": " ".join(tops), "places": " ".join(folders)}
        text = ORDINARY.format(**words, python=sys.executable, script=script)
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", text]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "TMPDIR": "/tmp"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_no_probe_of_an_ordinary_user_succeeds() -> None:
    said = attempts_of_an_ordinary_user()
    assert said["user"] != 0 and said["probes"].keys() == PROBES.keys()
    assert not {n: one for n, one in said["probes"].items() if not refused(one[0]) or not one[1]}


def changed_child(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    """Let programs be started by a child with another line."""
    text = code_sandbox._CHILD.read_text()
    assert text.count(old) == 1
    (folder / "child.py").write_text(text.replace(old, new))
    monkeypatch.setattr(code_sandbox, "_CHILD", folder / "child.py")


@pytest.mark.slow
@pytest.mark.parametrize("version", range(1, 6))
def test_older_versions_of_landlock(
    version: int, outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_child(
        monkeypatch, tmp_path, f"\nLANDLOCK = {child.LANDLOCK}\n", f"\nLANDLOCK = {version}\n"
    )
    assert judge(GOOD, CALM).passed
    for name in FILES:
        verdict, same = outside.attempt(name)
        assert refused(verdict.reason) and same, (name, verdict)


LAYER = """
import ctypes, json, os, sys
sys.path.insert(0, {child!r})
import sandbox_child as child
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
child.LANDLOCK = {version}
limits = dict(folder=2**20, entries=9)
import _socket
taken = {take}
def refused(action):
    try:
        action()
    except OSError:
        return True
    return False
acts = dict(
    socket=lambda: _socket.socket(),
    connect=lambda: _socket.socket().connect(("127.0.0.1", {port})),
    fork=lambda: os.fork() or os._exit(0),
    kill=lambda: os.kill(os.getppid(), 0),
    write=lambda: open({kept!r}, "r+"),
    create=lambda: open({new!r}, "w"),
    read=lambda: open({kept!r}),
    list=lambda: os.listdir({folder!r}),
    own=lambda: open(child.FOLDER + "/x", "w"),
)
print(taken, *(name for name, act in acts.items() if refused(act)))
"""


@pytest.mark.parametrize(
    ("take", "holds"),
    [
        ("child.namespaces(libc, limits)", {"connect", "write", "create"}),
        ("child.landlock(libc, False)", {"read", "write", "create", "list"}),
        ("child.seccomp(libc, True)", {"socket", "connect", "fork", "kill"}),
        (
            "child.seccomp(libc, False)",
            {"socket", "connect", "fork", "kill", "write", "create", "own"},
        ),
    ],
)
def test_each_layer_holds_by_itself(take: str, holds: set[str], outside: Outside) -> None:
    """A kernel may lack the others."""
    for version in range(1, child.LANDLOCK + 1) if "landlock" in take else (child.LANDLOCK,):
        words = {
            "kept": str(outside.kept),
            "new": str(outside.new),
            "port": outside.port,
            "take": take,
            "version": version,
        }
        places = {"child": str(SOURCE / "dualsft/lab/evaluation"), "folder": str(outside.folder)}
        script = LAYER.format(**words, **places)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        outside.new.unlink(missing_ok=True)
        taken, *held = done.stdout.split()
        assert taken == "True" and holds <= set(held), (done, version)
        assert not outside.connected() or "connect" not in holds
    if "True" in take:
        assert not {"write", "read", "list"} & set(held), "other layers are there for that"


BAN = """
import ctypes, json, struct, sys
from dualsft.errors import ConfigError
from dualsft.lab.evaluation.sandbox import Program, run_candidate
number, first, code = json.loads(sys.argv[1])
lines = [(32, 0, 0, 0), (21, 0, 3, number), (32, 0, 0, 16), (21, 0, 1, first)]
lines += [(6, 0, 0, 0x50000 | code), (6, 0, 0, 0x7FFF0000)]
if first is None:
    lines[2:4] = []
    lines[1] = (21, 0, 1, number)
program = b"".join(struct.pack("HBBI", *line) for line in lines)
text = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(text)), 0, 0) == 0
good = Program("def add(a, b): return a + b", "assert add(2, 3) == 5", "add")
try:
    run_candidate(good)
    print("ran")
except ConfigError as problem:
    print(problem)
verdict = run_candidate(good, allow_weak=True)
print(verdict.reason, json.dumps(verdict.protection))
"""


@pytest.mark.parametrize(
    ("lacks", "call", "first", "code"),
    [
        ("namespaces", "unshare:272:97", None, errno.EPERM),  # as in a container
        ("namespaces", "mount_setattr:442:442", None, errno.EPERM),  # as under AppArmor
        ("landlock", "landlock_create_ruleset:444:444", None, errno.EOPNOTSUPP),  # not booted
        ("landlock", "landlock_create_ruleset:444:444", None, errno.ENOSYS),
        ("seccomp", "prctl:157:167", 22, errno.EINVAL),
    ],
)
def test_without_a_protection_of_the_kernel_it_refuses(
    lacks: str, call: str, first: int | None, code: int
) -> None:
    """The kernel itself says no to the system call. Only a harmless program is let run so."""
    column = child.MACHINES[os.uname().machine][1]
    number = int(call.split(":")[1 + column])
    done = subprocess.run(
        [sys.executable, "-c", BAN, json.dumps([number, first, code])],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    refusal, weak = done.stdout.splitlines()
    assert PROTECTIONS[lacks] in refusal and "evaluation.allow_weak_sandbox=true" in refusal
    assert "humaneval" in refusal
    assert sum(text in refusal for text in PROTECTIONS.values()) == 1
    reason, _, protection = weak.partition(" ")
    assert reason == "passed"
    assert json.loads(protection) == {name: name != lacks for name in PROTECTIONS}


def test_a_run_is_refused_before_its_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(tasks: str, weak: bool) -> None:
        chosen = SimpleNamespace(tasks=tasks, allow_weak_sandbox=weak)
        ctx: Any = SimpleNamespace(config=SimpleNamespace(evaluation=chosen), max_positions=4096)
        stage.STAGE.check(ctx)

    check("humaneval", False)
    changed_child(monkeypatch, tmp_path, f"\nLANDLOCK = {child.LANDLOCK}\n", "\nLANDLOCK = 0\n")
    with pytest.raises(ConfigError, match="evaluation.allow_weak_sandbox=true"):
        check("humaneval,gsm8k", False)
    check("gsm8k", False)
    check("humaneval", True)


def test_this_consent_is_of_the_command_line_only(tmp_path: Path) -> None:
    key, words = "evaluation.allow_weak_sandbox", ["model.path=m", "data.path=d"]
    config = settings.load(None, [*words, f"{key}=true"])
    assert config.evaluation.allow_weak_sandbox and f"{key}=true" in settings.consent_of(config)
    assert "allow_weak_sandbox" not in settings.to_yaml(config)
    (tmp_path / "c.yaml").write_text("evaluation: {allow_weak_sandbox: true}\n")
    with pytest.raises(ConfigError, match=f"{key}: .* is not accepted as consent"):
        settings.load(tmp_path / "c.yaml", words)


# --- the filter on both architectures -------------------------------------------------------------

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
KILL, SOCKET, FORK, EXECVE = (62, 129), (41, 198), (57, None), (59, 221)
CLONE, CLONE3, FCNTL, IOCTL, PRCTL = (56, 220), (435, 435), (72, 25), (16, 29), (157, 167)
PRLIMIT, OPENAT, MKDIRAT, READ = (302, 261), (257, 56), (258, 34), (0, 63)
DECISIONS: list[tuple[tuple[int, int | None], tuple[int, ...], int, int]] = [
    (READ, (0,), ALLOW, ALLOW),
    *((one, (), ENOSYS, ENOSYS) for one in (KILL, SOCKET, FORK, EXECVE, CLONE3)),
    (CLONE, (0x3D0F00,), ALLOW, ALLOW),  # a thread of glibc, of musl
    (CLONE, (0x7D0F00,), ALLOW, ALLOW),
    *((CLONE, (flags,), EPERM, EPERM) for flags in (17, 0, 0x4111, 0x3D0F00 | 1 << 28, 0x1D0F80)),
    *((FCNTL, (3, command), ALLOW, ALLOW) for command in (0, 1, 2, 3, 1030)),
    *((FCNTL, (3, command), EPERM, EPERM) for command in (4, 6, 8, 10, 15, 1024, 1026, 1031)),
    (IOCTL, (0, 0x5401), ALLOW, ALLOW),
    *((IOCTL, (0, request), EPERM, EPERM) for request in (0x5412, 0x40086602, 0x8901, 0x541C)),
    (PRCTL, (15,), ALLOW, ALLOW),
    *((PRCTL, (option,), EPERM, EPERM) for option in (1, 4, 22, 23, 24, 38)),
    (PRLIMIT, (0, 7), ALLOW, ALLOW),
    (PRLIMIT, (1, 7), EPERM, EPERM),
    (OPENAT, (0, 0, 0o2000000), ALLOW, ALLOW),
    *((OPENAT, (0, 0, flags), ALLOW, EPERM) for flags in (1, 2, 0o100, 0o1000, 0o2001)),
    (MKDIRAT, (), ALLOW, ENOSYS),
]
"""Call by its number on both architectures, arguments, answer with and without a folder."""


def decide(lines: list[tuple[int, int, int, int]], data: bytes) -> int:
    """What the kernel's interpreter of these instructions answers."""
    at = held = 0
    while True:
        code, yes, no, value = lines[at]
        if code == 0x06:
            return value
        if code == 0x20:
            (held,) = struct.unpack_from("I", data, value)
            at += 1
        else:
            at += 1 + (yes if (held == value if code == 0x15 else held & value) else no)


@pytest.mark.parametrize("machine", child.MACHINES)
def test_the_filter_on_both_architectures(machine: str) -> None:
    """This machine's filter is tested by the probes; the other's by interpreting it."""
    architecture, column = child.MACHINES[machine]
    for writable in (True, False):
        lines = child.filter_program(machine, writable)

        def answer(number: int, *arguments: int, of: int = architecture, lines: Any = lines) -> int:
            padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
            return decide(lines, struct.pack("IIQ6Q", number, of, 0, *padded))

        for numbers, arguments, *wanted in DECISIONS:
            if (number := numbers[column]) is not None:
                assert answer(number, *arguments) == wanted[not writable], (numbers, arguments)
        assert answer(READ[column] or 0, of=0x40000003) == ENOSYS  # 32-bit x86
        assert answer(0x40000000 | OPENAT[column]) == ENOSYS  # x32
        assert all(answer(number) == ENOSYS for number in range(443, 600) if number != 436)


# --- nothing is left ------------------------------------------------------------------------------


def below(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(place.parent.name)] = int(place.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


SLEEPER = """
from dualsft.lab.evaluation.sandbox import *
open('{}', 'w')
run_candidates([Program('open("x", "w"); import time; time.sleep(99)', '', 'f')], SandboxLimits(99))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_no_process_and_no_folder(
    how: signal.Signals, tmp_path: Path
) -> None:
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    temporary.mkdir()
    words = {"PYTHONPATH": str(SOURCE), "TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, "-c", SLEEPER.format(started)], env=os.environ | words
    )
    deadline = time.monotonic() + 60
    while len(below(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    children = below(parent.pid)
    assert len(children) == 2, "the checker and the program"
    parent.send_signal(how)
    parent.wait()
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, children)) and not list(temporary.iterdir())


def test_a_program_out_of_time_leaves_no_process() -> None:
    seen: list[set[int]] = []
    watch = threading.Timer(0.7, lambda: seen.append(below(os.getpid())))
    before = below(os.getpid())
    watch.start()
    assert judge("while True:\n    pass\n").reason == "timed out"
    watch.join()
    deadline = time.monotonic() + 30
    while any(map(alive, seen[0] - before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(seen[0] - before) == 2 and not any(map(alive, seen[0] - before))


def test_the_folder_is_empty_writable_small_and_gone(outside: Outside) -> None:
    said = (
        "import os\nassert os.listdir('.') == [] and os.getcwd() == os.environ['HOME']\n"
        "open('mine', 'w').write('x')\nassert open('mine').read() == 'x'\n"
        "os.makedirs('a/b'); os.rename('mine', 'a/b/c'); os.remove('a/b/c')\n"
        "import tempfile\nassert tempfile.TemporaryFile().write(b'x') == 1\n"
    )
    before = outside.seen()
    assert judge(said + GOOD, CALM).passed
    count = (
        "import itertools, os\ndef add(size, most):\n    try:\n        for i in itertools.count():"
    )
    count += "\n            open(str(i), 'wb').write(bytes(size))\n    except OSError:\n"
    count += "        total = sum(os.stat(n).st_size for n in os.listdir('.'))\n"
    count += "        return len(os.listdir('.')) <= 100 and size * most * 0.9 <= total <= 2**24\n"
    limits = replace(CALM, entries=100)
    assert judge(count, limits, "assert add(2**20, 16)").passed
    assert judge(count, limits, "assert add(1, 100)").passed
    assert outside.seen() == before


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    said = "import os\nassert 'HF_TOKEN' not in os.environ and len(os.environ) < 10\n"
    assert judge(said + GOOD, CALM).passed


def test_huge_output_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    loud = "import sys\nfor _ in range(50):\n    sys.stdout.write('x' * 10**6)\n"
    assert judge(loud + "sys.stderr.write('y' * 10**6)\n" + GOOD, SandboxLimits(seconds=20)).passed
    said = capfd.readouterr()
    assert said.out == "" and said.err == ""


def test_many_run_in_order_and_report_what_held_them() -> None:
    seen: list[int] = []
    pairs = [Program(source, TEST, "add") for source in (GOOD, HOSTILE["os._exit"])]
    verdicts = run_candidates(pairs * 3, CALM, workers=2, advance=seen.append)
    assert [v.passed for v in verdicts] == [True, False] * 3
    assert sum(seen) == 6 and threading.active_count() < 10
    assert all(v.protection == dict.fromkeys(PROTECTIONS, True) for v in verdicts)
    words = describe_protection(verdicts)
    assert words["network"] == "namespaces and seccomp" and "landlock" in words["files"]
    without = ProgramVerdict(True, "passed", True, dict.fromkeys(PROTECTIONS, False))
    assert describe_protection([*verdicts, without])["network"] == "nothing"
