"""The first code in a sandboxed interpreter: it isolates the process, reports that, and becomes `main`.

No module imports this file: its text is passed to a bare interpreter (`-S`: no site-packages yet) whose only argument
is the number of a socket to the owner. The owner sends four bytes of length and a marshalled dictionary (the owner's
own, so it is trusted); this side answers b"ready", or the error. The owner then sends one byte to start `main`. If the
owner has died meanwhile, that byte never comes, and nothing runs.
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import resource
import struct
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 22, 24, 38, 47
SECCOMP_MODE_FILTER, PR_CAP_AMBIENT_CLEAR_ALL, SIGKILL = 2, 4, 9
LANDLOCK_RESTRICT_SELF = 446
CAPABILITIES_VERSION = 0x20080522


def take(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            os._exit(1)  # the owner is dead
        data += chunk
    return data


def call(operation: str, result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{operation}: {os.strerror(ctypes.get_errno())}")


def limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities, permanently. Only root has any; bubblewrap has dropped them already."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("=Ii", CAPABILITIES_VERSION, 0)
    call("capset", libc.capset(header, bytes(24)))


def lock_in(order: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    drop_capabilities(libc)
    call("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if order["die_with_parent"]:
        call("parent's death", libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    if order["landlock_fd"] >= 0:
        call("landlock", libc.syscall(LANDLOCK_RESTRICT_SELF, order["landlock_fd"], 0))
        os.close(order["landlock_fd"])
    for name, value in order["limits"].items():
        limit(getattr(resource, name), value)
    pid = struct.pack("<I", os.getpid())
    rows = order["filter"].replace(struct.pack("<I", order["own_pid"]), pid)
    buffer = ctypes.create_string_buffer(rows, len(rows))
    program = struct.pack("HxxxxxxP", len(rows) // 8, ctypes.addressof(buffer))
    address = ctypes.create_string_buffer(program, len(program))
    call("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(address), 0, 0))


def enter() -> types.CodeType:
    """The code of `main`, once the owner has sent the start byte."""
    fd = int(sys.argv[1])
    order = marshal.loads(take(fd, struct.unpack("<I", take(fd, 4))[0]))
    try:
        main = compile(order["main"], "<sandboxed>", "exec")
        lock_in(order)
    except Exception as error:
        os.write(fd, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    os.write(fd, b"ready")
    take(fd, 1)
    os.close(fd)
    sys.path += order["path"]
    sys.argv = [""]
    return main


def become(main: types.CodeType) -> None:
    """Run `main` as the module `__main__`, without any names of this one."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    exec(main, module.__dict__)


if __name__ == "__main__":
    become(enter())
