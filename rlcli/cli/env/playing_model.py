"""Lets a model play an environment, or answer an agent, on transformers in this process, as in a run."""

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
    """Play one conversation with `rollout.temperature`, within the limits of `environment.*` and of responses."""
    require("torch", "transformers", "accelerate")
    from rlcli.environments.environment_pool import Environments
    from rlcli.rollout.local_chat import local_engine

    config = task.config
    tokenizer, stops, thinking = _tokenizer(config)
    engine = local_engine(config.model.path, stops, config.max_length, "env-try")
    with Environments(config, (), tokenizer, stops, thinking=thinking) as template:
        session, opening = task.reset()
        print_opening(opening)
        conversation = template.conversation(opening)
        while conversation.ended is None:
            trajectory = conversation.trajectory
            generation = _generate(engine, config, trajectory.branch, conversation.room, trajectory.turns)
            trajectory = trajectory.extended(
                "policy", generation.tokens, generation.log_probs, 0, generation.finish_reason
            )
            message = conversation.add_turn(trajectory, template.text(generation.tokens.tolist()))
            print_message(message)
            reply = answer(session, message)
            conversation.add_reply(reply)
            print_reply(reply)
    engine.close()
    print_end(conversation.ended, conversation.trajectory.turns, conversation.reward)


def play_agent(config: RunConfig, prompt: Prompt) -> None:
    """Run a program that requests turns from the model, to its end."""
    require("torch", "transformers", "accelerate")
    import numpy as np

    from rlcli.data.messages import PromptTask
    from rlcli.environments.finished_conversation import FinishedConversation
    from rlcli.environments.gateway.agent_pool import AgentPool
    from rlcli.environments.gateway.agent_round import AgentRound
    from rlcli.rollout.local_chat import local_engine

    tokenizer, stops, thinking = _tokenizer(config)
    with AgentPool(config, tokenizer, stops, thinking=thinking) as agents:
        engine = local_engine(config.model.path, stops, config.max_length, "env-try")
        round = AgentRound(agents, 0, ordered=True)
        round.open(0, PromptTask(0, np.zeros(0, np.int32), prompt, 1))
        while not isinstance(event := round.poll()[0], FinishedConversation):
            round.add_turn(0, _generate(engine, config, event.tokens, event.room, event.number))
    engine.close()
    if event.failure is not None:
        raise RlcliError(f"the agent failed twice: {event.failure.detail}", "a run would leave this sample out")
    for message in event.fields["conversation"]:
        print_message(message)
    facts = event.fields["environment"]
    count = len(event.trajectory.branch_starts)
    branches = f"; this is the last of its {count} conversations" if count > 1 else ""
    print_end(facts["ended"] + branches, event.trajectory.turns, sum(facts["rewards"]))


def _tokenizer(config: RunConfig) -> tuple[Any, tuple[int, ...], bool]:
    """The tokenizer with its chat template, the ids that end a turn, and True if a prompt opens a <think>."""
    from rlcli.data.prompts import chat_template
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, config.model.chat_template)
    chat_template.fix(tokenizer, config.data.chat_template_kwargs, None)
    stops = chat_template.stop_tokens(tokenizer, config.model.path, config.rollout.stop_token_ids)
    return tokenizer, tuple(stops), chat_template.opens_thinking(tokenizer)


def _generate(engine: Any, config: RunConfig, tokens: Any, room: int, turn: int) -> Any:
    """The policy's next turn, number `turn`, after `tokens`."""
    from rlcli.data.messages import sample_seed
    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    sampling = Sampling(config.rollout.temperature, room, config.rollout.top_p)
    seed = sample_seed(config.train.seed, "env try", turn, "", 0)
    return next(iter(finished(engine, [GenerationRequest(0, tokens, seed)], sampling)))
