"""Models that the run serves for its verifiers: what a verifier asks for, and where it finds them.

A verifier asks by its option `serve`. The run, or a command that verifies, then starts servers of that model
(`rlcli.rollout.model_servers`) and publishes their addresses to the processes that verify.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlcli.errors import ConfigError, VerifierError

ADDRESSES, KEY = "RLCLI_SERVED", "RLCLI_SERVED_KEY"
"""Environment variables: model → addresses, as JSON, and the key that all of them ask for."""
ENGINE_KEY = "RLCLI_ENGINE_KEY"
"""Environment variable with the key that servers of others ask for: those of `rollout.servers` and of teachers."""


@dataclass(frozen=True)
class ServedModel:
    """model: folder or hub id. workers: devices of all its servers. tensor_parallel: devices of one server."""

    model: str
    workers: int = 1
    tensor_parallel: int = 1

    @property
    def servers(self) -> int:
        return self.workers // self.tensor_parallel


def served_model(option: Any) -> ServedModel:
    """What the value of an option `serve` asks for: a model, or a table of the fields of `ServedModel`.

    Raises `ConfigError`.

    >>> served_model({"model": "my/judge", "workers": 4, "tensor_parallel": 2}).servers
    2
    """
    given = {"model": option} if isinstance(option, str) else option
    hint = 'for example serve="Qwen/Qwen3-8B", or serve={model = "Qwen/Qwen3-8B", workers = 2}'
    names = [one.name for one in fields(ServedModel)]
    if not isinstance(given, Mapping) or not isinstance(given.get("model"), str) or not given["model"]:
        raise ConfigError(f"the option serve names no model: {option!r}", hint)
    if unknown := sorted(set(given) - set(names)):
        raise ConfigError(f"the option serve has no field '{unknown[0]}' (it has {', '.join(names)})", hint)
    for name in names[1:]:
        value = given.get(name, 1)
        if type(value) is not int or value < 1:
            raise ConfigError(f"the option serve: {name} is {value!r}", "give a whole number of 1 or more")
    found = ServedModel(**given)
    if found.workers % found.tensor_parallel:
        raise ConfigError(
            f"the option serve: tensor_parallel = {found.tensor_parallel} does not divide workers = {found.workers}",
            "give a divisor of it",
        )
    return found


def publish(addresses: Mapping[str, Sequence[str]], key: str) -> None:
    """Let this process, and those that it starts, find the served models."""
    os.environ[ADDRESSES] = json.dumps({model: list(each) for model, each in addresses.items()})
    os.environ[KEY] = key


def address_of(model: str, about: str = "") -> str:
    """The address of one of the model's servers: for the same text `about` the same one, so that what requests share
    is computed once. Raises `VerifierError` if none was started."""
    found = json.loads(os.environ.get(ADDRESSES) or "{}").get(model)
    if not found:
        raise VerifierError(
            f"nobody serves the model {model} (option serve)",
            "train, eval, rescore, verifiers run and verifiers audit do; elsewhere serve it yourself: option url",
        )
    return str(found[zlib.crc32(about.encode(errors="replace")) % len(found)])


def identity(model: str) -> str:
    """A text that changes with the model's files; of a hub id, its name."""
    files = sorted(Path(model).glob("*")) if Path(model).is_dir() else []
    return json.dumps([model, *([one.name, one.stat().st_size, one.stat().st_mtime_ns] for one in files)])
