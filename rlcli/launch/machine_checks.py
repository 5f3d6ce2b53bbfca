"""Checks a machine's requirements for rlcli, one small check each. Uses only the standard library, to run anywhere.

Heavy imports run in a separate process with a deadline, so that a library that crashes or hangs is a finding and does
not end the doctor.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli import __version__
from rlcli.errors import RlcliError
from rlcli.registry import Registry
from rlcli.support.extras import INSTALL, TRAINING, missing
from rlcli.support.machine import processor

if TYPE_CHECKING:
    from rlcli.environments.template_contract import Boundary

GIB = 1 << 30
LONGEST_DETAIL = 100
"""Maximum characters of the difference at a boundary between turns."""
VLLM_RANGE = ((0, 24), (0, 33))
"""The first release that works and the first that is untested."""
_running: set[int] = set()
"""Ids of the running processes."""


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    """Something fails that only some runs need."""
    FAIL = "fail"


ABSENT = "not installed: no training here"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    """Name of the check."""
    status: Status
    """Its outcome."""
    detail: str
    """Versions, sizes or the error."""
    hint: str = ""
    """Fix of the problem; empty if it passed."""


CHECKS: Registry[Callable[[], Finding]] = Registry("check of the doctor", "rlcli.doctor_checks")
"""Checks of packages, from entry points."""


def diagnose() -> list[Finding]:
    """Run all checks, the slow imports in parallel, and return their findings in display order."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    checks: list[Callable[[], Finding]] = [
        check_python,
        check_processor,
        check_extras,
        check_torch,
        check_transformers,
        check_vllm,
        check_ray,
        check_images,
        check_torchvision,
        *(partial(check_of_package, name) for name in CHECKS.names()),
        check_trackers,
        lambda: check_disk("disk (runs)", Path.cwd() / "runs"),
        lambda: check_disk("disk (model cache)", cache),
        check_shared_memory,
        check_open_files,
        check_hub,
        check_loopback,
    ]
    with ThreadPoolExecutor(max_workers=3) as pool:
        try:
            return list(pool.map(lambda check: check(), checks))
        except KeyboardInterrupt:
            # The threads wait for their processes, which Ctrl-C does not reach: they have separate sessions.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                os.killpg(process, signal.SIGKILL)
            raise


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """Python 3.11 or 3.12."""
    shown = f"{version[0]}.{version[1]} ({sys.executable})"
    if (3, 11) <= version < (3, 13):
        return Finding("python", Status.PASS, shown)
    return Finding("python", Status.FAIL, shown, "make the environment with Python 3.11 or 3.12")


def check_processor() -> Finding:
    """vLLM's builds for CPUs need AVX2, and bfloat16 is slow without instructions for it; GPUs need neither."""
    widest = next((kind for kind in ("avx512f", "avx2") if kind in processor.instructions()), "no AVX2")
    products = [kind for kind in ("amx_bf16", "avx512_bf16") if kind in processor.instructions()]
    shown = f"{processor.name() or 'unknown'}, {len(os.sched_getaffinity(0))} cores, {', '.join([widest, *products])}"
    if not processor.runs_vllm():
        return Finding("processor", Status.WARN, shown, "for runs without a GPU: --set rollout.engine=transformers")
    return Finding("processor", Status.PASS, shown)


def check_extras() -> Finding:
    """All of the training modules, or none of them: the light core alone is a valid installation."""
    absent = missing(*TRAINING)
    if not absent:
        return Finding("rlcli", Status.PASS, f"{__version__}, with everything that training needs")
    if len(absent) == len(TRAINING):
        return Finding("rlcli", Status.WARN, f"{__version__}, light core only: no training", INSTALL)
    return Finding("rlcli", Status.FAIL, f"{__version__}, with an extra but without {', '.join(absent)}", INSTALL)


def check_torch() -> Finding:
    """torch imports, and sees the GPUs that the driver sees."""
    torch = imported("torch", "from rlcli.support.machine.gpus import describe; report(**describe())")
    if isinstance(torch, Finding):
        return torch
    shown = f"{torch['version']}, {torch['build']}"
    if torch["gpus"]:
        gpus = ", ".join(f"{name} ({memory / GIB:.0f} GiB)" for name, memory in torch["gpus"])
        return Finding("torch", Status.PASS, f"{shown}, {gpus}")
    driver = _driver()
    if driver is None:
        return Finding("torch", Status.PASS, f"{shown}, no GPU here")
    if torch["build"].startswith("CUDA"):
        hint = f"update the driver, or install a torch for less than {torch['build']}"
        return Finding("torch", Status.FAIL, f"{shown}, sees no GPU although driver {driver} has some", hint)
    return Finding("torch", Status.WARN, f"{shown}, but driver {driver} has GPUs", "pip install 'rlcli[gpu]'")


def check_transformers() -> Finding:
    """Model classes import. A bare `import transformers` passes even if a broken torchvision breaks them."""
    if missing("transformers", "torch"):
        return Finding("transformers", Status.WARN, ABSENT, INSTALL)
    report, detail = probe(
        "import transformers; from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM; "
        "report(version=transformers.__version__)"
    )
    if report is not None:
        return Finding("transformers", Status.PASS, f"{report['version']}, model classes import")
    if "torchvision" in detail:
        hint = (
            "pip uninstall torchvision torchaudio torchcodec (their builds do not match this torch), or install "
            "torchvision's build for it: only vision-language models need one"
        )
        return Finding("transformers", Status.FAIL, f"blocked by a broken torchvision: {detail}", hint)
    return Finding(
        "transformers", Status.FAIL, f"model classes do not import: {detail}", f"install it again: {INSTALL}"
    )


def check_vllm() -> Finding:
    """vLLM imports, in a supported release."""
    report = imported(
        "vllm",
        "import vllm; from vllm import LLM; report(version=vllm.__version__)",
        "not installed: only rollout.engine = transformers",
    )
    if isinstance(report, Finding):
        return report
    low, high = (".".join(str(part) for part in bound) for bound in VLLM_RANGE)
    numbers = re.match(r"(\d+)\.(\d+)", report["version"])
    if numbers and VLLM_RANGE[0] <= (int(numbers[1]), int(numbers[2])) < VLLM_RANGE[1]:
        return Finding("vllm", Status.PASS, report["version"])
    return Finding("vllm", Status.FAIL, f"{report['version']} is outside {low} ≤ version < {high}", INSTALL)


def check_ray() -> Finding:
    """Ray imports."""
    report = imported("ray", "import ray; report(version=ray.__version__)")
    return report if isinstance(report, Finding) else Finding("ray", Status.PASS, report["version"])


def check_images() -> Finding:
    """Pillow decodes the formats that images in datasets mostly have."""
    name, formats = "pictures (pillow)", {"zlib": "PNG", "jpg": "JPEG", "webp": "WebP"}
    reinstall = "pip install --force-reinstall 'pillow>=11.3': its wheels decode all formats"
    if missing("PIL"):
        return Finding(name, Status.WARN, "not installed: no images in datasets", "pip install 'pillow>=11.3'")
    report, detail = probe(
        "import PIL; from PIL import Image, features; "
        f"report(version=PIL.__version__, lacks=[one for one in {list(formats)} if not features.check(one)])"
    )
    if report is None:
        return Finding(name, Status.WARN, f"does not import: {detail}", reinstall)
    if lacks := ", ".join(formats[decoder] for decoder in report["lacks"]):
        return Finding(name, Status.WARN, f"{report['version']} decodes no {lacks}", reinstall)
    return Finding(name, Status.PASS, f"{report['version']}, decodes {', '.join(formats.values())}")


def check_torchvision() -> Finding:
    """torchvision loads beside this torch and resizes an image: vLLM needs it for vision-language models."""
    name = "pictures (vision)"
    if missing("torch"):
        return Finding(name, Status.WARN, ABSENT, INSTALL)
    build = "pip install --no-deps torchvision in the build for this torch"
    if missing("torchvision"):
        detail = "torchvision is not installed: no vision-language models"
        return Finding(name, Status.WARN, detail, f"in a checkout: scripts/env; elsewhere {build}")
    report, detail = probe(
        "import torch, torchvision; from torchvision.transforms.v2 import functional; "
        "functional.resize(torch.zeros(3, 4, 4, dtype=torch.uint8), [2, 2]); report(version=torchvision.__version__)"
    )
    if report is not None:
        return Finding(name, Status.PASS, f"torchvision {report['version']}")
    if "operator torchvision::" in detail:  # PyPI's build wants CUDA
        hint = f"in a checkout: scripts/env, which makes it load; elsewhere {build} (PyTorch's index of CPU builds)"
        return Finding(name, Status.WARN, f"torchvision does not load beside a torch without CUDA: {detail}", hint)
    return Finding(name, Status.WARN, f"torchvision does not load: {detail}", f"{build}, or pip uninstall torchvision")


def check_of_package(name: str) -> Finding:
    """The check that a package publishes under this name."""
    try:
        return CHECKS.get(name)()
    except RlcliError as error:
        return Finding(name, Status.FAIL, error.message, error.hint)


def check_trackers() -> Finding:
    """Trackers that are installed. None is needed: every run writes metrics.jsonl."""
    published = {entry.name: entry.dist for entry in metadata.entry_points(group="rlcli.trackers")}
    versions = {
        # A plugin's own package; for a tracker of rlcli the library (MLflow's has a smaller variant).
        name: f"({dist.name} {dist.version})" if dist and dist.name != "rlcli" else _installed((name, f"{name}-skinny"))
        for name, dist in sorted(published.items())
    }
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "none"
    absent = ", ".join(name for name, version in versions.items() if not version)
    return Finding("trackers", Status.PASS, shown + (f"; pip install 'rlcli[NAME]' adds {absent}" if absent else ""))


def check_template(path: str) -> list[Finding]:
    """Check that a model's chat template lets conversations be extended in tokens: the verdict, and one finding a
    boundary between turns. Raises `ModelError` if there is no tokenizer."""
    from rlcli.data.prompts.chat_template import stop_tokens
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer
    from rlcli.environments.template_contract import Agreement, check

    outcomes = {
        Agreement.EXACT: (Status.PASS, "one rendering gives the same tokens", ""),
        Agreement.PAST: (Status.WARN, "rendered whole, the past differs: ", "kept as it was generated"),
        Agreement.NONE: (Status.WARN, "", ""),
        Agreement.BROKEN: (
            Status.FAIL,
            "rendered whole, other tokens follow: ",
            "avoid such turns, or use another model",
        ),
    }
    tokenizer = load_tokenizer(path)
    findings = []
    boundaries = check(tokenizer, stop_tokens(tokenizer, path, ()))
    for boundary in boundaries:
        status, text, hint = outcomes[boundary.agreement]
        findings.append(Finding(boundary.name, status, text + _cut(boundary.detail), hint))
    return [_verdict(boundaries), *findings]


def _verdict(boundaries: Sequence[Boundary]) -> Finding:
    """Summary of what a template supports, in one line: conversations and tools."""
    from rlcli.environments.template_contract import Agreement

    words = {
        Agreement.EXACT: "work",
        Agreement.PAST: "work (generated tokens stay as they were)",
        Agreement.NONE: "are not supported by this template",
        Agreement.BROKEN: "do not work: other tokens follow",
    }
    order = list(words)
    tools = [boundary for boundary in boundaries if "tool" in boundary.name]
    others = [boundary for boundary in boundaries if "tool" not in boundary.name]
    parts, status = ["single answers work"], Status.PASS
    for feature, some in (("conversations", others), ("tools", tools)):
        common = min((each.agreement for each in some), key=order.index)
        worst = max((each.agreement for each in some), key=order.index)
        agreement = common if worst is Agreement.NONE else worst
        but = [each.name for each in some if each.agreement is Agreement.NONE and agreement is not Agreement.NONE]
        parts.append(f"{feature} {words[agreement]}" + (f", but for {'; '.join(but)}" if but else ""))
        if agreement is Agreement.BROKEN:
            status = Status.FAIL
        elif agreement is Agreement.NONE and status is Status.PASS:
            status = Status.WARN
    hint = "give environments without tools, or another template (model.chat_template)" if status is Status.WARN else ""
    return Finding("verdict", status, "; ".join(parts), hint)


def _cut(text: str) -> str:
    """The beginning of a long text."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_DETAIL else f"{text[:LONGEST_DETAIL]}…"


def _installed(packages: Sequence[str]) -> str:
    """The version of the first installed one of `packages`, or empty."""
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return ""


def check_disk(name: str, path: Path, fail_below: int = GIB, warn_below: int = 10 * GIB) -> Finding:
    """Free bytes on the file system of `path`, or of its nearest parent that exists."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    shown = f"{free / GIB:.1f} GiB free at {path}"
    if free >= warn_below:
        return Finding(name, Status.PASS, shown)
    status = Status.FAIL if free < fail_below else Status.WARN
    return Finding(name, status, shown, f"free some space: checkpoints and models need {warn_below / GIB:.0f} GiB")


def check_shared_memory(path: Path = Path("/dev/shm"), need: int = GIB) -> Finding:
    """Size of the shared memory that Ray's object store and the process groups live in, in bytes."""
    if not path.is_dir():
        return Finding("shared memory", Status.FAIL, f"no {path}", f"mount a tmpfs at {path}")
    size = shutil.disk_usage(path).total
    shown = f"{path} holds {size / GIB:.1f} GiB"
    if size >= need:
        return Finding("shared memory", Status.PASS, shown)
    return Finding("shared memory", Status.FAIL, shown, "give the container more: docker run --shm-size=8g")


def check_open_files(need: int = 4096) -> Finding:
    """The soft limit of open files: Ray and the weights' shards take many."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= need or soft == resource.RLIM_INFINITY:
        return Finding("open files", Status.PASS, "unlimited" if soft == resource.RLIM_INFINITY else f"limit {soft}")
    status = Status.FAIL if soft < need // 4 else Status.WARN
    return Finding("open files", status, f"limit {soft}", f"ulimit -n 65536 (at least {need})")


def check_hub() -> Finding:
    """The model hub answers within three seconds. Offline is a warning: local models and data need no hub."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if offline:
        return Finding("hub", Status.WARN, "HF_HUB_OFFLINE is set: local paths and the cache only", "unset it")
    hint = "check the network, or HF_ENDPOINT and the proxy; local paths work without"
    report, detail = probe(
        "from huggingface_hub import constants; from huggingface_hub.utils import get_session; "
        "r = get_session().head(constants.ENDPOINT, timeout=3); report(url=constants.ENDPOINT, status=r.status_code)",
        timeout_s=15,
    )
    if report is None:
        return Finding("hub", Status.WARN, f"cannot be reached: {detail}", hint)
    if report["status"] >= 400:
        return Finding("hub", Status.WARN, f"{report['url']} answers {report['status']}", hint)
    return Finding("hub", Status.PASS, f"{report['url']} answers")


def check_loopback(host: str = "127.0.0.1") -> Finding:
    """A port of the loopback interface can be bound and reached: Ray and the process groups communicate over it."""
    try:
        with socket.create_server((host, 0)) as server, socket.create_connection(server.getsockname(), timeout=3):
            return Finding("loopback", Status.PASS, f"ports of {host} can be bound")
    except OSError as error:
        hint = "bring it up (ip link set lo up), and allow it in the firewall or sandbox"
        return Finding("loopback", Status.FAIL, f"{host}: {error}", hint)


def imported(name: str, code: str, absent: str = ABSENT) -> dict[str, Any] | Finding:
    """The result of `probe` for `code`, which imports the module `name`; a finding if it is absent or fails."""
    if missing(name):
        return Finding(name, Status.WARN, absent, INSTALL)
    report, detail = probe(code)
    return report or Finding(name, Status.FAIL, f"does not import: {detail}", f"install it again: {INSTALL}")


def probe(code: str, timeout_s: float = 180.0) -> tuple[dict[str, Any] | None, str]:
    """Run `code` in a separate Python; returns the values that it passes to `report(…)`, or None and its last line of
    error."""
    prelude = "import json\ndef report(**found): print('\\n' + json.dumps(found))\n"
    exit_code, printed, detail = _run([sys.executable, "-P", "-c", prelude + code], timeout_s)
    if exit_code == 0 and printed.strip():
        return json.loads(printed.strip().splitlines()[-1]), ""
    return None, detail


def _run(command: Sequence[str], timeout_s: float) -> tuple[int, str, str]:
    """Exit code, standard output, and the last line of standard error (or how it died). Leaves no process behind."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _running.add(process.pid)
    try:
        printed, detail = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, "", f"no answer within {timeout_s:g} s"
    finally:
        _running.discard(process.pid)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode < 0:
        return process.returncode, printed, f"killed by {signal.Signals(-process.returncode).name}"
    lines = detail.strip().splitlines()
    return process.returncode, printed, lines[-1] if lines else f"exit code {process.returncode}"


def _driver() -> str | None:
    """The version of the NVIDIA driver, or None without a driver or GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    code, printed, _ = _run([tool, "--query-gpu=driver_version", "--format=csv,noheader"], timeout_s=20)
    return printed.split()[0] if code == 0 and printed.split() else None
