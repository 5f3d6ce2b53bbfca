"""Read a foreign configuration file of any supported format as flat keys and values, bounded in size and depth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlcli.config.importing import pythoncode, shell
from rlcli.config.importing.reading import Unresolved, scalar
from rlcli.errors import ConfigError
from rlcli.reading import parse_json

MOST_BYTES = 1 << 20
MOST_VALUES = 20_000
DEEPEST = 40

REFERENCE = re.compile(
    r"\$\{(?:(?P<plain>[A-Za-z_][\w.]*)|oc\.select:(?P<selected>[A-Za-z_][\w.]*)(?:,(?P<default>[^${}]*))?)\}"
)
VERL = frozenset(
    {"actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "reward", "reward_model", "trainer"}
)
"""The first parts of verl's keys."""
TRL = frozenset(
    {"per_device_train_batch_size", "num_generations", "max_completion_length", "max_prompt_length", "beta"}
    | {"loss_type", "scale_rewards", "num_iterations", "use_vllm", "epsilon", "learning_rate", "output_dir"}
)
"""Every TRL GRPO configuration has at least one of these keys."""


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """`verl` or `trl`, and dotted key → value. Raises `ConfigError` for a file that is neither, or cannot be read."""
    text = _text(path)
    given: Mapping[str, Any]
    if path.suffix == ".py":
        given = pythoncode.arguments(text, path)
    elif path.suffix == ".json":
        given = _flat(_parsed(text, "JSON", path), path)
    elif path.suffix in (".yaml", ".yml"):
        given = {key: _typed(value) for key, value in _flat(_parsed(text, "YAML", path), path).items()}
    else:
        given = shell.overrides(text, path)
    framework = "verl" if any("." in key and key.partition(".")[0] in VERL for key in given) else ""
    framework = framework or ("trl" if TRL & given.keys() else "")
    if not framework:
        raise ConfigError(
            f"{path} holds no verl or TRL configuration",
            "give a script that runs verl.trainer.main_ppo, verl's YAML, or TRL's YAML, JSON or GRPOConfig(...)",
        )
    return framework, dict(given)


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is not a file", "give a shell script, a YAML, a JSON or a Python file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}", "give a readable file") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} is larger than {MOST_BYTES >> 20} MiB", "give only the configuration")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", "save it as UTF-8") from error
    if "\0" in text:
        raise ConfigError(f"{path} is a binary file", "give the configuration as text")
    return text


def _parsed(text: str, form: Literal["JSON", "YAML"], path: Path) -> Any:
    import yaml

    try:  # YAML: all values as text, tags ignored; it would read the bounds 0.5_2 as the number 0.52
        return parse_json(text) if form == "JSON" else yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {form}: {_line(error)}", "fix that place") from error


def _flat(table: Any, path: Path) -> dict[str, Any]:
    """Nested tables as dotted keys. A list with lists or tables in it counts as unresolved."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} holds no table of keys and values", "give a verl or TRL configuration")
    flat: dict[str, Any] = {}
    count = 0

    def add(table: Mapping[Any, Any], prefix: str, depth: int) -> None:
        nonlocal count
        for name, value in table.items():
            count += 1
            if count > MOST_VALUES or depth > DEEPEST:
                raise ConfigError(
                    f"{path} holds more than {MOST_VALUES} values, or tables more than {DEEPEST} deep",
                    "give only the configuration",
                )
            if isinstance(value, Mapping) and value:
                add(value, f"{prefix}{name}.", depth + 1)
            elif isinstance(value, str) and "${" in value:
                flat[f"{prefix}{name}"] = Unresolved(value)
            elif isinstance(value, list) and any(isinstance(item, list | Mapping) for item in value):
                flat[f"{prefix}{name}"] = Unresolved("a list of lists or tables")
            else:
                flat[f"{prefix}{name}"] = value

    add(table, "", 0)
    return {key: _referred(value, flat) for key, value in flat.items()}


def _typed(value: Any) -> Any:
    """A YAML value as a number, boolean or None if its text is one."""
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if not isinstance(value, str):
        return value
    words = {"yes": True, "on": True, "no": False, "off": False, "": None, "~": None}
    return words.get(value.lower(), scalar(value))


def _referred(value: Any, flat: Mapping[str, Any]) -> Any:
    """The value that an OmegaConf interpolation refers to, if it is a plain value of the same file."""
    found = REFERENCE.fullmatch(value.text) if isinstance(value, Unresolved) else None
    if not found or len(value.text) > 300:
        return value
    target = flat.get(found["plain"] or found["selected"])
    if target is None and found["default"] is not None:
        target = scalar(found["default"])
    return value if target is None else target


def _line(error: BaseException) -> str:
    """The error in one line: a parser's message may have several lines, or hold the whole text."""
    text = "too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
    return text if len(text) <= 160 else f"{text[:160]}…"
