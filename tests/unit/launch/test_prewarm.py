"""Early start of Ray and its workers: handover, failures and end, in one thread. Without Ray."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from rlcli.cluster.placement import PlacedActors
from rlcli.cluster.ray_session import policy_pool
from rlcli.config.schema import RunConfig
from rlcli.errors import ConfigError, RunFailed
from rlcli.launch import prewarm
from rlcli.launch.prewarm import EarlyStart

CONFIG = RunConfig.model_validate({"cluster": {"workers": 2}})


class Cluster:
    """A stand-in for Ray: records the threads that start and end it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.preloads: list[str] = []
        self.failure: Exception | None = None
        self.on_lost: Any = None
        self.preload = self
        self.start_now, self.place_now = threading.Event(), threading.Event()
        self.start_now.set()
        self.place_now.set()

    def remote(self, engine: str) -> None:
        self.preloads.append(engine)

    @contextlib.contextmanager
    def local_cluster(self, workers: int, on_lost: Any) -> Iterator[None]:
        assert self.start_now.wait(30)
        if self.failure:
            raise self.failure
        self.on_lost = on_lost
        self.events.append(("begin", threading.get_ident()))
        try:
            yield
        finally:
            self.events.append(("end", threading.get_ident()))

    def start_actors(self, worker: type, pool: Any) -> PlacedActors:
        assert self.place_now.wait(30)
        return PlacedActors([self] * pool.workers, "places")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    fake = Cluster()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(prewarm, "local_cluster", fake.local_cluster)
    monkeypatch.setattr(prewarm, "start_actors", fake.start_actors)
    monkeypatch.setattr(prewarm, "ALONE_S", 0.0)
    return fake


def fail_run(subject: str, why: str) -> NoReturn:
    raise RunFailed(f"{subject}: {why}")


def test_the_workers_of_the_pool_are_handed_over_once(cluster: Cluster) -> None:
    pool = policy_pool(CONFIG, "cpu")
    with EarlyStart() as start:
        start.begin(CONFIG, "cpu")
        with start.session(CONFIG, fail_run):
            assert start.take(replace(pool, workers=1)) is None, "another pool"
            placed = start.take(pool)
            assert placed is not None
            assert placed.actors == [cluster] * 2
            assert start.take(pool) is None
            assert cluster.preloads == ["vllm", "vllm"]
            with pytest.raises(RunFailed, match="the raylet"):
                cluster.on_lost("the raylet", "died")
            assert [event for event, _ in cluster.events] == ["begin"]
        assert [event for event, _ in cluster.events] == ["begin", "end"], "with the session"
    threads = {thread for _, thread in cluster.events}
    assert len(threads) == 1, "Ray's daemons die with the thread that has started them"
    assert threads != {threading.get_ident()}


def test_the_driver_waits_until_the_workers_import(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prewarm, "ALONE_S", 30.0)
    cluster.place_now.clear()
    threading.Timer(0.2, cluster.place_now.set).start()
    with EarlyStart() as start:
        start.begin(CONFIG, "cpu")
        assert cluster.preloads == ["vllm"] * CONFIG.cluster.workers


def test_a_broken_ray_is_reported_by_the_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, unhandled = threading.Event(), []

    def broken(name: str) -> NoReturn:
        assert name == "ray"
        tried.set()
        raise ImportError("libray.so: no such file")

    monkeypatch.setattr(prewarm, "import_module", broken)
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    others = {*threading.enumerate()}
    EarlyStart().import_ray()
    for thread in {*threading.enumerate()} - others:
        thread.join()
    assert tried.wait(30)
    assert unhandled == []


def test_it_ends_where_the_run_is_refused_meanwhile(cluster: Cluster) -> None:
    cluster.place_now.clear()
    threading.Timer(0.2, cluster.place_now.set).start()
    with EarlyStart() as start:
        start.begin(CONFIG, "cpu")
    assert [event for event, _ in cluster.events] == ["begin", "end"]


def test_no_workers_start_for_a_run_refused_while_ray_started(cluster: Cluster) -> None:
    cluster.start_now.clear()
    threading.Timer(0.2, cluster.start_now.set).start()
    with EarlyStart() as start:
        start.begin(CONFIG, "cpu")
    assert [event for event, _ in cluster.events] == ["begin", "end"]
    assert cluster.preloads == []


def started_then(error: BaseException) -> NoReturn:
    with EarlyStart() as start:
        start.begin(CONFIG, "cpu")
        raise error


def test_a_refused_run_does_not_wait_until_ray_has_started(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    left_running: list[bool] = []
    monkeypatch.setattr(prewarm, "is_supervised", lambda: True)
    monkeypatch.setattr(prewarm, "leave_ray_behind", lambda: left_running.append(True))
    cluster.start_now.clear()  # Ray never starts
    with pytest.raises(ConfigError):
        started_then(ConfigError("no"))
    assert left_running == [True]
    assert cluster.events == []
    cluster.start_now.set()


@pytest.mark.parametrize("error", [RunFailed("gone"), KeyboardInterrupt()])
def test_only_a_refusal_leaves_ray_to_the_supervisor(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(prewarm, "is_supervised", lambda: True)
    with pytest.raises(type(error)):
        started_then(error)
    assert [event for event, _ in cluster.events] == ["begin", "end"]


def test_a_failure_to_start_is_the_sessions(cluster: Cluster) -> None:
    cluster.failure = RunFailed("Ray did not start", retry=True)
    with EarlyStart() as start:
        start.begin(CONFIG, "cpu")
        with pytest.raises(RunFailed, match="Ray did not start"), start.session(CONFIG, fail_run):
            pass


def test_a_cluster_that_runs_already_is_joined_when_it_is_needed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []

    @contextlib.contextmanager
    def session(address: str, workers: int, on_lost: Any, wait_s: float) -> Iterator[None]:
        joined.append(address)
        yield

    monkeypatch.setattr(prewarm, "ray_session", session)
    config = CONFIG.model_copy(update={"cluster": CONFIG.cluster.model_copy(update={"address": "1.2.3.4:6379"})})
    with EarlyStart() as start:
        start.begin(config, "cpu")
        assert (cluster.events, joined) == ([], [])
        with start.session(config, fail_run):
            assert joined == ["1.2.3.4:6379"]
            assert start.take(policy_pool(config, "cpu")) is None


@pytest.mark.parametrize(
    ("sections", "engine"),
    [
        ({}, "vllm"),
        ({"rollout": {"workers": 1}}, ""),
        ({"data": {"response": "answer"}}, ""),
        ({"data": {"response": "answer"}, "evaluation": {"data": "held-out"}}, "vllm"),
    ],
)
def test_only_workers_with_an_engine_load_it(
    cluster: Cluster, sections: dict[str, dict[str, object]], engine: str
) -> None:
    sft_sections = {"algorithm": {"advantage": "one", "correction": "none"}, "rollout": {"samples_per_prompt": 1}}
    config = RunConfig.model_validate(sft_sections | sections if "response" in sections.get("data", {}) else sections)
    with EarlyStart() as start:
        start.begin(config, "cpu")
        with start.session(config, fail_run):
            assert cluster.preloads == [engine] * config.cluster.workers
