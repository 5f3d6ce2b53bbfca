"""Every recipe with an environment trains two real steps, on rows of the kind that it is for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, SMALL, Cli

from rlcli.config import recipes
from rlcli.data.prompts.parquet_schema import row, write_rows
from tests.chat_templates import HERMES
from tests.pages import blocks, commands

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

NAMES = [
    name
    for name in recipes.names()
    if "environment.name" in recipes.load(name).values and not name.startswith("quickstart")
]
"""The recipes of the quickstart have a separate test."""
FEW = ["code-repair", "tools-calculator"]
TRUTHS = {
    "countdown-feedback": json.dumps({"numbers": [3, 5, 7], "target": 36}),
    "code-repair": json.dumps({"kind": "asserts", "asserts": ["assert twice(2) == 4"]}),
}


@pytest.fixture(scope="module")
def trained(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    items = (item for item in request.session.items if item.path == request.path)
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    names = [name for name in NAMES if {"name": name} in parameters]
    folder = tmp_path_factory.mktemp("conversations")
    model = folder / "model"
    shutil.copytree(tiny, model)
    (model / "chat_template.jinja").write_text(HERMES)
    (folder / "data").mkdir()
    (folder / "data" / "corpus.jsonl").write_text('{"id": 1, "text": "Lima"}\n')
    for name in NAMES:
        messages = [{"role": "user", "content": "Go."}]
        rows = [row(data_source=name, messages=messages, verifier="gsm8k", ground_truth=TRUTHS.get(name, "4"))] * 8
        write_rows(folder / f"{name}.parquet", rows)
    program = Path(__file__).with_name("catalog.py")
    done = subprocess.run(
        [sys.executable, str(program), model, folder / "{recipe}.parquet", folder / "out", "1", *names],
        cwd=folder,  # where the recipe of search finds its corpus
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["recipe"]: line["steps"] for line in lines}


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES]
)
def test_a_recipe_with_an_environment_trains_two_steps(trained: dict[str, list[dict[str, Any]]], name: str) -> None:
    steps = trained[name]
    assert [step["step"] for step in steps] == [1, 2]
    assert sum(step.get("update/grad_norm", 0.0) for step in steps) > 0
    assert all(step["log_prob_check/max_abs_diff"] < 1e-3 for step in steps)
    assert all(step["outcome/environment"] == 0 for step in steps)


KILLED = """
import os, pathlib, signal
from functools import wraps

@wraps(step := Guess.step)
def killed_once(self, message):
    if (alive := pathlib.Path({path!r})).exists():
        alive.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, message)

Guess.step = killed_once
"""
"""Behind the page's game: its process is killed in the middle of the first conversations."""


@pytest.mark.exhaustive  # the page's agent trains in test_agents.py, and its game in tests/unit/environments
def test_the_pages_game_trains_as_it_is_written(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    game, alive = blocks("environments.md", "python")[0], tmp_path / "alive"
    (tmp_path / "guess.py").write_text(game + KILLED.format(path=str(alive)))
    alive.touch()
    monkeypatch.chdir(tmp_path)
    words = next(words for words in commands("environments.md") if "guess.py:Guess" in words and words[1] == "train")
    words = [str(tiny) if word.startswith("Qwen/") else word for word in words[1:]]
    small = ["rollout.max_response_tokens=24", "environment.turn_tokens=8", "environment.context_tokens=128"]
    sets = [word for text in (*small, "data.max_prompt_tokens=300") for word in ("--set", text)]
    cli(*words, *SMALL, *sets, "--set", "train.tokens_per_microbatch=1024", "--steps", "1", "--out", "run")
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not alive.exists()
    assert (step["outcome/environment"], step["samples/left_out"]) == (0, 0)
    assert step["rollout/generated"] == 16
    # The model that was trained plays four games with other seeds than those of the training.
    words = ("eval", "--model", "run", "--environment", "guess.py:Guess", "--samples", "2", "--out", "games", "--json")
    few = ("--set", "environment.eval_rows=4", "--set", "rollout.engine=transformers", "--max-tokens", "24")
    first = json.loads(cli(*words, *few, *sets).stdout)
    assert (first["prompts"], first["data"], first["generated"]) == (4, {"Guess": "guess.py:Guess"}, 8)
    second = json.loads(cli(*words, *few, *sets).stdout)
    assert (second["generated"], second["pass"]) == (0, first["pass"])
