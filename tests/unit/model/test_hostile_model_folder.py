"""A model's folder of somebody else: no file of it runs, and nothing asks whether it may."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from rlcli.data.prompts.chat_template import render
from rlcli.data.prompts.tokenized_prompts import load_tokenizer
from rlcli.errors import ModelError
from rlcli.model.io.model_checks import check_model, check_weights
from rlcli.model.io.model_config import read_config
from tests.hostile_pickles import LEGACY, Runs, legacy
from tests.model_fixtures import save_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, beside a file of code; whoever is asked says yes."""
    folder = save_tiny(tmp_path / "model")
    code = (
        f"import os\nos.mkdir({str(tmp_path / 'marker')!r})\nclass Config: pass\nclass Model: pass\nclass Words: pass\n"
    )
    (folder / "code.py").write_text(code)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return folder


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_code_of_an_unknown_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", model_type="mine", auto_map={"AutoConfig": "code.Config"})
    for read in (read_config, check_model):
        with pytest.raises(ModelError, match=r"config\.json does not load: .*custom code"):
            read(str(folder))
    assert not (tmp_path / "marker").exists()


def test_code_for_a_known_kind_is_not_used(folder: Path, tmp_path: Path) -> None:
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Words", None]}
    edit(folder / "config.json", auto_map=names)
    edit(folder / "tokenizer_config.json", auto_map=names)
    check_model(str(folder))
    assert load_tokenizer(str(folder)).get_vocab()
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("form", [*LEGACY, "zip"])
def test_code_in_weights_does_not_run(folder: Path, tmp_path: Path, form: str) -> None:
    (folder / "model.safetensors").unlink()
    file, marker = folder / "pytorch_model.bin", tmp_path / "marker"
    if form == "zip":
        torch.save({"model.norm.weight": Runs(marker)}, file)
    else:
        file.write_bytes(legacy(form, marker))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: not a complete weights file"):
        check_weights(str(folder))
    assert not marker.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ self.__init__.__globals__.__builtins__ }}",
        "{{ cycler.__init__.__globals__.os.mkdir('MARKER') }}",
        "{{ raise_exception.__globals__['os'].mkdir('MARKER') }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_has_no_way_out(folder: Path, tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template.replace("MARKER", str(tmp_path / "marker"))
    messages = [{"role": "user", "content": "1"}]
    try:
        text = render(tokenizer, messages)
    except ModelError as error:
        text = error.message
    assert "<class" not in text
    assert "builtin" not in text
    assert messages == [{"role": "user", "content": "1"}]
    assert not (tmp_path / "marker").exists()
