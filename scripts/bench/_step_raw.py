"""The floor of a step: vLLM and a training pass in plain processes, without rlcli."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from _step_work import Workload

from rlcli.cluster.process import malloc

BUDGETS = (1024, 2048, 4096, 8192, 16384)
"""Candidate tokens of a micro-batch; the fastest is used."""


OUT_OF_MEMORY = "out of memory"
"""Reply of a process instead of `done`."""


class OutOfMemory(Exception):
    """A device has too little memory."""


@dataclass(frozen=True)
class RawSpec:
    """One of the processes that share the workload."""

    work: Workload
    """The whole workload."""
    rank: int
    """Index of the process."""
    world: int
    """Number of processes."""
    device: str
    """`cpu` or `cuda`."""
    kv_cache_bytes: int
    """KV cache of its engine."""
    store: str
    """File of the rendezvous."""

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, response tokens) of each sample of this process."""
        return [(p, n) for p in range(self.rank, len(self.work.prompts), self.world) for n in self.work.lengths[p]]


class RawGroup:
    """All processes; a call runs on all of them and returns the seconds of the slowest."""

    def __init__(self, connections: Sequence[Connection], tokens: int) -> None:
        self._connections, self._tokens = connections, tokens

    def generate(self) -> float:
        return self._call("generate")

    def train(self) -> float:
        return self._call("train")

    def tune(self) -> int:
        """Try the sizes of micro-batches, and use the fastest. A size that is far slower in its first call is not
        repeated; sizes beyond one that holds all tokens, or that exceeds the device's memory, are not tried."""
        times: dict[int, float] = {}
        for budget in BUDGETS:
            self._call("budget", budget)
            try:
                seconds = self._call("train")
                if seconds < 1.2 * min(times.values(), default=math.inf):
                    seconds = min(self._call("train") for _ in range(2))
            except OutOfMemory:
                break
            times[budget] = seconds
            if budget >= self._tokens:
                break
        best = min(times, key=times.__getitem__)
        self._call("budget", best)
        return best

    def _call(self, *message: Any) -> float:
        started = time.perf_counter()
        for connection in self._connections:
            connection.send(message)
        answers = [connection.recv() for connection in self._connections]
        if OUT_OF_MEMORY in answers:
            raise OutOfMemory(f"{message[0]}: the device's memory does not suffice")
        return time.perf_counter() - started


@contextmanager
def raw_group(work: Workload, world: int, threads: int, device: str, kv_cache_bytes: int) -> Iterator[RawGroup]:
    """Start the processes; they end with the block."""
    context = multiprocessing.get_context("spawn")
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        environment["TORCH_COMPILE_DISABLE"] = "1"
        # It keeps freed memory, too, in the heap with which it is faster: glibc's, trimmed when it has been tuned.
        environment |= malloc.GLIBC
    previous = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    connections, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                spec = RawSpec(work, rank, world, device, kv_cache_bytes, f"{folder}/store")
                process = context.Process(target=_serve, args=(theirs, spec), daemon=True)
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            for name, value in previous.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            for connection in connections:
                connection.recv()  # ready
            yield RawGroup(connections, math.ceil(work.tokens / world))
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(connection: Connection, spec: RawSpec) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(spec.rank), WORLD_SIZE=str(spec.world), LOCAL_RANK=str(spec.rank))
    backend = "cpu:gloo,cuda:nccl" if spec.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{spec.store}", rank=spec.rank, world_size=spec.world)
    generation, training = _Generation(spec), _Training(spec)
    connection.send("ready")
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            os._exit(0)
        if command == "budget":
            training.pack(*arguments)
            if spec.device == "cpu":  # what larger micro-batches left behind is not the floor's
                ctypes.CDLL(None).malloc_trim(0)
            else:
                torch.cuda.empty_cache()
        else:
            try:
                {"generate": generation.run, "train": training.run}[command]()
            except torch.OutOfMemoryError:
                training.optimizer.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                connection.send(OUT_OF_MEMORY)
                continue
        connection.send("done")


class _Generation:
    """vLLM's own `generate`, with the log-probs that training needs and without seeds, which only cost."""

    def __init__(self, spec: RawSpec) -> None:
        from vllm import LLM, SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        on_cpu = spec.device == "cpu"
        longest = spec.work.prompt_tokens + spec.work.max_tokens
        # Blocks of 32, not 128: only whole blocks of a prompt are shared by its samples.
        cpu_options = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, longest), "block_size": 32}
        self.llm = LLM(
            spec.work.model,
            dtype=spec.work.dtype,
            distributed_executor_backend="external_launcher",
            max_model_len=longest,
            max_num_seqs=256,
            kv_cache_memory_bytes=spec.kv_cache_bytes,
            enforce_eager=on_cpu,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            # Else it would begin only where its whole share of the GPU is free.
            **(cpu_options if on_cpu else {"gpu_memory_utilization": 0.01}),
        )
        self.prompts = [TokensPrompt(prompt_token_ids=list(spec.work.prompts[p].ids)) for p, _ in spec.lengths]
        self.params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for _, tokens in spec.lengths
        ]

    def run(self) -> None:
        self.llm.reset_prefix_cache()
        outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        assert sum(len(item.outputs[0].token_ids) for item in outputs) == sum(item.max_tokens for item in self.params)


class _Training:
    """Forward, backward and AdamW on tokens of those lengths: sequences of like length side by side, so that next to
    nothing is padding and causality alone is the mask; logits of response tokens only.

    In bfloat16 a copy of the weights computes; the weights that AdamW updates, their gradients and its state are
    float32, as in every contestant."""

    def __init__(self, spec: RawSpec) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.spec, self.device = spec, torch.device(spec.device)
        self.model = AutoModelForCausalLM.from_pretrained(
            spec.work.model, dtype=getattr(torch, spec.work.dtype), attn_implementation="sdpa"
        ).to(self.device)
        self.model.train()
        self.computing = list(self.model.parameters())
        self.weights = self.computing
        if spec.work.dtype != "float32":
            self.weights = [parameter.detach().float().requires_grad_() for parameter in self.computing]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-6, weight_decay=0.0, fused=True)
        self.pack(spec.work.micro)

    def pack(self, budget: int) -> None:
        """Micro-batches of at most `budget` tokens: ids `[B, L]`, where a response token is next, and which."""
        import torch

        prompt, generator = self.spec.work.prompt_tokens, torch.Generator().manual_seed(self.spec.rank)
        self.batches = []
        lengths = sorted((n for _, n in self.spec.lengths), reverse=True)
        while lengths:
            rows = lengths[: max(1, budget // (prompt + lengths[0]))]
            lengths = lengths[len(rows) :]
            ids = torch.randint(7, 262, (len(rows), prompt + rows[0]), generator=generator)
            column = torch.arange(prompt + rows[0] - 1)[None]
            next_is_response = (column >= prompt - 1) & (column < prompt - 1 + torch.tensor(rows)[:, None])
            targets = ids[:, 1:][next_is_response]
            advantages = torch.randn(len(targets), generator=generator)
            self.batches.append(
                tuple(x.to(self.device) for x in (ids[:, :-1].contiguous(), next_is_response, targets, advantages))
            )

    def run(self) -> None:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F

        total = self.spec.work.response_tokens
        for ids, where, targets, advantages in self.batches:
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[where])
            log_probs = -F.cross_entropy(logits.float(), targets, reduction="none")
            (-(log_probs * advantages).sum() / total).backward()
            self.add_gradients()
        if self.spec.world > 1:
            grads = [weight.grad for weight in self.weights if weight.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.weights is not self.computing:
            with torch.no_grad():
                for parameter, weight in zip(self.computing, self.weights, strict=True):
                    parameter.copy_(weight)
        if self.spec.device == "cuda":
            torch.cuda.synchronize()

    def add_gradients(self) -> None:
        """Add the gradients of a micro-batch to those of the weights, where another copy computes."""
        if self.weights is self.computing:
            return
        for parameter, weight in zip(self.computing, self.weights, strict=True):
            if parameter.grad is not None:
                weight.grad = parameter.grad.float() if weight.grad is None else weight.grad.add_(parameter.grad)
                parameter.grad = None
