"""The supervisor of a run, with small programs for the run: what it passes on, begins again, ends and says."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcli.cluster.supervisor.failure_record import noting_failure
from rlcli.errors import ModelError, RunFailed
from rlcli.runs.folder import add_event, events_of

SUPERVISOR = """
import json, sys
from pathlib import Path
from rlcli.cluster.supervisor.supervise import supervise
from rlcli.errors import RunFailed

folder, first, again = sys.argv[1:]
try:
    sys.exit(supervise(Path(folder), [sys.executable, "-c", first], [sys.executable, "-c", again], patience_s=0.0,
                       grace_s=0.3))
except RunFailed as error:
    print("error:", error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
BEGIN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from rlcli.support.attempt import group_id, is_restart, is_supervised
from rlcli.cluster.supervisor.failure_record import note_failure
from rlcli.runs.folder import add_event
run = Path({folder!r})

def place(step, phase):
    (run / ".place").write_text(json.dumps(dict(step=step, phase=phase, time=time.time(), pid=os.getpid())))

def began(most):
    (run / "config.toml").write_text("[fault_tolerance]\\nmax_restarts = %d\\n" % most)

def say(*words):
    print(*words, flush=True)
"""
SURVIVOR = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""
GO_ON = "say('went on')"


class Run:
    """A supervisor over programs that begin with BEGIN, in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[str] | None = None

    def start(self, first: str, restart: str = GO_ON) -> subprocess.Popen[str]:
        begin = BEGIN.format(folder=str(self.path))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(self.path), begin + first, begin + restart],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("RLCLI_")},
        )
        return self.process

    def line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, expect: int) -> tuple[str, str]:
        assert self.process is not None
        stdout, stderr = self.process.communicate(timeout=30)
        assert self.process.returncode == expect, stdout + stderr
        return stdout, stderr

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in events_of(self.path) if event["event"] == kind]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    supervised_run = Run(tmp_path)
    yield supervised_run
    if supervised_run.process is not None:
        for process in [*psutil.Process().children(recursive=True)]:
            process.kill()
        supervised_run.process.wait()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130])
def test_the_commands_exit_code_is_the_runs_and_restarts_nothing(run: Run, code: int) -> None:
    run.start(f"began(3); say('ran'); from rlcli.cli.app import leave; leave({code})")
    assert run.end(code) == ("ran\n", "")
    assert run.events("restarted") == []


def test_the_run_has_the_terminal_and_the_input_of_the_command(run: Run) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, str(run.path), "print(input(), end='')", ""],
        input="typed", capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert process.stdout == "typed"


def test_a_killed_run_goes_on_from_its_last_checkpoint(run: Run) -> None:
    (run.path / "checkpoints" / "step-000005").mkdir(parents=True)
    (run.path / "checkpoints" / "step-000005" / "manifest.json").touch()
    (run.path / "checkpoints" / ".step-000006.partial").mkdir()
    run.start("began(3); place(7, 'update'); os.kill(os.getpid(), signal.SIGKILL)", "say(is_restart())")
    stdout, stderr = run.end(0)
    assert stdout == "True\n"
    assert stderr == "step 7, update: the driver died of SIGKILL: restart 1 of 3 from step 5\n"
    (failed,), (restarted,) = run.events("failed"), run.events("restarted")
    assert (failed["who"], failed["step"], failed["phase"]) == ("the driver", 7, "update")
    assert failed["signal"] == "SIGKILL"
    assert (restarted["restart"], restarted["of"], restarted["step"]) == (1, 3, 5)


def test_a_driver_that_ray_ends_without_a_word_goes_on(run: Run) -> None:
    """With exit code 1, which no command of rlcli has under a supervisor: no error was reported."""
    run.start("began(3); place(4, 'generate'); os._exit(1)")
    stdout, stderr = run.end(0)
    assert stdout == "went on\n"
    assert stderr == (
        "step 4, generate: the driver exited silently, as Ray does if the raylet is gone: "
        "restart 1 of 3 from the start\n"
    )


def test_who_died_is_told_though_ray_ends_the_driver_before_it_can_leave(run: Run) -> None:
    run.start("began(3); note_failure(run, 'the Ray head', 'the Ray head (raylet) died', retry=True); os._exit(1)")
    assert "the Ray head (raylet) died: restart 1 of 3 from the start" in run.end(0)[1]


def test_a_run_tells_its_supervisor_who_died(run: Run) -> None:
    tell = (
        "note_failure(run, 'worker 1', 'worker 1 died in update; its log r.log ends: Killed', retry=True); sys.exit(75)"
    )
    run.start(f"began(3); place(2, 'update'); {tell}; sys.exit(75)")
    _, stderr = run.end(0)
    assert stderr == (
        "step 2, update: worker 1 died in update; its log r.log ends: Killed: restart 1 of 3 from the start\n"
    )


def test_a_failure_is_recorded_with_who_failed_and_how_to_resume(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(RunFailed("worker 3 ran out of memory", "lower it", retry=True, who="worker 3")))
    with pytest.raises(RunFailed, match=f"; lower it; resume with: .* {tmp_path}$") as raised, noting_failure(tmp_path):
        raise error
    assert (raised.value.retry, raised.value.who) == (True, "worker 3")
    with pytest.raises(ModelError), noting_failure(tmp_path):
        raise ModelError("a worker died in a sentence")
    known = [{name: event[name] for name in ("who", "message", "retry")} for event in events_of(tmp_path)]
    assert known == [
        {"who": "worker 3", "message": "worker 3 ran out of memory", "retry": True},
        {"who": "the run", "message": "a worker died in a sentence", "retry": False},
    ]


def test_a_failure_is_recorded_before_what_is_outside_ends(tmp_path: Path) -> None:
    recorded: list[int] = []
    for error in (
        RunFailed("worker 3 died", "lower it", retry=True, who="worker 3"),
        ModelError("no head"),
        KeyError("x"),
    ):
        outside = contextlib.ExitStack()
        outside.callback(lambda: recorded.append(len(events_of(tmp_path))))
        with pytest.raises(type(error)) as raised, noting_failure(tmp_path), outside, noting_failure(tmp_path):
            raise error
        assert str(raised.value).count("resume with") == isinstance(error, RunFailed)
    assert recorded == [1, 2, 3]
    assert len(events_of(tmp_path)) == 3


def test_a_failure_of_an_earlier_attempt_is_not_told_again(run: Run) -> None:
    tell = "note_failure(run, 'worker 1', 'worker 1 died in update', retry=True); sys.exit(75)"
    run.start(f"began(1); {tell}", "os.kill(os.getpid(), signal.SIGSEGV)")
    _, stderr = run.end(1)
    assert stderr.splitlines()[1].startswith("error: the driver died of SIGSEGV; given up after 1 restarts")


def test_a_lost_cluster_noted_by_another_thread_is_no_reason_to_stop(run: Run) -> None:
    notes = "note_failure(run, 'the Ray head', 'it died', retry=True); note_failure(run, 'the run', 'odd', retry=False)"
    run.start(f"began(3); {notes}; sys.exit(75)")
    assert run.end(0)[0] == "went on\n"


def test_beyond_the_bound_one_message_names_the_dead_and_how_to_resume(run: Run) -> None:
    die = "place(4, 'sync'); note_failure(run, 'w', 'worker 0 died in sync', 'mend it', retry=True); sys.exit(75)"
    run.start(f"began(2); {die}", die)
    _, stderr = run.end(1)
    assert stderr.splitlines()[-1] == (
        "error: step 4, sync: worker 0 died in sync; mend it; given up after 2 restarts without a newer checkpoint "
        f"(fault_tolerance.max_restarts); resume with: rlcli train --resume {run.path}"
    )
    assert len(run.events("failed")) == 3
    assert [event["restart"] for event in run.events("restarted")] == [1, 2]


DIE_AFTER = """
attempt = len(list((run / "checkpoints").glob("attempt-*")))
(run / "checkpoints" / f"attempt-{{attempt}}").mkdir(parents=True)
step = {steps}[attempt]
(run / "checkpoints" / f"step-{{step:06d}}").mkdir(exist_ok=True)
(run / "checkpoints" / f"step-{{step:06d}}" / "manifest.json").touch()
if attempt + 1 < len({steps}):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("checkpoints", "counts", "code"),
    [
        pytest.param([1, 2, 3, 4, 5], [1, 1, 1, 1], 0, id="each attempt gets further"),
        pytest.param([3, 3, 3, 3, 3], [1, 2], 1, id="the same step each time"),
        pytest.param([3, 3, 4, 4, 4, 5], [1, 2, 1, 2], 1, id="twice the same, then further, then no more"),
        pytest.param([5, 4, 5, 6], [1, 2], 1, id="what was reached before is no progress"),
    ],
)
def test_the_restart_budget_is_renewed_by_a_newer_checkpoint(
    run: Run, checkpoints: list[int], counts: list[int], code: int
) -> None:
    program = DIE_AFTER.format(steps=checkpoints)
    run.start("began(2)" + program, program)
    run.end(code)
    assert [event["restart"] for event in run.events("restarted")] == counts


def test_a_death_before_the_run_has_begun_begins_nothing_again(run: Run) -> None:
    """Not even where the folder holds an older run that was to be replaced."""
    (run.path / "config.toml").write_text("[fault_tolerance]\nmax_restarts = 3\n")
    run.start("os.kill(os.getpid(), signal.SIGKILL)")
    _, stderr = run.end(1)
    assert stderr.startswith("error: the driver died of SIGKILL; ")
    assert stderr.endswith("; nothing was done yet\n")
    assert run.events("failed") == []


def test_a_failure_that_would_come_again_is_not_tried_again(run: Run) -> None:
    run.start("began(3); note_failure(run, 'the run', 'no disk', retry=False); os.kill(os.getpid(), signal.SIGKILL)")
    _, stderr = run.end(1)
    assert "error: no disk; resume with: rlcli train --resume" in stderr


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_that_an_attempt_started_lives_when_the_next_begins(run: Run, end: str) -> None:
    nested = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SURVIVOR!r}]).pid, flush=True)"
    start = f"began(3); subprocess.run([sys.executable, '-c', {nested!r}]); time.sleep(0.3)"
    look = "import psutil; say([p.pid for p in psutil.Process(os.getppid()).children() if p.pid != os.getpid()])"
    run.start(f"{start}; {end}", look)
    survivor = int(run.line())
    run.line()
    stdout, _ = run.end(0)
    assert gone(survivor)
    assert stdout == ("" if "exit" in end else "[]\n")


def test_what_was_there_before_the_run_is_left_alone(run: Run) -> None:
    """Where the command has taken the place of a shell that had started something else."""
    begin = BEGIN.format(folder=str(run.path))
    words = [sys.executable, "-c", SUPERVISOR, str(run.path), begin, GO_ON]
    shell = subprocess.run(
        ["sh", "-c", 'sleep 600 >/dev/null 2>&1 & echo $!; exec "$@"', "sh", *words], capture_output=True, timeout=30
    )
    stranger = psutil.Process(int(shell.stdout))
    try:
        assert stranger.is_running()
    finally:
        stranger.kill()


def test_what_a_killed_attempt_put_outside_its_folder_is_removed(run: Run) -> None:
    make_folders = "for root in ('/dev/shm/rlcli-%s-x', '/tmp/rlcli-ray-%s-y'): Path(root % group_id()).mkdir()"
    run.start(f"began(0)\n{make_folders}\nsay(group_id()); os.kill(os.getpid(), signal.SIGKILL)")
    group = run.line()  # they were made, or it would not have come this far
    run.end(1)
    assert not [path for root in ("/dev/shm", "/tmp") for path in Path(root).glob(f"rlcli-*{group}*")]


LISTEN = """
began(3)
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append('TERM'))
signal.signal(signal.SIGINT, lambda *_: heard.append('INT'))
say(os.getpid())
while len(heard) < {count}:
    time.sleep(0.02)
time.sleep(0.2)
say(*heard)
sys.exit({code})
"""


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT")])
def test_a_signal_to_the_supervisor_alone_reaches_the_run_once(run: Run, number: signal.Signals, name: str) -> None:
    process = run.start(LISTEN.format(count=1, code=130))
    run.line()
    process.send_signal(number)
    assert run.end(130) == (f"{name}\n", "")


def test_a_second_signal_is_passed_on_too(run: Run) -> None:
    process = run.start(LISTEN.format(count=2, code=130))
    run.line()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.8)
    process.send_signal(signal.SIGTERM)
    assert run.end(130) == ("TERM TERM\n", "")


def test_a_run_that_was_asked_to_leave_is_not_begun_again(run: Run) -> None:
    process = run.start("began(3); say('up'); time.sleep(600)")
    run.line()
    process.send_signal(signal.SIGTERM)
    assert run.end(130) == ("", "")
    assert run.events("restarted") == []


def test_a_failure_after_the_run_was_asked_to_leave_is_told(run: Run) -> None:
    process = run.start(LISTEN.format(count=1, code=75))
    run.line()
    process.send_signal(signal.SIGTERM)
    _, stderr = run.end(1)
    assert stderr.startswith("error: the run failed silently; resume with: rlcli train --resume")


SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if not job:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.argv[1], sys.argv[1:])
while os.WIFSTOPPED(status := os.waitpid(job, os.WUNTRACED)[1]):
    os.tcsetpgrp(0, os.getpgrp())
    print("stopped")
    input()
    os.tcsetpgrp(0, job)
    os.killpg(job, signal.SIGCONT)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def on_a_terminal(run: Run, program: str, *, shell: bool = False) -> tuple[int, int]:
    """The process id of the supervisor, or of its shell, which resumes it at an empty line; and the terminal's
    other end."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        words = [sys.executable, "-c", SUPERVISOR, str(run.path), BEGIN.format(folder=str(run.path)) + program, GO_ON]
        os.execv(sys.executable, [sys.executable, "-c", SHELL, *words] if shell else words)
    return pid, terminal


@pytest.mark.parametrize("shell", [True, False])
def test_ctrl_c_reaches_the_run_once_and_ctrl_z_stops_it_in_a_shell(run: Run, shell: bool) -> None:
    """With `ssh -t host rlcli …` there is none: it would hang for ever."""
    leader, terminal = on_a_terminal(run, LISTEN.format(count=1, code=130), shell=shell)
    try:
        driver = psutil.Process(int(read_until(terminal, lambda text: text.strip().isdecimal() and text[-1] == "\n")))
        os.write(terminal, b"\x1a")
        if shell:
            read_until(terminal, lambda text: "stopped" in text)
            until(lambda: driver.status() == psutil.STATUS_STOPPED)  # a signal reaches a process when that next runs
            os.write(terminal, b"\n")
        else:
            time.sleep(0.3)
        until(lambda: driver.status() != psutil.STATUS_STOPPED)
        os.write(terminal, b"\x03")
        shown = read_until(terminal, lambda text: "INT" in text and text.endswith("\n"))
        assert shown.count("INT") == 1
        assert os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]) == 130
    finally:
        os.close(terminal)


def test_a_background_start_takes_an_early_signal(run: Run) -> None:
    """Its shell has it ignore SIGINT."""
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = run.start("began(3); say('up'); time.sleep(20); say('went on')")
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    run.line()
    process.send_signal(signal.SIGINT)
    stdout, _ = run.end(130)
    assert stdout == ""


def test_a_signal_to_the_group_reaches_the_run_once_and_no_daemon(run: Run) -> None:
    """As `timeout` sends it."""
    daemon = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    listen = LISTEN.replace("sys.exit", "say(daemon.poll()); sys.exit").format(count=1, code=130)
    process = run.start(f"daemon = {daemon}\n{listen}")
    run.line()
    os.killpg(process.pid, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert run.end(130) == ("TERM\nNone\n", "")


def test_the_run_outlives_its_terminal_to_save(run: Run) -> None:
    """Its later output is discarded, and does not make it fail."""
    program = """
from rlcli.cluster.supervisor.stop_signals import StopOnSignal
with StopOnSignal(lambda: say('asked')) as stop:
    stop.armed = True
    say('up')
    while not stop.requested:
        time.sleep(0.02)
    say('saved')
    (run / 'saved').touch()
"""
    supervisor, terminal = on_a_terminal(run, program)
    read_until(terminal, lambda text: text.endswith("up\r\n"))
    time.sleep(0.1)  # it has returned from writing
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]) == 0
    assert (run.path / "saved").exists()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_until(terminal: int, done: Callable[[str], bool]) -> str:
    text = ""
    while not done(text):
        text += os.read(terminal, 1000).decode()
    return text


def test_a_run_whose_supervisor_is_killed_is_asked_to_leave(run: Run) -> None:
    process = run.start(LISTEN.format(count=1, code=0))
    driver = int(run.line())
    process.kill()
    assert run.line() == "TERM"
    until(lambda: gone(driver))


def test_a_run_whose_supervisor_is_killed_tells_its_end_itself(run: Run) -> None:
    listen = LISTEN.replace("sys.exit({code})", "say(is_supervised())").format(count=1)
    process = run.start(f"say(is_supervised())\n{listen}")
    assert run.line() == "True"
    run.line()
    process.kill()
    run.line()
    assert run.line() == "False"


def test_what_the_run_is_told_is_not_told_to_what_it_starts(run: Run) -> None:
    """Another rlcli would take itself for the attempt, and clear up its files."""
    nested = "from rlcli.support.attempt import group_id, is_supervised; print(is_supervised(), group_id())"
    run.start(f"say(group_id()); subprocess.run([sys.executable, '-c', {nested!r}])")
    stdout, _ = run.end(0)
    supervisor_id, supervised, others = stdout.split()
    assert supervised == "False"
    assert supervisor_id != others


def test_a_finished_run_is_finished_whatever_its_libraries_do_at_exit(run: Run) -> None:
    hang = "import threading; threading.Thread(target=time.sleep, args=(60,)).start()"
    clear_up = "import atexit; atexit.register(say, 'cleared up')"
    run.start(f"began(3); {hang}; {clear_up}; from rlcli.cli.app import leave; print('done'); leave(0)")
    assert run.end(0) == ("done\ncleared up\n", "")


def test_what_a_refused_run_has_started_is_ended_at_once(tmp_path: Path) -> None:
    orphan = f"subprocess.Popen([sys.executable, '-c', {SURVIVOR!r}], stdout=subprocess.PIPE, text=True)"
    first = BEGIN.format(folder=str(tmp_path)) + f"say({orphan}.stdout.readline().strip()); os._exit(2)"
    process = subprocess.run(
        [sys.executable, "-c", SUPERVISOR.replace("grace_s=0.3", "grace_s=600.0"), str(tmp_path), first, ""],
        stdout=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode == 2
    assert gone(int(process.stdout))


def test_exit_hooks_of_libraries_do_not_hold_a_run_that_leaves_ray(run: Run) -> None:
    hang = "import atexit; atexit.register(time.sleep, 600)"
    own_hook = "from rlcli.support.attempt import at_exit, leave_ray_behind; at_exit(lambda: say('cleared up'))"
    run.start(f"{hang}; {own_hook}; leave_ray_behind(); from rlcli.cli.app import leave; leave(2)")
    assert run.end(2) == ("cleared up\n", "")


def test_a_run_that_does_not_leave_when_asked_twice_is_killed(tmp_path: Path) -> None:
    code = SUPERVISOR.replace(
        "folder, first", "import rlcli.cluster.supervisor.subreaper as c; c.LEAVE_S = 0.5\nfolder, first"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), SURVIVOR.replace("os.setsid()", ""), ""],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    driver = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    time.sleep(0.8)
    assert not gone(driver)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 130
    assert gone(driver)
    process.stdout.close()


@pytest.mark.parametrize(
    ("words", "fixed"),
    [
        (["train", "grpo", "--steps", "3"], ["train", "--out", "runs/grpo-1", "grpo", "--steps", "3"]),
        (["--debug", "train", "grpo"], ["train", "--out", "runs/grpo-1", "grpo", "--debug"]),
        (["train", "grpo", "--out", "x"], ["train", "grpo", "--out", "x"]),
        (["train", "--resume", "x"], ["train", "--resume", "x"]),
        (["runs", "resume", "x", "--steps", "9"], ["runs", "resume", "x", "--steps", "9"]),
    ],
)
def test_the_run_folder_is_fixed_before_the_first_attempt(
    words: list[str], fixed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcli.cli import main, supervised

    calls: list[tuple[Any, ...]] = []

    def note(*args: Any, **kwargs: Any) -> int:
        calls.append((*args, kwargs))
        return 0

    monkeypatch.setattr(supervised, "supervise", note)
    monkeypatch.setattr(sys, "argv", ["rlcli", *words])
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    Path("x/config.toml").touch()
    assert main.main() == 0
    ((folder, first, restart_words, kwargs),) = calls
    assert first[4:] == fixed
    assert kwargs == {"resumes": "--resume" in words or "resume" in words}
    # What is changed on going on may not have reached the folder when the first attempt dies.
    assert restart_words[4:7] == (fixed if kwargs["resumes"] else ["train", "--resume", str(folder)])[:3]
    assert restart_words == first or not kwargs["resumes"]
    assert ("--debug" in restart_words) == ("--debug" in words)


def test_a_restart_accepts_no_further_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcli.cli import main, supervised

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(supervised, "supervise", lambda *args, **_: calls.append(args) or 0)
    monkeypatch.setattr(sys, "argv", ["rlcli", "train", "--resume", "x", "--accept-changes", "--steps", "9"])
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    Path("x/config.toml").touch()
    assert main.main() == 0
    ((_, first, restart_words),) = calls
    assert first[4:] == ["train", "--resume", "x", "--accept-changes", "--steps", "9"]
    assert restart_words[4:] == ["train", "--resume", "x", "--steps", "9"]


@pytest.mark.parametrize(
    "words", [["train", "grpo", "--help"], ["train", "grpo", "--wrong"], ["train"], ["train", "--resume", "no"]]
)
def test_help_and_wrong_lines_start_no_supervisor(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcli.cli import main, supervised

    monkeypatch.setattr(supervised, "supervise", lambda *_, **__: pytest.fail("a supervisor was started"))
    monkeypatch.setattr(sys, "argv", ["rlcli", *words])
    assert main.main() in (0, 2)


def test_a_line_cut_off_by_a_kill_hides_no_event(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "started"}) + '\n{"event": "fai')
    add_event(tmp_path, "failed")
    assert [event["event"] for event in events_of(tmp_path)] == ["started", "failed"]
