"""Questions with lettered choices."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers.answer_words import foreign_statements
from rlcli_verifiers.answers import OPEN_THINK, boxes, judged, no_answer

ANSWER_KIND = "choice"
ROW_OPTIONS = ("count", "truth")

LETTERS = "ABCDEFGHIJ"

MAX_CHARS = 2000
"""Maximum length of a statement that is read."""

_PHRASE = re.compile(
    # The first letters of all phrases: most positions fail early.
    r"\b(?=[acgionsw])(?:answer(?:\s+choice)?\W{0,4}\s*(?:is|would\s+be|must\s+be|should\s+be|[:=])"
    r"|correct\s+(?:option|choice)\s*(?:is|:)|I\s+(?:choose|pick|select)|go(?:ing)?\s+with"
    r"|actually,?(?:\s+(?:it|that)(?:'s|\s+is))?"
    # Retraction of an answer, if only a letter follows.
    r"|(?:no|wait|sorry|correction|scratch\s+that|on\s+second\s+thought)\b[,.:;!\s—–-]*(?:(?:it|that)(?:'s|\s+is))?"
    r"(?=[\s*(]*[A-J][)*]*\s*(?:[.,;!\n]|\Z)))"
    r"[\s:*]*(?:(?:option|choice|letter)\s+)?(?=\S)",
    re.IGNORECASE,
)
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed)\b|[*_`${}\\]")
_LETTER = re.compile(r"\(?(?P<letter>[A-J])(?![A-Za-z'])(?P<close>\)|\.|:)?(?P<rest>.*)", re.DOTALL)
_ANOTHER = re.compile(r"\s*(?:,|/|&|\||;|or\b|and\b|,\s*(?:or|and)\b)\s*(?:maybe\s+|option\s+)?\(?[A-J](?![A-Za-z'])")
_BRACKETED = re.compile(r"\[\s*([A-J])\s*\]")
_CONNECTIVE = (
    r"(?i:(?:so|thus|hence|therefore|then|and|which|that|this|it|is|i\.?e\.?|corresponds?\s+to|matches|the|correct|answer"
    r"|option|choice|letter)(?![A-Za-z])|→|⇒|=>|\\(?:to|implies|[Rr]ightarrow)(?![A-Za-z]))"
)
_AFTER_VALUE = re.compile(
    rf"(?:\s|[.,:;*$\])]|\\[\]),;!]|\\q?quad(?![A-Za-z]))*+(?:{_CONNECTIVE}[\s.:,*$]*+)*+"
    r"\(?(?P<letter>[A-J])(?![A-Za-z'])\)?[\s.*$)]*"
)
"""All of the text after a box with the value of the choice, if it only names the letter: `\\boxed{12}`, so (B)."""
_SEVERAL = re.compile(r"(?:\(?[A-J]\)?[\s,/&|;.]*(?:or|and)?[\s,/&|;.]*){2,}")
_BECAUSE = re.compile(
    r"\s*(?:$|[.,;:!)—–。、-]|because\b|since\b|as\b|is\s+(?:correct|right)\b|です|である|입니다|이다)", re.IGNORECASE
)
_SURELY = (
    r"(?:for\s+sure|without\s+a?\s*doubt|definitely|certainly|surely|clearly|obviously|undoubtedly|indeed|exactly)"
)
_LEAD = re.compile(
    rf"(?:(?:so|thus|hence|therefore|then|it|that|this|it's|that's|is|must\s+be|has\s+to\s+be|i'm|i\s+am|option|choice|letter"
    rf"|{_SURELY})\b[,:]?\s*)+(?=\(?[A-J](?![A-Za-z']))",
    re.IGNORECASE,
)
_FOR_SURE = re.compile(rf"[\s,]*{_SURELY}\b", re.IGNORECASE)
# "it can't be A", "not A or B": choices that are ruled out, not offered.
_RULED_OUT = re.compile(
    r"[,;]?\s*\b(?:it\s+|that\s+|but\s+|and\s+|because\s+|since\s+|as\s+)*"
    r"(?:can(?:'t|not|\s+not)\s+be|could(?:n't|\s+not)\s+be|is(?:n't|\s+not)|not|neither|rules?\s+out)\s+(?:option\s+)?"
    r"\(?(?-i:[A-J])\)?(?![A-Za-z'])(?:\s*(?:,|or|nor|and|/)\s*\(?(?-i:[A-J])\)?(?![A-Za-z']))*[,;]?\s*(?:(?:but|so)\b)?\s*",
    re.IGNORECASE,
)


def verify(
    request: VerifyRequest, *, count: int = 4, truth: Literal["letter", "index0", "index1"] = "letter"
) -> Verdict:
    """The letter that the response states last, or the text of that choice, is the right one.

    Recognized are `\\boxed{B}`, `<answer>B</answer>`, "Answer: B", "the answer is (B)", else a last line of `B`, `(B)`,
    `B.`, `**B**` or `B. Paris`. Several letters to choose from, or boxes or lines of a list, are WRONG. The choices are
    extra_info["choices"], a list of texts; else there are `count`, up to 10, without texts. truth: whether the ground
    truth is a letter (or the text of a choice) or an index from 0 or from 1. Raises `ValueError` for a ground truth
    that is none of the choices.
    """
    choices = _choices(request)
    letters = LETTERS[: len(choices) or count]
    right = _right(request.ground_truth, choices, letters, truth)
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    statements = _statements(text)
    if not statements:
        return no_answer("no choice is stated")
    letter = _read(statements[-1], choices) or _after_box(text)
    if letter is None:
        return no_answer(f"{statements[-1][:80]!r} is not a choice")
    earlier = [_read(statement, choices) for statement in statements[:-1]]
    letter = "".join(dict.fromkeys([*(other for other in earlier if other and len(other) == 1), *letter]))
    return judged(letter == right, letter, "several choices" if len(letter) > 1 else "")


def gold(
    request: VerifyRequest, *, count: int = len(LETTERS), truth: Literal["letter", "index0", "index1"] = "letter"
) -> str:
    """A response that states the right choice as a letter."""
    choices = _choices(request)
    return f"The answer is ({_right(request.ground_truth, choices, LETTERS[: len(choices) or count], truth)})."


def _choices(request: VerifyRequest) -> list[str]:
    choices = request.extra_info.get("choices")
    if choices is None:
        return []
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"extra_info choices {choices!r:.80} is not a list of 2 to {len(LETTERS)} texts")
    return [str(choice) for choice in choices]


def _right(ground_truth: str, choices: list[str], letters: str, truth: str) -> str:
    text = ground_truth.strip()
    if truth in ("index0", "index1"):
        index = int(text) - int(truth == "index1") if re.fullmatch(r"[0-9]{1,2}", text) else -1
        if 0 <= index < len(letters):
            return letters[index]
    elif truth != "letter":
        raise ValueError(f"truth={truth!r} is none of letter, index0, index1")
    elif (bare := text.strip("(). ").upper()) and len(bare) == 1 and bare in letters:
        return bare
    elif (letter := _by_text(text, choices)) is not None:
        return letter
    raise ValueError(f"the ground truth {ground_truth!r} is none of the choices {', '.join(letters)}")


def _statements(text: str) -> list[str]:
    """The last statement of an answer, else the last line, preceded by its neighbour if that has the same form."""
    marked = [(end, start, content) for start, end, content in boxes(text)]
    marked = sorted(marked + [(match.end(), match.start(), match[1]) for match in _TAG.finditer(text)])
    statements = [(end, content) for end, _, content in marked[-1:]]
    heads = sorted([*_PHRASE.finditer(text), *foreign_statements(text)], key=lambda match: match.start())
    for head, following in zip_longest(heads, heads[1:]):
        statement = text[head.end() : following.start() if following else len(text)].partition("\n")[0]
        if "boxed" not in statement and "<answer>" not in statement.lower():  # those are read separately
            statements.append((head.end(), statement))
    if not statements:
        lines = [line.strip() for line in text.rstrip().splitlines()[-2:]]
        same_form = len({len(line.strip("*(). ")) == 1 for line in lines}) == 1  # both are a letter, or both more
        return [line for line in (lines if same_form else lines[-1:]) if line]
    at, last = max(statements)
    if len(marked) > 1 and at == marked[-1][0]:
        (previous_end, _, previous), (_, start, _) = marked[-2:]
        if previous_end <= start and not text[previous_end:start].strip(" \n$,;."):
            return [previous, last]
    rest = _MARKUP.sub(" ", text[at : at + MAX_CHARS].partition("\n")[0]) if marked and at == marked[-1][0] else ""
    another = _ANOTHER.match(rest.strip())
    return [last, another[0].strip(" ,/&|;")] if another else [last]


def _after_box(text: str) -> str | None:
    """The letter that the text after the last box names, if it contains nothing else but choices that it rules out."""
    marked = boxes(text)
    rest = text[marked[-1][1] :].strip() if marked else ""
    if not rest or len(rest) > MAX_CHARS:
        return None
    rest = _RULED_OUT.sub(" ", _BRACKETED.sub(r"(\1)", rest.replace("’", "'")))
    match = _AFTER_VALUE.fullmatch(rest)
    return match["letter"] if match else None


def _read(statement: str, choices: list[str]) -> str | None:
    """The stated letter; several letters if several are stated; None if there is none."""
    statement = _BRACKETED.sub(r"(\1)", unicodedata.normalize("NFKC", statement[:MAX_CHARS]))
    text = " ".join(_MARKUP.sub(" ", statement).split()).replace("( ", "(").replace(" )", ")")
    if (letter := _by_text(text, choices)) is not None:
        return letter
    if _SEVERAL.fullmatch(text):
        return "".join(dict.fromkeys(re.findall("[A-J]", text)))
    if re.fullmatch(r"\(?[a-j]\)?[.:]?", text):
        text = text.upper()
    text = _RULED_OUT.sub(" ", text.replace("’", "'")).strip()
    if (lead := _LEAD.match(text)) and not re.match(r"\(?[A-J]\W", text):
        text = text[lead.end() :]
    match = _LETTER.match(text)
    if match is None:
        return None
    rest = _FOR_SURE.sub("", match["rest"], count=1) if _FOR_SURE.match(match["rest"]) else match["rest"]
    if another := _ANOTHER.match((match["close"] or "").strip(").:") + rest):
        return match["letter"] + re.sub("[^A-J]", "", another[0])
    named_choice = _by_text(rest, choices)
    if named_choice is not None and named_choice != match["letter"]:
        return match["letter"] + named_choice  # "B. Paris" if Paris is A
    if match["close"] or named_choice is not None or _BECAUSE.match(rest):
        return match["letter"]
    return None  # "A dog": an article, not a letter


def _by_text(text: str, choices: list[str]) -> str | None:
    """The letter of the one choice whose text this is."""
    same = [LETTERS[i] for i, choice in enumerate(choices) if _plain(choice) == _plain(text) != ""]
    return same[0] if len(same) == 1 else None


def _plain(text: str) -> str:
    return " ".join(_MARKUP.sub(" ", text).casefold().split()).strip(" .,:;\"'")
