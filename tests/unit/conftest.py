"""Settings of the unit tests, which run concurrently with the integration tests on busy cores."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No test asserts on time, and neither does hypothesis.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No unit test measures this machine: plans in this process have the rates of a made-up one."""
    from rlcli_planner.machine import machine_rates

    from tests.planner_settings import RATES

    monkeypatch.setattr(machine_rates, "measure", lambda *_: RATES)
    monkeypatch.setattr(machine_rates, "load", lambda *_: RATES)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A process group of this process alone, on its own port: further groups can be created from it."""
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


@pytest.fixture(scope="session")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that export something, by `save_runs`: to be read, not changed."""
    from tests.export_fixtures import save_runs

    return save_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def forget_algorithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Algorithms that a test registers and imports are removed after it."""
    from rlcli.algorithms import advantages, aggregation, correction, kl, losses, selection
    from rlcli.algorithms.function_registry import load_plugins
    from rlcli.algorithms.losses import selectors

    tables: list[Any] = [kind.get.__self__ for kind in (advantages, aggregation, correction, kl, losses, selection)]
    for table in (*tables, selectors):
        monkeypatch.setattr(table, "_parts", dict(table._parts))
    modules = set(sys.modules)
    load_plugins.cache_clear()
    yield
    load_plugins.cache_clear()
    for name in set(sys.modules) - modules:
        if name == "mine" or name.startswith("rlcli_user_"):
            del sys.modules[name]


@pytest.fixture
def run_of(saved_runs: Path, tmp_path: Path) -> Any:
    """A copy of a run, to do something to."""
    return lambda name: Path(shutil.copytree(saved_runs / name, tmp_path / "runs" / name, symlinks=True))
