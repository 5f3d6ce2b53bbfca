"""A run whose reward is a judge's, through the command line, with a loopback endpoint as the judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SMALL, Cli

from tests.judges import KEY, judging

STEPS = 2


def by_length(texts: dict[str, str], chat: list[dict[str, str]]) -> str:
    """A score by the parity of the response's length; no verdict on every fourth length."""
    length = len(texts["response"])
    return "perhaps" if length % 4 == 3 else json.dumps({"reason": "by its length", "score": length % 2})


@pytest.mark.long
def test_a_judge_rewards_a_run_and_what_is_no_verdict_is_left_out(
    cli: Cli, tiny: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with judging(by_length) as server:
        judge = f"exact + 0.5 * judge(url='{server.url}', model=judge-1, key=JUDGE_API_KEY)"
        flags = ["--model", tiny, "--data", sums, "--verifier", judge, "--steps", str(STEPS), "--workers", "1", *SMALL]
        flags += ["--set", "rollout.engine=transformers"]
        cli("train", "grpo", *flags, "--out", tmp_path / "run")
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line.get("step")]
        assert len(steps) == STEPS
        for step in steps:
            assert step["usage/calls"] + step["usage/cached"] + 16 * step["outcome/no_answer"] >= 16
            assert step["samples/left_out/unparsed"] == 16 * step["outcome/unparsed"]
            assert step["reward/mean"] == pytest.approx(0.5 * step["reward/part/judge"] + step["reward/part/exact"])
        assert sum(step["outcome/unparsed"] for step in steps) > 0
        assert sum(step["usage/calls"] for step in steps) == len(server.bodies)
        for file in (tmp_path / "run").rglob("*"):
            assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
        alone = judge.partition(" * ")[2]
        found = json.loads(cli("rescore", tmp_path / "run", "--verifier", alone, "--json").stdout)
        assert found["usage"]["usage/cached"] > 0
        monkeypatch.setenv("JUDGE_API_KEY", "sk-a-wrong-key-0123")
        refused = cli("train", "grpo", *flags, "--out", tmp_path / "other", expect=2).stderr
    last = refused.strip().splitlines()[-1]
    assert last.startswith("error: the verifier 'judge': the endpoint http://127.0.0.1:")
    assert last.endswith("refuses the key in JUDGE_API_KEY (401); check the option key")
