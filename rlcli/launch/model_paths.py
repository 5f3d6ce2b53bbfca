"""Resolves the files that a configuration names: absolute paths, and the base model of an adapter."""

from __future__ import annotations

from pathlib import Path

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.template_choice import located
from rlcli.errors import ModelError
from rlcli.export.export_folder import RECORD
from rlcli.runs.checkpoint import TEMPLATE
from rlcli.support.reading import read_json


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths, since workers run in other directories. Ids of the hub stay."""
    if config.critic.path and Path(config.critic.path).is_dir():
        config = config.changed(critic={"path": str(Path(config.critic.path).resolve())})
    teachers = config.teacher.placed(lambda path: str(Path(path).resolve()) if Path(path).is_dir() else path)
    config = config.changed(teacher=teachers)
    if config.algorithm.code:
        config = config.changed(algorithm={"code": str(Path(config.algorithm.code).expanduser().resolve())})
    config = config.changed(model={"chat_template": located(config.model.chat_template)})
    file, _, attribute = config.environment.name.rpartition(":")
    if file.endswith(".py"):
        config = config.changed(environment={"name": f"{Path(file).expanduser().resolve()}:{attribute}"})
    if Path(config.model.path).is_dir():
        config = config.changed(model={"path": str(Path(config.model.path).resolve())})
    return config


def with_adapter_base(config: RunConfig, *, train: bool, given_path: str) -> tuple[RunConfig, str]:
    """The configuration with the base model of the LoRA adapter that `model.path` names, and the adapter's folder; the
    configuration itself and empty if it names none. given_path: `model.path` as the user wrote it, for messages. Raises
    `ModelError` if the adapter is to be trained or cannot be read."""
    folder = Path(config.model.path)
    adapter_config = folder / "adapter_config.json"
    if not adapter_config.is_file():
        return config, ""
    if train:
        raise ModelError(
            f"model.path = '{given_path}' is a LoRA adapter",
            "train its base model, or merge the two first: rlcli export RUN --merge",
        )
    try:
        settings = read_json(adapter_config, links=True)
        base, rank = settings["base_model_name_or_path"], settings["r"]
        on_experts = bool(settings.get("target_parameters"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"cannot read adapter {adapter_config}: {type(error).__name__}: {error}", "copy the whole adapter again"
        ) from error
    lora = {"rank": rank, **({"targets": "all-linear,experts"} if on_experts else {})}
    model = {"path": base}
    if not config.model.chat_template and (folder / RECORD).is_file() and (folder / TEMPLATE).is_file():
        model["chat_template"] = str(folder / TEMPLATE)  # that of the run, which its base may lack
    return config.changed(model=model, lora=lora), str(folder)
