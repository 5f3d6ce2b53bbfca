"""The page on Python as it is written, top to bottom; and a run that is interrupted from Python and resumed."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT

import rlcli
from tests.pages import DOCS

pytestmark = pytest.mark.timeout(600)

PAGE = "from_python.md"
SHORT = {
    "rollout.engine": "transformers",
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 4,
    "rollout.max_response_tokens": 8,
}
RLCLI = Path(sys.executable).with_name("rlcli")


def cells(page: str) -> list[tuple[str, str]]:
    """Language and text of each `bash` and `python` block of the page, in order."""
    return re.findall(r"^```(bash|python)\n(.*?)^```$", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def run_cell(text: str, names: dict[str, Any], number: int) -> str:
    """Run the cell of a notebook, whose source is found as IPython's is. Returns what it prints."""
    file = f"<cell {number} of the page>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, file, "exec"), names)
    return printed.getvalue()


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.exhaustive  # tests/unit/api shows each call of the page
def test_the_page_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{RLCLI.parent}{os.pathsep}{os.environ['PATH']}")
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for number, (language, text) in enumerate(cells(PAGE)):
        if language == "bash":
            subprocess.run(["bash", "-e"], input=text, text=True, check=True, capture_output=True)
        else:
            printed += run_cell(text, names, number)
    run: rlcli.Run = names["run"]
    assert run.state == "finished"
    assert run.step == 15
    rewards = run.metrics()["reward/mean"]
    assert sum(rewards[-3:]) > 3 * sum(rewards[:3])
    assert (run.path / "code" / "digits.py").is_file()
    assert f"Run('{run.path}'): finished, step 15 of 15" in printed
    assert "no such file or folder: nowhere" in printed
    assert 0.0 <= names["report"]["mean"]["mean@2"]["mean"] <= 1.0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits", "near"]
    assert (tmp_path / "runs" / "near" / "data" / "train.parquet").is_file()


@pytest.mark.exhaustive  # tests/unit/api interrupts the command, test_failures.py the run
def test_an_interrupted_run_ends_after_its_step_and_resumes(
    tiny: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    run_cell("def length(request):\n    return -len(request.completion)\n", names, -1)
    run_folder = tmp_path / "stopped"
    settings = SHORT | {"train.steps": 1000, "cluster.workers": 1}

    def interrupt() -> None:
        while not (run_folder / "metrics.jsonl").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        rlcli.train("grpo", model=tiny, data=sums, verifier=names["length"], out=run_folder, settings=settings)
    thread.join()
    run = rlcli.Run(run_folder)
    assert run.state == "stopped"
    assert 1 <= run.step < 1000
    done = run.step
    assert rlcli.train(resume=run, steps=done + 1).path == run_folder
    assert (run.state, run.step) == ("finished", done + 1)
    assert set(run.samples()["outcome"]) == {"wrong"}
