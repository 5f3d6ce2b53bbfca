"""Words after a number: nouns that name the counted thing and do not matter, and words that change the number."""

from __future__ import annotations

import re
from functools import lru_cache

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

_NUMERALS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety nil none nought tens twenties ones
    half halves quarter quarters thirds tenths fourths fifths double triple twice thrice pair pairs couple couples trio
    score scores gross grand lakh lakhs crore crores myriad myriads googol googols quadrillion quintillion mil mils k
    hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens mn bn mm"""
_OPERATIONS = """minus plus divided multiplied over squared cubed factorial factorials choose mod modulo point
    raised power powers percent percents percentage base sqrt root sin cos tan cot sec csc arcsin arccos arctan sinh
    cosh tanh log logs ln exp max min lim gcd lcm det abs negative negatives inverse inverses reciprocal
    reciprocals opposite square cube micro milli kilo mega giga nano pico times"""
_DOUBTS = """or and nor not but to less fewer least most than above below under without except excluding short between
    from versus vs unless approx modulus wrong incorrect false maybe perhaps possibly if never no isn isnt plusminus"""

ARITHMETIC = frozenset([*_NUMERALS.split(), *_OPERATIONS.split()])
"""Words that change the number before them."""

_HARMFUL = ARITHMETIC | frozenset(_DOUBTS.split())

_SINGULAR = frozenset(
    re.findall(
        r"\w+",
        """people person men man women woman children child feet fish sheep deer mice geese teeth way item student apple
    piece solution value integer number triangle side edge vertex vertices face digit page book game ball card coin
    marble box bag cup slice ticket car dog cat vote word letter girl boy friend egg table room house tree flower bottle
    matrices indices total more time""",
    )
)
_GENERIC = frozenset(
    re.findall(r"\w+", "way solution unit item thing number integer element time value people person more total")
)
"""Nouns that name nothing in particular."""

_TAIL = re.compile(
    r"\s+(?:in\s+total|in\s+all|total|altogether|overall|left|remaining|each|apiece|long|tall|wide|high|deep|old|away"
    r"|(?:per|an?|of\s+the|of)\s+(?P<of>[a-z]+))$"
)
_PHRASE = re.compile(r"[a-z][a-z'’]*(?:[ -]+[a-z][a-z'’]*){0,4}")


@lru_cache(maxsize=4096)
def noun(text: str) -> str | None:
    """The noun that words count, in the singular; empty for one that names nothing in particular; None otherwise.

    >>> noun("right triangles"), noun("ways in total"), noun("apples left"), noun("minus one"), noun("million dogs")
    ('triangle', '', 'apple', None, None)
    """
    phrase = " " + " ".join(text.lower().split()).rstrip(".,! ")
    if not phrase.strip():
        return None
    tails = [""]
    while tail := _TAIL.search(phrase):
        tails.append(tail["of"] or "")
        phrase = phrase[: tail.start()]
    phrase = phrase.strip()
    if len(tails) > 3 or not all(map(_is_harmless, filter(None, tails))):
        return None
    if not phrase or phrase == "times":
        return ""
    parts = re.split("[ -]+", phrase)
    if not _PHRASE.fullmatch(phrase) or not all(map(_is_harmless, parts)):
        return None
    return _counted(parts[-1])


def _is_harmless(word: str) -> bool:
    return len(word) > 1 and word not in _HARMFUL and not word.endswith(("th", "ths", "illion", "illions"))


def _counted(word: str) -> str | None:
    """A plural, or a noun known to be one, in the singular."""
    singular_form = word
    if re.search(r"(?<![suio])s$", word) and len(word) > 3:
        singular_form = word.removesuffix("s")
        for plural, singular in (("ies", "y"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("sses", "ss")):
            if word.endswith(plural):
                singular_form = word.removesuffix(plural) + singular
    elif word not in _SINGULAR:
        return None
    return "" if singular_form in _GENERIC else singular_form
