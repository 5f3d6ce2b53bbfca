"""HumanEval: Python functions to complete from their docstring (Chen et al., 2021, arXiv:2107.03374)."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.sources import SOURCE_HELP, read_all, text

HUB_ID = "openai/openai_humaneval"
INSTRUCTION = (
    "Complete this Python function. Answer with the whole function, and what it needs, in one ```python block."
)


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return {"test": read_all(options, HUB_ID, name="humaneval")}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The ground truth holds the test, Python source that defines check(candidate), and the function's name."""
    stub, entry_point, test = text(row, "prompt"), text(row, "entry_point"), text(row, "test")
    program = stub + text(row, "canonical_solution")
    truth = {"kind": "check", "test": _complete(test, program), "entry_point": entry_point}
    return Prompt(
        id="",
        messages=({"role": "user", "content": f"{INSTRUCTION}\n\n```python\n{stub.strip()}\n```"},),
        data_source=HUB_ID,
        ability="code",
        verifier="code",
        ground_truth=json.dumps(truth),
        extra_info={"task_id": text(row, "task_id"), "response": f"```python\n{program.strip()}\n```"},
    )


def _complete(test: str, program: str) -> str:
    """The test; the canonical program is put before it if it calls more of that than the given candidate (4 tests do):
    it runs separately from the model's program and must not trust the definitions there."""
    try:
        defined = {node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        nodes = list(ast.walk(ast.parse(test)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"'test' or 'canonical_solution' is not Python: {error}", "fix that row of the source"
        ) from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes):
        raise DataError(f"'test' defines no function check: {test[:80]!r}", "fix that row of the source")
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return f"{program}\n\n{test}" if defined & used else test


CONVERTER = Converter(
    name="humaneval",
    summary="HumanEval: 164 Python functions to complete, for testing",
    source=HUB_ID,
    verifier="code",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Chen et al., 2021, arXiv:2107.03374; MIT",
)
