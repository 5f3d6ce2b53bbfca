"""torch, imported when a function first computes with it: to read what functions are there and what they ask for, as
`rlcli plan` does, takes no torch, which takes seconds to import.

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
    """For annotations alone."""

__all__ = ["Tensor", "torch"]
