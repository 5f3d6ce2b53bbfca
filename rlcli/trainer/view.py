"""What a person sees of a run, on stderr: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 40
ETA_STEPS = 20
SAMPLE_CHARACTERS = 1500

SampleText = tuple[str, str, float, str]
"""prompt, response, score, outcome"""


class View:
    """Plain lines, one a step. `open_view` gives this one or, on a terminal, the live one.

        with open_view(show_samples=1) as view:
            view.start(total_steps=60, title="grpo")
            view.phase("generate")
            view.step({"step": 1, "reward/mean": 0.25, "time/step_s": 3.0})
            view.samples([("2+2?", "4", 1.0, "ok")])

    Whatever text comes in is printed as text: no markup, no control characters.
    """

    def __init__(self, console: Console, show_samples: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.show_samples = show_samples
        self.clock = clock
        self.title = ""
        self.total = 0
        self.done = 0
        self._ends: deque[float] = deque(maxlen=ETA_STEPS + 1)

    def start(self, total_steps: int, title: str) -> None:
        self.total, self.title = total_steps, printable(title)
        self._print(Text(f"{self.title}: {total_steps} steps"))

    def phase(self, name: str) -> None:
        """What the run is doing from now on. Plain output tells it until the first step, which can be minutes away."""
        if not self.done:
            self._print(Text(f"… {printable(name)}"))

    def step(self, metrics: Mapping[str, float]) -> None:
        """A step has ended. Reads `step`, and of the documented metrics those that are there."""
        self._advance(metrics)
        parts = [f"step {self.done}/{self.total}", *figures(metrics)]
        if "time/step_s" in metrics:
            parts.append(f"{metrics['time/step_s']:.1f} s")
        if (left := self.eta_s()) is not None:
            parts.append(f"left {duration(left)}")
        self._print(Text("  ".join(parts)))

    def note(self, text: str) -> None:
        """A line for the reader, kept above the live view."""
        self._print(Text(printable(text)))

    def samples(self, samples: Sequence[SampleText]) -> None:
        """Print the first `show_samples` of them."""
        for prompt, response, score, outcome in samples[: self.show_samples]:
            head = Text(f"── step {self.done} · score {score:g} · {printable(outcome)} ", style="bold")
            self._print(head, Text(_shortened(prompt), style="dim"), Text(_shortened(response)))

    def close(self) -> None:
        """Again is harmless."""

    def eta_s(self) -> float | None:
        """Seconds left by the pace of the last steps and of all that happens between them; None before the first."""
        if len(self._ends) < 2:
            return None
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(0.0, pace * (self.total - self.done) - (self.clock() - self._ends[-1]))

    def _advance(self, metrics: Mapping[str, float]) -> None:
        now = self.clock()
        if not self._ends:  # the start of the first step: what went before, such as loading, is no pace
            self._ends.append(now - metrics.get("time/step_s", 0.0))
        self._ends.append(now)
        self.done = int(metrics.get("step", self.done + 1))

    def _print(self, *lines: Text) -> None:
        for line in lines:
            self.console.print(line, soft_wrap=True)

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LiveView(View):
    """A bar with the time left, the reward and its course, speeds and the phase now, redrawn in place."""

    def __init__(self, console: Console, show_samples: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, show_samples, clock)
        # The drawing thread reads these while a step replaces them: whole values, never changed in place.
        self._rewards: tuple[float, ...] = ()
        self._figures: tuple[str, ...] = ()
        self._phase, self._since = "", clock()
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def start(self, total_steps: int, title: str) -> None:
        self.total, self.title = total_steps, printable(title)
        self._live = Live(
            get_renderable=self.render,
            console=self.console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # a pipe's reader wants what is printed there, not us
        )
        self._live.start()

    def phase(self, name: str) -> None:
        self._phase, self._since = printable(name), self.clock()

    def step(self, metrics: Mapping[str, float]) -> None:
        self._advance(metrics)
        self._rewards = (*self._rewards, metrics.get("reward/mean", float("nan")))[-SPARK_STEPS:]
        self._figures = tuple(figures(metrics))

    def close(self) -> None:
        if self._live is not None:
            self._phase = ""
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        left = self.eta_s()
        bar = Table.grid(padding=(0, 1))
        bar.add_column(no_wrap=True, overflow="ellipsis")
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.expand = True
        bar.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=max(self.total, 1), completed=self.done),
            Text(f"step {self.done}/{self.total}" + (f" · {duration(left)} left" if left is not None else "")),
        )
        lines: list[RenderableType] = [bar]
        if self._figures:
            reward, *rest = self._figures
            lines.append(Text.assemble(reward, " ", (sparkline(self._rewards), "cyan"), no_wrap=True, overflow="crop"))
            lines.append(Text("  ".join(rest), style="dim"))
        if self._phase:
            self._spinner.update(text=Text(f"{self._phase}  {duration(self.clock() - self._since)}"))
            lines.append(self._spinner)
        return Group(*lines)


def open_view(show_samples: int = 0) -> View:
    """The view for this process's stderr."""
    console = Console(stderr=True, highlight=False)
    # Not `console.is_terminal`: FORCE_COLOR, which many a CI sets, makes that true of a log file.
    live = sys.stderr.isatty() and not console.is_dumb_terminal
    return LiveView(console, show_samples) if live else View(console, show_samples)


def figures(metrics: Mapping[str, float]) -> list[str]:
    """What a reader wants of a step's metrics, the reward first; what a step does not have is left out."""
    found = [f"reward {metrics.get('reward/mean', float('nan')):.3f}"]
    if "response_tokens/mean" in metrics:
        cut = metrics.get("response_tokens/truncated", 0.0)
        found.append(f"length {metrics['response_tokens/mean']:.0f}" + (f" ({cut:.0%} cut)" if cut else ""))
    speeds = {
        name: metrics[key]
        for name, key in (
            ("generate", "throughput/rollout_tokens_per_s"),
            ("update", "throughput/update_tokens_per_s"),
        )
        if key in metrics
    }
    found += [f"{name} {speed:,.0f} tok/s" for name, speed in speeds.items()]
    for name, key in (("grad", "update/grad_norm"), ("kl", "update/kl"), ("canary", "canary/max_abs_diff")):
        if key in metrics:
            found.append(f"{name} {metrics[key]:.2g}")
    failed = {name: metrics.get(f"outcome/{name}", 0.0) for name in ("timeout", "crash")}
    return found + [f"verifier {name} {share:.1%}" for name, share in failed.items() if share]


def sparkline(values: Sequence[float]) -> str:
    """A block a value, scaled from the least to the greatest; what is not a number is a blank.

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


def printable(text: str) -> str:
    """`text` with every character that could steer a terminal (escapes, carriage returns, bidirectional overrides, half
    surrogates) written out, line feeds and tabs kept.

    >>> print(printable("\\x1b[31mred"))
    \\x1b[31mred
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _shortened(text: str) -> str:
    left_out = len(text) - SAMPLE_CHARACTERS
    return printable(text if left_out <= 0 else text[:SAMPLE_CHARACTERS]) + (
        f"\n… {left_out} characters more" if left_out > 0 else ""
    )
