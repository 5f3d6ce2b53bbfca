r"""Answers in words: the letter of a choice, the word that a sentence ends with, a box that holds a sentence.

They are read only for a ground truth of that kind, which says what a sentence with several things states.
"""

from __future__ import annotations

import re

from rlcli_verifiers.units import unit
from rlcli_verifiers.values import masked

MAX_CHARS = 600
"""Maximum length of a sentence or a box that is read."""

_MARKUP = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\b|[*_`${}]|\\[()\[\],;! ]")
_LETTER = r"[(\[]?(?P<letter>[A-J])(?![A-Za-z'’\d])[)\]]?"
_NOUN = r"(?:option|choice|letter|answer|alternative|statement)"
_IS = r"(?:is|was|must\s+be|should\s+be|has\s+to\s+be|would\s+be|will\s+be|:|=)"
_CHOICE_STATED = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf",\s*(?:option|choice)\s*(?-i:{_LETTER})\W*$",
        rf"\b{_NOUN}\s*{_IS}[\s:]*(?:therefore|thus|then|simply)?[\s,:]*(?:{_NOUN}\s*)?(?-i:{_LETTER})(?!\s+[a-z]+s\b)",
        rf"\b{_NOUN}\s*(?-i:{_LETTER})\s*(?:is|must\s+be)\s+(?:therefore\s+|thus\s+|indeed\s+)?(?:the\s+)?"
        rf"(?:correct|right|answer|true|best|solution|only\s+(?:correct|right))",
        rf"\b(?:choose|pick|select|match(?:es)?|with|(?:corresponds?|equals?|belongs?|leads?)\s+to|which\s+is|that\s+is|is|it's"
        rf"|means)\s+(?:the\s+)?(?:{_NOUN}\s*)(?-i:{_LETTER})",
        rf"\b(?:I|we)\s+(?:choose|pick|select)\s+(?-i:{_LETTER})",
        rf"^(?:(?:so|thus|hence|therefore|finally)\b[\s,:]*(?:it\s+is\s+|it's\s+)?(?:{_NOUN}\s*)?|{_NOUN}\s*)(?-i:{_LETTER})\W*$",
        rf"(?:^|[,;:]\s*|\b(?:so|thus|hence|therefore)\b[\s,:]*)(?-i:{_LETTER})\s+is\s+(?:therefore\s+|thus\s+)?(?:the\s+)?(?:correct|right|answer)",
        rf"\bgo(?:ing)?\s+with\s+(?:{_NOUN}\s*)?(?-i:{_LETTER})",
        rf"^\W{{0,4}}(?-i:{_LETTER})(?:[.:]?\W*$|(?:(?<=\))|\s?[.:])\s*(?!.*\b[A-J][).:])\S.*$)",
    )
)
"""Statements of a choice in a sentence without markup."""

_IN_BRACKETS = re.compile(r"\(([A-J])\)")
_ENDS_IN_LETTER = re.compile(r"(?:\([A-J]\)|(?i:\b(?:option|choice))\s+\(?[A-J]\)?)\W*$")
_CONCLUSION = re.compile(r"[,;]\s*(?:so|thus|hence|therefore|which\s+means(?:\s+that)?)\s+(?=\S)", re.IGNORECASE)
_ALSO = re.compile(
    r"(?<![A-Za-z'’])[(\[]?(?P<letter>[A-J])[)\]]?\s+(?:is\s+also|is\s+possible|works\s+too|also\s+works|(?:could|might|may)\s+(?:also\s+)?be)\b"
)
_LABEL = re.compile(r"\W{0,4}[A-J]\s*[).:]")
_OTHER_LETTER = re.compile(r"(?<![A-Za-z'’\d])[(\[]?([A-J])[)\]]?(?![A-Za-z'’\d])")
_RULED_OUT = re.compile(
    r"[,;(]?\s*\b(?:and\s+|but\s+)?(?:not|rather\s+than|instead\s+of)\s+(?:option\s+|choice\s+)?[(\[]?[A-J](?![A-Za-z])[)\]]?"
    r"(?:\s*(?:,|or|nor|and)\s*[(\[]?[A-J](?![A-Za-z])[)\]]?)*"
)
_BEFORE_OTHER = re.compile(r"\b(?:or|and|either|both)\W*(?:\w+\W+)?$|[,/&]\W*$", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:not|never|no|nor|neither|cannot|wrong|incorrect|false|except|unless|if|either|maybe|perhaps|possibly|probably"
    r"|might|may|could|guess|unsure|unclear|assum\w+|suppos\w+|whether|rather|started|began|begins|starts|initially"
    r"|originally)\b|n[’']t\b|\?",
    re.IGNORECASE,
)
"""Words of a sentence that denies, doubts or delays what it ends with."""

_VERB = (
    r"(?:is|are|be|becomes?|remains?|was|were|facing|faces|represents?|describes?|(?:we|I)\s+(?:get|have|obtain)"
    r"|falls?\s+on|lands?\s+on"
    r"|[Ii]t[’']s|[Tt]hat[’']s|forms?|consists?\s+of|called|point(?:s|ing)|on)"
)
_ADVERB = (
    r"(?:therefore|thus|hence|indeed|clearly|always|now|simply|exactly|in\s+fact|due|called|named"
    r"|definitely|also|on|to)"
)
_ENDS_IN = re.compile(
    rf"\b{_VERB}\s+(?:{_ADVERB}\s+)*[*_\"'“]*(?:the\s+(?:equation|graph|case)\s+of\s+)?(?:(?:an?|the)\s+)?[*_\"'“]*"
    r"(?P<phrase>[A-Za-z][A-Za-z'-]+(?:\s+[A-Za-z'-]+){0,2})[*_\"'”]*"
    r"(?:,?\s+(?:centered|centred|with|of\s+radius|whose|having|because|since)\b(?![^.!?]*\b(?:or|if|but)\b)[^.!?]{1,80})?"
    r"(?:,\s*(?:not|and\s+not|rather\s+than)\s[^.!?\0]{1,30})?[.!]?[*_\"'”]*$"
)
_DATE = re.compile(
    r"\b(?P<phrase>(?:\d{1,2}(?:st|nd|rd|th)?\s+(?:of\s+)?)?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
    r"(?:\s+\d{1,2}(?:st|nd|rd|th)?)?(?:,?\s+\d{4})?)[*_.!\s]*$"
)
_NONEXISTENT = re.compile(r"\b(?P<phrase>does\s+not\s+exist)\W*$", re.IGNORECASE)
_NEITHER = re.compile(r"\bis\s+(?P<phrase>neither)\s+\w+\s+nor\s+\w+\W*$", re.IGNORECASE)
_AFTER_SIGN = re.compile(r"[:=→]\s*[*_]*(?P<phrase>[A-Za-z]{3,})[*_.!]*$")
_SUPERLATIVE = re.compile(
    r"\W*(?:(?:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore|[Ff]inally)\b[\s,]*)?(?!(?:It|This|That|He|She|They|There|We|The|These|Each|One|What|Who)\b)"
    r"(?P<phrase>[A-Z][a-z]+)\s+(?:is|was|has|had|ran|drove)\s+the\s+(?!second|third|next)(?:[a-z]+est|most|winner|oldest|youngest)\b[^,;.!?]{0,60}[.!]?\W*$"
)
"""A name at the start of a sentence, "So Evelyn is the fastest.\""""

_ASIDE = re.compile(
    r"(?<=[A-Za-z*])\s*\((?!(?!not\s+an?\s)[^()]*\b(?:or|not|maybe|perhaps|possibly|if)\b)[^()]{1,60}\)(?=\W*$)"
)
_WHOLE = re.compile(
    r"[*_#>\s]*(?:(?:an?|the)\s+)?(?P<phrase>[A-Za-z][A-Za-z'-]+(?:\s+[A-Za-z'-]+){0,2})[*_.!\s]*", re.IGNORECASE
)
_ALTERNATIVE = re.compile(r"\b(?:or|and|nor|but)\b")
_YES = re.compile(
    r"\W*(?:(?:so|thus|hence|therefore)\W+)?[*_]*(?P<word>yes|no)\b(?=\W*$|[*_]*[,.;:—–-])(?![^.]*\b(?:but|however)\b)",
    re.IGNORECASE,
)

_GENERIC_NOUNS = (
    "function number integer triangle curve graph sequence series angle relation conic section shape quadrilateral"
    " polygon figure matrix event events vectors lines set direction one statement value option solutions solution"
)
_GENERIC = re.compile(rf"\s+(?:{'|'.join(_GENERIC_NOUNS.split())})$")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")

_BOXED_SENTENCE = re.compile(r"\s*\\(?:text(?:bf|rm|it|normal)?|mathrm|mbox)\s*\{\s*(?P<words>[A-Z]?[a-z]{2,}[^{}]*)\}")
_GROUPS = re.compile(r"\\(?:text(?:bf|rm|it|normal)?|mathrm|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"\s*(?:[A-Z]?[a-z]+)?(?:\s+[a-z]|\s*[:=]|\s*$)|[A-Z]?[a-z]{3}")
_INTRODUCES = re.compile(
    r"(?:\b(?:is|are|equals|be|exactly|option|choice)\b|[:=])\s*(?=\$|[-+−(]?\d|\\|\(?(?-i:[A-J])\)?\.$)", re.IGNORECASE
)


def chosen(sentence: str) -> list[str]:
    """The letter of the choice that a sentence states, several if it states several; none if it states none.

    >>> chosen("$x=5$, so the correct option is **(E)**."), chosen("It is option C or D."), chosen("Not option C.")
    (['E'], ['C', 'D'], [])
    """
    if len(sentence) > MAX_CHARS:
        return []
    text = " ".join(_RULED_OUT.sub(" ", _MARKUP.sub(" ", sentence)).split())
    text = re.sub(r"([(\[])\s+|\s+([)\]])", r"\1\2", text)
    text = _CONCLUSION.split(text)[-1]
    if _DENIED.search(text):
        return []
    matches = [match for pattern in _CHOICE_STATED for match in pattern.finditer(text)]
    if not matches:
        in_brackets = _IN_BRACKETS.findall(text)
        return list(dict.fromkeys(in_brackets)) if in_brackets and _ENDS_IN_LETTER.search(text) else []
    last = max(matches, key=lambda match: match.start("letter"))
    rest = text[last.end("letter") :]
    joined = [
        other[1]
        for other in _OTHER_LETTER.finditer(rest)
        if _BEFORE_OTHER.search(rest[: other.start()]) and not re.match(r"\s+[a-z]", rest[other.end() :])
    ]
    return list(dict.fromkeys([*(match["letter"] for match in matches), *joined]))


def also_chosen(text: str) -> list[str]:
    """The letters that the last line offers with another, "B is also possible"; none if it offers none."""
    letters = [match["letter"] for match in _ALSO.finditer(text[-MAX_CHARS:].strip().rpartition("\n")[2])]
    return ["?", *letters] if letters else []


def is_labelled(line: str) -> bool:
    """True for a line of a question's choices, `(B) 12`."""
    return bool(_LABEL.match(line))


def ending(sentence: str) -> list[str]:
    """The word or phrase that a sentence ends with or consists of: "which is an **ellipse**"; none if the words before
    deny it.

    >>> [ending(text) for text in ("So f is an odd function.", "It is not odd.", "Ellipse", "It is red or blue.")]
    [['odd function'], ['not odd'], ['Ellipse'], []]
    """
    if len(sentence) > MAX_CHARS:
        return []
    prose = masked(sentence)
    if match := _YES.match(prose):
        return [match["word"]]
    if match := _NONEXISTENT.search(prose) or _NEITHER.search(prose):
        return [match["phrase"]]
    if (match := _SUPERLATIVE.match(prose)) and not _DENIED.search(prose):
        return [match["phrase"]]
    prose = _ASIDE.sub("", prose)
    match = _DATE.search(prose) or _last_clause(prose) or _AFTER_SIGN.search(prose) or _WHOLE.fullmatch(prose)
    if not match or _ALTERNATIVE.search(match["phrase"]):
        return []
    before = prose[: match.start("phrase")]
    if _DENIED.search(before) or re.search(r"\b(?:or|both)\W+(?:an?\s+|the\s+)?\W*$", before):
        return []
    return [match["phrase"]]


def _last_clause(prose: str) -> re.Match[str] | None:
    """The last verb and the phrase after it, which ends the sentence."""
    last = None
    for verb in re.finditer(rf"\b{_VERB}\b", prose):
        last = _ENDS_IN.match(prose, verb.start()) or last
    return last


def same_phrase(gold: str, phrase: str) -> bool:
    """True if a phrase is the ground truth with an article or a noun that says nothing more: "an odd function", "odd".

    >>> same_phrase("odd", "odd function"), same_phrase("ellipse", "an ellipse"), same_phrase("odd", "even function")
    (True, True, False)
    """
    plain = _ARTICLE.sub("", " ".join(phrase.casefold().split()))
    plain = "does not exist" if plain == "dne" else plain
    return _ARTICLE.sub("", gold) in (plain, _GENERIC.sub("", plain))


def boxed_sentence(content: str) -> str | None:
    r"""The sentence in a box, with its formulas between dollars: of `\text{Area is } 5\pi`, "Area is $5\pi$.".

    None if the box does not begin with words that introduce an answer, or if it denies or doubts something.
    """
    first = _BOXED_SENTENCE.match(content)
    if not first or len(content) > MAX_CHARS:
        return None
    parts, start = list[str](), 0
    for group in _GROUPS.finditer(content):
        formula = content[start : group.start()].strip(" ~.")
        if _WORDS.match(group[1]) and not (formula and unit(group[1], True)):
            parts += [f" ${formula}$ " if formula else "", group[1]]
            start = group.end()
    formula = content[start:].strip(" ~.")
    parts.append(f" ${formula}$" if formula else "")
    sentence = " ".join("".join(parts).split()).rstrip(".") + "."
    return sentence if _INTRODUCES.search(sentence) and not _DENIED.search(masked(sentence)) else None
