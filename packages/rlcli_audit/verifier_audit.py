"""Run an audit: the gold answers, then probes made from the accepted ones, then a sample of these again."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import ConfigError, DataError, VerifierError
from rlcli.images.image_descriptions import described
from rlcli.rewards.crash import without_response
from rlcli.rewards.expression import Composition, parse
from rlcli.rewards.latency import Latency
from rlcli.rewards.processes.scoring_pool import ScoringPool, in_order
from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.rewards.verifier_checks import check_loaded, key_notes
from rlcli.rewards.verifier_registry import of_row
from rlcli.types import UNVERIFIED, Outcome, Prompt, Verdict, VerifyRequest
from rlcli_audit import mutations
from rlcli_audit.audit_images import split_of
from rlcli_audit.audit_report import END_CHARS, Determinism, Report, Tally, UnexpectedVerdict
from rlcli_audit.audit_subject import GoldFailed, Subject, make_subject, refuse_installed_judges
from rlcli_audit.forms import GOLD_FORM, Form, accepted, bare, choose_form, stater
from rlcli_audit.probes import Case, Group, Probe

CALIBRATION_ROWS = 12
"""Rows on which the forms of an answer are tried."""

REPEATED_PROBES = 200
"""Maximum number of repeated verifications; also at most REPEATED_SHARE of all."""

REPEATED_SHARE = 0.1

LONG_CHARS = 100_000
MAX_LONG_PROBES = 50
"""Maximum number of probes longer than LONG_CHARS per kind."""

MAX_TIMEOUTS = 10
"""Maximum number of timeouts of a kind before it is skipped: it has failed, and the rest would take hours."""

CRASHING_ROWS = 4
"""Rows of a verifier that are tested for crashes first."""
WITHOUT_ANSWER = ("?", "I do not know.")
"""Responses that no verifier accepts."""

RESPONSE = "the row's response"
STATEMENT = "the answer stated"

OnProgress = Callable[[str, int, int], None]
"""Called with the current activity, its completed steps, and the total."""


@dataclass(frozen=True)
class Options:
    """Options of an audit."""

    limit: int = 0
    """Number of leading rows to audit; 0: all."""
    seed: int = 0
    """Seed of the choice of probes."""
    mutations: int = 12
    """Probes of each row in addition to its gold; 0: all."""
    processes: int = 2
    """Scoring processes."""
    deadline_s: float = 5.0
    """Seconds that a verification may take."""
    sandbox: str = ""
    """As `verifier.sandbox`."""
    strict: bool = False
    """Warnings fail the audit too."""


def audit(
    verifier: str, data: Path, options: Options, on_progress: OnProgress = lambda activity, done, total: None
) -> Report:
    """Audit the expression `verifier` (`auto`: what each row names) on a parquet file or a folder's train.parquet.

    Raises `DataError` for an unusable file and for a row whose ground truth the verifier cannot read, `VerifierError`
    for a verifier that fails on every row, and what the pool raises.
    """
    started = time.monotonic()
    prompts = _read(data, verifier)
    rows = prompts[: options.limit] if options.limit else prompts
    compositions = _compositions(verifier, rows, data)
    distinct = {str(composition): composition for composition in dict.fromkeys(compositions)}
    expressions = sorted(distinct)
    refuse_installed_judges(distinct.values())
    with (
        ScoringPool(options.processes, options.deadline_s, expressions, options.sandbox) as pool,
        ScoringPool(1, options.deadline_s, expressions, options.sandbox) as another,
    ):
        check_loaded(pool.loaded, options.deadline_s, options.sandbox, "--deadline")
        known = {
            composition: make_subject(composition, pool.loaded[name], another) for name, composition in distinct.items()
        }
        subjects = [known[composition] for composition in compositions]
        run = _Audit(rows, subjects, pool, options, on_progress)
        run.refuse_crashing()
        run.verify_golds()
        run.verify_mutations()
        sent = key_notes(pool.loaded)
        if not run.seconds:
            raise DataError(
                f"data: {data}: no row has a right answer to try"
                + (f"; the verifier crashes on some responses: {run.crash}" if run.crash else ""),
                "fix the verifier" if run.crash else "give rows an extra_info.response, or the verifier a gold",
            )
        determinism = run.repeat(another)
    return Report(
        verifier=verifier,
        data=str(data),
        seed=options.seed,
        strict=options.strict,
        rows=len(rows),
        rows_in_file=len(prompts),
        forms={name: form.name if form else "none found" for name, form in run.forms.items()},
        tallies=tuple(sorted(run.tallies.values(), key=lambda tally: list(Group).index(tally.group))),
        surprises=tuple(run.surprises),
        determinism=determinism,
        latency=Latency.of(run.seconds),
        verifications=len(run.seconds),
        seconds=time.monotonic() - started,
        notes=(*sent, *run.notes()),
    )


def _read(data: Path, verifier: str) -> Sequence[Prompt]:
    names_rows_own = parse(verifier).names_rows_own
    return read_prompts(data, split_of(data), "auto" if names_rows_own else verifier)


def _compositions(verifier: str, rows: Sequence[Prompt], data: Path) -> list[Composition]:
    """The verifier of each row."""
    composition = parse(verifier).located()
    if not composition.names_rows_own:
        return [composition] * len(rows)
    known: dict[str, Composition] = {}
    for number, row in enumerate(rows):
        if row.verifier not in known:
            try:
                known[row.verifier] = of_row(composition, row.verifier).located()
            except ConfigError as error:
                raise DataError(f"data: {data}, row {number} (the first is 0): {error.message}", error.hint) from error
    return [known[row.verifier] for row in rows]


@dataclass(frozen=True, slots=True)
class _Verification:
    """One verification."""

    row: int
    """Index of the row."""
    subject: Subject
    """The verifier."""
    probe: Probe
    """The probe."""
    request: VerifyRequest
    """The request for the scoring pool."""


@dataclass
class _Audit:
    """A running audit."""

    rows: Sequence[Prompt]
    """Rows of the data."""
    subjects: Sequence[Subject]
    """Verifier of each row."""
    pool: ScoringPool
    """Scoring pool."""
    options: Options
    """Options of the audit."""
    on_progress: OnProgress
    """Gets the progress."""
    forms: dict[str, Form | None] = field(default_factory=dict)
    """Verifier → form in which answers are stated."""
    rights: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """Row → the accepted response from which its probes are made, and whether it is a statement of the answer."""
    tallies: dict[tuple[Group, str], Tally] = field(default_factory=dict)
    """Results by group and kind."""
    surprises: list[UnexpectedVerdict] = field(default_factory=list)
    """Unexpected verdicts."""
    seconds: list[float] = field(default_factory=list)
    """Time of each verification."""
    sample: list[tuple[_Verification, Verdict]] = field(default_factory=list)
    """Reservoir sample of the verifications, to be repeated."""
    untried: list[int] = field(default_factory=list)
    """Rows without a right answer to try."""
    timeouts: Counter[tuple[Group, str]] = field(default_factory=Counter)
    """Timeouts by group and kind."""
    crash: str = ""
    """Detail of the first crash while the forms of an answer were tried."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.options.seed)
        self.requests = [row.request() for row in self.rows]

    def refuse_crashing(self) -> None:
        """Raise `VerifierError` if a verifier crashes on its first rows, for any response: nothing could be tried.

        A verifier that crashes in this way on the first row only cannot read that row, which `verify_golds` reports.
        """
        rows_by_expression: dict[str, list[int]] = {}
        for number, subject in enumerate(self.subjects):
            if len(rows := rows_by_expression.setdefault(subject.expression, [])) < CRASHING_ROWS:
                rows.append(number)
        for expression, numbers in rows_by_expression.items():
            requests = [
                replace(self.requests[number], completion=text)
                for number in numbers
                for text in (self.requests[number].ground_truth, *WITHOUT_ANSWER)
            ]
            verdicts = self._verify([(expression, request) for request in requests])
            if all(verdict.outcome is Outcome.CRASH for verdict in verdicts):
                of_all = "every row" if len(numbers) == len(self.rows) else f"the first {len(numbers)} rows"
                raise VerifierError(
                    f"{expression} fails on {of_all}, whatever the response: {verdicts[0].detail}", "fix it"
                )

    def verify_golds(self) -> None:
        """Try the right answers of every row."""
        self._choose_forms()
        failed: dict[int, str] = {}
        for verification, verdict in self._verdicts(self._golds(), "gold answers", 2 * len(self.rows)):
            self._count(verification, verdict)
            if accepted(verdict, verification.subject):
                # A statement is short and plain: the best source of probes.
                stated = verification.probe.kind == STATEMENT
                if stated or verification.row not in self.rights:
                    self.rights[verification.row] = (verification.request.completion, stated)
            elif verdict.outcome is Outcome.CRASH:
                failed[verification.row] = verdict.detail
        self._refuse_unreadable(failed)

    def verify_mutations(self) -> None:
        """Try the probes made from the accepted right answers."""
        for verification, verdict in self._verdicts(
            self._mutations(), "mutations", len(self.rights) * self.options.mutations
        ):
            self._count(verification, verdict)

    def repeat(self, pool: ScoringPool) -> Determinism:
        """Repeat a sample of the verifications in reverse order, in another process."""
        repeated = self.sample[: max(1, int(REPEATED_SHARE * len(self.seconds)))][::-1]
        verdicts = [
            verdict
            for _, verdict in self._verdicts(
                (verification for verification, _ in repeated), "determinism", len(repeated), pool
            )
        ]
        differing = [
            self._surprise(verification, verdict)
            for (verification, first_verdict), verdict in zip(repeated, verdicts, strict=True)
            if (verdict.score, verdict.outcome, verdict.answer)
            != (first_verdict.score, first_verdict.outcome, first_verdict.answer)
        ]
        return Determinism(len(repeated), tuple(differing))

    def notes(self) -> Iterator[str]:
        """Notes on how the audit was done."""
        kinds = {subject.expression: subject for subject in self.subjects}
        for name, form in self.forms.items():
            if form is None:
                yield f"{name}: no usual statement of the answer is accepted; probes are made of the rows' responses"
            elif form.name != GOLD_FORM:
                yield f"{name}: it has no gold that fits; answers are stated as: {form.name}"
            if not kinds[name].kind:
                yield f"{name}: its module sets no ANSWER_KIND; the kind was detected from each ground truth"
            elif kinds[name].kind == mutations.WITHOUT_ANSWER:
                yield f"{name}: it reads no answer, so only its gold can be tried"
        for (group, kind), times in self.timeouts.items():
            if times >= MAX_TIMEOUTS and group is not Group.GOLD:
                yield f"{kind} was given up after {times} timeouts"
        if self.untried:
            some = ", ".join(map(str, self.untried[:5]))
            yield f"{len(self.untried)} rows have no right answer to try (the first: {some})"

    def _choose_forms(self) -> None:
        by_expression: dict[str, list[int]] = {}
        for number, subject in enumerate(self.subjects):
            by_expression.setdefault(subject.expression, []).append(number)
        for expression, numbers in by_expression.items():
            step = max(1, len(numbers) // CALIBRATION_ROWS)
            some = [self.requests[number] for number in numbers[::step][:CALIBRATION_ROWS]]
            subject = self.subjects[numbers[0]]
            self.forms[expression] = choose_form(subject, some, self._verify)

    def _golds(self) -> Iterator[_Verification]:
        for number, (subject, request) in enumerate(zip(self.subjects, self.requests, strict=True)):
            response = request.extra_info.get("response")
            responses = [(RESPONSE, response)] if isinstance(response, str) and response.strip() else []
            statement = self._statement(number, subject, request)
            responses += [(STATEMENT, statement)] if statement else []
            if not responses:
                self.untried.append(number)
            for kind, text in responses:
                yield _Verification(number, subject, Probe(Group.GOLD, kind, text), replace(request, completion=text))

    def _statement(self, number: int, subject: Subject, request: VerifyRequest) -> str | None:
        form = self.forms[subject.expression]
        try:
            return form.right(request) if form else None
        except GoldFailed as error:
            raise self._unreadable(number, str(error)) from error

    def _mutations(self) -> Iterator[_Verification]:
        tried: Counter[tuple[Group, str]] = Counter()
        for number, (right, stated) in sorted(self.rights.items()):
            subject, request = self.subjects[number], replace(self.requests[number], completion=right)
            answer = bare(request.ground_truth)
            form = self.forms[subject.expression] if stated else None
            case = Case(request, answer, stater(form, request, answer))
            allowed = self._allowed(mutations.probes(case, subject.kind), tried)
            # Rare kinds first, so that each kind is tried as often as possible.
            probes = sorted(allowed, key=lambda probe: (tried[probe.group, probe.kind], self.random.random()))
            for probe in probes[: self.options.mutations or None]:
                tried[probe.group, probe.kind] += 1
                yield _Verification(number, subject, probe, replace(request, completion=probe.completion))

    def _allowed(self, candidates: Iterable[Probe], tried: Counter[tuple[Group, str]]) -> Iterator[Probe]:
        for probe in candidates:
            kind = probe.group, probe.kind
            long = len(probe.completion) >= LONG_CHARS and tried[kind] >= MAX_LONG_PROBES
            if not long and self.timeouts[kind] < MAX_TIMEOUTS:
                yield probe

    def _verify(self, pairs: Sequence[tuple[str, VerifyRequest]]) -> list[Verdict]:
        verdicts = [future.result() for future in [self.pool.submit(name, request) for name, request in pairs]]
        crashed = (verdict.detail for verdict in verdicts if verdict.outcome is Outcome.CRASH)
        self.crash = self.crash or next(crashed, "")
        return verdicts

    def _verdicts(
        self, verifications: Iterable[_Verification], activity: str, total: int, pool: ScoringPool | None = None
    ) -> Iterator[tuple[_Verification, Verdict]]:
        """The verdicts, in order."""

        def submit(numbered: tuple[int, _Verification]) -> Future[Verdict]:
            done, verification = numbered
            self.on_progress(activity, done, total)
            return (pool or self.pool).submit(verification.subject.expression, verification.request)

        return ((verification, verdict) for (_, verification), verdict in in_order(enumerate(verifications), submit))

    def _count(self, verification: _Verification, verdict: Verdict) -> None:
        probe = verification.probe
        tally = self.tallies.setdefault((probe.group, probe.kind), Tally(probe.group, probe.kind))
        overran = verdict.detail.startswith(OVERRAN)
        failed = overran or verdict.outcome in UNVERIFIED
        right = not failed and accepted(verdict, verification.subject) == probe.group.accepted
        tally.tried += 1
        tally.failed += failed
        self.timeouts[probe.group, probe.kind] += overran or verdict.outcome is Outcome.TIMEOUT
        tally.as_expected += right
        if not right:
            self.surprises.append(self._surprise(verification, verdict))
        self.seconds.append(verdict.latency_s)
        # Reservoir sampling: each verification is repeated with the same probability.
        if len(self.sample) < REPEATED_PROBES:
            self.sample.append((verification, verdict))
        elif (index := self.random.randrange(len(self.seconds))) < REPEATED_PROBES:
            self.sample[index] = (verification, verdict)

    def _refuse_unreadable(self, failed: dict[int, str]) -> None:
        """Raise an error if a row's verification crashes in the same way for any response: the row is the cause."""
        for number, detail in sorted(failed.items()):
            subject, request = self.subjects[number], self.requests[number]
            pairs = [(subject.expression, replace(request, completion=text)) for text in WITHOUT_ANSWER]
            same = without_response(detail)
            if any(
                without_response(verdict.detail) != same or verdict.outcome is not Outcome.CRASH
                for verdict in self._verify(pairs)
            ):
                continue
            if len(failed) == len(self.rows) > 1:
                raise VerifierError(
                    f"{subject.expression} fails on every row, whatever the response: {detail}", "fix it"
                )
            raise self._unreadable(number, detail, len(failed) - 1)

    def _unreadable(self, number: int, detail: str, others: int = 0) -> DataError:
        others_text = f" ({others} other rows fail too)" if others else ""
        return DataError(
            f"data: row {number} (the first is 0): {self.subjects[number].expression} cannot read the ground truth "
            f"{self.rows[number].ground_truth!r:.80}: {detail}{others_text}",
            "fix or drop that row, or name another verifier",
        )

    def _surprise(self, verification: _Verification, verdict: Verdict) -> UnexpectedVerdict:
        return UnexpectedVerdict(
            row=verification.row,
            group=verification.probe.group,
            kind=verification.probe.kind,
            verifier=verification.subject.expression,
            ground_truth=verification.request.ground_truth[-END_CHARS:],
            response_end=verification.probe.completion[-END_CHARS:],
            score=verdict.score,
            outcome=str(verdict.outcome),
            extracted=verdict.answer,
            detail=verdict.detail,
            images=described(self.rows[verification.row].images),
        )
