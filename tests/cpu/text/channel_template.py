"""A chat template of channels with the structure of gpt-oss's, in our own words, and a tokenizer for it."""

from typing import Final

from transformers import PreTrainedTokenizerFast

from strandline.text.channels import TAGS
from tests.cpu.engine.tokenizers import byte_tokenizer

TEMPLATE: Final = (
    # The system turn is the template's own; a system or developer message is the developer's turn, which has the tools.
    "{{- '<|start|>system<|message|>' + (model_identity or 'You help.') + '\\nReasoning: ' }}"
    "{{- (reasoning_effort or 'medium') + '\\nChannels: analysis, commentary, final.' }}"
    "{%- if tools %}{{ '\\nFunctions are called in commentary.' }}{% endif %}{{ '<|end|>' }}"
    "{%- set leads = messages[0].role in ('system', 'developer') %}"
    "{%- set instructions = messages[0].content if leads else '' %}"
    "{%- set turns = messages[1:] if leads else messages %}"
    "{%- if instructions or tools %}{{ '<|start|>developer<|message|>' }}"
    "{%- if instructions %}{{ '# Instructions\\n\\n' + instructions + '\\n\\n' }}{% endif %}"
    "{%- if tools %}{{ '# Tools\\n\\nnamespace functions {\\n' }}{% for t in tools %}"
    "{{- 'type ' + t.function.name + ' = (_: ' + t.function.parameters | tojson + ') => any;\\n' }}{% endfor %}"
    "{{- '} // namespace functions' }}{% endif %}{{ '<|end|>' }}{% endif %}"
    "{%- set called = namespace(name=none) %}"
    "{%- for m in turns %}{% if m.role == 'assistant' %}"
    # Contents with tags are refused.
    "{%- for field in ('content', 'thinking') if '<|channel|>' in (m[field] or '') %}"
    "{{- raise_exception('channels stand in ' + field) }}{% endfor %}"
    "{%- if 'tool_calls' in m %}"
    # Thoughts before a call are dropped once an answer without calls follows. One call of a message is rendered.
    "{%- set later = namespace(answer=false) %}"
    "{%- for other in turns[loop.index:] if other.role == 'assistant' and 'tool_calls' not in other %}"
    "{%- set later.answer = true %}{% endfor %}"
    "{%- if m.content and m.thinking %}{{ raise_exception('either content or thinking before a call') }}{% endif %}"
    "{%- set thought = m.content or m.thinking %}"
    "{%- if thought and not later.answer %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}{% set called.name = call.name %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson + '<|call|>' }}"
    "{%- elif loop.last and not add_generation_prompt %}"
    "{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- set called.name = none %}{% endif %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if called.name is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- m.content | tojson + '<|end|>' }}"
    "{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""Whitespace and sentences are ours. Messages of roles that it does not know are left out."""


def channel_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of bytes with the tags of channels as control tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = TEMPLATE
    return tokenizer
