"""The audit finds the fault of a faulty verifier, and none in a sound one; with real scoring processes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rlcli_audit.audit_page import page, write_page
from rlcli_audit.audit_report import Latency, Report
from rlcli_audit.probes import Group
from rlcli_audit.verifier_audit import Options, audit

from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.errors import DataError, UnknownName, VerifierError
from rlcli.rewards.processes.scoring_worker import OVERRAN

FAULTY = Path(__file__).parents[2] / "audited_verifiers.py"
ALL = Options(mutations=0, deadline_s=20.0)


def sums(folder: Path, truths: Sequence[str] = ("1234", "-17", "40"), **fields: Any) -> Path:
    rows = [
        row(
            data_source="sums",
            messages=[{"role": "user", "content": "What is the sum?"}],
            verifier=fields.get("style", "gsm8k"),
            ground_truth=truth,
            extra_info={"response": fields.get("response", "So it is\n#### {}").format(truth)},
        )
        for truth in truths
    ]
    path = folder / "rows.parquet"
    write_rows(path, rows)
    return path


def boxed(folder: Path, truths: Sequence[str] = ("1234", "17", "40")) -> Path:
    return sums(folder, truths, response="So it is \\boxed{{{}}}", style="math")


def faulty(name: str, data: Path, options: Options = ALL) -> Report:
    return audit(f"{FAULTY}:{name}", data, options)


def missed(report: Report, group: Group) -> set[str]:
    return {tally.kind for tally in report.tallies if tally.group is group and tally.as_expected < tally.tried}


def tried(report: Report) -> set[str]:
    return {tally.kind for tally in report.tallies}


@pytest.mark.long
def test_a_built_in_passes_on_good_data(tmp_path: Path) -> None:
    report = audit("auto", sums(tmp_path), ALL)
    assert report.passed, report.surprises
    assert report.rows == 3
    assert report.forms == {"gsm8k": "the verifier's own gold"}
    assert not missed(report, Group.EQUIVALENT)
    assert {"the row's response", "the answer stated", "thousands separators", "off by one digit"} <= tried(report)
    assert {"sign flipped", "retracted", "prompt injection", "Python as the answer", "long padding"} <= tried(report)
    assert report.determinism.checked == report.verifications // 10
    assert not report.determinism.differing
    assert 0 < report.latency.p50 <= report.latency.p99 <= report.latency.max


def test_a_verifier_without_gold_is_asked_in_a_form_that_it_reads(tmp_path: Path) -> None:
    report = faulty("sound", boxed(tmp_path))
    assert not report.faults
    assert list(report.forms.values()) == ["\\boxed{X}"]
    assert any("no gold that fits" in note for note in report.notes)
    assert "1 of" not in report.faults


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "group", "kinds"),
    [
        ("first_box", Group.NEAR_MISS, {"wrong after right"}),
        ("credulous", Group.NEAR_MISS, {"off by one", "sign flipped", "empty response"}),
        ("evaluates", Group.EXPLOIT, {"Python as the answer"}),
    ],
)
def test_a_fault_fails_the_audit_and_is_named(tmp_path: Path, name: str, group: Group, kinds: set[str]) -> None:
    report = faulty(name, boxed(tmp_path))
    assert not report.passed
    assert kinds <= missed(report, group)
    assert kinds <= {surprise.kind for surprise in report.surprises}


@pytest.mark.long
def test_a_gold_answer_that_is_refused_fails_and_its_row_is_named(tmp_path: Path) -> None:
    report = audit("gsm8k", sums(tmp_path, response="So it is {}, I say"), ALL)
    assert report.faults == ["3 of 6 gold answers not accepted"]
    assert {(surprise.row, surprise.kind) for surprise in report.surprises if surprise.group is Group.GOLD} == {
        (number, "the row's response") for number in range(3)
    }
    report = faulty("strict_beyond_reason", boxed(tmp_path))
    assert report.faults == ["3 of 3 gold answers not accepted"]
    assert report.verifications == 3


@pytest.mark.long
def test_verdicts_that_change_when_asked_again_fail_it(tmp_path: Path) -> None:
    report = faulty("unstable", boxed(tmp_path))
    assert report.determinism.differing
    assert any("differ when repeated" in fault for fault in report.faults)


@pytest.mark.long
def test_a_kind_that_times_out_over_and_over_is_given_up(tmp_path: Path) -> None:
    data = boxed(tmp_path, [str(number) for number in range(600, 640)])
    report = faulty("hangs_on_powers", data, dataclasses.replace(ALL, deadline_s=0.2, mutations=30))
    tower = next(tally for tally in report.tallies if tally.kind == "power tower")
    assert tower.failed == tower.tried
    assert any(surprise.detail.startswith(OVERRAN) for surprise in report.surprises)
    assert not report.passed


@pytest.mark.long
def test_warnings_fail_a_strict_audit_only(tmp_path: Path) -> None:
    data = sums(tmp_path)
    lenient = audit("gsm8k", data, ALL)
    strict = audit("gsm8k", data, dataclasses.replace(ALL, strict=True))
    assert lenient.passed
    assert lenient.warnings
    assert strict.faults == lenient.warnings


@pytest.mark.long
def test_a_ground_truth_that_cannot_be_read_is_an_error_that_names_the_row(tmp_path: Path) -> None:
    data = sums(tmp_path, ["12", "many", "3"])
    with pytest.raises(DataError, match=r"row 1 \(the first is 0\).*'many'"):
        audit("gsm8k", data, ALL)
    with pytest.raises(DataError, match=r"row 1 .*'many'.*invalid literal"):
        faulty("needs_a_number", boxed(tmp_path, ["12", "many", "3"]))


@pytest.mark.long
def test_a_verifier_that_fails_on_every_row_is_to_blame_itself(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="fails on every row"):
        faulty("needs_a_number", boxed(tmp_path, ["one", "one"]))


@pytest.mark.long
def test_a_verifier_that_always_crashes_is_reported_by_its_crash(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def verify(request):\n    return [][1]\n")
    data = boxed(tmp_path, ["1", "2", "3", "4", "5", "6"])
    says = (
        r"fails on the first 4 rows, whatever the response: IndexError: .* \(.*mine.py, line 2, in verify: return .*\)"
    )
    with pytest.raises(VerifierError, match=says):
        audit(f"{tmp_path}/mine.py:verify", data, ALL)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean gsm8k"):
        audit("gsm9k", sums(tmp_path), ALL)
    with pytest.raises(UnknownName, match="did you mean gsm8k"):
        audit("auto", sums(tmp_path, style="gsm9k"), ALL)


@pytest.mark.long
def test_a_sum_is_audited_by_its_first_term(tmp_path: Path) -> None:
    report = audit("auto + 0.1 * format", sums(tmp_path), ALL)
    assert report.passed, report.surprises
    assert list(report.forms) == ["gsm8k + 0.1 * format"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["length(unit=words)", "overlong(unit=words)", "repetition"])
def test_verifiers_that_look_at_no_answer_are_asked_their_gold_only(tmp_path: Path, name: str) -> None:
    report = audit(name, sums(tmp_path, response=""), ALL)
    assert report.passed, report.surprises
    assert tried(report) == {"the answer stated"}
    assert any("reads no answer" in note for note in report.notes)


@pytest.mark.long
def test_gold_gets_the_options_that_it_takes(tmp_path: Path) -> None:
    report = audit("exact(extract=box)", sums(tmp_path, ["Paris", "Rome"], response=""), ALL)
    assert report.passed, report.surprises
    assert list(report.forms.values()) == ["the verifier's own gold"]


@pytest.mark.long
def test_options_that_the_gold_does_not_know_of_get_another_form(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'ANSWER_KIND = "text"\n'
        "def verify(request, *, boxed=False):\n"
        "    truth = '\\\\boxed{' + request.ground_truth + '}' if boxed else request.ground_truth\n"
        "    return float(request.completion.strip().endswith(truth))\n"
        "def gold(request):\n"
        "    return request.ground_truth\n"
    )
    name = f"{tmp_path}/mine.py:verify(boxed=true)"
    report = audit(name, sums(tmp_path, ["Paris", "Rome"], response=""), ALL)
    assert report.passed, report.surprises
    assert list(report.forms.values()) == ["\\boxed{X}"]


@pytest.mark.long
def test_the_limit_and_the_number_of_mutations_are_kept(tmp_path: Path) -> None:
    report = audit("auto", sums(tmp_path), dataclasses.replace(ALL, limit=2, mutations=5))
    assert (report.rows, report.rows_in_file, report.verifications) == (2, 3, 2 * (2 + 5))


@pytest.mark.long
def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    options = dataclasses.replace(ALL, mutations=5, seed=3)
    first, second = (audit("auto", sums(tmp_path), options) for _ in range(2))
    assert first.tallies == second.tallies
    assert first.tallies != audit("auto", sums(tmp_path), dataclasses.replace(options, seed=4)).tallies


@pytest.mark.long
def test_the_page_shows_what_a_model_says_as_text(tmp_path: Path) -> None:
    attack = '<script>alert("x")</script><img src=x onerror=alert(1)>\u202e$style\0'
    report = audit("gsm8k", sums(tmp_path, response=attack + "{}"), ALL)
    assert not report.passed
    html = page(dataclasses.replace(report, verifier="<b>gsm8k</b>", notes=(attack,)))
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>gsm8k" not in html
    assert "&lt;script&gt;" in html
    assert "\u202e" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert ">Fail<" in html
    write_page(tmp_path / "new" / "audit.html", report)
    assert (tmp_path / "new" / "audit.html").read_text() == page(report)


@pytest.mark.long
def test_the_report_is_json_with_every_surprise(tmp_path: Path) -> None:
    report = faulty("credulous", boxed(tmp_path))
    read = json.loads(json.dumps(report.as_dict()))
    assert read["passed"] is False
    assert len(read["surprises"]) == sum(tally["tried"] - tally["as_expected"] for tally in read["tallies"])


def test_percentiles_are_of_what_was_measured() -> None:
    latency = Latency.of([0.001] * 50 + [0.01] * 40 + [0.1] * 10)
    assert (latency.p50, latency.p90, latency.p99, latency.max) == (0.001, 0.01, 0.1, 0.1)
    assert sum(latency.counts) == 100
    assert len(latency.bounds) == len(latency.counts) + 1


def own_gold(folder: Path, body: str) -> str:
    """A verifier of the last word whose module has this body of `gold`."""
    file = folder / "last_word.py"
    file.write_text(
        "import os\n\n"
        f"open({str(folder / 'imported')!r}, 'a').write(f'{{os.getpid()}}\\n')\n\n"
        "def verify(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str.split()[-1:] == [ground_truth])\n\n"
        f"def gold(request):\n    {body}\n"
    )
    return f"{file}:verify"


@pytest.mark.long
def test_gold_runs_where_verifiers_run_and_its_text_arrives_whole(tmp_path: Path) -> None:
    called = tmp_path / "called"
    body = f"open({str(called)!r}, 'a').write(f'{{os.getpid()}}\\n'); return 'word ' * 2000 + request.ground_truth"
    report = audit(own_gold(tmp_path, body), sums(tmp_path), dataclasses.replace(ALL, mutations=3))
    (form,) = report.forms.values()
    assert form == "the verifier's own gold"
    stated = next(tally for tally in report.tallies if tally.kind == "the answer stated")
    assert (stated.tried, stated.as_expected) == (3, 3), "cut off, it would not end with the answer"
    for file in (called, tmp_path / "imported"):
        assert str(os.getpid()) not in file.read_text().split()


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return request.extra_info['missing']", r"KeyError: 'missing' \(.*last_word\.py, line \d+"),
        ("os._exit(3)", r"the verifier's process died \(exit status 3\)"),
        ("return 7", r"TypeError: gold returned 7, not text"),
    ],
)
def test_a_gold_that_fails_ends_the_audit_with_the_row(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(DataError, match=rf"row 0 .*: {says}"):
        audit(own_gold(tmp_path, body), sums(tmp_path), ALL)
