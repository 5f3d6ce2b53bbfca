"""The gain of asynchrony: the simulation against one that counts every tick, the lengths, and the advice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rlcli_planner.asynchrony.advice import PAYS, STALENESS, advice, advised
from rlcli_planner.asynchrony.lengths import Lengths
from rlcli_planner.asynchrony.pace import pace_of
from rlcli_planner.asynchrony.simulate import Layout, Speeds, simulate
from rlcli_planner.launch.measured_lengths import lengths_like

from rlcli.cli.main import main
from rlcli.config.schema import RunConfig
from rlcli.data.sample_files import sample_row, write_samples
from rlcli.types import Outcome, Prompt, Verdict
from tests.planner_settings import QWEN_7B, qwen_7b, setting


class Ticks:
    """Engines that draw one token of each running response in a tick. Plain loops."""

    def __init__(self, lengths: NDArray[np.int64], layout: Layout) -> None:
        self.batch, self.layout = lengths.shape[1], layout
        self.lengths = lengths.reshape(-1, lengths.shape[2]).tolist()
        self.running: list[list[list[int]]] = [[] for _ in range(layout.engines)]
        self.queues: list[list[list[int]]] = [[] for _ in range(layout.engines)]
        self.shared: list[list[int]] = []
        self.missing = [len(group) for group in self.lengths]
        self.open = [0] * layout.engines
        self.started = self.now = 0

    def admit(self, step: int) -> None:
        while self.started < min((self.layout.staleness + step + 1) * self.batch, len(self.lengths)):
            engine = self.open.index(min(self.open))
            own_queue = self.layout.staleness > 0 or self.open[engine] < self.layout.slots
            queue = self.queues[engine] if own_queue else self.shared
            queue.extend([self.started, length] for length in self.lengths[self.started])
            self.open[engine] += own_queue * len(self.lengths[self.started])
            self.started += 1
        for engine in range(self.layout.engines):
            self.fill(engine)

    def fill(self, engine: int) -> None:
        while len(self.running[engine]) < self.layout.slots and (queue := self.queues[engine] or self.shared):
            self.open[engine] += queue is self.shared
            self.running[engine].append(queue.pop(0))

    def tick(self) -> None:
        self.now += 1
        for engine, running in enumerate(self.running):
            for request in running:
                request[1] -= 1
            for request in [request for request in running if request[1] == 0]:
                running.remove(request)
                self.missing[request[0]] -= 1
                self.open[engine] -= 1
            self.fill(engine)

    def step(self, step: int, update: int, sync: int) -> int:
        """When it ends."""
        self.admit(step)
        while any(self.missing[step * self.batch : (step + 1) * self.batch]):
            self.tick()
        if self.layout.dedicated and self.layout.staleness:
            for _ in range(update):
                self.tick()
        else:
            self.now += update
        self.now += sync
        return self.now


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.builds(
        Layout,
        st.integers(1, 3),
        st.integers(1, 5),
        dedicated=st.booleans(),
        staleness=st.integers(0, 3),
        recompute=st.just(False),
        slice_s=st.just(0.0),
    ),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(0, 5),
)
def test_simulated_steps_are_those_counted_tick_by_tick(
    seed: int, layout: Layout, batch: int, samples: int, update: int, sync: int
) -> None:
    random = np.random.default_rng(seed)
    step_lengths = random.integers(1, 30, size=batch * samples)  # all steps train on as many tokens
    lengths = np.stack(
        [random.permutation(step_lengths).reshape(batch, samples) for _ in range(4 + 2 * layout.staleness)]
    )
    ticks = Ticks(lengths, layout)
    ends = [ticks.step(step, update, sync) for step in range(len(lengths) - layout.staleness)]
    simulated = simulate(lengths, Speeds(lambda running, tokens: 1.0, 0.0, float(update), float(sync)), layout)
    counted = ends[-1] - ends[layout.staleness]
    assert simulated.step_s == pytest.approx(counted / (len(ends) - 1 - layout.staleness), rel=1e-9)
    assert 0 <= simulated.age <= layout.staleness


def test_two_steps_overlap_as_worked_out_by_hand() -> None:
    """Generation takes 1 s, an update 0.4. With staleness 1 two steps take 1.4 s: a batch is begun when the step before
    it takes its own, and every second one is there already."""
    lengths = np.full((12, 2, 2), 100)
    speeds = Speeds(lambda running, tokens: 0.01, 0.0, 0.4, 0.0)
    assert simulate(lengths, speeds, Layout(1, 8)).step_s == pytest.approx(1.4)
    overlapped = simulate(lengths[:11], speeds, Layout(1, 8, True, 1, slice_s=0.0))
    assert overlapped.step_s == pytest.approx(0.7, rel=0.1)
    assert simulate(lengths, speeds, Layout(1, 64, True, 4, slice_s=0.0)).step_s == pytest.approx(0.4)


def test_engines_share_the_responses_of_a_synchronous_step() -> None:
    """An engine takes 1 s for a token of each of n responses, times n. Two, with slots for all, halve that."""
    lengths, speeds = np.full((4, 4, 2), 10), Speeds(lambda running, tokens: float(running), 0.0, 0.0, 0.0)
    assert simulate(lengths, speeds, Layout(1, 8)).step_s == pytest.approx(80)
    assert simulate(lengths, speeds, Layout(2, 8)).step_s == pytest.approx(40)


def test_steps_of_the_warm_up_do_not_count() -> None:
    lengths = np.full((8, 2, 2), 100)
    lengths[:3] = 400
    speeds = Speeds(lambda running, tokens: 1.0, 0.0, 0.0, 0.0)
    assert simulate(lengths, speeds, Layout(1, 8)).step_s > 100
    assert simulate(lengths, speeds, Layout(1, 8), warm_up=3).step_s == pytest.approx(100)


def test_the_trainer_waits_for_the_end_of_a_slice() -> None:
    """An update takes 0.4 s and slices 0.25: the engines may be updated after 0.5."""
    lengths, speeds = np.full((12, 2, 2), 100), Speeds(lambda running, tokens: 0.01, 0.0, 0.4, 0.0)
    sliced = simulate(lengths, speeds, Layout(1, 64, True, 4, slice_s=0.25))
    assert sliced.step_s == pytest.approx(0.5)
    assert sliced.trainer_idle == pytest.approx(0.2)


def test_an_update_takes_as_long_as_its_tokens() -> None:
    lengths = np.full((12, 2, 2), 100)
    lengths[::2] = 300
    speeds = Speeds(lambda running, tokens: 1e-12, 0.0, 1.0, 0.0)
    simulated = simulate(lengths[:3], speeds, Layout(1, 8), prompt_tokens=20.0)
    assert simulated.step_s == pytest.approx((120 + 320) / 2 / ((320 + 120 + 320) / 3))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.floats(0.0, 50.0))
def test_tokens_take_longer_the_more_there_are(seed: int, slots: int, prompt: float) -> None:
    """One engine, whose decoding step takes 1 s and 0.01 s for each token that its responses have; plain loops."""
    lengths = np.random.default_rng(seed).integers(1, 30, size=(3, 2, 3))
    seconds = []
    for step in lengths:
        waiting, running, spent = step.ravel().tolist(), list[list[int]](), 0.0
        while waiting or running:
            while waiting and len(running) < slots:
                running.append([0, waiting.pop(0)])
            for request in running:
                request[0] += 1
            # In the middle of the token: what is drawn during it counts by half.
            spent += 1.0 + 0.01 * sum(prompt + request[0] - 0.5 for request in running)
            running = [request for request in running if request[0] < request[1]]
        seconds.append(spent)
    speeds = Speeds(lambda running, tokens: 1.0 + 0.01 * running * tokens, 0.0, 0.0, 0.0)
    simulated = simulate(lengths, speeds, Layout(1, slots), prompt)
    assert simulated.step_s == pytest.approx(sum(seconds[1:]) / 2, rel=1e-9)


def test_generation_goes_on_in_parts_as_in_one_piece() -> None:
    """An engine that is looked at every 0.25 s draws as many tokens as one that is never looked at."""
    lengths = np.tile(np.array([50, 400]), (12, 2, 1))
    speeds = Speeds(lambda running, tokens: 0.001 + 0.00001 * running * tokens, 0.0, 0.0, 0.0)
    unsliced, parts = (
        simulate(lengths, speeds, Layout(1, 8, True, 1, slice_s=slice_s)).step_s for slice_s in (0.0, 0.001)
    )
    assert parts == pytest.approx(unsliced, rel=0.01)


def test_running_responses_are_computed_again_after_an_update() -> None:
    lengths = np.tile(np.array([10, 1000]), (12, 1, 1))
    tails = {
        recompute: simulate(
            lengths, Speeds(lambda running, tokens: 0.01, 0.001, 1.0, 0.0), Layout(1, 8, True, 2, recompute), 50
        )
        for recompute in (True, False)
    }
    assert tails[True].step_s > tails[False].step_s


@pytest.mark.parametrize("spread", [0.2, 0.7, 1.2])
def test_assumed_lengths_have_the_mean_and_keep_the_limit(spread: float) -> None:
    lengths = Lengths(1000, 300.0, spread).draw(20, 32, 8)
    assert lengths.mean() == pytest.approx(300, rel=0.01)
    assert (lengths.min() >= 1, lengths.max() <= 1000) == (True, True)
    between = np.log(lengths).mean(axis=2).var()
    assert between == pytest.approx(np.log(lengths).var() / 2, rel=0.25), "prompts differ as much as their responses"


def test_measured_groups_are_drawn_whole() -> None:
    measured = np.array([[1, 2, 3], [10, 20, 30]])
    lengths = Lengths.of(measured)
    assert (lengths.limit, lengths.mean) == (30, 11.0)
    assert {tuple(group) for group in lengths.draw(4, 5, 3).reshape(-1, 3).tolist()} == {(1, 2, 3), (10, 20, 30)}
    assert set(lengths.draw(4, 5, 8).ravel().tolist()) <= {1, 2, 3, 10, 20, 30}


def speeds_of(decode: float, update: float) -> Callable[[int, int], Speeds]:
    """Of a run whose update takes that long on 8 devices."""
    return lambda train, generate: Speeds(
        lambda running, tokens: decode * (1 + running / 50), 0.0, update * 8 / train, 0.5
    )


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"cluster": {"workers": 8}, "rollout": {"max_response_tokens": 1000}, "algorithm": {"correction": "token_tis"}}
        | sections
    )


def test_a_long_tail_is_worth_generating_ahead() -> None:
    recommendation = advised(config(), Lengths(1000, 200.0, 1.2), speeds_of(0.02, 5.0), 50.0)
    assert recommendation is not None
    assert recommendation.best is not None
    assert {option.staleness for option in recommendation.options} == set(STALENESS)
    best_gain = max(option.gain for option in recommendation.options)
    assert best_gain > 1.5
    assert recommendation.best.gain >= 0.97 * best_gain
    assert not any(
        option.gain >= 0.97 * best_gain
        for option in recommendation.options
        if option.staleness < recommendation.best.staleness
    )
    assert recommendation.summary.startswith(recommendation.best.label)
    assert recommendation.summary.endswith(f"would make steps {recommendation.best.gain:.2f} × as fast")


def test_where_training_takes_the_time_nothing_is_advised() -> None:
    recommendation = advised(config(), Lengths(1000, 900.0, 0.1), speeds_of(0.001, 50.0), 50.0)
    assert recommendation is not None
    assert max(option.gain for option in recommendation.options) < PAYS
    assert recommendation.best is None
    assert recommendation.summary.startswith("asynchrony would not pay (at best 1.0")


def test_an_asynchronous_run_is_told_its_gain_and_what_hinders_one() -> None:
    lengths = Lengths(1000, 200.0, 1.2)
    asynchronous = config(
        rollout={"max_response_tokens": 1000, "workers": 4}, cluster={"workers": 4}, **{"async": {"staleness": 1}}
    )
    recommendation = advised(asynchronous, lengths, speeds_of(0.02, 5.0), 50.0)
    assert recommendation is not None
    assert recommendation.configured is not None
    assert (
        recommendation.configured.train,
        recommendation.configured.generate,
        recommendation.configured.staleness,
    ) == (4, 4, 1)
    assert recommendation.summary.startswith("cluster.workers=4 rollout.workers=4 async.staleness=1 makes steps")
    without = config(algorithm={"correction": "none"})
    refused = advised(without, lengths, speeds_of(0.02, 5.0), 50.0)
    assert refused is not None
    assert "first: async.staleness = 1 trains on samples of an earlier policy" in refused.summary
    assert advised(config(), lengths, lambda train, generate: None, 0.0) is None, "not even the synchronous run fits"


def test_splits_keep_engines_and_copies_whole() -> None:
    parts = config(
        cluster={"workers": 8}, parallel={"replicate": 2}, rollout={"max_response_tokens": 100, "tensor_parallel": 2}
    )
    recommendation = advised(parts, Lengths.assumed(100), speeds_of(0.02, 5.0), 50.0)
    assert recommendation is not None
    splits = {(option.train, option.generate) for option in recommendation.options}
    assert splits == {(8, 0), (6, 2), (4, 4), (2, 6)}


def test_workers_that_divide_experts_stay_together() -> None:
    parts = config(cluster={"workers": 8}, parallel={"expert": 4}, rollout={"max_response_tokens": 100})
    recommendation = advised(parts, Lengths.assumed(100), speeds_of(0.02, 5.0), 50.0)
    assert recommendation is not None
    assert {(option.train, option.generate) for option in recommendation.options} == {(8, 0), (4, 4)}


@pytest.mark.long
def test_the_plan_of_a_run_says_whether_asynchrony_pays() -> None:
    sets = ("rollout.max_response_tokens=8192", "train.offload=all", "model.gradient_checkpointing=true")
    known = setting(qwen_7b(), "h100:8", *sets, "train.tokens_per_microbatch=16384")
    recommendation = advice(known)
    assert recommendation is not None
    assert recommendation.assumed
    assert recommendation.synchronous.step_s > 0
    assert recommendation.as_dict()["options"][0].keys() >= {"async.staleness", "gain", "step_s", "trainer_idle"}


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_measures_its_pace_and_what_other_layouts_would_make_of_it(staleness: int) -> None:
    """The measured steps are themselves simulated, with speeds that the fit does not see."""
    run_config = config(
        rollout={"max_response_tokens": 400, "workers": 4, "prompts_per_step": 8, "samples_per_prompt": 4},
        cluster={"workers": 4},
        **{"async": {"staleness": staleness}},
    )
    groups = Lengths(400, 100.0, 1.0).draw(40, 8, 4)
    decode, update, sync = 0.03, 4.0, 0.25
    simulated = simulate(
        groups, Speeds(lambda running, tokens: decode, 0.0, update, sync), Layout(4, 256, True, staleness)
    )
    generate = simulated.trainer_idle * simulated.step_s
    line = {"time/step_s": simulated.step_s, "time/generate_s": generate, "time/sync_s": sync}
    line["time/engine_idle_s"] = simulated.engine_idle * simulated.step_s
    pace = pace_of(run_config, groups.reshape(-1, 4).tolist(), [line] * 5, None)
    assert pace.advice is not None
    together = simulate(groups, Speeds(lambda running, tokens: decode, 0.0, update / 2, sync), Layout(8, 256))
    assert pace.advice.synchronous.step_s == pytest.approx(together.step_s, rel=0.1)
    if staleness:
        assert pace.gain == pytest.approx(together.step_s / simulated.step_s, rel=0.1)
        assert "as fast as synchronous ones would be" in pace.summary
    else:
        assert pace.gain is None
        assert pace.summary.startswith(f"a step takes {simulated.step_s:.3g} s; responses measured: mean ")


@pytest.mark.long
def test_plan_takes_the_lengths_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir()
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN_7B))
    plan = ["plan", "grpo", "--model", str(model), "--gpus", "h100:8", "--like", str(run)]
    assert main(plan) == 2
    assert "is not a run" in capsys.readouterr().err
    (run / "config.toml").write_text("")
    assert main(plan) == 2
    assert "no samples whose lengths could be read" in capsys.readouterr().err
    for step, tokens in ((1, (10, 20)), (2, (30, 900))):
        rows = [sample(index, length) for index, length in enumerate(tokens)]
        write_samples(run / "samples" / f"step-{step:06d}" / "rank-0.parquet", step, rows)
    (run / "samples" / "step-000002" / "rank-1.parquet").write_text("broken")
    assert lengths_like(run).measured.tolist() == [[10, 20], [30, 900]]  # type: ignore[union-attr]
    assert main(plan) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "async.staleness, simulated" in shown
    assert "responses measured: mean 240, longest 900 tokens" in shown
    assert main([*plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asynchrony"]["lengths"] == "measured: mean 240, longest 900 tokens"


def sample(index: int, tokens: int) -> dict[str, Any]:
    prompt = Prompt("a:0", ({"role": "user", "content": "?"},), "a", "math", "exact", "4")
    lengths = {"prompt_tokens": 4, "response_tokens": tokens}
    return sample_row(prompt, index, "4", Verdict(1.0, Outcome.OK), **lengths, finish_reason="stop", group=0)
