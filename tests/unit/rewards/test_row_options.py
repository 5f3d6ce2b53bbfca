"""Verifiers that a row of the data may name, and the options that it may set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rlcli.errors import ConfigError
from rlcli.prep.pipeline import CONVERTERS
from rlcli.rewards.expression import AUTO, parse
from rlcli.rewards.row_options import row_options
from rlcli.rewards.verifier_registry import MOST_STYLE_CHARS, VERIFIERS, check_row_may_name, of_row, target

EVERY_ROW = parse(AUTO)
NEVER = ("url", "key", "model", "serve", "path", "extra", "wait_s", "call_s", "timeout_s", "wall_s", "deadline_s")
NEVER += ("memory_mb", "concurrency", "cache", "rubric")
"""Options of built-in verifiers that are addresses, keys, models, paths, memory, time or money."""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Publishes the verifier `chess` of `chess_plugin.rules` with this source; its import would leave a file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "chess_plugin").mkdir()
    marks = f"open({str(tmp_path / 'imported')!r}, 'w')\n"
    (tmp_path / "chess_plugin" / "__init__.py").write_text(marks)

    def publish(source: str, target: str = "chess_plugin.rules:verify") -> None:
        (tmp_path / "chess_plugin" / "rules.py").write_text(source + marks)
        entry = EntryPoint("chess", target, VERIFIERS.group)
        monkeypatch.setattr(VERIFIERS, "_published", {**VERIFIERS._published, "chess": entry})

    row_options.cache_clear()
    yield publish
    row_options.cache_clear()
    assert not (tmp_path / "imported").exists(), "code of a plug-in ran"
    assert "chess_plugin" not in sys.modules


@pytest.mark.parametrize(
    "style",
    [
        "gsm8k(mode=flexible)",
        "2 * math - 0.5 * length(target=100, unit=words) + 0.1 * format(pattern='a+')",
        "exact(extract=tag, strip=false, ignore_case=true)",
        "multiple_choice(count=5, truth=index0)",
        "code(score=share)",
        "reasoning_gym",
        "environment(pass_at=0.5)",
        "overlong(max_tokens=100, buffer=10) + repetition(n=4) + relaxed(tolerance=0.1) + countdown(use_all=false)",
    ],
)
def test_a_row_sets_what_its_verifiers_declare(style: str) -> None:
    assert of_row(EVERY_ROW, style) == parse(style)


@pytest.mark.parametrize(
    ("style", "says", "hint"),
    [
        ("judge", "it names the verifier judge", "--verifier judge"),
        ("judge(url='http://evil', model=x, key=AWS_SECRET_ACCESS_KEY)", "it names the verifier judge", "AWS_SECRET"),
        ("judge(serve=evil/model)", "it names the verifier judge", "serve=evil/model"),
        ("math + 0.1 * judge(url='http://evil', model=x)", "it names the verifier judge", "http://evil"),
        ("reward_model(path=evil/model)", "it names the verifier reward_model", "path=evil/model"),
        ("served_reward_model(serve=evil/model)", "it names the verifier served_reward_model", "serve"),
        (
            "code(timeout_s=1e9)",
            r"it sets the option timeout_s of the verifier code \(rows may set score\)",
            "timeout_s",
        ),
        ("code(memory_mb=1000000)", "it sets the option memory_mb of the verifier code", "--verifier 'code(memory_mb"),
        ("code(wall_s=1e9)", "it sets the option wall_s of the verifier code", "wall_s"),
        ("math(deadline_s=1e9)", r"it sets the option deadline_s of the verifier math \(rows may set none\)", "math"),
        ("gsm8k(mode=flexible, path=x)", "it sets the option path of the verifier gsm8k", "gsm8k"),
        ("evil.py:f(mode=x)", "it names code in a file as its verifier: evil.py:f", "if you trust it"),
        ("rlcli.rewards.gold_verifiers:by_gold(target='os:system', options='')", "it names code in a module", "trust"),
        ("math" + "+ math" * 300, r"it has 1,\d\d\d characters", str(MOST_STYLE_CHARS)),
        ("math(x=" + "[" * 900, "expected a value", ""),
    ],
)
def test_a_row_that_chooses_more_is_refused_with_words_for_the_user(style: str, says: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        of_row(EVERY_ROW, style)
    assert hint in refused.value.hint
    assert "\n" not in str(refused.value)


def test_no_built_in_verifier_lets_rows_choose_what_harms() -> None:
    allowed = {name: row_options(target(name)) for name in VERIFIERS.names() if "rlcli" in VERIFIERS.origin(name)}
    assert {name for name, options in allowed.items() if options is None} >= {
        "judge", "reward_model", "served_reward_model",
    }  # fmt: skip
    for name, options in allowed.items():
        assert not set(NEVER) & (options or set()), name


def test_every_option_that_a_built_in_verifier_declares_exists() -> None:
    from rlcli.rewards.function_adapters import options_of
    from rlcli.rewards.verifier_modules import function_of

    for name in VERIFIERS.names():
        if VERIFIERS.target(name).startswith("rlcli_verifiers."):
            assert set(row_options(target(name)) or ()) <= set(options_of(function_of(name))[0]), name


def test_rows_may_name_every_verifier_that_a_converter_writes() -> None:
    verifiers = [CONVERTERS.get(name).verifier for name in CONVERTERS.names() if "rlcli" in CONVERTERS.origin(name)]
    styles = [verifier for verifier in verifiers if not verifier.startswith("--")]
    assert len(styles) > 15
    for style in styles:
        assert of_row(EVERY_ROW, style) == parse(style)


def test_a_plug_in_that_declares_nothing_is_named_without_options(plugin: Callable[..., None]) -> None:
    plugin("def verify(request, *, url='', mode=''): ...\n")
    assert str(of_row(EVERY_ROW, "chess + 0.1 * format")) == "chess + 0.1 * format"
    with pytest.raises(ConfigError, match=r"sets the option mode of the verifier chess \(rows may set none\)"):
        of_row(EVERY_ROW, "chess(mode=fast)")


def test_a_plug_in_declares_what_its_rows_may_set(plugin: Callable[..., None]) -> None:
    plugin('ROW_OPTIONS: tuple[str, ...] = ("mode", "size")\ndef verify(request, *, url="", mode="", size=1): ...\n')
    assert str(of_row(EVERY_ROW, "chess(mode=fast, size=3)")) == "chess(mode=fast, size=3)"
    with pytest.raises(ConfigError, match=r"sets the option url of the verifier chess \(rows may set mode, size\)"):
        of_row(EVERY_ROW, "chess(mode=fast, url='http://evil')")


def test_a_plug_in_keeps_rows_from_naming_it(plugin: Callable[..., None]) -> None:
    plugin("ROW_OPTIONS = None\ndef verify(request): ...\n")
    with pytest.raises(ConfigError, match="it names the verifier chess"):
        of_row(EVERY_ROW, "chess")


@pytest.mark.parametrize("value", ["NAMES", "['a', 1]", "'mode'", "tuple(['mode'])"])
def test_a_declaration_that_is_not_written_out_is_an_error(value: str, plugin: Callable[..., None]) -> None:
    plugin(f"NAMES = ('mode',)\nROW_OPTIONS = {value}\ndef verify(request): ...\n")
    with pytest.raises(ConfigError, match=r"ROW_OPTIONS of chess_plugin\.rules is not a tuple of names"):
        of_row(EVERY_ROW, "chess(mode=fast)")


@pytest.mark.parametrize("source", ["def verify(:\n", "\0", "# coding: no-such\n"])
def test_a_plug_in_whose_source_cannot_be_read_lets_rows_set_nothing(source: str, plugin: Callable[..., None]) -> None:
    plugin(source)
    with pytest.raises(ConfigError, match="rows may set none"):
        of_row(EVERY_ROW, "chess(mode=fast)")


def test_a_plug_in_that_is_not_installed_any_more_lets_rows_set_nothing(plugin: Callable[..., None]) -> None:
    plugin("", "no_such_package.rules:verify")
    assert str(of_row(EVERY_ROW, "chess")) == "chess"
    with pytest.raises(ConfigError, match="rows may set none"):
        of_row(EVERY_ROW, "chess(mode=fast)")


def test_an_unknown_name_is_left_to_whoever_loads_verifiers() -> None:
    check_row_may_name(parse("gsm9k(mode=x)").terms[0])


def test_weights_of_a_row_stay_finite() -> None:
    with pytest.raises(ConfigError, match="the weight of math must be a finite number"):
        of_row(parse("1e200 * auto"), "1e200 * math")
