"""The plan in five lines, which a run prints before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli.config.load import resolve
from rlcli.data.prompts.schema import row, write_rows
from rlcli.errors import ConfigError, SetupError
from rlcli.launch.derived_plan import derived_plan
from rlcli.launch.planning.memory_auto import planned
from rlcli.launch.planning.summary import summary
from rlcli.launch.preflight import Prepared, prepare
from rlcli.model.io.tiny import make_tiny_model
from rlcli.planner.setting import Shown


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    make_tiny_model(folder / "tiny")
    extra = {"response": "2"}
    for split, count in (("train", 12), ("test", 5)):
        questions = [[{"role": "user", "content": f"1+{number}="}] for number in range(count)]
        rows = [
            row(data_source="toy", messages=one, verifier="gsm8k", ground_truth="2", extra_info=extra)
            for one in questions
        ]
        write_rows(folder / f"{split}.parquet", rows)
    return folder


def prepared_for(recipe: str, places: Path, *sets: str) -> Prepared:
    flags = {"model.path": str(places / "tiny"), "data.path": str(places), "evaluation.data": str(places)}
    sizes = ("data.max_prompt_tokens=32", "rollout.max_response_tokens=16", "rollout.prompts_per_step=4")
    return prepare(resolve(recipe, flags, ["cluster.device=cpu", "train.steps=6", *sizes, *sets]).config)


def test_a_run_prints_five_lines(places: Path) -> None:
    prepared = prepared_for("grpo", places, "rollout.samples_per_prompt=2")
    rows = summary(prepared, derived_plan(prepared), Path("runs/grpo-1"))
    assert [what for what, _ in rows] == ["model", "data", "batch", "estimate", "output"]
    lines = dict(rows)
    assert lines["model"].endswith("526k parameters, float32 on cpu, all weights, 1 worker")
    assert lines["data"] == f"12 prompts of {places}, scored by gsm8k; evaluated on 5"
    assert lines["batch"] == "4 prompts × 2 samples a step, responses of up to 16 tokens; 6 steps, 2 epochs"
    assert lines["estimate"].startswith("memory at most ")
    assert " GiB a worker; a step about " in lines["estimate"]
    assert lines["output"] == "runs/grpo-1; the whole plan: --plan"


def test_given_responses_are_not_scored(places: Path) -> None:
    prepared = prepared_for("sft", places)
    lines = dict(summary(prepared, derived_plan(prepared), Path("runs/sft-1"), steps_done=2))
    assert "responses given by extra_info.response" in lines["data"]
    assert "gsm8k" not in lines["data"]


def test_an_unknown_device_leaves_the_estimate_out(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(config: object) -> object:
        raise SetupError("the run's GPUs are in a cluster", "…")

    monkeypatch.setattr("rlcli.launch.planning.memory_auto.own_device", unknown)
    prepared = prepared_for("grpo", places)
    lines = dict(summary(prepared, derived_plan(prepared), Path("runs/grpo-1")))
    assert lines["estimate"] == "unknown: the run's GPUs are in a cluster"


@pytest.mark.parametrize(
    ("kind", "tokens", "size"),
    [("qwen2_5_vl", 9, "0.677 MB"), ("internvl", 20, "1.51 MB")],  # 3 × 3 tokens; 2 × 2 tiles and the small version
)
def test_a_plan_counts_the_pictures_of_the_data_by_their_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, size: str
) -> None:
    from rlcli.images import decoding
    from rlcli.model.io.tiny_vision import save_vision_model, vision_model
    from rlcli.prep.pipeline import Plan, converter_named, prepare
    from rlcli.prep.write import write_splits
    from rlcli.types import ConvertOptions

    save_vision_model(vision_model(kind), model := tmp_path / "model")
    options = ConvertOptions(count=8, test_count=2, cells=2, cell=42)  # 84 × 84 pixels
    write_splits(tmp_path / "data", prepare(converter_named("shapes"), options, Plan(check=False)).splits, {}, "verl")

    def decode(data: bytes) -> None:
        raise AssertionError("a plan decodes no picture")

    monkeypatch.setattr(decoding, "decode", decode)
    flags = {"model.path": str(model), "data.path": str(tmp_path / "data")}
    notes: list[str] = []
    found, rows = planned("grpo", flags, ["model.freeze=encoder", "data.max_prompt_tokens=64"], "cpu", notes.append)
    assert found.setting.shown == Shown(tokens, 1.0)
    assert found.setting.prompt_tokens > tokens + 10
    assert dict(rows)["pictures"] == f"at most 1 a prompt; {tokens} tokens of a mean prompt, {size} of pixels a step"
    assert f"{found.setting.pixel_bytes / 1e6:.3g} MB" == size
    assert dict(rows)["trained"] == "all weights but encoder (model.freeze)"
    assert {"pictures"} <= {part for phase in found.memory if phase.name == "update" for part in phase.parts}
    assert not notes
    with pytest.raises(ConfigError, match=r"model.freeze = vision: .* reads text alone"):
        planned("grpo", {"model.path": str(make_tiny_model(tmp_path / "text"))}, ["model.freeze=vision"], "cpu", print)
