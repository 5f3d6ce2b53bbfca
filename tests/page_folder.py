"""A folder with everything that commands of the documentation name: models, datasets, runs, files of code."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from PIL import Image

from rlcli.cli.main import main
from rlcli.config.load import Resolved, dump_toml, resolve
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.runs.folder import PROMPTS, append_line
from tests.export_fixtures import save_run
from tests.page_commands import ROOT
from tests.report_runs import Settings, add_events, write_run
from tests.taught_engine import TEMPLATE

FOREIGN = ROOT / "tests" / "unit" / "foreign_configs"
MODEL = {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1}
POSITIONS = 32768
"""As the models that pages name have, since recipes ask for long responses."""
STEPS, LEFT, ROWS = 40, 60, 12
"""Steps of a run, of a run that is not finished, and rows of a split."""
HALF = {"problem": "What is half of {b}?", "solution": r"It is $\boxed{{b}/2}$."}
PROBLEM = {**HALF, "level": "Level 1", "type": "Algebra"}
RAW: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "What is {a}+{b}?", "answer": "{a}+{b}={c}\n#### {c}"},
    "math": PROBLEM,
    "math500": PROBLEM | {"answer": "{b}/2", "subject": "Algebra", "unique_id": "test/algebra/{a}.json"},
    "deepscaler": {"problem": "What is {a}+{b}?", "answer": "{c}", "solution": r"\boxed{{c}}"},
    "dapo-math": {
        "prompt": [{"role": "user", "content": "Solve. Answer: $Answer\n\nWhat is {a}+{b}?"}],
        "reward_model": {"ground_truth": "{c}", "style": "rule"},
        "extra_info": {"index": "i-{a}"},
    },
    "orz": {"0": {"from": "human", "value": "{a}+{b}?"}, "1": {"from": "assistant", "ground_truth": {"value": "{c}"}}},
    "aime": {"ID": "2025-I-{a}", "Problem": "What is {a}+{b}?", "Answer": "{c}"},
    "humaneval": {
        "task_id": "HumanEval/{a}",
        "prompt": 'def double(x):\n    """Twice x."""\n',
        "entry_point": "double",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate({a}) == 2 * {a}\n",
    },
    "mbpp": {
        "task_id": 600,
        "prompt": "Write a function that doubles a number.",
        "code": "def double(x):\n  return 2 * x",
        "test_imports": [],
        "test_list": ["assert double({a}) == 2 * {a}"],
    },
    "geometry3k": {"images": ["figure.png"], "problem": "<image>Find {a} + {b}.", "answer": "{c}"},
    "chartqa": {"image": "figure.png", "query": "What is {a} + {b}?", "label": ["{c}"]},
}
"""A row of each dataset of the hub, in its form; a, b, c: two numbers and their sum."""
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(solution_str.endswith(ground_truth)), "length": len(solution_str)}


async def correct(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


def style(completions, **kwargs):
    return [None if not completion else float(completion.isascii()) for completion in completions]
"""
"""Functions as other tools have them, which a page describes and does not show."""


def make_page_folder(root: Path) -> Path:
    """Fill `root`, which is the current folder, and return it."""
    make_tiny_model(root / "tiny", **MODEL)
    _set(root / "tiny" / "config.json", max_position_embeddings=POSITIONS)
    (root / "tiny" / "chat_template.jinja").write_text(TEMPLATE)  # with tools
    for name in RAW:
        _raw(root / "raw" / name, name)
    for name, output in (
        ("gsm8k", "data/gsm8k"),
        ("gsm8k", "data"),
        ("math", "data/math"),
        ("math500", "data/math500"),
    ):
        _prep(name, "--source", f"raw/{name}", "--out", output)
    _prep("countdown", "--out", "data/countdown", "--count", "12", "--test-count", "4")
    _prep("arithmetic", "--out", "data/sums", "--count", "12", "--test-count", "4")
    for copy in ("questions", "gsm8k-filtered"):
        shutil.copytree(root / "data" / "gsm8k", root / "data" / copy)
    _home(root)
    _files(root)
    _runs(root)
    return root


def _filled(text: str, row: int) -> str:
    """The two numbers of a row are those of `report_runs`, so that the runs are of these datasets."""
    a, b = row + 2, 3 * row + 1
    values = {"a": a, "b": b, "c": a + b}
    return re.sub(r"\{([abc])\}", lambda match: str(values[match[1]]), text)


def _raw(path: Path, name: str) -> None:
    """A dataset as its hub repository has it: a file for each split."""
    path.mkdir(parents=True)
    for split, first in (("train", 0), ("test", ROWS)):
        rows = (_filled(json.dumps(RAW[name]), row) for row in range(first, first + ROWS))
        (path / f"{split}.jsonl").write_text("".join(row + "\n" for row in rows))
    if "figure.png" in json.dumps(RAW[name]):
        Image.new("RGB", (8, 8)).save(path / "figure.png")


def _home(root: Path) -> None:
    """Files that pages name below `~`: downloads of datasets, in their published formats."""
    downloads = root / "home" / "data"
    for name in ("gsm8k", "math"):
        shutil.copytree(root / "raw" / name, downloads / name)
    for cache_path, name in (
        ("math/math_test_5000.jsonl", "math"),
        ("math/math500.jsonl", "math500"),
        ("code/HumanEval.jsonl", "humaneval"),
    ):
        _zip(downloads / f"{cache_path}.gz", (root / "raw" / name / "test.jsonl").read_text())
    row = json.loads((root / "raw" / "mbpp" / "test.jsonl").read_text().partition("\n")[0])
    rows = [row | {"task_id": number} for number in (11, 602)]  # of test and of train
    _zip(downloads / "code" / "sanitized-mbpp.json.gz", json.dumps(rows))


def _set(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _zip(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def _files(root: Path) -> None:
    (root / "my_rewards.py").write_text(REWARDS)
    rows = []
    for number in range(7, 27):
        question, truth = f"What is 6 × {number}?", str(6 * number)
        row = {"question": question, "target": truth, "level": number % 3, "completion": f"It is {truth}"}
        rows.append(row | {"prompt": question, "ground_truth": truth})
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = {"question": "How many?", "target": "3", "files": ["raw/geometry3k/figure.png"] * 2}
    (root / "pictures.jsonl").write_text(json.dumps(row) + "\n")
    (root / "r1.jinja").write_text("{{ messages[-1]['content'] }}\nAssistant: <think>\n")
    (root / "grpo.yaml").write_bytes((FOREIGN / "trl_grpo.yaml").read_bytes())
    (root / "run_qwen2-7b.sh").write_bytes((FOREIGN / "verl_grpo.sh").read_bytes())


def _runs(root: Path) -> None:
    """Runs with all their records: `grpo-1` of sums, finished; the others of `data/gsm8k`, at a checkpoint."""
    data = {"model.path": "tiny", "data.path": "data/gsm8k", "evaluation.data": "data/gsm8k"}
    for name, steps, source in (("gsm8k", LEFT, "openai/gsm8k"), ("grpo-1", STEPS, "rlcli/arithmetic")):
        settings = Settings(steps=STEPS, dataset=ROWS, prompt_id=source + ":train:{n}")
        run = write_run(root / "runs" / name, settings)
        resolved = resolve("grpo", {**data, "train.steps": steps}, ["rollout.engine=transformers"])
        (run / "config.toml").write_text(dump_toml(resolved))
        for step in range(1, STEPS + 1):
            groups = [[settings.prompt_id.format(n=n), 4, min(n, 4), 40, 0 < n < 4] for n in range(settings.prompts)]
            append_line(run / PROMPTS, json.dumps({"step": step, "groups": groups}))
        if steps == LEFT:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            save_run(run, Path("tiny"), step=STEPS, resolved=resolved, state={"data": _fingerprint(resolved)})
            dist.destroy_process_group()
            add_events(run, {"event": "checkpoint", "step": STEPS})
    for name in ("first", "sums", "earlier", "guess"):
        shutil.copytree(root / "runs" / "gsm8k", root / "runs" / name, symlinks=True)
    shutil.copytree(root / "data" / "sums", root / "runs" / "first-data")


def _fingerprint(resolved: Resolved) -> str:
    from rlcli.launch.preflight import prepare

    return prepare(resolved.config).prompts.fingerprint()


def _prep(*words: str) -> None:
    assert main(["prep", *words, "--no-check"]) == 0, words
