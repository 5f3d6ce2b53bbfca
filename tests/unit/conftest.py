"""How the unit tests run: beside the integration tests, on cores that are busy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No test asserts on time, and neither does hypothesis.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A process group of this process alone, on a port of its own: further groups can be made of it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    from tests.model_fixtures import save_tiny

    return str(save_tiny(tmp_path_factory.mktemp("base")))
