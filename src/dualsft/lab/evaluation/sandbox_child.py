"""Sandbox child: two processes that shut themselves in; one runs a program, the other checks it.

`lab/evaluation/sandbox.py` starts this file by its path in an isolated interpreter, once per
program. It imports nothing from dualsft. Before it is given any of the program, it

1. enters new user, mount, process, network, IPC and UTS namespaces, where every file system is
   read-only but for a small tmpfs that is its only folder and disappears with it,
2. lets Landlock refuse to read anything but the interpreter's own files,
3. drops all capabilities and forks: the child is to run the program, this process to check it,
4. in both, sets rlimits and a signal for the parent's death, and allows by seccomp only the system
   calls that a Python program without network, processes and signals needs.

Then it writes which of these hold to stdout. Only what the parent then sends is run. The program
never sees the tests: the checker calls the function under test through a pipe, with arguments and
results as plain values, and the pipe to the parent is not open in the program's process. So the
program can end, answer or be killed, but a pass needs right answers. Not part of Algorithm 1.

This is the only file of the package that executes code from a model.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

FOLDER = "/proc"
"""Where the tmpfs is: exists everywhere, and never holds the interpreter."""
LANDLOCK = 6
"""The newest Landlock ABI that is used."""
MOST_ANSWER = 2**24
"""Most bytes of one answer of the program."""

# --- seccomp --------------------------------------------------------------------------------------

# name:number on x86_64:number on aarch64, where it exists
ALWAYS = """
read:0:63 write:1:64 close:3:57 fstat:5:80 lseek:8:62 pread64:17:67 pwrite64:18:68 readv:19:65
writev:20:66 poll:7: ppoll:271:73 select:23: pselect6:270:72 pipe:22: pipe2:293:59 dup:32:23
dup2:33: dup3:292:24 close_range:436:436
mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 madvise:28:233
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 sigaltstack:131:132 pause:34:
restart_syscall:219:128 alarm:37: getitimer:36:102 setitimer:38:103 nanosleep:35:101
clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:
times:100:153 getrusage:98:165 getrlimit:97:163 sysinfo:99:179 uname:63:160 getrandom:318:278
getpid:39:172 gettid:186:178 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176
getegid:108:177 getgroups:115:158 getresuid:118:148 getresgid:120:150 umask:95:166
futex:202:98 sched_yield:24:124 sched_getaffinity:204:123 getcpu:309:168 arch_prctl:158:
set_robust_list:273:99 set_tid_address:218:96 rseq:334:293 exit:60:93 exit_group:231:94
stat:4: lstat:6: newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 access:21:
faccessat:269:48 faccessat2:439:439 readlink:89: readlinkat:267:78 getdents64:217:61
getcwd:79:17 chdir:80:49 fchdir:81:50
"""
IN_FOLDER = """
ftruncate:77:46 fallocate:285:47 mkdir:83: mkdirat:258:34 rmdir:84: unlink:87: unlinkat:263:35
rename:82: renameat:264:38 renameat2:316:276 link:86: linkat:265:37 symlink:88: symlinkat:266:36
"""
"""Changes to files: only where the mount namespace leaves nothing but the tmpfs to change."""
WITH_ARGUMENT: dict[str, tuple[int, tuple[int, ...]]] = {
    "fcntl:72:25": (1, (0, 1, 2, 3, 1030)),  # duplicate, flags; no lock, owner, signal
    "ioctl:16:29": (1, (0x5401, 0x5413, 0x5450, 0x5451)),  # isatty, terminal size, inheritable
    "prctl:157:167": (0, (15, 16, 0x53564D41)),  # names of threads and mappings
    "prlimit64:302:261": (0, (0,)),  # of the process itself
}
"""Call -> index of an argument, and the values that it may have."""
THREAD, THREAD_FLAGS = 0x00010000, 0x007D0F00
"""CLONE_THREAD, and all flags that libc gives a new thread."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH value, and index of the call's number."""
EPERM, ENOSYS = 1, 38


def filter_program(machine: str, writable: bool) -> list[tuple[int, int, int, int]]:
    """The allowlist as BPF: (code, jump if true, jump if false, value) per instruction.

    What is not listed does not exist (ENOSYS), as on an older kernel. So libc answers a missing
    clone3, whose flags a filter cannot read, with clone. If not `writable`, no file can be opened
    for writing either.
    """
    architecture, column = MACHINES[machine]
    load, equal, anyof, give = 0x20, 0x15, 0x45, 0x06
    allow, refuse = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | EPERM)
    missing = (give, 0, 0, 0x00050000 | ENOSYS)
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), missing, (load, 0, 0, 0)]

    def rule(call: str, *then: tuple[int, int, int, int]) -> None:
        if number := call.split(":")[1:][column]:
            lines.extend([(equal, 0, len(then), int(number)), *then])

    def argument(index: int) -> tuple[int, int, int, int]:
        return (load, 0, 0, 16 + 8 * index)

    for call in (ALWAYS + (IN_FOLDER if writable else "")).split():
        rule(call, allow)
    for call, (index, values) in WITH_ARGUMENT.items():
        tests = [one for value in values for one in ((equal, 0, 1, value), allow)]
        rule(call, argument(index), *tests, refuse)
    others = ~THREAD_FLAGS & 0xFFFFFFFF
    tests = [(anyof, 0, 2, THREAD), (anyof, 1, 0, others), allow, refuse]
    rule("clone:56:220", argument(0), *tests)
    for call, index in (("openat:257:56", 2), ("open:2:", 1)):
        tests = [] if writable else [argument(index), (anyof, 0, 1, WRITING), refuse]
        rule(call, *tests, allow)
    return [*lines, missing]


def seccomp(libc: Any, writable: bool) -> bool:
    """Allow only the listed system calls from here on. False if the kernel cannot."""
    if platform.machine() not in MACHINES:
        return False
    lines = filter_program(platform.machine(), writable)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
    return libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


# --- the other layers -----------------------------------------------------------------------------


def namespaces(libc: Any, limits: dict[str, int]) -> bool:
    """Enter namespaces with a read-only view of all files and a tmpfs at FOLDER."""
    user, group = os.geteuid(), os.getegid()
    # CLONE_NEW: NS, CGROUP, UTS, IPC, USER, PID, NET
    if libc.unshare(0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x70000000) != 0:
        return False
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    try:
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        return False
    # mount_setattr on / and all below: MOUNT_ATTR_RDONLY, nothing cleared, MS_PRIVATE
    readonly = struct.pack("QQQQ", 1, 0, 1 << 18, 0)
    options = f"size={limits['folder']},nr_inodes={limits['entries']},mode=700".encode()
    return (
        libc.syscall(442, -100, b"/", 0x8000, readonly, len(readonly)) == 0
        and libc.mount(b"tmpfs", FOLDER.encode(), b"tmpfs", 2 | 4 | 8, options) == 0
    )  # MS_NOSUID, MS_NODEV, MS_NOEXEC


def landlock(libc: Any, writable: bool) -> bool:
    """Allow to read only the interpreter's and the system's libraries, to write only in FOLDER."""
    version = min(libc.syscall(444, None, 0, 1), LANDLOCK)
    if version < 1:
        return False
    write, read = 1 << 1, 1 << 2 | 1 << 3
    # execute, write, read, remove, make; move between folders, truncate, ioctl of devices
    rights = sum(1 << bit for bit in range(13 + (version > 1) + (version > 2)))
    rights |= 1 << 15 if version >= 5 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    # and no TCP; no abstract socket and no signal to outside
    rules = libc.syscall(444, struct.pack("QQQ", rights, 3, 3)[:size], size, 0)
    roots = (sys.prefix, sys.base_prefix, "/usr/local", "/usr", "/")
    allowed = dict.fromkeys((f"{r.rstrip('/')}/{d}" for r in roots for d in ("lib", "lib64")), read)
    allowed |= {"/nix/store": read, "/usr/share/zoneinfo": read}
    files = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")
    allowed |= dict.fromkeys(files, 1 << 2) | {"/dev/null": write | 1 << 2}
    if writable:
        allowed[FOLDER] = rights
    for place, may in allowed.items():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            handle = os.open(place, os.O_PATH)
            libc.syscall(445, rules, 1, struct.pack("=Qi", may, handle), 0)
            os.close(handle)
    return rules >= 0 and libc.syscall(446, rules, 0) == 0


def set_limits(limits: dict[str, float]) -> None:
    """Set rlimits: memory, CPU seconds, file size, threads, open files; no core dumps."""
    wanted = {
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_CPU: limits["seconds"] + 1,
        resource.RLIMIT_FSIZE: limits["file"],
        resource.RLIMIT_NPROC: limits["threads"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = int(most if hard == resource.RLIM_INFINITY else min(most, hard))
        resource.setrlimit(kind, (value, value))


def isolate(libc: Any, limits: dict[str, Any]) -> dict[str, bool]:
    """Namespaces and Landlock, without capabilities. Returns which of the two hold."""
    held = {"namespaces": False, "landlock": False}
    if libc:
        if os.getuid() == 0:  # the number of root's threads has no limit; files go by the other uid
            with contextlib.suppress(OSError):
                os.setresuid(65534, -1, -1)
        held["namespaces"] = namespaces(libc, limits)
        if held["namespaces"]:
            os.chdir(FOLDER)
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        held["landlock"] = landlock(libc, held["namespaces"])
        libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    return held


def seal(libc: Any, limits: dict[str, Any], writable: bool) -> bool:
    """Rlimits, death with the parent, no core dumps, seccomp. Returns whether seccomp holds."""
    set_limits(limits)
    if not libc:
        return False
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: others of this user cannot look inside
    return seccomp(libc, writable)


# --- values between the program and the checker ---------------------------------------------------

SEQUENCES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, bytes, bytearray)
}


def pack(value: Any) -> Any:
    """A value as JSON. Subclasses become their plain type, other objects an opaque one."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, dict):
        return ["dict", [[pack(k), pack(v)] for k, v in value.items()]]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [pack(one) for one in value]]
    if hasattr(type(value), "__iter__"):
        return ["iter", [pack(one) for one in value]]
    return ["object", None]


def unpack(value: Any) -> Any:
    """The value that `pack` made JSON of. An opaque object equals nothing."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "object":
        return object()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {unpack(k): unpack(v) for k, v in content}
    parts = [unpack(one) for one in content]
    return iter(parts) if kind == "iter" else SEQUENCES[kind](parts)


def send(pipe: Any, message: Any) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


# --- the two processes ----------------------------------------------------------------------------


def run_program(calls: Any, answers: Any, sealed: bool) -> None:
    """In the program's process: compile it, run it, then answer the checker's calls."""

    def answer(value: Any = None, problem: BaseException | None = None) -> None:
        kinds = [k.__name__ for k in type(problem).__mro__ if k.__module__ == "builtins"]
        send(answers, [value, kinds[0] if problem is not None else None])

    answer(sealed)
    source, entry = json.loads(calls.readline())
    found: dict[str, Any] = {}
    try:
        code = compile(source, "candidate", "exec")
        answer(True)
    except BaseException as problem:  # also MemoryError and RecursionError in the parser
        answer(False)
        return answer(problem=problem)
    try:
        # an empty namespace, in which __name__ is not "__main__", as in the harness's code_eval
        exec(code, found)
        answer()
    except BaseException as problem:
        return answer(problem=problem)
    for line in calls:
        arguments, named = unpack(json.loads(line))
        try:
            if entry not in found:
                raise NameError
            answer(pack(found[entry](*arguments, **named)))
        except BaseException as problem:
            answer(problem=problem)


def check_program(calls: Any, answers: Any, job: dict[str, str], out: Any) -> None:
    """In the checker's process: run the tests, which call the program, and send the verdict."""
    compiled = True

    def finish(reason: str) -> None:
        send(out, {"reason": reason, "compiled": compiled})
        os._exit(0)

    def answer() -> Any:
        """What the program answers: a value, or the exception that it raised."""
        error: BaseException = RuntimeError()
        try:
            value, raised = json.loads(answers.readline(MOST_ANSWER))
            value = unpack(value)
            if raised is None:
                return value
            kind = getattr(builtins, raised, None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                with contextlib.suppress(TypeError):  # some need arguments
                    error = kind()
        except Exception:  # it has ended, or this is no answer; a test cannot catch it
            finish("ended early")
        raise error

    def function(*arguments: Any, **named: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):
            send(calls, pack((arguments, named)))
        return answer()

    try:
        send(calls, [job["candidate"], job["entry"]])
        compiled = answer() is True  # before any of the program has run
        answer()
        space: dict[str, Any] = {}
        exec(compile(job["helpers"], "helpers", "exec"), space)
        space[job["entry"]] = function
        exec(compile(job["test"], "test", "exec"), space)
    except BaseException as problem:
        finish(f"failed: {type(problem).__name__}"[:200])
    finish("passed")


def main() -> None:
    """Shut both processes in, say so, read the job from stdin, check the program, answer."""
    limits = json.loads(sys.argv[1])
    source, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    held = isolate(libc, limits)
    (its_calls, calls), (answers, its_answers) = os.pipe(), os.pipe()
    if os.fork() == 0:  # the program's process: nothing of the job has been read yet
        source.close()
        out.close()
        os.close(calls)
        os.close(answers)
        sealed = seal(libc, limits, held["namespaces"])
        run_program(os.fdopen(its_calls, "rb"), os.fdopen(its_answers, "wb"), sealed)
        os._exit(0)
    os.close(its_calls)
    os.close(its_answers)
    to, back = os.fdopen(calls, "wb"), os.fdopen(answers, "rb")
    sealed = seal(libc, limits, held["namespaces"])
    send(out, held | {"seccomp": json.loads(back.readline())[0] and sealed})
    check_program(to, back, json.loads(source.read()), out)


if __name__ == "__main__":
    main()
