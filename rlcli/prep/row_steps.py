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
    """The result of a step."""

    rows: Rows
    """The remaining rows."""
    removed: dict[str, int]
    """Reason → number of removed rows."""
    examples: list[str]
    """Descriptions of some removed rows."""
    note: str = ""
    """Further information in one line."""


def by_chars(rows: Rows, low: int | None, high: int | None) -> Outcome:
    """Keep rows whose messages have from `low` to `high` characters in total."""
    lengths = {split: array("q", map(_characters, some)) for split, some in rows.items()}
    return _between(rows, lengths, low or 0, float("inf") if high is None else high)


def _characters(row: Row) -> int:
    return sum(len(message["content"]) for message in row.prompt.messages)


def by_tokens(rows: Rows, max_tokens: int, tokenizer: str, on_progress: OnProgress) -> Outcome:
    """Keep rows of at most `max_tokens` with the chat template of `tokenizer` (a folder or hub id), and with the tokens
    of their images if that is a vision-language model."""
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer, prompt_lengths
    from rlcli.model.io.model_checks import image_rule

    has_images = any(split_rows.has_images for split_rows in rows.values())
    rule, loaded = image_rule(tokenizer) if has_images else None, load_tokenizer(tokenizer)
    total, done = sum(map(len, rows.values())), 0
    counted = _ImageTokens(rule, tokenizer)
    lengths: dict[str, array[int]] = {}
    for split, split_rows in rows.items():
        lengths[split] = array("q")
        for chunk in split_rows.chunks():
            prompts = [row.prompt for row in chunk]
            lengths[split].extend(prompt_lengths(prompts, loaded, _chunk_progress(done, total, on_progress), rule))
            counted.add(prompts)
            done += len(prompts)
    return replace(_between(rows, lengths, 0, max_tokens), note=counted.note() if has_images else "")


def _chunk_progress(offset: int, total: int, on_progress: OnProgress) -> Callable[[int, int], None]:
    """A callback for the progress of a chunk that reports the progress of all rows."""
    return lambda done, of_chunk: on_progress("tokenize", offset + done, total)


class _ImageTokens:
    """Counts the tokens of images. rule: of the model's image processor; None: the model takes no images."""

    def __init__(self, rule: ImageRule | None, tokenizer: str) -> None:
        self._rule, self._tokenizer = rule, tokenizer
        self._images, self._tokens, self._least, self._most = 0, 0, 0, 0

    def add(self, prompts: Sequence[Prompt]) -> None:
        for image in (image for prompt in prompts for image in prompt.images):
            self._images += 1
            if self._rule is not None:
                count = self._rule.tokens(*self._rule.fitted(*size_of(image)))
                self._tokens += count
                self._least, self._most = min(self._least or count, count), max(self._most, count)

    def note(self) -> str:
        """A line about the counts."""
        if self._rule is None:
            return (
                f"{self._images} images counted as the text {IMAGE}: {self._tokenizer} is no vision-language model; "
                "with one that does (--tokenizer), each has the tokens of its size"
            )
        return f"{self._images} images counted as {self._least} to {self._most} tokens each, {self._tokens} in all"


def without_duplicates(rows: Rows) -> Outcome:
    """Keep the first of equal prompts; a prompt that is also in another split is removed from train. Needs about 200
    bytes of memory for each prompt."""
    seen: dict[bytes, tuple[str, int]] = {}
    distinct: Rows = {}
    removed: Counter[str] = Counter()
    examples: list[str] = []
    for split in sorted(rows, key=lambda split: split == TRAIN):
        indexes = array("q")
        for index, row in enumerate(rows[split]):
            where, other = seen.setdefault(_key(row.prompt), (split, index))
            if (where, other) == (split, index):
                indexes.append(index)
                continue
            first = rows[where][other]
            why = "repeated" if where == split else "in another split"
            differs = first.prompt.ground_truth != row.prompt.ground_truth
            removed[f"{why} with another answer" if differs else why] += 1
            if len(examples) < EXAMPLES:
                examples.append(f"{row.where} repeats {first.where}")
        distinct[split] = rows[split].take(indexes)
    return Outcome({split: distinct[split] for split in rows}, dict(removed), examples)


def _key(prompt: Prompt, seed: str = "") -> bytes:
    """16 bytes, equal for equal prompts."""
    text = normalised(question(prompt)).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=16, key=seed.encode()).digest()


def held_out(rows: Rows, size: float, seed: int) -> Outcome:
    """Take `size` rows of train as the test split, or this share of them if it is below 1. Equal prompts stay together,
    so none is in both. The selection depends on the seed and each row's text alone, so that further rows move few."""
    train = rows.get(TRAIN)
    if train is None or TEST in rows:
        count = f"a test split of {len(rows[TEST])} rows" if TEST in rows else f"no train split ({', '.join(rows)})"
        raise ConfigError(
            f"--test-size = {size:g}: the source has {count}",
            "leave it out" + (", or take the train split alone: --split train" if train is not None else ""),
        )
    wanted = max(1, round(size * len(train))) if size < 1 else int(size)
    row_keys = np.frombuffer(array("Q", (int.from_bytes(_key(row.prompt, str(seed))[:8]) for row in train)), np.uint64)
    keys, counts = np.unique(row_keys, return_counts=True)
    groups = max(1, int(np.cumsum(counts).searchsorted(wanted, side="right")))
    if wanted >= len(train) or groups >= len(keys):
        raise ConfigError(
            f"--test-size = {size:g} leaves nothing to train on: there are {len(train)} rows of {len(keys)} different "
            "prompts",
            "give a smaller one",
        )
    is_test = row_keys <= keys[groups - 1]
    tests = train.take(np.flatnonzero(is_test)).as_test()
    remaining = train.take(np.flatnonzero(~is_test))
    return Outcome({TRAIN: remaining, TEST: tests}, {}, [], f"{len(tests)} rows are the test split (seed {seed})")


def repeats(rows: Rows) -> str:
    """One line on the train rows that are also rows of another split, and on the rows of other splits that repeat one
    another; empty if there are none. Nothing is removed."""
    notes = []
    train = rows.get(TRAIN, ())
    for split, split_rows in rows.items():
        if split == TRAIN:
            continue
        questions = {normalised(question(row.prompt)) for row in split_rows}
        if shared := sum(normalised(question(row.prompt)) in questions for row in train):
            notes.append(f"{shared} of {len(train)} train rows ask what a {split} row asks (--dedup takes them out)")
        problems = len({row.prompt.problem() for row in split_rows})
        if problems < len(split_rows):
            notes.append(f"{len(split_rows)} {split} rows are {problems} prompts (equal ones are evaluated as one)")
    return "; ".join(notes)


def decontaminated(rows: Rows, against: Sequence[str], n: int, share: float, on_progress: OnProgress) -> Outcome:
    """Remove train rows that contain `share` of the n-grams of a prompt in the evaluation sets `against`."""
    from rlcli.data.prompts.prompt_table import read_prompts

    train = rows.get(TRAIN)
    if train is None:
        raise DataError(f"--decontaminate: there is no train split (only {', '.join(rows)})", "leave the flag out")
    sets = {}
    for path in against:
        prompts = read_prompts(path, TEST, verifier="unread")  # the verifier does not matter here
        sets[path] = EvaluationSet([question(prompt) for prompt in prompts], n)
    indexes = array("q")
    removed: Counter[str] = Counter()
    matched_rows: dict[str, set[int]] = {path: set() for path in sets}
    examples: list[str] = []
    for number, (row, tokens) in enumerate(zip(train, tokens_of(question(row.prompt) for row in train), strict=True)):
        matches = [(match, path) for path, evaluation_set in sets.items() if (match := evaluation_set.match(tokens))]
        match, path = max(matches, key=lambda pair: pair[0].share, default=(None, ""))
        if match is None or match.share < share:
            indexes.append(number)
        else:
            removed[path] += 1
            matched_rows[path].add(match.index)
            if len(examples) < EXAMPLES:
                examples.append(f"{row.where} holds {match.share:.0%} of row {match.index} of {path}")
        if number % REPORT_EVERY == 0:
            on_progress("decontaminate", number, len(train))
    reasons = {f"near {len(matched_rows[path])} rows of {path}": removed[path] for path in sets}
    return Outcome(rows | {TRAIN: train.take(indexes)}, reasons, examples)


def shuffled(rows: Rows, seed: int) -> Outcome:
    """Shuffle each split; the order depends on the seed and the split's name."""
    mixed = {}
    for split, split_rows in rows.items():
        mixed[split] = split_rows.take(random.Random(f"{seed}:{split}").sample(range(len(split_rows)), len(split_rows)))
    return Outcome(mixed, {}, [])


def limited(rows: Rows, limit: int) -> Outcome:
    """Keep the first `limit` rows of each split."""
    over = sum(max(0, len(split_rows) - limit) for split_rows in rows.values())
    return Outcome({split: split_rows[:limit] for split, split_rows in rows.items()}, {"over the limit": over}, [])


def _between(rows: Rows, lengths: Mapping[str, Sequence[int]], low: int, high: float) -> Outcome:
    """Keep rows whose length is from `low` to `high`."""
    shorter = {split: np.asarray(values) < low for split, values in lengths.items()}
    longer = {split: np.asarray(values) > high for split, values in lengths.items()}
    removed = {
        "shorter": sum(int(values.sum()) for values in shorter.values()),
        "longer": sum(int(values.sum()) for values in longer.values()),
    }
    remaining = {
        split: values.take(np.flatnonzero(~(shorter[split] | longer[split]))) for split, values in rows.items()
    }
    return Outcome(remaining, removed, [])
