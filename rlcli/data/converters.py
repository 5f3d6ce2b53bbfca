"""The datasets that `rlcli prep` knows, by name."""

from __future__ import annotations

from rlcli.registry import Registry
from rlcli.types import Converter

CONVERTERS: Registry[Converter] = Registry("dataset", "rlcli.data_prep")
