"""Every command that a page shows, in a block or in a sentence, is one that the command line accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page_commands import PAGES, ROOT, complaint, key_complaints, shown, simple_commands

PAGE = ROOT / "docs" / "debug.md"
ALL = [command for page in PAGES for command in shown(page)]
WRONG = {
    "rlcli trian grpo": "No such command 'trian'",
    "rlcli runs lst": "No such command 'lst'",
    "rlcli train grpo --modell x": "No such option: --modell",
    "rlcli train grpo --steps many": "Invalid value for '--steps'",
    "rlcli train grppo --model x": "no recipe 'grppo'",
    "rlcli train grpo --set train.lrr=1": "no key is called 'train.lrr'",
    "rlcli train grpo --set train.lr=fast": "must be a number",
    "rlcli train grpo --set algorithm.loss=pppo": "no policy loss is called 'pppo'",
    "rlcli train grpo --set async.on_update=keep": "share the trainer's devices",
    "rlcli train grpo --verifier 'maths + format'": "no verifier is called 'maths'",
    "rlcli train grpo --verifier 'math(mode=1)'": "math has no option mode",
    "rlcli train grpo --environment gues": "knows no 'gues'",
    "rlcli env show gues": "knows no 'gues'",
    "rlcli verifiers show mth": "no verifier is called 'mth'",
    "rlcli prep gsm9k": "knows no 'gsm9k'",
    "rlcli recipes diff grpo dappo": "no recipe 'dappo'",
    "rlcli recipes explain train.lrr": "no key is called 'train.lrr'",
    "rlcli plan grpo --gpus z100:8": "unknown GPU 'z100'",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_are_accepted(page: Path) -> None:
    assert [f"{command}: {why}" for command in shown(page) if (why := complaint(command))] == []
    assert key_complaints(page) == []


def test_the_pages_show_many_commands() -> None:
    assert sum(command.complete for command in ALL) > 150
    assert sum(not command.complete for command in ALL) > 100


@pytest.mark.parametrize(("line", "why"), WRONG.items(), ids=WRONG)
@pytest.mark.parametrize("form", ["```bash\n{}\n```\n", "See `{}`.\n"], ids=["block", "inline"])
def test_a_page_with_a_wrong_command_is_found(line: str, why: str, form: str) -> None:
    (command,) = shown(PAGE, form.format(line))
    assert why in complaint(command)


@pytest.mark.parametrize(
    "line", ["rlcli recipes diff grpo", "rlcli export --out x", "scripts/tset", "scripts/test --al", "vlm serve x"]
)
def test_a_block_with_an_incomplete_or_unknown_command_is_found(line: str) -> None:
    (command,) = shown(PAGE, f"```bash\n{line}\n```\n")
    assert complaint(command)


@pytest.mark.parametrize("code", ["rlcli train --resume", "rlcli recipes", "rlcli export", "rlcli --help"])
def test_a_sentence_may_leave_out_what_is_required(code: str) -> None:
    (command,) = shown(PAGE, f"See `{code}`.")
    assert complaint(command) == ""


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion", "--version", "--help"])
def test_an_option_that_acts_at_once_is_only_parsed(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (command,) = shown(PAGE, f"See `rlcli {option}`.")
    assert complaint(command) == ""
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_key_in_a_toml_block_is_found() -> None:
    assert key_complaints(PAGE, "```toml\n[train]\nlr = 1\nlrr = 2\n[recipe]\nname = 'x'\n```\n") == ["train.lrr"]


def test_a_line_of_shell_is_read_as_its_commands() -> None:
    line = "A=1 rlcli doctor --json > x && rlcli runs list | head   # a comment"
    assert list(simple_commands(line)) == [["rlcli", "doctor", "--json"], ["rlcli", "runs", "list"], ["head"]]
