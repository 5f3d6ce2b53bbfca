"""Completion of values after `=` in bash, which passes `--set train.schedule=li` as three words: `train.schedule`, `=`
and `li`, and replaces the last of them alone."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

ASKED, WORDS, PLACE = "_RLCLI_COMPLETE", "COMP_WORDS", "COMP_CWORD"


@contextmanager
def rejoined_words() -> Iterator[None]:
    """Within it, a completion for bash sees whole words; what is offered then begins after the last `=`."""
    text = os.environ.get(WORDS, "")
    if os.environ.get(ASKED) != "complete_bash" or "=" not in text:
        yield
        return
    words, place, before = rejoined(text.split("\n"), int(os.environ.get(PLACE, "0")))
    os.environ |= {WORDS: "\n".join(words), PLACE: str(place)}
    offered = io.StringIO()
    try:
        with redirect_stdout(offered):
            yield
    finally:
        for line in offered.getvalue().splitlines():
            print(line.removeprefix(before))


def rejoined(words: Sequence[str], place: int) -> tuple[list[str], int, str]:
    """The words with those on both sides of a word `=` as one, the new place of the word at `place`, which is the last,
    and the part of it that bash keeps.

    >>> rejoined(["rlcli", "--set", "a", "=", "b"], 4), rejoined(["rlcli", "a", "="], 2)
    ((['rlcli', '--set', 'a=b'], 2, 'a='), (['rlcli', 'a='], 1, 'a='))
    >>> rejoined(["rlcli", "--set", "a=b"], 2)
    (['rlcli', '--set', 'a=b'], 2, '')
    """
    found: list[str] = []
    open_word = False
    before = ""
    for word in words[: place + 1]:
        mark = bool(word) and not word.strip("=")
        if found and (mark or open_word):
            before = found[-1] if not mark else found[-1] + word
            found[-1] += word
        else:
            before = ""
            found.append(word)
        open_word = mark
    return found, len(found) - 1, before
