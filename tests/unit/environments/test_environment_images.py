"""Images that environments, tools and agents show: how they travel, and what becomes of those that nobody can see."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rlcli.config.schema import RunConfig
from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import Conversation, Limits, state_of
from rlcli.environments.environment import EnvironmentFailed, Reply, opening_of, reply_of
from rlcli.environments.environment_host import EnvironmentHost, EnvironmentSpec
from rlcli.environments.environment_pool import Environments, row_of
from rlcli.environments.gateway.gateway_server import Gateway, GenerationAsk
from rlcli.environments.message_images import split_parts
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.images import image_processor as processor_module
from rlcli.images.decoding import size_of
from rlcli.images.families import KINDS
from rlcli.images.image_processor import ImageProcessor
from rlcli.images.image_rule import ImageRule
from rlcli.model.io.tiny_vision import image_rule, vision_config
from rlcli.rollout.engine import Generation
from rlcli.types import Prompt
from tests.pages import blocks
from tests.vision_fixtures import TOOLS_TEMPLATE, encoded, speaking

SHOWS = '''
import base64
import time
from pathlib import Path

def text(words):
    return {"type": "text", "text": words}

class Shows:
    """Shows the row's own image and others, in the ways that there are."""
    def __init__(self, second, how="bytes"):
        self.second, self.how = base64.b64decode(second), how
    def reset(self, row, seed):
        self.row = row
        return row["messages"]
    def step(self, message):
        image = self.second
        if self.how == "own":
            image = self.row["messages"][-1]["content"][0]["image"]
        if self.how == "struct":
            image = {"bytes": image, "path": None}
        if self.how in ("pillow", "array"):
            import io
            import numpy
            from PIL import Image
            image = Image.open(io.BytesIO(image))
            image = image if self.how == "pillow" else numpy.asarray(image)
        if self.how == "broken":
            image = image[:200]
        if self.how == "no image":
            image = 7
        if self.how == "none":
            image = None
        if self.how == "many":
            return [{"role": "user", "content": [{"type": "image", "image": image}] * 400}], 0.0, False
        if self.how == "last":
            return [{"role": "user", "content": [{"type": "image", "image": image[:200]}]}], 0.5, True
        if self.how == "odd part":
            return [{"role": "user", "content": [{"type": "sound"}]}], 0.0, False
        return [{"role": "user", "content": [text("And <image>: "), {"type": "image", "image": image}]}], 1.0, False

def look(place: int) -> object:
    """Looks somewhere."""
    return [{"type": "image", "image": IMAGE}, f"at {place}"]

IMAGE = b""
'''
FIRST, SECOND = encoded(1), encoded(2, (60, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shows")
    (folder / "shows.py").write_text(SHOWS.replace('b""', repr(SECOND)))
    return folder


@pytest.fixture(scope="module")
def rule() -> ImageRule:
    return image_rule(vision_config("qwen3_vl"))


def config_of(folder: Path, name: str = "Shows", **options: Any) -> RunConfig:
    if name == "Shows":
        options = {"second": base64.b64encode(SECOND).decode(), **options}
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"max_prompt_tokens": 100},
            "rollout": {"max_response_tokens": 200},
            "environment": {"name": f"{folder}/shows.py:{name}", "options": options, "context_tokens": 200},
        }
    )


ROW = Prompt("row", ({"role": "user", "content": "<image>What?"},), "", "", "", "", images=(FIRST,))
SAID = {"role": "assistant", "content": "a"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return speaking("qwen3_vl")


def opened(environments: Environments, row: Prompt = ROW) -> tuple[Conversation, Any]:
    session = environments.session(row)
    return environments.conversation(session.reset(row_of(row), 0).result(60)), session


def speak(conversation: Conversation, tokenizer: Any, text: str = "a") -> None:
    ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
    trajectory = conversation.trajectory.extended("policy", ids, np.zeros(len(ids), np.float32), 0, "stop")
    conversation.add_turn(trajectory, text)


@pytest.mark.parametrize("form", ["bytes", "struct", "pillow", "array"])
def test_each_form_of_an_image_becomes_what_the_model_sees(
    folder: Path, rule: ImageRule, tokenizer: Any, form: str
) -> None:
    image_processor = ImageProcessor(rule)
    with Environments(
        config_of(folder, how=form),
        [config_of(folder).environment.name],
        tokenizer,
        [1],
        image_processor=image_processor,
    ) as e:
        conversation, session = opened(e)
        speak(conversation, tokenizer)
        reply = session.step(SAID).result(60)
        conversation.add_reply(reply)
    trajectory = conversation.trajectory
    first, second = image_processor.process([FIRST]), image_processor.process([SECOND])
    assert [np.array_equal(*pair) for pair in zip(trajectory.images, (*first, *second), strict=True)] == [True, True]
    assert trajectory.images[0] is first[0], "equal images are one array"
    assert [(span.speaker, span.image_count) for span in trajectory.spans] == [
        ("prompt", 1),
        ("policy", 0),
        ("environment", 1),
    ]
    counts = [rule.tokens(image.shape[1], image.shape[0]) for image in trajectory.images]
    assert (trajectory.tokens == rule.token).sum() == sum(counts)
    assert rule.starts(trajectory.tokens, trajectory.images)[1] > trajectory.spans[1].end
    text = tokenizer.decode(trajectory.tokens)
    assert "And <\u200bimage>: " in text, "a text that names the marker shows nothing"
    message = conversation.messages[-1]
    assert (message["content"], message["images"][0]["width"]) == ("And <\u200bimage>: <image>", 30)
    digests = [image["digest"] for m in conversation.messages for image in m.get("images", ())]
    assert list(conversation.copies) == digests
    assert [size_of(copy) for copy in conversation.copies.values()] == [(84, 56), (30, 60)]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("broken", "the image is broken|an image is broken"),
        ("no image", "int is no image"),
        ("none", "NoneType is no image"),
        ("odd part", "neither text nor an image"),
    ],
)
def test_what_cannot_be_shown_is_a_failure_of_the_environment(
    folder: Path, rule: ImageRule, tokenizer: Any, form: str, message: str
) -> None:
    with Environments(
        config_of(folder, how=form),
        [config_of(folder).environment.name],
        tokenizer,
        [1],
        image_processor=ImageProcessor(rule),
    ) as environments:
        _, session = opened(environments)
        with pytest.raises(EnvironmentFailed, match=message):
            session.step(SAID).result(60)


def test_images_that_no_conversation_has_room_for_end_it(folder: Path, rule: ImageRule, tokenizer: Any) -> None:
    config = config_of(folder, how="many")
    with Environments(
        config, [config.environment.name], tokenizer, [1], image_processor=ImageProcessor(rule)
    ) as environments:
        conversation, session = opened(environments)
        speak(conversation, tokenizer)
        conversation.add_reply(session.step(SAID).result(60))
        assert (conversation.ended, len(conversation.trajectory.images)) == ("tokens", 1)
        images = tuple(encoded(number, (800, 800)) for number in range(3, 6))
        large = replace(ROW, messages=({"role": "user", "content": "<image>" * 3},), images=images)
        with pytest.raises(EnvironmentFailed, match=r"reset showed images of more than \d+ tokens"):
            opened(environments, large)


def test_the_last_image_is_seen_by_nobody_and_may_be_broken(folder: Path, rule: ImageRule, tokenizer: Any) -> None:
    config = config_of(folder, how="last")
    with Environments(
        config, [config.environment.name], tokenizer, [1], image_processor=ImageProcessor(rule)
    ) as environments:
        conversation, session = opened(environments)
        speak(conversation, tokenizer)
        conversation.add_reply(session.step(SAID).result(60))
    assert (conversation.ended, conversation.reward) == ("done", 0.5)


def test_slow_images_are_not_the_environments_fault(
    folder: Path, rule: ImageRule, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = processor_module.decode

    def slow(image: bytes) -> Any:
        time.sleep(0.15)
        return decoding(image)

    monkeypatch.setattr(processor_module, "decode", slow)
    config = config_of(folder)
    config = config.model_copy(update={"environment": config.environment.model_copy(update={"deadline_s": 1.5})})
    rows = [replace(ROW, id=str(n), images=(encoded(n),)) for n in range(16)]
    with Environments(
        config, [config.environment.name], tokenizer, [1], image_processor=ImageProcessor(rule)
    ) as environments:
        pids = environments.pids
        replies = [environments.session(row).reset(row_of(row), 0) for row in rows]
        assert all(pending.result(60).processed_images for pending in replies)
        assert environments.pids == pids


def test_a_model_of_text_is_shown_nothing(folder: Path, tokenizer: Any) -> None:
    config = config_of(folder)
    with (
        Environments(config, [config.environment.name], tokenizer, [1]) as environments,
        pytest.raises(EnvironmentFailed, match="the model reads text alone"),
    ):
        opened(environments)


def test_a_template_that_leaves_an_image_out_is_a_failure(folder: Path, rule: ImageRule) -> None:
    from rlcli.errors import ModelError

    tokenizer_without_images, config = speaking("qwen3_vl"), config_of(folder)
    tokenizer_without_images.chat_template = TOOLS_TEMPLATE.replace("IMAGE_TOKEN", "")
    with (
        Environments(
            config, [config.environment.name], tokenizer_without_images, [1], image_processor=ImageProcessor(rule)
        ) as environments,
        pytest.raises(ModelError, match="writes 0 placeholders for 1 images"),
    ):
        opened(environments)


def test_a_tool_shows_an_image(folder: Path, rule: ImageRule, tokenizer: Any) -> None:
    config = config_of(folder, "look")
    with Environments(
        config, [config.environment.name], tokenizer, [1], image_processor=ImageProcessor(rule)
    ) as environments:
        conversation, session = opened(environments)
        text = '<tool_call>{"name": "look", "arguments": {"place": 3}}</tool_call>'
        ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
        trajectory = conversation.trajectory.extended("policy", ids, np.zeros(len(ids), np.float32), 0, "stop")
        conversation.add_reply(session.step(conversation.add_turn(trajectory, text)).result(60))
    assert conversation.ended is None
    assert [span.image_count for span in conversation.trajectory.spans] == [1, 0, 1]
    assert conversation.messages[-1]["content"] == "<image>at 3"
    assert "look gives <|vision_start|>" in tokenizer.decode(conversation.trajectory.tokens)


def test_the_pages_tool_shows_an_image(tmp_path: Path, rule: ImageRule, tokenizer: Any) -> None:
    (tmp_path / "dots.py").write_text(blocks("environments.md", "python")[2])
    with EnvironmentHost(EnvironmentSpec(f"{tmp_path}/dots.py:dots")) as host:
        session = host.session()
        assert session.reset(row_of(ROW), 0).result(60).images == (FIRST,)
        call = {"id": "call00001", "type": "function", "function": {"name": "dots", "arguments": {"number": 3}}}
        reply = session.step({"role": "assistant", "content": "", "tool_calls": [call]}).result(60)
    assert reply.messages[0]["content"] == "<image>3 dots"
    (image,) = ImageProcessor(rule).process(reply.images)
    assert image.shape == (64, 128, 3)
    assert (image == 0).all(-1).any()


def replied(images: tuple[bytes, ...], text: str, image_processor: ImageProcessor) -> Reply:
    parts: list[Any] = [{"type": "image", "image": {"base64": base64.b64encode(png).decode()}} for png in images]
    reply = reply_of([[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], 0.0, False])
    return replace(reply, images=(), processed_images=image_processor.process(reply.images))


def test_a_past_that_is_rendered_anew_shows_its_images_again(folder: Path, rule: ImageRule, tokenizer: Any) -> None:
    image_processor, config = ImageProcessor(rule), config_of(folder)
    with Environments(
        config, [config.environment.name], tokenizer, [1], image_processor=image_processor
    ) as environments:
        conversation, _ = opened(environments)
    conversation.past = "per_cycle"
    speak(conversation, tokenizer)
    conversation.add_reply(replied((SECOND,), "more", image_processor))
    speak(conversation, tokenizer)
    trajectory = conversation.trajectory
    assert [len(branch.images) for branch in trajectory.branches] == [1, 2]
    assert [id(image) for image in trajectory.branch_images] == [
        id(image) for image in image_processor.process([FIRST, SECOND])
    ]
    for branch in trajectory.branches:
        rule.starts(branch.tokens, branch.images)  # as many tokens as they have
    assert [id(image) for image in Trajectory.joined(trajectory.branches).images] == [
        id(image) for image in trajectory.images
    ]
    assert len(trajectory.until_turn(1).images) == 1


def test_a_long_message_keeps_its_images_when_it_is_cut(folder: Path, rule: ImageRule, tokenizer: Any) -> None:
    image_processor, config = ImageProcessor(rule), config_of(folder)
    with Environments(
        config, [config.environment.name], tokenizer, [1], image_processor=image_processor
    ) as environments:
        conversation, _ = opened(environments)
    conversation.limits = replace(conversation.limits, reply_chars=20)
    speak(conversation, tokenizer)
    conversation.add_reply(replied((SECOND,), "x" * 90, image_processor))
    assert conversation.messages[-1]["content"] == f"<image>{'x' * 10}…{'x' * 9}"
    assert len(conversation.trajectory.images) == 2


def test_images_without_room_end_the_conversation(folder: Path, rule: ImageRule, tokenizer: Any) -> None:
    image_processor, config = ImageProcessor(rule), config_of(folder)
    with Environments(
        config, [config.environment.name], tokenizer, [1], image_processor=image_processor
    ) as environments:
        conversation, _ = opened(environments)
    speak(conversation, tokenizer)
    previous = conversation.trajectory
    conversation.limits = replace(conversation.limits, tokens=len(previous.tokens) + 6)
    conversation.add_reply(replied((SECOND,), "", image_processor))
    assert conversation.ended == "tokens"
    assert conversation.finished().tokens is previous.tokens
    assert len(conversation.finished().images) == 1


def test_another_image_is_another_state() -> None:
    def state(image: bytes) -> int:
        part = {"type": "image", "image": {"base64": base64.b64encode(image).decode()}}
        return state_of(opening_of([{"role": "user", "content": [part]}]).messages)

    assert state(FIRST) == state(FIRST) != state(SECOND)


def url(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}


class Asked:
    """An engine's side that answers each request with one token."""

    def __init__(self, tokenizer: Any) -> None:
        self.asks: list[GenerationAsk] = []
        self.tokens = np.array([*tokenizer("b")["input_ids"], tokenizer.eos_token_id], np.int32)

    def submit(self, ask: GenerationAsk) -> Future[Any]:
        self.asks.append(ask)
        future: Future[Any] = Future()
        future.set_result(Generation(ask.turn, self.tokens, np.zeros(len(self.tokens), np.float32), "stop"))
        return future


LIMITS = Limits(turns=8, turn_tokens=50, response_tokens=400, tokens=300)


@pytest.fixture
def recorder(tokenizer: Any) -> Asked:
    return Asked(tokenizer)


@pytest.fixture
def gateway(tokenizer: Any, rule: ImageRule, recorder: Asked) -> Iterator[Gateway]:
    with Gateway(
        tokenizer, [tokenizer.eos_token_id], LIMITS, recorder.submit, image_processor=ImageProcessor(rule)
    ) as gateway:
        yield gateway


def post(session: Any, messages: list[Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {session.token}"}
    return httpx.post(f"{session.url}/chat/completions", json={"messages": messages}, headers=headers)


def test_an_agents_images_are_in_its_trajectory(gateway: Gateway, rule: ImageRule, recorder: Asked) -> None:
    session = gateway.open()
    messages: list[Any] = row_of(ROW, urls=True)["messages"]
    answer = post(session, messages).json()["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": [url(SECOND), {"type": "text", "text": "?"}]}]
    post(session, messages)
    edited = [{"role": "user", "content": [url(SECOND), {"type": "text", "text": "What?"}]}, *messages[1:]]
    post(session, edited)
    first, second = (branch.trajectory for branch in session.branches)
    assert [span.image_count for span in first.spans] == [1, 0, 1, 0]
    assert [span.image_count for span in second.spans] == [2, 0], "another image is another past"
    for trajectory in (first, second):
        rule.starts(trajectory.tokens, trajectory.images)
    assert [len(ask.images) for ask in recorder.asks] == [1, 2, 2]
    assert len(session.record.copies) == 2
    tokens = {"token_ids": [rule.token], "sampling_params": {}}
    headers = {"Authorization": f"Bearer {session.token}"}
    refused = httpx.post(f"{session.url[:-3]}/inference/v1/generate", json=tokens, headers=headers)
    assert (refused.status_code, "stand for images" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (url(b"no image"), "an image is broken"),
        (url(FIRST[:100]), "broken"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "only data URLs"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "no base64"),
        ({"type": "image_url"}, "no data"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,ä"}}, "no base64"),
        ({"type": "input_audio"}, "neither text nor an image"),
    ],
)
def test_an_agent_is_told_what_cannot_be_shown(gateway: Gateway, part: Any, message: str) -> None:
    refused = post(gateway.open(), [{"role": "user", "content": [part]}])
    assert (refused.status_code, message in refused.text) == (400, True)


def test_an_agents_images_may_be_too_many_tokens(gateway: Gateway) -> None:
    session = gateway.open()
    refused = post(session, [{"role": "user", "content": [url(encoded(n, (640, 640))) for n in (4, 5)]}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert session.ended == "tokens", "a limit, and no failure of the agent"


def test_another_image_in_a_turn_that_was_not_drawn_is_another_past(gateway: Gateway, recorder: Asked) -> None:
    session = gateway.open()
    for image in (FIRST, SECOND):
        shown = {"role": "assistant", "content": [url(image), {"type": "text", "text": "like so"}]}
        post(session, [{"role": "user", "content": "?"}, shown, {"role": "user", "content": "And?"}])
    assert [branch.trajectory.turns for branch in session.branches] == [1, 1]
    assert recorder.asks[0].images[0].shape != recorder.asks[1].images[0].shape


def test_a_marker_in_pieces_shows_nothing() -> None:
    parts = [{"type": "text", "text": "<ima"}, {"type": "text", "text": "ge>"}]
    image = {"type": "image", "image": {"base64": base64.b64encode(FIRST).decode()}}
    text, images = split_parts([*parts, image])
    assert (text.count("<image>"), len(images)) == (1, 1)
    assert split_parts(parts) == ("<image>", ())


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_policy_spells_is_no_image(kind: str) -> None:
    tokenizer, seen = speaking(kind), image_rule(vision_config(kind))
    template = TurnTemplate(tokenizer, [tokenizer.eos_token_id], never=seen.never)
    spelled = "".join(tokenizer.convert_ids_to_tokens(list(seen.never)))
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": [spelled]}}}
    turn = {"role": "assistant", "content": spelled, "tool_calls": [call]}
    ids = template.first([template.prepared(message) for message in ({"role": "user", "content": spelled}, turn)])
    assert set(seen.never).isdisjoint(ids)
    assert "\u200b" in tokenizer.decode(ids)


def test_an_agent_of_a_model_of_text_is_told(tokenizer: Any, recorder: Asked) -> None:
    with Gateway(tokenizer, [tokenizer.eos_token_id], LIMITS, recorder.submit) as gateway:
        refused = post(gateway.open(), [{"role": "user", "content": [url(FIRST)]}])
    assert (refused.status_code, "reads text alone" in refused.text) == (400, True)
