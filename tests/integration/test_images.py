"""Vision-language models, through real runs: what two FSDP2 ranks train is what vLLM samples from the same pixels."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Cli

from rlcli.data.prompts.parquet_schema import row, write_rows

pytestmark = pytest.mark.timeout(600)
SHORT = ("--set", "rollout.max_response_tokens=8")
STEP = [
    *("--set", "rollout.prompts_per_step=8", "--set", "rollout.max_response_tokens=8", "--set", "train.lr=1e-3"),
    *("--set", "data.max_prompt_tokens=128", "--set", "train.tokens_per_microbatch=256"),
    *("--set", "algorithm.kl_coef=0.01"),
]


def image(number: int, size: tuple[int, int] = (56, 84)) -> bytes:
    from PIL import Image

    noise = np.random.default_rng(number).integers(0, 256, (*size, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with one image, with two, with none, and with some that cannot be shown."""
    shown: list[tuple[bytes, ...]] = [(image(number),) for number in range(14)]
    shown += [(image(20), image(21, (30, 41)))] * 2 + [()] * 2
    shown += [(b"no image",), (image(30)[:200],)]
    rows = [
        row(
            data_source="noise",
            messages=[{"role": "user", "content": "<image>" * len(row_images) + f"number {number}?"}],
            verifier="format",
            ground_truth="",
            extra_info={"format": ".*[a-z]{2}.*"},  # some random responses match
            images=row_images,
        )
        for number, row_images in enumerate(shown)
    ]
    folder = tmp_path_factory.mktemp("images")
    write_rows(folder / "train.parquet", rows)
    write_rows(folder / "test.parquet", rows[10:18])
    return folder


def made(kind: str, folder: Path) -> Path:
    from rlcli.model.io.tiny_vision import save_vision_model
    from tests.vision_fixtures import model_and_rule

    folder.mkdir()
    save_vision_model(model_and_rule(kind)[0], folder)
    return folder


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]


def check(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert step["sync/unchecked_tensors"] == 0
        assert step["log_prob_check/max_abs_diff"] < 1e-4
        assert step["mismatch/k3"] < 1e-9
        assert step["update/grad_norm"] > 0


@pytest.mark.long
def test_tiles_are_trained_sampled_and_exported(cli: Cli, images: Path, tmp_path: Path) -> None:
    """vLLM takes these prompts otherwise than those of the other kinds."""
    model, run = made("internvl", tmp_path / "model"), tmp_path / "run"
    cli("train", "grpo", "--model", model, "--data", images, "--out", run, "--workers", "2", *STEP, "--steps", "2")
    check(steps_of(run))
    cli("export", run, "--out", tmp_path / "exported")  # compares the log-probs with the trainer's


@pytest.mark.exhaustive  # test_images_in_conversations.py trains, samples from and reports one of them
@pytest.mark.parametrize("kind", ["internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"])
def test_the_engine_samples_from_what_is_trained_on(cli: Cli, images: Path, tmp_path: Path, kind: str) -> None:
    model, run = made(kind, tmp_path / "model"), tmp_path / "run"
    words = ("train", "grpo", "--model", model, "--data", images, "--out", run, "--workers", "2", *STEP)
    completed = cli(*words, "--steps", "2", "--set", "checkpoint.every=1")
    assert "2 of 20 training rows left out: pictures that cannot be shown" in completed.stderr + completed.stdout
    cli("train", "--resume", run, "--steps", "3")
    steps = steps_of(run)
    assert [step["step"] for step in steps] == [1, 2, 3]
    check(steps)
    shown = json.loads(cli("report", run, "--out", tmp_path / "report", "--json").stdout)["pictures"]["run"]
    assert shown["shown"] == shown["of"] > 4
    samples = json.loads(cli("runs", "samples", run, "--limit", "99", "--json").stdout)
    sizes = {(image["width"], image["height"]) for sample in samples for image in sample["images"] or ()}
    assert (84, 56) in sizes <= {(84, 56), (41, 30)}
    exported = tmp_path / "exported"
    cli("export", run, "--out", exported)  # compares the log-probs with the trainer's
    completed = cli(
        "eval",
        "--model",
        exported,
        "--data",
        images,
        "--out",
        tmp_path / "eval",
        "--set",
        "rollout.max_response_tokens=8",
    )
    assert "pass@1" in completed.stdout + completed.stderr


@pytest.mark.exhaustive  # tests/unit/model/test_frozen.py shows each part of it
def test_a_frozen_vision_encoder_stays_and_a_resumed_run_is_the_same(cli: Cli, images: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, uninterrupted, resumed = made("qwen3_vl", tmp_path / "model"), tmp_path / "whole", tmp_path / "halves"
    words = (
        "train",
        "grpo",
        "--model",
        model,
        "--data",
        images,
        "--workers",
        "2",
        *STEP,
        "--set",
        "model.freeze=vision",
    )
    completed = cli(*words, "--out", uninterrupted, "--steps", "2", "--plan")
    assert "all weights but vision (model.freeze)" in completed.stderr + completed.stdout
    cli(*words, "--out", resumed, "--steps", "1")
    cli("train", "--resume", resumed, "--steps", "2")
    same = ("reward/mean", "update/grad_norm", "update/policy_loss", "log_prob_check/max_abs_diff")
    expected, actual = steps_of(uninterrupted)[-1], steps_of(resumed)[-1]
    assert {name: actual.get(name) for name in same} == {name: expected.get(name) for name in same}
    for step in steps_of(uninterrupted):
        assert step["sync/unchecked_tensors"] == 0
        assert step["log_prob_check/max_abs_diff"] < 1e-4
        assert step["update/grad_norm"] > 0
    weights = []
    for run in (uninterrupted, resumed):
        cli("export", run, "--out", tmp_path / f"{run.name}-exported")
        weights.append(load_file(tmp_path / f"{run.name}-exported" / "model.safetensors"))
    initial = load_file(model / "model.safetensors")
    assert initial.keys() == weights[0].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in initial)
    unmoved = {name for name in initial if weights[0][name].equal(initial[name])}
    assert unmoved == {name for name in initial if "visual." in name}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["internvl", "qwen2_5_vl"])
def test_an_adapter_leaves_the_vision_encoder_as_it_is(cli: Cli, images: Path, tmp_path: Path, kind: str) -> None:
    model, run = made(kind, tmp_path / "model"), tmp_path / "run"
    words = ("train", "grpo", "--model", model, "--data", images, "--out", run, *STEP, "--steps", "2")
    cli(*words, "--set", "lora.rank=4", "--set", "model.dtype=bfloat16")
    for step in steps_of(run):
        assert step["sync/unchecked_tensors"] == 0
        assert step["mismatch/k3"] < 1e-4


@pytest.mark.long
def test_what_cannot_be_done_with_images_is_said_first(
    images: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlcli.cli.main import main

    vlm = made("qwen3_vl", tmp_path / "model")

    def refused(model: Path, *words: str) -> str:
        assert main(["train", "grpo", "--dry-run", "--model", str(model), "--data", str(images), *words]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "the data has images" in refused(tiny)
    assert "rollout.engine = transformers does not support images" in refused(
        vlm, "--set", "rollout.engine=transformers"
    )
    assert "parallel.context = 2" in refused(vlm, "--workers", "2", "--set", "parallel.context=2")
    assert "model.freeze = vision" in refused(tiny, "--set", "model.freeze=vision")
    assert "lora.rank = 2 in bfloat16" in refused(vlm, "--set", "lora.rank=2", "--set", "model.dtype=bfloat16")
