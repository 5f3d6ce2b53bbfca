"""A real headless Chromium for tests of pages; skips where there is none, fails if RLCLI_REQUIRE_BROWSER is set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

REQUIRE, SYNC_API = "RLCLI_REQUIRE_BROWSER", "playwright.sync_api"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1280, "height": 900}
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  violations.push(event.violatedDirective + " " + event.blockedURI));
"""


def found() -> str:
    """The path of a Chromium; skips the test if there is none."""
    path = next((path for name in NAMES if (path := shutil.which(name))), "")
    if not path:
        assert not os.environ.get(REQUIRE), f"{REQUIRE} is set, and there is no Chromium"
        pytest.skip("no Chromium")
    return path


@contextmanager
def chromium() -> Iterator[Any]:
    """A started browser, with an empty profile."""
    path = found()
    sync_api = import_module(SYNC_API) if os.environ.get(REQUIRE) else pytest.importorskip(SYNC_API)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS), headless=True)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A tab that remembers errors, violations of the page's policy and requests beyond `origin`."""

    def __init__(self, browser: Any, origin: str, viewport: dict[str, int] = LAPTOP, scheme: str = "light") -> None:
        self.origin = origin
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme)
        self.context.set_default_timeout(60_000)
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._request)

    def open(self, where: str) -> Any:
        """Open a page by its hash, such as `samples?step=3`, wait until it is complete, and return the tab."""
        ready_before = self.page.evaluate("document.documentElement.dataset.ready || ''")
        if self.page.url.startswith(self.origin):
            self.page.evaluate("where => { location.hash = where }", f"#/{where}")
        else:
            self.page.goto(f"{self.origin}#/{where}")
        self.page.wait_for_function(
            "before => (document.documentElement.dataset.ready || '') !== before && document.querySelector('.page')",
            arg=ready_before,
        )
        return self.page

    def close(self) -> None:
        """Close the tab; no script may have failed, none been blocked, and nothing asked from elsewhere."""
        violations = self.page.evaluate("window.violations")
        self.context.close()
        assert (self.errors, violations, self.foreign) == ([], [], [])

    def _request(self, request: Any) -> None:
        folder = self.origin.rpartition("/")[0]
        if not request.url.startswith((folder, "data:", "about:")):
            self.foreign.append(request.url)


def url_of(path: Path) -> str:
    """The file:// address of a report."""
    return path.absolute().as_uri()
