"""Makes the search find the section that answers a question: docs/questions.toml has what people type.

The search finds only sections that have every word of what is typed. So the words are added to the section, as a
paragraph that the page does not show.
"""

from __future__ import annotations

import html
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "docs" / "questions.toml"
HEADING = re.compile(r"^#{1,3} +(.+?)\s*$")
NOT_SEARCHED = ("notes/changelog.md", "notes/performance_history.md")
"""Pages with long sections on everything, which would be among the results of any search."""


@cache
def questions() -> Mapping[str, Mapping[str, str]]:
    """Page → anchor of a section, or "" for its first → what is typed."""
    by_page: dict[str, dict[str, str]] = defaultdict(dict)
    for typed, address in tomllib.loads(FILE.read_text(encoding="utf-8"))["questions"].items():
        page, _, anchor = address.partition("#")
        by_page[page][anchor] = "; ".join(filter(None, [by_page[page].get(anchor, ""), typed]))
    return by_page


def with_questions(text: str, page: str) -> tuple[str, list[str]]:
    """A page with the questions that its sections answer, and the anchors of `questions` that it lacks."""
    from pymdownx.slugs import slugify

    anchor_of = slugify(case="lower")
    missing = dict(questions().get(page, {}))
    lines: list[str] = ["---\nsearch:\n  exclude: true\n---\n\n"] if page in NOT_SEARCHED else []
    fence, first = False, True
    for line in text.splitlines(keepends=True):
        lines.append(line)
        fence ^= line.lstrip().startswith("```")
        if not fence and (heading := HEADING.match(line)):
            anchors = ["", anchor_of(heading[1], "-")] if first else [anchor_of(heading[1], "-")]
            first = False
            if typed := "; ".join(missing.pop(anchor) for anchor in anchors if anchor in missing):
                lines.append(f'\n<p class="asked">{html.escape(typed)}</p>\n')
    return "".join(lines), [*missing]
