"""Answers stated without a box: after "the answer is", "Answer:" or "####", on the last line, in the last sentence."""

from __future__ import annotations

import re

from rlcli_verifiers.alternatives import offered
from rlcli_verifiers.answer_words import foreign_statements
from rlcli_verifiers.answers import last_line
from rlcli_verifiers.latex import MAX_CHARS
from rlcli_verifiers.notation import clean, measured, number, split, with_thousands
from rlcli_verifiers.nouns import ARITHMETIC
from rlcli_verifiers.numerals import BASE_AFTER, endless, without_modulus
from rlcli_verifiers.values import FORMULA, Value, content, masked, value_at, values

MAX_WORDS_AFTER = (2, 6)
"""Maximum number of words after the value of a sentence without a full stop, which may be cut off; after an "="."""

MAX_CASES = 6
"""Maximum number of statements that are read as cases."""

MAX_LIST_LINES = 20
"""Maximum number of lines of a list at the end."""

MAX_SENTENCE_CHARS = 600
"""Maximum length of a last sentence that is read."""

_ANSWER = re.compile(
    r"(?:\banswer(?:\s+is\b|\s*+(?:\*++\s*+)?[:=]|\s+(?:was|equals|comes\s+(?:out\s+)?to|(?:would|should|must|will)\s+be)"
    r"(?=\s*[:*]*\s*[-+−\d$\\]))|\bcorrect\s+(?:option|choice|letter)\s+is\b|\bcorrect\s+(?:options|choices|answers)\s+are\b|####|\bAns(?:\.|\s*[:=])|^\W{0,4}(?P<short>(?-i:A))\**\s*:)[\s:*]*+(?=\S)",
    re.IGNORECASE | re.MULTILINE,
)
_ADVERB = re.compile(
    r"^(?:(?:therefore|thus|hence|simply|just|indeed|clearly|exactly|then|now|equal\s+to|donc|also|somit|daher|alors|entonces|por\s+(?:lo\s+)?tanto|portanto|quindi|dunque|dus|så|więc)\b[,:]?[\s*]*+)+",
    re.I,
)
_CASE_BEFORE = re.compile(r"\W*(?:and\s+|but\s+|or\s+)?(?:if|when|for|assuming|otherwise)\b", re.IGNORECASE)
_CHOICE_B = re.compile(r"^\W{0,4}B\**\s*[:.)]", re.MULTILINE)
_COPULA = re.compile(r"(?:입니다|이다|です|である|になります|になる|[。．])+$")
_COMMENT = re.compile(r"(?:correct|right|clear|obvious|reasonable|valid|consistent|sensible|as\s+follows)\b", re.I)
_NUMBER_AND_UNIT = re.compile(
    r"\\?\$?(-?[\d.,/]*\d\s?\\?%?)(?=[.)]?$|[.,;!)]?\s+\(?[a-z]{2}|[.;!,)]\s)", re.IGNORECASE | re.ASCII
)
# Before a formula: words that change the answer. "greater than $5$", "not $5$", "3 times $5$".
_RELATED_WORD = (
    r"\b(?:not|never|neither|less|fewer|greater|more|least|most|above|below|between|twice|half|double"
    r"|triple|thrice|minus|plus|times|negative|opposite|product|sum|difference|quotient|square|root|reciprocal|inverse"
    r"|under|over|up|approaching|either)\b|n't\b"
)
_RELATED = re.compile(rf"[\d=<>+*/^≤≥≠]|{_RELATED_WORD}", re.IGNORECASE)
_RELATED_BEFORE = re.compile(
    rf"(?:{_RELATED_WORD}|\b(?:divided|multiplied|increased|decreased|raised)\b)(?:\s+(?:than|of|to|by|the|a|as|many|much|power|factor|root|most|least))*\W*$",
    re.IGNORECASE,
)
_CONTINUES = re.compile(
    r"\s*+(?:\\(?=\d)|[-+*/^×÷·⋅=<>≤≥±−–]\s*+[\d(\\$.√]|[²³√!]|[xX]\s*+\d|:\d|\(\s*+-?\d+\s*+\)|\d"
    r"|\\(?:times|cdot|div|pm|frac|sqrt)\b|(?:or|and)\s+(?:more|less|fewer|greater|higher|lower|above|below|up)\b|and\s+(?:a|an|one|two|three)[\s-]+[a-z]*(?:th|ths|half|halves|quarters?|thirds?)\b)",
    re.ASCII,
)
_CLAUSE = re.compile(
    r"[^\n]*?(?=[.,;!?)](?:\s|$)|\s\(|\s(?:and|or|because|since|as|which|that|so|for|in|if|when|after|is|are|to)\b|$)"
)
_EQUALS = re.compile(r"(?<![<>!\\])=")
_NEXT_WORD = re.compile(r"[\s(]*([A-Za-z]+)")
_LIST_ITEM = re.compile(r"\d+[.)]\s")
_NAMED = re.compile(r"(?:[A-Za-z](?:_\w)?\s*)?[=≈]\s*")
_LABELLED = re.compile(r"[\s*]*\(?[A-J][).:][\s*]+(?=\S)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z '-]{1,60}(?=[.,;](?:\s|$))(?!,\s*(?:or|and)\b)")

_OPEN_WORDS = "is are be of to the a get have and or"
_IS_OPEN = r"(?<![,:=\0])" + "".join(rf"(?<!\b{word})" for word in _OPEN_WORDS.split())
"""Lookbehinds: a line that ends in none of these ends a sentence."""

_SENTENCE_END = re.compile(
    rf"(?<![\s.])[.!?][\"')\]*_]*(?=\s|$)|\n[ \t]*\n(?![ \t]*\0)|{_IS_OPEN}[ \t]*\n(?![ \t]*(?:[a-z]|\0))"
    r"|\n(?=[ \t]*(?:[-*#>]|\d+[.)])\s)"
    r"|(?<=\0)\.(?=[A-Z])"
)
_AGREES = (
    r"(?:match|agree|check|confirm|verif|satisf|makes\s+sense|is\s+(?:consistent|reasonable|as\s+expected))\w*"
    r"(?![^.!?]*(?:\b(?:not|no|if|unless|only)\b|n[’']t))"
)
"""Words of a sentence that confirms an answer."""

_CLOSING_WORDS = re.compile(
    rf"[\s*_>#-]*(?:I\s+)?(?:hope|trust|let\s+me\s+know|feel\s+free|thank|thanks|good\s+luck|if\s+you\s+(?:have|need)"
    rf"|q\.?e\.?d|this\s+(?:completes|concludes)|(?:this|which)\s+is\s+(?:the|our)\s+(?:final|required|desired|correct)\s+(?:answer|value|result)|done|(?:this|that|which|it)\s+(?:also\s+)?{_AGREES}|the\s+(?:result|answer|value|solution)\s+{_AGREES}|as\s+(?:required|desired)|we\s+(?:can\s+)?(?:check|verify)|∎|\$?\\(?:blacksquare|square|qed))[^\d$\\]*",
    re.IGNORECASE,
)
"""A closing sentence after the answer."""

_UNSURE = re.compile(
    r"\b(?:maybe|perhaps|possibly|probably|guess|unsure|not\s+(?:sure|certain)|no\s+idea|unclear|unknown|assum\w*|suppos\w*|unless|wait|hmm+|try|let|let's"
    r"|contradict\w*|mistake|either|neither|(?:could|might|may)\s+(?:also\s+)?be|should\s+we|need\s+to\s+(?:find|compute|calculate|determine|check|know|solve|show)|next|first\s+(?:find|compute|we))\b|\?",
    re.IGNORECASE,
)
"""A sentence with such a word states no answer."""

_CUT_OFF = re.compile(
    r"\b(?:and|or|so|then|which|because|since|but|we|need|add|subtract|multiply)\b[^\0]*$"
    r"|\b(?:to|of|the|by|with|for|is|are|a|an|from)\W*$",
    re.IGNORECASE,
)
"""The end of a sentence that has no full stop and continues after its value."""

_STARTS_UNSURE = re.compile(
    r"[^\w$\\]*(?:(?:or|note|notice|recall|observe|remember)\b|(?:case|option|interpretation|scenario|method|approach)\s+(?:\d|two|b)\b)",
    re.IGNORECASE,
)

_NEGATED_BEFORE = re.compile(
    r"(?:\b(?:not|never|no|nor|cannot|nicht|kein\w*|pas|nie|niet|ikke|inte|não|nem|не)\b|n[’']t\b|\bno\s+es\b|\bnon\s+è\b|不|没)"
    r"(?:\W+\w+){0,2}\W*(?:是)?\W*$",
    re.IGNORECASE,
)
_NEGATED_AFTER = re.compile(
    r"\b(?:is|are|was|were|can|could|does|do|seems?)\s*(?:n[’']t|not|wrong|incorrect|false|impossible|too)\b"
    r"|\b(?:cannot|wrong|incorrect|impossible)\b|n[’']t\s+(?:right|correct|it)\b|,\s*not\b",
    re.IGNORECASE,
)
"""A sentence that denies its value so states no answer."""

_CONTRAST = re.compile(r"\b(?:but|while|whereas|although)\b", re.IGNORECASE)
_ARTICLE = re.compile(r"[aA]\s+[*_]*[A-Za-z]{3}")
_EXTENT = re.compile(r"\s+(?:long|wide|tall|high|deep|thick|away|apart|heavy)\s*$", re.IGNORECASE)
_WHILE = re.compile(r"\b(?:while|whereas)\b", re.IGNORECASE)
_YES = re.compile(r"\W*(yes|no|true|false)\b(?!\s+\w)", re.IGNORECASE)
_WORD_AT_END = re.compile(
    r"\b(?:is|are|was|be)\s+(?:an?\s+|the\s+)?[*_\"']*(?P<word>no\s+(?:real\s+)?solutions?|[A-Za-z]{3,}(?:\s+triangle)?)[*_\"']*[.!]?[*_\"']*$"
)
_OPERATOR_BEFORE = re.compile(r"[-+*/×÷·x(]\s*$")
_LETTER = re.compile(r"[A-Za-z](?:_\{?\w\}?)?")
_AND = re.compile(r",?\s*(?:and|or)?\s*", re.IGNORECASE)
_IMPLIES = re.compile(
    r"\\(?:Rightarrow|implies|Longrightarrow|Leftrightarrow|iff|therefore|to|rightarrow)(?![A-Za-z])|[⇒⟹→∴]"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|eqnarray|split)\*?\}")
_UNKNOWN = re.compile(r"(?<![A-Za-z\\])(?![ei](?![A-Za-z]))[A-Za-z]")
_LATEX_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\\[A-Za-z]+")

_NUMBERED = re.compile(
    r"\b(?:step|case|part|problem|question|exercise|example|equation|figure|option|choice|page|section|method|solution|eq|no)"
    r"\W{0,3}$",
    re.IGNORECASE,
)
_STATES = re.compile(
    r"(?:\b(?:is|are|be|equals?|equal\s+to|becomes?|gives?|yields?|leaving|total\s+of)\b|=)"
    r"(?:[\s:*_`]|\b(?:therefore|thus|hence|then|exactly|just|simply|only|also|equal|to|a|total|of|about|approximately"
    r"|indeed|given|by|the|number|value|now|at)\b(?!\s+(?:least|most)))*+",
    re.IGNORECASE,
)
"""Words before the value of a sentence with several numbers."""


_CONDITION = re.compile(
    r"\b(?:when|whenever|where|if|provided|because|since|with\s+equality|at(?!\s+(?:least|most|all|once)\b)"
    r"|for(?!\s+(?:an?\s+)?(?:grand\s+)?total\b))\b",
    re.IGNORECASE,
)
_MAIN_CLAUSE = re.compile(
    r"\b(?:so|thus|hence|therefore|then|we|get|giving|leaving|total|answer|result|altogether)\b|[;:]", re.IGNORECASE
)
"""A condition that such a word follows is not the end of a sentence."""

_CONCLUDES = re.compile(
    r"[,;:]?\s(?:so(?!\s+(?:many|much|far|that|on|long|few|little)\b)|thus|therefore|hence|leaving|making|giving"
    r"|which\s+(?:means|makes|gives|leaves|leads\s+to|results\s+in)|(?:and|then)\s+(?:(?:so|thus|hence|therefore)\b"
    r"|(?:then\s+)?(?:earns?|makes?|gets?|pays?|needs?|spends?|saves?|has|have|owes?|receives?)\b))\b"
)
"""Words that begin the conclusion of a sentence."""

_FRONT = re.compile(
    r"(?:^|[,;:]\s*(?:so|thus|then|hence|therefore)\s+|^\W*(?:so|thus|then|hence|therefore|finally|now),?\s+)\W{0,3}"
    r"(?:(?:in|after|over|within|with|during|on|at|by)(?:\s+[a-z]+ing(?:\s+(?:away|out|up|off|in))?)?"
    r"|each\s+of)(?:\s+(?:the|these|those|his|her|their|all))?\s+$",
    re.IGNORECASE,
)
"""The start of a phrase of time or means before the main clause, "After eating 5 of them, he has 7 left"."""

_SUBJECT = re.compile(
    r"(?:,|\b(?:he|she|it|they|we|you|I|there|gets?|has|have|receives?|costs?|remain|(?-i:[A-Z][a-z]+))\b)(?!.*\bof\s*$)",
    re.IGNORECASE,
)
_FOR = re.compile(r"\bfor\s+(?:the\s+|all\s+|these\s+|those\s+)?$", re.IGNORECASE)
_FOLLOWS = re.compile(r"\s*(?:[-+*/=<>,;]|and\b|or\b|to\b)", re.IGNORECASE)
_BACK = re.compile(r"\b(?:in|after|over|within|using)\s+(?:the\s+|these\s+|those\s+)?$", re.IGNORECASE)

_UNSOLVED = re.compile(r"-?\d*(?:/\d+)?\s*\*?[A-Za-z](?:\^\{?2\}?|²)?\s*(?:[-+−]\s*\d+)?")
"""The left side of an equation that is not solved, `2x = 10`, `x + 2 = 5`."""

_TYPED_UNION = re.compile(r"(?<=[)\]}])[ ]?U[ ]?(?=[(\[{])")
_ALL_REALS = re.compile(
    r"\b(?:all|any|every)\s+reals?\b(?:\s+(?:numbers?|values?))?[^.;\n]{0,12}\s(?:except|other\s+than|excluding|such\s+that|with|where)\s[^.;\n]{1,60}",
    re.IGNORECASE,
)
"""The real numbers with an exception, "all real numbers except $3$"."""

_COMPOUND = re.compile(
    r"\d+\s*(?:hours?|hrs?|h|minutes?|min|days?|weeks?|years?|feet|foot|ft|yards?|pounds?|lbs?|meters?|m|km|kilometers?|dollars?)"
    r"\s*(?:,|and|,\s*and)?\s+\d+\s*(?:minutes?|mins?|seconds?|secs?|s|hours?|days?|months?|inches|inch|in|feet|ft|ounces?|oz"
    r"|centimeters?|cm|meters?|m|cents?)(?![A-Za-z])"
)
"""A quantity in two units, "1 hour and 30 minutes"."""

_RELATIONS = re.compile(
    r"(?=[A-Za-z]\s*(?:[=<>≤≥≠∈]|\\(?:in|neq?|leq?|geq?)(?![A-Za-z])))(?:[^A-Za-z\n]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|\\[A-Za-z]+){3,80}"
)
"""A line that consists of relations, `x < 3 or x > 5`, `x = 1 or 2`."""

_LISTED = re.compile(r"\s*(?:[-*•+]|\d{1,2}[.)])\s+(?P<item>\S.*)")
_LIST_HEAD = re.compile(r".*\b(?:are|roots|solutions|answers|values)\b[^\n]*:[\s*_]*", re.IGNORECASE)

_VERB = re.compile(r"[A-Za-z]")

_PUNCTUATION_INSIDE = re.compile(r"(?<![\\\s])([,;])[ ]?((?<!\\)\$|\\\))(?=[\s]|$)")


def tidy(text: str) -> str:
    r"""Move punctuation out of formulas, `$3,$ $5.$` to `$3$, $5$.`, and write repeating decimals as fractions."""
    text = _PUNCTUATION_INSIDE.sub(r"\2\1", endless(text))
    return _TYPED_UNION.sub(" ∪ ", text.replace("ℝ \\ {", "ℝ∖{").replace("ℝ\\{", "ℝ∖{"))


def statement(text: str) -> str | None:
    """The text after the last "the answer is" or the like; None if there is none."""
    matches = [*_ANSWER.finditer(text), *foreign_statements(text)]
    for match in sorted(matches, key=lambda match: match.start(), reverse=True):
        rest = text[match.end() :]
        is_short = match.re is _ANSWER and match["short"]
        if not (is_short and _CHOICE_B.search(rest)) and not _COMMENT.match(rest):
            return _ADVERB.sub("", rest, count=1)
    return None


def by_cases(text: str) -> list[str]:
    """The answers that a text states for several cases: "If $n$ is even, the answer is 8. If odd, the answer is 7."."""
    answers = list[str]()
    for match in [*_ANSWER.finditer(text)][-MAX_CASES:]:
        sentence_start = max(text.rfind(mark, 0, match.start()) for mark in (". ", "\n", "; ")) + 1
        if _CASE_BEFORE.match(text, sentence_start, match.start()):
            answers += of_sentence(text[match.end() :])[:1]
    return answers if len(answers) > 1 else []


def of_sentence(text: str) -> list[str]:
    """The answer in the text after "the answer is": its first formula, or a number and its unit, or the whole line.

    If the sentence continues with more numbers or formulas ("5 or 6", "$5$, $6$"), these too.
    """
    first = value_at(text, 0)
    displayed = FORMULA.match(text) if first and first.is_formula else None  # it may have several lines
    start = displayed.end() if displayed else 0
    rest = re.sub(r"\*\*(?!\d)", "", text[start:].partition("\n")[0].rstrip())
    rest = text[:start] + re.sub(r"\s+", " ", rest)
    if not displayed and (phrase := _COMPOUND.match(rest) or _ALL_REALS.match(rest)):
        return [phrase[0].replace("$", ""), *offered(rest, phrase.end(), is_list=True)]
    answer, end = _first_value(rest, bool(displayed))
    return [*([answer] if answer else []), *offered(rest, end, is_list=True)]


def _first_value(rest: str, displayed: bool) -> tuple[str, int]:
    """The value at the start of a text, and its end position."""
    formula, plain = FORMULA.search(rest), _NUMBER_AND_UNIT.match(rest)
    typed = None if displayed else value_at(rest, 0)
    if _LABELLED.match(rest):
        return _COPULA.sub("", rest.strip(' .*`"')), len(rest)
    if plain and not displayed:
        return _with_unit(plain[1], rest, plain.end())
    if typed and not typed.is_formula and not _RELATED.match(rest, typed.end):
        return _with_unit(typed.content, rest, typed.end)
    if formula and not _RELATED.search(rest[: formula.start()]):
        return _with_unit(content(formula), rest, formula.end())
    words = _WORDS.match(rest)
    if words and not re.search(r"\b(?:or|and|not|either)\b", words[0]):
        return words[0], words.end()
    return _COPULA.sub("", rest.strip(' .*`"')), len(rest)


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
            and (formula := FORMULA.fullmatch(tail, start))
        ):
            return [last_side(content(formula))]
    if alone and "\n" in text.strip():
        return []
    if not alone and (listed := _of_last_lines(text)):
        return listed
    last = (last_line(text) or "").strip("*_` ").rstrip("*_` .")
    if formula := FORMULA.fullmatch(last):
        return [last_side(content(formula))]
    plain = _NAMED.sub("", last, count=1) if _NAMED.match(last) else last
    if not alone and "$" not in last and re.search(r"[<>≤≥≠∈]|\b(?:or|and)\b", last) and _RELATIONS.fullmatch(last):
        return [last]
    if len(plain) > MAX_CHARS or _LIST_ITEM.match(plain) or len(plain.split()) > 4:
        return []
    if without_modulus(clean(plain))[1]:
        return [plain]
    body = measured(clean(plain)).body
    return [plain] if any(number(reading) for reading in with_thousands(body)) else []


def _of_last_lines(text: str) -> list[str]:
    """The values of a list at the end, one a line, that a line like "The roots are:" introduces."""
    lines = [line for line in text.splitlines() if line.strip()]
    items = list[str]()
    while lines and len(items) < MAX_LIST_LINES and (listed := _LISTED.fullmatch(lines[-1])):
        items.insert(0, listed["item"].rstrip(" .,;"))
        lines.pop()
    if len(items) < 2 or not lines or not _LIST_HEAD.fullmatch(lines[-1]):
        return []
    answers = [of_last_line(item, alone=True) for item in items]
    return [answer for each in answers for answer in each] if all(answers) else []


def of_last_sentence(text: str) -> list[str]:
    """The only number or formula of the last sentence, else the value after its last "is", "are" or "=".

    A sentence with a doubt, a negation or a question states nothing; nor does one that is cut off.
    """
    sentence = last_sentence(text)
    prose = masked(sentence)
    if not sentence or len(sentence) > MAX_SENTENCE_CHARS or _LABELLED.match(sentence):
        return []
    if _UNSURE.search(prose) or _STARTS_UNSURE.match(sentence):
        return []
    if whole := _whole_phrase(sentence, prose):
        return [whole]
    stated = [
        value
        for value in values(sentence)
        if not _NUMBERED.search(prose[: value.start]) and not _ARTICLE.match(prose, value.start)
    ]
    end = _condition_start(prose, stated)
    stated = [value for value in stated if value.start < end]
    if not stated:
        return _stated_word(prose)
    if _compares(prose[:end], stated):
        return []
    value = (
        _only(stated)
        or _concluded(prose, stated)
        or _main(prose, stated)
        or _first_of_list(_last_equated(sentence, prose[:end], stated), prose, stated)
    )
    if value is None or not _is_asserted(sentence, prose, value):
        return []
    answer, *others = of_sentence(sentence[value.start :]) or [""]
    if _OPERATOR_BEFORE.search(prose[: value.start]):  # "5 apples x 2 = 10"
        answer = split(answer, _EQUALS)[-1]
    return [last_side(answer), *others] if answer else []


def _whole_phrase(sentence: str, prose: str) -> str:
    """The quantity in two units, or the real numbers with an exception, that is all that a sentence states."""
    phrases = [*_COMPOUND.finditer(sentence), *_ALL_REALS.finditer(sentence)]
    if len(phrases) != 1 or _NEGATED_BEFORE.search(prose[: phrases[0].start()]):
        return ""
    start, end = phrases[0].span()
    is_alone = all(start <= value.start < end or value.is_name for value in values(sentence))
    is_related = _RELATED_BEFORE.search(prose[:start])
    return phrases[0][0].replace("$", "") if is_alone and not is_related else ""


def _stated_word(prose: str) -> list[str]:
    """The word that a sentence without values ends with, "the winner is Alice"; "there is no solution"; "Yes, …".

    >>> [_stated_word(text) for text in ("The ball is **red**.", "It is not even.", "Yes, it converges.")]
    [['red'], [], ['Yes']]
    """
    if match := _YES.match(prose):
        return [match[1]]
    match = _WORD_AT_END.search(prose)
    return [match["word"]] if match and not _NEGATED_BEFORE.search(prose[: match.start("word")]) else []


def _compares(prose: str, stated: list[Value]) -> bool:
    """True if a sentence states two things: "Tom is $12$, while his sister is $18$"."""
    contrast = _WHILE.search(prose)
    return contrast is not None and stated[0].end <= contrast.start() and stated[-1].start >= contrast.end()


def _condition_start(prose: str, stated: list[Value]) -> int:
    """Start of the condition or reason at the end of a sentence, "is $42$ when $x = 1$"; else the sentence's end.

    A value precedes it, and no main clause follows: "$5$ for each, so $10$", "the sum for $k = 2$ is $42$".
    """
    verbs = [verb for verb in _STATES.finditer(prose) if _VERB.match(verb[0])]
    followed = [verb for verb in verbs if any(value.start == verb.end() for value in stated)]
    for condition in _CONDITION.finditer(prose):
        earlier = [value for value in stated if value.end <= condition.start() and not value.is_name]
        later_values = [value for value in stated if value.start >= condition.end()]
        if not earlier or not later_values or _MAIN_CLAUSE.search(prose, condition.end()):
            continue
        is_stated = any(_is_main(prose, verb) for verb in followed if verb.end() < condition.start())
        has_verb = any(verb.start() >= condition.end() for verb in followed)
        is_number = not _has_unknown(earlier[-1].content.split("=")[-1])
        if (is_stated or (is_number and not has_verb)) and (has_verb or _names_unknowns(later_values)):
            return condition.start()
    return len(prose)


def _is_main(prose: str, verb: re.Match[str]) -> bool:
    """True unless a condition precedes a verb in its clause, as in "when $n$ is $5$"."""
    return not _CONDITION.search(prose, prose.rfind(",", 0, verb.start()) + 1, verb.start())


def _names_unknowns(stated: list[Value]) -> bool:
    """True if all values define unknowns, `x = 1`, and none is a computation, `5 + 3 = 8`."""
    sides = [value.content.split("=")[0] for value in stated if "=" in value.content]
    is_subject = stated[0].is_name  # "solve $2x = 6$ for $x$, $x = 3$"
    return bool(sides) and not is_subject and all(map(_has_unknown, sides))


def _has_unknown(formula: str) -> bool:
    return bool(_UNKNOWN.search(_LATEX_WORDS.sub(" ", formula)))


def _only(stated: list[Value]) -> Value | None:
    """The only value; names like `$x$` count only if there is nothing else."""
    candidates = [value for value in stated if not value.is_name] or stated
    return candidates[0] if len(candidates) == 1 else None


def _concluded(prose: str, stated: list[Value]) -> Value | None:
    """The only value of the clause that ends a sentence with a conclusion, "eats $7$, so he has 5 left"."""
    for conclusion in reversed(list(_CONCLUDES.finditer(prose))):
        after = [value for value in stated if value.start >= conclusion.end()]
        if after:
            is_conclusion = any(value.end <= conclusion.start() for value in stated)
            if not is_conclusion or all(value.is_name for value in after):
                return None
            return _only(after) or _main(prose, after)
    return None


def _main(prose: str, stated: list[Value]) -> Value | None:
    """The one of two values that is not in a phrase of time or means: "In 2 hours he earns $30"."""
    values = [value for value in stated if not value.is_name]
    if len(values) != 2:
        return None
    first, second = values
    between = prose[first.end : second.start]
    if _FRONT.search(prose[: first.start]) and _SUBJECT.search(between) and not _FOLLOWS.match(prose, first.end):
        return second
    is_last = len(prose[second.end :].split()) <= MAX_WORDS_AFTER[0] + 1
    is_plain = "=" not in first.content + second.content
    is_price = "$" in first.content and _FOR.search(between)
    return first if is_plain and is_last and (is_price or _BACK.search(between)) else None


def _last_equated(sentence: str, prose: str, stated: list[Value]) -> Value | None:
    """The formula with the last "=", or the value after the last "is" or "are", whichever comes later."""
    equated = [(sentence.rfind("=", value.start, value.end), value) for value in stated]
    candidates = [(position, value) for position, value in equated if position >= 0][-1:]
    for verb in reversed(list(_STATES.finditer(prose))):
        is_inside = any(value.start <= verb.start() < value.end for value in stated)
        if not is_inside and (value := value_at(sentence, verb.end())):
            candidates.append((verb.start(), value))
            break
    return max(candidates)[1] if candidates else None


def _first_of_list(last: Value | None, prose: str, stated: list[Value]) -> Value | None:
    """The value with which a list begins, "$x = 2$ and $y = 3$"; "$4 = 3x$ and $x = 4/3$" is none."""
    first = last
    for value in reversed(stated):
        if first is None or value.start >= first.start:
            continue
        sides, others = value.content.split("="), first.content.split("=")
        names = sides[0].strip(), others[0].strip()
        are_unknowns = all(_LETTER.fullmatch(name) for name in names)
        is_alike = len(sides) == len(others) and (len(sides) == 1 or names[0] == names[1] or are_unknowns)
        if not is_alike or not _AND.fullmatch(prose, value.end, first.start):
            break
        first = value
    return first


def _is_asserted(sentence: str, prose: str, value: Value) -> bool:
    """True if a sentence is complete, and states a value without changing or denying it."""
    prefix, suffix = prose[: value.start], prose[value.end :]
    most_words = MAX_WORDS_AFTER[1 if "=" in value.content else 0]
    is_complete = re.search(r"[.!。][\"')\]*_]*$", prose) or (
        len(suffix.split()) <= most_words and not _CUT_OFF.search(suffix)
    )
    is_denied = _NEGATED_BEFORE.search(prefix) or _NEGATED_AFTER.search(suffix)
    is_related = re.search(r"\bor\W*$", prefix) or _RELATED_BEFORE.search(prefix)
    contrast = _CONTRAST.search(suffix)
    is_contrasted = contrast and any(True for _ in values(sentence[value.end + contrast.end() :]))
    return bool(is_complete and not (is_denied or is_related or is_contrasted))


def last_side(text: str) -> str:
    r"""The value at the end of a derivation: of `6b = 6 \cdot 0 = 0` and `2a = 10 \Rightarrow a = 5`, of the last row.

    An equation between formulas stays as it is; so does `3 = 4`.
    """
    is_derivation = bool(_ENVIRONMENT.search(text))
    rows = [row for row in _ENVIRONMENT.sub("", text).split(r"\\") if row.strip(" &.\n")] if is_derivation else [text]
    last = _IMPLIES.split(rows[-1].replace("&", " ") if is_derivation else text)[-1].strip() if rows else ""
    sides = split(last, _EQUALS)
    is_statement_of_numbers = all(number(clean(side)) for side in sides)
    has_value = bool(sides[-1]) and not _UNKNOWN.search(_LATEX_WORDS.sub(" ", sides[-1]))
    unknowns = set(_UNKNOWN.findall(_LATEX_WORDS.sub(" ", sides[0])))
    is_named = len(sides) == 2 and (
        len(unknowns) > 1 or _NAMED.fullmatch(f"{sides[0]}=") or _UNSOLVED.fullmatch(sides[0])
    )
    return sides[-1] if len(sides) > 1 and has_value and not (is_statement_of_numbers or is_named) else last


def last_sentence(text: str) -> str:
    """The last sentence, without those that only close a text ("I hope this helps!")."""
    prose = masked(text)
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(prose)), len(text)]
    for start, end in zip(ends[-2::-1], ends[:0:-1], strict=True):
        sentence = text[start:end].strip()
        is_aside = sentence.startswith("(") and sentence.endswith(")") and start > 0
        if sentence.strip("*_`#>-= \n") and not is_aside and not _CLOSING_WORDS.fullmatch(sentence):
            return sentence
    return ""


def _with_unit(answer: str, rest: str, end: int) -> tuple[str, int]:
    """An answer with following words that change it ("42 million", "5 minus one") or are its unit ("42 km/h")."""
    following = rest[end:]
    clause = _CLAUSE.match(following)
    words = clause[0] if clause else ""
    word = _NEXT_WORD.match(words)
    if _CONTINUES.match(following):
        return _COPULA.sub("", rest.strip(' .*`"')), len(rest)
    if based := BASE_AFTER.match(following):
        return answer + based[0], end + based.end()
    if not word:
        return answer, end
    words = _EXTENT.sub("", words)  # "2.5 centimeters long"
    extended = rf"{answer}\text{{{words}}}"
    if word[1].lower().removesuffix("s") in ARITHMETIC or word[1].lower() in ARITHMETIC:
        return extended, end + len(words)
    return (extended, end + len(words)) if _unit_of(extended) else (answer, end)


def _unit_of(answer: str) -> str:
    """The known unit of an answer; empty if it has none."""
    unit = measured(clean(answer)).unit if len(answer) <= MAX_CHARS else ""
    return "" if unit.startswith("#") else unit
