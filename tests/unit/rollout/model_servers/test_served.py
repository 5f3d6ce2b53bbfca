"""Models that a verifier requests to be served, and how it reaches them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlcli.errors import ConfigError, ModelError, VerifierError
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.rewards.expression import parse, served_by
from rlcli.rollout.model_servers.models_to_serve import models_of
from rlcli.support import served_models
from rlcli.support.served_models import ServedModel, address_of, identity, publish, served_model


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("my/judge", ServedModel("my/judge")),
        ({"model": "my/judge", "workers": 4, "tensor_parallel": 2}, ServedModel("my/judge", 4, 2)),
    ],
)
def test_an_option_names_a_model_and_its_devices(option: Any, expected: ServedModel) -> None:
    assert served_model(option) == expected


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("", "names no model"),
        (3, "names no model"),
        ({"workers": 2}, "names no model"),
        ({"model": "m", "gpus": 2}, "has no field 'gpus'"),
        ({"model": "m", "workers": 0}, "workers is 0"),
        ({"model": "m", "workers": True}, "workers is True"),
        ({"model": "m", "workers": 3, "tensor_parallel": 2}, "does not divide"),
    ],
)
def test_what_names_no_model_is_one_line(option: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served_model(option)


def test_an_address_is_that_of_the_model_and_the_same_for_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (served_models.ADDRESSES, served_models.KEY):
        monkeypatch.setenv(name, "")
    with pytest.raises(VerifierError, match="the model a is not served"):
        address_of("a")
    publish({"a": ("http://1", "http://2"), "b": ("http://3",)}, "key")
    addresses = {text: address_of("a", text) for text in map(str, range(20))}
    assert set(addresses.values()) == {"http://1", "http://2"}
    assert all(address_of("a", text) == address for text, address in addresses.items())
    assert address_of("b", "x") == "http://3"


def test_the_identity_changes_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    initial = identity(str(tmp_path))
    assert identity(str(tmp_path)) == initial
    (tmp_path / "weights").write_text("12")
    assert identity(str(tmp_path)) != initial


def test_models_of_expressions_are_served_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    first, second = (str(parse(f"{verifier} + 0.5 * judge(serve=tiny)").located()) for verifier in ("math", "exact"))
    assert models_of([first, second]) == {ServedModel(str(tmp_path / "tiny")): False}
    assert models_of(["math"]) == {}
    with pytest.raises(ConfigError, match="with different settings"):
        models_of([first, "judge(serve={model = '%s', workers = 2})" % (tmp_path / "tiny")])
    with pytest.raises(ModelError, match="there is no such folder"):
        models_of(["judge(serve=/nowhere/at/all)"])


def test_a_table_keeps_its_fields_where_its_folder_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    located = str(parse("judge(serve={model = 'm', workers = 2})").located())
    assert served_by(located) == [ServedModel(str(tmp_path / "m"), 2)]
