"""Texts around a stated answer: boxes that form one list, another answer after an "or", a correction."""

from __future__ import annotations

import re

from rlcli_verifiers.answers import last_box

# Named groups `formula`, `round` and `number` match the other answer.
_CLOSED = r"[\s$*\\)\]}_]*+"  # possessive: long white space costs no more than its length
_OTHER = (
    r"\(?(?:or|and|maybe|possibly|perhaps|else|also|even|\s)*+"
    r"(?:\$(?P<formula>[^$\n]{1,40})\$|\\\((?P<round>[^\n]{1,40}?)\\\)|\**\\?\$?(?P<number>-?[\d.,/]*\d(?:\s?\\?%)?))"
)
# "120 (or else $J$ would have more factors)" gives a reason, not another answer.
_REASON = r"(?!\s{1,8}else\b[^.\n]{0,60}\bwould\b)"
_OR = re.compile(rf"{_CLOSED},?\s*+\(?or\b{_REASON}{_OTHER}", re.IGNORECASE | re.ASCII)
# In a sentence also "5 and 6", "5 to 6", "5, 6, 7"; but not "5, 2 of which".
LISTED = re.compile(
    rf"{_CLOSED}(?:(?P<mark>[,;/~])|,?\s*+\(?(?:or|and|to)\b){_OTHER}(?(mark)(?=\W*(?:$|or\b|and\b|\d)))",
    re.IGNORECASE | re.ASCII,
)
_WORD = r"(?:or|and|also|alternatively|otherwise|possibly|maybe|perhaps|else|versus|vs)\b\.?"
_JOINED = re.compile(
    rf"(?:\s*(?:if|when|assuming|unless)\b[^.!?,;]{{0,40}}+)?(?P<joiner>[\s.,;:/|&~–—-]*+(?:{_WORD}[^.!?]{{0,40}})?)"
    r"(?:[A-Za-z](?:_?\w{1,2})?\s*=\s*)?",
    re.IGNORECASE,
)
_AND_OR = re.compile(r"\\(?:(?P<either>lor|vee|cup)|(?P<both>land|wedge|&))(?![A-Za-z])")
_WRAPPER = re.compile(r"\\(?:text(?:rm|bf|it|sf|normal)?|math(?:rm|bf|it|sf)|mbox|emph|underline)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:[a-z]{4,12}|big|Big)(?![A-Za-z])|\\[^A-Za-z]|[$*_`()\[\]{}#>]")
_TAKEN_BACK = re.compile(
    r"\b(?:no|not|wait|actually|rather|instead|sorry|correction|mistake|wrong|incorrect|check)\b", re.IGNORECASE
)
_CORRECTED = re.compile(
    r"\b(?:wait|actually|correction|scratch\s+that|on\s+second\s+thought|sorry)\b[,:.;—–-]*"
    r"(?:\s*\b(?:no|it|its|it's|is|should|must|be|that|the|answer|so|actually|make|to)\b[,:.]*)*\s*"
    r"(?P<number>\$[^$\n]+\$|\\\(.+?\\\)|-?[\d.,/]*\d)(?=\s*(?:[.!;\n]|$|instead\b))",
    re.IGNORECASE | re.ASCII,
)
MATHS = re.compile(
    r"\$\$(?P<double>[^$]+)\$\$|(?<!\\)\$\$?(?P<dollars>[^$\n]+)(?<!\\)\$\$?|\\\((?P<round>.{1,400}?)\\\)"
    r"|\\\[(?P<square>[\s\S]{1,400}?)\\\]"
)
"""A formula between dollars or brackets, possibly displayed on several lines."""


def inside(match: re.Match[str]) -> str:
    """The text between the dollars or brackets; for a number without any, the number."""
    return next(text for name, text in match.groupdict().items() if text is not None and name != "mark").strip()


def last_boxes(text: str, found: list[tuple[int, int, str]]) -> list[str]:
    r"""The last box, or all boxes at the end that form one list, however joined: `\(\boxed{41}\) or \(\boxed{42}\)`."""
    said = [found[-1][2]]
    for (_, end, content), (start, _, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        if not _are_joined(text[end:start]):
            break
        if content not in said:
            said.insert(0, content)
    other = _OR.match(_spoken(text[found[-1][1] :], wrappers_only=True))
    if other and inside(other) not in said:
        said.append(inside(other))
    return [last_box(one) or one for one in said if one]


def corrected(after: str) -> str | None:
    """The answer with which a text replaces the one just before it; None if it does not."""
    said = [match["number"] for match in _CORRECTED.finditer(after)]
    if not said:
        return None
    formula = MATHS.fullmatch(said[-1])
    return inside(formula) if formula else said[-1]


def _are_joined(between: str) -> bool:
    """Whether the text between two boxes makes them one list: "and", "or", a comma, or nothing at all."""
    if len(between) > 400:
        return False
    plain = _spoken(between)
    match = _JOINED.fullmatch(plain)
    if not match or _TAKEN_BACK.search(plain):
        return False
    return bool(re.search(r"[\w,;/|&~]", match["joiner"])) or "\n\n" not in between


def _spoken(text: str, wrappers_only: bool = False) -> str:
    r"""The words of a text that contains LaTeX: `\) \text{ or } \(` is "or"."""
    text = _AND_OR.sub(lambda match: " or " if match["either"] else " and ", text)
    text = _WRAPPER.sub(r" \1 ", text)
    return text if wrappers_only else _LAYOUT.sub(" ", text)
