"""Find the program in a response: which fenced block it is, in any fence syntax."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator
from typing import NamedTuple

from rlcli_verifiers.answers import last_tag

_LANGUAGES = ("python", "python3", "py")
_OPENING = re.compile(
    r"[ \t>]*+(?:(?:[-*+]|\d{1,3}[.)])[ \t]++)?(?:<answer>[ \t]*+)?(?P<marks>`{3,}+|~{3,}+)"
    r"[ \t]*+(?P<language>[\w+#-]*+)(?P<rest>[^`]*+)",
    re.IGNORECASE,
)
_CLOSING = re.compile(r"[ \t>]*+(?P<marks>`{3,}+|~{3,}+)(?P<rest>$|[ \t<][^`]*+$)")
_CLOSED_LATE = re.compile(r"(?P<code>[^`~]*+)(?P<marks>`{3,}+|~{3,}+)[ \t]*+(?:</answer>[ \t]*+)?$", re.IGNORECASE)
_STATEMENT = re.compile(
    r"^[ \t]*+(?:def |class |import |from \w|for |while |if |print\(|\w[\w, .\[\]]*+=)", re.MULTILINE
)
_READS_INPUT = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0\b|\bfileinput\b")


_QUOTES = ('"""', "'''")
# A string that has no end takes the rest of its line, so that each character is read once.
_TOKEN = re.compile(r"""\"{3}|'{3}|\#.*|"(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?""")
_ESCAPED = re.compile(r"\\.")


class Block(NamedTuple):
    """A fenced block: the language that it names, in lower case, and its lines without a common indentation."""

    language: str
    code: str


def program(text: str, names: Collection[str] = (), reads_input: bool = False) -> str | None:
    """The program that a response gives after its reasoning, or None. An unclosed last block ends with the text.

    It is the last block of Python, else the last without a language; if there are several, the last that defines most
    of `names`, or that reads the standard input if the tests give one: a usage example may follow. An `<answer>` that
    contains a block goes first. If nothing is fenced, it is the whole text if that contains a statement.
    """
    tagged = last_tag(text)
    fenced = list(blocks(tagged)) if tagged else []
    fenced = fenced or list(blocks(text))
    if not fenced:
        unfenced = tagged if tagged and _STATEMENT.search(tagged) else text
        return unfenced if _STATEMENT.search(unfenced) else None
    python = [block.code for block in fenced if block.language in _LANGUAGES]
    candidates = python or [block.code for block in fenced if not block.language]  # next to a program: its output
    if not candidates:
        return None

    def fits(code: str) -> int:
        return sum(map(bool, (_definition(name).search(code) for name in names))) or (
            reads_input and bool(_READS_INPUT.search(code))
        )

    best = max(map(fits, candidates))
    last_best = next(code for code in reversed(candidates) if fits(code) == best)
    return last_best if last_best.strip() else None


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a text from top to bottom; fences may be indented, in a list or of tildes.

    A fence inside a docstring of Python, which ends further below, is a part of the program.
    """
    all_lines = text.split("\n")
    last_quotes = {quotes: _last_line_with(quotes, all_lines) for quotes in _QUOTES}
    marks, language, lines, docstring = "", "", list[str](), ""
    for number, line in enumerate(all_lines):
        if not marks:
            opening = _OPENING.match(line)
            if opening and opening.end() == len(line):
                marks, language, lines, docstring = opening["marks"], opening["language"].lower(), [], ""
            continue
        if docstring and last_quotes[docstring] <= number:
            docstring = ""  # it has no end
        if language in ("", *_LANGUAGES):
            is_inside, docstring = bool(docstring), _docstring_after(line, docstring)
            if is_inside:
                lines.append(line)
                continue
        closing = _CLOSING.match(line)
        late = None if closing else _CLOSED_LATE.fullmatch(line)
        end = closing or late
        if end and end["marks"].startswith(marks):
            yield Block(language, _dedented([*lines, late["code"]] if late else lines))
            marks = ""
        else:
            lines.append(line)
    if marks:
        yield Block(language, _dedented(lines, closed=False))


def _last_line_with(quotes: str, lines: list[str]) -> int:
    return max((number for number, line in enumerate(lines) if quotes in line), default=-1)


def _docstring_after(line: str, docstring: str) -> str:
    """The quotes of the docstring that is open at the end of a line. docstring: those open at its start."""
    if not any(quotes in line for quotes in _QUOTES):
        return docstring
    position, line = 0, _ESCAPED.sub("  ", line)
    while position < len(line):
        if docstring:
            end = line.find(docstring, position)
            if end < 0:
                break
            docstring, position = "", end + len(docstring)
            continue
        token = _TOKEN.search(line, position)
        if token is None:
            break
        docstring, position = token[0] if token[0] in _QUOTES else "", token.end()
    return docstring


def _dedented(lines: list[str], closed: bool = True) -> str:
    code = "\n".join(lines) + ("\n" if closed and lines else "")
    return textwrap.dedent(code) if code[:1] in " \t\n" else code


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(
        rf"^[ \t]*+(?:(?:async[ ]+)?def|class)[ ]+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]", re.MULTILINE
    )
