"""Images on the pages in a real Chromium: from disk as one file and in pieces, and served."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rlcli_inspect.report import page_images, static_report
from rlcli_inspect.report.static_report import write_report

from rlcli.runs.run_data import RunData
from tests.browser import PHONE, Visitor, url_of
from tests.image_runs import drawing, noise, write_data, write_image_run
from tests.unit.packages.inspect.test_browser import CONTRAST, overflows, served

GROUP = "group?step=2&prompt=drawn%3Atrain%3A1"
BROKEN = "sample?step=2&prompt=drawn%3Atrain%3A2"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    data = write_data(folder / "data", [(drawing(0),), (noise(1, (900, 300)), drawing(2)), (noise(3)[:300],)])
    return write_image_run(folder / "run", data)


def sizes(page: Any, where: str, count: int) -> list[list[int]]:
    """The own sizes of the images there, once they are loaded."""
    page.wait_for_function(
        "([where, count]) => [...document.querySelectorAll(where)].filter((one) => one.naturalWidth).length === count",
        arg=[where, count],
    )
    image_sizes: list[list[int]] = page.eval_on_selector_all(
        where, "all => all.map(i => [i.naturalWidth, i.naturalHeight])"
    )
    return image_sizes


def looked_through(visitor: Visitor, enlarged: list[int]) -> None:
    """Each page shows the images, and a click enlarges one."""
    page = visitor.open(GROUP)
    assert sizes(page, ".message .image img", 2) == [[256, 85], [84, 56]]
    assert page.locator(".message.given").last.inner_text().split("\n")[-1] == "?"
    assert "<image>" not in page.locator(".message.given").last.inner_text()
    alt = page.eval_on_selector_all(".image img", "all => all.map(one => one.alt)")
    assert alt[0] == "image 1 of 2, 900 x 300 pixels"
    assert not overflows(page)
    page.click(".image button")
    page.wait_for_function("width => document.querySelector('dialog img').naturalWidth === width", arg=enlarged[0])
    assert sizes(page, "dialog img", 1) == [enlarged]
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page = visitor.open("samples?first=2&prompt_id=drawn%3Atrain%3A1")
    assert sizes(page, ".sample .image img", 4) == [[256, 85], [84, 56]] * 2
    assert "What is drawn? And [image 84 x 56]?" in page.locator(".asked").first.inner_text()
    assert "<image> 0" in page.inner_text("main")
    page.locator(".sample .image img").first.click(force=True)  # the whole card is a link
    page.wait_for_selector("h1:has-text('Sample 0')")
    assert len(sizes(page, ".message .image img", 2)) == 2
    page = visitor.open("prompt?prompt=drawn%3Atrain%3A1")
    assert len(sizes(page, ".message .image img", 2)) == 2
    page = visitor.open(BROKEN)
    page.wait_for_selector(".image:has-text('[image 84 x 56] not shown: the image is broken')")
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize("viewport", [None, PHONE], ids=["laptop", "phone"])
def test_a_report_shows_images_from_disk(visit: Any, run: Path, tmp_path: Path, viewport: Any) -> None:
    written = write_report([RunData(run)], tmp_path / "out")
    assert written.files == 1
    shutil.move(tmp_path / "out", tmp_path / "moved")
    visitor = visit(url_of(tmp_path / "moved" / "index.html"), **({"viewport": viewport} if viewport else {}))
    looked_through(visitor, [256, 85])
    assert "3 of 4 images of these samples are in this report" in visitor.open("overview").inner_text("main")


def test_pieces_of_images_are_loaded_from_disk(
    visit: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_report, "ONE_FILE", 1000)
    monkeypatch.setattr(page_images, "PIECE", 100)
    written = write_report([RunData(run)], tmp_path / "out")
    visitor = visit(url_of(written.path))
    looked_through(visitor, [256, 85])
    shutil.rmtree(tmp_path / "out" / "data" / "0" / "pictures")
    visitor.page.reload()
    page = visitor.open(GROUP)
    page.wait_for_selector(".image:has-text('.js is missing: keep the files of the report together')")
    visitor.errors.clear()


def test_view_serves_them_and_a_larger_copy_on_click(visit: Any, run: Path) -> None:
    with served(run) as url:
        visitor = visit(url)
        looked_through(visitor, [900, 300])
        visitor.page.goto("about:blank")


def test_images_that_are_not_at_hand_are_named_with_the_reason(visit: Any, run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    config = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(config.replace(str(run.parent), "elsewhere"))
    written = write_report([RunData(moved)], tmp_path / "out")
    with served(moved) as url:
        for origin in (url_of(written.path), url):
            visitor = visit(origin)
            page = visitor.open(GROUP)
            reason = "not shown: no such file or folder: elsewhere/data"
            page.wait_for_selector(f".image:has-text('[image 900 x 300] {reason}')")
            page.wait_for_selector(f".image:has-text('[image 84 x 56] {reason}')")
            assert page.evaluate(CONTRAST)[0] >= 4.5
            assert "[image 900 x 300]" in visitor.open("samples").inner_text("main")
            page.goto("about:blank")
