"""Code of a recipe's file, of rows and of plug-ins that each command runs: the table of docs/security.md."""

from __future__ import annotations

import re
import select
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlcli.cli.main import main
from rlcli.config.load import resolve
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.errors import ConfigError
from rlcli.launch.recipe_code import refuse_code
from rlcli.model.io.tiny_model import make_tiny_model

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
SECRET = "wJalrXUtnFEMI-never-sent"
ANYTHING = """
open({marker!r}, "a").write("ran ")

def verify(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

class Guess:
    def reset(self, row, seed):
        return [{{"role": "user", "content": "?"}}]

    def step(self, message):
        return [], 0.0, True
"""


class Listener:
    """A loopback port to which nothing may connect."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def had_connection(self) -> bool:
        return bool(select.select([self.socket], [], [], 0)[0])


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    for name in ("AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "RLCLI_ENGINE_KEY"):
        monkeypatch.setenv(name, SECRET)
    server = Listener()
    yield server
    assert not server.had_connection()
    server.socket.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, from an untrusted source: anything.py and the program `anything` create the file `ran`."""
    marker = tmp_path / "ran"
    (tmp_path / "anything.py").write_text(ANYTHING.format(marker=str(marker)))
    (tmp_path / "anything").write_text(f"#!/bin/sh\necho ran >> {marker}\n")
    (tmp_path / "anything").chmod(stat.S_IRWXU)
    data(tmp_path / "data", "math")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data(folder: Path, style: str, **extra: object) -> Path:
    folder.mkdir(exist_ok=True)
    messages = [{"role": "user", "content": "1+1="}]
    rows = [row(data_source="sums", messages=messages, verifier="math", ground_truth="2")] * 3
    rows.append(row(data_source="sums", messages=messages, verifier=style, ground_truth="2", extra_info=extra))
    for split in ("train", "test"):
        write_rows(folder / f"{split}.parquet", rows)
    return folder


SMALL = [
    word
    for key in ("data.max_prompt_tokens=16", "rollout.max_response_tokens=16", "cluster.device=cpu")
    for word in ("--set", key)
]

KINDS = {
    "verifier.name": 'verifier.name = "anything.py:verify"',
    "a verifier of a sum": 'verifier.name = "math + 0.1 * anything:verify"',
    "a judge": "verifier.name = 'judge(url=\"URL\", model=m, key=AWS_SECRET_ACCESS_KEY)'",
    "a reward model": 'verifier.name = "reward_model(path=evil/model)"',
    "a remote sandbox": 'verifier.sandbox = "URL"',
    "no sandbox": 'verifier.sandbox = "unsafe"',
    "an environment's file": 'environment.name = "anything.py:Guess"',
    "an environment's module": 'environment.name = "anything:Guess"',
    "an agent's command": 'environment.name = "./anything now"',
    "an interpreter": 'environment.name = "guess_number"\nenvironment.python = "./anything"',
    "an adapter's option": 'environment.name = "gymnasium"\nenvironment.options.make = "anything:Guess"',
    "an adapter's file": 'environment.name = "verl_tools"\nenvironment.options.config = "tools.yaml"',
    "algorithm.code": 'algorithm.code = "anything.py"',
    "a teacher": 'teacher.path = "URL"',
}
LEFT_ALONE = ("verifier.name", "a verifier of a sum")
"""Kinds that a dry run does not refuse: it does not run the verifier, and reports that."""


@pytest.fixture
def recipe(project: Path, listener: Listener) -> Callable[[str], str]:
    """A function that writes mine.toml, whose base recipe sets the keys of a kind."""

    def write(kind: str) -> str:
        base = "opd" if kind == "a teacher" else "grpo"
        lines = KINDS[kind].replace("URL", listener.url)
        (project / "theirs.toml").write_text(f'{lines}\n[recipe]\nbase = "{base}"\nname = "grpo"\n')
        (project / "mine.toml").write_text('[recipe]\nbase = "theirs.toml"\n')
        return "mine.toml"

    return write


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_commands_that_look_run_nothing_of_a_recipes_file(
    kind: str, recipe: Callable[[str], str], model: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe(kind)
    for words in (["show", file], ["diff", file, "grpo"], ["copy", file, "--out", "copy.toml"]):
        assert main(["recipes", *words]) == 0, capsys.readouterr().err
    capsys.readouterr()
    arguments = ["--model", str(model), "--data", str(project / "data")]
    if kind in LEFT_ALONE:
        assert main(["train", file, *arguments, *SMALL, "--dry-run"]) == 0
        stdout = " ".join(capsys.readouterr().out.split())
        assert "a dry run does not run code that only a recipe's file names, a run does; to try it on the" in stdout
        assert "--verifier" in stdout
        assert not (project / "ran").exists()
        return
    for words in (["--dry-run"], ["--dry-run", "--memory", "auto"], ["--dry-run", "--set", "train.steps=3"]):
        assert main(["train", file, *arguments, *words]) == 2
        (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error:")]
        assert "--dry-run neither runs nor asks what only a recipe's file names; if you trust it" in line
        assert KINDS[kind].rpartition("\n")[2].partition(" ")[0] in line
    assert not (project / "ran").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["verifier.name", "a judge", "an agent's command", "algorithm.code"])
def test_a_plan_runs_nothing_of_a_recipes_file(
    kind: str, recipe: Callable[[str], str], model: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--set", "data.max_prompt_tokens=16", "--set", "rollout.max_response_tokens=16"]
    code = main(["plan", recipe(kind), "--model", str(model), "--gpus", "cpu", *small])
    error = capsys.readouterr().err
    assert code == (2 if kind == "algorithm.code" else 0), error
    assert ("rlcli plan neither runs nor asks" in error) == (kind == "algorithm.code")
    assert not (project / "ran").exists()


@pytest.mark.parametrize("words", [["train", "--resume", "run"], ["runs", "resume", "run"]])
def test_a_dry_run_that_resumes_takes_config_toml_as_a_recipes_file(
    words: list[str], recipe: Callable[[str], str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "run").mkdir()
    text = 'algorithm.code = "anything.py"\n[recipe]\nname = "grpo"\n'
    (project / "run" / "config.toml").write_text(text)
    assert main([*words, "--dry-run"]) == 2
    assert 'config.toml: algorithm.code = "anything.py": --dry-run neither' in capsys.readouterr().err
    assert not (project / "ran").exists()


@pytest.mark.long
def test_commands_about_a_run_run_nothing_of_its_configuration(
    saved_runs: Path,
    recipe: Callable[[str], str],
    project: Path,
    listener: Listener,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(saved_runs / "full", project / "run")
    (text,) = {file.read_text() for file in (project / "run").rglob("config.toml")}
    judge = f"anything.py:verify + judge(url='{listener.url}', model=m, key=AWS_SECRET_ACCESS_KEY)"
    hostile = {"verifier.name": judge, "environment.name": "./anything now", "algorithm.code": "anything.py"}
    for key, value in hostile.items():
        section, _, name = key.partition(".")
        head, _, tail = text.partition(f"[{section}]\n")
        line = re.search(rf"^{name} = .*$", tail, re.MULTILINE)
        assert line is not None, key
        text = f'{head}[{section}]\n{tail[: line.start()]}{name} = "{value}"{tail[line.end() :]}'
    file = project / "run" / "config.toml"
    file.write_text(text)
    assert resolve(str(file)).config.algorithm.code == "anything.py"
    commands = [
        ["runs", "show", "run"],
        ["runs", "list"],
        ["runs", "signals", "run"],
        ["report", "run", "--out", "pages"],
        ["export", "run", "--out", "exported"],
        ["recipes", "show", "run/config.toml"],
    ]
    ends = {" ".join(words): main(words) for words in commands}
    assert ends["export run --out exported"] == ends["report run --out pages"] == 0, capsys.readouterr().err
    assert (project / "exported" / "model.safetensors").is_file()
    assert not (project / "ran").exists()


def test_the_words_of_the_refusal_let_it_run(recipe: Callable[[str], str], project: Path) -> None:
    for kind in KINDS:
        file = recipe(kind)
        with pytest.raises(ConfigError) as refused:
            refuse_code(file, {}, [], "--dry-run")
        words = refused.value.hint.partition("command line too: ")[2]
        import shlex

        tokens = shlex.split(words)
        flags = {"--verifier": "verifier.name", "--environment": "environment.name"}
        options = dict(zip(tokens[::2], tokens[1::2], strict=True))
        sets = [value for flag, value in options.items() if flag == "--set"]
        refuse_code(file, {flags[flag]: value for flag, value in options.items() if flag in flags}, sets, "--dry-run")


def test_what_the_command_line_names_and_what_harms_nobody_is_let_through(project: Path) -> None:
    (project / "mine.toml").write_text(
        'verifier.name = "2 * auto + 0.1 * code(timeout_s=3)"\nverifier.sandbox = "landlock"\ntrain.lr = 1e-6\n'
        'environment.name = "guess_number"\nenvironment.options.high = 7\nenvironment.options.kind = "two words"\n'
        'data.path = "data"\nteacher.path = "some/model"\n[recipe]\nbase = "grpo"\n'
    )
    refuse_code("mine.toml", {}, [], "--dry-run")
    (project / "mine.toml").write_text('verifier.name = "anything.py:verify"\n[recipe]\nbase = "grpo"\n')
    refuse_code("mine.toml", {"verifier.name": "anything.py:verify"}, [], "--dry-run")
    refuse_code("mine.toml", {}, ["verifier.name = math"], "--dry-run")
    refuse_code("code-repair", {}, [], "--dry-run")  # a recipe of an installed package
    assert resolve("mine.toml").config.verifier.name == "anything.py:verify"


@pytest.mark.long
def test_a_dry_run_runs_what_the_command_line_names(
    recipe: Callable[[str], str], model: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        recipe("verifier.name"),
        "--model",
        str(model),
        "--data",
        str(project / "data"),
        "--dry-run",
        *SMALL,
    ]
    assert main([*words, "--verifier", "anything.py:verify"]) == 0, capsys.readouterr().err
    assert (project / "ran").exists()


STYLES = {
    "judge(url='URL', model=m, key=AWS_SECRET_ACCESS_KEY)": "it names the verifier judge",
    "math + 0.1 * judge(url='URL', model=m)": "it names the verifier judge",
    "judge(serve='evil/model')": "it names the verifier judge",
    "reward_model(path='evil/model')": "it names the verifier reward_model",
    "code(memory_mb=1000000)": "it sets the option memory_mb of the verifier code (rows may set score)",
    "code(timeout_s=1000000)": "it sets the option timeout_s of the verifier code (rows may set score)",
    "anything.py:verify": "it names code in a file as its verifier: anything.py:verify",
    "anything:verify": "it names code in a module as its verifier: anything:verify",
}


@pytest.mark.parametrize("style", STYLES)
def test_a_row_that_chooses_too_much_is_refused_by_every_command(
    style: str, model: Path, project: Path, listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = str(data(project / "theirs", style.replace("URL", listener.url)))
    commands = [
        ["train", "grpo", "--model", str(model), "--data", rows, "--dry-run"],
        ["train", "grpo", "--model", str(model), "--data", rows, "--verifier", "auto + 0.1 * format", "--dry-run"],
        ["train", "grpo", "--model", str(model), "--data", "data", "--eval-data", rows, "--dry-run"],
        ["plan", "grpo", "--model", str(model), "--data", rows, "--gpus", "cpu"],
        ["eval", "--endpoint", listener.url, "--data", rows],
        ["verifiers", "audit", "auto", "--data", rows],
    ]
    for words in commands:
        assert main(words) == 2, words
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"row 3 (the first is 0): 'reward_model.style' is {style.replace('URL', listener.url)!r}"[:150] in error
        assert STYLES[style] in error
        assert "rows may not choose that; if you trust it, give --verifier " in error
        assert SECRET not in error
    assert not (project / "ran").exists()


def test_rows_of_a_file_that_name_very_many_verifiers_are_refused(project: Path) -> None:
    from rlcli.data.prompts.prompt_table import MOST_VERIFIERS, read_prompts
    from rlcli.errors import DataError

    messages = [{"role": "user", "content": "1+1="}]
    rows = [
        row(data_source="a", messages=messages, verifier=f"length(target={1 + number})", ground_truth="2")
        for number in range(MOST_VERIFIERS + 1)
    ]
    write_rows(project / "many.parquet", rows)
    with pytest.raises(DataError, match=rf"row {MOST_VERIFIERS} .* rows name more than {MOST_VERIFIERS} different"):
        read_prompts(project / "many.parquet", "train")
    write_rows(project / "many.parquet", rows[:-1])
    assert len(read_prompts(project / "many.parquet", "train").verifiers()) == MOST_VERIFIERS


def test_the_page_names_each_command_that_there_is() -> None:
    from typer.main import get_command

    from rlcli.cli.app import app

    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| command |") : text.index("A real run of a recipe")]
    first = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    documented = {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}
    listed = {word for name in documented for word in re.findall(r"[a-z]+", name.replace("rlcli", ""))}
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    harmless = {"compare", "doctor", "engines", "quickstart", "real-model", "tiny-model", "config", "env", "verifiers"}
    assert commands - listed <= harmless, commands - listed
