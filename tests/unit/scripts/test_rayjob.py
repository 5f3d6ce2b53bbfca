"""scripts/clusters/rayjob.yaml: KubeRay accepts its fields, and its commands do what they are for."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[3] / "scripts" / "clusters" / "rayjob.yaml"

# Written by hand from the API references of KubeRay 1.6 (ray.io/v1) and Kubernetes (core/v1): the RayJob and its groups
# without rarely used tables, and of a pod what this file may use. «!»: required. A field that is missing here is
# refused: look it up, and add it.
FIELDS = yaml.safe_load("""
apiVersion!: =ray.io/v1
kind!: =RayJob
metadata!: &metadata {name: name, namespace: name, labels: texts, annotations: texts}
spec!:
  entrypoint: text
  entrypointNumCpus: number
  entrypointNumGpus: number
  entrypointResources: text
  runtimeEnvYAML: text
  jobId: text
  metadata: texts
  clusterSelector: texts
  managedBy: text
  submissionMode: =K8sJobMode|HTTPMode|InteractiveMode|SidecarMode
  submitterConfig: {backoffLimit: count}
  backoffLimit: count
  activeDeadlineSeconds: count
  preRunningDeadlineSeconds: count
  shutdownAfterJobFinishes: flag
  ttlSecondsAfterFinished: count
  suspend: flag
  rayClusterSpec:
    rayVersion: text
    authOptions: {mode: =disabled|token, secretName: name, enableK8sTokenAuth: flag}
    enableInTreeAutoscaling: flag
    suspend: flag
    headServiceAnnotations: texts
    headGroupSpec!:
      rayStartParams!: texts
      serviceType: text
      enableIngress: flag
      template!: &pod
        metadata: *metadata
        spec!:
          restartPolicy: =Always|OnFailure|Never
          terminationGracePeriodSeconds: count
          nodeSelector: texts
          serviceAccountName: text
          priorityClassName: text
          hostNetwork: flag
          hostIPC: flag
          containers!:
            - name!: name
              image!: text
              imagePullPolicy: =Always|IfNotPresent|Never
              command: [text]
              args: [text]
              env: [{name!: text, value: text}]
              resources: {requests: quantities, limits: quantities}
              lifecycle: {preStop: {exec: {command!: [text]}, sleep: {seconds!: count}}}
              volumeMounts: [{name!: name, mountPath!: text, subPath: text, readOnly: flag}]
          volumes:
            - name!: name
              emptyDir: {medium: =Memory, sizeLimit: quantity}
              persistentVolumeClaim: {claimName!: text, readOnly: flag}
              hostPath: {path!: text, type: text}
    workerGroupSpecs:
      - groupName!: name
        replicas: count
        minReplicas!: count
        maxReplicas!: count
        numOfHosts: count
        idleTimeoutSeconds: count
        suspend: flag
        rayStartParams!: texts
        template!: *pod
""")
NAME, QUANTITY = r"[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?", r"\d+(\.\d+)?(m|k|[KMGTPE]i|[MGTPE])?"
KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "name": lambda value: isinstance(value, str) and bool(re.fullmatch(NAME, value)),
    "quantity": lambda value: type(value) in (str, int) and bool(re.fullmatch(QUANTITY, str(value))),
    "number": lambda value: type(value) in (int, float),
    "count": lambda value: type(value) is int and value >= 0,
    "flag": lambda value: isinstance(value, bool),
}


def errors(value: Any, shape: Any, where: str = "") -> list[str]:
    """Mismatches between the value and `shape`, each with its path."""
    if isinstance(shape, str) and shape in ("texts", "quantities"):
        kind = {"texts": "text", "quantities": "quantity"}[shape]
        fits = isinstance(value, dict) and all(map(KINDS[kind], value.values()))
        return [] if fits else [f"{where}: no table of {shape}"]
    if isinstance(shape, str):
        fits = value in shape[1:].split("|") if shape.startswith("=") else KINDS[shape](value)
        return [] if fits else [f"{where}: {value!r} is not {shape}"]
    if type(value) is not type(shape):
        return [f"{where}: a {type(value).__name__}"]
    if isinstance(shape, list):
        return [error for item in value for error in errors(item, shape[0], f"{where}[]")]
    fields = {name.rstrip("!"): inner for name, inner in shape.items()}
    messages = [f"{where}.{name}: unknown" for name in value if name not in fields]
    messages += [f"{where}.{name[:-1]}: missing" for name in shape if name.endswith("!") and name[:-1] not in value]
    return messages + [
        error
        for name, item in value.items()
        if name in fields
        for error in errors(item, fields[name], f"{where}.{name}")
    ]


def rayjob() -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return manifest


def groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_kuberay_and_kubernetes_know_every_field() -> None:
    assert errors(rayjob(), FIELDS) == []


def head(job: dict[str, Any]) -> dict[str, Any]:
    pod_spec: dict[str, Any] = groups(job)[0]["template"]["spec"]
    return pod_spec


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job.update(apiVersion="ray.io/v1alpha1"),
        lambda job: job["metadata"].update(name="Rlcli_One"),
        lambda job: job["spec"].update(shutdownAfterJobFinish=True),
        lambda job: job["spec"].update(backoffLimit="3"),
        lambda job: job["spec"].update(submissionMode="K8sMode"),
        lambda job: job["spec"].update(restartPolicy="Never"),
        lambda job: job["spec"].update(rayClusterSpec=[]),
        lambda job: groups(job)[1].pop("groupName"),
        lambda job: groups(job)[1].update(maxReplicas="4"),
        lambda job: groups(job)[1].update(rayStartParams={"num-cpus": 8}),
        lambda job: head(job).update(preStop={}),
        lambda job: head(job)["containers"][0].pop("image"),
        lambda job: head(job)["containers"][0]["resources"]["limits"].update(memory="64 GB"),
        lambda job: head(job)["volumes"][1]["emptyDir"].update(medium="memory"),
    ],
)
def test_a_wrong_field_is_found(spoil: Callable[[dict[str, Any]], object]) -> None:
    job = json.loads(json.dumps(rayjob()))  # the two groups share what the file's anchors name
    spoil(job)
    assert len(errors(job, FIELDS)) == 1


def test_what_the_fields_name_and_count_agrees() -> None:
    job = rayjob()
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] or not spec["ttlSecondsAfterFinished"], "the operator refuses the two"
    for group in groups(job):
        pod = group["template"]["spec"]
        assert group.get("minReplicas", 0) <= group.get("replicas", 0) <= group.get("maxReplicas", 0)
        for container in pod["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}
            assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_rayjobs_command_is_one_and_asks_for_the_gpus_that_it_has() -> None:
    from rlcli.config.load import resolve

    job = rayjob()
    words = shlex.split(job["spec"]["entrypoint"])
    options = {name: value for name, value in pairwise(words) if name.startswith("--")}
    assert (words[:3], options["--ray-address"]) == (["rlcli", "train", "grpo"], "auto")
    sets = [value for name, value in pairwise(words) if name == "--set"]
    config = resolve("grpo", {"cluster.workers": int(options["--workers"])}, sets).config
    gpus = [
        group.get("replicas", 1) * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        for group in groups(job)
        for container in group["template"]["spec"]["containers"]
    ]
    assert gpus[0] == 0
    assert config.cluster.device == "cuda", "auto asks the machine of the command, which has no GPU"
    assert config.cluster.workers == sum(gpus)
    assert config.cluster.wait_s > 0, "pods start one after another"
    assert "--continue" in words
    assert not set("'\"\\$;&|<>(){}*?#\n") & set(job["spec"]["entrypoint"]), "a shell reads it before Ray's does"


PROGRAM = """#!{python}
import pathlib, signal, sys, time
place, told = pathlib.Path({folder!r}), []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
(place / "started").touch()
while not told:
    time.sleep(0.01)
time.sleep(1)
(place / "saved").write_text(f"{{len(told)}} {{sys.argv[1:]}}")
"""
"""A run: asked to stop, it takes a second for its step and its checkpoint."""


def test_before_the_head_ends_the_run_is_told_and_waited_for(tmp_path: Path) -> None:
    container = head(rayjob())["containers"][0]
    shell, option, hook = container["lifecycle"]["preStop"]["exec"]["command"]
    program = tmp_path / "rlcli"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    # As Ray starts it: through a shell, which may or may not remain beside it.
    run = subprocess.Popen(["sh", "-c", rayjob()["spec"]["entrypoint"] + "; true"], env=os.environ | path)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < until:
            time.sleep(0.05)
        # Only this test's program: the machine may have runs of its own.
        mine = hook.replace("[/]rlcli", f"[/]{tmp_path.name}/rlcli")
        assert mine.count(tmp_path.name) == 2
        subprocess.run([shell, option, mine], check=True, timeout=60)
        assert (tmp_path / "saved").read_text().startswith("1 ['train', 'grpo'"), "the hook ends after the run"
        assert run.wait(60) == 0
        subprocess.run([shell, option, mine], check=True, timeout=60)  # nothing to wait for
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
            run.wait()
