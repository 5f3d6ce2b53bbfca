"""Servers of models under Ray, on dedicated devices."""

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

    def __init__(self, rank: int, world: int, served: ServedModel, location: ServerPlace, hub_token: str) -> None:
        import ray

        os.environ[KEY] = location.key  # so that it is known as a secret
        if hub_token:
            os.environ.setdefault("HF_TOKEN", hub_token)
        host = location.host or ray.util.get_node_ip_address()
        log = location.log.with_name(f"{location.log.name}-{rank}.log")
        self._server = ModelServer(served, replace(location, host=host, log=log))

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
    """Running servers."""

    addresses: Mapping[str, tuple[str, ...]]
    """Model → addresses of its servers."""
    key: str = field(repr=False)
    """Key that their requests need."""
    wait: Callable[[], None]
    """Returns when all of them answer."""


@contextmanager
def serving(
    models: Mapping[ServedModel, bool], device: str, logs: Path, *, other_pools: Sequence[Pool], loopback: bool
) -> Iterator[Serving]:
    """Start servers of these models, which load in the background; they end with the block.

    models: model → whether it is a classifier. other_pools: pools that get other devices. loopback: all of the cluster
    is this machine. Raises `SetupError` if there is no room for them.
    """
    key = secrets.token_urlsafe(24) if models else ""
    pools = [pool_of(served, device) for served in models]
    groups: dict[str, WorkerGroup[ServerActor]] = {}
    try:
        placements = reserve(pools, placed_pools=other_pools) if pools else []
        for number, ((served, classifies), pool, held) in enumerate(
            zip(models.items(), pools, placements, strict=True)
        ):
            name = f"served-{number}"
            host = "127.0.0.1" if loopback else ""
            location = ServerPlace(device, host, key, logs.resolve() / name, classifies, group=group_id())
            groups[served.model] = start_group(
                ServerActor,
                pool,
                logs.resolve(),
                served,
                location,
                os.environ.get("HF_TOKEN", ""),
                name=name,
                reservation=held,
            )
        addresses = {model: tuple(group.call(ServerActor.address)) for model, group in groups.items()}

        def wait() -> None:
            for group in groups.values():
                group.call(ServerActor.wait)

        yield Serving(addresses, key, wait)
    finally:
        for group in groups.values():
            group.close()


def pool_of(served: ServedModel, device: str) -> Pool:
    """Placement of the servers of a model."""
    key = f"workers of the served model {served.model}"
    return Pool(
        served.workers, device, 1, workers_key=key, engine_size=served.tensor_parallel, one_actor_per_engine=True
    )
