"""Hostile programs: each tries one way out, from the inside, and says whether it was refused."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlcli_sandbox import Sandbox
from sandboxes import run, sandbox

__all__ = ["sandbox"]

PRELUDE = """
import ctypes, errno, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def sys_call(x86, arm, *args):
    # 64-bit arguments: the C function takes its variadic ones as they come.
    number = x86 if X86 else arm
    if number is None: raise PermissionError(1, "no such call here")
    args = [a if isinstance(a, (bytes, type(None))) or not isinstance(a, int) else ctypes.c_long(a) for a in args]
    result = libc.syscall(ctypes.c_long(number), *args)
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def tried(what, *args, **kwargs):
    try: got = what(*args, **kwargs)
    except (PermissionError, FileNotFoundError, ProcessLookupError): print("refused")
    except OSError as e:
        print("refused" if e.errno in (errno.EROFS, errno.ENOSYS, errno.ENOTDIR, errno.EXDEV) else repr(e))
    else: print("DONE", repr(got)[:200])
"""

FILES = {
    "writing to /etc": "tried(open, '/etc/rlcli-was-here', 'w')",
    "writing to /usr": "tried(open, '/usr/rlcli-was-here', 'w')",
    "writing to the root": "tried(open, '/rlcli-was-here', 'w')",
    "writing beside the standard library": "tried(open, os.__file__ + '.was-here', 'w')",
    "changing the standard library": "tried(open, os.__file__, 'a')",
    "emptying the standard library": "tried(os.open, os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "cutting the standard library": "tried(os.truncate, os.__file__, 0)",
    "deleting from the standard library": "tried(os.unlink, os.__file__)",
    "renaming the standard library": "tried(os.rename, os.__file__, os.__file__ + 'x')",
    "a link to the standard library": "tried(os.link, os.__file__, 'mine')",
    "modes of the standard library": "tried(os.chmod, os.__file__, 0o777)",
    "modes by descriptor": "tried(os.fchmod, os.open(os.__file__, os.O_RDONLY), 0o777)",
    "owners of the standard library": "tried(os.chown, os.__file__, 1000, 1000)",
    "times of the standard library": "tried(os.utime, os.__file__, (1, 1))",
    "attributes of the standard library": "tried(os.setxattr, os.__file__, 'user.x', b'1')",
    "writing to /dev/shm": "tried(open, '/dev/shm/rlcli-was-here', 'w')",
    "writing to /var/tmp": "tried(open, '/var/tmp/rlcli-was-here', 'w')",
    "writing to /dev": "tried(open, '/dev/rlcli-was-here', 'w')",
    "a device": "tried(os.mknod, 'disk', 0o60600, os.makedev(254, 0))",
    "the machine's users": "tried(open, '/etc/shadow')",
    "the machine's accounts": "tried(open, '/etc/passwd')",
    "the host's name file": "tried(open, '/etc/hostname')",
    "reading ssh keys": "tried(os.listdir, '/root/.ssh')",
    "reading the owner's home": "tried(open, {at_home!r})",
    "reading a secret": "tried(open, {secret!r})",
    "changing a secret": "tried(open, {secret!r}, 'w')",
    "cutting a secret": "tried(os.truncate, {secret!r}, 0)",
    "deleting a secret": "tried(os.unlink, {secret!r})",
    "modes of a secret": "tried(os.chmod, {secret!r}, 0o777)",
    "times of a secret": "tried(os.utime, {secret!r}, (1, 1))",
    "a symbolic link to a secret": "os.symlink({secret!r}, 'link'); tried(open, 'link')",
    "a symbolic link to write by": "os.symlink({secret!r}, 'link'); tried(open, 'link', 'w')",
    "a hard link to a secret": "tried(os.link, {secret!r}, 'link')",
    "up from the working directory": "tried(open, '../' * 30 + {secret!r}.lstrip('/'))",
    "listing the folder of temporary files": "tried(lambda: {at_tmp!r} in os.listdir({tmp!r}) or open({secret!r}))",
    "another process's environment": "tried(open, '/proc/{owner}/environ')",
    "the owner's memory": "tried(open, '/proc/{owner}/mem', 'r+b')",
    "the owner's descriptors": "tried(os.listdir, '/proc/{owner}/fd')",
    "the root of process 1": "tried(lambda: os.listdir('/proc/1/root' + {tmp_of_secret!r}))",
    "the working directory of process 1": "tried(os.listdir, '/proc/1/cwd/..' + {tmp_of_secret!r})",
    "the memory of process 1": "tried(open, '/proc/1/mem', 'r+b')",
    "the attributes of the standard library": (
        "import fcntl; tried(fcntl.ioctl, os.open(os.__file__, 0), 0x40086602, b'\\x40' + bytes(7))"
    ),
    "the kernel's settings": "tried(open, '/proc/sys/kernel/core_pattern', 'w')",
    "the magic key": "tried(open, '/proc/sysrq-trigger', 'w')",
    "control groups": "tried(os.mkdir, '/sys/fs/cgroup/rlcli-was-here')",
    "the kernel's log": "tried(open, '/dev/kmsg')",
    "the disk": "tried(open, '/dev/vda', 'rb')",
    "physical memory": "tried(open, '/dev/mem', 'rb')",
    "a terminal": "tried(open, '/dev/tty', 'w')",
    "files by handle": "tried(sys_call, 304, 265, -100, b'\\x08\\0\\0\\0\\1\\0\\0\\0' + bytes(8), 0)",
}

PROCESSES = {
    "fork": "tried(os.fork)",
    "vfork": "tried(sys_call, 58, None)",
    "fork by clone": "tried(sys_call, 56, 220, 17, 0, 0, 0, 0)",
    "fork by clone3": "tried(sys_call, 435, 435, bytes(64), 64)",
    "a process that shares memory": "tried(sys_call, 56, 220, 0x100 | 0x4000 | 17, 0, 0, 0, 0)",
    "a thread in a namespace of its own": "tried(sys_call, 56, 220, 0x10000 | 0x800 | 0x100 | 0x20000000, 0, 0, 0, 0)",
    "a shell": "tried(os.system, 'true') if os.system('true') == 0 else print('refused')",
    "subprocess": "import subprocess; tried(subprocess.run, ['/bin/true'])",
    "posix_spawn": "tried(os.posix_spawn, '/bin/true', ['true'], {{}})",
    "multiprocessing": (
        "import multiprocessing as m; tried(lambda: m.get_context('fork').Process(target=print).start())"
    ),
    "a terminal of its own": "tried(open, '/dev/ptmx')",
    "exec": "tried(os.execv, '/bin/true', ['true'])",
    "exec of a file of its own": "open('x', 'wb').write(open('/bin/true', 'rb').read()); tried(os.execv, 'x', ['x'])",
    "exec of a descriptor": "tried(os.execve, os.open('/bin/true', os.O_RDONLY), ['true'], {{}})",
    "killing everybody": "tried(os.kill, -1, 9)",
    "killing the group": "tried(os.killpg, 0, 9)",
    "killing the group by kill": "tried(os.kill, 0, 9)",
    "killing the parent": "tried(os.kill, os.getppid() or 1, 9)",
    "killing the owner": "tried(os.kill, {owner}, 9)",
    "killing by queue": "tried(sys_call, 129, 138, {owner}, 9, bytes(128))",
    "killing a thread of the owner": "tried(sys_call, 200, 130, {owner}, 9)",
    "killing a thread by its group": "tried(sys_call, 234, 131, {owner}, {owner}, 9)",
    "killing by descriptor": "tried(os.pidfd_open, {owner})",
    "SIGIO to the owner": "import fcntl; tried(fcntl.fcntl, 0, fcntl.F_SETOWN, {owner})",
    "another signal for SIGIO": "import fcntl; tried(fcntl.fcntl, 0, 10, 9)",
    "SIGIO by ioctl": "import fcntl; tried(fcntl.ioctl, 0, 0x8901, ({owner}).to_bytes(4, 'little'))",
    "ptrace of the parent": "tried(sys_call, 101, 117, 16, {owner}, 0, 0)",
    "the parent's memory": "tried(sys_call, 310, 270, {owner}, 0, 0, 0, 0, 0)",
    "descriptors of the parent": "tried(sys_call, 438, 438, 0, 1, 0)",
    "a session of its own": "tried(os.setsid)",
    "a group of its own": "tried(os.setpgid, 0, 0)",
    "limits of another process": "import resource; tried(resource.prlimit, {owner}, resource.RLIMIT_CORE, (0, 0))",
    "more memory": "tried(sys_call, 302, 261, 0, 9, b'\\xff' * 16, 0)",
    "surviving the parent": "tried(sys_call, 157, 167, 1, 0, 0, 0, 0)",
    "hiding from the owner": "tried(sys_call, 157, 167, 4, 0, 0, 0, 0)",
    "taking orphans": "tried(sys_call, 157, 167, 36, 1, 0, 0, 0)",
    "being another user": "tried(os.setuid, 12345) if os.getpid() != 2 else tried(sys_call, 157, 167, 8, 1, 0, 0, 0)",
    "other groups": "tried(os.setgroups, [0])",
    "capabilities": "tried(sys_call, 126, 91, b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24)",
    "the priority of others": (
        "tried(os.setpriority, os.PRIO_PROCESS, {owner}, 19) if os.getpid() != 2 else print('refused')"
    ),
    "the priority of its user": "tried(os.setpriority, os.PRIO_USER, 0, 19)",
    "the processors of others": "tried(os.sched_setaffinity, {owner}, [0])",
    "the scheduler of others": "tried(os.sched_setscheduler, {owner}, os.SCHED_IDLE, os.sched_param(0))",
    "a higher priority": "tried(os.nice, -10)",
}

NETWORK = {
    "a TCP socket": "import socket; tried(socket.create_connection, ('127.0.0.1', {port}), 2)",
    "a UDP socket": "import socket; tried(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)",
    "an IPv6 socket": "import socket; tried(socket.socket, socket.AF_INET6)",
    "a raw socket": "import socket; tried(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)",
    "a netlink socket": "import socket; tried(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)",
    "a unix socket": "import socket; tried(socket.socket, socket.AF_UNIX)",
    "a listener": "import socket; tried(socket.create_server, ('127.0.0.1', 0))",
    "a page": (
        "import http.client; tried(http.client.HTTPConnection('127.0.0.1', {port}, timeout=2).request, 'GET', '/')"
    ),
    "a datagram from a pair": (
        "import socket; a, b = socket.socketpair(type=socket.SOCK_DGRAM); tried(a.sendto, b'x', '\\0{abstract}')"
    ),
    "a message from a pair": (
        "import socket; a, b = socket.socketpair(type=socket.SOCK_DGRAM); tried(a.sendmsg, [b'x'], [], 0, "
        "'\\0{abstract}')"
    ),
    "connecting a pair": (
        "import socket; a, b = socket.socketpair(type=socket.SOCK_DGRAM); tried(a.connect, '\\0{abstract}')"
    ),
    "binding a pair": "import socket; a, b = socket.socketpair(); tried(a.bind, '\\0mine')",
    "handing a descriptor on": "import socket; a, b = socket.socketpair(); tried(socket.send_fds, a, [b'x'], [0])",
    "a pair of another kind": "import socket; tried(socket.socketpair, socket.AF_INET)",
}

KERNEL = {
    "memfd_create": "tried(os.memfd_create, 'x')",
    "memfd_secret": "tried(sys_call, 447, 447, 0)",
    "io_uring": "tried(sys_call, 425, 425, 8, bytes(120))",
    "bpf": "tried(sys_call, 321, 280, 0, bytes(64), 64)",
    "perf_event_open": "tried(sys_call, 298, 241, bytes(128), 0, -1, -1, 0)",
    "userfaultfd": "tried(sys_call, 323, 282, 1)",
    "keys": "tried(sys_call, 248, 217, b'user\\0', b'x\\0', b'y', 1, -3)",
    "keyctl": "tried(sys_call, 250, 219, 0, -3, 1)",
    "mount": "tried(sys_call, 165, 40, b'none\\0', b'/tmp\\0', b'tmpfs\\0', 0, 0)",
    "umount": "tried(sys_call, 166, 39, b'/tmp\\0', 2)",
    "fsopen": "tried(sys_call, 430, 430, b'tmpfs\\0', 0)",
    "open_tree": "tried(sys_call, 428, 428, -100, b'/\\0', 1)",
    "a user namespace": "tried(sys_call, 272, 97, 0x10000000)",
    "a mount namespace": "tried(sys_call, 272, 97, 0x20000)",
    "joining a namespace": "tried(sys_call, 308, 268, 0, 0)",
    "chroot": "tried(os.chroot, '.')",
    "pivot_root": "tried(sys_call, 155, 41, b'.\\0', b'.\\0')",
    "reboot": "tried(sys_call, 169, 142, 0xfee1dead, 672274793, 0, 0)",
    "a kernel module": "tried(sys_call, 175, 105, b'', 0, b'\\0')",
    "swap": "tried(sys_call, 167, 224, b'x\\0', 0)",
    "the clock": "import time; tried(time.clock_settime, time.CLOCK_REALTIME, 0)",
    "the host's name": "import socket; tried(socket.sethostname, 'mine')",
    "personality": "tried(sys_call, 135, 92, 0x40000)",
    "shared memory of System V": "tried(sys_call, 29, 194, 0, 4096, 0o1600)",
    "a queue of System V": "tried(sys_call, 68, 186, 0, 0o1600)",
    "semaphores of System V": "tried(sys_call, 64, 190, 0, 1, 0o1600)",
    "a POSIX queue": "tried(sys_call, 240, 180, b'x\\0', 0o102, 0o600, 0)",
    "POSIX shared memory": (
        "from multiprocessing import shared_memory; tried(shared_memory.SharedMemory, create=True, size=9)"
    ),
    "locked memory": "tried(lambda: libc.mlockall(3) and sys_call(151, 230, 3))",
    "huge pages": "tried(sys_call, 9, 222, 0, 1 << 21, 3, 0x40022, -1, 0)",
    "a larger pipe": "import fcntl; tried(fcntl.fcntl, os.pipe()[0], 1031, 1 << 20)",
    "watching files": "tried(sys_call, 294, 26, 0)",
    "another filter": "tried(sys_call, 317, 277, 0, 0, 0)",
    "asynchronous input": "tried(sys_call, 206, 0, 8, bytes(8))",
    "a call from the future": "tried(sys_call, 511, 511, 0)",
    "typing into a terminal": "import fcntl; tried(fcntl.ioctl, 0, 0x5412, b'x')",
}


@pytest.fixture
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """A secret file outside, sockets that wait to be reached, and a process that stands for the owner's others."""
    folder = Path(tempfile.mkdtemp(prefix="kept-from-programs-"))
    secret = folder / "secret"
    secret.write_text("kept")
    abstract = f"rlcli-test-{os.getpid()}"
    bystander = subprocess.Popen(["sleep", "600"])
    with (
        tempfile.NamedTemporaryFile(dir=Path.home(), prefix=".kept-from-programs-") as at_home,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind("\0" + abstract)
        for waiting in (server, datagrams):
            waiting.setblocking(False)
        initial = secret.stat()
        yield {
            "secret": str(secret),
            "at_tmp": folder.name,
            "tmp": tempfile.gettempdir(),
            "tmp_of_secret": str(folder),
            "at_home": at_home.name,
            "owner": bystander.pid,
            "port": server.getsockname()[1],
            "abstract": abstract,
        }
        with pytest.raises(BlockingIOError):
            server.accept()
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
    final = secret.stat()
    assert (initial.st_mode, initial.st_mtime, initial.st_nlink) == (final.st_mode, final.st_mtime, final.st_nlink)
    assert secret.read_text() == "kept"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", [*FILES, *PROCESSES, *NETWORK, *KERNEL])
def test_a_way_out_is_refused(sandbox: Sandbox, around: dict[str, object], name: str) -> None:
    attack = {**FILES, **PROCESSES, **NETWORK, **KERNEL}[name].format(**around)
    ended = run(sandbox, PRELUDE + attack)
    assert (ended.stdout, ended.stderr, ended.status) == (b"refused\n", b"", 0)
    assert not any(Path(folder, "rlcli-was-here").exists() for folder in ("/", "/etc", "/usr", "/dev/shm", "/var/tmp"))
