"""Lays out what the generator builds: the written pages with their links rewritten, the generated ones, the navigation.

Pages of docs/ link to files of the repository as a reader of the repository needs them. The site has no other files, so
a link to one of `OUTSIDE` leads to its page, and a link to another file to a copy of its text.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from scripts._docs.diagrams import as_svg
from scripts._docs.questions import questions, with_questions
from scripts._docs.reference import generated

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {
    "AGENTS.md": "notes/changing_the_code.md",
    "CHANGELOG.md": "notes/changelog.md",
    "CONTRIBUTING.md": "notes/contributing.md",
    "SECURITY.md": "notes/reporting_a_vulnerability.md",
    "data_prep/README.md": "notes/adding_a_dataset.md",
    "environments/README.md": "notes/adding_an_environment.md",
    "recipes/README.md": "notes/adding_a_recipe.md",
    "verifiers/README.md": "notes/adding_a_verifier.md",
}
"""Pages that are kept elsewhere in the repository, and where they are on the site."""
ALIASES = {"README.md": "index.md"}
METRICS = "reference/metrics.md"
"""The page of reference with an anchor for each metric."""
LINK = re.compile(r"(?<!\!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
NAMED = re.compile(r"(?<![`\[\w])`([\w./@]+)(?: ?= ?[^`]+)?`(?![`\]])")
"""Code that is a name, or a name and a value: `train.lr`, `train.truncated = mask`."""
FENCE = re.compile(r"^([ \t]*)(```+|~~~+)")


class SiteError(Exception):
    """Why the site cannot be built; for the terminal."""


def sources() -> dict[str, Path]:
    """Written pages: the path on the site, relative, and the file."""
    pages = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return pages | {page: ROOT / path for path, page in OUTSIDE.items()}


def stage(folder: Path) -> None:
    """Write `folder`/zensical.toml and `folder`/pages. Raises `SiteError` if the navigation and the pages differ."""
    pages = folder / "pages"
    generated_pages = generated()
    if unknown := sorted(questions().keys() - sources().keys()):
        raise SiteError(f"docs/questions.toml names {unknown[0]}, which is no written page")
    check_navigation(navigated(), {*sources(), *generated_pages})
    for page, file in sources().items():
        text, missing = with_questions(adapted(file.read_text(encoding="utf-8"), page, file, pages), page)
        if missing:
            raise SiteError(f"docs/questions.toml names a section that {page} lacks: #{missing[0]}")
        write(pages / page, text)
    for page, text in generated_pages.items():
        write(pages / page, text)
    for asset in [*DOCS.rglob("*.png"), *DOCS.rglob("*.svg"), *DOCS.rglob("*.css")]:
        target = pages / asset.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(asset, target)
    write(folder / "zensical.toml", (DOCS / "zensical.toml").read_text(encoding="utf-8"))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an unchanged page is not built again
        path.write_text(text, encoding="utf-8")


def navigated() -> list[str]:
    """The pages in the navigation of docs/zensical.toml, in order."""
    return list(_leaves(tomllib.loads((DOCS / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]))


def _leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from _leaves(child)


def check_navigation(listed: list[str], existing: set[str]) -> None:
    if absent := sorted(existing - {*listed}):
        raise SiteError(f"the navigation in docs/zensical.toml lacks {', '.join(absent)}")
    if unknown := sorted({*listed} - existing):
        raise SiteError(f"the navigation in docs/zensical.toml names pages that do not exist: {', '.join(unknown)}")
    if twice := sorted({page for page in listed if listed.count(page) > 1}):
        raise SiteError(f"the navigation in docs/zensical.toml names twice: {', '.join(twice)}")


def adapted(text: str, page: str, file: Path, pages: Path) -> str:
    """A written page for the site: its links, names of keys and metrics as links to what explains them, diagrams."""

    def prose(part: str) -> str:
        return _names_linked(LINK.sub(lambda link: _link(link, page, file, pages), part), page)

    return "".join(_parts(text, prose, lambda block: as_svg(block, page)))


def _parts(text: str, prose: Callable[[str], str], diagram: Callable[[str], str]) -> Iterator[str]:
    """The page in parts: prose, changed by `prose`; mermaid blocks, by `diagram`; other fenced blocks as they are."""
    held: list[str] = []
    fence = language = ""
    for line in text.splitlines(keepends=True):
        mark = FENCE.match(line)
        if not fence and mark:
            yield prose("".join(held))
            held, fence, language = [line], mark[2], line.strip().strip("`~").strip()
        elif fence and mark and line.strip() == fence:
            held.append(line)
            yield diagram("".join(held[1:-1])) if language == "mermaid" else "".join(held)
            held, fence = [], ""
        else:
            held.append(line)
    yield "".join(held) if fence else prose("".join(held))


def _link(link: re.Match[str], page: str, file: Path, pages: Path) -> str:
    text, target = link[1], link[2]
    if re.match(r"[a-z]+:", target) or target.startswith("#"):
        return link[0]
    path, _, anchor = target.partition("#")
    linked_path = (file.parent / path).resolve()
    if not linked_path.is_relative_to(ROOT) or not linked_path.exists():
        raise SiteError(f"{file.relative_to(ROOT)} links to {target}, which does not exist")
    repository_path = linked_path.relative_to(ROOT).as_posix()
    if linked_path.is_dir():  # nothing to show: the name alone
        return text if text.startswith("`") else f"`{text}`"
    if linked_path.is_relative_to(DOCS):
        wanted = linked_path.relative_to(DOCS).as_posix()
    elif repository_path in OUTSIDE or repository_path in ALIASES:
        wanted = (OUTSIDE | ALIASES)[repository_path]
    else:
        wanted = f"source/{repository_path}.txt"
        write(pages / wanted, linked_path.read_text(encoding="utf-8"))
    relative_link = os.path.relpath(wanted, Path(page).parent)
    return f"[{text}]({relative_link}{'#' + anchor if anchor else ''})"


@cache
def _places() -> dict[str, str]:
    """Names that pages have in code → page and anchor of what explains them: configuration keys and metrics."""
    from rlcli.config.keys import keys
    from rlcli.runs.metric_names import METRIC_NAMES

    return {key: f"reference/keys.md#{key}" for key in keys()} | {
        name: f"{METRICS}#{name}" for name in METRIC_NAMES if "/" in name
    }


def _names_linked(text: str, page: str) -> str:
    def linked(code: re.Match[str]) -> str:
        target = _places().get(re.sub(r"@\d+", "@K", code[1]), "")
        if not target or target.startswith(f"{page}#"):
            return code[0]
        return f"[{code[0]}]({os.path.relpath(target, Path(page).parent)})"

    lines = text.splitlines(keepends=True)  # no links within headings: their anchors and the table of contents stay
    return "".join(line if line.startswith("#") else re.sub(NAMED, linked, line) for line in lines)
