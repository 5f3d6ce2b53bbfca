"""Import verl and TRL configurations as recipes. Files are read as data and never executed."""

from __future__ import annotations

from rlcli.config.importing.convert import NAMES, Imported, import_file
from rlcli.config.importing.reading import Line

__all__ = ["NAMES", "Imported", "Line", "import_file"]
