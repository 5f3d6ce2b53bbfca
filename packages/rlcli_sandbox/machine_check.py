"""The check of the sandbox in `rlcli doctor`."""

from __future__ import annotations

from rlcli.errors import SetupError
from rlcli.launch.machine_checks import Finding, Status
from rlcli.support.sandbox_name import backend_name
from rlcli_sandbox.backends import open_sandbox


def check_sandbox() -> Finding:
    """Code can be sandboxed, by bubblewrap or else by Landlock: verifiers that run code need one of them."""
    try:
        backend = backend_name()
    except SetupError as error:
        return Finding("sandbox", Status.FAIL, error.message, error.hint)
    if backend.startswith(("http://", "https://")):
        return Finding("sandbox", Status.PASS, f"{backend} (RLCLI_SANDBOX; not tried)")
    if backend == "unsafe":
        hint = "unset RLCLI_SANDBOX if you do not trust the models"
        return Finding("sandbox", Status.WARN, "unsafe (RLCLI_SANDBOX): code may read and write every file", hint)
    refused = []
    for name in ("bwrap", "landlock") if backend == "auto" else (backend,):
        try:
            sandbox = open_sandbox(name)
        except SetupError as error:
            refused.append(error)
        else:
            others = "".join(f"; {error}" for error in refused)
            return Finding("sandbox", Status.PASS, f"{sandbox.name} ({sandbox.version}){others}")
    detail, hint = "; ".join(error.message for error in refused), "; or ".join(error.hint for error in refused)
    return Finding("sandbox", Status.WARN, f"no code can be verified: {detail}", hint)
