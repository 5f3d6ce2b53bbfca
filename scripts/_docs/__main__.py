"""Builds the documentation site, or serves it: see scripts/docs."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from scripts._docs.built import breakable, problems
from scripts._docs.staging import DOCS, ROOT, SiteError, sources, stage

POLL_SECONDS = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Build or serve the documentation site.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the built site (default: site)")
    parser.add_argument("--serve", action="store_true", help="serve on loopback, and build again after each change")
    parser.add_argument("--port", type=int, default=8000, help="port of --serve (default: 8000)")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="rlcli-docs-") as folder:
            if arguments.serve:
                return serve(Path(folder), arguments.port)
            pages = build(Path(folder), arguments.out)
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {pages} pages in {time.monotonic() - started:.0f} s")
    return 0


def build(folder: Path, output_folder: Path) -> int:
    """Build the site by way of `folder` into `output_folder`, which it replaces. Returns the number of pages."""
    if output_folder.exists() and any(output_folder.iterdir()) and not (output_folder / "index.html").exists():
        raise SiteError(f"{output_folder} is not empty and holds no site; name another folder")
    stage(folder)
    done = subprocess.run([*zensical("build"), "--strict"], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SiteError(f"zensical reports:\n{done.stdout}{done.stderr}")
    for page in (folder / "site").rglob("*.html"):
        page.write_text(breakable(page.read_text(encoding="utf-8")), encoding="utf-8")
    # From disk the theme loads its index as a script, which only zensical's own plugin for that would write, together
    # with a script from elsewhere. Browsers that allow no worker from disk then report that search is unavailable.
    index = (folder / "site" / "search.json").read_text(encoding="utf-8")
    (folder / "site" / "search.js").write_text(f"var __index = {index};\n", encoding="utf-8")
    if link_problems := problems(folder / "site"):
        raise SiteError("the built pages have problems:\n  " + "\n  ".join(link_problems))
    shutil.rmtree(output_folder, ignore_errors=True)
    shutil.copytree(folder / "site", output_folder)
    return len(list(output_folder.rglob("*.html")))


def serve(folder: Path, port: int) -> int:
    """Serve the site until interrupted."""
    stage(folder)
    threading.Thread(target=follow, args=(folder,), daemon=True).start()
    try:
        return subprocess.run([*zensical("serve"), "--dev-addr", f"127.0.0.1:{port}"], cwd=folder).returncode
    except KeyboardInterrupt:
        return 130


def follow(folder: Path) -> None:
    """Stage the pages again whenever one of them changes; the server then builds them."""
    seen = stamps()
    while True:
        time.sleep(POLL_SECONDS)
        if (now := stamps()) != seen:
            seen = now
            try:
                stage(folder)
            except SiteError as error:
                print(f"error: {error}", file=sys.stderr)


def stamps() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [*sources().values(), *DOCS.rglob("*.css")] if path.exists()}


def zensical(command: str) -> list[str]:
    return [sys.executable, "-P", "-m", "zensical", command]


if __name__ == "__main__":
    sys.exit(main())
