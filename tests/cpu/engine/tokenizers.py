"""Tokenizers made on the spot: one of printable ASCII characters, one of bytes."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<end>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 95 printable characters (ids 0–94, in ASCII order), ``<end>`` (95) and ``<unk>`` (96)."""
    vocab = {chr(code): code - 32 for code in range(32, 127)} | {EOS: 95, "<unk>": 96}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are single bytes, so that most characters beyond ASCII span several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


CHAT_SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_VOCAB_SIZE = 256 + len(CHAT_SPECIALS)
CALLS_IN_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
CALLS_IN_XML = (
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n"
)


def chat_template(calls: str, *, thinks: bool) -> str:
    """Return a template with turns, tools and reasoning; the reasoning of answers before the last question is dropped.

    Args:
        calls: how a call ``c`` is written.
        thinks: the prompt opens the reasoning, unless ``enable_thinking`` is false, and names the effort.
    """
    opening = "{% if reasoning_effort %}{{ '[' + reasoning_effort + ']' }}{% endif %}{{ '<think>\\n' }}"
    opening += "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}"
    return (
        "{%- set ns = namespace(last=0) %}"
        "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}"
        "{%- for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}"
        "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ '<|im_end|>\\n' }}"
        "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
        "{%- endif %}"
        "{%- for m in messages if m.role != 'system' %}"
        "{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.reasoning_content and loop.index0 >= ns.last - 1 %}"
        "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
        "{{- m.content }}"
        "{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}" + calls + "{{ '</tool_call>' }}{% endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}" + (opening if thinks else "") + "{%- endif %}"
    )


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of bytes with the special tokens of conversations; ``<|im_end|>`` ends."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHAT_SPECIALS[:2])})
    tokenizer.add_tokens(list(CHAT_SPECIALS[2:]))
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer
