"""What flows through a run. Nothing here imports more than the standard library.

A parquet row becomes a `Prompt`; each of its responses becomes a `Sample` whose tokens stay where they were generated;
a verifier turns a `VerifyRequest` into a `Verdict`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

Message = Mapping[str, str]
"""One chat message: `{"role": "user", "content": "What is 2+2?"}`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset.

    >>> Prompt(
    ...     id="openai/gsm8k:train:0",
    ...     messages=({"role": "user", "content": "What is 2+2?"},),
    ...     data_source="openai/gsm8k",
    ...     ability="math",
    ...     verifier="gsm8k",
    ...     ground_truth="4",
    ... ).messages[0]["content"]
    'What is 2+2?'
    """

    id: str
    messages: tuple[Message, ...]
    data_source: str
    ability: str
    verifier: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)


class Outcome(StrEnum):
    """How a verification ended.

    Only `TIMEOUT` and `CRASH` are the verifier's own failures, each after a second try in a fresh process. They say
    nothing of the response: such samples are no part of a loss or of a group's statistics.
    """

    OK = "ok"
    """The answer was found and is right."""
    WRONG = "wrong"
    """The answer was found and is not right; or its verification has used up its CPU time twice."""
    NO_ANSWER = "no_answer"
    """The response holds no answer in the form that the verifier reads."""
    TIMEOUT = "timeout"
    """The verifier was ended by the clock on the wall (or once by its CPU deadline, and then did not do it again)."""
    CRASH = "crash"
    """The verifier raised, or its process died."""


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """What a verifier is given: one response and what its row says.

    completion_ids: its token ids, the end included; empty where nobody knows them (a file of texts, a served model).
    finish_reason: why the response ended: "stop" (the model ended it) or "length" (it was cut off at the limit); empty
    where nobody knows. thinking: the prompt ends within a <think> that its chat template opened.
    """

    completion: str
    ground_truth: str
    prompt: tuple[Message, ...] = ()
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] = ()
    finish_reason: FinishReason | Literal[""] = ""
    thinking: bool = False

    def answer_text(self) -> str | None:
        """The response without its reasoning: what follows the last `</think>`. None where a `<think>` is still open,
        be it the response's or the prompt's: such a response has not begun to answer.

        An opening within an open `<think>` has to be closed as well, unless it only repeats it. Outside of reasoning a
        tag in a code block, or between backticks, is text.

        >>> VerifyRequest("<think>maybe 41? no</think> 42", "42").answer_text()
        ' 42'
        >>> VerifyRequest("<think>maybe 42? wait", "42").answer_text() is None
        True
        >>> VerifyRequest("maybe 42? wait", "42", thinking=True).answer_text() is None
        True
        """
        is_open, start = _reasoning(self.completion, self.thinking)
        return None if is_open else self.completion[start:]

    def tail(self, characters: int) -> VerifyRequest:
        """The same with the last `characters` of the response alone; whether a `<think>` is open there stays known."""
        cut = len(self.completion) - characters
        if cut <= 0:
            return self
        is_open, _ = _reasoning(self.completion[:cut], self.thinking)
        return replace(self, completion=self.completion[cut:], thinking=is_open)


_THINK = re.compile(r"<think>|</think>")
_OUTSIDE = re.compile(r"<think>|</think>|^[ \t]*(?P<fence>```|~~~)|`[^`\n]+`", re.MULTILINE)
_FENCE_ENDS = {mark: re.compile(rf"^[ \t]*{mark}[`~]*[ \t]*$", re.MULTILINE) for mark in ("```", "~~~")}


def _reasoning(text: str, is_open: bool) -> tuple[bool, int]:
    """Whether a `<think>` is open at the end of `text`, and where what follows the reasoning begins. Takes time linear
    in the text's length. is_open: whether one is at its start."""
    depth, start, at, opened, endless = int(is_open), 0, 0, 0, set[str]()
    while found := (_THINK if depth else _OUTSIDE).search(text, at):
        at = found.end()
        if found[0] == "<think>":
            depth += not (depth and not text[opened : found.start()].strip())
            opened = at
        elif found[0] == "</think>":
            depth, start = max(depth - 1, 0), at
        elif (mark := found.groupdict().get("fence")) and mark not in endless:
            line_end = text.find("\n", at)
            end = _FENCE_ENDS[mark].search(text, line_end) if line_end >= 0 else None
            at = end.end() if end else at
            endless |= set() if end else {mark}
    return depth > 0, start


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says of one response.

    score: the reward, usually 0 or 1. answer: the answer it read, as text. parts: named rewards that make up the
    score, each a metric of its own. detail: why, for a reader (of a crash, the exception). latency_s: seconds it took,
    filled in by the scoring pool.

    >>> Verdict(score=1.0, outcome=Outcome.OK, answer="42").outcome.value
    'ok'
    """

    score: float
    outcome: Outcome
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    latency_s: float = 0.0


class Verifier(Protocol):
    """A function from a request to a verdict; the entry-point group `rlcli.verifiers` publishes it by name.

    It runs in a process of its own that is killed at a deadline: it may be slow, hang or crash without hurting the run.
    It never executes or evaluates the model's text. None says that this row is none of its business. Its keyword-only
    parameters are options, which a configuration gives as `name(strict=true)`. It may be `async`, and it may take
    `requests`, many at once, and return as many verdicts.

        def verify(request: VerifyRequest, *, ignore_case: bool = False) -> Verdict:
            answer, truth = request.completion.strip(), request.ground_truth
            right = answer.lower() == truth.lower() if ignore_case else answer == truth
            return Verdict(score=float(right), outcome=Outcome.OK if right else Outcome.WRONG, answer=answer)

    Its module may have `preload()`, which imports what is slow, once; and `gold(request)`, which writes a response that
    gives the request's ground truth as an answer, for `rlcli verifiers audit`.
    """

    def __call__(self, request: VerifyRequest, /) -> Verdict | None: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One response, without its tokens: those are row `row` of shard `shard`.

    prompt: index of its prompt in the step (its group). sample: index within the group. prompt_tokens, response_tokens:
    counts, the end-of-text token included. version: how many weight syncs the engine had seen when it generated this.
    seed: that its tokens were drawn with. signature: of its tokens, log-probs and score (`rlcli.data.signature`); 0:
    not signed.
    """

    prompt: int
    sample: int
    shard: int
    row: int
    prompt_tokens: int
    response_tokens: int
    finish_reason: FinishReason
    verdict: Verdict
    version: int
    seed: int = 0
    signature: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a source, as it is there.

    where: for messages, the name of its file and where it is in it ("train.jsonl.gz, line 17"). origin: where all rows
    of that file come from, for the record: the file's path, or hub id and revision ("openai/gsm8k@740312add88f"); empty
    for what is generated. problem: why it has no values, of a line that is not JSON, say; one such row ends the
    conversion or is skipped, as the user wants it.
    """

    values: Mapping[str, Any]
    where: str
    origin: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What `rlcli prep NAME` was given; None (columns: empty) where a flag was not, and the converter's default holds.

    source: a hub id, or a local folder or file. subset: a named part of the source (of a hub dataset, its
    configuration). task: which of a generator's tasks. difficulty, seed: of generated problems. count, test_count: rows
    to generate for the train and for the test split. columns: our name of a column → its name in the source. verifier,
    data_source, ability: what every row says of itself. instruction: what is added to each question.
    """

    source: str | None = None
    subset: str | None = None
    task: str | None = None
    difficulty: int | None = None
    seed: int | None = None
    count: int | None = None
    test_count: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    verifier: str | None = None
    data_source: str | None = None
    ability: str | None = None
    instruction: str | None = None


@dataclass(frozen=True)
class Converter:
    """A dataset's way into parquet; the entry-point group `rlcli.data_prep` publishes it by name.

    summary: one line for `rlcli prep list`. source: where the rows come from (a hub id, or "generated"). verifier: the
    one that scores them. read: the raw rows of each split ("train", "test"), which may come lazily; it raises
    `DataError` for a source that cannot be read and `ConfigError` for an option out of bounds. prompt: one row's values
    as a `Prompt` with the id "" and in `extra_info` what the dataset keeps; it raises `DataError` about the values
    alone, and the caller adds where the row is, its id, and `split` and `index` to `extra_info`. options: which fields
    of `ConvertOptions` it reads, name → help; `rlcli prep` refuses the others. reference: paper, licence, size.

        def read(options: ConvertOptions) -> dict[str, list[RawRow]]:
            return {"train": [RawRow({"country": "France", "city": "Paris"}, "row 0")]}

        def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
            question = {"role": "user", "content": f"The capital of {row['country']}?"}
            return Prompt("", (question,), "capitals", "geography", "exact", row["city"])

        CONVERTER = Converter("capitals", "Capitals of the world", "generated", "exact", read, prompt)
    """

    name: str
    summary: str
    source: str
    verifier: str
    read: Callable[[ConvertOptions], Mapping[str, Iterable[RawRow]]]
    prompt: Callable[[Mapping[str, Any], ConvertOptions], Prompt]
    options: Mapping[str, str] = field(default_factory=dict)
    reference: str = ""
