"""Programs that may start others: all of their processes are counted and ended together. Each test forks a fixed number
of times, never without end."""

from __future__ import annotations

import errno
import os
import struct
import textwrap
from pathlib import Path

import pytest
from rlcli_sandbox import Exit, Limits
from rlcli_sandbox.kernel import seccomp, syscalls
from rlcli_sandbox.namespace_processes import members_of
from sandboxes import opened, run, until
from test_sandbox_filter import MACHINES, judged, machine

from rlcli.errors import SetupError

__all__ = ["machine"]

ALLOW, REFUSE = 0x7FFF0000, 0x50000 | errno.EPERM
MIB = 1 << 20
FORKS = 300


def ended(main: str, **limits: float) -> Exit:
    return run(opened("bwrap"), textwrap.dedent(main), Limits(**{"wall_s": 20.0, "processes": 8} | limits))  # type: ignore[arg-type]


def sleepers(seconds: str) -> list[str]:
    """Processes of this machine that run `sleep` for that long."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [seconds.encode()]:
            pids.append(pid)
    return pids


def test_it_starts_programs_and_gets_their_output() -> None:
    end = ended("import subprocess; print(subprocess.run(['/bin/echo', 'hi'], capture_output=True).stdout)")
    assert (end.status, end.stdout) == (0, b"b'hi\\n'\n")


def test_without_that_limit_it_starts_none() -> None:
    end = ended("import subprocess; subprocess.run(['/bin/echo', 'hi'])", processes=1)
    assert b"PermissionError" in end.stderr


def test_too_many_processes_end_all_of_them() -> None:
    end = ended(
        f"""
        import os, time
        for _ in range({FORKS}):
            if os.fork() == 0:
                os.execv("/bin/sleep", ["sleep", "271.8281"])
        time.sleep(60)
        """
    )
    assert end.killed_for == "processes"
    assert until(lambda: not sleepers("271.8281"), 5.0)


def test_what_it_leaves_behind_ends_with_it() -> None:
    end = ended(
        """
        import os
        if os.fork() == 0:
            if os.fork() == 0:
                os.execv("/bin/sleep", ["sleep", "314.1592"])
            os._exit(0)
        os.wait()
        print("over")
        """
    )
    assert (end.killed_for, end.stdout) == ("", b"over\n")
    assert until(lambda: not sleepers("314.1592"), 5.0)


def test_the_memory_of_all_is_added_up() -> None:
    main = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                held = b"x" * (40 << 20)
                time.sleep(60)
        time.sleep(60)
        """
    assert ended(main, memory_bytes=120 * MIB).killed_for == "memory"
    end = ended(main.replace("time.sleep(60)", "time.sleep(0.2)"), memory_bytes=400 * MIB)
    assert (end.killed_for, end.status) == ("", 0)


def test_programs_that_it_starts_reach_no_network_and_no_files_outside() -> None:
    end = ended(
        f"""
        import subprocess
        script = "exec 3<>/dev/tcp/127.0.0.1/80; echo $?; cat {Path(__file__)}; echo $?; touch /usr/x; echo $?"
        print(subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True).stdout.split())
        """
    )
    assert end.stdout == b"['1', '1', '1']\n"


def test_only_bubblewrap_ends_what_a_program_starts() -> None:
    with pytest.raises(SetupError, match="only bubblewrap can end all that a program starts"):
        opened("landlock").start("print()", Limits(processes=2))


def test_the_members_of_a_namespace_are_counted() -> None:
    main = (
        "import subprocess, sys\nsleeping = subprocess.Popen(['/bin/sleep', '60'])\nprint(flush=True); sys.stdin.read()"
    )
    with opened("bwrap").start(main, Limits(processes=8, wall_s=30.0)) as child:
        assert child.stdout.read(1) == b"\n"
        assert members_of(child.pid).processes == 3  # bubblewrap's own, the program and what it started
        assert members_of(child.pid).resident_bytes > MIB


def test_the_filter_lets_programs_start_and_nothing_else(machine: str) -> None:
    column, architecture = list(MACHINES).index(machine), MACHINES[machine]

    def outcome(name: str, *arguments: int, programs: bool = True) -> int | None:
        table = syscalls.JUDGED | syscalls.PROCESSES | syscalls.MOUNTS
        number = table[name][column]
        plain = seccomp.program(False, programs).replace(struct.pack("<I", seccomp.OWN_PID), struct.pack("<I", 1))
        return None if number is None else judged(plain, architecture, number, *arguments)

    for name in ("execve", "fork", "vfork", "setpgid"):
        assert outcome(name) in (ALLOW, None)
        assert outcome(name, programs=False) in (REFUSE, None)
    assert outcome("clone", 17) == ALLOW
    assert outcome("clone", 17, programs=False) == REFUSE
    assert outcome("clone", 0x10000000) == REFUSE  # a user namespace
    for name in ("execveat", "ptrace", "setsid", "pidfd_open", "unshare", "setns", "mount"):
        assert outcome(name) == REFUSE
