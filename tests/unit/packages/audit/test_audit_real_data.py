"""The built-in verifiers pass their audit on rows of the datasets that they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcli.cli.main import main
from tests.shared_data import shared_data


@pytest.mark.long
@pytest.mark.parametrize(
    ("dataset", "source", "split"),
    [("gsm8k", "gsm8k", "test"), ("math", "math/math_test_5000.jsonl.gz", "test")],
)
def test_a_verifier_passes_on_its_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: str, source: str, split: str
) -> None:
    assert main(["prep", dataset, "--source", str(shared_data(source)), "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    words = ["--data", str(tmp_path / f"{split}.parquet"), "--limit", "100", "--deadline", "30", "--json"]
    code = main(["verifiers", "audit", "auto", *words])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["faults"]) == (0, [])
    gold = [tally for tally in report["tallies"] if tally["group"] == "gold"]
    assert [(tally["tried"], tally["as_expected"]) for tally in gold] == [(100, 100)] * 2
    assert report["verifications"] == 100 * (2 + 12)
