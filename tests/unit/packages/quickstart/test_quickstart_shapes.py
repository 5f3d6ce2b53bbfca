from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from rlcli_data_prep.shapes import CONVERTER
from rlcli_quickstart import warm_start as module
from rlcli_quickstart.shape_lessons import GUESSES, LOOKS, Shapes
from rlcli_quickstart.warm_start import IGNORED, warm_start
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rlcli.data.prompts.parquet_schema import write_prompts
from rlcli.images.families import rule_of
from rlcli.prep.pipeline import prepare
from rlcli.types import ConvertOptions


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    options = ConvertOptions(kinds="count", cells=2, cell=32, count=64, test_count=8)
    for split, prompts in prepare(CONVERTER, options).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


def test_some_answers_name_each_cell_and_others_are_guesses(data: Path) -> None:
    lessons = Shapes(data)
    processor, batches = lessons.prepare(0)
    tokenizer, rng = processor.tokenizer, random.Random(0)
    solutions = {
        (prompt.messages[-1]["content"].removeprefix("<image>"), prompt.extra_info["response"])
        for prompt in lessons.prompts
    }
    shares = {}
    for done in (0.0, LOOKS):
        looked = []
        for batch in [candidate for _ in range(20) for candidate in batches(rng, 32, done)]:
            for ids, labels in zip(batch.ids, batch.labels, strict=True):
                question = tokenizer.decode(ids).split("<|vision_end|>")[1].split("<|assistant|>")[0]
                answer = tokenizer.decode(labels[labels != IGNORED])
                assert answer.endswith("<eos>")
                looks = (question, answer.removesuffix("<eos>")) in solutions
                assert looks or answer in {f"<think></think>{number}<eos>" for number in range(4)}
                looked.append(looks)
        shares[done] = sum(looked) / len(looked)
    assert shares[0.0] == 1.0
    assert abs(shares[LOOKS] - (1 - GUESSES)) < 0.06


def test_the_loss_is_the_models_own_with_each_rows_image(data: Path) -> None:
    lessons = Shapes(data)
    processor, batches = lessons.prepare(0)
    model = lessons.model(processor, module.SIZES).eval()
    (batch,) = batches(random.Random(0), 3, 0.0)
    total = torch.tensor(0.0)
    for row in range(3):
        trained = batch.labels[row] != IGNORED
        end = int(trained.nonzero().max()) + 1
        ids, labels = batch.ids[row : row + 1, :end], batch.labels[row : row + 1, :end]
        shown = {
            "pixel_values": batch.inputs["pixel_values"].view(3, -1, batch.inputs["pixel_values"].shape[-1])[row],
            "image_grid_thw": batch.inputs["image_grid_thw"][row : row + 1],
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
        total += model(input_ids=ids, labels=labels, **shown).loss * trained.sum()
    torch.testing.assert_close(module._summed_loss(model, batch), total, rtol=1e-5, atol=1e-4)


def test_a_warm_start_is_saved_with_how_it_sees(data: Path, tmp_path: Path) -> None:
    warm_model = warm_start(tmp_path, Shapes(data), seed=0, steps=2)
    model = AutoModelForImageTextToText.from_pretrained(warm_model.path)
    assert rule_of(str(warm_model.path), model.config) is not None
    ids = AutoTokenizer.from_pretrained(warm_model.path)("<think> red circle 1</think>2")["input_ids"]
    assert len(ids) == 7, "a word, a marker and a digit with the space before it are one token or two"
    assert warm_start(tmp_path, Shapes(data), seed=0, steps=2).cached
