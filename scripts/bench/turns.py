"""What an environment's latency costs: the engine's throughput in conversations, with and without it.

    .venv/bin/python scripts/bench/turns.py [--model tiny-1m] [--samples 256] [--turns 4] [--latency 0.1] [--json FILE]

One worker's engine and its round generate the same conversations: `samples` of `turns` turns of `tokens` tokens each.
The environment answers at once, or after `latency` seconds. While it does, the engine goes on with other conversations.
The rounds take turns. Throughput is drawn tokens by seconds; the ratio is that with latency to that without.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import interleaved, ratio, write_json
from _step_work import make_model

ENVIRONMENT = """
import asyncio

class Wait:
    def __init__(self, seconds, turns):
        self.seconds, self.turns, self.at = seconds, turns, 0
    async def reset(self, row, seed):
        return [{"role": "user", "content": "0123456789"}]
    async def step(self, message):
        await asyncio.sleep(self.seconds)
        self.at += 1
        return [{"role": "user", "content": "0123456789"}], 0.0, self.at == self.turns
"""
PROMPT, ADDED = 64, 48
"""Tokens: of the first messages at most, and of what one turn is answered with."""


class NoScorer:
    """The verdicts are not measured."""

    def submit(self, *asked: Any) -> Any:
        from concurrent.futures import Future

        from rlcli.rewards.service.scoring_client import Scored
        from rlcli.types import Outcome, Verdict

        done: Future[Scored] = Future()
        done.set_result(Scored("", Verdict(0.0, Outcome.WRONG)))
        return done


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist

    from rlcli.config.schema import RunConfig
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer
    from rlcli.environments.environment_pool import Environments
    from rlcli.rollout.engine import EngineSpec
    from rlcli.rollout.vllm.vllm_engine import VllmEngine
    from rlcli.rollout.worker.rollout_role import RolloutRole

    model = make_model(arguments.model, folder / "model")
    (folder / "wait.py").write_text(ENVIRONMENT)
    tokenizer = load_tokenizer(model)
    length = PROMPT + arguments.turns * (arguments.tokens + ADDED)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec = {"dtype": "float32", "device": "cpu", "max_length": length, "max_concurrent": arguments.samples}
    memory = {"kv_cache_bytes": 1 << 30, "gpu_memory_utilization": 0.3, "enforce_eager": True}
    engine = VllmEngine(
        EngineSpec(
            model,
            **spec,
            tensor_parallel=1,
            lora_rank=0,
            weights_follow=False,
            **memory,
            stop_token_ids=(),
            group_id="bench",
        )  # type: ignore[arg-type]
    )
    turns: dict[str, list[float]] = {}
    with ExitStack() as stack:
        stack.callback(engine.close)
        roles = {}
        for name, seconds in (("at once", 0.0), ("later", arguments.latency)):
            config = RunConfig.model_validate(
                {
                    "data": {"max_prompt_tokens": PROMPT},
                    "rollout": {"max_response_tokens": arguments.turns * arguments.tokens},
                    "environment": {
                        "name": f"{folder}/wait.py:Wait",
                        "options": {"seconds": seconds, "turns": arguments.turns},
                        "turns": arguments.turns,
                        "context_tokens": arguments.turns * ADDED,
                    },
                }
            )
            environments = Environments(config, [config.environment.name], tokenizer, [tokenizer.eos_token_id])
            stack.enter_context(environments)
            roles[name] = RolloutRole(0, engine, NoScorer(), environments=environments, conversing=True)  # type: ignore[arg-type]
        runs = {name: _run(role, arguments, turns.setdefault(name, [])) for name, role in roles.items()}
        seconds_each = interleaved(runs, repeats=arguments.repeats)
    return {
        "seconds_per_token": seconds_each,
        "turns": turns,
        "ratio": ratio(seconds_each["at once"], seconds_each["later"]),
    }


def _run(role: Any, arguments: argparse.Namespace, turns: list[float]) -> Callable[[], float]:
    """Seconds per drawn token of one round. turns: gets the mean number of turns."""
    import numpy as np

    from rlcli.data.messages import PromptTask
    from rlcli.rollout.engine import Sampling
    from rlcli.rollout.rollout_call import RolloutCall
    from rlcli.types import Prompt

    params = role.engine._params

    def whole(request: Any) -> Any:  # each turn ends after as many tokens, as if the policy had ended it
        given = params(request)
        given.max_tokens, given.ignore_eos, given.stop_token_ids = arguments.tokens, True, []
        return given

    def run() -> float:
        finish = role.engine.step

        def stopped() -> Any:
            from dataclasses import replace

            return [replace(one, finish_reason="stop") for one in finish()]

        role.engine._params, role.engine.step = whole, stopped
        tasks = [
            PromptTask(n, np.zeros(1, np.int32), Prompt(str(n), ({"role": "user", "content": "x"},), "", "", "", ""), 8)
            for n in range(arguments.samples // 8)
        ]
        started = time.perf_counter()
        try:
            *_, report = role.run(tasks, RolloutCall(Sampling(1.0, arguments.tokens), 0, "train", 1, keep_tokens=False))
        finally:
            role.engine._params, role.engine.step = params, finish
        seconds = time.perf_counter() - started
        turns.append(float(report.samples.turns.mean()))
        return seconds / float(report.samples.drawn_tokens.sum())

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-1m")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of a turn")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-turns-") as folder:
        found = measure(arguments, Path(folder))
    print(f"{'environment answers':<22}{'tokens/s':>10}{'turns':>8}")
    for name, seconds in found["seconds_per_token"].items():
        print(f"{name:<22}{1 / sorted(seconds)[len(seconds) // 2]:>10,.0f}{found['turns'][name][-1]:>8.1f}")
    print(f"throughput with {arguments.latency:g} s of latency: {found['ratio']:.3f} of that without")
    if arguments.json:
        write_json(arguments.json, {"arguments": {k: str(v) for k, v in vars(arguments).items()}, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
