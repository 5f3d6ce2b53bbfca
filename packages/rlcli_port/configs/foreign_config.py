"""A foreign configuration: its values, and further settings of the run that the script makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RewardFunction:
    """One entry of TRL's `reward_funcs`."""

    name: str
    """The function's name, the dotted name of one in a package, or the name of a model."""
    file: Path | None
    """The file that defines it; None if that is a package that is not beside the script."""
    line: int = 0
    """Line of its definition in that file."""
    in_script: bool = False
    """True if the script itself defines it: to import it would start the training."""
    bound: str = ""
    """The arguments that functools.partial gives it, as written in Python; empty if none."""


@dataclass(frozen=True)
class DataSet:
    """A data set that a script loads."""

    source: str
    """The hub's name, or a path; empty if the script makes the rows."""
    loader: str
    """The function that loads it, such as `load_dataset`."""
    subset: str = ""
    """The named part of the hub's data set."""
    split: str = ""
    """Such as `train`, or `train[:1000]`."""
    steps: tuple[str, ...] = ()
    """Functions that the script applies to the rows, as `map(extract, line 12)`."""


@dataclass
class Configuration:
    """Everything that is known about a foreign run."""

    framework: str
    """`verl` or `trl`."""
    method: str
    """See `methods.METHODS`."""
    values: dict[str, Any]
    """Dotted key → value; `Unresolved` for one that is not known."""
    processes: int | None = None
    """Number of processes that the launcher starts; None if unknown."""
    warnings: list[str] = field(default_factory=list)
    """Limitations of how these values were obtained."""
    rewards: list[RewardFunction] = field(default_factory=list)
    """The reward functions of a TRL script, in their order."""
    data: DataSet | None = None
    """The training data of a TRL script."""
    script: Path | None = None
    """The Python file that defines them."""
    script_text: str = ""
    """Its text; of a notebook, that of its code cells."""
