"""Programs that eat memory. Bounded: 1.5 GiB each, half as much again as a sandbox allows by default.

A deed here says that it holds 1.5 GiB of memory that it has written to; the forgeries are watched from outside.
"""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

from tests.attacks.catalogue import Group

ATTACKS = Group("memory")
deed, forgery = ATTACKS.deed, ATTACKS.forgery
SLOW = 4.0
"""Seconds for a deed: so much memory must not be out of reach for want of time alone."""

deed("one bytearray", "def deed():\n    return len(bytearray(b'x') * (1536 << 20)) > 0", timeout_s=SLOW)
deed(
    "list of bytes",
    "def deed():\n    kept = []\n    for _ in range(96):\n        kept.append(b'x' * (16 << 20))\n    return len(kept) == 96",
    timeout_s=SLOW,
)
deed(
    "string doubling",
    "def deed():\n    s = 'x'\n    while len(s) < 1 << 30:\n        s += s\n    return s + s[: 1 << 29]",
    timeout_s=SLOW,
)
deed(
    "anonymous map",
    """
import mmap
def deed():
    held = mmap.mmap(-1, 1536 << 20)
    for at in range(0, len(held), 4096):
        held[at] = 1
    return True
""",
    timeout_s=SLOW,
)
deed(
    "private map",
    """
import mmap
def deed():
    kept = []
    for _ in range(24):
        held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, len(held), 4096):
            held[at] = 1
        kept.append(held)
    return len(kept)
""",
    timeout_s=SLOW,
)
deed(
    "shared map of a file",
    """
import mmap, os
def deed():
    kept = []
    for index in range(24):
        with open(f"map-@TOKEN@-{index}", "w+b") as file:
            file.truncate(64 << 20)
            held = mmap.mmap(file.fileno(), 64 << 20)
        for at in range(0, len(held), 4096):
            held[at] = 1
        kept.append(held)
    return len(kept)
""",
    timeout_s=SLOW,
)
deed(
    "memory files",
    """
def deed():
    kept, block = [], b"x" * (16 << 20)
    for _ in range(96):
        fd = call("memfd_create", b"x", 0)
        assert os.write(fd, block) == len(block)
        kept.append(fd)
    return len(kept)
""",
    syscalls=True,
    timeout_s=SLOW,
)
deed(
    "one memory file",
    "def deed():\n    return os.write(call('memfd_create', b'@TOKEN@', 0), b'x' * 4096) == 4096",
    syscalls=True,
)
deed(
    "files in shared memory",
    """
import os
def deed():
    names = []
    try:
        for index in range(24):
            names.append(f"/dev/shm/@TOKEN@-{index}")
            with open(names[-1], "wb") as file:
                for _ in range(4):
                    file.write(b"x" * (16 << 20))
        return True
    finally:
        for name in names:
            os.path.exists(name) and os.unlink(name)
""",
    timeout_s=SLOW,
    bare=False,
)
deed(
    "System V segments",
    """
def deed():
    kept = []
    libc.shmat.restype = ctypes.c_void_p
    try:
        for _ in range(24):
            kept.append(call("shmget", 0, 64 << 20, 0o1600))
            at = libc.shmat(kept[-1], None, 0)
            if at in (None, ctypes.c_void_p(-1).value):
                return False
            ctypes.memset(at, 1, 64 << 20)
            libc.shmdt(ctypes.c_void_p(at))
        return True
    finally:
        for segment in kept:
            call("shmctl", segment, 0, 0)
""",
    syscalls=True,
    timeout_s=SLOW,
)
deed(
    "pipes full of bytes",
    """
import fcntl, os
def deed():
    held, block = 0, b"x" * (1 << 20)
    kept = []
    for _ in range(1536):
        r, w = os.pipe()
        kept.append((r, w))
        os.set_blocking(w, False)
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
        except OSError:
            pass
        held += os.write(w, block)
    return held >= 1 << 30
""",
    bare=False,
    timeout_s=SLOW,
)
deed(
    "socket pairs full of bytes",
    """
import socket
def deed():
    held, kept = 0, []
    for _ in range(4000):
        a, b = socket.socketpair()
        kept.append((a, b))
        a.setblocking(False)
        for option in (socket.SO_SNDBUF, 32):
            try:
                a.setsockopt(socket.SOL_SOCKET, option, 64 << 20)
            except OSError:
                pass
        try:
            while held < 1 << 30:
                held += a.send(b"x" * (1 << 16))
        except OSError:
            pass
    return held >= 1 << 30
""",
    bare=False,
    timeout_s=SLOW,
)
deed(
    "heap of the C library",
    """
import ctypes
def deed():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    for _ in range(24):
        at = libc.malloc(ctypes.c_size_t(64 << 20))
        if not at:
            return False
        ctypes.memset(at, 1, 64 << 20)
    return True
""",
    timeout_s=SLOW,
)
deed(
    "limit raised first",
    """
import resource
def deed():
    for name in ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_RSS"):
        try:
            resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except (OSError, ValueError):
            pass
    return len(bytearray(b"x") * (1536 << 20)) > 0
""",
    timeout_s=SLOW,
)
forgery("many small objects", "def f(n):\n    return sum(map(len, [[i] for i in range(10 ** 7)]))")
forgery("many small strings", "kept = {str(i): str(i) for i in range(5 * 10 ** 6)}\ndef f(n):\n    return n")
forgery("numpy", "def f(n):\n    import numpy\n    return float(numpy.ones((1536 << 20) // 8).sum())", timeout_s=2.0)
forgery(
    "threads with large stacks",
    "import threading, time\nthreading.stack_size(256 << 20)\ndef f(n):\n    for _ in range(64):\n        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n    return n",
)
forgery(
    "caught and tried again",
    "def f(n):\n    kept = []\n    for _ in range(10 ** 6):\n        try:\n            kept.append(bytes(1 << 20))\n        except MemoryError:\n            pass\n    return n",
)
forgery(
    "at import",
    "kept = [b'x' * (1 << 20) for _ in range(1536)]\ndef f(n):\n    return n",
    kinds=("functional", "stdio"),
    pool=True,
)
forgery(
    "recursion to the stack's end",
    "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n):\n    return f(n + 1)",
    kinds=("functional", "stdio"),
)
forgery(
    "recursion in C",
    "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n):\n    x = []\n    for _ in range(10 ** 6):\n        x = [x]\n    return repr(x)",
)
forgery(
    "recursion in a thread of a large stack",
    "import sys, threading\nsys.setrecursionlimit(10 ** 9)\nthreading.stack_size(512 << 20)\ndef f(n):\n    t = threading.Thread(target=f, args=(n,))\n    t.start()\n    t.join()\n    return n",
)
forgery(
    "compressed bomb",
    "import zlib\nsmall = zlib.compress(bytes(64 << 20))\ndef f(n):\n    return [zlib.decompress(small) for _ in range(24)] and n",
    timeout_s=2.0,
)
forgery("error within an error", "def f(n):\n    try:\n        f(n + 1)\n    except RecursionError:\n        f(n)")
