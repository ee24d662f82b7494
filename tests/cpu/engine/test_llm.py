"""The offline API: prompts in every form, every parameter, and errors that affect no other request."""

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from strandline import LLM, SamplingParams, env
from strandline.config import EngineConfig
from strandline.device import uni_executor
from strandline.device.hardware import dtypes
from strandline.device.steps import prompt_logprobs
from strandline.device.uni_executor import PREFAULTED_BYTES
from strandline.engine.foreign_methods import FOREIGN_METHODS
from strandline.errors import ConfigError, RequestError
from strandline.kernels.binding import why_unavailable
from strandline.text.model_files import STRICT_TEMPLATE
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.tiny import VOCAB_SIZE, save_tiny_model
from tests.cpu.engine.tokenizers import ascii_tokenizer
from tests.cpu.pages import needs_pagemap, resident_share

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(scope="session")
def spoken_dir(model_dir: Path) -> Path:
    """The tiny model with a tokenizer of characters beside it."""
    ascii_tokenizer().save_pretrained(model_dir)
    return model_dir


@pytest.fixture
def llm(spoken_dir: Path, make_llm: MakeLLM) -> LLM:
    return make_llm(skip_tokenizer_init=False)


def one(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> Any:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_prompt_may_be_text_token_ids_or_mapping(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode("hello")
    forms: list[Any] = ["hello", token_ids, {"prompt": "hello"}, {"prompt_token_ids": token_ids}, ["hello"]]
    texts = {one(llm, form).text for form in forms}
    assert len(texts) == 1
    assert len(texts.pop()) == 10


@pytest.mark.parametrize(
    "array_of", [np.array, torch.tensor, lambda ids: [*np.array(ids)]], ids=["numpy", "torch", "list"]
)
def test_prompts_may_be_arrays_of_token_ids(llm: LLM, array_of: Callable[[list[int]], Any]) -> None:
    token_ids = llm.get_tokenizer().encode("hello")
    array = array_of(token_ids)
    for form in (array, [array], {"prompt_token_ids": array}):
        [output] = llm.generate(form, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == token_ids
        assert set(map(type, output.prompt_token_ids)) == {int}


def test_options_may_be_paths_and_numbers_of_numpy() -> None:
    options = {"model": Path("a/model"), "disk_cache": Path("b"), "max_model_len": np.int64(64)}
    plain = EngineConfig(model="a/model", disk_cache="b", max_model_len=64)
    assert EngineConfig.from_options(options) == plain


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a", "bb" * 40, "ccc"]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (9, 3, 1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 3, 1]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_chat_renders_template_and_second_turn_hits_first(llm: LLM) -> None:
    messages = [{"role": "user", "content": "tell me something long enough to be worth caching"}]
    [first] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert first.prompt == f"u:{messages[0]['content']}|a:"
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "more"}]
    [second] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert second.num_cached_tokens == len(first.prompt_token_ids) + 10 - 1


def test_seeded_request_does_not_depend_on_its_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=20)
    alone = one(llm, "hello", params).token_ids
    others = [SamplingParams(temperature=2.0, max_tokens=30) for _ in range(5)]
    outputs = llm.generate(["x", "yy", "hello", "zzz", "w", "v"], [*others[:2], params, *others[2:]], use_tqdm=False)
    assert outputs[2].outputs[0].token_ids == alone


def test_unseeded_requests_differ_and_the_engines_seed_repeats_them(spoken_dir: Path, make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=20)
    runs = [[o.outputs[0].token_ids for o in make_llm(seed=3).generate([[1], [1]], params)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_greedy_equals_the_narrowest_sampling(llm: LLM) -> None:
    expected = one(llm, "hello").token_ids
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert one(llm, "hello", SamplingParams(max_tokens=10, **narrow)).token_ids == expected  # type: ignore[arg-type]


def test_logprobs_are_those_of_transformers(llm: LLM, spoken_dir: Path) -> None:
    [output] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2))
    token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    model = AutoModelForCausalLM.from_pretrained(spoken_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    num_prompt = len(output.prompt_token_ids)
    completion = output.outputs[0]
    for index, entry in enumerate(completion.logprobs):
        position = num_prompt + index - 1
        best = expected[position].topk(3)
        assert list(entry) == best.indices.tolist()
        assert [found.logprob for found in entry.values()] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [found.rank for found in entry.values()] == [1, 2, 3]
    chosen = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        token = token_ids[position + 1]
        assert entry[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
        assert entry[token].rank == int((expected[position] > expected[position, token]).sum()) + 1


def test_prompt_logprobs_do_not_depend_on_step_sizes(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, params = list(range(50)), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    runs = [
        make_llm(max_num_batched_tokens=size).generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
        for size in (2048, 7)
    ]
    monkeypatch.setattr(prompt_logprobs, "LOGPROB_ROWS", 20)
    runs.append(make_llm().generate([prompt], params, use_tqdm=False)[0].prompt_logprobs)
    values = [[next(iter(entry.values())).logprob for entry in run[1:]] for run in runs if run]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert values[0] == pytest.approx(values[2], abs=1e-4)
    assert len(values[0]) == 49


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    text = one(llm, "hello").text
    completion = one(llm, "hello", SamplingParams(temperature=0, max_tokens=10, stop=text[3:5]))
    assert completion.text == text[: text.index(text[3:5])]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", text[3:5])


def test_a_stop_token_ends_the_output_and_is_named(llm: LLM) -> None:
    tokens = one(llm, "hello").token_ids
    completion = one(llm, "hello", SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[tokens[2]]))
    assert completion.token_ids == tokens[: tokens.index(tokens[2]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[2])


def test_min_tokens_delays_end_and_ignore_eos_disables_it(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_id
    always_end = {"temperature": 0, "logit_bias": {eos: 100.0}}
    ended = one(llm, "hello", SamplingParams(max_tokens=6, **always_end))  # type: ignore[arg-type]
    assert (ended.token_ids, ended.finish_reason, ended.text) == ([eos], "stop", "")
    late = one(llm, "hello", SamplingParams(max_tokens=6, min_tokens=3, **always_end))  # type: ignore[arg-type]
    assert (len(late.token_ids), late.token_ids[-1]) == (4, eos)
    never = one(llm, "hello", SamplingParams(max_tokens=6, ignore_eos=True, **always_end))  # type: ignore[arg-type]
    assert (never.token_ids, never.finish_reason) == ([eos] * 6, "length")


def test_bad_words_never_come(llm: LLM) -> None:
    text = one(llm, "hello").text
    banned = text[2:4]
    completion = one(llm, "hello", SamplingParams(temperature=0, max_tokens=10, bad_words=[banned]))
    assert banned not in completion.text
    assert completion.text[:3] == text[:3]


def test_penalties_count_the_requests_own_tokens_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, presence_penalty=2.0, frequency_penalty=2.0)
    alone = one(llm, "hello", params).token_ids
    together = llm.generate(["hello", "aaaa", "hello"], [params, GREEDY, params], use_tqdm=False)
    assert [together[index].outputs[0].token_ids for index in (0, 2)] == [alone, alone]
    strong = SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1e3)
    assert len(set(one(llm, "hello", strong).token_ids)) == 12


def test_streamed_text_grows_to_the_whole(llm: LLM) -> None:
    texts = [output.outputs[0].text for output in llm.stream("hello", GREEDY)]
    assert texts[-1] == one(llm, "hello").text
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(texts) == 10


def test_closing_a_stream_frees_what_it_held(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=100))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished
    assert not llm.engine.cache.internals().leases


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([[]], "the prompt is empty"),
    ("", "the prompt is empty"),
    ([[0, VOCAB_SIZE]], f"prompt token {VOCAB_SIZE} is not in the vocabulary"),
    ([[-1]], "prompt token -1 is not in the vocabulary"),
    ([[1.5]], "prompt token 1.5"),
    (np.array([[1.5]]), "prompt token 1.5"),
    (np.array(5), "a prompt must be a string, a list of token ids or a mapping, got array(5)"),
    (
        [[1] * 5000],
        "it has 5000 tokens, and this model's maximum context length is 4096 tokens",
    ),
    (5, "a prompt must be a string, a list of token ids or a mapping, got 5"),
    (["a", 5], "a prompt must be a string, a list of token ids or a mapping, got 5"),
    ({"promt": "a"}, "unknown prompt field 'promt'; known are prompt, prompt_token_ids, cache_salt"),
    ({"cache_salt": "a"}, "a prompt needs 'prompt' or 'prompt_token_ids'"),
    ({"prompt": "a", "cache_salt": 3}, "cache_salt must be a string"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[repr(prompt)[:40] for prompt, _ in BAD_PROMPTS])
def test_a_bad_prompt_is_refused_and_other_requests_go_on(llm: LLM, prompt: Any, message: str) -> None:
    llm.engine.add_request("good", [1, 2, 3], GREEDY)
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert message in str(caught.value)
    outputs = []
    while llm.engine.has_unfinished:
        outputs = llm.engine.step()
    assert [(output.request_id, output.finished) for output in outputs] == [("good", True)]


def test_parameters_with_unknown_tokens_are_refused(llm: LLM) -> None:
    for params in (SamplingParams(stop_token_ids=[VOCAB_SIZE]), SamplingParams(logit_bias={VOCAB_SIZE: 1.0})):
        with pytest.raises(RequestError, match=rf"token {VOCAB_SIZE} .* is not in"):
            llm.generate("a", params, use_tqdm=False)


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, "greedy", [{"temperature": 0}]], ids=str)
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams, or a list of them, got"):
        llm.generate("a", params, use_tqdm=False)


def test_chat_passes_variables_to_the_template(llm: LLM) -> None:
    template = "{% if enable_thinking is false %}quick{% else %}slow{% endif %}"
    for more, expected in (({}, "slow"), ({"chat_template_kwargs": {"enable_thinking": False}}, "quick")):
        [output] = llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template=template, use_tqdm=False, **more)
        assert output.prompt == expected


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}])
def test_chat_refuses_what_is_no_list_of_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages must be a list of messages, or a list of such lists, got "):
        llm.chat(messages)


def test_chat_takes_vllms_content_formats_that_templates_get(llm: LLM) -> None:
    messages, params = [{"role": "user", "content": "ab"}], SamplingParams(temperature=0, max_tokens=1)
    outputs = [
        llm.chat(messages, params, chat_template_content_format=each, use_tqdm=False)[0].prompt_token_ids
        for each in ("auto", "string")
    ]
    assert outputs[0] == outputs[1]
    with pytest.raises(RequestError, match="must be one of auto, string, as the template gets texts; got 'openai'"):
        llm.chat(messages, params, chat_template_content_format="openai")


def test_priorities_of_a_call_order_its_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=1)
    for given in (params, [params] * 3):
        outputs = llm.generate([[1], [2], [3]], given, priority=[2, 0, 1], use_tqdm=False)
        ends_s = [output.times.finished_s or 0.0 for output in outputs]
        assert sorted(range(3), key=ends_s.__getitem__) == [1, 2, 0]
        assert len(llm.generate([[1], [2], [3]], given, priority=3, use_tqdm=False)) == 3
    with pytest.raises(RequestError, match="3 prompts came with 2 priorities"):
        llm.generate([[1], [2], [3]], params, priority=[1, 2])


def test_priorities_of_a_call_order_its_conversations(make_llm: MakeLLM, spoken_dir: Path) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1, skip_tokenizer_init=False)
    conversations = [[{"role": "user", "content": text}] for text in "abc"]
    outputs = llm.chat(conversations, SamplingParams(max_tokens=1), priority=[2, 0, 1], use_tqdm=False)
    ends_s = [output.times.finished_s or 0.0 for output in outputs]
    assert sorted(range(3), key=ends_s.__getitem__) == [1, 2, 0]


@pytest.mark.parametrize("name", FOREIGN_METHODS)
def test_error_about_a_method_of_vllm_says_what_to_do(llm: LLM, name: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': "):
        getattr(llm, name)


def test_chat_continues_the_last_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": "It is "}]
    more: Any = {"use_tqdm": False, "continue_final_message": True}
    [output] = llm.chat(messages, GREEDY, add_generation_prompt=False, **more)
    assert output.prompt == "u:tell me|a:It is "
    with pytest.raises(RequestError, match="needs add_generation_prompt=False"):
        llm.chat(messages, GREEDY, **more)


def test_chat_repairs_conversations_for_strict_templates(llm: LLM) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    [output] = llm.chat(messages, GREEDY, chat_template=STRICT_TEMPLATE.read_text(), use_tqdm=False)
    assert "x\n\n<system-reminder>\ny\n</system-reminder>" in str(output.prompt)


def test_messages_that_the_template_cannot_render_are_refused(llm: LLM) -> None:
    for messages in ([], [[]], [{"content": "no role"}], ["text"], [{"role": "user"}]):
        with pytest.raises(RequestError):
            llm.chat(messages, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_token_ids_work_without_a_tokenizer(make_llm: MakeLLM) -> None:
    silent = make_llm()
    [output] = silent.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (10, "")
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        silent.generate("text", GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="stop strings and bad_words need a tokenizer"):
        silent.generate([[1]], SamplingParams(stop=["a"]), use_tqdm=False)


def test_the_models_generation_config_gives_the_defaults(tmp_path: Path, spoken_dir: Path, make_llm: MakeLLM) -> None:
    for file in spoken_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "generation_config.json"
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({"temperature": 0.3, "top_k": 20, "eos_token_id": [95, 7]}))
    llm = LLM(str(tmp_path), memory="8MiB", device="cpu")
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.3, top_k=20)
    assert llm.engine.frontend.eos_ids == {95, 7}


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 7}, {"top_k": 2.5}, {"min_p": float("nan")}])
def test_wrong_default_of_the_model_is_refused_at_start(tmp_path: Path, model_dir: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "config.json").symlink_to(model_dir / "config.json")
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=rf"^generation_config\.json: {next(iter(wrong))} must be"):
        LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True)


def test_more_logprobs_than_tokens_are_refused(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny_model(tmp_path, vocab_size=7)), device="cpu", memory="8MiB", skip_tokenizer_init=True)
    for name in ("logprobs", "prompt_logprobs"):
        wrong, right = SamplingParams(**{name: 20}), SamplingParams(temperature=0, max_tokens=2, **{name: 7})
        with pytest.raises(RequestError, match=f"{name} must be at most the 7 tokens of the vocabulary, got 20"):
            llm.generate([[1, 2]], wrong)
        assert len(one(llm, [1, 2], right).token_ids) == 2


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_modellen": 5}, "unknown option 'max_modellen'; did you mean 'max_model_len'"),
    ({"trust_remote_code": True}, "unknown option 'trust_remote_code': code from a model's repository is never run"),
    ({"swap_space": 4}, "unknown option 'swap_space': give --host-memory for evicted entries"),
    ({"override_generation_config": {}}, "it is a server's; LLM.generate and LLM.chat take sampling_params"),
    ({"dtype": "float8"}, "--dtype must be one of auto, float32, bfloat16, float16; got 'float8'"),
    ({"dtype": ["float32"]}, "--dtype must be one of auto, float32, bfloat16, float16; got ['float32']"),
    ({"max_model_len": 0}, "--max-model-len must be a whole number of at least 2, got 0"),
    ({"max_model_len": 1}, "--max-model-len must be a whole number of at least 2, got 1"),
    ({"max_model_len": 100_000}, "--max-model-len 100000 is above the model's limit of 4096 tokens"),
    ({"max_num_seqs": -1}, "--max-num-seqs must be a whole number of at least 1, got -1"),
    ({"max_num_seqs": None}, "--max-num-seqs must be a whole number of at least 1, got None"),
    ({"max_num_seqs": 10**12}, "for logs of --max-num-seqs 1000000000000 are more than the"),
    ({"mamba_block_size": "64"}, "--mamba-block-size must be a whole number of at least 1, got '64'"),
    ({"long_prefill_token_threshold": False}, "--long-prefill-token-threshold must be 0 or a whole number"),
    ({"long_prefill_token_threshold": 63}, "--long-prefill-token-threshold must be 0 or a whole number"),
    ({"seed": "x"}, "--seed must be a whole number of 64 bits, got 'x'"),
    ({"seed": 2**63}, "--seed must be a whole number"),
    ({"enforce_eager": "no"}, "--enforce-eager must be bool, got 'no'"),
    ({"tokenizer": 3}, "--tokenizer must be str or None, got 3"),
    ({"memory": "lots"}, "--memory must be a size such as 4GiB, got 'lots'"),
    ({"memory": 4096}, "--memory of 4,096 bytes holds no request: at least "),
    ({"memory": "10TiB"}, "--memory of 10,995,116,277,760 bytes and "),
    ({"memory": "9" * 400}, "bytes of memory that there are; lower them"),
    ({"memory": "200KiB", "max_model_len": 4096}, "raise --memory or lower --max-model-len to"),
    ({"device": "tpu"}, "--device must be one of"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[str(options) for options, _ in BAD_OPTIONS])
def test_a_bad_option_is_refused_at_start(make_llm: MakeLLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(**options)
    assert message in str(caught.value)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither 'demo', nor a directory, nor a hub name"):
        LLM("no-such-model")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        LLM(str(tmp_path))


def test_weights_beyond_the_machines_memory_are_refused_before_allocation(tmp_path: Path, model_dir: Path) -> None:
    values = json.loads((model_dir / "config.json").read_text()) | {"hidden_size": 2**20, "intermediate_size": 2**20}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match=r"weights that config\.json describes take [\d,]+ bytes in float32, more than"
    ):
        LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True)


def test_hubs_error_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError("no network\n  at all")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match="cannot be fetched from the hub: no network at all"):
        LLM("owner/name")


def test_broken_tokenizer_is_refused(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "config.json").symlink_to(model_dir / "config.json")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"no tokenizer in .*; name one with --tokenizer$"):
        LLM(str(tmp_path), device="cpu", load_format="dummy")


def test_times_are_kept(llm: LLM) -> None:
    times = llm.generate("hello", GREEDY, use_tqdm=False)[0].times
    assert times.first_token_s is not None
    assert times.finished_s is not None
    assert times.arrival_s < times.first_token_s < times.finished_s
    assert math.isclose(times.ttft_s or 0.0, times.first_token_s - times.arrival_s)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "snapshots placed by 'auto'; shortest prefix that can hit: 1 token"),
        ({"mamba_cache_mode": "all", "mamba_block_size": 128}, "'all'; shortest prefix that can hit: 128 tokens"),
        ({"mamba_cache_mode": "none"}, "nothing can hit"),
        ({"enable_prefix_caching": False}, "nothing can hit"),
    ],
    ids=["auto", "all", "none", "off"],
)
def test_engine_describes_what_its_cache_can_hit(make_llm: MakeLLM, options: dict[str, Any], said: str) -> None:
    assert make_llm(**options).engine.describe()[-1].endswith(said)


def test_fallbacks_are_described_and_counted(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(llm: LLM) -> list[str]:
        engine = llm.engine
        lines = [line for line in engine.describe() if line.startswith("kernels:")]
        assert sum(len(line.split(",")) for line in lines) >= len(engine.core.stats().kernel_fallbacks) >= len(lines)
        return lines

    if why_unavailable("Numba", "cpu") is None:
        assert described(make_llm()) == []
        (line,) = described(make_llm(dtype="float16"))
        assert line.endswith(": activations are float16, supported: float32 and bfloat16")
        rounded = save_tiny_model(tmp_path, mamba_ssm_dtype="bfloat16")
        (line,) = described(LLM(str(rounded), device="cpu", memory="8MiB", skip_tokenizer_init=True))
        operations = "gdn_prefill, gdn_decode, gdn_decode_logged, gdn_fold"
        assert line.endswith(f" instead of Numba for {operations}: the state is bfloat16, supported: float32")
    monkeypatch.setenv(env.NUMBA, "0")
    (line,) = described(make_llm())
    assert line.endswith(": STRANDLINE_NUMBA is 0")


def test_deterministic_and_ordinary_engines_coexist(make_llm: MakeLLM) -> None:
    ordinary, invariant = make_llm(), make_llm(deterministic=True)
    for llm in (ordinary, invariant, ordinary):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    workloads = [llm.engine.core.executor.runner.kernels.workload for llm in (ordinary, invariant)]
    assert [workload.is_deterministic for workload in workloads] == [False, True]


def test_default_cache_takes_half_of_a_containers_memory(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{64 * 2**20}\n")
    monkeypatch.setattr(dtypes, "MEMORY_LIMITS", (limit,))
    num_bytes = make_llm(memory=None).engine.core.executor.runner.arena.bytes.numel()
    assert 31 * 2**20 < num_bytes <= 32 * 2**20


@needs_pagemap
def test_engine_on_a_cpu_prefaults_the_first_memory(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uni_executor, "PREFAULTED_BYTES", PREFAULTED_BYTES)
    arena = make_llm(memory="1GiB").engine.core.executor.runner.arena
    assert resident_share(arena.bytes[:PREFAULTED_BYTES]) == 1
    assert resident_share(arena.bytes[PREFAULTED_BYTES:]) < 0.01


def test_several_engines_are_for_servers(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="LLM is one engine, and data_parallel_size is 2: run 'strandline serve"):
        LLM(str(model_dir), data_parallel_size=2)


def test_start_on_a_cpu_has_no_phase_of_gpus(llm: LLM) -> None:
    [line] = [text for text in llm.engine.describe() if text.startswith("start:")]
    assert re.fullmatch(r"start: weights \S+ s, kernels \S+ s, memory \S+ s", line)
