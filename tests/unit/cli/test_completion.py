"""Shell completion, requested as bash requests it."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.cli import completion
from tests.shown_runs import make_run

HEAVY = ["torch", "ray", "transformers", "vllm", "datasets", "pyarrow", "numpy", "matplotlib"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_run(tmp_path / "runs" / "grpo-1")
    make_run(tmp_path / "runs" / "sft-1", "sft")
    for folder, file in (("data/sums", "train.parquet"), ("tiny", "config.json")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def completions(line: str, project: Path) -> list[str]:
    """Completions that bash gets for a line with the cursor at its end."""
    words = line.split(" ")
    variables = {"_RLCLI_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code = "from rlcli.cli.main import main; import sys; sys.argv = ['rlcli']; main()"
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.stderr == ""
    return completed.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlcli tr", ["train"]),
        ("rlcli runs s", ["show", "samples"]),
        ("rlcli train gr", ["grpo", "grpo_passk"]),
        ("rlcli train grpo --set train.lr", ["train.lr="]),
        ("rlcli runs show ", ["grpo-1", "sft-1"]),
        ("rlcli verifiers show mult", ["multiple_choice"]),
        ("rlcli prep gsm", ["gsm8k"]),
        ("rlcli env try gue", ["guess_number"]),
        ("rlcli train grpo --environment calc", ["calculator"]),
        ("rlcli train grpo --data d", ["data/sums"]),
    ],
)
def test_a_shell_is_offered_what_fits(line: str, expected: list[str], project: Path) -> None:
    candidates = completions(line, project)
    assert set(expected) <= set(candidates)
    start = line.split(" ")[-1]
    assert all(name.startswith(start) for name in candidates)


@pytest.mark.parametrize(
    ("complete", "incomplete", "wanted"),
    [
        (
            completion.keys,
            "train.schedule=",
            ["train.schedule=constant", "train.schedule=linear", "train.schedule=cosine"],
        ),
        (completion.keys, "data.shuffle=t", ["data.shuffle=true"]),
        (
            completion.keys,
            "rollout.engine=",
            ["rollout.engine=server", "rollout.engine=transformers", "rollout.engine=vllm"],
        ),
        (
            completion.keys,
            "rollout.engi",
            ["rollout.engine=server", "rollout.engine=transformers", "rollout.engine=vllm"],
        ),
        (completion.keys, "environment.name=calc", ["environment.name=calculator"]),
        (completion.keys, "train.lr=", []),
        (completion.key_names, "lora.r", ["lora.rank"]),
        (completion.verifiers, "math + 0.1 * form", ["math + 0.1 * format"]),
        (completion.runs, "runs/s", ["runs/sft-1"]),
        (completion.runs, "gr", ["grpo-1"]),
        (completion.models, "ti", ["tiny"]),
        (completion.models, "gr", ["grpo-1"]),
        (completion.datasets, "data/", ["data/sums"]),
        (completion.converters, "arith", ["arithmetic"]),
    ],
)
def test_candidates_begin_with_what_was_typed(
    complete: completion.Names, incomplete: str, wanted: list[str], project: Path
) -> None:
    assert complete(incomplete) == wanted


@pytest.mark.long
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("rlcli train grpo --set rollout.engine=v", "rollout.engine=vllm "),
        ("rlcli train grpo --set rollout.engi", "rollout.engine="),
        ("rlcli train grpo --set train.lr=1 --set train.schedule=li", "train.lr=1 --set train.schedule=linear "),
        ("rlcli train grpo --environment=calc", "--environment=calculator "),
    ],
)
def test_bash_completes_what_comes_after_an_equals_sign(typed: str, completed: str, project: Path) -> None:
    """In a real interactive bash, which splits words at `=`."""
    bash = shutil.which("bash")
    assert bash
    script = subprocess.run(
        [sys.executable, "-m", "rlcli.cli.main"],
        env={**os.environ, "_RLCLI_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Bash calls the command by its name: here a function that runs this interpreter.
    (project / "rc").write_text(
        f"rlcli() {{ {sys.executable} -m rlcli.cli.main; }}\n{script.replace('env ', '')}PS1='> '\n"
    )
    process, terminal = pty.fork()
    if not process:
        os.execve(bash, [bash, "--noprofile", "--rcfile", "rc", "-i"], {**os.environ, "TERM": "dumb", "COLUMNS": "200"})
    shown = ""
    try:
        os.write(terminal, f"{typed}\t".encode())
        while completed not in shown and (ready := select.select([terminal], [], [], 60)[0]):
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\a", "") if ready else ""
        assert completed in shown
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_an_error_offers_nothing() -> None:
    @completion.completer
    def broken(incomplete: str) -> list[str]:
        raise RuntimeError("a broken plugin")

    assert broken("x") == []


def test_completion_imports_nothing_heavy(project: Path) -> None:
    code = (
        "import json, sys; from rlcli.cli import completion as c; "
        "[f('') for f in (c.recipes, c.keys, c.runs, c.models)]; "
        "[f('') for f in (c.verifiers, c.environments, c.converters, c.datasets)]; "
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    completed = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    assert json.loads(completed.stdout) == []
