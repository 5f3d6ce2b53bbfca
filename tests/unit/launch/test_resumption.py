"""Resumption of a run: truncated records, allowed changes, and refusals before a worker starts."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rlcli.config.changes import ALLOWED, SAME_VERIFIERS, Change, changes, origins_in, read_run_config
from rlcli.config.keys import keys
from rlcli.config.load import Resolved, dump_toml, resolve, with_length
from rlcli.data.columns import SampleTable
from rlcli.data.messages import PartialRollout
from rlcli.errors import CheckpointError, ConfigError, DataError, RlcliError, RunFailed
from rlcli.launch.input_files import InputRecord, local_inputs
from rlcli.launch.resume import Resumption, check_data, find_run, resumption, with_length_known
from rlcli.rollout.scheduler.group_checkpoint import groups_from_json, groups_to_json
from rlcli.rollout.scheduler.groups import Group, GroupState
from rlcli.runs.checkpoint import Checkpoints
from rlcli.runs.folder import RunFolder
from rlcli.runs.record_files import (
    amend,
    evaluated_steps,
    evaluations_of,
    judged_of,
    metrics_of,
    rewind,
    timeline_of,
)
from rlcli.support import reading
from rlcli.types import Outcome, Sample, Verdict

FLAGS: dict[str, object] = {"model.path": "tiny", "data.path": "sums", "train.steps": 8}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four steps out of eight, with a checkpoint after the second and an evaluation at every other step."""
    monkeypatch.chdir(tmp_path)
    with RunFolder.create(tmp_path / "runs" / "first") as folder:
        resolved = resolve("grpo", FLAGS, ["checkpoint.every=2"])
        folder.write_config(dump_toml(resolved))
        folder.write_inputs(InputRecord(local_inputs(resolved.config)).as_dict(), {})
        for step in range(5):
            metrics: dict[str, Any] = {"reward/mean": step / 10} if step else {}
            metrics |= {"eval/pass@1": 0.25} if step in (0, 2) else {}  # the evaluation at step 4 was cut short
            folder.append_metrics({"step": step, **metrics, "update/grad_norm": float("nan")})
            of_step = f"step-{step:06d}.rank-0" if step < 1 or step == 4 else f"step-{step:06d}/rank-0"
            for name in (
                f"{of_step}.parquet",
                f"{of_step}.round-2.parquet",
            ):  # older versions of rlcli had no folder for each step
                (folder.samples / name).parent.mkdir(exist_ok=True)
                (folder.samples / name).touch()
            if step % 2 == 0:
                (folder.evaluations / f"step-{step:06d}.json").write_text('{"headline": "pass@1"}')
        _checkpoint(folder.path, 2)
    return tmp_path / "runs" / "first"


def _checkpoint(run: Path, step: int) -> Path:
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    partial = checkpoints.begin(step)
    (partial / "policy").mkdir()
    return checkpoints.commit(step, {"step": step, "data": "abc"}, (run / "config.toml").read_text(), {}, {})


def resume(run: Path, recipe: str | None = None, flags: Mapping[str, object] | None = None, *sets: str) -> Resumption:
    return resumption(run, recipe, flags or {}, sets, lambda note: None)


def test_a_run_keeps_the_precision_that_auto_stood_for(run: Path) -> None:
    assert resume(run).resolved.config.model.dtype == "auto"  # its checkpoint does not record it
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    (checkpoints.begin(4) / "policy").mkdir()
    state = {"step": 4, "data": "abc", "dtype": "bfloat16"}
    checkpoints.commit(4, state, (run / "config.toml").read_text(), {}, {})
    resumed = resume(run)
    assert resumed.resolved.config.model.dtype == "bfloat16"
    assert not resumed.changed


def test_the_record_is_cut_back_to_the_end_of_a_step(run: Path) -> None:
    rewind(run, 2)
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2]
    assert metrics_of(run)[1]["nonfinite"] == {"update/grad_norm": "nan"}
    assert {path.name[:11] for path in (run / "samples").iterdir()} == {"step-000000", "step-000001", "step-000002"}
    assert sorted(evaluations_of(run)) == [0, 2]
    rewind(run, 0, sampled=1)
    assert {path.name[:11] for path in (run / "samples").iterdir()} == {"step-000000", "step-000001"}
    rewind(run, -1)
    assert metrics_of(run) == []
    assert list((run / "samples").iterdir()) == list((run / "evaluations").iterdir()) == []


def test_what_viewers_read_is_cut_back_with_the_samples(run: Path) -> None:
    lines = [json.dumps({"step": step, "start": 0.0, "lanes": []}) + "\n" for step in (1, 2, 3)]
    (run / "timeline.jsonl").write_text("".join(lines) + '{"step": 4, "sta')
    (run / "prompts.jsonl").write_text("".join(lines))
    of_training = ("advantages.parquet", "tokens-0.parquet", ".advantages.parquet.7.tmp", ".tokens-1.parquet.7.tmp")
    for step in (1, 2, 3):
        for name in of_training:
            (run / "samples" / f"step-{step:06d}" / name).touch()
    rewind(run, 1, sampled=2)
    assert [line["step"] for line in timeline_of(run)] == [line["step"] for line in judged_of(run)] == [1]
    assert {path.name for path in (run / "samples" / "step-000001").iterdir()} > set(of_training)
    files = {path.name for path in (run / "samples" / "step-000002").iterdir()}
    assert files == {"rank-0.parquet", "rank-0.round-2.parquet"}, "sampled, and to be trained on again"
    assert not (run / "samples" / "step-000003").exists()


def test_a_line_that_a_kill_cut_off_is_as_if_it_were_not_there(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4]
    rewind(run, 9)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5


def test_an_evaluation_that_came_late_joins_the_line_of_its_step(run: Path) -> None:
    metrics = metrics_of(run)
    amend(run, 4, {"eval/pass@1": 0.5})
    assert metrics_of(run) == [*metrics[:4], metrics[4] | {"eval/pass@1": 0.5}]
    assert evaluated_steps(run) == {0, 2, 4}


def test_what_an_evaluation_that_was_cut_short_has_left_goes(run: Path) -> None:
    partial_files = [
        run / "evaluations" / name for name in ("step-000004.rank-1.parquet", "step-000004/rank-0.parquet")
    ]
    partial_files.append(run / "evaluations" / "step-000004" / ".rank-1.parquet.7.tmp")
    partial_files[1].parent.mkdir()
    for file in partial_files:
        file.touch()
    (run / "evaluations" / "step-000004-at-another-temperature").mkdir()  # made by the user
    assert evaluated_steps(run) == {0, 2}, "reports of evaluations that no line tells of do not count"
    rewind(run, 4)
    assert not any(file.exists() for file in partial_files)
    assert not partial_files[1].parent.exists()
    assert sorted(evaluations_of(run)) == [0, 2]
    assert len(metrics_of(run)) == 5
    assert (run / "evaluations" / "step-000004-at-another-temperature").is_dir()


def test_a_record_that_cannot_be_read_is_not_taken_for_empty(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reading.opened

    def opened(path: Path, **options: Any) -> Any:
        if path.name == "metrics.jsonl":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, **options)

    content = (run / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(reading, "opened", opened)
        with pytest.raises(RunFailed, match=r"metrics\.jsonl: Input/output error; free some space"):
            rewind(run, 2)
        with pytest.raises(RunFailed, match=r"metrics\.jsonl: Input/output error"):
            amend(run, 4, {"eval/pass@1": 0.5})
    assert (run / "metrics.jsonl").read_bytes() == content
    assert len(list((run / "samples").rglob("*.parquet"))) == 10


def test_a_run_goes_on_with_its_own_configuration(run: Path) -> None:
    resumed = resume(run)
    assert (resumed.step, resumed.changed, resumed.nothing_to_do) == (2, False, False)
    assert resumed.resolved.values() == resolve("grpo", FLAGS, ["checkpoint.every=2"]).values()
    assert resumed.resolved.origins == resolve("grpo", FLAGS, ["checkpoint.every=2"]).origins
    assert dump_toml(resumed.resolved) == (run / "config.toml").read_text()


def test_the_command_that_began_a_run_goes_on_with_it(run: Path) -> None:
    assert not resume(run, "grpo", FLAGS, "checkpoint.every=2").changed


def test_changes_that_only_extend_or_round_are_made_and_said(run: Path) -> None:
    notes: list[str] = []
    resumed = resumption(run, None, {"train.steps": 12, "cluster.workers": 2}, ["checkpoint.keep=5"], notes.append)
    assert resumed.resolved.config.train.steps == 12
    assert resumed.resolved.origins["train.steps"] == "flag --steps"
    assert resumed.resolved.origins["checkpoint.every"] == "--set"
    assert notes == [
        "checkpoint.keep: was 2, is 5",
        "cluster.workers: was 1, is 2 (from here on results agree to rounding, not bitwise)",
        "train.steps: was 8, is 12 (the run's length changes)",
        "resuming from step-000002",
    ]


def test_a_learning_rate_that_follows_the_length_is_told_of(run: Path) -> None:
    config = resolve("grpo", FLAGS, ["train.schedule=cosine"])
    (run / "config.toml").write_text(dump_toml(config))
    notes: list[str] = []
    resumption(run, None, {"train.steps": 12}, [], notes.append)
    assert "train.schedule = cosine: the learning rate follows the new length from here on" in notes


def test_a_length_in_epochs_is_compared_once_it_is_counted(run: Path) -> None:
    def counted(*sets: str) -> Resumption:
        resumed = resume(run, None, {}, *sets)
        assert not resumed.nothing_to_do
        assert not resumed.changed
        return with_length_known(resumed, with_length(resumed.resolved, 128), notes.append)

    notes: list[str] = []
    longer = counted("train.epochs=3")  # of 128 prompts, 32 a step
    assert (longer.resolved.config.train.steps, longer.changed) == (12, True)
    assert notes == ["train.steps: was 8, is 12 (the run's length changes)"]
    assert not counted("train.epochs=2").changed
    assert counted("train.epochs=0.5").nothing_to_do
    with pytest.raises(ConfigError, match=r"changed train\.warmup_steps: was 0, is 6"):
        counted("train.epochs=3", "train.warmup_fraction=0.5")


def test_another_version_of_what_computes_is_told_of(run: Path) -> None:
    file = run / "environment.json"
    environment = json.loads(file.read_text())
    environment["packages"] |= {"torch": "1.0", "ray": "1.0"}
    file.write_text(json.dumps(environment))
    notes: list[str] = []
    resumption(run, None, {}, [], notes.append)
    assert [note for note in notes if ": was " in note] == [
        f"torch: was 1.0, is {version('torch')} (from here on results agree to rounding, not bitwise)"
    ]


def test_changes_of_what_is_learnt_are_refused_all_at_once(run: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resume(run, None, {"train.seed": 3, "train.steps": 12}, "train.lr=0.5", "algorithm.loss=gspo")
    assert 'algorithm.loss: was "ppo", is "gspo"; train.lr: was 1e-06, is 0.5; train.seed: was 0, is 3' in str(
        refused.value
    )
    assert "train.steps" not in str(refused.value)
    assert f"rlcli train … --model {run}" in str(refused.value)


def test_a_verifier_that_rows_named_may_be_named_instead(run: Path) -> None:
    assert Change("verifier.name", "auto", "code(timeout_s=8)").effect == SAME_VERIFIERS
    assert Change("verifier.name", "math", "auto").effect is None
    assert resume(run, None, {"verifier.name": "gsm8k"}).changed


def test_data_may_move_and_a_model_may_by_a_link(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    resumed = resumption(run, None, {"data.path": "elsewhere"}, ["evaluation.max_prompts=4"], notes.append)
    assert resumed.resolved.config.data.path == "elsewhere"
    assert notes[:2] == [
        'data.path: was "sums", is "elsewhere" (if the prompts are the same, which is checked once they are read)',
        "evaluation.max_prompts: was 0, is 4 (evaluations before and after cannot be compared)",
    ]
    with pytest.raises(ConfigError, match=r"model\.path: was .*; if a folder has moved, put a link at its old path"):
        resume(run, None, {"model.path": "elsewhere"})


def test_another_recipe_is_another_run(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage: was \"grpo\", is "):
        resume(run, "dr_grpo", FLAGS)


def test_every_pattern_of_what_may_change_names_a_key() -> None:
    from fnmatch import fnmatchcase

    patterns = " ".join(ALLOWED.values()).split()
    assert [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in keys())] == []


def test_a_relative_path_counts_from_where_the_run_was_started(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent.parent / "sums").mkdir()
    monkeypatch.chdir(run)
    assert not resume(run, None, {"data.path": "../../sums"}).changed
    assert Path.cwd() == run.parent.parent


def test_options_of_an_algorithm_are_compared_too(tmp_path: Path) -> None:
    plain = resolve("cispo", FLAGS)
    (tmp_path / "config.toml").write_text(dump_toml(plain))
    now: Resolved = read_run_config(tmp_path, {}, ["algorithm.options.spare=1"])
    (change,) = changes(read_run_config(tmp_path), now, tmp_path)
    assert (change.key, change.was, change.now, change.effect) == ("algorithm.options.spare", None, 1, None)


def test_origins_are_read_back_whatever_the_values_hold() -> None:
    config = resolve("grpo", {"model.path": "a  # b"}, ["verifier.name=math  # 1"])
    origins = origins_in(dump_toml(config))
    assert origins == {key: origin for key, origin in config.origins.items() if origin != "default"}


def test_nothing_is_left_to_do_in_a_run_that_is_done(run: Path) -> None:
    _checkpoint(run, 8)
    modified_at = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name not in (".lock", ".place")}
    assert resume(run).nothing_to_do
    assert not resume(run, None, {"train.steps": 9}).nothing_to_do
    assert not resume(run, None, {"evaluation.data": "sums"}).nothing_to_do, "the last evaluation is owed"
    assert {path: path.stat().st_mtime_ns for path in modified_at} == modified_at


def test_a_run_without_a_checkpoint_begins_again(run: Path) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    checkpoint.rename(run / "elsewhere")
    (run / "checkpoints" / "latest").unlink()
    notes: list[str] = []
    resumed = resumption(run, None, {}, [], notes.append)
    assert (resumed.checkpoint, resumed.step) == (None, 0)
    assert notes == ["no checkpoint yet: the run starts over"]


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(run: Path) -> None:
    (run / "checkpoints" / "step-000002").rename(run / "elsewhere")
    with RunFolder.resume(run) as folder:
        folder.event("checkpoint", step=2, path="checkpoints/step-000002")
    with pytest.raises(CheckpointError, match=r"had checkpoints, the last at step 2, but .* has none; restore"):
        resume(run)
    (run / "elsewhere").rename(run / "checkpoints" / "step-000002")
    assert resume(run).step == 2


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_taken(run: Path) -> None:
    newer = _checkpoint(run, 4)
    (newer / "state.json").write_text("{}")
    notes: list[str] = []
    assert resumption(run, None, {}, [], notes.append).step == 2
    assert any("step-000004 is damaged" in note for note in notes)


def test_a_run_is_not_begun_again_over_checkpoints_of_which_none_is_sound(run: Path) -> None:
    (run / "checkpoints" / "step-000002" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint of .*first is intact"):
        resume(run)


def test_what_is_no_run_and_what_is_alive_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RlcliError, match=r"elsewhere is not a run: no such folder; .*rlcli runs list"):
        resume(tmp_path / "elsewhere")
    with pytest.raises(RlcliError, match=r"is not a run: it has no config\.toml"):
        resume(tmp_path)
    with pytest.raises(RlcliError, match=r"latest is a checkpoint; name its run: .*runs/first"):
        resume(run / "checkpoints" / "latest")
    with RunFolder.resume(run), pytest.raises(RlcliError, match=r"in use by process \d+ .*; stop it first"):
        resume(run)


def test_a_run_is_found_by_its_name(run: Path) -> None:
    assert find_run("first") == find_run(run) == run.resolve()


def test_other_prompts_than_those_of_the_run_are_refused(run: Path) -> None:
    check_data(resume(run), "abc")
    with pytest.raises(DataError, match="the prompts are not those that the run started with"):
        check_data(resume(run), "abd")


def test_samples_that_wait_come_back_from_a_checkpoint_as_they_were() -> None:
    def group(prompt: int, shards: list[str], baseline: Verdict | None, **known: Any) -> Group:
        verdict = Verdict(0.1 + 0.2, Outcome.WRONG, "7", {"math": 0.3}, "why", 0.25)
        samples = SampleTable.of(Sample(prompt, i, i % len(shards), i, 5, 6, "stop", verdict, 3) for i in range(2))
        return Group(7, samples=samples, shards=shards, baseline=baseline, **known)

    complete = {"state": GroupState.COMPLETE}
    aborted = [PartialRollout(3, 2, 0, 5, 17, 1), PartialRollout(3, 3, 1, 6, 18, 2)]
    groups = [
        group(3, ["a"], None, **complete),
        group(5, ["b"], Verdict(1.0, Outcome.OK), **complete),
        group(6, ["c", "a"], None, prompt_index=9, first_sample=4, partial=aborted),
        Group(7, prompt_index=2),
    ]
    data, shards = groups_to_json(groups)
    assert shards == ["a", "b", "c"]
    restored = groups_from_json(json.loads(json.dumps(data)), shards)
    assert [(g.baseline, g.step) for g in restored] == [(g.baseline, g.step) for g in groups]
    assert [[s.verdict for s in g.samples] for g in restored] == [[s.verdict for s in g.samples] for g in groups]

    def comparable(group: Group) -> Any:
        samples = [(s.sample, group.shards[s.shard], s.row, s.version) for s in group.samples]
        partial = [
            (rollout.sample, group.shards[rollout.shard], rollout.row, rollout.tokens, rollout.version)
            for rollout in group.partial
        ]
        return samples, group.state, group.prompt_index, group.first_sample, partial

    assert [comparable(g) for g in restored] == [comparable(g) for g in groups]
