"""The meaning of expressions of verifiers, and the messages about invalid ones."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.config.keys import RenamedKey
from rlcli.errors import ConfigError, UnknownName
from rlcli.rewards.expression import Composition, Term, other_responses_of, parse
from rlcli.rewards.verifier_registry import of_row, target
from rlcli.types import VerifyRequest


@pytest.mark.parametrize(
    ("text", "terms", "canonical"),
    [
        ("math", [Term("math")], "math"),
        ("math * 1.0 + format * 0.1", [Term("math"), Term("format", weight=0.1)], "math + 0.1 * format"),
        ("0.1*format+math", [Term("format", weight=0.1), Term("math")], "0.1 * format + math"),
        ("math - 0.5 * length", [Term("math"), Term("length", weight=-0.5)], "math - 0.5 * length"),
        ("-length + math*-2", [Term("length", weight=-1.0), Term("math", weight=-2.0)], "-1.0 * length - 2.0 * math"),
        ("my-verifier - a-b", [Term("my-verifier"), Term("a-b", weight=-1.0)], "my-verifier - a-b"),
        ("2 * 0.25 * math", [Term("math", weight=0.5)], "0.5 * math"),
        (
            "0 * length + 1e-3*math",
            [Term("length", weight=0.0), Term("math", weight=0.001)],
            "0.0 * length + 0.001 * math",
        ),
        ("a/b.py:f + pkg.mod:g.h", [Term("a/b.py:f"), Term("pkg.mod:g.h")], "a/b.py:f + pkg.mod:g.h"),
        ("'my dir/a+b.py:f' * 2", [Term("my dir/a+b.py:f", weight=2.0)], '2.0 * "my dir/a+b.py:f"'),
        ('"3-sat"', [Term("3-sat")], '"3-sat"'),
        ("auto\n  + 0.1 * format", [Term("auto"), Term("format", weight=0.1)], "auto + 0.1 * format"),
    ],
)
def test_an_expression_is_terms_with_weights(text: str, terms: list[Term], canonical: str) -> None:
    assert parse(text).terms == tuple(terms)
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ("mode=flexible", {"mode": "flexible"}),
        ("strict = true, n=3, x=-0.5", {"strict": True, "n": 3, "x": -0.5}),
        ("n=3,", {"n": 3}),
        (r"pattern='\d+(?:,\d)*'", {"pattern": r"\d+(?:,\d)*"}),
        (r'pattern="\\d+\t)"', {"pattern": "\\d+\t)"}),
        ('tags=["a, b", c], at={x = 1}', None),
        ('tags=["a, b", "c"], at={x = 1, y = "q"}', {"tags": ["a, b", "c"], "at": {"x": 1, "y": "q"}}),
        ("mark=####, day=2024-01-02, odd=1#2", {"mark": "####", "day": "2024-01-02", "odd": "1#2"}),
        ("name=münchen, empty=''", {"name": "münchen", "empty": ""}),
    ],
)
def test_options_are_toml_values_or_bare_words(options: str, values: dict[str, Any] | None) -> None:
    if values is None:
        with pytest.raises(ConfigError, match="expected a value"):
            parse(f"v({options})")
        return
    composition = parse(f"v({options}) * 2")
    assert composition.terms == (Term("v", values, 2.0),)
    assert parse(str(composition)) == composition


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a verifier or a number, and found the end at character 1"),
        ("math +", "expected a verifier or a number, and found the end at character 7"),
        ("math format", r"expected \+ or - between verifiers.* found 'format' at character 6"),
        ("math * format", "two verifiers cannot be multiplied.* character 8"),
        ("0.5", "expected the name of a verifier beside the weight"),
        ("math(strict)", r"expected option=value.* found 'strict\)' at character 6"),
        ("math(a=1", r"expected , or \) after the value"),
        ("math(a=1 b=2)", "expected a value.* found '1 b=2"),
        ("math(a=1, a=2)", "the option a is given twice"),
        ("math(a='x)", "expected a value"),
        ("math)", r"expected \+ or -"),
        ("1e400 * math", "must be a finite number"),
        ("math + 0.5 * math", "names math twice; name it once, with the sum of the weights"),
        ("auto(strict=true)", "auto takes no options"),
        (r'"C:\x.py:f"', "single quotes.* at character 1"),
        ("__import__('os').system('id')", "expected option=value"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


words = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
references = st.from_regex(r"[a-z][\w-]{0,8}", fullmatch=True, alphabet=st.characters(codec="ascii")) | words.filter(
    bool
)
terms = st.builds(
    Term,
    references.filter(lambda ref: ref != "auto"),
    st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), values, max_size=3),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda weight: weight + 0.0),
)


@pytest.mark.long
@given(st.lists(terms, min_size=1, max_size=3, unique_by=lambda term: term.ref))
def test_the_canonical_text_reads_back_as_the_same(generated: list[Term]) -> None:
    composition = Composition(tuple(generated))
    assert parse(str(composition)) == composition


@given(st.text(max_size=30) | st.text("math()=+-*.,'\"[]{}01 \n", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse(str(parse(text))) == parse(text)


def test_parts_are_called_by_what_tells_them_apart() -> None:
    assert parse("math + my.py:f").names == ("math", "f")
    assert parse("a.py:f + b.py:f + math").names == ("a.py:f", "b.py:f", "math")
    assert parse("math - 0.5 * length").weights == {"math": 1.0, "length": -0.5}
    assert parse("2 * math").weights == {"math": 2.0}
    assert parse("math").weights == {}  # its own score, and its own parts


def test_auto_is_what_the_row_names_with_its_weights_and_options() -> None:
    mixed = parse("2 * auto + 0.1 * format")
    assert str(of_row(mixed, "gsm8k(mode=flexible)")) == "2.0 * gsm8k(mode=flexible) + 0.1 * format"
    assert str(of_row(mixed, "math - 0.5 * length")) == "2.0 * math - length + 0.1 * format"
    with pytest.raises(ConfigError, match="names format twice"):
        of_row(mixed, "format")


@pytest.mark.parametrize("style", ["os:system", "evil.py:f", "/tmp/evil.py:f", "math + evil.py:f", "auto"])
def test_a_row_may_not_say_what_code_is_run(style: str) -> None:
    with pytest.raises(ConfigError, match=r"it names (code in a (file|module)|auto) as its verifier"):
        of_row(parse("auto"), style)


def test_files_are_found_from_wherever_scoring_processes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("def f(request): ...")
    monkeypatch.chdir(tmp_path)
    assert str(parse("own.py:f + math").located()) == f"{tmp_path}/own.py:f + math"
    with pytest.raises(ConfigError, match=rf"'gone\.py:f': there is no file {tmp_path}/gone\.py"):
        parse("gone.py:f").located()


def test_the_old_name_of_the_option_other_responses_is_read_with_a_warning() -> None:
    text = "math + 0.5 * judge(url=x, model=m, rivals=2)"
    with pytest.warns(RenamedKey, match=r"the option rivals of the verifier judge is now called other_responses"):
        assert other_responses_of(text) == 2
    assert str(parse(text)) == text, "a resumed run compares the text"
    request = VerifyRequest("c", "", other_responses=["a"])
    with pytest.warns(FutureWarning, match=r"VerifyRequest.rivals is now called other_responses"):
        assert request.rivals == ["a"]  # type: ignore[attr-defined]


def test_a_reference_leads_to_a_registered_name_or_to_code() -> None:
    assert target("gsm8k") == "rlcli_verifiers.gsm8k:verify"
    assert target("pkg.mod:f") == "pkg.mod:f"
    with pytest.raises(UnknownName, match="did you mean gsm8k"):
        target("gsm8")


def test_a_boolean_option_may_be_written_as_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(parse("format(strict=False, name=Falsework)")) == "format(strict=false, name=Falsework)"
    assert str(parse('format(name="False")')) == 'format(name="False")'


def test_the_path_of_a_file_may_have_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.setenv("HERE", str(tmp_path))
    assert str(parse("$HERE/mine.py:verify").located()) == f"{tmp_path}/mine.py:verify"
    with pytest.raises(ConfigError, match="the variable NOWHERE is not set"):
        parse("math + $NOWHERE/mine.py:verify").located()
