"""Texts around a stated answer: boxes that form one list, another answer that is offered with it, a correction."""

from __future__ import annotations

import re

from rlcli_verifiers.answer_words import FOREIGN_OR
from rlcli_verifiers.answers import last_box
from rlcli_verifiers.values import FORMULA, Value, content, value_at

MAX_REST_CHARS = 400
"""Characters after a box in which another answer is looked for."""
MAX_ALTERNATIVES = 40
MAX_GAP_CHARS = 60
"""Maximum length of the text between an answer and a word like "or", and between a "maybe" and its number."""

_CLOSED = r"[\s$*\\)\]}_`–—−]*+"  # possessive: long white space costs no more than its length
_FILLERS = (
    r"(?:(?:or|and|also|even|else|it|its|is|as|that|this|the|answer|option|value|simply|just|rather|equivalently|equals?|be"
    r"|could|can|might|may|would|maybe|possibly|perhaps|either|alternatively|otherwise|instead|both|to|in|other|words"
    r"|negative|minus|plus|not|of)\b[,:]?|[\s(*_`,:]|(?:\\text|\\mathrm|\\mbox)\s*\{|\}|\\quad|\\qquad|\\[;,!])*+"
)
_UNIT = r"(?:(?<=[\s~}])(?!(?:or|and|is)\b)[A-Za-z/²³]{1,12}\b\.?\s*+){1,3}"
"""A unit or noun after an answer, of up to three words."""

_SPOKEN_OR = r"(?:or|alternatively|otherwise|versus|vs\.?|maybe|perhaps|possibly|else)\b"
_OR_SIGNS = rf"\\(?:lor|vee)(?![A-Za-z])|∨|{FOREIGN_OR}"
_REASON = r"(?!\s{1,8}else\b[^.\n]{0,60}\bwould\b)"
""" "120 (or else $J$ would have more factors)" gives a reason, not another answer."""

_NEGATION = re.compile(r"\b(?:not|instead\s+of)\b", re.IGNORECASE)
"""A value after such a word is no element of a list: "42, not 43"."""

_ASIDE = rf"(?:\((?!\s*(?:or|and|maybe|perhaps|possibly|not|i\.?e)\b)[A-Za-z][^()\n\d]{{0,40}}\){_CLOSED})?"
"""Meaning of an answer, "7 (inclusive)"."""

_OR = re.compile(
    rf"{_CLOSED}{_UNIT}{_CLOSED}[.,;]?\s*+\(?(?:{_SPOKEN_OR}|{_OR_SIGNS}){_REASON}{_FILLERS}", re.IGNORECASE | re.ASCII
)
_BARE_OR = re.compile(
    rf"{_CLOSED}{_ASIDE}[.,;]?\s*+\(?(?:{_SPOKEN_OR}|{_OR_SIGNS}){_REASON}{_FILLERS}", re.IGNORECASE | re.ASCII
)
_LISTED = re.compile(
    rf"{_CLOSED}(?P<aside>{_ASIDE})(?:(?P<mark>[,;/~&])\s*+(?:(?:and|or)\b)?|,?\s*+\(?(?:or|and|to)\b){_FILLERS}",
    re.IGNORECASE | re.ASCII,
)
_ANOTHER_THING = re.compile(rf"{_CLOSED}{_UNIT}{_CLOSED},?\s*+(?:and|&)\s++(?=[\d$\\−-])", re.IGNORECASE | re.ASCII)
_CONDITIONAL = re.compile(
    rf"{_CLOSED}(?:if|when|for|where|at)\b[^.;\n]{{0,{MAX_GAP_CHARS}}}?(?:,|;|\band|\bor|\bbut|\botherwise|\belse)(?:\s+(?:else|otherwise),?)?\s(?=[\d$\\−-])"
    rf"(?:(?<=else\s)|(?<=otherwise\s)|(?=[^.\n]{{1,40}}?\b(?:if|when|for|at|otherwise|else)\b))",
    re.IGNORECASE,
)
"""Several answers by cases, "$48$ if $n$ is even and $24$ if $n$ is odd"."""
_CASE = r"(?:if|when|assuming|provided|counting|including|excluding|unless|should|in\s+case)\b"
_SUBJUNCTIVE = re.compile(
    r"\b(?:would|were|had|could|might|not|never|no|cannot)\b|n[’']t\b|[a-z]ed\s+\w+,", re.IGNORECASE
)
_OTHER_CASE = re.compile(
    rf"{_CLOSED}(?:{_UNIT}{_CLOSED})?[.,;:]?\s*+[—–(]?\s*+(?:(?:or|but|and|while|although|though)\b,?\s+)?{_CASE}"
    rf"(?P<case>[^.;\n$\d\\]{{1,{MAX_GAP_CHARS}}}?(?:,|\b(?:it|is|are|becomes?|get|gives?|then|have|it[’']s))\s+)"
    r"(?=[\d$\\−-])",
    re.IGNORECASE,
)
"""Another answer in another case: "$14$, or if we include zero, $15$"; "(if we did, it would be $15$)" is a remark."""
_ELSE = re.compile(
    rf"{_CLOSED}[^.\n$\d\\]{{0,{MAX_GAP_CHARS}}}\b(?:otherwise|else)\b,?\s+(?:it\s+is\s+|it[’']s\s+)?(?=[\d$\\−-])",
    re.IGNORECASE,
)
_NUMBER_ALSO = re.compile(
    r"[^\n]{0,80}?[\s(,;](?:"
    r"(?:some|one|others)\s+(?:people\s+)?(?:might|would|may|could)\s+(?:say|argue|claim|answer)\s+(?=\$?-?\d)"
    r"|(?=\$?-?\d[\d.,/]*+\$?\s+(?:(?:is|would|could|might|may)\s+also|also\s+works|works\s+too|is\s+(?:acceptable|possible|plausible))\b"
    r"(?!\s+(?:not|too|less|greater|even|odd|prime|an?\s|divisible))))",
    re.IGNORECASE | re.ASCII,
)
"""Another answer that is also allowed, "but 11 is also acceptable"."""
_CASE_IN_BRACKETS = re.compile(
    rf"{_CLOSED}(?:{_UNIT}{_CLOSED})?\(\s*+(?=[^()\n]{{1,{MAX_GAP_CHARS}}}?\b{_CASE})", re.IGNORECASE
)
"""The same in brackets, "14 (15 if zero counts)"."""
_CASE_AFTER = re.compile(rf"\$?(?:\s+[a-z]+){{0,2}}\s+{_CASE}(?P<case>[^()\n]{{0,{MAX_GAP_CHARS}}})", re.IGNORECASE)
_END_OF_ITEM = re.compile(r"[\s*_`)\]}.!]*(?:$|\n|[,;/~]|(?:or|and)\b)", re.IGNORECASE)
_DOUBT = re.compile(
    rf"[^.;\n]{{0,{MAX_GAP_CHARS}}}?\b(?:maybe|perhaps|possibly|(?:could|might|may|can)\s+(?:also\s+|as\s+well\s+)?be|alternatively)\b{_FILLERS}",
    re.IGNORECASE,
)
_ABOUT = re.compile(r"(?:about|approximately|approx\.?|roughly|around|nearly|≈|\\approx|~)\s*$", re.IGNORECASE)
_ABOUT_NEXT = re.compile(
    r"(?:(?:about|approximately|approx\.?|roughly|around|nearly)\b|≈|\\approx(?![A-Za-z])|~)\s*", re.IGNORECASE
)
_LETTER = re.compile(r"(?<![A-Za-z\\])(?:[b-hj-z]|[A-HJ-Z])(?=[\s*_`)\]}.!?,;]*(?:$|\n))")

_WORD = r"(?:or|and|also|alternatively|otherwise|possibly|maybe|perhaps|else|versus|vs)\b\.?"
_JOINED = re.compile(
    rf"(?:\s*(?:if|when|assuming|unless)\b[^.!?,;]{{0,40}}+)?(?P<joiner>[\s.,;:/|&~–—-]*+(?:{_WORD}[^.!?]{{0,40}})?)"
    r"(?:[A-Za-z](?:_?\w{1,2})?\s*=\s*)?",
    re.IGNORECASE,
)
_NEXT_CASE = re.compile(
    r"[\s.,;]*(?:(?:case|option|interpretation|scenario|method|approach|answer|possibility)\s+(?:\d|two|three|b|c|ii)\b|without\b|otherwise\b"
    r"|if\s+not\b|second\s+(?:approach|method|case)\b)[^.!?\n]{0,80}",
    re.IGNORECASE,
)
"""Between two boxes: the second one is for another case or found in another way."""

_OTHER_CONDITION = re.compile(
    r"[\s.,;]*(?:(?:and|but)\s+)?if\b[^.!?\n]{0,40}?(?:\bnot\b|n[’']t\b|\bdo(?:es)?\b)[^.!?\n]{0,40}", re.IGNORECASE
)
"""Between two boxes: the second one is for the opposite case, "If they don't: "."""
_ALTERNATIVELY = re.compile(
    r"\b(?:alternatively|otherwise)\b[^\n]{0,120}?\banswer\s+(?:is|(?:would|could|might|may)\s+be)\s+(?=[\d$\\−-])",
    re.IGNORECASE,
)
"""Another answer in a later sentence, "Alternatively, if we count the ends, the answer would be 16"."""

_AND_OR = re.compile(r"\\(?:(?P<either>lor|vee|cup)|(?P<both>land|wedge|&))(?![A-Za-z])")
_WRAPPER = re.compile(r"\\(?:text(?:rm|bf|it|sf|normal)?|math(?:rm|bf|it|sf)|mbox|emph|underline)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:[a-z]{4,12}|big|Big)(?![A-Za-z])|\\[^A-Za-z]|[$*_`()\[\]{}#>]")
_TAKEN_BACK = re.compile(
    r"\b(?:no|not|wait|actually|rather|instead|sorry|correction|mistake|wrong|incorrect|check)\b", re.IGNORECASE
)
_NEW_VALUE = r"\**(?P<number>\$[^$\n]+\$|\\\(.+?\\\)|-?[\d.,/]*\d|\(?(?-i:[A-J])\)?)\**(?=\s*(?:[.!;\n]|$|instead\b))"
_CORRECTED = re.compile(
    r"\b(?:wait|actually|correction|scratch\s+that|on\s+second\s+thought|sorry|no(?=,?\s+(?:it|that|the\s+answer)\b))\b[,:.;—–-]*"
    r"(?:\s*\b(?:no|it|its|it's|is|should|must|be|that|the|answer|so|actually|make|to)\b[,:.]*)*\s*"
    rf"{_NEW_VALUE}",
    re.IGNORECASE | re.ASCII,
)
_CORRECTED_LATER = re.compile(
    r"\b(?:wait|oops|hold\s+on|hmm+|actually|correction|mistake|sorry|scratch\s+that)\b[^\n$]{0,120}?"
    r"\b(?:answer|it|total|count|value|result|number|that)(?:[’']s|\s+(?:is|should\s+be|must\s+be|becomes|equals|actually\s+is))"
    rf"\s+(?:actually\s+|now\s+|really\s+|then\s+)?(?:option\s+)?{_NEW_VALUE}",
    re.IGNORECASE | re.ASCII,
)
"""The same with more words: "Oops, I forgot zero, so it is 12."."""


def offered(text: str, start: int, is_list: bool = False) -> list[str]:
    """The other answers that a text offers after the one that ends at `start`: "or $4$", "cm or 4 cm", ", maybe \\pi".

    is_list: "5 and 6", "5 to 6" and "5, 6, 7" offer several too; but "5, 2 of which are red" does not.
    """
    answers: list[str] = []
    while len(answers) < MAX_ALTERNATIVES:
        other = _next_alternative(text, start, is_list)
        if other is None:
            break
        answers.append(f"\\approx {other.content}" if _ABOUT.search(text[start : other.start]) else other.content)
        start = other.end
    doubt = _DOUBT.match(text, start)
    if not answers and doubt and (maybe := value_at(text, doubt.end())):
        answers.append(maybe.content)
    return answers


def _next_alternative(text: str, start: int, is_list: bool) -> Value | None:
    for pattern in (_BARE_OR, _OR, _CONDITIONAL, *([_LISTED, _ANOTHER_THING] if is_list else [])):
        joiner = pattern.match(text, start)
        if not joiner or (pattern in (_LISTED, _ANOTHER_THING) and _NEGATION.search(joiner[0])):
            continue
        about = _ABOUT_NEXT.match(text, joiner.end())
        at = about.end() if about else joiner.end()
        other = value_at(text, at) or _letter_at(text, at)
        if other and (
            pattern is not _LISTED or not joiner["mark"] or joiner["aside"] or _END_OF_ITEM.match(text, other.end)
        ):
            return other
    return _in_other_case(text, start)


def _in_other_case(text: str, start: int) -> Value | None:
    """The number that a text states for another case than that of the answer before it."""
    match = _OTHER_CASE.match(text, start)
    if match and _SUBJUNCTIVE.search(match["case"]):
        match = None
    if match := match or _ELSE.match(text, start) or _NUMBER_ALSO.match(text, start):
        other = value_at(text, match.end())
    elif in_brackets := _CASE_IN_BRACKETS.match(text, start):
        other = value_at(text, in_brackets.end())
        case = _CASE_AFTER.match(text, other.end) if other else None
        if case is None or _SUBJUNCTIVE.search(case["case"]):
            return None
    else:
        return None
    return None if other is None or other.is_name or re.search("[=<>]", other.content) else other


def _letter_at(text: str, at: int) -> Value | None:
    """A single letter at the end of a line, "3 or x"."""
    letter = _LETTER.match(text, at)
    return Value(letter.start(), letter.end(), letter[0], False) if letter else None


def last_boxes(text: str, marked: list[tuple[int, int, str]]) -> list[str]:
    r"""The last box, or all boxes at the end that form one list, however joined: `\(\boxed{41}\) or \(\boxed{42}\)`."""
    answers = [*joined_before(text, marked, by_nothing=True), marked[-1][2]]
    rest = _spoken(text[marked[-1][1] :], wrappers_only=True)
    answers += offered(rest, 0)
    later = _ALTERNATIVELY.search(rest[:MAX_REST_CHARS])
    if later and (other := value_at(rest, later.end())):
        answers.append(other.content)
    return [last_box(answer) or answer for answer in dict.fromkeys(answers) if answer]


def joined_before(text: str, marked: list[tuple[int, int, str]], by_nothing: bool = False) -> list[str]:
    """Contents of the boxes or tags before the last one, as far as they form one list with it.

    by_nothing: those that only follow each other are one list too.
    """
    answers: list[str] = []
    for (_, end, content_before), (start, _, _) in zip(marked[-2::-1], marked[:0:-1], strict=True):
        if not _are_joined(text[end:start], by_nothing):
            break
        answers.insert(0, content_before)
    return answers


def corrected(rest: str) -> str | None:
    """The answer with which a text replaces the one just before it; None if it does not."""
    matches = sorted(
        [*_CORRECTED.finditer(rest), *_CORRECTED_LATER.finditer(rest)], key=lambda match: match.start("number")
    )
    numbers = [match["number"] for match in matches]
    if not numbers:
        return None
    formula = FORMULA.fullmatch(numbers[-1])
    return content(formula) if formula else numbers[-1]


def _are_joined(between: str, by_nothing: bool) -> bool:
    """True if the text between two boxes makes them one list: "and", "or", a comma, or nothing at all."""
    if len(between) > 400:
        return False
    plain = _spoken(between)
    if _OTHER_CONDITION.fullmatch(plain):
        return True
    if _NEXT_CASE.fullmatch(plain) and not _TAKEN_BACK.search(plain):
        return True
    match = _JOINED.fullmatch(plain)
    if not match or _TAKEN_BACK.search(plain):
        return False
    return bool(re.search(r"[\w,;/|&~]", match["joiner"])) or (by_nothing and "\n\n" not in between)


def _spoken(text: str, wrappers_only: bool = False) -> str:
    r"""The words of a text that contains LaTeX: `\) \text{ or } \(` is "or"."""
    text = _AND_OR.sub(lambda match: " or " if match["either"] else " and ", text)
    text = _WRAPPER.sub(r" \1 ", text)
    return text if wrappers_only else _LAYOUT.sub(" ", text)
