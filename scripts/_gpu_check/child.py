"""Runs one part in a separate process: `python -P -m _gpu_check.child SETTINGS`, the path of a JSON file."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from _gpu_check.check import Check, CheckFailed
from _gpu_check.parts import BY_NAME
from _gpu_check.running import MARK, marked


def end_with(parent: int) -> None:
    """Kill this part and all of its descendants when the process `parent`, which enforces the deadline, is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    for pid in [*marked(os.environ.get(MARK, "")), os.getpid()]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def main(path: str) -> int:
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    settings = json.loads(Path(path).read_text())
    check = Check(
        settings["part"],
        settings["rehearse"],
        Path(settings["work"]),
        Path(settings["models"]),
        Path(settings["result"]),
        settings["deadline_s"],
        settings["shape"],
        data=settings["data"],
    )
    check.write()
    part = BY_NAME[check.name]
    try:
        importlib.import_module(f"_gpu_check.part_{part.module}").run(check, *part.options)
    except CheckFailed as error:
        check.require(False, check.name, str(error))
    except Exception as error:
        traceback.print_exc()
        check.require(False, f"{check.name} runs to its end", f"{type(error).__name__}: {error}".splitlines()[0])
    check.progress("done" if not check.failed else "failed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
