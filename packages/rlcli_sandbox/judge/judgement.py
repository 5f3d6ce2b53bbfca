"""The result of a judge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Judgement:
    """right: every test passed. share: how many of them did, from 0 to 1. detail: the first failure, in words.

    Unless all failures are counted, `share` has no meaning if `right` is false: the tests stopped there.
    """

    right: bool
    share: float
    detail: str

    @classmethod
    def of(cls, passed: int, total: int, detail: str = "") -> Judgement:
        """From counts; a detail without a failure count is a failure too."""
        right = passed == total and not detail
        return cls(right=right, share=passed / total if total else float(right), detail=detail)
