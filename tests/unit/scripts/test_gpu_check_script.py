"""scripts/gpu-check without a GPU: deadlines, merging, the table, operations, and rlcli from a bare checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from _gpu_check import __main__ as command
from _gpu_check import checkout, results, running
from _gpu_check.check import Check, meets
from _gpu_check.flops import forward_flops
from _gpu_check.parts import ALL, BY_NAME

SCRIPTS = Path(__file__).parents[3] / "scripts"
FAKE = """
import json, os, subprocess, sys, time
settings = json.load(open(sys.argv[1]))
print("== started", flush=True)
figure = {"name": "speed", "value": 1.5, "unit": "GB/s", "target": ">= 1", "met": True, "note": ""}
open(settings["result"], "w").write(json.dumps({"figures": [figure], "checks": [], "data": {}}))
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
if settings["does"] == "hangs":
    helper = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    open(os.path.join(settings["work"], "helper"), "w").write(str(helper.pid))
    time.sleep(60)
if settings["does"] == "breaks":
    sys.exit("nothing works")
"""


def a_part(tmp_path: Path, does: str, deadline_s: float = 30.0) -> tuple[running.Running, list[str]]:
    """A part that does what `does` says, run to its end, and what was shown."""
    script, shown = tmp_path / "fake.py", list[str]()
    script.write_text(FAKE)
    settings = {"deadline_s": deadline_s, "does": does}
    part = running.start("step", settings, tmp_path, dict(os.environ), [sys.executable, str(script)], shown.append)
    until = time.monotonic() + 60
    while not part.poll():
        assert time.monotonic() < until
        time.sleep(0.02)
    return part, shown


def test_a_part_that_hangs_is_killed_with_all_it_started_and_recorded(tmp_path: Path) -> None:
    for deadline_s in (1.0, 4.0, 16.0):  # a slow machine takes longer to come to where it hangs
        part, shown = a_part(tmp_path, "hangs", deadline_s=deadline_s)
        helper_file = tmp_path / "step.work" / "helper"
        if helper_file.exists() and helper_file.read_text():
            break
        running.clean(part)
    record = part.result()
    assert record["status"] == "timeout"
    assert record["figures"][0]["value"] == 1.5, "what was measured before the deadline is kept"
    assert record["tail"] == ["== started"]
    assert shown[0] == "started"
    helper = int(helper_file.read_text())
    assert record["leftovers"] >= 1
    assert not Path(f"/proc/{helper}").exists() or "Z" in Path(f"/proc/{helper}/stat").read_text().split()[2]
    running.clean(part)
    assert [file.name for file in tmp_path.iterdir() if "step" in file.name] == ["step.log"]


def test_a_part_that_breaks_leaves_its_error_and_the_end_of_its_output(tmp_path: Path) -> None:
    record = a_part(tmp_path, "breaks")[0].result()
    assert (record["status"], record["error"]) == ("failed", "exit code 1")
    assert record["tail"][-1] == "nothing works"


def test_a_part_that_ends_well_is_ok(tmp_path: Path) -> None:
    record = a_part(tmp_path, "ends")[0].result()
    assert (record["status"], record["error"], record["tail"]) == ("ok", "", [])


def part_result(status: str = "ok", figures: Sequence[dict[str, Any]] = (), **fields: Any) -> dict[str, Any]:
    nothing = {"error": "", "seconds": 1.0, "checks": [], "data": {}, "tail": [], "log": "step.log"}
    return {**nothing, "status": status, "figures": list(figures), **fields}


def test_one_part_is_merged_into_what_earlier_runs_left(tmp_path: Path) -> None:
    merged = results.load(tmp_path, rehearsal=False)
    merged = results.merge(merged, "sync", part_result(seconds=2.0))
    merged = results.merge(merged, "step", part_result("failed", error="broken"))
    results.write(merged, tmp_path)
    reloaded = results.load(tmp_path, rehearsal=False)
    results.write(results.merge(reloaded, "step", part_result(seconds=3.0)), tmp_path)
    parts = json.loads((tmp_path / results.JSON).read_text())["parts"]
    assert {name: (record["status"], record["seconds"]) for name, record in parts.items()} == {
        "sync": ("ok", 2.0),
        "step": ("ok", 3.0),
    }


def test_a_rehearsal_and_a_check_are_never_merged(tmp_path: Path) -> None:
    results.write(results.load(tmp_path, rehearsal=True), tmp_path)
    with pytest.raises(results.IncompatibleResults, match="holds a rehearsal"):
        results.load(tmp_path, rehearsal=False)
    (tmp_path / results.JSON).write_text("[]")
    with pytest.raises(results.IncompatibleResults, match="not a file of this command"):
        results.load(tmp_path, rehearsal=True)


def test_the_table_has_every_part_figure_and_failure() -> None:
    figure = {"name": "step | floor", "value": 1.23456, "unit": "", "target": "<= 1.10", "met": False, "note": "a\nb"}
    parts = {
        "step": part_result(figures=[figure], checks=[{"name": "x", "ok": True, "detail": ""}]),
        "sync": part_result("timeout", error="killed after 3 s", tail=["last line"], log="sync.log"),
    }
    text = results.table({"version": 1, "rehearsal": False, "parts": parts})
    assert "| step | step \\| floor | 1.235 | <= 1.10 | **no** | a b |" in text
    assert "| step | ok | 1.0 | 1 of 1 hold |" in text
    assert "## sync: timeout" in text
    assert "```\nlast line\n```" in text
    assert text.count("not run") == len(ALL) - 2
    assert "rehearsal" not in text
    assert "nothing of a GPU" in results.table({"version": 1, "rehearsal": True, "parts": {}})


def test_an_unknown_part_is_refused_with_the_nearest_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "planer", "--out", str(tmp_path)]) == 2
    assert "did you mean 'planner'?" in capsys.readouterr().err
    assert command.main(["--only", "zzz", "--out", str(tmp_path)]) == 2
    assert "grpo-1.5b" in capsys.readouterr().err


def test_without_a_gpu_the_check_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["--out", str(tmp_path)]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    recorded = results.merge(results.load(tmp_path, True), "step", part_result())
    recorded = results.merge(recorded, "sync", part_result("failed"))
    options = command.parse(["--missing"])
    usual = ["environment", "trainer", "transformers", "engine", "grpo-0.5b", "planner"]
    assert [part.name for part in command.choose(options, recorded)] == usual
    recorded = results.merge(recorded, "trainer", part_result())
    assert [part.name for part in command.choose(options, recorded)] == [name for name in usual if name != "trainer"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--tier 0", "environment trainer"),
        ("--engine transformers", "environment trainer transformers"),
        ("--tier 2 --shape 1.5b", "engine planner grpo-1.5b"),
        ("--tier 2 --full", "engine grpo-0.5b planner grpo-1.5b step mfu tests"),
        ("--only sync --only sleep", "sync sleep"),
    ],
)
def test_tiers_engine_and_shape_choose_the_parts(words: str, parts: str, tmp_path: Path) -> None:
    selected = command.choose(command.parse(words.split()), results.load(tmp_path, False))
    assert [part.name for part in selected] == parts.split()


def test_what_is_not_reached_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = command.Session(tmp_path, command.parse([]), results.load(tmp_path, False))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "begin", interrupted)
    assert session.run([BY_NAME["trainer"], BY_NAME["engine"]]) == 130
    session.save()
    parts = json.loads((tmp_path / results.JSON).read_text())["parts"]
    assert {name: (part["status"], part["error"]) for name, part in parts.items()} == {
        "trainer": ("not run", "not reached"),
        "engine": ("not run", "not reached"),
    }


def test_parts_fit_the_time_that_they_are_settings() -> None:
    assert all(part.takes_s <= part.deadline_s < 480 for part in ALL)
    assert sum(part.takes_s for part in ALL if part.when == "always") <= 60 * command.MINUTES
    assert sum(part.takes_s for part in ALL if part.when != "named") <= 60 * command.FULL_MINUTES
    assert all((SCRIPTS / "_gpu_check" / f"part_{part.module}.py").exists() for part in ALL)
    assert "planner" in command.listing()
    assert len(BY_NAME) == len(ALL)


def test_a_part_that_might_end_too_late_is_not_begun(tmp_path: Path) -> None:
    options = command.parse(["--minutes", "0", "--out", str(tmp_path), "--models", str(tmp_path)])
    session = command.Session(tmp_path, options, results.load(tmp_path, False))
    assert session.run([BY_NAME["step"]]) == 1
    record = json.loads((tmp_path / results.JSON).read_text())["parts"]["step"]
    assert record["status"] == "not run"
    assert "--missing" in record["error"]


def test_results_are_copied_to_where_a_job_brings_files_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = tmp_path / "back"
    back.mkdir()
    monkeypatch.setenv("OUT", str(back))
    output_folder = tmp_path / "out"
    session = command.Session(output_folder, command.parse([]), results.load(output_folder, False))
    session.save()
    assert sorted(file.name for file in back.iterdir()) == [results.JSON, results.TABLE]


def test_a_figure_that_is_not_finite_and_a_check_that_fails_fail_the_part(tmp_path: Path) -> None:
    check = Check("step", False, tmp_path, tmp_path, tmp_path / "figures.json", 10.0)
    check.figure("ratio", 1.2, "", "<= 1.10")
    assert check.failed == [], "a target that is missed is no failure"
    check.figure("ratio", 1.05, "", "<= 1.10")
    check.figure("rate", float("nan"))
    check.require(False, "weights agree", "1.2 nats")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [(figure["name"], figure["met"]) for figure in written["figures"]] == [("ratio", True), ("rate", None)]
    assert check.failed == ["rate is finite: nan", "weights agree: 1.2 nats"]
    assert not meets(0.3, ">= 0.35")


def test_a_bare_checkout_is_found_with_its_entry_points(tmp_path: Path) -> None:
    path = checkout.python_path(checkout.make_site(tmp_path / "site"), {})
    code = (
        "from importlib.metadata import entry_points, version, requires; import rlcli_verifiers.math, rlcli_recipes;"
        "print(version('rlcli'), sorted(e.name for g in ('rlcli.verifiers', 'rlcli.data_prep', 'rlcli.recipes')"
        " for e in entry_points(group=g)), len(requires('rlcli')), sep='|')"
    )
    done = subprocess.run(
        # Neither what is installed here nor the working directory: its metadata alone.
        [sys.executable, "-S", "-P", "-c", code],
        env={"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    version, names, requirements = done.stdout.strip().split("|")
    groups = ("rlcli.verifiers", "rlcli.data_prep", "rlcli.recipes")
    ours = [
        entry.name
        for group in groups
        for entry in metadata.entry_points(group=group)
        if entry.value.startswith("rlcli_")
    ]
    assert version == metadata.version("rlcli")
    assert names == str(sorted(ours))
    assert int(requirements) == len(metadata.requires("rlcli") or [])


def test_the_oldest_versions_that_the_check_is_for_are_within_the_bounds() -> None:
    from packaging.requirements import Requirement

    from rlcli.rollout.vllm.vllm_engine import SUPPORTED

    wanted = {"torch": "2.11.0", "vllm": "0.24.0", "transformers": "5.17.0", "ray": "2.60.0"}
    declared = map(Requirement, metadata.requires("rlcli") or [])
    bounds = {
        requirement.name: requirement.specifier
        for requirement in declared
        if requirement.marker and requirement.marker.evaluate({"extra": "gpu"})
    }
    assert all(bounds[name].contains(version) for name, version in wanted.items())
    assert SUPPORTED[0] <= (0, 24) < SUPPORTED[1]


def test_operations_are_those_that_torch_counts() -> None:
    """torch counts attention without its mask; the head is run for predicted tokens alone."""
    import torch
    from rlcli_planner.model_shape import shape_of
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = Qwen2Config(**sizes, num_hidden_layers=3, vocab_size=128, attn_implementation="eager")
    model, length = Qwen2ForCausalLM(config).eval(), 10
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = model.model(torch.zeros(1, length, dtype=torch.int64), use_cache=False).last_hidden_state
        model.lm_head(hidden[:, -7:])
    shape = shape_of(config)
    square = 4 * shape.layers * shape.query * length * length
    pairs = 4 * shape.layers * shape.query * length * (length + 1) / 2
    assert forward_flops(shape, 3, [[7]]) == counter.get_total_flops() - square + pairs


def test_a_shared_prompt_is_counted_once() -> None:
    from rlcli_planner.model_shape import Linear, ModelShape

    shape = ModelShape(
        **{"kind": "qwen2", "layers": 1, "hidden": 4, "intermediate": 4, "heads": 1, "kv_heads": 1, "head_dim": 4},
        **{"vocab": 8, "positions": 64, "tied": True, "head_norm": "none"},
        linears=(Linear("q_proj", 4, 4),),
    )
    # 5 + 2 + 3 tokens, 5 predicted; pairs: 15 of the prompt, 2·5 + 3 and 3·5 + 6 of the responses.
    assert forward_flops(shape, 5, [[2, 3]]) == 2 * 16 * 10 + 2 * 32 * 5 + 4 * 4 * (15 + 13 + 21)


SUITE = """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("cleaning up")

def test_good(): pass
def test_bad(): assert 1 == 2
def test_that_cannot_clean_up(broken): pass
"""


@pytest.mark.long
def test_the_suite_goes_on_where_its_time_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from _gpu_check import part_suite

    folder = tmp_path / part_suite.FOLDER
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(SUITE)
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))

    def run(deadline_s: float, data: dict[str, Any]) -> Check:
        check = Check("tests", False, tmp_path, tmp_path, tmp_path / "figures.json", deadline_s, data=data)
        part_suite.run(check)
        return check

    short = run(part_suite.RESERVE_S - 1, {})
    assert short.failed == ["every test was run: 3 are missing: run the part again (--only tests)"]
    name = f"{part_suite.FOLDER}/test_it.py::test_"
    full_check = run(1000.0, {"verdicts": {f"{name}good": "passed", f"{name}bad": "failed"}})
    verdicts = {test.removeprefix(name): verdict for test, verdict in full_check.data["verdicts"].items()}
    assert verdicts == {"good": "passed", "bad": "failed", "that_cannot_clean_up": "failed"}
    assert full_check.failed == [f"no test failed: {name}bad, {name}that_cannot_clean_up"]
