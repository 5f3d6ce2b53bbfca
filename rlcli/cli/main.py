"""The entry point: imports almost nothing, so that an early Ctrl-C prints one word and no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """`rlcli.cli.app.run`: the exit code of the command line, 130 if the import of its modules was interrupted."""
    try:
        from rlcli.cli.app import run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run(arguments)


if __name__ == "__main__":
    code = main()
    from rlcli.cli.app import leave

    leave(code)
