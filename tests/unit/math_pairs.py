"""Pairs of a ground truth and a response, with the verdict that a careful reader gives: `math_pairs.jsonl`.

A line is [form, ground truth, text, whether it is right]. The text is an answer that goes into a box ("box"), or a
whole response ("text").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


def pairs() -> Iterator[tuple[str, str, bool]]:
    """Ground truth, response, and whether the response is right."""
    for line in Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines():
        form, gold, text, right = json.loads(line)
        yield gold, rf"So we get $\boxed{{{text}}}$." if form == "box" else text, right
