"""The steps of `prepare` that remove or reorder rows."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from rlcli.errors import ConfigError, DataError
from rlcli.images.decoding import size_of
from rlcli.prep.decontaminate import EvaluationSet, normalised, question, tokens_of
from rlcli.prep.row_store import TEST, TRAIN, Row, StoredRows
from rlcli.types import IMAGE, Prompt

if TYPE_CHECKING:
    from rlcli.images.image_rule import ImageRule

EXAMPLES = 3
REPORT_EVERY = 1000
OnProgress = Callable[[str, int, int | None], None]
"""Name of the step, rows done, and total rows if known."""

Rows = dict[str, StoredRows]
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
    lengths = {split: array("q", map(_characters, some)) for split, some in rows.items()}
    return _between(rows, lengths, low or 0, float("inf") if high is None else high)


def _characters(row: Row) -> int:
    return sum(len(message["content"]) for message in row.prompt.messages)


def by_tokens(rows: Rows, most: int, tokenizer: str, on_progress: OnProgress) -> Outcome:
    """Keep rows of at most `most` tokens with the chat template of `tokenizer` (a folder or hub id), and with the
    tokens of their pictures if that is a model that sees them."""
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer, prompt_lengths
    from rlcli.model.io.model_checks import image_rule

    has_pictures = any(some.has_images for some in rows.values())
    rule, loaded = image_rule(tokenizer) if has_pictures else None, load_tokenizer(tokenizer)
    total, before = sum(map(len, rows.values())), 0
    counted = _PictureTokens(rule, tokenizer)
    lengths: dict[str, array[int]] = {}
    for split, some in rows.items():
        lengths[split] = array("q")
        for chunk in some.chunks():
            prompts = [row.prompt for row in chunk]
            lengths[split].extend(prompt_lengths(prompts, loaded, _after(before, total, on_progress), rule))
            counted.add(prompts)
            before += len(prompts)
    return replace(_between(rows, lengths, 0, most), note=counted.note() if has_pictures else "")


def _after(before: int, total: int, on_progress: OnProgress) -> Callable[[int, int], None]:
    """The progress of a chunk, in that of all rows."""
    return lambda done, of_chunk: on_progress("tokenize", before + done, total)


class _PictureTokens:
    """Counts the tokens of pictures. rule: how the model sees them; None: it sees none."""

    def __init__(self, rule: ImageRule | None, tokenizer: str) -> None:
        self._rule, self._tokenizer = rule, tokenizer
        self._pictures, self._tokens, self._least, self._most = 0, 0, 0, 0

    def add(self, prompts: Sequence[Prompt]) -> None:
        for picture in (picture for prompt in prompts for picture in prompt.images):
            self._pictures += 1
            if self._rule is not None:
                count = self._rule.tokens(*self._rule.fitted(*size_of(picture)))
                self._tokens += count
                self._least, self._most = min(self._least or count, count), max(self._most, count)

    def note(self) -> str:
        """How they were counted."""
        if self._rule is None:
            return (
                f"{self._pictures} pictures counted as the text {IMAGE}: {self._tokenizer} is no model that sees them; "
                "with one that does (--tokenizer), each has the tokens of its size"
            )
        return f"{self._pictures} pictures counted as {self._least} to {self._most} tokens each, {self._tokens} in all"


def without_duplicates(rows: Rows) -> Outcome:
    """Keep the first of equal prompts; a prompt that is also in another split is removed from train. Memory holds about
    200 bytes of each prompt."""
    seen: dict[bytes, tuple[str, int]] = {}
    kept: Rows = {}
    removed: Counter[str] = Counter()
    examples: list[str] = []
    for split in sorted(rows, key=lambda split: split == TRAIN):
        places = array("q")
        for place, row in enumerate(rows[split]):
            where, other = seen.setdefault(_key(row.prompt), (split, place))
            if (where, other) == (split, place):
                places.append(place)
                continue
            first = rows[where][other]
            why = "repeated" if where == split else "in another split"
            differs = first.prompt.ground_truth != row.prompt.ground_truth
            removed[f"{why} with another answer" if differs else why] += 1
            if len(examples) < EXAMPLES:
                examples.append(f"{row.where} repeats {first.where}")
        kept[split] = rows[split].take(places)
    return Outcome({split: kept[split] for split in rows}, dict(removed), examples)


def _key(prompt: Prompt, seed: str = "") -> bytes:
    """16 bytes, equal for equal prompts."""
    text = normalised(question(prompt)).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=16, key=seed.encode()).digest()


def held_out(rows: Rows, size: float, seed: int) -> Outcome:
    """Take rows of train as the test split: so many, or for a `size` below 1 that share. Equal prompts stay together,
    so none is in both. Which ones depends on the seed and on their own text alone, so that further rows move few."""
    train = rows.get(TRAIN)
    if train is None or TEST in rows:
        count = f"a test split of {len(rows[TEST])} rows" if TEST in rows else f"no train split ({', '.join(rows)})"
        raise ConfigError(
            f"--test-size = {size:g}: the source has {count}",
            "leave it out" + (", or take the train split alone: --split train" if train is not None else ""),
        )
    wanted = max(1, round(size * len(train))) if size < 1 else int(size)
    drawn = np.frombuffer(array("Q", (int.from_bytes(_key(row.prompt, str(seed))[:8]) for row in train)), np.uint64)
    keys, counts = np.unique(drawn, return_counts=True)
    groups = max(1, int(np.cumsum(counts).searchsorted(wanted, side="right")))
    if wanted >= len(train) or groups >= len(keys):
        raise ConfigError(
            f"--test-size = {size:g} leaves nothing to train on: there are {len(train)} rows of {len(keys)} different "
            "prompts",
            "give a smaller one",
        )
    is_test = drawn <= keys[groups - 1]
    tests = train.take(np.flatnonzero(is_test)).as_test()
    kept = train.take(np.flatnonzero(~is_test))
    return Outcome({TRAIN: kept, TEST: tests}, {}, [], f"{len(tests)} rows are the test split (seed {seed})")


def repeats(rows: Rows) -> str:
    """One line on the train rows that are also rows of another split, and on the rows of other splits that repeat one
    another; empty if there are none. Nothing is removed."""
    notes = []
    train = rows.get(TRAIN, ())
    for split, some in rows.items():
        if split == TRAIN:
            continue
        asked = {normalised(question(row.prompt)) for row in some}
        if shared := sum(normalised(question(row.prompt)) in asked for row in train):
            notes.append(f"{shared} of {len(train)} train rows ask what a {split} row asks (--dedup takes them out)")
        problems = len({row.prompt.problem() for row in some})
        if problems < len(some):
            notes.append(f"{len(some)} {split} rows are {problems} prompts (equal ones are evaluated as one)")
    return "; ".join(notes)


def decontaminated(rows: Rows, against: Sequence[str], n: int, share: float, on_progress: OnProgress) -> Outcome:
    """Remove train rows that hold `share` of the n-grams of a prompt in the evaluation sets `against`."""
    from rlcli.data.prompts.prompt_table import read_prompts

    train = rows.get(TRAIN)
    if train is None:
        raise DataError(f"--decontaminate: there is no train split (only {', '.join(rows)})", "leave the flag out")
    sets = {}
    for path in against:
        asked = read_prompts(path, TEST, verifier="unread")  # the verifier does not matter here
        sets[path] = EvaluationSet([question(prompt) for prompt in asked], n)
    kept = array("q")
    removed: Counter[str] = Counter()
    touched: dict[str, set[int]] = {path: set() for path in sets}
    examples: list[str] = []
    for number, (row, tokens) in enumerate(zip(train, tokens_of(question(row.prompt) for row in train), strict=True)):
        found = [(match, path) for path, asked in sets.items() if (match := asked.match(tokens))]
        match, path = max(found, key=lambda one: one[0].share, default=(None, ""))
        if match is None or match.share < share:
            kept.append(number)
        else:
            removed[path] += 1
            touched[path].add(match.index)
            if len(examples) < EXAMPLES:
                examples.append(f"{row.where} holds {match.share:.0%} of row {match.index} of {path}")
        if number % REPORT_EVERY == 0:
            on_progress("decontaminate", number, len(train))
    reasons = {f"near {len(touched[path])} rows of {path}": removed[path] for path in sets}
    return Outcome(rows | {TRAIN: train.take(kept)}, reasons, examples)


def shuffled(rows: Rows, seed: int) -> Outcome:
    """Shuffle each split; the order depends on the seed and the split's name."""
    mixed = {}
    for split, some in rows.items():
        mixed[split] = some.take(random.Random(f"{seed}:{split}").sample(range(len(some)), len(some)))
    return Outcome(mixed, {}, [])


def limited(rows: Rows, limit: int) -> Outcome:
    """Keep the first `limit` rows of each split."""
    over = sum(max(0, len(some) - limit) for some in rows.values())
    return Outcome({split: some[:limit] for split, some in rows.items()}, {"over the limit": over}, [])


def _between(rows: Rows, lengths: Mapping[str, Sequence[int]], low: int, high: float) -> Outcome:
    """Keep rows whose length is from `low` to `high`."""
    shorter = {split: np.asarray(some) < low for split, some in lengths.items()}
    longer = {split: np.asarray(some) > high for split, some in lengths.items()}
    removed = {
        "shorter": sum(int(some.sum()) for some in shorter.values()),
        "longer": sum(int(some.sum()) for some in longer.values()),
    }
    kept = {split: some.take(np.flatnonzero(~(shorter[split] | longer[split]))) for split, some in rows.items()}
    return Outcome(kept, removed, [])
