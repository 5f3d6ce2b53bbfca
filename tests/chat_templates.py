"""Small chat templates of the kinds that models have, each written for these tests, and tokenizers that use them."""

from __future__ import annotations

from typing import Any

CHATML = r"""{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
"""Qwen's kind: every turn is closed, a newline follows, and thinking can be turned off."""

DATED = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- '<|start|>system\nToday: ' + date_string + '\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{%- endif %}"""
"""Llama 3.2's kind: the date stands in the system's turn."""

BY_OPENER = r"""{%- for message in messages %}{{- '<|' + message.role + '|>\n' + message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""
"""GLM's kind: nothing closes a turn but what opens the next one."""

BY_TEXT = r"""{%- for message in messages %}{{- message.role + ': ' + message.content + '\n###\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""

BY_EOS = r"""{%- for message in messages %}
{{- '[' + message.role + '] ' + message.content + (' ' + eos_token if message.role == 'assistant' else '') }}
{%- endfor %}"""
"""Llama 2's kind: a space, then the end of sequence; and no turn is opened."""

TWO_ENDS = r"""{%- for message in messages %}
{{- '<|start|>' + message.role + '<|message|>' + message.content }}
{{- '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""gpt-oss's kind: the last message of the assistant ends otherwise than those of the past."""

THINKING = r"""{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content.split('</think>')[-1] }}
{{- eos_token if message.role == 'assistant' else '' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}"""
"""DeepSeek-R1's kind: the prompt opens the reasoning, and the past loses it."""

HERMES = r"""{%- if tools %}
    {{- '<|im_start|>system\nTools:\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- 'Call one: <tool_call>{"name": name, "arguments": {}}</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'user' if message.role == 'tool' else message.role %}
    {{- '<|im_start|>' + role + '\n' }}
    {{- '<tool_response>' + message.content + '</tool_response>' if message.role == 'tool' else message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Qwen's and Hermes's kind, with tools."""

MARKERS = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|eot|>", "<|message|>", "<|end|>", "<|return|>")


def tokenizer_with(template: str, bos: str | None = None) -> Any:
    """The tiny tokenizer, whose end of sequence is <eos>, with a chat template and the markers of all of these."""
    from rlcli.model.io.tiny_model import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(MARKERS), special_tokens=True)
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.chat_template = template
    return tokenizer


def bpe_tokenizer_with(template: str, *, by_words: bool = True) -> Any:
    """A byte-level BPE with merges, and all markers. by_words: it merges within a word or a run of white space, as
    models' tokenizers do; else any bytes, so that a token may begin in a message and end behind it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["assistant\nthe sum is 42\n\nuser\n42 is the sum; x = 1;\n" * 4, template], trainer)
    tokenizer.add_special_tokens([*MARKERS, "<|user|>", "<|assistant|>", "<eos>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>", chat_template=template
    )
