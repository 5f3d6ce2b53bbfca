"""Agents that ask with the real `openai` client train through the command line, as their page says."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import psutil
import pytest
from commands import SMALL, Cli

from tests.pages import blocks, commands

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

CRASHES = """
import json, os, sys
if json.load(open(os.environ["RLCLI_ROW"]))["extra_info"]["index"] % 3 == 1:
    sys.exit("no such task")
"""
SETS = [
    *("rollout.engine=transformers", "rollout.prompts_per_step=3", "rollout.samples_per_prompt=2"),
    *("rollout.max_response_tokens=24", "environment.turn_tokens=8", "environment.context_tokens=64"),
    *("environment.rows=3", "environment.max_failure_rate=0.5", "environment.deadline_s=300"),
    "data.max_prompt_tokens=64",
]


@pytest.mark.exhaustive  # test_environment_recipes.py trains an agent's conversations
def test_the_pages_agent_trains_and_one_that_crashes_is_left_out(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(CRASHES + blocks("gateway.md", "python")[0])
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in commands("gateway.md") if words[1] == "train"]
    words = [str(tiny) if word.startswith("Qwen/") else word for word in words[1:]]
    words = [f"{sys.executable} agent.py" if word == "python agent.py" else word for word in words]
    sets = [word for text in SETS for word in ("--set", text)]
    cli(*words, *SMALL, *sets, "--steps", "2", "--out", "run", timeout=500)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["outcome/environment"] == step["ended/failed"] == pytest.approx(1 / 3)
        assert step["turns/max"] == 2
        assert step["log_prob_check/max_abs_diff"] < 1e-3, "the trained log-probs are those that were drawn with"
    remaining = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]
    assert [process.pid for process in remaining] == [os.getpid()], "a program has outlived its run"


def test_a_program_that_asks_nothing_is_one_line(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    words = ["train", "grpo", "--model", tiny, "--out", tmp_path / "run", "--set", "rollout.engine=transformers"]
    done = cli(*words, "--environment", f"{sys.executable} -c pass", expect=2)
    (line,) = (line for line in done.stderr.strip().splitlines() if not line.startswith("…"))
    assert re.fullmatch(r"error: .* asks for no turn on row .*: protocol: .* \(docs/gateway\.md\)", line), line
    assert not (tmp_path / "run").exists()
