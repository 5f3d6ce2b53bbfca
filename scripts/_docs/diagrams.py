"""Mermaid blocks as SVG in the page, rendered when the site is built: no page loads a script to render them."""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256

LAYOUT = {"padding": 8, "rankSpacing": 28, "nodeSpacing": 28, "subGraphTitleMargin": {"top": 4, "bottom": 12}}
"""Close enough for a diagram of eight steps to fit a column of text."""


@cache
def as_svg(source: str, page: str) -> str:
    """The diagram as a paragraph of HTML. Its colours are the site's (docs/site.css), in light and in dark."""
    import mermaidx

    svg = mermaidx.render(source, config={"flowchart": LAYOUT}).svg()
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    # Not smaller than two thirds of its size, so that its text can be read: a narrow page scrolls it.
    width = float(re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+)', svg)[1])  # type: ignore[index]
    svg = svg.replace("max-width:", f"min-width: {2 * width / 3:.0f}px; max-width:", 1)
    name = "diagram-" + sha256(f"{page}{source}".encode()).hexdigest()[:8]  # ids are unique in a page
    return f'<div class="diagram">{svg.replace("my-svg", name)}</div>\n'
