"""The shipped demo model: its files, its tokenizer and chat template, and what plain transformers makes of it."""

import ast
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import strandline
from strandline.bench.evaluate import score
from strandline.demo.tasks import KINDS, Kind, make_task
from tools.conversations import make_conversation

FOLDER = Path(strandline.__file__).parent / "demo"
MAX_FILE_BYTES = 16 * 2**20
MAX_FOLDER_BYTES = 24 * 2**20


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=getattr(torch, request.param)).eval()


def test_the_files_keep_within_their_sizes() -> None:
    sizes = [f.stat().st_size for f in FOLDER.iterdir()]
    assert max(sizes) < MAX_FILE_BYTES
    assert sum(sizes) < MAX_FOLDER_BYTES


def test_the_index_names_every_tensor_of_every_shard() -> None:
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, str] = {}
    for file in FOLDER.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            found |= dict.fromkeys(shard.keys(), file.name)
            assert all(shard.get_slice(name).get_dtype() == "BF16" for name in shard.keys())  # noqa: SIM118 - no dict
    assert found == index
    assert "mtp.fc.weight" in index
    assert {name.split(".")[0] for name in index} == {"model", "mtp"}


def test_template_is_prefix_stable(tokenizer: Any) -> None:
    for seed in range(30):
        messages = make_conversation(Random(seed), 300)
        for end in range(1, len(messages)):
            if messages[end]["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(messages[:end], add_generation_prompt=True)["input_ids"]
            reply = [*tokenizer.encode(messages[end]["content"]), tokenizer.eos_token_id]
            longer = tokenizer.apply_chat_template(messages[: end + 2], add_generation_prompt=True)["input_ids"]
            assert longer[: len(prompt) + len(reply)] == prompt + reply


def test_the_template_strips_nothing(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "  two spaces\n\n"},
        {"role": "assistant", "content": "<think>\n</think> x "},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert (
        text == "<|im_start|>user\n  two spaces\n\n<|im_end|>\n<|im_start|>assistant\n<think>\n</think> x <|im_end|>\n"
    )


def test_shipped_template_is_the_tools_one(tokenizer: Any) -> None:
    tree = ast.parse((Path(__file__).parents[3] / "tools" / "demo_files.py").read_text())
    [template] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHAT_TEMPLATE"
    ]
    assert tokenizer.chat_template == template


def test_plain_turns_are_those_of_the_training(tokenizer: Any) -> None:
    messages = [{"role": role, "content": f"{role} <tools>"} for role in ("system", "user", "assistant", "user")]
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    for end in range(1, 5):
        text = tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=True)
        assert text == "".join(turns[:end]) + "<|im_start|>assistant\n"


def test_template_renders_tools_calls_and_results(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    calls = [{"function": {"name": "weather", "arguments": {"city": city}}} for city in ("Köln", "Ulm")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "no"},
    ]
    texts = [
        tokenizer.apply_chat_template(messages[:end], tools=[tool], tokenize=False, add_generation_prompt=True)
        for end in (2, 4)
    ]
    assert texts[0].startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(tool) in texts[0]
    assert texts[1] == texts[0] + (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nno\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_digit_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234 56")) == [*"1234", "Ġ", *"56"]


def test_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in ("naïve – “quoted” 😀\t\n x", "a  b\r\n", "def f():\n    return 1\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_transformers_answers_held_out_tasks_and_stops(model: Any, tokenizer: Any, kind: Kind) -> None:
    for seed in range(4):
        task = make_task(kind, Random(f"shipped:{seed}"), num_tokens=300)
        inputs = tokenizer.apply_chat_template(list(task.messages), add_generation_prompt=True, return_tensors="pt")
        generated = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :].tolist()
        reply = tokenizer.decode(generated, skip_special_tokens=True)
        assert score(task, reply), (task, reply)
        assert generated == [*tokenizer.encode(reply), tokenizer.eos_token_id]
