"""Counts rows that repeat a prompt, within a dataset and between two, by their tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts


def repeated_rows(prompts: TokenizedPrompts) -> int:
    """Number of rows that have the prompt of an earlier row. 0 for a vision-language model: equal tokens may stand for
    different images, and reading all of them takes too long."""
    if prompts.rule is not None:
        return 0
    return len(prompts) - len(np.unique(_hashes(prompts)))


def rows_in(prompts: TokenizedPrompts, others: TokenizedPrompts, *, conversing: bool = False) -> int:
    """Number of rows of `prompts` that have the prompt of a row of `others`: the same tokens and images and, with
    `conversing`, the same `extra_info`, in which an environment may read its task."""
    ours, theirs = _hashes(prompts), _hashes(others)
    candidates = np.flatnonzero(np.isin(ours, theirs))
    if prompts.rule is None and not conversing:
        return len(candidates)
    other_keys = {_with_rest(others, row, conversing) for row in np.flatnonzero(np.isin(theirs, ours)).tolist()}
    return sum(_with_rest(prompts, row, conversing) in other_keys for row in candidates.tolist())


def _hashes(prompts: TokenizedPrompts) -> np.ndarray:
    """int64 `[rows]`, equal for equal tokens (in this process)."""
    rows = (prompts.flat[start:end] for start, end in pairwise(prompts.offsets.tolist()))
    hashes: np.ndarray = np.fromiter((hash(row.tobytes()) for row in rows), np.int64, len(prompts))
    return hashes


def _with_rest(prompts: TokenizedPrompts, row: int, conversing: bool) -> tuple[bytes, tuple[str, ...], str]:
    """Tokens, images and, if an environment may read it, `extra_info` of a row."""
    prompt = prompts.prompts[row]
    extra = prompt.problem(with_extra_info=True) if conversing else ""
    return prompts.tokens(row).tobytes(), prompt.image_digests(), extra
