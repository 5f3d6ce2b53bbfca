"""The steps of `prepare` that remove or reorder rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcli.errors import DataError
from rlcli.images.decoding import size_of
from rlcli.prep.decontaminate import EvaluationSet, normalised, question, tokens_of
from rlcli.types import IMAGE, Prompt

if TYPE_CHECKING:
    from rlcli.images.rule import ImageRule

TRAIN, TEST = "train", "test"
EXAMPLES = 3
REPORT_EVERY = 1000
OnProgress = Callable[[str, int, int | None], None]
"""Name of the step, rows done, and total rows if known."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and the location of its raw row."""

    prompt: Prompt
    where: str


Rows = dict[str, list[Row]]
"""Split → its rows."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step: the remaining rows, how many were removed by reason, and descriptions of some of them.
    note: what else is worth knowing."""

    rows: Rows
    removed: dict[str, int]
    examples: list[str]
    note: str = ""


def by_chars(rows: Rows, low: int | None, high: int | None) -> Outcome:
    """Keep rows whose messages have from `low` to `high` characters in total."""
    lengths = [sum(len(message["content"]) for message in row.prompt.messages) for row in _all(rows)]
    return _between(rows, lengths, low or 0, float("inf") if high is None else high)


def by_tokens(rows: Rows, most: int, tokenizer: str, on_progress: OnProgress) -> Outcome:
    """Keep rows of at most `most` tokens with the chat template of `tokenizer` (a folder or hub id), and with the
    tokens of their pictures if that is a model that sees them."""
    from rlcli.data.prompts.prompts import load_tokenizer, prompt_lengths
    from rlcli.model.io.facts import image_rule

    def on_tokens(done: int, total: int) -> None:
        on_progress("tokenize", done, total)

    prompts = [row.prompt for row in _all(rows)]
    pictures = [image for prompt in prompts for image in prompt.images]
    rule = image_rule(tokenizer) if pictures else None
    lengths = prompt_lengths(prompts, load_tokenizer(tokenizer), on_tokens, rule)
    return replace(_between(rows, lengths, 0, most), note=_counted(pictures, rule, tokenizer) if pictures else "")


def _counted(pictures: Sequence[bytes], rule: ImageRule | None, tokenizer: str) -> str:
    """How the tokens of pictures were counted."""
    if rule is None:
        return (
            f"{len(pictures)} pictures counted as the text {IMAGE}: {tokenizer} is no model that sees them; with one "
            "that does (--tokenizer), each has the tokens of its size"
        )
    each = [rule.tokens(*rule.fitted(*size_of(picture))) for picture in pictures]
    return f"{len(each)} pictures counted as {min(each)} to {max(each)} tokens each, {sum(each)} in all"


def without_duplicates(rows: Rows) -> Outcome:
    """Keep the first of equal prompts; a prompt that is also in another split is removed from train."""
    seen: dict[str, tuple[str, Row]] = {}
    dropped: set[int] = set()
    removed: Counter[str] = Counter()
    examples: list[str] = []
    for split in sorted(rows, key=lambda split: split == TRAIN):
        for row in rows[split]:
            where, first = seen.setdefault(normalised(question(row.prompt)), (split, row))
            if first is row:
                continue
            dropped.add(id(row))
            why = "repeated" if where == split else "in another split"
            other = first.prompt.ground_truth != row.prompt.ground_truth
            removed[f"{why} with another answer" if other else why] += 1
            if len(examples) < EXAMPLES:
                examples.append(f"{row.where} repeats {first.where}")
    return Outcome(_kept(rows, lambda row: id(row) not in dropped), dict(removed), examples)


def repeats(rows: Rows) -> str:
    """One line on the train rows that are also rows of another split, and on the rows of other splits that repeat one
    another; empty if there are none. Nothing is removed."""
    notes = []
    train = [normalised(question(row.prompt)) for row in rows.get(TRAIN, [])]
    for split, some in rows.items():
        if split == TRAIN:
            continue
        asked = {normalised(question(row.prompt)) for row in some}
        if shared := sum(text in asked for text in train):
            notes.append(f"{shared} of {len(train)} train rows ask what a {split} row asks (--dedup takes them out)")
        problems = len({row.prompt.problem() for row in some})
        if problems < len(some):
            notes.append(f"{len(some)} {split} rows are {problems} prompts (equal ones are evaluated as one)")
    return "; ".join(notes)


def decontaminated(rows: Rows, against: Sequence[str], n: int, share: float, on_progress: OnProgress) -> Outcome:
    """Remove train rows that hold `share` of the n-grams of a prompt in the evaluation sets `against`."""
    from rlcli.data.prompts.table import read_prompts

    train = rows.get(TRAIN)
    if train is None:
        raise DataError(f"--decontaminate: there is no train split (only {', '.join(rows)})", "leave the flag out")
    sets = {}
    for path in against:
        asked = read_prompts(path, TEST, verifier="unread")  # the verifier does not matter here
        sets[path] = EvaluationSet([question(prompt) for prompt in asked], n)
    kept: list[Row] = []
    removed: Counter[str] = Counter()
    touched: dict[str, set[int]] = {path: set() for path in sets}
    examples: list[str] = []
    for number, (row, tokens) in enumerate(zip(train, tokens_of(question(row.prompt) for row in train), strict=True)):
        found = [(match, path) for path, asked in sets.items() if (match := asked.match(tokens))]
        match, path = max(found, key=lambda one: one[0].share, default=(None, ""))
        if match is None or match.share < share:
            kept.append(row)
        else:
            removed[path] += 1
            touched[path].add(match.index)
            if len(examples) < EXAMPLES:
                examples.append(f"{row.where} holds {match.share:.0%} of row {match.index} of {path}")
        if number % REPORT_EVERY == 0:
            on_progress("decontaminate", number, len(train))
    reasons = {f"near {len(touched[path])} rows of {path}": removed[path] for path in sets}
    return Outcome(rows | {TRAIN: kept}, reasons, examples)


def shuffled(rows: Rows, seed: int) -> Outcome:
    """Shuffle each split; the order depends on the seed and the split's name."""
    mixed = {split: random.Random(f"{seed}:{split}").sample(some, len(some)) for split, some in rows.items()}
    return Outcome(mixed, {}, [])


def limited(rows: Rows, limit: int) -> Outcome:
    """Keep the first `limit` rows of each split."""
    over = sum(max(0, len(some) - limit) for some in rows.values())
    return Outcome({split: some[:limit] for split, some in rows.items()}, {"over the limit": over}, [])


def _between(rows: Rows, lengths: Sequence[int], low: int, high: float) -> Outcome:
    """Keep rows whose length, in the order of `_all`, is from `low` to `high`."""
    lengths_of = {id(row): length for row, length in zip(_all(rows), lengths, strict=True)}
    removed = {"shorter": sum(length < low for length in lengths), "longer": sum(length > high for length in lengths)}
    return Outcome(_kept(rows, lambda row: low <= lengths_of[id(row)] <= high), removed, [])


def _kept(rows: Rows, keep: Callable[[Row], bool]) -> Rows:
    return {split: [row for row in some if keep(row)] for split, some in rows.items()}


def _all(rows: Rows) -> Iterable[Row]:
    return (row for some in rows.values() for row in some)
