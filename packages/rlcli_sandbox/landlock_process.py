"""A program as a bare process of the owner's user: restricted by Landlock, or (unsafe) hardly at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlcli_sandbox import sandbox_base
from rlcli_sandbox.child import Launch
from rlcli_sandbox.kernel import landlock
from rlcli_sandbox.limits import Limits
from rlcli_sandbox.private_folder import PrivateFolder, sweep


@dataclass(frozen=True)
class Fenced(sandbox_base.Sandbox):
    """One process with its own folder. Only the filter keeps it from other processes and from files' modes."""

    fence: bool
    """True if Landlock confines it to its folder. If not, it reads and writes all that its user may."""

    def launch(self, main: str, limits: Limits, pass_fds: Sequence[int]) -> Launch:
        folder = PrivateFolder()
        try:
            ruleset = [landlock.ruleset(folder.path)] if self.fence else []
        except BaseException:
            folder.remove()
            raise

        def close() -> None:
            for fd in ruleset:
                os.close(fd)
            folder.remove()

        return Launch(
            command=sandbox_base.interpreter(),
            order=sandbox_base.order(
                main, limits, keep_metadata=True, bare=True, landlock_fd=ruleset[0] if ruleset else -1
            ),
            environment=sandbox_base.environment(folder.path),
            cwd=folder.path,
            pass_fds=[*pass_fds, *ruleset],
            status=lambda status: status,
            exceeds_disk=lambda pid: folder.exceeds(limits.disk_bytes, pid),
            close=close,
        )


@cache
def fenced(fence: bool) -> Fenced:
    """The backend, tested. Raises `SetupError`."""
    sandbox = Fenced("landlock", f"ABI {landlock.version()}", True) if fence else Fenced("unsafe", "", False)
    sandbox.prove()
    sweep()
    return sandbox
