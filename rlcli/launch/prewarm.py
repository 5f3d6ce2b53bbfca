"""Starts Ray and the workers' imports while the driver still reads the model and the prompts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from importlib import import_module

from rlcli.cluster.placement import PlacedActors, Pool, start_actors
from rlcli.cluster.ray_monitor import OnLost, exit_on_loss
from rlcli.cluster.ray_session import cluster_address, local_cluster, policy_pool, ray_session, set_ray_environment
from rlcli.config.schema import RunConfig
from rlcli.errors import RlcliError
from rlcli.support.attempt import REFUSED, is_supervised, leave_ray_behind

CLOSE_S = 20.0
"""Maximum time for a cluster to shut down."""
ALONE_S = 5.0
"""Maximum time for which the driver leaves its interpreter to the thread that starts Ray and the workers."""
SWITCH_S = 0.0005
"""Python's thread switch interval meanwhile: Ray's start waits for many replies, and after each of them for the thread
with the imports to yield."""


class EarlyStart:
    """A local cluster with the policy's workers, started before they are needed.

        with EarlyStart() as early:
            early.begin(config, "cpu")        # until the workers start; a running cluster is joined later, as usual
            ...
            with early.session(config, on_lost):
                group = start_group(Worker, pool, logs, placed=early.take(pool))

    It runs in a separate thread, since Ray's daemons die with the thread that started them. `session` raises the
    errors of that thread. If the run is refused before `session`, the process can exit at once: a supervisor ends what
    has started.

    Most of the start is the workers' imports. They cannot be forked from a process that has imported vLLM meanwhile:
    vLLM imports Ray, whose library reads its job's id from the environment when it is loaded.
    """

    def __init__(self) -> None:
        self._on_lost: OnLost = exit_on_loss
        self._pool: Pool | None = None
        self._placed: Future[PlacedActors] = Future()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._switch_s = 0.0
        self._session = False

    def import_ray(self) -> None:
        """Import Ray in a thread. The driver meanwhile waits for the process that loads the verifiers."""

        def run() -> None:
            with contextlib.suppress(Exception):  # The session imports Ray again, and reports why that fails.
                import_module("ray")

        set_ray_environment()
        threading.Thread(target=run).start()

    def begin(self, config: RunConfig, device: str) -> None:
        """Start the cluster and its workers. Returns when these exist, or could not be started, or after ALONE_S: their
        imports take longest of all, and the driver's next imports would delay them, since one interpreter runs one
        thread at a time."""
        if cluster_address(config.cluster.address):
            return
        set_ray_environment()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._pool = policy_pool(config, device)
        generates = not config.rollout.workers and bool(config.evaluation.data or not config.data.response)
        engine = config.rollout.engine if generates else ""
        self._thread = threading.Thread(target=self._run, args=(self._pool, config.all_workers, engine), daemon=True)
        self._thread.start()
        import rlcli.training.worker.worker  # noqa: F401  The thread needs it once Ray's daemons, now starting, answer.

        wait([self._placed], ALONE_S)

    def __enter__(self) -> EarlyStart:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        if kind is not None and issubclass(kind, RlcliError) and kind.exit_code == REFUSED and self._is_unused:
            # The thread would first wait until Ray has started: seconds in which the user waits for the reason.
            leave_ray_behind()
            return
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            self._thread = None
            sys.setswitchinterval(self._switch_s)

    @contextlib.contextmanager
    def session(self, config: RunConfig, on_lost: OnLost) -> Iterator[None]:
        """Wait for the cluster; it is shut down with the block. on_lost: as for `ray_session`."""
        if self._thread is None:
            with ray_session(config.cluster.address, config.all_workers, on_lost, config.cluster.wait_s):
                yield
            return
        self._on_lost, self._session = on_lost, True
        with self, contextlib.redirect_stdout(sys.stderr):
            self._placed.result()
            sys.setswitchinterval(self._switch_s)
            yield

    def take(self, pool: Pool) -> PlacedActors | None:
        """The workers, at most once, if they exist and belong to this pool."""
        if self._thread is None or pool != self._pool:
            return None
        self._pool = None
        return self._placed.result()

    @property
    def _is_unused(self) -> bool:
        """True if a started cluster is not used, and a supervisor ends the processes that this one leaves behind."""
        return self._thread is not None and not self._session and is_supervised()

    def _run(self, pool: Pool, workers: int, engine: str) -> None:
        try:
            with local_cluster(workers, lambda lost, why: self._on_lost(lost, why)):
                if self._done.is_set():  # Refused or interrupted meanwhile: the caller only waits for the shutdown.
                    return
                from rlcli.training.worker.worker import Worker

                placed = start_actors(Worker, pool)
                for actor in placed.actors:
                    actor.preload.remote(engine)
                self._placed.set_result(placed)
                self._done.wait()
        except BaseException as error:
            if self._placed.done():
                raise
            self._placed.set_exception(error)
