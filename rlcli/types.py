"""The data types of a run. Imports only the standard library.

A parquet row becomes a `Prompt`; each of its trajectories becomes a `Sample` whose tokens stay where they were
generated; a verifier turns a `VerifyRequest` into a `Verdict`.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

Message = Mapping[str, str]
"""One chat message: `{"role": "user", "content": "What is 2+2?"}`."""
IMAGE = "<image>"
"""Marks the place of an image in a message's text; markers and the prompt's images have the same order."""
FinishReason = Literal["stop", "length"]
Ended = Literal["done", "turns", "turn_tokens", "response_tokens", "tokens", "tool_calls", "seconds", "failed"]
"""Why a conversation ended: its environment was done, a limit was reached, or the environment failed twice.
turn_tokens: a turn was cut off, and is not continued. tokens: what the environment wrote, or another turn, has no
room."""
ENDED: tuple[Ended | None, ...] = (None, *get_args(Ended))
"""The values that `Sample.ended` indexes; None: it was no conversation."""


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
    """Identifies the row: data source, split and row number."""
    messages: tuple[Message, ...]
    """Chat messages, before the chat template."""
    data_source: str
    """Name of the dataset, such as its hub id."""
    ability: str
    """Kind of task, such as `math`."""
    verifier: str
    """Verifier expression that scores responses."""
    ground_truth: str
    """Reference answer."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the row."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Encoded images (PNG, JPEG, …), one for each `IMAGE` marker in the messages, in that order. Without any, such a
    marker is plain text."""

    def content(self) -> bytes:
        """Input of a fingerprint of the prompt. It is short: images are replaced by their digests."""
        return "".join((repr(self), *self.image_digests())).encode(errors="surrogatepass")

    def problem(self, *, with_extra_info: bool = False) -> str:
        """32 hexadecimal digits, equal for rows that pose the same problem: equal messages, images, ground truth and
        verifier. In an evaluation, responses to such rows are samples of one prompt.

        with_extra_info: `extra_info` must be equal too, except the row's `index` and `split`: an environment may read
        its task there.
        """
        messages = [sorted(message.items()) for message in self.messages]
        extra = sorted((name, value) for name, value in self.extra_info.items() if name not in ("index", "split"))
        parts = (messages, self.image_digests(), self.ground_truth, self.verifier, extra if with_extra_info else ())
        return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def image_digests(self) -> tuple[str, ...]:
        """Hexadecimal digest of each image: equal for equal bytes."""
        return tuple(map(image_digest, self.images))

    def request(self, completion: str = "", finish_reason: FinishReason | Literal[""] = "") -> VerifyRequest:
        """The input of a verifier for a response to this prompt."""
        return VerifyRequest(
            completion,
            self.ground_truth,
            self.messages,
            self.data_source,
            self.extra_info,
            finish_reason=finish_reason,
        )


def image_digest(image: bytes) -> str:
    """32 hexadecimal digits of an encoded image."""
    return hashlib.blake2b(image, digest_size=16).hexdigest()


class Outcome(StrEnum):
    """Outcome of a verification.

    Outcomes in `UNVERIFIED` say nothing about the response: such samples are not part of a loss or of a group's
    statistics. If a verifier raises or its process ends, that is reported after a second try in a fresh process.
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

OTHER_RESPONSES = "other_responses"
"""Option of a verifier that compares responses: the number of `VerifyRequest.other_responses` that it gets."""
OLD_OTHER_RESPONSES = "rivals"
"""The old name of the option and of the field, read for one release."""


def is_reward(part: str) -> bool:
    """True if a part of a verdict, by its name, is part of a reward.

    >>> is_reward("format"), is_reward("usage/calls"), is_reward("log/length")
    (True, False, False)
    """
    return not part.startswith((USAGE, LOGGED))


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """The input of a verifier: one response and the fields of its row."""

    completion: str
    """Text of the response; in a conversation with an environment, the policy's last turn."""
    ground_truth: str
    """Reference answer of the row."""
    prompt: tuple[Message, ...] = ()
    """Messages of the prompt."""
    data_source: str = ""
    """Name of the dataset."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the row."""
    completion_ids: Sequence[int] = ()
    """Token ids of the response, the end included; empty if unknown (a file of texts, a served model)."""
    finish_reason: FinishReason | Literal[""] = ""
    """Why the response ended: "stop" (the model ended it) or "length" (it was cut off at the limit); empty if
    unknown."""
    thinking: bool = False
    """True if the prompt ends within a <think> that its chat template opened."""
    conversation: Sequence[Mapping[str, Any]] = ()
    """All messages of a conversation, the prompt's included; empty for a single response."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Report of the environment: `rewards` (of each step), `ended` (see `Ended`) and `info` (of the last step)."""
    other_responses: Sequence[str] = ()
    """Texts of other responses of its group, for a verifier that compares them (its option `other_responses`: how
    many)."""
    step: int = 0
    """Training step, from 1, in which the response was generated; 0 where that is unknown, as for verifiers that get
    responses one by one."""
    steps: int = 0
    """Training steps of the run; 0 if unknown."""

    if not TYPE_CHECKING:  # a type checker still refuses such names

        def __getattr__(self, name: str) -> Any:
            if name == OLD_OTHER_RESPONSES:
                text = f"VerifyRequest.{name} is now called {OTHER_RESPONSES}; the next release refuses the old name"
                warnings.warn(text, FutureWarning, stacklevel=2)
                return self.other_responses
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
    """Return whether a `<think>` is open at the end of `text`, and the index of the text after the reasoning, in time
    linear in the text's length. is_open: whether one is open at its start."""
    depth, start, at, opened, endless = int(is_open), 0, 0, 0, set[str]()
    while match := (_THINK if depth else _OUTSIDE).search(text, at):
        at = match.end()
        if match[0] == "<think>":
            depth += not (depth and not text[opened : match.start()].strip())
            opened = at
        elif match[0] == "</think>":
            depth, start = max(depth - 1, 0), at
        elif (mark := match.groupdict().get("fence")) and mark not in endless:
            line_end = text.find("\n", at)
            end = _FENCE_ENDS[mark].search(text, line_end) if line_end >= 0 else None
            at = end.end() if end else at
            endless |= set() if end else {mark}
    return depth > 0, start


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result for one response.

    >>> Verdict(score=1.0, outcome=Outcome.OK, answer="42").outcome.value
    'ok'
    """

    score: float
    """The reward, usually 0 or 1."""
    outcome: Outcome
    """Outcome of the verification."""
    answer: str | None = None
    """The answer that it read, as text."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named rewards that make up the score, each with a separate metric. Names that begin with `USAGE` are costs
    instead, summed over a step; names that begin with `LOGGED` are only metrics."""
    detail: str = ""
    """The reason, for a reader; for a crash, the exception."""
    latency_s: float = 0.0
    """Seconds of the verification, filled in by the pool."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further columns of the response's row in the table of samples."""


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
    """One trajectory, without its tokens, which are row `row` of shard `shard`.

    >>> Sample(0, 1, 0, 5, prompt_tokens=9, response_tokens=4, stop_reason="stop",
    ...        verdict=Verdict(1.0, Outcome.OK), version=3).tokens
    13
    """

    prompt: int
    """Index of its prompt (its group) in the step."""
    sample: int
    """Index within the group."""
    shard: int
    """Index of the shard with its tokens."""
    row: int
    """Row of that shard."""
    prompt_tokens: int
    """Tokens before the first response token."""
    response_tokens: int
    """Response tokens, the end-of-text token included."""
    stop_reason: FinishReason
    """Why the response ended."""
    verdict: Verdict
    """Result of its verification."""
    version: int
    """Policy version (number of weight syncs) that generated the first response token."""
    seed: int = 0
    """Seed of its sampling."""
    signature: int = 0
    """Signature of its tokens, log-probs and score (`rlcli.data.signature`); 0: not signed."""
    context_tokens: int = 0
    """Tokens after the prompt that are no response tokens."""
    turns: int = 1
    """Turns of the policy."""
    newer_by: int = 0
    """Weight syncs between its first and its last response token."""
    ended: int = 0
    """Why a conversation ended, as an index into `ENDED`."""
    tool_calls: int = 0
    """Tool calls of the policy."""
    failed_calls: int = 0
    """Tool calls that could not be parsed or that failed."""
    branches: int = 1
    """Token sequences that it consists of."""
    saved_step: int = 0
    """Step in whose files its row is saved; 0: unknown, from an older checkpoint."""
    saved_group: int = 0
    """Number of its group among those that this step generated."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of its turns by the environment."""
    turn_states: tuple[int, ...] = ()
    """Hash of what the environment had written before each turn."""
    version_tokens: tuple[int, ...] = ()
    """Response tokens of each policy version, from `version` on; empty if a single version generated all."""

    @property
    def tokens(self) -> int:
        """All tokens of the trajectory."""
        return self.prompt_tokens + self.response_tokens + self.context_tokens


@dataclass(frozen=True, slots=True)
class RawRow:
    """One raw row of a source."""

    values: Mapping[str, Any]
    """Column → value."""
    where: str
    """File and position, for messages ("train.jsonl.gz, line 17")."""
    origin: str = ""
    """Source of all rows of that file, for the record: the file's path, or hub id and revision
    ("openai/gsm8k@740312add88f"); empty for generated rows."""
    problem: str = ""
    """Why it has no values, such as a line that is not JSON; such a row ends the conversion or is skipped, as the user
    chooses."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of `rlcli prep NAME`; None (columns: empty) if not given: the converter's default applies."""

    source: str | None = None
    """A hub id, or a local folder or file."""
    subset: str | None = None
    """A named part of the source; of a hub dataset, its configuration."""
    task: str | None = None
    """Name of a generator's task."""
    difficulty: int | None = None
    """Difficulty of generated problems."""
    seed: int | None = None
    """Seed of generated problems."""
    count: int | None = None
    """Rows to generate for the train split."""
    test_count: int | None = None
    """Rows to generate for the test split."""
    kinds: str | None = None
    """Kinds of question about generated images."""
    cells: int | None = None
    """Cells on a side of a generated image."""
    cell: int | None = None
    """Pixels on a cell's side."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name of a column → its name in the source."""
    verifier: str | None = None
    """Verifier of every row."""
    data_source: str | None = None
    """Data source of every row."""
    ability: str | None = None
    """Ability of every row."""
    instruction: str | None = None
    """Text added to each question."""


@dataclass(frozen=True)
class Converter:
    """Converts a dataset into prompts; the entry-point group `rlcli.data_prep` publishes it by name.

    def read(options: ConvertOptions) -> dict[str, list[RawRow]]:
        return {"train": [RawRow({"country": "France", "city": "Paris"}, "row 0")]}

    def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
        question = {"role": "user", "content": f"The capital of {row['country']}?"}
        return Prompt("", (question,), "capitals", "geography", "exact", row["city"])

    CONVERTER = Converter("capitals", "Capitals of the world", "generated", "exact", read, prompt)
    """

    name: str
    """Name of the command: `rlcli prep NAME`."""
    summary: str
    """One line for `rlcli prep list`."""
    source: str
    """Origin of the rows: a hub id, or "generated"."""
    verifier: str
    """Verifier that scores responses to the rows."""
    read: Callable[[ConvertOptions], Mapping[str, Iterable[RawRow]]]
    """Returns the raw rows of each split ("train", "test"), possibly lazy. Raises `DataError` for a source that cannot
    be read and `ConfigError` for an option out of bounds."""
    prompt: Callable[[Mapping[str, Any], ConvertOptions], Prompt]
    """Returns one row's values as a `Prompt` with the id "" and the dataset's extra fields in `extra_info`. Raises
    `DataError` only about the values, or `BadImage` about its images. The caller adds the row's position, its id, and
    `split` and `index` to `extra_info`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Fields of `ConvertOptions` that it reads, name → help; `rlcli prep` refuses the others."""
    reference: str = ""
    """Paper, licence, size."""
    note: Callable[[Mapping[str, Any], ConvertOptions], str] = lambda row, options: ""
    """Returns what `prompt` has changed in a row that its author may not expect, in words that follow "12 rows "; empty
    if nothing. The command counts the rows of each note."""
