"""Attempts of a generated program to reach something outside its sandbox, and what is outside.

Each probe is the body of a function that returns if the attempt worked and raises if it was
refused. `python tests/probes.py` runs them all as the user who runs it and prints, as JSON, which
exception ended each and whether anything outside changed (`test_code_sandbox.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import resource
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dualsft.lab.evaluation.sandbox import Program, ProgramVerdict, SandboxLimits, run_candidate

FILES = {
    "write": "open(KEPT, 'w').write('x')",
    "append": "os.write(os.open(KEPT, os.O_WRONLY | os.O_APPEND), b'x')",
    "create": "open(NEW, 'x')",
    "touch": "pathlib.Path(NEW).touch()",
    "mkdir": "os.mkdir(NEW)",
    "symlink outside": "os.symlink('/', NEW)",
    "fifo": "os.mkfifo(NEW)",
    "device": "os.mknod(NEW, 0o600 | 0o20000, os.makedev(1, 3))",
    "device inside": "os.mknod('null', 0o600 | 0o20000, os.makedev(1, 3))",
    "hard link outside": "os.link(KEPT, NEW)",
    "hard link inside": "os.link(KEPT, 'mine')",
    "remove": "os.remove(KEPT)",
    "rename": "os.rename(KEPT, NEW)",
    "rename into the folder": "os.rename(KEPT, 'mine')",
    "rename out of the folder": "open('mine', 'w').close(); os.rename('mine', NEW)",
    "truncate": "os.truncate(KEPT, 0)",
    "truncate at opening": "os.open(KEPT, os.O_TRUNC)",
    "remove a tree": "shutil.rmtree(HERE)",
    "chmod": "os.chmod(KEPT, 0)",
    "chmod beside": "os.chmod('kept', 0, dir_fd=os.open(HERE, os.O_PATH))",
    "chmod by libc": "check(libc.chmod(KEPT.encode(), 0))",
    "fchmod": "os.fchmod(os.open(LIBRARY, os.O_RDONLY), 0o600)",
    "chown": "os.chown(KEPT, os.getuid(), os.getgid())",
    "utime": "os.utime(KEPT, (1, 1))",
    "utime of a descriptor": "os.utime(os.open(LIBRARY, os.O_RDONLY), (1, 1))",
    "setxattr": "os.setxattr(KEPT, 'user.x', b'y')",
    "removexattr": "os.removexattr(KEPT, 'user.kept')",
    "setxattrat": "call(463, 463, -100, KEPT.encode(), 0, b'user.x', b'y', 16)",
    "file_setattr": "call(469, 469, -100, LIBRARY.encode(), bytes(24), 24, 0)",
    "FS_IOC_SETFLAGS": "fcntl.ioctl(os.open(LIBRARY, 0), 0x40086602, struct.pack('Q', 0x80080))",
    "FS_IOC_FSSETXATTR": "fcntl.ioctl(os.open(LIBRARY, os.O_RDONLY), 0x401C5820, bytes(28))",
    "lock": "fcntl.flock(os.open(LIBRARY, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "record lock": "fcntl.lockf(os.open(LIBRARY, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "lease": "fcntl.fcntl(os.open(LIBRARY, os.O_RDONLY), 1024, fcntl.F_RDLCK)",
    "dnotify": "fcntl.fcntl(os.open('.', os.O_RDONLY), 1026, 1)",
    "read": "open(KEPT).read()",
    "read through a link": "os.symlink(KEPT, 'link'); open('link').read()",
    "symlink race": "race()",
    "read from above": "open(os.open('../etc/passwd', os.O_RDONLY)).read()",
    "passwd": "open('/etc/passwd').read()",
    "list": "os.listdir(HERE)",
    "list the root": "os.listdir('/')",
    "openat2": "call(437, 437, -100, KEPT.encode(), bytes(24), 24)",
    "open by handle": "call(304, 265, -100, bytes(16), 0)",
    "environment of the parent": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "own memory": "open('/proc/self/mem', 'rb+')",
    "memory of 1": "open('/proc/1/mem', 'rb')",
    "environment of a process": "open(f'/proc/{PID}/environ', 'rb').read()",
    "sysctl": "open('/proc/sys/kernel/hostname', 'w')",
    "sys": "os.listdir('/sys')",
    "kernel log": "open('/dev/kmsg')",
    "terminal": "open('/dev/tty')",
    "shared memory": "open('/dev/shm/dualsft-probe', 'w')",
    "mount": "check(libc.mount(b'tmpfs', b'/proc', b'tmpfs', 0, 0))",
    "remount": "check(libc.mount(None, b'/', None, 32 | 4096, None))",
    "mount_setattr": "call(442, 442, -100, b'/', 0x8000, struct.pack('QQQQ', 0, 1, 0, 0), 32)",
    "unmount": "check(libc.umount2(b'/proc', 2))",
    "unmount lazily": "os.chdir('/'); check(libc.umount2(b'/proc', 2))",
    "chroot": "os.chroot('.')",
    "pivot_root": "call(155, 41, b'.', b'.')",
    "fsopen": "call(430, 430, b'proc', 0)",
    "open_tree": "call(428, 428, -100, b'/', 1)",
}
PROCESSES = {
    "fork": "os.fork() or os._exit(0)",
    "fork bomb": "while True: os.fork()",
    "clone": "call(56, 220, 17, 0, 0, 0, 0)",
    "clone into a namespace": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "call(435, 435, bytes(88), 88)",
    "exec": "os.execv('/bin/true', ['true'])",
    "execveat": "call(322, 281, -100, b'/bin/true', 0, 0, 0)",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'])",
    "system": "check(libc.system(b'true'))",
    "kill": "os.kill(PID, 9)",
    "stop": "os.kill(PID, 19)",
    "kill the parent": "os.kill(os.getppid(), 15)",
    "kill all": "os.kill(-1, 9)",
    "kill the group": "os.killpg(0, 9)",
    "kill the first": "os.kill(1, 9)",
    "tgkill": "call(234, 131, PID, PID, 9)",
    "tkill": "call(200, 130, PID, 9)",
    "sigqueue": "call(129, 138, PID, 9, bytes(128))",
    "pidfd": "os.pidfd_open(PID)",
    "pidfd_getfd": "call(438, 438, 3, 0, 0)",
    "signal by a descriptor": "call(424, 424, 3, 9, 0, 0)",
    "F_SETOWN": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PID)",
    "F_SETOWN_EX": "fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, PID))",
    "F_SETSIG": "fcntl.fcntl(os.pipe()[0], 10, 9)",
    "FIOSETOWN": "fcntl.ioctl(os.pipe()[0], 0x8901, struct.pack('i', PID))",
    "ptrace": "call(101, 117, 0x4206, PID, 0, 0)",
    "process_vm_readv": "call(310, 270, PID, 0, 0, 0, 0, 0)",
    "process_vm_writev": "call(311, 271, PID, 0, 0, 0, 0, 0)",
    "process_madvise": "call(440, 440, 3, 0, 0, 0, 0)",
    "kcmp": "call(312, 272, PID, PID, 0, 0, 0)",
    "affinity": "os.sched_setaffinity(PID, {0})",
    "scheduler": "os.sched_setscheduler(PID, os.SCHED_IDLE, os.sched_param(0))",
    "sched_setattr": "call(314, 274, PID, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)",
    "priority": "os.setpriority(os.PRIO_PROCESS, PID, 19)",
    "priority of the user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "own priority": "os.nice(5)",
    "ioprio": "call(251, 30, 1, PID, 3 << 13)",
    "limits": "resource.prlimit(PID, resource.RLIMIT_NOFILE, (8, 8))",
    "migrate_pages": "call(256, 238, PID, 0, 0, 0)",
    "process group": "os.setpgid(0, 0)",
    "session": "os.setsid()",
    "setuid": "os.setuid(0)",
    "setresuid": "os.setresuid(1, 1, 1)",
    "setgroups": "os.setgroups([])",
    "capabilities": "check(libc.capset(struct.pack('Ii', 0x20080522, 0), b'\\xff' * 24))",
    "unshare": "check(libc.unshare(0x10000000))",
    "setns": "call(308, 268, 0, 0)",
    "outlive the parent": "check(libc.prctl(1, 0, 0, 0, 0))",
    "dumpable": "check(libc.prctl(4, 1, 0, 0, 0))",
    "another filter": "check(libc.prctl(22, 1, 0, 0, 0))",
}
KERNEL = {
    "socket": "socket.socket().connect(('127.0.0.1', PORT))",
    "socket by C": "import _socket; _socket.socket(2, 1, 0)",
    "datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "unix socket": "socket.socket(socket.AF_UNIX).connect(SOCKET)",
    "abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + SOCKET)",
    "pair": "socket.socketpair()",
    "netlink": "socket.socket(16, 3, 0)",
    "vsock": "socket.socket(40, 1, 0)",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "DNS": "socket.getaddrinfo('example.org', 80)",
    "io_uring": "call(425, 425, 8, bytes(120))",
    "bpf": "call(321, 280, 0, bytes(72), 72)",
    "userfaultfd": "call(323, 282, 1)",
    "perf": "call(298, 241, bytes(112), 0, -1, -1, 0)",
    "keys": "call(250, 219, 0, -3, 1)",
    "add a key": "call(248, 217, b'user', b'x', b'y', 1, -3)",
    "shmget": "call(29, 194, 0x6475, 4096, 0o1600)",
    "msgget": "call(68, 186, 0x6475, 0o1600)",
    "semget": "call(64, 190, 0x6475, 1, 0o1600)",
    "mq_open": "call(240, 180, b'dualsft', 0o102, 0o600, 0)",
    "memfd": "os.memfd_create('x')",
    "inotify": "check(libc.inotify_init1(0))",
    "fanotify": "call(300, 262, 0, 0)",
    "host name": "check(libc.sethostname(b'mine', 4))",
    "clock": "call(227, 112, 0, struct.pack('QQ', 1, 0))",
    "kernel messages": "call(103, 116, 10, 0, 0)",
    "swap off": "call(168, 225, b'/nowhere')",
    "quota": "call(179, 60, 0, 0, 0, 0)",
    "kernel module": "call(175, 105, 0, 0, b'')",
}
RESOURCES = {
    "10 GB": "bytearray(10 * 2**30)",
    "a large file": "open('mine', 'wb').write(bytes(2**22))",
    "disk fill": "for i in itertools.count(): open(str(i), 'wb').write(bytes(2**20 - 1))",
    "many files": "for i in itertools.count(): open(str(i), 'wb').close()",
    "many links": "open('0', 'w')\n    for i in itertools.count(1): os.link('0', str(i))",
    "nested folders": "for i in range(3000): os.mkdir('d'); os.chdir('d')",
    "descriptors": "while True: os.dup(0)",
    "pipes": "while True: os.pipe()",
    "threads": "threading.stack_size(2**15)\n    while True: threading.Thread(target=wait).start()",
    "more memory": "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
}
PROBES = FILES | PROCESSES | KERNEL | RESOURCES

START = """
import ctypes, fcntl, itertools, os, pathlib, resource, shutil, socket, struct, sys, threading, time
HERE, KEPT, NEW, SOCKET, LIBRARY, PID, PORT, X86 = {words}
libc = ctypes.CDLL(None, use_errno=True)
def check(done):
    if done != 0: raise OSError(ctypes.get_errno(), 'refused')
def call(x86, arm, *arguments):
    check(min(0, libc.syscall(x86 if X86 else arm, *arguments)))
def wait(): time.sleep(60)
def race():
    def swap():
        while True:
            for target in (KEPT, LIBRARY):
                os.symlink(target, 'new'); os.replace('new', 'race')
    threading.Thread(target=swap, daemon=True).start()
    for _ in range(2000):
        try:
            if open('race').read() == 'kept': return
        except FileNotFoundError: pass
        except PermissionError: refused = True
    if refused: raise PermissionError
def probe():
    {body}
    return 'escaped'
"""


class Outside:
    """Files, a process and sockets of this user, which a probe may try to reach."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "socket"
        self.kept, self.new = folder / "kept", folder / "new"
        self.kept.write_text("kept")
        os.setxattr(self.kept, "user.kept", b"kept")
        self.victim = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
        self.servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self.servers[1].bind(str(self.path))
        self.servers[1].listen()
        self.servers.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.port = self.servers[0].getsockname()[1]
        self.servers[2].bind(("127.0.0.1", self.port))

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for server in self.servers:
            server.close()

    def connected(self) -> bool:
        """Whether somebody has connected since the last call."""
        asked = select.select(self.servers[:1], [], [], 0)[0]
        for server in asked:
            server.accept()[0].close()
        return bool(asked)

    def program(self, body: str) -> Program:
        """Passes if the probe works."""
        places = (self.folder, self.kept, self.new, self.path, json.__file__)
        words = (*map(str, places), self.victim.pid, self.port, platform.machine() == "x86_64")
        source = START.format(words=repr(words), body=body)
        return Program(source, "assert probe() == 'escaped'", "probe")

    def seen(self) -> list[object]:
        """All that a probe could have changed."""
        pid, facts = self.victim.pid, list[object]()
        for path in (self.kept, Path(json.__file__)):
            state, flags = path.stat(), bytearray(8)
            with contextlib.suppress(OSError), path.open() as file:
                fcntl.ioctl(file, 0x80086601, flags)  # FS_IOC_GETFLAGS
            facts += [state.st_mode, state.st_uid, state.st_mtime_ns, state.st_nlink, bytes(flags)]
            facts += [path.read_bytes(), os.listxattr(path)]
        facts += [sorted(os.listdir(self.folder)), self.victim.poll(), os.getpgid(pid)]
        facts += [Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] in "TtZX"]
        facts += [os.sched_getaffinity(pid), os.sched_getscheduler(pid)]
        facts += [os.getpriority(os.PRIO_PROCESS, one) for one in (pid, 0)]
        facts += [resource.prlimit(pid, resource.RLIMIT_NOFILE), platform.node(), os.getcwd()]
        kinds = ("shm", "msg", "sem")
        facts += [f" {0x6475} " in Path(f"/proc/sysvipc/{kind}").read_text() for kind in kinds]
        facts += [os.statvfs(place).f_flag for place in ("/", "/proc")]
        facts += [Path("/dev/shm/dualsft-probe").exists(), os.listdir(tempfile.gettempdir())]
        return [*facts, select.select(self.servers, [], [], 0)]

    def attempt(self, name: str) -> tuple[ProgramVerdict, bool]:
        """The verdict of a probe, and whether everything outside is as before."""
        before = self.seen()
        verdict = run_candidate(self.program(PROBES[name]), LIMITS)
        return verdict, self.seen() == before


LIMITS = SandboxLimits(seconds=10, memory=2**29)
REFUSALS = {"OSError", "PermissionError", "FileNotFoundError", "MemoryError", "RuntimeError"}
REFUSALS |= {"ProcessLookupError", "ValueError", "NotADirectoryError", "BlockingIOError"}


@contextlib.contextmanager
def outside() -> Iterator[Outside]:
    """What is outside, in a temporary folder that nothing else uses."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as left:
        old, tempfile.tempdir = tempfile.tempdir, place
        left.callback(setattr, tempfile, "tempdir", old)
        folder = Path(place) / "here"
        folder.mkdir()
        made = Outside(folder)
        left.callback(made.close)
        yield made


def main() -> None:
    with outside() as found:
        said = {name: found.attempt(name) for name in PROBES}
    facts = {name: [verdict.reason, same] for name, (verdict, same) in said.items()}
    print(json.dumps({"user": os.getuid(), "probes": facts}), file=sys.stdout)


if __name__ == "__main__":
    main()
