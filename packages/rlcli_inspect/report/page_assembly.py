"""Assembles the page: one HTML file with its styles and scripts, which a strict policy names by their hashes.

Nothing of a run is ever part of the markup: data are JSON, and the scripts put every text into the page as text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGES = Path(__file__).parent / "pages"
STYLES = ("vendor/uPlot.min.css", "style.css")
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    *(f"{name}.js" for name in ("dom", "source", "charts", "images", "parts", "overview")),
    *(f"{name}.js" for name in ("samples", "sample", "more", "main")),
)
GENERATOR = "rlcli report"
"""Marks a page, so that a report may be replaced by another one."""
SERVED, FILE, PIECES = "connect-src 'self'", "connect-src 'none'", "connect-src 'none'; script-src-elem 'self' file:"


def page(policy: str, data: Iterable[tuple[str, str]] = (), packed: Iterable[tuple[str, str]] = ()) -> str:
    """The page as HTML. policy: SERVED, FILE or PIECES, how it gets its data. data: name → JSON, embedded. packed: the
    same, embedded compressed."""
    parts = {
        "generator": GENERATOR,
        "policy": content_policy(policy),
        "mode": "view" if policy == SERVED else "report",
        "style": _text(STYLES),
        "data": "".join(embedded(name, json) for name, json in data)
        + "".join(embedded_packed(name, json) for name, json in packed),
        "script": _text(SCRIPTS),
    }
    # In one pass: texts of a run may contain the marks.
    template = (PAGES / "index.html").read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], template)


def content_policy(policy: str) -> str:
    """The Content-Security-Policy: nothing from outside, no inline code but the page's own, no forms, no frames."""
    script, style = _hash(_text(SCRIPTS)), _hash(_text(STYLES))
    first, _, rest = policy.partition("; script-src-elem ")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {script}" + (f" {rest}" if rest else ""),
            f"style-src {style}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            first,
        )
    )


def embedded(name: str, json: str) -> str:
    """A data block, which no browser runs. `<` is escaped, so that no text can end the block.

    >>> embedded("a", '{"b":"</script>"}')
    '<script type="application/json" data-name="a">{"b":"\\\\u003c/script>"}</script>\\n'
    """
    return f'<script type="application/json" data-name="{name}">{json.replace("<", chr(92) + "u003c")}</script>\n'


def embedded_packed(name: str, json: str) -> str:
    """The same, compressed by gzip, in base64: a fifth to a tenth of the size for samples."""
    content = base64.b64encode(gzip.compress(json.encode(), mtime=0)).decode()
    return f'<script type="application/gzip" data-name="{name}">{content}</script>\n'


@cache
def _text(names: tuple[str, ...]) -> str:
    return "\n".join((PAGES / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    # A browser hashes what lies between the tags.
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
