"""Check loaded verifiers before they score: the deadline must exceed their own timeouts, and the sandbox must work."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlcli.errors import ConfigError, SetupError
from rlcli.registry import Registry
from rlcli.rewards.processes.fork_server import Facts
from rlcli.rewards.processes.scoring_worker import wall_bound
from rlcli.support.sandbox_name import backend_name

SPARE_S = 0.5
"""Time that a verifier needs beyond its own `timeout_s`, to start a program and to report how it ended."""

SANDBOXES: Registry[Callable[[str], str]] = Registry("sandbox", "rlcli.sandboxes")
"""Entry points; `local` runs a program in the sandbox of a name and returns the name of its backend."""


def proven(backend: str) -> str:
    """The name of the sandbox's backend, after a program ran in it here. Raises `SetupError`."""
    if "local" not in SANDBOXES.names():
        raise SetupError("a verifier runs programs, and no sandbox is installed", "install rlcli again (scripts/env)")
    return SANDBOXES.get("local")(backend)


def key_notes(loaded: Mapping[str, Facts]) -> list[str]:
    """A line for each key that verifiers send to an address: its environment variable, never its value."""
    sent = dict.fromkeys((variable, url) for facts in loaded.values() for variable, url in facts.keys)
    return [f"the key in {variable} is sent to {url}" for variable, url in sent]


def check_loaded(loaded: Mapping[str, Facts], deadline_s: float, sandbox: str, setting: str) -> str:
    """Return the name of the sandbox backend, after a test run here; empty if no expression of `loaded` needs one.

    A verifier that runs programs counts its `timeout_s` in CPU seconds, as the deadline does; others use wall time.
    sandbox: the requested backend; empty: from the environment. setting: the user's name for the deadline.
    Raises `ConfigError` for a `timeout_s` that the deadline cuts short, `SetupError` if the sandbox is not available.
    """
    for expression, facts in loaded.items():
        needed_s = facts.patience_s + SPARE_S
        minimum_s = needed_s if facts.needs_sandbox else needed_s / 10
        if facts.patience_s and needed_s > (deadline_s if facts.needs_sandbox else wall_bound(deadline_s)):
            raise ConfigError(
                f"the verifier '{expression}' waits {facts.patience_s:g} s (its timeout_s) and would be killed at "
                f"{setting} = {deadline_s:g}, before it can report what took too long",
                f"raise it to {minimum_s:g} or more, or give a lower timeout_s",
            )
    if not any(facts.needs_sandbox for facts in loaded.values()):
        return ""
    return proven(backend_name(sandbox))
