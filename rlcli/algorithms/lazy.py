"""Imports torch when a function first computes with it: listing functions and their inputs, as `rlcli plan` does, must
not import torch, which takes seconds.

    from rlcli.algorithms.lazy import Tensor, torch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
    Tensor = Any
    """Only for annotations."""

__all__ = ["Tensor", "torch"]
