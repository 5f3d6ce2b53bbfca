"""Files that a run reads by path: their list, changes at resumption, and their copies in the run folder."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.config.keys import sections
from rlcli.config.load import dump_toml, resolve
from rlcli.config.schema import RunConfig
from rlcli.errors import CheckpointError, ConfigError, DataError
from rlcli.launch import input_files
from rlcli.launch.input_files import (
    NOT_READ,
    READ_BY_PATH,
    Input,
    InputRecord,
    InputWatch,
    compare,
    copies,
    digest_of,
    hub_models,
    local_inputs,
)
from rlcli.launch.launch import _record_inputs
from rlcli.launch.local_imports import module_file, with_local_imports
from rlcli.launch.resume import Resumption, check_data, resumption, with_downloads
from rlcli.runs.checkpoint import Checkpoints
from rlcli.runs.curve_marks import marks_of
from rlcli.runs.folder import RunFolder, events_of

PAGE = Path(__file__).parents[3] / "docs" / "resume.md"
SETS = [
    "verifier.name='mine.py:reward + 0.5 * judge(serve=judge)'",
    "environment.name=world.py:World",
    "environment.options.corpus=corpus.jsonl",
    "environment.options.factory=game.py:Game",
    "algorithm.code=loss.py",
    "model.chat_template=turns.jinja",
    "critic.path=critic",
    "teacher.path=teacher",
    "evaluation.data=held-out",
]
STEP = 2


def write_parquet(file: Path, questions: list[str], metadata: str = "") -> None:
    file.parent.mkdir(exist_ok=True)
    table = pa.table({"prompt": questions}).replace_schema_metadata({"rlcli_provenance": metadata})
    pq.write_table(table, file, row_group_size=1 if metadata else 100)


def write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(bytes(100_000))
    (folder / "README.md").write_text("not read")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with each kind of file that a run can read by path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import helpers\nfrom tools.text import words\ndef reward(request): return 0.0\n")
    (tmp_path / "helpers.py").write_text("import json\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "text.py").write_text("from . import deeper\n")
    (tmp_path / "tools" / "deeper.py").write_text("words = 1\n")
    (tmp_path / "json.py").write_text("the standard library's comes first")
    (tmp_path / "other.py").write_text("nothing imports this")
    for name in ("world.py", "game.py", "loss.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "corpus.jsonl").write_text("{}\n")
    (tmp_path / "turns.jinja").write_text("{{ messages }}")
    for name in ("policy", "critic", "teacher", "judge"):
        write_model(tmp_path / name)
    write_parquet(tmp_path / "sums" / "train.parquet", ["1+1"])
    write_parquet(tmp_path / "held-out" / "test.parquet", ["2+2", "3+3"])
    return tmp_path


@pytest.fixture
def run(project: Path) -> Path:
    """A run in the project's folder, with a checkpoint after step 2."""
    resolved = resolve("grpo", {"model.path": "policy", "data.path": "sums", "train.steps": 8}, SETS)
    with RunFolder.create(project / "runs" / "first") as folder:
        folder.write_config(dump_toml(resolved))
        _record_inputs(folder, input_files.InputCheck(local_inputs(resolved.config)), 0)
        checkpoints = Checkpoints(folder.checkpoints, keep=2)
        (checkpoints.begin(STEP) / "policy").mkdir()
        checkpoints.commit(STEP, {"step": STEP, "data": "abc"}, dump_toml(resolved), {}, {})
    return folder.path


def resume(run: Path, *, accept: bool = False, notes: list[str] | None = None, **flags: object) -> Resumption:
    on_note = (lambda note: None) if notes is None else notes.append
    return resumption(run, None, flags, [], on_note, accept_changes=accept)


CHANGES: dict[str, tuple[str, str]] = {
    "reward": ("mine.py", "verifier.name"),
    "module beside the reward": ("helpers.py", "verifier.name"),
    "module of a package beside the reward": ("tools/deeper.py", "verifier.name"),
    "model that a verifier serves": ("judge/config.json", "verifier.name"),
    "environment": ("world.py", "environment.name"),
    "file of an environment's option": ("corpus.jsonl", "environment.options"),
    "code of an environment's option": ("game.py", "environment.options"),
    "algorithm": ("loss.py", "algorithm.code"),
    "chat template": ("policy/chat_template.jinja", "model.path"),
    "template beside the model": ("turns.jinja", "model.chat_template"),
    "weights": ("policy/model.safetensors", "model.path"),
    "critic": ("critic/config.json", "critic.path"),
    "teacher": ("teacher/chat_template.jinja", "teacher.path"),
}


@pytest.mark.parametrize(("name", "key"), CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_refused_with_both_versions(run: Path, project: Path, name: str, key: str) -> None:
    file = project / name
    was = digest_of(file)[:12]
    file.write_bytes(file.read_bytes()[:-1] + b"#")
    with pytest.raises(ConfigError) as refused:
        resume(run)
    text = str(refused.value)
    assert refused.value.exit_code == 2
    assert f"cannot resume from step 2: {file} ({key}) has changed: was {was}, is {digest_of(file)[:12]}; " in text
    assert "--accept-changes" in text
    assert "\n" not in text


@pytest.mark.parametrize("name", ["mine.py", "held-out/test.parquet", "policy/chat_template.jinja", "corpus.jsonl"])
def test_a_file_that_is_gone_is_refused_by_name(run: Path, project: Path, name: str) -> None:
    (project / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name} \([a-z.]+\) is gone: was [0-9a-f]{{12}}; restore it"):
        resume(run)


def test_a_file_that_cannot_be_read_is_refused_by_name(run: Path, project: Path) -> None:
    (project / "mine.py").unlink()
    os.mkfifo(project / "mine.py")
    with pytest.raises(ConfigError, match=r"mine\.py \(verifier\.name\) is a named pipe, not a regular file: was "):
        resume(run)
    (project / "mine.py").unlink()
    (project / "held-out" / "test.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"test\.parquet \(evaluation\.data\) cannot be read \(.+\): was "):
        resume(run)


def test_the_copy_of_the_old_file_is_named(run: Path, project: Path) -> None:
    text = (project / "mine.py").read_text()
    (project / "mine.py").write_text("def reward(request): return 1.0\n")
    with pytest.raises(ConfigError) as refused:
        resume(run)
    copy = Path(refused.value.hint.partition("(a copy: ")[2].partition(")")[0])
    assert copy.parent == run / "sources"
    assert copy.read_text() == text


def test_a_template_that_appears_is_a_change(run: Path, project: Path) -> None:
    (project / "policy" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    with pytest.raises(ConfigError, match=r"policy/tokenizer_config\.json \(model\.path\) is new: [0-9a-f]{12};"):
        resume(run)


def test_all_changes_are_named_at_once(run: Path, project: Path) -> None:
    for name in ("mine.py", "world.py"):
        (project / name).write_text("# other\n")
    with pytest.raises(ConfigError, match=r"mine\.py .* has changed: .*; .*world\.py .* has changed: "):
        resume(run)


def test_files_that_the_run_does_not_read_may_change(run: Path, project: Path) -> None:
    for name in ("other.py", "json.py", "policy/README.md"):
        (project / name).write_text("changed")
    write_parquet(project / "held-out" / "train.parquet", ["9+9"])
    assert resume(run).inputs is not None


def test_evaluation_rows_count_and_not_their_file(run: Path, project: Path) -> None:
    file = project / "held-out" / "test.parquet"
    content = file.read_bytes()
    write_parquet(file, ["2+2", "3+3"], metadata="written on another day")
    assert file.read_bytes() != content
    assert not resume(run).inputs.changes  # type: ignore[union-attr]
    write_parquet(file, ["2+2", "3+4"])
    with pytest.raises(ConfigError, match=r"test\.parquet \(evaluation\.data\) has changed"):
        resume(run)


def test_other_evaluation_data_by_its_key_is_not_a_changed_file(run: Path, project: Path) -> None:
    write_parquet(project / "other" / "test.parquet", ["4+4"])
    notes: list[str] = []
    resumed = resume(run, notes=notes, **{"evaluation.data": "other"})
    assert resumed.inputs is not None
    assert not resumed.inputs.changes
    assert any("evaluations before and after cannot be compared" in note for note in notes)
    assert str(project / "other" / "test.parquet") in {input_file.path for input_file in resumed.inputs.files}


def record(resumed: Resumption) -> None:
    assert resumed.inputs is not None
    with RunFolder.resume(resumed.run) as folder:
        _record_inputs(folder, resumed.inputs, resumed.step)
        folder.event("resumed", step=resumed.step)


def test_an_accepted_change_is_recorded_and_marks_the_curve(run: Path, project: Path) -> None:
    file = project / "mine.py"
    was = digest_of(file)
    file.write_text("def reward(request): return 1.0\n")
    notes: list[str] = []
    record(resume(run, accept=True, notes=notes))
    assert f"{file} (verifier.name) has changed: was {was[:12]}, is {digest_of(file)[:12]} " in "".join(notes)
    changed = events_of(run)[0]
    assert (changed["event"], changed["step"]) == ("inputs_changed", STEP)
    assert changed["files"] == [{"key": "verifier.name", "path": str(file), "was": was, "is": digest_of(file)}]
    assert [(mark.step, mark.text) for mark in marks_of(events_of(run))] == [(STEP, "mine.py changed after step 2")]
    assert {path.name[13:] for path in (run / "sources").glob("*-mine.py")} == {"mine.py"}
    assert len(list((run / "sources").glob("*-mine.py"))) == 2
    assert not resume(run).inputs.changes, "it is accepted once"  # type: ignore[union-attr]


def test_an_automatic_restart_checks_too_and_records_why_it_ends(
    run: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcli.cli.train import checked_run as module

    (project / "mine.py").write_text("def reward(request): return 1.0\n")
    for restart in (False, True):
        monkeypatch.setattr(module, "is_restart", lambda restart=restart: restart)
        with pytest.raises(ConfigError, match=r"mine\.py .* has changed"):
            module.resume_training(run, None, {}, [], module.Call())
        assert bool(events_of(run)) == restart, "a command that is refused changes nothing"
    assert (events_of(run)[-1]["event"], events_of(run)[-1]["retry"]) == ("failed", False)
    assert "mine.py" in events_of(run)[-1]["message"]


def test_a_run_without_a_checkpoint_starts_over_with_the_new_file(run: Path, project: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.rename(project / path.name)
    (project / "mine.py").write_text("def reward(request): return 1.0\n")
    notes: list[str] = []
    assert resume(run, notes=notes).checkpoint is None
    assert any("mine.py" in note and "the run starts over with it" in note for note in notes)


def test_a_run_of_an_older_rlcli_resumes_and_says_so(run: Path, project: Path) -> None:
    (run / "inputs.json").unlink()
    (project / "mine.py").write_text("def reward(request): return 1.0\n")
    notes: list[str] = []
    resumed = resume(run, notes=notes)
    assert any("no record of what the run read by path" in note for note in notes)
    record(resumed)
    assert [event["event"] for event in events_of(run)] == ["inputs_unrecorded", "resumed"]
    (project / "mine.py").write_text("def reward(request): return 0.5\n")
    with pytest.raises(ConfigError, match=r"mine\.py .* has changed"):
        resume(run)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 9}', '{"format": 1, "files": [{}], "prompts": ""}'])
def test_a_damaged_record_does_not_count_as_none(run: Path, content: str) -> None:
    (run / "inputs.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"inputs\.json, the record of .* cannot be read: .*; restore it"):
        resume(run)


def test_a_finished_run_is_not_checked(run: Path, project: Path) -> None:
    (project / "mine.py").write_text("def reward(request): return 1.0\n")
    with pytest.raises(ConfigError):
        resume(run)
    config = resolve("grpo", {"model.path": "policy", "data.path": "sums", "train.steps": STEP}, SETS[:-1])
    (run / "config.toml").write_text(dump_toml(config))
    assert resume(run).nothing_to_do


def test_an_accepted_template_may_change_the_tokens_of_the_prompts(run: Path, project: Path) -> None:
    with pytest.raises(DataError, match="the prompts are not those"):
        check_data(resume(run), "abd")
    (project / "policy" / "chat_template.jinja").write_text("other")
    resumed = resume(run, accept=True)
    record(check_data(resumed, "abd"))
    assert check_data(resume(run), "abd").inputs is not None, "the next time too, from the same checkpoint"
    (project / "policy" / "chat_template.jinja").write_text("another")
    write_parquet(project / "sums" / "train.parquet", ["1+2"])
    with pytest.raises(DataError, match="the prompts are not those"):
        check_data(resume(run, accept=True), "abe")


def test_a_model_of_the_hub_has_its_commit(run: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("grpo", {"model.path": "org/name", "data.path": "sums", "train.steps": 8}, SETS)
    (run / "config.toml").write_text(dump_toml(config))
    monkeypatch.setattr(input_files, "hub_commit", lambda repo: "a" * 40)
    assert hub_models(config.config) == (Input("model.path", "0/", "org/name", "a" * 40),)
    files = (*local_inputs(config.config), *hub_models(config.config))
    (run / "inputs.json").write_text(json.dumps(InputRecord(files).as_dict()))
    assert not with_downloads(resume(run), lambda note: None).inputs.changes  # type: ignore[union-attr]
    monkeypatch.setattr(input_files, "hub_commit", lambda repo: "b" * 40)
    with pytest.raises(ConfigError, match=r"org/name \(model\.path\) has changed: was aaaaaaaaaaaa, is bbbbbbbbbbbb"):
        with_downloads(resume(run), lambda note: None)
    accepted = with_downloads(resume(run, accept=True), lambda note: None)
    assert [change.key for change in accepted.inputs.changes] == ["model.path"]  # type: ignore[union-attr]


def config_of(*sets: str) -> RunConfig:
    return resolve("grpo", {"model.path": "policy", "data.path": "sums"}, sets).config


def names(config: RunConfig, key: str) -> set[str]:
    return {Path(input_file.path).name for input_file in local_inputs(config) if input_file.key == key}


@pytest.mark.parametrize(
    ("sets", "files"),
    [
        (["environment.name=python world.py --corpus=corpus.jsonl loss.py"], {"world.py", "corpus.jsonl", "loss.py"}),
        (["environment.name=/usr/bin/python3 world.py"], {"world.py"}),
        (["environment.name=./world.py --fast"], {"world.py"}),
        (["environment.name=guess_number"], set()),
        (["environment.name=auto"], set()),
        (["environment.name="], set()),
    ],
)
def test_files_of_an_agents_command(project: Path, sets: list[str], files: set[str]) -> None:
    assert names(config_of(*sets), "environment.name") == files


def test_a_module_of_an_installed_package_has_all_that_it_imports_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "rewards.py").write_text("from .shared import x\nimport numpy\nimport beside\n")
    (package / "shared.py").write_text("from mypackage import more\n")
    (package / "more.py").touch()
    (tmp_path / "beside.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert module_file("mypackage.rewards") == package / "rewards.py"
    assert module_file("mypackage.nothing") is None
    files = with_local_imports(package / "rewards.py", "mypackage")
    assert {path.name for path in files} == {"rewards.py", "shared.py", "__init__.py", "more.py"}
    assert names(config_of("verifier.name=mypackage.rewards:f"), "verifier.name") == {path.name for path in files}


def test_imports_of_a_file_that_python_cannot_read_are_left_to_python(tmp_path: Path) -> None:
    for content in (b"def (", b"\xff\xfe", b"x = " + b"(" * 500, b"\0"):
        (tmp_path / "mine.py").write_bytes(content)
        assert with_local_imports(tmp_path / "mine.py") == [tmp_path / "mine.py"]
    assert with_local_imports(tmp_path / "gone.py") == [tmp_path / "gone.py"]


def test_a_module_that_is_no_longer_imported_is_no_change_by_itself(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    recorded = [Input("verifier.name", f"0/{name}", str(tmp_path / name), "1") for name in ("there.py", "gone.py")]
    assert [str(change) for change in compare(recorded, [])] == [
        f"{tmp_path / 'gone.py'} (verifier.name) is gone: was 1"
    ]


def test_weights_are_compared_by_size_and_blocks(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(10_000_000))
    digest = digest_of(file)
    file.write_bytes(bytes(10_000_001))
    assert digest_of(file) != digest
    file.write_bytes(b"\1" * 10_000_000)
    assert digest_of(file) != digest


def test_copies_are_small_texts_of_the_run_alone(project: Path, run: Path) -> None:
    copied = {path.name[13:] for path in (run / "sources").iterdir()}
    code = {"mine.py", "helpers.py", "text.py", "deeper.py", "world.py", "game.py", "loss.py"}
    assert copied == code | {"config.json", "chat_template.jinja", "turns.jinja"}
    (project / "loss.py").write_bytes(b"#" * (input_files.COPY_BYTES + 1))
    (project / "corpus.jsonl").write_text("secret")
    config = resolve("grpo", {"model.path": "policy", "data.path": "sums"}, SETS).config
    assert {name[13:] for name in copies(local_inputs(config))} == copied - {"loss.py"}


def test_copies_together_have_a_limit(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [Input("algorithm.code", str(n), str(project / "loss.py"), digest_of(project / "loss.py")) for n in (0, 1)]
    assert len(copies(files)) == 1, "one file"
    monkeypatch.setattr(input_files, "COPIES_BYTES", 1)
    assert copies(files) == {}


@pytest.mark.parametrize(("mode", "shared", "expected"), [(0o600, True, 0o600), (0o644, False, 0o600)])
def test_a_copy_can_be_read_by_no_one_else(tmp_path: Path, mode: int, shared: bool, expected: int) -> None:
    umask = os.umask(0o022)
    try:
        with RunFolder.create(tmp_path / "run", shared=shared) as folder:
            folder.write_inputs({}, {"9f2c-mine.py": (b"x", stat.S_IFREG | mode)})
    finally:
        os.umask(umask)
    copy = folder.path / "sources" / "9f2c-mine.py"
    assert stat.S_IMODE(copy.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(copy.stat().st_mode) == expected


def test_a_file_that_is_edited_while_the_run_is_alive_is_warned_of_once(project: Path) -> None:
    warned: list[tuple[int, str]] = []
    watch = InputWatch(local_inputs(config_of(*SETS)), lambda step, text: warned.append((step, text)))
    watch.phase("generate", 1)
    (project / "mine.py").write_text("# edited")
    os.utime(project / "world.py", ns=(1, 1))
    (project / "loss.py").write_text("# each process has read it")
    for step in (1, 2, 2, 3):
        watch.phase("update", step)
    ((step, text),) = warned
    assert step == 2
    assert text.startswith(f"{project / 'mine.py'} (verifier.name) has changed: was ")
    (project / "mine.py").unlink()
    (project / "world.py").unlink()
    watch.phase("update", 4)
    assert [text.partition(":")[0] for _, text in warned[1:]] == [f"{project / 'world.py'} (environment.name) is gone"]


def free_texts(schema: dict[str, Any]) -> bool:
    """True if a key's schema takes any text, of no pattern: by itself, in a list, a table or an object."""
    if schema.get("type") == "string":
        return "enum" not in schema and "const" not in schema and "pattern" not in schema
    if "$ref" in schema:
        return True
    parts: list[Any] = [*schema.get("anyOf", ()), *schema.get("prefixItems", ())]
    parts += [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    return any(free_texts(part) for part in parts)


def test_every_key_of_free_text_says_whether_a_file_is_read() -> None:
    known = {*READ_BY_PATH, *NOT_READ}
    free_text_keys = {
        f"{section}.{name}"
        for section, kind in sections().items()
        for name, schema in kind.model_json_schema()["properties"].items()
        if free_texts(schema)
    }
    assert free_text_keys == known, "a new key: add it to READ_BY_PATH or to NOT_READ of rlcli/launch/input_files.py"
    assert not READ_BY_PATH.keys() & NOT_READ.keys()


def test_the_page_has_a_row_for_every_key_that_is_read_by_path() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## What a run reads by path")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert [key for key in READ_BY_PATH if not any(f"`{key}`" in row.split("|")[1] for row in rows)] == []


def test_every_reader_gives_its_own_key(project: Path) -> None:
    config = resolve("grpo", {"model.path": "policy", "data.path": "sums"}, SETS).config
    readers: dict[str, Callable[[RunConfig], Any]] = dict(READ_BY_PATH)
    assert {key: {input_file.key for input_file in reader(config)} for key, reader in readers.items()} == {
        key: {key} for key in READ_BY_PATH
    }
