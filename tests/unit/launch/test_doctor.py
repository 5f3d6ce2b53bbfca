"""Each check of the doctor passes and fails on simulated machines."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rlcli_sandbox.machine_check import check_sandbox

from rlcli.cli.main import main
from rlcli.launch import machine_checks
from rlcli.launch.machine_checks import Status

Install = Callable[[str, str], None]
Tool = Callable[[str, str], None]

TORCH = """
__version__ = "{version}"
class version: cuda = {cuda}
class cuda:
    device_count = staticmethod(lambda: {gpus})
    get_device_name = staticmethod(lambda i: "NVIDIA H200")
    @staticmethod
    def get_device_properties(i):
        class properties: total_memory = 139 << 30
        return properties
"""
CPU_TORCH = TORCH.format(version="2.13.0+cpu", cuda="None", gpus=0)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that shadows an installed module, in this process and in those that the doctor starts."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def write(module: str, text: str) -> None:
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        for package in [parent for parent in path.parents if parent.is_relative_to(folder) and parent != folder]:
            package.mkdir(parents=True, exist_ok=True)
            if not (package / "__init__.py").exists():
                (package / "__init__.py").write_text('__version__ = "5.17"\n')
        path.write_text(text)

    return write


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """A function that writes a script to a folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10), Status.FAIL), ((3, 11), Status.PASS), ((3, 12), Status.PASS), ((3, 13), Status.FAIL)],
)
def test_python_is_3_11_or_3_12(version: tuple[int, int], status: Status) -> None:
    assert machine_checks.check_python(version).status is status


def extras_seen_with(modules: list[str], folder: Path) -> dict[str, str]:
    """Result of check_extras in a Python without site-packages, which sees only rlcli and `modules`."""
    for module in modules:
        (folder / f"{module}.py").write_text("")
    root = str(Path(machine_checks.__file__).parents[2])
    code = (
        f"import sys, json; sys.path[:0] = [{root!r}, {str(folder)!r}]; from rlcli.launch import machine_checks; "
        "f = machine_checks.check_extras(); print(json.dumps([f.status, f.detail, f.hint]))"
    )
    command = [sys.executable, "-S", "-E", "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    return dict(zip(["status", "detail", "hint"], json.loads(printed), strict=True))


def test_the_light_core_alone_is_a_warning_that_names_the_extra(tmp_path: Path) -> None:
    seen = extras_seen_with([], tmp_path)
    assert seen["status"] == "warn"
    assert "rlcli[cpu]" in seen["hint"]


def test_half_an_extra_is_a_failure_that_names_the_missing_half(tmp_path: Path) -> None:
    seen = extras_seen_with(["torch", "ray"], tmp_path)
    assert seen["status"] == "fail"
    assert "transformers, peft" in seen["detail"]


def test_a_whole_extra_passes(tmp_path: Path) -> None:
    assert extras_seen_with(["torch", "ray", "peft", "transformers", "vllm"], tmp_path)["status"] == "pass"


@pytest.mark.usefixtures("tool")
def test_torch_without_a_gpu_passes(install: Install) -> None:
    install("torch", CPU_TORCH)
    finding = machine_checks.check_torch()
    assert finding.status is Status.PASS
    assert finding.detail == "2.13.0+cpu, CPU build, no GPU here"


@pytest.mark.usefixtures("tool")
def test_torch_names_its_gpus(install: Install) -> None:
    install("torch", TORCH.format(version="2.11.0+cu130", cuda="'13.0'", gpus=2))
    finding = machine_checks.check_torch()
    assert finding.status is Status.PASS
    assert finding.detail == "2.11.0+cu130, CUDA 13.0, NVIDIA H200 (139 GiB), NVIDIA H200 (139 GiB)"


@pytest.mark.usefixtures("tool")
def test_a_torch_for_rocm_is_named(install: Install) -> None:
    install("torch", TORCH.format(version="2.13.0+rocm7.2", cuda="None; hip = '7.2.1'", gpus=0))
    assert machine_checks.check_torch().detail == "2.13.0+rocm7.2, ROCm 7.2.1, no GPU here"


def test_a_cpu_torch_beside_a_gpu_is_a_warning(install: Install, tool: Tool) -> None:
    install("torch", CPU_TORCH)
    tool("nvidia-smi", "echo 580.65.06")
    finding = machine_checks.check_torch()
    assert finding.status is Status.WARN
    assert "580.65.06" in finding.detail
    assert "rlcli[gpu]" in finding.hint


def test_a_driver_too_old_for_torch_is_a_failure(install: Install, tool: Tool) -> None:
    install("torch", TORCH.format(version="2.11.0+cu130", cuda="'13.0'", gpus=0))
    tool("nvidia-smi", "echo 470.1")
    finding = machine_checks.check_torch()
    assert finding.status is Status.FAIL
    assert "driver" in finding.hint


def test_a_driver_without_a_gpu_is_no_gpu(install: Install, tool: Tool) -> None:
    install("torch", CPU_TORCH)
    tool("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert machine_checks.check_torch().status is Status.PASS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('libgomp.so.1: cannot open')", "libgomp.so.1"),
        ("import os; os.abort()", "SIGABRT"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_a_torch_that_breaks_on_import_is_a_finding(install: Install, text: str, says: str) -> None:
    install("torch", text)
    finding = machine_checks.check_torch()
    assert finding.status is Status.FAIL
    assert says in finding.detail
    assert finding.hint


def test_model_classes_that_import_pass(install: Install) -> None:
    install("torch", CPU_TORCH)
    install("transformers.models.qwen2.modeling_qwen2", "Qwen2ForCausalLM = 1")
    assert machine_checks.check_transformers().status is Status.PASS


def test_a_torchvision_in_the_way_of_transformers_is_named(install: Install) -> None:
    install("torch", CPU_TORCH)
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    install("transformers.models.qwen2.modeling_qwen2", broken)
    finding = machine_checks.check_transformers()
    assert finding.status is Status.FAIL
    assert finding.hint.startswith("pip uninstall torchvision torchaudio torchcodec")


def test_another_failure_of_transformers_blames_no_torchvision(install: Install) -> None:
    install("torch", CPU_TORCH)
    install("transformers.models.qwen2.modeling_qwen2", "raise RuntimeError('tokenizers too old')")
    finding = machine_checks.check_transformers()
    assert finding.status is Status.FAIL
    assert "tokenizers too old" in finding.detail
    assert "torchvision" not in finding.hint


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.23.4", Status.FAIL),
        ("0.24.0", Status.PASS),
        ("0.32.0+cpu", Status.PASS),
        ("0.33.0", Status.FAIL),
        ("1.0", Status.FAIL),
        ("dev", Status.FAIL),
    ],
)
def test_vllm_has_a_version_that_is_known_to_work(install: Install, version: str, status: Status) -> None:
    install("vllm", f"__version__ = {version!r}\nLLM = 1")
    finding = machine_checks.check_vllm()
    assert finding.status is status
    assert version in finding.detail


def test_a_vllm_whose_engine_does_not_import_is_a_failure(install: Install) -> None:
    install("vllm", "__version__ = '0.32.0'\ndef __getattr__(name): raise ImportError('no _C')")
    finding = machine_checks.check_vllm()
    assert finding.status is Status.FAIL
    assert "no _C" in finding.detail


def test_ray_passes_and_fails_by_its_import(install: Install) -> None:
    install("ray", "__version__ = '2.60.0'\nprint('a line that is no report')")
    assert machine_checks.check_ray() == machine_checks.Finding("ray", Status.PASS, "2.60.0")
    install("ray", "raise OSError('_raylet.so')")
    assert machine_checks.check_ray().status is Status.FAIL


ANY_TORCH = TORCH.format(version="2.13.0", cuda="'13.0'", gpus=0)
"""A build with CUDA: with one for CPUs, the environment of a checkout may declare operators."""
PILLOW = "__version__ = '12.3.0'"
FEATURES = "def check(name): return name not in {lacks}"


@pytest.mark.parametrize(
    ("lacks", "status", "says"),
    [
        ([], Status.PASS, "12.3.0, decodes PNG, JPEG, WebP"),
        (["webp"], Status.WARN, "12.3.0 decodes no WebP"),
        (["jpg", "webp"], Status.WARN, "12.3.0 decodes no JPEG, WebP"),
    ],
)
def test_pillow_decodes_what_datasets_have(install: Install, lacks: list[str], status: Status, says: str) -> None:
    install("PIL.features", FEATURES.format(lacks=lacks))
    install("PIL.Image", "")
    install("PIL.__init__", PILLOW)
    finding = machine_checks.check_images()
    assert (finding.status, finding.detail) == (status, says)
    assert ("pillow>=11.3" in finding.hint) == bool(lacks)


def test_a_pillow_that_is_broken_or_absent_is_a_warning(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("PIL.__init__", "raise ImportError('cannot import name _imaging')")
    finding = machine_checks.check_images()
    assert finding.status is Status.WARN
    assert "_imaging" in finding.detail
    monkeypatch.setattr(machine_checks, "missing", lambda *modules: list(modules))
    finding = machine_checks.check_images()
    assert (finding.status, finding.hint) == (Status.WARN, "pip install 'pillow>=11.3'")


def test_a_torchvision_that_resizes_passes(install: Install) -> None:
    install("torch", ANY_TORCH + "uint8 = 0\ndef zeros(*sizes, dtype): return sizes\n")
    install("torchvision.transforms.v2.functional", "def resize(image, size): return size\n")
    assert machine_checks.check_torchvision() == machine_checks.Finding(
        "pictures (vision)", Status.PASS, "torchvision 5.17"
    )


@pytest.mark.parametrize(
    ("text", "says", "fix"),
    [
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "without CUDA",
            "in a checkout: scripts/env",
        ),
        ("raise OSError('libcudart.so.13: cannot open')", "libcudart", "in the build for this torch"),
    ],
)
def test_a_torchvision_that_does_not_load_has_its_fix(install: Install, text: str, says: str, fix: str) -> None:
    install("torch", ANY_TORCH)
    install("torchvision.__init__", text)
    finding = machine_checks.check_torchvision()
    assert finding.status is Status.WARN
    assert says in finding.detail
    assert fix in finding.hint


def test_no_torchvision_is_a_warning_with_the_fix(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("torch", ANY_TORCH)
    monkeypatch.setattr(
        machine_checks, "missing", lambda *modules: [module for module in modules if module == "torchvision"]
    )
    finding = machine_checks.check_torchvision()
    assert finding.status is Status.WARN
    assert "torchvision is not installed" in finding.detail
    assert "scripts/env" in finding.hint


def dies(process: str) -> bool:
    """True if the process is gone, or a zombie, within five seconds: a killed process takes a moment to exit."""
    for _ in range(100):
        try:
            if Path("/proc", process, "stat").read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_probe_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, time, pathlib; child = subprocess.Popen(['sleep', '600']); "
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    report, failure = machine_checks.probe(code, timeout_s=2)
    assert report is None
    assert failure == "no answer within 2 s"
    assert dies(pid_file.read_text())


@pytest.fixture
def no_backend_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLCLI_SANDBOX", raising=False)


@pytest.mark.usefixtures("tool", "no_backend_asked_for")
def test_no_bwrap_is_named_with_its_package() -> None:
    finding = check_sandbox()
    assert "bwrap is not installed" in finding.detail
    assert "apt install bubblewrap" in finding.detail + finding.hint


@pytest.mark.usefixtures("no_backend_asked_for")
def test_a_bwrap_that_may_not_start_is_named_with_its_reason(tool: Tool) -> None:
    tool("bwrap", "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    finding = check_sandbox()
    assert "Permission denied" in finding.detail
    assert "user namespaces" in finding.detail + finding.hint


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.usefixtures("no_backend_asked_for")
def test_a_bwrap_that_starts_passes_with_its_version() -> None:
    finding = check_sandbox()
    assert finding.status is Status.PASS
    assert re.fullmatch(r"bwrap \(\d+\.\d+.*\)", finding.detail)


@pytest.mark.usefixtures("tool")
def test_a_backend_that_is_asked_for_and_absent_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", "bwrap")
    finding = check_sandbox()
    assert finding.status is Status.WARN
    assert "apt install bubblewrap" in finding.hint


def test_unsafe_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", "unsafe")
    finding = check_sandbox()
    assert finding.status is Status.WARN
    assert "RLCLI_SANDBOX" in finding.hint


def test_an_endpoint_is_named_and_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", "http://203.0.113.1:8080")
    finding = check_sandbox()
    assert finding.status is Status.PASS
    assert "http://203.0.113.1:8080" in finding.detail


def test_trackers_are_listed_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package in ("tensorboard", "mlflow-skinny"):
            return "3.1"
        raise machine_checks.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(machine_checks.metadata, "version", version)
    finding = machine_checks.check_trackers()
    assert finding.status is Status.PASS
    assert finding.detail == "mlflow 3.1, tensorboard 3.1; pip install 'rlcli[NAME]' adds swanlab, trackio, wandb"


def test_disk_space_is_taken_where_the_folder_will_be(tmp_path: Path) -> None:
    absent = tmp_path / "not" / "yet"
    free = machine_checks.check_disk("disk", absent, fail_below=1, warn_below=1)
    assert free.status is Status.PASS
    assert str(absent) in free.detail
    assert machine_checks.check_disk("disk", absent, fail_below=1, warn_below=1 << 60).status is Status.WARN
    assert machine_checks.check_disk("disk", absent, fail_below=1 << 60, warn_below=1 << 60).status is Status.FAIL


def test_shared_memory_is_there_and_large_enough(tmp_path: Path) -> None:
    assert machine_checks.check_shared_memory(tmp_path, need=1).status is Status.PASS
    small = machine_checks.check_shared_memory(tmp_path, need=1 << 60)
    assert small.status is Status.FAIL
    assert "--shm-size" in small.hint
    assert machine_checks.check_shared_memory(tmp_path / "absent").status is Status.FAIL


@pytest.mark.parametrize(("limit", "status"), [(4096, Status.PASS), (2048, Status.WARN), (512, Status.FAIL)])
def test_the_limit_of_open_files(limit: int, status: Status) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < limit:
        pytest.skip(f"the hard limit here is {limits[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        finding = machine_checks.check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert finding.status is status
    assert str(limit) in finding.detail


class Hub(BaseHTTPRequestHandler):
    status = 200

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name == "HF_HUB_OFFLINE"]:
        monkeypatch.delenv(name)
    server = HTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_that_answers_passes(hub: HTTPServer) -> None:
    finding = machine_checks.check_hub()
    assert finding.status is Status.PASS
    assert str(hub.server_port) in finding.detail


def test_a_hub_that_refuses_is_a_warning(hub: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "status", 503)
    finding = machine_checks.check_hub()
    assert finding.status is Status.WARN
    assert "503" in finding.detail


@pytest.mark.usefixtures("hub")
def test_no_hub_is_a_warning_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    finding = machine_checks.check_hub()
    assert finding.status is Status.WARN
    assert "refused" in finding.detail


def test_offline_mode_is_honoured(hub: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = machine_checks.check_hub()
    assert finding.status is Status.WARN
    assert "HF_HUB_OFFLINE" in finding.detail


def test_loopback_ports_can_be_bound_or_not() -> None:
    assert machine_checks.check_loopback().status is Status.PASS
    finding = machine_checks.check_loopback("203.0.113.1")  # an address for documentation, which no machine has
    assert finding.status is Status.FAIL
    assert finding.hint


@pytest.fixture
def healthy(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    install("torch", CPU_TORCH)
    install("transformers.models.qwen2.modeling_qwen2", "Qwen2ForCausalLM = 1")
    install("vllm", "__version__ = '0.32.0'\nLLM = 1")
    install("ray", "__version__ = '2.60.0'")
    install("peft", "")


@pytest.mark.usefixtures("healthy")
def test_the_command_prints_a_line_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    statuses = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert len(statuses) == 17
    assert set(statuses) <= {"pass", "warn", "fail"}


@pytest.mark.usefixtures("healthy")
def test_warnings_leave_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    if any(check["status"] == "fail" for check in report["checks"]):
        pytest.skip("this machine itself lacks something")
    assert code == 0
    assert report["ok"] is True
    assert {"hub": "warn"}.items() <= {check["name"]: check["status"] for check in report["checks"]}.items()


@pytest.mark.usefixtures("healthy")
def test_one_crash_does_not_end_the_doctor_but_fails_it(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("ray", "import os; os.abort()")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert (statuses["ray"], statuses["vllm"]) == ("fail", "pass")
    assert list(statuses)[-1] == "loopback"


@pytest.mark.usefixtures("healthy")
def test_ctrl_c_ends_the_doctor_at_once_and_leaves_no_probe_behind(install: Install, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    install(
        "ray", f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    # In tests that a shell starts in the background, SIGINT is ignored, and children inherit that.
    default_sigint = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = default_sigint + "import sys; from rlcli.cli.main import main; sys.exit(main(['doctor']))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not (pid_file.exists() and pid_file.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert dies(pid_file.read_text())
