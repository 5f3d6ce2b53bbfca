"""The scoring pool against verifiers that misbehave, with real processes."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from rlcli.errors import UnknownName, VerifierError
from rlcli.rewards.processes import scoring_pool
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.processes.scoring_worker import OVERRAN, ScoringWorker
from rlcli.rewards.processes.verifier_output import LOG_BYTES, TERMINAL_BYTES
from rlcli.rewards.service.shared_rows import SourceCache
from rlcli.rewards.verifier_registry import VERIFIERS
from rlcli.types import Outcome, Verdict, VerifyRequest

DEADLINE_S = 0.5


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("misbehave", "absent"):
            patch.setitem(VERIFIERS._added, name, f"bad_verifiers:{name}")
        yield


@pytest.fixture(scope="module")
def scoring(_registered: None) -> Iterator[ScoringPool]:
    with ScoringPool(2, DEADLINE_S, ["misbehave"]) as pool:
        yield pool


def ask(scoring: ScoringPool, deed: str, ground_truth: str = "") -> Future[Verdict]:
    return scoring.submit("misbehave", VerifyRequest(completion=deed, ground_truth=ground_truth))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(true: Callable[[], object], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_verdict_comes_back_whole(scoring: ScoringPool) -> None:
    verdict = ask(scoring, "right").result()
    assert (verdict.score, verdict.outcome, verdict.answer) == (1.0, Outcome.OK, "right")
    assert verdict.parts == {"length": 5.0}
    assert verdict.latency_s > 0


def test_what_a_verifier_prints_does_not_reach_standard_output(
    scoring: ScoringPool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ask(scoring, "print").result().score == 1.0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("deed", ["hang", "hang in C", "busy child"])
def test_what_uses_up_its_cpu_time_twice_is_wrong(scoring: ScoringPool, deed: str) -> None:
    verdict = ask(scoring, deed).result()
    assert (verdict.score, verdict.outcome) == (0.0, Outcome.WRONG)
    assert verdict.detail == f"{OVERRAN} (more than 0.5 s)"


def test_waiting_uses_no_cpu_time_and_changes_no_verdict() -> None:
    with ScoringPool(1, 0.05, ["misbehave"]) as pool:
        assert ask(pool, "sleep").result().outcome is Outcome.OK


@pytest.mark.long
def test_a_verifier_that_always_sleeps_does_not_hold_the_step() -> None:
    with ScoringPool(1, 0.2, ["misbehave"], wall_s=1.0) as pool:
        verdicts = [ask(pool, deed).result() for deed in ("sleep long", "sleep long", "sleep", "sleep long")]
    assert [verdict.detail for verdict in verdicts] == [
        "killed after 1 s",
        "killed after 0.5 s",
        "",
        "killed after 1 s",
    ]
    assert verdicts[2].outcome == Outcome.OK


def test_what_sleeps_is_ended_by_the_clock_and_not_wrong() -> None:
    with ScoringPool(1, 5.0, ["misbehave"], wall_s=0.3) as pool:
        verdict = ask(pool, "sleep long").result()
    assert (verdict.score, verdict.outcome) == (0.0, Outcome.TIMEOUT)
    assert verdict.detail == "killed after 0.3 s"


@pytest.mark.parametrize("deed", ["sleep long", "hang", "raise", "exit", "memory", "own crash"])
def test_what_fails_once_is_verified_again_in_a_fresh_process(deed: str, tmp_path: Path) -> None:
    with ScoringPool(1, 0.2, ["misbehave"], wall_s=1.0) as pool:
        verdict = ask(pool, f"once:{deed}", str(tmp_path / "pid")).result()
        assert (verdict.score, verdict.outcome) == (1.0, Outcome.OK), verdict
        assert verdict.answer != (tmp_path / "pid").read_text()
        # The process that was asked again is asked on.
        assert ast.literal_eval(ask(pool, "surroundings").result().answer or "")["pid"] == int(verdict.answer or "")


def test_an_overrun_and_a_crash_are_not_two_overruns(tmp_path: Path) -> None:
    with ScoringPool(1, 0.2, ["misbehave"]) as pool:
        assert ask(pool, "hang then raise", str(tmp_path / "asked")).result().outcome is Outcome.CRASH


@pytest.mark.parametrize(
    ("deed", "detail"),
    [
        ("raise", "LookupError: no such thing"),
        ("exit", "exit status 3"),
        ("sys.exit", "SystemExit: 4"),
        ("segfault", "signal 11"),
        ("memory", "MemoryError"),
        ("text", "returned '1.0', expected a Verdict or a number"),
        ("nan", "score is nan"),
        ("infinite part", "speed is inf"),
        ("long", "bytes"),
        ("odd outcome", "splendid"),
    ],
)
def test_a_verifier_that_fails_is_a_crash_with_its_reason(scoring: ScoringPool, deed: str, detail: str) -> None:
    verdict = ask(scoring, deed).result()
    assert (verdict.score, verdict.outcome) == (0.0, Outcome.CRASH)
    assert detail in verdict.detail
    assert ask(scoring, "right").result().outcome is Outcome.OK


@pytest.mark.long
def test_a_storm_of_failures_spares_the_rest() -> None:
    bad = ["hang", *["exit", "segfault", "raise"] * 4] * 6
    with ScoringPool(2, 0.3, ["misbehave"]) as small:
        futures = [(deed, ask(small, deed), ask(small, f"right:{i}")) for i, deed in enumerate(bad)]
        for i, (deed, worse, better) in enumerate(futures):
            assert worse.result().outcome is (Outcome.WRONG if deed == "hang" else Outcome.CRASH)
            assert better.result().answer == f"right:{i}"
        assert ask(small, "right").result().score == 1.0


@pytest.mark.long
def test_a_killed_worker_is_replaced_by_a_fork_that_need_not_import_again() -> None:
    with ScoringPool(1, 5.0, ["math", "misbehave"]) as pool:
        crashes = [ask(pool, "exit") for _ in range(10)]
        assert all(crash.result().outcome is Outcome.CRASH for crash in crashes)
        assert pool.submit("math", VerifyRequest(r"\boxed{\frac{x}{2}}", "0.5x")).result().score == 1.0
        fork_server = psutil.Process(pool._fork_server._process.pid)
        (worker,) = fork_server.children()
        imports, worker_cpu = fork_server.cpu_times(), worker.cpu_times()
        assert worker_cpu.user + worker_cpu.system < (imports.user + imports.system) / 2
        assert ast.literal_eval(ask(pool, "surroundings").result().answer or "")["threads"] == 1


def test_the_deadline_counts_from_the_start_not_from_submit() -> None:
    with ScoringPool(1, 5.0, ["misbehave"], wall_s=1.0) as pool:
        verdicts = [future.result() for future in [ask(pool, "sleep") for _ in range(6)]]
    assert [verdict.outcome for verdict in verdicts] == [Outcome.OK] * 6


def test_a_worker_that_died_idle_costs_nobody_a_verdict() -> None:
    with ScoringPool(1, 5.0, ["misbehave"]) as pool:
        pid = ast.literal_eval(ask(pool, "surroundings").result().answer or "")["pid"]
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: not alive(pid))
        assert ask(pool, "right").result().score == 1.0


def test_a_verifier_that_forks_gives_nobody_anothers_verdict() -> None:
    with ScoringPool(1, DEADLINE_S, ["misbehave"]) as pool:
        futures = [ask(pool, f"fork:{number}") for number in range(8)]
        assert [future.result().answer for future in futures] == [f"fork:{number}" for number in range(8)]


def test_a_verdict_that_says_it_crashed_is_the_whole_sums(scoring: ScoringPool) -> None:
    request = VerifyRequest(completion="own crash", ground_truth="42")
    verdict = scoring.submit("0.1 * format + misbehave", request).result()
    assert (verdict.score, verdict.outcome, verdict.detail) == (0.0, Outcome.CRASH, "the service is down")


def test_a_pool_starts_in_an_owner_with_more_than_1024_open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 1200:
        pytest.skip("no more than 1,024 files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with ScoringPool(1, DEADLINE_S, ["misbehave"]) as many:
            assert ask(many, "right").result().outcome is Outcome.OK
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_children_of_a_killed_verifier_die_with_it(tmp_path: Path) -> None:
    with ScoringPool(1, 5.0, ["misbehave"], wall_s=0.5) as pool:
        assert ask(pool, "child", str(tmp_path / "pid")).result().outcome is Outcome.TIMEOUT
    pid = int((tmp_path / "pid").read_text())
    assert until(lambda: not alive(pid))


def test_unknown_names_are_refused_at_once(scoring: ScoringPool) -> None:
    with pytest.raises(UnknownName, match="did you mean gsm8k"):
        ScoringPool(1, 1.0, ["gsm8"])
    with pytest.raises(UnknownName, match="did you mean gsm8k"):
        scoring.submit("gsm8", VerifyRequest("", ""))


def test_a_verifier_that_does_not_load_is_an_error_not_a_score(scoring: ScoringPool) -> None:
    with pytest.raises(VerifierError, match=r"'absent' .* does not load: AttributeError"):
        ScoringPool(1, 1.0, ["absent"])
    with pytest.raises(VerifierError, match="does not load"):
        scoring.submit("absent", VerifyRequest("", "")).result()
    assert ask(scoring, "right").result().score == 1.0


@pytest.mark.long
def test_a_verifier_not_named_at_the_start_is_loaded_outside_the_deadline() -> None:
    with ScoringPool(2, 0.2) as late:
        verdicts = [late.submit("math", VerifyRequest(r"\boxed{\frac{1}{2}x}", "0.5x")).result() for _ in range(4)]
    assert [verdict.score for verdict in verdicts] == [1.0] * 4


def test_a_pool_whose_processes_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(VerifierError, match="exit status 1"):
        ScoringPool(1, 1.0)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(VerifierError, match="cannot be started"):
        ScoringPool(1, 1.0)


def test_a_broken_pool_gives_errors_not_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScoringPool(2, 1.0, ["misbehave"]) as broken:

        def fails() -> bool:
            future = ask(broken, "right")
            error = future.exception()
            # A worker may still answer before it follows its fork server; then it answers right, never with a zero.
            assert error is not None or future.result().score == 1.0
            return isinstance(error, VerifierError)

        assert not fails()
        monkeypatch.setattr(sys, "executable", "/bin/false")  # so that no other can take its place
        broken._fork_server._process.kill()
        assert until(lambda: all(fails() for _ in range(4)))
        with pytest.raises(VerifierError):
            ask(broken, "right").result()


def test_a_verification_killed_from_outside_is_done_once_more(tmp_path: Path) -> None:
    with ScoringPool(1, 5.0, ["misbehave"]) as pool:
        for times, outcome in ((1, Outcome.OK), (3, Outcome.CRASH)):
            file = tmp_path / f"pid {times}"
            slow = ask(pool, "sleep and say pid", str(file))
            for _ in range(times):
                assert until(file.exists)
                pid = int(file.read_text())
                file.unlink()
                os.kill(pid, signal.SIGKILL)
            verdict = slow.result()
            assert verdict.outcome is outcome, verdict
            assert (verdict.score == 1.0) == (times == 1)
        assert "signal 9" in verdict.detail
        assert ask(pool, "right").result().score == 1.0


@pytest.mark.long
def test_large_test_cases_are_sent_once_to_each_process() -> None:
    cases, responses = "7" * (5 << 20), 512
    with ScoringPool(2, 5.0, ["misbehave"]) as pool:
        futures = [ask(pool, f"right:{number}", cases) for number in range(responses)]
        waiting = [job for line in pool._lines.values() for job in list(line.jobs)]
        assert len({id(job.source) for job in waiting}) <= 1  # one source, however many responses wait
        assert all(len(job.response) < 1000 for job in waiting)
        assert [future.result().answer for future in futures] == [f"right:{number}" for number in range(responses)]
        assert pool.bytes_sent < 2 * len(cases) + 1000 * responses
        # A fresh process holds nothing of it.
        assert ask(pool, "exit", cases).result().outcome is Outcome.CRASH
        assert ask(pool, "right", cases).result().score == 1.0


def test_a_process_forgets_the_sources_that_were_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcli.rewards.processes.scoring_worker.SourceCache", lambda: SourceCache(max_bytes=3000))
    with ScoringPool(1, 5.0, ["gsm8k"]) as pool:

        def sent(number: int) -> int:
            sent_before = pool.bytes_sent
            truth = f"{'x' * 1000} #### {number}"
            assert pool.submit("gsm8k", VerifyRequest(f"#### {number}", truth)).result().score == 1.0
            return int(pool.bytes_sent - sent_before > 1000)

        assert [sent(number) for number in (1, 2, 1, 2, 3, 4, 3, 1, 1)] == [1, 1, 0, 0, 1, 1, 0, 1, 0]


def test_a_verifiers_change_to_a_row_lasts_for_that_verification_alone() -> None:
    with ScoringPool(1, 5.0, ["misbehave"]) as pool:
        info = {"left": [1, 2]}
        futures = [pool.submit("misbehave", VerifyRequest("pop", "", extra_info=info)) for _ in range(3)]
        assert [future.result().answer for future in futures] == ["2"] * 3


def test_what_verifiers_print_goes_to_a_file_of_bounded_size(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "verifiers.log"
    with ScoringPool(1, 20.0, ["misbehave"], log=log) as pool:
        assert ask(pool, "print").result().score == 1.0
        assert until(lambda: log.exists() and log.read_text() == "noise\n")
        assert ask(pool, "flood").result().score == 1.0
    assert until(lambda: "dropped" in log.read_text()[-100:])
    assert log.stat().st_size < LOG_BYTES + 100
    with ScoringPool(1, 20.0, ["misbehave"]) as pool:
        assert ask(pool, "flood").result().score == 1.0
    stdout, err = capfd.readouterr()
    assert stdout == ""
    assert len(err) < 2 * TERMINAL_BYTES
    assert err.endswith("is dropped\n")


def test_a_verifier_that_kills_its_own_process_is_a_crash(scoring: ScoringPool) -> None:
    verdict = ask(scoring, "kill").result()
    assert (verdict.score, verdict.outcome) == (0.0, Outcome.CRASH)
    assert "signal 9" in verdict.detail
    # One that hangs up and lives on is killed by us: that is no reason to do it again.
    verdict = ask(scoring, "hang up").result()
    assert verdict.outcome is Outcome.CRASH


def verifications(pool: ScoringPool, count: int) -> list[Future[Verdict]]:
    """Of several kinds and lengths, in two lines."""

    def one(i: int) -> Future[Verdict]:
        if i % 2:
            return pool.submit("gsm8k", VerifyRequest(f"#### {i}", str(i - i % 3)))
        return ask(pool, "exit" if i % 200 == 100 else "raise" if i % 200 == 10 else f"slow:{i}")

    return [one(i) for i in range(count)]


class Redoing:
    """Records the slots that verify once more, as after a kill from outside. A second kill there may count as a crash,
    so a test that requires that no verdict is lost must not kill them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slots: set[int] = set()
        once, attempted = ScoringWorker._once, dict[int, Any]()

        def spied(worker: ScoringWorker, line: Any, jobs: Any) -> Any:
            if attempted.get(worker.slot) is jobs:
                self.slots.add(worker.slot)
            attempted[worker.slot] = jobs
            try:
                return once(worker, line, jobs)
            finally:
                self.slots.discard(worker.slot)

        monkeypatch.setattr(ScoringWorker, "_once", spied)


@pytest.mark.long
def test_processes_killed_at_random_under_load_cost_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random, kills, redoing = Random(0), Counter[str](), Redoing(monkeypatch)
    with ScoringPool(2, 5.0, ["misbehave", "gsm8k"]) as pool:
        undisturbed = [replace(future.result(), latency_s=0.0) for future in verifications(pool, 1000)]
        futures = verifications(pool, 1000)
        # By our own clock: the system's time of a process's birth is up to a second off.
        seen: dict[int, float] = {}
        while not all(future.done() for future in futures):
            time.sleep(random.uniform(0.0, 0.05))
            with contextlib.suppress(psutil.NoSuchProcess):
                fork_server = psutil.Process(pool._fork_server._process.pid)
                workers = fork_server.children()
                youngest = max(seen.setdefault(worker.pid, time.monotonic()) for worker in [fork_server, *workers])
                if len(workers) == 2 and time.monotonic() - youngest > 0.1 and not redoing.slots:
                    victim, kind = random.choice(
                        [(workers[0], "worker"), (workers[1], "worker"), (fork_server, "fork server")]
                    )
                    victim.kill()
                    kills[kind] += 1
        disturbed = [replace(future.result(), latency_s=0.0) for future in futures]
    assert disturbed == undisturbed
    assert kills["fork server"] >= 2, kills
    assert kills["worker"] >= 4, kills
    assert {verdict.outcome for verdict in undisturbed} == {Outcome.OK, Outcome.WRONG, Outcome.CRASH}


def test_close_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    pool = ScoringPool(1, 60.0, ["misbehave"])
    futures = [ask(pool, "say pid", str(tmp_path / "pid")), ask(pool, "right")]
    assert until((tmp_path / "pid").exists)
    pool.close()
    pool.close()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=1)
    assert not alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(VerifierError, match="closed"):
        ask(pool, "right")


def test_a_cancelled_request_is_skipped() -> None:
    with ScoringPool(1, 5.0, ["misbehave"]) as pool:
        first, second, third = ask(pool, "sleep"), ask(pool, "hang"), ask(pool, "right")
        assert second.cancel()
        assert [first.result().score, third.result().score] == [1.0, 1.0]


def test_many_threads_may_submit(scoring: ScoringPool) -> None:
    answers: list[str | None] = []

    def submit(number: int) -> None:
        answers.extend(ask(scoring, f"right:{number}.{i}").result().answer for i in range(20))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, answers)) == sorted(f"right:{number}.{i}" for number in range(8) for i in range(20))


def test_asyncio_may_await_verdicts(scoring: ScoringPool) -> None:
    async def gather() -> list[Verdict]:
        return await asyncio.gather(*(asyncio.wrap_future(ask(scoring, "right")) for _ in range(10)))

    assert sum(verdict.score for verdict in asyncio.run(gather())) == 10


def test_a_monstrous_completion_keeps_its_end(scoring: ScoringPool) -> None:
    request = VerifyRequest("x" * 2 * scoring_pool.MAX_COMPLETION_CHARS + "\n#### 42", "42")
    assert scoring.submit("gsm8k", request).result().score == 1.0


OWNER = """
import json, os, sys, threading, time
assert os.environ["LD_PRELOAD"]
print("imported", os.getpid(), flush=True)
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.verifier_registry import VERIFIERS
from rlcli.types import VerifyRequest
VERIFIERS.add("misbehave", "bad_verifiers:misbehave")
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
made = []
starter = threading.Thread(target=lambda: made.append(ScoringPool(2, 600.0, ["misbehave"])))
starter.start(); starter.join()  # the thread that starts a pool may end before it
verdict = made[0].submit("misbehave", VerifyRequest("surroundings", "")).result()
print(json.dumps(eval(verdict.answer)), flush=True)
for _ in range(2):
    made[0].submit("misbehave", VerifyRequest("say pid", sys.argv[1]))
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, object], list[int]]]:
    """A program that owns a pool with both workers in an endless loop; what a worker saw; the workers' pids."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = {
        **os.environ,
        "LD_PRELOAD": "libm.so.6",
        "OMP_NUM_THREADS": "7",
        "VLLM_TARGET_DEVICE": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "pids")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"imported {process.pid}\n"
        facts = json.loads(process.stdout.readline())
        pids_file = tmp_path / "pids"
        assert until(lambda: pids_file.exists() and len(pids_file.read_text().split()) == 2)
        yield process, facts, [int(pid) for pid in pids_file.read_text().split()]
    finally:
        process.kill()
        process.communicate()


def test_a_worker_sees_nothing_of_its_owners_process(
    owner: tuple[subprocess.Popen[str], dict[str, object], list[int]],
) -> None:
    _, facts, _ = owner
    facts.pop("pid")
    assert facts == {
        "main": None,
        "preload": None,
        "omp": "1",
        "vllm": [],
        "threads": 1,
        "python_threads": 1,
        "sigint_ignored": True,
        "length": len("surroundings"),
    }


def test_scoring_processes_die_with_an_owner_killed_by_sigkill(
    owner: tuple[subprocess.Popen[str], dict[str, object], list[int]],
) -> None:
    process, _, pids = owner
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    assert len(parents) == 1
    assert all(alive(pid) for pid in [*pids, *parents])
    process.kill()
    assert until(lambda: not any(alive(pid) for pid in [*pids, *parents]))


def test_ctrl_c_in_the_terminal_reaches_the_owner_only(
    owner: tuple[subprocess.Popen[str], dict[str, object], list[int]],
) -> None:
    process, _, pids = owner
    [fork_server] = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    for pid in [fork_server, *pids]:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert all(alive(pid) for pid in [fork_server, *pids, process.pid])


@pytest.mark.long
def test_workers_die_with_a_nursery_killed_by_sigkill(
    owner: tuple[subprocess.Popen[str], dict[str, object], list[int]],
) -> None:
    _, _, pids = owner
    [fork_server] = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    os.kill(fork_server, signal.SIGKILL)
    assert until(lambda: not any(alive(pid) for pid in pids))
