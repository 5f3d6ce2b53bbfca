"""Text of files from elsewhere in the terminal: no command writes its control characters, and markup stays text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from rlcli.cli import console
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.support.redact import _displayable, printable, printable_json
from tests.readers import ROOT, Result, results_of
from tests.report_runs import write_run

HOSTILE = "\x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\[red]bold[/] [link=http://x]:smile: \x9b5A\x7f\u202etxt\u2066\r"
"""Text of a model or of a file's author. Printed unescaped, it would clear the terminal and set its title."""
NAME = "odd\x1b[31m\u202e"
MARKUP = "[red]bold[/] [link=http://x]:smile:"


def control_characters(text: str) -> list[str]:
    """Characters that a terminal acts on."""
    kinds = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return sorted(
        {character for character in text if character not in "\n\t" and unicodedata.category(character) in kinds}
    )


def clean(*results: Result) -> None:
    for result in results:
        for text in (result.out, result.err):
            assert not control_characters(text), (result.words, control_characters(text))
        assert "Traceback" not in result.err
        assert "run again with --debug" not in result.err, result.err  # no defect


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, data and recipes whose every text is hostile."""
    root = tmp_path_factory.mktemp("hostile")
    texts = dict.fromkeys(
        [(step, prompt, sample) for step in (1, 2) for prompt in (0, 1) for sample in (0, 1)], HOSTILE
    )
    quoted = json.dumps(HOSTILE).replace("\x7f", "\\u007f")
    names = {"question": HOSTILE, "prompt_id": HOSTILE + "{n}", "warning": HOSTILE}
    for name in (NAME, "plain"):
        run = write_run(root / "runs" / name, steps=2, prompts=2, samples=2, texts=texts, **names)
        config = (run / "config.toml").read_text()
        config = re.sub(r'(?m)^name = "grpo".*$', f"name = {quoted}".replace("\\", "\\\\"), config)
        config = config.replace('path = "tiny"  # flag --model', f"path = {quoted}  # flag {MARKUP}")
        assert config.count(quoted) == 2
        (run / "config.toml").write_text(config)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "reward/mean": 0.5, HOSTILE: 1.0, f"time/{HOSTILE}_s": 9.0}) + "\n")
        with (run / "events.jsonl").open("a") as file:
            events = [{"event": HOSTILE, "time": 1.0}, {"event": "failed", HOSTILE: HOSTILE, "message": HOSTILE}]
            file.writelines(json.dumps(event) + "\n" for event in events)
        (run / "prompts.jsonl").write_text(json.dumps({"step": 1, "groups": [[HOSTILE, 2, 1, 9, True]]}) + "\n")
        report = json.loads((run / "evaluations" / "step-000000.json").read_text())
        (run / "evaluations" / "step-000000.json").write_text(json.dumps(report | {"headline": HOSTILE}))
        (run / "logs" / "engines").mkdir()
        server = dict.fromkeys(("server", "kind", "state", "running", "finished", "lost", "weights", "why"), HOSTILE)
        (run / "logs" / "engines" / "worker-0.json").write_text(json.dumps({"worker": 0, "servers": [server]}))
    rows = [{"question": HOSTILE, "answer": f"{HOSTILE} #### {number}"} for number in (1, 2)]
    (root / "rows.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in rows) + f"{HOSTILE!r}\n")
    messages = [{"role": "user", "content": HOSTILE}]
    prompts = [
        row(
            data_source=HOSTILE, messages=messages, verifier="exact", ground_truth=HOSTILE, extra_info={"note": HOSTILE}
        )
    ]
    (root / "data").mkdir()
    for split in ("train", "test"):
        write_rows(root / "data" / f"{split}.parquet", prompts * 4)
    answers = {"completion": HOSTILE, "ground_truth": HOSTILE, "data_source": HOSTILE}
    (root / "answers.jsonl").write_text(json.dumps(answers, ensure_ascii=False) + "\n")
    (root / "odd.toml").write_text(f'[recipe]\nname = {quoted}\nbase = "grpo"\n[model]\npath = {quoted}\n')
    (root / "broken.toml").write_text(f"[train]\nsteps = {quoted}\n[{json.dumps(MARKUP)}]\n")
    (root / "verl.yaml").write_text(json.dumps({"data": {"train_files": HOSTILE}, "trainer": {HOSTILE: HOSTILE}}))
    return root


@pytest.mark.long
def test_no_reader_of_runs_prints_what_a_terminal_acts_on(folder: Path) -> None:
    results = results_of(
        [
            ["runs", "list"],
            ["runs", "list", "--json"],
            ["runs", "show", f"runs/{NAME}"],
            ["runs", "show", f"runs/{NAME}", "--json"],
            ["runs", "samples", f"runs/{NAME}", "--full"],
            ["runs", "samples", f"runs/{NAME}", "--json"],
            ["runs", "prompts", f"runs/{NAME}"],
            ["runs", "prompts", f"runs/{NAME}", "--json"],
            ["runs", "signals", f"runs/{NAME}"],
            ["runs", "signals", f"runs/{NAME}", "--json"],
            ["runs", "watch", f"runs/{NAME}"],
            ["runs", "compare", f"runs/{NAME}", "plain"],
            ["runs", "compare", f"runs/{NAME}", "plain", "--json"],
            ["engines", "list", f"runs/{NAME}"],
            ["engines", "list", f"runs/{NAME}", "--json"],
            ["report", f"runs/{NAME}", "plain", "--out", "report"],
            ["eval", "compare", f"runs/{NAME}/evaluations/step-000000", "runs/plain/evaluations/step-000000"],
            ["eval", "compare", f"runs/{NAME}/samples/step-000001", "runs/plain/samples/step-000001"],
        ],
        folder,
    )
    clean(*results)
    shown = {" ".join(result.words): result for result in results}
    assert MARKUP in shown[f"runs show runs/{NAME}"].out.replace("\n", " ")
    assert r"odd\x1b[31m\u202e" in shown["runs list"].out
    listed = json.loads(shown["runs list --json"].out)
    assert {run["name"] for run in listed} == {NAME, "plain"}  # JSON holds the unchanged name
    assert {run["recipe"] for run in listed} == {HOSTILE}
    assert json.loads(shown[f"runs samples runs/{NAME} --json"].out)[0]["prompt"] == HOSTILE


@pytest.mark.long
def test_no_command_prints_what_a_row_or_a_recipe_holds_to_act_on(folder: Path) -> None:
    results = results_of(
        [
            ["prep", "gsm8k", "--source", "rows.jsonl", "--skip-bad", "--out", "made"],
            ["prep", "gsm8k", "--source", "rows.jsonl", "--skip-bad", "--out", "made", "--json"],
            ["prep", "show", "data/train.parquet"],
            ["prep", "show", "data/train.parquet", "--json"],
            ["recipes", "diff", "grpo", "odd.toml"],
            ["recipes", "diff", "grpo", "odd.toml", "--json"],
            ["recipes", "show", "odd.toml"],
            ["recipes", "show", "odd.toml", "--resolved"],
            ["recipes", "show", "broken.toml"],
            ["config", "import", "verl.yaml"],
            ["runs", "show", HOSTILE],
            ["runs", "compare", HOSTILE, "plain"],
            ["recipes", "show", HOSTILE],
            ["verifiers", "show", HOSTILE],
            [HOSTILE],
        ],
        folder,
    )
    clean(*results)
    assert [result.code for result in results[-5:]] == [2] * 5
    assert MARKUP in results[0].out
    assert "[red]bold[/]" in results[2].out


@pytest.mark.long
@pytest.mark.slow
def test_no_verifier_command_prints_what_a_row_holds_to_act_on(folder: Path) -> None:
    clean(
        *results_of(
            [
                ["verifiers", "run", "exact", "answers.jsonl", "--out", "scores.jsonl"],
                ["verifiers", "audit", "exact", "--data", "data/train.parquet"],
                ["verifiers", "audit", "exact", "--data", "data/train.parquet", "--json"],
                ["rescore", f"runs/{NAME}", "--verifier", "exact"],
                ["rescore", f"runs/{NAME}", "--verifier", "exact", "--json"],
            ],
            folder,
        )
    )


def test_the_console_writes_neither_control_characters_nor_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console.plain(HOSTILE)
    console.note(HOSTILE)
    console.show(HOSTILE)
    console.show(console.table([HOSTILE, "b"], [(HOSTILE, 1)]))
    console.stdout().print(HOSTILE, style="bold")
    console.emit_json({HOSTILE: [HOSTILE]})
    console.json_line({HOSTILE: HOSTILE})
    printed = capsys.readouterr()
    assert not control_characters(printed.out + printed.err)
    assert printed.out.replace("\n", " ").count(MARKUP) >= 4
    assert json.loads(printed.out.splitlines()[-1]) == {HOSTILE: HOSTILE}


def test_styles_are_written_where_a_terminal_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console.stdout.cache_clear()
    try:
        console.stdout().print("fine " + HOSTILE, style="bold")
    finally:
        console.stdout.cache_clear()
    printed = capsys.readouterr().out
    assert printed.startswith("\x1b[1mfine ")
    assert not control_characters(re.sub(r"\x1b\[[0-9;]*m", "", printed))


def test_what_python_prints_by_itself_has_no_codes_but_those_of_live_views() -> None:
    ours = "\r\x1b[2K\x1b[1A\x1b[?25l\x1b[1;32mdone\x1b[0m\x1b[?25h\n"
    assert _displayable(ours) == ours
    assert control_characters(_displayable(HOSTILE)) == ["\r"]  # progress bars need it
    program = (
        "from rlcli.support.redact import redact_output\n"
        f"redact_output(); print({HOSTILE!r}); raise ValueError({HOSTILE!r})"
    )
    completed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False)
    assert not control_characters((completed.stdout + completed.stderr).decode().replace("\r", ""))
    assert MARKUP in completed.stdout.decode()


@pytest.mark.parametrize("words", [["runs", "show"], ["--debug", "runs", "show"]])
def test_an_error_of_the_command_itself_is_printable(words: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "rlcli.cli.main", *words, HOSTILE]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    assert completed.returncode != 0
    assert not control_characters(completed.stderr.decode().replace("\r", ""))
    assert r"\x1b]0;title" in completed.stderr.decode()


def test_text_of_every_script_stays_as_it_is() -> None:
    for text in ("naïve café", "数学の問題", "Ответ: 42", "π ≈ 3.14159 ∑ₙ", "😀 🧮", "a\tb\nc", "עברית"):
        assert printable(text) == text
        assert printable_json(json.dumps(text, ensure_ascii=False)) == json.dumps(text, ensure_ascii=False)
