"""The door: imports next to nothing, so that an interrupt of the first moments ends in one word and no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """`rlcli.cli.app.run`: the exit code of the command line, 130 where its modules' import was interrupted."""
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
