"""Chat templates that are not the model's: refused where they drop the prompt, else said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlcli.errors import ModelError
from rlcli.model.tiny import make_tiny_model
from rlcli.trainer.eval_template import check_template, trained_with
from rlcli.types import Prompt

PROMPT = Prompt("sums:test:0", ({"role": "user", "content": "2+2="},), "sums", "math", "exact", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


def tokenizer_of(folder: Path, template: str = "") -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def copy_with(folder: Path, to: Path, template: str = "") -> Path:
    """The tokenizer of `folder` in `to`, with another chat template."""
    tokenizer_of(folder, template).save_pretrained(to)
    return to


OTHER = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"


def test_a_template_that_drops_the_prompt_is_refused(model: Path) -> None:
    assert check_template(tokenizer_of(model), PROMPT) == []
    with pytest.raises(ModelError, match=r"leaves out the text of prompt sums:test:0; put the model's own"):
        check_template(tokenizer_of(model, "Hello!"), PROMPT)


def test_a_template_that_opens_no_turn_is_said(model: Path) -> None:
    said = check_template(tokenizer_of(model, "{{ messages[0].content }}"), PROMPT)
    assert len(said) == 1
    assert "opens no assistant turn" in said[0]


def test_an_export_with_another_template_than_its_run_is_said(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "grpo-1"
    same, other = copy_with(model, run / "exports" / "step-1"), copy_with(model, run / "exports" / "step-2", OTHER)
    (run / "config.toml").write_text(f'[model]\npath = "{model}"\n')
    assert trained_with(str(same), "") == []
    assert trained_with(str(model), "") == []
    said = trained_with(str(other), "")
    assert len(said) == 1
    assert f"the run grpo-1 was trained with the chat template of {model}" in said[0]


def test_an_adapter_whose_tokenizer_has_another_template_is_said(model: Path, tmp_path: Path) -> None:
    adapter = copy_with(model, tmp_path / "adapter", OTHER)
    said = trained_with(str(model), str(adapter))
    assert said == [f"the tokenizer in {adapter} has another chat template than {model}, which is used"]
    assert trained_with(str(model), str(copy_with(model, tmp_path / "equal"))) == []
    assert trained_with("owner/name", "") == []
