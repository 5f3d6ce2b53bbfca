"""The console view of a run, on stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import nan
from typing import IO, Any, NamedTuple, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from rlcli.data.sample_files import is_conversation
from rlcli.images.image_descriptions import descriptions, worded_last
from rlcli.runs.curve_marks import Mark
from rlcli.runs.run_measure import REWARD, Measure
from rlcli.runs.tracking.plots import reward_curve_text
from rlcli.runs.tracking.text.message_text import message_text, shortened, worded_messages_of
from rlcli.runs.tracking.text.step_figures import RECENT_STEPS, duration, figures, phase_shares, sparkline
from rlcli.support.redact import printable

SPARK_STEPS = 40
ETA_STEPS = 20
SILENCE_S = 30.0
SETTLED_S = 5.0
"""Seconds after which a phase's pace is used to estimate the time left."""
SAMPLE_CHARACTERS = 1500
TITLE_CHARACTERS = 32
ANNOUNCED = ("load model", "wait for the server")
"""Phases that plain output prints: they may take minutes before the first step."""
CURVE_WIDTH, CURVE_HEIGHT, CURVE_ROOM = 72, 6, 20
"""Size of the curve in characters, and the lines of a terminal that has room for it; others get one row of blocks."""
CURVE_STEPS = 2000
"""Most steps in the curve, the last ones."""
SHOWN_WARNINGS = 2

_curve_text = lru_cache(maxsize=1)(reward_curve_text)
"""The view is drawn four times a second, and the curve changes once a step."""


class SampleText(NamedTuple):
    """A sample for people to read."""

    prompt: str
    """The rendered prompt."""
    response: str
    """The policy's response."""
    score: float
    """Reward of the verifier; NaN if unknown."""
    outcome: str
    """Outcome of the verification."""
    messages: Sequence[Mapping[str, Any]] = ()
    """All messages of a conversation, shown in place of prompt and response."""
    turns: int = 1
    """Turns that the policy generated: the last ones of the assistant."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> SampleText:
        """From a saved sample (`rlcli.data.sample_files.sample_row`), also of an older version or a damaged file."""
        prompt, response, outcome = (row.get(name) or "" for name in ("prompt", "response", "outcome"))
        score = row.get("score")
        messages = worded_messages_of(row) if is_conversation(row) else ()
        prompt = worded_last(prompt, descriptions(row.get("images")))
        return cls(prompt, response, nan if score is None else score, outcome, messages, row.get("turns") or 1)

    def parts(self) -> list[tuple[str, bool]]:
        """Its texts in order, each with True if the policy generated it."""
        if not self.messages:
            return [(self.prompt, False), (self.response, True)]
        answers = [index for index, message in enumerate(self.messages) if message.get("role") == "assistant"]
        generated = set(answers[-self.turns :] if self.turns > 0 else ())
        return [(message_text(message), index in generated) for index, message in enumerate(self.messages)]


class View:
    """The view on this process's stderr: live on a terminal, otherwise one line a step.

        with View(show_samples=1) as view:
            view.phase("load model")
            view.start(total_steps=60, title="grpo")
            view.phase("generate")
            view.progress(12, 64)
            view.step({"reward/mean": 0.25, "time/step_s": 3.0})
            view.warning("warning no_gradient: …")
            view.samples([SampleText("2+2?", "4", 1.0, "ok")])

    All text is printed as plain text: no markup, no control characters. console, clock: for tests.
    """

    def __init__(
        self, show_samples: int = 0, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        file = cast(IO[str], SafeStream(sys.stderr)) if sys.stderr else None
        self.console = console or Console(stderr=True, file=file, highlight=False)
        self.show_samples = show_samples
        self._clock = clock
        self._title, self._total, self._done, self._measure = "", 0, 0, REWARD
        self._ends: deque[float] = deque(maxlen=ETA_STEPS + 1)
        # The drawing thread reads these while the run replaces them: whole values, never changed in place.
        self._course: tuple[float, ...] = ()
        self._marks: tuple[Mark, ...] = ()
        self._recent: tuple[Mapping[str, float], ...] = ()
        self._figures: tuple[str, ...] = ()
        self._warnings: tuple[str, ...] = ()
        self._phase, self._since, self._progress = "", clock(), ""
        self._spoke = clock()
        self._stepped = False
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> View:
        # Not `console.is_terminal`: FORCE_COLOR, which many CI systems set, makes that true for a log file.
        if self.console.file.isatty() and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self.render,
                console=self.console,
                refresh_per_second=4,
                redirect_stdout=sys.stdout.isatty(),  # the reader of a pipe wants only the printed results
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal; the last figures stay. May be called again."""
        if self._live is not None:
            self._phase = self._progress = ""
            self._live.stop()
            self._live = None

    def start(
        self,
        total_steps: int,
        title: str,
        done: int = 0,
        measure: Measure = REWARD,
        history: Sequence[Mapping[str, float]] = (),
        ended_s: float = 0.0,
        marks: Sequence[Mark] = (),
    ) -> None:
        """Show the progress of the steps, of which `done` are done. measure: what the curve shows. history: the metrics
        of the steps so far; the last of them ended `ended_s` seconds ago. marks: of the curve."""
        self._done, self._measure = done, measure
        self._total, self._title = total_steps, _ending(printable(title), TITLE_CHARACTERS)
        self._course = tuple(measure.of(line) for line in history[-CURVE_STEPS:])
        self._marks = tuple(Mark(mark.step, printable(mark.text)) for mark in marks)
        self._recent = tuple(history[-RECENT_STEPS:])
        self._figures = tuple(figures(history[-1], measure)) if history else ()
        self._ends.clear()
        if ended_s:
            self._recall(self._clock() - ended_s)
        if self._live is None:
            self._print(f"{self._title}: {total_steps} steps" + (f", {done} of them done" if done else ""))

    def phase(self, name: str, began_s: float = 0.0) -> None:
        """Set the current phase, which began `began_s` seconds ago. Plain output prints it only before the first step,
        if it may take minutes or nothing was printed for a while."""
        self._phase, self._since, self._progress = printable(name), self._clock() - began_s, ""
        waits = self._phase.startswith(ANNOUNCED) or self._silent()
        if self._live is None and not self._stepped and waits:
            self._print(f"… {self._phase}")

    def progress(self, done: int, total: int) -> None:
        """Set the number of the phase's responses that are done. Plain output prints it occasionally: in the first
        step, and in an evaluation, which is outside the steps."""
        spent = self._clock() - self._since
        remaining = (
            f" · {duration(spent / done * (total - done))} left" if 0 < done < total and spent > SETTLED_S else ""
        )
        self._progress = f"{done}/{total}{remaining}"
        waits = not self._stepped or self._phase.startswith("evaluate")
        if self._live is None and waits and self._silent():
            self._print(f"… {self._phase} {self._progress}")

    def step(self, metrics: Mapping[str, float]) -> None:
        """Record the end of a step. Missing metrics are left out."""
        now = self._clock()
        if not self._ends:  # the start of the first step: time before it, such as loading, does not count
            self._ends.append(now - metrics.get("time/step_s", 0.0))
        self._ends.append(now)
        self._done += 1
        self._stepped = True
        self._course = (*self._course, self._measure.of(metrics))[-CURVE_STEPS:]
        self._recent = (*self._recent, metrics)[-RECENT_STEPS:]
        self._figures = tuple(figures(metrics, self._measure))
        if self._live is None:
            took = [f"{metrics['time/step_s']:.1f} s"] if "time/step_s" in metrics else []
            remaining = [f"{duration(self.eta_s() or 0.0)} left"]
            self._print("  ".join([f"step {self._done}/{self._total}", *self._figures, *took, *remaining]))

    def note(self, text: str) -> None:
        """Print a line above the live view."""
        self._print(printable(text))

    def warning(self, text: str, step: int = 0) -> None:
        """Print a warning about the run; the last ones stay in the live view. step: 0 is the current one."""
        step = step or min(self._done + 1, self._total)
        self._warnings = (*self._warnings, f"step {step}: {printable(text)}")
        self._print(printable(text), "yellow")

    def samples(self, samples: Sequence[SampleText]) -> None:
        """Print the first `show_samples` of them; text that the policy did not generate is dimmed."""
        for sample in samples[: self.show_samples]:
            self._print(f"── step {self._done} · score {sample.score:g} · {printable(sample.outcome)}", "bold")
            for text, generated in sample.parts():
                self._print(shortened(text, SAMPLE_CHARACTERS), "" if generated else "dim")

    def eta_s(self) -> float | None:
        """Seconds left, from the pace of the last steps including the time between them; None before the first."""
        if len(self._ends) < 2:
            return None
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(0.0, pace * (self._total - self._done) - (self._clock() - self._ends[-1]))

    def render(self) -> RenderableType:
        """The current live view."""
        lines: list[RenderableType] = []
        if self._total:
            eta_s = self.eta_s()
            bar = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
            bar.add_row(
                Text(self._title, style="bold"),
                ProgressBar(total=self._total, completed=self._done),
                f"step {self._done}/{self._total}" + (f" · {duration(eta_s)} left" if eta_s is not None else ""),
            )
            lines.append(bar)
        if self._figures:
            lines += self._curve(self._course)
            lines.append(Text("  ".join(self._figures[1:]), style="dim"))
        if shares := phase_shares(self._recent):
            lines.append(Text(f"time  {shares}", style="dim", no_wrap=True, overflow="ellipsis"))
        for text in self._warnings[-SHOWN_WARNINGS:]:
            lines.append(Text(text, style="yellow", no_wrap=True, overflow="ellipsis"))
        if self._phase or self._progress:
            now = [self._phase, self._progress, duration(self._clock() - self._since)]
            self._spinner.update(text=Text("  ".join(part for part in now if part)))
            lines.append(self._spinner)
        return Group(*lines)

    def _curve(self, course: tuple[float, ...]) -> list[RenderableType]:
        """The measure, and its course: as a curve where the terminal has room for it."""
        size, now = self.console.size, self._figures[0]
        room = size.height >= CURVE_ROOM and len(course) > 1
        first = self._done - len(course) + 1
        curve = room and _curve_text(course, min(size.width - 1, CURVE_WIDTH), CURVE_HEIGHT, first, self._marks)
        if curve:
            return [Text(now), Text(curve, style="cyan", no_wrap=True, overflow="crop")]
        sparks = sparkline(course[-SPARK_STEPS:])
        return [Text.assemble(now, " ", (sparks, "cyan"), no_wrap=True, overflow="crop")]

    def _recall(self, ended: float) -> None:
        """Set when the last steps ended, from how long each took and when the last one did."""
        ends = [ended]
        for line in reversed(self._recent):
            ends.append(ends[-1] - (line.get("time/step_s") or 0.0))
        self._ends.extend(reversed(ends))

    def _silent(self) -> bool:
        return self._clock() - self._spoke > SILENCE_S

    def _print(self, text: str, style: str = "") -> None:
        self._spoke = self._clock()
        self.console.print(Text(text, style=style), soft_wrap=True)


class SafeStream:
    """Wraps a text file whose reader may exit, as `tee` does on the same Ctrl-C that asks a run to finish its step:
    text that cannot be written is dropped."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError, RuntimeError):  # RuntimeError: from a signal handler during a write
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, RuntimeError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _ending(text: str, length: int) -> str:
    """The end of `text`, since most titles are model paths, whose end is more informative.

    >>> _ending("/home/me/models/tiny", 12)
    '…models/tiny'
    """
    return text if len(text) <= length else "…" + text[1 - length :]
