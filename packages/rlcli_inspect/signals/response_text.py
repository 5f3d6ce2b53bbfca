"""Properties of a response's text: its answers, the ground truth, repetition, language, refusals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache

LONGEST_TRUTH = 64
"""Ground truths above this many characters are tests, essays or tables: they are not expected in a response."""
READ = 20_000
"""Characters of a response that are read: its end."""
REPEATED, MIN_WORDS, MIN_CHARACTERS = 4, 12, 64
"""Repetition is the share of repeated n-grams of this many words, or of twice as many characters in a text of fewer
words; shorter texts repeat nothing."""
OTHER_SCRIPT = 0.3
"""Share of letters in scripts that the prompt does not use, above which a response counts as foreign."""
LANGUAGE_WORDS = 4
"""Function words that decide a language; twice as many as of any other."""
MORE_CHARACTERS = 2
"""An alternative answer in words is at most this much longer than the ground truth."""
PHRASE_CHARACTERS, LONGEST_PHRASE = 300, 4
"""Characters at each end of a response that phrases are looked for in; and words of a phrase."""

_NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
_WHOLE = re.compile(r"-?\d+(?:\.\d+)?")
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_STATEMENT = re.compile(r"(?:answer|result)\s*(?:is|:|=)\s*\**([^\n]*)", re.IGNORECASE)
_OR = re.compile(r"\s+or\s+|\s*[;|]\s*|\s*,\s+(?:and\s+|or\s+)?|\s+and\s+|\n+|\s+/\s+")
_WORD = re.compile(r"[^\W\d_]+|[^\w\s]+|\d+")
_LETTERS = re.compile(r"[^\W\d_]+")
_ASCII = re.compile(r"[a-zA-Z]+")
_REFUSAL = re.compile(
    r"\b(?:i (?:can ?not|can't|won't|am (?:unable|not able) to|'?m (?:unable|not able) to) "
    r"(?:help|assist|answer|provide|comply|do that|fulfil|solve)|as an ai\b|i must decline|i'?m sorry, but i)",
    re.IGNORECASE,
)
_FUNCTION_WORDS = {
    "en": "the of and is that we this with from for are which",
    "de": "der die das und ist nicht wir mit von dass eine sich",
    "fr": "le la les et est que nous une des pour dans qui",
    "es": "el los las y es que una por con para del como",
    "it": "il gli e che di una per sono con della questo",
    "pt": "os as que uma para com não do da em por é",
    "nl": "het een en van dat wij met voor niet zijn deze",
}
_LANGUAGES = {name: frozenset(words.split()) for name, words in _FUNCTION_WORDS.items()}


def final_text(response: str) -> str:
    """The part with the answer: after the last `####`, in the last <answer>, all boxes, or after "the answer is"; empty
    without any of them."""
    text = response.rpartition("</think>")[2][-READ:]
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if tags := _TAG.findall(text):
        return str(tags[-1]).strip()
    if boxes := _BOX.findall(text):
        return "\n".join(boxes)
    statements = _STATEMENT.findall(text)
    return statements[-1].strip() if statements else ""


def answers_in(response: str, truth: str = "0") -> list[str]:
    """The distinct answers that a response offers, as normalized text. truth: normalized; answers are of its kind: a
    number, or a text of about its length. Other parts of the sentence are ignored.

    >>> answers_in("#### 42 or 43"), answers_in("so \\\\boxed{7} or \\\\boxed{8}"), answers_in("#### 1,042")
    (['42', '43'], ['7', '8'], ['1042'])
    >>> answers_in("#### 41 42 43"), answers_in("The answer is A, B or C", "b")
    (['41', '42', '43'], ['a', 'b', 'c'])
    >>> answers_in("The answer is 5, because five are left"), answers_in("The answer is Paris, as we know", "rome")
    (['5'], ['paris'])
    """
    text = final_text(response)
    numeric = bool(_WHOLE.fullmatch(truth))
    parts = [part for part in _OR.split(text) if part.strip()]
    if len(parts) == 1 and len(numbers := _NUMBER.findall(text)) > 1 and not _NUMBER.sub("", text).strip(" ,\n"):
        parts = numbers
    candidates = [normalized(part) for part in parts]
    if numeric:
        answers = [part for part in candidates if _WHOLE.fullmatch(part)]
    else:
        answers = [part for part in candidates if len(part) <= len(truth) + MORE_CHARACTERS]
    return list(dict.fromkeys(filter(None, answers)))


def normalized(text: str) -> str:
    """Text without markup, spaces and case; a number without separators and trailing zeros.

    >>> normalized(" $1,042.00 "), normalized("\\\\text{Yes}.")
    ('1042', 'yes')
    """
    text = re.sub(r"\\(?:text|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", text.strip())
    text = re.sub(r"[\s$*`{}\\]|(?<=\d),(?=\d{3})", "", text).rstrip(".").casefold()
    integer = re.fullmatch(r"(-?\d+)\.0+", text)
    return integer[1] if integer else text


def truth_of(ground_truth: str | None) -> str | None:
    """The ground truth as it can be looked for in a response, of a solution its final answer; None if there is none.

    >>> truth_of("6 * 7 = 42 #### 42"), truth_of("so, after some work, we find \\\\boxed{42}"), truth_of("[]" * 40)
    ('42', '42', None)
    """
    text = truth_text(ground_truth)
    return normalized(text) or None if len(text) <= LONGEST_TRUTH and "\n" not in text else None


def truth_text(ground_truth: str | None) -> str:
    """The final answer of a ground truth, as it is written."""
    text = (ground_truth or "").rpartition("####")[2].strip()
    boxes = _BOX.findall(text)
    return str(boxes[-1]) if boxes else text


def has_truth(response: str, truth: str) -> bool:
    """True if the response contains the normalized ground truth; a number must match a whole number.

    >>> has_truth("so it is 1,042.", "1042"), has_truth("#### 142", "42"), has_truth("it is Yes", "yes")
    (True, False, True)
    >>> has_truth("41, 42, 43", "42"), has_truth("41,42", "42")
    (True, True)
    """
    if _WHOLE.fullmatch(truth):
        numbers = _NUMBER.findall(response[-READ:])
        return any(normalized(number).lstrip("-") == truth.lstrip("-") for number in numbers)
    return truth in normalized(response[-READ:])


def repetition(response: str) -> float:
    """The share of repeated n-grams.

    >>> repetition("so it is " * 20) > 0.9, repetition("one two three four five")
    (True, 0.0)
    """
    units: Sequence[str] = response[-READ:].split()
    n = REPEATED
    if len(units) < MIN_WORDS:
        if len(response) < MIN_CHARACTERS:
            return 0.0
        units, n = response[-READ:], 2 * REPEATED
    grams = [tuple(units[start : start + n]) for start in range(len(units) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def is_refusal(response: str) -> bool:
    """True if the response refuses or apologises for not answering."""
    return bool(_REFUSAL.search(response[-READ:]))


def is_foreign(response: str, prompt: str) -> bool | None:
    """True if a response is in another script or language than its prompt; None if the prompt or the response has too
    few letters to decide.

    >>> is_foreign("因此答案是四十二", "What is six times seven?"), is_foreign("42", "What is six times seven?")
    (True, None)
    """
    prompt_scripts, language = _of_prompt(prompt[-READ:])
    response_scripts = _scripts(response[-READ:])
    if sum(prompt_scripts.values()) < LANGUAGE_WORDS or sum(response_scripts.values()) < LANGUAGE_WORDS:
        return None
    foreign = sum(count for script, count in response_scripts.items() if script not in prompt_scripts)
    if foreign > OTHER_SCRIPT * sum(response_scripts.values()):
        return True
    return bool(language) and _language(response[-READ:]) not in ("", language)


@lru_cache(maxsize=256)
def _of_prompt(prompt: str) -> tuple[Mapping[str, int], str]:
    """Scripts and language of a prompt; cached, since the samples of a group have one prompt."""
    return _scripts(prompt), _language(prompt)


def phrases_in(response: str) -> set[str]:
    """The phrases of a response: up to LONGEST_PHRASE words in a row, without numbers, at least one with letters.

    >>> sorted(phrases_in("I am sure: 42"))
    ['am', 'am sure', 'am sure :', 'i', 'i am', 'i am sure', 'i am sure :', 'sure', 'sure :']
    """
    return phrases_of(words_of(response))


def words_of(response: str) -> list[str]:
    """The words, numbers and marks at both ends of a response, in lower case, with an empty one between the ends."""
    text = response[-READ:].casefold()
    if len(text) <= 2 * PHRASE_CHARACTERS:
        return _WORD.findall(text)
    return [*_WORD.findall(text[:PHRASE_CHARACTERS]), "", *_WORD.findall(text[-PHRASE_CHARACTERS:])]


def phrases_of(words: Sequence[str], known: Container[str] | None = None) -> set[str]:
    """The phrases of a response's words. known: the words that may be in one; None: all."""
    usable = [bool(word) and not word.isdigit() and (known is None or word in known) for word in words]
    letters = [word[:1].isalpha() for word in words]
    phrases = set()
    for start in range(len(words)):
        for end in range(start + 1, min(start + LONGEST_PHRASE, len(words)) + 1):
            if not usable[end - 1]:
                break
            if any(letters[start:end]):
                phrases.add(" ".join(words[start:end]))
    return phrases


def _scripts(text: str) -> Mapping[str, int]:
    """Letters by script, roughly: the block of a letter decides."""
    runs = "".join(_LETTERS.findall(text))
    others = "" if runs.isascii() else _ASCII.sub("", runs)
    letters = {"latin": len(runs) - len(others)} if len(runs) > len(others) else {}
    for letter, count in Counter(others).items():
        script = next(name for end, name in _SCRIPTS if ord(letter) < end)
        letters[script] = letters.get(script, 0) + count
    return letters


_SCRIPTS = (
    (0x250, "latin"),
    (0x370, "latin"),
    (0x400, "greek"),
    (0x530, "cyrillic"),
    (0x590, "armenian"),
    (0x600, "hebrew"),
    (0x780, "arabic"),
    (0xE00, "indic"),
    (0xE80, "thai"),
    (0x1100, "other"),
    (0x1200, "hangul"),
    (0x1E00, "other"),
    (0x2E80, "latin"),
    (0x3040, "han"),
    (0x3100, "kana"),
    (0xAC00, "han"),
    (0xD7B0, "hangul"),
    (0x110000, "other"),
)
"""End of a range of code points, and the script of its letters; mathematical letters count as Latin."""


def _language(text: str) -> str:
    """The language by its function words; empty if it is not clear."""
    words = Counter(_LETTERS.findall(text.casefold()))
    counts = sorted((sum(words[word] for word in function_words), name) for name, function_words in _LANGUAGES.items())
    (second, _), (highest, name) = counts[-2:]
    return name if highest >= LANGUAGE_WORDS and highest >= 2 * second else ""
