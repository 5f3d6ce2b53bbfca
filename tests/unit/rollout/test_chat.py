"""A conversation with a model in this process, and `rlcli chat`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from rlcli.cli.main import main
from rlcli.errors import RlcliError
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.rollout.engine import Sampling, Streaming
from rlcli.rollout.local_chat import Chat
from rlcli.support.redact import printable
from tests.shown_runs import HOSTILE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("chat") / "tiny", hidden=64, layers=1, heads=2, kv_heads=1)


def chat_with(tiny: Path, temperature: float = 1.0, max_tokens: int = 12) -> Chat:
    return Chat.load(str(tiny), Sampling(temperature, max_tokens), seed=3)


def test_an_answer_streams_and_joins_the_conversation(tiny: Path) -> None:
    chat = chat_with(tiny)
    assert isinstance(chat.engine, Streaming)
    pieces: list[str] = []
    reply = chat.ask("2+2?", pieces.append)
    assert "".join(pieces) == reply.text
    assert len(pieces) > 2
    assert 1 <= reply.tokens <= 12
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    repeated = chat_with(tiny)
    assert repeated.ask("2+2?") == reply  # the seed decides
    chat.ask("3+3?")
    assert len(chat.messages) == 4
    chat.restart("Be brief.")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


def test_later_turns_are_asked_with_all_messages(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, prompts = chat_with(tiny, temperature=0.0), list[str]()
    add = chat.engine.add
    monkeypatch.setattr(
        chat.engine, "add", lambda request: (prompts.append(chat.tokenizer.decode(request.prompt)), add(request))[1]
    )
    chat.restart("sys")
    first = chat.ask("one").text
    chat.ask("two")
    assert prompts[0] == "<|system|>sys<|user|>one<|assistant|>"
    assert prompts[1] == f"{prompts[0]}{first}<eos><|user|>two<|assistant|>"


def test_ctrl_c_ends_an_answer_and_keeps_what_was_drawn(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_with(tiny, max_tokens=1000)
    step, calls = chat.engine.step, list[int]()

    def interrupted() -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(chat.engine, "step", interrupted)
    reply = chat.ask("2+2?")
    assert reply.finish_reason is None
    assert reply.tokens >= 3
    assert chat.messages[-1] == {"role": "assistant", "content": reply.text}
    assert chat.engine.unfinished == 0


def test_a_conversation_that_is_too_long_is_refused_and_unchanged(tiny: Path) -> None:
    chat = chat_with(tiny)
    with pytest.raises(RlcliError, match=r"the conversation has \d+ tokens, and the model takes 4096"):
        chat.ask("x" * 5000)
    assert chat.messages == []


def test_one_question_is_answered_without_a_terminal(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", str(tiny), "--prompt", "2+2?", "--max-tokens", "8", "--seed", "1"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompt"] == "2+2?"
    assert 1 <= report["tokens"] <= 8
    assert report["finish_reason"] in ("stop", "length")
    assert main(words) == 0
    assert capsys.readouterr().out.rstrip("\n") == printable(report["response"]).rstrip("\n")


def test_questions_may_come_from_a_pipe(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[tuple[int, str]] = []

    def answer(chat: Chat, question: str, on_text: object = None) -> object:
        questions.append((len(chat.messages), question))
        chat.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": HOSTILE}]
        assert callable(on_text)
        on_text(HOSTILE)
        return type("Reply", (), {"finish_reason": "length", "tokens": 3})()

    monkeypatch.setattr(Chat, "ask", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/new\nthree\n/exit\nfour\n"))
    assert main(["chat", str(tiny), "--system", "s"]) == 0
    assert questions == [(1, "one"), (3, "two"), (1, "three")]
    captured = capsys.readouterr()
    assert captured.out == (r"\x1b[2J\x1b]0;title\x07[red]<script>\u202e" + "\n") * 3
    assert "(cut off at the limit of tokens after 3 tokens)" in captured.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere/at/all", "--prompt", "x"], "nowhere/at/all"),
        (["TINY", "--json"], "--json prints one answer; give the question with --prompt"),
        (["TINY", "--prompt", " "], "--prompt is empty; give a question"),
        (["TINY", "--prompt", "x", "--temperature", "-1"], "Invalid value for '--temperature'"),
        (["ADAPTER", "--prompt", "x"], "is a LoRA adapter, and rlcli chat loads whole models; merge it first"),
        (["EMPTY", "--prompt", "x"], "holds no config.json; give a Hugging Face model folder"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], line: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("adapter", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    paths = {"TINY": str(tiny), "ADAPTER": str(tmp_path / "adapter"), "EMPTY": str(tmp_path / "empty")}
    assert main(["chat", *(paths.get(word, word) for word in words)]) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
