"""The name of the sandbox in which verifiers run programs, by configuration and environment."""

from __future__ import annotations

import os

from rlcli.errors import SetupError

NAMES = ("auto", "bwrap", "landlock", "unsafe")
"""Names of backends; the address of a SandboxFusion server is allowed too."""


def backend_name(backend: str | None = None) -> str:
    """The name of the requested backend: `backend`, else the environment variable RLCLI_SANDBOX, else "auto".

    Raises `SetupError` for an unknown name, or an address that contains a password.
    """
    name = backend or os.environ.get("RLCLI_SANDBOX") or "auto"
    if "://" in name and "@" in name.partition("://")[2].partition("/")[0]:  # the address is recorded with the run
        raise SetupError("the sandbox's address holds a password", "remove it (verifier.sandbox, RLCLI_SANDBOX)")
    if name not in NAMES and not name.startswith(("http://", "https://")):
        where = "" if backend else "RLCLI_SANDBOX: "
        raise SetupError(
            f"{where}no sandbox is called {name!r}", "use auto, bwrap, landlock, unsafe or a SandboxFusion URL"
        )
    return name
