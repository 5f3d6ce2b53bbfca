"""Runs a shell script inside the sandbox, among programs that only record how they are called.

No module imports this file: its text is the first code of a sandboxed interpreter (`inside.py` of `rlcli_sandbox`). It
reads an order from standard input as JSON: `files` (path → text; absolute paths, laid out below the working directory),
`folders` (empty ones), `script` (one of the paths), `started_in` (a folder), `arguments`, `variables`, `stub` and
`prelude` (for bash), `stubs` (names of programs that are replaced) and `tools` (programs of /usr/bin that run).

It prints a JSON object: `status` of bash, `timed_out` (whether it still ran after `LONGEST_S`), `record` (the calls,
see `STUB` in `shell_run.py`), `errors` (the end of bash's standard error) and `root` (the folder that stands for / in
the script's paths).
"""

import json
import os
import subprocess
import sys

LONGEST_S = 6.0
"""Less than the limit of the sandbox: what was recorded until then counts."""
LONGEST_RECORD = 4 << 20
LONGEST_ERRORS = 4_000


def write(path: str, text: str, mode: int = 0o644) -> None:
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, mode), "w", encoding="utf-8") as file:
        file.write(text)


def main() -> None:
    order = json.load(sys.stdin)
    base = os.getcwd()
    root, stubs, record, prelude = (f"{base}/.rlcli-{name}" for name in ("root", "stubs", "record", "prelude"))
    os.mkdir(stubs)
    write(f"{stubs}/.stub", order["stub"], 0o755)
    for name in order["stubs"]:
        os.symlink(".stub", f"{stubs}/{name}")
    for name in order["tools"]:
        if os.path.exists(f"/usr/bin/{name}"):
            os.symlink(f"/usr/bin/{name}", f"{stubs}/{name}")
    write(prelude, order["prelude"])
    write(record, "")
    for path, text in order["files"].items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        write(root + path, text)
    for path in order["folders"]:
        os.makedirs(root + path, exist_ok=True)
    script = root + order["script"]
    variables = {"PATH": stubs, "BASH_ENV": prelude, "RLCLI_RECORD": record, "TZ": "UTC", "LANG": "C.UTF-8"}
    with open(f"{base}/.rlcli-errors", "w+b") as errors:
        bash = subprocess.Popen(
            ["/bin/bash", script, *order["arguments"]],
            cwd=root + order["started_in"],
            env=variables | order["variables"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            status, timed_out = bash.wait(LONGEST_S), False
        except subprocess.TimeoutExpired:
            status, timed_out = -1, True
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - LONGEST_ERRORS))
        last = errors.read().decode(errors="replace").replace(root, "")
    with open(record, "rb") as file:
        calls = file.read(LONGEST_RECORD).decode(errors="replace")
    json.dump({"status": status, "timed_out": timed_out, "record": calls, "errors": last, "root": root}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # all that is left of the script ends with this process


main()
