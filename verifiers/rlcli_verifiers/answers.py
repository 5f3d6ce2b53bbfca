"""Find the answer in a response: the last box, the answer tag, the last line."""

from __future__ import annotations

import re
import unicodedata

from rlcli.types import Outcome, Verdict

OPEN_THINK = "the reasoning has no end: <think> is still open"
"""The reason if `VerifyRequest.answer_text` returns None."""

_FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and patterns without visible glyphs
_INVISIBLE = frozenset(["Cc", "Cf", "Cn", "Co", "Cs", "Mn", "Me", "Zl", "Zp", "Zs"])
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_TOKEN = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is text


def judged(right: bool, answer: str, detail: str = "") -> Verdict:
    """Score 1 and OK if the answer is right, else 0 and WRONG."""
    return Verdict(float(right), Outcome.OK if right else Outcome.WRONG, answer=answer, detail=detail)


def no_answer(detail: str = "") -> Verdict:
    """Score 0: the response holds no answer in the form that the verifier reads."""
    return Verdict(0.0, Outcome.NO_ANSWER, detail=detail)


def is_blank(text: str) -> bool:
    """True if a text is invisible: white space, zero-width and control characters, fillers."""
    return all(
        character.isspace() or character in _FILLERS or unicodedata.category(character) in _INVISIBLE
        for character in text
    )


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Start, end and content of each closed `\boxed{…}` from left to right; of nested ones, the outermost.

    >>> boxes(r"\boxed{\frac{1}{2}} or \boxed{3}")
    [(0, 19, '\\frac{1}{2}'), (23, 32, '3')]
    """
    closed: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int]] = []
    for token in _TOKEN.finditer(text):
        is_box = len(token[0]) > 2
        if is_box or token[0] == "{":
            opened.append((token.start() if is_box else -1, token.end()))
        elif token[0] == "}" and opened:
            start, inside = opened.pop()
            if start >= 0:
                while closed and closed[-1][0] > start:  # nested in this one
                    closed.pop()
                closed.append((start, token.end(), text[inside : token.start()].strip()))
    return closed


def last_box(text: str) -> str | None:
    r"""The content of the last closed `\boxed{…}`; None if there is none."""
    closed = boxes(text)
    return closed[-1][2] if closed else None


def tags(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each `<answer>…</answer>` from left to right.

    >>> tags("<answer> 42 </answer>.")
    [(0, 21, '42')]
    """
    return [(match.start(), match.end(), match[1].strip()) for match in _TAG.finditer(text)]


def last_tag(text: str) -> str | None:
    """The content of the last `<answer>…</answer>`; None if there is none."""
    contents = _TAG.findall(text)
    return contents[-1].strip() if contents else None


def last_line(text: str) -> str | None:
    """The last line that is not empty, without the white space around it; None if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
