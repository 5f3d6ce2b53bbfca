"""Conversations in which environments and agents show images, through real runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Cli

pytestmark = pytest.mark.timeout(600)

LOOK = '''
import io
import numpy as np
from PIL import Image

def noise(seed, height, width):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8))

class Look:
    """Shows an image, and another one after each turn."""
    def reset(self, row, seed):
        self.seed, self.turn = seed % 1000, 0
        return [self.said(noise(self.seed, 56, 84), "say <image>")]
    def step(self, message):
        self.turn += 1
        shown = noise(self.seed + self.turn, 20 + 10 * self.turn, 41)
        letters = sum(letter.isalpha() for letter in message["content"])
        return [self.said(shown, "more")], float(letters > 1), self.turn == 3
    def said(self, image, text):
        return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}
'''
AGENT = """
import base64, io, json, os, urllib.request
from look import noise
from openai import OpenAI

def url(seed, height, width):
    out = io.BytesIO()
    noise(seed, height, width).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"

def said(*shown):
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(*shown)}}]}

reward_key = open(os.environ["RLCLI_REWARD_KEY"]).read()
client, index = OpenAI(), json.load(open(os.environ["RLCLI_ROW"]))["extra_info"]["index"]
messages = [said(index, 56, 84)]
for turn in range(2):
    text = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
    messages += [{"role": "assistant", "content": text}, said(index + turn, 30, 41)]
body = json.dumps({"reward": float(sum(letter.isalpha() for letter in text) > 1)}).encode()
headers = {"Authorization": f"Bearer {reward_key}", "Content-Type": "application/json"}
reward = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward"
urllib.request.urlopen(urllib.request.Request(reward, body, headers)).read()
"""
SETS = [
    *("environment.rows=16", "environment.turns=4", "environment.turn_tokens=24", "environment.context_tokens=200"),
    *("rollout.max_response_tokens=72", "rollout.prompts_per_step=4", "data.max_prompt_tokens=96", "train.lr=1e-3"),
    *("train.tokens_per_microbatch=1024", f"rollout.stop_token_ids={[*range(20, 61)]}"),
]
"""A random model ends few turns: more tokens that end one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.model.io.tiny_vision import save_vision_model
    from tests.vision_fixtures import model_and_rule

    folder = tmp_path_factory.mktemp("look")
    (folder / "look.py").write_text(LOOK)
    (folder / "agent.py").write_text(AGENT)
    for kind in ("internvl", "qwen2_5_vl", "qwen3_vl"):
        save_vision_model(model_and_rule(kind)[0], folder / kind)
    return folder


def words(folder: Path, run: Path, kind: str = "qwen3_vl", environment: str = "", *sets: str) -> list[str | Path]:
    environment_name = environment or f"{folder}/look.py:Look"
    command: list[str | Path] = [
        "train",
        "grpo",
        "--model",
        folder / kind,
        "--environment",
        environment_name,
        "--out",
        run,
    ]
    return [
        *command,
        "--verifier",
        "environment",
        "--workers",
        "2",
        *(word for setting in (*SETS, *sets) for word in ("--set", setting)),
    ]


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]


def check(step: dict[str, Any]) -> None:
    assert step["sync/unchecked_tensors"] == 0
    assert step["log_prob_check/max_abs_diff"] < 1e-5
    assert step["mismatch/k3"] < 1e-11, "the engine and the trainer see the same images at the same places"
    assert step["update/grad_norm"] > 0
    assert step["ended/failed"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "past"),
    [
        ("qwen3_vl", "keep"),
        *(
            pytest.param(kind, past, marks=pytest.mark.exhaustive)
            for kind, past in [("qwen3_vl", "per_cycle"), ("internvl", "keep"), ("qwen2_5_vl", "per_cycle")]
        ),
    ],
)
def test_what_an_environment_shows_is_seen_in_both_engines(
    cli: Cli, folder: Path, tmp_path: Path, kind: str, past: str
) -> None:
    run = tmp_path / "run"
    cli(*words(folder, run, kind, "", f"environment.past={past}"), "--steps", "2")
    for step in steps_of(run):
        check(step)
        assert step["turns/mean"] > 2
    shown = json.loads(cli("report", run, "--out", tmp_path / "report", "--json").stdout)["pictures"]["run"]
    assert shown["shown"] == shown["of"] >= 16
    (sample, *_) = json.loads(cli("runs", "samples", run, "--limit", "1", "--json").stdout)
    messages = sample["messages"] if isinstance(sample["messages"], list) else json.loads(sample["messages"])
    assert messages[0]["content"] == "<image>say <\u200bimage>"
    assert (messages[0]["images"][0]["width"], messages[2]["images"][0]["height"]) == (84, 30)


@pytest.mark.exhaustive  # tests/unit/environments/test_environment_images.py shows each part of it
def test_generation_ahead_with_images_resumes_as_if_it_had_not_stopped(cli: Cli, folder: Path, tmp_path: Path) -> None:
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "again"
    settings = ("async.staleness=2", "train.deterministic=true", "checkpoint.every=1", "checkpoint.keep=9")
    cli(*words(folder, uninterrupted, "qwen3_vl", "", *settings), "--steps", "4")
    shutil.copytree(uninterrupted, resumed)
    for step in (3, 4):  # as if it had been killed then
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:06d}")
    cli("train", "--resume", resumed)
    same = ("reward/mean", "update/grad_norm", "update/policy_loss", "turns/mean")
    expected, actual = (
        [{name: step[name] for name in same} for step in steps_of(run)] for run in (uninterrupted, resumed)
    )
    assert actual == expected


@pytest.mark.exhaustive  # tests/unit/environments/test_environment_images.py shows each part of it
def test_what_an_agent_shows_is_seen_in_both_engines(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cli(
        *words(folder, run, "qwen3_vl", f"{sys.executable} {folder}/agent.py", "rollout.samples_per_prompt=4"),
        "--steps",
        "2",
    )
    for step in steps_of(run):
        check(step)
        assert step["turns/mean"] == 2


@pytest.mark.long
def test_a_model_of_text_is_refused_before_the_run(cli: Cli, folder: Path, tiny: Path, tmp_path: Path) -> None:
    done = cli(
        *("train", "grpo", "--model", tiny, "--environment", f"{folder}/look.py:Look", "--out", tmp_path / "run"),
        expect=2,
    )
    assert "it showed an image, and the model reads text alone" in done.stderr
    assert not (tmp_path / "run").exists()
