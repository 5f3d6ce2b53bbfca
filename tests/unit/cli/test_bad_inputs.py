"""Invalid inputs: one line that names the error and the fix, and exit code 2."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from rlcli_planner.model_shape import read_shape
from rlcli_sandbox.machine_check import check_sandbox

from rlcli.cli.main import main
from rlcli.cluster.ray_session import check_local
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import ConfigError, DataError, ModelError, SetupError, VerifierError
from rlcli.launch.machine_checks import Status
from rlcli.model.io.model_checks import check_model
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.rewards.expression import parse
from rlcli.rewards.processes.fork_server import ForkServer
from rlcli.runs.folder import RunFolder


def error_of(capsys: pytest.CaptureFixture[str], *words: str, expect: int = 2) -> str:
    """The last line that the command prints to standard error."""
    code = main(words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == expect, last
    return last


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_attention_heads", 0), ("num_key_value_heads", 0), ("hidden_size", 0), ("num_attention_heads", -2)],
)
def test_a_size_that_no_model_has_is_named(name: str, value: int, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (check_model, read_shape):
        with pytest.raises(ModelError, match=f"config.json has {name} = {value}, and a model needs 1 or more; use the"):
            read(str(tmp_path))  # type: ignore[operator]


def not_utf8(rows: int, bad: int) -> Any:
    texts = pyarrow.array([b"\xff" if number == bad else b"1" for number in range(rows)], type=pyarrow.binary())
    return pyarrow.StringArray.from_buffers(rows, *texts.buffers()[1:])


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model", "extra_info"])
def test_text_that_is_not_utf8_is_named_with_its_row(column: str, tmp_path: Path) -> None:
    file, texts = tmp_path / "train.parquet", not_utf8(5, bad=3)
    messages = [{"role": "user", "content": "1"}]
    write_rows(file, [row(data_source="toy", messages=messages, verifier="gsm8k", ground_truth="1")] * 5)
    table = pyarrow.parquet.read_table(file)
    roles = pyarrow.array(["user"] * 5)
    chats = pyarrow.StructArray.from_arrays([roles, texts], ["role", "content"])
    invalid = {
        "data_source": texts,
        "prompt": pyarrow.ListArray.from_arrays(pyarrow.array(range(6), type=pyarrow.int32()), chats),
        "reward_model": pyarrow.StructArray.from_arrays([roles, texts], ["style", "ground_truth"]),
        "extra_info": pyarrow.StructArray.from_arrays([texts], ["note"]),
    }[column]
    remaining = table.drop_columns([column]) if column in table.column_names else table
    pyarrow.parquet.write_table(remaining.append_column(column, invalid), file)
    with pytest.raises(DataError, match=rf"parquet, row 3 \(the first is 0\): '{column}' holds text that is not UTF-8"):
        read_prompts(file, "train")


@pytest.mark.parametrize("command", [["eval"], ["prep", "filter", "--out", "kept"]])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workers", "2"], "--workers = 2: a served model needs none"),
        (["--set", "environment.name=countdown"], "conversations are held with a model that is loaded here"),
    ],
)
def test_what_a_served_model_does_not_have_is_refused(
    command: list[str], words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "1"}]
    file = tmp_path / "train.parquet"
    write_rows(file, [row(data_source="toy", messages=messages, verifier="gsm8k", ground_truth="1")])
    arguments = [*command, "--data", str(file), "--endpoint", "http://127.0.0.1:9/v1", *words]
    assert says in error_of(capsys, *arguments)


@pytest.mark.parametrize("json_words", [[], ["--json"]])
def test_each_binary_file_of_a_run_is_named_in_one_line(
    json_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.create(tmp_path / "run"):
        pass
    for name in ("config.toml", "events.jsonl", "metrics.jsonl", "environment.json", "evaluations/step-000001.json"):
        (tmp_path / "run" / name).write_bytes(b"\xff\xfe\x00" * 100)
    assert main(["runs", "show", str(tmp_path / "run"), *json_words]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "warning: metrics.jsonl: the last line is incomplete and left out",
        "warning: events.jsonl: the last line is incomplete and left out",
        "warning: config.toml cannot be read: it is not text in UTF-8",
        "warning: evaluations/step-000001.json cannot be read",
    ]


BINARY = b"\xff\xfe\x00" * 100


@pytest.mark.parametrize("json_words", [[], ["--json"]])
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.toml", BINARY, "config.toml cannot be read: it is not text in UTF-8"),
        ("config.toml", b"[train]\nsteps = ", "config.toml cannot be read: it is not TOML: Invalid value"),
        ("metrics.jsonl", BINARY + b"\n", "metrics.jsonl: 1 line is damaged and left out"),
        ("metrics.jsonl", b'{"step": 1}\n{"ste', "metrics.jsonl: the last line is incomplete and left out"),
        ("events.jsonl", BINARY + b"\n", "events.jsonl: 1 line is damaged and left out"),
    ],
)
def test_one_file_of_a_run_that_cannot_be_read_is_named(
    name: str, content: bytes, says: str, json_words: list[str], tmp_path: Path, capsys: Any
) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config('[recipe]\nname = "grpo"\n')
    (tmp_path / "run" / name).write_bytes(content)
    for command in ("show", "signals"):
        assert main(["runs", command, str(tmp_path / "run"), *json_words]) == 0
        (warning,) = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: {says}")
    assert main(["runs", "list", str(tmp_path)]) == 0  # other runs are still listed


def test_chat_names_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    from rlcli.cli.chat import model_source

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(ConfigError, match="run is a run without a checkpoint; name a model, or a run that has saved"):
        model_source(str(tmp_path / "run"))


def test_a_run_without_its_configuration_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 0.5}\n')
    for words in (["show"], ["signals"], ["compare", str(tmp_path / "run")]):
        assert main(["runs", *words, str(tmp_path / "run")]) == 0
        shown = capsys.readouterr()
        assert "config.toml cannot be read: No such file or directory" in shown.out + shown.err
    assert main(["runs", "resume", str(tmp_path / "run")]) == 2
    assert "is not a run: it has no config.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 3, "reward/mean": []}\n'),
        ("metrics.jsonl", '{"step": 3, "reward/mean": 0.5}\n{"step": 4, "rew'),
        ("metrics.jsonl", '{"step": 3}\n[1]\n{"step": "x"}\n{"step": NaN}\n{"step": 1e400}\n' + "[" * 100_000),
        ("events.jsonl", '{"time": "x", "event": 7}\n'),
        ("events.jsonl", '{"time": 1e300}\n[1]\nnull\n{"time": 1.0, "ev'),
        ("environment.json", '{"star'),
        ("evaluations/step-000001.json", '{"pass": 1}'),
        ("evaluations/step-000001.json", "[" * 100_000),
    ],
)
def test_damaged_lines_of_a_run_are_left_out(name: str, content: str, tmp_path: Path, capsys: Any) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config('[recipe]\nname = "grpo"\n')
    (tmp_path / "run" / name).write_text(content)
    for words in (["show", str(tmp_path / "run")], ["show", str(tmp_path / "run"), "--json"], ["list", str(tmp_path)]):
        assert main(["runs", *words]) == 0, capsys.readouterr().err
    if name == "metrics.jsonl":
        capsys.readouterr()
        main(["runs", "show", str(tmp_path / "run"), "--json"])
        assert json.loads(capsys.readouterr().out)["step"] == 3


@pytest.mark.parametrize("home", ["/sys", "/proc", "a_file", "a_file/below"])
def test_a_home_folder_that_cannot_be_written_is_named(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))  # an absolute path replaces tmp_path
    with pytest.raises(SetupError, match=r"the home folder .* cannot be written to: .*; .*HOME=/some/folder"):
        check_local()


def test_too_little_shared_memory_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, used=0, free=64 << 20))
    with pytest.raises(SetupError, match=r"/dev/shm has 64 MiB free, the run needs 256; .*docker run --shm-size=2g"):
        check_local()


def test_a_home_folder_that_is_not_there_yet_is_none_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "new" / "home"))
    check_local()


def test_an_upper_case_recipe_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no recipe is called 'GRPO'; did you mean grpo?" in error_of(capsys, "train", "GRPO", "--model", "m")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nsteps = " + "9" * 5000, "is not TOML: Exceeds the limit (4300 digits)"),
        ("x = " + "[" * 3000 + "]" * 3000, "is not TOML: it is nested too deeply"),
        ('[recipe]\nbase = "a\\u0000b.toml"', "is not a path: it holds a NUL character"),
        ('[critic]\npath = "a\\u0000b"', r"critic.path = 'a\x00b' (recipe mine) must be text without NUL characters"),
    ],
)
def test_a_recipe_that_is_none_is_named(text: str, says: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.toml").write_text(text)
    error = error_of(capsys, "plan", str(tmp_path / "mine.toml"), "--model", "m")
    assert says in error
    assert "--debug" not in error


@pytest.mark.parametrize(
    "words", [("recipes", "show", "{}.toml"), ("runs", "show", "{}"), ("export", "{}", "--out", "o")]
)
def test_a_circle_of_links_and_a_name_too_long_are_named(words: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "circle.toml").symlink_to("circle.toml")
    for name, says in ((f"{tmp_path}/circle", r"(?i)circle|link"), (f"{tmp_path}/{'x' * 5000}", "File name too long")):
        error = error_of(capsys, *(word.format(name) for word in words))
        assert re.search(says, error)
        assert "--debug" not in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "train.seed=" + "9" * 5000), "must be a whole number"),
        (("--set", "model.path=\udc80"), r"model.path = '\udc80' (--set) must be text in UTF-8"),
        (("--model", "\udcff"), r"model.path = '\udcff' (flag --model) must be text in UTF-8"),
        (("--model", "x" * 5000), "File name too long; give another path"),
    ],
)
def test_values_that_nothing_can_hold_are_named(words: tuple[str, ...], says: str, capsys: Any) -> None:
    error = error_of(capsys, "plan", "grpo", *words)
    assert says in error
    assert "--debug" not in error


def test_a_folder_in_the_place_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").mkdir()
    with pytest.raises(DataError, match=r"has no train\.parquet \(it has a folder of that name\)"):
        read_prompts(tmp_path, "train")


def test_a_config_json_that_no_model_has_is_named(model: Path, tmp_path: Path, capsys: Any) -> None:
    config = json.loads((model / "config.json").read_text()) | {"hidden_size": 10**30}
    for text, says in (
        (json.dumps(config), "hidden_size = 1e+30, which is too large"),
        ("[" * 100_000, "does not load"),
    ):
        (tmp_path / "config.json").write_text(text)
        error = error_of(capsys, "plan", "grpo", "--model", str(tmp_path))
        assert says in error
        assert "--debug" not in error


@pytest.mark.parametrize("deadline", ["inf", "nan", "1e9", "0"])
def test_a_deadline_that_is_none_is_refused(deadline: str, capsys: Any) -> None:
    for command in ("run", "audit"):
        error = error_of(capsys, "verifiers", command, "gsm8k", "--deadline", deadline)
        assert "Invalid value for '--deadline'" in error


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"completion": "#### 42", "ground_truth": "42"}\n')
    return file


def test_an_unknown_sandbox_is_named(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "verifiers", "run", "gsm8k", "--input", str(rows), "--sandbox", "chess")
    assert "no sandbox is called 'chess'; use auto, bwrap" in error


@pytest.mark.parametrize("name", ["BWRAP", "auto ", "bwrap,landlock", "http:/host", "ftp://host", "\udc80"])
def test_other_names_of_sandboxes_are_refused_wherever_they_stand(
    name: str, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("verifiers", "run", "gsm8k", "--input", str(rows))  # a verifier that needs no sandbox
    assert f"error: no sandbox is called {name!r}; use auto, bwrap" in error_of(capsys, *words, "--sandbox", name)
    monkeypatch.setenv("RLCLI_SANDBOX", name)
    assert f"error: RLCLI_SANDBOX: no sandbox is called {name!r}; use" in error_of(capsys, *words)
    with pytest.raises(SetupError, match="RLCLI_SANDBOX: no sandbox is called"):
        ForkServer()
    check = check_sandbox()
    assert (check.status, check.detail) == (Status.FAIL, f"RLCLI_SANDBOX: no sandbox is called {name!r}")


def test_an_output_never_replaces_its_input(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = rows.read_text()
    (rows.parent / "link.jsonl").symlink_to(rows)
    os.link(rows, rows.parent / "hard.jsonl")
    for name in ("rows.jsonl", "./rows.jsonl", "link.jsonl", "hard.jsonl"):
        output = f"{rows.parent}/{name}"
        error = error_of(capsys, "verifiers", "run", "gsm8k", "--input", str(rows), "--output", output)
        assert f"--output {output} is the file of --input" in error
    assert rows.read_text() == content


@pytest.mark.long
def test_a_file_of_which_no_row_is_verified_fails(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier, scored = rows.parent / "mine.py", rows.parent / "scored.jsonl"
    verifier.write_text("def verify(request):\n    raise ValueError('boom')\n")
    words = ("verifiers", "run", f"{verifier}:verify", "--input", str(rows), "--output", str(scored))
    error = error_of(capsys, *words)
    assert f"ValueError: boom ({verifier}, line 2, in verify: raise ValueError('boom')); the response: " in error
    assert not scored.exists()
    rows.write_text(rows.read_text() + '{"completion": "", "ground_truth": "0"}\n')
    half = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / int(ground_truth)\n"
    (rows.parent / "half.py").write_text(half)
    assert main(["verifiers", "run", f"{rows.parent / 'half.py'}:compute_score", "--input", str(rows)]) == 0


def rlcli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlcli.cli.main", *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, encoding="utf-8", check=False)


@pytest.mark.long
def test_the_c_locale_is_no_obstacle(rows: Path) -> None:
    rows.write_text(json.dumps({"completion": "#### é", "ground_truth": "×"}, ensure_ascii=False), encoding="utf-8")
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    completed = rlcli("verifiers", "list", **c_locale)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "…" in completed.stdout
    completed = rlcli("verifiers", "show", "×", **c_locale)
    assert completed.returncode == 2
    assert "no verifier is called" in completed.stderr


@pytest.mark.long
def test_the_c_locale_reads_and_writes_every_character(tmp_path: Path, model: Path) -> None:
    """Characters in data, in a path and in a configuration: one process for each."""
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    file = tmp_path / "é×.jsonl"
    file.write_text('{"completion": "\\boxed{é}", "ground_truth": "é"}\n', encoding="utf-8")
    scored = tmp_path / "ß.jsonl"
    completed = rlcli("verifiers", "run", "exact", "--input", str(file), "--output", str(scored), "--json", **c_locale)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["input"] == str(file)
    assert "é" in scored.read_text(encoding="utf-8")
    recipe = tmp_path / "größe.toml"
    recipe.write_text('[recipe]\nbase = "grpo"\nsummary = "größer"\n[data]\npath = "é"\n', encoding="utf-8")
    completed = rlcli("recipes", "show", str(recipe), **c_locale)
    assert completed.returncode == 0, completed.stderr
    assert 'path = "é"' in completed.stdout
    completed = rlcli("plan", str(recipe), "--model", str(model), "--set", "model.path=ü", **c_locale)
    assert completed.returncode == 2
    assert "model.path = 'ü'" in completed.stderr


def test_an_interrupt_while_commands_are_imported_is_one_word() -> None:
    code = (
        "import builtins, signal, sys\n"
        "from rlcli.cli.main import main\n"
        # A shell without job control starts background processes with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "before = builtins.__import__\n"
        "def interrupted(name, *rest, **options):\n"
        "    if name == 'typer':\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    return before(name, *rest, **options)\n"
        "builtins.__import__ = interrupted\n"
        "sys.exit(main(['--help']))\n"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout, completed.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import time; time.sleep(600)", "did not answer for 3 s"),
        ("import os; os._exit(3)", r"ended \(exit status 3\)"),
    ],
)
def test_an_import_that_hangs_or_exits_names_the_file(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in code:  # the import that exits does so at once, however busy the machine is
        monkeypatch.setattr("rlcli.rewards.processes.fork_server.ANSWER_TIMEOUT_S", 3.0)
    monkeypatch.setattr("rlcli.rewards.processes.fork_server._CLOSE_TIMEOUT_S", 0.5)
    (tmp_path / "mine.py").write_text(code)
    with (
        contextlib.closing(ForkServer()) as fork_server,
        pytest.raises(VerifierError, match=rf"{says}.*/mine\.py for the"),
    ):
        fork_server.load(parse(f"{tmp_path}/mine.py:verify"))
