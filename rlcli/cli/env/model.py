"""A model that plays an environment, on transformers in this process, as a run's conversations are held."""

from __future__ import annotations

from typing import Any

from rlcli.cli.env.messages import answer, print_end, print_message, print_opening, print_reply
from rlcli.cli.env.task import Task
from rlcli.extras import require


def play_model(task: Task) -> None:
    """One conversation with `rollout.temperature`, within the limits of `environment.*` and of responses."""
    require("torch", "transformers", "accelerate")
    from rlcli.environments.pool import Environments

    tokenizer, stops, opened = _tokenizer(task)
    config = task.config
    engine = _engine(task, stops)
    with Environments(config, (), tokenizer, stops, opened=opened) as template:
        session, opening = task.reset()
        print_opening(opening)
        conversation = template.conversation(opening)
        while conversation.ended is None:
            drawn = _draw(engine, conversation, config)
            whole = conversation.trajectory.extended("policy", drawn.tokens, drawn.log_probs, 0, drawn.finish_reason)
            message = conversation.drew(whole, template.text(drawn.tokens.tolist()))
            print_message(message)
            reply = answer(session, message)
            conversation.replied(reply)
            print_reply(reply)
    engine.close()
    print_end(conversation.ended, conversation.trajectory.turns, conversation.reward)


def _tokenizer(task: Task) -> tuple[Any, tuple[int, ...], bool]:
    """The tokenizer with its chat template, the ids that end a turn, and whether a prompt opens a <think>."""
    from rlcli.data.prompts import chat_template
    from rlcli.data.prompts.prompts import load_tokenizer

    config = task.config
    tokenizer = chat_template.fix(load_tokenizer(config.model.path), config.data.chat_template_kwargs, None)
    stops = chat_template.stop_tokens(tokenizer, config.model.path, config.rollout.stop_token_ids)
    return tokenizer, tuple(stops), chat_template.opens_thinking(tokenizer)


def _engine(task: Task, stops: tuple[int, ...]) -> Any:
    import torch

    from rlcli.rollout.engine import EngineSpec, engine_named

    config = task.config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return engine_named("transformers")(
        EngineSpec(
            model=config.model.path,
            dtype="bfloat16" if device == "cuda" else "float32",
            device=device,
            max_length=config.max_length,
            max_concurrent=1,
            tensor_parallel=1,
            lora_rank=0,
            weights_follow=False,
            kv_cache_bytes=None,
            gpu_memory_utilization=config.rollout.gpu_memory_utilization,
            enforce_eager=True,
            stop_token_ids=stops,
            group_id="env-try",
        )
    )


def _draw(engine: Any, conversation: Any, config: Any) -> Any:
    """The policy's next turn."""
    from rlcli.data.messages import sample_seed
    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    whole = conversation.trajectory
    sampling = Sampling(config.rollout.temperature, conversation.room, config.rollout.top_p)
    seed = sample_seed(config.train.seed, "env try", whole.turns, "", 0)
    return next(iter(finished(engine, [GenerationRequest(0, whole.tokens, seed)], sampling)))
