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
        lines = [f"{self._name(path)}: {problem}" for path, page in self.pages.items() for problem in self._of(page)]
        for path in sorted(self.folder.rglob("*.css")):
            lines += [f"{self._name(path)}: fetches {url}" for url in IN_STYLES.findall(path.read_text("utf-8"))]
        return lines

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _of(self, page: Page) -> list[str]:
        problems = [f"fetches {url}" for url in page.fetched if REMOTE.match(url)]
        problems += [f"the anchor {name} exists {count} times" for name, count in page.anchors.items() if count > 1]
        if page.drawn_by_script:
            problems.append("has a diagram that a script from elsewhere would draw")
        local = [link for link in [*page.links, *page.fetched] if not re.match(r"[a-z][a-z0-9+.-]*:|//", link)]
        return problems + [
            f"links to {link}, {why}" for link in dict.fromkeys(local) if (why := self._broken(page, link))
        ]

    def _broken(self, page: Page, link: str) -> str:
        """Why a link of the page leads nowhere; empty if it leads somewhere."""
        path, _, anchor = unquote(link).partition("#")
        start = self.folder if path.startswith("/") else page.path.parent  # the page for unknown addresses, 404.html
        target = (start / path.partition("?")[0].lstrip("/")).resolve() if path else page.path
        if target.is_dir():
            target /= "index.html"
        if not target.is_relative_to(self.folder) or not target.exists():
            return "which does not exist"
        if anchor and target in self.pages and anchor not in self.pages[target].anchors:
            return "an anchor that does not exist"
        return ""


def problems(folder: Path) -> list[str]:
    """Problems of the site in `folder`, a line each: links, anchors, and URLs that a browser would fetch from
    other hosts."""
    return Site(folder).problems


def breakable(page: str) -> str:
    """The HTML of a page in which long names in code may break, in a sentence or a table: after `/`, `_`, `.` and `=`.

    >>> breakable("<td><code>reward/mean</code></td> <pre><code>a/b</code></pre>")
    '<td><code>reward/<wbr>mean</code></td> <pre><code>a/b</code></pre>'
    """
    return re.sub(
        r"(<pre\b.*?</pre>)|<code>([^<]*)</code>",
        lambda match: match[1] or "<code>" + re.sub(r"(?<=\w)([/_.=])(?=\w)", r"\1<wbr>", match[2]) + "</code>",
        page,
        flags=re.DOTALL,
    )
