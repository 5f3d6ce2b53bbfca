"""Checks of `--dry-run`: answers, weights and keys without effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcli.cli.main import main
from rlcli.config.load import resolve
from rlcli.config.rules import without_effect
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.prompt_table import JoinedPrompts, read_prompts
from rlcli.errors import DataError, ModelError, VerifierError
from rlcli.launch.dry_run import check_not_empty
from rlcli.model.io.loading import read_policy
from rlcli.model.io.model_checks import check_lora, check_weights
from rlcli.model.io.model_config import read_config
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.trial import check_answers

MINE = """
def trl(completions, level, **columns):
    return [1.0 for _ in completions]
def gold(request):
    return request.ground_truth
def two(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == "2")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


def data(folder: Path, *truths: str, verifier: str = "gsm8k", question: str = "1+1=") -> Path:
    file, messages = folder / "train.parquet", [{"role": "user", "content": question}]
    rows = [row(data_source="toy", messages=messages, verifier=verifier, ground_truth=truth) for truth in truths]
    write_rows(file, rows)
    return file


def trial_notes(file: Path, verifier: str = "auto", deadline_s: float = 5.0) -> list[str]:
    notes: list[str] = []
    answers = check_not_empty(read_prompts(file, "train", verifier), lambda note: None)
    with ScoringPool(1, deadline_s) as pool:
        check_answers(answers, pool, notes.append)
    return notes


def test_answers_that_score_leave_nothing_to_note(tmp_path: Path) -> None:
    assert trial_notes(data(tmp_path, "2", "3"), "0.5 * gsm8k(mode=flexible) + format") == []


def test_an_answer_that_its_verifier_rejects_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (note,) = trial_notes(data(tmp_path, "2", "two"), f"{tmp_path}/mine.py:two")
    assert "rejects the answers of 1 of the first 2 rows: row toy:train:1, whose ground truth is 'two' (" in note


def test_a_verifier_that_rejects_every_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(DataError, match=r"rejects the answers of the first 2 rows: row toy:train:0.*--verifier"):
        trial_notes(data(tmp_path, "1", "3"), f"{tmp_path}/mine.py:two")


def test_an_answer_that_crashes_its_verifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"'gsm8k' fails \(crash\) on row toy:train:1, whose ground truth is 'two'"):
        trial_notes(data(tmp_path, "2", "two"))


def test_a_column_that_a_reward_of_trl_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(VerifierError, match=r"mine\.py:trl' fails \(crash\) on row toy:train:0, .* a column 'level'"):
        trial_notes(data(tmp_path, "2"), f"{tmp_path}/mine.py:trl")


def test_a_verifier_without_a_gold_only_has_to_end(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def zero(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
    )
    assert trial_notes(data(tmp_path, "2"), f"{tmp_path}/mine.py:zero") == []


def test_rows_of_tests_without_a_program_are_tried_without_one(tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})
    assert trial_notes(data(tmp_path, tests, verifier="code")) == []


def test_a_verifier_that_compares_responses_is_noted_and_not_tried(tmp_path: Path) -> None:
    judge = "judge(url=http://127.0.0.1:9, model=m, other_responses=3)"
    (note,) = trial_notes(data(tmp_path, "2"), f"{judge} + format")
    assert note.endswith("is not tried: it compares the responses of a group")


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_prompt_is_refused(question: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the prompt of row toy:train:0 of .*parquet is empty"):
        check_not_empty(read_prompts(data(tmp_path, "2", question=question), "train"), print)


def test_empty_answers_are_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    check_not_empty(read_prompts(data(tmp_path, "2", " ", ""), "train"), notes.append)
    assert notes == ["2 rows have an empty ground truth, toy:train:1 the first"]


@pytest.mark.long
@pytest.mark.parametrize("verifier", ["gsm8k", "math", "exact", "multiple_choice", "code", "countdown"])
def test_an_empty_answer_is_refused_where_the_verifier_needs_one(verifier: str, tmp_path: Path) -> None:
    file = data(tmp_path, *[""] * 2, verifier=verifier)
    says = rf"the ground truth of row toy:train:0 of {file} is empty, and the verifier '{verifier}' needs one \("
    with pytest.raises(DataError, match=says):
        trial_notes(file)


def test_an_empty_answer_far_down_is_found_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = data(tmp_path, "1", verifier="exact"), data(tmp_path / "b", *["1"] * 300, " ", verifier="exact")
    rows = JoinedPrompts([read_prompts(file, "train") for file in (first, second)])
    says = rf"of row toy:train:300 of {second} is empty, and the verifier 'exact' needs"
    with ScoringPool(1, 5.0) as pool, pytest.raises(DataError, match=says):
        check_answers(check_not_empty(rows, print), pool, print)


@pytest.mark.parametrize("verifier", ["format", "length(target=8)", "repetition", "overlong"])
def test_an_empty_answer_is_none_to_refuse_where_nothing_reads_it(verifier: str, tmp_path: Path) -> None:
    assert trial_notes(data(tmp_path, "", "1"), verifier) == []


def test_layers_that_the_model_lacks_get_no_adapter(model: Path) -> None:
    check_lora(str(model), "q_proj, v_proj")
    with pytest.raises(ModelError, match="the model has no linear layer 'query'; there is: down_proj, "):
        check_lora(str(model), "query")


SPOILT = "model.layers.1.mlp.up_proj.weight"
SAYS = rf"1 of \d+ weights of {SPOILT} are NaN or infinite; download"


def spoilt(model: Path, folder: Path, value: float, suffix: str = ".safetensors") -> Path:
    """A copy of the model in which one weight is `value`."""
    weights = load_file(model / "model.safetensors")
    weights[SPOILT][3, 5] = value
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if suffix == ".safetensors":
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=suffix == ".bin")
    return folder


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_named(value: float, model: Path, tmp_path: Path) -> None:
    path = str(spoilt(model, tmp_path, value))
    check_weights(str(model))
    with pytest.raises(ModelError, match=SAYS):
        check_weights(path)
    with pytest.raises(ModelError, match=SAYS):
        read_policy(path, read_config(path), None)


@pytest.mark.parametrize("suffix", [".bin", ".bin of old"])
def test_weights_of_bin_files_that_are_no_numbers_are_named(suffix: str, model: Path, tmp_path: Path) -> None:
    check_weights(str(spoilt(model, tmp_path / "well", 1.0, suffix)))
    with pytest.raises(ModelError, match=SAYS):
        check_weights(str(spoilt(model, tmp_path / "ill", torch.nan, suffix)))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x80\x02}q\x00(X", b"<html>not found</html>"])
def test_a_bin_file_that_is_not_whole_is_named(content: bytes, model: Path, tmp_path: Path) -> None:
    (spoilt(model, tmp_path, 1.0, ".bin") / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: not a complete weights file: .*; download it again"):
        check_weights(str(tmp_path))


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_named(index: str, model: Path, tmp_path: Path) -> None:
    (spoilt(model, tmp_path, 1.0) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not a weights index"):
        check_weights(str(tmp_path))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def test_weights_of_a_hub_id_are_looked_at_in_its_cache(model: Path, hub_cache: Path) -> None:
    repo = hub_cache / "models--me--mine"
    folder = spoilt(model, repo / "snapshots" / "abc", torch.nan)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    with pytest.raises(ModelError, match=f"me/mine: {SAYS}"):
        check_weights("me/mine")
    notes: list[str] = []
    (folder / "model.safetensors").unlink()
    for name in ("me/mine", "me/another"):
        check_weights(name, notes.append)
    assert notes == [
        f"the weights of me/{name} are not downloaded yet, so they are not checked" for name in ("mine", "another")
    ]


@pytest.mark.long
@pytest.mark.parametrize("key", ["model", "critic"])
def test_a_dry_run_looks_at_the_weights_of_policy_and_critic(
    key: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ill = spoilt(model, tmp_path / "ill", torch.nan)
    paths = {"model": model, "critic": model, key: ill}
    words = ["train", "ppo", "--model", str(paths["model"]), "--set", f"critic.path={paths['critic']}", "--dry-run"]
    sizes = ["data.max_prompt_tokens=16", "rollout.max_response_tokens=16", "cluster.device=cpu"]
    words += ["--data", str(data(tmp_path, "2")), *(word for size in sizes for word in ("--set", size))]
    assert main(words) == 2
    assert f"error: {ill}: 1 of " in capsys.readouterr().err


def test_keys_without_effect_are_named() -> None:
    sets = ["evaluation.every=5", "lora.alpha=8", "dynamic_sampling.low=0.1", "shaping.overlong_penalty=2"]
    assert without_effect(resolve("grpo", {}, sets).config) == [
        "evaluation.every = 5 has no effect: evaluation.data is unset",
        "lora.alpha = 8.0 has no effect: lora.rank = 0 trains all weights",
        "dynamic_sampling.low = 0.1 has no effect: keep is not accuracy",
        "shaping.overlong_penalty = 2.0 has no effect: shaping.overlong_buffer = 0",
    ]
    assert without_effect(resolve("grpo", {}, []).config) == []
    clip = ["algorithm.clip_high=0.28", "algorithm.dual_clip=3", "train.min_lr_fraction=0.1"]
    assert [note.partition(" has")[0] for note in without_effect(resolve("grpo", {}, clip).config)] == [
        "algorithm.clip_high = 0.28",
        "algorithm.dual_clip = 3.0",
        "train.min_lr_fraction = 0.1",
    ]
    for several in ("train.minibatches=2", "train.passes=2", "algorithm.correction=bypass"):
        noted = without_effect(resolve("grpo", {}, [*clip, several, "train.schedule=cosine"]).config)
        assert noted == [], several
    assert without_effect(resolve("dapo", {}, ["data.sampling=thompson", "data.shuffle=false"]).config) == [
        "data.shuffle = False has no effect: data.sampling = thompson draws at random"
    ]
    assert without_effect(resolve("grpo", {}, ["data.retire=1"]).config) == []
    whole_row = ["environment.name=guess_number", "environment.ground_truth=true"]
    assert without_effect(resolve("grpo", {}, whole_row).config) == [
        "environment.ground_truth = True has no effect: only commands get a row without it"
    ]


@pytest.mark.long
def test_a_dry_run_tries_them_all(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["data.max_prompt_tokens=16", "rollout.max_response_tokens=16", "cluster.device=cpu", "evaluation.every=5"]
    (tmp_path / "mine.py").write_text(MINE)
    mine = ["--verifier", f"{tmp_path}/mine.py:two"]
    words = [
        "train",
        "grpo",
        *mine,
        "--model",
        str(model),
        "--data",
        str(data(tmp_path, "2", "two")),
        "--dry-run",
        "--json",
    ]
    assert main([*words, *(word for size in sizes for word in ("--set", size))]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("evaluation.every = 5 has no effect" in note for note in notes)
    assert any("rejects the answers of 1 of the first 2 rows" in note for note in notes)


@pytest.mark.parametrize(
    "command", [["train", "grpo", "--out", "run"], ["train", "grpo", "--dry-run"], ["eval", "--out", "evals"]]
)
def test_a_verifier_that_crashes_ends_each_command_before_the_model_loads(
    command: list[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlcli.launch.preflight._check_model_exists", lambda model, note: pytest.fail("it comes later"))
    (tmp_path / "mine.py").write_text("def correct(completions, **columns):\n    [float(c) for c in completions]\n")
    words = [*command, "--model", str(model), "--data", str(data(tmp_path, "2")), "--verifier", "mine.py:correct"]
    files = set(tmp_path.rglob("*"))
    assert main([*words, "--set", "cluster.device=cpu"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "mine.py:correct' fails (crash) on row toy:t" in error
    assert "returned None, expected a list of 1 number (mine.py, line 1, correct); the response: '2'" in error
    assert {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} == files


def test_no_recipe_sets_a_key_that_has_no_effect() -> None:
    from rlcli.config.recipes import names

    for name in names():
        ineffective = [note for note in without_effect(resolve(name, {}, []).config) if "is unset" not in note]
        assert ineffective == [], name


def test_every_loss_that_clips_the_ratio_is_known() -> None:
    from rlcli.algorithms.function_registry import options_of
    from rlcli.algorithms.losses.base import loss_functions
    from rlcli.config.rules import CLIP_RATIO

    built_in = {name: loss_functions.get(name) for name in loss_functions.names()}
    clips = {name for name, loss in built_in.items() if "clip_high" in options_of(loss)}
    assert clips == set(CLIP_RATIO)
