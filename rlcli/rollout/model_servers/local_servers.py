"""Servers of models on this machine, for commands that verify without Ray."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlcli.cluster.ray_session import resolve_device
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.verifier_checks import check_loaded, key_notes
from rlcli.rollout.model_servers.model_server import ModelServer, ServerPlace
from rlcli.rollout.model_servers.models_to_serve import models_of
from rlcli.support.attempt import group_id
from rlcli.support.served_models import ADDRESSES, KEY, publish

LOOPBACK = "127.0.0.1"


@contextmanager
def serving_here(expressions: Iterable[str], on_note: Callable[[str], None]) -> Iterator[None]:
    """While in the block, serve the models that these verifiers ask for. Raises what `models_of` does, and `RunFailed`
    for a server that does not start."""
    models = models_of(expressions)
    if not models:
        yield
        return
    device, key = resolve_device("auto", ""), secrets.token_urlsafe(24)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlcli-served-")))
        servers: dict[str, list[ModelServer]] = {}
        next_device = 0
        for served, classifies in models.items():
            on_note(f"starting a server of {served.model}")
            for number in range(served.servers):
                visible = range(next_device, next_device := next_device + served.tensor_parallel)
                log = logs / f"{len(servers)}-{number}.log"
                server_place = ServerPlace(device, LOOPBACK, key, log, classifies, tuple(visible), group_id())
                server = ModelServer(served, server_place)
                stack.callback(server.close)
                servers.setdefault(served.model, []).append(server)
        for server in [server for each in servers.values() for server in each]:
            server.wait()
        publish({model: [server.url for server in each] for model, each in servers.items()}, key)
        stack.callback(lambda: [os.environ.pop(name, None) for name in (ADDRESSES, KEY)])
        yield


@contextmanager
def scoring_here(
    expressions: Sequence[str], processes: int | None, deadline_s: float, sandbox: str, on_note: Callable[[str], None]
) -> Iterator[tuple[ScoringPool, str]]:
    """A pool with these verifiers loaded and their models served, and the sandbox's backend; empty if none needs it.
    processes: None for one a core. Raises what `serving_here`, `ScoringPool` and `check_loaded` do."""
    processes = processes or len(os.sched_getaffinity(0))
    with serving_here(expressions, on_note), ScoringPool(processes, deadline_s, expressions, sandbox) as pool:
        backend = check_loaded(pool.loaded, deadline_s, sandbox, "--deadline")
        for note in key_notes(pool.loaded):
            on_note(note)
        yield pool, backend
