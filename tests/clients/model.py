"""A tiny random model with a long context, and the two chat templates it is served with."""

from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer

from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.engine.tiny import save_tiny_model

TEMPLATES: Mapping[str, Path | None] = {"lenient": None, "strict": Path(__file__).parent / "strict.jinja"}
"""The demo model's template, and one of our own that refuses what Qwen3.5's refuses."""
MAX_MODEL_LEN = 131_072
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def save_long_model(folder: Path) -> Path:
    """Write a random model with the demo model's tokenizer, to which the tags of reasoning and calls are added."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIRECTORY)
    tokenizer.add_tokens(list(TAGS))
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": MAX_MODEL_LEN}
    save_tiny_model(folder, **sizes, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    return folder


def template_flags(name: str) -> list[str]:
    """Return the flags that serve the model with a template."""
    file = TEMPLATES[name]
    return [] if file is None else ["--chat-template", str(file)]
