"""The chat template of tiny models that call tools."""

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
