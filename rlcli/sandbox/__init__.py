"""Runs code that nobody has read: a fresh interpreter, locked in by the kernel, that its owner can always end.

    sandbox = open_sandbox()
    child = sandbox.start("print(sum(map(int, input().split())))", Limits(wall_s=2.0))
    child.stdin.write(b"1 2 3\\n")
    assert child.wait().stdout == b"6\\n"

What every backend promises, and each with its own means: the program reads no file but the system's and Python's
libraries, writes none but in its own working directory, starts no process, reaches no socket and no other process, and
is killed as a whole at its limits; and nothing of it is left, whether it or its owner ended first.
The unsafe backend, which is used only when it is asked for by name, does not protect the machine's files.
"""

from __future__ import annotations

from rlcli.sandbox.backends import backend_name, open_sandbox
from rlcli.sandbox.base import Sandbox
from rlcli.sandbox.child import Child
from rlcli.sandbox.limits import Excess, Exit, Limits

__all__ = ["Child", "Excess", "Exit", "Limits", "Sandbox", "backend_name", "open_sandbox"]
