"""Checks of verifiers before a model loads, and failures of verifiers that stop a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcli_sandbox import open_sandbox

from rlcli.config.load import resolve
from rlcli.config.schema import VerifierSection
from rlcli.data.columns import SampleTable
from rlcli.errors import ConfigError, RunFailed, SetupError, VerifierError
from rlcli.launch.preflight import _note_engine_key
from rlcli.launch.verifier_trial import check_comparisons, check_verifiers, refuse_comparisons
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.rollout.scheduler.verifier_failures import Failures, part_weights
from rlcli.support.served_models import ENGINE_KEY
from rlcli.training.loop.metrics import sample_metrics
from rlcli.types import Outcome, Prompt, Sample, Verdict, VerifyRequest
from tests.judges import KEY, judging


def rows(*verifiers: str) -> list[Prompt]:
    question = ({"role": "user", "content": "?"},)
    return [Prompt(f"toy:{i}", question, "toy", "", verifier, "1") for i, verifier in enumerate(verifiers)]


@pytest.fixture
def backend() -> str:
    try:
        return open_sandbox("auto").name
    except SetupError as error:
        pytest.skip(str(error))


def test_every_expression_is_loaded_once_without_a_needless_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlcli.rewards.verifier_checks.proven", lambda name: pytest.fail("nobody needs it"))
    loaded = check_verifiers(
        rows("regex(pattern=x)", "gsm8k + 0.1 * format", "gsm8k + 0.1 * format"), VerifierSection()
    )
    assert loaded == (("gsm8k + 0.1 * format", "regex(pattern=x)"), "")


@pytest.mark.parametrize(
    ("verifier", "error", "says"),
    [
        ("mathh", VerifierError, r"no verifier is called 'mathh' \(row toy:1\); did you mean math"),
        ("gsm8k + forma", VerifierError, r"no verifier is called 'forma' \(row toy:1\)"),
        ("foreign_rewards:native(ned=x)", ConfigError, "no option 'ned'; did you mean need"),
        ("foreign_rewards:no_convention", VerifierError, "fit no convention"),
        ("no_such_module:f", VerifierError, "does not load: ModuleNotFoundError"),
    ],
)
def test_a_verifier_that_cannot_be_had_is_refused(verifier: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        check_verifiers(rows("gsm8k", verifier), VerifierSection())


def test_no_row_is_blamed_for_a_verifier_that_the_user_names() -> None:
    with pytest.raises(VerifierError) as caught:
        check_verifiers(rows("mathh"), VerifierSection(name="mathh"))
    assert str(caught.value).startswith("no verifier is called 'mathh'; did you mean math")


@pytest.mark.parametrize(("verifier", "deadline_s"), [("code", 4.2), ("code(timeout_s=10) + 0.1 * format", 5.0)])
def test_a_deadline_that_cuts_a_verifiers_own_short_is_refused(verifier: str, deadline_s: float) -> None:
    with pytest.raises(ConfigError, match=r"\(its timeout_s\) and would be killed at verifier.deadline_s = "):
        check_verifiers(rows(verifier), VerifierSection(deadline_s=deadline_s))


@pytest.mark.long
def test_a_wait_by_the_clock_has_ten_times_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def f(request, *, timeout_s: float = 35.0): ...\n")
    check_verifiers(rows(f"{tmp_path}/judge.py:f"), VerifierSection(deadline_s=5.0))
    with pytest.raises(ConfigError, match=r"= 3, .*; raise it to 3\.55 or more"):
        check_verifiers(rows(f"{tmp_path}/judge.py:f"), VerifierSection(deadline_s=3.0))


@pytest.mark.long
def test_the_sandbox_is_opened_for_verifiers_that_run_programs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLCLI_SANDBOX", raising=False)
    assert check_verifiers(rows("gsm8k", "code + 0.1 * format"), VerifierSection())[1] == backend
    monkeypatch.setenv("RLCLI_SANDBOX", "unsafe")
    assert check_verifiers(rows("code"), VerifierSection())[1] == "unsafe"
    assert check_verifiers(rows("code"), VerifierSection(sandbox=backend))[1] == backend


@pytest.mark.long
def test_a_sandbox_that_cannot_be_had_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:9"):
        check_verifiers(rows("code"), VerifierSection(sandbox="http://127.0.0.1:9"))

    def fails(name: str) -> Any:
        raise SetupError(f"{name} is not here", "install it")

    monkeypatch.setattr("rlcli.rewards.verifier_checks.proven", fails)
    with pytest.raises(SetupError, match="bwrap is not here; install it"):
        check_verifiers(rows("code"), VerifierSection(sandbox="bwrap"))


def test_scoring_processes_are_told_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", "landlock")
    for sandbox, expected in (("", "landlock"), ("http://10.0.0.1:8080", "http://10.0.0.1:8080")):
        with ScoringPool(1, 5.0, sandbox=sandbox) as pool:
            answer = pool.submit("foreign_rewards:sandboxed", VerifyRequest("", "")).result().answer
        assert answer == expected


def test_the_configuration_takes_backends_and_urls_alone() -> None:
    for value in ("auto", "bwrap", "landlock", "unsafe", "https://fusion.example:8080/x"):
        assert resolve("grpo", {}, [f"verifier.sandbox={value}"]).config.verifier.sandbox == value
    with pytest.raises(
        ConfigError, match=r"verifier\.sandbox = \"docker\" .* must be auto, bwrap, landlock, unsafe or"
    ):
        resolve("grpo", {}, ["verifier.sandbox=docker"])


def test_weights_of_parts_are_those_of_all_rows_or_refused() -> None:
    expressions = ["math + 0.1 * format", "gsm8k + 0.1 * format", "math"]
    assert part_weights("gdpo", expressions) == {"math": 1.0, "gsm8k": 1.0, "format": 0.1}
    assert part_weights("grpo", [*expressions, "math + 0.2 * format"]) == {}
    with pytest.raises(ConfigError, match=r"the part format of the reward weighs 0\.1 in some rows and 0\.2 in others"):
        part_weights("gdpo", [*expressions, "math + 0.2 * format"])


def failures(crashed: int, killed: int, total: int) -> Failures:
    counted, prompts = Failures(), rows(*["math"] * total)
    outcomes = [Outcome.CRASH] * crashed + [Outcome.TIMEOUT] * killed + [Outcome.OK] * (total - crashed - killed)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        counted.add(replace(prompt, verifier="math + format"), Verdict(0.0, outcome, detail=f"{outcome} {prompt.id}"))
    return counted


def test_crashes_above_the_rate_stop_with_three_examples() -> None:
    failures(crashed=2, killed=100, total=200).check(0.01, 0.0)
    with pytest.raises(
        RunFailed, match=r"3 of 200 verifications crashed, more than verifier\.max_crash_rate = 0\.01"
    ) as e:
        failures(crashed=3, killed=0, total=200).check(0.01, 0.0)
    for index in range(3):
        assert f"toy:{index}, math + format: «crash toy:{index}»" in str(e.value)
    with pytest.raises(RunFailed) as many:
        failures(crashed=9, killed=0, total=9).check(0.5, 0.0)
    assert str(many.value).count("«") == 3


def test_more_than_half_killed_stop_whatever_rate_of_crashes_is_allowed() -> None:
    failures(crashed=0, killed=5, total=10).check(0.0, 0.0)
    slow = Failures()
    for prompt in rows(*["math"] * 10):
        slow.add(prompt, Verdict(0.0, Outcome.WRONG, detail=f"{OVERRAN} (more than 5 s)"))
    with pytest.raises(RunFailed, match="10 of 10 verifications were killed at the deadline"):
        slow.check(1.0, 0.0)
    with pytest.raises(RunFailed, match=r"6 of 10 verifications were killed at the deadline: toy:0, .*deadline_s"):
        failures(crashed=0, killed=6, total=10).check(1.0, 0.0)


def test_overruns_of_a_step_are_a_metric() -> None:
    late = Verdict(0.0, Outcome.WRONG, detail=f"{OVERRAN} (more than 5 s)")
    verdicts = [late, Verdict(0.0, Outcome.WRONG, detail="off by one"), Verdict(1.0, Outcome.OK), late]
    samples = SampleTable.of(Sample(0, i, 0, i, 3, 4, "stop", verdict, 0) for i, verdict in enumerate(verdicts))
    assert sample_metrics(samples)["verify/overran"] == 0.5


@pytest.mark.parametrize(
    ("count", "oversample", "says"),
    [(1, 1.0, "compares the responses of a group, but evaluation.samples = 1"), (8, 1.5, "rollout.oversample = 1.5")],
)
def test_a_verifier_that_compares_needs_whole_groups(count: int, oversample: float, says: str) -> None:
    compares = "math + 0.5 * judge(url=x, model=m, other_responses=2)"
    check_comparisons(["math", compares], "evaluation.samples", 2)
    refuse_comparisons(["math"], "--url")
    with pytest.raises(ConfigError, match=r"other_responses=2.* but --url has none"):
        refuse_comparisons(["math", compares], "--url")
    check_comparisons(["math"], "evaluation.samples", count, oversample)
    with pytest.raises(ConfigError, match=says):
        check_comparisons(["math", compares], "evaluation.samples", count, oversample)


@pytest.mark.long
def test_it_is_said_once_which_key_goes_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setenv("OTHER_KEY", "another-secret")
    (tmp_path / "mine.py").write_text(
        "def asks(request, *, url='', key='OTHER_KEY'): ...\ndef plain(request, *, url=''): ...\n"
    )
    notes: list[str] = []
    with judging() as server:
        judge = f"judge(url='{server.url}', model=judge-1, key=JUDGE_API_KEY)"
        asks, plain = f"{tmp_path}/mine.py:asks", f"{tmp_path}/mine.py:plain"
        verifiers = [f"math + 0.1 * {judge}", judge, f"{asks}(url='http://mine')", asks, f"{plain}(url='http://b')"]
        check_verifiers(rows(*verifiers), VerifierSection(), notes.append)
    assert sorted(notes) == [
        f"the key in JUDGE_API_KEY is sent to {server.url}",
        "the key in OTHER_KEY is sent to http://mine",
    ]
    monkeypatch.delenv("OTHER_KEY")
    check_verifiers(rows(f"{asks}(url='http://mine')"), VerifierSection(), notes.append)
    assert len(notes) == 2


def test_it_is_said_which_servers_get_the_engines_key(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ["rollout.engine=server", "rollout.servers=http://127.0.0.1:9", "rollout.workers=1"]
    config = resolve("opd", {}, [*sets, "teacher.path=http://127.0.0.1:8"]).config
    notes: list[str] = []
    monkeypatch.delenv(ENGINE_KEY, raising=False)
    _note_engine_key(config, notes.append)
    assert notes == []
    monkeypatch.setenv(ENGINE_KEY, KEY)
    _note_engine_key(config, notes.append)
    assert notes == [
        "the key in RLCLI_ENGINE_KEY is sent to http://127.0.0.1:9",
        "the key in RLCLI_ENGINE_KEY is sent to http://127.0.0.1:8",
    ]


def trial_notes(verifier: str, rows: list[Prompt], *, converses: bool = False) -> list[str]:
    """Notes on verifiers that are tried on the rows."""
    notes: list[str] = []
    check_verifiers(rows, VerifierSection(name=verifier), notes.append, tried=[rows], converses=converses)
    return notes


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('level')", r"KeyError: 'level' \(.*mine\.py, line 2, in f: raise .*\); the response: '1'"),
        ("return 1.0 / (request.completion == '1')", "ZeroDivisionError.*; the response: 'I do not know.'"),
        ("pass", "returned None, expected a Verdict or a number"),
        ("return 'good'", "returned 'good', expected a Verdict or a number"),
        ("return float('nan')", "returned nan, expected a finite number"),
    ],
)
def test_a_verifier_that_fails_is_found_before_the_run(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f(request):\n    {body}\n")
    name = f"{tmp_path}/mine.py:f"
    with pytest.raises(VerifierError, match=says) as error:
        trial_notes(name, rows(name, name))
    assert str(error.value).startswith(f"the verifier '{name}' fails (crash) on row toy:0")
    (note,) = trial_notes(name, rows(name), converses=True)
    assert note.endswith("(tried without its environment)")


def test_a_verifier_that_skips_all_rows_is_noted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(request):\n    return 1.0 if 'x' in request.completion else None\n")
    name = f"{tmp_path}/mine.py:f"
    (note,) = trial_notes(name, rows(name, name))
    assert "returned None for the first 2 rows" in note


@pytest.mark.long
def test_given_rows_that_score_leave_nothing_to_note() -> None:
    assert trial_notes("auto", rows("gsm8k", "math + 0.1 * format", "length(target=8)")) == []
