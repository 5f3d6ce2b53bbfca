"""A run whose reward is a judge's, through the command line, with a loopback endpoint as the judge."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from commands import SMALL, Cli
from transformers import Qwen2ForSequenceClassification
from transformers.models.qwen2 import Qwen2Config

from rlcli.model.io.tiny_model import save_model, tiny_config
from tests.judges import KEY, judging

STEPS = 2


def by_length(texts: dict[str, str], chat: list[dict[str, str]]) -> str:
    """A score by the parity of the response's length; no verdict on every fourth length."""
    length = len(texts["response"])
    return "perhaps" if length % 4 == 3 else json.dumps({"reason": "by its length", "score": length % 2})


@pytest.mark.exhaustive  # a judge by URL rewards the next one; tests/unit/rollout/model_servers starts and ends servers
def test_a_run_serves_its_judge_and_its_reward_model(
    cli: Cli, tiny: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    reward_model(tmp_path / "reward")
    choice = "[" + ", ".join(repr(json.dumps({"reason": "so", "score": score})) for score in (0, 1)) + "]"
    judge = f"judge(serve='{tiny}', structured=false, extra={{structured_outputs = {{choice = {choice}}}}})"
    verifier = f"exact + 0.5 * {judge} + 0.1 * served_reward_model(serve=reward, transform=sigmoid)"
    flags = ["--model", tiny, "--data", sums, "--verifier", verifier, "--steps", str(STEPS), "--workers", "1", *SMALL]
    flags += ["--set", "rollout.engine=transformers"]
    assert "its model is served" not in cli("train", "grpo", *flags, "--dry-run").stderr
    cli("train", "grpo", *flags, "--out", tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step")]
    assert len(steps) == STEPS
    for step in steps:
        assert step["usage/calls"] >= 16
        assert step["outcome/crash"] == step["outcome/timeout"] == step["outcome/unparsed"] == 0
        assert 0 < step["reward/part/served_reward_model"] < 1
        assert 0 <= step["reward/part/judge"] <= 1
        parts = ("exact", 1.0), ("judge", 0.5), ("served_reward_model", 0.1)
        assert step["reward/mean"] == pytest.approx(sum(weight * step[f"reward/part/{name}"] for name, weight in parts))
    assert {file.name for file in (tmp_path / "run" / "logs").glob("served-*")} == {"served-0-0.log", "served-1-0.log"}
    remaining = [words for process in psutil.process_iter() if str(tmp_path) in " ".join(words := _words(process))]
    assert not [words for words in remaining if "vllm.entrypoints.openai.api_server" in words]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def reward_model(folder: Path) -> None:
    """A random sequence classifier with one label."""
    config: Qwen2Config = tiny_config(hidden=32, layers=1, heads=1, kv_heads=1)
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        save_model(Qwen2ForSequenceClassification(config), folder)


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
        report = json.loads(cli("rescore", tmp_path / "run", "--verifier", alone, "--json").stdout)
        assert report["usage"]["usage/cached"] > 0
        monkeypatch.setenv("JUDGE_API_KEY", "sk-a-wrong-key-0123")
        refused = cli("train", "grpo", *flags, "--out", tmp_path / "other", expect=2).stderr
    last = refused.strip().splitlines()[-1]
    assert last.startswith("error: the verifier 'judge': the endpoint http://127.0.0.1:")
    assert last.endswith("refuses the key in JUDGE_API_KEY (401); check the option key")
