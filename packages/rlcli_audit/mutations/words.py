"""Options and plain text."""

from __future__ import annotations

from collections.abc import Iterator

from rlcli_audit.mutations.quantities import Named

LETTERS = "ABCD"


def choice_letter(answer: str) -> str | None:
    """The option that a ground truth names: `B`, `(B)`, `b.`; None if it is something else."""
    letter = answer.strip().strip("().:*").upper()
    return letter if len(letter) == 1 and "A" <= letter <= "Z" else None


def choice_statements(letter: str) -> Iterator[Named]:
    """Responses that choose an option, as models write them."""
    yield "the answer is (B)", f"Of all these one fits.\n\nThe answer is ({letter})."
    yield "Answer: B", f"Of all these one fits.\n\nAnswer: {letter}"
    yield "boxed", f"Of all these one fits: $\\boxed{{{letter}}}$"
    yield "boxed text", f"Of all these one fits: $\\boxed{{\\text{{{letter}}}}}$"
    yield "answer tag", f"<think>Of all these one fits.</think>\n<answer>{letter}</answer>"
    yield "bold", f"Of all these one fits.\n\n**{letter}**"


def wrong_choices(letter: str) -> Iterator[Named]:
    """Other options, and all of them."""
    for other in LETTERS:
        if other != letter:
            yield f"option {other} instead", other
    everything = sorted({*LETTERS, letter})
    yield "every option listed", ", ".join(everything)
    # The right one is neither first nor last, so that reading any single option is wrong.
    others = [other for other in everything if other != letter]
    yield "right option in the middle", f"{others[0]} {letter} {others[-1]}"


def wrong_texts(answer: str) -> Iterator[Named]:
    """Texts that differ by more than case, space and punctuation."""
    text = answer.strip()
    others = [("letter appended", f"{text}x"), ("cut short", text[:-1])]
    if text.replace(" ", "").isalpha():  # a formula may mean the same backwards
        others.append(("backwards", text[::-1]))
    for kind, other in others:
        if _letters(other) != _letters(text) and _letters(other):
            yield kind, other


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))
