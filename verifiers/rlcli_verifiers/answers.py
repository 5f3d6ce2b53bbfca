"""Where a response states its answer: the last box, the answer tag, the last line."""

from __future__ import annotations

import re

from rlcli.types import Outcome, Verdict

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_UNESCAPED_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def judged(right: bool, answer: str, detail: str = "") -> Verdict:
    """Score 1 and OK where the answer is right, 0 and WRONG where not."""
    return Verdict(float(right), Outcome.OK if right else Outcome.WRONG, answer=answer, detail=detail)


def no_answer(detail: str = "") -> Verdict:
    """Score 0: the response holds no answer in the form that the verifier reads."""
    return Verdict(0.0, Outcome.NO_ANSWER, detail=detail)


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of a text that has none."""
    return text.rpartition("</think>")[2]


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Start, end and content of each closed `\boxed{…}` from left to right; of nested ones, the outermost.

    >>> boxes(r"\boxed{\frac{1}{2}} or \boxed{3}")
    [(0, 19, '\\frac{1}{2}'), (23, 32, '3')]
    """
    found: list[tuple[int, int, str]] = []
    position = 0
    while opening := _BOX.search(text, position):
        closing = _closing(text, opening.end())
        if closing is None:
            position = opening.end()  # cut off here; a later one may be whole
            continue
        found.append((opening.start(), closing + 1, text[opening.end() : closing].strip()))
        position = closing + 1
    return found


def last_box(text: str) -> str | None:
    r"""What the last closed `\boxed{…}` holds; None where there is none."""
    found = boxes(text)
    return found[-1][2] if found else None


def last_tag(text: str) -> str | None:
    """What the last `<answer>…</answer>` holds; None where there is none."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else None


def last_line(text: str) -> str | None:
    """The last line that is not empty, without the white space around it; None where there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


def _closing(text: str, start: int) -> int | None:
    """Where the group that was opened just before `start` closes; `\\{` and `\\}` are text."""
    depth = 1
    for brace in _UNESCAPED_BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None
