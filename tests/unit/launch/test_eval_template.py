"""Notes on chat templates that are not the model's, or that a run gave other variables."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rlcli.launch.evaluation.template_check import day_of_run, rendered_with, trained_with
from rlcli.model.io.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


def tokenizer_of(folder: Path, template: str = "") -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def copy_with(folder: Path, to: Path, template: str = "") -> Path:
    """Copy the tokenizer of `folder` to `to`, with another chat template."""
    tokenizer_of(folder, template).save_pretrained(to)
    return to


OTHER = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"


def test_an_export_with_another_template_than_its_run_is_said(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "grpo-1"
    same, other = copy_with(model, run / "exports" / "step-1"), copy_with(model, run / "exports" / "step-2", OTHER)
    (run / "config.toml").write_text(f'[model]\npath = "{model}"\n')
    assert trained_with(str(same), "") == []
    assert trained_with(str(model), "") == []
    notes = trained_with(str(other), "")
    assert len(notes) == 1
    assert f"the run grpo-1 was trained with the chat template of {model}" in notes[0]


def test_an_adapter_whose_tokenizer_has_another_template_is_said(model: Path, tmp_path: Path) -> None:
    adapter = copy_with(model, tmp_path / "adapter", OTHER)
    notes = trained_with(str(model), str(adapter))
    assert notes == [f"the tokenizer in {adapter} has another chat template than {model}, which is used"]
    assert trained_with(str(model), str(copy_with(model, tmp_path / "equal"))) == []
    assert trained_with("owner/name", "") == []


def test_a_run_gives_its_day_and_says_which_variables_it_had(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "grpo-1"
    inside = copy_with(model, run / "exports" / "step-1")
    (run / "config.toml").write_text(
        f'[model]\npath = "{model}"\n[data]\nchat_template_kwargs.enable_thinking = false\n'
    )
    (run / "environment.json").write_text('{"started": "2024-07-25T23:59:00Z", "day": "2024-07-26"}')
    assert day_of_run(str(run)) == day_of_run(str(inside)) == date(2024, 7, 26)
    assert day_of_run(str(model)) is day_of_run("owner/name") is None
    (note,) = rendered_with(str(inside), {})
    assert "the run grpo-1 was trained with data.chat_template_kwargs = {'enable_thinking': False}, not {}" in note
    assert rendered_with(str(run), {"enable_thinking": False}) == rendered_with(str(model), {"x": 1}) == []
