"""Read a foreign configuration of any supported format, bounded in size and depth: a script by running it in the
sandbox, a table as flat keys and values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlcli_sandbox import open_sandbox

from rlcli.errors import ConfigError, SetupError
from rlcli.support.reading import parse_json
from rlcli_port.configs import parsed_python, shell_run, shell_words
from rlcli_port.configs.foreign_config import Configuration
from rlcli_port.configs.key_report import Unresolved, number_of, scalar
from rlcli_port.configs.launches import Launch, is_other_work, launch_of, options_of, overrides_of, word_after
from rlcli_port.configs.methods import METHODS, method_of
from rlcli_port.configs.python_run import notebook_text, run_python

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 40

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


LEVELS_ABOVE = 4
"""Folders above a script's own in which files that it names are looked for."""
DISTILLED = ("teacher_model_name_or_path", "teacher", "distillation.enabled", "distillation.teacher_model")
"""Keys that only a distillation has."""
SFT_ALONE = frozenset(
    {"packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_seq_length"}
)
DPO_ALONE = frozenset({"ref_model", "precompute_ref_log_probs", "rpo_alpha", "label_smoothing", "f_divergence_type"})
RL_ALONE = frozenset({"num_generations", "max_completion_length", "reward_funcs", "num_iterations", "scale_rewards"})
VERL_BASES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""verl's own configurations, whose values are its defaults."""
READ_NOT_RUN = "it was read as text, not run: values that depend on branches, loops or other programs may be wrong"
OUR_RECIPES = {
    "dpo": "rlcli has DPO on pairs of verified samples (rlcli train dpo), not on given pairs",
    "distillation": "start from the recipe opd: rlcli train opd --model STUDENT --set teacher.path=TEACHER",
}
"""Methods that are recognised and not converted."""


def read(path: Path, variables: Mapping[str, str] | None = None, arguments: Sequence[str] = ()) -> Configuration:
    """The configuration in a file. variables, arguments: those of a script.

    Raises `ConfigError` for a file that holds none, that cannot be read, or that is for a method without a counterpart.
    """
    text = _text(path)
    if path.suffix in (".json", ".yaml", ".yml"):
        if variables or arguments:
            raise ConfigError(
                f"{path} is no script: --variable and arguments after -- have no effect",
                "leave them out, or give the script that reads it",
            )
        configuration = _of_table(_table(text, path), path)
    elif path.suffix in (".py", ".ipynb"):
        configuration = _of_python(path, text, arguments, variables or {})
    else:
        configuration = _of_shell(path, text, variables or {}, arguments)
    if configuration.method in OUR_RECIPES:
        raise ConfigError(f"{path} is a configuration of {configuration.method}", OUR_RECIPES[configuration.method])
    if configuration.method not in METHODS:
        raise ConfigError(
            f"{path} is a configuration of {configuration.method}, which has no counterpart",
            "GRPO, RLOO, SFT and verl's algorithms can be imported",
        )
    return configuration


def _table(text: str, path: Path) -> dict[str, Any]:
    """Keys and values of a YAML or JSON file."""
    if path.suffix == ".json":
        return _flat(_parsed(text, "JSON", path), path)
    return {key: _typed(value) for key, value in _flat(_parsed(text, "YAML", path), path).items()}


def _of_table(values: dict[str, Any], path: Path) -> Configuration:
    if any(key.startswith("distillation.") for key in values) and values.get("distillation.enabled") is not False:
        return Configuration("verl", "distillation", values)
    firsts = {key.partition(".")[0] for key in values if "." in key}
    # Other programs that use Hydra have `data`, too.
    if firsts & (VERL - {"data"}) or (firsts and firsts <= {"data", "model", "optim"}):
        is_sft = not any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in values) and (
            any(key.startswith(("optim.", "model.")) for key in values)
        )
        return Configuration("verl", "sft" if is_sft else "grpo", values)
    if TRL & values.keys() or SFT_ALONE & values.keys():
        return Configuration("trl", _method_of_trl(values, path), values)
    raise ConfigError(
        f"{path} holds no verl or TRL configuration",
        "give a script that runs verl.trainer.main_ppo, verl's YAML, or TRL's YAML, JSON or GRPOConfig(...)",
    )


def _method_of_trl(values: Mapping[str, Any], path: Path) -> str:
    """The method of a YAML or JSON file of TRL, which does not name it: by keys that only one method has, then by the
    names of its folder (open-r1: recipes/MODEL/sft/config.yaml) and itself."""
    if any(key in values for key in DISTILLED):
        return "distillation"
    if RL_ALONE & values.keys():
        return "rloo" if "normalize_advantages" in values else "grpo"
    if DPO_ALONE & values.keys():
        return "dpo"
    if SFT_ALONE & values.keys():
        return "sft"
    methods = [
        method for name in (path.resolve().parent.name, path.name.partition(".")[0]) if (method := method_of(name))
    ]
    return methods[0] if methods else "sft" if "max_length" in values and "beta" not in values else "grpo"


def _of_python(path: Path, text: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Configuration:
    code = notebook_text(text, path) if path.suffix == ".ipynb" else text
    try:
        sandbox = open_sandbox("auto")
    except SetupError as error:
        _refuse(variables, arguments, path, error)
        return _read_python(path, code, f"{error.message}: {READ_NOT_RUN} ({error.hint})")
    configuration = run_python(sandbox, path, code, arguments, variables)
    if configuration is None:
        return _read_python(path, code, f"the script makes no trainer when it is run: {READ_NOT_RUN}")
    if parsed := configuration.values.pop("config", None):
        file = _located(str(parsed), path.resolve().parent, path)
        if file is None:
            raise ConfigError(f"{path}: there is no file {parsed} (--config)", "name a YAML file of this project")
        configuration.values = _table(_text(file), file) | configuration.values
    return configuration


def _refuse(variables: Mapping[str, str], arguments: Sequence[str], path: Path, error: SetupError) -> None:
    """Refuse variables and arguments of a script that cannot be run."""
    if variables or arguments:
        raise ConfigError(
            f"{path} cannot be run here ({error.message}), so --variable and arguments after -- have no effect",
            error.hint,
        )


def _read_python(path: Path, code: str, warning: str) -> Configuration:
    values, method = parsed_python.arguments(code, path)
    return Configuration("trl", method, values, warnings=[warning])


def _of_shell(path: Path, text: str, variables: Mapping[str, str], arguments: Sequence[str]) -> Configuration:
    try:
        sandbox = open_sandbox("bwrap")
    except SetupError as error:
        _refuse(variables, arguments, path, error)
        warning = f"{path.name} was not run, since that needs bubblewrap ({error.hint}): {READ_NOT_RUN}"
        return _read_shell(path, text, warning)
    captured = shell_run.capture(sandbox, path, text, lambda calls: bool(_trainings(calls, path)), variables, arguments)
    launches = _trainings(captured.calls, path)
    others = [launch.program for call in captured.calls if (launch := launch_of(call))]
    if not launches and any(map(is_other_work, others)):
        raise ConfigError(f"{path} starts {others[0]}, which trains nothing", "give a script that trains")
    if not launches:
        reason = captured.errors.strip().splitlines()[-1:] or [f"bash ended with status {captured.status}"]
        return _read_shell(
            path, text, f"the script starts no training when it is run ({reason[0][:160]}): {READ_NOT_RUN}"
        )
    configuration = _of_launch(launches[0], path)
    if len(launches) > 1:
        further = ", ".join(dict.fromkeys(f"{other.program} ({other.method or 'unknown'})" for other in launches[1:6]))
        configuration.warnings.append(
            f"the script starts {len(launches)} trainings; this is the first. The others: {further}"
        )
    if captured.timed_out:
        configuration.warnings.append("the script did not end: it may wait for something that does not happen here")
    if captured.answers:
        configuration.warnings.append(
            f"not run, so that values which depend on its output are not known: {'; '.join(captured.answers[:3])[:300]}"
        )
    if captured.demanded:
        configuration.warnings.append(
            f"the script asks for {', '.join(captured.demanded)}: give --variable NAME=VALUE, or arguments after --"
        )
    if captured.unset:
        configuration.warnings.append(
            f"not set, so that values which depend on them are not known: {', '.join(captured.unset)[:300]}: "
            "give --variable NAME=VALUE, or arguments after --"
        )
    return configuration


def _trainings(calls: Sequence[shell_run.Call], path: Path) -> list[Launch]:
    """The calls that train; those of reinforcement learning first."""
    launches = [launch for call in calls if (launch := launch_of(call)) and not is_other_work(launch.program)]
    training = [launch for launch in launches if launch.is_verl or launch.method or _uses_trl(launch, path)]
    return sorted(training, key=lambda launch: launch.method not in ("grpo", "rloo"))


def _uses_trl(launch: Launch, path: Path) -> bool:
    """True if a script of the project that names no method imports TRL."""
    file = None if launch.is_module else _located(launch.program, Path(launch.folder), path)
    return file is not None and re.search(r"^\s*(?:from|import) trl\b", _text(file), re.MULTILINE) is not None


def _read_shell(path: Path, text: str, warning: str) -> Configuration:
    configuration = _of_table(shell_words.overrides(text, path), path)
    configuration.warnings.append(warning)
    return configuration


def _of_launch(launch: Launch, path: Path) -> Configuration:
    """The configuration of a program that a script starts."""
    if launch.is_verl:
        values = overrides_of(launch.words)
        is_distillation = launch.method == "distillation" or values.get("distillation.enabled") is True
        configuration = Configuration("verl", "distillation" if is_distillation else launch.method, values)
        configuration.processes = launch.processes
        _add_base(configuration, launch, path)
        return configuration
    script = None if launch.is_module else _located(launch.program, Path(launch.folder), path)
    configuration = Configuration("trl", launch.method, {})
    if script is not None:
        configuration = _of_python(script, _text(script), launch.words, launch.variables)
    else:
        values = options_of(launch.words)
        config_name = values.pop("config", None)
        file = _located(str(config_name), Path(launch.folder), path) if config_name else None
        if config_name and file is None:
            configuration.warnings.append(
                f"--config {config_name}: there is no such file in this project; its values are not read"
            )
        configuration.values = (_table(_text(file), file) if file else {}) | values
    configuration.processes = launch.processes or _processes_of(launch, path)
    return configuration


def _add_base(configuration: Configuration, launch: Launch, path: Path) -> None:
    """Add the values of the YAML that `--config-path` and `--config-name` name, below those of the command line."""
    name, folder = (word_after(launch.words, option) for option in ("--config-name", "--config-path"))
    if not name or name.removesuffix(".yaml") in VERL_BASES:
        return
    file = _located(f"{folder or '.'}/{name.removesuffix('.yaml')}.yaml", Path(launch.folder), path)
    if file is None:
        configuration.warnings.append(
            f"--config-name {name}: there is no such file in this project; its values are not read"
        )
        return
    base = {
        key: value for key, value in _table(_text(file), file).items() if not key.startswith(("hydra.", "defaults"))
    }
    configuration.values = base | configuration.values


def _processes_of(launch: Launch, path: Path) -> int | None:
    """`num_processes` of the launcher's own YAML."""
    file = _located(launch.launcher_config, Path(launch.folder), path) if launch.launcher_config else None
    count = number_of(_table(_text(file), file).get("num_processes")) if file else None
    return int(count) if count and 1 <= count <= 100_000 else None


def _depth(path: Path) -> int:
    return len(path.parts)


def _located(name: str, folder: Path, script: Path) -> Path | None:
    """A file that a script names, in its working directory, its own folder, or one above within the project. What is
    outside of the project, also by a link, is not read, nor what is hidden in it (a name that begins with a dot)."""
    script_folder = script.resolve().parent
    project = next((above for above in (script_folder, *script_folder.parents) if (above / ".git").exists()), None)
    if project is None:
        home = Path.home()
        above = [
            folder_above
            for folder_above in script_folder.parents[:LEVELS_ABOVE]
            if folder_above != folder_above.parent and not home.is_relative_to(folder_above)
        ]
    else:
        above = [folder_above for folder_above in script_folder.parents if folder_above.is_relative_to(project)]
    bounds = [project] if project else [script_folder, *above]
    bounds = [bound for bound in bounds if bound != Path.home().resolve()]
    for base in dict.fromkeys([folder, script_folder, *above]):
        file = Path(name) if Path(name).is_absolute() else base / name
        try:
            resolved = file.resolve()
            inside = [resolved.relative_to(bound) for bound in bounds if resolved.is_relative_to(bound)]
            if inside and not any(part.startswith(".") for part in min(inside, key=_depth).parts) and file.is_file():
                return file
        except (OSError, ValueError, RuntimeError):  # such as a name that is too long, or links in a circle
            continue
    return None


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is not a file", "give a shell script, a YAML, a JSON or a Python file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}", "give a readable file") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB", "give only the configuration")
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
            if count > MAX_VALUES or depth > MAX_DEPTH:
                raise ConfigError(
                    f"{path} holds more than {MAX_VALUES} values, or tables more than {MAX_DEPTH} deep",
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
    reference = REFERENCE.fullmatch(value.text) if isinstance(value, Unresolved) else None
    if not reference or len(value.text) > 300:
        return value
    target = flat.get(reference["plain"] or reference["selected"])
    if target is None and reference["default"] is not None:
        target = scalar(reference["default"])
    return value if target is None else target


def _line(error: BaseException) -> str:
    """The error in one line: a parser's message may have several lines, or hold the whole text."""
    text = "too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
    return text if len(text) <= 160 else f"{text[:160]}…"
