"""The reference pages, made from the code: commands, keys, metrics, events, algorithms, verifiers, environments,
datasets, recipes.

All but the algorithms, metrics and events are asked of the command line itself (`--json`), so a page holds what the
terminal prints.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from scripts._docs.text import block, cell, code, entry, prose, table


def generated() -> dict[str, str]:
    """Path on the site → Markdown."""
    recipes = [asked("recipes", "show", each["name"]) for each in asked("recipes", "list")]
    return {
        "reference/commands.md": commands(),
        "reference/keys.md": keys_page(recipes),
        "reference/metrics.md": metrics(),
        "reference/events.md": events(),
        "reference/keys_of_verl_and_trl.md": foreign_keys(),
        "reference/algorithms.md": algorithms(recipes),
        "reference/verifiers.md": verifiers(),
        "reference/environments.md": environments(),
        "reference/datasets.md": datasets(),
        "reference/recipes.md": recipes_page(recipes),
    }


def asked(*words: str) -> Any:
    """The parsed output of `rlcli WORDS --json`."""
    from rlcli.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = main([*words, "--json"])
    if status:
        raise RuntimeError(f"rlcli {' '.join(words)} --json exits with {status}")
    return json.loads(printed.getvalue())


def page(title: str, opening: str, parts: Iterator[str]) -> str:
    return f"# {title}\n\n{opening}\n\n" + "\n".join(parts)


def commands() -> str:
    from rlcli.cli.command_group import COMMANDS, imported

    def parts() -> Iterator[str]:
        yield table(
            ["command", "what it does"],
            [(f"[`rlcli {name}`](#{_anchor(name)})", prose(command.help)) for name, command in COMMANDS.items()],
        )
        for name in COMMANDS:
            yield from _command(imported(name), name)

    return page("All commands", "For whoever looks for an option: what each command prints with `--help`.", parts())


def _anchor(name: str) -> str:
    return "rlcli-" + name.replace(" ", "-")


def _command(command: Any, name: str, depth: int = 2) -> Iterator[str]:
    yield entry(f"`rlcli {name}`", _anchor(name), depth)
    context = command.context_class(command, info_name=f"rlcli {name}")
    yield block(command.get_usage(context).removeprefix("Usage: "))
    yield prose(command.help or "", "bash") + "\n"
    rows = []
    for option in command.params:
        record = option.get_help_record(context)
        if record and not option.hidden:
            rows.append((code(record[0].strip()), prose(record[1].strip())))
    if rows:
        yield table(["argument or option", "what"], rows)
    for sub in getattr(command, "commands", {}):
        yield from _command(command.commands[sub], f"{name} {sub}", depth + 1)


def keys_page(recipes: list[dict[str, Any]]) -> str:
    from rlcli.config.keys import keys, sections
    from rlcli.config.load import to_toml

    def setting(key: str) -> Iterator[str]:
        for each in recipes:
            name = each["recipe"]["name"]
            if each["origins"].get(key) == name:
                yield f"[`{name}`](recipes.md#{name}) ({code(to_toml(each['values'][key]))})"

    def parts() -> Iterator[str]:
        for section in sections():
            yield entry(section, section, 2)
            for key in (each for each in keys().values() if each.name.partition(".")[0] == section):
                default = "unset" if key.default is None else to_toml(key.default)
                yield entry(f"`{key.name}`", key.name, 3)
                yield f"{prose(key.description)}\n\nAccepts {prose(key.rule)}. Default: {code(default)}.\n"
                if set_by := ", ".join(setting(key.name)):
                    yield f"Set by {set_by}.\n"

    opening = (
        "For whoever writes a recipe or gives `--set KEY=VALUE`. A key that nothing reads is refused. `rlcli recipes "
        "explain KEY` prints the same in the terminal. Recipes inherit what the recipe that they start from sets."
    )
    return page("Configuration keys", opening, parts())


def foreign_keys() -> str:
    def parts() -> Iterator[str]:
        for title, framework in (("verl", "verl"), ("TRL", "trl")):
            tables = import_module(f"rlcli_port.configs.{framework}_keys")
            yield entry(title, framework, 2)
            rows = {name: (key,) for name, (key, _) in tables.DIRECT.items()} | tables.COMPUTED
            links = {name: ", ".join(f"[`{key}`](keys.md#{key})" for key in keys) for name, keys in rows.items()}
            yield table(["key", "here"], [(code(name), links[name]) for name in sorted(links)])
            for heading, reasons in (("Nothing needs to be set", tables.SAME), ("By hand, or missing", tables.MISSING)):
                yield entry(f"{heading} ({title})", "", 3)
                rows_of_reasons = [(", ".join(map(code, names.split())), cell(why)) for why, names in reasons.items()]
                yield table(["key", "why"], rows_of_reasons)

    opening = (
        "For whoever has a configuration of verl or TRL: every key that `rlcli config import` knows, and the keys here "
        "that take its part. `*` stands for any text. [Coming from verl or TRL](../porting.md) has values and defaults "
        "that differ."
    )
    return page("Keys of verl and TRL", opening, parts())


def metrics() -> str:
    from rlcli.runs.metric_names import METRICS

    def marked(name: str) -> str:
        return f'<span id="{name}">`{name}`</span>' if "/" in name else f"`{name}`"

    opening = (
        "For whoever reads or plots the numbers of a run: every name in `metrics.jsonl`. [Metrics](../metrics.md) "
        "explains memory and trackers, [Mismatch](../concepts/mismatch.md) and [Checks](../checks.md) the statistics "
        "that compare engine and trainer. Means over tokens are over the tokens that were forwarded."
    )
    rows = [(", ".join(map(marked, names)), cell(description)) for names, description in METRICS.items()]
    return page("All metrics", opening, iter([table(["metric", "what"], rows)]))


def events() -> str:
    from rlcli.runs.event_kinds import EVENTS

    opening = (
        "For whoever reads `events.jsonl` of a [run folder](../run_folder.md): every kind of event. Each line also has "
        "`time`, seconds since 1970. [Checks](../checks.md#warnings) has the names of warnings."
    )
    rows = [(code(kind), cell(description)) for kind, description in EVENTS.items()]
    return page("All events", opening, iter([table(["event", "when, and its entries"], rows)]))


KINDS = {
    "algorithm.advantage": "Advantages",
    "algorithm.loss": "Losses",
    "algorithm.select": "Selections",
    "algorithm.aggregation": "Aggregations",
    "algorithm.kl_estimator": "KL estimators",
    "algorithm.correction": "Corrections",
}


def algorithms(recipes: list[dict[str, Any]]) -> str:
    from rlcli.cli.recipes.algorithm_choices import MODULES, choices

    def parts() -> Iterator[str]:
        for key, module in MODULES.items():
            registry = import_module(f"rlcli.algorithms.{module}")
            yield entry(KINDS[key], key, 2)
            yield f"The values of [`{key}`](keys.md#{key}).\n"
            for choice in choices(key):
                yield entry(f"`{choice.name}`", f"{key.partition('.')[2]}-{choice.name}", 3)
                yield prose(inspect.getdoc(registry.get(choice.name)) or "") + "\n"
                if choice.options:
                    values = ((f"`algorithm.options.{name}`", default) for name, default in choice.options.items())
                    yield (
                        "Options: "
                        + ", ".join(
                            f"{name} ({'must be given' if default is None else f'default {default:g}'})"
                            for name, default in values
                        )
                        + ".\n"
                    )
                users = [each["recipe"]["name"] for each in recipes if _names(each["values"].get(key), choice.name)]
                if key in ("algorithm.advantage", "algorithm.loss") and users:
                    yield "Recipes: " + ", ".join(f"[`{name}`](recipes.md#{name})" for name in users) + ".\n"

    opening = (
        "For whoever chooses or checks a formula. A, R, g, n: advantage, reward of a response, its group, and the "
        "group's size. π, π_old, μ, π_ref: the policy, the policy before this step's updates, the engine's policy, the "
        "reference. ρ = π / π_old for the drawn token. Each function is compared with plain float64 loops in its tests."
    )
    return page("Algorithms", opening, parts())


def _names(value: Any, name: str) -> bool:
    return name in [part.strip() for part in str(value).split("*")]


def verifiers() -> str:
    def parts() -> Iterator[str]:
        for name in (each["name"] for each in asked("verifiers", "list")):
            verifier = asked("verifiers", "show", name)
            yield entry(f"`{name}`", name, 2)
            yield prose(verifier["reads"]) + "\n"
            if verifier["options"]:
                yield _options(verifier["options"])
            yield _for_rows(verifier["row_options"])
            if verifier["example"]:
                yield "A ground truth, and a response that scores 1:\n"
                yield block(json.dumps(verifier["example"], indent=2, ensure_ascii=False), "json")

    opening = (
        "For whoever names a verifier in a row (`reward_model.style`) or with `--verifier`. `rlcli verifiers show "
        "NAME` prints the same. [Verifiers](../verifiers.md) has sums of them."
    )
    return page("All verifiers", opening, parts())


def _for_rows(options: list[str] | None) -> str:
    if options is None:
        return "Rows may not name it.\n"
    return f"Rows may name it and set {', '.join(map(code, options)) or 'none of its options'}.\n"


def environments() -> str:
    def parts() -> Iterator[str]:
        for name in (each["name"] for each in asked("env", "list")):
            environment = asked("env", "show", name)
            yield entry(f"`{name}`", name, 2)
            yield prose(environment["doc"]) + "\n"
            if environment["options"]:
                yield _options(environment["options"])

    opening = (
        "For whoever names an environment with `--environment`. `rlcli env show NAME` prints the same. "
        "[Environments](../environments.md) explains how a conversation becomes a sample."
    )
    return page("All environments", opening, parts())


def _options(options: list[dict[str, Any]]) -> str:
    rows = [
        (
            code(option["name"]),
            code(str(option["type"])),
            "required" if option["required"] else code(str(option["default"])),
        )
        for option in options
    ]
    return table(["option", "type", "default"], rows)


def datasets() -> str:
    converters = {entry.name: entry for entry in entry_points(group="rlcli.data_prep")}

    def parts() -> Iterator[str]:
        for each in asked("prep", "list"):
            yield entry(f"`{each['name']}`", each["name"], 2)
            facts = {"From": each["source"], "Verifier": each["verifier"], "Reference": each["reference"]}
            yield prose(each["summary"] + ".") + "\n"
            yield " · ".join(f"{name}: {prose(value)}" for name, value in facts.items() if value) + "\n"
            converter = converters[each["name"]].load()
            for function in (converter.read, converter.prompt):
                if explained := inspect.getdoc(function):
                    yield prose(explained) + "\n"
            if each["options"]:
                yield table(
                    ["option", "what"],
                    [(code(name), cell(description)) for name, description in each["options"].items()],
                )

    opening = "For whoever makes a dataset with `rlcli prep NAME`; [Datasets](../datasets.md) has the options of all."
    return page("All datasets", opening, parts())


def recipes_page(recipes: list[dict[str, Any]]) -> str:
    def parts() -> Iterator[str]:
        for title, some in (
            ("For any model and data", [each for each in recipes if not each["recipe"]["task"]]),
            ("For a task", [each for each in recipes if each["recipe"]["task"]]),
        ):
            yield entry(title, "", 2)
            yield table(
                ["recipe", "what"],
                [(f"[`{each['recipe']['name']}`](#{each['recipe']['name']})", cell(_what(each))) for each in some],
            )
            for each in some:
                yield from _recipe(each)

    opening = (
        "For whoever chooses a recipe. `rlcli recipes show NAME` prints the file, `rlcli recipes copy NAME` makes one "
        "of your own."
    )
    return page("All recipes", opening, parts())


def _what(recipe: dict[str, Any]) -> str:
    header = recipe["recipe"]
    return f"{header['task']}. {header['summary']}" if header["task"] else header["summary"]


def _recipe(recipe: dict[str, Any]) -> Iterator[str]:
    from rlcli.config.load import to_toml

    header = recipe["recipe"]
    yield entry(f"`{header['name']}`", header["name"], 3)
    yield prose(_what(recipe)) + "\n"
    base = f"[`{header['base']}`](#{header['base']})" if header["base"] else ""
    facts = {
        "When": prose(header["when"]),
        "Paper": prose(header["paper"]),
        "Starts from": base,
        "Hardware": prose(header["hardware"]),
        "Expect": prose(header["expect"]),
        "Reproduced": prose(header["reproduced"]),
    }
    yield "\n".join(f"- {name}: {value}" for name, value in facts.items() if value) + "\n"
    own_values = {key: value for key, value in recipe["values"].items() if recipe["origins"][key] == header["name"]}
    yield block("\n".join(f"{key} = {to_toml(value)}" for key, value in own_values.items()), "toml")
