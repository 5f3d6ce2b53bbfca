"""MBPP, sanitized: short Python programs from a sentence (Austin et al., 2021, arXiv:2108.07732)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.sources import SOURCE_HELP, read_all, text

HUB_ID, HUB_CONFIG = "google-research-datasets/mbpp", "sanitized"
INSTRUCTION = "Answer with the whole program in one ```python block. It must pass tests such as:"
TEST_TASKS = range(11, 511)


def read(options: ConvertOptions) -> dict[str, list[RawRow]]:
    """The paper's test tasks (11 to 510) for testing, all others for training, whichever files hold them."""
    splits: dict[str, list[RawRow]] = {"train": [], "test": []}
    for row in read_all(options, HUB_ID, HUB_CONFIG, name="mbpp"):
        splits["test" if row.values.get("task_id") in TEST_TASKS else "train"].append(row)
    return splits


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The first test is shown, for the function's name and arguments; the others stay hidden."""
    task, question, code = row.get("task_id"), text(row, "prompt"), text(row, "code")
    if not isinstance(task, int) or isinstance(task, bool):
        raise DataError(f"'task_id' is not an integer: {task!r:.80}", "fix that row of the source")
    asserts, setup = _texts(row, "test_list"), _texts(row, "test_imports")
    if not asserts:
        raise DataError("'test_list' is empty", "fix that row of the source")
    truth = {"kind": "asserts", "asserts": asserts, "setup": "\n".join(setup)}
    content = f"{question.strip()}\n\n{INSTRUCTION}\n\n```python\n{asserts[0]}\n```"
    return Prompt(
        id="",
        messages=({"role": "user", "content": content},),
        data_source=HUB_ID,
        ability="code",
        verifier="code",
        ground_truth=json.dumps(truth),
        extra_info={"task_id": task, "response": f"```python\n{code.strip()}\n```"},
    )


def _texts(row: Mapping[str, Any], column: str) -> list[str]:
    values = row.get(column)
    if not isinstance(values, list):
        raise DataError(f"'{column}' is not a text list: {values!r:.80}", "give the sanitized MBPP, or fix that row")
    return [text({column: value}, column) for value in values]


CONVERTER = Converter(
    name="mbpp",
    summary="MBPP, sanitized: 170 + 257 short Python programs",
    source=HUB_ID,
    verifier="code",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Austin et al., 2021, arXiv:2108.07732; CC-BY-4.0",
)
