"""Random bits as a function of a counter, the same on every device: SplitMix64 (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", 2014)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Int64
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""Factor of the counter: successive states are far apart."""


def signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def mixed(state: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """SplitMix64's finaliser: each of the 64 bits depends on all bits of the state.

    Integer arithmetic wraps, and shifts of signed numbers extend the sign, which the masks remove.
    """
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * signed(0xBF58476D1CE4E5B9)
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * signed(0x94D049BB133111EB)
    return state ^ ((state >> 31) & 0x1FFFFFFFF)
