"""The chat template for prompts: its variables and date are fixed, and it is checked before a run.

The configured variables and the day on which a run began become statements at the top of the template's text. So all
code that uses this tokenizer, in this process or another, renders the same, and the text identifies the rendering:
`apply_chat_template` needs no further argument.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING

from rlcli.data.prompts.template_choice import is_plain
from rlcli.errors import ConfigError, ModelError
from rlcli.images.row_images import content_parts
from rlcli.rewards import harmony
from rlcli.types import Prompt, VerifyRequest

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from transformers import PreTrainedTokenizerBase

Value = str | bool | int | float

DATE = "strftime_now"
"""The function by which a template reads the time."""
DIRECTIVES = (*"aAwdbBmyYHIMSpfzZjUWcxXGuVeDFTRCghkl", "-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", "-e")
ROLES_CHECKED = 1000
"""About this many prompts are checked for their roles: rendering shows what a template makes of each prompt, but not
whether it leaves a message out."""
PROBE = "probe{}of{}"
"""Text that no template contains: if it is missing, the template left the message out."""

_TEMPLATE_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>")


def fix(
    tokenizer: PreTrainedTokenizerBase,
    values: Mapping[str, Value],
    day: date | None,
    note: Callable[[str], None] = lambda text: None,
) -> PreTrainedTokenizerBase:
    """The tokenizer, with the template variables `values` set and midnight of `day` as the current time.

    A template without variables that reads no date (then `day` may be None) stays unchanged, character for
    character. note: called for each of `values` that has no effect. Raises `ConfigError` for a name that cannot be
    a template variable.
    """
    for name in values:
        if not name.isidentifier() or name in _taken():
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: a chat template variable cannot have this name",
                "give a variable that the model's chat template reads, such as enable_thinking",
            )
    for name in sorted(set(values) - reads(tokenizer)) if values else ():
        where = tokenizer.name_or_path or "the model"
        note(f"data.chat_template_kwargs.{name} has no effect: the chat template of {where} reads no such variable")
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        tokenizer.chat_template = {name: _fixed(text, values, day) for name, text in template.items()}
    else:
        tokenizer.chat_template = _fixed(template, values, day)
    return tokenizer


def reads(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The undeclared variables and functions of the tokenizer's template; none for a broken one, which `check`
    reports."""
    import jinja2
    from jinja2 import meta
    from jinja2.ext import Extension

    class Generation(Extension):
        """transformers' block around assistant messages."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.Environment(extensions=[Generation, "jinja2.ext.loopcontrols"], autoescape=False)
    template = tokenizer.chat_template
    variables: set[str] = set()
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            variables |= meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError:
            continue
    return variables


def asks_for_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the rendered text depends on the day. For a tokenizer whose template is not fixed yet."""
    return DATE in reads(tokenizer)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    *,
    what: str = "",
    opened: bool = True,
    tools: Sequence[Mapping[str, object]] = (),
) -> str:
    """A conversation as text, with the assistant's turn opened. what: its name in errors, such as "prompt sums:0".
    tools: JSON schemas of the functions that the assistant may call. Raises `ModelError` if the template is broken,
    fails or refuses."""
    import jinja2

    name, on_messages = tokenizer.name_or_path or "the model", f" {what}" if what else ""
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=opened
        )
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template of {name} is broken: {error}", "fix its chat_template.jinja or copy it again"
        ) from error
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the chat template of {name} refuses{on_messages}: {error}",
            "use roles that the template supports, or another model",
        ) from error
    except Exception as error:  # a template's calls may raise anything
        raise ModelError(
            f"the chat template of {name} fails{' on' if what else ''}{on_messages}: {type(error).__name__}: "
            f"{str(error)[:200]}",
            "fix its chat_template.jinja or copy it again",
        ) from error
    return text


def in_parts(prompt: Prompt) -> Sequence[Mapping[str, object]]:
    """The messages as chat templates of vision-language models read them: text and images in their order. Without
    images they stay text, in which `<image>` means nothing."""
    if not prompt.images:
        return prompt.messages
    return [{**message, "content": content_parts(message["content"])} for message in prompt.messages]


def check(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[str]:
    """Warnings about the template, tried on conversations with the roles of the prompts.

    Raises `ModelError` if it fails, renders nothing, leaves a system's or user's message out, or if a prompt would
    begin with two beginning-of-text tokens.
    """
    name = tokenizer.name_or_path or "the model"
    checked = range(0, len(prompts), 1 + len(prompts) // ROLES_CHECKED)  # of every dataset, if there are several
    role_sequences = dict.fromkeys(tuple(m["role"] for m in prompts[row].messages) for row in checked)
    closed = False
    for roles in role_sequences:
        messages = [{"role": role, "content": PROBE.format(n, len(roles))} for n, role in enumerate(roles)]
        text = render(tokenizer, messages, what=f"a conversation of {', '.join(roles)}")
        if not text.strip():
            raise ModelError(f"the chat template of {name} renders nothing", "put the model's own into its folder")
        for message in messages:
            if message["role"] in ("system", "user") and message["content"] not in text:
                raise ModelError(
                    f"the chat template of {name} leaves out the {message['role']}'s message, so that the model would "
                    "never see it",
                    "put the model's own chat_template.jinja into its folder, or take that message out of the prompts",
                )
        _check_begin(tokenizer, text, name)
        closed |= text == render(tokenizer, messages, opened=False)
    if is_plain(tokenizer):  # which has no turns
        return []
    notes = [f"the chat template of {name} opens no assistant turn: the model may continue the user's"] * closed
    if role_sequences and end_of_turn(tokenizer) is None:
        notes.append(
            f"no token closes a turn in the chat template of {name}: a response that does not end at "
            f"{tokenizer.eos_token} may continue with an invented turn (rollout.stop_token_ids adds further ones)"
        )
    return notes


def check_family(tokenizer: PreTrainedTokenizerBase, path: str, kind: str) -> list[str]:
    """Notes on a template that seems to be another family's: it writes a marker that the tokenizer divides into several
    tokens. (Some published models, as Zephyr, are trained so.) kind: the `model_type`. Raises `ModelError` for a
    `gpt_oss` model whose template does not write harmony's format."""
    question = {"role": "user", "content": "1+1?"}
    try:
        text = render(
            tokenizer, [question, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
        )
    except ModelError:  # it does not support assistant messages, or a second question
        text = render(tokenizer, [question])
    vocabulary = tokenizer.get_vocab()
    if kind == "gpt_oss" and not (harmony.speaks(vocabulary) and harmony.MARKERS[0] in text):
        raise ModelError(
            f"{path}: gpt_oss answers in harmony's channels, and the chat template writes no {harmony.MARKERS[0]}: it "
            "is that of another family",
            "use the chat template that these weights came with",
        )
    divided = [marker for marker in dict.fromkeys(_TEMPLATE_MARKER.findall(text)) if marker not in vocabulary]
    if not divided:
        return []
    return [
        f"the chat template writes {', '.join(divided)}, which the tokenizer divides into several tokens: if these "
        "weights came with another template, use that (model.chat_template)"
    ]


def opens_thinking(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the generation prompt ends within a <think>."""
    question = [{"role": "user", "content": PROBE.format(0, 0)}]
    _, _, opening = render(tokenizer, question).rpartition(question[0]["content"])
    return VerifyRequest(opening, "").answer_text() is None


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the token by which the template closes an assistant's message; None if it closes it by plain text.

    For a template that writes nothing after the message (GLM) it is the token that opens the next turn.
    """
    exchange = [{"role": "user", "content": PROBE.format(0, 2)}, {"role": "assistant", "content": PROBE.format(1, 2)}]
    question = {"role": "user", "content": PROBE.format(2, 2)}
    for messages in (exchange, [*exchange, question]):
        try:
            text = render(tokenizer, messages, opened=False)
        except ModelError:  # it does not support assistant messages, or a second question
            continue
        _, content, tail = text.rpartition(exchange[1]["content"])
        tail = tail.partition(question["content"])[0]
        if content and tail.strip():
            return _first_marker(tokenizer, tail)
    return None


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Pattern of the control tokens: special ones, and added ones that the chat template writes. In the text of a
    message they are tokenized as control tokens too."""
    template = str(tokenizer.chat_template)
    return any_of(
        [
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if len(token.content.strip()) > 1 and (token.special or token.content in template)
        ]
    )


def any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """Pattern that matches each of these texts, the longest first; None if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if texts else None


def stop_tokens(tokenizer: PreTrainedTokenizerBase, path: str, extra_ids: Sequence[int]) -> dict[int, str]:
    """Every id that ends a response → its text, ascending: the tokenizer's end of sequence, those of the generation
    config, the token that closes a turn of the chat template, and `rollout.stop_token_ids` (`extra_ids`). Raises
    `ConfigError` for an id in `extra_ids` that the tokenizer does not have."""
    from transformers import GenerationConfig

    for token in extra_ids:
        if not 0 <= token < len(tokenizer):
            raise ConfigError(
                f"rollout.stop_token_ids: there is no token {token}, the tokenizer of {path} has ids up to "
                f"{len(tokenizer) - 1}",
                "give ids of its tokens",
            )
    ids = [tokenizer.eos_token_id, end_of_turn(tokenizer), *extra_ids]
    with contextlib.suppress(OSError):  # Without a generation config, the tokenizer's end of sequence applies.
        stop = GenerationConfig.from_pretrained(path).eos_token_id
        ids += stop if isinstance(stop, list) else [stop]
    ids = sorted({token for token in ids if token is not None})
    return {token: str(tokenizer.convert_ids_to_tokens(token) or f"token {token}") for token in ids}


def _first_marker(tokenizer: PreTrainedTokenizerBase, tail: str) -> int | None:
    """The first token of `tail` after white space, if it is a marker and not the beginning of plain text."""
    added = tokenizer.added_tokens_decoder
    for token in tokenizer(tail, add_special_tokens=False)["input_ids"]:
        if token in added:
            return int(token)
        if tokenizer.decode([token]).strip():
            return None
    return None


def _check_begin(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> None:
    begin = tokenizer.bos_token_id
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if begin is not None and ids[:2] == [begin, begin]:
        raise ModelError(
            f"prompts of {name} would begin with {tokenizer.bos_token} twice",
            "remove it from its chat template or from its tokenizer's settings",
        )


def _fixed(template: str, values: Mapping[str, Value], day: date | None) -> str:
    literals = {name: json.dumps(value, ensure_ascii=False) for name, value in sorted(values.items())}
    statements = [f"{{% set {name} = {literal} %}}" for name, literal in literals.items()]
    if day is not None and re.search(rf"\b{DATE}\b", template):
        statements.append(_clock(day))
    return "".join(statements) + "\n" + template if statements else template  # its first line must start a line


def _clock(day: date) -> str:
    """`strftime_now` of midnight of that day, as a macro: each directive is replaced by its value."""
    moment = datetime(day.year, day.month, day.day)
    replaced = [("%%", "\\u0000"), *((f"%{d}", moment.strftime(f"%{d}")) for d in DIRECTIVES), ("\\u0000", "%")]
    filters = "".join(f' | replace("{old}", "{new}")' for old, new in replaced)
    return f"{{% macro {DATE}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}"


def _taken() -> set[str]:
    """Names with a meaning for the code that renders a template."""
    from transformers import PreTrainedTokenizerBase

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return {*parameters, "messages", "raise_exception", DATE}
