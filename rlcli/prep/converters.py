"""The datasets that `rlcli prep` knows, by name."""

from __future__ import annotations

from rlcli.errors import DataError
from rlcli.registry import Registry
from rlcli.types import Converter

CONVERTERS: Registry[Converter] = Registry("dataset", "rlcli.data_prep")


def converter_named(name: str) -> Converter:
    """The dataset's converter. Raises `UnknownName` with similar names, `RlcliError` if its package does not load, and
    `DataError` if the package publishes something else."""
    found: object = CONVERTERS.get(name)
    if not isinstance(found, Converter):
        raise DataError(
            f"the dataset '{name}' ({CONVERTERS.origin(name)}, {CONVERTERS.target(name)}) is a {type(found).__name__}",
            "its package must publish an rlcli.types.Converter",
        )
    return found
