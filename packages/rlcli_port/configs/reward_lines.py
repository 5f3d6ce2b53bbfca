"""Report lines for a TRL trainer's arguments other than its configuration: reward functions as `verifier.name`, and
data as a command that prepares it."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from rlcli_port.configs.foreign_config import Configuration, DataSet, RewardFunction
from rlcli_port.configs.key_report import Line, Reading, Unresolved, number_of
from rlcli_port.configs.lifting import lift

KNOWN = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": "format",
}
"""Functions of trl.rewards → verifiers that score the same."""
PLAIN_PATH = re.compile(r"[\w./@-]+")
"""A path that an expression of verifiers holds without quotes."""
VERIFIER = "verifier.name"


@dataclass
class Functions:
    """The reward functions of a script, as they can be named."""

    text: str = ""
    """The source of a file with the script's own functions; empty if it has none that can be copied."""
    terms: list[str] = field(default_factory=list)
    """Terms of an expression of verifiers."""
    weights_known: bool = True
    """True if the script gives a number for each of them, or no weights."""
    notes: list[str] = field(default_factory=list)
    """Notes on functions without a term, and on terms that replace a function."""
    columns: list[str] = field(default_factory=list)
    """Columns of the data that they ask for."""


def functions_of(configuration: Configuration, file: Path) -> Functions:
    """The reward functions of a configuration. file: where the script's own functions will be written."""
    functions = Functions()
    in_script = [function for function in configuration.rewards if function.in_script and not function.bound]
    script = configuration.script
    lifted = lift(
        configuration.script_text,
        [(function.name, function.line) for function in in_script],
        script.name if script else "",
    )
    functions.text = lifted.text
    weights = configuration.values.get("reward_weights")
    is_known = weights is None or (
        isinstance(weights, list) and None not in map(number_of, weights) and len(weights) == len(configuration.rewards)
    )
    functions.weights_known = is_known
    for at, reward in enumerate(configuration.rewards):
        weight = number_of(weights[at]) if isinstance(weights, list) and at < len(weights) else None
        term, note = _term(reward, lifted.functions, lifted.problems, file)
        if term:
            functions.terms.append(term if weight in (None, 1) else f"{weight} * {term}")
            functions.columns += lifted.columns.get(reward.name, []) if reward.in_script else []
        if note:
            functions.notes.append(note)
    functions.columns = list(dict.fromkeys(functions.columns))
    return functions


def _term(reward: RewardFunction, copied: list[str], problems: dict[str, str], file: Path) -> tuple[str, str]:
    """A term for the function, and a note; one of them may be empty."""
    if reward.bound:
        return "", f"partial({reward.name}, {reward.bound}): define a function that passes these arguments, and name it"
    if reward.in_script:
        if reward.name in copied:
            return f"{_quoted(file)}:{reward.name}", ""
        return "", f"{reward.name} cannot be copied: {problems.get(reward.name, 'no definition')}"
    if reward.file is not None:
        return f"{_quoted(_relative(reward.file))}:{reward.name}", ""
    module, _, name = reward.name.rpartition(".")
    if module.startswith("trl.rewards") and name in KNOWN:
        return KNOWN[name], f"{name} of trl: {KNOWN[name]}"
    if module and re.fullmatch(r"[\w.]+", reward.name):
        return "", f"{reward.name}: --verifier {module}:{name}, where that package is installed"
    shown = reward.name or "a function that the script makes"
    return "", f"{shown}: a model as reward: --verifier 'served_reward_model(serve=\"…\")'"


def _quoted(path: Path) -> str:
    return str(path) if PLAIN_PATH.fullmatch(str(path)) else f"'{path}'"


def _relative(path: Path) -> Path:
    relative = Path(os.path.relpath(path))
    return path if relative.parts[:1] == ("..",) else relative


def add_rewards(read: Reading, functions: Functions, is_written: bool) -> None:
    """Report the reward functions, and set `verifier.name`. is_written: whether the file with the script's own
    functions will be there; else the line says what to give."""
    note = "; ".join(functions.notes)
    if not functions.weights_known:
        weights = read.foreign.get("reward_weights")
        shown = weights.text if isinstance(weights, Unresolved) else weights
        note_text = "the terms of verifier.name have the weight 1 where none is known: put a number before each"
        read.lines.append(Line("unresolved", "reward_weights", shown, note=note_text))
        read.skip("reward_weights")
    also = ["reward_weights"] if functions.weights_known else []
    expression = " + ".join(functions.terms)
    if expression and (is_written or not functions.text):
        read.map("reward_funcs", VERIFIER, expression, note, also)
    elif expression:
        note_text = f"--out FILE.toml also writes the script's functions into a file, for: --verifier '{expression}'"
        read.lines.append(Line("unresolved", "reward_funcs", None, note="; ".join([note_text, *functions.notes])))
        read.skip("reward_funcs", "reward_weights")
    else:
        read.lines.append(Line("missing", "reward_funcs", None, note=note))
        read.skip("reward_funcs", "reward_weights")


def add_data(read: Reading, data: DataSet | None, columns: list[str]) -> None:
    """Report how to get the training data. columns: those that reward functions ask for."""
    if data is not None:
        steps = f"; the script passes the rows through {', '.join(data.steps)}: do the same first" if data.steps else ""
        shown = f"{data.loader}({', '.join(word for word in (data.source, data.subset, data.split) if word)})"
        read.lines.append(Line("unresolved", "train_dataset", shown, note=prep_command(data, columns) + steps))
        return
    source = read.foreign.get("dataset_name")
    if isinstance(source, str) and source:
        subset = read.foreign.get("dataset_config")
        data_set = DataSet(source, "load_dataset", subset if isinstance(subset, str) else "")
        read.lines.append(Line("unresolved", "dataset_name", source, note=prep_command(data_set, columns)))
        read.skip("dataset_name", "dataset_config")


def prep_command(data: DataSet, columns: list[str]) -> str:
    """The commands that prepare the data and name it.

    >>> prep_command(DataSet("openai/gsm8k", "load_dataset", "main"), ["answer"])
    'rlcli prep hf --source openai/gsm8k --subset main --columns prompt=…,answer=answer --out data/gsm8k, then --data \
data/gsm8k'
    """
    if not data.source:
        return (
            "write the rows to a JSONL file, then rlcli prep jsonl --source FILE --out data/mine, then --data data/mine"
        )
    local = data.loader == "load_from_disk" or data.source.startswith((".", "/", "~"))
    local = local or Path(data.source).suffix in (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
    name = re.sub(r"[^\w.-]+", "-", Path(data.source).name.split(".")[0]).strip("-") or "mine"
    answer = next((column for column in columns if column in ("answer", "solution", "ground_truth", "label")), "…")
    words = ["rlcli prep", "jsonl" if local else "hf", "--source", shlex.quote(data.source)]
    words += ["--subset", shlex.quote(data.subset)] if data.subset and not local else []
    words += ["--columns", f"prompt=…,answer={answer}", "--out", f"data/{name}"]
    return f"{' '.join(words)}, then --data data/{name}"


def reward_file_name(out: Path | None, source: Path) -> Path:
    """The path of the file with a script's functions: in the recipe's folder."""
    stem = re.sub(r"[^\w-]+", "_", source.stem, flags=re.ASCII).strip("_") or "script"
    return (out.parent if out else Path()) / f"{out.stem if out else stem}_rewards.py"
