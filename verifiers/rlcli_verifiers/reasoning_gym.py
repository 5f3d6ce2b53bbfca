"""Tasks of reasoning_gym (open-thought/reasoning-gym), each scored by its own verifier.

Needs the extra `rlcli[reasoning-gym]`.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache

from rlcli_sandbox.no_eval import without_eval

from rlcli.errors import SetupError
from rlcli.types import Outcome, Verdict, VerifyRequest
from rlcli_verifiers.answers import OPEN_THINK, last_box, last_tag, no_answer

ANSWER_KIND = "text"
ROW_OPTIONS = ()

MAX_CHARS = 10_000
"""Maximum length of an answer that is passed to the scorer."""

Scorer = Callable[[str, Mapping[str, object]], float]


def verify(request: VerifyRequest) -> Verdict:
    """The score of the task's own verifier, from 0 to 1, for the last <answer>…</answer>, else box, else all.

    The row gives the task's name as extra_info["task"] and its entry, an object or its JSON, as extra_info["entry"]. OK
    is a score of 1. A task's verifier that would evaluate the answer or the entry as Python reads a literal or
    arithmetic instead; one that uses sympy's parser is refused. Raises `SetupError` if reasoning_gym is not installed,
    and `ValueError` for a row without task or entry and for a task that is refused.
    """
    task, entry = _row(request)
    score_answer = scorer(task)
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    answer = last_tag(text) or last_box(text) or text.strip()
    if not answer or len(answer) > MAX_CHARS:
        return no_answer("" if not answer else f"the answer is longer than {MAX_CHARS} characters")
    score = float(score_answer(answer, entry))
    return Verdict(score, Outcome.OK if score >= 1.0 else Outcome.WRONG, answer=answer)


def preload() -> None:
    """Import reasoning_gym, if it is installed, before scoring processes are forked."""
    with contextlib.suppress(ModuleNotFoundError), warnings.catch_warnings():  # reported when a row needs it
        warnings.simplefilter("ignore", SyntaxWarning)  # from one of its dependencies
        import reasoning_gym  # noqa: F401


def gold(request: VerifyRequest) -> str:
    """A response that gives the entry's own answer, else the ground truth."""
    return f"<answer>{request.ground_truth or _row(request)[1]['answer']}</answer>"


@lru_cache
def scorer(task: str) -> Scorer:
    """The verifier of a task. Raises `SetupError`, and `ValueError` for a task that is unknown or refused."""
    try:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn
    except ModuleNotFoundError as error:
        raise SetupError(f"not installed: {error.name}", "install the extra: rlcli[reasoning-gym]") from error
    if task not in DATASETS:
        raise ValueError(f"reasoning_gym has no task {task!r}")
    score: Scorer = without_eval(get_score_answer_fn(task), f"the verifier of reasoning_gym's {task}")
    return score


def _row(request: VerifyRequest) -> tuple[str, Mapping[str, object]]:
    task, entry = request.extra_info.get("task"), request.extra_info.get("entry")
    try:
        entry = json.loads(entry) if isinstance(entry, str) else entry
    except ValueError as error:
        raise ValueError(f"extra_info entry is not JSON: {error}") from error
    if not isinstance(task, str) or not isinstance(entry, Mapping):
        raise ValueError("extra_info lacks task (a name of reasoning_gym) or entry (an object, or its JSON)")
    return task, entry
