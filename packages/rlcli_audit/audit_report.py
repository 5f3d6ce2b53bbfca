"""Report of an audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rlcli.rewards.latency import Latency
from rlcli_audit.probes import Group

END_CHARS = 400
"""Characters kept from the end of a response."""


@dataclass
class Tally:
    """Results of the probes of one kind."""

    group: Group
    """Group of the probes."""
    kind: str
    """Kind of the probes."""
    tried: int = 0
    """Number of verifications."""
    as_expected: int = 0
    """Verifications with the expected verdict."""
    failed: int = 0
    """Verifications that crashed or timed out, which is never expected."""

    @property
    def share(self) -> float:
        return self.as_expected / self.tried if self.tried else 1.0


def percent(right: int, tried: int) -> str:
    """A share as text, rounded down: 100% means all."""
    return "100%" if right == tried else f"{int(1000 * right / tried) / 10:.1f}%"


@dataclass(frozen=True, slots=True)
class UnexpectedVerdict:
    """An unexpected verdict."""

    row: int
    """Index of the row, from 0."""
    group: Group
    """Group of the probe."""
    kind: str
    """Kind of the probe."""
    verifier: str
    """Expression of the verifier."""
    ground_truth: str
    """End of the row's ground truth."""
    response_end: str
    """End of the verified response."""
    score: float
    """Score of the verdict."""
    outcome: str
    """Outcome of the verdict."""
    extracted: str | None
    """Answer that the verifier extracted."""
    detail: str
    """Detail of the verdict."""
    images: Sequence[Mapping[str, object]] = ()
    """Digests and sizes of the row's images."""


@dataclass(frozen=True, slots=True)
class Determinism:
    """Probes verified again, in another order and by another process. differing: those whose verdict changed."""

    checked: int = 0
    differing: tuple[UnexpectedVerdict, ...] = ()


@dataclass(frozen=True)
class Report:
    """Result of an audit."""

    verifier: str
    """Expression that was audited."""
    data: str
    """Path of the data."""
    seed: int
    """Seed of the choice of probes."""
    strict: bool
    """True if warnings fail the audit."""
    rows: int
    """Audited rows."""
    rows_in_file: int
    """Rows of the file."""
    forms: dict[str, str]
    """Verifier → form in which answers were stated."""
    tallies: tuple[Tally, ...]
    """Results by kind of probe."""
    surprises: tuple[UnexpectedVerdict, ...]
    """Unexpected verdicts."""
    determinism: Determinism
    """Result of the repeated verifications."""
    latency: Latency
    """Verification times."""
    verifications: int
    """Number of verifications."""
    seconds: float
    """Duration of the audit."""
    notes: tuple[str, ...] = field(default=())
    """Notes on how the audit was done."""

    @property
    def faults(self) -> list[str]:
        """The reasons why the audit fails; empty if it passes."""
        return [
            *self._unexpected(grave=True),
            *(self._unexpected(grave=False) if self.strict else []),
            *self._unstable(),
        ]

    @property
    def warnings(self) -> list[str]:
        """Problems that do not fail the audit."""
        return [] if self.strict else self._unexpected(grave=False)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def per_second(self) -> float:
        return self.verifications / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """The whole report, with every surprise."""
        plain = asdict(self)
        plain["tallies"] = [asdict(tally) | {"share": tally.share} for tally in self.tallies]
        return {
            "passed": self.passed,
            "faults": self.faults,
            "warnings": self.warnings,
            "verifications_per_second": self.per_second,
            **plain,
        }

    def _unexpected(self, *, grave: bool) -> list[str]:
        messages = []
        for group in Group:
            kinds = [tally for tally in self.tallies if tally.group is group]
            missed = sum(tally.tried - tally.as_expected for tally in kinds)
            if missed and group.grave == grave:
                tried = sum(tally.tried for tally in kinds)
                word = "not accepted" if group.accepted else "not cleanly rejected"
                messages.append(f"{missed:,} of {tried:,} {PLURALS[group]} {word}")
        return messages

    def _unstable(self) -> list[str]:
        differing = len(self.determinism.differing)
        return [f"{differing} of {self.determinism.checked} verdicts differ when repeated"] if differing else []


PLURALS = {
    Group.GOLD: "gold answers",
    Group.EQUIVALENT: "equivalent forms",
    Group.NEAR_MISS: "near-misses",
    Group.HEDGE: "hedges",
    Group.EXPLOIT: "exploits",
}
