"""Runs of which little is known but their configuration."""

from __future__ import annotations

from typing import Any

from rlcli.config.schema import RunConfig
from rlcli.context import RunContext, RunFacts


def context_of(config: RunConfig, **facts: Any) -> RunContext:
    """A training run on CPUs in float32 whose workers generate too, unless `facts` say otherwise."""
    plain = {"device": "cpu", "dtype": "float32", "max_length": 8, "kv_cache_bytes": None}
    return RunContext(config, RunFacts(**plain | {"roles": frozenset({"policy", "engine"})} | facts))
