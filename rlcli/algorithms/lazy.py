"""Imports torch when a function first computes with it: listing functions and their inputs, as `rlcli plan` does, must
not import torch, which takes seconds.

    from rlcli.algorithms.lazy import Tensor, torch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> object:
            import torch

            return getattr(torch, name)

    torch = _Torch()
    Tensor = object
    """Only for annotations."""

__all__ = ["Tensor", "torch"]
