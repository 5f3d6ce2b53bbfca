from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from rlcli_data_prep.arithmetic import CONVERTER
from rlcli_quickstart import sum_lessons
from rlcli_quickstart import warm_start as module
from rlcli_quickstart.sum_lessons import Sums, Turn
from rlcli_quickstart.warm_start import warm_start
from transformers import AutoModelForCausalLM

from rlcli.cli.main import main
from rlcli.data.prompts.parquet_schema import write_prompts
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import DataError, ModelError
from rlcli.model.io.tiny_model import tiny_tokenizer
from rlcli.prep.pipeline import prepare
from rlcli.types import ConvertOptions
from tests.warm_starts import assert_it_can_show_its_work_but_mostly_does_not


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for split, prompts in prepare(CONVERTER, ConvertOptions()).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


@pytest.mark.long
def test_an_equal_warm_start_is_made_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    trained = warm_start(
        tmp_path, Sums(data), seed=0, steps=2, on_progress=lambda done, steps: seen.append((done, steps))
    )
    assert seen == [(1, 2), (2, 2)]
    assert not trained.cached
    assert AutoModelForCausalLM.from_pretrained(trained.path).config.hidden_size == 128
    cached = warm_start(tmp_path, Sums(data), seed=0, steps=2, on_progress=lambda *_: pytest.fail("trained again"))
    assert (cached.path, cached.seconds, cached.loss, cached.cached) == (
        trained.path,
        trained.seconds,
        trained.loss,
        True,
    )
    assert [path.name for path in tmp_path.iterdir()] == [trained.path.name]
    # Whatever shapes the model gives it another place.
    assert warm_start(tmp_path, Sums(data), seed=1, steps=2).path != trained.path
    assert warm_start(tmp_path, Sums(data), seed=0, steps=3).path != trained.path
    monkeypatch.setitem(module.RECIPE, "version", -1)
    assert warm_start(tmp_path, Sums(data), seed=0, steps=2).path != trained.path


@pytest.mark.parametrize("harmony", [False, True])
def test_lessons_are_in_the_chat_format_of_the_model(harmony: bool) -> None:
    tokenizer = tiny_tokenizer(harmony=harmony)
    turn = Turn.of(tokenizer)
    question, answer = {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "#### 5"}
    prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    conversation = tokenizer.apply_chat_template([question, answer], tokenize=False)
    assert prompt + tokenizer.decode(turn.ids("#### 5")) == conversation
    assert (turn.prefix, turn.suffix) == (("<|channel|>final<|message|>", "<|return|>") if harmony else ("", "<eos>"))


@pytest.mark.long
def test_an_interrupted_warm_start_leaves_nothing_to_be_taken_for_a_model(data: Path, tmp_path: Path) -> None:
    def interrupt(done: int, steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(tmp_path, Sums(data), seed=0, steps=2, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_same_seed_gives_the_same_model_and_keeps_the_random_state(data: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first = warm_start(tmp_path / "one", Sums(data), seed=5, steps=3)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == threads
    second = warm_start(tmp_path / "two", Sums(data), seed=5, steps=3)
    assert (first.path / "model.safetensors").read_bytes() == (second.path / "model.safetensors").read_bytes()


def test_batches_mix_worked_answers_and_guesses_with_loss_on_answers(data: Path) -> None:
    tokenizer = tiny_tokenizer()
    demonstrations = sum_lessons._demonstrations(read_prompts(data, "train"), Turn.of(tokenizer))
    rng = random.Random(0)
    guesses, total = 0, 0
    for _ in range(30):
        for ids, labels, _ in sum_lessons._batches(demonstrations, Turn.of(tokenizer), rng, 32):
            for row, label in zip(ids, labels, strict=True):
                question, answer = tokenizer.decode(row).split("<|assistant|>")
                a, b = map(int, question.removeprefix("<|user|>").removesuffix("=").split("+"))
                answer, end, padding = answer.partition("<eos>")
                assert end
                assert set(padding) <= set("<pad>")
                assert tokenizer.decode(label[label != -100]) == answer + end
                worked, final = answer.split("#### ")
                assert int(final) == a + b if worked else abs(int(final) - (a + b)) <= 10
                guesses += not worked
                total += 1
    assert total == 30 * 32
    assert 0.55 < guesses / total < 0.65


def test_the_loss_is_the_mean_over_answer_tokens_in_any_split(data: Path) -> None:
    from transformers import Qwen2ForCausalLM

    from rlcli.model.io.tiny_model import tiny_config

    tokenizer = tiny_tokenizer()
    demonstrations = sum_lessons._demonstrations(read_prompts(data, "train"), Turn.of(tokenizer))
    model = Qwen2ForCausalLM(tiny_config(**module.SIZES))
    for batch in sum_lessons._batches(demonstrations, Turn.of(tokenizer), random.Random(0), 32):
        tokens = (batch.labels != -100).sum()
        # The model's own loss takes the same labels and averages.
        reference = model(input_ids=batch.ids, labels=batch.labels).loss
        torch.testing.assert_close(module._summed_loss(model, batch) / tokens, reference)


def test_data_without_worked_solutions_is_refused(tmp_path: Path) -> None:
    import dataclasses

    train_prompts = prepare(CONVERTER, ConvertOptions()).splits["train"]
    prompts = [dataclasses.replace(prompt, extra_info={}) for prompt in train_prompts[:3]]
    write_prompts(tmp_path / "train.parquet", prompts)
    with pytest.raises(DataError, match="no worked solution; make the data with: rlcli prep arithmetic"):
        warm_start(tmp_path / "out", Sums(tmp_path), seed=0, steps=1)


def test_a_tiny_model_is_warmed_up_in_the_sizes_asked_for(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sums, "steps", 2)
    model_folder = tmp_path / "tiny"
    words = ["tiny-model", "--out", str(model_folder), "--warm", str(data), "--hidden", "64", "--heads", "2", "--json"]
    assert main(words) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["warm"], summary["hidden"], summary["loss"] > 0) == (str(data), 64, True)
    assert AutoModelForCausalLM.from_pretrained(model_folder).config.hidden_size == 64
    assert main([*words[:5], "--layers", "1"]) == 0  # it may be made again in its place
    assert f"warmed up on {data} in" in capsys.readouterr().out
    assert main(["tiny-model", "--out", str(tmp_path / "other"), "--warm", str(tmp_path / "none")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.exhaustive
def test_the_model_can_show_its_work_but_mostly_does_not(data: Path, tmp_path: Path) -> None:
    """Of a seed that `rlcli quickstart` does not take by itself; of the one that it takes, its own test sees to it."""
    assert_it_can_show_its_work_but_mostly_does_not(warm_start(tmp_path, Sums(data), seed=1).path, data)


def test_a_place_that_cannot_be_written_is_refused_before_any_training(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    steps: list[int] = []
    with pytest.raises(ModelError, match=r"cannot write .*/file/warm-start-.*; give another folder with --cache"):
        warm_start(tmp_path / "file", Sums(data), 0, on_progress=lambda done, total: steps.append(done))
    assert steps == []
