"""Select the sandbox backend: the requested one, or the best that this machine supports."""

from __future__ import annotations

import os
import shutil
from functools import cache

from rlcli.errors import SetupError
from rlcli_sandbox.bubblewrap import bubblewrap
from rlcli_sandbox.landlock_process import fenced
from rlcli_sandbox.sandbox_base import Sandbox

_UNSAFE = "--set verifier.sandbox=unsafe or RLCLI_SANDBOX=unsafe runs it with little protection"


NAMES = ("auto", "bwrap", "landlock", "unsafe")
"""Or the address of a SandboxFusion server."""


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


def open_sandbox(backend: str | None = None) -> Sandbox:
    """The backend of that name (see `backend_name`), tested by one trial per process.

    auto: bubblewrap, or else Landlock, and never anything less. Raises `SetupError` with what to install or to enable.
    """
    name = backend_name(backend)
    if name == "auto":
        return _automatic(shutil.which("bwrap"))
    if name == "bwrap":
        return bubblewrap(shutil.which("bwrap"))
    if name in ("landlock", "unsafe"):
        return fenced(fence=name == "landlock")
    raise SetupError(
        f"sandbox {name!r} is a remote server, which cannot start a local program", "use auto, bwrap or landlock here"
    )


@cache
def _automatic(bwrap: str | None) -> Sandbox:
    try:
        return bubblewrap(bwrap)
    except SetupError as error:
        no_bwrap = error
    try:
        return fenced(fence=True)
    except SetupError as no_landlock:
        raise SetupError(
            f"programs cannot be isolated here: {no_bwrap.message}; {no_landlock.message}",
            f"{no_bwrap.hint}; {_UNSAFE}",
        ) from None
