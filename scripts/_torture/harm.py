"""The torture itself: blows that fall on a run one after another, and what came of each."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psutil
from aims import PHASES, QUIET, STEPS, Aim, Plan
from cluster import Cluster
from processes import is_alive, kill, line_of, marked, victims
from runs import Over, Run, Stuck

POLL_S = 0.002
START_UP_S = 12.0
"""About what a start takes: blows at `start` fall within it."""
NOTHING_DONE = "nothing was done yet"
"""Error of a run that was killed before it had a folder to resume from."""


@dataclass
class Blow:
    """One kill, and the reaction of the run."""

    victim: str
    """Kind of process killed."""
    aimed: str
    """Phase and step of the plan, in words."""
    step: int
    """Step of the run at the kill."""
    phase: str
    """Phase of the run at the kill."""
    driver: int
    """Process id of the driver at the kill."""
    at: float
    """Monotonic time of the kill."""
    outcome: str = ""
    """Reaction of the run, in words."""
    resumed_from: int | None = None
    """Step of the checkpoint from which it resumed."""
    seconds: float | None = None
    """Time until it trained again."""
    orphans: list[str] = field(default_factory=list)
    """Processes that existed before the kill and survived the restart."""
    error_line: str = ""
    """Last error line of a run that stopped."""


@dataclass
class Tortured:
    """A plan carried out."""

    plan: Plan
    """The plan carried out."""
    name: str
    """Name of the run."""
    blows: list[Blow] = field(default_factory=list)
    """Kills in order."""
    problems: list[str] = field(default_factory=list)
    """Violated guarantees, except those that the comparison finds."""
    lost: int | None = None
    """Samples missing in comparison with the reference; None: not compared."""
    differences: list[str] | None = None
    """Differences from the reference; None: not compared."""
    leftovers: list[str] = field(default_factory=list)
    """Entries left in the run's TMPDIR."""
    seconds: float = 0.0
    """Duration of the run."""

    @property
    def missed(self) -> tuple[Aim, ...]:
        """Aims that lie beyond the end of the run, which was faster."""
        return self.plan.aims[len(self.blows) :]


def torture(plan: Plan, run: Run, cluster: Cluster | None) -> Tortured:
    """Start the run and carry out the kills of the plan; returns once it has ended, by itself or because it got
    stuck."""
    result = Tortured(plan, run.out.name)
    began = time.monotonic()
    try:
        _carry_out(result, run, cluster)
        run.until(run.ended, "its end")
        if run.code() != 0:
            result.problems.append(f"it ended with exit code {run.code()}: {run.error_line()}")
    except Over:
        pass
    except Stuck as stuck:
        result.problems.append(str(stuck))
    finally:
        result.problems += [f"left running: {line}" for line in run.orphans()]
        result.problems += [f"left running: {line}" for blow in result.blows for line in blow.orphans]
        run.end()
        result.seconds = time.monotonic() - began
    if result.blows:
        _went_on(run, result.blows[-1])
    return result


def _carry_out(result: Tortured, run: Run, cluster: Cluster | None) -> None:
    aims = result.plan.aims
    run.start()
    for aim, following in zip(aims, (*aims[1:], None), strict=True):
        ready = _await(run, aim, cluster)
        if result.blows:
            _went_on(run, result.blows[-1])
        blow, processes = _strike(run, aim, cluster, ready)
        result.blows.append(blow)
        if aim.victim not in QUIET:
            _follow(run, blow, struck_again=following is not None and following.phase == "start")
        if blow.outcome.startswith("restarted"):
            blow.orphans += [line_of(process)[:120] for process in processes if is_alive(process)]


def _find(run: Run, name: str, cluster: Cluster | None) -> list[psutil.Process]:
    """Whom to kill: one process, but all of a node; nobody where there is none yet."""
    if name == "node":
        assert cluster is not None
        return cluster.machine_of()
    candidates = victims(name, run.mark, run.supervisor)
    return sorted(candidates, key=lambda process: process.pid)[-1:]


def _await(run: Run, aim: Aim, cluster: Cluster | None) -> list[psutil.Process]:
    """Wait until the run is where `aim` points, or just beyond; returns the victim where it was to be seen before."""
    if aim.phase == "start":
        run.until(lambda: run.driver() != 0, "its driver")
        time.sleep(aim.delay * START_UP_S)
        return []
    run.until(lambda: run.place().stepping, "its first step")
    processes = _find(run, aim.victim, cluster)
    run.until(lambda: _reached(run, aim), f"{aim.phase} of step {aim.step}", POLL_S)
    until = time.monotonic() + aim.delay * PHASES[aim.phase]
    run.until(lambda: time.monotonic() > until or run.place().step == STEPS, "the moment", POLL_S)
    return processes


def _reached(run: Run, aim: Aim) -> bool:
    progress = run.place()
    if not progress.pid or progress.step < aim.step:
        return False
    if progress.step > aim.step or aim.phase == "any" or progress.phase == aim.phase:
        return True
    return aim.phase == "checkpoint" and run.writing(aim.step)


def _strike(
    run: Run, aim: Aim, cluster: Cluster | None, processes: list[psutil.Process]
) -> tuple[Blow, list[psutil.Process]]:
    """Kill the victim as soon as there is one; returns the run's processes as they were, too."""
    if not (processes and all(map(is_alive, processes))):
        run.until(lambda: bool(_find(run, aim.victim, cluster)), f"a {aim.victim} to kill", POLL_S)
        processes = _find(run, aim.victim, cluster)
    progress, driver = run.place(), run.driver()
    running = [process for process in marked(run.mark) if process.pid != run.supervisor]
    where = (progress.step, progress.phase) if progress.pid == driver and progress.step else (run.checkpoint(), "start")
    struck = time.monotonic()
    kill(processes)
    if aim.victim == "node" and cluster:
        cluster.replace()
    return Blow(aim.victim, f"{aim.phase} of step {aim.step}", *where, driver, struck), running


def _follow(run: Run, blow: Blow, struck_again: bool) -> None:
    """Wait for what comes of a blow. struck_again: the next one falls while the run starts."""
    if blow.victim == "supervisor":
        run.until(run.ended, "the supervisor's end")
        _by_hand(run, blow, "resumed by hand")
    run.until(lambda: run.ended() or _settled(run, blow, struck_again), f"what comes of killing the {blow.victim}")
    if run.ended() and run.code() != 0:
        blow.error_line = run.error_line()
        if not ("--resume" in blow.error_line or NOTHING_DONE in blow.error_line) or blow.outcome:
            raise Stuck(f"{run.out.name}: exit code {run.code()} after its {blow.victim} was killed: {blow.error_line}")
        _by_hand(run, blow, "stopped with a message, resumed by hand")
        run.until(lambda: _settled(run, blow, struck_again), "its second beginning")
    progress, now = run.place(), run.driver()
    if run.ended() or now == blow.driver:  # in its last moments it needed the victim no more
        blow.outcome = blow.outcome or "went on"
        return
    blow.seconds = round(time.monotonic() - blow.at, 1)
    blow.outcome = blow.outcome or "restarted"
    blow.resumed_from = run.checkpoint() if struck_again else progress.step - 1


def _went_on(run: Run, blow: Blow) -> None:
    """Record the outcome of a kill that was not waited for."""
    blow.outcome = blow.outcome or ("went on" if run.ended() or run.driver() == blow.driver else "restarted")


def _settled(run: Run, blow: Blow, struck_again: bool) -> bool:
    """True once the run has restarted."""
    progress = run.place()
    if progress.pid == blow.driver != 0:
        return False
    if struck_again:
        return run.driver() not in (0, blow.driver)
    return progress.pid != 0 and progress.stepping


def _by_hand(run: Run, blow: Blow, outcome: str) -> None:
    """Resume an ended run, once nothing of it is left; one that had hardly started is started anew."""
    blow.orphans += run.orphans()
    started = (run.out / "config.toml").exists()
    blow.outcome = outcome if started else outcome.replace("resumed", "begun again")
    run.resume() if started else run.start()
