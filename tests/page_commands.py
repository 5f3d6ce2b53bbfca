"""The commands that the documentation shows, and what is wrong with one: nothing of them is run here.

A line in a `bash` block is a command, and so is code in a sentence that begins with `rlcli`. `…` and words in capitals
stand for something.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer import TyperException

from rlcli.algorithms.build import build_algorithm
from rlcli.config.keys import find_key, sections, unknown_key
from rlcli.config.load import resolve
from rlcli.config.recipes import names as recipe_names
from rlcli.errors import RlcliError

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *(ROOT / folder / "README.md" for folder in ("recipes", "verifiers", "environments", "data_prep")),
]
NOT_RUN = {
    "rlcli doctor": "imports all that it checks: tests/unit/launch/test_doctor.py",
    "rlcli engines *": "needs a run with servers: tests/unit/cli/test_cli_engines.py",
    "rlcli *roman*": "trains as it is written: tests/integration/test_your_own_task.py",
    "rlcli quickstart*": "trains for minutes: tests/integration/test_quickstart.py",
    "rlcli tiny-model * --warm *": "trains for a minute: tests/unit/packages/quickstart/test_warm_start.py",
    "rlcli train *reward_model(path=*": "loads torch twice: tests/unit/verifiers/test_verifier_reward_model.py",
    "rlcli train *(serve=*": "starts a server of a model: tests/integration/test_judge.py",
    "rlcli train *rollout.servers_folder=*": "uses servers of engines: tests/integration/test_servers.py",
    "rlcli train *teacher.path=http*": "asks a server: tests/integration/test_teacher_servers.py",
    "rlcli train * --ray-address *": "needs a Ray cluster of several machines",
    "rlcli view *": "serves until it is ended: tests/unit/packages/inspect/test_server.py",
    "scripts/*": "installs or measures; its options are looked up in it",
    "python make_rows.py": "a block of the page: tests/integration/test_your_own_task.py",
    "python scripts/*": "measures; its options are looked up in it",
    "python3 -m rlcli.cli.main doctor": "as rlcli doctor",
    "echo *": "writes a file that the folder of the tests has",
    "eval *": "sets variables of the reader's shell",
    "hf download *": "downloads",
    "pip install *": "installs",
    "pre-commit *": "installs, or checks the code",
    "python -m pytest *": "runs tests",
    "python -P -m vllm.*": "serves until it is ended",
    "ray start *": "starts a Ray cluster of several machines",
    "source *": "changes the reader's shell",
    "uv *": "installs",
    "vllm serve *": "serves until it is ended",
}
"""Commands in blocks that are checked and not run, and why."""
STANDS_FOR = re.compile(r"…|[A-Z][A-Z_]*(\[.*\])?|\.\.\.")
FENCE = re.compile(r"^([ \t]*)```(\w*)[^\n]*\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)
SEPARATORS = {"&&", "||", ";", "|", "&"}


class Shown(NamedTuple):
    """A command of a page. complete: it is in a block, not in a sentence, which may leave out what is required."""

    page: Path
    words: list[str]
    complete: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {shlex.join(self.words)}"


def shown(page: Path, text: str | None = None) -> Iterator[Shown]:
    """The commands of a page, in order. text: in place of the file's."""
    text = page.read_text(encoding="utf-8") if text is None else text
    for _, language, body in FENCE.findall(text):
        for line in body.replace("\\\n", " ").splitlines() if language == "bash" else ():
            yield from (Shown(page, words, True) for words in simple_commands(line))
    for code in re.findall(r"`(rlcli [^`]+)`", FENCE.sub("", text)):
        for words in simple_commands(code):
            yield Shown(page, words, False)


def simple_commands(line: str) -> Iterator[list[str]]:
    """Words of each command of a line of shell, without variables set before it and files written by it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            words.append(word)
            continue
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if ">" in words:
            words = words[: words.index(">")]
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]
        words = []


def complaint(command: Shown) -> str:
    """The problem of a command, in one line; empty if there is none."""
    program, *words = command.words
    if program == "rlcli":
        try:
            return _complaint_of_ours(words, command.complete)
        except TyperException as error:
            return error.format_message()
        except RlcliError as error:
            return str(error)
    if program == "python" and words and words[0].startswith("scripts/"):
        program, *words = words
    if program.startswith("scripts/"):
        return _complaint_of_script(program, words)
    known = {pattern.partition(" ")[0] for pattern in NOT_RUN}
    return "" if program in known else f"'{program}' is not among the programs that pages may name"


def _complaint_of_script(name: str, words: list[str]) -> str:
    """A script names its options itself, or a package of its name does: `scripts/_gpu_check` of `scripts/gpu-check`."""
    script = ROOT / name
    if not script.is_file():
        return f"there is no {name}"
    package = script.with_name("_" + script.name.replace("-", "_"))
    text = "".join(file.read_text(encoding="utf-8") for file in (script, *package.glob("*.py")))
    options = [word for word in words if word.startswith("--") and not re.search(rf"{word}(?![\w-])", text)]
    return f"{name} has no option {options[0]}" if options else ""


def not_run(command: Shown) -> str:
    """The pattern of `NOT_RUN` that the command matches; empty if it is to be run."""
    line = " ".join(command.words)
    return next((pattern for pattern in NOT_RUN if fnmatchcase(line, pattern)), "")


def _complaint_of_ours(words: list[str], complete: bool) -> str:
    if words and words[-1] == "…" and (len(words) < 2 or not words[-2].startswith("-")):
        words = words[:-1]
    name, options = parsed(words, complete)
    return next((complaint for check in CHECKS if (complaint := check(name, options))), "")


def parsed(words: list[str], complete: bool) -> tuple[str, dict[str, Any]]:
    """The command that the words call, as `eval compare`, and its parameters. Raises `TyperException` for what the
    command line would refuse: an unknown command or option, a value of another type; if complete, a missing one."""
    from rlcli.cli.app import app

    path: list[str] = []
    command: Any = typer.main.get_command(app)
    context = None
    words = [word for word in words if word not in ("--help", "-h")]  # added while it is parsed, and acts at once
    while True:
        if getattr(command, "commands", None) and not words:
            return " ".join(path), {}
        context = _context(command, path[-1] if path else "rlcli", words, context, complete)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not getattr(command, "commands", None) or not rest:
            return " ".join(path), context.params
        name, command, words = command.resolve_command(context, rest)
        path.append(name)


def _context(command: Any, name: str, words: list[str], parent: Any, complete: bool) -> Any:
    for option in command.params:
        option.callback = None  # `--version` would print and `--install-completion` write files while they are parsed
    try:
        return command.make_context(name, list(words), parent=parent)
    except TyperException as error:
        if complete:
            raise
        if "requires an argument" in error.format_message():  # `rlcli train --resume`
            return _context(command, name, [*words, "…"], parent, complete)
        if not error.format_message().startswith("Missing"):
            raise
        return command.make_context(name, list(words), parent=parent, resilient_parsing=True)


def _stands_for(text: Any) -> bool:
    return not isinstance(text, str) or not text or bool(STANDS_FOR.fullmatch(text)) or "…" in text


def _recipe(name: str, options: dict[str, Any]) -> str:
    for parameter in ("first", "second") if name == "recipes diff" else ("recipe",):
        recipe = options.get(parameter)
        if not _stands_for(recipe) and not recipe.endswith(".toml") and recipe not in recipe_names():
            return f"there is no recipe '{recipe}'"
    return ""


def _keys(name: str, options: dict[str, Any]) -> str:
    """Keys exist, and the recipe with them is one that a run would accept."""
    sets = [text for text in options.get("sets") or () if not STANDS_FOR.match(text)]
    for text in sets:
        key = text.partition("=")[0].strip()
        if find_key(key) is None:
            raise unknown_key(key)
    key = options.get("key")
    if key and not _stands_for(key) and find_key(key) is None and key not in sections():
        raise unknown_key(key)
    recipe = options.get("recipe")
    code = any(text.startswith("algorithm.code") for text in sets)
    if not _stands_for(recipe) and not recipe.endswith(".toml") and not code:
        flags = {"cluster.workers": options.get("workers"), "verifier.name": options.get("verifier")}
        flags |= {"environment.name": options.get("environment")}
        resolved = resolve(recipe, flags, [text for text in sets if not _stands_for(text.partition("=")[2])])
        if any(text.startswith("algorithm.") for text in sets):
            build_algorithm(**resolved.config.algorithm.model_dump())
    return ""


def _verifier(name: str, options: dict[str, Any]) -> str:
    from rlcli.rewards.expression import AUTO, parse
    from rlcli.rewards.function_adapters import options_of
    from rlcli.rewards.verifier_modules import function_of
    from rlcli.rewards.verifier_registry import VERIFIERS

    text = options.get("verifier") or (options.get("name") if name.startswith("verifiers ") else None)
    if _stands_for(text):
        return ""
    for term in parse(text).terms:
        if term.ref == AUTO or ":" in term.ref:
            continue
        VERIFIERS.get(term.ref)
        known, others = options_of(function_of(term.ref))
        if not others and (unknown := set(term.options) - {*known}):
            return f"{term.ref} has no option {', '.join(sorted(unknown))}"
    return ""


def _registered(parameter: str, commands: tuple[str, ...], group: str) -> Callable[..., str]:
    def check(name: str, options: dict[str, Any]) -> str:
        text = options.get(parameter) if name in commands else None
        plain = not _stands_for(text) and not re.search(r"[:\s/]", text)
        return f"rlcli {name} knows no '{text}'" if plain and text not in _known(group) else ""

    return check


@cache
def _known(group: str) -> set[str]:
    """Names that are installed, and those of the packages that pages show how to make."""
    from importlib.metadata import entry_points

    shown = re.findall(rf'\[project\.entry-points\."{re.escape(group)}"\]\n\s*([\w-]+) =', _all_text())
    return {*(entry.name for entry in entry_points(group=group)), *shown, "auto"}


@cache
def _all_text() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def _gpus(name: str, options: dict[str, Any]) -> str:
    from rlcli_planner.known_devices import parse_gpus

    if not _stands_for(options.get("gpus")):
        parse_gpus(options["gpus"])
    return ""


CHECKS = (
    _recipe,
    _keys,
    _verifier,
    _registered("environment", ("train", "eval"), "rlcli.environments"),
    _registered("name", ("env show", "env try"), "rlcli.environments"),
    _registered("name", ("prep NAME", "prep show"), "rlcli.data_prep"),
    _gpus,
)


def key_complaints(page: Path, text: str | None = None) -> list[str]:
    """Keys in `toml` blocks that are sections of a configuration, and do not exist."""
    text = page.read_text(encoding="utf-8") if text is None else text
    unknown_keys = []
    for _, language, body in FENCE.findall(text):
        tables = tomllib.loads(body) if language == "toml" and "…" not in body else {}
        for section in {*tables} & {*sections()}:
            unknown_keys += [f"{section}.{key}" for key in tables[section] if find_key(f"{section}.{key}") is None]
    return unknown_keys
