"""Checks that tokenised conversations equal the engine's inputs and samples, over random ones of real chat templates.

    python scripts/proofs/conversations.py [--count 1100] [--seed 0] [--folder FOLDER] [--cache FOLDER] [--json FILE]

Each conversation is of one family's template (as in templates.py) and of a byte-level BPE with merges. Its environment
answers with random text: other scripts, spaces at the borders, control tokens spelled out. Its policy draws what the
template would write, or the same text in other tokens, or any tokens at all; some turns are cut off. Checked at every
turn: the drawn tokens, and no others, have mask 1; the tokens before them are those that the engine was asked to
continue; no second BOS. Where the template appends, the tokens equal those of one rendering of all messages. Where the
package `renderers` knows the family (installed with uv under --cache), its `bridge_to_next_turn` gives the same tokens.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from templates import STOPS, downloaded, families, tokenizer_of

from rlcli.data.trajectories import Trajectory
from rlcli.environments.template_contract import TOOLS
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.errors import ModelError

ORACLES = {
    "qwen3": "Qwen3RendererConfig",
    "qwen3_5_think": "Qwen35RendererConfig",
    "qwen3_6": "Qwen36RendererConfig",
    "qwen3_8": "Qwen38RendererConfig",
    "glm4moe": "GLM45RendererConfig",
    "llama3_1": "Llama3RendererConfig",
    "llama3_2": "Llama3RendererConfig",
    "nemotron_3_nano": "Nemotron3RendererConfig",
    "nemotron_3_super": "Nemotron3RendererConfig",
}
"""Family → its configuration in `renderers`. Its DeepSeek has another template than TRL's; Gemma 4 asks for images."""
PIECES = ("a", " b", "12", "\n", "  ", "the", "ing", "véri", "真的", "🙂", "{", '"x": 1}', "#", "\t", ".")
CONTROL = ("<|im_end|>", "<|eot_id|>", "<think>")
"""Text of the environment that must not become control tokens."""
ORACLE = """
import json, sys
import renderers.configs
from renderers.base import create_renderer
from transformers import PreTrainedTokenizerFast

for line in sys.stdin:
    asked = json.loads(line)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked["tokenizer"])
    config = getattr(renderers.configs, asked["config"])
    try:
        renderer = create_renderer(tokenizer, config(thinking_retention="all"))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
        continue
    found = []
    for prompt, drawn, messages, tools in asked["boundaries"]:
        try:
            bridged = renderer.bridge_to_next_turn(prompt, drawn, messages, tools=tools or None)
            found.append(None if bridged is None else list(bridged.token_ids))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}"[:300])
    print(json.dumps({"ids": found}), flush=True)
"""


@dataclass
class FamilyResult:
    """Counts of one family, and its boundaries between turns."""

    conversations: int = 0
    """Conversations that the template accepts."""
    turns: int = 0
    """Turns of the policy in them."""
    comparable: int = 0
    """Conversations whose template renders each part as the beginning of the whole."""
    equal: int = 0
    """Number of conversations whose tokens equal one rendering of all messages."""
    agreed: int = 0
    """Boundaries where `renderers` appends the same tokens."""
    uncovered: int = 0
    """Boundaries that `renderers` renders anew, or fails at."""
    wrong: list[str] = field(default_factory=list)
    """A line for each difference."""
    boundaries: list[tuple[list[int], list[int], list[Any], list[Any], list[int]]] = field(default_factory=list)
    """Prompt, turn, messages and tools at each turn, for the oracle, and our tokens."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=1100, help="of conversations, over all families; templates refuse some (1100)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of *.jinja files, named after their families")
    parser.add_argument("--cache", type=Path, help="for the environment of `renderers`; without it, it is left out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or downloaded(Path(scratch))
        paths = [*families(folder, every=False)]
        results = {}
        for number, path in enumerate(paths):
            count = (options.count + number) // len(paths)
            tokenizer, stops = of_family(path)
            results[path.stem] = played(tokenizer, stops, count, random.Random(f"{options.seed} {path.stem}"))
            if options.cache and path.stem in ORACLES:
                ask_oracle(results[path.stem], tokenizer, ORACLES[path.stem], options.cache, Path(scratch))
    return print_results(results, options.json)


def of_family(path: Path) -> tuple[Any, list[int]]:
    stops = next(stops for name, stops in STOPS.items() if path.stem.startswith(name)).split()
    tokenizer = tokenizer_of(path.read_text(encoding="utf-8"), eos=stops[0])
    return tokenizer, tokenizer.convert_tokens_to_ids(stops)


def played(tokenizer: Any, stops: Sequence[int], count: int, draw: random.Random) -> FamilyResult:
    result = FamilyResult()
    for _ in range(count):
        try:
            Played(tokenizer, stops, draw, result).play()
        except ModelError:
            continue  # the template refuses such messages; templates.py shows which
        result.conversations += 1
    return result


class Played:
    """One conversation. exact: of turns as the template would write them, so that all can be compared."""

    def __init__(self, tokenizer: Any, stops: Sequence[int], draw: random.Random, result: FamilyResult) -> None:
        self.tokenizer, self.stops, self.draw, self.result = tokenizer, stops, draw, result
        self.exact, self.uses_tools = draw.random() < 0.5, draw.random() < 0.5
        self.tools = TOOLS if self.uses_tools else []
        self.template = TurnTemplate(tokenizer, stops, self.tools)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self.text()}]
        if draw.random() < 0.3:
            self.messages.insert(0, {"role": "system", "content": self.text()})

    def text(self, pieces: Sequence[str] = (*PIECES, *CONTROL)) -> str:
        """Random text that is never empty: templates differ in their treatment of an empty message."""
        return "w" + "".join(self.draw.choice(pieces) for _ in range(self.draw.randint(1, 12))) + "w"

    def play(self) -> None:
        self.messages = [dict(self.template.harmless(message)) for message in self.messages]
        trajectory = Trajectory.of_prompt(np.array(self.template.first(self.messages), np.int32))
        expected = [False] * len(trajectory.tokens)
        for number in range(self.draw.randint(1, 5)):
            prompt = trajectory.tokens.tolist()
            turn, ids = self.turn(prompt)
            replies = self.replies(turn)
            opener = self.template.append(ids, replies).tokens[:1]
            if ids[-1] not in self.stops and not self.cut_off and opener and opener[0] in self.stops:
                ids += opener  # nothing closes a turn of this family but what opens the next one (GLM)
            trajectory = trajectory.extended(
                "policy", np.array(ids, np.int32), np.zeros(len(ids), np.float32), 1, "stop"
            )
            expected += [True] * len(ids)
            dropped, appended = self.template.append(ids, replies)
            trajectory = trajectory.without_last(dropped).extended("environment", np.array(appended, np.int32))
            expected = expected[: len(expected) - dropped] + [False] * len(appended)
            self.messages += [turn, *(dict(self.template.harmless(reply)) for reply in replies)]
            self.result.turns += 1
            ours = trajectory.tokens.tolist()
            self.result.boundaries.append(
                (prompt, ids, [*map(dict, map(self.template.harmless, replies))], self.tools, ours)
            )
            if ours != prompt + ids[: len(ids) - dropped] + appended:
                self.wrong(number, "not what the engine read and sampled")
            if trajectory.response_mask.tolist() != expected:
                self.wrong(number, "the mask is not that of the response tokens")
            if ours.count(self.tokenizer.bos_token_id) - sum(i == self.tokenizer.bos_token_id for i in ids) > 1:
                self.wrong(number, "a second BOS")
        if self.exact:
            self.compare(trajectory.tokens.tolist())

    def turn(self, prompt: list[int]) -> tuple[dict[str, Any], list[int]]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text(PIECES)}
        if self.uses_tools and self.draw.random() < 0.6:
            arguments: Any = {"a": self.draw.randint(0, 99), "b": 2}
            arguments = json.dumps(arguments) if self.template.arguments == "{}" else arguments
            call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        rendered = self.template.trimmed([*self.messages, message])
        self.cut_off = False
        if self.exact and rendered[: len(prompt)] == prompt and len(rendered) > len(prompt):
            return message, rendered[len(prompt) :]
        if self.exact:
            self.compare(prompt)  # the template renders the past differently now, or ours is not what it renders
        self.exact = False
        ids = (
            self.tokenizer(self.text(PIECES), add_special_tokens=False)["input_ids"] if self.draw.random() < 0.5 else []
        )
        ids += [self.draw.randrange(256) for _ in range(self.draw.randint(1, 20))]
        if self.tokenizer.decode(prompt).rstrip().endswith("<think>"):
            ids = self.tokenizer("</think>", add_special_tokens=False)["input_ids"] + ids
        closes = rendered[-1] in self.stops
        self.cut_off = closes and self.draw.random() < 0.1
        return message, ids + ([rendered[-1]] if closes and not self.cut_off else [])

    def replies(self, turn: dict[str, Any]) -> list[dict[str, Any]]:
        if "tool_calls" in turn:
            return [{"role": "tool", "name": "add", "tool_call_id": "call00001", "content": self.text()}]
        return [{"role": "user", "content": self.text()}]

    def compare(self, ours: list[int]) -> None:
        """With one rendering of all messages, where each rendering of a part is its beginning."""
        rendered = self.template.first(self.messages)
        parts = [n for n, message in enumerate(self.messages) if n and message["role"] == "assistant"]
        text = self.tokenizer.decode(rendered)
        if any(
            not text.startswith(self.tokenizer.decode(self.template.trimmed(self.messages[: n + 1]))) for n in parts
        ):
            return
        self.result.comparable += 1
        self.result.equal += ours == rendered
        if ours != rendered:
            self.wrong(len(parts), "{!r} in place of {!r}".format(*self.differing(ours, rendered)))

    def differing(self, ours: list[int], theirs: list[int]) -> list[str]:
        return differing(self.tokenizer, ours, theirs)

    def wrong(self, number: int, difference: str) -> None:
        self.result.wrong.append(f"turn {number}: {difference}")


def ask_oracle(result: FamilyResult, tokenizer: Any, config: str, cache: Path, scratch: Path) -> None:
    """Compare each boundary with what `renderers` appends."""
    tokenizer.save_pretrained(scratch / config)
    question = {
        "tokenizer": str(scratch / config),
        "config": config,
        "boundaries": [boundary[:4] for boundary in result.boundaries],
    }
    done = subprocess.run(
        [interpreter(cache), "-P", "-c", ORACLE],
        input=json.dumps(question) + "\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    answer = json.loads(done.stdout or json.dumps({"error": done.stderr[-300:]}))
    if "error" in answer:
        result.wrong.append(f"renderers: {answer['error']}")
        return
    for (*_, ours), theirs in zip(result.boundaries, answer["ids"], strict=True):
        if isinstance(theirs, list):
            result.agreed += theirs == ours
            if theirs != ours:
                result.wrong.append("{!r}, renderers has {!r}".format(*differing(tokenizer, ours, theirs)))
        else:
            result.uncovered += 1


def differing(tokenizer: Any, *pair: list[int]) -> list[str]:
    """Both as text, from shortly before the first token that differs."""
    same = next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
    return [str(tokenizer.decode(ids[max(0, same - 3) : same + 20])) for ids in pair]


def interpreter(cache: Path) -> Path:
    """Python interpreter of an environment with `renderers`, made once."""
    python = cache / "renderers" / "bin" / "python"
    if not python.exists():
        uv = [sys.executable, "-P", "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(cache / "renderers")], check=True)
        packages = ("renderers", "httpx", "transformers", "jinja2")
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(python), *packages], check=True)
    return python


def print_results(results: dict[str, FamilyResult], file: Path | None) -> int:
    columns = (
        "conversations",
        "turns",
        "append only",
        "of them equal",
        "renderers agrees",
        "it renders anew",
        "wrong",
        "",
    )
    table = Table("family", *columns, box=None)
    total = Counter[str]()
    for name, family in results.items():
        numbers = (family.conversations, family.turns, family.comparable)
        numbers += (family.equal, family.agreed, family.uncovered, len(family.wrong))
        table.add_row(name, *map(str, numbers), (family.wrong or [""])[0][:90])
        total.update(dict(zip(columns, numbers, strict=False)))
    table.add_row("all", *(str(total[name]) for name in columns[:7]))
    Console(width=200).print(table)
    if file:
        file.write_text(
            json.dumps({"all": total, **{name: family.wrong[:20] for name, family in results.items()}}, indent=1) + "\n"
        )
    return int(any(family.wrong for family in results.values()))


if __name__ == "__main__":
    sys.exit(main())
