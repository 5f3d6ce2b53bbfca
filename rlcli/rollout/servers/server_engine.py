"""Inference servers as an engine: vLLM's own, started by the run or given by URL, and SGLang's by URL."""

from __future__ import annotations

import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar, TypeVar

from rlcli.errors import ConfigError
from rlcli.rollout.engine import EngineSpec, Generation, GenerationRequest, Sampling, shared_memory_prefix
from rlcli.rollout.servers.server_fleet import Fleet, Request, unix_url
from rlcli.rollout.servers.server_protocol import Answer, ServerRequest
from rlcli.rollout.servers.server_record import Record
from rlcli.rollout.servers.weight_folder import fast_folder, write_weights
from rlcli.support.files import private_folder

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rlcli.model.weight_check.checksum import TensorChecksum
    from rlcli.model.weight_check.engine_weights import Verified

T = TypeVar("T")

STEP_S = 0.02
"""Time that a step waits for a response to finish."""


class ServerEngine:
    """The `Engine` on servers: this worker's share of `rollout.servers`, or as many as it starts itself."""

    requires: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[frozenset[str]] = frozenset(
        {f"rollout.{name}" for name in ("quantization", "gpu_memory_utilization", "kv_cache_mb", "enforce_eager")}
    )

    def __init__(self, spec: EngineSpec) -> None:
        import torch.distributed as dist

        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.spec = spec
        self.on_step: Callable[[], None] = lambda: None
        self._sampling = Sampling(temperature=1.0, max_tokens=1)
        self._keys: dict[int, GenerationRequest] = {}
        self._done: SimpleQueue[Generation] = SimpleQueue()
        self._salt, self._asked, self._loads = secrets.token_hex(8), 0, 0
        name = f"{shared_memory_prefix(spec.group_id)}servers-{rank}"
        self._own = private_folder(fast_folder() / name)
        self._folder = Path(spec.servers.folder) / name if spec.servers.folder else self._own
        self._starts = not spec.servers.urls
        addresses: list[tuple[str, Path | None]] = [(url, None) for url in spec.servers.urls[rank::world]]
        if self._starts:
            sockets = [self._own / f"{number}.sock" for number in range(spec.servers.count)]
            addresses = [(unix_url(socket), socket) for socket in sockets]
        self.record = Record(spec.servers.logs, rank, world)
        self._fleet = Fleet(spec, self.record.log_of, self.record.lost)
        try:
            self._fleet.start(addresses)
            if not spec.weights_follow and not self._starts:
                self._fleet.load(spec.model)
        except BaseException:
            self.close()
            raise
        self.record.follow(self._fleet)

    @staticmethod
    def preload() -> None:
        import safetensors.torch

        assert safetensors.torch

    @staticmethod
    def check_beside_trainer(capability: tuple[int, int]) -> None:
        """Servers have separate processes: all GPUs are supported."""

    @property
    def unfinished(self) -> int:
        return len(self._keys)

    @property
    def slots(self) -> int:
        return self.spec.max_concurrent * max(1, self._fleet.ready)

    def begin(self, sampling: Sampling) -> None:
        assert not self.unfinished, "the last generation is not over"
        self._sampling = sampling
        self._fleet.begin()

    def add(self, request: GenerationRequest) -> None:
        self._keys[request.key] = request
        prefix = [] if request.response_prefix is None else request.response_prefix.tolist()
        tokens = [*request.prompt.tolist(), *prefix]
        ask = self._ask(
            tokens,
            most=min(request.limit(self._sampling), self.spec.max_length - len(tokens)),
            temperature=0.0 if request.greedy else self._sampling.temperature,
            top_p=self._sampling.top_p,
            seed=request.seed,
            position=len(prefix),
        )
        key = request.key
        self._fleet.submit(Request(ask, lambda answer: self._done.put(_generation(key, answer)), request.conversation))

    def step(self) -> list[Generation]:
        """Waits a moment for a response to finish: servers generate whether or not this is called."""
        self.on_step()
        self._raise_failure()
        finished: list[Generation] = []
        try:
            finished.append(self._done.get(timeout=STEP_S))
            while True:
                finished.append(self._done.get_nowait())
        except Empty:
            pass
        for generation in finished:
            del self._keys[generation.key]
        return finished

    def abort(self) -> list[Generation]:
        unbegun = self._fleet.abort()
        self._raise_failure()
        aborted: list[Generation] = []
        while not self._done.empty():
            aborted.append(self._done.get())
        answered = {generation.key for generation in aborted}
        aborted += [_generation(key, Answer([], [], None)) for key in self._keys if key not in answered]
        assert len(aborted) == len(self._keys) == len(answered) + len(unbegun), "each is returned once"
        self._keys.clear()
        return aborted

    def agree(self, value: T) -> T:
        return value

    def prompt_log_probs(self, tokens: np.ndarray) -> np.ndarray:
        return self.probe(tokens)[1]

    def cached_tokens(self, prompt: np.ndarray) -> int:
        import numpy as np

        from rlcli.rollout.vllm.vllm_arguments import CPU_BLOCK

        block: list[int] = np.resize(prompt, min(CPU_BLOCK, self.spec.max_length - 2) + 1).tolist()
        return max(answer.cached for answer in self._answers(block))

    def probe(self, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        """Probe all servers: the highest number of cached tokens, and the log-probs of the server that differs most
        from the mean of all, so that the worst is compared with the trainer."""
        import numpy as np

        cached = self.cached_tokens(tokens)
        answers = self._answers(tokens.tolist(), prompt_log_probs=True)
        log_probs = np.asarray([answer.prompt_log_probs for answer in answers], np.float32)
        distance = np.abs(log_probs - log_probs.mean(0)).max(-1)
        worst: np.ndarray = log_probs[int(distance.argmax())]
        return cached, worst

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert not self.unfinished, "weights change between generations"
        self._loads += 1
        folder, last = self._folder / f"weights-{self._loads}", self._folder / f"weights-{self._loads - 1}"
        write_weights(weights, folder)
        self._fleet.load(str(folder))
        shutil.rmtree(last, ignore_errors=True)

    def load_adapter(self, folder: str) -> None:
        raise ConfigError(
            f"rollout.engine = server cannot load the LoRA adapter {folder}",
            "merge it first: rlcli export --merge; or give rollout.engine = vllm",
        )

    def verify(self, sent: Mapping[str, TensorChecksum]) -> Verified:
        """The comparison of the server with the most differences."""
        return max(self._fleet.verify(sent), key=lambda result: (len(result.differences), result.unchecked))

    def sleep(self) -> None:
        """Only servers that the run has started share its devices."""
        if self._shares:
            self._fleet.on_each(lambda server: server.sleep(self.spec.servers.answer_s))

    def wake_weights(self) -> None:
        self._wake("weights")

    def wake_cache(self) -> None:
        self._wake("kv_cache")

    def counts(self) -> dict[str, float]:
        """Since the last call: servers that are ready now, servers lost, responses that were moved to others."""
        fleet = self._fleet
        counters = {"servers": fleet.ready, "lost": fleet.lost, "moved": fleet.moved}
        fleet.lost = fleet.moved = 0
        return {name: float(value) for name, value in counters.items()}

    def close(self) -> None:
        self.record.close()
        self._fleet.close()
        shutil.rmtree(self._own, ignore_errors=True)
        if self._folder != self._own:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _shares(self) -> bool:
        return self._starts and self.spec.device == "cuda" and self.spec.sleep == "all"

    def _wake(self, tag: str) -> None:
        if self._shares:
            self._fleet.on_each(lambda server: server.wake(tag, self.spec.servers.answer_s))

    def _answers(self, tokens: list[int], *, prompt_log_probs: bool = False) -> list[Answer]:
        ask = self._ask(tokens, most=1, temperature=0.0, prompt_log_probs=prompt_log_probs)
        return self._fleet.on_each(lambda server: server.generate(ask, self.spec.servers.answer_s))

    def _ask(
        self,
        tokens: list[int],
        *,
        most: int,
        temperature: float,
        top_p: float = 1.0,
        seed: int = 0,
        position: int = 0,
        prompt_log_probs: bool = False,
    ) -> ServerRequest:
        self._asked += 1
        return ServerRequest(
            f"{self._salt}-{self._asked}",
            tokens,
            most,
            temperature,
            top_p,
            seed,
            # A version of the weights, of this process: a server may outlive both.
            salt=f"{self._salt}-{self._fleet.version}",
            position=position,
            prompt_log_probs=prompt_log_probs,
        )

    def _raise_failure(self) -> None:
        if not self._fleet.failures.empty():
            raise self._fleet.failures.get()


def share(url: str, engines: int) -> int:
    """Index of the engine that uses a server that joins."""
    return zlib.crc32(url.encode()) % engines


def _generation(key: int, answer: Answer) -> Generation:
    import numpy as np

    ids, log_probs = np.asarray(answer.ids, np.int32), np.asarray(answer.log_probs, np.float32)
    return Generation(key, ids, log_probs, answer.reason)
