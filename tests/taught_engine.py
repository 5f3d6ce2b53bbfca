"""The transformers engine on a tiny model, in a thread: it answers what the gateway asks, with what it was taught."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from rlcli.environments.gateway.gateway_server import GenerationAsk
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.rollout.engine import EngineSpec, Generation, GenerationRequest, Sampling, finished
from rlcli.rollout.transformers_engine import TransformersEngine

TEMPLATE = """\
{%- if tools -%}{{- '<|system|>Call tools as <tool_call>{"name": NAME, "arguments": {}}</tool_call>: ' -}}
{%- for tool in tools -%}{{- tool.function.name ~ ' ' -}}{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
{{- '<|' ~ ('user' if message.role == 'tool' else message.role) ~ '|>' -}}
{%- if message.role == 'tool' -%}{{- message.name ~ ' gives ' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' -}}
{%- endfor -%}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


class TaughtEngine:
    """wanted: of the prompt's text, what the policy shall say; None: whatever it draws. A few steps of gradient descent
    on that prompt teach it; then it is drawn greedily, token by token. Each prompt and response is in `seen`."""

    def __init__(self, folder: Path, wanted: Callable[[str], str | None]) -> None:
        from transformers import AutoTokenizer

        make_tiny_model(folder, hidden=64, layers=1, heads=2, kv_heads=1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.chat_template = TEMPLATE
        self.stops = (self.tokenizer.eos_token_id,)
        self.seen: list[tuple[list[int], list[int]]] = []
        self.fail: Exception | None = None
        self.hold = threading.Event()
        self.hold.set()
        self._wanted = wanted
        self._engine = TransformersEngine(
            EngineSpec(
                **{"model": str(folder), "dtype": "float32", "device": "cpu", "max_length": 4096, "max_concurrent": 4},
                **{"tensor_parallel": 1, "lora_rank": 0, "weights_follow": False, "kv_cache_bytes": None},
                **{"gpu_memory_utilization": 0.9, "enforce_eager": True, "stop_token_ids": self.stops, "group_id": "t"},
            )
        )
        self._untaught, self._taught = _copy(self._engine._lm), dict[tuple[int, ...], Any]()
        self._asks: queue.SimpleQueue[tuple[GenerationAsk, Future[Generation]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, ask: GenerationAsk) -> Future[Generation]:
        future: Future[Generation] = Future()
        self._asks.put((ask, future))
        return future

    def _run(self) -> None:
        while (entry := self._asks.get()) is not None:
            ask, future = entry
            self.hold.wait()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._generation(ask))
            except Exception as error:
                future.set_exception(error)

    def _generation(self, ask: GenerationAsk) -> Generation:
        if self.fail:
            raise self.fail
        wanted = self._wanted(self.tokenizer.decode(ask.prompt))
        if wanted is not None:
            self._teach(ask.prompt.tolist(), [*self.tokenizer(wanted)["input_ids"], *self.stops][: ask.max_tokens])
        request = GenerationRequest(ask.turn, ask.prompt, ask.turn, greedy=wanted is not None)
        (generation,) = finished(self._engine, [request], Sampling(1.0, ask.max_tokens))
        self.seen.append((ask.prompt.tolist(), generation.tokens.tolist()))
        return generation

    def _teach(self, prompt: list[int], answer: list[int]) -> None:
        """From the same weights each time, and once for each prompt."""
        import torch

        lm: Any = self._engine._lm.requires_grad_(True)
        known = self._taught.get(tuple(prompt))
        lm.load_state_dict(known or self._untaught)
        if known:
            return
        optimizer, threads = torch.optim.Adam(lm.parameters(), lr=1e-2), torch.get_num_threads()
        torch.set_num_threads(1)  # several cost more than they gain here
        ids = torch.tensor([[*prompt, *answer]])
        for _ in range(300):
            logits = lm(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
            if bool((logits.argmax(-1) == ids[0, len(prompt) :]).all()):
                self._taught[tuple(prompt)] = _copy(lm)
                return torch.set_num_threads(threads)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]).backward()
            optimizer.step()
        raise AssertionError("the answer was not learnt")

    def close(self) -> None:
        self.hold.set()
        self._asks.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy(lm: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in lm.state_dict().items()}


def is_recorded(seen: list[tuple[list[int], list[int]]], trajectories: list[Any]) -> bool:
    """True if the trajectories hold, to the token, the engine's prompts and responses, each response once and after
    its own prompt."""
    unmatched_masks = [trajectory.response_mask for trajectory in trajectories]
    for prompt, response in seen:
        start, end = len(prompt), len(prompt) + len(response)
        fits = (
            mask
            for mask, t in zip(unmatched_masks, trajectories, strict=True)
            if t.tokens[:end].tolist() == prompt + response
        )
        match = next((mask for mask in fits if mask[start:end].all()), None)
        if match is None:
            return False
        match[start:end] = False
    return not any(mask.any() for mask in unmatched_masks)
