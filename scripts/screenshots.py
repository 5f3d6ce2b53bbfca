"""Screenshots of the pages of `rlcli report`, for the documentation: docs/img/report_*.png.

    .venv/bin/python scripts/screenshots.py RUN TOOLS_RUN [--out docs/img]

RUN: any run; TOOLS_RUN: one of conversations with a tool, of which tokens were kept. Needs a Chromium.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MOST_BYTES = 150_000
WIDTH, HEIGHT = 1200, 800
COLOURS = 128


def main() -> None:
    from rlcli_inspect.report.static_report import write_report

    from rlcli.runs.run_data import RunData
    from tests.browser import Visitor, chromium, url_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("tools", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    options = parser.parse_args()
    runs = [RunData(options.run), RunData(options.tools)]
    for run in runs:
        run.refresh()
    pages = {
        "overview": "overview",
        "group": group_of(runs[0], 0),
        "sample": sample_of(runs[1], 1) + "&heat=entropy",
        "time": "time?run=1",
    }
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for scheme in ("light",):
            visitor = Visitor(
                browser,
                url_of(write_report(runs, Path(folder) / "report").path),
                {"width": WIDTH, "height": HEIGHT},
                scheme,
            )
            for name, where in pages.items():
                page = visitor.open(where)
                page.wait_for_timeout(300)  # charts are drawn when their size is known
                height = min(1500, max(520, page.evaluate("document.querySelector('.page').scrollHeight") + 110))
                page.set_viewport_size({"width": WIDTH, "height": HEIGHT if name == "overview" else height})
                page.wait_for_timeout(300)
                size = save(page.screenshot(), options.out / f"report_{name}.png")
                print(f"report_{name}.png: {size / 1000:.0f} kB")
            visitor.close()


def group_of(run: Any, number: int) -> str:
    """A group whose samples differ, of a step in the middle."""
    from urllib.parse import quote

    for step in run.steps()[len(run.steps()) // 3 :]:
        rows = run.rows(step, ["prompt_id", "group", "score"])
        for prompt_id, group in dict.fromkeys((row["prompt_id"], row["group"] or 0) for row in rows):
            scores = [row["score"] for row in rows if (row["prompt_id"], row["group"] or 0) == (prompt_id, group)]
            if 0.3 < sum(scores) / len(scores) < 0.7:
                return f"group?run={number}&step={step}&prompt={quote(prompt_id, safe='')}&group={group}"
    raise SystemExit(f"{run.folder} has no group with different scores")


def sample_of(run: Any, number: int) -> str:
    """A right sample of several turns with tokens."""
    from urllib.parse import quote

    for step in reversed(run.steps()):
        token_keys = run.token_keys(step)
        for row in run.rows(step, ["prompt_id", "group", "sample", "turns", "score"]):
            key = (row["prompt_id"], row["group"] or 0, row["sample"])
            if key in token_keys and (row["turns"] or 1) > 1 and row["score"] > 0:
                query = f"step={step}&prompt={quote(key[0], safe='')}&group={key[1]}&sample={key[2]}"
                return f"sample?run={number}&{query}"
    raise SystemExit(f"{run.folder} has no right sample of several turns with tokens")


def save(png: bytes, path: Path) -> int:
    """Write a screenshot with few colours; its size."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)
    size = path.stat().st_size
    assert size < MOST_BYTES, f"{path} has {size} bytes"
    return size


if __name__ == "__main__":
    main()
