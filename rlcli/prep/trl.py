"""Write flat columns as TRL's trainers read them: columns other than `prompt` go to the reward functions by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlcli.errors import DataError
from rlcli.types import Prompt


def flat_table(prompts: Sequence[Prompt]) -> Any:
    """A pyarrow table of `prompt` (messages), `solution` (the answer; in mathematics between $ signs, where TRL's
    accuracy_reward finds it), `answer` (unchanged), `data_source`, `verifier`, and the scalar fields of `extra_info`.

    A field of `extra_info` with the name of another column becomes `extra_NAME`.
    """
    import pyarrow as pa

    if not prompts:
        raise DataError("no rows to write", "check the source and the counts")
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns: dict[str, Any] = {
        "prompt": pa.array([[dict(one) for one in prompt.messages] for prompt in prompts], type=pa.list_(message)),
        "solution": [_solution(prompt) for prompt in prompts],
        "answer": [prompt.ground_truth for prompt in prompts],
        "data_source": [prompt.data_source for prompt in prompts],
        "verifier": [prompt.verifier for prompt in prompts],
    }
    names = dict.fromkeys(name for prompt in prompts for name in prompt.extra_info)
    for name in names:
        values = [prompt.extra_info.get(name) for prompt in prompts]
        if all(value is None or isinstance(value, str | bool | int | float) for value in values):
            columns[f"extra_{name}" if name in columns else name] = _one_type(values)
    return pa.table(columns)


def _solution(prompt: Prompt) -> str:
    answer = prompt.ground_truth
    return answer if prompt.ability != "math" or "$" in answer or "\\boxed" in answer else f"${answer}$"


def _one_type(values: list[Any]) -> Any:
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    try:
        if len(kinds) <= 1:
            return pa.array(values)
    except (pa.ArrowException, OverflowError):  # an integer of more than 64 bits
        pass
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, type=pa.string())
