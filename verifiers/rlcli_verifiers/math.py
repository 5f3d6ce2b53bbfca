"""Mathematics: the final answer, a number or a formula, compared by value."""

from __future__ import annotations

import re

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers import symbolic
from rlcli_verifiers.answers import OPEN_THINK, boxes, judged, last_box, last_line, last_tag, no_answer
from rlcli_verifiers.latex import MAX_CHARS, equal
from rlcli_verifiers.notation import clean, number

ANSWER_KIND = "latex"

TAIL_CHARS = 8000
"""The answer is looked for in this many characters at the end of a response."""

_PHRASE = re.compile(r"(?:\banswer(?:\s+is\b|\s*[:=]|\**:)|####)[\s:*]*(?=\S)", re.IGNORECASE)
_DOLLARS = re.compile(
    r"\$\$(?P<double>[^$]+)\$\$|(?<!\\)\$\$?(?P<dollars>[^$\n]+)(?<!\\)\$\$?|\\\((?P<round>.{1,400}?)\\\)"
    r"|\\\[(?P<square>[\s\S]{1,400}?)\\\]"
)
_NUMBER_AND_UNIT = re.compile(
    r"\\?\$?(-?[\d.,/]*\d\s?\\?%?)(?=\.?$|[.,;!]?\s+[a-z]{2}|[.;!,]\s)", re.IGNORECASE | re.ASCII
)
# Between two boxes, or after one: what makes them alternatives of one answer, and what takes the first back.
_ALTERNATIVE = re.compile(r"[\s$*().,;/]*(?:(?:or|and)\b[^.\n!?]{0,40})?", re.IGNORECASE)
_CLOSED = r"[\s$*\\)\]]*+"  # possessive: long white space costs no more than its length
_OTHER = (
    r"\(?(?:or|and|maybe|possibly|perhaps|else|\s)*+"
    r"(?:\$(?P<formula>[^$\n]{1,40})\$|\\\((?P<round>[^\n]{1,40}?)\\\)|\\?\$?(?P<number>-?[\d.,/]*\d(?:\s?\\?%)?))"
)
# "120 (or else $J$ would have more factors)" gives a reason, and no other answer.
_REASON = r"(?!\s{1,8}else\b[^.\n]{0,60}\bwould\b)"
_OR = re.compile(rf"{_CLOSED},?\s*+\(?or\b{_REASON}{_OTHER}", re.IGNORECASE | re.ASCII)
# In a sentence also "5 and 6", "5 to 6", "5, 6, 7"; but not "5, 2 of which".
_LISTED = re.compile(
    rf"{_CLOSED}(?:(?P<mark>[,;/~])|,?\s*+\(?(?:or|and|to)\b){_OTHER}(?(mark)(?=\W*(?:$|or\b|and\b|\d)))",
    re.IGNORECASE | re.ASCII,
)
_TAKEN_BACK = re.compile(
    r"\b(?:no|not|wait|actually|rather|instead|sorry|correction|mistake|wrong|incorrect|check)\b", re.IGNORECASE
)
_CORRECTED = re.compile(
    r"\b(?:wait|actually|correction|scratch\s+that|on\s+second\s+thought|sorry)\b[,:.;—–-]*"
    r"(?:\s*\b(?:no|it|its|it's|is|should|must|be|that|the|answer|so|actually|make|to)\b[,:.]*)*\s*"
    r"(?P<said>\$[^$\n]+\$|\\\(.+?\\\)|-?[\d.,/]*\d)(?=\s*(?:[.!;\n]|$|instead\b))",
    re.IGNORECASE | re.ASCII,
)


def verify(request: VerifyRequest) -> Verdict:
    """The last \\boxed{} (else what follows "the answer is", else a last line of mathematics) equals the ground truth.

    It is looked for after the last </think>, and in the last <answer> tag where there is one.
    Equal is: the same text, the same number, the same elements of a list, point or interval, or the same value by
    math-verify. Units may be left out; decimals are exact, unless the ground truth is itself rounded. What a response
    takes back does not count; several boxes joined by "or" are one list, so hedging is WRONG. The ground truth is the
    bare answer or a solution with a \\boxed{}. Raises `ValueError` where it is empty.
    """
    truth = ", ".join(_truth(request))
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    stated = extract(text[-TAIL_CHARS:])
    if not stated:
        return no_answer('no \\boxed{}, no "answer is", and a last line that is not mathematics')
    answer = ", ".join(stated)
    right = equal(truth, answer) or (len(stated) > 1 and all(equal(truth, one) for one in stated))
    return judged(right, answer)


def gold(request: VerifyRequest) -> str:
    """A response that gives the ground truth, an answer or a solution, in a box."""
    return f"Therefore the answer is $\\boxed{{{', '.join(_truth(request))}}}$."


def preload() -> None:
    """Import math-verify and build its parser, once, before scoring processes are forked."""
    symbolic.same(r"\frac{1}{2}x^{2}", "x^{2}+0.5")
    symbolic.same("y=3x+1", "y-3x=1")  # the solvers of sympy load on first use


def _truth(request: VerifyRequest) -> list[str]:
    truth = request.ground_truth
    stated = extract(truth) if boxes(truth) else [truth.strip()]
    if not any(stated):
        raise ValueError("the ground truth is empty")
    return stated


def extract(text: str) -> list[str]:
    """The final answer that a text states; several where it offers alternatives; none where it states nothing.

    What comes last counts: a text may correct itself. Where an `<answer>` is closed and no box follows, only what the
    last one holds does.
    """
    tagged = last_tag(text)
    if boxes(text.rpartition("</answer>")[2]):
        tagged = None  # a box after it is later
    if tagged is not None:
        text = tagged
    found = boxes(text)
    if found:
        corrected = _corrected(text[found[-1][1] :])
        return [corrected] if corrected is not None else _boxed(text, found)
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        after = text[phrases[-1].end() :]
        corrected = _corrected(after)
        return [corrected] if corrected is not None else _of_sentence(after)
    last = (last_line(text) if tagged is None else tagged) or ""
    if formula := _DOLLARS.fullmatch(last):
        return [_inside(formula)]
    is_number = len(last) <= MAX_CHARS and number(clean(last).rstrip("% ").removesuffix("\\"))
    return [last] if is_number or tagged else []


def _boxed(text: str, found: list[tuple[int, int, str]]) -> list[str]:
    """The last box, or all at the end that are alternatives of one another."""
    said = [found[-1][2]]
    for (_, end, content), (start, _, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        between = text[end:start]
        if not _ALTERNATIVE.fullmatch(between) or _TAKEN_BACK.search(between) or "\n\n" in between:
            break
        if content not in said:
            said.insert(0, content)
    other = _OR.match(text, found[-1][1])
    if other and _inside(other) not in said:
        said.append(_inside(other))
    return [last_box(one) or one for one in said if one]


def _corrected(after: str) -> str | None:
    """What a text says in place of an answer that it has just given; None where it leaves it be."""
    said = [match["said"] for match in _CORRECTED.finditer(after)]
    if not said:
        return None
    formula = _DOLLARS.fullmatch(said[-1])
    return _inside(formula) if formula else said[-1]


def _of_sentence(after: str) -> list[str]:
    """The answer in what follows "the answer is": its first formula, or a number before words, or all of the line.

    Where the sentence goes on with more numbers or formulas ("5 or 6", "$5$, $6$"), these too.
    """
    displayed = _DOLLARS.match(after)  # it may have several lines
    start = displayed.end() if displayed else 0
    rest = after[:start] + re.sub(r"\*\*(?!\d)", "", after[start:].partition("\n")[0].rstrip())
    formula, plain = _DOLLARS.search(rest), _NUMBER_AND_UNIT.match(rest)
    if plain and not displayed:
        said, end = plain[1], plain.end()
    elif formula:
        said, end = _inside(formula), formula.end()
    else:
        said, end = rest.strip(' .*`"'), len(rest)
    stated = [said] if said else []
    while other := _LISTED.match(rest, end):
        stated.append(_inside(other))
        end = other.end()
    return stated


def _inside(match: re.Match[str]) -> str:
    """What stands between the dollars or brackets; of a number without any, the number."""
    return next(text for name, text in match.groupdict().items() if text is not None and name != "mark").strip()
