"""`rlcli train` and `rlcli eval` on the real stack: the files of a run, and equal results in all layouts."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, SMALL, Cli, start

from rlcli.data.sample_files import sample_files
from rlcli.runs.folder import events_of
from rlcli.runs.record_files import timeline_of

pytestmark = pytest.mark.timeout(600)

READ_BY_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20)
params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
found = [one.outputs[0] for one in llm.generate(json.loads(sys.argv[2]), params)]
values = [[step[token].logprob for step, token in zip(one.logprobs, one.token_ids)] for one in found]
print(json.dumps([[list(one.token_ids), row] for one, row in zip(found, values)]))
"""
"""vLLM by itself: the folder, the prompts as JSON; prints tokens and log-probs of greedy responses."""
LAYOUTS = {
    "one worker": ("1", "train.tokens_per_microbatch=256"),
    "two workers": ("2", "train.tokens_per_microbatch=128"),
}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def runs(cli: Cli, tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same three steps with one worker and with two, split into micro-batches differently."""
    folders = {}
    for name, (workers, *sets) in LAYOUTS.items():
        run = tmp_path_factory.mktemp("runs") / "run"
        cli(
            *("train", "grpo", "--model", tiny, "--data", sums, "--eval-data", sums, "--out", run, "--steps", "3"),
            *SMALL,
            *("--workers", workers, "--set", "checkpoint.every=2", *(word for arg in sets for word in ("--set", arg))),
            # Random text never earns the reward of a right answer, but it can earn this one: so there is a gradient.
            *("--set", "verifier.name=test-even", "--set", "algorithm.kl_coef=0.1", "--set", "train.minibatches=2"),
            *("--json", "--profile"),
        )
        folders[name] = run
    return folders


@pytest.fixture(scope="module")
def exports(runs: dict[str, Path]) -> dict[str, Path]:
    """The last checkpoint of each run as a Hugging Face folder."""
    from rlcli.cli.main import main

    folders = {name: run.parent / "model" for name, run in runs.items()}
    for name, folder in folders.items():
        assert main(["export", str(runs[name]), "--out", str(folder)]) == 0
    return folders


def test_a_run_leaves_metrics_samples_configuration_logs_and_checkpoints(runs: dict[str, Path]) -> None:
    run = runs["two workers"]
    steps = metrics_of(run)
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert "eval/pass@1" in steps[0]
    assert "eval/pass@1" in steps[3]
    assert steps[1]["log_prob_check/max_abs_diff"] < 1e-4
    assert steps[1]["update/count"] == 2
    phases = ("build", "generate", "load", "old_log_probs", "reference", "update", "sync")
    assert all(0.2 < steps[2]["memory/base_gb"] < steps[2][f"memory/{name}_gb"] < 8 for name in phases)
    assert steps[3]["memory/checkpoint_gb"] > steps[3]["memory/base_gb"], "of step 2"
    rooms = ("samples/step-000001", "samples/step-000003", "evaluations/step-000003")
    names = [{path.name for path in (run / room).iterdir()} for room in rooms]
    assert names[2] == {"rank-0.parquet", "rank-1.parquet"}
    assert names[0] == names[1] == names[2] | {"advantages.parquet", "tokens-0.parquet", "tokens-1.parquet"}
    assert "kl_coef = 0.1  # --set" in (run / "config.toml").read_text()
    assert json.loads((run / "environment.json").read_text())["packages"]["ray"]
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-000002", "step-000003"]
    assert (run / "reward.png").stat().st_size > 1000


def test_a_profile_shows_the_driver_and_every_rank(runs: dict[str, Path]) -> None:
    with gzip.open(runs["two workers"] / "profile" / "step-3.json.gz", "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(processes) == ["driver", "rank 0", "rank 1"]
    names = {name: {event["name"] for event in events if event["pid"] == pid} for name, pid in processes.items()}
    assert {"generate", "plan", "load", "reference", "update", "sync"} <= names["driver"]
    for rank in ("rank 0", "rank 1"):
        assert {"rollout", "update", "sync_weights"} <= names[rank], "our methods"
        assert "aten::mm" in names[rank] or "aten::addmm" in names[rank], "and what torch did in them"


def test_the_start_is_told(runs: dict[str, Path]) -> None:
    for run in runs.values():
        (event,) = (event for event in events_of(run) if event["event"] == "startup")
        assert re.fullmatch(r"vLLM \S+, first model runner, with rlcli's draws", event["engine"])
        times = event["done_after_s"]
        assert times["ray"] < times["workers"] < times["built"] < times["synced"] < times["worker: first token"]
        assert times["worker: process"] < times["workers"]


def test_samples_are_readable_and_all_there(runs: dict[str, Path]) -> None:
    import pyarrow.parquet as pq

    rows = [row for path in sample_files(runs["two workers"] / "samples", 2) for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 16
    assert {row["outcome"] for row in rows} <= {"ok", "wrong", "no_answer"}
    assert all(1 <= row["response_tokens"] <= 24 for row in rows)
    assert all(row["mean_log_prob"] < 0 for row in rows)


def test_what_a_step_trained_on_can_be_read_token_by_token(runs: dict[str, Path]) -> None:
    import pyarrow.parquet as pq

    for run in runs.values():
        folder = run / "samples" / "step-000002"
        saved, tokens = (
            {
                (row["group"], row["sample"]): row
                for path in folder.glob(name)
                for row in pq.ParquetFile(path).read().to_pylist()
            }
            for name in ("rank-*.parquet", "tokens-*.parquet")
        )
        advantages = pq.read_table(folder / "advantages.parquet").to_pylist()
        assert {(row["group"], row["sample"]) for row in advantages} == saved.keys()
        assert {row["saved_step"] for row in advantages} == {2}
        scores: dict[int, set[float]] = {}
        for (group, _), row in saved.items():
            scores.setdefault(group, set()).add(row["score"])
        # The best and the worst of each group, or one of a group whose rewards are equal.
        assert len(tokens) == sum(min(2, len(some)) for some in scores.values()) > 4
        known = {(row["group"], row["sample"]): row["advantage"] for row in advantages}
        for key, row in tokens.items():
            sampled = row["drawn"]
            assert (row["prompt_id"], sum(sampled)) == (saved[key]["prompt_id"], saved[key]["response_tokens"])
            assert len(row["text"]) == len(row["ids"]) == len(sampled)
            # The sampled tokens include special tokens, which the saved response does not.
            prompt_text = "".join(text for text, is_sampled in zip(row["text"], sampled, strict=True) if not is_sampled)
            assert saved[key]["prompt"] in prompt_text
            for name in ("engine_log_prob", "trainer_log_prob", "entropy", "advantage", "version"):
                assert [value is not None for value in row[name]] == sampled
            assert row["engine_log_prob"][-1] == pytest.approx(row["trainer_log_prob"][-1], abs=1e-4)
            assert row["advantage"][-1] == pytest.approx(known[key], abs=1e-6)


def test_the_timeline_shows_where_each_step_waited(runs: dict[str, Path]) -> None:
    run = runs["two workers"]
    first, second, third = timeline_of(run)
    assert [line["step"] for line in (first, second, third)] == [1, 2, 3]
    assert first["start"] < second["start"] < third["start"]
    assert [lane["name"] for lane in second["lanes"]] == ["controller", "worker 0", "worker 1"]
    for lane in second["lanes"]:
        names = [name for name, _, _ in lane["spans"]]
        assert {"generate", "update", "sync", "checkpoint"} <= set(names)
        assert all(0 <= begin <= end for _, begin, end in lane["spans"])
        assert lane["spans"] == sorted(lane["spans"], key=lambda span: span[1])
    assert "evaluate" in {name for name, _, _ in third["lanes"][0]["spans"]}


def test_one_and_two_workers_give_the_same_run(runs: dict[str, Path], exports: dict[str, Path]) -> None:
    import torch

    expected_steps, actual_steps = (metrics_of(runs[name]) for name in LAYOUTS)
    for a, b in zip(expected_steps, actual_steps, strict=True):
        for name in ("reward/mean", "response_tokens/mean", "update/policy_loss", "update/grad_norm", "update/kl"):
            if name in a:
                assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), (name, a["step"])
    expected_weights, actual_weights = (weights_of(exports[name]) for name in LAYOUTS)
    assert expected_weights.keys() == actual_weights.keys()
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(tensor, actual_weights[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_export_is_a_model_that_moved_and_gives_the_trainers_log_probs(
    exports: dict[str, Path], tiny: Path, layout: str
) -> None:
    record = json.loads((exports[layout] / "rlcli_export.json").read_text())
    assert record["step"] == 3
    assert record["change"]["moved"] == record["change"]["tensors"] == len(weights_of(tiny))
    assert record["log_probs"]["mean"] < 1e-5
    card = (exports[layout] / "README.md").read_text()
    assert "| pass@1 |" in card
    assert "sums: how it was made is not recorded." in card


def test_vllm_and_transformers_agree_on_the_exports_greedy_tokens(exports: dict[str, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, prompts = exports["two workers"], ["1+1=", "12+30=", "what is 7+5?"]
    completed = subprocess.run(
        [sys.executable, "-c", READ_BY_VLLM, str(folder), json.dumps(prompts)],
        env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for prompt, (tokens, log_probs) in zip(prompts, json.loads(completed.stdout.splitlines()[-1]), strict=True):
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            rows = lm(input_ids=torch.tensor([ids + tokens])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
        assert rows.argmax(-1).tolist() == tokens
        assert log_probs == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)


@pytest.mark.long
def test_a_checkpoint_is_evaluated_and_a_killed_evaluation_resumes(
    cli: Cli, runs: dict[str, Path], sums: Path, tmp_path: Path
) -> None:
    import psutil
    import pyarrow.parquet as pq

    def words(folder: str) -> list[str | Path]:
        return [
            *("eval", "--model", runs["one worker"] / "checkpoints" / "latest", "--samples", "3", "--greedy"),
            *("--data", sums, "--data", sums / "train.parquet", "--max-tokens", "16", "--verifier", "test-even"),
            *("--set", "rollout.max_concurrent=8", "--set", "rollout.engine=transformers"),
            *("--out", tmp_path / folder, "--json"),
        ]

    uninterrupted = json.loads(cli(*words("whole")).stdout)
    assert (uninterrupted["prompts"], uninterrupted["samples"], uninterrupted["generated"]) == (72, 216, 288)
    report = uninterrupted["datasets"]["sums"]
    assert (report["prompts"], report["samples"]) == (8, 24)
    assert set(report["pass"]) == {"pass@1", "pass@2", "pass@3"}
    assert set(report["maj"]) == {"maj@2", "maj@3"}
    assert report["pass"]["pass@1"]["low"] <= report["pass"]["pass@1"]["mean"] <= report["pass"]["pass@1"]["high"]

    killed = start(*words("killed"))
    parts, deadline = tmp_path / "killed" / "parts", time.monotonic() + 400
    while not list(parts.glob("sums-train.*")) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert killed.poll() is None, "it was over before it could be killed"
    for process in (*psutil.Process(killed.pid).children(recursive=True), killed):
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends some itself meanwhile
            process.kill()  # workers that outlive their driver would finish its work
    killed.communicate()
    written = {part: pq.read_table(part) for part in parts.glob("sums-train.*")}
    if sum(map(len, written.values())) == 64 * 4:  # a busy machine killed it too late: one response is missing anyway
        part, table = written.popitem()
        pq.write_table(table.slice(0, len(table) - 1), part)
    resumed = json.loads(cli(*words("killed")).stdout)
    assert 0 < resumed["generated"] < 288 - 8 * 4
    assert resumed | {"generated": 0} == uninterrupted | {"generated": 0}
    for name in ("sums", "sums-train"):
        expected, actual = (
            pq.read_table(tmp_path / folder / f"{name}.parquet").to_pylist() for folder in ("whole", "killed")
        )
        assert [(r["prompt_id"], r["sample"], r["response"], r["score"]) for r in expected] == [
            (r["prompt_id"], r["sample"], r["response"], r["score"]) for r in actual
        ]
        assert all(r["perplexity"] > 1 and r["min_log_prob"] <= r["mean_log_prob"] < 0 for r in expected)
    # Nothing is missing now, so no engine is started.
    assert json.loads(cli(*words("killed"), timeout=60).stdout)["generated"] == 0


@pytest.mark.long
def test_two_workers_share_one_engine(cli: Cli, tiny: Path, sums: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    def shared_files() -> set[Path]:
        matches = (Path("/dev/shm").glob(f"rlcli-*{suffix}") for suffix in ("cpushm*", "sockets"))
        return {*itertools.chain(*matches), *Path("/tmp").glob("-".join("?" * n for n in (8, 4, 4, 4, 12)))}

    run, initial = tmp_path / "run", shared_files()
    cli(
        *("train", "grpo", "--model", tiny, "--data", sums, "--out", run, "--steps", "2", "--workers", "2", *SMALL),
        *("--set", "rollout.tensor_parallel=2", "--set", "verifier.name=test-even"),
        # The first of the two decides which groups both generate, and when both abort.
        *("--set", "rollout.oversample=1.5", "--set", "rollout.max_concurrent=8"),
    )
    steps = metrics_of(run)
    assert all(line["log_prob_check/max_abs_diff"] < 1e-4 for line in steps)
    assert steps[0]["update/grad_norm"] > 0
    # Both generate the same; the first of the two keeps the samples.
    assert {path.name for path in (run / "samples").iterdir()} == {"step-000001", "step-000002"}
    assert 16 <= len(pq.read_table(run / "samples" / "step-000001" / "rank-0.parquet")) <= 24
    assert shared_files() <= initial


@pytest.mark.long
def test_a_run_needs_no_vllm(cli: Cli, tiny: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['vllm'] = None\n")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{hidden}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}")
    words = ["train", "grpo", "--model", tiny, "--data", sums, "--eval-data", sums, "--steps", "2", *SMALL]
    words += ["--set", "verifier.name=test-even"]
    refused = cli(*words, "--out", tmp_path / "refused", expect=2)
    assert "rollout.engine = vllm: not installed: vllm;" in refused.stderr
    cli(*words, "--out", tmp_path / "run", "--set", "rollout.engine=transformers")
    for line in metrics_of(tmp_path / "run")[1:]:
        assert line["log_prob_check/max_abs_diff"] < 1e-4
        assert line["sync/checked_tensors"] > 25
        assert line["mismatch/kl"] < 1e-6
        assert line["update/grad_norm"] > 0
