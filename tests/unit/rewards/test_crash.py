"""Reports of a verifier that crashes: the user's file and line, the response, and a wrong result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcli.cli.main import main
from rlcli.rewards.crash import describe, shortened, without_response
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.types import Outcome, VerifyRequest

MINE = """\
import asyncio
import re

from mine_helper import second


def no_return(completions, **columns):
    scores = [1.0 for _ in completions]


def text(completions, **columns):
    return "good"


def one_number(completions, **columns):
    return 1.0


def short(completions, **columns):
    return [1.0] * (len(completions) + 2)


def nan(completions, **columns):
    return [float("nan") for _ in completions]


def words(completions, **columns):
    return ["good" for _ in completions]


def on_text(completions, **columns):
    return [float(re.search("<a>(.*)</a>", one).group(1)) for one in completions]


def on_messages(completions, **columns):
    return [float(one[0]["contents"]) for one in completions]


async def awaited(completions, **columns):
    await asyncio.sleep(0)
    return [second(one) for one in completions]


def native(request):
    return {"score": 1.0}


def native_no_return(request):
    float(request.completion == request.ground_truth)


def native_nan(request):
    return float("nan")


def verls(data_source, solution_str, ground_truth, extra_info=None):
    score = 1.0


def skips(request):
    if "x" in request.completion:
        return 1.0


def helper(request):
    return second(request.completion)


def dies(request):
    import os

    os._exit(3)
"""
HELPER = "def second(text):\n    return text.split()[1:][3]\n"
RESPONSE = "So it is\nforty-two\u202e"
SHOWN = r"; the response: 'So it is\nforty-two\u202e'"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine_helper.py").write_text(HELPER)
    (folder / "mine.py").write_text(MINE)
    return folder / "mine.py"


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[ScoringPool]:
    with ScoringPool(1, 5.0) as pool:
        yield pool


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(MINE.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("function", "says", "marker"),
    [
        ("no_return", "returned None, expected a list of 1 number", "def no_return"),
        ("text", "returned 'good', expected a list of 1 number", "def text"),
        ("one_number", "returned 1.0, expected a list of 1 number", "def one_number"),
        ("short", "returned a list of 3, expected a list of 1 number", "def short"),
        ("nan", "returned nan, expected a finite number for each completion", "def nan"),
        ("words", "returned 'good', expected a number for each completion", "def words"),
        ("native", "returned {'score': 1.0}, expected a Verdict or a number", "def native(request)"),
        (
            "native_no_return",
            "returned None, expected a Verdict or a number (it has no `return` with a value)",
            "def native_no_return",
        ),
        ("native_nan", "returned nan, expected a finite number", "def native_nan"),
        ("verls", "returned None, expected a number or a dict with 'score'", "def verls"),
    ],
)
def test_a_wrong_result_is_named_with_what_was_expected_and_the_function(
    pool: ScoringPool, file: Path, function: str, says: str, marker: str
) -> None:
    verdict = pool.submit(f"{file}:{function}", VerifyRequest(RESPONSE, "42")).result()
    assert verdict.outcome is Outcome.CRASH
    assert verdict.detail == f"{says} ({file}, line {line_of(marker)}, {function}){SHOWN}"


@pytest.mark.parametrize(
    ("function", "says", "marker"),
    [
        ("on_text", "AttributeError: 'NoneType' object has no attribute 'group'", "re.search("),
        ("on_messages", "KeyError: 'contents'", '["contents"]'),
    ],
)
def test_the_error_of_the_shape_that_a_function_reads_is_reported(
    pool: ScoringPool, file: Path, function: str, says: str, marker: str
) -> None:
    verdict = pool.submit(f"{file}:{function}", VerifyRequest(RESPONSE, "42")).result()
    assert verdict.detail.startswith(f"{says} ({file}, line {line_of(marker)}, in ")
    assert verdict.detail.endswith(SHOWN)


@pytest.mark.parametrize("function", ["helper", "awaited"])
def test_the_innermost_line_of_the_users_folder_is_named(pool: ScoringPool, file: Path, function: str) -> None:
    verdict = pool.submit(f"{file}:{function}", VerifyRequest(RESPONSE, "42")).result()
    helper = file.with_name("mine_helper.py")
    code = "return text.split()[1:][3]"
    assert verdict.detail == f"IndexError: list index out of range ({helper}, line 2, in second: {code}){SHOWN}"


def test_a_process_that_dies_is_reported_with_the_response(pool: ScoringPool, file: Path) -> None:
    verdict = pool.submit(f"{file}:dies", VerifyRequest(RESPONSE, "42")).result()
    assert verdict.detail == f"the verifier's process died (exit status 3){SHOWN}"


def test_none_of_a_function_that_also_returns_numbers_skips_the_row(pool: ScoringPool, file: Path) -> None:
    verdict = pool.submit(f"{file}:skips", VerifyRequest("no", "42")).result()
    assert (verdict.outcome, verdict.score) == (Outcome.NO_ANSWER, 0.0)


def test_a_built_in_verifier_is_described_without_a_line(pool: ScoringPool) -> None:
    detail = pool.submit("gsm8k", VerifyRequest("#### 2", "two")).result().detail
    assert detail.startswith("ValueError: ")
    assert ".py" not in detail
    assert detail.endswith("; the response: '#### 2'")


def test_a_long_response_keeps_both_ends() -> None:
    shown = shortened("a" * 500 + "b" * 500)
    assert (shown[:3], shown[-3:], len(shown)) == ("'aa", "bb'", 123)
    detail = describe(ValueError("no\nnumber"), "x")
    assert detail == "ValueError: no number; the response: 'x'"
    assert without_response(detail) == "ValueError: no number"


@pytest.mark.long
def test_debug_prints_the_traceback_of_the_users_code_once(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "It is 42", "ground_truth": "42"}\n')
    words = ["verifiers", "run", f"{file}:helper", "--input", str(rows)]
    assert main(words) == 2
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(Exception, match="crashes on the only response"):
        main([*words, "--debug"])
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1
    assert 'mine_helper.py", line 2, in second' in err
    assert "return text.split()[1:][3]" in err
    assert "rlcli/rewards" not in err
