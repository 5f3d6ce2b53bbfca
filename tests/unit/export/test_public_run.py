"""A run folder to publish: the records of a run, without what names its machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlcli.config.load import dump_toml, resolve
from rlcli.export.public_run import public_run
from rlcli.runs.folder import RunFolder, events_of, write_json
from rlcli.runs.listing import config_of, run_at, state_of
from rlcli.runs.record_files import metrics_of
from rlcli.support.reading import UnfitFile


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    path = tmp_path / "runs" / "first"
    flags = {
        "model.path": "/home/ann/models/tiny",
        "data.path": ["/data/private/sums", "org/sums"],
        "verifier.name": f"{path}/code/digits.py:digits",
        "cluster.address": "ray://10.0.0.7:10001",
        "train.steps": 3,
    }
    with RunFolder.create(path) as folder:
        folder.write_config(dump_toml(resolve("grpo", flags)))
        facts = json.loads((path / "environment.json").read_text())
        write_json(path / "environment.json", facts | {"host": "node-7", "command": ["/opt/rlcli", "train"]})
        folder.append_metrics({"step": 1, "reward/mean": 0.5})
        folder.event("started", step=0)
        folder.event("failed", message=f"worker 3 on node-7 died: see {path}/logs/worker-3.log", hint="hunter2hunter2")
        (folder.samples / "step-000001").mkdir()
        (folder.samples / "step-000001" / "rank-0.parquet").write_bytes(b"PAR1")
        (path / "logs" / "worker-3.log").write_text("secret")
        files = [{"key": "verifier.name", "name": "0/mine.py", "path": "/home/ann/mine.py", "digest": "9f2c"}]
        folder.write_inputs({"format": 1, "files": files}, {"9f2c-mine.py": (b"secret", 0o644)})
    return path


def test_nothing_of_the_machine_is_in_a_public_run(run: Path, tmp_path: Path) -> None:
    with public_run(run) as public:
        text = "".join(file.read_text() for file in public.iterdir() if file.is_file())
        assert not any((public / name).exists() for name in ("logs", "inputs.json", "sources"))
    for name in ("node-7", "10.0.0.7", "/home/ann", "/data/private", str(tmp_path), "/opt", "hunter2", str(Path.cwd())):
        assert name not in text, name


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "samples", "evaluations"])
def test_what_a_link_leads_to_is_not_published(name: str, run: Path, tmp_path: Path) -> None:
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnfitFile, match=f"{re.escape(name)} is a link"), public_run(run):
        pass


def test_a_link_of_another_name_is_left_out(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (run / "notes").symlink_to(tmp_path / "secret")
    with public_run(run) as public:
        assert not (public / "notes").exists()


def test_a_public_run_is_read_like_the_run(run: Path) -> None:
    with public_run(run) as public:
        assert public.name == "first"
        assert metrics_of(public) == metrics_of(run)
        assert state_of(public) == state_of(run) == "failed"
        assert run_at(public).steps == 3
        assert (public / "samples" / "step-000001" / "rank-0.parquet").read_bytes() == b"PAR1"
        config = config_of(public)
        assert config["model"]["path"] == "tiny"
        assert config["data"]["path"] == ["sums", "org/sums"]
        assert config["verifier"]["name"] == "digits.py:digits"
        assert config["cluster"]["address"] == "…"
        failed = events_of(public)[-1]
        assert failed["message"] == "worker 3 on … died: see worker-3.log"
        environment = json.loads((public / "environment.json").read_text())
        assert environment["packages"]
        assert not {"host", "directory", "command"} & set(environment)
        room = public
    assert not room.exists()
    assert (run / "samples" / "step-000001" / "rank-0.parquet").exists()


def test_a_broken_run_has_a_public_one(run: Path) -> None:
    (run / "config.toml").unlink()
    (run / "environment.json").write_text("{")
    (run / "events.jsonl").write_bytes(b'{"event": "started"}\n\xff{"ev')
    with public_run(run) as public:
        assert metrics_of(public) == metrics_of(run)
        assert [event["event"] for event in events_of(public)] == ["started"]
