"""`rlcli prep filter`: a dataset scored by a model through the real stack, or by a served one."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from commands import Cli
from test_eval_served import endpoint  # noqa: F401 (a fixture: a model that adds right where the first number is odd)

from rlcli.data.prompts.prompt_table import read_prompts


@pytest.mark.long
def test_prompts_that_a_model_solves_sometimes_are_kept(cli: Cli, tiny: Path, sums: Path, tmp_path: Path) -> None:
    # Random text has an even number of digits about as often as not: with 4 samples most prompts are in between.
    words = ("prep", "filter", "--data", sums, "--split", "test", "--model", tiny, "--verifier", "test-even")
    sizes = ("--samples", "4", "--max-tokens", "8", "--set", "data.max_prompt_tokens=32")
    done = cli(*words, *sizes, "--keep", "0.25:0.75", "--out", tmp_path / "kept", "--json")
    report = json.loads(done.stdout)
    counts = report["counts"]
    assert counts["rows"] == 8 == sum(report["histogram"].values())
    assert counts["kept"] == sum(report["histogram"][f"{passed}/4"] for passed in (1, 2, 3)) > 0
    selected = read_prompts(tmp_path / "kept", "test")
    assert len(selected) == counts["kept"]
    originals = {prompt.extra_info["index"]: prompt for prompt in read_prompts(sums, "test")}
    for prompt in selected:
        assert prompt.extra_info["pass_rate"] in (0.25, 0.5, 0.75)
        assert prompt.messages == originals[prompt.extra_info["index"]].messages
        assert prompt.verifier == "gsm8k"  # what the row says of itself stays
    shown = json.loads(cli("prep", "show", tmp_path / "kept" / "test.parquet", "--json").stdout)
    (record,) = shown["provenance"]["filters"]
    assert (record["model"], record["samples"], record["verifier"]) == (str(tiny.resolve()), 4, "test-even")


def test_a_served_model_filters_too_and_keeping_nothing_is_an_error(
    cli: Cli,
    endpoint: str,  # noqa: F811
    sums: Path,
    tmp_path: Path,
) -> None:
    words = ("prep", "filter", "--data", sums, "--endpoint", endpoint, "--samples", "2", "--out", tmp_path / "kept")
    done = cli(*words, "--keep", "0.4:0.6", "--verifier", "exact", expect=2)  # no response is the bare number
    assert done.stderr.splitlines()[-1].startswith("error: no prompt of ")
    assert "0/2" in done.stdout
    assert not (tmp_path / "kept").exists()
    done = cli(*words, "--keep", "1:1")
    rows = pq.read_table(tmp_path / "kept" / "train.parquet").to_pylist()
    assert f"kept {len(rows)} of 64" in done.stdout
    assert {row["extra_info"]["pass_rate"] for row in rows} == {1.0}
    assert all(int(row["prompt"][0]["content"].split("+")[0]) % 2 for row in rows)


def test_a_verifier_that_crashes_is_no_model_that_fails(
    cli: Cli,
    endpoint: str,  # noqa: F811
    sums: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.py").write_text(
        "def verify(request):\n"
        "    if request.completion in (request.ground_truth, 'I do not know.'):  # what is tried before\n"
        "        return 0.0\n"
        "    raise LookupError('no such thing')\n"
    )
    words = ("prep", "filter", "--data", sums, "--endpoint", endpoint, "--samples", "2", "--out", tmp_path / "kept")
    done = cli(*words, "--keep", "0:0", "--verifier", f"{tmp_path / 'broken.py'}:verify", expect=1)
    assert "100.0% of the verifications gave no verdict" in done.stderr
    assert "LookupError: no such thing" in done.stderr
    assert not (tmp_path / "kept").exists()
