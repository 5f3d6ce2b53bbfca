"""The boundaries at which a chat template is tried, and what `rlcli doctor --template` prints of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcli.cli.main import main
from rlcli.environments.template_contract import BOUNDARIES, Agreement, check
from rlcli.launch.machine_checks import check_template
from tests import chat_templates as of
from tests.chat_templates import bpe_tokenizer_with

STRIPPED = of.CHATML.replace(
    "message.content +",
    "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content and loop.last else '')"
    " + message.content +",
)
"""Qwen3's kind: only the last turn shows its reasoning."""
COUNTED = of.CHATML.replace("+ '\\n' }}", "+ '\\n' ~ (loop.index if message.role == 'user' else '') }}", 1)
"""A user's turn begins with its place in the conversation."""
COUNTS = ["a user's answer, with a system message", "a user's second answer", "a user's question after a tool"]
ALTERNATING = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('only two') }}{% endif %}"
    "{% endfor %}" + of.CHATML
)
LEAVES_OUT = "{% set messages = messages | rejectattr('role', 'equalto', 'tool') | list %}" + of.CHATML


@pytest.mark.parametrize("template", [of.CHATML, of.DATED, of.BY_OPENER, of.BY_EOS])
def test_a_template_that_appends_agrees_at_every_boundary(template: str) -> None:
    tokenizer = bpe_tokenizer_with(template)
    findings = check(tokenizer, [tokenizer.eos_token_id])
    assert [(each.name, each.agreement) for each in findings] == [(name, Agreement.EXACT) for name in BOUNDARIES]


@pytest.mark.parametrize(
    ("template", "agreement", "names"),
    [
        (STRIPPED, Agreement.PAST, [name for name in BOUNDARIES if "reasons" in name]),
        (of.TWO_ENDS, Agreement.PAST, list(BOUNDARIES)),
        (COUNTED, Agreement.BROKEN, COUNTS),
        (ALTERNATING, Agreement.NONE, [name for name in BOUNDARIES if "tool" in name or "system" in name]),
        (LEAVES_OUT, Agreement.NONE, [name for name in BOUNDARIES if "tool" in name and "question" not in name]),
    ],
    ids=["drops reasoning", "ends the last turn otherwise", "counts", "has two roles", "leaves a role out"],
)
def test_a_boundary_that_differs_is_named(template: str, agreement: Agreement, names: list[str]) -> None:
    tokenizer = bpe_tokenizer_with(template)
    findings = check(tokenizer, [tokenizer.eos_token_id])
    assert [each.name for each in findings if each.agreement is agreement] == names
    assert all(each.detail for each in findings if each.agreement is not Agreement.EXACT)


@pytest.mark.parametrize(
    ("template", "status", "verdict"),
    [
        (of.CHATML, "pass", "single answers work; conversations work; tools work"),
        (
            ALTERNATING,
            "warn",
            "conversations work, but for a user's answer, with a system message; tools are not supported",
        ),
        (
            of.TWO_ENDS,
            "pass",
            "conversations work (generated tokens stay as they were); tools work (generated",
        ),
        (COUNTED, "fail", "conversations do not work: other tokens follow"),
    ],
)
def test_the_doctor_gives_a_verdict_first(template: str, status: str, verdict: str, tmp_path: Path) -> None:
    bpe_tokenizer_with(template).save_pretrained(tmp_path / "model")
    first, *others = check_template(str(tmp_path / "model"))
    assert (first.name, first.status) == ("verdict", status)
    assert verdict in first.detail
    assert all(len(each.detail) < 150 for each in others)


def test_the_doctor_names_the_boundary_that_breaks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bpe_tokenizer_with(COUNTED).save_pretrained(tmp_path / "model")
    assert main(["doctor", "--template", str(tmp_path / "model")]) == 1
    verdict, *lines = capfd.readouterr().out.splitlines()
    assert "fail  verdict" in verdict
    assert "conversations do not work: other tokens follow" in verdict
    assert len(lines) == len(BOUNDARIES)
    assert [line.split("rendered")[0].split("fail")[1].strip() for line in lines if "fail" in line] == COUNTS
    bpe_tokenizer_with(of.CHATML).save_pretrained(tmp_path / "sound")
    assert main(["doctor", "--template", str(tmp_path / "sound"), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["ok"]
    assert {check["status"] for check in report["checks"]} == {"pass"}
    assert main(["doctor", "--template", str(tmp_path / "nowhere")]) == 2
    assert "has no tokenizer to load" in capfd.readouterr().err
