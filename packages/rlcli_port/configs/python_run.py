"""Runs a Python script or notebook of TRL in the sandbox, with stubs in place of all packages, and reads which trainer
it makes, with which configuration, reward functions and data."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcli_sandbox import Sandbox

from rlcli.errors import ConfigError
from rlcli.support.reading import parse_json
from rlcli_port.configs.foreign_config import Configuration, DataSet, RewardFunction
from rlcli_port.configs.key_report import Unresolved, number_of
from rlcli_port.configs.launches import flattened, options_of
from rlcli_port.configs.methods import method_of, method_of_any
from rlcli_port.configs.sandboxed_script import files_beside, run_confined, text_of
from rlcli_port.configs.shell_run import UNKNOWN

POSITIONAL = {
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "rloo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "sft": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
"""Parameters of the trainers that may be given by position."""
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
"""PEFT's names → those of TRL's command line."""
FROM_COMMAND_LINE = ("grpo", "rloo", "sft")
"""Methods that are converted, and so need their arguments. Others are refused without."""
NOT_KEYS = ("model", "args", "train_dataset", "eval_dataset", "reward_funcs", "peft_config", "processing_class")
HANDED = (
    "callbacks",
    "optimizers",
    "data_collator",
    "reward_processing_classes",
    "compute_metrics",
    "quantization_config",
)
"""Arguments of a trainer that are no keys of a configuration."""


NOT_KNOWN = "a value that only the training knows"


def notebook_text(text: str, path: Path) -> str:
    """The code of a notebook's cells, without lines for the shell (`!`) and for IPython (`%`)."""
    try:
        cells = parse_json(text)["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        codes = [_cell_code(source if isinstance(source, str) else "".join(source)) for source in sources]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a notebook: {type(error).__name__}: {error}", "give an .ipynb file"
        ) from error
    return "\n".join(codes)


def _cell_code(source: str) -> str:
    """The code of a cell, line by line where it was; nothing if it is not Python."""
    lines: list[str] = []
    continues = False
    for line in source.split("\n"):
        stripped = line.lstrip()
        is_command = continues or stripped.startswith(("!", "%", "pip install", "conda install"))
        continues = is_command and line.endswith("\\")
        lines.append(f"{line[: len(line) - len(stripped)]}pass" if is_command else line)
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "\n" * (len(lines) - 1)
    return "\n".join(lines)


def run_python(
    sandbox: Sandbox,
    path: Path,
    text: str,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> Configuration | None:
    """The configuration that the script makes; None if it makes none, or ended before. variables: of its environment.

    Raises `ConfigError` for a script that breaks a limit, asks for arguments or makes several.
    """
    printed, notes = _printed(sandbox, path, text, arguments, variables or {})
    calls = [call for call in printed["calls"] if method_of(call["name"])]
    trainers = sorted((call for call in calls if call["name"].endswith("Trainer")), key=_is_not_rl)
    configs = sorted((call for call in calls if not call["name"].endswith("Trainer")), key=_is_not_rl)
    parsed = printed["parsed"]
    method = method_of_any([call["name"] for call in (*trainers, *configs)])
    if parsed is not None and not configs:
        method = method_of_any(parsed) or method
        if method in FROM_COMMAND_LINE and not arguments:
            raise ConfigError(
                f"{path} takes its configuration from the command line",
                f"give it after --, as in: rlcli config import {path} -- --config FILE.yaml --learning_rate 1e-6",
            )
    elif printed["error"].startswith("SystemExit: 2"):
        raise ConfigError(
            f"{path} asks for arguments", f"give them after --, as in: rlcli config import {path} -- --name value"
        )
    if not method or not (configs or parsed is not None):
        return None
    trainer = _first(trainers, method)
    configuration = Configuration("trl", method, {}, script=path, script_text=text, warnings=notes)
    if len(trainers) > 1:
        further = ", ".join(dict.fromkeys(f"{call['name']}, line {call['line']}" for call in trainers[1:6]))
        notes.append(f"the script makes {len(trainers)} trainers; this is {trainers[0]['name']}. The others: {further}")
    if config := _config_of(trainer, configs, printed["calls"], method, path):
        configuration.values |= _values(config["kwargs"])
    if parsed is not None and not configs:
        configuration.values |= options_of(tuple(arguments))
    _add_trainer_arguments(configuration, trainer, printed)
    if error := printed["error"]:
        configuration.warnings.append(
            f"run with stubs in place of its packages, {path.name} ended with {error}; what comes later is not imported"
        )
    return configuration


def _is_not_rl(call: Mapping[str, Any]) -> bool:
    return method_of(call["name"]) not in ("grpo", "rloo")


def _printed(
    sandbox: Sandbox, path: Path, text: str, arguments: Sequence[str], variables: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Run the script; returns its record, and notes about it. Values that differ in a second run, in which stubs have
    other numbers and texts, are marked as unknown."""
    order: dict[str, Any] = {"name": path.name, "text": text, "arguments": list(arguments), "files": files_beside(path)}
    order |= {"variables": dict(variables), "varied": False}
    printed = recorded(run_confined(sandbox, text_of("inside_python.py"), order, path), path)
    if not printed["invented"] or not (printed["calls"] or printed["loads"]):
        return printed, []
    try:
        other = recorded(run_confined(sandbox, text_of("inside_python.py"), order | {"varied": True}, path), path)
    except ConfigError as error:
        note = "values that depend on what only the training knows may be wrong: a second run, with other stand-ins, "
        return printed, [f"{note}failed ({error.message})"]
    for kind in ("calls", "loads"):
        others = {(call["name"], call["line"]): call for call in reversed(other[kind])}
        if [call["name"] for call in printed[kind]] == [call["name"] for call in other[kind]]:
            pairs = [*zip(printed[kind], other[kind], strict=True)]
        else:
            pairs = [(call, others.get((call["name"], call["line"]), call)) for call in printed[kind]]
        for call, same_call in pairs:
            for part in ("args", "kwargs"):
                call[part] = _agreed(call[part], same_call[part])
    return printed, []


def _agreed(value: Any, other: Any) -> Any:
    """The value, with a text that says so in place of each part that differs from the other run's.

    >>> _agreed([1, {"table": {"a": 2, "b": 3}}], [1, {"table": {"a": 5, "b": 3}}])
    [1, {'table': {'a': {'text': 'a value that only the training knows'}, 'b': 3}}]
    """
    if isinstance(value, dict):
        table, other_table = value.get("table"), other.get("table") if isinstance(other, dict) else None
        if isinstance(table, dict) and isinstance(other_table, dict):
            return value | {"table": {name: _agreed(item, other_table.get(name)) for name, item in table.items()}}
        return value  # a function, a call, or a value that is not known anyhow
    if isinstance(value, list):
        if not isinstance(other, list):
            return {"text": NOT_KNOWN}
        others = other if len(other) == len(value) else [None] * len(value)
        return [_agreed(item, other_item) for item, other_item in zip(value, others, strict=True)]
    return value if value == other else {"text": NOT_KNOWN}


def recorded(printed: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Validate the record that a run has printed, in the form that `inside_python.py` describes: a script can forge it.

    Raises `ConfigError` if it has not.
    """

    def is_text(value: Any) -> bool:
        return isinstance(value, str) and _is_encodable(value)

    def is_call(call: Any, also: str) -> bool:
        return (
            isinstance(call, dict)
            and is_text(call.get("name"))
            and isinstance(call.get("line"), int)
            and isinstance(call.get("args"), list)
            and isinstance(call.get("kwargs"), dict)
            and isinstance(call["kwargs"].get("table"), dict)
            and (not also or isinstance(call.get(also), list))
        )

    calls, loads, parsed = printed.get("calls"), printed.get("loads"), printed.get("parsed")
    if (
        not isinstance(calls, list)
        or not all(is_call(call, "") for call in calls)
        or not isinstance(loads, list)
        or not all(is_call(load, "steps") and all(isinstance(step, dict) for step in load["steps"]) for load in loads)
        or not (parsed is None or (isinstance(parsed, list) and all(map(is_text, parsed))))
        or not is_text(printed.get("error"))
        or not isinstance(printed.get("invented"), bool)
    ):
        raise ConfigError(
            f"{path} was run in the sandbox to be imported, and what it printed is no record of a run",
            "import a script that leaves the standard output alone",
        )
    cleaned: dict[str, Any] = _cleaned({"calls": calls, "loads": loads, "parsed": parsed})
    return cleaned | {"error": printed["error"], "invented": printed["invented"]}


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _cleaned(value: Any) -> Any:
    """The value with each lone surrogate, which no file can hold, as `?`."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return {_cleaned(name): _cleaned(item) for name, item in value.items()} if isinstance(value, dict) else value


def _first(calls: Sequence[Mapping[str, Any]], method: str) -> Mapping[str, Any] | None:
    return next((call for call in calls if method_of(str(call["name"])) == method), None)


def _config_of(
    trainer: Mapping[str, Any] | None,
    configs: Sequence[Mapping[str, Any]],
    calls: Sequence[Mapping[str, Any]],
    method: str,
    path: Path,
) -> Mapping[str, Any] | None:
    """The configuration of the trainer, or the only one of its method."""
    args = _arguments(trainer, method).get("args") if trainer else None
    if isinstance(args, dict) and isinstance(args.get("call"), int) and 0 <= args["call"] < len(calls):
        return calls[args["call"]]
    configs = [config for config in configs if method_of(str(config["name"])) == method]
    if len(configs) > 1:
        lines = ", ".join(str(config["line"]) for config in configs[:5])
        raise ConfigError(
            f"{path} makes {len(configs)} {configs[0]['name']}(...), in lines {lines}", "give a file with one"
        )
    return configs[0] if configs else None


def _arguments(call: Mapping[str, Any], method: str) -> dict[str, Any]:
    """A trainer's arguments by their names."""
    by_position = dict(zip(POSITIONAL.get(method, ()), call["args"], strict=False))
    return by_position | dict(call["kwargs"].get("table", {}))


def _values(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a configuration as dotted keys and values."""
    values: dict[str, Any] = {}
    for name, value in dict(kwargs.get("table", {})).items():
        values |= flattened(str(name), _value(value))
    return values


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        if isinstance(value.get("table"), dict):
            return {name: _value(item) for name, item in value["table"].items()}
        text = value.get("text") or value.get("function") or "a value that the script makes"
        return Unresolved(str(text))
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return Unresolved("a list that the script makes") if any(isinstance(i, Unresolved) for i in items) else items
    if isinstance(value, str) and UNKNOWN in value:
        return Unresolved(value.replace(UNKNOWN, "$"))
    return value


def _add_trainer_arguments(
    configuration: Configuration, trainer: Mapping[str, Any] | None, printed: Mapping[str, Any]
) -> None:
    """Add the trainer's arguments other than its configuration: model, LoRA, reward functions and data."""
    values, loads = configuration.values, printed["loads"]
    arguments = _arguments(trainer, configuration.method) if trainer else {}
    for call in printed["calls"]:
        if call["name"] == "LoraConfig" or call["name"] == "PeftConfig":
            _add_lora(values, call["kwargs"])
    for load in loads:
        if load["name"].endswith("get_peft_model"):
            _add_lora(values, load["kwargs"])
    model = _model(arguments.get("model"), loads)
    if model is not None:
        values.setdefault("model_name_or_path", model)
    if "reward_funcs" in arguments:
        listed = (
            arguments["reward_funcs"] if isinstance(arguments["reward_funcs"], list) else [arguments["reward_funcs"]]
        )
        assert configuration.script is not None
        configuration.rewards = [_reward(value, configuration.script) for value in listed]
        values["reward_funcs"] = [reward.name for reward in configuration.rewards]
    if "train_dataset" in arguments:
        configuration.data = _data(arguments["train_dataset"], loads)
    for name in arguments:
        if name not in NOT_KEYS and name not in HANDED:
            values.setdefault(name, Unresolved("an argument of the trainer"))


def _add_lora(values: dict[str, Any], kwargs: Mapping[str, Any]) -> None:
    lora = _values(kwargs)
    values |= {"use_peft": True} | {LORA[name]: value for name, value in lora.items() if name in LORA}


def _model(value: Any, loads: Sequence[Mapping[str, Any]]) -> Any:
    """The model's name or path, also of one that the script has loaded."""
    seen: set[int] = set()
    while isinstance(value, dict) and isinstance(at := value.get("load"), int) and at not in seen:
        if not 0 <= at < len(loads):
            return Unresolved("the model")
        seen.add(at)
        load = loads[at]
        keywords = load["kwargs"].get("table", {})
        value = next(
            (keywords[key] for key in ("pretrained_model_name_or_path", "model_name", "model") if key in keywords), None
        )
        value = (load["args"][0] if load["args"] else None) if value is None else value
    return (
        value if isinstance(value, str) and UNKNOWN not in value else None if value is None else Unresolved("the model")
    )


def _reward(value: Any, script: Path) -> RewardFunction:
    if isinstance(value, dict) and isinstance(value.get("partial"), dict):
        return replace(_reward(value["partial"], script), bound=str(value.get("bound", "")))
    if isinstance(value, dict) and "function" in value:
        name, line = str(value["function"]), number_of(value.get("line"))
        if not (name.isidentifier() or name == "<lambda>") or line is None:
            return RewardFunction("", None)
        in_script = value.get("file") == script.name
        file = script if in_script else script.parent / Path(str(value.get("file"))).name
        if not in_script and (name == "<lambda>" or not file.is_file()):
            return RewardFunction("", None)
        return RewardFunction(name, file, int(line), in_script)
    return RewardFunction(str(value.get("text", "")) if isinstance(value, dict) else str(value), None)


def _data(value: Any, loads: Sequence[Mapping[str, Any]]) -> DataSet | None:
    at = value.get("load") if isinstance(value, dict) else None
    if not isinstance(at, int) or not 0 <= at < len(loads):
        return None
    load = loads[at]
    keywords = load["kwargs"].get("table", {})
    words = [word for word in load["args"] if isinstance(word, str)]

    def text(*keys: str) -> str:
        return next((keywords[key] for key in keys if isinstance(keywords.get(key), str)), "")

    loader = str(load["name"]).rpartition(".")[2]
    files = text("data_files")
    source = text("path") or (words[0] if words else "")
    if source in ("json", "csv", "parquet", "text") and files:
        source, words = files, words[:1]
    steps = tuple(
        f"{step.get('name')}({_shown(step['with'])})"
        for step in load["steps"][:5]
        if isinstance(step.get("with"), dict | str)
    )
    subset = text("name") or (words[1] if len(words) > 1 and loader == "load_dataset" else "")
    return DataSet(source, loader, subset, text("split"), steps)


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "function" in value:
        name = "a lambda" if value["function"] == "<lambda>" else value["function"]
        return f"{name}, line {value.get('line')}"
    return str(value.get("text", "…")) if isinstance(value, dict) else str(value)
