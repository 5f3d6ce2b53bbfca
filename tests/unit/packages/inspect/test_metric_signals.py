"""Signals of metrics.jsonl, and of another verifier."""

from __future__ import annotations

from typing import Any

from rlcli_inspect.signals.metric_signals import metric_signals
from rlcli_inspect.signals.second_verifier import second_verifier_signal
from rlcli_inspect.signals.signal import Signal


def metrics(**ends: tuple[float, float]) -> list[dict[str, Any]]:
    """20 steps in which each metric goes from its first to its last value; its name has __ for /."""
    return [
        {"step": step}
        | {name.replace("__", "/"): first + (last - first) * (step - 1) / 19 for name, (first, last) in ends.items()}
        for step in range(1, 21)
    ]


def found(lines: list[dict[str, Any]]) -> dict[str, Signal]:
    return {signal.name: signal for signal in metric_signals(lines, [])}


def evaluated(lines: list[dict[str, Any]], first: float, last: float) -> list[dict[str, Any]]:
    around = [{"eval/pass@1": value, "eval/pass@1/high": value + 0.03} for value in (first, last)]
    return [{"step": 0} | around[0], *lines[:-1], lines[-1] | around[1]]


def test_an_evaluation_that_stays_behind_the_reward_is_named() -> None:
    lines = metrics(reward__mean=(0.2, 0.8))
    assert found(evaluated(lines, 0.2, 0.25))["evaluation"].state == "warning"
    assert found(evaluated(lines, 0.2, 0.6))["evaluation"].state == "ok"
    assert found(evaluated(metrics(reward__mean=(0.2, 0.25)), 0.2, 0.1))["evaluation"].state == "ok"


def evaluations(lines: list[dict[str, Any]], **by_step: float) -> list[dict[str, Any]]:
    """`lines` with evaluations, each within ± 0.05, after the steps that are named s0, s10 and so on."""
    values = {int(name[1:]): value for name, value in by_step.items()}
    return [
        line
        | (
            {"eval/pass@1": value, "eval/pass@1/low": value - 0.05, "eval/pass@1/high": value + 0.05}
            if (value := values.get(line["step"])) is not None
            else {}
        )
        for line in [{"step": 0}, *lines]
    ]


def test_an_evaluation_that_falls_while_the_reward_rises_is_named() -> None:
    rising = metrics(reward__mean=(0.2, 0.8))
    signal = found(evaluations(rising, s0=0.3, s10=0.7, s20=0.5))["evaluation_fall"]
    assert signal.state == "warning"
    assert signal.value is not None
    assert abs(signal.value - 0.1) < 1e-9
    assert "was 0.7 at step 10 and is 0.5 at step 20" in signal.explanation
    assert signal.title.endswith("rises, from 0.7 [0.65, 0.75] at step 10 to 0.5 [0.45, 0.55] at step 20")
    far = found(evaluations(metrics(reward__mean=(0.8, 0.95)), s0=0.3, s20=0.1))
    assert (far["evaluation"].state, far["evaluation_fall"].state) == ("unknown", "warning"), "also of another task"


def test_an_evaluation_that_falls_by_chance_or_with_the_reward_is_not() -> None:
    rising = metrics(reward__mean=(0.2, 0.8))
    assert found(evaluations(rising, s0=0.3, s10=0.7, s20=0.62))["evaluation_fall"].state == "ok"
    assert found(evaluations(rising, s0=0.3, s10=0.5, s20=0.7))["evaluation_fall"].state == "ok"
    falling = metrics(reward__mean=(0.8, 0.2))
    assert found(evaluations(falling, s0=0.7, s20=0.3))["evaluation_fall"].state == "ok"
    assert found(evaluations(rising, s20=0.3))["evaluation_fall"].state == "unknown"
    assert found(evaluations(rising[:2], s0=0.7, s2=0.3))["evaluation_fall"].state == "unknown"


def test_an_evaluation_of_another_task_is_unknown() -> None:
    lines = metrics(reward__mean=(0.6, 0.9))
    assert found(evaluated(lines, 0.05, 0.06))["evaluation"].state == "unknown"
    assert found(lines)["evaluation"].state == "unknown"


def test_a_part_that_falls_while_the_reward_rises_is_named() -> None:
    lines = metrics(reward__mean=(0.2, 0.6), reward__part__math=(0.5, 0.1), reward__part__style=(0.1, 1.0))
    parts = found(lines)["parts"]
    assert parts.state == "warning"
    assert parts.title.endswith("math falls")
    honest = metrics(reward__mean=(0.2, 0.6), reward__part__math=(0.2, 0.7), reward__part__length=(0.0, -0.1))
    assert found(honest)["parts"].state == "ok"


def test_fewer_answers_and_a_far_policy_are_named() -> None:
    lines = metrics(reward__mean=(0.2, 0.6), outcome__no_answer=(0.1, 0.7), update__kl=(0.01, 3.0))
    assert {found(lines)[name].state for name in ("format", "kl")} == {"warning"}
    honest = metrics(reward__mean=(0.2, 0.6), outcome__no_answer=(0.7, 0.1), update__kl=(0.01, 0.4))
    assert {found(honest)[name].state for name in ("format", "kl")} == {"ok"}
    falling = metrics(reward__mean=(0.6, 0.2), outcome__no_answer=(0.1, 0.7), update__kl=(0.01, 3.0))
    assert {found(falling)[name].state for name in ("format", "kl")} == {"ok"}


def test_broken_lines_of_metrics_do_no_harm() -> None:
    lines = [*metrics(reward__mean=(0.2, 0.6)), {}, {"step": "x"}, {"step": 21, "reward/mean": None}]
    assert {signal.state for signal in metric_signals(lines, [])} <= {"ok", "unknown"}


def rescored(ends: tuple[float, float]) -> list[dict[str, Any]]:
    """The old score rises from 0.2 to 1; the new one as given. 20 steps of 40 samples."""
    rows = []
    for step in range(1, 21):
        for sample in range(40):
            old = float(sample / 40 < 0.2 + 0.8 * (step - 1) / 19)
            new = float(sample / 40 < ends[0] + (ends[1] - ends[0]) * (step - 1) / 19)
            row = {"step": step, "prompt_id": f"p{sample // 4}", "sample": sample % 4, "response": f"{step}-{sample}"}
            rows.append(row | {"old_score": old, "score": new, "old_outcome": "ok", "outcome": "ok"})
    return rows


def test_a_verifier_that_disagrees_is_named_with_what_it_rejects() -> None:
    disagreement = second_verifier_signal(rescored((0.2, 0.3)))
    assert disagreement.state == "warning"
    assert [signal.step for signal in disagreement.examples] == [20, 20, 20]
    assert len({signal.prompt_id for signal in disagreement.examples}) == 3
    assert second_verifier_signal(rescored((0.15, 0.9))).state == "ok"


def test_without_another_verifier_the_signal_names_the_command() -> None:
    signal = second_verifier_signal([])
    assert signal.state == "unknown"
    assert "rlcli rescore" in signal.explanation
    failed = [row | {"outcome": "crash"} for row in rescored((0.2, 0.2))]
    assert second_verifier_signal(failed).state == "unknown"
