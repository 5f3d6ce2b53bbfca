"""Queries: the samples that match a filter, page by page, and the details of a group, a sample and a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rlcli_inspect.report import page_api as answers
from rlcli_inspect.report import sample_queries
from rlcli_inspect.report.overview import evaluations
from rlcli_inspect.report.page_api import Api

from rlcli.errors import RlcliError
from rlcli.runs.folder import add_event
from rlcli.runs.run_data import RunData
from tests.report_runs import Settings, write_run, write_step


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Api:
    return Api([RunData(write_run(tmp_path_factory.mktemp("runs") / "sums", steps=6, tools=True))])


def pages_of(api: Api, filters: dict[str, str]) -> list[dict[str, Any]]:
    """All rows, page by page."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = api.answer("samples", filters | {"cursor": cursor})
        rows, cursor = rows + page["rows"], page["cursor"]
    return rows


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({}, 72),
        ({"first": "2", "last": "3"}, 24),
        ({"first": "1", "last": "1", "high": "0"}, 9),
        ({"low": "1", "first": "6"}, 12),
        ({"outcome": "wrong"}, 27),
        ({"finish_reason": "length"}, 15),
        ({"left_out": "1"}, 15),
        ({"tokens": "1"}, 12),
        ({"shortest": "9", "longest": "9", "first": "6"}, 12),
        ({"prompt_id": "sums/0", "oldest": "1"}, 12),
        ({"kind": "evaluations", "first": "3"}, 10),
        ({"text": "2 PLUS 1 IS 3."}, 6),
        ({"text": "i compute"}, 72),
        ({"text": "no such"}, 0),
    ],
)
def test_a_filter_finds_every_sample_once(api: Api, filters: dict[str, str], count: int) -> None:
    rows = pages_of(api, filters)
    assert len(rows) == len({(row["step"], row["prompt_id"], row["sample"]) for row in rows}) == count
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps, reverse=not filters.get("oldest"))


def test_a_search_without_time_stops_at_a_step_and_continues(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_queries, "ANSWER_S", -1.0)
    page = api.answer("samples", {"text": "no such"})
    assert (page["rows"], page["cursor"], page["searched"], page["steps"]) == ([], "5.0", 1, 6)
    assert len(pages_of(api, {"outcome": "wrong"})) == 27
    visits, cursor = [], ""
    while cursor is not None:
        page = api.answer("prompt", {"prompt": "sums/0", "cursor": cursor})
        visits, cursor = visits + page["visits"], page["cursor"]
    assert visits == [(1, 0, 4, 1, 0.25), (3, 0, 4, 2, 0.5), (5, 0, 4, 3, 0.75)]


def test_a_search_reads_texts_only_of_steps_with_candidates(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, tuple[str, ...]]] = []
    table = RunData.table

    def reading(self: RunData, step: int, columns: Any, kind: Any = "samples") -> Any:
        read.append((step, tuple(columns)))
        return table(self, step, columns, kind)

    monkeypatch.setattr(RunData, "table", reading)
    api.answer("samples", {"finish_reason": "length", "text": "no such"})
    assert {step for step, columns in read if "response" in columns} == {1, 2, 3, 4, 5}
    assert (6, ("finish_reason",)) in read


def test_a_row_of_a_list_has_excerpts_around_what_was_searched(tmp_path: Path) -> None:
    long = "a" * 5000 + " Needle " + "b" * 5000
    api = Api([RunData(write_run(tmp_path / "run", steps=1, texts={(1, 0, 0): long}))])
    (row,) = api.answer("samples", {"text": "needle"})["rows"]
    assert " Needle " in row["response"]
    assert len(row["response"]) < 300


def test_a_group_has_advantages_and_the_prompt_once(api: Api) -> None:
    group = api.answer("group", {"step": "1", "prompt": "sums/1"})
    assert [message["role"] for message in group["messages"]] == ["system", "user"]
    assert [row["sample"] for row in group["rows"]] == [0, 1, 2, 3]
    assert group["previous"] == {"prompt": "sums/0", "group": 0}
    assert group["next"] == {"prompt": "sums/2", "group": 2}
    assert api.answer("group", {"step": "1", "prompt": "sums/0"})["previous"] is None
    assert [row["advantage"] for row in group["rows"]] == [0.75, -0.25, -0.25, None]
    assert group["rows"][3]["left_out"] == "truncated"
    assert [message["role"] for message in group["rows"][0]["said"]] == ["assistant", "tool", "assistant"]


def test_a_sample_has_its_tokens_and_its_neighbours(api: Api) -> None:
    sample = api.answer("sample", {"step": "1", "prompt": "sums/0", "sample": "1"})
    assert sample["samples"] == [0, 1, 2, 3]
    assert sample["turn_rewards"] == [0.0, 0.0]
    assert sample["token_columns"]["drawn"].count(False) == 3
    assert api.answer("sample", {"step": "1", "prompt": "sums/0", "sample": "2"})["token_columns"] is None


def test_only_the_last_turns_are_what_the_policy_drew(tmp_path: Path) -> None:
    api = Api([RunData(write_run(tmp_path / "run", steps=1))])
    path = tmp_path / "run" / "samples" / "step-000001" / "rank-0.parquet"
    rows = pq.read_table(path).to_pylist()
    shown = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows[0]["messages"] = json.dumps(
        [*shown, {"role": "user", "content": "2+1"}, {"role": "assistant", "content": "3"}]
    )
    pq.write_table(pq.read_table(path).from_pylist(rows, schema=pq.read_schema(path)), path)
    sample = api.answer("sample", {"step": "1", "prompt": "sums/0"})
    assert [message["content"] for message in sample["messages"]] == ["1+1", "2", "2+1"]
    assert [message["content"] for message in sample["said"]] == ["3"]


def test_an_older_run_shows_its_prompt_and_response(tmp_path: Path) -> None:
    api = Api([RunData(write_run(tmp_path / "run", steps=1, older=True))])
    sample = api.answer("sample", {"step": "1", "prompt": "sums/0"})
    assert [message["content"] for message in (*sample["messages"], *sample["said"])] == [
        "What is 2+1?",
        "2 plus 1 is 3. The answer is #### 3",
    ]
    assert (sample["advantage"], sample["token_columns"]) == (None, None)
    assert len(pages_of(api, {"text": "plus 1"})) == 4


@pytest.mark.parametrize(
    ("page", "query", "message"),
    [
        ("nothing", {}, "no such page: 'nothing'"),
        ("overview", {"run": "3"}, "no run 3"),
        ("overview", {"run": "x"}, "run is 'x'; give a whole number"),
        ("samples", {"low": "much"}, "low is 'much'; give a number"),
        ("samples", {"cursor": "here"}, "the cursor 'here' is not STEP.ROW"),
        ("group", {"step": "99", "prompt": "p"}, "step 99 has no samples of the prompt p"),
        ("sample", {"step": "1", "prompt": "sums/0", "sample": "9"}, "step 1 has no sample 9"),
        ("time", {"step": "99"}, "step 99 has no times"),
    ],
)
def test_what_does_not_exist_is_one_line(api: Api, page: str, query: dict[str, str], message: str) -> None:
    with pytest.raises(RlcliError, match=message.replace(".", r"\.")):
        api.answer(page, query)


def test_the_overview_has_curves_evaluations_and_changes(api: Api) -> None:
    overview = api.answer("overview", {})
    assert (overview["state"], overview["step"], overview["steps"], overview["first_reward"], overview["reward"]) == (
        ("finished", 6, 6, 0.25, 1.0)
    )
    curves = {curve["title"]: curve for curve in overview["curves"]}
    assert curves["Reward"]["series"][0]["points"][1] == [0.25, 0.5, 0.5, 0.75, 0.75, 1.0]
    assert "KL to the reference" not in curves
    assert overview["evaluations"][-1]["measures"]["pass@1"]["low"] == pytest.approx(0.8)
    changed = {row["key"]: (row["value"], row["recipe"]) for row in overview["config"] if row.get("changed")}
    assert changed["train.steps"] == ("6", "100")
    assert "train.seed" not in changed
    assert overview["phases"]["seconds"]["generate"] == 1.0
    assert api.answer("series", {"names": "update/lr,none"}) == {
        "update/lr": [[1, 2, 3, 4, 5, 6], [1e-6] * 6],
        "none": [[], []],
    }


def test_curves_are_marked_where_files_changed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Settings(steps=4))
    assert Api([RunData(folder)]).answer("overview", {})["marks"] == []
    add_event(folder, "inputs_changed", step=2, text="has changed", files=[{"path": "/home/ann/mine.py"}, 7])
    add_event(folder, "inputs_changed", step=3, text="edited by hand", files="?")
    overview = Api([RunData(folder)]).answer("overview", {})
    marks = {2.5: "mine.py changed after step 2", 3.5: "a file changed after step 3"}
    assert {mark["x"]: mark["label"] for mark in overview["marks"]} == marks
    assert [event["text"] for event in overview["events"][-2:]] == ["has changed", "edited by hand"]


def test_news_of_a_live_run_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Settings(steps=1, alive=True))
    api = Api([RunData(folder)])
    first = api.answer("state", {})
    assert api.answer("state", {}) == first
    write_step(folder, Settings(steps=3, alive=True), 2)
    second = api.answer("state", {})
    assert second["news"] > first["news"]
    assert second["runs"][0]["samples"] == [2, 1, 2]


def test_runs_of_equal_names_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "run", steps=1) for name in ("a", "b")]
    assert Api([RunData(folder) for folder in folders]).names == ["a/run", "b/run"]
    assert Api([RunData(folders[0])] * 2).names == ["a/run (1)", "a/run (2)"]


def test_spans_that_are_none_are_left_out() -> None:
    line = {"lanes": [{"name": 1, "spans": [["a", 0, 1.5], ["b", None, 1], "c", ["d", 0, 1e999]]}, 5, {"spans": None}]}
    assert answers.lanes_of(line) == [{"name": "1", "spans": [["a", 0.0, 1.5]]}]
    assert answers.lanes_of({"lanes": "no"}) == []


def test_a_prompt_that_occurs_twice_in_a_step_has_two_groups(tmp_path: Path) -> None:
    api = Api([RunData(write_run(tmp_path / "run", steps=1, prompts=3, dataset=2))])
    groups = [api.answer("group", {"step": "1", "prompt": "sums/0", "group": number}) for number in ("0", "2")]
    assert [len(group["rows"]) for group in groups] == [4, 4]
    assert api.answer("group", {"step": "1", "prompt": "sums/0"})["group"] == 0
    assert api.answer("sample", {"step": "1", "prompt": "sums/0", "group": "2", "sample": "1"})["group"] == 2
    assert [visit[1] for visit in api.answer("prompt", {"prompt": "sums/0"})["visits"]] == [0, 2]


def test_the_mean_score_of_an_evaluation_stands_beside_its_pass_rate() -> None:
    class Run:
        def evaluations(self) -> dict[int, dict[str, object]]:
            interval = {"mean": 0.5, "low": 0.4, "high": 0.6}
            kinds = {"pass": ("pass@1", "pass@4"), "maj": ("maj@4",), "mean": ("mean@1", "mean@4")}
            return {7: {"prompts": 3, **{kind: dict.fromkeys(names, interval) for kind, names in kinds.items()}}}

    (evaluation,) = evaluations(Run())  # type: ignore[arg-type]
    assert (evaluation["step"], evaluation["prompts"]) == (7, 3)
    assert list(evaluation["measures"]) == ["pass@1", "mean@1", "pass@4", "maj@4"]
