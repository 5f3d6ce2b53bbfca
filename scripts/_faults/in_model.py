"""Faults of a model's folder, planted in a copy of it before the run begins."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = "chat_template.jinja"


def drop_system_messages(folder: Path) -> None:
    template = folder / TEMPLATE
    without = "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list -%}"
    template.write_text(without + template.read_text())


def begin_twice(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": "<unk>"}))
    template = folder / TEMPLATE
    template.write_text("{{- bos_token + bos_token -}}" + template.read_text())
