"""The result of a judge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of all tests of one program."""

    right: bool
    """True if every test passed."""
    share: float
    """Share of the tests that passed, from 0 to 1. Without meaning if `right` is false and the tests stopped at the
    first failure."""
    detail: str
    """The first failure, in words."""

    @classmethod
    def of(cls, passed: int, total: int, detail: str = "") -> Judgement:
        """From counts; a detail without a failure count is a failure too."""
        right = passed == total and not detail
        return cls(right=right, share=passed / total if total else float(right), detail=detail)
