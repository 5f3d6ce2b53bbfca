"""Checks that a model sees the pictures that the data has, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.table import pictures_of
from rlcli.errors import ConfigError, ModelError
from rlcli.images.rule import KINDS, ImageRule
from rlcli.rollout.engine import engine_named
from rlcli.types import Prompt


def check_images(config: RunConfig, rule: ImageRule | None, sets: Sequence[Sequence[Prompt]], *, train: bool) -> int:
    """The most pictures that a row has. Raises `RlcliError` for a model that sees none, and for what cannot be done
    with one that does. rule: how the model sees pictures, if it does."""
    most = max(map(pictures_of, sets), default=0)
    if rule is None:
        if most:
            raise ModelError(
                f"the data has pictures, and {config.model.path} reads text alone",
                f"give a model that sees them ({', '.join(KINDS)}), or data without pictures",
            )
        return 0
    engine = config.rollout.engine
    if "images" not in engine_named(engine).settings:
        raise ConfigError(
            f"rollout.engine = {engine} shows no pictures to {config.model.path}", "give rollout.engine = vllm"
        )
    if not train:
        return most
    for key, value, plain in _unsupported(config):
        if value != plain:
            raise ConfigError(
                f"{key} = {value}, but a model that sees pictures cannot be trained so yet", f"give {key} = {plain}"
            )
    return most


def _unsupported(config: RunConfig) -> list[tuple[str, object, object]]:
    """Keys, their values, and the only ones that a model with a tower is trained with."""
    return [
        ("parallel.context", config.parallel.context, 1),
        ("model.compile", config.model.compile, False),
        ("environment.name", config.environment.name, ""),
        ("async.on_update", config.async_.on_update, "recompute"),
    ]
