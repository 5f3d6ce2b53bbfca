"""The table of families in docs/tested.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from rlcli.images.families import KINDS as VISION_KINDS
from rlcli.launch.engine_checks import NEEDS_MERGED_ADAPTER, NEEDS_MERGED_ADAPTER_ON_CPUS, NOT_ADAPTED
from rlcli.model.io.model_config import RECURRENT, SUPPORTED
from tests.model_fixtures import MIXTURES

PAGE = Path(__file__).parents[3] / "docs" / "tested.md"


def rows() -> dict[str, list[str]]:
    """By `model_type`, the cells behind it."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Families\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    return {kind: cells.split(" | ") for kind, cells in lines}


def text_kind(kind: str) -> str:
    return f"{kind}_text" if kind in VISION_KINDS else kind


def test_it_has_each_family_and_no_other() -> None:
    assert sorted(rows()) == sorted((*SUPPORTED, *VISION_KINDS))


def test_images_context_and_experts_are_as_in_the_code() -> None:
    for kind, (_, images, _, context, experts, _) in rows().items():
        assert images == ("yes" if kind in VISION_KINDS else "no"), kind
        recurrent = text_kind(kind) in RECURRENT
        refused = "refused: layers carry a state" if recurrent else "refused: images" if kind in VISION_KINDS else "yes"
        assert context == refused, kind
        assert experts == ("yes" if text_kind(kind) in MIXTURES else "no experts"), kind


def test_adapters_are_as_in_the_code() -> None:
    for kind, (_, _, adapters, *_) in rows().items():
        if kind in (*NEEDS_MERGED_ADAPTER, *NOT_ADAPTED):
            assert adapters == "float32", kind
        elif kind in RECURRENT or kind in NEEDS_MERGED_ADAPTER_ON_CPUS:
            assert adapters == "float32 on CPUs", kind
        else:
            assert adapters == "yes", kind
