"""Names of built-ins and plugins: lazy, unique, and kind when a name is unknown or a package broken."""

from __future__ import annotations

import sys

import pytest

from rlcli.errors import RlcliError, UnknownName
from rlcli.registry import Registry


@pytest.fixture
def colours() -> Registry[str]:
    return Registry("colour", "rlcli.test.colours")


def test_a_target_is_loaded_when_it_is_asked_for(colours: Registry[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    colours.add("zen", "this:s")
    assert colours.names() == ["zen"]
    assert "this" not in sys.modules
    assert colours.get("zen").startswith("Gur Mra")


def test_an_object_is_given_back_as_it_is(colours: Registry[str]) -> None:
    colours.add("red", "#f00")  # a string is a lazy target …
    colours.add("blue", ("#00f",))  # type: ignore[arg-type]  # … anything else is the entry itself
    assert colours.get("blue") == ("#00f",)


def test_a_name_is_taken_once(colours: Registry[str]) -> None:
    colours.add("red", "string:digits")
    with pytest.raises(RlcliError, match="registered twice"):
        colours.add("red", "string:punctuation")


def test_an_unknown_name_is_answered_with_the_near_ones(colours: Registry[str]) -> None:
    colours.add("purple", "string:digits")
    with pytest.raises(UnknownName, match="did you mean purple"):
        colours.get("purpel")


@pytest.mark.parametrize("target", ["no_such_module:x", "string:no_such_attribute"])
def test_a_target_that_does_not_load_is_named(colours: Registry[str], target: str) -> None:
    colours.add("broken", target)
    with pytest.raises(RlcliError, match=f"the colour 'broken' .*{target}.* does not load"):
        colours.get("broken")
