"""Convert a verl or TRL configuration file to an rlcli recipe that resolves."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlcli.config.keys import find_key, keys
from rlcli.config.load import resolve, to_toml
from rlcli.config.schema import RunConfig
from rlcli.errors import ConfigError
from rlcli.support.extras import missing
from rlcli_port.configs import config_files, sft, trl, verl
from rlcli_port.configs.foreign_config import Configuration
from rlcli_port.configs.key_report import Line, Reading
from rlcli_port.configs.reward_lines import Functions, add_data, add_rewards, functions_of, reward_file_name

LONGEST_SHOWN = 80
LONGEST_KEY = 200
LONGEST_NOTE = 600
NAMES = {"verl": "verl", "trl": "TRL"}
TRACKERS_KEY = "tracking.trackers"


@dataclass(frozen=True)
class Imported:
    """A foreign configuration as a recipe."""

    framework: str
    """`verl` or `trl`."""
    version: str
    """The version of the framework that the import follows."""
    method: str
    """`grpo` (with all of verl's algorithms), `rloo` or `sft`."""
    settings: dict[str, Any]
    """Dotted key → value."""
    toml: str
    """The text of the recipe file."""
    lines: list[Line]
    """One line for each key: how it was converted, or why not."""
    warnings: list[str]
    """Limitations of how the values were obtained."""
    rewards: str
    """The source of a file with the script's own reward functions; empty if it has none."""
    rewards_file: Path
    """The path of that file, which the recipe names."""


def import_file(
    path: Path,
    processes: int | None = None,
    *,
    out: Path | None = None,
    variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Imported:
    """The recipe for a verl or TRL configuration. processes: the number that TRL is started with; None: as the script
    says, else 1. out: the recipe's file, beside which the script's reward functions go. variables, arguments: those of
    a script, which runs in the sandbox.

    Raises `ConfigError` for a file that cannot be read or is neither, and if the recipe breaks a rule.
    """
    configuration = config_files.read(path, variables, arguments)
    framework, rewards_file = configuration.framework, reward_file_name(out, path)
    functions = functions_of(configuration, rewards_file)
    read = _translated(configuration, functions, processes, is_written=out is not None)
    version = verl.VERSION if framework == "verl" else trl.VERSION
    _drop_invalid(read)
    _keep_ratios_right(read)
    _note_trackers(read)
    base = sft.BASE if configuration.method == "sft" else ""
    toml = _toml(read, path, f"{NAMES[framework]} {version}", base)
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "imported.toml"
        recipe.write_text(toml, encoding="utf-8")
        try:
            resolve(str(recipe))
        except ConfigError as error:
            raise ConfigError(f"{path} gives no valid recipe: {error.message}", error.hint) from error
    return Imported(
        framework,
        version,
        configuration.method,
        read.settings,
        toml,
        [shown(line) for line in read.lines],
        [_printable(warning, LONGEST_NOTE) for warning in configuration.warnings],
        functions.text,
        rewards_file,
    )


def _translated(
    configuration: Configuration, functions: Functions, processes: int | None, *, is_written: bool
) -> Reading:
    """The reading of a configuration by its framework and method. is_written: whether the script's reward functions go
    into a file."""
    values, started = configuration.values, processes or configuration.processes
    ours = {name: key.default for name, key in keys().items()}
    if configuration.method == "sft":
        ours = resolve(sft.BASE).values()
        if configuration.framework == "verl":
            return sft.translate_verl(values, started, ours)
        return sft.translate_trl(values, started or 1, ours)
    if configuration.framework == "verl":
        return verl.translate(values, ours)
    read = trl.translate(values, started or 1, configuration.method)
    if configuration.rewards:
        add_rewards(read, functions, is_written)
    add_data(read, configuration.data, functions.columns)
    trl.finish(read, ours)
    return read


def shown(line: Line) -> Line:
    """The line with printable texts: bounded in length, without control characters."""
    note = _printable(line.note, LONGEST_NOTE)
    return replace(
        line,
        source=_printable(line.source, LONGEST_KEY),
        foreign_value=_safe(line.foreign_value),
        value=_safe(line.value),
        note=note,
    )


def _safe(value: Any) -> Any:
    if isinstance(value, bool | float | None) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    if isinstance(value, list):
        return [_safe(item) for item in value[:20]]
    return _printable(str(value)[: 4 * LONGEST_SHOWN])


def _printable(text: str, longest: int = LONGEST_SHOWN) -> str:
    text = "".join(character if character.isprintable() else "�" for character in text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _drop_invalid(read: Reading) -> None:
    """Drop settings that their key does not accept, and report them as missing."""
    for key, value in dict(read.settings).items():
        section, _, name = key.partition(".")
        table, _, member = name.partition(".")
        nested = {section: {table: {member: value} if member else value}}
        try:
            RunConfig.model_validate_json(json.dumps(nested), strict=True)
        except ValidationError as error:
            if not any(detail["loc"] for detail in error.errors(include_url=False)):
                continue  # a rule between keys; the other keys are not set here
            known = find_key(key)
            rule = f"{key} must be {known.rule}" if known else key
            del read.settings[key]
            read.lines = [
                Line("missing", line.source, line.foreign_value, note=rule) if line.key == key else line
                for line in read.lines
            ]


def _keep_ratios_right(read: Reading) -> None:
    """Set a correction if our rules require one and the file has none."""
    settings = read.settings
    biased = [
        key for key in ("rollout.top_p", "dynamic_sampling.oversample") if key in settings and settings[key] != 1.0
    ]
    if biased and settings.get("algorithm.correction") == "none":
        settings["algorithm.correction"] = "token_tis"
        note = f"{biased[0]} needs a correction"
        read.lines = [
            replace(line, value="token_tis", note=note) if line.key == "algorithm.correction" else line
            for line in read.lines
        ]


def _note_trackers(read: Reading) -> None:
    """Report the trackers that the recipe has as a comment."""
    if absent := _not_installed(read.settings.get(TRACKERS_KEY, ())):
        note = f"a comment in the recipe: {', '.join(absent)} is not installed here (pip install 'rlcli[{absent[0]}]')"
        read.lines = [replace(line, note=note) if line.key == TRACKERS_KEY else line for line in read.lines]


def _not_installed(trackers: Sequence[str]) -> list[str]:
    """The trackers that a run would refuse, since their package is missing."""
    return [name for name in trackers if missing(name)]


def _toml(read: Reading, path: Path, origin: str, base: str) -> str:
    """The text of the recipe: sections in schema order, each value with its source key as a comment. base: the recipe
    below it; empty: none."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-")[:60] or "imported"
    sources = {line.key: line.source for line in read.lines if line.kind == "mapped"}
    lines = [
        "[recipe]",
        f"name = {to_toml(name)}",
        *([f"base = {to_toml(base)}"] if base else []),
        f"summary = {to_toml(f'Imported from a {origin} configuration.')}",
    ]
    order = [key for key in keys() if key != "algorithm.options"]
    plain = sorted((key for key in read.settings if key in order), key=order.index)
    section = ""
    for key in [*plain, *(key for key in read.settings if key not in order)]:
        this, _, last = key.rpartition(".")
        if this != section:
            section = this
            lines += ["", f"[{section}]"]
        comment = f"  # {_printable(sources[key])}" if key in sources else ""
        setting = f"{last} = {to_toml(read.settings[key])}{comment}"
        if key == TRACKERS_KEY and (absent := _not_installed(read.settings[key])):
            installed = [name for name in read.settings[key] if name not in absent]
            setting = f"# {setting}; not installed here: {', '.join(absent)}"
            lines += [f"{last} = {to_toml(installed)}"] if installed else []
        lines.append(setting)
    text = "\n".join(lines) + "\n"
    return text.encode(errors="replace").decode()  # a lone surrogate, which JSON may hold, becomes ?
