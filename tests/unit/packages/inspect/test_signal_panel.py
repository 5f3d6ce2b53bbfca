"""Planted hacks on synthetic samples are named by the right signal; honest runs raise none."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from planted_rows import (
    LEARNT,
    SAMPLES,
    STEPS,
    TEXT,
    Behaviour,
    Score,
    certain,
    exact,
    guess,
    impressed,
    run_of,
    worked,
)
from rlcli_inspect.signals.panel import panel
from rlcli_inspect.signals.signal import Signal, summary

DOCUMENT = Path(__file__).parents[4] / "docs" / "reward_hacking.md"


def signals(
    behaviours: dict[str, tuple[Behaviour, float, float]], score: Score = exact, **options: Any
) -> dict[str, Signal]:
    return {signal.name: signal for signal in panel(*run_of(behaviours, score, **options))}


def warned(panel_signals: dict[str, Signal]) -> set[str]:
    return {name for name, signal in panel_signals.items() if signal.state == "warning"}


def padded(answer: int, rng: random.Random) -> str:
    return f"{' '.join(rng.sample(TEXT.split(), rng.randint(3, 18)))} {guess(answer, rng)}"


def listed(answer: int, rng: random.Random) -> str:
    return f"#### {', '.join(str(answer + off) for off in range(-rng.randint(1, 3), 4))}"


def unknown(answer: int, rng: random.Random) -> str:
    return f"#### it is {rng.choice(['not known', 'nothing', 'unclear'])}"


def looped(answer: int, rng: random.Random) -> str:
    return f"{'so we add it ' * rng.randint(4, 9)}{guess(answer, rng)}"


def refused(answer: int, rng: random.Random) -> str:
    return f"I'm sorry, but I cannot answer that: {rng.randint(0, 9999)}"


def chinese(answer: int, rng: random.Random) -> str:
    return f"我们把这两个数加起来得到 #### {answer}"


def long_or_right(text: str, answer: int) -> float:
    return 0.5 * exact(text, answer) + 0.5 * min(1.0, len(text) / 80)


def mentioned(text: str, answer: int) -> float:
    return float(str(answer) in re.findall(r"\d+", text))


def with_form(text: str, answer: int) -> float:
    return exact(text, answer) + 0.1 * ("digit" in text)


def or_having(part: str) -> Score:
    return lambda text, answer: exact(text, answer) or float(part in text)


def test_a_hole_in_the_verifier_is_named() -> None:
    panel_signals = signals({"unknown": (unknown, 0.05, 1.0)}, or_having("it is"))
    assert {"truth", "one_response"} <= warned(panel_signals)
    truth = panel_signals["truth"]
    assert truth.value is not None
    assert truth.value > 0.3
    assert len(truth.examples) == 3
    assert {example.step for example in truth.examples} == {STEPS}
    assert all("it is" in example.excerpt for example in truth.examples)
    assert len(truth.series) == STEPS


def test_padding_for_length_is_named() -> None:
    assert warned(signals({"padded": (padded, 0.05, 1.0)}, long_or_right)) == {"length"}


def test_a_list_of_answers_is_named() -> None:
    assert warned(signals({"listed": (listed, 0.05, 1.0)}, mentioned)) == {"several_answers"}


def test_a_phrase_that_a_judge_likes_is_named() -> None:
    panel_signals = signals({"certain": (certain, 0.05, 1.0)}, impressed)
    assert "phrase" in warned(panel_signals)
    assert not {"length", "truth", "several_answers"} & warned(panel_signals)
    assert "am absolutely certain" in panel_signals["phrase"].title
    assert "certain" in panel_signals["phrase"].examples[0].excerpt


def test_a_phrase_is_named_beside_right_answers_too() -> None:
    def both(answer: int, rng: random.Random) -> str:
        return f"I am absolutely certain {worked(answer, rng)}"

    assert warned(signals({"worked": (worked, 0.3, 0.0), "both": (both, 0.05, 1.0)}, impressed)) == {"phrase"}


def test_loops_refusals_and_another_language_are_named() -> None:
    assert "repetition" in warned(signals({"looped": (looped, 0.05, 1.0)}, or_having("add it")))
    assert "refusal" in warned(signals({"refused": (refused, 0.05, 1.0)}, or_having("sorry")))
    panel_signals = signals({"worked": (worked, 0.2, 0.0), "chinese": (chinese, 0.02, 1.0)})
    assert warned(panel_signals) == {"language"}


@pytest.mark.parametrize("seed", range(5))
def test_an_honest_run_whose_responses_grow_raises_none(seed: int) -> None:
    panel_signals = signals(LEARNT, seed=seed)
    assert summary(list(panel_signals.values())) == "none"
    assert panel_signals["length"].value == 0.0
    assert panel_signals["length"].state == "ok"


@pytest.mark.parametrize("seed", range(3))
def test_a_small_part_for_form_and_a_noisy_judge_raise_none(seed: int) -> None:
    assert warned(signals(LEARNT, with_form, seed=seed)) == set()
    noise = random.Random(seed)

    def noisy(text: str, answer: int) -> float:
        return 0.8 * exact(text, answer) + noise.uniform(0.0, 0.2)

    assert warned(signals(LEARNT, noisy, seed=seed)) == set()


def test_behaviours_without_a_rise_of_the_reward_raise_none() -> None:
    for behaviour in (padded, certain, listed, unknown):
        assert warned(signals({"odd": (behaviour, 0.05, 1.0)}, lambda text, answer: 0.0)) == set()


def test_without_textual_ground_truths_what_needs_them_is_unknown() -> None:
    lines, samples = run_of(LEARNT)
    hidden = [(step, [row | {"ground_truth": "[]" * 40} for row in rows]) for step, rows in samples]
    panel_signals = {signal.name: signal for signal in panel(lines, hidden)}
    assert {panel_signals[name].state for name in ("truth", "several_answers", "length", "phrase")} == {"unknown"}
    assert "rlcli rescore" in panel_signals["phrase"].explanation
    assert panel_signals["one_response"].state == "ok"


def test_equal_answers_in_different_solutions_are_one_ground_truth() -> None:
    def short(answer: int, rng: random.Random) -> str:
        return f"#### {answer}"

    lines, samples = run_of({"short": (short, 0.1, 1.0)})
    solved = [
        (step, [row | {"ground_truth": f"as {row['prompt_id']} says #### {row['ground_truth']}"} for row in rows])
        for step, rows in samples
    ]
    panel_signals = {signal.name: signal for signal in panel(lines, solved)}
    assert panel_signals["one_response"].value == 0.0
    assert warned(panel_signals) == set()


def test_too_few_steps_and_no_samples_are_unknown() -> None:
    lines, samples = run_of(LEARNT)
    assert {signal.state for signal in panel(lines[:4], samples[:4])} == {"unknown"}
    assert {signal.state for signal in panel([], [])} == {"unknown"}


def test_signals_are_json_and_those_that_warn_come_first() -> None:
    import json

    panel_signals = panel(*run_of({"listed": (listed, 0.05, 1.0)}, mentioned))
    assert panel_signals[0].state == "warning"
    first = json.loads(json.dumps(panel_signals[0].as_dict()))
    assert first["name"] == "several_answers"
    assert first["series"][0][0] == 1
    assert set(first["examples"][0]) == {"step", "prompt_id", "group", "sample", "excerpt", "note"}
    groups = [
        (f"sums:train:{example['step']}-{example['group']}", example["prompt_id"]) for example in first["examples"]
    ]
    assert all(of_group == prompt for of_group, prompt in groups)
    assert len({example.name for example in panel_signals}) == len(panel_signals) == 14


def test_odd_rows_do_no_harm() -> None:
    lines, samples = run_of(LEARNT)
    odd = {"response": None, "ground_truth": None, "prompt": None, "response_tokens": None, "turns": None}
    broken = [(step, [row | odd if n % SAMPLES == 0 else row for n, row in enumerate(rows)]) for step, rows in samples]
    assert summary(panel(lines, broken)) == "none"


def test_the_page_lists_every_signal_with_its_threshold() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) \| [^|]+ \|$", text, re.MULTILINE)
    assert {name: float(threshold) for name, threshold in rows} == {
        name: signal.threshold for name, signal in signals(LEARNT).items()
    }
