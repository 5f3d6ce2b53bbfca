"""`rlcli verifiers`: lists, shows, runs and audits verifiers."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import typer

from rlcli.cli import console
from rlcli.cli.command_group import Group, add_published
from rlcli.cli.options import Json, VerifierName
from rlcli.cli.verifiers.run_verifiers import run_verifier
from rlcli.errors import ConfigError, RlcliError, VerifierError
from rlcli.types import VerifyRequest

app = typer.Typer(cls=Group, no_args_is_help=True, help="List, show, run and audit the verifiers that score responses.")

EXAMPLES = {
    "number": "42",
    "latex": r"\frac{3}{4}",
    "choice": "B",
    "text": "Paris",
    "code": '{"kind": "asserts", "asserts": ["assert double(2) == 4"]}',
    "countdown": '{"numbers": [3, 5, 7], "target": 36}',
    "shape": "42",
    "length": "short",
}
"""An example ground truth of each kind."""


@app.command("list")
def list_verifiers(json: Json = False) -> None:
    """List the verifiers that are installed, built in or from other packages.

    Examples:

      rlcli verifiers list

      rlcli verifiers list --json
    """
    from rlcli.rewards.verifier_registry import VERIFIERS

    verifiers = [{"name": name, "source": VERIFIERS.origin(name), **_summary(name)} for name in VERIFIERS.names()]
    if json:
        console.emit_json(verifiers)
        return
    rows = [(verifier["name"], verifier["summary"], verifier["source"]) for verifier in verifiers]
    console.show(console.table(["verifier", "what scores 1", "from"], rows))


@app.command("show")
def show_verifier(name: VerifierName, json: Json = False) -> None:
    """Show what a verifier reads, its options and an example that it accepts.

    Examples:

      rlcli verifiers show math

      rlcli verifiers show "math + 0.1 * format"

      rlcli verifiers show path/to/file.py:function --json
    """
    from rlcli.rewards.expression import AUTO, parse

    composition = parse(name).located()
    terms = [_described(term.ref) | {"weight": term.weight} for term in composition.terms if term.ref != AUTO]
    if not terms:
        raise ConfigError("auto means the verifier that a row names", "name one: rlcli verifiers list shows them")
    if json:
        console.emit_json({"expression": str(composition), "terms": terms} if composition.is_sum else terms[0])
        return
    if composition.is_sum:
        console.plain(f"{composition}: the weighted sum of {len(terms)} verifiers\n")
    for term in terms:
        _print(term)


def _summary(name: str) -> dict[str, Any]:
    """The first line of its docstring, or the error on loading: one broken package must not hide the others."""
    from rlcli.rewards.verifier_modules import function_of

    try:
        documentation = inspect.getdoc(function_of(name)) or ""
    except RlcliError as error:
        return {"summary": str(error), "loads": False}
    return {"summary": documentation.partition("\n")[0], "loads": True}


def _described(ref: str) -> dict[str, Any]:
    """The full description of one verifier. Raises `RlcliError` if it does not load."""
    from rlcli.rewards.verifier_modules import function_of, module_of
    from rlcli.rewards.verifier_registry import VERIFIERS, target

    function, module = function_of(ref), module_of(ref)
    return {
        "name": ref,
        "source": VERIFIERS.origin(ref) if ":" not in ref else "local",
        "target": target(ref),
        "answer_kind": getattr(module, "ANSWER_KIND", None),
        "reads": inspect.getdoc(function) or "",
        "options": _options(function),
        "row_options": _row_options(ref),
        "example": _example(module),
    }


def _row_options(ref: str) -> list[str] | None:
    """The options that a row with this verifier may set; None: no row may name it."""
    from rlcli.rewards.row_options import row_options
    from rlcli.rewards.verifier_registry import target

    allowed = None if ":" in ref else row_options(target(ref))
    return None if allowed is None else sorted(allowed)


def _options(function: object) -> list[dict[str, Any]]:
    from rlcli.rewards.function_adapters import is_rubric, options_of

    if is_rubric(function):
        return []
    try:
        options, _ = options_of(function)
    except TypeError as error:
        raise VerifierError(str(error), "give its parameters the names of one of them") from error
    empty = inspect.Parameter.empty
    return [
        {
            "name": name,
            "type": None if option.annotation is empty else _annotation(option.annotation),
            "default": None if option.default is empty else option.default,
            "required": option.default is empty,
        }
        for name, option in options.items()
    ]


def _annotation(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _example(module: ModuleType) -> dict[str, str] | None:
    """A ground truth and the gold response for it; None if the verifier has no gold or needs further fields of a
    row."""
    gold, truth = getattr(module, "gold", None), EXAMPLES.get(getattr(module, "ANSWER_KIND", ""))
    if not callable(gold) or truth is None:
        return None
    try:
        return {"ground_truth": truth, "completion": str(gold(VerifyRequest(completion="", ground_truth=truth)))}
    except Exception:  # it needs other fields of a row
        return None


def _print(term: dict[str, Any]) -> None:
    console.plain(f"{term['name']} (from {term['source']}: {term['target']})\n")
    console.plain(term["reads"] or "It has no docstring.")
    if term["answer_kind"]:
        console.plain(f"\nanswers: {term['answer_kind']}")
    if term["options"]:
        rows = [
            (option["name"], option["type"] or "", "must be given" if option["required"] else repr(option["default"]))
            for option in term["options"]
        ]
        console.show(console.table(["option", "type", "default"], rows))
    if term["row_options"] is None:
        console.plain("\nrows may not name it: give it with --verifier")
    else:
        console.plain(f"\na row may name it and set: {', '.join(term['row_options']) or 'no option'}")
    if term["example"]:
        console.plain(f"\na response that scores 1 if the ground truth is {term['example']['ground_truth']}:\n")
        console.plain("  " + term["example"]["completion"].replace("\n", "\n  ") + "\n")


# Last: commands are listed in the order of use.
app.command("run")(run_verifier)
add_published(app, "verifiers", "audit")
