"""Once an engine has started, no kernel is compiled any more, whatever its requests are."""

import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import triton
from safetensors.torch import load_file
from triton.runtime.jit import JITFunction

from strandline import LLM, LoRARequest, SamplingParams
from tests.cpu.engine.small_demo import small_demo
from tests.cpu.models import adapters

MAX_TOKENS = 3000
LENGTHS = [1, 2, 3, 4, 7, 8, 16, 17, 31, 48, 64, 65, 127, 128, 130, 300, 512, 1000, 1025, 2048]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the kernels that are compiled, or loaded from the disk's cache, in the meantime."""
    found: list[str] = []

    def note(*, src: Any, **_: Any) -> None:
        found.append(src.name)

    # Triton's hooks after compilation serialise constants as JSON, which functions among them prevent.
    knobs = triton.knobs.compilation
    before, knobs.listener = knobs.listener, note
    try:
        yield found
    finally:
        knobs.listener = before


def forget_kernels() -> None:
    """Make this process forget what other tests had compiled, which would hide what the start leaves out."""
    for name, module in list(sys.modules.items()):
        if name.startswith("strandline.kernels."):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()


def some_params(rng: random.Random, index: int) -> SamplingParams:
    temperature = rng.choice([0.0, 0.0, 1.0])
    return SamplingParams(
        temperature=temperature,
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logprobs=rng.choice([None, None, 3]),
        prompt_logprobs=rng.choice([None] * 9 + [1]),
        seed=index,
        n=rng.choice([1, 3]) if temperature else 1,
        max_tokens=rng.choice([1, 2, 20, 90]),
        ignore_eos=True,
    )


def live(llm: LLM, seed: int) -> None:
    """Run prompts of all lengths that share, come, go and fork, on the way from one request to many and back."""
    rng = random.Random(seed)
    seen = [[0]]
    for index in range(120):
        head = rng.choice(seen)[: rng.choice([0, 0, 64, 100, 2000])]
        prompt = (head + rng.choices(range(4000), k=rng.choice(LENGTHS)))[:MAX_TOKENS]
        seen.append(prompt)
        llm.engine.add_request(str(index), prompt, some_params(rng, index))
        for _ in range(rng.choice([0, 0, 1, 3, 20])):
            llm.engine.step()
        if rng.random() < 0.1:
            llm.engine.abort(str(rng.randint(0, index)))
    while llm.engine.has_unfinished:
        llm.engine.step()


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_is_compiled_after_the_start(dtype: str, options: dict[str, Any]) -> None:
    forget_kernels()
    with compilations() as at_start:
        llm = LLM("demo", device="cuda", dtype=dtype, memory="2GiB", max_model_len=4096, max_num_seqs=48, **options)
    assert llm.engine.core.start_s["kernels"] > 0
    assert at_start
    with compilations() as found:
        for seed in range(2):
            live(llm, seed)
    assert not found, "\n".join(sorted(set(found)))


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_requests_with_adapters_compile_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors = load_file(Path(small_demo()) / "model.safetensors")
    shapes = {name.removesuffix(".weight"): (len(x), x.shape[1]) for name, x in tensors.items() if x.ndim == 2}
    factors = adapters.draw({name: shape for name, shape in shapes.items() if name.startswith("model.layers")}, seed=1)
    adapter = LoRARequest("adapter", 1, str(adapters.write(tmp_path, factors)))
    forget_kernels()
    settings = {"device": "cuda", "dtype": "bfloat16", "memory": "1GiB", "max_num_seqs": 16, "enable_lora": True}
    llm = LLM(small_demo(), **settings, **options)
    most = llm.engine.core.limits.max_model_len - 20
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [5] * count} for count in LENGTHS if count <= most]
    with compilations() as found:
        for prompt in prompts:
            llm.generate([prompt], params, lora_request=adapter, use_tqdm=False)
        some = [adapter if index % 2 else None for index in range(len(prompts))]
        llm.generate(prompts, params, lora_request=some, use_tqdm=False)
    assert not found, "\n".join(sorted(set(found)))


def test_closing_gives_up_graphs() -> None:
    llm = LLM(small_demo(), device="cuda", memory="1GiB", max_num_seqs=4)
    graphs = weakref.ref(llm.engine.core.executor.runner._graphs)  # type: ignore[attr-defined]
    assert graphs() is not None
    llm.close()
    assert graphs() is None
