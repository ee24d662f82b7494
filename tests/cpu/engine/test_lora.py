"""Requests with different adapters share steps, and each answers as the merged weights of its own do."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file

from strandline import LLM, LoRARequest, SamplingParams
from strandline.config import EngineConfig
from strandline.device import runner
from strandline.device.drafters import draft_layer
from strandline.device.executor import LaunchedStep
from strandline.device.steps.adapter_pool import EMPTY
from strandline.device.uni_executor import UniExecutor
from strandline.engine.core import new_warm_up
from strandline.engine.scheduling.adapter_admission import MAX_OVERTAKEN_FOR_SLOT
from strandline.env import DEBUG_CACHE
from strandline.errors import ConfigError, RequestError
from strandline.ids import RequestId
from strandline.records.adapters import LoadedAdapter, adapter_of, salt_with
from strandline.records.plan import StepPlan
from tests.cpu.engine import eager_graphs
from tests.cpu.engine.eager_graphs import replay_eagerly, single_rows_on_the_host
from tests.cpu.engine.small_demo import small_demo
from tests.cpu.engine.tiny import greedy_tokens, save_tiny_model
from tests.cpu.engine.tokenizers import ascii_tokenizer
from tests.cpu.models import adapters, fp8

pytestmark = pytest.mark.usefixtures("forked_workers")

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [[(7 * seed + place) % 97 for place in range(90)] for seed in range(4)]
MakeLLM = Callable[..., LLM]


class Models:
    """A model, adapters of all its linear layers, and the models that these make of it."""

    def __init__(self, directory: Path, num: int) -> None:
        self.base = save_tiny_model(directory / "base")
        tensors = load_file(self.base / "model.safetensors")
        names = [name.removesuffix(".weight") for name, x in tensors.items() if x.ndim == 2 and "layers" in name]
        self.requests, self.merged = list[LoRARequest](), list[Path]()
        for number in range(num):
            factors = adapters.draw({name: tuple(tensors[f"{name}.weight"].shape) for name in names}, seed=number)
            path = adapters.write(directory / f"adapter-{number}", factors)
            self.requests.append(LoRARequest(f"adapter-{number}", number, str(path)))
            changed = {
                f"{name}.weight": tensors[f"{name}.weight"] + adapters.ALPHA / adapters.RANK * up @ down
                for name, (down, up) in factors.items()
            }
            merged = save_tiny_model(directory / f"merged-{number}")
            self.merged.append(fp8.change_tensors(merged, lambda old, changed=changed: old.update(changed)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), 3)


@pytest.fixture
def make(models: Models) -> Iterator[MakeLLM]:
    """Return what starts an engine that takes adapters."""
    started = list[LLM]()

    def start(**options: Any) -> LLM:
        values = {"enable_lora": True, "max_loras": 2, "memory": "64MiB", "skip_tokenizer_init": True, **options}
        started.append(LLM(str(models.base), **values))
        return started[-1]

    yield start
    for llm in started:
        llm.close()


def answers(llm: LLM, prompts: list[list[int]], requests: list[LoRARequest | None]) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, lora_request=requests, use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distributed_executor_backend": "mp"},
        {"tensor_parallel_size": 2},
        {"deterministic": True},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}, "async_scheduling": True},
        {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=["uni", "mp", "ranks", "deterministic", "no cache, small steps", "ngrams", "suffixes", "drafts of ranks"],
)
def test_several_adapters_and_none_share_steps(models: Models, make: MakeLLM, options: dict[str, Any]) -> None:
    llm = make(**options)
    prompts, requests = [PROMPTS[0]] * 4 + PROMPTS, [*models.requests, None] * 2
    answers(llm, prompts[::-1], requests)
    found = answers(llm, prompts, requests)
    for index, model in enumerate([*models.merged, models.base]):
        ours = found[index::4]
        assert greedy_tokens(model, prompts[index::4], ours) == ours
    assert len({tuple(tokens) for tokens in found[:4]}) == 4


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long)], ids=["uni", "ranks"]
)
def test_warm_up_computes_prompts_and_decodes_with_an_adapter(
    models: Models, make: MakeLLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    llm = make(max_num_seqs=8, max_num_batched_tokens=128, **options)
    executor, adapted = llm.engine.core.executor, list[tuple[int, bool]]()
    launch = executor.launch

    def noted(plan: StepPlan) -> LaunchedStep:
        with_adapter.update(new.request_id for new in plan.new if new.adapter)
        adapted.extend((x.end - x.start, x.is_decode) for x in plan.sequences if x.request_id in with_adapter)
        return launch(plan)

    with_adapter = set[RequestId]()
    monkeypatch.setattr(executor, "launch", noted)
    new_warm_up(llm.config, executor).run()
    assert {num_tokens for num_tokens, _ in adapted} >= {1, 5, 16, 65, 128}
    assert any(is_decode for _, is_decode in adapted)
    if isinstance(executor, UniExecutor):
        assert EMPTY not in executor.runner.adapters._images
    for model, request in zip([models.merged[0], models.base], [models.requests[0], None], strict=True):
        found = answers(llm, PROMPTS[:2], [request] * 2)
        assert greedy_tokens(model, PROMPTS[:2], found) == found


@pytest.mark.parametrize("speculation", [None, {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}])
def test_graphs_with_adapters_give_the_tokens_of_eager_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any] | None
) -> None:
    """CUDA graphs are replaced (``eager_graphs.py``)."""
    monkeypatch.setattr(draft_layer, "single_rows", single_rows_on_the_host)
    tensors = load_file(Path(small_demo()) / "model.safetensors")
    shapes = {name.removesuffix(".weight"): tuple(x.shape) for name, x in tensors.items() if x.ndim == 2}
    factors = adapters.draw({name: shape for name, shape in shapes.items() if name.startswith("model.layers")}, seed=1)
    first, second = (
        LoRARequest(
            "adapter", number, str(adapters.write(tmp_path / f"{number}", factors, config={"lora_alpha": alpha}))
        )
        for number, alpha in enumerate((6, -2))
    )
    options = {"enable_lora": True, "max_loras": 2, "dtype": "float32", "async_scheduling": True, "max_num_seqs": 4}
    options["max_num_batched_tokens"] = max(eager_graphs.PROMPT_ROWS)

    def serve(llm: LLM) -> list[list[int]]:
        some = [[first, None, second, first], [None] * 4, [second] * 4, [None, first, None, None]]
        return [tokens for requests in some for tokens in answers(llm, PROMPTS, requests)]

    with LLM(small_demo(), memory="64MiB", device="cpu", **options) as llm:
        expected = serve(llm)
    with LLM(small_demo(), memory="64MiB", device="cpu", speculative_config=speculation, **options) as llm:
        executor = llm.engine.core.executor
        assert isinstance(executor, UniExecutor)
        num_drafts = 0 if speculation is None else 2
        graphs = replay_eagerly(executor.runner, num_drafts, max_num_seqs=4, max_model_len=512, replays_plain=True)
        drafts = llm.engine.scheduler.drafts
        drafts.limits = drafts.limits._replace(corrects_lengths=num_drafts > 0)
        monkeypatch.setattr(runner, "to_device", None)
        assert serve(llm) == expected
        assert all(graphs.num_replayed.values())
        num_accepted = llm.engine.core.stats().speculation.num_accepted_tokens
    assert num_accepted > 20 if num_drafts else num_accepted == 0


def test_prefixes_are_shared_within_an_adapter_and_not_across(models: Models, make: MakeLLM) -> None:
    llm, prompt = make(), PROMPTS[0]
    first, second, _ = models.requests
    for request, num_cached in ((None, 0), (first, 0), (second, 0), (None, 89), (first, 89), (second, 89)):
        before = llm.engine.cache.stats().hit_tokens
        answers(llm, [prompt], [request])
        assert llm.engine.cache.stats().hit_tokens - before in (num_cached, num_cached and num_cached + 1)


def test_a_rewritten_directory_hits_nothing_old(models: Models, make: MakeLLM, tmp_path: Path) -> None:
    llm, prompt = make(max_loras=1), PROMPTS[1]
    factors = adapters.draw({"model.layers.1.self_attn.v_proj": (32, 32)}, seed=5)
    path = adapters.write(tmp_path / "adapter", factors)
    answers(llm, [prompt], [LoRARequest("mine", 1, str(path))])
    fp8.change_json(path / adapters.CONFIG, lora_alpha=-60)
    before = llm.engine.cache.stats().hit_tokens
    answers(llm, [prompt], [LoRARequest("mine", 2, str(path))])
    assert llm.engine.cache.stats().hit_tokens == before
    answers(llm, [prompt], [LoRARequest("mine", 2, str(path))])
    assert llm.engine.cache.stats().hit_tokens > before


def test_modules_that_adapters_leave_alone_are_refused_later(models: Models, make: MakeLLM, tmp_path: Path) -> None:
    query, value = (
        adapters.write(tmp_path / name, adapters.draw({f"model.layers.1.self_attn.{name}": (rows, 32)}))
        for name, rows in (("q_proj", 128), ("v_proj", 32))
    )
    llm = make(lora_modules=[f"query={query}"])
    assert answers(llm, [PROMPTS[0]], [LoRARequest("query", 1, str(query))]) != answers(llm, [PROMPTS[0]], [None])
    with pytest.raises(ConfigError, match=r"v_proj\.weight; adapters may change q_proj"):
        answers(llm, [PROMPTS[0]], [LoRARequest("value", 2, str(value))])


class Load:
    """Requests of an engine with one slot, added in turn."""

    def __init__(self, llm: LLM, models: Models, num_tokens: int) -> None:
        self.llm, self.num_tokens = llm, num_tokens
        adapters = [llm.engine.core.adapters.load(x.lora_name, x.lora_path) for x in models.requests]
        self.salts = [salt_with(adapter, "") for adapter in adapters] + [""]
        self.first_tokens = list[str]()

    def add(self, name: str, adapter: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=self.num_tokens)
        self.llm.engine.add_request(name, PROMPTS[0][:20], params, salt=self.salts[adapter])

    def step(self) -> None:
        for output in self.llm.engine.step():
            if output.request_id not in self.first_tokens:
                self.first_tokens.append(output.request_id)


def test_request_that_waits_for_a_slot_lets_others_pass(models: Models, make: MakeLLM) -> None:
    load = Load(make(max_loras=1), models, 30)
    load.add("first", 0)
    load.step()
    for name, adapter in (("other", 1), ("same", 0), ("none", -1)):
        load.add(name, adapter)
    while load.llm.engine.has_unfinished:
        load.step()
    assert load.first_tokens == ["first", "same", "none", "other"]


def test_request_waits_for_a_bounded_number_of_others(models: Models, make: MakeLLM) -> None:
    load = Load(make(max_loras=2, max_num_seqs=4), models, 6)
    for index in range(200):
        load.add(f"{index}", index % 2)
        if index == 20:
            load.add("other", 2)
        load.step()
        load.step()
    assert 20 < load.first_tokens.index("other") < 20 + 2 * MAX_OVERTAKEN_FOR_SLOT
    while load.llm.engine.has_unfinished:
        load.step()
    assert len(load.first_tokens) == 201


def test_unloaded_adapters_end_with_the_requests_that_use_them(models: Models, make: MakeLLM) -> None:
    llm = make(lora_modules=[f"a={models.requests[0].lora_path}"])
    core = llm.engine.core
    (loaded,) = core.limits.adapters
    assert (loaded.name, loaded.rank) == ("a", adapters.RANK)
    params = SamplingParams(temperature=0, max_tokens=4)
    request = llm.engine.frontend.check(PROMPTS[2], llm.engine.frontend.check_params(params))
    llm.engine.add_checked("running", request, salt=salt_with(loaded, ""))
    llm.engine.step()
    core.adapters.unload(loaded.digest)
    tokens: list[int] = []
    while core.has_unfinished:
        for output in llm.engine.step():
            tokens = output.outputs[0].token_ids
    assert greedy_tokens(models.merged[0], [PROMPTS[2]], [list(tokens)]) == [list(tokens)]
    core.adapters.unload("unknown")
    request = llm.engine.frontend.check(PROMPTS[3], llm.engine.frontend.check_params(params))
    with pytest.raises(RequestError, match="is not loaded any more"):
        llm.engine.add_checked("late", request, salt=salt_with(loaded, ""))


def test_every_request_keeps_its_adapter_in_a_soak(
    models: Models, make: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are loaded, unloaded and swapped while requests come, end early and hit the cache."""
    monkeypatch.setenv(DEBUG_CACHE, "1")
    llm = make(max_loras=2, max_num_seqs=6, memory="3MiB", max_model_len=256)
    core, rng = llm.engine.core, Random(0)
    adapters_of = [core.adapters.load(x.lora_name, x.lora_path) for x in models.requests]
    expected: dict[tuple[int, int], list[int]] = {}
    for index in range(-1, len(adapters_of)):
        request = None if index < 0 else models.requests[index]
        for number, tokens in enumerate(answers(llm, PROMPTS, [request] * len(PROMPTS))):
            expected[index, number] = list(tokens)
    running = dict[str, tuple[int, int]]()
    num_checked = 0
    for step in range(220):
        if len(running) < 12 and step < 190:
            key = rng.randrange(-1, 3), rng.randrange(len(PROMPTS))
            adapter = None if key[0] < 0 else adapters_of[key[0]]
            if adapter is not None and rng.random() < 0.3:
                core.adapters.unload(adapter.digest)
                core.adapters.load(adapter.name, adapter.path)
            llm.engine.add_request(f"{step}", PROMPTS[key[1]], GREEDY, salt=salt_with(adapter, ""))
            running[f"{step}"] = key
        if running and rng.random() < 0.1:
            name = rng.choice(sorted(running))
            llm.engine.abort(name)
            del running[name]
        for output in llm.engine.step():
            if output.finished and output.request_id in running:
                assert output.outputs[0].token_ids == expected[running.pop(output.request_id)]
                num_checked += 1
    assert not running
    assert num_checked > 60


def test_unloading_frees_the_slot_of_that_adapter_alone(models: Models, make: MakeLLM) -> None:
    llm = make(max_loras=2)
    first, second, third = models.requests
    for request in (first, second):
        answers(llm, [PROMPTS[0]], [request])
    llm.engine.core.adapters.unload(llm.engine.core.adapters.load(first.lora_name, first.lora_path).digest)
    (found,) = answers(llm, [PROMPTS[1]], [third])
    assert greedy_tokens(models.merged[2], [PROMPTS[1]], [found]) == [found]
    (found,) = answers(llm, [PROMPTS[2]], [second])
    assert greedy_tokens(models.merged[1], [PROMPTS[2]], [found]) == [found]


def test_conversations_are_computed_with_their_adapters(models: Models, make: MakeLLM, tmp_path: Path) -> None:
    ascii_tokenizer().save_pretrained(tmp_path)
    llm = make(skip_tokenizer_init=False, tokenizer=str(tmp_path))
    conversations: list[Any] = [[{"role": "user", "content": "Hello"}] for _ in range(3)]
    loras = [models.requests[0], None, models.requests[1]]
    outputs = llm.chat(conversations, GREEDY, lora_request=loras, use_tqdm=False)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == answers(llm, [output.prompt_token_ids for output in outputs], loras)
    assert len({tuple(tokens) for tokens in found}) == 3
    [output] = llm.chat(conversations[0], GREEDY, lora_request=loras[0], use_tqdm=False)
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (found[0], len(output.prompt_token_ids))
    with pytest.raises(RequestError, match="3 prompts came with 1 LoRA requests"):
        llm.chat(conversations, GREEDY, lora_request=loras[:1])


def test_audits_replay_with_the_same_adapter(models: Models, make: MakeLLM) -> None:
    llm = make(audit_rate=1.0)
    for _ in range(3):
        answers(llm, [PROMPTS[3]], [models.requests[0]])
    audits = llm.engine.core.audits
    assert audits.num_requests > 0
    assert audits.largest_difference < 1e-3


@pytest.mark.parametrize("salt", ["", "mine", "\0", "\0lora 00/", "a/b"])
def test_salts_of_requests_cannot_name_an_adapter(salt: str) -> None:
    adapter = LoadedAdapter("a", "path", "00", 3)
    assert adapter_of(salt_with(None, salt)) == ""
    assert adapter_of(salt_with(adapter, salt)) == "00"
    others = {salt_with(None, each) for each in ("", "mine", "\0", "\0lora 00/", "a/b", "\0lora 00/mine")}
    assert salt_with(adapter, salt) not in others
    assert len(others) == 6


def test_what_an_engine_cannot_serve_is_refused_by_name(models: Models, make: MakeLLM, tmp_path: Path) -> None:
    first = models.requests[0]
    with pytest.raises(RequestError, match="start it with --enable-lora"):
        answers(make(enable_lora=False, max_loras=1), [PROMPTS[0]], [first])
    with pytest.raises(ConfigError, match="has rank 3, more than --max-lora-rank 2"):
        answers(make(max_lora_rank=2), [PROMPTS[0]], [first])
    with pytest.raises(ConfigError, match="adapters may change k_proj, q_proj: add it to --lora-target-modules"):
        answers(make(lora_target_modules=["q_proj", "k_proj"]), [PROMPTS[0]], [first])
    head = adapters.write(tmp_path / "head", adapters.draw({"lm_head": (97, 32)}))
    llm = make()
    with pytest.raises(ConfigError, match=r"changes lm_head\.weight, which adapters can only be merged into"):
        answers(llm, [PROMPTS[0]], [LoRARequest("head", 1, str(head))])
    with pytest.raises(ConfigError, match="holds no adapter"):
        answers(llm, [PROMPTS[0]], [LoRARequest("none", 1, str(tmp_path))])
    with pytest.raises(RequestError, match="1 prompts came with 2 LoRA requests"):
        answers(llm, [PROMPTS[0]], [first, first])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_modules": ["a=x"]}, "--lora-modules needs --enable-lora"),
        ({"max_loras": 2}, "--max-loras needs --enable-lora"),
        ({"max_lora_rank": 8}, "--max-lora-rank needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ["a=x", "a=y"]}, "names that differ"),
        ({"lora_target_modules": ["q_proj"]}, "--lora-target-modules needs --enable-lora"),
        ({"enable_lora": True, "max_loras": 0}, "--max-loras must be"),
        ({"enable_lora": True, "max_lora_rank": 0}, "--max-lora-rank must be"),
        ({"enable_lora": 1}, "--enable-lora must be"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="demo", **options)
