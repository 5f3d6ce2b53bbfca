"""The chat template that `model.chat_template` names: what it renders, what is refused, and that it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlcli.config.load import resolve
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.template_choice import choose_template
from rlcli.data.prompts.tokenized_prompts import load_tokenizer
from rlcli.errors import ConfigError, ModelError
from rlcli.export.checkpoint_source import find_origin
from rlcli.launch.preflight import prepare
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.runs.checkpoint import TEMPLATE, Checkpoints
from rlcli.types import Prompt
from tests.chat_templates import tokenizer_with

MESSAGES = ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="})


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """A tiny model without a chat template."""
    model = make_tiny_model(tmp_path / "base")
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = None
    for file in model.glob("*.jinja"):
        file.unlink()
    tokenizer.save_pretrained(model)
    return model


def rendered(choice: str) -> str:
    tokenizer = tokenizer_with("{{ 'own' }}")
    choose_template(tokenizer, choice)
    return chat_template.render(tokenizer, MESSAGES)


def test_the_built_in_templates_render_text_alone_or_turns(tmp_path: Path) -> None:
    assert rendered("plain") == "Add.\n\n2+2="
    assert rendered("chatml") == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered("") == "own"
    (tmp_path / "mine.jinja").write_text("Q: {{ messages[-1]['content'] }} A:", encoding="utf-8")
    assert rendered(str(tmp_path / "mine.jinja")) == "Q: 2+2= A:"


def test_a_text_begins_as_the_tokenizer_begins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with("", bos="<eos>")
    kind: Any = type(tokenizer)
    begin = tokenizer.bos_token_id
    choose_template(tokenizer, "plain")
    assert chat_template.render(tokenizer, MESSAGES) == "Add.\n\n2+2=", "it puts no such token before a text"
    monkeypatch.setattr(kind, "__call__", lambda self, text, **kwargs: {"input_ids": [begin, 5]})
    choose_template(tokenizer, "plain")
    assert chat_template.render(tokenizer, MESSAGES) == "<eos>Add.\n\n2+2="


def test_a_plain_prompt_is_no_reason_for_a_warning() -> None:
    prompts = [Prompt("toy:train:0", MESSAGES, "toy", "math", "exact", "4")]
    tokenizer = tokenizer_with("")
    choose_template(tokenizer, "plain")
    assert chat_template.check(tokenizer, prompts) == []
    assert chat_template.end_of_turn(tokenizer) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory; give a Jinja file, or one of chatml, plain"),
        (b"\xff\xfe", "cannot be read: it is not UTF-8"),
        (b" \n", "is empty; write it, or give one of chatml, plain"),
    ],
)
def test_a_template_that_is_none_is_refused(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        choose_template(tokenizer_with(""), str(file))
    assert f"model.chat_template = '{file}' {says}" in str(refused.value)


@pytest.mark.long
def test_a_base_model_is_trained_on_with_a_template_and_refused_without(base_model: Path, tmp_path: Path) -> None:
    rows = [row(data_source="toy", messages=list(MESSAGES), verifier="gsm8k", ground_truth="4")]
    write_rows(tmp_path / "data" / "train.parquet", rows)
    flags: dict[str, object] = {"model.path": str(base_model), "data.path": str(tmp_path / "data")}
    sets = ["cluster.device=cpu", "data.max_prompt_tokens=64", "rollout.max_response_tokens=8"]
    with pytest.raises(ModelError, match=r"no chat template, as base models have none; give one: --set model\.chat_t"):
        prepare(resolve("grpo", flags, sets).config)
    notes: list[str] = []
    prepared = prepare(resolve("grpo", flags, [*sets, "model.chat_template=plain"]).config, on_note=notes.append)
    tokenizer = load_tokenizer(str(base_model), "plain")
    assert tokenizer.decode(prepared.prompts.tokens(0).tolist()) == "Add.\n\n2+2="
    assert not [note for note in notes if "template" in note]
    mine = tmp_path / "mine.jinja"
    mine.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}", encoding="utf-8")
    prepared = prepare(resolve("grpo", flags, [*sets, f"model.chat_template={mine}"]).config)
    assert prepared.config.model.chat_template == str(mine)


def test_a_checkpoint_keeps_the_template_of_a_file(base_model: Path, tmp_path: Path) -> None:
    from rlcli.config.load import dump_toml
    from rlcli.export.exported_weights import write_tokenizer

    flags: dict[str, object] = {"model.path": str(base_model), "data.path": "sums"}
    resolved = resolve("grpo", flags, ["model.chat_template=gone.jinja"])
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    (checkpoints.begin(1) / "policy").mkdir()
    texts = {TEMPLATE: "Q: {{ messages[-1]['content'] }}"}
    checkpoint = checkpoints.commit(1, {"step": 1}, dump_toml(resolved), {}, {}, texts)
    origin = find_origin(checkpoint, "", lambda note: None)
    template = origin.resolved.config.model.chat_template
    assert Path(template).read_text() == texts[TEMPLATE]
    (tmp_path / "export").mkdir()
    write_tokenizer(str(base_model), tmp_path / "export", template)
    assert load_tokenizer(str(tmp_path / "export")).chat_template == texts[TEMPLATE]
