"""A run whose teacher is behind vLLM's own server learns what it learns from the same teacher in its worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import SOON, Cli

from rlcli.runs.record_files import metrics_of

# tests/unit/training/worker/test_served_teacher.py has its answers.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
STEPS = 2


def test_a_served_teacher_teaches_as_one_in_the_worker(cli: Cli, tiny: Path, sums: Path, tmp_path: Path) -> None:
    from rlcli.model.io.tiny_model import make_tiny_model
    from rlcli.rollout.model_servers.model_server import ModelServer, ServerPlace
    from rlcli.support.served_models import ServedModel

    folder = make_tiny_model(tmp_path / "teacher", seed=1)
    top = ("algorithm.advantage=one", "algorithm.loss=opd_reverse", "teacher.top_k=4")
    words = ["train", "opd", "--model", tiny, "--data", sums, "--steps", str(STEPS), "--workers", "1", *SOON]
    words += [word for each in top for word in ("--set", each)]
    server = ModelServer(ServedModel(str(folder)), ServerPlace("cpu", "127.0.0.1", "", tmp_path / "server.log"))
    try:
        cli(*words, "--set", f"teacher.path={folder}", "--out", tmp_path / "here")  # while the server loads
        server.wait()
        cli(*words, "--set", f"teacher.path={server.url}", "--out", tmp_path / "there")
    finally:
        server.close()
    local_steps, served_steps = metrics_of(tmp_path / "here"), metrics_of(tmp_path / "there")
    assert len(local_steps) == len(served_steps) == STEPS
    for local, served in zip(local_steps, served_steps, strict=True):
        for name in ("update/teacher_kl", "update/teacher_agreement", "update/policy_loss", "update/grad_norm"):
            assert served[name] == pytest.approx(local[name], rel=1e-3, abs=1e-5), name
    assert local_steps[0]["update/teacher_kl"] > 1e-3
