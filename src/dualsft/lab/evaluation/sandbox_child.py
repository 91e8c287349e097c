"""Inside the sandbox: one process that shuts itself in and then runs one candidate program.

`lab/evaluation/sandbox.py` starts this file by its path, with an isolated interpreter, for every
program of a benchmark that generates code (HumanEval, METHODS.md 0.1). It imports nothing of
dualsft. Before the program runs it gives up, one after the other: memory, CPU time, file size and
processes (rlimits), the network (a namespace of its own), writing outside of its folder
(Landlock), sockets, processes, other processes' signals (seccomp), and the same things once more
in the interpreter (an audit hook). It says which of these took hold. What the kernel does not
offer is left out and said so. The program passes only if it runs to its end: the answer carries a
token that the parent made, so a program that ends the process early has not passed.

This is the one file of the package that runs code it was given.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_NEW_USER, _NEW_NET, _NEW_IPC, _CLONE_THREAD = 0x10000000, 0x40000000, 0x08000000, 0x00010000
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38

_SYSCALLS: dict[str, dict[str, Any]] = {
    "x86_64": {
        "audit": 0xC000003E,
        # socket connect bind socketpair, fork vfork execve execveat, tkill rt_sigqueueinfo
        # rt_tgsigqueueinfo, ptrace process_vm_readv process_vm_writev, unshare setns mount,
        # pidfd_open pidfd_send_signal pidfd_getfd, io_uring_setup bpf userfaultfd
        # perf_event_open, keyctl add_key request_key
        "denied": (41, 42, 49, 53, 57, 58, 59, 322, 200, 129, 297, 101, 310, 311, 272, 308, 165)
        + (434, 424, 438, 425, 321, 323, 298, 250, 248, 249)
        + (90, 91, 268, 452, 92, 93, 94, 260)  # chmod and chown
        + (132, 235, 261, 280, 188, 189, 190, 197, 198, 199),  # utime and xattr
        "own": (62, 234, 302),  # kill tgkill prlimit64: of this process only
        "clone": 56,
    },
    "aarch64": {
        "audit": 0xC00000B7,
        "denied": (198, 203, 200, 199, 221, 281, 130, 138, 240, 117, 270, 271, 97, 268, 40)
        + (434, 424, 438, 425, 280, 282, 241, 219, 217, 218)
        + (52, 53, 452, 54, 55, 88, 5, 6, 7, 14, 15, 16),  # chmod, chown, utime, xattr
        "own": (129, 131, 261),
        "clone": 220,
    },
}
_CLONE3 = 435

_FORBIDDEN_EVENTS = (
    "socket.__new__",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "pty.spawn",
    "os.kill",
    "os.killpg",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "os.setxattr",
    "os.removexattr",
)
_FORBIDDEN_MODULES = ("_posixsubprocess", "_ctypes")
_PATH_EVENTS = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "os.utime",
    "os.truncate",
    "os.link",
    "os.symlink",
    "shutil.rmtree",
    "shutil.move",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def set_limits(limits: dict[str, int]) -> None:
    """rlimits: memory, CPU seconds, size of a file, processes, open files; no core dumps."""
    wanted = {
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_CPU: limits["cpu"],
        resource.RLIMIT_FSIZE: limits["file"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


def leave_network(libc: Any) -> bool:
    """A network namespace with no interface, where the kernel lets a user make one."""
    return hasattr(libc, "unshare") and libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC) == 0


def landlock(libc: Any, folder: str) -> bool:
    """No writing outside of `folder`, no TCP, no signals to others (as far as the kernel knows)."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    writing = (1 << 1) | sum(1 << bit for bit in range(4, 13))  # write, remove, make
    writing |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)  # refer, cut
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", writing, 3, 3)[:size]
    rules = libc.syscall(444, attributes, size, 0)
    if rules < 0:
        return False
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    allowed = struct.pack("=Qi", writing, inside)
    done = libc.syscall(445, rules, 1, allowed, 0) == 0 and libc.syscall(446, rules, 0) == 0
    os.close(inside)
    os.close(rules)
    return done


def seccomp(libc: Any) -> bool:
    """No sockets, no new processes, no signals to others: refused by the kernel's filter."""
    known = _SYSCALLS.get(platform.machine())
    if known is None:
        return False

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, above, anyof, give = 0x20, 0x15, 0x35, 0x45, 0x06
    number, arch, argument = 0, 4, 16
    refuse = op(give, _ERRNO | _EPERM)
    lines = [op(load, arch), op(equal, known["audit"], 1, 0), refuse]
    lines += [op(load, number), op(above, 0x40000000, 0, 1), refuse]  # the x32 numbers
    lines += [op(equal, _CLONE3, 0, 1), op(give, _ERRNO | _ENOSYS)]  # then clone is tried
    for call in known["denied"]:
        lines += [op(equal, call, 0, 1), refuse]
    lines += [op(equal, known["clone"], 0, 4), op(load, argument)]
    lines += [op(anyof, _CLONE_THREAD, 0, 1), op(give, _ALLOW), refuse]
    for call in known["own"]:
        lines += [op(equal, call, 0, 5), op(load, argument), op(equal, 0, 1, 0)]
        lines += [op(equal, os.getpid(), 0, 1), op(give, _ALLOW), refuse]
    lines.append(op(give, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(lines))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    program = Program(len(lines), ctypes.addressof(code))
    return libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0


def guard(folder: str, alone: bool) -> None:
    """The same refusals inside the interpreter: weaker than the kernel's, but everywhere.

    When it stands alone it also refuses to open folders (a path relative to one says nothing of
    where it leads) and the module under `subprocess`, which tells no hook of what it starts.
    """
    real, inside, fspath = os.path.realpath, folder.rstrip("/") + "/", os.fspath
    is_folder = os.path.isdir

    def outside(path: Any) -> bool:
        if isinstance(path, int) or path is None:
            return False
        place = real(fspath(path))
        place = place.decode("utf-8", "replace") if isinstance(place, bytes) else place
        return not f"{place}/".startswith(inside)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        refused = event in _FORBIDDEN_EVENTS
        if event == "open":
            path, mode, flags = arguments
            writes = bool((flags or 0) & _WRITING) or any(c in (mode or "") for c in "wax+")
            refused = writes and outside(path)
            refused = refused or alone and not isinstance(path, int) and is_folder(path)
        elif event == "import":
            refused = alone and arguments[0] in _FORBIDDEN_MODULES
        elif event in _PATH_EVENTS:
            refused = any(outside(a) for a in arguments if isinstance(a, str | bytes))
        if refused:
            raise PermissionError(_EPERM, f"the sandbox refuses {event}")

    sys.addaudithook(hook)


def shut_in(folder: str, limits: dict[str, int]) -> dict[str, bool]:
    """Take every protection that this machine offers; returns which took hold."""
    set_limits(limits)
    taken = {"network_namespace": False, "landlock": False, "seccomp": False}
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        taken["network_namespace"] = leave_network(libc)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
            taken["landlock"] = landlock(libc, folder)
            taken["seccomp"] = seccomp(libc)
    if not (taken["landlock"] and taken["seccomp"]):
        for name in _FORBIDDEN_MODULES:
            sys.modules.pop(name, None)
    guard(folder, alone=not (taken["landlock"] and taken["seccomp"]))
    return taken


def can_compile(source: str) -> bool:
    try:
        compile(source, "candidate", "exec")
    except BaseException:  # a parser that gives up is no program either
        return False
    return True


def main() -> None:
    """Read the job from stdin, shut this process in, run the program, answer on the pipe."""
    job = json.loads(sys.stdin.buffer.read())
    pipe, token = int(job["pipe"]), str(job["token"])
    write: Callable[[int, bytes], int] = os.write
    leave: Callable[[int], Any] = os._exit
    dump = json.dumps
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    taken = shut_in(os.getcwd(), job["limits"])
    write(pipe, (dump(taken) + "\n").encode())
    compiled = can_compile(job["candidate"])
    try:
        # an empty namespace, in which __name__ is not "__main__", as in the harness's code_eval
        exec(compile(job["candidate"] + "\n" + job["test"], "candidate", "exec"), {})
        reason = "passed"
    except BaseException as problem:
        reason = f"failed: {type(problem).__name__}"
    answer = {"token": token, "compiled": compiled, "reason": str(reason)[:200]}
    write(pipe, (dump(answer) + "\n").encode())
    leave(0)


if __name__ == "__main__":
    main()
