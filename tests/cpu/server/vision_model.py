"""A tiny random model that reads pictures, with a tokenizer of bytes and a chat template that takes them."""

import base64
import copy
import json
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerFast

from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.models.families import config_of, random_model
from tests.cpu.pictures.files import encoded

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
START, PAD, END = 258, 259, 260
SIDE = 8
"""Pixels of a token's side."""
PREPROCESSOR: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * SIDE**2, "longest_edge": 400 * SIDE**2},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
TEMPLATE = """
{%- macro shown(content, may_have_pictures) %}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}
{%- if 'image' in part or 'image_url' in part or part.type == 'image' %}
{%- if not may_have_pictures %}{{ raise_exception('System message cannot contain images.') }}{% endif %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{ part.text }}{% else %}{{ raise_exception('Unexpected item type in content.') }}{% endif %}
{%- endfor %}{% endif %}{% endmacro %}
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for t in tools %}{{ t | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{{- '<tool_response>\\n' if m.role == 'tool' else '' }}{{ shown(m.content, m.role != 'system') }}
{{- '\\n</tool_response>' if m.role == 'tool' else '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_vision_model(directory: Path) -> Path:
    """Write the model."""
    config = copy.deepcopy(config_of("qwen3_5-vision"))
    text = config.get_text_config()
    text.vocab_size, text.max_position_embeddings, text.eos_token_id = 256 + len(SPECIALS), 4096, 257
    config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = PAD, START, END
    random_model(config, 1).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    vision_tokenizer().save_pretrained(directory)
    return directory


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    """Return a picture as a URL."""
    return f"data:image/{kind.lower()};base64," + base64.b64encode(encoded(image, kind)).decode()
