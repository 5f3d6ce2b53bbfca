"""Models that the run serves for its verifiers: how a verifier requests them, and how it finds their addresses.

A verifier requests one by its option `serve`. The run, or a command that verifies, then starts servers of that model
(`rlcli.rollout.model_servers`) and publishes their addresses to the processes that verify.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rlcli.errors import ConfigError, VerifierError

ADDRESSES, KEY = "RLCLI_SERVED", "RLCLI_SERVED_KEY"
"""Environment variables: model → addresses, as JSON, and the key that all of them require."""
ENGINE_KEY = "RLCLI_ENGINE_KEY"
"""Environment variable with the key of external servers: those of `rollout.servers` and of teachers."""


@dataclass(frozen=True)
class ServedModel:
    """A model to serve."""

    model: str
    """Folder or hub id."""
    workers: int = 1
    """Devices of all its servers."""
    tensor_parallel: int = 1
    """Devices of one server."""

    @property
    def servers(self) -> int:
        return self.workers // self.tensor_parallel


def served_model(option: object) -> ServedModel:
    """The model of an option `serve`, whose value is its name, or a table of the fields of `ServedModel`.

    Raises `ConfigError`.

    >>> served_model({"model": "my/judge", "workers": 4, "tensor_parallel": 2}).servers
    2
    """
    values = {"model": option} if isinstance(option, str) else option
    hint = 'for example serve="Qwen/Qwen3-8B", or serve={model = "Qwen/Qwen3-8B", workers = 2}'
    names = [field.name for field in fields(ServedModel)]
    if not isinstance(values, Mapping) or not isinstance(values.get("model"), str) or not values["model"]:
        raise ConfigError(f"the option serve names no model: {option!r}", hint)
    if unknown := sorted(set(values) - set(names)):
        raise ConfigError(f"the option serve has no field '{unknown[0]}' (it has {', '.join(names)})", hint)
    for name in names[1:]:
        value = values.get(name, 1)
        if type(value) is not int or value < 1:
            raise ConfigError(f"the option serve: {name} is {value!r}", "give a whole number of 1 or more")
    served = ServedModel(values["model"], values.get("workers", 1), values.get("tensor_parallel", 1))
    if served.workers % served.tensor_parallel:
        raise ConfigError(
            f"the option serve: tensor_parallel = {served.tensor_parallel} does not divide workers = {served.workers}",
            "give a divisor of it",
        )
    return served


def publish(addresses: Mapping[str, Sequence[str]], key: str) -> None:
    """Publish the addresses of the served models to this process and those that it starts."""
    os.environ[ADDRESSES] = json.dumps({model: list(each) for model, each in addresses.items()})
    os.environ[KEY] = key


def address_of(model: str, about: str = "") -> str:
    """The address of one of the model's servers: the same one for the same text `about`, so that a shared prefix of
    requests is computed once. Raises `VerifierError` if none was started."""
    addresses = json.loads(os.environ.get(ADDRESSES) or "{}").get(model)
    if not addresses:
        raise VerifierError(
            f"the model {model} is not served (option serve)",
            "train, eval, rescore, verifiers run and verifiers audit do; elsewhere serve it yourself: option url",
        )
    return str(addresses[zlib.crc32(about.encode(errors="replace")) % len(addresses)])


def identity(model: str) -> str:
    """A text that changes with the model's files; for a hub id, its name."""
    files = sorted(Path(model).glob("*")) if Path(model).is_dir() else []
    return json.dumps([model, *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)])
