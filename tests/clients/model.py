"""A tiny random model that reads pictures, with a long context, and the two chat templates it is served with."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer

from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.models.families import config_of, random_model
from tests.cpu.server.vision_model import PREPROCESSOR

TEMPLATES: Mapping[str, Path | None] = {"lenient": None, "strict": Path(__file__).parent / "strict.jinja"}
"""The demo model's template, and one of our own that refuses what Qwen3.5's refuses, and takes pictures as it does."""
MAX_MODEL_LEN = 131_072
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PICTURE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def save_long_model(folder: Path) -> Path:
    """Write a random model with the demo model's tokenizer and tags of reasoning, calls and pictures."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIRECTORY)
    tokenizer.add_tokens(list(TAGS))
    tokenizer.add_special_tokens({"additional_special_tokens": list(PICTURE_TOKENS)})
    config = copy.deepcopy(config_of("qwen3_5-vision"))
    text = config.get_text_config()
    text.vocab_size, text.max_position_embeddings = len(tokenizer), MAX_MODEL_LEN
    text.eos_token_id = tokenizer.eos_token_id
    start, image, end = map(tokenizer.convert_tokens_to_ids, PICTURE_TOKENS)
    config.vision_start_token_id, config.image_token_id, config.vision_end_token_id = start, image, end
    random_model(config, 1).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    tokenizer.save_pretrained(folder)
    return folder


def template_flags(name: str) -> list[str]:
    """Return the flags that serve the model with a template."""
    file = TEMPLATES[name]
    return [] if file is None else ["--chat-template", str(file)]
