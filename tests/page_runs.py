"""Runs the commands of the documentation in the folder of `page_folder`, as far as they go without Ray.

What trains is run with `--dry-run`. What generates samples ends after all its checks, where its workers would start.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

from rlcli.cli.main import main
from rlcli.errors import RunFailed

STANDS_FOR = {
    "MODEL": "tiny",
    "PATH": "tiny",
    "./my-model": "tiny",
    "DATA": "data/gsm8k",
    "DIR": "data/gsm8k",
    "RUN": "runs/gsm8k",
    "EleutherAI/hendrycks_math": "raw/math",
    "opencompass/AIME2025": "raw/aime",
    "openai/gsm8k": "raw/gsm8k",
    "rollout.workers=4": "rollout.workers=1",
    "parallel.expert=8": "parallel.expert=1",
    "teacher.path=Qwen/Qwen2.5-1.5B-Instruct": "teacher.path=tiny",
}
"""Placeholders, hub names and sizes of larger machines in commands of pages → their local replacements."""
GENERATED = ("arithmetic", "countdown", "reasoning-gym")
STARTS = "here workers would start"


def as_run(words: Sequence[str], judge: str) -> list[str]:
    """The words after `rlcli` with what the folder has. judge: the address of one."""
    words = ["tiny" if word.startswith("Qwen/") else STANDS_FOR.get(word, word) for word in words]
    words = [word.replace("http://localhost:8000", judge) for word in words]
    options = dict(pairwise(words))
    if "--model" in options:
        words[words.index("--model") + 1] = options["--model"].replace("…", "tiny")
    if words[0] == "train":
        return _training(words, options)
    if words[:2] == ["runs", "resume"]:
        return [*words, "--dry-run"]
    if words[0] == "prep" and words[1] not in ("list", "show", "filter"):
        return _converting(words, options)
    return words


def _converting(words: list[str], options: dict[str, str]) -> list[str]:
    words = [*words, "--no-check"]  # the rows are made up
    if words[1] in GENERATED:
        return [*words, "--count", "16", "--test-count", "4"]
    raw = Path("raw") / words[1]
    if raw.is_dir() and not options.get("--source", "").startswith(("~", "raw/")):
        return [*words, "--source", str(raw)]
    return words


def _training(words: list[str], options: dict[str, str]) -> list[str]:
    if words[1] == "…":
        words[1:2] = ["grpo", "--model", "tiny", "--data", "data/gsm8k"]
    if "--workers" in options or words[1].endswith(".toml"):  # an imported file names the workers of a cluster
        words = [*words, "--workers", "1", "--set", "rollout.tensor_parallel=1"]
    if Path(options.get("--out", "-")).exists():  # other commands of the page need what it will have written
        words = [*words, "--force"]
    return words if "--dry-run" in words else [*words, "--dry-run"]


def failure(words: Sequence[str]) -> str:
    """Run a command in the current folder. Returns what it printed if it fails before its workers would start."""
    printed, working_folder = io.StringIO(), Path.cwd()
    with (
        redirect_stdout(printed),
        redirect_stderr(printed),
        patch("sys.stdin", io.StringIO()),
        patch("rlcli.launch.launch.running_workers", side_effect=RunFailed(STARTS)),
    ):
        code = main(words)
    os.chdir(working_folder)  # a resumed run has changed to the folder that it was started in
    text = printed.getvalue()
    return "" if code == 0 or (code == 1 and STARTS in text) else f"exit code {code}: {text[-600:]}"
