"""The folder of an evaluation: samples kept, each once; settings that differ refused; what is missing found."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rlcli.data.sample_files import LogProbSummary, PartWriter, sample_row, write_samples
from rlcli.errors import ConfigError, DataError, RlcliError
from rlcli.evaluation import evaluation_settings as eval_settings
from rlcli.evaluation.evaluation_folder import EvalStore, dataset_names, read_samples
from rlcli.launch.evaluation.evaluation_run import Request, _names
from rlcli.types import Outcome, Prompt, Verdict

SETTINGS = {"model": "tiny", "temperature": 1.0}
PROMPTS = [
    Prompt(f"sums:test:{n}", ({"role": "user", "content": f"{n}?"},), "sums", "math", "exact", "1") for n in range(12)
]


def row(prompt: int, sample: int, response: str = "yes") -> dict[str, Any]:
    verdict = Verdict(1.0, Outcome.OK, "1", {"exact": 1.0, "format": 0.5})
    return sample_row(
        PROMPTS[prompt], sample, response, verdict, prompt_tokens=3, response_tokens=2, finish_reason="stop"
    )


def opened(
    path: Path, settings: dict[str, Any] = SETTINGS, mark: str = "a", force: bool = False
) -> AbstractContextManager[EvalStore]:
    return EvalStore.open(path, settings, {"sums": mark}, force)


def put(store: EvalStore, *rows: dict[str, Any]) -> None:
    writer = PartWriter(store.pattern("sums").replace("{rank}", "0"), 0)
    for row in rows:
        writer.add(row)
    writer.flush()


def keys(table: Any) -> list[tuple[str, int]]:
    return list(zip(table.column("prompt_id").to_pylist(), table.column("sample").to_pylist(), strict=True))


def test_samples_of_several_calls_are_there_once_and_in_order(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.samples("sums") is None
        put(store, row(10, 0), row(2, 1))
        first = store.pattern("sums")
        put(store, row(2, 0), row(2, 1, "again"))
        (tmp_path / "parts" / ".sums.0003.rank-0-000000.parquet.1.tmp").write_bytes(b"of a writer that was killed")
        assert first != store.pattern("sums")
        store.finish("sums")
        assert not (tmp_path / "parts").exists()
        put(store, row(1, -1))
    with opened(tmp_path) as store:
        expected = [("sums:test:1", -1), ("sums:test:2", 0), ("sums:test:2", 1), ("sums:test:10", 0)]
        assert keys(store.samples("sums")) == expected
        store.finish("sums")
        store.finish("sums")
        assert keys(read_samples(tmp_path / "sums.parquet")) == expected


def test_what_differs_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, row(0, 0))
    pattern = r"temperature = 1\.0, now 0\.5; dataset sums has different prompts; give another"
    with pytest.raises(ConfigError, match=pattern), opened(tmp_path, {**SETTINGS, "temperature": 0.5}, mark="b"):
        pass
    with opened(tmp_path) as store:
        assert len(store.samples("sums")) == 1
    with opened(tmp_path, {**SETTINGS, "temperature": 0.5}, force=True) as store:
        assert store.samples("sums") is None
    with opened(tmp_path, {**SETTINGS, "temperature": 0.5}) as store:
        put(store, row(0, 0))
    with opened(tmp_path, {**SETTINGS, "temperature": 0.5}, force=True) as store:
        assert len(store.samples("sums")) == 1  # there is nothing to throw away


def test_a_dataset_may_be_added(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, row(0, 0))
    with EvalStore.open(tmp_path, SETTINGS, {"more": "z"}) as store:
        assert len(store.samples("sums")) == 1
        assert store.samples("more") is None
    reopened = EvalStore.open(tmp_path, SETTINGS, {"more": "y", "sums": "a"})
    with pytest.raises(ConfigError, match="dataset more has different prompts"), reopened:
        pass


def test_force_throws_away_what_is_others_and_nothing_else(tmp_path: Path) -> None:
    datasets = {"sums": "a", "more": "z"}
    with EvalStore.open(tmp_path, SETTINGS, datasets) as store:
        put(store, row(0, 0))
        write_samples(tmp_path / "more.parquet", 0, [row(1, 0)])
    with EvalStore.open(tmp_path, SETTINGS, {"sums": "a", "more": "y"}, force=True) as store:
        assert store.holds("sums")
        assert not store.holds("more")


def test_killed_while_dropping_samples_it_keeps_none_as_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        put(store, row(0, 0))
        write_samples(tmp_path / "sums.parquet", 0, [row(1, 0)])
    unlink, removed = Path.unlink, list[Path]()

    def killed(self: Path, missing_ok: bool = False) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(self)
        unlink(self, missing_ok=missing_ok)

    other = {**SETTINGS, "temperature": 0.5}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt), opened(tmp_path, other, force=True):
            pass
    with pytest.raises(ConfigError, match="holds samples of another evaluation"), opened(tmp_path, other):
        pass
    with opened(tmp_path, other, force=True) as store:
        assert store.samples("sums") is None


def test_samples_of_which_nothing_is_known_are_refused_and_left(tmp_path: Path) -> None:
    write_samples(tmp_path / "sums.parquet", 0, [row(1, 0)])
    for force in (False, True):
        with pytest.raises(ConfigError, match="holds parquet files of unknown origin"), opened(tmp_path, force=force):
            pass
    assert (tmp_path / "sums.parquet").exists()
    assert not (tmp_path / "evaluation.json").exists()


def test_a_dataset_keeps_its_name_beside_another_of_that_name(tmp_path: Path) -> None:
    from rlcli.config.schema import RunConfig

    a, b = (_data(tmp_path / folder / "sums", folder) for folder in "ab")
    config = RunConfig()
    names, marks = _names(Request(config, (a,), out=tmp_path / "out"))
    assert names == ["sums"]
    with EvalStore.open(tmp_path / "out", SETTINGS, dict(zip(names, marks, strict=True))):
        pass
    assert _names(Request(config, (b, a), out=tmp_path / "out"))[0] == ["b-sums", "sums"]
    assert _names(Request(config, (b, a), out=tmp_path / "new"))[0] == ["b-sums", "a-sums"]


def _data(folder: Path, text: str) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    prompt = [{"role": "user", "content": text}]
    row = {"data_source": "s", "prompt": prompt, "reward_model": {"style": "exact", "ground_truth": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), folder / "test.parquet")
    return str(folder)


def test_two_evaluations_into_one_folder_are_kept_apart(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(RlcliError, match="in use by another evaluation"), opened(tmp_path):
        pass
    with opened(tmp_path):
        pass


def test_files_of_others_are_not_taken_for_parts(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, row(0, 0))
        (tmp_path / "parts" / "sums.0009.rank-0-000000.parquet.123.tmp").write_bytes(b"half")
        (tmp_path / "parts" / "sums.extra.0001.rank-0-000000.parquet").write_bytes(b"another dataset's")
        assert len(store.samples("sums")) == 1
        (tmp_path / "parts" / "sums.0001.rank-0-000009.parquet").write_bytes(b"damaged")
        with pytest.raises(DataError, match=r"000009\.parquet cannot be read as parquet: .*; remove it"):
            store.samples("sums")


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    contents = json.loads((tmp_path / "evaluation.json").read_text())
    for other in ({**contents, "format": 99}, {"format": 1}):
        (tmp_path / "evaluation.json").write_text(json.dumps(other))
        with pytest.raises(DataError, match="by another version"), opened(tmp_path):
            pass


def test_a_writer_waits_a_second_between_parts_and_longer_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("rlcli.data.sample_files.time.monotonic", lambda: now[0])
    folder = tmp_path / "{part} {n}"
    folder.mkdir()
    writer = PartWriter(str(folder / "{part}.parquet"), 0)

    def parts_after(seconds: float) -> int:
        now[0] += seconds
        writer.add(row(0, 0))
        return len(list(folder.iterdir()))

    assert [parts_after(0.5), parts_after(0.6), parts_after(0.9), parts_after(0.2)] == [0, 1, 1, 2]
    assert parts_after(1000.0) == 3
    assert [parts_after(5.0), parts_after(6.0)] == [3, 4]
    writer.flush()
    assert len(list(folder.iterdir())) == 4


def test_a_row_says_what_is_known_of_a_sample(tmp_path: Path) -> None:
    import numpy as np

    summary = LogProbSummary.of(np.array([-1.0, -3.0], np.float32))
    assert LogProbSummary.of(np.zeros(0)) is None
    detailed = row(0, 0) | {"mean_log_prob": summary and summary.mean, "min_log_prob": summary and summary.least}
    write_samples(tmp_path / "a.parquet", 7, [detailed, row(1, 0)])
    first, other = read_samples(tmp_path / "a.parquet").to_pylist()
    assert (first["step"], first["mean_log_prob"], first["min_log_prob"]) == (7, -2.0, -3.0)
    assert dict(first["parts"]) == {"exact": 1.0, "format": 0.5}
    assert other["mean_log_prob"] is None


def test_samples_of_another_version_are_read_or_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "a.parquet"
    write_samples(file, 7, [row(0, 0)])
    written = pq.read_table(file)

    def with_text(column: str) -> Any:
        return written.set_column(written.column_names.index(column), column, pa.array(["high"]))

    pq.write_table(with_text("verify_s").append_column("colour", pa.array(["red"])), file)
    (sample,) = read_samples(file).to_pylist()
    assert (sample["verify_s"], sample["step"], "colour" in sample) == (None, 7, False)
    pq.write_table(with_text("score"), file)
    with pytest.raises(DataError, match="is of another version: its column 'score' is string, not double"):
        read_samples(file)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["gsm8k"], ["gsm8k"]),
        (["data/gsm8k/test.parquet", "data/gsm8k/train.parquet"], ["gsm8k", "gsm8k-train"]),
        (["a/sums", "b/sums", "c"], ["a-sums", "b-sums", "c"]),
        (["a/x/sums", "b/x/sums"], ["a-x-sums", "b-x-sums"]),
        (["a/Sums", "b/sums"], ["a-Sums", "b-sums"]),
        (["mine (2).parquet"], ["mine-2"]),
    ],
)
def test_datasets_get_short_names_of_their_own(paths: list[str], names: list[str]) -> None:
    assert dataset_names(paths) == names


def test_a_dataset_given_twice_is_refused() -> None:
    for twice in ("./gsm8k", "gsm8k/test.parquet"):
        with pytest.raises(ConfigError, match=f"--data {twice} is given twice"):
            dataset_names(["gsm8k", twice])


def _rewrite(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (_rewrite("model.safetensors", b"\0" * 999_999 + b"\1"), True),
        (_rewrite("model.safetensors", b"\0" * 1_000_001), True),
        (_rewrite("chat_template.jinja", b"{{ other }}"), True),
        (_rewrite("README.md", b"words"), False),
    ],
)
def test_another_model_in_the_same_folder_is_seen(tmp_path: Path, change: Callable[[Path], object], seen: bool) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1_000_000)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }}")
    identity = eval_settings.local_model(str(tmp_path), "", "float32")
    assert eval_settings.local_model(str(tmp_path), "", "float32") == identity
    change(tmp_path)
    assert (eval_settings.local_model(str(tmp_path), "", "float32") != identity) is seen


def test_the_code_of_a_verifier_in_a_file_is_a_setting(tmp_path: Path) -> None:
    from rlcli.config.schema import RunConfig

    file = tmp_path / "mine.py"
    file.write_text("def verify(request): ...")
    prompts = [Prompt("a:0", (), "a", "", f"{file}:verify", "1")]
    original = eval_settings.settings_of_evaluation(RunConfig(), prompts, {})
    file.write_text("def verify(request): return None")
    edited = eval_settings.settings_of_evaluation(RunConfig(), prompts, {})
    assert {name for name in original if original[name] != edited[name]} == {f"the content of {file}"}


def test_the_keys_of_an_agents_row_are_settings_only_where_they_change_it() -> None:
    """A folder of before, whose settings have no such keys, can still be completed."""
    from rlcli.config.schema import RunConfig

    def environment(**values: Any) -> dict[str, Any]:
        config = RunConfig().changed(environment={"name": "python a.py", **values})
        return dict(eval_settings.settings_of_evaluation(config, [], {})["environment"])

    assert not environment(variables=("MY_KEY",)).keys() & {"variables", "ground_truth"}
    assert environment(ground_truth=True)["ground_truth"] is True


def test_the_chat_template_is_part_of_what_an_evaluation_was_made_with(tmp_path: Path) -> None:
    from rlcli.config.schema import RunConfig

    def marked(template: str, model: dict[str, str]) -> object:
        config = RunConfig().changed(model={"chat_template": template})
        return eval_settings.settings_of_evaluation(config, [], dict(model)).get("model.chat_template")

    file = tmp_path / "adapter" / "chat_template.jinja"
    file.parent.mkdir()
    file.write_text("{{ messages[0].content }}")
    original_mark = marked(str(file), {})
    file.write_text("{{ messages[0].content }}!")
    assert len({original_mark, marked(str(file), {}), marked("plain", {}), marked("chatml", {}), marked("", {})}) == 5
    assert marked("", {}) is None
    assert marked(str(file), {"adapter": str(file.parent)}) is None  # in the mark of the adapter
