"""The system-call filter, instruction by instruction, for both machines; and what this kernel makes of it."""

from __future__ import annotations

import errno
import platform
import signal
import struct

import pytest
from rlcli_sandbox import Sandbox
from rlcli_sandbox.kernel import seccomp, syscalls
from sandboxes import run, sandbox

from rlcli.errors import SetupError

__all__ = ["sandbox"]

ALLOW, KILL, REFUSE, UNKNOWN = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
OWN = 4321
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    name: numbers
    for table in (syscalls.NETWORK, syscalls.PROCESSES, syscalls.KERNEL, syscalls.MOUNTS, syscalls.SHARED)
    for name, numbers in table.items()
}


def judged(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """The kernel's decision, by the rules of classic BPF."""
    words = [argument & (1 << 64) - 1 for argument in (*arguments, *[0] * 6)][:6]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *words)
    register, at = 0, 0
    rows = list(struct.iter_unpack("<HBBI", program))
    while True:
        code, when_true, when_false, operand = rows[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            register = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x54:
            register &= operand
        else:
            true = {
                0x15: register == operand,
                0x25: register > operand,
                0x35: register >= operand,
                0x45: register & operand,
            }
            at += when_true if true[code] else when_false


class Filter:
    def __init__(self, machine: str, keep_metadata: bool) -> None:
        self.column = list(MACHINES).index(machine)
        self.architecture = MACHINES[machine]
        program = seccomp.program(keep_metadata)
        self.program = program.replace(struct.pack("<I", seccomp.OWN_PID), struct.pack("<I", OWN))
        assert len(program) // 8 <= 4096

    def __call__(self, name: str, *arguments: int) -> int | None:
        known = {**CALLS, **syscalls.JUDGED, **syscalls.METADATA}
        number = known[name][self.column]
        return None if number is None else judged(self.program, self.architecture, number, *arguments)


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return str(request.param)


@pytest.mark.parametrize("keep_metadata", [True, False])
def test_listed_calls_are_refused_and_others_allowed(machine: str, keep_metadata: bool) -> None:
    call = Filter(machine, keep_metadata)
    assert {call(name) for name in CALLS} <= {REFUSE, None}
    assert {call(name) for name in syscalls.METADATA} <= {REFUSE if keep_metadata else ALLOW, None}
    listed = {numbers[call.column] for numbers in {**CALLS, **syscalls.JUDGED, **syscalls.METADATA}.values()}
    for number in range(syscalls.NEWEST + 1):
        if number not in listed:
            assert judged(call.program, call.architecture, number) == ALLOW
    for number in (syscalls.NEWEST + 1, 511, 0x3FFFFFFF):
        assert judged(call.program, call.architecture, number) == UNKNOWN


def test_other_architectures_and_x32_kill(machine: str) -> None:
    call = Filter(machine, True)
    for architecture in (0x40000003, 0x40000028, *(set(MACHINES.values()) - {call.architecture})):
        assert judged(call.program, architecture, 1) == KILL
    assert judged(call.program, call.architecture, 0x40000000 | 1) == KILL
    assert judged(call.program, call.architecture, -1) == KILL


THREAD, FORK = 0x3D0F00, 0x1200011
"""Flags of clone that glibc passes when it starts a thread, and when it forks."""


@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("clone", [THREAD], ALLOW),
        ("clone", [FORK], REFUSE),
        ("clone", [0x4111], REFUSE),
        *(
            ("clone", [THREAD | flag], REFUSE)
            for flag in (0x20000, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)
        ),
        ("clone3", [], UNKNOWN),
        ("kill", [OWN, 10], ALLOW),
        ("kill", [OWN | 1 << 32, 10], ALLOW),
        ("kill", [0, 9], REFUSE),
        ("kill", [-1, 9], REFUSE),
        ("kill", [-OWN, 9], REFUSE),
        ("kill", [OWN + 1, 0], REFUSE),
        ("tgkill", [OWN, 77, 6], ALLOW),
        ("tgkill", [OWN + 1, OWN, 6], REFUSE),
        ("rt_sigqueueinfo", [OWN], ALLOW),
        ("rt_sigqueueinfo", [1], REFUSE),
        ("rt_tgsigqueueinfo", [1, OWN], REFUSE),
        ("prctl", [15], ALLOW),
        ("prctl", [38], ALLOW),
        *(("prctl", [option], REFUSE) for option in (1, 4, 22, 24, 36, 47, 59, 0x59616D61)),
        ("prlimit64", [0], ALLOW),
        ("prlimit64", [OWN], ALLOW),
        ("prlimit64", [1], REFUSE),
        ("fcntl", [0, 3], ALLOW),
        *(("fcntl", [0, command], REFUSE) for command in (8, 10, 15, 1026, 1031)),
        ("ioctl", [0, 0x5401], ALLOW),
        *(("ioctl", [0, command], REFUSE) for command in (0x5412, 0x541C, 0x8901, 0x8902, 0x5412 | 1 << 32)),
        *(("ioctl", [0, command], REFUSE) for command in (0x40086602, 0x401C5820, 0x40806685)),  # attributes, verity
        ("sched_setaffinity", [0], ALLOW),
        ("sched_setaffinity", [1], REFUSE),
        ("socketpair", [1, 1], ALLOW),
        ("socketpair", [2, 1], REFUSE),
        ("socketpair", [30, 1], REFUSE),
        ("sendto", [3, 1, 1, 0, 0, 0], ALLOW),
        ("sendto", [3, 1, 1, 0, 0x7F00000000, 16], REFUSE),
        ("sendto", [3, 1, 1, 0, 0xFFFF, 16], REFUSE),
        ("mmap", [0, 4096, 3, 0x22], ALLOW),
        ("mmap", [0, 4096, 3, 0x40022], REFUSE),
        ("openat", [-100, 1, 0x241], ALLOW),
        ("openat", [-100, 1, 0x202], ALLOW),
        ("openat", [-100, 1, 0x200], REFUSE),
        ("openat", [-100, 1, 0x80240], REFUSE),
        ("open", [1, 0x200], REFUSE),
        ("open", [1, 0x201], ALLOW),
        ("openat2", [], UNKNOWN),
    ],
)
def test_calls_are_judged_by_their_arguments(machine: str, name: str, arguments: list[int], verdict: int) -> None:
    assert Filter(machine, True)(name, *arguments) in (verdict, None)


def test_files_may_be_opened_where_the_file_system_is_read_only(machine: str) -> None:
    call = Filter(machine, False)
    assert {call("openat", -100, 1, 0x200), call("openat2"), call("open", 1, 0x200)} <= {ALLOW, None}


def test_an_unknown_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SetupError, match="riscv64"):
        seccomp.program(True)


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86")


@x86
def test_the_x32_numbers_kill(sandbox: Sandbox) -> None:
    assert run(sandbox, "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)").status == -signal.SIGSYS


@x86
def test_the_32_bit_interface_kills(sandbox: Sandbox) -> None:
    # mov eax, 20 (getpid); int 0x80; ret
    program = (
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7); page.write(bytes.fromhex('b814000000cd80c3'))\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())"
    )
    assert run(sandbox, program).status == -signal.SIGSYS


def test_the_process_is_locked_in_for_good(sandbox: Sandbox) -> None:
    program = (
        "import ctypes; libc = ctypes.CDLL(None)\n"
        "print(libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0))\n"
        "print([libc.prctl(23, n, 0, 0, 0) for n in range(41)])\n"
        "import resource; print(resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert run(sandbox, program).stdout.decode() == f"1 2\n{[0] * 41}\n(0, 0) (128, 128)\n"
