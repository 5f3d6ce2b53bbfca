"""Runs untrusted code in a fresh interpreter that is isolated by the kernel and that its owner can always kill.

    sandbox = open_sandbox()
    child = sandbox.start("print(sum(map(int, input().split())))", Limits(wall_s=2.0))
    child.stdin.write(b"1 2 3\\n")
    assert child.wait().stdout == b"6\\n"

Every backend guarantees the same, by different means: the program reads no file but the system's and Python's
libraries, writes none but in its own working directory, starts no process, reaches no socket and no other process, and
is killed as a whole at its limits; and nothing of it is left, whether it or its owner ended first.
The unsafe backend, which is used only if it is requested by name, does not protect the machine's files.
"""

from __future__ import annotations

from rlcli_sandbox.backends import open_sandbox
from rlcli_sandbox.child import Child
from rlcli_sandbox.limits import Excess, Exit, Limits
from rlcli_sandbox.sandbox_base import Sandbox

__all__ = ["Child", "Excess", "Exit", "Limits", "Sandbox", "open_sandbox"]
