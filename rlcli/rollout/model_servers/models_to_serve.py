"""The models that verifiers need served, and their kinds."""

from __future__ import annotations

from collections.abc import Iterable

from rlcli.errors import ConfigError, ModelError
from rlcli.model.io.model_config import check_place, first_line
from rlcli.rewards.expression import served_by
from rlcli.support.served_models import ServedModel

OPTION = "the option serve"


def models_of(expressions: Iterable[str]) -> dict[ServedModel, bool]:
    """The models that these verifiers ask for, each once → whether it is a sequence classifier.

    Raises `ConfigError` for one that is asked for with different settings, `ModelError` for one that cannot be read.
    """
    models: dict[str, ServedModel] = {}
    for expression in expressions:
        for served in served_by(expression):
            if models.setdefault(served.model, served) != served:
                raise ConfigError(f"{OPTION} names {served.model} with different settings", "give the same ones")
    return {served: _classifies(served.model) for served in models.values()}


def _classifies(model: str) -> bool:
    check_place(model, OPTION)
    from transformers import AutoConfig

    try:
        architectures = AutoConfig.from_pretrained(model, trust_remote_code=False).architectures or []
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{OPTION}: {model} cannot be read: {first_line(error)}", "give a model's folder or hub id"
        ) from error
    return any("ForSequenceClassification" in name for name in architectures)
