"""Chat templates with the peculiarities of the families', in our own words, and tokenizers for them."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from tests.cpu.engine.tokenizers import byte_tokenizer

CHATML = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Family:
    """A family's template and special tokens."""

    template: str
    specials: tuple[str, ...]
    end: str
    """The token that ends an answer."""
    thought: str = ""
    """What an answer begins with, after the prompt."""
    has_system: bool = True
    has_tools: bool = True

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.specials)})
        tokenizer.bos_token = self.specials[-1]
        tokenizer.chat_template = self.template
        return tokenizer


def _lines(*lines: str) -> str:
    return "".join(lines)


FAMILIES = {
    # The opening holds <think>; earlier answers have an empty thought in its place.
    "nemotron 3": Family(
        _lines(
            "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}",
            "{{- '<|im_start|>system\\n' + system }}",
            "{%- if tools %}{{ '\\n# Tools\\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}",
            "{{- '<|im_end|>\\n' }}",
            "{%- for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' }}",
            "{%- if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}",
            "{{- m.content + '<|im_end|>\\n' }}{% endfor %}",
            "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
        ),
        (*CHATML, "<s>"),
        "<|im_end|>",
        "So it is.\n</think>\n",
    ),
    # A token for each role, tools in a turn before the system prompt, and a system prompt where none is given.
    "kimi": Family(
        _lines(
            "{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}",
            "{%- if messages[0].role != 'system' %}",
            "{{ '<|im_system|>system<|im_middle|>You are there to help, briefly.<|im_end|>' }}{% endif %}",
            "{%- for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}",
            "{{- m.content + '<|im_end|>' }}{%- endfor %}",
            "{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
        ),
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "[BOS]"),
        "<|im_end|>",
    ),
    # Roles between tokens, which do not end turns; a system prompt where none is given.
    "granite 4": Family(
        _lines(
            "{%- set first = messages[0].content if messages[0].role == 'system' else 'You are there to help.' %}",
            "{{- '<|start_of_role|>system<|end_of_role|>' + first }}",
            "{%- if tools %}{{ '\\n<tools>' + tools | tojson + '</tools>' }}{% endif %}{{ '<|end_of_text|>\\n' }}",
            "{%- for m in messages if m.role != 'system' %}",
            "{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}{% endfor %}",
            "{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
        ),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>",
    ),
    # BOS in the template; the thoughts of all answers but the last are dropped, one turn late.
    "lfm2": Family(
        _lines(
            "{{- bos_token }}{%- set ns = namespace(system='', last=-1) %}",
            "{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}",
            "{%- set messages = messages[1:] %}{% endif %}",
            "{%- if tools %}{% set ns.system = ns.system + '\\nList of tools: [' + tools | tojson + ']' %}{% endif %}",
            "{%- if ns.system %}{{ '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' }}{% endif %}",
            "{%- for m in messages if m.role == 'assistant' %}{% set ns.last = loop.index %}{% endfor %}",
            "{%- set count = namespace(n=0) %}",
            "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}",
            "{%- if m.role == 'assistant' %}{% set count.n = count.n + 1 %}{% endif %}",
            "{%- if m.role == 'assistant' and count.n != ns.last %}{{ m.content.split('</think>')[-1] | trim }}",
            "{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}",
            "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ),
        (*CHATML, "<|startoftext|>"),
        "<|im_end|>",
        "<think>So it is, and was.</think>",
    ),
    # No system prompt, no tools, roles must alternate, contents are trimmed.
    "recurrent gemma": Family(
        _lines(
            "{{- bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
            "{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}",
            "{{- raise_exception('roles must alternate') }}{% endif %}",
            "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}",
            "{{- m.content | trim + '<end_of_turn>\\n' }}{% endfor %}",
            "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        ),
        ("<start_of_turn>", "<end_of_turn>", "<bos>"),
        "<end_of_turn>",
        has_system=False,
        has_tools=False,
    ),
    # The system prompt and the tools stand in the first user's turn.
    "merged": Family(
        _lines(
            "{{- bos_token }}{% set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}",
            "{%- if tools %}{% set system = system + 'Tools: ' + tools | tojson + '\\n\\n' %}{% endif %}",
            "{%- for m in messages if m.role != 'system' %}",
            "{%- if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}",
            "{%- else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        ),
        ("[INST]", "[/INST]", "</s>", "<s>"),
        "</s>",
    ),
    # Tools in a second system turn.
    "minimax": Family(
        _lines(
            "{%- if messages[0].role == 'system' %}{{ '<|begin|>system ai_setting=it\\n' + messages[0].content }}",
            "{{- '<|end|>\\n' }}{% endif %}",
            "{%- if tools %}{{ '<|begin|>system tool_setting=tools\\nThese are there:\\n' + tools | tojson }}",
            "{{- '<|end|>\\n' }}{% endif %}{% for m in messages if m.role != 'system' %}",
            "{{- '<|begin|>' + m.role + ' name=' + m.role + '\\n' + m.content + '<|end|>\\n' }}{% endfor %}",
            "{%- if add_generation_prompt %}{{ '<|begin|>assistant name=assistant\\n' }}{% endif %}",
        ),
        ("<|begin|>", "<|end|>", "<|document|>"),
        "<|end|>",
    ),
    # Tools stand before the last question, wherever that is.
    "tools last": Family(
        _lines(
            "{{- bos_token }}{% for m in messages if m.role != 'system' %}",
            "{%- if loop.last and tools %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}",
            "{%- if m.role == 'user' %}{{ '[INST]' }}",
            "{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}",
            "{{- m.content + '[/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        ),
        ("[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "</s>", "<s>"),
        "</s>",
    ),
    # A system prompt where none is given, functions at its end; the opening holds <think>, history does not.
    "olmo": Family(
        _lines(
            "{%- set first = messages[0].content if messages[0].role == 'system' else 'You are there to help.' %}",
            "{{- '<|im_start|>system\\n' + first + ' <functions>' + (tools | tojson if tools else '') }}",
            "{{- '</functions><|im_end|>\\n' }}{% for m in messages if m.role != 'system' %}",
            "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}",
            "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}",
        ),
        (*CHATML, "<|endoftext|>"),
        "<|im_end|>",
        "So it is.</think>",
    ),
    # One token begins every turn, another names its role.
    "jamba": Family(
        _lines(
            "{{- bos_token }}{% for m in messages %}{{ '<|bom|><|' + m.role + '|> ' + m.content }}",
            "{%- if loop.first and tools %}{{ '\\n# Tools\\n' + tools | tojson }}{% endif %}{{ '<|eom|>' }}",
            "{%- endfor %}{% if add_generation_prompt %}{{ '<|bom|><|assistant|> ' }}{% endif %}",
        ),
        ("<|bom|>", "<|eom|>", "<|system|>", "<|user|>", "<|assistant|>", "<|startoftext|>"),
        "<|eom|>",
    ),
}
