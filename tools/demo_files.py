"""The demo model's files: the tokenizer, the chat template, the configuration and the safetensors shards.

The chat template is prefix-stable: it copies every message as it is, between special tokens that no text can merge
with, so the rendering of a longer conversation begins with the tokens of the shorter one and its reply.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from demo_network import DemoModel, Shape
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
MAX_POSITIONS = 8192
SHARD_BYTES = 12 * 2**20

# Every digit and every run of spaces before it is a token of its own, so that a number looks the same everywhere.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The model was trained on plain turns. Tools are rendered as Qwen's templates render them, so that clients which send
# tools can be tried; the model has not learned to call them.
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\n' -}}"
    "{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\\n\\n' -}}{%- endif -%}"
    "{{- '# Tools\\n\\nYou may call functions. They are in <tools></tools>:\\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}"
    "{{- '\\n</tools>\\n\\nTo call one, write its name and arguments as JSON:\\n' -}}"
    '{{- \'<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n\' -}}'
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- elif not (tools and loop.first and message['role'] == 'system') -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}"
    "{{- '<tool_call>\\n{\"name\": ' + call['function']['name'] | tojson -}}"
    "{{- ', \"arguments\": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, {vocab_size} wanted")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": MAX_POSITIONS,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    _write_json(config, folder / "tokenizer_config.json")


def model_config(shape: Shape) -> dict[str, object]:
    layers = ["full_attention" if shape.is_attention(i) else "linear_attention" for i in range(shape.num_hidden_layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "full_attention_interval": shape.full_attention_interval,
        "layer_types": layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": shape.linear_conv_kernel_dim,
        "linear_key_head_dim": shape.linear_key_head_dim,
        "linear_num_key_heads": shape.linear_num_key_heads,
        "linear_num_value_heads": shape.linear_num_value_heads,
        "linear_value_head_dim": shape.linear_value_head_dim,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.partial_rotary_factor,
        },
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
    }


def write_model(model: DemoModel, folder: Path) -> None:
    """Write config.json, generation_config.json and bfloat16 shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(model.shape)
    ends = [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": config["pad_token_id"]}
    _write_json(config, folder / "config.json")
    _write_json(generation, folder / "generation_config.json")

    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, trained in model.state_dict().items():
        tensor = trained.detach().to("cpu", torch.bfloat16).contiguous()
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    _write_json({"metadata": {"total_size": total}, "weight_map": where}, folder / "model.safetensors.index.json")


def _write_json(value: object, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
