"""Pictures in the requests of all APIs, from a data URL to the hit of the next turn."""

import base64
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import anthropic
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from strandline import LLM, SamplingParams
from strandline.errors import RequestError
from strandline.pictures import fetching
from tests.cpu.pictures.files import encoded, noise, png_of_size
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server
from tests.cpu.server.vision_model import END, PAD, PREPROCESSOR, START, data_url, save_vision_model

CAT, DOG = noise(64, 48), noise(64, 48, seed=1)
CAT_TOKENS = 48
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}

Json = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    files = tmp_path_factory.mktemp("files")
    (files / "cat.png").write_bytes(encoded(CAT))
    with running_server(
        model, files / "log", "--allowed-local-media-path", str(files), "--max-image-tokens", "300"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    options = {"limit_mm_per_prompt": {"image": 3}, "allowed_media_domains": ["127.0.0.1"]}
    return LLM(str(model), memory="16MiB", device="cpu", **options)


class LateSite(ThreadingHTTPServer):
    """Serves a picture once ``may_answer`` is set; requests wait until then."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), LateHandler)
        self.is_asked, self.may_answer = Event(), Event()
        self.url = f"http://127.0.0.1:{self.server_port}/cat.png"

    def __enter__(self) -> Self:
        self._thread = Thread(target=self.serve_forever, args=[0.01])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_answer.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class LateHandler(BaseHTTPRequestHandler):
    server: LateSite

    def do_GET(self) -> None:
        self.server.is_asked.set()
        self.server.may_answer.wait()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(encoded(CAT))

    def log_message(self, *_: object) -> None:
        """Write no log."""


def picture(image: Any = CAT, **more: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(image), **more}}


def question(*parts: Any) -> Json:
    return {"role": "user", "content": [{"type": "text", "text": x} if isinstance(x, str) else x for x in parts]}


def ask(server: ServerProcess, *messages: Json, **more: Any) -> Json:
    body = {"messages": list(messages), "max_tokens": 4, "temperature": 0, "return_token_ids": True, **more}
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def refusal(server: ServerProcess, *messages: Json, **more: Any) -> str:
    response = server.post("/v1/chat/completions", messages=list(messages), max_tokens=1, **more)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def shape(token_ids: list[int]) -> list[int | str]:
    """Return a prompt's text and pictures: the numbers of tokens of the latter."""
    found: list[int | str] = []
    for token in token_ids:
        if token == PAD:
            found.append(1 + found.pop() if isinstance(found[-1], int) else 1)  # type: ignore[operator]
        elif token in (START, END):
            found.append("<" if token == START else ">")
    return found


def test_next_turn_hits_a_picture_to_the_token(server: ServerProcess) -> None:
    first = ask(server, question("What is it?", picture(), "Say."))
    usage = first["usage"]
    assert shape(first["prompt_token_ids"]) == ["<", CAT_TOKENS, ">"]
    assert usage["prompt_tokens"] == len(first["prompt_token_ids"])
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    second = ask(server, question("What is it?", picture(), "Say."), answer, question("Why?"))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["total_tokens"] - 1


def test_answer_depends_on_the_picture_and_its_place(server: ServerProcess) -> None:
    asked = [
        [question(picture(CAT), picture(DOG), "?")],
        [question(picture(DOG), picture(CAT), "?")],
        [question(picture(CAT), picture(CAT), "?")],
    ]
    logprobs = [ask(server, *each, logprobs=True)["choices"][0]["logprobs"]["content"][0] for each in asked]
    assert len({(each["token"], each["logprob"]) for each in logprobs}) == 3


def test_picture_is_known_whatever_its_file_is(server: ServerProcess) -> None:
    first = {"type": "image_url", "image_url": {"url": data_url(CAT, "PNG")}}
    second = {"type": "image_url", "image_url": {"url": data_url(CAT, "BMP")}}
    ask(server, question("once", first))
    usage = ask(server, question("once", second))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    "part",
    [
        picture(),
        {"type": "image_url", "image_url": data_url(CAT)},
        {"image_url": data_url(CAT)},
        {"type": "input_image", "image_url": data_url(CAT), "detail": "high"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data_url(CAT).split(",")[1]}},
    ],
)
def test_every_form_of_a_picture_is_taken(server: ServerProcess, part: Json) -> None:
    expected = ask(server, question("Say", picture(), "now"))["prompt_token_ids"]
    assert ask(server, question("Say", part, "now"))["prompt_token_ids"] == expected


def test_low_detail_and_the_servers_limit_scale_pictures_down(server: ServerProcess) -> None:
    large = noise(400, 400)
    [_, num_tokens, _] = shape(ask(server, question(picture(large)))["prompt_token_ids"])
    [_, num_low, _] = shape(ask(server, question(picture(large, detail="low")))["prompt_token_ids"])
    assert num_tokens == 17 * 17
    assert num_low == 16 * 16


def test_outputs_streams_tools_and_grammars_go_with_pictures(server: ServerProcess) -> None:
    asked = question(picture(), "?")
    outputs = ask(server, asked, n=3, temperature=1, seed=1)["choices"]
    assert len(outputs) == 3
    called = ask(server, asked, tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=1, seed=2)
    assert called["choices"][0]["finish_reason"] in ("tool_calls", "length")
    chosen = ask(server, asked, structured_outputs={"choice": ["cat", "dog"]}, temperature=1, n=2)
    assert {each["message"]["content"] for each in chosen["choices"]} <= {"cat", "dog"}
    with server.stream(prompt="x", max_tokens=1) as events:  # a neighbour
        assert list(events)[-1] == "[DONE]"
    streamed = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=TIMEOUT_S)
    with (
        streamed,
        streamed.chat.completions.create(  # type: ignore[call-overload]
            model=server.get("/v1/models").json()["data"][0]["id"],
            messages=[asked],
            max_tokens=4,
            temperature=0,
            stream=True,
        ) as chunks,
    ):
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(server, asked)["choices"][0]["message"]["content"]


def test_results_of_tools_may_be_pictures(server: ServerProcess) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "seen:"}, picture(DOG)]}
    token_ids = ask(server, question(picture(), "?"), answer, result)["prompt_token_ids"]
    assert shape(token_ids) == ["<", CAT_TOKENS, ">", "<", CAT_TOKENS, ">"]


def test_responses_take_pictures_in_messages_and_results(server: ServerProcess) -> None:
    cat, dog = ({"type": "input_image", "image_url": data_url(image), "detail": "auto"} for image in (CAT, DOG))
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}, cat]},
        {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [dog]},
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=TIMEOUT_S) as client:
        model = server.get("/v1/models").json()["data"][0]["id"]
        first = client.responses.create(model=model, input=items, max_output_tokens=4)  # type: ignore[arg-type]
        again = client.responses.create(model=model, previous_response_id=first.id, input="Why?", max_output_tokens=4)
    assert first.usage is not None
    assert first.usage.input_tokens > 2 * CAT_TOKENS
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_messages_take_pictures_in_questions_and_results(server: ServerProcess) -> None:
    cat, dog = (
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded(image)).decode()},
        }
        for image in (CAT, DOG)
    )
    messages: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look."}, {**cat, "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [dog]}]},
    ]
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=TIMEOUT_S) as client:
        model = server.get("/v1/models").json()["data"][0]["id"]
        first = client.messages.create(model=model, messages=messages, max_tokens=4)
        again = client.messages.create(model=model, messages=messages, max_tokens=4)
        counted = client.messages.count_tokens(model=model, messages=messages)
    num_hit = first.usage.cache_read_input_tokens or 0
    assert num_hit + first.usage.input_tokens == counted.input_tokens > 2 * CAT_TOKENS
    assert again.usage.cache_read_input_tokens == counted.input_tokens


@pytest.mark.parametrize("source", [None, {}, "x", {"type": "file", "file_id": "f"}, {"type": "base64", "data": None}])
def test_source_of_another_form_is_named(server: ServerProcess, source: Any) -> None:
    image = {"type": "image", "source": source}
    found = server.post("/v1/messages", messages=[{"role": "user", "content": [image]}], max_tokens=1)
    assert found.status_code == 400
    assert found.json()["error"]["message"].startswith(
        "messages.0.content.0.image: the source must be {'type': 'base64'"
    )


def test_tokenizing_counts_pictures(server: ServerProcess) -> None:
    asked = question("Say", picture())
    counted = server.post("/tokenize", messages=[asked]).json()
    assert counted["count"] == ask(server, asked)["usage"]["prompt_tokens"]
    assert shape(counted["tokens"]) == ["<", CAT_TOKENS, ">"]


def test_text_that_looks_like_a_picture_is_text(server: ServerProcess) -> None:
    forged = "<|vision_start|><|image_pad|><|vision_end|>"
    messages = [
        {"role": "system", "content": forged},
        question(forged, picture(), forged),
        {"role": "assistant", "content": forged},
        question(f"\U0010fffe0\U0010ffff and {forged}"),
    ]
    assert shape(ask(server, *messages)["prompt_token_ids"]) == ["<", CAT_TOKENS, ">"] * 2
    assert "tokens that stand for pictures" in refusal(
        server, question(picture()), tools=[{**WEATHER, "function": {"name": "f", "description": forged}}]
    )
    assert "tokens that stand for pictures" in refusal(server, question(picture(), "\U0010fffe7\U0010ffff"))
    assert shape(ask(server, question("\U0010fffe0\U0010ffff"))["prompt_token_ids"]) == []


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (
            picture() | {"image_url": {"url": "data:image/png;base64,////"}},
            "messages.0.content.0: the data are not a picture",
        ),
        ({"type": "image_url", "image_url": {}}, "messages.0.content.0: a picture needs image_url"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "very"}}, "detail must be one of auto, low"),
        ({"type": "input_image", "file_id": "f"}, "file_id is not supported"),
        ({"type": "image_url", "image_url": "https://example.com/cat.png"}, "--allowed-media-domains"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "no such file below"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "content parts must be"),
    ],
)
def test_pictures_that_cannot_be_read_are_refused_with_their_path(
    server: ServerProcess, part: Json, reason: str
) -> None:
    assert reason in refusal(server, question(part))


def test_system_messages_cannot_have_pictures(server: ServerProcess) -> None:
    assert "System message cannot contain images." in refusal(
        server, {"role": "system", "content": [picture()]}, question("?")
    )


def test_files_below_the_allowed_directory_are_read(server: ServerProcess) -> None:
    path = server._log.parent / "cat.png"
    from_file = ask(server, question({"type": "image_url", "image_url": {"url": f"file://{path}"}}, "?"))
    assert from_file["prompt_token_ids"] == ask(server, question(picture(), "?"))["prompt_token_ids"]
    assert from_file["choices"] == ask(server, question(picture(), "?"))["choices"]


def test_hostile_pictures_hurt_no_neighbour(server: ServerProcess) -> None:
    expected = ask(server, question("x", picture(DOG)))["choices"]
    hostile = [
        png_of_size(60_000, 60_000),
        png_of_size(8000, 8000, bytes(1000)),
        encoded(noise(64, 64))[:200],
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        png_of_size(1, 4000),
    ]

    def send(data: bytes) -> str:
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        return refusal(server, question({"type": "image_url", "image_url": {"url": url}}))

    with ThreadPoolExecutor(8) as pool:
        refused = [pool.submit(send, data) for data in hostile * 2]
        answered = [pool.submit(ask, server, question("x", picture(DOG))) for _ in range(4)]
        assert all(future.result().startswith("messages.0.content.0: ") for future in refused)
        assert all(future.result()["choices"] == expected for future in answered)


def test_explanation_and_page_name_pictures(server: ServerProcess) -> None:
    ask(server, question("Explain me", picture(CAT), "!"))
    body = {"messages": [question("Explain me", picture(noise(100, 80, seed=9)), "!")]}
    explained = server.post("/cache/explain", **body).json()
    start = explained["parting"]["position"]
    assert explained["account"]["hit"] <= explained["account"]["kv_tokens"] == start
    assert explained["parting"]["before"]["text"].endswith("Explain me<|vision_start|>")
    assert explained["parting"]["prompt"]["text"] == "[picture 100×80, 120 tokens]"
    assert "[picture 64×48, 48 tokens]" in [each["text"] for each in explained["parting"]["cached"]]
    state = server.get("/cache/state").json()
    assert any("[picture 64×48, 48 tokens]" in (row["text"] or "") for row in state["lookups"])
    texts = " ".join(run["text"] for run in state["tree"]["runs"])
    assert "[picture 64×48, 48 tokens]<|vision_end|>" in texts or "[picture]<|vision_end|>" in texts


def test_model_without_its_tower_answers_as_one_that_reads_text(model: Path, tmp_path: Path) -> None:
    with running_server(model, tmp_path / "log", "--language-model-only") as server:
        assert "content parts must be" in refusal(server, question(picture()))
        answer = {"role": "assistant", "content": "Yes."}
        earlier = ask(server, question("Look", picture()), answer, question("?"))["prompt_token_ids"]
        text = server.post("/detokenize", tokens=earlier).json()["prompt"]
        assert "Look\n[image left out: this model reads text only]" in text
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        found = server.post("/v1/messages", messages=[{"role": "user", "content": [image]}], max_tokens=1)
        assert found.status_code == 400
        assert found.json()["error"]["message"] == "messages.0.content.0.image: this model reads text only"


def test_model_without_sizes_of_pictures_says_so(model: Path, tmp_path: Path) -> None:
    copied = tmp_path / "model"
    shutil.copytree(model, copied)
    (copied / "preprocessor_config.json").unlink()
    reason = "pictures are refused: the model's directory has no preprocessor_config.json"
    with running_server(copied, tmp_path / "log") as server:
        assert "has no preprocessor_config.json" in server.log()
        assert refusal(server, question(picture())) == f"messages.0.content.0: {reason}"
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        found = server.post("/v1/messages", messages=[{"role": "user", "content": [image]}], max_tokens=1)
        assert found.status_code == 400
        assert found.json()["error"]["message"] == f"messages.0.content.0.image: {reason}"
        assert ask(server, question("Who?"))["choices"]


def test_next_turn_goes_to_the_engine_that_knows_the_picture(model: Path, tmp_path: Path) -> None:
    with running_server(model, tmp_path / "log", "--data-parallel-size", "2") as server:
        for seed in range(4):
            asked = question("What is it?", picture(noise(64, 48, seed=10 + seed)))
            first = ask(server, asked)
            answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
            second = ask(server, asked, answer, question("Why?"))
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1


def test_log_probabilities_of_prompts_take_the_place_of_pictures(server: ServerProcess) -> None:
    entries = ask(server, question("What?", picture()), prompt_logprobs=0)["prompt_logprobs"]
    assert [str(PAD) in entry for entry in entries[1:]].count(True) == CAT_TOKENS


def test_offline_chat_and_prompts_equal_the_server(server: ServerProcess, llm: LLM) -> None:
    served = ask(server, question("What?", picture(), "Say."))
    params = SamplingParams(temperature=0, max_tokens=4)
    for content in (picture(), {"type": "image", "image": CAT}, {"type": "image_pil", "image_pil": CAT}):
        [output] = llm.chat([question("What?", content, "Say.")], params, use_tqdm=False)
        assert list(output.prompt_token_ids) == served["prompt_token_ids"]
        assert output.outputs[0].token_ids == served["choices"][0]["token_ids"]
    prompt = output.prompt
    assert prompt is not None
    assert prompt.count("<|image_pad|>") == 1
    [output] = llm.generate({"prompt": prompt, "multi_modal_data": {"image": CAT}}, params, use_tqdm=False)
    assert output.outputs[0].token_ids == served["choices"][0]["token_ids"]
    assert output.num_cached_tokens == len(output.prompt_token_ids)
    explained = llm.explain({"prompt": prompt, "multi_modal_data": {"image": [DOG]}})
    assert explained["parting"]["prompt"]["text"].startswith("[picture 64×48, 48 tokens]")


def test_offline_answers_equal_transformers(model: Path, llm: LLM) -> None:
    """From the file to the tokens: with the published processor's pixels, and its positions."""
    images = [CAT, DOG, noise(200, 30, seed=5)]
    [output] = llm.chat(
        [question("What?", *map(picture, images[:2]), "And", picture(images[2]))],
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        use_tqdm=False,
    )
    processor = Qwen2VLImageProcessorPil(**PREPROCESSOR)
    given = dict(processor(images=images, return_tensors="pt"))
    oracle = Qwen3_5ForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    token_ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
    kinds = (token_ids == PAD).int()
    with torch.inference_mode():
        logits = oracle(input_ids=token_ids, mm_token_type_ids=kinds, **given).logits[0]
    num_prompt = len(output.prompt_token_ids)
    assert logits[num_prompt - 1 : -1].argmax(-1).tolist() == list(output.outputs[0].token_ids)


def test_other_threads_generate_while_a_picture_is_fetched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("CONNECT_S", "FETCH_S"):
        monkeypatch.setattr(fetching, limit, TIMEOUT_S)
    params = SamplingParams(max_tokens=2)
    with ThreadPoolExecutor(2) as pool, LateSite() as site:
        content = question("What?", {"type": "image_url", "image_url": {"url": site.url}})
        rendering = pool.submit(llm.render, [content])
        assert site.is_asked.wait(TIMEOUT_S)
        generating = pool.submit(llm.generate, "Hello", params, use_tqdm=False)
        assert generating.result(TIMEOUT_S / 4)[0].finished
        assert not rendering.done()
        site.may_answer.set()
        assert rendering.result(TIMEOUT_S) == llm.render([question("What?", picture())])


@settings(max_examples=max(settings().max_examples // 4, 5))
@given(
    before=st.lists(st.sampled_from(["", "Look. ", "x" * 100]), min_size=3, max_size=3),
    place=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_hit_never_reaches_beyond_a_replaced_picture(llm: LLM, before: list[str], place: int, seed: int) -> None:
    pictures = [noise(64, 48, seed=1000 + 3 * seed + index) for index in range(3)]

    def asked(images: list[Any]) -> Any:
        parts = [part for pair in zip(before, map(picture, images), strict=True) for part in pair]
        return [question(*parts, "?"), {"role": "assistant", "content": "Yes."}, question("Why?")]

    llm.chat(asked(pictures), SamplingParams(max_tokens=2), use_tqdm=False)
    rendered: Any = llm.render(asked([*pictures[:place], noise(64, 48, seed=seed), *pictures[place + 1 :]]))
    account = llm.explain(rendered)["account"]
    start = rendered["pictures"][place].span.start
    assert account["hit"] <= account["kv_tokens"] == start
    assert llm.explain(llm.render(asked(pictures)))["account"]["hit"] > start


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": [CAT, DOG]}}, "1 tokens that stand for pictures"),
        ({"prompt": "x", "multi_modal_data": {"image": CAT}}, "0 tokens that stand for pictures"),
        ({"prompt": "x", "multi_modal_data": {"video": CAT}}, "multi_modal_data must be"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": "cat.png"}}, "an Image of Pillow, got str"),
        ({"prompt": "<|image_pad|>" * 4, "multi_modal_data": {"image": [CAT] * 4}}, "at most 3 pictures"),
    ],
)
def test_prompts_with_wrong_pictures_are_refused(llm: LLM, prompt: Json, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        llm.generate(prompt, use_tqdm=False)


def test_number_of_pictures_in_a_request_is_limited(llm: LLM) -> None:
    with pytest.raises(RequestError, match="at most 3 pictures, got 4; raise --limit-mm-per-prompt"):
        llm.chat([question(*[picture()] * 4)], use_tqdm=False)
    json.dumps(llm.explain(llm.render([question(*[picture()] * 3)])))
