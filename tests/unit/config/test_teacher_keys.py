"""The assignment of teachers to rows, and configurations that are refused before anything is read."""

from __future__ import annotations

import pytest

from rlcli.config.load import resolve
from rlcli.errors import ConfigError

CODE = '{path = "a", sources = ["mbpp", "code"]}'
SERVED = "teacher.path=http://host:8000"
MATH = '{path = "b", sources = ["math"]}'


def test_a_data_source_has_the_teacher_that_names_it_or_that_of_the_rest() -> None:
    teacher = resolve("opd", {}, [f'teacher.path=[{CODE}, "rest", {MATH}]']).config.teacher
    assert [model.path for model in teacher.models] == ["a", "rest", "b"]
    assert [teacher.number_of(source) for source in ("code", "math", "chess")] == [0, 2, 1]
    assert resolve("opd", {}, [f"teacher.path=[{CODE}, {MATH}]"]).config.teacher.number_of("chess") is None
    assert resolve("opd").config.teacher.models == ()


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([f"teacher.path=[{CODE}, {CODE}]"], "two teachers name the data source 'mbpp'"),
        (['teacher.path=["a", {path = "b"}]'], "a and b name no sources, so both would teach all rows"),
        (['teacher.path=[{path = "a", source = ["x"]}]'], "must be a path, a URL, or a list of {path"),
        (["teacher.top_k=4"], "teacher.top_k = 4: no teacher.path is given"),
        (["teacher.workers=1"], "teacher.workers = 1: no teacher.path is given"),
        ([SERVED, "teacher.workers=1"], "teacher.workers = 1, but servers score for all teachers; give workers = 0"),
        ([SERVED, "rollout.temperature=0.7"], "a server scores at temperature 1, and rollout.temperature = 0.7"),
        ([SERVED, "parallel.context=2", "cluster.workers=2"], "and parallel.context = 2 divides them; give 1"),
        (["teacher.path=a", "teacher.top_k=2000"], "teacher.top_k = 2000 (--set) must be a whole number"),
    ],
)
def test_what_does_not_fit_is_refused(sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("opd", {}, sets)
    assert says in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
