"""The chat template: what ends a turn, what it is rendered with, its date, and what is refused before a run starts."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli.main import main
from rlcli.config.load import dump_toml, resolve
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.token_cache import _key
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import ConfigError, ModelError
from rlcli.launch.preflight import prepare
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.runs.checkpoint import Checkpoints
from rlcli.runs.folder import RunFolder
from rlcli.runs.software_record import recorded_day
from rlcli.types import Prompt
from tests import chat_templates as of
from tests.chat_templates import tokenizer_with

QUESTION = ({"role": "user", "content": "2+2?"},)
SYSTEM = ({"role": "system", "content": "Add."}, *QUESTION)
DAY = date(2024, 7, 26)


def prompt(messages: Any = QUESTION, number: int = 0) -> Prompt:
    return Prompt(f"sums:train:{number}", tuple(messages), "sums", "math", "exact", "4")


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (of.CHATML, "<|im_end|>"),
        (of.DATED, "<|eot|>"),
        (of.BY_OPENER, "<|user|>"),
        (of.BY_TEXT, None),
        (of.BY_EOS, "<eos>"),
        (of.TWO_ENDS, "<|return|>"),
        (of.THINKING, "<eos>"),
        ("{{ messages[0].content }}", None),
        ("{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}", None),
    ],
)
def test_the_token_that_closes_a_turn_is_read_off_the_template(text: str, ends: str | None) -> None:
    tokenizer = tokenizer_with(text)
    token = chat_template.end_of_turn(tokenizer)
    assert (None if token is None else tokenizer.convert_ids_to_tokens(token)) == ends


def test_a_template_with_markers_of_another_tokenizer_is_noted() -> None:
    other = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|over|>{% endfor %}"
    (note,) = chat_template.check_family(tokenizer_with(other), "model", "llama")
    assert "<|turn|>, <|over|>" in note
    assert chat_template.check_family(tokenizer_with(of.CHATML), "model", "llama") == []
    single = (
        "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}<|turn|>{{ messages[0].content }}"
    )
    assert "<|turn|>" in chat_template.check_family(tokenizer_with(single), "model", "llama")[0]
    with pytest.raises(ModelError, match=r"model: gpt_oss answers in harmony's channels"):
        chat_template.check_family(tokenizer_with(of.CHATML), "model", "gpt_oss")


def test_all_that_ends_a_response_is_one_set(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    tokenizer = tokenizer_with(of.CHATML)
    end, eos = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id
    assert chat_template.stop_tokens(tokenizer, str(model), ()) == {eos: "<eos>", end: "<|im_end|>"}
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    stops = chat_template.stop_tokens(tokenizer, str(model), (5, eos))
    assert stops == {eos: "<eos>", 4: "<|user|>", 5: "<|assistant|>", end: "<|im_end|>"}
    assert chat_template.stop_tokens(tokenizer, str(tmp_path / "nowhere"), ()) == {eos: "<eos>", end: "<|im_end|>"}
    with pytest.raises(ConfigError, match=r"there is no token 100000, the tokenizer of .* has ids up to"):
        chat_template.stop_tokens(tokenizer, str(model), (100_000,))


@pytest.mark.parametrize(
    ("text", "values", "thinking"),
    [
        (of.THINKING, {}, True),
        (of.CHATML, {}, False),
        (of.CHATML, {"enable_thinking": False}, False),  # the block is empty, and closed
        (of.BY_EOS, {}, False),
    ],
)
def test_a_think_that_the_prompt_opens_is_known(text: str, values: dict[str, Any], thinking: bool) -> None:
    assert chat_template.opens_thinking(chat_template.fix(tokenizer_with(text), values, None)) == thinking


def test_variables_of_the_template_are_set_and_travel_with_the_tokenizer() -> None:
    plain, fixed = tokenizer_with(of.CHATML), tokenizer_with(of.CHATML)
    chat_template.fix(fixed, {"enable_thinking": False}, None)
    without, with_it = (chat_template.render(variant, QUESTION) for variant in (plain, fixed))
    assert with_it == without + "<think>\n\n</think>\n\n"
    assert chat_template.render(pickle.loads(pickle.dumps(fixed)), QUESTION) == with_it
    dated = chat_template.fix(tokenizer_with(of.DATED), {"date_string": 'on a "quoted" день\n'}, DAY)
    assert 'Today: on a "quoted" день\n' in chat_template.render(dated, QUESTION)
    untouched = chat_template.fix(tokenizer_with(of.CHATML), {}, None)
    assert untouched.chat_template == of.CHATML
    assert _key("c", [], plain, (1, "", 0)) != _key("c", [], fixed, (1, "", 0)), "cached tokens are others'"


def test_a_variable_that_the_template_does_not_read_is_named() -> None:
    notes: list[str] = []
    tokenizer = tokenizer_with(of.CHATML)
    chat_template.fix(tokenizer, {"enable_thinking": True, "think": 1}, None, notes.append)
    assert len(notes) == 1
    assert "data.chat_template_kwargs.think has no effect" in notes[0]
    for name in ("messages", "add_generation_prompt", "tokenize", "strftime_now", "not a name"):
        with pytest.raises(ConfigError, match=f"data.chat_template_kwargs.{name}: a chat template variable cannot"):
            chat_template.fix(tokenizer_with(of.CHATML), {name: 1}, None)


def test_the_date_is_the_given_one_whatever_day_it_is() -> None:
    tokenizer = tokenizer_with(of.DATED)
    assert chat_template.asks_for_date(tokenizer)
    assert not chat_template.asks_for_date(tokenizer_with(of.CHATML))
    assert datetime.now().strftime("%d %b %Y") in chat_template.render(tokenizer, QUESTION)
    assert "Today: 26 Jul 2024\n" in chat_template.render(chat_template.fix(tokenizer, {}, DAY), QUESTION)
    every = "".join(f"%{code} " for code in chat_template.DIRECTIVES) + "100%% %-d."
    clock = (
        "{{ strftime_now(" + repr(every) + ") }}{% macro m() %}{{ strftime_now(format='%Y') }}{% endmacro %}{{ m() }}"
    )
    fixed = chat_template.fix(tokenizer_with(clock), {}, DAY)
    assert chat_template.render(fixed, QUESTION) == datetime(2024, 7, 26).strftime(every) + "2024"


def test_a_fixed_template_renders_as_before_where_its_first_line_counts() -> None:
    for text in ("\n{% if true %}a{% endif %}\n", "  {% if true %}a{% endif %}", "{%- if x %}{{ x }}{% endif %}a\n\nb"):
        shown = chat_template.render(tokenizer_with(text), QUESTION)
        assert chat_template.render(chat_template.fix(tokenizer_with(text), {"y": 1}, None), QUESTION) == shown


def test_prompts_of_a_dated_template_are_the_same_on_every_day() -> None:
    def prints(day: date) -> str:
        return TokenizedPrompts.tokenize(
            [prompt()], chat_template.fix(tokenizer_with(of.DATED), {}, day), 99
        ).fingerprint()

    assert prints(DAY) == prints(DAY)
    assert prints(DAY) != prints(date(2024, 7, 27))
    assert recorded_day({"day": "2024-07-26", "started": "2025-01-01T00:00:00Z"}) == DAY
    assert recorded_day({"started": "2024-07-26T23:59:59Z"}) == DAY  # of a run that began with an earlier release
    assert recorded_day({}) is recorded_day({"day": "soon"}) is None


@pytest.mark.parametrize(
    ("text", "messages", "says"),
    [
        ("", QUESTION, "has no chat template|renders nothing"),
        ("{% if false %}{{ messages }}{% endif %} \n", QUESTION, "renders nothing"),
        ("Hello!", QUESTION, "leaves out the user's message"),
        (
            "{% if messages|length == 1 %}{{ messages[0].content }}{% endif %}b",
            SYSTEM,
            "leaves out the system's message",
        ),
        (of.BY_EOS.replace("in messages", "in messages[-1:]"), (*QUESTION, *QUESTION), "leaves out the user's message"),
        ("{{ raise_exception('no') }}", QUESTION, "refuses a conversation of user: no"),
        ("{{ messages[0].content + 1 }}", QUESTION, "fails on a conversation of user: TypeError"),
        ("{% for %}", QUESTION, "is broken"),
        ("{{ bos_token }}{{ bos_token }}{{ messages[0].content }}", QUESTION, "would begin with <pad> twice"),
    ],
)
def test_a_template_that_cannot_be_right_is_refused(text: str, messages: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        chat_template.check(tokenizer_with(text, bos="<pad>"), [prompt(), prompt(messages, 1)])
    assert "\n" not in str(refused.value)


def test_prompts_of_every_dataset_are_looked_at_for_their_roles() -> None:
    late = [prompt(number=number) for number in range(3000)] + [prompt(SYSTEM, number) for number in range(3000)]
    text = "{% if messages|length == 1 %}{{ messages[0].content }}{% endif %}b"
    with pytest.raises(ModelError, match="leaves out the system's message"):
        chat_template.check(tokenizer_with(text), late)


def test_a_template_that_is_right_passes() -> None:
    for text in (of.CHATML, of.DATED, of.BY_OPENER, of.TWO_ENDS, of.THINKING):
        assert chat_template.check(tokenizer_with(text, bos="<pad>"), [prompt(), prompt(SYSTEM)]) == []
    (note,) = chat_template.check(tokenizer_with(of.BY_EOS), [prompt()])
    assert "opens no assistant turn" in note
    (note,) = chat_template.check(tokenizer_with(of.BY_TEXT), [prompt()])
    assert "no token closes a turn" in note


def test_variables_are_keys_of_the_configuration() -> None:
    sets = ["data.chat_template_kwargs.enable_thinking=false", "data.chat_template_kwargs.date_string=26 Jul 2024"]
    run = resolve("grpo", {}, [*sets, "data.chat_template_kwargs.budget=3", "rollout.stop_token_ids=[4, 5]"])
    variables = {"enable_thinking": False, "date_string": "26 Jul 2024", "budget": 3}
    assert run.config.data.chat_template_kwargs == variables
    assert run.config.rollout.stop_token_ids == (4, 5)
    text = dump_toml(run)
    assert 'chat_template_kwargs.date_string = "26 Jul 2024"  # --set' in text
    for wrong, says in {
        "data.chat_template_kwargs=3": "set one of its values: data.chat_template_kwargs.NAME=VALUE",
        "data.chat_template_kwargs.x=[1]": "must be text, a number, true or false",
    }.items():
        with pytest.raises(ConfigError) as refused:
            resolve("grpo", {}, [wrong])
        assert says in str(refused.value)


def test_variables_are_read_back_from_the_file_of_a_run(tmp_path: Path) -> None:
    run = resolve("grpo", {}, ["data.chat_template_kwargs.enable_thinking=false", "rollout.stop_token_ids=7"])
    (tmp_path / "config.toml").write_text(dump_toml(run))
    assert resolve(str(tmp_path / "config.toml")).config == run.config


@pytest.mark.long
def test_a_run_with_a_dated_template_goes_on_on_another_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_tiny_model(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text(of.BY_EOS + "{% if strftime_now %}{{ strftime_now('%d') }}{% endif %}")
    messages = [{"role": "user", "content": "1+1="}]
    write_rows(
        tmp_path / "train.parquet", [row(data_source="a", messages=messages, verifier="exact", ground_truth="2")]
    )
    flags = {"model.path": str(model), "data.path": str(tmp_path), "cluster.device": "cpu"}
    resolved = resolve("grpo", flags, ["train.tokens_per_microbatch=4096"])
    prepared = prepare(resolved.config, day=DAY)
    assert (prepared.facts.day, prepare(resolved.config).facts.day) == (DAY, datetime.now(UTC).date())
    with RunFolder.create(tmp_path / "run", facts={"day": DAY.isoformat()}) as folder:
        folder.write_config(dump_toml(resolved))
    checkpoints = Checkpoints(folder.checkpoints, keep=1)
    checkpoints.begin(1)
    checkpoints.commit(1, {"step": 1, "data": prepared.prompts.fingerprint()}, dump_toml(resolved), {}, {})
    assert main(["train", "--resume", str(folder.path), "--dry-run"]) == 0
    assert "2024-07-26, kept with the run" in " ".join(capsys.readouterr().out.split())
    environment = folder.path / "environment.json"
    environment.write_text(environment.read_text().replace(DAY.isoformat(), "2024-07-27"))
    assert main(["train", "--resume", str(folder.path), "--dry-run"]) == 2
    assert "the prompts are not those that the run started with" in capsys.readouterr().err
    words = ["train", "--resume", str(folder.path), "--dry-run", "--set", "data.chat_template_kwargs.a=1"]
    assert main(words) == 2
    assert "cannot resume with a changed data.chat_template_kwargs.a" in capsys.readouterr().err
