from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.cli.options import data_sets
from rlcli.config.changes import read_run_config
from rlcli.config.load import dump_toml, resolve
from rlcli.config.schema import Data, RunConfig, Train, WeightedPath
from rlcli.data.columns import SampleTable
from rlcli.data.prompts.cursor import PromptCursor
from rlcli.data.prompts.dataset_mixture import MixedCursor, build_cursor
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.prompt_table import JoinedPrompts, dataset_name, read_sets
from rlcli.errors import ConfigError, DataError, RlcliError
from rlcli.evaluation.evaluation_folder import dataset_names
from rlcli.training.loop.metrics import set_metrics
from rlcli.types import Outcome, Prompt, Sample, Verdict

SIZES = (50, 7, 20)
STARTS = (0, 50, 57, 77)


def mixed(weights: tuple[float, ...] = (3.0, 2.0, 1.0), unit: Any = "prompts", shuffle: bool = True) -> MixedCursor:
    return MixedCursor(["a", "b", "c"], STARTS, weights, seed=5, shuffle=shuffle, unit=unit)


def place(index: int) -> int:
    return sum(index >= start for start in STARTS[1:])


@settings(max_examples=60)
@given(st.lists(st.floats(0.05, 20.0), min_size=3, max_size=3), st.integers(1, 400))
def test_shares_of_any_number_of_draws_follow_the_weights(weights: list[float], draws: int) -> None:
    set_counts = Counter(map(place, mixed(tuple(weights)).take(draws)))
    for number, weight in enumerate(weights):
        assert abs(set_counts[number] - draws * weight / sum(weights)) < 2.0


def test_each_set_goes_through_its_own_epochs() -> None:
    indices = mixed(shuffle=False).take(60)
    assert [index for index in indices if place(index) == 0] == list(range(30))
    assert [index - 50 for index in indices if place(index) == 1] == [i % 7 for i in range(20)]
    assert [index - 57 for index in indices if place(index) == 2] == list(range(10))
    of_equal_size = MixedCursor(["a", "b"], [0, 20, 40], [1.0, 1.0], seed=0, shuffle=True)
    indices = of_equal_size.take(40)
    assert sorted(indices) == list(range(40))
    assert [i for i in indices if i < 20] != [i - 20 for i in indices if i >= 20]


@pytest.mark.parametrize("unit", ["prompts", "tokens"])
def test_many_at_once_are_those_that_come_one_by_one(unit: str) -> None:
    at_once, singly = mixed(unit=unit), mixed(unit=unit)
    for step in range(12):
        indices = at_once.take(step)
        assert indices == [singly.take(1)[0] for _ in range(step)]
        for index in indices[step % 2 :]:
            at_once.record_group(index, 10 + index)
            singly.record_group(index, 10 + index)
    assert at_once.state() == singly.state()


@pytest.mark.parametrize("unit", ["prompts", "tokens"])
def test_a_restored_cursor_goes_on_exactly(unit: str) -> None:
    cursor, other = mixed(unit=unit), mixed(unit=unit)
    indices: list[int] = []
    for step in range(30):
        some = cursor.take(8)
        for index in some[step % 3 :]:  # some groups are not finished when the checkpoint is taken
            cursor.record_group(index, 10 + index)
        indices += some
        other = other.restored(json.loads(json.dumps(cursor.state())))
        cursor, other = other, cursor
    assert indices == continuous(unit)


def continuous(unit: str) -> list[int]:
    cursor, indices = mixed(unit=unit), list[int]()
    for step in range(30):
        some = cursor.take(8)
        for index in some[step % 3 :]:
            cursor.record_group(index, 10 + index)
        indices += some
    return indices


def test_shares_by_tokens_follow_what_the_groups_have_had() -> None:
    lengths = (400, 100, 1000)
    cursor, tokens, set_counts = mixed((1.0, 1.0, 2.0), "tokens"), Counter[int](), Counter[int]()
    for _ in range(100):
        for index in cursor.take(16):
            cursor.record_group(index, lengths[place(index)])
            tokens[place(index)] += lengths[place(index)]
            set_counts[place(index)] += 1
    total = sum(tokens.values())
    assert [tokens[i] / total for i in range(3)] == pytest.approx([0.25, 0.25, 0.5], abs=0.01)
    assert set_counts[1] > 3.5 * set_counts[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sets": ["a", "b", "d"]}, "began with a:3, b:2, d:1 by prompts and now has a:3, b:2, c:1 by prompts"),
        ({"weights": [1.0, 2.0, 1.0]}, "began with a:1, b:2, c:1"),
        ({"unit": "tokens"}, "by tokens and now has"),
    ],
)
def test_a_run_is_not_resumed_with_another_mixture(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        mixed().restored(mixed().state() | changed)


def test_a_run_is_not_resumed_with_other_dataset_weights() -> None:
    with pytest.raises(DataError, match="began with no weights and now has a:3"):
        mixed().restored(PromptCursor(77, 0, True).state())
    with pytest.raises(DataError, match="began with a:3, b:2, c:1 by prompts and now has no weights"):
        PromptCursor(77, 0, True).restored(mixed().state())
    state = mixed().state()
    state["cursors"][1]["count"] = 8
    with pytest.raises(DataError, match="8 prompts and the dataset now has 7"):
        mixed().restored(state)
    cursor = PromptCursor(77, 0, True)
    cursor.take(5)
    assert PromptCursor(77, 0, True).restored(cursor.state()).take(3) == cursor.take(3)


def rows(path: Path, count: int) -> str:
    path.mkdir()
    message = {"role": "user", "content": "1+1="}
    some = [row(data_source="toy", messages=[message], verifier="gsm8k", ground_truth="2")] * count
    for split in ("train", "test"):
        write_rows(path / f"{split}.parquet", some)
    return str(path)


def test_sets_are_joined_with_ids_that_differ(tmp_path: Path) -> None:
    paths = [rows(tmp_path / "a", 3), rows(tmp_path / "b", 2)]
    names = dataset_names(paths)
    joined = read_sets(paths, names, "train", "auto")
    assert [prompt.id for prompt in joined] == [f"a/toy:train:{i}" for i in range(3)] + [
        f"b/toy:train:{i}" for i in range(2)
    ]
    assert [dataset_name(joined, i) for i in range(5)] == ["a", "a", "a", "b", "b"]
    assert [len(part) for part in read_sets(paths, names, "train", "auto", 2).parts] == [2, 2]  # type: ignore[attr-defined]
    alone = read_sets(paths[:1], names[:1], "train", "auto")
    assert [prompt.id for prompt in alone] == [f"toy:train:{i}" for i in range(3)]
    assert dataset_name(alone, 0) == ""
    with pytest.raises(ConfigError, match=r"--eval-data .*test.parquet is given twice"):
        dataset_names([paths[0], f"{paths[0]}/test.parquet"], "--eval-data")


def mixture_config(*weights: float, **options: Any) -> RunConfig:
    paths = tuple(WeightedPath(path=str(number), weight=weight) for number, weight in enumerate(weights))
    return RunConfig(data=Data(path=paths, **options), train=Train(seed=3))


def test_one_set_or_no_weights_take_the_cursor_of_one_dataset() -> None:
    prompts = [Prompt(str(i), (), "s", "", "math", "") for i in range(9)]
    joined = JoinedPrompts([prompts[:4], prompts[4:]], ["a", "b"])
    for some, weights in ((prompts, ()), (prompts, (2.0,)), (joined, ())):
        cursor = build_cursor(some, mixture_config(*weights))
        assert cursor.state() == PromptCursor(9, 3, True).state()
    assert isinstance(build_cursor(joined, mixture_config(2.0, 1.0)), MixedCursor)


def config_of(*texts: str, sets: tuple[str, ...] = ()) -> RunConfig:
    return resolve("grpo", {"model.path": "m", "data.path": data_sets(texts)}, sets).config


def test_flags_and_lists_give_paths_and_weights(tmp_path: Path) -> None:
    (odd := tmp_path / "a:2").mkdir()
    assert config_of("a").data.path == "a"
    assert (config_of("a", "b").data.paths, config_of("a", "b").data.weights) == (("a", "b"), ())
    two = config_of("a:2", "hub:b:0.5", sets=("data.mix=tokens",)).data
    assert (two.paths, two.weights, two.mix) == (("a", "hub:b"), (2.0, 0.5), "tokens")
    assert config_of(str(odd)).data.path == str(odd)
    weighed = config_of(f"{odd}:3", "c:1").data
    assert (weighed.paths, weighed.weights) == ((str(odd), "c"), (3.0, 1.0))
    listed = resolve("grpo", {}, ['data.path=["a", {path = "b:1"}]', 'evaluation.data=["c", "d"]']).config
    assert (listed.data.paths, listed.evaluation.paths) == (("a", "b:1"), ("c", "d"))
    assert resolve("grpo", {}, ["evaluation.data=c"]).config.evaluation.paths == ("c",)
    assert resolve("grpo", {}, []).config.evaluation.paths == ()


def test_the_configuration_of_a_mixture_is_read_back(tmp_path: Path) -> None:
    resolved = resolve("grpo", {"data.path": data_sets(["a:2", "b:1"]), "evaluation.data": ["c", "d"]}, [])
    (tmp_path / "config.toml").write_text(dump_toml(resolved))
    restored = read_run_config(tmp_path)
    assert restored.config == resolved.config
    assert restored.origins["data.path"] == "flag --data"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a:0", "b:1"], r"data\.path = .*weight = 0\.0.*\(flag --data\) must be a path, or a list of paths"),
        (["a:-1", "b:1"], r"weight = -1"),
        (["a:nan", "b:1"], r"must be a path, or a list"),
        (["a:inf", "b:1"], r"must be a path, or a list"),
        (["a:2", "b"], r"b has no weight, but others have one"),
    ],
)
def test_weights_that_are_none_are_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(RlcliError, match=message) as raised:
        config_of(*arguments)
    assert "\n" not in str(raised.value)


def test_a_unit_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.mix = tokens is the unit of weights, but data\.path has none"):
        config_of("a", "b", sets=("data.mix=tokens",))


def test_metrics_of_each_set_are_those_of_its_samples() -> None:
    verdicts = [
        Verdict(1.0, Outcome.OK),
        Verdict(0.0, Outcome.WRONG),
        Verdict(0.5, Outcome.OK),
        Verdict(0.0, Outcome.CRASH),
    ]
    reasons = ("stop", "stop", "stop", "length")
    samples = SampleTable.of(
        Sample(i // 2 + (i == 3), i % 2, 0, i, 4, 10 * (i + 1), reason, verdict, 1)  # type: ignore[arg-type]
        for i, (verdict, reason) in enumerate(zip(verdicts, reasons, strict=True))
    )
    counted = samples[:3]
    metrics = set_metrics(samples, counted, ["a", "b", "b"])
    assert {name: value for name, value in metrics.items() if value} == {
        "source/a/prompts": 1.0,
        "source/a/reward": 0.5,
        "source/a/pass@1": 0.5,
        "source/a/outcome/ok": 0.5,
        "source/a/outcome/wrong": 0.5,
        "source/a/response_tokens": 15.0,
        "source/b/prompts": 2.0,
        "source/b/reward": 0.5,
        "source/b/pass@1": 0.5,
        "source/b/outcome/ok": 0.5,
        "source/b/outcome/crash": 0.5,
        "source/b/response_tokens": 35.0,
        "source/b/truncated": 0.5,
    }
    assert set_metrics(samples, counted, ["", "", ""]) == {}
