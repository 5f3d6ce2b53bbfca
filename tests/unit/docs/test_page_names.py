"""Names in the pages that explain a run exist: metrics, keys with their values, warnings, recipes; and so do links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rlcli.config.keys import find_key, sections
from rlcli.config.recipes import names as recipe_names
from rlcli.runs.metric_names import METRIC_NAMES
from rlcli.training.loop.warnings import NAMES
from tests.page_commands import FENCE, PAGES, ROOT

DOCS = ROOT / "docs"
EXPLAINING = [
    *sorted((DOCS / "concepts").glob("*.md")),
    *(DOCS / f"{name}.md" for name in ("index", "start", "debug", "resume", "bigger_model")),
]
DEBUG = (DOCS / "debug.md").read_text()


def code_in(text: str) -> list[str]:
    """The code in its sentences and tables."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def unknown_metrics(text: str) -> list[str]:
    """Names that begin as a metric does and are none. `eval/pass@1` is `eval/pass@K`."""
    known = METRIC_NAMES
    families = {name.partition("/")[0] for name in known if "/" in name}
    used = [
        code for code in code_in(text) if code.partition("/")[0] in families and re.fullmatch(r"\w+(/[\w@]+)+", code)
    ]
    return [name for name in used if re.sub(r"@\d+", "@K", name) not in known and not stands_for_one(name, known)]


def stands_for_one(name: str, known: frozenset[str]) -> bool:
    """True if it is a documented name whose part in capitals is filled in: `reward/part/format`, `memory/PHASE_gb`."""
    patterns = [re.sub(r"\b[A-Z]+\b", r"[\\w/]+", other) for other in known if re.search(r"\b[A-Z]{3,}\b", other)]
    phase = name == "memory/PHASE_gb"
    return phase or any(re.fullmatch(pattern, name) for pattern in patterns)


def key_faults(text: str) -> list[str]:
    """Keys that do not exist, and values that a key does not accept, in code such as `train.truncated = mask`."""
    faults = []
    for code in code_in(text):
        match = re.fullmatch(r"([a-z_]+)\.([a-z_.0-9]+)(?:\s*=\s*(\S.*))?", code)
        if not match or match[1] not in sections():
            continue
        section, name, value = match.groups()
        key = f"{section}.{name}"
        if find_key(key) is None:
            faults.append(f"there is no key {key}")
        elif value and re.fullmatch(r"[\w.\-]+", value) and "." not in name and not accepts(section, name, value):
            faults.append(f"{key} does not accept {value}")
    return faults


def accepts(section: str, name: str, text: str) -> bool:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    try:
        sections()[section].model_validate({name: value})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("page", EXPLAINING, ids=lambda page: page.stem)
def test_metrics_and_keys_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unknown_metrics(text) == []
    assert key_faults(text) == []


def test_wrong_names_are_found() -> None:
    text = "`reward/meen`, `reward/mean`, `eval/pass@4`, `train.lrr`, `train.truncated = keeep`, `train.lr = 1e-6`"
    assert unknown_metrics(text) == ["reward/meen"]
    assert key_faults(text) == ["there is no key train.lrr", "train.truncated does not accept keeep"]


def test_the_debug_page_names_many_metrics_and_keys() -> None:
    assert len({code for code in code_in(DEBUG) if code in METRIC_NAMES}) > 40
    assert len({code.partition(" ")[0] for code in code_in(DEBUG) if find_key(code.partition(" ")[0])}) > 30


def test_the_debug_page_has_a_section_for_every_warning() -> None:
    table = DEBUG.partition("## Which warning?")[2].partition("\n## ")[0]
    assert {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in code_in(row)} == set(NAMES)


def test_recipes_that_the_debug_page_names_exist() -> None:
    recipes = re.findall(r"[Rr]ecipes? `([\w-]+)`", DEBUG)
    assert len(recipes) >= 4
    assert set(recipes) <= set(recipe_names())


def test_every_branch_of_the_debug_page_leads_to_a_section_with_a_fix() -> None:
    tree = DEBUG.partition("## Which symptom?")[2].partition("\n## ")[0]
    branches = re.findall(r"\(#([\w-]+)\)", tree)
    sections = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-"): body
        for title, body in re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", DEBUG, re.MULTILINE)
    }
    assert len(branches) > 12
    for branch in branches:
        assert (
            any(find_key(code.partition(" ")[0]) for code in code_in(sections[branch])) or "```bash" in sections[branch]
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^()\s#]+)[^()\s]*\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


FOR_GPUS = re.compile(r"Qwen/|--gpus|scripts/gpu-check|\b(meta-llama|google)/")
UNTRIED = re.compile(r"\b(not|nothing|no)\b[^.|]{0,80}\bGPU|\bGPU[^.|]{0,60}\bnot\b", re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_with_commands_for_gpus_says_that_none_has_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = "".join(body for _, language, body in FENCE.findall(text) if language == "bash")
    assert not FOR_GPUS.search(commands) or UNTRIED.search(" ".join(FENCE.sub("", text).split()))
