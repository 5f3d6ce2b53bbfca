"""vLLM's own server: its token endpoints (`--enable-scale-out`), and our methods in its workers (`Extension`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Concatenate, TypeVar

import numpy as np

from rlcli.rollout import sampling as counter_sampling
from rlcli.rollout.engine import EngineSpec
from rlcli.rollout.servers.server_protocol import ATTACH_S, Answer, ServerRequest, checked_answer
from rlcli.rollout.servers.vllm_extension import CONFIGURED, Extension
from rlcli.rollout.vllm.vllm_arguments import PLAIN
from rlcli.support.json_link import Link, Refused, ServerFault

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlcli.model.weight_check.checksum import TensorChecksum
    from rlcli.model.weight_check.engine_weights import Verified

T = TypeVar("T")

GENERATE = "/inference/v1/generate"
START = (
    "start it with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --logprobs-mode processed_logprobs and "
    "--worker-extension-cls rlcli.rollout.servers.vllm_extension.Extension"
)


class VllmServer:
    """A `ServerKind`."""

    kind = "vllm"

    def __init__(self, link: Link, spec: EngineSpec) -> None:
        self._link, self._spec = link, spec
        self._draws_by_counter = self._draws_by_position = False

    @staticmethod
    async def is_there(link: Link) -> bool:
        try:
            return "version" in await link.get("/version", ATTACH_S)
        except (Refused, TypeError):
            return False

    async def attach(self) -> None:
        url = self._link.url
        models = await self._link.get("/v1/models", ATTACH_S)
        try:
            longest = models["data"][0].get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._link.out_of_protocol("/v1/models", models) from None
        if longest is not None and longest < self._spec.max_length:
            raise Refused(
                f"{url} serves sequences of {longest} tokens, the run needs {self._spec.max_length}: start it with "
                f"--max-model-len {self._spec.max_length}"
            )
        try:
            ranks = await self._call(Extension.rlcli_attach, ATTACH_S)
        except ServerFault as error:
            raise Refused(f"{url} has no methods of rlcli in its workers ({error}): {START}") from None
        self._check_model(ranks[0]["configured"])
        self._draws_by_counter = all(rank["by_counter"] for rank in ranks)
        self._draws_by_position = all(rank["by_place"] for rank in ranks)
        try:
            await self.generate(ServerRequest("attach", [0, 0], 1, 1.0, 1.0, 0, "attach"), ATTACH_S)
        except Refused as error:
            raise Refused(f"{error}: {START}") from None

    async def generate(self, ask: ServerRequest, timeout_s: float) -> Answer:
        params: dict[str, object] = {
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "max_tokens": ask.most,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": list(self._spec.stop_token_ids),
            **PLAIN,
            **self._seed(ask),
        }
        if ask.prompt_log_probs:
            params["prompt_logprobs"] = 0
        body = {
            "request_id": ask.name,
            "token_ids": list(ask.tokens),
            "sampling_params": params,
            "cache_salt": ask.salt,
        }
        response = await self._link.post(GENERATE, body, timeout_s)
        try:
            choice = response["choices"][0]
            ids = choice.get("token_ids")
            content = (choice.get("logprobs") or {}).get("content")
            log_probs = None if content is None else [entry["logprob"] for entry in content]
            reason = choice.get("finish_reason")
            details = (response.get("usage") or {}).get("prompt_tokens_details") or {}
            listed = response.get("prompt_logprobs") if ask.prompt_log_probs else None
            prompt_log_probs = (
                [listed[n][str(ask.tokens[n])]["logprob"] for n in range(1, len(ask.tokens))] if listed else []
            )
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._link.out_of_protocol(GENERATE, json.dumps(response)) from None
        if reason == "abort" and ids is None:
            ids, log_probs = [], []
        return checked_answer(
            self._link,
            GENERATE,
            ask,
            self._config.get_text_config().vocab_size,
            ids,
            log_probs if ids else [],
            None if reason == "abort" else reason,
            cached=int(details.get("cached_tokens") or 0),
            prompt_log_probs=prompt_log_probs,
        )

    async def abort(self, names: Sequence[str], timeout_s: float) -> None:
        server_names = [f"generate-tokens-{name}" for name in names]  # as the server calls them
        await self._link.post("/abort_requests", {"request_ids": server_names}, timeout_s)

    async def alive(self, timeout_s: float) -> None:
        if (status := await self._link.status("/health", timeout_s)) != 200:
            raise ServerFault(f"{self._link.url} answers {status} to /health")

    async def load(self, folder: str, version: str, timeout_s: float) -> None:
        for rank in await self._call(Extension.rlcli_load, timeout_s, folder):
            if "error" in rank:
                raise Refused(f"{self._link.url} cannot load the weights: {rank['error']}")

    async def verify(self, sent: Mapping[str, TensorChecksum], timeout_s: float) -> Verified:
        from rlcli.model.weight_check.engine_weights import Part, compare

        arguments = {
            name: [tensor.checksum, tensor.numel, str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in sent.items()
        }
        ranks = await self._call(Extension.rlcli_parts, timeout_s, json.dumps(arguments))
        parts = [
            [Part(name, _tuple(elements), numel, checksum) for name, elements, numel, checksum in rank["parts"]]
            for rank in ranks
        ]
        result = compare(sent, parts)
        untouched = sorted({name for rank in ranks for name in rank["untouched"]})
        return result._replace(differences=[*result.differences, *(f"{name} was not sent" for name in untouched)])

    async def sleep(self, timeout_s: float) -> None:
        await self._link.post(f"/sleep?level={2 if self._spec.weights_follow else 1}", {}, timeout_s)

    async def wake(self, tag: str, timeout_s: float) -> None:
        await self._link.post(f"/wake_up?tags={tag}", {}, timeout_s)

    def _seed(self, ask: ServerRequest) -> dict[str, object]:
        """As `VllmEngine` draws, so that a response is the same on any server."""
        if self._draws_by_counter:
            return {"extra_args": {counter_sampling.SEED: ask.seed}}
        if ask.position and not self._draws_by_position:
            return {"seed": int(counter_sampling.draw_keys(np.array([ask.seed]), np.array([ask.position]))[0])}
        return {"seed": ask.seed}

    @cached_property
    def _config(self) -> PreTrainedConfig:
        """Config of the run's model."""
        from rlcli.model.io.model_config import read_config

        return read_config(self._spec.model)

    def _check_model(self, configured: Mapping[str, object]) -> None:
        config = self._config
        text = config.get_text_config()
        for name in CONFIGURED:
            ours, theirs = getattr(config if name == "architectures" else text, name, None), configured.get(name)
            if ours is not None and ours != theirs:
                raise Refused(
                    f"{self._link.url} serves another model: its {name} is {theirs}, that of {self._spec.model} is "
                    f"{ours}"
                )

    async def _call(self, method: Callable[Concatenate[Extension, ...], T], timeout_s: float, *args: str) -> list[T]:
        """Call a method in all its workers."""
        body = {"method": method.__name__, "args": list(args)}
        response = await self._link.post("/collective_rpc", body, timeout_s)
        try:
            ranks = response["results"]
            if not all(isinstance(rank, dict) for rank in ranks) or not ranks:
                raise TypeError
        except (KeyError, TypeError):
            raise self._link.out_of_protocol("/collective_rpc", response) from None
        return list(ranks)


def _tuple(elements: Sequence[object]) -> tuple[object, ...]:
    """Nested lists of JSON as tuples."""
    return tuple(_tuple(element) if isinstance(element, list) else element for element in elements)
