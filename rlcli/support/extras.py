"""The optional training packages, and how to install them."""

from __future__ import annotations

from importlib.util import find_spec

from rlcli.errors import SetupError

TRAINING = ("torch", "transformers", "ray", "peft")
"""The modules that training needs besides its engine's; the extras `rlcli[cpu]` and `rlcli[gpu]` add vLLM."""

INSTALL = (
    "install the extra: uv pip install --torch-backend=cpu 'rlcli[cpu]', or 'rlcli[gpu]' on a machine with an NVIDIA "
    "GPU; in a checkout: scripts/env"
)


def missing(*modules: str) -> list[str]:
    """The modules that are not installed. Imports none of them."""
    return [module for module in modules if find_spec(module) is None]


def require(*modules: str) -> None:
    """Raise `SetupError` with the missing ones of `modules` and the extra that installs them."""
    if absent := missing(*modules):
        raise not_installed(*absent)


def not_installed(*modules: str) -> SetupError:
    """The error for `modules` that this command needs and that are missing."""
    return SetupError(f"not installed: {', '.join(modules)}", INSTALL)
