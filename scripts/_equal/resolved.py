"""Every recipe as it is resolved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tree import Tree


def resolved_recipes(tree: Tree, work: Path) -> dict[str, Any]:
    """The value of each key, by recipe."""
    listed = json.loads(tree.rlcli("recipes", "list", "--json"))
    names = [row["name"] for row in (listed["recipes"] if isinstance(listed, dict) else listed)]
    return {name: json.loads(tree.rlcli("recipes", "show", name, "--resolved", "--json"))["values"] for name in names}
