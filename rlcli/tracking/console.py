"""The console view of a run, on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from rlcli.data.samples import is_conversation
from rlcli.redact import printable
from rlcli.types import UNVERIFIED

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 40
ETA_STEPS = 20
SILENCE_S = 30.0
SETTLED_S = 5.0
"""Seconds after which a phase's pace is used to estimate the time left."""
SAMPLE_CHARACTERS = 1500
TITLE_CHARACTERS = 32
FIGURES = {
    "throughput/rollout_tokens_per_s": "generate {:,.0f} tok/s",
    "throughput/update_tokens_per_s": "update {:,.0f} tok/s",
    "update/grad_norm": "grad {:.2g}",
    "update/kl": "kl {:.2g}",
    "canary/max_abs_diff": "canary {:.2g}",
}
"""Metric → its text in a step's line."""


class SampleText(NamedTuple):
    """A sample for people to read. messages: all of a conversation, shown in place of prompt and response; turns: how
    many of them the policy drew, which are the last ones of the assistant."""

    prompt: str
    response: str
    score: float
    outcome: str
    messages: Sequence[Mapping[str, Any]] = ()
    turns: int = 1

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> SampleText:
        """Of a saved sample (`rlcli.data.samples.sample_row`)."""
        messages = json.loads(row["messages"] or "[]") if is_conversation(row) else ()
        return cls(row["prompt"], row["response"], row["score"], row["outcome"], messages, row["turns"])

    def parts(self) -> list[tuple[str, bool]]:
        """Its texts in order, and whether the policy drew each."""
        if not self.messages:
            return [(self.prompt, False), (self.response, True)]
        answers = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        drawn = set(answers[-self.turns :])
        return [(message_text(message), place in drawn) for place, message in enumerate(self.messages)]


class View:
    """The view on this process's stderr: live on a terminal, otherwise one line a step.

        with View(show_samples=1) as view:
            view.phase("load model")
            view.start(total_steps=60, title="grpo")
            view.phase("generate")
            view.progress(12, 64)
            view.step({"reward/mean": 0.25, "time/step_s": 3.0})
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
        self._title, self._total, self._done = "", 0, 0
        self._ends: deque[float] = deque(maxlen=ETA_STEPS + 1)
        # The drawing thread reads these while the run replaces them: whole values, never changed in place.
        self._rewards: tuple[float, ...] = ()
        self._figures: tuple[str, ...] = ()
        self._phase, self._since, self._progress = "", clock(), ""
        self._spoke = clock()
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

    def start(self, total_steps: int, title: str, done: int = 0) -> None:
        """The steps begin, or continue after `done` of them."""
        self._done = done
        self._total, self._title = total_steps, _ending(printable(title), TITLE_CHARACTERS)
        if self._live is None:
            self._print(f"{self._title}: {total_steps} steps")

    def phase(self, name: str) -> None:
        """Set the current phase. Plain output prints it until the first step, which can be minutes away."""
        self._phase, self._since, self._progress = printable(name), self._clock(), ""
        if self._live is None and not self._done:
            self._print(f"… {self._phase}")

    def progress(self, done: int, total: int) -> None:
        """Set how many of the phase's responses are done. Plain output prints it occasionally."""
        spent = self._clock() - self._since
        left = f" · {duration(spent / done * (total - done))} left" if 0 < done < total and spent > SETTLED_S else ""
        self._progress = f"{done}/{total}{left}"
        if self._live is None and self._clock() - self._spoke > SILENCE_S:
            self._print(f"… {self._phase} {self._progress}")

    def step(self, metrics: Mapping[str, float]) -> None:
        """Record the end of a step. Missing metrics are left out."""
        now = self._clock()
        if not self._ends:  # the start of the first step: time before it, such as loading, does not count
            self._ends.append(now - metrics.get("time/step_s", 0.0))
        self._ends.append(now)
        self._done += 1
        self._rewards = (*self._rewards, metrics.get("reward/mean", float("nan")))[-SPARK_STEPS:]
        self._figures = tuple(figures(metrics))
        if self._live is None:
            took = [f"{metrics['time/step_s']:.1f} s"] if "time/step_s" in metrics else []
            left = [f"{duration(self.eta_s() or 0.0)} left"]
            self._print("  ".join([f"step {self._done}/{self._total}", *self._figures, *took, *left]))

    def note(self, text: str) -> None:
        """A line for the reader, kept above the live view."""
        self._print(printable(text))

    def samples(self, samples: Sequence[SampleText]) -> None:
        """Print the first `show_samples` of them; what the policy did not draw is dimmed."""
        for sample in samples[: self.show_samples]:
            self._print(f"── step {self._done} · score {sample.score:g} · {printable(sample.outcome)}", "bold")
            for text, drawn in sample.parts():
                self._print(_shortened(text), "" if drawn else "dim")

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
            left = self.eta_s()
            bar = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
            bar.add_row(
                Text(self._title, style="bold"),
                ProgressBar(total=self._total, completed=self._done),
                f"step {self._done}/{self._total}" + (f" · {duration(left)} left" if left is not None else ""),
            )
            lines.append(bar)
        if self._figures:
            reward, *rest = self._figures
            lines.append(Text.assemble(reward, " ", (sparkline(self._rewards), "cyan"), no_wrap=True, overflow="crop"))
            lines.append(Text("  ".join(rest), style="dim"))
        if self._phase or self._progress:
            now = [self._phase, self._progress, duration(self._clock() - self._since)]
            self._spinner.update(text=Text("  ".join(part for part in now if part)))
            lines.append(self._spinner)
        return Group(*lines)

    def _print(self, text: str, style: str = "") -> None:
        self._spoke = self._clock()
        self.console.print(Text(text, style=style), soft_wrap=True)


class SafeStream:
    """A text file whose reader may exit, as `tee` does on the same Ctrl-C that asks a run to finish its step: text that
    cannot be written is dropped."""

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


def figures(metrics: Mapping[str, float]) -> list[str]:
    """The main metrics of a step, the reward first; missing ones are left out."""
    found = [f"reward {metrics.get('reward/mean', float('nan')):.3f}"]
    if "response_tokens/mean" in metrics:
        cut = metrics.get("response_tokens/truncated", 0.0)
        found.append(f"length {metrics['response_tokens/mean']:.0f}" + (f" ({cut:.0%} cut)" if cut else ""))
    found += [text.format(metrics[key]) for key, text in FIGURES.items() if key in metrics]
    failed = {name: metrics.get(f"outcome/{name}", 0.0) for name in UNVERIFIED}
    return found + [f"verifier {name} {share:.1%}" for name, share in failed.items() if share]


def sparkline(values: Sequence[float]) -> str:
    """One block per value, scaled from minimum to maximum; non-finite values are blank.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((v - low) * scale + 0.5)] if abs(v) < float("inf") else " " for v in values)


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3700)
    ('1:15', '1:01:40')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def message_text(message: Mapping[str, Any]) -> str:
    """A message of a conversation in one text: who speaks, its reasoning, its text and its calls of tools.

    >>> message_text({"role": "tool", "content": "8"})
    'tool: 8'
    """
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    parts = [message.get("reasoning_content") or "", message.get("content") or "", *calls]
    return f"{message['role']}: " + "\n".join(part for part in parts if part)


def _ending(text: str, most: int) -> str:
    """The end of `text`, since most titles are model paths, whose end is more informative.

    >>> _ending("/home/me/models/tiny", 12)
    '…models/tiny'
    """
    return text if len(text) <= most else "…" + text[1 - most :]


def _shortened(text: str) -> str:
    left_out = len(text) - SAMPLE_CHARACTERS
    return printable(text[:SAMPLE_CHARACTERS]) + (f"\n… {left_out} characters more" if left_out > 0 else "")
