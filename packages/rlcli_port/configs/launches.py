"""Read the module or script that a recorded call of python, torchrun, accelerate, deepspeed or trl starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlcli.support.reading import parse_json
from rlcli_port.configs.hydra_values import HydraError, hydra_value
from rlcli_port.configs.key_report import Unresolved, number_of, scalar
from rlcli_port.configs.methods import method_of
from rlcli_port.configs.shell_run import Call, is_unknown

OVERRIDE = re.compile(r"(?P<operator>~|\+{0,2})(?P<key>[A-Za-z_][\w@/]*(?:\.[\w@/-]+)*)(?:=(?P<value>.*))?", re.DOTALL)
DEEPEST = 40
"""Parts of a key."""
_PROCESSES = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus")
_NODES = ("--nnodes", "--num_nodes", "--num_machines")
_TEACHING = re.compile(r"(?:^|[._])(?:gkd|distill\w*|opd)(?:[._]|$)")
_OTHER_WORK = re.compile(r"(?:main_generation|preprocess|convert|merge|serve)\w*\Z|main_eval\Z")
VERL_PARTS = ("actor_rollout_ref", "critic", "custom_reward_function", "reward_model", "algorithm")
"""First parts of keys that verl's programs have; others that use Hydra have `data` and `trainer`, too."""


@dataclass(frozen=True)
class Launch:
    """A program that trains, after its launcher's own words."""

    program: str
    """A module (`verl.trainer.main_ppo`), a script (`src/open_r1/grpo.py`), or a subcommand of trl (`grpo`)."""
    is_module: bool
    """True if `program` is a module or a subcommand, not a script."""
    words: tuple[str, ...]
    """The program's arguments."""
    folder: str
    """Its working directory."""
    processes: int | None
    """Number of processes that the launcher starts; None if unknown."""
    launcher_config: str
    """The YAML that `accelerate launch --config_file` names; empty if none."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Its environment, as far as the script sets it."""

    @property
    def is_verl(self) -> bool:
        """True if it takes Hydra's overrides, as verl does."""
        is_verl_program = re.match(r"(?:verl|recipe)[./]", self.program) is not None
        overrides = [match for word in self.words if (match := re.match(r"\+{0,2}([a-z_]+)\.[\w.]+=", word))]
        of_verl = any(match[1] in VERL_PARTS for match in overrides)
        return not is_other_work(self.program) and (is_verl_program or (len(overrides) > 2 and of_verl))

    @property
    def method(self) -> str:
        """Its training method; empty if the program's name has none."""
        if self.is_verl:
            last = self.program.replace("/", ".").removesuffix(".py").rpartition(".")[2]
            return "sft" if "sft" in last else "distillation" if _TEACHING.search(self.program[-200:]) else "grpo"
        return method_of(self.program.rpartition(".")[2] if self.is_module else self.program)


def is_other_work(program: str) -> bool:
    """True if a program prepares, generates, converts or serves, as its name says.

    >>> is_other_work("verl.trainer.main_generation"), is_other_work("scripts/preprocess_all.py"), is_other_work("a.py")
    (True, True, False)
    """
    # Only its last part counts, and only so much of it that no text takes long.
    last = re.split(r"[./]", program.removesuffix(".py"))[-1][-200:]
    return _OTHER_WORK.search(last) is not None


def launch_of(call: Call) -> Launch | None:
    """The program that a call starts; None if it starts none that is known."""
    launch = _launch_of(call)
    return replace(launch, variables=call.variables) if launch else None


def _launch_of(call: Call) -> Launch | None:
    if not call.words:
        return None
    name, words = call.words[0], list(call.words[1:])
    if name == "trl":
        if not words or words[0].startswith("-"):
            return None
        config = word_after(words, "--accelerate_config")
        return Launch(words[0], True, tuple(words[1:]), call.folder, _processes(words), config)
    if name == "accelerate":
        if words[:1] != ["launch"]:
            return None
        words = words[1:]
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words):
            launcher_words, module, rest = words[:at], words[at + 1], words[at + 2 :]
            return Launch(
                module,
                True,
                tuple(rest),
                call.folder,
                _processes(launcher_words),
                word_after(launcher_words, "--config_file"),
            )
        if word.endswith(".py"):
            launcher_words, rest = words[:at], words[at + 1 :]
            return Launch(
                word,
                False,
                tuple(rest),
                call.folder,
                _processes(launcher_words),
                word_after(launcher_words, "--config_file"),
            )
    return None


def word_after(words: Sequence[str], name: str) -> str:
    """The value of an option, as `name value` or `name=value`; empty if it is not given."""
    for at, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and at + 1 < len(words):
            return words[at + 1]
    return ""


def _processes(words: list[str]) -> int | None:
    """Processes on all nodes. accelerate counts those of all machines, torchrun those of one."""
    count = next((number_of(value) for name in _PROCESSES if (value := word_after(words, name))), None)
    if count is None or not 1 <= count <= 100_000:
        return None
    nodes = next((number_of(value) for name in _NODES if (value := word_after(words, name))), None)
    of_all = word_after(words, "--num_processes") or word_after(words, "--num-processes")
    return int(count) * (1 if of_all or not nodes or not 1 <= nodes <= 10_000 else int(nodes))


def overrides_of(words: tuple[str, ...]) -> dict[str, Any]:
    """Dotted key → value of Hydra's overrides; the last one counts. A key that is deleted (`~key`) is absent."""
    values: dict[str, Any] = {}
    deleted: set[str] = set()
    for word in reversed(words):
        match = OVERRIDE.fullmatch(word)
        if match is None or word.startswith("--"):
            continue
        key, text = match["key"], match["value"]
        if match["operator"] == "~":
            deleted.add(key)
        elif text is not None:
            for name, value in flattened(key, _value(key, text)).items():
                parts = name.split(".")[:DEEPEST]
                is_deleted = any(".".join(parts[:end]) in deleted for end in range(1, len(parts) + 1))
                if name not in values and not is_deleted:
                    values[name] = value
    return dict(reversed(values.items()))


def _value(key: str, text: str) -> Any:
    if is_unknown(text):
        return Unresolved(text)
    if key.endswith("_threshold") and re.fullmatch(r"[\d.]+_[\d.]+", text):
        return text  # bounds: Hydra would read 0.5_2 as 0.52
    try:
        return hydra_value(text)
    except HydraError as error:
        return Unresolved(f"{text} (Hydra refuses it: {error})")


def flattened(key: str, value: Any) -> dict[str, Any]:
    """A table's values by dotted keys; what is no table as it is. A list of lists or tables is not known."""
    if isinstance(value, dict) and value:
        return {name: inner for last, item in value.items() for name, inner in flattened(f"{key}.{last}", item).items()}
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return {key: Unresolved("a list of lists or tables")}
    if isinstance(value, str) and value.startswith("${"):
        return {key: Unresolved(value)}
    return {key: value}


def options_of(words: tuple[str, ...]) -> dict[str, Any]:
    """`--name value …` of a command line of TRL: name → value. A name without a value is true, `--no_name` false."""
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values |= _named(name, value) if equals else {name: True}
            if not equals and name.startswith("no_"):
                values[name.removeprefix("no_")] = False
                del values[name]
        elif name:
            previous = values.pop(name, True)
            values |= _named(name, word) if previous is True else {name: [*_as_list(previous), _scalar(word)]}
    return values


def _named(name: str, text: str) -> dict[str, Any]:
    """A value by its name; the values of a JSON table by dotted names."""
    if text.startswith("{"):
        try:
            return flattened(name, parse_json(text))
        except ValueError:
            return {name: Unresolved(text)}
    return {name: _scalar(text)}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _scalar(text: str) -> Any:
    if is_unknown(text):
        return Unresolved(text)
    return text if text.startswith("[") else scalar(text)
