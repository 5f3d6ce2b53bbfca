"""Trackers: each real library against its local store, and what a run bears from a tracker that misbehaves."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.config.recipes import flatten
from rlcli.errors import ConfigError, RlcliError, RunFailed, SetupError
from rlcli.launch.machine_checks import check_trackers
from rlcli.registry import Registry
from rlcli.runs import tracking
from rlcli.runs.folder import RunFolder
from rlcli.runs.tracking import open_trackers, tracker_process
from rlcli.runs.tracking import tracker as tracker_module
from tests.tracker_conformance import STEPS, conforms, log_steps, write_step

CONFIG = {"train": {"lr": 1e-6, "steps": 2}, "tracking": {"trackers": ["x"]}}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "grpo-1") as folder:
        yield folder


@pytest.fixture
def warnings() -> list[str]:
    return []


def needs(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")


def metrics_lines(folder: RunFolder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_always_in_the_run_folder(folder: RunFolder, warnings: list[str]) -> None:
    trackers = open_trackers([], folder, "rlcli", CONFIG, warnings.append)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.log(2, {"reward/mean": 0.75})
    trackers.close()
    assert metrics_lines(folder) == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}]
    assert warnings == []


@pytest.mark.long
def test_tensorboard_reads_back_the_log_and_a_resume_replaces_steps(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def rewards() -> list[tuple[int, float]]:
        events = EventAccumulator(str(folder.path / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("reward/mean")]

    log_steps("tensorboard", folder, CONFIG, [*STEPS, (3, {"reward/mean": math.inf})])
    assert rewards() == [(1, 0.5), (2, 0.75), (3, math.inf)]
    log_steps("tensorboard", folder, CONFIG, [(2, {"reward/mean": 0.875}), (3, {"reward/mean": 1.0})], resumed_at=1)
    assert rewards() == [(1, 0.5), (2, 0.875), (3, 1.0)]
    log_steps("tensorboard", folder, CONFIG, [(0, {"reward/mean": 0.125})], resumed_at=-1)
    assert rewards() == [(0, 0.125)]


@pytest.mark.long
def test_tensorboard_shows_samples_as_text_and_the_curve_as_an_image(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html

    log_steps("tensorboard", folder, CONFIG, STEPS)
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert events.SummaryMetadata("samples").plugin_data.plugin_name == "text"
    assert [event.step for event in events.Tensors("samples")] == [1, 2]
    first = events.Tensors("eval/samples")[0].tensor_proto.string_val
    assert len(first) == 2
    shown = text_array_to_html(np.array(first), enable_markdown=True)
    assert "<strong>score 0, wrong, sums:train:1 #1</strong>" in shown
    assert "assistant: # Let me see" in shown
    assert "What is *6* &lt;b&gt;·&lt;/b&gt; 7?" in shown
    (image,) = events.Images("reward")
    assert image.encoded_image_string == (folder.path / "reward.png").read_bytes()
    assert (image.width, image.height) == (1200, 675)


def stored_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    record, at = b"", 7
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768


def wandb_runs(folder: RunFolder) -> list[tuple[str, str, set[str], list[tuple[int, float]]]]:
    """Project, id, sections of the configuration, and (step, reward) of each run that is stored, oldest first."""
    from wandb.proto import wandb_internal_pb2

    runs = []
    for stored in sorted((folder.path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        history, project, run_id, sections = [], "", "", set()
        for data in stored_records(stored.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                project, run_id = record.run.project, record.run.run_id
                sections |= {item.key for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                history.append((record.history.step.num, items["reward/mean"]))
        runs.append((project, run_id, sections, history))
    return runs


@pytest.mark.long
def test_wandb_offline_stores_the_run_in_its_folder_and_resumes_its_id(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    first = conforms("wandb", folder, CONFIG)
    assert capfd.readouterr() == ("", "")
    initial, resumed = wandb_runs(folder)
    assert initial[:2] == resumed[:2] == ("arith", first)
    assert {"train", "tracking"} <= initial[2]
    assert initial[3] == [(1, 0.5), (2, 0.75)]
    assert resumed[3] == [(3, 1.0)]
    (run, _) = sorted((folder.path / "wandb").glob("offline-run-*"))
    for room in (run / "files" / "media" / "table", run / "files" / "media" / "table" / "eval"):
        table = json.loads(next(room.glob("samples_1_*.table.json")).read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert [(row["step"], row["score"], row["outcome"]) for row in rows] == [(1, 0.0, "wrong"), (1, 1.0, "ok")]
        assert "\n\ntool: 42\n\nassistant: It is 41." in rows[0]["conversation"]
    assert len([*(run / "files" / "media" / "images").glob("reward_2_*.png")]) == 1


def running(name: str) -> list[Any]:
    """The processes below this one that are called so."""
    psutil = pytest.importorskip("psutil")
    processes = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            processes += [child] if name in child.name() else []
    return processes


@pytest.mark.long
def test_wandb_whose_service_is_killed_costs_the_run_nothing(
    folder: RunFolder, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = open_trackers(["wandb"], folder, "arith", CONFIG, warnings.append)
    while not (folder.path / "trackers.json").exists():
        time.sleep(0.01)
    services = running("wandb-core")
    assert services
    for service in services:
        service.kill()
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": 0.5})
    trackers.close()
    assert len(metrics_lines(folder)) == 3
    # wandb may notice while it writes, or only when it ends and nothing answers. Which error it then has hangs on which
    # of its threads met the closed connection first, and is not ours: that there is one, and where it was met, is said.
    assert re.match(r"wandb failed at (step [123]|the end): \w+Error:|wandb is off for", warnings[0])
    assert all(warning.startswith("wandb ") for warning in warnings)
    assert not running("wandb")


@pytest.mark.long
def test_mlflow_keeps_one_run_over_a_resume_in_a_database_of_the_folder(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracking, "FAILED_S", 60.0)
    first = conforms("mlflow", folder, CONFIG, failed=True)
    with sqlite3.connect(folder.path / "mlflow" / "mlflow.db") as stored:
        assert stored.execute("select run_uuid, name, status from runs").fetchall() == [(first, "grpo-1", "FAILED")]
        assert ("arith",) in stored.execute("select name from experiments").fetchall()
        rewards = stored.execute("select step, value from metrics where key = 'reward/mean' order by step").fetchall()
        assert rewards == [(1, 0.5), (2, 0.75), (3, 1.0)]
        evaluations = "select step, value, is_nan from metrics where key = 'eval/pass_1' order by step"
        assert stored.execute(evaluations).fetchall() == [(1, 0.25, 0), (2, 0.0, 1)]
        assert dict(stored.execute("select key, value from params").fetchall()) == {
            name: str(value) for name, value in flatten(CONFIG).items()
        }
    (artifacts,) = (folder.path / "mlflow" / "artifacts").glob("*/artifacts")
    assert sorted(path.name for path in (artifacts / "samples").iterdir()) == ["step-000001.txt", "step-000002.txt"]
    text = (artifacts / "eval" / "samples" / "step-000001.txt").read_text()
    assert text.startswith("score 0, wrong, sums:train:1 #1\n\nuser: What is *6*")
    assert (artifacts / "reward.png").read_bytes() == (folder.path / "reward.png").read_bytes()


@pytest.mark.long
def test_swanlab_local_stores_the_run_in_its_folder_and_resumes_its_id(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    needs("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "local")
    first = conforms(
        "swanlab", folder, CONFIG, before_resume=lambda: time.sleep(1.1)
    )  # folders are named by the second
    assert capfd.readouterr() == ("", "")
    stored = []
    for run_folder in sorted((folder.path / "swanlab").glob(f"run-*-{first}")):
        assert re.search(r"lr: 1.0e-06", (run_folder / "files" / "config.yaml").read_text())
        logs = [[json.loads(line) for line in log.read_text().splitlines()] for log in run_folder.glob("logs/*/*.log")]
        numbers = [line for log in logs for line in log if isinstance(line["data"], float)]
        stored.append(sorted((line["index"], line["data"]) for line in numbers))
    assert repr(stored) == "[[(1, 0.25), (1, 0.5), (2, nan), (2, 0.75)], [(3, 1.0)]]"
    (run, _) = sorted((folder.path / "swanlab").glob(f"run-*-{first}"))
    texts = [path.read_text() for path in sorted((run / "media" / "text").glob("002-*.txt"))]
    assert sorted(text.count("assistant: ") for text in texts) == [1, 2]
    assert len([*(run / "media" / "image").glob("002-*.png")]) == 1


@pytest.mark.long
def test_trackio_keeps_one_run_over_a_resume_in_its_database(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs("trackio")
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    conforms("trackio", folder, CONFIG)
    with sqlite3.connect(folder.path / "trackio" / "arith.db") as stored:
        rows = stored.execute("select run_id, run_name, step, metrics from metrics order by step").fetchall()
        ((config,),) = stored.execute("select config from configs").fetchall()
        traces = stored.execute("select key, messages, metadata from traces where step = 2 order by key, id").fetchall()
    assert len({row[0] for row in rows}) == 1
    logged = [(name, step, json.loads(values)) for _, name, step, values in rows]
    assert [(name, step, values["reward/mean"]) for name, step, values in logged if "reward/mean" in values] == [
        ("grpo-1", 1, 0.5),
        ("grpo-1", 2, 0.75),
        ("grpo-1", 3, 1.0),
    ]
    assert json.loads(config)["train"]["lr"] == 1e-6
    assert [key for key, *_ in traces] == ["eval/samples"] * 2 + ["samples"] * 2
    assert [json.loads(metadata)["score"] for *_, metadata in traces] == [0.0, 1.0] * 2
    assert [message["role"] for message in json.loads(traces[0][1])] == ["user", "assistant", "tool", "assistant"]
    assert len([*(folder.path / "trackio" / "media" / "arith" / "grpo-1" / "2").glob("*.png")]) == 1


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_tracker_without_its_key_is_refused_before_it_could_ask_for_one(
    name: str, folder: RunFolder, warnings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs(name)
    for variable in ("MODE", "API_KEY", "IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(f"{name.upper()}_{variable}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path))
    hint = f"{name} has no API key; run `{name} login`, or set {name.upper()}_MODE=offline"
    with pytest.raises(SetupError, match=hint):
        open_trackers([name], folder, "rlcli", CONFIG, warnings.append)


SHIPPED = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")


def test_the_shipped_trackers_are_found() -> None:
    assert set(SHIPPED) <= set(tracking.REGISTRY.names())


def test_an_unknown_tracker_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"trackers = wanbd: no .*; known: mlflow, swanlab, .*wandb"):
        tracking.check_trackers(["wanbd"])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_missing_package_names_the_extra(
    name: str, folder: RunFolder, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(tracker_module, "find_spec", lambda package: None if package == name else real(package))
    with pytest.raises(SetupError, match=rf"{name}, which is not installed; pip install 'rlcli\[{name}\]'"):
        open_trackers([name], folder, "rlcli", CONFIG, warnings.append)


def test_a_folder_of_that_name_is_no_package(
    folder: RunFolder, warnings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SetupError, match="plain, which is not installed"):
        tracker_module.require("plain")


Made = Callable[..., str]


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Makes a tracker whose methods have the given bodies, under a name that `open_trackers` takes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tracking, "REGISTRY", Registry("tracker", "rlcli.trackers"))

    def make(name: str, init: str = "pass", log: str = "pass", close: str = "pass", methods: str = "") -> str:
        (tmp_path / f"{name}.py").write_text(
            "import os, sys, time, signal, pathlib\n"
            "from rlcli.runs.tracking.tracker import Tracker\n"
            "class Made(Tracker):\n"
            "    id = 'an-id'\n"
            f"    def __init__(self, run): self.run = run; self.seen = []; {init}\n"
            f"    def log(self, step, metrics): self.seen.append(step); {log}\n"
            f"    def close(self, failed): {close}\n"
            f"{methods}"
        )
        tracking.REGISTRY.add(name, f"{name}:Made")
        return name

    return make


KEEP = """
    def samples(self, step, name, samples):
        import json
        assert [one.score for one in samples] == [0.0, 1.0], samples
        self.given = [*getattr(self, 'given', []), [step, name]]
        (self.run.folder / 'samples.json').write_text(json.dumps(self.given))
    def image(self, name, file):
        import json
        (self.run.folder / 'samples.json').write_text(json.dumps([*self.given, [name, file.read_text()]]))
"""
WRITE = "(self.run.folder / 'seen').write_text(repr((self.seen, failed)))"


def seen(folder: RunFolder) -> str:
    return (folder.path / "seen").read_text()


def test_a_tracker_that_raises_is_reported_once_and_called_again(
    folder: RunFolder, warnings: list[str], tracker: Made
) -> None:
    names = [tracker("first", log="raise ConnectionError('server\\ngone')"), tracker("second", close=WRITE)]
    trackers = open_trackers(names, folder, "rlcli", CONFIG, warnings.append)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": 0.5})
    trackers.close()
    trackers.close()
    assert warnings == [
        "first failed at step 1: ConnectionError: server gone",
        "first lacks 3 steps; metrics.jsonl has them all",
    ]
    assert seen(folder) == "([1, 2, 3], False)"
    assert len(metrics_lines(folder)) == 3
    assert "Traceback" in (folder.logs / "tracker-first.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("hook", ["image", "picture"])  # its name, and the one before
def test_samples_come_with_the_first_step_every_tenth_and_evaluations(
    hook: str, folder: RunFolder, warnings: list[str], tracker: Made
) -> None:
    name = tracker("reader", close=WRITE, methods=KEEP.replace("def image", f"def {hook}"))
    trackers = open_trackers([name], folder, "rlcli", CONFIG, warnings.append)
    for step in range(22):
        write_step(folder, step)
        trackers.log(step, {"reward/mean": 0.5} | ({"eval/pass@1": 0.5} if step in (0, 7) else {}))
    trackers.amend(21, {"eval/pass@1": 0.5})
    (folder.path / "reward.png").write_bytes(b"PNG")
    trackers.image("reward", folder.path / "reward.png")
    trackers.close()
    assert warnings == []
    assert json.loads((folder.path / "samples.json").read_text()) == [
        *([step, name] for step in (0,) for name in ("samples", "eval/samples")),
        [1, "samples"],
        *([7, name] for name in ("samples", "eval/samples")),
        [10, "samples"],
        [20, "samples"],
        *([21, name] for name in ("samples", "eval/samples")),
        ["reward", "PNG"],
    ]


@pytest.mark.long
def test_a_tracker_that_fails_on_samples_keeps_its_metrics(
    folder: RunFolder, warnings: list[str], tracker: Made
) -> None:
    methods = "    def samples(self, step, name, samples): raise OSError('no tables')\n"
    trackers = open_trackers([tracker("bad", close=WRITE, methods=methods)], folder, "rlcli", CONFIG, warnings.append)
    write_step(folder, 1)
    for step in (1, 2):
        trackers.log(step, {"reward/mean": 0.5})
    trackers.close()
    assert warnings == ["bad failed at the samples of step 1: OSError: no tables"]
    assert seen(folder) == "([1, 2], False)"


def test_a_tracker_without_samples_and_images_is_not_asked(
    folder: RunFolder, warnings: list[str], tracker: Made, tmp_path: Path
) -> None:
    """A plugin of before: it need not even inherit from `Tracker`."""
    name = tracker("older", close=WRITE)
    module = tmp_path / "older.py"
    module.write_text(module.read_text().replace("class Made(Tracker):", "class Made:\n    check = Tracker.check"))
    trackers = open_trackers([name], folder, "rlcli", CONFIG, warnings.append)
    write_step(folder, 1)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.image("reward", folder.path / "reward.png")
    trackers.close()
    assert warnings == []
    assert seen(folder) == "([1], False)"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"init": "raise OSError('no route')"}, r"bad is off for this run: OSError: no route"),
        ({"close": "raise OSError('no route')"}, r"bad failed at the end: OSError: no route"),
        (
            {"log": "os.kill(os.getpid(), 9)"},
            r"bad is off for the rest .* was killed by SIGKILL; see .*-bad.log",
        ),
        ({"init": "os._exit(7)"}, r"bad is off for the rest of the run: its process ended with exit code 7; see .*"),
        ({"log": "sys.exit('enough')"}, r"bad is off for the rest of the run: its process ended with exit code 1; .*"),
    ],
)
def test_however_a_tracker_fails_the_run_goes_on_and_tells_of_it_once(
    where: dict[str, str], expected: str, folder: RunFolder, warnings: list[str], tracker: Made
) -> None:
    trackers = open_trackers([tracker("bad", **where)], folder, "rlcli", CONFIG, warnings.append)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": 0.5})
    trackers.close()
    assert len(warnings) == 1
    assert re.fullmatch(expected, warnings[0]), warnings
    assert len(metrics_lines(folder)) == 3


def test_a_tracker_that_prints_or_reads_disturbs_no_terminal_or_pipe(
    folder: RunFolder, warnings: list[str], tracker: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    noisy = "print('chatter'); os.system('echo more chatter'); self.key = sys.stdin.read()"
    trackers = open_trackers([tracker("noisy", init=noisy, log="print(step)", close=WRITE)], folder, "p", {}, print)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close()
    assert seen(folder) == "([1], False)"
    assert capfd.readouterr() == ("", "")
    assert sorted((folder.logs / "tracker-noisy.log").read_text().split()) == ["1", "chatter", "chatter", "more"]


def test_a_tracker_that_hangs_delays_no_step_and_is_killed_at_the_end(
    folder: RunFolder, warnings: list[str], tracker: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_process, "BEHIND", 5)
    monkeypatch.setattr(tracking, "FINISH_S", 1.0)
    hanging = tracker(
        "hanging", init="(run.folder / 'pid').write_text(str(os.getpid()))", log="step == 2 and time.sleep(600)"
    )
    trackers = open_trackers([hanging], folder, "rlcli", CONFIG, warnings.append)
    for step in range(1, 101):
        trackers.log(step, {"reward/mean": 0.5})
        time.sleep(0.01 if step < 60 else 0)
    trackers.close()
    assert len(metrics_lines(folder)) == 100
    late, killed = warnings
    assert re.fullmatch(r"hanging is 5 steps behind; from step \d+ on it lacks some", late)
    assert re.fullmatch(r"hanging did not finish in time and was killed; it may lack (99|100) steps", killed)
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder.path / "pid").read_text()), 0)


def test_a_tracker_outlives_a_killed_run_only_to_store_what_it_has(tmp_path: Path, tracker: Made) -> None:
    name = tracker("faithful", init="(run.folder / 'pid').write_text(str(os.getpid()))", close=WRITE)
    program = (
        "import os, signal, time; from pathlib import Path\n"
        "from rlcli.runs.folder import RunFolder; from rlcli.runs import tracking\n"
        f"tracking.REGISTRY.add({name!r}, {name + ':Made'!r})\n"
        f"folder = RunFolder.create(Path({str(tmp_path / 'run')!r}))\n"
        f"trackers = tracking.open_trackers([{name!r}], folder, 'p', {{}}, print)\n"
        "for step in (1, 2): trackers.log(step, {})\n"
        "while not (folder.path / 'trackers.json').exists(): time.sleep(0.01)\n"
        "time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    until = time.monotonic() + 60
    pid = int((tmp_path / "run" / "pid").read_text())
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.02)
    assert (tmp_path / "run" / "seen").read_text() == "([1, 2], True)"


def test_ctrl_c_for_the_run_does_not_reach_a_tracker(folder: RunFolder, tracker: Made) -> None:
    pid = folder.path / "pid"
    name = tracker("calm", init="(run.folder / 'pid').write_text(str(os.getpid()))", close=WRITE)
    trackers = open_trackers([name], folder, "rlcli", CONFIG, print)
    while not (folder.path / "trackers.json").exists():
        time.sleep(0.01)
    for kind in (signal.SIGINT, signal.SIGTERM):
        os.kill(int(pid.read_text()), kind)
    assert os.getpgid(int(pid.read_text())) != os.getpgid(0)
    trackers.log(1, {})
    trackers.close()
    assert seen(folder) == "([1], False)"


def test_a_run_that_ends_in_an_exception_is_marked_as_failed(folder: RunFolder, tracker: Made) -> None:
    name = tracker("marked", close=WRITE)

    def attempt() -> None:
        with open_trackers([name], folder, "rlcli", CONFIG, print) as trackers:
            trackers.log(1, {})
            raise RunFailed("a worker died")

    with pytest.raises(RunFailed):
        attempt()
    assert seen(folder) == "([1], True)"


def test_a_full_disk_fails_the_run_naming_the_file_and_leaves_whole_lines(folder: RunFolder, tmp_path: Path) -> None:
    trackers = open_trackers([], folder, "rlcli", CONFIG, print)
    trackers.log(1, {"reward/mean": 0.5})
    path = folder.path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))  # room for a part of the next line
    try:
        with pytest.raises(RunFailed, match=rf"{path} cannot be written: File too large; free some space"):
            trackers.log(2, {"reward/mean": 0.75})
        folder.event("failed", why="disk full", more="x" * 100)  # hides no failure
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous_handler)
    assert metrics_lines(folder) == [{"step": 1, "reward/mean": 0.5}]
    trackers.log(2, {"reward/mean": 0.75})
    assert len(metrics_lines(folder)) == 2


@pytest.mark.long
def test_a_plugins_tracker_is_found_and_conforms(
    folder: RunFolder, tracker: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip leaves a package: a module, and metadata with an entry point."""
    tracker("plugged", log="(self.run.folder / f'{step}').write_text(repr(metrics))")
    monkeypatch.setattr(tracking, "REGISTRY", Registry("tracker", "rlcli.trackers"))
    metadata = tmp_path / "rlcli_plugged-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rlcli-plugged\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlcli.trackers]\nplugged = plugged:Made\n")
    assert tracking.REGISTRY.origin("plugged") == "rlcli-plugged 1.0"
    assert conforms("plugged", folder, CONFIG) == "an-id"
    assert [(folder.path / str(step)).read_text() for step in (1, 3)] == [repr(STEPS[0][1]), "{'reward/mean': 1.0}"]
    assert "plugged (rlcli-plugged 1.0)" in check_trackers().detail


def test_a_plugin_that_does_not_import_is_refused_before_the_run(folder: RunFolder, tracker: Made) -> None:
    name = tracker("broken")
    (folder.path.parent / "broken.py").write_text("import a_module_that_nobody_has")
    with pytest.raises(RlcliError, match=r"the tracker 'broken' .*a_module_that_nobody_has"):
        tracking.check_trackers([name])
