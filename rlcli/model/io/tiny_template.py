"""The chat templates of tiny models that call tools, and of those that speak harmony."""

from rlcli.rewards.harmony import MARKERS

TOOL_TEMPLATE = """\
{%- for tool in tools or [] -%}
{{- '<|system|>' if loop.first else ' ' -}}
{{- tool.function.name ~ '(' ~ tool.function.parameters.properties | join(', ') ~ ')' -}}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|' ~ message.role ~ '|>' ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</tool_call>' -}}
{%- endfor -%}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
"""It shows the tools' names and parameters, and has calls in the format of Hermes and Qwen2.5."""
TOOL_MARKERS = ("<|tool|>", "<tool_call>", "</tool_call>")
"""Its markers beside those of the roles of every tiny model."""

HARMONY_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|start|>' ~ message['role'] -}}
{%- if message['role'] == 'assistant' -%}
{{- '<|channel|>final<|message|>' ~ message['content'] -}}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
{%- else -%}{{- '<|message|>' ~ message['content'] ~ '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""
"""As GPT-OSS's (`rlcli.rewards.harmony`), without the system's text."""
HARMONY_MARKERS = MARKERS
"""Its markers beside those of the roles of every tiny model."""
