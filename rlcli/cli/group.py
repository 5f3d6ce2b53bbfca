"""The class of every group of commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """A group that reads its own options only where the line holds some: to read them, Typer imports pydantic, which
    takes longer than all the rest of a command's `--help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._has_options = not args or args[0].startswith("-")
        try:
            return super().parse_args(ctx, args)
        finally:
            self._has_options = True

    def get_params(self, ctx: Any) -> list[Any]:
        return super().get_params(ctx) if getattr(self, "_has_options", True) else []
