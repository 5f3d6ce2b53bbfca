"""How many generated tokens does each way to draw prompts need to reach a held-out score?

    .venv/bin/python scripts/proofs/prompt_selection.py [--cases mixed …] [--arms uniform …] [--seeds 5]
                                                        [--folder FOLDER] [--json FILE]

Each run is GRPO on a tiny model, in one process (_selection_loop.py), until the target is reached. `mixed`: sums of 1
to 6 digits for the warm start of `rlcli quickstart`, which has seen sums of up to two digits, mostly guessed: those can
be learned, and those of more digits stay out of reach. `even`: the quickstart's own sums, all about equally hard.
`chain`: reasoning_gym's chain_sum of 2 to 7 terms, for a warm start that works few terms always and many rarely. The
arms draw prompts by `data.sampling`, with the filter of groups whose rewards are all equal (dynamic sampling) or
without it. Tokens are all that a run generated, dropped groups too, up to the target, with a straight line between
evaluations; a run that does not reach it counts with all its tokens, marked ≥. Ratios are to `uniform` with the same
seed: their geometric mean, with a 95% interval over seeds from Student's t. With --folder a run whose result is there
is not repeated, so several processes may share the work.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlcli_quickstart.warm_start import Lessons

GUESS_WITHIN = 10
WARM = 4000
"""Questions of the warm start."""
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""97.5% quantile of Student's t for so many seeds."""
ALWAYS = ("dynamic_sampling.keep=accuracy", "dynamic_sampling.low=0", "dynamic_sampling.high=1")
"""Keeps every group: `data.sampling` other than uniform asks for a filter."""
FILTER = ("dynamic_sampling.keep=unequal",)
ARMS: dict[str, tuple[str, ...]] = {
    "uniform": FILTER,
    "difficulty": (*FILTER, "data.sampling=difficulty"),
    "thompson": (*FILTER, "data.sampling=thompson"),
    "uniform, unfiltered": (),
    "thompson, unfiltered": (*ALWAYS, "data.sampling=thompson"),
}


@dataclass(frozen=True)
class Item:
    """One question. level: of its difficulty, from 0. worked: the demonstration that works it, if there is one."""

    question: str
    answer: int
    level: int
    worked: str = ""
    verifier: str = "gsm8k"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        from rlcli.data.prompts.parquet_schema import row

        message = {"role": "user", "content": self.question}
        return row(
            data_source="proof",
            messages=[message],
            verifier=self.verifier,
            ground_truth=str(self.answer),
            extra_info=self.extra,
        )


@dataclass(frozen=True)
class Task:
    """item: makes a question of one of so many levels; None: the data are the quickstart's. target: the held-out score
    to reach. sets: on top of the recipe quickstart. shares: of the demonstrations of each level that are worked, the
    others guess; none: the warm start is the quickstart's. train, test: questions."""

    item: Callable[[random.Random, int], Item] | None
    levels: int
    target: float
    sets: Sequence[str]
    shares: Sequence[float] = ()
    train: int = 384
    test: int = 192


def sum_of(rng: random.Random, level: int) -> Item:
    """A sum of two numbers of level + 1 digits."""
    low = 10**level if level else 0
    a, b = rng.randrange(low, 10 ** (level + 1)), rng.randrange(low, 10 ** (level + 1))
    return Item(f"{a}+{b}=", a + b, level)


def chain_of(rng: random.Random, level: int) -> Item:
    """A question of reasoning_gym's chain_sum, with level + 2 terms of one digit."""
    import reasoning_gym

    terms = level + 2
    entry = reasoning_gym.create_dataset(
        "chain_sum", seed=rng.randrange(1 << 31), size=1, min_terms=terms, max_terms=terms, min_digits=1, max_digits=1
    )[0]
    total, *rest = entry["metadata"]["expression"].split()
    total, steps = int(total), list[str]()
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(sign + number)
        steps.append(f"{total}{sign}{number}={after}")
        total = after
    worked = f"{','.join(steps)}<answer>{total}</answer>"
    extra = {"answer_format": "tag", "task": "chain_sum", "entry": json.dumps(entry)}
    return Item(entry["question"], total, level, worked, "reasoning_gym", extra)


COMMON = ("rollout.prompts_per_step=8", "evaluation.every=4", "train.warmup_steps=5", "train.steps=60")
TASKS: dict[str, Task] = {
    "mixed": Task(sum_of, 6, 0.25, COMMON),
    "chain": Task(
        chain_of,
        6,
        0.6,
        (*COMMON, "rollout.max_response_tokens=80", "data.max_prompt_tokens=128"),
        (1.0, 1.0, 0.5, 0.3, 0.15, 0.08),
    ),
    "even": Task(None, 1, 0.8, COMMON),
}


def items(task: Task, seed: int) -> dict[str, list[Item]]:
    """Questions by split, as many of each level; those of train and test are distinct, and none of test is in warm."""
    assert task.item is not None, "its questions are the quickstart's"
    rng = random.Random(seed)
    found: dict[str, Item] = {}
    while len(found) < task.train + task.test:
        one = task.item(rng, len(found) % task.levels)
        found.setdefault(one.question, one)
    every, known = list(found.values()), set(list(found)[: task.test])
    warm = [task.item(rng, place % task.levels) for place in range(WARM if task.shares else 0)]
    return {
        "train": every[task.test :],
        "test": every[: task.test],
        "warm": [one for one in warm if one.question not in known],
    }


class Demonstrations(Lessons):
    """Lessons for a warm start: questions of the task's kind, worked or guessed in its shares."""

    steps = 1000

    def __init__(self, name: str, questions: Sequence[Item]) -> None:
        self.name, self.questions = name, questions

    def key(self) -> Any:
        questions = [(one.question, one.worked) for one in self.questions]
        return ["prompt selection", self.name, TASKS[self.name].shares, questions]

    def prepare(self, seed: int) -> tuple[Any, Callable[[random.Random, int, float], list[Any]]]:
        from rlcli.model.io.tiny_model import tiny_tokenizer

        tokenizer = tiny_tokenizer()
        return tokenizer, partial(self._batches, tokenizer)

    def _batches(self, tokenizer: Any, rng: random.Random, count: int, done: float) -> list[Any]:
        from rlcli_quickstart.warm_start import IGNORED, padded

        task, rows = TASKS[self.name], []
        for one in rng.choices(self.questions, k=count):
            guess = f"<answer>{one.answer + rng.randint(-GUESS_WITHIN, GUESS_WITHIN)}</answer>"
            text = one.worked if rng.random() < task.shares[one.level] else guess
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": one.question}], add_generation_prompt=True, return_dict=False
            )
            answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            rows.append(([*prompt, *answer], [IGNORED] * len(prompt) + answer))
        rows.sort(key=lambda row: len(row[0]))
        half = len(rows) // 2
        return [padded(some, tokenizer.pad_token_id) for some in (rows[:half], rows[half:]) if some]


def prepared(name: str, folder: Path) -> tuple[Path, Path]:
    """The data of a task and its warmed-up model, which all arms and seeds share."""
    from rlcli_quickstart.sum_lessons import Sums
    from rlcli_quickstart.warm_start import warm_start

    from rlcli.data.prompts.parquet_schema import prompt_row, write_rows
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    task, data, warm = TASKS[name], folder / f"data-{name}", folder / f"data-{name}-warm"
    data.mkdir(parents=True, exist_ok=True)
    splits = prepare(converter_named("arithmetic"), ConvertOptions(seed=0)).splits
    sums = {split: [prompt_row(prompt) for prompt in some] for split, some in splits.items()}
    rows = {"train": sums["train"][: task.train], "test": sums["test"][: task.test]}
    if task.item:
        questions = items(task, 0)
        rows = {split: [one.row() for one in questions[split]] for split in rows}
    if task.shares:
        lessons: Any = Demonstrations(name, questions["warm"])
    else:
        warm.mkdir(exist_ok=True)
        write_rows(warm / "train.parquet", sums["train"])
        lessons = Sums(warm)
    for split, some in rows.items():
        write_rows(data / f"{split}.parquet", some)
    return data, warm_start(folder / "warm-starts", lessons, 0).path


def ran(name: str, arm: str, seed: int, folder: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """What came out of the run of an arm, which is run now unless its file is there."""
    file = folder / f"{name}-{arm.replace(', ', '-')}-{seed}.json"
    if not file.exists():
        import rlcli_verifiers.gsm8k
        import rlcli_verifiers.reasoning_gym
        import torch
        from _selection_loop import Loop

        from rlcli.config.load import resolve
        from rlcli.data.prompts.prompt_table import read_prompts

        torch.set_num_threads(1)
        verify = {"gsm8k": rlcli_verifiers.gsm8k.verify, "reasoning_gym": rlcli_verifiers.reasoning_gym.verify}
        data, model = prepared(name, folder)
        flags = {"model.path": str(model), "data.path": str(data), "train.seed": seed}
        config = resolve("quickstart", flags, [*TASKS[name].sets, *ARMS[arm], *more]).config
        loop = Loop(str(model), config, read_prompts(data, "train"), read_prompts(data, "test"), verify)
        started = time.process_time()
        course = loop.run(TASKS[name].target)
        found = {"case": name, "arm": arm, "seed": seed, "cpu_s": time.process_time() - started, **asdict(course)}
        beside = file.with_suffix(".tmp")
        beside.write_text(json.dumps(found) + "\n")
        beside.rename(file)
    found = json.loads(file.read_text())
    tokens, reached = tokens_to(found["curve"], TASKS[name].target)
    return found | {
        "tokens_to_target": tokens,
        "reached": reached,
        "first": found["curve"][0][1],
        "last": found["curve"][-1][1],
        "equal_share": found["equal"] / found["groups"],
    }


def tokens_to(curve: Sequence[tuple[int, float]], target: float) -> tuple[float, bool]:
    """Tokens until the score first reaches the target, by a straight line, and whether it does.

    >>> tokens_to([(0, 0.1), (100, 0.5), (300, 0.9)], 0.7), tokens_to([(0, 0.1), (100, 0.5)], 0.7)
    ((200.0, True), (100.0, False))
    """
    for (before, low), (after, high) in pairwise(curve):
        if high >= target:
            return before + (after - before) * max(0.0, target - low) / (high - low), True
    return float(curve[-1][0]), False


def compared(found: Sequence[Mapping[str, Any]], base: str = "uniform") -> Iterator[dict[str, Any]]:
    """For each case and arm: figures over its seeds, and the ratio of its tokens to those of the arm `base`."""
    for name in TASKS:
        of_base = {one["seed"]: one for one in found if one["case"] == name and one["arm"] == base}
        for arm in ARMS:
            own = [one for one in found if one["case"] == name and one["arm"] == arm]
            both = [one for one in own if one["seed"] in of_base]
            logs = [math.log(one["tokens_to_target"] / of_base[one["seed"]]["tokens_to_target"]) for one in both]
            if not own:
                continue
            half = STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) in STUDENT else None
            yield {
                "case": name,
                "arm": arm,
                "seeds": len(own),
                "reached": sum(one["reached"] for one in own),
                "tokens": statistics.median(one["tokens_to_target"] for one in own),
                "last": statistics.mean(one["last"] for one in own),
                "equal": statistics.mean(one["equal_share"] for one in own),
                "ratio": math.exp(statistics.mean(logs)) if logs else None,
                "low": None if half is None else math.exp(statistics.mean(logs) - half),
                "high": None if half is None else math.exp(statistics.mean(logs) + half),
            }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| task | prompts drawn | reached | tokens to the target (median) | ratio | last score | equal groups |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in compared(found):
        ratio = "" if one["ratio"] is None else f"{one['ratio']:.2f}"
        ratio += "" if one["low"] is None else f" [{one['low']:.2f}, {one['high']:.2f}]"
        tokens = f"{'' if one['reached'] == one['seeds'] else '≥ '}{one['tokens']:,.0f}"
        reached, last = f"{one['reached']} of {one['seeds']}", f"{one['last']:.3f}"
        lines.append(f"| {one['case']} | {one['arm']} | {reached} | {tokens} | {ratio} | {last} | {one['equal']:.0%} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--folder", type=Path, default=None, help="where results and warm starts are kept")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rlcli-prompts-") as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for name in arguments.cases:
                for arm in arguments.arms:
                    found.append(one := ran(name, arm, seed, folder, arguments.set))
                    tokens = f"{one['tokens_to_target']:,.0f} tokens"
                    print(f"{name}, {arm}, seed {seed}: {tokens}, {one['last']:.3f}, {one['cpu_s']:.0f} s", flush=True)
                    if arguments.json:
                        summary = {"runs": found, "compared": list(compared(found))}
                        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
