"""Servers of models under Ray, on devices of their own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.placement import Pool, reserve, start_group
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.rollout.model_servers.model_server import ModelServer, ServerPlace
from rlcli.support.attempt import group_id
from rlcli.support.served_models import KEY, ServedModel


class ServerActor:
    """Holds one server on the devices that Ray gave it. hub_token: the driver's."""

    def __init__(self, rank: int, world: int, served: ServedModel, place: ServerPlace, hub_token: str) -> None:
        import ray

        os.environ[KEY] = place.key  # so that it is known as a secret
        if hub_token:
            os.environ.setdefault("HF_TOKEN", hub_token)
        host = place.host or ray.util.get_node_ip_address()
        log = place.log.with_name(f"{place.log.name}-{rank}.log")
        self._server = ModelServer(served, replace(place, host=host, log=log))

    @dispatch()
    def address(self) -> str:
        return self._server.url

    @dispatch()
    def wait(self) -> None:
        """Wait until the server answers."""
        self._server.wait()

    def close(self) -> None:
        self._server.close()


@dataclass(frozen=True)
class Serving:
    """Servers that run. addresses: by model. wait: returns when all of them answer."""

    addresses: Mapping[str, tuple[str, ...]]
    key: str = field(repr=False)
    wait: Callable[[], None]


@contextmanager
def serving(
    models: Mapping[ServedModel, bool], device: str, logs: Path, *, beside: Sequence[Pool], loopback: bool
) -> Iterator[Serving]:
    """Start servers of these models, which load in the background; they end with the block.

    models: model → whether it is a classifier. beside: pools that get other devices. loopback: all of the cluster is
    this machine. Raises `SetupError` if there is no room for them.
    """
    key = secrets.token_urlsafe(24) if models else ""
    pools = [pool_of(served, device) for served in models]
    groups: dict[str, WorkerGroup[ServerActor]] = {}
    try:
        places = reserve(pools, placed_pools=beside) if pools else []
        for number, ((served, classifies), pool, held) in enumerate(zip(models.items(), pools, places, strict=True)):
            name = f"served-{number}"
            host = "127.0.0.1" if loopback else ""
            place = ServerPlace(device, host, key, logs.resolve() / name, classifies, group=group_id())
            given = (served, place, os.environ.get("HF_TOKEN", ""))
            groups[served.model] = start_group(ServerActor, pool, logs.resolve(), *given, name=name, reservation=held)
        addresses = {model: tuple(group.call(ServerActor.address)) for model, group in groups.items()}

        def wait() -> None:
            for group in groups.values():
                group.call(ServerActor.wait)

        yield Serving(addresses, key, wait)
    finally:
        for group in groups.values():
            group.close()


def pool_of(served: ServedModel, device: str) -> Pool:
    """Where the servers of a model run."""
    key = f"workers of the served model {served.model}"
    return Pool(served.workers, device, 1, key=key, engine=served.tensor_parallel, whole=True)
