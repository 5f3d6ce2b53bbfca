"""Resolve recipe, then command-line flags, then `--set` (later wins) into one frozen `RunConfig` with value origins."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import ValidationError

from rlcli.config.alternatives import ALTERNATIVES, UNSET, replaced_by
from rlcli.config.keys import Key, current_name, find_key, keys, set_value, unknown_key
from rlcli.config.paths import with_paths_expanded
from rlcli.config.recipes import Recipe, flatten, load
from rlcli.config.rules import broken
from rlcli.config.schema import RunConfig
from rlcli.errors import ConfigError

FLAGS = {
    "model.path": "--model",
    "data.path": "--data",
    "evaluation.data": "--eval-data",
    "train.steps": "--steps",
    "train.seed": "--seed",
    "train.deterministic": "--deterministic",
    "cluster.workers": "--workers",
    "cluster.address": "--ray-address",
    "evaluation.samples": "--samples",
    "evaluation.temperature": "--temperature",
    "evaluation.top_p": "--top-p",
    "evaluation.max_prompts": "--max-prompts",
    "rollout.max_response_tokens": "--max-tokens",
    "verifier.name": "--verifier",
    "environment.name": "--environment",
}
"""Keys that are also command-line flags."""


@dataclass(frozen=True)
class Resolved:
    """A configuration and the origin of each value."""

    config: RunConfig
    """The configuration."""
    origins: dict[str, str]
    """Dotted key → `default`, `recipe grpo`, `flag --steps` or `--set`."""
    recipe: Recipe
    """The recipe that it starts from."""
    notes: tuple[str, ...] = ()
    """Messages about values that were changed to fit others."""

    def values(self) -> dict[str, Any]:
        """Dotted key → value, for every key of the schema."""
        return flatten(self.config.model_dump(mode="json"))


def resolve(recipe: str, flags: Mapping[str, object] | None = None, sets: Sequence[str] = ()) -> Resolved:
    """Merge the three layers into one configuration.

    recipe: a name or a path to a .toml file. flags: dotted key → value, `None` for a flag that was not given. sets: the
    arguments of `--set`, each `key=value`. Raises a one-line `ConfigError` that names key, value, origin and rule.

    >>> resolve("grpo", {"train.steps": 7}, ["lora.rank=16"]).config.lora.rank
    16
    """
    loaded, values, origins = layered(recipe, flags, sets)
    values = with_paths_expanded(values, origins)
    notes = _shorten_warmup(values, origins) if is_given(origins.get("train.steps", "")) else []
    config = _validate(values, origins)
    origins = {name: "default" for name, key in keys().items() if key.kind != "object"} | origins
    resolved = Resolved(config, origins, loaded, tuple(notes))
    return resolved if config.train.epochs is not None else _with_warmup(resolved)


def with_length(resolved: Resolved, prompts: int) -> Resolved:
    """The configuration with the steps that `train.epochs` are, for this number of prompts, and a note about it;
    without `train.epochs` it stays unchanged. Raises `ConfigError` if these steps break a rule."""
    epochs, per_step = resolved.config.train.epochs, resolved.config.rollout.prompts_per_step
    if epochs is None:
        return resolved
    steps = max(1, math.ceil(round(epochs * prompts / per_step, 6)))
    origin = f"train.epochs = {epochs:g}: {prompts} prompts, {per_step} a step"
    values = resolved.values() | {"train.steps": steps, "train.epochs": UNSET}
    origins = resolved.origins | {"train.steps": origin, "train.epochs": "default"}
    notes = [f"train.steps = {steps}: {epochs:g} epochs of {prompts} prompts, {per_step} a step"]
    if resolved.config.train.warmup_fraction is None:
        notes += _shorten_warmup(values, origins)
    config = _validate(values, origins)
    return _with_warmup(replace(resolved, config=config, origins=origins, notes=(*resolved.notes, *notes)))


def _with_warmup(resolved: Resolved) -> Resolved:
    """The configuration with the steps that `train.warmup_fraction` is of `train.steps`, and a note about it."""
    train = resolved.config.train
    if train.warmup_fraction is None:
        return resolved
    warmup = math.ceil(round(train.warmup_fraction * train.steps, 6))
    why = f"train.warmup_fraction = {train.warmup_fraction:g} of {train.steps} steps"
    config = resolved.config.changed(train={"warmup_steps": warmup, "warmup_fraction": None})
    origins = resolved.origins | {"train.warmup_steps": why, "train.warmup_fraction": "default"}
    note = f"train.warmup_steps = {warmup}: {why}"
    return replace(resolved, config=config, origins=origins, notes=(*resolved.notes, note))


def layered(
    recipe: str, flags: Mapping[str, object] | None = None, sets: Sequence[str] = ()
) -> tuple[Recipe, dict[str, Any], dict[str, str]]:
    """The recipe, and value and origin of each key that a layer of `resolve` sets, before any rule is checked."""
    loaded = load(recipe)
    names = {key: current_name(key, f"recipe {origin}") for key, origin in loaded.origins.items()}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in loaded.values.items():
        origins[set_value(values, names[key], value)] = f"recipe {loaded.origins[key]}"
    flag_values: dict[str, str] = {}
    for key, value in (flags or {}).items():
        if value is not None:
            values[key], flag_values[key] = value, f"flag {FLAGS.get(key, key)}"
    for text in sets:
        key, value = _parse_set(text)
        flag_values[set_value(values, key, value)] = "--set"
    origins |= flag_values
    for key in replaced_by({key: values[key] for key in flag_values}):
        values.pop(key, None)
        origins.pop(key, None)
    for key, other in ALTERNATIVES.items():
        if values.get(key, UNSET) != UNSET and values.get(other, UNSET) != UNSET:
            conflicting = (f"{name} = {to_toml(values[name])} ({origins[name]})" for name in (key, other))
            raise ConfigError(f"{' and '.join(conflicting)} set the same", "give one of them")
    for key in values:
        if find_key(key) is None:
            raise unknown_key(key, origins[key])
    return loaded, values, origins


def _shorten_warmup(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Shorten a recipe's warm-up to fit a number of steps that the user gave, and note it: a trial run of a few steps
    must not need a second option. At least half of the steps train the policy after the critic's warm-up. A warm-up
    that the user gave is left for the rules to refuse."""
    steps, notes = values.get("train.steps"), []
    if not isinstance(steps, int):
        return []
    for key, limit, shorter in (
        ("train.warmup_steps", steps, steps),
        ("critic.warmup_steps", steps - 1, steps // 2),
    ):
        warmup = values.get(key, 0)
        if steps > 0 and isinstance(warmup, int) and warmup > limit and not is_given(origins[key]):
            notes.append(f"{key} = {shorter}: shortened from {warmup} ({origins[key]}) for train.steps = {steps}")
            values[key], origins[key] = shorter, f"shortened for {origins['train.steps']}"
    return notes


def is_given(origin: str) -> bool:
    """True if the user set the value on the command line."""
    return origin.startswith(("--set", "flag"))


def dump_toml(resolved: Resolved) -> str:
    """The whole configuration as a recipe file; values that are not defaults have their origin as a comment.

    Reading it back with `resolve` gives the same configuration.
    """
    header = {name: text for name, text in asdict(resolved.recipe.header).items() if text and name != "base"}
    lines = ["[recipe]", *(f"{name} = {to_toml(text)}" for name, text in header.items())]
    section, values = "", resolved.values()
    computed = {key for key, other in ALTERNATIVES.items() if values[other] is not None}
    for key, value in values.items():
        if key in computed:  # it is not known yet
            continue
        this, _, name = key.partition(".")
        if this != section:
            section = this
            lines += ["", f"[{section}]"]
        origin = resolved.origins[key]
        comment = "" if origin == "default" else f"  # {origin}"
        lines.append(f"{name} = {to_toml(value)}{comment}")
    return "\n".join(lines) + "\n"


def _parse_set(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    name, value = current_name(name.strip(), "--set"), value.strip()
    if not equals or not name:
        raise ConfigError(f"--set '{text}' is not key=value", "write, for example, --set train.lr=2e-6")
    key = find_key(name)
    if key is None or key.kind == "object":
        raise unknown_key(name, "--set")
    return name, _parse_value(key, value)


BOOLEANS = {"true": True, "false": False}
NOTHING = ("none", "null")
"""Missing values as Python and YAML write them; TOML has none."""
YES_OR_NO = ("yes", "no", "on", "off")
"""Words that older YAML reads as booleans."""


def _parse_value(key: Key, text: str) -> Any:
    """A TOML value if `text` is one and the key accepts its type, else the text itself. Booleans and a missing value
    may be written as in Python or YAML; in a table, whose members may be texts, such a word is never a text unless it
    is in quotes."""
    word = text.lower()
    if word in BOOLEANS and key.kind in ("boolean", "any"):
        return BOOLEANS[word]
    if word in NOTHING and key.kind in ("string", "any") and not _names_choice(key, text):
        return _missing_value(key, text)
    if word in YES_OR_NO and key.kind == "any":
        raise ConfigError(
            f"{key.name} = {text} (--set) must be {key.rule}",
            f"write true or false; for the text: {_quoted(key, text)}",
        )
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        table = {}
    value = table["value"] if set(table) == {"value"} else text
    if key.accepts_list and isinstance(value, list):
        return value
    if key.kind == "string":
        return value if isinstance(value, str) else text
    if key.kind == "array" and isinstance(value, str):
        return [_number(item.strip()) for item in value.split(",") if item.strip()]
    return [value] if key.kind == "array" and isinstance(value, int) else value


def _names_choice(key: Key, text: str) -> bool:
    """True if `none` is a value of the key (as of `train.offload`) and not a missing one."""
    return key.rule.startswith("one of") or (key.kind == "string" and text == "none" and bool(key.default))


def _missing_value(key: Key, text: str) -> str:
    """The value of a key of texts that is given as missing. Raises `ConfigError` if it cannot be."""
    if key.kind == "string" and key.default == "":
        return ""
    raise ConfigError(
        f"{key.name} = {text} (--set) must be {key.rule}",
        f"leave it out for the default; for the text: {_quoted(key, text)}",
    )


def _quoted(key: Key, text: str) -> str:
    return f"""--set '{key.name}="{text}"'"""


def _number(text: str) -> int | float | str:
    """An item of a list, as a number if it is one."""
    if text.isdecimal():
        return int(text)
    return float(text) if re.fullmatch(r"\d*\.\d+", text, re.ASCII) else text


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> RunConfig:
    nested: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        _check_text(dotted, value, origins[dotted])
        *path, name = dotted.split(".")
        table: dict[str, Any] = nested
        for part in path:
            table = table.setdefault(part, {})
        key = find_key(dotted)
        table[name] = None if value == UNSET and key is not None and key.optional else value
    try:
        # Strict, so that `steps = true` does not count as 1; via JSON, which accepts a list for a tuple.
        config = RunConfig.model_validate_json(json.dumps(nested, default=str), strict=True)
    except ValidationError as error:
        raise _config_error(error, values, origins) from None
    if messages := broken(config):
        raise ConfigError("; ".join(messages))
    return config


def _check_text(key: str, value: Any, origin: str) -> None:
    """Raise `ConfigError` for text that cannot be stored in a file or a path."""
    written = json.dumps(value, default=str, ensure_ascii=False)
    rule = "text without NUL characters" if r"\u0000" in written else ""
    try:
        written.encode()
    except UnicodeEncodeError:  # command-line bytes that were not UTF-8
        rule = "text in UTF-8"
    if rule:
        raise ConfigError(f"{key} = {value!a} ({origin}) must be {rule}", "retype it")


def _config_error(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> ConfigError:
    errors = error.errors(include_url=False)
    wrong = list(dict.fromkeys(_key_at(problem["loc"]) for problem in errors))
    rules = {key: known.rule for key in wrong if (known := find_key(key))}
    lines = [f"{key} = {to_toml(values[key])} ({origins[key]}) must be {rule}" for key, rule in rules.items()]
    # An unknown member of a table cannot be explained; the table can.
    table = wrong[0].rpartition(".")[0]
    explained = table if table in keys() else wrong[0]
    return ConfigError("; ".join(lines), f"for its meaning: rlcli recipes explain {explained}")


def _key_at(location: Sequence[object]) -> str:
    """The key that contains the pydantic error location: an item of a list maps to the list."""
    path = [str(part) for part in location]
    while path and find_key(".".join(path)) is None:
        path.pop()
    return ".".join(path)


def to_toml(value: Any) -> str:
    """One value as TOML writes it; None, which TOML lacks, as `"unset"`."""
    if value is None:
        return to_toml(UNSET)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except for one control character that JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {to_toml(item)}" for name, item in value.items() if item is not None) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_toml(item) for item in value)}]"
    return str(value)
