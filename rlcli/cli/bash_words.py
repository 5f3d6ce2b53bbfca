"""Completion of values after `=` in bash, which passes `--set train.schedule=li` as three words: `train.schedule`, `=`
and `li`, and replaces the last of them alone."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

INSTRUCTION, WORDS, INDEX = "_RLCLI_COMPLETE", "COMP_WORDS", "COMP_CWORD"


@contextmanager
def rejoined_words() -> Iterator[None]:
    """Join the words of a completion for bash in the block; its candidates then begin after the last `=`."""
    text = os.environ.get(WORDS, "")
    if os.environ.get(INSTRUCTION) != "complete_bash" or "=" not in text:
        yield
        return
    words, index, prefix = rejoined(text.split("\n"), int(os.environ.get(INDEX, "0")))
    os.environ |= {WORDS: "\n".join(words), INDEX: str(index)}
    candidates = io.StringIO()
    try:
        with redirect_stdout(candidates):
            yield
    finally:
        for line in candidates.getvalue().splitlines():
            print(line.removeprefix(prefix))


def rejoined(words: Sequence[str], index: int) -> tuple[list[str], int, str]:
    """The words with those on both sides of a word `=` as one, the new index of the word at `index`, which is the last,
    and its prefix that bash keeps.

    >>> rejoined(["rlcli", "--set", "a", "=", "b"], 4), rejoined(["rlcli", "a", "="], 2)
    ((['rlcli', '--set', 'a=b'], 2, 'a='), (['rlcli', 'a='], 1, 'a='))
    >>> rejoined(["rlcli", "--set", "a=b"], 2)
    (['rlcli', '--set', 'a=b'], 2, '')
    """
    joined: list[str] = []
    open_word = False
    prefix = ""
    for word in words[: index + 1]:
        is_equals = bool(word) and not word.strip("=")
        if joined and (is_equals or open_word):
            prefix = joined[-1] if not is_equals else joined[-1] + word
            joined[-1] += word
        else:
            prefix = ""
            joined.append(word)
        open_word = is_equals
    return joined, len(joined) - 1, prefix
