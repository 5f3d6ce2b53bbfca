"""Memory that an engine releases while the trainer computes, as decided by a run and shown in its plan."""

from __future__ import annotations

from typing import Any

import pytest
from rlcli_planner.launch import engine_sleep
from rlcli_planner.launch.engine_sleep import with_least_sleep
from rlcli_planner.plan_input import RunPlanInput

from rlcli.launch.prepared_run import Prepared
from tests.contexts import context_of
from tests.planner_settings import qwen_7b, setting


def prepared(target: RunPlanInput, device: str) -> Prepared:
    """A run of which nothing is known but its configuration and its device."""
    unknown: dict[str, Any] = dict.fromkeys(("prompts", "held_out", "parameters"))
    return Prepared(context_of(target.config, device=device), **unknown)


@pytest.mark.parametrize(("gpus", "sleep"), [("8x180GB", "none"), ("8x80GB", "all")])
def test_the_least_that_fits_is_chosen_and_said(gpus: str, sleep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = setting(qwen_7b(), gpus)
    monkeypatch.setattr(engine_sleep, "setting_of_run", lambda run: planned)
    run, rows = with_least_sleep(prepared(planned, "cuda"))
    assert run.config == planned.config.changed(rollout={"sleep": sleep})
    ((name, explanation),) = rows
    assert (name, explanation.partition(":")[0]) == ("engine's sleep", f"rollout.sleep = {sleep}")
    assert explanation.endswith("GiB)")


def test_what_is_set_or_unknown_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = setting(qwen_7b(), "8x180GB")
    explicit, separate = (
        setting(qwen_7b(), "8x180GB", change) for change in ("rollout.sleep=all", "rollout.workers=1")
    )
    for device, known in (("cpu", planned), ("cuda", None), ("cuda", explicit), ("cuda", separate)):
        monkeypatch.setattr(engine_sleep, "setting_of_run", lambda run, known=known: known)
        run = prepared(known or planned, device)
        assert with_least_sleep(run) == (run, [])
    assert run.changed(run.config, device="cpu").config.rollout.sleep == "auto"
