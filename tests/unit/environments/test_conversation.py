"""A conversation turn by turn: its tokens, its mask, its limits, and why it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import Conversation, Limits, Past, shortened, state_of, states_of
from rlcli.environments.environment import Opening, Reply
from rlcli.environments.turn_tokens import TurnTemplate
from tests import chat_templates as of
from tests.chat_templates import tokenizer_with

ASK = Opening([{"role": "user", "content": "1+1?"}])
ROOMY = Limits(turns=9, turn_tokens=99, response_tokens=999, tokens=999)


def talk(
    limits: Limits = ROOMY, template: str = of.CHATML, form: str = "hermes", past: Past = "keep"
) -> tuple[Any, Conversation]:
    tokenizer = tokenizer_with(template)
    turns = TurnTemplate(tokenizer, [tokenizer.eos_token_id])
    return tokenizer, Conversation(turns, limits, ASK, form, template == of.THINKING, past)


def draw(tokenizer: Any, conversation: Conversation, text: str, *, ended: bool = True, version: int = 1) -> Any:
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    trajectory = conversation.trajectory.extended(
        "policy", ids, np.full(len(ids), -1.0, np.float32), version, "stop" if ended else "length"
    )
    return conversation.add_turn(trajectory, text.removesuffix("<|im_end|>").removesuffix("<eos>"))


def replied(text: str, reward: float = 0.0, done: bool = False) -> Reply:
    return Reply([{"role": "user", "content": text}], reward, done)


def test_two_turns_are_one_trajectory_whose_mask_is_what_was_drawn() -> None:
    tokenizer, conversation = talk()
    assert draw(tokenizer, conversation, "2<|im_end|>") == {"role": "assistant", "content": "2"}
    conversation.add_reply(replied("Sure?", reward=0.25))
    assert conversation.ended is None
    draw(tokenizer, conversation, "Yes.<|im_end|>", version=2)
    conversation.add_reply(replied("Bye.", reward=0.5, done=True))
    trajectory = conversation.trajectory
    assert tokenizer.decode(trajectory.tokens) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    )
    assert tokenizer.decode(trajectory.tokens[trajectory.response_mask]) == "2<|im_end|>Yes.<|im_end|>"
    assert (conversation.ended, trajectory.turns, trajectory.versions, conversation.reward) == ("done", 2, [1, 2], 0.75)
    last = len(tokenizer("2<|im_end|>")["input_ids"]) - 1
    assert conversation.rewards == [(last, 0.25), (trajectory.response_tokens - 1, 0.5)]
    assert conversation.states == [state_of(ASK.messages), state_of(replied("Sure?").messages)]
    assert trajectory.response_turns.tolist() == [0] * (last + 1) + [1] * (trajectory.response_tokens - last - 1)
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("limits", "turns", "ended"),
    [
        ({"turns": 2}, 2, "turns"),
        ({"response_tokens": 4}, 2, "response_tokens"),
        ({"tokens": 45}, 1, "tokens"),
        ({"tool_calls": 1}, 2, "tool_calls"),
    ],
)
def test_a_limit_ends_it_and_says_which(limits: dict[str, int], turns: int, ended: str) -> None:
    tokenizer, conversation = talk(
        Limits(**{**{"turns": 9, "turn_tokens": 99, "response_tokens": 999, "tokens": 999}, **limits})
    )
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' if "tool_calls" in limits else "2"
    done = 0
    while conversation.ended is None and done < 5:
        draw(tokenizer, conversation, f"{call}<|im_end|>")
        conversation.add_reply(replied("Again."))
        done += 1
    assert (conversation.ended, conversation.trajectory.turns) == (ended, turns)
    assert conversation.trajectory.spans[-1].speaker == "policy", "nothing is appended that nobody answers"
    assert len(conversation.trajectory.tokens) <= conversation.limits.tokens


def test_a_state_is_what_the_environment_wrote_and_nothing_else() -> None:
    tokenizer, first = talk()
    _, other = talk()
    for conversation, turn_text in ((first, "2<|im_end|>"), (other, "Two.<|im_end|>")):
        draw(tokenizer, conversation, turn_text)
        conversation.add_reply(replied("Sure?", reward=float(conversation is first)))
    assert first.states == other.states
    assert first.states[0] != first.states[1]
    assert all(0 <= state < 2**63 for state in first.states)
    tool = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "2"}
    assert state_of([tool]) == state_of([{**tool, "tool_call_id": "call00002"}])
    assert len({state_of([{**tool, key: "x"}]) for key in ("role", "name", "content")} | {state_of([tool])}) == 4
    assert state_of([tool, tool]) != state_of([tool])


def test_without_messages_a_state_is_the_tokens_since_the_last_turn() -> None:
    def turn(trajectory: Trajectory, *tokens: int, version: int = 1) -> Trajectory:
        return trajectory.extended("policy", np.array(tokens, np.int32), -np.ones(len(tokens), np.float32), version)

    def observed(trajectory: Trajectory, *tokens: int) -> Trajectory:
        return trajectory.extended("environment", np.array(tokens, np.int32))

    prompt = Trajectory.of_prompt(np.array([1, 2], np.int32))
    trajectory = turn(
        observed(turn(observed(turn(prompt, 3, 4), 1, 2), 5), 7), 6
    )  # the environment added the same tokens to its second turn
    trajectory = turn(trajectory, 9, version=2)  # and the last one was continued with other weights
    first, second, third = states_of(trajectory)
    assert first == second != third
    assert len(states_of(trajectory)) == trajectory.turns == 1 + trajectory.response_turns[-1]
    assert states_of(observed(turn(prompt), 8)) == [first], "nothing was drawn in its turn"


def test_a_turn_that_was_cut_off_ends_it() -> None:
    tokenizer, conversation = talk()
    draw(tokenizer, conversation, "2 is the", ended=False)
    conversation.add_reply(replied("Go on."))
    assert conversation.ended == "turn_tokens"


def test_room_is_what_every_limit_leaves() -> None:
    tokenizer, conversation = talk(Limits(turns=9, turn_tokens=50, response_tokens=60, tokens=400))
    assert conversation.room == 50
    draw(tokenizer, conversation, "a" * 29 + "<|im_end|>")
    conversation.add_reply(replied("?"))
    assert conversation.room == 30
    assert talk(Limits(turns=9, turn_tokens=50, response_tokens=60, tokens=10))[1].ended == "tokens"


def test_the_opener_that_another_drew_is_taken_back_with_its_log_prob() -> None:
    tokenizer, conversation = talk(template=of.BY_OPENER)
    draw(tokenizer, conversation, "2<eos>")
    previous = conversation.trajectory
    conversation.add_reply(replied("Sure?"))
    updated = conversation.trajectory
    assert updated.response_tokens == previous.response_tokens - 1 == len(updated.log_probs)
    assert tokenizer.decode(updated.tokens).endswith("2<|user|>\nSure?<|assistant|>\n")


def test_a_reply_that_is_too_long_is_cut_and_its_calls_are_counted() -> None:
    tokenizer, conversation = talk(Limits(turns=9, turn_tokens=99, response_tokens=999, tokens=999, reply_chars=5))
    text = '<think>x</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>broken</tool_call>'
    message = draw(tokenizer, conversation, text + "<|im_end|>")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (message["reasoning_content"], conversation.calls, conversation.failed_calls) == ("x", 1, 1)
    conversation.add_reply(replied("abcdefghij"))
    assert conversation.messages[-1]["content"] == "ab…ij"
    assert "ab…ij<|im_end|>" in tokenizer.decode(conversation.trajectory.tokens)
    assert len(shortened("x" * 99, 10)) == 10


def test_a_past_that_is_rendered_anew_begins_a_branch() -> None:
    tokenizer, conversation = talk(template=of.THINKING, form="", past="per_cycle")
    draw(tokenizer, conversation, "one and one</think>2<eos>")
    conversation.add_reply(replied("Sure?<eos>", reward=0.25))
    draw(tokenizer, conversation, "yes</think>Yes.<eos>", version=2)
    conversation.add_reply(replied("", reward=0.5, done=True))
    trajectory = conversation.finished()
    first, second = (tokenizer.decode(branch.tokens) for branch in trajectory.branches)
    assert first == "<|user|>1+1?<|assistant|><think>\none and one</think>2<eos>"
    assert second == "<|user|>1+1?<|assistant|>2<eos><|user|>Sure?<\u200beos><|assistant|><think>\nyes</think>Yes.<eos>"
    assert (
        tokenizer.decode(trajectory.tokens[trajectory.response_mask]) == "one and one</think>2<eos>yes</think>Yes.<eos>"
    )
    assert (trajectory.turns, trajectory.versions, conversation.reward) == (2, [1, 2], 0.75)
    assert trajectory.response_turns.max() == 1
    assert trajectory.prompt_tokens == trajectory.branches[0].prompt_tokens


def test_the_result_of_a_tool_goes_on_in_the_same_branch() -> None:
    tokenizer, conversation = talk(template=of.HERMES, past="per_cycle")
    draw(tokenizer, conversation, '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>')
    conversation.add_reply(
        Reply([{"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "2"}], 0.0, False)
    )
    assert conversation.trajectory.branch_starts == [0]
    draw(tokenizer, conversation, "2<|im_end|>")
    conversation.add_reply(replied("Sure?"))
    starts = conversation.trajectory.branch_starts
    assert len(starts) == 2
    assert tokenizer.decode(conversation.trajectory.branch) == (
        "<|im_start|>user\n1+1?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("limits", "ended"), [({"tokens": 40}, None), ({"tokens": 30}, "tokens"), ({"sample_tokens": 58}, "tokens")]
)
def test_branches_have_a_limit_each_and_one_together(limits: dict[str, int], ended: str | None) -> None:
    bounds = Limits(**{**{"turns": 9, "turn_tokens": 99, "response_tokens": 999, "tokens": 999}, **limits})  # type: ignore[arg-type]
    tokenizer, conversation = talk(bounds, of.THINKING, "", "per_cycle")
    draw(tokenizer, conversation, "one and one</think>2<eos>")
    conversation.add_reply(replied("Sure?"))
    assert conversation.ended == ended
