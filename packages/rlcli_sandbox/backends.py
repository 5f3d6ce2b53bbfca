"""Select the sandbox backend: the requested one, or the best that this machine supports."""

from __future__ import annotations

import shutil
from functools import cache

from rlcli.errors import SetupError
from rlcli.support.sandbox_name import backend_name
from rlcli_sandbox.bubblewrap import bubblewrap
from rlcli_sandbox.landlock_process import fenced
from rlcli_sandbox.sandbox_base import Sandbox

_UNSAFE = "--set verifier.sandbox=unsafe or RLCLI_SANDBOX=unsafe runs it with little protection"


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
