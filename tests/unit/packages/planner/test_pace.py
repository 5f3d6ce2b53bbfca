"""The line that a run prints after its first steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlcli_planner.asynchrony.pace_report import STEPS, WARM_UP, PaceReport

from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.training.listener import ListenedRun
from rlcli.types import Outcome, Sample, Verdict

LINE = {"time/step_s": 4.0, "time/generate_s": 3.0, "time/sync_s": 0.5, "time/engine_idle_s": 1.0}
CONFIG = RunConfig.model_validate({"rollout": {"prompts_per_step": 2, "samples_per_prompt": 3}})


def step(tokens: int) -> SampleTable:
    """Two groups of three samples; the second has lost one."""
    return SampleTable.of(
        Sample(group, sample, 0, 0, 4, tokens * (1 + sample), "stop", Verdict(1.0, Outcome.OK), 1)
        for group, samples in ((0, 3), (1, 2))
        for sample in range(samples)
    )


def reports(steps: int, config: RunConfig = CONFIG, planned: Any = lambda: None) -> MagicMock:
    """The reports of a run of so many steps. Its first steps are ten times as long."""
    listened = MagicMock()
    pace = PaceReport(ListenedRun(Path("run"), config, listened.note, listened.warn, listened.event, planned))
    for number in range(1, steps + 1):
        pace.generated(step(10 if number > WARM_UP else 100))
        pace.step(number, {name: value * (1 if number > WARM_UP else 10) for name, value in LINE.items()})
    pace.finish(steps)
    return listened


def test_the_pace_is_told_once_after_twenty_steps() -> None:
    listened = reports(STEPS + 5)
    [note], [event] = listened.note.call_args_list, listened.event.call_args_list
    text = note.args[0]
    assert text.startswith(f"after {STEPS} steps: a step takes 4 s; responses measured: mean 20, longest 30 tokens; ")
    assert event.args == ("pace",)
    assert (event.kwargs["step"], event.kwargs["step_s"]) == (STEPS, 4.0)
    assert event.kwargs["lengths"] == "measured: mean 20, longest 30 tokens"


def test_a_shorter_run_tells_no_pace() -> None:
    assert not reports(STEPS - 1).mock_calls


def test_supervised_steps_are_timed_without_advice() -> None:
    run_config = CONFIG.changed(data={"response": "answer"})
    assert reports(STEPS, run_config).note.call_args.args[0] == f"after {STEPS} steps: a step takes 4 s"


def test_a_failure_to_measure_is_told_and_harms_nothing() -> None:
    planned = MagicMock(side_effect=ValueError("no such device"))
    listened = reports(STEPS, planned=planned)
    [note] = listened.note.call_args_list
    assert "no such device" in note.args[0]
    assert not listened.event.mock_calls


@pytest.mark.parametrize("staleness", [1, 3])
def test_an_asynchronous_run_tells_its_gain(staleness: int) -> None:
    run_config = RunConfig.model_validate(
        {
            "async": {"staleness": staleness},
            "algorithm": {"correction": "token_tis"},
            "rollout": {"workers": 1, "prompts_per_step": 2, "samples_per_prompt": 3},
        }
    )
    assert "× as fast as synchronous ones would be; responses" in reports(STEPS, run_config).note.call_args.args[0]
