"""The inputs of a run: files that it reads by path outside its folder, such as code, data, templates and models. Each
has a digest, which is recorded when the run starts and compared when it resumes.

`READ_BY_PATH` has every key of the configuration that names such files; `NOT_READ` every other key that takes any
text, with the reason. In the run folder, `inputs.json` keeps the digests, and `sources/` copies of the code and of
other small texts.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from rlcli.config.schema import RunConfig
from rlcli.errors import CheckpointError, ConfigError
from rlcli.evaluation.evaluation_settings import SMALL, WEIGHTS, hub_commit, sampled_blocks
from rlcli.export.export_folder import RECORD as EXPORT_RECORD
from rlcli.launch.local_imports import MOST_FILES, module_file, with_local_imports
from rlcli.rewards.expression import parse
from rlcli.runs.folder import INPUTS, SOURCES
from rlcli.support.reading import UnfitFile, opened, read_bytes, read_json
from rlcli.training.listener import Listener

FORMAT = 1
SHORT = 12
"""Digits of a digest in messages and in names of copies."""
WHOLE_BYTES = 1 << 30
"""Largest file, other than weights, whose bytes are all read for its digest."""
ROWS_BYTES = 64 << 20
"""Largest parquet file whose rows are read for its digest, so that the same rows in a rewritten file are equal."""
COPY_BYTES, COPIES_BYTES = 1 << 20, 16 << 20
"""Largest file that is copied into the run folder, and all copies together."""
COPIED = (".py", ".jinja", ".toml", ".yaml", ".yml", ".json", ".txt", ".md")
NOT_COPIED = ("tokenizer.json", "vocab.json", "merges.txt")
"""Large files of a model that are not for readers."""
TOKENIZING = ("model.path", "model.chat_template")
"""Keys whose files determine the tokens of prompts."""
MODEL_FILES = (*SMALL, ".tiktoken", *WEIGHTS)
MOST_LISTED = 5
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_INTERPRETER = re.compile(r"(python|pypy|node|bash|sh|uv|env)[\d.]*")


@dataclass(frozen=True)
class Input:
    """One file that a run reads by path, or one model of the hub.

    Input(key="verifier.name", name="0/mine.py", path="/home/me/mine.py", digest="9f2c…")
    """

    key: str
    """The key of the configuration that leads to it."""
    name: str
    """Identifies it below its key, also on another machine: the number of the path in the key's value, and the file's
    path from there."""
    path: str
    """Its absolute path; of a model of the hub, its id."""
    digest: str
    """Hexadecimal. SHA-256 of the bytes (`sha256sum`); of a parquet file of up to ROWS_BYTES, of its rows; of weights,
    and of files beyond WHOLE_BYTES, of the size and 64 blocks. Of a model of the hub, the commit. Empty if unknown."""
    problem: str = ""
    """Why it cannot be read; empty if it can be."""

    @property
    def is_local(self) -> bool:
        return os.path.isabs(self.path)


@dataclass(frozen=True)
class InputChange:
    """One file that differs from the one that the run has read so far.

    >>> str(InputChange("verifier.name", "/home/me/mine.py", "9f2c" * 16, "07ab" * 16))
    '/home/me/mine.py (verifier.name) has changed: was 9f2c9f2c9f2c, is 07ab07ab07ab'
    """

    key: str
    """As of `Input`."""
    path: str
    """As of `Input`."""
    was: str
    """The recorded digest; empty for a new file."""
    now: str
    """The digest now; empty for a file that cannot be read."""
    problem: str = ""
    """Why it cannot be read now."""
    name: str = ""
    """As of `Input`."""

    def __str__(self) -> str:
        shown = f"{self.path} ({self.key})"
        if not self.was:
            return f"{shown} is new: {self.now[:SHORT]}"
        if not self.now:
            return f"{shown} {self.problem}: was {self.was[:SHORT]}"
        return f"{shown} has changed: was {self.was[:SHORT]}, is {self.now[:SHORT]}"


@dataclass(frozen=True)
class InputCheck:
    """The inputs of a run that resumes, compared with its record."""

    files: tuple[Input, ...]
    """The inputs as they are now."""
    changes: tuple[InputChange, ...] = ()
    """Accepted changes."""
    recorded: bool = True
    """The run has a record; those of an older rlcli have none."""
    prompts: str = ""
    """Fingerprint of the training prompts when the run was last resumed."""
    same_data: bool = True
    """The files of the training data are the recorded ones."""

    @property
    def retokenized(self) -> bool:
        """True if the same rows may have other tokens, by an accepted change of the model's template or tokenizer."""
        texts = [change for change in self.changes if change.key in TOKENIZING and not change.name.endswith(WEIGHTS)]
        return bool(texts) and self.recorded and self.same_data


# Which files a key leads to. Each reader gets the key's value and yields the files, also those that are gone.


def _file(key: str, name: str, file: Path) -> Input:
    """An input with its digest, or with the reason why it has none."""
    path = str(file.absolute())
    try:
        return Input(key, name, path, digest_of(file))
    except FileNotFoundError:
        return Input(key, name, path, "", "is gone")
    except OSError as error:
        return Input(key, name, path, "", f"cannot be read ({error.strerror or error})")
    except UnfitFile as error:
        return Input(key, name, path, "", error.why)
    except ValueError as error:  # parquet that is damaged
        return Input(key, name, path, "", f"cannot be read ({str(error).splitlines()[0].rstrip('. '):.100})")


def _code(key: str, number: object, file: Path, package: str = "") -> Iterator[Input]:
    """A Python file and the modules beside it that it imports."""
    file = Path(os.path.realpath(os.path.expanduser(file)))
    for path in with_local_imports(file, package):
        yield _file(key, f"{number}/{os.path.relpath(path, file.parent)}", path)


def _reference(key: str, number: object, reference: str) -> Iterator[Input]:
    """The code of `FILE.py:NAME` or `package.module:NAME`; of the latter, all that it imports of its package."""
    module = reference.rpartition(":")[0]
    if module.endswith(".py"):
        yield from _code(key, number, Path(module))
    elif module and (file := module_file(module)) is not None:
        yield from _code(key, number, file, package=module.partition(".")[0])


def _model(key: str, number: object, path: str) -> Iterator[Input]:
    """The files of a model's folder. Nothing for an id of the hub: see `hub_models`."""
    for file in _files_in(Path(os.path.expanduser(path))) if path else ():
        if file.suffix in MODEL_FILES and file.name != EXPORT_RECORD:
            yield _file(key, f"{number}/{file.name}", file)


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder; empty if it is no folder or cannot be read."""
    with suppress(OSError):
        return sorted(Path(entry.path) for entry in os.scandir(folder) if not entry.is_dir())
    return []


def _data(key: str, split: str, paths: Iterable[str]) -> Iterator[Input]:
    for number, path in enumerate(paths):
        file = Path(os.path.expanduser(path))
        if os.path.isdir(file) or not file.suffix:
            file /= f"{split}.parquet"
        yield _file(key, f"{number}/{file.name}", file)


def _any_file(key: str, number: object, text: str) -> Iterator[Input]:
    """The files of a text that may be a path, such as the value of an option: code, a file, a model or the files of a
    folder. None if no such file exists."""
    code = text.rpartition(":")[0]
    path = Path(os.path.expanduser(code if code.endswith(".py") else text))
    if not text or not os.path.exists(path):
        return
    if os.path.isfile(path / "config.json"):
        yield from _model(key, number, str(path))
    elif os.path.isdir(path):
        for file in _files_in(path)[:MOST_FILES]:
            yield _file(key, f"{number}/{file.name}", file)
    elif path.suffix == ".py":
        yield from _code(key, number, path)
    else:
        yield _file(key, f"{number}/{path.name}", path)


def _texts(value: object) -> Iterator[str]:
    """The texts in the value of an option."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _verifiers(config: RunConfig) -> Iterator[Input]:
    key = "verifier.name"
    for number, term in enumerate(parse(config.verifier.name).terms):
        yield from _reference(key, number, term.ref)
        for option, value in term.options.items():
            for index, text in enumerate(_texts(value)):
                yield from _any_file(key, f"{number}/{option}/{index}", text)


def _environment(config: RunConfig) -> Iterator[Input]:
    key, section = "environment.name", config.environment
    if section.is_command:
        with suppress(ValueError):  # an open quote, which is reported where it is started
            for number, word in enumerate(shlex.split(section.name)):
                yield from _word(key, number, word)
    elif section.name.endswith(".py"):
        yield from _code(key, 0, Path(section.name))
    elif ".py:" in section.name or not section.python:  # of another interpreter, no module is found here
        yield from _reference(key, 0, section.name)


def _word(key: str, number: int, word: str) -> Iterator[Input]:
    """The file that a word of a command names, as `agent.py` or `--config=a.yaml`; not a program that PATH has."""
    if number == 0 and ("/" not in word or _INTERPRETER.fullmatch(Path(word).name)):
        return
    text = word.partition("=")[2] if word.startswith("-") else word
    if os.path.isfile(text):
        yield from _any_file(key, number, text)


def _options(config: RunConfig) -> Iterator[Input]:
    for name, value in config.environment.options.items():
        for text in _texts(value):
            yield from _any_file("environment.options", name, text)


def _algorithm(config: RunConfig) -> Iterator[Input]:
    if config.algorithm.code:
        yield from _code("algorithm.code", 0, Path(config.algorithm.code))


def _teachers(config: RunConfig) -> Iterator[Input]:
    for number, teacher in enumerate(config.teacher.held):
        yield from _model("teacher.path", number, teacher.path)


READ_BY_PATH: Mapping[str, Callable[[RunConfig], Iterable[Input]]] = {
    "model.path": lambda config: _model("model.path", 0, config.model.path),
    "model.chat_template": lambda config: _any_file("model.chat_template", 0, config.model.chat_template),
    "critic.path": lambda config: _model("critic.path", 0, config.critic.path),
    "teacher.path": _teachers,
    "data.path": lambda config: _data("data.path", "train", config.data.paths),
    "evaluation.data": lambda config: _data("evaluation.data", "test", config.evaluation.paths),
    "verifier.name": _verifiers,
    "environment.name": _environment,
    "environment.options": _options,
    "algorithm.code": _algorithm,
}
"""Key that may name files → reader of these files. `docs/resume.md` has a row for each."""

NOT_READ: Mapping[str, str] = {
    "algorithm.advantage": "a name",
    "algorithm.loss": "a name",
    "algorithm.select": "a name",
    "algorithm.aggregation": "a name",
    "algorithm.kl_estimator": "a name",
    "algorithm.correction": "names",
    "cluster.address": "an address",
    "data.chat_template_kwargs": "values for the chat template",
    "data.response": "a field of extra_info",
    "environment.python": "an interpreter: its packages are not part of the run",
    "lora.targets": "names of modules",
    "rollout.engine": "a name",
    "rollout.servers": "URLs",
    "rollout.servers_folder": "weights pass through it; nothing there outlives a step",
    "tracking.project": "a name",
    "tracking.trackers": "names",
}
"""Key that takes any text and names no file that the run reads → the kind of text."""

READ_AGAIN = ("verifier.name", "environment.name", "environment.options")
"""Keys whose files are read again in a run that is alive, by processes that replace others."""
BY_FINGERPRINT = ("data.path",)
"""Keys whose files may differ if the prompts are the same, which `check_data` checks."""


def local_inputs(config: RunConfig) -> tuple[Input, ...]:
    """All files that a run with this configuration reads by path, in the order of `READ_BY_PATH`; relative paths begin
    in the current directory."""
    entries = (entry for reader in READ_BY_PATH.values() for entry in reader(config))
    return tuple({(entry.key, entry.name): entry for entry in entries}.values())


def hub_models(config: RunConfig) -> tuple[Input, ...]:
    """The models of the hub that a run reads, each with the commit in the hub's cache. Only after the models were
    checked: that downloads them, and decides whether the hub can be reached."""
    models_by_key = [("model.path", 0, config.model.path), ("critic.path", 0, config.critic.path)]
    models_by_key += [("teacher.path", number, teacher.path) for number, teacher in enumerate(config.teacher.held)]
    for number, term in enumerate(parse(config.verifier.name).terms):
        for option in ("path", "serve"):
            ids = [text for text in _texts(term.options.get(option)) if _HUB_ID.fullmatch(text)]
            models_by_key += [("verifier.name", number, text) for text in ids]
    models = []
    for key, number, model in models_by_key:
        if model and not os.path.isabs(model) and not os.path.exists(os.path.expanduser(model)):
            with suppress(ValueError):  # no id of the hub
                models.append(Input(key, f"{number}/", model, hub_commit(model)))
    return tuple(models)


def digest_of(file: Path) -> str:
    """The digest of a file, as `Input.digest` describes it. Raises OSError, `UnfitFile`, and ValueError for a parquet
    file that cannot be read."""
    with opened(file, links=True) as stream:
        size = os.fstat(stream.fileno()).st_size
        if file.suffix in WEIGHTS or size > WHOLE_BYTES:
            return hashlib.sha256(sampled_blocks(file)).hexdigest()
        if file.suffix == ".parquet" and size <= ROWS_BYTES:
            return _digest_of_rows(stream)
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of_rows(stream: BinaryIO) -> str:
    """Digest of a parquet file's columns and their values: neither its metadata, nor its compression and row groups
    count."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(stream).read().combine_chunks()
    except pa.ArrowException as error:
        raise ValueError(str(error) or type(error).__name__) from error
    digest = hashlib.sha256(repr([(field.name, str(field.type)) for field in table.schema]).encode())
    for batch in table.to_batches():
        digest.update(batch.serialize())
    return digest.hexdigest()


# The record in the run folder, and the comparison with it.


@dataclass(frozen=True)
class InputRecord:
    """The content of `inputs.json`."""

    files: tuple[Input, ...]
    prompts: str = ""
    """As of `InputCheck`."""

    def as_dict(self) -> dict[str, Any]:
        plain = [{name: value for name, value in asdict(entry).items() if name != "problem"} for entry in self.files]
        return {"format": FORMAT, "prompts": self.prompts, "files": plain}


def recorded_inputs(run: Path) -> InputRecord | None:
    """The inputs that the run in the folder `run` has recorded; None if it has no record. Raises `CheckpointError` for
    a record that cannot be read: it must not count as none."""
    file = run / INPUTS
    try:
        content = read_json(file)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r:.40}, and this rlcli knows {FORMAT}")
        fields = ("key", "name", "path", "digest")
        files = tuple(Input(*(str(row[field]) for field in fields)) for row in content["files"])
        return InputRecord(files, str(content["prompts"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{file}, the record of what the run read by path, cannot be read: {type(error).__name__}: {error!s:.200}",
            "restore it; without the file the run resumes unchecked",
        ) from error


def check_inputs(
    run: Path,
    config: RunConfig,
    changed_keys: Collection[str],
    on_note: Callable[[str], None],
    *,
    step: int | None,
    accept: bool,
) -> InputCheck:
    """Compare the files that a run reads by path with its record. Models of the hub are compared later, by
    `with_hub_models`.

    changed_keys: keys with another value than before, which name other files. step: of the checkpoint to resume from;
    None if the run starts over, so that no curve has two parts. accept: continue with changed files. Raises
    `ConfigError` that names all changed files, and what `recorded_inputs` raises.
    """
    record, files = recorded_inputs(run), local_inputs(config)
    if record is None:
        if step is not None:
            on_note(
                "no record of what the run read by path (an older rlcli began it): whether code, evaluation data or "
                "models have changed since then is not checked"
            )
        return InputCheck(files, recorded=False)
    recorded = [entry for entry in record.files if entry.is_local]
    skipped = {*changed_keys, *BY_FINGERPRINT}
    changes = compare(
        [entry for entry in recorded if entry.key not in skipped],
        [entry for entry in files if entry.key not in skipped],
    )
    recorded_data = [entry for entry in recorded if entry.key in BY_FINGERPRINT]
    data = [entry for entry in files if entry.key in BY_FINGERPRINT]
    _judge(run, changes, on_note, step=step, accept=accept)
    return InputCheck(files, tuple(changes), prompts=record.prompts, same_data=not compare(recorded_data, data))


def with_hub_models(
    check: InputCheck,
    run: Path,
    config: RunConfig,
    on_note: Callable[[str], None],
    *,
    step: int | None,
    accept: bool,
) -> InputCheck:
    """The same with the models of the hub, whose commits are compared with the record. Raises as `check_inputs`."""
    models = hub_models(config)
    record = recorded_inputs(run) or InputRecord(())
    known = {(entry.key, entry.name, entry.path): entry.digest for entry in record.files if not entry.is_local}
    changes = [
        InputChange(entry.key, entry.path, was, entry.digest, name=entry.name)
        for entry in models
        if entry.digest and (was := known.get((entry.key, entry.name, entry.path), "")) and was != entry.digest
    ]
    _judge(run, changes, on_note, step=step, accept=accept)
    return replace(check, files=(*check.files, *models), changes=(*check.changes, *changes))


def compare(recorded: Sequence[Input], now: Sequence[Input]) -> list[InputChange]:
    """The changed files, in the order of `now`; then the missing ones."""
    old = {(entry.key, entry.name): entry for entry in recorded if entry.digest}
    changes = []
    for entry in now:
        earlier = old.pop((entry.key, entry.name), None)
        was = earlier.digest if earlier else ""
        if was != entry.digest:
            changes.append(InputChange(entry.key, entry.path, was, entry.digest, entry.problem, entry.name))
    # A file that exists and is no longer read: the file that imported it has changed, and is in the list.
    gone = [(entry, problem) for entry in old.values() if (problem := _absence(entry.path))]
    changes += [InputChange(entry.key, entry.path, entry.digest, "", problem, entry.name) for entry, problem in gone]
    return changes


def _absence(path: str) -> str:
    """Why a file is missing; empty if it is not."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return ""


def _judge(
    run: Path,
    changes: Sequence[InputChange],
    on_note: Callable[[str], None],
    *,
    step: int | None,
    accept: bool,
) -> None:
    """Note the changes if they may be made; else raise `ConfigError`."""
    if not changes:
        return
    if step is not None and not accept:
        unlisted = len(changes) - MOST_LISTED
        listed = "; ".join(map(str, changes[:MOST_LISTED])) + (f"; and {unlisted} more" if unlisted > 0 else "")
        copy = run / SOURCES / copy_name(next((change for change in changes if change.was), changes[0]))
        restore = f"restore it (a copy: {copy})" if copy.is_file() else "restore it"
        if all(change.now for change in changes):  # what is gone or unreadable, a run cannot continue with
            restore += ", or continue with what is there now: --accept-changes, which marks the curve at this step"
        raise ConfigError(f"{run} cannot resume from step {step}: {listed}", restore)
    for change in changes:
        then = "the run starts over with it" if step is None else f"accepted from step {step + 1} on"
        on_note(f"{change} ({then})")


class InputWatch(Listener):
    """Checks once a step the files that restarted processes of verifiers and environments read again, and warns once
    of each that has been edited while the run is alive.

    files: with the digests of the run's start. warn: receives the step and the text.
    """

    def __init__(self, files: Iterable[Input], warn: Callable[[int, str], None]) -> None:
        local = (
            entry for entry in files if entry.key in READ_AGAIN and entry.is_local and not entry.path.endswith(WEIGHTS)
        )
        self._stamps: dict[Input, tuple[int, int]] = {entry: (0, 0) for entry in local if entry.digest}
        self._warn = warn
        self._step = -1

    def phase(self, name: str, step: int) -> None:
        if step == self._step:
            return
        self._step = step
        for entry, stamp in list(self._stamps.items()):
            if (now := _stamp(entry.path)) == stamp:
                continue
            self._stamps[entry] = now
            for change in compare([entry], [_file(entry.key, entry.name, Path(entry.path))]):
                del self._stamps[entry]
                self._warn(step, f"{change}, while the run is alive: a process that is replaced reads it again")


def _stamp(path: str) -> tuple[int, int]:
    """Size and time of modification of a file; zeros if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


# Copies in the run folder.


def copy_name(entry: Input | InputChange) -> str:
    """The name of a file's copy in `sources/`: the first digits of its digest, and its name.

    >>> copy_name(Input("verifier.name", "0/mine.py", "/home/me/mine.py", "9f2c" * 16))
    '9f2c9f2c9f2c-mine.py'
    """
    digest = entry.digest if isinstance(entry, Input) else entry.was
    return f"{digest[:SHORT]}-{Path(entry.path).name}"


def copies(files: Iterable[Input]) -> dict[str, tuple[bytes, int]]:
    """Name in `sources/` → content and mode, of code and other small texts. Files that have changed since their digest
    was taken are left out."""
    contents: dict[str, tuple[bytes, int]] = {}
    total = 0
    for entry in files:
        file = Path(entry.path)
        if not entry.is_local or file.suffix not in COPIED or file.name in NOT_COPIED or entry.key in BY_FINGERPRINT:
            continue
        with suppress(OSError, UnfitFile):
            content = read_bytes(file, COPY_BYTES, links=True)
            total += len(content)
            if total <= COPIES_BYTES and hashlib.sha256(content).hexdigest() == entry.digest:
                contents[copy_name(entry)] = content, file.stat().st_mode
    return contents
