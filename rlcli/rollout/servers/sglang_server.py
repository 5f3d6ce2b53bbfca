"""SGLang's native endpoints. Untested against a live server: only against answers in its documented form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from rlcli.rollout.engine import EngineSpec
from rlcli.rollout.servers.server_protocol import ATTACH_S, Answer, ServerRequest, checked_answer
from rlcli.support.json_link import Link, Refused, ServerFault

if TYPE_CHECKING:
    from rlcli.model.weight_check.checksum import TensorChecksum
    from rlcli.model.weight_check.engine_weights import Verified

GENERATE = "/generate"
SEED_BITS = 31


PLAIN = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Given with each request, since a server may prefer others."""


class SglangServer:
    """A `ServerKind`. A seed counts only if the server infers deterministically. The weights cannot be compared, so
    that only the probe of each sync shows whether it has the right ones."""

    kind = "sglang"

    def __init__(self, link: Link, spec: EngineSpec) -> None:
        self._link, self._spec = link, spec

    @staticmethod
    async def is_there(link: Link) -> bool:
        try:
            return "model_path" in await link.get("/get_model_info", ATTACH_S)
        except (Refused, TypeError):
            return False

    async def attach(self) -> None:
        await self.generate(ServerRequest("attach", [0, 0], 1, 1.0, 1.0, 0, "attach"), ATTACH_S)

    async def generate(self, ask: ServerRequest, timeout_s: float) -> Answer:
        params: dict[str, object] = {
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "max_new_tokens": ask.most,
            "stop_token_ids": list(self._spec.stop_token_ids),
            **PLAIN,
            "sampling_seed": (ask.seed + ask.position) % (1 << SEED_BITS),
        }
        body = {"rid": ask.name, "input_ids": list(ask.tokens), "sampling_params": params, "return_logprob": True}
        if ask.prompt_log_probs:
            body["logprob_start_len"] = 0
        response = await self._link.post(GENERATE, body, timeout_s)
        try:
            meta = response["meta_info"]
            ids, pairs = response.get("output_ids"), meta.get("output_token_logprobs")
            log_probs = None if pairs is None else [pair[0] for pair in pairs]
            reason = (meta.get("finish_reason") or {}).get("type")
            prompt = [pair[0] for pair in meta["input_token_logprobs"][1:]] if ask.prompt_log_probs else []
            cached = int(meta.get("cached_tokens") or 0)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._link.out_of_protocol(GENERATE, json.dumps(response)) from None
        if ids is not None and log_probs is not None and [pair[1] for pair in pairs] != ids:
            raise self._link.out_of_protocol(GENERATE, "its log-probs are of other tokens than its ids")
        reason = None if reason == "abort" else reason
        return checked_answer(
            self._link,
            GENERATE,
            ask,
            self._vocabulary,
            ids,
            log_probs,
            reason,
            cached=cached,
            prompt_log_probs=prompt,
        )

    @cached_property
    def _vocabulary(self) -> int:
        from rlcli.model.io.model_config import read_config

        return int(read_config(self._spec.model).get_text_config().vocab_size)

    async def abort(self, names: Sequence[str], timeout_s: float) -> None:
        for name in names:
            await self._link.post("/abort_request", {"rid": name}, timeout_s)

    async def alive(self, timeout_s: float) -> None:
        if (status := await self._link.status("/health", timeout_s)) != 200:
            raise ServerFault(f"{self._link.url} answers {status} to /health")

    async def load(self, folder: str, version: str, timeout_s: float) -> None:
        """Its prefix cache, which knows no salt, is flushed with it."""
        body = {"model_path": folder, "load_format": "safetensors", "flush_cache": True, "weight_version": version}
        response = await self._link.post("/update_weights_from_disk", body, timeout_s)
        if not isinstance(response, dict) or "success" not in response:
            raise self._link.out_of_protocol("/update_weights_from_disk", response)
        if not response["success"]:
            raise Refused(f"{self._link.url} cannot load the weights: {response.get('message', '')}")

    async def verify(self, sent: Mapping[str, TensorChecksum], timeout_s: float) -> Verified:
        from rlcli.model.weight_check.engine_weights import Verified

        return Verified(0, len(sent), [])

    async def sleep(self, timeout_s: float) -> None:
        await self._link.post("/release_memory_occupation", {}, timeout_s)

    async def wake(self, tag: str, timeout_s: float) -> None:
        await self._link.post("/resume_memory_occupation", {"tags": [tag]}, timeout_s)
