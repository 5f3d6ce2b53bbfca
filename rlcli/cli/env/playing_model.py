"""A model that plays an environment, or answers an agent, on transformers in this process, as a run does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcli.cli.env.environment_task import Task
from rlcli.cli.env.print_messages import answer, print_end, print_message, print_opening, print_reply
from rlcli.errors import RlcliError
from rlcli.support.extras import require

if TYPE_CHECKING:
    from rlcli.config.schema import RunConfig
    from rlcli.types import Prompt


def play_model(task: Task) -> None:
    """One conversation with `rollout.temperature`, within the limits of `environment.*` and of responses."""
    require("torch", "transformers", "accelerate")
    from rlcli.environments.environment_pool import Environments
    from rlcli.rollout.local_chat import local_engine

    config = task.config
    tokenizer, stops, opened = _tokenizer(config)
    engine = local_engine(config.model.path, stops, config.max_length, "env-try")
    with Environments(config, (), tokenizer, stops, opened=opened) as template:
        session, opening = task.reset()
        print_opening(opening)
        conversation = template.conversation(opening)
        while conversation.ended is None:
            whole = conversation.trajectory
            drawn = _draw(engine, config, whole.branch, conversation.room, whole.turns)
            whole = whole.extended("policy", drawn.tokens, drawn.log_probs, 0, drawn.finish_reason)
            message = conversation.drew(whole, template.text(drawn.tokens.tolist()))
            print_message(message)
            reply = answer(session, message)
            conversation.replied(reply)
            print_reply(reply)
    engine.close()
    print_end(conversation.ended, conversation.trajectory.turns, conversation.reward)


def play_agent(config: RunConfig, prompt: Prompt) -> None:
    """A program that asks the model for its turns, to its end."""
    require("torch", "transformers", "accelerate")
    import numpy as np

    from rlcli.data.messages import PromptTask
    from rlcli.environments.finished_conversation import FinishedConversation
    from rlcli.environments.gateway.agent_pool import AgentPool
    from rlcli.environments.gateway.agent_round import AgentRound
    from rlcli.rollout.local_chat import local_engine

    tokenizer, stops, opened = _tokenizer(config)
    with AgentPool(config, tokenizer, stops, opened=opened) as agents:
        engine = local_engine(config.model.path, stops, config.max_length, "env-try")
        round = AgentRound(agents, 0, ordered=True)
        round.open(0, PromptTask(0, np.zeros(0, np.int32), prompt, 1))
        while not isinstance(one := round.poll()[0], FinishedConversation):
            round.drew(0, _draw(engine, config, one.tokens, one.room, one.number))
    engine.close()
    if one.failure is not None:
        raise RlcliError(f"the agent failed twice: {one.failure.detail}", "a run would leave this sample out")
    for message in one.fields["conversation"]:
        print_message(message)
    facts = one.fields["environment"]
    count = len(one.whole.branch_starts)
    branches = f"; this is the last of its {count} conversations" if count > 1 else ""
    print_end(facts["ended"] + branches, one.whole.turns, sum(facts["rewards"]))


def _tokenizer(config: RunConfig) -> tuple[Any, tuple[int, ...], bool]:
    """The tokenizer with its chat template, the ids that end a turn, and whether a prompt opens a <think>."""
    from rlcli.data.prompts import chat_template
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, config.model.chat_template)
    chat_template.fix(tokenizer, config.data.chat_template_kwargs, None)
    stops = chat_template.stop_tokens(tokenizer, config.model.path, config.rollout.stop_token_ids)
    return tokenizer, tuple(stops), chat_template.opens_thinking(tokenizer)


def _draw(engine: Any, config: RunConfig, tokens: Any, room: int, turn: int) -> Any:
    """The policy's next turn, number `turn`, after `tokens`."""
    from rlcli.data.messages import sample_seed
    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    sampling = Sampling(config.rollout.temperature, room, config.rollout.top_p)
    seed = sample_seed(config.train.seed, "env try", turn, "", 0)
    return next(iter(finished(engine, [GenerationRequest(0, tokens, seed)], sampling)))
