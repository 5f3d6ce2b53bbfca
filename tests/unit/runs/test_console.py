from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlcli.runs.run_measure import LOSS
from rlcli.runs.tracking.run_console import SampleText, View
from rlcli.runs.tracking.text.step_figures import duration, figures, phase_shares, sparkline
from rlcli.support.redact import printable

METRICS = {
    "reward/mean": 0.25,
    "response_tokens/mean": 123.4,
    "response_tokens/truncated": 0.125,
    "throughput/rollout_tokens_per_s": 12345.0,
    "throughput/update_tokens_per_s": 678.0,
    "time/step_s": 2.0,
    "update/grad_norm": 0.5,
    "log_prob_check/mean_abs_diff": 1.2e-5,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def plain(clock: Clock) -> View:
    return View(2, Console(file=io.StringIO(), width=40), clock)


@pytest.fixture
def live(clock: Clock) -> Iterator[View]:
    console = Console(file=Terminal(), width=100, height=40, force_terminal=True, _environ={"TERM": "xterm"})
    with View(1, console, clock) as view:
        yield view


def shown(view: View) -> str:
    assert isinstance(view.console.file, io.StringIO)
    return view.console.file.getvalue()


def frame(view: View) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(view.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_output_is_one_line_a_step(plain: View, clock: Clock) -> None:
    plain.start(10, "grpo")
    plain.phase("generate")
    plain.progress(1, 8)
    clock.now += 2
    plain.step(METRICS)
    plain.phase("generate")
    assert shown(plain).splitlines() == [
        "grpo: 10 steps",
        "step 1/10  reward 0.250  length 123 (12% cut)  generate 12,345 tok/s  update 678 tok/s  grad 0.5  "
        "log-prob diff 1.2e-05  2.0 s  0:18 left",
    ]


def test_a_step_with_few_metrics_shows_those(plain: View) -> None:
    plain.start(3, "t")
    plain.step({"reward/mean": float("nan")})
    assert shown(plain).splitlines()[-1] == "step 1/3  reward nan  0:00 left"


def test_the_time_left_follows_recent_steps_without_loading(plain: View, clock: Clock) -> None:
    plain.start(100, "t")
    assert plain.eta_s() is None
    clock.now += 500  # loading
    plain.step({"time/step_s": 3.0})
    assert plain.eta_s() == pytest.approx(99 * 3)
    for _ in range(2, 41):
        clock.now += 5
        plain.step({"time/step_s": 3.0})  # 2 s of each pass between steps
    assert plain.eta_s() == pytest.approx(60 * 5)
    clock.now += 4
    assert plain.eta_s() == pytest.approx(60 * 5 - 4)
    clock.now += 1e6
    assert plain.eta_s() == 0.0


def test_plain_output_is_not_silent_for_long(plain: View, clock: Clock) -> None:
    plain.phase("evaluate")
    for done in range(1, 66):
        clock.now += 1
        plain.progress(done, 65)
    assert shown(plain).splitlines() == [
        "… evaluate 31/65 · 0:34 left",
        "… evaluate 62/65 · 0:03 left",
    ]


def test_plain_output_says_what_may_take_minutes_and_nothing_else(plain: View, clock: Clock) -> None:
    for name in ("check model and data", "start Ray", "start workers", "load model"):
        plain.phase(name)
        clock.now += 1
    clock.now += 60
    plain.phase("sync")  # after a minute of silence
    plain.start(2, "t")
    for phase in ("generate", "plan", "update"):
        plain.phase(phase)
    clock.now += 31
    plain.progress(4, 8)  # the first step takes long
    plain.step(METRICS)
    clock.now += 100
    plain.phase("generate")
    plain.progress(4, 8)  # what later steps take is known
    assert [line.partition("  ")[0] for line in shown(plain).splitlines()] == [
        "… load model",
        "… sync",
        "t: 2 steps",
        "… update 4/8 · 0:31 left",
        "step 1/2",
    ]


def test_a_run_on_given_responses_shows_its_loss(plain: View, live: View) -> None:
    for view in (plain, live):
        view.start(2, "sft", measure=LOSS)
        view.step({"reward/mean": 1.0, "update/policy_loss": 2.5, "time/step_s": 1.0})
    assert shown(plain).splitlines()[-1].startswith("step 1/2  loss 2.500")
    assert "loss 2.500" in frame(live)
    assert "reward" not in shown(plain) + frame(live)


def test_the_live_view_shows_shares_of_time_and_the_last_warnings(live: View) -> None:
    live.start(9, "t")
    live.step({**METRICS, "time/generate_s": 1.0, "time/update_s": 3.0, "time/verify_wait_s": 0.5})
    for name in ("mismatch", "no_gradient", "loss_scale"):
        live.warning(f"warning {name}: \x1b[2J")
    text = frame(live)
    assert "time  update 75% · generate 25%\n" in text
    assert "step 2: warning no_gradient: \\x1b[2J" in text
    assert "warning loss_scale" in text
    assert "warning mismatch" not in text  # it has scrolled by
    assert "warning mismatch" in shown(live)


def test_a_small_terminal_gets_blocks_in_place_of_the_curve(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=60, height=10)
    view = View(console=console, clock=clock)
    view.start(4, "t")
    for reward in (0.0, 1.0):
        view.step({**METRICS, "reward/mean": reward})
    console.print(view.render())
    assert "reward 1.000 ▁█" in shown(view)


def test_a_run_that_continues_shows_the_steps_before(live: View, clock: Clock) -> None:
    history = [{"reward/mean": step / 10, "time/step_s": 2.0, "time/update_s": 2.0} for step in range(1, 6)]
    live.start(9, "t", done=5, history=history, ended_s=0.5)
    assert "reward 0.500" in frame(live)
    assert live.eta_s() == pytest.approx(4 * 2.0 - 0.5)
    clock.now += 2
    live.step({"reward/mean": 0.6, "time/step_s": 2.0})
    assert "step 6/9" in frame(live)
    live.start(9, "t", done=2, history=history[:2])  # the run went back to a checkpoint
    assert "step 2/9" in frame(live)
    assert "reward 0.200" in frame(live)
    assert live.eta_s() is None


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "response": "4", "score": None, "outcome": None, "messages": None, "turns": None},
        {"prompt": "2+2?", "response": "4", "messages": "{broken", "turns": 1},
        {"prompt": "2+2?", "response": "4", "messages": "[1, 2]"},
    ],
)
def test_a_damaged_or_older_sample_still_shows_its_text(row: dict[str, object]) -> None:
    assert SampleText.of(row).parts() == [("2+2?", False), ("4", True)]


def test_shares_of_time_leave_out_parts_of_phases() -> None:
    assert phase_shares([]) == ""
    assert phase_shares([{"time/sync_s": 1.0, "time/check_s": 9.0}, {"time/sync_s": None}]) == "sync 100%"


def test_samples_are_shown_as_many_as_asked_and_cut_when_long(plain: View) -> None:
    plain.start(1, "t")
    rows = [("2+2?", "four", 1.0, "ok"), ("3+3?", "x" * 2000, 0.5, "wrong"), ("unasked", "y", 0.0, "ok")]
    plain.samples([SampleText(*row) for row in rows])
    text = shown(plain)
    assert "step 0 · score 1 · ok" in text
    assert "2+2?\nfour\n" in text
    assert "score 0.5 · wrong" in text
    assert "… 500 characters more" in text
    assert "unasked" not in text


def test_a_conversation_is_shown_whole_with_what_was_not_drawn_dimmed(live: View) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "an example"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "six"},
        {"role": "assistant", "content": "It is six.", "reasoning_content": "Easy."},
    ]
    sample = SampleText("3+3?", "It is six.", 1.0, "ok", messages, turns=2)
    assert [sampled for _, sampled in sample.parts()] == [False, False, False, True, False, True]
    live.samples([sample])
    text = shown(live)
    dimmed = re.findall(r"\x1b\[2m(.*?)\x1b\[0m", text, re.DOTALL)
    assert dimmed == ["user: 2+2?", "assistant: an example", "user: 3+3?", "tool: six"]
    assert 'assistant: {"name": "add", "arguments": {"a": 1}}' in text
    assert "assistant: Easy.\nIt is six." in text


def test_a_saved_sample_is_a_conversation_only_if_it_was_one() -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    row = {"prompt": "2+2?", "response": "4", "score": 1.0, "outcome": "ok", "messages": json.dumps(messages)}
    assert SampleText.of(row | {"turns": 1, "ended": None}).parts() == [("2+2?", False), ("4", True)]
    held = SampleText.of(row | {"turns": 1, "ended": "done"})
    assert held.parts() == [("user: 2+2?", False), ("assistant: 4", True)]
    assert SampleText.of(row | {"turns": 2, "ended": None}).messages == messages
    older = row | {"messages": None, "turns": 1}
    assert SampleText.of(older).parts() == [("2+2?", False), ("4", True)]


def test_no_samples_are_shown_unasked() -> None:
    view = View(console=Console(file=io.StringIO()))
    view.samples([SampleText("p", "r", 1.0, "ok")])
    assert shown(view) == ""


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_model_text_can_neither_style_nor_steer_the_terminal(kind: str, request: pytest.FixtureRequest) -> None:
    view: View = request.getfixturevalue(kind)
    evil = "[red]bold[/] [/nothing] \x1b[2J\x1b]0;title\x07 a\rb \x9b5A \u202etxt \ud800"
    view.start(1, evil)
    view.phase(evil)
    view.samples([SampleText(evil, evil, 0.0, evil)])
    view.note(evil)
    view.close()
    text = shown(view)
    written = r"[red]bold[/] [/nothing] \x1b[2J\x1b]0;title\x07 a\rb \x9b5A \u202etxt \ud800"
    assert text.count(written) >= 3
    assert written in text
    for character in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e", "\ud800"):
        assert character not in text


@given(st.text())
def test_printable_text_has_no_control_characters_and_else_is_unchanged(text: str) -> None:
    safe = printable(text)
    kinds = {unicodedata.category(character) for character in safe if character not in "\n\t"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert printable(safe) == safe
    assert safe == text or not text.isprintable()


def test_the_live_view_shows_bar_reward_course_speeds_and_phase(live: View, clock: Clock) -> None:
    live.phase("load")
    clock.now += 65
    assert "load  1:05" in frame(live)
    assert "step" not in frame(live)
    live.start(4, "grpo on gsm8k")
    for reward in (0.0, 1.0):
        live.step({**METRICS, "reward/mean": reward})
        clock.now += 2
    live.phase("generate")
    live.progress(3, 8)
    assert "generate  3/8  0:00" in frame(live)
    live.phase("update")
    text = frame(live)
    assert "grpo on gsm8k" in text
    assert "step 2/4" in text
    assert "left" in text
    assert "reward 1.000\n1.00 ┤" in text
    assert "step 2" in text[text.index("└") :]
    assert "length 123 (12% cut)  generate 12,345 tok/s  update 678 tok/s" in text
    assert "update  0:00" in text
    live.note("evaluation: 12%")
    live.close()
    live.close()
    assert "evaluation: 12%" in shown(live)


def test_drawing_while_steps_come_in_does_not_fail(live: View) -> None:
    live.start(2000, "t")
    failures: list[BaseException] = []

    def draw() -> None:
        try:
            while not done.is_set():
                frame(live)
        except BaseException as error:
            failures.append(error)

    done = threading.Event()
    thread = threading.Thread(target=draw)
    thread.start()
    for _ in range(500):
        live.step(METRICS)
    done.set()
    thread.join()
    live.close()
    assert not failures


def test_verifier_failures_are_said_and_absent_ones_are_not() -> None:
    assert figures({"reward/mean": 0.0, "outcome/crash": 0.25, "outcome/timeout": 0.0})[1:] == ["verifier crash 25.0%"]


@given(st.lists(st.floats(width=32), max_size=50))
def test_a_sparkline_has_a_character_a_value(values: list[float]) -> None:
    assert len(sparkline(values)) == len(values)


def test_a_sparkline_rises_with_its_values_and_is_low_when_flat() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([float("nan"), 1.0, 2.0]) == " ▁█"


def test_durations_read_like_a_clock() -> None:
    assert [duration(s) for s in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]


def test_the_view_is_plain_without_a_terminal_even_with_forced_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with View() as view:
        view.start(3, "t")
        view.phase("generate")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "t: 3 steps\n"


PROGRAM = """
import time
from rlcli.runs.tracking.run_console import View
with View() as view:
    view.phase("start Ray")
    view.start(2, "on a terminal")
    view.phase("generate")
    time.sleep(0.6)
    print("data")
    view.step({"reward/mean": 0.5, "time/step_s": 0.6})
    view.note("half way")
    view.step({"reward/mean": 0.75, "time/step_s": 0.6})
"""


def on_a_terminal(env: dict[str, str]) -> tuple[bytes, bytes]:
    """stdout (a pipe) and stderr (a pseudo-terminal) of PROGRAM."""
    parent, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=child, env={**os.environ, **env}
    ) as process:
        os.close(child)
        seen = b""
        try:
            while chunk := os.read(parent, 4096):
                seen += chunk
        except OSError:  # Linux's end of file on a pseudo-terminal
            pass
        assert process.stdout is not None
        stdout = process.stdout.read()
    os.close(parent)
    assert process.returncode == 0, seen
    return stdout, seen


def test_on_a_terminal_the_view_redraws_and_leaves_stdout_to_its_reader() -> None:
    stdout, seen = on_a_terminal({"TERM": "xterm-256color", "COLUMNS": "80"})
    assert stdout == b"data\n"
    assert b"\x1b[?25l" in seen  # hides the cursor …
    assert b"\x1b[?25h" in seen  # … and shows it again
    text = seen.decode()
    assert "generate  0:00" in text
    assert "half way" in text
    assert "step 2/2" in text


def test_a_dumb_terminal_gets_plain_lines() -> None:
    _, seen = on_a_terminal({"TERM": "dumb"})
    assert b"\x1b" not in seen
    assert b"step 2/2  reward 0.750" in seen


@pytest.mark.parametrize("terminal", [False, True])
def test_who_reads_the_view_may_leave_and_the_run_goes_on(terminal: bool) -> None:
    """`rlcli … 2>&1 | tee log`, and Ctrl-C: it asks the run to finish its step, and ends `tee`."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    program = f"input()\n{PROGRAM}print('went on')\nimport os, sys; sys.stdout.flush(); os._exit(0)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer, text=True
    ) as process:
        os.close(writer)
        os.close(reader)
        stdout, _ = process.communicate("\n", timeout=30)
    assert stdout.splitlines() == ["data", "went on"]
    assert process.returncode == 0
