"""Checks the built site as a browser would read it: every link and anchor exists, and nothing comes from elsewhere."""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
"""Elements for which a browser fetches something, and the attribute that names it."""
REMOTE = re.compile(r"^(https?:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^"')\s]+""", re.IGNORECASE)


class Page(HTMLParser):
    """One page: the anchors that it has, the links that it makes, what it fetches."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: Counter[str] = Counter()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.drawn_by_script = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors[values["id"]] += 1
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        wanted = values.get(FETCHED.get(tag, ""), "")
        if wanted and not (tag == "link" and values.get("rel") == "canonical"):
            self.fetched.append(wanted)
        self.drawn_by_script |= "mermaid" in values.get("class", "").split()


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.pages = {path: Page(path) for path in sorted(self.folder.rglob("*.html"))}

    @cached_property
    def problems(self) -> list[str]:
        found = [f"{self._name(path)}: {problem}" for path, page in self.pages.items() for problem in self._of(page)]
        for path in sorted(self.folder.rglob("*.css")):
            found += [f"{self._name(path)}: fetches {url}" for url in IN_STYLES.findall(path.read_text("utf-8"))]
        return found

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _of(self, page: Page) -> list[str]:
        found = [f"fetches {url}" for url in page.fetched if REMOTE.match(url)]
        found += [f"the anchor {name} exists {count} times" for name, count in page.anchors.items() if count > 1]
        if page.drawn_by_script:
            found.append("has a diagram that a script from elsewhere would draw")
        local = [link for link in [*page.links, *page.fetched] if not re.match(r"[a-z][a-z0-9+.-]*:|//", link)]
        return found + [f"links to {link}, {why}" for link in dict.fromkeys(local) if (why := self._broken(page, link))]

    def _broken(self, page: Page, link: str) -> str:
        """Why a link of the page leads nowhere; empty if it leads somewhere."""
        place, _, anchor = unquote(link).partition("#")
        start = self.folder if place.startswith("/") else page.path.parent  # the page for unknown addresses, 404.html
        there = (start / place.partition("?")[0].lstrip("/")).resolve() if place else page.path
        if there.is_dir():
            there /= "index.html"
        if not there.is_relative_to(self.folder) or not there.exists():
            return "which does not exist"
        if anchor and there in self.pages and anchor not in self.pages[there].anchors:
            return "an anchor that does not exist"
        return ""


def problems(folder: Path) -> list[str]:
    """What is wrong with the site in `folder`, a line each: links, anchors, and what a browser would fetch from
    elsewhere."""
    return Site(folder).problems


def breakable(page: str) -> str:
    """The HTML of a page in which long names in code may break, in a sentence or a table: after `/`, `_`, `.` and `=`.

    >>> breakable("<td><code>reward/mean</code></td> <pre><code>a/b</code></pre>")
    '<td><code>reward/<wbr>mean</code></td> <pre><code>a/b</code></pre>'
    """
    return re.sub(
        r"(<pre\b.*?</pre>)|<code>([^<]*)</code>",
        lambda found: found[1] or "<code>" + re.sub(r"(?<=\w)([/_.=])(?=\w)", r"\1<wbr>", found[2]) + "</code>",
        page,
        flags=re.DOTALL,
    )
