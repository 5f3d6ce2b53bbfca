"""Protection against vLLM's changes to its process, and names of the files that it leaves."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

from rlcli.rollout.engine import shared_memory_prefix
from rlcli.support.files import private_folder


def unique_shared_memory_names(group_id: str) -> None:
    """vLLM's CPU tensor parallelism names its shared memory by a constant, so that two jobs on one machine collide."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name

    def unique(communicator: object) -> str:
        return shared_memory_prefix(group_id) + str(original(communicator)).strip("/").replace(":", "-")

    _CPUSHMDistributed.make_group_name = staticmethod(unique)


def sockets_in(folder: Path) -> None:
    """vLLM's workers of one engine communicate through sockets, which it would leave in the temporary folder."""
    private_folder(folder)
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))


@contextlib.contextmanager
def kept(*, threads: bool = False) -> Iterator[None]:
    """vLLM reseeds the global generators and sets LD_PRELOAD, which children would inherit: restore both. threads: also
    the number of torch's threads, which on GPUs it sets to one for the trainer of this process too."""
    import torch

    state, torch_state, preload = random.getstate(), torch.get_rng_state(), os.environ.get("LD_PRELOAD")
    number = torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(state)
        torch.set_rng_state(torch_state)
        if threads:
            torch.set_num_threads(number)
        if preload is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preload


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """`gc.collect` does nothing in the block. vLLM calls it several times while an engine closes, to free memory for
    another one in the same process; each call visits every object of torch and transformers."""
    collect = gc.collect
    gc.collect = lambda *_: 0
    try:
        yield
    finally:
        gc.collect = collect
