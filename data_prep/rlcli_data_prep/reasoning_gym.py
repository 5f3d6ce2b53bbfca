"""Generate any task of reasoning_gym, scored by the task's own verifier (Stojanovski et al., 2025).

Needs the extra `rlcli[reasoning-gym]`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from rlcli.errors import ConfigError, DataError, SetupError
from rlcli.registry import near
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.sources import text

INSTRUCTION = "Reason step by step, then give the final answer alone inside <answer> and </answer>."
TRAIN_ROWS, TEST_ROWS = 2000, 200

# Entries generated per wanted row; some tasks repeat themselves.
_TRIES = 4


def read(options: ConvertOptions) -> dict[str, list[RawRow]]:
    """Entries with distinct questions, the first ones for testing; reproducible by seed and reasoning_gym version."""
    train_rows = TRAIN_ROWS if options.count is None else options.count
    test_rows = TEST_ROWS if options.test_count is None else options.test_count
    if train_rows < 1 or test_rows < 1:
        raise ConfigError(f"--count = {train_rows}, --test-count = {test_rows}: too few", "give 1 or more of each")
    task = options.task or ""
    entries = _entries(_dataset(task, options.seed or 0, _TRIES * (train_rows + test_rows)), train_rows + test_rows)
    if len(entries) < train_rows + test_rows:
        raise ConfigError(
            f"--count = {train_rows}, --test-count = {test_rows}: {task} made only {len(entries)} different questions",
            "lower the counts",
        )
    rows = [RawRow({"task": task, "entry": entry}, f"{task}, entry {i}") for i, entry in enumerate(entries)]
    return {"train": rows[test_rows:], "test": rows[:test_rows]}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The ground truth is the entry's answer, or empty if the task's verifier accepts many and names none."""
    entry = row["entry"]
    answer = entry.get("answer")
    return Prompt(
        id="",
        messages=({"role": "user", "content": f"{text(entry, 'question').strip()}\n\n{INSTRUCTION}"},),
        data_source=f"reasoning_gym/{row['task']}",
        ability="reasoning",
        verifier="reasoning_gym",
        ground_truth="" if answer is None else str(answer),
        extra_info={"answer_format": "tag", "task": row["task"], "entry": _json(row["task"], entry)},
    )


def _dataset(task: str, seed: int, size: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of one of its dependencies
            from reasoning_gym import create_dataset
            from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise SetupError(f"not installed: {error.name}", "uv pip install 'rlcli[reasoning-gym]'") from error
    if task not in DATASETS:
        problem = f"--task = {task}: not a task of reasoning_gym" if task else "--task is not given"
        raise ConfigError(problem, near(task, DATASETS))
    try:
        dataset = create_dataset(task, seed=seed, size=size)
        entry = dataset[0]
        stored = json.loads(_json(task, entry))
        survives = dataset.score_answer(entry["answer"], stored) == dataset.score_answer(entry["answer"], entry)
    except Exception as error:  # each task has its own code
        raise ConfigError(f"--task = {task}: generation failed: {error!s:.200}", "choose another task") from error
    if not survives:
        raise ConfigError(
            f"--task = {task}: its verifier cannot read entries restored from JSON", "choose another task"
        )
    return dataset


def _entries(dataset: Any, wanted: int) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for number in range(len(dataset)):
        if len(entries) == wanted:
            break
        entry = dataset[number]
        entries.setdefault(entry["question"], entry)
    return list(entries.values())


def _json(task: str, entry: Mapping[str, Any]) -> str:
    try:
        return json.dumps(entry)
    except (TypeError, ValueError) as error:
        raise DataError(f"an entry of {task} is not JSON: {error}", "choose another task") from error


CONVERTER = Converter(
    name="reasoning-gym",
    summary="Any task of reasoning_gym, generated; needs rlcli[reasoning-gym]",
    source="generated",
    verifier="reasoning_gym",
    read=read,
    prompt=prompt,
    options={
        "task": "the task's name, e.g. leg_counting; required",
        "seed": "seed of the draw (0)",
        "count": f"rows of the train split ({TRAIN_ROWS})",
        "test_count": f"rows of the test split ({TEST_ROWS})",
    },
    reference="Stojanovski et al., 2025, arXiv:2505.24760; Apache-2.0",
)
