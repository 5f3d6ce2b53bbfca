"""Events of a run in words."""

from __future__ import annotations

from typing import Any

import pytest

from rlcli.runs.event_text import event_text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "started", "time": 1.5, "step": 0, "of": 100}, "step 0 of 100"),
        ({"event": "checkpoint", "step": 50, "path": "checkpoints/step-000050"}, "step 50"),
        ({"event": "evaluated", "step": 5, "headline": "pass@1 50.0%"}, "pass@1 50.0% (step 5)"),
        (
            {"event": "step_skipped", "step": 2, "left_out": {"timeout": 3, "crash": 1}},
            "step 2, left out: timeout 3, crash 1",
        ),
        (
            {
                "event": "startup",
                "engine": {"kv_cache_mb": 12.0},
                "done_after_s": {"ray": 4.123456789, "worker: load": 9.5},
            },
            "engine: kv cache mb 12, done after: ray 4.12, worker: load 9.5",
        ),
        ({"event": "pace", "step_s": 12.345678901, "gain": None, "best": []}, "step 12.3 s"),
        ({"event": "failed", "message": "it broke", "retry": False}, "it broke (retry no)"),
        ({"event": "odd", "values": [1, {"a": 1234.5678}]}, "values 1, a 1,235"),
        ({}, ""),
    ],
)
def test_an_event_has_no_braces_and_no_long_figures(event: dict[str, Any], text: str) -> None:
    assert event_text(event) == text


def test_what_is_shown_elsewhere_is_left_out() -> None:
    event = {"event": "warning", "step": 3, "name": "no_gradient", "text": "all groups are equal"}
    assert event_text(event, without=("step", "name")) == "all groups are equal"
