"""`rlcli verifiers audit` of a judge: a sound one passes, a gullible one is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlcli_audit.judge_audit import ATTACKS

from rlcli.cli.main import main
from rlcli.data.prompts.parquet_schema import row, write_rows
from tests.judges import KEY, Judge, gullible, judging, says


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    write_rows(
        path,
        [
            row(
                data_source="sums",
                messages=[{"role": "user", "content": f"{i} + {i}?"}],
                verifier="math",
                ground_truth=str(2 * i),
            )
            for i in range(20, 26)
        ],
    )
    return path


def audited(
    capsys: pytest.CaptureFixture[str], server: Judge, data: Path, *words: str, expect: int, options: str = ""
) -> tuple[dict[str, Any], str]:
    judge = f"judge(url='{server.url}', model=judge-1, key=JUDGE_API_KEY{options})"
    code = main(["verifiers", "audit", judge, "--data", str(data), "--processes", "1", "--limit", "4", *words])
    done = capsys.readouterr()
    assert code == expect, done.err + done.out
    return json.loads(done.out) if "--json" in words and expect < 2 else {}, done.out + done.err


def test_a_sound_judge_passes(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    with judging() as server:
        report, _ = audited(capsys, server, data, "--json", expect=0)
        assert report["passed"]
        assert (report["rows"], report["agreement"], report["length_shift"]) == (4, 1.0, 0.0)
        assert [kind["tried"] for kind in report["kinds"]] == [4] * (4 + len(ATTACKS))
        assert report["usage"]["usage/calls"] == len(server.bodies) == 4 * (4 + len(ATTACKS))
        _, text = audited(capsys, server, data, expect=0)  # from the cache
        assert text.count(f"the key in JUDGE_API_KEY is sent to {server.url}\n") == 1
        assert KEY not in text
        assert "PASS\n" in text
        assert "change by padding +0.00" in text


def test_a_gullible_judge_fails(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    with judging(gullible) as server:
        report, _ = audited(capsys, server, data, "--json", expect=1)
    assert report["agreement"] == 1.0
    assert report["length_shift"] == 1.0
    shares = {kind["name"]: kind["share"] for kind in report["kinds"]}
    assert shares["ignore the rubric"] == shares["a plea"] == shares["wrong, padded"] == 0.0
    assert shares["a note of the developers"] == 1.0
    assert [fault.partition(" ")[0] for fault in report["faults"]] == ["padding", "it"]


def test_labelled_responses_show_agreement(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "labelled.jsonl"
    rows = [("It is 42", True), ("forty-two", True), ("It is 41", False), ("It is 40", False)]
    fields = [{"prompt": "6 × 7?", "completion": text, "ground_truth": "42", "label": label} for text, label in rows]
    file.write_text("".join(json.dumps(record) + "\n" for record in fields))
    with judging() as server:
        report, _ = audited(capsys, server, file, "--json", expect=1)
        assert report["agreement"] == 0.75  # it does not read words
        file.write_text(json.dumps({**fields[0], "label": 1}) + "\n")
        _, text = audited(capsys, server, file, expect=2)
        assert "row 0 (the first is 0): 'label' is no boolean; give true or false" in text


def test_an_endpoint_that_fails_is_no_judgement(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    with judging() as server:
        server.always = says(403, {"error": "no more"})
        report, _ = audited(capsys, server, data, "--json", expect=1)
        assert report["faults"] == ["none of 48 responses got a verdict"]
        _, text = audited(capsys, server, data, "--html", "page.html", expect=2)
        assert "makes no page" in text
        assert main(["verifiers", "audit", "judge + math", "--data", str(data)]) == 2
        assert "begins with a judge; audit the judge alone: judge" in capsys.readouterr().err


def comparing(takes_the_first: bool) -> Callable[[dict[str, str], list[dict[str, str]]], str]:
    """A judge of pairs that finds the reference answer, or one that takes whatever comes first."""

    def decide(texts: dict[str, str], chat: list[dict[str, str]]) -> str:
        first, second = (texts["reference answer"] in texts[f"response {letter}"] for letter in "AB")
        points = 0 if takes_the_first else 1 + second - first
        return json.dumps({"reason": "compared", "score": points})

    return decide


def test_a_judge_that_compares_is_audited_in_both_orders(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    with judging() as server:
        server.decide = comparing(takes_the_first=False)
        report, _ = audited(capsys, server, data, "--json", expect=0, options=", other_responses=1")
        assert (report["agreement"], report["flips"], report["length_shift"]) == (1.0, 0.0, 0.0)
        server.decide = comparing(takes_the_first=True)
        _, text = audited(capsys, server, data, expect=1, options=", other_responses=1, cache=false")
        assert "the order decides 100% of the pairs, more than 10%" in text
        assert "pairs decided by their order 100.0%" in text
        labelled = data.with_name("labelled.jsonl")
        labelled.write_text(json.dumps({"completion": "4", "ground_truth": "4", "label": True}) + "\n")
        _, text = audited(capsys, server, labelled, expect=2, options=", other_responses=1")
        assert "no question has a right and a wrong response" in text
