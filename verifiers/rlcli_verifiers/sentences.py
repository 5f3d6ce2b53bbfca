"""Answers stated without a box: after "the answer is", "Answer:", "A:" or "####", or on the last line."""

from __future__ import annotations

import re

from rlcli_verifiers.alternatives import LISTED, MATHS, inside
from rlcli_verifiers.answers import last_line
from rlcli_verifiers.latex import MAX_CHARS
from rlcli_verifiers.notation import clean, measured, number, with_thousands
from rlcli_verifiers.nouns import ARITHMETIC

_ANSWER = re.compile(
    r"(?:\banswer(?:\s+is\b|\s*+(?:\*++\s*+)?[:=]|\s+(?:was|equals|comes\s+(?:out\s+)?to|(?:would|should|must|will)\s+be)"
    r"(?=\s*[:*]*\s*[-+−\d$\\]))|####|\bAns(?:\.|\s*[:=])|^\W{0,4}(?P<short>(?-i:A))\**\s*:)[\s:*]*+(?=\S)",
    re.IGNORECASE | re.MULTILINE,
)
_ADVERB = re.compile(r"^(?:(?:therefore|thus|hence|simply|just|indeed|clearly|exactly|then|now)\b[,:]?[\s*]*+)+", re.I)
_MAYBE = re.compile(
    r"[^.;\n]{0,40}?\b(?:maybe|perhaps|possibly)\s+(?:even\s+)?\\?\$?(?P<number>-?[\d.,/]*\d)", re.I | re.A
)
_CHOICE_B = re.compile(r"^\W{0,4}B\**\s*[:.)]", re.MULTILINE)
_COMMENT = re.compile(r"(?:correct|right|clear|obvious|reasonable|valid|consistent|sensible|as\s+follows)\b", re.I)
_NUMBER_AND_UNIT = re.compile(
    r"\\?\$?(-?[\d.,/]*\d\s?\\?%?)(?=[.)]?$|[.,;!)]?\s+\(?[a-z]{2}|[.;!,)]\s)", re.IGNORECASE | re.ASCII
)
# Before a formula: words that change the answer. "greater than $5$", "not $5$", "3 times $5$".
_RELATED = re.compile(
    r"[\d=<>+*/^≤≥≠]|\b(?:not|never|neither|less|fewer|greater|more|least|most|above|below|between|twice|half|double"
    r"|triple|thrice|minus|plus|times|negative|opposite|product|sum|difference|quotient|square|root|reciprocal|inverse"
    r"|under|over|up|approaching|either)\b|n't\b",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"\s*+(?:[-+*/^×÷·⋅=<>≤≥±−–]\s*+[\d(\\$.√]|[²³√!]|[xX]\s*+\d|:\d|\(\s*+-?\d+\s*+\)|\d"
    r"|\\(?:times|cdot|div|pm|frac|sqrt)\b|and\s+(?:a|an|one|two|three)[\s-]+[a-z]*(?:th|ths|half|halves|quarters?|thirds?)\b)",
    re.ASCII,
)
_CLAUSE = re.compile(
    r"[^\n]*?(?=[.,;!?)](?:\s|$)|\s\(|\s(?:and|or|because|since|as|which|that|so|for|in|if|when|after|is|are|to)\b|$)"
)
_NEXT_WORD = re.compile(r"[\s(]*([A-Za-z]+)")
_LIST_ITEM = re.compile(r"\d+[.)]\s")
_NAMED = re.compile(r"(?:[A-Za-z](?:_\w)?\s*)?[=≈]\s*")


def statement(text: str) -> str | None:
    """The text after the last "the answer is" or the like; None if there is none."""
    for match in reversed(list(_ANSWER.finditer(text))):
        after = text[match.end() :]
        if not (match["short"] and _CHOICE_B.search(after)) and not _COMMENT.match(after):
            return _ADVERB.sub("", after, count=1)
    return None


def of_sentence(after: str) -> list[str]:
    """The answer in the text after "the answer is": its first formula, or a number and its unit, or the whole line.

    If the sentence continues with more numbers or formulas ("5 or 6", "$5$, $6$"), these too.
    """
    displayed = MATHS.match(after)  # it may have several lines
    start = displayed.end() if displayed else 0
    rest = re.sub(r"\*\*(?!\d)", "", after[start:].partition("\n")[0].rstrip())
    rest = after[:start] + re.sub(r"\s+", " ", rest)
    formula, plain = MATHS.search(rest), _NUMBER_AND_UNIT.match(rest)
    if plain and not displayed:
        said, end = _with_unit(plain[1], rest, plain.end())
    elif formula and not _RELATED.search(rest[: formula.start()]):
        said, end = _with_unit(inside(formula), rest, formula.end())
    else:
        said, end = rest.strip(' .*`"'), len(rest)
    stated = [said] if said else []
    while other := LISTED.match(rest, end):
        stated.append(inside(other))
        end = other.end()
    if maybe := _MAYBE.match(rest, end):
        stated.append(maybe["number"])
    return stated


def of_last_line(text: str, alone: bool = False) -> list[str]:
    r"""A last line that is a formula between dollars or brackets, or a number: `1,234`, `**42**`, `x = 5`, `5 cm`.

    alone: no text may precede it.
    """
    tail = text.strip(" \n\t.*_`")
    for opening, closing in ((r"\[", r"\]"), ("$$", "$$")):
        start = tail.rfind(opening, 0, len(tail) - len(closing))
        if (
            tail.endswith(closing)
            and (start == 0 if alone else start >= 0)
            and (formula := MATHS.fullmatch(tail, start))
        ):
            return [inside(formula)]
    if alone and "\n" in text.strip():
        return []
    last = (last_line(text) or "").strip("*_` ").rstrip("*_` .")
    if formula := MATHS.fullmatch(last):
        return [inside(formula)]
    plain = _NAMED.sub("", last, count=1) if _NAMED.match(last) else last
    if len(plain) > MAX_CHARS or _LIST_ITEM.match(plain) or len(plain.split()) > 4:
        return []
    body = measured(clean(plain)).body
    return [plain] if any(number(reading) for reading in with_thousands(body)) else []


def _with_unit(said: str, rest: str, end: int) -> tuple[str, int]:
    """An answer with following words that change it ("42 million", "5 minus one") or are its unit ("42 km/h")."""
    after = rest[end:]
    clause = _CLAUSE.match(after)
    words = clause[0] if clause else ""
    word = _NEXT_WORD.match(words)
    if _GOES_ON.match(after):
        return rest.strip(' .*`"'), len(rest)
    if not word:
        return said, end
    whole = rf"{said}\text{{{words}}}"
    if word[1].lower().removesuffix("s") in ARITHMETIC or word[1].lower() in ARITHMETIC:
        return whole, end + len(words)
    quantity = measured(clean(whole)) if len(whole) <= MAX_CHARS else None
    if quantity and quantity.unit and not quantity.unit.startswith("#"):
        return whole, end + len(words)
    return said, end
