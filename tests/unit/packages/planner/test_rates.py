"""Rates of this machine: where they come from, how long they hold, and what a plan makes of them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rlcli_planner import step_time
from rlcli_planner.known_devices import parse_gpus, with_rates
from rlcli_planner.machine import machine_rates as rates
from rlcli_planner.machine.machine_rates import Rates, cache_file, fastest, load, machine_rates, mean
from rlcli_planner.step_time import step_seconds, times

from tests.planner_settings import RATES, qwen_7b, setting

WHAT = ("cpu", "bfloat16", 2, 1)


@pytest.fixture
def known_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the one for all unit tests: an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_rates.cache_clear()


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The conditions of each measurement; each measurement returns `RATES`."""
    calls: list[tuple[object, ...]] = []

    def measure(*conditions: object) -> Rates:
        calls.append(conditions)
        return RATES

    monkeypatch.setattr(rates, "measure", measure)
    return calls


def test_a_machine_is_measured_once(measurements: list[tuple[object, ...]]) -> None:
    assert machine_rates(*WHAT) == RATES
    machine_rates.cache_clear()  # another process
    assert machine_rates(*WHAT) == RATES == load(*WHAT)
    assert measurements == [WHAT]


@pytest.mark.parametrize(
    "conditions",
    [("cpu", "float32", 2, 1), ("cpu", "bfloat16", 1, 1), ("cpu", "bfloat16", 2, 2), ("cuda", "bfloat16", 2, 1)],
)
def test_another_dtype_device_or_number_of_threads_is_measured(
    conditions: tuple[str, str, int, int], measurements: list[tuple[object, ...]]
) -> None:
    machine_rates(*WHAT)
    machine_rates(*conditions)
    assert measurements == [WHAT, conditions]


def test_another_torch_or_processor_is_measured(
    measurements: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_rates(*WHAT)
    monkeypatch.setattr(rates, "installed", lambda package: "0.1")
    assert load(*WHAT) is None
    monkeypatch.undo()
    monkeypatch.setattr(rates, "_processor", lambda device: "abacus")
    assert load(*WHAT) is None


def test_rates_of_a_busy_machine_hold_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = RATES.measured + 10
    monkeypatch.setattr("rlcli_planner.machine.machine_rates.time.time", lambda: now)
    busy = replace(RATES, quiet=False)
    rates.save(busy, *WHAT)
    assert load(*WHAT) == busy
    now = RATES.measured + 3700
    assert load(*WHAT) is None
    rates.save(RATES, *WHAT)
    assert load(*WHAT) == RATES


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\udcff"])
def test_an_unreadable_cache_is_measured_again(text: str, measurements: list[tuple[object, ...]]) -> None:
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    cache_file().write_text(text, encoding="utf-8", errors="surrogateescape")
    assert machine_rates(*WHAT) == RATES
    assert load(*WHAT) == RATES


@pytest.mark.parametrize(
    "change", [{"training": []}, {"read_rate": 0.0}, {"products": [[1.0]]}, {"unknown": 1}, {"widths": None}]
)
def test_a_damaged_record_is_none(change: dict[str, object]) -> None:
    rates.save(RATES, *WHAT)
    record = json.loads(cache_file().read_text())
    for values in record.values():
        values.update(change)
    cache_file().write_text(json.dumps(record))
    assert load(*WHAT) is None


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measurements: list[tuple[object, ...]]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert machine_rates(*WHAT) == RATES


@pytest.mark.parametrize("command", ["exit 3", "echo no", "echo '{}'", "echo '{\"widths\": 3}'"])
def test_a_measurement_that_fails_gives_none(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    monkeypatch.setattr("rlcli_planner.machine.machine_rates.sys.executable", str(python))
    assert machine_rates(*WHAT) is None
    assert not cache_file().exists()


def test_processes_share_a_machine() -> None:
    fast = replace(RATES, read_rate=30e9, training=(100e9, 150e9, 170e9))
    averaged = mean([RATES, fast])
    assert (averaged.read_rate, averaged.training, averaged.quiet) == (25e9, (90e9, 140e9, 160e9), True)
    assert averaged.widths == RATES.widths
    assert not mean([RATES, replace(fast, quiet=False)]).quiet


def test_a_busy_machine_is_measured_again_and_the_best_figures_count(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(RATES, quiet=False, operation_s=1800 * RATES.operation_s, draw_s=RATES.draw_s / 2)
    low = replace(RATES, quiet=False, products=tuple(tuple(rate / 9 for rate in row) for row in RATES.products))
    results = [slow, low, slow, RATES]
    monkeypatch.setattr(rates, "_measure_once", lambda *_: results.pop(0))
    best = rates.measure(*WHAT)
    assert best == replace(RATES, quiet=False, draw_s=RATES.draw_s / 2)
    assert rates.measure(*WHAT) == RATES, "nothing else runs: once is enough"
    assert fastest(low, RATES) == RATES


def test_work_of_others_counts_and_that_of_the_measurement_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    seconds = iter([0.0, 10.0])
    monkeypatch.setattr("rlcli_planner.machine.machine_rates.time.monotonic", lambda: next(seconds))
    monkeypatch.setattr(subprocess, "Popen", _Measurement)
    for others_s, quiet in ((0.05 * 10 * cores, True), (0.2 * 10 * cores, False)):
        seconds = iter([0.0, 10.0])
        busy, ours = iter([100.0, 119.0 + others_s]), iter([5.0, 24.0])
        monkeypatch.setattr(rates, "_busy_s", lambda busy=busy: next(busy))
        monkeypatch.setattr(rates, "_ours_s", lambda ours=ours: next(ours))
        measured = rates._measure_once(*WHAT)
        assert measured is not None
        assert measured.quiet is quiet


class _Measurement:
    """A process that prints `RATES`."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def communicate(self, timeout: float) -> tuple[str, None]:
        return json.dumps(asdict(RATES)), None

    def kill(self) -> None:
        pass

    def wait(self) -> None:
        pass


def test_rates_between_the_measured_widths_and_rows() -> None:
    assert RATES.of_layer(64, training=True) == 80e9
    assert RATES.of_layer(512, training=True) == pytest.approx(130e9)
    assert 130e9 < RATES.of_layer(1024, training=True) < 150e9
    assert RATES.of_layer(10**5, training=False) == 160e9
    assert RATES.of_product(512, 1) == pytest.approx(8e9)
    assert RATES.of_product(512, float("inf")) == pytest.approx(150e9)
    assert RATES.of_product(128, 1) < RATES.of_product(1024, 1) < RATES.of_product(1024, 100)


def test_a_time_needs_rates_and_their_origin_is_named() -> None:
    unknown = setting(qwen_7b(), "cpu")
    assert times(unknown) == []
    assert step_seconds(unknown, []) == 0
    assert unknown.device.rates_from == ""
    measured = with_rates(unknown.device, RATES)
    assert measured.rates_from == "measured on this machine"
    assert with_rates(unknown.device, replace(RATES, quiet=False)).rates_from.endswith("while it was busy")
    assert parse_gpus("h100")[0].rates_from == "from the data sheet of h100, not measured"
    assert parse_gpus("8x80GB")[0].rates_from == ""


def test_no_time_is_predicted_of_kernels_that_were_not_measured() -> None:
    """An engine that applies an adapter in 16 bits on CPUs."""
    adapted = ("lora.rank=8", "checkpoint.every=0")
    for dtype, engine, timed in (
        ("bfloat16", "vllm", False),
        ("bfloat16", "transformers", True),
        ("float32", "vllm", True),
    ):
        known = setting(qwen_7b(), "cpu", *adapted, f"model.dtype={dtype}", f"rollout.engine={engine}")
        known = replace(known, device=with_rates(known.device, RATES))
        assert (known.untimed == "", times(known) != []) == (timed, timed), (dtype, engine)
    on_gpu = setting(qwen_7b(), "h100", *adapted, "model.dtype=bfloat16")
    assert times(on_gpu)


def test_a_step_takes_its_operations_at_the_measured_rates() -> None:
    known = setting(qwen_7b(), "cpu", "rollout.prompts_per_step=2", "checkpoint.every=0")
    known = replace(known, device=with_rates(known.device, RATES))
    phases = {phase.name: phase.seconds for phase in times(known)}
    tokens = known.pack.tokens * known.packs
    products = 6 * known.policy.matrix_parameters * tokens / 150e9
    assert phases["update"] == pytest.approx(products, rel=0.25), "the products are most of it"
    slower = replace(RATES, training=tuple(rate / 2 for rate in RATES.training))
    halved = {phase.name: phase.seconds for phase in times(replace(known, device=with_rates(known.device, slower)))}
    assert halved["update"] - phases["update"] == pytest.approx(products, rel=0.1)
    assert halved["generate"] == phases["generate"]


def test_a_step_of_a_tiny_model_takes_the_time_of_its_python() -> None:
    known = setting(qwen_7b(), "cpu", "checkpoint.every=0")
    slower = replace(RATES, python_s=2 * RATES.python_s)
    phases, slow = (
        {phase.name: phase.seconds for phase in times(replace(known, device=with_rates(known.device, measured)))}
        for measured in (RATES, slower)
    )
    fixed = {"update": step_time.UPDATE_PYTHON, "sync": step_time.SYNC_PYTHON, "other": step_time.CONTROLLER_PYTHON}
    for name, units in fixed.items():
        assert slow[name] - phases[name] == pytest.approx(units * RATES.python_s, rel=1e-6), name
    assert phases["other"] == step_time.CONTROLLER_PYTHON * RATES.python_s
    assert "other" not in {phase.name for phase in times(setting(qwen_7b(), "h100"))}


@pytest.mark.long
def test_this_machine_can_be_measured() -> None:
    measured = rates.measure("cpu", "float32", 1, 1)
    assert measured is not None
    numbers = (*measured.training, *measured.forward, *(rate for row in measured.products for rate in row))
    single = (
        measured.read_rate,
        measured.update_rate,
        measured.operation_s,
        measured.draw_s,
        measured.softmax_s,
        measured.python_s,
    )
    assert all(number > 0 for number in (*numbers, *single))
    assert measured.measured > 1.7e9
