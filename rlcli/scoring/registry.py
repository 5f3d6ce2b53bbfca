"""The verifiers that there are, built in and from plugins, by name."""

from __future__ import annotations

from rlcli.registry import Registry
from rlcli.types import Verifier

VERIFIERS: Registry[Verifier] = Registry("verifier", "rlcli.verifiers")
