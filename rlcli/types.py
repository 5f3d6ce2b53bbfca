"""The data types of a run. Imports only the standard library.

A parquet row becomes a `Prompt`; each of its trajectories becomes a `Sample` whose tokens stay where they were
generated; a verifier turns a `VerifyRequest` into a `Verdict`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

Message = Mapping[str, str]
"""One chat message: `{"role": "user", "content": "What is 2+2?"}`."""
IMAGE = "<image>"
"""Stands in a message's text for one of its prompt's pictures, in their order."""
FinishReason = Literal["stop", "length"]
Ended = Literal["done", "turns", "turn_tokens", "drawn_tokens", "tokens", "tool_calls", "seconds", "failed"]
"""Why a conversation ended: its environment was done, a limit was reached, or the environment failed twice.
turn_tokens: a turn was cut off, and is not continued. tokens: what the environment wrote, or another turn, has no
room."""
ENDED: tuple[Ended | None, ...] = (None, *get_args(Ended))
"""The values that `Sample.ended` indexes; None: it was no conversation."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset.

    images: encoded pictures (PNG, JPEG, …), as many as there are `IMAGE` markers in the messages, in that order.
    Without any, such a marker is plain text.

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
    images: tuple[bytes, ...] = field(default=(), repr=False)

    def content(self) -> bytes:
        """What a fingerprint of the prompt hashes. It is short: a digest stands for the pictures."""
        return "".join((repr(self), *self.image_digests())).encode(errors="surrogatepass")

    def problem(self, *, with_extra_info: bool = False) -> str:
        """32 hexadecimal digits, equal for rows that pose the same problem: equal messages, pictures, ground truth and
        verifier. In an evaluation, responses to such rows are samples of one prompt.

        with_extra_info: `extra_info` must be equal too, but for the row's `index` and `split`: an environment may read
        its task there.
        """
        messages = [sorted(message.items()) for message in self.messages]
        extra = sorted((name, value) for name, value in self.extra_info.items() if name not in ("index", "split"))
        parts = (messages, self.image_digests(), self.ground_truth, self.verifier, extra if with_extra_info else ())
        return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def image_digests(self) -> tuple[str, ...]:
        """Hexadecimal, of each picture: equal for equal bytes."""
        return tuple(map(image_digest, self.images))

    def request(self, completion: str = "", finish_reason: FinishReason | Literal[""] = "") -> VerifyRequest:
        """The input of a verifier for a response to this prompt."""
        row = (self.ground_truth, self.messages, self.data_source, self.extra_info)
        return VerifyRequest(completion, *row, finish_reason=finish_reason)


def image_digest(image: bytes) -> str:
    """32 hexadecimal digits, of an encoded picture."""
    return hashlib.blake2b(image, digest_size=16).hexdigest()


class Outcome(StrEnum):
    """How a verification ended.

    Those in `UNVERIFIED` do not judge the response: such samples are not part of a loss or of a group's statistics. If
    a verifier raises or its process ends, that is reported after a second try in a fresh process.
    """

    OK = "ok"
    """The answer was found and is right."""
    WRONG = "wrong"
    """The answer was found and is not right; or its verification has used up its CPU time twice."""
    NO_ANSWER = "no_answer"
    """The response has no answer in the form that the verifier reads."""
    TIMEOUT = "timeout"
    """The verifier reached its wall-clock deadline (or once its CPU deadline, but not on the second try)."""
    CRASH = "crash"
    """The verifier raised, or its process died, or what it depends on failed (a judge's endpoint)."""
    ENVIRONMENT = "environment"
    """The sample's environment failed twice: there is no complete conversation to verify."""
    UNPARSED = "unparsed"
    """A judge replied, but its reply cannot be read as a verdict."""


UNVERIFIED = (Outcome.TIMEOUT, Outcome.CRASH, Outcome.ENVIRONMENT, Outcome.UNPARSED)
"""The outcomes that do not judge a response."""

USAGE = "usage/"
"""Prefix of the parts of a verdict that count what it has cost (calls, tokens): never part of a reward."""

LOGGED = "log/"
"""Prefix of the parts of a verdict that its verifier only logs, as metrics: never part of a reward."""


def is_reward(part: str) -> bool:
    """Whether a part of a verdict, by its name, is part of a reward.

    >>> is_reward("format"), is_reward("usage/calls"), is_reward("log/length")
    (True, False, False)
    """
    return not part.startswith((USAGE, LOGGED))


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """The input of a verifier: one response and the fields of its row.

    completion_ids: its token ids, the end included; empty if unknown (a file of texts, a served model).
    finish_reason: why the response ended: "stop" (the model ended it) or "length" (it was cut off at the limit); empty
    if unknown. thinking: the prompt ends within a <think> that its chat template opened.

    rivals: other responses of its group, for a verifier that compares them (its option `rivals`: how many).

    step: of the training, from 1, in which the response was drawn, of `steps`; 0 where that is unknown, as it is to
    verifiers that get responses one by one.

    Of a conversation with an environment, the completion is the policy's last turn. conversation: all its messages, the
    prompt's included. environment: `rewards` (of each step), `ended` (see `Ended`) and `info` (of the last step).
    """

    completion: str
    ground_truth: str
    prompt: tuple[Message, ...] = ()
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] = ()
    finish_reason: FinishReason | Literal[""] = ""
    thinking: bool = False
    conversation: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    rivals: Sequence[str] = ()
    step: int = 0
    steps: int = 0

    if not TYPE_CHECKING:  # a type checker still refuses such names

        def __getattr__(self, name: str) -> None:
            fields = ", ".join(self.__dataclass_fields__)
            raise AttributeError(f"a VerifyRequest has no field {name!r}; it has {fields}")

    def answer_text(self) -> str | None:
        """The response without its reasoning: what follows the last `</think>`. None if a `<think>` is still open, from
        the response or the prompt: such a response has not begun to answer.

        A nested `<think>` must be closed as well, unless it only repeats the opening tag. Outside of reasoning a tag in
        a code block, or between backticks, is text.

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
        """A copy with only the last `characters` of the response; it keeps whether a `<think>` is open there."""
        cut = len(self.completion) - characters
        if cut <= 0:
            return self
        is_open, _ = _reasoning(self.completion[:cut], self.thinking)
        return replace(self, completion=self.completion[cut:], thinking=is_open)


_THINK = re.compile(r"<think>|</think>")
_OUTSIDE = re.compile(r"<think>|</think>|^[ \t]*(?P<fence>```|~~~)|`[^`\n]+`", re.MULTILINE)
_FENCE_ENDS = {mark: re.compile(rf"^[ \t]*{mark}[`~]*[ \t]*$", re.MULTILINE) for mark in ("```", "~~~")}


def _reasoning(text: str, is_open: bool) -> tuple[bool, int]:
    """Whether a `<think>` is open at the end of `text`, and where the text after the reasoning begins. Takes time
    linear in the text's length. is_open: whether one is open at its start."""
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
    """A verifier's result for one response.

    score: the reward, usually 0 or 1. answer: the answer it read, as text. parts: named rewards that make up the
    score, each with its own metric; names that begin with `USAGE` are costs instead, summed over a step, and those that
    begin with `LOGGED` only metrics. detail: the reason, for a reader (for a crash, the exception). latency_s: seconds
    it took, filled in by the pool. extra: further columns of the response's row in the table of samples.

    >>> Verdict(score=1.0, outcome=Outcome.OK, answer="42").outcome.value
    'ok'
    """

    score: float
    outcome: Outcome
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    latency_s: float = 0.0
    extra: Mapping[str, str] = field(default_factory=dict)


class Verifier(Protocol):
    """A function from a request to a verdict; the entry-point group `rlcli.verifiers` publishes it by name.

    It runs in a separate process that is killed at a deadline: it may be slow, hang or crash without affecting the run.
    It never executes or evaluates the model's text. A number is a score: right if it is above 0. None means that it
    does not apply to this row. Its keyword-only parameters are options, which a configuration sets as
    `name(strict=true)`. It may be `async`, and it may take `requests`, many at once, and return as many verdicts.

        def verify(request: VerifyRequest, *, ignore_case: bool = False) -> Verdict:
            answer, truth = request.completion.strip(), request.ground_truth
            right = answer.lower() == truth.lower() if ignore_case else answer == truth
            return Verdict(score=float(right), outcome=Outcome.OK if right else Outcome.WRONG, answer=answer)

    Its module may have `ROW_OPTIONS`, a literal tuple of the options that a row may set (without it none; None: no row
    may name the verifier); `preload()`, which does slow imports once, or `preload(**options)`, which also gets the
    given options and may refuse them; and `gold(request)`, which writes a response that answers with the request's
    ground truth, for `rlcli verifiers audit`.
    """

    def __call__(self, request: VerifyRequest, /) -> Verdict | float | None: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, without its tokens: those are row `row` of shard `shard`.

    prompt: index of its prompt in the step (its group). sample: index within the group. prompt_tokens: before the first
    drawn token. drawn_tokens: those that the policy drew, the end-of-text token included. version: the engine's number
    of weight syncs when it drew the first of them; newer_by: how many more it had seen at the last; version_tokens: how
    many it drew with each of these versions, empty if all with one. seed: of drawing them. signature: of its tokens,
    log-probs and score (`rlcli.data.signature`); 0: not signed. context_tokens: those after the prompt that the policy
    did not draw. turns: how often the policy spoke. Of a conversation, ended: why, as an index into `ENDED`;
    tool_calls: of the policy; failed_calls: those that could not be read or that failed; turn_rewards: what the
    environment gave for each turn; turn_states: a hash of what it had written before each turn; branches: sequences
    that it consists of. saved_step, saved_group: where its row is saved: in the files of which step (0: unknown, from
    an older checkpoint), and its group among those that this step generated.
    """

    prompt: int
    sample: int
    shard: int
    row: int
    prompt_tokens: int
    drawn_tokens: int
    stop_reason: FinishReason
    verdict: Verdict
    version: int
    seed: int = 0
    signature: int = 0
    context_tokens: int = 0
    turns: int = 1
    newer_by: int = 0
    ended: int = 0
    tool_calls: int = 0
    failed_calls: int = 0
    branches: int = 1
    saved_step: int = 0
    saved_group: int = 0
    turn_rewards: tuple[float, ...] = ()
    turn_states: tuple[int, ...] = ()
    version_tokens: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.drawn_tokens + self.context_tokens


@dataclass(frozen=True, slots=True)
class RawRow:
    """One raw row of a source.

    where: for messages, its file and its position ("train.jsonl.gz, line 17"). origin: the source of all rows of that
    file, for the record: the file's path, or hub id and revision ("openai/gsm8k@740312add88f"); empty for generated
    rows. problem: why it has no values, such as a line that is not JSON; such a row ends the conversion or is skipped,
    as the user chooses.
    """

    values: Mapping[str, Any]
    where: str
    origin: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of `rlcli prep NAME`; None (columns: empty) if not given: the converter's default applies.

    source: a hub id, or a local folder or file. subset: a named part of the source (of a hub dataset, its
    configuration). task: which of a generator's tasks. difficulty, seed: of generated problems. count, test_count: rows
    to generate for the train and for the test split. kinds, cells, cell: of generated pictures, the kinds of question,
    the cells on a side, and the pixels on a cell's side. columns: our name of a column → its name in the source.
    verifier, data_source, ability: values for every row. instruction: text added to each question.
    """

    source: str | None = None
    subset: str | None = None
    task: str | None = None
    difficulty: int | None = None
    seed: int | None = None
    count: int | None = None
    test_count: int | None = None
    kinds: str | None = None
    cells: int | None = None
    cell: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    verifier: str | None = None
    data_source: str | None = None
    ability: str | None = None
    instruction: str | None = None


@dataclass(frozen=True)
class Converter:
    """Converts a dataset into prompts; the entry-point group `rlcli.data_prep` publishes it by name.

    summary: one line for `rlcli prep list`. source: where the rows come from (a hub id, or "generated"). verifier: the
    one that scores them. read: the raw rows of each split ("train", "test"), possibly lazy; it raises `DataError` for a
    source that cannot be read and `ConfigError` for an option out of bounds. prompt: one row's values as a `Prompt`
    with the id "" and the dataset's extra fields in `extra_info`; it raises `DataError` only about the values, or
    `BadImage` about its pictures, and the caller adds the row's position, its id, and `split` and `index` to
    `extra_info`. options: which fields of `ConvertOptions` it reads, name → help; `rlcli prep` refuses the others.
    reference: paper, licence, size. note: what `prompt` has changed in a row that its author may not expect, in words
    that follow "12 rows "; empty if nothing. The command counts the rows of each note.

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
    note: Callable[[Mapping[str, Any], ConvertOptions], str] = lambda row, options: ""
